"""Names of others: columns, keys of turns and roles (`data.columns`), roles that are understood by
themselves, weights of turns, older names of calls, and what is not used.
"""

import json
import re
from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import ROOT, save_byte_tokenizer
from transformers import AutoTokenizer

from toolkit import config
from toolkit.config.data import DataConfig, FinetuneDataConfig, SourceConfig
from toolkit.data.examples.recognise import Conversation, PromptCompletion, Text
from toolkit.data.row_formats import DOCUMENTS, find_row_format
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.encoded import LATE_COLUMN
from toolkit.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def source_of(tmp_path, rows: list[dict], ending: str = "jsonl", **settings):
    file = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (source,) = load_sources(FinetuneDataConfig(train_files=[str(file)], **settings))
    return source


def examples(source) -> list:
    return [source.example(stored) for stored in source.rows]


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


Q, A = "How many?", "Four."
ASKED = turns(("user", Q), ("assistant", A))
TOOL = {"name": "get", "description": "Get.", "parameters": {"city": {"type": "str"}}}
CALL = {"name": "get", "arguments": {"city": "Rome"}}
PUBLIC = {  # rows as data sets of the Hub have them, the setting, and what they become
    "dolly": (
        {"instruction": Q, "context": "Two and two.", "response": A, "category": "qa"},
        {"input": "context", "output": "response"},
        Conversation(turns(("user", f"{Q}\n\nTwo and two."), ("assistant", A))),
    ),
    "open_orca": (
        {"id": "1", "system_prompt": "Be brief.", "question": Q, "response": A},
        {"system": "system_prompt", "instruction": "question", "output": "response"},
        Conversation(turns(("system", "Be brief."), ("user", Q), ("assistant", A))),
    ),
    "gsm8k": (
        {"question": Q, "answer": A},
        {"prompt": "question", "completion": "answer"},
        PromptCompletion(Q, A),
    ),
    "metamath": (
        {"query": Q, "response": A, "type": "x"},
        {"instruction": "query", "output": "response"},
        Conversation(ASKED),
    ),
    "aya": (
        {"inputs": Q, "targets": A, "language": "eng"},
        {"instruction": "inputs", "output": "targets"},
        Conversation(ASKED),
    ),
    "helpsteer": (
        {"prompt": Q, "response": A, "helpfulness": 3},
        {"instruction": "prompt", "output": "response"},
        Conversation(ASKED),
    ),
    "xlam": (
        {"query": Q, "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
        {"instruction": "query", "tool_calls": "answers"},
        Conversation(
            [
                {"role": "user", "content": Q},
                {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            ],
            tools=[TOOL],
        ),
    ),
    "sharegpt": (
        {"dialog": [{"who": "asker", "says": Q}, {"who": "bard", "says": A}]},
        {
            "messages": "dialog",
            "role": "who",
            "content": "says",
            "asker": "user",
            "bard": "assistant",
        },
        Conversation(ASKED),
    ),
    "text": ({"body": Q}, {"text": "body"}, Text(Q)),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_data_sets_need_no_rewriting(tmp_path, name, ending):
    row, columns, expected = PUBLIC[name]
    source = source_of(tmp_path, [row], ending, columns=columns)
    assert examples(source) == [expected]
    (streamed,) = load_sources(
        FinetuneDataConfig(
            sources=[SourceConfig(files=list(source.files), columns=columns)], streaming=True
        )
    )
    assert examples(streamed) == [expected]
    used = {*columns.values(), *columns}
    for column in row:  # what is not used is said by name
        assert (repr(column) in str(source.layout).partition("not used: ")[2]) == (
            column not in used and column not in ("tools", "instruction")
        )


def test_the_documented_names_are_those_that_were_tried():
    page = (ROOT / "docs" / "howto" / "data_formats.md").read_text("utf-8")
    shown = [yaml.safe_load(cell) for cell in re.findall(r"^\| .* \| `(\{.*\})` \|$", page, re.M)]
    assert shown == [columns for name, (_, columns, _) in PUBLIC.items() if name != "text"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_refusal_offers_a_mapping_that_works(tmp_path, name, ending):
    row, columns, expected = PUBLIC[name]
    with pytest.raises(DataError) as refusal:
        source_of(tmp_path, [row], ending)
    offered = [yaml.safe_load(text) for text in re.findall(r"\{.*?\}", str(refusal.value))]
    roles = {name: role for name, role in columns.items() if role in ("user", "assistant")}
    assert any(
        mapping | roles == columns
        and examples(source_of(tmp_path, [row], ending, columns=mapping | roles)) == [expected]
        for mapping in offered
    ), refusal.value


def test_sources_to_evaluate_on_have_names_of_their_own(tmp_path):
    rows = {"a": {"q": Q, "a": A}, "b": {"prompt": Q, "completion": A}, "c": {"ask": Q, "say": A}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    a, b, c = (str(tmp_path / f"{name}.jsonl") for name in "abc")
    columns = {"prompt": "q", "completion": "a"}
    cfg = FinetuneDataConfig(train_files=a, eval_files=[b], columns=columns)
    with pytest.raises(DataError, match=r"names 'q', the rows have .*data.eval_sources"):
        load_sources(cfg, purpose="eval")
    same = SourceConfig(files=b, columns={"prompt": "prompt"})
    other = SourceConfig(files=c, name="mine", columns={"prompt": "ask", "completion": "say"})
    cfg = replace(cfg, eval_files=[a], eval_sources=[same, other])
    sources = load_sources(cfg, purpose="eval")
    assert [source.name for source in sources] == ["a", "b", "mine"]
    assert [examples(source) for source in sources] == [[PromptCompletion(Q, A)]] * 3
    assert load_sources(replace(cfg, eval_files=[], eval_sources=[]), purpose="eval") == []


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ({"files": "a", "weight": 1.0}, "weight and max_repeats have no effect on evaluations"),
        ({"name": "x"}, "must name either files or a dataset_name"),
    ],
)
def test_wrong_sources_to_evaluate_on(source, error):
    with pytest.raises(ConfigError, match=rf"data.eval_sources\[0\]:? {error}"):
        FinetuneDataConfig(eval_sources=[SourceConfig(**source)])


def test_a_source_has_names_of_its_own(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": Q, "a": A}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": Q}) + "\n")
    named = [("a", {"prompt": "q", "completion": "a"}), ("b", {})]
    files = [SourceConfig(files=str(tmp_path / f"{n}.jsonl"), columns=c) for n, c in named]
    cfg = FinetuneDataConfig(sources=files, columns={"text": "body"})
    sources = load_sources(cfg)
    assert [e for source in sources for e in examples(source)] == [PromptCompletion(Q, A), Text(Q)]


@pytest.mark.parametrize(
    ("row", "columns", "near"),
    [
        ({"prompt": Q, "completion": A}, {"prompt": "promt"}, "prompt"),
        ({"prompt": Q, "completion": A}, {"completion": "completions"}, "completion"),
        ({"messages": ASKED}, {"messages": "mesages"}, "messages"),
        ({"messages": ASKED}, {"content": "contnt"}, "content"),
        ({"messages": ASKED, "source": "x"}, {"sources": None}, "source"),
    ],
    ids=str,
)
def test_a_misspelt_name_is_refused_also_next_to_a_standard_column(tmp_path, row, columns, near):
    assert examples(source_of(tmp_path, [row]))
    with pytest.raises(DataError, match=rf"data\.columns .*did you mean '{near}'\?"):
        source_of(tmp_path, [row], columns=columns)
    named = {near: near} if None not in columns.values() else {near: None}
    assert examples(source_of(tmp_path, [row], columns=named))


@pytest.mark.parametrize(
    ("row", "columns", "learned"),
    [
        ({"prompt": Q, "completion": A, "sys": "x"}, {"instruction": "sys"}, "examples"),
        ({"messages": ASKED, "answer": A}, {"output": "answer"}, "examples"),
        ({"text": Q, "other": A}, {"prompt": "other"}, "documents"),
        ({"prompt": Q, "chosen": A, "rejected": Q, "ask": Q}, {"instruction": "ask"}, "pairs"),
        ({"prompt": Q, "completion": A, "label": 1, "m": 2}, {"margin": "m"}, "answers"),
    ],
    ids=str,
)
def test_a_mapping_that_nothing_uses_is_refused(tmp_path, row, columns, learned):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    cfg = FinetuneDataConfig(train_files=str(tmp_path / "a.jsonl"))
    load_sources(cfg, row_format=find_row_format(learned))
    ((name, other),) = columns.items()
    with pytest.raises(DataError, match=f"maps '{name}' to '{other}', and nothing uses '{name}'"):
        load_sources(replace(cfg, columns=columns), row_format=find_row_format(learned))


def test_a_name_that_no_first_row_has_is_reported(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr("toolkit.ranks.log_once", lines.append)
    source_of(tmp_path, [{"messages": ASKED}], columns={"bard": "assistant", "mood": None})
    assert [line.partition("has ")[2] for line in lines] == [
        "'mood' (data.columns)",
        "'bard' (data.columns)",
    ]


def test_pretraining_reads_a_column_of_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": Q}) + "\n")
    cfg = DataConfig(train_files=str(tmp_path / "a.jsonl"), columns={"text": "body"})
    (source,) = load_sources(cfg, row_format=DOCUMENTS)
    assert examples(source) == [Text(Q)]


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"prompt": "ask", "completion": "a"}, DataError, "names 'ask', the rows have 'q', 'a'"),
        ({"prompt": "q", "role": "who"}, DataError, "names 'who', the rows have"),
        ({"promt": "q"}, ConfigError, "'promt' is neither a column"),
        ({"human": "person"}, ConfigError, "'person' no role"),
        ({}, DataError, r"Set data.columns, such as \{prompt: question"),
    ],
)
def test_names_that_are_not_there(tmp_path, columns, error, said):
    with pytest.raises(error, match=said):
        source_of(tmp_path, [{"q": Q, "a": A}], columns=columns)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_refusal_names_all_columns(tmp_path, ending):
    with pytest.raises(
        DataError, match=r"got ('prompt'|'response'), ('prompt'|'response')\. Known"
    ):
        source_of(tmp_path, [{"prompt": Q, "response": A}], ending)


