"""Proof that a Hugging Face folder holds the expected values: every parameter, once.

Names and conversions are taken the way transformers loads them, from the export towards the
parameters: nothing here knows how an export is written, so that it cannot share a mistake with it.
Where a tensor kept dtype and shape, the digest that the checkpoint's manifest holds of live memory
is enough, and the shards are not read.

Memory: blocks of 4 MB (or one row) on each of four threads; of tensors that transformers converts
one group at a time, and what is expected of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from toolkit.checkpoint import commit
from toolkit.checkpoint.saving import MANIFEST_VERSION
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
from toolkit.loading import LoadGroup, load_group, load_groups
from toolkit.models import tied_names
from toolkit.verify.findings import Findings, on_threads


@dataclass(frozen=True)
class Expected:
    """A stored tensor that a parameter must equal."""

    stored: StoredTensor
    what: str
    """The tensor and whose it is, for findings."""
    key: str = ""
    """Name that its digest is over."""
    digest: str | None = None

    def fault(self, entry: TensorEntry) -> str | None:
        """Return in what the tensor of an export differs, a block at a time; None: in nothing."""
        fault = unlike(self.stored, entry.shape, {entry.dtype}, self.what)
        actual = in_file(entry)
        same_dtype = self.stored.dtype == entry.dtype
        if fault or (self.digest and same_dtype and digest(actual, self.key) == self.digest):
            return fault
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
    """The comparison of the tensors of one export with what its parameters must be."""

    def __init__(
        self, model: PreTrainedModel, entries: dict[str, TensorEntry], findings: Findings
    ) -> None:
        """Take the export's tensors and the model of its config, on meta."""
        self.model, self.entries, self.findings = model, entries, findings
        self.first_name = tied_names(model)
        self.expected: dict[str, list[Expected]] = {}
        """Parameter, of tied ones the first -> what it must equal."""
        self._holders: dict[str, list[str]] = {}
        """Parameter -> the export's tensors that hold it."""

    def own(self, parameter: str) -> str:
        """Return the first name of a parameter."""
        return self.first_name.get(parameter, parameter)

    def run(self) -> None:
        """Compare everything; each difference is a finding."""
        self.findings.expect(total := sum(entry.nbytes for entry in self.entries.values()))
        groups = load_groups(self.model, self.entries)
        stored = [g for g in groups if not g.converted and self._is_stored(self.own(g.parameter))]
        for group in stored:
            self._holders.setdefault(self.own(group.parameter), []).append(group.keys[0])
        on_threads(self._compare_stored, stored, total)
        for group in groups:
            if group not in stored:
                self._compare_group(group)
        self._check_holders()

    def _is_stored(self, parameter: str) -> bool:
        """Whether what a parameter must be is in a file, and needs no computation."""
        return True

    def _compare_stored(self, group: LoadGroup) -> None:
        """Compare a tensor whose bytes are those of one parameter."""
        entry = self.entries[group.keys[0]]
        for expected in self.expected.get(self.own(group.parameter), ()):
            if fault := expected.fault(entry):
                self.findings.add(entry.file.name, group.keys[0], fault)
        self.findings.advance(entry.nbytes)

    def _compare_group(self, group: LoadGroup) -> None:
        """Compare parameters that are made of several tensors, or computed."""
        key = group.keys[0]
        file = self.entries[key].file.name
        dtypes = {self.entries[k].dtype for k in group.keys}
        try:
            for name, actual in self.read(group).items():
                holder = f"{key} ..." if len(group.keys) > 1 else key
                self._holders.setdefault(self.own(name), []).append(holder)
                if fault := self.fault(self.own(name), actual, dtypes):
                    becomes = f"with its group becomes {name}, which " if group.converted else ""
                    self.findings.add(file, key, becomes + fault)
        except LoadingError as error:
            self.findings.add(file, key, f"is not loaded by transformers: {error}")
        self.findings.advance(sum(self.entries[k].nbytes for k in group.keys))

    def read(self, group: LoadGroup) -> dict[str, torch.Tensor]:
        """Return the parameters that transformers makes of a group of the export."""
        return load_group(self.model, group, self.entries)

    def fault(self, parameter: str, actual: torch.Tensor, dtypes: set[torch.dtype]) -> str | None:
        """Return in what a parameter of the export is not what it must be.

        Args:
            dtypes: of the tensors that it is made of: each value is a cast to one of them.
        """
        for expected in self.expected.get(parameter, ()):
            fault = unlike(expected.stored, tuple(actual.shape), dtypes, expected.what)
            if fault := fault or expected.damage():
                return fault
            if count := int(different(whole(expected.stored), actual, dtypes).sum()):
                return f"differs from {expected.what} in {count} of {actual.numel()} values"
        return None

    def _check_holders(self) -> None:
        files = sorted({entry.file.name for entry in self.entries.values()})
        for parameter, wanted in self.expected.items():
            holders = self._holders.get(parameter, [])
            if not holders:
                name = (wanted[0].key if wanted else "") or parameter
                self.findings.add(files[0] if len(files) == 1 else "", name, "is not in the export")
            elif len(holders) > 1:
                entry = self.entries.get(holders[-1])
                what = f"is stored twice: {' and '.join(holders)} are one parameter, {parameter}"
                self.findings.add(entry.file.name if entry else "", holders[-1], what)


def prove_checkpoint(proof: Proof, source: Source) -> None:
    """Compare the export with the weights of a checkpoint; each difference is a finding.

    Raises:
        ExportError: the checkpoint is not whole, or not of one model.
    """
    for name, expected in expected_of(source, proof.model.state_dict()).items():
        proof.expected.setdefault(proof.own(name), []).append(expected)
    proof.run()


def expected_of(source: Source, names: Iterable[str] = ()) -> dict[str, Expected]:
    """Return parameter -> its tensor in a checkpoint, with the digest where there is one.

    Raises:
        ExportError: a tensor is not whole, or the keys are not those of one model.
    """
    _, keys = parameter_names(source, names)
    check_whole(source, keys.values())
    manifest = {} if source.checkpoint is None else commit.read_manifest(source.checkpoint)
    known = manifest["tensors"] if manifest.get("version") == MANIFEST_VERSION else {}
    return {
        name: Expected(
            stored_in(source, key),
            f"{key} of the checkpoint",
            key,
            known[key]["digest"] if key in known else None,
        )
        for name, key in keys.items()
    }


def stored_in(source: Source, key: str) -> StoredTensor:
    """Return the tensor `key` of a checkpoint."""
    entry = source.tensors[key]
    return StoredTensor(entry.dtype, entry.shape, tuple(source.locate(key)))


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
    for dtype in dtypes:
        if dtype != kept and not (kept.is_floating_point and dtype.is_floating_point):
            return f"is {dtype}, {what} {kept}"
    return None


def different(value: torch.Tensor, actual: torch.Tensor, dtypes: set[torch.dtype]) -> torch.Tensor:
    """Return which elements of `actual` are not those of `value` cast to any of `dtypes`."""
    wrong = torch.ones(actual.shape, dtype=torch.bool)
    for dtype in dtypes:
        wrong &= ~same_values(value.to(dtype).to(actual.dtype), actual)
    return wrong
