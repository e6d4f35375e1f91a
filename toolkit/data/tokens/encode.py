"""Rows to token ids and what is learned of them, counted, and cached on disk.

Conversations are encoded in a process for each core; other rows in this one, where the Rust
tokenizer runs on threads (see [Note: threads, not processes] in `text_ids.py`).
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit import ranks
from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.data.chat import TODAY, Chat, Rendered, chat_templates
from toolkit.data.examples.pairs import Pair
from toolkit.data.examples.recognise import Conversation, Example, PromptCompletion, Text, Tokens
from toolkit.data.samples.sequences import IGNORED
from toolkit.data.sources import tables
from toolkit.data.sources.row_values import BadRow, LeftOut, Row, or_bad
from toolkit.data.sources.rows import DataSource
from toolkit.data.tokens.notes import LABELS, LATE_COLUMN, OTHER_PROMPT, SAME_PROMPT, WITH_MARGIN
from toolkit.data.tokens.partners import (
    NO_PARTNER,
    choose_partners,
    join_partner,
    partners_among,
    stored_rows,
)
from toolkit.data.tokens.text_ids import BATCH_BYTES, Span, TextTokenizer, content_of
from toolkit.data.tokens.tokenizer import check_vocabulary
from toolkit.errors import DataError
from toolkit.formats.synced_files import replacing

_CHAT_ROWS, _TEXT_ROWS = 512, 20_000  # that are encoded at a time, at most
_PLACES = 3
_ROWS_OF_A_PROCESS = 200  # conversations for which a further process is worth its start
_VERSION = 8  # part of the cache key: raise it when the same row gives other tokens or counts
_MASKS = 4  # so of conversations: raise it when one gives another mask

_WHOLE = pa.schema({"input_ids": pa.list_(pa.int32())})
_IN_PART = pa.schema([*_WHOLE, ("spans", pa.list_(pa.int32())), ("row", pa.int64())])
_OF_PAIRS = (("second", pa.int32()), ("desirable", pa.bool_()), ("margin", pa.float32()))
_PAIRS = pa.schema([*_IN_PART, *_OF_PAIRS])

_NOTHING = np.zeros(0, np.int32)
_work: Any = None  # of a worker process

log = logging.getLogger(__name__)


class EndsRun(BadRow):
    """A row that ends the run, whatever `on_bad_row` says."""


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example, and which of them are learned."""

    input_ids: np.ndarray  # int32 [n]; n up to `sequence_length`, of plain text any number
    spans: list[Span]  # (begin, end) of token positions that are learned, in order, disjoint
    cut_off: int = 0  # tokens cut off at its end, which are not among `input_ids`
    notes: dict[str, int] = field(default_factory=dict)  # to be counted, by kind
    piece: int | None = None  # tokens of the pieces that packing cuts it into; None: stays whole
    second: int | None = None  # of a pair: where the rejected answer's tokens begin
    desirable: bool | None = None  # label of a single answer, whose second is another row's
    margin: float | None = None  # of a pair, for a reward model

    @property
    def supervised(self) -> int:
        """Tokens that the loss covers: nothing predicts the first of all, or of each piece."""
        if self.second is not None:  # nothing predicts the first token of either
            labelled = self.desirable is not None  # its second answer has no gradient
            spans = [s for s in self.spans if not labelled or s[0] < self.second]
            return sum(end - begin for begin, end in spans)
        piece = self.piece or max(1, len(self.input_ids))
        firsts = [-(-end // piece) - -(-begin // piece) for begin, end in self.spans]
        return sum(end - begin for begin, end in self.spans) - sum(firsts)


EncodedRow = EncodedExample | BadRow


class Encoder:
    """Rows of sources, and examples, to token ids and spans; each depends on nothing but itself.

    Conversations are tokenised as the chat template renders them. Texts, and pairs of prompt and
    completion as one text, get the special tokens that the tokenizer puts around a text and, with
    `append_eos`, the end-of-sequence token, which is learned. Token ids are taken with the labels
    that came with them. Documents to pretrain on are learned whole, also those without a token.

    The tokenizer is None only where all examples are tokenised already; one that gives ids of
    `vocab_size` (rows of the model's embedding) or more is a DataError.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, cfg: DataConfig, vocab_size: int, *, pairs: bool = False
    ) -> None:
        self.tokenizer, self.cfg, self.vocab_size, self.pairs = tokenizer, cfg, vocab_size, pairs
        self.finetune = cfg if isinstance(cfg, FinetuneDataConfig) else None
        self.supervise = "all" if self.finetune is None else self.finetune.supervise
        # Sides of pairs are fitted together.
        bounded = self.finetune is not None and cfg.packing != "wrapped" and not pairs
        self.limit = cfg.sequence_length if bounded else None
        if tokenizer is None:
            return
        check_vocabulary(tokenizer, vocab_size)
        self._texts = TextTokenizer(tokenizer)
        self._before, self._after = self._texts.around()
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
        """Whether the tokenizer or data.chat_template has a template for conversations."""
        template = self.finetune and self.finetune.chat_template
        return bool(template or getattr(self.tokenizer, "chat_template", None))

    def row(self, source: DataSource, stored: Row, number: int) -> EncodedRow:
        """Return the example of the `number`-th row of a source; see `rows`."""
        return self.rows(source, [stored], number)[0]

    def rows(
        self,
        source: DataSource,
        stored: Sequence[Row],
        first: int,
        partners: Sequence[Row | None] | None = None,
    ) -> list[EncodedRow]:
        """Return the example of each stored row, or where it stands and why it is left out; with
        `on_bad_row` `error` a bad row is a DataError.

        `partners` are the stored rows whose answers KTO compares with; None: they are chosen among
        `stored`. See [Note: KL partners] in `partners.py`.
        """
        read = [or_bad(source.read, row) for row in stored]
        examples: list[Any] = [
            row if isinstance(row, BadRow) else or_bad(source.example_of, row) for row in read
        ]
        if source.layout.shape == "answers":
            others: Sequence[Any] = (
                partners_among(examples)
                if partners is None
                else [row and or_bad(source.example, row) for row in partners]
            )
            examples = [*map(join_partner, examples, others)]
        results = self.batch(examples)
        for at, (row, values, result) in enumerate(zip(stored, read, results, strict=True)):
            if isinstance(values, dict) and not isinstance(result, BadRow):
                for name in values.keys() - source.seen if source.seen else ():
                    result.notes[LATE_COLUMN.format(name)] = 1
            if not isinstance(result, BadRow):
                continue
            said = f"{source.place(row, first + at)}: {result}"
            if isinstance(result, EndsRun):
                raise DataError(said)
            if not isinstance(result, LeftOut) and self.cfg.on_bad_row == "error":
                raise source.refusal(row, first + at, result)
            results[at] = BadRow(said, result.reason)
        return results

    def batch(self, examples: Sequence[Example | Pair | BadRow]) -> list[EncodedRow]:
        """Return each example as token ids, or what is wrong with it, in order.

        A DataError where there is no tokenizer or chat template, or `supervise` does not go with
        the examples.
        """
        sides = [
            side
            for example in examples
            for side in (
                (example.chosen, example.rejected) if isinstance(example, Pair) else [example]
            )
        ]
        found = iter(self._batch(sides))
        return [
            self._pair(example, next(found), next(found))
            if isinstance(example, Pair)
            else next(found)
            for example in examples
        ]

    def _batch(self, examples: Sequence[Example | BadRow]) -> list[EncodedRow]:
        out = [self._rendered(example) for example in examples]
        texts = [(at, text) for at, text in enumerate(out) if isinstance(text, Rendered)]
        if texts:
            found = self._texts.encode([t.text for _, t in texts], [t.spans for _, t in texts])
            for (at, text), tokens in zip(texts, found, strict=True):
                if isinstance(tokens, BadRow):
                    out[at] = tokens
                    continue
                bare = isinstance(examples[at], Conversation)
                ids, spans = tokens if bare else self._framed(examples[at], *tokens)
                out[at] = self._fitted(examples[at], ids, spans, text.notes)
        return out  # type: ignore[return-value]

    def _rendered(self, example: Example | BadRow) -> Rendered | EncodedExample | BadRow:
        if isinstance(example, BadRow):
            return example
        if isinstance(example, Tokens):
            return self._of_ids(example)
        if self.tokenizer is None:
            raise DataError(
                "expected a tokenizer, since the data is text; set model.tokenizer_name_or_path, "
                "or give data with a column input_ids"
            )
        if isinstance(example, Text):
            self._check_mode("texts", "auto", "all")
            return Rendered(example.text, [(0, len(example.text))])
        if isinstance(example, PromptCompletion):
            self._check_mode("prompts and completions", "auto", "completion", "all")
            text = example.prompt + example.completion
            begin = 0 if self.supervise == "all" else len(example.prompt)
            return Rendered(text, [(begin, len(text))])
        return self._chat.render(example)

    @cached_property
    def _chat(self) -> Chat:
        assert self.tokenizer is not None
        template = self.finetune.chat_template if self.finetune else None
        kwargs = self.finetune.chat_template_kwargs if self.finetune else None
        return Chat(
            self.tokenizer,
            supervise=self.supervise,
            chat_template=template,
            template_kwargs=kwargs,
        )

    def _check_mode(self, what: str, *modes: str) -> None:
        if self.supervise not in modes:
            raise DataError(
                f"data.supervise {self.supervise} does not go with {what}; expected one of "
                f"{', '.join(modes)}"
            )

    def _of_ids(self, example: Tokens) -> EncodedRow:
        given = example.input_ids  # of any size, while they are Python's
        if given and not 0 <= min(given) <= max(given) < self.vocab_size:
            odd = next(i for i in given if not 0 <= i < self.vocab_size)
            said = (
                f"expected token ids from 0 to {self.vocab_size - 1} (the model's embedding has "
                f"{self.vocab_size} rows), got {odd}"
            )
            if self.finetune:
                return BadRow(said, "token id out of the vocabulary")
            # No row's fault: the data is of another tokenizer.
            cure = "the tokenizer of this model, or the model a larger embedding"
            return EndsRun(f"{said}; the data needs {cure} (model.resize_embeddings)")
        ids = np.asarray(given, np.int64)
        if example.labels is None:
            self._check_mode("token ids without labels", "auto", "all")
            return self._fitted(example, ids, [(0, len(ids))] if len(ids) else [])
        learned = np.concatenate([[0], np.asarray(example.labels) != IGNORED, [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(learned)).tolist()
        return self._fitted(example, ids, list(zip(edges[::2], edges[1::2], strict=True)))

    def _pair(self, pair: Pair, chosen: EncodedRow, rejected: EncodedRow) -> EncodedRow:
        """Return both sides of a pair as one row, their answers cut to the same length where they
        are too long together; see [Note: pairs].
        """
        for side in (chosen, rejected):
            if isinstance(side, BadRow):
                return side
        assert isinstance(chosen, EncodedExample)
        assert isinstance(rejected, EncodedExample)
        begins = [side.spans[0][0] for side in (chosen, rejected)]
        notes = chosen.notes | rejected.notes
        if not np.array_equal(chosen.input_ids[: begins[0]], rejected.input_ids[: begins[1]]):
            notes = notes | {OTHER_PROMPT: 1}
        notes = notes | _notes_on(pair)
        limit, sides = self.cfg.sequence_length, (chosen, rejected)
        answers = [len(side.input_ids) - at for side, at in zip(sides, begins, strict=True)]
        kept, cut = _most(limit - sum(begins), answers), 0
        if kept < max(answers):
            said = (
                f"expected at most {limit} tokens of both sides (data.sequence_length), got "
                f"{sum(len(side.input_ids) for side in sides)}"
            )
            too_long = self.finetune and self.finetune.too_long
            if too_long == "error":
                return EndsRun(f"{said}; set data.too_long to truncate or drop", "too long")
            if too_long == "drop":
                return LeftOut(said, "too long")
            if kept < 1:
                return LeftOut(f"{said}: the prompt leaves no room for answers", "prompt too long")
            cut = sum(max(0, answer - kept) for answer in answers)
        ids, spans = list[np.ndarray](), list[Span]()
        for side, at in zip(sides, begins, strict=True):
            end, before = at + kept, sum(len(own) for own in ids)
            ids.append(side.input_ids[:end])
            whole = [(b, min(e, end)) for b, e in side.spans if b < end]
            spans += [(max(b, 1) + before, e + before) for b, e in whole if e > max(b, 1)]
        if pair.desirable is None and np.array_equal(ids[0], ids[1]):
            if cut:
                return LeftOut(
                    f"{said}: cut to {kept} tokens the answers are equal", "equal once cut"
                )
            return LeftOut("both answers give the same tokens", "equal sides")
        second = len(ids[0])
        if not (spans and spans[0][0] < second and spans[-1][0] >= second):
            return LeftOut("an answer has no token to learn", "empty answer")
        told: dict[str, Any] = {"desirable": pair.desirable, "margin": pair.margin}
        return EncodedExample(np.concatenate(ids), spans, cut, notes, second=second, **told)

    def _framed(
        self, example: object, ids: np.ndarray, spans: list[Span]
    ) -> tuple[np.ndarray, list[Span]]:
        """Put the tokenizer's special tokens around a text."""
        start, end = (example.start, example.end) if isinstance(example, Text) else (True, True)
        if not len(ids) and start and end:
            return ids, []
        before, after = self._before if start else [], self._after if end else []
        if before and ids[: len(before)].tolist() == before:  # the text begins with them
            before = []
        if end and self._eos and [*ids[-1:], *after][-1:] != self._eos:
            after = after + self._eos
        framed = np.concatenate([before, ids, after]).astype(np.int32)
        if isinstance(example, Text) or self.supervise == "all":
            return framed, [(0, len(framed))] if len(framed) else []
        spans = [(first + len(before), last + len(before)) for first, last in spans]
        if after:  # the end of a completion is learned with it
            inner = len(before) + len(ids)
            joined = spans and spans[-1][1] == inner
            spans = [*spans[:-1], (spans[-1][0] if joined else inner, len(framed))]
        return framed, spans

    def _fitted(
        self, of: object, ids: np.ndarray, spans: list[Span], notes: dict[str, int] | None = None
    ) -> EncodedRow:
        """Return an example that is short enough and of which something is learned."""
        limit, piece, part = self.limit, None, False
        if isinstance(of, Text):  # packing cuts it; a part of it may be one token
            limit, piece, part = None, self.limit, len(ids) > 0 and not (of.start and of.end)
        if not len(ids) and self.finetune:
            return LeftOut("the tokenizer gives no token for it", "no token")
        cut = 0 if limit is None else max(0, len(ids) - limit)
        if limit is not None and cut:
            said = f"expected at most {limit} tokens (data.sequence_length), got {len(ids)}"
            too_long = self.finetune and self.finetune.too_long
            if too_long == "error":
                return EndsRun(f"{said}; set data.too_long to truncate or drop", "too long")
            if too_long == "drop":
                return LeftOut(said, "too long")
            ids = ids[:limit]
            spans = [(begin, min(end, limit)) for begin, end in spans if begin < limit]
        example = EncodedExample(ids.astype(np.int32, copy=False), spans, cut, notes or {}, piece)
        if self.finetune is None or part or example.supervised:
            return example
        if cut:
            return LeftOut(
                f"none of its first {limit} tokens (data.sequence_length) is learned",
                "no supervised token within sequence_length",
            )
        return BadRow("expected a token to learn, got none", "no supervised token")


def _notes_on(pair: Pair) -> dict[str, int]:
    """Return what is counted of a pair, by kind."""
    kinds = [WITH_MARGIN] if pair.margin is not None else []
    kinds += [] if pair.desirable is None else [LABELS[pair.desirable]]
    kinds += [SAME_PROMPT] if pair.same_prompt else []
    return dict.fromkeys(kinds, 1)


def _most(room: int, answers: Sequence[int]) -> int:
    """Return the most tokens of each of two answers that fit into `room` together."""
    shorter, longer = sorted(answers)
    if shorter + longer <= room:
        return longer
    return max(room // 2, room - shorter) if room > 0 else 0


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
    one rank first. Memory: a few hundred megabytes for each process. A row that the settings do not
    leave out is a DataError that names it; so are documents without any text.
    """
    templates = _may_use_template(source, encoder.tokenizer, encoder.cfg)
    by = (transformers.__version__, TODAY, _MASKS) if templates else ""
    # The cached counts name the places of rows, so the key holds the paths of the files, too.
    settings = encoding_digest(source, encoder)
    key = tables.digest_of(source.rows._fingerprint, source.files, settings, by)
    name = f"encoded-{key}"
    counted = tables.cache_folder() / f"{name}.json"
    if not counted.is_file():  # it is written before the tokens get their name
        counted.with_suffix(".arrow").unlink(missing_ok=True)
    schema = _WHOLE if source.layout.whole else _PAIRS if encoder.pairs else _IN_PART
    parts, title = _encoded(source, encoder, counted), f"Encoding {source.name}"
    tokens = tables.cached(name, parts, schema, title, len(source.rows))
    counts = Counts(**json.loads(counted.read_text("utf-8")))
    if source.layout.whole:
        check_documents(source, counts)
    weight, limit, layout = source.weight, source.max_repeats, str(source.layout)
    return EncodedSource(source.name, tokens, counts, weight, limit, layout)


def _encoded(source: DataSource, encoder: Encoder, counted: Path) -> Iterator[pa.Table]:
    """Yield the tokens of rows that follow each other; at the end write their `Counts`."""
    counts = Counts()
    total, whole = len(source.rows), source.layout.whole
    most, processes = _TEXT_ROWS, 1
    if source.layout.format in ("conversation", "preferences"):
        processes = min(len(ranks.available_cores()), 1 + total // _ROWS_OF_A_PROCESS, total)
        most = min(_CHAT_ROWS, -(-total // processes))
    step = max(1, min(most, BATCH_BYTES * total // max(1, source.rows.data.nbytes)))
    starts = range(0, total, step)
    partners = choose_partners(source) if source.layout.shape == "answers" else None
    encoded_from = partial(_encoded_from, source, encoder, partners, step)
    batches = _each(encoded_from, starts, processes, source.where)
    for first, results in zip(starts, batches, strict=True):
        for result in results:
            counts.add(result)
        if whole:  # a row that is left out is an empty document
            ids = [_NOTHING if isinstance(r, BadRow) else r.input_ids for r in results]
            yield pa.table([_lists(ids)], schema=_WHOLE)
            continue
        kept = [(at, r) for at, r in enumerate(results, first) if isinstance(r, EncodedExample)]
        ids = _lists([r.input_ids for _, r in kept])
        spans = _lists([np.array(r.spans, np.int32).ravel() for _, r in kept])
        columns = [ids, spans, pa.array([at for at, _ in kept], pa.int64())]
        if encoder.pairs:
            columns.append(pa.array([r.second for _, r in kept], pa.int32()))
            columns.append(pa.array([r.desirable for _, r in kept], pa.bool_()))
            columns.append(pa.array([r.margin for _, r in kept], pa.float32()))
        yield pa.table(columns, schema=_PAIRS if encoder.pairs else _IN_PART)
    with replacing(counted) as scratch:
        scratch.write_text(json.dumps(asdict(counts)), "utf-8")


def _each(
    encoded_from: Callable[[int], list[EncodedRow]], starts: range, processes: int, where: str
) -> Iterator[list[EncodedRow]]:
    """Yield the encoded rows from each start to the next, in order."""
    if processes == 1:
        yield from map(encoded_from, starts)
        return
    try:
        with ProcessPoolExecutor(processes, None, _set_work, (encoded_from,)) as pool:
            yield from pool.map(_work_here, starts)
    except BrokenProcessPool as error:
        raise DataError(
            f"{where}: one of {processes} processes that encode it was killed, perhaps for its "
            "memory; give it fewer cores (taskset)"
        ) from error


def _encoded_from(
    source: DataSource, encoder: Encoder, partners: np.ndarray | None, count: int, first: int
) -> list[EncodedRow]:
    """Return `count` encoded rows from the row `first` on."""
    numbers = range(first, min(first + count, len(source.rows)))
    stored = stored_rows(source, numbers)
    if partners is None:
        return encoder.rows(source, stored, first)
    chosen = partners[numbers.start : numbers.stop].tolist()
    needed = iter(stored_rows(source, [number for number in chosen if number != NO_PARTNER]))
    others = [None if number == NO_PARTNER else next(needed) for number in chosen]
    return encoder.rows(source, stored, first, others)


def _set_work(encoded_from: Callable[[int], list[EncodedRow]]) -> None:
    global _work
    _work = encoded_from
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores


def _work_here(first: int) -> list[EncodedRow]:
    return _work(first)


def check_documents(source: DataSource, counts: Counts) -> None:
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


def _may_use_template(source: DataSource, tokenizer: Tokenizer | None, cfg: DataConfig) -> bool:
    """Return whether rows of `source` may be rendered by a chat template that there is."""
    if tokenizer is None or source.layout.format not in ("conversation", "preferences"):
        return False
    given = isinstance(cfg, FinetuneDataConfig) and cfg.chat_template is not None
    return source.layout.format == "conversation" or given or bool(tokenizer.chat_template)


def encoding_digest(source: DataSource, encoder: Encoder) -> str:
    """Return a digest of the settings that decide what a row of `source` becomes."""
    tokenizer, cfg = encoder.tokenizer, encoder.cfg
    templates: dict[str, str] = {}
    names = ["on_bad_row", "append_eos"]
    if isinstance(cfg, FinetuneDataConfig):
        names += ["supervise", "too_long", "sequence_length", "packing"]
        if tokenizer is not None and _may_use_template(source, tokenizer, cfg):
            templates = chat_templates(tokenizer, cfg.chat_template)
            names += ["chat_template_kwargs"]
    return tables.digest_of(
        _VERSION,
        source.layout,
        source.names,
        b"" if tokenizer is None else content_of(tokenizer),
        {} if tokenizer is None else tokenizer.special_tokens_map,
        sorted(templates.items()),
        {name: getattr(cfg, name) for name in names},
        encoder.vocab_size if source.layout.format == "tokenised" else "",
    )