def test_the_setting_is_read_and_written(tmp_path):
    file = tmp_path / "a.yaml"
    settings = {"columns": {"reasoning_content": None, "prompt": "q"}}
    settings["sources"] = [{"files": "a", "columns": {"human": "user"}}]
    file.write_text(yaml.safe_dump({"data": settings, "output_dir": "o"}), "utf-8")
    cfg = config.parse(config.FinetuneConfig, ["--config", str(file), "--model.name_or_path", "x"])
    assert cfg.data.columns == settings["columns"]
    assert cfg.data.sources[0].columns == {"human": "user"}
    file.write_text(config.dump(cfg), "utf-8")
    assert config.load(config.FinetuneConfig, file) == cfg


def test_names_for_a_file_of_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data.columns names 'q', the rows have 'text'"):
        load_sources(
            FinetuneDataConfig(train_files=[str(tmp_path / "a.txt")], columns={"prompt": "q"})
        )


def test_what_is_left_out(tmp_path):
    thought = [
        {"role": "user", "content": Q, "at": "noon"},
        {"role": "assistant", "content": A, "reasoning_content": "Count."},
        {"role": "user", "content": "<think>x</think> is a tag"},
        {"role": "assistant", "content": f"<think>\nCount.\n</think>\n\n{A}"},
    ]
    row = {"messages": thought, "source": "x"}
    columns = {"reasoning_content": None, "at": None, "source": None}
    source = source_of(tmp_path, [row], columns=columns)
    (example,) = examples(source)
    user = {"role": "user", "content": "<think>x</think> is a tag"}
    assert example.messages == [*ASKED, user, ASKED[1]]
    assert "not used" not in str(source.layout)
    (kept,) = examples(source_of(tmp_path, [row]))
    assert kept.messages == thought


