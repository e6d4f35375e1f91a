"""Several hosts on one machine: train on them, lose one, go on with the rest, over a bad network.

    python tests/hosts.py --write docs/evidence/hosts.md     (make soak; needs root, for namespaces)
    python tests/hosts.py --only lossy

A host is a network, a mount and a UTS namespace: its own name, address and /etc/hosts, in
which its name is a loopback address, as Debian writes it. All are wired to a switch in this
process that sees every frame, and can lose, delay or swallow it. Files are shared.

    elastic      four hosts under torchrun's rendezvous; one is killed: the others end, meet again
                 and go on, without anybody's help
    silent       three hosts under `accelerate launch`; nothing is heard of one any more, as if its
                 power had failed: the others end and name it; the same command on the rest goes on
    lossy        two hosts, each frame lost with 1 %, and 50 ms late: the run ends well

In each the loss of every step is that of one plain process: the same samples in the same order.
"""

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import platform
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from rank_faults import prepare  # noqa: E402

BIN = Path(sys.executable).parent
STEPS, BATCH = 12, 12  # the global batch is one of 1 to 4 ranks alike
START = 400.0  # seconds in which a run begins, on a machine with other work too
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_BROADCAST = b"\xff" * 6


def available() -> str:
    """Return why there can be no hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not here"
    try:
        Switch(0).close()
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True)
    return tried.stderr.decode().strip()


class Switch:
    """A switch between hosts: a frame goes to the port of its address, to all where that is not
    known.

    Args:
        ports: tap devices to make, named `tap-PID-N`.
        loss: share of frames that are lost.
        delay: seconds that each takes.
    """

    def __init__(self, ports: int, *, loss: float = 0.0, delay: float = 0.0, seed: int = 0) -> None:
        self.loss, self.delay = loss, delay
        self.silent: set[int] = set()  # ports whose frames are swallowed, and those to them
        self.frames = self.lost = 0
        self.names = [f"tap-{os.getpid()}-{i}" for i in range(ports)]
        self._taps = [self._tap(name) for name in self.names]
        self._known: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._chance, self._stop = random.Random(seed), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @staticmethod
    def _tap(name: str) -> int:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        return tap

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        for tap in self._taps:
            os.close(tap)

    def _run(self) -> None:
        while not self._stop:
            wait = 0.2 if not self._late else max(0.0, self._late[0][0] - time.monotonic())
            for tap in select.select(self._taps, [], [], min(wait, 0.2))[0]:
                with contextlib.suppress(OSError):  # no more for now, or its host is gone
                    for _ in range(64):
                        self._take(self._taps.index(tap), os.read(tap, 1 << 16))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._late)
                with contextlib.suppress(OSError):  # a port that is down takes none
                    os.write(self._taps[port], frame)

    def _take(self, port: int, frame: bytes) -> None:
        self.frames += 1
        to, sender = frame[:6], frame[6:12]
        self._known[sender] = port
        ports = [self._known[to]] if to in self._known else range(len(self._taps))
        for other in ports:
            if other == port or {port, other} & self.silent:
                continue
            if self._chance.random() < self.loss:
                self.lost += 1
                continue
            due = time.monotonic() + self.delay
            heapq.heappush(self._late, (due, self.frames, other, frame))


class Host:
    """Namespaces, held by a process that sleeps."""

    def __init__(self, number: int, device: str, folder: Path, count: int) -> None:
        self.name, self.address = f"host{number}", f"10.99.0.{number + 1}"
        holder = ["unshare", "--net", "--mount", "--uts", "sleep", "infinity"]
        self._holder = subprocess.Popen(holder)
        self._enter = ["nsenter", "-t", str(self._holder.pid), "-n", "-m", "-u"]
        self._running: list[subprocess.Popen[str]] = []
        own_net = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino == own_net:
            time.sleep(0.01)
        others = [f"10.99.0.{i + 1} host{i}" for i in range(count) if i != number]
        hosts = folder / f"hosts-{number}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others, ""]))
        self._do("hostname", self.name)
        self._do("mount", "--bind", str(hosts), "/etc/hosts")
        subprocess.run(["ip", "link", "set", device, "netns", str(self._holder.pid)], check=True)
        self._do("ip", "link", "set", device, "name", "eth0")
        self._do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            self._do("ip", "link", "set", interface, "up")

    def _do(self, *command: str) -> None:
        subprocess.run([*self._enter, *command], check=True)

    def start(self, command: list[str], output: Path) -> subprocess.Popen[str]:
        """Start a program on this host, whose output goes to a file."""
        with open(output, "w") as f:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            started = subprocess.Popen([*self._enter, *command], stdout=f, stderr=f, text=True,
                                       env=environment, start_new_session=True)  # fmt: skip
        self._running.append(started)
        return started

    def processes(self) -> list[int]:
        """Return what runs on this host, but for what holds it."""
        net = os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.stat(entry / "ns/net").st_ino == net and entry.name != str(self._holder.pid):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End all that runs on this host, at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running:
            process.wait()

    def close(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()


@contextlib.contextmanager
def hosts(count: int, folder: Path, **network: Any) -> Iterator[tuple[Switch, list[Host]]]:
    """Have `count` hosts on a switch until the end of the block."""
    switch = Switch(count, **network)
    made: list[Host] = []
    try:
        made += [Host(i, switch.names[i], folder, count) for i in range(count)]
        yield switch, made
    finally:
        for host in made:
            host.close()
        switch.close()


def settings(folder: Path, output: Path, parts: int) -> list[str]:
    """Return the command of a run, of whose batch a micro-batch is one of so many parts."""
    return [
        str(HERE.parent / "recipes" / "pretrain.py"),
        "--model.name_or_path", str(folder / "model"),
        "--data.train_files", str(folder / "text.txt"),
        "--data.sequence_length", "32",
        "--sharding.param_dtype", "float32",
        "--train.per_device_train_batch_size", str(BATCH // parts),
        "--train.max_steps", str(STEPS),
        "--train.logging_steps", "1",
        "--checkpoint.save_steps", "2",
        "--output_dir", str(output),
    ]  # fmt: skip


def by_torchrun(all_hosts: list[Host], folder: Path, output: Path, at_least: int) -> list[Any]:
    """Start a run on all hosts by torchrun's rendezvous; those who meet again go on."""
    # torch does not know a host by its address whose name is a loopback address.
    hosting = {host: f"last_call_timeout=5,is_host={host is all_hosts[0]}" for host in all_hosts}
    command = [
        str(BIN / "torchrun"), "--nnodes", f"{at_least}:{len(all_hosts)}", "--nproc_per_node", "1",
        "--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_id", "run",
        "--rdzv_endpoint", f"{all_hosts[0].address}:29400",
        *settings(folder, output, BATCH), "--train.global_batch_size", str(BATCH),
    ]  # fmt: skip
    return [
        host.start([command[0], "--rdzv_conf", conf, *command[1:]], folder / f"{host.name}.log")
        for host, conf in hosting.items()
    ]


