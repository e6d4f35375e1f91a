"""The order of samples: shuffled epochs of one source, or several sources mixed by weight.

[Note: sample order]
Training reads an endless sequence of positions 0, 1, 2, ... Position p is the sample
`permute(p % n, n, seed, p // n)`: epoch after epoch, each in a different order. A batch may contain
samples of two epochs. The order does not depend on the number of ranks, and p is the only state, so
that a run resumes exactly, on any number of ranks, without reading earlier samples again.

[Note: mixing]
The sources are the leaves of a binary tree. Among the first q samples of a node, its left side has
floor(q * a / (a + b)), where a and b are the weights of its sides, and the right side has the
others. So the sample at position p follows from p by one division for each level of the tree;
nothing is random, and nothing is stored. At any position, the count of a source is at most 2 away
from its share (a few, with many sources of very different weights).

A source that may not be read again is used up at a position that is known in advance. There a new
phase begins, with a tree of the other sources.

[Note: grouping by length]
To waste little of a padded batch on padding, samples of similar length share a batch. The order of
samples is cut into windows of some global batches. In a window, the samples are sorted by length
and cut into global batches again, which are then read in a shuffled order. The samples of batch k
depend only on (seed, global batch, k), so a run can resume inside a window, on any number of ranks.

The next pass of a sample must not come before the sample itself. So only batches in which no pass
of a source ends are regrouped, and only with others of the same passes. Other batches stay as they
are.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from toolkit.data.order.permutation import derived_seed, permute

GROUPED_BATCHES = 50
"""Number of global batches whose samples are sorted by length together."""
# Weights become integers with about this sum, so that divisions are exact in 64 bits.
_SHARES = 1 << 26
# Positions beyond this would not be exact. Nobody reads as many samples.
_FAR = 1 << 36


class DrawnSamples(NamedTuple):
    """Three int64 arrays about consecutive positions: sample numbers, sources and passes."""

    samples: np.ndarray
    sources: np.ndarray
    """Number of the source of each sample."""
    passes: np.ndarray
    """Number of complete passes over that source before each sample."""


class _Phase(NamedTuple):
    """A range of positions in which the same sources are mixed, until one source is used up."""

    start: int
    """The first position."""
    drawn: tuple[int, ...]
    """Number of samples of each source before that position."""
    active: tuple[int, ...]
    """Sources that are not used up."""


class Mixture:
    """The sequence of samples of several sources, mixed by weight. See [Note: mixing].

    Samples are numbered over all sources: sample i of source s has the number
    `sizes[0] + ... + sizes[s - 1] + i`.

    Args:
        sizes: number of samples of each source.
        weights: relative number of samples that each source contributes; above 0.
        seed: seed of the order within the sources.
        max_repeats: maximum number of passes over each source, which may be fractional. None means
            no limit.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        max_repeats: Sequence[float | None] | None = None,
    ) -> None:
        limits = max_repeats or [None] * len(sizes)
        self.sizes, self.shares = tuple(sizes), integer_shares(weights)
        self.seeds = [derived_seed(seed, "source", s) for s in range(len(sizes))]
        self._limits = {
            s: max(1, int(sizes[s] * limit + 1e-9))
            for s, limit in enumerate(limits)
            if limit is not None
        }
        self._firsts = np.cumsum(self.sizes) - self.sizes
        self._phases: list[_Phase] = []
        # Number of positions; None if the sequence has no end.
        self.total = self._compute_phases()

    def draws(self, start: int, count: int) -> DrawnSamples:
        """Return the samples at positions [start, start + count), with their sources and passes.

        The last position must be below `total`, the number of positions; else an assertion fails.
        """
        stop = start + count
        assert self.total is None or stop <= self.total
        positions = np.arange(start, stop, dtype=np.int64)
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        ends = [phase.start for phase in self._phases[1:]] + [stop]
        for phase, end in zip(self._phases, ends, strict=True):
            here = slice(max(phase.start - start, 0), max(min(end, stop) - start, 0))
            which, turn = source_at_turn(phase.active, self.shares, positions[here] - phase.start)
            sources[here], turns[here] = which, turn + np.array(phase.drawn, np.int64)[which]
        passes, at = np.divmod(turns, np.array(self.sizes, np.int64)[sources])
        samples = np.empty_like(positions)
        for source, epoch in set(zip(sources.tolist(), passes.tolist(), strict=True)):
            mask = (sources == source) & (passes == epoch)
            numbers = permute(at[mask], self.sizes[source], self.seeds[source], epoch)
            samples[mask] = numbers + self._firsts[source]
        return DrawnSamples(samples, sources, passes)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the numbers of the samples at positions [start, start + count); int64."""
        return self.draws(start, count).samples

    def counts(self, position: int) -> list[int]:
        """Return the number of samples of each source that come before a position."""
        phase = next(p for p in reversed(self._phases) if p.start <= position)
        here = samples_per_source(phase.active, self.shares, position - phase.start)
        return [drawn + here.get(source, 0) for source, drawn in enumerate(phase.drawn)]

    def _compute_phases(self) -> int | None:
        """Fill `_phases`, and return the number of positions; None if the sequence never ends.

        The sequence ends when all sources have used up their `max_repeats`.
        """
        start, drawn = 0, [0] * len(self.sizes)
        active = tuple(range(len(self.sizes)))
        while active:
            self._phases.append(_Phase(start, tuple(drawn), active))
            start = min(
                (self._find_exhaustion(s) for s in active if s in self._limits), default=_FAR
            )
            if start >= _FAR:
                return None
            drawn = self.counts(start)
            active = tuple(s for s in active if drawn[s] != self._limits.get(s))
        return start

    def _find_exhaustion(self, source: int) -> int:
        """Return the number of positions after which `source` has used up its `max_repeats`.

        The result assumes that the last phase of `_phases` does not end before.
        """
        begin, limit = self._phases[-1].start, self._limits[source]
        return bisect_left(range(_FAR), limit, lo=begin, key=lambda p: self.counts(p)[source])


class SampleOrder(Mixture):
    """An endless sequence of epochs over `n` samples, each shuffled. See [Note: sample order]."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__([n], [1], seed)
        self.seeds = [seed]


