"""The typical mistakes of a first hour: each is one short line before any process is started."""

import json
import re
import socket
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, accelerate, free_port, run_recipe, save_byte_tokenizer, save_tiny_model

from toolkit import recipes
from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.cli import main
from toolkit.formats import hub_access
from toolkit.planning.published import published

LONGEST = 300
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}
GOOD = [
    *("--model.name_or_path", "model", "--data.train_files", "text.txt", "--output_dir", "run"),
    *("--data.sequence_length", "32", "--accelerate_config", "cpu"),
]
CHATS = ["--data.train_files", "chats.jsonl"]
LORA = ["--model.name_or_path", "chatty", "--lora.r", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model, a text and conversations; nothing of it is changed by a start."""
    folder = tmp_path_factory.mktemp("first")
    save_byte_tokenizer(folder / "model")
    save_tiny_model(folder / "model")
    save_byte_tokenizer(folder / "chatty")
    template = (ROOT / "recipes/configs/chat_template.jinja").read_text("utf-8")
    (folder / "chatty/chat_template.jinja").write_text(template, "utf-8")
    save_tiny_model(folder / "chatty", max_position_embeddings=512)
    (folder / "text.txt").write_text("What is said here is learned. " * 200)
    (folder / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 20)
    (folder / "other").mkdir()
    (folder / "other/notes.txt").write_text("mine")
    (folder / "closed").write_text("a file")
    (folder / "ds.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    return folder


@pytest.fixture
def start(folder, monkeypatch, capsys):
    """Return a function (command, flags) -> (exit code, what was launched, stderr)."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(folder / "no.yaml"))
    launched: list[list[str]] = []
    monkeypatch.setattr(recipes, "_launch", lambda arguments, *_: launched.append(arguments) or 0)

    def run(command: str, *flags: str) -> tuple[int, list[list[str]], str]:
        launched.clear()
        code = main([command, *GOOD, *flags])
        return code, launched, capsys.readouterr().err

    return run


MISTAKES = {
    "a wrong path of the model": (
        "train",
        ["--model.name_or_path", "./modle"],
        "no folder ./modle",
    ),
    "a glob without a match": (
        "train",
        ["--data.train_files", "data/*.jsonl"],
        "data.train_files: 'data/*.jsonl' matches no file",
    ),
    "no chat template": ("finetune", CHATS, "chat template"),
    "a wrong LoRA target": (
        "finetune",
        [*CHATS, *LORA, "--lora.target_modules", "[q_prj]"],
        "lora.target_modules: 'q_prj' matches no module of the model; did you mean q_proj",
    ),
    "GPUs that are not there": (
        "train",
        ["--accelerate_config", "one_node"],
        "start 8 processes on GPUs, and torch sees no GPU",
    ),
    "one GPU that is not there": (
        "train",
        ["--accelerate_config", "one_gpu"],
        "start 1 process on GPUs, and torch sees no GPU",
    ),
    "no process": ("train", ["--num_processes", "0"], "--num_processes 0: expected 1 or more"),
    "far more processes than cores": (
        "train",
        ["--num_processes", "100000"],
        "100000 processes on the CPU of this machine, which has ",
    ),
    "a loss by its usual name": (
        "prefer",
        ["--preference.loss_type", "dpo"],
        "got dpo; did you mean sigmoid?",
    ),
    "a choice with a slip": (
        "train",
        ["--optim.lr_scheduler_type", "cosin"],
        "got cosin; did you mean cosine?",
    ),
    "the folder of something else": (
        "train",
        ["--output_dir", "other"],
        "output_dir other holds files that are not a run's (notes.txt)",
    ),
    "a misspelt setting": ("train", ["--train.max_step", "3"], "did you mean train.max_steps?"),
    "a value of another type": (
        "train",
        ["--train.max_steps", "many"],
        "train.max_steps must be an integer of at least 1",
    ),
    "a YAML for DeepSpeed": (
        "train",
        ["--accelerate_config", "ds.yaml"],
        "ds.yaml is for DEEPSPEED",
    ),
    "more tokens than positions": (
        "train",
        ["--data.sequence_length", "128"],
        "data.sequence_length is 128, the model has 64 positions",
    ),
    "a batch that does not divide": (
        "train",
        ["--train.global_batch_size", "16", "--num_processes", "3"],
        "the global batch of 16 samples does not divide",
    ),
    "an output folder that cannot be made": (
        "train",
        ["--output_dir", "closed/run"],
        "output_dir closed/run cannot be made: ",
    ),
    "a model of the Hub without network": (
        "train",
        ["--model.name_or_path", "someone/some-model"],
        "someone/some-model is neither a folder here",
    ),
    "the name of a launch configuration": (
        "train",
        ["--accelerate_config", "one_nod"],
        "did you mean one_node?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_short_line_before_any_process(start, mistake, monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    command, flags, said = MISTAKES[mistake]
    code, launched, err = start(command, *flags)
    assert launched == []
    assert code in (1, 2)
    assert err.startswith("toolkit: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert len(err.rstrip("\n")) <= LONGEST, len(err)


def test_what_is_right_is_launched(start, folder) -> None:
    code, launched, err = start("train")
    assert (code, err) == (0, "")
    assert launched[0][0] == "launch"
    code, launched, err = start("finetune", *CHATS, *LORA, "--lora.target_modules", "[q_proj]")
    assert (code, err, len(launched)) == (0, "", 1)
    assert not (folder / "run").exists()


def test_a_full_disk_is_told_before_any_process(start, monkeypatch) -> None:
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda folder: 1000)
    code, launched, err = start("train", "--train.max_steps", "3")
    assert (code, launched) == (1, [])
    assert err.startswith("toolkit: error: the run does not fit on the disk: ")


def test_a_port_in_use_is_left_to_whoever_has_it(start, monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(recipes, "_DEFAULT_PORT", port)
        _, launched, err = start("train")
        chosen = launched[0][launched[0].index("--main_process_port") + 1]
        assert int(chosen) not in (0, port)
        assert err == ""
        _, launched, _ = start("train", "--main_process_port", str(port))  # as the user says
        assert launched[0][launched[0].index("--main_process_port") + 1] == str(port)
    _, launched, _ = start("train")
    assert "--main_process_port" not in launched[0]


def test_advice_on_the_number_of_processes_works(start) -> None:
    """What the line names is taken when it is followed."""
    for total, size, fitting in (("8", "4", ("2", "4")), ("10", "4", ("2", "1"))):
        batch = ["--train.global_batch_size", total, "--train.per_device_train_batch_size", size]
        code, _, err = start("train", *batch, "--num_processes", "3")
        assert code == 1
        said = r"use (\d+) process\(es\) with train.per_device_train_batch_size (\d+)"
        found = re.search(said, err)
        assert found, err
        assert found.groups() == fitting
        batch[-1] = found[2]
        assert start("train", *batch, "--num_processes", found[1])[0] == 0


@pytest.fixture
def no_hub(monkeypatch):
    """A Hub that nobody answers for, as without network."""
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for function in (hub_access.hub_unreachable_reason, hub_access.warn_if_hub_unreachable):
        function.cache_clear()
    yield
    for function in (hub_access.hub_unreachable_reason, hub_access.warn_if_hub_unreachable):
        function.cache_clear()


def test_without_network_a_model_of_the_hub_is_refused_in_seconds(start, no_hub) -> None:
    begun = time.monotonic()
    code, launched, err = start("train", "--model.name_or_path", "someone/some-model")
    assert (code, launched) == (1, [])
    assert "127.0.0.1 cannot be reached (Connection refused)" in err
    assert err.count("\n") == 1
    assert len(err) <= LONGEST
    assert time.monotonic() - begun < 10


def test_a_plan_of_a_ready_config_needs_no_access(no_hub, capsys, tmp_path) -> None:
    """Its published shape comes along, which a line says; of another model there is none."""
    flags = ["--world_size", "8", "--json"]
    ready = str(ROOT / "recipes/configs/qwen3_0.6b_full_1gpu.yaml")
    assert main(["inspect", "--plan", ready, *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["parameters"] == 596_049_920
    assert err.startswith("note: config.json of Qwen/Qwen3-0.6B cannot be read here; the plan uses")
    other = tmp_path / "other.yaml"
    other.write_text("model: {name_or_path: someone/some-model}\n")
    assert main(["inspect", "--plan", str(other), *flags]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_every_ready_config_has_its_shape() -> None:
    files = [*(ROOT / "recipes/configs").glob("*gpu.yaml")]
    files += (ROOT / "recipes/configs").glob("*nodes.yaml")
    models = [yaml.safe_load(file.read_text("utf-8"))["model"] for file in files]
    # A local folder, of the configs with a published figure, has its own config.json.
    names = {
        model["name_or_path"] for model in models if not (ROOT / model["name_or_path"]).is_dir()
    }
    assert len(names) >= 10
    assert names <= published().keys()


@pytest.mark.slow
def test_the_launcher_of_accelerate_gets_one_line_too(folder) -> None:
    """Without `toolkit train`, our code runs in each process: one of them says it, once."""
    flags = [*GOOD[:-2], "--data.train_files", str(folder / "nothing.txt")]
    flags += ["--model.name_or_path", str(folder / "model")]
    flags += ["--output_dir", str(folder / "launched")]
    done = run_recipe(accelerate(2, free_port()), *flags, timeout=100)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith(("error:", "[rank"))]
    assert len(ours) == 1, done.stderr
    assert "matches no file" in ours[0]
    assert not (folder / "launched").exists()
