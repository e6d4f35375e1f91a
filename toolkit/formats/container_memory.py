"""Read the memory limit of this process's container, and how much of it is free.

`psutil` only sees the machine. The system kills a container (`docker run --memory`, a pod, a Slurm
job) that exceeds its own limit, however much memory the machine has.
"""

import math
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # bytes: version 1 writes such a number where there is no limit


@dataclass(frozen=True)
class ContainerMemory:
    """Limit and free memory in bytes; infinite without a limit."""

    limit: float = math.inf
    free: float = math.inf
    """Cached files that the system can drop count as free."""


@dataclass(frozen=True)
class _ControlFiles:
    """Names of the files of one version of control groups."""

    folder: str
    limit: str
    used: str
    cached: str
    """Key of `memory.stat`."""


_V2 = _ControlFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = _ControlFiles(
    *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "total_inactive_file",
)


def container_memory(root: Path = Path("/")) -> ContainerMemory:
    """Read limit and free bytes of the tightest control group of this process.

    Reads versions 1 and 2, for the process's own group and all its parents, because each of their
    limits applies. Without control groups (macOS) there is no limit.

    Args:
        root: of the file system, for tests.
    """
    groups = [_read_group(folder, files) for folder, files in _control_groups(root)]
    return ContainerMemory(
        min((group.limit for group in groups), default=math.inf),
        min((group.free for group in groups), default=math.inf),
    )


def _control_groups(root: Path) -> Iterator[tuple[Path, _ControlFiles]]:
    """Yield the folders of the groups of this process, from its own up to the container's."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        # Inside a container the own group may be the root, while the path is the host's.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield root.joinpath(files.folder, *parts[:count]), files


def _read_group(folder: Path, files: _ControlFiles) -> ContainerMemory:
    """Read limit and free bytes of one group."""
    try:
        limit = int((folder / files.limit).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return ContainerMemory()
    if limit >= _UNLIMITED:
        return ContainerMemory()
    try:
        used = int((folder / files.used).read_text())
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(dict(pairs).get(files.cached, 0))
    except (OSError, ValueError):
        return ContainerMemory(limit, limit)
    return ContainerMemory(limit, max(0, limit - max(0, used - cached)))


def peak_host_memory() -> int:
    """Read the largest number of bytes of host memory that this process has held so far.

    On Linux the kernel's high-water mark is read, because `ru_maxrss` also counts what the parent
    process held before it started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
