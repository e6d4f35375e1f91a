"""Verify an exported Hugging Face folder: its files, its config, its tensors."""

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit import formats
from toolkit.checkpoint.carried import CarriedTensor, find_carried_tensors
from toolkit.checkpoint.commit import step_name
from toolkit.checkpoint.sources import Source, find_base
from toolkit.errors import ExportError, LoadingError, ModelError, ToolkitError
from toolkit.loading import find_misfits, plan_load_groups
from toolkit.models import model_on_meta, tied_names
from toolkit.parsing import read_json
from toolkit.verify.findings import Findings, is_regular
from toolkit.verify.logits import (
    load_adapted,
    load_checkpoint,
    load_export,
    logits_of,
    noise,
    set_buffers,
)
from toolkit.verify.proof import Expected, MergeProof, Proof, different

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_WRAPPERS = re.compile(r"FSDP|FullyShard|DistributedDataParallel|OptimizedModule|PeftModel|Wrapped")
_DTYPE_KEYS = ("dtype", "torch_dtype")


class ExportCheck:
    """One Hugging Face folder, the checkpoint that it should hold, and what is found in it."""

    verdict = "holds the weights of"  # begins the note on a whole export, the checkpoint ends it
    single_file = formats.SINGLE_FILE  # of the weights

    def __init__(
        self, folder: Path, findings: Findings, source: Source | None, base: str | Path | None
    ) -> None:
        self.folder, self.findings, self.add, self.source = folder, findings, findings.add, source
        self.given_base = base  # of adapters: folder or Hub id; None: where the export says
        self.manifest: dict[str, Any] = {}
        self.entries: dict[str, formats.StoredTensor] = {}
        self.carried: dict[str, formats.StoredTensor] = {}  # what no parameter takes
        self.model: PreTrainedModel | None = None  # of the export's config, on meta

    def run(self, logits: bool) -> None:
        """Check the export by itself, against its checkpoint, and what it computes."""
        self.check()
        # Where model or tensors could not be read, the reason is a finding.
        model = self.model if self.entries else None
        try:
            if self.source is not None:
                self.compare_assets(self.source)
                if model is not None:
                    self.prove(model, self.source)
            if logits and model is not None:
                self.compare_logits(model)
        except ToolkitError as error:
            self.add("", None, str(error))
        if not self.findings.report.ok:
            self._tell_of_another_step()
        elif self.source is not None:
            self.findings.note(f"{self.verdict} {self.source.checkpoint or self.source.folder}")

    def _tell_of_another_step(self) -> None:
        """Say first where the export was made of another step than it is compared with."""
        if self.source is None or self.source.checkpoint is None:
            return
        step, compared = self.manifest.get("origin", {}).get("step"), self.source.checkpoint
        of_run = isinstance(step, int) and step >= 0 and compared.name.startswith("step-")
        if of_run and not compared.name.startswith(step_name(step)):
            self.add("", None, f"was made of step {step}, and is compared with {compared}")

    def check(self) -> None:
        """Check names, hashes, headers, index, config, and the model that the config describes."""
        try:
            self.manifest = formats.export_manifest.read(self.folder)
        except ExportError as error:
            self.add(formats.export_manifest.FILE, None, str(error))
        self._check_names()
        if self.manifest and self._hash_files():
            return  # what damaged files say of each other is no news
        self.read_tensors()
        if self.manifest and self.entries:
            self._compare_headers(self.manifest["tensors"])
        self.read_model()
        if self.model is not None and self.entries:
            self.check_tensors(self.model)

    def _check_names(self) -> None:
        """Look for names that an export does not have."""
        known, listed = self.manifest.get("files"), formats.export_manifest.listed(self.folder)
        for name in sorted(os.listdir(self.folder)):
            file = self.folder / name
            weights = name.endswith((*_OTHER_WEIGHTS, ".safetensors", ".index.json"))
            if file.is_symlink() and not formats.is_cached(file):
                self.add(name, None, f"is a link to {os.readlink(file)}")
            elif name not in listed and not weights:
                continue  # of the user, or hidden
            elif not file.is_file():
                self.add(name, None, "is no regular file, and an export has nothing else")
            elif known is not None and name not in known:
                what = "is a weight file" if weights else "is there, and"
                self.add(name, None, f"{what} that the manifest does not know")
            elif known is None and name.endswith(_OTHER_WEIGHTS):
                self.add(name, None, "is a weight file that is not safetensors")
            elif known is None and name.endswith(".index.json") and name != formats.INDEX_FILE:
                self.add(name, None, "is a second index")

    def _hash_files(self) -> bool:
        """Compare every file with the manifest; return whether one is damaged."""
        faults = self.findings.hash_files(self.folder, self.manifest["files"], in_cache=True)
        strange = {name for name, what in faults.items() if self._locate(name, what)}
        if strange and strange == {entry["file"] for entry in self.manifest["tensors"].values()}:
            what = "says of no tensor here what it is: is it the manifest of another export?"
            self.add(formats.export_manifest.FILE, None, what)
        return bool(faults)

    def _locate(self, name: str, what: str) -> bool:
        """Add what is wrong with a file, by tensor; return whether every tensor of it is hit."""
        file, found = self.folder / name, dict[str, str]()
        held = {k: e for k, e in self.manifest["tensors"].items() if e["file"] == name}
        if not is_regular(file, in_cache=True):
            found = dict.fromkeys(held, f"is lost: its file {what}")
            self.add(name, None, what)
        elif held:
            # Where they are is taken from the manifest: the header may be what is damaged.
            parts = []
            for key, known in held.items():
                nbytes = math.prod(known["shape"]) * formats.DTYPES[known["dtype"]].itemsize
                parts.append((key, known["begin"], nbytes, known["xxh3"]))
            found = formats.damaged_parts(file, parts)
            what += "" if found else "; the bytes of its tensors are whole, its header is not"
        for key, damage in found.items() or [(None, what)]:
            self.add(name, key, damage)
        return len(found) == len(held) > 0 and "bytes long" not in what

    def read_tensors(self) -> None:
        """Read headers and index; where they do not agree, no tensor is known."""
        index, single = self.folder / formats.INDEX_FILE, self.single_file
        where = formats.INDEX_FILE if index.is_file() and single == formats.SINGLE_FILE else single
        try:
            if single == formats.SINGLE_FILE:
                files = formats.weight_files(self.folder)
            else:
                files = [formats.plain_file(self.folder, single, LoadingError)]
            used = {file.name for file in files}
            for name in sorted(os.listdir(self.folder)):
                if name.endswith(".safetensors") and name not in used:
                    self.add(name, None, "is a weight file that loaders of this folder do not read")
            for file in files:
                where = file.name
                formats.read_header(file)
            where = formats.INDEX_FILE
            entries = formats.read_weights(files)
            if used != {single}:
                self._check_index(read_json(index, LoadingError), entries)
            elif index.is_file():
                self.add(where, None, f"is there beside {single}: loaders take either")
        except (LoadingError, OSError) as error:
            self.add(where, None, str(error))
            return
        self.entries = entries
        self.findings.report.tensors += len(entries)

    def _check_index(self, index: dict[str, Any], entries: dict[str, formats.StoredTensor]) -> None:
        """Look for what the index leaves out; what it says `read_weights` has compared."""
        for name in sorted(entries.keys() - index["weight_map"].keys()):
            what = f"is in {entries[name].file.name} and not in the index"
            self.add(formats.INDEX_FILE, name, what)
        metadata = index.get("metadata")
        known = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(entry.nbytes for entry in entries.values())
        if known not in (None, total):
            what = f"says total_size {known}, the tensors have {total} bytes"
            self.add(formats.INDEX_FILE, None, what)

    def _compare_headers(self, tensors: dict[str, dict[str, Any]]) -> None:
        describe = formats.export_manifest.describe_tensor
        headers = {name: describe(entry, "") for name, entry in self.entries.items()}
        for name in sorted(tensors.keys() | headers.keys()):
            header, manifest = (
                {k: v for k, v in of.get(name, {}).items() if k != "xxh3"}
                for of in (headers, tensors)
            )
            if header != manifest:
                what = f"is {header or None} by its header, {manifest or None} by the manifest"
                self.add((header or manifest)["file"], name, what)

    def read_model(self) -> None:
        """Check config.json, and build the model that it describes."""
        try:
            config = formats.read_config(self.folder)
            architectures = config.get("architectures") or []
            for name in filter(_WRAPPERS.search, architectures):
                self.add("config.json", None, f"architectures names {name}, a wrapper of training")
            for file in _modules(config.get("auto_map")):
                if not (self.folder / file).is_file():
                    self.add("config.json", None, f"auto_map names {file}, which is not here")
            self.model = model_on_meta(self.folder)
        except (ToolkitError, OSError) as error:
            self.add("config.json", None, str(error))
            return
        own, whole = type(self.model).__name__, formats.assets_of(self.model).whole
        names = {own} if whole is None else {own, whole[0].__name__}
        if not names.intersection(architectures):
            self.add("config.json", None, f"architectures is {architectures}, without {own}")
        # A reader casts to the config's dtype: it must be the one that was asked for.
        self.check_dtypes()
        known, asked = _dtype(config), self.asked_dtype()
        if asked not in (None, known) and self.entries:
            self.add("config.json", None, f"dtype is {known}, the export was asked for {asked}")

    def asked_dtype(self) -> str | None:
        """Return the dtype that the export was asked for, None where each key keeps its own."""
        asked = self.manifest.get("origin", {}).get("dtype")
        return None if asked in (None, "auto") else str(asked)

    def check_dtypes(self) -> None:
        """Compare the tensors' dtypes with the one that was asked for."""
        asked = self.asked_dtype()
        for name, entry in self.entries.items() if asked else ():
            dtype = str(entry.dtype).removeprefix("torch.")
            if entry.dtype.is_floating_point and dtype != asked:
                self.add(entry.file.name, name, f"is {dtype}, the export was asked for {asked}")

    def check_tensors(self, model: PreTrainedModel) -> None:
        """Compare the tensors with what the config describes, as transformers loads them."""
        state = model.state_dict()
        faults = {
            name: f"has shape {list(entry.shape)}, config.json describes {list(state[name].shape)}"
            for name, entry in self.entries.items()
            if name in state and tuple(state[name].shape) != entry.shape
        }
        for kind, names in find_misfits(model, self.entries).items():
            for name in names:
                faults.setdefault(name.partition(" (")[0], f"is {kind}: {name}")
        file_of = {name: entry.file.name for name, entry in self.entries.items()}
        where = min(file_of.values()) if len({*file_of.values()}) == 1 else formats.INDEX_FILE
        for name, what in faults.items():
            self.add(file_of.get(name, where), name, what)
        twice = self.manifest.get("origin", {}).get("stored_twice") or ()
        stored: dict[str, formats.StoredTensor] = {}
        first_name = tied_names(model)
        carried = set(formats.source_keys(model, self.entries).carried)
        groups = plan_load_groups(model, self.entries)
        self.groups = [group for group in groups if not carried.intersection(group.keys)]
        self.carried = {name: self.entries[name] for name in carried}
        for group in self.groups:
            key, entry = group.keys[0], self.entries[group.keys[0]]
            own = first_name.get(group.parameter, group.parameter)
            other = stored.setdefault(own, entry)
            if other is not entry:
                what = f"is {own}, which is stored twice"
                unlike = (other.shape, other.dtype) != (entry.shape, entry.dtype)
                if unlike or formats.first_difference(other, entry)[0]:
                    self.add(entry.file.name, key, f"{what}, and they differ")
                elif key not in twice:
                    self.add(entry.file.name, key, what)

    def compare_assets(self, source: Source) -> None:
        """Compare config, tokenizer and code with those that the checkpoint carries."""
        self.compare_files(source)
        try:
            theirs, ours = formats.read_config(source.hf), formats.read_config(self.folder)
        except ModelError as error:
            self.add("config.json", None, f"cannot be compared: {error}")
            return
        ignored = {*_DTYPE_KEYS}
        if (theirs.get("architectures") or ["Model"])[0].endswith("Model"):
            ignored.add("architectures")  # a base model that was trained with a head
        for key in sorted({**theirs, **ours}.keys() - ignored):
            before, now = _without_dtype(theirs.get(key)), _without_dtype(ours.get(key))
            if before != now:
                what = f"was {before!r}, is {now!r}" if key in theirs else "was not there before"
                self.add("config.json", None, f"{key} {what}")
        held = {str(e.dtype).removeprefix("torch.") for e in self.entries.values()}
        before, now = _dtype(theirs), _dtype(ours)
        # A random start's is that of its weights; of one that was asked for `read_model` speaks.
        if self.asked_dtype() is None and now not in (None, before, *held):
            self.add("config.json", None, f"dtype was {before!r}, is {now!r}: readers cast to it")

    def compare_files(
        self, source: Source, belongs: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Compare tokenizer, code and other files with those of the checkpoint that belong here."""
        theirs = formats.asset_files(source.hf).items()
        expected = {name: content for name, content in theirs if belongs(name)}
        for name in sorted(expected.keys() | formats.asset_files(self.folder).keys()):
            if name not in expected:
                self.add(name, None, "is not with the checkpoint")
            elif not (self.folder / name).is_file():
                self.add(name, None, "is missing, and is with the checkpoint")
            elif (self.folder / name).read_bytes() != expected[name]:
                self.add(name, None, f"is not that of the checkpoint ({source.hf / name})")

    def prove(self, model: PreTrainedModel, source: Source) -> None:
        """Compare every value with the checkpoint, and what it does not hold with the source."""
        Proof(model, self.entries, self.groups, self.findings).run(source)
        self.compare_source(model, source, None)

    def compare_source(
        self,
        model: PreTrainedModel,
        source: Source,
        folder: Path | None,
    ) -> None:
        """Compare the names with those that the run started from, in both directions, and every
        tensor that no parameter takes, to the bit. `folder`: of the source, where it was found.
        """
        saved = formats.HFAssets.load(source.hf)
        known = saved.source
        if known is None:  # a random start
            for name in sorted(self.carried):
                self.add(self.carried[name].file.name, name, "is no parameter of the model")
            return
        said = self.manifest.get("origin", {}).get("left_out") or ()
        left_out = set(said if isinstance(said, list) else ())
        made = {key for group in self.groups for key in group.keys}
        lacking = known.keys() - self.entries.keys() - left_out
        for name in sorted(lacking):
            self.add("", name, "is in the source checkpoint, and not in the export")
        for name in sorted(self.entries.keys() - known.keys() - made):
            self.add(self.entries[name].file.name, name, "is not in the source checkpoint")
        kept = made & known.keys() if self.asked_dtype() is None else ()
        for name in sorted(kept):
            entry, kind = self.entries[name], formats.DTYPES[known[name]]
            if entry.dtype != kind:
                self.add(entry.file.name, name, f"is {entry.dtype}, in the source {kind}")
        if left_out:
            self.findings.note(f"left out, as asked: {formats.told(left_out, known)}")
        if not self.carried:
            return
        try:
            theirs = find_carried_tensors(model, saved, folder)
        except ExportError as error:
            self.findings.note(f"not compared with the source: {error}")
            return
        self.findings.each(
            lambda name: self._compare_carried(name, theirs),
            {name: self.carried[name].nbytes for name in self.carried.keys() & theirs.keys()},
        )

    def _compare_carried(self, name: str, theirs: dict[str, CarriedTensor]) -> None:
        entry, other = self.entries[name], theirs[name]
        unlike = entry.shape != other.shape
        if unlike or (entry.dtype != other.dtype and self.asked_dtype() is None):
            what = f"is {entry.dtype} {list(entry.shape)}, in the source {other.dtype}"
            self.add(entry.file.name, name, f"{what} {list(other.shape)}")
            return
        if other.stored is None:  # of several parts
            wrong = different(other.make(), formats.whole(entry), {entry.dtype})
            if bool(wrong.any()):
                self.add(entry.file.name, name, "is not what the source holds in parts")
            return
        expected = Expected(other.stored, f"{name} of the source")
        if fault := expected.fault(entry, {entry.dtype}):
            self.add(entry.file.name, name, fault)

    def compare_logits(self, like: PreTrainedModel) -> None:
        """Load the export as its readers do, and compute with it."""
        try:
            loaded = self.load(like)
        except Exception as error:  # from_pretrained has no common class of errors
            text = str(error) if isinstance(error, ToolkitError) else repr(error)
            self.add("", None, f"does not load: {text}")
            return
        actual = logits_of(loaded)
        if bool(actual.isfinite().all()) or self.source is not None:
            self.judge(loaded, actual)
        else:
            self.add("", None, "computes logits that are not finite")

    def load(self, like: PreTrainedModel) -> Any:
        """Return what `from_pretrained` makes of the export; keys that it names are findings."""
        loaded, info = load_export(self.folder, like)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            for name in set(info.get(kind) or ()) - self.carried.keys():
                self.add("", str(name), f"is among the {kind} of from_pretrained")
        return loaded

    def judge(self, loaded: Any, actual: torch.Tensor) -> None:
        """Compare the logits of what `load` returned with those of the checkpoint."""
        if self.source is None:
            self.findings.note("loads without missing or unexpected keys, computes finite logits")
            return
        model = load_checkpoint(self.source, loaded)
        if changed := set_buffers(loaded, model):
            self.findings.note(
                f"transformers gives {changed[0]}, which no file holds, other values than the "
                "model's code computes; compared with the latter"
            )
            actual = logits_of(loaded)
        expected = logits_of(model)
        self.compare(actual, expected, noise(loaded, expected))

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, allowed: float, also: str = ""
    ) -> None:
        """Compare logits of export and checkpoint; `also` ends the sentence on them."""
        largest = float((actual - expected).abs().max())
        self.findings.report.logits_difference = largest
        if not largest <= allowed:
            what = f"by {largest:.3g}, more than {allowed:.3g}{also}"
            self.add("", None, f"logits differ from the checkpoint's {what}")
        whose = "logits of export and checkpoint"
        self.findings.note(f"{whose}: largest difference {largest:.3g}{also}")


class MergedCheck(ExportCheck):
    """One Hugging Face folder that should be a base with an adapter merged in."""

    def __init__(
        self, folder: Path, findings: Findings, source: Source, base: str | Path | None
    ) -> None:
        super().__init__(folder, findings, source, base)
        self.adapter, self.base = source, find_base(source, base)
        self.verdict = f"this is {self.base}, merged with the adapter of"

    def prove(self, model: PreTrainedModel, source: Source) -> None:
        proof = MergeProof(model, self.entries, self.groups, self.findings, folder=self.base)
        proof.run(source)
        self.compare_source(model, source, self.base)
        if proof.rounded:
            self.findings.note(
                f"{proof.rounded:,} merged values lie at the border of two roundings, and are the "
                "other one here"
            )

    def judge(self, loaded: Any, actual: torch.Tensor) -> None:
        """Compare the logits with those of base and adapter kept apart.

        A merge rounds each weight to the export's dtype, so that they are near, not equal: the
        merged model must be nearer to the adapted one than half of the way from the base to it, or
        than twice what the adapted one is off in its own dtype. Needs that model in fp32.
        """
        model = load_adapted(self.base, loaded, self.adapter)
        expected = logits_of(model)
        with model.disable_adapter():
            effect = float((logits_of(model) - expected).abs().max())
        rounding = float((logits_of(model.float()) - expected).abs().max())  # of this very model
        allowed = max(noise(loaded, expected), 0.5 * effect, 2 * rounding)
        self.compare(actual, expected, allowed, f" (the adapter's own: {effect:.3g})")


def _modules(auto_map: dict[str, Any] | None) -> Iterator[str]:
    """Yield the files of this folder that auto_map names."""
    for value in (auto_map or {}).values():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference:
                yield f"{reference.partition('.')[0]}.py"


def _dtype(config: dict[str, Any]) -> Any:
    said = config.get("dtype", config.get("torch_dtype"))
    return said.removeprefix("torch.") if isinstance(said, str) else said


def _without_dtype(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in _DTYPE_KEYS}
