"""File operations seen from below, and a disk that forgets what was not fsynced.

    compile_shim    file_trace.c -> a library to start a process with (LD_PRELOAD); needs `cc`
    Tracer          arms it: count, record, kill before operation k, fail from operation k on
    Disk            replays a record; says which trees may be there after a power loss

Knows nothing of checkpoints.

[Note: what a power loss may leave] A file's bytes are certain from its own fsync on, a name from
the fsync of the folder that it is in. Everything later may be there or not, in any combination;
only the two halves of a rename within one folder go together. That is weaker than what ext4 or XFS
promise.
"""

import ctypes
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SPACE, SYNC, NAMES = 1, 2, 4
"""What an operation can be made to fail for: new bytes or names, fsync, renames and removals."""
_HEADER = struct.Struct("=III4xQQ")


def compiler() -> str | None:
    """Return the C compiler of this machine, None where there is none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def compile_shim(folder: Path) -> Path:
    """Compile the library into `folder` and return it."""
    library, source = folder / "file_trace.so", Path(__file__).with_suffix(".c")
    command = [compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run([*map(str, command), "-lpthread"], check=True)
    return library


class Tracer:
    """The library in this process, which must have been started with it."""

    def __init__(self, library: Path) -> None:
        if str(library) not in Path("/proc/self/maps").read_text():
            raise RuntimeError(f"this process was not started with LD_PRELOAD={library}")
        self._c = ctypes.CDLL(str(library))
        self._c.trace_disarm.restype = self._c.trace_failed.restype = ctypes.c_long

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
    ) -> None:
        """Count operations below `root` from now on, the first is 1.

        With `kill_at` the process is killed before that operation. With `fail_at` it and all later
        ones (`once`: only the first) of the given kinds fail.
        """
        target = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        whole = os.fsencode(root.resolve())
        kill, fail = ctypes.c_long(kill_at), ctypes.c_long(fail_at)
        self._c.trace_arm(whole, target, kill, fail, kinds, error, int(once))

    def disarm(self) -> int:
        """Stop; return the number of operations."""
        return self._c.trace_disarm()

    def failed(self) -> int:
        """Return how many operations were made to fail."""
        return self._c.trace_failed()

    def note(self, text: str) -> None:
        """Put a line of the caller's own between the recorded operations."""
        self._c.trace_note(text.encode())


@dataclass(frozen=True)
class Operation:
    kind: str
    """create truncate write fsync rename unlink mkdir rmdir note"""
    path: str
    other: str
    offset: int
    data: bytes


_KINDS = {"c": "create", "t": "truncate", "w": "write", "f": "fsync", "r": "rename"} | {
    "u": "unlink",
    "m": "mkdir",
    "d": "rmdir",
    "n": "note",
}


def read_log(log: Path) -> list[Operation]:
    """Return the operations of a record, in their order."""
    content, at, found = log.read_bytes(), 0, []
    while at < len(content):
        code, path, other, offset, size = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        pieces = []
        # The length of a `truncate` stands in `offset`; only writes carry bytes.
        for length in (path, other, size):
            pieces.append(content[at : at + length])
            at += length
        found.append(
            Operation(_KINDS[chr(code)], pieces[0].decode(), pieces[1].decode(), offset, pieces[2])
        )
    return found


# --------------------------------------------------------------------------------------------------
# The disk
# --------------------------------------------------------------------------------------------------

Tree = dict[str, bytes | None]
"""Relative path -> content; None is a folder."""


@dataclass(eq=False)
class File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, Operation]] = field(default_factory=list)
    number: int = 0
    """Its inode's, from `create` on."""


@dataclass(eq=False)
class Folder:
    entries: dict[str, "Node"] = field(default_factory=dict)
    synced: dict[str, "Node"] = field(default_factory=dict)
    pending: list[tuple[int, dict[str, "Node | None"]]] = field(default_factory=list)


Node = File | Folder


