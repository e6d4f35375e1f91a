"""Export a sharded checkpoint as a Hugging Face folder: one process, no GPU, no process group.

[Note: what is checked when] Before anything is written: the sizes of all shards, the hashes of
their metadata and of the model's config, and that the chunks cover each tensor exactly once. While
a tensor is read: its sum of bits, against the one taken in memory when it was saved. If there is no
such sum, the sha256 of its shard files is checked at the beginning. A checkpoint of another tool
has no hashes, so only its structure is checked. After a file is written: see [Note: proof of an
export].
"""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint.carried import Carried
from toolkit.checkpoint.commit import hash_file
from toolkit.checkpoint.names import CHECKPOINTS, HF, MANIFEST
from toolkit.checkpoint.sources import (
    Source,
    describe_base,
    find_base,
    find_source,
    read_base_entry,
)
from toolkit.checkpoint.summary import collect_run_facts
from toolkit.config import MAX_SHARD_SIZE
from toolkit.config.published import is_path
from toolkit.errors import ExportError
from toolkit.export.plan import (
    ExportPlan,
    build_model_from_assets,
    describe_adapter_origin,
    make_adapter_plan,
    make_model_plan,
    parse_options,
)
from toolkit.export.readers import AdapterMerge, SavedTensors
from toolkit.export.writer import ReadGroup, SourceSum, resolve_output, write_export
from toolkit.formats import HFAssets, assets_of
from toolkit.models import tied_families


def consolidate(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str | int = MAX_SHARD_SIZE,
    hf_assets: str | Path | None = None,
    merge: bool = False,
    without_carried: bool = False,
) -> str:
    """Export the weights of a sharded checkpoint as a Hugging Face folder; return its path.

    Keys are named as in the source model, and tied weights are stored under the same keys as in it.
    The folder also holds the config, the generation config, the tokenizer, and a manifest of all
    files. It appears under its name only when it is complete.

    Costs one read of the checkpoint, one write of the weights and one read of the written files
    (see [Note: proof of an export]). Memory: blocks of 1 MB; for tensors that transformers converts
    together (fused experts), the largest group of them.

    Args:
        checkpoint: a run (its newest committed checkpoint is used), a checkpoint, or a checkpoint
            of another tool: see `checkpoint.sources`.
        output: a folder that does not exist or is empty.
        dtype: dtype of floating tensors. `auto`: each key's dtype in the source model; for a random
            start the config's dtype, or bfloat16 if it has none. Integer and bool tensors keep
            theirs.
        max_shard_size: size of one safetensors file, such as "5GB", "500MB" or a number of bytes. A
            larger tensor gets a separate file.
        hf_assets: folder or Hub id with the config and tokenizer, if the checkpoint has none; for
            adapters, their base model, if it is no longer where the run read it.
        merge: for a checkpoint of adapters: write the base model with the adapter merged in. This
            needs the base (memory: see `export.readers`). If False, adapters are exported as a PEFT
            folder, for which `auto` is the trained dtype and `max_shard_size` has no effect.
        without_carried: omit the tensors of the source model that belong to no parameter of the
            trained model, and do not declare them in config.json. By default they are copied from
            the source model, which must still exist.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ExportError: `output` is in use, checkpoint and model do not match (the error names the
            tensor), or the disk is full. No folder of that name is left behind.
    """
    override, limit = parse_options(dtype, max_shard_size)
    source = find_source(checkpoint, hf_assets)
    target = resolve_output(output)
    if merge and not source.is_adapter:
        raise ExportError(f"{checkpoint} is not an adapter checkpoint: there is nothing to merge")
    origin = _describe_origin(source, dtype, hf_assets if source.is_adapter else None)
    if not source.is_adapter:
        parts = _prepare_model(source, hf_assets, override, limit, without_carried, origin)
    elif merge:
        parts = _prepare_merge(source, hf_assets, override, limit, without_carried, origin)
    else:
        parts = _prepare_adapter(source, hf_assets, override, origin)
    plan, tensors, read_group, source_sum = parts
    tensors.check_before_reading()
    for family in tied_families(plan.model).values():
        tensors.check_tied_values([name for name in family if name in tensors.keys])
    write_export(plan, target, read_group=read_group, origin=origin, source_sum=source_sum)
    return str(Path(output).expanduser())


_ExportInputs = tuple[ExportPlan, SavedTensors, ReadGroup, SourceSum]
"""The plan of an export, the tensors of the checkpoint, and how values and checksums are read."""


