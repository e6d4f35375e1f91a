"""Guards of a run's numbers: bad steps, changed bits, and how long ranks wait for data."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit import ranks
from toolkit.config.settings import RunConfig
from toolkit.data.prepare import TrainingData
from toolkit.training.guards.bad_steps import SPIKES, BadSteps, Spikes
from toolkit.training.guards.integrity import Integrity
from toolkit.training.train_state import TrainState

_NANO = 10**9


@dataclass
class Guards:
    """All of them, as the metrics of a run call them; what is None is not watched."""

    bad_steps: BadSteps = field(default_factory=BadSteps)
    integrity: Integrity | None = None
    waited: Callable[[], float] | None = None  # seconds that this rank has waited for data so far
    state: TrainState | None = None
    spikes: Spikes | None = None  # the steps that an `Update` leaves out

    def __post_init__(self) -> None:
        self._before = 0.0 if self.waited is None else self.waited()

    def take(self, step: int, stats: Any) -> None:
        """Take the `StepStats` of `step`; does not wait."""
        self.bad_steps.take(step, stats)
        if self.integrity is not None:
            self.integrity.take(step)

    def line(self, step: int, steps: int) -> dict[str, float]:
        """Return the keys that a line of metrics gets after `step`, `steps` after the last line.

        Collective, one small exchange; waits for the device. TrainingError: the bits of a rank's
        state, or where it stands, are not as they should be.
        """
        bits = [] if self.integrity is None else self.integrity.numbers()
        waits = []
        if self.waited is not None:
            now = self.waited()
            waits, self._before = [int((now - self._before) / steps * _NANO)], now
        if not bits and not waits:
            return {}
        rows = ranks.gather_integers(bits + waits)
        if self.integrity is not None:
            self.integrity.judge(step, [row[: len(bits)] for row in rows])
        if not waits:
            return {}
        seconds = [row[-1] / _NANO for row in rows]
        return {"data_time": statistics.median(seconds), "data_time_max": max(seconds)}

    def before_save(self, step: int) -> None:
        """Raise a `TrainingError` where what would be saved after `step` is not to be; put into the
        state what belongs to it. Collective, waits for the device; reads this rank's bytes twice.
        """
        self.bad_steps.read()
        if self.integrity is not None:
            self.integrity.judge(step, ranks.gather_integers(self.integrity.numbers()))
        self.bad_steps.check_values(step)
        if self.state is not None and self.spikes is not None:
            self.state.extra[SPIKES] = self.spikes.state_dict()


def build_guards(
    cfg: RunConfig, data: TrainingData, state: TrainState, moved: Iterable[torch.Tensor] = ()
) -> Guards:
    """Return what watches a run from `state` on; `moved`: what changes without an optimizer."""
    train, feed, spikes = cfg.train, data.feed, None
    if train.skip_spikes is None:
        state.extra.pop(SPIKES, None)  # of a start that had them; they grow stale
    else:
        kept, device = state.extra.get(SPIKES, {}), data.run.device
        spikes = Spikes(train.skip_spikes, device, kept)
    every = train.logging_steps if train.check_steps is None else train.check_steps
    integrity = Integrity(state, every, moved) if every else None
    bad_steps = BadSteps(train.max_bad_steps, data.describe_samples, state)
    return Guards(bad_steps, integrity, lambda: feed.waited, state, spikes)
