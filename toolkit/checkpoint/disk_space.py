"""Estimate the disk space that a run needs, from shapes and dtypes alone."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.local_folder import LocalFolder, nearest_existing_folder
from toolkit.checkpoint.names import CHECKPOINTS, EXPORTS
from toolkit.checkpoint.store import Folder, folder_bytes, parse_location, storage_of
from toolkit.config.settings import CheckpointConfig, OptimConfig
from toolkit.errors import CheckpointError
from toolkit.formats import DTYPES, assets_of
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.tables import size_text
from toolkit.training.optim import compute_state_bytes

_MOMENTS = 2  # tensors of state for each parameter
_PER_CHUNK = 2048  # a blob's headers, its entries in .metadata and in the manifest
_PER_RANK = 32 * 1024  # random state
_ADAMW = OptimConfig()


@dataclass(frozen=True)
class DiskEstimate:
    """The largest disk space that a run will need at any time, and the free space, in bytes."""

    checkpoint: int
    checkpoints: int
    """Largest number of checkpoints at one time."""
    export: int
    there: int
    """Bytes that are on the disk already: checkpoints and exports that stay or are replaced."""
    free: int
    folder: Path
    """`free` is about the file system of this folder."""
    store: Folder | None
    """The object store that holds the checkpoints instead, whose free space is unknown."""

    @property
    def total(self) -> int:
        """Bytes that the disk must hold at one time, including those that are on it already.

        Checkpoints on an object store are not counted.
        """
        return (0 if self.store else self.checkpoint * self.checkpoints) + self.export

    def __str__(self) -> str:
        there = f", of which {size_text(self.there)} are there" if self.there else ""
        return (
            f"{self.checkpoints} checkpoint(s) of {size_text(self.checkpoint)}"
            f"{f' on {self.store}' if self.store else ''} and exports of {size_text(self.export)}: "
            f"{size_text(self.total)}{there}; {size_text(self.free)} are free on {self.folder}"
        )


def estimate_disk_use(
    model: nn.Module,
    output_dir: str | Path,
    cfg: CheckpointConfig,
    max_steps: int | None,
    world_size: int,
    optim: OptimConfig = _ADAMW,
    *,
    file_bytes: int = 0,
) -> DiskEstimate:
    """Estimate the disk space of all checkpoints and exports of a run, and measure the free space.

    Reads no tensor. Exports and damaged checkpoints that were renamed (`.old-*`, `.bad-*`) are not
    counted.

    Args:
        model: the model of the run, possibly on meta.
        output_dir: the run directory.
        cfg: says how many checkpoints are kept, and where.
        max_steps: steps of the entire run. If None, the limit in `cfg` is the number of
            checkpoints, and one export is counted.
        world_size: number of ranks.
        optim: says how large the optimizer state is.
        file_bytes: size of other files in each checkpoint.
    """
    run = Path(output_dir)
    root: Any = parse_location(output_dir if cfg.root is None else cfg.root)
    on_disk = storage_of(root).is_disk
    steps = sorted(committed_steps(root)) if on_disk else []
    last_step = max(steps, default=0)
    exports, there, every = 1, 0, cfg.export_steps  # without periodic exports, one after the run
    if every is not None and max_steps is not None:
        at_end = cfg.export_at_end and max_steps % every != 0
        present = [f for f in (run / EXPORTS).glob("step-*") if ".old-" not in f.name]
        exports = max(1, len(present) + max_steps // every - last_step // every + at_end)
    folder = home = nearest_existing_folder(run)
    if on_disk:
        folder, there = (
            nearest_existing_folder(root),
            _sum_folder_bytes(root / CHECKPOINTS, ".bad-"),
        )
    if folder.stat().st_dev == home.stat().st_dev:
        there += _sum_folder_bytes(run / EXPORTS, ".old-")
    else:
        exports = 0  # on another disk; the checkpoints fill theirs first
    return DiskEstimate(
        estimate_checkpoint_bytes(model, world_size, optim) + file_bytes,
        count_checkpoints_on_disk(cfg, max_steps, steps),
        exports * estimate_export_bytes(model),
        there,
        LocalFolder(folder).free_bytes(),
        folder,
        None if on_disk else root,
    )


def check_disk_space(estimate: DiskEstimate, cfg: CheckpointConfig) -> None:
    """Raise a CheckpointError if `estimate` exceeds the free space; it says what to change."""
    missing_bytes = estimate.total - min(estimate.there, estimate.total) - estimate.free
    if missing_bytes > 0:
        limit = cfg.save_total_limit
        rule = "all are kept" if limit is None else f"checkpoint.save_total_limit is {limit}"
        raise CheckpointError(
            f"the run does not fit on the disk: {estimate}. Free {size_text(missing_bytes)}, save "
            f"less ({rule}, save_steps {cfg.save_steps}, export_steps {cfg.export_steps}), or give "
            "another output_dir"
        )


def estimate_checkpoint_bytes(
    model: nn.Module, world_size: int, optim: OptimConfig = _ADAMW
) -> int:
    """Estimate the bytes of one checkpoint: model and optimizer tensors, assets, metadata."""
    tensors = model_tensors(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    chunks = len(tensors) + _MOMENTS * len(trained)
    return (
        sum(t.numel() * t.itemsize for t in tensors.values())
        + compute_state_bytes(model, optim)
        + chunks * world_size * _PER_CHUNK
        + world_size * _PER_RANK
        + sum(map(len, assets_of(model).files.values()))
    )


def count_checkpoints_on_disk(
    cfg: CheckpointConfig, max_steps: int | None, steps: Sequence[int] = ()
) -> int:
    """Compute the largest number of checkpoints that are on the disk at one time.

    With a `save_total_limit`, it is the limit plus one, because an old checkpoint is deleted after
    the new one is complete. `keep_best` adds another one. If fewer saves remain, or if there is no
    limit, it is the number of all saves.

    Args:
        cfg: the limit and the interval of saves.
        max_steps: steps of the entire run. If None, future saves are unknown: the result is the
            limit or, without one, the number of existing checkpoints (at least 1).
        steps: steps of the checkpoints that exist already.
    """
    last_step, saved = max(steps, default=0), len(steps)  # present or still to come
    if max_steps is not None and last_step < max_steps:
        saved += math.ceil(max_steps / cfg.save_steps) - last_step // cfg.save_steps
    if cfg.save_total_limit is None:
        return saved or 1
    limit = cfg.save_total_limit + 1 + int(cfg.keep_best)
    return limit if max_steps is None else min(limit, saved)


def estimate_export_bytes(model: nn.Module) -> int:
    """Estimate the bytes of one export.

    A full model counts as if all its tensors had the most common dtype of the source model, or
    bfloat16 without a source. An export of adapters counts in their own dtypes.
    """
    tensors = model_tensors(model).values()
    if has_adapters(model):
        return sum(t.numel() * t.itemsize for t in tensors)
    common = Counter((assets_of(model).source or {}).values()).most_common(1)
    dtype = DTYPES[common[0][0]] if common else torch.bfloat16
    return sum(t.numel() for t in tensors) * dtype.itemsize


def _sum_folder_bytes(root: Path, aside: str) -> int:
    """Sum the bytes of the folders in `root`, except those whose names contain `aside`.

    If `root` does not exist, the sum is 0.
    """
    folders = root.iterdir() if root.is_dir() else ()
    return sum(folder_bytes(folder) for folder in folders if aside not in folder.name)
