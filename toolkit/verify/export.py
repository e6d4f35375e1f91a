"""Verify an exported folder: the checks that need no model, and the order of all checks.

A verification is a list of functions over one subject, `Export`. `full_model` has the checks of a
Hugging Face folder with all weights, `adapter` those of a PEFT folder.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import formats
from toolkit.checkpoint.names import step_name
from toolkit.checkpoint.sources import Source
from toolkit.errors import ExportError, LoadingError, ToolkitError
from toolkit.formats import export_manifest
from toolkit.loading import LoadGroup
from toolkit.parsing import read_json
from toolkit.verify.findings import Findings, is_regular

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass
class Export:
    """An exported folder that is being verified, with the results of earlier checks."""

    folder: Path
    findings: Findings
    source: Source | None  # the checkpoint that it should hold; None: verify the folder by itself
    base_location: str | Path | None = None
    """Folder or Hub id of the base model of an adapter; None: where checkpoint or export say."""
    weights_file: str = formats.SINGLE_FILE  # of weights that are in a single file
    is_damaged: bool = False  # a file differs from the manifest
    manifest: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, formats.StoredTensor] = field(default_factory=dict)  # empty: unreadable
    model: "PreTrainedModel | None" = None  # that the config describes, on meta
    groups: list[LoadGroup] = field(default_factory=list)  # which tensors make which parameters
    carried: dict[str, formats.StoredTensor] = field(default_factory=dict)
    """Tensors that no parameter takes."""

    def add(self, file: str, tensor: str | None, problem: str) -> None:
        """Add a finding: the file ("" for the folder), the tensor or None, and the problem."""
        self.findings.add(file, tensor, problem)

    @property
    def origin(self) -> dict[str, Any]:
        """The manifest's entry on the source of the weights; {} if it has none."""
        return self.manifest.get("origin", {})

    @property
    def requested_dtype(self) -> str | None:
        """The dtype that the user chose for the export; None for `auto` or if unknown."""
        dtype = self.origin.get("dtype")
        return None if dtype in (None, "auto") else str(dtype)


Check = Callable[[Any], None]


@dataclass(frozen=True)
class Checks:
    """The checks for one kind of export: a full model, a merged model or an adapter.

    Each check is a function of the subject, an `Export`; it adds findings and returns None.
    """

    alone: tuple[Check, ...]
    """Checks of the folder by itself. They fill in the fields of the subject."""
    assets: Check
    """Compares the files next to the weights with the checkpoint's."""
    weights: Check
    """Compares every value with the checkpoint; needs model and tensors."""
    logits: Check
    """Loads the export as its readers do, and computes with it; needs model and tensors."""
    verdict: str
    """Begins the note on an intact export; the checkpoint's path ends it."""


def run_checks(export: Export, checks: Checks, *, logits: bool) -> None:
    """Run all checks that apply to an export; problems become findings of the export.

    If there are no findings and the export has a `source`, a note says which checkpoint it holds. A
    `ToolkitError` of a comparison with the source is a finding, too.

    Args:
        export: the subject. If it has a `source`, it is also compared with that checkpoint.
        checks: the checks for this kind of export.
        logits: also load the export and compute logits.
    """
    for check in checks.alone:
        check(export)
    # If model or tensors could not be read, the reason is a finding already.
    is_readable = export.model is not None and bool(export.entries)
    try:
        if export.source is not None:
            checks.assets(export)
            if is_readable:
                checks.weights(export)
        if logits and is_readable:
            checks.logits(export)
    except ToolkitError as error:
        export.add("", None, str(error))
    if not export.findings.report.ok:
        _explain_other_step(export)
    elif export.source is not None:
        source = export.source
        export.findings.note(f"{checks.verdict} {source.checkpoint or source.folder}")


def _explain_other_step(export: Export) -> None:
    """Add a finding if the export was made from another step than that of its `source`.

    If a step is unknown, do nothing.
    """
    if export.source is None or export.source.checkpoint is None:
        return
    checkpoint = export.source.checkpoint
    step: Any = export.origin.get("step")
    has_steps = isinstance(step, int) and step >= 0 and checkpoint.name.startswith("step-")
    if has_steps and not checkpoint.name.startswith(step_name(step)):
        export.add("", None, f"was made of step {step}, and is compared with {checkpoint}")


