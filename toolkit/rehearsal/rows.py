"""The first rows of a run's data: checked by the run's own settings, and kept for the rehearsal.

Files and streams may have any size: a limited number of rows is read from their beginning, and
nothing is cached.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from toolkit.config.settings import RunConfig
from toolkit.data.report import check_supervised
from toolkit.data.row_formats import find_row_format
from toolkit.data.sources.files import Purpose
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import Encoder, check_documents
from toolkit.data.tokens.encoded import Counts, EncodedExample, EncodedRow, EncodedSource
from toolkit.errors import DataError

LOOK_ROWS = 1000
"""Rows of each source that are checked, at most."""
LOOK_BYTES = 4 << 20
"""Bytes of each source that are checked, about."""
_KEEP_ROWS = 256  # of the checked rows, those that the rehearsal trains on
_KEEP_BYTES = 512 << 10
_BATCH_ROWS = 50
_MIN_FITTING_ROWS = 8  # rows of each source that must fit into the rehearsal's samples
_LENGTH_REASONS = ("too long", "no supervised token within sequence_length")


@dataclass
class SourceHead:
    """The first rows of one data source, and counts of their tokens."""

    source: DataSource
    counts: Counts = field(default_factory=Counts)
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(tokens, columns) of each row that can be trained on."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row before truncation."""
    is_complete: bool = True
    """True if the source has no other rows."""

    @property
    def has_whole_examples(self) -> bool:
        """True if a row is one example; False if rows are a stream that is cut into samples."""
        return self.source.layout.format not in ("text", "tokenised")

    @property
    def too_long(self) -> float:
        """Share (0 to 1) of the rows that are truncated or dropped because they are too long."""
        dropped = sum(self.counts.dropped.get(reason, 0) for reason in _LENGTH_REASONS)
        return (self.counts.truncated + dropped) / max(1, self.counts.rows)

    def write(self, folder: Path, max_tokens: int) -> Path:
        """Write the rows to a JSON Lines file in `folder`, at most 256 rows or about 512 kB.

        Rows that are examples of more than `max_tokens` tokens are skipped. The folder must not
        exist.

        Returns:
            The file.
        """
        file = folder / f"{self.source.name}.jsonl"
        folder.mkdir(parents=True)
        has_text_only = self.source.layout.shape == "pieces"
        fitting = (
            row for tokens, row in self.rows if not self.has_whole_examples or tokens <= max_tokens
        )
        bytes_left = _KEEP_BYTES
        with open(file, "w", encoding="utf-8") as out:
            for row in islice(fitting, _KEEP_ROWS):
                columns = {"text": row["text"]} if has_text_only else row
                line = json.dumps(columns, ensure_ascii=False, default=str) + "\n"
                out.write(line)
                bytes_left -= len(line)
                if bytes_left <= 0:
                    break
        return file


def read_heads(
    cfg: RunConfig, encoder: Encoder | None, purpose: Purpose = "train"
) -> list[SourceHead]:
    """Read the first rows of each data source, and check and encode them as the run will.

    Args:
        cfg: the settings of the run.
        encoder: encodes the rows. None if the tokenizer will be trained on them; then nothing is
            encoded.
        purpose: read the sources for training or for evaluation.

    Raises:
        DataError: the run would refuse a row or a source.
    """
    data = replace(cfg.data, streaming=True)
    heads = []
    has_template = encoder is None or encoder.has_chat_template
    row_format = find_row_format(cfg.rows)
    for source in load_sources(
        data, purpose=purpose, row_format=row_format, has_template=has_template
    ):
        rows = source.rows
        if isinstance(rows, datasets.Dataset):
            source = replace(source, rows=rows.select(range(min(len(rows), LOOK_ROWS + 1))))
        head = SourceHead(source)
        for first, stored_rows in _read_batches(head):
            encoded_rows: Sequence[EncodedRow | None] = [None] * len(stored_rows)
            if encoder is not None:
                encoded_rows = encoder.encode_rows(source, stored_rows, first)
            _add_rows(head, stored_rows, encoded_rows)
        if encoder is not None and not row_format.is_documents:
            encoded = EncodedSource(source.name, datasets.Dataset.from_dict({}), head.counts)
            check_supervised(encoded, cfg.data.sequence_length)
        elif encoder is not None:
            check_documents(source, head.counts)
        heads.append(head)
    return heads


