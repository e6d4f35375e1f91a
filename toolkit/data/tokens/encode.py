"""Rows to token ids: one policy for rows that cannot be used, counted, cached on disk.

Conversations are encoded in `dataset_num_proc` processes; other rows in this one, where the Rust
tokenizer runs on threads (see [Note: threads, not processes] in `text_ids.py`).
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import transformers

from toolkit import ranks
from toolkit.config.settings import FinetuneDataConfig
from toolkit.data.chat import TODAY, chat_templates
from toolkit.data.sources import tables
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import DataSource
from toolkit.data.tokens.encoder import EncodedExample, EncodedRow, Encoder
from toolkit.data.tokens.text_ids import BATCH_BYTES, content_of
from toolkit.errors import DataError

_CHAT_ROWS, _TEXT_ROWS = 512, 20_000  # that are encoded at a time, at most
_PLACES = 3
_ROWS_OF_A_PROCESS = 200  # conversations for which a further process is worth its start
_VERSION = 5  # part of the cache key: raise it when the same row gives other tokens or counts

_WHOLE = pa.schema({"input_ids": pa.list_(pa.int32())})
_IN_PART = pa.schema([*_WHOLE, ("spans", pa.list_(pa.int32())), ("row", pa.int64())])

_NOTHING = np.zeros(0, np.int32)
_work: Any = None  # of a worker process

log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What came of the rows of a source."""

    rows: int = 0  # read; kept and dropped ones add up to them
    kept: int = 0  # examples made of them
    truncated: int = 0  # kept ones whose end was cut off
    cut_off: int = 0  # tokens of these ends, which are not among `tokens`
    tokens: int = 0  # of the kept ones
    supervised: int = 0  # of those, tokens that the loss covers
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    places: dict[str, list[str]] = field(default_factory=dict)  # reason -> the first, and why
    notes: dict[str, int] = field(default_factory=dict)  # such as turns without a stop token

    def add(self, result: EncodedRow) -> None:
        """Count a row: the example it became, or its place and why it was left out."""
        self.rows += 1
        if isinstance(result, BadRow):
            self.dropped[result.reason] = self.dropped.get(result.reason, 0) + 1
            places = self.places.setdefault(result.reason, [])
            places += [str(result)][: _PLACES - len(places)]
            return
        self.kept += 1
        self.truncated += bool(result.cut_off)
        self.cut_off += result.cut_off
        self.tokens += len(result.input_ids)
        self.supervised += result.supervised
        for kind, count in result.notes.items():
            self.notes[kind] = self.notes.get(kind, 0) + count


@dataclass
class EncodedSource:
    """A source as token ids; name, weight and max_repeats as in its `SourceConfig`."""

    name: str
    # A row per kept example, in the order of the source: `input_ids` list<int32>, `spans`
    # list<int32> (begin, end, begin, end, ...), `row` int64, its row in the source. Of documents to
    # pretrain on only `input_ids`, and a row per row of the source.
    tokens: datasets.Dataset
    counts: Counts = field(default_factory=Counts)
    weight: float | None = None
    max_repeats: float | None = None
    format: str = "examples"  # of its rows, in words


def encode(source: DataSource, encoder: Encoder) -> EncodedSource:
    """Return `source` as token ids, with what came of its rows.

    Works on all cores, and is cached on disk by rows, tokenizer, template and settings: call it on
    one rank first. Memory: a few hundred megabytes for each process.

    Raises:
        DataError: a row cannot be used and `on_bad_row` is `error`, or it is too long and
            `too_long` is `error`, with its file and row; no document has text; see `Encoder`.
    """
    name = f"encoded-{_key(source, encoder)}"
    counted = tables.cache_folder() / f"{name}.json"
    if not counted.is_file():  # it is written before the tokens get their name
        counted.with_suffix(".arrow").unlink(missing_ok=True)
    schema = _WHOLE if source.layout.whole else _IN_PART
    encoded = _encoded(source, encoder, counted)
    tokens = tables.cached(name, encoded, schema, f"Encoding {source.name}")
    counts = Counts(**json.loads(counted.read_text("utf-8")))
    if source.layout.whole:
        _check_documents(source, counts)
    weight, limit, layout = source.weight, source.max_repeats, str(source.layout)
    return EncodedSource(source.name, tokens, counts, weight, limit, layout)


