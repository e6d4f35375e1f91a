"""The files of JSON lines of a run (metrics, generations, starts): append, read, cut at a step."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit import parsing
from toolkit.errors import CheckpointError
from toolkit.formats.synced_files import replace_synced

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # answers to `train.eval_prompts`, a line each
STARTS = "starts.jsonl"  # machines, versions and layout of each start
_MOST = 1e300  # of a number: with a larger one, infinity or NaN there is no arithmetic


def number(line: dict[str, Any], key: str) -> float | int | None:
    """Return a finite number of a line, else None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _MOST else None


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`; a last line cut off by a kill is left out."""
    return read_lines(Path(run_dir) / METRICS)


def append(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append `lines`: all, or none where the disk refuses (OSError), so that no line is cut off."""
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


def keep_until(file: Path, step: int) -> None:
    """Drop the lines after `step` of a file of JSON lines: the resumed run writes them again."""
    if not file.is_file():
        return
    kept = [line for line in read_lines(file) if line["step"] <= step]
    replace_synced(file, "".join(json.dumps(line) + "\n" for line in kept))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, none where there is no file; a last line cut off
    by a kill is left out. CheckpointError: another line is no object with a step.
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
