"""Text tables: columns that line up, and one line for names that differ in their numbers only."""

import itertools
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def table(rows: list[list[str]], right: set[int], margin: int = 0) -> list[str]:
    """Return the lines of `rows`; the columns in `right` are flushed right.

    Where they are printed in a terminal that is narrower, `margin` aside, the columns that do not
    fit follow in further tables, each with the first column, of which the ends are shown where it
    would take more than half of the room.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    room: float = math.inf
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - margin
    if widths and sum(widths) + 2 * (len(widths) - 1) > room and widths[0] > (half := room // 2):
        rows = [[_ended(row[0], int(half)), *row[1:]] for row in rows]
        widths[0] = int(half)
    blocks: list[list[int]] = [[]]
    for i in range(len(widths)):
        if len(blocks[-1]) > 1 and sum(widths[j] + 2 for j in blocks[-1]) + widths[i] > room:
            blocks.append([0])
        blocks[-1].append(i)
    return [
        "  ".join(
            row[i].rjust(widths[i]) if i in right else row[i].ljust(widths[i]) for i in block
        ).rstrip()
        for block in blocks
        for row in rows
    ]


def _ended(text: str, width: int) -> str:
    """Return `text`, or as much of its end as fits."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def size_text(nbytes: int) -> str:
    """Return a number of bytes in decimal units: `33.4 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def count_text(count: int) -> str:
    """Return a number of parameters or tokens: `8.030 B`, `2.738 M`, `92,160`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.3f} {unit}"
    return f"{count:,}"


def fold(names: list[str], facts: Sequence[Hashable] = ()) -> list[tuple[str, list[int]]]:
    """Return lines for names that are alike but for their numbers: (shown, indices of its names).

    `model.layers.0.mlp` to `model.layers.31.mlp` are `model.layers.{0..31}.mlp`; every second one
    is `{0..30:2}`. Where the numbers make no full grid each name keeps a line. Names with other
    `facts`, one a name, are not alike.
    """
    groups: dict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        groups[_NUMBER.sub("{}", name), facts[index] if facts else None].append(index)
    lines = []
    for (pattern, _), members in groups.items():
        numbers = [tuple(map(int, _NUMBER.findall(names[i]))) for i in members]
        places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
        if math.prod(map(len, places)) == len(members):
            lines.append((pattern.format(*map(_range, places)), members))
        else:
            lines += [(names[i], [i]) for i in members]
    return lines


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if steps == {1}:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    if len(steps) == 1 and len(numbers) > 2:
        return f"{{{numbers[0]}..{numbers[-1]}:{steps.pop()}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
