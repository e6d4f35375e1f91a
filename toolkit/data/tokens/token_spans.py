"""Text with marked characters to token ids with marked positions.

Owns the offsets of tokens, and those that lie across an edge. Refuses to know examples, templates
and settings.

[Note: tokens across an edge]
A token is learned when all its characters are. One that holds the end of a prompt and the beginning
of the answer is not: at inference the prompt ends in a token of its own, so that the model never
sees that one. They are counted. Many tokenizers leave the white space before a word out of the
offsets of its token, which is looked for in the token itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.tokenise import whole_texts

Span = tuple[int, int]

_SPACES = frozenset("Ġ▁Ċĉč")
"""White space within a token, as byte-level and SentencePiece vocabularies write it."""


@dataclass(frozen=True)
class Marked:
    """Token ids of a text.

    Attributes:
        ids: int32 [n].
        spans: positions (begin, end) of the marked tokens, in order, disjoint.
        across: tokens across an edge, which are not marked.
    """

    ids: np.ndarray
    spans: list[Span]
    across: int = 0


class SpanTokenizer:
    """Texts to ids, with spans of characters to spans of tokens.

    Args:
        tokenizer: with the Rust backend, which knows the characters of each token; of others only
            what can be checked is taken, see `encode`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list["Marked | BadRow"]:
        """Return ids without any added special token, and which of them lie within the spans.

        The Rust tokenizer runs on all cores. A tokenizer without it gives no offsets: a text is
        then cut at the edges of its spans, and refused where the pieces give other ids than the
        whole.
        """
        if not self.tokenizer.is_fast:
            return [self._in_pieces(t, s) for t, s in zip(texts, spans, strict=True)]
        with whole_texts(self.tokenizer) as backend:
            encoded = backend.encode_batch(list(texts), add_special_tokens=False)
            named = backend.id_to_token
            return [_marked(t, e, s, named) for t, e, s in zip(texts, encoded, spans, strict=True)]

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> "Marked | BadRow":
        options = {"truncation": False, "padding": False, "verbose": False}

        def ids_of(part: str) -> list[int]:
            return self.tokenizer(part, add_special_tokens=False, **options)["input_ids"]

        whole = ids_of(text)
        joined: list[int] = []
        out: list[Span] = []
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            first = len(joined)
            joined += ids_of(text[begin:end]) if end > begin else []
            if number % 2 and len(joined) > first:
                out.append((first, len(joined)))
        if joined != whole:
            return BadRow(
                f"the tokenizer ({type(self.tokenizer).__name__}) does not tell the characters of "
                "its tokens, and cut where learning begins it gives other tokens; use a tokenizer "
                "with a tokenizer.json",
                "tokenizer without offsets",
            )
        return Marked(np.asarray(whole, np.int32), out)


def _marked(
    text: str, encoded: Encoding, spans: Sequence[Span], named: Callable[[int], str | None]
) -> Marked:
    ids = np.array(encoded.ids, np.int32)
    if not len(ids) or not spans:
        return Marked(ids, [])
    if list(spans) == [(0, len(text))]:
        return Marked(ids, [(0, len(ids))])
    found = _Edges(text, encoded, ids, named)
    out: list[Span] = []
    across: set[int] = set()
    for begin, end in spans:
        first, last = found.after(begin), found.before(end)
        across.update(found.over(begin, first), found.over(end, last))
        if last > first:
            out.append((first, last))
    return Marked(ids, out, len(across))


@dataclass(frozen=True)
class _Edges:
    """Tokens around a character; only a few tokens are asked for theirs."""

    text: str
    encoded: Encoding
    ids: np.ndarray
    named: Callable[[int], str | None]

    @property
    def count(self) -> int:
        return len(self.ids)

    def after(self, edge: int) -> int:
        """Return the first token with no character before `edge`."""
        at = self._at(edge)
        while at and self._chars(at - 1)[0] >= edge:
            at -= 1
        while at < self.count and self._chars(at)[0] < edge:
            at += 1
        return at

    def before(self, edge: int) -> int:
        """Return the first token after those with no character from `edge` on."""
        at = self._at(edge)
        while at < self.count and self._chars(at)[1] <= edge:
            at += 1
        while at and self._chars(at - 1)[1] > edge:
            at -= 1
        return at

    def over(self, edge: int, near: int) -> list[int]:
        """Return the tokens around `near` with characters on both sides of `edge`."""
        low = high = near
        while low and self._chars(low - 1)[1] > edge:
            low -= 1
        while high < self.count and self._chars(high)[0] < edge:
            high += 1
        return [at for at in range(low, high) if self._chars(at)[0] < edge < self._chars(at)[1]]

    def _at(self, char: int) -> int:
        for place in range(char, len(self.text)):  # no token may hold white space
            if (token := self.encoded.char_to_token(place)) is not None:
                return token
        return self.count

    def _chars(self, at: int) -> Span:
        """Return the characters of a token, with the white space that its offsets leave out."""
        begin, end = self.encoded.token_to_chars(at) or (0, 0)
        token = self.named(int(self.ids[at])) or ""
        if begin == end or not self.text[begin].isspace():
            for sign in token:
                if sign not in _SPACES or not begin or not self.text[begin - 1].isspace():
                    break
                begin -= 1
        if begin < end and not self.text[end - 1].isspace():
            for sign in reversed(token):
                if sign not in _SPACES or not self.text[end : end + 1].isspace():
                    break
                end += 1
        return begin, end
