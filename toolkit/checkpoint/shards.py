"""The shards of a checkpoint: written by torch's DCP and hashed on the way, read by it in place.

Owns the way of their bytes to a disk or a store and back. Knows neither models nor manifests.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit import ranks
from toolkit.checkpoint.store import Folder, Place
from toolkit.errors import CheckpointError
from toolkit.formats import check_blob, coverage_fault

_FILES = 4  # of a rank at most: a core checksums, hashes and writes some 0.5 GB/s
_WORTH_A_FILE = 64 * 2**20
_READERS = 4


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


class HashingWriter(FileSystemWriter):
    """`FileSystemWriter` that leaves size and sha256 of what this rank wrote in `files`.

    Every file is fsynced. Where a rank has several cores and much to write, it writes several files
    at a time.

    Args:
        folder: of the checkpoint.
        shards: where the tensors go instead, on an object store; `.metadata` stays in `folder`.
        ranks_here: processes that save on this machine.
    """

    def __init__(self, folder: Path, shards: Place | None = None, *, ranks_here: int = 1) -> None:
        super().__init__(folder, sync_files=shards is None)
        self.shards, self.ranks_here = shards, ranks_here
        self.fs = self._hashed = _HashedFiles(shards)
        self.files = self._hashed.files

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Return where the checkpoint is, for torch's logs and its metadata."""
        return self.path if self.shards is None else str(self.shards)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's items; called by `dcp.save`."""
        write, prefix = super().write_data, plan.storage_data.prefix
        # Not by torch's own threads: what fails in one of those is lost.
        with ThreadPoolExecutor(_FILES, "shards") as pool:
            jobs = []
            for i, part in enumerate(_split(plan.items, self._files_at_a_time(plan.items))):
                names = dataclasses.replace(
                    plan.storage_data, prefix=f"{prefix}{i}_" if i else prefix
                )
                own = dataclasses.replace(plan, items=part, storage_data=names)
                jobs.append(pool.submit(write, own, planner))
            try:
                results = [result for job in jobs for result in job.result().wait()]
            except BaseException:  # of one file, or an interrupt: the others need not go on
                self._hashed.stopped = True
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _files_at_a_time(self, items: list[WriteItem]) -> int:
        """Return into how many files the items go, so that hashing them keeps up with a disk."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        most = min(_FILES, (cores or 1) // self.ranks_here)
        return max(1, min(most, sum(map(_size, items)) // _WORTH_A_FILE))


class _HashedFiles(FileSystem):
    """torch's file system, whose shards are hashed while they are written."""

    def __init__(self, shards: Place | None) -> None:
        self.shards = shards
        self.files: dict[str, dict[str, Any]] = {}
        self.stopped = False

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; its size and hash are in `files` when it is written."""
        path = Path(path)
        if path.suffix != ".distcp":  # the metadata, which is small
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        target = path if self.shards is None else self.shards / path.name
        with target.open("wb") as file:
            hashing = HashingStream(path.name, file, self)
            yield hashing
        self.files[path.name] = {
            "size": hashing.size,
            "sha256": hashing.sha256.hexdigest(),
        }


class HashingStream:
    """A file under a hash, as `torch.save` writes to it."""

    def __init__(self, name: str, file: Any, files: _HashedFiles) -> None:
        self.name, self.file, self.files = name, file, files
        self.sha256, self.size = hashlib.sha256(), 0
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close

    def write(self, content: Any) -> int:
        """Append."""
        if self.files.stopped:
            raise CheckpointError("the checkpoint was given up while it was written")
        self.sha256.update(content)
        self.file.write(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        """Return how much was written."""
        return self.size


def _size(item: WriteItem) -> int:
    return (item.tensor_storage_size() or 0) if item.tensor_data is not None else 0


def _split(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Return the items in at most `count` parts of about as many bytes: the largest first, each to
    the part that has least.
    """
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    held = [0] * count
    for item in sorted(items, key=_size, reverse=True):
        least = held.index(min(held))
        parts[least].append(item)
        held[least] += _size(item)
    return [part for part in parts if part]


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def read_tensors(folder: Folder, metadata: Metadata, tensors: dict[str, torch.Tensor]) -> int:
    """Fill this rank's parts of `tensors` in place from a DCP folder; return the bytes asked for.

    Collective. Each name must be in `metadata` with the tensor's shape and dtype. torch reads the
    whole blob of every chunk that a rank shares: its own bytes on the number of ranks that saved,
    up to twice those on twice as many.

    Args:
        metadata: from `toolkit.formats.dcp.read_metadata`: torch's own reader would run its pickle.

    Raises:
        CheckpointError: on every rank; a tensor whose chunks do not cover it exactly once, a
            damaged blob, a file that ends too early.
    """

    def check_whole() -> None:
        for name in tensors:
            if fault := coverage_fault(metadata, name):
                raise CheckpointError(f"{folder}: {name} is not whole: {fault}")

    ranks.on_all(check_whole)
    reader = _ShardReader(folder, metadata)
    try:
        group = ranks.object_group()
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        first = next(iter(error.failures.values()), error)
        cause = first[0] if isinstance(first, tuple) else first
        text = " ".join(str(cause).split())
        raise CheckpointError(f"{folder} cannot be read: {text}") from error
    return reader.requested


def own_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of this rank's parts."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors.values())


class _ShardReader(FileSystemReader):
    """`FileSystemReader` with metadata that was read before; it reads several blobs at a time."""

    def __init__(self, folder: Folder, metadata: Metadata) -> None:
        super().__init__(Path() if isinstance(folder, Place) else folder)
        self.on_disk = not isinstance(folder, Place)
        if isinstance(folder, Place):
            self.fs = _StoredFiles(folder)
        self.metadata, self.requested = metadata, 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        items = sorted(plan.items, key=lambda i: self.storage_data[i.storage_index].offset)
        blobs = {i.storage_index: self.storage_data[i.storage_index] for i in items}
        self.requested = sum(self.storage_data[i.storage_index].length for i in items)
        for blob in blobs.values() if self.on_disk else ():
            check_blob(Path(self.path) / blob.relative_path, blob.offset, blob.length)
        read = super().read_data
        with ThreadPoolExecutor(_READERS, "shards") as pool:
            parts = [dataclasses.replace(plan, items=items[i::_READERS]) for i in range(_READERS)]
            for job in [pool.submit(read, part, planner) for part in parts]:
                job.result()
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _StoredFiles(FileSystem):
    """torch's file system over the shards on an object store."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a shard for reading."""
        with (self.place / os.path.basename(path)).open(mode) as stream:
            yield stream
