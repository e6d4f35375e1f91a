"""Whether the disk holds what a run will write, known before it starts.

Owns the prediction, from shapes and dtypes alone, and the comparison with what is free. Knows
neither how a checkpoint is written nor what a step costs.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from toolkit import ranks
from toolkit.checkpoint import commit
from toolkit.checkpoint.store import Place
from toolkit.checkpoint.store import where as place
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError
from toolkit.formats import DTYPE_NAMES, assets_of
from toolkit.models.peft_model import has_adapters, model_tensors

_MOMENTS = 2  # AdamW's, of the parameter's size and dtype
_PER_CHUNK = 2048  # a blob's headers, its entries in .metadata and in the manifest
_PER_RANK = 32 * 1024  # random state


@dataclass(frozen=True)
class DiskEstimate:
    """What a run will have on the disk at its fullest moment; sizes in bytes."""

    checkpoint: int
    checkpoints: int
    """How many of them at a time."""
    export: int
    there: int
    """What of that lies there already: checkpoints and exports that count or will be replaced."""
    free: int
    """On the file system of the run directory."""
    where: Path
    """The folder whose file system that is."""
    store: str = ""
    """URL of the store that takes the checkpoints instead; how much room it has, nobody can ask."""

    @property
    def total(self) -> int:
        return (0 if self.store else self.checkpoint * self.checkpoints) + self.export

    @property
    def lacking(self) -> int:
        """Bytes that must become free before the run can end well; 0 where it fits."""
        return max(0, self.total - min(self.there, self.total) - self.free)

    def __str__(self) -> str:
        if self.store:
            return (
                f"{self.checkpoints} checkpoint(s) of {_readable(self.checkpoint)} on {self.store};"
                f" exports of {_readable(self.export)}; {_readable(self.free)} are free on "
                f"{self.where}"
            )
        there = f", of which {_readable(self.there)} are there" if self.there else ""
        return (
            f"{self.checkpoints} checkpoint(s) of {_readable(self.checkpoint)} and exports of "
            f"{_readable(self.export)}: {_readable(self.total)}{there}; "
            f"{_readable(self.free)} are free on {self.where}"
        )


def preflight(
    model: nn.Module, folder: Path, cfg: CheckpointConfig, max_steps: int, say: Callable
) -> None:
    """Say what a run will write, and refuse it where the disk is too small. Collective.

    Args:
        max_steps: -1 where it is not known yet; otherwise as for `need`.
        say: takes the line; once, on the main process, is its own business.

    Raises:
        CheckpointError: on every rank; see `refuse_overflow`.
    """
    steps, world = None if max_steps == -1 else max_steps, ranks.world_size()
    needed = ranks.on_main(lambda: need(model, folder, cfg, steps, world))
    ranks.on_main(lambda: refuse_overflow(needed, cfg))
    say(f"disk       {needed}")


def need(
    model: nn.Module,
    output_dir: str | Path,
    cfg: CheckpointConfig,
    max_steps: int | None,
    world_size: int,
) -> DiskEstimate:
    """Return what the run needs and finds; costs a look at the run's files, reads none.

    Checkpoints: one more than the limit, since the new one is whole before an old one goes, those
    that stay for good, and the best. Never more than the run will save.

    Args:
        model: on meta or not, sharded or not.
        max_steps: of the whole run; None where the data decides, which is not known yet: permanent
            checkpoints are not counted then.
    """
    root = place(output_dir if cfg.root is None else cfg.root)
    here, exports = _existing(Path(output_dir)), export_bytes(model) * exports_kept(cfg, max_steps)
    where = here if isinstance(root, Place) else _existing(root)
    there = 0 if isinstance(root, Place) else _counted(root / commit.CHECKPOINTS)
    if where.stat().st_dev == here.stat().st_dev:
        there += _counted(Path(output_dir) / commit.EXPORTS)
    else:
        exports = 0  # on another disk than the checkpoints, which fill theirs first
    return DiskEstimate(
        checkpoint_bytes(model, world_size),
        checkpoints_kept(cfg, max_steps),
        exports,
        there,
        shutil.disk_usage(where).free,
        where,
        str(root) if isinstance(root, Place) else "",
    )


def _existing(folder: Path) -> Path:
    """Return `folder`, or what it will be made in."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def refuse_overflow(need: DiskEstimate, cfg: CheckpointConfig) -> None:
    """Refuse a run that would fill the disk.

    Raises:
        CheckpointError: names what is needed, what is free, and what to do.
    """
    if need.lacking:
        limit = cfg.save_total_limit
        rule = "all are kept" if limit is None else f"checkpoint.save_total_limit is {limit}"
        raise CheckpointError(
            f"the run needs {_readable(need.total)} on the disk and {_readable(need.free)} are "
            f"free: {need}. Free {_readable(need.lacking)}, save less ({rule}, "
            f"save_steps {cfg.save_steps}, save_permanent_steps {cfg.save_permanent_steps}, "
            f"export_steps {cfg.export_steps}), or give another output_dir"
        )


def checkpoint_bytes(model: nn.Module, world_size: int) -> int:
    """Return the bytes of a checkpoint: parameters in storage dtype, buffers, AdamW's moments."""
    tensors = model_tensors(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    chunks = len(tensors) + _MOMENTS * len(trained)
    return (
        sum(t.numel() * t.itemsize for t in tensors.values())
        + _MOMENTS * sum(p.numel() * p.itemsize for p in trained)
        + chunks * world_size * _PER_CHUNK
        + world_size * _PER_RANK
        + sum(map(len, assets_of(model).files.values()))
    )


def checkpoints_kept(cfg: CheckpointConfig, max_steps: int | None) -> int:
    """Return how many checkpoints lie on the disk at most."""
    saved = None if max_steps is None else math.ceil(max_steps / cfg.save_steps)
    if cfg.save_total_limit is None:
        return saved or 1
    kept = cfg.save_total_limit + 1 + int(cfg.keep_best)
    if cfg.save_permanent_steps is not None and max_steps is not None:
        kept += max_steps // cfg.save_permanent_steps
    return kept if saved is None else min(kept, saved)


def exports_kept(cfg: CheckpointConfig, max_steps: int | None) -> int:
    """Return how many exports lie on the disk: those of the run, else the one made after it."""
    every = cfg.export_steps
    if every is None or max_steps is None:
        return 1
    return max(1, max_steps // every + (cfg.export_at_end and max_steps % every != 0))


def export_bytes(model: nn.Module) -> int:
    """Return the bytes of the Hugging Face folder, in the dtype that most source tensors have; of
    a model with adapters those of the adapters.
    """
    if has_adapters(model):
        return sum(t.numel() * t.itemsize for t in model_tensors(model).values())
    source = assets_of(model).source
    names = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    common = Counter(source.values()).most_common(1) if source else []
    dtype = names[common[0][0]] if common else torch.bfloat16
    return sum(t.numel() for t in model_tensors(model).values()) * dtype.itemsize


def _counted(root: Path) -> int:
    """Return the bytes below `root`, without what was set aside: that stays and makes no room."""
    aside = ".bad-" if root.name == commit.CHECKPOINTS else ".old-"
    return sum(
        os.lstat(os.path.join(below, name)).st_size
        for folder in (root.iterdir() if root.is_dir() else ())
        if aside not in folder.name
        for below, _, names in os.walk(folder)
        for name in names
    )


def _readable(nbytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
