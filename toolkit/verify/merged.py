"""Whether a Hugging Face folder is a base model with an adapter merged in, and computes like both.

[Note: equal, and equal to rounding] What no adapter touches must be the base's, to the bit. A
merged value must be the one that PEFT's own layer computes here. Another machine may add the
products of A and B in another order, and round a sum at a border to the other side: such values,
and no others, pass, and are counted in a note.

Memory: the largest adapted tensor and a few of its size in fp32; of tensors that transformers
converts two groups at a time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import (
    AdapterLayer,
    merge_layer,
    peft_layout,
    read_config,
    weight_delta,
)
from toolkit.adapters.switch import without_adapters
from toolkit.checkpoint.sources import Source, find_base
from toolkit.errors import ExportError
from toolkit.formats import StoredTensor, in_file, read_weights, weight_files, whole
from toolkit.loading import LoadGroup, load_group, load_groups
from toolkit.verify.export import ExportCheck
from toolkit.verify.findings import Findings
from toolkit.verify.logits import load_base, logits_of, model_of, noise, with_adapter
from toolkit.verify.proof import Expected, Proof, different, expected_of, unlike

_EPSILON = torch.finfo(torch.float32).eps


class MergedCheck(ExportCheck):
    """One Hugging Face folder that should be a base with an adapter merged in."""

    def __init__(
        self, folder: Path, findings: Findings, source: Source, hf_assets: str | Path | None
    ) -> None:
        super().__init__(folder, findings, source)
        self.adapter, self.base = source, find_base(source, hf_assets)
        self.verdict = f"is {self.base} merged with the adapter of"

    def prove(self, model: PreTrainedModel, source: Source) -> None:
        """Compare every value with base and adapter; ToolkitError where those are not whole."""
        proof = MergeProof(model, self.entries, load_groups(model, self.entries), self.findings)
        proof.expect_merge(source, self.base)
        proof.run()
        if proof.rounded:
            what = "merged values lie at the border of two roundings, and are the other one here"
            self.findings.note(f"{proof.rounded:,} {what}")

    def judge(self, loaded: Any, actual: torch.Tensor) -> None:
        """Compare the logits with those of base and adapter kept apart.

        A merge rounds each weight to the export's dtype, so that they are near, not equal: the
        merged model must be nearer to the adapted one than half of the way from the base to it.
        """
        model = with_adapter(load_base(self.base, loaded), self.adapter)
        expected = logits_of(model)
        with without_adapters(model):
            effect = float((logits_of(model) - expected).abs().max())
        allowed = max(noise(loaded, expected), 0.5 * effect)
        self.compare(actual, expected, allowed, f" (the adapter's own: {effect:.3g})")


class MergeProof(Proof):
    """The comparison of one merged export with a base and a checkpoint of adapters."""

    rounded = 0
    """Values that are right to rounding only."""

    def expect_merge(self, source: Source, folder: Path) -> None:
        """Expect the base in `folder` with the adapter of a checkpoint, matched by name."""
        self.layout = peft_layout(model_of(source.hf), read_config(source.hf))
        self.trained = expected_of(source)
        if odd := sorted(set(self.layout.keys.values()) ^ self.trained.keys()):
            raise ExportError(f"{odd[0]} is not in both {source.folder} and its adapter's config")
        for expected in self.trained.values():
            if fault := expected.damage():
                raise ExportError(fault)
        self.base = read_weights(weight_files(folder))
        self.base_groups = {self.own(g.parameter): g for g in load_groups(self.model, self.base)}
        for name in filter(lambda name: self.own(name) == name, self.model.state_dict()):
            layer, group = self._layer(name), self.base_groups.get(name)
            self.expected[name] = []
            if layer is not None and layer.kind == "saved":
                self.expected[name] = [self.trained[layer.tensors["saved"]]]
            elif layer is None and group is not None and not group.converted:
                entry = self.base[group.keys[0]]
                self.expected[name] = [Expected(in_file(entry), f"{group.keys[0]} of the base")]

    def _layer(self, parameter: str) -> AdapterLayer | None:
        layers = self.layout.parts.get(parameter)
        return layers[0] if layers else None

    def is_computed(self, parameter: str) -> bool:
        return self.expected.get(parameter) == []

    def read(self, group: LoadGroup) -> Mapping[str, StoredTensor | torch.Tensor]:
        """Return the parameters of a group of the export; keep those of the base for `fault`."""
        own = self.own(group.parameter)
        if group.converted or self.is_computed(own):
            of_base = self.base_groups.get(own)
            found = {} if of_base is None else load_group(self.model, of_base, self.base)
            self._weights = {self.own(name): tensor for name, tensor in found.items()}
        return super().read(group)

    def fault(
        self, parameter: str, actual: StoredTensor | torch.Tensor, dtypes: set[torch.dtype]
    ) -> str | None:
        """Return in what a parameter of the export is not base and adapter."""
        if not self.is_computed(parameter):
            return super().fault(parameter, actual, dtypes)
        weight, layer = self._weights.pop(parameter, None), self._layer(parameter)
        if weight is None:
            return f"is {parameter}, which the base does not hold"
        if fault := unlike(weight, tuple(actual.shape), dtypes, "in the base"):
            return fault
        if isinstance(actual, StoredTensor):
            actual = whole(actual)
        wrong = different(weight, actual, dtypes)
        if layer is not None:
            wrong = torch.ones(actual.shape, dtype=torch.bool)
            factors = {r: whole(self.trained[n].stored).float() for r, n in layer.tensors.items()}
            for dtype in dtypes:
                wide = weight.to(torch.promote_types(weight.dtype, dtype))
                value = merge_layer(self.layout, layer, wide.clone(), factors)
                wrong &= different(value, actual, {dtype})
                if bool(wrong.any()):
                    wrong &= ~self._at_border(layer, wide, factors, actual, dtype, wrong)
        count = int(wrong.sum())
        whose = "the base has" if layer is None else "base and adapter give"
        values = f"{count} of {actual.numel()} values"
        return f"has {values} that are not those that {whose}" if count else None

    def _at_border(
        self,
        layer: AdapterLayer,
        weight: torch.Tensor,
        factors: dict[str, torch.Tensor],
        actual: torch.Tensor,
        dtype: torch.dtype,
        wrong: torch.Tensor,
    ) -> torch.Tensor:
        """Return which wrong values another order of the additions gives; see the note above."""
        magnitude = {r: t.abs() for r, t in factors.items() if r != "magnitude"}
        spread = weight_delta(self.layout, layer, magnitude).abs()
        spread *= 2 * (layer.rank + 2) * _EPSILON
        if "magnitude" in factors:
            value = merge_layer(self.layout, layer, weight.float(), factors)
            spread = 2 * spread + 64 * _EPSILON * value.abs()
            low, high = value - spread, value + spread
        else:
            delta = weight_delta(self.layout, layer, factors)
            ends = [delta - spread, delta + spread]
            if layer.kind in ("experts", "embedding"):  # there PEFT rounds what it adds
                ends = [end.to(weight.dtype) for end in ends]
            low, high = weight + ends[0], weight + ends[1]
        low, high = (end.to(dtype).to(actual.dtype) for end in (low, high))
        border = wrong & (torch.minimum(low, high) <= actual) & (actual <= torch.maximum(low, high))
        self.rounded += int(border.sum())
        return border
