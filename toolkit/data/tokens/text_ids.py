"""Tokenise texts, and find the tokens of supervised characters.

[Note: threads, not processes]
The Rust tokenizer runs its own threads, one per core (`RAYON_NUM_THREADS`), so worker processes are
no faster. If a text is supervised entirely, `encode_batch_fast` skips the character offsets;
`benchmarks/tokenise.py` compares the variants.

[Note: tokens across an edge]
At inference, the tokens of a prompt do not depend on the answer, because nothing follows the prompt
yet. The tokens of the complete text may differ: one of them may hold the end of the prompt and the
beginning of the answer. Then the text is cut there, and what follows is tokenised as a continuation
of a text, without the space that many tokenizers put before a text. So all characters of an answer
are supervised, after exactly the tokens that generation sees. Many tokenizers exclude the white
space before a word from the offsets of its token; it is then found in the token itself.
"""

import copy
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from toolkit.data.sources.file_readers import split_text
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.tables import group_by_size
from toolkit.errors import DataError

Span = tuple[int, int]

BATCH_BYTES = 8 << 20
"""Amount of text that is tokenised at a time, whose encodings take about 50 times as much memory. A
longer text is cut like a text file."""
# White space, as byte-level and SentencePiece vocabularies write it.
_SPACES = frozenset("Ġ▁Ċĉč")


class TokenSpans(NamedTuple):
    """The token ids of a text, and which of them are supervised."""

    ids: np.ndarray
    """int32 [n]."""
    spans: list[Span]
    """Ranges (begin, end) of supervised tokens, in order and disjoint."""


