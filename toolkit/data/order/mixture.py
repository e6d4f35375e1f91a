"""Which sample is read at which position: in one order, or from several sources by their weights.

[Note: sample order]
Training reads one endless sequence of positions 0, 1, 2, ... Position p is sample
`permute(p % n, n, seed, p // n)`: epoch after epoch, each in an order of its own, and a batch may
reach across the border of two. Nothing in it knows the number of ranks, and nothing is remembered
but p, so that a run continues exactly, on any number of ranks, without reading what it has seen.

[Note: mixing]
The sources are the leaves of a binary tree. Of the first q samples that a node gives, its left side
gives floor(q * a / (a + b)), where a and b are the weights of its sides, and the right side the
rest. So which sample is read at position p follows from p by one division for each level of the
tree: nothing is drawn at random, nothing is remembered. At any p, not only in the long run, a
source's count is within 2 (or, with many sources of very unlike weights, a few) of its share.

A source that may not be read again is used up at a position that is known beforehand: there a new
phase begins, with a tree of those that remain.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from toolkit.data.order.permutation import derived_seed, permute

_SHARES = 1 << 26  # weights become whole parts of about this many: exact division in 64 bits
_FAR = 1 << 36  # positions beyond this would not be exact; more samples than anyone reads


class DrawnSamples(NamedTuple):
    """What is read at some positions: int64 arrays."""

    samples: np.ndarray
    sources: np.ndarray  # which of those that are mixed each is of
    passes: np.ndarray  # how many times that source was read through before


class _Phase(NamedTuple):
    start: int  # position at which it begins
    drawn: tuple[int, ...]  # samples that each source has given before it
    active: tuple[int, ...]  # the sources that still give


class Mixture:
    """The sequence of samples of several sources, mixed by weight. See [Note: mixing].

    Samples are numbered through: sample i of source s is `sizes[0] + ... + sizes[s - 1] + i`.
    `weights` above 0 say how many samples each gives, relative to the others; `max_repeats` how
    many passes, also a fraction of one, at most (None: no limit).
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
        self.total = self._plan()  # positions there are; None: no end

    def draws(self, start: int, count: int) -> DrawnSamples:
        """Return what is read at the positions from `start` up to before `start + count`, which
        `total` bounds.
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
            found = permute(at[mask], self.sizes[source], self.seeds[source], epoch)
            samples[mask] = found + self._firsts[source]
        return DrawnSamples(samples, sources, passes)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples of `draws`; int64."""
        return self.draws(start, count).samples

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source are among the first `position`."""
        phase = next(p for p in reversed(self._phases) if p.start <= position)
        here = samples_per_source(phase.active, self.shares, position - phase.start)
        return [drawn + here.get(source, 0) for source, drawn in enumerate(phase.drawn)]

    def _plan(self) -> int | None:
        """Find the phases; return where the last one ends."""
        start, drawn = 0, [0] * len(self.sizes)
        active = tuple(range(len(self.sizes)))
        while active:
            self._phases.append(_Phase(start, tuple(drawn), active))
            start = min((self._used_up(s) for s in active if s in self._limits), default=_FAR)
            if start >= _FAR:
                return None
            drawn = self.counts(start)
            active = tuple(s for s in active if drawn[s] != self._limits.get(s))
        return start

    def _used_up(self, source: int) -> int:
        """Return the first position before which `source`, of the last phase, gave its limit."""
        begin, limit = self._phases[-1].start, self._limits[source]
        return bisect_left(range(_FAR), limit, lo=begin, key=lambda p: self.counts(p)[source])


class SampleOrder(Mixture):
    """The endless sequence of `n` samples that are read in one order. See [Note: sample order]."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__([n], [1], seed)
        self.seeds = [seed]


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Return the weights as integers above 0 in (almost) the same proportion."""
    # Where the weights are sizes, as many samples as there are hold each exactly once.
    if all(w == int(w) for w in weights) and sum(weights) <= _SHARES:
        return [int(w) for w in weights]
    total = math.fsum(weights)
    return [max(1, round(w / total * _SHARES)) for w in weights]


def samples_per_source(active: Sequence[int], shares: Sequence[int], turns: Any) -> dict[int, Any]:
    """Return how many of the first `turns` (an integer or an array) each of `active` gives."""
    if len(active) == 1:
        return {active[0]: turns}
    left, right = active[: len(active) // 2], active[len(active) // 2 :]
    part, whole = sum(shares[s] for s in left), sum(shares[s] for s in active)
    of_left = turns * part // whole
    return samples_per_source(left, shares, of_left) | samples_per_source(
        right, shares, turns - of_left
    )


def source_at_turn(
    active: Sequence[int], shares: Sequence[int], turns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source that is read at each of `turns`, and how many samples it gave before.

    `turns` are positions in the mixture of the `active` sources, int64; `shares` those of all.
    """
    before, after = (
        np.array(list(samples_per_source(active, shares, n).values())) for n in (turns, turns + 1)
    )
    which = np.argmax(after > before, axis=0)
    return np.array(active)[which], np.take_along_axis(before, which[None], axis=0)[0]