def read_manifest(export: Export) -> None:
    """Read the manifest into `export.manifest`; a missing or damaged one becomes a finding."""
    try:
        export.manifest = export_manifest.read(export.folder)
    except ExportError as error:
        export.add(export_manifest.FILE, None, str(error))


def check_file_names(export: Export) -> None:
    """Add a finding for each link, folder, foreign weight file, and file missing from the manifest.

    Hidden files and files that an export may have in addition (model card, licence) are ignored,
    unless they look like weights. Without a manifest, only links, folders, weight files of other
    formats and a second index are findings.
    """
    listed = export.manifest.get("files")
    names_of_exports = export_manifest.names_in_manifest(export.folder)
    for name in sorted(os.listdir(export.folder)):
        file = export.folder / name
        is_weights = name.endswith((*_OTHER_WEIGHTS, ".safetensors", ".index.json"))
        if file.is_symlink() and not formats.is_hub_cache_link(file):
            export.add(name, None, f"is a link to {os.readlink(file)}")
        elif name not in names_of_exports and not is_weights:
            continue  # a hidden file, or the user's own
        elif not file.is_file():
            export.add(name, None, "is no regular file, and an export has nothing else")
        elif listed is not None and name not in listed:
            kind = "is a weight file" if is_weights else "is a file"
            export.add(name, None, f"{kind} that the manifest does not list")
        elif listed is None and name.endswith(_OTHER_WEIGHTS):
            export.add(name, None, "is a weight file that is not safetensors")
        elif listed is None and name.endswith(".index.json") and name != formats.INDEX_FILE:
            export.add(name, None, "is a second index")


def check_hashes(export: Export) -> None:
    """Compare size and hash of every file with the manifest; differences are findings.

    Sets `export.is_damaged`. Does nothing without a manifest.
    """
    if not export.manifest:
        return
    problems = export.findings.find_damaged_files(
        export.folder, export.manifest["files"], in_cache=True
    )
    changed = {
        name for name, problem in problems.items() if _add_damage_findings(export, name, problem)
    }
    weight_files = {entry["file"] for entry in export.manifest["tensors"].values()}
    if changed and changed == weight_files:
        problem = "describes no tensor of this folder: is it the manifest of another export?"
        export.add(export_manifest.FILE, None, problem)
    export.is_damaged = bool(problems)


def _add_damage_findings(export: Export, name: str, problem: str) -> bool:
    """Add a finding for each damaged tensor of a damaged file, or one for the file itself.

    The file gets a finding if it has no damaged tensor, or if it is missing.

    Args:
        export: the subject.
        name: a file that differs from the manifest.
        problem: how the file differs.

    Returns:
        True if the file has the right length and every tensor in it differs, so that it may be the
        file of another export.
    """
    file = export.folder / name
    tensors = {k: e for k, e in export.manifest["tensors"].items() if e["file"] == name}
    damage: dict[str, str] = {}
    if not is_regular(file, in_cache=True):
        damage = dict.fromkeys(tensors, f"is lost: its file {problem}")
        export.add(name, None, problem)
    elif tensors:
        # The places are taken from the manifest, because the header may be what is damaged.
        parts = []
        for key, entry in tensors.items():
            nbytes = math.prod(entry["shape"]) * formats.DTYPES[entry["dtype"]].itemsize
            parts.append((key, entry["begin"], nbytes, entry["xxh3"]))
        damage = formats.find_damaged_tensors(file, parts)
        if not damage:
            problem += "; the bytes of its tensors are intact, its header is not"
    for key, fault in damage.items() or [(None, problem)]:
        export.add(name, key, fault)
    return len(damage) == len(tensors) > 0 and "bytes long" not in problem


