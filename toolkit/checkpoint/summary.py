"""Describe a run or a checkpoint for `toolkit inspect`, from metadata alone."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.commit import STATE, attempts_of, counting, find_checkpoint
from toolkit.checkpoint.store import bytes_below, read_object
from toolkit.config.published import get_mapping
from toolkit.formats import METADATA_FILE, read_metadata
from toolkit.tables import fold, size_text, table


def summarise(path: str | Path) -> dict[str, Any]:
    """Return what a run, a checkpoint or a plain DCP folder holds, ready for JSON.

    Keys: `path`; `checkpoints` (of a run: folder, step, committed, bytes), else None; of the newest
    committed one, or the one given: `checkpoint` (its folder), `step`, `world_size`,
    `global_batch_size`, `saved_with` (the rest of state.json's plain values), `adapter` (of
    adapters: their base and settings, else None), `model`
    (architecture), `parameters` (elements of the floating model tensors; tied ones are stored, and
    counted, once), `bytes` (by section: model, optimizer, ..., and `files`: all that is on the
    disk), `dtypes` (section -> dtype -> elements) and `tensors` (name, section, shape, dtype,
    bytes, chunks).

    Costs one read of `.metadata` and one stat a file. CheckpointError: nothing of the kind is
    there, or its metadata is damaged.
    """
    path = Path(path).expanduser()
    if (path / METADATA_FILE).is_file():
        checkpoint, dcp, runs = path, path, None
    else:
        checkpoint = find_checkpoint(path)
        dcp, runs = checkpoint / "dcp", None if checkpoint == path else _checkpoints(path)
    tensors = [
        _tensor(name, entry)
        for name, entry in read_metadata(dcp).state_dict_metadata.items()
        if hasattr(entry, "properties")
    ]
    # Numbers in names by their value: layer 2 before layer 10.
    tensors.sort(
        key=lambda t: [
            (not n.isdigit(), int(n) if n.isdigit() else n) for n in t["name"].split(".")
        ]
    )
    sections: dict[str, int] = defaultdict(int)
    dtypes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for tensor in tensors:
        sections[tensor["section"]] += tensor["bytes"]
        dtypes[tensor["section"]][tensor["dtype"]] += math.prod(tensor["shape"])
    state = read_object(checkpoint / STATE) or {}
    config = read_object(checkpoint / "hf" / "config.json") or {}
    plain = {k: v for k, v in state.items() if isinstance(v, str | int | float) or v is None}
    step, world_size = plain.pop("step", None), plain.pop("world_size", None)
    batch = get_mapping(state, "data").get("global_batch")
    names = config.get("architectures")
    model = names[0] if isinstance(names, list) and names else config.get("model_type")
    return {
        "path": str(path),
        "checkpoints": runs,
        "checkpoint": str(checkpoint),
        "step": step,
        "world_size": world_size,
        "global_batch_size": plain.pop("global_batch_size", batch),
        "saved_with": plain,
        "adapter": state.get("adapter"),
        "model": model if isinstance(model, str) else None,
        "parameters": sum(
            n for dtype, n in dtypes["model"].items() if getattr(torch, dtype).is_floating_point
        ),
        "bytes": {**sections, "files": bytes_below(checkpoint)},
        "dtypes": {section: dict(found) for section, found in dtypes.items() if found},
        "tensors": tensors,
    }


def render(summary: dict[str, Any]) -> str:
    """Return the summary as text: checkpoints, totals, and one line for tensors that are alike.

    Names that differ in numbers only, with equal shape, dtype and chunks, share a line:
    `model.layers.{0..31}.mlp.up_proj.weight`.
    """
    lines = []
    if summary["checkpoints"] is not None:
        lines.append(f"run         {summary['path']}")
        said = {True: "committed", False: "NOT COMMITTED"}
        found = [(c["folder"], c["bytes"], c["committed"]) for c in summary["checkpoints"]]
        rows = [[f"  {name}", size_text(size), said[whole]] for name, size, whole in found]
        lines += table(rows, right={1})
    lines.append(f"checkpoint  {summary['checkpoint']}")
    facts = [
        ("architecture", summary["model"]),
        *_adapter(summary["adapter"]),
        ("step", summary["step"]),
        ("saved by ranks", summary["world_size"]),
        ("global batch", summary["global_batch_size"]),
        *summary["saved_with"].items(),
        ("parameters", f"{summary['parameters']:,}"),
    ]
    rows = [[f"  {name}", str(value)] for name, value in facts if value is not None]
    for section, elements in summary["dtypes"].items():
        kinds = ", ".join(f"{dtype} {count:,}" for dtype, count in sorted(elements.items()))
        rows.append([f"  {section}", f"{size_text(summary['bytes'][section])} ({kinds})"])
    rows.append(["  all files", size_text(summary["bytes"]["files"])])
    lines += [*table(rows, right=set()), ""]
    head = ["tensor", "tensors", "shape", "dtype", "bytes", "chunks"]
    return "\n".join([*lines, *table([head, *_grouped(summary["tensors"])], right={1, 4})])


def _checkpoints(run: Path) -> list[dict[str, Any]]:
    attempts = attempts_of(run)
    counted = counting(attempts).values()
    return [
        {
            "folder": a.folder.name,
            "step": a.step,
            "committed": a in counted,
            "bytes": bytes_below(a.folder),
        }
        for a in sorted(attempts, key=lambda a: a.folder.name)
    ]


def _tensor(name: str, entry: Any) -> dict[str, Any]:
    shape, dtype = list(entry.size), entry.properties.dtype
    return {
        "name": name,
        "section": name.partition(".")[0],
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": math.prod(shape) * dtype.itemsize,
        "chunks": sum(math.prod(chunk.sizes) > 0 for chunk in entry.chunks),
    }


def _grouped(tensors: list[dict[str, Any]]) -> list[list[str]]:
    facts = [(str(t["shape"]), t["dtype"], str(t["chunks"])) for t in tensors]
    rows = []
    for name, indices in fold([t["name"] for t in tensors], facts):
        shape, dtype, chunks = facts[indices[0]]
        size = size_text(sum(tensors[i]["bytes"] for i in indices))
        rows.append([name, str(len(indices)), shape, dtype, size, chunks])
    return rows


def _adapter(entry: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return what a line says of adapters, and which base they are for."""
    if not isinstance(entry, dict):
        return []
    config = get_mapping(entry, "config")
    kind = "DoRA" if config.get("use_dora") else "rsLoRA" if config.get("use_rslora") else "LoRA"
    revision = f" at {entry['revision']}" if entry.get("revision") else ""
    return [
        ("adapters", f"{kind} of rank {config.get('r')}, alpha {config.get('lora_alpha')}"),
        ("base", f"{entry.get('name_or_path')}{revision}"),
    ]
