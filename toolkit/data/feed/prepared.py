"""The feed of sources whose rows are all encoded before training starts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from toolkit.data.feed.feed import Batches, DataRank, Feed, build_samples, list_windows_or_rows
from toolkit.data.order.mixture import GROUPED_BATCHES, ByLength, Mixture, SampleOrder
from toolkit.data.order.permutation import permute
from toolkit.data.order.position import Position, train_batches
from toolkit.data.samples.sample_shape import Samples, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError

# Windows of the sample order that `samples_until` looks at in one step.
_WINDOWS = 20


@dataclass(frozen=True)
class SourceSamples:
    """Counts of one training source: its samples, their tokens, and items not trained on."""

    name: str
    samples: int
    """Number of samples in a pass: packs, windows, or rows."""
    tokens: int
    """Number of tokens in these samples, without padding."""
    density: float | None
    """Share of positions that are tokens; None if the padding depends on the micro-batch."""
    dropped: dict[str, int]
    """What is in no sample: `tokens` after the last window, or `empty rows`, and how many."""
    cut: int
    """Number of rows of more than `sequence_length` tokens, which became several samples."""
    held_out: int
    """Number of samples that were split off to evaluate on."""


class PreparedFeed(Feed):
    """The `Feed` of sources that are encoded before training starts.

    Without weights and `max_repeats`, each pass reads every sample of all sources once, in one
    shuffled order. Otherwise the sources are mixed; see [Note: mixing] in `order/mixture.py`.
    Packing a million rows takes a quarter of a second. The plan needs about 30 bytes a row.

    Args:
        sources: the encoded sources, at least one.
        shape: how rows become samples.
        seed: seed of the sample order.
        global_batch: number of samples in a step, over all ranks.
        eval_sources: sources to evaluate on.
        eval_split: fraction of each source that is held out to evaluate on. It is ignored if there
            are `eval_sources`.
        max_eval_samples: maximum number of windows or rows of each source to evaluate on.

    Raises:
        DataError: a source has no sample.
    """

    def __init__(
        self,
        sources: Sequence[EncodedSource],
        shape: SampleShape,
        *,
        seed: int,
        global_batch: int,
        eval_sources: Sequence[EncodedSource] = (),
        eval_split: float = 0.0,
        max_eval_samples: int | None = None,
    ) -> None:
        share = 0.0 if eval_sources else eval_split
        split = [split_held_out(source, shape, share, max_eval_samples) for source in sources]
        self.train = [samples for samples, _ in split]
        self.parts = [
            _count_samples(source, samples, held_out, shape)
            for source, (samples, held_out) in zip(sources, split, strict=True)
        ]
        self.data: ConcatDataset = ConcatDataset(self.train)
        sizes = [len(samples) for samples in self.train]
        weights = [source.weight for source in sources if source.weight is not None]
        limits = [source.max_repeats for source in sources]
        self.order: Mixture = SampleOrder(sum(sizes), seed)
        if any(limit is not None for limit in limits) or (weights and len(sources) > 1):
            self.order = Mixture(sizes, weights or sizes, seed, limits)
        self.sources, self.total = list(sources), self.order.total
        reading = _describe_order(sources, self.train, shape)
        position = Position(len(self), seed, global_batch, reading)
        super().__init__(shape, position, eval_sources, max_eval_samples)
        for source, (_, held_out) in zip(sources, split, strict=True):
            if held_out:
                self.eval_sets[source.name] = held_out

    def __len__(self) -> int:
        """Return the number of samples in a pass over all sources."""
        return len(self.data)

    def lines(self) -> list[str]:
        """Format the log lines that describe the data when a run starts."""
        lines = []
        extra = sorted(set(self.eval_sets) - {part.name for part in self.parts})
        for part in self.parts:
            evals = len(self.eval_sets.get(part.name, ()))
            line = f"{part.samples:,} {self.shape}, to train on"
            # The sources that are only evaluated on have lines of their own below.
            if evals or not extra:
                line += f", {evals:,} to evaluate"
            if self.shape.packing == "bfd":
                line += f"; {part.density:.1%} of the positions are tokens"
            dropped = [f"{count:,} {unit}" for unit, count in part.dropped.items() if count]
            line += f"; dropped: {', '.join(dropped)}" if dropped else ""
            lines.append(f"{part.name}: {line}" if len(self.parts) > 1 else line)
        return lines + [f"{name}: {len(self.eval_sets[name]):,} to evaluate" for name in extra]

    def steps_for(self, epochs: float) -> int:
        """Compute the number of steps in `epochs` passes over all sources, rounded up.

        A pass has as many samples as all sources together. If `max_repeats` ends the data within
        the last step, that step is dropped.

        Raises:
            DataError: `max_repeats` allows fewer steps.
        """
        # A pass is as many samples as all sources have. If max_repeats ends the data inside the
        # last batch, that batch is dropped.
        total, size = self.total, self.position.global_batch
        samples = epochs * len(self)
        steps = math.ceil(samples / size)
        if total is not None and samples <= total:
            steps = min(steps, total // size)
        if steps < 1:
            raise DataError(
                f"expected data for at least one step of {size} samples, but max_repeats allows "
                f"only {total} of {self.source_names}; lower train.per_device_train_batch_size or "
                "gradient_accumulation_steps, raise max_repeats, or add data"
            )
        self.check_steps(steps)
        return steps

    def check_enough(self, world_size: int) -> None:
        """Raise DataError if there are fewer samples than data ranks."""
        if len(self) < world_size:
            raise DataError(
                f"expected at least one training sample for each of the {world_size} ranks, got "
                f"{len(self)} of {self.shape.sequence_length} tokens; add text, or use a smaller "
                "data.sequence_length or fewer processes"
            )

    def describe_samples(self, before: int, run: DataRank) -> list[str]:
        """Describe the samples that this rank reads in step `before + 1`, one text per sample.

        A text has the name of the source and the numbers of the rows in the sample.
        """
        size, ends = self.position.global_batch, self.data.cumulative_sizes
        descriptions = []
        mine = self._sample_order().indices(before * size, size)[run.rank :: run.world_size]
        for index in mine.tolist():
            source = int(np.searchsorted(ends, index, side="right"))
            number = index - (ends[source - 1] if source else 0)
            rows = self.train[source].describe_rows(number)
            descriptions.append(f"{self.parts[source].name} {rows}")
        return descriptions

    def samples_until(self, max_steps: int) -> list[np.ndarray]:
        """List the samples that the run still reads, from the current position to step `max_steps`.

        Costs a second for about ten million positions.

        Returns:
            One int64 array per source with the numbers of its samples, ascending, without repeats.
        """
        size, order = self.position.global_batch, self._sample_order()
        stop, block = max_steps * size, _WINDOWS * GROUPED_BATCHES * size
        is_read = np.zeros(len(self), bool)
        for start in range(self.position.samples_seen, stop, block):
            is_read[order.indices(start, min(block, stop - start))] = True
            if is_read.all():
                break
        sizes = [len(samples) for samples in self.train]
        return [np.flatnonzero(part) for part in np.split(is_read, np.cumsum(sizes)[:-1])]

    def _sample_order(self) -> Mixture | ByLength:
        """Return the order in which samples are read.

        With packing `none`, samples of similar length share a global batch.
        """
        if self.shape.packing != "none":
            return self.order
        lengths = np.concatenate([samples.pieces.lengths for samples in self.train])
        return ByLength(self.order, lengths, self.position.global_batch, self.position.seed)

    def _read_batches(
        self, run: DataRank, count: int, size: int, accumulation: int, workers: int
    ) -> Batches:
        """Build the data loader for this rank's micro-batches of the next `count` steps."""
        order, start = self._sample_order(), self.position.samples_seen
        batches = train_batches(order, start, count, size, accumulation, run.rank, run.world_size)
        return run.loader(self.data, batches, workers, self.shape.batch)

    def _mean_tokens_and_weights(self) -> list[tuple[float, float]]:
        """Return (mean tokens of a sample, mixing weight) for each training source."""
        shares = self.order.shares
        if len(shares) < len(self.parts):
            # There is one order over all sources.
            shares = [part.samples for part in self.parts]
        return [(p.tokens / p.samples, s) for p, s in zip(self.parts, shares, strict=True)]


