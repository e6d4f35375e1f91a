"""Random damage to a checkpoint and to an export, and whether it is reported.

    python tests/damage.py --flips 2000 --others 200

Flips single bits, truncates, zeroes pages, deletes files and swaps them with those of an older
step, over all files; half of the time small files are as likely as large ones. The reference of
preference tuning, a file in each checkpoint, is damaged once more by itself. Each must be
reported by `verify` with its file, and with the tensor where the byte belongs to one; a damaged
checkpoint must not be used by a resume. Owns the damage and the judgement: which tensor a byte
belongs to is read from torch's own metadata and from the safetensors header, not by the code that
is tested.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader

from toolkit.checkpoint import find_newest
from toolkit.checkpoint.reference_file import FILE as REFERENCE
from toolkit.checkpoint.reference_file import encode
from toolkit.export import consolidate
from toolkit.training.train_state import StateFile
from toolkit.verify import Report, verify_checkpoint, verify_export

KINDS = ("flip", "truncate", "zero page", "delete", "swap")
_PAGE = 4096

Where = list[tuple[int, int, str]]
"""(first byte, byte behind the last, tensor) of a file."""


@dataclass
class Target:
    """A folder to damage, and how to judge it."""

    folder: Path
    older: Path
    """The same of an older step."""
    verify: Callable[[], Report]
    run: Path | None = None
    """The run, where the folder is its newest checkpoint."""
    only: str | None = None
    """The one file to damage; None: any."""
    kinds: tuple[str, ...] = KINDS


@dataclass
class Outcome:
    """How many damages were done, and those that were not reported as they should."""

    done: Counter = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)


def tensors_of(file: Path) -> Where:
    """Return where the bytes of the tensors of a file are, by the format's own reader."""
    if file.suffix == ".distcp":
        storage, where = FileSystemReader(file.parent).read_metadata().storage_data, []
        for index, info in storage.items():
            if info.relative_path == file.name:
                with open(file, "rb") as f:
                    f.seek(info.offset)
                    blob = f.read(info.length)
                payload = zipfile.ZipFile(io.BytesIO(blob)).getinfo("archive/data/0")
                lengths = struct.unpack_from("<HH", blob, payload.header_offset + 26)
                begin = info.offset + payload.header_offset + 30 + sum(lengths)
                where.append((begin, begin + payload.file_size, index.fqn))
        return where
    if file.suffix == ".safetensors" and file.parent.name != "rng" and file.name != REFERENCE:
        with open(file, "rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        ranges = {name: info["data_offsets"] for name, info in header.items()}
        return [(8 + length + b, 8 + length + e, name) for name, (b, e) in ranges.items()]
    return []


def belongs(where: Where, changed: Callable[[int, int], bool]) -> set[str]:
    """Return the tensors in whose bytes something changed."""
    return {name for begin, end, name in where if changed(begin, end)}


@contextlib.contextmanager
def kept(file: Path) -> Iterator[bytes]:
    """Yield the content of a file, and put it back afterwards."""
    content = file.read_bytes()
    try:
        yield content
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(content)


def damage(
    kind: str, file: Path, older: Path, chance: random.Random
) -> tuple[str, set[str]] | None:
    """Damage `file`; return what was done and the tensors hit. None where nothing would change."""
    content, where = file.read_bytes(), tensors_of(file)
    if kind == "flip":
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        return f"bit {bit}", belongs(where, lambda b, e: b <= bit // 8 < e)
    if kind == "truncate":
        length = chance.randrange(len(content))
        file.write_bytes(content[:length])
        return f"cut at {length}", belongs(where, lambda b, e: e > max(b, length))
    if kind == "zero page":
        first = chance.randrange(0, len(content), _PAGE)
        page = content[first : first + _PAGE]
        if not any(page):
            return None
        file.write_bytes(content[:first] + bytes(len(page)) + content[first + len(page) :])
        return f"page at {first}", belongs(
            where, lambda b, e: any(content[max(b, first) : min(e, first + len(page))])
        )
    if kind == "delete":
        file.unlink()
        return "deleted", set()
    before = older.read_bytes() if older.is_file() else content
    if before == content:
        return None
    file.write_bytes(before)
    return "swapped", set()


def reported(kind: str, report: Report, name: str, tensors: set[str]) -> str | None:
    """Return what is missing in the report, or too much: None if it is as it should be."""
    said = {tensor for file, tensor, _ in report.findings if file == name}
    if not said:
        return f"{name} was not reported, but {report.findings[:3]}"
    if not tensors <= said:
        return f"{name}: {sorted(tensors - said)[:3]} not named, but {report.findings[:3]}"
    if name.endswith("manifest.json"):
        return None  # of another manifest everything may be said
    # COMMIT and the manifest accuse each other where neither says which of them is wrong.
    others = [
        f for f in report.findings if f[0] not in (name, *(["manifest.json"] * (name == "COMMIT")))
    ]
    if others:
        return f"{name} was damaged, and {others[:3]} reported"
    wrong = said - tensors - {None}
    if kind == "flip" and tensors and wrong:
        return f"{name}: {tensors} was hit, and {wrong} reported"
    return None


def try_once(
    target: Target, kind: str, chance: random.Random, outcome: Outcome, resume: bool
) -> None:
    """Damage one file of the target in one way, judge, and undo it."""
    files = sorted(p for p in target.folder.rglob(target.only or "*") if p.is_file())
    sizes = [p.stat().st_size for p in files]
    while True:
        file = chance.choice(files) if chance.random() < 0.5 else chance.choices(files, sizes)[0]
        name = str(file.relative_to(target.folder))
        with kept(file):
            done = damage(kind, file, target.older / name, chance)
            if done is None:
                continue
            said, tensors = done
            fault = reported(kind, target.verify(), name, tensors)
            if fault is None and resume and target.run is not None:
                fault = used(target)
        outcome.done[kind] += 1
        if fault is not None:
            outcome.missed.append(f"{kind} ({said}): {fault}")
        return


def used(target: Target) -> str | None:
    """Return a fault where a resume would use the damaged checkpoint, or not the older one."""
    assert target.run is not None
    with contextlib.redirect_stdout(io.StringIO()):
        found = find_newest(target.run)
    for aside in target.folder.parent.glob(f"{target.folder.name}.bad-*"):
        aside.rename(target.folder)
    return None if found == target.older else f"a resume would use {found}"


def strike(target: Target, flips: int, others: int, seed: int, resume_every: int = 1) -> Outcome:
    """Do so many flips, and so many of each other kind; the folder is whole again afterwards.

    A resume is tried after every `resume_every`-th damage to a checkpoint: it syncs the disk.
    """
    outcome, chance = Outcome(), random.Random(seed)
    for kind in target.kinds:
        for i in range(flips if kind == "flip" else others):
            try_once(target, kind, chance, outcome, i % resume_every == 0)
    left = target.verify()
    assert left.ok, left.findings[:3]
    return outcome


def targets(run: Path, exports: tuple[Path, Path]) -> dict[str, Target]:
    """Return what there is to damage: the newest checkpoint of a run of two steps and an export.

    Args:
        exports: of the older and of the newer step.
    """
    older, newer = sorted((run / "checkpoints").iterdir())
    kinds = KINDS[:-1]  # that of an older step is the same
    return {
        "checkpoint": Target(newer, older, lambda: verify_checkpoint(newer), run),
        "reference": Target(
            newer, older, lambda: verify_checkpoint(newer), run, only=REFERENCE, kinds=kinds
        ),
        "export": Target(exports[1], exports[0], lambda: verify_export(None, exports[1])),
    }


def reference_content(rows: int) -> bytes:
    """Return a file of reference values of so many pairs."""
    answers = np.arange(2 * rows)
    logps = -np.random.default_rng(0).random(2 * rows).astype(np.float32)
    return encode({"rows": {"train.pairs": "0"}}, {"train.pairs": (answers, logps)})


def save_steps(rank: int, world: int, root: str) -> None:
    """Train each ROOT/NAME/source for two steps on all ranks and save both: ROOT/NAME/run."""
    from sharded import apply_fsdp, init_mesh

    from toolkit.checkpoint import TrainState, save
    from toolkit.config.settings import CheckpointConfig, ModelConfig, ShardingConfig
    from toolkit.loading.pretrained import load_pretrained
    from toolkit.models.causal_lm import build_on_meta

    for source in sorted(Path(root).glob("*/source")):
        model = build_on_meta(ModelConfig(name_or_path=str(source)))
        apply_fsdp(model, init_mesh("cpu", world, ShardingConfig()), ShardingConfig())
        load_pretrained(model, source, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in (10, 20):
            ids = torch.arange(16).view(1, 16) + rank + step
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.rand(1)
            state = TrainState(model, optimizer, step=step, extra={"loss": 1 / step})
            state.files[REFERENCE] = StateFile.of(reference_content(rows=3000))
            save(state, source.parent / "run", CheckpointConfig())


def main() -> int:
    """Make a checkpoint with two ranks and its export, damage both, print a table."""
    from conftest import save_byte_tokenizer, save_tiny_model
    from distributed import run_ranks

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--others", type=int, default=200, help="of each other kind")
    parser.add_argument("--only", choices=("checkpoint", "reference", "export"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="write the table here")
    args = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "llama"
        save_byte_tokenizer(root / "source")
        save_tiny_model(root / "source")
        run_ranks(save_steps, 2, folder)
        older, newer = sorted((root / "run" / "checkpoints").iterdir())
        exports = (root / "export-10", root / "export-20")
        for checkpoint, export in zip((older, newer), exports, strict=True):
            consolidate(checkpoint, export, max_shard_size=60_000)
        missed = 0
        print(
            f"{'':12}" + "".join(f"{kind:>12}" for kind in KINDS) + f"{'missed':>12}{'ms each':>12}"
        )
        for name, target in targets(root / "run", exports).items():
            if args.only not in (None, name):
                continue
            begun = time.perf_counter()
            flips, others = args.flips, args.others
            if target.only is not None:  # one file, which the row above damages, too
                flips, others = min(flips, 200), min(others, 60)
            outcome = strike(target, flips, others, args.seed)
            each = 1000 * (time.perf_counter() - begun) / sum(outcome.done.values())
            counts = "".join(f"{outcome.done[kind]:>12}" for kind in KINDS)
            print(f"{name:12}{counts}{len(outcome.missed):>12}{each:>12.1f}", flush=True)
            cells = [name, *(outcome.done[kind] for kind in KINDS), len(outcome.missed)]
            rows.append(f"| {' | '.join(map(str, cells))} | {each:.0f} |")
            print("\n".join(outcome.missed[:20]))
            missed += len(outcome.missed)
        shutil.rmtree(root)
    if args.write is not None:
        write_report(args, rows)
    return 1 if missed else 0


def write_report(args: argparse.Namespace, rows: list[str]) -> None:
    """Write the table with machine and versions."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from machine import describe

    described = describe("damage.py", "torch", "transformers", "safetensors")
    lines = [
        "# Damage that `toolkit verify` must find",
        "",
        "A tiny Llama saved by two ranks, and its export in several files. Each time one file is",
        "damaged, drawn at random from all of them: a flipped bit, a truncation, a zeroed page, a",
        "deleted file, or the file of an older step in its place. Missed: not reported, or without",
        "the file, or without the tensor where the byte belongs to one, or used by a resume.",
        "`reference`: the reference of preference tuning in that checkpoint, by itself.",
        f"Seed {args.seed}.",
        "",
        f"| of | {' | '.join(KINDS)} | missed | ms each |",
        f"|---|{'---|' * len(KINDS)}---|---|",
        *rows,
        "",
        described.replace("benchmarks/", "tests/"),
        "",
    ]
    args.write.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    sys.exit(main())
