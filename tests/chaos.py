"""Ranks killed at random under a launcher that restarts them, and runs asked to end by signals.

    python tests/chaos.py --write docs/evidence/chaos.md     (make soak)
    python tests/chaos.py --short                   what tests/test_chaos.py runs
    python tests/chaos.py --only kills --break forget       a broken run must be noticed

Each run trains a tiny model with dropout on two gloo ranks, and is compared with one that nothing
befell. What must hold:

    kills    SIGKILL to a random rank: the launcher starts the ranks again, the run ends by itself
             with the same weights, random state, position of the data and losses, to the bit; the
             steps that are done twice are at most kills x checkpoint.save_steps
    signals  SIGTERM, SIGINT or SIGUSR1 to the launcher or to one rank, in a random phase: all ranks
             are gone within checkpoint.grace_seconds, with the documented exit code, nothing is
             started again, at most one finished step is not committed; the same command then ends
             with the weights of the undisturbed run

Kills go to real launches. Most signals go to forks of warm processes, under what torch's agent does
(`Forks`), the rest to real launchers. Phases are seen by a recipe that writes down where it is.
"""

import argparse
import importlib
import json
import os
import pkgutil
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import distributed  # noqa: E402
import psutil  # noqa: E402
import torch.distributed as dist  # noqa: E402
from conftest import BIN, ROOT, free_port, save_byte_tokenizer, save_tiny_model  # noqa: E402
from test_run_kills import checkpoints  # noqa: E402
from warm import Warm  # noqa: E402

from toolkit import recipes  # noqa: E402
from toolkit.checkpoint.commit import committed_steps, find_damaged_files  # noqa: E402
from toolkit.errors import EXIT_CODE_PREEMPTED  # noqa: E402

WORLD = 2
GRACE = 60  # checkpoint.grace_seconds
GONE = 30  # seconds in which all ranks are gone where one was killed
PLACES = {
    "start": "toolkit.training.launch.start",
    "tokenise": "toolkit.data.prepare.prepare_data",
    "load": "toolkit.loading.load_or_init",
    "step": "toolkit.training.Update.step",
    "evaluate": "toolkit.training.evaluate_metrics",
    "save": "toolkit.checkpoint.save",
    "export": "toolkit.export.Exporter.export",
}
"""Phase -> the function that it is in; `start` lasts until the data is read."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
LAUNCHERS = ("torchrun", "accelerate launch", "toolkit train")


SHORT = {"steps": 30, "kills": 2, "save_steps": 5, "signals": 7, "launches": 0}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of a run that is killed")
    parser.add_argument("--kills", type=int, default=10, help="of ranks, under each launcher")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--signals", type=int, default=91, help="to forks of warm processes")
    parser.add_argument("--launches", type=int, default=9, help="real ones that get a signal")
    parser.add_argument("--short", action="store_true", help="a version of a minute")
    parser.add_argument("--only", nargs="*", choices=[*CHAPTERS], default=[*CHAPTERS])
    parser.add_argument("--break", dest="broken", choices=[*BROKEN], help="a negative control")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the table here")
    if parser.parse_args(argv).short:
        parser.set_defaults(**SHORT)
    args = parser.parse_args(argv)
    args.launchers = ("torchrun",) if args.short else ("torchrun", "toolkit train")
    faults, rows = [], []
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as made:
        stage = Stage(Path(made), args.broken)
        for name in args.only:
            for row in CHAPTERS[name](stage, args):
                rows.append(row)
                faults += [f"{row.title}: {fault}" for fault in row.faults]
                said = {"runs": row.title, **row.figures, "faults": len(row.faults)}
                print(json.dumps(said), flush=True)
    for fault in faults[:10]:
        print(f"  FAULT: {fault}", flush=True)
    if args.write:
        write_report(args.write, rows, args.seed)
    return 1 if faults else 0


@dataclass
class Row:
    """What was done to the runs of a kind, and the rules that they broke."""

    title: str
    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


class Stage:
    """A tiny model, a text, and runs on them."""

    def __init__(self, folder: Path, broken: str | None) -> None:
        self.folder, self.broken, self._runs = folder, broken, 0
        (folder / "model").mkdir()
        save_byte_tokenizer(folder / "model")
        save_tiny_model(folder / "model", attention_dropout=0.1)

    def scene(self) -> Path:
        """Return a new folder, with a text that nothing is cached of, and the recipe to run."""
        self._runs += 1
        scene = self.folder / f"run-{self._runs}"
        (scene / "recipes").mkdir(parents=True)
        shutil.copyfile(argparse.__file__, scene / "text.txt")
        (scene / "recipes" / "pretrain.py").write_text(
            f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
            f"import chaos; chaos.observed({str(scene)!r}, {self.broken!r})\n"
        )
        return scene

    def settings(self, steps: int, save_steps: int, *more: str) -> list[str]:
        return [
            "--model.name_or_path", str(self.folder / "model"),
            "--data.train_files", "text.txt",
            "--data.sequence_length", "32",
            "--data.eval_split", "0.1",
            "--data.max_eval_samples", "64",
            "--sharding.param_dtype", "float32",
            "--train.per_device_train_batch_size", "2",
            "--train.max_steps", str(steps),
            "--train.logging_steps", "1",
            "--train.eval_steps", str(save_steps),
            "--checkpoint.save_steps", str(save_steps),
            "--checkpoint.grace_seconds", str(GRACE),
            "--checkpoint.export_at_end", "true",
            "--output_dir", "run",
            *more,
        ]  # fmt: skip

    def undisturbed(self, settings: list[str]) -> Path:
        """Return the scene of a run that nothing befalls."""
        scene = self.scene()
        script = scene / "recipes" / "pretrain.py"
        ended = distributed.run_recipe_ranks(script, WORLD, *settings, cwd=scene)
        if ended.returncode:
            raise RuntimeError(ended.stderr)
        return scene


def final(scene: Path) -> dict[str, object]:
    """Return what a run's last checkpoint says of its state, and the loss there."""
    found = checkpoints(scene / "run")
    return found[max(found)]


