"""Rows that are tokenised already: ids, and which of them are learned."""

from typing import Any

from toolkit.data.samples.sequences import IGNORED
from toolkit.data.sources.row_values import BadRow, listed, wrong

MASKS = ("labels", "completion_mask", "assistant_masks")
"""Columns that say what is learned."""


def ids_and_labels(row: dict[str, Any]) -> tuple[list[int], list[int] | None]:
    """Return the token ids of a row and their unshifted labels; None: all are learned.

    `labels`, `completion_mask` and `assistant_masks` narrow what is learned, each further; what
    `attention_mask` leaves out is padding and is left out.

    Raises:
        BadRow: they are no integers, differ in length, or leave nothing to learn.
    """
    ids = _integers(row["input_ids"], "input_ids")
    if not ids:
        raise BadRow("expected token ids in 'input_ids', got an empty list", "empty text")
    if (low := min(ids)) < 0:
        raise BadRow(f"expected token ids from 0 up, got {low}", "negative token id")
    given = [name for name in (*MASKS, "attention_mask") if row.get(name) is not None]
    masks = {name: _mask(row[name], name, ids) for name in given}
    kept = masks.pop("attention_mask", [True] * len(ids))
    learned = [all(at) for at in zip(kept, *masks.values(), strict=True)]
    if not any(learned):
        raise BadRow(
            f"expected a token to learn, got {' and '.join(given)} that leave none",
            "no supervised token",
        )
    labels = [token if yes else IGNORED for token, yes in zip(ids, learned, strict=True)]
    left = [i for i, yes in enumerate(kept) if yes]
    return [ids[i] for i in left], [labels[i] for i in left] if masks else None


def _mask(value: Any, name: str, ids: list[int]) -> list[bool]:
    """Return which of `ids` the labels or the mask in column `name` leave."""
    values = _integers(value, name)
    if len(values) != len(ids):
        said = f"expected as many {name} as input_ids ({len(ids)}), got {len(values)}"
        raise BadRow(said, "lengths that differ")
    if name != "labels":
        if other := set(values) - {0, 1}:
            raise BadRow(f"expected 0 and 1 in {name!r}, got {min(other)}", "wrong mask")
        return [bool(value) for value in values]
    for i, (label, token) in enumerate(zip(values, ids, strict=True)):
        if label not in (IGNORED, token):
            raise BadRow(
                f"expected 'labels[{i}]' to be its token's id {token} or {IGNORED}, got {label}; "
                "labels stand at the place of their token, the loss shifts them",
                "labels that are not the tokens",
            )
    return [label != IGNORED for label in values]


def _integers(value: Any, where: str) -> list[int]:
    values = listed(value, where)
    allowed = {int} if where in ("input_ids", "labels") else {int, bool}
    if not set(map(type, values)) <= allowed:
        i = next(i for i, v in enumerate(values) if type(v) not in allowed)
        wrong(values[i], f"{where}[{i}]", "an integer")
    return values
