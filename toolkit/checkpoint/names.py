"""Names of the files and folders in a run directory and in a checkpoint."""

from dataclasses import dataclass
from typing import Any

# In a run directory.
CHECKPOINTS = "checkpoints"
EXPORTS = "exports"  # only if the run exports models itself

# In a checkpoint.
DCP = "dcp"  # tensors, in torch's distributed checkpoint format
HF = "hf"  # config, tokenizer and other assets of the model
RNG = "rng"  # random state, one file per rank
STATE = "state.json"
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
BAD = "BAD"  # on a store: the attempt failed verification
SHARD = ".distcp"  # suffix of DCP's files with tensors

# In the manifest: name of a model or optimizer tensor -> sum of its rows.
ROW_SUMS = "row_sums"


@dataclass(frozen=True)
class Attempt:
    """A folder that holds one save of a step: committed, unfinished, damaged or being deleted."""

    folder: Any
    step: int
    kind: str
    """`saved`, `old`, `tmp`, `bad` or `trash`. A disk has it in the folder's name, a store in the
    objects of the attempt."""
    order: int
    """Of the committed attempts of one step, the one with the highest order is valid."""


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as `step-00000100`."""
    return f"step-{step:08d}"
