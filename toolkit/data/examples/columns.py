"""Read columns, keys of turns and roles that have other names (`data.columns`).

[Note: data.columns] `prompt: question` reads a column, `content: value` a key of turns, `human:
user` says which role a name stands for; `source: null` leaves a column or a key out.
`reasoning_content: null` leaves out all reasoning, that between <think> and </think> too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.data.examples.turns import ROLES, SPELLINGS, TURN_COLUMNS
from toolkit.data.sources.row_values import Row, json_value, named
from toolkit.errors import ConfigError, DataError

REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = ("role", "content", "tool_calls", *REASONING)
_LISTS = (*TURN_COLUMNS, "prompt", "completion")  # that may hold turns
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Names:
    """What `data.columns` says; raises ConfigError for what it cannot say."""

    columns: Mapping[str, str]  # ours -> theirs
    keys: Mapping[str, str]  # of turns, theirs -> ours
    roles: Mapping[str, str]  # theirs -> ours
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, given: Mapping[str, str | None], known: Sequence[str]) -> "Names":
        """Return what a setting says; `known`: columns that are of use."""
        columns, keys, roles = dict[str, str](), dict[str, str](), dict[str, str]()
        for ours, theirs in given.items():
            if theirs is None:
                continue
            if ours in known:
                columns[ours] = theirs
            elif theirs in ROLES:
                roles[ours] = theirs
            elif ours not in _KEYS:
                raise ConfigError(
                    f"data.columns: {ours!r} is neither a column ({', '.join(known)}) nor a key of "
                    f"turns ({', '.join(_KEYS)}), and {theirs!r} no role ({', '.join(ROLES)})"
                )
            if ours in _KEYS:
                keys[theirs] = ours
        left_out = tuple(sorted(ours for ours, theirs in given.items() if theirs is None))
        return cls(columns, keys, roles, left_out)

    def check(self, rows: Sequence[Row], where: str) -> None:
        """Raise DataError for a name that none of the first rows has, nor the toolkit's for it."""
        seen = dict.fromkeys(name for row in rows for name in row)
        turns = [turn for row in rows for name in seen for turn in _turns(row.get(name))]
        inner = dict.fromkeys(key for turn in turns for key in turn)
        pairs = [(theirs, ours, seen) for ours, theirs in self.columns.items()]
        pairs += [(theirs, ours, {**seen, **inner}) for theirs, ours in self.keys.items()]
        for theirs, ours, there in pairs:
            if theirs not in there and ours not in there:
                of_turns = f"; turns have {named(inner)}" if inner else ""
                raise DataError(
                    f"{where}: data.columns names {theirs!r}, the rows have {named(seen)}{of_turns}"
                )

    def renamed(self, row: Row) -> Row:
        """Return a row with the toolkit's names, without what is left out."""
        taken = {*self.columns.values(), *self.left_out}
        row = {name: value for name, value in row.items() if name not in taken} | {
            ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row
        }
        if not (self.keys or self.roles or self.left_out):
            return row
        return {
            name: [self._turn(turn) for turn in turns]
            if name in _LISTS and (turns := _turns(value))
            else value
            for name, value in row.items()
        }

    def _turn(self, turn: Row) -> Row:
        silent = REASONING[0] in self.left_out
        left_out = {*self.left_out, *(REASONING if silent else ())}
        turn = {self.keys.get(k, k): v for k, v in turn.items() if k not in left_out}
        for key in ("role", "from"):
            if isinstance(name := turn.get(key), str):
                turn[key] = self.roles.get(name, name)
        role = SPELLINGS.get(str(turn.get("role", turn.get("from"))).lower())
        for key in ("content", "value"):
            if silent and role == "assistant" and isinstance(said := turn.get(key), str):
                turn[key] = _THOUGHT.sub("", said, count=1)
        return turn


def _turns(value: Any) -> list[Row]:
    """Return a list of turns, or JSON text of one; empty for any other value."""
    try:
        value = json_value(value) if isinstance(value, str) and value[:1] == "[" else value
    except (ValueError, RecursionError):
        return []  # judged with the row
    whole = isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
    return value if whole else []
