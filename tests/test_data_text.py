"""Sources of documents: what is read, how it is cut and cached, and what is refused."""

import json
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import save_byte_tokenizer
from transformers import AutoTokenizer

from toolkit.config.data import DataConfig
from toolkit.data.row_formats import DOCUMENTS
from toolkit.data.sources.file_readers import read_pieces, split_text
from toolkit.data.sources.files import find_files, find_stdlib_files
from toolkit.data.sources.row_values import catch_bad_row
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.errors import DataError

BYTES = Path()


@pytest.fixture(autouse=True, scope="module")
def _byte_tokenizer(tmp_path_factory):
    global BYTES
    BYTES = save_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path: Path, content: str | bytes | list[dict]) -> str:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def load(*files: str, **settings) -> DataSource:
    cfg = DataConfig(train_files=list(files), **settings)
    (source,) = load_sources(cfg, row_format=DOCUMENTS)
    return source


def texts(source: DataSource) -> list:
    """Return the text, or the token ids, of each row."""
    found = [catch_bad_row(source.example, stored) for stored in source.rows]
    return [e.input_ids if hasattr(e, "input_ids") else e.text for e in found]


def refusal(*files: str, **settings) -> str:
    """Return what the run ends with, over tokens of a model with 300 of them."""
    tokenizer = AutoTokenizer.from_pretrained(BYTES)
    with pytest.raises(DataError) as caught:
        encode_source(load(*files, **settings), Encoder(tokenizer, DataConfig(**settings), 300))
    return str(caught.value)


# Text files


@pytest.mark.parametrize("size", [4, 5, 7, 64, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "line\nline\n\n  indented\nend",
        "näïve 日本語 \U0001f600\n" * 40,
        "x" * 999,
        "a b " * 99,
    ],
    ids=["empty", "a", "lines", "unicode", "one_word", "one_line"],
)
def test_pieces_join_to_the_text(tmp_path, text, size):
    file = tmp_path / "a.txt"
    write(file, text)
    got = list(read_pieces(file, size))
    assert "".join(got) == text
    assert all(len(p.encode()) <= 2 * size + 8 for p in got)


def test_pieces_end_between_two_full_lines(tmp_path):
    file = tmp_path / "a.py"
    write(file, "def f():\n    return 1\n\n\nx = 1\ny = 2\n\n    z\n" * 50)
    *cut, _ = read_pieces(file, 200)
    assert len(cut) > 5
    assert all(p.endswith(("x = 1\n", "    z\n")) for p in cut)


@pytest.mark.parametrize("text", ["", "one\ntwo\n" * 60, "ü" * 400, "\n" * 300, "a b " * 99])
def test_a_long_text_of_a_row_is_cut_alike(text):
    parts = list(split_text(text, 64))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= 2 * 64 + 8 for part in parts)
    assert all(part.endswith("\n") for part in parts[:-1] if "one" in part)


def test_a_byte_order_mark_is_not_text_and_nul_is(tmp_path):
    file = tmp_path / "a.txt"
    write(file, b"\xef\xbb\xbfa\x00b\r\n")
    assert list(read_pieces(file)) == ["a\x00b\r\n"]


def test_a_long_line_is_cut(tmp_path):
    line = "x" * (3 << 20)
    file = write(tmp_path / "a.txt", f"a\n{line}\nb\n")
    assert "".join(texts(load(file))) == Path(file).read_text()


@pytest.mark.parametrize("before", [10, 5000])
def test_invalid_utf8_names_file_and_offset(tmp_path, before):
    file = write(tmp_path / "latin.txt", b"a line\n" * before + b"caf\xe9 x")
    said = refusal(file)
    assert file in said
    assert f"byte 0xe9 at offset {7 * before + 3}" in said


def test_a_file_is_a_document_and_a_big_one_several_rows(tmp_path):
    small = write(tmp_path / "b.txt", "one\ntwo\n")
    big = write(tmp_path / "a.txt", "a line of text\n" * 30_000)
    empty = write(tmp_path / "c.txt", "")
    rows = load(small, big, empty).rows
    place = {"_file": 0, "_place": "piece 0 (counted from 0)"}
    assert rows[0] == {"text": "one\ntwo\n", "start": True, "end": True} | place
    assert len(rows) == 5
    assert rows["start"][1:] == [True, False, False, False]
    assert rows["end"][1:] == [False, False, False, True]
    assert "".join(rows["text"][1:]) == Path(big).read_text()


def test_text_is_cached_until_a_file_changes(tmp_path):
    file = write(tmp_path / "a.txt", "one\n")
    first = load(file).rows
    assert load(file).rows.cache_files == first.cache_files
    assert load(file).rows._fingerprint == first._fingerprint
    write(Path(file), "two\n")  # the same size
    os.utime(file, ns=(1, 1))
    changed = load(file).rows
    assert changed.cache_files != first.cache_files
    assert changed["text"][:] == ["two\n"]


