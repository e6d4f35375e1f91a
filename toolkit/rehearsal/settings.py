"""The config of a run as this machine's CPU can rehearse it."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.config import CheckpointConfig, ShardingConfig
from toolkit.config.settings import FinetuneConfig, OptimConfig, RunConfig
from toolkit.errors import ModelError
from toolkit.models.patterns import matching_modules, matching_parameters
from toolkit.rehearsal.shrunk import Shrunk

EVERY, LAST = 4, 12
"""Steps from one checkpoint to the next, and of the whole rehearsal."""
_FLOPS = 1e10  # of a step on one process
_LEAST = 64  # tokens of a sample
_ROWS, _REPEATS = 2, 2  # of a micro-batch, and micro-batches of a step, at most
_SCHEDULED = 2  # steps of warm-up, or decay
_GPU_ATTENTION = ("flash", "paged", "/")  # in names of kernels


def on_cpu(cfg: Any) -> Any:
    """Return the config without kernels that only GPUs have, and with `auto` decided: a sample a
    micro-batch, all layers recomputed, none compiled.
    """
    kernel = cfg.model.attn_implementation or ""
    kept = None if any(part in kernel for part in _GPU_ATTENTION) else kernel or None
    model = replace(cfg.model, kernels="none", attn_implementation=kept)
    train, sharding = cfg.train, cfg.sharding
    if train.per_device_train_batch_size == "auto":
        train = replace(train, per_device_train_batch_size=1)
    if sharding.activation_checkpointing == "auto":
        sharding = replace(sharding, activation_checkpointing="full")
    if sharding.torch_compile == "auto":
        sharding = replace(sharding, torch_compile="none")
    return replace(cfg, model=model, train=train, sharding=sharding)


def on_other_ranks(train: Any, world_size: int) -> tuple[int, int] | None:
    """Return the ranks that do a step again and their micro-batch: two for one, else at most half
    as many, over which the samples of a step divide; None: a step of one rank has a single sample.
    """
    samples = train.micro_batch * train.gradient_accumulation_steps * world_size
    others = [2] if world_size == 1 else range(world_size // 2, 0, -1)
    world = next((n for n in others if samples % n == 0), None)
    return None if world is None else (world, math.gcd(samples // world, train.micro_batch))


def affordable_length(cfg: RunConfig, shrunk: Shrunk) -> int:
    """Return the tokens of a sample that a step is quick with; `cfg` as `on_cpu` gives it."""
    rows = min(cfg.train.micro_batch, _ROWS)
    repeats = min(cfg.train.gradient_accumulation_steps, _REPEATS)
    tokens = _FLOPS / (6 * shrunk.parameters) / (rows * repeats)
    return max(_LEAST, min(cfg.data.sequence_length, int(tokens)))


def rehearsal_config(
    cfg: RunConfig,
    shrunk: Shrunk,
    model: nn.Module,
    world_size: int,
    length: int,
    files: tuple[list[Path], list[Path]],
    output: Path,
) -> RunConfig:
    """Return the config of the rehearsal.

    `model` is the small one on meta, `files` hold the rows to train on and to evaluate on, one for
    each source.
    """
    own: Any = on_cpu(cfg)
    sharding = {**_mesh(cfg.sharding, world_size), **_sharding(own.sharding, shrunk)}
    own = replace(
        own,
        model=replace(own.model, name_or_path=str(shrunk.folder), revision=None),
        sharding=replace(own.sharding, **sharding),
        data=replace(own.data, sequence_length=length, **_data(cfg, files, length)),
        train=replace(own.train, **_train(own)),
        optim=replace(own.optim, **_optim(cfg.optim)),
        checkpoint=replace(own.checkpoint, **_checkpoint(cfg.checkpoint)),
        metrics=replace(own.metrics, report_to="none"),
        hub=type(own.hub)(),
        output_dir=str(output),
    )
    return _matching(own, model)


def not_rehearsed(cfg: ShardingConfig, ranks: int, world_size: int) -> list[str]:
    """Return what no setting of the rehearsal shows: what `ranks` processes on devices have."""
    lacking = [
        "GPU kernels, NCCL, what `auto` chooses on GPUs",
        "the real model's memory and speed, which `toolkit plan CONFIG` estimates",
    ]
    if ranks != world_size:
        lacking.append(
            f"{ranks} processes: {world_size} here (the stage sharding set up the mesh of {ranks})"
        )
    if cfg.cpu_offload or cfg.activation_offload:
        lacking.append("copies between device and host: on a CPU they are one memory")
    return lacking


def _mesh(asked: ShardingConfig, world_size: int) -> dict[str, Any]:
    if asked.dp_shard == 1:
        return {"dp_replicate": -1, "dp_shard": 1}
    if asked.dp_replicate > 1 and world_size % 4 == 0:
        return {"dp_replicate": 2, "dp_shard": -1}
    return {"dp_replicate": 1, "dp_shard": -1}


def _sharding(asked: ShardingConfig, shrunk: Shrunk) -> dict[str, Any]:
    overrides = asked.reshard_after_forward_overrides.items()
    changed: dict[str, Any] = {
        "param_dtype": shrunk.dtype,
        "reshard_after_forward_overrides": {name: bool(v) for name, v in overrides},
    }
    if isinstance(asked.reshard_after_forward, int):
        changed["reshard_after_forward"] = bool(asked.reshard_after_forward)
    if asked.torch_compile not in (False, "none"):  # graphs are captured, not compiled
        changed |= {"torch_compile_backend": "aot_eager", "torch_compile_mode": None}
    return changed


def _data(cfg: RunConfig, files: tuple[list[Path], list[Path]], length: int) -> dict[str, Any]:
    train, evals = ([str(file) for file in some] for some in files)
    # The rows have their standard names now.
    changed_source: dict[str, Any] = {"dataset_name": None, "dataset_config_name": None}
    changed_source |= {"max_repeats": None, "columns": {}}
    sources = [
        replace(s, files=file, **changed_source)
        for s, file in zip(cfg.data.sources, train, strict=False)
    ]
    split = cfg.data.eval_split
    changed: dict[str, Any] = {
        "train_files": [] if sources else train,
        "sources": sources,
        "dataset_name": None,
        "dataset_config_name": None,
        "eval_files": evals,
        "eval_sources": [],
        "columns": {},
        "eval_split": max(split, 0.1) if split else 0.0,
        "max_eval_samples": min(cfg.data.max_eval_samples or 8, 8),
        "num_workers": min(cfg.data.num_workers, 1),
    }
    if isinstance(cfg, FinetuneConfig) and length < cfg.data.sequence_length:
        changed["too_long"] = "truncate"
    return changed


def _optim(asked: OptimConfig) -> dict[str, Any]:
    """Return the schedule's own numbers of steps, cut to a run of `LAST`."""
    given = {"warmup_steps": asked.warmup_steps, **asked.lr_scheduler_kwargs}
    for name, value in given.items():
        if name.endswith("_steps") and isinstance(value, int):
            given[name] = min(value, _SCHEDULED)
    return {"warmup_steps": given.pop("warmup_steps"), "lr_scheduler_kwargs": given}


