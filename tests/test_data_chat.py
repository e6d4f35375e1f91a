"""Masks of ten chat templates equal what the assistant says, exactly, from tokens of a real
tokenizer; templates that leave things out, or run away, end in an error.
"""

import argparse
import datetime
import json
import random
import subprocess
from pathlib import Path

import chat_templates as templates
import pytest
from chat_templates import PLAIN, SYSTEM, TEMPLATES, TOOLS, ChatTemplate, assistant, call, user
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.chat import masks
from toolkit.data.chat import template as template_module
from toolkit.data.chat.checks import EARLIER_REASONING, NOT_PRINTED, check_all_printed
from toolkit.data.chat.long_chats import find_spans_of_similar_answers
from toolkit.data.chat.masks import Rendered
from toolkit.data.chat.template import Chat, select_supervised_turns
from toolkit.data.chat.traits import find_traits
from toolkit.data.examples.recognise import Conversation
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.tokens.encode import Encoder
from toolkit.errors import DataError, ModelError

CONVERSATIONS = {
    "plain": PLAIN,
    "spaced": templates.SPACED,
    "system": SYSTEM,
    "ends_with_user": templates.ENDS_WITH_USER,
    "reasoning": templates.REASONING,
    "think_tags": templates.THINK_TAGS,
}
THINKING = ("qwen3",)  # whose templates print a reasoning_content
CALLS = {"calls": templates.CALLS, "ends_with_call": templates.ENDS_WITH_CALL}


