"""Plan a run with given settings, and search among settings for those that fit into the memory.

`auto`, the changes that a plan suggests, and the longest sequence are all found by plans: each plan
simulates a step, which takes seconds, so `search` makes few of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from toolkit.config.settings import RunConfig, model_settings
from toolkit.errors import ToolkitError, one_line
from toolkit.models import build_on_meta
from toolkit.planning.devices import Device
from toolkit.planning.estimates import Calibration, Estimate, estimate, load_calibration
from toolkit.planning.simulation import Simulation, simulate
from toolkit.tables import size_text

T = TypeVar("T")
Report = Callable[[str], object]
"""Called with a line before each plan, to show progress."""

_LENGTH_STEP = 512  # tokens
_MAX_LENGTHS = 256  # a plan of a long row takes minutes, so few are made
# Upper bounds if neither the model nor the memory sets one.
_MAX_TOKENS = 1 << 20
_MAX_MICRO_BATCH = 1024


@dataclass(frozen=True)
class Change:
    """A run's settings after a change that is not planned yet."""

    name: str
    """The changed settings and their values, for reports."""
    cfg: RunConfig
    world_size: int
    same_training: bool = True
    """False if the model would be trained, or values be rounded, in another way."""

    @property
    def setting(self) -> str:
        """Name of the changed setting; if several were changed, the first one."""
        return self.name.split()[0]


@dataclass(frozen=True)
class Plan:
    """The simulated step of a run, and its estimated memory and time on a device.

    `change` names the settings that differ from the user's run. It is empty for the user's run.
    """

    change: str
    cfg: RunConfig
    world_size: int
    sim: Simulation
    estimate: Estimate
    same_training: bool = True
    """False if the change trains the model, or rounds values, in another way."""
    calibration: Calibration | None = None
    """The measurement that corrected the estimate."""

    def fits(self, memory: int | None) -> bool:
        """Return True if a device needs at most `memory` bytes, or if `memory` is None."""
        return memory is None or self.estimate.memory <= memory


def make_plan(
    cfg: RunConfig,
    world_size: int,
    device: Device,
    memory: int | None,
    change: str = "",
    same_training: bool = True,
) -> Plan:
    """Simulate a step of a run, and estimate its memory and time on a device.

    A stored calibration of the device corrects the estimate.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks.
        device: the figures of the devices.
        memory: bytes of each device, which decide some `auto` settings; None: the device's own.
        change: name of the change that led to `cfg`, for the plan.
        same_training: False if the change trains the model differently.

    Raises:
        ToolkitError: the run cannot be simulated; see `simulate`.
    """
    device_memory = memory or int(device.memory)
    sim = simulate(cfg, world_size, device_type=device.kind, device_memory=device_memory)
    calibration = load_calibration(device, sim.model, cfg.sharding.param_dtype)
    estimated = estimate(sim, cfg, world_size, device, calibration)
    return Plan(change, cfg, world_size, sim, estimated, same_training, calibration)


def with_settings(cfg: Any, section: str, **settings: Any) -> Any:
    """Return a copy of a config with new values for settings of one section."""
    return replace(cfg, **{section: replace(getattr(cfg, section), **settings)})


@dataclass
class Planner:
    """Plans changes of a run on one device, and records the changes that cannot be planned."""

    device: Device
    memory: int | None
    report: Report
    failed: dict[str, str] = field(default_factory=dict)
    """Name of a change -> why it cannot be planned."""

    def plan(self, change: Change, name: str | None = None) -> Plan | None:
        """Report a change under `name`, and plan it.

        Returns:
            The plan. None if the change cannot be planned; the reason is reported and added to
            `failed`.
        """
        name = name or change.name
        self.report(name)
        try:
            return make_plan(
                change.cfg,
                change.world_size,
                self.device,
                self.memory,
                name,
                change.same_training,
            )
        except ToolkitError as error:
            self.failed[change.name] = one_line(error)
            self.report(f"{change.name}: {one_line(error)}")
            return None


def search(
    candidates: Sequence[T],
    needs: Callable[[T], float],
    memory: float,
    known_needs: Mapping[float, float] | None = None,
) -> int:
    """Find how many of the candidates fit into the memory, with few calls of `needs`.

    Each guess interpolates between the two known needs that are nearest to `memory`. Takes four to
    eight calls for a thousand candidates, because needs grow almost linearly.

    Args:
        candidates: sorted by the memory they need, the smallest first.
        needs: computes the bytes of a candidate; infinite if it cannot be run.
        memory: bytes that are available.
        known_needs: known bytes, by position. Candidates have the positions 1, 2, ...; 1.5 lies
            between the first two.

    Returns:
        n if exactly the first n candidates fit; 0 if none does.
    """
    needs_by_place: dict[float, float] = dict(known_needs or {})
    fitting = 0
    too_large = len(candidates) + 1
    for place, need in needs_by_place.items():
        if need <= memory:
            fitting = max(fitting, min(int(place), len(candidates)))
        else:
            too_large = min(too_large, math.ceil(place))
    while too_large - fitting > 1:
        guess = _guess_place(needs_by_place, memory, fitting, too_large)
        place = min(max(guess, fitting + 1), too_large - 1)
        needs_by_place[place] = needs(candidates[place - 1])
        if needs_by_place[place] <= memory:
            fitting = place
        else:
            too_large = place
    return fitting


