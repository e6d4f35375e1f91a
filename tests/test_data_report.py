"""The supervision report: right numbers, what is learned marked, and nothing learned is refused."""

import json
from dataclasses import replace

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit.config.data import FinetuneDataConfig, SourceConfig
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
)
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.prepare import inspect_data
from toolkit.data.report import build_supervision_report, check_supervised, render_report
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import Counts, EncodedSource
from toolkit.errors import DataError

MAX = 64


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of sequence."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def encoded(
    tokenizer, *examples: list[tuple[str, bool]], name: str = "chat", **counts
) -> EncodedSource:
    """Return examples, given as parts and whether they are learned, as `encode` would."""
    rows: dict[str, list] = {"input_ids": [], "spans": [], "row": []}
    for number, parts in enumerate(examples):
        ids: list[int] = []
        spans: list[int] = []
        for text, learned in parts:
            begin = len(ids)
            ids += tokenizer(text)["input_ids"]
            spans += [begin, len(ids)] if learned else []
        for column, value in zip(rows, (ids, spans, 10 + number), strict=True):
            rows[column].append(value)
    integers = datasets.List(datasets.Value("int32"))
    features = datasets.Features(input_ids=integers, spans=integers, row=datasets.Value("int64"))
    covered = [
        end - max(begin, 1)
        for spans in rows["spans"]
        for begin, end in zip(spans[::2], spans[1::2], strict=True)
    ]
    told = {
        "rows": len(examples),
        "kept": len(examples),
        "tokens": sum(map(len, rows["input_ids"])),
        "supervised": sum(covered),
    }
    tokens = datasets.Dataset.from_dict(rows, features=features)
    return EncodedSource(name, tokens, Counts(**(told | counts)))


ASKED = [("Two and two?", False), ("Four.</s>", True), ("Sure?", False), ("Yes.</s>", True)]


def report(tokenizer, *sources: EncodedSource, evaluated=(), **part) -> dict:
    """Return the report of sources, the first of which became what `part` says."""
    feed = PreparedFeed(
        sources, SampleShape("bfd", MAX), seed=0, global_batch=1, eval_sources=evaluated
    )
    feed.parts[0] = replace(feed.parts[0], **part)
    return build_supervision_report(feed, tokenizer)


def test_numbers(tokenizer):
    dropped = {"empty assistant turn": 2, "not UTF-8": 1}
    rows = ("line 7: no answer", "line 9: no answer", "line 11: no turn")
    places = {"empty assistant turn": [f"a.jsonl {row}" for row in rows]}
    first = encoded(
        tokenizer, ASKED, ASKED[:2], rows=5, truncated=1, dropped=dropped, places=places
    )
    first.weight, first.max_repeats, first.format = 2.0, 3.0, "conversations"
    second = encoded(tokenizer, [("All of it.", True)], name="text", notes={"odd tokens": 4})
    second.weight = 1.0
    made = report(tokenizer, first, second, density=0.75, dropped={"empty rows": 3})
    assert made == json.loads(json.dumps(made))
    chat, text = made["sources"]
    assert (chat["rows"], chat["examples"], chat["left_out"]) == (5, 2, 3)
    assert (chat["tokens"], chat["supervised"]) == (12 + 6 + 5 + 5 + 12 + 6, 6 + 5 + 6)
    assert chat["supervised_share"] == pytest.approx(17 / 46)
    assert chat["dropped"]["not UTF-8"] == {"rows": 1, "first": []}
    assert chat["lengths"]["histogram"] == [[16, 31, 2]]
    assert (chat["lengths"]["min"], chat["lengths"]["max"]) == (18, 28)
    assert text["supervised"] == 9  # nothing predicts the first token
    assert made["total"]["tokens"] == 56
    said = render_report(made, colour=False)
    for line in (
        "chat       5        3         2          1      46          17  37.0%",
        "all        6        3         3          1      56          26  46.4%",
        "chat: conversations",
        "mixed     weight 2, at most 3 passes",
        "skipped   2 rows: empty assistant turn (a.jsonl line 7: no answer; a.jsonl line 9: no "
        "answer; a.jsonl line 11: no turn)",
        "skipped   1 row: not UTF-8",
        "samples   1 of up to 64 tokens, 75.0% of the positions are tokens",
        "dropped   3 empty rows",
        "lengths   18 to 28 tokens, median 23, mean 23.0",
        "note      4 odd tokens",
        "-- row 10 (counted from 0), 28 tokens, 2 supervised parts",
    ):
        assert line in said, said


