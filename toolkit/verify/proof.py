"""Proof that an exported folder holds the expected values of every parameter.

Names and conversions are taken the way transformers loads them, from the export towards the
parameters: nothing here knows how an export is written, so that it cannot share a mistake with it.
What a checkpoint holds is compared, while it is read, with the sums of live memory in its manifest.

Memory: blocks of 1 MB (or one row) a thread; of tensors that transformers converts one group, and
what is expected of it; of a merge the largest adapted tensor and a few of its size in fp32.

[Note: equal, and equal to rounding] In a merged model what no adapter touches must be the base's,
to the bit. A merged value must be the one that PEFT's own layer computes here. Another machine may
add the products of A and B in another order, and round a sum at a border to the other side: such
values, and no others, pass, and are counted in a note.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import (
    AdapterLayer,
    merge_layer,
    peft_layout,
    read_adapter_config,
    weight_delta,
)
from toolkit.checkpoint.sources import Source, check_complete, map_parameter_names
from toolkit.errors import ExportError, LoadingError
from toolkit.formats import (
    StoredTensor,
    Tensors,
    first_difference,
    read_weights,
    row_sum,
    same_values,
    weight_files,
    whole,
)
from toolkit.loading import LoadGroup, build_base_reader, load_group, plan_load_groups
from toolkit.models import loaded_dtype, model_on_meta, tied_names
from toolkit.verify.findings import Findings

Values = StoredTensor | torch.Tensor
_EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """A stored tensor that a parameter must equal."""

    stored: StoredTensor
    what: str  # the tensor and whose it is, for findings
    sum: int | None = None  # of its rows in live memory, when it was saved

    def fault(self, actual: Values, dtypes: set[torch.dtype]) -> str | None:
        """Return in what a parameter of an export differs; None: in nothing. `dtypes`: of the
        tensors that it is made of: each value is a cast to one of them.
        """
        if fault := unlike(self.stored, tuple(actual.shape), dtypes, self.what):
            return fault
        if isinstance(actual, torch.Tensor):
            count = int(different(whole(self.stored), actual, dtypes).sum())
            values = f"{count} of {actual.numel()} values"
            return self.damage() or (f"differs from {self.what} in {values}" if count else None)
        what, held = first_difference(self.stored, actual)
        return self.damage(held) or (None if what is None else f"is not {self.what}: {what}")

    def damage(self, held: int | None = None) -> str | None:
        """Return what is wrong with the stored tensor itself; `held`: the sum of its rows."""
        if self.sum is None or self.sum == (row_sum(self.stored) if held is None else held):
            return None
        return f"cannot be compared: {self.what} does not have its own sum"


@dataclass
class Proof:
    """The comparison of an export's tensors with what its parameters must be."""

    model: PreTrainedModel  # on meta
    entries: dict[str, StoredTensor]
    groups: list[LoadGroup]  # which tensors make which parameters
    findings: Findings
    expected: dict[str, list[Expected]] = field(default_factory=dict)  # parameter -> what it equals

    def __post_init__(self) -> None:
        self._first_name, self._held = tied_names(self.model), set[str]()

    def own(self, parameter: str) -> str:
        """Return the first name of a parameter."""
        return self._first_name.get(parameter, parameter)

    def expect(self, source: Source) -> None:
        """Expect the weights of a checkpoint."""
        for name, expected in expected_of(source, self.model.state_dict()).items():
            self.expected.setdefault(self.own(name), []).append(expected)

    def run(self, source: Source, names: Mapping[str, str] | None = None) -> None:
        """Compare every tensor of the export with what it must be, and look for what is missing.

        `names`: parameter -> its name in the export, where that is another one. ToolkitError where
        the checkpoint is not whole.
        """
        self.expect(source)
        groups = {group.keys[0]: group for group in self.groups}
        sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for key, group in groups.items():
            is_computed = group.converted or self.is_computed(self.own(group.parameter))
            sizes[is_computed][key] = sum(self.entries[k].nbytes for k in group.keys)
        self.findings.each(lambda key: self._compare(groups[key]), sizes[False])
        self.findings.each(lambda key: self._compare(groups[key]), sizes[True], threads=1)
        files = {entry.file.name for entry in self.entries.values()}
        for parameter in self.expected.keys() - self._held:
            file = min(files) if len(files) == 1 else ""
            name = (names or {}).get(parameter, parameter)
            self.findings.add(file, name, "is not in the export")

    def is_computed(self, parameter: str) -> bool:
        """Return whether what a parameter must be is in no file."""
        return False

    def read(self, group: LoadGroup) -> Mapping[str, Values]:
        """Return the parameters that transformers makes of a group of the export."""
        if group.converted:
            return load_group(self.model, group, self.entries)
        return {group.parameter: self.entries[group.keys[0]]}

    def fault(self, parameter: str, actual: Values, dtypes: set[torch.dtype]) -> str | None:
        """Return in what a parameter of the export is not what it must be; see `Expected`."""
        faults = (expected.fault(actual, dtypes) for expected in self.expected[parameter])
        return next(filter(None, faults), None)

    def _compare(self, group: LoadGroup) -> None:
        key, members = group.keys[0], [self.entries[k] for k in group.keys]
        file, dtypes = members[0].file.name, {entry.dtype for entry in members}
        try:
            for name, actual in self.read(group).items():
                own = self.own(name)
                self._held.add(own)
                if own not in self.expected:
                    self.findings.add(file, key, f"is {own}, which is not in the checkpoint")
                elif fault := self.fault(own, actual, dtypes):
                    becomes = f"with its group becomes {name}, which " if group.converted else ""
                    self.findings.add(file, key, becomes + fault)
        except LoadingError as error:
            self.findings.add(file, key, f"is not loaded by transformers: {error}")


