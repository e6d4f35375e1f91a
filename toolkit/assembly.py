"""Build the model of a run on meta, after every refusal that needs no weights.

Above the rooms that it asks; recipes build by it, and what is refused is refused here.
"""

from torch import nn
from transformers import PreTrainedModel

from toolkit import hub, loading, models, training
from toolkit.checkpoint.run_folder import RunFolder
from toolkit.config.settings import FinetuneConfig, ModelConfig, RunConfig, model_settings
from toolkit.data.prepare import TrainingData
from toolkit.data.tokens.tokenizer import own_tokenizer, prepare_tokenizer
from toolkit.training.launch import Run


def build(cfg: RunConfig, run: Run, folder: RunFolder) -> tuple[PreTrainedModel, ModelConfig]:
    """Return the model on meta (shapes, no bytes), without adapters, and its settings with the
    tokenizer of the run. Collective; seconds, and the training of a tokenizer where one is asked.

    Refuses what settings, config, headers of the weights and the Hub show: ConfigError, HubError,
    ModelError, LoadingError, DataError.
    """
    models.check_quantisation(cfg.adapters, cfg.sharding, cfg.model, run.device)
    hub.check(cfg.hub, run.say, adapted=cfg.model.name_or_path if cfg.adapters else None)
    training.check_optimizer(cfg.optim, cfg.train.max_steps)
    models.check_usable(cfg.model, cfg.data.sequence_length, run.device)
    if cfg.learns_documents:
        own = prepare_tokenizer(cfg.model, cfg.data, folder.tokenizer, keep=folder.holds_work)
    else:
        own = own_tokenizer(model_settings(cfg))
    model = models.prepare(own)
    loading.check_fits(model, cfg.model)
    return model, own


def check_before_loading(
    cfg: RunConfig, model: nn.Module, data: TrainingData, folder: RunFolder
) -> None:
    """Refuse what a run whose data is known would fail at after its weights are read: prompts that
    cannot be asked, a disk that is too small. Says what the run will write. Collective.
    """
    if isinstance(cfg, FinetuneConfig):
        training.check_prompts(model, data.tokenizer, cfg.train)
    folder.check_disk(model, data.max_steps)
