"""Files that a model's own classes name come along: code, and vocabularies of any name."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import save_byte_tokenizer, save_tiny_model

from toolkit import formats
from toolkit.config.settings import ModelConfig
from toolkit.formats.hf_folder import vocabulary_files
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
    assert vocabulary_files(folder) == ["foo.tiktoken", "more.bpe"]
    carried = formats.asset_files(folder)
    assert {"foo.tiktoken", "more.bpe", "tokenization_foo.py", "deeper_foo.py"} <= carried.keys()
    assert not {"notes.txt", "model.gguf"} & carried.keys()  # of nobody, and weights


def test_what_the_code_names_is_obtained_from_the_hub(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has nothing yet: vocabularies are asked for once the code is there."""
    hub, asked = tmp_path_factory.mktemp("hub") / "abc", dict[str, str]()

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        for file in folder.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                asked[file.name] = str(revision)
                hub.mkdir(exist_ok=True)
                shutil.copy(file, hub)
        return str(hub)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    formats.download_assets("org/name", "main")
    code = ("tokenization_foo.py", "deeper_foo.py", "helping_foo.py")
    files = dict.fromkeys(("config.json", "tokenizer_config.json", *code), "main")
    assert asked == files | {"foo.tiktoken": "abc", "more.bpe": "abc"}


def test_a_hub_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(name: str, **options: object) -> str:
        raise OSError("no answer")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    formats.download_assets("org/name")
    assert (
        "WARNING: files of org/name were not downloaded (OSError: no answer)"
        in capsys.readouterr().out
    )


def test_the_model_keeps_its_code_beside_another_tokenizer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "model" / "modeling_foo.py").write_text("x = 1\n")
    save_byte_tokenizer(tmp_path / "tokenizer")
    cfg = ModelConfig(
        str(tmp_path / "model"), tokenizer_name_or_path=str(tmp_path / "tokenizer"), init="random"
    )
    files = formats.assets_of(build_on_meta(cfg)).files
    assert {"modeling_foo.py", "tokenizer.json"} <= files.keys()
