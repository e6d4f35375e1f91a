"""Verify a checkpoint: its files, and the tensors that were in live memory when it was saved."""

import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit import formats
from toolkit.checkpoint import commit
from toolkit.checkpoint.names import COMMIT, MANIFEST, ROW_SUMS, STATE
from toolkit.checkpoint.store import read_json_object, storage_of
from toolkit.errors import CheckpointError
from toolkit.verify.findings import Findings, is_regular

_METADATA = f"dcp/{formats.METADATA_FILE}"


@dataclass
class CheckpointSubject:
    """A checkpoint that is being verified, with the results of earlier checks."""

    folder: Path
    prefix: str  # of its files in findings: "checkpoints/step-00000100/", or empty
    findings: Findings
    manifest: dict[str, Any] | None = None  # None if it cannot be understood
    damaged_files: dict[str, str] = field(default_factory=dict)  # file name -> problem
    metadata: Metadata | None = None  # of the DCP folder; None if it is missing or damaged
    damaged_tensors: set[str] = field(default_factory=set)

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """The manifest's entries (size and hash) by file name; {} without a manifest."""
        return self.manifest["files"] if self.manifest else {}

    @property
    def row_sums(self) -> dict[str, int]:
        """The manifest's checksums, computed from memory at the save: tensor -> sum, or {}."""
        return self.manifest.get(ROW_SUMS, {}) if self.manifest else {}

    def add(self, file: str, tensor: str | None, problem: str) -> None:
        """Add a finding: the file in this checkpoint, the tensor or None, and the problem."""
        self.findings.add(self.prefix + file, tensor, problem)


def check_checkpoint(folder: Path, prefix: str, findings: Findings) -> None:
    """Run every check on one checkpoint, and add problems and counts to `findings`.

    If the manifest is missing or cannot be parsed, no other check runs.

    Args:
        folder: folder of the checkpoint.
        prefix: path of the checkpoint inside the verified folder, ending in a slash; or "".
        findings: collects problems and counts.
    """
    subject = CheckpointSubject(folder, prefix, findings)
    for check in CHECKS:
        check(subject)
        if subject.manifest is None:
            return


def _read_manifest(subject: CheckpointSubject) -> None:
    """Read the manifest and compare it with the COMMIT file; problems become findings.

    A manifest that can be parsed is used even if COMMIT is missing or does not match.
    """
    contents: dict[str, bytes] = {}
    for name in (MANIFEST, COMMIT):
        try:
            contents[name] = storage_of(subject.folder / name).read_small_file()
        except OSError as error:
            subject.add(name, None, f"{error.strerror}: not a committed checkpoint")
    if MANIFEST not in contents:
        return
    subject.findings.report.files += 2
    subject.findings.report.bytes += sum(map(len, contents.values()))
    fault = None
    try:
        manifest = commit.parse_manifest(contents[MANIFEST], "it")
        subject.manifest = manifest
        folder_step = re.match(r"step-([0-9]+)", subject.folder.name)
        if json.dumps(manifest, indent=1, sort_keys=True).encode() != contents[MANIFEST]:
            fault = "is not as it was written: its bytes are not those of its content"
        elif folder_step and manifest.get("step") != int(folder_step[1]):
            fault = f"is of step {manifest.get('step')}"
    except CheckpointError as error:
        fault = str(error)
    if fault is not None:
        subject.add(MANIFEST, None, fault)
    if (
        COMMIT in contents
        and contents[COMMIT] != commit.compute_commit_content(contents[MANIFEST]).encode()
    ):
        subject.add(COMMIT, None, f"is not the sha256 of {MANIFEST}: one of them was changed")
        if fault is None:
            subject.add(MANIFEST, None, f"does not have the sha256 that {COMMIT} says")


def _check_file_names(subject: CheckpointSubject) -> None:
    """Add a finding for each link, and for each file that the manifest does not list."""
    for name in sorted(storage_of(subject.folder).files()):
        path = subject.folder / name
        if path.is_symlink():
            subject.add(name, None, f"is a link to {os.readlink(path)}")
        elif name not in subject.files and name not in (MANIFEST, COMMIT):
            subject.add(name, None, "is not in the manifest")


def _check_hashes(subject: CheckpointSubject) -> None:
    """Compare every file with the manifest, and read the DCP metadata.

    Adds a finding for each damaged tensor, or for a damaged file if none of its tensors is damaged.
    """
    subject.damaged_files = subject.findings.find_damaged_files(subject.folder, subject.files)
    if _METADATA not in subject.files:
        subject.add(MANIFEST, None, f"does not list {_METADATA}")
    elif _METADATA not in subject.damaged_files:
        try:
            subject.metadata = formats.read_metadata(subject.folder / "dcp", blobs=False)
        except CheckpointError as error:
            subject.add(_METADATA, None, str(error))
    for name, problem in subject.damaged_files.items():
        _add_damage_findings(subject, name, problem)