@pytest.mark.parametrize("name", ["Human", "User", "prompter", "user"])
@pytest.mark.parametrize("answers", ["gpt", "bot", "model", "Assistant", "ChatGPT"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_spellings_of_roles(tmp_path, name, answers, keys):
    row = {"conversations": [dict(zip(keys, p, strict=True)) for p in ((name, Q), (answers, A))]}
    assert examples(source_of(tmp_path, [row])) == [Conversation(ASKED)]


def test_an_unknown_role(tmp_path):
    source = source_of(tmp_path, [{"messages": turns(("narrator", Q), ("assistant", A))}])
    with pytest.raises(Exception, match=r"one of the roles .*data.columns.*'narrator'"):
        examples(source)
    source = source_of(
        tmp_path,
        [{"messages": turns(("narrator", Q), ("assistant", A))}],
        columns={"narrator": "user"},
    )
    assert examples(source) == [Conversation(ASKED)]


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize(
    "weight",
    [
        *({"weight": 0}, {"weight": "0"}, {"weight": 0.0}, {"train": False}, {"loss": False}),
        *({"loss_weight": 0}, {"loss_scale": 0.0}, {"trainable": False}, {"training": 0}),
        *({"masked": True}, {"mask": 1}, {"masked": "true", "trainable": None}),
        {"weight": 1, "trainable": False},
    ],
    ids=str,
)
def test_a_turn_of_weight_0_is_context(tmp_path, keys, weight):
    said = [("user", Q), ("assistant", "Five."), ("user", Q), ("assistant", A)]
    row = [dict(zip(keys, pair, strict=True)) for pair in said]
    for at, context in ((0, {0}), (1, {1}), (3, {3})):
        changed = [turn | (weight if i == at else {}) for i, turn in enumerate(row)]
        (example,) = examples(source_of(tmp_path, [{"conversations": changed}]))
        assert example == Conversation(turns(*said), context=frozenset(context))
    source = source_of(tmp_path, [{"conversations": [row[0], row[1] | weight]}])
    with pytest.raises(Exception, match=r"a weight of 0 for turns \[1\]"):
        examples(source)


@pytest.mark.parametrize(
    "keys",
    [{"masked": False}, {"trainable": True}, {"loss_weight": 1.0}, {"mask": "", "loss": "x"}],
)
def test_a_turn_that_is_not_masked_is_learned(tmp_path, keys):
    row = [{"role": "user", "content": Q}, {"role": "assistant", "content": A} | keys]
    source = source_of(tmp_path, [{"messages": row}])
    example = source.example(next(iter(source.rows)))
    assert not example.context
    assert [*example.messages[1]] == ["role", "content", *(["loss"] if "loss" in keys else [])]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss_weight": 0.3}, "expected 0 or 1 in 'messages.1..loss_weight'"),
        ({"loss_scale": 2.0}, "expected 0 or 1 in 'messages.1..loss_scale'"),
        ({"trainable": 0.5}, "expected 0 or 1 in 'messages.1..trainable'"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "train_detail"),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, "a part messages.1..content.0"),
    ],
)
def test_supervision_that_is_not_supported_is_refused(tmp_path, keys, said):
    row = [{"role": "user", "content": Q}, {"role": "assistant", "content": A} | keys]
    source = source_of(tmp_path, [{"messages": row}])
    with pytest.raises(BadRow, match=said):
        source.example(next(iter(source.rows)))


