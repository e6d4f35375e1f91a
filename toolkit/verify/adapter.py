"""Verify an exported PEFT folder: its files, its config, and that PEFT reads all of it.

PEFT skips a key that it does not know without a warning, and the base model then answers in the
adapter's name. So every key is compared, and everything is loaded through PEFT.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.adapters.base import base_digest
from toolkit.adapters.peft_folder import (
    PeftLayout,
    build_peft_layout,
    fill_without_memory,
    load_with_peft,
    read_adapter_config,
)
from toolkit.checkpoint.sources import find_base, is_adapter_asset, read_base_entry
from toolkit.errors import ExportError, ModelError, ToolkitError
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    export_manifest,
    local_folder,
    read_tensor,
)
from toolkit.loading import LoadGroup
from toolkit.models import model_on_meta
from toolkit.models.peft_model import ADAPTER, layer_parameters
from toolkit.verify.export import FILE_CHECKS, Checks, Export, check_dtypes, compare_files
from toolkit.verify.full_model import compare_logits
from toolkit.verify.logits import (
    compute_logits,
    copy_head_to_base,
    load_adapted_model,
    load_base,
    rounding_tolerance,
)
from toolkit.verify.proof import Proof

_PREFIX = "base_model.model."
# Settings that may differ: the same base may be named by another place.
_LOCATION = {"base_model_name_or_path", "revision", "inference_mode"}


@dataclass
class AdapterExport(Export):
    """A PEFT folder that is being verified, with the results of earlier checks."""

    weights_file: str = ADAPTER_WEIGHTS
    config: dict[str, Any] = field(default_factory=dict)  # adapter_config.json
    base_config: dict[str, Any] | None = None  # config.json of the base, from the manifest
    base_digest: str | None = None  # of the base's weights, from the manifest
    layout: PeftLayout | None = None  # set if `model` is, which is the base on meta

    def base_on_meta(self) -> PreTrainedModel:
        """Build the base model on meta.

        Its config is that in the manifest, or else that in the folder of the base.

        Raises:
            ExportError: the folder of the base is needed and cannot be found.
        """
        if self.base_config is None:
            return model_on_meta(self.find_base_folder())
        with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
            Path(folder, "config.json").write_text(json.dumps(self.base_config), "utf-8")
            return model_on_meta(Path(folder))

    def find_base_folder(self) -> Path:
        """Find the local folder of the base model.

        If the user named the base, its config is downloaded from the Hub if necessary. If only
        adapter_config.json names it, it must be a folder or in the cache.

        Raises:
            ExportError: the export names no base, or it is not on this machine.
            ModelError: the base that the user named is not found.
        """
        if self.base_location is not None:
            return local_folder(str(self.base_location))
        if not (name := self.config.get("base_model_name_or_path")):
            raise ExportError(f"{ADAPTER_FILE} names no base; give it with --hf_assets")
        try:
            return local_folder(name, self.config.get("revision"), ask=False)
        except ModelError as error:
            raise ExportError(
                f"{error}; give the base's folder or Hub id with --hf_assets"
            ) from error


def read_adapter(export: AdapterExport) -> None:
    """Read adapter_config.json and the manifest's entry on the base into `export`.

    Also builds the base on meta (`export.model`) and the layout of its adapters. Problems become
    findings. If the base is not found and the export has no source, this is only a note. Does
    nothing if `export.is_damaged`.
    """
    if export.is_damaged:
        return
    entry: Any = export.origin.get("adapter")
    if _is_adapter_entry(entry):
        export.base_config = entry.get("base_config")
        export.base_digest = entry["base"].get("digest")
    elif entry is not None:
        export.add(export_manifest.FILE, None, "does not describe adapter and base as it should")
    try:
        export.config = read_adapter_config(export.folder)
        if not export.config.get("base_model_name_or_path"):
            export.add(ADAPTER_FILE, None, "names no base model (base_model_name_or_path)")
        try:
            base = export.base_on_meta()
        except ToolkitError as error:
            problem = f"keys and shapes were not compared with the base: {error}"
            if export.source is None:
                export.findings.note(problem)
            else:  # then nothing is compared with the checkpoint either
                export.add(ADAPTER_FILE, None, problem)
            return
        export.layout = build_peft_layout(base, export.config)
        export.model = base
    except ExportError as error:
        export.add(ADAPTER_FILE, None, str(error))


def _is_adapter_entry(entry: Any) -> bool:
    """Return True if the manifest's entry on an adapter has the expected types."""
    if not isinstance(entry, dict) or not isinstance(base := entry.get("base"), dict):
        return False
    parts = (entry.get("base_config"), entry.get("settings"))
    are_objects = all(isinstance(part, dict | None) for part in parts)
    return are_objects and isinstance(base.get("digest"), str | None)


