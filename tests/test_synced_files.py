"""Files on the way to the disk: what is reserved for them, and where nothing can be."""

import errno
import fcntl
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

from toolkit.checkpoint import shards
from toolkit.formats import synced_files
from toolkit.formats.synced_files import preallocate

MIB = 2**20


@pytest.fixture
def descriptor(tmp_path) -> Iterator[int]:
    """A new file, which must still be open as it was opened when the test ends."""
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    flags = fcntl.fcntl(opened, fcntl.F_GETFL)
    yield opened
    assert fcntl.fcntl(opened, fcntl.F_GETFL) == flags
    os.close(opened)


def test_blocks_are_reserved_by_the_file_system_or_not_at_all(descriptor):
    preallocate(descriptor, MIB, 2 * MIB)
    held = os.fstat(descriptor)
    # A file system that cannot must be left alone, instead of being written to block by block.
    assert (held.st_size, held.st_blocks * 512 >= 2 * MIB) in [(3 * MIB, True), (0, False)]
    assert os.write(descriptor, b"not appended") == os.pread(descriptor, 20, 0).index(b"\0")


def test_nothing_writes_blocks_in_place_of_the_file_system(descriptor, monkeypatch):
    def as_glibc_does(opened: int, begin: int, size: int) -> None:
        if fcntl.fcntl(opened, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(errno.EBADF, "Bad file descriptor")
        os.pwrite(opened, b"\0", begin + size - 1)

    monkeypatch.setattr(os, "posix_fallocate", as_glibc_does)
    preallocate(descriptor, 0, 2 * MIB)
    assert os.fstat(descriptor).st_size == 0
    os.posix_fallocate(descriptor, 0, 2 * MIB)
    assert os.fstat(descriptor).st_size == 2 * MIB


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_disk_that_has_no_space_is_an_error(descriptor, monkeypatch, code):
    def refuse(*args: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        preallocate(descriptor, 0, 2 * MIB)
    preallocate(descriptor, 0, MIB - 1)  # not worth a call
    monkeypatch.delattr(os, "posix_fallocate", raising=False)  # macOS
    preallocate(descriptor, 0, 2 * MIB)


def test_a_shard_is_reserved_tensor_by_tensor_and_is_no_longer_for_it(tmp_path, monkeypatch):
    reserved = []

    def seen(descriptor: int, begin: int, size: int) -> None:
        reserved.append((begin, size))
        preallocate(descriptor, begin, size)

    monkeypatch.setattr(shards, "preallocate", seen)
    tensors = {"a": torch.randn(2, MIB), "b": torch.randn(3, 5), "c": torch.randn(MIB // 2)}
    writer = shards.HashingWriter(tmp_path)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    large = [size for _, size in reserved if size >= synced_files._WORTH_RESERVING]
    assert sorted(large) == [2 * MIB, 8 * MIB]
    for (begin, size), (following, _) in itertools.pairwise(reserved):
        assert begin + size == following
    assert sum(reserved[-1]) == (tmp_path / "__0_0.distcp").stat().st_size
    found = {name: torch.zeros_like(t) for name, t in tensors.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
