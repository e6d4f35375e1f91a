"""Shapes of well-known models, as in their config.json on the Hub: for plans without access to it.

`published.json` holds the settings that determine shapes, positions and windows, and the number of
parameters that each model was published with. Tied parameters count once; of Llama 4 only those of
its text model count.
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
    """Return the shapes of well-known models, by Hub id. Cached.

    Each value is a dict with `config`, the content of config.json, and `parameters`, their number.
    """
    content = json.loads(_FILE.read_text("utf-8"))
    models = content["models"]
    tuned = {name: models[base] for name, base in content["same_shape"].items()}
    return models | tuned


def with_known_shape(cfg: Any) -> tuple[Any, str]:
    """Use the toolkit's own config.json of a well-known model if the Hub's cannot be read.

    Returns:
        (settings, note). If the toolkit's copy is used, the model or its teacher is a temporary
        folder, and the note says so. Otherwise `cfg` and an empty note are returned.
    """
    copied = list[str]()
    for role, model in {"model": cfg.model, **cfg.frozen_models}.items():
        name = model.name_or_path
        if name not in published():
            continue
        try:
            formats.local_folder(name, model.revision)
        except ModelError:
            folder = str(_temporary_folder(name))
            local = dataclasses.replace(model, name_or_path=folder, revision=None)
            cfg = dataclasses.replace(cfg, **{role: local})
            copied.append(name)
    if not copied:
        return cfg, ""
    names = " and ".join(copied)
    return cfg, f"config.json of {names} cannot be read here; the plan uses the toolkit's own copy"


# Folders that exist until this process ends.
_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _temporary_folder(name: str) -> Path:
    """Create a folder with config.json of a well-known model. Cached.

    The folder exists until the process ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="toolkit-shape-")
    _temporary_folders.append(folder)
    return write_shape(name, Path(folder.name))


def write_shape(name: str, folder: Path) -> Path:
    """Write config.json of a well-known model to `folder / name`, and return that folder."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(published()[name]["config"]), encoding="utf-8")
    return target