def test_what_is_learned_is_marked(tokenizer):
    made = report(tokenizer, encoded(tokenizer, ASKED))
    assert "\nTwo and two?[[Four.</s>]]Sure?[[Yes.</s>]]" in render_report(made, colour=False)
    coloured = render_report(made, colour=True)
    assert "Two and two?\x1b[1;32mFour.</s>\x1b[0mSure?" in coloured
    assert "[[" not in coloured
    assert render_report(made) == render_report(made, colour=False)  # no terminal here
    parts = made["sources"][0]["first"][0]["parts"]
    assert [part["supervised"] for part in parts] == [False, True, False, True]
    whole = report(tokenizer, encoded(tokenizer, [("All", True)]))
    assert "\nA[[ll]]" in render_report(whole, colour=False)  # the first token is never learned


def test_characters_that_would_disturb_a_terminal_are_escaped(tokenizer):
    text = "a\x1b[31m\r\x07\u202eb\u00a0é\U0001f600\n\tc"
    said = render_report(
        report(tokenizer, encoded(tokenizer, [("x", False), (text, True)])), colour=False
    )
    assert "x[[a\\x1b[31m\\r\\x07\\u202eb\u00a0é\U0001f600\n\\tc]]" in said


def test_long_parts_lose_their_middle_and_ids_are_shown_without_a_tokenizer(tokenizer):
    source = encoded(tokenizer, [("q", False), ("a" * 5000 + "z", True)])
    said = render_report(report(tokenizer, source), colour=False)
    assert "... (4,401 characters) ..." in said
    assert "z]]" in said
    ids = source.tokens[0]["input_ids"]
    assert f"\n{ids[0]} [[{ids[1]} {ids[2]} " in render_report(report(None, source), colour=False)


def test_the_histogram_doubles_and_holds_every_length(tokenizer):
    sizes = [1, 2, 3, 4, 7, 8, 33, 33]
    examples = [[("q", False), ("a" * (n - 1), True)] if n > 1 else [("q", False)] for n in sizes]
    lengths = report(tokenizer, encoded(tokenizer, *examples))["sources"][0]["lengths"]
    assert lengths["histogram"] == [
        [1, 1, 1],
        [2, 3, 2],
        [4, 7, 2],
        [8, 15, 1],
        [16, 31, 0],
        [32, 63, 2],
    ]
    # A selection of rows: what it leaves out is not counted.
    source = encoded(tokenizer, *examples)
    source.tokens = source.tokens.select([5, 6])
    lengths = report(tokenizer, source)["sources"][0]["lengths"]
    assert (lengths["min"], lengths["max"]) == (8, 33)
    assert sum(count for _, _, count in lengths["histogram"]) == 2


def test_tokens_across_a_character_and_spaces_that_a_first_token_loses(tokenizer):
    # The end of what is learned lies within the bytes of one character.
    ids = tokenizer("é a")["input_ids"]
    source = encoded(tokenizer, [("é a", False)], supervised=1)
    rows = {"input_ids": [ids], "spans": [[1, 2]], "row": [0]}
    source.tokens = datasets.Dataset.from_dict(rows, features=source.tokens.features)
    texts = [p["text"] for p in report(tokenizer, source)["sources"][0]["first"][0]["parts"]]
    assert len(texts) == 3
    assert texts[2] == " a"


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"rows": 0, "kept": 0}, "0 rows gave 0 examples"),
        (
            {"rows": 9, "kept": 0, "dropped": {"NUL": 9}, "places": {"NUL": ["a.jsonl line 1: x"]}},
            "9 rows gave 0 examples, 0 truncated to data.sequence_length 64; 9 rows were skipped "
            "(NUL), such as a.jsonl line 1: x",
        ),
        ({"truncated": 1}, "1 rows gave 1 examples, 1 truncated to data.sequence_length 64. Check"),
    ],
)
def test_a_source_of_which_nothing_is_learned_is_refused(tokenizer, counts, expected):
    silent = encoded(tokenizer, [("Two and two?", False)], **counts)
    with pytest.raises(DataError) as caught:
        check_supervised(silent, MAX)
    assert "source 'chat', got none" in str(caught.value)
    assert expected in str(caught.value)
    check_supervised(encoded(tokenizer, ASKED), MAX)


