"""A sharded checkpoint becomes a Hugging Face folder: one process, no GPU, no process group.

    DCP metadata + config  ->  plan: every output tensor's place in every output file
                           ->  bytes: from the blob in a shard to that place, cast on the way
                           ->  headers read back, fsync, rename to the final name

Owns the plan of the output files and the moving of bytes. How a shard stores a chunk belongs to
`dcp_format`, the names of the source to `hf_format`. Knows nothing of training.

Memory: blocks of 1 MB. Parameters that transformers converts at load (fused experts) are turned
back from a scratch file mapped into memory, one group at a time; the conversion itself may copy
the group.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from tqdm import tqdm
from transformers import PreTrainedModel

from toolkit.commit import damaged_files, find_checkpoint, is_committed, read_manifest, sync
from toolkit.config import ModelConfig
from toolkit.dcp_format import (
    METADATA_FILE,
    coverage_fault,
    read_metadata,
    tensor_chunks,
    tensor_metadata,
)
from toolkit.errors import CheckpointError, ExportError, LoadingError
from toolkit.hf_format import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    ExportGroup,
    HFAssets,
    convert_back,
    export_groups,
    local_folder,
    read_weights,
    use_source_names,
    weight_files,
)
from toolkit.models import build_on_meta, tied_names
from toolkit.streaming import Mover, create, write_all

DTYPE_CHOICES = ("auto", "float32", "bfloat16", "float16")
_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "model."  # of model tensors in the toolkit's own checkpoints
_MARK = ".toolkit-export"  # tells a folder left by an interrupted export from somebody's files


def consolidate(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    hf_assets: str | Path | None = None,
    merge: bool = False,
) -> str:
    """Write the weights of a sharded checkpoint as a Hugging Face folder; return its path.

    The key names are those of the source checkpoint, tied weights are written once, config,
    generation config and tokenizer come along. The folder appears under its name only when it is
    complete and its headers were read back. Costs one read and one write of the weights, and memory
    for two 1 MB blocks (plus one group of fused experts where the model has them).

    Args:
        checkpoint: a run (its newest committed checkpoint is taken), a checkpoint, or, with
            `hf_assets`, a plain torch DCP folder.
        output: a folder that does not exist or is empty.
        dtype: of floating tensors. `auto`: each key's dtype in the source checkpoint; for a random
            start the config's dtype, bfloat16 if it has none. Integer and bool tensors keep theirs.
        max_shard_size: of one safetensors file, such as "5GB", "500MB" or a number of bytes; a
            larger tensor gets a file of its own.
        hf_assets: folder or Hub id with the config and tokenizer, where the checkpoint has none.
        merge: for checkpoints of adapters.

    Raises:
        CheckpointError: no such checkpoint, or it is damaged.
        ExportError: the output is in the way, checkpoint and model do not fit together (names the
            tensor), or there is no space. Nothing is left behind.
    """
    if dtype not in DTYPE_CHOICES:
        raise ExportError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_CHOICES)}")
    limit = parse_size(max_shard_size)
    source = _find_source(checkpoint, hf_assets)
    target = _check_output(output, source.dcp)
    if merge:
        raise ExportError(
            f"{source.dcp.parent} is not an adapter checkpoint: there is nothing to merge"
        )
    plan = _make_plan(source, None if dtype == "auto" else getattr(torch, dtype), limit)
    _check_space(target, plan)
    with _staged(target) as staging, _disk_errors(target):
        for name, content in plan.assets.items():
            (staging / name).write_bytes(content)
        _write_weights(plan, staging)
        _verify(plan, staging)
        for name in plan.assets:
            sync(staging / name)
    return str(Path(output).expanduser())


def parse_size(size: str | int) -> int:
    """Return the bytes of a size such as "5GB" (10^9), "5GiB" (2^30), "800000" or 800000.

    Raises:
        ExportError: it is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", str(size).strip().upper())
    number = 0.0
    if match is not None:
        base = 1024 if match[3] else 1000
        number = float(match[1]) * base ** " KMGT".index(match[2] or " ")
    if number < 1:
        raise ExportError(
            f'max_shard_size {size!r} is not a size; write "5GB", "500MB" or a number of bytes'
        )
    return int(number)


