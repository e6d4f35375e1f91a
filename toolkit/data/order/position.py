"""Global batches dealt out to ranks, and how far a run has come."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from toolkit import ranks
from toolkit.data.order.grouping import ByLength
from toolkit.data.order.mixture import Mixture
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
    """Yield the samples of one rank's micro-batches of `batch_size`, from the position `start` on.

    The global batch of a step is the next B positions of the order, whatever the number W of ranks
    and the accumulation are: rank r has `positions[r::W]`, cut into its micro-batches. With B = 4,
    two ranks and micro-batches of 1 rank 0 reads [0] then [2] and rank 1 [1] then [3]; one rank
    with micro-batches of 2 reads [0 1] then [2 3].
    """
    size = batch_size * accumulation * world_size  # B
    for first in range(start, start + steps * size, size):
        mine = order.indices(first, size)[rank::world_size]
        yield from mine.reshape(-1, batch_size).tolist()


def eval_batches(
    samples: Sequence[int] | np.ndarray, batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Return one rank's batches of `samples`: all ranks together read each once, in order.

    Every rank gets the same number of full batches: what is missing in the last round is filled
    with `FILLER`, whose labels the loss leaves out.
    """
    rounds = -(-len(samples) // (batch_size * world_size))
    filled = np.full(rounds * world_size * batch_size, FILLER)
    filled[: len(samples)] = samples
    return filled.reshape(rounds, world_size, batch_size)[:, rank].tolist()


class Position:
    """How far the run has read: the state of the data in a checkpoint.

    `n_samples` there are to train on (None of streams, which count their rows instead). `reading`
    is what else the samples depend on, as JSON values under names that a user understands; a
    checkpoint of another is refused.
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
        # Of streams, by lane (its number as text): the places (`MixedLane.state_dict`) that all
        # ranks know; those of this rank's lanes after the last step that is done, where they are
        # newer; and those after the step that was read last, of the lanes that it moved.
        self.stream: dict[str, Any] | None = None
        self.own: dict[str, Any] = {}
        self.after_step: dict[str, Any] | None = None

    def advance(self) -> None:
        """Count the step that was read last as done; of a stream one must have been read."""
        if self.n_samples is None:
            if self.after_step is None:
                raise DataError("expected a step that was read from the stream, to count as done")
            self.own, self.after_step = self.own | self.after_step, None
        self.samples_seen += self.global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank. Collective for streams, of
        which each rank knows the places of its own lanes.
        """
        if self.n_samples is None and self.samples_seen:
            self.merge(ranks.gather(self.own))
        return self._state()

    def _state(self) -> dict[str, Any]:
        """Return the position as this rank knows it."""
        state: dict[str, Any] = {
            "samples_seen": self.samples_seen,
            "global_batch": self.global_batch,
            "seed": self.seed,
        }
        if self.n_samples is None:
            return state | {"reading": self.reading, "stream": self.stream}
        return state | {"n_samples": self.n_samples, "reading": self.reading}

    def merge(self, own: Sequence[dict[str, Any]]) -> None:
        """Take in the places of the lanes of all ranks, `own` of each."""
        known = self.stream or {}
        for places in own:
            known = known | places
        self.stream = dict(sorted(known.items(), key=lambda place: int(place[0]))) or None
        self.own = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`: its position and its global batch; one of other data or another
        order is a DataError.
        """
        here = self._state()
        if ("stream" in state) != ("stream" in here):
            kinds = ("data that were prepared before the run", "streams (data.streaming)")
            raise DataError(
                f"the checkpoint's position is one in {kinds['stream' in state]}, this run reads "
                f"{kinds['stream' in here]}; give the same, or start anew in another output_dir"
            )
        saved, now = (
            s["reading"]
            | {"the number of training samples": s.get("n_samples"), "the seed": s["seed"]}
            for s in (state, here)
        )
        for name in saved | now:
            if saved.get(name) != now.get(name):
                said = ["nothing" if d.get(name) is None else d[name] for d in (saved, now)]
                raise DataError(
                    f"the checkpoint's position in the data counts on {name} {said[0]}, this run "
                    f"has {said[1]}; give the same data and settings, or start anew in another "
                    "output_dir"
                )
        self.samples_seen, self.global_batch = state["samples_seen"], state["global_batch"]
        self.stream, self.own, self.after_step = state.get("stream"), {}, None


def accumulation_for(global_batch: int, per_device_batch: int, world_size: int) -> int:
    """Return the micro-batches per step and rank that make up `global_batch`.

    One that does not divide is a DataError that names numbers that would.
    """
    accumulation, rest = divmod(global_batch, per_device_batch * world_size)
    if accumulation and not rest:
        return accumulation
    fitting = max(n for n in range(1, min(world_size, global_batch) + 1) if not global_batch % n)
    size = max(n for n in range(1, per_device_batch + 1) if not global_batch // fitting % n)
    raise DataError(
        f"the global batch of {global_batch} samples does not divide into micro-batches of "
        f"{per_device_batch} (train.per_device_train_batch_size) on {world_size} processes; start "
        f"it on {fitting} process(es) with train.per_device_train_batch_size {size}"
    )
