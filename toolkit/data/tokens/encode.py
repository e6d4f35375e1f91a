"""Encode rows as token ids with the tokens that the loss covers, and cache them on disk.

Conversations are encoded in one process per core, because chat templates run in Python. Other rows
are encoded in this process, where the Rust tokenizer runs on threads; see [Note: threads, not
processes] in `text_ids.py`.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit import ranks
from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.data.chat import TODAY, Chat, Rendered, load_chat_templates
from toolkit.data.examples.recognise import Conversation, Example, PromptCompletion, Text, Tokens
from toolkit.data.row_formats import EXAMPLES, Parsed, RowFormat
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.columns import Column, stored_columns
from toolkit.data.sources import tables
from toolkit.data.sources.row_values import BadRow, Row, SkippedRow, catch_bad_row
from toolkit.data.sources.rows import DataSource
from toolkit.data.tokens.encoded import (
    EMPTY_PROMPT,
    LATE_COLUMN,
    Counts,
    EncodedExample,
    EncodedRow,
    EncodedSource,
    FatalRow,
)
from toolkit.data.tokens.partners import (
    NO_PARTNER,
    choose_partners,
    choose_partners_among,
    join_partner,
    read_stored_rows,
)
from toolkit.data.tokens.text_ids import BATCH_BYTES, Span, TextTokenizer, tokenizer_content
from toolkit.data.tokens.tokenizer import check_vocabulary
from toolkit.errors import DataError
from toolkit.formats.synced_files import replace_on_exit

# Maximum number of rows that are encoded at a time.
_CHAT_ROWS = 512
_TEXT_ROWS = 20_000
# Number of conversations for which another process is worth its start.
_ROWS_PER_PROCESS = 200
# Part of the cache key: raise it when the same row gives other tokens or counts.
_VERSION = 8
# The same for conversations: raise it when the same conversation gives another loss mask.
_MASK_VERSION = 4
_COUNTS_VERSION = 1  # of cached examples alone: raise it when a row counts in another way

# Names of the fields of `Layout` and `Names` in digests. They must not change with the fields,
# because a stream resumes only if the digest is that of its checkpoint.
_LAYOUT_FIELDS = (
    "shape",
    "columns",
    "whole",
    "unused",
    "prompt",
    "renamed",
    "json_turns",
    "dialogue",
    "system",
    "chat",
    "plain",
    "mostly_prompts",
    "remarks",
)
_NAMES_FIELDS = ("columns", "keys", "roles", "left_out")

_NO_TOKENS = np.zeros(0, np.int32)
_encode_from: Any = None  # set in each worker process

log = logging.getLogger(__name__)


class Encoder:
    """Encodes rows and examples as token ids and spans of supervised tokens.

    Conversations are rendered by the chat template. Texts, and prompts joined with completions, get
    the tokenizer's special tokens and, with `data.append_eos`, a supervised end-of-sequence token.
    Token ids keep their labels. Documents to pretrain on are supervised entirely, and may be empty.
    The result for a row depends on no other row, except in formats that compare rows.

    Args:
        tokenizer: the tokenizer of the run; None if all rows are token ids already.
        cfg: settings of the data.
        vocab_size: number of rows of the model's embedding.
        row_format: format of the rows.

    Raises:
        DataError: the tokenizer has ids of `vocab_size` or more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        cfg: DataConfig,
        vocab_size: int,
        row_format: RowFormat = EXAMPLES,
    ) -> None:
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.row_format = row_format
        self.finetune = cfg if isinstance(cfg, FinetuneDataConfig) else None
        self.supervise = "all" if self.finetune is None else self.finetune.supervise
        # The sides of a pair are truncated together, after each was encoded.
        is_limited = self.finetune is not None and cfg.packing != "wrapped"
        is_limited = is_limited and row_format.sequences_per_row < 2
        self.limit = cfg.sequence_length if is_limited else None
        if tokenizer is None:
            return
        check_vocabulary(tokenizer, vocab_size)
        self._texts = TextTokenizer(tokenizer)
        self._before, self._after = self._texts.special_tokens()
        eos = tokenizer.eos_token_id
        self._eos = [eos] if cfg.append_eos and eos is not None else []
        if cfg.append_eos and eos is None and ranks.rank() == 0:
            log.warning(
                "data.append_eos: the tokenizer %s has no end-of-sequence token, so nothing marks "
                "where a document ends",
                tokenizer.name_or_path,
            )

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer or `data.chat_template` has a template for conversations."""
        template = self.finetune and self.finetune.chat_template
        return bool(template or getattr(self.tokenizer, "chat_template", None))

    def encode_row(self, source: DataSource, stored: Row, number: int) -> EncodedRow:
        """Encode one row; `number` is its number in the source. See `encode_rows`."""
        return self.encode_rows(source, [stored], number)[0]

    def encode_rows(
        self,
        source: DataSource,
        stored: Sequence[Row],
        first: int,
        partners: Sequence[Row | None] | None = None,
    ) -> list[EncodedRow]:
        """Encode consecutive rows of a source.

        Args:
            source: the source of the rows.
            stored: the rows as they are stored.
            first: number of the first row in the source.
            partners: for formats that compare rows, the stored row with whose answer each row is
                compared; None: chosen among `stored`. See [Note: KL partners] in `partners.py`.

        Returns:
            For each row an EncodedExample, or a BadRow with the row's position and the fault.

        Raises:
            DataError: a row is bad with `data.on_bad_row: error`, or is a `FatalRow`; or as in
                `encode_examples`.
        """
        readable = [catch_bad_row(source.read, row) for row in stored]
        examples: list[Any] = [
            row if isinstance(row, BadRow) else catch_bad_row(source.parse_example, row)
            for row in readable
        ]
        if self.row_format.compares_rows:
            compared: Sequence[Any] = (
                choose_partners_among(examples)
                if partners is None
                else [row and catch_bad_row(source.example, row) for row in partners]
            )
            examples = [*map(join_partner, examples, compared)]
        encoded = self.encode_examples(examples)
        for at, (row, values) in enumerate(zip(stored, readable, strict=True)):
            example = encoded[at]
            if isinstance(values, dict) and not isinstance(example, BadRow):
                for name in (
                    values.keys() - source.reported_columns if source.reported_columns else ()
                ):
                    example.notes[LATE_COLUMN.format(name)] = 1
            if not isinstance(example, BadRow):
                continue
            message = f"{source.describe_place(row, first + at)}: {example}"
            if isinstance(example, FatalRow):
                raise DataError(message)
            if not isinstance(example, SkippedRow) and self.cfg.on_bad_row == "error":
                raise source.make_error(row, first + at, example)
            encoded[at] = BadRow(message, example.reason)
        return encoded

    def encode_examples(self, examples: Sequence[Parsed | BadRow]) -> list[EncodedRow]:
        """Encode parsed rows, one result for each; a BadRow is returned unchanged.

        Raises:
            DataError: there is no tokenizer or no chat template, or `data.supervise` does not fit
                the rows.
        """
        texts = [
            [example] if isinstance(example, BadRow) else [*self.row_format.texts(example)]
            for example in examples
        ]
        encoded = iter(self._encode_texts([text for of_row in texts for text in of_row]))
        rows = list[EncodedRow]()
        for example, of_row in zip(examples, texts, strict=True):
            parts = [next(encoded) for _ in of_row]
            usable = [part for part in parts if isinstance(part, EncodedExample)]
            if isinstance(example, BadRow) or len(usable) < len(parts):
                rows.append(next(part for part in parts if isinstance(part, BadRow)))
            else:
                rows.append(self.row_format.encode(example, usable, self.cfg))
        return rows

    def _encode_texts(self, examples: Sequence[Example | BadRow]) -> list[EncodedRow]:
        """Encode examples that are one text each, by one call of the tokenizer for all."""
        encoded = [self._render_example(example) for example in examples]
        texts = [(at, text) for at, text in enumerate(encoded) if isinstance(text, Rendered)]
        if texts:
            all_tokens = self._texts.encode([t.text for _, t in texts], [t.spans for _, t in texts])
            for (at, text), tokens in zip(texts, all_tokens, strict=True):
                if isinstance(tokens, BadRow):
                    encoded[at] = tokens
                    continue
                is_complete = isinstance(examples[at], Conversation)
                ids, spans = (
                    tokens if is_complete else self._add_special_tokens(examples[at], *tokens)
                )
                encoded[at] = self._truncate_or_skip(examples[at], ids, spans, text.notes)
        return encoded  # type: ignore[return-value]

    def _render_example(self, example: Example | BadRow) -> Rendered | EncodedRow:
        """Render an example as text with supervised spans. Token ids are encoded directly."""
        if isinstance(example, BadRow):
            return example
        if isinstance(example, Tokens):
            return self._encode_ids(example)
        if self.tokenizer is None:
            raise DataError(
                "expected a tokenizer, since the data is text; set model.tokenizer_name_or_path, "
                "or give data with a column input_ids"
            )
        if isinstance(example, Text):
            self._check_supervise("texts", "auto", "all")
            return Rendered(example.text, [(0, len(example.text))])
        if isinstance(example, PromptCompletion):
            self._check_supervise("prompts and completions", "auto", "completion", "all")
            text = example.prompt + example.completion
            begin = 0 if self.supervise == "all" else len(example.prompt)
            notes = Counter({} if example.prompt.strip() else {EMPTY_PROMPT: 1})
            return Rendered(text, [(begin, len(text))], notes)
        rendered = self._chat_renderer.render(example)
        if isinstance(rendered, Rendered) and not example.has_prompt:
            rendered.notes[EMPTY_PROMPT] += 1
        return rendered

    @cached_property
    def _chat_renderer(self) -> Chat:
        """The renderer of conversations, created at the first use."""
        assert self.tokenizer is not None
        template = self.finetune.chat_template if self.finetune else None
        kwargs = self.finetune.chat_template_kwargs if self.finetune else None
        return Chat(
            self.tokenizer,
            supervise=self.supervise,
            chat_template=template,
            template_kwargs=kwargs,
        )

    def _check_supervise(self, rows: str, *choices: str) -> None:
        """Raise DataError if `data.supervise` is not in `choices`; `rows` describes the rows."""
        if self.supervise not in choices:
            raise DataError(
                f"data.supervise {self.supervise} does not go with {rows}; expected one of "
                f"{', '.join(choices)}"
            )

    def _encode_ids(self, example: Tokens) -> EncodedRow:
        """Encode a row of token ids and labels; return (not raise) a BadRow if it is unusable."""
        # Compared as Python's integers, which may be of any size.
        ids = example.input_ids
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong_id = next(i for i in ids if not 0 <= i < self.vocab_size)
            fault = (
                f"expected token ids from 0 to {self.vocab_size - 1} (the model's embedding has "
                f"{self.vocab_size} rows), got {wrong_id}"
            )
            if self.finetune:
                return BadRow(fault, "token id out of the vocabulary")
            # Not the fault of a single row: the data was encoded by another tokenizer.
            return FatalRow(
                f"{fault}; the data needs the tokenizer of this model, or the model a larger "
                "embedding (model.resize_embeddings)"
            )
        array = np.asarray(ids, np.int64)
        if example.labels is None:
            self._check_supervise("token ids without labels", "auto", "all")
            return self._truncate_or_skip(example, array, [(0, len(ids))] if ids else [])
        is_supervised = np.asarray(example.labels) != IGNORED
        steps = np.diff(np.concatenate([[0], is_supervised, [0]]).astype(np.int8))
        edges = np.flatnonzero(steps).tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        return self._truncate_or_skip(example, array, spans)

    def _add_special_tokens(
        self, example: object, ids: np.ndarray, spans: list[Span]
    ) -> tuple[np.ndarray, list[Span]]:
        """Return (ids, spans) with the special tokens around a text, and its EOS if it lacks one.

        Leading tokens that are present are not repeated; an empty text stays empty. The spans
        [begin, end) are shifted, and the special tokens after the text are supervised, too.
        """
        start, end = (example.start, example.end) if isinstance(example, Text) else (True, True)
        if not len(ids) and start and end:
            return ids, []
        before = self._before if start else []
        after = self._after if end else []
        if before and ids[: len(before)].tolist() == before:
            # The text begins with these tokens already.
            before = []
        if end and self._eos and [*ids[-1:], *after][-1:] != self._eos:
            after = after + self._eos
        framed = np.concatenate([before, ids, after]).astype(np.int32)
        if isinstance(example, Text) or self.supervise == "all":
            return framed, [(0, len(framed))] if len(framed) else []
        spans = [(first + len(before), last + len(before)) for first, last in spans]
        if after:
            # The end of a completion is supervised together with it.
            inner = len(before) + len(ids)
            joined = spans and spans[-1][1] == inner
            spans = [*spans[:-1], (spans[-1][0] if joined else inner, len(framed))]
        return framed, spans

    def _truncate_or_skip(
        self,
        example: object,
        ids: np.ndarray,
        spans: list[Span],
        notes: dict[str, int] | None = None,
    ) -> EncodedRow:
        """Build an encoded example of at most `data.sequence_length` tokens.

        A longer one is truncated, skipped or ends the run, as `data.too_long` says; plain text is
        never truncated. Returns a BadRow (not raised) if the example is skipped or ends the run, or
        if none of its tokens is supervised.
        """
        limit, piece, is_part = self.limit, None, False
        if isinstance(example, Text):
            # Packing cuts a text into pieces. A part of a text may be a single token.
            limit, piece = None, self.limit
            is_part = len(ids) > 0 and not (example.start and example.end)
        if not len(ids) and self.finetune:
            return SkippedRow("the tokenizer gives no token for it", "no token")
        cut_off = 0 if limit is None else max(0, len(ids) - limit)
        if limit is not None and cut_off:
            fault = f"expected at most {limit} tokens (data.sequence_length), got {len(ids)}"
            too_long = self.finetune and self.finetune.too_long
            if too_long == "error":
                return FatalRow(f"{fault}; set data.too_long to truncate or drop", "too long")
            if too_long == "drop":
                return SkippedRow(fault, "too long")
            ids = ids[:limit]
            spans = [(begin, min(end, limit)) for begin, end in spans if begin < limit]
        ids = ids.astype(np.int32, copy=False)
        encoded = EncodedExample(ids, spans, cut_off, notes or {}, piece)
        if self.finetune is None or is_part or encoded.supervised:
            return encoded
        if cut_off:
            return SkippedRow(
                f"none of its first {limit} tokens (data.sequence_length) is supervised",
                "no supervised token within sequence_length",
            )
        return BadRow("expected a supervised token, got none", "no supervised token")


def encode_source(source: DataSource, encoder: Encoder) -> EncodedSource:
    """Encode all rows of a source on all cores, and count them.

    The result is cached on disk by rows, tokenizer, template and settings, so one rank should call
    this first. Takes a few hundred megabytes of memory per process.

    Raises:
        DataError: a row ends the run (the error gives its position), or all documents are empty.
    """
    uses_template = _may_use_template(source, encoder.tokenizer, encoder.cfg)
    rendered_by = (transformers.__version__, TODAY, _MASK_VERSION) if uses_template else ""
    # The cached counts name the places of rows, so the key includes the paths of the files.
    settings = compute_encoding_digest(source, encoder)
    columns = stored_columns(encoder.row_format.columns)
    counted_by = [] if source.layout.whole else [_COUNTS_VERSION]
    parts = (source.rows._fingerprint, source.files, settings, rendered_by, *counted_by)
    key = tables.compute_digest(*parts, *([sorted(columns.items())] if columns else []))
    name = f"encoded-{key}"
    counts_file = tables.cache_folder() / f"{name}.json"
    # The counts are written before the tokens get their name.
    if not counts_file.is_file():
        counts_file.with_suffix(".arrow").unlink(missing_ok=True)
    schema = _build_schema(source, encoder.row_format, columns)
    encoded = _encode_tables(source, encoder, schema, columns, counts_file)
    tokens = tables.load_or_build(
        name, encoded, schema, f"Encoding {source.name}", len(source.rows)
    )
    counts = Counts(**json.loads(counts_file.read_text("utf-8")))
    if source.layout.whole:
        check_documents(source, counts)
    return EncodedSource(
        source.name, tokens, counts, source.weight, source.max_repeats, str(source.layout)
    )


def _build_schema(
    source: DataSource, row_format: RowFormat, columns: dict[str, Column]
) -> pa.Schema:
    """Return the Arrow schema of a source's encoded rows; see `EncodedSource`."""
    stored = [("input_ids", pa.list_(pa.int32()))]
    if not source.layout.whole:
        stored += [("spans", pa.list_(pa.int32())), ("row", pa.int64())]
    if row_format.sequences_per_row == 2:
        stored.append(("second", pa.int32()))
    return pa.schema(stored + [(name, column.arrow_type) for name, column in columns.items()])


