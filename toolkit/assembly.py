"""Build the model of a run on meta, check it, and load its weights: the calls of the recipes."""

from torch import nn
from transformers import PreTrainedModel

from toolkit import export, loading, ranks
from toolkit.checkpoint.run_folder import RunFolder
from toolkit.config.settings import FinetuneConfig, ModelConfig, RunConfig
from toolkit.data.prepare import TrainingData
from toolkit.data.row_formats import find_row_format
from toolkit.data.tokens.tokenizer import prepare_tokenizer, use_model_tokenizer
from toolkit.objectives import Objective
from toolkit.sharding.fsdp import Sharded
from toolkit.start_checks import RunStart, run_checks
from toolkit.training.launch import Run


def build(cfg: RunConfig, run: Run, folder: RunFolder) -> tuple[PreTrainedModel, ModelConfig]:
    """Check the settings of a run, and build its model on meta without adapters. Collective.

    If the settings request it, this also trains the tokenizer, and creates the Hub repository in
    which the run will be published. Without a tokenizer to train, it takes seconds.

    Returns:
        (model on meta, its settings completed by the run's tokenizer).

    Raises:
        ToolkitError: the run would fail. The subclass is that of the failing check.
    """

    def add_tokenizer(model: ModelConfig) -> ModelConfig:
        """Complete the model's settings with the run's tokenizer, and train it if necessary."""
        if find_row_format(cfg.rows).is_documents:
            return prepare_tokenizer(model, cfg.data, folder.tokenizer, keep=folder.holds_work)
        return use_model_tokenizer(model)

    start = RunStart(cfg, run.world_size, run.device, cfg, add_tokenizer, log=run.log)
    run_checks(start, "build")
    return start.model, start.model_cfg


def check_before_loading(
    cfg: RunConfig, model: nn.Module, data: TrainingData, objective: Objective
) -> None:
    """Raise an error if a run would fail after its weights are read. Collective.

    Checks the packing of frozen models, the prompts of evaluations, the balancing of experts and
    the space on the disk; see `start_checks`. Logs the files that the run will write.

    Args:
        cfg: the settings of the run, with `auto` resolved.
        model: on meta, with its adapters, before sharding.
        data: the prepared data.
        objective: the run's objective; it may store files in each checkpoint.

    Raises:
        ToolkitError: the run would fail.
    """
    objective.check_packing(data)
    start = RunStart(
        cfg,
        ranks.world_size(),
        log=ranks.log_once,
        model=model,
        tokenizer=data.tokenizer,
        max_steps=None if data.max_steps == -1 else data.max_steps,
        file_bytes=objective.file_bytes(data),
    )
    run_checks(start, "load")


def load_weights(sharded: Sharded, cfg: RunConfig, run: Run, *, empty: bool) -> None:
    """Load the initial weights of a run into a sharded model, in place. Collective.

    They are the weights of the base model, or random ones. The adapter of `lora.from` is loaded,
    too.

    Args:
        sharded: the model, on meta.
        cfg: the settings of the run.
        run: the processes of the run.
        empty: only allocate memory, because a checkpoint will supply all values, including those of
            the adapter.

    Raises:
        ToolkitError: see `loading.load_or_init` and `export.load_adapter`.
    """
    loading.load_or_init(sharded, cfg.model, run.device, cfg.seed, empty=empty)
    if not empty and isinstance(cfg, FinetuneConfig) and cfg.lora.from_ is not None:
        run.log(*export.load_adapter(sharded.model, cfg))
