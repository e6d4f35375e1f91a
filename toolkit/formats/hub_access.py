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

_TIMEOUT_SECONDS = 3.0
_LONGEST_NAME = 255  # bytes, of file systems


@functools.cache
def hub_unreachable_reason() -> str:
    """Try once per process to connect to the Hub, and return why it cannot be reached.

    If it cannot be reached, the Hub client is switched to offline mode for this process. Otherwise
    it would retry for 30 s for each file. Takes up to 3 s; later calls return the first result.

    Returns:
        The reason; "" if the Hub is reachable, and also if nothing was tried because HF_HUB_OFFLINE
        or a proxy is set.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if huggingface_hub.is_offline_mode() or urllib.request.getproxies().keys() & {"https", "all"}:
        return ""  # only the proxy could be tested
    url = urlsplit(constants.ENDPOINT)
    address = url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)
    try:
        with socket.create_connection(address, timeout=_TIMEOUT_SECONDS):
            return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{address[0]} cannot be reached ({error.strerror or error})"


@functools.cache
def warn_if_hub_unreachable() -> None:
    """Print a warning to stderr on rank 0 if the Hub is unreachable; once per process.

    The first call may take 3 s, see `hub_unreachable_reason`.
    """
    if (reason := hub_unreachable_reason()) and os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {reason}: only what the cache holds is used", file=sys.stderr, flush=True)


def local_folder(name_or_path: str, revision: str | None = None, *, ask: bool = True) -> Path:
    """Return the folder of a model: `name_or_path` itself, or the cached snapshot of a Hub id.

    Args:
        name_or_path: a folder or a Hub id.
        revision: branch, tag or commit of the Hub id; None: the default branch.
        ask: download config.json if it is not in the cache. This never happens if the first part of
            the name is a local folder, because a misspelt path could match a stranger's model. If
            False, only the cache is searched.

    Raises:
        ModelError: there is neither a folder nor a model of this name, the model is gated, or it is
            an adapter.
    """
    from transformers.utils import cached_file

    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    check_folder(str(name_or_path))
    is_near = _has_local_parent(path)
    local = is_near or not ask or bool(hub_unreachable_reason())
    try:
        file = cached_file(name_or_path, "config.json", revision=revision, local_files_only=local)
    except OSError as error:
        if not local:  # the repository may exist and hold an adapter
            refuse_adapter(_download_adapter_config(name_or_path, revision), name_or_path)
        if is_near and ask:
            raise ModelError(
                f"there is a folder {path.parent} here ({Path.cwd()}), and no {path.name} in it. "
                f"If a model of the Hub is meant: hf download {name_or_path}"
            ) from error
        reason = hub_unreachable_reason() or str(error).strip().splitlines()[0]
        if type(error.__cause__).__name__ == "GatedRepoError":
            raise ModelError(
                f"{name_or_path} is gated on the Hub; ask for access on "
                f"https://huggingface.co/{name_or_path}, then `hf auth login`"
            ) from error
        raise ModelError(
            f"{name_or_path} is neither a folder here (current folder: {Path.cwd()}) nor a model "
            f"that the Hub gives: {reason}"
        ) from error
    warn_if_hub_unreachable()
    return Path(str(file)).parent


def _download_adapter_config(name: str, revision: str | None) -> Path:
    """Download the adapter_config.json of a Hub repository to the cache.

    Returns:
        Its path. If there is no such file or the Hub fails, a path that does not exist.
    """
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    try:
        return Path(str(cached_file(name, ADAPTER_FILE, **options)))
    except OSError:  # no such repository, or the Hub fails: the caller reports which
        return Path(ADAPTER_FILE, name)


def _has_local_parent(path: Path) -> bool:
    """Return True if `path` has two parts, like a Hub id, and the first is a local folder."""
    return len(path.parts) == 2 and path.parent.is_dir()


def download_assets(name_or_path: str, revision: str | None = None) -> None:
    """Download the small files of a Hub id into the cache: config, tokenizer, templates, code.

    Exports copy them. Without this call, the cache would have only the files that this process
    reads. Does nothing for a local path. A failed download raises nothing: rank 0 logs a warning,
    or nothing in offline mode.
    """
    from huggingface_hub import is_offline_mode, snapshot_download

    path = Path(name_or_path).expanduser()
    if path.exists() or _has_local_parent(path):
        return
    # If the Hub cannot be reached, the cache answers at once from here on.
    hub_unreachable_reason()
    patterns = ["config.json", *ASSET_FILES, f"{TEMPLATES}/*.jinja", "*.py"]
    try:
        folder = Path(snapshot_download(name_or_path, revision=revision, allow_patterns=patterns))
        more = [name for name in vocabulary_files(folder) if not (folder / name).is_file()]
        if more:  # of the same commit
            snapshot_download(name_or_path, revision=folder.name, allow_patterns=more)
    except (OSError, ValueError) as error:  # its reader reports a model that does not exist
        if not is_offline_mode():
            ranks.log_once(
                f"WARNING: files of {name_or_path} were not downloaded ({one_line(error)}): "
                "exports have only the files in the cache"
            )


def ensure_file(folder: Path, name: str, remote: str | None, revision: str | None) -> bool:
    """Download a file of a model folder if it is missing; return True if it exists afterwards.

    Args:
        folder: the local folder, or the cached snapshot of `remote`.
        name: name of the file.
        remote: the Hub id to download from; None: no download.
        revision: branch, tag or commit of the Hub id.
    """
    if len(name.encode()) > _LONGEST_NAME:
        return False
    if remote is None or (folder / name).is_file():
        return (folder / name).is_file()
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    return bool(cached_file(remote, name, **options))
