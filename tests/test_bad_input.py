"""What a user can get wrong: each case is one clear error, before long work, that damages nothing.

Most cases run the recipe in this process (a world of one); the last ones start real processes.
"""

import datetime
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pytest
import torch
import transformers.utils
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import (
    BIN,
    ROOT,
    accelerate,
    free_port,
    run_recipe,
    save_byte_tokenizer,
    save_tiny_model,
    torchrun,
)
from safetensors.torch import load_file, save_file

from toolkit import checkpoint
from toolkit.config.settings import ModelConfig
from toolkit.data import prepare
from toolkit.data.tokens import tokenizer
from toolkit.errors import ConfigError, LaunchError, LoadingError
from toolkit.loading import materialisation
from toolkit.loading import pretrained as loading
from toolkit.models.causal_lm import build_on_meta
from toolkit.training import launch

RECIPE = ROOT / "recipes" / "pretrain.py"
INDEX = "model.safetensors.index.json"


# --------------------------------------------------------------------------------------------------
# The way to run and to judge
# --------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How one start of the recipe ended."""

    code: int
    out: str
    err: str
    did: list[str] = field(default_factory=list)
    """The long work that was begun, in order."""


def in_process(*argv: str) -> int:
    """Run the recipe as `python recipes/pretrain.py argv` does; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "MASTER_"))]:
            patch.delenv(name)
        patch.setattr(sys, "argv", [str(RECIPE), *argv])
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
        except SystemExit as end:
            return end.code
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            PartialState._reset_state()
    return 0


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def start(monkeypatch, capfd, tmp_path, tiny_llama, text_file):
    """Return a function that runs the recipe on a tiny model, with more flags."""
    did: list[str] = []
    for module, name in (
        (tokenizer, "train_tokenizer"),
        (prepare, "encode_source"),
        (loading, "_read_slices"),
        (materialisation, "_fill_model"),
        (checkpoint, "save"),
    ):
        plain = getattr(module, name)

        def spy(*args, _plain=plain, _name=name, **kwargs):
            did.append(_name)
            return _plain(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> Outcome:
        settings = {
            "model": {"name_or_path": str(tiny_llama)},
            "sharding": {"param_dtype": "float32"},
            "data": {"train_files": [str(text_file)], "sequence_length": 32, "eval_split": 0},
            "train": {"max_steps": 1, "per_device_train_batch_size": 2},
            "output_dir": str(tmp_path / "run"),
        }
        file = tmp_path / "settings.yaml"
        file.write_text(yaml.safe_dump(settings), "utf-8")
        did.clear()
        capfd.readouterr()
        code = in_process("--config", str(file), *flags)
        done = Outcome(code, *capfd.readouterr(), list(did))
        if done.err.strip():
            print(done.err)
        return done

    return run


def refused(done: Outcome, *said: str, code: int = 1, did: tuple[str, ...] = ()) -> None:
    """Check that `done` is one error line with every part of `said`, after `did` and no more."""
    lines = [line for line in done.err.splitlines() if "error:" in line]
    assert done.code == code, done.err
    assert len(lines) == 1, done.err
    assert "Traceback" not in done.err
    for part in said:
        assert part in lines[0], f"{part!r} is not in: {lines[0]}"
    assert tuple(done.did) == did


def hashes(folder: Path) -> dict[str, str]:
    """Return name -> sha256 of every file below `folder`, and its folders."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        if p.is_file()
        else ""
        for p in sorted(folder.rglob("*"))
    }