def check_keys(export: AdapterExport) -> None:
    """Compare keys, shapes and dtypes of the adapter with those that PEFT expects.

    Differences are findings. If keys and shapes agree, PEFT also loads the adapter into a base
    without values, and tensors that do not arrive are findings. Does nothing if adapter or tensors
    could not be read.
    """
    if export.layout is None or not export.entries:
        return
    state = export.layout.model.state_dict()
    expected = {key: tuple(state[name].shape) for key, name in export.layout.keys.items()}
    missing = sorted(expected.keys() - export.entries.keys())
    for key in missing:
        problem = "is missing; PEFT would warn and leave it at its initial values"
        export.add(ADAPTER_WEIGHTS, key, problem)
    for key in sorted(export.entries.keys() - expected.keys()):
        # The key may have been cut, or may have got another prefix.
        near = [k for k in missing if k.endswith(key) or key.endswith(k.removeprefix(_PREFIX))]
        hint = f"; expected was {near[0]}" if near else ""
        problem = f"is no key that PEFT reads for this base: it would be skipped silently{hint}"
        export.add(ADAPTER_WEIGHTS, key, problem)
    check_dtypes(export)
    shapes = {key: entry.shape for key, entry in export.entries.items()}
    for key in expected.keys() & shapes.keys():
        if expected[key] != shapes[key]:
            problem = f"has shape {list(shapes[key])}"
            export.add(
                ADAPTER_WEIGHTS,
                key,
                f"{problem}, {ADAPTER_FILE} describes {list(expected[key])}",
            )
    if shapes == expected:
        _load_into_empty_base(export, export.layout)


def _load_into_empty_base(export: AdapterExport, layout: PeftLayout) -> None:
    """Load the adapter by PEFT into a base without values; lost tensors become findings."""
    try:
        base = fill_without_memory(export.base_on_meta())
        loaded = _load_with_peft(export, base, empty=True).state_dict()
    except ExportError as error:
        export.add("", None, f"does not load: {error}")
        return
    for key, name in layout.keys.items():
        tensor, entry = loaded[name], export.entries[key]
        if tensor.is_meta or not torch.equal(read_tensor(entry).to(tensor.dtype), tensor):
            export.add(ADAPTER_WEIGHTS, key, f"does not arrive in {name} when PEFT loads it")


def _load_with_peft(export: AdapterExport, base: PreTrainedModel, *, empty: bool = False) -> Any:
    """Load the adapter onto `base` with PEFT; return the model.

    Warnings of PEFT become findings. `empty` is True if the base has no values.
    """
    model, warnings = load_with_peft(base, export.folder, empty=empty)
    for text in warnings:
        export.add(ADAPTER_WEIGHTS, None, text)
    return model


def compare_adapter_assets(export: AdapterExport) -> None:
    """Compare config, other files and base digest with those in the checkpoint.

    Differences are findings. The location of the base may differ.
    """
    source = export.source
    assert source is not None
    compare_files(export, source, is_adapter_asset)
    expected_digest = read_base_entry(source).get("digest")
    if export.base_digest != expected_digest:
        problem = (
            f"says that the base has the digest {export.base_digest}, the checkpoint says "
            f"{expected_digest}"
        )
        export.add(export_manifest.FILE, None, problem)
    expected = read_adapter_config(source.hf)
    for name in sorted({*expected, *export.config} - _LOCATION) if export.config else ():
        before, now = expected.get(name), export.config.get(name)
        if before != now:
            export.add(ADAPTER_FILE, None, f"{name} is {now!r}, in the checkpoint {before!r}")


