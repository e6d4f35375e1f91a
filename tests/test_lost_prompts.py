"""Prompts, earlier turns and answers that a run would lose: each is refused with a mapping that
works, or reported.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import save_byte_tokenizer
from test_preference_layouts import (
    ASK,
    BAD,
    EARLIER,
    GOOD,
    NO,
    YES,
    Q,
    S,
    _own_cache,  # noqa: F401 - a fixture
    examples,
    sources_of,
    turns,
)
from transformers import AutoTokenizer

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.recognise import Text
from toolkit.data.row_formats import find_row_format
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import EMPTY_PROMPT
from toolkit.errors import DataError

Row = dict[str, Any]
PAIR = {"chosen": GOOD, "rejected": BAD}
ANSWERS: dict[str, Row] = {
    "pairs": PAIR,
    "answers": {"completion": GOOD, "label": True},
    "examples": {"completion": GOOD},
}
QUESTIONS = ("What is two and two, please?", "What is three and three?", "Name a large city.")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr("toolkit.ranks.log_once", logged.append)
    return logged


def refusal(folder: Path, rows: list[Row], kind: str = "pairs", ending: str = "jsonl") -> str:
    with pytest.raises(DataError) as error:
        sources_of(folder, rows, kind, ending)
    return str(error.value)


def offered(message: str) -> list[dict[str, str | None]]:
    return [yaml.safe_load(text) for text in re.findall(r"\{.*?\}", message)]


def messages_of(example: Any) -> list[dict[str, str]]:
    side = getattr(example, "chosen", getattr(example, "example", example))
    messages: list[dict[str, str]] = side.messages
    return messages


# ---- System texts


@pytest.mark.parametrize("system", [["Be brief."], {"role": "system", "content": S}, 5])
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_system_that_is_no_text_is_refused(tmp_path: Path, kind: str, system: Any) -> None:
    for prompt in (Q, ASK):
        for columns in ({}, {"system": "system"}):
            row = {"system": system, "prompt": prompt} | ANSWERS[kind]
            source = sources_of(tmp_path, [row], kind, columns=columns)
            with pytest.raises(BadRow, match=f"text in 'system', got {type(system).__name__}"):
                examples(source)
    row = {"prompt": Q, "system": None} | ANSWERS[kind]
    assert len(examples(sources_of(tmp_path, [row, row | {"system": ""}], kind))) == 2


# ---- Pairs without a prompt


DESCRIPTIVE = ("source", "source_text", "dataset", "lang", "language", "category", "subset")
DESCRIPTIVE += ("model", "split", "url", "id", "chosen_prompt")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", DESCRIPTIVE)
def test_sentences_that_differ_are_prompts(tmp_path: Path, name: str, ending: str) -> None:
    rows = [{name: question} | PAIR for question in QUESTIONS]
    message = refusal(tmp_path, rows, ending=ending)
    assert f"expected a prompt, got answers without one next to {name!r}" in message
    assert {"instruction": name} in offered(message)
    found = examples(sources_of(tmp_path, rows, "pairs", ending, columns={"instruction": name}))
    assert [messages_of(pair)[0]["content"] for pair in found] == [*QUESTIONS]


def test_labels_next_to_answers_with_their_prompt_are_no_prompts(
    tmp_path: Path, lines: list[str]
) -> None:
    labels = {"source": "evol instruct", "dataset": "d-1", "language": "en", "model": "a b c d"}
    labels |= {"url": "https://a.org/b?c=1", "id": "a1", "tags": ["maths"], "scores": [1, 2]}
    rows = [{"chosen": f"{q} yes", "rejected": f"{q} no"} | labels for q in QUESTIONS] * 2
    for ending in ("jsonl", "parquet"):
        found = examples(sources_of(tmp_path, rows, "pairs", ending))
        assert [pair.chosen.prompt for pair in found] == [*QUESTIONS] * 2
    assert not lines


VALUES = {
    "a sum": ({"problem": "3+3"}, {"instruction": "problem"}),
    "a sum in a column of any name": ({"ask": "13+3"}, {"prompt": "ask"}),
    "a number in a column of a prompt's name": (
        {"the_question": "3-3"},
        {"prompt": "the_question"},
    ),
    "Chinese with a digit": ({"ask": "二加2等于几"}, {"instruction": "ask"}),
    "a list": ({"input": [Q]}, {"input": None}),
    "a list of another name": ({"turn": [Q]}, {"turn": None}),
    "a mapping": ({"info": {"post": Q, "words": 3}}, {"info": None}),
    "a mapping and a text": ({"info": {"post": Q}, "ask": Q}, {"instruction": "ask"}),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", VALUES)
def test_a_prompt_is_recognised_whatever_its_value(tmp_path: Path, name: str, ending: str) -> None:
    columns, mapping = VALUES[name]
    rows = [columns | {"chosen": "6", "rejected": "7"}] * 3
    message = refusal(tmp_path, rows, ending=ending)
    assert mapping in offered(message), message
    (pair, *_) = examples(sources_of(tmp_path, rows, "pairs", ending, columns=mapping))
    if None not in mapping.values():
        assert [*columns.values()][-1] in str(pair.chosen)


@pytest.mark.parametrize(
    "row", [{"source": QUESTIONS[0]}, {"ask": "3-3"}, {"id": "a1", "note": "8.5"}, {}]
)
def test_pairs_that_seem_to_have_no_prompt_are_reported(
    tmp_path: Path, lines: list[str], row: Row
) -> None:
    sources_of(tmp_path, [row | PAIR], "pairs")
    (line,) = lines
    assert "WARNING" in line
    assert "these pairs have no prompt" in line
    assert all(f"{name!r}" in line for name in row)
    sources_of(tmp_path, [{"chosen": YES, "rejected": NO}], "pairs")
    assert "these pairs have no prompt" in lines[1]


def test_a_sentence_in_a_descriptive_column_of_one_row_is_reported(
    tmp_path: Path, lines: list[str]
) -> None:
    row = {"source": "A book of sums", "chosen": f"{Q} yes", "rejected": f"{Q} no"}
    sources_of(tmp_path, [row], "pairs")
    (line,) = lines
    assert {"source": None} in offered(line)
    sources_of(tmp_path, [row], "pairs", columns={"source": None})
    assert len(lines) == 1


# ---- A part of a prompt


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_history_next_to_a_text_is_refused_or_read(tmp_path: Path, kind: str) -> None:
    row = {"prompt": Q, "history": [["Hi.", "Hello."]]} | ANSWERS[kind]
    message = refusal(tmp_path, [row], kind)
    assert "got turns in 'history'" in message
    mapping, nothing = offered(message)
    (found,) = examples(sources_of(tmp_path, [row], kind, columns=mapping))
    assert messages_of(found) == turns(*EARLIER) + ASK + YES
    assert nothing == {"history": None}
    (found,) = examples(sources_of(tmp_path, [row], kind, columns=nothing))
    assert found == examples(sources_of(tmp_path, [row | {"history": []}], kind))[0]


@pytest.mark.parametrize("name", ["messages", "conversations", "context"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_turns_that_hold_more_than_the_prompt_are_refused_or_read(
    tmp_path: Path, lines: list[str], kind: str, name: str
) -> None:
    row = {"prompt": Q, name: turns(*EARLIER) + ASK} | ANSWERS[kind]
    message = refusal(tmp_path, [row], kind)
    assert "which nothing uses" in message or "that nothing uses" in message
    assert {"prompt": name} in offered(message)
    (found,) = examples(sources_of(tmp_path, [row], kind, columns={"prompt": name}))
    assert messages_of(found) == turns(*EARLIER) + ASK + YES
    # Turns that repeat the prompt and the answer lose nothing.
    assert examples(sources_of(tmp_path, [row | {name: ASK + YES}], kind))
    assert not lines


@pytest.mark.parametrize("kind", ["answers", "examples"])
def test_unused_turns_next_to_turns_are_reported(
    tmp_path: Path, lines: list[str], kind: str
) -> None:
    row = {"prompt": ASK, "history": [["Hi.", "Hello."]]} | ANSWERS[kind]
    sources_of(tmp_path, [row], kind)
    assert "the column 'history' is not used" in lines[0]
    # Words within another word are no repetition.
    sources_of(tmp_path, [row | {"history": [["T", "wo"]]}], kind)
    sources_of(tmp_path, [row | {"history": [["Two", "two?"]]}], kind)
    assert len(lines) == 2


def test_an_unused_answer_is_reported(tmp_path: Path, lines: list[str]) -> None:
    row = {"messages": ASK + YES, "prompt": Q, "completion": GOOD}
    sources_of(tmp_path, [row], "examples")
    assert not lines
    sources_of(tmp_path, [row | {"prompt": "Why?", "completion": BAD}], "examples")
    assert [re.findall(r"the column '(\w+)'", line)[0] for line in lines] == [
        "prompt",
        "completion",
    ]


# ---- Prompts in completions, and empty ones


@pytest.mark.parametrize("more", [{}, {"system": S}])
def test_completions_that_repeat_their_prompt_are_refused(tmp_path: Path, more: Row) -> None:
    rows = [{"prompt": q, "completion": f"{q} Yes."} | more for q in (*QUESTIONS, "Why?")]
    message = refusal(tmp_path, rows, "examples")
    assert "got 'completion' that begin with it in all first rows" in message
    mapping = {"text": "completion"}
    assert mapping in offered(message)
    (text, *_) = examples(sources_of(tmp_path, rows, "examples", columns=mapping))
    assert text == Text(f"{QUESTIONS[0]} Yes.")
    for other in ("No.", QUESTIONS[0]):  # one row that does not repeat it decides
        row = {"prompt": QUESTIONS[0], "completion": other} | more
        assert len(examples(sources_of(tmp_path, [*rows, row], "examples"))) == 5


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("examples", [{"prompt": p, "completion": GOOD} for p in ("", " ", Q)]),
        ("pairs", [{"prompt": p} | PAIR for p in ("", " ", Q)]),
        ("examples", [{"system": S, "prompt": p, "completion": GOOD} for p in ("", " ", Q)]),
    ],
)
def test_empty_prompts_are_counted(tmp_path: Path, kind: str, rows: list[Row]) -> None:
    save_byte_tokenizer(tmp_path / "tokenizer")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    cfg = FinetuneDataConfig(sequence_length=200, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    encoder = Encoder(tokenizer, cfg, 300, row_format=find_row_format(kind))
    counts = encode_source(sources_of(tmp_path, rows, kind), encoder).counts
    assert (counts.kept, counts.notes.get(EMPTY_PROMPT)) == (3, 2)


@pytest.mark.parametrize(("name", "expected"), [("label", "true or false"), ("completion", "an")])
def test_a_column_of_nulls_is_named(tmp_path: Path, name: str, expected: str) -> None:
    row = {"prompt": Q, "completion": GOOD, "label": True, name: None}
    message = refusal(tmp_path, [row] * 2, "answers")
    assert f"expected {expected}" in message
    assert f"in {name!r}, got null in all of the first 2 row(s)" in message
    assert "{}" not in message
