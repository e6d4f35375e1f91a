"""Kills, full disks and power losses against saving, overwriting, pruning and exporting.

    python tests/soak.py --write docs/evidence/soak.md     (make soak)
    python tests/soak.py --short                  what tests/test_commit_crash.py runs
    python tests/soak.py --only operations --break no_fsync      a broken protocol must be caught

One warm process holds torch and a tiny model and forks the children that are killed. The weights of
a save are all derived from one number, its stamp, so that a mixture of two saves is seen. A child
reports what it begins and what is done; what must be there follows from the reports alone:

    done save        that step is committed, verifies by its hashes, and holds its stamp's weights
    begun save       of the same step: the old or the new one, whole
    retention        may take what an independent rule here says it may, nothing else
    reference        every committed checkpoint has it, whole; the parts of its pass are gone after
    looks committed  whatever COMMIT says is a checkpoint is whole
    export           under its final name it is complete and bit-equal to its step
    afterwards       the next save, prune and export work, and leave no leftovers

See file_trace.py for how operations are seen and what a power loss may leave.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import errno
import functools
import gc
import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dead_disk  # noqa: E402
import file_trace  # noqa: E402
import numpy as np  # noqa: E402
import warm  # noqa: E402

from toolkit.checkpoint import reference_file  # noqa: E402
from toolkit.checkpoint.reference_file import FILE as REFERENCE  # noqa: E402
from toolkit.training.train_state import StateFile  # noqa: E402

LAST, BEST = 2, 1  # retention of every save here: newest, best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, help="of one process at random moments")
    parser.add_argument("--rank-kills", type=int, default=24, help="with two gloo ranks")
    parser.add_argument("--stride", type=int, default=1, help="every so many file operations")
    parser.add_argument("--points", type=int, default=0, help="of power loss; 0: all")
    parser.add_argument("--subsets", type=int, default=4, help="random survivals at each point")
    parser.add_argument("--short", action="store_true", help="a version of seconds")
    parser.add_argument("--only", nargs="*", choices=[*CHAPTERS])
    parser.add_argument("--break", dest="broken", choices=[*BROKEN], help="a negative control")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the table here")
    args = parser.parse_args()
    args.stop, args.survivors = False, 5  # stop at the first fault; go on from every fifth tree
    if args.short:
        args.kills, args.rank_kills, args.stride = 40, 2, 5
        args.points, args.subsets, args.survivors = 25, 1, 25
    args.only = args.only or [*CHAPTERS]
    # Memory where there is some: a kill does not see the disk, and fsync is what takes the time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="soak-", dir=memory, ignore_cleanup_errors=True
    ) as made:
        return soak(args, Path(made))


def soak(args: argparse.Namespace, folder: Path) -> int:
    tracer = file_trace.Tracer()
    stage = Stage(folder, tracer)
    if args.broken:
        BROKEN[args.broken]()
    results: list[dict[str, Any]] = []
    for name in args.only:
        begun = time.time()
        result = {"chapter": name, **CHAPTERS[name](stage, args)}
        result["seconds"] = round(time.time() - begun, 1)
        said = {k: v for k, v in result.items() if k != "faults"}
        print(json.dumps({**said, "lost": len(result["faults"])}), flush=True)
        for fault in result["faults"][:5]:
            print(f"  LOST: {fault}", flush=True)
        results.append(result)
    if args.write:
        write_report(args, results)
    return 1 if any(result["faults"] for result in results) else 0


# --------------------------------------------------------------------------------------------------
# What a child does
# --------------------------------------------------------------------------------------------------


class Stage:
    """The warm process: the model, the reference export, and how children are forked."""

    def __init__(self, folder: Path, tracer: file_trace.Tracer) -> None:
        import torch

        from toolkit import checkpoint
        from toolkit.checkpoint import commit
        from toolkit.config.settings import CheckpointConfig, ModelConfig
        from toolkit.export import consolidate
        from toolkit.models import causal_lm as models

        torch.set_num_threads(1)
        warm.give_forks_a_thread_pool()
        self.folder, self.tracer = folder, tracer
        self.checkpoint, self.commit, self.consolidate = checkpoint, commit, consolidate
        values = {"train.pairs": (np.arange(600), np.ones(600, np.float32))}
        content = reference_file.encode({"rows": {}}, values)
        self.reference_file = StateFile.of(content)
        self.cfg = CheckpointConfig(save_steps=1, save_total_limit=LAST, keep_best=BEST)
        write_model_config(folder / "model")
        self.model_cfg = ModelConfig(str(folder / "model"), init="random")
        self.model = models.build_on_meta(self.model_cfg)
        self.model.to_empty(device="cpu")
        self.stamps = 0
        # What an undisturbed export consists of, and the values of its tensors.
        run = self.fresh()
        self.export_values = {}
        child = self.fork(lambda say: (self.save(run, 1, 1, say), self.export(run, "e", 1, say)))
        child.join()
        if child.failures():
            raise RuntimeError(child.failures())
        self.reference = file_trace.read_tree(run / "exports" / "e")
        gc.collect()
        gc.freeze()

    def fresh(self) -> Path:
        """Return a new scene: a folder with a run and a place for exports."""
        scene = self.folder / f"scene-{os.urandom(4).hex()}"
        (scene / "exports").mkdir(parents=True)
        return scene

    def stamp(self) -> int:
        self.stamps += 1
        return self.stamps

    def save(self, scene: Path, step: int, stamp: int, say: Callable[[str], None]) -> None:
        say(f"begin save {step} {stamp}")
        set_values(self.model, stamp)
        measured = {"eval_loss": eval_loss(step)}
        state = self.checkpoint.TrainState(
            self.model, step=step, metrics=measured, files={REFERENCE: self.reference_file}
        )
        cfg = dataclasses.replace(self.cfg, async_save=stamp % 2 == 0)
        self.checkpoint.save(state, scene / "run", cfg)
        self.checkpoint.wait()
        say(f"done save {step} {stamp}")

    def evaluate(self, scene: Path) -> None:
        """Write the parts of a pass of the reference, as a run does before its first save."""
        for number in (1, 2):
            values = {"train.pairs": (np.arange(number), np.ones(number, np.float32))}
            reference_file.write_part(scene / "run", number, {}, values)

    def prune(self, scene: Path, say: Callable[[str], None]) -> None:
        say("begin prune")
        from toolkit.checkpoint.saving import prune_checkpoints

        prune_checkpoints(scene / "run", self.cfg)
        say("done prune")

    def export(self, scene: Path, name: str, step: int, say: Callable[[str], None]) -> None:
        say(f"begin export {name} {step}")
        source = self.commit.committed_steps(scene / "run")[step]
        self.consolidate(source, scene / "exports" / name, dtype="float32")
        say(f"done export {name} {step}")

    def fork(self, act: Callable[[Callable[[str], None]], Any]) -> "Child":
        return Child(self, act)


class Child:
    """A forked process that reports lines, and may be killed."""

    def __init__(self, stage: Stage, act: Callable[[Callable[[str], None]], Any]) -> None:
        self._pipe, write = os.pipe()
        self.lines: list[str] = []
        self._rest = b""
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        gc.disable()  # it would touch, and so copy, the parent's memory
        code = 1
        try:
            os.close(self._pipe)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)

            def say(text: str) -> None:
                stage.tracer.note(text)
                os.write(write, text.encode() + b"\n")

            try:
                act(say)
                code = 0
            except BaseException as error:
                stage.tracer.disarm()
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(where.filename).name}:{where.lineno}"
                say(f"failed {type(error).__name__}: {error} [{place}]")
        finally:
            os._exit(code)

    def read(self, patience: float) -> bool:
        """Take in reports for up to so many seconds; whether there may be more."""
        if not select.select([self._pipe], [], [], patience)[0]:
            return True
        content = os.read(self._pipe, 1 << 16)
        *whole, self._rest = (self._rest + content).split(b"\n")
        self.lines += [line.decode() for line in whole]
        return bool(content)

    def join(self) -> list[str]:
        """Wait for the end; return all reports."""
        while self.read(30.0):
            pass
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        return self.lines

    def kill(self) -> list[str]:
        os.kill(self.pid, signal.SIGKILL)
        return self.join()

    def failures(self) -> list[str]:
        return [line for line in self.lines if line.startswith("failed")]


def write_model_config(folder: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=16,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def expected(index: int, count: int, stamp: int) -> Any:
    """Return the values of parameter `index` under a stamp; exact in float32."""
    import torch

    return (torch.arange(count) % 13 + index) / 8 + stamp


def set_values(model: Any, stamp: int) -> None:
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
            whole = expected(i, parameter.numel(), stamp).reshape(parameter.shape)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.detach().copy_(whole)


# --------------------------------------------------------------------------------------------------
# What must be there
# --------------------------------------------------------------------------------------------------


def eval_loss(step: int) -> float:
    return float(step * 7 % 11)


def retained(steps: set[int]) -> set[int]:
    """Return what must stay of `steps`; written apart from the toolkit's own rule."""
    newest = sorted(steps)[-LAST:]
    best = sorted(steps, key=lambda step: (eval_loss(step), -step))[:BEST]
    return {*newest, *best}


