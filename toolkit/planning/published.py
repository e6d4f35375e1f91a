"""Shapes of well-known models, as their config.json on the Hub has them: for plans without access.

`published.json` holds what shapes, positions and windows follow from, and the number of parameters
that each was published with (tied ones once; of Llama 4 those of its class for text).
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from toolkit import formats
from toolkit.errors import ModelError

_FILE = Path(__file__).with_name("published.json")


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return name -> `config` and `parameters` of each model, tuned ones under their own names."""
    content = json.loads(_FILE.read_text("utf-8"))
    models, same = content["models"], content["same_shape"]
    return models | {name: models[base] for name, base in same.items()}


def with_known_shape(cfg: Any) -> tuple[Any, str]:
    """Return the config of a run to be planned, and a note where its model is one whose config.json
    the Hub does not give: its folder is then one with the shape that came with the toolkit.
    """
    name = cfg.model.name_or_path
    if name not in published():
        return cfg, ""
    try:
        formats.local_folder(name, cfg.model.revision)
        return cfg, ""
    except ModelError:
        folder = _folder_of(name)
    model = dataclasses.replace(cfg.model, name_or_path=str(folder), revision=None)
    note = f"config.json of {name} cannot be read here; the plan uses the toolkit's own copy of it"
    return dataclasses.replace(cfg, model=model), note


@functools.cache
def _folder_of(name: str) -> Path:
    scratch = tempfile.TemporaryDirectory(prefix="toolkit-shape-")
    _kept.append(scratch)  # to the end of this process
    return write_shape(name, Path(scratch.name))


_kept: list[tempfile.TemporaryDirectory[str]] = []


def write_shape(name: str, folder: Path) -> Path:
    """Write config.json of the model `name` below `folder`; return where it lies."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(published()[name]["config"]), encoding="utf-8")
    return target
