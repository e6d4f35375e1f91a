"""What a process for chat templates does: render a conversation, find the assistant's turns.

Owns the limits that it sets itself, and the one use of transformers' renderer. A program of its
own, which `sandbox.py` starts; it must not import torch. See [Note: limits on templates] there.
"""

import copy
import datetime
import json
import math
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from toolkit.data.chat.markers import with_markers
from toolkit.data.chat.masks import UNCHECKED, Habits, Marked, NotFound, habits, mark
from toolkit.data.chat.rendering import REFUSED
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError

TODAY = datetime.datetime(2024, 7, 26, 12)
"""What `strftime_now` tells templates: the day that Llama's templates print where they have no
date."""

TEXT = 64 << 20
"""Characters that a conversation may have."""

OUT_OF_BOUNDS = "template out of bounds"

_LOG = 1 << 20
"""Bytes that a file may grow to: the process writes none but what it says when it dies."""

_MARKERS = re.compile(r"\{\%[-+]?\s*generation\s*[-+]?\%\}")


def out_of_bounds(said: str) -> BadRow:
    return BadRow(
        f"the chat template {said} with this conversation; give another one with "
        "data.chat_template, or leave the row out",
        OUT_OF_BOUNDS,
    )


class Work:
    """What the process does with conversations of one template.

    Args:
        template: the fields of `sandbox.Template`.
        render: transformers' renderer.
    """

    def __init__(self, template: dict[str, Any], render: Callable) -> None:
        self.template = template["text"]
        self.variables = template["variables"]
        self.specials = template["specials"]
        self.render = render
        self.has_markers = bool(_MARKERS.search(self.template))
        self.habits: dict[str, Habits] = {}

    def one(self, job: dict[str, Any]) -> dict[str, Any]:
        """Render one conversation.

        A job holds `messages`, `tools`, `kwargs`; `wanted`: the turns to find; `whole`: whether
        the wanted ones are all of the assistant's. The result: `text`, `spans` (a list of [begin,
        end]), `notes`.
        """
        refusal: BadRow | None = None
        for messages in _forms(job["messages"]):
            try:
                marked = self._marked(messages, job["tools"] or None, job["kwargs"], job["wanted"])
                break
            except BadRow as error:
                if refusal is None or refusal.reason == REFUSED:  # a form it takes tells more
                    refusal = error
        else:
            raise refusal or BadRow("no messages")
        if len(marked.text) > TEXT:
            raise out_of_bounds(f"gives {len(marked.text)} characters")
        return {
            "text": marked.text,
            "spans": [list(span) for span in marked.turns.values()],
            "notes": dict(marked.notes),
        }

    def _marked(self, messages: list, tools: Any, kwargs: dict[str, Any], wanted: list) -> Marked:
        def render(turns: list, prompt: bool = False, tools: Any = tools) -> str:
            return self._text(kwargs, tools or None, turns, prompt)

        known, has_tools = self._known(kwargs), bool(tools)
        options = {"specials": self.specials, "known": known, "has_tools": has_tools}
        if not (self.has_markers and wanted):
            return mark(render, messages, wanted, **options)
        every = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        try:
            marked = mark(render, messages, every, **options)
        except NotFound:
            if every != wanted:
                raise
            marked = mark(render, messages, [], **options)
            marked.turns = dict(enumerate(self._markers(kwargs, tools, messages)))
            marked.notes[UNCHECKED] += 1
            return marked
        markers = self._markers(kwargs, tools, messages)
        return with_markers(marked, markers, wanted, specials=self.specials, known=known)

    def _known(self, kwargs: dict[str, Any]) -> Habits:
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self.habits:

            def render(turns: list[dict[str, Any]], prompt: bool = False) -> str:
                return self._text(kwargs, None, turns, prompt)

            if len(self.habits) > 100:
                self.habits.clear()
            self.habits[key] = habits(render, self.specials, self.variables.get("eos_token"))
        return self.habits[key]

    def _text(
        self, kwargs: dict[str, Any], tools: Any, messages: list, prompt: bool = False
    ) -> str:
        return self._rendered(kwargs, tools, messages, add_generation_prompt=prompt)[0]

    def _markers(self, kwargs: dict[str, Any], tools: Any, messages: list) -> list:
        return self._rendered(kwargs, tools, messages, return_assistant_tokens_mask=True)[1]

    def _rendered(
        self, kwargs: dict[str, Any], tools: Any, messages: list, **options: bool
    ) -> tuple[str, list]:
        random.seed(0)
        texts, markers = self.render(
            conversations=[messages],
            tools=tools or None,
            chat_template=self.template,
            **options,
            **{**self.variables, **kwargs},
        )
        return texts[0], (markers or [[]])[0]


def _forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the spellings of a conversation that templates are written for, the usual one first.

    They differ where a turn has tool calls: its arguments are a mapping or JSON text, and where it
    says nothing, its content is missing, null or empty.
    """
    plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
    yield plain
    if not any(m.get("tool_calls") for m in plain):
        return
    for silent in ({}, {"content": None}, {"content": ""}):
        for as_text in (False, True):
            if silent or as_text:
                yield [_spelled(m, silent, as_text) for m in plain]


def _spelled(message: dict[str, Any], silent: dict[str, Any], as_text: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not (message.get("content") or "").strip():
        message = {**{k: v for k, v in message.items() if k != "content"}, **silent}
    if as_text:
        calls = copy.deepcopy(calls)
        for call in calls:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}


def _renderer() -> Callable[..., tuple[list[str], list]]:
    """Return transformers' renderer, with a clock that stands still."""
    from transformers.utils import chat_template_utils

    class Still(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Still":
            return cls(*TODAY.timetuple()[:6], tzinfo=tz)

    chat_template_utils.datetime = Still  # type: ignore[misc]
    return chat_template_utils.render_jinja_template  # type: ignore[return-value]


def _checked_today(render: Callable[..., tuple[list[str], list]]) -> None:
    said = "{{ strftime_now('%Y-%m-%d') }}"
    texts, _ = render(conversations=[[{"role": "user", "content": ""}]], chat_template=said)
    if texts[0] != TODAY.strftime("%Y-%m-%d"):
        raise DataError(
            "this transformers tells templates the date in a way the toolkit does not know, so "
            "that tokens would depend on the day; use transformers 5.23"
        )


def _limit_memory(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LOG, _LOG))
    try:
        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: no way to know, and macOS does not hold to the limit anyway
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


def _limit_time(seconds: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _answer(work: Work, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return work.one(job)
    except BadRow as bad:
        return {"said": bad.said, "reason": bad.reason}
    except MemoryError:
        full = out_of_bounds("took more memory than there is for it")
        return {"said": full.said, "reason": full.reason}
    except Exception as error:  # of the template's syntax, or of the toolkit: no row's fault
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _serve(pipe: Connection) -> None:
    limits = json.loads(pipe.recv_bytes())
    try:
        render = _renderer()
        _checked_today(render)
        _limit_memory(limits["memory"])
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {said}"}).encode())
        return
    pipe.send_bytes(b"{}")
    works: dict[str, Work] = {}
    while True:
        try:
            asked = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        if asked["new"] is not None:
            works[asked["key"]] = Work(asked["new"], render)
        for job in asked["jobs"]:
            _limit_time(limits["seconds"])
            answer = _answer(works[asked["key"]], job)
            pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked decides when to stop
    _serve(Connection(int(sys.argv[1])))
