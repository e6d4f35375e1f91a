"""Read and suggest other names of columns, keys of turns and roles (`data.columns`).

[Note: data.columns] `prompt: question` reads a column, `content: value` a key of turns, and `human:
user` maps a name to a role. `source: null` skips a column or a key. `reasoning_content: null` skips
all reasoning, including the text between <think> and </think>.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.data.examples.turns import ROLES, SPELLINGS, TURN_COLUMNS
from toolkit.data.sources.row_values import Row, list_names, parse_json
from toolkit.errors import ConfigError, DataError

REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = ("role", "content", "tool_calls", *REASONING)
_MAY_HOLD_TURNS = (
    *(*TURN_COLUMNS, "prompt", "completion", "chosen", "rejected"),
    *("response_1", "response_2"),
)
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_ELSEWHERE = (
    "A source with other columns needs a mapping: `columns` of its entry in data.sources or "
    "data.eval_sources ({{{0}: {0}}} keeps the name)"
)


@dataclass(frozen=True)
class NameMapping:
    """The setting `data.columns`, which maps names in the rows of a source to standard names."""

    columns: Mapping[str, str]
    """Standard name of a column -> name in the rows."""
    keys: Mapping[str, str]
    """Name of a turn's key in the rows -> standard name."""
    roles: Mapping[str, str]
    """Name in the rows -> role."""
    skipped: tuple[str, ...]
    """Columns and keys that are skipped."""

    @classmethod
    def from_setting(
        cls, mapping: Mapping[str, str | None], standard: Collection[str]
    ) -> "NameMapping":
        """Sort the entries of `data.columns` into columns, keys of turns, roles and skipped names.

        Args:
            mapping: the setting. An entry with the value None skips a name.
            standard: standard names of the columns that some format uses.

        Raises:
            ConfigError: a name is neither a column, nor a key of turns, nor a role.
        """
        columns: dict[str, str] = {}
        keys: dict[str, str] = {}
        roles: dict[str, str] = {}
        for name, other in mapping.items():
            if other is None:
                continue
            if name in standard:
                columns[name] = other
            elif other in ROLES:
                roles[name] = other
            elif name not in _KEYS:
                near = _suggest_name(name, [*standard, *_KEYS])
                raise ConfigError(
                    f"data.columns: {name!r} is neither a column ({', '.join(standard)}) nor a key "
                    f"of turns ({', '.join(_KEYS)}), and {other!r} no role ({', '.join(ROLES)})"
                    f"{near}"
                )
            if name in _KEYS:
                keys[other] = name
        skipped = tuple(sorted(name for name, other in mapping.items() if other is None))
        return cls(columns, keys, roles, skipped)

    def with_columns(self, columns: Mapping[str, str]) -> "NameMapping":
        """Return a copy with additional columns (standard name -> name in the rows).

        If a column is in the setting too, the setting wins.
        """
        return replace(self, columns={**columns, **self.columns})

    def find_absent_names(self, rows: Sequence[Row], where: str) -> list[str]:
        """List skipped names and roles of the setting that do not occur in the first rows.

        The caller may warn of them. Absent names that are surely errors raise an exception.

        Args:
            rows: the first rows of the source, with their original names.
            where: name of the source, for messages.

        Raises:
            DataError: a mapped column or key does not occur, or a skipped name looks misspelled.
        """
        columns = dict.fromkeys(name for row in rows for name in row)
        turns = [turn for row in rows for name in columns for turn in _read_turns(row.get(name))]
        keys = dict.fromkeys(key for turn in turns for key in turn)
        everything = {**columns, **keys}
        expected = [(other, name, columns) for name, other in self.columns.items()]
        expected += [
            (other, name, everything)
            for other, name in self.keys.items()
            if name not in self.columns
        ]
        for other, name, existing in expected:
            if other not in existing and not (name in self.keys.values() and other in keys):
                of_turns = f"; turns have {list_names(keys)}" if keys else ""
                raise DataError(
                    f"{where}: data.columns names {other!r}, the rows have {list_names(columns)}"
                    f"{of_turns}{_suggest_name(other, existing) or '.'} {_ELSEWHERE.format(name)}"
                )
        absent = [name for name in self.skipped if name not in everything]
        for name in absent:
            if name not in REASONING and (near := _suggest_name(name, everything)):
                raise DataError(
                    f"{where}: data.columns skips {name!r}, the rows have "
                    f"{list_names(everything)}{near}"
                )
        roles = {str(turn.get(key)) for turn in turns for key in ("role", "from", *self.keys)}
        return [*(n for n in absent if n not in REASONING), *sorted({*self.roles} - roles)]

    def check_used(self, used: Collection[str], rows: Sequence[Row], where: str, by: str) -> None:
        """Raise DataError if the setting maps a column that the format of the rows does not use.

        Args:
            used: standard names of the columns that the format uses.
            rows: the first rows, renamed.
            where: name of the source, for the message.
            by: title of the format, for the message.
        """
        turns = [turn for row in rows for name in row for turn in _read_turns(row.get(name))]
        keys = {key for turn in turns for key in turn}
        for name, other in self.columns.items():
            if name not in used and not (name in self.keys.values() and name in keys):
                raise DataError(
                    f"{where}: data.columns maps {name!r} to {other!r}, and nothing uses {name!r}: "
                    f"these rows are {by}, which use {list_names(used)}. Correct the mapping or "
                    f"remove it. {_ELSEWHERE.format(name)}"
                )

    def rename_row(self, row: Row, json_turns: Collection[str] = ()) -> Row:
        """Return a row with standard names of columns, turn keys and roles; drop skipped names.

        Args:
            row: a row as it was read.
            json_turns: columns of JSON text with a list of turns. The text is parsed, and its turns
                are renamed. Columns in `TURN_COLUMNS` are always treated like this.
        """
        dropped = {*self.columns.values(), *self.skipped}
        row = {name: value for name, value in row.items() if name not in dropped} | {
            name: row[other] for name, other in self.columns.items() if other in row
        }
        if not (self.keys or self.roles or self.skipped or json_turns):
            return row
        return {name: self._rename_value(name, value, json_turns) for name, value in row.items()}

    def _rename_value(self, name: str, value: Any, json_turns: Collection[str]) -> Any:
        """Rename the keys and roles of turns in the value of column `name`.

        Values without turns are returned unchanged. JSON text is parsed only in `TURN_COLUMNS` and
        in the columns `json_turns`.
        """
        if name not in _MAY_HOLD_TURNS:
            return value
        if isinstance(value, dict) and {"role", "from", *self.keys} & {*value}:
            return self._rename_turn(value)
        if isinstance(value, str) and name not in TURN_COLUMNS and name not in json_turns:
            return value
        turns = _read_turns(value)
        return [self._rename_turn(turn) for turn in turns] if turns else value

    def _rename_turn(self, turn: Row) -> Row:
        """Return a turn with standard keys and roles, without the skipped keys.

        If `reasoning_content` is skipped, a `<think>` block is also removed from an answer's text.
        """
        skips_reasoning = REASONING[0] in self.skipped
        skipped = {*self.skipped, *(REASONING if skips_reasoning else ())}
        turn = {self.keys.get(k, k): v for k, v in turn.items() if k not in skipped}
        for key in ("role", "from"):
            if isinstance(name := turn.get(key), str):
                turn[key] = self.roles.get(name, name)
        role = SPELLINGS.get(str(turn.get("role", turn.get("from"))).lower())
        for key in ("content", "value"):
            if skips_reasoning and role == "assistant" and isinstance(text := turn.get(key), str):
                turn[key] = _THOUGHT.sub("", text, count=1)
        return turn

    def parse_json_turns(self, rows: Sequence[Row], name: str) -> list[list[Row]] | None:
        """Parse column `name` of each row as JSON text of turns, with renamed keys and roles.

        Returns:
            One list of turns per row. None if any row has another value, or if there are no rows.
        """
        column = []
        for row in rows:
            value = row.get(name)
            turns = _read_turns(value) if isinstance(value, str) else []
            if not turns or not all({"role", "from", *self.keys} & {*turn} for turn in turns):
                return None
            column.append([self._rename_turn(turn) for turn in turns])
        return column or None


