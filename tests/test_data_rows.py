"""Sources of examples: which format rows have, and that what is in a file is what is learned."""

import bz2
import csv
import gzip
import json
import lzma
import pickle
import random
import re
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toolkit.config.data import DataConfig, SourceConfig
from toolkit.data.examples.recognise import (
    Conversation,
    PromptCompletion,
    Text,
    Tokens,
    parse_example,
    recognise_layout,
)
from toolkit.data.sources import instructions, tables
from toolkit.data.sources.files import list_sources
from toolkit.data.sources.row_values import BadRow, catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


ASK = {"role": "user", "content": "Two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    ],
}
OTHER_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "x",
            "function": {"name": "find", "arguments": {"where": {"city": "Łódź"}, "n": None}},
        }
    ],
}
RESULT = {"role": "tool", "name": "add", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(*turns: dict, **more) -> dict:
    return {"messages": [ASK, *turns, ANSWER], **more}


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def load(*files: str, **settings) -> list[DataSource]:
    return load_sources(DataConfig(train_files=list(files), **settings))


def read(source: DataSource) -> list:
    found = [catch_bad_row(source.example, stored) for stored in source.rows]
    bad = [example for example in found if isinstance(example, BadRow)]
    assert not bad, bad
    return found


def places(source: DataSource, rows=None) -> list[str]:
    return [source.describe_place(stored, n) for n, stored in enumerate(rows or source.rows)]


def example(row: dict, *, text: bool = False):
    return parse_example(row, recognise_layout([row], text=text))


# Formats


def test_text_and_pairs():
    assert example({"text": "a"}) == Text("a")
    assert example({"prompt": "", "completion": "b", "text": "a"}, text=True) == Text("a")
    assert example({"prompt": "", "completion": "b"}) == PromptCompletion("", "b")


def test_messages_keep_every_key_and_the_order_of_keys():
    thinking = {"role": "assistant", "reasoning_content": "2+2", "content": "Four.", "extra": [1]}
    row = {"messages": [ASK, thinking], "chat_template_kwargs": {"enable_thinking": True}}
    found = example(row)
    assert found == Conversation([ASK, thinking], None, {"enable_thinking": True}, 0)
    assert json.dumps(found.messages) == json.dumps(row["messages"])


def test_all_roles():
    turns = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "tool")]
    assert len(example({"messages": [*turns, ANSWER]}).messages) == 5


def test_turn_lists_tell_prompt_from_completion():
    before = {"role": "assistant", "content": "Ask me."}
    found = example({"prompt": [before, ASK], "completion": [ANSWER], "tools": [TOOL]})
    assert found == Conversation([before, ASK, ANSWER], [TOOL], {}, supervised_from=2)


