"""Where the weights of a sharded checkpoint are, whoever wrote it.

    toolkit run or checkpoint             dcp/ of a committed step, names model.<parameter>
    Accelerate save_state                 pytorch_model_fsdp_0/, a DCP folder
    any torch DCP folder                  names with a prefix of its own, or none
    torch's HuggingFaceStorageWriter,     shard-*.safetensors, the place of each part in its
    transformers' distributed_checkpoint  tensor said by the header

Owns these layouts, and the answer to a path that is none of them. What they say is read with
suspicion: a pickle by `formats.dcp_metadata` only, headers by `formats.read_header`. Does
not know what is done with the weights.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from toolkit.checkpoint.commit import (
    MANIFEST,
    damaged_files,
    find_checkpoint,
    is_committed,
    read_manifest,
)
from toolkit.checkpoint.saving import MANIFEST_VERSION
from toolkit.errors import CheckpointError, ExportError, LoadingError, ModelError
from toolkit.formats import (
    METADATA_FILE,
    Box,
    Chunk,
    StoredTensor,
    TensorEntry,
    boxes_fault,
    header_metadata,
    local_folder,
    plain_file,
    read_header,
    read_metadata,
    tensor_chunks,
)
from toolkit.parsing import parse_json

_PREFIX = "model."  # of model tensors in the toolkit's own checkpoints
_ACCELERATE = "pytorch_model_fsdp_"
_OPTIMIZER = "optimizer_"  # Accelerate's folder of moments, beside the one of weights
_SHARDS = "shard-*-model-*-of-*.safetensors"
_SHARDING = "DCP_SHARDING_INFO"  # the header's entry in which torch says where a shard begins
_CONSOLIDATED_BESIDE = "sharded"  # where torch puts the shards when it consolidates them itself
# What compilation and wrappers put into names, and no state dict for export has.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: what it is, and the boxes that it is stored in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Source:
    """The weights of one checkpoint."""

    folder: Path
    """Holds the shards."""
    hf: Path
    """Holds config.json and what else belongs to the model."""
    prefix: str | None
    """Before each parameter's name; None: to be found."""
    checkpoint: Path | None
    """The toolkit's own checkpoint, with a manifest; None where another tool wrote it."""
    tensors: dict[str, Stored]
    locate: Callable[[str], list[Chunk]]
    """Name -> its non-empty chunks; reads a few hundred bytes a chunk."""

    def fingerprint(self) -> str:
        """Return a hash that changes with the weights: of the manifest, else of file stats."""
        if self.checkpoint is not None:
            return hashlib.sha256((self.checkpoint / MANIFEST).read_bytes()).hexdigest()
        stats = ((p.name, p.stat()) for p in sorted(self.folder.iterdir()) if p.is_file())
        facts = [(name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats]
        return hashlib.sha256(repr((str(self.folder.resolve()), facts)).encode()).hexdigest()

    def stored(self, key: str) -> StoredTensor:
        """Return the tensor `key`, to be read some rows at a time."""
        entry = self.tensors[key]
        return StoredTensor(entry.dtype, entry.shape, tuple(self.locate(key)))

    def digests(self) -> dict[str, str]:
        """Return key -> digest of live memory at saving; empty where there are none as of today."""
        manifest = {} if self.checkpoint is None else read_manifest(self.checkpoint)
        known = manifest["tensors"] if manifest.get("version") == MANIFEST_VERSION else {}
        return {key: entry["digest"] for key, entry in known.items()}


def find_source(checkpoint: str | Path, hf_assets: str | Path | None = None) -> Source:
    """Return where the weights of `checkpoint` are, and what they are. Reads metadata only.

    Of the toolkit's own checkpoint the sizes of all files, and the hashes of the metadata and of
    the model's config, are compared with the manifest; the shards' bytes are not read.

    Args:
        checkpoint: a run (its newest committed checkpoint), a checkpoint, or one of another tool.
        hf_assets: folder or Hub id with the config and tokenizer, where the checkpoint has none.

    Raises:
        CheckpointError: there is none (says which path would do), or it is damaged.
        ExportError: there is no config for it.
    """
    path = Path(checkpoint).expanduser()
    if path.is_file():
        raise CheckpointError(f"{path} is a file; give the folder that holds it: {path.parent}")
    if (path / METADATA_FILE).is_file() and (
        hf_assets is not None or not is_committed(path.parent)
    ):
        return _dcp(path, _assets(hf_assets, path))
    if _is_sharded_safetensors(path):
        return _safetensors(path, sorted(path.glob(_SHARDS)), _assets(hf_assets, path))
    if _is_sharded_safetensors(path / _CONSOLIDATED_BESIDE):
        return find_source(path / _CONSOLIDATED_BESIDE, hf_assets if hf_assets else _own(path))
    models = sorted(p.parent for p in path.glob(f"{_ACCELERATE}*/{METADATA_FILE}"))
    if len(models) == 1:
        return find_source(models[0], hf_assets if hf_assets else _own(path))
    if models:
        raise CheckpointError(
            f"{path} holds {len(models)} models; give one of them: {', '.join(map(str, models))}"
        )
    try:
        found = find_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_instead(path)}") from error
    return _own_checkpoint(found, hf_assets)


