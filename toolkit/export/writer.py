"""The one writer of exports: group by group read, convert back, cast, write, hash, free.

In OUTPUT.tmp-export/ weight files are written one after the other, and read back and fsynced behind
the writing; only then each is noted as finished. Memory: blocks of 1 MB, and what `read_group`
holds of one group.

[Note: hashed behind the writing] A process (`formats.hashing`) follows the writer some MB behind,
while the bytes are in the page cache; all hashes of the manifest are of what it reads back. A
tensor that is copied out of a checkpoint (`StoredRows`) must have the digest that was taken from
live memory when it was saved, any other one the XXH3 of the bytes that were given to the kernel.

[Note: what an interrupted export leaves] The note names the plan and the weights (their hashes),
and sizes and hashes of each finished file and its tensors. A later start of the same export keeps
the finished files that are still the same to the byte; any other one writes everything anew.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm import tqdm

from toolkit import ranks
from toolkit.checkpoint.commit import CHECKPOINTS
from toolkit.checkpoint.store import replace_synced, sync, sync_above, write_behind
from toolkit.errors import CheckpointError, ExportError
from toolkit.export.plan import ExportPlan
from toolkit.formats import ExportGroup, TensorEntry, export_manifest, hashing, is_plain_name
from toolkit.parsing import read_json

_MARK = ".toolkit-export"  # the note; tells a folder that an export left from somebody's files
_PORTION = 2**22  # bytes after which the reader is told how far the writer is
_QUIET = 30.0  # seconds between two lines of progress where there is no terminal


@dataclass(frozen=True)
class StoredRows:
    """A tensor that is copied as it is stored, and proven by what is read back."""

    pieces: list[tuple[Path, int, int]]  # (file, offset, count), in row-major order
    key: str  # in the checkpoint
    width: int  # bytes of a row
    digest: str  # when it was saved
    check: Callable[[], object]  # raises where it is another one on the disk


TensorValues = torch.Tensor | Iterator[torch.Tensor] | StoredRows
"""A whole tensor, or its rows in order, some at a time, or where they are stored."""
ReadGroup = Callable[[ExportGroup], Mapping[str, TensorValues]]
"""Returns output name -> values of all outputs of a group."""


def check_output(output: str | Path, inside: Path | None = None) -> Path:
    """Return the folder that `output` means; ExportError where something is there already, or it
    lies inside the checkpoint `inside`.
    """
    target = Path(output).expanduser().resolve()
    if target.is_file():
        fault = "is a file; give a folder that does not exist yet"
    elif target.is_dir() and any(target.iterdir()):
        fault = "exists and is not empty; give another folder or remove it first"
    elif inside is not None and inside.resolve() in (target, *target.parents):
        fault = f"lies inside the checkpoint {inside.resolve()}; give a folder elsewhere"
    elif around := next(filter(_is_whole, target.parents), None):
        fault = f"lies inside {around}, which is no place for another export; give one elsewhere"
    else:
        return target
    raise ExportError(f"output {output} {fault}")


def _is_whole(folder: Path) -> bool:
    """Whether a folder is an export, or what holds the checkpoints of a run."""
    of_run = folder.name == CHECKPOINTS and any(folder.glob("step-*"))
    return of_run or (folder / export_manifest.FILE).is_file()


def write_export(
    plan: ExportPlan, target: Path, *, weights: str, read_group: ReadGroup, origin: dict[str, Any]
) -> None:
    """Write the folder of `plan` as `target` (of `check_output`), whole or not at all.

    Costs one write of the weights and one more read for the hashes.

    Args:
        weights: changes with the weights; an interrupted export of the same ones is taken up.
        read_group: called for each group that is not written yet, in the order of the files.
        origin: what the manifest says of where the weights come from.

    Raises:
        ExportError: no space, files of others in the way, or what was written does not read back.
    """
    with _staged(target, {"plan": plan.digest(), "weights": weights}) as staging:
        _check_space(plan, staging)
        todo = [n for n, t in plan.tensors.items() if t.file.name not in staging.finished]
        values = _values(plan, todo, read_group)
        total = sum(plan.tensors[name].nbytes for name in todo)
        with _progress(total) as bar, contextlib.closing(_Reader()) as reader:
            try:
                for file, names in itertools.groupby(todo, lambda name: plan.tensors[name].file):
                    _write_file(plan, staging.folder / file, names, values, reader, bar.update)
                    # One file reaches the disk while the next one is written.
                    staging.finish(reader.finished(plan.tensors, most_behind=1))
            finally:  # an interrupted export goes on from there
                staging.finish(reader.finished(plan.tensors, most_behind=0))
        for name, content in plan.assets.items():
            (staging.folder / name).write_bytes(content)
            sync(staging.folder / name)
        described = export_manifest.describe(staging.folder, sorted(plan.assets))
        for part in staging.finished.values():
            described["files"].update(part["files"])
            described["tensors"].update(part["tensors"])
        if sorted(described["files"]) != export_manifest.listed(staging.folder):
            raise ExportError(f"{staging.folder} holds files that are not of this export")
        known = {"checkpoint": None, "step": None, "run": None, **origin}
        export_manifest.write(staging.folder, described, known)


def _progress(total: int) -> tqdm:
    wait = 0.1 if sys.stderr.isatty() else _QUIET
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "mininterval": wait, "delay": wait}
    return tqdm(total=total, desc="export", leave=False, **options)


def _values(plan: ExportPlan, names: list[str], read_group: ReadGroup) -> Iterator[TensorValues]:
    """Yield the values of the exported tensors `names`; one group is held at a time.

    Outputs of a group are next to each other in a file, unless they have several dtypes or begin
    in the file before: then the group is read again.
    """
    group_of = {plan.names[n]: group for group in plan.groups for n in group.outputs}
    held: dict[str, TensorValues] = {}
    for name in names:
        if name not in held:
            held.clear()
            held = {plan.names[n]: v for n, v in read_group(group_of[name]).items()}
        yield held.pop(name)


def _write_file(
    plan: ExportPlan,
    path: Path,
    names: Iterable[str],
    values: Iterator[TensorValues],
    reader: "_Reader",
    advance: Callable[[int], object],
) -> None:
    """Write one safetensors file, and have it hashed; see [Note: hashed behind the writing]."""
    end = given = sent = 0
    parts: list[_Part] = []
    with open(path, "xb", buffering=0) as file:
        reader.tell("file", json.dumps(str(path)))

        def write(contents: Iterable[memoryview], name: str, copied: StoredRows | None) -> None:
            nonlocal end, given, sent
            hashed = xxhash.xxh3_128()
            if copied is not None:
                reader.tell("rows", f"{copied.width} {json.dumps(copied.key)}")
            for content in contents:
                if copied is None:
                    hashed.update(content)
                _write_all(file.fileno(), content, end)
                end += len(content)
                given = write_behind(file.fileno(), given, end)
                if end - sent >= _PORTION:
                    reader.tell("to", end)
                    sent = end
                if name:
                    advance(len(content))
                del content  # a view may keep its whole group while the next one is read
            reader.tell("part", end)
            parts.append(_Part(name, hashed.hexdigest(), copied))

        write([memoryview(plan.headers[path.name])], "", None)
        for name in names:
            place, begin, given_values = plan.tensors[name], end, next(values)
            copied = given_values if isinstance(given_values, StoredRows) else None
            write(_contents(given_values, place.dtype, name), name, copied)
            if (begin, end - begin) != (place.begin, place.nbytes):
                raise ExportError(
                    f"{name} got {end - begin} bytes at {begin} of {path}, planned were "
                    f"{place.nbytes} at {place.begin}"
                )
    reader.end(path, parts)


@dataclass(frozen=True)
class _Part:
    """The header of a file, without a name, or one of its tensors, as it was written."""

    name: str
    xxh3: str
    copied: StoredRows | None  # then only the digest of this is known

    def check(self, path: Path, xxh3: str, digest: str | None) -> None:
        """Compare it with what was read back: CheckpointError where what was copied is not what was
        saved, else ExportError.
        """
        if self.copied is None and xxh3 == self.xxh3:
            return
        if self.copied is not None and digest == self.copied.digest:
            return
        if self.copied is not None:
            self.copied.check()
        raise ExportError(f"{path} reads back with other bytes than were written")


class _Reader:
    """The process that hashes what is written (`formats.hashing`), and what it is to find."""

    def __init__(self) -> None:
        self._written: list[tuple[Path, list[_Part]]] = []
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = [sys.executable, "-P", hashing.__file__]
        # In a group of its own, which a Ctrl-C does not reach: it ends with what it reads from.
        options = pipes | {"text": True, "bufsize": 1, "process_group": 0}
        self._process: Any = subprocess.Popen(program, **options)

    def tell(self, word: str, value: object = "") -> None:
        """Send a line of the program's protocol; where it ended, `finished` says why."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word} {value}\n")

    def end(self, path: Path, parts: list[_Part]) -> None:
        """Say that `path` is written, and what its parts are."""
        self.tell("end")
        self._written.append((path, parts))

    def finished(
        self, places: Mapping[str, TensorEntry], most_behind: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the descriptions of files that are on the disk and were read back, while more than
        so many are left; ExportError where one does not hold what was written, CheckpointError
        where the checkpoint does not hold what was saved, OSError where the disk failed.
        """
        while len(self._written) > most_behind:
            path, parts = self._written.pop(0)
            others, self._written = self._written, []  # nothing is known of them if this one fails
            file = json.loads(self._process.stdout.readline() or "{}")
            if code := file.get("errno"):
                raise OSError(code, os.strerror(code))
            if not file:
                said = self._process.stderr.read().strip().splitlines() or ["it was killed"]
                raise ExportError(f"the process that reads back the export ended: {said[-1]}")
            tensors = {}
            for part, (xxh3, digest) in zip(parts, file.pop("parts"), strict=True):
                part.check(path, xxh3, digest)
                if part.name:
                    described = export_manifest.describe_tensor(places[part.name], xxh3)
                    tensors[part.name] = described
            sync(path)  # waits for nothing: the program did
            self._written = others
            yield {"files": {path.name: file}, "tensors": tensors}

    def close(self) -> None:
        """End the process, also amid a file."""
        self._process.kill()
        self._process.communicate()


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _contents(values: TensorValues, dtype: torch.dtype, name: str) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in `dtype`, in row-major order, a block at a time."""
    if isinstance(values, StoredRows):
        yield from _copied(values)
        return
    for part in [values] if isinstance(values, torch.Tensor) else values:
        for block in _blocks(part, hashing.BLOCK // max(part.dtype.itemsize, dtype.itemsize)):
            cast = block.to(dtype)
            if dtype == torch.float16 and bool((cast.isinf() & block.isfinite()).any()):
                raise ExportError(
                    f"{name} has values beyond float16's 65504; use --dtype bfloat16 or float32"
                )
            yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _copied(rows: StoredRows) -> Iterator[memoryview]:
    """Yield stored bytes, in one buffer."""
    buffer = memoryview(bytearray(hashing.BLOCK))
    for path, offset, missing in rows.pieces:
        with open(path, "rb", buffering=0) as file:
            while missing:
                count = os.preadv(file.fileno(), [buffer[:missing]], offset)
                if count == 0:
                    raise CheckpointError(f"{path} ends in the middle of a tensor")
                yield buffer[:count]
                offset, missing = offset + count, missing - count


def _blocks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, `most` at a time, whatever its strides."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(most) if tensor.numel() else ()
    elif math.prod(tensor.shape[1:]) > most:
        for part in tensor:
            yield from _blocks(part, most)
    else:
        for rows in tensor.split(max(1, most // math.prod(tensor.shape[1:]))):
            yield rows.reshape(-1)


@dataclass
class _Staging:
    """The folder that is being written, and the note of what is finished in it."""

    folder: Path
    key: dict[str, str]
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Weight file -> what `export_manifest.describe` returned for it alone."""

    def take_over(self) -> None:
        """Keep the finished files of an interrupted export; remove everything else it left."""
        mark = self.folder / _MARK
        if mark.is_file() and mark.stat().st_size:
            try:
                note = read_json(mark, ExportError)
                if note["key"] == self.key:
                    noted = note["finished"].items()
                    self.finished = {name: d for name, d in noted if self._holds(name, d)}
            except (ExportError, KeyError, TypeError, AttributeError):
                pass  # a note that was cut off: nothing counts as finished
            kept = f"{len(self.finished)} finished weight file(s) of it are kept"
            what = f"was left by an interrupted export; {kept}"
            ranks.show(f"NOTE: {self.folder} {what}", file=sys.stderr)
        for path in self.folder.iterdir():
            if path.name not in self.finished and path != mark:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not self.finished:
            mark.write_text("")
            # Before any other file: without the mark they would be somebody else's.
            sync(self.folder)

    def _holds(self, name: str, described: dict[str, Any]) -> bool:
        try:
            is_here = is_plain_name(name)
            return is_here and export_manifest.describe(self.folder, [name]) == described
        except ExportError:  # no plain file, or its header is damaged: written anew
            return False

    def finish(self, described: Iterable[dict[str, Any]]) -> None:
        """Note that each of the weight files `described` is complete and on the disk."""
        for each in described:
            self.finished |= dict.fromkeys(each["files"], each)
            note = {"key": self.key, "finished": self.finished}
            replace_synced(self.folder / _MARK, json.dumps(note))

    def leave(self) -> str:
        """Remove the folder unless there is something in it to go on with; return what is left."""
        if not self.folder.exists():
            return "it is complete, but the disk may not keep it: remove it and export again"
        if not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was left"
        stay = f"{len(self.finished)} finished weight file(s) stay in {self.folder}"
        return f"{stay}: the same command goes on from there"


@contextlib.contextmanager
def _staged(target: Path, key: dict[str, str]) -> Iterator[_Staging]:
    """Yield a folder beside `target` that takes its name on success.

    On a failure it is removed, unless a weight file was finished and the cause lies outside (the
    disk, an interrupt).
    """
    folder = target.with_name(f"{target.name}.tmp-export")
    staging = _Staging(folder, key)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExportError(f"another process is writing {target} (it holds {folder})") from error
        except OSError as error:
            raise ExportError(f"{folder} cannot be created: {error.strerror}") from error
        if any(folder.iterdir()) and not (folder / _MARK).is_file():
            raise ExportError(
                f"{folder} is in the way and was not left by an export; move it elsewhere"
            )
        try:
            staging.take_over()
            yield staging
            os.fsync(lock)
            os.rename(folder, target)
            sync_above(target.parent)  # which this export may have made
            # Not before the rename: a folder without the mark is somebody else's.
            (target / _MARK).unlink()
            os.fsync(lock)
        except OSError as error:
            cause = f"writing {target} failed: {error.strerror or error}"
            raise ExportError(f"{cause}; {staging.leave()}") from error
        except (KeyboardInterrupt, SystemExit):
            print(staging.leave(), file=sys.stderr)
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_space(plan: ExportPlan, staging: _Staging) -> None:
    """Refuse a disk that has no space for what is not finished."""
    weights = (t.nbytes for t in plan.tensors.values() if t.file.name not in staging.finished)
    needed = sum(weights) + sum(map(len, (*plan.headers.values(), *plan.assets.values())))
    free = shutil.disk_usage(staging.folder).free
    if needed > free:
        parent = staging.folder.parent
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed / 1e6:.2f} MB, {parent} has {free / 1e6:.2f} MB free; give "
            "an output on another disk, or a smaller dtype",
        )