def test_the_builtin_text_is_the_standard_library():
    files = find_stdlib_files()
    names = {f.name for f in files}
    assert {"ast.py", "argparse.py"} <= names
    assert not any({"test", "site-packages", "__pycache__"} & set(f.parts[-3:]) for f in files)
    assert files == find_stdlib_files()
    rows = load().rows
    assert sum(rows["end"]) == sum(rows["start"]) <= len(files)
    assert sum(map(len, rows["text"])) > 5_000_000


# Rows


def test_json_parquet_arrow_and_another_column(tmp_path):
    rows = [{"body": "one", "n": 1}, {"body": "two\n", "n": 2}]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out,
        pa.ipc.new_stream(out, table.schema) as stream,
    ):
        stream.write_table(table)
    write(tmp_path / "a[1].jsonl", rows)
    write(tmp_path / "a.json", json.dumps(rows))
    for name in ("a.parquet", "a.arrow", "a[1].jsonl", "a.json"):
        assert texts(load(str(tmp_path / name), columns={"text": "body"})) == ["one", "two\n"], name


def test_a_changed_jsonl_is_read_anew(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"text": "one"}])
    assert texts(load(file)) == ["one"]
    write(Path(file), [{"text": "two"}])
    os.utime(file, ns=(1, 1))
    assert texts(load(file)) == ["two"]


def test_input_ids_win_over_text(tmp_path):
    source = load(write(tmp_path / "a.jsonl", [{"text": "a", "input_ids": [1, 2]}]))
    assert texts(source) == [[1, 2]]


def test_data_set_folders(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(tmp_path / "several"))
    assert texts(load(dataset_name=str(tmp_path / "one"))) == ["c", "a"]
    several = str(tmp_path / "several")
    assert texts(load(dataset_name=several, dataset_split="test")) == ["c"]
    assert "no split 'dev', only train, test" in refusal(dataset_name=several, dataset_split="dev")
    assert "data.dataset_name" in refusal(str(tmp_path / "one"))


# Files


def test_patterns(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/d.bin", ".hidden.txt", "__pycache__/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "x")

    def names(*patterns):
        return [str(f.relative_to(tmp_path)) for f in find_files(list(patterns), "files")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("*.txt") == names("~/*.txt") == ["a.txt", "b.txt"]
    assert names("b.txt", "*.txt") == ["b.txt", "a.txt"]
    assert names(".") == ["a.txt", "b.txt", "sub/c.md"]
    assert names("**/*.md") == ["sub/c.md"]
    assert names("sub/d.bin") == ["sub/d.bin"]


def test_missing_files_are_named_with_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for pattern in ("nothing.txt", "nope/*.jsonl"):
        said = refusal(pattern)
        assert f"data.train_files: '{pattern}' matches no file" in said
        assert str(tmp_path) in said
    assert "the folder empty holds no file of a known ending" in refusal("empty")


def test_kinds_are_not_mixed(tmp_path):
    text = write(tmp_path / "a.txt", "x")
    rows = write(tmp_path / "a.jsonl", [{"text": "x"}])
    said = refusal(text, rows)
    assert "one kind" in said
    assert text in said
    assert rows in said


# Refusals


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"txt": "a"}], "line 1: expected a column 'text' or 'input_ids', got"),
        ([{"text": "a"}, {"text": None}], "line 2: expected text in 'text', got null"),
        ([{"text": "a"}, {"text": 5}], "line 2: expected text in 'text', got int 5"),
        ([{"text": ["a"]}], "line 1: expected text in 'text', got list ['a']"),
        ([{"input_ids": [1.5]}], "line 1: expected a list of token ids in 'input_ids', got list"),
        ([{"input_ids": [1]}, {"input_ids": None}], "line 2: expected a list of token ids in"),
        ([{"text": ""}, {"text": ""}], "expected text, but all 2 rows are empty"),
        ([{"input_ids": []}], "rows are empty"),
        ("", "every file is empty"),
        ("\n\n", "found no row"),
        ('{"text": "a"}\n{"text": "b", }\n', "line 2: expected JSON, got"),
    ],
)
def test_bad_rows(tmp_path, content, expected):
    file = write(tmp_path / "bad.jsonl", content)
    said = refusal(file)
    assert expected in said
    assert file in said


def test_other_bad_sources(tmp_path):
    parquet = write(tmp_path / "a.parquet", b"PAR1 is not enough")
    assert f"{parquet} cannot be read" in refusal(parquet)
    assert "every file is empty" in refusal(write(tmp_path / "a.txt", ""))
    assert "is a file, expected a data set" in refusal(dataset_name=parquet)
    assert "cannot be read" in refusal(dataset_name=str(tmp_path / "nobody" / "nothing"))
