"""The shards of a checkpoint: written by torch's DCP under a sha256, read by it in place."""

import contextlib
import dataclasses
import hashlib
import math
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from toolkit import ranks
from toolkit.checkpoint.local_folder import disk_error
from toolkit.checkpoint.names import SHARD
from toolkit.checkpoint.store import Folder, storage_of
from toolkit.errors import CheckpointError
from toolkit.formats import (
    METADATA_FILE,
    ChunkTable,
    Tensors,
    TensorsMetadata,
    check_blob,
    local_slices,
    local_tensor,
)
from toolkit.formats.bit_sums import bytes_sum, wrap_to_int64
from toolkit.formats.device_threads import device_pool
from toolkit.formats.synced_files import fsync_path, write_behind
from toolkit.training.train_state import Saves

_FILES = 4  # of a rank at most: a core checksums, hashes and writes some 0.5 GB/s
_WORTH_A_FILE = 64 * 2**20
_READERS = 4
_BLOCK = 2**20
# In torch 2.11 the setting is global, so files that other threads save would lose checksums, too.
_OF_THREAD = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"
_RECORD = b"/data/0"  # the bytes of a tensor, as `torch.save` names them in a blob


class HashingWriter(FileSystemWriter):
    """`FileSystemWriter` that hashes and fsyncs the files that this rank writes.

    The attribute `files` maps each written file to its size and sha256. A rank with enough cores
    and data writes up to four files in parallel.

    Args:
        folder: the folder of `.metadata`, and of the tensors if `shards` is None.
        shards: the folder of the tensors, possibly on a store.
        ranks_here: number of ranks that share the machine.
        expected: tensor -> (bytes of this rank's part, checksum of these bytes in memory, from
            `part_sums`). Written bytes are compared with it; None compares nothing.
        in_host_memory: True if every tensor is in host memory, so that the writer need not wait for
            copies from a device. torch would otherwise wait for the training stream every 10 MB.

    Raises:
        CheckpointError: written bytes differ from `expected`.
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
        # torch would fsync before Python's buffer is written, so `create_stream` does it.
        super().__init__(folder, sync_files=False)
        if in_host_memory:
            self.per_thread_copy_ahead = 0  # then torch takes the tensors as they are
        self.ranks_here, self.expected = ranks_here, expected
        self.fs = self._files = _ShardFileSystem(folder, shards or folder)
        self.files = self._files.hashed

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> "Future[Any]":
        """Write the tensor parts in `plan`, in several files; called by `dcp.save`.

        Raises:
            CheckpointError: written bytes differ from `expected`.
        """
        most = min(_FILES, len(ranks.available_cores()) // self.ranks_here)
        count = max(1, min(most, sum(map(_item_bytes, plan.items)) // _WORTH_A_FILE))
        write, prefix = super().write_data, plan.storage_data.prefix
        # torch's threads would lose an exception, so these are separate ones. The checksums that
        # torch adds to blobs cost as much as sha256.
        pool = device_pool(_FILES, "shards", _disable_crc32 if _OF_THREAD else None)
        with pool:
            jobs = []
            for i, items in enumerate(filter(None, split_by_size(plan.items, _item_bytes, count))):
                local_prefix = f"{prefix}{i}_" if i else prefix
                names = dataclasses.replace(plan.storage_data, prefix=local_prefix)
                part = dataclasses.replace(plan, items=items, storage_data=names)
                jobs.append(pool.submit(write, part, planner))
            results = [result for job in jobs for result in job.result().wait()]
        self._compare_with_memory(results)
        return _completed_future(results)

    def _compare_with_memory(self, results: list[WriteResult]) -> None:
        """Raise a CheckpointError if the written bytes of a tensor differ from `expected`.

        Does nothing if `expected` is None.
        """
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
    """`FileSystemReader` that takes its metadata as an argument and reads with several threads.

    After a load, the attribute `requested` is the number of bytes that were read.
    """

    def __init__(self, folder: Folder, metadata: Metadata) -> None:
        base = Path(str(folder))  # on a store torch joins names only
        super().__init__(base)
        self.fs = self._files = _ShardFileSystem(base, folder)
        self.metadata, self.requested = metadata, 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata from the constructor. torch's method would unpickle a file."""
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> "Future[None]":
        """Read the tensor parts in `plan` with several threads; called by `dcp.load`.

        Raises:
            CheckpointError: on a disk, a stored chunk is not as torch.save writes it.
        """
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
        return _completed_future(None)


