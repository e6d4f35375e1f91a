"""Whether an exported PEFT folder is whole, what its config says, and whether PEFT reads it all.

Owns the checks of one such folder: by itself, against a checkpoint of adapters, and by its logits.
A key that PEFT does not know is left out without a word, and the base answers in the adapter's
name: so every key is compared, and everything is loaded through PEFT.
"""

import json
import os
import tempfile
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
from toolkit.checkpoint.sources import Source
from toolkit.config.settings import ModelConfig
from toolkit.errors import ExportError, LoadingError, ModelError, ToolkitError
from toolkit.formats import export_manifest, in_file, local_folder, read_header, whole
from toolkit.models.causal_lm import build_on_meta
from toolkit.verify.export import ExportCheck
from toolkit.verify.findings import Findings
from toolkit.verify.logits import load_base, logits_of, model_of, noise, with_adapter
from toolkit.verify.proof import expected_of

_PREFIX = "base_model.model."
_LOCATION = {"base_model_name_or_path", "revision", "inference_mode"}


class AdapterCheck(ExportCheck):
    """One PEFT folder and what is found in it."""

    def __init__(self, folder: Path, findings: Findings, base: str | Path | None = None) -> None:
        """Take a folder; `base`: folder or Hub id of the base, None: as the folder says."""
        super().__init__(folder, findings)
        self.given_base = base
        self.config: dict[str, Any] = {}
        self.layout: PeftLayout | None = None
        self.described: dict[str, Any] = {}
        """What the manifest says of adapter and base; often empty."""

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
            if not self.config.get("base_model_name_or_path"):
                self.add(CONFIG_FILE, None, "names no base model (base_model_name_or_path)")
            try:
                base = self._base_on_meta()
            except ToolkitError as error:
                self.findings.note(f"keys and shapes were not compared with the base: {error}")
                return
            self.layout = peft_layout(base, self.config)
            self.model = base
        except ExportError as error:
            self.add(CONFIG_FILE, None, str(error))

    def _read_origin(self) -> None:
        """Take what the manifest tells of the adapter; anybody may have written it."""
        described = self.origin().get("adapter")
        if described is None:
            return
        base = described.get("base") if isinstance(described, dict) else None
        if (
            isinstance(base, dict)
            and isinstance(base.get("digest"), str | None)
            and all(isinstance(described.get(n), dict | None) for n in ("base_config", "settings"))
        ):
            self.described = described
        else:
            self.add(export_manifest.FILE, None, "does not describe adapter and base as it should")

    def _base_on_meta(self) -> PreTrainedModel:
        """Return the base without weights, by the config that the manifest keeps, else its own."""
        content = self.described.get("base_config")
        if content is None:
            return build_on_meta(ModelConfig(name_or_path=str(self._base_folder()), init="random"))
        with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
            Path(folder, "config.json").write_text(json.dumps(content), "utf-8")
            return build_on_meta(ModelConfig(name_or_path=folder, init="random"))

    def _base_folder(self) -> Path:
        """Return where the base is. What somebody else's config names is looked for on this machine
        only: the Hub is asked for what the user named.
        """
        if self.given_base is not None:
            return local_folder(str(self.given_base))
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
        assert self.layout is not None
        state = self.layout.model.state_dict()
        wanted = {key: tuple(state[name].shape) for key, name in self.layout.keys.items()}
        missing = sorted(wanted.keys() - self.entries.keys())
        for key in missing:
            self.add(WEIGHTS_FILE, key, "is missing; PEFT would warn and leave it as it begins")
        for key in sorted(self.entries.keys() - wanted.keys()):
            # It may have been cut, or have been given another prefix.
            near = [k for k in missing if k.endswith(key) or key.endswith(k.removeprefix(_PREFIX))]
            hint = f"; expected was {near[0]}" if near else ""
            what = f"is no key that PEFT reads for this base: it would be left out silently{hint}"
            self.add(WEIGHTS_FILE, key, what)
        self.check_dtypes()
        other = [k for k, e in self.entries.items() if wanted.get(k, e.shape) != e.shape]
        for key in other:
            shape = list(self.entries[key].shape)
            what = f"has shape {shape}, {CONFIG_FILE} describes {list(wanted[key])}"
            self.add(WEIGHTS_FILE, key, what)
        if not other and wanted.keys() == self.entries.keys():
            self._read_back()

    def _read_back(self) -> None:
        """Load the folder with PEFT into a base without bytes: every tensor must arrive."""
        assert self.layout is not None
        base = without_storage(self._base_on_meta())
        found = self.load(lambda: read_as_peft(base, self.folder, empty=True))
        if found is None:
            return
        model, warned = found
        for text in warned:
            self.add(WEIGHTS_FILE, None, text)
        state = model.state_dict()
        for key, name in self.layout.keys.items():
            tensor, entry = state[name], self.entries[key]
            if tensor.is_meta or not torch.equal(whole(in_file(entry)).to(tensor.dtype), tensor):
                self.add(WEIGHTS_FILE, key, f"does not arrive in {name} when PEFT loads it")

    # ----------------------------------------------------------------------------------------------

    def compare_assets(self, source: Source) -> None:
        """Compare config, tokenizer and base with those of the checkpoint."""
        self.compare_files(source, travels)
        try:
            before = read_config(source.hf)
        except ExportError as error:
            self.add("", None, f"cannot be compared: {error}")
            return
        expected = base_entry(source).get("digest")
        if (digest := self._base_digest()) != expected:
            what = f"says that the base has the digest {digest}, with the checkpoint it is "
            self.add(export_manifest.FILE, None, f"{what}{expected}")
        # The same base may be named by another place.
        for name in sorted({*before, *self.config} - _LOCATION):
            if self.config and before.get(name) != self.config.get(name):
                what = f"{name} is {self.config.get(name)!r}, with the checkpoint "
                self.add(CONFIG_FILE, None, f"{what}{before.get(name)!r}")

    def prove(self, source: Source) -> None:
        """Compare every value with the checkpoint; names are those of the checkpoint's config."""
        if self.layout is None or not self.entries:
            return  # the reason is a finding
        self.findings.expect(sum(entry.nbytes for entry in self.entries.values()))
        try:
            expected = expected_of(source)
            layout = peft_layout(model_of(source), read_config(source.hf))
        except ToolkitError as error:
            self.add("", None, str(error))
            return
        for key, name in layout.keys.items():
            entry = self.entries.get(key)
            if name not in expected:
                self.add(WEIGHTS_FILE, key, f"is of {name}, which the checkpoint does not hold")
            elif entry is None:
                what = f"is not in the export; the checkpoint has {expected[name].key}"
                self.add(WEIGHTS_FILE, key, what)
            else:
                if fault := expected[name].fault(entry):
                    self.add(WEIGHTS_FILE, key, fault)
                self.findings.advance(entry.nbytes)
        for name in sorted(expected.keys() - set(layout.keys.values())):
            self.add("", expected[name].key, "is not in the export")

    def compare_logits(self, source: Source | None) -> None:
        """Load base and adapter as a reader does, and compute with them.

        The logits must be those of the checkpoint's tensors, and not those of the base.
        """
        if self.layout is None or not self.entries:
            return
        known = self._base_digest() if source is None else base_entry(source).get("digest")
        if str(known).startswith("random"):
            self.findings.note(
                f"no logits were computed: the base was drawn ({known}), and is in no folder"
            )
            return
        found = self.load(lambda: self._load(source))
        if found is None:
            return
        folder, model, warned = found
        for text in warned:
            self.add(WEIGHTS_FILE, None, text)
        actual = logits_of(model)
        if not bool(actual.isfinite().all()):
            self.add("", None, "computes logits that are not finite")
            return
        with without_adapters(model):
            plain = logits_of(model)
        effect = float((actual - plain).abs().max())
        self.findings.note(f"logits with and without the adapter: largest difference {effect:.3g}")
        if effect == 0.0 and has_moved(model):
            with amplified(model):
                stronger = logits_of(model)
            if torch.equal(stronger, plain):
                self.add("", None, "has no effect: the logits are those of the base")
        if source is not None:
            # The checkpoint's tensors, put in without PEFT's loading.
            reference = with_adapter(load_base(folder, self.layout.base), source)
            expected = logits_of(reference)
            self.compare(actual, expected, noise(reference, expected))

    def _load(self, source: Source | None) -> tuple[Path, Any, list[str]]:
        """Return the base's folder, the model as PEFT loads it, and what PEFT warned of."""
        assert self.layout is not None
        folder = self._base_folder() if source is None else find_base(source, self.given_base)
        known, named = (
            self._base_digest(),
            None if self.given_base is None else str(self.given_base),
        )
        if known is not None and base_digest(folder, named) != known:
            raise ExportError(f"{folder} is not the base that it was trained on (another digest)")
        model, warned = read_as_peft(load_base(folder, self.layout.base), self.folder)
        return folder, model, warned

    def _base_digest(self) -> str | None:
        return (self.described.get("base") or {}).get("digest")
