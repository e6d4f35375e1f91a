"""What a fine-tuning run learns from: examples of every source, rendered, encoded and packed."""

from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import FinetuneConfig, ModelConfig, model_settings
from toolkit.data.chat import chat_templates
from toolkit.data.feed.sets import Processes
from toolkit.data.tokens.tokenizer import check_vocabulary, load_tokenizer, own_tokenizer
from toolkit.data.training_data import (
    TrainingData,
    choose_packing,
    encode_sources,
    prepare_data,
)
from toolkit.errors import DataError
from toolkit.formats import assets_of
from toolkit.models import causal_lm as models


def load_supervised_tokenizer(
    cfg: FinetuneConfig, model_cfg: ModelConfig, model: PreTrainedModel
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, with `data.chat_template` where it is set; None where there is none.

    The template becomes part of `model.hf_assets`, so that the export answers as it was trained.

    Raises:
        DataError: the tokenizer cannot be loaded, or does not fit the embedding.
    """
    tokenizer = load_tokenizer(model_cfg)
    if tokenizer is None:
        if cfg.train.eval_prompts:
            raise DataError(
                f"train.eval_prompts needs a tokenizer, and {cfg.model.name_or_path} comes with "
                "none; set model.tokenizer_name_or_path"
            )
        return None
    check_vocabulary(tokenizer, models.vocabulary_size(model), resize=model_cfg.resize_embeddings)
    if cfg.data.chat_template is not None:
        tokenizer.chat_template = chat_templates(tokenizer, cfg.data.chat_template)["default"]
        assets_of(model).files["chat_template.jinja"] = tokenizer.chat_template.encode()
    return tokenizer


def prepare(
    cfg: FinetuneConfig, model: PreTrainedModel, model_cfg: ModelConfig, run: Processes
) -> TrainingData:
    """Return what the run reads. Collective; encodes on all cores, once, cached.

    Args:
        cfg: of the run.
        model: on meta, before adapters and sharding.
        model_cfg: the model's settings with the tokenizer that `own_tokenizer` found.
        run: its processes.

    Raises:
        DataError: the tokenizer, a file, a row or the number of samples cannot be trained with,
            nothing of a source is learned, the model mixes packed examples, or ranks read different
            data.
        ConfigError: a setting needs evaluation data, and there is none.
    """
    tokenizer = ranks.on_all(lambda: load_supervised_tokenizer(cfg, model_cfg, model))
    return prepare_data(cfg, model, tokenizer, run)


def inspect_data(cfg: FinetuneConfig, samples: int = 3) -> dict[str, Any]:
    """Return the supervision report of a config, as a run of it would read the data; `packing` and
    `why` say how examples become samples. One process, no weights. Streams are read whole, after
    the checks that a run makes of them; nothing is split off them to evaluate on.

    Raises:
        ModelError, DataError: as the run itself would.
    """
    model_cfg = own_tokenizer(model_settings(cfg))
    model = models.build_on_meta(model_cfg)
    tokenizer = load_supervised_tokenizer(cfg, model_cfg, model)
    chosen = choose_packing(cfg.data, model, cfg.train.per_device_train_batch_size)
    vocabulary = models.vocabulary_size(model)
    prepared = encode_sources(cfg, tokenizer, vocabulary, chosen.packing, 1)
    if cfg.data.streaming:  # made, it is known that it can be; now what is in it
        whole = replace(cfg, data=replace(cfg.data, streaming=False, eval_split=0.0))
        prepared = encode_sources(whole, tokenizer, vocabulary, chosen.packing, 1)
    return prepared.report(tokenizer, samples) | asdict(chosen)
