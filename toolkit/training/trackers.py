"""Trackers of experiments (TensorBoard, W&B, trackio, MLflow, ...), by Accelerate's classes.

Rank 0 alone tracks. `metrics.jsonl` is the record, a tracker a copy of it: one that fails while a
run trains is left out from there on, with a warning, and the run goes on.
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
# Those that choose the id of a run themselves, and where it is found.
_OWN_ID = {"mlflow": "info.run_id", "aim": "hash", "clearml": "id"}


@dataclass
class Trackers:
    """The trackers of one run; a resumed run continues what it began in them.

    Which run of a tracker this is stands in `trackers.json` of the run's folder. Steps that an
    earlier start tracked after its last checkpoint are done again: TensorBoard shows the new ones,
    the others take no step twice and keep the old.

    As a context it closes them at its end, and W&B learns whether that was a failure.

    TrainingError, on every rank: a tracker does not start, as one without a login. Collective.
    """

    cfg: MetricsConfig
    folder: Path
    settings: dict[str, Any]  # name -> value of what the run is, sent by the start that begins it
    _: KW_ONLY
    first_step: int  # steps that an earlier start has done
    last_logged: int  # the last step that it logged

    def __post_init__(self) -> None:
        # On rank 0 alone: name -> the tracker, and the step after which it is sent lines.
        self._trackers: dict[str, tuple[tracking.GeneralTracker, int]] = {}
        ranks.on_main(self._start)

    def _start(self) -> None:
        file = self.folder / _FILE
        known = _begun(file)
        for name in self.cfg.trackers():
            begun = name in known
            tracker, known[name] = self._started(name, known.get(name))
            if not begun:
                tracker.store_init_configuration(self.settings)
            after = self.last_logged if begun and name != "tensorboard" else self.first_step
            self._trackers[name] = tracker, after
        if known:
            replace_synced(file, json.dumps(known))

    def _started(self, name: str, known: str | None) -> tuple[tracking.GeneralTracker, str]:
        """Return a tracker that goes on with the run `known`, or begins one, and the run's id."""
        cfg, folder, goes_on = self.cfg, self.folder, known or False
        run_id, run_name = known or uuid.uuid4().hex, cfg.run_name or folder.resolve().name
        resuming: dict[str, Any] = {"id": run_id, "resume": "allow"}
        project = {"tensorboard": "tensorboard", "aim": run_name}.get(name, cfg.project)
        options: dict[str, Any] = {
            "tensorboard": {"logging_dir": folder, "purge_step": self.first_step + 1},
            "wandb": {"name": run_name, "dir": str(folder), **resuming},
            # A run of trackio is known by its name alone.
            "trackio": {"name": f"{run_name}-{run_id[:6]}", "resume": "allow"},
            "mlflow": {"run_name": run_name, "run_id": known},
            "comet_ml": {"experiment_key": run_id, "mode": "get_or_create"},
            "swanlab": {"experiment_name": run_name, **resuming},
            "aim": {"logging_dir": folder, "run_hash": known, "experiment": cfg.project},
            "clearml": {"task_name": run_name, "continue_last_task": goes_on},
            "dvclive": {
                "dir": str(folder / "dvclive"),
                "resume": known is not None,
                "save_dvc_exp": False,
            },
        }[name]
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
        try:
            tracker.start()
            if name == "comet_ml" and known is None:
                tracker.tracker.set_name(run_name)
        except Exception as error:
            raise TrainingError(
                f"metrics.report_to: {name} does not start: {one_line(error)}; see to its login "
                "and address, or leave it out"
            ) from error
        if name in _OWN_ID:
            run_id = operator.attrgetter(_OWN_ID[name])(tracker.tracker)
        return tracker, run_id

    def log(self, line: dict[str, Any]) -> None:
        """Send a line of `metrics.jsonl`, named as transformers does: `train/loss`, `eval/loss`."""
        step, own = line["step"], ("step", "time")
        values = {_name(key): value for key, value in line.items() if key not in own}
        for name, (tracker, after) in list(self._trackers.items()):
            if step > after:
                self._attempt(name, tracker.log, values, step=step)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, failure: object, *more: object) -> None:
        for name, (tracker, _) in list(self._trackers.items()):
            if name == "wandb":
                self._attempt(name, tracker.tracker.finish, exit_code=int(failure is not None))
            else:
                self._attempt(name, tracker.finish)
        self._trackers.clear()

    def _attempt(self, name: str, send: Callable, *values: Any, **more: Any) -> None:
        try:
            send(*values, **more)
        except Exception as error:
            del self._trackers[name]
            what = f"metrics.report_to: {name} failed and gets no more: {one_line(error)}"
            ranks.log_once(f"WARNING: {what}; metrics.jsonl has every line")


def _begun(file: Path) -> dict[str, str]:
    """Return tracker -> the run that an earlier start began. What is damaged is begun anew: no run
    of weeks ends over a copy of its metrics.
    """
    try:
        known = parsing.read_json(file, CheckpointError) if file.is_file() else {}
        if not isinstance(known, dict):
            raise CheckpointError(f"{file} holds {type(known).__name__}, expected an object")
    except CheckpointError as error:
        ranks.print_line(f"WARNING: {error}; trackers begin new runs")
        return {}
    return {name: run for name, run in known.items() if isinstance(run, str)}


def _name(key: str) -> str:
    return f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
