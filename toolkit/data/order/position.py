"""The position of a run in its data, and the division of global batches among ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolkit import ranks
from toolkit.data.order.mixture import ByLength, Mixture
from toolkit.data.samples.sample_shape import FILLER
from toolkit.errors import DataError


def train_batches(
    order: Mixture | ByLength,
    start: int,
    steps: int,
    batch_size: int,
    accumulation: int,
    rank: int,
    world_size: int,
) -> Iterator[list[int]]:
    """Yield the numbers of the samples of each micro-batch of one rank, step after step.

    A step reads the next B positions of the order, where B is the global batch. Rank r of W reads
    `positions[r::W]` of them, split into micro-batches. Example with B = 4: on two ranks with
    micro-batches of 1, rank 0 reads [0] then [2], and rank 1 reads [1] then [3]. On one rank with
    micro-batches of 2, it reads [0 1] then [2 3].

    Args:
        order: the sample order.
        start: position of the first sample.
        steps: number of steps.
        batch_size: number of samples in a micro-batch.
        accumulation: number of micro-batches of a rank in a step.
        rank: the rank.
        world_size: number of ranks that read different samples.
    """
    # The global batch B.
    size = batch_size * accumulation * world_size
    for first in range(start, start + steps * size, size):
        mine = order.indices(first, size)[rank::world_size]
        yield from mine.reshape(-1, batch_size).tolist()


def eval_batches(
    samples: Sequence[int] | np.ndarray, batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Divide samples into batches for all ranks, and return the batches of one rank.

    Each sample is in one batch of one rank. All ranks get the same number of full batches. The last
    ones are filled up with `FILLER`, the index of a sample of padding. Without samples, the list is
    empty.
    """
    rounds = -(-len(samples) // (batch_size * world_size))
    filled = np.full(rounds * world_size * batch_size, FILLER)
    filled[: len(samples)] = samples
    return filled.reshape(rounds, world_size, batch_size)[:, rank].tolist()


class Position:
    """The position of a run in its data, which every checkpoint contains: the samples read so far.

    Args:
        n_samples: number of training samples; None for streams, whose length is not known.
        seed: seed of the sample order.
        global_batch: number of samples in a step.
        reading: description -> JSON value, for other properties that determine the samples. A
            checkpoint with different values is refused, and the message has the description.
    """

    def __init__(
        self,
        n_samples: int | None,
        seed: int,
        global_batch: int,
        reading: dict[str, Any] | None = None,
    ) -> None:
        self.n_samples, self.seed, self.global_batch = n_samples, seed, global_batch
        self.reading, self.samples_seen = reading or {}, 0
        # The places of a stream's lanes (`MixedLane.state_dict`), by the number of the lane as
        # text. `stream` is known to all ranks. `local_places` are newer places of this rank's
        # lanes, after the last step that is done. `after_step` are those of the lanes that the
        # step read last has moved.
        self.stream: dict[str, Any] | None = None
        self.local_places: dict[str, Any] = {}
        self.after_step: dict[str, Any] | None = None

    def advance(self) -> None:
        """Move the position to the end of the step that was read last.

        Raises:
            DataError: the data is a stream, and no step was read since the last call.
        """
        if self.n_samples is None:
            if self.after_step is None:
                raise DataError("expected a step that was read from the stream, to count as done")
            self.local_places |= self.after_step
            self.after_step = None
        self.samples_seen += self.global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank.

        Collective for streams, because each rank knows only the states of the lanes that it reads.
        """
        if self.n_samples is None and self.samples_seen:
            self.merge_places(ranks.gather(self.local_places))
        return self._local_state()

    def _local_state(self) -> dict[str, Any]:
        """Return the position as JSON values, with only those lane states that this rank knows."""
        state: dict[str, Any] = {
            "samples_seen": self.samples_seen,
            "global_batch": self.global_batch,
            "seed": self.seed,
        }
        if self.n_samples is None:
            return state | {"reading": self.reading, "stream": self.stream}
        return state | {"n_samples": self.n_samples, "reading": self.reading}

    def merge_places(self, of_ranks: Sequence[dict[str, Any]]) -> None:
        """Merge the lane states of all ranks into `stream`, and clear `local_places`.

        A state in `of_ranks` replaces an older state of the same lane.

        Args:
            of_ranks: `local_places` of each rank: lane number as text -> state of the lane.
        """
        merged = self.stream or {}
        for places in of_ranks:
            merged = merged | places
        self.stream = dict(sorted(merged.items(), key=lambda place: int(place[0]))) or None
        self.local_places = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position and the global batch of `state`.

        Raises:
            DataError: the position belongs to other data or another sample order; the message names
                the difference.
        """
        here = self._local_state()
        if ("stream" in state) != ("stream" in here):
            kinds = ("data that were prepared before the run", "streams (data.streaming)")
            raise DataError(
                f"the checkpoint's position is one in {kinds['stream' in state]}, this run reads "
                f"{kinds['stream' in here]}; use the same setting, or start in another output_dir"
            )
        saved, now = (
            s["reading"]
            | {"the number of training samples": s.get("n_samples"), "the seed": s["seed"]}
            for s in (state, here)
        )
        for name in saved | now:
            if saved.get(name) != now.get(name):
                before, after = (
                    "nothing" if facts.get(name) is None else facts[name] for facts in (saved, now)
                )
                raise DataError(
                    f"the checkpoint's position in the data counts on {name} {before}, this run "
                    f"has {after}; use the same data and settings, or start in another output_dir"
                )
        self.samples_seen, self.global_batch = state["samples_seen"], state["global_batch"]
        self.stream = state.get("stream")
        self.local_places = {}
        self.after_step = None


def accumulation_for(global_batch: int, per_device_batch: int, world_size: int) -> int:
    """Compute the number of micro-batches of a rank in a step (gradient accumulation).

    Args:
        global_batch: number of samples in a step, over all ranks.
        per_device_batch: number of samples in a micro-batch.
        world_size: number of ranks that read different samples.

    Raises:
        DataError: the global batch does not divide; the message gives numbers that would fit.
    """
    accumulation, remainder = divmod(global_batch, per_device_batch * world_size)
    if accumulation and not remainder:
        return accumulation
    fitting = max(n for n in range(1, min(world_size, global_batch) + 1) if not global_batch % n)
    size = max(n for n in range(1, per_device_batch + 1) if not global_batch // fitting % n)
    raise DataError(
        f"the global batch of {global_batch} samples does not divide into micro-batches of "
        f"{per_device_batch} (train.per_device_train_batch_size) on {world_size} processes; use "
        f"{fitting} process(es) with train.per_device_train_batch_size {size}"
    )
