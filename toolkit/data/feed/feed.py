"""The data feed: micro-batches of each step, evaluation batches, and the position in the data.

`prepared.PreparedFeed` has all rows at hand, `stream_feed.StreamFeed` reads them while training.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import record_function

from toolkit.data.order.position import Position, accumulation_for, eval_batches
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.pieces import Chosen, EncodedRows, cut_rows, windows
from toolkit.data.samples.sample_shape import Samples, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError

Batches = Iterable[Batch]
READING = "data"
"""What profiles call the wait for a step's micro-batches."""


class DataRank(Protocol):
    """The ranks that read different samples, as one of them sees them."""

    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def loader(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class LocalDataRank:
    """`Processes` by the view `data` of a mesh."""

    device: torch.device
    rank: int
    world_size: int
    loader: Callable[..., Any]


def build_samples(source: EncodedSource, shape: SampleShape, chosen: Chosen = None) -> Samples:
    """Return `source`, or what is `chosen` of its `units_of`, as samples; no sample is an error."""
    rows, wrapped = EncodedRows(source.tokens, shape.columns), shape.packing == "wrapped"
    pieces = (windows if wrapped else cut_rows)(rows, shape.sequence_length, chosen)
    if wrapped and rows.total < shape.sequence_length:
        raise DataError(
            f"expected at least one sample of {shape.sequence_length} tokens "
            f"(data.sequence_length) in {source.name}, all documents of it together hold "
            f"{rows.total}; give more text, leave it out, or set data.sequence_length to at most "
            f"{max(rows.total, 2)}"
        )
    if not len(pieces):
        raise DataError(
            f"expected at least one row with a token in the source {source.name}, got none of "
            f"{len(rows)}; give more data, or leave the source out"
        )
    return Samples(pieces, shape)


def list_units(source: EncodedSource, shape: SampleShape) -> range | np.ndarray:
    """Return the numbers of what can be chosen of a source: its windows, or its rows."""
    if shape.packing == "wrapped":
        return range(EncodedRows(source.tokens).total // shape.sequence_length)
    return np.arange(len(source.tokens))


class Feed(ABC):
    """This rank's micro-batches, and where the run stands.

    A sample is a packed one (`bfd`), a window (`wrapped`) or a row (`none`), and so is what weights
    and batch sizes count. A checkpoint's own `global_batch` replaces the one that is given;
    `max_eval_samples` are windows or rows of each source that are evaluated on at most.
    """

    sources: Sequence[Any]
    total: int | None = None  # samples that max_repeats is known to allow
    waited = 0.0  # seconds that steps have waited for their micro-batches here

    def __init__(
        self,
        shape: SampleShape,
        position: Position,
        eval_sources: Sequence[EncodedSource],
        max_eval_samples: int | None,
    ) -> None:
        self.shape, self.position, self.eval_sources = shape, position, list(eval_sources)
        self.eval_sets = {
            source.name: build_samples(source, shape, list_units(source, shape)[:max_eval_samples])
            for source in eval_sources
        }

    @property
    def names(self) -> str:  # of what is trained on, for messages
        return ", ".join(source.name for source in self.sources)

    def steps(
        self, run: DataRank, count: int, *, per_device_batch_size: int, workers: int = 0
    ) -> Iterator[list[Batch]]:
        """Give this rank's micro-batches of the next `count` steps, a list for each, from the
        position on, which `position.advance()` moves when a step is done.

        For a stream any number of `workers` above 0 is one process that reads ahead. A DataError
        where the global batch does not divide over the ranks, max_repeats ends the data before, or
        a row of a stream is refused.
        """
        if count < 1:
            return
        size = self.position.global_batch
        self.check_steps(self.position.samples_seen // size + count)
        each = accumulation_for(size, per_device_batch_size, run.world_size)
        batches = iter(self._read(run, count, per_device_batch_size, each, workers))
        try:
            for _ in range(count):
                begun = time.perf_counter()
                with record_function(READING):
                    step = list(islice(batches, each))
                self.waited += time.perf_counter() - begun
                yield step
        finally:
            del batches  # now: a traceback would keep its workers, which then end badly

    def samples_of(self, before: int, run: DataRank) -> list[str]:
        """Return the samples that this rank reads in the step after `before` steps, if known."""
        return []

    def evals(self, run: DataRank, *, per_device_batch_size: int) -> dict[str, Batches]:
        """Return source name -> this rank's micro-batches; see `eval_batches`."""
        found: dict[str, Batches] = {}
        for name, samples in self.eval_sets.items():
            order: Any = range(len(samples))
            if self.shape.packing == "none":
                order = np.argsort(samples.pieces.lengths, kind="stable")
            batches = eval_batches(order, per_device_batch_size, run.rank, run.world_size)
            found[name] = run.loader(samples, batches, collate_fn=self.shape.batch)
        return found

    def tokens_of_step(self) -> float:
        """Return the mean of the tokens of a global batch, without padding, by weight."""
        means = self._means()
        mean = sum(tokens * share for tokens, share in means) / sum(share for _, share in means)
        return mean * self.position.global_batch

    @abstractmethod
    def lines(self) -> list[str]:
        """Return what there is to read, as lines: a run prints them at its start."""

    def reading_lines(self) -> list[str]:
        """Return what came of the rows read so far, as lines; nothing where it was known before."""
        return []

    @abstractmethod
    def steps_for(self, epochs: float) -> int:
        """Return the steps of `epochs` passes; call it after a checkpoint's position is loaded.

        More than max_repeats allows, or of a stream, whose end is not known, are a DataError.
        """

    def check_steps(self, max_steps: int) -> None:
        """Raise a `DataError` for more steps than max_repeats is known to allow."""
        total, size = self.total, self.position.global_batch
        if total is not None and max_steps * size > total:
            raise DataError(
                f"expected at most {total // size} steps of {size} samples: max_repeats of "
                f"data.sources allows {total} samples of {self.names}, {max_steps} steps were "
                f"asked for; set train.max_steps to {total // size}, raise max_repeats, or give "
                "more data"
            )

    @abstractmethod
    def check_enough(self, world_size: int) -> None:
        """Raise a `DataError` for data of which nothing is learned, or too few for the ranks."""

    @abstractmethod
    def _read(self, run: DataRank, count: int, size: int, each: int, workers: int) -> Batches:
        """Return this rank's micro-batches of `count` steps: `each` of `size` samples a step."""

    @abstractmethod
    def _means(self) -> list[tuple[float, float]]:
        """Return the mean tokens of a sample and the share of each source."""
