"""Answers with a label: which answer each is compared with, and what the report says of them."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import save_byte_tokenizer
from test_pairs import TEMPLATE, assistant, user
from transformers import AutoTokenizer

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.report import build_supervision_report, render_report
from toolkit.data.row_formats import ANSWERS
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens import encode as encode_module
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import SAME_PROMPT, EncodedSource

Row = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def encoded(folder: Path, tokenizer: Any, rows: list[Row], name: str = "rows") -> EncodedSource:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = FinetuneDataConfig(
        train_files=str(file), sequence_length=200, chat_template=str(TEMPLATE)
    )
    (source,) = load_sources(cfg, row_format=ANSWERS)
    return encode_source(source, Encoder(tokenizer, cfg, 300, row_format=ANSWERS))


def sides(tokenizer: Any, source: EncodedSource) -> list[tuple[str, str]]:
    """Return (own answer, partner) of each encoded row as texts with their prompts."""
    columns = source.tokens["input_ids"], source.tokens["second"]
    return [
        (tokenizer.decode(ids[:second]), tokenizer.decode(ids[second:]))
        for ids, second in zip(*columns, strict=True)
    ]


def texts(prompts: list[int]) -> list[Row]:
    return [
        {"prompt": f"q{prompt}: ", "completion": f"a{i}.", "label": i % 3 > 0}
        for i, prompt in enumerate(prompts)
    ]


def chats(prompts: list[int]) -> list[Row]:
    return [
        row | {"prompt": [user(row["prompt"])], "completion": [assistant(row["completion"])]}
        for row in texts(prompts)
    ]


GROUPS = {
    "in pairs": [i // 2 for i in range(24)],
    "four each": [i // 4 for i in range(24)],
    "unequal": [0] * 7 + [1] * 2 + [2] * 9 + [3, 4, 5],
    "more than half of one": [0] * 9 + [1, 2, 2],
    "all different": list(range(11)),
    "two rows": [0, 1],
}


@pytest.mark.parametrize("shape", [texts, chats])
@pytest.mark.parametrize("group", GROUPS)
def test_a_partner_has_another_prompt_in_any_order(
    tmp_path: Path, tokenizer: Any, group: str, shape: Any
) -> None:
    rows = shape(GROUPS[group])
    owner = {row["completion"]: row["prompt"] for row in texts(GROUPS[group])}
    orders = [rows, rows[::-1], random.Random(5).sample(rows, len(rows))]
    results = []
    for number, order in enumerate(orders):
        source = encoded(tmp_path, tokenizer, order, f"rows{number}")
        assert source.counts.kept == len(rows)
        assert SAME_PROMPT not in source.counts.notes
        results.append(sides(tokenizer, source))
        for own, other in results[-1]:
            (mine,) = (answer for answer in owner if answer in own)
            (theirs,) = (answer for answer in owner if answer in other)
            assert owner[mine] != owner[theirs]
            assert owner[mine].strip() in other  # put after the prompt of the row
    assert sorted(results[0]) == sorted(results[1]) == sorted(results[2])
    if group != "more than half of one":  # each answer is a partner once
        assert len({other for _, other in results[0]}) == len(rows)


def test_batches_and_processes_do_not_change_partners(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = chats([i // 3 for i in range(31)])
    expected = sides(tokenizer, encoded(tmp_path, tokenizer, rows))
    monkeypatch.setattr(encode_module, "_ROWS_PER_PROCESS", 9)
    monkeypatch.setattr(encode_module, "_CHAT_ROWS", 5)
    monkeypatch.setattr(encode_module.ranks, "available_cores", lambda: {0, 1, 2})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "another"))
    assert sides(tokenizer, encoded(tmp_path, tokenizer, rows)) == expected


def report_of(tokenizer: Any, *sources: EncodedSource) -> dict[str, Any]:
    shape = SampleShape("none", 200, borders=False, row_format=ANSWERS)
    feed = PreparedFeed(sources, shape, seed=1, global_batch=2)
    return build_supervision_report(feed, tokenizer, samples=2)


def test_one_prompt_for_all_rows_is_reported(tmp_path: Path, tokenizer: Any) -> None:
    source = encoded(tmp_path, tokenizer, texts([0] * 5))
    assert all(own != other for own, other in sides(tokenizer, source))
    report = report_of(tokenizer, source)
    assert report["sources"][0]["warnings"] == [f"5 {SAME_PROMPT}"]
    assert f"WARNING   5 {SAME_PROMPT}" in render_report(report, colour=False)


def test_a_single_answer_is_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    counts = encoded(tmp_path, tokenizer, texts([0])).counts
    assert (counts.kept, counts.dropped) == (0, {"no answer to compare with": 1})


def test_the_report_shows_labels_and_counts_own_answers_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    rows = texts([0, 1, 2, 3])
    source = encoded(tmp_path, tokenizer, rows)
    assert source.counts.supervised == sum(len(row["completion"]) + 1 for row in rows)
    report = report_of(tokenizer, source)
    (entry,) = report["sources"]
    assert entry["labels"] == {"true": 2, "false": 2}
    assert entry["warnings"] == []
    shown = render_report(report, colour=False)
    assert "not desired (label false): q0: [[a0.<|endoftext|>]]" in shown
    assert "\ndesired (label true): q1: [[a1.<|endoftext|>]]" in shown
    assert "rejected" not in shown


def test_a_missing_label_is_a_warning(tmp_path: Path, tokenizer: Any) -> None:
    rows = texts(list(range(9)))
    good, bad = ([row for row in rows if row["label"] == label] for label in (True, False))
    good_source, bad_source = (
        encoded(tmp_path, tokenizer, some, name) for some, name in ((good, "good"), (bad, "bad"))
    )
    (entry,) = report_of(tokenizer, good_source)["sources"]
    assert "all 6 answers have the label true: expected some with the label false" in str(
        entry["warnings"]
    )
    both = report_of(tokenizer, good_source, bad_source)  # they complete each other
    assert [entry["warnings"] for entry in both["sources"]] == [[], []]
