"""A torch distributed checkpoint (DCP) on disk, read without trusting it.

    .metadata       a pickle: every tensor's shape, dtype and chunks, and where each chunk's blob is
    __R_I.distcp    blobs one after the other, each what torch.save writes: a zip file that stores
                    the tensor's bytes, uncompressed, as its member */data/0

Owns the restricted unpickler, the checks of names and sizes, and the way to a chunk's raw bytes.
Knows neither models nor the Hugging Face format.
"""

import io
import itertools
import math
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from toolkit.errors import CheckpointError

METADATA_FILE = ".metadata"
StorageInfo = _StorageInfo
"""Where a blob is. Private to torch, yet part of every DCP folder: named here alone."""


@dataclass(frozen=True)
class Chunk:
    """One rectangular part of a tensor and the blob that holds it."""

    file: Path
    blob: tuple[int, int]
    """Offset and length of the blob in the file."""
    raw: int | None
    """Offset in the file of the payload, exactly this chunk in row-major order; None where the blob
    is stored in another way: `read_chunk` reads that."""
    nbytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""


# --------------------------------------------------------------------------------------------------
# Metadata
# --------------------------------------------------------------------------------------------------


def read_metadata(folder: str | os.PathLike[str], *, blobs: bool = True) -> Metadata:
    """Return what a DCP folder holds, from its `.metadata`; nothing in that file can run code.

    Only the names that torch 2.11 to 2.13 write are accepted, and they are read as inert records:
    the `Metadata` is built afresh from them. Every file name must be that of a file in the folder
    and every blob must lie inside its file; without `blobs` the files are not looked at, to read
    what a damaged folder should hold. Costs one pass over `.metadata` and one stat a file.

    Raises:
        CheckpointError: no metadata, a global that has no place there (named), a file name outside
            the folder, or a blob beyond the end of its file.
    """
    file = Path(folder) / METADATA_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {METADATA_FILE}: not a torch DCP checkpoint folder")
    try:
        with open(file, "rb") as f:
            root = _Unpickler(f).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # what a damaged pickle raises has no common class
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    try:
        metadata = _build_metadata(root)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is not DCP metadata as torch writes it: {error}") from error
    _check_names(Path(folder), metadata)
    if blobs:
        _check_blobs(Path(folder), metadata)
    return metadata


class TrustedReader(FileSystemReader):
    """`FileSystemReader` for `dcp.load` that reads `.metadata` with `read_metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; see `read_metadata` of this module for the checks and errors."""
        if kwargs.get("rank") is not None:
            raise CheckpointError(f"{self.path} was saved without coordination of its ranks")
        metadata = read_metadata(self.path)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TrustedLoadPlanner(DefaultLoadPlanner):
    """`DefaultLoadPlanner` that reads byte entries (scalars, lists) with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one byte entry into the state dict.

        Raises:
            CheckpointError: it holds something other than plain values and tensors.
        """
        fqn = read_item.dest_index.fqn
        try:
            content = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"entry {fqn} of the checkpoint is no plain value: {error}"
            ) from error
        # The stock method does the placing; it gets bytes that were just written here.
        clean = io.BytesIO()
        torch.save(content, clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)


