"""Write an export group by group: read, convert back, cast, write, hash and free its tensors.

The weight files are written one after the other, in OUTPUT.tmp-export/. All are fsynced at the end,
because an fsync may block the entire disk. Memory: blocks of 1 MB, and the values that `read_group`
holds of one group.

[Note: proof of an export] Each written file is read back, and the bits of its tensors are summed
(`formats.bit_sums`). The sums must equal those of the source. For a running model, each rank sums
its part on its device before anything is gathered, in the dtype of the export. For a checkpoint,
the manifest holds the sums. Tensors that were converted (fused experts) are first loaded again the
way transformers loads them. So a byte that changed in a gather, a copy, a cast, a conversion or a
write is an error that names the tensor, and no folder is left.

If the source has no sum of its own (a merged adapter, tensors that no parameter takes, a
conversion into several dtypes), the sum of the values that reached the writer is compared. This
covers the cast and the write.

Costs one pass over the source and one over the files, which the page cache still holds.
"""

import contextlib
import copy
import errno
import fcntl
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm import tqdm
from transformers import PreTrainedModel

from toolkit.checkpoint.names import CHECKPOINTS
from toolkit.errors import ExportError, LoadingError
from toolkit.export.plan import ExportPlan
from toolkit.formats import (
    BLOCK,
    ExportGroup,
    StoredTensor,
    compute_block_sum,
    compute_row_sum,
    export_manifest,
)
from toolkit.formats.bit_sums import byte_and_row_sums, wrap_to_int64
from toolkit.formats.synced_files import fsync_path, fsync_with_parents, write_behind
from toolkit.loading import load_group, plan_load_groups

_MARK = ".toolkit-export"  # tells a folder that a killed export left from somebody's files
_QUIET = 30.0  # seconds between two lines of progress where there is no terminal

TensorValues = torch.Tensor | Iterator[torch.Tensor]
"""A complete tensor, or an iterator over its rows in order, in blocks."""

ReadGroup = Callable[[ExportGroup], Mapping[str, TensorValues]]
"""Returns output name -> values of all outputs of a group."""

SourceSum = Callable[[str, torch.dtype], int | None]
"""Returns the row sum of a stored tensor, given by name and cast to a dtype; None if unknown."""


# ---- The folder


def resolve_output(output: str | Path) -> Path:
    """Return the absolute path for a new export, and raise an ExportError if it cannot be used.

    The path must not exist, or be an empty folder. `~` and links are resolved; nothing is created.

    Raises:
        ExportError: it is a file, a folder that is not empty, or lies inside another export or
            inside `checkpoints` of a run.
    """
    target = Path(output).expanduser().resolve()
    if target.is_file():
        raise ExportError(f"output {output} is a file; give a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ExportError(
            f"output {output} exists and is not empty; give another folder or remove it first"
        )
    if around := next(filter(_is_export_or_run, target.parents), None):
        raise ExportError(
            f"output {output} lies inside {around}, which is no place for another export; give one "
            "elsewhere"
        )
    return target


def _is_export_or_run(folder: Path) -> bool:
    """Return True if a folder is an export, or the `checkpoints` folder of a run."""
    of_run = folder.name == CHECKPOINTS and any(folder.glob("step-*"))
    return of_run or (folder / export_manifest.FILE).is_file()


def write_export(
    plan: ExportPlan,
    target: Path,
    *,
    read_group: ReadGroup,
    origin: dict[str, Any],
    source_sum: SourceSum = lambda *_: None,
) -> None:
    """Write a planned export to `target`, completely or not at all.

    Args:
        plan: names, dtypes and files of the export.
        target: the folder, from `resolve_output`.
        read_group: returns the values of a group; called in the order of the files.
        origin: the manifest's entry on the source of the weights.
        source_sum: returns the checksum that a written tensor must have, or None if it is unknown;
            see [Note: proof of an export].

    Raises:
        ExportError: there is no space, other files are in the way, a write failed, or the written
            bytes differ from the source.
    """
    proof = ExportProof(plan, source_sum)
    with _staging_folder(target) as folder:
        _check_space(plan, folder)
        for name, content in plan.assets.items():
            (folder / name).write_bytes(content)
        described = export_manifest.describe_folder(folder, sorted(plan.assets))
        for part in _write_files(plan, folder, read_group, proof):
            described["files"].update(part["files"])
            described["tensors"].update(part["tensors"])
        proof.finish()
        for name in described["files"]:
            fsync_path(folder / name)
        entry = {"checkpoint": None, "step": None, "run": None, **origin}
        if twice := plan.stored_twice():
            entry["stored_twice"] = twice
        export_manifest.write(folder, described, entry)


