"""What a PEFT folder consists of: the adapter's tensors under PEFT's keys, its config, a tokenizer.

    adapter_config.json         as trained; names the base model, so that readers find it
    adapter_model.safetensors   every trained tensor, and none of the base
    tokenizer, chat template    as trained with

Owns the plan of that folder, from shapes alone; bytes, the commit of the folder and its manifest
are those of every export. Does not know where the bytes come from.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit import model_card
from toolkit.adapter_format import (
    CONFIG_FILE,
    ENTRY,
    WEIGHTS_FILE,
    is_adapter_folder,
    read_config,
    twin_of,
)
from toolkit.adapter_source import base_digest
from toolkit.commit import find_checkpoint, read_manifest
from toolkit.errors import CheckpointError, ExportError, ModelError
from toolkit.export_plan import Plan, lay_out, model_of_assets
from toolkit.hf_format import ExportGroup, local_folder, source_dtypes
from toolkit.hf_format import read_config as read_base_config
from toolkit.sources import Source, find_source
from toolkit.strided import View

# What a reader of the export may want to know of adapter_config.json.
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "modules_to_save"),
)
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


def adapter_origin(hf: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an export's manifest says of its adapter and base: settings, digest, config.

    Of a path only the last part is told.
    """
    config = read_config(hf)
    return {
        "base": {
            **model_card.base_model(entry, Path()),
            "digest": entry.get("digest"),
            **({"rows": entry["rows"]} if entry.get("rows") else {}),  # resized to
        },
        "base_config": read_base_config(hf),
        "settings": {name: config[name] for name in _SETTINGS if config.get(name)},
    }


def travels(name: str) -> bool:
    """Whether a file that is beside a model's weights goes with its adapters, too: a tokenizer
    does; generation config and code are the base's.
    """
    return name != "generation_config.json" and not name.endswith(".py")


def make_adapter_plan(
    hf: Path,
    stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    override: torch.dtype | None,
    *,
    where: str,
    base: dict[str, Any] | None = None,
) -> Plan:
    """Decide names, dtypes and places of a PEFT folder.

    Args:
        hf: the assets of the base with adapter_config.json beside them.
        stored: parameter of the adapted model -> dtype and shape of what there is.
        override: dtype of all floating tensors; None: as stored.
        where: what holds the tensors, for error messages.
        base: `name_or_path` and `revision` of the base; None: as adapter_config.json says.

    Raises:
        ExportError: `stored` is not what the config describes; names the tensor.
    """
    config = read_config(hf)
    base_model, assets = model_of_assets(hf)
    twin = twin_of(base_model, config)
    shapes = {name: tuple(t.shape) for name, t in twin.model.state_dict().items()}
    _match(twin.keys, shapes, stored, where)
    dtypes = {}
    for key, name in twin.keys.items():
        dtype = stored[name][0]
        dtypes[key] = override if override is not None and dtype.is_floating_point else dtype
    outputs, headers, sizes = lay_out(
        dtypes, {key: shapes[name] for key, name in twin.keys.items()}, None, WEIGHTS_FILE
    )
    views: dict[str, View | None] = {}
    groups = []
    for key, name in twin.keys.items():
        shape = shapes[name]
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        views[key] = View(name, shape, strides, 0)
        groups.append(ExportGroup((name,), {key: shape}, False))
    files = {name: content for name, content in assets.files.items() if travels(name)}
    files[CONFIG_FILE] = _config_file(config, base)
    return Plan(
        twin.base,
        {name: name for name in twin.keys.values()},
        {name: stored[name] for name in twin.keys.values()},
        groups,
        views,
        {key: key for key in twin.keys},
        outputs,
        headers,
        sizes,
        files,
    )


def _match(
    keys: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    where: str,
) -> None:
    wanted = set(keys.values())
    for kind, names in (("lacks", wanted - stored.keys()), ("also holds", stored.keys() - wanted)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ExportError(
                f"{where} {kind} {min(names)}{more}: the adapter is not the one that its "
                f"{CONFIG_FILE} describes"
            )
    for name in sorted(wanted):
        if stored[name][1] != shapes[name]:
            raise ExportError(
                f"{name} is {stored[name][1]} in {where}, {CONFIG_FILE} describes {shapes[name]}"
            )


def _config_file(config: dict[str, Any], base: dict[str, Any] | None) -> bytes:
    """Return adapter_config.json: as trained, for inference, with the base that it is for."""
    said: dict[str, Any] = {"inference_mode": True}
    if base is not None:
        said |= {
            "base_model_name_or_path": base["name_or_path"],
            "revision": base.get("revision"),
        }
    return (json.dumps({**config, **said}, indent=2, sort_keys=True) + "\n").encode()
