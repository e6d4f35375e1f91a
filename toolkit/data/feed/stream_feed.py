"""The feed of streamed sources, whose rows are read and encoded while training."""

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

LANE_ROWS = 128
"""Minimum number of rows of each source in a lane; with fewer rows there are fewer lanes."""
# Part of the position: raise it when the same rows come in another order.
_DEALING = 2
_PLACES = "places"
_ERROR = "error"
_BATCH = "batch"


class StreamFeed(Feed):
    """The `Feed` of sources that are read and encoded while training.

    A stream is divided into lanes, independent sequences of rows. A rank encodes only the rows of
    its lanes; see [Note: streams] in `stream.py`. Evaluation sources are encoded before training.
    No evaluation split is taken from a stream.

    Args:
        sources: the streams, at least one.
        shape: how rows become samples.
        seed: seed of the order of rows.
        global_batch: number of samples in a step, over all ranks.
        eval_sources: encoded sources to evaluate on.
        max_eval_samples: maximum number of windows or rows of each source to evaluate on.
        lanes: maximum number of lanes.
        window: maximum number of samples whose rows are shuffled and packed together.
        lane_rows: minimum number of rows of each source in a lane. If a source has too few rows,
            the number of lanes is reduced to a divisor of `lanes`.

    Raises:
        DataError: one of several sources has no weight, or `max_repeats` is not a whole number.
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
            reading |= {f"{name} of {source.name}": fact for name, fact in source.facts.items()}
            reading[f"the weight of {source.name}"] = source.weight
            reading[f"max_repeats of {source.name}"] = source.max_repeats
        position = Position(None, seed, global_batch, reading)
        super().__init__(shape, position, eval_sources, max_eval_samples)
        for i, source in enumerate(sources):
            # Refuses a source that cannot be streamed.
            SourceStream(source, i, shape, seed)

    def lines(self) -> list[str]:
        """Format the log lines that describe the data when a run starts."""
        evals = sum(len(samples) for samples in self.eval_sets.values())
        return [
            f"{self.source_names}: {self.shape}, read while training in {self.lanes} lanes; "
            f"{evals:,} to evaluate"
        ]

    def uneven_lane_lines(self, world_size: int) -> list[str]:
        """Return [a log note] if the lanes do not divide evenly over the ranks; else [].

        There is no note if there is only one lane.
        """
        lanes_per_rank = self.lanes // math.gcd(world_size, self.lanes)
        if lanes_per_rank * world_size == self.lanes or self.lanes == 1:
            return []
        return [
            f"NOTE: the stream's {self.lanes} lanes do not divide by {world_size} processes: each "
            f"reads {lanes_per_rank}, and uses only its own samples of them (data.stream_lanes)"
        ]

    def steps_for(self, epochs: float) -> int:
        """Always raise a DataError, because the length of a stream is not known in advance."""
        raise DataError(
            "expected a number of steps, since the length of a stream is not known before its end; "
            "set train.max_steps"
        )

    def check_enough(self, world_size: int) -> None:
        """Raise DataError if the first window of a stream has no supervised token.

        Reads that window from each source. `world_size` is not used.
        """
        # Any number of samples is enough, because a stream starts again at its end.
        for stream in self.first_windows:
            labels = [piece.labels[1:] for item in stream.items for piece in item.pieces]
            if all((part == IGNORED).all() for part in labels):
                counts = stream.row_counts()
                raise DataError(
                    f"expected supervised tokens in the stream {stream.source.name}, but its first "
                    f"{counts['rows_read']} rows gave {len(stream.items)} samples without any "
                    f"({counts['left_out']} rows were skipped); check data.supervise and the "
                    "format of the rows"
                )

    @cached_property
    def first_windows(self) -> list[SourceStream]:
        """One new stream per source that has read its first window with samples. Cached.

        The streams serve to inspect the data. Each has a single lane, and the position of the run
        does not change.
        """
        seed, window = self.position.seed, self.window
        streams = [
            SourceStream(source, i, self.shape, seed, window, first=window)
            for i, source in enumerate(self.sources)
        ]
        for stream in streams:
            stream.next()
        return streams

    def _mean_tokens_and_weights(self) -> list[tuple[float, float]]:
        """Estimate (mean tokens of a sample, mixing weight) per source from `first_windows`."""
        return [
            (sum(item.length for item in s.items) / len(s.items), s.source.weight or 1)
            for s in self.first_windows
        ]

    def _read_batches(
        self, run: DataRank, count: int, size: int, accumulation: int, workers: int
    ) -> Batches:
        """Yield this rank's micro-batches of the next `count` steps.

        At the last micro-batch of a step, sets `position.after_step` to the new states of the
        lanes, which `position.advance()` then applies.

        Raises:
            DataError: `max_repeats` ends the data, or a row is refused.
        """
        batches = RankBatches(
            self.sources,
            self.shape,
            copy.copy(self.position),
            self.lanes,
            self.window,
            count,
            size,
            run.rank,
            run.world_size,
        )
        for batch in run.loader(batches, workers=workers):
            if _ERROR in batch:
                # Only this rank may have an error in its lanes. It must not wait for the other
                # ranks, which may be in a collective.
                raise DataError(batch[_ERROR])
            if _PLACES in batch:
                self.position.after_step = json.loads(batch[_PLACES])
            yield batch[_BATCH]

    def reading_lines(self) -> list[str]:
        """Format log lines that count read, skipped and truncated rows of each source so far.

        The counts are those that `position.state_dict()` collected last; [] before that.
        """
        lanes = self.position.stream or {}
        lines = []
        for source in self.sources if lanes else ():
            places = [lane["sources"][source.name] for lane in lanes.values()]
            passes = min(place["place"]["at"][0] for place in places)
            passes = 0 if len(places) < self.lanes else passes
            counts = [place["read"] for place in places]
            names = ("rows_read", "left_out", "truncated", "cut_off")
            read, skipped, truncated, cut_off = (
                sum(count.get(name, 0) for count in counts) for name in names
            )
            lines.append(
                f"{source.name}: {read:,} rows read ({passes:,} "
                f"{'pass' if passes == 1 else 'passes'} done), {skipped:,} skipped, {truncated:,} "
                f"truncated ({cut_off:,} tokens cut off)"
            )
            reasons, firsts = Counter[str](), dict[str, str]()
            for count in counts:
                reasons.update(count.get("reasons", {}))
                firsts = count.get("first", {}) | firsts
            for reason, rows in reasons.items():
                first = escape_text(" ".join(firsts[reason].split()), keep="")
                lines.append(f"  skipped {rows:,}: {reason} (the first: {first})")
        return lines


class MixedLane:
    """The samples of one lane, mixed from all sources by weight.

    The mixture is that of [Note: mixing] in `order/mixture.py`, but the end of a source is not
    known in advance. Lane l starts at turn l of the mixture, so neighbouring lanes draw from
    different sources. At any point of the run, a source is at most one sample per lane away from
    its share.
    """

    def __init__(self, streams: Sequence[SourceStream], lane: Lane) -> None:
        self.streams = {stream.source.name: stream for stream in streams}
        self.shares = integer_shares([stream.source.weight or 1 for stream in streams])
        self.lane, self._turn, self._used_up = lane, lane.number, list[str]()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the lane and of its sources as JSON values.

        The row counts (`read`) of a source may include rows whose samples were not returned yet.
        """
        sources = {name: stream.state_dict() for name, stream in self.streams.items()}
        used_up = {"used_up": list(self._used_up)} if self._used_up else {}
        return {"turn": self._turn, "sources": sources} | used_up

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._turn, self._used_up = state["turn"], list(state.get("used_up", ()))
        for name, stream in self.streams.items():
            stream.load_state_dict(state["sources"][name])

    def next(self) -> StreamSample | None:
        """Return the next sample; None if `max_repeats` allows no more samples of any source."""
        names = list(self.streams)
        while active := [i for i, name in enumerate(names) if name not in self._used_up]:
            which, _ = source_at_turn(active, self.shares, np.array([self._turn]))
            name = names[int(which[0])]
            item = self.streams[name].next()
            if item is not None:
                self._turn += 1
                return item
            # The other sources share the following turns, from the beginning of a cycle.
            self._used_up.append(name)
            self._turn = self.lane.number
        return None


