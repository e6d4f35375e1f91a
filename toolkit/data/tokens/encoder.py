"""Rows and examples to token ids, and the ranges of them that are learned."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import DataConfig, FinetuneDataConfig
from toolkit.data.chat import Chat, Rendered
from toolkit.data.examples.recognise import Conversation, Example, PromptCompletion, Text, Tokens
from toolkit.data.samples.sequences import IGNORED
from toolkit.data.sources.row_values import BadRow, or_bad
from toolkit.data.sources.rows import DataSource
from toolkit.data.tokens.text_ids import Span, TextTokenizer, TokenSpans
from toolkit.data.tokens.tokenizer import check_vocabulary
from toolkit.errors import DataError

ACROSS = "tokens across the edge of what is learned"

log = logging.getLogger(__name__)


class LeftOut(BadRow):
    """A row that the settings leave out, whatever `on_bad_row` says."""


class EndsRun(BadRow):
    """A row that ends the run, whatever `on_bad_row` says."""


@dataclass(frozen=True)
class EncodedExample:
    """Token ids of one example, and which of them are learned."""

    input_ids: np.ndarray  # int32 [n]; n up to `sequence_length`, of plain text any number
    spans: list[Span]  # (begin, end) of token positions that are learned, in order, disjoint
    cut_off: int = 0  # tokens cut off at its end, which are not among `input_ids`
    notes: dict[str, int] = field(default_factory=dict)  # to be counted, by kind (see `ACROSS`)
    piece: int | None = None  # tokens of the pieces that packing cuts it into; None: stays whole

    @property
    def supervised(self) -> int:
        """Tokens that the loss covers: nothing predicts the first of all, or of each piece."""
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
        self, tokenizer: PreTrainedTokenizerBase | None, cfg: DataConfig, vocab_size: int
    ) -> None:
        self.tokenizer, self.cfg, self.vocab_size = tokenizer, cfg, vocab_size
        self.finetune = cfg if isinstance(cfg, FinetuneDataConfig) else None
        self.supervise = "all" if self.finetune is None else self.finetune.supervise
        bounded = self.finetune is not None and cfg.packing != "wrapped"
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

    def row(self, source: DataSource, stored: dict[str, Any], number: int) -> EncodedRow:
        """Return the example of the `number`-th row of a source; see `rows`."""
        return self.rows(source, [stored], number)[0]

    def rows(
        self, source: DataSource, stored: Sequence[dict[str, Any]], first: int
    ) -> list[EncodedRow]:
        """Return the example of each stored row, or where it stands and why it is left out.

        Raises:
            DataError: a row cannot be used, and `on_bad_row` is `error`; or see `batch`.
        """
        results = self.batch([or_bad(source.example, row) for row in stored])
        for at, (row, result) in enumerate(zip(stored, results, strict=True)):
            if not isinstance(result, BadRow):
                continue
            said = f"{source.place(row, first + at)}: {result}"
            if isinstance(result, EndsRun):
                raise DataError(said)
            if not isinstance(result, LeftOut) and self.cfg.on_bad_row == "error":
                raise source.refusal(row, first + at, result)
            results[at] = BadRow(said, result.reason)
        return results

    def batch(self, examples: Sequence[Example | BadRow]) -> list[EncodedRow]:
        """Return each example as token ids, or what is wrong with it, in order.

        Raises:
            DataError: there is no tokenizer, no chat template, or `supervise` does not go with what
                the examples are.
        """
        out = [self._rendered(example) for example in examples]
        texts = [(at, text) for at, text in enumerate(out) if isinstance(text, Rendered)]
        if texts:
            found = self._texts.encode([t.text for _, t in texts], [t.spans for _, t in texts])
            for (at, text), tokens in zip(texts, found, strict=True):
                out[at] = self._of_text(examples[at], tokens, text.notes)
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
        return Chat(self.tokenizer, supervise=self.supervise, chat_template=template)

    def _check_mode(self, what: str, *modes: str) -> None:
        if self.supervise not in modes:
            raise DataError(
                f"data.supervise {self.supervise} does not go with {what}; expected one of "
                f"{', '.join(modes)}"
            )

    def _of_ids(self, example: Tokens) -> EncodedRow:
        ids = np.asarray(example.input_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            said = (
                f"expected token ids from 0 to {self.vocab_size - 1} (the model's embedding has "
                f"{self.vocab_size} rows), got {ids[(ids < 0) | (ids >= self.vocab_size)][0]}"
            )
            if self.finetune:
                return BadRow(said, "token id out of the vocabulary")
            # No row's fault: the data is of another tokenizer.
            cure = "the tokenizer of this model, or the model a larger embedding"
            return EndsRun(f"{said}; the data needs {cure} (model.resize_embeddings)")
        if example.labels is None:
            self._check_mode("token ids without labels", "auto", "all")
            return self._fitted(example, ids, [(0, len(ids))] if len(ids) else [])
        learned = np.concatenate([[0], np.asarray(example.labels) != IGNORED, [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(learned)).tolist()
        return self._fitted(example, ids, list(zip(edges[::2], edges[1::2], strict=True)))

    def _of_text(
        self, example: Example | BadRow, tokens: TokenSpans | BadRow, notes: dict[str, int]
    ) -> EncodedRow:
        if isinstance(tokens, BadRow):
            return tokens
        ids, spans, across = tokens
        if not isinstance(example, Conversation):
            ids, spans = self._framed(example, ids, spans)
        return self._fitted(example, ids, spans, notes | ({ACROSS: across} if across else {}))

    def _framed(
        self, example: object, ids: np.ndarray, spans: list[Span]
    ) -> tuple[np.ndarray, list[Span]]:
        """Put the tokenizer's special tokens around a text."""
        start, end = (example.start, example.end) if isinstance(example, Text) else (True, True)
        if not len(ids) and start and end:
            return ids, []
        before, after = self._before if start else [], self._after if end else []
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
