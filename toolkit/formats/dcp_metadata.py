"""Read the `.metadata` of a torch distributed checkpoint (DCP), a pickle, without trusting it."""

import dataclasses
import io
import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # part of every DCP folder
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from toolkit.errors import CheckpointError, one_line
from toolkit.formats.plain_files import is_plain_name, resolve_plain_file
from toolkit.parsing import read_bounded

METADATA_FILE = ".metadata"
_MAX_METADATA = 512 * 2**20  # 200 bytes for each chunk of 3,000 tensors on 800 ranks
_MIN_CHUNK_BYTES = 30  # that each chunk takes in `.metadata`
_MAX_DIMS = 64


def read_metadata(folder: str | os.PathLike[str], *, blobs: bool = True) -> Metadata:
    """Read the `.metadata` file of a DCP checkpoint folder without executing code from it.

    Accepts only the classes that torch 2.11 to 2.15 write. Takes 0.4 s per MB of `.metadata`, and
    one stat call per shard file.

    Args:
        folder: the DCP folder.
        blobs: also check that each shard file exists and is large enough for its chunks. Pass False
            to read the metadata of a folder with missing or damaged shard files.

    Raises:
        CheckpointError: the file is missing or damaged, or it names a file outside of the folder or
            a class that DCP does not need; with `blobs`, also if a shard file is missing or too
            short.
    """
    file = Path(folder) / METADATA_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {METADATA_FILE}: not a torch DCP checkpoint folder")
    raw = read_bounded(file, _MAX_METADATA, CheckpointError)
    try:
        metadata = _build_metadata(_Unpickler(io.BytesIO(raw)).load(), len(raw) // _MIN_CHUNK_BYTES)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # errors of a damaged pickle have no common class
        raise CheckpointError(
            f"{file} is damaged, or not as torch writes it: {one_line(error)}"
        ) from error
    names = {info.relative_path for info in metadata.storage_data.values()}
    for name in names:
        if not is_plain_name(name):
            raise CheckpointError(f"{file} names {name!r:.200}, which is no file of its folder")
    if blobs:
        sizes = {
            n: resolve_plain_file(file.parent, n, CheckpointError).stat().st_size for n in names
        }
        _check_blobs(file.parent, metadata, sizes)
    return metadata


class _StandIn:
    """Placeholder for an instance of a class that `.metadata` names.

    It only records the constructor's arguments and the state, and runs no code of that class.
    """

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any
    kind = ""

    def __new__(cls, *args: Any) -> "_StandIn":
        record = object.__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DCP = "torch.distributed.checkpoint"
_NAMES = {
    "pathlib": ["PosixPath"],
    "pathlib._local": ["PosixPath"],  # Python 3.13
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    f"{_DCP}.filesystem": ["_StorageInfo"],
    f"{_DCP}.metadata": [
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ],
}
_ALLOWED: dict[tuple[str, str], type[_StandIn]] = {
    (module, name): type(name, (_StandIn,), {"__slots__": (), "kind": name})
    for module, names in _NAMES.items()
    for name in names
}
_NUMBER = int | None
_PROPERTIES = {field.name for field in dataclasses.fields(TensorProperties)}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET),
    *(pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT),
    *(pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE),
    *(pickle.BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE),
    *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.SETITEM),
    *(pickle.SETITEMS, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)


