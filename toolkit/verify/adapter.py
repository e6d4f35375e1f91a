"""Whether an exported PEFT folder is whole, what its config says, and whether PEFT reads it all.

Owns the checks of one such folder: by itself, against a checkpoint of adapters, and by its logits.
What it has in common with every export (manifest, files, headers) is `export_check`'s; names are
PEFT's. A key that PEFT does not know is left out without a word, and the base answers in the
adapter's name: so every key is compared, and everything is loaded through PEFT.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftLayout,
    peft_layout,
    read_as_peft,
    read_config,
    without_storage,
)
from toolkit.adapters.switch import amplified, has_moved, without_adapters
from toolkit.checkpoint.adapter import base_entry, find_base, travels
from toolkit.checkpoint.sources import Source, check_whole, parameter_names
from toolkit.config.settings import ModelConfig
from toolkit.errors import ExportError, LoadingError, ModelError, ToolkitError
from toolkit.formats import manifest as export_manifest
from toolkit.formats.hf_folder import asset_files, local_folder, read_header
from toolkit.formats.tensor_stream import in_file, whole
from toolkit.models.causal_lm import build_on_meta
from toolkit.verify.export import ExportCheck, digests_of, noise
from toolkit.verify.export_proof import difference, logits_of
from toolkit.verify.findings import Findings
from toolkit.verify.merged import load_base, model_of, with_adapter

_PREFIX = "base_model.model."
_PLACE = {"base_model_name_or_path", "revision", "inference_mode"}


class AdapterCheck(ExportCheck):
    """One PEFT folder and what is found in it."""

    def __init__(self, folder: Path, findings: Findings, base: str | Path | None = None) -> None:
        """Take a folder; `base`: folder or Hub id of the base, None: as the folder says."""
        super().__init__(folder, findings)
        self.elsewhere = base
        self.config: dict[str, Any] = {}
        self.twin: PeftLayout | None = None
        self.told: dict[str, Any] = {}
        """What the manifest says of adapter and base, of the expected types; often empty."""

    def _read_weights(self) -> None:
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".safetensors") and name != WEIGHTS_FILE:
                self.add(name, None, f"is a weight file; PEFT reads {WEIGHTS_FILE} only")
        file = self.folder / WEIGHTS_FILE
        if not file.is_file():
            self.add(WEIGHTS_FILE, None, "is missing")
            return
        try:
            self.entries = read_header(file)
        except (LoadingError, OSError) as error:
            self.add(WEIGHTS_FILE, None, str(error))
        self.findings.report.tensors += len(self.entries)

    def _check_config(self) -> None:
        self._read_origin()
        try:
            self.config = read_config(self.folder)
        except ExportError as error:
            self.add(CONFIG_FILE, None, str(error))
            return
        if not self.config.get("base_model_name_or_path"):
            self.add(CONFIG_FILE, None, "names no base model (base_model_name_or_path)")
        try:
            base = self._base_on_meta()
        except ToolkitError as error:
            self.findings.report.notes.append(
                f"keys and shapes were not compared with the base model: {error}"
            )
            return
        try:
            self.twin = peft_layout(base, self.config)
        except ExportError as error:
            self.add(CONFIG_FILE, None, str(error))
            return
        self.model = base

    def _read_origin(self) -> None:
        """Take what the manifest tells of the adapter; anybody may have written it."""
        said = ((self.manifest or {}).get("origin") or {}).get("adapter")
        if said is None:
            return
        base = said.get("base") if isinstance(said, dict) else None
        if (
            not isinstance(base, dict)
            or not isinstance(base.get("digest"), str | None)
            or not isinstance(said.get("base_config"), dict | None)
            or not isinstance(said.get("settings"), dict | None)
        ):
            self.add(
                export_manifest.FILE, None, "does not say of the adapter what one of ours says"
            )
            return
        self.told = said

    def _base_on_meta(self) -> PreTrainedModel:
        """Return the base without weights: of the config that the manifest keeps, else of the
        base's folder.
        """
        content = self.told.get("base_config")
        if content is None:
            return build_on_meta(ModelConfig(name_or_path=str(self._base_folder()), init="random"))
        with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
            Path(folder, "config.json").write_text(json.dumps(content), "utf-8")
            return build_on_meta(ModelConfig(name_or_path=folder, init="random"))

    def _base_folder(self) -> Path:
        """Return where the base is. What somebody else's config names is looked for on this machine
        only: the Hub is asked for what the user named.
        """
        if self.elsewhere is not None:
            return local_folder(str(self.elsewhere))
        name = self.config.get("base_model_name_or_path")
        if not name:
            raise ExportError(f"{CONFIG_FILE} names no base; give it with --hf_assets")
        try:
            return local_folder(name, self.config.get("revision"), ask=False)
        except ModelError as error:
            raise ExportError(
                f"{error}; give the base's folder or Hub id with --hf_assets"
            ) from error

    def _check_model(self, model: PreTrainedModel) -> None:
        """Compare keys and shapes with what PEFT makes of the config, then let PEFT load it."""
        assert self.twin is not None
        state = self.twin.model.state_dict()
        wanted = {key: tuple(state[name].shape) for key, name in self.twin.keys.items()}
        missing = sorted(wanted.keys() - self.entries.keys())
        alike = dict(_endings(missing))
        for key in missing:
            self.add(WEIGHTS_FILE, key, "is missing; PEFT would warn and leave it as it begins")
        for key in sorted(self.entries.keys() - wanted.keys()):
            parts = key.split(".")
            ends = (".".join(parts[i:]) for i in range(len(parts)))
            near = next((alike[end] for end in ends if end in alike), None)
            hint = f"; expected was {near}" if near else ""
            what = f"is no key that PEFT reads for this base: it would be left out silently{hint}"
            self.add(WEIGHTS_FILE, key, what)
        same = True
        asked = ((self.manifest or {}).get("origin") or {}).get("dtype") or "auto"
        for key, entry in self.entries.items():
            dtype = str(entry.dtype).removeprefix("torch.")
            if entry.dtype.is_floating_point and asked not in ("auto", dtype):
                self.add(WEIGHTS_FILE, key, f"is {dtype}, the export was asked for {asked}")
        for key in sorted(wanted.keys() & self.entries.keys()):
            shape = self.entries[key].shape
            if shape != wanted[key]:
                same = False
                what = f"has shape {list(shape)}, {CONFIG_FILE} describes {list(wanted[key])}"
                self.add(WEIGHTS_FILE, key, what)
        if same and wanted.keys() == self.entries.keys():
            self._read_back()

    def _read_back(self) -> None:
        """Load the folder with PEFT into a base without bytes: every tensor must arrive."""
        assert self.twin is not None
        try:
            model, said = read_as_peft(
                without_storage(self._base_on_meta()), self.folder, empty=True
            )
        except ToolkitError as error:
            self.add("", None, str(error))
            return
        for text in said:
            self.add(WEIGHTS_FILE, None, text)
        there = model.state_dict()
        for key, name in self.twin.keys.items():
            tensor, entry = there[name], self.entries[key]
            if tensor.is_meta or not torch.equal(whole(in_file(entry)).to(tensor.dtype), tensor):
                self.add(WEIGHTS_FILE, key, f"does not arrive in {name} when PEFT loads it")

    # ----------------------------------------------------------------------------------------------

    def compare_assets(self, source: Source) -> None:
        """Compare config, tokenizer and base with those of the checkpoint."""
        wanted = {n: c for n, c in asset_files(source.hf).items() if travels(n)}
        ours = asset_files(self.folder)
        for name in sorted(wanted.keys() | ours.keys()):
            if name not in ours:
                self.add(name, None, "is missing, and is with the checkpoint")
            elif name not in wanted:
                self.add(name, None, "is not with the checkpoint")
            elif ours[name] != wanted[name]:
                self.add(name, None, f"is not that of the checkpoint ({source.hf / name})")
        try:
            before = read_config(source.hf)
        except ExportError as error:
            self.add("", None, f"cannot be compared: {error}")
            return
        entry = base_entry(source)
        if (digest := self._known_digest()) != entry.get("digest"):
            what = f"says that the base has the digest {digest}, with the checkpoint it is "
            self.add(export_manifest.FILE, None, f"{what}{entry.get('digest')}")
        # The same base may be named by another place.
        for name in sorted({*before, *self.config} - _PLACE):
            if self.config and before.get(name) != self.config.get(name):
                what = f"{name} is {self.config.get(name)!r}, with the checkpoint "
                self.add(CONFIG_FILE, None, f"{what}{before.get(name)!r}")

    def prove(self, source: Source) -> None:
        """Compare every value with the checkpoint; names are those of the checkpoint's config."""
        if self.twin is None or not self.entries:
            return  # said before
        self.findings.expect(sum(entry.nbytes for entry in self.entries.values()))
        digests = digests_of(source)
        _, keys = parameter_names(source, ())
        try:
            check_whole(source, keys.values())
            twin = peft_layout(model_of(source), read_config(source.hf))
        except ToolkitError as error:
            self.add("", None, str(error))
            return
        for key, name in twin.keys.items():
            entry, stored = self.entries.get(key), keys.get(name)
            if stored is None:
                self.add(WEIGHTS_FILE, key, f"is of {name}, which the checkpoint does not hold")
            elif entry is None:
                self.add(WEIGHTS_FILE, key, f"is not in the export; the checkpoint has {stored}")
            else:
                what = difference(source, digests, stored, entry)
                if what is not None:
                    self.add(WEIGHTS_FILE, key, what)
                self.findings.advance(entry.nbytes)
        for name in sorted(keys.keys() - set(twin.keys.values())):
            self.add("", keys[name], "is not in the export")

    def compare_adapted(self, source: Source | None) -> None:
        """Load base and adapter as a reader does, and compute with them.

        The logits must be those of the checkpoint's tensors, and not those of the base.
        """
        if self.twin is None or not self.entries:
            return
        notes = self.findings.report.notes
        known = self._known_digest() if source is None else base_entry(source).get("digest")
        if str(known).startswith("random"):
            notes.append(
                f"no logits were computed: the base was drawn ({known}), and is in no folder"
            )
            return
        try:
            folder = self._base_folder() if source is None else find_base(source, self.elsewhere)
            self._check_base(folder)
            base = load_base(folder, self.twin.base)
            model, said = read_as_peft(base, self.folder)
        except (ToolkitError, ModelError) as error:
            self.add("", None, f"cannot be computed with: {error}")
            return
        except Exception as error:  # from_pretrained has no common class of errors
            self.add("", None, f"the base does not load: {type(error).__name__}: {error}")
            return
        for text in said:
            self.add(WEIGHTS_FILE, None, text)
        ours = logits_of(model)
        if not bool(ours.isfinite().all()):
            self.add("", None, "computes logits that are not finite")
            return
        with without_adapters(model):
            plain = logits_of(model)
        effect = float((ours - plain).abs().max())
        notes.append(f"logits with and without the adapter: largest difference {effect:.3g}")
        if effect == 0.0 and has_moved(model):
            with amplified(model):
                stronger = logits_of(model)
            if torch.equal(stronger, plain):
                self.add("", None, "has no effect: the logits are those of the base")
        if source is not None:
            self._compare_with(source, folder, ours)

    def _check_base(self, folder: Path) -> None:
        """Refuse another base than the manifest says the adapter was trained on."""
        known = self._known_digest()
        named = None if self.elsewhere is None else str(self.elsewhere)
        if known is not None and base_digest(folder, named) != known:
            raise ExportError(f"{folder} is not the base that it was trained on (another digest)")

    def _known_digest(self) -> str | None:
        return (self.told.get("base") or {}).get("digest")

    def _compare_with(self, source: Source, folder: Path, ours: torch.Tensor) -> None:
        """Compare logits with those of the checkpoint's tensors, put in without PEFT's loading."""
        assert self.twin is not None
        base = load_base(folder, self.twin.base)
        twin = with_adapter(base, source)
        theirs = logits_of(twin)
        largest = float((ours - theirs).abs().max())
        self.findings.report.logits_difference = largest
        allowed = noise(twin, theirs)
        if not largest <= allowed:
            what = f"logits differ from the checkpoint's by {largest:.3g}, more than {allowed:.3g}"
            self.add("", None, what)
        self.findings.report.notes.append(
            f"logits of export and checkpoint: largest difference {largest:.3g}"
        )


def _endings(keys: list[str]) -> Iterator[tuple[str, str]]:
    """Yield what a key may have been cut to or given another prefix before, and the key."""
    for key in keys:
        inner = key.removeprefix(_PREFIX)
        yield inner, key
        yield inner.removeprefix("model."), key
        yield key, key
