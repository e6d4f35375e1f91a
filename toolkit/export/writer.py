"""The one writer of exports: group by group read, convert back, cast, write, hash, free.

In OUTPUT.tmp-export/ one weight file after the other is written. All are fsynced at the end: an
fsync may hold up the whole disk. Memory: blocks of 1 MB, and what `read_group` holds of one group.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.commit import CHECKPOINTS
from toolkit.errors import ExportError
from toolkit.export.plan import ExportPlan
from toolkit.export.proof import ExportProof, SourceSum
from toolkit.export.weight_file import TensorValues, write_file
from toolkit.formats import ExportGroup, StoredTensor, export_manifest
from toolkit.formats.synced_files import sync, sync_above

_MARK = ".toolkit-export"  # tells a folder that a killed export left from somebody's files
_QUIET = 30.0  # seconds between two lines of progress where there is no terminal

ReadGroup = Callable[[ExportGroup], Mapping[str, TensorValues]]
"""Returns output name -> values of all outputs of a group."""


def check_output(output: str | Path) -> Path:
    """Return the folder that `output` means; ExportError where something is there already, or it
    lies inside an export or among checkpoints.
    """
    target = Path(output).expanduser().resolve()
    if target.is_file():
        raise ExportError(f"output {output} is a file; give a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ExportError(
            f"output {output} exists and is not empty; give another folder or remove it first"
        )
    if around := next(filter(_is_whole, target.parents), None):
        raise ExportError(
            f"output {output} lies inside {around}, which is no place for another export; give one "
            "elsewhere"
        )
    return target


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is an export, or what holds the checkpoints of a run."""
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
    """Write the folder of `plan` as `target` (of `check_output`), completely or not at all.

    Args:
        read_group: called for each group, in the order of the files.
        origin: the manifest's entry on where the weights come from.
        source_sum: the sums that written tensors must have; see [Note: proof of an export].

    Raises:
        ExportError: no space, files of others in the way, or other bytes in the files than in the
            source.
    """
    proof = ExportProof(plan, source_sum)
    with _staged(target) as folder:
        _check_space(plan, folder)
        for name, content in plan.assets.items():
            (folder / name).write_bytes(content)
        described = export_manifest.describe(folder, sorted(plan.assets))
        for part in _write_files(plan, folder, read_group, proof):
            described["files"].update(part["files"])
            described["tensors"].update(part["tensors"])
        proof.finish()
        for name in described["files"]:
            sync(folder / name)
        known = {"checkpoint": None, "step": None, "run": None, **origin}
        if twice := plan.stored_twice():
            known["stored_twice"] = twice
        export_manifest.write(folder, described, known)


def _write_files(
    plan: ExportPlan, folder: Path, read_group: ReadGroup, proof: ExportProof
) -> Iterator[dict[str, Any]]:
    """Write the weight files and check each; yield the manifest's entries of each file."""
    files: dict[str, dict[str, StoredTensor]] = {}
    for name, place in plan.tensors.items():
        files.setdefault(place.file.name, {})[name] = place
    order = [name for places in files.values() for name in places]
    values, position = _values(plan, order, read_group, proof), {n: i for i, n in enumerate(order)}
    unchecked = sorted(plan.groups, key=lambda g: _last_position(plan, g, position), reverse=True)
    written = 0
    with _progress(_weight_bytes(plan)) as bar:
        for file, places in files.items():
            yield write_file(folder / file, plan.headers[file], places, values, bar.update)
            written += len(places)
            while unchecked and _last_position(plan, unchecked[-1], position) < written:
                proof.check(folder, unchecked.pop())


def _last_position(plan: ExportPlan, group: ExportGroup, position: dict[str, int]) -> int:
    """Return the position, in the order of writing, of the last output of a group."""
    return max(position[plan.names[name]] for name in group.outputs)


def _weight_bytes(plan: ExportPlan) -> int:
    weights = sum(place.nbytes for place in plan.tensors.values())
    return weights + sum(map(len, plan.headers.values()))


def _progress(total: int) -> tqdm:
    wait = 0.1 if sys.stderr.isatty() else _QUIET
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "mininterval": wait, "delay": wait}
    return tqdm(total=total, desc="export", leave=False, **options)


def _values(
    plan: ExportPlan, names: list[str], read_group: ReadGroup, proof: ExportProof
) -> Iterator[TensorValues]:
    """Yield the values of the exported tensors `names`; one group is held at a time.

    Outputs of a group are next to each other in a file, unless they have several dtypes or begin
    in the file before: then the group is read again.
    """
    group_of = {plan.names[n]: group for group in plan.groups for n in group.outputs}
    held: dict[str, TensorValues] = {}
    for name in names:
        if name not in held:
            held.clear()
            group = group_of[name]
            values = read_group(group) if group.sources else plan.copied(group)
            held = {plan.names[n]: value for n, value in values.items()}
            del values  # each tensor goes when it is written
        yield proof.record(group_of[name], name, held.pop(name))


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` that takes its name on success, and else is removed."""
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
            # Before any other file: without the mark they would be somebody else's.
            sync(folder)
            for path in folder.iterdir():  # left by a killed export
                if path.name != _MARK:
                    shutil.rmtree(
                        path
                    ) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield folder
            os.fsync(lock)
            os.rename(folder, target)
            sync_above(target.parent)  # which this export may have made
            # Not before the rename: a folder without the mark is somebody else's.
            (target / _MARK).unlink()
            os.fsync(lock)
        except OSError as error:
            left = "nothing was left"
            if not folder.exists():
                left = "it is complete, but the disk may not keep it: remove it and export again"
            shutil.rmtree(folder, ignore_errors=True)
            raise ExportError(
                f"writing {target} failed: {error.strerror or error}; {left}"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_space(plan: ExportPlan, folder: Path) -> None:
    """Refuse a disk that has no space for the export."""
    needed = _weight_bytes(plan) + sum(map(len, plan.assets.values()))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed / 1e6:.2f} MB, {folder.parent} has {free / 1e6:.2f} MB "
            "free; give an output on another disk, or a smaller dtype",
        )