def unequal(scene: Path, expected: Path, steps: int) -> list[str]:
    """Return what of a finished run differs from the undisturbed one."""
    found = final(scene)
    faults = [f"{k} differs at the end" for k, v in final(expected).items() if found[k] != v]
    lines = [json.loads(line) for line in (scene / "run/metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if "loss" in line]
    if logged != list(range(1, steps + 1)):
        faults.append(f"{len(logged)} steps are logged, {len({*logged})} different, of {steps}")
    exported = {
        file.name: file.read_bytes() for file in (scene / "run").rglob("export*/**/*.safetensors")
    }
    there = {
        file.name: file.read_bytes()
        for file in (expected / "run").rglob("export*/**/*.safetensors")
    }
    if not there or exported != there:
        faults.append("the export differs")
    return faults


def observed(scene: str, broken: str | None) -> None:
    """Run the recipe and write down which phases it enters and leaves: in the ranks."""
    file = Path(scene, f"phases-{os.environ['RANK']}")  # of the newest start
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
    os.write(log, f"process {os.getpid()}\n".encode())
    for phase, place in PLACES.items():
        module, name = place.rsplit(".", 1)
        owner = pkgutil.resolve_name(module)
        setattr(owner, name, _noted(getattr(owner, name), phase, log))
    if broken:
        BROKEN[broken]()
    runpy.run_path(str(ROOT / "recipes" / "pretrain.py"), run_name="__main__")


def _noted(plain: Callable[..., Any], phase: str, log: int) -> Callable[..., Any]:
    def noted(*args: Any, **more: Any) -> Any:
        os.write(log, f"{phase} in\n".encode())
        try:
            return plain(*args, **more)
        finally:
            os.write(log, f"{phase} out\n".encode())

    return noted


def phases(scene: Path, rank: int = 0) -> list[str]:
    """Return what a rank wrote down so far."""
    file = scene / f"phases-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def _forget() -> None:
    """A start that does not look for checkpoints."""
    importlib.import_module("toolkit.checkpoint").find_resumable = lambda *args: None  # type: ignore[attr-defined]


def _deafen() -> None:
    """A run that hears signals and does nothing."""
    preemption = importlib.import_module("toolkit.training.guards.preemption")
    preemption._handle_signal = lambda number, frame: None  # type: ignore[attr-defined]


BROKEN: dict[str, Callable[[], None]] = {"forget": _forget, "deafen": _deafen}


class Forks:
    """Ranks in forks of warm processes, under what torch's agent does: it holds the store, and once
    one rank has ended it sends SIGTERM to the others, 30 s later SIGKILL.
    """

    def __init__(self, warm: list[Warm], scene: Path, settings: list[str]) -> None:
        self._warm, self._scene = warm, scene
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        script, place = str(scene / "recipes" / "pretrain.py"), str(scene)
        with mock.patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
            for rank in range(WORLD):
                warm[rank].start(
                    distributed._recipe_entry,
                    *(rank, WORLD, self._store.port, script, tuple(settings), place, place),
                )

    def running(self) -> bool:
        return not any(distributed.select.select(self._warm, [], [], 0)[0])

    def send(self, number: int, to: str) -> None:
        for rank, warm in enumerate(self._warm):
            if to in ("launcher", f"rank {rank}") and self.running():
                warm.send(number)

    def wait(self, patience: float) -> list[int]:
        """Return the ranks' exit codes."""
        codes, waiting = [0] * WORLD, set(range(WORLD))
        until, told = time.monotonic() + patience, False
        while waiting:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = distributed.select.select([self._warm[r] for r in waiting], [], [], left)
            for rank in [r for r in waiting if self._warm[r] in ready]:
                waiting.remove(rank)
                codes[rank] = self._warm[rank].ended()
            for rank in waiting if not told or not ready else ():
                self._warm[rank].send(signal.SIGTERM if ready else signal.SIGKILL)
            if ready and not told:
                told, until = True, min(until, time.monotonic() + GONE)
        return codes

    def said(self) -> str:
        files = [self._scene / f"{r}.{kind}" for r in range(WORLD) for kind in ("out", "err")]
        return "".join(file.read_text() for file in files)


class Launch:
    """A real launcher with its ranks."""

    def __init__(self, launcher: str, scene: Path, settings: list[str], restarts: int) -> None:
        port, processes = str(free_port()), str(WORLD)
        script = str(scene / "recipes" / "pretrain.py")
        command = {
            "torchrun": ["torchrun", "--nproc_per_node", processes, "--master_port", port],
            "accelerate launch": ["accelerate", "launch"],
            "toolkit train": ["toolkit", "train", *settings],
        }[launcher]
        if launcher != "torchrun":
            cpu = ROOT / "accelerate_configs" / "cpu.yaml"
            command += ["--config_file" if "launch" in command else "--accelerate_config", str(cpu)]
            command += ["--num_processes", processes, "--main_process_port", port]
        command += ["--max_restarts", str(restarts)]
        command += [script, *settings] if launcher != "toolkit train" else []
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment["PYTHONPATH"] = str(ROOT)
        self._log = scene / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=scene,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self._seen: set[psutil.Process] = set()

    def ranks(self) -> dict[str, psutil.Process]:
        """Return the processes that are there now, by rank."""
        found, children = {}, []
        with suppress(psutil.NoSuchProcess):  # it has ended
            children = psutil.Process(self._process.pid).children()
        for child in children:
            try:
                rank = child.environ().get("RANK")
            except psutil.Error:  # it has just ended
                continue
            if rank:  # else it is the launcher's fork still
                found[rank] = child
        self._seen |= {*found.values()}
        return found

    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int, to: str) -> None:
        ranks = self.ranks()
        if to == "launcher":
            self._process.send_signal(number)
        elif to[-1] in ranks:
            ranks[to[-1]].send_signal(number)

    def wait(self, patience: float) -> list[int]:
        """Return the launcher's exit code; ranks that outlive it are killed, and their code -9."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = -signal.SIGKILL
        _, alive = psutil.wait_procs(self._seen, 1)
        for rank in alive:
            rank.kill()
        return [code, *[-signal.SIGKILL for _ in alive]]

    def said(self) -> str:
        return self._log.read_text()


def wait_until(done: Callable[[], Any], running: Callable[[], bool], patience: float) -> bool:
    """Return whether it is `done`, before the run ends or `patience` seconds are over."""
    until = time.monotonic() + patience
    while not done():
        if not running() or time.monotonic() > until:
            return bool(done())
        time.sleep(0.002)
    return True


# --------------------------------------------------------------------------------------------------
# Kills
# --------------------------------------------------------------------------------------------------


def kills(stage: Stage, args: argparse.Namespace) -> list[Row]:
    settings = stage.settings(args.steps, args.save_steps)
    expected = stage.undisturbed(settings)
    return [_killed(stage, args, launcher, expected, settings) for launcher in args.launchers]


def _killed(
    stage: Stage, args: argparse.Namespace, launcher: str, expected: Path, settings: list[str]
) -> Row:
    """Kill ranks of one run: a third of them at any time after a start, the others at a step."""
    chance, begun = random.Random(f"{args.seed} {launcher}"), time.monotonic()
    scene = stage.scene()
    launch = Launch(launcher, scene, settings, restarts=args.kills)
    file = scene / "run" / "metrics.jsonl"
    last = args.steps - 2 * args.save_steps  # later ones might come when all is done
    possible = range(args.save_steps + 1, last)
    at_steps = sorted(chance.sample(possible, args.kills - args.kills // 3))
    plans: list[int | None] = [*at_steps, *([None] * (args.kills // 3))]
    chance.shuffle(plans)
    left = len(at_steps)
    slowest, where = 0.0, Counter[str]()
    for plan in plans:
        if plan is None:
            soon = time.monotonic() + chance.uniform(0.0, 12.0)  # of a start, not beyond its steps
            limit = last if left == 0 else at_steps[-left]
            wait_until(
                lambda t=soon, s=limit: time.monotonic() > t or _newest(file) >= s,
                launch.running,
                60,
            )
        else:
            step, left = at_steps[-left], left - 1
            wait_until(lambda s=step: _newest(file) >= s, launch.running, 300)
        if not wait_until(lambda: len(launch.ranks()) == WORLD, launch.running, 60):
            break
        victims = launch.ranks()
        rank = chance.choice(sorted(victims))
        others = [process for name, process in victims.items() if name != rank]
        noted = phases(scene, int(rank))
        begun_to_note = noted[:1] == [f"process {victims[rank].pid}"]
        where[phase_of(noted) if begun_to_note else "imports"] += 1
        victims[rank].kill()
        killed = time.monotonic()
        psutil.wait_procs(others, GONE)
        slowest = max(slowest, time.monotonic() - killed)
    code, *orphans = launch.wait(600)
    said = launch.said()
    repeated, forgotten = _repeated(said)
    row = Row(f"kills under {launcher}", seconds=time.monotonic() - begun)
    row.figures = {
        "steps": args.steps, "kills": where.total(), "of them in": dict(where),
        "steps done twice": repeated, "allowed": where.total() * args.save_steps,
        "others gone after s, at most": round(slowest, 1),
    }  # fmt: skip
    checks = {
        f"exit code {code}": code != 0,
        f"only {where.total()} kills came in time": where.total() < args.kills,
        f"{len(orphans)} orphans": bool(orphans),
        f"{repeated} steps were done twice": repeated > where.total() * args.save_steps,
        f"a rank was there {slowest:.0f} s after another's end": slowest >= GONE,
        f"{forgotten} steps were done again that were saved": forgotten > 0,
    }
    row.faults = [fault for fault, broken in checks.items() if broken]
    if code == 0:
        row.faults += unequal(scene, expected, args.steps)
    else:
        row.faults.append(said[-600:])
    return row


def _repeated(said: str) -> tuple[int, int]:
    """Return how many steps a log has twice, and how often one follows that was saved before."""
    saved = repeated = forgotten = newest = 0
    for kind, number in re.findall(r"^(step +|saved .*/step-0*)(\d+)", said, re.MULTILINE):
        step = int(number)
        if kind.startswith("saved"):
            saved = max(saved, step)
            continue
        repeated += step <= newest
        forgotten += step <= saved
        newest = max(newest, step)
    return repeated, forgotten


def _newest(file: Path) -> int:
    """Return the newest step that is logged whole."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [int(m[1]) for m in map(re.compile(r'\{"step": (\d+),.*\}$').match, lines) if m]
    return max(found, default=0)


def phase_of(noted: list[str]) -> str:
    """Return the phase that a rank is in."""
    entered = [line.split()[0] for line in noted if line.endswith(" in")]
    left = Counter(line.split()[0] for line in noted if line.endswith(" out"))
    inside = [p for p in dict.fromkeys(reversed(entered)) if entered.count(p) > left[p]]
    inner = [p for p in inside if p != "start"]
    if inner:
        return inner[0]
    if not entered:
        return "imports"
    return "start" if entered[-1] == "start" else "between"


# --------------------------------------------------------------------------------------------------
# Signals
# --------------------------------------------------------------------------------------------------


def signals(stage: Stage, args: argparse.Namespace) -> list[Row]:
    steps, save_steps = 12, 5
    settings = stage.settings(steps, save_steps)
    expected = stage.undisturbed(settings)
    counts = Counter(line.split()[0] for line in phases(expected) if line.endswith(" in"))
    missing = [PLACES[phase] for phase in PLACES if not counts[phase]]
    assert not missing, f"an undisturbed run never calls {', '.join(missing)}: correct PLACES"
    chance = random.Random(args.seed)
    warm = distributed.warm_processes(WORLD)
    rows = []
    kinds = {"forks of warm processes": args.signals}
    kinds |= {name: args.launches // len(LAUNCHERS) for name in LAUNCHERS}
    for kind, count in kinds.items():
        row, begun, tally = Row(f"signals to {kind}"), time.monotonic(), Tally()
        while tally.sent < count and len(row.faults) < (1 if stage.broken else 5):
            scene = stage.scene()
            before = sum(done.figures["sent"] for done in rows)
            plan = Plan.draw(chance, before + tally.sent, counts, kind)
            if kind in LAUNCHERS:
                run: Forks | Launch = Launch(kind, scene, settings, restarts=2)
            else:
                run = Forks(warm, scene, settings)
            found = tally.send(run, scene, plan, kind, counts)
            again = distributed.run_recipe_ranks("pretrain", WORLD, *settings, cwd=scene)
            found += [f"the next start: {again.stderr[-300:]}"] * bool(again.returncode)
            found += unequal(scene, expected, steps) if again.returncode == 0 else []
            row.faults += [f"{plan}: {fault}" for fault in found]
            if tally.sent % 10 == 0 or found:
                print(f"{row.title}: {tally.sent} of {count}, faults: {found}", flush=True)
            shutil.rmtree(scene, ignore_errors=True)
        row.figures, row.seconds = tally.figures(), time.monotonic() - begun
        rows += [row] * bool(count)
    return rows


@dataclass(frozen=True)
class Plan:
    """Where a signal is to come: at the `nth` time that rank 0 is in a phase, `after` seconds."""

    phase: str
    nth: int
    after: float
    signal: str
    to: str

    @classmethod
    def draw(cls, chance: random.Random, number: int, counts: Counter[str], kind: str) -> "Plan":
        phase = [*PLACES][number % len(PLACES)]
        to = chance.choice(("launcher", "rank 0", "rank 1"))
        agent = to == "launcher" and kind in LAUNCHERS[:2]
        known = SIGNALS[:2] if agent else SIGNALS  # torch's agent knows no SIGUSR1 unless told to
        after = chance.choice((0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.2)))
        return cls(phase, chance.randint(1, counts[phase]), after, chance.choice(known), to)


class Tally:
    """What came of the signals."""

    def __init__(self) -> None:
        self.sent = self.late = 0
        self.slowest, self.lost = 0.0, 0
        self.phases, self.codes = Counter[str](), Counter[str]()
        self.signals, self.to = Counter[str](), Counter[str]()

    def send(
        self, run: Forks | Launch, scene: Path, plan: Plan, kind: str, counts: Counter[str]
    ) -> list[str]:
        """Send the signal that is planned; return what is wrong with what the run then did."""
        begun = f"{plan.phase} in"

        def is_there() -> bool:
            # And all listen: a fork that has just begun may lose a signal, as Python does there.
            listening = all("start in" in phases(scene, rank) for rank in range(WORLD))
            return listening and phases(scene).count(begun) >= plan.nth

        came = wait_until(is_there, run.running, 120)
        time.sleep(plan.after)
        noted = phases(scene)
        sent = time.monotonic()
        run.send(getattr(signal, plan.signal), plan.to)
        codes = run.wait(GRACE + 5)
        took, said = time.monotonic() - sent, run.said()
        if not came:
            return [f"the phase did not come: {said[-600:]}"]
        if not any(codes) and noted.count("save out") == counts["save"]:
            self.late += 1  # it came when all was done
            return []
        by_agent = kind in LAUNCHERS[:2]
        code, right = codes[0], 1 if by_agent else EXIT_CODE_PREEMPTED
        if kind not in LAUNCHERS:  # as `toolkit train` would end
            code = recipes._choose_exit_code(dict(enumerate(codes)))
        done, kept = noted.count("step out"), committed_steps(scene / "run")
        saved = max(kept, default=0)
        self._count(plan, phase_of(noted), code, done - saved, took)
        damaged = [file for folder in kept.values() for file in find_damaged_files(folder)]
        checks = {
            f"exit codes {codes}, expected {right}: {said[-600:]}": code != right,
            "orphans": kind in LAUNCHERS and len(codes) > 1,
            f"gone after {took:.0f} s": took > GRACE,
            f"{done} steps were done, {saved} saved": done - saved > 1,
            f"damaged: {damaged[:1]}": bool(damaged),
            "started again": re.search("^restart ", said, re.MULTILINE) is not None,
            f"a traceback: {said[-600:]}": not by_agent and "Traceback" in said,
        }
        return [fault for fault, broken in checks.items() if broken]

    def _count(self, plan: Plan, phase: str, code: int, lost: int, took: float) -> None:
        self.sent += 1
        self.slowest, self.lost = max(self.slowest, took), max(self.lost, lost)
        self.phases[phase] += 1
        self.signals[plan.signal] += 1
        self.to[plan.to] += 1
        self.codes[str(code)] += 1

    def figures(self) -> dict[str, Any]:
        counts = {"signals": self.signals, "to": self.to, "in": self.phases}
        return {
            "sent": self.sent,
            **{name: dict(count) for name, count in counts.items()},
            "exit codes": dict(self.codes),
            "steps lost, at most": self.lost,
            "seconds to the end, at most": round(self.slowest, 1),
            "too late, not counted": self.late,
        }


CHAPTERS: dict[str, Callable[[Stage, argparse.Namespace], list[Row]]] = {
    "kills": kills,
    "signals": signals,
}


def write_report(file: Path, rows: list[Row], seed: int) -> None:
    """Write what was run, on which machine, as a table."""
    import machine

    lines = [
        "# Kills and signals",
        "",
        "What `tests/chaos.py` did to runs of a tiny model with dropout on two ranks; its rules",
        "stand at its top. Faults: a rule was broken, such as weights that differ by a bit from",
        f"those of the undisturbed run. Seed {seed}.",
        "",
        "| | what | faults | s |",
        "|---|---|---|---|",
    ]
    for row in rows:
        what = "; ".join(f"{name}: {_counts(value)}" for name, value in row.figures.items())
        lines.append(f"| {row.title} | {what} | {len(row.faults)} | {row.seconds:.0f} |")
    lines += ["", machine.describe("chaos.py", "torch", "transformers", "accelerate"), ""]
    file.write_text("\n".join(lines).replace("benchmarks/chaos.py", "tests/chaos.py"), "utf-8")


def _counts(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
    return f"{value}"


if __name__ == "__main__":
    sys.exit(main())
