"""Find prompts that a layout would lose: in columns that nothing uses, or repeated in the answers.

[Note: lost prompts] Training on answers without their prompt lowers the loss and teaches nothing.
Therefore it is refused or reported:

    no prompt      a column that nothing uses may be the prompt: refused, with a mapping that works
    cannot tell    a column whose name describes a row ('source') holds a text, or the answers begin
                   with no common text: one warning
    earlier turns  a `prompt` of text next to turns that nothing uses: refused
    repeated       all answers begin with their prompt: refused
    answers        a conversation ends with the prompt, next to an answer that nothing uses: refused
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from toolkit.data.examples.columns import format_mapping
from toolkit.data.examples.turns import SPELLINGS, TURN_COLUMNS
from toolkit.data.sources.row_values import BadRow, Row, list_names, parse_json

EARLIER_TURNS = (*TURN_COLUMNS, "context", "history", "input")
"""Columns that may hold the turns before a prompt."""

_ANSWER_COLUMNS = ("completion", "output", "response")

# A column with such a word in its name describes a row.
_DESCRIPTIVE = re.compile(
    r"(^|_)(ids?|uuid|hash|sources?|dataset|models?|policy|split|subset|categor(y|ies)|lang(uage)?"
    r"|urls?|date|timestamp|licen[cs]e|chosen|rejected|preferred)(_|$|\d)",
    re.IGNORECASE,
)
_ANSWER_DETAIL = re.compile(r"(^|_)(chosen|rejected|preferred)(_|$|\d)", re.IGNORECASE)
# Any text in a column of such a name is a prompt, also one that looks like a number.
_PROMPT_NAME = re.compile(
    r"(.*_)?(prompt|instruction|question|query|problem)s?|inputs?", re.IGNORECASE
)
# Such as 8.0, 1e+05, a hash, a date or a path. A sum such as 3+3 is none.
_IDENTIFIER = re.compile(r"[+-]?[\w./:-]*\d[\w./:-]*(e\+\d+|:\d\d\+\d\d:?\d\d)?", re.ASCII)
_NO_TEXTS = frozenset(("role", "from", "type"))  # keys of turns whose values are names
_SENTENCE_WORDS = 3  # a text with fewer words may be a label
_SENTENCE_CHARACTERS = 6  # the same for a text without blanks that is not ASCII
_SHORTEST_PROMPT = 8  # characters: a shorter text may begin an answer by chance
_FEW_ROWS = 4  # in fewer rows, labels may differ by chance
_OTHER_MEANINGS = frozenset(
    (
        *("system", "system_prompt", "system_message", "tools", "functions"),
        *("chat_template_kwargs", "label", "margin"),
    )
)  # columns that are no prompts


def is_conversation(value: Any) -> bool:
    """Return True if a value is a list of turns, or a mapping with such a list in `messages`.

    A turn is a mapping with the key `role` or `from`.
    """
    if isinstance(value, dict):
        value = value.get("messages")
    keys = {"role", "from"}
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and keys & {*turn} for turn in value)
    )


def list_texts(value: Any) -> list[str]:
    """List all texts in a value that are not blank, at any depth, in no particular order.

    In mappings, the values of keys such as `role`, `type` and `id` are skipped. JSON text of a list
    of mappings is parsed, since it may hold turns.
    """
    texts = list[str]()
    values = [value]  # not a recursion, because lists may be nested without end
    while values:
        inner = values.pop()
        if isinstance(inner, str):
            parsed = _parse_turns(inner)
            if isinstance(parsed, list) and all(isinstance(turn, dict) for turn in parsed):
                values += parsed
            elif inner.strip():
                texts.append(inner)
        elif isinstance(inner, dict):
            values += [
                v
                for k, v in inner.items()
                if k not in _NO_TEXTS and not _DESCRIPTIVE.search(str(k))
            ]
        elif isinstance(inner, list):
            values += inner
    return texts


def find_possible_prompts(rows: Sequence[Row], used: Iterable[str]) -> list[str]:
    """List the unused columns that may hold a prompt, judged by their names and values.

    A column with a name such as `source` or `category` is not listed, because it describes the row.

    Args:
        rows: the first rows of a source.
        used: columns that are read already.
    """
    return [
        name
        for name in _list_other_columns(rows, used)
        if (_PROMPT_NAME.fullmatch(name) or not _DESCRIPTIVE.search(name))
        and any(_may_be_prompt(name, row.get(name)) for row in rows)
    ]


def _list_other_columns(rows: Sequence[Row], used: Iterable[str]) -> list[str]:
    """List the columns of the rows that are not in `used` and can be prompts.

    Columns such as `system`, `tools` and `label` have another meaning and are omitted.
    """
    skipped = {*used, *_OTHER_MEANINGS}
    return [
        name for name in dict.fromkeys(name for row in rows for name in row) if name not in skipped
    ]


def _may_be_prompt(name: str, value: Any) -> bool:
    """Return True if a value can be a prompt: a text or turns, not a number, a label or an id.

    Any text that is not blank counts if `name` is a name of prompts, such as `question`.
    """
    if isinstance(value, str):
        has_prompt_name = bool(_PROMPT_NAME.fullmatch(name))
        return bool(value.strip()) and (has_prompt_name or not _IDENTIFIER.fullmatch(value.strip()))
    if is_conversation(value):
        return True
    texts = list_texts(value)
    return any(_PROMPT_NAME.fullmatch(name) or len(t.split()) > 1 or _is_sentence(t) for t in texts)


def _is_sentence(text: str) -> bool:
    """Return True if a text is long enough for a sentence, so that it is not a label."""
    if len(text.split()) >= _SENTENCE_WORDS:
        return True
    return not text.isascii() and len(text.strip()) >= _SENTENCE_CHARACTERS


def _judge_descriptive_column(rows: Sequence[Row], name: str) -> str:
    """Judge if a column with a name such as `source` or `category` holds prompts after all.

    Returns:
        `prompts` if the values are sentences that differ between rows. `unclear` if they are
        sentences, but all equal in a few rows, or if the name refers to an answer. `labels` for
        everything else.
    """
    texts = [" ".join(parts) for row in rows if (parts := list_texts(row.get(name)))]
    if 2 * sum(map(_is_sentence, texts)) <= len(texts):
        return "labels"
    distinct = len({*texts})
    if 2 * distinct <= len(texts) and len(texts) >= _FEW_ROWS:
        return "labels"
    return "prompts" if distinct > 1 and not _ANSWER_DETAIL.search(name) else "unclear"


def refuse_possible_prompt(rows: Sequence[Row], used: Iterable[str], *, texts: bool) -> None:
    """Raise BadRow if the answers have no prompt and an unused column may be the prompt.

    The error suggests `data.columns`.

    Args:
        rows: the first rows of a source.
        used: columns that hold the answers.
        texts: the answers are texts, so the prompt may be plain text too.
    """
    used = (*used,)
    possible = find_possible_prompts(rows, used)
    possible += [
        name
        for name in _list_other_columns(rows, used)
        if name not in possible and _judge_descriptive_column(rows, name) == "prompts"
        if _DESCRIPTIVE.search(name)
    ]
    if not possible:
        return

    def values(name: str) -> list[Any]:
        return [value for row in rows if (value := row.get(name)) is not None]

    name = next((n for n in possible if all(map(_is_mappable, values(n)))), None)
    if name is None:
        name = possible[0]
        kind = "mappings" if isinstance(values(name)[0], dict) else "lists"
        advice = (
            f"No mapping reads the {kind} in {name!r}: write the text to 'prompt', or set "
            f"data.columns: {{{name}: null}}"
        )
    else:
        mapping = f"{{prompt: {name}}}"
        if not any(map(is_conversation, values(name))):
            mapping = f"{{instruction: {name}}} (the user's turn)"
            mapping += f" or {{prompt: {name}}} (plain text)" if texts else ""
        advice = f"Set data.columns: {mapping}, or {{{name}: null}}"
    raise BadRow(
        f"expected a prompt, got answers without one next to {list_names(possible)}, which nothing "
        f"uses. {advice} if it is no prompt",
        "no prompt",
    )


def _is_mappable(value: Any) -> bool:
    """Return True if a value is text or a list of turns, so its column can map to `prompt`."""
    return isinstance(value, str) or is_conversation(value)


def warn_of_missing_prompts(
    rows: Sequence[Row], used: Collection[str], sides: Sequence[str], *, texts: bool
) -> tuple[str, ...]:
    """Return a warning if pairs seem to have no prompt.

    Pairs of texts get none if most of them have a long common beginning, which is their prompt, and
    no unused column may be one. Pairs of turns always get a warning.

    Args:
        rows: the first rows of a source, which `refuse_possible_prompt` accepted.
        used: columns that hold the answers.
        sides: the columns of the two answers.
        texts: the answers are texts.

    Returns:
        A tuple of one sentence, or ().
    """
    unused = _list_other_columns(rows, used)
    unclear = [
        name
        for name in unused
        if _DESCRIPTIVE.search(name) and _judge_descriptive_column(rows, name) == "unclear"
    ]
    reason = "these pairs have no prompt: the answers begin with no turn of the user"
    if texts:
        reason = "these pairs have no prompt other than what both answers begin with"
        pairs = [[row.get(name) for name in sides] for row in rows]
        common = [
            find_common_prompt(first, second)
            for first, second in pairs
            if isinstance(first, str) and isinstance(second, str)
        ]
        missing = sum(len(text.strip()) < _SHORTEST_PROMPT for text in common)
        if 2 * missing > len(common):
            reason += (
                f", and {missing} of the first {len(common)} begin with fewer than "
                f"{_SHORTEST_PROMPT} common characters"
            )
        elif not unclear:
            return ()
    with_texts = [name for name in unused if any(list_texts(row.get(name)) for row in rows)]
    if columns := unclear or with_texts:
        reason += (
            f". Nothing uses {list_names(columns)}: if it is the prompt, set data.columns "
            f"{{instruction: {columns[0]}}}, else {{{columns[0]}: null}}"
        )
    return (reason,)


def find_common_prompt(text: str, other: str) -> str:
    """Return the common beginning of two texts, cut after the last blank or colon in it.

    If it ends with a space, the space is omitted, because tokenizers join it to the next word.
    """
    pairs = enumerate(zip(text, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    while at and not (text[at - 1].isspace() or text[at - 1] == ":"):
        at -= 1
    if at and text[at - 1] == " ":
        at -= 1
    return text[:at]


def refuse_repeated_prompts(rows: Sequence[Row], columns: Sequence[str], advice: str) -> None:
    """Raise BadRow if the answers in all first rows begin with the text of the column `prompt`.

    Training would read such a prompt twice, and the loss would cover it. Rows are accepted if a
    prompt is missing, or if all prompts are shorter than `_SHORTEST_PROMPT` characters.

    Args:
        rows: the first rows of a source.
        columns: the columns of the answers.
        advice: what to do, for the error.
    """
    is_long = False
    for row in rows:
        prompt, texts = row.get("prompt"), [row.get(column) for column in columns]
        if not isinstance(prompt, str) or not prompt.strip():
            return
        prompt = prompt.strip()
        if not all(isinstance(t, str) and _begins_with_prompt(prompt, t.strip()) for t in texts):
            return
        is_long = is_long or len(prompt) >= _SHORTEST_PROMPT
    if not is_long:
        return
    raise BadRow(
        f"expected answers that follow the text in 'prompt', got {list_names(columns)} that begin "
        f"with it in all first rows; {advice}",
        "prompt in the answer",
    )


def _begins_with_prompt(prompt: str, text: str) -> bool:
    """Return True if a text begins with the prompt and is longer than it."""
    return text.startswith(prompt) and len(text) > len(prompt)


def has_lost_text(row: Row, name: str, used: Iterable[str]) -> bool:
    """Return True if a text in column `name` of a row occurs in none of its columns `used`.

    Differences in white space are ignored.
    """
    texts = list_texts(row.get(name))
    if not texts:
        return False
    used_text = "\n".join(
        " ".join(t.split()) for column in used for t in list_texts(row.get(column))
    )
    return not all(
        re.search(rf"(?<!\w){re.escape(' '.join(text.split()))}(?!\w)", used_text) for text in texts
    )


def refuse_earlier_turns(
    rows: Sequence[Row], names: Mapping[str, str], used: Collection[str], *, output: str = ""
) -> None:
    """Raise BadRow if `prompt` is text and an unused column has turns that the prompt lacks.

    Training would lose these earlier turns. The error suggests `data.columns`.

    Args:
        rows: the first rows of a source, with standard names.
        names: standard name -> name in the file, of columns that `data.columns` maps.
        used: the columns of the prompt and of the answers.
        output: the column of the answer, if the suggestion has to map it to `output`.
    """
    to_alpaca = {"instruction": names.get("prompt", "prompt")}
    if output:
        to_alpaca["output"] = names.get(output, output)
    for name in EARLIER_TURNS:
        column = names.get(name, name)
        mappings = {
            "exchanges": f"{format_mapping(to_alpaca)} to use both",
            "turns": f"{{prompt: {column}}} if these turns end with the prompt",
        }
        for row in rows if name not in used else ():
            kind = _find_kind_of_turns(row.get(name), name)
            if kind and isinstance(row.get("prompt"), str) and has_lost_text(row, name, used):
                raise BadRow(
                    f"expected a complete prompt in 'prompt', got turns in {column!r} that are not "
                    f"in it and that nothing uses. Set data.columns: {mappings[kind]}, or "
                    f"{{{column}: null}} to train without them",
                    "turns that nothing uses",
                )


def refuse_unused_answers(rows: Sequence[Row], names: Mapping[str, str], chat: str) -> None:
    """Raise BadRow if a conversation ends with a user's turn and its answer is in an unused column.

    The error suggests `data.columns`.

    Args:
        rows: the first rows of a source, with standard names.
        names: standard name -> name in the file, of columns that `data.columns` maps.
        chat: the column of the conversations.
    """
    for row in rows:
        turns = _parse_turns(row.get(chat))
        last = turns[-1] if is_conversation(turns) and isinstance(turns, list) else {}
        role = SPELLINGS.get(str(last.get("role", last.get("from"))).lower())
        for name in _ANSWER_COLUMNS if role == "user" else ():
            if not has_lost_text(row, name, (chat,)):
                continue
            prompt, answer = names.get(chat, chat), names.get(name, name)
            mapping = format_mapping({"prompt": prompt, "completion": answer})
            raise BadRow(
                f"expected conversations that end with the answer, got {prompt!r} that ends with a "
                f"turn of the user, next to {answer!r}, which nothing uses. Set data.columns: "
                f"{mapping}, or {{{answer}: null}} to train without it",
                "answer that nothing uses",
            )


def _parse_turns(value: Any) -> Any:
    """Parse a text that is a JSON list; return any other value or invalid JSON unchanged."""
    try:
        return parse_json(value) if isinstance(value, str) and value[:1] == "[" else value
    except (ValueError, RecursionError):
        return value


def _find_kind_of_turns(value: Any, name: str) -> str:
    """Return `turns` for a list of turns, `exchanges` for Alpaca's history, else "".

    Alpaca's history is a list of [question, answer] in a column `history`. JSON text of turns
    counts only in `TURN_COLUMNS`.
    """
    if name in TURN_COLUMNS:
        value = _parse_turns(value)
    if is_conversation(value):
        return "turns"
    if name != "history" or not isinstance(value, list) or not value:
        return ""
    is_exchange = all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in value)
    return "exchanges" if is_exchange else ""
