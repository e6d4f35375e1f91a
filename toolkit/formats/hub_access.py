"""Find a model folder: on this machine, in the Hub's cache, or on the Hub."""

import functools
import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolkit import ranks
from toolkit.config.settings import check_folder
from toolkit.errors import ModelError, one_line
from toolkit.formats.hf_folder import (
    ADAPTER_FILE,
    ASSET_FILES,
    TEMPLATES,
    refuse_adapter,
    vocabulary_files,
)

_PATIENCE = 3.0  # seconds
_LONGEST_NAME = 255  # bytes, of file systems


@functools.cache
def why_unreachable() -> str:
    """Return why the Hub cannot be asked; empty where it can, or where HF_HUB_OFFLINE forbids it.
    Where it does not answer, this process uses what the cache holds from now on.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if huggingface_hub.is_offline_mode() or urllib.request.getproxies().keys() & {"https", "all"}:
        return ""  # a proxy answers for others
    url = urlsplit(constants.ENDPOINT)
    address = url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)
    try:
        with socket.create_connection(address, timeout=_PATIENCE):
            return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{address[0]} cannot be reached ({error.strerror or error})"


@functools.cache
def say_unreachable() -> None:
    """Say once, where it is so, that only what the cache holds is used."""
    if (why := why_unreachable()) and os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {why}: only what the cache holds is used", file=sys.stderr, flush=True)


def local_folder(name_or_path: str, revision: str | None = None, *, ask: bool = True) -> Path:
    """Return the folder of a checkpoint: itself, or the cached snapshot of a Hub id.

    With `ask`, config.json is downloaded where the cache has none; but not where the first part of
    the name is a folder here: a misspelt path must not become a stranger's model. ModelError where
    neither is.
    """
    from transformers.utils import cached_file

    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    check_folder(str(name_or_path))
    beside = _is_beside(path)
    local = beside or not ask or bool(why_unreachable())
    try:
        file = cached_file(name_or_path, "config.json", revision=revision, local_files_only=local)
    except OSError as error:
        if not local:  # the repository may be there, and hold an adapter
            refuse_adapter(_adapter_of_hub(name_or_path, revision), name_or_path)
        if beside and ask:
            raise ModelError(
                f"there is a folder {path.parent} here ({Path.cwd()}), and no {path.name} in it. "
                f"If a model of the Hub is meant: hf download {name_or_path}"
            ) from error
        why = why_unreachable() or str(error).strip().splitlines()[0]
        if type(error.__cause__).__name__ == "GatedRepoError":
            raise ModelError(
                f"{name_or_path} is gated on the Hub; ask for access on "
                f"https://huggingface.co/{name_or_path}, then `hf auth login`"
            ) from error
        raise ModelError(
            f"{name_or_path} is neither a folder here (current folder: {Path.cwd()}) nor a model "
            f"that the Hub gives: {why}"
        ) from error
    say_unreachable()
    return Path(str(file)).parent


def _adapter_of_hub(name: str, revision: str | None) -> Path:
    """Return the cached adapter_config.json of a repository; a path without a file: it has none."""
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        return Path(str(cached_file(name, ADAPTER_FILE, **options)))
    except OSError:  # no such repository, or the Hub fails: the caller says which
        return Path(ADAPTER_FILE, name)


def _is_beside(path: Path) -> bool:
    """Return whether a name that could be a Hub id's begins with a folder that is here."""
    return len(path.parts) == 2 and path.parent.is_dir()


def obtain_assets(name_or_path: str, revision: str | None = None) -> None:
    """Download from a Hub id what an export carries beside the weights; else only what this process
    happens to read would be in the cache. Offline, or where the Hub fails, which is said, exports
    carry what the cache has.
    """
    from huggingface_hub import is_offline_mode, snapshot_download

    path = Path(name_or_path).expanduser()
    if path.exists() or _is_beside(path):
        return
    why_unreachable()  # from here on the cache answers, at once
    wanted = ["config.json", *ASSET_FILES, f"{TEMPLATES}/*.jinja", "*.py"]
    try:
        folder = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=wanted))
        more = [name for name in vocabulary_files(folder) if not (folder / name).is_file()]
        if more:  # of the same commit
            snapshot_download(name_or_path, revision=folder.name, allow_patterns=more)
    except (OSError, ValueError) as error:  # whether there is such a model, who reads it says
        if not is_offline_mode():
            ranks.log_once(
                f"WARNING: files of {name_or_path} were not downloaded ({one_line(error)}): "
                "exports carry what the cache has"
            )


def obtain_file(folder: Path, name: str, remote: str | None, revision: str | None) -> bool:
    if len(name.encode()) > _LONGEST_NAME:
        return False
    if remote is None or (folder / name).is_file():
        return (folder / name).is_file()
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    return bool(cached_file(remote, name, **options))