def by_accelerate(all_hosts: list[Host], folder: Path, output: Path) -> list[Any]:
    """Start a run on all hosts as accelerate_configs/multi_node.yaml says, on CPUs."""
    started = []
    for rank, host in enumerate(all_hosts):
        command = [
            str(BIN / "accelerate"), "launch",
            "--config_file", str(HERE.parent / "accelerate_configs" / "cpu.yaml"),
            "--num_machines", str(len(all_hosts)), "--num_processes", str(len(all_hosts)),
            "--machine_rank", str(rank), "--main_process_ip", all_hosts[0].address,
            "--main_process_port", "29500", *settings(folder, output, len(all_hosts)),
        ]  # fmt: skip
        started.append(host.start(command, folder / f"{host.name}.log"))
    return started


def logged(output: Path) -> dict[int, float]:
    """Return step -> loss."""
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def until(what: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so; whether it became so."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def said_by(folder: Path) -> str:
    return "\n".join(f.read_text() for f in sorted(folder.glob("host*.log")))


def same_losses(output: Path, expected: dict[int, float]) -> list[str]:
    found = logged(output)
    lines = (output / "metrics.jsonl").read_text().count("\n")
    if sorted(found) != sorted(expected) or lines != len(found):
        return [f"steps {sorted(found)}, expected 1 to {STEPS}, each once"]
    off = {s: abs(found[s] - e) for s, e in expected.items() if abs(found[s] - e) > 1e-4}
    return [f"other losses than one process: {off}"] if off else []


def elastic(folder: Path, expected: dict[int, float], count: int = 4) -> dict[str, Any]:
    output, wrong = folder / "run", []
    with hosts(count, folder) as (_, made):
        started = by_torchrun(made, folder, output, at_least=count - 1)
        if not until(lambda: max(logged(output), default=0) >= 5, START):
            return {"wrong": [f"no step 5 in {START:.0f} s", said_by(folder)[-2000:]]}
        before = set(made[0].processes())
        made[-1].kill()
        killed = time.monotonic()
        ranks = [p for p in before if _is_rank(p)]
        gone = until(lambda: not any(_is_rank(p) for p in ranks), 60)
        seconds = time.monotonic() - killed
        wrong += [] if gone else ["the other ranks did not end within 60 s"]
        for process in started[:-1]:
            try:
                if process.wait(300):
                    wrong.append(f"exit code {process.returncode}: {said_by(folder)[-2000:]}")
            except subprocess.TimeoutExpired:
                wrong.append("did not go on to the end within 300 s")
    wrong += same_losses(output, expected)
    return {"wrong": wrong, "hosts": f"{count} -> {count - 1}", "ended": seconds,
            "cause": cause(folder)}  # fmt: skip


def _is_rank(pid: int) -> bool:
    """Whether a process is alive and has been started as a rank."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return len(words) > 1 and words[1].endswith((b"pretrain.py", b"-u"))
    except OSError:
        return False


def silent(folder: Path, expected: dict[int, float], count: int = 3) -> dict[str, Any]:
    output, wrong = folder / "run", []
    with hosts(count, folder) as (switch, made):
        started = by_accelerate(made, folder, output)
        if not until(lambda: max(logged(output), default=0) >= 5, START):
            return {"wrong": [f"no step 5 in {START:.0f} s", said_by(folder)[-2000:]]}
        switch.silent = {count - 1}
        lost = time.monotonic()
        if not until(lambda: all(p.poll() is not None for p in started[:-1]), 120):
            wrong.append("the other hosts did not end within 120 s")
        seconds = time.monotonic() - lost
        told = cause(folder)
        if made[-1].name not in told or "its host is lost" not in told:
            wrong.append(f"the lost host is not named: {told}")
        made[-1].kill()
        again = by_accelerate(made[:-1], folder, output)
        codes = [process.wait(300) for process in again]
        wrong += [f"exit codes {codes}: {said_by(folder)[-2000:]}"] if any(codes) else []
    wrong += same_losses(output, expected)
    return {"wrong": wrong, "hosts": f"{count} -> {count - 1}", "ended": seconds, "cause": told}


def lossy(folder: Path, expected: dict[int, float], count: int = 2) -> dict[str, Any]:
    output = folder / "run"
    with hosts(count, folder, loss=0.01, delay=0.05) as (switch, made):
        codes = [process.wait(560) for process in by_accelerate(made, folder, output)]
        frames, lost = switch.frames, switch.lost
    wrong = [f"exit codes {codes}: {said_by(folder)[-2000:]}"] if any(codes) else []
    wrong += same_losses(output, expected)
    wrong += [] if lost else ["no frame was lost"]
    return {"wrong": wrong, "hosts": str(count), "cause": f"{lost} of {frames:,} frames were lost"}


CHAPTERS = {"elastic": elastic, "silent": silent, "lossy": lossy}


def cause(folder: Path) -> str:
    lines = said_by(folder).splitlines()
    return next((line for line in lines if line.startswith("watchdog: ")), "")


def one_process(folder: Path) -> dict[int, float]:
    """Return the losses of the run in one plain process."""
    output = folder / "plain"
    command = [sys.executable, *settings(folder, output, 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return logged(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*CHAPTERS], default=[*CHAPTERS])
    parser.add_argument("--write", type=Path, help="write the table here")
    args = parser.parse_args()
    if why := available():
        print(f"no hosts can be made here: {why}", file=sys.stderr)
        return 1
    results = {}
    with tempfile.TemporaryDirectory(prefix="hosts-") as made:
        prepare(Path(made))
        expected = one_process(Path(made))
        for name in args.only:
            folder = Path(made, name)
            folder.mkdir()
            for shared in ("model", "text.txt"):
                (folder / shared).symlink_to(Path(made, shared))
            begun = time.monotonic()
            result = CHAPTERS[name](folder, expected)
            results[name] = result | {"seconds": time.monotonic() - begun}
            print(json.dumps({name: results[name]}, indent=1), flush=True)
    if args.write:
        write_report(args.write, results)
    return 1 if any(result["wrong"] for result in results.values()) else 0


def write_report(file: Path, results: dict[str, Any]) -> None:
    import torch

    lines = [
        "# Several hosts: measured",
        "",
        "Written by `tests/hosts.py` (`make soak`). Hosts are namespaces of one machine, with "
        "names and addresses of their own, wired to a switch that can lose and delay frames. "
        f"{STEPS} steps on gloo; right is a run whose loss at every step is that of one plain "
        "process within 1e-4, each step logged once.",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| | hosts | the others had ended after | whole run | wrong |",
        "|---|---|---|---|---|",
    ]
    for name, r in results.items():
        ended = f"{r['ended']:.0f} s" if "ended" in r else ""
        count = len(r["wrong"])
        lines.append(
            f"| {name} | {r.get('hosts', '')} | {ended} | {r['seconds']:.0f} s | {count} |"
        )
    lines += ["", *(f"- {name}: {r.get('cause', '')}" for name, r in results.items())]
    file.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
