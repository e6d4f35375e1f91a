"""What a run reads, step by step, and where it stands.

    feed.position.load_state_dict(saved["data"])            # resuming
    for micro_batches in feed.steps(run, count, per_device_batch_size=8):
        train_step(model, optimizer, micro_batches)
        feed.position.advance()
    for name, batches in feed.evals(run, per_device_batch_size=8).items():
        evaluate(model, batches)

`prepared.PreparedFeed` has all rows at hand, `stream_feed.StreamFeed` reads them while training.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch

from toolkit.data.order.position import EvalBatches, Position, accumulation_for
from toolkit.data.samples.sequences import Packed, PadCollate, Padded, Windows
from toolkit.data.tokens.encode import EncodedSource

Packing = Literal["wrapped", "bfd", "none"]
MicroBatch = dict[str, torch.Tensor]
SampleSet = Windows | Packed | Padded


class Processes(Protocol):
    """The processes of the run, as `training.launch.Run` has them."""

    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def loader(
        self,
        dataset: Any,
        batches: Any,
        workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
    ) -> Any:
        """Return this rank's batches of a map-style data set, on its device."""

    def stream(self, batches: Any, workers: int = 0) -> Any:
        """Return `batches`, which are this rank's, on its device."""


@dataclass(frozen=True)
class SampleShape:
    """How rows become samples."""

    packing: Packing
    """See `DataConfig.packing`, `auto` decided."""
    sequence_length: int
    """Tokens of a sample at most."""
    pad_id: int = 0
    """Token that fills up."""

    def collate(self) -> Callable[[list], Any] | None:
        """Return what makes a micro-batch of samples; None where they are just stacked."""
        return PadCollate(self.pad_id, self.sequence_length) if self.packing == "none" else None

    def __str__(self) -> str:
        if self.packing == "wrapped":
            return f"samples of {self.sequence_length} tokens"
        how = "packed" if self.packing == "bfd" else "padded"
        return f"samples of up to {self.sequence_length} tokens, {how}"


class Feed(ABC):
    """This rank's micro-batches, and where the run stands.

    A sample is a packed one (`bfd`), a window (`wrapped`) or a row (`none`), and so is what weights
    and batch sizes count.
    """

    def __init__(
        self,
        shape: SampleShape,
        position: Position,
        eval_sources: Sequence[EncodedSource],
        eval_sets: Mapping[str, SampleSet],
    ) -> None:
        self.shape, self.position = shape, position
        self.eval_sources, self.eval_sets = list(eval_sources), dict(eval_sets)

    def steps(
        self, run: Processes, count: int, *, per_device_batch_size: int, workers: int = 0
    ) -> Iterator[list[MicroBatch]]:
        """Give this rank's micro-batches of the next `count` steps, a list for each.

        They begin at the position, which does not move by itself: call `position.advance()` when a
        step is done. For a stream any number of `workers` above 0 is one process that reads ahead.

        Raises:
            DataError: the global batch does not divide over the ranks, max_repeats ends the data
                before, or a row of a stream is refused.
        """
        if count < 1:
            return
        size = self.position.global_batch
        self.check_steps(self.position.samples_seen // size + count)
        each = accumulation_for(size, per_device_batch_size, run.world_size)
        batches = iter(self._read(run, count, per_device_batch_size, each, workers))
        try:
            for _ in range(count):
                yield list(islice(batches, each))
        finally:
            del batches  # now: a traceback would keep its workers, which then end badly

    def evals(
        self, run: Processes, *, per_device_batch_size: int
    ) -> dict[str, Iterable[MicroBatch]]:
        """Return source name -> this rank's micro-batches, each sample once over all ranks.

        Every rank gets as many; what is missing is filled with samples without labels.
        """
        found: dict[str, Iterable[MicroBatch]] = {}
        for name, samples in self.eval_sets.items():
            order: Any = range(len(samples))
            if isinstance(samples, Padded):
                order = np.argsort(samples.pieces.lengths, kind="stable")
            batches = EvalBatches(order, per_device_batch_size, run.world_size)
            found[name] = run.loader(samples, batches, collate_fn=self.shape.collate())
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

        Raises:
            DataError: max_repeats does not allow so many passes, or a stream has no known end.
        """

    @abstractmethod
    def check_steps(self, max_steps: int) -> None:
        """Refuse more steps than max_repeats is known to allow.

        Raises:
            DataError: names how many it allows.
        """

    @abstractmethod
    def check_enough(self, world_size: int) -> None:
        """Refuse data of which nothing would be learned, or not enough for so many ranks.

        Raises:
            DataError: says what there is.
        """

    @abstractmethod
    def _read(
        self, run: Processes, count: int, size: int, each: int, workers: int
    ) -> Iterable[MicroBatch]:
        """Return this rank's micro-batches of `count` steps: `each` of `size` samples a step."""

    @abstractmethod
    def _means(self) -> list[tuple[float, float]]:
        """Return the mean tokens of a sample and the share of each source."""
