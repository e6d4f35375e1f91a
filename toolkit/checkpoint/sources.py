"""Find the weights of a sharded checkpoint, written by this or another tool.

    run or checkpoint of this toolkit     dcp/ of a committed step, keys model.<parameter>
    Accelerate's save_state               pytorch_model_fsdp_0/, a DCP folder
    any torch DCP folder                  keys with any prefix, or none
    torch's HuggingFaceStorageWriter,     shard-*.safetensors, whose headers hold the offsets of
    transformers' distributed_checkpoint  each part in its tensor

The files of other tools are not trusted: pickles are only read by `formats.read_metadata`, which
restricts them.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from toolkit import formats
from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import ENTRY
from toolkit.checkpoint import commit
from toolkit.checkpoint.names import DCP, HF, ROW_SUMS
from toolkit.errors import CheckpointError, ExportError, LoadingError, ModelError
from toolkit.formats import is_adapter_folder
from toolkit.parsing import parse_json

_PREFIX = "model."  # of model tensors in checkpoints of this toolkit
_OPTIMIZER = "optimizer_"  # Accelerate's folder of the optimizer, next to that of the weights
_SHARDING = "DCP_SHARDING_INFO"  # in a file's header: the offsets of each part in its tensor
_SHARDED = "sharded"  # torch's folder of the shards, if torch has consolidated them as well
# Keys of a config.json that saving a model changes.
_CHANGED_BY_SAVING = {"vocab_size", "transformers_version", "torch_dtype", "dtype", "_name_or_path"}
# Parts of names that compilation and wrappers add. Exported names do not have them.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")


@dataclass(frozen=True)
class Source:
    """Names, dtypes, shapes and locations of the weights in one checkpoint of any tool."""

    folder: Path
    """Holds the shards."""
    hf: Path
    """Holds config.json and the other assets of the model."""
    checkpoint: Path | None
    """The checkpoint of this toolkit; None for a checkpoint of another tool."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """Key -> dtype and shape."""
    stored: Callable[[str], formats.StoredTensor]
    """Finds the stored tensor of a key. Reads a few hundred bytes a chunk, and no values."""
    fault: Callable[[str], str | None]
    """Explains why the chunks of a key do not cover its tensor exactly once; None if they do."""
    manifest: dict[str, Any] = field(default_factory=dict, repr=False)
    """The checkpoint's manifest, read once; empty for a checkpoint of another tool."""

    @property
    def is_adapter(self) -> bool:
        """True for a checkpoint of adapters; `hf` then describes their base model."""
        return self.checkpoint is not None and is_adapter_folder(self.checkpoint / HF)

    @property
    def row_sums(self) -> dict[str, int]:
        """Key -> checksum of the tensor in memory when it was saved; {} for another tool."""
        return self.manifest.get(ROW_SUMS, {})


def find_source(checkpoint: str | Path, hf_assets: str | Path | None = None) -> Source:
    """Find and describe the weights of a checkpoint of this or another tool. Reads only metadata.

    For a checkpoint of this toolkit, the sizes of the shards and the hashes of the metadata and of
    the model's config are compared with the manifest.

    Args:
        checkpoint: a run (its newest committed checkpoint is used), a checkpoint, or a checkpoint
            of another tool.
        hf_assets: folder or Hub id of the model whose config and tokenizer are used. None uses
            those in the checkpoint. It has no effect for a checkpoint of adapters.

    Raises:
        CheckpointError: there is no checkpoint (the error suggests paths), or it is damaged.
        ExportError: there is no config for it.
    """
    path = Path(checkpoint).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that holds it: {path.parent}")
    # A `dcp` folder inside a checkpoint is read by its checkpoint, unless assets are given for it.
    is_foreign = hf_assets is not None or not commit.is_committed(path.parent)
    if is_foreign and (path / formats.METADATA_FILE).is_file():
        return _read_dcp(path, _find_assets(hf_assets, path))
    if shards := sorted(path.glob(commit.SHARDED_SAFETENSORS)):
        return _read_sharded_safetensors(path, shards, _find_assets(hf_assets, path))
    inner = [path / _SHARDED]
    if not any(inner[0].glob(commit.SHARDED_SAFETENSORS)):
        inner = sorted(p.parent for p in path.glob(f"{commit.ACCELERATE}*/{formats.METADATA_FILE}"))
    if len(inner) == 1:
        return find_source(inner[0], hf_assets or (path if _has_config(path) else None))
    if inner:
        raise CheckpointError(
            f"{path} holds several models; give one: {', '.join(map(str, inner))}"
        )
    try:
        committed = commit.find_checkpoint(path)
    except CheckpointError as error:
        if _has_config(path) and any(path.glob("*.safetensors")):
            raise CheckpointError(
                f"{path} is a Hugging Face folder already: nothing to consolidate"
            ) from error
        raise
    return _read_toolkit_checkpoint(committed, hf_assets)