def test_other_weights(tmp_path):
    row = [{"role": "user", "content": Q}, {"role": "assistant", "content": A, "weight": 1}]
    assert examples(source_of(tmp_path, [{"messages": row}])) == [Conversation(ASKED)]
    row[1]["weight"] = 0.5
    with pytest.raises(Exception, match="expected 0 or 1 in 'messages"):
        examples(source_of(tmp_path, [{"messages": row}]))


def test_older_names_of_calls_and_tools(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": Q},
            {
                "role": "assistant",
                "content": None,
                "function_call": {**CALL, "arguments": '{"a": 1}'},
            },
            {"role": "function", "name": "get", "content": "4"},
            {"role": "assistant", "content": A},
        ],
        "functions": [TOOL],
    }
    (example,) = examples(source_of(tmp_path, [row]))
    call = {"type": "function", "function": {"name": "get", "arguments": {"a": 1}}}
    assert example.messages[1]["tool_calls"] == [call]
    assert "function_call" not in example.messages[1]
    assert example.messages[2]["role"] == "tool"
    assert example.tools == [{"type": "function", "function": TOOL}]
    row["messages"][1]["tool_calls"] = [{"function": CALL}]
    with pytest.raises(Exception, match=r"tool_calls or the older function_call .* got both"):
        examples(source_of(tmp_path, [row]))


