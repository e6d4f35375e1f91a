"""The exported folder on the disk: it appears whole or not at all, and goes on where it stopped.

    OUTPUT.tmp-export/     weight files one after the other, each fsynced, read back, described, and
                           only then noted as finished
    OUTPUT                 the same folder under its final name, once everything is in it

Owns the staging folder, the note of what is finished, and the last checks. The bytes come from a
function that is given the open file; neither DCP nor ranks are known here.

[Note: what an interrupted export leaves] The note names the plan and the weights it was made of
(their hashes), and size and sha256 of each finished file and its tensors. A later start of the same
export reads the finished files again and keeps those that are to the byte what the note says; with
any other plan or other weights everything is written anew.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.checkpoint.commit import sync, sync_above
from toolkit.errors import ExportError, LoadingError
from toolkit.export.plan import Plan
from toolkit.export.streaming import Target, created
from toolkit.formats import manifest as export_manifest
from toolkit.formats.direct_io import write_all
from toolkit.formats.hf_folder import INDEX_FILE, SINGLE_FILE, read_weights, weight_files

_MARK = ".toolkit-export"  # tells a folder left by an interrupted export from somebody's files
_LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


@dataclass
class Timing:
    """Seconds that an export took, by what they were spent on."""

    plan: float = 0.0
    """Metadata, the model on meta, names and places."""
    bytes: float = 0.0
    """Moving the weights, with the fsync of every file."""
    source: float = 0.0
    """Comparing the bytes that were read with the checkpoint's hashes."""
    manifest: float = 0.0
    """Reading the written files back, hashing files and tensors."""
    finish: float = 0.0
    """Config, tokenizer, manifest, headers compared with the plan, the final name."""

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - begun)


