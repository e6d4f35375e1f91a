"""Keep the chunks of a torch distributed checkpoint (DCP) as arrays instead of objects.

A model of 900 tensors on 1,024 ranks has 900,000 chunks. In torch's own `Metadata` each takes 3
Python objects and two dictionary entries; here it takes 56 bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from toolkit.formats.dcp_tensors import find_boxes_fault

TensorsMetadata = dict[str, TensorStorageMetadata]  # metadata of tensors by name
Array = Any  # numpy, int64


@dataclass
class ChunkTable:
    """The tensors of a DCP checkpoint, with their chunks as rows of numpy arrays."""

    tensors: TensorsMetadata
    """Size and dtype. Their `chunks` are empty, because the arrays replace them."""
    offsets: dict[str, Array]  # [chunks, dims]
    sizes: dict[str, Array]  # [chunks, dims]
    places: dict[str, Array]  # [chunks, 3]: number of the file, offset and length of the blob there
    files: list[str]

    def find_fault(self, name: str) -> str | None:
        """Explain why a tensor's chunks do not cover each element exactly once; None if they do."""
        size = tuple(self.tensors[name].size)
        offsets = self.offsets[name]
        sizes = self.sizes[name]
        if size and _are_full_rows(size, offsets, sizes):
            order = offsets[:, 0].argsort(kind="stable")
            begin, end = offsets[order, 0], offsets[order, 0] + sizes[order, 0]
            if begin[0] == 0 and end[-1] == size[0] and (begin[1:] == end[:-1]).all():
                return None
        boxes = zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)
        return find_boxes_fault(size, boxes)

    def metadata_of_boxes(self, boxes: dict[str, tuple[Iterable[int], Iterable[int]]]) -> Metadata:
        """Build torch's `Metadata` with only those chunks that overlap given boxes.

        Args:
            boxes: tensor name -> (offsets, sizes) of a rectangular part of the tensor. Tensors
                without a box are omitted; an empty box has no chunks.
        """
        rows = {}
        for name, (offsets, sizes) in boxes.items():
            low, extent = (numpy.asarray(list(x), numpy.int64) for x in (offsets, sizes))
            begin, end = self.offsets[name], self.offsets[name] + self.sizes[name]
            meets = (begin < low + extent) & (end > low)
            rows[name] = meets.all(1).nonzero()[0] if extent.all() else numpy.arange(0)
        return self._build_metadata(rows)

    def to_metadata(self) -> Metadata:
        """Build torch's `Metadata` of all tensors; takes about 5 microseconds per chunk."""
        return self._build_metadata(dict.fromkeys(self.tensors))

    def _build_metadata(self, rows: dict[str, Array | None]) -> Metadata:
        """Build torch's `Metadata` with the chosen chunks.

        Args:
            rows: tensor name -> indices of its chunks; None takes all of them.
        """
        tensors: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        shared_sizes: dict[tuple[int, ...], torch.Size] = {}  # one object for all equal sizes
        for name, chosen in rows.items():
            parts = (self.offsets[name], self.sizes[name], self.places[name])
            chunks = []
            for i, (offset, size, (file, begin, length)) in enumerate(
                zip(*((p if chosen is None else p[chosen]).tolist() for p in parts), strict=True)
            ):
                at = torch.Size(offset)
                extent = shared_sizes.setdefault(tuple(size), torch.Size(size))
                chunks.append(ChunkStorageMetadata(at, extent))
                index = MetadataIndex(name, at, i)
                # It has made an equal copy, which would take memory.
                object.__setattr__(index, "offset", at)
                storage[index] = _StorageInfo(self.files[file], begin, length)
            tensors[name] = replace(self.tensors[name], chunks=chunks)
        return Metadata(
            state_dict_metadata=tensors,
            planner_data={name: (name,) for name in tensors},
            storage_data=storage,
            # Without path and id, so that equal saves have equal metadata.
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )


def table_from_metadata(metadata: Metadata) -> ChunkTable:
    """Convert torch's `Metadata` to a `ChunkTable`.

    Entries that are no tensors, and chunks without a blob or with transformed bytes are omitted.
    """
    tensors: TensorsMetadata = {}
    files: dict[str, int] = {}
    offsets, sizes, places = {}, {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        tensors[name] = replace(entry, chunks=[])
        rows = []
        for chunk in entry.chunks:
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is not None and not info.transform_descriptors:
                file = files.setdefault(info.relative_path, len(files))
                rows.append([*chunk.offsets, *chunk.sizes, file, info.offset, info.length])
        dims = len(entry.size)
        table = numpy.array(rows, numpy.int64).reshape(len(rows), 2 * dims + 3)
        offsets[name], sizes[name] = table[:, :dims], table[:, dims : 2 * dims]
        places[name] = table[:, 2 * dims :]
    return ChunkTable(tensors, offsets, sizes, places, list(files))


def _are_full_rows(size: tuple[int, ...], offsets: Array, sizes: Array) -> bool:
    """Return True if every chunk spans complete rows (dim 0) of the tensor and no chunk is empty.

    Args:
        size: shape of the tensor.
        offsets: [chunks, dims], first index of each chunk in the tensor.
        sizes: [chunks, dims], shape of each chunk.
    """
    has_full_rows = (offsets[:, 1:] == 0).all() and (sizes[:, 1:] == numpy.array(size[1:])).all()
    return (
        len(offsets) > 0 and bool(has_full_rows and (sizes[:, 0] > 0).all()) and math.prod(size) > 0
    )
