"""Read the folder of a run for a report; what is missing or unexpected becomes a note."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.run_folder import CONFIG, find_checkpoint_root, read_raw_config
from toolkit.errors import CheckpointError, ReportError
from toolkit.formats.metrics_file import (
    METRICS,
    SAMPLES,
    STARTS,
    get_finite_number,
    read_lines,
    read_metrics,
)

Line = dict[str, Any]
# Types of the values of a line of `starts.jsonl`, as a run writes them.
_START_TYPES = {"versions": dict, "hosts": list, "opening": list, "supervision": str}


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's folder: its config, logged lines, starts, samples and checkpoints."""

    name: str
    path: Path
    config: dict[str, Any]
    lines: list[Line]  # of metrics.jsonl
    starts: list[Line]
    samples: list[Line]
    checkpoints: list[int]  # steps of the committed checkpoints that still exist
    notes: list[str] = field(default_factory=list)

    @property
    def restarts(self) -> list[int]:
        """The steps after which the run was resumed, sorted."""
        return sorted({start["step"] for start in self.starts if start["step"] > 0})

    @property
    def last_step(self) -> int:
        """The last logged step; 0 if no step is logged."""
        return self.lines[-1]["step"] if self.lines else 0

    def curve_prefix(self, runs: int) -> str:
        """Return "NAME: ", to be put before curve names, if there are several runs; else "".

        `runs` is the number of runs in the report.
        """
        return f"{self.name}: " if runs > 1 else ""

    def evaluations(self) -> dict[str, list[str]]:
        """Find the evaluation metrics that the run logged.

        Returns:
            Name of an evaluation source -> its metrics, such as `loss`. The name "" stands for all
            sources together.
        """
        keys = dict.fromkeys(key for line in self.lines for key in line if key.startswith("eval_"))
        names = [k.removeprefix("eval_").removesuffix("_loss") for k in keys if k.endswith("_loss")]
        sources = sorted((n for n in names if n != "loss"), key=len, reverse=True)
        measures: dict[str, list[str]] = {}
        for key in keys:
            measure = key.removeprefix("eval_")
            name = next((n for n in sources if measure.startswith(f"{n}_")), "")
            measures.setdefault(name, []).append(measure.removeprefix(f"{name}_"))
        return measures

    @property
    def is_finished(self) -> bool:
        """True if the last logged step has reached the number of steps in the latest start.

        False if that number is unknown.
        """
        max_steps = self.starts[-1].get("max_steps") if self.starts else None
        return isinstance(max_steps, int) and 0 < max_steps <= self.last_step


def read_runs(folders: list[str]) -> list[RunRecord]:
    """Read the folders of runs, in the given order.

    A run is named by its folder; if two folders have the same name, all runs are named by their
    paths.

    Raises:
        ReportError: a folder is not that of a run.
        CheckpointError: a file of JSON lines is damaged before its last line.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def evaluation_key(source: str, measure: str) -> str:
    """Compose the key `eval_SOURCE_MEASURE` of a log line; `eval_MEASURE` if `source` is ""."""
    return "_".join(filter(None, ("eval", source, measure)))


def _read_run(path: Path, name: str) -> RunRecord:
    """Read the folder of one run, which is called `name`; raises as `read_runs` does.

    Missing files become notes of the record.
    """
    if not any((path / file).is_file() for file in (CONFIG, METRICS)):
        raise ReportError(
            f"{path}: expected a run's folder, with {CONFIG} or {METRICS}; give the output_dir of "
            "a run"
        )
    config, lines = read_raw_config(path), read_metrics(path)
    notes = _note_bad_lines(path, lines)
    if not config:
        notes.append(f"{CONFIG} is missing or not readable: its settings are not shown")
    starts = read_lines(path / STARTS)
    if lines and not starts:
        notes.append(f"{STARTS} is missing: restarts, machines, versions and dtypes are not shown")
    return RunRecord(
        name=name,
        path=path,
        config=config,
        lines=lines,
        starts=[_drop_wrong_types(line) for line in starts],
        samples=read_lines(path / SAMPLES),
        checkpoints=_list_checkpoint_steps(path, notes),
        notes=notes,
    )


def _drop_wrong_types(start: Line) -> Line:
    """Copy a line of `starts.jsonl` without values whose type is not the one that a run writes."""
    return {k: v for k, v in start.items() if isinstance(v, _START_TYPES.get(k, object))}


def _note_bad_lines(path: Path, lines: list[Line]) -> list[str]:
    """Format notes about a metrics.jsonl that has no steps, a cut-off end or non-finite values.

    Without steps, that is the only note. Each metric with non-finite values gets one note with
    their number and the first step. If lines are missing, the last one is taken to be cut off.
    """
    if not lines:
        return [f"no step is logged yet in {METRICS}"]
    notes = []
    line_count = len((path / METRICS).read_bytes().splitlines())
    if line_count > len(lines):
        notes.append(f"the last line of {METRICS} is cut off and was skipped")
    keys = dict.fromkeys(key for line in lines for key in line)
    for key in keys:
        bad = [
            line["step"] for line in lines if key in line and get_finite_number(line, key) is None
        ]
        if bad:
            many = f"{len(bad)} values are" if len(bad) > 1 else "1 value is"
            notes.append(f"{key}: {many} not a finite number, first at step {bad[0]}: gaps there")
    return notes


def _list_checkpoint_steps(path: Path, notes: list[str]) -> list[int]:
    """List the sorted steps of a run's committed checkpoints.

    If they cannot be read, append a note to `notes` and return [].
    """
    try:
        return sorted(committed_steps(find_checkpoint_root(path)))
    except (CheckpointError, OSError) as error:  # a store that cannot be reached from here
        notes.append(f"checkpoints are not shown: {error}")
        return []
