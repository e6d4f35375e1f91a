"""Rows in memory as files, in a cache whose names are digests of the content."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from toolkit.errors import ConfigError

_BLOCK_BYTES = 1 << 20


def store_rows(rows: Any, setting: str) -> Any:
    """Write rows to a file, and return its path; return paths unchanged.

    A `datasets.Dataset` becomes a Parquet file. A list of dicts becomes JSON lines, because its
    rows may have different keys and types. The name of the file is a digest of its content, so a
    run that resumes, and the command line, find the file in the cache of `datasets`
    (`HF_DATASETS_CACHE/toolkit-rows`). Writing costs one pass over the rows.

    Args:
        rows: a `datasets.Dataset`, a list of dicts, or paths.
        setting: the setting that the rows are for, for messages.

    Returns:
        The absolute path of the file, or `rows` if they are paths already.

    Raises:
        ConfigError: the rows have another type, there are none, or a row cannot be written.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    if isinstance(rows, list | tuple) and rows:
        if all(isinstance(entry, str | os.PathLike) for entry in rows):
            return [os.fspath(entry) for entry in rows]
        if all(isinstance(row, Mapping) for row in rows):
            return _write_once(lambda file: _write_json_lines(rows, file, setting), ".jsonl")
    import datasets

    if isinstance(rows, datasets.DatasetDict):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, got a DatasetDict with {', '.join(rows)}; "
            "give one of them, such as data=dataset['train'] and eval_data=dataset['test']"
        )
    if isinstance(rows, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, got an {type(rows).__name__}; name the files "
            "or the Hub id of its data, and set data.streaming"
        )
    if not isinstance(rows, datasets.Dataset):
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset, a list of dicts, or paths, got "
            f"{type(rows).__name__}"
        )
    if not len(rows):
        raise ConfigError(f"{setting}: the data set has no rows")
    if rows.format["type"] == "custom":
        # The transform is a function that runs when a row is read, so no file contains its result.
        raise ConfigError(
            f"{setting}: expected a datasets.Dataset without a transform, got one of set_transform "
            "or with_transform; apply it with dataset.map(..., batched=True) instead"
        )
    return _write_once(lambda file: rows.to_parquet(str(file)), ".parquet")


def _write_once(write: Callable[[Path], object], ending: str) -> str:
    """Call `write` with a new file, and rename it to a digest of its content.

    Threads, processes and containers may share the folder: each writes a separate file, and files
    with equal names are equal.
    """
    import datasets

    folder = (Path(datasets.config.HF_DATASETS_CACHE) / "toolkit-rows").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".unfinished")
    os.close(descriptor)
    unfinished = Path(name)
    try:
        write(unfinished)
        unfinished.chmod(0o644)  # mkstemp lets only its user read the file
        file = folder / f"{_digest_file(unfinished)}{ending}"
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return str(file)


def _write_json_lines(rows: Sequence[Mapping], file: Path, setting: str) -> None:
    """Write rows as JSON lines; keys stay in their order.

    Raises:
        ConfigError: a row has a value that JSON does not have.
    """
    with file.open("wb") as opened:
        for number, row in enumerate(rows):
            try:
                text = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
                opened.write(f"{text}\n".encode())
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{setting}: row {number} (counted from 0) cannot be written as JSON: {error}; "
                    "use texts, finite numbers, booleans, None, and lists and dicts of them"
                ) from None


def _digest_file(file: Path) -> str:
    """Return a digest of the content of a file, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