def read_base_entry(source: Source) -> dict[str, Any]:
    """Return the manifest entry that describes the base model of an adapter checkpoint.

    Raises:
        CheckpointError: the manifest names no base model.
    """
    entry = source.manifest.get(ENTRY)
    if not isinstance(entry, dict) or not isinstance(entry.get("name_or_path"), str):
        raise CheckpointError(
            f"{source.checkpoint or source.folder} does not say which base model its adapter is "
            f"for ({ENTRY!r} in its manifest)"
        )
    return entry


def find_base(source: Source, elsewhere: str | Path | None = None) -> Path:
    """Find the folder of the base model on which the adapter of a checkpoint was trained.

    A Hub id is downloaded if necessary. The weight digest is compared with the recorded one.

    Args:
        source: an adapter checkpoint.
        elsewhere: folder or Hub id of the base; None uses the path or id that the run used.

    Raises:
        ExportError: the base is not found, its weights are not those of the run, or its weights
            were random and are in no folder.
        LoadingError: its weights are missing or damaged.
    """
    entry = read_base_entry(source)
    if str(entry.get("digest")).startswith("random"):
        raise ExportError(
            f"the base of {source.checkpoint} was drawn at random ({entry['digest']}) and is in no "
            "folder: nothing to put the adapter on"
        )
    name = str(elsewhere) if elsewhere is not None else entry["name_or_path"]
    revision = None if elsewhere is not None else entry.get("revision")
    folder = _find_base_folder(name, revision)
    if (digest := base_digest(folder, name, revision)) != entry.get("digest"):
        raise ExportError(
            f"{folder} is not the base that the adapter of {source.checkpoint} was trained on: its "
            f"weights have the digest {digest}, the checkpoint says {entry.get('digest')}. Give "
            "the folder or Hub id of that one with --hf_assets"
        )
    return folder


def describe_base(source: Source, elsewhere: str | Path | None = None) -> dict[str, Any]:
    """Build the entry on the base model for the export of an adapter.

    If `elsewhere` is given, it must be the base of the run. The weight digests are compared if the
    weights are on this machine, otherwise only the configs. Nothing large is downloaded.

    Args:
        source: an adapter checkpoint.
        elsewhere: folder or Hub id that the export names as its base; None: the base of the run.

    Returns:
        The checkpoint's entry (name, revision, digest, settings), with `elsewhere` as the name.

    Raises:
        ExportError: `elsewhere` is not found, or is another model.
    """
    entry = read_base_entry(source)
    if elsewhere is None:
        return entry
    name = str(elsewhere)
    folder = _find_base_folder(name)
    is_local = os.path.isdir(os.path.expanduser(name))
    if is_local:
        name = os.path.abspath(folder)
    if is_local or formats.source_dtypes(folder) is not None:
        find_base(source, folder)
    else:
        saved_config = formats.read_config(source.hf)
        base_config = formats.read_config(folder)
        for key in sorted((saved_config.keys() & base_config.keys()) - _CHANGED_BY_SAVING):
            if saved_config[key] != base_config[key]:
                raise ExportError(
                    f"{name} is not the base that was adapted: its config has {key} "
                    f"{base_config[key]!r}, the checkpoint's config has {saved_config[key]!r}"
                )
    return {**entry, "name_or_path": name, "revision": None}