def _encode_tables(
    source: DataSource,
    encoder: Encoder,
    schema: pa.Schema,
    columns: dict[str, Column],
    counts_file: Path,
) -> Iterator[pa.Table]:
    """Yield the encoded rows of a source as tables, then write their `Counts` to `counts_file`."""
    counts = Counts()
    total = len(source.rows)
    rows_at_once, processes = _TEXT_ROWS, 1
    if source.layout.format in ("conversation", "preferences"):
        processes = min(len(ranks.available_cores()), 1 + total // _ROWS_PER_PROCESS, total)
        rows_at_once = min(_CHAT_ROWS, -(-total // processes))
    rows_of_bytes = BATCH_BYTES * total // max(1, source.rows.data.nbytes)
    starts = range(0, total, max(1, min(rows_at_once, rows_of_bytes)))
    partners = choose_partners(source) if encoder.row_format.compares_rows else None
    encode_from = partial(_encode_rows_from, source, encoder, partners, starts.step)
    batches = _encode_in_processes(encode_from, starts, processes, source.where)
    for first, encoded in zip(starts, batches, strict=True):
        for row in encoded:
            counts.add(row)
        if source.layout.whole:
            # A document that is skipped stays as an empty one, so that row numbers match.
            empty = EncodedExample(_NO_TOKENS, [])
            encoded = [empty if isinstance(row, BadRow) else row for row in encoded]
        yield _build_table(list(enumerate(encoded, first)), schema, columns)
    with replace_on_exit(counts_file) as scratch:
        scratch.write_text(json.dumps(asdict(counts)), "utf-8")


def _build_table(
    encoded: list[tuple[int, EncodedRow]], schema: pa.Schema, columns: dict[str, Column]
) -> pa.Table:
    """Build a table of encoded rows, given as (number, row), without those that are a BadRow."""
    examples = [(number, row) for number, row in encoded if isinstance(row, EncodedExample)]
    arrays = dict[str, pa.Array]()
    arrays["input_ids"] = _build_list_array([row.input_ids for _, row in examples])
    if "spans" in schema.names:
        arrays["spans"] = _build_list_array(
            [np.array(r.spans, np.int32).ravel() for _, r in examples]
        )
        arrays["row"] = pa.array([number for number, _ in examples], pa.int64())
    if "second" in schema.names:
        arrays["second"] = pa.array([row.second for _, row in examples], pa.int32())
    for name, column in columns.items():
        values = [row.columns.get(name) for _, row in examples]
        if column.per == "token":
            # A row must have as many values as tokens, since all rows are read as one sequence.
            values = [
                column.blank(len(row.input_ids)) if value is None else value
                for value, (_, row) in zip(values, examples, strict=True)
            ]
        arrays[name] = column.to_arrow(values)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def _encode_in_processes(
    encode_from: Callable[[int], list[EncodedRow]], starts: range, processes: int, where: str
) -> Iterator[list[EncodedRow]]:
    """Yield `encode_from(start)`, a block of encoded rows, for each of `starts`, in order.

    One process means this process. Workers get all blocks at once, however slowly the results are
    read. Raises DataError if a worker is killed.
    """
    if processes == 1:
        yield from map(encode_from, starts)
        return
    try:
        with ProcessPoolExecutor(processes, None, _set_up_worker, (encode_from,)) as pool:
            yield from pool.map(_encode_in_worker, starts)
    except BrokenProcessPool as error:
        raise DataError(
            f"{where}: one of {processes} processes that encode it was killed, perhaps for its "
            "memory; give it fewer cores (taskset)"
        ) from error


def _encode_rows_from(
    source: DataSource, encoder: Encoder, partners: np.ndarray | None, count: int, first: int
) -> list[EncodedRow]:
    """Encode up to `count` rows from row `first` on; fewer at the end of the source."""
    numbers = range(first, min(first + count, len(source.rows)))
    stored = read_stored_rows(source, numbers)
    if partners is None:
        return encoder.encode_rows(source, stored, first)
    chosen = partners[numbers.start : numbers.stop].tolist()
    needed = iter(read_stored_rows(source, [number for number in chosen if number != NO_PARTNER]))
    partner_rows = [None if number == NO_PARTNER else next(needed) for number in chosen]
    return encoder.encode_rows(source, stored, first, partner_rows)


def _set_up_worker(encode_from: Callable[[int], list[EncodedRow]]) -> None:
    """Store the function that this worker process runs, and turn off tokenizer threads."""
    global _encode_from
    _encode_from = encode_from
    # The processes share the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode_in_worker(first: int) -> list[EncodedRow]:
    """Encode the block of rows that begins at `first`, in a worker process."""
    return _encode_from(first)


def check_documents(source: DataSource, counts: Counts) -> None:
    """Raise DataError if all documents are empty; log a warning that counts skipped rows."""
    if not counts.tokens:
        raise DataError(f"{source.where}: expected text, but all {counts.rows} rows are empty")
    if counts.dropped and ranks.rank() == 0:
        log.warning(
            "%s: %d of %d rows skipped (data.on_bad_row: skip), the first: %s",
            source.where,
            sum(counts.dropped.values()),
            counts.rows,
            "; ".join(place for places in counts.places.values() for place in places[:1]),
        )


def _build_list_array(values: list[np.ndarray]) -> pa.ListArray:
    """Build an array of lists of int32."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    # Seven times as fast as `pa.array(values)`.
    flat = np.concatenate([_NO_TOKENS, *values])
    return pa.ListArray.from_arrays(offsets, pa.array(flat, pa.int32()))


def _may_use_template(source: DataSource, tokenizer: Tokenizer | None, cfg: DataConfig) -> bool:
    """Return True if a chat template may render rows of `source`."""
    if tokenizer is None or source.layout.format not in ("conversation", "preferences"):
        return False
    is_set = isinstance(cfg, FinetuneDataConfig) and cfg.chat_template is not None
    return source.layout.format == "conversation" or is_set or bool(tokenizer.chat_template)


def _stable_text(value: Any, title: str, names: Sequence[str]) -> bytes:
    """Format a dataclass for a digest, with `names` in place of the names of its fields.

    Renaming a field then keeps the digest, without which a stream cannot resume. Fields with
    `compare=False` are omitted.
    """
    values = [getattr(value, entry.name) for entry in fields(value) if entry.compare]
    text = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
    return f"{title}({text})".encode()


def compute_encoding_digest(source: DataSource, encoder: Encoder) -> str:
    """Compute a digest of all settings that determine the tokens of a row of `source`."""
    tokenizer = encoder.tokenizer
    cfg = encoder.cfg
    templates: dict[str, str] = {}
    names = ["on_bad_row", "append_eos"]
    if isinstance(cfg, FinetuneDataConfig):
        names += ["supervise", "too_long", "sequence_length", "packing"]
        if tokenizer is not None and _may_use_template(source, tokenizer, cfg):
            templates = load_chat_templates(tokenizer, cfg.chat_template)
            names += ["chat_template_kwargs"]
    return tables.compute_digest(
        _VERSION,
        _stable_text(source.layout, "Layout", _LAYOUT_FIELDS),
        _stable_text(source.names, "Names", _NAMES_FIELDS),
        b"" if tokenizer is None else tokenizer_content(tokenizer),
        {} if tokenizer is None else tokenizer.special_tokens_map,
        sorted(templates.items()),
        {name: getattr(cfg, name) for name in names},
        encoder.vocab_size if source.layout.format == "tokenised" else "",
    )
