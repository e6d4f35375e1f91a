"""Find the weights of a sharded checkpoint, whoever wrote it.

    toolkit run or checkpoint             dcp/ of a committed step, names model.<parameter>
    Accelerate save_state                 pytorch_model_fsdp_0/, a DCP folder
    any torch DCP folder                  names with a prefix of its own, or none
    torch's HuggingFaceStorageWriter,     shard-*.safetensors, the place of each part in its
    transformers' distributed_checkpoint  tensor said by the header

What they say is not trusted: a pickle is read by `formats.read_metadata` only.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from toolkit import formats
from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import ENTRY
from toolkit.checkpoint import commit
from toolkit.errors import CheckpointError, ExportError, LoadingError, ModelError
from toolkit.formats import is_adapter_folder
from toolkit.parsing import parse_json

_PREFIX = "model."  # of model tensors in the toolkit's own checkpoints
_OPTIMIZER = "optimizer_"  # Accelerate's folder of moments, beside the one of weights
_SHARDING = "DCP_SHARDING_INFO"  # the header's entry in which torch says where a shard begins
_CONSOLIDATED_BESIDE = "sharded"  # where torch puts the shards when it consolidates them itself
# Keys of a base's config.json that a save changes.
_OF_A_SAVE = {"vocab_size", "transformers_version", "torch_dtype", "dtype", "_name_or_path"}
# Parts of names that compilation and wrappers add, and no state dict for export has.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")


@dataclass(frozen=True)
class Source:
    """The weights of one checkpoint."""

    folder: Path  # holds the shards
    hf: Path  # holds config.json and what else belongs to the model
    checkpoint: Path | None  # the toolkit's own, with a manifest; None: another tool's
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape
    stored: Callable[[str], formats.StoredTensor]
    """Name -> the tensor, to be read some rows at a time; reads a few hundred bytes a chunk."""
    fault: Callable[[str], str | None]  # name -> why it is not covered once; None: it is

    @property
    def is_adapter(self) -> bool:
        """Return whether it is a checkpoint of adapters; `hf` then describes their base."""
        return self.checkpoint is not None and is_adapter_folder(self.checkpoint / "hf")

    def sums(self) -> dict[str, int]:
        """Return key -> `row_sum` of live memory at saving; empty for another tool's."""
        manifest = {} if self.checkpoint is None else commit.read_manifest(self.checkpoint)
        return manifest.get(commit.ROW_SUMS, {})


def find_source(checkpoint: str | Path, hf_assets: str | Path | None = None) -> Source:
    """Return where the weights of `checkpoint` are, and what they are. Reads metadata only.

    Of the toolkit's own checkpoint the sizes of the shards, and the hashes of the metadata and of
    the model's config, are compared with the manifest.

    Args:
        checkpoint: a run (its newest committed checkpoint), a checkpoint, or one of another tool.
        hf_assets: folder or Hub id with the config and tokenizer, where the checkpoint has none
            (one of adapters has its own).

    CheckpointError: there is none (says which path would do), or it is damaged. ExportError: there
    is no config for it.
    """
    path = Path(checkpoint).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that holds it: {path.parent}")
    foreign = hf_assets is not None or not commit.is_committed(path.parent)
    if foreign and (path / formats.METADATA_FILE).is_file():
        return _read_dcp(path, _find_assets(hf_assets, path))
    if shards := sorted(path.glob(commit.SHARDED_SAFETENSORS)):
        return _read_sharded_safetensors(path, shards, _find_assets(hf_assets, path))
    inner = [path / _CONSOLIDATED_BESIDE]
    if not any(inner[0].glob(commit.SHARDED_SAFETENSORS)):
        inner = sorted(p.parent for p in path.glob(f"{commit.ACCELERATE}*/{formats.METADATA_FILE}"))
    if len(inner) == 1:
        return find_source(inner[0], hf_assets or (path if _has_config(path) else None))
    if inner:
        raise CheckpointError(
            f"{path} holds several models; give one: {', '.join(map(str, inner))}"
        )
    try:
        found = commit.find_checkpoint(path)
    except CheckpointError as error:
        if _has_config(path) and any(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path} is a Hugging Face folder already: nothing to consolidate"
            ) from error
        raise
    return _read_toolkit_checkpoint(found, hf_assets)


def read_base_entry(source: Source) -> dict[str, Any]:
    """Return what a checkpoint's manifest says of the base that was adapted."""
    entry = commit.read_manifest(source.checkpoint).get(ENTRY) if source.checkpoint else None
    if not isinstance(entry, dict) or not isinstance(entry.get("name_or_path"), str):
        raise CheckpointError(
            f"{source.checkpoint or source.folder} does not say which base model its adapter is "
            f"for ({ENTRY!r} in its manifest)"
        )
    return entry


