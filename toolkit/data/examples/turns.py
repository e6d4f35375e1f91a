"""Turns of a conversation (role/content, from/value) as the messages that chat templates take.

See [Note: formats] in `recognise.py`. All functions raise BadRow for the first thing that is wrong.
"""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from toolkit.data.sources.row_values import (
    BadRow,
    Row,
    clean,
    listed,
    named,
    optional_string,
    parsed,
    string,
    wrong,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_CALLS = ("function_call", "tool_call")
_SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", *_CALLS), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_RESERVED = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt"}


def from_messages(value: Any, where: str) -> list[Row]:
    """Return turns of `role` and `content`, checked; see [Note: formats]."""
    return [_message(turn, at) for turn, at in _turns(value, where, ("role",), "content")]


def from_sharegpt(row: Row, column: str) -> list[Row]:
    """Return ShareGPT's turns of `from` and `value` as messages, after `system`."""
    turns = _turns(row[column], column, ("from", "value"))
    return _with_system(row, [_sharegpt(turn, at) for turn, at in turns])


def from_alpaca(row: Row) -> list[Row]:
    """Return Alpaca's instruction, input and output as messages, after `system` and `history`."""
    said: list[str] = []
    for i, pair in enumerate(listed(row.get("history") or [], "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            wrong(pair, f"history[{i}]", "an instruction and its answer")
        said += [string(text, f"history[{i}][{at}]") for at, text in enumerate(pair)]
    instruction = string(row["instruction"], "instruction")
    parts = (instruction, optional_string(row, "input"))
    asked = "\n\n".join(part for part in parts if part.strip())
    if not asked:
        raise BadRow("expected text in 'instruction', got none", "empty instruction")
    said += [asked, string(row["output"], "output")]
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return _with_system(row, messages)


def _with_system(row: Row, messages: list[Row]) -> list[Row]:
    system = optional_string(row, "system")
    if not system.strip():
        return messages
    if messages[0]["role"] == "system":
        said = "expected one system text, got a column 'system' and a turn"
        raise BadRow(said, "two system texts")
    return [{"role": "system", "content": system}, *messages]


def tools_of(row: Row) -> list[dict[str, Any]] | None:
    """Return the JSON schemas in the column `tools`, a list or JSON text; None where empty."""
    given = [] if row.get("tools") in (None, "") else listed(row["tools"], "tools")
    tools = [parsed(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or not tool:
            wrong(tool, f"tools[{i}]", "the JSON schema of a tool (a mapping)")
    clean(tools, "tools")
    return tools or None


def template_kwargs_of(row: Row) -> dict[str, Any]:
    """Return further arguments of the template from the column `chat_template_kwargs`."""
    name = "chat_template_kwargs"
    value = {} if row.get(name) in (None, "") else parsed(row[name], name)
    if not isinstance(value, dict):
        wrong(value, name, "a mapping")
    clean(value, name)
    if taken := _RESERVED.intersection(value):
        what = f"got {named(sorted(taken))}, which the toolkit sets"
        said = f"expected further arguments of the template in {name!r}, {what}"
        raise BadRow(said, "reserved template argument")
    return value


def _turns(value: Any, where: str, keys: tuple[str, ...], *more: str) -> Iterator[tuple[Row, str]]:
    """Yield each turn, which has `keys`, and its place; `more` are named with them."""
    turns = listed(value, where)
    if not turns:
        raise BadRow(f"expected turns in {where!r}, got an empty list", "empty conversation")
    clean(turns, where)
    for i, turn in enumerate(turns):
        at = f"{where}[{i}]"
        if not isinstance(turn, dict):
            wrong(turn, at, "a turn (a mapping)")
        if missing := [key for key in keys if key not in turn]:
            expected = " and ".join(map(repr, (*keys, *more)))
            said = f"expected {expected} in {at!r}, got {named(turn)}"
            raise BadRow(said, f"missing {missing[0]}")
        yield turn, at


def _message(turn: Row, where: str) -> Row:
    role, calls = turn["role"], turn.get("tool_calls")
    if role not in ROLES:
        wrong(role, where, f"one of the roles {', '.join(ROLES)}", "unknown role")
    if turn.get("weight", 1) in (0, False):
        # To learn what the author marked as not to be learned would be worse than to stop.
        advice = "give such rows as 'prompt' and 'completion' lists of turns"
        what = f"expected turns that all count, got weight 0 in {where!r}; {advice}"
        raise BadRow(what, "turn of weight 0")
    message = dict(turn)
    if calls is not None and calls != []:
        if role != "assistant":
            said = "expected tool_calls in turns of the assistant only, got some"
            raise BadRow(f"{said} in {where!r} ({role})", "tool calls of another role")
        if not isinstance(calls, list):
            wrong(calls, f"{where}.tool_calls", "a list")
        places = (f"{where}.tool_calls[{i}]" for i in range(len(calls)))
        message["tool_calls"] = [*map(_tool_call, calls, places)]
    elif "content" not in turn:
        raise BadRow(f"expected 'content' in {where!r}, got {named(turn)}", "missing content")
    if turn.get("content") is not None or role != "assistant":
        message["content"] = _content(turn.get("content"), f"{where}.content")
    return message


def _content(value: Any, where: str) -> str:
    """Return the text; of a list of parts, which text-only templates would print as a list."""
    if not isinstance(value, list):
        return string(value, where)
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            wrong(kind, f"{where}[{i}]", "a part of type text")
    return "".join(string(p.get("text"), f"{where}[{i}].text") for i, p in enumerate(value))


def _sharegpt(turn: Row, where: str) -> Row:
    name = turn["from"]
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        wrong(name, f"{where}.from", f"one of {', '.join(_SHAREGPT_ROLES)}", "unknown role")
    value = string(turn["value"], f"{where}.value")
    if name not in _CALLS:
        return {"role": role, "content": value}
    found = parsed(value, f"{where}.value")
    calls = found if isinstance(found, list) else [found]
    places = (f"{where}.value[{i}]" for i in range(len(calls)))
    return {"role": role, "tool_calls": [*map(_tool_call, calls, places)]}


def _tool_call(call: Any, where: str) -> Row:
    if not isinstance(call, dict):
        wrong(call, where, "a tool call (a mapping)")
    bare = "function" not in call and "name" in call  # its fields without a `function` around them
    function = call if bare else call.get("function")
    if not isinstance(function, dict):
        wrong(function, f"{where}.function", "a mapping of name and arguments")
    name = string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{where}.function.arguments") if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        wrong(arguments, f"{where}.function.arguments", "a mapping")
    function = {**function, "name": name, "arguments": arguments}
    if not bare:
        return {**call, "function": function}
    around = {key: function.pop(key) for key in ("id", "type") if key in function}
    return {"type": "function", **around, "function": function}
