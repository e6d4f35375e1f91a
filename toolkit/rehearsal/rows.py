"""The first rows of a run's data: judged by the run's own settings, and kept for the rehearsal.

Files of any size, and streams: so many rows are read, from the front, and nothing is cached.
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
from toolkit.data.sources.files import What
from toolkit.data.sources.row_values import BadRow, or_bad
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import (
    Counts,
    EncodedExample,
    EncodedRow,
    EncodedSource,
    Encoder,
    check_documents,
)
from toolkit.errors import DataError

LOOK_ROWS, LOOK_BYTES = 1000, 4 << 20  # of each source, that are judged
_KEEP_ROWS, _KEEP_BYTES = 256, 512 << 10  # of those, that are trained on
_BATCH = 50
_FEW = 8  # rows that must fit into the rehearsal's samples
_OF_LENGTH = ("too long", "no supervised token within sequence_length")


@dataclass
class Head:
    """The first rows of one source."""

    source: DataSource
    counts: Counts = field(default_factory=Counts)
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(tokens, columns) of each that can be trained on."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row before it is cut."""
    whole: bool = True
    """Whether the source has no other rows."""

    @property
    def bounded(self) -> bool:
        """Whether a row is an example that is cut off, and not text that is cut into samples."""
        return self.source.layout.format not in ("text", "tokenised")

    @property
    def too_long(self) -> float:
        """Share of the rows that lose something to `sequence_length`."""
        lost = self.counts.truncated + sum(self.counts.dropped.get(why, 0) for why in _OF_LENGTH)
        return lost / max(1, self.counts.rows)

    def write(self, folder: Path, longest: int) -> Path:
        """Write the rows as JSON lines, of examples those of `longest` tokens at most; return the
        file.
        """
        file, left = folder / f"{self.source.name}.jsonl", _KEEP_BYTES
        folder.mkdir(parents=True)
        pieces = self.source.layout.shape == "pieces"
        with open(file, "w", encoding="utf-8") as out:
            fitting = (row for n, row in self.rows if not self.bounded or n <= longest)
            for row in islice(fitting, _KEEP_ROWS):
                named = {"text": row["text"]} if pieces else row
                line = json.dumps(named, ensure_ascii=False, default=str) + "\n"
                out.write(line)
                left -= len(line)
                if left <= 0:
                    break
        return file


def read_heads(cfg: RunConfig, encoder: Encoder | None, what: What = "train") -> list[Head]:
    """Return the first rows of each source that `cfg` names, judged as the run will judge them; of
    an `encoder` of None, as the tokenizer would be trained on them. Raises what the run would.
    """
    data, heads = replace(cfg.data, streaming=True), []
    has_template = encoder is None or encoder.has_chat_template
    for source in load_sources(data, what=what, learned=cfg.learned, has_template=has_template):
        rows = source.rows
        if isinstance(rows, datasets.Dataset):
            source = replace(source, rows=rows.select(range(min(len(rows), LOOK_ROWS + 1))))
        head = Head(source)
        for first, stored in _batches(head):
            results: Sequence[EncodedRow | None] = [None] * len(stored)
            if encoder is not None:
                results = encoder.rows(source, stored, first)
            _add(head, stored, results)
        if encoder is not None and cfg.learned != "documents":
            encoded = EncodedSource(source.name, datasets.Dataset.from_dict({}), head.counts)
            check_supervised(encoded, cfg.data.sequence_length)
        elif encoder is not None:
            check_documents(source, head.counts)
        heads.append(head)
    return heads


def _batches(head: Head) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (number of the first, rows) until enough is read."""
    rows, first, left = iter(head.source.rows), 0, LOOK_BYTES
    while batch := list(islice(rows, min(_BATCH, LOOK_ROWS - first))):
        yield first, batch
        first += len(batch)
        left -= sum(len(str(row)) for row in batch)
        if left <= 0 or first >= LOOK_ROWS:
            head.whole = next(rows, None) is None
            return


def _add(head: Head, stored: list[dict[str, Any]], results: Sequence[EncodedRow | None]) -> None:
    for row, result in zip(stored, results, strict=True):
        columns = or_bad(head.source.row, row)
        if result is not None:
            head.counts.add(result)
        if isinstance(columns, BadRow) or isinstance(result, BadRow):
            continue
        length = 0
        if isinstance(result, EncodedExample):
            length = len(result.input_ids) + result.cut_off
            head.lengths.append(length)
        layout = head.source.layout
        pieces = layout.shape == "pieces"  # of a text file: its text is all that is kept
        named = ("text",) if pieces else (*layout.columns, *layout.optional)
        kept = {k: v for k, v in columns.items() if k in named and v is not None}
        head.rows.append((length, kept))


def refuse_long(heads: list[Head], sequence_length: int, most: float) -> None:
    """Refuse a source of which more than the share `most` of the rows is cut off or left out."""
    for head in heads:
        if head.too_long > most:
            lost, rows = round(head.too_long * head.counts.rows), head.counts.rows
            said = f"{lost:,} of the first {rows:,} rows of {head.source.where} are longer than"
            fit = ""
            if head.lengths:
                most = sorted(head.lengths)[int(0.95 * (len(head.lengths) - 1))]
                fit = f": raise it (95 % of them have at most {most:,} tokens), or shorten the rows"
            raise DataError(
                f"{said} data.sequence_length {sequence_length} and cut off or left out{fit}; "
                "where that is meant, rehearse with --most_too_long 1"
            )


def length_for(heads: list[Head], affordable: int, sequence_length: int) -> int:
    """Return the sequence length of the rehearsal: the run's own, or the `affordable` one, which
    is raised until some rows of each source fit.
    """
    length = min(affordable, sequence_length)
    for head in heads:
        ordered = sorted(n for n, _ in head.rows)
        if head.bounded and ordered:
            length = max(length, ordered[min(_FEW, len(ordered)) - 1])
    return min(length, sequence_length)
