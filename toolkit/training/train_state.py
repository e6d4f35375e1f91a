"""The state of a run: changed by steps, checked by guards, kept in checkpoints."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from toolkit.errors import TrainingError


@dataclass
class Saves:
    """Information that a save passes to the next save of the same start. No part of checkpoints."""

    behind: bool | None = None
    """With `async_save: auto`, True if the loop continues while a checkpoint is written. None
    before the first save."""
    failed: list[str] = field(default_factory=list)
    """Paths of the saves that failed because of the disk, since the last one that succeeded."""
    room: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Buffers for copies of tensors. Filling new pages, let alone pinning them, takes longer than
    the copy, so the next save uses the same buffers."""
    written: Any = None
    """Chunks that each rank wrote in the last save (`checkpoint.shards`)."""


@dataclass(frozen=True)
class StateFile:
    """A file that is stored unchanged in every checkpoint of a run."""

    content: bytes = field(repr=False)
    sha256: str
    """Digest of the content when it was created. Each save compares it with the written file."""

    @classmethod
    def of(cls, content: bytes) -> "StateFile":
        """Create a `StateFile` from its content, and compute the digest."""
        return cls(content, hashlib.sha256(content).hexdigest())


@dataclass
class TrainState:
    """All state that a run needs to continue as if it had not been interrupted."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    data: Any = None
    """Position in the data: any object with `state_dict()`, which every rank calls, and
    `load_state_dict()`, both of JSON values."""
    step: int = 0
    """Number of optimizer steps done."""
    tokens: int = 0
    """Number of supervised tokens trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation at this step, compared by `keep_best`; empty without one."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further JSON values. `resume` updates them from the checkpoint."""
    files: dict[str, StateFile] = field(default_factory=dict, repr=False)
    """Name -> a file that is part of each checkpoint. The files of rank 0 are saved."""
    saves: Saves = field(default_factory=Saves, repr=False)

    @property
    def required_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which must exist.

        Raises:
            TrainingError: the state has none, because it is only loaded for an export.
        """
        if self.optimizer is None:
            raise TrainingError("this state has no optimizer; pass one to TrainState to train")
        return self.optimizer

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return by name the parameters that the optimizer trains; empty without an optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        trained_ids = {id(p) for group in groups for p in group["params"]}
        return {n: p for n, p in self.model.named_parameters() if id(p) in trained_ids}
