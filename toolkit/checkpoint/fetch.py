"""A checkpoint on an object store, copied to this machine for what reads folders.

Owns the copy, which is gone afterwards, and where a run's checkpoints are found from its config.
Does not judge what it copies: who reads it does.
"""

import contextlib
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.checkpoint import commit
from toolkit.checkpoint.run_dir import CONFIG
from toolkit.checkpoint.store import BLOCK, Folder, Place, is_url, where
from toolkit.errors import CheckpointError
from toolkit.formats import is_inner_path
from toolkit.formats.metrics_file import METRICS
from toolkit.parsing import parse_yaml

_AT_ONCE = 4


@contextlib.contextmanager
def local_copy(path: str | Path) -> Iterator[str | Path]:
    """Give the folder of a run or a checkpoint that may be elsewhere: a URL, or a run whose
    `checkpoint.root` is elsewhere.

    What is on a disk is given as it is. From a store the checkpoint, or the newest committed one of
    a run, is copied into a temporary folder, with the run's config and metrics where there are any,
    and deleted afterwards; a line on stderr says so. Costs its bytes in the folder for temporary
    files (TMPDIR).

    Raises:
        CheckpointError: nothing committed is there, the store cannot be read, or the copy does not
            fit.
    """
    root = path if is_url(path) else _recorded_root(Path(path))
    place = path if root is None else where(root)
    if not isinstance(place, Place):
        yield place
        return
    checkpoint = commit.find_checkpoint(place)
    with tempfile.TemporaryDirectory(prefix="toolkit-") as scratch:
        _check_room(checkpoint, Path(scratch))
        run = Path(scratch, "run")
        folder = run / commit.CHECKPOINTS / checkpoint.name.partition(".")[0]
        _copy(checkpoint, folder, list(checkpoint.files()))
        if not is_url(path):
            for name in (CONFIG, METRICS):
                if Path(path, name).is_file():
                    shutil.copyfile(Path(path, name), run / name)
        elif checkpoint.url != place.url:
            with contextlib.suppress(FileNotFoundError):  # no run of a recipe: it has none
                (run / CONFIG).write_bytes((place / CONFIG).read_bytes())
        yield folder


@contextlib.contextmanager
def files_of(checkpoint: Folder, *names: str) -> Iterator[Path]:
    """Give the checkpoint's folder; of one on a store, a folder with the files `names` that it has,
    each as the manifest says.

    Raises:
        CheckpointError: a file is missing or has other bytes.
    """
    if isinstance(checkpoint, Path):
        yield checkpoint
        return
    files = commit.read_manifest(checkpoint)["files"]
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        for name, sha256 in _copy(
            checkpoint, Path(folder), [n for n in names if n in files]
        ).items():
            if sha256 != files[name]["sha256"]:
                raise CheckpointError(f"{checkpoint / name} has other bytes than were saved")
        yield Path(folder)


def _copy(checkpoint: Place, folder: Path, names: list[str]) -> dict[str, str]:
    """Copy objects into a folder; return name -> sha256."""
    if odd := [n for n in names if not is_inner_path(n)]:
        raise CheckpointError(f"{checkpoint} holds {odd[0]!r}, which is no name of a file")

    def copy(name: str) -> str:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        try:
            with (checkpoint / name).open() as source, open(file, "wb") as target:
                while block := source.read(BLOCK):
                    digest.update(block)
                    target.write(block)
        except FileNotFoundError:
            raise CheckpointError(f"{checkpoint / name} is missing") from None
        return digest.hexdigest()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(copy, names), strict=True))


def _recorded_root(run: Path) -> str | None:
    """Return the `checkpoint.root` of a run's config; None where there is none."""
    if not (run / CONFIG).is_file():
        return None
    try:
        settings = parse_yaml((run / CONFIG).read_bytes(), run / CONFIG, CheckpointError)
    except CheckpointError:
        return None  # no run's config; whoever reads the folder says what is wrong with it
    saving = settings.get("checkpoint") if isinstance(settings, dict) else None
    root = saving.get("root") if isinstance(saving, dict) else None
    return root if isinstance(root, str) and root else None


def _check_room(checkpoint: Place, scratch: Path) -> None:
    nbytes, free = sum(checkpoint.files().values()), shutil.disk_usage(scratch).free
    if nbytes > free:
        raise CheckpointError(
            f"{checkpoint} has {nbytes:,} bytes and {free:,} are free in {scratch.parent}: set "
            "TMPDIR to a larger folder, or copy the checkpoint with the tool of its store "
            "(such as aws s3 cp --recursive, gsutil -m cp -r) into a folder named "
            f"{checkpoint.name.partition('.')[0]} and give that"
        )
    print(f"copying {checkpoint} ({nbytes:,} bytes) to {scratch}", file=sys.stderr, flush=True)
