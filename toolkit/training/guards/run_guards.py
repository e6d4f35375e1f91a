"""The guards of a run's numbers: bad steps, changed bits, and waits of ranks for data."""

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

_NANOSECONDS = 10**9


@dataclass
class Guards:
    """The guards of a run, called by `Metrics`. A guard that is None is off."""

    bad_steps: BadSteps = field(default_factory=BadSteps)
    integrity: Integrity | None = None
    data_wait_seconds: Callable[[], float] | None = None
    """Returns the seconds that this rank has waited for data so far."""
    state: TrainState | None = None
    spikes: Spikes | None = None
    """Pass it to `Update.step`, which then skips spikes."""

    def __post_init__(self) -> None:
        self._last_wait = 0.0 if self.data_wait_seconds is None else self.data_wait_seconds()

    def record(self, step: int, stats: Any) -> None:
        """Pass the statistics of `step` to the guards. Does not wait for the device.

        Args:
            step: number of the step.
            stats: the `StepStats` of the step.
        """
        self.bad_steps.record(step, stats)
        if self.integrity is not None:
            self.integrity.record(step)

    def compute_metrics(self, step: int, steps: int) -> dict[str, float]:
        """Check the integrity of the state, and compute how long the ranks waited for data.

        Collective, with one small exchange; waits for the device.

        Args:
            step: number of the last step.
            steps: number of steps since the last call.

        Returns:
            `data_time` and `data_time_max`: median and maximum over the ranks of the seconds per
            step that a rank waited for data. Empty if waits are not measured.

        Raises:
            TrainingError: a rank's state has changed between steps, or values that must be equal on
                all ranks differ.
        """
        checksums = [] if self.integrity is None else self.integrity.compute_checksums()
        waits = []
        if self.data_wait_seconds is not None:
            now = self.data_wait_seconds()
            waits = [int((now - self._last_wait) / steps * _NANOSECONDS)]
            self._last_wait = now
        if not checksums and not waits:
            return {}
        rows = ranks.gather_integers(checksums + waits)
        if self.integrity is not None:
            self.integrity.compare_ranks(step, [row[: len(checksums)] for row in rows])
        if not waits:
            return {}
        seconds = [row[-1] / _NANOSECONDS for row in rows]
        return {"data_time": statistics.median(seconds), "data_time_max": max(seconds)}

    def check_before_save(self, step: int) -> None:
        """Raise a `TrainingError` if the state after `step` must not be saved.

        That is the case if too many steps were skipped, values are NaN or infinite, or the
        integrity check fails. Also writes the values that `spikes` remembers to `state.extra`.
        Collective; waits for the device and reads all bytes of this rank's shards twice.
        """
        self.bad_steps.report_skipped()
        if self.integrity is not None:
            checksums = ranks.gather_integers(self.integrity.compute_checksums())
            self.integrity.compare_ranks(step, checksums)
        self.bad_steps.check_values(step)
        if self.state is not None and self.spikes is not None:
            self.state.extra[SPIKES] = self.spikes.state_dict()


def build_guards(
    cfg: RunConfig, data: TrainingData, state: TrainState, moved: Iterable[torch.Tensor] = ()
) -> Guards:
    """Build the guards of a run that starts from `state`.

    Args:
        cfg: the config; `train.skip_spikes`, `train.check_steps` and `train.max_bad_steps`
            configure the guards.
        data: describes the samples of a step, and measures how long a rank waits for data.
        state: model and optimizer, before the first step. If `skip_spikes` is off, values that an
            earlier start stored for it are removed from `state.extra`.
        moved: parameters that change without the optimizer, such as biases of experts.
    """
    train, feed = cfg.train, data.feed
    spikes = None
    if train.skip_spikes is None:
        # A window of an earlier start would be outdated when spikes are skipped again.
        state.extra.pop(SPIKES, None)
    else:
        spikes = Spikes(train.skip_spikes, data.run.device, state.extra.get(SPIKES, {}))
    every = train.logging_steps if train.check_steps is None else train.check_steps
    integrity = Integrity(state, every, moved) if every else None
    bad_steps = BadSteps(train.max_bad_steps, data.describe_samples, state)
    return Guards(bad_steps, integrity, lambda: feed.waited, state, spikes)