class _Record:
    """Stands in for a class that `.metadata` names: keeps arguments and state, runs nothing."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any
    kind = ""

    def __new__(cls, *args: Any) -> "_Record":
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _record(name: str) -> type[_Record]:
    return type(name, (_Record,), {"__slots__": (), "kind": name})


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], type[_Record]] = {
    (module, name): _record(name)
    for module, name in [
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
    ]
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise CheckpointError(
            f"names {module}.{name}, which DCP metadata never needs; it was not read, because "
            "loading it could run code. Do not use this checkpoint unless you know who wrote it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids have no place in DCP metadata")


def _build_metadata(root: Any) -> Metadata:
    fields = _state(root, "Metadata")
    tensors: dict[str, Any] = {}
    for fqn, entry in fields["state_dict_metadata"].items():
        if not isinstance(fqn, str):
            raise TypeError(f"entry name {fqn!r} is not a string")
        if isinstance(entry, _Record) and entry.kind == "BytesStorageMetadata":
            tensors[fqn] = BytesStorageMetadata()
        else:
            tensors[fqn] = _tensor_metadata(fqn, entry)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in fields["storage_data"].items():
        index, info = _index(key), _storage_info(value)
        if index in storage and storage[index] != info:
            raise ValueError(f"{index.fqn} at {index.offset} is stored twice")
        storage[index] = info
    meta = fields.get("storage_meta")
    save_id = None if meta is None else _state(meta, "StorageMeta").get("save_id")
    return Metadata(
        state_dict_metadata=tensors,
        planner_data=_plain(fields.get("planner_data")),
        storage_data=storage,
        storage_meta=StorageMeta(save_id=save_id if isinstance(save_id, str) else None),
        version=fields["version"] if isinstance(fields.get("version"), str) else None,
    )


def _tensor_metadata(fqn: str, record: Any) -> TensorStorageMetadata:
    fields = _state(record, "TensorStorageMetadata")
    properties = fields["properties"]
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
        raise TypeError(f"{fqn} has no tensor properties")
    dtype, layout, requires_grad = properties.state[:3]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{fqn}: dtype {dtype!r}")
    if not isinstance(layout, _Record) or layout.args != ("torch.strided",):
        raise ValueError(f"{fqn} is not a dense tensor")
    size = _size(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        part = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(part["offsets"]), _size(part["sizes"])
        inside = len(offsets) == len(sizes) == len(size) and all(
            o + n <= total for o, n, total in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise ValueError(f"{fqn} {tuple(size)} has a chunk {tuple(sizes)} at {tuple(offsets)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype, requires_grad=bool(requires_grad)), size, chunks
    )


def _index(record: Any) -> MetadataIndex:
    fields = _state(record, "MetadataIndex")
    fqn, offset, index = fields["fqn"], fields.get("offset"), fields.get("index")
    if not isinstance(fqn, str) or not (index is None or isinstance(index, int)):
        raise TypeError(f"storage index {fqn!r}, {index!r}")
    return MetadataIndex(fqn, None if offset is None else _size(offset), index)


def _storage_info(record: Any) -> _StorageInfo:
    fields = _state(record, "_StorageInfo")
    path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if not isinstance(path, str) or type(offset) is not int or type(length) is not int:
        raise TypeError(f"storage entry {path!r}, {offset!r}, {length!r}")
    return _StorageInfo(path, offset, length, _plain(fields.get("transform_descriptors")))


def _state(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind:
        raise TypeError(f"expected {kind}, got {getattr(record, 'kind', type(record).__name__)}")
    if not isinstance(record.state, dict):
        raise TypeError(f"{kind} has no fields")
    return record.state


def _size(record: Any) -> torch.Size:
    if not isinstance(record, _Record) or record.kind != "Size" or len(record.args) != 1:
        raise TypeError("expected torch.Size")
    numbers = tuple(record.args[0])
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"sizes must be non-negative integers, got {numbers}")
    return torch.Size(numbers)


def _plain(value: Any, depth: int = 0) -> Any:
    """Return `value` where it consists of plain containers, strings and numbers only."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict) and depth < 20:
        return {_plain(k, depth + 1): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple) and depth < 20:
        return type(value)(_plain(v, depth + 1) for v in value)
    raise TypeError(f"expected plain values, got {type(value).__name__}")


def _check_names(folder: Path, metadata: Metadata) -> None:
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        plain = os.path.basename(name) == name and name not in ("", ".", "..")
        if not plain or "\0" in name or "\\" in name:
            raise CheckpointError(
                f"{folder / METADATA_FILE} names {name!r}, which is no file of its folder"
            )


def _check_blobs(folder: Path, metadata: Metadata) -> None:
    sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        name = info.relative_path
        if name not in sizes:
            sizes[name] = _file_size(folder, name)
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[name]:
            raise CheckpointError(
                f"{folder / name} is {sizes[name]} bytes long; {index.fqn} should be at "
                f"{info.offset} to {info.offset + info.length}: the file is truncated "
                "or of another checkpoint"
            )