class ByLength:
    """A sample order that is regrouped so that samples of similar length share a global batch.

    See [Note: grouping by length].

    Args:
        order: the sample order to regroup.
        lengths: number of tokens of each sample.
        global_batch: number of samples in a step.
        seed: seed of the run. Windows of `GROUPED_BATCHES` batches are sorted by length, and their
            batches are shuffled.
    """

    def __init__(self, order: Mixture, lengths: np.ndarray, global_batch: int, seed: int) -> None:
        self.order, self.lengths, self.seed = order, lengths, derived_seed(seed, "lengths")
        self.global_batch = global_batch
        self.window_size = GROUPED_BATCHES * global_batch
        # A window is read in parts, one step at a time.
        self._window = lru_cache(maxsize=1)(self._regroup_window)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the numbers of the samples at positions [start, start + count); int64."""
        first, at = divmod(start, self.window_size)
        last = -(-(start + count) // self.window_size)
        windows = [self._window(number) for number in range(first, last)]
        return np.concatenate([np.zeros(0, np.int64), *windows])[at : at + count]

    def _regroup_window(self, number: int) -> np.ndarray:
        """Return the samples of window `number` in their new order; int64.

        A window has `GROUPED_BATCHES` global batches. Its samples are sorted by length, cut into
        batches, and the batches are shuffled. A batch that has two passes of a source is not
        changed, and no sample moves into another pass. Samples after the last complete batch stay.
        """
        start, stop = number * self.window_size, (number + 1) * self.window_size
        stop = stop if self.order.total is None else min(stop, self.order.total)
        draws = self.order.draws(start, stop - start)
        lengths, size = self.lengths[draws.samples], self.global_batch
        places = np.arange(len(lengths))
        for first, last in _single_pass_ranges(draws, size):
            here = slice(first * size, last * size)
            by_length = places[here][np.argsort(lengths[here], kind="stable")]
            order = permute(np.arange(last - first), last - first, self.seed, start + first)
            places[here] = by_length.reshape(-1, size)[order].reshape(-1)
        return draws.samples[places]


def _single_pass_ranges(draws: DrawnSamples, global_batch: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) of batches in which each source stays within one pass.

    `end` is excluded. A batch with samples of two passes of a source belongs to no range.
    """
    began, passes = 0, dict[int, int]()
    batches = len(draws.samples) // global_batch
    for batch in range(batches):
        here = slice(batch * global_batch, (batch + 1) * global_batch)
        pairs = set(zip(draws.sources[here].tolist(), draws.passes[here].tolist(), strict=True))
        has_one_pass = len(pairs) == len({source for source, _ in pairs})
        if not has_one_pass or any(passes.get(source, epoch) != epoch for source, epoch in pairs):
            if batch > began:
                yield began, batch
            began, passes = (batch if has_one_pass else batch + 1), {}
        passes |= dict(pairs) if has_one_pass else {}
    if batches > began:
        yield began, batches


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Convert weights to positive integers of the same proportion, up to rounding.

    Weights that are integers already are kept, unless they are very large.
    """
    # If the weights are the sizes of the sources, a pass has each sample exactly once.
    if all(w == int(w) for w in weights) and sum(weights) <= _SHARES:
        return [int(w) for w in weights]
    total = math.fsum(weights)
    return [max(1, round(w / total * _SHARES)) for w in weights]


def samples_per_source(active: Sequence[int], shares: Sequence[int], turns: Any) -> dict[int, Any]:
    """Count the samples of each source among the first `turns` samples of a mixture.

    Args:
        active: indices of the sources that are mixed, at least one.
        shares: integer weights of all sources.
        turns: number of samples, an integer or an array of them.

    Returns:
        Index of each active source -> number of its samples, of the type of `turns`.
    """
    if len(active) == 1:
        return {active[0]: turns}
    first_half, second_half = active[: len(active) // 2], active[len(active) // 2 :]
    weight = sum(shares[source] for source in first_half)
    total_weight = sum(shares[source] for source in active)
    turns_of_first = turns * weight // total_weight
    counts = samples_per_source(first_half, shares, turns_of_first)
    return counts | samples_per_source(second_half, shares, turns - turns_of_first)


def source_at_turn(
    active: Sequence[int], shares: Sequence[int], turns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find the source of the samples at the given positions of a mixture.

    Args:
        active: indices of the sources that are mixed.
        shares: integer weights of all sources.
        turns: positions in the mixture, from 0; int64.

    Returns:
        (index of the source at each position, number of earlier samples of that source): two int64
        arrays of the shape of `turns`.
    """
    before, after = (
        np.array(list(samples_per_source(active, shares, n).values())) for n in (turns, turns + 1)
    )
    which = np.argmax(after > before, axis=0)
    return np.array(active)[which], np.take_along_axis(before, which[None], axis=0)[0]