def read_tensors(export: Export) -> None:
    """Read the headers and index of the weight files into `export.entries`.

    If they cannot be read, `entries` stays empty and the reason becomes a finding. Weight files
    that loaders would not read are findings, too. Does nothing if `export.is_damaged`.
    """
    if export.is_damaged:
        return  # what damaged files say about each other is no news
    index = export.folder / formats.INDEX_FILE
    single = export.weights_file
    is_full_model = single == formats.SINGLE_FILE
    where = formats.INDEX_FILE if index.is_file() and is_full_model else single
    try:
        if is_full_model:
            files = formats.weight_files(export.folder)
        else:
            files = [formats.resolve_plain_file(export.folder, single, LoadingError)]
        names = {file.name for file in files}
        for name in sorted(os.listdir(export.folder)):
            if name.endswith(".safetensors") and name not in names:
                problem = "is a weight file that loaders of this folder do not read"
                export.add(name, None, problem)
        for file in files:
            where = file.name
            formats.read_header(file)
        where = formats.INDEX_FILE
        entries = formats.read_weights(files)
        if names != {single}:
            _check_index(export, read_json(index, LoadingError), entries)
        elif index.is_file():
            export.add(where, None, f"is there in addition to {single}: loaders take either")
    except (LoadingError, OSError) as error:
        export.add(where, None, str(error))
        return
    export.entries = entries
    export.findings.report.tensors += len(entries)


def _check_index(
    export: Export, index: dict[str, Any], entries: dict[str, formats.StoredTensor]
) -> None:
    """Add findings for tensors that the index omits, and for a wrong `total_size`.

    Args:
        export: the subject.
        index: content of the index file.
        entries: name -> tensor, from the headers.
    """
    for name in sorted(entries.keys() - index["weight_map"].keys()):
        problem = f"is in {entries[name].file.name} and not in the index"
        export.add(formats.INDEX_FILE, name, problem)
    metadata = index.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    expected = sum(entry.nbytes for entry in entries.values())
    if total_size not in (None, expected):
        problem = f"says total_size {total_size}, the tensors have {expected} bytes"
        export.add(formats.INDEX_FILE, None, problem)


def check_headers(export: Export) -> None:
    """Compare the headers of the weight files with the manifest; differences are findings.

    Does nothing without a manifest, or if the headers could not be read.
    """
    if not export.manifest or not export.entries:
        return
    listed = {name: _drop_hash(entry) for name, entry in export.manifest["tensors"].items()}
    headers = {
        name: _drop_hash(export_manifest.describe_tensor(entry, ""))
        for name, entry in export.entries.items()
    }
    for name in sorted(listed.keys() | headers.keys()):
        header, entry = headers.get(name), listed.get(name)
        if header != entry:
            problem = f"is {header} by its header, {entry} by the manifest"
            export.add((header or entry or {})["file"], name, problem)


def _drop_hash(entry: dict[str, Any]) -> dict[str, Any]:
    """Copy a manifest entry of a tensor without its hash."""
    return {key: value for key, value in entry.items() if key != "xxh3"}


def check_dtypes(export: Export) -> None:
    """Add a finding for each floating-point tensor that does not have the requested dtype.

    Does nothing if no dtype was requested.
    """
    requested = export.requested_dtype
    if requested is None:
        return
    for name, entry in export.entries.items():
        dtype = str(entry.dtype).removeprefix("torch.")
        if entry.dtype.is_floating_point and dtype != requested:
            export.add(
                entry.file.name, name, f"is {dtype}, the export was requested in {requested}"
            )


def compare_files(
    export: Export, source: Source, belongs: Callable[[str], bool] = lambda name: True
) -> None:
    """Compare tokenizer, code and other small files with the checkpoint's, byte by byte.

    Each difference is a finding, and so is a file that only one of them has.

    Args:
        export: the subject.
        source: the checkpoint.
        belongs: returns True for the names of the checkpoint's files that the export should have.
    """
    assets = formats.asset_files(source.hf).items()
    expected = {name: content for name, content in assets if belongs(name)}
    for name in sorted(expected.keys() | formats.asset_files(export.folder).keys()):
        if name not in expected:
            export.add(name, None, "is not in the checkpoint")
        elif not (export.folder / name).is_file():
            export.add(name, None, "is missing, and is in the checkpoint")
        elif (export.folder / name).read_bytes() != expected[name]:
            export.add(name, None, f"is not that of the checkpoint ({source.hf / name})")


FILE_CHECKS: tuple[Check, ...] = (
    read_manifest,
    check_file_names,
    check_hashes,
    read_tensors,
    check_headers,
)
"""The checks that need no model, in this order: each uses what the ones before have read."""
