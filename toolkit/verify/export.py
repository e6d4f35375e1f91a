"""Whether an exported Hugging Face folder is whole, and what its config says.

Owns the checks of one export: by itself, against a checkpoint (`proof`), and by its logits.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint.sources import Source
from toolkit.config.settings import ModelConfig
from toolkit.errors import ExportError, LoadingError, ModelError, ToolkitError
from toolkit.formats import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    TensorEntry,
    asset_files,
    damaged_pieces,
    export_manifest,
    first_difference,
    in_file,
    read_config,
    read_header,
    read_weights,
    weight_files,
)
from toolkit.loading import misfits
from toolkit.models import build_on_meta, tied_names
from toolkit.parsing import read_json
from toolkit.verify.findings import Findings, is_cached, is_regular
from toolkit.verify.logits import load_checkpoint, load_export, logits_of, noise
from toolkit.verify.proof import Proof, prove_checkpoint

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_WRAPPERS = re.compile(r"FSDP|FullyShard|DistributedDataParallel|OptimizedModule|PeftModel|Wrapped")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_Loaded = TypeVar("_Loaded")


class ExportCheck:
    """One Hugging Face folder and what is found in it."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder, self.findings, self.add = folder, findings, findings.add
        self.manifest: dict[str, Any] | None = None
        self.entries: dict[str, TensorEntry] = {}
        self.model: PreTrainedModel | None = None

    def check(self) -> None:
        """Check the export by itself."""
        try:
            self.manifest = export_manifest.read(self.folder)
        except ExportError as error:
            self.add(export_manifest.FILE, None, str(error))
        self._check_names()
        if self.manifest is not None and self._hash_files(self.manifest):
            return  # what damaged files say of each other is no news
        self._read_weights()
        if self.manifest is not None and self.entries:
            self._compare_headers(self.manifest["tensors"])
        self._check_config()
        if self.model is not None and self.entries:
            self._check_model(self.model)

    def origin(self) -> dict[str, Any]:
        """Return what the manifest says of where the weights came from; often empty."""
        return (self.manifest or {}).get("origin") or {}

    def _check_names(self) -> None:
        """Look at every name in the folder: nothing is missing, nothing is beside."""
        known = None if self.manifest is None else set(self.manifest["files"])
        for name in sorted(os.listdir(self.folder)):
            file = self.folder / name
            weights = name.endswith((*_OTHER_WEIGHTS, ".safetensors", ".index.json"))
            if file.is_symlink() and not is_cached(file):
                self.add(name, None, f"is a link to {os.readlink(file)}")
            elif name in (export_manifest.FILE, export_manifest.CARD) or (
                name.startswith(".") and not weights
            ):
                continue
            elif not file.is_file():
                self.add(name, None, "is no regular file, and an export has nothing else")
            elif known is not None and name not in known:
                what = "is a weight file" if weights else "is there, and"
                self.add(name, None, f"{what} that the manifest does not know")
            elif known is None and name.endswith(_OTHER_WEIGHTS):
                self.add(name, None, "is a weight file that is not safetensors")
            elif known is None and name.endswith(".index.json") and name != INDEX_FILE:
                self.add(name, None, "is a second index")

    def _hash_files(self, manifest: dict[str, Any]) -> bool:
        """Compare every file with the manifest; return whether one is damaged."""
        faults = self.findings.hash_files(self.folder, manifest["files"], in_cache=True)
        strange = {n for n, what in faults.items() if self._locate(n, what, manifest["tensors"])}
        if strange and strange == {entry["file"] for entry in manifest["tensors"].values()}:
            self.add(
                export_manifest.FILE,
                None,
                "says of no tensor in the folder what it is: is it the manifest of another export?",
            )
        return bool(faults)

    def _locate(self, name: str, what: str, tensors: dict[str, Any]) -> bool:
        """Add what is wrong with a file, by tensor where its bytes belong to tensors.

        Returns:
            Whether every tensor of it is hit.
        """
        file, found = self.folder / name, []
        held = {key: entry for key, entry in tensors.items() if entry["file"] == name}
        if not is_regular(file) and not is_cached(file):
            found = [(key, f"is lost: its file {what}") for key in held]
            self.add(name, None, what)
        elif held:
            # Where they are is taken from the manifest: the header may be what is damaged.
            places = {key: _entry(file, known) for key, known in held.items()}
            found = damaged_pieces(file, places, {k: e["sha256"] for k, e in held.items()})
            what += "" if found else "; the bytes of its tensors are whole, its header is not"
        if not found:
            self.add(name, None, what)
        for key, damage in found:
            self.add(name, key, damage)
        return len(found) == len(held) > 0 and "bytes long" not in what

    def _read_weights(self) -> None:
        """Read headers and index; where they do not agree, no tensor is known."""
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
        where = INDEX_FILE
        try:
            for file in files:
                where = file.name
                read_header(file)
            where = INDEX_FILE
            entries = read_weights(files)
            if (self.folder / INDEX_FILE).is_file():
                if used == {SINGLE_FILE}:
                    self.add(
                        INDEX_FILE, None, f"is there beside {SINGLE_FILE}: loaders take either"
                    )
                else:
                    self._check_index(entries)
        except (LoadingError, OSError) as error:
            self.add(where, None, str(error))
            return
        self.entries = entries
        self.findings.report.tensors += len(entries)

    def _check_index(self, entries: dict[str, TensorEntry]) -> None:
        index = read_json(self.folder / INDEX_FILE, LoadingError)
        for name in sorted(entries.keys() - index["weight_map"].keys()):
            self.add(INDEX_FILE, name, f"is in {entries[name].file.name} and not in the index")
        metadata = index.get("metadata")
        known = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(entry.nbytes for entry in entries.values())
        if known is not None and known != total:
            self.add(INDEX_FILE, None, f"says total_size {known}, the tensors have {total} bytes")

    def _compare_headers(self, tensors: dict[str, Any]) -> None:
        for name in sorted(tensors.keys() | self.entries.keys()):
            entry, known = self.entries.get(name), tensors.get(name)
            header, manifest = None, known and {k: known[k] for k in ("dtype", "shape", "begin")}
            if entry is not None:
                dtype, shape = DTYPE_NAMES[entry.dtype], list(entry.shape)
                header = {"dtype": dtype, "shape": shape, "begin": entry.begin}
            file = entry.file.name if entry is not None else tensors[name]["file"]
            if header != manifest or (known and known["file"] != file):
                self.add(file, name, f"is {header} by its header, {manifest} by the manifest")

    def _check_config(self) -> None:
        try:
            config = read_config(self.folder)
            architectures = config.get("architectures")
            architectures = architectures if isinstance(architectures, list) else []
            for name in filter(_WRAPPERS.search, map(str, architectures)):
                self.add("config.json", None, f"architectures names {name}, a wrapper of training")
            for reference in _modules(config.get("auto_map")):
                if not (self.folder / f"{reference}.py").is_file():
                    self.add(
                        "config.json", None, f"auto_map names {reference}.py, which is not here"
                    )
            self.model = build_on_meta(ModelConfig(name_or_path=str(self.folder), init="random"))
        except (ToolkitError, OSError) as error:
            self.add("config.json", None, str(error))
            return
        if (own := type(self.model).__name__) not in architectures:
            what = f"architectures is {config.get('architectures')}, without {own}"
            self.add("config.json", None, what)
        # A reader casts to the config's dtype: it must be the one that was asked for.
        known, asked = config.get("dtype", config.get("torch_dtype")), self.origin().get("dtype")
        floating = any(entry.dtype.is_floating_point for entry in self.entries.values())
        if floating and asked not in (None, "auto", known):
            self.add("config.json", None, f"dtype is {known}, the export was asked for {asked}")
        self.check_dtypes()

    def check_dtypes(self) -> None:
        """Compare the tensors' dtypes with the one that the export was asked for."""
        asked = self.origin().get("dtype")
        for name, entry in self.entries.items():
            dtype = str(entry.dtype).removeprefix("torch.")
            if entry.dtype.is_floating_point and asked not in (None, "auto", dtype):
                self.add(entry.file.name, name, f"is {dtype}, the export was asked for {asked}")

    def _check_model(self, model: PreTrainedModel) -> None:
        """Compare the tensors with what the config describes, as transformers loads them."""
        files = {entry.file.name for entry in self.entries.values()}
        where = files.pop() if len(files) == 1 else INDEX_FILE
        state = model.state_dict()
        for name, entry in self.entries.items():
            if name in state and tuple(state[name].shape) != entry.shape:
                shapes = f"{list(entry.shape)}, config.json describes {list(state[name].shape)}"
                self.add(entry.file.name, name, f"has shape {shapes}")
        for kind, names in misfits(model, self.entries).items():
            for name in names:
                plain = name.partition(" (")[0]
                known = self.entries.get(plain)
                # Shapes under the model's own names are reported above, with both sides.
                if kind != "of another shape" or plain not in state or known is None:
                    self.add(known.file.name if known else where, plain, f"is {kind}: {name}")
        self._check_ties(model)

    def _check_ties(self, model: PreTrainedModel) -> None:
        """Report tied parameters that are stored more than once."""
        stored: dict[str, str] = {}
        first_name = tied_names(model)
        for name in (name for name in model.state_dict() if name in self.entries):
            first = stored.setdefault(first_name.get(name, name), name)
            if first != name:
                left, right = self.entries[first], self.entries[name]
                same = left.shape == right.shape and left.dtype == right.dtype
                differs = not same or first_difference(in_file(left), in_file(right))[0]
                what = "and they differ" if differs else "which is stored twice"
                self.add(right.file.name, name, f"is tied to {first}, {what}")

    # ----------------------------------------------------------------------------------------------

    def compare_files(
        self, source: Source, belongs: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Compare tokenizer, code and other files with those that the checkpoint carries."""
        expected = {n: c for n, c in asset_files(source.hf).items() if belongs(n)}
        for name in sorted(expected.keys() | asset_files(self.folder).keys()):
            if name not in expected:
                self.add(name, None, "is not with the checkpoint")
            elif not (self.folder / name).is_file():
                self.add(name, None, "is missing, and is with the checkpoint")
            elif (self.folder / name).read_bytes() != expected[name]:
                self.add(name, None, f"is not that of the checkpoint ({source.hf / name})")

    def compare_assets(self, source: Source) -> None:
        """Compare config, tokenizer and code with those that the checkpoint carries."""
        self.compare_files(source)
        try:
            theirs, ours = read_config(source.hf), read_config(self.folder)
        except ModelError as error:
            self.add("config.json", None, f"cannot be compared: {error}")
            return
        base = [str(a) for a in theirs.get("architectures") or []]
        for key in sorted({**theirs, **ours}.keys() - set(_DTYPE_KEYS)):
            before, now = _without_dtype(theirs.get(key)), _without_dtype(ours.get(key))
            if key == "architectures" and (not base or base[0].endswith("Model")):
                continue  # a base model that was trained with a head
            if before != now:
                what = f"was {before!r}, is {now!r}" if key in theirs else "was not there before"
                self.add("config.json", None, f"{key} {what}")

    def prove(self, source: Source) -> None:
        """Compare every value with the checkpoint."""
        if self.model is None or not self.entries:
            return  # the reason is a finding
        try:
            prove_checkpoint(Proof(self.model, self.entries, self.findings), source)
        except ExportError as error:
            self.add("", None, str(error))

    def compare_logits(self, source: Source | None) -> None:
        """Load the export as its readers do, and compute with it."""
        if self.model is None or not self.entries:
            return
        like = self.model
        found = self.load(lambda: load_export(self.folder, like))
        if found is None:
            return
        loaded, info = found
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            for name in info.get(kind) or ():
                self.add("", str(name), f"is among the {kind} of from_pretrained")
        actual = logits_of(loaded)
        if not bool(actual.isfinite().all()):
            self.add("", None, "computes logits that are not finite")
        elif source is None:
            self.findings.note("loads without missing or unexpected keys, computes finite logits")
        else:
            try:
                expected = logits_of(load_checkpoint(source, loaded))
            except ToolkitError as error:
                self.add("", None, str(error))
                return
            self.compare(actual, expected, noise(loaded, expected))

    def load(self, load: Callable[[], _Loaded]) -> _Loaded | None:
        """Return what `load` returns; None, and a finding, where the export does not load."""
        try:
            return load()
        except Exception as error:  # from_pretrained has no common class of errors
            text = str(error) if isinstance(error, ToolkitError) else repr(error)
            self.add("", None, f"does not load: {text}")
            return None

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, allowed: float, also: str = ""
    ) -> None:
        """Compare the logits of the export with those of the checkpoint."""
        largest = float((actual - expected).abs().max())
        self.findings.report.logits_difference = largest
        if not largest <= allowed:
            what = f"by {largest:.3g}, more than {allowed:.3g}{also}"
            self.add("", None, f"logits differ from the checkpoint's {what}")
        self.findings.note(
            f"logits of export and checkpoint: largest difference {largest:.3g}{also}"
        )


def _entry(file: Path, known: dict[str, Any]) -> TensorEntry:
    """Return where the export's manifest says that a tensor is."""
    shape, dtype = tuple(known["shape"]), DTYPES[known["dtype"]]
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorEntry(file, dtype, shape, known["begin"], nbytes)


def _modules(auto_map: Any) -> Iterator[str]:
    """Yield the modules of this folder that auto_map names."""
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:
                yield reference.partition(".")[0]


def _without_dtype(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in _DTYPE_KEYS}
