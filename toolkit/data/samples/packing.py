"""Which samples share a bin: best-fit decreasing over lengths.

[Note: best fit by counting]
Best-fit decreasing takes the samples from the longest to the shortest and puts each where it leaves
the least room. Samples of one length are alike, and so are bins with one free space; so it is
enough to decide how many samples of each length go to how many bins of each free space. A bin with
f tokens free takes f // v samples of length v one after another, since after the first it is the
fullest that still fits. So the decision handles runs of bins with the same content, costs a few
steps for each different length, and gives as many bins as the same rule applied sample by sample;
NumPy then spells out which sample lies in which bin.

Source: Johnson, "Near-optimal bin packing algorithms", 1973 (best-fit decreasing).
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BinPlan:
    """What lies in which bin."""

    samples: np.ndarray  # every one once, bin after bin, in a bin by number; int64
    starts: np.ndarray  # bin i holds `samples[starts[i]:starts[i + 1]]`; int64 [bins + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def bin(self, index: int) -> np.ndarray:
        """Return the samples of a bin."""
        return self.samples[self.starts[index] : self.starts[index + 1]]


def pack_best_fit(lengths: np.ndarray, capacity: int) -> BinPlan:
    """Return a best-fit decreasing packing of samples of `lengths` into bins of `capacity` tokens.

    Lengths are from 1 to the capacity. No sample is split, each lies in one bin, and the plan
    depends on nothing but the arguments. See [Note: best fit by counting]. A million samples take
    well under a second and some 50 bytes each, of which 8 stay.
    """
    if not len(lengths):
        return BinPlan(np.zeros(0, np.int64), np.zeros(1, np.int64))
    narrow = lengths.astype(np.uint16 if capacity < 1 << 16 else np.int32)  # 16 bits: radix sort
    spread = _spread(len(lengths))
    room = (capacity - narrow[spread]).astype(narrow.dtype)
    longest_first = spread[np.argsort(room, kind="stable")]
    counts = np.bincount(narrow)
    values = np.flatnonzero(counts)[::-1]
    runs = np.array(_place(values.tolist(), counts[values].tolist(), capacity), np.int64)
    first, many, each = runs.T
    placed = many * each
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(placed) - placed, placed)
    bins = np.empty(len(lengths), np.int64)
    bins[longest_first] = np.repeat(first, placed) + within // np.repeat(each, placed)
    # Stable, so that the samples of a bin stay in their own order.
    return BinPlan(np.argsort(bins, kind="stable"), np.cumsum(np.bincount(bins + 1)))


def _place(values: list[int], counts: list[int], capacity: int) -> list[tuple[int, int, int]]:
    """Return runs (first bin, bins, samples for each of them) for `counts` samples of each of
    `values`, the different lengths from the longest to the shortest.
    """
    runs: list[tuple[int, int, int]] = []
    spaces: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]
    found = 0  # bit f is set where spaces[f] holds a run of bins with f tokens free
    bins = 0
    for value, count in zip(values, counts, strict=True):
        while count:
            fitting = found >> value
            if not fitting:
                new = -(-count // (capacity // value))
                spaces[capacity].append((bins, new))
                found |= 1 << capacity
                bins += new
                continue
            free = value + (fitting & -fitting).bit_length() - 1
            first, many = spaces[free].pop()
            if not spaces[free]:
                found ^= 1 << free
            each = free // value
            full = min(many, count // each)
            parts = [(full, each)]
            if full < many and count > full * each:
                parts.append((1, count - full * each))
            parts.append((many - sum(p[0] for p in parts), 0))
            for part, taken in parts:
                left = free - taken * value
                if part and taken:
                    runs.append((first, part, taken))
                    count -= part * taken
                if part and left:
                    spaces[left].append((first, part))
                    found |= 1 << left
                first += part
    return runs


def _spread(n: int) -> np.ndarray:
    """Return `range(n)` in strides near the golden section, so that neighbours come far apart.

    Samples that stand side by side in a file are often alike; those of one length would share bins.
    """
    stride = max(1, round(n * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, n) != 1:
        stride += 1
    return np.arange(n, dtype=np.int64) * stride % n
