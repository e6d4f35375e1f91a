"""Sources with all their rows at hand, as samples to train on and samples to evaluate on."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from toolkit.data.feed.feed import Batches, DataRank, Feed, build_samples, list_units
from toolkit.data.order.grouping import WINDOW, ByLength
from toolkit.data.order.mixture import Mixture, SampleOrder
from toolkit.data.order.permutation import permute
from toolkit.data.order.position import Position, train_batches
from toolkit.data.samples.sample_shape import Samples, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError

_WINDOWS = 20  # of an order that are looked at together


@dataclass(frozen=True)
class SourceSamples:
    """What a source became."""

    name: str
    samples: int  # of a pass over it: packed ones, windows, or rows
    tokens: int  # in them, without padding
    density: float | None  # share of the positions that hold tokens; None where batches decide
    dropped: dict[str, int]  # what is in no sample: `tokens` after the last window, `empty rows`
    cut: int  # rows of more than `sequence_length` tokens that became several samples or pieces
    split_held_out: int  # samples that were split off to evaluate on


class PreparedFeed(Feed):
    """Encoded sources, at least one, as this rank's micro-batches; see `Feed`.

    Making it packs the data: a quarter of a second for a million rows, and some 30 bytes a row
    while it lives. Without weights every sample of all sources is read once a pass, in one order;
    with weights (of all sources) or limits see [Note: mixing] in `order/mixture.py`. `eval_split`
    of each source is held out where there are no `eval_sources`. A source without a sample is a
    DataError.
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
        self.parts = [_part(s, *pair, shape) for s, pair in zip(sources, split, strict=True)]
        self.data: ConcatDataset = ConcatDataset(self.train)
        sizes = [len(samples) for samples in self.train]
        weights = [source.weight for source in sources if source.weight is not None]
        limits = [source.max_repeats for source in sources]
        self.order: Mixture = SampleOrder(sum(sizes), seed)
        if any(limit is not None for limit in limits) or (weights and len(sources) > 1):
            self.order = Mixture(sizes, weights or sizes, seed, limits)
        self.sources, self.total = list(sources), self.order.total
        position = Position(len(self), seed, global_batch, _reading(sources, self.train, shape))
        super().__init__(shape, position, eval_sources, max_eval_samples)
        held_outs = zip(sources, split, strict=True)
        self.eval_sets |= {source.name: held for source, (_, held) in held_outs if held}

    def __len__(self) -> int:
        """Return the samples of a pass over all sources."""
        return len(self.data)

    def lines(self) -> list[str]:
        lines = []
        extra = sorted(set(self.eval_sets) - {part.name for part in self.parts})
        for part in self.parts:
            evals = len(self.eval_sets.get(part.name, ()))
            line = f"{part.samples:,} {self.shape}, to train on"
            if evals or not extra:  # else the lines of the evaluation sources follow
                line += f", {evals:,} to evaluate"
            if self.shape.packing == "bfd":
                line += f"; {part.density:.1%} of the positions are tokens"
            dropped = [f"{n:,} {what}" for what, n in part.dropped.items() if n]
            line += f"; left over: {', '.join(dropped)}" if dropped else ""
            lines.append(f"{part.name}: {line}" if len(self.parts) > 1 else line)
        return lines + [f"{name}: {len(self.eval_sets[name]):,} to evaluate" for name in extra]

    def steps_for(self, epochs: float) -> int:
        # A pass is as many samples as all sources hold. Where max_repeats ends the data inside the
        # last batch, that batch is left out.
        wanted, total, size = epochs * len(self), self.total, self.position.global_batch
        steps = math.ceil(wanted / size)
        if total is not None and wanted <= total:
            steps = min(steps, total // size)
        if steps < 1:
            raise DataError(
                f"expected data for at least one step of {size} samples, max_repeats allows "
                f"{total} of {self.names}; lower train.per_device_train_batch_size or "
                "gradient_accumulation_steps, raise max_repeats, or give more data"
            )
        self.check_steps(steps)
        return steps

    def check_enough(self, world_size: int) -> None:
        """Refuse fewer samples than ranks, which would train on one sample at the same time."""
        if len(self) < world_size:
            raise DataError(
                f"expected at least one training sample for each of the {world_size} ranks, got "
                f"{len(self)} of {self.shape.sequence_length} tokens; give more text, or set a "
                "smaller data.sequence_length or fewer processes"
            )

    def samples_of(self, before: int, run: DataRank) -> list[str]:
        size, ends = self.position.global_batch, self.data.cumulative_sizes
        told = []
        mine = self._ordered().indices(before * size, size)[run.rank :: run.world_size]
        for index in mine.tolist():
            source = int(np.searchsorted(ends, index, side="right"))
            own = index - (ends[source - 1] if source else 0)
            told.append(f"{self.parts[source].name} {self.train[source].rows(own)}")
        return told

    def samples_until(self, max_steps: int) -> list[np.ndarray]:
        """Return the samples of each source that the steps from the position up to `max_steps`
        read, each once, ascending; int64. Costs a second for some ten million positions.
        """
        size, order = self.position.global_batch, self._ordered()
        stop, block = max_steps * size, _WINDOWS * WINDOW * size
        is_read = np.zeros(len(self), bool)
        for start in range(self.position.samples_seen, stop, block):
            is_read[order.indices(start, min(block, stop - start))] = True
            if is_read.all():
                break
        sizes = [len(samples) for samples in self.train]
        return [np.flatnonzero(part) for part in np.split(is_read, np.cumsum(sizes)[:-1])]

    def _ordered(self) -> Mixture | ByLength:
        if self.shape.packing != "none":
            return self.order
        lengths = np.concatenate([samples.pieces.lengths for samples in self.train])
        return ByLength(self.order, lengths, self.position.global_batch, self.position.seed)

    def _read(self, run: DataRank, count: int, size: int, each: int, workers: int) -> Batches:
        order, start = self._ordered(), self.position.samples_seen
        batches = train_batches(order, start, count, size, each, run.rank, run.world_size)
        return run.loader(self.data, batches, workers, self.shape.batch)

    def _means(self) -> list[tuple[float, float]]:
        shares = self.order.shares
        if len(shares) < len(self.parts):  # one order over all of them
            shares = [part.samples for part in self.parts]
        return [(p.tokens / p.samples, s) for p, s in zip(self.parts, shares, strict=True)]


def split_held_out(
    source: EncodedSource, shape: SampleShape, share: float, most: int | None
) -> tuple[Samples, Samples | None]:
    """Return the samples of `source` to train on, and those that are held out of it, if any.

    Of windows the last `share` is held out, else `share` of the rows, drawn alike for every seed,
    so that runs with unlike seeds compare: at least one where `share` is above 0, and not all. Of
    what is held out at most `most` are evaluated on; training does not get the others either.
    """
    units = list_units(source, shape)
    held = min(max(1, round(len(units) * share)), len(units) - 1) if share > 0 else 0
    if held < 1:
        return build_samples(source, shape), None
    train, evaluated = units[:-held], units[-held:]
    if isinstance(units, np.ndarray):
        evaluated = permute(units[:held], len(units), 0, 0)
        train, evaluated = np.setdiff1d(units, evaluated), np.sort(evaluated[:most])
    return build_samples(source, shape, train), build_samples(source, shape, evaluated[:most])


def _reading(
    sources: Sequence[EncodedSource], train: list[Samples], shape: SampleShape
) -> dict[str, Any]:
    """Return what the samples depend on (see `Position`); the name of a single source does not."""
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
            lengths = samples.pieces.lengths.astype("<i4").tobytes()  # packing follows from them
            digest = hashlib.blake2b(lengths, digest_size=8).hexdigest()
            reading[f"the lengths of the rows {of} (digest)"] = digest
        if source.weight is not None and several:
            reading[f"the weight {of}"] = source.weight
        if source.max_repeats is not None:
            reading[f"max_repeats {of}"] = source.max_repeats
    return reading


def _part(
    source: EncodedSource, samples: Samples, evaluated: Samples | None, shape: SampleShape
) -> SourceSamples:
    n, pieces = len(samples), samples.pieces
    tokens = int(pieces.lengths.sum(dtype=np.int64))
    density = None if shape.packing == "none" else tokens / (n * shape.sequence_length)
    held = len(evaluated or ())
    return SourceSamples(source.name, n, tokens, density, pieces.dropped, pieces.cut, held)
