"""Convert turns of conversations (role/content, from/value) to messages for chat templates.

See [Note: formats] in `recognise.py`. All functions raise BadRow for the first thing that is wrong.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from toolkit.config.data import RESERVED_ARGUMENTS
from toolkit.data.sources.row_values import (
    BadRow,
    Row,
    check_text,
    list_names,
    parse_json_text,
    read_list,
    read_optional_text,
    read_text,
    refuse_value,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
TURN_COLUMNS = ("messages", "conversations", "conversation")
_CALLS = ("function_call", "tool_call")
SPELLINGS = {  # lower-case name of a role in data sets -> role
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "ipython"), "tool"),
}
# Keys of a turn: its weight in the loss, 0 or 1.
_WEIGHTS = ("weight", "loss_weight", "loss_scale")
# Keys of a turn: true if the loss covers it.
_SUPERVISED = ("train", "training", "trainable", "loss")
# Keys of a turn: true if the loss does not cover it.
_MASKED = ("masked", "mask")
# Keys of a turn that select parts of it.
_PART_KEYS = ("train_detail", "training_detail")


def convert_messages(value: Any, where: str) -> list[Row]:
    """Convert turns with `role` and `content` to normalised messages; see `_convert_turn`.

    `value` is a list or JSON text of one. Raises BadRow if it is empty or a turn is invalid.
    """
    return [
        _convert_turn(turn, at)
        for turn, at in _iterate_checked_turns(value, where, ("role",), "content")
    ]


def convert_sharegpt(value: Any, where: str) -> list[Row]:
    """Convert ShareGPT's turns with `from` and `value` to normalised messages.

    `value` is a list or JSON text of one. Raises BadRow if it is empty or a turn is invalid.
    """
    return [
        _convert_sharegpt_turn(turn, at)
        for turn, at in _iterate_checked_turns(value, where, ("from", "value"))
    ]


def read_turns(value: Any, where: str) -> list[Row]:
    """Convert turns in either style, `role`/`content` or `from`/`value`, to normalised messages.

    `value` is a list or JSON text of one. Raises BadRow if it is empty or a turn is invalid.
    """
    turns = read_list(value, where)
    if any(isinstance(turn, dict) and "from" in turn for turn in turns):
        return convert_sharegpt(turns, where)
    return convert_messages(turns, where)


def convert_instruction(row: Row) -> list[Row]:
    """Convert Alpaca's `history`, `instruction` and `input` to messages.

    The last message is the user's: the instruction and, after a blank line, the input.

    Raises:
        BadRow: `instruction` and `input` are empty, or a value is invalid.
    """
    texts: list[str] = []
    for i, pair in enumerate(read_list(row.get("history") or [], "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            refuse_value(pair, f"history[{i}]", "an instruction and its answer")
        texts += [read_text(text, f"history[{i}][{at}]") for at, text in enumerate(pair)]
    instruction = read_text(row["instruction"], "instruction")
    parts = (instruction, read_optional_text(row, "input"))
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise BadRow("expected text in 'instruction', got none", "empty instruction")
    roles = cycle(("user", "assistant"))
    return [
        {"role": role, "content": text}
        for role, text in zip(roles, [*texts, question], strict=False)
    ]


def convert_alpaca(row: Row) -> list[Row]:
    """Convert an Alpaca row to messages. The last one is the answer: `output` or `tool_calls`.

    Raises:
        BadRow: the instruction is empty, or a value is invalid.
    """
    messages, calls = convert_instruction(row), row.get("tool_calls")
    if calls is None:
        return [*messages, {"role": "assistant", "content": read_text(row["output"], "output")}]
    content = {"content": row["output"]} if row.get("output") else {}
    answer = {"role": "assistant", **content, "tool_calls": calls}
    return [*messages, _convert_turn(answer, "the answer")]


def add_system(row: Row, messages: list[Row]) -> list[Row]:
    """Return the messages with the text of the column `system` as their first message.

    They are returned unchanged if the column is blank or equals their first system text.

    Raises:
        BadRow: the messages begin with another system text.
    """
    system = read_optional_text(row, "system")
    if not system.strip():
        return messages
    if messages[0]["role"] in ("system", "developer"):
        if (messages[0].get("content") or "").strip() == system.strip():
            return messages
        message = "expected one system text, got a column 'system' and another in the first turn"
        raise BadRow(f"{message}; data.columns {{system: null}} keeps the turn", "two system texts")
    return [{"role": "system", "content": system}, *messages]


def begins_with_prompt(messages: Any) -> bool:
    """Return True if a value is a list of turns that begins with the user's turn.

    System turns before it are ignored.

    Args:
        messages: any value of a row, which may be malformed.
    """
    if not isinstance(messages, list):
        return False
    for turn in messages:
        name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        role = SPELLINGS.get(str(name).lower())
        if role not in ("system", "developer"):
            return role == "user"
    return False


def find_missing_prompt_turns(prompt: list[Row] | str | None, answer: list[Row]) -> list[Row]:
    """Return the turns of a prompt that have to be put before an answer.

    Args:
        prompt: turns, or the text of a user's turn. None and blank text give [].
        answer: turns, which may begin with turns of the prompt. Those are not returned.

    Raises:
        BadRow: the prompt is a text, and the answer is a conversation without this text.
    """
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        return []
    if isinstance(prompt, str):
        if not begins_with_prompt(answer):
            return [{"role": "user", "content": prompt}]
        texts = [
            _remove_white_space(turn.get("content"))
            for turn in answer
            if turn["role"] != "assistant"
        ]
        if _remove_white_space(prompt) not in "".join(texts) and texts[
            -1
        ] not in _remove_white_space(prompt):
            raise BadRow(
                "expected the text of 'prompt' in the turns of the conversation, got another; "
                "data.columns {prompt: null} trains on the conversation as it is",
                "another prompt than in the conversation",
            )
        return []
    for count in range(min(len(prompt), len(answer)), 0, -1):
        if [*map(_comparison_key, prompt[-count:])] == [*map(_comparison_key, answer[:count])]:
            return prompt[:-count]
    return prompt


def _comparison_key(turn: Row) -> tuple[Any, ...]:
    """Return (role, stripped content, tool calls as text), by which turns are compared."""
    return turn["role"], (turn.get("content") or "").strip(), str(turn.get("tool_calls"))


def _remove_white_space(text: Any) -> str:
    """Return a text without white space; empty for None."""
    return "".join(str(text or "").split())


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """Read the JSON schemas in the columns `tools` and `functions`; None if there are none.

    A column may be a list or JSON text. An entry of `functions` is wrapped as a tool.

    Raises:
        BadRow: a column is not a list, or a schema is not a mapping.
    """
    tools: list[dict[str, Any]] = []
    for name in ("tools", "functions"):
        values = [] if row.get(name) in (None, "") else read_list(row[name], name)
        schemas = [parse_json_text(tool, f"{name}[{i}]") for i, tool in enumerate(values)]
        for i, tool in enumerate(schemas):
            if not isinstance(tool, dict) or not tool:
                refuse_value(tool, f"{name}[{i}]", "the JSON schema of a tool (a mapping)")
        check_text(schemas, name)
        if name == "functions":
            schemas = [{"type": "function", "function": schema} for schema in schemas]
        tools += schemas
    return tools or None


def read_template_kwargs(row: Row) -> dict[str, Any]:
    """Read the column `chat_template_kwargs`: additional arguments for the chat template.

    It may be a mapping or JSON text; {} if it is missing or empty.

    Raises:
        BadRow: the value is not a mapping, or sets an argument that the toolkit sets.
    """
    name = "chat_template_kwargs"
    value = {} if row.get(name) in (None, "") else parse_json_text(row[name], name)
    if not isinstance(value, dict):
        refuse_value(value, name, "a mapping")
    check_text(value, name)
    if reserved := RESERVED_ARGUMENTS.intersection(value):
        raise BadRow(
            f"expected further arguments of the template in {name!r}, got "
            f"{list_names(sorted(reserved))}, which the toolkit sets",
            "reserved template argument",
        )
    return value


def _iterate_checked_turns(
    value: Any, where: str, keys: tuple[str, ...], *more: str
) -> Iterator[tuple[Row, str]]:
    """Yield (turn, its position as text, such as "messages[0]") for each turn of a list.

    Args:
        value: a list of turns, or JSON text of one.
        where: the column, with which the position begins.
        keys: keys that every turn must have.
        more: further keys that the error message lists; they are not checked.

    Raises:
        BadRow: the list is empty, or a turn is not a mapping or lacks a key.
    """
    turns = read_list(value, where)
    if not turns:
        raise BadRow(f"expected turns in {where!r}, got an empty list", "empty conversation")
    check_text(turns, where)
    for i, turn in enumerate(turns):
        at = f"{where}[{i}]"
        if not isinstance(turn, dict):
            refuse_value(turn, at, "a turn (a mapping)")
        if missing := [key for key in keys if key not in turn]:
            expected = " and ".join(map(repr, (*keys, *more)))
            message = f"expected {expected} in {at!r}, got {list_names(turn)}"
            raise BadRow(message, f"missing {missing[0]}")
        yield turn, at


def _convert_turn(turn: Row, where: str) -> Row:
    """Convert a turn with `role` and `content` to a message in the toolkit's normal form.

    The role gets its standard name, the content becomes text, and an older `function_call` becomes
    `tool_calls`. Keys that exclude the turn from the loss become `weight: 0`; other keys are kept.

    Args:
        turn: the turn.
        where: its position in the row, for messages.

    Raises:
        BadRow: the turn is invalid.
    """
    message = _normalise_weight(turn, where)
    message["role"] = role = _read_role(turn["role"], where)
    calls = turn.get("tool_calls")
    calls = None if calls == [] else parse_json_text(calls, f"{where}.tool_calls")
    # `function_call` is the older form of `tool_calls`.
    if (call := message.pop("function_call", None)) is not None:
        if calls:
            reason = f"expected tool_calls or the older function_call in {where!r}, got both"
            raise BadRow(reason, "two kinds of calls")
        calls = [{"type": "function", "function": parse_json_text(call, f"{where}.function_call")}]
    if calls is not None:
        if role != "assistant":
            raise BadRow(
                f"expected tool_calls in turns of the assistant only, got some in {where!r} "
                f"({role})",
                "tool calls of another role",
            )
        if not isinstance(calls, list):
            refuse_value(calls, f"{where}.tool_calls", "a list")
        places = (f"{where}.tool_calls[{i}]" for i in range(len(calls)))
        message["tool_calls"] = [*map(_convert_tool_call, calls, places)]
    elif "content" not in turn:
        raise BadRow(f"expected 'content' in {where!r}, got {list_names(turn)}", "missing content")
    if turn.get("content") is not None or role != "assistant":
        message["content"] = _read_content(turn.get("content"), f"{where}.content")
    return message


def _read_role(name: Any, where: str) -> str:
    """Convert the name of a role, in any known spelling, to one of `ROLES`; else raise BadRow."""
    role = SPELLINGS.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        refuse_value(
            name, where, f"one of the roles {', '.join(ROLES)} (data.columns)", "unknown role"
        )
    return role


def _normalise_weight(turn: Row, where: str) -> Row:
    """Copy a turn and replace all keys that include or exclude it from the loss.

    Such keys are `weight`, `train`, `masked` and the like. They are removed, and `weight: 0` is
    added if any of them excludes the turn. A text under one of these names is kept.

    Args:
        turn: the turn.
        where: its position in the row, for messages.

    Raises:
        BadRow: a key has an invalid value, or supervises parts of the turn.
    """
    message = dict(turn)
    is_supervised = True
    for name in (*_WEIGHTS, *_SUPERVISED, *_MASKED):
        value = _read_flag(turn.get(name), name, where)
        if value is None:
            if turn.get(name) in (None, ""):
                message.pop(name, None)
            continue
        is_supervised = is_supervised and value != (name in _MASKED)
        message.pop(name)
    for name in _PART_KEYS:
        if message.pop(name, None):
            raise BadRow(
                f"expected a turn that is supervised as a whole, got {where}.{name}, which marks "
                "parts of it; split the turn, or skip the key (data.columns)",
                "supervision of parts of a turn",
            )
    return message if is_supervised else {**message, "weight": 0}


def _read_flag(value: Any, name: str, where: str) -> bool | None:
    """Convert the value of a key such as `weight`, `train` or `masked` to a boolean.

    Args:
        value: 0, 1 or a boolean, also as text. Null, "" and, except for weights, other texts
            give None.
        name: the key.
        where: position of the turn, for messages.

    Raises:
        BadRow: the value is another number, or the key is a weight and the value is another text.
    """
    text = str("" if value is None else value).strip().lower()
    if text in ("0", "0.0", "false"):
        return False
    if text in ("1", "1.0", "true"):
        return True
    if text not in ("", "none") and (name in _WEIGHTS or isinstance(value, int | float)):
        refuse_value(value, f"{where}.{name}", "0 or 1", "weight of a turn")
    return None


def _read_content(value: Any, where: str) -> str:
    """Return the content of a turn as text.

    Args:
        value: text, or a list of parts, whose texts are joined.
        where: position of the content in the row, for messages.

    Raises:
        BadRow: a part is not text, or is excluded from the loss.
    """
    if not isinstance(value, list):
        return read_text(value, where)
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            refuse_value(kind, f"{where}[{i}]", "a part of type text")
        if _normalise_weight(part, f"{where}[{i}]").get("weight") == 0:
            raise BadRow(
                f"expected a turn that is supervised as a whole, got a part {where}[{i}] that is "
                "excluded from the loss; split the turn",
                "supervision of parts of a turn",
            )
    return "".join(read_text(p.get("text"), f"{where}[{i}].text") for i, p in enumerate(value))


def _convert_sharegpt_turn(turn: Row, where: str) -> Row:
    """Convert a turn with `from` and `value` to a message. Other keys of the turn are kept.

    Args:
        turn: the turn.
        where: its position in the row, for messages.

    Returns:
        A message with `role` and `content`. If `from` marks tool calls, `value` is parsed as JSON,
        and the message is the assistant's, with `tool_calls` and without `content`.

    Raises:
        BadRow: the turn is invalid.
    """
    name = turn["from"]
    message = _normalise_weight(turn, where)
    message = {key: text for key, text in message.items() if key not in ("from", "value")}
    value = read_text(turn["value"], f"{where}.value")
    if name not in _CALLS:
        return {"role": _read_role(name, f"{where}.from"), "content": value, **message}
    content = parse_json_text(value, f"{where}.value")
    calls = content if isinstance(content, list) else [content]
    places = (f"{where}.value[{i}]" for i in range(len(calls)))
    return {"role": "assistant", **message, "tool_calls": [*map(_convert_tool_call, calls, places)]}


def _convert_tool_call(call: Any, where: str) -> Row:
    """Convert a tool call to `{"function": {"name", "arguments"}}`, with arguments as a mapping.

    Arguments may be JSON text. Raises BadRow if the call is invalid.
    """
    if not isinstance(call, dict):
        refuse_value(call, where, "a tool call (a mapping)")
    # A bare call has the fields of a function without a `function` around them.
    bare = "function" not in call and "name" in call
    function = call if bare else call.get("function")
    if not isinstance(function, dict):
        refuse_value(function, f"{where}.function", "a mapping of name and arguments")
    name = read_text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = (
            parse_json_text(arguments, f"{where}.function.arguments") if arguments.strip() else {}
        )
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        refuse_value(arguments, f"{where}.function.arguments", "a mapping")
    function = {**function, "name": name, "arguments": arguments}
    if not bare:
        return {**call, "function": function}
    around = {key: function.pop(key) for key in ("id", "type") if key in function}
    return {"type": "function", **around, "function": function}
