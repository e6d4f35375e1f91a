"""From settings to the data of a run: tokenizer, sources, packing, and what is refused of them."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.retention import retention
from toolkit.config.settings import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    PretrainConfig,
    model_settings,
)
from toolkit.data.chat import chat_templates
from toolkit.data.feed.feed import Feed, Packing, Processes, SampleShape
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.report import check_supervised, supervision_report
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import EncodedSource, encode
from toolkit.data.tokens.encoder import Encoder
from toolkit.data.tokens.tokenizer import load_tokenizer, own_tokenizer, pad_id
from toolkit.data.training_data import TrainingData
from toolkit.errors import ConfigError, DataError
from toolkit.formats import assets_of
from toolkit.models import causal_lm as models
from toolkit.models import packing_probe


def prepare_data(
    cfg: PretrainConfig | FinetuneConfig,
    model: PreTrainedModel,
    model_cfg: ModelConfig,
    run: Processes,
) -> TrainingData:
    """Return what the run reads. Collective; encodes on all cores, once, cached.

    Pretraining learns documents whole; fine-tuning learns what `data.supervise` covers of examples.

    Args:
        model: on meta, before adapters and sharding.
        model_cfg: the model's settings with the tokenizer that the run uses.

    Raises:
        DataError: the tokenizer, a file, a row or the number of samples cannot be trained with,
            nothing of a source is learned, the model mixes packed samples, ranks read different
            data, the global batch does not divide, or max_repeats ends the data too early.
        ConfigError: a setting needs evaluations, and there is nothing to evaluate on.
    """
    encoder = ranks.on_all(lambda: _encoder(cfg, model_cfg, model))
    rows = cfg.train.per_device_train_batch_size
    packing, why = ranks.on_main(lambda: choose_packing(cfg.data, model, rows, run.device.type))
    feed = ranks.main_first(partial(read_sources, cfg, encoder, packing, run.world_size))
    data = TrainingData(cfg, feed, why, encoder.tokenizer, run)
    check_data(data)
    return data


def inspect_data(cfg: FinetuneConfig, samples: int = 3) -> dict[str, Any]:
    """Return the supervision report of a config, as a run of it would read the data, with the
    `packing` and `why`. One process, no weights. Streams are read whole, after the checks that a
    run makes of them; nothing is split off them to evaluate on. Raises what the run would.
    """
    model_cfg = own_tokenizer(model_settings(cfg))
    model = models.build_on_meta(model_cfg)
    encoder = _encoder(cfg, model_cfg, model)
    packing, why = choose_packing(cfg.data, model, cfg.train.per_device_train_batch_size)
    feed = read_sources(cfg, encoder, packing, 1)
    if cfg.data.streaming:  # it can be streamed; now what is in it
        whole = replace(cfg, data=replace(cfg.data, streaming=False, eval_split=0.0))
        feed = read_sources(whole, encoder, packing, 1)
    return supervision_report(feed, encoder.tokenizer, samples) | {"packing": packing, "why": why}


def _encoder(
    cfg: PretrainConfig | FinetuneConfig, model_cfg: ModelConfig, model: PreTrainedModel
) -> Encoder:
    """Return the encoder of the run's rows, its tokenizer with `data.chat_template` where it is
    set: that becomes part of `model.hf_assets`, so that the export answers as it was trained.
    """
    tokenizer = load_tokenizer(model_cfg)
    if isinstance(cfg, FinetuneConfig) and cfg.train.eval_prompts and tokenizer is None:
        raise DataError(
            f"train.eval_prompts needs a tokenizer, and {cfg.model.name_or_path} comes with none; "
            "set model.tokenizer_name_or_path"
        )
    encoder = Encoder(tokenizer, cfg.data, models.vocabulary_size(model))
    given = cfg.data.chat_template if isinstance(cfg, FinetuneConfig) else None
    if given is not None and tokenizer is not None:
        tokenizer.chat_template = chat_templates(tokenizer, given)["default"]
        assets_of(model).files["chat_template.jinja"] = tokenizer.chat_template.encode()
    return encoder


def read_sources(
    cfg: PretrainConfig | FinetuneConfig, encoder: Encoder, packing: Packing, world_size: int
) -> Feed:
    """Read and encode the data; return what a run reads from. Cached on disk: one rank first."""
    data, train, finetune = cfg.data, cfg.train, isinstance(cfg, FinetuneConfig)

    def encoded(source: DataSource) -> EncodedSource:
        made = encode(source, encoder)
        if finetune:
            check_supervised(made, data.sequence_length)
        return made

    builtin: Literal["instructions", "text"] = "instructions" if finetune else "text"
    sources = load_sources(data, builtin=builtin, documents=not finetune)
    # Read before the training data is encoded, which may take an hour.
    others = load_sources(data, what="eval", documents=not finetune)
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch": rows * world_size,
        "eval_sources": [encoded(source) for source in others],
        "max_eval_samples": data.max_eval_samples,
    }
    shape = SampleShape(packing, data.sequence_length, pad_id(encoder.tokenizer))
    if not data.streaming:
        prepared = [encoded(source) for source in sources]
        return PreparedFeed(prepared, shape, eval_split=data.eval_split, **settings)
    streams = [
        StreamSource(s.name, s.rows, partial(encoder.row, s), s.weight, s.max_repeats)
        for s in sources
    ]
    return StreamFeed(streams, shape, **settings)


def choose_packing(
    data: DataConfig, model: PreTrainedModel, rows: int, device: str = "cpu"
) -> tuple[Packing, str]:
    """Return the packing, `auto` decided, and why; `rows` are the samples of a micro-batch.

    Tries it on a tiny copy of the model: 0.1 to 2 seconds for most types. Not collective.
    """
    asked = data.packing
    if asked == "wrapped" or asked == "none":
        return asked, "as data.packing asks"
    verdict = packing_probe.keeps_apart(
        model.config,
        assets_of(model).model_class,
        sequence_length=data.sequence_length,
        rows=rows,
        device=device,
    )
    if verdict.ok:
        return "bfd", verdict.why
    if asked == "bfd":
        raise DataError(
            f"data.packing bfd: {models.plain_name(model)} does not keep packed samples apart "
            f"({verdict.why}); set data.packing: none"
        )
    return "none", verdict.why


def check_data(data: TrainingData) -> None:
    """Refuse data that cannot be trained on as the settings ask; see `prepare_data`. Collective."""
    ranks.on_all(lambda: data.feed.check_enough(ranks.world_size()))
    states = ranks.gather(data.position.state_dict())
    ours = states[0]
    for rank, theirs in enumerate(states):
        if theirs != ours:
            names = [name for name in ours if theirs.get(name) != ours[name]]
            raise DataError(
                f"expected the same data on every rank, rank {rank} reads another than rank 0 "
                f"({', '.join(names)}: {[theirs.get(n) for n in names]} and "
                f"{[ours[n] for n in names]}); the files of all machines must be equal, or on "
                "storage that they share"
            )
    _check_evaluations(data.cfg, list(data.feed.eval_sets))
    ranks.on_all(data.check_steps)


def _check_evaluations(cfg: Any, sources: list[str]) -> None:
    """Refuse settings that need evaluations which the eval sets `sources` do not give."""
    needing = {
        "checkpoint.keep_best": bool(cfg.checkpoint.keep_best),
        "train.early_stopping_patience": getattr(cfg.train, "early_stopping_patience", None),
        "train.eval_prompts": getattr(cfg.train, "eval_prompts", None),
    }
    asked = [name for name, value in needing.items() if value]
    if not sources and asked:
        raise ConfigError(
            f"{' and '.join(asked)} need evaluations, and there is nothing to evaluate on: set "
            "data.eval_files, or a data.eval_split above 0 (nothing is split off a stream)"
        )
    named = ["eval", *(f"eval_{name}" for name in sources if len(sources) > 1)]
    known = {f"{name}_{kind}" for name in named for kind in ("loss", "perplexity")}
    metric = retention(cfg.checkpoint).metric
    if metric not in known and {*asked} - {"train.eval_prompts"}:
        raise ConfigError(
            f"checkpoint.metric_for_best_model {metric} is none of what an evaluation gives: "
            f"{', '.join(sorted(known))}"
        )