def _file_size(folder: Path, name: str) -> int:
    """Return the size of a file that the metadata names, which must lie in the folder itself."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{path} is a link that leaves its folder; copy the file here instead"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; complete the copy of {folder}")
    return path.stat().st_size


# --------------------------------------------------------------------------------------------------
# Chunks
# --------------------------------------------------------------------------------------------------


def tensor_metadata(metadata: Metadata, fqn: str) -> TensorStorageMetadata:
    """Return shape, dtype and chunks of one tensor.

    Raises:
        CheckpointError: there is no such entry, or it is no tensor.
    """
    entry = metadata.state_dict_metadata.get(fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(
            f"{fqn} is {'no tensor' if entry is not None else 'not in the checkpoint'}"
        )
    return entry


def tensor_chunks(
    folder: str | Path, metadata: Metadata, fqn: str, part_of: Sequence[slice] | None = None
) -> list[Chunk]:
    """Return the non-empty chunks of one tensor, each with the place of its raw bytes.

    Reads the directory of each blob's zip (a few hundred bytes), never a payload. With `part_of`, a
    slice a dim, only of the chunks that overlap that part.

    Raises:
        CheckpointError: a chunk that is stored nowhere, or a blob that is no tensor of its size.
    """
    entry = tensor_metadata(metadata, fqn)
    chunks = []
    for part in entry.chunks:
        if math.prod(part.sizes) == 0:
            continue
        if part_of is not None and any(
            o >= want.stop or o + n <= want.start
            for o, n, want in zip(part.offsets, part.sizes, part_of, strict=True)
        ):
            continue
        info = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
        if info is None:
            raise CheckpointError(f"{fqn}: the chunk at {tuple(part.offsets)} is stored nowhere")
        chunks.append(_locate(Path(folder), fqn, entry, part, info))
    return chunks


def coverage_fault(metadata: Metadata, fqn: str) -> str | None:
    """Return why chunks do not cover each element of a tensor exactly once; None if they do.

    Intervals only, no bytes are read.
    """
    entry = tensor_metadata(metadata, fqn)
    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
    return boxes_fault(tuple(entry.size), boxes)


def boxes_fault(
    shape: tuple[int, ...], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> str | None:
    """Return why boxes (offsets, sizes) do not cover each element of `shape` exactly once.

    O(n log n) in the number of boxes for tensors sharded over one dimension.
    """
    boxes = [(offsets, sizes) for offsets, sizes in boxes if math.prod(sizes) > 0]
    total, held = math.prod(shape), sum(math.prod(sizes) for _, sizes in boxes)
    if len(shape) > 0 and len(boxes) > 1:
        # Sweep along the dimension that separates most chunks, so that few are open at a time.
        dim = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in boxes}))
        open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
            open_boxes = [b for b in open_boxes if b[0][dim] + b[1][dim] > offsets[dim]]
            for other, extent in open_boxes:
                if all(
                    o < p + m and p < o + n
                    for o, n, p, m in zip(offsets, sizes, other, extent, strict=True)
                ):
                    return f"the chunks at {other} (of {extent}) and {offsets} (of {sizes}) overlap"
            open_boxes.append((offsets, sizes))
    elif len(boxes) > 1:
        return f"{len(boxes)} chunks hold its single element"
    if held != total:
        return f"its chunks hold {held} of {total} elements"
    return None


def contiguous_runs(
    offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (first element in the whole tensor, number of elements) of a chunk's contiguous runs.

    They come in the chunk's own row-major order: together, one after the other, its payload.
    """
    full = len(shape)
    while full > 0 and sizes[full - 1] == shape[full - 1]:
        full -= 1
    if full == 0:
        yield 0, math.prod(shape)
        return
    inner = math.prod(shape[full:])
    strides = [math.prod(shape[d + 1 :]) for d in range(full)]
    outer = [range(offsets[d], offsets[d] + sizes[d]) for d in range(full - 1)]
    for position in itertools.product(*outer):
        first = (
            sum(p * s for p, s in zip(position, strides, strict=False)) + offsets[full - 1] * inner
        )
        yield first, sizes[full - 1] * inner