@dataclass
class Staging:
    """A folder that is being written."""

    folder: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Finished weight file -> what `export_manifest.describe` says of it alone."""
    key: dict[str, str] = field(default_factory=dict)

    def finished(self, name: str, described: dict[str, Any]) -> None:
        """Note that the weight file `name` is complete, fsynced and as described."""
        self.done[name] = described
        temporary = self.folder / f"{_MARK}.tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            json.dump({**self.key, "done": self.done}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, self.folder / _MARK)


def check_output(output: str | Path, inside: Path | None = None) -> Path:
    """Return the folder that `output` means; `inside` is where it must not lie.

    Raises:
        ExportError: it is in the way, or inside the checkpoint.
    """
    target = Path(output).expanduser().resolve()
    if target.is_file():
        raise ExportError(f"output {output} is a file; give a folder that does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ExportError(
            f"output {output} exists and is not empty; give another folder or remove it first"
        )
    if inside is not None and (inside.resolve() == target or inside.resolve() in target.parents):
        raise ExportError(
            f"output {output} lies inside the checkpoint {inside.resolve()}; give a folder "
            "elsewhere"
        )
    return target


def check_space(target: Path, needed: int) -> None:
    """Check that the disk of `target` has `needed` bytes free; what was begun there counts.

    Raises:
        ExportError: it has not.
    """
    parent = next(p for p in target.parents if p.is_dir())
    free, begun = shutil.disk_usage(parent).free, _staging(target)
    if begun.is_dir():
        free += sum(p.stat().st_blocks * 512 for p in begun.iterdir() if p.is_file())
    if needed > free:
        raise ExportError(
            f"the export needs {_readable(needed)}, {parent} has {_readable(free)} free; give an "
            "output on another disk, or a smaller dtype"
        )


@contextlib.contextmanager
def staged(target: Path, plan: str, weights: str) -> Iterator[Staging]:
    """Yield a folder beside `target` that takes its name on success.

    On a failure it is removed, unless a weight file was finished and the cause lies outside (the
    disk, an interrupt): then it stays, and the same export goes on there.

    Args:
        plan: `Plan.digest()`.
        weights: changes with the weights.

    Raises:
        ExportError: it cannot be made, somebody's files are in the way, another process is at it,
            or writing failed.
    """
    folder, key = _staging(target), {"plan": plan, "weights": weights}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ExportError(f"{folder} cannot be created: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ExportError(f"another process is writing {target} (it holds {folder})") from error
        if any(folder.iterdir()) and not (folder / _MARK).is_file():
            raise ExportError(
                f"{folder} is in the way and was not left by an export; move it elsewhere"
            )
        staging = Staging(folder, key=key)
        try:
            staging.done = _take_over(folder, key)
            yield staging
            os.fsync(lock)
            os.rename(folder, target)
        except OSError as error:
            cause = f"writing {target} failed: {error.strerror or error}"
            raise ExportError(f"{cause}; {_leave(staging)}") from error
        except (KeyboardInterrupt, SystemExit):
            print(_leave(staging), file=sys.stderr)
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            sync_above(target.parent)  # which this export may have made
            # Not before the rename: a folder without the mark is somebody else's.
            (target / _MARK).unlink()
            os.fsync(lock)
        except OSError as error:
            raise ExportError(
                f"{target} is complete, but the disk may not keep it: {error.strerror or error}; "
                "remove it and export again"
            ) from error
    finally:
        os.close(lock)


def write_weights(
    plan: Plan,
    staging: Staging,
    fill: Callable[[str, Target, Callable[[int], Any]], None],
    timing: Timing,
    check: Callable[[str], None] = lambda name: None,
) -> None:
    """Write every weight file that is not finished yet.

    Args:
        fill: called with the file's name, the open file (header written, all bytes reserved) and a
            function to call with the bytes done; writes every tensor of that file.
        check: called with the file's name once it is on the disk; raises when what was read is not
            what was saved.
    """
    todo = [name for name in plan.headers if name not in staging.done]
    expected = dict.fromkeys(plan.headers, 0)
    for output in plan.outputs.values():
        expected[output.file] += output.nbytes
    with _progress(sum(expected[name] for name in todo)) as advance:
        for name in todo:
            written = 0

            def counted(count: int) -> None:
                nonlocal written
                written += count
                advance(count)

            file = staging.folder / name
            with timing.of("bytes"), created(file, plan.sizes[name]) as target:
                write_all(target.cached, memoryview(plan.headers[name]), 0)
                fill(name, target, counted)
                os.fsync(target.cached)
            if written != expected[name]:
                raise ExportError(f"{name} got {written} bytes of weights, not {expected[name]}")
            with timing.of("source"):
                check(name)
            with timing.of("manifest"):
                staging.finished(name, export_manifest.describe(staging.folder, only=[name]))


def finish(plan: Plan, staging: Staging, origin: dict[str, Any]) -> None:
    """Write everything beside the weights and the manifest, and read the headers back.

    Raises:
        ExportError: what was written is not what was planned.
    """
    for name, content in plan.assets.items():
        (staging.folder / name).write_bytes(content)
        sync(staging.folder / name)
    _verify(plan, staging.folder)
    described = export_manifest.describe(staging.folder, only=sorted(plan.assets))
    for part in staging.done.values():
        described["files"].update(part["files"])
        described["tensors"].update(part["tensors"])
    if sorted(described["files"]) != export_manifest.listed(staging.folder):
        raise ExportError(f"{staging.folder} holds files that are not of this export")
    export_manifest.write(staging.folder, described, origin)


def _staging(target: Path) -> Path:
    return target.with_name(f"{target.name}.tmp-export")


def _take_over(folder: Path, key: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the finished files of an interrupted export; remove everything else it left."""
    try:
        note = json.loads((folder / _MARK).read_text("utf-8"))
        noted = note["done"] if {k: note[k] for k in key} == key else {}
        done = {n: d for n, d in noted.items() if os.path.basename(n) == n and _still(folder, n, d)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        done = {}  # no note, or one of a write that was cut off: as if nothing were finished
    for path in sorted(folder.iterdir(), key=lambda p: p.name == _MARK):
        if path.name not in done and path.name != _MARK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if not done:
        (folder / _MARK).write_text("")
        sync(folder)  # before any other file: without the mark they would be somebody else's
    return done


def _still(folder: Path, name: str, described: dict[str, Any]) -> bool:
    file = folder / name
    if file.is_symlink() or not file.is_file() or file.stat().st_size < 8:
        return False
    try:
        return export_manifest.describe(folder, only=[name]) == described
    except ExportError:  # its header is damaged: written anew
        return False


def _leave(staging: Staging) -> str:
    """Remove the staging folder, unless there is something in it to go on with; say what is."""
    if not staging.done:
        shutil.rmtree(staging.folder, ignore_errors=True)
        return "nothing was left"
    return (
        f"{len(staging.done)} finished weight file(s) stay in {staging.folder}: the same command "
        "goes on from there"
    )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], Any]]:
    """Yield a function to call with the bytes done: a bar on a terminal, else a line at times."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc="consolidate", unit="B", unit_scale=True) as bar:
            yield bar.update
        return
    begun = said = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        now = time.monotonic()
        if now - said >= _LINE_EVERY:
            said, rate = now, done / (now - begun)
            print(
                f"consolidate: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, "
                f"{(total - done) / rate:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance


def _verify(plan: Plan, folder: Path) -> None:
    """Read the written headers back and compare them with the plan."""
    own = [folder / name for name in plan.headers]  # an adapter's is in no index
    indexed = {SINGLE_FILE, INDEX_FILE} & {*plan.headers, *plan.assets}
    try:
        entries = read_weights(weight_files(folder) if indexed else own)
    except LoadingError as error:
        raise ExportError(f"the export does not read back: {error}") from error
    found = {n: (e.file.name, e.begin, e.dtype, e.shape) for n, e in entries.items()}
    planned = {n: (o.file, o.begin, o.dtype, o.shape) for n, o in plan.outputs.items()}
    for name in sorted(found.keys() | planned.keys()):
        if found.get(name) != planned.get(name):
            raise ExportError(
                f"{name} reads back as {found.get(name)}, planned was {planned.get(name)}"
            )


def _readable(nbytes: int) -> str:
    return f"{nbytes / 10**9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 10**6:.2f} MB"
