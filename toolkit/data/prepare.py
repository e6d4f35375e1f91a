"""The data of a run: prepared by its settings, checked, and read by the training loop."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.best_metric import check_best_metric
from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.config.measures import TOKEN_METRICS, Metric
from toolkit.config.settings import (
    FinetuneConfig,
    ModelConfig,
    RunConfig,
    model_settings,
)
from toolkit.data.chat import load_chat_templates
from toolkit.data.chat.template import add_template_defaults
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
from toolkit.data.tokens.encode import Encoder, compute_encoding_digest, encode_source
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
    """Read, encode and check the data of a run.

    Rows are encoded on all CPU cores and cached on disk, so later starts read the cache.
    Collective.

    Args:
        cfg: settings of the run; `cfg.rows` names the row format.
        model: the model on meta, before adapters and sharding. Its assets get the chat template and
            the stop tokens with which it is trained.
        model_cfg: settings of the model with the tokenizer that the run uses.
        run: the device of this rank, and how it loads samples.
        mesh: the ranks of the run; those of `mesh.data` read different samples.
        metrics: metrics that an evaluation computes. The setting
            `checkpoint.metric_for_best_model` must name one of them.

    Raises:
        DataError: the tokenizer, a file or a row cannot be used; a source has no supervised token;
            the model lets packed samples see each other; ranks read different data; the global
            batch does not divide over the ranks; or `max_repeats` ends the data too early.
        ConfigError: a setting needs evaluations, and there is nothing to evaluate on.
    """
    encoder = ranks.on_all(lambda: build_encoder(cfg, model_cfg, model))
    rows, context = cfg.train.micro_batch, mesh.context
    choose = partial(choose_packing, cfg.data, model, rows, run.device.type, context.size)
    choice = ranks.on_main(choose)
    if choice.mask is None:
        attend_within_documents(model, context)
    part = context.rank, context.size
    feed = ranks.main_first(partial(build_feed, cfg, encoder, choice, mesh.data.size, part))
    if encoder.row_format.is_chat and encoder.tokenizer is not None:
        if reward_head(model) is not None:
            ranks.log_once(set_reward_position(model, encoder.tokenizer))
        else:
            stop_ids = ranks.on_main(partial(find_stop_tokens, feed, encoder.tokenizer))
            ranks.log_once(add_stop_tokens(model, stop_ids, encoder.tokenizer))
    data_rank = LocalDataRank(run.device, mesh.data.rank, mesh.data.size, run.loader)
    data = TrainingData(cfg, feed, choice, encoder.tokenizer, data_rank)
    check_data(data, metrics)
    return data


def inspect_data(cfg: FinetuneConfig, samples: int = 3) -> dict[str, Any]:
    """Report how a run with these settings would read, supervise and pack its data.

    Runs in one process and loads no weights. Data that the run would stream is read completely, and
    no evaluation split is taken from it.

    Args:
        cfg: settings of the run.
        samples: number of examples to show from each source.

    Returns:
        The report of `build_supervision_report`, plus `packing` and the reason for it (`why`).

    Raises:
        ToolkitError: the data cannot be used; a run would fail with the same error.
    """
    if cfg.train.per_device_train_batch_size == "auto":
        cfg = replace(cfg, train=replace(cfg.train, per_device_train_batch_size=1))
    model_cfg = use_model_tokenizer(model_settings(cfg))
    model = models.build_on_meta(model_cfg)
    encoder = build_encoder(cfg, model_cfg, model)
    parts = cfg.sharding.context_parallel
    choice = choose_packing(cfg.data, model, cfg.train.micro_batch, parts=parts)
    feed = build_feed(cfg, encoder, choice, 1)
    if cfg.data.streaming:
        # The data can be streamed. Read all of it, to report what is in it.
        prepared_cfg = replace(cfg, data=replace(cfg.data, streaming=False, eval_split=0.0))
        feed = build_feed(prepared_cfg, encoder, choice, 1)
    report = build_supervision_report(feed, encoder.tokenizer, samples)
    return report | {"packing": choice.packing, "why": choice.why}


def build_encoder(cfg: RunConfig, model_cfg: ModelConfig, model: PreTrainedModel) -> Encoder:
    """Create the encoder of the run's rows, with its tokenizer and chat template.

    If `data.chat_template` or `data.chat_template_kwargs` is set, the resulting template is also
    stored in the tokenizer and in the model's assets, so that exports contain it.

    Raises:
        DataError: the tokenizer cannot be loaded or does not fit the embedding,
            `train.eval_prompts` is set without a tokenizer, or a required chat template is missing.
        ConfigError: the chat template has no variable of `data.chat_template_kwargs`.
    """
    tokenizer = load_tokenizer(model_cfg)
    if isinstance(cfg, FinetuneConfig) and cfg.train.eval_prompts and tokenizer is None:
        raise DataError(
            f"train.eval_prompts needs a tokenizer, and {cfg.model.name_or_path} has none; set "
            "model.tokenizer_name_or_path"
        )
    row_format = find_row_format(cfg.rows)
    encoder = Encoder(tokenizer, cfg.data, models.vocabulary_size(model), row_format)
    if isinstance(cfg, FinetuneConfig) and tokenizer is not None:
        _use_chat_template(cfg.data, tokenizer, model)
    return encoder


def _use_chat_template(
    data: FinetuneDataConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """Set the run's chat template in the tokenizer and in the model's assets.

    Does nothing if neither `data.chat_template` nor `data.chat_template_kwargs` is set.

    Raises:
        ConfigError: the template has no variable of `data.chat_template_kwargs`.
        DataError: there is no template.
    """
    template, kwargs = data.chat_template, data.chat_template_kwargs
    if template is None and not kwargs:
        return
    templates = add_template_defaults(load_chat_templates(tokenizer, template), kwargs)
    has_several = template is None and isinstance(tokenizer.chat_template, dict)
    tokenizer.chat_template = templates if has_several else templates["default"]
    if "default" in templates:
        assets_of(model).files["chat_template.jinja"] = templates["default"].encode()


def build_feed(
    cfg: RunConfig,
    encoder: Encoder,
    choice: "PackingChoice",
    world_size: int,
    context: tuple[int, int] = (0, 1),
) -> Feed:
    """Read and encode the sources of a run, and build the feed of its micro-batches.

    Encoded rows are cached on disk. Call this on one rank first, so that other ranks read the
    cache. Logs warnings about settings and files.

    Args:
        cfg: settings of the run.
        encoder: the encoder of its rows.
        choice: how rows become samples.
        world_size: number of ranks that read different samples.
        context: rank and size of the group of ranks that share each row.

    Returns:
        A `StreamFeed` with `data.streaming`, else a `PreparedFeed`.

    Raises:
        DataError: a file or a row cannot be used, or a source has no supervised token or no sample.
    """
    data, train = cfg.data, cfg.train
    row_format = encoder.row_format

    def encode_checked(source: DataSource) -> EncodedSource:
        encoded = encode_source(source, encoder)
        if not row_format.is_documents:
            check_supervised(encoded, data.sequence_length)
        return encoded

    has_template = encoder.has_chat_template
    sources = load_sources(data, row_format=row_format, has_template=has_template)
    # Read before the training data is encoded, which may take an hour.
    evals = load_sources(data, purpose="eval", row_format=row_format, has_template=has_template)
    _warn_of_shared_files(sources, evals)
    _warn_of_unused_variables(data, [*sources, *evals])
    rows = train.micro_batch * train.gradient_accumulation_steps
    settings: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch": train.global_batch_size or rows * world_size,
        "eval_sources": [encode_checked(source) for source in evals],
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
        context=context,
    )
    if not data.streaming:
        prepared = [encode_checked(source) for source in sources]
        return PreparedFeed(prepared, shape, eval_split=data.eval_split, **settings)
    streams = [
        StreamSource(
            source.name,
            source.rows,
            partial(encoder.encode_row, source),
            source.weight,
            source.max_repeats,
            source.sizes,
            {
                "the files": source.files_digest(),
                "what decides tokens": compute_encoding_digest(source, encoder),
            },
        )
        for source in sources
    ]
    return StreamFeed(streams, shape, lanes=data.stream_lanes, **settings)


def _warn_of_shared_files(train: Sequence[DataSource], evals: Sequence[DataSource]) -> None:
    """Log a warning if a file is both trained on and evaluated on."""
    train_files = {os.path.realpath(file) for source in train for file in source.files}
    eval_files = {os.path.realpath(file) for source in evals for file in source.files}
    if shared := sorted(train_files & eval_files):
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        ranks.log_once(
            f"WARNING: {shared[0]}{more} is both trained on and evaluated on, so evaluations "
            "measure how well the model memorises; set data.eval_files to other rows"
        )


def _warn_of_unused_variables(data: DataConfig, sources: Sequence[DataSource]) -> None:
    """Log a warning if `data.chat_template_kwargs` is set but no source uses a chat template."""
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
    """The packing of a run with its reason, and how attention separates documents."""

    packing: Packing
    """`data.packing`, with `auto` decided."""
    why: str
    """Reason for the packing, for the log."""
    mask: str | None = "rows are padded"
    """Why a mask is needed; None if micro-batches have the borders of documents instead."""

    def __str__(self) -> str:
        if self.mask is None:
            return "attention  each document by itself, separated by borders (no mask needed)"
        return f"attention  masked: {self.mask}"


def choose_packing(
    data: DataConfig, model: PreTrainedModel, rows: int, device: str = "cpu", parts: int = 1
) -> PackingChoice:
    """Choose the packing of a run. `auto` becomes `bfd` if the model supports it, else `none`.

    Unless `data.packing` is `none`, this runs packed samples through a tiny copy of the model. That
    takes 0.1 to 2 seconds for most model types. Not collective.

    Args:
        data: settings of the data.
        model: the model on meta.
        rows: number of samples in a micro-batch.
        device: type of the device on which the run trains, such as "cuda".
        parts: number of ranks that share each row. Above 1, a model that needs a mask is refused.

    Raises:
        DataError: `data.packing` is bfd, but attention of the model does not separate the samples;
            or ranks share rows, and attention of the model needs a mask.
    """
    setting = data.packing
    if setting == "none" and parts == 1:
        return PackingChoice(setting, "as data.packing asks")
    verdict = packing_probe.probe_packing(
        model.config,
        assets_of(model).model_class,
        sequence_length=data.sequence_length,
        rows=rows,
        device=device,
        packed=setting not in ("wrapped", "none"),
    )
    if parts > 1 and verdict.mask is not None:
        raise DataError(
            f"sharding.context_parallel {parts}: attention of {models.model_class_name(model)} "
            f"cannot work without a mask ({verdict.mask}); set it to 1"
        )
    if setting == "none":
        return PackingChoice(setting, "as data.packing asks", None)
    if setting == "wrapped":
        return PackingChoice(setting, "as data.packing asks", verdict.mask)
    if verdict.ok:
        return PackingChoice("bfd", verdict.why, verdict.mask)
    if setting == "bfd":
        raise DataError(
            f"data.packing bfd: {models.model_class_name(model)} does not keep packed samples "
            f"apart ({verdict.why}); set data.packing: none"
        )
    return PackingChoice("none", verdict.why)


def check_data(data: "TrainingData", metrics: Sequence[Metric] = TOKEN_METRICS) -> None:
    """Raise an error if the run cannot train on its data with these settings. Collective.

    Args:
        data: the data of the run.
        metrics: metrics that an evaluation computes.

    Raises:
        DataError: there is too little data, or no supervised token; ranks read different data; the
            global batch does not divide over the ranks; or `max_repeats` ends the data too early.
        ConfigError: a setting needs an evaluation or a metric that the run does not have.
    """
    ranks.on_all(lambda: data.feed.check_enough(data.run.world_size))
    state = data.position.state_dict()
    states = [state] if ranks.all_equal(state) else ranks.gather(state)
    expected = states[0]
    for rank, state in enumerate(states):
        if names := [name for name in expected if state.get(name) != expected[name]]:
            raise DataError(
                f"expected the same data on every rank, but rank {rank} reads other data than "
                f"rank 0 ({', '.join(names)}: {[state.get(n) for n in names]} and "
                f"{[expected[n] for n in names]}); use equal files on all machines, or files on "
                "shared storage"
            )
    _check_evaluations(data.cfg, list(data.feed.eval_sets), metrics)
    ranks.on_all(data.check_steps)


def _check_evaluations(cfg: Any, sources: list[str], metrics: Sequence[Metric]) -> None:
    """Raise ConfigError if a setting needs an evaluation or a metric that this run does not have.

    Logs a warning for settings that have no effect without evaluations.

    Args:
        cfg: settings of the run.
        sources: names of the sources that are evaluated on; empty if there are none.
        metrics: metrics that an evaluation computes.
    """
    settings = {
        "checkpoint.keep_best": bool(cfg.checkpoint.keep_best),
        "train.early_stopping_patience": getattr(cfg.train, "early_stopping_patience", None),
        "train.eval_prompts": getattr(cfg.train, "eval_prompts", None),
    }
    requiring = [name for name, value in settings.items() if value]
    if not sources and requiring:
        raise ConfigError(
            f"{' and '.join(requiring)} need evaluations, and there is nothing to evaluate on: set "
            "data.eval_files, or a data.eval_split above 0 (nothing is split off a stream)"
        )
    unused = {"train.eval_steps": cfg.train.eval_steps}
    if cfg.data.streaming and cfg.data.eval_split != type(cfg.data).eval_split:
        unused["data.eval_split"] = cfg.data.eval_split
    for name, value in unused.items() if not sources else ():
        if value:
            ranks.log_once(
                f"WARNING: {name} {value} has no effect, because there is nothing to evaluate on "
                "(nothing is split off a stream); set data.eval_files"
            )
    is_used = bool({*requiring} - {"train.eval_prompts"})
    check_best_metric(cfg.checkpoint, sources, metrics, is_used=is_used)


@dataclass(eq=False)
class TrainingData:
    """The data of a run, as a recipe's training loop uses it; created by `prepare_data`."""

    cfg: RunConfig
    feed: Feed
    choice: PackingChoice
    tokenizer: PreTrainedTokenizerBase | None
    """None if the rows are token ids already and no tokenizer is set."""
    run: DataRank

    @property
    def row_format(self) -> RowFormat:
        """The row format of the run."""
        return self.feed.shape.row_format

    @property
    def position(self) -> Position:
        """The position of the run in its data; part of every checkpoint."""
        return self.feed.position

    @property
    def max_steps(self) -> int:
        """Number of optimizer steps of the run, counted from its start.

        It is `train.max_steps`, or, if that is -1, the steps of `train.num_train_epochs` at the
        current global batch. Raises DataError if the data allows fewer steps.
        """
        train = self.cfg.train
        if train.max_steps == -1:
            return self.feed.steps_for(train.num_train_epochs)
        self.feed.check_steps(train.max_steps)
        return train.max_steps

    @property
    def fixed_length(self) -> bool:
        """True if all micro-batches have the same width in tokens, padding included."""
        return self.row_format.has_fixed_width(self.feed.shape.packing)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of a rank in a step (gradient accumulation).

        Raises DataError if the global batch does not divide over the ranks.
        """
        size = self.cfg.train.micro_batch
        return accumulation_for(self.position.global_batch, size, self.run.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Mean number of tokens in a global batch, without padding, rounded."""
        return round(self.feed.tokens_of_step())

    @cached_property
    def evals(self) -> dict[str, Iterable[Batch]]:
        """Source name -> this rank's evaluation micro-batches; {} without evaluation data."""
        train = self.cfg.train
        size = train.per_device_eval_batch_size or train.micro_batch
        return self.feed.evals(self.run, per_device_batch_size=size)

    @ranks.collective
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint. Collective.

        Raises:
            DataError: the position belongs to other data, its global batch does not divide over
                these ranks, or `max_repeats` ends the data before the last step.
        """
        self.position.load_state_dict(state)
        self.check_steps()

    def check_steps(self) -> None:
        """Raise DataError if the steps of the run do not fit its ranks or its data.

        The global batch must divide over the ranks, and `max_repeats` must not end the data before
        the last step. The message gives possible numbers.
        """
        # Both properties raise.
        _ = self.accumulation, self.max_steps

    def steps(self, *, after: int = 0) -> Iterator[tuple[int, list[Batch]]]:
        """Yield pairs (step, this rank's micro-batches), from step `after + 1` to the last step.

        Call `position.advance()` after each step. Collective at the first step.

        Raises:
            DataError: the global batch does not divide over the ranks, `max_repeats` ends the data
                before the last step, or a row of a stream is refused.
        """
        ranks.on_all(self.check_steps)
        read = self.feed.steps(
            self.run,
            self.max_steps - after,
            per_device_batch_size=self.cfg.train.micro_batch,
            workers=self.cfg.data.num_workers,
        )
        yield from enumerate(read, start=after + 1)

    def describe_samples(self, step: int) -> list[str]:
        """Describe the samples that this rank reads in `step` (from 1), one text per sample.

        A text has the name of the source and the row numbers from 0. The list is empty for streams,
        whose samples are not known in advance.
        """
        return self.feed.describe_samples(step - 1, self.run)

    def lines(self) -> list[str]:
        """Format the log lines on sources, packing and batch size for the start of a run."""
        train, size = self.cfg.train, self.position.global_batch
        parts = self.feed.shape.context[1]
        groups = f"group(s) of {parts} processes" if parts > 1 else "process(es)"
        lines = [f"data       {line}" for line in self.feed.lines()]
        if self.cfg.data.packing != "wrapped":
            lines.append(f"packing    {self.feed.shape.packing}: {self.choice.why}")
        if self.feed.shape.packing != "none":
            lines.append(str(self.choice))
        lines.append(
            f"batch      {size} samples = {train.micro_batch} a device x "
            f"{self.accumulation} accumulated x {self.run.world_size} {groups} on "
            f"{self.run.device.type}"
        )
        if isinstance(self.feed, StreamFeed):
            lines += self.feed.uneven_lane_lines(self.run.world_size)
        if isinstance(self.feed, PreparedFeed) and size > len(self.feed):
            lines.append(
                f"WARNING: the global batch of {size:,} samples is larger than the training data "
                f"({len(self.feed):,} samples): each step reads it {size / len(self.feed):.1f} "
                "times; lower train.per_device_train_batch_size or gradient_accumulation_steps, or "
                "give more data"
            )
        return lines

    def reading_lines(self) -> list[str]:
        """Format log lines with the number of rows read so far from each streamed source.

        [] if no source is streamed, or nothing is counted yet.
        """
        return [f"read       {line}" for line in self.feed.reading_lines()]

    def report(self) -> str:
        """Format the supervision report as text.

        Returns "" for documents to pretrain on, and if all sources are streams.
        """
        has_encoded_rows = isinstance(self.feed, PreparedFeed) or self.feed.eval_sources
        if not has_encoded_rows or self.row_format.is_documents:
            return ""
        return render_report(build_supervision_report(self.feed, self.tokenizer, samples=1))
