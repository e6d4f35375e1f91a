"""In which order samples are drawn, and how far a run has come.

[Note: sample order]
Training reads one endless sequence of positions 0, 1, 2, ... Position p is sample
`permute(p % n, n, seed, p // n)`: epoch after epoch, each in an order of its own, and a batch may
reach across the border of two. Nothing in it knows the number of ranks, and nothing is remembered
but p, so that a run continues exactly, on any number of ranks, without reading what it has seen.

The global batch of a step is the next B positions. Rank r of W takes every W-th of them from the
r-th on, and cuts these into its micro-batches. Whatever W and the accumulation are, the ranks
together train on the same B samples, so a loss that is a mean over the global batch is the same.
"""

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import BatchSampler

from toolkit.data.samples.sequences import FILLER
from toolkit.errors import DataError

_ROUNDS = 6
_MIN_HALF_BITS = 3
_TABLE_HALF_BITS = 5


def permute(index: int | np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return where the permutation of `range(n)` for (`seed`, `epoch`) sends each `index`.

    A Feistel network over the smallest domain of 4^k that holds n, with keys hashed from seed and
    epoch; what falls outside `range(n)` is sent on until it falls inside (cycle walking; at most
    3 more times on average, where n is above 16). No memory that grows with n, a fraction of a
    microsecond for each index of a large batch.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    index = np.asarray(index)
    if n < 1 or (index.size and not (index.min() >= 0 and index.max() < n)):
        raise IndexError(f"permute: expected 0 <= index < n, got n {n} and {index}")
    half = max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    flat = index.astype(np.uint64).reshape(-1)
    if half <= _TABLE_HALF_BITS:  # cheaper to know all than to ask again and again
        table = _feistel(np.arange(1 << 2 * half, dtype=np.uint64), half, keys)
        follow = table.__getitem__
    else:
        follow = partial(_feistel, half=half, keys=keys)
    out = follow(flat)
    outside = np.flatnonzero(out >= n)
    while len(outside):
        out[outside] = follow(out[outside])
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(index.shape)


def _keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _feistel(x: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the output depends on every bit of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(seed: int, *parts: object) -> int:
    """Return another seed, made of `seed` and `parts`: for the second of two orders of one run."""
    text = " ".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


class DrawnSamples(NamedTuple):
    """What is read at some positions."""

    samples: np.ndarray
    """Which sample; int64."""
    sources: np.ndarray
    """Which of the sources that are mixed it is of; int64."""
    passes: np.ndarray
    """How many times that source was read through before; int64."""


class Order(Protocol):
    """A sequence of samples that training reads: `SampleOrder`, or `mixture.Mixture`."""

    total: int | None
    """Positions there are; None: no end."""

    def draws(self, start: int, count: int) -> DrawnSamples:
        """Return what is read at the positions from `start` up to before `start + count`."""

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples alone."""


class SampleOrder:
    """The endless sequence of samples that training reads. See [Note: sample order]."""

    total: int | None = None

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise DataError(f"expected at least one sample to draw from, got {n}")
        self.n, self.seed = n, seed

    def draws(self, start: int, count: int) -> DrawnSamples:
        """Return the samples at `count` positions from `start` on, all of one source."""
        positions = np.arange(start, start + count, dtype=np.int64)
        samples = self.indices(start, count)
        return DrawnSamples(samples, np.zeros_like(positions), positions // self.n)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples at the positions from `start` up to before `start + count`; int64."""
        parts = []
        while count > 0:
            epoch, at = divmod(start, self.n)
            here = min(count, self.n - at)
            parts.append(permute(np.arange(at, at + here), self.n, self.seed, epoch))
            start, count = start + here, count - here
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class Indices(Protocol):
    """What `GlobalBatches` reads: an `Order`, or one grouped by length."""

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the samples at the positions from `start` up to before `start + count`."""


class GlobalBatches(BatchSampler):
    """Micro-batches of all ranks in the order in which Accelerate deals them out.

    Accelerate's `BatchSamplerShard` gives batch i to rank i % W. So step after step, micro-batch m
    after micro-batch m, this yields one batch for rank 0, one for rank 1, ...: of the step's B
    positions, rank r has `positions[r::W]`, and its m-th micro-batch is the m-th run of b in it.

    The samples of step k are `positions[k*B:(k+1)*B]` for every W, as long as the product B of b,
    accumulation and W is kept: with B = 4, two ranks, b = 1 and accumulation 2, rank 0 reads [0]
    then [2] and rank 1 [1] then [3]; one rank with b = 2 reads [0 1] then [2 3]. See [Note: sample
    order].

    Every batch is full and every rank gets as many, so Accelerate neither repeats nor drops any.

    Args:
        order: what position means which sample; anything with its `indices`.
        start: position of the first sample: how many the run has seen (`Position.samples_seen`).
        steps: optimizer steps to yield batches for.
        per_device_batch: samples of a micro-batch, b.
        accumulation: micro-batches of a rank in a step.
        world_size: number of ranks, W.
    """

    drop_last = False
    sampler: Any = None  # there is none; Accelerate asks

    def __init__(
        self,
        order: Indices,
        start: int,
        steps: int,
        per_device_batch: int,
        accumulation: int,
        world_size: int,
    ) -> None:
        self.order, self.start, self.steps = order, start, steps
        self.batch_size = per_device_batch
        self.accumulation, self.world_size = accumulation, world_size

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step on all ranks, B."""
        return self.batch_size * self.accumulation * self.world_size

    def __len__(self) -> int:
        return self.steps * self.accumulation * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        shape = (self.accumulation, self.batch_size, self.world_size)
        for step in range(self.steps):
            positions = self.start + step * self.global_batch
            samples = self.order.indices(positions, self.global_batch).reshape(shape)
            for micro_batch in samples:
                yield from micro_batch.T.tolist()


class EvalBatches(BatchSampler):
    """Every sample once, in order; every rank gets the same number of full batches.

    What is missing in the last round is filled with `FILLER`, whose labels the loss leaves out, so
    that no rank stops while the others still wait for it, and no sample counts twice.
    """

    drop_last = False
    sampler: Any = None  # there is none; Accelerate asks

    def __init__(self, n: int, per_device_batch: int, world_size: int) -> None:
        self.n, self.batch_size, self.world_size = n, per_device_batch, world_size

    def __len__(self) -> int:
        return -(-self.n // (self.batch_size * self.world_size)) * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            batch = range(first, first + self.batch_size)
            yield [i if i < self.n else FILLER for i in batch]


class Position:
    """How far the run has read: the state of the data in a checkpoint.

    Args:
        n_samples: training samples there are.
        seed: the seed of their order.
        global_batch: samples of an optimizer step on all ranks.
        samples_seen: samples read so far, over all epochs.
        reading: what else the samples depend on, as JSON values under names that a user
            understands; kept in the checkpoint, where a difference is refused.
    """

    def __init__(
        self,
        n_samples: int,
        seed: int,
        global_batch: int,
        samples_seen: int = 0,
        reading: dict[str, Any] | None = None,
    ) -> None:
        self.n_samples, self.seed = n_samples, seed
        self.global_batch, self.samples_seen = global_batch, samples_seen
        self.reading = reading or {}

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.samples_seen / self.n_samples

    def advance(self, samples: int | None = None) -> None:
        """Count `samples` as read; a global batch where none is given."""
        self.samples_seen += self.global_batch if samples is None else samples

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank."""
        return {
            "samples_seen": self.samples_seen,
            "global_batch": self.global_batch,
            "n_samples": self.n_samples,
            "seed": self.seed,
        } | ({"reading": self.reading} if self.reading else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`: its position and its global batch.

        Raises:
            DataError: it counts other samples or another order, so that its position means nothing
                here.
        """
        if "n_samples" not in state:
            raise DataError(
                "the checkpoint's position is one in streams (data.streaming), this run prepares "
                "its data before; give the same, or start anew in another output_dir"
            )
        for name, what, cure in (
            ("n_samples", "training samples", "give the same data, sequence length and eval split"),
            ("seed", "as the seed of their order", "set seed to the same value"),
        ):
            if int(state[name]) != getattr(self, name):
                raise DataError(
                    f"the checkpoint's position in the data counts on {state[name]} {what}, this "
                    f"run has {getattr(self, name)}; {cure}, or start anew in another output_dir"
                )
        check_reading(state.get("reading"), self.reading)
        self.samples_seen = int(state["samples_seen"])
        self.global_batch = int(state["global_batch"])

    def __repr__(self) -> str:
        return f"Position({', '.join(f'{k}={v}' for k, v in self.state_dict().items())})"


def check_reading(saved: dict[str, Any] | None, here: dict[str, Any]) -> None:
    """Refuse a checkpoint whose samples were made in another way than this run's.

    Checkpoints of before there was a choice hold nothing of it (None): theirs were windows of one
    text.

    Raises:
        DataError: names what differs.
    """
    if saved is None:
        saved = {name: value for name, value in here.items() if name != "data.packing"}
        saved |= {"data.packing": "wrapped"} if here else {}
    for name in {**saved, **here}:
        if saved.get(name) != here.get(name):
            raise DataError(
                f"the checkpoint's position in the data counts on {name} "
                f"{_shown(saved.get(name))}, this run has {_shown(here.get(name))}; give the same, "
                "or start anew in another output_dir"
            )


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def accumulation_for(global_batch: int, per_device_batch: int, world_size: int) -> int:
    """Return the micro-batches per step and rank that make up `global_batch`.

    Raises:
        DataError: it does not divide; the message names what would.
    """
    accumulation, rest = divmod(global_batch, per_device_batch * world_size)
    if accumulation and not rest:
        return accumulation
    each, uneven = divmod(global_batch, world_size)
    if uneven or not each:
        cure = f"start it on {_listed(_divisors(global_batch))} processes"
    else:
        fitting = [d for d in _divisors(each) if d <= max(per_device_batch, 1)]
        cure = f"set train.per_device_train_batch_size to {_listed(fitting)}"
    raise DataError(
        f"the global batch of {global_batch} samples does not divide into micro-batches of "
        f"{per_device_batch} (train.per_device_train_batch_size) on {world_size} processes; {cure}"
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(numbers: list[int], most: int = 12) -> str:
    """Return the numbers as text; of many the largest, since those are the useful ones."""
    return ("... " if len(numbers) > most else "") + ", ".join(map(str, numbers[-most:]))
