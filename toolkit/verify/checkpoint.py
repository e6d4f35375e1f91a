"""Verify a checkpoint: its files, and the tensors that were in live memory."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit import formats
from toolkit.checkpoint import commit
from toolkit.checkpoint.commit import COMMIT, MANIFEST, ROW_SUMS, STATE
from toolkit.checkpoint.store import read_json_object, storage_of
from toolkit.errors import CheckpointError
from toolkit.verify.findings import Findings, is_regular

_METADATA = f"dcp/{formats.METADATA_FILE}"


class CheckpointCheck:
    """One checkpoint folder, at `inside` in what is verified, and what is found in it."""

    def __init__(self, folder: Path, inside: str, findings: Findings) -> None:
        self.folder, self.inside, self.findings = folder, inside, findings
        self.files: dict[str, dict[str, Any]] = {}
        self.damaged: dict[str, str] = {}  # file -> what is wrong
        self.sums: dict[str, int] = {}  # tensor -> sum of its rows in live memory
        self.hit: set[str] = set()  # tensors in which damage was found

    def add(self, file: str, tensor: str | None, what: str) -> None:
        self.findings.add(self.inside + file, tensor, what)

    def check(self) -> None:
        manifest = self._manifest()
        if manifest is None:
            return
        self.files = manifest["files"]
        for name in sorted(storage_of(self.folder).files()):
            if (self.folder / name).is_symlink():
                self.add(name, None, f"is a link to {os.readlink(self.folder / name)}")
            elif name not in self.files and name not in (MANIFEST, COMMIT):
                self.add(name, None, "is not in the manifest")
        self.sums = manifest.get(ROW_SUMS, {})
        self.damaged = self.findings.hash_files(self.folder, self.files)
        metadata = self._metadata()
        for name, what in self.damaged.items():
            self._locate(name, what, metadata)
        if metadata is not None:
            self._tensors(metadata)
        if STATE in self.files and STATE not in self.damaged:
            self._state(manifest.get("step"))

    def _manifest(self) -> dict[str, Any] | None:
        """Return the manifest, also one that is not committed where it can be understood."""
        raw: dict[str, bytes] = {}
        for name in (MANIFEST, COMMIT):
            try:
                raw[name] = storage_of(self.folder / name).read_plain()
            except OSError as error:
                self.add(name, None, f"{error.strerror}: not a committed checkpoint")
        if MANIFEST not in raw:
            return None
        self.findings.report.files += 2
        self.findings.report.bytes += sum(map(len, raw.values()))
        manifest, fault = None, None
        try:
            manifest = commit.parse_manifest(raw[MANIFEST], "it")
            step = re.match(r"step-([0-9]+)", self.folder.name)
            if json.dumps(manifest, indent=1, sort_keys=True).encode() != raw[MANIFEST]:
                fault = "is not as it was written: its bytes are not those of its content"
            elif step and manifest.get("step") != int(step[1]):
                fault = f"is of step {manifest.get('step')}"
        except CheckpointError as error:
            fault = str(error)
        if fault is not None:
            self.add(MANIFEST, None, fault)
        if COMMIT in raw and raw[COMMIT] != commit.commit_text(raw[MANIFEST]).encode():
            self.add(COMMIT, None, f"is not the sha256 of {MANIFEST}: one of them was changed")
            if fault is None:
                self.add(MANIFEST, None, f"does not have the sha256 that {COMMIT} says")
        return manifest

    def _metadata(self) -> Metadata | None:
        """Return DCP's metadata; a damaged one is not read."""
        if _METADATA not in self.files:
            self.add(MANIFEST, None, f"does not name {_METADATA}")
        elif _METADATA not in self.damaged:
            try:
                return formats.read_metadata(self.folder / "dcp", blobs=False)
            except CheckpointError as error:
                self.add(_METADATA, None, str(error))
        return None

    def _locate(self, name: str, what: str, metadata: Metadata | None) -> None:
        """Add what is wrong with a file, by tensor where its bytes belong to tensors."""
        file = self.folder / name
        found: dict[str, str] = {}
        stored = metadata.storage_data.items() if metadata else ()
        ends = {
            index.fqn: info.offset + info.length
            for index, info in stored
            if name == f"dcp/{info.relative_path}"
        }
        if not is_regular(file):
            found = dict.fromkeys(ends, f"is lost: its shard {what}")
            self.add(name, None, what)
        elif metadata is not None and ends:
            size = file.stat().st_size
            lost = {
                tensor: "is lost: its shard is cut off" for tensor in ends if ends[tensor] > size
            }
            others = ((tensor, self._fault(tensor, metadata)) for tensor in ends.keys() - lost)
            found = lost | {tensor: fault for tensor, fault in others if fault}
            if not found:
                what += "; its tensors are whole"
        if not found:
            self.add(name, None, what)
        for tensor, damage in found.items():
            self.hit.add(tensor)
            self.add(name, tensor, damage)

    def _fault(self, key: str, metadata: Metadata) -> str | None:
        """Return why a tensor is not what was in live memory, as far as its sum is known."""
        entry: Any = metadata.state_dict_metadata[key]
        try:
            chunks = tuple(formats.tensor_chunks(self.folder / "dcp", metadata, key))
            stored = formats.StoredTensor(entry.properties.dtype, tuple(entry.size), chunks)
            same = self.sums.get(key) in (None, formats.row_sum(stored))
        except (CheckpointError, OSError) as error:
            return f"cannot be read: {error}"
        return None if same else "does not hold what was in memory at saving"

    def _tensors(self, metadata: Metadata) -> None:
        """Check that every tensor is there once, and the model's hold what was in live memory."""
        sizes = {
            key: math.prod(entry.size) * entry.properties.dtype.itemsize
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.findings.report.tensors += len(sizes)
        for key in sizes.keys() - self.hit:
            if fault := formats.coverage_fault(metadata, key):
                self.add(_METADATA, key, f"is not whole: {fault}")
                self.hit.add(key)
        for key in self.sums.keys() - sizes.keys():
            self.add(_METADATA, key, f"is not there, and {MANIFEST} has its sum")
        models = {key: size for key, size in sizes.items() if key.startswith("model.")}
        if without := sorted(models.keys() - self.sums.keys()):
            self.findings.note(
                f"{self.inside}{MANIFEST} has no sum of {without[0]} and {len(without) - 1} more "
                "tensors: of these only the files were compared"
            )
        compared = models.keys() & self.sums.keys() - self.hit
        found = self.findings.each(
            lambda key: self._fault(key, metadata), {key: models[key] for key in compared}
        )
        places = reversed(metadata.storage_data.items())
        first = {index.fqn: f"dcp/{info.relative_path}" for index, info in places}
        for key, fault in found.items():
            if fault is not None:
                self.add(first.get(key, _METADATA), key, fault)

    def _state(self, step: object) -> None:
        try:
            found = (read_json_object(self.folder / STATE) or {}).get("step")
            if found != step:
                self.add(STATE, None, f"is of step {found}, {MANIFEST} of step {step}")
        except CheckpointError as error:
            self.add(STATE, None, str(error))
