"""The data feed: micro-batches of each step, evaluation batches, and the position in the data.

`prepared.PreparedFeed` has encoded all rows before; `stream_feed.StreamFeed` reads and encodes rows
while training.
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
from toolkit.data.samples.pieces import Chosen, EncodedRows, cut_rows, cut_windows
from toolkit.data.samples.sample_shape import Samples, SampleShape
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError

Batches = Iterable[Batch]
READING = "data"
"""Name of the wait for the micro-batches of a step in profiles."""


class DataRank(Protocol):
    """A data rank: a rank that reads other samples than all other data ranks."""

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        ...

    @property
    def rank(self) -> int:
        """Number of this rank among the data ranks, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of data ranks."""
        ...

    @property
    def loader(self) -> Callable[..., Any]:
        """Function that builds a data loader, called as `loader(samples, batches, ...)`."""
        ...


@dataclass(frozen=True)
class LocalDataRank:
    """A `DataRank` made of four plain values. Rank and world size are those of `Mesh.data`."""

    device: torch.device
    rank: int
    world_size: int
    loader: Callable[..., Any]


def build_samples(source: EncodedSource, shape: SampleShape, chosen: Chosen = None) -> Samples:
    """Build the samples of a source, or of selected windows or rows of it.

    Args:
        source: the encoded rows.
        shape: how rows become samples.
        chosen: numbers of windows or rows, as `list_windows_or_rows` counts them; None: all.

    Raises:
        DataError: the source has no token, or too few for one window (packing `wrapped`).
    """
    rows = EncodedRows(source.tokens, shape.columns)
    is_wrapped = shape.packing == "wrapped"
    pieces = (cut_windows if is_wrapped else cut_rows)(rows, shape.sequence_length, chosen)
    if is_wrapped and rows.total < shape.sequence_length:
        raise DataError(
            f"expected at least one sample of {shape.sequence_length} tokens "
            f"(data.sequence_length) in {source.name}, but all of its documents have "
            f"{rows.total} tokens together; add text, remove the source, or set "
            f"data.sequence_length to at most {max(rows.total, 2)}"
        )
    if not len(pieces):
        raise DataError(
            f"expected at least one row with a token in the source {source.name}, got none among "
            f"{len(rows)} rows; add data, or remove the source"
        )
    return Samples(pieces, shape)


def list_windows_or_rows(source: EncodedSource, shape: SampleShape) -> range | np.ndarray:
    """Return the numbers of all windows of a source if packing is `wrapped`, else of all rows.

    A window is `sequence_length` consecutive tokens of all rows joined.
    """
    if shape.packing == "wrapped":
        return range(EncodedRows(source.tokens).total // shape.sequence_length)
    return np.arange(len(source.tokens))


class Feed(ABC):
    """Base class that gives this rank its micro-batches and keeps the position in the data.

    Weights and batch sizes count samples. A sample is several packed rows (packing `bfd`), a window
    of all rows joined (`wrapped`) or one row (`none`).

    Args:
        shape: how rows become samples.
        position: the position to start from. A checkpoint that is loaded replaces its global batch.
        eval_sources: sources to evaluate on.
        max_eval_samples: maximum number of windows or rows of each source to evaluate on.
    """

    sources: Sequence[Any]
    total: int | None = None
    """Number of samples that `max_repeats` allows; None: no limit, or one that is not known."""
    waited = 0.0
    """Seconds that this rank has waited for micro-batches so far."""

    def __init__(
        self,
        shape: SampleShape,
        position: Position,
        eval_sources: Sequence[EncodedSource],
        max_eval_samples: int | None,
    ) -> None:
        self.shape, self.position, self.eval_sources = shape, position, list(eval_sources)
        self.eval_sets = {
            source.name: build_samples(
                source, shape, list_windows_or_rows(source, shape)[:max_eval_samples]
            )
            for source in eval_sources
        }

    @property
    def source_names(self) -> str:
        """Names of the training sources, separated by commas."""
        return ", ".join(source.name for source in self.sources)

    def steps(
        self, run: DataRank, count: int, *, per_device_batch_size: int, workers: int = 0
    ) -> Iterator[list[Batch]]:
        """Yield the list of this rank's micro-batches for each of the next steps.

        Reading starts at `self.position`. The caller calls `position.advance()` after each step.
        The seconds that this rank waits are added to `waited`.

        Args:
            run: this rank.
            count: number of steps.
            per_device_batch_size: number of samples in a micro-batch.
            workers: number of processes that read ahead; a stream uses at most one.

        Raises:
            DataError: the global batch does not divide over the ranks, `max_repeats` ends the data
                too early, or a row of a stream is refused.
        """
        if count < 1:
            return
        size = self.position.global_batch
        self.check_steps(self.position.samples_seen // size + count)
        accumulation = accumulation_for(size, per_device_batch_size, run.world_size)
        batches = iter(self._read_batches(run, count, per_device_batch_size, accumulation, workers))
        try:
            for _ in range(count):
                begun = time.perf_counter()
                with record_function(READING):
                    step = list(islice(batches, accumulation))
                self.waited += time.perf_counter() - begun
                yield step
        finally:
            # Not later: a traceback would keep the worker processes alive, which then fail.
            del batches

    def describe_samples(self, before: int, run: DataRank) -> list[str]:
        """Describe the samples that this rank reads in step `before + 1`, one text per sample.

        The list is empty if the samples are not known in advance, as in a stream.
        """
        return []

    def evals(self, run: DataRank, *, per_device_batch_size: int) -> dict[str, Batches]:
        """Build the evaluation data of this rank: source name -> iterable of micro-batches.

        All ranks get the same number of micro-batches, completed with samples of padding.
        """
        loaders: dict[str, Batches] = {}
        for name, samples in self.eval_sets.items():
            order: Any = range(len(samples))
            if self.shape.packing == "none":
                order = np.argsort(samples.pieces.lengths, kind="stable")
            batches = eval_batches(order, per_device_batch_size, run.rank, run.world_size)
            loaders[name] = run.loader(samples, batches, collate_fn=self.shape.batch)
        return loaders

    def tokens_of_step(self) -> float:
        """Estimate the tokens of a step: the mean over global batches, without padding."""
        means = self._mean_tokens_and_weights()
        mean = sum(tokens * share for tokens, share in means) / sum(share for _, share in means)
        return mean * self.position.global_batch

    @abstractmethod
    def lines(self) -> list[str]:
        """Format the log lines that describe the data when a run starts."""

    def reading_lines(self) -> list[str]:
        """Format log lines with the number of rows read so far; [] if no source is streamed."""
        return []

    @abstractmethod
    def steps_for(self, epochs: float) -> int:
        """Compute the number of steps in `epochs` passes over the data, at this global batch.

        Raises:
            DataError: `max_repeats` allows fewer steps, or the data is a stream.
        """

    def check_steps(self, max_steps: int) -> None:
        """Raise DataError if the run needs more samples than `max_repeats` allows.

        The message gives the possible number of steps.

        Args:
            max_steps: total number of steps of the run, including those already done.
        """
        total, size = self.total, self.position.global_batch
        if total is not None and max_steps * size > total:
            raise DataError(
                f"expected at most {total // size} steps of {size} samples, got {max_steps} steps: "
                f"max_repeats of data.sources allows {total} samples of {self.source_names}; set "
                f"train.max_steps to {total // size}, raise max_repeats, or add data"
            )

    @abstractmethod
    def check_enough(self, world_size: int) -> None:
        """Raise DataError if the data is too little to train on `world_size` data ranks.

        Encoded data needs a sample for each rank. A stream needs a supervised token in its first
        rows.
        """

    @abstractmethod
    def _read_batches(
        self, run: DataRank, count: int, size: int, accumulation: int, workers: int
    ) -> Batches:
        """Read this rank's micro-batches of the next `count` steps, without grouping them by step.

        Args:
            run: this rank.
            count: number of steps.
            size: number of samples in a micro-batch.
            accumulation: number of micro-batches of this rank in a step.
            workers: number of processes that read ahead.
        """

    @abstractmethod
    def _mean_tokens_and_weights(self) -> list[tuple[float, float]]:
        """Return (mean tokens of a sample, mixing weight) for each training source."""
