"""An object store that several processes share: `bucket:///folder/name`, over a local folder.

An object appears whole when its put ends, or not at all. There is no rename and no folder. Any put
or delete can be made to fail, or to be the last thing that this process does.
"""

import io
import os
import signal
from pathlib import Path

import fsspec


class Store:
    """What happens to this process's puts and deletes."""

    done = 0
    die_at: int | None = None
    """The process is killed before its put or delete of this number, from 0."""
    fail = ""
    """A put or delete of an object whose name contains this fails."""
    unsaid = ""
    """A put of an object whose name contains this is done, and looks as if it had failed."""

    @classmethod
    def meet(cls, what: str, path: str) -> None:
        """Count a put or a delete; fail or die where that was asked for."""
        if cls.done == cls.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        cls.done += 1
        if cls.fail and cls.fail in path:
            raise ConnectionResetError(
                f"the store went away at {what} of {path.rpartition('/')[2]}"
            )

    @classmethod
    def quiet(cls) -> None:
        """Let everything succeed from now on."""
        cls.done, cls.die_at, cls.fail, cls.unsaid = 0, None, "", ""


class _Put(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        if not self.closed:
            put(self.path, self.getvalue())
        super().close()

    def discard(self) -> None:
        super().close()


def put(path: str, content: bytes) -> None:
    """Make an object appear."""
    Store.meet("put", path)
    hidden = Path(path).parent / f".unseen-{os.getpid()}-{id(content)}"
    hidden.parent.mkdir(parents=True, exist_ok=True)
    hidden.write_bytes(content)
    os.replace(hidden, path)
    if Store.unsaid and Store.unsaid in path:
        raise TimeoutError("no answer from the store")


class Bucket(fsspec.AbstractFileSystem):
    protocol = "bucket"

    def find(self, path, detail=False, **_):
        found = {
            str(file): {"name": str(file), "size": file.stat().st_size, "type": "file"}
            for file in Path(path).rglob("*")
            if file.is_file() and not file.name.startswith(".unseen")
        }
        return found if detail else list(found)

    def cat_file(self, path, start=None, end=None, **_):
        return Path(path).read_bytes()[start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        put(path, value)

    def _open(self, path, mode="rb", **_):
        return _Put(path) if mode == "wb" else open(path, mode)

    def isdir(self, path):
        return Path(path).is_dir()

    def rm_file(self, path):
        Store.meet("delete", path)
        os.unlink(path)

    def mv(self, *_, **__):
        raise NotImplementedError("an object store renames nothing")


fsspec.register_implementation("bucket", Bucket, clobber=True)
