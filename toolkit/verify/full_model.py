"""Verify a Hugging Face folder with all weights of a model, also one with an adapter merged in."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit import formats
from toolkit.checkpoint.carried import CarriedTensor, find_carried_tensors
from toolkit.checkpoint.sources import Source
from toolkit.errors import ExportError, ModelError, ToolkitError
from toolkit.loading import find_load_problems, plan_load_groups
from toolkit.models import model_on_meta, tied_names
from toolkit.verify.export import FILE_CHECKS, Checks, Export, check_dtypes, compare_files
from toolkit.verify.logits import (
    compute_logits,
    copy_unsaved_buffers,
    load_adapted_model,
    load_checkpoint_model,
    load_export,
    rounding_tolerance,
)
from toolkit.verify.proof import Expected, MergeProof, Proof, mask_differences

_WRAPPERS = re.compile(r"FSDP|FullyShard|DistributedDataParallel|OptimizedModule|PeftModel|Wrapped")
_DTYPE_KEYS = ("dtype", "torch_dtype")


def read_model(export: Export) -> None:
    """Read config.json and build its model on meta as `export.model`; problems become findings.

    Also compares class names, code files and dtypes that the config declares. Does nothing if
    `export.is_damaged`.
    """
    if export.is_damaged:
        return
    try:
        config = formats.read_config(export.folder)
        architectures = config.get("architectures") or []
        for name in filter(_WRAPPERS.search, architectures):
            export.add("config.json", None, f"architectures names {name}, a wrapper of training")
        for file in _list_code_files(config.get("auto_map")):
            if not (export.folder / file).is_file():
                export.add("config.json", None, f"auto_map names {file}, which is missing")
        model = export.model = model_on_meta(export.folder)
    except (ToolkitError, OSError) as error:
        export.add("config.json", None, str(error))
        return
    name, whole = type(model).__name__, formats.assets_of(model).whole
    names = {name} if whole is None else {name, whole[0].__name__}
    if not names.intersection(architectures):
        export.add("config.json", None, f"architectures is {architectures}, without {name}")
    # A reader casts to the config's dtype, so it must be the one that was requested.
    check_dtypes(export)
    dtype, requested = _read_config_dtype(config), export.requested_dtype
    if requested not in (None, dtype) and export.entries:
        problem = f"dtype is {dtype}, the export was requested in {requested}"
        export.add("config.json", None, problem)


def check_parameters(export: Export) -> None:
    """Compare names and shapes of the tensors with the model, as transformers would load them.

    Differences are findings. Sets `export.groups`, and `export.carried`: the tensors that no
    parameter uses. Does nothing if model or tensors could not be read.
    """
    model = export.model
    if model is None or not export.entries:
        return
    state = model.state_dict()
    faults = {
        name: f"has shape {list(entry.shape)}, config.json describes {list(state[name].shape)}"
        for name, entry in export.entries.items()
        if name in state and tuple(state[name].shape) != entry.shape
    }
    for kind, names in find_load_problems(model, export.entries).items():
        for name in names:
            faults.setdefault(name.partition(" (")[0], f"is {kind}: {name}")
    file_of = {name: entry.file.name for name, entry in export.entries.items()}
    where = min(file_of.values()) if len({*file_of.values()}) == 1 else formats.INDEX_FILE
    for name, fault in faults.items():
        export.add(file_of.get(name, where), name, fault)
    carried = set(formats.group_source_keys(model, export.entries).carried)
    groups = plan_load_groups(model, export.entries)
    export.groups = [group for group in groups if not carried.intersection(group.keys)]
    export.carried = {name: export.entries[name] for name in carried}
    _check_stored_once(export, model)


def _check_stored_once(export: Export, model: PreTrainedModel) -> None:
    """Add a finding for each parameter that is stored twice, under several names of tied weights.

    Two equal copies are accepted if the manifest lists the second name in `stored_twice`.
    """
    stored_twice = export.origin.get("stored_twice") or ()
    first_name = tied_names(model)
    stored: dict[str, formats.StoredTensor] = {}
    for group in export.groups:
        key = group.keys[0]
        entry = export.entries[key]
        parameter = first_name.get(group.parameter, group.parameter)
        other = stored.setdefault(parameter, entry)
        if other is entry:
            continue
        problem = f"is {parameter}, which is stored twice"
        is_unequal = (other.shape, other.dtype) != (entry.shape, entry.dtype)
        if is_unequal or formats.first_difference(other, entry)[0]:
            export.add(entry.file.name, key, f"{problem}, and the two differ")
        elif key not in stored_twice:
            export.add(entry.file.name, key, problem)


def compare_assets(export: Export) -> None:
    """Compare config, tokenizer and code with the checkpoint's; differences are findings.

    In the config, only the dtype may change, to that of the weights.
    """
    source = _require_source(export)
    compare_files(export, source)
    try:
        before = formats.read_config(source.hf)
        now = formats.read_config(export.folder)
    except ModelError as error:
        export.add("config.json", None, f"cannot be compared: {error}")
        return
    ignored = {*_DTYPE_KEYS}
    if (before.get("architectures") or ["Model"])[0].endswith("Model"):
        ignored.add("architectures")  # a model without a head that was trained with one
    for key in sorted({**before, **now}.keys() - ignored):
        old, new = _drop_dtype(before.get(key)), _drop_dtype(now.get(key))
        if old != new:
            problem = f"was {old!r}, is {new!r}" if key in before else "was not there before"
            export.add("config.json", None, f"{key} {problem}")
    stored_dtypes = {str(e.dtype).removeprefix("torch.") for e in export.entries.values()}
    old_dtype, new_dtype = _read_config_dtype(before), _read_config_dtype(now)
    # After a random start it is that of the weights. If one was requested, `read_model` compares.
    if export.requested_dtype is None and new_dtype not in (None, old_dtype, *stored_dtypes):
        problem = f"dtype was {old_dtype!r}, is {new_dtype!r}: readers cast to it"
        export.add("config.json", None, problem)


def prove_weights(export: Export) -> None:
    """Compare parameters with the checkpoint, and all other tensors with the starting model.

    The starting model is the one from which the run started. Differences are findings.
    """
    model, source = _require_model(export), _require_source(export)
    Proof(model, export.entries, export.groups, export.findings).run(source)
    compare_with_start(export, None)


def prove_merge(export: Export) -> None:
    """Compare every parameter of a merged model with the base, or with the base plus its adapter.

    Differences are findings. A note counts values that are equal up to rounding only. Other tensors
    are compared with the base.
    """
    model, source = _require_model(export), _require_source(export)
    base = Path(str(export.base_location))
    proof = MergeProof(model, export.entries, export.groups, export.findings, folder=base)
    proof.run(source)
    compare_with_start(export, base)
    if proof.rounded:
        export.findings.note(
            f"{proof.rounded:,} merged values lie at the border of two roundings, and are rounded "
            "the other way here"
        )


def compare_with_start(export: Export, folder: Path | None) -> None:
    """Compare names, dtypes and carried tensors with the model that the run started from.

    Both must have the same tensor names, except for those omitted on request. Without a requested
    dtype, the dtypes must be equal. A carried tensor (one that no parameter uses) must be bitwise
    identical, or a cast to the requested dtype. Differences are findings.

    Args:
        export: the subject.
        folder: folder of the starting model's weights; None: find it. If it is not found, a note is
            added and carried tensors are not compared.
    """
    assets = formats.HFAssets.load(_require_source(export).hf)
    start_keys = assets.source
    if start_keys is None:  # a random start
        for name in sorted(export.carried):
            export.add(export.carried[name].file.name, name, "is no parameter of the model")
        return
    recorded = export.origin.get("left_out") or ()
    omitted = set(recorded if isinstance(recorded, list) else ())
    parameter_keys = {key for group in export.groups for key in group.keys}
    for name in sorted(start_keys.keys() - export.entries.keys() - omitted):
        export.add("", name, "is in the source checkpoint, and not in the export")
    for name in sorted(export.entries.keys() - start_keys.keys() - parameter_keys):
        export.add(export.entries[name].file.name, name, "is not in the source checkpoint")
    unchanged = parameter_keys & start_keys.keys() if export.requested_dtype is None else ()
    for name in sorted(unchanged):
        entry, dtype = export.entries[name], formats.DTYPES[start_keys[name]]
        if entry.dtype != dtype:
            export.add(entry.file.name, name, f"is {entry.dtype}, in the source {dtype}")
    if omitted:
        export.findings.note(f"omitted on request: {formats.summarise_names(omitted, start_keys)}")
    if not export.carried:
        return
    try:
        originals = find_carried_tensors(_require_model(export), assets, folder)
    except ExportError as error:
        export.findings.note(f"not compared with the source: {error}")
        return
    export.findings.map_with_progress(
        lambda name: _compare_carried(export, name, originals[name]),
        {name: export.carried[name].nbytes for name in export.carried.keys() & originals.keys()},
    )


def _compare_carried(export: Export, name: str, original: CarriedTensor) -> None:
    """Add a finding if a tensor that no parameter uses differs from the starting model's."""
    entry = export.entries[name]
    file = entry.file.name
    may_be_cast = export.requested_dtype is not None
    if entry.shape != original.shape or (entry.dtype != original.dtype and not may_be_cast):
        problem = f"is {entry.dtype} {list(entry.shape)}, in the source {original.dtype}"
        export.add(file, name, f"{problem} {list(original.shape)}")
    elif original.stored is None:  # in several parts
        wrong = mask_differences(original.read(), formats.read_tensor(entry), {entry.dtype})
        if bool(wrong.any()):
            export.add(file, name, "is not what the source holds in parts")
    else:
        expected = Expected(original.stored, f"{name} of the source")
        if fault := expected.describe_difference(entry, {entry.dtype}):
            export.add(file, name, fault)


