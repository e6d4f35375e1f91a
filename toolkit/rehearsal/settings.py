"""The config of a run, changed so that this machine's CPU can rehearse it."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.config import CheckpointConfig, ShardingConfig
from toolkit.config.settings import FinetuneConfig, ModelConfig, OptimConfig, RunConfig
from toolkit.errors import ModelError
from toolkit.models.expert_parallel import find_divisible_experts
from toolkit.models.patterns import matching_modules, matching_parameters
from toolkit.rehearsal.shrunk import Shrunk

SAVE_STEPS = 4
"""Steps of the rehearsal from one checkpoint to the next."""
LAST_STEP = 12
_STEP_FLOPS = 1e10  # of a step on one process
_MIN_TOKENS = 64  # of a sample
_MAX_MICRO_BATCH = 2
_MAX_ACCUMULATION = 2
_SCHEDULE_STEPS = 2  # of warm-up, or of decay
_GPU_ATTENTION = ("flash", "paged", "/")  # parts of the names of attention kernels


def settings_for_cpu(cfg: Any) -> Any:
    """Return a config without GPU kernels and without `auto`, for a run on a CPU.

    `auto` becomes a micro-batch of 1, full activation checkpointing, and no compilation.
    """
    models = {"model": cfg.model, **cfg.frozen_models}
    models = {role: _without_gpu_kernels(model) for role, model in models.items()}
    train = cfg.train
    if train.per_device_train_batch_size == "auto":
        train = replace(train, per_device_train_batch_size=1)
    sharding = cfg.sharding
    if sharding.activation_checkpointing == "auto":
        sharding = replace(sharding, activation_checkpointing="full")
    if sharding.torch_compile == "auto":
        sharding = replace(sharding, torch_compile="none")
    return replace(cfg, train=train, sharding=sharding, **models)


def _without_gpu_kernels(model: ModelConfig) -> ModelConfig:
    """Return a model's settings without custom kernels, float8 and attention kernels for GPUs.

    `attn_implementation` becomes None if it needs a GPU, so that transformers chooses a kernel.
    """
    kernel = model.attn_implementation or ""
    needs_gpu = any(part in kernel for part in _GPU_ATTENTION)
    attention = None if needs_gpu else kernel or None
    return replace(model, kernels="none", float8="none", attn_implementation=attention)


def plan_other_ranks(train: Any, world_size: int, parts: int = 1) -> tuple[int, int] | None:
    """Choose another number of ranks, and a micro-batch, that keep the global batch.

    If `world_size` is 1, the number is 2. Otherwise it is the largest number, up to half of the
    ranks, that divides the samples of a step.

    Args:
        train: the section `train` of the config.
        world_size: the present number of ranks.
        parts: number of ranks that now share each row; the other ranks read different rows.

    Returns:
        (ranks, micro-batch); None if `world_size` is 1 and a step has an odd number of samples.
    """
    samples = train.micro_batch * train.gradient_accumulation_steps * world_size // parts
    candidates = [2] if world_size == 1 else range(world_size // 2, 0, -1)
    ranks = next((number for number in candidates if samples % number == 0), None)
    if ranks is None:
        return None
    return ranks, math.gcd(samples // ranks, train.micro_batch)


def affordable_length(cfg: RunConfig, shrunk: Shrunk) -> int:
    """Compute the sequence length in tokens, at least 64, at which a small model's step is quick.

    The result is at most the run's own sequence length, unless that is below 64.

    Args:
        cfg: the result of `settings_for_cpu`.
        shrunk: the small model.
    """
    rows = min(cfg.train.micro_batch, _MAX_MICRO_BATCH)
    accumulation = min(cfg.train.gradient_accumulation_steps, _MAX_ACCUMULATION)
    tokens = _STEP_FLOPS / (6 * shrunk.parameters) / (rows * accumulation)
    return max(_MIN_TOKENS, min(cfg.data.sequence_length, int(tokens)))


def rehearsal_config(
    cfg: RunConfig,
    shrunk: Shrunk,
    model: nn.Module,
    world_size: int,
    length: int,
    files: tuple[list[Path], list[Path]],
    output: Path,
) -> RunConfig:
    """Build the config of the small run from that of the real run.

    Args:
        cfg: the config of the real run.
        shrunk: describes the folder and the dtype of the small model.
        model: the small model, on meta.
        world_size: the number of processes of the rehearsal.
        length: tokens of a sample.
        files: (training files, evaluation files), one file for each source.
        output: output_dir of the small run.
    """
    small: Any = settings_for_cpu(cfg)
    mesh = _choose_mesh(cfg.sharding, world_size)
    sharding = {
        **mesh,
        "context_parallel": _choose_context(cfg.sharding, world_size, model),
        "expert_parallel": _choose_expert_ranks(cfg.sharding, world_size, mesh, model),
        **_sharding_changes(small.sharding, shrunk),
    }
    small = replace(
        small,
        model=replace(small.model, name_or_path=str(shrunk.folder), revision=None),
        sharding=replace(small.sharding, **sharding),
        data=replace(small.data, sequence_length=length, **_data_changes(cfg, files, length)),
        train=replace(small.train, **_train_changes(small)),
        optim=replace(small.optim, **_optim_changes(cfg.optim)),
        checkpoint=replace(small.checkpoint, **_checkpoint_changes(cfg.checkpoint)),
        metrics=replace(small.metrics, report_to="none"),
        hub=type(small.hub)(),
        output_dir=str(output),
    )
    return _drop_unmatched_patterns(small, model)


def list_not_rehearsed(cfg: ShardingConfig, processes: int, world_size: int) -> list[str]:
    """List what a rehearsal does not cover and no setting shows, such as NCCL, as sentences.

    Args:
        cfg: the sharding settings of the run.
        processes: the number of processes of the run.
        world_size: the number of processes of the rehearsal.
    """
    entries = [
        "GPU kernels, NCCL, what `auto` chooses on GPUs",
        "the real model's memory and speed, which `toolkit plan CONFIG` estimates",
    ]
    if processes != world_size:
        entries.append(
            f"{processes} processes: {world_size} here (the stage sharding set up the mesh of "
            f"{processes})"
        )
    if cfg.cpu_offload or cfg.activation_offload:
        entries.append("copies between device and host: on a CPU they are one memory")
    return entries


def _choose_context(cfg: ShardingConfig, world_size: int, model: Any) -> int:
    """Choose how many ranks share each row in the rehearsal: at most as many as in the run.

    They must divide its processes and the attention heads of the small model.
    """
    if cfg.context_parallel == 1:
        return 1
    heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
    return math.gcd(cfg.context_parallel, world_size, heads if isinstance(heads, int) else 1)


def _choose_expert_ranks(
    cfg: ShardingConfig, world_size: int, mesh: dict[str, int], model: nn.Module
) -> int:
    """Choose how many ranks divide experts in the rehearsal: at most as many as in the run.

    They must divide the ranks of a copy, and the experts of the small model.

    Args:
        cfg: the sharding settings of the run.
        world_size: the number of processes of the rehearsal.
        mesh: result of `_choose_mesh`.
        model: the small model.
    """
    if cfg.expert_parallel == 1:
        return 1
    shards = 1 if mesh["dp_shard"] == 1 else world_size // mesh["dp_replicate"]
    modules: Any = find_divisible_experts(model).values()
    return math.gcd(cfg.expert_parallel, shards, *(module.num_experts for module in modules))


def _choose_mesh(cfg: ShardingConfig, world_size: int) -> dict[str, Any]:
    """Choose `dp_replicate` and `dp_shard` of the rehearsal, so that the mesh resembles the run's.

    If the run only replicates, so does the rehearsal. If the run replicates and shards, the
    rehearsal does so if 4 divides `world_size`. Otherwise it only shards.

    Returns:
        Name of a setting -> its value, which may be -1.
    """
    if cfg.dp_shard == 1:
        return {"dp_replicate": -1, "dp_shard": 1}
    if cfg.dp_replicate > 1 and world_size % 4 == 0:
        return {"dp_replicate": 2, "dp_shard": -1}
    return {"dp_replicate": 1, "dp_shard": -1}


def _sharding_changes(cfg: ShardingConfig, shrunk: Shrunk) -> dict[str, Any]:
    """Return changes of the section `sharding` for a CPU and another number of ranks.

    Numbers of ranks in `reshard_after_forward` and its overrides become booleans. The dtype becomes
    that of the small model. If layers are compiled, the backend only captures their graphs.

    Returns:
        Name of a setting -> its new value.
    """
    overrides = cfg.reshard_after_forward_overrides.items()
    changes: dict[str, Any] = {
        "param_dtype": shrunk.dtype,
        "reshard_after_forward_overrides": {name: bool(v) for name, v in overrides},
    }
    if isinstance(cfg.reshard_after_forward, int):
        changes["reshard_after_forward"] = bool(cfg.reshard_after_forward)
    if cfg.torch_compile not in (False, "none"):
        # Captures the graphs without compiling them.
        changes |= {"torch_compile_backend": "aot_eager", "torch_compile_mode": None}
    return changes


def _data_changes(
    cfg: RunConfig, files: tuple[list[Path], list[Path]], length: int
) -> dict[str, Any]:
    """Return changes of the section `data`: the rehearsal's files replace the sources.

    Args:
        cfg: the config of the real run.
        files: (training files, evaluation files), one file for each source.
        length: tokens of a sample in the rehearsal.

    Returns:
        Name of a setting -> its new value.
    """
    train_files, eval_files = ([str(file) for file in purpose_files] for purpose_files in files)
    # The rows were written under their standard column names.
    source_changes: dict[str, Any] = {"dataset_name": None, "dataset_config_name": None}
    source_changes |= {"max_repeats": None, "columns": {}}
    sources = [
        replace(source, files=file, **source_changes)
        for source, file in zip(cfg.data.sources, train_files, strict=False)
    ]
    split = cfg.data.eval_split
    changes: dict[str, Any] = {
        "train_files": [] if sources else train_files,
        "sources": sources,
        "dataset_name": None,
        "dataset_config_name": None,
        "eval_files": eval_files,
        "eval_sources": [],
        "columns": {},
        "eval_split": max(split, 0.1) if split else 0.0,
        "max_eval_samples": min(cfg.data.max_eval_samples or 8, 8),
        "num_workers": min(cfg.data.num_workers, 1),
    }
    if isinstance(cfg, FinetuneConfig) and length < cfg.data.sequence_length:
        changes["too_long"] = "truncate"
    return changes


def _optim_changes(cfg: OptimConfig) -> dict[str, Any]:
    """Return changes of the section `optim`: integer numbers of steps become at most 2."""
    schedule = {"warmup_steps": cfg.warmup_steps, **cfg.lr_scheduler_kwargs}
    for name, value in schedule.items():
        if name.endswith("_steps") and isinstance(value, int):
            schedule[name] = min(value, _SCHEDULE_STEPS)
    return {"warmup_steps": schedule.pop("warmup_steps"), "lr_scheduler_kwargs": schedule}


def _train_changes(cfg: RunConfig) -> dict[str, Any]:
    """Return changes of the section `train`: fewer steps, and smaller batches."""
    train: Any = cfg.train
    changes: dict[str, Any] = {
        "max_steps": LAST_STEP,
        "per_device_train_batch_size": min(train.micro_batch, _MAX_MICRO_BATCH),
        "per_device_eval_batch_size": _MAX_MICRO_BATCH,
        "gradient_accumulation_steps": min(train.gradient_accumulation_steps, _MAX_ACCUMULATION),
        "global_batch_size": None,
        "logging_steps": 1,
        "profile_steps": [LAST_STEP - 1, LAST_STEP] if train.profile_steps else [],
        "eval_steps": SAVE_STEPS if train.eval_steps else None,
    }
    if isinstance(cfg, FinetuneConfig):
        patience = train.early_stopping_patience
        changes["early_stopping_patience"] = patience and max(patience, LAST_STEP)
    return changes


def _checkpoint_changes(cfg: CheckpointConfig) -> dict[str, Any]:
    """Return changes of the section `checkpoint`: frequent saves, only in the local run folder."""
    return {
        "save_steps": SAVE_STEPS,
        "root": None,
        "export_at_end": False,
        "after_export": None,
        "export_steps": SAVE_STEPS if cfg.export_steps else None,
    }


def _drop_unmatched_patterns(cfg: Any, model: nn.Module) -> Any:
    """Return a config without those name patterns that match nothing in the small model."""
    for section, name in (
        ("model", "frozen_parameters"),
        ("sharding", "ignored_parameters"),
        ("sharding", "layer_classes"),
        ("sharding", "param_dtype_overrides"),
        ("sharding", "reshard_after_forward_overrides"),
    ):
        match = matching_parameters if name.endswith("parameters") else matching_modules
        patterns = getattr(getattr(cfg, section), name)
        matched: list[str] = []
        for pattern in patterns:
            with contextlib.suppress(ModelError):
                match(model, [pattern], name)
                matched.append(pattern)
        is_list = isinstance(patterns, list)
        remaining = matched if is_list else {pattern: patterns[pattern] for pattern in matched}
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: remaining})})
    return cfg


def build_notes(cfg: RunConfig) -> list[str]:
    """List sentences about settings with an effect that the user may not intend; often empty."""
    notes = list[str]()
    if isinstance(cfg, FinetuneConfig) and cfg.lora.from_ is not None:
        notes.append(
            "lora.from: the small model continues an adapter of the same kind with random values"
        )
    if cfg.checkpoint.after_export is not None:
        notes.append("checkpoint.after_export: the command is not run in a rehearsal")
    steps = cfg.train.max_steps
    if steps < 1:
        return notes
    save_steps = cfg.checkpoint.save_steps
    if save_steps >= steps:
        notes.append(
            f"checkpoint.save_steps {save_steps} of train.max_steps {steps}: the only checkpoint "
            "is written at the end, and a run that is killed starts from scratch"
        )
    eval_steps = cfg.train.eval_steps
    if eval_steps is not None and eval_steps > steps:
        notes.append(
            f"train.eval_steps {eval_steps} of train.max_steps {steps}: evaluates only at the end"
        )
    warmup = cfg.optim.warmup_steps
    if warmup >= 1 and warmup >= steps:
        notes.append(
            f"optim.warmup_steps {warmup} of train.max_steps {steps}: the learning rate never "
            "reaches its peak"
        )
    return notes
