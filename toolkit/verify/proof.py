"""Proof that an exported folder holds the expected values: every parameter, once.

Names and conversions are taken the way transformers loads them, from the export towards the
parameters: nothing here knows how an export is written, so that it cannot share a mistake with it.
Where a tensor kept dtype and shape, the digest that the checkpoint's manifest holds of live memory
is enough, and the shards are not read.

Memory: blocks of 1 MB (or one row) on each of four threads; of tensors that transformers converts
one group at a time, and what is expected of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint.sources import Source, check_whole, parameter_names
from toolkit.errors import LoadingError
from toolkit.formats import (
    StoredTensor,
    TensorEntry,
    digest,
    first_difference,
    in_file,
    same_values,
    whole,
)
from toolkit.loading import LoadGroup, load_group
from toolkit.models import tied_names
from toolkit.verify.findings import Findings


@dataclass(frozen=True)
class Expected:
    """A stored tensor that a parameter must equal."""

    stored: StoredTensor
    what: str
    """The tensor and whose it is, for findings."""
    key: str = ""
    """Name that its digest is over."""
    digest: str | None = None

    def fault(self, actual: StoredTensor | torch.Tensor, dtypes: set[torch.dtype]) -> str | None:
        """Return in what a parameter of an export differs; None: in nothing.

        `dtypes`: of the tensors that it is made of: each value is a cast to one of them.
        """
        if fault := unlike(self.stored, tuple(actual.shape), dtypes, self.what):
            return fault
        if isinstance(actual, torch.Tensor):
            if fault := self.damage():
                return fault
            count = int(different(whole(self.stored), actual, dtypes).sum())
            values = f"{count} of {actual.numel()} values"
            return f"differs from {self.what} in {values}" if count else None
        unchanged = self.digest and dtypes == {self.stored.dtype}
        if unchanged and digest(actual, self.key) == self.digest:
            return None
        what, held = first_difference(self.stored, actual, self.key if self.digest else None)
        if held != self.digest:
            return self._damaged()
        return None if what is None else f"is not {self.what}: {what}"

    def damage(self) -> str | None:
        """Return what is wrong with the stored tensor itself."""
        if self.digest and digest(self.stored, self.key) != self.digest:
            return self._damaged()
        return None

    def _damaged(self) -> str:
        return f"cannot be compared: {self.what} does not have its own digest"


class Proof:
    """The comparison of an export's tensors with what its parameters must be; `groups` says which
    tensors make which parameters of `model`, on meta.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        entries: dict[str, TensorEntry],
        groups: list[LoadGroup],
        findings: Findings,
    ) -> None:
        self.model, self.entries, self.groups, self.findings = model, entries, groups, findings
        self._first_name = tied_names(model)
        self.expected: dict[str, list[Expected]] = {}
        """Parameter, of tied ones the first -> what it must equal."""
        self._holders: dict[str, list[str]] = {}
        """Parameter -> the export's tensors that hold it."""

    def own(self, parameter: str) -> str:
        """Return the first name of a parameter."""
        return self._first_name.get(parameter, parameter)

    def expect(self, source: Source) -> None:
        """Expect the weights of a checkpoint; ExportError where that is not whole."""
        for name, expected in expected_of(source, self.model.state_dict()).items():
            self.expected.setdefault(self.own(name), []).append(expected)

    def run(self) -> None:
        """Compare everything, and that each parameter is there once; differences are findings."""
        self.compare()
        files = {entry.file.name for entry in self.entries.values()}
        for parameter, wanted in self.expected.items():
            holders = sorted(self._holders.get(parameter, []))
            if not holders:
                name = (wanted[0].key if wanted else "") or parameter
                file = min(files) if len(files) == 1 else ""
                self.findings.add(file, name, "is not in the export")
            elif len(holders) > 1:
                what = f"is stored twice: {' and '.join(holders)} are one parameter, {parameter}"
                self.findings.add(self.entries[holders[-1]].file.name, holders[-1], what)

    def compare(self) -> None:
        """Compare every tensor of the export with what it must be."""
        groups = {group.keys[0]: group for group in self.groups}
        sizes: dict[bool, dict[str, int]] = {False: {}, True: {}}
        for key, group in groups.items():
            is_computed = group.converted or self.is_computed(self.own(group.parameter))
            sizes[is_computed][key] = sum(self.entries[k].nbytes for k in group.keys)
        self.findings.each(lambda key: self._compare(groups[key]), sizes[False])
        self.findings.each(lambda key: self._compare(groups[key]), sizes[True], threads=1)

    def is_computed(self, parameter: str) -> bool:
        """Whether what a parameter must be is in no file."""
        return False

    def read(self, group: LoadGroup) -> Mapping[str, StoredTensor | torch.Tensor]:
        """Return the parameters that transformers makes of a group of the export."""
        if group.converted:
            return load_group(self.model, group, self.entries)
        return {group.parameter: in_file(self.entries[group.keys[0]])}

    def fault(
        self, parameter: str, actual: StoredTensor | torch.Tensor, dtypes: set[torch.dtype]
    ) -> str | None:
        """Return in what a parameter of the export is not what it must be; see `Expected`."""
        faults = (expected.fault(actual, dtypes) for expected in self.expected[parameter])
        return next(filter(None, faults), None)

    def _compare(self, group: LoadGroup) -> None:
        key, members = group.keys[0], [self.entries[k] for k in group.keys]
        file, dtypes = members[0].file.name, {entry.dtype for entry in members}
        try:
            for name, actual in self.read(group).items():
                own = self.own(name)
                self._holders.setdefault(own, []).append(key)
                if own not in self.expected:
                    self.findings.add(file, key, f"is {own}, which is not in the checkpoint")
                elif fault := self.fault(own, actual, dtypes):
                    becomes = f"with its group becomes {name}, which " if group.converted else ""
                    self.findings.add(file, key, becomes + fault)
        except LoadingError as error:
            self.findings.add(file, key, f"is not loaded by transformers: {error}")


def expected_of(source: Source, names: Iterable[str] = ()) -> dict[str, Expected]:
    """Return parameter -> its tensor in a checkpoint; ExportError where one is not whole."""
    _, keys = parameter_names(source, names)
    check_whole(source, keys.values())
    known = source.digests()
    return {
        name: Expected(source.stored(key), f"{key} of the checkpoint", key, known.get(key))
        for name, key in keys.items()
    }


def unlike(
    expected: StoredTensor | torch.Tensor,
    shape: tuple[int, ...],
    dtypes: set[torch.dtype],
    what: str,
) -> str | None:
    """Return why a tensor of `shape` and `dtypes` cannot be `expected`, cast: None where it can."""
    if tuple(expected.shape) != shape:
        return f"has shape {list(shape)}, {what} {list(expected.shape)}"
    kept = expected.dtype
    for dtype in dtypes - {kept}:
        if not (kept.is_floating_point and dtype.is_floating_point):
            return f"is {dtype}, {what} {kept}"
    return None


def different(value: torch.Tensor, actual: torch.Tensor, dtypes: set[torch.dtype]) -> torch.Tensor:
    """Return which elements of `actual` are not those of `value` cast to any of `dtypes`."""
    wrong = torch.ones(actual.shape, dtype=torch.bool)
    for dtype in dtypes:
        wrong &= ~same_values(value.to(dtype).to(actual.dtype), actual)
    return wrong