class Expectation:
    """What the reports of the children say must be there."""

    def __init__(self) -> None:
        self.steps: dict[int, set[int]] = {}
        """Step -> stamps of which one must be found."""
        self.possible: dict[int, set[int]] = {}
        """Step -> stamps that may be found, for steps that may be there or not."""
        self.begun: tuple[int, int] | None = None
        """Step and stamp of a save that is not done."""
        self.until_committed: dict[int, set[int]] = {}
        """What retention may take once that save is committed, and not before."""
        self.exports: dict[str, int] = {}
        self.begun_exports: set[str] = set()

    def read(self, lines: list[str]) -> "Expectation":
        for line in lines:
            phase, *words = line.split()
            if phase == "failed":
                continue
            what, rest = words[0], words[1:]
            if what == "save":
                self._save(phase, int(rest[0]), int(rest[1]))
            elif what == "prune":
                self._drop()
            elif phase == "begin" and what == "export":
                self.begun_exports.add(rest[0])
            elif phase == "done" and what == "export":
                self.exports[rest[0]] = next(iter(self.steps[int(rest[1])]))
            elif what == "dropped":
                self.exports.pop(rest[0], None)
        return self

    def settle(self, found: dict[int, int]) -> None:
        """Take what was found after a kill as what must be there from now on."""
        self.steps = {step: {stamp} for step, stamp in found.items()}
        self.possible, self.begun, self.until_committed = {}, None, {}

    def _save(self, phase: str, step: int, stamp: int) -> None:
        if phase == "begin":
            if step in self.steps:
                self.steps[step] = self.steps[step] | {stamp}
            self.possible.setdefault(step, set()).add(stamp)
            self.begun = (step, stamp)
            # Retention follows the commit, before the report; of a step that a kill kept from it,
            # and that is now written again, nobody sees then whether it was committed.
            dropped = self._drop({step})
            self.until_committed = {} if step in dropped else dropped
        else:
            self.begun = None
            self.steps[step] = self.possible[step] = {stamp}
            self._drop()

    def required(self, found: dict[int, int]) -> dict[int, set[int]]:
        """Return step -> stamps of which one must be there, given what was found."""
        if self.begun is None or found.get(self.begun[0]) == self.begun[1]:
            return self.steps
        return self.until_committed | self.steps

    def _drop(self, new: set[int] = frozenset()) -> dict[int, set[int]]:  # type: ignore[assignment]
        dropped = {}
        for gone in set(self.steps) - retained(set(self.steps) | new):
            dropped[gone] = self.steps.pop(gone)
            self.possible.setdefault(gone, set()).update(dropped[gone])
        return dropped


