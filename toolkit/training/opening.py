"""What a run prints when it starts, and the metrics it goes on with."""

from pathlib import Path
from typing import Any

from torch import nn

from toolkit import ranks
from toolkit.adapters.coverage import coverage_lines
from toolkit.config.settings import FinetuneConfig, PretrainConfig
from toolkit.data.prepare import TrainingData
from toolkit.models import causal_lm as models
from toolkit.models import quantise
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of, has_adapters
from toolkit.sharding.fsdp import mesh_shape
from toolkit.sharding.unit_table import ledger_line, unit_table
from toolkit.training.launch import Run
from toolkit.training.metrics import Metrics
from toolkit.training.model_flops import training_flops


def begin(
    cfg: PretrainConfig | FinetuneConfig,
    run: Run,
    folder: Path,
    model: nn.Module,
    data: TrainingData,
    state: Any,
) -> Metrics:
    """Print the lines that a run opens with; return its metrics, which go on where `state` is.
    Collective.

    Args:
        folder: the run directory.
        state: a `checkpoint.TrainState`: the steps that earlier starts have done, their tokens.
    """
    total = count_values(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = "" if trained == total else f"; {trained / 1e6:,.2f} M are trained"
    shards = mesh_shape(run.world_size, cfg.sharding)[1]
    run.say(
        f"model      {models.plain_name(base_of(model))}, {total / 1e6:,.1f} M parameters{share}",
        *(coverage_lines(model) if has_adapters(model) else []),
        quantise.describe(model, shards),
        *unit_table(model, cfg.sharding).splitlines(),
        f"dtypes     {ledger_line(model, cfg.sharding)}",
        *data.lines(),
    )
    if state.step == 0:
        run.say(ranks.on_main(data.report))
    if state.step >= data.max_steps:
        run.say(f"nothing to do: {state.step} steps are done, the run has {data.max_steps}")
    return Metrics(
        folder,
        device=run.device,
        first_step=state.step,
        max_steps=data.max_steps,
        tokens=state.tokens,
        tokens_per_step=data.tokens_per_step,
        flops_per_token=training_flops(model, cfg.data.sequence_length),
        logging_steps=cfg.train.logging_steps,
        disable_tqdm=cfg.metrics.disable_tqdm,
    )
