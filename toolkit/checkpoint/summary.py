"""Describe a run or a checkpoint for `toolkit inspect`, from metadata alone."""

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.commit import find_checkpoint, latest_attempts, list_attempts
from toolkit.checkpoint.names import CHECKPOINTS, STATE, step_name
from toolkit.checkpoint.run_folder import CONFIG, read_raw_config, resolve_recorded_path
from toolkit.checkpoint.store import folder_bytes, read_json_object
from toolkit.config.published import get_mapping, select_publishable_settings, to_publishable
from toolkit.formats import METADATA_FILE, read_metadata
from toolkit.formats.metrics_file import METRICS, STARTS, read_lines, read_metrics, read_versions
from toolkit.tables import format_table, group_numbered_names, size_text


def summarize(path: str | Path) -> dict[str, Any]:
    """Describe a run, a checkpoint or a plain DCP folder as JSON values.

    Reads `.metadata` and small JSON files, and the size of every file.

    Args:
        path: the run, checkpoint or folder. Of a run, the newest committed checkpoint is described.

    Returns:
        A dict with these keys:

        - `path`: the argument.
        - `checkpoints`: folder, step, committed and bytes of each checkpoint of a run, else None.
        - `checkpoint`: the folder of the checkpoint.
        - `step`, `world_size`, `global_batch_size`: as saved.
        - `saved_with`: all other plain values of state.json.
        - `adapter`: base and settings of the adapters, or None.
        - `model`: the architecture.
        - `parameters`: number of elements of the floating model tensors. Tied parameters are stored
          and counted once.
        - `bytes`: bytes of each section (model, optimizer, ...), and of all `files` on the disk.
        - `dtypes`: section -> dtype -> number of elements.
        - `tensors`: name, section, shape, dtype, bytes and chunks of each tensor.

    Raises:
        CheckpointError: `path` holds no checkpoint, or its metadata is damaged.
    """
    path = Path(path).expanduser()
    if (path / METADATA_FILE).is_file():
        checkpoint, dcp, runs = path, path, None
    else:
        checkpoint = find_checkpoint(path)
        dcp, runs = checkpoint / "dcp", None if checkpoint == path else _list_checkpoints(path)
    tensors = [
        _describe_tensor(name, entry)
        for name, entry in read_metadata(dcp).state_dict_metadata.items()
        if hasattr(entry, "properties")
    ]
    # Numbers in names are sorted by value: layer 2 comes before layer 10.
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
    state = read_json_object(checkpoint / STATE) or {}
    config = read_json_object(checkpoint / "hf" / "config.json") or {}
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
        "bytes": {**sections, "files": folder_bytes(checkpoint)},
        "dtypes": {section: dict(elements) for section, elements in dtypes.items() if elements},
        "tensors": tensors,
    }


