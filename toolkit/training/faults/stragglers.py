"""Ranks that hold up the others: slow in reading data, or in computing.

Ranks of synchronous training end each step together, so that their step times say nothing. Who is
slow finds the others waiting at each collective: it spends the least time in them. What it spends
less than the others is what it costs them, and its time in data or in computing is that much more.

On a device collectives go on behind the computing, so that a wait need not cost anything, and what
is left of a step without them is not the computing: that is not told there.
"""

import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from toolkit import ranks
from toolkit.sharding.collective_times import CollectiveTimes

_LOST = 0.15  # of a step: what others must lose by a rank that is named
_IN_A_ROW = 3  # lines of metrics for which it is the same one, and of the same kind
_AGAIN = 100  # lines after which it is named once more
_NANO = 10**9
PARTS = ("data", "compute", "wait")


@dataclass
class Stragglers:
    """Keeps this rank's times, and names a rank by which the others lose time."""

    times: CollectiveTimes  # of this rank
    waited: Callable[[], float]  # the seconds that its steps have waited for data so far
    sampled: int = 1  # steps from one that is timed to the next, after the first; 1: all

    def __post_init__(self) -> None:
        self._before, self._steps, self._timed = self.waited(), 0, 0
        self._suspect: tuple[int, str] | None = None
        self._lines = 0  # in a row of which it is the suspect
        self.times.on = True

    def take(self, step: int) -> None:
        """Count a step, and time the next where that is due."""
        self._steps += 1
        self._timed += self.times.on
        self.times.on = (step + 1) % self.sampled == 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the collectives inside (of an evaluation) out."""
        on, self.times.on = self.times.on, False
        try:
            yield
        finally:
            self.times.on = on

    def numbers(self, step_time: float | None) -> list[int]:
        """Return this rank's nanoseconds a step since the last call: of the whole `step_time`
        (None, or no step was timed: 0), in data, and in collectives. Waits for those steps.
        """
        if not self._timed:
            step_time = None
        waited, steps, timed = self.waited(), max(1, self._steps), max(1, self._timed)
        data = (waited - self._before) / steps
        self._before, self._steps, self._timed = waited, 0, 0
        found = (step_time or 0.0, data, self.times.take() / timed)
        return [int(seconds * _NANO) for seconds in found]

    def judge(self, rows: list[list[int]]) -> dict[str, float]:
        """Return the times of a step as keys of a metrics line, given the `numbers` of all ranks,
        nothing where it was not timed; say which rank is slow, where one is for some time.
        Collective then: all decide by the same numbers.
        """
        whole, data, waits = ([row[i] / _NANO for row in rows] for i in range(3))
        if not whole[0]:
            return {}
        parts = zip(whole, data, waits, strict=True)
        compute = [max(0.0, seconds - read - waited) for seconds, read, waited in parts]
        if self.times.hidden:
            compute = []
        found = dict[str, float]()
        for name, values in zip(PARTS, (data, compute, waits), strict=True):
            if not values:
                continue
            ends = {"": statistics.median(values), "_min": min(values), "_max": max(values)}
            found |= {f"{name}_time{end}": value for end, value in ends.items()}
        self._watch(whole[0], data, compute, waits)
        return found

    def _watch(
        self, step_time: float, data: list[float], compute: list[float], waits: list[float]
    ) -> None:
        suspect = _slow(step_time, data, waits)
        self._lines = self._lines + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if suspect is None or self._lines % _AGAIN != _IN_A_ROW:
            return
        rank, kind = suspect
        host = ranks.gather(socket.gethostname())[rank]
        lost = _others(waits, rank) - waits[rank]
        if kind == "data":
            what = f"waits {data[rank]:.3g} s a step for data, others {_others(data, rank):.3g} s"
        elif not compute:
            what = "comes late to collectives"
        else:
            ratio = compute[rank] / max(1e-9, _others(compute, rank))
            what = f"computes {ratio:.1f} x as long as the others"
        costs = "costs them" if compute else "costs them, less what their computing hides,"
        ranks.say(
            f"WARNING: rank {rank} ({host}) {what}, which {costs} {lost:.3g} s a step "
            f"({lost / step_time:.0%})"
        )


def _slow(step_time: float, data: list[float], waits: list[float]) -> tuple[int, str] | None:
    """Return the rank by which the others lose time, and in what it is slow; None: no rank."""
    rank = waits.index(min(waits))
    if len(waits) == 1 or not step_time:
        return None
    lost = _others(waits, rank) - waits[rank]
    if lost < _LOST * step_time:
        return None
    more = data[rank] - _others(data, rank)
    return rank, "data" if more > lost / 2 else "compute"


def _others(values: list[float], rank: int) -> float:
    """Return the median of what the other ranks have."""
    return statistics.median(values[:rank] + values[rank + 1 :])
