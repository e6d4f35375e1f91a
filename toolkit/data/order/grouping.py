"""Samples of like length into one batch, so that little of a padded batch is padding.

[Note: grouping by length]
The order of samples is cut into windows of some global batches. In a window the samples are sorted
by length and cut into global batches again, which are then read in an order of their own. Which
samples batch k holds follows from (seed, global batch, k) alone, so a run resumes inside a window,
on any number of ranks.

A sample must not be overtaken by its own next pass: only batches in which no source's pass ends are
regrouped, and only with others of the same passes. The rest stay as they are.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from toolkit.data.order.mixture import DrawnSamples, Mixture
from toolkit.data.order.permutation import derived_seed, permute

WINDOW = 50  # global batches that are sorted together


class ByLength:
    """An order of samples, regrouped by `lengths` in tokens. See [Note: grouping by length]."""

    def __init__(self, order: Mixture, lengths: np.ndarray, global_batch: int, seed: int) -> None:
        self.order, self.lengths, self.seed = order, lengths, derived_seed(seed, "lengths")
        self.global_batch, self.stretch = global_batch, WINDOW * global_batch
        self._window = lru_cache(maxsize=1)(self._regrouped)  # it is read in parts

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples at the `count` positions from `start` on; int64."""
        first, at = divmod(start, self.stretch)
        last = -(-(start + count) // self.stretch)
        windows = [self._window(number) for number in range(first, last)]
        return np.concatenate([np.zeros(0, np.int64), *windows])[at : at + count]

    def _regrouped(self, number: int) -> np.ndarray:
        """Return the samples of a window; a rest that fills no batch stays at its end."""
        start, stop = number * self.stretch, (number + 1) * self.stretch
        stop = stop if self.order.total is None else min(stop, self.order.total)
        draws = self.order.draws(start, stop - start)
        lengths, size = self.lengths[draws.samples], self.global_batch
        places = np.arange(len(lengths))
        for first, last in _runs(draws, size):
            here = slice(first * size, last * size)
            by_length = places[here][np.argsort(lengths[here], kind="stable")]
            order = permute(np.arange(last - first), last - first, self.seed, start + first)
            places[here] = by_length.reshape(-1, size)[order].reshape(-1)
        return draws.samples[places]


def _runs(draws: DrawnSamples, global_batch: int) -> Iterator[tuple[int, int]]:
    """Give runs (first batch, last + 1) in which the samples of each source are of one pass."""
    began, passes = 0, dict[int, int]()
    batches = len(draws.samples) // global_batch
    for batch in range(batches):
        here = slice(batch * global_batch, (batch + 1) * global_batch)
        found = set(zip(draws.sources[here].tolist(), draws.passes[here].tolist(), strict=True))
        alike = len(found) == len({source for source, _ in found})
        if not alike or any(passes.get(source, of) != of for source, of in found):
            if batch > began:
                yield began, batch
            began, passes = (batch if alike else batch + 1), {}
        passes |= dict(found) if alike else {}
    if batches > began:
        yield began, batches
