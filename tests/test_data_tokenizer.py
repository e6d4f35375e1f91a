"""Finding, training and checking a tokenizer; tokenising equals the tokenizer itself, cached."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import save_byte_tokenizer
from feeds import samples
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerBase

from toolkit.config.data import DataConfig
from toolkit.config.settings import ModelConfig
from toolkit.data.examples.recognise import Layout
from toolkit.data.row_formats import DOCUMENTS
from toolkit.data.sources.rows import DataSource, load_sources
from toolkit.data.tokens import text_ids
from toolkit.data.tokens import tokenizer as tokenizers_of_runs
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.data.tokens.tokenizer import (
    END_OF_TEXT,
    check_vocabulary,
    load_tokenizer,
    prepare_tokenizer,
    train_tokenizer,
)
from toolkit.errors import ConfigError, DataError, ModelError
from toolkit.formats import asset_files

TEXTS = [Path(f).read_text() for f in (datasets.__file__, json.__file__, logging.__file__)]
CFG = DataConfig()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer with 600 entries, trained on a few files."""
    where = tmp_path_factory.mktemp("trained") / "tokenizer"
    train_tokenizer(TEXTS, 600, where)
    return where


@pytest.fixture
def tokenizer(folder) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def rows(texts: list[str], **columns: list) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts, **columns})


def token_rows(ids: list, dtype: str = "int64") -> datasets.Dataset:
    features = datasets.Features(input_ids=datasets.List(datasets.Value(dtype)))
    return datasets.Dataset.from_dict({"input_ids": ids}, features=features)


def tokenise(documents, tokenizer, cfg, vocab_size) -> datasets.Dataset:
    """Return the tokens of documents as pretraining learns them."""
    column = "input_ids" if "input_ids" in documents.column_names else "text"
    pieces = "start" in documents.column_names
    layout = Layout(
        "pieces" if pieces else "tokenised" if column == "input_ids" else "text",
        (column, *(["start", "end"] if pieces else [])),
        whole=True,
    )
    source = DataSource("one", "one", documents.select_columns(list(layout.columns)), layout)
    return encode_source(source, Encoder(tokenizer, cfg, vocab_size)).tokens


def model_folder(path: Path, vocab_size: int = 600) -> str:
    LlamaConfig(vocab_size=vocab_size).save_pretrained(path)
    return str(path)


def settings_with_text(path: Path, **settings) -> DataConfig:
    path.write_text("".join(TEXTS))
    return DataConfig(train_files=str(path), **settings)


# Training one