def test_content_in_parts_is_one_text():
    parts = [{"type": "text", "text": "Two "}, {"type": "text", "text": "and two?"}]
    found = example({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert found.messages[0]["content"] == "Two and two?"


def test_sharegpt():
    call = json.dumps({"name": "add", "arguments": {"a": 2}})
    names = ["system", "human", "function_call", "observation", "gpt"]
    values = ["Be brief.", "Two and two?", call, "4", "Four."]
    turns = [{"from": n, "value": v} for n, v in zip(names, values, strict=True)]
    found = example({"conversations": turns, "tools": json.dumps([TOOL])})
    roles = [m["role"] for m in found.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    ]
    assert found.tools == [TOOL]
    # The same turns in OpenAI's names are recognised by their keys, not by the column.
    assert example({"conversations": [ASK, ANSWER]}).messages == [ASK, ANSWER]
    with_column = example({"conversations": turns[1:2] + turns[4:], "system": "Be brief."})
    assert with_column.messages == [found.messages[i] for i in (0, 1, 4)]


def test_alpaca():
    row = {
        "instruction": "Add.",
        "input": "2 2",
        "output": "4",
        "text": "all of it",
        "history": None,
    }
    found = example(row)
    assert [m["content"] for m in found.messages] == ["Add.\n\n2 2", "4"]
    row |= {"input": "", "history": [["Hi.", "Hello."]], "system": "Be brief."}
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in example(row).messages] == roles
    assert [m["content"] for m in example(row).messages][1:] == ["Hi.", "Hello.", "Add.", "4"]


def test_arguments_in_json_text_become_a_mapping():
    function = {"name": "add", "arguments": '{"a": 2}'}
    for call in ({"function": function}, function, {"function": {**function, "arguments": ""}}):
        turn = {"role": "assistant", "tool_calls": [call]}
        made = example({"messages": [ASK, turn]}).messages[1]["tool_calls"][0]["function"]
        expected = {"a": 2} if call.get("function", call)["arguments"] else {}
        assert made == {"name": "add", "arguments": expected}


def test_tokens():
    ids = [5, 6, 7, 8]
    labels = [-100, -100, 7, 8]
    mask = [0, 0, 1, 1]
    assert example({"input_ids": ids}) == Tokens(ids)
    assert example({"input_ids": ids, "labels": labels}) == Tokens(ids, labels)
    assert example({"input_ids": ids, "completion_mask": mask}) == Tokens(ids, labels)
    assert example({"input_ids": ids, "assistant_masks": mask, "text": "x"}) == Tokens(ids, labels)
    both = {"input_ids": ids, "completion_mask": mask, "assistant_masks": [0, 0, 0, 1]}
    assert example(both) == Tokens(ids, [-100, -100, -100, 8])
    padded = {"input_ids": [*ids, 0], "labels": [*labels, 0], "attention_mask": [1, 1, 1, 1, 0]}
    assert example(padded) == Tokens(ids, labels)


def test_the_more_telling_columns_win_and_the_most_common_layout():
    assert recognise_layout([chat(prompt="x", prompt_id="y")]).shape == "messages"
    rows = [{"text": "a stray one"}, chat(), chat()]
    assert recognise_layout(rows).shape == "messages"
    assert recognise_layout([{"messages": [ASK]}], text=True).columns == ("messages",)
    assert (
        str(recognise_layout([chat()]))
        == "conversations (turns with role and content), in 'messages'"
    )


def test_an_unknown_format_names_row_and_columns(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [{"question": "2+2", "answer": "4"}])
    with pytest.raises(DataError) as caught:
        load(file)
    said = str(caught.value)
    assert f"{file} line 1" in said
    assert "'question', 'answer'" in said
    for column in ("'text'", "'prompt'", "'messages'", "'instruction'", "'input_ids'"):
        assert column in said


# Files


TABLES = {
    "chat": [chat(), chat(RESULT)],
    "text": [{"text": "one"}, {"text": 'two\r\nlines, "quoted"'}],
    "tokens": [{"input_ids": [1, 2]}, {"input_ids": [3]}],
    "alpaca": [{"instruction": "a", "input": "", "output": "c"}] * 2,
}


def write_all(folder: Path, rows: list[dict]) -> dict[str, str]:
    """Write `rows` in every kind of file, and return kind -> path."""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "a.parquet", row_group_size=1)
    for name, new in (("s.arrow", pa.ipc.new_stream), ("f.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(folder / name), "wb") as out, new(out, table.schema) as stream:
            stream.write_table(table)
    text = "".join(json.dumps(row) + "\n\n" for row in rows).encode()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    (folder / "lines.json").write_bytes(text)
    (folder / "list.json").write_text(json.dumps(rows, indent=1))
    with open(folder / "a.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(text))
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(text))
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as out:
        out.write(text)
    datasets.Dataset(table).save_to_disk(str(folder / "saved"))
    return {p.name: str(p) for p in folder.iterdir()}


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_file_gives_the_same_examples_read_or_streamed(tmp_path, name):
    rows = TABLES[name]
    expected = [example(row) for row in rows]
    paths = write_all(tmp_path, rows)
    saved = paths.pop("saved")
    assert len(paths) == 11
    for kind, path in paths.items():
        for streaming in (False, True):
            (source,) = load(path, streaming=streaming)
            assert isinstance(source.rows, datasets.IterableDataset) == streaming
            assert read(source) == expected, (kind, streaming)
            if streaming:
                assert [source.example(r) for r in source.rows.skip(1)] == expected[1:], kind
    for streaming in (False, True):
        (source,) = load_sources(DataConfig(dataset_name=saved, streaming=streaming))
        assert read(source) == expected


def shards_of(source: DataSource) -> list[list[dict]]:
    assert source.sizes is not None
    count = source.rows.num_shards
    assert len(source.sizes) == count
    return [list(source.rows.shard(count, i) if count > 1 else source.rows) for i in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_json_lines_in_parts_are_those_of_the_whole_file(tmp_path, monkeypatch, seed):
    """Lines of any length, blank ones, any end of a line, any cut; each is in one part."""
    draw, file = random.Random(seed), tmp_path / "a.jsonl"
    content = b"\xef\xbb\xbf" * draw.randrange(2)
    for i in range(draw.randrange(1, 300)):
        content += json.dumps({"text": f"{i} {'x' * draw.choice((0, 9, 60, 900))}"}).encode()
        content += draw.choice((b"\n", b"\r\n", b"\n\n", b"\n  \n"))
    file.write_bytes(content.rstrip() if draw.randrange(2) else content)
    (whole,) = load(str(file))
    assert whole.sizes == (file.stat().st_size,)
    monkeypatch.setattr(tables, "_SHARD_BYTES", draw.choice((1, 7, 100, 3000)))
    monkeypatch.setattr(tables, "_SHARDS", draw.choice((2, 3, 50, 500)))
    (source,) = load(str(file), streaming=True)
    parts = shards_of(source)
    assert sum(source.sizes) == file.stat().st_size
    assert len(parts) > 1 or file.stat().st_size < 6000
    assert [source.row(r) for part in parts for r in part] == list(map(whole.row, whole.rows))
    # The place of a row leads to it.
    for row in (part[-1] for part in parts if part):
        number, begin = re.search(
            r"line (\d+)(?: of those after byte (\d+))?$", source.describe_place(row, 0)
        ).groups(default="0")
        lines = (content[max(0, int(begin) - 1) :]).split(b"\n")[1 if int(begin) else 0 :]
        assert json.loads(lines[int(number) - 1].decode("utf-8-sig")) == source.row(row)


def test_parquet_in_parts_is_the_whole_file(tmp_path, monkeypatch):
    table = pa.table({"text": [f"{i} {'x' * (i % 50)}" for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    monkeypatch.setattr(tables, "_SHARD_BYTES", 1000)
    monkeypatch.setattr(tables, "_SHARDS", 6)
    (source,) = load(str(tmp_path / "a.parquet"), streaming=True)
    parts = shards_of(source)
    assert 4 <= len(parts) <= 8
    assert max(source.sizes) < 2 * min(source.sizes[:-1])
    rows = [row for part in parts for row in part]
    assert [source.row(row) for row in rows] == table.to_pylist()
    assert source.describe_place(rows[777], 0).endswith("a.parquet row 777 (counted from 0)")


def test_what_cannot_be_cut_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_SHARD_BYTES", 1)
    paths = write_all(tmp_path, TABLES["text"])
    one_group = pa.Table.from_pylist(TABLES["text"] * 9)
    pq.write_table(one_group, tmp_path / "a.parquet", row_group_size=100)
    for kind, path in paths.items():
        if kind != "saved":
            (source,) = load(path, streaming=True)
            cut = Path(path).suffix in (".jsonl",) or Path(path).name == "lines.json"
            assert (len(source.sizes) > 1) == cut, path
    # Files enough for all ranks stay whole.
    for i in range(300):
        (tmp_path / f"many{i}.jsonl").write_text('{"text": "a"}\n' * 9)
    (source,) = load(str(tmp_path / "many*.jsonl"), streaming=True)
    assert source.rows.num_shards == 300


def test_a_data_set_by_name_of_rows_that_differ(tmp_path):
    rows = [chat(CALL, RESULT, tools=[TOOL]), chat(OTHER_CALL), chat()]
    jsonl(tmp_path / "train.jsonl", rows)
    expected = [[m["role"] for m in row["messages"]] for row in rows]
    for streaming in (False, True):
        (source,) = load_sources(DataConfig(dataset_name=str(tmp_path), streaming=streaming))
        assert source.name == tmp_path.name
        found = read(source)
        assert [[m["role"] for m in f.messages] for f in found] == expected
        arguments = [f.messages[1]["tool_calls"][0]["function"]["arguments"] for f in found[:2]]
        assert arguments == [{"a": 2, "b": 2}, {"where": {"city": "Łódź"}, "n": None}]
        row = f"row 1{' of a shard' if streaming else ''} (counted from 0)"
        assert (
            source.describe_place(list(source.rows)[1], 1) == f"data.dataset_name {tmp_path} {row}"
        )
    with pytest.raises(DataError, match=r"data\.dataset_name .* cannot be read"):
        load_sources(DataConfig(dataset_name=str(tmp_path), dataset_split="dev", streaming=True))


def test_rows_that_differ_survive_byte_for_byte(tmp_path):
    rows = [chat(CALL, RESULT, tools=[TOOL]), chat(OTHER_CALL), chat(), chat(tools=None, n=1e30)]
    for name, text in (
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
        ("a.json", json.dumps(rows)),
    ):
        (tmp_path / name).write_text(text)
        (source,) = load(str(tmp_path / name))
        stored = [source.row(row) for row in source.rows]
        assert [json.dumps(row) for row in stored] == [json.dumps(row) for row in rows]
        kept = [json.dumps(found.messages) for found in read(source)]
        assert kept == [json.dumps(row["messages"]) for row in rows]
    # The control: through Arrow's columns each call gets the arguments of all others.
    calls = [row["messages"][1] for row in rows[:2]]
    mixed = pa.Table.from_pylist([{"messages": [call]} for call in calls]).to_pylist()
    assert "where" in mixed[0]["messages"][0]["tool_calls"][0]["function"]["arguments"]


def test_nulls_that_arrow_fills_in_are_not_passed_on(tmp_path):
    rows = [chat(CALL, RESULT, tools=[TOOL]), chat(OTHER_CALL)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for streaming in (False, True):
        (source,) = load(str(tmp_path / "a.parquet"), streaming=streaming)
        first, second = read(source)
        assert first.messages == rows[0]["messages"]
        assert first.tools == [TOOL]
        arguments = second.messages[1]["tool_calls"][0]["function"]["arguments"]
        assert arguments == {"where": {"city": "Łódź"}}  # what was null cannot be told apart
        assert second.tools is None


def test_places(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n" + json.dumps(chat()) + "\n\n \n" + json.dumps(chat()) + "\n")
    listed = tmp_path / "a.json"
    listed.write_text(json.dumps([chat(), chat()]))
    table = tmp_path / "a.csv"
    table.write_text('text,n\n"two\nlines",1\nlast,2\n')
    (source,) = load(str(lines), str(listed))
    expected = [f"{lines} line 2", f"{lines} line 5"]
    expected += [f"{listed} row {i} (counted from 0)" for i in (0, 1)]
    assert places(source) == expected
    (source,) = load(str(table))
    assert places(source) == [f"{table} line 2", f"{table} line 4"]
    parts = []
    for name in ("b", "c"):
        parts.append(str(tmp_path / f"{name}.parquet"))
        pq.write_table(pa.table({"text": ["x", "y"]}), parts[-1])
    (source,) = load(*parts)
    expected = [f"{part} row {i} (counted from 0)" for part in parts for i in (0, 1)]
    assert places(source) == expected
    (source,) = load(*parts, streaming=True)
    assert places(source) == expected
    second = source.rows.shard(2, 1)  # one shard a file, whatever order they are read in
    assert places(source, second) == expected[2:]


def test_globs_folders_sources_and_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("b.v1.jsonl", "a.jsonl.gz", "more/a.jsonl"):
        text = json.dumps(chat(name=name)) + "\n"
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt") as out:
            out.write(text)
    sources = [
        SourceConfig(files="*.jsonl*", weight=3),
        SourceConfig(files="more", weight=1, max_repeats=2),
        SourceConfig(files=["b.v1.jsonl"], name="mine", weight=1),
    ]
    found = load_sources(DataConfig(sources=sources))
    assert [s.name for s in found] == ["a", "a-2", "mine"]
    assert [len(s.rows) for s in found] == [2, 1, 1]
    assert [(s.weight, s.max_repeats) for s in found] == [(3, None), (1, 2), (1, None)]
    assert [s.row(r)["name"] for s in found for r in s.rows] == [
        "a.jsonl.gz",
        "b.v1.jsonl",
        "more/a.jsonl",
        "b.v1.jsonl",
    ]
    evaluated = load_sources(DataConfig(eval_files=["more", "b.v1.jsonl"]), purpose="eval")
    assert [s.name for s in evaluated] == ["a", "b.v1"]
    assert load_sources(DataConfig(train_files="*.jsonl*"), purpose="eval") == []
    twice = [SourceConfig(files="more", name=name) for name in ("x", "x", "x-2")]
    assert len({s.name for _, s in list_sources(DataConfig(sources=twice))}) == 3


def test_text_files_are_documents(tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 30_000)
    (tmp_path / "b.txt").write_text("b")
    for streaming in (False, True):
        (source,) = load(str(tmp_path), streaming=streaming)
        found = read(source)
        assert [(t.start, t.end) for t in found] == [(True, False), (False, True), (True, True)]
        assert "".join(t.text for t in found) == "a line\n" * 30_000 + "b"
        assert source.layout.format == "text"


def test_only_the_columns_of_the_format_are_read(tmp_path):
    blob = {"image": b"\x00" * 9}
    pq.write_table(pa.Table.from_pylist([chat(**blob)]), tmp_path / "a.parquet")
    for streaming in (False, True):
        (source,) = load(str(tmp_path / "a.parquet"), streaming=streaming)
        assert list(source.row(next(iter(source.rows)))) == ["messages"]


def test_rows_are_cached_until_a_file_changes(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [chat()])
    (first,), (again,) = load(file), load(file)
    assert first.rows._fingerprint == again.rows._fingerprint
    jsonl(tmp_path / "a.jsonl", [chat(), chat()])
    (changed,) = load(file)
    assert len(changed.rows) == 2


def test_a_source_goes_to_another_process_as_its_path(tmp_path):
    pq.write_table(pa.table({"text": ["x" * 1000] * 1000}), tmp_path / "a.parquet")
    (source,) = load(str(tmp_path / "a.parquet"))
    packed = pickle.dumps(source)
    assert len(packed) < 20_000
    assert read(pickle.loads(packed)) == read(source)


def test_rows_of_another_layout_are_bad():
    layout = recognise_layout([chat()])
    with pytest.raises(BadRow, match=r"expected a column 'messages'.*got 'text'"):
        parse_example({"text": "a"}, layout)


# The built-in instructions


def test_builtin_instructions(monkeypatch):
    cfg = DataConfig()
    assert load_sources(cfg, purpose="eval") == []
    files = instructions.find_stdlib_files()[::12]
    monkeypatch.setattr(instructions, "find_stdlib_files", lambda: files)
    (source,) = load_sources(cfg)
    found = read(source)
    assert len(found) > 300
    assert all([m["role"] for m in f.messages] == ["user", "assistant"] for f in found)
    assert max(len(m["content"]) for f in found for m in f.messages) < 2500
    again = [pair for file in files for pair in instructions._iterate_questions(file)]
    assert [[m["content"] for m in f.messages] for f in found] == [
        list(pair) for pair in dict.fromkeys(again)
    ]
    (streamed,) = load_sources(DataConfig(streaming=True))
    assert read(streamed) == found


def test_a_function_asks_for_its_body_and_for_its_docstring(tmp_path):
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    @property\n"
        "    def area(self, unit='m'):\n"
        '        """Return the area. In square metres.\n\n        Of all sides.\n        """\n'
        "        # Squared.\n"
        "        return self.side ** 2\n"
        "    def nothing(self):\n"
        '        """Return nothing at all."""\n'
        "        raise NotImplementedError\n"
        "    def bare(self): return 1\n"
    )
    (asked, body), (shown, summary) = instructions._iterate_questions(tmp_path / "a.py")
    assert asked.endswith(
        "\n\ndef area(self, unit='m'):\n"
        '    """Return the area. In square metres.\n\n    Of all sides."""'
    )
    assert body == "    # Squared.\n    return self.side ** 2"
    assert shown.endswith(f"\n\ndef area(self, unit='m'):\n{body}")
    assert summary == "Return the area."


def test_text_files_name_the_file_and_others_the_row(tmp_path):
    for name, text in (("a", "fine"), ("b", "also fine"), ("c", "bro\0ken")):
        (tmp_path / f"{name}.txt").write_text(text)
    files = [str(tmp_path / f"{name}.txt") for name in "abc"]
    for streaming in (False, True):
        (source,) = load_sources(DataConfig(train_files=files, streaming=streaming))
        found = [catch_bad_row(source.example, stored) for stored in source.rows]
        assert [e.text for e in found[:2]] == ["fine", "also fine"]
        assert isinstance(found[2], BadRow)
        assert places(source)[2] == f"{files[2]} piece 0 (counted from 0)"
        stored = list(source.rows)[2]
        assert str(source.make_error(stored, 2, found[2])).startswith(f"{files[2]} piece 0 ")
    assert source.rows.num_shards == 3
    # Rows that say nothing of where they come from are numbered.
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    (source,) = load_sources(DataConfig(dataset_name=str(tmp_path / "saved"), streaming=True))
    where = f"data.dataset_name {tmp_path / 'saved'}"
    assert places(source)[1] == f"{where} row 1 of a shard (counted from 0)"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_later_files_have_is_no_silent_loss(tmp_path, streaming):
    """Without its labels a row would be learned whole."""
    pq.write_table(pa.table({"input_ids": [[5, 6]], "id": [1]}), tmp_path / "a.parquet")
    more = {"input_ids": [[5, 6]], "labels": [[-100, 6]], "note": ["x"]}
    pq.write_table(pa.table(more), tmp_path / "b.parquet")
    expected = r"b.parquet has other columns than the first file: labels; make it a separate "
    with pytest.raises(DataError, match=expected):
        list(load(str(tmp_path), streaming=streaming)[0].rows)
    # What is of no use to any format may differ.
    pq.write_table(pa.table({"input_ids": [[7]], "note": ["x"]}), tmp_path / "b.parquet")
    assert len(list(load(str(tmp_path), streaming=streaming)[0].rows)) == 2


@pytest.mark.parametrize("mask", ["labels", "completion_mask", "assistant_masks"])
def test_a_row_without_the_mask_that_others_have_is_refused(tmp_path, mask):
    whole = {"input_ids": [5, 6], mask: [-100, 6] if mask == "labels" else [0, 1]}
    file = tmp_path / "a.jsonl"
    for bad in ({"input_ids": [5, 6], mask: None}, {"input_ids": [5, 6]}):
        file.write_text("".join(json.dumps(row) + "\n" for row in (whole, whole, bad)))
        (source,) = load(str(file))
        *good, last = source.rows
        assert [source.example(row).labels for row in good] == [[-100, 6]] * 2
        with pytest.raises(BadRow, match=f"expected a column '{mask}'"):
            source.example(last)