def test_from_files_to_the_report(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "Two and two? ", "completion": "Four."}] * 3
    rows += [{"prompt": "?" * MAX, "completion": "Never seen."}, {"prompt": "a", "completion": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = FinetuneDataConfig(
        train_files=str(tmp_path / "a.jsonl"), sequence_length=MAX, on_bad_row="skip"
    )
    (source,) = load_sources(cfg)
    made = encode_source(source, Encoder(tokenizer, cfg, len(tokenizer)))
    said = render_report(report(tokenizer, made), colour=False)
    for line in (
        "a          5        2         3          0      57          18  31.6%",
        "a: prompts and completions, in 'prompt' and 'completion'",
        "skipped   1 row: no supervised token within sequence_length (",
        f"skipped   1 row: empty completion ({tmp_path / 'a.jsonl'} line 5: expected text in",
        "samples   1 of up to 64 tokens, 89.1% of the positions are tokens",
        "-- row 0 (counted from 0), 19 tokens, 1 supervised part",
        "\nTwo and two? [[Four.</s>]]",
    ):
        assert line in said, said


def test_what_is_evaluated_on_stands_apart(tokenizer):
    train = encoded(tokenizer, ASKED, name="a", rows=3, dropped={"x": 2}, truncated=1, cut_off=99)
    other = encoded(tokenizer, ASKED, name="b")
    held = encoded(tokenizer, ASKED, ASKED, name="a")
    train.format, held.format = "to train", "to look at"
    made = report(tokenizer, train, other, evaluated=[held], samples=7)
    assert [(s["name"], s["use"], s["format"]) for s in made["sources"]] == [
        ("a", "train", "to train"),
        ("b", "train", "examples"),
        ("a", "eval", "to look at"),
    ]
    assert [s["packed"] and s["packed"]["samples"] for s in made["sources"]] == [7, 1, None]
    assert made["total"]["rows"] == 4
    assert made["total"]["cut_off"] == 99
    assert made["total"]["tokens"] == train.counts.tokens + other.counts.tokens
    said = render_report(made, colour=False)
    assert "truncated 99 tokens of 1 examples, which are not trained on" in said
    assert [line.split("  ")[0] for line in said.splitlines()[1:5]] == [
        "a", "b", "all", "a (to evaluate on)"
    ]  # fmt: skip
    assert "\na (to evaluate on): to look at\n" in said


def test_inspecting_a_stream_makes_its_checks_and_splits_nothing_off(
    tmp_path, tiny_llama, monkeypatch, capsys
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "e").mkdir()
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "e/a.jsonl"]
    for file, count in zip(files, (20, 30, 10), strict=True):
        rows = [{"prompt": f"{i} and ", "completion": f"{i} are"} for i in range(count)]
        file.write_text("\n".join(map(json.dumps, rows)))

    def inspect(weight: float | None, **settings) -> dict:
        sources = [SourceConfig(files=str(file), weight=weight) for file in files[:2]]
        data = FinetuneDataConfig(
            sources=sources, streaming=True, sequence_length=MAX, eval_split=0.5, **settings
        )
        model = FinetuneModelConfig(name_or_path=str(tiny_llama))
        train = FinetuneTrainConfig(max_steps=9)
        cfg = FinetuneConfig(output_dir=str(tmp_path / "run"), model=model, data=data, train=train)
        return inspect_data(cfg)

    with pytest.raises(DataError, match=r"expected a weight .* of each stream"):
        inspect(None)
    made = inspect(1.0)
    assert [s["packed"]["held_out"] for s in made["sources"]] == [0, 0]
    assert made["total"]["examples"] == 50
    made = inspect(1.0, eval_files=str(files[2]))
    assert [(s["name"], s["use"], s["examples"]) for s in made["sources"]] == [
        ("a", "train", 20), ("b", "train", 30), ("a", "eval", 10)
    ]  # fmt: skip
    assert made["total"]["examples"] == 50
    assert "WARNING" not in capsys.readouterr().out
    (tmp_path / "link.jsonl").symlink_to(files[1])
    inspect(1.0, eval_files=str(tmp_path / "link.jsonl"))
    said = f"WARNING: {files[1]} is both trained on and evaluated on, so evaluations measure"
    assert said in capsys.readouterr().out