class Checker:
    """Looks at a scene with the real code."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._stamps: dict[str, int] = {}

    def faults(self, scene: Path, expectation: Expectation) -> tuple[list[str], dict[int, int]]:
        """Return what is wrong, and the stamp of every committed step."""
        commit, faults, found = self.stage.commit, [], {}
        run = scene / "run"
        folders = run / "checkpoints"
        for path in sorted(folders.iterdir()) if folders.is_dir() else ():
            if commit.is_committed(path):
                try:
                    self._stamp_of(path)
                except Exception as error:
                    faults.append(f"{path.name} looks committed and is not whole: {error}")
        for step, path in commit.committed_steps(run).items():
            with contextlib.suppress(Exception):  # said above
                found[step] = self._stamp_of(path)
                if json.loads((path / "state.json").read_text())["step"] != step:
                    faults.append(f"{path.name} holds the state of another step")
        for step, stamps in expectation.required(found).items():
            if step not in found:
                faults.append(f"step {step} was committed and is not there")
            elif found[step] not in stamps:
                faults.append(f"step {step} holds stamp {found[step]}, expected {sorted(stamps)}")
        for step, stamp in found.items():
            allowed = expectation.steps.get(step, set()) | expectation.possible.get(step, set())
            if stamp not in allowed:
                faults.append(f"step {step} of stamp {stamp} came from nowhere")
        return faults + list(self._export_faults(scene, expectation)), found

    def leftovers(self, scene: Path) -> list[str]:
        """Return names that a successful save and export should have cleaned up."""
        folders = scene / "run" / "checkpoints"
        good = {path.name for path in self.stage.commit.committed_steps(scene / "run").values()}
        names = [path.name for path in folders.iterdir() if path.name not in good]
        names += [path.name for path in (scene / "run").glob(f"{reference_file.PARTS}*")]
        return names + [p.name for p in (scene / "exports").iterdir() if "." in p.name]

    def _stamp_of(self, checkpoint: Path) -> int:
        """Verify a checkpoint by its hashes and return the stamp of its weights."""
        damage = self.stage.commit.find_damaged_files(checkpoint)
        if damage:
            raise ValueError(f"{damage[0][0]} {damage[0][1]}")
        seal = (checkpoint / "COMMIT").read_text()
        if seal not in self._stamps:  # the hashes hold, so the same manifest has the same weights
            self._stamps[seal] = self._read_stamp(checkpoint)
        return self._stamps[seal]

    def _read_stamp(self, checkpoint: Path) -> int:
        import torch
        import torch.distributed.checkpoint as dcp

        held = (checkpoint / REFERENCE).read_bytes()
        if held != self.stage.reference_file.content:
            raise ValueError(f"{REFERENCE} holds other values")
        model = self.stage.model
        values = {f"model.{n}": torch.zeros(p.shape) for n, p in model.named_parameters()}
        dcp.load(values, checkpoint_id=checkpoint / "dcp", no_dist=True)
        return stamp_of({n.removeprefix("model."): t for n, t in values.items()})

    def _export_faults(self, scene: Path, expectation: Expectation) -> Iterator[str]:
        from safetensors.torch import load

        folder = scene / "exports"
        there = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        for name in sorted(set(expectation.exports) - there):
            yield f"export {name} was done and is not there"
        for name in sorted(there):
            if "." in name:
                continue  # not a final name
            tree = file_trace.read_tree(folder / name)
            if name not in expectation.exports:
                tree.pop(".toolkit-export", None)  # goes last, after the rename
            if set(tree) != set(self.stage.reference):
                yield f"export {name} has {sorted(tree)}"
                continue
            weights: dict[str, Any] = {}
            try:
                for file, content in tree.items():
                    if file.endswith(".safetensors"):
                        weights |= load(content or b"")
                    elif "manifest" not in file and content != self.stage.reference[file]:
                        yield f"export {name}: {file} differs from an undisturbed one"
                stamp = stamp_of(weights)
            except Exception as error:
                yield f"export {name} is not whole: {error!r}"
                continue
            if expectation.exports.get(name, stamp) != stamp:
                yield f"export {name} holds stamp {stamp}, not {expectation.exports[name]}"


def stamp_of(weights: dict[str, Any]) -> int:
    """Return the stamp that all weights have.

    Raises:
        ValueError: they do not agree, or one is missing.
    """
    names = sorted(weights)
    if len(names) != 12:
        raise ValueError(f"{len(names)} weights")
    stamp = int(weights[names[0]].flatten()[0])
    for i, name in enumerate(names):
        flat = weights[name].flatten()
        if not bool((flat == expected(i, flat.numel(), stamp)).all()):
            raise ValueError(f"mixed: {name} is not of stamp {stamp}")
    return stamp


# --------------------------------------------------------------------------------------------------
# Chapter 1: kills at random moments
# --------------------------------------------------------------------------------------------------


def random_kills(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    chance, checker = random.Random(args.seed), Checker(stage)
    faults: list[str] = []
    during: Counter[str] = Counter()
    scene, expectation, found = stage.fresh(), Expectation(), {}
    for kill in range(args.kills):
        if kill % 50 == 49:
            shutil.rmtree(scene)
            scene, expectation, found = stage.fresh(), Expectation(), {}
        stage.stamps += 50
        first, known, seed = stage.stamps, dict(found), chance.random()
        exports = sorted(expectation.exports)

        def live(say: Callable[[str], None]) -> None:
            schedule(stage, scene, known, exports, first, random.Random(seed), say)  # noqa: B023

        child = stage.fork(live)
        child.read(30.0)
        moment = time.time() + chance.uniform(0.0, 0.25)
        while (left := moment - time.time()) > 0 and child.read(left):
            pass
        lines = child.kill()
        faults += [f"kill {kill}: the child {f}" for f in child.failures()]
        during[_last_begun(lines)] += 1
        wrong, found = checker.faults(scene, expectation.read(lines))
        faults += [f"kill {kill} after {lines[-2:]}: {f}" for f in wrong]
        if args.stop and faults:
            break
        expectation.settle(found)
        for name in list(expectation.begun_exports - expectation.exports.keys()):
            if (scene / "exports" / name).is_dir():  # whole, as was just checked
                shutil.rmtree(scene / "exports" / name)
    shutil.rmtree(scene)
    return {"kills": args.kills, "during": dict(during), "faults": faults}


def schedule(
    stage: Stage,
    scene: Path,
    known: dict[int, int],
    exports: list[str],
    stamp: int,
    chance: random.Random,
    say: Callable[[str], None],
) -> None:
    """Save, overwrite, prune and export at random until killed."""
    checker, steps = Checker(stage), set(known)
    for _ in range(49):
        action = chance.choice(("save", "save", "overwrite", "overwrite", "prune", "export"))
        if action in ("save", "overwrite") or not steps:
            step = max(steps, default=0) + chance.randint(1, 3)
            if action == "overwrite" and steps:
                step = chance.choice(sorted(steps))
            stamp += 1
            stage.save(scene, step, stamp, say)
            steps = retained(steps | {step})
            left = [n for n in checker.leftovers(scene) if "export" not in n]
            if left:
                raise RuntimeError(f"a save left {left}")
        elif action == "prune":
            stage.prune(scene, say)
            steps = retained(steps)
        else:
            name = chance.choice("abc")
            if name in exports:
                # Moved away first: an export that is deleted in place is nobody's export.
                say(f"- dropped {name}")
                gone = scene / f"gone-{stamp}-{name}"
                shutil.rmtree(shutil.move(scene / "exports" / name, gone))
                exports.remove(name)
            stage.export(scene, name, chance.choice(sorted(steps)), say)
            exports.append(name)


def _last_begun(lines: list[str]) -> str:
    if not lines or not lines[-1].startswith("begin"):
        return "between"
    return lines[-1].split()[1]


# --------------------------------------------------------------------------------------------------
# Chapter 2: kills of ranks
# --------------------------------------------------------------------------------------------------


def rank_kills(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    chance, checker = random.Random(args.seed + 1), Checker(stage)
    faults: list[str] = []
    during: Counter[str] = Counter()
    scene, expectation, found = stage.fresh(), Expectation(), {}
    for kill in range(args.rank_kills):
        stage.stamps += 50
        store, first, known = scene / f"store-{kill}", stage.stamps, dict(found)
        live = functools.partial(_live_as_rank, stage, scene, store, first, known)
        ranks = [stage.fork(functools.partial(live, rank)) for rank in range(2)]
        ranks[0].read(60.0)
        moment = time.time() + chance.uniform(0.0, 0.5)
        while (left := moment - time.time()) > 0 and ranks[0].read(left):
            pass
        victims = chance.choice(([0], [1], [0, 1]))
        for rank in victims:
            os.kill(ranks[rank].pid, signal.SIGKILL)
        time.sleep(0.1)  # what the other makes of it
        lines = ranks[0].kill()
        ranks[1].kill()
        during[f"{victims} {_last_begun([n for n in lines if not n.startswith('failed')])}"] += 1
        wrong, found = checker.faults(scene, expectation.read(lines))
        faults += [f"rank kill {kill} {victims} after {lines[-2:]}: {f}" for f in wrong]
        expectation.settle(found)
    last = stage.fork(lambda say: stage.save(scene, max(found, default=0) + 1, stage.stamp(), say))
    last.join()
    faults += last.failures() + [f"left {n}" for n in checker.leftovers(scene)]
    shutil.rmtree(scene)
    return {"kills": args.rank_kills, "during": dict(during), "faults": faults}


def _live_as_rank(
    stage: Stage,
    scene: Path,
    store: Path,
    stamp: int,
    known: dict[int, int],
    rank: int,
    say: Callable[[str], None],
) -> None:
    import torch.distributed as dist
    from sharded import apply_fsdp, init_mesh

    from toolkit.config.settings import ShardingConfig
    from toolkit.models import causal_lm as models

    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    stage.model = models.build_on_meta(stage.model_cfg)
    cfg = ShardingConfig(param_dtype="float32")
    apply_fsdp(stage.model, init_mesh("cpu", 2, cfg), cfg)
    stage.model.to_empty(device="cpu")
    steps, chance = set(known), random.Random(stamp)  # the same on both ranks
    for _ in range(49):
        step = max(steps, default=0) + chance.randint(1, 3)
        if steps and chance.random() < 0.5:
            step = chance.choice(sorted(steps))
        stamp += 1
        stage.save(scene, step, stamp, say)
        steps = retained(steps | {step})


# --------------------------------------------------------------------------------------------------
# Chapters 3 to 6: at every file operation
# --------------------------------------------------------------------------------------------------


class Sequence:
    """Overwrite, save with retention, prune, export: the actions whose operations are numbered."""

    def __init__(self, stage: Stage, fresh: bool = False) -> None:
        self.stage, self.base, self.fresh = stage, stage.fresh(), fresh
        self.before = Expectation()
        if fresh:  # the first save of a run and the first export: their folders are made, too
            (self.base / "exports").rmdir()
        else:
            child = stage.fork(self._save_two)
            self.before.read(child.join())
        stage.stamps += 10
        self.stamp = stage.stamps
        stage.stamps += 10

    def _save_two(self, say: Callable[[str], None]) -> None:
        for step in (1, 2):
            self.stage.save(self.base, step, self.stage.stamp(), say)

    def scene(self) -> Path:
        scene = self.stage.fresh()
        shutil.rmtree(scene)
        return Path(shutil.copytree(self.base, scene))

    def actions(self, scene: Path) -> list[tuple[str, Callable[[Callable[[str], None]], None]]]:
        stage, stamp = self.stage, self.stamp
        if self.fresh:
            return [
                ("pass", lambda say: stage.evaluate(scene)),
                ("save", lambda say: stage.save(scene, 1, stamp, say)),
                ("export", lambda say: stage.export(scene, "e", 1, say)),
            ]
        return [
            ("overwrite", lambda say: stage.save(scene, 2, stamp, say)),
            ("save", lambda say: stage.save(scene, 3, stamp + 1, say)),
            ("prune", lambda say: stage.prune(scene, say)),
            ("export", lambda say: stage.export(scene, "e", 3, say)),
        ]

    def run(self, scene: Path, say: Callable[[str], None], **arm: Any) -> None:
        self.stage.tracer.arm(scene, **arm)
        for _, act in self.actions(scene):
            act(say)
        say(f"operations {self.stage.tracer.disarm()}")

    def expectation(self, lines: list[str]) -> Expectation:
        copy = Expectation()
        copy.steps = {step: set(stamps) for step, stamps in self.before.steps.items()}
        return copy.read(lines)

    def count(self) -> int:
        """Return the number of file operations of an undisturbed sequence."""
        scene = self.scene()
        lines = self.stage.fork(lambda say: self.run(scene, say)).join()
        shutil.rmtree(scene)
        if not lines[-1].startswith("operations"):
            raise RuntimeError(f"the undisturbed sequence ended with {lines[-1]}")
        return int(lines[-1].split()[1])


def afterwards(
    stage: Stage, scene: Path, found: dict[int, int], say: Callable[[str], None]
) -> None:
    """What the next start does: save, overwrite, prune, export; no leftovers may be there then."""
    step = max(found, default=0) + 1
    stage.save(scene, step, 10**6, say)
    stage.prune(scene, say)
    if not (scene / "exports" / "e").is_dir():
        stage.export(scene, "e", step, say)
    left = Checker(stage).leftovers(scene)
    if left:
        raise RuntimeError(f"left {left}")


def kill_at_operations(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    sequence, checker = Sequence(stage), Checker(stage)
    total, faults = sequence.count(), []
    during: Counter[str] = Counter()
    points = [*range(1 + args.seed % args.stride, total + 1, args.stride)]
    if args.stop:
        random.Random(args.seed).shuffle(points)
    for k in points:
        if args.stop and faults:
            break
        scene = sequence.scene()
        lines = stage.fork(lambda say: sequence.run(scene, say, kill_at=k)).join()  # noqa: B023
        during[_last_begun(lines)] += 1
        expectation = sequence.expectation(lines)
        wrong, found = checker.faults(scene, expectation)
        child = stage.fork(lambda say: afterwards(stage, scene, found, say))  # noqa: B023
        expectation.settle(found)
        expectation.read(child.join())
        wrong += [f"afterwards: {f}" for f in child.failures()]
        if not wrong:
            wrong += checker.faults(scene, expectation)[0]
        faults += [
            f"killed before operation {k} of {total}, after {lines[-1:]}: {f}" for f in wrong
        ]
        shutil.rmtree(scene)
    return {"operations": total, "kills": len(points), "during": dict(during), "faults": faults}


def power_losses(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Lose power after each operation of a record, in several ways."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for fresh in (False, True):
        faults += _power_losses(stage, args, Sequence(stage, fresh), counts)
    return {**counts, "faults": faults}


def _power_losses(
    stage: Stage, args: argparse.Namespace, sequence: Sequence, counts: Counter[str]
) -> list[str]:
    checker, scene, log = Checker(stage), sequence.scene(), stage.folder / "record"
    disk = file_trace.Disk(scene)
    child = stage.fork(lambda say: sequence.run(scene, say, log=log))
    child.join()
    faults = [f"the recorded sequence {f}" for f in child.failures()]
    records = [] if faults else file_trace.read_log(log)
    chance, seen = random.Random(args.seed), set()
    wanted = set(chance.sample(range(len(records)), min(args.points or 10**9, len(records))))
    # Where a report comes, more must be there from then on.
    wanted |= {i for i, record in enumerate(records) if record.note}
    notes: list[str] = []
    for i, record in enumerate(records):
        disk.apply(record)
        if record.note:
            notes.append(record.name)
        else:
            counts["operations"] += 1
        if i not in wanted or (args.stop and faults):
            continue
        counts["points"] += 1
        expectation = sequence.expectation([n for n in notes if n != "the end"])
        for survived, tree in disk.after_power_loss(chance, args.subsets):
            counts["outcomes"] += 1
            key = hashlib.sha256(repr((notes, sorted(tree.items()))).encode()).digest()
            if key in seen:
                continue
            seen.add(key)
            counts["different"] += 1
            copy = stage.folder / "after"
            file_trace.write_tree(tree, copy)
            wrong, found = checker.faults(copy, expectation)
            if not wrong and len(seen) % args.survivors == 0:
                counts["went on"] += 1
                child = stage.fork(lambda say: afterwards(stage, copy, found, say))  # noqa: B023
                child.join()
                wrong += [f"afterwards: {f}" for f in child.failures()]
            when = f"power lost at record {i} ({record.name})"
            faults += [f"{when}, {survived}: {f}" for f in wrong]
            shutil.rmtree(copy)
    shutil.rmtree(scene)
    return faults


def full_disks(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    space = file_trace.SPACE
    return _failing(stage, args, space, errno.ENOSPC, once=False, offset=0)


def failing_disks(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Let each operation alone fail, in three ways."""
    kinds, found = file_trace.SYNC | file_trace.SPACE | file_trace.NAMES, dict[str, Any]()
    for offset, (name, code) in enumerate(dead_disk.ERRORS.items()):
        space = file_trace.SPACE if code == errno.ENOSPC else kinds
        one = _failing(stage, args, space, code, once=True, offset=2 + offset)
        found["operations"], faults = one["operations"], found.get("faults", [])
        found |= {f"{name} tried": one["tried"], f"{name} refused": one["refused"]}
        found["faults"] = faults + [f"{name}: {fault}" for fault in one["faults"]]
    return found


