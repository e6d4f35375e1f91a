"""Text for the terminal: aligned tables, sizes, and one line for names that differ in numbers."""

import itertools
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def format_table(rows: list[list[str]], right: set[int], margin: int = 0) -> list[str]:
    """Format rows as lines of aligned columns.

    If stdout is a terminal that is too narrow, the columns that do not fit follow in further
    tables, each of which repeats the first column. If the first column takes more than half of the
    width, the beginning of its cells is cut.

    Args:
        rows: cells; every row has the same number of them. No rows give no lines.
        right: indices of the columns that are right-aligned.
        margin: number of characters of the terminal's width to leave free.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    room: float = math.inf
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - margin
    is_too_wide = sum(widths) + 2 * (len(widths) - 1) > room
    if widths and is_too_wide and widths[0] > (half := room // 2):
        rows = [[_cut_beginning(row[0], int(half)), *row[1:]] for row in rows]
        widths[0] = int(half)
    blocks: list[list[int]] = [[]]  # indices of the columns of each table
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


def _cut_beginning(text: str, width: int) -> str:
    """Shorten a text to `width` characters: its beginning is replaced by an ellipsis."""
    return text if len(text) <= width else f"…{text[1 - width :]}"


def size_text(nbytes: int) -> str:
    """Format a number of bytes in decimal units, such as `33.4 MB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def count_text(count: int) -> str:
    """Format a number of parameters or tokens, such as `8.030 B`, `2.738 M` or `92,160`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.3f} {unit}"
    return f"{count:,}"


def group_numbered_names(
    names: list[str], facts: Sequence[Hashable] = ()
) -> list[tuple[str, list[int]]]:
    """Group names that differ only in their numbers, such as those of equal layers.

    `model.layers.0.mlp` to `model.layers.31.mlp` become `model.layers.{0..31}.mlp`; every second
    layer becomes `{0..30:2}`. If the numbers do not form a complete grid, each name stays alone.

    Args:
        names: dotted names.
        facts: one value for each name; names with different values are not grouped. Empty: group
            by name only.

    Returns:
        (group's name, indices of its members in `names`), in the order of the first member.
    """
    groups: dict[tuple[str, Hashable], list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        groups[_NUMBER.sub("{}", name), facts[index] if facts else None].append(index)
    lines = []
    for (pattern, _), members in groups.items():
        numbers = [tuple(map(int, _NUMBER.findall(names[i]))) for i in members]
        places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
        if math.prod(map(len, places)) == len(members):
            lines.append((pattern.format(*map(_format_range, places)), members))
        else:
            lines += [(names[i], [i]) for i in members]
    return lines


def _format_range(numbers: list[int]) -> str:
    """Format sorted numbers: `3`, `{0..31}`, `{0..30:2}` or `{1,2,5}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if steps == {1}:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    if len(steps) == 1 and len(numbers) > 2:
        return f"{{{numbers[0]}..{numbers[-1]}:{steps.pop()}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