def _train(cfg: RunConfig) -> dict[str, Any]:
    asked: Any = cfg.train
    changed: dict[str, Any] = {
        "max_steps": LAST,
        "per_device_train_batch_size": min(asked.micro_batch, _ROWS),
        "per_device_eval_batch_size": _ROWS,
        "gradient_accumulation_steps": min(asked.gradient_accumulation_steps, _REPEATS),
        "global_batch_size": None,
        "logging_steps": 1,
        "profile_steps": [LAST - 1, LAST] if asked.profile_steps else [],
        "eval_steps": EVERY if asked.eval_steps else None,
    }
    if isinstance(cfg, FinetuneConfig):
        patience = asked.early_stopping_patience
        changed["early_stopping_patience"] = patience and max(patience, LAST)
    return changed


def _checkpoint(asked: CheckpointConfig) -> dict[str, Any]:
    exports = EVERY if asked.export_steps else None
    return {"save_steps": EVERY, "root": None, "export_at_end": False, "export_steps": exports}


def _matching(cfg: Any, model: nn.Module) -> Any:
    """Return the config without patterns that name what the small model does not have."""
    for section, name in (
        ("model", "frozen_parameters"),
        ("sharding", "ignored_parameters"),
        ("sharding", "layer_classes"),
        ("sharding", "param_dtype_overrides"),
        ("sharding", "reshard_after_forward_overrides"),
    ):
        find = matching_parameters if name.endswith("parameters") else matching_modules
        value = getattr(getattr(cfg, section), name)
        kept: list[str] = []
        for pattern in value:
            with contextlib.suppress(ModelError):  # it names nothing in the small model
                find(model, [pattern], name)
                kept.append(pattern)
        new = kept if isinstance(value, list) else {pattern: value[pattern] for pattern in kept}
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: new})})
    return cfg


def notes_on(cfg: RunConfig) -> list[str]:
    """Return what a run of `cfg` will do that may not be meant."""
    steps, notes = cfg.train.max_steps, list[str]()
    if isinstance(cfg, FinetuneConfig) and cfg.lora.from_ is not None:
        notes.append("lora.from: the small model continues an adapter like it, of random values")
    every, evals, warmup = cfg.checkpoint.save_steps, cfg.train.eval_steps, cfg.optim.warmup_steps
    if steps < 1:
        return notes
    if every >= steps:
        what = f"checkpoint.save_steps {every} of train.max_steps {steps}: the one checkpoint is"
        notes.append(f"{what} made at the end, and a run that is killed begins anew")
    if evals is not None and evals > steps:
        notes.append(f"train.eval_steps {evals} of train.max_steps {steps}: only at the end")
    if warmup >= 1 and warmup >= steps:
        notes.append(f"optim.warmup_steps {warmup} of train.max_steps {steps}: below its peak")
    return notes
