"""Whenever a run is killed, on however many ranks it goes on: the same samples, each once a pass.

215 random schedules over small data sets. A schedule is a row of starts, each on its own number of
ranks and micro-batch size, that is killed at a random step and goes on from the last save.
"""

import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from feeds import APART, lockstep, source, stream

from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import DataError

pytestmark = pytest.mark.faults

SCHEDULES = {
    "one source": 50,
    "sources in one pass": 45,
    "weighted sources": 55,
    "stream": 25,
    "weighted streams": 25,
    "weighted streams in lanes": 15,
}

LANE_ROWS = 32

Load = Callable[[dict], dict | None]


@dataclass
class Case:
    """A small training run."""

    make: Callable[[], Any]
    """Makes its feed anew, as each start does."""
    global_batch: int
    steps: int
    passes_of: dict[int, list[int]]
    """Source -> the tokens of one pass over it."""
    seed: int
    lanes: int = 1


def case(kind: str, number: int) -> Case:
    rng = random.Random(f"{kind} {number}")
    shape = SampleShape(["bfd", "none", "wrapped"][number % 3], rng.choice([12, 16, 31]))
    streamed = "stream" in kind
    n = 1 if kind in ("one source", "stream") else rng.choice([2, 3])
    lanes = rng.choice([2, 4]) if kind.endswith("lanes") else 1
    rows = (12, 40) if lanes == 1 else (LANE_ROWS * lanes, LANE_ROWS * lanes + 40)
    lengths = [
        [rng.choice([0, 1, 2, 5, 9, 12, 20]) for _ in range(rng.randint(*rows))] for _ in range(n)
    ]
    for of_source in lengths:
        of_source[:4] = [9, 12, 9, 11]  # enough for a window
    mixing = [
        {
            "weight": rng.choice([1, 2, 0.3, 5]) if "weighted" in kind else None,
            # One that is used up early, so that its share goes to the others.
            "max_repeats": rng.choice([1, 2]) if "weighted" in kind and i == 0 else None,
        }
        for i in range(n)
    ]
    global_batch = rng.choice([4, 8, 12])
    window = rng.choice([4, 5, 9])
    if streamed:
        shards = [rng.choice([1, 3]) for _ in range(n)]
        sources: Any = [
            stream(of, i, s, **mix)
            for i, (of, s, mix) in enumerate(zip(lengths, shards, mixing, strict=True))
        ]
    else:
        sources = [
            source(of, i, **m) for i, (of, m) in enumerate(zip(lengths, mixing, strict=True))
        ]

    def make() -> Any:
        common = {"seed": number, "global_batch": rng.choice([global_batch, 24])}
        if streamed:
            common |= {"window": window, "lanes": lanes, "lane_rows": LANE_ROWS}
            return StreamFeed(sources, shape, **common)
        return PreparedFeed(sources, shape, **common)

    passes_of = {}
    for i, of_source in enumerate(lengths):
        ids = iter(range(APART * (i + 1), APART * (i + 2)))
        whole = [[next(ids) for _ in range(length)] for length in of_source]
        kept = [t for row in whole if not (streamed and row and row[0] % 7 == 0) for t in row]
        if shape.packing == "wrapped" and not streamed:
            kept = kept[: len(kept) // shape.sequence_length * shape.sequence_length]
        passes_of[i] = kept
    samples = sum(len(t) for t in passes_of.values()) // (9 if shape.packing == "none" else 14)
    steps = max(6, round(samples * rng.uniform(1.3, 3) / global_batch))
    return Case(make, global_batch, min(steps, 15 * lanes), passes_of, number, lanes)


def beginning(run: Case) -> dict:
    return run.make().position.state_dict() | {"global_batch": run.global_batch}


def straight(run: Case) -> list[list[list[int]]]:
    """Return the global batches of the run that nothing interrupts, on one rank."""
    reader = lockstep(run.make, beginning(run), 1, run.global_batch, run.steps)
    return [batch for batch, _ in reader]


def interrupted(run: Case, load: Load = lambda state: state) -> list[list[list[int]]]:
    """Return the global batches that count, over kills and starts on other numbers of ranks."""
    rng = random.Random(run.seed)
    begin = beginning(run)
    done: list[list[list[int]]] = []
    saved, state = 0, None
    while len(done) < run.steps:
        world = rng.choice([w for w in (1, 2, 3, 4) if run.global_batch % w == 0])
        each = run.global_batch // world
        per_device = rng.choice([b for b in range(1, each + 1) if each % b == 0])
        save_steps, killed_after = rng.randint(1, 3), rng.randint(1, 5)
        del done[saved:]
        start = begin if state is None else (load(state) or begin)
        count = min(killed_after, run.steps - saved)
        for i, (batch, after) in enumerate(lockstep(run.make, start, world, per_device, count)):
            done.append(batch)
            if (i + 1) % save_steps == 0 or len(done) == run.steps:
                saved, state = len(done), json.loads(after)
    return done


def wrong(batches: list[list[list[int]]], run: Case, expected: list[list[list[int]]]) -> list[str]:
    """Return what is not as it should be: the order, and each token once a pass over its source."""
    found = []
    if batches != expected:
        at = next(i for i, (a, b) in enumerate(zip(batches, expected, strict=True)) if a != b)
        found.append(f"step {at + 1} has other samples")
    read: dict[int, list[int]] = defaultdict(list)
    for batch in batches:
        for sample in batch:
            for token in sample:
                read[token // APART - 1].append(token)
    for number, tokens in read.items():
        of_pass = sorted(run.passes_of[number])
        if run.lanes > 1:  # which begin their passes by themselves
            times = dict.fromkeys(of_pass, 0) | Counter(tokens)
            if len(times) > len(of_pass) or max(times.values()) - min(times.values()) > 2:
                found.append(f"tokens of source {number} are read unevenly, or not in it")
            continue
        for first in range(0, len(tokens), len(of_pass)):
            part = sorted(tokens[first : first + len(of_pass)])
            whole = len(part) == len(of_pass)
            if (whole and part != of_pass) or len(set(part)) < len(part):
                found.append(f"pass {first // len(of_pass)} over source {number} is not whole")
            if not set(part) <= set(of_pass):
                found.append(f"source {number} gave what is not in it")
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_any_schedule_gives_the_same_samples(kind):
    passes, resumed = [], []

    def noted(state: dict) -> dict:
        resumed.append(state)
        return state

    for number in range(SCHEDULES[kind]):
        run = case(kind, number)
        expected = straight(run)
        assert len(expected) == run.steps
        assert wrong(interrupted(run, noted), run, expected) == [], number
        read = sum(len(s) for batch in expected for s in batch)
        passes.append(read / sum(len(tokens) for tokens in run.passes_of.values()))
    assert sum(p > 1 for p in passes) > len(passes) / 2  # most cross into a second pass
    assert len(resumed) > len(passes)


def begin_anew(state: dict) -> dict | None:
    return state | {"samples_seen": 0, "stream": None} if "stream" in state else None


def a_sample_further(state: dict) -> dict:
    if "stream" not in state:
        return state | {"samples_seen": state["samples_seen"] + 1}
    return moved(state, "row", 1)


def a_window_back(state: dict) -> dict:
    """As if a stream had been saved by its rows alone, as data sets themselves do."""
    if "stream" not in state:
        return state | {"samples_seen": state["samples_seen"] - state["global_batch"]}
    return moved(state, "given", -1)


def moved(state: dict, name: str, by: int) -> dict:
    """Return the state with the place of its last stream moved."""
    whole = copy.deepcopy(state)
    source = list(whole["stream"]["0"]["sources"].values())[-1]  # no limit ends it
    place, at = (source, "given") if name == "given" else (source["place"]["at"], 2)
    place[at] = max(0, place[at] + by) if place[at] else place[at] + abs(by)
    return whole


@pytest.mark.parametrize("load", [begin_anew, a_sample_further, a_window_back])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_wrong_resume_is_noticed(kind, load):
    noticed = []
    for number in range(20):
        run = case(kind, number)
        resumed = []

        def changed(state: dict, resumed: list = resumed) -> dict | None:
            resumed.append(load(state))
            return resumed[-1]

        try:
            batches = interrupted(run, changed)
            if resumed:
                noticed.append(bool(wrong(batches, run, straight(run))))
        except DataError:
            noticed.append(True)  # a place that this data does not have
        if len(noticed) == 3:
            break
    # A place at the very end of a pass can be moved without harm; that is rare.
    assert len(noticed) == 3
    assert sum(noticed) >= 2
