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
    """Memory limit and free memory of a container, in bytes; both are infinite without a limit."""

    limit: float = math.inf
    free: float = math.inf
    """Cached files that the system can drop count as free."""


@dataclass(frozen=True)
class _ControlFiles:
    """Paths and keys by which one version of Linux control groups (cgroups) reports memory."""

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
    """Read the memory limit and the free memory of this process's container, in bytes.

    Reads the control groups (versions 1 and 2) of the process and all their parents, because every
    limit applies. The result holds the smallest limit and the smallest free memory. Both are
    infinite without a limit, or if there are no control groups, as on macOS.

    Args:
        root: root of the file system to read; tests pass another one.
    """
    groups = [_read_group(folder, files) for folder, files in _control_groups(root)]
    return ContainerMemory(
        min((group.limit for group in groups), default=math.inf),
        min((group.free for group in groups), default=math.inf),
    )


def _control_groups(root: Path) -> Iterator[tuple[Path, _ControlFiles]]:
    """Yield (folder, files) of this process's memory control groups and all their parents.

    `files` names the files of that version of control groups. Yields nothing without control
    groups.
    """
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
    """Read limit and free memory of one control group, in bytes.

    Both are infinite if the group has no limit or cannot be read.
    """
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
    """Read the peak host memory of this process so far, in bytes.

    On Linux this is the kernel's high-water mark, because `ru_maxrss` includes memory that the
    parent process held before it started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
