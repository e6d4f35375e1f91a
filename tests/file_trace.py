"""File operations seen from Python, and a disk that forgets what was not fsynced.

    Tracer      counts operations below a folder; kills before one of them, or makes them fail
    Disk        what was seen, in order; says which trees may be there after a power loss

Knows nothing of checkpoints. Operations are what audit hooks report (open for writing, mkdir,
rename, remove, rmdir) and `os.fsync`. Bytes are not seen as they are written: the folder is read
whole at each operation, so what code outside of Python writes or renames is seen too.

[Note: what a power loss may leave] A file's bytes are certain from its own fsync on, a name from
the fsync of the folder that it is in. Everything later may be there or not, in any combination;
only the two halves of a rename within one folder go together. That is weaker than what ext4 or XFS
promise.
"""

import contextlib
import errno
import os
import pickle
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPACE, SYNC, NAMES = 1, 2, 4
"""What an operation can be made to fail for: new bytes or names, fsync, renames and removals."""
_KINDS = {"open": SPACE, "mkdir": SPACE, "fsync": SYNC, "rename": NAMES, "remove": NAMES}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_BLOCK = 512

Tree = dict[str, bytes | None]
"""Relative path -> content; None is a folder."""
Snapshot = dict[str, tuple[int, bytes | None]]
"""Relative path -> inode and content; "" is the folder itself."""


@dataclass
class Record:
    """What was seen at one operation: the folder as it is before it, or after an fsync."""

    name: str
    snapshot: Snapshot
    synced: int | None = None
    """The inode of what was fsynced."""
    note: bool = False
    """A line of the caller's own, no operation."""


