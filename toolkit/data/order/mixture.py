"""Several sources read as one sequence, each with its share.

[Note: mixing]
The sources are the leaves of a binary tree. Of the first q samples that a node gives, its left side
gives floor(q * a / (a + b)), where a and b are the weights of its sides, and the right side the
rest. So how many samples of a source are among the first p, and with it which sample is read at
position p, follows from p by one division for each level of the tree: nothing is drawn at random,
nothing is remembered. At any p, not only in the long run, a source's count is within 2 (or, with
many sources of very unlike weights, a few) of its share.

A source that may not be read again is used up at a position that is known beforehand: there a new
phase begins, with a tree of those that remain. Within a source the samples come in its own order,
pass after pass (see [Note: sample order] in `position.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.data.order.position import DrawnSamples, derived_seed, permute
from toolkit.errors import DataError

_SHARES = 1 << 26  # weights become whole parts of about this many: exact division in 64 bits
_FAR = 1 << 36  # positions beyond this would not be exact; more samples than anyone reads


@dataclass(frozen=True)
class _Phase:
    start: int
    """Position at which it begins."""
    drawn: tuple[int, ...]
    """Samples that each source has given before it."""
    active: tuple[int, ...]
    """The sources that still give."""


class Mixture:
    """The sequence of samples of several sources, mixed by weight. See [Note: mixing].

    Samples are numbered through: sample i of source s is `sizes[0] + ... + sizes[s - 1] + i`.

    Args:
        sizes: samples of each source.
        weights: how many samples each gives, relative to the others.
        seed: of the orders.
        max_repeats: passes over each source at most, also a fraction of one; None: no limit.

    Raises:
        DataError: no source, an empty one, or a weight or limit that is not above 0.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        max_repeats: Sequence[float | None] | None = None,
    ) -> None:
        limits = max_repeats or [None] * len(sizes)
        if not sizes or min(sizes) < 1:
            raise DataError(f"expected sources with a sample each to mix, got {list(sizes)}")
        if min(weights) <= 0 or any(r is not None and r <= 0 for r in limits):
            raise DataError(
                f"expected weights and max_repeats above 0, got {list(weights)} and {list(limits)}"
            )
        self.sizes = tuple(sizes)
        self.shares = shares(weights)
        self.seeds = [derived_seed(seed, "source", s) for s in range(len(sizes))]
        self.caps = [
            None if r is None else max(1, int(n * r + 1e-9))
            for n, r in zip(sizes, limits, strict=True)
        ]
        self._firsts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        self._phases, self.total = self._plan()

    def draws(self, start: int, count: int) -> DrawnSamples:
        """Return what is read at the positions from `start` up to before `start + count`.

        Raises:
            DataError: they reach beyond the last sample that all limits allow.
        """
        if self.total is not None and start + count > self.total:
            raise DataError(
                f"expected positions below {self.total}, where all sources have been read as often "
                f"as max_repeats allows, got up to {start + count}"
            )
        sources = np.empty(count, np.int64)
        turns = np.empty(count, np.int64)
        for phase, end in zip(
            self._phases, [p.start for p in self._phases[1:]] + [start + count], strict=True
        ):
            low, high = max(start, phase.start), min(start + count, end)
            if low >= high:
                continue
            here = slice(low - start, high - start)
            which, turn = locate(phase.active, self.shares, np.arange(low, high) - phase.start)
            sources[here] = which
            turns[here] = turn + np.array(phase.drawn, np.int64)[which]
        sizes = np.array(self.sizes, np.int64)[sources]
        passes, at = turns // sizes, turns % sizes
        samples = np.empty(count, np.int64)
        for source in np.unique(sources):
            of_it = sources == source
            for epoch in np.unique(passes[of_it]):
                mask = of_it & (passes == epoch)
                found = permute(at[mask], self.sizes[source], self.seeds[source], int(epoch))
                samples[mask] = found + self._firsts[source]
        return DrawnSamples(samples, sources, passes)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples at the positions from `start` up to before `start + count`; int64."""
        return self.draws(start, count).samples

    def counts(self, position: int) -> list[int]:
        """Return how many samples of each source are among the first `position`."""
        phase = next(p for p in reversed(self._phases) if p.start <= position)
        return self._counts(phase, position)

    def _counts(self, phase: _Phase, position: int) -> list[int]:
        given = list(phase.drawn)
        for source, count in _given(phase.active, self.shares, position - phase.start):
            given[source] += count
        return given

    def _plan(self) -> tuple[list[_Phase], int | None]:
        """Return the phases, and where the last one ends."""
        phases: list[_Phase] = []
        start, drawn = 0, (0,) * len(self.sizes)
        active = tuple(range(len(self.sizes)))
        while active:
            phase = _Phase(start, drawn, active)
            phases.append(phase)
            ends = [self._exhausted(phase, s, cap) for s in active if (cap := self.caps[s])]
            if not ends or min(ends) >= _FAR:
                return phases, None
            start = min(ends)
            drawn = tuple(self._counts(phase, start))
            active = tuple(s for s in active if drawn[s] != self.caps[s])
        return phases, start

    def _exhausted(self, phase: _Phase, source: int, cap: int) -> int:
        """Return the first position before which `source` has given `cap` samples."""
        low, high = phase.start, phase.start + 1
        while self._counts(phase, high)[source] < cap:
            low, high = high, phase.start + 2 * (high - phase.start)
            if high > _FAR:
                return _FAR
        while high - low > 1:
            middle = (low + high) // 2
            if self._counts(phase, middle)[source] < cap:
                low = middle
            else:
                high = middle
        return high


def shares(weights: Sequence[float]) -> list[int]:
    """Return the weights as integers above 0 in (almost) the same proportion.

    Whole numbers of a moderate sum stay as they are: where the weights are sizes, as many samples
    as there are hold each exactly once.
    """
    if all(w == int(w) for w in weights) and sum(weights) <= _SHARES:
        return [int(w) for w in weights]
    total = math.fsum(weights)
    return [max(1, round(w / total * _SHARES)) for w in weights]


def locate(
    active: Sequence[int], shares: Sequence[int], turns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source that is read at each of `turns`, and how many samples it gave before.

    Args:
        active: the sources that give.
        shares: of all sources, as `shares` returns them.
        turns: positions in the mixture of the active sources, int64.
    """
    if len(active) == 1:
        return np.full(len(turns), active[0], np.int64), turns
    left, right, part, whole = _halves(active, shares)
    given = turns * part // whole
    is_left = (turns + 1) * part // whole > given
    sources, before = np.empty_like(turns), np.empty_like(turns)
    sources[is_left], before[is_left] = locate(left, shares, given[is_left])
    sources[~is_left], before[~is_left] = locate(right, shares, (turns - given)[~is_left])
    return sources, before


def _given(active: Sequence[int], shares: Sequence[int], turns: int) -> Iterator[tuple[int, int]]:
    """Give (source, how many of the first `turns` samples are its)."""
    if len(active) == 1:
        yield active[0], turns
        return
    left, right, part, whole = _halves(active, shares)
    yield from _given(left, shares, turns * part // whole)
    yield from _given(right, shares, turns - turns * part // whole)


def _halves(
    active: Sequence[int], shares: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], int, int]:
    """Return the sides of a node, the weight of the left one, and that of both."""
    left, right = active[: len(active) // 2], active[len(active) // 2 :]
    part = sum(shares[s] for s in left)
    return left, right, part, part + sum(shares[s] for s in right)
