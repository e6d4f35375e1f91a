"""Streamed sources as this rank's micro-batches."""

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from toolkit.data.feed.feed import Batches, DataRank, Feed
from toolkit.data.feed.shares import GroupReader, reduce_lanes
from toolkit.data.feed.stream import WINDOW, Lane, SourceStream, StreamSample, StreamSource
from toolkit.data.order.mixture import integer_shares, source_at_turn
from toolkit.data.order.position import Position
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import escape_text
from toolkit.data.tokens.encoded import EncodedSource
from toolkit.errors import DataError

LANE_ROWS = 128  # of each source, at least: with fewer there are fewer lanes
_DEALING = 2  # raise it when the same rows come in another order
_PLACES = "places"
_ERROR = "error"
_BATCH = "batch"


class StreamFeed(Feed):
    """Streamed sources, at least one, as this rank's micro-batches; see `Feed`.

    A rank reads and encodes the rows of its lanes; see [Note: streams] in `stream.py`. What to
    evaluate on is not streamed, and nothing is split off a stream. There are `lanes` at most: a
    divisor of it where a source has less than `lane_rows` rows for each. `window` samples'
    worth of a lane's rows are shuffled and packed together. DataError: several sources without
    weights, or max_repeats is not a whole number of passes.
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
        lanes: int = 1,
        window: int = WINDOW,
        lane_rows: int = LANE_ROWS,
    ) -> None:
        self.sources, self.window = list(sources), window
        if len(sources) > 1 and (lacking := [s.name for s in sources if s.weight is None]):
            raise DataError(
                "expected a weight (data.sources[...].weight) of each stream, whose size is not "
                f"known before its end: {', '.join(lacking)} has none"
            )
        self.lanes = reduce_lanes([source.rows for source in sources], lanes, lane_rows)
        reading: dict[str, Any] = {
            "data.packing": shape.packing,
            "data.sequence_length": shape.sequence_length,
            "data.stream_lanes": self.lanes,
            "the dealing of rows": _DEALING,
            "the samples of a window": window,
            "the sources": [source.name for source in sources],
        }
        for source in sources:
            reading[f"the shards of {source.name}"] = source.rows.num_shards
            reading[f"the bytes of {source.name}"] = source.sizes and sum(source.sizes)
            reading |= {f"{what} of {source.name}": value for what, value in source.facts.items()}
            reading[f"the weight of {source.name}"] = source.weight
            reading[f"max_repeats of {source.name}"] = source.max_repeats
        position = Position(None, seed, global_batch, reading)
        super().__init__(shape, position, eval_sources, max_eval_samples)
        for i, source in enumerate(sources):
            SourceStream(source, i, shape, seed)  # refuses what cannot be streamed

    def lines(self) -> list[str]:
        evals = sum(len(samples) for samples in self.eval_sets.values())
        how = f"read while training in {self.lanes} lanes"
        return [f"{self.names}: {self.shape}, {how}; {evals:,} to evaluate"]

    def uneven_lines(self, world_size: int) -> list[str]:
        """Return what is said where ranks and lanes do not divide each other."""
        each = self.lanes // math.gcd(world_size, self.lanes)
        if each * world_size == self.lanes or self.lanes == 1:
            return []
        how = f"{self.lanes} lanes do not divide by {world_size} processes: each reads {each}"
        return [f"NOTE: the stream's {how}, and uses its own samples of them (data.stream_lanes)"]

    def steps_for(self, epochs: float) -> int:
        raise DataError(
            "expected a number of steps: the length of a stream is not known before its end; set "
            "train.max_steps"
        )

    def check_enough(self, world_size: int) -> None:
        # However few samples there are is enough: a stream that is read through begins anew.
        for stream in self.first_windows:
            labels = [piece.labels[1:] for item in stream.items for piece in item.pieces]
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
        """Each source at its first window that has a sample, as if it had one lane."""
        seed, window = self.position.seed, self.window
        streams = [
            SourceStream(source, i, self.shape, seed, window, first=window)
            for i, source in enumerate(self.sources)
        ]
        for stream in streams:
            stream.next()
        return streams

    def _means(self) -> list[tuple[float, float]]:
        return [
            (sum(item.length for item in s.items) / len(s.items), s.source.weight or 1)
            for s in self.first_windows
        ]

    def _read(self, run: DataRank, count: int, size: int, each: int, workers: int) -> Batches:
        at, rank, world = copy.copy(self.position), run.rank, run.world_size
        lanes, window = self.lanes, self.window
        mine = RankBatches(self.sources, self.shape, at, lanes, window, count, size, rank, world)
        for read in run.loader(mine, workers=workers):
            if _ERROR in read:
                # A rank may be alone with what is wrong in its lanes: it must not wait for the
                # others, which may be in a collective.
                raise DataError(read[_ERROR])
            if _PLACES in read:
                self.position.after_step = json.loads(read[_PLACES])
            yield read[_BATCH]

    def reading_lines(self) -> list[str]:
        lanes = self.position.stream or {}
        lines = []
        for source in self.sources if lanes else ():
            places = [lane["sources"][source.name] for lane in lanes.values()]
            passes = min(place["place"]["at"][0] for place in places)
            passes = 0 if len(places) < self.lanes else passes
            counts = [place["read"] for place in places]
            names = ("rows_read", "left_out", "truncated", "cut_off")
            read, out, truncated, cut = (sum(c.get(name, 0) for c in counts) for name in names)
            lines.append(
                f"{source.name}: {read:,} rows read ({passes:,} "
                f"{'pass' if passes == 1 else 'passes'} done), {out:,} left "
                f"out, {truncated:,} truncated ({cut:,} tokens cut off)"
            )
            reasons, firsts = Counter[str](), dict[str, str]()
            for count in counts:
                reasons.update(count.get("reasons", {}))
                firsts = count.get("first", {}) | firsts
            for reason, rows in reasons.items():
                first = escape_text(" ".join(firsts[reason].split()), keep="")
                lines.append(f"  left out {rows:,}: {reason} (the first: {first})")
        return lines


class MixedLane:
    """The samples of a lane of several sources, mixed as in [Note: mixing] (`order/mixture.py`),
    but that the end of a source is seen when it comes.

    Lane l begins at turn l of the mixture, so that lanes next to each other draw of unlike sources,
    and each of all: after any number of samples of the run a source is within as many samples of
    its share as there are lanes.
    """

    def __init__(self, streams: Sequence[SourceStream], lane: Lane) -> None:
        self.streams = {stream.source.name: stream for stream in streams}
        self.shares = integer_shares([stream.source.weight or 1 for stream in streams])
        self.lane, self._turn, self._used_up = lane, lane.number, list[str]()

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values; `read` of its sources may be ahead of it."""
        sources = {name: stream.state_dict() for name, stream in self.streams.items()}
        used_up = {"used_up": list(self._used_up)} if self._used_up else {}
        return {"turn": self._turn, "sources": sources} | used_up

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place that `state_dict` gave."""
        self._turn, self._used_up = state["turn"], list(state.get("used_up", ()))
        for name, stream in self.streams.items():
            stream.load_state_dict(state["sources"][name])

    def next(self) -> StreamSample | None:
        """Return the next sample; None when all sources are used up."""
        names = list(self.streams)
        while active := [i for i, name in enumerate(names) if name not in self._used_up]:
            which, _ = source_at_turn(active, self.shares, np.array([self._turn]))
            name = names[int(which[0])]
            item = self.streams[name].next()
            if item is not None:
                self._turn += 1
                return item
            # Those that remain share out what follows, from the beginning of a cycle.
            self._used_up.append(name)
            self._turn = self.lane.number
        return None


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """The micro-batches of one rank: of each global batch every W-th sample, from its own on.

    The last one of a step carries the places after it of the lanes that gave its samples, as JSON
    under `places`. A DataError comes as a batch `{"error": text}`: a worker process would add its
    own traceback.
    """

    sources: Sequence[StreamSource]
    shape: SampleShape
    position: Position  # where it begins: a copy, since the run's moves on
    lanes: int
    window: int
    steps: int
    per_device_batch: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batch, size = self.position.global_batch, self.per_device_batch
        mine = self._mine()
        for step in range(self.steps):
            first = self.position.samples_seen + step * batch
            try:
                items = self._items(mine, range(first, first + batch))
            except DataError as error:
                yield {_ERROR: str(error)}
                return
            for begin in range(0, len(items), size):
                of = items[begin : begin + size]
                samples = [self.shape.sample(item.pieces) for item in of]
                made: dict[str, Any] = {_BATCH: self.shape.batch(samples)}
                if begin + size >= len(items):
                    gave = {p % self.lanes for p in range(first, first + min(batch, self.lanes))}
                    places = {str(n): mine[n].state_dict() for n in sorted(gave & mine.keys())}
                    made[_PLACES] = json.dumps(places)
                yield made

    def _mine(self) -> dict[int, MixedLane]:
        """Return the lanes that this rank's samples come from, at their places. Where the ranks do
        not divide the lanes, several ranks read the same ones, each whole.
        """
        step, seed = math.gcd(self.world_size, self.lanes), self.position.seed
        readers: list[dict[int, GroupReader]] = [{} for _ in self.sources]
        found: dict[int, MixedLane] = {}
        places = (self.position.stream or {}) | self.position.own
        for number in range(self.rank % step, self.lanes, step):
            lane = Lane(number, self.lanes, self.position.global_batch)
            streams = [
                SourceStream(source, i, self.shape, seed, self.window, lane, readers[i])
                for i, source in enumerate(self.sources)
            ]
            found[number] = MixedLane(streams, lane)
            if str(number) in places:
                found[number].load_state_dict(places[str(number)])
        return found

    def _items(self, mine: dict[int, MixedLane], positions: range) -> list[StreamSample]:
        """Return this rank's samples at the positions of a step; the end is a DataError."""
        items = []
        for position in positions:
            lane = mine.get(position % self.lanes)
            item = None if lane is None else lane.next()
            if item is not None and position % self.world_size == self.rank:
                items.append(item)
            elif item is None and lane is not None:
                done, size = position // len(positions), len(positions)
                names = ", ".join(source.name for source in self.sources)
                raise DataError(
                    f"the data ended after {done} steps of {size} samples: max_repeats allows no "
                    f"more passes over {names}; set train.max_steps to {done}, raise max_repeats, "
                    "or give more data"
                )
        return items