class Tracer:
    """One of a process: audit hooks stay for good, and forks have it too."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._root: str | None = None
        self._own = threading.local()  # `busy` while this thread reads the folder itself
        self._fsync = os.fsync
        os.fsync = self._fsync_seen  # type: ignore[assignment]
        sys.addaudithook(self._hook)

    def arm(
        self,
        root: Path,
        *,
        log: Path | None = None,
        kill_at: int = -1,
        fail_at: int = -1,
        kinds: int = 0,
        error: int = 0,
        once: bool = False,
        refuse: Callable[[], None] | None = None,
    ) -> None:
        """Count operations below `root` from now on, the first is 1.

        With `log` the folder is recorded at each. With `kill_at` the process is killed before that
        operation. With `fail_at` it and all later ones (`once`: only the first) of the given kinds
        fail; where the disk is full, ENOSPC, so do writes to files that are open, as EFBIG. Instead
        `refuse` may be called there, for good.
        """
        self._refuse = refuse
        self.count = self.failures = 0
        self._records: list[Record] = []
        self._log, self._kill_at, self._fail_at = log, kill_at, fail_at
        self._kinds, self._error, self._once = kinds, error, once
        self._contents: dict[bytes, bytes] = {}  # one object for equal contents
        self._root = str(root.resolve())

    def disarm(self) -> int:
        """Stop, write the record; return the number of operations."""
        if self._root is None:
            return self.count
        if self._log is not None:
            self._record("the end", note=True)
        self._root = None
        _limit_writes(False)
        if self._log is not None:
            self._log.write_bytes(pickle.dumps(self._records))
        return self.count

    def note(self, text: str) -> None:
        """Put a line of the caller's own between the recorded operations."""
        if self._root is not None and self._log is not None:
            self._record(text, note=True)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self._root is None or getattr(self._own, "busy", False):
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not flags & _WRITING:
                return
            self._operation("open", [self._absolute(path, -1)])
        elif event == "os.mkdir":
            self._operation("mkdir", [self._absolute(args[0], args[2])])
        elif event in ("os.remove", "os.rmdir"):
            self._operation("remove", [self._absolute(args[0], args[1])])
        elif event == "os.rename":
            self._operation("rename", [self._absolute(args[i], args[i + 2]) for i in (0, 1)])

    def _fsync_seen(self, descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if self._root is None:
            return self._fsync(number)
        path = os.readlink(f"/proc/self/fd/{number}")
        if not self._below(path):
            return self._fsync(number)
        with self._lock:
            self._operation("fsync", [path])
            self._fsync(number)
            if self._log is not None:
                self._record(f"fsync {path}", synced=os.fstat(number).st_ino)
        return None

    def _operation(self, kind: str, paths: list[str]) -> None:
        with self._lock:
            if self._root is None or not any(map(self._below, paths)):
                return
            if kind in ("open", "mkdir") and os.path.lexists(paths[0]):
                if kind == "mkdir":
                    return  # refused by itself
                kind = "reopen"  # takes no new name
            self.count += 1
            if self._log is not None and kind != "fsync":
                names = (os.path.relpath(path, self._root) for path in paths)
                self._record(" ".join([kind, *names]))
            if self.count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._refuse and self.count == self._fail_at:
                self.failures += 1
                self._refuse()
            if 0 < self._fail_at <= self.count and not (self._once and self.failures):
                if self._error == errno.ENOSPC:
                    _limit_writes(True)
                    self.failures += not self.failures  # whatever is written from here on fails
                if _KINDS.get(kind, 0) & self._kinds:
                    self.failures += 1
                    raise OSError(self._error, os.strerror(self._error), paths[0])

    def _below(self, path: str) -> bool:
        return self._root is not None and f"{path}/".startswith(f"{self._root}/")

    def _absolute(self, path: Any, folder: int) -> str:
        self._own.busy = True
        try:
            above = os.getcwd() if folder == -1 else os.readlink(f"/proc/self/fd/{folder}")
            parent, name = os.path.split(os.path.join(above, os.fsdecode(path)))
            return os.path.join(os.path.realpath(parent), name)
        finally:
            self._own.busy = False

    def _record(self, name: str, synced: int | None = None, note: bool = False) -> None:
        with self._lock:
            self._own.busy = True
            try:
                assert self._root is not None
                snapshot = _snapshot(Path(self._root), self._contents)
            finally:
                self._own.busy = False
            self._records.append(Record(name, snapshot, synced, note))


def _limit_writes(limited: bool) -> None:
    """Let no file grow in this process, or let all: the kernel refuses the write itself."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if limited else hard, hard))


def read_log(log: Path) -> list[Record]:
    """Return what was recorded, in its order."""
    return pickle.loads(log.read_bytes())


def _snapshot(root: Path, contents: dict[bytes, bytes]) -> Snapshot:
    found: Snapshot = {"": (root.stat().st_ino, None)}
    waiting = [root]
    while waiting:
        # Other threads of the process create and rename at the same time.
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                with contextlib.suppress(FileNotFoundError):
                    name, content = os.path.relpath(entry.path, root), None
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                    else:
                        content = Path(entry.path).read_bytes()
                        content = contents.setdefault(content, content)
                    found[name] = (entry.inode(), content)
    return found


# --------------------------------------------------------------------------------------------------
# The disk
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    content: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    entries: dict[str, "Node"] = field(default_factory=dict)
    synced: dict[str, "Node"] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, "Node | None"]]] = field(default_factory=list)


Node = File | Folder


class Disk:
    """A recorded folder: what is there, and what of it a power loss would leave."""

    def __init__(self, root: Path) -> None:
        """Begin with what is below `root` now, taken as safe on the disk."""
        self.time = 0
        self._nodes: dict[int, Node] = {}
        self._update(_snapshot(root, {}))
        self.root = self._nodes[root.stat().st_ino]
        for node in self._nodes.values():
            _sync(node)

    def apply(self, record: Record) -> None:
        """Take in what was seen at one operation."""
        self.time += 1
        self._update(record.snapshot)
        if record.synced in self._nodes:
            _sync(self._nodes[record.synced])

    def after_power_loss(self, chance: random.Random, subsets: int) -> Iterator[tuple[str, Tree]]:
        """Yield (what survived, tree) for several outcomes; see [Note: what a power loss may
        leave].
        """
        names, safe = (lambda d: d.entries), (lambda f: f.synced)
        yield "only what was fsynced", self._tree(lambda d: d.synced, safe)
        yield "names, no bytes", self._tree(names, safe)
        yield "names, zeros", self._tree(names, lambda f: f.synced.ljust(len(f.content), b"\0"))
        cut = self.time - int(chance.expovariate(0.1))
        yield "names up to a moment", self._tree(lambda d: _until(d, cut), safe)
        for _ in range(subsets):
            # The same choice wherever a node is met: a folder may hang in the tree at two places.
            seed = chance.random()
            tree = self._tree(
                lambda d, s=seed: _some_names(d, random.Random(f"{s}{id(d)}")),  # type: ignore[misc]
                lambda f, s=seed: _some_bytes(f, random.Random(f"{s}{id(f)}")),  # type: ignore[misc]
            )
            yield "a random part", tree

    def _update(self, snapshot: Snapshot) -> None:
        """Turn the difference to what was there before into changes of the folders."""
        known = self._nodes
        # An inode that is gone may come back as another file: only those of now are kept.
        self._nodes = {
            inode: known.get(inode) or (Folder() if content is None else File())
            for inode, content in snapshot.values()
        }
        now: dict[int, dict[str, Node]] = {}
        for path, (inode, content) in snapshot.items():
            node = self._nodes[inode]
            if isinstance(node, File):
                node.content = content or b""
            else:
                now.setdefault(inode, {})
            above, name = os.path.split(path)
            if path and above in snapshot:
                now.setdefault(snapshot[above][0], {})[name] = node
        for inode, entries in now.items():
            folder = self._nodes[inode]
            assert isinstance(folder, Folder)
            self._enter(folder, entries)

    def _enter(self, folder: Folder, entries: dict[str, Node]) -> None:
        """Note what changed in one folder; a node that left one name for another did so at once."""
        before = folder.entries
        changes: dict[int, dict[str, Node | None]] = {}
        for name, node in before.items():
            if entries.get(name) is not node:
                changes.setdefault(id(node), {})[name] = None
        for name, node in entries.items():
            if before.get(name) is not node:
                changes.setdefault(id(node), {})[name] = node
        # A name that another node took over is not first removed.
        for change in changes.values():
            for name in [n for n, node in change.items() if node is None and n in entries]:
                del change[name]
        folder.pending += [(self.time, change) for change in changes.values() if change]
        folder.entries = entries

    def _tree(
        self, entries: Callable[[Folder], dict[str, Node]], content: Callable[[File], bytes]
    ) -> Tree:
        def below(folder: Folder, prefix: str) -> Tree:
            found: Tree = {}
            for name, node in sorted(entries(folder).items()):
                if isinstance(node, File):
                    found[prefix + name] = content(node)
                else:
                    found[prefix + name] = None
                    found |= below(node, f"{prefix}{name}/")
            return found

        assert isinstance(self.root, Folder)
        return below(self.root, "")


def write_tree(tree: Tree, root: Path) -> None:
    """Make `root` hold `tree`; it must not exist."""
    root.mkdir()
    for name, content in tree.items():  # folders come before what is in them
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def read_tree(root: Path) -> Tree:
    """Return what is below `root`."""
    return {path: content for path, (_, content) in sorted(_snapshot(root, {}).items()) if path}


def _sync(node: Node) -> None:
    if isinstance(node, File):
        node.synced = node.content
    else:
        node.synced, node.pending = dict(node.entries), []


def _applied(folder: Folder, chosen: Callable[[int], bool]) -> dict[str, Node]:
    """Return the entries that were synced, with the later changes whose moment is `chosen`."""
    entries: dict[str, Node | None] = dict(folder.synced)
    for time, changes in folder.pending:
        if chosen(time):
            entries |= changes
    return {name: node for name, node in entries.items() if node is not None}


def _until(folder: Folder, cut: int) -> dict[str, Node]:
    return _applied(folder, lambda time: time <= cut)


def _some_names(folder: Folder, chance: random.Random) -> dict[str, Node]:
    share = chance.choice((0.2, 0.5, 0.9))
    return _applied(folder, lambda _: chance.random() < share)


def _some_bytes(file: File, chance: random.Random) -> bytes:
    """Return the synced bytes with some of the blocks that were written later."""
    share = chance.choice((0.0, 0.5, 0.9))
    length = chance.choice((len(file.synced), len(file.content)))
    safe = file.synced.ljust(length, b"\0")
    blocks = (
        (file.content if chance.random() < share else safe)[at : at + _BLOCK].ljust(
            min(_BLOCK, length - at), b"\0"
        )[: length - at]
        for at in range(0, length, _BLOCK)
    )
    return b"".join(blocks)