def read_chunk(chunk: Chunk) -> torch.Tensor:
    """Return a chunk's tensor through torch's own reader, where its layout is not the usual one.

    Needs the memory of the blob.

    Raises:
        CheckpointError: the blob is damaged, or not the tensor that the metadata promises.
    """
    with open(chunk.file, "rb") as f:
        f.seek(chunk.blob[0])
        blob = io.BytesIO(f.read(chunk.blob[1]))
    try:
        tensor = torch.load(blob, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{chunk.file}: the blob at {chunk.blob[0]} cannot be read: {error}"
        ) from error
    if (
        not isinstance(tensor, torch.Tensor)
        or tuple(tensor.shape) != chunk.sizes
        or tensor.dtype != chunk.dtype
    ):
        came = (
            (tensor.dtype, tuple(tensor.shape))
            if isinstance(tensor, torch.Tensor)
            else type(tensor)
        )
        raise CheckpointError(
            f"{chunk.file}: the blob at {chunk.blob[0]} should be {chunk.dtype} {chunk.sizes}, is "
            f"{came}"
        )
    return tensor.contiguous()


def _locate(
    folder: Path,
    fqn: str,
    entry: TensorStorageMetadata,
    part: ChunkStorageMetadata,
    info: _StorageInfo,
) -> Chunk:
    dtype, sizes = entry.properties.dtype, tuple(part.sizes)
    nbytes = math.prod(sizes) * dtype.itemsize
    if info.transform_descriptors:
        raise CheckpointError(
            f"{fqn} is stored transformed ({info.transform_descriptors}); save it plainly"
        )
    file = folder / info.relative_path
    try:
        with open(file, "rb", buffering=0) as f:
            raw = _raw_payload(BlobView(f.fileno(), info.offset, info.length), dtype, sizes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (
        Exception
    ):  # an unknown layout or a damaged blob, in any of its ways: read_chunk tells them apart
        raw = None
    place = None if raw is None else info.offset + raw
    return Chunk(
        file,
        (info.offset, info.length),
        place,
        nbytes,
        tuple(part.offsets),
        sizes,
        dtype,
        tuple(entry.size),
    )


def _raw_payload(blob: "BlobView", dtype: torch.dtype, sizes: tuple[int, ...]) -> int | None:
    """Return where in the blob the tensor's bytes are; None where they are not exactly these."""
    with zipfile.ZipFile(blob) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled, data = members["data.pkl"], members.get("data/0")
        if data is None or len(members) != len(archive.infolist()) or pickled.file_size > 2**20:
            return None
        order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
        view = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
    count = math.prod(sizes)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    # The stride of a dimension of size 1 is never used.
    row_major = len(view.stride) == len(strides) and all(
        n == 1 or got == want for n, got, want in zip(sizes, view.stride, strides, strict=True)
    )
    exact = (
        view.dtype == dtype
        and view.offset == 0
        and view.size == sizes
        and row_major
        and view.count == count
        and data.compress_type == zipfile.ZIP_STORED
        and data.file_size == data.compress_size == count * dtype.itemsize
        and order == b"little"
    )
    if not exact:
        return None
    header = blob.at(data.header_offset, 30)
    if header[:4] != b"PK\x03\x04":
        return None
    begin = data.header_offset + 30 + int.from_bytes(header[26:28], "little")
    begin += int.from_bytes(header[28:30], "little")
    return begin if begin + data.file_size <= blob.length else None


@dataclass(frozen=True)
class _View:
    dtype: torch.dtype
    count: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Reads the `data.pkl` of one saved tensor into a `_View`, building no tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, name, key, _, count = pid
        if kind != "storage" or key != "0":
            raise pickle.UnpicklingError(f"storage {key!r}")
        return _STORAGES[name], count


def _view(storage: tuple[torch.dtype, int], offset: int, size: Any, stride: Any, *_: Any) -> _View:
    return _View(storage[0], storage[1], offset, tuple(size), tuple(stride))


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class BlobView(io.RawIOBase):
    """A part of a file as a seekable stream of its own, through pread: nothing else is read."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self.descriptor, self.offset, self.length, self.position = descriptor, offset, length, 0

    def at(self, position: int, count: int) -> bytes:
        count = max(0, min(count, self.length - position))
        return os.pread(self.descriptor, count, self.offset + position)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the beginning")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = self.at(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