def check_logits(export: Export) -> None:
    """Load the export by `from_pretrained`, and compare its logits with the checkpoint's.

    Without a checkpoint, the logits must only be finite. Problems become findings, and a note
    reports the largest difference.
    """
    loaded = load_as_reader(export)
    if loaded is None:
        return
    logits = compute_logits(loaded)
    if export.source is None:
        if bool(logits.isfinite().all()):
            note = "loads without missing or unexpected keys, computes finite logits"
            export.findings.note(note)
        else:
            export.add("", None, "computes logits that are not finite")
        return
    model = load_checkpoint_model(export.source, loaded)
    if changed := copy_unsaved_buffers(loaded, model):
        export.findings.note(
            f"transformers gives {changed[0]}, which is in no file, other values than the "
            "model's code computes; compared with the latter"
        )
        logits = compute_logits(loaded)
    expected = compute_logits(model)
    compare_logits(export, logits, expected, rounding_tolerance(loaded, expected))


def check_merged_logits(export: Export) -> None:
    """Compare the logits of a merged model with those of the base with a separate adapter.

    A merge rounds each weight to the export's dtype, so the logits are only close. The allowed
    difference is the largest of: half of the adapter's effect, twice the rounding error of the
    unmerged model in its own dtype, and `rounding_tolerance`. A larger one is a finding. Needs the
    memory of the model in fp32.
    """
    loaded = load_as_reader(export)
    if loaded is None:
        return
    logits = compute_logits(loaded)
    if export.source is None:
        return
    model = load_adapted_model(Path(str(export.base_location)), loaded, export.source)
    expected = compute_logits(model)
    with model.disable_adapter():
        effect = float((compute_logits(model) - expected).abs().max())
    rounding = float((compute_logits(model.float()) - expected).abs().max())
    tolerance = max(rounding_tolerance(loaded, expected), 0.5 * effect, 2 * rounding)
    compare_logits(export, logits, expected, tolerance, f" (effect of the adapter: {effect:.3g})")


