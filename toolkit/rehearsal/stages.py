"""Stages of a rehearsal: what each one found, how long it took, and why it failed."""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, one_line
from toolkit.tables import format_table

STAGES = {
    "settings": "change the config; `toolkit train CONFIG --help` lists the settings",
    "packages": "install it where the run will be; --skip packages if only this machine lacks it",
    "output": "give a folder that can be written; --skip output if the run's machine has another",
    "hub": "check the token and the id; --skip hub if this machine cannot reach the Hub",
    "model": "check model.name_or_path, which must exist before the run, and the tokenizer",
    "data": "look at the rows with `toolkit inspect --data CONFIG`",
    "sharding": "change the section sharding; `toolkit inspect --plan CONFIG` shows the units",
    "disk": "make room, or save less; --skip disk if the run's machine has another disk",
    "load": "read the log; `toolkit plan CONFIG` and docs/evidence/architectures.md say more",
    "train": "read the log: the recipe failed in its loop",
    "save": "read the log: a checkpoint could not be written",
    "kill": "read the log",
    "resume": "everything that a step depends on must be in the state that the recipe saves: draw "
    "random numbers from the generators of torch, numpy or Python, which the run seeds and saves, "
    "and take the data from its position",
    "evaluate": "check data.eval_files and data.eval_split",
    "other ranks": "the ranks must divide the global batch; see docs/checkpoints.md",
    "consolidate": "read the log; the weights are safe in the checkpoint",
    "verify": "read the findings; a recipe must not change what it has saved",
    "reload": "nobody can use what transformers cannot load: check the model's config, code and "
    "tokenizer files",
    "generate": "check the tokenizer, the chat template and generation_config.json",
    "adapter": "read the log; the merged model may still be used (toolkit consolidate --merge)",
    "push": "check the section hub and the export",
}
"""Name -> what to do if the stage fails, in the order in which they run."""
SKIPPABLE = ("packages", "output", "hub", "disk")
"""Stages that check this machine, which may not be the machine of the run."""

_MAX_VALUE_LENGTH = 40  # characters of a setting's value in the report


@dataclass
class Stage:
    """Outcome of one stage of a rehearsal. `ok` is None if the stage was skipped."""

    stage: str
    ok: bool | None = None
    seconds: float = 0.0
    said: str = ""
    """What the stage found, or why it failed or was not run."""
    advice: str = ""
    log: str | None = None

    def line(self) -> str:
        """Format the outcome as one line; it has ✓ and ✗ if the terminal uses UTF-8."""
        is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        marks = {True: "ok", False: "NO", None: "-"}
        if is_utf8:
            marks = {True: "✓", False: "✗", None: "-"}
        duration = f"{self.seconds:5.1f} s" if self.ok is not None else " " * 7
        return f"{marks[self.ok]} {self.stage:<12}{duration}  {self.said}".rstrip()


