"""Verify an exported PEFT folder: its files, its config, and that PEFT reads all of it.

A key that PEFT does not know is left out without a word, and the base answers in the adapter's
name: so every key is compared, and everything is loaded through PEFT.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import (
    PeftLayout,
    fill_without_memory,
    load_with_peft,
    peft_layout,
    read_adapter_config,
)
from toolkit.checkpoint.sources import Source, find_base, is_adapter_asset, read_base_entry
from toolkit.errors import ExportError, ModelError, ToolkitError
from toolkit.formats import ADAPTER_FILE, ADAPTER_WEIGHTS, export_manifest, local_folder, whole
from toolkit.loading import LoadGroup
from toolkit.models import model_on_meta
from toolkit.models.peft_model import ADAPTER, layer_parameters
from toolkit.verify.export import ExportCheck
from toolkit.verify.logits import load_adapted, load_base, logits_of, noise, share_head
from toolkit.verify.proof import Proof

_PREFIX = "base_model.model."
_LOCATION = {"base_model_name_or_path", "revision", "inference_mode"}


class AdapterCheck(ExportCheck):
    """One PEFT folder and what is found in it."""

    verdict = "holds the adapter of"
    single_file = ADAPTER_WEIGHTS
    layout: PeftLayout  # there where `model` is
    base: Path  # where the base's weights are, once they are loaded

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.config: dict[str, Any] = {}
        self.described: dict[str, Any] = {"base": {}}  # what the manifest says of adapter and base

    def read_model(self) -> None:
        described = self.manifest.get("origin", {}).get("adapter")
        if _is_described(described):
            self.described = described
        elif described is not None:
            self.add(export_manifest.FILE, None, "does not describe adapter and base as it should")
        try:
            self.config = read_adapter_config(self.folder)
            if not self.config.get("base_model_name_or_path"):
                self.add(ADAPTER_FILE, None, "names no base model (base_model_name_or_path)")
            try:
                base = self._base_on_meta()
            except ToolkitError as error:
                what = f"keys and shapes were not compared with the base: {error}"
                if self.source is not None:  # then nothing was compared with the checkpoint either
                    self.add(ADAPTER_FILE, None, what)
                else:
                    self.findings.note(what)
                return
            self.layout = peft_layout(base, self.config)
            self.model = base
        except ExportError as error:
            self.add(ADAPTER_FILE, None, str(error))

    def _base_on_meta(self) -> PreTrainedModel:
        """Return the base without weights, by the config that the manifest keeps, else its own."""
        content = self.described.get("base_config")
        if content is None:
            return model_on_meta(self._base_folder())
        with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
            Path(folder, "config.json").write_text(json.dumps(content), "utf-8")
            return model_on_meta(Path(folder))

    def _base_folder(self) -> Path:
        """Return where the base is; the Hub is asked only for what the user named."""
        if self.given_base is not None:
            return local_folder(str(self.given_base))
        if not (name := self.config.get("base_model_name_or_path")):
            raise ExportError(f"{ADAPTER_FILE} names no base; give it with --hf_assets")
        try:
            return local_folder(name, self.config.get("revision"), ask=False)
        except ModelError as error:
            raise ExportError(
                f"{error}; give the base's folder or Hub id with --hf_assets"
            ) from error

    def check_tensors(self, model: PreTrainedModel) -> None:
        """Compare keys and shapes with what PEFT makes of the config, then let PEFT load it."""
        state = self.layout.model.state_dict()
        wanted = {key: tuple(state[name].shape) for key, name in self.layout.keys.items()}
        missing = sorted(wanted.keys() - self.entries.keys())
        for key in missing:
            self.add(ADAPTER_WEIGHTS, key, "is missing; PEFT would warn and leave it as it begins")
        for key in sorted(self.entries.keys() - wanted.keys()):
            # It may have been cut, or have been given another prefix.
            near = [k for k in missing if k.endswith(key) or key.endswith(k.removeprefix(_PREFIX))]
            hint = f"; expected was {near[0]}" if near else ""
            what = f"is no key that PEFT reads for this base: it would be left out silently{hint}"
            self.add(ADAPTER_WEIGHTS, key, what)
        self.check_dtypes()
        shapes = {key: entry.shape for key, entry in self.entries.items()}
        for key in wanted.keys() & shapes.keys():
            if wanted[key] != shapes[key]:
                what = (
                    f"has shape {list(shapes[key])}, {ADAPTER_FILE} describes {list(wanted[key])}"
                )
                self.add(ADAPTER_WEIGHTS, key, what)
        if shapes != wanted:
            return
        # Into a base without bytes: every tensor must arrive.
        try:
            loaded = self._load(fill_without_memory(self._base_on_meta()), empty=True).state_dict()
        except ExportError as error:
            self.add("", None, f"does not load: {error}")
            return
        for key, name in self.layout.keys.items():
            tensor, entry = loaded[name], self.entries[key]
            if tensor.is_meta or not torch.equal(whole(entry).to(tensor.dtype), tensor):
                self.add(ADAPTER_WEIGHTS, key, f"does not arrive in {name} when PEFT loads it")

    def _load(self, base: PreTrainedModel, *, empty: bool = False) -> Any:
        """Return `base` with the adapter as PEFT loads it; what PEFT warns of is a finding."""
        model, warned = load_with_peft(base, self.folder, empty=empty)
        for text in warned:
            self.add(ADAPTER_WEIGHTS, None, text)
        return model

    def compare_assets(self, source: Source) -> None:
        self.compare_files(source, is_adapter_asset)
        expected, digest = read_base_entry(source).get("digest"), self._base_digest()
        if digest != expected:
            what = f"says that the base has the digest {digest}, the checkpoint {expected}"
            self.add(export_manifest.FILE, None, what)
        before, now = read_adapter_config(source.hf), self.config
        # The same base may be named by another place.
        for name in sorted({*before, *now} - _LOCATION) if now else ():
            if before.get(name) != now.get(name):
                what = f"is {now.get(name)!r}, with the checkpoint {before.get(name)!r}"
                self.add(ADAPTER_FILE, None, f"{name} {what}")

    def prove(self, model: PreTrainedModel, source: Source) -> None:
        # Names are those of the checkpoint's config.
        layout = peft_layout(model_on_meta(source.hf), read_adapter_config(source.hf))
        keys = layout.keys.items()
        groups = [LoadGroup((key,), name, None) for key, name in keys if key in self.entries]
        proof = Proof(layout.model, self.entries, groups, self.findings)
        proof.run(source, {name: key for key, name in keys})

    def compare_logits(self, like: PreTrainedModel) -> None:
        source = self.source
        known = self._base_digest() if source is None else read_base_entry(source).get("digest")
        if str(known).startswith("random"):
            self.findings.note(
                f"no logits were computed: the base was drawn ({known}), and is in no folder"
            )
        else:
            super().compare_logits(like)

    def load(self, like: PreTrainedModel) -> Any:
        given, digest = self.given_base, self._base_digest()
        self.base = find_base(self.source, given) if self.source else self._base_folder()
        named = None if given is None else str(given)
        if digest is not None and base_digest(self.base, named) != digest:
            raise ExportError(f"{self.base} is not the base that it was trained on: another digest")
        return self._load(load_base(self.base, like))

    def judge(self, loaded: Any, actual: torch.Tensor) -> None:
        share_head(loaded)
        with loaded.disable_adapter():
            plain = logits_of(loaded)
        effect = float((actual - plain).abs().max())
        self.findings.note(f"logits with and without the adapter: largest difference {effect:.3g}")
        if effect == 0.0:
            with _amplified(loaded) as has_moved:
                if has_moved and torch.equal(logits_of(loaded), plain):
                    self.add("", None, "has no effect: the logits are those of the base")
        if self.source is not None:
            # The checkpoint's tensors, put in without PEFT's loading.
            dtype = getattr(torch, str(self.asked_dtype()), None)
            rounded = dtype if isinstance(dtype, torch.dtype) else None
            reference = load_adapted(self.base, self.layout.base, self.source, rounded)
            expected = logits_of(reference)
            self.compare(actual, expected, noise(reference, expected))

    def _base_digest(self) -> str | None:
        return self.described["base"].get("digest")


def _is_described(adapter: Any) -> bool:
    """Return whether a manifest's entry on an adapter, written by anybody, can be read."""
    if not isinstance(adapter, dict) or not isinstance(base := adapter.get("base"), dict):
        return False
    parts = (adapter.get("base_config"), adapter.get("settings"))
    described = all(isinstance(part, dict | None) for part in parts)
    return described and isinstance(base.get("digest"), str | None)


@contextlib.contextmanager
def _amplified(model: nn.Module) -> Iterator[bool]:
    """Let each adapter add what it learned as if its largest value were 1: a difference after
    little training then survives rounding, unless the adapter takes no part in the forward. Gives
    whether any of them is no longer what adds nothing to the base.
    """
    has_moved = False
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            own = layer_parameters(module)  # of each pair of factors the one that begins at zero
            for name in own.keys() & {"lora_B", "lora_embedding_A"}:
                if most := float(own[name].detach().abs().max()):
                    scaling: Any = module.scaling
                    raised = {ADAPTER: scaling[ADAPTER] / most}
                    stack.enter_context(mock.patch.dict(scaling, raised))
                    has_moved = True
        yield has_moved
