"""The state of a run, which steps change, guards watch and checkpoints keep."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from toolkit.errors import TrainingError


@dataclass
class Saves:
    """What one save of a run leaves for the next; no checkpoint keeps it."""

    behind: bool | None = None
    """Whether the loop goes on while `async_save: auto` writes; None before the first save."""
    failed: list[str] = field(default_factory=list)
    """Paths of the saves that failed by the disk since the last success."""
    room: dict[Any, torch.Tensor] = field(default_factory=dict)
    """Copies of tensors. Filling fresh pages, let alone pinning them, takes longer than the copy,
    so the next save uses them again."""
    written: Any = None
    """The chunks that the ranks wrote (`checkpoint.shards`)."""


@dataclass(frozen=True)
class StateFile:
    """A file that every checkpoint of a run holds as it is."""

    content: bytes = field(repr=False)
    sha256: str
    """Of the content as it was made: each save compares what it wrote."""

    @classmethod
    def of(cls, content: bytes) -> "StateFile":
        """Return the file that holds `content`."""
        return cls(content, hashlib.sha256(content).hexdigest())


@dataclass
class TrainState:
    """Everything a run needs to go on as if nothing had happened."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    data: Any = None
    """Position in the data: anything with `state_dict()`, which every rank calls, and
    `load_state_dict()` of JSON values."""
    step: int = 0  # optimizer steps done
    tokens: int = 0  # supervised tokens seen
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the evaluation at this step, by which `keep_best` compares; empty where there was none."""
    extra: dict[str, Any] = field(default_factory=dict)  # any other JSON; `resume` updates it
    files: dict[str, StateFile] = field(default_factory=dict, repr=False)
    """Name -> a file that is part of each checkpoint; those of rank 0 are saved."""
    saves: Saves = field(default_factory=Saves, repr=False)

    @property
    def required_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; TrainingError where the state has none, as one that is only exported."""
        if self.optimizer is None:
            raise TrainingError("this state has no optimizer; give TrainState one to train it")
        return self.optimizer

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer has, by name."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        return {n: p for n, p in self.model.named_parameters() if id(p) in held}