class _ShardFileSystem(FileSystem):
    """File system for torch that hashes shard files while they are written.

    torch passes paths below `base`. Files with tensors are stored in `shards` instead, possibly on
    a store.
    """

    def __init__(self, base: Path, shards: Folder) -> None:
        self.base, self.shards = base, shards
        self.on_disk = storage_of(shards).is_disk
        self.hashed: dict[str, dict[str, Any]] = {}
        # File -> offset of a blob -> length and sum of its tensor's bytes.
        self.payloads: dict[str, dict[int, tuple[int, int]]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file as a context manager; hash it if it is a new shard.

        After a shard is written, `hashed` has its size and sha256, and `payloads` has the checksums
        of the tensors in it.
        """
        path = Path(path)
        is_shard = path.suffix == SHARD
        target = self.shards / path.relative_to(self.base) if is_shard else path
        with target.open(mode) as file:
            stream = HashingStream(path.name, file, self) if is_shard and mode == "wb" else file
            yield stream
        if isinstance(stream, HashingStream):
            if self.on_disk:
                fsync_path(path)
            self.hashed[path.name] = {"size": stream.size, "sha256": stream.sha256.hexdigest()}
            self.payloads[path.name] = stream.payloads


class HashingStream:
    """A writable file that hashes its content, and sums the bytes of each tensor in it.

    It recognises a tensor's bytes by the order in which `torch.save` writes.
    """

    def __init__(self, name: str, file: Any, files: _ShardFileSystem) -> None:
        self.name, self.file, self.files = name, file, files
        self.sha256, self.size, self.flushed = hashlib.sha256(), 0, 0
        self.begun = 0
        self.payloads: dict[int, tuple[int, int]] = {}
        self._until_payload = 0  # calls
        self.flush, self.fileno, self.close = file.flush, file.fileno, file.close

    def write(self, content: Any) -> int:
        """Write and hash `content`; return its length in bytes.

        If it is a tensor's bytes, also record their length and checksum in `payloads`.
        """
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
            self.payloads[self.begun] = size, wrap_to_int64(total)
        self.size += size
        if self.files.on_disk:
            self.flushed = write_behind(self.fileno(), self.flushed, self.size)
        return size

    def tell(self) -> int:
        """Return the position in bytes, and remember it as the start of the next tensor.

        torch calls this at the start of each tensor.
        """
        self.begun = self.size
        return self.size


def read_tensors(folder: Folder, table: ChunkTable, tensors: dict[str, torch.Tensor]) -> int:
    """Load this rank's parts of `tensors` in place from a DCP folder. Collective.

    If a rank needs any part of a stored chunk, torch reads all of it. On twice the ranks, this is
    up to twice the bytes of the rank's part.

    Args:
        folder: the DCP folder, possibly on a store.
        table: the chunks in the folder; it has each tensor with the same shape and dtype.
        tensors: name -> tensor to fill.

    Returns:
        The number of bytes that this rank read.

    Raises:
        CheckpointError: on every rank: a tensor is missing, a chunk is damaged, or the chunks of a
            tensor leave gaps or overlap.
    """

    def check_complete() -> None:
        """Raise a CheckpointError if a tensor is missing or its chunks are incomplete."""
        for name in tensors:
            if name not in table.tensors:
                raise CheckpointError(f"{name} is no tensor of {folder}")
            if fault := table.find_fault(name):
                raise CheckpointError(f"{folder}: {name} is not complete: {fault}")

    ranks.on_main(check_complete)
    local_tensors = {n: t for n, t in tensors.items() if local_tensor(t).numel()}
    reader = ShardReader(
        folder,
        table.metadata_of_boxes({n: _local_offsets_and_sizes(t) for n, t in local_tensors.items()}),
    )

    def read() -> None:
        """Load this rank's parts with `dcp.load`, without communication."""
        # Each rank knows its part, so the ranks need not plan together.
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(local_tensors, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            ((failure, _),) = error.failures.values()
            text = " ".join(str(failure).split())
            raise CheckpointError(f"{folder} cannot be read: {text}") from error

    ranks.on_all(read)
    return reader.requested


def _local_offsets_and_sizes(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return (offsets, sizes) of this rank's part in the full tensor, per dimension."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.ndim, list(tensor.shape)
    slices = local_slices(tensor)
    return [s.start for s in slices], [s.stop - s.start for s in slices]


def _disable_crc32() -> None:
    """Make `torch.save` write no CRC32 checksums in this thread."""
    torch.serialization.set_crc32_options(False)


def _completed_future(value: Any) -> "Future[Any]":
    """Return a torch future that already holds `value`."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _item_bytes(item: dcp.WriteItem) -> int:
    """Return the bytes of the tensor that `item` writes; 0 if it is no tensor."""
    return (item.tensor_storage_size() or 0) if item.tensor_data is not None else 0


def split_by_size(items: list[Any], size: Callable[[Any], int], count: int) -> list[list[Any]]:
    """Divide items into `count` lists of about equal total size.

    Each item, largest first, is added to the list that is smallest so far. Lists may be empty.

    Args:
        items: the items.
        size: returns the size of an item.
        count: number of lists.
    """
    parts: list[list[Any]] = [[] for _ in range(count)]
    part_sizes = [0] * count
    for item in sorted(items, key=size, reverse=True):
        least = part_sizes.index(min(part_sizes))
        parts[least].append(item)
        part_sizes[least] += size(item)
    return parts


@dataclass
class _WrittenChunks:
    """The chunks that one save wrote, kept so that the next save need not send equal ones again."""

    local_chunks: bytes = b""
    chunks_by_rank: list[bytes] = field(default_factory=list)  # on rank 0, like both fields below
    tensors_metadata: TensorsMetadata = field(default_factory=dict)
    metadata: bytes = b""  # some 100 bytes a chunk


def write_shards(tensors: Tensors, writer: HashingWriter, failed: str, saves: Saves) -> None:
    """Write the shards of all ranks, and `.metadata` on rank 0. Collective.

    Args:
        tensors: name -> tensor, with the same names on every rank.
        writer: writes to the checkpoint.
        failed: beginning of the error message.
        saves: its field `written` holds the chunks of the last save, and is set to those of this
            save. A rank whose chunks are the same as in the last save sends nothing to rank 0.

    Raises:
        CheckpointError: on every rank: a rank could not write, the ranks have different names, or a
            part of a tensor was written by no rank or twice.
    """
    last = saves.written or _WrittenChunks()
    if not ranks.all_equal(sorted(tensors)):
        raise CheckpointError(f"{failed}: the ranks hold tensors of other names")
    saved = _WrittenChunks()

    def write() -> bytes:
        """Write this rank's parts; return its encoded chunks, b"" if they have not changed."""
        with _raise_as_checkpoint_error(failed):
            saved.tensors_metadata, saved.local_chunks = _write_local_parts(tensors, writer)
        return b"" if saved.local_chunks == last.local_chunks else saved.local_chunks

    changes = ranks.gather_results_to_main(write)

    def finish() -> None:
        """Write `.metadata` on rank 0; build it again only if a rank's chunks have changed."""
        saved.chunks_by_rank = [
            new or old for new, old in zip(changes, last.chunks_by_rank or changes, strict=True)
        ]
        saved.metadata = last.metadata
        with _raise_as_checkpoint_error(failed):
            if saved.tensors_metadata != last.tensors_metadata or any(changes):
                saved.metadata = build_metadata(saved.tensors_metadata, saved.chunks_by_rank)
            Path(writer.path, METADATA_FILE).write_bytes(saved.metadata)

    ranks.on_main(finish)
    saves.written = saved


def names_to_write(tensors: Tensors) -> set[str]:
    """Choose the tensors whose local parts this rank writes; return their names.

    If several ranks hold the same part, only one of them writes it. The choice balances the bytes,
    and every rank computes it without communication. An empty part is not written, except that rank
    0 writes a tensor without elements.
    """
    chosen = set()
    loads: dict[Any, list[int]] = {}  # of the ranks that hold the same parts
    for name, tensor in tensors.items():
        part = local_tensor(tensor)
        if isinstance(tensor, DTensor):
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
            dims = tuple(d for d, p in enumerate(tensor.placements) if p.is_replicate())
            position = 0
            for dim in dims:
                position = position * mesh.size(dim) + coordinate[dim]
            load = loads.setdefault((mesh, dims), [0] * math.prod(map(mesh.size, dims)))
        else:
            position, load = ranks.rank(), loads.setdefault(None, [0] * ranks.world_size())
        if part.numel() == 0:  # no rank writes it, unless the entire tensor is empty
            if tensor.numel() == 0 and ranks.rank() == 0:
                chosen.add(name)
            continue
        least = load.index(min(load))
        load[least] += part.nbytes
        if least == position:
            chosen.add(name)
    return chosen


def build_metadata(tensors_metadata: TensorsMetadata, chunks_by_rank: list[bytes]) -> bytes:
    """Build the content of DCP's `.metadata`, a pickle, from the chunks that each rank wrote.

    Takes 30 microseconds per chunk. For the arguments see `build_chunk_table`.

    Raises:
        CheckpointError: a part of a tensor is missing or was written twice.
    """
    table = build_chunk_table(tensors_metadata, chunks_by_rank)
    for name in table.tensors:
        if fault := table.find_fault(name):
            raise CheckpointError(f"{name} is not complete: {fault}")
    return pickle.dumps(table.to_metadata())


def build_chunk_table(tensors_metadata: TensorsMetadata, chunks_by_rank: list[bytes]) -> ChunkTable:
    """Build one table of the chunks that all ranks wrote.

    Args:
        tensors_metadata: name -> metadata of a tensor. In the chunks, a tensor is identified by its
            position in this dict.
        chunks_by_rank: for each rank, its output of `encode_written_chunks`.
    """
    dims = max((len(entry.size) for entry in tensors_metadata.values()), default=0)
    files: list[str] = []
    parts = []
    for content in chunks_by_rank:
        names, rows = pickle.loads(zlib.decompress(content))
        rows[:, 1] += len(files)
        files += names
        parts.append(rows)
    rows = numpy.concatenate(parts)
    rows = rows[rows[:, 0].argsort(kind="stable")]  # by tensor, then by rank
    ends = rows[:, 0].searchsorted(numpy.arange(len(tensors_metadata)), side="right")
    of = dict(zip(tensors_metadata, numpy.split(rows, ends[:-1]), strict=True))
    width = {name: len(entry.size) for name, entry in tensors_metadata.items()}
    return ChunkTable(
        tensors_metadata,
        {name: part[:, 4 : 4 + width[name]] for name, part in of.items()},
        {name: part[:, 4 + dims : 4 + dims + width[name]] for name, part in of.items()},
        {name: part[:, 1:4] for name, part in of.items()},
        files,
    )


@contextlib.contextmanager
def _raise_as_checkpoint_error(failed: str) -> Iterator[None]:
    """Convert any error in the context to a CheckpointError whose message begins with `failed`.

    It is a StorageError if a disk or store failed.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{failed}: {error}") from error
    except Exception as error:  # torch gives the disk's errors other classes
        raise disk_error(failed, error) from error


def _write_local_parts(tensors: Tensors, writer: HashingWriter) -> tuple[TensorsMetadata, bytes]:
    """Write this rank's tensor parts through `writer`.

    Returns:
        (name -> metadata of every tensor, encoded chunks of this rank; see
        `encode_written_chunks`).
    """
    rank, planner = ranks.rank(), DefaultSavePlanner()
    # As in torch for ranks that do not plan together: each rank names its own files.
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    planner.set_up_planner(tensors, writer.storage_meta(), rank == 0)
    items = planner.create_local_plan().items
    data: dict[str, Any] = {i.index.fqn: i.tensor_data for i in items}
    tensors_metadata = {n: TensorStorageMetadata(d.properties, d.size, []) for n, d in data.items()}
    chosen = names_to_write(tensors)
    plan = writer.prepare_local_plan(SavePlan([i for i in items if i.index.fqn in chosen]))
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    return tensors_metadata, encode_written_chunks(tensors_metadata, plan.items, written.value())


def encode_written_chunks(
    tensors_metadata: TensorsMetadata, items: list[WriteItem], results: list[WriteResult]
) -> bytes:
    """Encode the chunks that a rank wrote as compressed bytes, about 10 bytes per chunk.

    The content is a pickled tuple: the names of the rank's files, and an int64 array with one row
    per chunk. Its columns are: number of the tensor, number of the file, offset and length in the
    file, offsets in the tensor, sizes in the tensor.

    Args:
        tensors_metadata: name -> metadata of every tensor; its order numbers the tensors.
        items: the chunks that torch planned to write.
        results: the locations at which torch wrote them.
    """
    dims = max((len(entry.size) for entry in tensors_metadata.values()), default=0)
    chunks: dict[str, Any] = {i.index.fqn: i.tensor_data.chunk for i in items}  # type: ignore[union-attr]
    numbers = {name: i for i, name in enumerate(tensors_metadata)}
    files: dict[str, int] = {}
    rows = numpy.zeros((len(results), 4 + 2 * dims), numpy.int64)
    for row, result in zip(rows, results, strict=True):
        name, place = result.index.fqn, result.storage_data
        chunk, file = chunks[name], files.setdefault(place.relative_path, len(files))
        row[:4] = numbers[name], file, place.offset, place.length
        row[4 : 4 + len(chunk.offsets)] = chunk.offsets
        row[4 + dims : 4 + dims + len(chunk.sizes)] = chunk.sizes
    return zlib.compress(pickle.dumps((list(files), rows)), 1)
