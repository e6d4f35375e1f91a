"""The one writer of exports: group by group read, convert back, cast, write, hash, free.

In OUTPUT.tmp-export/ one weight file after the other is written, and noted as finished. All are
fsynced at the end: an fsync may hold up the whole disk. Memory: blocks of 1 MB, and what
`read_group` holds of one group.

[Note: what an interrupted export leaves] The note names the plan and the weights (their hashes),
and sizes and hashes of each finished file and its tensors. A later start of the same export keeps
the finished files that are still the same to the byte, so that the note needs no fsync; any other
one writes everything anew, and so does one after an fsync that failed.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit import ranks
from toolkit.checkpoint.commit import CHECKPOINTS
from toolkit.errors import ExportError
from toolkit.export.plan import ExportPlan
from toolkit.export.weight_file import TensorValues, write_file
from toolkit.formats import ExportGroup, StoredTensor, export_manifest, is_plain_name
from toolkit.formats.synced_files import replacing, sync, sync_above
from toolkit.parsing import read_json

_MARK = ".toolkit-export"  # the note; tells a folder that an export left from somebody's files
_QUIET = 30.0  # seconds between two lines of progress where there is no terminal

ReadGroup = Callable[[ExportGroup], Mapping[str, TensorValues]]
"""Returns output name -> values of all outputs of a group."""


def check_output(output: str | Path, inside: Path | None = None) -> Path:
    """Return the folder that `output` means; ExportError where something is there already, or it
    lies inside the checkpoint `inside`.
    """
    target = Path(output).expanduser().resolve()
    if target.is_file():
        raise ExportError(f"output {output} is a file; give a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ExportError(
            f"output {output} exists and is not empty; give another folder or remove it first"
        )
    if inside is not None and inside.resolve() in (target, *target.parents):
        raise ExportError(
            f"output {output} lies inside the checkpoint {inside.resolve()}; give a folder "
            "elsewhere"
        )
    if around := next(filter(_is_whole, target.parents), None):
        raise ExportError(
            f"output {output} lies inside {around}, which is no place for another export; give one "
            "elsewhere"
        )
    return target


def staging_folder(target: Path) -> Path:
    """Return the folder in which an export is written; it stays where one was interrupted."""
    return target.with_name(f"{target.name}.tmp-export")


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is an export, or what holds the checkpoints of a run."""
    of_run = folder.name == CHECKPOINTS and any(folder.glob("step-*"))
    return of_run or (folder / export_manifest.FILE).is_file()


def write_export(
    plan: ExportPlan,
    target: Path,
    *,
    weights: str,
    read_group: ReadGroup,
    origin: dict[str, Any],
) -> None:
    """Write the folder of `plan` as `target` (of `check_output`), whole or not at all.

    Args:
        weights: changes with the weights; an interrupted export of the same ones is taken up.
        read_group: called for each group that is not written yet, in the order of the files.
        origin: what the manifest says of where the weights come from.

    Raises:
        ExportError: no space, or files of others in the way.
    """
    with _staged(target, {"plan": plan.digest(), "weights": weights}) as staging:
        _check_space(plan, staging)
        _write_files(plan, staging, read_group)
        for name, content in plan.assets.items():
            (staging.folder / name).write_bytes(content)
        described = export_manifest.describe(staging.folder, sorted(plan.assets))
        for part in staging.finished.values():
            described["files"].update(part["files"])
            described["tensors"].update(part["tensors"])
        if sorted(described["files"]) != export_manifest.listed(staging.folder):
            raise ExportError(f"{staging.folder} holds files that are not of this export")
        try:
            for name in described["files"]:
                sync(staging.folder / name)
        except OSError:
            # A failed fsync is told once: the page cache would vouch for bytes the disk lacks.
            staging.finished.clear()
            raise
        known = {"checkpoint": None, "step": None, "run": None, **origin}
        if twice := plan.stored_twice():
            known["stored_twice"] = twice
        export_manifest.write(staging.folder, described, known)


