"""Variables of a chat template for all rows, empty blocks of reasoning, and the ends of turns that
only their position tells.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from chat_templates import TEMPLATES, assistant, call, user
from conftest import save_byte_tokenizer, save_tiny_model
from tokenizer_kinds import tokenizer_of
from transformers import AutoTokenizer

from toolkit import config
from toolkit.config.data import FinetuneDataConfig
from toolkit.config.settings import FinetuneConfig, FinetuneModelConfig
from toolkit.data.chat.masks import NO_STOP, Rendered
from toolkit.data.chat.template import Chat, add_template_defaults
from toolkit.data.examples.recognise import Conversation
from toolkit.data.prepare import build_encoder, inspect_data
from toolkit.data.report import render_report
from toolkit.errors import ConfigError
from toolkit.formats import assets_of
from toolkit.models import causal_lm
from toolkit.training.generation import encode_prompts

QWEN3 = TEMPLATES["qwen3"].stock
BLOCK = "<think>\n\n</think>\n\n"
LINE = "set data.chat_template_kwargs: {enable_thinking: false}"
TWO = [user("Capital?"), assistant("Paris."), user("2 + 2?"), assistant("It is 4.")]


def chat_of(template: str, specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"), **options):
    return Chat(tokenizer_of("llama3", template, specials), **options)


def learned(result) -> list[str]:
    assert isinstance(result, Rendered), result
    return [result.text[begin:end] for begin, end in result.spans]


def test_all_answers_of_a_row_begin_alike():
    chat = chat_of(QWEN3)
    two, one = chat.render(Conversation(TWO)), chat.render(Conversation(TWO[:2]))
    assert learned(two) == ["Paris.<|im_end|>", "It is 4.<|im_end|>"]
    assert learned(one) == [f"{BLOCK}Paris.<|im_end|>"]  # what the default prompt asks for
    assert BLOCK in two.text  # rendered as before, as context
    for result in (one, two):
        (note,) = result.notes
        assert "empty <think></think> block" in note
        assert LINE in note
    assert "does not cover it" in "".join(two.notes)
    assert "learn an empty" in "".join(one.notes)


def test_an_empty_thought_of_the_rows_own_is_learned():
    written = [*TWO[:3], assistant(f"{BLOCK}It is 4.")]
    assert learned(chat_of(QWEN3).render(Conversation(written)))[-1].startswith(BLOCK)


def test_a_block_before_every_answer_is_learned():
    """As GLM 4.5 prints it: the model has to write it each time."""
    text = QWEN3.replace(
        "loop.index0 > ns.last_query_index and (loop.last or reasoning_content)", "1"
    )
    assert text != QWEN3
    result = chat_of(text).render(Conversation(TWO))
    assert [turn.startswith(BLOCK) for turn in learned(result)] == [True, True]
    assert sum(result.notes.values()) == 1  # a conversation


def test_a_long_conversation_begins_alike():
    turns = [turn for i in range(20) for turn in (user(f"{i}?"), assistant(f"Yes, {i}."))]
    result = chat_of(QWEN3).render(Conversation(turns))
    assert learned(result) == [f"Yes, {i}.<|im_end|>" for i in range(20)]


def test_the_setting_puts_the_block_into_the_prompt():
    chat = chat_of(QWEN3, template_kwargs={"enable_thinking": False})
    for turns in (TWO, TWO[:2]):
        result = chat.render(Conversation(turns))
        assert learned(result)[0] == "Paris.<|im_end|>"
        assert not result.notes
    own = Conversation(TWO[:2], template_kwargs={"enable_thinking": True})  # of the row: it wins
    assert learned(chat.render(own)) == [f"{BLOCK}Paris.<|im_end|>"]


def test_defaults_are_written_into_the_template():
    values = {"enable_thinking": False, "note": {"a": [1, None, 'x"y']}}
    text = "  {{ note['a'] }}|{{ enable_thinking }}|\n{{ messages[0].content }}"
    (made,) = add_template_defaults({"default": text}, values).values()
    tokenizer = tokenizer_of("bytes", made)
    turns = [user("q")]
    plain = tokenizer.apply_chat_template(turns, tokenize=False)
    given = tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=True)
    expected = tokenizer_of("bytes", text).apply_chat_template(turns, tokenize=False, **values)
    assert plain == expected
    assert "|True|" in given
    with pytest.raises(ConfigError, match=r"'enable_thinkin'.*did you mean enable_thinking"):
        add_template_defaults({"default": QWEN3}, {"enable_thinkin": False})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tokenize", "tools"])
def test_reserved_names_are_refused(name):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs: {name} cannot be set"):
        FinetuneDataConfig(chat_template_kwargs={name: 1})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({1: 2}, "expected the name of a variable, got 1"),
        ({"a-b": 2}, "expected the name of a variable, got 'a-b'"),
        (
            {"n": float("nan")},
            r"kwargs.n: expected texts, finite numbers, .* got nan",
        ),
        ({"n": [{"m": {1}}]}, r"chat_template_kwargs.n: expected texts"),
    ],
)
def test_names_and_values_that_no_template_holds_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        FinetuneDataConfig(chat_template_kwargs=values)


def test_texts_stay_texts_in_files_and_flags(tmp_path: Path) -> None:
    texts = {"version": "1.10", "x": "true", "d": "01", "n": "null", "deep": {"list": ["1e3", 2]}}
    file, more = tmp_path / "run.yaml", tmp_path / "more.yaml"
    base = {"model": {"name_or_path": "m"}}
    file.write_text(yaml.safe_dump(base | {"data": {"chat_template_kwargs": texts}}))
    cfg = config.load(FinetuneConfig, file)
    assert cfg.data.chat_template_kwargs == texts
    more.write_text(config.dump(cfg))
    assert config.load(FinetuneConfig, more) == cfg
    flag = "--data.chat_template_kwargs"
    for flags in ([flag, '{a: "1.10", b: 1.10}'], [f'{flag}={{"a": "1.10", "b": 1.1}}']):
        assert config.load(FinetuneConfig, file, flags).data.chat_template_kwargs == {
            "a": "1.10",
            "b": 1.1,
        }
    # The last one wins, also if it is a file.
    flags = [flag, "{a: 1}", "--config", str(more)]
    assert config.load(FinetuneConfig, file, flags).data.chat_template_kwargs == texts
    with pytest.raises(ConfigError, match="chat_template_kwargs must be a mapping"):
        config.load(FinetuneConfig, file, [flag, "3"])
    with pytest.raises(ConfigError, match="tools cannot be set"):
        config.load(FinetuneConfig, file, [flag, "{tools: 1}"])


def test_characters_beyond_16_bits_stay_whole():
    (made,) = add_template_defaults(
        {"default": "{{ note.a }}"}, {"note": {"a": "é 世 🙂"}}
    ).values()
    text = tokenizer_of("bytes", made).apply_chat_template([user("q")], tokenize=False)
    assert text == "é 世 🙂"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, max_position_embeddings=512)
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(QWEN3)
    rows = [{"messages": turns} for turns in (TWO, TWO[:2], TWO[2:])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, **data) -> FinetuneConfig:
    model = FinetuneModelConfig(str(folder))
    files = {"train_files": str(folder / "rows.jsonl"), "sequence_length": 400, "eval_split": 0.0}
    return FinetuneConfig(model=model, data=FinetuneDataConfig(**files, **data))


def test_inspect_warns_and_the_line_that_it_names_ends_the_warning(folder):
    report = inspect_data(config_of(folder, packing="none"))
    warnings = [w for w in report["sources"][0]["warnings"] if LINE in w]
    assert [w.split()[0] for w in sorted(warnings)] == ["1", "2"]
    assert f"WARNING   {warnings[0]}" in render_report(report, colour=False)
    kwargs = yaml.safe_load(LINE.removeprefix("set data.chat_template_kwargs: "))
    report = inspect_data(config_of(folder, packing="none", chat_template_kwargs=kwargs))
    assert report["sources"][0]["warnings"] == []
    shown = "".join(part["text"] for part in report["sources"][0]["first"][1]["parts"])
    assert BLOCK in shown


def test_a_setting_that_changes_no_row_is_reported(folder, capsys):
    plain = folder / "texts.jsonl"
    plain.write_text(json.dumps({"prompt": "a", "completion": " b"}) + "\n")
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "packing": "none"}
    inspect_data(config_of(folder, **kwargs))
    assert "changes no row" not in capsys.readouterr().out
    cfg = config_of(folder, **kwargs)
    data = dataclasses.replace(cfg.data, train_files=str(plain))
    inspect_data(dataclasses.replace(cfg, data=data))
    shown = capsys.readouterr().out
    assert "chat_template_kwargs (enable_thinking) changes no row" in shown
    assert "got prompts and completions" in shown


def test_prompts_are_asked_and_exports_answer_with_the_setting(folder):
    cfg = config_of(folder, chat_template_kwargs={"enable_thinking": False})
    model = causal_lm.build_on_meta(cfg.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (before,) = encode_prompts(model, tokenizer, ["q"], 1)
    settings = FinetuneModelConfig(str(folder), tokenizer_name_or_path=str(folder))
    encoder = build_encoder(cfg, settings, model)
    (after,) = encode_prompts(model, encoder.tokenizer, ["q"], 1)
    assert tokenizer.decode(after) == tokenizer.decode(before) + BLOCK
    tokenizer.chat_template = assets_of(model).files["chat_template.jinja"].decode()
    turns = [user("q")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.decode(after)


# ---- Ends by position

ACTION = """{%- for m in messages %}
{%- if m.role == 'tool' %}<|turn|><|system|>[{"id": "
{{- '0' if messages[loop.index0 - 1].tool_calls else 'none' }}", "result": {{ m.content | tojson }}
{{- '}]<|end|>' }}
{%- elif m.tool_calls %}<|turn|><|bot|><|act|>[
{%- for c in m.tool_calls %}{"id": "{{ loop.index0 }}", "tool": "{{ c.function.name }}"
{{- ', "with": ' }}
{{- c.function.arguments | tojson }}}{% endfor %}]<|end|>
{%- else %}<|turn|>{{ '<|bot|><|say|>' if m.role == 'assistant' else '<|user|>' }}
{{- m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|turn|><|bot|>{% endif %}"""
ACTION_MARKS = ("<|turn|>", "<|system|>", "<|act|>", "<|say|>", "<|bot|>", "<|user|>", "<|end|>")


@pytest.mark.parametrize("result", ["0", '"id": "0', "now is noon", "{}"])
@pytest.mark.parametrize("arguments", [{}, {"zone": "0"}])
def test_a_call_ends_before_its_result(arguments, result):
    turns = [
        user("When?"),
        assistant(None, tool_calls=[call("abcdefghi", **arguments)]),
        {"role": "tool", "tool_call_id": "abcdefghi", "content": result},
        assistant("At noon."),
    ]
    turns[1]["tool_calls"][0]["function"]["arguments"] = arguments
    rendered = chat_of(ACTION, ACTION_MARKS).render(Conversation(turns))
    name = turns[1]["tool_calls"][0]["function"]["name"]
    printed = f'<|act|>[{{"id": "0", "tool": "{name}", "with": {json.dumps(arguments)}}}]<|end|>'
    assert learned(rendered) == [printed, "<|say|>At noon.<|end|>"]
    assert not rendered.notes


def test_the_header_of_a_second_answer_is_not_learned():
    text = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|bot|>{% else %}</s>{% endif %}"
    )
    turns = [user("Why?"), assistant("So."), assistant("It goes."), user("And?"), assistant("On.")]
    rendered = chat_of(text, ("<|user|>", "<|bot|>")).render(Conversation(turns))
    assert learned(rendered) == ["So.", "It goes.", "On.</s>"]
    assert rendered.notes == {NO_STOP: 2}