@pytest.fixture(scope="module")
def vocabulary() -> str:
    """A byte-level BPE of 1000 tokens, trained on modules of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


TEXTS = [Path(module.__file__).read_text("utf-8") for module in (argparse, subprocess)]


def tokenizer_of(vocabulary: str, template: ChatTemplate, text: str | None = None):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(vocabulary),
        eos_token=template.eos,
        bos_token=template.bos,
        additional_special_tokens=template.specials,
    )
    tokenizer.chat_template = template.stock if text is None else text
    return tokenizer


def takes(name: str, conversation: list[dict]) -> bool:
    template = TEMPLATES[name]
    if name == "gemma" and conversation[-1]["role"] == "tool":
        return False
    return template.system or conversation[0]["role"] != "system"


def conversations(name: str) -> dict[str, Conversation]:
    template = TEMPLATES[name]
    plain = {k: Conversation(c) for k, c in CONVERSATIONS.items() if takes(name, c)}
    if name not in THINKING:
        del plain["reasoning"]
    if template.calls:
        tools = TOOLS if template.tools else None
        plain |= {k: Conversation(c, tools=tools) for k, c in CALLS.items()}
    return plain


def expected(name: str, messages: list[dict]) -> list[str]:
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return [TEMPLATES[name].says(messages, i) for i in turns]


def aligned(turns: list[str]) -> list[str]:
    """Return what is supervised of learned turns: an empty thought only if all of them think."""
    block = "<think>\n\n</think>\n\n"
    if all(turn.startswith("<think>") for turn in turns):
        return turns
    return [turn.removeprefix(block) for turn in turns]


def said(rendered: Rendered | BadRow) -> list[str]:
    assert isinstance(rendered, Rendered), rendered
    return [rendered.text[begin:end] for begin, end in rendered.spans]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned_is_what_the_assistant_says(name, vocabulary):
    template, chats = TEMPLATES[name], conversations(name)
    tokenizer = tokenizer_of(vocabulary, template)
    rendered = list(map(Chat(tokenizer).render, chats.values()))
    encoder = Encoder(tokenizer, FinetuneDataConfig(), 5000)
    encoded = encoder.encode_examples(list(chats.values()))
    for (kind, chat), text, tokens in zip(chats.items(), rendered, encoded, strict=True):
        turns = aligned(expected(name, chat.messages))
        assert said(text) == turns, kind
        # DeepSeek's prompt opens a reasoning that these lack; both drop earlier ones.
        notes = {masks.OTHER_PROMPT} if name == "deepseek" else set()
        notes |= {EARLIER_REASONING} if kind in ("reasoning", "think_tags") else set()
        allowed = notes if name in (*THINKING, "deepseek") else set()
        # Qwen3's last answer has an empty thought, and `aligned` tells what comes of it.
        thoughts = {note for note in text.notes if "empty <think></think> block" in note}
        assert set(text.notes) - thoughts <= allowed, kind
        assert bool(thoughts) == (
            name == "qwen3" and expected(name, chat.messages)[-1].startswith("<think>\n\n</think>")
        )
        # From the tokens, and all others are exactly the rest.
        decoded = [tokenizer.decode(tokens.input_ids[b:e]) for b, e in tokens.spans]
        assert decoded == turns, kind
        assert tokenizer.decode(tokens.input_ids) == text.text, kind
        if template.bos and template.bos != template.eos:
            assert list(tokens.input_ids).count(tokenizer.bos_token_id) == 1
    if template.calls:
        assert set(CALLS) <= set(chats)


@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_markers_tell_the_same(name, vocabulary):
    template, chats = TEMPLATES[name], conversations(name)
    tokenizer = tokenizer_of(vocabulary, template, template.marked)
    rendered = list(map(Chat(tokenizer).render, chats.values()))
    for (kind, chat), text in zip(chats.items(), rendered, strict=True):
        turns = aligned(expected(name, chat.messages))
        assert said(text) == turns, kind
        if kind == "spaced" or (name == "deepseek" and kind in CALLS):
            # transformers learns tokens across an edge; and it drops the null content that this
            # template asks for.
            continue
        theirs = tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **template.kwargs,
        )
        ids = [i for i, m in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if m]
        assert tokenizer.decode(ids) == "".join(expected(name, chat.messages)), kind


def plain_render(template: ChatTemplate, tokenizer, tries: list):
    """Render in this process: the templates of this file can be trusted."""
    variables = tokenizer.special_tokens_map

    def render(messages, prompt=False, tools=None):
        tries.append(messages)
        texts, _ = render_jinja_template(
            [messages],
            chat_template=template.stock,
            add_generation_prompt=prompt,
            **variables,
            **template.kwargs,
        )
        return texts[0]

    return render


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_costs_a_few_renderings(name, vocabulary):
    template, tries = TEMPLATES[name], []
    tokenizer = tokenizer_of(vocabulary, template)
    specials = tuple(tokenizer.all_special_tokens)
    render = plain_render(template, tokenizer, tries)
    known = find_traits(render, specials, template.bos, template.eos)
    for kind, messages in CONVERSATIONS.items():
        if not takes(name, messages):
            continue
        tries.clear()
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        found = masks.EdgeSearch(render, messages, specials, known).find_spans(turns)
        assert [found.text[b:e] for b, e in found.spans] == expected(name, messages), kind
        assert len(tries) <= 10 * len(turns), kind


def long_talk(name: str, pairs: int) -> list[dict]:
    """A long conversation, of short and long contents with space around them."""
    rng, says = random.Random(name), ["Yes.", "a", "An answer of some length.", "two\n\nlines"]
    says += [] if name in ("llama3", "gemma", "qwen3") else [" spaced "]
    turns = [turn for i in range(pairs) for turn in (user(f"{i}?"), assistant(rng.choice(says)))]
    return [{"role": "system", "content": "Be brief."}, *turns] if TEMPLATES[name].system else turns


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_long_conversation_costs_a_few_renderings_in_all(name, vocabulary):
    template, tries = TEMPLATES[name], []
    tokenizer, messages = tokenizer_of(vocabulary, template), long_talk(name, 40)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    specials = tuple(tokenizer.all_special_tokens)
    render = plain_render(template, tokenizer, tries)
    known = find_traits(render, specials, template.bos, template.eos)
    one_by_one = masks.EdgeSearch(render, messages, specials, known).find_spans(turns)
    tries.clear()
    search = masks.EdgeSearch(render, messages, specials, known)
    check_all_printed(search, turns, has_tools=False)
    found = find_spans_of_similar_answers(search, turns)
    assert found == one_by_one
    assert said(found) == expected(name, messages)
    assert len(tries) < 120
    assert find_spans_of_similar_answers(search, turns[:10]) is None  # of few each is looked at


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_a_turn_that_is_printed_otherwise_is_found_by_itself(name, vocabulary):
    """Only turn 35 has another header and stop token, which no turn that is tried tells."""
    template, messages = TEMPLATES[name], long_talk("zephyr", 40)[1:]
    for change in (".replace('assistant', 'assistant odd')", " + ' (odd)'"):
        mark = "message['role']" if change.startswith(".") else "message['content']"
        odd = template.stock.replace(mark, f"({mark}{change} if loop.index == 36 else {mark})")
        assert odd != template.stock
        tokenizer = tokenizer_of(vocabulary, template, odd)
        chat = Chat(tokenizer)
        result = chat.render(Conversation(messages))
        known = chat.templates["default"]._find_traits({})
        render = lambda m, prompt=False, odd=odd, tokenizer=tokenizer: render_jinja_template(  # noqa: E731
            [m], chat_template=odd, add_generation_prompt=prompt, **tokenizer.special_tokens_map
        )[0][0]
        search = masks.EdgeSearch(render, messages, tuple(tokenizer.all_special_tokens), known)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        assert find_spans_of_similar_answers(search, turns) is None
        one_by_one = catch_bad_row(search.find_spans, turns)
        if isinstance(one_by_one, BadRow):
            assert str(result).startswith(str(one_by_one))
        else:
            assert said(result) == said(one_by_one)


def awkward(name: str, rng: random.Random) -> list[dict]:
    """A conversation of what could be taken for something else: headers, stop tokens, repeats."""
    template = TEMPLATES[name]
    pieces = ["a", "ok", "assistant", "\n", " ", "user", "{{ x }}", "Qz4vKx7Wb", "</think>x"]
    pieces += ["<|user|>\nhi<|end|>", template.eos, "<|im_start|>assistant\n", "[/INST]", "é🤖"]
    pieces += [template.specials[0]] if template.specials else []
    says = lambda: "".join(rng.choices(pieces, k=rng.choice([1, 1, 2, 5])))  # noqa: E731
    turns = []
    if template.system and rng.random() < 0.3:
        turns.append({"role": "system", "content": says()})
    for _ in range(rng.randint(1, 4)):
        turns.append(user(says()))
        if template.calls and rng.random() < 0.4 and name != "deepseek":
            content = {"role": "tool", "tool_call_id": "abcdefghi", "content": says()}
            turns += [assistant(None, tool_calls=[call("abcdefghi", word=says())]), content]
        turns.append(assistant(says() + rng.choice(["x", "."])))
    return turns


@pytest.mark.parametrize("name", TEMPLATES)
def test_awkward_conversations_are_right_or_refused(name, vocabulary):
    template = TEMPLATES[name]
    tokenizer = tokenizer_of(vocabulary, template)
    specials = tuple(tokenizer.all_special_tokens)
    render = plain_render(template, tokenizer, [])
    known = find_traits(render, specials, template.bos, template.eos)
    rng, right = random.Random(name), 0
    for _ in range(60):
        messages = awkward(name, rng)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        try:
            found = masks.EdgeSearch(render, messages, specials, known).find_spans(turns)
        except BadRow:
            continue
        texts = [found.text[b:e] for b, e in found.spans]
        assert texts == expected(name, messages), messages
        right += 1
    assert right > 50


_EACH = "{%% for m in messages %%}%s{%% endfor %%}"
_LOOP = "{%% for m in messages %%}%s{%% endfor %%}"
_ASKED = "{%% if add_generation_prompt %%}%s{%% endif %%}"
_PLAIN_TURN = "<|sh|>{{ m.role }}<|eh|>{{ m.content }}<|e|>"
_LINE_TURN = "<|sh|>{{ m.role }}<|eh|>{{ '\\n' }}{{ m.content }}<|e|>{{ '\\n' }}"
_IM_TURN = "<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}"
_THINK = "<|im_start|>assistant{{ '\\n' }}<think>{{ '\\n' }}"
HARD = {
    # The prompt ends every text, whether it was asked for or not.
    "prompt_unasked": (_EACH % _PLAIN_TURN + "<|sh|>assistant<|eh|>", "%s<|e|>"),
    "prompt_unasked_of_two_stop_tokens": (
        "<s><|sh|>system<|eh|>Be nice.<|e|>"
        + _EACH % _PLAIN_TURN.replace("<|e|>", "<|r|><|e|>")
        + "<|sh|>assistant<|eh|>",
        "%s<|r|><|e|>",
    ),
    # Other white space at the end of the prompt than at the end of the header.
    "prompt_of_two_lines": (
        _EACH % _LINE_TURN + _ASKED % "<|sh|>assistant<|eh|>{{ '\\n\\n' }}",
        "%s<|e|>",
    ),
    "prompt_of_a_space": (
        _EACH % _LINE_TURN + _ASKED % "<|sh|>assistant<|eh|>{{ ' ' }}",
        "%s<|e|>",
    ),
    "no_prompt": (_EACH % _IM_TURN, "%s<|im_end|>"),
    "turn_before_the_stop_token": (
        _EACH % _PLAIN_TURN.replace("<|e|>", "{{ '\\n-- ' }}{{ loop.index }}<|e|>")
        + _ASKED % "<|sh|>assistant<|eh|>",
        "%s\n-- {turn}<|e|>",
    ),
    "length_before_the_stop_token": (
        _EACH % _PLAIN_TURN.replace("<|e|>", "{{ '\\n-- ' }}{{ m.content | length }}<|e|>")
        + _ASKED % "<|sh|>assistant<|eh|>",
        "%s\n-- {length}<|e|>",
    ),
    # Words at the end of the prompt that the turns do not have.
    "prompt_of_an_empty_thought": (
        _EACH % _LINE_TURN
        + _ASKED % "<|sh|>assistant<|eh|>{{ '\\n' }}<|channel>thought{{ '\\n' }}<channel|>",
        "%s<|e|>",
    ),
    "prompt_of_words": (
        _EACH % _LINE_TURN
        + _ASKED % "<|sh|>assistant<|eh|>{{ '\\n' }}Here are my steps:{{ '\\n' }}",
        "%s<|e|>",
    ),
    "begins_each_turn": (
        _EACH % "<s>{{ m.role }}: {{ m.content }}<|e|>" + _ASKED % "<s>assistant: ",
        "%s<|e|>",
    ),
    # The prompt stands after questions whether it was asked for or not.
    "prompt_after_questions": (
        "{% for m in messages %}{% if m.role == 'user' %}<|sh|>user<|eh|>{{ m.content }}<|e|>"
        "{% if loop.last or loop.nextitem.role != 'user' %}<|sh|>assistant<|eh|>{% endif %}"
        "{% else %}<|r|>{{ m.content }}<|e|>{% endif %}{% endfor %}",
        "<|r|>%s<|e|>",
    ),
}
ANSWERS = [
    user("What is struck in <s>this</s>?"),
    assistant("Here it is: <s>this</s>."),
    user("Four words?"),
    assistant("Four"),
    user("Four"),
    assistant("Here are the words."),
]


def hard_chat(vocabulary, text: str) -> Chat:
    specials = ["<|sh|>", "<|eh|>", "<|e|>", "<|r|>", "<|im_start|>", "<|im_end|>"]
    template = ChatTemplate("", templates.chatml, "</s>", specials, bos="<s>")
    return Chat(tokenizer_of(vocabulary, template, text))


@pytest.mark.parametrize("case", HARD)
def test_what_follows_the_prompt_is_learned(case, vocabulary):
    text, turn = HARD[case]
    result = hard_chat(vocabulary, text).render(Conversation(ANSWERS))
    numbered = [(i, m["content"]) for i, m in enumerate(ANSWERS) if m["role"] == "assistant"]
    assert said(result) == [
        (turn % c).replace("{turn}", str(i + 1)).replace("{length}", str(len(c)))
        for i, c in numbered
    ]
    thoughtful = case in ("prompt_of_an_empty_thought", "prompt_of_words")
    assert result.notes == ({masks.OTHER_PROMPT: 1} if thoughtful else {})


def test_what_the_prompt_holds_is_no_answer(vocabulary):
    thought = "<think>\nTwo and two.\n</think>\n\nFour."
    chat = hard_chat(vocabulary, _EACH % _IM_TURN + _ASKED % _THINK)
    result = chat.render(Conversation([user("2 + 2?"), assistant(thought)] * 2))
    assert said(result) == [thought.removeprefix("<think>\n") + "<|im_end|>"] * 2
    # Where the turn has another thought than the prompt, nothing is the answer to it.
    chat = hard_chat(
        vocabulary, _EACH % _IM_TURN + _ASKED % (_THINK + "{{ '\\n' }}</think>{{ '\\n' }}")
    )
    result = chat.render(Conversation([user("2 + 2?"), assistant(thought)]))
    assert "prompt for turn 1 (assistant) continues with" in str(result)
    assert "enable_thinking" in str(result)


def test_an_answer_without_a_question(vocabulary):
    messages = [assistant("How may I help?"), user("Not."), assistant("Well.")]
    for prompt in ("<|im_start|>assistant{{ '\\n' }}", _THINK):
        text = "{{ messages[0].role[:0] }}" + _EACH % _IM_TURN + _ASKED % prompt
        result = hard_chat(vocabulary, text).render(Conversation(messages))
        assert said(result) == ["How may I help?<|im_end|>", "Well.<|im_end|>"]


def test_results_of_tools_are_not_learned_though_they_stand_within_the_turn(vocabulary):
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}<|sh|>user<|eh|>{{ m.content }}<|e|>"
        "{% elif m.role == 'assistant' %}{% if messages[loop.index0 - 1].role != 'tool' %}"
        "<|sh|>assistant<|eh|>{% endif %}{% if m.tool_calls %}{% set call = m.tool_calls[0] %}"
        "<|r|>{{ call.function.name }}({{ call.function.arguments | tojson }})<|r|>"
        "{% if not loop.last %}{{ loop.nextitem.content }}{% endif %}"
        "{% else %}{{ m.content }}<|e|>{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<|sh|>assistant<|eh|>"
        "{% endif %}"
    )
    result = hard_chat(vocabulary, text).render(Conversation(templates.CALLS))
    calls = ['look_up({"word": "tuple", "depth": 2})', None]
    calls[1] = 'look_up({"where": {"in": ["docs"]}, "word": "a \\"set\\""})'
    assert said(result) == [
        f"<|r|>{calls[0]}<|r|>",
        "A sequence that cannot change.<|e|>",
        f"<|r|>{calls[1]}<|r|>",
        "A collection without order.<|e|>",
    ]


# ---- Which turns


def test_which_turns_are_learned(vocabulary):
    chat = Conversation(PLAIN, supervised_from=4)
    assert (
        select_supervised_turns(chat, "auto") == select_supervised_turns(chat, "completion") == [5]
    )
    assert select_supervised_turns(chat, "assistant") == [1, 3, 5]
    assert select_supervised_turns(chat, "last_assistant") == [5]
    assert select_supervised_turns(Conversation(PLAIN), "auto") == [1, 3, 5]
    for template in (TEMPLATES["qwen3"].stock, TEMPLATES["qwen3"].marked):
        tokenizer = tokenizer_of(vocabulary, TEMPLATES["qwen3"], template)
        turns = expected("qwen3", PLAIN)
        wanted = {"auto": turns[2:], "assistant": turns, "last_assistant": turns[2:]}
        for supervise, texts in wanted.items():
            result = Chat(tokenizer, supervise=supervise).render(chat)
            assert said(result) == aligned(texts)
        result = Chat(tokenizer, supervise="all").render(chat)
        assert said(result) == [result.text]


def test_template_arguments_of_a_row(vocabulary):
    tokenizer = tokenizer_of(vocabulary, TEMPLATES["llama3"])
    chats = [Conversation(PLAIN, template_kwargs=k) for k in ({}, {"date_string": "1 May 1999"})]
    fixed, given = map(Chat(tokenizer).render, chats)
    assert "Today Date: 26 Jul 2024" in fixed.text  # whatever the day
    assert "Today Date: 1 May 1999" in given.text
    assert said(fixed) == said(given)


# A tool's result repeats the name of the function, as Gemma 4's does.
_WITH_CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|r|>response:{{ m.name }}{{ m.content }}<|e|>"
    "{% else %}<|sh|>{{ m.role }}<|eh|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|im_start|>call:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}<|im_end|>{% endfor %}"
    "<|e|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|sh|>assistant<|eh|>{% endif %}"
)


@pytest.mark.parametrize("last", [True, 1.5, None, [], {}, [False], "text", 3, "nothing at all"])
@pytest.mark.parametrize("amid", [False, True])
def test_the_end_of_a_call_whatever_its_last_argument(vocabulary, last, amid):
    arguments = {} if last == "nothing at all" else {"word": "tuple", "last": last}
    asked = [user("What is a tuple?"), assistant(None, tool_calls=[call("abcdefghi", **arguments)])]
    found = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": "found: 1"}
    rest = [found, assistant("A fixed sequence.")] if amid else []
    result = hard_chat(vocabulary, _WITH_CALLS).render(Conversation([*asked, *rest]))
    said_by_call = f"<|im_start|>call:look_up{json.dumps(arguments)}<|im_end|><|e|>"
    assert said(result) == [said_by_call, "A fixed sequence.<|e|>"][: 1 + amid]
    assert not result.notes


def test_a_call_whose_edges_are_not_found_is_not_spelled_otherwise(vocabulary):
    """The text that would be found is not what the tokenizer renders."""
    length = "{{ (m.content or m.tool_calls[0].function.arguments.word) | length }}<|e|>"
    varies = _WITH_CALLS.replace("{% endfor %}<|e|>", "{% endfor %}" + length)
    chat = [user("What is a tuple?"), assistant(None, tool_calls=[call("abcdefghi", word="tuple")])]
    result = hard_chat(vocabulary, varies).render(Conversation(chat))
    assert isinstance(result, BadRow)
    assert "cannot tell where turn 1 (assistant) ends" in str(result)


def test_special_tokens_with_words_between_close_a_turn_together(vocabulary):
    """As Kimi K3 does."""
    close = "<|e|>response<|r|><|e|>message<|r|><|im_end|>"
    each = _LOOP % ("<|sh|>{{ m.role }}<|eh|>{{ m.content }}" + close)
    result = hard_chat(vocabulary, each + _ASKED % "<|sh|>assistant<|eh|>").render(
        Conversation(PLAIN)
    )
    assert said(result) == [m["content"] + close for m in PLAIN[1::2]]
    assert not result.notes


# What a template prints of an answer, of a call and of its result; <|sh|> opens every turn.
_TURNS = (
    "{%% for m in messages %%}{%% set end = '<|im_end|>' if loop.last else '<|r|>' %%}"
    "{%% if m.tool_calls %%}{%% set f = m.tool_calls[0].function %%}"
    "<|sh|>assistant<|eh|>[{{ f.name }}{{ f.arguments | tojson }}]%s"
    "{%% elif m.role == 'tool' %%}%s{%% else %%}<|sh|>{{ m.role }}<|eh|>{{ m.content }}%s"
    "{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}<|sh|>assistant<|eh|>{%% endif %%}"
)
_CALLING = [
    user("What is a tuple?"),
    assistant("", tool_calls=[call("abcdefghi", word="tuple")]),
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": "found: 1"},
    assistant("A fixed sequence."),
]
_CALLED = '[look_up{"word": "tuple"}]'


def test_a_stop_token_of_calls_that_is_another_at_the_end_is_refused(vocabulary):
    """<|r|> may end the call, or begin its result."""
    tool = "<|sh|>tool<|eh|>{{ m.content }}<|e|>"
    answer = "{{ end if loop.last and m.role == 'assistant' else '<|e|>' }}"
    turns = _TURNS % ("<|im_start|>{{ end }}", tool, answer)
    result = hard_chat(vocabulary, turns).render(Conversation(_CALLING))
    assert "cannot tell where turn 1 (assistant) ends" in str(result)
    same = turns.replace("<|im_start|>{{ end }}", "<|im_start|><|r|>")
    result = hard_chat(vocabulary, same).render(Conversation(_CALLING))
    assert said(result) == [_CALLED + "<|im_start|><|r|>", "A fixed sequence.<|im_end|>"]


def test_what_follows_a_call_where_answers_have_no_stop_token(vocabulary):
    """A plain answer in the place of the call has nothing of that after it."""
    turns = _TURNS % ("<|r|>\n\n", "<|im_start|>{{ m.content }}\n", "\n")
    result = hard_chat(vocabulary, turns).render(Conversation(_CALLING))
    assert said(result) == [_CALLED + "<|r|>", "A fixed sequence."]
    turns = _TURNS % ("<|r|>\nResult: ", "{{ m.content }}\n", "\n")
    result = hard_chat(vocabulary, turns).render(Conversation(_CALLING))
    assert "'Result:' follows its tool calls" in str(result)


def test_a_stop_token_between_turns_only(vocabulary):
    """The last turn has none, which is noted; the user's may be the last."""
    between = _LOOP % "<|sh|>{{ m.role }}<|eh|>{{ m.content }}{{ '<|e|>' * (not loop.last) }}"
    chat = hard_chat(vocabulary, between + _ASKED % "<|e|><|sh|>assistant<|eh|>")
    answers = [m["content"] for m in PLAIN[1::2]]
    result = chat.render(Conversation(PLAIN))
    assert said(result) == [answers[0] + "<|e|>", answers[1] + "<|e|>", answers[2]]
    assert result.notes == {masks.NO_STOP: 1}
    result = chat.render(Conversation([*PLAIN, user("Thanks.")]))
    assert said(result) == [answer + "<|e|>" for answer in answers]
    assert not result.notes


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ("def f(x):\n    return 'a\\b' + \"c\"", "{{ f.arguments.word }}"),  # raw, as in XML
        ('["alpha", "beta", "ü"]', "{{ f.arguments.word | tojson(ensure_ascii=false) }}"),
    ],
)
def test_a_call_may_repeat_what_the_user_and_a_tool_said(vocabulary, asked, printed):
    word = json.loads(asked) if asked.startswith("[") else asked
    call_turn = assistant("", tool_calls=[call("abcdefghi", word=word)])
    found = {**_CALLING[2], "content": asked}
    messages = [user(asked), call_turn, found, call_turn, found, assistant("Done.")]
    turns = _TURNS % ("<|e|>", "<|sh|>tool<|eh|>{{ m.content }}<|e|>", "<|e|>")
    turns = turns.replace("{{ f.arguments | tojson }}", f"<word>{printed}</word>")
    result = hard_chat(vocabulary, turns).render(Conversation(messages))
    assert said(result) == [f"[look_up<word>{asked}</word>]<|e|>"] * 2 + ["Done.<|e|>"]


