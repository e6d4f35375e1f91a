"""The lock of a run's folder: only one process at a time writes there, and others can name it.

[Note: who still lives] The kernel keeps `run.lock` locked while its owner's process lives, however
that ends. The file holds a note on the owner. If nobody has locked the file and the note is from
this kernel, it is stale. For a note from another host this is unknown, because some network file
systems keep locks to one host, or have none. So the owner touches the file every few seconds. A
process that wants the folder watches the file for longer, and measures that time with its own
clock, so that the clocks of two hosts are never compared. If two hosts take such a folder at the
same moment, the later note stays, and the next save of the other host is refused.

An object store has no locks at all, so the later note stays there, too.
"""

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.local_folder import raise_disk_errors
from toolkit.checkpoint.store import Folder, storage_of
from toolkit.errors import CheckpointError, ConfigError
from toolkit.training import background

LOCK = "run.lock"
_BEAT = 10.0  # seconds between two touches
_WATCH = 75.0  # longer than some of them, and than a client of NFS may keep what it saw (60)
_ALONE = "start one run only on it at a time"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class _HeldLock:
    """A lock that this process holds on a folder; `token` identifies it in the lock file."""

    file: Any  # a path, or an object
    descriptor: int  # open, and thus locked, until the process ends; -1 on a store
    token: str
    ended: threading.Event


_held_locks: dict[Folder, _HeldLock] = {}


def acquire(folder: Any, job: str = "", setting: str = "output_dir") -> str:
    """Lock a run's folder, so that no other process writes there until this process ends.

    The lock is a file that describes its owner: host, process id and job. `release` unlocks it. If
    the file is from another host, this waits up to 75 s to see if that owner still runs. On a
    store, it takes two requests and only replaces the file. Does nothing if this process holds the
    lock already.

    Args:
        folder: the folder, which is created if necessary.
        job: a description of this process, which other processes show in their errors.
        setting: the setting that names the folder, for errors.

    Returns:
        A log line if an earlier owner left its file or the file system has no locks, otherwise "".

    Raises:
        ConfigError: another process uses the folder (the error names it).
        CheckpointError: the disk or store failed.
    """
    if folder.resolve() in _held_locks:
        return ""
    if not storage_of(folder).is_disk:
        return _acquire_on_store(folder, job)
    file = folder / LOCK
    with contextlib.ExitStack() as undo, raise_disk_errors(f"{file} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        undo.callback(os.close, descriptor)
        exact, line = True, ""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use_error(setting, folder, _read_note(file)) from None
        except OSError as error:
            exact, line = False, f"note: {folder} has no locks ({error.strerror}): {_ALONE}"
        if not (file.exists() and os.path.samestat(os.fstat(descriptor), file.stat())):
            raise _in_use_error(setting, folder, {})  # its owner has just removed it
        before = _read_note(file)
        here = exact and before.get("kernel") == _kernel_id()
        if before and not here and _is_owner_alive(file, before):
            raise _in_use_error(setting, folder, before)
        lock = _HeldLock(file, descriptor, os.urandom(8).hex(), threading.Event())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _format_lock_content(job, lock), 0)
        os.fsync(descriptor)
        undo.pop_all()
    _held_locks[folder.resolve()] = lock
    threading.Thread(
        target=_touch_until_released, args=(lock, file), name="lock", daemon=True
    ).start()
    return (
        f"note: {folder} was in use by {_describe_owner(before)}, which is gone" if before else line
    )


def _acquire_on_store(place: Any, job: str) -> str:
    """Write this process's lock file to a store; return a log line if it replaces another one.

    A store has no locks. If the other owner still runs, it is refused at its next save.

    Returns:
        The log line; "" if there was no lock file.
    """
    lock = _HeldLock(place / LOCK, -1, os.urandom(8).hex(), threading.Event())
    before = _read_note(lock.file)
    lock.file.write_bytes(_format_lock_content(job, lock))
    _held_locks[place] = lock
    if not before:
        return ""
    owner = _describe_owner(before)
    return f"note: {place} was in use by {owner}: if that still runs, its next save is refused"


