"""Whether an exported Hugging Face folder is whole, and what its config says.

Owns the checks of one export: by itself, against a checkpoint (`export_proof`), and by its logits.
`verify` is the door.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.checkpoint import commit
from toolkit.checkpoint.saving import MANIFEST_VERSION
from toolkit.checkpoint.sources import Source
from toolkit.config.settings import ModelConfig
from toolkit.errors import ExportError, LoadingError, ModelError, ToolkitError
from toolkit.formats import manifest as export_manifest
from toolkit.formats.damage import damaged_pieces
from toolkit.formats.hf_folder import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    TensorEntry,
    asset_files,
    read_config,
    read_header,
    read_weights,
    weight_files,
)
from toolkit.formats.tensor_stream import first_difference, in_file
from toolkit.loading.pretrained import misfits
from toolkit.models.causal_lm import build_on_meta, tied_names
from toolkit.verify.export_proof import Proof, fill, load_export, logits_of
from toolkit.verify.findings import Findings, each, file_fault, in_cache, is_plain

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_WRAPPERS = re.compile(r"FSDP|FullyShard|DistributedDataParallel|OptimizedModule|PeftModel|Wrapped")
# How far logits of equal weights may be apart: kernels may add in another order.
_NOISE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class ExportCheck:
    """One Hugging Face folder and what is found in it."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder, self.findings, self.add = folder, findings, findings.add
        self.manifest: dict[str, Any] | None = None
        self.entries: dict[str, TensorEntry] = {}
        self.model: PreTrainedModel | None = None
        self.damaged: set[str] = set()

    def check(self) -> None:
        """Check the export by itself."""
        try:
            self.manifest = export_manifest.read(self.folder)
        except ExportError as error:
            self.add(export_manifest.FILE, None, str(error))
        self._names()
        if self.manifest is not None:
            self._hash_files(self.manifest)
        if self.damaged:
            return  # what damaged files say about each other is no news
        self._read_weights()
        if self.manifest is not None and self.entries:
            self._compare_headers(self.manifest["tensors"])
        self._check_config()
        if self.model is not None and self.entries:
            self._check_model(self.model)

    def _names(self) -> None:
        """Look at every name in the folder: nothing is missing, nothing is beside."""
        known = None if self.manifest is None else set(self.manifest["files"])
        for name in sorted(os.listdir(self.folder)):
            path = self.folder / name
            weights = name.endswith((*_OTHER_WEIGHTS, ".safetensors", ".index.json"))
            if name in (export_manifest.FILE, export_manifest.CARD):
                continue
            if path.is_symlink() and not in_cache(path):
                self.add(name, None, f"is a link to {os.readlink(path)}")
            elif name.startswith(".") and not weights:
                continue
            elif path.is_dir():
                self.add(name, None, "is a folder, which no export has")
            elif known is not None and name not in known:
                what = "is a weight file" if weights else "is there, and"
                self.add(name, None, f"{what} that the manifest does not know")
            elif known is None and name.endswith(_OTHER_WEIGHTS):
                self.add(name, None, "is a weight file that is not safetensors")
            elif known is None and name.endswith(".index.json") and name != INDEX_FILE:
                self.add(name, None, "is a second index")

    def _hash_files(self, manifest: dict[str, Any]) -> None:
        files = manifest["files"]
        self.findings.expect(sum(entry["size"] for entry in files.values()))
        names = sorted(files, key=lambda n: -files[n]["size"])
        faults = each(
            lambda n: file_fault(self.folder / n, files[n], self.findings, cache=True),
            names,
            sum(entry["size"] for entry in files.values()),
        )
        strange = set()
        for name, what in zip(names, faults, strict=True):
            if what is not None:
                self.damaged.add(name)
                if self._locate(name, what, manifest["tensors"]):
                    strange.add(name)
        if strange and strange == {entry["file"] for entry in manifest["tensors"].values()}:
            what = (
                "says of no tensor in the folder what it is: is it the manifest of another export?"
            )
            self.add(export_manifest.FILE, None, what)
        self.findings.report.files += len(files)
        self.findings.report.bytes += sum(entry["size"] for entry in files.values())

    def _locate(self, name: str, what: str, tensors: dict[str, Any]) -> bool:
        """Add what is wrong with a file, by tensor where its bytes belong to tensors.

        Returns:
            Whether every tensor of it is hit.
        """
        file, found = self.folder / name, []
        held = {key: entry for key, entry in tensors.items() if entry["file"] == name}
        if not is_plain(file) and not in_cache(file):
            found = [(key, f"is lost: its file {what}") for key in held]
            self.add(name, None, what)
        elif held:
            # Where they are is taken from the manifest: the header may be what is damaged.
            places = {key: _place(file, entry) for key, entry in held.items()}
            found = damaged_pieces(file, places, {k: e["sha256"] for k, e in held.items()})
            what += "" if found else "; the bytes of its tensors are whole, its header is not"
        if not found:
            self.add(name, None, what)
        for key, damage in found:
            self.add(name, key, damage)
        return len(found) == len(held) > 0 and "bytes long" not in what

    def _read_weights(self) -> None:
        """Read headers and index; what does not agree is said, and then no tensor is known."""
        try:
            files = weight_files(self.folder)
        except (LoadingError, OSError) as error:
            where = INDEX_FILE if (self.folder / INDEX_FILE).is_file() else SINGLE_FILE
            self.add(where, None, str(error))
            return
        used = {file.name for file in files}
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".safetensors") and name not in used:
                self.add(name, None, f"is a weight file that {INDEX_FILE} does not name")
        for file in files:
            try:
                read_header(file)
            except (LoadingError, OSError) as error:
                self.add(file.name, None, str(error))
                return
        try:
            entries = read_weights(files)
        except LoadingError as error:
            self.add(INDEX_FILE, None, str(error))
            return
        if (self.folder / INDEX_FILE).is_file():
            if used == {SINGLE_FILE}:
                self.add(INDEX_FILE, None, f"is there beside {SINGLE_FILE}: loaders take either")
            else:
                self._check_index(entries)
        self.entries = entries
        self.findings.report.tensors += len(entries)

    def _check_index(self, entries: dict[str, TensorEntry]) -> None:
        index = json.loads((self.folder / INDEX_FILE).read_text("utf-8"))
        for name in sorted(entries.keys() - index["weight_map"].keys()):
            self.add(INDEX_FILE, name, f"is in {entries[name].file.name} and not in the index")
        about = index.get("metadata")
        said = about.get("total_size") if isinstance(about, dict) else None
        total = sum(entry.nbytes for entry in entries.values())
        if said is not None and said != total:
            self.add(INDEX_FILE, None, f"says total_size {said}, the tensors have {total} bytes")

    def _compare_headers(self, tensors: dict[str, Any]) -> None:
        for name in sorted(tensors.keys() | self.entries.keys()):
            said, entry = tensors.get(name), self.entries.get(name)
            if entry is None or said is None:
                where = said["file"] if entry is None and said else entry.file.name  # type: ignore[union-attr]
                what = (
                    "is in the manifest and not in the headers"
                    if entry is None
                    else ("is in the headers and not in the manifest")
                )
                self.add(where, name, what)
                continue
            there = [entry.file.name, DTYPE_NAMES[entry.dtype], list(entry.shape), entry.begin]
            known = [said[what] for what in ("file", "dtype", "shape", "begin")]
            if there != known:
                self.add(entry.file.name, name, f"is {there}, in the manifest {known}")

    def _check_config(self) -> None:
        try:
            config = read_config(self.folder)
        except (ModelError, OSError) as error:
            self.add("config.json", None, str(error))
            return
        for name in config.get("architectures") or []:
            if _WRAPPERS.search(str(name)):
                self.add("config.json", None, f"architectures names {name}, a wrapper of training")
        for reference in _modules(config.get("auto_map")):
            if not (self.folder / f"{reference}.py").is_file():
                self.add("config.json", None, f"auto_map names {reference}.py, which is not here")
        try:
            self.model = build_on_meta(ModelConfig(name_or_path=str(self.folder), init="random"))
        except ToolkitError as error:
            self.add("config.json", None, str(error))
            return
        if type(self.model).__name__ not in (config.get("architectures") or []):
            self.add(
                "config.json",
                None,
                f"architectures is {config.get('architectures')}, without "
                f"{type(self.model).__name__}",
            )
        self._check_dtype(config)

    def _check_dtype(self, config: dict[str, Any]) -> None:
        """A reader casts to the config's dtype: it must be one of the weights'."""
        said = config.get("dtype", config.get("torch_dtype"))
        there = {
            str(e.dtype).removeprefix("torch.")
            for e in self.entries.values()
            if e.dtype.is_floating_point
        }
        asked = (self.manifest or {}).get("origin", {}).get("dtype")
        if not there or asked in (None, "auto"):
            return
        if said != asked:
            self.add("config.json", None, f"dtype is {said}, the export was asked for {asked}")
        for name, entry in self.entries.items():
            dtype = str(entry.dtype).removeprefix("torch.")
            if entry.dtype.is_floating_point and dtype != asked:
                self.add(entry.file.name, name, f"is {dtype}, the export was asked for {asked}")

    def _check_model(self, model: PreTrainedModel) -> None:
        """Compare the tensors with what the config describes, as transformers loads them."""
        files = {entry.file.name for entry in self.entries.values()}
        where = files.pop() if len(files) == 1 else INDEX_FILE
        state = model.state_dict()
        for name, entry in self.entries.items():
            if name in state and tuple(state[name].shape) != entry.shape:
                wanted = list(state[name].shape)
                what = f"has shape {list(entry.shape)}, config.json describes {wanted}"
                self.add(entry.file.name, name, what)
        for kind, names in misfits(model, self.entries).items():
            for name in names:
                plain = name.partition(" (")[0]
                known = self.entries.get(plain)
                # Shapes under the model's own names are said above, with both sides.
                if kind != "of another shape" or plain not in state or known is None:
                    self.add(known.file.name if known else where, plain, f"is {kind}: {name}")
        self._check_ties(model)

    def _check_ties(self, model: PreTrainedModel) -> None:
        families: dict[str, list[str]] = {}
        for alias, owner in tied_names(model).items():
            families.setdefault(owner, [owner]).append(alias)
        for family in families.values():
            first, *others = [name for name in family if name in self.entries] or [""]
            for name in others:
                left, right = self.entries[first], self.entries[name]
                same = left.shape == right.shape and left.dtype == right.dtype
                differs = not same or first_difference(in_file(left), in_file(right))[0]
                what = "and they differ" if differs else "which is stored twice"
                self.add(right.file.name, name, f"is tied to {first}, {what}")

    # ----------------------------------------------------------------------------------------------

    def compare_assets(self, source: Source) -> None:
        """Compare config, tokenizer and code with those that the checkpoint carries."""
        wanted = asset_files(source.hf)
        for name, content in wanted.items():
            file = self.folder / name
            if not file.is_file():
                self.add(name, None, "is missing, and is with the checkpoint")
            elif file.read_bytes() != content:
                self.add(name, None, f"is not that of the checkpoint ({source.hf / name})")
        for name in sorted(asset_files(self.folder).keys() - wanted.keys()):
            self.add(name, None, "is not with the checkpoint")
        try:
            theirs, ours = read_config(source.hf), read_config(self.folder)
        except ModelError:
            return  # said, of the export; of the checkpoint `find_source` has read it
        base = [str(a) for a in theirs.get("architectures") or []]
        for key in sorted({**theirs, **ours}):
            before, now = _without_dtype(theirs.get(key)), _without_dtype(ours.get(key))
            if before == now or key in ("dtype", "torch_dtype"):
                continue
            if key == "architectures" and (not base or base[0].endswith("Model")):
                continue  # a base model that was trained with a head
            what = "was not there before" if key not in theirs else f"was {before!r}, is {now!r}"
            self.add("config.json", None, f"{key} {what}")

    def prove(self, source: Source) -> Proof | None:
        """Compare every value with the checkpoint."""
        if self.model is None or not self.entries:
            return None  # said before
        self.findings.expect(sum(entry.nbytes for entry in self.entries.values()))
        try:
            proof = Proof(
                source,
                digests_of(source),
                self.model,
                self.entries,
                self.add,
                self.findings.advance,
            )
        except ExportError as error:
            self.add("", None, str(error))
            return None
        proof.run()
        return proof

    def compare_logits(self, proof: Proof | None) -> None:
        """Load the export as its readers do, and compute with it."""
        if self.model is None or not self.entries:
            return
        try:
            loaded, info = load_export(self.folder, self.model)
        except Exception as error:  # from_pretrained has no common class of errors
            self.add("", None, f"does not load: {type(error).__name__}: {error}")
            return
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            for name in info.get(kind) or ():
                self.add("", str(name), f"is among the {kind} of from_pretrained")
        ours = logits_of(loaded)
        notes = self.findings.report.notes
        if not bool(ours.isfinite().all()):
            self.add("", None, "computes logits that are not finite")
            return
        if proof is None:
            notes.append("loads without missing or unexpected keys and computes finite logits")
            return
        twin = build_on_meta(ModelConfig(name_or_path=str(proof.source.hf), init="random"))
        try:
            fill(proof, twin, loaded)
        except ToolkitError as error:
            self.add("", None, str(error))
            return
        theirs = logits_of(twin)
        largest = float((ours - theirs).abs().max())
        self.findings.report.logits_difference = largest
        allowed = noise(loaded, theirs)
        if not largest <= allowed:
            what = f"logits differ from the checkpoint's by {largest:.3g}, more than {allowed:.3g}"
            self.add("", None, what)
        notes.append(f"logits of export and checkpoint: largest difference {largest:.3g}")


def digests_of(source: Source) -> dict[str, str]:
    """Return key -> digest of the tensors of a checkpoint, {} where it has none of our kind."""
    manifest = {} if source.checkpoint is None else commit.read_manifest(source.checkpoint)
    if manifest.get("version") != MANIFEST_VERSION:
        return {}
    return {key: entry["digest"] for key, entry in manifest["tensors"].items()}


def noise(model: nn.Module, logits: torch.Tensor) -> float:
    """Return how far the logits of equal weights may be apart."""
    share = max(_NOISE.get(p.dtype, 0.0) for p in model.parameters())
    return share * max(1.0, float(logits.abs().max()))


def _place(file: Path, said: dict[str, Any]) -> TensorEntry:
    """Return where the export's manifest says that a tensor is."""
    shape, dtype = tuple(said["shape"]), DTYPES[said["dtype"]]
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorEntry(file, dtype, shape, said["begin"], nbytes)


def _modules(auto_map: Any) -> Iterator[str]:
    """Yield the modules of this folder that auto_map names."""
    values = list(auto_map.values()) if isinstance(auto_map, dict) else []
    for value in values:
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:
                yield reference.partition(".")[0]


def _without_dtype(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in ("dtype", "torch_dtype")}