def test_a_column_that_later_rows_have_is_counted(tmp_path):
    rows = [{"prompt": Q, "completion": A, "id": i} for i in range(120)]
    rows[110] |= {"hint": "x"}
    rows[111] |= {"hint": "x", "left": 1}
    source = source_of(tmp_path, rows, columns={"left": None})
    assert str(source.layout).endswith("; not used: 'id'")
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path / "tokenizer"))
    made = encode_source(source, Encoder(tokenizer, FinetuneDataConfig(), 300))
    assert made.counts.notes == {LATE_COLUMN.format("hint"): 2}
    assert made.counts.kept == 120


def test_a_tree_of_messages_is_refused(tmp_path):
    tree = {"message_id": "b", "parent_id": "a", "role": "prompter", "text": Q}
    for ending in ("jsonl", "parquet"):
        with pytest.raises(DataError, match=r"single messages of a tree .*from a root to a leaf"):
            source_of(tmp_path, [tree], ending)
    assert examples(source_of(tmp_path, [tree], columns={"parent_id": None})) == [Text(Q)]


# ---- Types of columns


def test_parquet_files_of_narrower_types(tmp_path):
    """A file of which a column is null, or a turn has fewer keys, in any order."""
    bare = {"messages": ASKED, "tools": None}
    full = {"messages": [*ASKED[:1], {**ASKED[1], "reasoning_content": "2 + 2"}], "tools": "[{}]"}
    full["tools"] = json.dumps([TOOL])
    for order in ((bare, full), (full, bare)):
        for name, row in zip("ab", order, strict=True):
            pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        for streaming in (False, True):
            cfg = FinetuneDataConfig(train_files=[str(tmp_path / "*.parquet")], streaming=streaming)
            (source,) = load_sources(cfg)
            plain, rich = examples(source)[:: 1 if order[0] is bare else -1]
            assert plain == Conversation(ASKED)
            assert rich == Conversation(full["messages"], tools=[TOOL])
    pq.write_table(pa.Table.from_pylist([{"messages": "x", "tools": 1}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet has other types than the files before it"):
        load_sources(FinetuneDataConfig(train_files=[str(tmp_path / "*.parquet")]))


def test_nulls_of_json_columns_are_kept(tmp_path):
    arguments = {"a": 1, "n": None, "deep": [{"x": None}]}
    chat = [*ASKED[:1], {"role": "assistant", "tool_calls": [{"function": {**CALL}}]}]
    chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
    features = datasets.Features({"messages": datasets.Json(), "tools": datasets.Json()})
    rows = datasets.Dataset.from_dict({"messages": [chat], "tools": [[TOOL]]}, features=features)
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "saved.parquet"))
    for where in (
        {"dataset_name": str(tmp_path / "saved")},
        {"train_files": str(tmp_path / "saved.parquet")},
    ):
        (source,) = load_sources(FinetuneDataConfig(**where))
        (example,) = examples(source)
        assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
