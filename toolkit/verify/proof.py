"""Prove that an exported folder holds the expected value of every parameter.

Names and conversions follow transformers' loader, from the export towards the parameters. No code
here knows how an export is written, so it cannot share a mistake with the writer. A checkpoint is
compared with the sums of live memory in its manifest while it is read.

Memory: blocks of 1 MB, or one row, for each thread; one group of tensors that transformers
converts, and its expected value; for a merge the largest adapted tensor and a few of its size in
fp32.

[Note: equal, and equal to rounding] In a merged model, a tensor without an adapter must be bitwise
identical to the base's. A merged value must be the one that PEFT's own layer computes here. Another
machine may add the products of A and B in another order, and round a sum at a border to the other
side. Such values, and no others, pass; a note counts them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import (
    AdapterLayer,
    build_peft_layout,
    compute_weight_delta,
    merge_layer,
    read_adapter_config,
)
from toolkit.checkpoint.sources import Source, check_complete, map_parameter_names
from toolkit.errors import ExportError, LoadingError
from toolkit.formats import (
    StoredTensor,
    Tensors,
    compute_row_sum,
    first_difference,
    read_tensor,
    read_weights,
    same_values,
    weight_files,
)
from toolkit.loading import LoadGroup, build_base_reader, load_group, plan_load_groups
from toolkit.models import loaded_dtype, model_on_meta, tied_names
from toolkit.verify.findings import Findings

Values = StoredTensor | torch.Tensor
_EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """A stored tensor that one parameter of the export must equal."""

    stored: StoredTensor
    description: str  # such as "model.norm.weight of the checkpoint", for findings
    sum: int | None = None  # of its rows in live memory, when it was saved

    def describe_difference(self, actual: Values, dtypes: set[torch.dtype]) -> str | None:
        """Describe how a parameter of an export differs from this tensor; None if it is equal.

        If this stored tensor is itself damaged, that is described instead.

        Args:
            actual: the parameter, stored or in memory.
            dtypes: dtypes of the exported tensors from which the parameter is made. Each value must
                be a cast to one of them.
        """
        if fault := describe_misfit(self.stored, tuple(actual.shape), dtypes, self.description):
            return fault
        if isinstance(actual, torch.Tensor):
            count = int(mask_differences(read_tensor(self.stored), actual, dtypes).sum())
            values = f"{count} of {actual.numel()} values"
            differs = f"differs from {self.description} in {values}" if count else None
            return self.describe_damage() or differs
        difference, stored_sum = first_difference(self.stored, actual)
        differs = None if difference is None else f"is not {self.description}: {difference}"
        return self.describe_damage(stored_sum) or differs

    def describe_damage(self, stored_sum: int | None = None) -> str | None:
        """Compare this tensor with its checksum, and describe the damage.

        Args:
            stored_sum: its row sum, if it was computed already. None reads the tensor.

        Returns:
            The description; None if the checksum is right or unknown.
        """
        if self.sum is None:
            return None
        if self.sum == (compute_row_sum(self.stored) if stored_sum is None else stored_sum):
            return None
        return f"cannot be compared: {self.description} differs from its sum in the manifest"


@dataclass
class Proof:
    """Compare every parameter of an export with a checkpoint; see `run`."""

    model: PreTrainedModel  # on meta
    entries: dict[str, StoredTensor]
    groups: list[LoadGroup]  # which tensors make which parameters
    findings: Findings
    expected: dict[str, list[Expected]] = field(default_factory=dict)  # parameter -> what it equals

    def __post_init__(self) -> None:
        self._first_name = tied_names(self.model)
        self._compared = set[str]()

    def first_name(self, parameter: str) -> str:
        """Return the name that all names of a tied parameter share: the first of them.

        A parameter that is not tied has only its own name.
        """
        return self._first_name.get(parameter, parameter)

    def add_expected(self, source: Source) -> None:
        """Add the tensors of a checkpoint to `expected`, under the first name of the parameter.

        See `first_name`.
        """
        for name, expected in find_expected_tensors(source, self.model.state_dict()).items():
            self.expected.setdefault(self.first_name(name), []).append(expected)

    def run(self, source: Source, names: Mapping[str, str] | None = None) -> None:
        """Compare every tensor of the export with the checkpoint; differences are findings.

        A parameter that the export lacks is a finding, too. Reads with up to four threads.

        Args:
            source: the checkpoint.
            names: parameter -> its name in findings; a missing one is named as in the model.

        Raises:
            ToolkitError: the checkpoint is incomplete.
        """
        self.add_expected(source)
        groups = {group.keys[0]: group for group in self.groups}
        sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for key, group in groups.items():
            is_computed = group.converted or self.is_computed(self.first_name(group.parameter))
            sizes[is_computed][key] = sum(self.entries[k].nbytes for k in group.keys)
        self.findings.map_with_progress(lambda key: self._compare(groups[key]), sizes[False])
        self.findings.map_with_progress(
            lambda key: self._compare(groups[key]), sizes[True], threads=1
        )
        files = {entry.file.name for entry in self.entries.values()}
        for parameter in self.expected.keys() - self._compared:
            file = min(files) if len(files) == 1 else ""
            name = (names or {}).get(parameter, parameter)
            self.findings.add(file, name, "is not in the export")

    def is_computed(self, parameter: str) -> bool:
        """Return True if a parameter's expected value is computed instead of read; here False."""
        return False

    def read_parameters(self, group: LoadGroup) -> Mapping[str, Values]:
        """Read a group of the export's tensors as parameters, converted as transformers does.

        Returns:
            Parameter name -> tensor in memory if the group is converted, else the stored tensor.
        """
        if group.converted:
            return load_group(self.model, group, self.entries)
        return {group.parameter: self.entries[group.keys[0]]}

    def describe_difference(
        self, parameter: str, actual: Values, dtypes: set[torch.dtype]
    ) -> str | None:
        """Describe how a parameter differs from its expected tensors; None if it does not.

        Args:
            parameter: first name of the parameter.
            actual: its value in the export.
            dtypes: dtypes of the exported tensors from which it is made.
        """
        faults = (
            expected.describe_difference(actual, dtypes) for expected in self.expected[parameter]
        )
        return next(filter(None, faults), None)

    def _compare(self, group: LoadGroup) -> None:
        """Compare the parameters of one group of tensors; differences are findings."""
        key = group.keys[0]
        members = [self.entries[k] for k in group.keys]
        file = members[0].file.name
        dtypes = {entry.dtype for entry in members}
        try:
            for name, actual in self.read_parameters(group).items():
                parameter = self.first_name(name)
                self._compared.add(parameter)
                if parameter not in self.expected:
                    problem = f"is {parameter}, which is not in the checkpoint"
                    self.findings.add(file, key, problem)
                elif fault := self.describe_difference(parameter, actual, dtypes):
                    becomes = f"with its group becomes {name}, which " if group.converted else ""
                    self.findings.add(file, key, becomes + fault)
        except LoadingError as error:
            self.findings.add(file, key, f"is not loaded by transformers: {error}")


