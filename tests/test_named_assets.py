"""Files that a model's own classes name come along: code, and vocabularies of any name."""

import json
from pathlib import Path

import pytest
from conftest import save_byte_tokenizer, save_tiny_model

from toolkit import formats
from toolkit.config.settings import ModelConfig
from toolkit.formats import hf_folder
from toolkit.formats.named_assets import code_files, vocabulary_files
from toolkit.models.causal_lm import build_on_meta

TOKENIZER = """
from transformers import PreTrainedTokenizer
from .helping_foo import merge

VOCAB_FILES_NAMES = {"vocab_file": "foo.tiktoken"}

class FooTokenizer(PreTrainedTokenizer):
    vocab_files_names = VOCAB_FILES_NAMES
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose tokenizer has code and a vocabulary of its own, beside files of nobody."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    auto_map = {"AutoTokenizer": ["tokenization_foo.FooTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "tokenization_foo.py").write_text(TOKENIZER)
    (tmp_path / "helping_foo.py").write_text("from . import deeper_foo\nmerge = 1\n")
    (tmp_path / "deeper_foo.py").write_text(
        "class Bar:\n    vocab_files_names = {'x': 'more.bpe'}\n"
    )
    for name in ("foo.tiktoken", "more.bpe", "notes.txt", "model.gguf"):
        (tmp_path / name).write_text(name)
    return tmp_path


def test_what_the_code_names_is_carried(folder: Path) -> None:
    assert code_files(folder) == ["deeper_foo.py", "helping_foo.py", "tokenization_foo.py"]
    assert vocabulary_files(folder) == ["foo.tiktoken", "more.bpe"]
    carried = formats.asset_files(folder)
    assert {"foo.tiktoken", "more.bpe", "tokenization_foo.py", "deeper_foo.py"} <= carried.keys()
    assert not {"notes.txt", "model.gguf"} & carried.keys()  # of nobody, and weights


def test_what_the_code_names_is_obtained_from_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has nothing yet: each file is asked for once what names it is there."""
    asked: list[str] = []

    def cached(name: str, file: str, **options: object) -> str | None:
        asked.append(file)
        return str(folder / file) if (folder / file).is_file() else None

    monkeypatch.setattr(hf_folder, "cached_file", cached)
    formats.obtain_assets("org/name")
    assert {"tokenization_foo.py", "deeper_foo.py", "foo.tiktoken", "more.bpe"} <= {*asked}
    assert len(asked) == len({*asked})


def test_the_model_keeps_its_code_beside_another_tokenizer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "modeling_foo.py").write_text("x = 1\n")
    save_byte_tokenizer(tmp_path / "tokenizer")
    cfg = ModelConfig(
        str(tmp_path / "model"), tokenizer_name_or_path=str(tmp_path / "tokenizer"), init="random"
    )
    files = formats.assets_of(build_on_meta(cfg)).files
    assert {"modeling_foo.py", "tokenizer.json"} <= files.keys()