def find_base(source: Source, elsewhere: str | Path | None = None) -> Path:
    """Return the folder of the base that the adapter of a checkpoint was trained on.

    `elsewhere` is a folder or Hub id, None where the run had it; ExportError for another base.
    """
    entry = read_base_entry(source)
    if str(entry.get("digest")).startswith("random"):
        raise ExportError(
            f"the base of {source.checkpoint} was drawn at random ({entry['digest']}) and is in no "
            "folder: nothing to put the adapter on"
        )
    given = str(elsewhere) if elsewhere is not None else entry["name_or_path"]
    revision = None if elsewhere is not None else entry.get("revision")
    folder = _base_folder(given, revision)
    if (digest := base_digest(folder, given, revision)) != entry.get("digest"):
        raise ExportError(
            f"{folder} is not the base that the adapter of {source.checkpoint} was trained on: its "
            f"weights have the digest {digest}, the checkpoint says {entry.get('digest')}. Give "
            "the folder or Hub id of that one with --hf_assets"
        )
    return folder


def describe_base(source: Source, elsewhere: str | Path | None = None) -> dict[str, Any]:
    """Return the base as an exported adapter names it: as the run did, or `elsewhere`.

    A folder's weights are read and compared. Of a Hub id whose weights are not here only the config
    is: a name is no reason to download them. `toolkit verify --logits` reads them. ExportError:
    `elsewhere` is not found here, or is another base.
    """
    entry = read_base_entry(source)
    if elsewhere is None:
        return entry
    given = str(elsewhere)
    folder = _base_folder(given)
    if is_here := os.path.isdir(os.path.expanduser(given)):
        given = os.path.abspath(folder)
    if is_here or formats.source_dtypes(folder) is not None:
        find_base(source, folder)
    else:
        ours, theirs = formats.read_config(source.hf), formats.read_config(folder)
        for key in sorted((ours.keys() & theirs.keys()) - _OF_A_SAVE):
            if ours[key] != theirs[key]:
                raise ExportError(
                    f"{given} is not the base that was adapted: its config has {key} "
                    f"{theirs[key]!r}, the checkpoint's {ours[key]!r}"
                )
    return {**entry, "name_or_path": given, "revision": None}


def _base_folder(given: str, revision: str | None = None) -> Path:
    try:
        return formats.local_folder(given, revision)
    except ModelError as error:
        raise ExportError(
            f"the base of this adapter is not found: {error}; give its folder or Hub id with "
            "--hf_assets"
        ) from error


def is_adapter_asset(name: str) -> bool:
    """Return whether a file beside a model's weights goes with adapters, as a tokenizer does."""
    return name != "generation_config.json" and not name.endswith(".py")


