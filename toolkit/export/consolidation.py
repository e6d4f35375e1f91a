"""A sharded checkpoint becomes a Hugging Face folder: one process, no GPU, no process group.

[Note: what is checked when] Before anything is written: sizes of all shards, hashes of their
metadata and of the model's config, and that the chunks cover each tensor once. While a tensor is
read: the sum of its bits, against the one taken from live memory when it was saved. Where there is
none such, the sha256 of the shard files, at the beginning. A checkpoint of another tool has no
hashes: only its structure is checked. When a file is written: see [Note: proof of an export].
"""

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from toolkit.checkpoint.carried import Carried
from toolkit.checkpoint.commit import CHECKPOINTS, MANIFEST, hash_file, read_manifest
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
    describe_adapter_origin,
    make_adapter_plan,
    make_plan,
    model_of_assets,
    parse_options,
)
from toolkit.export.readers import AdapterMerge, SavedTensors
from toolkit.export.writer import ReadGroup, resolve_output, write_export
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
    """Write the weights of a sharded checkpoint as a Hugging Face folder; return its path.

    Key names are those of the source checkpoint, tied weights are written once; config, generation
    config, tokenizer and a manifest of all of it come along. The folder appears under its name only
    when it is complete. Costs one read of the checkpoint, one write of the weights and one read of
    what was written (see [Note: proof of an export]), and blocks of 1 MB of memory;
    of tensors that transformers converts (fused experts) the memory of the largest group.

    Args:
        checkpoint: a run (its newest committed checkpoint is taken), a checkpoint, or one of
            another tool: see `checkpoint.sources`.
        output: a folder that does not exist or is empty.
        dtype: of floating tensors. `auto`: each key's dtype in the source checkpoint; for a random
            start the config's dtype, bfloat16 if it has none. Integer and bool tensors keep theirs.
        max_shard_size: of one safetensors file, such as "5GB", "500MB" or a number of bytes; a
            larger tensor gets a file of its own.
        hf_assets: folder or Hub id with the config and tokenizer, where the checkpoint has none; of
            adapters that of the base, where it is not where the run had it.
        merge: of a checkpoint of adapters: write the base with the adapter merged in (needs the
            base; memory: see `export.sources`). Without it such a checkpoint gives a PEFT folder,
            for which `dtype` auto is the trained one and `max_shard_size` has no meaning.
        without_carried: leave out what the source holds and no parameter takes, and do not declare
            it in config.json. Else it is copied from the source, which must still be there.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        ExportError: the output is in the way, checkpoint and model do not fit together (names the
            tensor), or there is no space. No folder of that name is left behind.
    """
    override, limit = parse_options(dtype, max_shard_size)
    source = find_source(checkpoint, hf_assets)
    hf, where, target = source.hf, str(source.folder), resolve_output(output)
    if merge and not source.is_adapter:
        raise ExportError(f"{checkpoint} is not an adapter checkpoint: there is nothing to merge")
    origin, read_group = (
        _describe_origin(source, dtype, hf_assets if source.is_adapter else None),
        None,
    )
    run = origin.get("run")
    if not source.is_adapter:
        model = model_of_assets(hf)
        tensors = SavedTensors(source, model.state_dict())
        assets = _load_assets(model, source, hf_assets)
        carried = Carried.of(model, assets, leave_out=without_carried)
        shapes, prefix = tensors.shapes(), tensors.prefix
        plan = make_plan(
            model, shapes, override, limit, where=where, prefix=prefix, carried=carried
        )
        origin |= carried.told()
    elif merge:
        tensors, base = SavedTensors(source), find_base(source, hf_assets)
        merged = AdapterMerge(tensors, base, override, limit, without_carried=without_carried)
        plan, read_group = merged.plan, merged.read_group
        origin |= {
            "adapter": describe_adapter_origin(hf, read_base_entry(source), plan, run),
            "merged": True,
        }
        origin |= merged.carried.told()
    else:
        named, tensors = describe_base(source, hf_assets), SavedTensors(source)
        plan = make_adapter_plan(hf, tensors.shapes(), override, where=where, base=named)
        origin |= {"adapter": describe_adapter_origin(hf, named, plan, run)}
    read: ReadGroup = read_group or functools.partial(tensors.read_group, plan)
    tensors.check()
    for family in tied_families(plan.model).values():
        tensors.check_same([name for name in family if name in tensors.keys])
    source_sum = tensors.source_sum if read_group is None else lambda *_: None
    write_export(plan, target, read_group=read, origin=origin, source_sum=source_sum)
    return str(Path(output).expanduser())


def _load_assets(model: PreTrainedModel, source: Source, hf_assets: str | Path | None) -> HFAssets:
    """Return the assets of a checkpoint, with the source looked for where `hf_assets` says."""
    assets = assets_of(model)
    if hf_assets is not None and source.checkpoint is not None:
        before = HFAssets.load(source.checkpoint / "hf").origin
        named = {"name_or_path": str(hf_assets), "revision": None}
        assets.origin = before and before | named
    return assets


def _describe_origin(source: Source, dtype: str, base: str | Path | None) -> dict[str, Any]:
    """Return what the export's manifest says of where the weights come from; `base` is the Hub id
    or folder of an adapter's base, None where the run had it.
    """
    origin: dict[str, Any] = {"dtype": dtype}
    if source.checkpoint is not None:
        step = read_manifest(source.checkpoint).get("step")
        origin |= {"checkpoint": hash_file(source.checkpoint / MANIFEST), "step": step}
        if source.checkpoint.parent.name == CHECKPOINTS:
            origin["run"] = collect_run_facts(source.checkpoint.parent.parent, step) or None
    if base is not None and not is_path(str(base)) and origin.get("run"):
        named = {"name": str(base), "hub_id": str(base), "revision": None}
        origin["run"]["base_model"] = origin["run"]["base_model"] | named
    return origin
