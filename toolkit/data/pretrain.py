"""What a pretraining run reads: documents of every source, tokenised, and cut or packed."""

import dataclasses

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import DataConfig, ModelConfig, PretrainConfig
from toolkit.data.feed.map_style import Feed
from toolkit.data.feed.sets import Packing, Reader, Shape, Source
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.sources.files import configured
from toolkit.data.sources.rows import load_sources
from toolkit.data.sources.text import load_documents, load_source
from toolkit.data.tokens.documents import DocumentEncoder
from toolkit.data.tokens.tokenise import tokenise
from toolkit.data.tokens.tokenizer import check_vocabulary, load_tokenizer, pad_id
from toolkit.data.training_data import (
    AnyFeed,
    EncodedData,
    TrainingData,
    check_data,
    choose_packing,
)
from toolkit.models import causal_lm as models


def prepare(
    cfg: PretrainConfig, model: PreTrainedModel, model_cfg: ModelConfig, run: Reader
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
    rows = cfg.train.per_device_train_batch_size
    tokenizer = ranks.on_all(lambda: load_tokenizer(model_cfg))
    packing = ranks.on_main(lambda: choose_packing(cfg.data, model, rows, run.device.type))
    vocabulary = models.vocabulary_size(model)
    feed = ranks.main_first(
        lambda: make_feed(cfg, tokenizer, vocabulary, packing.packing, run.world_size)
    )
    data = TrainingData(cfg, EncodedData(feed), packing, tokenizer, run)
    check_data(data)
    return data


def make_feed(
    cfg: PretrainConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    packing: Packing,
    world_size: int,
) -> AnyFeed:
    """Return what the run reads from. Tokenises on all cores, cached: call it on one rank first.

    Raises:
        DataError: see `data.text.load_source`, `data.tokenise.tokenise` and `Feed`.
    """
    data, train = cfg.data, cfg.train
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocabulary, resize=cfg.model.resize_embeddings)
    shape = Shape(packing, data.sequence_length, pad_id(tokenizer))
    batch = train.per_device_train_batch_size * train.gradient_accumulation_steps * world_size

    def tokens(sources: list[Source]) -> list[Source]:
        return [
            dataclasses.replace(s, tokens=tokenise(s.tokens, tokenizer, data, vocabulary))
            for s in sources
        ]

    # All are read before the first is tokenised, which may take an hour.
    documents = [] if data.streaming else _documents(data)
    held_out = [
        Source(str(said.name), load_source(said, data, what=setting))
        for setting, said in configured(data, "eval")
    ]
    if data.streaming:
        return StreamFeed(
            _streams(data, tokenizer, vocabulary),
            shape,
            seed=cfg.seed,
            global_batch=batch,
            eval_sources=tokens(held_out),
            max_eval_samples=data.max_eval_samples,
        )
    return Feed(
        tokens(documents),
        shape,
        seed=cfg.seed,
        global_batch=batch,
        eval_sources=tokens(held_out),
        eval_split=data.eval_split,
        max_eval_samples=data.max_eval_samples,
    )


def _documents(data: DataConfig) -> list[Source]:
    """Return the documents to train on as text or ids, by source; the built-in text where none is
    named.
    """
    named = configured(data)
    if not named:
        return [Source("stdlib", load_documents(data, []))]
    return [
        Source(str(said.name), load_source(said, data, what=setting), said.weight, said.max_repeats)
        for setting, said in named
    ]


def _streams(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int
) -> list[StreamSource]:
    return [
        StreamSource(
            source.name,
            source.rows,
            DocumentEncoder(source, tokenizer, data, vocabulary),
            source.weight,
            source.max_repeats,
        )
        for source in load_sources(data, builtin="text", documents=True)
    ]
