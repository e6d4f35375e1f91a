"""The data of a run as its recipe reads it: micro-batches, evaluation sets, position."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.retention import retention
from toolkit.config.settings import DataConfig, FinetuneConfig, PretrainConfig
from toolkit.data.feed.feed import Feed
from toolkit.data.feed.sets import MicroBatch, Packing, Processes, SampleShape
from toolkit.data.feed.stream import StreamSource
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.order.position import accumulation_for
from toolkit.data.report import check_supervised, render, supervision_report
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import EncodedSource, RowEncoder, encode
from toolkit.data.tokens.tokenizer import pad_id
from toolkit.errors import ConfigError, DataError
from toolkit.formats import assets_of
from toolkit.models import causal_lm as models
from toolkit.models import packing_probe

AnyFeed = Feed | StreamFeed


@dataclass(frozen=True)
class PackingChoice:
    """How documents or examples become samples, and why."""

    packing: Packing
    why: str


@dataclass(frozen=True)
class EncodedData:
    """What a run reads from, and what it was made of."""

    feed: AnyFeed
    trained: list[EncodedSource] = field(default_factory=list)
    """The sources to train on, where they were encoded before the run: none of streams."""
    evaluated: list[EncodedSource] = field(default_factory=list)
    """The sources to evaluate on; they may have the names of others to train on."""
    formats: dict[str, str] = field(default_factory=dict)
    """Source to train on -> its format in words."""
    eval_formats: dict[str, str] = field(default_factory=dict)
    """Source to evaluate on -> its format in words."""

    def report(self, tokenizer: PreTrainedTokenizerBase | None, samples: int = 1) -> dict[str, Any]:
        """Return the supervision report; see `report.supervision_report`."""
        feed = self.feed
        return supervision_report(
            self.trained,
            tokenizer,
            sequence_length=feed.sequence_length,
            formats=self.formats,
            evaluated=self.evaluated,
            eval_formats=self.eval_formats,
            parts=[] if isinstance(feed, StreamFeed) else [asdict(part) for part in feed.parts],
            samples=samples,
        )


class TrainingData:
    """What the loop of a recipe reads: `pretrain.prepare` and `finetune.prepare` return it.

    Args:
        cfg: `train` and `data` are read.
        encoded: what the run reads from.
        packing: how it became samples.
        tokenizer: of the data; None where it came as token ids.
        run: the processes of the run.
    """

    def __init__(
        self,
        cfg: PretrainConfig | FinetuneConfig,
        encoded: EncodedData,
        packing: PackingChoice,
        tokenizer: PreTrainedTokenizerBase | None,
        run: Processes,
    ) -> None:
        self.cfg, self.encoded, self.feed, self.run = cfg, encoded, encoded.feed, run
        self.packing, self.tokenizer, self.position = packing, tokenizer, encoded.feed.position

    @property
    def max_steps(self) -> int:
        """The optimizer steps of the run; ask after a checkpoint's position is loaded, whose global
        batch counts.
        """
        train = self.cfg.train
        if train.max_steps == -1:
            return self.feed.steps_for(train.num_train_epochs)
        self.feed.check_steps(train.max_steps)
        return train.max_steps

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return accumulation_for(
            self.position.global_batch,
            self.cfg.train.per_device_train_batch_size,
            self.run.world_size,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch without padding, on the mean."""
        return round(self.feed.tokens_of_step())

    @cached_property
    def evals(self) -> dict[str, Iterable[MicroBatch]]:
        """Source name -> this rank's micro-batches to evaluate on; empty without eval data."""
        train = self.cfg.train
        size = train.per_device_eval_batch_size or train.per_device_train_batch_size
        return self.feed.evals(self.run, per_device_batch_size=size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank."""
        return self.position.state_dict()

    @ranks.collective
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint. Collective.

        Raises:
            DataError: it is of other data, its global batch does not divide over these ranks, or
                max_repeats ends the data before the last step.
        """
        self.position.load_state_dict(state)
        _ = self.accumulation, self.max_steps

    def steps(self, *, after: int = 0) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Give (step, this rank's micro-batches) of the steps after `after`, to the last.

        Collective at the first of them.
        The position does not move by itself: call `position.advance()` when a step is done.

        Raises:
            DataError: see `load_state_dict`; or a row of a stream is refused.
        """
        _, last = ranks.on_all(lambda: (self.accumulation, self.max_steps))
        read = self.feed.steps(
            self.run,
            max(0, last - after),
            per_device_batch_size=self.cfg.train.per_device_train_batch_size,
            workers=self.cfg.data.num_workers,
        )
        yield from enumerate(read, start=after + 1)

    def lines(self) -> list[str]:
        """Return what a run prints of its data at the start: sources, packing, global batch."""
        train, size = self.cfg.train, self.position.global_batch
        lines = [f"data       {line}" for line in self._source_lines()]
        if self.cfg.data.packing != "wrapped":
            lines.append(f"packing    {self.packing.packing}: {self.packing.why}")
        lines.append(
            f"batch      {size} samples = {train.per_device_train_batch_size} a device x "
            f"{self.accumulation} accumulated x {self.run.world_size} process(es) on "
            f"{self.run.device.type}"
        )
        if isinstance(self.feed, Feed) and size > len(self.feed):
            lines.append(
                f"WARNING: the global batch of {size:,} samples is larger than the training data "
                f"({len(self.feed):,} samples): each step reads it {size / len(self.feed):.1f} "
                "times; lower train.per_device_train_batch_size or gradient_accumulation_steps, or "
                "give more data"
            )
        return lines

    def reading_lines(self) -> list[str]:
        """Return what came of the rows of streams so far; see `StreamFeed.reading_lines`."""
        return [f"read       {line}" for line in self.feed.reading_lines()]

    def report(self) -> str:
        """Return the supervision report of fine-tuning as text; empty where nothing was encoded
        before the run.
        """
        encoded = [*self.encoded.trained, *self.encoded.evaluated]
        if not encoded or not isinstance(self.cfg, FinetuneConfig):
            return ""
        return render(self.encoded.report(self.tokenizer))

    def _source_lines(self) -> list[str]:
        feed, length = self.feed, self.feed.sequence_length
        how = {
            "wrapped": f"samples of {length} tokens",
            "bfd": f"samples of up to {length} tokens, packed",
            "none": f"samples of up to {length} tokens, padded",
        }[self.packing.packing]
        if isinstance(feed, StreamFeed):
            names = ", ".join(source.name for source in feed.sources)
            evals = sum(len(held) for held in feed.eval_sets.values())
            return [f"{names}: {how}, read while training; {evals:,} to evaluate"]
        several, lines = len(feed.parts) > 1, []
        for part in feed.parts:
            evals = len(feed.eval_sets.get(part.name, ()))
            line = f"{part.samples:,} {how}, to train on, {evals:,} to evaluate"
            if part.density is not None and self.packing.packing == "bfd":
                line += f"; {part.density:.1%} of them is tokens"
            dropped = [f"{n:,} {what}" for what, n in part.dropped.items() if n]
            line += f"; left over: {', '.join(dropped)}" if dropped else ""
            lines.append(f"{part.name}: {line}" if several else line)
        extra = sorted(set(feed.eval_sets) - {part.name for part in feed.parts})
        return lines + [f"{name}: {len(feed.eval_sets[name]):,} to evaluate" for name in extra]


def prepare_data(
    cfg: PretrainConfig | FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    run: Processes,
) -> TrainingData:
    """Return what the run reads; see `pretrain.prepare` and `finetune.prepare`. Collective."""
    rows = cfg.train.per_device_train_batch_size
    packing = ranks.on_main(lambda: choose_packing(cfg.data, model, rows, run.device.type))
    vocabulary = models.vocabulary_size(model)
    encoded = ranks.main_first(
        lambda: encode_sources(cfg, tokenizer, vocabulary, packing.packing, run.world_size)
    )
    data = TrainingData(cfg, encoded, packing, tokenizer, run)
    check_data(data)
    return data


def encode_sources(
    cfg: PretrainConfig | FinetuneConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    vocabulary: int,
    packing: Packing,
    world_size: int,
) -> EncodedData:
    """Read and encode the data; return what a run reads from.

    Encodes every row on all cores, cached on disk: call it on one rank first.

    Raises:
        DataError: see `load_sources`, `encode` and `Feed`; or nothing of a source would be learned.
    """
    data, train, finetune = cfg.data, cfg.train, isinstance(cfg, FinetuneConfig)

    def encoded(source: DataSource) -> EncodedSource:
        made = encode(source, tokenizer, data, vocabulary)
        if finetune:
            check_supervised(made, data.sequence_length)
        return made

    builtin: Literal["instructions", "text"] = "instructions" if finetune else "text"
    sources = load_sources(data, builtin=builtin, documents=not finetune)
    # Read before the training data is encoded, which may take an hour.
    others = load_sources(data, what="eval", documents=not finetune)
    formats, eval_formats = (
        {source.name: str(source.layout) for source in some} for some in (sources, others)
    )
    held_out = [encoded(source) for source in others]
    batch = train.per_device_train_batch_size * train.gradient_accumulation_steps * world_size
    settings: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch": batch,
        "eval_sources": held_out,
        "max_eval_samples": data.max_eval_samples,
    }
    shape = SampleShape(packing, data.sequence_length, pad_id(tokenizer))
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
    trained = [encoded(source) for source in sources]
    feed = Feed(trained, shape, eval_split=data.eval_split, **settings)
    return EncodedData(feed, trained, held_out, formats, eval_formats)


def choose_packing(
    data: DataConfig, model: PreTrainedModel, rows: int, device: str = "cpu"
) -> PackingChoice:
    """Decide on `data.packing: auto`, and refuse `bfd` where the model mixes packed samples.

    Tries it on a tiny copy of the model: 0.1 to 2 seconds for most types. Not collective.

    Args:
        data: `packing` and `sequence_length` are read.
        model: from `build_on_meta`, before adapters and sharding.
        rows: samples of a micro-batch.
        device: where the run computes.

    Raises:
        DataError: `bfd` was asked for, and the model does not keep packed samples apart.
    """
    asked = data.packing
    if asked == "wrapped" or asked == "none":
        return PackingChoice(asked, "as data.packing asks")
    verdict = packing_probe.keeps_apart(
        model.config,
        assets_of(model).model_class,
        sequence_length=data.sequence_length,
        rows=rows,
        device=device,
    )
    if verdict.ok:
        return PackingChoice("bfd", verdict.why)
    if asked == "bfd":
        raise DataError(
            f"data.packing bfd: {models.plain_name(model)} does not keep packed samples apart "
            f"({verdict.why}); set data.packing: none"
        )
    return PackingChoice("none", verdict.why)


def check_data(data: TrainingData) -> None:
    """Refuse data that cannot be trained on as the settings ask. Collective.

    Raises:
        DataError: there are fewer samples than ranks, ranks read different data, the global batch
            does not divide, or max_repeats ends the data before the last step.
        ConfigError: a setting compares or shows evaluations, and there is nothing to evaluate on.
    """
    ranks.on_all(lambda: data.feed.check_enough(ranks.world_size()))
    states = ranks.gather(data.position.state_dict())
    other = [rank for rank, state in enumerate(states) if state != states[0]]
    if other:
        theirs, ours = states[other[0]], states[0]
        names = [n for n in ours if theirs.get(n) != ours[n]]
        raise DataError(
            f"expected the same data on every rank, rank {other[0]} reads another than rank 0 "
            f"({', '.join(names)}: {[theirs.get(n) for n in names]} and "
            f"{[ours[n] for n in names]}); the files of all machines must be equal, or on storage "
            "that they share"
        )
    _check_evaluations(data.cfg, data.feed)
    ranks.on_all(lambda: (data.accumulation, data.max_steps))


def _check_evaluations(cfg: Any, feed: AnyFeed) -> None:
    needing = {
        "checkpoint.keep_best": bool(cfg.checkpoint.keep_best),
        "train.early_stopping_patience": getattr(cfg.train, "early_stopping_patience", None),
        "train.eval_prompts": getattr(cfg.train, "eval_prompts", None),
    }
    asked = [name for name, value in needing.items() if value]
    if not feed.eval_sets and asked:
        raise ConfigError(
            f"{' and '.join(asked)} need evaluations, and there is nothing to evaluate on: set "
            "data.eval_files, or a data.eval_split above 0 (nothing is split off a stream)"
        )
    kinds = ("loss", "perplexity")
    known = {f"eval_{kind}" for kind in kinds}
    if len(feed.eval_sets) > 1:
        known |= {f"eval_{name}_{kind}" for name in feed.eval_sets for kind in kinds}
    metric = retention(cfg.checkpoint).metric
    if metric not in known and {*asked} - {"train.eval_prompts"}:
        raise ConfigError(
            f"checkpoint.metric_for_best_model {metric} is none of what an evaluation gives: "
            f"{', '.join(sorted(known))}"
        )
