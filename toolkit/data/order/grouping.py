"""Samples of like length into one batch, so that little of a padded batch is padding.

[Note: grouping by length]
The order of samples is cut into windows of some global batches. In a window the samples are sorted
by length and cut into global batches again, which are then read in an order of their own. Which
samples batch k holds follows from (seed, global batch, k) alone, so a run resumes inside a window,
on any number of ranks.

A sample must not be overtaken by its own next pass: only batches in which no source's pass ends are
regrouped, and only with others of the same passes. The rest stay as they are.
"""

from collections.abc import Callable, Iterator

import numpy as np

from toolkit.data.order.position import DrawnSamples, Order, derived_seed, permute

WINDOW = 50
"""Global batches that are sorted together."""


class ByLength:
    """An order of samples, regrouped so that a global batch holds samples of like length.

    See [Note: grouping by length]. Reading the batches of a window one after another costs one
    sort; what is kept is one window.

    Args:
        order: the sequence of samples.
        lengths: samples -> tokens of each; called with a window at a time.
        global_batch: samples of an optimizer step on all ranks.
        seed: of the order of batches in a window.
        window: global batches sorted together.
    """

    def __init__(
        self,
        order: Order,
        lengths: Callable[[np.ndarray], np.ndarray],
        global_batch: int,
        seed: int,
        window: int = WINDOW,
    ) -> None:
        self.order, self.lengths, self.seed = order, lengths, derived_seed(seed, "lengths")
        self.global_batch, self.window = global_batch, window
        self._kept: tuple[int, np.ndarray] | None = None

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples at the positions from `start` up to before `start + count`; int64."""
        stretch = self.window * self.global_batch
        parts = []
        while count > 0:
            number, at = divmod(start, stretch)
            here = min(count, stretch - at)
            parts.append(self._read(number)[at : at + here])
            start, count = start + here, count - here
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _read(self, number: int) -> np.ndarray:
        if self._kept is None or self._kept[0] != number:
            stretch = self.window * self.global_batch
            first, last = number * stretch, (number + 1) * stretch
            if self.order.total is not None:
                last = min(last, self.order.total)
            draws = self.order.draws(first, last - first)
            places = regroup(
                draws, self.lengths(draws.samples), self.global_batch, self.seed, first
            )
            self._kept = (number, draws.samples[places])
        return self._kept[1]


def regroup(
    draws: DrawnSamples, lengths: np.ndarray, global_batch: int, seed: int, key: int
) -> np.ndarray:
    """Return the places of a window's samples in the order in which they are read.

    Args:
        draws: the samples of the window; from one batch's first on.
        lengths: tokens of each.
        global_batch: samples of a batch; a rest that fills none stays at the end.
        seed: of the order of batches.
        key: tells this window from others.
    """
    out = []
    for first, last, alike in _runs(draws, global_batch):
        here = np.arange(first * global_batch, last * global_batch)
        if not alike:
            out.append(here)
            continue
        batches = here[np.argsort(lengths[here], kind="stable")].reshape(-1, global_batch)
        order = permute(np.arange(last - first), last - first, seed, key + first)
        out.append(batches[order].reshape(-1))
    whole = len(lengths) // global_batch * global_batch
    return np.concatenate([*out, np.arange(whole, len(lengths))])


def _runs(draws: DrawnSamples, global_batch: int) -> Iterator[tuple[int, int, bool]]:
    """Give runs (first batch, last + 1, whether the samples of each source are of one pass)."""
    began, passes = 0, dict[int, int]()
    batches = len(draws.samples) // global_batch
    for batch in range(batches):
        here = slice(batch * global_batch, (batch + 1) * global_batch)
        found = set(zip(draws.sources[here].tolist(), draws.passes[here].tolist(), strict=True))
        alike = len(found) == len({source for source, _ in found})
        if not alike or any(passes.get(source, of) != of for source, of in found):
            if batch > began:
                yield began, batch, True
            began, passes = batch, {}
        if alike:
            passes |= dict(found)
        else:
            yield batch, batch + 1, False
            began = batch + 1
    if batches > began:
        yield began, batches, True
