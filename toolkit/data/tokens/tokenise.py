"""Documents to token ids, once, on all cores, cached.

Owns tokenising and the check that every id has an embedding. Refuses to know how the tokens are cut
into samples.

[Note: threads, not processes]
The Rust tokenizer has threads of its own, one per core (`RAYON_NUM_THREADS`), which share the text
and the vocabulary; worker processes (`datasets.map(num_proc=...)`) would fork and pickle to come no
further. So a batch of a few megabytes goes to `encode_batch_fast`, which skips the character
offsets that nobody reads, and comes back as one Arrow array; `benchmarks/tokenise.py` compares.
Tokenizers without the Rust backend go through `tokenizer(...)` in one thread.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.config.settings import DataConfig
from toolkit.data.tokens.tokenizer import largest_id
from toolkit.errors import DataError

BATCH_BYTES = 8 << 20
"""Text that is tokenised at a time; its encodings take about 50 times as much memory."""

_VERSION = 1
"""Part of the cache key: raise it when the same text gives other ids."""

_TOKENS = datasets.Features(input_ids=datasets.List(datasets.Value("int32")))

log = logging.getLogger(__name__)


def tokenise(
    documents: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase | None,
    cfg: DataConfig,
    vocab_size: int,
) -> datasets.Dataset:
    """Return `documents` as token ids: one column `input_ids`, int32, a row per row of `documents`.

    The ids are those of `tokenizer(text)` without truncation and padding: the special tokens that
    it puts around a text stand around each document. With `cfg.append_eos` a document ends in the
    end-of-sequence token, once. Empty documents give no token. Data that has `input_ids` already is
    taken as it is.

    Runs on all cores (see [Note: threads, not processes]) and is cached on disk under a name made
    of the documents, the tokenizer's content and the settings: a second start, in any process,
    reads the file. Memory: a few hundred megabytes, whatever the size of the data.

    Args:
        documents: what `load_documents` returned; see [Note: documents] there.
        tokenizer: None only where the documents are tokenised already.
        cfg: `append_eos` is read.
        vocab_size: rows of the model's embedding (after resizing it, where that is asked for).

    Raises:
        DataError: an id is negative or `vocab_size` and more, with its row; or there is text and no
            tokenizer.
    """
    if "input_ids" in documents.column_names:
        return _already_tokenised(documents, vocab_size)
    if tokenizer is None:
        raise DataError(
            "expected a tokenizer, since the documents are text; set model.tokenizer_name_or_path, "
            "or give data with a column input_ids"
        )
    frame = document_frame(tokenizer, cfg)
    quiet_forks()
    with _encoder(tokenizer) as encode:
        # Ids that the tokenizer cannot give need no check, so they are no reason to start anew.
        bound = vocab_size if largest_id(tokenizer) >= vocab_size else None
        key = key_of(documents, content_of(tokenizer), frame, bound)
        return _mapped(documents, _Tokenise(encode, frame, vocab_size), key, "Tokenising")


@dataclass(frozen=True)
class Frame:
    """The ids before and after the text of a document."""

    before: list[int]
    after: list[int]
    eos: int | None

    def around(self, ids: list[int], start: bool = True, end: bool = True) -> list[int]:
        """Return the ids of a text, or of a part of one, with those that its start and end have.

        A whole text without a token gets none.
        """
        if not ids and start and end:
            return ids
        if start and self.before:
            ids = self.before + ids
        if end:
            ids = ids + self.after
            if self.eos is not None and ids[-1:] != [self.eos]:
                ids.append(self.eos)
        return ids


def document_frame(tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> Frame:
    """Return what stands around a document; says where `append_eos` has nothing to append.

    Raises:
        DataError: see `frame_of`.
    """
    eos = tokenizer.eos_token_id if cfg.append_eos else None
    if cfg.append_eos and eos is None and ranks.rank() == 0:
        log.warning(
            "data.append_eos: the tokenizer %s has no end-of-sequence token, so nothing marks "
            "where a document ends",
            tokenizer.name_or_path,
        )
    return replace(frame_of(tokenizer), eos=eos)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of one text without any special token around it, as `tokenise` finds them."""
    with _encoder(tokenizer) as encode:
        (ids,) = encode([text], False)
    return ids


@dataclass(frozen=True)
class _Tokenise:
    """One batch of rows to ids; Arrow in, Arrow out."""

    encode: Callable[[list[str], bool], list[list[int]]]
    frame: Frame
    vocab_size: int

    def __call__(self, table: pa.Table, rows: list[int]) -> pa.Table:
        texts = table.column("text")
        marks = [_marks(table, name) for name in ("start", "end")]
        ids: list[np.ndarray] = []
        lengths: list[int] = []
        for first, last in _parts(texts):
            encoded = self.encode(texts.slice(first, last - first).to_pylist(), False)
            framed = [
                self.frame.around(tokens, bool(marks[0][row]), bool(marks[1][row]))
                for row, tokens in enumerate(encoded, start=first)
            ]
            sizes = [len(tokens) for tokens in framed]
            flat = np.fromiter(chain.from_iterable(framed), np.int32, sum(sizes))
            _check_ids(flat, sizes, rows[first], self.vocab_size)
            ids.append(flat)
            lengths += sizes
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        flat = np.concatenate(ids) if ids else np.zeros(0, np.int32)
        return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, pa.array(flat))})


