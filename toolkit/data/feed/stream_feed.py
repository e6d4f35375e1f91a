"""Streamed sources as this rank's micro-batches, and the position that continues them.

The surface is that of `feed.Feed`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from toolkit import ranks
from toolkit.data.feed.mixed import GROUP, MixedStream
from toolkit.data.feed.sets import (
    MicroBatch,
    Processes,
    SampleShape,
    check_names,
    eval_batches,
    to_evaluate,
)
from toolkit.data.feed.stream import WINDOW, FirstWindow, StreamSource, sample_of
from toolkit.data.order.position import accumulation_for, check_reading
from toolkit.data.tokens.encode import EncodedSource
from toolkit.errors import DataError

_PLACE = "place"
_ERROR = "error"


class StreamPosition:
    """How far a run has read its streams: the state of the data in a checkpoint.

    Args:
        seed: of the orders.
        global_batch: samples of an optimizer step on all ranks.
        reading: what else the samples depend on, as JSON values; a difference is refused.
    """

    def __init__(self, seed: int, global_batch: int, reading: dict[str, Any]) -> None:
        self.seed, self.global_batch, self.reading = seed, global_batch, reading
        self.samples_seen = 0
        self.stream: dict[str, Any] | None = None
        self._after_step: dict[str, Any] | None = None

    @property
    def passes(self) -> dict[str, int]:
        """Source name -> passes over it that are done."""
        return self._of_sources("epoch")

    @property
    def rows_read(self) -> dict[str, int]:
        """Source name -> rows read in all passes, up to the window in hand."""
        return self._of_sources("rows_read")

    @property
    def left_out(self) -> dict[str, int]:
        """Source name -> how many of `rows_read` were left out."""
        return self._of_sources("left_out")

    @property
    def read(self) -> dict[str, dict[str, Any]]:
        """Source name -> what came of all rows read so far, ahead of the steps that are done by the
        window in hand: `passes` that are done, `rows_read`, `left_out`, `reasons` (reason -> rows),
        `first` (reason -> the first of them), `truncated`, `cut_off` (tokens).
        """
        return self.stream.get("read", {}) if self.stream else {}

    @property
    def epoch(self) -> float:
        """Passes that are done over the source that has the fewest."""
        return float(min(self.passes.values(), default=0))

    def _of_sources(self, name: str) -> dict[str, int]:
        sources = self.stream["sources"] if self.stream else {}
        return {source: place[name] for source, place in sources.items()}

    def advance(self) -> None:
        """Count the step that was read last as done.

        Raises:
            DataError: no step was read since the last call.
        """
        if self._after_step is None:
            raise DataError("expected a step that was read from the stream, to count it as done")
        self.samples_seen += self.global_batch
        self.stream, self._after_step = self._after_step, None

    def step_read(self, place: dict[str, Any]) -> None:
        """Remember the place after a step, for `advance`."""
        self._after_step = place

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, the same on every rank."""
        return {
            "samples_seen": self.samples_seen,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "reading": self.reading,
            "stream": self.stream,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`: its position and its global batch.

        Raises:
            DataError: it is of other data or of another order.
        """
        if "stream" not in state:
            raise DataError(
                "the checkpoint's position is one in data that were prepared before the run, this "
                "run reads streams (data.streaming); give the same, or start anew in another "
                "output_dir"
            )
        check_reading(
            state["reading"] | {"seed": state["seed"]}, self.reading | {"seed": self.seed}
        )
        self.samples_seen, self.global_batch = state["samples_seen"], state["global_batch"]
        self.stream, self._after_step = state["stream"], None


class StreamFeed:
    """Streamed sources as this rank's micro-batches. Used as `Feed` is.

    Every rank reads and encodes every row; see [Note: streams] in `stream.py`. What to
    evaluate on is not streamed, and nothing is split off a stream.

    Args:
        sources: at least one; with weights where there are several.
        shape: how rows become samples.
        seed: of the orders.
        global_batch: samples of an optimizer step on all ranks; a checkpoint's own replaces it.
        eval_sources: what to evaluate on.
        max_eval_samples: evaluate on so many windows or rows of each source at most.
        window: rows of a source that are shuffled and packed together.
        group: global batches that are sorted by length together, where samples are padded.

    Raises:
        DataError: no source, two of one name, or several without weights.
    """

    position: StreamPosition
    """Where the run stands: the state of the data in a checkpoint."""

    def __init__(
        self,
        sources: Sequence[StreamSource],
        shape: SampleShape,
        *,
        seed: int,
        global_batch: int,
        eval_sources: Sequence[EncodedSource] = (),
        max_eval_samples: int | None = None,
        window: int = WINDOW,
        group: int = GROUP,
    ) -> None:
        check_names(sources)
        self.sources, self.shape, self.seed = list(sources), shape, seed
        self.sequence_length = shape.sequence_length
        self.eval_sets = to_evaluate(eval_sources, shape, max_eval_samples)
        self._window, self._group = window, group
        self._mixed(global_batch)  # refuses what cannot be mixed before anything long begins
        self.position = StreamPosition(seed, global_batch, self._reading())
        self._first_windows: list[FirstWindow] | None = None

    def _mixed(self, global_batch: int) -> MixedStream:
        return MixedStream(
            self.sources, self.shape, self.seed, global_batch, self._window, self._group
        )

    def _reading(self) -> dict[str, Any]:
        reading: dict[str, Any] = {
            "data.packing": self.shape.packing,
            "data.sequence_length": self.shape.sequence_length,
            "the rows shuffled together": self._window,
            "the batches grouped by length": self._group,
            "the sources": [source.name for source in self.sources],
        }
        for source in self.sources:
            reading[f"the shards of {source.name}"] = source.rows.num_shards
            reading[f"the weight of {source.name}"] = source.weight
            reading[f"max_repeats of {source.name}"] = source.max_repeats
        return reading

    def steps_for(self, epochs: float) -> int:
        """Refuse: how many samples a stream gives, nobody knows before its end."""
        raise DataError(
            "expected a number of steps, since how long a pass over a stream is nobody knows "
            "before it ends; set train.max_steps"
        )

    def check_steps(self, max_steps: int) -> None:
        """Accept: where max_repeats ends the data is seen when it does."""

    def check_enough(self, world_size: int) -> None:
        """Refuse a stream whose first rows give nothing to learn. Reads a window of each.

        However few samples there are is enough: a stream that is read through begins anew.

        Raises:
            DataError: names the source; or a row is refused.
        """
        for seen in self.first_windows():
            if not seen.supervised:
                raise DataError(
                    f"expected tokens to learn in the stream {seen.name}, its first {seen.rows} "
                    f"rows gave {seen.samples} samples of {seen.tokens} tokens and none that the "
                    f"loss covers ({seen.left_out} rows were left out); see data.supervise and the "
                    "format of the rows"
                )

    def first_windows(self) -> list[FirstWindow]:
        """Return what the first window of each source holds; read at the first call.

        Raises:
            DataError: a row is refused, or a whole pass gives no sample.
        """
        if self._first_windows is None:
            mixed = self._mixed(self.position.global_batch)
            self._first_windows = [stream.first_window() for stream in mixed.streams]
        return self._first_windows

    def reading_lines(self) -> list[str]:
        """Return what came of the rows read so far, as lines: rows, left out and why, truncated.

        Counts of the run so far, over all its starts; none before the first step is done.
        """
        lines = []
        for name, read in self.position.read.items():
            passes = f"{read['passes']:,} {'pass' if read['passes'] == 1 else 'passes'} done"
            lines.append(
                f"{name}: {read['rows_read']:,} rows read ({passes}), {read['left_out']:,} left "
                f"out, {read['truncated']:,} truncated ({read['cut_off']:,} tokens cut off)"
            )
            for reason, rows in read["reasons"].items():
                first = " ".join(read["first"].get(reason, "").split())
                first = "".join(c if c.isprintable() else repr(c)[1:-1] for c in first)
                lines.append(f"  left out {rows:,}: {reason} (the first: {first})")
        return lines

    def tokens_of_step(self) -> float:
        """Return the mean of the tokens of a global batch, without padding, by weight.

        An estimate from the first window of each source.
        """
        shares = self._mixed(self.position.global_batch).shares
        mean = sum(
            seen.tokens / seen.samples * share / sum(shares)
            for seen, share in zip(self.first_windows(), shares, strict=True)
        )
        return mean * self.position.global_batch

    def steps(
        self, run: Processes, count: int, *, per_device_batch_size: int, workers: int = 0
    ) -> Iterator[list[MicroBatch]]:
        """Give this rank's micro-batches of the next `count` steps, a list for each.

        They begin at the position, which does not move by itself: call `position.advance()` when a
        step is done. Any number of `workers` above 0 is one process that reads ahead.

        Raises:
            DataError: the global batch does not divide over the ranks, a row is refused, or
                max_repeats ends the data before.
        """
        if count < 1:
            return
        size = self.position.global_batch
        each = accumulation_for(size, per_device_batch_size, run.world_size)
        batches = RankBatches(
            self._mixed(size),
            self.position.stream,
            self.shape,
            count,
            per_device_batch_size,
            run.rank,
            run.world_size,
        )
        stream = iter(run.stream(batches, workers))
        try:
            for _ in range(count):
                micro_batches = list(islice(stream, each))
                for batch in micro_batches:
                    if _ERROR in batch:
                        raise _refusal(batch[_ERROR])
                self.position.step_read(json.loads(micro_batches[-1].pop(_PLACE)))
                yield micro_batches
        finally:
            del stream  # now: a traceback would keep its worker, which then ends badly

    def evals(
        self, run: Processes, *, per_device_batch_size: int
    ) -> dict[str, Iterable[MicroBatch]]:
        """Return source name -> this rank's micro-batches to evaluate on; see `eval_batches`."""
        return eval_batches(run, self.eval_sets, self.shape, per_device_batch_size)


class RankBatches(IterableDataset):
    """The micro-batches of one rank: of each global batch every W-th sample, from its own on.

    The last one of a step carries the place after it, as JSON under `place`. Data that ends, or a
    row that is refused, comes as a batch `{"error": text}`: a worker process would add its own
    traceback.
    """

    def __init__(
        self,
        mixed: MixedStream,
        place: dict[str, Any] | None,
        shape: SampleShape,
        steps: int,
        per_device_batch: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.mixed, self.place, self.shape, self.steps = mixed, place, shape, steps
        self.per_device_batch, self.rank, self.world_size = per_device_batch, rank, world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        collate: Callable[[list], Any] = self.shape.collate() or default_collate
        size = self.per_device_batch
        for step in range(self.steps):
            try:
                if step == 0 and self.place is not None:
                    self.mixed.load_state_dict(self.place)  # here: it opens the files
                items = self.mixed.next_batch()[self.rank :: self.world_size]
            except DataError as error:
                yield {_ERROR: str(error)}
                return
            for first in range(0, len(items), size):
                samples = [sample_of(item, self.shape) for item in items[first : first + size]]
                batch = collate(samples)
                if first + size >= len(items):
                    batch[_PLACE] = json.dumps(self.mixed.state_dict())
                yield batch


def _refusal(text: str) -> DataError:
    """Return the error that ends the run.

    As a rule all ranks meet it, since all read the same, and the first of them prints it. But a
    file or a machine may fail one rank alone: it must not count on another one to say so, nor wait
    for the others, which may be in a collective of the model.
    """
    error = DataError(text)
    error.already_reported = not ranks.first_to_report(text)  # type: ignore[attr-defined]
    return error
