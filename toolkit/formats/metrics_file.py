"""Read, append to and truncate the JSON lines of a run: metrics, generations, starts."""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit import __version__, parsing
from toolkit.errors import CheckpointError
from toolkit.formats.synced_files import replace_synced

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # answers to `train.eval_prompts`
STARTS = "starts.jsonl"  # machines, versions and layout of each start
# Sums of larger numbers may overflow.
_MAX_NUMBER = 1e300
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets", "peft")


def get_finite_number(line: dict[str, Any], key: str) -> float | int | None:
    """Return `line[key]` if it is an int or float between -1e300 and 1e300, else None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _MAX_NUMBER else None


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a run's `metrics.jsonl`; [] if there is none. See `read_lines`."""
    return read_lines(Path(run_dir) / METRICS)


def read_versions() -> dict[str, str]:
    """Map package names to versions: the toolkit, Python, and packages that affect the weights."""
    installed = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"toolkit": __version__, "python": platform.python_version(), **installed}


def append_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append one JSON line to a file for each dict.

    If a write fails, all lines of this call are removed again, and the OSError is raised.
    """
    content = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
    with open(file, "ab", buffering=0) as f:
        end = f.tell()
        try:
            while content:
                content = content[f.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                f.truncate(end)
            raise


def drop_lines_after(file: Path, step: int) -> None:
    """Remove the lines of all steps after `step` from a file.

    A resumed run calls it, because it writes these lines again. Replaces the file atomically. Does
    nothing if there is no file.

    Raises:
        CheckpointError: a line before the last one is malformed.
    """
    if not file.is_file():
        return
    lines = [line for line in read_lines(file) if line["step"] <= step]
    replace_synced(file, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line, each with a `step`; [] if there is no file.

    A malformed last line is skipped, because a killed process may have left it incomplete.

    Raises:
        CheckpointError: another line is malformed, or has no non-negative integer `step`.
    """
    texts = file.read_bytes().splitlines() if file.is_file() else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = parsing.parse_json(text, f"{file} line {number}", CheckpointError)
            step = line.get("step") if isinstance(line, dict) else None
            if type(step) is not int or not 0 <= step < 2**63:
                raise CheckpointError(f"{file} line {number} is no JSON object with a step")
            lines.append(line)
        except CheckpointError:
            if number < len(texts):  # the last may be cut off by a kill
                raise
    return lines
