"""Files by what they hold: data sets in folders as the Hub has them, with their splits kept apart;
other endings of JSON lines and CSV; JSON lines that would be read as text.
"""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toolkit.config.data import DataConfig, FinetuneDataConfig, SourceConfig
from toolkit.data.row_formats import DOCUMENTS, EXAMPLES
from toolkit.data.sources.rows import load_sources
from toolkit.errors import ConfigError, DataError

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
# A data set
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(folder: Path, files: dict[str, str], card: str | None = None) -> str:
    """Write a file for each name and its text."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pq.write_table(pa.table({"text": [text]}), file)
        else:
            file.write_text(json.dumps({"text": text}) + "\n", "utf-8")
    if card is not None:
        (folder / "README.md").write_text(card, "utf-8")
    return str(folder)


def texts(what: str = "train", **settings) -> list[str]:
    (source,) = load_sources(FinetuneDataConfig(**settings), purpose=what)
    return [source.example(stored).text for stored in source.rows]


PARQUET = {f"data/{n}-00000-of-00002.parquet": n for n in ("train", "test")}
PARQUET["data/train-00001-of-00002.parquet"] = "more"
LINES = {"train.jsonl": "train", "test.jsonl": "test", "validation.jsonl": "validation"}


@pytest.mark.parametrize("streaming", [False, True])
def test_only_the_split_to_train_on_is_read(tmp_path, capsys, streaming):
    clone = write(tmp_path / "clone", PARQUET, CARD)
    assert texts(train_files=clone, streaming=streaming) == ["train", "more"]
    said = f"data       data.train_files {clone}: split train (2 file(s)), not test (1)\n"
    assert said in capsys.readouterr().out
    assert texts("eval", eval_files=[clone]) == ["test"]
    assert (
        f"data.eval_files {clone}: split test (1 file(s)), not train (2)" in capsys.readouterr().out
    )
    bare = write(tmp_path / "bare", PARQUET)  # without a card
    assert texts(train_files=bare) == ["train", "more"]
    lines = write(tmp_path / "lines", LINES, "# Lines")
    assert texts(train_files=lines) == ["train"]
    assert texts("eval", eval_files=[lines]) == ["validation"]


def test_folders_without_splits_are_read_whole(tmp_path, capsys):
    folder = write(tmp_path / "a", {"a.jsonl": "one", "sub/b.jsonl": "two"}, "# Notes")
    assert texts(train_files=folder) == ["one", "two"]
    named = write(tmp_path / "b", {"a.jsonl": "one", "constraint.jsonl": "two"})
    assert texts(train_files=named) == ["one", "two"]
    assert capsys.readouterr().out == ""


def test_several_configurations_and_no_split(tmp_path):
    card = CARD.replace("default", "one").replace(
        "---\n# A", "- {config_name: two, data_files: data/test-*}\n---\n# A"
    )
    clone = write(tmp_path / "clone", PARQUET, card)
    with pytest.raises(
        DataError, match=r"Config name is missing.*'one', 'two'.*dataset_config_name"
    ):
        texts(train_files=clone)
    tests = write(tmp_path / "tests", {"test.jsonl": "test"})
    with pytest.raises(DataError, match=r"expected a split train in .*, found test"):
        texts(train_files=tests)
    one = {"dataset_name": clone, "dataset_config_name": "two"}
    assert texts(**one) == ["test"]


def test_other_endings(tmp_path):
    rows = [{"prompt": "a,b", "completion": 'c"'}, {"prompt": "d", "completion": "e"}]
    (tmp_path / "a.ndjson").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.tsv").write_text('prompt\tcompletion\na,b\t"c"""\nd\te\n')
    (tmp_path / "b.csv").write_text('prompt,completion\n"a,b","c"""\nd,e\n')
    for name in ("a.ndjson", "a.tsv", "b.csv"):
        (source,) = load_sources(FinetuneDataConfig(train_files=[str(tmp_path / name)]))
        found = [source.example(stored) for stored in source.rows]
        assert [{"prompt": e.prompt, "completion": e.completion} for e in found] == rows


@pytest.mark.parametrize("documents", [False, True], ids=["finetune", "pretrain"])
@pytest.mark.parametrize("name", ["x.dat", "x.txt", "x", "x.jsonl.bak"])
def test_json_lines_are_not_read_as_text(tmp_path, capsys, name, documents):
    file, cfg = tmp_path / name, DataConfig if documents else FinetuneDataConfig
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def load():
        return load_sources(
            cfg(train_files=[str(file)]), row_format=DOCUMENTS if documents else EXAMPLES
        )

    file.write_text("\n" + json.dumps({"messages": chat}) + "\n")
    with pytest.raises(DataError, match=r"got JSON lines \(conversations .*name end in \.jsonl"):
        load()
    file.write_text(json.dumps({"n": 1}) + "\n")
    load()
    assert "looks like JSON lines and is read as plain text" in capsys.readouterr().out
    for text in ("{ not JSON }\n", "[1]\n", "text\n" + json.dumps({"messages": chat})):
        file.write_text(text)
        load()
        assert capsys.readouterr().out == ""


def test_rows_in_memory_are_refused_and_the_advice_works(tmp_path) -> None:
    rows = datasets.Dataset.from_list([{"text": "a"}])
    for setting, build in (
        ("data.train_files", lambda value: FinetuneDataConfig(train_files=value)),
        ("data.eval_files", lambda value: DataConfig(eval_files=value)),
        ("files of a data source", lambda value: SourceConfig(files=value)),
    ):
        for value, got in ((rows, "Dataset"), ([rows], "a list with Dataset"), ({"a": 1}, "dict")):
            with pytest.raises(ConfigError, match=f"^{setting}: expected a path .* got {got}. For"):
                build(value)
        # Other forms of a path are valid.
        assert build(Path("a.txt")) == build("a.txt")
        assert build(("a.txt", Path("b.txt"))) == build(["a.txt", "b.txt"])
    for build in (DataConfig, SourceConfig):
        with pytest.raises(
            ConfigError, match=r"dataset_name.*: expected the Hub id .* got Dataset"
        ):
            build(dataset_name=rows)
    with pytest.raises(ConfigError, match=r"^data.sources: expected a list .* got dict"):
        DataConfig(sources=[{"files": "a.txt"}])
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.save_to_disk(tmp_path / "folder")
    for settings in (
        {"train_files": tmp_path / "rows.parquet"},
        {"dataset_name": str(tmp_path / "folder")},
    ):
        (source,) = load_sources(FinetuneDataConfig(**settings))
        assert len(source.rows) == 1
