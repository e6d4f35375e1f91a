"""Whether a chat template prints all of a conversation.

Owns the check. Refuses to know where in the rendering things stand.
"""

from toolkit.data.chat.mask_text import Message, with_call, with_content
from toolkit.data.chat.rendering import Rendering
from toolkit.data.sources.row_values import BadRow

_SURELY = 12
"""A content of so many characters that stands in the text stands there because it was printed."""

_NUMBER = 4017293651


def check_printed(view: Rendering, has_tools: bool) -> None:
    """Refuse a template that leaves out a content, a tool call, or the tools.

    Costs a rendering for the contents that are too short to be looked for, one for the tool calls,
    and one for the tools.

    Raises:
        BadRow: it names the turn.
    """
    unsure = []
    for i, message in view.turns():
        said = (message.get("content") or "").strip()
        if said and (len(said) < _SURELY or said not in view.text):
            unsure.append(i)
    if unsure:
        _check_contents(view, unsure)
    _check_calls(view)
    if has_tools and view.tried(view.messages, tools=False) == view.text:
        raise BadRow(
            "the chat template prints nothing of the tools; use one that knows tools "
            "(data.chat_template), or leave out the column",
            "tools not printed",
        )


def _check_contents(view: Rendering, unsure: list[int]) -> None:
    changes = {i: with_content(view.messages[i], view.word(i)) for i in unsure}
    text = view.changed(changes)
    for i, change in changes.items():
        # Where the template judges contents, it is asked turn by turn.
        shown = text if text is not None else view.changed({i: change})
        if shown is None and view.messages[i]["content"].strip() in view.text:
            continue
        if view.word(i) not in (shown or ""):
            _refuse(view, i, "content")


def _check_calls(view: Rendering) -> None:
    calls = [(i, at) for i, m in view.turns() for at in range(len(m.get("tool_calls") or []))]
    changes: dict[int, Message] = {}
    marks = []
    for number, (i, at) in enumerate(calls):
        message = changes.get(i, view.messages[i])
        word = f"{view.word(i)}c{at}c"
        change = with_call(message, at, "argument", word, _NUMBER + number)
        changes[i], mark = change or with_call(message, at, "name", word, 0) or (message, "")
        marks.append(mark)
    text = view.changed(changes) if calls else ""
    if text is not None and all(mark in text for mark in marks):
        return
    for i, at in calls:
        _check_call(view, i, at)


def _check_call(view: Rendering, i: int, at: int) -> None:
    message = view.messages[i]
    name = message["tool_calls"][at]["function"]["name"]
    for where in ("argument", "name"):
        change = with_call(message, at, where, view.words[0], _NUMBER)
        text = change and view.changed({i: change[0]})
        if change and text is not None:
            if change[1] not in text:
                _refuse(view, i, f"tool call {name!r}")
            return
    if name not in view.text:
        _refuse(view, i, f"tool call {name!r}")


def _refuse(view: Rendering, i: int, what: str) -> None:
    call = what != "content"
    beside = " beside its tool calls" if view.messages[i].get("tool_calls") and not call else ""
    raise BadRow(
        f"the chat template prints nothing of the {what} of {view.named(i)}{beside}; use "
        "another template (data.chat_template), or leave out such rows (data.on_bad_row: skip)",
        "tool call not printed" if call else "content not printed",
    )
