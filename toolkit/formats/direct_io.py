"""Large files read and written past the page cache, in aligned blocks on huge pages.

Owns the alignment that the system asks for (`open(2)`, O_DIRECT), the blocks of memory, and what is
done where a file system has no such thing: the same through the page cache. Knows no formats.

[Note: why not the page cache] What is written once and read by another process, or read once, gains
nothing from it, and pays for it: a copy on the processor, 0.2 to 0.5 s a GB, that hashing needs,
and memory that has to be found, which on a virtual machine may have to be asked of its host. A
block on huge pages is one piece for the disk; of 4 KB pages it is hundreds, and a request is cut
into several: measured on one machine, 1.1 against 3.2 GB/s. So direct I/O alone gains nothing.

[Note: two ways into one file] The system writes dirty pages before it reads around them, and drops
those that it writes around. So both ways may be mixed in one file as long as no page is written in
both at a time: only whole pages are written directly, and each page has one way.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Of offsets, lengths and memory: a multiple of a disk's block and of a page of memory."""
BLOCK = 2 * 2**20
"""Bytes of a block, one huge page."""
BUFFERED = "TOOLKIT_BUFFERED_IO"
"""Environment variable: 1 sends everything through the page cache."""
_WRITTEN = BLOCK  # bytes that are gathered before they are written
_SMALL = max(2**16, 2 * ALIGNMENT)  # bytes below which the page cache is faster
_IN_FLIGHT = 4  # blocks of one file that the disk has at a time
_DIRECT = getattr(os, "O_DIRECT", 0)
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_NOT_RESERVED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
_SYNC_FILE_RANGE_WRITE = 2


def block(nbytes: int = BLOCK) -> memoryview:
    """Return memory that begins on a huge page, where the system has such."""
    huge = BLOCK
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Whole huge pages, or there are none at its end; only what is touched becomes memory.
    room = mmap.mmap(-1, nbytes + -nbytes % huge + huge, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % huge
    return memoryview(room)[begin : begin + nbytes]


def open_direct(path: str | Path, flags: int) -> int:
    """Open a file past the page cache; through it where the file system has no other way."""
    if _DIRECT and os.environ.get(BUFFERED, "0") != "1":
        try:
            return os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            # A file system without direct I/O says so after it has created the file.
            if error.errno not in _NOT_DIRECT:
                raise
            flags &= ~os.O_EXCL
    return os.open(path, flags, 0o644)


def open_again(descriptor: int, path: Path, flags: int) -> int:
    """Open the file of `descriptor`, which has the name `path`, past the page cache too.

    Raises:
        OSError: another file has that name.
    """
    return _the_same(descriptor, open_direct(path, flags), path)


def _the_same(descriptor: int, second: int, path: Path) -> int:
    if not os.path.samestat(os.fstat(descriptor), os.fstat(second)):
        os.close(second)
        raise OSError(errno.ESTALE, "was replaced while it was open", str(path))
    return second


def is_direct(descriptor: int) -> bool:
    """Whether an open file goes past the page cache."""
    return bool(_DIRECT and fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def through_cache(descriptor: int) -> None:
    """Send what follows through the page cache, of any length and place."""
    if _DIRECT:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)


def _either_way(
    move: Callable[[int, Any, int], int], descriptor: int, memory: Any, offset: int
) -> int:
    """Return how many bytes moved; through the page cache where the file system opened the file
    past it and cannot do this.
    """
    try:
        return move(descriptor, memory, offset)
    except OSError as error:
        if error.errno not in _NOT_DIRECT:
            raise
        through_cache(descriptor)
    return move(descriptor, memory, offset)


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write `content` at `offset`; whole aligned blocks where the file goes past the page cache."""
    done = 0
    while done < len(content):
        done += _either_way(os.pwrite, descriptor, content[done:], offset + done)
        if done % ALIGNMENT and done < len(content):
            through_cache(descriptor)  # a full disk took a part of a page


def begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the system begin to write these bytes to the disk; it does not wait for them.

    Else it would begin at the fsync, when nothing is left to read: reading and writing would take
    turns. Linux only; elsewhere it does nothing, and the fsync does all.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()


def reserve(descriptor: int, size: int) -> None:
    """Give an empty file `size` bytes, reserved on the disk where the system can.

    Not `posix_fallocate`: where a file system cannot, that writes into every block.
    """
    if _fallocate is not None:
        if _fallocate(descriptor, 0, 0, size) == 0 or size == 0:
            return
        code = ctypes.get_errno()
        if code not in _NOT_RESERVED:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size)


def _find_fallocate() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    # With 64-bit offsets on every machine; musl has them under the plain name.
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


_fallocate = _find_fallocate()


class Appender:
    """A new file written from its beginning to its end, fsynced when it is closed.

    Threads write full blocks while the next one is filled. Memory: `_IN_FLIGHT` + 1 blocks.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._block, self._filled = block(_WRITTEN), 0
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "write")
        self._pending: deque[tuple[Future[None], memoryview]] = deque()
        self._file = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, content: memoryview) -> None:
        """Append a copy of `content`."""
        while len(content):
            count = min(len(content), len(self._block) - self._filled)
            self._block[self._filled : self._filled + count] = content[:count]
            content = content[count:]
            self._filled += count
            self.size += count
            if self._filled == len(self._block):
                self._send()

    def close(self, *, sync: bool = True) -> None:
        """Write the rest; without `sync`, after a failure, only end what is under way."""
        try:
            if sync:
                self._wait(0)
                through_cache(self._file)
                write_all(self._file, self._block[: self._filled], self.size - self._filled)
                os.fsync(self._file)
        finally:
            self._pool.shutdown()
            os.close(self._file)

    def _send(self) -> None:
        work = self._pool.submit(self._write, self._block, self.size - self._filled)
        self._pending.append((work, self._block))
        spare = self._wait(_IN_FLIGHT - 1)
        self._block, self._filled = block(_WRITTEN) if spare is None else spare, 0

    def _wait(self, left: int) -> memoryview | None:
        """Wait until at most `left` blocks are under way; return one that is free again."""
        spare = None
        while len(self._pending) > left:
            work, spare = self._pending.popleft()
            work.result()
        return spare

    def _write(self, content: memoryview, offset: int) -> None:
        write_all(self._file, content, offset)
        if not is_direct(self._file):
            begin_writing(self._file, offset, len(content))


