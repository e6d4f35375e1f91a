"""What a PEFT folder consists of: the adapter's tensors under PEFT's keys, its config, a tokenizer.

    adapter_config.json         as trained; names the base model, so that readers find it
    adapter_model.safetensors   every trained tensor, and none of the base
    tokenizer, chat template    as trained with

Owns the plan of that folder, from shapes alone; bytes, the commit of the folder and its manifest
are those of every export. Does not know where the bytes come from.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.adapters.peft_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    peft_layout,
    read_config,
)
from toolkit.checkpoint.adapter import travels
from toolkit.checkpoint.facts import base_model
from toolkit.errors import ExportError
from toolkit.export.plan import Plan, lay_out, model_of_assets
from toolkit.export.strided import View
from toolkit.formats.hf_folder import ExportGroup
from toolkit.formats.hf_folder import read_config as read_base_config

# What a reader of the export may want to know of adapter_config.json.
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "modules_to_save"),
)


def adapter_origin(hf: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return what an export's manifest says of its adapter and base: settings, digest, config.

    Of a path only the last part is told.
    """
    config = read_config(hf)
    return {
        "base": {
            **base_model(entry, Path()),
            "digest": entry.get("digest"),
            **({"rows": entry["rows"]} if entry.get("rows") else {}),  # resized to
        },
        "base_config": read_base_config(hf),
        "settings": {name: config[name] for name in _SETTINGS if config.get(name)},
    }


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
    twin = peft_layout(base_model, config)
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
