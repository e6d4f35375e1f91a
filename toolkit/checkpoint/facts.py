"""The facts of a run that its export and its model card tell.

Owns which of them are told: no secret, no path of a machine. Reads the run's own files.
"""

import importlib.metadata
import math
import platform
import re
from pathlib import Path
from typing import Any

import yaml

from toolkit import __version__
from toolkit.checkpoint.run_dir import CONFIG
from toolkit.redact import without_secrets
from toolkit.training.metrics import METRICS, read_metrics

CURVE_POINTS = 200


_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets", "peft")


_SECTIONS = ("model", "sharding", "data", "optim", "train", "lora", "seed")


# Settings that may hold a path, or words of the user's own: told elsewhere, or not at all.
_PATHS = (
    *("name_or_path", "tokenizer_name_or_path", "train_files", "eval_files", "dataset_name"),
    *("sources", "chat_template", "eval_prompts"),
)


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _home(run: Path) -> Path:
    """Return the output_dir of a run whose checkpoints (`checkpoint.root`) are in `run`: the
    metrics are there.
    """
    home = _read_config(run / CONFIG).get("output_dir")
    if (run / METRICS).is_file() or not isinstance(home, str):
        return run
    there = Path(home, CONFIG)
    same = there.is_file() and there.read_bytes() == (run / CONFIG).read_bytes()
    return Path(home) if same else run


def run_facts(run_dir: str | Path, step: int | None = None) -> dict[str, Any]:
    """Return what a model card tells of a run, as plain JSON values; {} where there is no run.

    Secrets are removed, and of paths only the last part is told. Reads `config.yaml` and
    `metrics.jsonl`; milliseconds.

    Args:
        run_dir: the run directory.
        step: of the checkpoint that is exported; what the run logged later is left out.

    Returns:
        `base_model` {name, hub_id, revision, init, license}, `data` {name: ...},
        `hyperparameters` {dotted setting: value}, `metrics` (the last line's values, and the last
        evaluation's), `curve` {"loss": [[step, loss], ...] (at most 200), "eval_loss": ...},
        `versions`, `steps`, `tokens`.
    """
    run = Path(run_dir)
    config = _read_config(run / CONFIG)
    lines = [x for x in read_metrics(_home(run)) if step is None or x.get("step", 0) <= step]
    if not config and not lines:
        return {}
    final: dict[str, Any] = {}
    for line in lines:  # the last evaluation may be of an earlier line than the last loss
        final |= line
    facts = {
        "base_model": base_model(config.get("model") or {}, run),
        "data": _data(config.get("data") or {}, finetuned="lora" in config),
        "hyperparameters": _settings(config),
        "metrics": {k: v for k, v in final.items() if k not in ("step", "tokens")},
        "curve": {
            "loss": _thinned([[x["step"], x["loss"]] for x in lines if "loss" in x]),
            "eval_loss": _thinned([[x["step"], x["eval_loss"]] for x in lines if "eval_loss" in x]),
        },
        "versions": versions(),
        "steps": final.get("step"),
        "tokens": final.get("tokens"),
    }
    return _plain(without_secrets(facts))


def versions() -> dict[str, str]:
    """Return the versions of the toolkit, of Python and of the libraries that made the export."""
    found = {"toolkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # not every start needs all of them
            continue
    return found


def _read_config(file: Path) -> dict[str, Any]:
    """Return the run's settings, read as they stand: any recipe's, of any version."""
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):  # a broken one does not stop an export: no facts
        return {}
    return content if isinstance(content, dict) else {}


def base_model(model: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return what is told of a base model: `name`, `hub_id`, `revision`, `init` and `license`.

    Args:
        model: `name_or_path`, `revision` and `init`; of a path only the last part is told.
        run: the run directory, beside which a relative path may lie.
    """
    given = str(model.get("name_or_path") or "")
    local = is_path(given, run)
    return {
        "name": _last_part(given) if local else given,
        "hub_id": None if local else given,
        "revision": model.get("revision"),
        "init": model.get("init", "pretrained"),
        "license": _license(Path(given).expanduser()) if local else None,
    }


def is_path(given: str, run: Path = Path()) -> bool:
    """Whether a model's name is a path: a Hub id is `name` or `org/name`, and no folder here or
    beside the run.
    """
    if not _HUB_ID.fullmatch(given) or ".." in given:
        return True
    return any((folder / given).exists() for folder in (Path(), *run.absolute().parents))


def _license(folder: Path) -> str | None:
    """Return the license that the base model's own card names."""
    front = front_matter(folder / "README.md")
    return front["license"] if isinstance(front.get("license"), str) else None


def front_matter(card: Path) -> dict[str, Any]:
    """Return the YAML that a model card begins with, {} where there is none that can be read."""
    try:
        text = card.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    try:
        front = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}


def _data(data: dict[str, Any], *, finetuned: bool) -> dict[str, Any]:
    """Return what is told of the data; `finetuned`: by the recipe whose own data are instructions.

    Of the files of a source only the last part of their paths is told.
    """
    found = {"train_files": _names(data.get("train_files")), **_dataset(data)}
    found["eval_files"] = _names(data.get("eval_files"))
    if sources := data.get("sources"):
        found["sources"] = [
            {"files": _names(s.get("files")), **_dataset(s), "weight": s.get("weight")}
            for s in (sources if isinstance(sources, list) else [])
            if isinstance(s, dict)
        ]
    elif not found["train_files"] and "dataset_name" not in found:
        what = "instructions and answers made of" if finetuned else "the source of"
        found["built_in"] = f"{what} Python's standard library"
    found["sequence_length"] = data.get("sequence_length")
    return found


def _names(files: Any) -> list[str]:
    listed = [files] if isinstance(files, str) else list(files or [])
    return [_last_part(str(file)) for file in listed]


def _dataset(data: dict[str, Any]) -> dict[str, Any]:
    name = data.get("dataset_name")
    if not name:
        return {}
    hub = bool(_HUB_ID.fullmatch(str(name))) and not Path(str(name)).exists()
    return {
        "dataset_name": str(name) if hub else _last_part(str(name)),
        "dataset_is_on_the_hub": hub,
        "dataset_config_name": data.get("dataset_config_name"),
        "dataset_split": data.get("dataset_split"),
    }


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return dotted name -> value of the settings that shaped the weights, paths left out."""
    found: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if prefix.rpartition(".")[2] in _PATHS:
            return
        if isinstance(value, dict) and prefix.count(".") < 1:
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        else:
            found[prefix] = value

    for section in _SECTIONS:
        if section in config:
            walk(section, config[section])
    return found


def _last_part(path: str) -> str:
    """Return the last part of a path or an address: where it lies is nobody's business."""
    return re.split(r"[\\/]", path.split("?")[0].rstrip("/\\"))[-1]


def _thinned(points: list[list[Any]]) -> list[list[Any]]:
    """Return at most `CURVE_POINTS` of the points, evenly chosen, the first and last among them."""
    if len(points) <= CURVE_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (CURVE_POINTS - 1))] for i in range(CURVE_POINTS)]


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: numbers that are not finite become null, others text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
