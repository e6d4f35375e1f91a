"""Where the adapter of a checkpoint is, and the base model it belongs to."""

import os
from pathlib import Path
from typing import Any

from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import ENTRY, is_adapter_folder
from toolkit.checkpoint.commit import find_checkpoint, read_manifest
from toolkit.checkpoint.sources import Source, find_source
from toolkit.errors import CheckpointError, ExportError, ModelError
from toolkit.formats import local_folder, source_dtypes
from toolkit.formats import read_config as read_base_config

_OF_A_SAVE = {"vocab_size", "transformers_version", "torch_dtype", "dtype", "_name_or_path"}


def find_adapter(checkpoint: str | Path) -> Source | None:
    """Return where the adapter of a checkpoint is; None where the checkpoint holds no adapter.

    Reads metadata only, as `find_source` does.

    Args:
        checkpoint: a run (its newest committed checkpoint) or a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    path = Path(checkpoint).expanduser()
    try:
        folder = find_checkpoint(path)
    except CheckpointError:
        return None  # another tool's, or none: `find_source` says
    return find_source(folder) if is_adapter_folder(folder / "hf") else None


def base_entry(source: Source) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the base that was adapted.

    Raises:
        CheckpointError: nothing.
    """
    entry = read_manifest(source.checkpoint).get(ENTRY) if source.checkpoint else None
    if not isinstance(entry, dict) or not isinstance(entry.get("name_or_path"), str):
        raise CheckpointError(
            f"{source.checkpoint or source.folder} does not say which base model its adapter is "
            f"for ({ENTRY!r} in its manifest)"
        )
    return entry


def find_base(source: Source, elsewhere: str | Path | None = None) -> Path:
    """Return the folder of the base that the adapter of a checkpoint was trained on.

    Args:
        elsewhere: folder or Hub id; None: where the run had it.

    Raises:
        ExportError: it is not there, or is another one.
    """
    entry = base_entry(source)
    if str(entry.get("digest")).startswith("random"):
        raise ExportError(
            f"the base of {source.checkpoint} was drawn at random ({entry['digest']}) and is in no "
            "folder: there is nothing that the adapter could be put on again"
        )
    given = str(elsewhere) if elsewhere is not None else entry["name_or_path"]
    revision = None if elsewhere is not None else entry.get("revision")
    try:
        folder = local_folder(given, revision)
    except ModelError as error:
        raise ExportError(
            f"the base of this adapter is not found: {error}; give its folder or Hub id with "
            "--hf_assets"
        ) from error
    if (digest := base_digest(folder, given, revision)) != entry.get("digest"):
        raise ExportError(
            f"{folder} is not the base that the adapter of {source.checkpoint} was trained on: its "
            f"weights have the digest {digest}, the checkpoint says {entry.get('digest')}. Give "
            "the folder or Hub id of that one with --hf_assets"
        )
    return folder


def named_base(source: Source, elsewhere: str | Path | None = None) -> dict[str, Any]:
    """Return the base as an exported adapter names it: as the run did, or `elsewhere`.

    A folder's weights are read and compared. Of a Hub id whose weights are not here only the config
    is: a name is no reason to download them. `toolkit verify --logits` reads them.

    Raises:
        ExportError: `elsewhere` is not found here, or is another base.
    """
    entry = base_entry(source)
    if elsewhere is None:
        return entry
    given = str(elsewhere)
    try:
        folder = local_folder(given)
    except ModelError as error:
        raise ExportError(f"the base of this adapter is not found: {error}") from error
    if is_here := os.path.isdir(os.path.expanduser(given)):
        given = os.path.abspath(folder)
    if is_here or source_dtypes(folder) is not None:
        find_base(source, folder)
    else:
        _compare_configs(read_base_config(source.hf), read_base_config(folder), given)
    return {**entry, "name_or_path": given, "revision": None}


def _compare_configs(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    """Refuse a base whose config describes another model, but for what a save changes of it."""
    for key in sorted((ours.keys() & theirs.keys()) - _OF_A_SAVE):
        if ours[key] != theirs[key]:
            raise ExportError(
                f"{name} is not the base that the adapter was trained on: its config has {key} "
                f"{theirs[key]!r}, the checkpoint's {ours[key]!r}"
            )


def travels(name: str) -> bool:
    """Whether a file that is beside a model's weights goes with its adapters, too: a tokenizer
    does; generation config and code are the base's.
    """
    return name != "generation_config.json" and not name.endswith(".py")
