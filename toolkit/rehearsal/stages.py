"""Stages of a rehearsal: what each found, how long it took, and why one failed."""

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
from toolkit.tables import table

STAGES = {
    "settings": "change the config; `toolkit train CONFIG --help` lists the settings",
    "packages": "install it where the run will be; --skip packages if only this machine lacks it",
    "output": "give a folder that can be written; --skip output if the run's machine has another",
    "hub": "see to the token and the id; --skip hub where this machine cannot reach the Hub",
    "model": "see to model.name_or_path, which must be there before the run, and to the tokenizer",
    "data": "look at the rows with `toolkit inspect --data CONFIG`",
    "sharding": "change the section sharding; `toolkit inspect --plan CONFIG` shows the units",
    "disk": "make room, or save less; --skip disk where the run's machine has another disk",
    "load": "see the log; `toolkit plan CONFIG` and docs/evidence/architectures.md say more",
    "train": "see the log: the recipe failed in its loop",
    "save": "see the log: a checkpoint could not be written",
    "kill": "see the log",
    "resume": "all that a step depends on must be in the state that the recipe keeps: draw from "
    "torch's, numpy's or python's own generator, which the run seeds and saves, and take the data "
    "from its position",
    "evaluate": "see data.eval_files and data.eval_split",
    "other ranks": "the global batch must divide over the ranks; see docs/checkpoints.md",
    "consolidate": "see the log; the weights are safe in the checkpoint",
    "verify": "see the findings; a recipe must not change what it has saved",
    "reload": "what transformers cannot load nobody can use: see to the model's config, code and "
    "tokenizer files",
    "generate": "see to the tokenizer, the chat template and generation_config.json",
    "adapter": "see the log; the merged model may still be used (toolkit consolidate --merge)",
    "push": "see to the section hub and the export",
}
"""Name -> what to do where it fails, in the order in which they run."""
SKIPPABLE = ("packages", "output", "hub", "disk")
"""Those that ask about this machine, which need not be the run's."""


_WIDEST = 40  # letters of a setting's value


@dataclass
class Stage:
    """One stage; `ok` is None where it was not run, for the reason in `said`."""

    stage: str
    ok: bool | None = None
    seconds: float = 0.0
    said: str = ""
    advice: str = ""
    log: str | None = None

    def line(self) -> str:
        utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        marks = {True: "✓", False: "✗", None: "-"} if utf8 else {True: "ok", False: "NO", None: "-"}
        took = f"{self.seconds:5.1f} s" if self.ok is not None else " " * 7
        return f"{marks[self.ok]} {self.stage:<12}{took}  {self.said}".rstrip()


class StageError(ToolkitError):
    """A stage failed; `stage` is the one to blame where it is not the one that ran."""

    def __init__(self, message: str, stage: str | None = None, log: Path | None = None) -> None:
        super().__init__(message)
        self.stage, self.log = stage, log


class NotAskedError(Exception):
    """What a stage is about, the config does not ask for."""


@dataclass
class Result:
    """What a rehearsal found."""

    recipe: str = ""
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the run will do that may not be meant."""
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Setting that differs -> its value in the run and in the rehearsal."""
    not_rehearsed: list[str] = field(default_factory=list)
    """What of the run no setting shows."""
    seconds: float = 0.0
    folder: str | None = None
    """Where everything lies; None where it was removed."""

    @property
    def failed(self) -> Stage | None:
        return next((s for s in self.stages if s.ok is False), None)

    @property
    def ok(self) -> bool:
        return self.failed is None and bool(self.stages)

    def summary(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        failed = None if self.failed is None else self.failed.stage
        return {"ok": self.ok, "failed": failed, **asdict(self)}

    def text(self) -> str:
        """Return what follows the lines of the stages."""
        lines = []
        for stage in (s for s in self.stages if s.ok is False):
            lines += ["", f"{stage.stage} failed: {stage.said}", f"  what to do: {stage.advice}"]
            lines += [f"  log: {stage.log}"] if stage.log else []
        for title, entries in (("notes", self.notes), ("not rehearsed", self.not_rehearsed)):
            lines += ["", f"{title}:", *(f"    {entry}" for entry in entries)] if entries else []
        if self.changed:
            pairs = asdict(self)["changed"].items()
            rows = [["setting", "run", "rehearsal"], *([n, *map(_shown, p)] for n, p in pairs)]
            lines += ["", "rehearsed with other settings:"]
            lines += [f"    {line}" for line in table(rows, set(), margin=4)]
        end = f"{'passed' if self.ok else 'FAILED'} in {self.seconds:.0f} s"
        return "\n".join([*lines, "", end + (f"; kept in {self.folder}" if self.folder else "")])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    half = _WIDEST // 2
    return text if len(text) <= _WIDEST else f"{text[: half - 1]}…{text[-half:]}"


class Recorder:
    """Runs stages in order, keeps what they print in logs, and stops after one that failed."""

    def __init__(self, logs: Path, skip: tuple[str, ...], show: Callable[[str], None]) -> None:
        self.result = Result()
        self.logs, self._skip, self._show = logs, skip, show

    def run(self, name: str, work: Callable[[], str], needs: tuple[str, ...] | None = None) -> None:
        """Run a stage where none that it `needs` failed (None: none at all); `work` returns what
        it found.
        """
        stage = blamed = Stage(name)
        begun, log = time.monotonic(), self.logs / f"{name.replace(' ', '_')}.log"
        failed = {s.stage for s in self.result.stages if s.ok is False}
        if name in self._skip:
            stage.said = "left out, as asked"
        elif failed if needs is None else failed & {*needs}:
            return
        else:
            try:
                with _printing_to(log):
                    stage.said, stage.ok = work(), True
            except NotAskedError as reason:
                stage.said = str(reason)
            except Exception as error:  # of whatever the run would meet
                blamed = self._blame(stage, error, log)
            stage.seconds = time.monotonic() - begun
        if blamed is stage:
            self.result.stages.append(stage)
        self._show(blamed.line())

    def _blame(self, stage: Stage, error: Exception, log: Path) -> Stage:
        """Return the stage that failed: the one that ran, or an earlier one that it shows wrong."""
        name = getattr(error, "stage", None) or stage.stage
        own = next((s for s in self.result.stages if s.stage == name), stage)
        own.stage, own.ok, own.said, own.advice = name, False, one_line(error, 1000), STAGES[name]
        told = getattr(error, "log", None)
        own.log = str(told or log)
        if told is None:
            with open(log, "a", encoding="utf-8") as file:
                file.writelines(traceback.format_exception(error))
        return own


@contextlib.contextmanager
def _printing_to(file: Path) -> Iterator[None]:
    with (
        open(file, "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        yield
