"""The life of a run, lived by the small model: each method is a stage.

    start, two checkpoints, kill -9 | resume from the first: the second again, to the bit, and on
    | the same on another number of ranks | export, proof, read by transformers and PEFT

The checkpoint that the killed run wrote last is set aside: a resume has to write it again.
"""

import contextlib
import json
import math
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit import config, hub
from toolkit.checkpoint.commit import CHECKPOINTS, SUMS, committed_steps, read_manifest, step_name
from toolkit.checkpoint.run_folder import export_path
from toolkit.config.settings import RunConfig
from toolkit.errors import ToolkitError
from toolkit.export import consolidate
from toolkit.formats.metrics_file import SAMPLES, read_lines, read_metrics
from toolkit.hub.local import read_export
from toolkit.rehearsal.launches import Launch, recipe_command
from toolkit.rehearsal.settings import EVERY, LAST, on_other_ranks
from toolkit.rehearsal.stages import NotAskedError, StageError
from toolkit.tables import size_text
from toolkit.verify import verify_checkpoint, verify_export

_AGAIN = 2 * EVERY  # the step that is done twice
_SAME = ("loss", "grad_norm", "learning_rate", "tokens")  # of a step that is done twice
_CLOSE = 0.05  # of the loss on other ranks: sums are rounded otherwise, dropout differs