def load_as_reader(export: Export) -> Any:
    """Load the export by `from_pretrained`, and return the model.

    Missing, unexpected and mismatched keys become findings, except for carried tensors.

    Returns:
        The model; None if it does not load, which is a finding.
    """
    try:
        loaded, info = load_export(export.folder, _require_model(export))
    except Exception as error:  # from_pretrained has no common class of errors
        text = str(error) if isinstance(error, ToolkitError) else repr(error)
        export.add("", None, f"does not load: {text}")
        return None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in set(info.get(kind) or ()) - export.carried.keys():
            export.add("", str(name), f"is among the {kind} of from_pretrained")
    return loaded


def compare_logits(
    export: Export,
    logits: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    remark: str = "",
) -> None:
    """Add a finding if logits differ by more than `tolerance`; note the largest difference.

    Also stores the difference in the report.

    Args:
        export: the subject.
        logits: logits of the export.
        expected: logits of the checkpoint.
        tolerance: largest absolute difference that is allowed.
        remark: appended to the messages.
    """
    difference = float((logits - expected).abs().max())
    export.findings.report.logits_difference = difference
    if not difference <= tolerance:  # also NaN
        problem = f"by {difference:.3g}, more than {tolerance:.3g}{remark}"
        export.add("", None, f"logits differ from the checkpoint's {problem}")
    pair = "logits of export and checkpoint"
    export.findings.note(f"{pair}: largest difference {difference:.3g}{remark}")


def make_merge_checks(base: Path) -> Checks:
    """Return the checks for a model with an adapter merged into the base in folder `base`.

    `base_location` of the export must be `base`, too.
    """
    return replace(
        FULL_MODEL,
        weights=prove_merge,
        logits=check_merged_logits,
        verdict=f"this is {base}, merged with the adapter of",
    )


def _require_source(export: Export) -> Source:
    """Return `export.source`; an AssertionError if it is None."""
    assert export.source is not None
    return export.source


def _require_model(export: Export) -> PreTrainedModel:
    """Return `export.model`; an AssertionError if it is None."""
    assert export.model is not None
    return export.model


def _list_code_files(auto_map: dict[str, Any] | None) -> Iterator[str]:
    """Yield the Python files that a config's `auto_map` expects in the config's own folder.

    References to code in other repositories (`REPO--module.Class`) are skipped.
    """
    for value in (auto_map or {}).values():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:
                yield f"{reference.partition('.')[0]}.py"


def _read_config_dtype(config: dict[str, Any]) -> Any:
    """Return the `dtype` of a config as text, without `torch.`; None if it has none."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype


def _drop_dtype(value: Any) -> Any:
    """Copy a section (dict) of a config without its dtype; return any other value unchanged."""
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in _DTYPE_KEYS}


FULL_MODEL = Checks(
    alone=(*FILE_CHECKS, read_model, check_parameters),
    assets=compare_assets,
    weights=prove_weights,
    logits=check_logits,
    verdict="holds the weights of",
)