# --------------------------------------------------------------------------------------------------
# Where from, where to
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    dcp: Path
    hf: Path
    prefix: str | None
    """Of model tensors; None: to be found (a checkpoint of another tool)."""


def _find_source(checkpoint: str | Path, hf_assets: str | Path | None) -> _Source:
    path = Path(checkpoint).expanduser()
    plain = (path / METADATA_FILE).is_file()
    if plain and hf_assets is not None:
        return _Source(path, local_folder(str(hf_assets)), None)
    if plain and not is_committed(path.parent):
        raise ExportError(
            f"{path} is a torch DCP folder without the model's config; give the folder or the Hub "
            "id that has it: --hf_assets FOLDER_OR_ID"
        )
    found = find_checkpoint(path)
    _check_manifest(found)
    hf = found / "hf" if hf_assets is None else local_folder(str(hf_assets))
    if not (hf / "config.json").is_file():
        raise ExportError(
            f"{hf} has no config.json; give a folder that has: --hf_assets FOLDER_OR_ID"
        )
    return _Source(found / "dcp", hf, _PREFIX)


def _check_manifest(checkpoint: Path) -> None:
    """Check the bytes of everything that the export is made of against the manifest's hashes."""
    files = read_manifest(checkpoint)["files"]
    if f"dcp/{METADATA_FILE}" not in files:
        raise CheckpointError(f"{checkpoint} has no dcp/{METADATA_FILE} in its manifest")
    used = [name for name in files if name.startswith(("dcp/", "hf/"))]
    if faults := damaged_files(checkpoint, only=used):
        raise CheckpointError(
            f"{checkpoint / faults[0][0]} {faults[0][1]}; use another checkpoint of the run"
        )


def _check_output(output: str | Path, dcp: Path) -> Path:
    target = Path(output).expanduser().resolve()
    if target.is_file():
        raise ExportError(f"output {output} is a file; give a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ExportError(
            f"output {output} exists and is not empty; give another folder or remove it first"
        )
    inside = dcp.parent.resolve() if is_committed(dcp.parent) else dcp.resolve()
    if inside == target or inside in target.parents:
        raise ExportError(
            f"output {output} lies inside the checkpoint {inside}; give a folder elsewhere"
        )
    return target