def _add_damage_findings(subject: CheckpointSubject, name: str, problem: str) -> None:
    """Add a finding for each damaged tensor of a damaged file, or one for the file itself.

    The tensors of a shard are read again to find the damaged ones. The file gets a finding if it
    has no damaged tensor, or if it is missing.

    Args:
        subject: the checkpoint.
        name: a file that differs from the manifest.
        problem: how the file differs.
    """
    file = subject.folder / name
    metadata = subject.metadata
    damage: dict[str, str] = {}
    stored = metadata.storage_data.items() if metadata else ()
    ends = {
        index.fqn: info.offset + info.length
        for index, info in stored
        if name == f"dcp/{info.relative_path}"
    }
    if not is_regular(file):
        damage = dict.fromkeys(ends, f"is lost: its shard {problem}")
        subject.add(name, None, problem)
    elif metadata is not None and ends:
        size = file.stat().st_size
        for tensor, end in ends.items():
            fault = (
                "is lost: its shard is cut off"
                if end > size
                else _describe_tensor_damage(subject, tensor)
            )
            if fault:
                damage[tensor] = fault
        if not damage:
            problem += "; its tensors are intact"
    if not damage:
        subject.add(name, None, problem)
    for tensor, fault in damage.items():
        subject.damaged_tensors.add(tensor)
        subject.add(name, tensor, fault)


def _describe_tensor_damage(subject: CheckpointSubject, key: str) -> str | None:
    """Read a stored tensor, and compare it with the checksum that was computed when it was saved.

    Returns:
        A description of the damage; None if there is none. Without a checksum in the manifest, it
        is None if the tensor can be located.
    """
    metadata = subject.metadata
    assert metadata is not None
    entry: Any = metadata.state_dict_metadata[key]
    try:
        chunks = tuple(formats.tensor_chunks(subject.folder / "dcp", metadata, key))
        stored = formats.StoredTensor(entry.properties.dtype, tuple(entry.size), chunks)
        is_same = subject.row_sums.get(key) in (None, formats.compute_row_sum(stored))
    except (CheckpointError, OSError) as error:
        return f"cannot be read: {error}"
    return None if is_same else "does not hold what was in memory at saving"


def _check_tensors(subject: CheckpointSubject) -> None:
    """Check that all tensors are stored completely, and that model tensors match their checksums.

    Problems become findings. Tensors that are known to be damaged are skipped. If model tensors
    have no checksum, a note is added. Does nothing if the metadata could not be read.
    """
    metadata = subject.metadata
    if metadata is None:
        return
    sizes = {
        key: math.prod(entry.size) * entry.properties.dtype.itemsize
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    subject.findings.report.tensors += len(sizes)
    for key in sizes.keys() - subject.damaged_tensors:
        if fault := formats.find_coverage_fault(metadata, key):
            subject.add(_METADATA, key, f"is incomplete: {fault}")
            subject.damaged_tensors.add(key)
    for key in subject.row_sums.keys() - sizes.keys():
        subject.add(_METADATA, key, f"is missing, although {MANIFEST} has its sum")
    model_sizes = {key: size for key, size in sizes.items() if key.startswith("model.")}
    if without_sum := sorted(model_sizes.keys() - subject.row_sums.keys()):
        subject.findings.note(
            f"{subject.prefix}{MANIFEST} has no sum of {without_sum[0]} and "
            f"{len(without_sum) - 1} more tensors: only their files were compared"
        )
    comparable = model_sizes.keys() & subject.row_sums.keys() - subject.damaged_tensors
    faults = subject.findings.map_with_progress(
        lambda key: _describe_tensor_damage(subject, key),
        {key: model_sizes[key] for key in comparable},
    )
    # Reversed, so that the file of a tensor's first chunk wins.
    places = reversed(metadata.storage_data.items())
    first_file = {index.fqn: f"dcp/{info.relative_path}" for index, info in places}
    for key, fault in faults.items():
        if fault is not None:
            subject.add(first_file.get(key, _METADATA), key, fault)


def _check_state(subject: CheckpointSubject) -> None:
    """Add a finding if the step in state.json differs from the manifest's, or cannot be read."""
    if STATE not in subject.files or STATE in subject.damaged_files:
        return
    step = subject.manifest.get("step") if subject.manifest else None
    try:
        state_step = (read_json_object(subject.folder / STATE) or {}).get("step")
        if state_step != step:
            subject.add(STATE, None, f"is of step {state_step}, {MANIFEST} of step {step}")
    except CheckpointError as error:
        subject.add(STATE, None, str(error))


# In this order: each uses what the ones before have read.
CHECKS = (_read_manifest, _check_file_names, _check_hashes, _check_tensors, _check_state)