@dataclass(eq=False)
class RankBatches(IterableDataset):
    """The micro-batches of one rank: rank r of W reads samples r, r + W, ... of each global batch.

    Iterating yields dicts with a micro-batch under `batch`. The last dict of a step also has
    `places`: JSON text of lane number -> new state, for the lanes from which the step read. A
    DataError is not raised; instead, a last dict has only its message, under `error`.
    """

    sources: Sequence[StreamSource]
    shape: SampleShape
    position: Position
    """Where to begin: a copy, because the position of the run moves on."""
    lanes: int
    window: int
    steps: int
    """Number of steps to read."""
    per_device_batch: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batch, size = self.position.global_batch, self.per_device_batch
        lanes = self._lanes_of_rank()
        for step in range(self.steps):
            first = self.position.samples_seen + step * batch
            try:
                items = self._read_samples(lanes, range(first, first + batch))
            except DataError as error:
                yield {_ERROR: str(error)}
                return
            for begin in range(0, len(items), size):
                samples = [self.shape.sample(item.pieces) for item in items[begin : begin + size]]
                content: dict[str, Any] = {_BATCH: self.shape.batch(samples)}
                if begin + size >= len(items):
                    moved = {p % self.lanes for p in range(first, first + min(batch, self.lanes))}
                    numbers = sorted(moved & lanes.keys())
                    places = {str(number): lanes[number].state_dict() for number in numbers}
                    content[_PLACES] = json.dumps(places)
                yield content

    def _lanes_of_rank(self) -> dict[int, MixedLane]:
        """Create the lanes from which this rank reads: number -> lane at its stored position.

        If the lanes do not divide evenly over the ranks, several ranks read the same lane.
        """
        step, seed = math.gcd(self.world_size, self.lanes), self.position.seed
        readers: list[dict[int, GroupReader]] = [{} for _ in self.sources]
        lanes: dict[int, MixedLane] = {}
        places = (self.position.stream or {}) | self.position.local_places
        for number in range(self.rank % step, self.lanes, step):
            lane = Lane(number, self.lanes, self.position.global_batch)
            streams = [
                SourceStream(source, i, self.shape, seed, self.window, lane, readers[i])
                for i, source in enumerate(self.sources)
            ]
            lanes[number] = MixedLane(streams, lane)
            if str(number) in places:
                lanes[number].load_state_dict(places[str(number)])
        return lanes

    def _read_samples(self, lanes: dict[int, MixedLane], positions: range) -> list[StreamSample]:
        """Read the samples of one step from this rank's lanes, and return those that it trains on.

        Args:
            lanes: number -> lane, for the lanes of this rank. They advance past all samples of the
                step, including those that other ranks train on.
            positions: positions in the run of all samples of the step.

        Raises:
            DataError: `max_repeats` ends the data.
        """
        items = []
        for position in positions:
            lane = lanes.get(position % self.lanes)
            item = None if lane is None else lane.next()
            if item is not None and position % self.world_size == self.rank:
                items.append(item)
            elif item is None and lane is not None:
                size = len(positions)
                steps = position // size
                names = ", ".join(source.name for source in self.sources)
                raise DataError(
                    f"the data ended after {steps} steps of {size} samples: max_repeats allows no "
                    f"more passes over {names}; set train.max_steps to {steps}, raise max_repeats, "
                    "or add data"
                )
        return items