def prove_adapter_weights(export: AdapterExport) -> None:
    """Compare every tensor of the adapter with the checkpoint; differences are findings."""
    source = export.source
    assert source is not None
    # The names are those of the checkpoint's own config.
    layout = build_peft_layout(model_on_meta(source.hf), read_adapter_config(source.hf))
    keys = layout.keys.items()
    groups = [LoadGroup((key,), name, None) for key, name in keys if key in export.entries]
    proof = Proof(layout.model, export.entries, groups, export.findings)
    proof.run(source, {name: key for key, name in keys})


def check_adapter_logits(export: AdapterExport) -> None:
    """Load base and adapter by PEFT, and compare logits with and without the adapter.

    With a source, they are also compared with the logits of the checkpoint's adapter. Findings: the
    adapter does not load, a trained adapter has no effect, the logits are not finite, or they
    differ from the checkpoint's. If the base had random weights, no logits are computed, and a note
    says so.
    """
    source = export.source
    digest = export.base_digest if source is None else read_base_entry(source).get("digest")
    if str(digest).startswith("random"):
        export.findings.note(
            f"no logits were computed: the base was drawn ({digest}), and is in no folder"
        )
        return
    assert export.model is not None
    try:
        folder = find_base(source, export.base_location) if source else export.find_base_folder()
        _check_base(export, folder)
        loaded = _load_with_peft(export, load_base(folder, export.model))
    except Exception as error:  # from_pretrained has no common class of errors
        text = str(error) if isinstance(error, ToolkitError) else repr(error)
        export.add("", None, f"does not load: {text}")
        return
    logits = compute_logits(loaded)
    if source is None and not bool(logits.isfinite().all()):
        export.add("", None, "computes logits that are not finite")
        return
    copy_head_to_base(loaded)
    with loaded.disable_adapter():
        base_logits = compute_logits(loaded)
    effect = float((logits - base_logits).abs().max())
    note = f"logits with and without the adapter: largest difference {effect:.3g}"
    export.findings.note(note)
    if effect == 0.0:
        with _amplified_adapters(loaded) as is_trained:
            if is_trained and torch.equal(compute_logits(loaded), base_logits):
                export.add("", None, "has no effect: the logits are those of the base")
    if source is not None and export.layout is not None:
        # The checkpoint's tensors, put in place without PEFT's loader.
        dtype = getattr(torch, str(export.requested_dtype), None)
        rounded_to = dtype if isinstance(dtype, torch.dtype) else None
        reference = load_adapted_model(folder, export.layout.base, source, rounded_to)
        expected = compute_logits(reference)
        compare_logits(export, logits, expected, rounding_tolerance(reference, expected))


def _check_base(export: AdapterExport, folder: Path) -> None:
    """Raise ExportError if the weights in `folder` do not have the base digest of the manifest.

    Does nothing if the manifest has no digest. Weight files that are missing are downloaded, if the
    manifest names a Hub id. Raises LoadingError if weights cannot be read.
    """
    name = None if export.base_location is None else str(export.base_location)
    if export.base_digest is not None and base_digest(folder, name) != export.base_digest:
        raise ExportError(
            f"{folder} is not the base that the adapter was trained on: its digest differs"
        )


@contextlib.contextmanager
def _amplified_adapters(model: nn.Module) -> Iterator[bool]:
    """Scale up all adapters inside the context, so that even a slightly trained one has an effect.

    One factor of each adapter is initialised with zeros. The adapter is scaled as if the largest
    value of this factor were 1. If the logits still do not change, the forward does not use the
    adapter.

    Yields:
        True if any adapter was trained, so that this factor is no longer zero.
    """
    is_trained = False
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            factors = layer_parameters(module)
            # Of each pair of factors the one that starts at zero.
            for name in factors.keys() & {"lora_B", "lora_embedding_A"}:
                if largest := float(factors[name].detach().abs().max()):
                    scaling: Any = module.scaling
                    amplified = {ADAPTER: scaling[ADAPTER] / largest}
                    stack.enter_context(mock.patch.dict(scaling, amplified))
                    is_trained = True
        yield is_trained


ADAPTER_CHECKS = Checks(
    alone=(*FILE_CHECKS, read_adapter, check_keys),
    assets=compare_adapter_assets,
    weights=prove_adapter_weights,
    logits=check_adapter_logits,
    verdict="holds the adapter of",
)
