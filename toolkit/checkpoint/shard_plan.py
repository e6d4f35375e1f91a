"""Divide the tensors of a checkpoint among ranks, and write `.metadata`, without DCP's planner.

`dcp.save` plans on rank 0, an object for each tensor of each rank: with 900 tensors on 1,024 ranks
minutes of each save. Here a rank knows from the layout of a tensor which part it writes: of
replicas one writes. What it wrote goes to rank 0 as numbers, and only where that is other than in
the last save; the metadata that rank 0 made of them it keeps. The folder is as DCP writes it.
"""

import contextlib
import math
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.checkpoint.local_folder import disk_error
from toolkit.checkpoint.shards import HashingWriter
from toolkit.errors import CheckpointError
from toolkit.formats import METADATA_FILE, ChunkTable, Known, Tensors, local_tensor
from toolkit.training.train_state import Saves


@dataclass
class _Saved:
    """The tensors and chunks that the ranks wrote last."""

    own: bytes = b""
    every: list[bytes] = field(default_factory=list)  # on rank 0, as the next two are
    known: Known = field(default_factory=dict)
    metadata: bytes = b""  # some 100 bytes a chunk


def write_shards(tensors: Tensors, writer: HashingWriter, failed: str, saves: Saves) -> None:
    """Write the `tensors` of all ranks, each its part, and on rank 0 the `.metadata`. Collective.
    `saves` keeps what was written, of which the next save sends the changes alone.

    Every rank brings the same names. CheckpointError, which begins with `failed`, on every rank:
    one could not write, or together they hold a tensor not at all or twice.
    """
    last = saves.written or _Saved()
    if not ranks.all_equal(sorted(tensors)):
        raise CheckpointError(f"{failed}: the ranks hold tensors of other names")
    saved = _Saved()

    def write() -> bytes:
        with _named(failed):
            saved.known, saved.own = _write_own(tensors, writer)
        return b"" if saved.own == last.own else saved.own

    told = ranks.gather_results_to_main(write)

    def finish() -> None:
        saved.every = [new or old for new, old in zip(told, last.every or told, strict=True)]
        saved.metadata = last.metadata
        with _named(failed):
            if saved.known != last.known or any(told):
                saved.metadata = metadata_of(saved.known, saved.every)
            Path(writer.path, METADATA_FILE).write_bytes(saved.metadata)

    ranks.on_main(finish)
    saves.written = saved


def written_here(tensors: Tensors) -> set[str]:
    """Return the names of which this rank writes its part: of replicas each writes about as many
    bytes, and every rank comes to the same result by itself.
    """
    found = set()
    loads: dict[Any, list[int]] = {}  # of the ranks that hold the same parts
    for name, tensor in tensors.items():
        part = local_tensor(tensor)
        if isinstance(tensor, DTensor):
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            if coordinate is None:
                continue
            dims = tuple(d for d, p in enumerate(tensor.placements) if p.is_replicate())
            own = 0
            for dim in dims:
                own = own * mesh.size(dim) + coordinate[dim]
            load = loads.setdefault((mesh, dims), [0] * math.prod(map(mesh.size, dims)))
        else:
            own, load = ranks.rank(), loads.setdefault(None, [0] * ranks.world_size())
        if part.numel() == 0:  # no rank, but of a tensor that is empty as a whole
            if tensor.numel() == 0 and ranks.rank() == 0:
                found.add(name)
            continue
        least = load.index(min(load))
        load[least] += part.nbytes
        if least == own:
            found.add(name)
    return found


def metadata_of(known: Known, every: list[bytes]) -> bytes:
    """Return the content of `.metadata` of the tensors `known`, where each rank says what it wrote:
    30 microseconds a blob. CheckpointError: a tensor is not there, or is twice.
    """
    table = table_of(known, every)
    for name in table.tensors:
        if fault := table.fault(name):
            raise CheckpointError(f"{name} is not whole: {fault}")
    return pickle.dumps(table.metadata())


def table_of(known: Known, every: list[bytes]) -> ChunkTable:
    """Return what all ranks wrote, of what `_summary` says of each."""
    dims = max((len(entry.size) for entry in known.values()), default=0)
    files: list[str] = []
    parts = []
    for content in every:
        names, rows = pickle.loads(zlib.decompress(content))
        rows[:, 1] += len(files)
        files += names
        parts.append(rows)
    rows = numpy.concatenate(parts)
    rows = rows[rows[:, 0].argsort(kind="stable")]  # by tensor, then by rank
    ends = rows[:, 0].searchsorted(numpy.arange(len(known)), side="right")
    of = dict(zip(known, numpy.split(rows, ends[:-1]), strict=True))
    width = {name: len(entry.size) for name, entry in known.items()}
    return ChunkTable(
        known,
        {name: part[:, 4 : 4 + width[name]] for name, part in of.items()},
        {name: part[:, 4 + dims : 4 + dims + width[name]] for name, part in of.items()},
        {name: part[:, 1:4] for name, part in of.items()},
        files,
    )


@contextlib.contextmanager
def _named(failed: str) -> Iterator[None]:
    """Raise what happens as a CheckpointError that begins with `failed`."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{failed}: {error}") from error
    except Exception as error:  # torch gives the disk's errors other classes
        raise disk_error(failed, error) from error


def _write_own(tensors: Tensors, writer: HashingWriter) -> tuple[Known, bytes]:
    """Write this rank's part; return what a checkpoint says of each tensor, and the summary."""
    rank, planner = ranks.rank(), DefaultSavePlanner()
    # As torch has it for ranks that do not plan together: each names its own files.
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    planner.set_up_planner(tensors, writer.storage_meta(), rank == 0)
    items = planner.create_local_plan().items
    data: dict[str, Any] = {i.index.fqn: i.tensor_data for i in items}
    known = {n: TensorStorageMetadata(d.properties, d.size, []) for n, d in data.items()}
    own = written_here(tensors)
    plan = writer.prepare_local_plan(SavePlan([i for i in items if i.index.fqn in own]))
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    return known, summary(known, plan.items, written.value())


def summary(known: Known, items: list[WriteItem], results: list[WriteResult]) -> bytes:
    """Return what a rank wrote: names of files, and a row for each blob: numbers of tensor and
    file, offset and length in the file, offsets and sizes in the tensor; some 10 bytes a blob.
    """
    dims = max((len(entry.size) for entry in known.values()), default=0)
    chunks: dict[str, Any] = {i.index.fqn: i.tensor_data.chunk for i in items}  # type: ignore[union-attr]
    numbers = {name: i for i, name in enumerate(known)}
    files: dict[str, int] = {}
    rows = numpy.zeros((len(results), 4 + 2 * dims), numpy.int64)
    for row, result in zip(rows, results, strict=True):
        name, place = result.index.fqn, result.storage_data
        chunk, file = chunks[name], files.setdefault(place.relative_path, len(files))
        row[:4] = numbers[name], file, place.offset, place.length
        row[4 : 4 + len(chunk.offsets)] = chunk.offsets
        row[4 + dims : 4 + dims + len(chunk.sizes)] = chunk.sizes
    return zlib.compress(pickle.dumps((list(files), rows)), 1)
