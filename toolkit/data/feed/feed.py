"""Encoded sources as this rank's micro-batches, step by step, and where the run stands.

    feed = Feed(sources, shape, seed=42, global_batch=64, eval_split=0.01)
    feed.position.load_state_dict(saved["data"])            # resuming
    max_steps = feed.steps_for(epochs=3)
    feed.check_steps(max_steps)
    for micro_batches in feed.steps(run, max_steps - first_step, per_device_batch_size=8):
        train_step(model, optimizer, micro_batches)
        feed.position.advance()
    for name, batches in feed.evals(run, per_device_batch_size=8).items():
        evaluate(model, batches)

`stream_feed.StreamFeed` gives the same of sources that are read while training.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from toolkit.data.feed.sets import (
    MicroBatch,
    Processes,
    SampleSet,
    SampleShape,
    check_names,
    eval_batches,
    held_out,
    to_evaluate,
)
from toolkit.data.order.grouping import ByLength
from toolkit.data.order.mixture import Mixture
from toolkit.data.order.position import (
    GlobalBatches,
    Indices,
    Order,
    Position,
    SampleOrder,
    accumulation_for,
)
from toolkit.data.samples.sequences import Joined, Packed, Padded
from toolkit.data.tokens.encode import EncodedSource
from toolkit.errors import DataError


@dataclass(frozen=True)
class SourceSamples:
    """What a source became."""

    name: str
    samples: int
    """Samples of a pass over it: packed ones, windows, or rows."""
    tokens: int
    """Tokens in them, without padding."""
    density: float | None
    """Share of the samples' room that is tokens; None where the batches decide on it (`none`)."""
    dropped: dict[str, int]
    """What is in no sample: `tokens` after the last window, `empty rows`."""
    cut: int
    """Rows of more than `sequence_length` tokens that became several samples or pieces."""
    held_out: int
    """Samples that were split off to evaluate on."""
    bins: tuple[int, int] | None = None
    """Of `bfd`: packed samples, and how many no packing can do without."""


