"""Preference rows as other tools and public data sets lay them out: each is read completely, or it
is refused with the mapping that makes it work.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.pairs import Answer, Pair, parse_answer, parse_pair
from toolkit.data.examples.recognise import Conversation, PromptCompletion
from toolkit.data.row_formats import PAIRS, find_row_format
from toolkit.data.sources.row_values import BadRow, SkippedRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


S, Q, GOOD, BAD = "Be brief.", "Two and two?", "It is four.", "It is five."
EARLIER = [("user", "Hi."), ("assistant", "Hello.")]


def turns(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in said]


def sharegpt(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": name, "value": text} for name, text in said]


ASK = turns(("user", Q))
YES, NO = turns(("assistant", GOOD)), turns(("assistant", BAD))
SYSTEM = turns(("system", S))


class Layout(NamedTuple):
    row: dict[str, Any]
    prompt: Any  # a text, or turns that the chat template renders
    mapping: dict[str, str | None] | None = None  # that the refusal has to offer
    label: bool | None = None  # of a single answer; None: a pair
    answers: tuple[str, str] = (GOOD, BAD)


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


DIALOGUE = f"\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {Q}\n\nAssistant:"
LAYOUTS = {
    # TRL: docs/source/dataset_formats.md, preference with an explicit prompt, and without one
    "trl, texts": Layout({"prompt": Q, "chosen": GOOD, "rejected": BAD}, Q),
    "trl, turns": Layout({"prompt": ASK, "chosen": YES, "rejected": NO}, ASK),
    "trl, implicit turns": Layout({"chosen": ASK + YES, "rejected": ASK + NO}, ASK),
    "trl, implicit texts": Layout(
        {"chosen": f"{Q} {GOOD}", "rejected": f"{Q} {BAD}"},
        f"{Q} It is",
        answers=(" four.", " five."),
    ),
    "trl, unpaired texts": Layout({"prompt": Q, "completion": GOOD, "label": True}, Q, label=True),
    "trl, unpaired turns": Layout(
        {"prompt": ASK, "completion": NO, "label": False}, ASK, label=False
    ),
    # axolotl: src/axolotl/prompt_strategies/dpo/chatml.py, functions of these names
    "axolotl argilla": Layout(
        {"system": S, "instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
        SYSTEM + ASK,
    ),
    "axolotl argilla, question": Layout({"question": Q, "chosen": GOOD, "rejected": BAD}, ASK),
    "axolotl icr": Layout({"system": S, "input": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK),
    "axolotl intel": Layout(
        {"system": S, "question": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    "axolotl prompt_pairs": Layout(
        {"system": S, "prompt": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    "axolotl ultra": Layout(
        {"system": S, "prompt": Q, "chosen": ASK + YES, "rejected": ASK + NO}, SYSTEM + ASK
    ),
    # axolotl: src/axolotl/prompt_strategies/dpo/chat_template.py
    "axolotl chat_template": Layout(
        {"messages": SYSTEM + ASK, "chosen": YES[0], "rejected": NO[0]}, SYSTEM + ASK
    ),
    "axolotl chat_template of many turns": Layout(
        {"messages": turns(*EARLIER) + ASK, "chosen": YES[0], "rejected": NO[0]},
        turns(*EARLIER) + ASK,
    ),
    # axolotl: src/axolotl/prompt_strategies/bradley_terry/README.md
    "axolotl bradley_terry": Layout(
        {"system": S, "input": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK
    ),
    # axolotl: src/axolotl/prompt_strategies/kto/chatml.py
    "axolotl kto argilla": Layout(
        {"system": S, "instruction": Q, "completion": GOOD, "label": True}, SYSTEM + ASK, label=True
    ),
    "axolotl kto intel": Layout(
        {"system": S, "question": Q, "completion": BAD, "label": False}, SYSTEM + ASK, label=False
    ),
    "axolotl kto argilla_chat": Layout({"completion": ASK + YES, "label": True}, ASK, label=True),
    # LLaMA-Factory: data/README.md, preference and KTO data sets of both formats
    "llama-factory alpaca": Layout(
        {"instruction": "Add.", "input": "2 2", "chosen": GOOD, "rejected": BAD},
        turns(("user", "Add.\n\n2 2")),
    ),
    "llama-factory alpaca with history": Layout(
        {
            "instruction": Q,
            "input": "",
            "chosen": GOOD,
            "rejected": BAD,
            "system": S,
            "history": [["Hi.", "Hello."]],
        },
        SYSTEM + turns(*EARLIER) + ASK,
    ),
    "llama-factory sharegpt": Layout(
        {
            "conversations": sharegpt(("human", "Hi."), ("gpt", "Hello."), ("human", Q)),
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
            "system": S,
        },
        SYSTEM + turns(*EARLIER) + ASK,
    ),
    "llama-factory kto": Layout(
        {"instruction": "Add.", "input": "2 2", "output": GOOD, "kto_tag": True},
        turns(("user", "Add.\n\n2 2")),
        label=True,
    ),
    "llama-factory kto sharegpt": Layout(
        {"messages": ASK + NO, "label": False},  # data/kto_en_demo.json
        ASK,
        label=False,
    ),
    # OpenRLHF: openrlhf/datasets/reward_dataset.py and unpaired_preference_dataset.py
    "openrlhf, chat": Layout({"chosen": ASK + YES, "rejected": ASK + NO, "score": 1.0}, ASK),
    "openrlhf, prompt_key": Layout({"prompt": ASK, "chosen": YES, "rejected": NO}, ASK),
    "openrlhf, unpaired": Layout({"input": Q, "output": BAD, "label": False}, ASK, label=False),
    # ms-swift: docs/source_en/Customization/Custom-dataset.md, RLHF
    "ms-swift": Layout({"messages": SYSTEM + ASK + YES, "rejected_response": BAD}, SYSTEM + ASK),
    "ms-swift, rejected_messages": Layout(
        {"messages": ASK + YES, "rejected_messages": ASK + NO}, ASK
    ),
    "ms-swift, query": Layout(
        {"system": S, "query": Q, "response": GOOD, "rejected_response": BAD}, SYSTEM + ASK
    ),
    "ms-swift kto": Layout(
        {"messages": SYSTEM + ASK + YES, "label": True}, SYSTEM + ASK, label=True
    ),
    # NeMo-RL: docs/guides/dpo.md, the preference format, and a binary one
    "nemo-rl": Layout(
        {
            "context": SYSTEM + ASK,
            "completions": [{"rank": 1, "completion": NO}, {"rank": 0, "completion": YES}],
        },
        SYSTEM + ASK,
    ),
    # NeMo-Aligner: docs/user-guide/dpo.rst and kto.rst
    "nemo-aligner dpo": Layout(
        {
            "prompt": Q,
            "chosen_response": GOOD,
            "rejected_response": BAD,
            "chosen_reward": 5,
            "rejected_reward": 1,
        },
        Q,
    ),
    "nemo-aligner kto": Layout(
        {"prompt": Q, "response": BAD, "preference": "rejected"}, Q, label=False
    ),
    # torchtune: docs/source/basics/preference_datasets.rst
    "torchtune": Layout(
        {"chosen_conversations": ASK + YES, "rejected_conversations": ASK + NO}, ASK
    ),
    "torchtune stack_exchange_paired": Layout(
        {"question": Q, "response_j": GOOD, "response_k": BAD},
        ASK,
        {"chosen": "response_j", "rejected": "response_k", "instruction": "question"},
    ),
    # Intel/orca_dpo_pairs
    "intel": Layout({"system": S, "question": Q, "chosen": GOOD, "rejected": BAD}, SYSTEM + ASK),
    # Anthropic/hh-rlhf
    "hh-rlhf": Layout(
        {"chosen": f"{DIALOGUE} {GOOD}", "rejected": f"{DIALOGUE} {BAD}"}, turns(*EARLIER) + ASK
    ),
    # argilla/ultrafeedback-binarized-preferences
    "argilla ultrafeedback": Layout(
        {
            "source": "evol instruct",
            "instruction": Q,
            "chosen_response": GOOD,
            "rejected_response": BAD,
            "chosen_avg_rating": 4.5,
        },
        ASK,
    ),
    # argilla/ultrafeedback-binarized-preferences-cleaned
    "argilla ultrafeedback cleaned": Layout(
        {
            "source": "evol instruct",
            "prompt": Q,
            "chosen": ASK + YES,
            "chosen-model": "one model",
            "rejected": ASK + NO,
        },
        ASK,
    ),
    # HuggingFaceH4/ultrafeedback_binarized: `messages` repeats the chosen conversation
    "ultrafeedback_binarized": Layout(
        {
            "prompt": Q,
            "prompt_id": "a1",
            "chosen": ASK + YES,
            "rejected": ASK + NO,
            "messages": ASK + YES,
            "score_chosen": 8.0,
        },
        ASK,
    ),
    # argilla/dpo-mix-7k
    "argilla dpo-mix": Layout(
        {"dataset": "a mix", "chosen": SYSTEM + ASK + YES, "rejected": SYSTEM + ASK + NO},
        SYSTEM + ASK,
    ),
    # argilla/kto-mix-15k
    "argilla kto-mix": Layout(
        {"dataset": "a mix", "prompt": Q, "completion": ASK + NO, "label": False, "rating": 2},
        ASK,
        label=False,
    ),
    # argilla/distilabel-intel-orca-dpo-pairs
    "distilabel orca": Layout(
        {
            "system": S,
            "input": Q,
            "chosen": GOOD,
            "rejected": BAD,
            "generations": [GOOD, BAD],
            "labelling_prompt": turns(("user", "Which is better?")),
            "status": "unchanged",
        },
        SYSTEM + ASK,
    ),
    # argilla/distilabel-intel-orca-kto
    "distilabel orca kto": Layout(
        {"system": S, "prompt": Q, "completion": GOOD, "label": True}, SYSTEM + ASK, label=True
    ),
    # argilla/distilabel-capybara-dpo-7k-binarized
    "distilabel capybara": Layout(
        {
            "conversation": [{"input": "Hi.", "output": "Hello."}, {"input": Q, "output": GOOD}],
            "prompt": Q,
            "chosen": turns(*EARLIER) + ASK + YES,
            "rejected": turns(*EARLIER) + ASK + NO,
        },
        turns(*EARLIER) + ASK,
    ),
    # argilla/distilabel-math-preference-dpo
    "distilabel math": Layout(
        {"metadata": "{}", "instruction": Q, "chosen_response": GOOD, "rejected_response": BAD},
        ASK,
    ),
    # nvidia/HelpSteer2, folder preference
    "helpsteer2": Layout(
        {
            "prompt": Q,
            "response_1": BAD,
            "response_2": GOOD,
            "preference_strength": 2,
            "preference_statement": "Response 2 is better.",
        },
        Q,
    ),
    # nvidia/HelpSteer3
    "helpsteer3": Layout(
        {
            "domain": "general",
            "language": "english",
            "context": turns(*EARLIER) + ASK,
            "response1": GOOD,
            "response2": BAD,
            "overall_preference": -2,
        },
        turns(*EARLIER) + ASK,
    ),
    # mlabonne/orpo-dpo-mix-40k
    "orpo-dpo-mix": Layout(
        {"source": "x", "chosen": ASK + YES, "rejected": ASK + NO, "prompt": Q, "question": Q}, ASK
    ),
    # OpenAI: guide of direct preference optimization
    "openai": Layout(
        {"input": {"messages": ASK}, "preferred_output": YES, "non_preferred_output": NO}, ASK
    ),
    # Names that no tool documents
    "a prompt of another name": Layout(
        {"ask": Q, "chosen": GOOD, "rejected": BAD}, ASK, {"instruction": "ask"}
    ),
    "a prompt of turns of another name": Layout(
        {"before": SYSTEM + ASK, "chosen": YES, "rejected": NO}, SYSTEM + ASK, {"prompt": "before"}
    ),
    "an answer next to a prompt of another name": Layout(
        {"ask": Q, "completion": YES, "label": True}, ASK, {"instruction": "ask"}, True
    ),
    "sides of other names": Layout(
        {"prompt": Q, "better": GOOD, "worse": BAD}, Q, {"chosen": "better", "rejected": "worse"}
    ),
}


def sources_of(
    folder: Path, rows: list[dict[str, Any]], learned: str, ending: str = "jsonl", **more: Any
) -> DataSource:
    file = folder / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (source,) = load_sources(
        FinetuneDataConfig(train_files=str(file), **more), row_format=find_row_format(learned)
    )
    return source


def examples(source: DataSource) -> list[Any]:
    return [source.example(stored) for stored in source.rows]


def expected(layout: Layout) -> Pair | Answer:
    def side(answer: str) -> PromptCompletion | Conversation:
        if isinstance(layout.prompt, str):
            return PromptCompletion(layout.prompt, answer)
        messages = [*layout.prompt, {"role": "assistant", "content": answer}]
        return Conversation(messages, supervised_from=len(layout.prompt))

    if layout.label is None:
        return Pair(*map(side, layout.answers))
    return Answer(side(layout.answers[0 if layout.label else 1]), layout.label)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_read_completely(tmp_path: Path, name: str, ending: str) -> None:
    layout = LAYOUTS[name]
    learned: str = "pairs" if layout.label is None else "answers"
    rows = [layout.row] * 3
    if layout.mapping is None:
        source = sources_of(tmp_path, rows, learned, ending)
    else:
        with pytest.raises(DataError) as refusal:
            sources_of(tmp_path, rows, learned, ending)
        offered = [yaml.safe_load(text) for text in re.findall(r"\{.*?\}", str(refusal.value))]
        assert layout.mapping in offered, refusal.value
        source = sources_of(tmp_path, rows, learned, ending, columns=layout.mapping)
    assert examples(source) == [expected(layout)] * 3
    # Rows by their standard names, as a rehearsal writes them, mean the same.
    used = (*source.layout.columns, *source.layout.optional)
    renamed = [
        {k: v for k, v in source.row(stored).items() if k in used and v is not None}
        for stored in source.rows
    ]
    assert examples(sources_of(tmp_path, renamed, learned)) == [expected(layout)] * 3


def test_the_table_is_long() -> None:
    assert len(LAYOUTS) > 45


# ---- A text is a text


JSON_DIALOGUE = json.dumps(ASK + YES)
TEXTS = ("[1, 2, 3]", '{"a": 1}', JSON_DIALOGUE, json.dumps(YES), "[", "null", "true")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_json_stay_texts(tmp_path: Path, text: str) -> None:
    pair = {"prompt": "Give me a list: ", "chosen": text, "rejected": "[3]"}
    answer = {"prompt": text, "completion": text, "label": True}
    (found,) = examples(sources_of(tmp_path, [pair], "pairs"))
    assert found == Pair(*(PromptCompletion("Give me a list: ", t) for t in (text, "[3]")))
    (found,) = examples(sources_of(tmp_path, [answer], "answers"))
    assert found == Answer(PromptCompletion(text, text), True)
    (found,) = examples(sources_of(tmp_path, [answer], "examples"))
    assert found == PromptCompletion(text, text)


@pytest.mark.parametrize("other", [JSON_DIALOGUE.replace("four", "six"), "[3]"])
def test_json_dialogues_next_to_their_prompt_are_texts(tmp_path: Path, other: str) -> None:
    rows = [{"prompt": "Write a chat as JSON: ", "chosen": JSON_DIALOGUE, "rejected": other}] * 3
    source = sources_of(tmp_path, rows, "pairs")
    sides = (PromptCompletion("Write a chat as JSON: ", text) for text in (JSON_DIALOGUE, other))
    assert examples(source) == [Pair(*sides)] * 3


AS_JSON = {
    "the prompt within": {"chosen": ASK + YES, "rejected": ASK + NO},
    "the prompt next to it": {"prompt": ASK, "chosen": YES, "rejected": NO},
    "a text within": {"prompt": Q, "chosen": ASK + YES, "rejected": ASK + NO},
}


@pytest.mark.parametrize("name", AS_JSON)
def test_turns_as_json_text_are_recognised_for_the_whole_source(tmp_path: Path, name: str) -> None:
    row = {k: v if isinstance(v, str) else json.dumps(v) for k, v in AS_JSON[name].items()}
    source = sources_of(tmp_path, [row] * 3, "pairs")
    assert "are JSON text of turns" in str(source.layout)
    messages = [ASK + YES, ASK + NO]
    assert examples(source) == [Pair(*(Conversation(m, supervised_from=1) for m in messages))] * 3
    # One row that is not decides for texts, and a later one is refused.
    mixed = [row, row | {"chosen": "[1]"}]
    assert "JSON" not in str(sources_of(tmp_path, mixed, "pairs", on_bad_row="skip").layout)
    source = sources_of(tmp_path, [row] * 100 + [row | {"chosen": "[1]"}], "pairs")
    *good, last = source.rows
    assert len([source.example(stored) for stored in good]) == 100
    with pytest.raises(BadRow, match="expected turns as in the first rows in 'chosen'"):
        source.example(last)


# ---- Prompts


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_tools_within_a_prompt_are_used(tmp_path: Path, name: str) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {name: {"messages": ASK, "tools": tools}, "chosen": YES, "rejected": NO}
    (pair,) = examples(sources_of(tmp_path, [row], "pairs"))
    assert pair.chosen == Conversation(ASK + YES, tools, supervised_from=1)


def test_a_row_without_the_prompt_of_the_others_is_refused(tmp_path: Path) -> None:
    good = {"question": Q, "chosen": GOOD, "rejected": BAD}
    for row, message in (
        ({"chosen": GOOD, "rejected": BAD}, "expected a column 'instruction'"),
        (good | {"question": None}, "expected a column 'instruction'|expected text"),
    ):
        source = sources_of(tmp_path, [good, good, row], "pairs")
        with pytest.raises(BadRow, match=message):
            source.example(list(source.rows)[2])
    good = {"prompt": Q, "chosen": GOOD, "rejected": BAD}
    for row, message in (
        (good | {"prompt": None}, "expected a prompt in 'prompt'"),
        (good | {"prompt": []}, "expected a prompt in 'prompt'"),
        ({"ask": Q, "chosen": GOOD, "rejected": BAD}, "got none next to 'ask'"),
    ):
        source = sources_of(tmp_path, [good, good, row], "pairs")
        with pytest.raises(BadRow, match=message):
            source.example(list(source.rows)[2])


def test_a_prompt_that_is_not_in_the_conversation_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "Something else?", "chosen": ASK + YES, "rejected": ASK + NO}
    source = sources_of(tmp_path, [row], "pairs")
    with pytest.raises(BadRow, match=r"in the turns of the conversation.*\{prompt: null\}"):
        examples(source)
    (pair,) = examples(sources_of(tmp_path, [row], "pairs", columns={"prompt": None}))
    assert pair.chosen.messages == ASK + YES
    for prompt in (f" {Q}\n", f"USER: {Q} ASSISTANT:", ASK, SYSTEM + ASK):
        (pair,) = examples(sources_of(tmp_path, [row | {"prompt": prompt}], "pairs"))
        assert pair.chosen.messages[-2:] == ASK + YES
        assert [m["role"] for m in pair.chosen.messages].count("user") == 1
        assert len(pair.chosen.messages) == (3 if prompt == SYSTEM + ASK else 2)


def test_a_prompt_does_not_end_with_an_answer(tmp_path: Path) -> None:
    row = {"messages": ASK + YES, "chosen": GOOD, "rejected": BAD}
    (pair,) = examples(sources_of(tmp_path, [row], "pairs"))
    assert pair.chosen.messages == ASK + YES
    source = sources_of(tmp_path, [row | {"messages": ASK + turns(("assistant", "4"))}], "pairs")
    with pytest.raises(BadRow, match="expected a prompt that ends before the answer"):
        examples(source)


@pytest.mark.parametrize("name", ["source", "prompt_id", "chosen_model", "dataset", "language"])
def test_columns_that_describe_a_row_are_no_prompts(tmp_path: Path, name: str) -> None:
    row = {"chosen": f"{Q} yes", "rejected": f"{Q} no", name: "some words"}
    source = sources_of(tmp_path, [row], "pairs")
    assert str(source.layout).endswith(f"not used: {name!r}")
    with pytest.raises(DataError, match=r"next to 'topic', which nothing uses.*\{topic: null\}"):
        sources_of(tmp_path, [row | {"topic": "some words"}], "pairs")
    assert examples(
        sources_of(tmp_path, [row | {"topic": "some words"}], "pairs", columns={"topic": None})
    ) == examples(source)


def test_two_possible_prompts_are_refused(tmp_path: Path) -> None:
    row = {"question": Q, "input": "more", "chosen": GOOD, "rejected": BAD}
    with pytest.raises(DataError, match="expected one prompt, got 'question', 'input'"):
        sources_of(tmp_path, [row], "pairs")
    for columns, content in (
        ({"instruction": "question", "input": "input"}, f"{Q}\n\nmore"),
        ({"instruction": "question", "input": None}, Q),
    ):
        (pair,) = examples(sources_of(tmp_path, [row], "pairs", columns=columns))
        assert pair.chosen.messages[0]["content"] == content


def test_a_part_of_a_prompt_that_is_not_used_is_reported(tmp_path: Path, monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("toolkit.ranks.log_once", lines.append)
    row = {"prompt": Q, "context": "Two is 2.", "chosen": GOOD, "rejected": BAD}
    sources_of(tmp_path, [row], "pairs")
    assert "the column 'context' is not used" in lines[0]
    sources_of(tmp_path, [row], "pairs", columns={"context": None})
    assert len(lines) == 1


# ---- System texts


def test_system_texts_are_used_in_all_formats(tmp_path: Path) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("pairs", {"prompt": Q, "chosen": GOOD, "rejected": BAD}),
        ("pairs", {"chosen": ASK + YES, "rejected": ASK + NO}),
        ("pairs", {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {GOOD}"}),
        ("answers", {"prompt": Q, "completion": GOOD, "label": True}),
        ("answers", {"messages": ASK + YES, "label": True}),
        ("examples", {"prompt": Q, "completion": GOOD}),
        ("examples", {"prompt": ASK, "completion": YES}),
        ("examples", {"messages": ASK + YES}),
        ("examples", {"conversations": sharegpt(("human", Q), ("gpt", GOOD))}),
        ("examples", {"instruction": Q, "output": GOOD}),
    ]
    rows[2][1]["rejected"] = f"\n\nHuman: {Q}\n\nAssistant: {BAD}"
    for learned, row in rows:
        for name, columns in (("system", {}), ("system_prompt", {}), ("who", {"system": "who"})):
            source = sources_of(tmp_path, [row | {name: S}], learned, columns=columns)
            (found,) = examples(source)
            found = getattr(found, "chosen", getattr(found, "example", found))
            assert found.messages == SYSTEM + ASK + YES, (row, name)
            assert f"system texts in {name!r}" in str(source.layout)
            assert "not used" not in str(source.layout)
        # Without the column, or with it set to null, nothing is added.
        (found,) = examples(
            sources_of(tmp_path, [row | {"system": S}], learned, columns={"system": None})
        )
        assert S not in str(found)
        # A row of the same source without a text has none.
        found = examples(sources_of(tmp_path, [row | {"system": S}, row | {"system": ""}], learned))
        assert S not in str(found[1])
        assert type(found[1]) is type(found[0])


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("learned", ["pairs", "answers", "examples"])
def test_a_system_text_that_only_later_rows_have_is_not_lost(
    tmp_path: Path, learned: str, ending: str
) -> None:
    row = {"prompt": Q, "chosen": GOOD, "rejected": BAD, "completion": GOOD, "label": True}
    if learned == "examples":
        del row["chosen"], row["rejected"]
    for name in ("system", "system_prompt"):
        rows = [row | {name: None}] * 100 + [row | {name: S}]
        *good, last = (source := sources_of(tmp_path, rows, learned, ending)).rows
        assert "PromptCompletion" in str(source.example(good[0]))
        with pytest.raises(BadRow, match="expected no text in 'system'"):
            source.example(last)
        chat = row | {"prompt": ASK}  # of turns it is used
        rows = [chat | {name: None}] * 100 + [chat | {name: S}]
        *_, last = (source := sources_of(tmp_path, rows, learned, ending)).rows
        assert S in str(source.example(last))


def test_an_answer_without_a_prompt_is_refused(tmp_path: Path) -> None:
    for completion in (GOOD, YES):
        with pytest.raises(DataError, match="expected a prompt next to the answer"):
            sources_of(tmp_path, [{"completion": completion, "label": True}], "answers")


def test_a_system_text_is_not_doubled(tmp_path: Path) -> None:
    row = {"messages": SYSTEM + ASK + YES, "system": S}
    (found,) = examples(sources_of(tmp_path, [row], "examples"))
    assert found.messages == SYSTEM + ASK + YES
    with pytest.raises(BadRow, match=r"expected one system text.*\{system: null\}"):
        examples(sources_of(tmp_path, [row | {"system": "Another."}], "examples"))


# ---- Dialogues in texts, as HH-RLHF has them


def dialogue(*said: tuple[str, str]) -> str:
    return "".join(f"\n\n{name}: {text}" for name, text in said)


H, R = "Human", "Assistant"
DIALOGUES = [  # both sides, and the reason for which a row is dropped
    ([(H, "a?"), (R, "the answer is yes")], [(H, "a?"), (R, "the answer is no")], None),
    (
        [(H, "a?"), (R, "b"), (H, " c\nd"), (R, "e\n\nf")],
        [(H, "a?"), (R, "b"), (H, " c\nd"), (R, "g")],
        None,
    ),
    ([(H, "a?"), (H, "b?"), (R, "Human: c ")], [(H, "a?"), (H, "b?"), (R, "d")], None),
    ([(H, "a?"), (R, "")], [(H, "a?"), (R, "b")], "empty answer"),
    ([(H, "a?"), (R, "b")], [(H, "a?"), (R, "c"), (H, "d"), (R, "e")], "prompts that differ"),
    ([(H, "a?"), (R, "b")], [(H, "a?"), (R, "b")], "equal sides"),
]


@pytest.mark.parametrize("has_template", [True, False])
def test_dialogues_are_read_completely(tmp_path: Path, has_template: bool) -> None:
    rows = [{"chosen": dialogue(*a), "rejected": dialogue(*b)} for a, b, _ in DIALOGUES]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = FinetuneDataConfig(train_files=str(file))
    (source,) = load_sources(cfg, row_format=PAIRS, has_template=has_template)
    assert ("read as turns" if has_template else "read as texts") in str(source.layout)
    for stored, row, (_, _, reason) in zip(source.rows, rows, DIALOGUES, strict=True):
        found = catch_bad_row(source.example, stored)
        if reason is not None:
            assert isinstance(found, SkippedRow)
            assert found.reason == reason
            continue
        for text, side in ((row["chosen"], found.chosen), (row["rejected"], found.rejected)):
            answer = text[text.rindex("\n\nAssistant:") + len("\n\nAssistant:") :]
            if not has_template:
                assert side.prompt + side.completion == text
                assert side.completion == answer
                continue
            names = {"user": H, "assistant": R}
            assert dialogue(*((names[m["role"]], m["content"]) for m in side.messages)) == text
            assert side.messages[-1]["content"] == answer[1:]
            assert side.supervised_from == len(side.messages) - 1
    # A source of which one row is no dialogue is read as texts.
    file.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"chosen": "a b", "rejected": "a c"}])
    )
    (source,) = load_sources(cfg, row_format=PAIRS)
    assert "dialogues" not in str(source.layout)


@pytest.mark.parametrize(
    ("one", "other", "prompt"),
    [
        ("q: the answer is yes", "q: the answer is no", "q: the answer is"),
        ("q: yes", "q: yesterday", "q:"),
        ("q\nyes", "q\nno", "q\n"),
        ("q:  yes", "q:  no", "q: "),
        ("q:yes", "q:no", "q:"),
        ("yes", "no", ""),
        ("12:30", "12:45", "12:"),
    ],
)
def test_an_implicit_prompt_ends_before_the_blank(one: str, other: str, prompt: str) -> None:
    pair = parse_pair({"chosen": one, "rejected": other})
    assert pair.chosen == PromptCompletion(prompt, one[len(prompt) :])
    assert pair.rejected == PromptCompletion(prompt, other[len(prompt) :])


@pytest.mark.parametrize("label", [True, 1, 1.0, "true", "True", "1", "chosen"])
def test_labels_of_a_csv_file_are_texts(label: Any) -> None:
    row = {"prompt": Q, "completion": GOOD, "label": label}
    opposite = {"true": "false", "True": "False", "1": "0", "chosen": "rejected"}
    assert parse_answer(row).desirable
    assert not parse_answer(row | {"label": opposite.get(label, type(label)(0))}).desirable
    with pytest.raises(BadRow, match="expected true or false in 'label'"):
        parse_answer(row | {"label": "perhaps"})
