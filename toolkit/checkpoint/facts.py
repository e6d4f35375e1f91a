"""Facts of a run for its export and model card: no secret, no path of a machine."""

import itertools
from pathlib import Path
from typing import Any

from toolkit.checkpoint.commit import CHECKPOINTS, step_name
from toolkit.checkpoint.run_folder import CONFIG, beside_recorded, plain_config
from toolkit.checkpoint.store import read_object
from toolkit.config.published import get_mapping, select_publishable_settings, to_publishable
from toolkit.formats.metrics_file import METRICS, STARTS, read_lines, read_metrics
from toolkit.training.run_start import read_versions


def run_facts(run_dir: str | Path, step: int | None = None) -> dict[str, Any]:
    """Return what a model card says of a run, as plain JSON values; {} where there is no run.

    Secrets are removed, and of paths only the last part is kept. `run_dir` may be the run's
    `checkpoint.root`; what it did after `step` is left out.

    Returns:
        What `publishable_settings` found at the start that trained `step`, `changes` {setting:
        [[value, until step], ...]} of those that earlier starts had otherwise, `metrics` (the last
        line's values, and the last evaluation's) and `logged_at` {metric: step}, `versions` (that
        trained it), `steps`, `tokens`, `global_batch` (samples) and `devices`.
    """
    run = Path(run_dir)
    config = plain_config(run)
    home = _home(run, config)
    lines = [x for x in read_metrics(home) if step is None or x["step"] <= step]
    starts = [x for x in read_lines(home / STARTS) if step is None or x["step"] < step]
    if not config and not lines:
        return {}
    # The last evaluation may be of an earlier line than the last loss.
    final = {key: (value, line["step"]) for line in lines for key, value in line.items()}
    logged = {key: found for key, found in final.items() if key not in ("step", "tokens")}
    state, last = _state(run, step), lines[-1]["step"] if lines else None
    steps = last if step is None else step
    of_state = state if state.get("step") == steps else {}
    of_line = lines[-1] if last == steps and lines else {}
    decided = get_mapping(starts[-1], "run") if starts else {}
    if not all(get_mapping(decided, part) for part in ("base_model", "data", "hyperparameters")):
        decided = {}  # an earlier version's, or damaged
    facts = {
        **(decided or select_publishable_settings(config, run)),
        "changes": _changes(starts),
        "metrics": {key: value for key, (value, _) in logged.items()},
        "logged_at": {key: at for key, (_, at) in logged.items()},
        # Of the machine that trained, which need not be the one that exports.
        "versions": get_mapping(starts[-1], "versions") if starts else read_versions(),
        "steps": steps,
        "tokens": of_state.get("tokens", of_line.get("tokens")),
        "global_batch": get_mapping(state, "data").get("global_batch"),
        "devices": state.get("world_size"),
    }
    return to_publishable(facts)


def _changes(starts: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Return setting -> [value, last step with it] of what the newest of `starts` has otherwise."""
    parts: dict[int, dict[str, Any]] = {}  # of starts after one step the last one trained
    for start in starts:
        parts[start["step"]] = get_mapping(get_mapping(start, "run"), "hyperparameters")
    changes: dict[str, list[list[Any]]] = {}
    for (_, old), (step, new) in itertools.pairwise(parts.items()):
        for name in sorted(old.keys() | new.keys() if old and new else ()):
            if old.get(name) != new.get(name):
                changes.setdefault(name, []).append([old.get(name), step])
    return changes


def _home(run: Path, config: dict[str, Any]) -> Path:
    """Return the output_dir of a run whose checkpoints (`checkpoint.root`) are in `run`."""
    home = config.get("output_dir")
    if (run / METRICS).is_file() or not isinstance(home, str):
        return run
    root = get_mapping(config, "checkpoint").get("root")
    file = beside_recorded(run, root, home) / CONFIG
    same = file.is_file() and file.read_bytes() == (run / CONFIG).read_bytes()
    return file.parent if same else run


def _state(run: Path, step: int | None) -> dict[str, Any]:
    """Return what the last checkpoint up to `step` says of itself."""
    files = sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8 + "/state.json"))
    before = [f for f in files if step is None or f.parent.name <= step_name(step)]
    return (read_object(before[-1]) if before else None) or {}
