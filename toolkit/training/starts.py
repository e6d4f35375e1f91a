"""`starts.jsonl` of a run: a line for each of its starts: machines, versions, layout."""

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit import __version__, ranks
from toolkit.config.published import publishable_settings
from toolkit.errors import TrainingError
from toolkit.formats.metrics_file import STARTS, append, keep_until
from toolkit.training.launch import Run

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets", "peft")


def versions() -> dict[str, str]:
    """Return the versions of the toolkit, of Python and of the packages that shape the weights."""
    installed = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"toolkit": __version__, "python": platform.python_version(), **installed}


def record_start(
    folder: Path,
    run: Run,
    step: int,
    max_steps: int,
    opening: Sequence[str | None],
    supervision: str,
    settings: dict[str, Any],
) -> None:
    """Append the start after `step` to the file, on rank 0; starts after later steps are dropped.
    Collective.

    `opening` are the lines that the run printed of its model, dtypes and data, `supervision` the
    report on what is learned, empty where there is none; `settings` are the config's sections.
    """
    hosts = sorted(set(ranks.gather_to_main(platform.node())))
    on_gpu = run.device.type == "cuda"
    line: dict[str, Any] = {
        "step": step,
        "max_steps": max_steps,
        "time": time.time(),
        "hosts": hosts,
        "world_size": run.world_size,
        "device": torch.cuda.get_device_name(run.device) if on_gpu else run.device.type,
        "versions": versions(),
        "opening": [text for text in opening if text],
        "supervision": supervision,
    }

    def write() -> None:
        line["run"] = publishable_settings(settings, folder)
        try:
            keep_until(folder / STARTS, step)
            append(folder / STARTS, [line])
        except OSError as error:
            what = f"{folder / STARTS} cannot be written: {error.strerror}"
            raise TrainingError(what) from error

    ranks.on_main(write)
