"""One weight file of an export: written front to back, and hashed behind the writing.

[Note: hashed behind the writing] A process (`formats.hashing`) follows the writer some MB behind,
while the bytes are in the page cache; all hashes of the manifest are of what it reads back. A
tensor that is copied out of a checkpoint (`StoredRows`) must have the digest that was taken from
live memory when it was saved, any other one the XXH3 of the bytes that were given to the kernel.
"""

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from toolkit.errors import CheckpointError, ExportError
from toolkit.formats import TensorEntry, export_manifest, hashing
from toolkit.formats.synced_files import preallocate

_PORTION = 2**22  # bytes after which the follower is told how far the writer is


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


class Follower:
    """The process that hashes what is written, one file after the other.

    A thread takes its answers as they come: they are long, and it would wait with the pipe full for
    a writer that waits for it.
    """

    def __init__(self) -> None:
        self.files = 0  # of which it was told
        self._answers: list[dict[str, Any]] = []
        self._ended = False
        self._heard = threading.Condition()
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = [sys.executable, "-P", hashing.__file__]
        # In a group of its own, which a Ctrl-C does not reach: it ends with what it reads from.
        options = pipes | {"text": True, "bufsize": 1, "process_group": 0}
        self._process: Any = subprocess.Popen(program, **options)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line.endswith("\n"):  # else it was killed
                with self._heard:
                    self._answers.append(json.loads(line))
                    self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def tell(self, word: str, value: object = "") -> None:
        """Send a line of the program's protocol; where it ended, `answer` says why."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word} {value}\n")

    def answer(self, number: int) -> dict[str, Any]:
        """Return what it found in its file of that number, from 1;
        OSError where the disk failed, ExportError where the program ended.
        """
        with self._heard:
            self._heard.wait_for(lambda: self._ended or len(self._answers) >= number)
        found = self._answers[number - 1] if len(self._answers) >= number else {}
        if code := found.get("errno"):
            raise OSError(code, os.strerror(code))
        if not found:
            if self._process.wait() == -signal.SIGBUS:  # a page that cannot be read
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            said = self._process.stderr.read().strip().splitlines() or ["it was killed"]
            raise ExportError(f"the process that reads back the export ended: {said[-1]}")
        return found

    def close(self) -> None:
        """End the process, also amid a file."""
        self._process.kill()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):  # what was not sent
                pipe.close()
        self._process.wait()


@dataclass(frozen=True)
class _WrittenPart:
    """The header of a file, or one of its tensors, as it was written."""

    name: str
    place: TensorEntry | None  # None: the header
    expected: str  # the XXH3 of what was written, or the digest of what was copied
    copied: Callable[[], object] | None = None  # `StoredRows.check`

    def check(self, path: Path, xxh3: str, digest: str | None) -> None:
        """Compare it with what was read back: CheckpointError where what was copied is not what was
        saved, else ExportError.
        """
        if self.expected == (digest if self.copied else xxh3):
            return
        if self.copied:
            self.copied()
        raise ExportError(f"{path} reads back with other bytes than were written")


@dataclass(frozen=True)
class WrittenFile:
    """A weight file that was written, and which file it is of the follower that hashes it."""

    path: Path
    parts: list[_WrittenPart]
    follower: Follower
    number: int

    def describe(self) -> dict[str, Any]:
        """Return {"files", "tensors"} as `export_manifest.describe` does. Waits until the file was
        read back.

        Raises:
            ExportError: it does not hold what was written.
            CheckpointError: the checkpoint does not hold what was saved.
            OSError: the disk failed.
        """
        found, tensors = self.follower.answer(self.number), {}
        for part, (xxh3, digest) in zip(self.parts, found["parts"], strict=True):
            part.check(self.path, xxh3, digest)
            if part.place is not None:
                tensors[part.name] = export_manifest.describe_tensor(part.place, xxh3)
        file = {"size": found["size"], "xxh3": found["xxh3"]}
        return {"files": {self.path.name: file}, "tensors": tensors}


def write_file(
    path: Path,
    header: bytes,
    places: dict[str, TensorEntry],
    values: Iterator[TensorValues],
    follower: Follower,
    advance: Callable[[int], object],
) -> WrittenFile:
    """Write a safetensors file; see [Note: hashed behind the writing].

    Args:
        header: its first bytes.
        places, values: its tensors in order, and the values of each.
        advance: called with the numbers of bytes that were written.

    ExportError: values that do not have the planned size, or that their dtype cannot hold.
    """
    end = told = 0
    parts = []
    with open(path, "xb", buffering=0) as file:
        preallocate(file.fileno(), 0, len(header) + sum(p.nbytes for p in places.values()))
        follower.tell("file", json.dumps(str(path)))

        def write(contents: Iterable[memoryview], copied: StoredRows | None = None) -> str:
            nonlocal end, told
            hashed = xxhash.xxh3_128()
            for content in contents:
                if copied is None:
                    hashed.update(content)
                _write_all(file.fileno(), content, end)
                end += len(content)
                if end - told >= _PORTION:
                    follower.tell("to", end)
                    told = end
                advance(len(content))
                del content  # a view may keep its whole group while the next one is read
            follower.tell("part", end)
            return hashed.hexdigest()

        parts.append(_WrittenPart("", None, write([memoryview(header)])))
        for name, place in places.items():
            begin, value = end, next(values)
            if isinstance(value, StoredRows):
                follower.tell("rows", f"{value.width} {json.dumps(value.key)}")
                write(_copied(value), value)
                parts.append(_WrittenPart(name, place, value.digest, value.check))
            else:
                parts.append(_WrittenPart(name, place, write(_contents(value, place.dtype, name))))
            del value
            if (begin, end - begin) != (place.begin, place.nbytes):
                raise ExportError(
                    f"{name} got {end - begin} bytes at {begin} of {path}, planned were "
                    f"{place.nbytes} at {place.begin}"
                )
    follower.tell("end")
    follower.files += 1
    return WrittenFile(path, parts, follower, follower.files)


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _contents(
    values: torch.Tensor | Iterator[torch.Tensor], dtype: torch.dtype, name: str
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in `dtype`, in row-major order, a block at a time."""
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
