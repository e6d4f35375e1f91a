"""Mutated files, each read by what reads it: is there more than one clear error line?

    python tests/mutations.py --write docs/evidence/mutations.md          (make soak)
    python tests/mutations.py --cases 300 --seed 3               a short one, other mutations
    python tests/mutations.py --only state.json --case 17        one case again, with its traceback

A case is a seed, a kind of file and a number: a copy of what holds the file, the file mutated (see
mutate.py), for half of them the hashes around it made to agree with it, then each reader of it, as
the recipes and the command line call it (see mutation_readers.py). Forks of a warm process run the
cases, some tens each, and this one watches them:

    accepted    read; where the hashes around the file are not made to agree, with the same result
    refused     a ToolkitError of one line, or the command line's exit code with one line
    FAULT       any other exception, result or end; a hang; more memory than allowed

Owns the watch and the judgement; the kinds of files are in mutation_kinds.py.
"""

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import mutate  # noqa: E402
import warm  # noqa: E402
from mutation_kinds import Kind  # noqa: E402

SECONDS, PATIENCE = 5.0, 120.0  # of the processor, and of the clock, which others may slow down
MEGABYTES = 200  # beside what the process has when the case begins
_TO_BEGIN = 300.0  # seconds of the clock
_END_AT = 1000  # megabytes at which a process is ended, for the sake of the machine
_BATCH = 50  # cases of a process
_READERS = 2  # of a case, drawn from those of its kind

# ---- One case, in a fork


@dataclass
class Case:
    """What is said of a case: its outcome, and of a fault what was raised, by which reader."""

    kind: str
    number: int
    outcome: str = "accepted"
    said: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0

    @property
    def fault(self) -> bool:
        return self.outcome == "FAULT"


