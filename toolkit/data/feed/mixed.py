"""Several streams as one sequence of global batches.

Sources are mixed as in [Note: mixing] (`order/mixture.py`), but where one is used up is seen when
it happens; it is the same on all ranks, since all read the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from toolkit.data.feed.sets import SampleShape
from toolkit.data.feed.stream import WINDOW, SourceStream, StreamSample, StreamSource
from toolkit.data.order.grouping import regroup
from toolkit.data.order.mixture import locate, shares
from toolkit.data.order.position import DrawnSamples, derived_seed
from toolkit.errors import DataError

GROUP = 16
"""Global batches whose samples are sorted by length together, where they are padded."""


class MixedStream:
    """The samples of several streams, mixed by weight, as global batches. See [Note: streams].

    Args:
        sources: with weights where there are several.
        shape: how rows become samples.
        seed: of the orders.
        global_batch: samples of an optimizer step on all ranks.
        window: rows of a source that are shuffled and packed together.
        group: global batches that are sorted by length together, where samples are padded.

    Raises:
        DataError: several sources without weights.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        shape: SampleShape,
        seed: int,
        global_batch: int,
        window: int = WINDOW,
        group: int = GROUP,
    ) -> None:
        weights = [source.weight for source in sources]
        if len(sources) > 1 and None in weights:
            raise DataError(
                "expected a weight for each source (data.sources[...].weight), since how large a "
                "stream is nobody knows before its end; "
                f"{', '.join(s.name for s in sources if s.weight is None)} has none"
            )
        self.names = [source.name for source in sources]
        self.shares = shares([w or 1 for w in weights])
        self.streams = [
            SourceStream(source, i, shape, seed, window) for i, source in enumerate(sources)
        ]
        self.seed, self.global_batch = derived_seed(seed, "lengths"), global_batch
        self.group = group if shape.packing == "none" else 1
        self._turn, self._over = 0, list[int]()
        self._begin(0)

    def _begin(self, batches: int) -> None:
        """Let the next group of batches begin here."""
        self._start = self._here()
        self._batches: list[list[StreamSample]] = []
        self._given = 0
        self._done = batches

    def _here(self) -> dict[str, Any]:
        states = zip(self.names, self.streams, strict=True)
        return {
            "turn": self._turn,
            "used_up": [self.names[i] for i in self._over],
            "sources": {name: stream.state_dict() for name, stream in states},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values, the same on every rank; and under `read` what came of
        the rows read so far, which may be ahead of the place.
        """
        read = {name: s.read() for name, s in zip(self.names, self.streams, strict=True)}
        return self._start | {"batches": self._done, "given": self._given, "read": read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place that `state_dict` gave."""
        self._turn = state["turn"]
        self._over = [self.names.index(name) for name in state["used_up"]]
        for name, stream in zip(self.names, self.streams, strict=True):
            stream.load_state_dict(state["sources"][name])
        self._begin(state["batches"])
        if state["given"]:
            self._fill()
            self._given = state["given"]

    def next_batch(self) -> list[StreamSample]:
        """Return the samples of the next global batch.

        Raises:
            DataError: max_repeats of all sources ended the data.
        """
        if self._given == len(self._batches):
            self._begin(self._done + self._given)
            self._fill()
        self._given += 1
        return self._batches[self._given - 1]

    def _fill(self) -> None:
        wanted = self.group * self.global_batch
        items = [item for _ in range(wanted) if (item := self._next()) is not None]
        if len(items) < self.global_batch:
            raise DataError(
                f"the data ended after {self._done} steps of {self.global_batch} samples: "
                f"max_repeats allows no more passes over {', '.join(self.names)}; set "
                f"train.max_steps to {self._done}, raise max_repeats, or give more data"
            )
        lengths, sources, passes = (
            np.array([getattr(i, name) for i in items]) for name in ("length", "source", "epoch")
        )
        order = np.arange(len(items))
        if self.group > 1:
            draws = DrawnSamples(order, sources, passes)
            order = regroup(draws, lengths, self.global_batch, self.seed, self._done)
        whole = order[: len(items) // self.global_batch * self.global_batch]
        self._batches = [
            [items[i] for i in batch] for batch in whole.reshape(-1, self.global_batch)
        ]

    def _next(self) -> StreamSample | None:
        while len(self._over) < len(self.streams):
            active = [i for i in range(len(self.streams)) if i not in self._over]
            which, _ = locate(active, self.shares, np.array([self._turn]))
            item = self.streams[int(which[0])].next()
            if item is not None:
                self._turn += 1
                return item
            # Used up: those that remain share out what follows, from the beginning of a cycle.
            self._over.append(int(which[0]))
            self._turn = 0
        return None
