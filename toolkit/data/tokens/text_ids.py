"""Texts to token ids: with the special tokens around them, and positions of marked characters.

[Note: threads, not processes]
The Rust tokenizer has threads of its own, one per core (`RAYON_NUM_THREADS`): worker processes are
no faster. Where all of a text is learned, `encode_batch_fast` skips the character offsets;
`benchmarks/tokenise.py` compares.

[Note: tokens across an edge]
At inference a prompt ends in tokens of its own, since nothing follows it. Where the tokens of the
whole text are others (one holds the end of the prompt and the beginning of the answer, say), the
text is cut there, and what follows is tokenised as a text that goes on: without the space that many
tokenizers put before a text. So all characters of an answer are learned, after the tokens that
generation sees. Many tokenizers leave the white space before a word out of the offsets of its
token; it is looked for in the token itself.
"""

import copy
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from toolkit.data.sources.file_readers import split_text
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.tables import groups
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
            for part in ([text] if len(text) <= BATCH_BYTES else split_text(text))
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
        raise DataError(
            f"the tokenizer gives {full} for 'a' with special tokens and {bare} without; use one "
            "that only puts tokens around a text"
        )

    def _in_part(self, pairs: list[tuple[str, Sequence[Span]]]) -> list[TokenSpans | BadRow]:
        """Return the ids of texts that are not learned whole."""
        short = [pair for pair in pairs if len(pair[0]) <= BATCH_BYTES]
        if self.backend is None:
            found = iter([self._in_pieces(*pair) for pair in short])
        else:
            found = iter(self._by_offsets(self.backend, short))
        said = f"expected a text of at most {BATCH_BYTES:,} characters, got"
        return [
            next(found) if len(text) <= BATCH_BYTES else BadRow(f"{said} {len(text):,}", "too long")
            for text, _ in pairs
        ]

    def _by_offsets(
        self, backend: Tokenizer, pairs: list[tuple[str, Sequence[Span]]]
    ) -> list[TokenSpans | BadRow]:
        """Return the ids of each whole text, or of what stands between its edges where these are
        not edges of its tokens. See [Note: tokens across an edge].
        """
        batch = backend.encode_batch([text for text, _ in pairs], add_special_tokens=False)
        texts = [self._encoded(text, e) for (text, _), e in zip(pairs, batch, strict=True)]
        apart, heads = set[int](), []
        for at, (text, (_, spans)) in enumerate(zip(texts, pairs, strict=True)):
            if any(text.across(edge) for span in spans for edge in span):
                apart.add(at)
            else:
                heads += [(at, *head) for begin, _ in spans if (head := text.head(begin))]
        alone = self.lists([head for _, head, _ in heads])
        apart |= {at for (at, _, ids), own in zip(heads, alone, strict=True) if own != ids}
        return [
            self._apart(text, spans) if at in apart else text.marked(spans)
            for at, (text, (_, spans)) in enumerate(zip(texts, pairs, strict=True))
        ]

    def _apart(self, whole: "_Encoded", spans: Sequence[Span]) -> TokenSpans | BadRow:
        """Return the ids of a text that is cut at its edges, but where an added token ends, which
        no other reaches across.
        """
        backend, going_on, words = self._going_on
        text = whole.text
        edges = {edge for span in spans for edge in span} - {0, len(text)}
        cuts = sorted(edge for edge in edges if whole.across(edge) or whole.head(edge))
        parts: list[tuple[int, _Encoded]] = []  # with their first character
        for begin, end in pairwise([0, *cuts, len(text)]):
            if begin and words and whole.across(begin) and text[begin - 1 : begin + 1].isalnum():
                return BadRow(
                    f"expected a prompt that ends with a word, got {text[:begin][-20:]!r} before "
                    f"{text[begin:][:20]!r}, of which the tokenizer would make two words; end the "
                    "prompt with a word",
                    "edge within a word",
                )
            if begin:  # up to its first added token, whose section is as any other
                head = going_on.encode(text[begin:end], add_special_tokens=False)
                parts.append((begin, self._encoded(text[begin:end], head).up_to_added()))
                begin += len(parts[-1][1].text)
            if begin < end:
                rest = backend.encode(text[begin:end], add_special_tokens=False)
                parts.append((begin, self._encoded(text[begin:end], rest)))
        firsts = np.cumsum([0, *(len(part.ids) for _, part in parts)])

        def at(edge: int) -> int:
            number = bisect_right(parts, edge, key=lambda part: part[0]) - 1
            return int(firsts[number]) + parts[number][1].at(edge - parts[number][0])

        found = [(at(begin), at(end)) for begin, end in spans]
        ids = np.concatenate([part.ids for _, part in parts])
        return TokenSpans(ids, [(first, last) for first, last in found if first < last])

    def _encoded(self, text: str, encoded: Encoding) -> "_Encoded":
        assert self.backend is not None
        return _Encoded(text, encoded, self.backend.id_to_token, self._added, self._unknown)

    @cached_property
    def _added(self) -> np.ndarray:
        assert self.backend is not None
        return np.array([*self.backend.get_added_tokens_decoder()], np.int32)

    @cached_property
    def _unknown(self) -> int | None:
        """The token for what the vocabulary does not hold; None if there is none.

        It is often an added token, too, which splits a text only where the text spells it out.
        """
        assert self.backend is not None
        model = json.loads(self.backend.to_str())["model"]
        if isinstance(model.get("unk_id"), int):
            return int(model["unk_id"])
        name = model.get("unk_token") or self.tokenizer.unk_token
        return None if name is None else self.backend.token_to_id(name)

    @cached_property
    def _going_on(self) -> tuple[Tokenizer, Tokenizer, bool]:
        """The tokenizer, the same without the space that it puts before a text, and whether its
        tokens tell the beginning or the end of a word, so that words cannot be cut.
        """
        assert self.backend is not None
        content = json.loads(self.backend.to_str())
        words = any(
            content["model"].get(name)
            for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        for name in ("normalizer", "pre_tokenizer"):
            content[name] = _without_space(content[name])
        return self.backend, Tokenizer.from_str(json.dumps(content)), words

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


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Return all that decides which ids the tokenizer gives."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str().encode()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return b"".join(p.name.encode() + p.read_bytes() for p in files)


def _without_space(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer as JSON that puts nothing before a text."""
    if isinstance(part, list):
        return [_without_space(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {key: off.get(key, _without_space(value)) for key, value in part.items()}


class _Encoded:
    """A text, its tokens, and the characters of each."""

    def __init__(
        self,
        text: str,
        encoded: Encoding,
        named: Callable[[int], str | None],
        added: np.ndarray,
        unknown: int | None,
    ) -> None:
        self.text, self.ids = text, np.array(encoded.ids, np.int32)
        self._encoded, self._named, self._added, self._unknown = encoded, named, added, unknown

    def marked(self, spans: Sequence[Span]) -> TokenSpans:
        found = [(self.at(begin), self.at(end)) for begin, end in spans]
        return TokenSpans(self.ids, [(first, last) for first, last in found if first < last])

    def at(self, edge: int) -> int:
        """Return the first token without a character before `edge`."""
        return bisect_left(range(len(self.ids)), edge, key=lambda at: self._chars(at)[0])

    def across(self, edge: int) -> bool:
        """Whether a token has characters on both sides of `edge`."""
        whole = bisect_right(range(len(self.ids)), edge, key=lambda at: self._chars(at)[1])
        return whole < self.at(edge)

    def head(self, edge: int) -> tuple[str, list[int]] | None:
        """Return the text from the last added token to `edge`, and its tokens; None where none
        stands between: tokens do not depend on what is before an added one.
        """
        at = self.at(edge)
        first = max(self._of_added(at), default=None)
        if not edge or first == at - 1:
            return None
        begin = 0 if first is None else self._chars(first)[0]
        return self.text[begin:edge], self.ids[first or 0 : at].tolist()

    def _of_added(self, end: int) -> list[int]:
        """Return the positions of added tokens before the token `end`, without those that the model
        gives for unknown characters.
        """
        places = np.flatnonzero(np.isin(self.ids[:end], self._added)).tolist()
        return [at for at in places if self.ids[at] != self._unknown or self._is_spelled_out(at)]

    def _is_spelled_out(self, at: int) -> bool:
        begin, end = self._encoded.token_to_chars(at) or (0, 0)
        return self.text[begin:end].strip() == self._named(int(self.ids[at]))

    def up_to_added(self) -> "_Encoded":
        """Return what stands before the first added token."""
        at = min(self._of_added(len(self.ids)), default=len(self.ids))
        short = copy.copy(self)
        short.text = self.text[: self._chars(at)[0]] if at < len(self.ids) else self.text
        short.ids = self.ids[:at]
        return short

    def _chars(self, at: int) -> Span:  # with the white space that its offsets leave out
        begin, end = self._encoded.token_to_chars(at) or (0, 0)
        if begin == end or not self.text[begin].isspace():
            for sign in self._named(int(self.ids[at])) or "":
                if sign not in _SPACES or not begin or not self.text[begin - 1].isspace():
                    break
                begin -= 1
        return begin, end
