"""What a pretraining run reads: documents of every source, learned whole, joined or packed."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import ModelConfig, PretrainConfig
from toolkit.data.feed.sets import Processes
from toolkit.data.tokens.tokenizer import check_vocabulary, load_tokenizer
from toolkit.data.training_data import TrainingData, prepare_data
from toolkit.models import causal_lm as models


def prepare(
    cfg: PretrainConfig, model: PreTrainedModel, model_cfg: ModelConfig, run: Processes
) -> TrainingData:
    """Return what the run reads. Collective; tokenises on all cores, once, cached.

    Args:
        cfg: of the run.
        model: on meta, before adapters and sharding.
        model_cfg: `cfg.model` with the tokenizer that `prepare_tokenizer` found.
        run: its processes.

    Raises:
        DataError: the tokenizer, a file, a row or the number of samples cannot be trained with, the
            model mixes packed documents, or ranks read different data.
        ConfigError: a setting needs evaluation data, and there is none.
    """

    def load() -> PreTrainedTokenizerBase | None:
        tokenizer, resize = load_tokenizer(model_cfg), cfg.model.resize_embeddings
        if tokenizer is not None:
            check_vocabulary(tokenizer, models.vocabulary_size(model), resize=resize)
        return tokenizer

    return prepare_data(cfg, model, ranks.on_all(load), run)