# The unpickler in Python, because 20 bytes let the one in C allocate gigabytes (LONG_BINPUT).
# Both would hash tuples that contain themselves many times, which takes for ever.
_InPython: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_InPython):
    """Unpickler for plain data of pickle protocols 4 and 5.

    It creates placeholders instead of class instances, and refuses any other opcode or class.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder class or dtype for an allowed name; else raise CheckpointError.

        `module` and `name` come from the pickle; nothing is imported.
        """
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise CheckpointError(
            f"names {module!s:.100}.{name!s:.100}, which DCP metadata never needs; it was not "
            "read, because loading it could run code. Do not use this checkpoint unless you know "
            "who wrote it"
        )

    def load_setitem(self) -> None:
        """Run the opcode that sets one entry of the dictionary on the stack."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set_entries([key, value])

    def load_setitems(self) -> None:
        """Run the opcode that sets several entries of the dictionary on the stack."""
        self._set_entries(self.pop_mark())

    def _set_entries(self, items: list[Any]) -> None:
        """Add entries to the dictionary on top of the stack.

        Args:
            items: alternating keys and values.

        Raises:
            TypeError: a key is neither a string nor a placeholder, or the stack's top is no
                dictionary.
        """
        keys = items[::2]
        if not all(isinstance(k, str | _StandIn) for k in keys) or type(self.stack[-1]) is not dict:
            raise TypeError("the keys of a dictionary must be texts or records")
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    dispatch = {code[0]: _InPython.dispatch[code[0]] for code in _OPCODES} | {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _build_metadata(root: Any, max_chunks: int) -> Metadata:
    """Build torch's `Metadata` from unpickled placeholders.

    Args:
        root: the placeholder of the `Metadata` object.
        max_chunks: maximum number of chunks of all tensors. A small pickle could refer to the same
            list of chunks many times.

    Raises:
        TypeError, ValueError: a field has another type or value than torch writes.
    """
    entries, stored = _get_fields(root, "Metadata", state_dict_metadata=dict, storage_data=dict)
    paths, meta = _get_fields(
        root, "Metadata", planner_data=dict | None, storage_meta=_StandIn | None
    )
    (version,) = _get_fields(root, "Metadata", version=str | None)
    tensors: dict[str, Any] = {}
    for fqn, entry in entries.items():
        if not isinstance(fqn, str):
            raise TypeError("a tensor's name is no text")
        if isinstance(entry, _StandIn) and entry.kind == "BytesStorageMetadata":
            tensors[fqn] = BytesStorageMetadata()
            continue
        tensors[fqn] = _tensor_metadata(fqn, entry, max_chunks)
        max_chunks -= len(tensors[fqn].chunks)
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, value in stored.items():
        fqn, offset, number = _get_fields(
            key, "MetadataIndex", fqn=str, offset=object, index=_NUMBER
        )
        place = {"relative_path": str, "offset": int, "length": int}
        place |= {"transform_descriptors": object}
        file, begin, length, transforms = _get_fields(value, "_StorageInfo", **place)
        index = MetadataIndex(fqn, None if offset is None else _build_size(offset), number)
        info = _StorageInfo(
            file, begin, length, None if transforms is None else _parse_planner_path(transforms)
        )
        if storage.setdefault(index, info) != info:
            raise ValueError(f"{index.fqn} at {index.offset} is stored twice")
    (save_id,) = (None,) if meta is None else _get_fields(meta, "StorageMeta", save_id=str | None)
    return Metadata(
        state_dict_metadata=tensors,
        planner_data=None
        if paths is None
        else {k: _parse_planner_path(v) for k, v in paths.items()},
        storage_data=storage,
        storage_meta=StorageMeta(save_id=save_id),
        version=version,
    )


def _tensor_metadata(fqn: str, record: Any, max_chunks: int) -> TensorStorageMetadata:
    """Build the metadata of one tensor from its placeholder.

    Raises:
        TypeError, ValueError: a field is invalid, there are more than `max_chunks` chunks, or a
            chunk exceeds the tensor's shape.
    """
    kinds = {"properties": _StandIn, "size": object, "chunks": list}
    properties, whole, parts = _get_fields(record, "TensorStorageMetadata", **kinds)
    if properties.kind != "TensorProperties":
        raise TypeError(f"{fqn} has no tensor properties")
    dtype, layout, requires_grad = properties.state[:3]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{fqn}: dtype {dtype!r}")
    if not isinstance(layout, _StandIn) or layout.args != ("torch.strided",):
        raise ValueError(f"{fqn} is not a dense tensor")
    if len(parts) > max_chunks:
        raise ValueError(f"{fqn} has more chunks than the file has room for")
    size, chunks = _build_size(whole), []
    for part in parts:
        at, extent = _get_fields(part, "ChunkStorageMetadata", offsets=object, sizes=object)
        offsets, sizes = _build_size(at), _build_size(extent)
        if not (len(offsets) == len(sizes) == len(size)) or any(
            o + n > total for o, n, total in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"{fqn} {tuple(size)} has a chunk {tuple(sizes)} at {tuple(offsets)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    plain: dict[str, Any] = {"dtype": dtype, "requires_grad": bool(requires_grad)}
    if len(properties.state) > 5 and "strides" in _PROPERTIES:  # torch 2.15
        plain["strides"] = _parse_sizes(properties.state[5])
    return TensorStorageMetadata(TensorProperties(**plain), size, chunks)


def _get_fields(record: Any, kind: str, **types: Any) -> list[Any]:
    """Return the fields of a placeholder that `types` names, in this order.

    Args:
        record: the placeholder.
        kind: name of the class that the placeholder must represent.
        types: field name -> expected type. The value of a missing field is None.

    Raises:
        TypeError: `record` represents another class, or a field has another type.
    """
    if not isinstance(record, _StandIn) or record.kind != kind or type(record.state) is not dict:
        actual = getattr(record, "kind", type(record).__name__)
        raise TypeError(f"expected a {kind} with its fields, got {actual}")
    for name, expected in types.items():
        if not isinstance(record.state.get(name), expected):
            raise TypeError(f"{name} of {kind} is {type(record.state.get(name)).__name__}")
    return [record.state.get(name) for name in types]


def _build_size(record: Any) -> torch.Size:
    """Build a torch.Size from its placeholder; raise TypeError or ValueError if it is malformed."""
    if not isinstance(record, _StandIn) or record.kind != "Size" or len(record.args) != 1:
        raise TypeError("expected torch.Size")
    return torch.Size(_parse_sizes(record.args[0]))


def _parse_sizes(value: Any) -> tuple[int, ...]:
    """Return `value` if it is a tuple of up to 64 non-negative integers; else raise ValueError."""
    is_short_tuple = isinstance(value, tuple) and len(value) <= _MAX_DIMS
    if not is_short_tuple or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError("sizes must be a few non-negative integers")
    return value


def _parse_planner_path(value: Any) -> Any:
    """Return `value` if it can be a path of DCP's planner: up to 100 names and indices.

    Raises:
        TypeError: it is anything else, such as a nested list. Code that walks through nested lists
            might never end.
    """
    is_short = isinstance(value, list | tuple) and len(value) <= 100
    if not is_short or not all(isinstance(part, str | int) for part in value):
        raise TypeError("expected a list of names and numbers")
    return value


def _check_blobs(folder: Path, metadata: Metadata, sizes: dict[str, int]) -> None:
    """Raise CheckpointError if a blob ends after its shard file, or is smaller than its chunk.

    Args:
        folder: the DCP folder, for the message.
        metadata: its metadata.
        sizes: shard file name -> size in bytes.
    """
    for index, info in metadata.storage_data.items():
        name, end = info.relative_path, info.offset + info.length
        if info.offset < 0 or info.length < 0 or end > sizes[name]:
            raise CheckpointError(
                f"{folder / name} is {sizes[name]} bytes long; {index.fqn} should be at "
                f"{info.offset} to {end}: the file is truncated or of another checkpoint"
            )
    for fqn, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        for part in entry.chunks:
            blob = metadata.storage_data.get(MetadataIndex(fqn, part.offsets))
            nbytes = math.prod(part.sizes) * entry.properties.dtype.itemsize
            if blob and blob.length < nbytes and not blob.transform_descriptors:
                raise CheckpointError(
                    f"{folder / METADATA_FILE}: {fqn} {tuple(entry.size)} has a chunk of "
                    f"{nbytes:,} bytes, but its blob has {blob.length:,}"
                )
