"""The start of a run: its first lines, `starts.jsonl`, the profiler, trackers and metrics."""

import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import ranks
from toolkit.adapters.coverage import coverage_lines
from toolkit.config import flatten_settings
from toolkit.config.published import select_publishable_settings
from toolkit.config.settings import RunConfig
from toolkit.data.prepare import TrainingData
from toolkit.errors import TrainingError
from toolkit.formats.metrics_file import (
    STARTS,
    append_lines,
    drop_lines_after,
    read_metrics,
    read_versions,
)
from toolkit.models import causal_lm as models
from toolkit.models import quantise
from toolkit.models.experts import describe_experts
from toolkit.models.layers import format_frozen_towers
from toolkit.models.packed_linear import count_values, packed_weights
from toolkit.models.peft_model import base_of, has_adapters
from toolkit.sharding.fsdp import Sharded
from toolkit.sharding.unit_table import format_dtype_ledger, format_unit_table
from toolkit.training.flops import flops_per_token
from toolkit.training.guards import preemption
from toolkit.training.guards.run_guards import build_guards
from toolkit.training.launch import Run
from toolkit.training.metrics import Metrics
from toolkit.training.optim import describe_state_dtypes
from toolkit.training.profiler import FOLDER, StepProfiler, record_memory_history
from toolkit.training.router import build_router
from toolkit.training.token_rows import describe_untrained_tokens
from toolkit.training.trackers import Trackers
from toolkit.training.train_state import TrainState


