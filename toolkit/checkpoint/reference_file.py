"""The file of values of a frozen model, such as a reference, and the parts of an unfinished pass.

    step-N/reference.safetensors    in every checkpoint of such a run, and so in its manifest
    RUN/reference.parts/            the values that a pass before the first step has computed so
                                    far. A file's name ends in the hash of its content. The folder
                                    is deleted after the next commit

Both hold, for each table of rows, `NAME.answers` (int64: 2 * row + side) and `NAME.logps` (float32,
finite). Their metadata hold the origin: everything that the values depend on. In distillation,
`answers` are positions of tokens, counted over all rows, and `logps` has a list for each of them.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from toolkit.checkpoint import commit
from toolkit.checkpoint.local_folder import raise_disk_errors
from toolkit.checkpoint.store import Folder, storage_of
from toolkit.errors import CheckpointError, one_line
from toolkit.formats.synced_files import fsync_with_parents
from toolkit.training.train_state import StateFile

FILE = "reference.safetensors"
PARTS = "reference.parts"
BYTES_PER_ROW = 2 * (8 + 4)
_ANSWERS, _LOGPS = ".answers", ".logps"
_PART = re.compile(r"part-([0-9]{5,})-([0-9a-f]{32})\.safetensors")

Origin = dict[str, Any]
"""What the values depend on, as JSON: digests of rows and model, dtype, packing."""
Values = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a table -> answers, int64 [n], and their log-probabilities, float32 [n]."""


def encode(origin: Origin, values: Values) -> bytes:
    """Encode reference values and their origin as the bytes of a safetensors file.

    Args:
        origin: everything that the values depend on.
        values: table -> (numbers of the answers, their log-probabilities under the reference
            model). The number of an answer is 2 * row + side.
    """
    tensors = {}
    for name, (answers, logps) in values.items():
        tensors[name + _ANSWERS] = np.ascontiguousarray(answers, np.int64)
        tensors[name + _LOGPS] = np.ascontiguousarray(logps, np.float32)
    return safetensors.numpy.save(tensors, {"origin": json.dumps(origin, sort_keys=True)})


def decode(content: bytes, file: object) -> tuple[Origin, Values]:
    """Decode the content of a reference file into (origin, values); the inverse of `encode`.

    `file` names the file in errors.

    Raises:
        CheckpointError: the content is no file of reference values.
    """
    try:
        tensors = safetensors.numpy.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        origin = json.loads(header["__metadata__"]["origin"])
        names = [name.removesuffix(_ANSWERS) for name in tensors if name.endswith(_ANSWERS)]
        values = {name: (tensors[name + _ANSWERS], tensors[name + _LOGPS]) for name in names}
    except (SafetensorError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is no file of reference values: {one_line(error)}"
        ) from error
    faults = [name for name, pair in values.items() if not _is_valid_table(*pair)]
    if len(tensors) != 2 * len(values):
        faults = sorted(tensors)
    if not isinstance(origin, dict) or faults:
        raise CheckpointError(
            f"{file} is no file of reference values: expected tensors NAME{_ANSWERS} (int64) and "
            f"NAME{_LOGPS} (float32, finite) of equal length, got {', '.join(faults[:3])}"
        )
    return origin, values


def read_saved_values(saved: Folder) -> tuple[Origin, Values, StateFile]:
    """Read the stored values of a checkpoint, which its manifest lists.

    Returns:
        The origin, the values, and the file for `TrainState.files`.

    Raises:
        CheckpointError: the checkpoint has no such file, or the file is damaged.
    """
    file = saved / FILE
    entry = commit.read_manifest(saved)["files"].get(FILE)
    if entry is None:
        raise CheckpointError(
            f"{saved} holds no {FILE}, which a loss that compares with another model needs: "
            "expected a checkpoint of a run with such a loss. Start in another output_dir"
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(
            f"{file} has other bytes than were saved. Start again: a damaged checkpoint is set "
            "aside, and the run resumes from the one before it"
        )
    origin, values = decode(content, file)
    return origin, values, StateFile(content, entry["sha256"])


def _is_valid_table(answers: np.ndarray, logps: np.ndarray) -> bool:
    """Return True if both arrays have the expected dtypes, equal lengths and valid values.

    Numbers of answers are non-negative int64, log-probabilities are finite float32.
    """
    kinds = answers.dtype == np.int64 and logps.dtype == np.float32
    shapes = answers.ndim == 1 and logps.ndim >= 1 and len(answers) == len(logps)
    return bool(kinds and shapes and (answers >= 0).all() and np.isfinite(logps).all())


# ---- Parts of an unfinished pass


def write_part(root: Folder, number: int, origin: Origin, values: Values) -> None:
    """Write one part of the reference values to a new file in `reference.parts`, durably.

    The values are computed in parts, so that a restart can continue an unfinished computation. The
    file name contains the number and a hash of the content.

    Args:
        root: the folder that holds the checkpoints of the run.
        number: number of the part, from 1.
        origin: everything that the values depend on.
        values: the values of this part.

    Raises:
        CheckpointError: the file cannot be written. It is a StorageError if the disk is full or
            broken, or if the store failed.
    """
    content, folder = encode(origin, values), root / PARTS
    digest = xxhash.xxh3_128(content).hexdigest()
    file = folder / f"part-{number:05d}-{digest}.safetensors"
    with raise_disk_errors(f"{file} of {len(content):,} bytes could not be written"):
        if isinstance(folder, Path) and not folder.is_dir():
            folder.mkdir(parents=True)
            fsync_with_parents(folder)
        storage_of(file).replace(content)


@dataclass
class ReferenceParts:
    """The files in `reference.parts`: results of an unfinished computation of reference values."""

    intact: dict[str, tuple[Origin, Values]]  # by the name of the file, in their order
    damaged: list[str]  # names of files whose content is not what was written
    highest: int  # number of a part


def read_parts(root: Folder) -> ReferenceParts:
    """Read the files of `reference.parts` in `root`; the result is empty if there are none.

    A file whose content does not match the hash in its name is listed as damaged. Files with other
    names are ignored.

    Raises:
        CheckpointError: the disk or store failed, or a file with the right hash cannot be decoded.
    """
    folder, parts = root / PARTS, ReferenceParts({}, [], 0)
    with raise_disk_errors(f"{folder} cannot be read"):
        for name in sorted(storage_of(folder).files()):
            match = _PART.fullmatch(name)
            if match is None:
                continue  # of a write that was killed
            parts.highest = max(parts.highest, int(match[1]))
            content = (folder / name).read_bytes()
            if xxhash.xxh3_128(content).hexdigest() == match[2]:
                parts.intact[name] = decode(content, folder / name)
            else:
                parts.damaged.append(name)
    return parts


def delete_part(root: Folder, name: str) -> None:
    """Delete the file `name` of `reference.parts`. A missing object of a store is no error.

    Raises:
        CheckpointError: the file cannot be deleted, or a local file does not exist.
    """
    file = root / PARTS / name
    with raise_disk_errors(f"{file} cannot be deleted"):
        file.unlink()


def delete_parts(root: Folder) -> None:
    """Delete `reference.parts` in `root` with all its files, if it exists.

    Raises:
        OSError or StorageError: it cannot be deleted.
    """
    folder = root / PARTS
    if isinstance(folder, Path):
        if folder.is_dir():
            shutil.rmtree(folder)
        return
    for name in folder.files():
        (folder / name).unlink()