class Feed:
    """Sources with all their rows at hand, as this rank's micro-batches. See the module's example.

    Making it packs the data: a quarter of a second for a million rows, and some 25 bytes a row
    while it lives.

    A sample is a packed one (`bfd`), a window (`wrapped`) or a row (`none`), and so is what weights
    and batch sizes count. Without weights every sample of all sources is read once a pass, in one
    order; with weights, or limits, see [Note: mixing] in `order/mixture.py`.

    Args:
        sources: encoded rows, at least one source.
        shape: how rows become samples.
        seed: of the order.
        global_batch: samples of an optimizer step on all ranks; a checkpoint's own replaces it.
        eval_sources: what to evaluate on.
        eval_split: share of each source that is held out where there are no `eval_sources`.
        max_eval_samples: evaluate on so many windows or rows of each source at most.

    Raises:
        DataError: no source, one without a sample, two of one name, or weights for some only.
    """

    position: Position
    """Where the run stands: the state of the data in a checkpoint."""
    parts: list[SourceSamples]
    """What each source became."""

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
        check_names(sources)
        self.shape, self.sequence_length, self.seed = shape, shape.sequence_length, seed
        share = 0.0 if eval_sources else eval_split
        split = [held_out(source, shape, share, max_eval_samples) for source in sources]
        train = [samples for samples, _ in split]
        self.eval_sets = to_evaluate(eval_sources, shape, max_eval_samples)
        for source, (_, held) in zip(sources, split, strict=True):
            if held is not None:
                self.eval_sets[source.name] = held
        self.parts = [
            _part(source.name, samples, shape, 0 if held is None else len(held))
            for source, (samples, held) in zip(sources, split, strict=True)
        ]
        self.data: Any = train[0] if len(train) == 1 else Joined(train)
        self.order = _order(sources, [len(samples) for samples in train], seed)
        reading = _reading(sources, train, shape)
        self.position = Position(len(self), seed, global_batch, reading=reading)

    def __len__(self) -> int:
        """Return the samples of a pass over all sources."""
        return len(self.data)

    def reading_lines(self) -> list[str]:
        """Return nothing: what came of the rows was known, and reported, before the run."""
        return []

    def tokens_of_step(self) -> float:
        """Return the mean of the tokens of a global batch, without padding, by weight."""
        share = self._shares()
        mean = sum(p.tokens / p.samples * s for p, s in zip(self.parts, share, strict=True))
        return mean * self.position.global_batch

    def _shares(self) -> list[float]:
        if isinstance(self.order, Mixture):
            return [s / sum(self.order.shares) for s in self.order.shares]
        return [part.samples / len(self) for part in self.parts]

    def steps_for(self, epochs: float) -> int:
        """Return the steps of `epochs` passes; call it after a checkpoint's position is loaded.

        A pass is as many samples as all sources hold. Where max_repeats ends the data inside the
        last batch, that batch is left out.

        Raises:
            DataError: max_repeats does not allow so many passes.
        """
        wanted = epochs * len(self)
        steps = math.ceil(wanted / self.position.global_batch)
        if self.order.total is not None and wanted <= self.order.total:
            steps = min(steps, self.order.total // self.position.global_batch)
        if steps < 1:
            raise DataError(
                f"expected data for at least one step of {self.position.global_batch} samples, "
                f"max_repeats allows {self.order.total} of "
                f"{', '.join(p.name for p in self.parts)}; lower "
                "train.per_device_train_batch_size or gradient_accumulation_steps, raise "
                "max_repeats, or give more data"
            )
        self.check_steps(steps)
        return steps

    def check_steps(self, max_steps: int) -> None:
        """Refuse more steps than max_repeats allows.

        Raises:
            DataError: names how many it allows.
        """
        total, batch = self.order.total, self.position.global_batch
        if total is not None and max_steps * batch > total:
            raise DataError(
                f"expected at most {total // batch} steps of {batch} samples: data.sources[...]"
                f".max_repeats allows {total} samples of {', '.join(p.name for p in self.parts)}, "
                f"{max_steps} steps were asked for; set train.max_steps to {total // batch}, "
                "raise max_repeats, or give more data"
            )

    def check_enough(self, world_size: int) -> None:
        """Refuse to train on fewer samples than there are ranks.

        Raises:
            DataError: ranks would train on the same sample at the same time.
        """
        if len(self) < world_size:
            raise DataError(
                f"expected at least one training sample for each of the {world_size} ranks, got "
                f"{len(self)} of {self.sequence_length} tokens; give more text, or set a smaller "
                "data.sequence_length or fewer processes"
            )

    def steps(
        self, run: Processes, count: int, *, per_device_batch_size: int, workers: int = 0
    ) -> Iterator[list[MicroBatch]]:
        """Give this rank's micro-batches of the next `count` steps, a list for each.

        They begin at the position, which does not move by itself: call `position.advance()` when a
        step is done.

        Raises:
            DataError: the global batch does not divide over the ranks, or max_repeats ends the
                data before.
        """
        if count < 1:
            return
        position = self.position
        self.check_steps(position.samples_seen // position.global_batch + count)
        each = accumulation_for(position.global_batch, per_device_batch_size, run.world_size)
        batches = GlobalBatches(
            self._read_in(),
            position.samples_seen,
            count,
            per_device_batch_size,
            each,
            run.world_size,
        )
        stream = iter(run.loader(self.data, batches, workers, self.shape.collate()))
        try:
            for _ in range(count):
                yield list(islice(stream, each))
        finally:
            del stream  # now: a traceback would keep its workers, which then end badly

    def _read_in(self) -> Indices:
        if self.shape.packing == "none":
            return ByLength(self.order, self.data.lengths, self.position.global_batch, self.seed)
        return self.order

    def evals(
        self, run: Processes, *, per_device_batch_size: int
    ) -> dict[str, Iterable[MicroBatch]]:
        """Return source name -> this rank's micro-batches to evaluate on; see `eval_batches`."""
        return eval_batches(run, self.eval_sets, self.shape, per_device_batch_size)


def _order(sources: Sequence[EncodedSource], sizes: list[int], seed: int) -> Order:
    weights = [source.weight for source in sources]
    limits = [source.max_repeats for source in sources]
    given = [w for w in weights if w is not None]
    if given and len(given) < len(weights):
        lacking = ", ".join(s.name for s in sources if s.weight is None)
        raise DataError(f"expected a weight for every source or for none, {lacking} has none")
    if not any(r is not None for r in limits) and (not given or len(sources) == 1):
        return SampleOrder(sum(sizes), seed)
    return Mixture(sizes, given or sizes, seed, limits)


def _reading(
    sources: Sequence[EncodedSource], train: list[SampleSet], shape: SampleShape
) -> dict[str, Any]:
    """Return what the samples depend on, for the checkpoint: see `Position`.

    Packing follows from the lengths of the rows, so these are told apart by a digest. What a single
    source is called does not matter.
    """
    reading: dict[str, Any] = {
        "data.packing": shape.packing,
        "data.sequence_length": shape.sequence_length,
    }
    if len(sources) > 1:
        reading["the sources"] = [source.name for source in sources]
    for source, samples in zip(sources, train, strict=True):
        of = f"of {source.name}" if len(sources) > 1 else "of the data"
        reading[f"the samples {of}"] = len(samples)
        if isinstance(samples, Packed | Padded):
            lengths = samples.pieces.lengths.astype("<i4").tobytes()
            digest = hashlib.blake2b(lengths, digest_size=8).hexdigest()
            reading[f"the lengths of the rows {of} (digest)"] = digest
        else:
            reading[f"the tokens {of}"] = samples.tokens_total
        if source.weight is not None and len(sources) > 1:
            reading[f"the weight {of}"] = source.weight
        if source.max_repeats is not None:
            reading[f"max_repeats {of}"] = source.max_repeats
    return reading


def _part(name: str, samples: SampleSet, shape: SampleShape, held: int) -> SourceSamples:
    n, room = len(samples), len(samples) * shape.sequence_length
    if not isinstance(samples, Packed | Padded):
        return SourceSamples(name, n, room, 1.0, {"tokens": samples.tokens_dropped}, 0, held)
    pieces = samples.pieces
    dropped = {"empty rows": pieces.empty}
    if isinstance(samples, Padded):
        return SourceSamples(name, n, samples.tokens, None, dropped, pieces.cut, held)
    plan = samples.plan
    bins = (len(plan), plan.lower_bound)
    return SourceSamples(name, n, plan.tokens, plan.density, dropped, pieces.cut, held, bins)