def test_a_trained_tokenizer(folder, tokenizer):
    assert len(tokenizer) == 600
    assert max(tokenizer.get_vocab().values()) == 599
    assert tokenizer.convert_tokens_to_ids(END_OF_TEXT) == 0
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT
    assert tokenizer.unk_token is None
    assert tokenizer.model_max_length > 10**9
    text = "näïve 日本語 \U0001f600\x00\t\r\n  def f(x):\n" + "".join(map(chr, range(256)))
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert {p.name for p in folder.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    assert list(folder.parent.iterdir()) == [folder]  # nothing temporary is left


def test_training_repeats(tmp_path, folder):
    train_tokenizer(TEXTS, 600, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_vocabulary_without_room(tmp_path):
    with pytest.raises(ConfigError, match=r"at least 258 .* vocab_size 257"):
        train_tokenizer(TEXTS, 257, tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()


# Finding one


def test_the_named_one_then_the_models_own_then_a_trained_one(tmp_path, folder, tokenizer):
    bare = model_folder(tmp_path / "bare")
    own = model_folder(tmp_path / "own")
    tokenizer.save_pretrained(own)
    data = settings_with_text(tmp_path / "a.txt")
    trained = tmp_path / "run" / "tokenizer"

    def found(**model) -> str | None:
        return prepare_tokenizer(ModelConfig(**model), data, trained).tokenizer_name_or_path

    both = {"train_tokenizer": True, "init": "random"}
    assert found(name_or_path=own, tokenizer_name_or_path=str(folder), **both) == str(folder)
    assert found(name_or_path=own, **both) == own
    assert not trained.exists()
    assert found(name_or_path=bare, **both) == str(trained)
    assert len(AutoTokenizer.from_pretrained(trained)) == 600
    written = (trained / "tokenizer.json").read_bytes()
    assert found(name_or_path=bare, **both) == str(trained)
    assert (trained / "tokenizer.json").read_bytes() == written


def test_none_found(tmp_path):
    bare = ModelConfig(model_folder(tmp_path / "bare"))
    with pytest.raises(DataError) as caught:
        prepare_tokenizer(bare, settings_with_text(tmp_path / "a.txt"), tmp_path / "tokenizer")
    assert "model.tokenizer_name_or_path" in str(caught.value)
    assert "model.train_tokenizer: true" in str(caught.value)
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    data = DataConfig(train_files=str(tmp_path / "a.jsonl"))
    assert prepare_tokenizer(bare, data, tmp_path / "tokenizer") == bare
    assert load_tokenizer(bare) is None


def test_a_new_tokenizer_for_trained_weights_is_warned_of(tmp_path, caplog):
    model = ModelConfig(model_folder(tmp_path / "bare"), train_tokenizer=True)
    prepare_tokenizer(model, settings_with_text(tmp_path / "a.txt"), tmp_path / "tokenizer")
    assert "training a new tokenizer for the pretrained weights" in caplog.text


def test_models_that_cannot_be_asked(tmp_path):
    (tmp_path / "empty").mkdir()
    data = settings_with_text(tmp_path / "a.txt")
    for name, expected in (
        (str(tmp_path / "nowhere"), "there is no folder"),
        (str(tmp_path / "empty"), "expected a config.json with a vocab_size"),
    ):
        model = ModelConfig(name, init="random", train_tokenizer=True)
        with pytest.raises(ModelError, match=expected):
            prepare_tokenizer(model, data, tmp_path / "tokenizer")


def test_broken_tokenizers(tmp_path, folder):
    def refusal(name: Path) -> str:
        with pytest.raises(DataError) as caught:
            load_tokenizer(ModelConfig("model", tokenizer_name_or_path=str(name)))
        return str(caught.value)

    assert "expected a tokenizer in" in refusal(Path(model_folder(tmp_path / "bare")))
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:500])
    assert "cannot be loaded" in refusal(cut)


def test_a_tokenizer_larger_than_the_embedding(tokenizer):
    check_vocabulary(tokenizer, 600)
    with pytest.raises(DataError) as caught:
        check_vocabulary(tokenizer, 599)
    assert "gives ids up to 599" in str(caught.value)
    assert "599 rows" in str(caught.value)
    assert "model.resize_embeddings: true" in str(caught.value)
    tokenizer.add_tokens(["<added>"])
    with pytest.raises(DataError, match="ids up to 600"):
        check_vocabulary(tokenizer, 600)


# Tokenising


def test_tokens_are_those_of_the_tokenizer(tokenizer, capfd):
    tokenizer.model_max_length = 8  # would warn of longer texts
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    got = tokenise(rows([*TEXTS, "", f"ends{END_OF_TEXT}"]), tokenizer, CFG, 600)
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 4  # as it was
    assert tokenizer.backend_tokenizer.padding["length"] == 64
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    assert "longer than" not in capfd.readouterr().err
    plain = [tokenizer(t, verbose=False)["input_ids"] for t in TEXTS]
    assert got.features == datasets.Features(input_ids=datasets.List(datasets.Value("int32")))
    assert got["input_ids"][:3] == [[*ids, 0] for ids in plain]
    assert got["input_ids"][3] == []
    assert got["input_ids"][4] == tokenizer("ends")["input_ids"] + [0]  # one end, not two
    bare = tokenise(rows(TEXTS), tokenizer, DataConfig(append_eos=False), 600)
    assert bare["input_ids"][:] == plain


def test_special_tokens_stand_around_documents_not_pieces(tokenizer, monkeypatch):
    tokenizer.add_special_tokens({"bos_token": "<bos>", "sep_token": "<sep>"})
    bos, sep = tokenizer.convert_tokens_to_ids(["<bos>", "<sep>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <sep>", special_tokens=[("<bos>", bos), ("<sep>", sep)]
    )
    pieces = rows(["one\n", "two\n", "three", "four"], start=[1, 0, 0, 1], end=[0, 0, 1, 1])
    kinds = {"start": datasets.Value("bool"), "end": datasets.Value("bool")}
    pieces = pieces.cast(datasets.Features(text=datasets.Value("string"), **kinds))
    monkeypatch.setattr(text_ids, "BATCH_BYTES", 5)  # pieces of one document in several batches
    got = tokenise(pieces, tokenizer, CFG, 602)["input_ids"][:]
    whole = [tokenizer(t)["input_ids"] + [0] for t in ("one\ntwo\nthree", "four")]
    assert whole[0][0] == bos
    assert whole[0][-2] == sep
    assert [[*got[0], *got[1], *got[2]], got[3]] == whole


def test_a_big_file_in_pieces_gives_the_tokens_of_the_whole(tmp_path, tokenizer):
    text = "".join(TEXTS) * 6
    assert len(text) > 3 << 17
    (tmp_path / "a.py").write_text(text)
    (source,) = load_sources(DataConfig(train_files=str(tmp_path / "a.py")), row_format=DOCUMENTS)
    assert len(source.rows) > 3
    got = encode_source(source, Encoder(tokenizer, CFG, 600)).tokens["input_ids"]
    assert [i for ids in got for i in ids] == [*tokenizer(text)["input_ids"], 0]


def test_a_tokenizer_without_the_fast_backend():
    slow = ByT5Tokenizer()
    assert not slow.is_fast
    got = tokenise(rows(["one", "two"]), slow, CFG, 384)["input_ids"][:]
    assert got == [slow("one")["input_ids"], slow("two")["input_ids"]]
    assert got[0][-1] == slow.eos_token_id  # its own, not another one


def test_no_end_token_is_warned_of(tokenizer, caplog):
    tokenizer.eos_token = None
    got = tokenise(rows(["one"]), tokenizer, CFG, 600)["input_ids"][:]
    assert got == [tokenizer("one")["input_ids"]]
    assert "no end-of-sequence token" in caplog.text


def test_text_needs_a_tokenizer():
    with pytest.raises(DataError, match="expected a tokenizer"):
        tokenise(rows(["one"]), None, CFG, 600)


# Ids


def test_a_tokenizer_with_ids_outside_the_vocabulary(tokenizer):
    tokenizer.add_tokens(["<added>"])
    with pytest.raises(DataError, match=r"ids up to 600, .* has 600 rows"):
        tokenise(rows(["one"]), tokenizer, CFG, 600)
    tokenise(rows(["one", "two", "a <added>"]), tokenizer, CFG, 601)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    ("bad", "shown"), [(-1, "got -1"), (10, "got 10"), (None, "list of token ids")]
)
def test_bad_ids_in_tokenised_data(dtype, bad, shown):
    with pytest.raises(DataError) as caught:
        tokenise(token_rows([[1, 2], [], [3, bad, 4]], dtype), None, CFG, 10)
    assert "row 2 (counted from 0)" in str(caught.value)
    assert shown in str(caught.value)


def test_an_id_beyond_32_bits_is_named():
    with pytest.raises(DataError, match=r"row 0 .* got 4294967297"):
        tokenise(token_rows([[2**32 + 1]]), None, CFG, 10)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
def test_tokenised_data_is_taken_as_it_is(dtype):
    ids = [[1, 2], [], [3, 9]]
    got = tokenise(token_rows(ids, dtype), None, CFG, 10)
    assert got.features["input_ids"] == datasets.List(datasets.Value("int32"))
    assert got["input_ids"][:] == ids
    assert samples(got, "wrapped", 2)[1]["input_ids"].tolist() == [3, 9]


# The cache and the forks


@pytest.mark.slow
def test_a_second_process_reads_the_cache(tmp_path, folder, tokenizer):
    (tmp_path / "a.txt").write_text(TEXTS[0])
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    (source,) = load_sources(DataConfig(train_files=str(tmp_path / "a.txt")), row_format=DOCUMENTS)
    encode_source(source, Encoder(tokenizer, CFG, 600))

    def state() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in cache.rglob("*.arrow")}

    before = state()
    assert len(before) == 2
    script = (
        "import sys\n"
        "from transformers import AutoTokenizer\n"
        "from toolkit.config.settings import DataConfig\n"
        "from toolkit.data.row_formats import DOCUMENTS\n"
        "from toolkit.data.sources.rows import load_sources\n"
        "from toolkit.data.tokens.encode import Encoder, encode_source\n"
        "Encoder.encode_rows = None  # not needed again\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])\n"
        "cfg = DataConfig(train_files=sys.argv[1])\n"
        "(source,) = load_sources(cfg, row_format=DOCUMENTS)\n"
        "print(len(encode_source(source, Encoder(tokenizer, cfg, 700)).tokens))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.txt"), str(folder)],
        env=os.environ | {"HF_DATASETS_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "1"
    assert state() == before


def test_what_changes_the_tokens_changes_the_cache(tokenizer):
    def file(documents=None, cfg=CFG) -> str:
        got = tokenise(documents or rows(["one two"]), tokenizer, cfg, 700)
        return got.cache_files[0]["filename"]

    first = file()
    assert file() == first
    assert file(rows(["one three"])) != first
    assert file(cfg=DataConfig(append_eos=False)) != first
    tokenizer.add_tokens(["two"])
    assert file() != first


def test_workers_fork_without_a_warning(tokenizer, monkeypatch, capfd):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokens = tokenise(rows(TEXTS * 4), tokenizer, CFG, 600)
    loader = DataLoader(samples(tokens, "wrapped", 16), batch_size=4, num_workers=2)
    batch = next(iter(loader))
    assert batch["input_ids"].shape == (4, 16)
    assert "forked" not in capfd.readouterr().err
    assert "TOKENIZERS_PARALLELISM" not in os.environ  # the parent stays parallel
    again = tokenise(rows(TEXTS), tokenizer, CFG, 600)
    assert again["input_ids"][:] == tokens["input_ids"][:3]


def test_other_text_trains_another_tokenizer_unless_a_run_has_used_it(tmp_path: Path) -> None:
    """A start that came to nothing leaves its tokenizer behind: it must not serve other text."""
    folder = tmp_path / "model"
    LlamaConfig(vocab_size=300).save_pretrained(folder)
    model = ModelConfig(str(folder), init="random", train_tokenizer=True)
    found = {}
    for name, text in (("one", "aaaa bbbb " * 200), ("two", "cccc dddd " * 200)):
        (tmp_path / f"{name}.txt").write_text(text)
        data = DataConfig(train_files=str(tmp_path / f"{name}.txt"))
        prepare_tokenizer(model, data, tmp_path / "tokenizer")
        found[name] = (tmp_path / "tokenizer/tokenizer.json").read_bytes()
    assert found["one"] != found["two"]
    data = DataConfig(train_files=str(tmp_path / "one.txt"))
    prepare_tokenizer(model, data, tmp_path / "tokenizer", keep=True)
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == found["two"]


def test_of_a_stream_the_first_rows_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers_of_runs, "TRAINING_BYTES", 4000)
    model = ModelConfig(model_folder(tmp_path / "model", 300), init="random", train_tokenizer=True)
    folder, file = tmp_path / "tokenizer", tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"aaaa bbbb {i} " * 20}) for i in range(40)]

    def prepare(rows: list[str], **settings) -> ModelConfig:
        file.write_text("\n".join(rows))
        data = DataConfig(train_files=str(file), streaming=True, **settings)
        return prepare_tokenizer(model, data, folder)

    prepare([*lines, "{no JSON, which nobody reads"])
    made = (folder / "tokenizer.json").read_bytes()
    prepare([*lines, "{other rows after the first"])
    assert (folder / "tokenizer.json").read_bytes() == made  # the first are as they were
    prepare([line.replace("aaaa", "cccc") for line in lines])
    assert (folder / "tokenizer.json").read_bytes() != made
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: expected JSON"):
        prepare(["{broken", *lines])
    prepare(["{broken", *lines], on_bad_row="skip")
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [1, 2]}))
    data = DataConfig(train_files=str(ids), streaming=True)
    assert prepare_tokenizer(model, data, tmp_path / "none") == model
    with pytest.raises(DataError, match=r"expected text .* but the rows have none"):
        prepare([json.dumps({"text": ""})] * 3)


def test_named_chat_templates_come_along(tmp_path):
    """transformers keeps them in a folder; checkpoints and exports have files only."""
    save_byte_tokenizer(tmp_path / "plain")
    assert "tokenizer_config.json" in asset_files(tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    templates = {"default": "D{{ messages }}", "tool_use": "T{{ messages }} – é"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "source")
    assert (tmp_path / "source/additional_chat_templates/tool_use.jinja").is_file()
    for copied in ("checkpoint", "export"):  # the second one of the first
        source = tmp_path / ("source" if copied == "checkpoint" else "checkpoint")
        (tmp_path / copied).mkdir()
        for name, content in asset_files(source).items():
            (tmp_path / copied / name).write_bytes(content)
        assert AutoTokenizer.from_pretrained(tmp_path / copied).chat_template == templates
    assert asset_files(tmp_path / "export") == asset_files(tmp_path / "checkpoint")