def _encoded(source: DataSource, encoder: Encoder, counted: Path) -> Iterator[pa.Table]:
    """Yield the tokens of rows that follow each other; at the end write their `Counts`."""
    counts, cfg = Counts(), encoder.cfg
    total, whole = len(source.rows), source.layout.whole
    most, processes = _TEXT_ROWS, 1
    if source.layout.format == "conversation" and isinstance(cfg, FinetuneDataConfig):
        affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
        asked = cfg.dataset_num_proc or min(cores, 1 + total // _ROWS_OF_A_PROCESS)
        processes = min(asked, total)
        most = min(_CHAT_ROWS, -(-total // processes))
    step = max(1, min(most, BATCH_BYTES * total // max(1, source.rows.data.nbytes)))
    starts = range(0, total, step)
    for first, results in zip(starts, _each(source, encoder, starts, processes), strict=True):
        for result in results:
            counts.add(result)
        if whole:  # a row that is left out is an empty document
            ids = [_NOTHING if isinstance(r, BadRow) else r.input_ids for r in results]
            yield pa.table([_lists(ids)], schema=_WHOLE)
            continue
        kept = [(at, r) for at, r in enumerate(results, first) if isinstance(r, EncodedExample)]
        ids = _lists([r.input_ids for _, r in kept])
        spans = _lists([np.array(r.spans, np.int32).ravel() for _, r in kept])
        yield pa.table([ids, spans, pa.array([at for at, _ in kept], pa.int64())], schema=_IN_PART)
    with tables.replacing(counted) as scratch:
        scratch.write_text(json.dumps(asdict(counts)), "utf-8")


def _each(
    source: DataSource, encoder: Encoder, starts: range, processes: int
) -> Iterator[list[EncodedRow]]:
    """Yield what becomes of the rows from each start to the next."""
    encoded_from = partial(_encoded_from, source, encoder, starts.step)
    if processes == 1:
        yield from map(encoded_from, starts)
        return
    try:
        with ProcessPoolExecutor(processes, None, _set_work, (encoded_from,)) as pool:
            yield from pool.map(_work_here, starts)
    except BrokenProcessPool as error:
        raise DataError(
            f"{source.where}: one of {processes} processes that encode it was killed, perhaps for "
            "its memory; lower data.dataset_num_proc"
        ) from error


def _encoded_from(source: DataSource, encoder: Encoder, count: int, first: int) -> list[EncodedRow]:
    columns = source.rows[first : first + count]
    values = zip(*columns.values(), strict=True)
    return encoder.rows(source, [dict(zip(columns, row, strict=True)) for row in values], first)


def _set_work(encoded_from: Callable[[int], list[EncodedRow]]) -> None:
    global _work
    _work = encoded_from
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores


def _work_here(first: int) -> list[EncodedRow]:
    return _work(first)


def _check_documents(source: DataSource, counts: Counts) -> None:
    if not counts.tokens:
        raise DataError(f"{source.where}: expected text, but all {counts.rows} rows are empty")
    if counts.dropped and ranks.rank() == 0:
        log.warning(
            "%s: %d of %d rows left out (data.on_bad_row: skip), the first: %s",
            source.where,
            sum(counts.dropped.values()),
            counts.rows,
            "; ".join(place for places in counts.places.values() for place in places[:1]),
        )


def _lists(values: list[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate([_NOTHING, *values])  # `pa.array` of the arrays takes 7 times as long
    return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.int32()))


def _key(source: DataSource, encoder: Encoder) -> str:
    """Return a digest of all that decides the result, the same in every process."""
    tokenizer, cfg = encoder.tokenizer, encoder.cfg
    templates: dict[str, str] = {}
    names = ["on_bad_row", "append_eos"]
    if isinstance(cfg, FinetuneDataConfig):
        names += ["supervise", "too_long", "sequence_length", "packing"]
        if source.layout.format == "conversation" and tokenizer is not None:
            templates = chat_templates(tokenizer, cfg.chat_template)
    return tables.digest_of(
        source.rows._fingerprint,
        _VERSION,
        source.layout,
        b"" if tokenizer is None else content_of(tokenizer),
        {} if tokenizer is None else tokenizer.special_tokens_map,
        sorted(templates.items()),
        (transformers.__version__, TODAY) if templates else "",
        {name: getattr(cfg, name) for name in names},
        encoder.vocab_size if source.layout.format == "tokenised" else "",
    )
