"""Mutated files, each read by what reads it: is there more than one clear error line?

    python tests/mutations.py --write docs/mutations.md          (make soak)
    python tests/mutations.py --cases 300 --seed 3               a short one, other mutations
    python tests/mutations.py --only state.json --case 17        one case again, with its traceback

A case is a seed, a kind of file and a number: a copy of what holds the file, the file mutated (see
mutate.py), for half of them the hashes around it made to agree with it, then each reader of it, as
the recipes and the command line call it (see mutation_readers.py). Forks of a warm process run the
cases, some tens each, and this one watches them:

    accepted    read; where the hashes around the file are not made to agree, with the same result
    refused     a ToolkitError of one line, or the command line's exit code with one line
    FAULT       any other exception, result or end; a hang; more memory than allowed

Owns the kinds of files, how they are sealed, the watch and the judgement.
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

SECONDS, PATIENCE = 5.0, 60.0  # of the processor, and of the clock, which others may slow down
MEGABYTES = 200  # beside what the process has when the case begins
_END_AT = 1000  # megabytes at which a process is ended, for the sake of the machine
_BATCH = 50  # cases of a process
_READERS = 2  # of a case, drawn from those of its kind

STEP = "checkpoints/step-00000003"


@dataclass(frozen=True)
class Kind:
    """A kind of file, how it is mutated, and what reads it."""

    file: str
    mutations: tuple[mutate.Mutation, ...]  # beside those of any bytes
    readers: tuple[Callable[[], Any], ...]
    share: int  # of all cases, in proportion
    seal: Callable[[Path], None] | None = None
    """Makes the hashes around the file agree with it."""
    guarded: bool = False
    """Whether hashes say what it must be, and nothing can be made to agree with it."""

    @property
    def part(self) -> str:
        """What is copied of the scene for a case; the rest is linked."""
        return self.file.partition("/")[0]


def kinds() -> dict[str, Kind]:
    """Return name -> kind."""
    import mutation_readers as read

    m = mutate
    run = (read.inspect_run, read.verify_run, read.consolidate_run, read.resume)
    lora = (read.inspect_adapters, read.consolidate_adapters, read.merge, read.resume_adapters)
    model = (read.load, read.units, read.verify_model)
    words = (read.learn, read.documents)
    adapter = (read.verify_adapter, read.verify_adapters, read.publish_adapter, read.read_adapter)
    export = (read.verify_export, read.verify_both, read.publish_export)
    logged = (read.report, read.consolidate_run, read.calibrate, read.cut)
    made = {
        "a recipe's config": Kind(
            "finetune.yaml", (m.in_yaml,), (read.parse, read.plan, read.units), 300
        ),
        "config.yaml of a run": Kind(
            "run/config.yaml",
            (m.in_yaml,),
            (read.claim, read.report, read.inspect_run, read.consolidate_run),
            150,
        ),
        "Accelerate YAML": Kind("other/accelerate.yaml", (m.in_yaml,), (read.launch,), 250),
        "device YAML": Kind("other/device.yaml", (m.in_yaml,), (read.estimate,), 100),
        "calibration.yaml": Kind(
            "cache/toolkit/calibration.yaml", (m.in_yaml,), (read.estimate,), 60
        ),
        "config of axolotl": Kind(
            "other/axolotl_gpt_oss_20b_lora.yaml", (m.in_yaml,), (read.convert_yaml,), 150
        ),
        "script for Trainer": Kind(
            "other/trainer_alpaca_lora.py", (m.in_table,), (read.convert_script,), 60
        ),
        "config.json": Kind("model/config.json", (m.in_json,), (*model, read.learn), 900),
        "generation_config.json": Kind(
            "model/generation_config.json", (m.in_json,), (read.answer, read.verify_model), 200
        ),
        "safetensors index": Kind(
            "model/model.safetensors.index.json", (m.in_json,), (read.load, read.verify_model), 400
        ),
        "safetensors": Kind(
            "model/model-00002-of-00005.safetensors",
            (m.in_safetensors, m.in_safetensors),
            (read.load, read.verify_model),
            500,
        ),
        "tokenizer.json": Kind("model/tokenizer.json", (m.in_json,), words, 800),
        "tokenizer_config.json": Kind("model/tokenizer_config.json", (m.in_json,), words, 300),
        "chat template": Kind(
            "model/chat_template.jinja", (m.in_template,), (read.learn, read.answer), 250
        ),
        "manifest.json": Kind(f"run/{STEP}/manifest.json", (_manifest,), run, 500, _commit),
        "COMMIT": Kind(f"run/{STEP}/COMMIT", (), run, 60, guarded=True),
        "state.json": Kind(f"run/{STEP}/state.json", (m.in_json,), run, 500, _seal),
        "state.json of adapters": Kind(f"lora/{STEP}/state.json", (m.in_json,), lora, 200, _seal),
        "DCP .metadata": Kind(f"run/{STEP}/dcp/.metadata", (m.in_pickle,), run, 400, _seal),
        "DCP shard": Kind(f"run/{STEP}/dcp/__1_0.distcp", (m.in_zips,), run, 300, _seal),
        ".metadata of another tool": Kind(
            "plain/.metadata", (m.in_pickle,), (read.inspect_plain, read.consolidate_plain), 400
        ),
        "shard of another tool": Kind(
            "plain/__0_0.distcp", (m.in_zips,), (read.inspect_plain, read.consolidate_plain), 200
        ),
        "random state": Kind(
            f"run/{STEP}/rng/rank-00000.safetensors",
            (m.in_safetensors,),
            (read.verify_run, read.resume),
            200,
            _seal,
        ),
        "config.json of a checkpoint": Kind(
            f"run/{STEP}/hf/config.json", (m.in_json,), run, 200, _seal
        ),
        "source.json": Kind(f"run/{STEP}/hf/source.json", (m.in_json,), run, 150, _seal),
        "adapter_config.json of a run": Kind(
            f"lora/{STEP}/hf/adapter_config.json", (m.in_json,), lora, 200, _seal
        ),
        "toolkit_manifest.json": Kind(
            "export/toolkit_manifest.json", (_export_manifest,), export, 400
        ),
        "adapter_config.json": Kind(
            "adapter/adapter_config.json", (m.in_json,), adapter, 400, _seal_export
        ),
        "adapter_model.safetensors": Kind(
            "adapter/adapter_model.safetensors", (m.in_safetensors,), adapter, 200, _seal_export
        ),
        "metrics.jsonl": Kind("run/metrics.jsonl", (m.in_lines,), logged, 120),
        "starts.jsonl": Kind("run/starts.jsonl", (m.in_lines,), logged, 100),
    }
    data: dict[str, tuple[mutate.Mutation, ...]] = {
        **dict.fromkeys(("chat.jsonl", "pairs.jsonl", "ids.jsonl", "texts.jsonl"), (m.in_lines,)),
        "pairs.json": (m.in_json,),
        "pairs.csv": (m.in_table,),
        "text.txt": (m.in_table,),
        **dict.fromkeys(("chat.parquet", "pairs.parquet", "ids.parquet"), (m.in_columns,)),
        "pairs.jsonl.gz": (),
        "pairs.arrow": (),
    }
    for name, mutations in data.items():
        share = 200 if mutations else 80
        made[f"rows in {name}"] = Kind(f"data/{name}", mutations, read.of_file(name), share)
    return made


# ---- What agrees with what


def _agreed(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _manifest(content: bytes, chance: random.Random) -> bytes:
    return _agreed(mutate.in_tree(json.loads(content), chance)).encode("utf-8", "surrogatepass")


def _commit(file: Path) -> None:
    """Let COMMIT agree with the manifest."""
    text = hashlib.sha256(file.read_bytes()).hexdigest() + "\n"
    (file.parent / "COMMIT").write_text(text)


def _seal(file: Path) -> None:
    """Let the manifest agree with a file of its checkpoint, and COMMIT with that."""
    folder = next(p for p in file.parents if (p / "COMMIT").is_file())
    manifest = json.loads((folder / "manifest.json").read_text())
    raw = file.read_bytes()
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest["files"][str(file.relative_to(folder))] = entry
    (folder / "manifest.json").write_text(_agreed(manifest))
    _commit(folder / "manifest.json")


def _export_text(manifest: Any) -> bytes:
    text = _agreed(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "manifest": {text}}}\n'.encode()


def _export_manifest(content: bytes, chance: random.Random) -> bytes:
    return _export_text(mutate.in_tree(json.loads(content)["manifest"], chance))


def _seal_export(file: Path) -> None:
    """Let an export's manifest agree with a file, as far as anybody can without reading it."""
    path = file.parent / "toolkit_manifest.json"
    manifest = json.loads(path.read_text())["manifest"]
    raw = file.read_bytes()
    manifest["files"][file.name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    path.write_bytes(_export_text(manifest))


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

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.kinds = kinds()

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

    def run(self, name: str, number: int, where: Path, usual: dict[str, Any]) -> Case:
        """Do one case; `usual` are the readers' results without a mutation."""
        kind, case = self.kinds[name], Case(name, number)
        file = self.stand(where, kind)
        counts = self.mutated(kind, name, number, file)
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
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        begun = time.process_time()
        say(begin=number)
        case = scene.run(name, number, where, usual)
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
        if self.case is None and time.monotonic() - self._clock > 2 * PATIENCE:
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
        stack = self._stack.read_text()[-3000:] if self._stack.is_file() else ""
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
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=memory) as made:
        folder = Path(made).resolve()
        scene = prepare(folder, args.seed)
        before = content_of(scene.folder)
        begun = time.monotonic()
        done = watch(scene, share_out(scene, args), folder, args.at_once)
        seconds = time.monotonic() - begun
        os.chdir(HERE)
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
    from transformers.utils import logging

    torch.set_num_threads(1)
    warm.give_forks_a_thread_pool()
    datasets.config.HF_DATASETS_CACHE = folder / "datasets"
    datasets.disable_progress_bars()
    os.environ["XDG_CACHE_HOME"] = "cache"
    logging.set_verbosity_error()
    (folder / "scene").mkdir()
    mutation_readers.make(folder / "scene")
    scene = Scene(folder / "scene", seed)
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


def write_report(args: argparse.Namespace, rows: list[list[Any]], seconds: float) -> None:
    """Write the table with machine and versions."""
    from machine import describe

    packages = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pyarrow", "peft")
    lines = [
        "# Mutated files, and what reads them",
        "",
        "TEXT",
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