def test_a_user_who_says_only_a_stop_token(vocabulary):
    template = ChatTemplate("", templates.chatml, "<|endofthetext|>", ["<|im_start|>"])
    text = TEMPLATES["chatml"].stock.replace("<|im_end|>", "<|endofthetext|>")
    tokenizer = tokenizer_of(vocabulary, template, text)
    messages = [user("Hi"), assistant("Hello."), user("<|endofthetext|>"), assistant("Yes?")]
    result = Chat(tokenizer).render(Conversation(messages))
    assert said(result) == ["Hello.<|endofthetext|>", "Yes?<|endofthetext|>"]


def test_a_reasoning_is_no_header(vocabulary):
    """As Magistral's: printed before the answer, by a template that has no generation prompt."""
    thought = "{{ '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content }}"
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}<|sh|>{{ m.content }}<|eh|>{% else %}"
        + f"{thought}{{{{ m.content }}}}<|e|>{{% endif %}}{{% endfor %}}"
    )
    messages = [user("2 + 2?"), assistant("Four.", reasoning_content="Twice two."), user("So?")]
    result = hard_chat(vocabulary, text).render(Conversation([*messages, assistant("Yes.")]))
    assert said(result) == ["[THINK]Twice two.[/THINK]Four.<|e|>", "Yes.<|e|>"]