def _read_batches(head: SourceHead) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield batches of at most 50 rows as (number of the first row, rows).

    Stops after 1000 rows or about 4 MB, and then sets `head.is_complete` to True if the source has
    no further rows, otherwise to False.
    """
    rows = iter(head.source.rows)
    first = 0
    bytes_left = LOOK_BYTES
    while batch := list(islice(rows, min(_BATCH_ROWS, LOOK_ROWS - first))):
        yield first, batch
        first += len(batch)
        bytes_left -= sum(len(str(row)) for row in batch)
        if bytes_left <= 0 or first >= LOOK_ROWS:
            head.is_complete = next(rows, None) is None
            return


def _add_rows(
    head: SourceHead, stored_rows: list[dict[str, Any]], encoded_rows: Sequence[EncodedRow | None]
) -> None:
    """Add rows to `head`: their counts, their lengths, and the columns that the run uses.

    `head.rows` gets (tokens, stored columns) for each good row. Lengths count the tokens before
    truncation. Without an encoder, tokens are 0, and no counts or lengths are added.

    Args:
        head: changed in place.
        stored_rows: the rows as stored.
        encoded_rows: result of the encoder for each row; None if there is no encoder. Bad rows are
            counted, but not kept.
    """
    layout = head.source.layout
    has_text_only = layout.shape == "pieces"
    names = ("text",) if has_text_only else (*layout.columns, *layout.optional)
    for stored, encoded in zip(stored_rows, encoded_rows, strict=True):
        columns = catch_bad_row(head.source.row, stored)
        if encoded is not None:
            head.counts.add(encoded)
        if isinstance(columns, BadRow) or isinstance(encoded, BadRow):
            continue
        tokens = 0
        if isinstance(encoded, EncodedExample):
            tokens = len(encoded.input_ids) + encoded.cut_off
            head.lengths.append(tokens)
        used = {name: v for name, v in columns.items() if name in names and v is not None}
        head.rows.append((tokens, used))


def refuse_long_rows(heads: list[SourceHead], sequence_length: int, max_share: float) -> None:
    """Raise a DataError if too many rows of a source are truncated or dropped for their length.

    Args:
        heads: the first rows of each source.
        sequence_length: the setting, for the error.
        max_share: the largest share (0 to 1) of a source's rows that is allowed.
    """
    for head in heads:
        if head.too_long <= max_share:
            continue
        rows = head.counts.rows
        affected = round(head.too_long * rows)
        advice = ""
        if head.lengths:
            tokens = sorted(head.lengths)[int(0.95 * (len(head.lengths) - 1))]
            advice = (
                f": raise it (95 % of them have at most {tokens:,} tokens), or shorten the rows"
            )
        raise DataError(
            f"{affected:,} of the first {rows:,} rows of {head.source.where} are longer than "
            f"data.sequence_length {sequence_length} and are truncated or dropped{advice}; if that "
            "is intended, rehearse with --most_too_long 1"
        )


def choose_length(heads: list[SourceHead], affordable: int, sequence_length: int) -> int:
    """Choose the sequence length of the rehearsal, in tokens.

    It is `affordable`, or more if fewer than eight examples of a source fit, but at most
    `sequence_length`.

    Args:
        heads: the first rows of each source.
        affordable: the result of `affordable_length`.
        sequence_length: sequence length of the real run.
    """
    length = min(affordable, sequence_length)
    for head in heads:
        lengths = sorted(tokens for tokens, _ in head.rows)
        if head.has_whole_examples and lengths:
            length = max(length, lengths[min(_MIN_FITTING_ROWS, len(lengths)) - 1])
    return min(length, sequence_length)
