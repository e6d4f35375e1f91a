"""Pairs of answers: what rows of any shape become, and what is refused or counted."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, save_byte_tokenizer
from transformers import AutoTokenizer

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.examples.pairs import parse_pair
from toolkit.data.feed.feed import build_samples
from toolkit.data.row_formats import PAIRS, find_row_format
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.errors import DataError

TEMPLATE = ROOT / "recipes/configs/chat_template.jinja"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def encoded(
    folder: Path, tokenizer: Any, rows: list[Any], length: int = 200, **settings: Any
) -> Any:
    """Return the rows of a file as a source of pairs."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"chat_template": str(TEMPLATE)} | settings
    cfg = FinetuneDataConfig(train_files=str(file), sequence_length=length, **settings)
    (source,) = load_sources(cfg, row_format=PAIRS)
    return encode_source(source, Encoder(tokenizer, cfg, 300, row_format=PAIRS))


def shown(tokenizer: Any, source: Any, row: int = 0) -> tuple[list[str], list[str]]:
    """Return both sides of an encoded row as text, and what of each is learned."""
    found = source.tokens[row]
    ids, second = found["input_ids"], found["second"]
    spans = list(zip(found["spans"][::2], found["spans"][1::2], strict=True))
    sides = [tokenizer.decode(ids[:second]), tokenizer.decode(ids[second:])]
    return sides, [tokenizer.decode(ids[begin:end]) for begin, end in spans]