def _write_files(plan: ExportPlan, staging: "_Staging", read_group: ReadGroup) -> None:
    """Write the weight files that are not finished."""
    todo: dict[str, dict[str, StoredTensor]] = {}
    for name, place in plan.tensors.items():
        if place.file.name not in staging.finished:
            todo.setdefault(place.file.name, {})[name] = place
    total = sum(len(plan.headers[file]) for file in todo)
    total += sum(place.nbytes for places in todo.values() for place in places.values())
    values = _values(plan, [n for places in todo.values() for n in places], read_group)
    with _progress(total) as bar:
        for file, places in todo.items():
            path, header = staging.folder / file, plan.headers[file]
            staging.finish(write_file(path, header, places, values, bar.update))


def _progress(total: int) -> tqdm:
    wait = 0.1 if sys.stderr.isatty() else _QUIET
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "mininterval": wait, "delay": wait}
    return tqdm(total=total, desc="export", leave=False, **options)


def _values(plan: ExportPlan, names: list[str], read_group: ReadGroup) -> Iterator[TensorValues]:
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
        yield held.pop(name)


@dataclass
class _Staging:
    """The folder that is being written, and the note of what is finished in it."""

    folder: Path
    key: dict[str, str]
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Weight file -> what `export_manifest.describe` returned for it alone."""

    def take_over(self) -> None:
        """Keep the finished files of an interrupted export; remove everything else it left."""
        mark = self.folder / _MARK
        if mark.is_file() and mark.stat().st_size:
            try:
                note = read_json(mark, ExportError)
                if note["key"] == self.key:
                    noted = note["finished"].items()
                    self.finished = {name: d for name, d in noted if self._holds(name, d)}
            except (ExportError, KeyError, TypeError, AttributeError):
                pass  # a note that was cut off: nothing counts as finished
            kept = f"{len(self.finished)} finished weight file(s) of it are kept"
            ranks.show(
                f"NOTE: {self.folder} was left by an interrupted export; {kept}", file=sys.stderr
            )
        for path in self.folder.iterdir():
            if path.name not in self.finished and path != mark:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not self.finished:
            mark.write_text("")
            # Before any other file: without the mark they would be somebody else's.
            sync(self.folder)

    def _holds(self, name: str, described: dict[str, Any]) -> bool:
        try:
            is_here = is_plain_name(name)
            return is_here and export_manifest.describe(self.folder, [name]) == described
        except ExportError:  # no plain file, or its header is damaged: written anew
            return False

    def finish(self, described: dict[str, Any]) -> None:
        """Note that the weight file `described` is complete."""
        self.finished |= dict.fromkeys(described["files"], described)
        note = {"key": self.key, "finished": self.finished}
        with replacing(self.folder / _MARK) as scratch:
            scratch.write_text(json.dumps(note))

    def leave(self) -> str:
        """Remove the folder unless there is something in it to go on with; return what is left."""
        if not self.folder.exists():
            return "it is complete, but the disk may not keep it: remove it and export again"
        if not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was left"
        stay = f"{len(self.finished)} finished weight file(s) stay in {self.folder}"
        return f"{stay}: the same command goes on from there"


@contextlib.contextmanager
def _staged(target: Path, key: dict[str, str]) -> Iterator[_Staging]:
    """Yield a folder beside `target` that takes its name on success.

    On a failure it is removed, unless a weight file was finished and the cause lies outside (the
    disk, an interrupt).
    """
    folder = staging_folder(target)
    staging = _Staging(folder, key)
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
            staging.take_over()
            yield staging
            os.fsync(lock)
            os.rename(folder, target)
            sync_above(target.parent)  # which this export may have made
            # Not before the rename: a folder without the mark is somebody else's.
            (target / _MARK).unlink()
            os.fsync(lock)
        except OSError as error:
            raise ExportError(
                f"writing {target} failed: {error.strerror or error}; {staging.leave()}"
            ) from error
        except (KeyboardInterrupt, SystemExit):
            print(staging.leave(), file=sys.stderr)
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_space(plan: ExportPlan, staging: _Staging) -> None:
    """Refuse a disk that has no space for what is not finished."""
    weights = (t.nbytes for t in plan.tensors.values() if t.file.name not in staging.finished)
    needed = sum(weights) + sum(map(len, (*plan.headers.values(), *plan.assets.values())))
    free = shutil.disk_usage(staging.folder).free
    if needed > free:
        parent = staging.folder.parent
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed / 1e6:.2f} MB, {parent} has {free / 1e6:.2f} MB free; give "
            "an output on another disk, or a smaller dtype",
        )