class StageError(ToolkitError):
    """A stage failed. `stage` names the stage to blame; None: the one that is running."""

    def __init__(self, message: str, stage: str | None = None, log: Path | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.log = log


class SkippedError(Exception):
    """A stage does not apply to the config. This is not a failure."""


@dataclass
class Result:
    """The outcome of a rehearsal: its stages, notes, and changed settings."""

    recipe: str = ""
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the run will do that the user may not intend."""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Setting that differs -> its value in the run and in the rehearsal."""
    not_rehearsed: list[str] = field(default_factory=list)
    """What differs between run and rehearsal apart from settings."""
    seconds: float = 0.0
    folder: str | None = None
    """The folder with all files; None if it was removed."""

    @property
    def failed(self) -> Stage | None:
        """The first stage that failed; None if none did."""
        return next((stage for stage in self.stages if stage.ok is False), None)

    @property
    def ok(self) -> bool:
        """True if at least one stage ran and none failed."""
        return self.failed is None and bool(self.stages)

    def summary(self) -> dict[str, Any]:
        """Convert the outcome to a dict for JSON, with `ok` and the name of the `failed` stage."""
        failed = None if self.failed is None else self.failed.stage
        return {"ok": self.ok, "failed": failed, **asdict(self)}

    def text(self) -> str:
        """Format the outcome for the terminal: failures with advice, notes, changed settings."""
        lines = []
        for stage in (stage for stage in self.stages if stage.ok is False):
            lines += ["", f"{stage.stage} failed: {stage.said}", f"  what to do: {stage.advice}"]
            lines += [f"  log: {stage.log}"] if stage.log else []
        for title, entries in (("notes", self.notes), ("not rehearsed", self.not_rehearsed)):
            lines += ["", f"{title}:", *(f"    {entry}" for entry in entries)] if entries else []
        if self.changed:
            rows = [["setting", "run", "rehearsal"]]
            for name, values in asdict(self)["changed"].items():
                rows.append([name, *map(_shorten_value, values)])
            lines += ["", "rehearsed with other settings:"]
            lines += [f"    {line}" for line in format_table(rows, set(), margin=4)]
        verdict = f"{'passed' if self.ok else 'FAILED'} in {self.seconds:.0f} s"
        place = f"; the files are in {self.folder}" if self.folder else ""
        return "\n".join([*lines, "", verdict + place])


def _shorten_value(value: Any) -> str:
    """Format a setting's value: text as it is, other values as JSON, at most 40 characters.

    A longer text loses its middle.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _MAX_VALUE_LENGTH:
        return text
    half = _MAX_VALUE_LENGTH // 2
    return f"{text[: half - 1]}…{text[-half:]}"


class Recorder:
    """Runs the stages of a rehearsal, records their outcome, and sends their output to log files.

    Args:
        logs: folder of the log files.
        skip: names of stages that the user skips.
        show: called with the line of each stage that ends.
    """

    def __init__(self, logs: Path, skip: tuple[str, ...], show: Callable[[str], None]) -> None:
        self.result = Result()
        self.logs = logs
        self._skip = skip
        self._show = show

    def run(self, name: str, work: Callable[[], str], needs: tuple[str, ...] | None = None) -> None:
        """Run a stage, and record and show its outcome, unless a stage that it needs has failed.

        In that case nothing is recorded. An error in the stage is recorded, not raised. A stage in
        `skip` is recorded as skipped.

        Args:
            name: a key of `STAGES`.
            work: does the work, and returns the text for the report.
            needs: stages that must not have failed; None: all earlier ones.
        """
        stage = Stage(name)
        reported = stage
        start_time = time.monotonic()
        log = self.logs / f"{name.replace(' ', '_')}.log"
        failed = {earlier.stage for earlier in self.result.stages if earlier.ok is False}
        if name in self._skip:
            stage.said = "skipped by --skip"
        elif failed if needs is None else failed & {*needs}:
            return
        else:
            try:
                with _redirect_output(log):
                    stage.said = work()
                    stage.ok = True
            except SkippedError as reason:
                stage.said = str(reason)
            except Exception as error:  # whatever the run would meet
                reported = self._record_failure(stage, error, log)
            stage.seconds = time.monotonic() - start_time
        if reported is stage:
            self.result.stages.append(stage)
        self._show(reported.line())

    def _record_failure(self, stage: Stage, error: Exception, log: Path) -> Stage:
        """Mark the stage that the error blames (or else `stage`) as failed, and return that stage.

        Args:
            stage: the stage that was running.
            error: its error; the attributes `stage` and `log` are used if it has them.
            log: log file of the stage, to which the traceback of an error without a log is
                appended.
        """
        name = getattr(error, "stage", None) or stage.stage
        blamed = next((earlier for earlier in self.result.stages if earlier.stage == name), stage)
        blamed.stage = name
        blamed.ok = False
        blamed.said = one_line(error, 1000)
        blamed.advice = STAGES[name]
        launch_log = getattr(error, "log", None)
        blamed.log = str(launch_log or log)
        if launch_log is None:
            with open(log, "a", encoding="utf-8") as file:
                file.writelines(traceback.format_exception(error))
        return blamed


@contextlib.contextmanager
def _redirect_output(file: Path) -> Iterator[None]:
    """Within the context, append stdout and stderr of this process to `file`."""
    with (
        open(file, "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        yield
