"""Rows to token ids: one policy for rows that cannot be used, counted, cached on disk.

[Note: who works]
Conversations are rendered and tokenised in `dataset_num_proc` processes of `datasets.map`; other
rows in this one, where the Rust tokenizer runs on threads (see [Note: threads, not processes] in
`text_ids.py`). Results come back in the order of the rows: tokens and counts are the same for any
number of processes. With `on_bad_row: error` the first bad row that any of them meets ends the run.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import transformers
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import DataConfig, FinetuneDataConfig
from toolkit.data.chat import TODAY, chat_templates
from toolkit.data.examples.recognise import Example
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import DataSource, RowPlace
from toolkit.data.tokens.encoder import EncodedExample, Encoder, EndsRun, LeftOut
from toolkit.data.tokens.text_ids import BATCH_BYTES, content_of, quiet_forks
from toolkit.errors import DataError

_CHAT_ROWS, _TEXT_ROWS = 512, 20_000
"""Rows that are encoded at a time, at most."""
_PLACES = 3
_ROWS_OF_A_PROCESS = 200
"""Conversations for which a further process is worth its start."""

_VERSION = 4
"""Part of the cache key: raise it when the same row gives other tokens or counts."""

_INTEGERS = datasets.List(datasets.Value("int32"))
_WHOLE = datasets.Features(input_ids=_INTEGERS)
_IN_PART = datasets.Features(input_ids=_INTEGERS, spans=_INTEGERS, row=datasets.Value("int64"))

log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What came of the rows of a source."""

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Examples made of them."""
    truncated: int = 0
    """Kept ones whose end was cut off."""
    cut_off: int = 0
    """Tokens of these ends, which nothing learns; they are not among `tokens`."""
    tokens: int = 0
    """Tokens of the kept ones."""
    supervised: int = 0
    """Of those, tokens that the loss covers."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> rows left out; kept and dropped add up to rows."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the first places left out for it, each with what was wrong."""
    notes: dict[str, int] = field(default_factory=dict)
    """What else is worth a line, such as turns that end in no stop token."""

    def keep(self, example: EncodedExample) -> None:
        """Count a row that became an example."""
        self.rows += 1
        self.kept += 1
        self.truncated += bool(example.cut_off)
        self.cut_off += example.cut_off
        self.tokens += len(example.input_ids)
        self.supervised += example.supervised
        for kind, count in example.notes.items():
            self.notes[kind] = self.notes.get(kind, 0) + count

    def drop(self, reason: str, place: str) -> None:
        """Count a row that was left out."""
        self.rows += 1
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        if len(self.places.setdefault(reason, [])) < _PLACES:
            self.places[reason].append(place)

    def add(self, other: "Counts") -> None:
        """Add the counts of the rows that follow."""
        for name in ("rows", "kept", "truncated", "cut_off", "tokens", "supervised"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.dropped, other.dropped), (self.notes, other.notes)):
            for kind, count in theirs.items():
                mine[kind] = mine.get(kind, 0) + count
        for reason, places in other.places.items():
            self.places[reason] = [*self.places.get(reason, []), *places][:_PLACES]


@dataclass
class EncodedSource:
    """A source as token ids.

    Attributes:
        name: what reports call the source.
        tokens: a row per kept example, in the order of the source: `input_ids` list<int32>, `spans`
            list<int32> (begin, end, begin, end, ...), `row` int64, its row in the source. Of
            documents to pretrain on only `input_ids`, and a row per row of the source.
        counts: what came of the rows.
        weight: see `SourceConfig.weight`.
        max_repeats: see `SourceConfig.max_repeats`.
    """

    name: str
    tokens: datasets.Dataset
    counts: Counts = field(default_factory=Counts)
    weight: float | None = None
    max_repeats: float | None = None


def encode(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: DataConfig,
    vocab_size: int,
) -> EncodedSource:
    """Return `source` as token ids, with what came of its rows.

    Works on all cores, and is cached on disk with its counts, under a name made of the rows, the
    tokenizer's content, the template and the settings: a second start, in any process, reads the
    files. Among several ranks, call it on one first. Memory: a few hundred megabytes for each
    process, whatever the size of the source.

    Raises:
        DataError: a row cannot be used and `cfg.on_bad_row` is `error`, or it is too long and
            `cfg.too_long` is `error`, with its file and row; documents without any text; or see
            `Encoder`.
    """
    quiet_forks()
    encoder = Encoder(tokenizer, cfg, vocab_size)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    key = _key(source, tokenizer, cfg, vocab_size)
    counted = folder / f"encoded-{key}.json"
    rows, found, processes = source.rows, {}, 1
    if datasets.is_caching_enabled() and counted.is_file():
        found = json.loads(counted.read_text("utf-8"))
    cached = bool(found) and all(Path(file).is_file() for file in found["files"])
    chat = source.layout.format == "conversation"
    if cached:
        processes = found["processes"]
    elif chat and isinstance(cfg, FinetuneDataConfig):
        processes = cfg.dataset_num_proc or min(_cores(), 1 + len(rows) // _ROWS_OF_A_PROCESS)
        processes = max(1, min(processes, len(rows)))
    mean = max(1, rows.data.nbytes // max(1, len(rows)))
    size = max(1, min(_CHAT_ROWS if chat else _TEXT_ROWS, BATCH_BYTES // mean))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tokens = rows.map(
            _Rows(source, encoder, Path(scratch)),
            batched=True,
            batch_size=size,
            writer_batch_size=size,
            with_indices=True,
            with_rank=True,
            num_proc=processes if processes > 1 else None,
            remove_columns=rows.column_names,
            features=_WHOLE if source.layout.whole else _IN_PART,
            cache_file_name=str(folder / f"encoded-{key}.arrow"),
            load_from_cache_file=cached,
            new_fingerprint=key,
            desc=f"Encoding {source.name}",
        )
        if not cached:
            total = Counts()
            for part in sorted(Path(scratch).iterdir(), key=lambda part: int(part.name)):
                total.add(Counts(**json.loads(part.read_text("utf-8"))))
            files = [file["filename"] for file in tokens.cache_files]
            found = {"processes": processes, "files": files, "counts": asdict(total)}
            _write(counted, json.dumps(found))
    counts = Counts(**found["counts"])
    if source.layout.whole:
        _check_documents(source, counts)
    return EncodedSource(source.name, tokens, counts, source.weight, source.max_repeats)


class RowEncoder:
    """Rows of a stream to examples, one by one, by the settings and with the counts of `encode`.

    `row_encoder(raw, index)` is a `BadRow` that names the row where it is left out, and counted in
    `counts`. It depends on nothing but the row. Copies in forked or spawned processes work, and
    count for themselves.

    Args:
        source: its `rows` are not read.
        tokenizer: see `Encoder`.
        cfg: see `Encoder`, and `on_bad_row`.
        vocab_size: see `Encoder`.
    """

    def __init__(
        self,
        source: DataSource,
        tokenizer: PreTrainedTokenizerBase | None,
        cfg: DataConfig,
        vocab_size: int,
    ) -> None:
        self._work = _Rows(source, Encoder(tokenizer, cfg, vocab_size))

    @property
    def counts(self) -> Counts:
        """What came of the rows so far."""
        return self._work.counts

    def __call__(self, raw: dict[str, Any], index: int) -> EncodedExample | BadRow:
        """Return the example of a stored row; where it is left out, its place and why.

        Raises:
            DataError: as for `encode`.
        """
        (result,) = self._work.settled([raw], [(raw, index)])
        return result


class _Rows:
    """Stored rows to examples, with the policy and the counts, which a process of `map` writes."""

    def __init__(self, source: DataSource, encoder: Encoder, folder: Path | None = None) -> None:
        self.source, self.encoder, self.counts, self.folder = source, encoder, Counts(), folder

    def __call__(self, columns: dict[str, list], rows: list[int], rank: int | None) -> pa.Table:
        raws = [{name: values[k] for name, values in columns.items()} for k in range(len(rows))]
        settled = self.settled(raws, rows)
        if self.folder is not None:
            counts = json.dumps(asdict(self.counts))
            Path(self.folder, str(rank or 0)).write_text(counts, "utf-8")
        if self.source.layout.whole:
            nothing = np.zeros(0, np.int32)
            ids = [nothing if isinstance(e, BadRow) else e.input_ids for e in settled]
            return pa.table({"input_ids": _lists(ids)})
        pairs = zip(rows, settled, strict=True)
        kept = [(row, example) for row, example in pairs if isinstance(example, EncodedExample)]
        return pa.table(
            {
                "input_ids": _lists([e.input_ids for _, e in kept]),
                "spans": _lists([np.asarray(e.spans, np.int32).reshape(-1) for _, e in kept]),
                "row": pa.array([row for row, _ in kept], pa.int64()),
            }
        )

    def settled(
        self, raws: list[dict[str, Any]], places: Sequence[RowPlace]
    ) -> list[EncodedExample | BadRow]:
        """Return the example of each row, or why it is left out, and count."""
        examples: list[Example | BadRow] = []
        for raw in raws:
            try:
                examples.append(self.source.example(raw))
            except BadRow as bad:
                examples.append(bad)
        return [
            self._settled(result, place)
            for result, place in zip(self.encoder.batch(examples), places, strict=True)
        ]

    def _settled(self, result: EncodedExample | BadRow, at: RowPlace) -> EncodedExample | BadRow:
        if isinstance(result, EncodedExample):
            self.counts.keep(result)
            return result
        if isinstance(result, EndsRun):
            raise DataError(f"{self.source.place(at)}: {result}")
        if not isinstance(result, LeftOut) and self.encoder.cfg.on_bad_row == "error":
            raise self.source.refusal(at, result)
        # All but the first few of a reason are only counted, and not asked where they stand.
        shown = len(self.counts.places.get(result.reason, [])) < _PLACES
        said = f"{self.source.place(at)}: {result}" if shown else str(result)
        self.counts.drop(result.reason, said)
        return BadRow(said, result.reason)


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
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    flat = np.concatenate(values) if values else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.int32()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Return the folder of what was tokenised, beneath the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "toolkit"


def _key(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: DataConfig,
    vocab_size: int,
) -> str:
    """Return a name for the result, made of all that decides it, the same in every process."""
    templates: dict[str, str] = {}
    names = ["on_bad_row", "append_eos"]
    if isinstance(cfg, FinetuneDataConfig):
        names += ["supervise", "too_long", "sequence_length", "packing"]
        if source.layout.format == "conversation" and tokenizer is not None:
            templates = chat_templates(tokenizer, cfg.chat_template)
    parts = (
        source.rows._fingerprint,
        _VERSION,
        source.layout,
        source.raw,
        b"" if tokenizer is None else content_of(tokenizer),
        {} if tokenizer is None else tokenizer.special_tokens_map,
        sorted(templates.items()),
        (transformers.__version__, TODAY) if templates else "",
        {name: getattr(cfg, name) for name in names},
        vocab_size if source.layout.format == "tokenised" else "",
    )
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _write(file: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    scratch = file.with_suffix(f".tmp-{os.getpid()}")
    scratch.write_text(text, "utf-8")
    os.replace(scratch, file)
