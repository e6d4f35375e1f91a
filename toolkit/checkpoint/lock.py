"""The lock of a run's folder: one process at a time writes there, and others learn which.

[Note: who still lives] `run.lock` is locked by the kernel for as long as its owner's process lives,
however that ends, and holds a note of the owner. A note in a file that nobody has locked is stale
where it is of this very kernel. Of another host nobody knows: some network file systems keep locks
to one host, or have none. So the owner touches the file every few seconds, and who wants it watches
for longer, by a clock of its own: no two clocks are compared. Where two hosts take it in the same
moment on such a file system, the later note stays, and the other one's next save is refused.

An object store has no locks at all: there, too, the later note stays.
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
    file: Any  # a path, or an object
    descriptor: int  # open, and thus locked, until the process ends; -1 on a store
    token: str
    ended: threading.Event


_held: dict[Folder, _HeldLock] = {}


def acquire(folder: Any, job: str = "", setting: str = "output_dir") -> str:
    """Keep the folder for this process until its end, or `release`; return a line where an owner
    that is gone had it, or there are no locks. `job` is told to others, `setting` names the folder
    in errors. Costs 75 s after an owner on another host, on a store two requests.

    ConfigError: somebody else has it (named). CheckpointError: the disk or store refuses.
    """
    if folder.resolve() in _held:
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
            raise _in_use(setting, folder, _read_note(file)) from None
        except OSError as error:
            exact, line = False, f"note: {folder} has no locks ({error.strerror}): {_ALONE}"
        if not (file.exists() and os.path.samestat(os.fstat(descriptor), file.stat())):
            raise _in_use(setting, folder, {})  # its owner has just removed it
        before = _read_note(file)
        here = exact and before.get("kernel") == _kernel_id()
        if before and not here and _is_owner_alive(file, before):
            raise _in_use(setting, folder, before)
        held = _HeldLock(file, descriptor, os.urandom(8).hex(), threading.Event())
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _format_note(job, held), 0)
        os.fsync(descriptor)
        undo.pop_all()
    _held[folder.resolve()] = held
    threading.Thread(
        target=_touch_until_released, args=(held, file), name="lock", daemon=True
    ).start()
    return (
        f"note: {folder} was in use by {_describe_owner(before)}, which is gone" if before else line
    )


def _acquire_on_store(place: Any, job: str) -> str:
    """Leave a note on a store; return a line where another one lies there."""
    held = _HeldLock(place / LOCK, -1, os.urandom(8).hex(), threading.Event())
    before = _read_note(held.file)
    held.file.write_bytes(_format_note(job, held))
    _held[place] = held
    if not before:
        return ""
    owner = _describe_owner(before)
    return f"note: {place} was in use by {owner}: if that still runs, its next save is refused"


def release(folder: Folder) -> None:
    """Give the folder back, where this process has it. A save in flight keeps it to the end of the
    process, and then the next owner finds a stale note.
    """
    if background.is_running() or (held := _held.pop(folder.resolve(), None)) is None:
        return
    held.ended.set()
    # Where it cannot be written any more, the note is as stale as that of a killed process.
    with contextlib.suppress(OSError, CheckpointError):
        if held.descriptor < 0:
            if _read_note(held.file).get("token") == held.token:
                held.file.unlink()
        else:
            os.ftruncate(held.descriptor, 0)
            if os.listdir(held.file.parent) == [LOCK]:  # a start that was refused leaves nothing
                held.file.unlink()
                held.file.parent.rmdir()
    if held.descriptor >= 0:
        os.close(held.descriptor)


def check_held() -> None:
    """Refuse to write on where another process has taken over what this one held: CheckpointError
    names it.
    """
    for held in _held.values():
        with raise_disk_errors(f"{held.file} cannot be read"):
            note = _read_note(held.file)
        if note.get("token") != held.token:
            taken = f"is in use by {_describe_owner(note)}" if note else "was removed or emptied"
            raise CheckpointError(
                f"{held.file} {taken}: this run has lost its folder, and writes nothing more there"
            )


def _in_use(setting: str, folder: Path, owner: dict[str, Any]) -> ConfigError:
    return ConfigError(
        f"{setting} {folder} is in use by {_describe_owner(owner)}; wait for it, end it, or give "
        f"another {setting}"
    )


def _format_note(job: str, held: _HeldLock) -> bytes:
    """Return the note of this process."""
    owner = {"host": platform.node(), "pid": os.getpid(), "job": job, "kernel": _kernel_id()}
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (json.dumps({**owner, "since": since, "token": held.token}) + "\n").encode()


def _describe_owner(owner: dict[str, Any]) -> str:
    """Return an owner in words."""
    if not owner:
        return "another process, which is just starting or ending"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}{job}"


def _read_note(file: Folder) -> dict[str, Any]:
    """Return the note of the owner, {} where there is none or it was cut off."""
    # Opened anew each time: a client of NFS then asks the server.
    try:
        return _parse_note(file.read_bytes())
    except FileNotFoundError:
        return {}


def _parse_note(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content[:4096])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_owner_alive(file: Path, owner: dict[str, Any]) -> bool:
    """Watch whether the owner lives; False where it is gone, or gives the folder back meanwhile."""
    print(
        f"watching   for {_WATCH:.0f} s whether {_describe_owner(owner)} still uses {file.parent}",
        flush=True,
    )
    touched, end = _modified_ns(file), time.monotonic() + _WATCH
    while time.monotonic() < end:
        time.sleep(_BEAT / 10)
        if _modified_ns(file) != touched:
            return bool(_read_note(file))
    return False


def _modified_ns(file: Path) -> int:
    with open(file, "rb") as f:
        return os.fstat(f.fileno()).st_mtime_ns


def _touch_until_released(held: _HeldLock, file: Path) -> None:
    """Touch the file until it is given back or lost."""
    while not held.ended.wait(_BEAT):
        # A disk that fails is reported by the run's other writes.
        with contextlib.suppress(OSError), open(file, "rb") as f:
            if _parse_note(f.read()).get("token") != held.token:
                return
            os.utime(f.fileno())


def _kernel_id() -> str:
    """Return what tells a running kernel from every other one."""
    return _BOOT.read_text().strip() if _BOOT.exists() else platform.node()


def _close_after_fork() -> None:
    """Leave the lock to the parent: a worker that outlives it for some seconds must not keep it."""
    while _held:
        if (held := _held.popitem()[1]).descriptor >= 0:
            os.close(held.descriptor)


os.register_at_fork(after_in_child=_close_after_fork)
