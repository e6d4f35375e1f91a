"""Rows that cannot be used: each is named with its file and place, and its neighbours survive."""

import json
import struct
import tracemalloc
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import run_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit import ranks
from toolkit.config.data import DataConfig, FinetuneDataConfig, SourceConfig
from toolkit.data import row_formats
from toolkit.data.examples.recognise import Conversation, Example
from toolkit.data.sources import file_readers
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import Counts
from toolkit.data.tokens.text_ids import BATCH_BYTES, TextTokenizer
from toolkit.errors import DataError

LIMIT = 20_000
ASK = {"role": "user", "content": "Two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}


def turns(*more: Any) -> dict:
    return {"messages": [ASK, ANSWER, *more]}


def call(**function: Any) -> dict:
    return turns({"role": "assistant", "tool_calls": [{"function": function}]})


def share(*more: Any) -> dict:
    return {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, *more]
    }


def ids(**more: Any) -> dict:
    return {"input_ids": [5, 6, 7], **more}


GOOD: dict[str, dict] = {
    "messages": turns(),
    "sharegpt": share(),
    "pair": {"prompt": "a", "completion": "b"},
    "lists": {"prompt": [ASK], "completion": [ANSWER]},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "text": {"text": "words"},
    "tokens": ids(),
}
# Rows of JSON lines and JSON lists: bytes where JSON has no way to say it, else what is written.
BAD: dict[str, dict[str, tuple[Any, str]]] = {
    "messages": {
        "not_utf8": (
            b'{"messages": [{"role": "user", "content": "caf\xe9"}]}',
            "UTF-8, got byte 0xe9",
        ),
        "utf16": (b'{\x00"\x00m\x00"\x00:\x001\x00}\x00', "expected JSON"),
        "nul_byte": (b'{"messages": "a\x00b"}', "expected JSON"),
        "comma_too_many": (b'{"messages": [],}', "expected JSON"),
        "no_quotes": (b"{messages: []}", "expected JSON"),
        "two_rows_in_one": (b'{"messages": []} {"messages": []}', "expected JSON"),
        "nan": (b'{"messages": [], "n": NaN}', "NaN is no JSON"),
        "infinite": (turns({"role": "user", "content": "a", "n": 1e999}), "finite number"),
        "list": ([ASK, ANSWER], "expected a JSON mapping, got list"),
        "number": (5, "expected a JSON mapping, got int 5"),
        "null": (None, "expected a JSON mapping, got null"),
        "huge": (turns({"role": "user", "content": "x" * LIMIT}), "at most 20,000 bytes"),
        "too_deep": (b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deep"),
        "other_column": ({"text": "a"}, "expected a column 'messages'"),
        "no_column": ({}, "expected a column 'messages'"),
        "surrogate": (
            turns({"role": "user", "content": "\ud83d"}),
            "lone surrogate '\\ud83d' at 0",
        ),
        "surrogate_key": (turns({"role": "user", "content": "a", "\udc00": 1}), "lone surrogate"),
        "nul": (turns({"role": "user", "content": "a\0b"}), "NUL character at 1"),
        "nul_in_tool": (turns() | {"tools": [{"name": "\0"}]}, "'tools[0].name', got a NUL"),
        "messages_null": ({"messages": None}, "expected a list in 'messages', got null"),
        "messages_text": ({"messages": "hello"}, "expected a list, a mapping or JSON text"),
        "messages_number": ({"messages": 5}, "expected a list in 'messages', got int 5"),
        "messages_mapping": ({"messages": ASK}, "expected a list in 'messages', got dict"),
        "empty": ({"messages": []}, "got an empty list"),
        "turn_text": (turns("hello"), "expected a turn (a mapping) in 'messages[2]', got str"),
        "turn_null": (turns(None), "expected a turn (a mapping) in 'messages[2]', got null"),
        "no_role": (turns({"content": "a"}), "expected 'role' and 'content' in 'messages[2]'"),
        "sharegpt_turn": (turns({"from": "gpt", "value": "a"}), "got 'from', 'value'"),
        "unknown_role": (turns({"role": "cat", "content": "a"}), "in 'messages[2]', got str 'cat'"),
        "role_null": (turns({"role": None, "content": "a"}), "in 'messages[2]', got null"),
        "role_list": (turns({"role": ["user"], "content": "a"}), "got list ['user']"),
        "no_content": (turns({"role": "user"}), "expected 'content' in 'messages[2]'"),
        "content_null": (
            turns({"role": "user", "content": None}),
            "'messages[2].content', got null",
        ),
        "content_number": (turns({"role": "user", "content": 5}), "text in 'messages[2].content'"),
        "image": (
            turns({"role": "user", "content": [{"type": "image", "url": "x"}]}),
            "expected a part of type text in 'messages[2].content[0]', got str 'image'",
        ),
        "empty_answer": (turns({"role": "assistant", "content": ""}), "an answer in turn 2"),
        "blank_answer": (turns({"role": "assistant", "content": " \n"}), "an answer in turn 2"),
        "null_answer": (turns({"role": "assistant", "content": None}), "an answer in turn 2"),
        "old_call": (
            turns({"role": "assistant", "content": None, "function_call": {}}),
            "expected text in 'messages[2].tool_calls[0].function.name', got null",
        ),
        "no_answer": ({"messages": [ASK, ASK]}, "a turn of the assistant to train on"),
        "call_of_user": (
            turns({"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}),
            "tool_calls in turns of the assistant only",
        ),
        "calls_text": (
            turns({"role": "assistant", "tool_calls": "f()"}),
            "JSON text in 'messages[2].tool",
        ),
        "call_text": (turns({"role": "assistant", "tool_calls": ["f()"]}), "tool call (a mapping)"),
        "call_no_name": (
            call(arguments={}),
            "expected text in 'messages[2].tool_calls[0].function",
        ),
        "call_empty": (turns({"role": "assistant", "tool_calls": [{}]}), "name and arguments"),
        "arguments_text": (call(name="f", arguments="a=1"), "JSON text in 'messages[2].tool_calls"),
        "arguments_list": (call(name="f", arguments=[1]), "function.arguments', got list [1]"),
        "arguments_nul": (call(name="f", arguments='{"a": "\\u0000"}'), "got a NUL character"),
        "tools_text": (turns() | {"tools": "add"}, "JSON text in 'tools'"),
        "tools_number": (turns() | {"tools": [5]}, "'tools[0]', got int 5"),
        "kwargs_list": (
            turns() | {"chat_template_kwargs": [1]},
            "a mapping in 'chat_template_kwargs'",
        ),
        "kwargs_taken": (
            turns() | {"chat_template_kwargs": {"tools": []}},
            "which the toolkit sets",
        ),
        "weight_half": (turns(ANSWER | {"weight": 0.5}), "expected 0 or 1 in 'messages[2].weight'"),
    },
    "sharegpt": {
        "no_value": (share({"from": "gpt"}), "expected 'from' and 'value' in 'conversations[2]'"),
        "unknown_from": (share({"from": "cat", "value": "a"}), "got str 'cat'"),
        "from_number": (share({"from": 1, "value": "a"}), "got int 1"),
        "value_null": (share({"from": "gpt", "value": None}), "'conversations[2].value', got null"),
        "empty_value": (share({"from": "gpt", "value": ""}), "an answer in turn 2"),
        "call_text": (share({"from": "function_call", "value": "f()"}), "or JSON text in"),
        "two_systems": (
            {"conversations": [{"from": "system", "value": "a"}, *share()["conversations"]]}
            | {"system": "b"},
            "expected one system text",
        ),
    },
    "pair": {
        "no_completion": ({"prompt": "a"}, "expected a column 'completion'"),
        "empty_completion": ({"prompt": "a", "completion": ""}, "expected text in 'completion'"),
        "null_completion": ({"prompt": "a", "completion": None}, "'completion', got null"),
        "number_prompt": ({"prompt": 5, "completion": "b"}, "expected text in 'prompt', got int 5"),
        "list_completion": ({"prompt": "a", "completion": [ANSWER]}, "got list"),
        "surrogate": ({"prompt": "a", "completion": "\udfff"}, "lone surrogate"),
    },
    "lists": {
        "completion_of_user": (
            {"prompt": [ASK], "completion": [ASK]},
            "of the assistant to train on",
        ),
        "answer_in_prompt": ({"prompt": [ASK, ANSWER], "completion": [ASK]}, "in the completion"),
        "empty_prompt": ({"prompt": [], "completion": [ANSWER]}, "turns in 'prompt', got an empty"),
        "number_as_prompt": ({"prompt": 1, "completion": [ANSWER]}, "list of turns in 'prompt'"),
    },
    "alpaca": {
        "empty_instruction": (
            {"instruction": " ", "output": "b"},
            "expected text in 'instruction'",
        ),
        "empty_output": ({"instruction": "a", "output": ""}, "an answer in turn 1"),
        "null_output": ({"instruction": "a", "output": None}, "text in 'output', got null"),
        "history": ({"instruction": "a", "output": "b", "history": [["c"]]}, "and its answer"),
    },
    "text": {
        "null": ({"text": None}, "expected text in 'text', got null"),
        "number": ({"text": 5}, "expected text in 'text', got int 5"),
        "list": ({"text": ["a"]}, "expected text in 'text', got list"),
        "empty": ({"text": ""}, "expected text in 'text'"),
        "blank": ({"text": " \n\t"}, "expected text in 'text'"),
        "not_utf8": (b'{"text": "\xff\xfe"}', "got byte 0xff at offset 10 of the row"),
        "surrogate": ({"text": "a\ud800b"}, "lone surrogate '\\ud800' at 1"),
    },
    "tokens": {
        "null": ({"input_ids": None}, "expected a list in 'input_ids', got null"),
        "empty": ({"input_ids": []}, "got an empty list"),
        "number": ({"input_ids": 5}, "expected a list in 'input_ids', got int 5"),
        "fraction": ({"input_ids": [1, 1.5]}, "expected an integer in 'input_ids[1]', got float"),
        "truth": ({"input_ids": [1, True]}, "expected an integer in 'input_ids[1]', got bool True"),
        "negative": ({"input_ids": [1, -1]}, "token ids from 0 up, got -1"),
        "nested": ({"input_ids": [[1]]}, "expected an integer in 'input_ids[0]', got list"),
        "short_labels": (ids(labels=[5, 6]), "as many labels as input_ids (3), got 2"),
        "shifted_labels": (ids(labels=[6, 7, -100]), "'labels[0]' to be its token's id 5 or -100"),
        "mask_of_2": (
            ids(completion_mask=[0, 1, 2]),
            "expected 0 and 1 in 'completion_mask', got 2",
        ),
        "long_mask": (ids(assistant_masks=[0, 1, 1, 1]), "as many assistant_masks"),
        "nothing_to_learn": (ids(labels=[-100] * 3), "got labels that leave none"),
        "learned_padding": (
            ids(completion_mask=[0, 0, 1], attention_mask=[1, 1, 0]),
            "got completion_mask and attention_mask that leave none",
        ),
    },
}


def cases(base: str, kind: str) -> list[str]:
    """Return the bad rows that a file of `kind` can hold: what is no JSON breaks a list."""
    rows = BAD[base].items()
    return [
        n
        for n, (row, _) in rows
        if kind == "jsonl"
        or not isinstance(row, bytes | dict)
        or (isinstance(row, dict) and n != "infinite")
    ]


CASES = [(kind, b, name) for kind in ("jsonl", "json") for b in BAD for name in cases(b, kind)]


def as_bytes_of(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).replace("Infinity", "1e999").encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the rows of each base into a file a kind, a good one around each bad one."""
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(file_readers, "ROW_BYTES", LIMIT)
        for base, bad in BAD.items():
            good = as_bytes_of(GOOD[base])
            for kind, first, between, last in (
                ("jsonl", b"", b"\n", b""),
                ("json", b"[", b",\n", b"]"),
            ):
                rows = [good]
                for name in cases(base, kind):
                    rows += [as_bytes_of(bad[name][0]), good]
                (folder / f"{base}.{kind}").write_bytes(first + between.join(rows) + last)
        judged.cache_clear()
        yield folder


@cache
def judged(
    path: Path, streaming: bool = False
) -> tuple[DataSource, list[tuple[str, Example | BadRow]]]:
    cfg = DataConfig(train_files=str(path), streaming=streaming)
    (source,) = load_sources(cfg)
    stored = enumerate(source.rows)
    return source, [
        (source.describe_place(row, n), catch_bad_row(source.example, row)) for n, row in stored
    ]


@pytest.mark.parametrize(("kind", "base", "name"), CASES)
def test_a_bad_row_is_named_and_its_neighbours_survive(folder, kind, base, name):
    path = folder / f"{base}.{kind}"
    source, found = judged(path)
    assert len(found) == 2 * len(cases(base, kind)) + 1
    at = 2 * cases(base, kind).index(name) + 1
    expected = BAD[base][name][1]
    place, bad = found[at]
    assert isinstance(bad, BadRow), bad
    assert expected in str(bad)
    assert 0 < len(bad.reason) < 40
    assert place == f"{path} " + (
        f"line {at + 1}" if kind == "jsonl" else f"row {at} (counted from 0)"
    )
    said = str(source.make_error(source.rows[at], at, bad))
    assert said.startswith(f"{place}: expected ")
    assert "data.on_bad_row: skip" in said
    assert len(said) < 700
    assert "\n" not in said
    good = source.example(next(iter(source.rows)))
    assert found[at - 1][1] == found[at + 1][1] == good
    assert not isinstance(good, BadRow)


@pytest.mark.parametrize("base", GOOD)
def test_a_stream_judges_the_same(folder, base):
    for kind in ("jsonl", "json"):
        read, streamed = (judged(folder / f"{base}.{kind}", way)[1] for way in (False, True))
        assert [(place, str(found)) for place, found in read] == [
            (place, str(found)) for place, found in streamed
        ]


# Policies


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a template that prints turns as they are."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["</s>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return made


def settings(policy: str, files: str = "") -> FinetuneDataConfig:
    return FinetuneDataConfig(train_files=files, on_bad_row=policy)


# The other shapes of conversations come to the same; each takes seconds to start its processes.
@pytest.mark.parametrize("base", ["messages", "pair", "text", "tokens"])
def test_each_bad_row_ends_the_run_by_one_policy_and_is_counted_by_the_other(folder, base):
    path = folder / f"{base}.jsonl"
    source, found = judged(path)
    stops, skips = (
        partial(Encoder(make_tokenizer(), settings(policy), 300).encode_row, source)
        for policy in ("error", "skip")
    )
    counts = Counts()
    for at, stored in enumerate(source.rows):
        counts.add(skips(stored, at))
        if isinstance(bad := found[at][1], BadRow):
            with pytest.raises(DataError) as caught:
                stops(stored, at)
            assert str(caught.value).startswith(f"{path} line {at + 1}: {bad}. ")
            assert str(skips(stored, at)).endswith(str(bad))
        else:
            assert len(stops(stored, at).input_ids) == len(skips(stored, at).input_ids) > 0
    assert counts.kept == len(BAD[base]) + 1
    assert counts.rows == counts.kept + sum(counts.dropped.values()) == len(found)
    for reason, places in counts.places.items():
        same = [place for place, bad in found if isinstance(bad, BadRow) and bad.reason == reason]
        assert counts.dropped[reason] == len(same)
        assert places[0].startswith(f"{same[0]}: expected ")


def encode_on(rank: int, world: int, folder: str, cache: str) -> list:
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    file_readers.ROW_BYTES = LIMIT
    made: list = []
    for name, policy in (
        ("messages.jsonl", "skip"),
        ("tokens.json", "skip"),
        ("pair.json", "error"),
    ):
        cfg = settings(policy, f"{folder}/{name}")
        try:
            (source,) = load_sources(cfg)  # both at the same time
            done = ranks.main_first(
                lambda s=source, c=cfg: encode_source(s, Encoder(make_tokenizer(), c, 300))
            )
            made.append((asdict(done.counts), done.tokens["row"][:]))
        except DataError as error:
            made.append(str(error).removesuffix(" (on rank 0)"))
    # What all are about to say one of them says, what one alone has to say it says itself.
    said = ranks.gather(
        (ranks.is_first_to_report("the same"), ranks.is_first_to_report(f"of {rank}"))
    )
    return [*made, said]


def test_ranks_that_start_together_leave_out_the_same(folder, tmp_path):
    first, second = run_ranks(encode_on, 2, str(folder), str(tmp_path / "cache"))
    assert first == second
    assert sorted(same for same, _ in first[3]) == [False, True]
    assert [own for _, own in first[3]] == [True, True]
    names = (cases("messages", "jsonl"), cases("tokens", "json"))
    for bad, (counts, rows) in zip(map(len, names), first[:2], strict=True):
        assert rows == list(range(0, 2 * bad + 1, 2))  # the good ones
        assert (counts["kept"], sum(counts["dropped"].values())) == (bad + 1, bad)
    assert first[2].startswith(f"{folder / 'pair.json'} row 1 (counted from 0): expected a column")


# CSV

CSV = {
    "few_fields": (b"a", "expected 2 fields ('prompt', 'completion'), got 1"),
    "many_fields": (b"a,b,c", "expected 2 fields ('prompt', 'completion'), got 3"),
    "not_utf8": (b"a,caf\xe9", "UTF-8, got byte 0xe9"),
    "nul": (b"a,b\0c", "NUL character at 1"),
    "text_after_a_quote": (b'a,"b"c', "expected a CSV row, got one that breaks"),
    "huge": (b'a,"' + b"x" * LIMIT + b'"', "at most 20,000 bytes"),
    "huge_line_in_quotes": (b'a,"\n' + b"x" * LIMIT + b'\n"', "at most 20,000 bytes"),
    "huge_in_many_lines": (b'a,"' + b"xxxx\n" * (LIMIT // 4) + b'"', "at most 20,000 bytes"),
    "empty": (b"a,", "expected text in 'completion'"),
    "blank": (b'a," "', "expected text in 'completion'"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", CSV)
def test_csv(tmp_path, monkeypatch, name, streaming):
    monkeypatch.setattr(file_readers, "ROW_BYTES", LIMIT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row, expected = CSV[name]
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,completion\na,1\n\n" + row + b'\n"a\n",2\n')
    _, found = judged(path, streaming)
    assert [getattr(example, "completion", None) for _, example in found] == ["1", None, "2"]
    (_, bad), (last, _) = found[1:]
    assert expected in str(bad)
    assert found[1][0] == f"{path} line 4"
    assert last == f"{path} line {4 + len(row.splitlines())}"


@pytest.mark.parametrize("header", [b"", b"a,a\n1,2\n", b"a,\n1,2\n", b'"a\n', b"\xff,b\n1,2\n"])
def test_a_csv_header_without_names_is_a_broken_file(tmp_path, header):
    (tmp_path / "a.csv").write_bytes(header)
    (tmp_path / "b.csv").write_bytes(b"prompt,completion\na,b\n")
    files = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    if header:
        with pytest.raises(DataError, match=r"a\.csv"):
            load_sources(DataConfig(train_files=files))
    else:  # an empty file has no rows
        assert len(load_sources(DataConfig(train_files=files))[0].rows) == 1


# Columns


def parquet(path: Path, columns: dict[str, list], kind: pa.DataType | None = None) -> None:
    """Write columns of bytes as columns of text, whether they are UTF-8 or not."""
    table = pa.table(columns)
    fields = [pa.field(f.name, kind or _text(f.type)) for f in table.schema]
    arrays = [c.cast(f.type, safe=False) for c, f in zip(table.columns, fields, strict=True)]
    pq.write_table(pa.table(arrays, schema=pa.schema(fields)), path)


def _text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_text(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _text(f.type)) for f in kind])
    return pa.string() if pa.types.is_binary(kind) else kind


def turn(role: Any = b"assistant", content: Any = b"Four.") -> dict:
    return {"role": role, "content": content}


COLUMNS = {
    "not_utf8": ([turn(b"user", b"caf\xe9")], "'messages[0].content', got byte 0xe9 at offset 3"),
    "role_not_utf8": ([turn(b"\xff")], "UTF-8 in 'messages[0].role'"),
    "nul": ([turn(b"user", b"a\0b")], "NUL character at 1"),
    "surrogate": ([turn(b"user", "\ud800".encode("utf-8", "surrogatepass"))], "got byte 0xed"),
    "null": (None, "expected a list in 'messages', got null"),
    "empty": ([], "got an empty list"),
    "null_turn": ([None], "a turn (a mapping) in 'messages[0]', got null"),
    "null_role": ([turn(None)], "expected 'role' and 'content' in 'messages[0]'"),
    "null_content": ([turn(b"user", None)], "text in 'messages[0].content', got null"),
    "null_answer": ([turn(content=None)], "expected an answer in turn 0"),
    "empty_answer": ([turn(content=b"")], "expected an answer in turn 0"),
    "no_answer": ([turn(b"user")], "a turn of the assistant to train on"),
    "unknown_role": ([turn(b"cat")], "got str 'cat'"),
}


@pytest.fixture(scope="module")
def columns(folder):
    good = [turn(b"user"), turn()]
    rows = [good] + [part for row, _ in COLUMNS.values() for part in (row, good)]
    parquet(folder / "a.parquet", {"messages": rows})
    assert b"caf\xe9" in (folder / "a.parquet").read_bytes()
    return folder / "a.parquet"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_parquet(columns, name, streaming):
    _, found = judged(columns, streaming)
    at = 2 * list(COLUMNS).index(name) + 1
    assert COLUMNS[name][1] in str(found[at][1])
    assert found[at][0] == f"{columns} row {at} (counted from 0)"
    good = Conversation([{"role": r, "content": "Four."} for r in ("user", "assistant")])
    assert found[at - 1][1] == found[at + 1][1] == good


def test_the_control_that_one_row_breaks_a_whole_batch_of_text(columns):
    rows = datasets.load_dataset("parquet", data_files=str(columns), split="train")
    with pytest.raises(UnicodeDecodeError):
        rows[0:3]


# Files


def test_a_file_of_nothing_but_bad_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, content, expected in (
        ("a.jsonl", b'{\n"text": "a"\n}\n', "line 1: expected JSON"),
        ("b.jsonl", '{"text": "a"}\n'.encode("utf-16"), "none of the first"),
        ("c.jsonl", b"[1]\n[2]\n", "expected a JSON mapping"),
        ("d.jsonl", b"\n \n", "found no row"),
        ("e.json", b"[]", "found no row"),
        ("f.csv", b"text\n", "found no row"),
        ("g.jsonl.gz", b"not compressed", "cannot be read"),
        ("h.jsonl.zst", b"not compressed", "cannot be read"),
        ("i.parquet", b"PAR1 is not enough", "cannot be read"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        for streaming in (False, True):
            with pytest.raises(DataError) as caught:
                load_sources(
                    DataConfig(train_files=str(path), streaming=streaming, on_bad_row="skip")
                )
            assert expected in str(caught.value), name
            assert str(path) in str(caught.value)


def test_a_huge_line_is_never_in_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (40 << 20) + b'"}\n{"text": "good"}')
    tracemalloc.start()
    tables = list(file_readers.line_tables(str(path), kind="json", limit=1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bad, good = (row for table in tables for row in table.to_pylist())
    assert (bad[file_readers.FAULT] is None, good[file_readers.FAULT] is None) == (False, True)
    assert json.loads(good[file_readers.RAW]) == {"text": "good"}
    assert peak < 12 << 20


@pytest.mark.parametrize(
    ("text", "came"),
    [
        (b'[{"a": 1}', "Expecting ',' delimiter"),
        (b'[{"a": "', "Unterminated string"),
        (b'[{"a": 1}}, {}]', "Expecting ',' delimiter"),
        (b"[{}, {}] [", "Extra data"),
        (b'[{"text": "caf\xe9"}]', "can't decode byte 0xe9"),
        (b"[" * 100_000, "recursion"),
        (b"[" + b"[]," * 60 + b"{}]", "at most 200 bytes and 50 values"),
        (b'["' + b"x" * 200 + b'"]', "at most 200 bytes and 50 values"),
    ],
)
def test_a_broken_list_is_one_error(tmp_path, monkeypatch, text, came):
    if "at most" in came:
        monkeypatch.setattr(file_readers, "LIST_BYTES", 200)
        monkeypatch.setattr(file_readers, "LIST_VALUES", 50)
    (tmp_path / "a.json").write_bytes(text)
    for streaming in (False, True):
        with pytest.raises(DataError) as caught:
            load_sources(DataConfig(train_files=str(tmp_path / "a.json"), streaming=streaming))
        assert came in str(caught.value)
        assert "JSON lines" in str(caught.value)
        assert str(tmp_path / "a.json") in str(caught.value)


def test_a_value_beyond_the_bytes_of_an_arrow_file_is_one_error(tmp_path):
    """Read without a look at it, the offset ends the process."""
    table = pa.table({"prompt": ["aa", "bb", "cc"], "completion": ["x", "y", "z"]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as out:
        out.write_table(table)
    offsets = struct.pack("<4i", 0, 2, 4, 6)
    content = (tmp_path / "a.arrow").read_bytes()
    assert offsets in content
    beyond = content.replace(offsets, struct.pack("<4i", 0, 2, 1 << 30, 6))
    (tmp_path / "a.arrow").write_bytes(beyond)
    with pytest.raises(DataError, match=r"a\.arrow cannot be read from row 0 on"):
        load_sources(DataConfig(train_files=str(tmp_path / "a.arrow")))


# Documents to pretrain on: the same policy, where a row that is left out is an empty document


DOCUMENTS = {
    "null": {"text": None},
    "number": {"text": 5},
    "list": {"text": ["a"]},
    "other_column": {"body": "a"},
    "surrogate": {"text": "\ud800"},
    "not_utf8": b'{"text": "caf\xe9"}',
    "not_json": b'{"text": "a"',
    "no_mapping": b"5",
}


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def documents(path: Path, policy: str = "error") -> list[list[int]]:
    """Return the token ids of each row, a token a byte, without those of its end."""
    cfg = DataConfig(train_files=str(path), on_bad_row=policy, append_eos=False)
    (source,) = load_sources(cfg, row_format=row_formats.DOCUMENTS)
    return encode_source(source, Encoder(make_tokenizer(), cfg, 300)).tokens["input_ids"][:]


def ids_of(*texts: str) -> list[list[int]]:
    return make_tokenizer()(list(texts))["input_ids"]


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_in_json_lines(tmp_path, name, caplog):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + as_bytes_of(DOCUMENTS[name]) + b'\n{"text": "b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 3: expected .*on_bad_row: skip"):
        documents(path)
    assert documents(path, "skip") == ids_of("a", "", "b")
    assert "1 of 3 rows skipped (data.on_bad_row: skip)" in caplog.text
    assert f"{path} line 3: expected" in caplog.text


@pytest.mark.usefixtures("_own_cache")
def test_documents_in_csv_parquet_and_token_ids(tmp_path, caplog):
    (tmp_path / "a.csv").write_bytes(b"n,text\n1,a\n2\n3,b\xff\n4,NA\n")
    with pytest.raises(DataError, match=r"a\.csv line 3: expected 2 fields.*on_bad_row"):
        documents(tmp_path / "a.csv")
    assert documents(tmp_path / "a.csv", "skip") == ids_of("a", "", "", "NA")
    assert "2 of 4 rows skipped" in caplog.text
    parquet(tmp_path / "c.parquet", {"text": [b"a", b"caf\xe9"]})
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\): expected UTF-8.* byte 0xe9 at"):
        documents(tmp_path / "c.parquet")
    assert documents(tmp_path / "c.parquet", "skip") == ids_of("a", "")
    parquet(tmp_path / "a.parquet", {"text": [b"a", None, b"b"]})
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\): .* got null"):
        documents(tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet", "skip") == ids_of("a", "", "b")
    tokens = [{"input_ids": ids} for ids in ([1, 2], [1.5], None, [3])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, tokens)))
    assert documents(tmp_path / "a.jsonl", "skip") == [[1, 2], [], [], [3]]
    pq.write_table(pa.Table.from_pylist([tokens[0], tokens[2]]), tmp_path / "b.parquet")
    assert documents(tmp_path / "b.parquet", "skip") == [[1, 2], []]


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_a_document_of_any_length_costs_little_memory(tmp_path, monkeypatch):
    """A line beyond the bound is a bad row; one below it is tokenised in parts."""
    monkeypatch.setattr(file_readers, "ROW_BYTES", 12 << 20)
    text = "ab " * (3 << 20)  # 9 MB
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text * 2}) + "\n")
    with pytest.raises(DataError, match=r"line 2: expected a row of at most 12,582,912 bytes"):
        documents(path)
    given: list[int] = []
    plain = TextTokenizer.compute_id_lists

    def lists(self, texts, special=False):
        given.append(sum(map(len, texts)))
        return plain(self, texts, special)

    monkeypatch.setattr(TextTokenizer, "compute_id_lists", lists)
    (first, last) = documents(path, "skip")
    assert last == []
    assert len(first) == len(text)
    assert max(given) <= BATCH_BYTES
    assert len(given) > 2


@pytest.mark.usefixtures("_own_cache")
def test_documents_of_several_sources(tmp_path):
    missing = [SourceConfig(files=str(tmp_path / "no.jsonl"))]
    with pytest.raises(DataError, match=r"data\.sources\[0\]\.files: .* matches no file"):
        load_sources(DataConfig(sources=missing), row_format=row_formats.DOCUMENTS)