@dataclass(kw_only=True)
class MergeProof(Proof):
    """The comparison of one merged export with a base and a checkpoint of adapters."""

    folder: Path  # of the base
    rounded: int = 0  # values that are right to rounding only

    def expect(self, source: Source) -> None:
        self.layout = peft_layout(model_on_meta(source.hf), read_adapter_config(source.hf))
        self.trained = expected_of(source)
        if odd := sorted(set(self.layout.keys.values()) ^ self.trained.keys()):
            raise ExportError(f"{odd[0]} is not in both {source.folder} and its adapter's config")
        for expected in self.trained.values():
            if fault := expected.damage():
                raise ExportError(fault)
        self.base = read_weights(weight_files(self.folder))
        self.reader = build_base_reader(self.folder, self.model)
        self.base_groups = {
            self.own(g.parameter): g for g in plan_load_groups(self.reader, self.base)
        }
        for name in filter(lambda name: self.own(name) == name, self.model.state_dict()):
            layer, group = self._layer(name), self.base_groups.get(name)
            self.expected[name] = []
            if layer is not None and layer.kind == "saved":
                self.expected[name] = [self.trained[layer.tensors["saved"]]]
            elif layer is None and group is not None and not group.converted:
                entry = self.base[group.keys[0]]
                self.expected[name] = [Expected(entry, f"{group.keys[0]} of the base")]

    def _layer(self, parameter: str) -> AdapterLayer | None:
        layers = self.layout.parts.get(parameter)
        return layers[0] if layers else None

    def is_computed(self, parameter: str) -> bool:
        return self.expected.get(parameter) == []

    def read(self, group: LoadGroup) -> Mapping[str, Values]:
        """Return the parameters of a group of the export; keep those of the base for `fault`."""
        own = self.own(group.parameter)
        if group.converted or self.is_computed(own):
            of_base = self.base_groups.get(own)
            found = {} if of_base is None else load_group(self.reader, of_base, self.base)
            self._weights = {self.own(name): tensor for name, tensor in found.items()}
        return super().read(group)

    def fault(self, parameter: str, actual: Values, dtypes: set[torch.dtype]) -> str | None:
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
                wide = weight.to(loaded_dtype(self.model, parameter, weight.dtype, dtype))
                value = merge_layer(self.layout, layer, wide.clone(), factors)
                wrong &= different(value, actual, {dtype})
                if bool(wrong.any()):
                    ends = self._bounds(layer, wide, factors)
                    low, high = (end.to(dtype).to(actual.dtype) for end in ends)
                    border = wrong & (low <= actual) & (actual <= high)
                    self.rounded += int(border.sum())
                    wrong &= ~border
        count = int(wrong.sum())
        whose = "the base has" if layer is None else "base and adapter give"
        values = f"{count} of {actual.numel()} values"
        return f"has {values} that are not those that {whose}" if count else None

    def _bounds(
        self, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least and the most that another order of the additions gives, before it is
        rounded; see the note above.
        """
        magnitude = {r: t.abs() for r, t in factors.items() if r != "magnitude"}
        spread = weight_delta(self.layout, layer, magnitude).abs()
        spread *= 2 * (layer.rank + 2) * _EPSILON
        if "magnitude" in factors:
            value = merge_layer(self.layout, layer, weight.float(), factors)
            spread = 2 * spread + 64 * _EPSILON * value.abs()
            return value - spread, value + spread
        delta = weight_delta(self.layout, layer, factors)
        low, high = delta - spread, delta + spread
        if layer.kind in ("experts", "embedding"):  # there PEFT rounds what it adds
            low, high = low.to(weight.dtype), high.to(weight.dtype)
        return weight + low, weight + high


def expected_of(source: Source, names: Iterable[str] = ()) -> dict[str, Expected]:
    """Return parameter -> its tensor in a checkpoint; ExportError where one is not whole."""
    _, keys = map_parameter_names(source, names)
    check_complete(source, keys.values())
    known = source.sums()
    return {
        name: Expected(source.stored(key), f"{key} of the checkpoint", known.get(key))
        for name, key in keys.items()
    }


def unlike(
    expected: Values, shape: tuple[int, ...], dtypes: set[torch.dtype], what: str
) -> str | None:
    """Return why a tensor of `shape` and `dtypes` cannot be `expected`, cast: None where it can."""
    if tuple(expected.shape) != shape:
        return f"has shape {list(shape)}, {what} {list(expected.shape)}"
    others = dtypes - {expected.dtype}
    if all(dtype.is_floating_point for dtype in (*others, expected.dtype)) or not others:
        return None
    return f"is {' and '.join(map(str, others))}, {what} {expected.dtype}"


def different(value: torch.Tensor, actual: torch.Tensor, dtypes: set[torch.dtype]) -> torch.Tensor:
    """Return which elements of `actual` are not those of `value` cast to any of `dtypes`."""
    wrong = torch.ones(actual.shape, dtype=torch.bool)
    for dtype in dtypes:
        wrong &= ~same_values(value.to(dtype).to(actual.dtype), actual)
    return wrong
