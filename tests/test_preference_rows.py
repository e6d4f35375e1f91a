"""Faults of preference rows that would train on something else: each is refused on one line."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.row_formats import PAIRS, find_row_format
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.errors import DataError

ASK = [{"role": "user", "content": "Two and two?"}]
YES = [{"role": "assistant", "content": "It is four."}]
NO = [{"role": "assistant", "content": "It is five."}]
TURNS = {"prompt": ASK, "chosen": YES, "rejected": NO}
TEXTS = {"prompt": "Two and two?", "chosen": "It is four.", "rejected": "It is five."}
CALL = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def source_of(
    folder: Path, rows: list[dict[str, Any]], learned: str = "pairs", **columns: str | None
) -> DataSource:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = FinetuneDataConfig(train_files=str(file), columns=dict(columns))
    (source,) = load_sources(cfg, row_format=find_row_format(learned))
    return source


def last_of(source: DataSource) -> Any:
    return catch_bad_row(source.example, list(source.rows)[-1])


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (TEXTS, {"chosen": "It is four.", "rejected": "It is five."}, "got none"),
        (TURNS, {"chosen": YES, "rejected": NO}, "got none"),
        (TURNS, TURNS | {"prompt": []}, "got an empty one"),
        (TURNS, TURNS | {"prompt": " "}, "expected text in 'prompt'"),
        (TEXTS | {"system": "Be brief."}, TEXTS | {"prompt": ""}, "expected text in 'prompt'"),
        (TURNS, TURNS | {"prompt": {"messages": "x"}}, "expected a list"),
    ],
)
def test_no_answer_is_learned_without_its_prompt(tmp_path, first, last, said) -> None:
    result = last_of(source_of(tmp_path, [first, last]))
    assert isinstance(result, BadRow)
    assert said in str(result)


def test_answers_that_hold_their_prompt_need_no_other(tmp_path) -> None:
    greeting = [{"role": "assistant", "content": "Hello."}, *ASK]
    for last in (
        {"chosen": ASK + YES, "rejected": ASK + NO},
        {"chosen": greeting + YES, "rejected": greeting + NO},
    ):
        result = last_of(source_of(tmp_path, [TURNS, last]))
        assert result.chosen.messages == last["chosen"]


@pytest.mark.parametrize("name", ["chosen", "completion"])
def test_a_prompt_that_ends_with_a_call_is_refused(tmp_path, name: str) -> None:
    row: dict[str, Any] = {"prompt": ASK + CALL, "completion": YES, "label": True}
    if name == "chosen":
        row = {"prompt": ASK + CALL, "chosen": YES, "rejected": NO}
    source = source_of(tmp_path, [row], "pairs" if name == "chosen" else "answers")
    result = last_of(source)
    assert isinstance(result, BadRow)
    assert "ends with a turn of the assistant" in str(result)


@pytest.mark.parametrize("rank", [None, "a", True, float("nan")])
def test_a_rank_is_a_number(tmp_path, rank: Any) -> None:
    good = {"prompt": "q", "completions": [{"rank": i, "completion": "ab"[i]} for i in (0, 1)]}
    bad = {"prompt": "q", "completions": [{"rank": rank, "completion": "a"}, *good["completions"]]}
    bad["completions"] = bad["completions"][:2]
    file = tmp_path / "rows.parquet"
    if isinstance(rank, float):  # JSON has no such number
        pq.write_table(pa.Table.from_pylist([good, bad]), file)
        (source,) = load_sources(FinetuneDataConfig(train_files=str(file)), row_format=PAIRS)
    else:
        source = source_of(tmp_path, [good, bad])
    result = last_of(source)
    assert isinstance(result, BadRow)
    assert "expected a number in 'completions.rank'" in str(result)


def compared(*preferences: Any) -> list[dict[str, Any]]:
    sides = {"prompt": "q", "response_1": "first", "response_2": "second"}
    return [sides | {"preference": value} for value in preferences]


@pytest.mark.parametrize("numbers", [(1, 2, 2, 1), (0, 1, 1, 0), (1.0, 2.0, 1.0, 2.0)])
def test_the_number_of_the_better_answer_is_no_difference(tmp_path, numbers) -> None:
    """1 and 2 would both say that the second answer is better."""
    with pytest.raises(DataError, match=r"number of the better answer.*'chosen'.*'rejected'"):
        source_of(tmp_path, compared(*numbers))


@pytest.mark.parametrize("numbers", [(1, 2, -1, 2), (1, 2, 3, 1), (2, 1), (0.5, 1, 2, 1)])
def test_differences_are_read_as_such(tmp_path, numbers) -> None:
    assert last_of(source_of(tmp_path, compared(*numbers))).chosen.completion == "second"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1},
            "'better_response_id', which is 0 or 1.*'response_0' and 'response_1' to 'chosen'",
        ),
        (
            {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
            "'labels', which is 1 where human_ref_A is the better answer",
        ),
        (
            {"prompt": "q", "answers": [{"answer": c, "rank": i} for i, c in enumerate("abc")]},
            "'answers', which are several answers with a rank.*the best and the worst",
        ),
    ],
)
def test_rows_that_no_mapping_reads_are_refused_with_what_to_write(tmp_path, row, said) -> None:
    with pytest.raises(DataError, match=said):
        source_of(tmp_path, [row] * 2)


def test_more_than_two_ranked_answers_are_refused_with_what_to_write(tmp_path) -> None:
    ranked = [{"rank": i, "completion": "abc"[i]} for i in range(3)]
    result = last_of(source_of(tmp_path, [{"prompt": "q", "completions": ranked}]))
    assert "got 3 entries; write the pairs" in str(result)


def test_tools_next_to_plain_texts_are_not_called_used(tmp_path) -> None:
    """Only a chat template prints tools."""
    source = source_of(tmp_path, [TEXTS | {"tools": TOOLS}])
    assert "not used: 'tools'" in str(source.layout)
    assert not source.layout.uses_template
    with pytest.raises(DataError, match="maps 'tools' to 'calls', and nothing uses 'tools'"):
        source_of(tmp_path, [TEXTS | {"calls": TOOLS}], tools="calls")
    for rows in ([TURNS | {"tools": TOOLS}], [TEXTS, TEXTS, TURNS | {"tools": TOOLS}]):
        source = source_of(tmp_path, rows)
        assert "not used" not in str(source.layout)
        assert source.layout.uses_template
        assert last_of(source).chosen.tools == TOOLS


def test_a_prompt_that_the_answers_repeat_is_not_learned(tmp_path) -> None:
    prompt = "\n\nHuman: Two and two?\n\nAssistant:"
    rows = [{"prompt": prompt, "chosen": f"{prompt} Four.", "rejected": f"{prompt} Five."}] * 2
    with pytest.raises(DataError, match=r"begin with it in all first rows; .*\{prompt: null\}"):
        source_of(tmp_path, rows)
    result = last_of(source_of(tmp_path, rows, prompt=None))
    assert [turn["content"] for turn in result.chosen.messages] == ["Two and two?", "Four."]
    labelled = [{"prompt": prompt, "completion": f"{prompt} Four.", "label": True}]
    with pytest.raises(DataError, match="write it without the prompt"):
        source_of(tmp_path, labelled, "answers")
    other = {"prompt": prompt, "chosen": "Four.", "rejected": f"{prompt} Five."}
    assert last_of(source_of(tmp_path, [rows[0], other])).chosen.completion == "Four."


@pytest.mark.parametrize("value", ["x", 3, {"a": 1}])
def test_a_labelled_conversation_is_a_list_of_turns(tmp_path, value: Any) -> None:
    good = {"messages": ASK + YES, "label": True}
    result = last_of(source_of(tmp_path, [good, good | {"messages": value}], "answers"))
    assert isinstance(result, BadRow)