def _guess_place(needs: dict[float, float], memory: float, fitting: int, too_large: int) -> int:
    """Guess the position of the last candidate that fits, by linear interpolation.

    The guess may lie outside of the two positions that are given.

    Args:
        needs: position of a candidate, counted from 1 -> its bytes.
        memory: bytes that are available.
        fitting: the last position that is known to fit; 0 if none is.
        too_large: the first position that is known not to fit.
    """
    places = [place for place, need in needs.items() if math.isfinite(need)]
    nearest = sorted(places, key=lambda place: abs(needs[place] - memory))[:2]
    if not nearest:
        # Nothing is known, so the largest is tried first; if none could be run, the middle one.
        return (fitting + too_large) // 2 if needs else too_large - 1
    if len(nearest) == 1:
        (place,) = nearest
        return int(place * 2) if needs[place] <= memory else max(1, int(place / 2))
    first, second = sorted(nearest)
    slope = (needs[second] - needs[first]) / (second - first)
    return int(first + (memory - needs[first]) / slope) if slope > 0 else int(2 * second)


# ---- The longest sequence and the largest batch --------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """The longest sequence and the largest micro-batch that fit; a size is 0 if none fits."""

    sequence_length: int
    batch: int
    """Samples of a micro-batch."""
    lines: tuple[str, ...]
    """The report for people."""

    def summary(self) -> dict[str, Any]:
        """Return sequence length and micro-batch for JSON, by the names of their settings."""
        return {"sequence_length": self.sequence_length, "per_device_train_batch_size": self.batch}


def find_longest(plan: Plan, device: Device, memory: int, report: Report) -> Longest:
    """Find the longest sequence and the largest micro-batch that fit into `memory` bytes.

    Each is searched for while the other keeps its value in `plan`. The length is a multiple of 512
    tokens up to 131,072 positions of the model, and of a larger step beyond. Makes four to eight
    plans in all, each of which takes seconds, or minutes for long rows.

    Args:
        plan: plan of the run as it is.
        device: the figures of the devices.
        memory: bytes of each device.
        report: called with a line before each plan.
    """
    start_time = time.monotonic()
    cfg = with_settings(plan.cfg, "train", global_batch_size=None)
    length = cfg.data.sequence_length
    micro_batch = cfg.train.micro_batch
    plan_count = 0

    def plan_bytes(name: str, new_cfg: RunConfig) -> int:
        nonlocal plan_count
        plan_count += 1
        report(name)
        return make_plan(new_cfg, plan.world_size, device, memory).estimate.memory

    def bytes_of_length(tokens: int) -> int:
        new_cfg = with_settings(cfg, "data", sequence_length=tokens)
        return plan_bytes(f"sequence_length {tokens:,}", new_cfg)

    def bytes_of_batch(samples: int) -> int:
        new_cfg = with_settings(cfg, "train", per_device_train_batch_size=samples)
        return plan_bytes(f"per_device_train_batch_size {samples:,}", new_cfg)

    config = build_on_meta(model_settings(cfg)).config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) and positions > 0 else _MAX_TOKENS
    step = min(_LENGTH_STEP * -(-limit // (_LENGTH_STEP * _MAX_LENGTHS)), limit)
    lengths = range(step, limit + 1, step)
    known_lengths = {length / step: plan.estimate.memory}
    tokens = step * search(lengths, bytes_of_length, memory, known_lengths)
    batches = range(1, _MAX_MICRO_BATCH + 1)
    samples = search(batches, bytes_of_batch, memory, {micro_batch: plan.estimate.memory})
    is_limit = " (all positions of the model)" if tokens + step > limit else ""
    seconds = time.monotonic() - start_time
    lines = (
        f"longest  {tokens:,} tokens{is_limit} with {micro_batch} a device, in steps of {step}",
        f"batch    {samples:,} a device with {length:,} tokens",
        f"({size_text(memory)} a device; {plan_count} further plans in {seconds:,.0f} s)",
    )
    return Longest(tokens, samples, lines)
