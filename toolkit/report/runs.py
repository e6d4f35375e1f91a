"""What a run's folder says of the run; what is missing or odd there becomes a note."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.commit import committed_steps
from toolkit.checkpoint.run_folder import CONFIG, find_checkpoint_root, read_raw_config
from toolkit.errors import CheckpointError, ReportError
from toolkit.formats.metrics_file import METRICS, SAMPLES, STARTS, number, read_lines, read_metrics

Line = dict[str, Any]
_STARTED_WITH = {"versions": dict, "hosts": list, "opening": list, "supervision": str}


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it."""

    name: str
    path: Path
    config: dict[str, Any]
    lines: list[Line]  # of metrics.jsonl
    starts: list[Line]
    samples: list[Line]
    checkpoints: list[int]  # steps of those that are committed and still there
    notes: list[str] = field(default_factory=list)

    @property
    def restarts(self) -> list[int]:
        """Return the steps after which the run was resumed."""
        return sorted({start["step"] for start in self.starts if start["step"] > 0})

    @property
    def last_step(self) -> int:
        """Return the last logged step, 0 before the first."""
        return self.lines[-1]["step"] if self.lines else 0

    def label(self, runs: int) -> str:
        """Return what stands before the name of a curve among those of so many runs."""
        return f"{self.name}: " if runs > 1 else ""

    def evaluations(self) -> dict[str, list[str]]:
        """Return source -> measures of the evaluations (loss, accuracy, a recipe's own); the name
        of all sources together is empty.
        """
        keys = dict.fromkeys(key for line in self.lines for key in line if key.startswith("eval_"))
        names = [k.removeprefix("eval_").removesuffix("_loss") for k in keys if k.endswith("_loss")]
        sources = sorted((n for n in names if n != "loss"), key=len, reverse=True)
        found: dict[str, list[str]] = {}
        for key in keys:
            measure = key.removeprefix("eval_")
            name = next((n for n in sources if measure.startswith(f"{n}_")), "")
            found.setdefault(name, []).append(measure.removeprefix(f"{name}_"))
        return found

    @property
    def done(self) -> bool:
        """Whether the last start's number of steps is reached."""
        most = self.starts[-1].get("max_steps") if self.starts else None
        return isinstance(most, int) and 0 < most <= self.last_step


def read_runs(folders: list[str]) -> list[RunRecord]:
    """Return the runs of `folders`, named by their folders. ReportError: one is no run's folder;
    CheckpointError: a file of JSON lines is damaged before its last line.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def evaluation_key(source: str, measure: str) -> str:
    """Return the name in a line of a measure of one source, or of all (empty)."""
    return "_".join(filter(None, ("eval", source, measure)))


def _read(path: Path, name: str) -> RunRecord:
    if not any((path / file).is_file() for file in (CONFIG, METRICS)):
        raise ReportError(
            f"{path}: expected a run's folder, with {CONFIG} or {METRICS}; give the output_dir of "
            "a run"
        )
    config, lines = read_raw_config(path), read_metrics(path)
    notes = _odd_lines(path, lines)
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
        starts=[_of_known_types(line) for line in starts],
        samples=read_lines(path / SAMPLES),
        checkpoints=_checkpoints(path, notes),
        notes=notes,
    )


def _of_known_types(start: Line) -> Line:
    """Return a line of `starts.jsonl` without what is of another type than it is written with."""
    return {k: v for k, v in start.items() if isinstance(v, _STARTED_WITH.get(k, object))}


def _odd_lines(path: Path, lines: list[Line]) -> list[str]:
    if not lines:
        return [f"no step is logged yet in {METRICS}"]
    notes = []
    written = len((path / METRICS).read_bytes().splitlines())
    if written > len(lines):
        notes.append(f"the last line of {METRICS} is cut off and left out")
    keys = dict.fromkeys(key for line in lines for key in line)
    for key in keys:
        bad = [line["step"] for line in lines if key in line and number(line, key) is None]
        if bad:
            many = f"{len(bad)} values are" if len(bad) > 1 else "1 value is"
            notes.append(f"{key}: {many} not a finite number, first at step {bad[0]}: gaps there")
    return notes


def _checkpoints(path: Path, notes: list[str]) -> list[int]:
    try:
        return sorted(committed_steps(find_checkpoint_root(path)))
    except (CheckpointError, OSError) as error:  # a store that is not to be reached from here
        notes.append(f"checkpoints are not shown: {error}")
        return []
