"""Ten chat templates, written after the documented formats of their models, quirks included, and
what of a conversation each of them lets the assistant say.

Owns templates and expectations. Refuses to know how masks are made.

In the templates `«` and `»` stand around what the assistant says: `stock` leaves them out, as the
models' own templates do, `marked` makes generation markers of them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it makes of a turn.

    Attributes:
        says: (messages, index of a turn of the assistant) -> what is supervised of it.
        specials: the special tokens of the model's tokenizer.
        system: whether it takes a system turn.
        tools: whether it prints a list of tools.
        calls: whether it prints calls of tools and their results.
    """

    text: str
    says: Callable[[list[Message], int], str]
    eos: str
    specials: list[str]
    bos: str | None = None
    system: bool = True
    tools: bool = False
    calls: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def stock(self) -> str:
        return self.text.replace("«", "").replace("»", "")

    @property
    def marked(self) -> str:
        return self.text.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def content_of(message: Message) -> str:
    return message.get("content") or ""


def calls_of(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or []]


# ---- ChatML (Qwen 1 and 2, Yi, Hermes): no tools, the newline after the stop token is not said

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}«{{ message['content'] + '<|im_end|>' }}»{{ '\\n' }}
{%- else %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def chatml(messages: list[Message], i: int) -> str:
    return content_of(messages[i]) + "<|im_end|>"


# ---- Llama 3.1: a system turn always, tools in the first turn of the user, one call a turn as a
# bare JSON object, results with the role ipython, contents trimmed, the date

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{ "Environment: ipython\\n" }}{% endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- if tools is not none %}
{%- set first_user_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
{{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'ipython' or message.role == 'tool' %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}{{ "<|eot_id|>" }}
{%- elif message.tool_calls is defined and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}«{{ '{"name": "' + tool_call.name +
 '", "parameters": ' }}{{ tool_call.arguments | tojson }}{{ "}<|eot_id|>" }}»
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»
{%- else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def llama3(messages: list[Message], i: int) -> str:
    for call in calls_of(messages[i]):
        return f'{{"name": "{call["name"]}", "parameters": {as_json(call["arguments"])}}}<|eot_id|>'
    return content_of(messages[i]).strip() + "<|eot_id|>"


# ---- Qwen3: reasoning only after the last question, an empty one where there is none

QWEN3 = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- "# Tools\\n\\n<tools>" }}
{%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
{{- "\\n</tools>\\n\\nReturn calls within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.looking and message.role == "user" and not(message.content.startswith('<tool_response>')
 and message.content.endswith('</tool_response>')) %}
{%- set ns.looking = false %}{% set ns.last_query_index = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == "assistant" %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' -}}«
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
{%- for tool_call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' -}}»{{ '\\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def qwen3(messages: list[Message], i: int) -> str:
    message = messages[i]
    last_query = max(k for k, m in enumerate(messages) if m["role"] == "user")
    reasoning, said = message.get("reasoning_content") or "", content_of(message)
    if not reasoning and "</think>" in said:
        reasoning = said.partition("</think>")[0].rstrip("\n").rpartition("<think>")[2].strip("\n")
        said = said.rpartition("</think>")[2].lstrip("\n")
    calls = [
        f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {args}}}\n</tool_call>'
        for c in calls_of(message)
        for args in [as_json(c["arguments"])]
    ]
    said = "\n".join([said, *calls] if said else calls)
    if i > last_query and (i == len(messages) - 1 or reasoning):
        said = f"<think>\n{reasoning}\n</think>\n\n" + said.lstrip("\n")
    return said + "<|im_end|>"


# ---- Gemma 2: the assistant is called model, no system turn, strict alternation, contents trimmed

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}
{%- else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' }}
{%- if role == 'model' %}«{{ message['content'] | trim + '<end_of_turn>' }}»{{ '\\n' }}
{%- else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def gemma(messages: list[Message], i: int) -> str:
    return content_of(messages[i]).strip() + "<end_of_turn>"


# ---- Mistral v0.3: system and tools go into the last turn of the user, there is no prompt beside
# the end of that turn, identifiers of calls have nine characters

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls)) %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("After the optional system message, roles must alternate") }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}
{{- "[AVAILABLE_TOOLS] " }}{{ tools | tojson }}{{ "[/AVAILABLE_TOOLS]" }}{% endif %}
{%- if loop_messages[-1] == message and system_message is defined or
 (message == user_messages[-1] and system_message is defined) %}
{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{ "[INST] " + message["content"] + "[/INST]" }}{% endif %}
{%- elif message.tool_calls is defined and message.tool_calls -%}«
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.id | length != 9 %}{{ raise_exception("Ids must have length 9!") }}{% endif %}
{%- set out = tool_call.function | tojson %}
{{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{ ", " }}{% else %}{{ "]" + eos_token }}{% endif %}
{%- endfor -%}»
{%- elif message["role"] == "assistant" %}«{{ " " + message["content"] | trim + eos_token }}»
{%- elif message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""


def mistral(messages: list[Message], i: int) -> str:
    calls = [
        as_json(c["function"])[:-1] + f', "id": "{c["id"]}"}}'
        for c in messages[i].get("tool_calls") or []
    ]
    if calls:
        return f"[TOOL_CALLS] [{', '.join(calls)}]</s>"
    return f" {content_of(messages[i]).strip()}</s>"


# ---- Phi 3: another token ends the text than ends a turn

PHI3 = """
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' -}}«
{{- message['content'] + '<|end|>' -}}»{{ '\\n' }}
{%- elif message['role'] in ['system', 'user'] %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""


def phi3(messages: list[Message], i: int) -> str:
    return content_of(messages[i]) + "<|end|>"


# ---- Zephyr: headers that are no special tokens

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»{{ '\\n' -}}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""


def zephyr(messages: list[Message], i: int) -> str:
    return content_of(messages[i]) + "</s>"


# ---- DeepSeek R1: reasoning dropped wherever it comes back, a prompt that opens it, results of
# tools before the answer to them in one turn, arguments as JSON text, a null content beside calls

DEEPSEEK = """{% set ns = namespace(is_tool=false, system_prompt='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set ns.is_tool = false %}
{{- '<｜Assistant｜>' -}}«{{ '<｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}
{%- if not loop.first %}{{ '\\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}
{{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' -}}»
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% set ns.is_tool = false %}
{%- else %}{{ '<｜Assistant｜>' }}{% endif -%}
«{{ content + '<｜end▁of▁sentence｜>' }}»
{%- endif %}
{%- if message['role'] == 'tool' %}
{%- if not ns.is_tool %}{{ '<｜tool▁outputs▁begin｜>' }}{% else %}{{ '\\n' }}{% endif %}
{%- set ns.is_tool = true %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""


def deepseek(messages: list[Message], i: int) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c['name']}\n```json\n"
        f"{as_json(c['arguments'])}\n```<｜tool▁call▁end｜>"
        for c in calls_of(messages[i])
    ]
    said = content_of(messages[i]).rpartition("</think>")[2]
    if calls:
        said = f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>"
    return said + "<｜end▁of▁sentence｜>"


# ---- Granite 3: roles between tokens, a system turn with the date, a turn for the tools

GRANITE = """
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}
{%- set system_message = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " +
 strftime_now('%B %d, %Y') + ".\\nYou are Granite." %}
{%- set loop_messages = messages %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
{{- '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}
{{- '<|end_of_text|>\\n' }}{% endif %}
{%- for message in loop_messages %}
{%- set role = 'tool_response' if message['role'] == 'tool' else message['role'] %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' }}
{%- if message['role'] == 'assistant' -%}«
{{- message.content or '' }}
{%- if message.tool_calls %}
{{- '<|tool_call|>' }}{{ message.tool_calls | map(attribute='function') | list | tojson }}
{%- endif %}
{{- '<|end_of_text|>' -}}»{{ '\\n' }}
{%- else %}{{ message['content'] + '<|end_of_text|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""


def granite(messages: list[Message], i: int) -> str:
    calls = calls_of(messages[i])
    return (
        content_of(messages[i])
        + (f"<|tool_call|>{as_json(calls)}" if calls else "")
        + ("<|end_of_text|>")
    )


# ---- OLMo 2: one token begins and ends a text, the last turn has no newline after it

OLMO = """{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' -}}«{{ message['content'] + eos_token -}}»
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""


def olmo(messages: list[Message], i: int) -> str:
    return content_of(messages[i]) + "<|endoftext|>"


TEMPLATES = {
    "chatml": ChatTemplate(CHATML, chatml, "<|im_end|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": ChatTemplate(
        LLAMA3,
        llama3,
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        bos="<|begin_of_text|>",
        tools=True,
        calls=True,
        kwargs={"date_string": "26 Jul 2024"},
    ),
    "qwen3": ChatTemplate(
        QWEN3, qwen3, "<|im_end|>", ["<|im_start|>", "<|im_end|>"], tools=True, calls=True
    ),
    "gemma": ChatTemplate(
        GEMMA, gemma, "<eos>", ["<start_of_turn>", "<end_of_turn>"], bos="<bos>", system=False
    ),
    "mistral": ChatTemplate(
        MISTRAL,
        mistral,
        "</s>",
        [f"[{s}{n}]" for n in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for s in ("", "/")],
        bos="<s>",
        tools=True,
        calls=True,
    ),
    "phi3": ChatTemplate(
        PHI3, phi3, "<|endoftext|>", ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    ),
    "zephyr": ChatTemplate(ZEPHYR, zephyr, "</s>", []),
    "deepseek": ChatTemplate(
        DEEPSEEK,
        deepseek,
        "<｜end▁of▁sentence｜>",
        [
            *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
            *("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"),
        ],
        bos="<｜begin▁of▁sentence｜>",
        calls=True,
    ),
    "granite": ChatTemplate(
        GRANITE,
        granite,
        "<|end_of_text|>",
        ["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
        tools=True,
        calls=True,
    ),
    "olmo": ChatTemplate(OLMO, olmo, "<|endoftext|>", [], bos="<|endoftext|>"),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "what to look up"}},
                "required": ["word"],
            },
        },
    }
]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(identifier: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


PLAIN = [
    user("What is a list?"),
    assistant("A sequence that can change:\n\n    [1, 2, 3]\n\nIts type is `list`."),
    user("hi"),
    assistant("hi"),  # the same words as the user's
    user("And in one word? <b>assistant</b> {{ x }} {% y %}"),
    assistant("Mutable – ünïcode 🤖 \"quoted\" {'a': 1} </b>"),
]
SPACED = [user(" a \n"), assistant("\n  indented\n"), user("\n"), assistant(" b ")]
SYSTEM = [{"role": "system", "content": "You answer in few words."}, *PLAIN]
ENDS_WITH_USER = [*PLAIN, user("Thank you.")]
REASONING = [
    user("What is 2 + 2?"),
    assistant("Four.", reasoning_content="Two and two."),
    user("And 3 + 3?"),
    assistant("Six.", reasoning_content="Three and three."),
]
THINK_TAGS = [
    user("What is 2 + 2?"),
    assistant("<think>\nTwo and two.\n</think>\n\nFour."),
    user("And 3 + 3?"),
    assistant("Six."),
]
CALLS = [
    user("What is a tuple?"),
    assistant(None, tool_calls=[call("abcdefghi", word="tuple", depth=2)]),
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": '{"found": 1}'},
    assistant("A sequence that cannot change."),
    user("And a set?"),
    assistant(None, tool_calls=[call("bcdefghij", where={"in": ["docs"]}, word='a "set"')]),
    {"role": "tool", "tool_call_id": "bcdefghij", "name": "look_up", "content": "[]"},
    assistant("A collection without order."),
]
ENDS_WITH_CALL = CALLS[:2]
