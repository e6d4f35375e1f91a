"""The line under every table: which machine and which versions measured it."""

import importlib.metadata
import os
import platform
from pathlib import Path


def describe(script: str, *packages: str) -> str:
    """Return processor, cores, Python and the versions of `packages`, and who wrote the table."""
    names = (
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    processor = next(names, platform.processor()).split(":")[-1].strip()
    versions = "".join(f", {p} {importlib.metadata.version(p)}" for p in packages)
    return (
        f"Machine: {processor}, {os.cpu_count()} cores; Python {platform.python_version()}"
        f"{versions}. "
        f"Written by `{script if '/' in script else f'benchmarks/{script}'}`."
    )