def _write_files(
    plan: ExportPlan, folder: Path, read_group: ReadGroup, proof: "ExportProof"
) -> Iterator[dict[str, Any]]:
    """Write the weight files one by one; yield each file's entries for the manifest.

    After each file, `proof` reads back the groups whose outputs are all written. Shows a progress
    bar.
    """
    files: dict[str, dict[str, StoredTensor]] = {}
    for name, place in plan.tensors.items():
        files.setdefault(place.file.name, {})[name] = place
    order = [name for places in files.values() for name in places]
    values, position = (
        _read_values(plan, order, read_group, proof),
        {n: i for i, n in enumerate(order)},
    )
    unchecked = sorted(
        plan.groups, key=lambda g: _last_write_position(plan, g, position), reverse=True
    )
    written = 0
    with _progress(_weight_bytes(plan)) as bar:
        for file, places in files.items():
            yield write_file(folder / file, plan.headers[file], places, values, bar.update)
            written += len(places)
            while unchecked and _last_write_position(plan, unchecked[-1], position) < written:
                proof.compare(folder, unchecked.pop())


def _last_write_position(plan: ExportPlan, group: ExportGroup, position: dict[str, int]) -> int:
    """Return the index of the group's last output among all tensors in the order of writing.

    `position` maps each exported name to its index.
    """
    return max(position[plan.names[name]] for name in group.outputs)


def _weight_bytes(plan: ExportPlan) -> int:
    """Return the size of all weight files in bytes, including their headers."""
    weights = sum(place.nbytes for place in plan.tensors.values())
    return weights + sum(map(len, plan.headers.values()))


def _progress(total: int) -> tqdm:
    """Create a progress bar over `total` bytes; without a terminal it prints every 30 s."""
    wait = 0.1 if sys.stderr.isatty() else _QUIET
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "mininterval": wait, "delay": wait}
    return tqdm(total=total, desc="export", leave=False, **options)


def _read_values(
    plan: ExportPlan, names: list[str], read_group: ReadGroup, proof: "ExportProof"
) -> Iterator[TensorValues]:
    """Yield the values of the exported tensors `names`; one group at a time is in memory.

    Outputs of a group are usually next to each other in a file. If they are not, because they have
    several dtypes or are in two files, the group is read again. `proof` records all values.
    """
    group_of = {plan.names[n]: group for group in plan.groups for n in group.outputs}
    values_by_name: dict[str, TensorValues] = {}
    for name in names:
        if name not in values_by_name:
            values_by_name.clear()
            group = group_of[name]
            values = read_group(group) if group.sources else plan.read_carried(group)
            values_by_name = {plan.names[n]: value for n, value in values.items()}
            del values  # each tensor goes when it is written
        yield proof.record(group_of[name], name, values_by_name.pop(name))