def start_metrics(
    cfg: RunConfig, run: Run, folder: Path, sharded: Sharded, data: TrainingData, state: TrainState
) -> Metrics:
    """Log the first lines of a run, build its `Metrics`, and enter the training loop. Collective.

    Also records the start in `starts.jsonl`, and starts trackers and profiler. From here on,
    signals only take effect in `preemption.stop_requested`.

    Args:
        cfg: the config of the run.
        run: the processes.
        folder: the run's folder.
        sharded: the sharded model.
        data: the prepared data.
        state: the state from which the run starts.

    Returns:
        The metrics, whose method `step` the loop calls after each step.
    """
    model, auto_line = sharded.model, sharded.auto_line
    router = build_router(sharded, cfg)
    total = count_values(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = "" if trained == total else f"; {trained / 1e6:,.2f} M are trained"
    is_base_replicated = not packed_weights(model).keys().isdisjoint(sharded.plan.replicated)
    dtypes = format_dtype_ledger(
        sharded, cfg.sharding, describe_state_dtypes(state.required_optimizer)
    )
    opening = [
        f"model      {models.model_class_name(base_of(model))}, {total / 1e6:,.1f} M parameters"
        + share,
        format_frozen_towers(model),
        describe_experts(model, cfg.model.experts_implementation, cfg.sharding.expert_parallel),
        *(coverage_lines(model) if has_adapters(model) else []),
        quantise.describe_quantisation(model, 1 if is_base_replicated else sharded.mesh.shards),
        *format_unit_table(sharded, cfg.sharding).splitlines(),
        sharded.mlp_line,
        f"dtypes     {dtypes}",
        auto_line and f"auto       {auto_line}",
        None if router is None else router.plan.line,
        *data.lines(),
    ]
    run.log(*opening, *describe_untrained_tokens(model, data.feed, data.tokenizer))
    compiles = cfg.sharding.torch_compile not in (False, "none", "auto")
    if compiles or "torch_compile layer" in auto_line:
        run.log("compiling  in the first step, which takes up to some minutes")
    supervision: str = ranks.on_main(data.report) if state.step == 0 else ""
    run.log(supervision)
    if state.step >= data.max_steps:
        run.log(f"nothing to do: {state.step} steps are done, the run has {data.max_steps}")
    else:
        _record_start(cfg, run, folder, state.step, data, opening, supervision)
    position = data.position
    flops = flops_per_token(model, cfg.data.sequence_length)
    if data.row_format.compares_rows:
        # About half of the tokens belong to answers that are compared with, without a gradient.
        flops = (flops + flops_per_token(model, cfg.data.sequence_length, forward_only=True)) / 2
    metrics = Metrics(
        folder,
        device=run.device,
        first_step=state.step,
        max_steps=data.max_steps,
        tokens_before=state.tokens,
        tokens_per_step=data.tokens_per_step,
        flops_per_token=flops,
        logging_steps=cfg.train.logging_steps,
        epochs_per_step=position.n_samples and position.global_batch / position.n_samples,
        trackers=_start_trackers(
            cfg, run, folder, data, state, {"dtypes": dtypes, "parameters": total}
        ),
        guards=build_guards(
            cfg, data, state, () if router is None else router.plan.biases.values()
        ),
        router=router,
        **_start_profiler(cfg, run, folder, state.step, data.max_steps),
    )
    run.at_end.callback(metrics.close_bar)
    preemption.enter_loop()
    return metrics


def _record_start(
    cfg: RunConfig,
    run: Run,
    folder: Path,
    step: int,
    data: TrainingData,
    opening: Sequence[str | None],
    supervision: str,
) -> None:
    """Append a record of this start to `starts.jsonl` on rank 0. Collective.

    Records of starts that began after `step` are dropped.

    Args:
        cfg: the config of the run.
        run: the processes.
        folder: the run's folder.
        step: number of steps that are done.
        data: the prepared data.
        opening: the first lines of the log.
        supervision: the report on supervised tokens.

    Raises:
        TrainingError: the file cannot be written.
    """
    settings = dataclasses.asdict(cfg)
    settings["train"]["gradient_accumulation_steps"] = data.accumulation
    on_gpu = run.device.type == "cuda"
    line: dict[str, Any] = {
        "step": step,
        "max_steps": data.max_steps,
        "time": time.time(),
        "hosts": sorted(set(ranks.gather_to_main(platform.node()))),
        "world_size": run.world_size,
        "device": torch.cuda.get_device_name(run.device) if on_gpu else run.device.type,
        "versions": read_versions(),
        "opening": [text for text in opening if text],
        "supervision": supervision,
    }

    def write() -> None:
        line["run"] = select_publishable_settings(settings, folder)
        try:
            drop_lines_after(folder / STARTS, step)
            append_lines(folder / STARTS, [line])
        except OSError as error:
            raise TrainingError(f"{folder / STARTS} cannot be written: {error.strerror}") from error

    ranks.on_main(write)


def _start_profiler(
    cfg: RunConfig, run: Run, folder: Path, first_step: int, max_steps: int
) -> dict[str, Any]:
    """Start the profiler if `train.profile_steps` ends within the steps of this start.

    On CUDA, allocations are recorded, too. If the setting is used, but its last step is not among
    those of this start, a warning is logged.

    Args:
        cfg: the config of the run.
        run: the processes.
        folder: the run's folder.
        first_step: number of steps that are done.
        max_steps: number of the last step.

    Returns:
        Keyword arguments for `Metrics`: `profiler` and, on CUDA, `snapshot`. Empty without a
        profiler.
    """
    arguments: dict[str, Any] = {}
    train, folder = cfg.train, folder / FOLDER
    if train.profile_steps and first_step < train.profile_steps[1] <= max_steps:
        first, last = train.profile_steps
        arguments["profiler"] = StepProfiler(folder, run.device, first, last, done_steps=first_step)
        if run.device.type == "cuda":
            arguments["snapshot"] = folder / f"memory-rank-{run.rank}.pickle"
            run.at_end.enter_context(record_memory_history(arguments["snapshot"]))
    elif train.profile_steps:
        steps = f"{first_step + 1} to {max_steps}"
        run.log(f"WARNING: train.profile_steps {train.profile_steps}: not within steps {steps}")
    return arguments


def _start_trackers(
    cfg: RunConfig,
    run: Run,
    folder: Path,
    data: TrainingData,
    state: TrainState,
    properties: dict[str, Any],
) -> Trackers | None:
    """Start the trackers of `metrics.report_to`, and send them the settings. Collective.

    They are closed when `run` ends.

    Args:
        cfg: the config of the run.
        run: the processes.
        folder: the run's folder.
        data: the prepared data.
        state: the state from which the run starts.
        properties: further values to send, such as the number of parameters.

    Returns:
        The trackers; None if none are configured or no steps are left.

    Raises:
        TrainingError: a tracker does not start.
    """
    if not cfg.metrics.trackers() or state.step >= data.max_steps:
        return None
    settings = {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in flatten_settings(cfg).items()
    } | {
        **properties,
        "world_size": run.world_size,
        "global_batch": data.position.global_batch,
    }
    logged_steps = ranks.on_main(lambda: [line["step"] for line in read_metrics(folder)])
    last = max(logged_steps, default=0)
    trackers = Trackers(cfg.metrics, folder, settings, first_step=state.step, last_logged=last)
    return run.at_end.enter_context(trackers)