def release(folder: Folder) -> None:
    """Unlock the folder, if this process has locked it.

    If a save in the background is running, nothing is done, and the lock ends with the process. A
    folder that holds only the lock file is removed.
    """
    if background.is_running() or (lock := _held_locks.pop(folder.resolve(), None)) is None:
        return
    lock.ended.set()
    # If the note can no longer be written, it is as stale as that of a killed process.
    with contextlib.suppress(OSError, CheckpointError):
        if lock.descriptor < 0:
            if _read_note(lock.file).get("token") == lock.token:
                lock.file.unlink()
        else:
            os.ftruncate(lock.descriptor, 0)
            if os.listdir(lock.file.parent) == [LOCK]:  # a refused start leaves nothing
                lock.file.unlink()
                lock.file.parent.rmdir()
    if lock.descriptor >= 0:
        os.close(lock.descriptor)


def check_held() -> None:
    """Raise a CheckpointError if this process has lost a folder that it had locked.

    A folder is lost if another process has taken it over, or if its lock file was removed, was
    emptied or cannot be read.
    """
    for lock in _held_locks.values():
        with raise_disk_errors(f"{lock.file} cannot be read"):
            note = _read_note(lock.file)
        if note.get("token") != lock.token:
            status = f"is in use by {_describe_owner(note)}" if note else "was removed or emptied"
            raise CheckpointError(
                f"{lock.file} {status}: this run has lost its folder, and writes nothing more there"
            )


def _in_use_error(setting: str, folder: Path, owner: dict[str, Any]) -> ConfigError:
    """Build the error that says which process uses `folder`."""
    return ConfigError(
        f"{setting} {folder} is in use by {_describe_owner(owner)}; wait for it, end it, or give "
        f"another {setting}"
    )


def _format_lock_content(job: str, lock: _HeldLock) -> bytes:
    """Format a lock file as JSON: host, process id, job, boot, time and token of this process."""
    owner = {"host": platform.node(), "pid": os.getpid(), "job": job, "kernel": _kernel_id()}
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (json.dumps({**owner, "since": since, "token": lock.token}) + "\n").encode()


def _describe_owner(owner: dict[str, Any]) -> str:
    """Format the owner that a lock file describes (host, process id, start, job) for messages.

    An empty `owner` stands for a process that is just starting or ending.
    """
    if not owner:
        return "another process, which is just starting or ending"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}{job}"


def _read_note(file: Folder) -> dict[str, Any]:
    """Read the JSON object in a lock file, which describes its owner.

    Returns {} if there is no file or no complete JSON.
    """
    # The file is opened again each time, because an NFS client then queries the server.
    try:
        return _parse_note(file.read_bytes())
    except FileNotFoundError:
        return {}


def _parse_note(content: bytes) -> dict[str, Any]:
    """Parse a lock file's content; return {} if it is not a complete JSON object."""
    try:
        note = json.loads(content[:4096])
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _is_owner_alive(file: Path, owner: dict[str, Any]) -> bool:
    """Watch a lock file for up to 75 s; return True if its owner touches or rewrites it meanwhile.

    Returns False if the file does not change, or if the change was the owner's release. Prints a
    line before it waits.
    """
    print(
        f"watching   for {_WATCH:.0f} s whether {_describe_owner(owner)} still uses {file.parent}",
        flush=True,
    )
    touched, end = _modification_ns(file), time.monotonic() + _WATCH
    while time.monotonic() < end:
        time.sleep(_BEAT / 10)
        if _modification_ns(file) != touched:
            return bool(_read_note(file))
    return False


def _modification_ns(file: Path) -> int:
    """Return the modification time of a file in nanoseconds.

    Opens the file, because an NFS client then queries the server.
    """
    with open(file, "rb") as f:
        return os.fstat(f.fileno()).st_mtime_ns


def _touch_until_released(lock: _HeldLock, file: Path) -> None:
    """Touch the lock file every 10 s until it is released or another process takes it."""
    while not lock.ended.wait(_BEAT):
        # A disk that fails is reported by the run's other writes.
        with contextlib.suppress(OSError), open(file, "rb") as f:
            if _parse_note(f.read()).get("token") != lock.token:
                return
            os.utime(f.fileno())


def _kernel_id() -> str:
    """Return an identifier that differs for each host and, on Linux, for each boot."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def _close_after_fork() -> None:
    """Drop the locks in a forked child, so that only the parent holds them.

    Otherwise a worker that outlives the parent for some seconds would keep the folder locked.
    """
    while _held_locks:
        if (lock := _held_locks.popitem()[1]).descriptor >= 0:
            os.close(lock.descriptor)


os.register_at_fork(after_in_child=_close_after_fork)