class Scene:
    """The folder that is read, and where one process stands in a copy of it."""

    def __init__(self, folder: Path, seed: int, kinds: dict[str, Kind]) -> None:
        self.folder, self.seed, self.kinds = folder, seed, kinds

    def stand(self, where: Path, kind: Kind) -> Path:
        """Make `where` the current folder: the scene, of which one part is a copy; return the file
        to mutate.
        """
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        os.chdir(where)
        for path in self.folder.iterdir():
            target = where / path.name
            if path.name != kind.part:
                target.symlink_to(path)
            elif path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)
        return where / kind.file

    def mutated(self, kind: Kind, name: str, number: int, file: Path) -> bool:
        """Mutate a file; return whether it counts: what is around it agrees with it."""
        chance = random.Random(f"{self.seed} {name} {number}")
        content = file.read_bytes()
        bytes_too = (mutate.in_bytes, mutate.in_bytes, mutate.whole)
        for _ in range(5):
            how = chance.choice(
                (*bytes_too, *(kind.mutations * (6 // max(1, len(kind.mutations)))))
            )
            if (made := how(content, chance)) != content:
                break
        file.write_bytes(made)
        if kind.seal is None:
            return not kind.guarded
        if sealed := chance.random() < 0.5:
            kind.seal(file)
        return sealed

    def make(self, name: str, number: int, where: Path) -> bool:
        """Write the mutated file of a case, and what stands around it; see `mutated`."""
        kind = self.kinds[name]
        return self.mutated(kind, name, number, self.stand(where, kind))

    def run(self, name: str, number: int, counts: bool, usual: dict[str, Any]) -> Case:
        """Read what was made; `usual` are the readers' results without a mutation."""
        kind, case = self.kinds[name], Case(name, number)
        chance = random.Random(f"{self.seed} {name} {number} readers")
        for reader in chance.sample(kind.readers, min(_READERS, len(kind.readers))):
            label, result, refusal = attempt(reader)
            if refusal:
                case.outcome, case.said = "FAULT", f"{label}: {refusal}"
                break
            if refusal is not None:
                case.outcome = "refused"
            elif not counts and result is not None and result != usual[label]:
                case.outcome = "FAULT"
                case.said = f"{label}: another result, though the hashes around it are its own"
                break
        return case

    def usual(self, name: str, where: Path) -> dict[str, Any]:
        """Return the results of the readers of a file as it is; each must read it."""
        self.stand(where, self.kinds[name])
        results = {}
        for reader in self.kinds[name].readers:
            label, result, refusal = attempt(reader)
            results[label] = result
            if refusal is not None:
                what = f"{name} is not mutated, and {label} does not read it"
                raise RuntimeError(f"{what}: {refusal or 'see above'}")
        return results


def attempt(reader: Callable[[], Any]) -> tuple[str, Any, str | None]:
    """Call a reader; return its name, its result, and how it refused: None where it did not, empty
    where it did as it may, else what it did.
    """
    from mutation_readers import Refused

    from toolkit.errors import ToolkitError

    label = getattr(reader, "func", reader).__name__
    try:
        return label, reader(), None
    except (ToolkitError, Refused) as error:
        lines = str(error).count("\n") if isinstance(error, ToolkitError) else 0
        what = f"an error of {lines + 1} lines or {len(str(error))} letters: {str(error)[:300]!r}"
        print(f"{label}: {error}", flush=True)  # to the log of the process
        is_one = isinstance(error, Refused) or (not lines and len(str(error)) < 5000)
        return label, None, "" if is_one else what
    except BaseException:  # also Rust's panics
        return label, None, traceback.format_exc(limit=-6)


def serve(scene: Scene, name: str, numbers: Iterable[int], where: Path, pipe: int) -> None:
    """Do cases, in a fork; write a line before and after each."""

    def say(**values: Any) -> None:
        os.write(pipe, json.dumps(values).encode() + b"\n")

    say(begin=-1)
    usual = scene.usual(name, where)
    for number in numbers:
        counts = scene.make(name, number, where)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        begun = time.process_time()
        say(begin=number)
        case = scene.run(name, number, counts, usual)
        case.seconds, case.megabytes = time.process_time() - begun, _resident("VmHWM") - before
        say(end=vars(case))


def _resident(field: str, pid: int | str = "self") -> float:
    """Return megabytes that a process has in memory, or had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = (int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return next(found, 0) / 1024  # nothing, where it has ended


# ---- The watch


class Worker:
    """A fork that does some cases of a kind, seen from outside."""

    def __init__(self, scene: Scene, name: str, numbers: Iterable[int], where: Path) -> None:
        self.name, self.where, self.left = name, where, deque(numbers)
        self.case: Case | None = None
        self._rest = b""
        self._stack = where.with_suffix(".stack")
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(scene, write)
        os.close(write)
        self._begin(None)

    def _child(self, scene: Scene, pipe: int) -> None:
        code = 1
        try:
            os.setpgid(0, 0)  # with what it starts it can be ended
            os.close(self.pipe)
            log = os.open(self.where.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            stack = open(self._stack, "w")  # noqa: SIM115  # to the end of the process
            faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
            serve(scene, self.name, self.left, self.where, pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _begin(self, number: int | None) -> None:
        self.case = None if number is None else Case(self.name, number)
        self._clock, self._cpu = time.monotonic(), self._processor()
        self._memory = _resident("VmRSS", self.pid)

    def _processor(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def read(self) -> list[Case] | None:
        """Return the cases that were done since; None at the end of the process."""
        block = os.read(self.pipe, 2**16)
        if not block:
            return None
        *lines, self._rest = (self._rest + block).split(b"\n")
        done = []
        for line in map(json.loads, lines):
            if "end" in line:
                done.append(Case(**line["end"]))
                self.case = None
                self.left.popleft()
            elif line["begin"] >= 0:
                self._begin(line["begin"])
        return done

    def over(self) -> str | None:
        """Return what it has too much of, None where it may go on."""
        if self.case is None and time.monotonic() - self._clock > _TO_BEGIN:
            return "does not begin"
        if self.case is None:
            return None
        seconds, clock = self._processor() - self._cpu, time.monotonic() - self._clock
        if seconds > SECONDS or clock > PATIENCE:
            return f"hangs: {seconds:.1f} s of the processor, {clock:.1f} s of the clock"
        if (memory := _resident("VmRSS", self.pid) - self._memory) > _END_AT:
            return f"takes memory: {memory:.0f} MB"
        return None

    def end(self, what: str | None = None) -> Case | None:
        """End the process, or see how it ended; return the case that it did not come back from."""
        if what is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # writes where it is
                time.sleep(0.3)
                os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.pipe)
        if self.case is None or status > 0:  # none of a reader's: they are caught
            if self.left or status:
                log = self.where.with_suffix(".log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name}: {what or f'ended with {status}'}\n{log}")
            return None
        stack = self._stack.read_text()[:2000] if self._stack.is_file() else ""
        self.case.outcome, self.case.said = "FAULT", f"{what or f'ended with {status}'}\n{stack}"
        self.left.popleft()
        return self.case


def watch(
    scene: Scene, work: dict[str, list[int]], folder: Path, at_once: int
) -> dict[str, list[Case]]:
    """Run all cases, `at_once` processes at a time; return them by kind."""
    batches = deque(
        (name, numbers[i : i + _BATCH])
        for name, numbers in work.items()
        for i in range(0, len(numbers), _BATCH)
    )
    done: dict[str, list[Case]] = {name: [] for name in work}
    running: dict[int, Worker] = {}
    slots = set(range(at_once))
    while batches or running:
        while batches and slots:
            slot = slots.pop()
            name, numbers = batches.popleft()
            running[slot] = Worker(scene, name, numbers, folder / f"work-{slot}")
        ready, _, _ = select.select([w.pipe for w in running.values()], [], [], 0.1)
        for slot, worker in list(running.items()):
            cases = worker.read() if worker.pipe in ready else []
            over = worker.over() if cases == [] else None
            if cases is None or over:
                lost = worker.end(over)
                cases = [lost] if lost is not None else []
                if worker.left:
                    batches.appendleft((worker.name, list(worker.left)))
                del running[slot]
                slots.add(slot)
            for case in cases:
                if not case.fault and case.megabytes > MEGABYTES:
                    case.outcome, case.said = "FAULT", f"took {case.megabytes:.0f} MB of memory"
                if case.fault:
                    print(f"FAULT {case.kind} {case.number}: {case.said}", flush=True)
                done[worker.name].append(case)
    return done


# ---- The program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="over all kinds of files")
    parser.add_argument("--only", nargs="*", default=[], metavar="KIND", help="these kinds only")
    parser.add_argument("--case", type=int, help="the number of one case, with its traceback")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    parser.add_argument("--write", type=Path, help="write the table here")
    args = parser.parse_args()
    home = Path.cwd()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=memory) as made:
        folder = Path(made).resolve()
        scene = prepare(folder, args.seed)
        before = content_of(scene.folder)
        begun = time.monotonic()
        done = watch(scene, share_out(scene, args), folder, args.at_once)
        seconds = time.monotonic() - begun
        os.chdir(home)
        changed = [n for n, what in content_of(scene.folder).items() if before.get(n) != what]
    rows = [row_of(name, cases) for name, cases in done.items()]
    rows.append(row_of("all", [case for cases in done.values() for case in cases]))
    show(rows, changed)
    print(f"{seconds:.0f} s, seed {args.seed}")
    if args.write:
        write_report(args, rows, seconds)
    return 1 if changed or rows[-1][4] else 0


def prepare(folder: Path, seed: int) -> Scene:
    """Make the scene, and import and do once what every case needs."""
    import datasets
    import mutation_readers
    import torch
    from mutation_kinds import kinds
    from transformers.utils import logging

    torch.set_num_threads(1)
    warm.give_forks_a_thread_pool()
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
    datasets.disable_progress_bars()
    os.environ["XDG_CACHE_HOME"] = "cache"  # of the scene; plots have theirs elsewhere
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
    logging.set_verbosity_error()
    (folder / "scene").mkdir()
    mutation_readers.make(folder / "scene")
    scene = Scene(folder / "scene", seed, kinds())
    os.chdir(scene.folder)
    mutation_readers.data_of_the_run()  # once, for all forks
    mutation_readers.settings("finetune")
    gc.collect()
    gc.freeze()
    return scene


def share_out(scene: Scene, args: argparse.Namespace) -> dict[str, list[int]]:
    """Return the numbers of the cases of each kind."""
    chosen = args.only or [*scene.kinds]
    if args.case is not None:
        return {name: [args.case] for name in chosen}
    total = sum(kind.share for kind in scene.kinds.values())
    return {n: [*range(-(-args.cases * scene.kinds[n].share // total))] for n in chosen}


def content_of(folder: Path) -> dict[str, str]:
    """Return name -> hash of every file below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def row_of(name: str, cases: list[Case]) -> list[Any]:
    counts = Counter(case.outcome for case in cases)
    slow = max((case.seconds for case in cases), default=0.0)
    large = max((case.megabytes for case in cases), default=0.0)
    outcomes = [counts[outcome] for outcome in ("accepted", "refused", "FAULT")]
    print(name, round(sum(case.seconds for case in cases), 1))
    return [name, len(cases), *outcomes, f"{slow:.1f}", f"{large:.0f}"]


def show(rows: list[list[Any]], changed: list[str]) -> None:
    for row in rows:
        print(f"{row[0]:30}" + "".join(f"{cell:>10}" for cell in row[1:]))
    for name in changed:
        print(f"FAULT the scene was changed: {name}")


_ABOUT = """
{:,} mutations, each of one file among those that belong to it: of bits, bytes and places, and of
what the format means by them (types, sizes, names and nesting of JSON and YAML; headers and
lengths of safetensors; records and operations of pickles; zips; columns of Parquet; pieces of
Jinja). Where hashes guard a file, they are made to agree with it for half of the mutations; for the
others what is read must be what was written. Each is given to {} of the readers that the recipes
and the command line have of such a file, drawn by chance. Accepted: read without an error. Refused:
one clear line. Fault: any other exception or end, more than {:.0f} s of the processor, or more than
{} MB of memory beside what the process had. Not among them: chat templates with loops that do not
end, which transformers runs as they are.
"""


def write_report(args: argparse.Namespace, rows: list[list[Any]], seconds: float) -> None:
    """Write the table with machine and versions."""
    from machine import describe

    packages = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pyarrow", "peft")
    lines = [
        "# Mutated files, and what reads them",
        "",
        *textwrap.wrap(_ABOUT.format(rows[-1][1], _READERS, SECONDS, MEGABYTES), 99),
        "",
        f"Seed {args.seed}, {seconds:.0f} s with {args.at_once} processes.",
        "",
        "| file | cases | accepted | refused | faults | s at most | MB at most |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
        "",
        describe("tests/mutations.py", *packages),
        "",
    ]
    args.write.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
