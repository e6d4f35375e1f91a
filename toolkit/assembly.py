"""Build the model of a run on meta, after every refusal that needs no weights.

Above the rooms that it asks; recipes build by it, and what is refused is refused here.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import export, hub, loading, models, ranks, training
from toolkit.adapters import add_adapters
from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.run_folder import RunFolder
from toolkit.config.lora import ALL_LINEAR, LoraConfig
from toolkit.config.settings import FinetuneConfig, ModelConfig, RunConfig, model_settings
from toolkit.data.prepare import TrainingData
from toolkit.data.tokens.tokenizer import own_tokenizer, prepare_tokenizer
from toolkit.errors import ConfigError
from toolkit.models.peft_model import adapted_modules
from toolkit.objectives import Objective
from toolkit.sharding.fsdp import Sharded
from toolkit.training.launch import Run
from toolkit.training.router import plan_router


def build(cfg: RunConfig, run: Run, folder: RunFolder) -> tuple[PreTrainedModel, ModelConfig]:
    """Return what `build_checked` does, after asking the Hub whether the end can be published
    (HubError) and this device whether it computes in 4 bits where that is asked; trains the
    tokenizer where that is asked. Collective.
    """
    models.check_quantisation(cfg.adapters, cfg.sharding, cfg.model, run.device)
    hub.check(cfg.hub, run.log, adapted=cfg.model.name_or_path if cfg.adapters else None)

    def with_tokenizer(model: ModelConfig) -> ModelConfig:
        if cfg.learned == "documents":
            return prepare_tokenizer(model, cfg.data, folder.tokenizer, keep=folder.holds_work)
        return own_tokenizer(model)

    built = build_checked(cfg, run.device, with_tokenizer)

    def check() -> str:
        return check_continued(cfg, built[0], resumes=bool(committed_steps(folder.root)))

    run.log(ranks.on_main(check))
    return built


def check_continued(cfg: RunConfig, base: PreTrainedModel, *, resumes: bool) -> str:
    """Refuse an adapter that a new run cannot continue (`lora.from`), before its data is prepared;
    return the log line. A run that resumes does not read it. One process. ConfigError.

    `base` is on meta, without adapters, and stays so.
    """
    if not isinstance(cfg, FinetuneConfig) or cfg.lora.from_ is None:
        return ""
    if ALL_LINEAR in cfg.lora.explicit:
        _refuse_other_targets(cfg.lora, base)
    if resumes:
        return f"adapter    that of the run's checkpoint, which continued {cfg.lora.from_}"
    return export.check_adapter(add_adapters(copy.deepcopy(base), cfg.lora), cfg)


def _refuse_other_targets(lora: LoraConfig, base: PreTrainedModel) -> None:
    """Refuse an adapter (`lora.from`) of other modules than `all-linear`, which the user names."""
    everywhere = replace(lora, from_=None, target_modules=ALL_LINEAR, exclude_modules=[])
    wanted, has = (
        adapted_modules(add_adapters(copy.deepcopy(base), settings)).keys()
        for settings in (everywhere, lora)
    )
    if differs := sorted(wanted ^ has):
        raise ConfigError(
            f"lora.target_modules is all-linear, and the adapter that lora.from names "
            f"({lora.from_}) adapts other modules: {differs[0]} is in one of them only; "
            "leave lora.target_modules out"
        )


def load_weights(sharded: Sharded, cfg: RunConfig, run: Run, *, empty: bool) -> None:
    """Give a sharded model the weights that a run starts from, in place. Collective.

    They are the base, or random weights, and the adapter of `lora.from`.

    Args:
        empty: allocate memory only, for the values of a checkpoint.

    Raises as `loading.load_or_init` and `export.load_adapter`.
    """
    loading.load_or_init(sharded, cfg.model, run.device, cfg.seed, empty=empty)
    if not empty and isinstance(cfg, FinetuneConfig) and cfg.lora.from_ is not None:
        run.log(*export.load_adapter(sharded.model, cfg))


def build_checked(
    cfg: RunConfig, device: torch.device | str, with_tokenizer: Callable[[ModelConfig], ModelConfig]
) -> tuple[PreTrainedModel, ModelConfig]:
    """Return the model on meta (shapes, no bytes), without adapters, and its settings with the
    tokenizer of the run. Collective; seconds. What a run builds, `toolkit train` asks for before it
    starts one, and a rehearsal looks at.

    Refuses what settings, config and the headers of the weights show: ConfigError, ModelError,
    LoadingError, DataError.
    """
    training.check_optimizer(cfg.optim, cfg.train.max_steps)
    models.check_usable(cfg.model, cfg.data.sequence_length, device)
    own = with_tokenizer(model_settings(cfg))
    model = models.prepare(own)
    loading.check_fits(model, cfg.model)
    return model, own


def check_before_loading(
    cfg: RunConfig, model: nn.Module, data: TrainingData, folder: RunFolder, objective: Objective
) -> None:
    """Refuse what a run whose data is known would fail at after its weights are read: prompts that
    cannot be asked, experts that cannot be balanced as asked, a disk that is too small. Says what
    the run will write. Collective.
    """
    plan_router(model, cfg)
    if isinstance(cfg, FinetuneConfig):
        training.check_prompts(model, data.tokenizer, cfg.train)
    folder.check_disk(model, data.max_steps, objective.file_bytes(data))
