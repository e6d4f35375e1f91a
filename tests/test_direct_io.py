"""Files past the page cache: the same bytes as through it, whatever the file system can do."""

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.formats import direct_io
from toolkit.formats.direct_io import (
    ALIGNMENT,
    BLOCK,
    Appender,
    ReadAhead,
    Reader,
    Scatterer,
    block,
)

DIRECT = getattr(os, "O_DIRECT", 0)
REFUSALS = ("none", "at open", "at the first use", "by the user")


@pytest.fixture(params=REFUSALS)
def went_direct(request, tmp_path, monkeypatch) -> Callable[[], bool]:
    """A file system that has direct I/O, one that refuses it, one that refuses it late; returns a
    function that tells whether large blocks were written directly where they can be.
    """
    expected = request.param == "none" and can_be_direct(tmp_path)
    real_open, real_write, real_read = os.open, os.pwrite, os.preadv
    written: list[int] = []

    def open_file(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & DIRECT and request.param == "at open":
            if flags & os.O_CREAT:  # as Linux does it
                os.close(real_open(path, flags & ~DIRECT, *rest))
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_open(path, flags, *rest, **more)

    def write(descriptor: int, content: Any, offset: int) -> int:
        if direct_io.is_direct(descriptor):
            if request.param == "at the first use":
                raise OSError(errno.EINVAL, "no direct I/O here")
            assert offset % ALIGNMENT == 0
            assert len(content) % ALIGNMENT == 0
            written.append(len(content))
        return real_write(descriptor, content, offset)

    def read(descriptor: int, rooms: Any, offset: int) -> int:
        if direct_io.is_direct(descriptor):
            if request.param == "at the first use":
                raise OSError(errno.EINVAL, "no direct I/O here")
            assert offset % ALIGNMENT == 0
        return real_read(descriptor, rooms, offset)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    if request.param == "by the user":
        monkeypatch.setenv(direct_io.BUFFERED, "1")

    def told() -> bool:
        assert bool(written) <= expected
        return not expected or bool(written)

    return told


def can_be_direct(folder: Path) -> bool:
    probe = folder / "probe"
    descriptor = direct_io.open_direct(probe, os.O_WRONLY | os.O_CREAT)
    try:
        return direct_io.is_direct(descriptor)
    finally:
        os.close(descriptor)
        probe.unlink()


@pytest.mark.parametrize("size", [0, 1, ALIGNMENT, BLOCK - 1, BLOCK, 7 * BLOCK + 4097])
def test_appending_gives_what_was_written(tmp_path, went_direct, size):
    content, chance = random.Random(size).randbytes(size), random.Random(1)
    file, at = Appender(tmp_path / "file"), 0
    while at < size:
        count = chance.choice([1, 5000, BLOCK // 2, 3 * BLOCK])
        piece = bytearray(content[at : at + count])
        file.write(memoryview(piece))
        piece[:] = bytes(len(piece))  # it has its own copy
        at += count
    assert file.size == size
    file.close()
    assert (tmp_path / "file").read_bytes() == content
    assert went_direct() or size < BLOCK


@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_full_disk_is_told_and_ends_the_threads(tmp_path, monkeypatch, after):
    real, calls, before = os.pwrite, [0], threading.active_count()

    def full(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    file = Appender(tmp_path / "file")
    failed: list[OSError] = []
    try:
        for _ in range(12):
            file.write(memoryview(bytes(BLOCK)))
    except OSError as error:
        failed.append(error)
        file.close(sync=False)
    else:
        with pytest.raises(OSError, match="No space left") as raised:
            file.close()
        failed.append(raised.value)
    assert failed[0].errno == errno.ENOSPC
    assert threading.active_count() == before


def test_a_disk_that_takes_a_part_is_given_the_rest(tmp_path, monkeypatch):
    content, real = random.Random(0).randbytes(3 * BLOCK), os.pwrite

    def part(descriptor: int, piece: Any, offset: int) -> int:
        return real(descriptor, piece[: max(1, len(piece) // 3)], offset)

    monkeypatch.setattr(os, "pwrite", part)
    file = Appender(tmp_path / "file")
    file.write(memoryview(content))
    file.close()
    assert (tmp_path / "file").read_bytes() == content


def test_pieces_of_any_size_find_their_places(tmp_path, went_direct):
    """Two threads, neighbouring pieces, none aligned; single bytes beside several blocks."""
    chance, size = random.Random(7), 9 * BLOCK + 1234
    content = chance.randbytes(size)
    cuts = sorted({0, size, *chance.sample(range(size), 40), *range(5000, 5100)})
    pieces = list(itertools.pairwise(cuts))
    chance.shuffle(pieces)
    path = tmp_path / "file"
    cached = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(cached, size)
    direct = direct_io.open_again(cached, path, os.O_WRONLY)

    def work(own: list[tuple[int, int]]) -> None:
        out = Scatterer()
        for begin, end in own:
            for at in range(begin, end, 300_000):
                out.put(cached, direct, at, memoryview(content)[at : min(at + 300_000, end)])
        out.flush()

    threads = [threading.Thread(target=work, args=(pieces[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(cached)
    os.close(direct)
    assert path.read_bytes() == content
    assert went_direct()


def test_any_part_reads_as_it_is(tmp_path, went_direct):
    content, chance = random.Random(3).randbytes(2 * BLOCK + 777), random.Random(4)
    path = tmp_path / "file"
    path.write_bytes(content)
    room = block()
    with Reader(path) as reader:
        for _ in range(60):
            count = chance.choice([0, 1, 4096, 70_000, BLOCK - 2 * ALIGNMENT])
            begin = chance.randrange(len(content) + 5000)
            assert reader.read(room, begin, count) == content[begin : begin + count]
    for size in (0, 1, ALIGNMENT, BLOCK, BLOCK + 1, len(content)):
        path.write_bytes(content[:size])
        found = b""
        with ReadAhead(path) as ahead:
            while part := ahead.take(chance.choice([1, 100_000, 2 * BLOCK])):
                found += part
        assert found == content[:size]


def test_a_network_that_gives_a_part_is_asked_for_the_rest(tmp_path, monkeypatch):
    content, real = random.Random(0).randbytes(BLOCK), os.preadv
    (tmp_path / "file").write_bytes(content)

    def part(descriptor: int, rooms: Any, offset: int) -> int:
        return min(100_001, real(descriptor, rooms, offset))

    monkeypatch.setattr(os, "preadv", part)
    with Reader(tmp_path / "file") as reader:
        found = reader.read(block(), 0, BLOCK - 2 * ALIGNMENT)
        assert found == content[: BLOCK - 2 * ALIGNMENT]


def test_a_file_that_was_replaced_is_not_opened_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    descriptor = os.open(path, os.O_RDWR)
    (tmp_path / "other").write_bytes(b"two")
    os.replace(tmp_path / "other", path)
    with pytest.raises(OSError, match="was replaced while it was open"):
        direct_io.open_again(descriptor, path, os.O_WRONLY)
    os.close(descriptor)
    (tmp_path / "other").write_bytes(bytes(BLOCK))
    with Reader(path) as reader:
        reader.read(block(), 0, 3)
        os.replace(tmp_path / "other", path)
        with pytest.raises(OSError, match="was replaced while it was open"):
            reader.read(block(), 0, 2**20)
