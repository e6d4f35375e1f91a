"""What a fine-tuning run learns from: sources read, rendered and encoded, and how they are packed.

Owns the order of these steps, for the recipe and for `toolkit inspect --data`, which must show what
the recipe does. Knows neither the loop nor how any of them works.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.settings import FinetuneConfig, ModelConfig, model_settings
from toolkit.data.chat.conversations import chat_templates
from toolkit.data.feed.map_style import Feed
from toolkit.data.feed.sets import Packing, Shape
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.packing_choice import AnyFeed, choose_packing, pad_id
from toolkit.data.report import check_supervised, supervision_report
from toolkit.data.sources.rows import Source, load_sources
from toolkit.data.tokens.encode import Encoded, RowEncoder, encode
from toolkit.data.tokens.tokenizer import check_vocabulary, load_tokenizer, own_tokenizer
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


@dataclass(frozen=True)
class Prepared:
    """What a run reads from, and what it was made of."""

    feed: AnyFeed
    trained: list[Encoded]
    """The sources to train on, where they were encoded before the run: none of streams."""
    evaluated: list[Encoded]
    """The sources to evaluate on; they may have the names of others to train on."""
    formats: dict[str, str]
    """Source to train on -> its format in words."""
    eval_formats: dict[str, str]
    """Source to evaluate on -> its format in words."""

    @property
    def encoded(self) -> list[Encoded]:
        """All that was encoded before the run."""
        return [*self.trained, *self.evaluated]


def prepare(
    cfg: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    packing: Packing,
    world_size: int,
) -> Prepared:
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
        return Prepared(streamed, [], held_out, formats, eval_formats)
    encoded = [_encoded(source, cfg, tokenizer, vocabulary) for source in sources]
    feed = Feed(encoded, shape, eval_split=data.eval_split, **settings)
    return Prepared(feed, encoded, held_out, formats, eval_formats)


def _encoded(
    source: Source,
    cfg: FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
) -> Encoded:
    encoded = encode(source, tokenizer, cfg.data, vocabulary)
    check_supervised(encoded, cfg.data.sequence_length)
    return encoded


def report(
    prepared: Prepared,
    tokenizer: PreTrainedTokenizerBase | None,
    samples: int = 1,
) -> dict[str, Any]:
    """Return the supervision report of what was encoded; see `data.report.supervision_report`."""
    feed = prepared.feed
    return supervision_report(
        prepared.trained,
        tokenizer,
        sequence_length=feed.sequence_length,
        formats=prepared.formats,
        evaluated=prepared.evaluated,
        eval_formats=prepared.eval_formats,
        parts=[] if isinstance(feed, StreamFeed) else [asdict(part) for part in feed.parts],
        samples=samples,
    )


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
    prepared = prepare(cfg, tokenizer, vocabulary, chosen.packing, 1)
    if cfg.data.streaming:  # made, it is known that it can be; now what is in it
        whole = replace(cfg, data=replace(cfg.data, streaming=False, eval_split=0.0))
        prepared = prepare(whole, tokenizer, vocabulary, chosen.packing, 1)
    return report(prepared, tokenizer, samples) | asdict(chosen)