def test_an_answer_in_two_parts_each_with_a_header(vocabulary):
    """As gpt-oss prints a thought and an answer; earlier thoughts are dropped from the prompt."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking and loop.index > messages | length - 2 %}"
        "<|sh|>assistant<|r|>analysis<|eh|>{{ m.thinking }}<|e|>{% endif %}"
        "<|sh|>assistant<|r|>final<|eh|>{{ m.content }}<|im_end|>"
        "{% else %}<|sh|>{{ m.role }}<|eh|>{{ m.content }}<|e|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|sh|>assistant{% endif %}"
    )
    turns = [user("2 + 2?"), assistant("Four.", thinking="Twice two.")]
    result = hard_chat(vocabulary, text).render(Conversation([*turns, *turns]))
    final = "<|r|>final<|eh|>Four.<|im_end|>"
    thought = f"<|r|>analysis<|eh|>Twice two.<|e|><|sh|>assistant{final}"
    assert said(result) == [final, thought]


def test_a_turn_whose_prompt_holds_its_beginning_is_refused(vocabulary):
    """As DeepSeek V3.2 without `thinking`: `</think>` ends the prompt, and is printed once."""
    each = (
        _LOOP % "<|sh|>{{ m.role }}<|eh|>{{ '</think>' * (m.role == 'assistant') }}"
        "{{ m.content }}<|e|>"
    )
    asked = _ASKED % "<|sh|>assistant<|eh|><think></think>"
    result = hard_chat(vocabulary, each + asked).render(Conversation(PLAIN[:2]))
    assert isinstance(result, BadRow)
    assert "holds '</think>' already" in str(result)


def test_markers_confirm_what_is_learned_and_do_not_move_it(vocabulary):
    """Templates often mark what the prompt holds, and the newline behind the stop token."""
    wide = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|sh|>assistant<|eh|>"
        "{% generation %}<think>\n\n</think>\n\n{{ m.content }}<|e|>\n{% endgeneration %}"
        "{% else %}<|sh|>{{ m.role }}<|eh|>{{ m.content }}<|e|>\n{% endif %}{% endfor %}"
    )
    asked = _ASKED % "<|sh|>assistant<|eh|><think>\n\n</think>\n\n"
    result = hard_chat(vocabulary, wide + asked).render(Conversation(PLAIN))
    assert said(result) == [m["content"] + "<|e|>" for m in PLAIN[1::2]]
    assert not result.notes


def test_a_template_without_a_stop_token_is_noted(vocabulary):
    base = TEMPLATES["chatml"]
    bare = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    bare += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    result = Chat(tokenizer_of(vocabulary, base, bare)).render(Conversation(PLAIN))
    assert said(result) == [m["content"] for m in PLAIN[1::2]]
    assert result.notes == {masks.NO_STOP: 3}
    plain = base.stock.replace("<|im_", "<im_")  # text that ends a turn and is no token
    result = Chat(tokenizer_of(vocabulary, base, plain)).render(Conversation(PLAIN))
    assert said(result) == [m["content"] + "<im_end|>" for m in PLAIN[1::2]]
    assert result.notes == {masks.NO_STOP: 3}


# ---- What is refused

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
REFUSED = {
    "no_content": (_LOOP % "<|im_start|>{{ m.role }}<|im_end|>", PLAIN, "content of turn 0 (user)"),
    "no_assistant": (
        _LOOP % ("{% if m.role == 'user' %}" + _TURN + "{% endif %}"),
        PLAIN,
        "content of turn 1 (assistant)",
    ),
    "no_system": (
        _LOOP % ("{% if m.role != 'system' %}" + _TURN + "{% endif %}"),
        SYSTEM,
        "content of turn 0 (system)",
    ),
    "first_turns_only": (
        "{% for m in messages[:2] %}" + _TURN + "{% endfor %}",
        PLAIN,
        "content of turn 2 (user)",
    ),
    "no_calls": (
        _LOOP % _TURN.replace("m.content", "m.content or ''"),
        templates.CALLS,
        "tool call",
    ),
    "one_call": (
        TEMPLATES["qwen3"].stock.replace("message.tool_calls or []", "message.tool_calls[:1]"),
        [
            user("What is a tuple?"),
            assistant(None, tool_calls=[call("abcdefghi", word="a"), call("bcdefghij", word="b")]),
        ],
        "tool call 'look_up' of turn 1",
    ),
    "content_beside_calls": (
        TEMPLATES["llama3"].stock,
        [
            user("What is a tuple?"),
            assistant("I look.", tool_calls=[call("abcdefghi", word="tuple")]),
        ],
        "content of turn 1 (assistant) next to its tool calls",
    ),
    "twice": (_LOOP % (_TURN + "{{ m.content }}"), PLAIN, "prints turn 1 (assistant) 2 times"),
    "says_no": (TEMPLATES["gemma"].stock, SYSTEM, "refuses turn 0 (system): System role not"),
    "says_no_later": (
        TEMPLATES["gemma"].stock,
        [*PLAIN, assistant("More.")],
        "refuses turn 6 (assistant): Conversation roles must alternate",
    ),
    "depends_on_length": (
        _LOOP % (_TURN + "{{ (messages[1].content.split() | length) * 'x' }}"),
        PLAIN,
        "cannot tell where turn 1 (assistant) ends",
    ),
    "stub": (
        _LOOP
        % _TURN.replace(
            "{{ m.content }}",
            "{% if m.content | length > 40 and not loop.last %}[...]{% else %}{{ m.content }}"
            "{% endif %}",
        ),
        PLAIN,
        "only a part, of the content of turn 1 (assistant)",
    ),
    "cut": (
        _LOOP % _TURN.replace("m.content", "m.content[:10]"),
        PLAIN,
        "content of turn 0 (user)",
    ),
    "no_reasoning": (
        TEMPLATES["llama3"].stock,
        templates.REASONING,
        "nothing of the reasoning of turn 3 (assistant); use another (data.chat_template), or",
    ),
    "no_thought": (
        _LOOP % _TURN.replace("m.content", "m.content.split('</think>')[-1]"),
        templates.THINK_TAGS[:2],
        "nothing of the reasoning of turn 1 (assistant)",
    ),
    "begins_with_the_assistant": (
        TEMPLATES["gemma"].stock,
        PLAIN[1:],
        ". Let it begin with a turn of the user",
    ),
    "header_of_the_length": (
        _LOOP
        % "### Turn {{ loop.index }} of {{ messages|length }} ({{ m.role }})\n{{ m.content }}</s>"
        + "{% if add_generation_prompt %}### Turn {{ messages|length + 1 }} of "
        "{{ messages|length + 1 }} (assistant)\n{% endif %}",
        PLAIN[:4],
        "continues with '2 (assistant)",
    ),
    "system_text_of_the_template_in_the_first_turn": (
        _LOOP % _TURN.replace("{{ m.content", "{{ 'Be good. ' * loop.first + m.content")
        + _ASKED % "<|im_start|>assistant\n",
        PLAIN[1:],
        "prints 'Be good. ' before turn 0",
    ),
    "no_prompt_and_words": (
        _LOOP % _TURN.replace("{{ m.content", "{{ 'Sure! ' * (m.role == 'assistant') + m.content"),
        PLAIN,
        "no generation prompt that tells whether the assistant says it",
    ),
    "big_loop": ("{% for i in range(10**9) %}{% endfor %}", PLAIN, "Range too big"),
    "two_bos": ("<s><s>" + TEMPLATES["chatml"].stock, PLAIN, "expected one '<s>'"),
    "wrong_markers": (
        TEMPLATES["chatml"].stock.replace("{%- for", "{% generation %}x{% endgeneration %}{%- for"),
        PLAIN,
        "generation marker",
    ),
    "marked_user": (
        "{% generation %}" + TEMPLATES["chatml"].stock + "{% endgeneration %}",
        PLAIN,
        "generation marker",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, vocabulary):
    text, messages, match = REFUSED[case]
    template = ChatTemplate("", templates.chatml, "<|im_end|>", ["<|im_start|>"], bos="<s>")
    chat = Chat(tokenizer_of(vocabulary, template, text))
    result = chat.render(Conversation(messages))
    assert isinstance(result, BadRow), result
    assert match in str(result)
    # The next one is not harmed, and the template is to blame, not the process.
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))
    assert said(chat.render(Conversation(PLAIN))) == expected("chatml", PLAIN)


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_printed_or_the_row_refused(name, vocabulary):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES[name]))
    result = chat.render(Conversation(templates.REASONING))
    silent = [{k: m[k] for k in ("role", "content")} for m in templates.REASONING]
    without = chat.render(Conversation(silent))
    if name in THINKING:
        assert "Three and three." in said(result)[-1]
        assert result.notes == {EARLIER_REASONING: 1}
    else:
        assert result.reason == "reasoning not printed"
        whole = Chat(tokenizer_of(vocabulary, TEMPLATES[name]), supervise="all")
        assert whole.render(Conversation(templates.REASONING)).reason == result.reason
    assert said(without) == aligned(expected(name, silent))


def test_keys_of_turns_that_are_not_printed_are_counted(vocabulary):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))
    messages = [{**m, "stamp": i, "mood": "glad"} for i, m in enumerate(PLAIN)]
    unused = {NOT_PRINTED.format(key): 1 for key in ("stamp", "mood")}
    result = chat.render(Conversation(messages))
    assert said(result) == expected("chatml", PLAIN)
    assert result.notes == unused
    moody = TEMPLATES["chatml"].stock.replace(
        "message['content']", "message.mood + message['content']"
    )
    result = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], moody)).render(
        Conversation(messages)
    )
    assert result.notes == {NOT_PRINTED.format("stamp"): 1}


def test_arguments_are_printed_as_json_or_refused(vocabulary):
    printed = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]"
    text = _LOOP % _TURN.replace(
        "{{ m.content }}", "{{ m.content or '' }}" + printed + "{% endfor %}"
    )
    text += _ASKED % "<|im_start|>assistant\n"
    messages = [user("Where?"), assistant(None, tool_calls=[call("a", city="Rome", now=True)])]
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], text))
    assert said(chat.render(Conversation(messages))) == [
        '[look_up {"city": "Rome", "now": true}]<|im_end|>'
    ]
    strict = text.replace("c.function.arguments }}", "dict(c.function.arguments) }}")
    result = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], strict)).render(
        Conversation(messages)
    )
    assert "of the call 'look_up' of turn 1 (assistant) as Python does" in str(result)


STRICT_CALLS = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result without a call') }}{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}{% if loop.first %}<calls>
{% endif %}<invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">{{ v }}</parameter>
{% endfor %}</invoke>
</calls>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("arguments", [{}, {"a": 1}], ids=["without", "with"])
def test_a_call_and_its_result_of_a_template_that_takes_no_result_alone(vocabulary, arguments):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], STRICT_CALLS))
    called = assistant(None, tool_calls=[call("a", **arguments)])
    messages = [user("When?"), called, {"role": "tool", "content": "Now."}, assistant("It is now.")]
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments.items())
    printed = f'<calls>\n<invoke name="look_up">\n{inner}</invoke>\n</calls><|im_end|>'
    assert said(chat.render(Conversation(messages))) == [printed, "It is now.<|im_end|>"]


def test_markers_that_cannot_be_checked_hold_no_header_and_no_space_behind_the_turn(vocabulary):
    """Where what follows a turn depends on its words, only the markers tell its edges."""
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "<|im_start|>user\n{{ m.content }}<|im_end|>\n"
        "{% else %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}FOLLOWS{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    for follows, notes in (("{{ m.content[0] }}\n", {template_module.UNCHECKED: 1}), ("", {})):
        changed = text.replace("FOLLOWS", follows)
        chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], changed))
        result = chat.render(Conversation(PLAIN))
        assert said(result) == [m["content"] + "<|im_end|>" for m in PLAIN[1::2]]
        assert result.notes == notes | ({} if notes else {masks.OTHER_PROMPT: 1})


def test_the_switch_that_helps_is_named(vocabulary):
    """A prompt that opens a reasoning which is printed only if it was asked for."""
    text = TEMPLATES["qwen3"].stock.replace(
        "message.reasoning_content", "(message.reasoning_content if thinking else '')"
    )
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["qwen3"], text))
    assert text != TEMPLATES["qwen3"].stock
    result = chat.render(Conversation(templates.REASONING))
    assert "data.chat_template_kwargs: {thinking: true}, or such a column, makes it one" in str(
        result
    )
    kwargs = {"thinking": True}
    assert said(chat.render(Conversation(templates.REASONING, template_kwargs=kwargs)))


def test_tools_that_are_not_printed(vocabulary):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))
    result = chat.render(Conversation(PLAIN, tools=TOOLS))
    assert "prints nothing of the tools" in str(result)


def test_a_template_is_interrupted_with_the_conversation_named(vocabulary, monkeypatch, caplog):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))

    def endless(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(template_module, "_transformers_render", endless)
    with pytest.raises(KeyboardInterrupt):
        chat.render(Conversation([user("Go on forever."), assistant("No.")]))
    assert "interrupted at the conversation [{'role': 'user', 'content': 'Go on fo" in caplog.text


@pytest.mark.parametrize("error", [MemoryError, OSError("disk")])
def test_what_no_template_raises_is_no_bad_row(vocabulary, monkeypatch, error):
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))

    def broken(*args, **options):
        raise error

    monkeypatch.setattr(template_module, "_transformers_render", broken)
    with pytest.raises((MemoryError, OSError)):
        chat.render(Conversation(PLAIN))


def test_no_clock_and_no_chance(vocabulary):
    """And those of the process are left alone."""
    text = "{{ strftime_now('%Y-%m-%d') }} {{ range(1000) | list | random }}"
    chat = Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"], text + TEMPLATES["chatml"].stock))
    state = random.getstate()
    first, again = (chat.render(Conversation(PLAIN)).text for _ in range(2))
    assert first == again
    assert first.startswith("2024-07-26 ")
    assert random.getstate() == state
    assert chat_template_utils.datetime is datetime.datetime


@pytest.mark.parametrize("name", ["datetime", "_compile_jinja_template"])
def test_another_transformers(vocabulary, monkeypatch, name):
    monkeypatch.delattr(chat_template_utils, name)
    with pytest.raises(ModelError, match=rf"has no utils\.chat_template_utils\.{name}; install"):
        Chat(tokenizer_of(vocabulary, TEMPLATES["chatml"]))


# ---- Which template


def test_which_template(vocabulary, tmp_path):
    base = TEMPLATES["chatml"]
    tokenizer = tokenizer_of(vocabulary, base)
    file = tmp_path / "other.jinja"
    file.write_text(base.stock.replace("<|im_start|>", "> "), "utf-8")
    for given in (str(file), file.read_text()):
        chat = Chat(tokenizer, chat_template=given)
        assert chat.render(Conversation(PLAIN)).text.startswith("> user\nWhat")
    with pytest.raises(DataError, match=r"data.chat_template 'nowhere.jinja'.*No such file"):
        Chat(tokenizer, chat_template="nowhere.jinja")
    tokenizer.chat_template = {"default": base.stock, "tool_use": TEMPLATES["qwen3"].stock}
    chats = [Conversation(PLAIN), Conversation(PLAIN, tools=TOOLS)]
    plain, tools = map(Chat(tokenizer).render, chats)
    assert "# Tools" in tools.text
    assert said(plain) == expected("chatml", PLAIN)
    assert said(tools) == aligned(expected("qwen3", PLAIN))
    tokenizer.chat_template = {"rag": base.stock}
    with pytest.raises(DataError, match=r"by name \(rag\), and none named default"):
        Chat(tokenizer).render(chats[0])
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        Chat(tokenizer)
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(DataError, match="template cannot be used: line 1: Expected an expression"):
        Chat(tokenizer).render(chats[0])


def test_a_tokenizer_with_code_of_its_own(vocabulary):
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, **options):
            return "mine"

    tokenizer = Own(tokenizer_object=Tokenizer.from_str(vocabulary))
    tokenizer.chat_template = TEMPLATES["chatml"].stock
    with pytest.raises(DataError, match=r"with custom code \(Own\)"):
        Chat(tokenizer)