class TextTokenizer:
    """Tokenises texts without special tokens, and converts character spans to token spans."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.backend = tokenizer, None
        if tokenizer.is_fast:
            self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self.backend.no_truncation()
            self.backend.no_padding()
        self._with_special = self.compute_id_lists(["a"], True)[0]
        if self.backend is not None:
            # Some post-processors exclude spaces from the offsets of tokens.
            self.backend.post_processor = None

    def encode(self, texts: list[str], spans: list[list[Span]]) -> list[TokenSpans | BadRow]:
        """Tokenise texts on all cores.

        Args:
            texts: the texts.
            spans: ranges [begin, end) of supervised characters of each text.

        Returns:
            For each text its ids and supervised tokens, or a BadRow, not raised, if it cannot be
            tokenised.
        """
        pairs = list(zip(texts, spans, strict=True))
        is_full = [list(of_text) == [(0, len(text))] for text, of_text in pairs]
        full_texts = [text for text, full in zip(texts, is_full, strict=True) if full]
        full = iter(
            TokenSpans(ids, [(0, len(ids))] if len(ids) else [])
            for ids in self.encode_ids(full_texts)
        )
        other_pairs: list[tuple[str, Sequence[Span]]] = [
            pair for pair, full in zip(pairs, is_full, strict=True) if not full
        ]
        partial = iter(self._encode_partial(other_pairs))
        return [next(full) if takes_all else next(partial) for takes_all in is_full]

    def encode_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Compute the token ids of each text, int32. Long texts are tokenised in parts."""
        parts = (
            (at, part)
            for at, text in enumerate(texts)
            for part in ([text] if len(text) <= BATCH_BYTES else split_text(text))
        )
        ids_of_texts: list[list[np.ndarray]] = [[] for _ in texts]
        for group in group_by_size(parts, lambda part: len(part[1]), BATCH_BYTES):
            batch = self.compute_id_lists([text for _, text in group])
            for (at, _), ids in zip(group, batch, strict=True):
                ids_of_texts[at].append(np.array(ids, np.int32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in ids_of_texts]

    def compute_id_lists(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Tokenise texts to lists of ids, without truncation.

        Args:
            texts: the texts.
            special: add special tokens before and after each text.
        """
        if self.backend is None:
            options = {"truncation": False, "padding": False, "verbose": False}
            return self.tokenizer(texts, add_special_tokens=special, **options)["input_ids"]
        batch = self.backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoded.ids for encoded in batch]

    def special_tokens(self) -> tuple[list[int], list[int]]:
        """Return (ids before, ids after): the special tokens that the tokenizer puts around a text.

        Raises:
            DataError: the tokenizer also changes the tokens of the text.
        """
        bare, full = self.compute_id_lists(["a"])[0], self._with_special
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at], full[at + len(bare) :]
        raise DataError(
            f"the tokenizer gives {full} for 'a' with special tokens and {bare} without; use one "
            "that only adds tokens before and after a text"
        )

    def _encode_partial(self, pairs: list[tuple[str, Sequence[Span]]]) -> list[TokenSpans | BadRow]:
        """Tokenise texts that are only partly supervised: pairs (text, spans of characters).

        A text of more than `BATCH_BYTES` characters gives a BadRow.
        """
        short = [pair for pair in pairs if len(pair[0]) <= BATCH_BYTES]
        if self.backend is None:
            encoded = iter([self._encode_pieces(*pair) for pair in short])
        else:
            encoded = iter(self._encode_by_offsets(self.backend, short))
        fault = f"expected a text of at most {BATCH_BYTES:,} characters, got"
        return [
            next(encoded)
            if len(text) <= BATCH_BYTES
            else BadRow(f"{fault} {len(text):,}", "too long")
            for text, _ in pairs
        ]

    def _encode_by_offsets(
        self, backend: Tokenizer, pairs: list[tuple[str, Sequence[Span]]]
    ) -> list[TokenSpans | BadRow]:
        """Tokenise pairs (text, spans of characters) with a tokenizer that reports offsets.

        A text is tokenised in parts if a token crosses the edge of a span, or if the prompt alone
        has other tokens. See [Note: tokens across an edge].
        """
        batch = backend.encode_batch([text for text, _ in pairs], add_special_tokens=False)
        texts = [self._wrap_encoding(text, e) for (text, _), e in zip(pairs, batch, strict=True)]
        cut, heads = set[int](), []
        for at, (text, (_, spans)) in enumerate(zip(texts, pairs, strict=True)):
            if any(text.has_token_across(edge) for span in spans for edge in span):
                cut.add(at)
            else:
                heads += [
                    (at, *head) for begin, _ in spans if (head := text.tokens_since_added(begin))
                ]
        # The prompt must have the same tokens if nothing follows it.
        alone = self.compute_id_lists([head for _, head, _ in heads])
        cut |= {at for (at, _, ids), expected in zip(heads, alone, strict=True) if expected != ids}
        return [
            self._encode_cut(text, spans) if at in cut else text.token_spans(spans)
            for at, (text, (_, spans)) in enumerate(zip(texts, pairs, strict=True))
        ]

    def _encode_cut(self, full: "_Encoded", spans: Sequence[Span]) -> TokenSpans | BadRow:
        """Cut a text at the edges of its spans, and tokenise the parts separately.

        It is not cut directly after an added token, because no token crosses that position. Returns
        a BadRow if the cut would divide a word of a tokenizer that marks words.
        """
        backend, continuing, marks_words = self._continuation_tokenizers
        text = full.text
        edges = {edge for span in spans for edge in span} - {0, len(text)}
        cuts = sorted(e for e in edges if full.has_token_across(e) or full.tokens_since_added(e))
        # The parts, each with the position of its first character.
        parts: list[tuple[int, _Encoded]] = []
        for begin, end in pairwise([0, *cuts, len(text)]):
            is_in_word = text[begin - 1 : begin + 1].isalnum()
            if begin and marks_words and full.has_token_across(begin) and is_in_word:
                return BadRow(
                    f"expected a prompt that ends with a word, got {text[:begin][-20:]!r} before "
                    f"{text[begin:][:20]!r}, of which the tokenizer would make two words; end the "
                    "prompt with a word",
                    "edge within a word",
                )
            if begin:
                # Only up to the first added token: what follows it is not affected by the cut.
                head = continuing.encode(text[begin:end], add_special_tokens=False)
                parts.append((begin, self._wrap_encoding(text[begin:end], head).cut_at_added()))
                begin += len(parts[-1][1].text)
            if begin < end:
                tail = backend.encode(text[begin:end], add_special_tokens=False)
                parts.append((begin, self._wrap_encoding(text[begin:end], tail)))
        firsts = np.cumsum([0, *(len(part.ids) for _, part in parts)])

        def token_at(edge: int) -> int:
            number = bisect_right(parts, edge, key=lambda part: part[0]) - 1
            return int(firsts[number]) + parts[number][1].find_token(edge - parts[number][0])

        token_spans = [(token_at(begin), token_at(end)) for begin, end in spans]
        ids = np.concatenate([part.ids for _, part in parts])
        return TokenSpans(ids, [(first, last) for first, last in token_spans if first < last])

    def _wrap_encoding(self, text: str, encoded: Encoding) -> "_Encoded":
        """Build an `_Encoded` from a text and its encoding."""
        assert self.backend is not None
        return _Encoded(text, encoded, self.backend.id_to_token, self._added, self._unknown)

    @cached_property
    def _added(self) -> np.ndarray:
        """Ids of the added tokens, such as special tokens; int32. No other token crosses one."""
        assert self.backend is not None
        return np.array([*self.backend.get_added_tokens_decoder()], np.int32)

    @cached_property
    def _unknown(self) -> int | None:
        """Id of the token for text that the vocabulary does not contain; None if there is none.

        It is often an added token, too. Then it splits a text only if the text has its name.
        """
        assert self.backend is not None
        model = json.loads(self.backend.to_str())["model"]
        if isinstance(model.get("unk_id"), int):
            return int(model["unk_id"])
        name = model.get("unk_token") or self.tokenizer.unk_token
        return None if name is None else self.backend.token_to_id(name)

    @cached_property
    def _continuation_tokenizers(self) -> tuple[Tokenizer, Tokenizer, bool]:
        """(tokenizer, copy of it that adds no space before a text, True if tokens mark word edges).

        If tokens mark the beginning or the end of a word, a text cannot be cut within a word.
        """
        assert self.backend is not None
        content = json.loads(self.backend.to_str())
        marks_words = any(
            content["model"].get(name)
            for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        for name in ("normalizer", "pre_tokenizer"):
            content[name] = _disable_prefix_space(content[name])
        return self.backend, Tokenizer.from_str(json.dumps(content)), marks_words

    def _encode_pieces(self, text: str, spans: Sequence[Span]) -> TokenSpans | BadRow:
        """Tokenise a text in pieces cut at its spans, for a tokenizer without offsets.

        Returns a BadRow if the pieces together have other ids than the complete text.
        """
        (expected,) = self.compute_id_lists([text])
        joined: list[int] = []
        token_spans: list[Span] = []
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            first = len(joined)
            joined += self.compute_id_lists([text[begin:end]])[0] if end > begin else []
            if number % 2 and len(joined) > first:
                token_spans.append((first, len(joined)))
        if joined != expected:
            return BadRow(
                f"the tokenizer ({type(self.tokenizer).__name__}) does not report the characters "
                "of its tokens, and the text has other tokens if it is cut at the supervised part; "
                "use a tokenizer with a tokenizer.json",
                "tokenizer without offsets",
            )
        return TokenSpans(np.asarray(expected, np.int32), token_spans)


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return bytes that determine the ids of a tokenizer, for cache keys: its serialised files."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str().encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return b"".join(p.name.encode() + p.read_bytes() for p in files)


def _disable_prefix_space(part: Any) -> Any:
    """Return the JSON of a normalizer or pre-tokenizer, changed to add nothing before a text.

    `part` may be nested. None is returned unchanged.
    """
    if isinstance(part, list):
        return [_disable_prefix_space(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {key: off.get(key, _disable_prefix_space(value)) for key, value in part.items()}


class _Encoded:
    """A text, its tokens, and the characters of each token."""

    def __init__(
        self,
        text: str,
        encoded: Encoding,
        id_to_token: Callable[[int], str | None],
        added: np.ndarray,
        unknown: int | None,
    ) -> None:
        self.text, self.ids = text, np.array(encoded.ids, np.int32)
        self._encoded = encoded
        self._id_to_token = id_to_token
        self._added = added
        self._unknown = unknown

    def token_spans(self, spans: Sequence[Span]) -> TokenSpans:
        """Return the token ids with the spans of characters converted to spans of tokens.

        Spans without a token are dropped.
        """
        token_spans = [(self.find_token(begin), self.find_token(end)) for begin, end in spans]
        return TokenSpans(self.ids, [(first, last) for first, last in token_spans if first < last])

    def find_token(self, edge: int) -> int:
        """Return the index of the first token that begins at or after character `edge`.

        If there is none, it is the number of tokens.
        """
        return bisect_left(range(len(self.ids)), edge, key=lambda at: self._token_chars(at)[0])

    def has_token_across(self, edge: int) -> bool:
        """Return True if a token has characters on both sides of `edge`."""
        complete = bisect_right(range(len(self.ids)), edge, key=lambda at: self._token_chars(at)[1])
        return complete < self.find_token(edge)

    def tokens_since_added(self, edge: int) -> tuple[str, list[int]] | None:
        """Return (text, token ids) from the last added token before `edge` up to `edge`.

        They begin with that added token, or with the text if there is none. Tokens do not depend on
        what precedes an added token. Returns None if no token lies between the added token and
        `edge`.
        """
        at = self.find_token(edge)
        first = max(self._find_added_tokens(at), default=None)
        if not edge or first == at - 1:
            return None
        begin = 0 if first is None else self._token_chars(first)[0]
        return self.text[begin:edge], self.ids[first or 0 : at].tolist()

    def _find_added_tokens(self, end: int) -> list[int]:
        """Return the indices of the added tokens before token `end`.

        An unknown token counts only if the text has its name.
        """
        places = np.flatnonzero(np.isin(self.ids[:end], self._added)).tolist()
        return [at for at in places if self.ids[at] != self._unknown or self._is_spelled_out(at)]

    def _is_spelled_out(self, at: int) -> bool:
        """Return True if the text of token `at` is its name, such as "<unk>"."""
        begin, end = self._encoded.token_to_chars(at) or (0, 0)
        return self.text[begin:end].strip() == self._id_to_token(int(self.ids[at]))

    def cut_at_added(self) -> "_Encoded":
        """Return a copy that ends before the first added token; complete if there is none."""
        at = min(self._find_added_tokens(len(self.ids)), default=len(self.ids))
        short = copy.copy(self)
        short.text = self.text[: self._token_chars(at)[0]] if at < len(self.ids) else self.text
        short.ids = self.ids[:at]
        return short

    def _token_chars(self, at: int) -> Span:
        """Return the characters [begin, end) of a token in the text.

        They include leading white space that the token contains but its offsets do not cover.
        """
        begin, end = self._encoded.token_to_chars(at) or (0, 0)
        if begin == end or not self.text[begin].isspace():
            for sign in self._id_to_token(int(self.ids[at])) or "":
                if sign not in _SPACES or not begin or not self.text[begin - 1].isspace():
                    break
                begin -= 1
        return begin, end
