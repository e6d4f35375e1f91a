"""Which sources a config names, and which files, of which kind, paths, folders and globs mean."""

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
What = Literal["train", "eval"]

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
"""Endings of text that are taken from beneath a folder; a file named itself may have any."""

_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_SPLITS = {"train": ("train",), "eval": ("validation", "test", "train")}  # the first that is there
_OF_A_SPLIT = re.compile(r"(?<![a-z0-9])(train|test|valid|validation|val|dev|eval)(?![a-z])", re.I)
_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def list_sources(cfg: DataConfig, what: What = "train") -> list[tuple[str, SourceConfig]]:
    """Return the sources that `cfg` names as (setting, source).

    Each entry of `eval_files` is a source; those of `eval_sources` follow.

    A source without a name gets that of its first file or data set; repeated names are numbered.
    """
    found: list[tuple[str, SourceConfig]] = []
    if what == "eval":
        files = [cfg.eval_files] if isinstance(cfg.eval_files, str) else cfg.eval_files
        found = [("data.eval_files", SourceConfig(files=entry)) for entry in files]
        found += [(f"data.eval_sources[{i}].files", s) for i, s in enumerate(cfg.eval_sources)]
    elif cfg.sources:
        found = [(f"data.sources[{i}].files", source) for i, source in enumerate(cfg.sources)]
    elif cfg.train_files or cfg.dataset_name:
        of = (cfg.train_files, cfg.dataset_name, cfg.dataset_config_name, cfg.dataset_split)
        found = [("data.train_files", SourceConfig(*of))]
    names = [source.name or _name(source, setting) for setting, source in found]
    for i, name in enumerate(names):
        number = 1
        while names[i] in names[:i] or (number > 1 and names[i] in names[i + 1 :]):
            number += 1
            names[i] = f"{name}-{number}"
    return [(s, replace(source, name=n)) for (s, source), n in zip(found, names, strict=True)]


def _name(source: SourceConfig, setting: str) -> str:
    if source.dataset_name:
        return Path(source.dataset_name).name or source.dataset_name
    first = find_files(source.files, setting)[0]
    packed = first.suffix.lower() in _COMPRESSED
    return Path(first.stem).stem if packed else first.stem


def find_files(patterns: str | list[str], what: str) -> list[Path]:
    """Return the files that `patterns` name: absolute, each once, in the order given.

    A pattern is a file, a folder (every file beneath it of a known ending) or a glob, with `**` and
    `~`; what it finds is sorted. Nothing is a DataError that names the setting `what`.
    """
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found |= dict.fromkeys(Path(os.path.abspath(file)) for file in _matches(pattern, what))
    return list(found)


def common_file_kind(files: list[Path], what: str) -> Kind:
    """Return the one kind that all of `files` are of; several are a DataError."""
    kinds = {DATA_ENDINGS.get(_ending(file), "text"): file for file in reversed(files)}
    if len(kinds) > 1:
        mixed = ", ".join(f"{kind}: {file}" for kind, file in kinds.items())
        raise DataError(
            f"{what}: expected files of one kind, got several ({mixed}). Name one kind with a glob "
            "such as data/*.jsonl, or convert the others"
        )
    return next(iter(kinds))


def find_stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library, without tests: some 11 MB of text."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    return [
        file
        for file in _beneath(root)
        if file.suffix == ".py" and _NOT_TEXT.isdisjoint(file.relative_to(root).parts)
    ]


def _matches(pattern: str, what: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if is_saved_data_set(path):
        raise DataError(f"{what}: {pattern} is a data set folder; give it as data.dataset_name")
    if path.is_file():  # before the glob: a file's own name may hold brackets
        return [path]
    if path.is_dir():
        if (split := find_split(path, what)) is not None:
            return split.files
        known = [*DATA_ENDINGS, *TEXT_ENDINGS]
        found = [p for p in _beneath(path) if _ending(p) in known]
        if any(_ending(p) in DATA_ENDINGS for p in found):
            found = [p for p in found if p.name != "README.md"]
        why = (
            f"the folder {pattern} holds no file of a known ending ({' '.join(known)}); name files "
            f"of other endings with a glob such as {pattern}/*.log"
        )
    else:
        globbed = map(Path, glob.glob(str(path), recursive=True))
        found = sorted(p for p in globbed if p.is_file())
        why = f"{pattern!r} matches no file (current folder: {Path.cwd()}); check the path or glob"
    if not found:
        raise DataError(f"{what}: {why}")
    return found


class Split(NamedTuple):
    """A split of a data set in a folder, and how many files its other splits have."""

    name: str
    files: list[Path]
    others: dict[str, int]


def find_split(folder: Path, what: str) -> Split | None:
    """Return the split that the setting `what` reads of a folder as the Hub has them: with a
    README.md that names files, or files that are named after splits. None for any other folder.
    """
    card = folder / "README.md"
    named = card.is_file() and card.read_bytes().startswith(b"---")
    rows = [str(f.relative_to(folder)) for f in _beneath(folder) if _ending(f) in DATA_ENDINGS]
    if not rows or not (named or any(map(_OF_A_SPLIT.search, rows))):
        return None
    import datasets  # seconds; a start from the command line refuses paths before it

    try:
        found = datasets.load_dataset_builder(str(folder.resolve())).config.data_files or {}
    except Exception as error:  # the folder comes from outside: it may hold anything
        advice = "name its files with a glob, or set data.dataset_name and dataset_config_name"
        said = f"{what}: the data set in {folder} cannot be used ({one_line(error)}); {advice}"
        raise DataError(said) from error
    files = {str(name): [Path(file) for file in some] for name, some in found.items()}
    wanted = _SPLITS["eval" if what.startswith("data.eval_") else "train"]
    name = next((name for name in wanted if files.get(name)), None)
    if name is None:
        has = ", ".join(files) or "none"
        raise DataError(f"{what}: expected a split {wanted[0]} in {folder}, found {has}")
    return Split(name, files[name], {n: len(f) for n, f in files.items() if n != name})


def _beneath(root: Path) -> Iterator[Path]:
    """Yield the files beneath `root`, sorted within each folder; neither hidden ones nor caches."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (Path(folder, n) for n in sorted(names) if not n.startswith("."))


def is_saved_data_set(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _ending(file: Path) -> str:
    """Return the lower-case ending, that of `a.jsonl` for `a.jsonl.gz`."""
    inner = Path(file.stem).suffix.lower()
    if file.suffix.lower() in _COMPRESSED and DATA_ENDINGS.get(inner) in ("json", "csv"):
        return inner
    return file.suffix.lower()
