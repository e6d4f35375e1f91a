"""The longest sequence and the largest batch with which a run fits, each found by a few plans."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.config.settings import model_settings
from toolkit.models import build_on_meta
from toolkit.planning.changes import Plan, make_plan, with_settings
from toolkit.planning.devices import Device
from toolkit.tables import size_text

_STEP = 512  # tokens, of sequences
_MOST_TOKENS, _MOST_SAMPLES = 1 << 20, 1024  # where the model or the memory sets no limit


@dataclass(frozen=True)
class Longest:
    """What fits; 0 where nothing does."""

    sequence_length: int
    batch: int
    lines: tuple[str, ...]

    def summary(self) -> dict[str, Any]:
        """Return it, ready for JSON."""
        return {"sequence_length": self.sequence_length, "per_device_train_batch_size": self.batch}


def longest(plan: Plan, device: Device, memory: int, say: Callable[[str], object]) -> Longest:
    """Return the longest sequence with the batch of `plan`, and the largest batch with its
    sequence, that fit into `memory` bytes. Each further size is planned: some 4 to 8 in all, as
    what a step needs grows almost evenly.
    """
    begun, count = time.monotonic(), 0
    cfg = with_settings(plan.cfg, "train", global_batch_size=None)
    length, batch = cfg.data.sequence_length, cfg.train.micro_batch

    def needs(section: str, **size: int) -> int:
        nonlocal count
        count += 1
        ((name, value),) = size.items()
        say(f"{name} {value:,}")
        new = with_settings(cfg, section, **size)
        return make_plan(new, plan.world_size, device, memory).estimate.memory

    config = build_on_meta(model_settings(cfg)).config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    limit = positions if isinstance(positions, int) and positions > 0 else _MOST_TOKENS
    step = min(_STEP, limit)
    at_once = plan.estimate.memory
    tokens = step * largest(
        lambda n: needs("data", sequence_length=n * step),
        {length / step: at_once},
        memory,
        limit // step,
    )
    samples = largest(
        lambda n: needs("train", per_device_train_batch_size=n),
        {float(batch): at_once},
        memory,
        _MOST_SAMPLES,
    )
    whole = " (all that the model has positions for)" if tokens + step > limit else ""
    spent = f"{count} further plans in {time.monotonic() - begun:,.0f} s"
    return Longest(
        tokens,
        samples,
        (
            f"longest  {tokens:,} tokens{whole} with {batch} a device, in steps of {step}",
            f"batch    {samples:,} a device with {length:,} tokens",
            f"({size_text(memory)} a device; {spent})",
        ),
    )


def largest(needs: Callable[[int], int], known: dict[float, int], memory: int, most: int) -> int:
    """Return the largest n from 1 to `most` that needs no more than `memory`; 0: none does.

    `known` are needs of other sizes, one at least; needs grow with n. Each guess is where a line
    through the needs on both sides meets the memory.
    """
    low, high = 0, most + 1  # what fits, and what does not
    known = dict(known)
    for size, need in known.items():
        if need <= memory:
            low = max(low, min(int(size), most))
        else:
            high = min(high, -int(-size // 1))
    while high - low > 1:
        guess = _meets(known, memory)
        n = min(max(guess, low + 1), high - 1)
        known[n] = needs(n)
        if known[n] <= memory:
            low = n
        else:
            high = n
    return low


def _meets(known: dict[float, int], memory: int) -> int:
    """Return the size at which a line through the two nearest needs meets the memory."""
    nearest = sorted(known, key=lambda size: abs(known[size] - memory))[:2]
    if len(nearest) < 2:
        size = nearest[0]
        return int(size * 2) if known[size] <= memory else max(1, int(size / 2))
    a, b = sorted(nearest)
    slope = (known[b] - known[a]) / (b - a)
    return int(a + (memory - known[a]) / slope) if slope > 0 else int(2 * b)