def split_held_out(
    source: EncodedSource, shape: SampleShape, share: float, max_held_out: int | None
) -> tuple[Samples, Samples | None]:
    """Split a source into samples to train on and samples that are held out to evaluate on.

    The last windows are held out if packing is `wrapped`, else rows drawn at random. The draw
    ignores the seed of the run, so that runs with different seeds can be compared.

    Args:
        source: the encoded rows.
        shape: how rows become samples.
        share: fraction of the windows or rows to hold out. If it is above 0, at least one is held
            out and at least one is kept; a source with only one is not split.
        max_held_out: maximum number of held-out windows or rows to evaluate on. The excess is not
            used for training either.

    Returns:
        (samples to train on, held-out samples). The latter is None if nothing is held out.

    Raises:
        DataError: the source gives no sample.
    """
    units = list_windows_or_rows(source, shape)
    count = min(max(1, round(len(units) * share)), len(units) - 1) if share > 0 else 0
    if count < 1:
        return build_samples(source, shape), None
    train, held_out = units[:-count], units[-count:]
    if isinstance(units, np.ndarray):
        held_out = permute(units[:count], len(units), 0, 0)
        train, held_out = np.setdiff1d(units, held_out), np.sort(held_out[:max_held_out])
    return build_samples(source, shape, train), build_samples(
        source, shape, held_out[:max_held_out]
    )


