"""The run directory: which run it holds, and whether this start may go on in it.

Owns `config.yaml` and the comparison of a start with what is there. Does not know what the settings
do.
"""

import os
from pathlib import Path
from typing import Any

from toolkit import commit, config
from toolkit.errors import ConfigError
from toolkit.metrics import METRICS

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
# What defines a run. The rest (length, schedule, ranks, logging) may change between two starts.
_IDENTITY = ("model.", "data.", "seed")
_HARMLESS = ("data.num_workers", "data.max_eval_samples")


def claim(cfg: Any) -> Path:
    """Return the run directory of `cfg` after checking that it is free or holds this very run.

    Writes nothing; `record` does, once the start is known to be sound.

    Raises:
        ConfigError: the directory holds another run, or files that are not a run's.
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
    if not holds_work(folder):
        if CONFIG in present and not _is_ours(folder / CONFIG, type(cfg)):
            raise ConfigError(
                f"output_dir {folder} holds a {CONFIG} that no run has written, and this run would "
                "overwrite it; give an empty or new folder"
            )
        return folder
    try:
        before = config.load(type(cfg), folder / CONFIG)
    except ConfigError as error:
        raise ConfigError(
            f"output_dir {folder} holds a run whose config cannot be read: {error}"
        ) from error
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
            f"output_dir {folder} holds another run: {listed}. Give another output_dir, or the "
            f"settings of that run ({folder / CONFIG})"
        )
    return folder


def holds_work(folder: Path) -> bool:
    """Whether a run has left something behind that must not be mixed with another one."""
    return (folder / CONFIG).is_file() and (
        (folder / METRICS).is_file() or bool(commit.committed_steps(folder))
    )


def _check_writable(folder: Path) -> None:
    above = folder.absolute()
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "cannot be written to" if above.is_dir() else "is not a folder"
        raise ConfigError(
            f"output_dir {folder} cannot be made: {above} {what}; give another output_dir"
        )


def _is_ours(file: Path, cls: type) -> bool:
    """Whether `record` wrote the file: it is, to the letter, the dump of what it holds."""
    try:
        return file.read_text("utf-8") == config.dump(config.load(cls, file))
    except (ConfigError, OSError, UnicodeDecodeError):
        return False


def record(folder: Path, cfg: Any) -> None:
    """Write the resolved config into the run directory, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{CONFIG}.tmp"
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(config.dump(cfg))
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, folder / CONFIG)