def copied(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to))


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def model(tmp_path, tiny_llama) -> Path:
    """A copy of the tiny model that a test may damage."""
    return copied(tiny_llama, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A tiny model in several files with an index."""
    folder = save_byte_tokenizer(tmp_path / "sharded")
    save_tiny_model(folder, shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_llama, text_file) -> Path:
    """A run of one step from random weights, in `run`; its model and its text are beside it."""
    base = tmp_path_factory.mktemp("finished")
    model = copied(tiny_llama, base / "model")
    text = Path(shutil.copy(text_file, base / "text.txt"))
    code = in_process(
        *["--model.name_or_path", str(model), "--model.init", "random"],
        *["--sharding.param_dtype", "float32", "--data.train_files", str(text)],
        *["--data.sequence_length", "32", "--data.eval_split", "0", "--train.max_steps", "1"],
        *["--train.per_device_train_batch_size", "3", "--output_dir", str(base / "run")],
    )
    assert code == 0
    return base


# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


def test_the_settings_of_these_tests_are_good(start, tmp_path) -> None:
    """The control: what the cases below spoil one by one runs as it is."""
    done = start()
    assert done.code == 0, done.err
    assert done.did == ["encode_source", "_read_slices", "save"]
    assert (tmp_path / "run/checkpoints/step-00000001/COMMIT").is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--train.max_step", "3"],
            ["unknown setting 'train.max_step'", "did you mean train.max_steps?"],
        ),
        (
            ["--train.max_steps", "many"],
            ["train.max_steps must be an integer of at least 1", "got many"],
        ),
        (
            ["--sharding.param_dtype", "float16"],
            ["sharding.param_dtype must be one of float32, bfloat16, got float16"],
        ),
        (
            ["--model.dtype", "float16"],
            ["model.dtype must be one of float32, bfloat16", "got float16"],
        ),
        (
            ["--checkpoint.save_total_limit", "1"],
            ["save_total_limit must be an integer of at least 2", "got 1"],
        ),
        (["--optim.adam_beta2", "1.5"], ["optim.adam_beta2", "below 1", "1.5"]),
        (["--data.num_workers", "-1"], ["data.num_workers", "-1"]),
    ],
)
def test_wrong_settings_end_before_anything_begins(start, tmp_path, flags, said) -> None:
    refused(start(*flags), *said, code=2)
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_make_the_processes(start, tmp_path) -> None:
    done = start("--sharding.dp_replicate", "2")
    refused(done, "dp_replicate 2 x dp_shard -1", "1 process", "set one of them to -1")
    refused(start("--sharding.reshard_after_forward", "3"), "reshard_after_forward 3", "divide")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# The model's folder
# --------------------------------------------------------------------------------------------------


def spoil_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def other_kind(config_class: str, architecture: str):
    def spoil(folder: Path) -> None:
        import transformers

        config = getattr(transformers, config_class)()
        config.architectures = [architecture]
        config.save_pretrained(folder)

    return spoil


def cut(name: str, by: int):
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-by])

    return spoil


def damage_header(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[8:20] = b"x" * 12
    (folder / "model.safetensors").write_bytes(bytes(content))


def only_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def edit_tensors(change):
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


MODEL_CASES = {
    "no weights": (
        remove("model.safetensors"),
        ["model", "holds no model.safetensors", "set model.init: random"],
    ),
    "only .bin weights": (only_bin, ["it has pytorch_model.bin", "save_pretrained"]),
    "cut off": (
        cut("model.safetensors", 100),
        ["model.safetensors should be", "bytes long", "again"],
    ),
    "cut off in the header": (
        cut("model.safetensors", 10**9),
        ["model.safetensors is not a safetensors file (0 bytes long)", "again"],
    ),
    "damaged header": (damage_header, ["model.safetensors", "damaged safetensors header", "again"]),
    "no config.json": (
        remove("config.json"),
        ["has no config.json", "checkpoint folder is expected"],
    ),
    "config.json is broken": (write("config.json", "{"), ["config.json is not readable JSON"]),
    "config.json is a list": (
        write("config.json", "[]"),
        ["config.json must hold a JSON object, got list"],
    ),
    "unknown type": (spoil_config(model_type="llama9"), ["config.json", "llama9"]),
    "no type": (write("config.json", '{"vocab_size": 8}'), ["config.json", "model_type"]),
    "config that no model can have": (
        spoil_config(num_attention_heads=0),
        ["config.json cannot be used", "ZeroDivisionError", "correct it"],
    ),
    "value of another type": (spoil_config(hidden_size="wide"), ["hidden_size", "wide"]),
    "an adapter beside the weights": (
        write("adapter_config.json", "{}"),
        ["holds an adapter (adapter_config.json) next to its weights", "Merge the adapter"],
    ),
    "code of its own": (
        spoil_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        ["trust_remote_code"],
    ),
    "translation model": (
        other_kind("T5Config", "T5ForConditionalGeneration"),
        ["T5ForConditionalGeneration, not a causal language model", "model.name_or_path"],
    ),
    "classifier": (
        other_kind("BertConfig", "BertForSequenceClassification"),
        ["BertForSequenceClassification, not a causal language model", "model_type bert"],
    ),
    "encoder": (other_kind("BertConfig", "BertModel"), ["BertLMHeadModel", "is_decoder"]),
    "weights of a wider model": (
        spoil_config(intermediate_size=64),
        ["down_proj.weight", "[32, 48]", "[32, 64]", "config.json"],
    ),
    "weights of a deeper model": (
        spoil_config(num_hidden_layers=2),
        ["9 tensor(s) not known to the model", "model.layers.2."],
    ),
    "weights of a shallower model": (
        spoil_config(num_hidden_layers=4),
        ["9 tensor(s) missing in the checkpoint", "model.layers.3."],
    ),
    "a tensor too few": (
        edit_tensors(lambda t: t.pop("model.norm.weight")),
        ["1 tensor(s) missing in the checkpoint", "model.norm.weight", "LlamaForCausalLM"],
    ),
    "a tensor too many": (
        edit_tensors(lambda t: t.update(extra=torch.zeros(2))),
        ["1 tensor(s) not known to the model: extra"],
    ),
    "positions": (
        spoil_config(max_position_embeddings=16),
        ["data.sequence_length is 32", "16 positions", "at most 16"],
    ),
    "layers dropped at random": (
        spoil_config(decoder_layerdrop=0.1),
        ["decoder_layerdrop is 0.1", "Set it to 0.0"],
    ),
    "broken tokenizer": (
        write("tokenizer.json", "{"),
        ["tokenizer", "model.tokenizer_name_or_path"],
    ),
}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_a_model_folder_that_cannot_be_used(start, model, tmp_path, case) -> None:
    spoil, said = MODEL_CASES[case]
    spoil(model)
    before = hashes(model)
    refused(start("--model.name_or_path", str(model)), *said)
    assert hashes(model) == before
    assert not (tmp_path / "run").exists()


def rename_in_index(name: str):
    """Let the index call its last file `name`; the file goes there where that leads outside."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        last = max(index["weight_map"].values())
        if "/" in name:
            (folder / last).rename(folder / name)
        index["weight_map"] = {k: name if v == last else v for k, v in index["weight_map"].items()}
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def swap_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    first, last = min(index["weight_map"].values()), max(index["weight_map"].values())
    index["weight_map"] = {k: last if v == first else v for k, v in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


INDEX_CASES = {
    "a missing file": (
        rename_in_index("model-00009.safetensors"),
        [
            "index.json names 1 file(s) that are not there: model-00009.safetensors",
            "complete the copy",
        ],
    ),
    "a file outside": (
        rename_in_index("../stolen.safetensors"),
        ["names '../stolen.safetensors', which is not a file of its folder", "trust"],
    ),
    "another file": (swap_in_index, ["places tensor", "which does not hold it", "again"]),
    "nothing": (write(INDEX, '{"weight_map": {}}'), ["weight_map must map", "again"]),
    "no map": (write(INDEX, '{"metadata": {}}'), ["weight_map must map", "again"]),
    "broken": (write(INDEX, '{"weight_map": '), ["is not readable JSON"]),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_an_index_that_names(start, sharded, tmp_path, case) -> None:
    spoil, said = INDEX_CASES[case]
    spoil(sharded)
    before = hashes(sharded)
    refused(start("--model.name_or_path", str(sharded)), *said)
    assert hashes(sharded) == before
    assert not (tmp_path / "run").exists()


def test_no_model_there(start, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    refused(start("--model.name_or_path", str(tmp_path / "none")), str(tmp_path / "none"), "folder")
    refused(
        start("--model.name_or_path", "models/none"),
        "models/none is neither a folder here",
        "the Hub",
    )
    refused(start("--model.name_or_path", str(tmp_path / "file")), "is a file; give the folder")


def test_a_misspelt_path_is_not_asked_of_the_hub(start, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    local, whole, plain = [], [], transformers.utils.cached_file

    def spy(*args, local_files_only: bool, **more):
        local.append(local_files_only)
        return plain(*args, local_files_only=local_files_only, **more)

    def download(name: str, **more) -> None:
        whole.append(name)
        raise OSError("no such model")

    monkeypatch.setattr("transformers.utils.cached_file", spy)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    Path("models").mkdir()
    done = start("--model.name_or_path", "models/none")
    refused(done, "there is a folder models here", "no none in it", "hf download models/none")
    assert (local, whole) == ([True], [])
    Path("models").rmdir()
    start("--model.name_or_path", "models/none")
    assert (local, whole) == ([True, False], ["models/none"])


def test_random_weights_need_no_weights(start, model, tmp_path) -> None:
    (model / "model.safetensors").unlink()
    before = hashes(model)
    done = start("--model.name_or_path", str(model), "--model.init", "random")
    assert done.code == 0, done.err
    assert done.did == ["encode_source", "_fill_model", "save"]
    assert hashes(model) == before


def test_a_model_that_cannot_be_used_costs_no_tokenizer(start, model, tmp_path) -> None:
    """A tokenizer is trained for a model that is known to be good only."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    (model / "model.safetensors").unlink()
    flags = ["--model.name_or_path", str(model), "--model.train_tokenizer", "true"]
    refused(start(*flags), "holds no model.safetensors")
    assert not (tmp_path / "run").exists()


def test_an_attention_kernel_that_is_not_there(start, tmp_path) -> None:
    done = start("--model.attn_implementation", "flash_attention_2")
    refused(done, "model.attn_implementation flash_attention_2 cannot be used", "pip install")
    done = start("--model.attn_implementation", "flash_attention_9")
    refused(done, "LlamaForCausalLM cannot be built", "flash_attention_9")


def test_positions_of_a_model_without_rotary_embeddings(start, tmp_path) -> None:
    folder = save_byte_tokenizer(tmp_path / "gpt2")
    save_tiny_model(folder, "gpt2")
    done = start("--model.name_or_path", str(folder), "--data.sequence_length", "65")
    refused(done, "data.sequence_length is 65", "64 positions", "use at most 64")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "gemma2"])
def test_whether_weights_fit_is_known_from_headers(tmp_path, kind) -> None:
    """`check_weights_fit` refuses what the load would refuse, and changes nothing."""
    folder = save_tiny_model(tmp_path / kind, kind)
    meta = build_on_meta(ModelConfig(str(folder)))
    loading.check_weights_fit(meta, ModelConfig(str(folder)))
    assert all(p.is_meta for p in meta.parameters())
    tensors = load_file(folder / "model.safetensors")
    lost = next(n for n in sorted(tensors) if ".0." in n and "weight" in n)
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadingError) as early:
        loading.check_weights_fit(meta, ModelConfig(str(folder)))
    with pytest.raises(LoadingError) as late:
        loading.load_pretrained(meta, folder, "cpu")
    assert str(early.value).split(" (")[0] == str(late.value).split(" (")[0]


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def rows(file: Path, *values: dict) -> list[str]:
    file.write_text("".join(json.dumps(v) + "\n" for v in values))
    return ["--data.train_files", str(file)]


def test_data_that_is_not_there(start, tmp_path) -> None:
    done = start("--data.train_files", str(tmp_path / "none.txt"))
    refused(done, "data.train_files", "none.txt' matches no file", "check the path or glob")
    done = start("--data.train_files", f"['{tmp_path}/*.parquet']")
    refused(done, "data.train_files", "*.parquet' matches no file")
    done = start("--data.eval_files", str(tmp_path / "none.txt"))
    refused(done, "data.eval_files", "none.txt' matches no file")
    assert not (tmp_path / "run").exists()


def test_data_that_is_empty(start, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = start("--data.train_files", str(tmp_path / "empty.txt"))
    refused(done, "data.train_files", "empty.txt", "expected text or rows, but every file is empty")
    done = start(*rows(tmp_path / "empty.jsonl", {"text": ""}, {"text": ""}))
    refused(done, "expected text, but all 2 rows are empty", did=("encode_source",))
    (tmp_path / "none.jsonl").write_text("")
    done = start("--data.train_files", str(tmp_path / "none.jsonl"))
    refused(done, "none.jsonl", "every file is empty")
    assert not (tmp_path / "run").exists()


def test_data_that_is_damaged(start, tmp_path) -> None:
    done = start(*rows(tmp_path / "a.jsonl", {"body": "text"}))
    refused(done, "expected a column 'text'", "got 'body'", "set data.columns to {text: NAME}")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    done = start(*rows(tmp_path / "chat.jsonl", {"messages": turns}))
    refused(done, "got 'messages'", "conversations", "recipes/finetune.py")
    done = start(*rows(tmp_path / "b.jsonl", {"text": 3}))
    refused(done, "b.jsonl line 1: expected text in 'text', got int 3", did=("encode_source",))
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n{"text": ')
    done = start("--data.train_files", str(tmp_path / "c.jsonl"))
    said = "Repair or remove the row"
    refused(done, "c.jsonl line 2: expected JSON", said, did=("encode_source",))
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    done = start("--data.train_files", str(tmp_path / "d.txt"))
    refused(done, "d.txt is not UTF-8 text: byte 0xe9 at offset 3", "iconv")
    assert not (tmp_path / "run").exists()


def test_data_too_short_for_a_sample(start, tmp_path) -> None:
    (tmp_path / "short.txt").write_text("twenty characters...")
    done = start("--data.train_files", str(tmp_path / "short.txt"))
    said = [
        "at least one sample of 32 tokens",
        "have 21 tokens together",
        "data.sequence_length to at most 21",
    ]
    refused(done, *said, did=("encode_source",))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_embedding(start, tmp_path) -> None:
    folder = save_byte_tokenizer(tmp_path / "small")
    save_tiny_model(folder, vocab_size=200)
    before = hashes(folder)
    done = start("--model.name_or_path", str(folder))
    refused(done, "gives ids up to 256", "has 200 rows", "model.resize_embeddings: true", "to 257")
    assert hashes(folder) == before
    assert not (tmp_path / "run").exists()
    done = start("--model.name_or_path", str(folder), "--model.resize_embeddings", "true")
    assert done.code == 0, done.err


def test_no_tokenizer(start, model) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    done = start("--model.name_or_path", str(model))
    refused(done, "has none", "model.tokenizer_name_or_path", "model.train_tokenizer: true")
    done = start("--model.tokenizer_name_or_path", str(model))
    refused(done, "expected a tokenizer in", "found none of", "model.tokenizer_name_or_path")


def test_a_vocabulary_too_small_to_train_a_tokenizer_for(start, tmp_path) -> None:
    folder = save_tiny_model(tmp_path / "small", vocab_size=200)
    done = start("--model.name_or_path", str(folder), "--model.train_tokenizer", "true")
    said = ["model.train_tokenizer: expected a vocabulary of at least 258", "vocab_size 200"]
    refused(done, *said, code=2, did=("train_tokenizer",))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", [300, -1])
def test_a_token_id_outside_the_vocabulary(start, tmp_path, bad) -> None:
    good = {"input_ids": list(range(100))}
    done = start(*rows(tmp_path / "ids.jsonl", good, {"input_ids": [5, bad]}))
    said = [
        "ids from 0 to 299",
        "ids.jsonl line 2: expected",
        f"got {bad}",
        "model.resize_embeddings",
    ]
    refused(done, *said, did=("encode_source",))
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# The output folder
# --------------------------------------------------------------------------------------------------


def test_an_output_folder_that_is_none(start, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong, name in (("file", "file"), ("file/run", "file"), ("link", "link")):
        done = start("--output_dir", str(tmp_path / wrong))
        said = f"{tmp_path / name} is not a folder; give another"
        refused(done, "cannot be made", said, code=2)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "years of work"},
        {"config.yaml": "learning_rate: 3\n"},
        {"config.yaml": "learning_rate: 3\n", "thesis.txt": "years of work"},
        {"config.yaml": "model:\n  name_or_path: here  # my notes\n"},
        {"metrics.jsonl": '{"step": 1}\n'},
    ],
    ids=" ".join,
)
def test_an_output_folder_with_files_of_others(start, tmp_path, files) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, content in files.items():
        (run / name).write_text(content)
    before = hashes(run)
    refused(start(), f"output_dir {run} holds", "give an empty or new folder", code=2)
    assert hashes(run) == before


def test_the_model_folder_as_output_folder(start, model) -> None:
    before = hashes(model)
    done = start("--model.name_or_path", str(model), "--output_dir", str(model))
    refused(done, "holds files that are not a run's", "config.json", code=2)
    assert hashes(model) == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "7"], "seed was 42, is 7"),
        (["--data.sequence_length", "16"], "data.sequence_length was 32, is 16"),
        (["--model.init", "pretrained"], "model.init was 'random', is 'pretrained'"),
    ],
)
def test_an_output_folder_with_another_run(start, finished, flags, said) -> None:
    before = hashes(finished)
    done = start(*again(finished), *flags)
    refused(done, "holds another run", said, "Give another output_dir", code=2)
    assert hashes(finished) == before


def test_a_run_whose_config_is_damaged(start, finished, tmp_path) -> None:
    run = copied(finished / "run", tmp_path / "copy")
    (run / "config.yaml").write_text("model: [")
    before = hashes(run)
    done = start(*again(finished), "--output_dir", str(run))
    refused(done, "the config of the run in", "config.yaml is not readable YAML", code=2)
    assert hashes(run) == before


def test_a_run_of_the_other_recipe(start, finished, tmp_path) -> None:
    run = copied(finished / "run", tmp_path / "copy")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "kind": "finetune"}))
    before = hashes(run)
    done = start(*again(finished), "--output_dir", str(run))
    refused(done, "holds a run of fine-tuning", "Give another output_dir", code=2)
    assert hashes(run) == before


def test_the_demo_where_its_model_is_not(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    code = in_process("--output_dir", str(tmp_path / "run"))
    done = Outcome(code, *capfd.readouterr(), [])
    refused(done, "the demo's model", f"does not exist in {tmp_path}", "make demo")


# --------------------------------------------------------------------------------------------------
# Resuming
# --------------------------------------------------------------------------------------------------


def again(finished: Path) -> list[str]:
    """The flags that continue the finished run for a second step."""
    return [
        *["--model.name_or_path", str(finished / "model"), "--model.init", "random"],
        *["--data.train_files", str(finished / "text.txt"), "--train.max_steps", "2"],
        *["--train.per_device_train_batch_size", "3"],
        *["--output_dir", str(finished / "run")],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate_size": 64}, "intermediate_size was 48, is 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers was 3, is 2"),
        ({"num_attention_heads": 2}, "num_attention_heads was 4, is 2"),
        ({"hidden_act": "gelu"}, "hidden_act was 'silu', is 'gelu'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_resume_with_a_changed_architecture(start, finished, change, said) -> None:
    """Also where every tensor keeps its shape, and nothing else would notice."""
    file = finished / "model/config.json"
    plain = file.read_bytes()
    try:
        edit_json(file, **change)
        before = hashes(finished)
        done = start(*again(finished))
        assert hashes(finished) == before
    finally:
        file.write_bytes(plain)
    refused(done, "of another architecture", said, "another output_dir", did=("encode_source",))


def test_a_resume_with_a_global_batch_that_does_not_divide(start, finished) -> None:
    before = hashes(finished)
    done = start(*again(finished), "--train.per_device_train_batch_size", "2")
    said = ["global batch of 3", "micro-batches of 2", "with train.per_device_train_batch_size 1"]
    refused(done, *said, did=("encode_source",))
    assert hashes(finished) == before


def test_a_resume_with_another_storage_dtype(start, finished) -> None:
    before = hashes(finished)
    done = start(*again(finished), "--model.dtype", "bfloat16")
    refused(done, "model.dtype was 'float32', is 'bfloat16'", code=2)
    assert hashes(finished) == before


def test_a_resume_with_other_data_under_the_same_name(start, finished) -> None:
    text = finished / "text.txt"
    plain = text.read_text()
    try:
        text.write_text(plain[:20_000])
        before = hashes(finished)
        done = start(*again(finished))
        assert hashes(finished) == before
    finally:
        text.write_text(plain)
    refused(
        done, "the samples of the data 1875, this run has 625", "same data", did=("encode_source",)
    )


def test_the_finished_run_goes_on_where_nothing_is_wrong(start, finished) -> None:
    """The control, and the last of the cases that look at the finished run."""
    done = start(*again(finished))
    assert done.code == 0, done.err
    assert "after step 1" in done.out


# --------------------------------------------------------------------------------------------------
# Launching
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, ["RANK (not set)", "WORLD_SIZE 2", "torchrun"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK 2, WORLD_SIZE 2"]),
        ({"RANK": "first", "WORLD_SIZE": "2"}, ["RANK first"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["mpirun started 4 processes", "train separately"]),
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["srun started 8 processes"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ["DeepSpeed", "accelerate_configs/"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ["Megatron", "accelerate_configs/"]),
        (
            {
                "ACCELERATE_MIXED_PRECISION": "no",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            },
            [
                "should start several processes and started one",
                "MULTI_CPU",
                "accelerate_configs/cpu.yaml",
            ],
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_launches_that_are_refused(monkeypatch, environment, said) -> None:
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError) as caught, launch.start():
        pass
    for part in said:
        assert part in str(caught.value)


@pytest.mark.faults
def test_processes_that_do_not_meet(monkeypatch) -> None:
    monkeypatch.setattr(launch, "_RENDEZVOUS_TIMEOUT", datetime.timedelta(seconds=1))
    port = free_port()
    for rank in ("0", "1"):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(LaunchError) as caught, launch.start():
            pass
        said = str(caught.value)
        assert f"process {rank} of 2 did not find the others at 127.0.0.1:{port}" in said
        assert "main_process_ip" in said


def test_more_processes_than_devices(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "_exit_process", sys.exit)  # the real one would end this process
    monkeypatch.setattr(launch, "_SPEAKER_TIMEOUT", datetime.timedelta())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            launch.run_program(lambda: launch.start().__enter__())
        assert end.value.code == 1
    said = capsys.readouterr().err  # of all three together
    assert said.count("error: 3 processes were started on this machine, which has 2 device(s)") == 1


@pytest.mark.parametrize("elastic", [True, False])
def test_what_every_process_sees_is_said_once(monkeypatch, capsys, elastic) -> None:
    """Settings are read before the processes know each other, by each of them. Where no launcher
    tells what else one of them had to say, each does in the end.
    """
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(launch, "_exit_process", sys.exit)
    monkeypatch.setattr(launch, "_SPEAKER_TIMEOUT", datetime.timedelta())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def main() -> None:
        raise ConfigError("seed must be an integer")

    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            launch.run_program(main)
        assert end.value.code == 2
    late = "[rank 1] error: seed must be an integer\n"
    assert capsys.readouterr().err == "error: seed must be an integer\n" + late * (not elastic)


@pytest.mark.slow
def test_it_is_said_although_another_process_fails_first(tmp_path) -> None:
    """The launcher ends rank 0 as soon as rank 1 has left, and rank 1 has nothing to say."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "from toolkit.training import launch\n"
        "from toolkit.errors import ConfigError\n"
        "def main():\n"
        "    time.sleep(2 if os.environ['RANK'] == '0' else 0)\n"
        "    raise ConfigError('seed must be an integer')\n"
        "launch.run_program(main)\n"
    )
    command = [*torchrun(2, free_port()), str(tmp_path / "late.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("error: seed must be an integer") == 1, done.stderr


@pytest.mark.slow
def test_accelerate_launch_that_starts_one_process_of_two(tmp_path, tiny_llama, text_file) -> None:
    """The trap itself: `--cpu --num_processes 2` starts one process without a word."""
    launcher = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
    done = run_recipe(launcher, *real_flags(tiny_llama, text_file, tmp_path / "run"), timeout=300)
    assert done.returncode != 0
    assert (
        done.stderr.count("error: accelerate launch should start several processes and started one")
        == 1
    )
    assert not (tmp_path / "run").exists()


def real_flags(model: Path, text: Path, output: Path) -> list[str]:
    return [
        *["--model.name_or_path", str(model), "--sharding.param_dtype", "float32"],
        *[
            "--data.train_files",
            str(text),
            "--data.sequence_length",
            "32",
            "--data.eval_split",
            "0",
        ],
        *["--train.max_steps", "1", "--output_dir", str(output)],
    ]


@pytest.mark.slow
def test_fewer_samples_than_ranks(tmp_path, tiny_llama) -> None:
    """A real launch of two: one message, a failure of the launcher, nothing left behind."""
    (tmp_path / "short.txt").write_text("forty characters, enough for one sample.")
    flags = real_flags(tiny_llama, tmp_path / "short.txt", tmp_path / "run")
    done = run_recipe(accelerate(2, free_port()), *flags, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "at least one training sample for each of the 2 ranks, got 1" in done.stderr
    assert "fewer processes" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_one_rank_alone_cannot_read(tmp_path, sharded, text_file) -> None:
    """The second machine lacks a file of the model: both ranks end at once, one says why."""
    there = copied(sharded, tmp_path / "incomplete")
    lost = max(there.glob("*.safetensors"))
    lost.unlink()
    port, before = free_port(), hashes(sharded)
    started = []
    for rank, folder in enumerate((sharded, there)):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, str(RECIPE), *real_flags(folder, text_file, tmp_path / "run")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, 1], said
    assert "error" not in said[0][1]
    assert said[1][1].count("error: ") == 1
    assert (
        f"[rank 1] error: {there / INDEX} names 1 file(s) that are not there: {lost.name}"
        in said[1][1]
    )
    assert hashes(sharded) == before
    assert not (tmp_path / "run").exists()
