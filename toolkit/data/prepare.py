"""The data of a run: made of its settings, refused where it cannot be trained on, and read."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.config.measures import TOKEN_METRICS, Metric
from toolkit.config.settings import (
    FinetuneConfig,
    ModelConfig,
    RunConfig,
    model_settings,
)
from toolkit.data.chat import chat_templates
from toolkit.data.chat.template import with_defaults
from toolkit.data.feed.feed import DataRank, Feed, LocalDataRank
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.order.position import Position, accumulation_for
from toolkit.data.report import build_supervision_report, check_supervised, render_report
from toolkit.data.row_formats import RowFormat, find_row_format
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import Packing, SampleShape
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.stop_tokens import add_stop_tokens, find_stop_tokens, set_reward_position
from toolkit.data.tokens.encode import Encoder, encode_source, encoding_digest
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.data.tokens.tokenizer import choose_pad_id, load_tokenizer, use_model_tokenizer
from toolkit.errors import ConfigError, DataError
from toolkit.formats import assets_of
from toolkit.mesh import Mesh
from toolkit.models import causal_lm as models
from toolkit.models import packing_probe
from toolkit.models.attention import attend_within_documents
from toolkit.models.reward import reward_head


def prepare_data(
    cfg: RunConfig,
    model: PreTrainedModel,
    model_cfg: ModelConfig,
    run: DataRank,
    mesh: Mesh,
    metrics: Sequence[Metric] = TOKEN_METRICS,
) -> "TrainingData":
    """Return what the run reads. Collective; encodes on all cores, once, cached.

    Pretraining learns documents whole; fine-tuning learns what `data.supervise` covers of examples.

    Args:
        model: on meta, before adapters and sharding.
        model_cfg: the model's settings with the tokenizer that the run uses.
        mesh: the ranks of the run, of which `mesh.data` read different samples.
        metrics: the metrics of an evaluation (`Objective.metrics`), which
            `checkpoint.metric_for_best_model` may name.

    DataError: the tokenizer, a file, a row or the number of samples cannot be trained with, nothing
    of a source is learned, the model mixes packed samples, ranks read different data, the global
    batch does not divide, or max_repeats ends the data too early. ConfigError: a setting needs
    evaluations, and there is nothing to evaluate on.
    """
    encoder = ranks.on_all(lambda: build_encoder(cfg, model_cfg, model))
    rows = cfg.train.micro_batch
    choice = ranks.on_main(lambda: choose_packing(cfg.data, model, rows, run.device.type))
    if choice.mask is None:
        attend_within_documents(model)
    feed = ranks.main_first(partial(build_feed, cfg, encoder, choice, mesh.data.size))
    if encoder.row_format.is_chat and encoder.tokenizer is not None:
        if reward_head(model) is not None:
            ranks.log_once(set_reward_position(model, encoder.tokenizer))
        else:
            ends = ranks.on_main(partial(find_stop_tokens, feed, encoder.tokenizer))
            ranks.log_once(add_stop_tokens(model, ends, encoder.tokenizer))
    readers = LocalDataRank(run.device, mesh.data.rank, mesh.data.size, run.loader)
    data = TrainingData(cfg, feed, choice, encoder.tokenizer, readers)
    check_data(data, metrics)
    return data


def inspect_data(cfg: FinetuneConfig, samples: int = 3) -> dict[str, Any]:
    """Return the supervision report of a config, as a run of it would read the data, with the
    `packing` and `why`. One process, no weights. Streams are read whole, after the checks that a
    run makes of them; nothing is split off them to evaluate on. Raises what the run would.
    """
    if cfg.train.per_device_train_batch_size == "auto":
        cfg = replace(cfg, train=replace(cfg.train, per_device_train_batch_size=1))
    model_cfg = use_model_tokenizer(model_settings(cfg))
    model = models.build_on_meta(model_cfg)
    encoder = build_encoder(cfg, model_cfg, model)
    choice = choose_packing(cfg.data, model, cfg.train.micro_batch)
    feed = build_feed(cfg, encoder, choice, 1)
    if cfg.data.streaming:  # it can be streamed; now what is in it
        whole = replace(cfg, data=replace(cfg.data, streaming=False, eval_split=0.0))
        feed = build_feed(whole, encoder, choice, 1)
    said = {"packing": choice.packing, "why": choice.why}
    return build_supervision_report(feed, encoder.tokenizer, samples) | said


def build_encoder(cfg: RunConfig, model_cfg: ModelConfig, model: PreTrainedModel) -> Encoder:
    """Return the encoder of the run's rows, its tokenizer with `data.chat_template` and the
    defaults of `data.chat_template_kwargs`: they become part of `model.hf_assets`, so that the
    export answers as it was trained.
    """
    tokenizer = load_tokenizer(model_cfg)
    if isinstance(cfg, FinetuneConfig) and cfg.train.eval_prompts and tokenizer is None:
        raise DataError(
            f"train.eval_prompts needs a tokenizer, and {cfg.model.name_or_path} comes with none; "
            "set model.tokenizer_name_or_path"
        )
    row_format = find_row_format(cfg.rows)
    encoder = Encoder(tokenizer, cfg.data, models.vocabulary_size(model), row_format)
    if isinstance(cfg, FinetuneConfig) and tokenizer is not None:
        _use_chat_template(cfg.data, tokenizer, model)
    return encoder


def _use_chat_template(
    data: FinetuneDataConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """Let the tokenizer and the exports of `model` have the chat template that the run renders.

    Raises:
        ConfigError: the template has no variable of `data.chat_template_kwargs`.
        DataError: there is no template.
    """
    given, values = data.chat_template, data.chat_template_kwargs
    if given is None and not values:
        return
    templates = with_defaults(chat_templates(tokenizer, given), values)
    named = given is None and isinstance(tokenizer.chat_template, dict)
    tokenizer.chat_template = templates if named else templates["default"]
    if "default" in templates:
        assets_of(model).files["chat_template.jinja"] = templates["default"].encode()


def build_feed(cfg: RunConfig, encoder: Encoder, choice: "PackingChoice", world_size: int) -> Feed:
    """Read and encode the data; return what a run reads from. Cached on disk: one rank first."""
    data, train = cfg.data, cfg.train
    row_format = encoder.row_format

    def encoded(source: DataSource) -> EncodedSource:
        made = encode_source(source, encoder)
        if not row_format.is_documents:
            check_supervised(made, data.sequence_length)
        return made

    has_template = encoder.has_chat_template
    sources = load_sources(data, row_format=row_format, has_template=has_template)
    # Read before the training data is encoded, which may take an hour.
    others = load_sources(data, what="eval", row_format=row_format, has_template=has_template)
    trained, evaluated = (
        {os.path.realpath(f) for source in some for f in source.files} for some in (sources, others)
    )
    if both := sorted(trained & evaluated):
        more = f" and {len(both) - 1} more" if len(both) > 1 else ""
        ranks.log_once(
            f"WARNING: {both[0]}{more} is trained on and evaluated on: evaluations tell what was "
            "learned by heart (data.eval_files)"
        )
    _warn_of_unused_variables(data, [*sources, *others])
    rows = train.micro_batch * train.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch": train.global_batch_size or rows * world_size,
        "eval_sources": [encoded(source) for source in others],
        "max_eval_samples": data.max_eval_samples,
    }
    pad = choose_pad_id(encoder.tokenizer)
    shape = SampleShape(
        choice.packing,
        data.sequence_length,
        pad,
        borders=choice.mask is None,
        row_format=row_format,
        prompts=cfg.learns_prompts,
    )
    if not data.streaming:
        prepared = [encoded(source) for source in sources]
        return PreparedFeed(prepared, shape, eval_split=data.eval_split, **settings)
    streams = [
        StreamSource(
            *(s.name, s.rows, partial(encoder.encode_row, s), s.weight, s.max_repeats, s.sizes),
            {"the files": s.files_digest(), "what decides tokens": encoding_digest(s, encoder)},
        )
        for s in sources
    ]
    return StreamFeed(streams, shape, lanes=data.stream_lanes, **settings)


def _warn_of_unused_variables(data: DataConfig, sources: Sequence[DataSource]) -> None:
    """Log that `data.chat_template_kwargs` is set and no source is rendered by a chat template."""
    values = data.chat_template_kwargs if isinstance(data, FinetuneDataConfig) else {}
    if values and not any(source.layout.uses_template for source in sources):
        formats = ", ".join(dict.fromkeys(source.layout.title for source in sources))
        ranks.log_once(
            f"WARNING: data.chat_template_kwargs ({', '.join(values)}) changes no row: expected "
            f"conversations, which a chat template renders, got {formats}. Remove the setting, or "
            "give rows of turns (docs/finetuning.md)"
        )


@dataclass(frozen=True)
class PackingChoice:
    """How rows become samples, and whether their documents need a mask to be told apart."""

    packing: Packing
    why: str
    mask: str | None = "rows are padded"  # why one is needed; None: batches carry borders

    def __str__(self) -> str:
        if self.mask is None:
            return "attention  each document by itself, told apart by its borders (no mask needed)"
        return f"attention  masked: {self.mask}"


def choose_packing(
    data: DataConfig, model: PreTrainedModel, rows: int, device: str = "cpu"
) -> PackingChoice:
    """Return the packing, `auto` decided; `rows` are the samples of a micro-batch.

    Tries it on a tiny copy of the model: 0.1 to 2 seconds for most types. Not collective.
    """
    asked = data.packing
    if asked == "none":
        return PackingChoice(asked, "as data.packing asks")
    verdict = packing_probe.probe_packing(
        model.config,
        assets_of(model).model_class,
        sequence_length=data.sequence_length,
        rows=rows,
        device=device,
        packed=asked != "wrapped",
    )
    if asked == "wrapped":
        return PackingChoice(asked, "as data.packing asks", verdict.mask)
    if verdict.ok:
        return PackingChoice("bfd", verdict.why, verdict.mask)
    if asked == "bfd":
        raise DataError(
            f"data.packing bfd: {models.model_class_name(model)} does not keep packed samples "
            f"apart ({verdict.why}); set data.packing: none"
        )
    return PackingChoice("none", verdict.why)


def check_data(data: "TrainingData", metrics: Sequence[Metric] = TOKEN_METRICS) -> None:
    """Refuse data that cannot be trained on as the settings ask; see `prepare_data`. Collective."""
    ranks.on_all(lambda: data.feed.check_enough(data.run.world_size))
    state = data.position.state_dict()
    states = [state] if ranks.all_equal(state) else ranks.gather(state)
    ours = states[0]
    for rank, theirs in enumerate(states):
        if names := [name for name in ours if theirs.get(name) != ours[name]]:
            raise DataError(
                f"expected the same data on every rank, rank {rank} reads another than rank 0 "
                f"({', '.join(names)}: {[theirs.get(n) for n in names]} and "
                f"{[ours[n] for n in names]}); the files of all machines must be equal, or on "
                "storage that they share"
            )
    _check_evaluations(data.cfg, list(data.feed.eval_sets), metrics)
    ranks.on_all(data.check_steps)


def _check_evaluations(cfg: Any, sources: list[str], metrics: Sequence[Metric]) -> None:
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
    unused = {"train.eval_steps": cfg.train.eval_steps}
    if cfg.data.streaming and cfg.data.eval_split != type(cfg.data).eval_split:
        unused["data.eval_split"] = cfg.data.eval_split
    for name, value in unused.items() if not sources else ():
        if value:
            why = "there is nothing to evaluate on (nothing is split off a stream)"
            ranks.log_once(
                f"WARNING: {name} {value} has no effect: {why}; data.eval_files gives it"
            )
    prefixes = ["eval", *(f"eval_{name}" for name in sources if len(sources) > 1)]
    known = {f"{prefix}_{metric.name}" for prefix in prefixes for metric in metrics}
    metric, _ = cfg.checkpoint.best_metric()
    is_set = cfg.checkpoint.metric_for_best_model != type(cfg.checkpoint).metric_for_best_model
    if metric not in known and (is_set or {*asked} - {"train.eval_prompts"}):
        raise ConfigError(
            f"checkpoint.metric_for_best_model {metric}: expected a metric that an evaluation of "
            f"this run gives: {', '.join(sorted(known))}"
        )


@dataclass(eq=False)
class TrainingData:
    """What the loop of a recipe reads; `prepare_data` makes it."""

    cfg: RunConfig
    feed: Feed
    choice: PackingChoice
    tokenizer: PreTrainedTokenizerBase | None  # None where the data came as token ids
    run: DataRank

    @property
    def row_format(self) -> RowFormat:
        """What the rows of the run are."""
        return self.feed.shape.row_format

    @property
    def position(self) -> Position:
        return self.feed.position

    @property
    def max_steps(self) -> int:
        """The optimizer steps of the run; of a resumed one with the checkpoint's global batch."""
        train = self.cfg.train
        if train.max_steps == -1:
            return self.feed.steps_for(train.num_train_epochs)
        self.feed.check_steps(train.max_steps)
        return train.max_steps

    @property
    def fixed_length(self) -> bool:
        """Whether every sample has as many tokens, padding counted."""
        return self.row_format.has_fixed_width(self.feed.shape.packing)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        size = self.cfg.train.micro_batch
        return accumulation_for(self.position.global_batch, size, self.run.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch without padding, on the mean."""
        return round(self.feed.tokens_of_step())

    @cached_property
    def evals(self) -> dict[str, Iterable[Batch]]:
        """Source name -> this rank's micro-batches to evaluate on; empty without eval data."""
        train = self.cfg.train
        size = train.per_device_eval_batch_size or train.micro_batch
        return self.feed.evals(self.run, per_device_batch_size=size)

    @ranks.collective
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint. Collective.

        A DataError where it is of other data, its global batch does not divide over these ranks, or
        max_repeats ends the data before the last step.
        """
        self.position.load_state_dict(state)
        self.check_steps()

    def check_steps(self) -> None:
        """Raise a `DataError` for a batch that does not divide, or more steps than the data has."""
        _ = self.accumulation, self.max_steps

    def steps(self, *, after: int = 0) -> Iterator[tuple[int, list[Batch]]]:
        """Give (step, this rank's micro-batches) of the steps after `after`, to the last.

        Collective at the first of them. Call `position.advance()` when a step is done. Raises
        DataError as `load_state_dict` does, and for a row of a stream that is refused.
        """
        ranks.on_all(self.check_steps)
        read = self.feed.steps(
            self.run,
            self.max_steps - after,
            per_device_batch_size=self.cfg.train.micro_batch,
            workers=self.cfg.data.num_workers,
        )
        yield from enumerate(read, start=after + 1)

    def samples_of(self, step: int) -> list[str]:
        """Return the samples that this rank reads in `step`, by source and rows, counted from 0; of
        streams nothing is known.
        """
        return self.feed.samples_of(step - 1, self.run)

    def lines(self) -> list[str]:
        """Return what a run prints of its data at the start: sources, packing, global batch."""
        train, size = self.cfg.train, self.position.global_batch
        lines = [f"data       {line}" for line in self.feed.lines()]
        if self.cfg.data.packing != "wrapped":
            lines.append(f"packing    {self.feed.shape.packing}: {self.choice.why}")
        if self.feed.shape.packing != "none":
            lines.append(str(self.choice))
        lines.append(
            f"batch      {size} samples = {train.micro_batch} a device x "
            f"{self.accumulation} accumulated x {self.run.world_size} process(es) on "
            f"{self.run.device.type}"
        )
        if isinstance(self.feed, StreamFeed):
            lines += self.feed.uneven_lines(self.run.world_size)
        if isinstance(self.feed, PreparedFeed) and size > len(self.feed):
            lines.append(
                f"WARNING: the global batch of {size:,} samples is larger than the training data "
                f"({len(self.feed):,} samples): each step reads it {size / len(self.feed):.1f} "
                "times; lower train.per_device_train_batch_size or gradient_accumulation_steps, or "
                "give more data"
            )
        return lines

    def reading_lines(self) -> list[str]:
        """Return what came of the rows of streams so far."""
        return [f"read       {line}" for line in self.feed.reading_lines()]

    def report(self) -> str:
        """Return the supervision report of fine-tuning; empty where the run encodes its rows."""
        encoded = isinstance(self.feed, PreparedFeed) or self.feed.eval_sources
        if not encoded or self.row_format.is_documents:
            return ""
        return render_report(build_supervision_report(self.feed, self.tokenizer, samples=1))