@dataclass
class Life:
    """One run of the small model in `folder`, as `cfg` says; `real` is the config of the user."""

    recipe: str
    real: RunConfig
    cfg: RunConfig
    world_size: int
    folder: Path
    logs: Path
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.run = Path(self.cfg.output_dir)
        self.aside = self.folder / "before"
        self.export, self.merged = export_path(self.run), self.folder / "merged"
        self.adapted = self.cfg.adapters is not None
        self.config = self.folder / "rehearsal.yaml"
        self.config.write_text(config.dump(self.cfg), "utf-8")

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # ---- A start that is killed

    def load(self) -> str:
        command = recipe_command(self.recipe, self.config, self.world_size)
        launch = Launch(command, self.logs / "train.log", self.folder / "cache")
        self.first: Launch = self._open.enter_context(launch)
        self.first.wait_for(lambda: self._line(1) is not None)
        return f"{self.world_size} processes started as {command[-3]}, first step done"

    def train(self) -> str:
        self.first.wait_for(lambda: self._line(EVERY) is not None)
        losses = [line["loss"] for line in read_metrics(self.run) if "loss" in line]
        if not all(map(math.isfinite, losses)):
            raise StageError(f"the loss is not finite: {losses}", log=self.first.log)
        return f"loss {losses[0]:.4f} at step 1, {losses[EVERY - 1]:.4f} at step {EVERY}"

    def save(self) -> str:
        self.first.wait_for(lambda: {EVERY, _AGAIN} <= committed_steps(self.run).keys())
        return f"checkpoints of steps {EVERY} and {_AGAIN}"

    def kill(self) -> str:
        over = not self.first.running
        self.first.kill()
        steps = committed_steps(self.run)
        if over or LAST in steps:
            raise StageError("the run was over before it could be killed", log=self.first.log)
        self.before = {line["step"]: line for line in read_metrics(self.run)}
        for step in (EVERY, _AGAIN):
            _refuse(verify_checkpoint(steps[step]))
        self.aside.mkdir()
        shutil.move(steps[_AGAIN], self.aside / step_name(_AGAIN))
        return f"SIGKILL to all processes in step {max(self.before) + 1}; checkpoints are whole"

    # ---- And goes on

    def resume(self) -> str:
        log = self._to_the_end("resume", self.world_size)
        if "resuming " not in log.read_text("utf-8"):
            raise StageError("the recipe began anew instead of resuming", log=log)
        after = {line["step"]: line for line in read_metrics(self.run)}
        for step in range(EVERY + 1, _AGAIN + 1):
            for name in _SAME:
                old, new = (lines[step].get(name) for lines in (self.before, after))
                if old != new:
                    raise StageError(
                        f"the resumed run is not the undisturbed one: step {step}, done again "
                        f"after a kill, has {name} {new}, not {old}",
                        log=log,
                    )
        again = self.run / CHECKPOINTS / step_name(_AGAIN)
        if differing := _differences(self.aside / step_name(_AGAIN), again):
            raise StageError(
                f"the resumed run is not the undisturbed one: the checkpoint of step {_AGAIN} has "
                f"other {', '.join(differing)}",
                log=log,
            )
        return f"steps {EVERY + 1} to {_AGAIN} again, bit for bit; then to step {LAST}"

    def evaluate(self) -> str:
        last = read_metrics(self.run)[-1]
        found = {k: v for k, v in last.items() if k.startswith("eval_") and k.endswith("loss")}
        if not found:
            data = self.real.data
            if data.eval_files or data.eval_sources or (data.eval_split and not data.streaming):
                raise StageError("the last step has no evaluation in metrics.jsonl")
            raise NotAskedError("no data.eval_files, and no data.eval_split of rows at hand")
        if not all(math.isfinite(v) for v in found.values()):
            raise StageError(f"an evaluation is not finite: {found}")
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        if getattr(self.real.train, "eval_prompts", None):
            said += f"; {len(read_lines(self.run / SAMPLES))} answers to prompts"
        return said

    def other_ranks(self) -> str:
        """Do the last steps again on half the ranks (on two where there is one)."""
        other = on_other_ranks(self.cfg.train, self.world_size)
        if other is None:
            raise NotAskedError("a step of one sample cannot be divided over two ranks")
        world, micro_batch = other
        last = self.run / CHECKPOINTS / step_name(LAST)
        expected = _position(last), read_metrics(self.run)[-1]["loss"]
        shutil.move(last, self.aside / step_name(LAST))
        batch = ("--train.per_device_train_batch_size", str(micro_batch))
        log = self._to_the_end("other_ranks", world, *batch)
        position, loss = _position(last), read_metrics(self.run)[-1]["loss"]
        if position != expected[0]:
            raise StageError(
                f"on {world} rank(s) the position in the data is {position}, not {expected[0]}",
                log=log,
            )
        off = abs(loss - expected[1]) / max(abs(expected[1]), 1e-6)
        if not off < _CLOSE:
            raise StageError(
                f"on {world} rank(s) the last loss is {loss:.6f}, on {self.world_size} it was "
                f"{expected[1]:.6f}",
                log=log,
            )
        return f"steps {_AGAIN + 1} to {LAST} on {world} rank(s): same data, loss within {off:.1e}"

    # ---- What comes out of it

    def consolidate(self) -> str:
        consolidate(self.run, self.export)
        if self.adapted:
            consolidate(self.run, self.merged, merge=True)
        nbytes = sum(file.stat().st_size for file in self.export.iterdir())
        return f"{size_text(nbytes)}{', an adapter, and merged' if self.adapted else ''}"

    def verify(self) -> str:
        checkpoint = committed_steps(self.run)[LAST]
        _refuse(verify_checkpoint(checkpoint))
        for folder in [self.export, *([self.merged] if self.adapted else [])]:
            _refuse(verify_export(checkpoint, folder))
        return "every file and tensor, to the bit"

    def reload(self) -> str:
        whole = self.merged if self.adapted else self.export
        script = Path(__file__).with_name("reader.py")
        command = [sys.executable, "-P", str(script), str(whole)]
        if self.adapted:
            command += ["--adapter", str(self.export), "--base", self.cfg.model.name_or_path]
        if self.cfg.model.trust_remote_code:
            command.append("--trust_remote_code")
        if (whole / "tokenizer_config.json").exists() or (whole / "tokenizer.json").exists():
            command.append("--tokenizer")
        launch = Launch(command, self.logs / "reload.log", self.folder / "cache", "reload")
        self.reader = self._open.enter_context(launch)
        return self._read("reload")

    def generate(self) -> str:
        return self._read("generate")

    def adapter(self) -> str:
        if not self.adapted:
            raise NotAskedError("no adapters: lora.r is 0")
        return self._read("adapter")

    def push(self) -> str:
        asked, folder = self.real.hub, self.merged if self.adapted else self.export
        if asked.hub_model_id is None:
            files = read_export(folder, "ORG/NAME", None).entries
            size = size_text(sum(file["size"] for file in files.values()))
            return f"{len(files)} files, {size}, are ready; hub.hub_model_id is not set"
        private = asked.hub_private_repo
        seen = hub.preview(folder, asked.hub_model_id, private=private)
        notes = "".join(f"; {note}" for note in seen.notes)
        return f"would send {len(seen.send)} files to {asked.hub_model_id}{notes}"

    # ---- Helpers

    def _line(self, step: int) -> dict[str, Any] | None:
        return next((m for m in read_metrics(self.run) if m["step"] == step and "loss" in m), None)

    def _to_the_end(self, name: str, world_size: int, *flags: str) -> Path:
        command = [*recipe_command(self.recipe, self.config, world_size), *flags]
        log, stage = self.logs / f"{name}.log", name.replace("_", " ")
        with Launch(command, log, self.folder / "cache", stage) as launch:
            launch.finish()
        if LAST not in committed_steps(self.run):
            raise StageError(f"it ended without a checkpoint of step {LAST}", log=log)
        return log

    def _read(self, stage: str) -> str:
        """Wait until the reader has passed a stage; return what it said."""
        found: list[str] = []

        def said() -> bool:
            for line in self.reader.log.read_text("utf-8", "replace").splitlines():
                if line.startswith(f'{{"stage": "{stage}"'):
                    found.append(json.loads(line)["said"])
            return bool(found)

        self.reader.blame = stage
        self.reader.wait_for(said)
        return found[0]


def _differences(one: Path, other: Path) -> list[str]:
    """Return what a resume must not change, and has changed, between two checkpoints of a step."""
    found = []
    mine, theirs = (read_manifest(folder)[SUMS] for folder in (one, other))
    if wrong := [name for name in mine if mine[name] != theirs.get(name)]:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        found.append(f"weights or optimizer state ({wrong[0]}{more})")
    if _position(one) != _position(other):
        found.append("position in the data")
    for file in sorted((one / "rng").iterdir()):
        if file.read_bytes() != (other / "rng" / file.name).read_bytes():
            found.append(f"random state ({file.name})")
    return found


def _position(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "state.json").read_text("utf-8")).get("data")


def _refuse(report: Any) -> None:
    if not report.ok:
        raise ToolkitError("; ".join(report.lines()[:3]))
