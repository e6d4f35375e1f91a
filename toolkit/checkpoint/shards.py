"""The shards of a checkpoint: written by torch's DCP under a sha256, read by it in place."""

import contextlib
import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit import ranks
from toolkit.checkpoint.attempts import SHARD
from toolkit.checkpoint.store import Folder, storage_of
from toolkit.errors import CheckpointError
from toolkit.formats import ChunkTable, check_blob, local_slices, local_tensor
from toolkit.formats.bit_sums import bytes_sum, wrapped
from toolkit.formats.device_threads import device_pool
from toolkit.formats.synced_files import sync, write_behind

_FILES = 4  # of a rank at most: a core checksums, hashes and writes some 0.5 GB/s
_WORTH_A_FILE = 64 * 2**20
_READERS = 4
_BLOCK = 2**20
# In torch 2.11 the choice is the process's: what other threads save meanwhile would lack them.
_OF_THREAD = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"
_RECORD = b"/data/0"  # the bytes of a tensor, as `torch.save` names them in a blob


class HashingWriter(FileSystemWriter):
    """`FileSystemWriter` that leaves size and sha256 of what this rank wrote, fsynced, in `files`.

    Several at a time, where a rank has cores and much to write; `ranks_here` share the machine. The
    tensors may go to `shards` elsewhere; `.metadata` stays in `folder`. What is written is
    compared with `expected`: tensor -> bytes of this rank's part, and their sum in its own memory
    (`part_sums`). CheckpointError: other bytes were written; nothing is compared without.

    `in_host_memory`: every tensor is there already, so no copy from a device is waited for. torch
    would otherwise wait for the stream that trains after every 10 MB, of host tensors too.
    """

    def __init__(
        self,
        folder: Path,
        shards: Folder | None = None,
        *,
        ranks_here: int = 1,
        expected: Mapping[str, tuple[int, int]] | None = None,
        in_host_memory: bool = False,
    ) -> None:
        # Not fsynced by torch: it does so before Python's own buffer is written.
        super().__init__(folder, sync_files=False)
        if in_host_memory:
            self.per_thread_copy_ahead = 0  # then torch takes the tensors as they are
        self.ranks_here, self.expected = ranks_here, expected
        self.fs = self._files = _Files(folder, shards or folder)
        self.files = self._files.hashed

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> "Future[Any]":
        """Write this rank's items; what `dcp.save` calls."""
        most = min(_FILES, len(ranks.available_cores()) // self.ranks_here)
        count = max(1, min(most, sum(map(_size, plan.items)) // _WORTH_A_FILE))
        write, prefix = super().write_data, plan.storage_data.prefix
        # Not by torch's own threads: what fails in one of those is lost. torch's checksums of blobs
        # cost as much as sha256 does.
        pool = device_pool(_FILES, "shards", _without_checksums if _OF_THREAD else None)
        with pool:
            jobs = []
            for i, items in enumerate(filter(None, spread(plan.items, _size, count))):
                own = f"{prefix}{i}_" if i else prefix
                names = dataclasses.replace(plan.storage_data, prefix=own)
                part = dataclasses.replace(plan, items=items, storage_data=names)
                jobs.append(pool.submit(write, part, planner))
            results = [result for job in jobs for result in job.result().wait()]
        self._prove(results)
        return _done(results)

    def _prove(self, results: list[WriteResult]) -> None:
        """Compare what was written with what this rank's memory held."""
        if self.expected is None:
            return
        wrong = []
        for result in results:
            name, place = result.index.fqn, result.storage_data
            written = self._files.payloads[place.relative_path].get(place.offset, (0, 0))
            if self.expected[name][0] and written != self.expected[name]:
                wrong.append(name)
        if wrong:
            raise CheckpointError(
                f"other bytes were written of {len(wrong)} tensor(s) than memory held: "
                f"{', '.join(wrong[:3])}{', ...' * (len(wrong) > 3)}; a device, its driver or this "
                "machine's memory is at fault, or something wrote to them during the save"
            )


class ShardReader(FileSystemReader):
    """`FileSystemReader` with metadata that was read before; it reads several blobs at a time."""

    def __init__(self, folder: Folder, metadata: Metadata) -> None:
        base = Path(str(folder))  # on a store torch joins names only
        super().__init__(base)
        self.fs = self._files = _Files(base, folder)
        self.metadata, self.requested = metadata, 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; torch's own way would run its pickle."""
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> "Future[None]":
        """Read this rank's items; called by `dcp.load`."""
        items = sorted(plan.items, key=lambda i: self.storage_data[i.storage_index].offset)
        blobs = {i.storage_index: self.storage_data[i.storage_index] for i in items}
        self.requested = sum(self.storage_data[i.storage_index].length for i in items)
        for blob in blobs.values() if self._files.on_disk else ():
            check_blob(Path(self.path) / blob.relative_path, blob.offset, blob.length)
        read = super().read_data
        with device_pool(_READERS, "shards") as pool:
            parts = [dataclasses.replace(plan, items=items[i::_READERS]) for i in range(_READERS)]
            for job in [pool.submit(read, part, planner) for part in parts]:
                job.result()
        return _done(None)


class _Files(FileSystem):
    """torch's file system: hashes shards while they are written; those that torch names in `base`
    are in `shards`.
    """

    def __init__(self, base: Path, shards: Folder) -> None:
        self.base, self.shards = base, shards
        self.on_disk = storage_of(shards).is_disk
        self.hashed: dict[str, dict[str, Any]] = {}
        # File -> offset of a blob -> length and sum of its tensor's bytes.
        self.payloads: dict[str, dict[int, tuple[int, int]]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; size and hash of a shard are in `hashed` when it is written."""
        path = Path(path)
        is_shard = path.suffix == SHARD
        target = self.shards / path.relative_to(self.base) if is_shard else path
        with target.open(mode) as file:
            stream = HashingStream(path.name, file, self) if is_shard and mode == "wb" else file
            yield stream
        if isinstance(stream, HashingStream):
            if self.on_disk:
                sync(path)
            self.hashed[path.name] = {"size": stream.size, "sha256": stream.sha256.hexdigest()}
            self.payloads[path.name] = stream.payloads


class HashingStream:
    """A file under a hash, as `torch.save` writes to it."""

    def __init__(self, name: str, file: Any, files: _Files) -> None:
        self.name, self.file, self.files = name, file, files
        self.sha256, self.size, self.given = hashlib.sha256(), 0, 0
        self.begun = 0
        self.payloads: dict[int, tuple[int, int]] = {}
        self._until_payload = 0  # calls
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close

    def write(self, content: Any) -> int:
        view, size = memoryview(content), len(content)
        # torch.save writes the name of a record, its padding, then its bytes, each in one call.
        is_payload, total = self._until_payload == 1, 0
        self._until_payload = (
            2 if size < 64 and bytes(view).endswith(_RECORD) else (max(0, self._until_payload - 1))
        )
        for begin in range(0, size, _BLOCK):
            block = view[begin : begin + _BLOCK]  # written while the processor's cache has it
            self.sha256.update(block)
            if is_payload:
                total += bytes_sum(block)
            self.file.write(block)
        if is_payload:
            self.payloads[self.begun] = size, wrapped(total)
        self.size += size
        if self.files.on_disk:
            self.given = write_behind(self.fileno(), self.given, self.size)
        return size

    def tell(self) -> int:
        """Return the size; torch asks for it before each blob and behind it."""
        self.begun = self.size
        return self.size


def read_tensors(folder: Folder, table: ChunkTable, tensors: dict[str, torch.Tensor]) -> int:
    """Fill this rank's parts of `tensors` in place from a DCP folder; return the bytes asked for.

    Collective. Each name must be in `table` with the tensor's shape and dtype. torch reads the
    whole blob of every chunk that a rank shares: up to twice its own bytes on twice the ranks.
    CheckpointError: on every rank: chunks do not cover a tensor once, or a blob is damaged.
    """

    def check_whole() -> None:
        for name in tensors:
            if name not in table.tensors:
                raise CheckpointError(f"{name} is no tensor of {folder}")
            if fault := table.fault(name):
                raise CheckpointError(f"{folder}: {name} is not whole: {fault}")

    ranks.on_main(check_whole)
    own = {n: t for n, t in tensors.items() if local_tensor(t).numel()}
    reader = ShardReader(folder, table.part({n: _box(t) for n, t in own.items()}))

    def read() -> None:
        # Nothing is planned together: each rank knows its own part.
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(own, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            ((failure, _),) = error.failures.values()
            text = " ".join(str(failure).split())
            raise CheckpointError(f"{folder} cannot be read: {text}") from error

    ranks.on_all(read)
    return reader.requested


def _box(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return offsets and sizes of the part of `tensor` that this rank holds."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.ndim, list(tensor.shape)
    slices = local_slices(tensor)
    return [s.start for s in slices], [s.stop - s.start for s in slices]


def _without_checksums() -> None:
    torch.serialization.set_crc32_options(False)


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _size(item: dcp.WriteItem) -> int:
    return (item.tensor_storage_size() or 0) if item.tensor_data is not None else 0


def spread(items: list[Any], size: Callable[[Any], int], count: int) -> list[list[Any]]:
    """Return the items in `count` parts of about as many bytes: the largest first, each to the part
    that has least.
    """
    parts: list[list[Any]] = [[] for _ in range(count)]
    held = [0] * count
    for item in sorted(items, key=size, reverse=True):
        least = held.index(min(held))
        parts[least].append(item)
        held[least] += size(item)
    return parts
