"""The run directory: which run it holds, and whether this start may go on in it.

Owns `config.yaml` and the comparison of a start with what is there; and where the checkpoints are.
Where that is not the run directory, a copy of `config.yaml` lies beside them: the next start may be
on another machine. Does not know what the settings do.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

from toolkit import config
from toolkit.checkpoint import commit
from toolkit.checkpoint.durable import replace_synced
from toolkit.checkpoint.store import Folder, Place, probe, where
from toolkit.errors import ConfigError
from toolkit.formats.metrics_file import METRICS

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
# What defines a run. The rest (length, schedule, ranks, logging) may change between two starts.
_IDENTITY = ("model.", "data.", "lora.", "seed")
_HARMLESS = ("data.num_workers", "data.max_eval_samples", "data.dataset_num_proc")
_held: dict[Path, int] = {}


def claim(cfg: Any) -> Path:
    """Return the run directory of `cfg` after checking that it is free or holds this very run.

    Writes nothing; `record` does, once the start is known to be sound.

    The same holds for `checkpoint.root`, which is read where it is set.

    Raises:
        ConfigError: the directory holds another run, or files that are not a run's.
        CheckpointError: `checkpoint.root` is on a store that cannot be read.
    """
    folder = Path(cfg.output_dir)
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file or a broken link; give a folder")
    _check_writable(folder)
    present = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    # What a start that was killed may have left: whole pieces of a run, and unfinished ones.
    ours = (TOKENIZER, f"{TOKENIZER}.tmp", commit.CHECKPOINTS, f"{CONFIG}.tmp")
    strangers = {name for name in present if not (name in ours or name.startswith(ours[1] + "-"))}
    if strangers and CONFIG not in present:
        raise ConfigError(
            f"output_dir {folder} holds files that are not a run's "
            f"({', '.join(sorted(strangers)[:3])}); "
            "give an empty or new folder"
        )
    if holds_work(folder):
        _same_run(_read(folder / CONFIG, type(cfg)), cfg, "output_dir", folder)
        _check_not_left_behind(_read(folder / CONFIG, type(cfg)), cfg)
    elif CONFIG in present and not _is_ours(folder / CONFIG, type(cfg)):
        raise ConfigError(
            f"output_dir {folder} holds a {CONFIG} that no run has written, and this run would "
            "overwrite it; give an empty or new folder"
        )
    if cfg.checkpoint.root is not None:
        _claim_root(cfg)
    return folder


def recorded(cfg: Any) -> Any:
    """Return the settings that an earlier start of this run recorded, None where there is none."""
    folder = Path(cfg.output_dir)
    return _read(folder / CONFIG, type(cfg)) if holds_work(folder) else None


def root_of(cfg: Any) -> Folder:
    """Return what holds the run's checkpoints, as `checkpoint.save` and `newest` take it.

    Raises:
        CheckpointError: a URL that cannot be used; see `toolkit.store.where`.
    """
    return where(cfg.output_dir if cfg.checkpoint.root is None else cfg.checkpoint.root)


def reach(cfg: Any) -> None:
    """Refuse a `checkpoint.root` on a store that this process cannot write, read, list or delete.

    Raises:
        CheckpointError: says which of it failed, and why.
    """
    root = root_of(cfg)
    if isinstance(root, Place):
        probe(root)


def _claim_root(cfg: Any) -> None:
    root = root_of(cfg)
    if isinstance(root, Path):
        _check_writable(root, "checkpoint.root")
    if not commit.committed_steps(root):
        return
    before = _read(root / CONFIG, type(cfg))
    _same_run(before, cfg, "checkpoint.root", root)


def _check_not_left_behind(before: Any, cfg: Any) -> None:
    """Refuse to begin anew because `checkpoint.root` changed since the checkpoints were saved."""
    if before.checkpoint.root == cfg.checkpoint.root:
        return
    old, new = root_of(before), root_of(cfg)
    if commit.committed_steps(old) and not commit.committed_steps(new):
        raise ConfigError(
            f"checkpoint.root was {before.checkpoint.root}, is {cfg.checkpoint.root}, and the "
            f"checkpoints of this run are in {old}: it would begin anew. Copy {commit.CHECKPOINTS} "
            f"and {CONFIG} from there to {new}, or leave checkpoint.root as it was"
        )


def _read(file: Folder, cls: type) -> Any:
    """Return the config that `record` wrote."""
    try:
        if isinstance(file, Path):
            return config.load(cls, file)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, CONFIG)
            copy.write_bytes(file.read_bytes())
            return config.load(cls, copy)
    except (ConfigError, FileNotFoundError) as error:
        raise ConfigError(
            f"{file.parent} holds a run whose config cannot be read: {error}"
        ) from error


def _same_run(before: Any, cfg: Any, setting: str, where: Folder) -> None:
    changed = {
        name: values
        for name, values in config.differences(before, cfg).items()
        if name.startswith(_IDENTITY) and name not in _HARMLESS
    }
    if changed:
        listed = "; ".join(
            f"{n} was {old!r}, is {new!r}" for n, (old, new) in list(changed.items())[:4]
        )
        raise ConfigError(
            f"{setting} {where} holds another run: {listed}. Give another {setting}, or the "
            f"settings of that run ({where / CONFIG})"
        )


def hold(folder: Path) -> None:
    """Keep the run directory for this process until it ends: no second run may write to it.

    Raises:
        ConfigError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() in _held:
        return
    descriptor = os.open(folder, os.O_RDONLY)  # open, and thus locked, until the process ends
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held[folder.resolve()] = descriptor
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another process is running on output_dir {folder}; wait for it, end it, or give "
            "another output_dir"
        ) from error
    except OSError as error:  # a network file system without locks
        print(f"note: {folder} cannot be locked ({error.strerror}); start one run only on it")


def holds_work(folder: Path) -> bool:
    """Whether a run has left something behind that must not be mixed with another one."""
    return (folder / CONFIG).is_file() and (
        (folder / METRICS).is_file() or bool(commit.committed_steps(folder))
    )


def export_path(folder: Path) -> Path:
    """Return where the export of a run goes unless told otherwise: beside it, `RUN-hf`."""
    return Path(f"{folder if folder.name not in ('', '..') else folder.resolve()}-hf")


def _check_writable(folder: Path, setting: str = "output_dir") -> None:
    above = folder.absolute()
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "cannot be written to" if above.is_dir() else "is not a folder"
        raise ConfigError(
            f"{setting} {folder} cannot be made: {above} {what}; give another {setting}"
        )


def _is_ours(file: Path, cls: type) -> bool:
    """Whether `record` wrote the file: it is, to the letter, the dump of what it holds."""
    try:
        return file.read_text("utf-8") == config.dump(config.load(cls, file))
    except (ConfigError, OSError, UnicodeDecodeError):
        return False


def record(folder: Path, cfg: Any) -> None:
    """Write the resolved config into the run directory, and beside its checkpoints where those are
    elsewhere, whole or not at all.
    """
    text, root = config.dump(cfg), root_of(cfg)
    replace_synced(folder / CONFIG, text)
    if isinstance(root, Place):
        (root / CONFIG).write_bytes(text.encode())
    elif cfg.checkpoint.root is not None and root.absolute() != folder.absolute():
        replace_synced(root / CONFIG, text)
