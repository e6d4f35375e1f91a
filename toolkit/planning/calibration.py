"""What a measured step says of the plan's, remembered for later plans of such a model.

Kept in `toolkit/calibration.yaml` of the user's cache folder (XDG_CACHE_HOME, else ~/.cache), by
device, class of the model, dtype of the computation and version of torch.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml

from toolkit.errors import ConfigError
from toolkit.formats.synced_files import replacing
from toolkit.parsing import read_yaml
from toolkit.planning.devices import Device
from toolkit.planning.simulation import PlanningError, Simulation

_WITHIN = 5.0  # of the plan, up or down; beyond, something else was measured
_MOST = 1e6  # of a factor in the file, up or down


@dataclass(frozen=True)
class Calibration:
    """Measured over planned."""

    memory: float = 1.0
    """Of what a step takes beside parameters, gradients and optimizer state, which are exact."""
    time: float = 1.0
    """Of computing."""
    source: str = ""
    """What was measured."""

    def peak(self, sim: Simulation) -> int:
        """Return the bytes of the corrected peak of a step."""
        peaks = sim.peaks.values()
        return max(p.nbytes + round((self.memory - 1) * p.working) for p in peaks)


def calibration_of(
    sim: Simulation, peak: int, seconds: float, planned_seconds: float, source: str
) -> Calibration:
    """Return the factors by which the plan `sim` peaks at `peak` bytes and takes `seconds`.

    PlanningError: they are so far from it that another step must have been measured.
    """
    # The largest that leaves no phase above what was measured.
    factors = ((peak - (p.nbytes - p.working)) / p.working for p in sim.peaks.values() if p.working)
    memory, time = min(factors), seconds / planned_seconds
    if not 1 / _WITHIN <= memory <= _WITHIN:
        raise PlanningError(
            f"{source} peaked at {peak / 1e9:,.3f} GB, its plan at {sim.peak.nbytes / 1e9:,.3f}: "
            "that is not the step that was planned"
        )
    return Calibration(round(memory, 4), round(time, 4), source)


def cache_file() -> Path:
    """Return where calibrations are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "toolkit", "calibration.yaml")


def remembered(device: Device, model: str, dtype: str) -> Calibration | None:
    """Return what was measured of such a model on `device`, None where nothing was. ConfigError:
    the file is damaged.
    """
    entry = _entries().get(_key(device, model, dtype))
    if entry is None:
        return None
    try:
        found = Calibration(float(entry["memory"]), float(entry["time"]), str(entry["source"]))
        if not all(1 / _MOST <= factor <= _MOST for factor in (found.memory, found.time)):
            raise ValueError(f"factors of {found.memory} and {found.time}")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{cache_file()} is damaged ({error!r}); delete it") from error


def remember(device: Device, model: str, dtype: str, found: Calibration) -> None:
    """Keep `found` for later plans, instead of what was measured before."""
    entries = _entries() | {_key(device, model, dtype): asdict(found)}
    with replacing(cache_file()) as scratch:
        scratch.write_text(yaml.safe_dump(entries, width=200), "utf-8")


def _key(device: Device, model: str, dtype: str) -> str:
    return f"{device.name}, {model}, {dtype}, torch {torch.__version__}"


def _entries() -> dict:
    file = cache_file()
    entries = read_yaml(file, ConfigError) if file.is_file() else {}
    if not isinstance(entries, dict):
        raise ConfigError(f"{file} is damaged (not a mapping); delete it")
    return entries