@dataclass(kw_only=True)
class MergeProof(Proof):
    """Compare every parameter of a merged export with its base and a checkpoint of adapters."""

    folder: Path  # of the base
    rounded: int = 0  # values that are equal only up to rounding

    def add_expected(self, source: Source) -> None:
        """Fill in `expected` with stored tensors of the base and of the checkpoint.

        A parameter whose expected value must be computed gets an empty list. Reads all adapter
        tensors once.

        Raises:
            ExportError: the checkpoint is damaged or does not fit its adapter's config.
        """
        self.layout = build_peft_layout(model_on_meta(source.hf), read_adapter_config(source.hf))
        self.trained = find_expected_tensors(source)
        if unmatched := sorted(set(self.layout.keys.values()) ^ self.trained.keys()):
            raise ExportError(
                f"{unmatched[0]} is not in both {source.folder} and its adapter's config"
            )
        for expected in self.trained.values():
            if fault := expected.describe_damage():
                raise ExportError(fault)
        self.base = read_weights(weight_files(self.folder))
        self.reader = build_base_reader(self.folder, self.model)
        self.base_groups = {
            self.first_name(g.parameter): g for g in plan_load_groups(self.reader, self.base)
        }
        for name in filter(lambda name: self.first_name(name) == name, self.model.state_dict()):
            layer, group = self._layer(name), self.base_groups.get(name)
            self.expected[name] = []
            if layer is not None and layer.kind == "saved":
                self.expected[name] = [self.trained[layer.tensors["saved"]]]
            elif layer is None and group is not None and not group.converted:
                entry = self.base[group.keys[0]]
                self.expected[name] = [Expected(entry, f"{group.keys[0]} of the base")]

    def _layer(self, parameter: str) -> AdapterLayer | None:
        """Return the adapter layer on a parameter; None if the adapter does not change it."""
        layers = self.layout.parts.get(parameter)
        return layers[0] if layers else None

    def is_computed(self, parameter: str) -> bool:
        """Return True if the expected value of a parameter must be computed.

        This is the case if an adapter is merged into the parameter, or if transformers converts it
        when it loads.
        """
        return self.expected.get(parameter) == []

    def read_parameters(self, group: LoadGroup) -> Mapping[str, Values]:
        """Read the parameters of a group of the export, and load those of the base for comparison.

        The base's values are kept until the next call, for `describe_difference`.
        """
        parameter = self.first_name(group.parameter)
        if group.converted or self.is_computed(parameter):
            base_group = self.base_groups.get(parameter)
            weights = {} if base_group is None else load_group(self.reader, base_group, self.base)
            self._weights = {self.first_name(name): tensor for name, tensor in weights.items()}
        return super().read_parameters(group)

    def describe_difference(
        self, parameter: str, actual: Values, dtypes: set[torch.dtype]
    ) -> str | None:
        """Describe how a parameter differs from the base (plus adapter); None if it is equal.

        Values that differ by rounding only are accepted, and counted in `rounded`. Call it once for
        each parameter, after `read_parameters` on its group: it removes the base weight read there.
        """
        if not self.is_computed(parameter):
            return super().describe_difference(parameter, actual, dtypes)
        weight, layer = self._weights.pop(parameter, None), self._layer(parameter)
        if weight is None:
            return f"is {parameter}, which the base does not hold"
        if fault := describe_misfit(weight, tuple(actual.shape), dtypes, "in the base"):
            return fault
        if isinstance(actual, StoredTensor):
            actual = read_tensor(actual)
        wrong = mask_differences(weight, actual, dtypes)
        if layer is not None:
            wrong = torch.ones(actual.shape, dtype=torch.bool)
            factors = {
                r: read_tensor(self.trained[n].stored).float() for r, n in layer.tensors.items()
            }
            for dtype in dtypes:
                wide = weight.to(loaded_dtype(self.model, parameter, weight.dtype, dtype))
                value = merge_layer(self.layout, layer, wide.clone(), factors)
                wrong &= mask_differences(value, actual, {dtype})
                if bool(wrong.any()):
                    ends = self._bounds(layer, wide, factors)
                    low, high = (end.to(dtype).to(actual.dtype) for end in ends)
                    border = wrong & (low <= actual) & (actual <= high)
                    self.rounded += int(border.sum())
                    wrong &= ~border
        count = int(wrong.sum())
        if not count:
            return None
        expected = "those of the base" if layer is None else "those of the base plus the adapter"
        return f"has {count} of {actual.numel()} values that are not {expected}"

    def _bounds(
        self, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute bounds of the merged values for any order of the additions in PEFT's arithmetic.

        See [Note: equal, and equal to rounding].

        Args:
            layer: the adapter layer.
            weight: the base's weight.
            factors: the adapter's tensors in float32, by their role such as `A` and `B`.

        Returns:
            (lowest, highest) value of each element, before rounding to the export's dtype.
        """
        magnitude = {r: t.abs() for r, t in factors.items() if r != "magnitude"}
        spread = compute_weight_delta(self.layout, layer, magnitude).abs()
        spread *= 2 * (layer.rank + 2) * _EPSILON
        if "magnitude" in factors:
            value = merge_layer(self.layout, layer, weight.float(), factors)
            spread = 2 * spread + 64 * _EPSILON * value.abs()
            return value - spread, value + spread
        delta = compute_weight_delta(self.layout, layer, factors)
        low, high = delta - spread, delta + spread
        if layer.kind in ("experts", "embedding"):  # PEFT rounds the summand here
            low, high = low.to(weight.dtype), high.to(weight.dtype)
        return weight + low, weight + high


def find_expected_tensors(source: Source, names: Iterable[str] = ()) -> dict[str, Expected]:
    """Map each parameter name in a checkpoint to its stored tensor and checksum.

    Args:
        source: the checkpoint.
        names: names of the model's parameters, needed if the checkpoint is another tool's.

    Raises:
        ExportError: a tensor is incomplete.
    """
    _, keys = map_parameter_names(source, names)
    check_complete(source, keys.values())
    sums = source.row_sums
    return {
        name: Expected(source.stored(key), f"{key} of the checkpoint", sums.get(key))
        for name, key in keys.items()
    }


def describe_misfit(
    expected: Values, shape: tuple[int, ...], dtypes: set[torch.dtype], description: str
) -> str | None:
    """Describe why a tensor cannot be a cast of `expected`, by shape and dtype; None if it can.

    Args:
        expected: the original.
        shape: shape of the tensor.
        dtypes: dtypes of the exported tensors from which it is made.
        description: name of the original, for the message.
    """
    if tuple(expected.shape) != shape:
        return f"has shape {list(shape)}, {description} {list(expected.shape)}"
    casts = dtypes - {expected.dtype}
    if all(dtype.is_floating_point for dtype in (*casts, expected.dtype)) or not casts:
        return None
    return f"is {' and '.join(map(str, casts))}, {description} {expected.dtype}"


def mask_differences(
    value: torch.Tensor, actual: torch.Tensor, dtypes: set[torch.dtype]
) -> torch.Tensor:
    """Return a bool mask of the elements of `actual` that differ from `value`.

    An element is equal if it has the bits of `value` cast to one of `dtypes`, or if both are NaN.
    """
    wrong = torch.ones(actual.shape, dtype=torch.bool)
    for dtype in dtypes:
        wrong &= ~same_values(value.to(dtype).to(actual.dtype), actual)
    return wrong
