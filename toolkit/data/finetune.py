"""What a fine-tuning run learns from: sources read, rendered and encoded, and how they are packed.

Owns the order of these steps, for the recipe and for `toolkit inspect --data`, which must show what
the recipe does. Knows neither the loop nor how any of them works.
"""

from dataclasses import asdict, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import FinetuneConfig, ModelConfig, model_settings
from toolkit.data.chat.conversations import chat_templates
from toolkit.data.feed.map_style import Feed
from toolkit.data.feed.sets import Packing, Reader, Shape
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.report import check_supervised
from toolkit.data.sources.rows import Source, load_sources
from toolkit.data.tokens.encode import Encoded, RowEncoder, encode
from toolkit.data.tokens.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    own_tokenizer,
    pad_id,
)
from toolkit.data.training_data import EncodedData, TrainingData, check_data, choose_packing
from toolkit.errors import DataError
from toolkit.formats.hf_folder import assets_of
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
    cfg: FinetuneConfig, model: PreTrainedModel, model_cfg: ModelConfig, run: Reader
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
    rows = cfg.train.per_device_train_batch_size
    tokenizer = ranks.on_all(lambda: load_supervised_tokenizer(cfg, model_cfg, model))
    packing = ranks.on_main(lambda: choose_packing(cfg.data, model, rows, run.device.type))
    vocabulary = models.vocabulary_size(model)
    encoded = ranks.main_first(
        lambda: encode_sources(cfg, tokenizer, vocabulary, packing.packing, run.world_size)
    )
    data = TrainingData(cfg, encoded, packing, tokenizer, run)
    check_data(data)
    return data


def encode_sources(
    cfg: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    packing: Packing,
    world_size: int,
) -> EncodedData:
    """Read and encode the data; return what the run reads from.

    Encodes every row on all cores, cached on disk: call it on one rank first.

    Raises:
        DataError: see `data.rows.load_sources`, `data.encode.encode` and `Feed`; or nothing of a
            source would be learned.
    """
    data, train = cfg.data, cfg.train
    sources = load_sources(data, what="train", builtin="instructions")
    # Read before the training data is encoded, which may take an hour.
    others = load_sources(data, what="eval")
    formats, eval_formats = (
        {source.name: str(source.layout) for source in some} for some in (sources, others)
    )
    held_out = [_encoded(source, cfg, tokenizer, vocabulary) for source in others]
    settings: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch": train.per_device_train_batch_size
        * train.gradient_accumulation_steps
        * world_size,
        "eval_sources": held_out,
        "max_eval_samples": data.max_eval_samples,
    }
    shape = Shape(packing, data.sequence_length, pad_id(tokenizer))
    if data.streaming:
        streams = [
            StreamSource(
                source.name,
                source.rows,
                RowEncoder(source, tokenizer, data, vocabulary),
                source.weight,
                source.max_repeats,
            )
            for source in sources
        ]
        streamed = StreamFeed(streams, shape, **settings)
        return EncodedData(streamed, [], held_out, formats, eval_formats)
    encoded = [_encoded(source, cfg, tokenizer, vocabulary) for source in sources]
    feed = Feed(encoded, shape, eval_split=data.eval_split, **settings)
    return EncodedData(feed, encoded, held_out, formats, eval_formats)


def _encoded(
    source: Source,
    cfg: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
) -> Encoded:
    encoded = encode(source, tokenizer, cfg.data, vocabulary)
    check_supervised(encoded, cfg.data.sequence_length)
    return encoded


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
