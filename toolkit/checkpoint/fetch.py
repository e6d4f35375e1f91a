"""A checkpoint on an object store, copied to this machine for a command that reads folders.

Owns where a run's checkpoints are found from its config, and the copy that is gone afterwards. Does
not judge what it copies: the command does.
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from toolkit.checkpoint import commit, store_commit
from toolkit.checkpoint.run_dir import CONFIG
from toolkit.checkpoint.store import Place, is_url, where
from toolkit.errors import CheckpointError
from toolkit.training.metrics import METRICS


@contextlib.contextmanager
def at_hand(path: str | Path) -> Iterator[str | Path]:
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
    if root is None or not is_url(root):
        yield path if root is None else root
        return
    place = where(root)
    assert isinstance(place, Place)
    checkpoint = store_commit.find_checkpoint(place)
    with tempfile.TemporaryDirectory(prefix="toolkit-") as scratch:
        _check_room(checkpoint, Path(scratch))
        run = Path(scratch, "run")
        folder = run / commit.CHECKPOINTS / checkpoint.name.partition(".")[0]
        folder.mkdir(parents=True)
        store_commit.fetch(checkpoint, folder, hashed=False)
        if not is_url(path):
            for name in (CONFIG, METRICS):
                if Path(path, name).is_file():
                    shutil.copyfile(Path(path, name), run / name)
        elif checkpoint.url != place.url:
            with contextlib.suppress(FileNotFoundError):  # no run of a recipe: it has none
                (run / CONFIG).write_bytes((place / CONFIG).read())
        yield folder


def _recorded_root(run: Path) -> str | None:
    """Return the `checkpoint.root` of a run's config; None where there is none."""
    if not (run / CONFIG).is_file():
        return None
    try:
        settings = yaml.safe_load((run / CONFIG).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None  # no run's config; whoever reads the folder says what is wrong with it
    saving = settings.get("checkpoint") if isinstance(settings, dict) else None
    root = saving.get("root") if isinstance(saving, dict) else None
    return root if isinstance(root, str) and root else None


def _check_room(checkpoint: Place, scratch: Path) -> None:
    nbytes, free = store_commit.size(checkpoint), shutil.disk_usage(scratch).free
    if nbytes > free:
        raise CheckpointError(
            f"{checkpoint} has {nbytes:,} bytes and {free:,} are free in {scratch.parent}: set "
            "TMPDIR to a larger folder, or copy the checkpoint with the tool of its store "
            "(such as aws s3 cp --recursive, gsutil -m cp -r) into a folder named "
            f"{checkpoint.name.partition('.')[0]} and give that"
        )
    print(f"copying {checkpoint} ({nbytes:,} bytes) to {scratch}", file=sys.stderr, flush=True)
