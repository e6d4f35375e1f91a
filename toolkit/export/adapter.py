"""What a PEFT folder consists of: tensors under PEFT's keys, their config, a tokenizer."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from toolkit.adapters.peft_folder import CONFIG_FILE, WEIGHTS_FILE, peft_layout, read_config
from toolkit.checkpoint.facts import base_model
from toolkit.checkpoint.sources import travels
from toolkit.errors import ExportError
from toolkit.export.plan import ExportPlan, TensorShapes, lay_out, model_of_assets, more
from toolkit.formats import ExportGroup
from toolkit.formats import read_config as read_base_config

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
    stored: TensorShapes,
    override: torch.dtype | None,
    *,
    where: str,
    base: dict[str, Any],
) -> ExportPlan:
    """Decide names, dtypes and places of a PEFT folder.

    Args:
        hf: the assets of the base with adapter_config.json beside them.
        override: dtype of all floating tensors; None: as stored.
        where: what holds the tensors `stored`, for error messages.
        base: `name_or_path` and `revision` of the base.

    Raises:
        ExportError: `stored` is not what the config describes; names the tensor.
    """
    config = read_config(hf)
    base_on_meta, assets = model_of_assets(hf)
    layout = peft_layout(base_on_meta, config)
    shapes = {name: tuple(t.shape) for name, t in layout.model.state_dict().items()}
    wanted = set(layout.keys.values())
    for kind, names in (("lacks", wanted - stored.keys()), ("also holds", stored.keys() - wanted)):
        if names:
            what = f"{kind} {min(names)}{more(names)}: the adapter is not the one of its"
            raise ExportError(f"{where} {what} {CONFIG_FILE}")
    placed = {}
    for key, name in layout.keys.items():
        dtype, shape = stored[name]
        if shape != shapes[name]:
            raise ExportError(f"{name} is {shape} in {where}, {CONFIG_FILE} says {shapes[name]}")
        placed[key] = override if override and dtype.is_floating_point else dtype, shape
    tensors, headers = lay_out(placed, math.inf, WEIGHTS_FILE)
    files = {name: content for name, content in assets.files.items() if travels(name)}
    # For inference, and with the base that it is for.
    named = {"base_model_name_or_path": base["name_or_path"], "revision": base.get("revision")}
    content = {**config, "inference_mode": True, **named}
    files[CONFIG_FILE] = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return ExportPlan(
        model=layout.base,
        stored={name: name for name in layout.keys.values()},
        groups=[ExportGroup((n,), {k: shapes[n]}, False) for k, n in layout.keys.items()],
        names={key: key for key in layout.keys},
        tensors=tensors,
        headers=headers,
        assets=files,
    )