def map_parameter_names(source: Source, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return (prefix, parameter name -> key of the checkpoint) of all weights in `source`.

    Wrappers' parts of the keys (`_orig_mod.` of torch.compile) are left out. Of keys without a
    prefix only those below the model's own modules count. ExportError: two prefixes would do, or
    two keys are one parameter.
    """
    wanted = set(names)
    clean: dict[str, str] = {}
    for key in source.tensors:
        name = _WRAPPERS.sub("", key)
        if name in clean:
            raise ExportError(f"{source.folder} holds {clean[name]} and {key}: both are {name}")
        clean[name] = key
    prefix = _find_prefix(clean, wanted, source) if source.checkpoint is None else _PREFIX
    found = {n.removeprefix(prefix): key for n, key in clean.items() if n.startswith(prefix)}
    if prefix == "":
        roots = {name.partition(".")[0] for name in wanted}
        found = {name: key for name, key in found.items() if name.partition(".")[0] in roots}
    return prefix, found


def check_complete(source: Source, keys: Iterable[str]) -> None:
    """Check that chunks cover each element of each tensor once; ExportError names what is not."""
    for key in keys:
        if fault := source.fault(key):
            shape = source.tensors[key][1]
            raise ExportError(f"{key} {shape} is not whole in {source.folder}: {fault}")


def _read_toolkit_checkpoint(checkpoint: Path, hf_assets: str | Path | None) -> Source:
    metadata = f"dcp/{formats.METADATA_FILE}"
    files = commit.read_manifest(checkpoint)["files"]
    if metadata not in files:
        raise CheckpointError(f"{checkpoint} has no {metadata} in its manifest")
    of_model = [n for n in files if n.startswith(("dcp/", "hf/"))]
    small = [n for n in of_model if n.startswith("hf/") or n == metadata]
    for name, fault in commit.find_damaged_files(checkpoint, of_model, hashed=small, files=files):
        raise damaged_file_error(checkpoint / name, fault)
    own = checkpoint / "hf"
    hf = own if is_adapter_folder(own) else _find_assets(hf_assets, own)
    return _read_dcp(checkpoint / "dcp", hf, checkpoint)


def damaged_file_error(file: Path, what: str) -> CheckpointError:
    """Return the error of a file that is not what the manifest says."""
    return CheckpointError(f"{file} {what}; use another checkpoint of the run")


def _read_dcp(folder: Path, hf: Path, checkpoint: Path | None = None) -> Source:
    metadata = formats.read_metadata(folder)
    tensors = {
        key: (entry.properties.dtype, tuple(entry.size))
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    weights = folder.with_name(folder.name.replace(_OPTIMIZER, commit.ACCELERATE))
    if folder.name.startswith(_OPTIMIZER) and (weights / formats.METADATA_FILE).is_file():
        raise CheckpointError(f"{folder} holds an optimizer's state; the weights are in {weights}")

    def stored(key: str) -> formats.StoredTensor:
        chunks = tuple(formats.tensor_chunks(folder, metadata, key))
        return formats.StoredTensor(*tensors[key], chunks)

    fault = partial(formats.coverage_fault, metadata)
    return Source(folder, hf, checkpoint, tensors, stored, fault)


def _read_sharded_safetensors(folder: Path, files: list[Path], hf: Path) -> Source:
    parts: dict[str, dict[Any, formats.Chunk]] = {}
    for file in files:
        formats.plain_file(folder, file.name, CheckpointError)
        try:
            entries, said = formats.read_header(file), formats.header_metadata(file).get(_SHARDING)
        except LoadingError as error:
            raise CheckpointError(str(error)) from error
        if said is None:
            raise CheckpointError(
                f"{file} does not say which part of each tensor it holds ({_SHARDING}); torch's "
                "HuggingFaceStorageWriter writes that with save_distributed=True"
            )
        try:
            places = parse_json(said, file, CheckpointError)
            for name, entry in entries.items():
                offsets = tuple(places[name]["saved_offsets"])
                counted = all(type(n) is int and 0 <= n < 2**63 for n in (*offsets, *entry.shape))
                if not counted or len(offsets) != len(entry.shape):
                    raise ValueError(f"{name}: {entry.shape} at {offsets}")
                chunk = formats.Chunk(file, offsets, entry.shape, entry.dtype, entry.begin)
                # Of replicas each rank may have written its own.
                parts.setdefault(name, {})[offsets, entry.shape, entry.dtype] = chunk
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} has a damaged {_SHARDING}: {error!r}") from error
    found = {}
    for name, held in parts.items():
        chunks = tuple(held.values())
        kinds = {(c.dtype, len(c.sizes)) for c in chunks}
        if len(kinds) > 1:
            raise CheckpointError(f"{folder} holds {name} in parts that do not fit: {kinds}")
        ends = ([o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks)
        shape = tuple(max(dim) for dim in zip(*ends, strict=True))
        found[name] = formats.StoredTensor(chunks[0].dtype, shape, chunks)

    def fault(name: str) -> str | None:
        boxes = [(chunk.offsets, chunk.sizes) for chunk in found[name].chunks]
        return formats.boxes_fault(found[name].shape, boxes)

    tensors = {name: (stored.dtype, stored.shape) for name, stored in found.items()}
    return Source(folder, hf, None, tensors, found.__getitem__, fault)


def _find_assets(hf_assets: str | Path | None, own: Path) -> Path:
    """Return the folder with the config: the one given, else the checkpoint's own."""
    if hf_assets is None:
        if not _has_config(own):
            raise ExportError(
                f"{own} is without the model's config (config.json); give the folder or the Hub id "
                "that has it: --hf_assets FOLDER_OR_ID"
            )
        return own
    path = Path(hf_assets).expanduser()
    if path.is_file():
        raise ExportError(f"--hf_assets {path} is a file; give its folder: {path.parent}")
    try:
        folder = formats.local_folder(str(hf_assets))
    except ModelError as error:
        raise ExportError(f"--hf_assets: {error}") from error
    if not _has_config(folder):
        near = [p for p in (folder / "hf", folder.parent, folder.parent / "hf") if _has_config(p)]
        if near:
            raise ExportError(f"--hf_assets {folder} has no config.json; did you mean {near[0]}?")
        raise ExportError(
            f"--hf_assets {folder} has no config.json; give a Hugging Face model's folder"
        )
    return folder


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _find_prefix(clean: dict[str, str], wanted: set[str], source: Source) -> str:
    """Return what stands before the model's parameter names in a checkpoint of another tool."""
    sample = sorted(wanted, key=len)[-1]
    found = {key.removesuffix(sample) for key in clean if key.endswith(sample)}
    held = {p: len({p + n for n in wanted} & clean.keys()) for p in found}
    best = sorted(p for p in found if held[p] == max(held.values()))
    if len(best) > 1:
        raise ExportError(
            f"{source.folder} holds the model {len(best)} times, under "
            f"{', '.join(map(repr, best))}; save the one to export alone"
        )
    return best[0] if best else _PREFIX