def format_summary(summary: dict[str, Any]) -> str:
    """Format the result of `summarize` as text: checkpoints, totals, and a table of tensors.

    Names that differ in numbers only, with equal shape, dtype and chunks, share a line, such as
    `model.layers.{0..31}.mlp.up_proj.weight`.
    """
    lines = []
    if summary["checkpoints"] is not None:
        lines.append(f"run         {summary['path']}")
        status = {True: "committed", False: "NOT COMMITTED"}
        checkpoints = [(c["folder"], c["bytes"], c["committed"]) for c in summary["checkpoints"]]
        rows = [
            [f"  {name}", size_text(size), status[committed]]
            for name, size, committed in checkpoints
        ]
        lines += format_table(rows, right={1})
    lines.append(f"checkpoint  {summary['checkpoint']}")
    facts = [
        ("architecture", summary["model"]),
        *_adapter_facts(summary["adapter"]),
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
    lines += [*format_table(rows, right=set()), ""]
    head = ["tensor", "tensors", "shape", "dtype", "bytes", "chunks"]
    return "\n".join(
        [*lines, *format_table([head, *_format_tensor_rows(summary["tensors"])], right={1, 4})]
    )


def _list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Describe each checkpoint folder of a run: `folder`, `step`, `committed` and `bytes`.

    `committed` is True only for the valid checkpoint of a step.
    """
    attempts = list_attempts(run)
    valid = latest_attempts(attempts).values()
    return [
        {
            "folder": a.folder.name,
            "step": a.step,
            "committed": a in valid,
            "bytes": folder_bytes(a.folder),
        }
        for a in sorted(attempts, key=lambda a: a.folder.name)
    ]


def _describe_tensor(name: str, entry: Any) -> dict[str, Any]:
    """Build one tensor's entry in `tensors` of `summarize`; `entry` is its DCP metadata."""
    shape, dtype = list(entry.size), entry.properties.dtype
    return {
        "name": name,
        "section": name.partition(".")[0],
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": math.prod(shape) * dtype.itemsize,
        "chunks": sum(math.prod(chunk.sizes) > 0 for chunk in entry.chunks),
    }


def _format_tensor_rows(tensors: list[dict[str, Any]]) -> list[list[str]]:
    """Format table rows (name, number of tensors, shape, dtype, bytes, chunks) for tensors.

    Tensors whose names differ only in numbers share a row.
    """
    facts = [(str(t["shape"]), t["dtype"], str(t["chunks"])) for t in tensors]
    rows = []
    for name, indices in group_numbered_names([t["name"] for t in tensors], facts):
        shape, dtype, chunks = facts[indices[0]]
        size = size_text(sum(tensors[i]["bytes"] for i in indices))
        rows.append([name, str(len(indices)), shape, dtype, size, chunks])
    return rows


def _adapter_facts(entry: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Format (label, text) pairs that describe adapters and their base model.

    `entry` is the adapter's entry in state.json; without one, the list is empty.
    """
    if not isinstance(entry, dict):
        return []
    config = get_mapping(entry, "config")
    kind = "DoRA" if config.get("use_dora") else "rsLoRA" if config.get("use_rslora") else "LoRA"
    revision = f" at {entry['revision']}" if entry.get("revision") else ""
    return [
        ("adapters", f"{kind} of rank {config.get('r')}, alpha {config.get('lora_alpha')}"),
        ("base", f"{entry.get('name_or_path')}{revision}"),
    ]


def collect_run_facts(run_dir: str | Path, step: int | None = None) -> dict[str, Any]:
    """Collect the facts of a run for model cards and exports, as plain JSON values.

    Secrets are removed, and only the last part of a path is kept.

    Args:
        run_dir: the run directory, or its `checkpoint.root`.
        step: ignore everything after this step; None uses the entire run.

    Returns:
        {} if the folder has no config and no metrics. Otherwise the publishable settings of the
        start that trained `step`, and these keys:

        - `changes`: setting -> [[value, last step], ...] for values of earlier starts.
        - `metrics`: the last value of each metric; `logged_at`: metric -> step of that value.
        - `versions`: package versions of the last start, or of this process if none is recorded.
        - `steps`, `tokens`, `global_batch` (in samples) and `devices`.
    """
    run = Path(run_dir)
    config = read_raw_config(run)
    home = _find_output_dir(run, config)
    lines = [x for x in read_metrics(home) if step is None or x["step"] <= step]
    starts = [x for x in read_lines(home / STARTS) if step is None or x["step"] < step]
    if not config and not lines:
        return {}
    # The last evaluation may be of an earlier line than the last loss.
    final = {key: (value, line["step"]) for line in lines for key, value in line.items()}
    logged = {
        key: value_and_step
        for key, value_and_step in final.items()
        if key not in ("step", "tokens")
    }
    state, last = _read_last_state(run, step), lines[-1]["step"] if lines else None
    steps = last if step is None else step
    of_state = state if state.get("step") == steps else {}
    of_line = lines[-1] if last == steps and lines else {}
    decided = get_mapping(starts[-1], "run") if starts else {}
    if not all(get_mapping(decided, part) for part in ("base_model", "data", "hyperparameters")):
        decided = {}  # written by an earlier version, or damaged
    facts = {
        **(decided or select_publishable_settings(config, run)),
        "changes": _setting_changes(starts),
        "metrics": {key: value for key, (value, _) in logged.items()},
        "logged_at": {key: at for key, (_, at) in logged.items()},
        # The machine that trained need not be the one that exports.
        "versions": get_mapping(starts[-1], "versions") if starts else read_versions(),
        "steps": steps,
        "tokens": of_state.get("tokens", of_line.get("tokens")),
        "global_batch": get_mapping(state, "data").get("global_batch"),
        "devices": state.get("world_size"),
    }
    return to_publishable(facts)


def _setting_changes(starts: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """List the earlier values of settings that later starts of a run changed.

    Args:
        starts: the lines that each start recorded, with its settings and first step.

    Returns:
        Setting -> [[earlier value, last step with it], ...].
    """
    # If several starts began after the same step, the last one trained.
    parts: dict[int, dict[str, Any]] = {}
    for start in starts:
        parts[start["step"]] = get_mapping(get_mapping(start, "run"), "hyperparameters")
    changes: dict[str, list[list[Any]]] = {}
    for (_, old), (step, new) in itertools.pairwise(parts.items()):
        for name in sorted(old.keys() | new.keys() if old and new else ()):
            if old.get(name) != new.get(name):
                changes.setdefault(name, []).append([old.get(name), step])
    return changes


def _find_output_dir(run: Path, config: dict[str, Any]) -> Path:
    """Return the output_dir of a run.

    If `run` is its `checkpoint.root`, output_dir is found through `config`. If that fails, or `run`
    has metrics, `run` is returned.
    """
    home = config.get("output_dir")
    if (run / METRICS).is_file() or not isinstance(home, str):
        return run
    root = get_mapping(config, "checkpoint").get("root")
    file = resolve_recorded_path(run, root, home) / CONFIG
    same = file.is_file() and file.read_bytes() == (run / CONFIG).read_bytes()
    return file.parent if same else run


def _read_last_state(run: Path, step: int | None) -> dict[str, Any]:
    """Read state.json of the last checkpoint up to and including `step`; None: of the last one.

    Returns {} if there is no such checkpoint.
    """
    files = sorted((run / CHECKPOINTS).glob("step-" + "[0-9]" * 8 + "/state.json"))
    before = [f for f in files if step is None or f.parent.name <= step_name(step)]
    return (read_json_object(before[-1]) if before else None) or {}
