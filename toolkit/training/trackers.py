"""Trackers of experiments (TensorBoard, W&B, trackio, MLflow, ...), through Accelerate's classes.

Only rank 0 tracks. `metrics.jsonl` is the record, and a tracker is a copy of it: if a tracker fails
while a run trains, the run warns, and continues without it.
"""

import json
import operator
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from accelerate import tracking

from toolkit import parsing, ranks
from toolkit.config import MetricsConfig
from toolkit.errors import CheckpointError, TrainingError, one_line
from toolkit.formats.synced_files import replace_synced

_FILE = "trackers.json"
# Trackers that choose the id of a run themselves -> the attribute with the id.
_ID_ATTRIBUTES = {"mlflow": "info.run_id", "aim": "hash", "clearml": "id"}


@dataclass
class Trackers:
    """The experiment trackers of one run, which a resumed run continues.

    `trackers.json` in the run's folder stores the run's id in each tracker. After a resume, steps
    since the last checkpoint are done again. TensorBoard then shows the new values. The other
    trackers accept no step twice, and keep the old values.

    Creating the object is collective. It raises a `TrainingError` on every rank if a tracker does
    not start, for example without a login. As a context manager, it closes the trackers at the end,
    and reports a failure to W&B.
    """

    cfg: MetricsConfig
    folder: Path
    settings: dict[str, Any]
    """Name -> value of the run's settings, sent by the first start of the run."""
    _: KW_ONLY
    first_step: int
    """Number of steps that earlier starts have done."""
    last_logged: int
    """The last step that an earlier start logged."""

    def __post_init__(self) -> None:
        # On rank 0 only: name -> the tracker, and the step after which it receives lines.
        self._trackers: dict[str, tuple[tracking.GeneralTracker, int]] = {}
        ranks.on_main(self._start_all)

    def _start_all(self) -> None:
        """Start or resume the trackers, send settings to new ones, and write `trackers.json`.

        Runs on rank 0 only.
        """
        file = self.folder / _FILE
        run_ids = _read_run_ids(file)
        for name in self.cfg.trackers():
            is_resumed = name in run_ids
            tracker, run_ids[name] = self._start_tracker(name, run_ids.get(name))
            if not is_resumed:
                tracker.store_init_configuration(self.settings)
            keeps_old = is_resumed and name != "tensorboard"
            self._trackers[name] = tracker, self.last_logged if keeps_old else self.first_step
        if run_ids:
            replace_synced(file, json.dumps(run_ids))

    def _start_tracker(self, name: str, old_id: str | None) -> tuple[tracking.GeneralTracker, str]:
        """Start one tracker with a new run, or continue its run.

        Args:
            name: name of the tracker in `metrics.report_to`.
            old_id: id of the run to continue in the tracker; None: start a new run.

        Returns:
            The tracker, and the id of its run.

        Raises:
            TrainingError: the tracker does not start.
        """
        cfg, folder = self.cfg, self.folder
        run_id = old_id or uuid.uuid4().hex
        run_name = cfg.run_name or folder.resolve().name
        resuming: dict[str, Any] = {"id": run_id, "resume": "allow"}
        project = {"tensorboard": "tensorboard", "aim": run_name}.get(name, cfg.project)
        options: dict[str, Any] = {
            "tensorboard": {"logging_dir": folder, "purge_step": self.first_step + 1},
            "wandb": {"name": run_name, "dir": str(folder), **resuming},
            # trackio identifies a run by its name only.
            "trackio": {"name": f"{run_name}-{run_id[:6]}", "resume": "allow"},
            "mlflow": {"run_name": run_name, "run_id": old_id},
            "comet_ml": {"experiment_key": run_id, "mode": "get_or_create"},
            "swanlab": {"experiment_name": run_name, **resuming},
            "aim": {"logging_dir": folder, "run_hash": old_id, "experiment": cfg.project},
            "clearml": {"task_name": run_name, "continue_last_task": old_id or False},
            "dvclive": {
                "dir": str(folder / "dvclive"),
                "resume": old_id is not None,
                "save_dvc_exp": False,
            },
        }[name]
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
        try:
            tracker.start()
            if name == "comet_ml" and old_id is None:
                tracker.tracker.set_name(run_name)
        except Exception as error:
            raise TrainingError(
                f"metrics.report_to: {name} does not start: {one_line(error)}; check its login and "
                "address, or remove it"
            ) from error
        if name in _ID_ATTRIBUTES:
            run_id = operator.attrgetter(_ID_ATTRIBUTES[name])(tracker.tracker)
        return tracker, run_id

    def log(self, line: dict[str, Any]) -> None:
        """Send a line of `metrics.jsonl` to the trackers, with metric names such as `train/loss`.

        Steps that a tracker has already received are skipped. A tracker that fails is removed with
        a warning. Does nothing on other ranks than 0.
        """
        step = line["step"]
        values = {
            _tracker_metric_name(key): v for key, v in line.items() if key not in ("step", "time")
        }
        for name, (tracker, after) in list(self._trackers.items()):
            if step > after:
                self._try_to_send(name, tracker.log, values, step=step)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, failure: object, *more: object) -> None:
        for name, (tracker, _) in list(self._trackers.items()):
            if name == "wandb":
                self._try_to_send(name, tracker.tracker.finish, exit_code=int(failure is not None))
            else:
                self._try_to_send(name, tracker.finish)
        self._trackers.clear()

    def _try_to_send(self, name: str, send: Callable, *values: Any, **more: Any) -> None:
        """Call `send` with the values. If it raises, remove the tracker `name` with a warning."""
        try:
            send(*values, **more)
        except Exception as error:
            del self._trackers[name]
            ranks.log_once(
                f"WARNING: metrics.report_to: {name} failed and gets no more: {one_line(error)}; "
                "metrics.jsonl has every line"
            )


def _read_run_ids(file: Path) -> dict[str, str]:
    """Read the ids of the run by tracker name; empty if there is no file.

    If the file is damaged, a warning is printed and the result is empty, so trackers start new
    runs. A long run should not end because of a copy of its metrics.
    """
    try:
        content = parsing.read_json(file, CheckpointError) if file.is_file() else {}
        if not isinstance(content, dict):
            raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    except CheckpointError as error:
        ranks.print_line(f"WARNING: {error}; trackers start new runs")
        return {}
    return {name: run_id for name, run_id in content.items() if isinstance(run_id, str)}


def _tracker_metric_name(key: str) -> str:
    """Convert a metric's name: `eval_NAME` to `eval/NAME`, others to `train/NAME`.

    transformers uses the same names.
    """
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
