"""Streamed sources as this rank's micro-batches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from toolkit import ranks
from toolkit.data.feed.feed import Batches, Feed, Processes
from toolkit.data.feed.stream import WINDOW, SourceStream, StreamSample, StreamSource
from toolkit.data.order.grouping import regroup
from toolkit.data.order.mixture import DrawnSamples, locate, shares
from toolkit.data.order.permutation import derived_seed
from toolkit.data.order.position import Position
from toolkit.data.samples.sequences import IGNORED, SampleShape
from toolkit.data.sources.row_values import escaped
from toolkit.data.tokens.encode import EncodedSource
from toolkit.errors import DataError

GROUP = 16  # global batches whose samples are sorted by length together, where they are padded
_PLACE = "place"
_ERROR = "error"


class StreamFeed(Feed):
    """Streamed sources, at least one, as this rank's micro-batches; see `Feed`.

    Every rank reads and encodes every row; see [Note: streams] in `stream.py`. What to evaluate on
    is not streamed, and nothing is split off a stream. `window` rows of a source are shuffled and
    packed together, `group` global batches sorted by length together where samples are padded.
    DataError: several sources without weights, or max_repeats is not a whole number of passes.
    """

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
        self.sources, self.window, self.group = list(sources), window, group
        if len(sources) > 1 and (lacking := [s.name for s in sources if s.weight is None]):
            what = f"whose size is not known before its end: {', '.join(lacking)} has none"
            raise DataError(f"expected a weight (data.sources[...].weight) of each stream, {what}")
        reading: dict[str, Any] = {
            "data.packing": shape.packing,
            "data.sequence_length": shape.sequence_length,
            "the rows shuffled together": window,
            "the batches grouped by length": group,
            "the sources": [source.name for source in sources],
        }
        for source in sources:
            reading[f"the shards of {source.name}"] = source.rows.num_shards
            reading[f"the weight of {source.name}"] = source.weight
            reading[f"max_repeats of {source.name}"] = source.max_repeats
        position = Position(None, seed, global_batch, reading)
        super().__init__(shape, position, eval_sources, max_eval_samples)
        self._mixed()  # refuses what cannot be streamed before anything long begins

    def _mixed(self) -> "MixedStream":
        return MixedStream(self.sources, self.shape, self.position, self.window, self.group)

    def lines(self) -> list[str]:
        evals = sum(len(samples) for samples in self.eval_sets.values())
        return [f"{self.names}: {self.shape}, read while training; {evals:,} to evaluate"]

    def steps_for(self, epochs: float) -> int:
        what = "the length of a stream is not known before its end; set train.max_steps"
        raise DataError(f"expected a number of steps: {what}")

    def check_enough(self, world_size: int) -> None:
        # However few samples there are is enough: a stream that is read through begins anew.
        for stream in self.first_windows:
            labels = [labels[1:] for item in stream.items for _, labels in item.pieces]
            if all((part == IGNORED).all() for part in labels):
                seen = stream.read()
                raise DataError(
                    f"expected tokens to learn in the stream {stream.source.name}, its first "
                    f"{seen['rows_read']} rows gave {len(stream.items)} samples and none that the "
                    f"loss covers ({seen['left_out']} rows were left out); see data.supervise and "
                    "the format of the rows"
                )

    @cached_property
    def first_windows(self) -> list[SourceStream]:
        """Each source at its first window that has a sample."""
        streams = list(self._mixed().streams.values())
        for stream in streams:
            stream.next()
        return streams

    def _means(self) -> list[tuple[float, float]]:
        return [
            (sum(item.length for item in s.items) / len(s.items), s.source.weight or 1)
            for s in self.first_windows
        ]

    def _read(self, run: Processes, count: int, size: int, each: int, workers: int) -> Batches:
        place, rank, world = self.position.stream, run.rank, run.world_size
        mine = RankBatches(self._mixed(), place, self.shape, count, size, rank, world)
        for batch in run.loader(mine, workers=workers):
            if _ERROR in batch:
                # As a rule all ranks meet it, and the first prints it. A file or a machine may fail
                # one alone: it must not wait for the others, which may be in a collective.
                error = DataError(batch[_ERROR])
                error.already_reported = not ranks.first_to_report(str(error))  # type: ignore[attr-defined]
                raise error
            if _PLACE in batch:
                self.position.after_step = json.loads(batch.pop(_PLACE))
            yield batch

    def reading_lines(self) -> list[str]:
        lines = []
        for name, read in (self.position.stream or {}).get("read", {}).items():
            passes = f"{read['passes']:,} {'pass' if read['passes'] == 1 else 'passes'} done"
            lines.append(
                f"{name}: {read['rows_read']:,} rows read ({passes}), {read['left_out']:,} left "
                f"out, {read['truncated']:,} truncated ({read['cut_off']:,} tokens cut off)"
            )
            for reason, rows in read["reasons"].items():
                first = escaped(" ".join(read["first"].get(reason, "").split()), keep="")
                lines.append(f"  left out {rows:,}: {reason} (the first: {first})")
        return lines


class MixedStream:
    """The samples of several streams as global batches, mixed as in [Note: mixing]
    (`order/mixture.py`), but that the end of a source is seen when it comes: at the same sample on
    all ranks, since all read the same.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        shape: SampleShape,
        position: Position,
        window: int,
        group: int,
    ) -> None:
        seed, self.global_batch = position.seed, position.global_batch
        self.streams = {
            source.name: SourceStream(source, i, shape, seed, window)
            for i, source in enumerate(sources)
        }
        self.shares = shares([source.weight or 1 for source in sources])
        self.seed = derived_seed(seed, "lengths")
        self.group = group if shape.packing == "none" else 1
        self._turn, self._used_up = 0, list[str]()
        self._begin(0)

    def _begin(self, batches: int) -> None:
        """Let the next group begin here, after so many batches."""
        self._start: dict[str, Any] = {
            "turn": self._turn,
            "used_up": list(self._used_up),
            "sources": {name: stream.state_dict() for name, stream in self.streams.items()},
            "batches": batches,
        }
        self._batches: list[list[StreamSample]] = []
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values, the same on every rank; `read` may be ahead of it."""
        read = {name: stream.read() for name, stream in self.streams.items()}
        return self._start | {"given": self._given, "read": read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place that `state_dict` gave."""
        self._turn, self._used_up = state["turn"], list(state["used_up"])
        for name, stream in self.streams.items():
            stream.load_state_dict(state["sources"][name])
        self._begin(state["batches"])
        if state["given"]:
            self._fill()
            self._given = state["given"]

    def next_batch(self) -> list[StreamSample]:
        """Return the samples of the next global batch; the end of the data is a DataError."""
        if self._given == len(self._batches):
            self._begin(self._start["batches"] + self._given)
            self._fill()
        self._given += 1
        return self._batches[self._given - 1]

    def _fill(self) -> None:
        size, done = self.global_batch, self._start["batches"]
        items = [item for _ in range(self.group * size) if (item := self._next()) is not None]
        if len(items) < size:
            raise DataError(
                f"the data ended after {done} steps of {size} samples: max_repeats allows no more "
                f"passes over {', '.join(self.streams)}; set train.max_steps to {done}, raise "
                "max_repeats, or give more data"
            )
        order = np.arange(len(items))
        if self.group > 1:
            names = ("source", "epoch", "length")
            sources, passes, lengths = (np.array([getattr(i, n) for i in items]) for n in names)
            draws = DrawnSamples(order, sources, passes)
            order = regroup(draws, lengths, size, self.seed, done)
        whole = order[: len(items) // size * size]
        self._batches = [[items[i] for i in batch] for batch in whole.reshape(-1, size)]

    def _next(self) -> StreamSample | None:
        names = list(self.streams)
        while active := [i for i, name in enumerate(names) if name not in self._used_up]:
            which, _ = locate(active, self.shares, np.array([self._turn]))
            name = names[int(which[0])]
            item = self.streams[name].next()
            if item is not None:
                self._turn += 1
                return item
            # Those that remain share out what follows, from the beginning of a cycle.
            self._used_up.append(name)
            self._turn = 0
        return None


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """The micro-batches of one rank: of each global batch every W-th sample, from its own on.

    The last one of a step carries the place after it, as JSON under `place`. A DataError comes as a
    batch `{"error": text}`: a worker process would add its own traceback.
    """

    mixed: MixedStream
    place: dict[str, Any] | None  # where it begins, but for the beginning
    shape: SampleShape
    steps: int
    per_device_batch: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
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
                of = items[first : first + size]
                batch = self.shape.batch([self.shape.sample(item.pieces) for item in of])
                if first + size >= len(items):
                    batch[_PLACE] = json.dumps(self.mixed.state_dict())
                yield batch