def _marks(table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        return np.ones(table.num_rows, bool)
    return table.column(name).to_numpy()


def _parts(texts: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """Cut rows into runs of about `BATCH_BYTES`, so that a batch of long rows fits into memory."""
    ends = np.cumsum(pc.binary_length(texts).to_numpy())
    first = 0
    while first < len(texts):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
        yield first, last
        first = last


def _check_ids(flat: np.ndarray, sizes: list[int], first_row: int, vocab_size: int) -> None:
    if not len(flat) or (flat.min() >= 0 and flat.max() < vocab_size):
        return
    at = int(np.argmax((flat < 0) | (flat >= vocab_size)))
    row = first_row + int(np.searchsorted(np.cumsum(sizes), at, side="right"))
    raise DataError(
        f"expected token ids from 0 to {vocab_size - 1} (the model's vocabulary size is "
        f"{vocab_size}), row {row} (counted from 0) holds {int(flat[at])}; the data needs the "
        "tokenizer of this model, or the model a larger embedding (model.resize_embeddings)"
    )


# --------------------------------------------------------------------------------------------------
# The tokenizer
# --------------------------------------------------------------------------------------------------


@contextmanager
def _encoder(
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Callable[[list[str], bool], list[list[int]]]]:
    """Give a function (texts, with special tokens) -> ids; truncation and padding are off in it."""
    if not tokenizer.is_fast:

        def slow(texts: list[str], special: bool) -> list[list[int]]:
            options = {"truncation": False, "padding": False, "verbose": False}
            return tokenizer(texts, add_special_tokens=special, **options)["input_ids"]

        yield slow
        return
    with whole_texts(tokenizer) as backend:
        yield lambda texts, special: [
            e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=special)
        ]


@contextmanager
def whole_texts(tokenizer: PreTrainedTokenizerBase) -> Iterator[Tokenizer]:
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


def frame_of(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """Return the special tokens that the tokenizer puts around a text.

    Raises:
        DataError: it does something else to a text when it adds them.
    """
    with _encoder(tokenizer) as encode:
        return _frame(encode, tokenizer.eos_token_id)


def _frame(encode: Callable[[list[str], bool], list[list[int]]], eos: int | None) -> Frame:
    """Find what the tokenizer puts around a text, by comparing one with and without it."""
    (bare,), (full,) = encode(["a"], False), encode(["a"], True)
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return Frame(full[:at], full[at + len(bare) :], eos)
    raise DataError(
        f"the tokenizer gives {full} for 'a' with special tokens and {bare} without: expected the "
        "latter within the former; use a tokenizer that only puts tokens around a text"
    )


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


# --------------------------------------------------------------------------------------------------
# Data that comes tokenised
# --------------------------------------------------------------------------------------------------


def _already_tokenised(documents: datasets.Dataset, vocab_size: int) -> datasets.Dataset:
    key = key_of(documents, b"", vocab_size)
    if documents.features == _TOKENS:
        # Already as it should be: read once to check it, and remember that.
        seen = cache_folder() / f"checked-{key}"
        if not (datasets.is_caching_enabled() and seen.is_file()):
            row = 0
            for chunk in documents.data.column("input_ids").chunks:
                _cast(chunk, row, vocab_size)
                row += len(chunk)
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
        return documents

    def cast(table: pa.Table, rows: list[int]) -> pa.Table:
        chunks = [_cast(c, rows[0], vocab_size) for c in table.combine_chunks()["input_ids"].chunks]
        return pa.table({"input_ids": pa.chunked_array(chunks, type=pa.list_(pa.int32()))})

    return _mapped(documents, cast, key, "Checking token ids")


def _cast(chunk: pa.ListArray | pa.LargeListArray, row: int, vocab_size: int) -> pa.ListArray:
    flat = chunk.flatten()
    lengths = pc.list_value_length(chunk).to_numpy()
    if flat.null_count:
        at = pc.index(pc.is_null(flat), True).as_py()
        row += int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise DataError(f"expected token ids, row {row} (counted from 0) holds null in input_ids")
    ids = flat.to_numpy()
    _check_ids(ids, lengths, row, vocab_size)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32, copy=False)))


# --------------------------------------------------------------------------------------------------
# The cache
# --------------------------------------------------------------------------------------------------


def _mapped(
    documents: datasets.Dataset, function: Callable, key: str, title: str
) -> datasets.Dataset:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # Rows that together hold a few batches: chunks of the result are of this size, too.
    mean = max(1, documents.data.nbytes // len(documents))
    rows = max(1, min(100_000, 2 * BATCH_BYTES // mean))
    mapped = documents.with_format("arrow").map(
        function,
        batched=True,
        batch_size=rows,
        writer_batch_size=rows,
        with_indices=True,
        remove_columns=documents.column_names,
        features=_TOKENS,
        cache_file_name=str(folder / f"tokens-{key}.arrow"),
        new_fingerprint=key,
        desc=title,
    )
    return mapped.with_format(None)


def cache_folder() -> Path:
    """Return the folder of what was tokenised, beneath the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "toolkit"


def key_of(documents: datasets.Dataset, *parts: object) -> str:
    """Return a name for the result; computed here, so that it is the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (_VERSION, documents._fingerprint, *parts):
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
