"""A torch distributed checkpoint (DCP), written past the page cache and hashed on the way.

What it writes is what torch's `FileSystemWriter` writes: blobs of `torch.save` one after the other.
Owns the writing: blocks go to the file while another thread hashes them, and the disk works while
the next block is prepared. Knows neither models nor manifests.

[Note: three passes over the bytes] torch.save computes a CRC of every tensor on the thread that
writes, at 1.2 GB/s: as much as the sha256. It is switched off for the moment in which torch.save
hands over the pieces of a blob without copying them, computed with zlib-ng (25 GB/s, where zlib has
4) and put where it belongs. So reading the zip with any tool still finds a flipped bit.
"""

import hashlib
import io
import os
import queue
import struct
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from zlib_ng import zlib_ng

from toolkit.checkpoint.store import Place, Upload
from toolkit.errors import CheckpointError
from toolkit.formats.dcp import StorageInfo
from toolkit.formats.direct_io import Appender

_BLOCK = 2**20  # bytes written and hashed at a time: they stay in the processor's cache meanwhile
_AHEAD = 16  # blocks that the hash may lag behind
_FILES = 4  # of a rank at most
_FILES_HERE = 8  # of all ranks of a machine: 14 GB/s of sha256, and few disks give more
_WORTH_A_FILE = 64 * 2**20
_HASH = hashlib.sha256
_CRC_SWITCH = threading.Lock()  # held by every torch.save: in torch 2.11 it is the process's
_OTHER_ZIP = f"torch {torch.__version__} writes no zip file as 2.11 to 2.13 do"