def parameter_names(source: Source, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return (prefix, parameter name -> key of the checkpoint) of all weights in `source`.

    Wrappers' parts of the keys (`_orig_mod.` of torch.compile) are left out. Where the checkpoint's
    keys have no prefix, only those below the model's own modules count: beside them may be
    anything.

    Raises:
        ExportError: two prefixes would do, or two keys are one parameter.
    """
    wanted = set(names)
    clean: dict[str, str] = {}
    for key in source.tensors:
        name = key
        for part in _WRAPPERS:
            name = name.replace(part, "")
        if name in clean:
            raise ExportError(
                f"{source.folder} holds {clean[name]} and {key}, which are both {name}"
            )
        clean[name] = key
    prefix = source.prefix if source.prefix is not None else _find_prefix(clean, wanted, source)
    found = {n.removeprefix(prefix): key for n, key in clean.items() if n.startswith(prefix)}
    if prefix == "":
        roots = {name.partition(".")[0] for name in wanted}
        found = {name: key for name, key in found.items() if name.partition(".")[0] in roots}
    return prefix, found


def check_whole(source: Source, keys: Iterable[str]) -> None:
    """Check that the chunks of each tensor in `keys` cover every element exactly once.

    Raises:
        ExportError: names the tensor and the gap or overlap.
    """
    for key in keys:
        entry = source.tensors[key]
        fault = boxes_fault(entry.shape, entry.boxes)
        if fault is not None:
            raise ExportError(f"{key} {entry.shape} is not whole in {source.folder}: {fault}")


# --------------------------------------------------------------------------------------------------
# Layouts
# --------------------------------------------------------------------------------------------------


def _own_checkpoint(checkpoint: Path, hf_assets: str | Path | None) -> Source:
    files = read_manifest(checkpoint)["files"]
    if f"dcp/{METADATA_FILE}" not in files:
        raise CheckpointError(f"{checkpoint} has no dcp/{METADATA_FILE} in its manifest")
    for name, entry in files.items():
        if not name.startswith("dcp/"):
            continue
        file = checkpoint / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            raise damaged(file, "is missing" if size is None else _other_size(size, entry))
    small = [n for n in files if n.startswith("hf/") or n == f"dcp/{METADATA_FILE}"]
    if faults := damaged_files(checkpoint, only=small):
        raise damaged(checkpoint / faults[0][0], faults[0][1])
    hf = checkpoint / "hf" if hf_assets is None else _given(hf_assets)
    if not (hf / "config.json").is_file():
        raise ExportError(
            f"{hf} has no config.json; give a folder that has: --hf_assets FOLDER_OR_ID"
        )
    return _dcp(checkpoint / "dcp", hf, checkpoint)


def damaged(file: Path, what: str) -> CheckpointError:
    """Return the error of a file that is not what the manifest says."""
    return CheckpointError(f"{file} {what}; use another checkpoint of the run")


def _other_size(size: int, entry: dict[str, Any]) -> str:
    return f"is {size} bytes long, expected {entry['size']}"


def _dcp(folder: Path, hf: Path, checkpoint: Path | None = None) -> Source:
    metadata = read_metadata(folder)
    tensors = {
        key: Stored(
            entry.properties.dtype,
            tuple(entry.size),
            tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks),
        )
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    weights = folder.with_name(folder.name.replace(_OPTIMIZER, _ACCELERATE))
    if folder.name.startswith(_OPTIMIZER) and (weights / METADATA_FILE).is_file():
        raise CheckpointError(f"{folder} holds an optimizer's state; the weights are in {weights}")
    return Source(
        folder,
        hf,
        None if checkpoint is None else _PREFIX,
        checkpoint,
        tensors,
        lambda key: tensor_chunks(folder, metadata, key),
    )


def _safetensors(folder: Path, files: list[Path], hf: Path) -> Source:
    parts: dict[str, list[tuple[TensorEntry, tuple[int, ...]]]] = {}
    for file in files:
        plain_file(folder, file.name, CheckpointError)
        try:
            entries, said = read_header(file), header_metadata(file).get(_SHARDING)
        except LoadingError as error:
            raise CheckpointError(str(error)) from error
        if said is None:
            raise CheckpointError(
                f"{file} does not say which part of each tensor it holds ({_SHARDING}); torch's "
                "HuggingFaceStorageWriter writes that with save_distributed=True"
            )
        try:
            places = {
                n: tuple(p["saved_offsets"])
                for n, p in parse_json(said, file, CheckpointError).items()
            }
            for name, entry in entries.items():
                offsets = places[name]
                counts = [*offsets, *entry.shape]
                if len(offsets) != len(entry.shape) or any(
                    type(n) is not int or not 0 <= n < 2**63 for n in counts
                ):
                    raise ValueError(f"{name}: {entry.shape} at {offsets}")
                parts.setdefault(name, []).append((entry, offsets))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} has a damaged {_SHARDING}: {error!r}") from error
    tensors, chunks = {}, {}
    for name, held in parts.items():
        ends = zip(
            *([o + n for o, n in zip(at, e.shape, strict=True)] for e, at in held), strict=False
        )
        shape = tuple(max(dim) for dim in ends)
        dtypes = {e.dtype for e, _ in held}
        if len(dtypes) > 1 or len({len(at) for _, at in held}) > 1:
            raise CheckpointError(f"{folder} holds {name} in parts that do not fit: {dtypes}")
        # Of replicas each rank may have written its own: parts that are one and the same place.
        held = list({(at, e.shape): (e, at) for e, at in held}.values())
        tensors[name] = Stored(held[0][0].dtype, shape, tuple((at, e.shape) for e, at in held))
        chunks[name] = [
            Chunk(e.file, at, e.shape, e.dtype, e.begin) for e, at in held if e.nbytes > 0
        ]
    return Source(folder, hf, None, None, tensors, chunks.__getitem__)


def _is_sharded_safetensors(folder: Path) -> bool:
    return next(folder.glob(_SHARDS), None) is not None


# --------------------------------------------------------------------------------------------------
# What the user gave
# --------------------------------------------------------------------------------------------------


def _assets(hf_assets: str | Path | None, path: Path) -> Path:
    """Return the folder with the config for a checkpoint of another tool."""
    found = _given(hf_assets) if hf_assets is not None else _own(path)
    if found is None:
        kind = "a torch DCP folder" if (path / METADATA_FILE).is_file() else "sharded safetensors"
        raise ExportError(
            f"{path} is {kind} without the model's config; give the folder or the Hub "
            "id that has it: --hf_assets FOLDER_OR_ID"
        )
    return found


def _own(path: Path) -> Path | None:
    return path if (path / "config.json").is_file() else None


def _given(hf_assets: str | Path) -> Path:
    path = Path(hf_assets).expanduser()
    if path.is_file():
        raise ExportError(f"--hf_assets {path} is a file; give its folder: {path.parent}")
    try:
        folder = local_folder(str(hf_assets))
    except ModelError as error:
        raise ExportError(f"--hf_assets: {error}") from error
    if not (folder / "config.json").is_file():
        near = [p for p in (folder / "hf", folder.parent, folder.parent / "hf") if _own(p)]
        hint = f"; did you mean {near[0]}?" if near else "; give a Hugging Face model's folder"
        raise ExportError(f"--hf_assets {folder} has no config.json{hint}")
    return folder


def _instead(path: Path) -> str:
    """Return which paths near `path` would do, as the end of an error message."""
    if not path.is_dir():
        above = next((p for p in path.parents if p.is_dir()), None)
        near = [] if above is None or above == Path(".") else _checkpoints_below(above)
    else:
        near = _checkpoints_below(path) or [p for p in list(path.parents)[:3] if _readable(p)]
    if not near and path.is_dir() and next(path.glob("*.safetensors"), None) is not None:
        return "; it is a Hugging Face folder already: nothing to consolidate"
    return f"; did you mean {' or '.join(map(str, near[:3]))}?" if near else ""


def _checkpoints_below(path: Path) -> list[Path]:
    folders = sorted(p for p in path.iterdir() if p.is_dir())
    deeper = sorted(p for f in folders[:100] for p in f.iterdir() if p.is_dir())
    return [p for p in folders if _readable(p)] or [p for p in deeper[:1000] if _readable(p)]


def _readable(path: Path) -> bool:
    return (
        is_committed(path)
        or (path / METADATA_FILE).is_file()
        or _is_sharded_safetensors(path)
        or next(path.glob(f"{_ACCELERATE}*/{METADATA_FILE}"), None) is not None
        or next(path.glob("checkpoints/step-*/COMMIT"), None) is not None
    )


def _find_prefix(clean: dict[str, str], wanted: set[str], source: Source) -> str:
    """Return what stands before the model's parameter names in a checkpoint of another tool."""
    sample = sorted(wanted, key=len)[-1]
    found = {key.removesuffix(sample) for key in clean if key.endswith(sample)}
    held = {p: len({p + n for n in wanted} & clean.keys()) for p in found}
    best = sorted(p for p in found if held[p] == max(held.values()))
    if len(best) > 1:
        raise ExportError(
            f"{source.folder} holds the model {len(best)} times, under "
            f"{', '.join(repr(p) for p in best)}; save the one to export by itself"
        )
    return best[0] if best else _PREFIX


def total_bytes(source: Source, keys: Iterable[str]) -> int:
    """Return the bytes of the tensors `keys`."""
    entries = (source.tensors[key] for key in keys)
    return sum(math.prod(e.shape) * e.dtype.itemsize for e in entries)