def _prepare_model(
    source: Source,
    hf_assets: str | Path | None,
    override: torch.dtype | None,
    limit: int,
    without_carried: bool,
    origin: dict[str, Any],
) -> _ExportInputs:
    """Plan the export of a full model, and print which tensors are copied from the source model.

    Args:
        source: the checkpoint.
        hf_assets: as for `consolidate`.
        override: dtype of all floating tensors; None keeps that of the source.
        limit: largest size of a weight file in bytes.
        without_carried: as for `consolidate`.
        origin: the export manifest's entry on the source; entries on carried tensors are added.

    Returns:
        The plan, the tensors of the checkpoint, and two functions: one reads the values of a group,
        the other returns the checksum of a saved tensor.
    """
    model = build_model_from_assets(source.hf)
    tensors = SavedTensors(source, model.state_dict())
    assets = _load_assets(model, source, hf_assets)
    carried = Carried.find(model, assets, omit=without_carried)
    plan = make_model_plan(
        model,
        tensors.shapes(),
        override,
        limit,
        where=str(source.folder),
        prefix=tensors.prefix,
        carried=carried,
    )
    carried.log()
    origin |= carried.manifest_entry()
    return plan, tensors, functools.partial(tensors.read_group, plan), tensors.source_sum


def _prepare_merge(
    source: Source,
    hf_assets: str | Path | None,
    override: torch.dtype | None,
    limit: int,
    without_carried: bool,
    origin: dict[str, Any],
) -> _ExportInputs:
    """Plan the export of a base model with the adapter merged in, and print the carried tensors.

    Adds to `origin`: `adapter` (its settings, base model and class), `merged`, and the entries of
    `Carried.manifest_entry`. For arguments and result see `_prepare_model`.
    """
    tensors = SavedTensors(source)
    base = find_base(source, hf_assets)
    merged = AdapterMerge(tensors, base, override, limit, without_carried=without_carried)
    entry = read_base_entry(source)
    run = origin.get("run")
    origin["adapter"] = describe_adapter_origin(source.hf, entry, merged.plan, run)
    origin["merged"] = True
    merged.carried.log()
    origin |= merged.carried.manifest_entry()
    # The values of a merge are computed here, so the checkpoint has no checksums of them.
    return merged.plan, tensors, merged.read_group, lambda *_: None


def _prepare_adapter(
    source: Source,
    hf_assets: str | Path | None,
    override: torch.dtype | None,
    origin: dict[str, Any],
) -> _ExportInputs:
    """Plan the export of an adapter as a PEFT folder.

    Adds `adapter` (its settings, base model and class) to `origin`. For arguments and result see
    `_prepare_model`.
    """
    base_entry = describe_base(source, hf_assets)
    tensors = SavedTensors(source)
    where = str(source.folder)
    plan = make_adapter_plan(source.hf, tensors.shapes(), override, where=where, base=base_entry)
    run = origin.get("run")
    origin["adapter"] = describe_adapter_origin(source.hf, base_entry, plan, run)
    return plan, tensors, functools.partial(tensors.read_group, plan), tensors.source_sum


def _load_assets(model: PreTrainedModel, source: Source, hf_assets: str | Path | None) -> HFAssets:
    """Return the assets of `model`, with the name of the source model of carried tensors.

    For a checkpoint of this toolkit, `hf_assets` replaces that name if it is given. Files are not
    read from it.
    """
    assets = assets_of(model)
    if hf_assets is not None and source.checkpoint is not None:
        saved_origin = HFAssets.load(source.checkpoint / HF).origin
        source_name = {"name_or_path": str(hf_assets), "revision": None}
        assets.origin = saved_origin and saved_origin | source_name
    return assets


def _describe_origin(source: Source, dtype: str, base: str | Path | None) -> dict[str, Any]:
    """Build the export manifest's entry on the source of the weights.

    It holds the option `dtype` and, for a checkpoint of this toolkit, its hash, its step and facts
    of its run.

    Args:
        source: the weights.
        dtype: the option of `consolidate`.
        base: Hub id or folder of an adapter's base model. A Hub id replaces the base model in the
            facts of the run; None or a folder does not.
    """
    origin: dict[str, Any] = {"dtype": dtype}
    if source.checkpoint is not None:
        step = source.manifest.get("step")
        origin |= {"checkpoint": hash_file(source.checkpoint / MANIFEST), "step": step}
        if source.checkpoint.parent.name == CHECKPOINTS:
            origin["run"] = collect_run_facts(source.checkpoint.parent.parent, step) or None
    if base is not None and not is_path(str(base)) and origin.get("run"):
        base_name = {"name": str(base), "hub_id": str(base), "revision": None}
        origin["run"]["base_model"] = origin["run"]["base_model"] | base_name
    return origin
