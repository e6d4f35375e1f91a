"""Names of the commit protocol: the files of a checkpoint, and the attempts to write one."""

from dataclasses import dataclass
from typing import Any

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
BAD = "BAD"
SHARD = ".distcp"  # how torch's DCP ends the names of files with tensors


@dataclass(frozen=True)
class Attempt:
    """A folder that bears a name of the protocol."""

    folder: Any
    step: int
    kind: str  # saved, old, tmp, bad or trash: as named on a disk; on a store as its objects say
    order: int  # of the committed ones of a step the highest counts


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"
