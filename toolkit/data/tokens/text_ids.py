"""Texts to token ids: with the special tokens around them, and positions of marked characters.

[Note: threads, not processes]
The Rust tokenizer has threads of its own, one per core (`RAYON_NUM_THREADS`), which share the text
and the vocabulary; worker processes would fork and pickle to come no further. So a few megabytes of
text go to it at a time, and where all of a text is learned through `encode_batch_fast`, which skips
the character offsets that nobody reads; `benchmarks/tokenise.py` compares.

[Note: tokens across an edge]
A token is learned when all its characters are. One that holds the end of a prompt and the beginning
of the answer is not: at inference the prompt ends in a token of its own, so that the model never
sees that one. They are counted. Many tokenizers leave the white space before a word out of the
offsets of its token, which is looked for in the token itself.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.text_files import parts_of
from toolkit.errors import DataError

Span = tuple[int, int]

BATCH_BYTES = 8 << 20
"""Text that is tokenised at a time; its encodings take about 50 times as much memory. A longer text
is cut as text files are."""

_SPACES = frozenset("Ġ▁Ċĉč")
"""White space within a token, as byte-level and SentencePiece vocabularies write it."""


@dataclass(frozen=True)
class TokenSpans:
    """Token ids of a text.

    Attributes:
        ids: int32 [n].
        spans: positions (begin, end) of the marked tokens, in order, disjoint.
        across: tokens across an edge, which are not marked.
    """

    ids: np.ndarray
    spans: list[Span]
    across: int = 0


class TextTokenizer:
    """Texts to ids without special tokens around them, spans of characters to spans of tokens.

    Args:
        tokenizer: with the Rust backend, which knows the characters of each token; of others only
            what can be checked is taken, see `encode`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[TokenSpans | BadRow]:
        """Return the ids of each text, and which of them lie within its spans, on all cores.

        A tokenizer without the Rust backend gives no offsets: a text is then cut at the edges of
        its spans, and refused where the pieces give other ids than the whole.
        """
        out: list[TokenSpans | BadRow | None] = [None] * len(texts)
        whole = [at for at, text in enumerate(texts) if list(spans[at]) == [(0, len(text))]]
        for at, ids in zip(whole, self.ids([texts[at] for at in whole]), strict=True):
            out[at] = TokenSpans(ids, [(0, len(ids))] if len(ids) else [])
        rest = [at for at, found in enumerate(out) if found is None]
        for at in [at for at in rest if len(texts[at]) > BATCH_BYTES]:
            out[at] = BadRow(
                f"expected a text of at most {BATCH_BYTES:,} characters, got {len(texts[at]):,}",
                "too long",
            )
            rest.remove(at)
        if not self.tokenizer.is_fast:
            for at in rest:
                out[at] = self._in_pieces(texts[at], spans[at])
        elif rest:
            with _whole_texts(self.tokenizer) as backend:
                batch = backend.encode_batch([texts[at] for at in rest], add_special_tokens=False)
            for at, encoded in zip(rest, batch, strict=True):
                out[at] = _marked(texts[at], encoded, spans[at], backend.id_to_token)
        return out  # type: ignore[return-value]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; int32."""
        parts, owner = [], []
        for at, text in enumerate(texts):
            cut = [text] if len(text) <= BATCH_BYTES else list(parts_of(text))
            parts += cut
            owner += [at] * len(cut)
        found: list[list[np.ndarray]] = [[] for _ in texts]
        first = 0
        while first < len(parts):
            last, size = first + 1, len(parts[first])
            while last < len(parts) and (size := size + len(parts[last])) <= BATCH_BYTES:
                last += 1
            batch = self.lists(parts[first:last])
            for at, ids in zip(owner[first:last], batch, strict=True):
                found[at].append(np.array(ids, np.int32))
            first = last
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in found]

    def lists(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Return the ids of texts, with the special tokens around each where `special`; truncation
        and padding are off.
        """
        if not self.tokenizer.is_fast:
            options = {"truncation": False, "padding": False, "verbose": False}
            return self.tokenizer(texts, add_special_tokens=special, **options)["input_ids"]
        with _whole_texts(self.tokenizer) as backend:
            batch = backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoded.ids for encoded in batch]

    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text.

        Raises:
            DataError: it does something else to a text when it adds them.
        """
        (bare,), (full,) = self.lists(["a"]), self.lists(["a"], True)
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at], full[at + len(bare) :]
        raise DataError(
            f"the tokenizer gives {full} for 'a' with special tokens and {bare} without: expected "
            "the latter within the former; use a tokenizer that only puts tokens around a text"
        )

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> TokenSpans | BadRow:
        (whole,) = self.lists([text])
        joined: list[int] = []
        out: list[Span] = []
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        for number, (begin, end) in enumerate(pairwise(edges)):
            first = len(joined)
            joined += self.lists([text[begin:end]])[0] if end > begin else []
            if number % 2 and len(joined) > first:
                out.append((first, len(joined)))
        if joined != whole:
            return BadRow(
                f"the tokenizer ({type(self.tokenizer).__name__}) does not tell the characters of "
                "its tokens, and cut where learning begins it gives other tokens; use a tokenizer "
                "with a tokenizer.json",
                "tokenizer without offsets",
            )
        return TokenSpans(np.asarray(whole, np.int32), out)


def content_of(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return everything that decides which ids the tokenizer gives."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str().encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return b"".join(p.name.encode() + p.read_bytes() for p in files)


def quiet_forks() -> None:
    """Make processes forked from here (DataLoader workers) use tokenizers in one thread.

    Threads do not survive a fork, so tokenizers before 0.23 warns on each one that follows a
    parallel run and asks for `TOKENIZERS_PARALLELISM`. Set in the parent it would end the parallel
    run, so it is set for the moment of the fork only.
    """
    global _forks_are_quiet
    if _forks_are_quiet:
        return
    _forks_are_quiet = True
    name, unset = "TOKENIZERS_PARALLELISM", []

    def before() -> None:
        if name not in os.environ:
            os.environ[name] = "false"
            unset.append(name)

    def after_in_parent() -> None:
        while unset:
            os.environ.pop(unset.pop(), None)

    os.register_at_fork(before=before, after_in_parent=after_in_parent)


_forks_are_quiet = False


@contextmanager
def _whole_texts(tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenizer]:
    """Give the Rust tokenizer with truncation and padding off."""
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def _marked(
    text: str, encoded: Encoding, spans: Sequence[Span], named: Callable[[int], str | None]
) -> TokenSpans:
    ids = np.array(encoded.ids, np.int32)
    if not len(ids) or not spans:
        return TokenSpans(ids, [])
    found = _Edges(text, encoded, ids, named)
    out: list[Span] = []
    across: set[int] = set()
    for begin, end in spans:
        first, last = found.after(begin), found.before(end)
        across.update(found.over(begin, first), found.over(end, last))
        if last > first:
            out.append((first, last))
    return TokenSpans(ids, out, len(across))


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
