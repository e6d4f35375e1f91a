"""The data of a run as its recipe reads it: micro-batches, evaluation sets, position."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import FinetuneConfig, PretrainConfig
from toolkit.data.feed.feed import Feed, MicroBatch, Processes
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.order.position import accumulation_for
from toolkit.data.report import render, supervision_report


class TrainingData:
    """What the loop of a recipe reads; `prepare_data` makes it."""

    def __init__(
        self,
        cfg: PretrainConfig | FinetuneConfig,
        feed: Feed,
        why: str,
        tokenizer: PreTrainedTokenizerBase | None,
        run: Processes,
    ) -> None:
        self.cfg, self.feed, self.run = cfg, feed, run
        self.why = why  # the reason of the packing
        self.tokenizer = tokenizer  # None where the data came as token ids
        self.position = feed.position

    @property
    def max_steps(self) -> int:
        """The optimizer steps of the run; of a resumed one with the checkpoint's global batch."""
        train = self.cfg.train
        if train.max_steps == -1:
            return self.feed.steps_for(train.num_train_epochs)
        self.feed.check_steps(train.max_steps)
        return train.max_steps

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        size = self.cfg.train.per_device_train_batch_size
        return accumulation_for(self.position.global_batch, size, self.run.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch without padding, on the mean."""
        return round(self.feed.tokens_of_step())

    @cached_property
    def evals(self) -> dict[str, Iterable[MicroBatch]]:
        """Source name -> this rank's micro-batches to evaluate on; empty without eval data."""
        train = self.cfg.train
        size = train.per_device_eval_batch_size or train.per_device_train_batch_size
        return self.feed.evals(self.run, per_device_batch_size=size)

    @ranks.collective
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint. Collective.

        Raises:
            DataError: it is of other data, its global batch does not divide over these ranks, or
                max_repeats ends the data before the last step.
        """
        self.position.load_state_dict(state)
        self.check_steps()

    def check_steps(self) -> None:
        """Raise a `DataError` for a batch that does not divide, or more steps than the data has."""
        _ = self.accumulation, self.max_steps

    def steps(self, *, after: int = 0) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Give (step, this rank's micro-batches) of the steps after `after`, to the last.

        Collective at the first of them. Call `position.advance()` when a step is done. Raises
        DataError as `load_state_dict` does, and for a row of a stream that is refused.
        """
        ranks.on_all(self.check_steps)
        read = self.feed.steps(
            self.run,
            self.max_steps - after,
            per_device_batch_size=self.cfg.train.per_device_train_batch_size,
            workers=self.cfg.data.num_workers,
        )
        yield from enumerate(read, start=after + 1)

    def lines(self) -> list[str]:
        """Return what a run prints of its data at the start: sources, packing, global batch."""
        train, size = self.cfg.train, self.position.global_batch
        lines = [f"data       {line}" for line in self.feed.lines()]
        if self.cfg.data.packing != "wrapped":
            lines.append(f"packing    {self.feed.shape.packing}: {self.why}")
        lines.append(
            f"batch      {size} samples = {train.per_device_train_batch_size} a device x "
            f"{self.accumulation} accumulated x {self.run.world_size} process(es) on "
            f"{self.run.device.type}"
        )
        if isinstance(self.feed, PreparedFeed) and size > len(self.feed):
            lines.append(
                f"WARNING: the global batch of {size:,} samples is larger than the training data "
                f"({len(self.feed):,} samples): each step reads it {size / len(self.feed):.1f} "
                "times; lower train.per_device_train_batch_size or gradient_accumulation_steps, or "
                "give more data"
            )
        return lines

    def reading_lines(self) -> list[str]:
        """Return what came of the rows of streams so far."""
        return [f"read       {line}" for line in self.feed.reading_lines()]

    def report(self) -> str:
        """Return the supervision report of fine-tuning; empty where the run encodes its rows."""
        encoded = isinstance(self.feed, PreparedFeed) or self.feed.eval_sources
        if not encoded or not isinstance(self.cfg, FinetuneConfig):
            return ""
        return render(supervision_report(self.feed, self.tokenizer, samples=1))