END = "<|endoftext|>"
CHAT = (
    [f"[user]q\n[assistant]yes{END}", f"[user]q\n[assistant]no{END}"],
    [f"yes{END}", f"no{END}"],
)
TEXT = [f"q: yes{END}", f"q: no{END}"], [f"yes{END}", f"no{END}"]
SHAPES: dict[str, tuple[dict[str, Any], dict[str, str | None], Any]] = {
    "turns": (
        {"prompt": [user("q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {},
        CHAT,
    ),
    "turns, the prompt within": (
        {"chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
        {},
        CHAT,
    ),
    "UltraFeedback": (
        {
            "prompt": "q",
            "chosen": [user("q"), assistant("yes")],
            "rejected": [user("q"), assistant("no")],
            "score_chosen": 8.0,
            "score_rejected": 4.0,
        },
        {},
        CHAT,
    ),
    "a prompt of turns, answers of text": (
        {"prompt": [user("q")], "chosen": "yes", "rejected": "no"},
        {},
        CHAT,
    ),
    "lists as text": (
        {
            "chosen": json.dumps([user("q"), assistant("yes")]),
            "rejected": json.dumps([user("q"), assistant("no")]),
        },
        {},
        CHAT,
    ),
    "a turn alone (axolotl)": (
        {"messages": [user("q")], "chosen": assistant("yes"), "rejected": assistant("no")},
        {"prompt": "messages"},
        CHAT,
    ),
    "ranking (LLaMA-Factory)": (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"prompt": "conversations"},
        CHAT,
    ),
    "texts": ({"prompt": "q: ", "chosen": "yes", "rejected": "no"}, {}, TEXT),
    "texts, the prompt within": (
        {"chosen": "q: yes", "rejected": "q: no"},
        {},
        (TEXT[0], [f" yes{END}", f" no{END}"]),  # the blank belongs to the answer
    ),
    "other names": (
        {"question": "q: ", "better": "yes", "worse": "no"},
        {"prompt": "question", "chosen": "better", "rejected": "worse"},
        TEXT,
    ),
    "HelpSteer2": (
        {"prompt": "q: ", "response_1": "no", "response_2": "yes", "preference_strength": 2},
        {"preference": "preference_strength"},
        TEXT,
    ),
    "HelpSteer3": (
        {"context": [user("q")], "response1": "yes", "response2": "no", "overall_preference": -1},
        {
            "prompt": "context",
            "response_1": "response1",
            "response_2": "response2",
            "preference": "overall_preference",
        },
        CHAT,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_each_shape_are_pairs(tmp_path: Path, tokenizer: Any, shape: str) -> None:
    row, columns, (sides, learned) = SHAPES[shape]
    source = encoded(tmp_path, tokenizer, [row], columns=columns)
    assert shown(tokenizer, source) == (sides, learned)


def test_what_leads_to_the_answer_is_the_prompt_of_both(tmp_path: Path, tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    turns = [user("a"), assistant("b"), user("c")]
    row = {"chosen": [*turns, assistant("d")], "rejected": [*turns, assistant("e")], "tools": tools}
    prints_tools = "{{ tools | tojson }}" + TEMPLATE.read_text()
    source = encoded(tmp_path, tokenizer, [row], length=600, chat_template=prints_tools)
    sides, learned = shown(tokenizer, source)
    assert learned == [f"d{END}", f"e{END}"]  # the last answers alone
    assert all('"name": "f"' in side for side in sides)


REFUSED = {
    "missing column": ({"prompt": "q", "chosen": "a"}, "'rejected'"),
    "mixed sides": ({"chosen": "a", "rejected": [assistant("b")]}, "one of each"),
    "no answer": ({"chosen": [user("q")], "rejected": [user("p")]}, "a turn of user"),
    "weight of 0": (
        {"chosen": [user("q"), assistant("a") | {"masked": True}], "rejected": [user("q")]},
        "marked as not supervised",
    ),
    "prompts that differ": (
        {"chosen": [user("q "), assistant("a")], "rejected": [user("q"), assistant("b")]},
        "prompts are not the same",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_row_that_is_no_pair_ends_the_run_or_is_counted(
    tmp_path: Path, tokenizer: Any, reason: str
) -> None:
    row, said = REFUSED[reason]
    good = {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}
    with pytest.raises(DataError, match=f"rows.jsonl line 2: .*{said}.*on_bad_row: skip"):
        encoded(tmp_path, tokenizer, [good, row])
    counts = encoded(tmp_path, tokenizer, [good, row], on_bad_row="skip").counts
    assert (counts.rows, counts.kept, counts.dropped) == (2, 1, {reason: 1})


LEFT_OUT = {
    "equal sides": {"prompt": "q", "chosen": "a", "rejected": "a"},
    "empty answer": {"prompt": "q", "chosen": "a", "rejected": " \n"},
    "no preference": {"prompt": "q", "response_1": "a", "response_2": "b", "preference": 0},
    "equal once cut": {"prompt": "q", "chosen": "a" * 110, "rejected": "a" * 109 + "b"},
    "prompt too long": {"prompt": "q" * 110, "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_pair_that_teaches_nothing_is_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, reason: str
) -> None:
    row = LEFT_OUT[reason]
    others = {"prompt": "q", "chosen": "aa", "rejected": "bb", "preference": 1}
    good = {name: others.get(name, value) for name, value in row.items()}
    counts = encoded(tmp_path, tokenizer, [good, row]).counts
    assert (counts.kept, counts.dropped) == (1, {reason: 1})


def test_answers_are_cut_to_the_same_length_and_never_empty(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"prompt": "p" * 20, "chosen": "c" * a, "rejected": "r" * b}
        for a, b in ((50, 3), (90, 90), (3, 150))
    ]
    source = encoded(tmp_path, tokenizer, rows, length=100)
    assert source.counts.truncated == 2
    for row, sizes in enumerate(([51, 4], [30, 30], [4, 56])):  # with a stop token where whole
        found = source.tokens[row]
        assert [found["second"] - 20, len(found["input_ids"]) - found["second"] - 20] == sizes
    with pytest.raises(DataError, match="too_long"):
        encoded(tmp_path, tokenizer, rows, length=100, too_long="error")
    dropped = encoded(tmp_path, tokenizer, rows, length=100, too_long="drop").counts.dropped
    assert dropped == {"too long": 2}


def hostile(count: int) -> list[dict[str, Any]]:
    """Return rows of all kinds that users bring, many of them bad."""
    draw = random.Random(7)
    texts = [
        "",
        " ",
        "\n\n",
        "yes",
        "no",
        "é 世界 🙂",
        END,
        "[user]",
        "[assistant]x",
        "a" * 300,
        "\t",
        "q: ",
    ]

    def text() -> str:
        return "".join(draw.choice(texts) for _ in range(draw.randint(0, 3)))

    def side() -> Any:
        turns: list[dict[str, Any]] = []
        for _ in range(draw.randint(1, 3)):
            turns += [user(text()), assistant(text())]
        return turns[draw.randint(0, 1) :]

    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if draw.random() < 0.5:
            prompt, chosen = text(), text()
            row = {
                "prompt": prompt,
                "chosen": chosen,
                "rejected": draw.choice([chosen, text(), chosen + " "]),
            }
            if draw.random() < 0.3:
                row = {"chosen": prompt + chosen, "rejected": prompt + text()}
        else:
            one = side()
            row = {
                "chosen": one,
                "rejected": draw.choice([one, [*one[:-1], assistant(text())], side()]),
            }
            if draw.random() < 0.3:
                row["tools"] = [
                    {"type": "function", "function": {"name": text(), "parameters": {}}}
                ]
        rows.append(row)
    return rows


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_hostile_rows_are_left_out_or_right(tmp_path: Path, tokenizer: Any, packing: Any) -> None:
    rows = hostile(200)
    source = encoded(tmp_path, tokenizer, rows, length=256, on_bad_row="skip")
    counts = source.counts
    assert counts.rows == 200 == counts.kept + sum(counts.dropped.values())
    assert counts.kept > 40
    assert len(counts.dropped) > 4
    shape = SampleShape(packing, 256, borders=packing == "bfd", row_format=PAIRS)
    samples = build_samples(source, shape)
    seen = 0
    for first in range(0, len(samples), 4):
        batch = shape.batch([samples[i] for i in range(first, min(first + 4, len(samples)))])
        assert batch.sequences is not None
        owners = batch.sequences[batch.targets != IGNORED]
        assert (owners >= 0).all()
        learned = torch.bincount(owners, minlength=batch.n_sequences)
        assert learned.min() >= 1  # no side is empty
        assert batch.n_sequences % 2 == 0
        seen += batch.n_sequences // 2
    assert seen == counts.kept
    for row in range(counts.kept):  # both sides begin alike, and differ
        found = source.tokens[row]
        ids, second = np.array(found["input_ids"]), found["second"]
        assert ids[:second].tolist() != ids[second:].tolist()


def test_a_pair_is_read_by_itself() -> None:
    pair = parse_pair({"chosen": "q: good", "rejected": "q: goods"})
    assert (pair.chosen.prompt, pair.chosen.completion, pair.rejected.completion) == (
        "q:",
        " good",
        " goods",
    )  # type: ignore[union-attr]
    with pytest.raises(BadRow, match="a number"):
        parse_pair({"response_1": "a", "response_2": "b", "preference": "first"})


def test_rows_for_another_recipe_name_it(tmp_path: Path) -> None:
    pairs = {"prompt": "q", "chosen": "a", "rejected": "b"}
    answers = {"prompt": "q", "completion": "a", "label": True}
    for row, learned, said in (
        (pairs, "examples", "`toolkit prefer` trains on both"),
        (pairs, "answers", "pairs are for another preference.loss_type than kto"),
        (answers, "pairs", "single answers with a label are for preference.loss_type kto"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        cfg = FinetuneDataConfig(train_files=str(tmp_path / "rows.jsonl"))
        with pytest.raises(DataError, match=said):
            load_sources(cfg, row_format=find_row_format(learned))