class Disk:
    """A replayed folder: what is there, and what of it a power loss would leave."""

    def __init__(self, root: Path) -> None:
        """Begin with what is below `root` now, taken as safe on the disk."""
        self.base = str(root.resolve())
        self.root = _load(root)
        self.time = 0

    def apply(self, operation: Operation) -> None:
        """Replay one operation."""
        self.time += 1
        kind, path = operation.kind, operation.path
        if kind == "note" or path.endswith(" (deleted)"):
            return
        if kind in ("create", "mkdir"):
            new = File(number=operation.offset) if kind == "create" else Folder()
            self._change(path, new)
        elif kind in ("unlink", "rmdir"):
            self._change(path, None)
        elif kind == "rename":
            self._rename(path, operation.other)
        elif kind == "fsync":
            self._follow(operation)
            node = self._find(path)
            if isinstance(node, File):
                node.synced = bytes(node.content)
            else:
                node.synced = dict(node.entries)
            node.pending.clear()
        else:
            node = self._find(path)
            if not isinstance(node, File):
                raise ValueError(f"{kind} of {path}, which is a folder")
            _write(node.content, operation)
            node.pending.append((self.time, operation))

    def now(self) -> Tree:
        """Return the tree that processes see."""
        return _tree(self.root, lambda d: d.entries, lambda f: bytes(f.content))

    def after_power_loss(self, chance: random.Random, subsets: int) -> Iterator[tuple[str, Tree]]:
        """Yield (what survived, tree) for several outcomes; see [Note: what a power loss may
        leave].
        """
        yield "only what was fsynced", _tree(self.root, lambda d: d.synced, lambda f: f.synced)
        yield "names, no bytes", _tree(self.root, lambda d: d.entries, lambda f: f.synced)
        yield "names, zeros", _tree(self.root, lambda d: d.entries, _zeroed)
        cut = self.time - int(chance.expovariate(0.1))
        yield "names up to a moment", _tree(self.root, lambda d: _until(d, cut), lambda f: f.synced)
        for _ in range(subsets):
            # The same choice wherever a folder is met: it may hang in the tree at two places.
            seed = chance.random()
            yield (
                "a random part",
                _tree(
                    self.root,
                    lambda d, s=seed: _some_names(d, random.Random(f"{s}{id(d)}")),  # type: ignore[misc]
                    lambda f, s=seed: _some_bytes(f, random.Random(f"{s}{id(f)}")),  # type: ignore[misc]
                ),
            )

    def _follow(self, operation: Operation) -> None:
        """Rename a file that is met under another name: safetensors' writer renames its temporary
        file by a system call of its own, which the shim does not see.
        """
        name = os.path.basename(operation.path)
        entries = self._parent(operation.path).entries if operation.offset else {name: None}
        if name in entries:
            return
        for other, node in list(entries.items()):
            if isinstance(node, File) and node.number == operation.offset:
                self._rename(os.path.join(os.path.dirname(operation.path), other), operation.path)
                return

    def _parts(self, path: str) -> list[str]:
        relative = os.path.relpath(path, self.base)
        return [] if relative == "." else relative.split("/")

    def _find(self, path: str) -> Node:
        node: Node = self.root
        for name in self._parts(path):
            if not isinstance(node, Folder):
                raise ValueError(f"{path} lies in a file")
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> Folder:
        parent = self._find(os.path.dirname(path))
        if not isinstance(parent, Folder):
            raise ValueError(f"{path} lies in a file")
        return parent

    def _change(self, path: str, node: "Node | None") -> None:
        self._enter(self._parent(path), {os.path.basename(path): node})

    def _rename(self, path: str, other: str) -> None:
        source, target, node = self._parent(path), self._parent(other), self._find(path)
        gone: dict[str, Node | None] = {os.path.basename(path): None}
        come: dict[str, Node | None] = {os.path.basename(other): node}
        if source is target:
            self._enter(source, gone | come)
        else:
            self._enter(target, come)
            self._enter(source, gone)

    def _enter(self, folder: Folder, changes: "dict[str, Node | None]") -> None:
        _update(folder.entries, changes)
        folder.pending.append((self.time, changes))


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
    return _tree(_load(root), lambda d: d.entries, lambda f: bytes(f.content))


def _load(path: Path) -> Folder:
    entries: dict[str, Node] = {}
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            entries[entry.name] = _load(entry)
        else:
            content = entry.read_bytes()
            entries[entry.name] = File(bytearray(content), content)
    return Folder(entries, dict(entries))


def _tree(
    root: Folder,
    entries: "Callable[[Folder], dict[str, Node]]",
    content: Callable[[File], bytes],
    prefix: str = "",
) -> Tree:
    found: Tree = {}
    for name, node in sorted(entries(root).items()):
        if isinstance(node, File):
            found[prefix + name] = content(node)
        else:
            found[prefix + name] = None
            found |= _tree(node, entries, content, f"{prefix}{name}/")
    return found


def _write(content: bytearray, operation: Operation) -> None:
    at, data = operation.offset, operation.data
    if operation.kind == "truncate":
        del content[at:]
        content.extend(bytes(at - len(content)))
        return
    content.extend(bytes(max(0, at + len(data) - len(content))))
    content[at : at + len(data)] = data


def _update(entries: "dict[str, Node]", changes: "dict[str, Node | None]") -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _until(folder: Folder, cut: int) -> "dict[str, Node]":
    entries = dict(folder.synced)
    for time, changes in folder.pending:
        if time <= cut:
            _update(entries, changes)
    return entries


def _zeroed(file: File) -> bytes:
    return file.synced + bytes(max(0, len(file.content) - len(file.synced)))


def _some_names(folder: Folder, chance: random.Random) -> "dict[str, Node]":
    entries, share = dict(folder.synced), chance.choice((0.2, 0.5, 0.9))
    for _, changes in folder.pending:
        if chance.random() < share:
            _update(entries, changes)
    return entries


def _some_bytes(file: File, chance: random.Random) -> bytes:
    content, share = bytearray(file.synced), chance.choice((0.0, 0.5, 0.9))
    for _, operation in file.pending:
        if chance.random() < share:
            _write(content, operation)
    return bytes(content)