def _describe_order(
    sources: Sequence[EncodedSource], train: list[Samples], shape: SampleShape
) -> dict[str, Any]:
    """List the settings and data properties that determine the sample order, except the seed.

    `Position` stores them in checkpoints and refuses a resume if they differ. The name of a source
    is included only if there are several sources, so that a single source can be renamed.

    Returns:
        Description for error messages -> JSON value.
    """
    several = len(sources) > 1
    reading: dict[str, Any] = {
        "data.packing": shape.packing,
        "data.sequence_length": shape.sequence_length,
    }
    if several:
        reading["the sources"] = [source.name for source in sources]
    for source, samples in zip(sources, train, strict=True):
        of = f"of {source.name}" if several else "of the data"
        reading[f"the samples {of}"] = len(samples)
        if shape.packing == "wrapped":
            reading[f"the tokens {of}"] = samples.pieces.rows.total
        else:
            # The packing depends on the lengths alone.
            lengths = samples.pieces.lengths.astype("<i4").tobytes()
            digest = hashlib.blake2b(lengths, digest_size=8).hexdigest()
            reading[f"the lengths of the rows {of} (digest)"] = digest
        if source.weight is not None and several:
            reading[f"the weight {of}"] = source.weight
        if source.max_repeats is not None:
            reading[f"max_repeats {of}"] = source.max_repeats
    return reading


def _count_samples(
    source: EncodedSource, samples: Samples, held_out: Samples | None, shape: SampleShape
) -> SourceSamples:
    """Count the samples and tokens of a source, and its dropped and held-out items."""
    n, pieces = len(samples), samples.pieces
    tokens = int(pieces.lengths.sum(dtype=np.int64))
    density = None if shape.packing == "none" else tokens / (n * shape.sequence_length)
    return SourceSamples(
        source.name, n, tokens, density, pieces.dropped, pieces.cut, len(held_out or ())
    )
