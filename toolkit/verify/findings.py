"""The report of a verification, and the files that it hashes."""

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
from toolkit.formats import is_hub_cache_link

Finding = tuple[str, str | None, str]  # file inside the verified folder, tensor, problem

# Below so many bytes, starting threads costs more than they save.
_MIN_BYTES_FOR_THREADS = 2**23


@dataclass
class Report:
    """The result of a verification: counts, problems (`findings`) and notes."""

    path: str
    kind: str  # run, checkpoint or export
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # no damage, but worth knowing
    files: int = 0
    tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    logits_difference: float | None = None  # largest difference to the checkpoint's logits

    @property
    def ok(self) -> bool:
        """True if there is no finding."""
        return not self.findings

    def summary(self) -> dict[str, Any]:
        """Convert the report to plain JSON values, for `--json`."""
        findings = [{"file": f, "tensor": t, "what": w} for f, t, w in self.findings]
        return {"ok": self.ok, **vars(self), "findings": findings}

    def lines(self) -> list[str]:
        """Format one line per finding and note, and a last line with verdict and counts."""
        findings = [": ".join(filter(None, finding)) for finding in self.findings]
        notes = [f"note: {note}" for note in self.notes]
        counts = f"{self.files:,} files, {self.tensors:,} tensors, {self.bytes:,} bytes"
        verdict = "verified" if self.ok else f"{len(self.findings)} FINDING(S)"
        last = f"{self.path}: {self.kind} {verdict} ({counts} in {self.seconds:.1f} s)"
        return [*findings, *notes, last]


class Findings:
    """Collector of findings and counts from several threads, with a progress bar on a terminal.

    Use it as a context manager. On exit, the findings in `report` are sorted, and duplicates are
    removed.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.report = Report(str(path), kind)
        self._start = time.perf_counter()
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False}
        self._bar = tqdm(total=0, desc="verify", disable=not sys.stderr.isatty(), **options)

    def __enter__(self) -> "Findings":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        unique = dict.fromkeys(self.report.findings)
        self.report.findings = sorted(unique, key=lambda f: (f[0], f[1] or "", f[2]))
        self.report.seconds = round(time.perf_counter() - self._start, 3)

    def add(self, file: str, tensor: str | None, problem: str) -> None:
        """Add a finding: the file ("" for the folder), the tensor or None, and the problem."""
        self.report.findings.append((file, tensor, " ".join(problem.split())))

    def note(self, text: str) -> None:
        """Add a note: a text that is worth knowing, but reports no damage."""
        self.report.notes.append(text)

    def map_with_progress(
        self, work: Callable[[str], Any], sizes: dict[str, int], threads: int = 4
    ) -> dict[str, Any]:
        """Call `work` with each name in threads, and advance the progress bar by the bytes read.

        Args:
            work: the function to call. If there are less than 8 MB to read, only one thread is
                used.
            sizes: name -> number of bytes that `work` reads for it.
            threads: maximum number of threads.

        Returns:
            Name -> the result of `work`.
        """
        total = sum(sizes.values())
        self._bar.total = (self._bar.total or 0) + total
        results = {}
        with ThreadPoolExecutor(threads if total >= _MIN_BYTES_FOR_THREADS else 1) as pool:
            for name, result in zip(sizes, pool.map(work, sizes), strict=True):
                results[name] = result
                self._bar.update(sizes[name])
        return results

    def find_damaged_files(
        self, folder: Path, files: dict[str, dict[str, Any]], *, in_cache: bool = False
    ) -> dict[str, str]:
        """Compare the size and hash of every file with a manifest, and count files and bytes.

        Adds the counts to `report`, but no findings.

        Args:
            folder: folder of the files.
            files: file name -> its manifest entry.
            in_cache: True also accepts files that are links of the Hub's cache.

        Returns:
            File name -> its problem, for damaged and missing files only.
        """
        names = sorted(files, key=lambda name: -files[name]["size"])
        sizes = {name: files[name]["size"] for name in names}
        self.report.files += len(names)
        self.report.bytes += sum(sizes.values())
        problems = self.map_with_progress(
            lambda name: describe_file_damage(folder / name, files[name], in_cache=in_cache), sizes
        )
        return {name: problem for name, problem in problems.items() if problem is not None}


def describe_file_damage(
    file: Path, expected: dict[str, Any], *, in_cache: bool = False
) -> str | None:
    """Read a file, and describe how it differs from its manifest entry; None if it matches.

    A file that cannot be read is described, too. Links are refused, except those of the Hub's cache
    if `in_cache` is True.
    """
    try:
        if not is_regular(file, in_cache=in_cache):
            return "is no regular file" if os.path.lexists(file) else "is missing"
        return commit.describe_damage(file, file.stat().st_size, expected, hashed=True)
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        return f"cannot be read: {getattr(cause, 'strerror', None) or error}"


def is_regular(file: Path, *, in_cache: bool = False) -> bool:
    """Return True if `file` is a regular file and no link.

    If `in_cache` is True, a link of the Hub's cache to a file counts as regular.
    """
    return file.is_file() and (not file.is_symlink() or (in_cache and is_hub_cache_link(file)))