def _check_space(target: Path, plan: "_Plan") -> None:
    parent = next(p for p in target.parents if p.is_dir())
    free, needed = shutil.disk_usage(parent).free, plan.total_bytes + plan.scratch_bytes
    if needed > free:
        raise ExportError(
            f"the export needs {_readable(needed)}, {parent} has {_readable(free)} free; give an "
            "output on another disk, or a smaller dtype"
        )


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` that takes its name on success and is removed on failure."""
    staging = target.with_name(f"{target.name}.tmp-export")
    try:
        staging.mkdir(parents=True, exist_ok=True)
        lock = os.open(staging, os.O_RDONLY)
    except OSError as error:
        raise ExportError(f"{staging} cannot be created: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ExportError(
                f"another process is writing {target} (it holds {staging})"
            ) from error
        if any(staging.iterdir()) and not (staging / _MARK).is_file():
            raise ExportError(
                f"{staging} is in the way and was not left by an export; move it elsewhere"
            )
        try:
            _empty(staging)
            (staging / _MARK).touch()
            yield staging
            (staging / _MARK).unlink()
            os.fsync(lock)
            os.rename(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync(target.parent)
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    """Remove what an interrupted export left. The mark goes last."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name == _MARK):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"writing {target} failed: {error.strerror or error}; nothing was left"
        ) from error


# --------------------------------------------------------------------------------------------------
# The plan: shapes and names only
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """The place of one exported tensor."""

    file: str
    begin: int
    """Offset of its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Plan:
    model: PreTrainedModel
    dcp: Path
    metadata: Metadata
    keys: dict[str, str]
    """Parameter name -> its key in the checkpoint."""
    groups: list[ExportGroup]
    names: dict[str, str]
    """Name in a group's outputs -> exported name."""
    outputs: dict[str, _Output]
    """Exported name -> place."""
    headers: dict[str, bytes]
    """File name -> its first bytes: the length and the JSON of a safetensors file."""
    sizes: dict[str, int]
    """File name -> its whole size."""
    assets: dict[str, bytes]
    """Every other file of the folder."""

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values()) + sum(map(len, self.assets.values()))

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch file of the largest group that is converted."""
        return max((self.group_bytes(g) for g in self.groups if g.converted), default=0)

    def output(self, name: str) -> _Output:
        """Return the place of the tensor that a group calls `name`."""
        return self.outputs[self.names[name]]

    def group_bytes(self, group: ExportGroup) -> int:
        """Return the bytes of the group's sources, each begun at a multiple of 8."""
        entries = [tensor_metadata(self.metadata, self.keys[n]) for n in group.sources]
        return sum(math.prod(e.size) * e.properties.dtype.itemsize + 7 for e in entries)


def _make_plan(source: _Source, override: torch.dtype | None, limit: int) -> _Plan:
    metadata = read_metadata(source.dcp)
    assets = HFAssets.load(source.hf)
    # `random` and float32: only shapes and names are used here.
    model = build_on_meta(ModelConfig(name_or_path=str(source.hf), init="random"))
    use_source_names(model, assets)
    prefix = _find_prefix(metadata, model) if source.prefix is None else source.prefix
    keys = _match(model, assets, metadata, prefix, source)
    groups = export_groups(model, keys)
    order = {name: i for i, name in enumerate(keys)}
    groups.sort(key=lambda g: min(order[n] for n in g.sources))
    default = _config_dtype(assets)
    names = {name: _spelling(name, model, assets) for group in groups for name in group.outputs}
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for group in groups:
        stored = {tensor_metadata(metadata, keys[n]).properties.dtype for n in group.sources}
        if len(stored) > 1:
            raise ExportError(f"{group.sources} leave together but are stored as {stored}")
        for name, shape in group.outputs.items():
            exported = names[name]
            dtypes[exported] = _export_dtype(
                exported, min(stored, key=str), assets, override, default
            )
            shapes[exported] = shape
    outputs, headers, sizes = _lay_out(dtypes, shapes, limit)
    written = override if override is not None else default if assets.source is None else None
    files = dict(assets.files)
    files["config.json"] = _config_file(source.hf, assets, model, written)
    if len(headers) > 1:
        total = sum(o.nbytes for o in outputs.values())
        where = {name: outputs[name].file for name in sorted(outputs)}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        files[INDEX_FILE] = (json.dumps(index, indent=2) + "\n").encode()
    return _Plan(model, source.dcp, metadata, keys, groups, names, outputs, headers, sizes, files)


def _find_prefix(metadata: Metadata, model: PreTrainedModel) -> str:
    """Return what stands before the model's parameter names in a checkpoint of another tool."""
    names, stored = set(model.state_dict()), set(metadata.state_dict_metadata)
    sample = sorted(names, key=len)[-1]
    found = {key.removesuffix(sample) for key in stored if key.endswith(sample)}
    prefixes = sorted(found, key=lambda p: -len({p + n for n in names} & stored))
    return prefixes[0] if prefixes else _PREFIX


def _match(
    model: PreTrainedModel, assets: HFAssets, metadata: Metadata, prefix: str, source: _Source
) -> dict[str, str]:
    """Return parameter name -> checkpoint key for all that is exported, in the model's order.

    Of tied parameters one name is exported: the one that the source has, else the one that
    transformers keeps.
    """
    state = model.state_dict()
    families: dict[str, list[str]] = {}
    for alias, owner in tied_names(model).items():
        families.setdefault(owner, [owner]).append(alias)
    aliases = {name for family in families.values() for name in family[1:]}
    stored = {
        k.removeprefix(prefix): k for k in metadata.state_dict_metadata if k.startswith(prefix)
    }
    if prefix == "":  # everything has this prefix: only what could be a parameter counts
        roots = {name.partition(".")[0] for name in state}
        stored = {name: key for name, key in stored.items() if name.partition(".")[0] in roots}
    unknown = sorted(set(stored) - set(state))
    if unknown:
        raise ExportError(
            f"{source.dcp} holds {prefix}{unknown[0]}{_more(unknown)}, which "
            f"{type(model).__name__} of {source.hf / 'config.json'} does not have; is it the "
            "config of this checkpoint?"
        )
    owned = {name: families.get(name, [name]) for name in state if name not in aliases}
    missing = [
        name for name, family in owned.items() if not any(member in stored for member in family)
    ]
    if missing:
        raise ExportError(
            f"{source.dcp} lacks {prefix}{missing[0]}{_more(missing)}, which "
            f"{type(model).__name__} needs; the checkpoint is incomplete or of another model"
        )
    keys = {}
    for name, family in owned.items():
        key = next(stored[member] for member in family if member in stored)
        shape, expected = tuple(tensor_metadata(metadata, key).size), tuple(state[name].shape)
        if shape != expected:
            raise ExportError(
                f"{key} is {shape} in {source.dcp}, {expected} in the model of "
                f"{source.hf / 'config.json'}; is it the config of this checkpoint?"
            )
        fault = coverage_fault(metadata, key)
        if fault is not None:
            raise ExportError(f"{key} {shape} is not whole in {source.dcp}: {fault}")
        keys[_exported_name(model, assets, family)] = key
    return keys


def _exported_name(model: PreTrainedModel, assets: HFAssets, family: list[str]) -> str:
    """Return under which of its tied names a parameter is exported."""
    if len(family) == 1:
        return family[0]
    dropped = getattr(model, "all_tied_weights_keys", None) or {}
    ranked = sorted(family, key=lambda name: name in dropped)
    for name in ranked:
        (group,) = export_groups(model, [name])
        outputs = [_spelling(output, model, assets) for output in group.outputs]
        if assets.source is not None and all(output in assets.source for output in outputs):
            return name
    return ranked[0]


def _spelling(name: str, model: PreTrainedModel, assets: HFAssets) -> str:
    """Return `name` as the source spells it: some leave the base model's prefix out (`wte.weight`).

    transformers accepts both when it loads and always writes the prefix.
    """
    prefix, source = f"{model.base_model_prefix}.", assets.source
    if source is None or name in source:
        return name
    if name.startswith(prefix) and name.removeprefix(prefix) in source:
        return name.removeprefix(prefix)
    return prefix + name if prefix + name in source else name


def _config_dtype(assets: HFAssets) -> torch.dtype:
    """Return the dtype of what the source does not have: the config's, else its commonest."""
    said = assets.config.get("dtype", assets.config.get("torch_dtype"))
    dtype = getattr(torch, said.removeprefix("torch."), None) if isinstance(said, str) else None
    if dtype in _CASTABLE:
        return dtype
    kinds = [DTYPES.get(kind) for kind in (assets.source or {}).values()]
    return max(_CASTABLE, key=kinds.count) if set(kinds) & set(_CASTABLE) else torch.bfloat16


def _export_dtype(
    name: str,
    stored: torch.dtype,
    assets: HFAssets,
    override: torch.dtype | None,
    default: torch.dtype,
) -> torch.dtype:
    if not stored.is_floating_point:
        return stored
    if override is not None:
        return override
    said = None if assets.source is None else assets.source.get(name)
    if said is None:
        return default
    if DTYPES.get(said) not in _CASTABLE:
        raise ExportError(
            f"{name} is {said} in the source checkpoint (quantized): trained weights cannot be "
            "cast to that; pass --dtype bfloat16"
        )
    return DTYPES[said]


def _lay_out(
    dtypes: dict[str, torch.dtype], shapes: dict[str, tuple[int, ...]], limit: int
) -> tuple[dict[str, _Output], dict[str, bytes], dict[str, int]]:
    """Return outputs, headers and file sizes; the files are filled in the model's order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, dtype in dtypes.items():
        if dtype not in DTYPE_NAMES:
            raise ExportError(f"{name} is {dtype}, which safetensors cannot store")
        nbytes = math.prod(shapes[name]) * dtype.itemsize
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    outputs, headers, sizes = {}, {}, {}
    for i, names in enumerate(shards):
        file = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        # Widest dtype first, as safetensors' writer has it: all tensors are aligned to their items.
        names = sorted(names, key=lambda n: -dtypes[n].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            end = offset + math.prod(shapes[name]) * dtypes[name].itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtypes[name]],
                "shape": list(shapes[name]),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        sizes[file] = len(headers[file]) + offset
        for name in names:
            begin = len(headers[file]) + header[name]["data_offsets"][0]
            outputs[name] = _Output(file, begin, dtypes[name], shapes[name])
    return outputs, headers, sizes


def _config_file(
    hf: Path, assets: HFAssets, model: PreTrainedModel, written: torch.dtype | None
) -> bytes:
    """Return config.json: the source's bytes, unless those would change the bits that are loaded.

    `from_pretrained` casts to the config's dtype, so one that differs from what is `written` is
    replaced.
    """
    config = json.loads(json.dumps(assets.config))
    changed = False
    if written is not None:
        name = str(written).removeprefix("torch.")
        for section in [config, *(v for v in config.values() if isinstance(v, dict))]:
            said = section.get("dtype", section.get("torch_dtype"))
            if said != name and (said is not None or section is config):
                section.pop("torch_dtype", None)
                section["dtype"] = name
                changed = True
    said = config.get("architectures") or []
    if type(model).__name__ not in said and (not said or said[0].endswith("Model")):
        config["architectures"] = [type(model).__name__]  # also where a base model gained its head
        changed = True
    if not changed:
        return (hf / "config.json").read_bytes()
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


# --------------------------------------------------------------------------------------------------
# The bytes
# --------------------------------------------------------------------------------------------------


def _write_weights(plan: _Plan, folder: Path) -> None:
    """Write every safetensors file of the plan into `folder`, each byte once, and fsync them."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name, header in plan.headers.items():
            files[name] = create(folder / name, plan.sizes[name])
            stack.callback(os.close, files[name])
            write_all(files[name], memoryview(header), 0)
        bar = stack.enter_context(
            tqdm(
                total=sum(output.nbytes for output in plan.outputs.values()),
                desc="consolidate",
                unit="B",
                unit_scale=True,
                disable=not sys.stderr.isatty(),
            )
        )
        mover = Mover(bar.update)
        for group in plan.groups:
            if group.converted:
                _write_converted(plan, group, files, folder, mover)
                continue
            (source,), (name,) = group.sources, group.outputs
            output = plan.output(name)
            for chunk in tensor_chunks(plan.dcp, plan.metadata, plan.keys[source]):
                mover.move(chunk, files[output.file], output.begin, output.dtype, name)
        for descriptor in files.values():
            os.fsync(descriptor)


def _write_converted(
    plan: _Plan, group: ExportGroup, files: dict[str, int], folder: Path, mover: "Mover"
) -> None:
    """Turn one group back into the source's tensors and write them.

    The group is put together in a scratch file, mapped into memory: what is read whole to be
    converted does not count against the process.
    """
    scratch = folder / ".scratch"
    descriptor = create(scratch, plan.group_bytes(group))
    tensors, begin = {}, 0
    try:
        still = Mover(lambda count: None)
        for name in group.sources:
            entry = tensor_metadata(plan.metadata, plan.keys[name])
            dtype, shape = entry.properties.dtype, tuple(entry.size)
            for chunk in tensor_chunks(plan.dcp, plan.metadata, plan.keys[name]):
                still.move(chunk, descriptor, begin, dtype, name)
            nbytes = math.prod(shape) * dtype.itemsize
            whole = torch.from_file(
                str(scratch), shared=True, size=begin + nbytes, dtype=torch.uint8
            )
            tensors[name] = whole[begin:].view(dtype).view(shape)
            begin += nbytes + -nbytes % 8
    finally:
        os.close(descriptor)
        scratch.unlink()
    converted = convert_back(plan.model, tensors)
    if {name: tuple(t.shape) for name, t in converted.items()} != group.outputs:
        raise ExportError(
            f"{group.sources} were converted to {sorted(converted)}, expected {group.outputs}"
        )
    for name in list(converted):
        output = plan.output(name)
        mover.write(converted.pop(name), files[output.file], output.begin, output.dtype, name)


def _verify(plan: _Plan, folder: Path) -> None:
    """Read the written headers back and compare them with the plan."""
    try:
        entries = read_weights(weight_files(folder))
    except LoadingError as error:
        raise ExportError(f"the export does not read back: {error}") from error
    found = {n: (e.file.name, e.begin, e.dtype, e.shape) for n, e in entries.items()}
    planned = {n: (o.file, o.begin, o.dtype, o.shape) for n, o in plan.outputs.items()}
    for name in sorted(found.keys() | planned.keys()):
        if found.get(name) != planned.get(name):
            raise ExportError(
                f"{name} reads back as {found.get(name)}, planned was {planned.get(name)}"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _readable(nbytes: int) -> str:
    return f"{nbytes / 10**9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 10**6:.2f} MB"
