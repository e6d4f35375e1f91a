"""Digests of what files hold, by which cached results of reading them are found again."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import xxhash

from toolkit import ranks
from toolkit.tables import size_text

WHOLE_BYTES = 4 << 30
"""Files of a source that are together at most so large are read in full: a second for each GB."""
_BLOCK = 1 << 20
_SAMPLES = 64  # blocks of each file of a larger source, its first and last among them


def digest_contents(files: Sequence[Path], where: str) -> list[tuple[str | int, ...]]:
    """Return for each file its name, size and a digest of its content.

    Up to `WHOLE_BYTES` the digest covers every byte, and depends on nothing else: a file that is
    copied or touched has the same one, and one that changed has another, even if size and time of
    change are the same. Of larger sources it covers the first and the last megabyte and others in
    between, and the times of the file, which a log line says.
    """
    stats = [os.stat(file) for file in files]
    total = sum(stat.st_size for stat in stats)
    whole = total <= WHOLE_BYTES
    if not whole:
        ranks.log_once(
            f"cache      {where}: {size_text(total)} are too much to read at each start. Encoded "
            f"rows are found again by size, times and {_SAMPLES} MiB of each file; after a change "
            "of a few bytes elsewhere that keeps the times of a file, delete the cache"
        )
    digests = list[tuple[str | int, ...]]()
    for file, stat in zip(files, stats, strict=True):
        times = stat.st_mtime_ns, stat.st_ctime_ns
        digest = _digest(str(file), stat.st_size, times, stat.st_ino, whole)
        digests.append((file.name, stat.st_size, digest, *(() if whole else times)))
    return digests


# A start asks several times. What a process has read does not change under another time or inode.
@lru_cache(maxsize=10_000)
def _digest(file: str, size: int, times: tuple[int, int], inode: int, whole: bool) -> str:
    digest = xxhash.xxh3_128()
    with open(file, "rb") as stream:
        if whole or size <= _SAMPLES * _BLOCK:
            while block := stream.read(_BLOCK):
                digest.update(block)
        else:
            for number in range(_SAMPLES):
                stream.seek((size - _BLOCK) * number // (_SAMPLES - 1))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