def dead_disks(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """From each operation on let the kernel refuse all that changes a disk, in three ways."""
    if not dead_disk.possible():
        return {"tried": 0, "skipped": "for Linux on x86-64", "faults": []}
    sequence, checker = Sequence(stage), Checker(stage)
    committed = stage.commit.committed_steps(sequence.base / "run").values()
    # COMMIT -> every byte of the checkpoint, which nothing may change while it is there
    old = {(p / "COMMIT").read_bytes(): file_trace.read_tree(p) for p in committed}
    total, faults = sequence.count(), list[str]()
    counts: Counter[str] = Counter()
    stride = 3 * args.stride if args.short else args.stride
    for offset, (error, code) in enumerate(dead_disk.ERRORS.items()):
        for k in range(1 + offset % stride, total + 1, stride):
            if args.stop and faults:
                break
            scene = sequence.scene()
            child = stage.fork(functools.partial(_until_dead, stage, sequence, scene, k, code))
            lines = child.join()
            refused = [line for line in lines if line.startswith("refused")]
            counts["tried"] += 1
            counts[f"{error} refused"] += bool(refused)
            wrong = child.failures()
            expectation = sequence.expectation([n for n in lines if n not in refused])
            more, found = checker.faults(scene, expectation)
            wrong += more
            for path in (scene / "run" / "checkpoints").iterdir():
                tree = file_trace.read_tree(path)
                if old.get(tree.get("COMMIT") or b"", tree) != tree:
                    wrong.append(f"{path.name} was committed before, and is another")
            after = stage.fork(lambda say: afterwards(stage, scene, found, say))  # noqa: B023
            after.join()
            wrong += [f"afterwards: {f}" for f in after.failures()]
            faults += [f"{error} from operation {k} of {total} on, {refused}: {f}" for f in wrong]
            shutil.rmtree(scene)
    return {"operations": total, **counts, "faults": faults}


def _until_dead(
    stage: Stage, sequence: Sequence, scene: Path, k: int, code: int, say: Callable[[str], None]
) -> None:
    """Run the actions up to the one that a disk refuses which dies at operation `k`."""
    from toolkit.errors import CheckpointError, ExportError

    stage.tracer.arm(scene, fail_at=k, refuse=functools.partial(dead_disk.refuse, code))
    for name, act in sequence.actions(scene):
        try:
            act(say)
        except (CheckpointError, ExportError) as error:
            if not stage.tracer.failures or os.strerror(code) not in str(error):
                raise RuntimeError(f"{name} does not name the cause: {error}") from error
            rest = [p.name for p in (scene / "run" / "checkpoints").iterdir() if ".tmp-" in p.name]
            if rest and code == errno.ENOSPC:
                raise RuntimeError(f"{name} left {rest}") from error
            say(f"refused {name} {str(error)[:120]!r}")
            return


def _failing(
    stage: Stage,
    args: argparse.Namespace,
    kinds: int,
    code: int,
    *,
    once: bool,
    offset: int,
) -> dict[str, Any]:
    """Let each operation fail; the action says why, leaves nothing, and works afterwards."""
    sequence, checker = Sequence(stage), Checker(stage)
    total, faults, hit = sequence.count(), [], 0
    stride = 3 * args.stride if args.short else args.stride
    points = range(1 + offset % stride, total + 1, stride)
    for k in points:
        if args.stop and faults:
            break
        scene = sequence.scene()

        def live(say: Callable[[str], None]) -> None:
            stage.tracer.arm(scene, fail_at=k, kinds=kinds, error=code, once=once)  # noqa: B023
            for name, act in sequence.actions(scene):  # noqa: B023
                _try(stage, scene, name, act, code, say)  # noqa: B023

        child = stage.fork(live)
        lines = child.join()
        failures = [line for line in lines if line.startswith("refused")]
        hit += bool(failures)
        wrong = [f"{f}" for f in child.failures()]
        expectation = sequence.expectation([n for n in lines if not n.startswith("refused")])
        wrong += checker.faults(scene, expectation)[0]
        wrong += [f"left {n}" for n in checker.leftovers(scene)] if not wrong else []
        faults += [f"operation {k} of {total} failed, {failures}: {f}" for f in wrong]
        shutil.rmtree(scene)
    return {"operations": total, "tried": len(points), "refused": hit, "faults": faults}


def _try(
    stage: Stage,
    scene: Path,
    name: str,
    act: Callable[[Callable[[str], None]], None],
    code: int,
    say: Callable[[str], None],
) -> None:
    """Run one action that may meet a full disk; check what it says and leaves; then do it again."""
    from toolkit.errors import CheckpointError, ExportError

    known = stage.commit.committed_steps(scene / "run")
    try:
        act(say)
    except (CheckpointError, ExportError) as error:
        if not stage.tracer.failures:
            raise
        stage.tracer.disarm()
        # A write that the kernel refuses here is told apart from a full disk by its number alone.
        causes = {code, errno.EFBIG} if code == errno.ENOSPC else {code}
        if not any(os.strerror(cause) in str(error) for cause in causes):
            raise RuntimeError(f"{name} does not name the cause: {error}") from error
        lost = set(known) - set(stage.commit.committed_steps(scene / "run"))
        if lost - {1}:  # retention may have begun
            raise RuntimeError(f"{name} lost {lost}") from error
        rest = [p.name for p in (scene / "run" / "checkpoints").iterdir() if ".tmp-" in p.name]
        if rest and code == errno.ENOSPC:  # a disk that fails may refuse the removal too
            raise RuntimeError(f"{name} left {rest}") from error
        say(f"refused {name} {str(error)[:120]!r}")
        if "is complete" in str(error) and "remove it" in str(error):
            shutil.rmtree(scene / "exports" / "e")  # as the error advises
        act(say)


# --------------------------------------------------------------------------------------------------
# Chapter 7: a real small disk
# --------------------------------------------------------------------------------------------------


def small_disk(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Mount file systems of few blocks, where this user may, and save into them."""
    faults, refused, sizes = [], 0, 0
    for blocks in range(2, 60, 8 if args.short else 1):
        scene = stage.fresh()

        def live(say: Callable[[str], None]) -> None:
            _mount_small(scene / "run", blocks)  # noqa: B023
            _try_small(stage, scene, say)  # noqa: B023

        child = stage.fork(live)
        lines = child.join()
        if any("PermissionError" in line for line in lines):
            return {"sizes": 0, "skipped": "no right to mount a file system", "faults": []}
        sizes += 1
        refused += any(line.startswith("refused") for line in lines)
        if not lines or not lines[-1].startswith("went on"):
            faults.append(f"{blocks} blocks: ended with {lines[-1:] or 'a signal'}")
        shutil.rmtree(scene)
    return {"sizes": sizes, "refused": refused, "faults": faults}


def _mount_small(folder: Path, blocks: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts = 0x10000000, 0x00020000
    folder.mkdir()
    flags = new_mounts | (0 if os.geteuid() == 0 else new_user)
    size = f"size={blocks * 4096}".encode()
    if (
        libc.unshare(flags)
        or libc.mount(None, b"/", None, 0x44000, None)
        or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, size)
    ):
        raise PermissionError(ctypes.get_errno(), "cannot mount")


def _try_small(stage: Stage, scene: Path, say: Callable[[str], None]) -> None:
    from toolkit.errors import CheckpointError

    last, step = 0, 0
    try:
        for step in range(1, 4):
            stage.save(scene, step, step, lambda _: None)
            last = step
    except CheckpointError as error:
        if "No space left" not in str(error):
            raise
        say(f"refused step {step}")
    checker = Checker(stage)
    steps = stage.commit.committed_steps(scene / "run")
    if last and max(steps, default=0) < last:
        raise RuntimeError(f"step {last} was committed; there is {sorted(steps)}")
    for path in steps.values():
        checker._stamp_of(path)
    rest = [p.name for p in (scene / "run").rglob("*.tmp-*")]
    if rest:
        raise RuntimeError(f"left {rest}")
    libc = ctypes.CDLL(None, use_errno=True)
    remount = 32
    if libc.mount(b"tmpfs", os.fsencode(scene / "run"), b"tmpfs", remount, b"size=8m"):
        raise OSError(ctypes.get_errno(), "cannot grow the file system")
    stage.save(scene, step, 99, lambda _: None)
    if checker._stamp_of(stage.commit.committed_steps(scene / "run")[step]) != 99:
        raise RuntimeError("the save after it is another one")
    say("went on")


# --------------------------------------------------------------------------------------------------
# Negative controls: protocols that are wrong, and must be caught
# --------------------------------------------------------------------------------------------------


def break_no_fsync() -> None:
    """Nothing is fsynced."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


def break_unsynced_shards() -> None:
    """A rank does not fsync the shards that it wrote, and nobody does it for it."""
    from toolkit.checkpoint import shards

    shards.fsync_path = lambda path: None


def break_unsynced_reference() -> None:
    """The reference of preference tuning is written without an fsync."""
    from toolkit.checkpoint import local_folder

    def wrong(folder: local_folder.LocalFolder, source: Path) -> None:
        if source.name != REFERENCE:
            local_folder.fsync_path(source)

    local_folder.LocalFolder.put = wrong  # type: ignore[method-assign]


def break_commit_first() -> None:
    """COMMIT is under its name before the files are on the disk."""
    from toolkit.checkpoint import commit, local_folder

    def wrong(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
        text = json.dumps(manifest, indent=1, sort_keys=True)
        local_folder.write_synced(folder / commit.MANIFEST, text)
        local_folder.write_synced(
            folder / commit.COMMIT, commit.compute_commit_content(text.encode())
        )
        target = folder.parent / commit.step_name(step)
        local_folder.move_existing_checkpoint(target, commit.is_intact)
        os.rename(folder, target)
        local_folder.fsync_path(target.parent)
        for below, _, files in os.walk(target):
            for name in files:
                local_folder.fsync_path(Path(below, name))
            local_folder.fsync_path(Path(below))
        return target

    commit.commit = wrong


def break_raw_errors() -> None:
    """What the disk refuses is raised as it came."""
    from toolkit.checkpoint import commit, local_folder, saving

    modules: list[Any] = [commit, local_folder, saving]
    for module in modules:
        module.raise_disk_errors = lambda what: contextlib.nullcontext()


def break_rewritten() -> None:
    """A save writes into a checkpoint that was committed before."""
    from toolkit.checkpoint import commit

    def wrong(run_dir: Path, step: int) -> Path:
        for path in commit.committed_steps(run_dir).values():
            with commit.raise_disk_errors("the old state could not be written"):
                state = (path / "state.json").read_bytes()
                (path / "state.json").write_bytes(state)
        return begin(run_dir, step)

    begin = commit.begin_attempt
    commit.begin_attempt = wrong


def break_in_place() -> None:
    """A step that is saved again is deleted first."""
    from toolkit.checkpoint import local_folder

    def wrong(target: Path, verifies: Any) -> None:
        if target.exists():
            shutil.rmtree(target)

    local_folder.move_existing_checkpoint = wrong


def break_prune_first() -> None:
    """Room is made before the new checkpoint is committed."""
    from toolkit.checkpoint import commit

    def wrong(run_dir: Path, step: int) -> Path:
        for path in list(commit.committed_steps(run_dir).values())[:-1]:
            commit.delete_attempts([path])
        return begin(run_dir, step)

    begin = commit.begin_attempt
    commit.begin_attempt = wrong


def break_delete_in_place() -> None:
    """Retention deletes under the checkpoint's own name."""
    from toolkit.checkpoint import commit

    def wrong(paths: Any) -> None:
        for path in paths:
            shutil.rmtree(path)

    commit.delete_attempts = wrong


def controls(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Break the protocol in a child and let the chapter that must notice run there."""
    first, faults = {}, []
    short = argparse.Namespace(**vars(args) | {"stop": True, "stride": 5, "points": 60})

    def broken_run(name: str, say: Callable[[str], None]) -> None:
        BROKEN[name]()
        found = CHAPTERS[MUST_NOTICE[name]](stage, short)["faults"]
        say(f"found {found[0] if found else 'nothing'}")

    for name in BROKEN:
        lines = stage.fork(lambda say: broken_run(name, say)).join()  # noqa: B023
        first[name] = lines[-1] if lines else "nothing was reported"
        if not first[name].startswith("found ") or first[name] == "found nothing":
            faults.append(f"the broken protocol {name} was not noticed: {first[name]}")
    return {"broken protocols": len(BROKEN), "noticed": first, "faults": faults}


BROKEN = {
    "no_fsync": break_no_fsync,
    "unsynced_shards": break_unsynced_shards,
    "unsynced_reference": break_unsynced_reference,
    "commit_first": break_commit_first,
    "raw_errors": break_raw_errors,
    "rewritten": break_rewritten,
    "in_place": break_in_place,
    "delete_in_place": break_delete_in_place,
    "prune_first": break_prune_first,
}
MUST_NOTICE = {
    "no_fsync": "power",
    "unsynced_shards": "power",
    "unsynced_reference": "power",
    "commit_first": "power",
    "raw_errors": "dead",
    "rewritten": "full",
    "in_place": "operations",
    "delete_in_place": "operations",
    "prune_first": "operations",
}
CHAPTERS: dict[str, Callable[[Stage, argparse.Namespace], dict[str, Any]]] = {
    "kills": random_kills,
    "ranks": rank_kills,
    "operations": kill_at_operations,
    "power": power_losses,
    "full": full_disks,
    "failing": failing_disks,
    "dead": dead_disks,
    "small": small_disk,
    "controls": controls,
}
TITLES = {
    "kills": "SIGKILL at a random moment of random saves, overwrites, prunes and exports",
    "ranks": "the same with two gloo ranks, one or both killed",
    "operations": "SIGKILL before every file operation of overwrite, save, prune, export",
    "power": "power lost after every operation of the same sequence, and of a run's first save",
    "full": "the disk full from every operation on",
    "failing": "every operation alone refused",
    "dead": "all system calls that change a disk refused, from every operation on",
    "small": "real file systems of 2 to 59 blocks",
    "controls": "negative controls: protocols that are wrong",
}


def write_report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write what was run, on which machine, as a table."""
    import machine

    lines = [
        "# Kills, full disks and power losses",
        "",
        "What `make soak` ran. The rules are at the top of `tests/soak.py`; what a power loss may",
        "leave, in `tests/file_trace.py`. `lost` counts broken rules: something committed that",
        "is gone, damaged or mixed; something that looks committed and is not whole; a next start",
        "that fails or leaves rubbish.",
        "",
        "| | tried | lost | s |",
        "|---|---|---|---|",
    ]
    for result in results:
        known = ("chapter", "faults", "seconds", "noticed")
        tried = ", ".join(
            f"{k} {_counts(v)}" for k, v in result.items() if k not in known and v != {}
        )
        lines.append(
            f"| {TITLES[result['chapter']]} | {tried} | {len(result['faults'])} "
            f"| {result['seconds']:.0f} |"
        )
    for result in results:
        if noticed := result.get("noticed"):
            lines += ["", "What gave the negative controls away:", ""]
            lines += [f"* `{n}`: {_plain(said)}" for n, said in noticed.items()]
    packages = ("torch", "transformers", "safetensors")
    lines += ["", machine.describe("soak.py", *packages).replace("benchmarks/", "tests/"), ""]
    args.write.write_text("\n".join(lines), "utf-8")


def _counts(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {n}" for k, n in sorted(value.items())) + ")"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(said: str) -> str:
    """Return a report without the random part of folder names."""
    said = re.sub(r"/\S*/soak-\w+/\S*?/(?=run/)", "", said.removeprefix("found "))
    return re.sub(r"\.(old|trash|tmp)-[0-9a-f]{8}", r".\1-*", said)


if __name__ == "__main__":
    sys.exit(main())
