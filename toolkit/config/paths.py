"""Paths of settings, as far as they are known without reading what lies there."""

from pathlib import Path

from toolkit.errors import ModelError


def check_folder(name_or_path: str) -> None:
    """Refuse a model's path where no folder is (ModelError); what may be a Hub id passes."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return
    if path.exists():
        raise ModelError(f"model.name_or_path {path} is a file; give the folder that holds it")
    if path.is_absolute() or name_or_path.startswith("."):  # no Hub id
        raise ModelError(f"there is no folder {name_or_path} (current folder: {Path.cwd()})")