class HashingWriter(FileSystemWriter):
    """`FileSystemWriter` that leaves size and sha256 of what this rank wrote in `files`.

    Every file is fsynced. A core hashes 1.5 to 1.8 GB/s: where a rank has several cores and much to
    write, it writes several files at a time. Memory beyond the tensors, for each of them: 10 MB,
    and of tensors on a device (or that are part of a larger one) copies of two and 16 MB.

    Args:
        path: folder of the checkpoint.
        shards: where the tensors go instead, on an object store; `.metadata` stays in `path`.
        ranks_here: processes that save on this machine.
    """

    def __init__(
        self, path: str | Path, shards: Place | None = None, *, ranks_here: int = 1
    ) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True)
        self.shards = Path(path) if shards is None else shards
        self.ranks_here = ranks_here
        self._stop = threading.Event()
        self.files: dict[str, dict[str, Any]] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Return where the checkpoint is, for torch's logs and its metadata."""
        return self.path if isinstance(self.shards, Path) else str(self.shards)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's items; called by `dcp.save`."""
        prefix = getattr(plan.storage_data, "prefix", None)
        if prefix is None:
            raise CheckpointError(
                f"torch {torch.__version__} names no file for a rank's shards; use 2.11 to 2.13"
            )
        # Nothing to write, no file: the same as torch where a rank holds nothing.
        parts = _split(plan.items, self._files_at_a_time(plan.items)) if plan.items else []
        with ThreadPoolExecutor(max(1, len(parts)), "shards") as pool:
            work = [
                pool.submit(self._write_file, f"{prefix}{i}.distcp", part, planner)
                for i, part in enumerate(parts)
            ]
            try:
                for done in as_completed(work):
                    done.result()
            except BaseException:  # of one file, or an interrupt: the others need not go on
                self._stop.set()
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for part in work for result in part.result()])
        return future

    def _files_at_a_time(self, items: list[WriteItem]) -> int:
        """Return into how many files the items go, so that hashing them keeps up with a disk."""
        if not isinstance(self.shards, Path):
            return 1
        nbytes, cores = sum(map(_size, items)), os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        most = min(_FILES, cores // self.ranks_here, _FILES_HERE // self.ranks_here)
        return max(1, min(most, nbytes // _WORTH_A_FILE))

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        results = []
        with HashedFile(self.shards / name) as file:
            for item, blob in _blobs(items, planner):
                begin = file.size
                for piece in blob:
                    if self._stop.is_set():
                        raise CheckpointError("the checkpoint was given up while it was written")
                    file.write(piece)
                results.append(_result(item.index, name, begin, file.size - begin))
        self.files[name] = file.described()
        return results


class HashedFile:
    """A new file that is hashed by another thread while it is written, and fsynced at the end.

    On an object store it is there, whole, when it is closed.
    """

    def __init__(self, path: Path | Place) -> None:
        self.name, self.size = path.name, 0
        self._hash = _HASH()
        self._blocks: queue.Queue[Any] = queue.Queue(_AHEAD)
        self._failure: BaseException | None = None
        self._target = Upload(path) if isinstance(path, Place) else Appender(path)
        self._thread = threading.Thread(target=self._work, name="sha256", daemon=True)
        self._thread.start()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if isinstance(self._target, Upload):
                self._target.__exit__(kind)
            else:
                self._target.close(sync=kind is None)
        finally:
            self._blocks.put(None)
            self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure

    def write(self, content: Any) -> None:
        """Append `content`, which must stay as it is until the file is closed."""
        view = memoryview(content)
        for begin in range(0, len(view), _BLOCK):
            block = view[begin : begin + _BLOCK]
            self._blocks.put(block)
            self._target.write(block)
            self.size += len(block)

    def described(self) -> dict[str, Any]:
        """Return size and sha256 of the closed file, as a manifest keeps them."""
        return {"size": self.size, "sha256": self._hash.hexdigest()}

    def _work(self) -> None:
        while (block := self._blocks.get()) is not None:
            if self._failure is None:
                try:
                    self._hash.update(block)
                except BaseException as error:  # the writer must go on, or it waits for ever
                    self._failure = error


def _size(item: WriteItem) -> int:
    return (item.tensor_storage_size() or 0) if item.type != WriteItemType.BYTE_IO else 0


def _split(items: list[WriteItem], count: int) -> list[list[WriteItem]]:
    """Return the items in at most `count` parts of about as many bytes, each in their order.

    The largest first, each to the part that has least: no part is a third above the best split
    (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for i in sorted(range(len(items)), key=lambda i: -_size(items[i])):
        least = held.index(min(held))
        parts[least].append(i)
        held[least] += _size(items[i])
    return [[items[i] for i in sorted(part)] for part in parts if part]


def _blobs(
    items: list[WriteItem], planner: SavePlanner
) -> Iterator[tuple[WriteItem, Iterable[Any]]]:
    """Yield every item with the pieces of its blob; the next tensor comes from its device while
    one is written.
    """
    with ThreadPoolExecutor(1, "fetch") as pool:
        ahead = pool.submit(_fetch, items[0], planner)
        for i, item in enumerate(items):
            data = ahead.result()
            if i + 1 < len(items):
                ahead = pool.submit(_fetch, items[i + 1], planner)
            yield item, ([data.getbuffer()] if isinstance(data, io.BytesIO) else _pieces(data))


def _fetch(item: WriteItem, planner: SavePlanner) -> Any:
    if item.type == WriteItemType.BYTE_IO:
        with _CRC_SWITCH:  # torch.save is in it
            return planner.resolve_data(item)
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    tensor = data.detach().cpu()
    # torch.save writes the whole storage, so it must hold nothing else.
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


class _Pieces(io.RawIOBase):
    """What torch.save writes: small pieces copied, the tensor's own memory as it is."""

    def __init__(self, payload: int) -> None:
        self.payload, self.pieces = payload, [bytearray()]

    def write(self, content: Any) -> int:
        if len(content) == self.payload and len(self.pieces) == 1 and self.payload > 2**16:
            self.pieces += [content, bytearray()]  # type: ignore[list-item]
        else:
            self.pieces[-1] += content
        return len(content)


def _pieces(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield, piece by piece, the blob that torch.save makes of a tensor; each once it is asked for.

    The tensor's memory is not copied: its blocks come as they are, and stay alive with the piece.
    The checksum of a block is computed right before it is yielded, so that writing it finds it in
    the processor's cache. See [Note: three passes over the bytes].
    """
    stream = _Pieces(tensor.nbytes)
    if tensor.nbytes <= 2**16:
        with _CRC_SWITCH:
            torch.save(tensor, cast(IO[bytes], stream))
        yield from stream.pieces
        return
    with _CRC_SWITCH:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(tensor, cast(IO[bytes], stream))
        finally:
            torch.serialization.set_crc32_options(before)
    if len(stream.pieces) != 3:
        raise CheckpointError(
            f"torch {torch.__version__} writes a tensor in another way than 2.11 to 2.13 do"
        )
    head, _, tail = stream.pieces
    # The same memory as torch.save saw, kept alive until it is written and hashed.
    payload = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    around = _Checksums(head, len(payload), tail)
    yield head
    crc = 0
    for begin in range(0, len(payload), _BLOCK):
        block = payload[begin : begin + _BLOCK]
        crc = zlib_ng.crc32(block, crc)
        yield block
    around.put_payload(crc)
    yield tail


class _Checksums:
    """Puts the CRC of every record of a zip file where torch left it out: that of the payload when
    it is known, the others at once.

    After each record's data (a zip file that is streamed has it there) and in the directory at the
    end, whose entries say where the records are.
    """

    def __init__(self, head: bytearray, payload: int, tail: bytearray) -> None:
        self.head, self.tail, self.behind = head, tail, len(head) + payload
        self._payload: tuple[int, int, int] | None = None
        for begin, length, entry in self._records():
            if (begin, length) == (len(head), payload):
                self._payload = (begin, length, entry)
            else:
                self._put(begin, length, entry, zlib_ng.crc32(self._at(begin, length)))
        if self._payload is None:
            raise CheckpointError(_OTHER_ZIP)

    def put_payload(self, crc: int) -> None:
        """Put the checksum of the tensor's memory; the head has none of it."""
        assert self._payload is not None
        self._put(*self._payload, crc)

    def _records(self) -> Iterator[tuple[int, int, int]]:
        """Yield where the data of each record begins, its length, and its entry in the tail."""
        tail = self.tail
        end = tail.rfind(b"PK\x05\x06")
        count, _, directory = struct.unpack_from("<HLL", tail, end + 10)
        if directory == 2**32 - 1 or count == 2**16 - 1:  # a blob above 4 GB
            wide = tail.rfind(b"PK\x06\x06", 0, end)
            count, _, directory = struct.unpack_from("<QQQ", tail, wide + 32)
        at = directory - self.behind
        for _ in range(count):
            if tail[at : at + 4] != b"PK\x01\x02":
                raise CheckpointError(_OTHER_ZIP)
            length, _, names, extras, comments = struct.unpack_from("<LLHHH", tail, at + 20)
            offset = struct.unpack_from("<L", tail, at + 42)[0]
            extra = bytes(tail[at + 46 + names : at + 46 + names + extras])
            length, offset = _wide(extra, length, offset)
            begin = offset + 30 + sum(struct.unpack_from("<HH", self._at(offset + 26, 4)))
            yield begin, length, at
            at += 46 + names + extras + comments

    def _put(self, begin: int, length: int, entry: int, crc: int) -> None:
        footer = self._at(begin + length, 8)
        if footer[:4] != b"PK\x07\x08":
            raise CheckpointError(_OTHER_ZIP)
        footer[4:8] = self.tail[entry + 16 : entry + 20] = struct.pack("<L", crc)

    def _at(self, begin: int, length: int) -> memoryview:
        """Return a part of the blob that is not the payload."""
        part, first = (self.tail, self.behind) if begin >= self.behind else (self.head, 0)
        return memoryview(part)[begin - first : begin - first + length]


def _wide(extra: bytes, length: int, offset: int) -> tuple[int, int]:
    """Return length and offset of a record, from its zip64 field where they are too large."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            if length == 2**32 - 1:
                length = values[0]
                values = values[2:]  # the compressed size, which is the same
            if offset == 2**32 - 1:
                offset = values[0]
        at += 4 + size
    return length, offset


def _result(index: MetadataIndex, name: str, begin: int, length: int) -> WriteResult:
    return WriteResult(
        index=index, size_in_bytes=length, storage_data=StorageInfo(name, begin, length)
    )
