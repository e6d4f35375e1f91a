"""Texts to token ids: with the special tokens around them, and positions of marked characters.

[Note: threads, not processes]
The Rust tokenizer has threads of its own, one per core (`RAYON_NUM_THREADS`): worker processes are
no faster. Where all of a text is learned, `encode_batch_fast` skips the character offsets;
`benchmarks/tokenise.py` compares.

[Note: tokens across an edge]
A token is learned when all its characters are. One that holds the end of a prompt and the beginning
of the answer is not: at inference the model never sees it. They are counted. Many tokenizers leave
the white space before a word out of the offsets of its token; it is looked for in the token itself.
"""

import copy
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import compress, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.tables import groups
from toolkit.data.sources.text_files import parts_of
from toolkit.errors import DataError

Span = tuple[int, int]

# Text that is tokenised at a time; its encodings take about 50 times as much memory. A longer text
# is cut as text files are.
BATCH_BYTES = 8 << 20
_SPACES = frozenset("Ġ▁Ċĉč")  # white space, as byte-level and SentencePiece vocabularies write it


class TokenSpans(NamedTuple):
    """Token ids of a text, int32 [n], and which of them are marked."""

    ids: np.ndarray
    spans: list[Span]  # positions (begin, end) of the marked tokens, in order, disjoint
    across: int = 0  # tokens across an edge, which are not marked


class TextTokenizer:
    """Texts to ids without special tokens around them, spans of characters to spans of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.backend = tokenizer, None
        if tokenizer.is_fast:
            self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self.backend.no_truncation()
            self.backend.no_padding()
        self._with_special = self.lists(["a"], True)[0]
        if self.backend is not None:
            self.backend.post_processor = None  # some leave spaces out of the offsets of tokens

    def encode(self, texts: list[str], spans: list[list[Span]]) -> list[TokenSpans | BadRow]:
        """Return the ids of each text, and which of them lie within its spans, on all cores."""
        pairs = list(zip(texts, spans, strict=True))
        whole = [list(marked) == [(0, len(text))] for text, marked in pairs]
        ids = self.ids(list(compress(texts, whole)))
        all_of = (TokenSpans(found, [(0, len(found))] if len(found) else []) for found in ids)
        part_of = iter(self._in_part([p for p, o in zip(pairs, whole, strict=True) if not o]))
        return [next(all_of) if is_whole else next(part_of) for is_whole in whole]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        parts = (
            (at, part)
            for at, text in enumerate(texts)
            for part in ([text] if len(text) <= BATCH_BYTES else parts_of(text))
        )
        found: list[list[np.ndarray]] = [[] for _ in texts]
        for group in groups(parts, lambda part: len(part[1]), BATCH_BYTES):
            batch = self.lists([text for _, text in group])
            for (at, _), ids in zip(group, batch, strict=True):
                found[at].append(np.array(ids, np.int32))
        return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in found]

    def lists(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """Return the ids of texts, never cut, with the special tokens around each if `special`."""
        if self.backend is None:
            options = {"truncation": False, "padding": False, "verbose": False}
            return self.tokenizer(texts, add_special_tokens=special, **options)["input_ids"]
        batch = self.backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoded.ids for encoded in batch]

    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text."""
        bare, full = self.lists(["a"])[0], self._with_special
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at], full[at + len(bare) :]
        what = f"{full} for 'a' with special tokens and {bare} without"
        raise DataError(f"the tokenizer gives {what}; use one that only puts tokens around a text")

    def _in_part(self, pairs: list[tuple[str, Sequence[Span]]]) -> list[TokenSpans | BadRow]:
        """Return the ids of texts that are not learned whole."""
        short = [pair for pair in pairs if len(pair[0]) <= BATCH_BYTES]
        found = (self._in_pieces(*pair) for pair in short)
        if self.backend is not None:
            batch = self.backend.encode_batch([text for text, _ in short], add_special_tokens=False)
            named, of_pairs = self.backend.id_to_token, zip(short, batch, strict=True)
            found = (_marked(*pair, encoded, named) for pair, encoded in of_pairs)
        said = f"expected a text of at most {BATCH_BYTES:,} characters, got"
        return [
            next(found) if len(text) <= BATCH_BYTES else BadRow(f"{said} {len(text):,}", "too long")
            for text, _ in pairs
        ]

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> TokenSpans | BadRow:
        """Cut a text at the edges of its spans, for a tokenizer without the Rust backend, which
        gives no offsets; refuse it where the pieces give other ids than the whole.
        """
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
    """Return all that decides which ids the tokenizer gives."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str().encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return b"".join(p.name.encode() + p.read_bytes() for p in files)


def _marked(
    text: str, spans: Sequence[Span], encoded: Encoding, named: Callable[[int], str | None]
) -> TokenSpans:
    """Return the tokens that hold no character outside of `spans`."""
    ids = np.array(encoded.ids, np.int32)
    tokens = range(len(ids))

    def chars(at: int) -> Span:  # with the white space that its offsets leave out
        begin, end = encoded.token_to_chars(at) or (0, 0)
        token = named(int(ids[at])) or ""
        if begin == end or not text[begin].isspace():
            for sign in token:
                if sign not in _SPACES or not begin or not text[begin - 1].isspace():
                    break
                begin -= 1
        return begin, end

    def after(edge: int) -> int:  # the first token with no character before `edge`
        return bisect_left(tokens, edge, key=lambda at: chars(at)[0])

    def before(edge: int) -> int:  # the first token with a character from `edge` on
        return bisect_right(tokens, edge, key=lambda at: chars(at)[1])

    out: list[Span] = []
    across: set[int] = set()
    for span in spans:
        # Before an edge stand `inner` whole tokens; those up to `outer` lie across it.
        (first_inner, first), (last, last_outer) = ((before(edge), after(edge)) for edge in span)
        across.update(range(first_inner, first), range(last, last_outer))
        if last > first:
            out.append((first, last))
    return TokenSpans(ids, out, len(across))