@contextlib.contextmanager
def _staging_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to `target`, as a context manager.

    If the context ends without an error, the folder is renamed to `target` and fsynced. On an
    error, it is deleted. Leftovers of a killed export are deleted first.

    Raises:
        ExportError: another process writes this export, other files are in the way, or the disk
            failed. An OSError in the context is converted to this error.
    """
    folder = target.with_name(f"{target.name}.tmp-export")
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExportError(f"another process is writing {target} (it holds {folder})") from error
        except OSError as error:
            raise ExportError(f"{folder} cannot be created: {error.strerror}") from error
        if any(folder.iterdir()) and not (folder / _MARK).is_file():
            raise ExportError(
                f"{folder} is in the way and was not left by an export; move it elsewhere"
            )
        try:
            (folder / _MARK).touch()
            # Synced before any other file: without the mark they would seem to be somebody else's.
            fsync_path(folder)
            for path in folder.iterdir():  # left by a killed export
                if path.name != _MARK:
                    shutil.rmtree(
                        path
                    ) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield folder
            os.fsync(lock)
            os.rename(folder, target)
            fsync_with_parents(target.parent)  # which this export may have made
            # Only after the rename: a folder without the mark seems to be somebody else's.
            (target / _MARK).unlink()
            os.fsync(lock)
        except OSError as error:
            outcome = "nothing was left"
            if not folder.exists():
                outcome = "it is complete, but the disk may not keep it: remove it and export again"
            shutil.rmtree(folder, ignore_errors=True)
            raise ExportError(
                f"writing {target} failed: {error.strerror or error}; {outcome}"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_space(plan: ExportPlan, folder: Path) -> None:
    """Raise an OSError (ENOSPC) if the disk of `folder` has no space for the export."""
    needed = _weight_bytes(plan) + sum(map(len, plan.assets.values()))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed / 1e6:.2f} MB, {folder.parent} has {free / 1e6:.2f} MB "
            "free; give an output on another disk, or a smaller dtype",
        )


# ---- One weight file


def write_file(
    path: Path,
    header: bytes,
    places: dict[str, StoredTensor],
    values: Iterator[TensorValues],
    advance: Callable[[int], object],
) -> dict[str, Any]:
    """Write a safetensors file; return its entries for the export's manifest.

    The bytes are written once and hashed twice, for the file and for each tensor, at 10 GB/s per
    hash. In addition to the values, blocks of 1 MB are in memory.

    Args:
        path: the new file, which must not exist.
        header: its first bytes.
        places: name -> dtype, shape and offset of its tensors, in order.
        values: the values of each tensor, in the same order.
        advance: called after each write with the number of written bytes.

    Returns:
        {"files": {file name: size in bytes and hash}, "tensors": {name: entry with the hash}}.

    Raises:
        ExportError: values do not have the planned size, or the dtype cannot represent them.
        OSError: the disk failed.
    """
    end = flushed = 0
    whole, tensors = xxhash.xxh3_128(), dict[str, Any]()
    with open(path, "xb", buffering=0) as file:

        def write(content: memoryview) -> None:
            """Hash and append `content`, start to write it to disk, and call `advance`."""
            nonlocal end, flushed
            whole.update(content)
            _write_all(file.fileno(), content, end)
            end += len(content)
            flushed = write_behind(file.fileno(), flushed, end)
            advance(len(content))

        write(memoryview(header))
        for name, place in places.items():
            begin, value, hashed = end, next(values), xxhash.xxh3_128()
            for content in _cast_blocks(value, place.dtype, name):
                hashed.update(content)
                write(content)
                del content  # a view may keep its whole group while the next one is read
            del value
            if (begin, end - begin) != (place.begin, place.nbytes):
                raise ExportError(
                    f"{name} got {end - begin} bytes at {begin} of {path}, planned were "
                    f"{place.nbytes} at {place.begin}"
                )
            tensors[name] = export_manifest.describe_tensor(place, hashed.hexdigest())
    return {"files": {path.name: {"size": end, "xxh3": whole.hexdigest()}}, "tensors": tensors}


def _write_all(descriptor: int, content: memoryview, position: int) -> None:
    """Write all of `content` at byte `position` of a file, in several calls if necessary."""
    while content:
        count = os.pwrite(descriptor, content, position)
        content, position = content[count:], position + count


def _cast_blocks(values: TensorValues, dtype: torch.dtype, name: str) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, cast to `dtype`, in row-major blocks of at most 1 MB.

    `name` is for the error.

    Raises:
        ExportError: a finite value is too large for float16.
    """
    for part in [values] if isinstance(values, torch.Tensor) else values:
        for block in _row_major_blocks(part, BLOCK // max(part.dtype.itemsize, dtype.itemsize)):
            cast = block.to(dtype)
            if dtype == torch.float16 and bool((cast.isinf() & block.isfinite()).any()):
                raise ExportError(
                    f"{name} has values beyond float16's 65504; use --dtype bfloat16 or float32"
                )
            yield memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _row_major_blocks(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order, as 1-d tensors of at most `most` elements.

    The tensor may have any strides. An empty tensor yields nothing.
    """
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(most) if tensor.numel() else ()
    elif math.prod(tensor.shape[1:]) > most:
        for part in tensor:
            yield from _row_major_blocks(part, most)
    else:
        for rows in tensor.split(max(1, most // math.prod(tensor.shape[1:]))):
            yield rows.reshape(-1)


# ---- Proof of the written files


@dataclass
class ExportProof:
    """Compare the checksums of written tensors with those of their source.

    Call `record` on all values, `compare` on each group whose outputs are all written, and `finish`
    at the end.
    """

    plan: ExportPlan
    source_sum: SourceSum
    wrong: list[str] = field(default_factory=list)  # exported names
    _written: dict[str, int] = field(default_factory=dict)  # exported name -> sum of its values

    def record(self, group: ExportGroup, name: str, values: TensorValues) -> TensorValues:
        """Return the values of an exported tensor for writing.

        If the source has no checksum of the group, the returned iterator sums the values. The sum
        is stored when it ends.
        """
        if self._has_source_sums(group):
            return values
        return self._sum_rows(name, values)

    def compare(self, folder: Path, group: ExportGroup) -> None:
        """Read back the written tensors of `group` in `folder`, and compare their checksums.

        The names of tensors that differ are appended to `wrong`. For a converted group, it is the
        first name only.
        """
        names = [self.plan.names[name] for name in group.outputs]
        entries = {name: _locate_in_folder(self.plan.tensors[name], folder) for name in names}
        if not self._has_source_sums(group):
            sums = {name: compute_row_sum(entry) for name, entry in entries.items()}
            self.wrong += [name for name in names if sums[name] != self._written.pop(name)]
        elif group.converted:
            self.wrong += names[:1] * (not self._loads_as_saved(group, entries))
        else:
            stored = self.plan.stored[group.sources[0]]
            for name, entry in entries.items():
                if compute_row_sum(entry) != self.source_sum(stored, entry.dtype):
                    self.wrong.append(name)

    def finish(self) -> None:
        """Raise an ExportError if `compare` found a tensor that differs from the source."""
        if self.wrong:
            first_names = ", ".join(self.wrong[:3]) + ", ..." * (len(self.wrong) > 3)
            raise ExportError(
                f"other bytes were written of {len(self.wrong)} tensor(s) than their source held: "
                f"{first_names}. A device, its driver, the disk or this machine's memory is at "
                "fault, or something wrote to the weights during the export; nothing was left. "
                "Export again, on another machine if it happens again"
            )

    def _has_source_sums(self, group: ExportGroup) -> bool:
        """Return True if the source has a checksum of each parameter of `group` as exported.

        False for tensors that belong to no parameter, and for a conversion into several dtypes.
        """
        dtypes = {self.plan.tensors[self.plan.names[name]].dtype for name in group.outputs}
        if not group.sources or (group.converted and len(dtypes) > 1):
            return False
        stored = [self.plan.stored[name] for name in group.sources]
        return all(self.source_sum(name, dtype) is not None for name in stored for dtype in dtypes)

    def _loads_as_saved(self, group: ExportGroup, entries: dict[str, StoredTensor]) -> bool:
        """Load a converted group as transformers does; return True if it equals the source.

        Checksums are compared. False if it cannot be loaded. `entries` maps the exported names to
        the written tensors.
        """
        (dtype,) = {entry.dtype for entry in entries.values()}
        parameters: dict[str, torch.Tensor] = {}
        try:
            for part in plan_load_groups(self._reader, entries):
                parameters |= load_group(self._reader, part, entries)
        except LoadingError:
            return False
        for name in group.sources:
            expected = self.source_sum(self.plan.stored[name], dtype)
            if (
                name not in parameters
                or _sum_tensor_in_memory(parameters[name].to(dtype)) != expected
            ):
                return False
        return True

    @cached_property
    def _reader(self) -> PreTrainedModel:
        """A copy of the planned model for loading, because loading changes a model's dtypes."""
        return copy.deepcopy(self.plan.model)  # reading changes a model's dtypes

    def _sum_rows(self, name: str, values: TensorValues) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor unchanged; at the end, store their checksum.

        The checksum is that of the values cast to the exported dtype.
        """
        place, first, total = self.plan.tensors[name], 0, 0
        for part in [values] if isinstance(values, torch.Tensor) else values:
            rows = part if len(place.shape) > 1 else part.reshape(1, -1)
            for block in rows.split(max(1, BLOCK * len(rows) // max(1, rows.nbytes))):
                total += compute_block_sum(place, first, block.to(place.dtype))
                first += len(block)
            yield part
        self._written[name] = wrap_to_int64(total)


def _locate_in_folder(place: StoredTensor, folder: Path) -> StoredTensor:
    """Return `place`, a tensor in exactly one chunk, with its file name joined to `folder`."""
    (chunk,) = place.chunks
    return replace(place, chunks=(replace(chunk, file=folder / chunk.file),))


def _sum_tensor_in_memory(tensor: torch.Tensor) -> int:
    """Compute the row sum of a tensor in memory; see [Note: bit sums]."""
    return int(byte_and_row_sums(tensor if tensor.ndim > 1 else tensor.reshape(-1, 1), 0)[1])