class Scatterer:
    """Writes pieces of bytes to places in open files: consecutive ones together, in large blocks.

    For one thread, and one file at a time. What was put is in the file after `flush`.
    """

    def __init__(self) -> None:
        self._block = block(_WRITTEN)
        self._begin = self._end = 0
        self._files = (-1, -1)

    def put(self, cached: int, direct: int, offset: int, content: memoryview) -> None:
        """Write a copy of `content` at `offset`.

        Args:
            cached, direct: the same file, opened both ways; one descriptor where the disk need
                not begin to write it.
        """
        if self._begin < self._end and (offset != self._end or self._files[0] != cached):
            self.flush()
        self._files = (cached, direct)
        while len(content):
            if self._begin == self._end:
                self._begin = self._end = offset
            at = offset % len(self._block)
            count = min(len(content), len(self._block) - at)
            self._block[at : at + count] = content[:count]
            content = content[count:]
            offset = self._end = offset + count
            if offset % len(self._block) == 0:
                self.flush()

    def flush(self) -> None:
        """Write what is gathered: whole pages directly, the bytes around them, which share a page
        with others, through the page cache.
        """
        begin, end = self._begin, self._end
        if begin == end:
            return
        self._begin = self._end = 0
        start = begin - begin % len(self._block)
        first, last = begin + -begin % ALIGNMENT, end - end % ALIGNMENT
        cached, direct = self._files
        if last - first < _SMALL:
            write_all(cached, self._block[begin - start : end - start], begin)
            return
        write_all(direct, self._block[first - start : last - start], first)
        if direct != cached and not is_direct(direct):
            begin_writing(direct, first, last - first)
        write_all(cached, self._block[begin - start : first - start], begin)
        write_all(cached, self._block[last - start : end - start], last)


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


class Reader:
    """Reads any part of a file into a block of the caller's. For one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._direct = self._cached = -1

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        for descriptor in {self._direct, self._cached} - {-1}:
            os.close(descriptor)

    def read(self, room: memoryview, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at `offset`, in `room`: fewer only where the file ends.

        Args:
            room: from `block`; of a place that is not aligned, with `2 * ALIGNMENT` bytes more than
                are read.
        """
        if nbytes < _SMALL:
            return room[: _fill(self._small(), room[:nbytes], offset)]
        skip = offset % ALIGNMENT
        whole = skip + nbytes + -(skip + nbytes) % ALIGNMENT
        done = _fill(self._large(), room[:whole], offset - skip)
        return room[skip : max(skip, min(done, skip + nbytes))]

    def _large(self) -> int:
        if self._direct == -1:
            second = open_direct(self.path, os.O_RDONLY)
            opened = self._cached != -1
            self._direct = _the_same(self._cached, second, self.path) if opened else second
        return self._direct

    def _small(self) -> int:
        if self._cached == -1:
            if self._direct == -1:
                self._cached = os.open(self.path, os.O_RDONLY)
            elif not is_direct(self._direct):
                self._cached = self._direct
            else:
                second = os.open(self.path, os.O_RDONLY)
                self._cached = _the_same(self._direct, second, self.path)
        return self._cached


def _fill(descriptor: int, room: memoryview, offset: int) -> int:
    """Read until `room` is full or the file ends; return the bytes read."""
    done = 0
    while done < len(room):
        count = _either_way(os.preadv, descriptor, [room[done:]], offset + done)
        done += count
        if count == 0 or (done % ALIGNMENT and offset + done >= os.fstat(descriptor).st_size):
            break
        if done % ALIGNMENT and done < len(room):
            through_cache(descriptor)  # a network gave a part of a page
    return done


class ReadAhead:
    """Reads a file from its beginning to its end; a thread reads while the caller works."""

    def __init__(self, path: Path) -> None:
        self.size = os.stat(path).st_size
        self._reader = Reader(path)
        self._pool = ThreadPoolExecutor(1, "read ahead")
        self._blocks = self._read([block(min(BLOCK, self.size + ALIGNMENT)) for _ in range(3)])
        self._block = memoryview(b"")

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._reader.close()

    def take(self, most: int = BLOCK) -> memoryview:
        """Return the next bytes, at most `most`, none at the end; they last until the next call
        that returns bytes of another block.
        """
        if not len(self._block):
            self._block = next(self._blocks, self._block)
        found, self._block = self._block[:most], self._block[most:]
        return found

    def _read(self, rooms: list[memoryview]) -> Iterator[memoryview]:
        pending: deque[Future[memoryview]] = deque()
        for i, start in enumerate(range(0, self.size, BLOCK)):
            room = rooms[i % len(rooms)]
            count = min(BLOCK, self.size - start)
            pending.append(self._pool.submit(self._reader.read, room, start, count))
            if len(pending) == len(rooms):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