def _find_base_folder(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a base model; download the config of a Hub id if necessary.

    Raises:
        ExportError: it is not found; the error mentions --hf_assets.
    """
    try:
        return formats.local_folder(name, revision)
    except ModelError as error:
        raise ExportError(
            f"the base of this adapter is not found: {error}; give its folder or Hub id with "
            "--hf_assets"
        ) from error


def is_adapter_asset(name: str) -> bool:
    """Return True if this file of the base model is also copied into the export of an adapter.

    True for tokenizer files, False for Python code and the generation config.
    """
    return name != "generation_config.json" and not name.endswith(".py")


def map_parameter_names(source: Source, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Map the parameter names of a model to the keys of a checkpoint.

    A key is a prefix followed by a parameter name. Parts that wrappers such as torch.compile add
    (`_orig_mod.`) are ignored. If the prefix is empty, keys of other modules are skipped.

    Args:
        source: the checkpoint.
        names: parameter names of the model, to find the prefix in a checkpoint of another tool. For
            a checkpoint of this toolkit, the prefix is `model.`.

    Returns:
        (prefix of the keys, {parameter name: key}).

    Raises:
        ExportError: two prefixes match, or two keys are the same parameter.
    """
    parameters = set(names)
    clean: dict[str, str] = {}
    for key in source.tensors:
        name = _WRAPPERS.sub("", key)
        if name in clean:
            raise ExportError(f"{source.folder} holds {clean[name]} and {key}: both are {name}")
        clean[name] = key
    prefix = _find_prefix(clean, parameters, source) if source.checkpoint is None else _PREFIX
    keys = {n.removeprefix(prefix): key for n, key in clean.items() if n.startswith(prefix)}
    if prefix == "":
        roots = {name.partition(".")[0] for name in parameters}
        keys = {name: key for name, key in keys.items() if name.partition(".")[0] in roots}
    return prefix, keys


def check_complete(source: Source, keys: Iterable[str]) -> None:
    """Raise an ExportError if the stored chunks of a tensor in `keys` leave gaps or overlap."""
    for key in keys:
        if fault := source.fault(key):
            shape = source.tensors[key][1]
            raise ExportError(f"{key} {shape} is not complete in {source.folder}: {fault}")


def _read_toolkit_checkpoint(checkpoint: Path, hf_assets: str | Path | None) -> Source:
    """Describe the weights in a checkpoint of this toolkit, and compare it with its manifest.

    Compares the sizes of all model files, and the hashes of those that are not shards. `hf_assets`
    is as for `find_source`.

    Raises:
        CheckpointError: the checkpoint is not committed, has no metadata of tensors, or is damaged.
        ExportError: there is no config.
    """
    metadata = f"{DCP}/{formats.METADATA_FILE}"
    manifest = commit.read_manifest(checkpoint)
    files = manifest["files"]
    if metadata not in files:
        raise CheckpointError(f"{checkpoint} has no {metadata} in its manifest")
    model_files = [n for n in files if n.startswith((f"{DCP}/", f"{HF}/"))]
    # The shards are large: their values are compared with the row sums when they are read.
    hashed = [n for n in model_files if n.startswith(f"{HF}/") or n == metadata]
    for name, fault in commit.find_damaged_files(
        checkpoint, model_files, hashed=hashed, files=files
    ):
        raise damaged_file_error(checkpoint / name, fault)
    saved_assets = checkpoint / HF
    hf = saved_assets if is_adapter_folder(saved_assets) else _find_assets(hf_assets, saved_assets)
    return replace(_read_dcp(checkpoint / DCP, hf, checkpoint), manifest=manifest)


def damaged_file_error(file: Path, fault: str) -> CheckpointError:
    """Build the error for a damaged file; `fault` continues the sentence, such as "is missing"."""
    return CheckpointError(f"{file} {fault}; use another checkpoint of the run")


def _read_dcp(folder: Path, hf: Path, checkpoint: Path | None = None) -> Source:
    """Describe the weights in a folder of torch's DCP format. Reads `.metadata` only.

    Args:
        folder: the folder.
        hf: the folder with the model's config.
        checkpoint: the checkpoint of this toolkit that holds `folder`; None for another tool.

    Raises:
        CheckpointError: `.metadata` is missing or damaged, or Accelerate's folder of the optimizer
            was given instead of that of the weights.
    """
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
        """Locate the stored tensor of a key."""
        chunks = tuple(formats.tensor_chunks(folder, metadata, key))
        return formats.StoredTensor(*tensors[key], chunks)

    fault = partial(formats.find_coverage_fault, metadata)
    return Source(folder, hf, checkpoint, tensors, stored, fault)


def _read_sharded_safetensors(folder: Path, files: list[Path], hf: Path) -> Source:
    """Describe the weights in sharded safetensors files, which torch's storage writer writes.

    Args:
        folder: the folder of the files.
        files: the files.
        hf: the folder with the model's config.

    Raises:
        CheckpointError: a header is damaged, or does not give the offsets of its tensor parts; or
            the parts of a tensor differ in dtype or number of dimensions.
    """
    parts: dict[str, dict[Any, formats.Chunk]] = {}
    for file in files:
        formats.resolve_plain_file(folder, file.name, CheckpointError)
        try:
            entries = formats.read_header(file)
            sharding_text = formats.header_metadata(file).get(_SHARDING)
        except LoadingError as error:
            raise CheckpointError(str(error)) from error
        if sharding_text is None:
            raise CheckpointError(
                f"{file} does not say which part of each tensor it holds ({_SHARDING}); torch's "
                "HuggingFaceStorageWriter writes that with save_distributed=True"
            )
        try:
            places = parse_json(sharding_text, file, CheckpointError)
            for name, entry in entries.items():
                offsets = tuple(places[name]["saved_offsets"])
                are_sizes = all(type(n) is int and 0 <= n < 2**63 for n in (*offsets, *entry.shape))
                if not are_sizes or len(offsets) != len(entry.shape):
                    raise ValueError(f"{name}: {entry.shape} at {offsets}")
                chunk = formats.Chunk(file, offsets, entry.shape, entry.dtype, entry.begin)
                # Each rank of a replicated tensor may have written it: keep one copy.
                parts.setdefault(name, {})[offsets, entry.shape, entry.dtype] = chunk
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} has a damaged {_SHARDING}: {error!r}") from error
    stored_tensors = {}
    for name, chunks_by_place in parts.items():
        chunks = tuple(chunks_by_place.values())
        kinds = {(c.dtype, len(c.sizes)) for c in chunks}
        if len(kinds) > 1:
            raise CheckpointError(f"{folder} holds {name} in parts that do not fit: {kinds}")
        ends = ([o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks)
        shape = tuple(max(dim) for dim in zip(*ends, strict=True))
        stored_tensors[name] = formats.StoredTensor(chunks[0].dtype, shape, chunks)

    def fault(name: str) -> str | None:
        """Explain why a tensor's parts do not cover it exactly once; None if they do."""
        boxes = [(chunk.offsets, chunk.sizes) for chunk in stored_tensors[name].chunks]
        return formats.find_boxes_fault(stored_tensors[name].shape, boxes)

    tensors = {name: (stored.dtype, stored.shape) for name, stored in stored_tensors.items()}
    return Source(folder, hf, None, tensors, stored_tensors.__getitem__, fault)


def _find_assets(hf_assets: str | Path | None, saved_assets: Path) -> Path:
    """Return the folder with the model's config: `saved_assets`, or that of `hf_assets` if given.

    Raises:
        ExportError: the folder has no config.json, or `hf_assets` is not found.
    """
    if hf_assets is None:
        if not _has_config(saved_assets):
            raise ExportError(
                f"{saved_assets} has no config of the model (config.json); give the folder or the "
                "Hub id that has it: --hf_assets FOLDER_OR_ID"
            )
        return saved_assets
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
    """Return True if `folder` contains a config.json."""
    return (folder / "config.json").is_file()


def _find_prefix(clean: dict[str, str], parameters: set[str], source: Source) -> str:
    """Find the prefix of the model's parameter names in a checkpoint of another tool.

    Args:
        clean: key without the parts that wrappers add -> key in the checkpoint.
        parameters: parameter names of the model.
        source: the checkpoint, for the error.

    Returns:
        The prefix with which most parameter names are keys; `model.` if there is none.

    Raises:
        ExportError: several prefixes match equally well.
    """
    sample = sorted(parameters, key=len)[-1]
    prefixes = {key.removesuffix(sample) for key in clean if key.endswith(sample)}
    matches = {p: len({p + n for n in parameters} & clean.keys()) for p in prefixes}
    best = sorted(p for p in prefixes if matches[p] == max(matches.values()))
    if len(best) > 1:
        raise ExportError(
            f"{source.folder} holds the model {len(best)} times, under "
            f"{', '.join(map(repr, best))}; save the one to export alone"
        )
    return best[0] if best else _PREFIX
