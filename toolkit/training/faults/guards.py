"""What watches the numbers of a run: bad steps, the bits of its state, the times of its ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from toolkit import ranks
from toolkit.config.settings import RunConfig
from toolkit.data.prepare import TrainingData
from toolkit.sharding.collective_times import times_of
from toolkit.training.faults import spikes
from toolkit.training.faults.bad_steps import BadSteps
from toolkit.training.faults.integrity import Integrity
from toolkit.training.faults.spikes import Spikes
from toolkit.training.faults.stragglers import Stragglers


@dataclass(frozen=True)
class Guards:
    """All of them, as the metrics of a run call them; what is None is not watched."""

    bad_steps: BadSteps = field(default_factory=BadSteps)
    integrity: Integrity | None = None
    stragglers: Stragglers | None = None
    state: Any = None

    def take(self, step: int, stats: Any) -> None:
        """Take the `StepStats` of `step`; does not wait."""
        self.bad_steps.take(step, stats)
        for one in (self.integrity, self.stragglers):
            if one is not None:
                one.take(step)

    def line(self, step: int, step_time: float | None) -> dict[str, float]:
        """Return what a line of metrics after `step` has of the ranks' times; None: not timed.

        Collective, one small exchange; waits for the device. TrainingError: the bits of a rank's
        state, or where it stands, are not as they should be.
        """
        bits = [] if self.integrity is None else self.integrity.numbers()
        times = [] if self.stragglers is None else self.stragglers.numbers(step_time)
        if not bits and not times:
            return {}
        rows = ranks.gather_integers(bits + times)
        if self.integrity is not None:
            self.integrity.judge(step, [row[: len(bits)] for row in rows])
        if self.stragglers is None:
            return {}
        return self.stragglers.judge([row[len(bits) :] for row in rows])

    def before_save(self, step: int) -> None:
        """Raise a `TrainingError` where what would be saved after `step` is not to be; put into the
        state what belongs to it. Collective, waits for the device; reads this rank's bytes twice.
        """
        self.bad_steps.read()
        if self.integrity is not None:
            self.integrity.judge(step, ranks.gather_integers(self.integrity.numbers()))
        self.bad_steps.check_values(step)
        if self.state is not None and (watched := spikes.spikes_of(self.state.model)) is not None:
            self.state.extra[spikes.KEY] = watched.state_dict()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the collectives inside out of the times."""
        with self.stragglers.pause() if self.stragglers else nullcontext():
            yield


def guards_of(cfg: RunConfig, model: nn.Module, data: TrainingData, state: Any) -> Guards:
    """Return what watches a run from `state` on; have its optimizer and model watched."""
    train, feed = cfg.train, data.feed
    if train.skip_spikes is None:
        state.extra.pop(spikes.KEY, None)  # of a start that had them; they grow stale
    else:
        kept, device = state.extra.get(spikes.KEY, {}), data.run.device
        spikes.watch(model, Spikes(train.skip_spikes, train.spike_window, device, kept))
    integrity = None if train.check_steps == 0 else Integrity(state, train.check_steps)
    stragglers = None
    if (times := times_of(model)) is not None and ranks.world_size() > 1:
        sampled = 1 if data.run.device.type == "cpu" else train.logging_steps
        stragglers = Stragglers(times, lambda: feed.waited, sampled)
    bad_steps = BadSteps(train.max_bad_steps, data.samples_of, state)
    return Guards(bad_steps, integrity, stragglers, state)
