"""Examples to token ids and the ranges of them that are learned: one policy, counted, cached.

Owns what a row that cannot be used does, the counts of what came of the rows, and the cache.
Refuses to know files, how an example is encoded (`encoder.py`), and how examples become samples.

[Note: who works]
Conversations are rendered and tokenised in `dataset_num_proc` processes of `datasets.map`; other
rows in this one, where the Rust tokenizer runs on threads (see [Note: threads, not processes] in
`tokenise.py`). Results come back in the order of the rows: tokens and counts are the same for any
number of processes. With `on_bad_row: error` the first bad row that any of them meets ends the run.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import transformers
from transformers import PreTrainedTokenizerBase

from toolkit.config.settings import FinetuneDataConfig
from toolkit.data.chat.conversations import chat_templates
from toolkit.data.chat.template import TODAY
from toolkit.data.examples.recognise import Example
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import At, Source
from toolkit.data.tokens.encoder import EncodedExample, Encoder, LeftOut, TooLong
from toolkit.data.tokens.tokenise import cache_folder, content_of, key_of, quiet_forks
from toolkit.errors import DataError

_BATCH_ROWS, _BATCH_BYTES = 512, 8 << 20
_PLACES = 3
_ROWS_OF_A_PROCESS = 200
"""Conversations for which a further process is worth its start."""

_VERSION = 3
"""Part of the cache key: raise it when the same row gives other tokens or counts."""

_COLUMNS = datasets.Features(
    input_ids=datasets.List(datasets.Value("int32")),
    spans=datasets.List(datasets.Value("int32")),
    row=datasets.Value("int64"),
)


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
class Encoded:
    """A source as token ids.

    Attributes:
        name: what reports call the source.
        tokens: a row per kept example, in the order of the source: `input_ids` list<int32>, `spans`
            list<int32> (begin, end, begin, end, ...), `row` int64, its row in the source.
        counts: what came of the rows.
        weight: see `SourceConfig.weight`.
        max_repeats: see `SourceConfig.max_repeats`.
    """

    name: str
    tokens: datasets.Dataset
    counts: Counts
    weight: float | None = None
    max_repeats: float | None = None


def encode(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: FinetuneDataConfig,
    vocab_size: int,
) -> Encoded:
    """Return `source` as token ids, with what came of its rows.

    Works in `cfg.dataset_num_proc` processes on conversations, and is cached on disk with its
    counts, under a name made of the rows, the tokenizer's content, the template and the settings:
    a second start, in any process, reads the files. Among several ranks, call it on one first.
    Memory: a few hundred megabytes for each process, whatever the size of the source.

    Raises:
        DataError: a row cannot be used and `cfg.on_bad_row` is `error`, or it is too long and
            `cfg.too_long` is `error`, with its file and row; or see `Encoder`.
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
    if cached:
        processes = found["processes"]
    elif source.layout.format == "conversation":
        processes = cfg.dataset_num_proc or min(_cores(), 1 + len(rows) // _ROWS_OF_A_PROCESS)
        processes = max(1, min(processes, len(rows)))
    mean = max(1, rows.data.nbytes // max(1, len(rows)))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tokens = rows.map(
            _Rows(source, encoder, Path(scratch)),
            batched=True,
            batch_size=max(1, min(_BATCH_ROWS, _BATCH_BYTES // mean)),
            writer_batch_size=_BATCH_ROWS,
            with_indices=True,
            with_rank=True,
            num_proc=processes if processes > 1 else None,
            remove_columns=rows.column_names,
            features=_COLUMNS,
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
            found = {"processes": processes, "files": files, "counts": dataclasses.asdict(total)}
            _write(counted, json.dumps(found))
    counts = Counts(**found["counts"])
    return Encoded(source.name, tokens, counts, source.weight, source.max_repeats)


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
        source: Source,
        tokenizer: PreTrainedTokenizerBase | None,
        cfg: FinetuneDataConfig,
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

    def __init__(self, source: Source, encoder: Encoder, folder: Path | None = None) -> None:
        self.source, self.encoder, self.counts, self.folder = source, encoder, Counts(), folder

    def __call__(self, columns: dict[str, list], rows: list[int], rank: int | None) -> pa.Table:
        raws = [{name: values[k] for name, values in columns.items()} for k in range(len(rows))]
        settled = self.settled(raws, rows)
        if self.folder is not None:
            counts = json.dumps(dataclasses.asdict(self.counts))
            Path(self.folder, str(rank or 0)).write_text(counts, "utf-8")
        pairs = zip(rows, settled, strict=True)
        kept = [(row, example) for row, example in pairs if isinstance(example, EncodedExample)]
        spans = [np.asarray(e.spans, np.int32).reshape(-1) for _, e in kept]
        return pa.table(
            {
                "input_ids": _lists([e.input_ids for _, e in kept]),
                "spans": _lists(spans),
                "row": pa.array([row for row, _ in kept], pa.int64()),
            }
        )

    def settled(
        self, raws: list[dict[str, Any]], places: Sequence[At]
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

    def _settled(self, result: EncodedExample | BadRow, at: At) -> EncodedExample | BadRow:
        if isinstance(result, EncodedExample):
            self.counts.keep(result)
            return result
        # All but the first few of a reason are only counted, and not asked where they stand.
        shown = len(self.counts.places.get(result.reason, [])) < _PLACES
        if isinstance(result, TooLong):
            raise DataError(f"{self.source.place(at)}: {result}")
        if not isinstance(result, LeftOut) and self.encoder.cfg.on_bad_row == "error":
            raise self.source.refusal(at, result)
        said = f"{self.source.place(at)}: {result}" if shown else str(result)
        self.counts.drop(result.reason, said)
        return BadRow(said, result.reason)


def _lists(values: list[np.ndarray]) -> pa.ListArray:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    flat = np.concatenate(values) if values else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.int32()))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _key(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: FinetuneDataConfig,
    vocab_size: int,
) -> str:
    """Return a name for the result, made of all that decides it, the same in every process."""
    templates: dict[str, str] = {}
    if source.layout.format == "conversation" and tokenizer is not None:
        templates = chat_templates(tokenizer, cfg.chat_template)
    settings = ("supervise", "too_long", "on_bad_row", "sequence_length", "append_eos", "packing")
    return key_of(
        source.rows,
        "encoded",
        _VERSION,
        source.layout,
        source.raw,
        b"" if tokenizer is None else content_of(tokenizer),
        {} if tokenizer is None else tokenizer.special_tokens_map,
        sorted(templates.items()),
        (transformers.__version__, TODAY) if templates else "",
        {name: getattr(cfg, name) for name in settings},
        vocab_size if source.layout.format == "tokenised" else "",
    )


def _write(file: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    scratch = file.with_suffix(f".tmp-{os.getpid()}")
    scratch.write_text(text, "utf-8")
    os.replace(scratch, file)
