"""Findings of a verification, and the files that it hashes."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint import commit
from toolkit.errors import CheckpointError
from toolkit.formats import is_cached

Finding = tuple[str, str | None, str]  # file in what was verified, tensor, what is wrong

_WORTH_THREADS = 2**23


@dataclass
class Report:
    """Counts of what was verified, and the problems that were found."""

    path: str
    kind: str  # run, checkpoint or export
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is no damage and should be known
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    logits_difference: float | None = None  # largest, to those of the checkpoint

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong."""
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
    """Collects findings and counts, from several threads, and shows progress."""

    def __init__(self, path: Path, kind: str) -> None:
        self.report, self._begun = Report(str(path), kind), time.perf_counter()
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False}
        self._bar = tqdm(total=0, desc="verify", disable=not sys.stderr.isatty(), **options)

    def __enter__(self) -> "Findings":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        unique = dict.fromkeys(self.report.findings)
        self.report.findings = sorted(unique, key=lambda f: (f[0], f[1] or "", f[2]))
        self.report.seconds = round(time.perf_counter() - self._begun, 3)

    def add(self, file: str, tensor: str | None, what: str) -> None:
        """Add a finding; `what` becomes one line."""
        self.report.findings.append((file, tensor, " ".join(what.split())))

    def note(self, text: str) -> None:
        """Add what is no damage and should be known."""
        self.report.notes.append(text)

    def each(
        self, work: Callable[[str], Any], sizes: dict[str, int], threads: int = 4
    ) -> dict[str, Any]:
        """Return name -> `work` of it; `sizes`: the bytes that it reads for each name."""
        total = sum(sizes.values())
        self._bar.total = (self._bar.total or 0) + total
        results = {}
        with ThreadPoolExecutor(threads if total >= _WORTH_THREADS else 1) as pool:
            for name, result in zip(sizes, pool.map(work, sizes), strict=True):
                results[name] = result
                self._bar.update(sizes[name])
        return results

    def hash_files(
        self, folder: Path, files: dict[str, dict[str, Any]], *, in_cache: bool = False
    ) -> dict[str, str]:
        """Return name -> what is wrong, of `files` whose size or sha256 is another; `in_cache`:
        links as the Hub's cache has them are right.
        """
        names = sorted(files, key=lambda name: -files[name]["size"])
        sizes = {name: files[name]["size"] for name in names}
        self.report.files += len(names)
        self.report.bytes += sum(sizes.values())
        found = self.each(
            lambda name: file_fault(folder / name, files[name], in_cache=in_cache), sizes
        )
        return {name: what for name, what in found.items() if what is not None}


def file_fault(file: Path, expected: dict[str, Any], *, in_cache: bool = False) -> str | None:
    """Return what is wrong with a file whose size and sha256 are expected."""
    try:
        if not is_regular(file, in_cache=in_cache):
            return "is no regular file" if os.path.lexists(file) else "is missing"
        return commit.find_damage(file, file.stat().st_size, expected, hashed=True)
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        return f"cannot be read: {getattr(cause, 'strerror', None) or error}"


def is_regular(file: Path, *, in_cache: bool = False) -> bool:
    """Return whether `file` is a regular file; a link only, `in_cache`, of the Hub's cache."""
    return file.is_file() and (not file.is_symlink() or (in_cache and is_cached(file)))
