"""List the sources of a config, and resolve their paths, folders and globs to files of one kind."""

import glob
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from toolkit.config.data import DataConfig, SourceConfig
from toolkit.errors import DataError, one_line

Kind = Literal["json", "csv", "parquet", "arrow", "text"]
Purpose = Literal["train", "eval"]

_TABULAR: tuple[Kind, ...] = ("json", "csv", "parquet", "arrow")
DATA_ENDINGS: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".tsv": "csv",
    **{f".{kind}": kind for kind in _TABULAR},
}
"""Endings of files that hold rows; a file with any other ending is text."""

_TEXT = (
    "c cc cpp cu go h hpp html java jl js lua md py pyi r rb rs rst scala sh sql tex text ts txt"
)
TEXT_ENDINGS = [f".{name}" for name in _TEXT.split()]
"""Endings of text files that are read from a folder. A file that is named may have any ending."""

_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_SPLITS = {"train": ("train",), "eval": ("validation", "test", "train")}  # in order of preference
_SPLIT_NAME = re.compile(r"(?<![a-z0-9])(train|test|valid|validation|val|dev|eval)(?![a-z])", re.I)
_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def list_sources(cfg: DataConfig, purpose: Purpose = "train") -> list[tuple[str, SourceConfig]]:
    """List the sources that a config names for training or for evaluation.

    Each entry of `eval_files` is a source; those of `eval_sources` follow. A source without a name
    is named after its first file or data set. If a name is repeated, a number is appended.

    Returns:
        (name of the setting, source) of each source, such as ("data.train_files",
        SourceConfig(...)). Empty if none is configured.
    """
    sources: list[tuple[str, SourceConfig]] = []
    if purpose == "eval":
        files = [cfg.eval_files] if isinstance(cfg.eval_files, str) else cfg.eval_files
        sources = [("data.eval_files", SourceConfig(files=entry)) for entry in files]
        sources += [(f"data.eval_sources[{i}].files", s) for i, s in enumerate(cfg.eval_sources)]
    elif cfg.sources:
        sources = [(f"data.sources[{i}].files", source) for i, source in enumerate(cfg.sources)]
    elif cfg.train_files or cfg.dataset_name:
        source = SourceConfig(
            files=cfg.train_files,
            dataset_name=cfg.dataset_name,
            dataset_config_name=cfg.dataset_config_name,
            dataset_split=cfg.dataset_split,
        )
        sources = [("data.train_files", source)]
    names = [source.name or _default_name(source, setting) for setting, source in sources]
    for i, name in enumerate(names):
        number = 1
        while names[i] in names[:i] or (number > 1 and names[i] in names[i + 1 :]):
            number += 1
            names[i] = f"{name}-{number}"
    return [(s, replace(source, name=n)) for (s, source), n in zip(sources, names, strict=True)]


def _default_name(source: SourceConfig, setting: str) -> str:
    """Return the name of a source's data set, or of its first file without the ending."""
    if source.dataset_name:
        return Path(source.dataset_name).name or source.dataset_name
    first = find_files(source.files, setting)[0]
    packed = first.suffix.lower() in _COMPRESSED
    return Path(first.stem).stem if packed else first.stem


def find_files(patterns: str | list[str], setting: str) -> list[Path]:
    """Find the files that patterns match.

    Args:
        patterns: files, folders or globs; `**` and `~` are allowed. A folder stands for all files
            beneath it with a known ending, or for one split if it has several.
        setting: the setting that holds the patterns, for messages.

    Returns:
        Absolute paths without duplicates, in the order of the patterns, sorted within each.

    Raises:
        DataError: a pattern matches no file.
    """
    files: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        files |= dict.fromkeys(
            Path(os.path.abspath(file)) for file in _find_matches(pattern, setting)
        )
    return list(files)


def common_file_kind(files: list[Path], setting: str) -> Kind:
    """Return the kind of all files by their endings: `json`, `csv`, `parquet`, `arrow` or `text`.

    Raises:
        DataError: the files are of several kinds.
    """
    kinds = {DATA_ENDINGS.get(_ending(file), "text"): file for file in reversed(files)}
    if len(kinds) > 1:
        mixed = ", ".join(f"{kind}: {file}" for kind, file in kinds.items())
        raise DataError(
            f"{setting}: expected files of one kind, got several ({mixed}). Name one kind with a "
            "glob such as data/*.jsonl, or convert the others"
        )
    return next(iter(kinds))