def _suggest_name(name: str, names: Collection[Any]) -> str:
    """Return "; did you mean NAME?" with the most similar of `names`; "" if none is similar."""
    near = difflib.get_close_matches(name, [*map(str, names)], 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read_turns(value: Any) -> list[Row]:
    """Return the turns in a list or in JSON text of a list; [value] if the value is a mapping.

    Any other value gives an empty list.
    """
    try:
        value = parse_json(value) if isinstance(value, str) and value[:1] == "[" else value
    except (ValueError, RecursionError):
        return []  # reported when the row is parsed
    if isinstance(value, dict):
        return [value]
    all_turns = isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
    return value if all_turns else []


# Names of columns in public data sets, the most specific first.
QUESTIONS = ("question", "query", "input", "inputs", "problem", "user", "human")
_PROMPTS = ("instruction", "prompt", *QUESTIONS)
_RESPONSES = (
    *("output", "response", "answer", "completion", "targets", "target", "solution"),
    *("answers", "assistant", "generation"),
)
_CONTEXTS = ("input", "context", "passage")
_TEXTS = ("body", "content", "document", "article", "passage", "story", "code", "raw_content")
_TURNS = ("dialog", "dialogue", "chat", "turns", "conversation_history")
_ROLE_KEYS = ("speaker", "who", "sender", "author", "name")
_CONTENT_KEYS = ("text", "says", "utterance", "message", "body")
_SIDES = (
    ("response_j", "response_k"),
    ("response_w", "response_l"),
    ("better", "worse"),
    ("preferred", "dispreferred"),
    ("preferred", "rejected"),
    ("accepted", "rejected"),
    ("winner", "loser"),
    ("win", "lose"),
    ("positive", "negative"),
    ("good", "bad"),
    ("chosen_answer", "rejected_answer"),
    ("answer_chosen", "answer_rejected"),
    ("chosen_text", "rejected_text"),
)
# Two answers, the column that selects the better one, and the meaning of its values.
_NUMBERED = (
    (("response_0", "response_1"), "better_response_id", "0 or 1, the number of the better answer"),
    (("human_ref_A", "human_ref_B"), "labels", "1 where human_ref_A is the better answer"),
)
_LABELS = ("kto_tag", "is_good", "good", "desirable", "feedback", "thumbs_up", "preferred")


def suggest_example_columns(rows: Sequence[Row]) -> str:
    """Return a sentence that suggests `data.columns` for rows whose format is not known.

    The suggestion uses common column names. If none is present, it is a general example.
    """
    names = {name for row in rows for name in row}
    prompt, response = _first_existing(_PROMPTS, names), _first_existing(_RESPONSES, names)
    if turns := next(
        (n for n in _TURNS if any(_is_list_of_mappings(row.get(n)) for row in rows)), None
    ):
        keys = {key for row in rows for turn in row.get(turns) or () for key in turn}
        mapping = {"messages": turns}
        for name, spellings in (("role", _ROLE_KEYS), ("content", _CONTENT_KEYS)):
            if name not in keys and (other := _first_existing(spellings, keys)) is not None:
                mapping[name] = other
        return f"Set data.columns: {format_mapping(mapping)}"
    if prompt and response:
        if response == "answers" and "tools" in names:  # calls of functions, as xLAM has them
            mapping = {"instruction": prompt, "tool_calls": response}
            return f"Set data.columns: {format_mapping(mapping)}"
        mapping = {"instruction": prompt, "output": response}
        if (context := _first_existing(_CONTEXTS, names - {prompt, response})) is not None:
            mapping["input"] = context
        if "system_prompt" in names and "system" not in names:
            mapping["system"] = "system_prompt"
        as_text = format_mapping({"prompt": prompt, "completion": response})
        return (
            f"Set data.columns: {format_mapping(mapping)} (in the chat template), or {as_text} (as "
            "plain text)"
        )
    if (text := _first_existing(_TEXTS, names)) is not None:
        return f"Set data.columns: {format_mapping({'text': text})}"
    return "Set data.columns, such as {prompt: question, completion: answer} or {text: body}"


def suggest_pair_columns(rows: Sequence[Row]) -> str:
    """Return a sentence that suggests `data.columns` for rows that are not recognised as pairs.

    If no mapping suffices, the sentence explains how to rewrite the rows. If no known column is
    present, it is a general example.
    """
    names = {name for row in rows for name in row}
    pair = next((sides for sides in _SIDES if {*sides} <= names), None)
    if pair is None:
        for columns, number, better in _NUMBERED:
            if {*columns, number} <= names:
                first, second = columns
                return (
                    f"No mapping reads {number!r}, which is {better}: write the better one of "
                    f"{first!r} and {second!r} to 'chosen' and the other one to 'rejected'"
                )
        if ranked := next((name for name, v in rows[0].items() if _are_ranked_answers(v)), None):
            return (
                f"No mapping reads {ranked!r}, which are several answers with a rank: write the "
                "pairs to train on, such as the best and the worst answer, to 'chosen' and "
                "'rejected'"
            )
        return "Set data.columns, such as {chosen: better, rejected: worse}"
    mapping = dict(zip(("chosen", "rejected"), pair, strict=True))
    if not {"prompt", "instruction"} & names and (ask := _first_existing(QUESTIONS, names)):
        mapping["instruction"] = ask
    return f"Set data.columns: {format_mapping(mapping)}"


def suggest_answer_columns(names: Sequence[str]) -> str:
    """Return a sentence that suggests `data.columns` for labelled answers.

    If no known column is present, it is a general example.

    Args:
        names: the columns of the rows.
    """
    label = "label" if "label" in names else _first_existing(_LABELS, {*names})
    response = _first_existing(("completion", *_RESPONSES), {*names})
    if label is None or response is None:
        return "Set data.columns, such as {completion: answer, label: good}"
    mapping = {"completion": response, "label": label}
    if not {"prompt", "instruction"} & {*names} and (ask := _first_existing(QUESTIONS, {*names})):
        mapping["instruction"] = ask
    return f"Set data.columns: {format_mapping(mapping)}"


def format_mapping(mapping: Mapping[str, str]) -> str:
    """Format a mapping as YAML, such as `{text: body}`; omit names that map to themselves."""
    pairs = (f"{name}: {other}" for name, other in mapping.items() if name != other)
    return "{" + ", ".join(pairs) + "}"


def _first_existing(candidates: Sequence[str], names: set[Any]) -> str | None:
    """Return the first candidate that is in `names`; None if there is none."""
    return next((name for name in candidates if name in names), None)


def _are_ranked_answers(value: Any) -> bool:
    """Return True if a value is a list of mappings that all have a key `rank`."""
    return _is_list_of_mappings(value) and all("rank" in answer for answer in value)


def _is_list_of_mappings(value: Any) -> bool:
    """Return True if a value is a list of mappings that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(t, dict) for t in value)
