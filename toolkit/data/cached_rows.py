"""Rows in memory as files: Parquet, in a cache whose names are digests of the content."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from toolkit.errors import ConfigError

_BLOCK_BYTES = 1 << 20


def store_rows(rows: Any, setting: str) -> Any:
    """Write rows to a Parquet file, and return its path; return paths unchanged.

    The name of the file is a digest of its content, so the same rows are the same file. A run that
    resumes, and the command line, find the file in the cache of `datasets`
    (`HF_DATASETS_CACHE/toolkit-rows`). Writing costs one pass over the rows.

    Args:
        rows: a `datasets.Dataset`, a list of dicts, or paths.
        setting: the setting that the rows are for, for messages.

    Returns:
        The path of the file, or `rows` if they are paths already.

    Raises:
        ConfigError: the rows have another type, or there are none.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    if isinstance(rows, list) and rows and all(isinstance(e, str | os.PathLike) for e in rows):
        return [os.fspath(entry) for entry in rows]
    import datasets

    if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
        rows = datasets.Dataset.from_list([dict(row) for row in rows])
    if isinstance(rows, datasets.DatasetDict):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, got a DatasetDict with {', '.join(rows)}; "
            "give one of them, such as data=dataset['train'] and eval_data=dataset['test']"
        )
    if isinstance(rows, datasets.IterableDataset):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, got an IterableDataset; name the files or "
            "the Hub id of its data, and set data.streaming"
        )
    if not isinstance(rows, datasets.Dataset):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, a list of dicts, or paths, got "
            f"{type(rows).__name__}"
        )
    if not len(rows):
        raise ConfigError(f"{setting}: the data set has no rows")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "toolkit-rows"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{os.getpid()}.unfinished"
    try:
        rows.to_parquet(str(unfinished))
        file = folder / f"{_digest_file(unfinished)}.parquet"
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return str(file)


def _digest_file(file: Path) -> str:
    """Return a digest of the content of a file, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