def find_stdlib_files() -> list[Path]:
    """Find the source files of Python's standard library, without tests: about 11 MB of text."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return [
        file
        for file in _walk_files(root)
        if file.suffix == ".py" and _NOT_TEXT.isdisjoint(file.relative_to(root).parts)
    ]


def _find_matches(pattern: str, setting: str) -> list[Path]:
    """List the files that a single pattern (file, folder or glob) matches.

    Raises:
        DataError: there is none, or the pattern is a folder of `save_to_disk`.
    """
    path = Path(pattern).expanduser()
    if is_saved_data_set(path):
        raise DataError(f"{setting}: {pattern} is a data set folder; set data.dataset_name to it")
    # The name of a file may contain brackets, so the file itself comes before the glob.
    if path.is_file():
        return [path]
    if path.is_dir():
        if (split := find_split(path, setting)) is not None:
            return split.files
        endings = [*DATA_ENDINGS, *TEXT_ENDINGS]
        files = [p for p in _walk_files(path) if _ending(p) in endings]
        if any(_ending(p) in DATA_ENDINGS for p in files):
            files = [p for p in files if p.name != "README.md"]
        problem = (
            f"the folder {pattern} holds no file of a known ending ({' '.join(endings)}); name "
            f"files of other endings with a glob such as {pattern}/*.log"
        )
    else:
        globbed = map(Path, glob.glob(str(path), recursive=True))
        files = sorted(p for p in globbed if p.is_file())
        problem = (
            f"{pattern!r} matches no file (current folder: {Path.cwd()}); check the path or glob"
        )
    if not files:
        raise DataError(f"{setting}: {problem}")
    return files


class Split(NamedTuple):
    """A split of a data set in a folder, such as `train`, with its files."""

    name: str
    files: list[Path]
    other_splits: dict[str, int]
    """Other splits -> number of their files."""


def find_split(folder: Path, setting: str) -> Split | None:
    """Find the split to read from a folder that is laid out like a data set on the Hub.

    Such a folder has data files, and a README.md with front matter or files named after splits.

    Args:
        folder: any folder.
        setting: the setting that names the folder. Settings of evaluation prefer the validation
            split, all other settings the training split.

    Returns:
        The split; None if the folder has another layout.

    Raises:
        DataError: the data set cannot be read, or has no suitable split.
    """
    card = folder / "README.md"
    has_front_matter = card.is_file() and card.read_bytes().startswith(b"---")
    files_of_rows = (f for f in _walk_files(folder) if _ending(f) in DATA_ENDINGS)
    paths = [str(file.relative_to(folder)) for file in files_of_rows]
    if not paths or not (has_front_matter or any(map(_SPLIT_NAME.search, paths))):
        return None
    # This import takes seconds, and a start from the command line checks paths before.
    import datasets

    try:
        data_files = datasets.load_dataset_builder(str(folder.resolve())).config.data_files or {}
    except Exception as error:
        # The folder comes from outside and may contain anything.
        advice = "name its files with a glob, or set data.dataset_name and dataset_config_name"
        raise DataError(
            f"{setting}: the data set in {folder} cannot be used ({one_line(error)}); {advice}"
        ) from error
    splits = {str(name): [Path(file) for file in files] for name, files in data_files.items()}
    preferred = _SPLITS["eval" if setting.startswith("data.eval_") else "train"]
    name = next((name for name in preferred if splits.get(name)), None)
    if name is None:
        names = ", ".join(splits) or "none"
        raise DataError(f"{setting}: expected a split {preferred[0]} in {folder}, found {names}")
    return Split(name, splits[name], {n: len(f) for n, f in splits.items() if n != name})


def _walk_files(root: Path) -> Iterator[Path]:
    """Yield all files beneath `root`, sorted within each folder.

    Hidden files and folders, and `__pycache__`, are skipped.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (Path(folder, n) for n in sorted(names) if not n.startswith("."))


def is_saved_data_set(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk` of the library `datasets`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _ending(file: Path) -> str:
    """Return the lower-case ending of a file; for a compressed data file, the inner one.

    For example, it is `.jsonl` for `a.jsonl.gz`.
    """
    inner = Path(file.stem).suffix.lower()
    if file.suffix.lower() in _COMPRESSED and DATA_ENDINGS.get(inner) in ("json", "csv"):
        return inner
    return file.suffix.lower()
