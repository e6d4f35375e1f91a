"""Proof that a Hugging Face folder is a base model with an adapter merged in: every value, once.

Owns the comparison, and the arithmetic of a merge written out: W + scale * B A, and DoRA's norm.
Nothing here calls the code that merges, nor PEFT's: names and conversions are taken the way
transformers loads them, from base and export towards the parameters.

[Note: equal, and equal to rounding] What no adapter touches must be the base's, to the bit. A
merged value must be the one computed here. Another machine may add the products of A and B in
another order, so that a sum that lies at the border of two roundings falls to the other side: such
values, and no others, are let pass, and counted in a note.

Memory: the largest adapted tensor and a few of its size in fp32; of tensors that transformers
converts two groups at a time.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import AdapterLayer, PeftLayout
from toolkit.checkpoint.sources import Source, check_whole, parameter_names
from toolkit.errors import ExportError, LoadingError
from toolkit.formats.hf_folder import TensorEntry
from toolkit.formats.tensor_stream import digest, first_difference, in_file, same_values, whole
from toolkit.loading.pretrained import LoadGroup, load_group, load_groups
from toolkit.models.causal_lm import tied_names
from toolkit.verify.export_proof import Add, castable, stored_in

_EPSILON = torch.finfo(torch.float32).eps


class MergeProof:
    """The comparison of one merged export with a base and a checkpoint of adapters."""

    def __init__(
        self,
        source: Source,
        digests: dict[str, str],
        twin: PeftLayout,
        config: dict[str, Any],
        base: dict[str, TensorEntry],
        model: PreTrainedModel,
        entries: dict[str, TensorEntry],
        add: Add,
        advance: Callable[[int], Any],
    ) -> None:
        """Match everything by name.

        Args:
            source: the adapter's checkpoint; `digests` are those of its manifest.
            twin: the adapted model of the checkpoint's config, on meta; `config` is the adapter's.
            base: the base's tensors.
            model: of the export, on meta; `entries` are the export's tensors.

        Raises:
            ExportError: the checkpoint is not whole, or of another adapter.
        """
        self.source, self.digests, self.twin, self.base = source, digests, twin, base
        self.model, self.entries, self.add, self.advance = model, entries, add, advance
        self.rslora = bool(config.get("use_rslora"))
        self.owner = tied_names(model)
        _, self.keys = parameter_names(source, ())
        check_whole(source, self.keys.values())
        lacking = sorted(set(twin.keys.values()) ^ self.keys.keys())
        if lacking:
            raise ExportError(
                f"{lacking[0]} is not in both {source.folder} and the adapter of its config"
            )
        self.rounded = 0
        """Values that are right to rounding only."""
        self.covered: set[str] = set()

    def run(self) -> None:
        """Compare everything; each difference is said."""
        for key in self.keys.values():
            known = self.digests.get(key)
            if known is not None and digest(stored_in(self.source, key), key) != known:
                self.add("", key, "cannot be compared: the checkpoint's does not have its digest")
                return
        theirs = {self._own(g.parameter): g for g in load_groups(self.model, self.base)}
        groups = load_groups(self.model, self.entries)
        untouched = [g for g in groups if not g.converted and self._part(g.parameter) is None]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda g: self._compare_plain(g, theirs), untouched))
        for group in groups:
            if group not in untouched:
                self._compare_group(group, theirs)
        state = [n for n in self.model.state_dict() if self._own(n) == n]
        for name in sorted(set(state) - self.covered):
            self.add("", name, "is not in the export")

    def _own(self, parameter: str) -> str:
        return self.owner.get(parameter, parameter)

    def _part(self, parameter: str) -> AdapterLayer | None:
        parts = self.twin.parts.get(self._own(parameter))
        return parts[0] if parts else None

    def _cover(self, parameter: str, key: str) -> None:
        name = self._own(parameter)
        if name in self.covered:
            self.add(self.entries[key].file.name, key, f"is stored twice, as {name}")
        self.covered.add(name)

    def _compare_plain(self, group: LoadGroup, theirs: dict[str, LoadGroup]) -> None:
        """Compare a tensor that no adapter touches with the base's, a block at a time."""
        key = group.keys[0]
        entry = self.entries[key]
        self._cover(group.parameter, key)
        twin = theirs.get(self._own(group.parameter))
        if twin is None or twin.converted:
            self.add(entry.file.name, key, f"is {group.parameter}, which the base does not hold so")
            return
        before = self.base[twin.keys[0]]
        if before.shape != entry.shape:
            what = f"has shape {list(entry.shape)}, in the base {list(before.shape)}"
            self.add(entry.file.name, key, what)
        elif before.dtype != entry.dtype and not castable(before.dtype, entry.dtype):
            self.add(entry.file.name, key, f"is {entry.dtype}, in the base {before.dtype}")
        else:
            fault, _ = first_difference(in_file(before), in_file(entry))
            if fault is not None:
                self.add(entry.file.name, key, f"is not adapted, and not the base's: {fault}")
        self.advance(entry.nbytes)

    def _compare_group(self, group: LoadGroup, theirs: dict[str, LoadGroup]) -> None:
        """Compare parameters that are adapted, or made of several tensors."""
        key = group.keys[0]
        file = self.entries[key].file.name
        try:
            came = self._read(group, self.entries)
            twin = theirs.get(self._own(group.parameter))
            before = {} if twin is None else self._read(twin, self.base)
        except LoadingError as error:
            self.add(file, key, f"is not loaded by transformers: {error}")
            return
        dtypes = {self.entries[k].dtype for k in group.keys}
        before = {self._own(name): tensor for name, tensor in before.items()}
        for name, tensor in came.items():
            self._cover(name, key)
            fault = self._difference(name, tensor, before.pop(self._own(name), None), dtypes)
            if fault is not None:
                said = f"with its group becomes {name}, which " if group.converted else ""
                self.add(file, key, said + fault)
        self.advance(sum(self.entries[k].nbytes for k in group.keys))

    def _read(self, group: LoadGroup, entries: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
        if group.converted:
            return load_group(self.model, group, entries)
        return {group.parameter: whole(in_file(entries[group.keys[0]]))}

    def _difference(
        self,
        name: str,
        came: torch.Tensor,
        before: torch.Tensor | None,
        dtypes: set[torch.dtype],
    ) -> str | None:
        """Return in what a parameter of the export is not what it should be."""
        part = self._part(name)
        if part is not None and part.kind == "saved":
            before, part = whole(stored_in(self.source, self.keys[part.tensors["saved"]])), None
        if before is None:
            return "is not in the base"
        if before.shape != came.shape:
            return f"has shape {list(came.shape)}, expected {list(before.shape)}"
        if not all(castable(before.dtype, d) or before.dtype == d for d in dtypes):
            return f"is {', '.join(map(str, dtypes))}, expected {before.dtype}"
        wrong = torch.ones(came.shape, dtype=torch.bool)
        for dtype in dtypes:  # of several, each value is rounded to one of them
            expected = before if part is None else self._merged(part, before, dtype, 0)
            wrong &= ~same_values(expected.to(dtype).to(came.dtype), came)
        if part is not None and bool(wrong.any()):
            for dtype in dtypes:
                ends = [self._merged(part, before, dtype, sign) for sign in (-1, 1)]
                low, high = (end.to(dtype).to(came.dtype) for end in ends)
                border = (torch.minimum(low, high) <= came) & (came <= torch.maximum(low, high))
                border &= wrong
                self.rounded += int(border.sum())
                wrong &= ~border
        count = int(wrong.sum())
        if not count:
            return None
        what = "base and adapter give" if part is not None else "the base or the trained module has"
        return f"has {count} of {came.numel()} values that are not those that {what}"

    def _merged(
        self, part: AdapterLayer, weight: torch.Tensor, dtype: torch.dtype, sign: int
    ) -> torch.Tensor:
        """Return base and adapter as one matrix, before its last rounding.

        `sign`: -1, 0 or 1 times what the order of the additions may change.
        """
        a, b = (self._factor(part, role) for role in ("A", "B"))
        weight = weight.to(torch.promote_types(weight.dtype, dtype))
        scale = part.alpha / (math.sqrt(part.rank) if self.rslora else part.rank)
        delta = _product(part, b, a) * scale
        if sign:  # a sum of products, each rounded, in some order
            terms = _product(part, b.abs(), a.abs()) * abs(scale)
            delta += sign * 2 * (part.rank + 2) * _EPSILON * terms
        if "magnitude" not in part.tensors:
            if part.kind in ("experts", "embedding"):  # there PEFT rounds what it adds
                delta = delta.to(weight.dtype)
            return weight + delta
        # DoRA: the matrix has the trained norm, along its output dimension.
        sum_ = weight + delta
        rows = 0 if part.kind == "linear" else 1
        norm = torch.linalg.norm(sum_ if rows == 0 else sum_.T, dim=1).to(sum_.dtype)
        factor = self._factor(part, "magnitude") / norm
        value = factor.view(-1, 1) * sum_ if rows == 0 else factor.view(1, -1) * sum_
        return value + sign * 64 * _EPSILON * value.abs() if sign else value

    def _factor(self, part: AdapterLayer, role: str) -> torch.Tensor:
        return whole(stored_in(self.source, self.keys[part.tensors[role]])).float()


def _product(part: AdapterLayer, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return B A in the orientation of the parameter: [out, in] of a linear layer, [in, out] of a
    Conv1D, [rows, width] of an embedding, and of experts one of the first two each.
    """
    if part.kind != "experts" or part.experts == 1:
        product = b @ a
        return product.T if part.kind in ("transposed", "embedding") else product
    a = a.reshape(part.experts, -1, a.shape[-1])  # [experts, rank, in]
    b = b.reshape(b.shape[0], -1, part.experts)  # [out, rank, experts]
    if part.swapped:
        return torch.einsum("ore,eri->eoi", b, a)
    return torch.einsum("ore,eri->eio", b, a)
