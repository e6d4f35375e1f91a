"""What verification found, and the files that it hashes.

A finding is a file, the tensor where there is one, and what is wrong. Does not know what a
checkpoint or an export is.
"""

import hashlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

Finding = tuple[str, str | None, str]
"""File relative to what was verified, tensor or None, what is wrong."""

_BLOCK = 2**22
_WORTH_THREADS = 2**23


@dataclass
class Report:
    """What was verified and what was found."""

    path: str
    kind: str
    """run, checkpoint or export."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no damage and should be known."""
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    logits_difference: float | None = None
    """Largest difference between the logits of checkpoint and export, where both were computed."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def summary(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        findings = [{"file": f, "tensor": t, "what": w} for f, t, w in self.findings]
        return {"ok": self.ok, **vars(self), "findings": findings}

    def lines(self) -> list[str]:
        """Return one line for every finding and note, and a last one that sums up."""
        found = [": ".join(filter(None, finding)) for finding in self.findings]
        count = f"{self.files:,} files, {self.tensors:,} tensors, {self.bytes:,} bytes"
        verdict = "verified" if self.ok else f"{len(self.findings)} FINDING(S)"
        last = f"{self.path}: {self.kind} {verdict} ({count} in {self.seconds:.1f} s)"
        return [*found, *(f"note: {note}" for note in self.notes), last]


class Findings:
    """Collects findings and counts from several threads, and shows progress."""

    def __init__(self, path: Path, kind: str) -> None:
        self.report = Report(str(path), kind)
        self._lock = threading.Lock()
        hidden = not sys.stderr.isatty()
        self._bar = tqdm(
            total=0, desc="verify", unit="B", unit_scale=True, leave=False, disable=hidden
        )
        self._begun = time.perf_counter()

    def __enter__(self) -> "Findings":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        unique = dict.fromkeys(self.report.findings)
        self.report.findings = sorted(unique, key=lambda f: (f[0], f[1] or "", f[2]))
        self.report.seconds = round(time.perf_counter() - self._begun, 3)

    def add(self, file: str, tensor: str | None, what: str) -> None:
        """Add a finding; `what` becomes one line."""
        with self._lock:
            self.report.findings.append((file, tensor, " ".join(what.split())))

    def note(self, text: str) -> None:
        """Add a note."""
        self.report.notes.append(text)

    def expect(self, count: int) -> None:
        """Announce `count` bytes to come."""
        with self._lock:
            self._bar.total = (self._bar.total or 0) + count

    def advance(self, count: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._bar.update(count)

    def hash_files(
        self, folder: Path, files: dict[str, dict[str, Any]], *, in_cache: bool = False
    ) -> dict[str, str]:
        """Return name -> what is wrong, of the files that are not as `files` says.

        Args:
            files: name -> its expected `size` and `sha256`.
            in_cache: accept links as the Hub's cache has them.
        """
        sizes = {name: entry["size"] for name, entry in files.items()}
        total = sum(sizes.values())
        self.expect(total)
        names = sorted(files, key=lambda name: -sizes[name])
        faults = on_threads(
            lambda name: file_fault(folder / name, files[name], self.advance, in_cache=in_cache),
            names,
            total,
        )
        self.report.files += len(names)
        self.report.bytes += total
        return {n: what for n, what in zip(names, faults, strict=True) if what is not None}


def on_threads(work: Callable[[Any], Any], items: Iterable[Any], nbytes: int) -> list[Any]:
    """Return `work` of each item, on four threads where there are bytes enough to be worth them."""
    if nbytes < _WORTH_THREADS:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))


def file_fault(
    file: Path,
    expected: dict[str, Any],
    advance: Callable[[int], None],
    *,
    in_cache: bool = False,
) -> str | None:
    """Return what is wrong with a file whose size and sha256 are expected."""
    try:
        if not is_regular(file) and not (in_cache and is_cached(file)):
            return "is missing" if not os.path.lexists(file) else "is no regular file"
        with open(file, "rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            if size != expected["size"]:
                advance(expected["size"])
                return f"is {size} bytes long, expected {expected['size']}"
            hasher, buffer = hashlib.sha256(), bytearray(min(_BLOCK, max(1, size)))
            while count := f.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
                advance(count)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if hasher.hexdigest() == expected["sha256"] else "has other bytes than were written"


def is_regular(file: Path) -> bool:
    """Whether `file` is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(os.lstat(file).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_cached(path: Path) -> bool:
    """Whether `path` is a link as the Hub's cache has them: from a snapshot to its blobs."""
    blobs = path.parent.parent.parent / "blobs"
    return (
        path.parent.parent.name == "snapshots"
        and path.is_file()
        and path.resolve().parent == blobs.resolve()
    )
