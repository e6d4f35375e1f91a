"""The life of a run, lived by the small model: each method is a stage of the rehearsal.

    start, save two checkpoints, kill -9
    resume from the first: the second must come out bitwise identical; run to the end
    do the last steps again on another number of ranks
    export, verify, read the export with transformers and PEFT

The killed run's last checkpoint is moved away, so that the resumed run writes it again.
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
from toolkit.checkpoint.commit import committed_steps, read_manifest
from toolkit.checkpoint.names import CHECKPOINTS, ROW_SUMS, step_name
from toolkit.checkpoint.run_folder import default_export_path
from toolkit.config.settings import RunConfig
from toolkit.errors import ToolkitError
from toolkit.export import consolidate
from toolkit.formats.metrics_file import SAMPLES, read_lines, read_metrics
from toolkit.hub.local import read_export
from toolkit.rehearsal.launches import Launch, recipe_command
from toolkit.rehearsal.settings import LAST_STEP, SAVE_STEPS, plan_other_ranks
from toolkit.rehearsal.stages import SkippedError, StageError
from toolkit.tables import size_text
from toolkit.verify import verify_checkpoint, verify_export

_REPEATED_STEP = 2 * SAVE_STEPS
_COMPARED_METRICS = ("loss", "grad_norm", "learning_rate", "tokens")
# Of the loss on another number of ranks, where sums round differently and dropout differs.
_LOSS_TOLERANCE = 0.05


@dataclass
class SmallRun:
    """The small run of a rehearsal: it trains, is killed, resumes, and is exported.

    Its public methods are the stages, called in order. Each returns a text for the report. It
    raises a StageError if the stage fails, and a SkippedError if the stage does not apply.

    Args:
        recipe: name of the recipe to start.
        real_cfg: the config of the user's run.
        cfg: the config of the small run.
        world_size: the number of processes.
        folder: folder for all files of the rehearsal.
        logs: folder for the output of the processes.
    """

    recipe: str
    real_cfg: RunConfig
    cfg: RunConfig
    world_size: int
    folder: Path
    logs: Path
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.run = Path(self.cfg.output_dir)
        self.before_kill = self.folder / "before"
        self.export = default_export_path(self.run)
        self.merged = self.folder / "merged"
        self.has_adapter = self.cfg.adapters is not None
        self.config = self.folder / "rehearsal.yaml"
        self.config.write_text(config.dump(self.cfg), "utf-8")

    def __enter__(self) -> "SmallRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # ---- A start that is killed ------------------------------------------------------------------

    def load(self) -> str:
        """Start the recipe, and wait until it has logged its first step."""
        command = recipe_command(self.recipe, self.config, self.world_size)
        launch = Launch(command, self.logs / "train.log", self.folder / "cache")
        self.first_launch: Launch = self._open.enter_context(launch)
        self.first_launch.wait_for(lambda: self._has_logged(1))
        return f"{self.world_size} processes started as {command[-3]}, first step done"

    def train(self) -> str:
        """Wait for the step of the first checkpoint, and check that all losses are finite."""
        self.first_launch.wait_for(lambda: self._has_logged(SAVE_STEPS))
        losses = [line["loss"] for line in read_metrics(self.run) if "loss" in line]
        if not all(map(math.isfinite, losses)):
            raise StageError(f"the loss is not finite: {losses}", log=self.first_launch.log)
        last = losses[SAVE_STEPS - 1]
        return f"loss {losses[0]:.4f} at step 1, {last:.4f} at step {SAVE_STEPS}"

    def save(self) -> str:
        """Wait until the checkpoints of two steps are complete."""
        steps = {SAVE_STEPS, _REPEATED_STEP}
        self.first_launch.wait_for(lambda: steps <= committed_steps(self.run).keys())
        return f"checkpoints of steps {SAVE_STEPS} and {_REPEATED_STEP}"

    def kill(self) -> str:
        """Kill all processes, verify both checkpoints, and move the second one out of the run.

        Raises:
            StageError: the run had already ended.
            ToolkitError: a checkpoint is damaged.
        """
        has_ended = not self.first_launch.running
        self.first_launch.kill()
        steps = committed_steps(self.run)
        if has_ended or LAST_STEP in steps:
            message = "the run ended before it could be killed"
            raise StageError(message, log=self.first_launch.log)
        self.first_metrics = {line["step"]: line for line in read_metrics(self.run)}
        for step in (SAVE_STEPS, _REPEATED_STEP):
            _check_report(verify_checkpoint(steps[step]))
        self.before_kill.mkdir()
        shutil.move(steps[_REPEATED_STEP], self.before_kill / step_name(_REPEATED_STEP))
        step = max(self.first_metrics) + 1
        return f"SIGKILL to all processes in step {step}; the checkpoints are intact"

    # ---- The resumed run -------------------------------------------------------------------------

    def resume(self) -> str:
        """Start the recipe again: it must resume from the first checkpoint, and train to the end.

        Metrics and the second checkpoint must be bitwise identical to those before the kill.
        """
        log = self._run_to_end("resume", self.world_size)
        if "resuming " not in log.read_text("utf-8"):
            raise StageError("the recipe started from scratch instead of resuming", log=log)
        resumed_metrics = {line["step"]: line for line in read_metrics(self.run)}
        for step in range(SAVE_STEPS + 1, _REPEATED_STEP + 1):
            for name in _COMPARED_METRICS:
                before = self.first_metrics[step].get(name)
                after = resumed_metrics[step].get(name)
                if before != after:
                    raise StageError(
                        f"the resumed run differs from the run before the kill: {name} of step "
                        f"{step} is {after}, expected {before}",
                        log=log,
                    )
        repeated = self.run / CHECKPOINTS / step_name(_REPEATED_STEP)
        differences = _compare_checkpoints(self.before_kill / step_name(_REPEATED_STEP), repeated)
        if differences:
            raise StageError(
                f"the resumed run differs from the run before the kill: its checkpoint of step "
                f"{_REPEATED_STEP} has other {', '.join(differences)}",
                log=log,
            )
        steps = f"steps {SAVE_STEPS + 1} to {_REPEATED_STEP}"
        return f"{steps} again, bitwise identical; then to step {LAST_STEP}"

    def evaluate(self) -> str:
        """Check that the resumed run evaluated its last step, with finite losses.

        Skipped if the config has no evaluation data.
        """
        metrics = read_metrics(self.run)[-1]
        losses = {
            name: value
            for name, value in metrics.items()
            if name.startswith("eval_") and name.endswith("loss")
        }
        if not losses:
            data = self.real_cfg.data
            if data.eval_files or data.eval_sources or (data.eval_split and not data.streaming):
                raise StageError("metrics.jsonl has no evaluation of the last step")
            raise SkippedError("no data.eval_files, and no data.eval_split of rows on disk")
        if not all(math.isfinite(value) for value in losses.values()):
            raise StageError(f"an evaluation is not finite: {losses}")
        text = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        if getattr(self.real_cfg.train, "eval_prompts", None):
            text += f"; {len(read_lines(self.run / SAMPLES))} answers to prompts"
        return text

    def other_ranks(self) -> str:
        """Resume on another number of ranks, and repeat the last steps.

        The number is 2 if the run has one rank, otherwise at most half of its ranks. The position
        in the data must be the same, and the last loss must agree within 5 %. Skipped if no other
        number of ranks is possible.
        """
        parts = self.cfg.sharding.context_parallel
        layout = plan_other_ranks(self.cfg.train, self.world_size, parts)
        if layout is None:
            raise SkippedError("a step of one sample cannot be divided over two ranks")
        world_size, micro_batch = layout
        checkpoint = self.run / CHECKPOINTS / step_name(LAST_STEP)
        expected_position = _read_position(checkpoint)
        expected_loss = read_metrics(self.run)[-1]["loss"]
        shutil.move(checkpoint, self.before_kill / step_name(LAST_STEP))
        flags = ["--train.per_device_train_batch_size", str(micro_batch)]
        if parts > 1:
            # The position counts samples, so other ranks may read complete rows.
            flags += ["--sharding.context_parallel", "1"]
        if self.cfg.sharding.expert_parallel > 1:
            flags += ["--sharding.expert_parallel", "1"]
        log = self._run_to_end("other_ranks", world_size, *flags)
        position = _read_position(checkpoint)
        loss = read_metrics(self.run)[-1]["loss"]
        if position != expected_position:
            raise StageError(
                f"on {world_size} rank(s) the position in the data is {position}, expected "
                f"{expected_position}",
                log=log,
            )
        difference = abs(loss - expected_loss) / max(abs(expected_loss), 1e-6)
        # Written so that a difference of NaN fails, too.
        if not difference < _LOSS_TOLERANCE:
            raise StageError(
                f"on {world_size} rank(s) the last loss is {loss:.6f}, on {self.world_size} it was "
                f"{expected_loss:.6f}",
                log=log,
            )
        steps = f"steps {_REPEATED_STEP + 1} to {LAST_STEP}"
        return f"{steps} on {world_size} rank(s): same data, loss within {difference:.1e}"

    # ---- The export ------------------------------------------------------------------------------

    def consolidate(self) -> str:
        """Export the last checkpoint; with adapters, also export them merged into the base."""
        consolidate(self.run, self.export)
        if self.has_adapter:
            consolidate(self.run, self.merged, merge=True)
        nbytes = sum(file.stat().st_size for file in self.export.iterdir())
        return f"{size_text(nbytes)}{', an adapter, and merged' if self.has_adapter else ''}"

    def verify(self) -> str:
        """Verify the last checkpoint, and compare each export with it."""
        checkpoint = committed_steps(self.run)[LAST_STEP]
        _check_report(verify_checkpoint(checkpoint))
        for folder in [self.export, *([self.merged] if self.has_adapter else [])]:
            _check_report(verify_export(checkpoint, folder))
        return "every file and tensor is bitwise identical"

    def reload(self) -> str:
        """Start `reader.py` on the export, and wait until transformers has loaded the export.

        `reader.py` is a separate program that uses transformers and PEFT but not the toolkit. With
        adapters it loads the merged export.
        """
        folder = self.merged if self.has_adapter else self.export
        script = Path(__file__).with_name("reader.py")
        command = [sys.executable, "-P", str(script), str(folder)]
        if self.has_adapter:
            command += ["--adapter", str(self.export), "--base", self.cfg.model.name_or_path]
        if self.cfg.model.trust_remote_code:
            command.append("--trust_remote_code")
        if (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
            command.append("--tokenizer")
        launch = Launch(command, self.logs / "reload.log", self.folder / "cache", "reload")
        self.reader = self._open.enter_context(launch)
        return self._wait_for_reader("reload")

    def generate(self) -> str:
        """Wait until `reader.py`, started by `reload`, has generated tokens."""
        return self._wait_for_reader("generate")

    def adapter(self) -> str:
        """Wait until `reader.py` has merged the adapter with PEFT and compared the result.

        Skipped without adapters.
        """
        if not self.has_adapter:
            raise SkippedError("no adapters: lora.r is 0")
        return self._wait_for_reader("adapter")

    def push(self) -> str:
        """Report which files of the export `toolkit push` would send. Sends nothing."""
        hub_cfg = self.real_cfg.hub
        folder = self.merged if self.has_adapter else self.export
        if hub_cfg.hub_model_id is None:
            files = read_export(folder, "ORG/NAME", None).entries
            size = size_text(sum(file["size"] for file in files.values()))
            return f"{len(files)} files, {size}, are ready; hub.hub_model_id is not set"
        preview = hub.preview(folder, hub_cfg.hub_model_id, private=hub_cfg.hub_private_repo)
        notes = "".join(f"; {note}" for note in preview.notes)
        return f"would send {len(preview.send)} files to {hub_cfg.hub_model_id}{notes}"

    # ---- Helpers ---------------------------------------------------------------------------------

    def _has_logged(self, step: int) -> bool:
        """Return True if metrics.jsonl has the loss of `step`."""
        return any(line["step"] == step and "loss" in line for line in read_metrics(self.run))

    def _run_to_end(self, name: str, world_size: int, *flags: str) -> Path:
        """Start the recipe, and wait until it has written the last checkpoint and ended.

        Args:
            name: name of the log file, and of the stage that fails if the recipe fails.
            world_size: the number of processes.
            flags: additional command-line arguments.

        Returns:
            The log file.

        Raises:
            StageError: the recipe failed, took too long, or ended without that checkpoint.
        """
        command = [*recipe_command(self.recipe, self.config, world_size), *flags]
        log = self.logs / f"{name}.log"
        with Launch(command, log, self.folder / "cache", name.replace("_", " ")) as launch:
            launch.wait()
        if LAST_STEP not in committed_steps(self.run):
            raise StageError(f"the run ended without a checkpoint of step {LAST_STEP}", log=log)
        return log

    def _wait_for_reader(self, stage: str) -> str:
        """Wait until `reader.py` reports that a stage passed, and return the text of its report.

        Raises:
            StageError: `reader.py` ended without that report, or took too long.
        """
        texts: list[str] = []

        def has_reported() -> bool:
            for line in self.reader.log.read_text("utf-8", "replace").splitlines():
                if line.startswith(f'{{"stage": "{stage}"'):
                    texts.append(json.loads(line)["said"])
            return bool(texts)

        self.reader.blame = stage
        self.reader.wait_for(has_reported)
        return texts[0]


def _compare_checkpoints(first: Path, second: Path) -> list[str]:
    """List the parts of two checkpoints of one step that are not bitwise identical.

    Compares weights, optimizer state, position in the data, and random state.
    """
    differences = []
    first_sums = read_manifest(first)[ROW_SUMS]
    second_sums = read_manifest(second)[ROW_SUMS]
    changed = [name for name in first_sums if first_sums[name] != second_sums.get(name)]
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        differences.append(f"weights or optimizer state ({changed[0]}{more})")
    if _read_position(first) != _read_position(second):
        differences.append("position in the data")
    for file in sorted((first / "rng").iterdir()):
        if file.read_bytes() != (second / "rng" / file.name).read_bytes():
            differences.append(f"random state ({file.name})")
    return differences


def _read_position(checkpoint: Path) -> Any:
    """Read the position in the data from a checkpoint's state.json; None if it has none."""
    return json.loads((checkpoint / "state.json").read_text("utf-8")).get("data")


def _check_report(report: Any) -> None:
    """Raise a ToolkitError with the first three findings unless the verification passed."""
    if not report.ok:
        raise ToolkitError("; ".join(report.lines()[:3]))
