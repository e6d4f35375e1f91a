"""Whether a checkpoint is intact: its files, and the tensors that were in live memory.

Owns the checks of one checkpoint folder.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from toolkit.checkpoint import commit, rng_state
from toolkit.checkpoint.commit import COMMIT, MANIFEST, STATE
from toolkit.checkpoint.saving import MANIFEST_VERSION
from toolkit.errors import CheckpointError, LoadingError
from toolkit.formats import (
    METADATA_FILE,
    StoredTensor,
    coverage_fault,
    damaged_blobs,
    damaged_pieces,
    digest,
    header_metadata,
    read_header,
    read_metadata,
    tensor_chunks,
)
from toolkit.parsing import MAX_JSON_BYTES, parse_json, read_bounded, read_json
from toolkit.verify.findings import Findings, is_regular, on_threads

_HEX = re.compile(rb"[0-9a-f]{64}\n")


class CheckpointCheck:
    """One checkpoint folder and what is found in it."""

    def __init__(self, folder: Path, inside: str, findings: Findings) -> None:
        self.folder, self.inside, self.findings = folder, inside, findings
        self.files: dict[str, dict[str, Any]] = {}
        self.damaged: set[str] = set()
        self.hit: set[str] = set()
        """Tensors in which damage was found."""

    def add(self, file: str, tensor: str | None, what: str) -> None:
        self.findings.add(self.inside + file, tensor, what)

    def check(self) -> None:
        manifest = self._manifest()
        if manifest is None:
            return
        self.files = manifest["files"]
        self._strangers()
        faults = self.findings.hash_files(self.folder, self.files)
        self.damaged = set(faults)
        metadata = self._metadata()
        for name, what in faults.items():
            self._locate(name, what, metadata)
        if metadata is not None:
            self._tensors(metadata, manifest)
        self._state(manifest)

    def _manifest(self) -> dict[str, Any] | None:
        """Return the manifest, also one that is not committed where it can be understood."""
        raw: dict[str, bytes] = {}
        for name in (MANIFEST, COMMIT):
            try:
                if is_regular(self.folder / name):
                    raw[name] = read_bounded(self.folder / name, MAX_JSON_BYTES, CheckpointError)
                else:
                    self.add(name, None, "is missing: not a committed checkpoint")
            except (CheckpointError, OSError) as error:
                self.add(name, None, str(error))
        if MANIFEST not in raw:
            return None
        manifest, fault = _understood(raw[MANIFEST])
        step = re.match(r"step-([0-9]+)", self.folder.name)
        if manifest is not None and step and manifest.get("step") != int(step[1]):
            fault = fault or f"is of step {manifest.get('step')}"
        if fault is not None:
            self.add(MANIFEST, None, fault)
        if COMMIT in raw:
            self._seal(raw[COMMIT], raw[MANIFEST], fault)
        self.findings.report.files += 2
        self.findings.report.bytes += sum(map(len, raw.values()))
        return manifest

    def _seal(self, actual: bytes, manifest: bytes, fault: str | None) -> None:
        """Compare COMMIT, to the byte, with the manifest; report which of the two is wrong."""
        seal = hashlib.sha256(manifest).hexdigest().encode() + b"\n"
        if actual == seal:
            return
        alike = sum(a == b for a, b in zip(actual, seal, strict=False))
        if not _HEX.fullmatch(actual) or alike > 32:  # two hashes agree in 4 of 64 places
            self.add(COMMIT, None, "is not, to the byte, the sha256 of the manifest")
        elif fault is None:
            self.add(COMMIT, None, f"is not the sha256 of {MANIFEST}: one of them was changed")
            self.add(MANIFEST, None, f"does not have the sha256 that {COMMIT} says")

    def _strangers(self) -> None:
        for name in sorted(commit.files_below(self.folder)):
            if (self.folder / name).is_symlink():
                self.add(name, None, f"is a link to {os.readlink(self.folder / name)}")
            elif name not in self.files and name not in (MANIFEST, COMMIT):
                self.add(name, None, "is not in the manifest")

    def _metadata(self) -> Metadata | None:
        """Return DCP's metadata; a damaged one is not read."""
        name = f"dcp/{METADATA_FILE}"
        if name not in self.files:
            self.add(MANIFEST, None, f"does not name {name}")
        if name not in self.files or name in self.damaged:
            return None
        try:
            return read_metadata(self.folder / "dcp", blobs=False)
        except CheckpointError as error:
            self.add(name, None, str(error))
            return None

    def _locate(self, name: str, what: str, metadata: Metadata | None) -> None:
        """Add what is wrong with a file, by tensor where its bytes belong to tensors."""
        file = self.folder / name
        found: list[tuple[str, str]] = []
        places = [
            (index.fqn, info.offset, info.length)
            for index, info in (metadata.storage_data if metadata else {}).items()
            if name == f"dcp/{info.relative_path}"
        ]
        if not is_regular(file):
            found = [(tensor, f"is lost: its shard {what}") for tensor, _, _ in places]
            self.add(name, None, what)
        elif places:
            found = damaged_blobs(file, places)
            if not found and file.stat().st_size == self.files[name]["size"]:
                what += "; every blob in it is whole: it is the shard of another checkpoint"
        elif name.endswith(".safetensors"):
            try:
                found = damaged_pieces(file, read_header(file, whole=False), header_metadata(file))
            except LoadingError:
                lost = rng_state.PIECES if name.startswith("rng/") else ()
                found = [
                    (piece, f"is lost with the header of its file, which {what}") for piece in lost
                ]
        if not found:
            self.add(name, None, what)
        for tensor, damage in found:
            self.hit.add(tensor)
            self.add(name, tensor, damage)

    def _tensors(self, metadata: Metadata, manifest: dict[str, Any]) -> None:
        """Check that every tensor is there once, and holds what was in live memory."""
        name = f"dcp/{METADATA_FILE}"
        stored = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.findings.report.tensors += len(stored)
        for key in stored:
            if fault := coverage_fault(metadata, key):
                self.add(name, key, f"is not whole: {fault}")
                self.hit.add(key)
        known = manifest.get("tensors") or {}
        if not known or manifest.get("version") != MANIFEST_VERSION:
            self.findings.note(
                f"{self.inside}{MANIFEST} has no digests of tensors as version {MANIFEST_VERSION} "
                "has them: only the files were compared"
            )
            return
        described = {
            k: (list(e.size), str(e.properties.dtype).removeprefix("torch."))
            for k, e in stored.items()
        }
        for key in sorted(known.keys() | {k for k in stored if k.startswith("model.")}):
            expected = (known[key]["shape"], known[key]["dtype"]) if key in known else None
            actual = described.get(key)
            if actual != expected:
                where = name if key in stored else MANIFEST
                self.add(where, key, f"is {actual} in {name}, {expected} in {MANIFEST}")
                self.hit.add(key)
        whole = {k: stored[k] for k in known.keys() & stored.keys() - self.hit}
        self._digests(metadata, whole, known)

    def _digests(
        self,
        metadata: Metadata,
        entries: dict[str, TensorStorageMetadata],
        known: dict[str, dict[str, Any]],
    ) -> None:
        sizes = {k: math.prod(e.size) * e.properties.dtype.itemsize for k, e in entries.items()}
        self.findings.expect(total := sum(sizes.values()))

        def check(key: str) -> None:
            entry = entries[key]
            try:
                chunks = tuple(tensor_chunks(self.folder / "dcp", metadata, key))
                tensor = StoredTensor(entry.properties.dtype, tuple(entry.size), chunks)
                if digest(tensor, key) != known[key]["digest"]:
                    self.add(self._shard(chunks), key, "does not hold what was in memory at saving")
            except (CheckpointError, OSError) as error:
                self.add(f"dcp/{METADATA_FILE}", key, f"cannot be read: {error}")
            self.findings.advance(sizes[key])

        on_threads(check, entries, total)

    def _shard(self, chunks: Iterable[Any]) -> str:
        """Return which of the shards of a tensor to name: a damaged one, if one is."""
        names = [f"dcp/{chunk.file.name}" for chunk in chunks]
        return next((n for n in names if n in self.damaged), names[0] if names else "dcp")

    def _state(self, manifest: dict[str, Any]) -> None:
        if STATE not in self.files or STATE in self.damaged:
            return
        try:
            state = read_json(self.folder / STATE, CheckpointError)
        except CheckpointError as error:
            self.add(STATE, None, str(error))
            return
        if not isinstance(state, dict) or state.get("step") != manifest.get("step"):
            what = f"is of step {state.get('step')}" if isinstance(state, dict) else "is no object"
            self.add(STATE, None, f"{what}, {MANIFEST} of step {manifest.get('step')}")


def _understood(content: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Return (manifest or None, what is wrong with it). One that is damaged may still be of use."""
    try:
        manifest = parse_json(content, "it", CheckpointError)
        rendered = json.dumps(manifest, indent=1, sort_keys=True).encode()
        files = {n: (e["size"], e["sha256"]) for n, e in manifest["files"].items()}
        tensors = [(e["shape"], e["dtype"], e["digest"]) for e in manifest["tensors"].values()]
    except (CheckpointError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, f"is not a manifest of this toolkit: {type(error).__name__}: {error}"
    for name, (size, sha256) in files.items():
        if not commit.is_inside(name):
            return None, f"names {name!r}, which is no file of the checkpoint"
        if type(size) is not int or not isinstance(sha256, str):
            return None, f"has no size and sha256 of {name!r}"
    if not all(isinstance(s, list) and isinstance(d, str) for s, d, _ in tensors):
        return None, "has no shapes and dtypes"
    if rendered != content:
        return manifest, "is not as it was written: its bytes are not those of its content"
    return manifest, None
