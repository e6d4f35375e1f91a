"""The Python API: a run from rows in memory, with real processes, and what can be made of it."""

import json
import os
import pydoc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml
from chat_templates import CHATML
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, SchedulerType

import toolkit
from toolkit import api
from toolkit import config as toolkit_config
from toolkit.checkpoint import commit
from toolkit.checkpoint.object_store import RemotePath
from toolkit.data import cached_rows
from toolkit.data.cached_rows import store_rows
from toolkit.errors import ConfigError, LaunchError, ToolkitError

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": "ok"}]}
    for n in range(40)
]


@pytest.fixture(autouse=True)
def rows_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(
        tmp_path_factory.mktemp("model"), vocab_size=320, max_position_embeddings=128
    )
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(folder))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = CHATML.replace("«", "").replace("»", "")
    tokenizer.save_pretrained(folder)
    return folder


# ---- Rows


def test_equal_rows_are_one_file_and_other_rows_another() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    first = store_rows(dataset, "data.train_files")
    assert store_rows(datasets.Dataset.from_list(ROWS), "data.train_files") == first
    assert store_rows(dataset.select(range(3)), "data.train_files") != first
    assert datasets.Dataset.from_parquet(first).to_list() == ROWS
    lines = store_rows(list(ROWS), "data.train_files")
    assert store_rows(tuple(ROWS), "data.train_files") == lines
    assert store_rows(ROWS[1:], "data.train_files") != lines
    files = list(Path(first).parent.iterdir())
    assert sorted(file.suffix for file in files) == [".jsonl", ".jsonl", ".parquet", ".parquet"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}


def test_a_list_keeps_the_keys_types_and_order_of_each_row() -> None:
    arguments = {"zone": "Ö\u2028", "at": 3, "unit": None}
    rows = [
        {"prompt": "a", "completion": "b", "x": 3},
        {"completion": "b", "prompt": "a", "tools": [{"z": 1, "a": arguments}], "x": 3.5},
        {"prompt": "a", "completion": ["b"], "x": "three"},
    ]
    lines = Path(store_rows(rows, "data.train_files")).read_text("utf-8").split("\n")
    assert [json.dumps(json.loads(line)) for line in lines[:-1]] == [json.dumps(r) for r in rows]


def test_rows_are_stored_at_an_absolute_path_by_several_threads(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("relative"))
    both_have_written = threading.Barrier(2)
    digest_file = cached_rows._digest_file

    def wait_and_digest(file: Path) -> str:
        both_have_written.wait(30)
        return digest_file(file)

    monkeypatch.setattr(cached_rows, "_digest_file", wait_and_digest)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(store_rows, (ROWS, ROWS[1:]), "xy")
    assert Path(first).is_absolute()
    for file, rows in ((first, ROWS), (second, ROWS[1:])):
        assert [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()] == rows


def test_paths_stay_paths() -> None:
    assert store_rows("a/*.jsonl", "x") == "a/*.jsonl"
    assert store_rows([Path("a.jsonl"), "b.jsonl"], "x") == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
            r"data=dataset\['train",
        ),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "data.streaming"),
        (datasets.Dataset.from_list(ROWS).select([]), "has no rows"),
        (datasets.IterableDatasetDict(), "got an IterableDatasetDict; name the files"),
        (datasets.Dataset.from_list(ROWS).with_transform(lambda rows: rows), r"dataset\.map"),
        ([{"a": 1}, {"a": {1}}], "row 1 .* cannot be written as JSON: .* set is not"),
        ([{"a": float("nan")}], "row 0 .* cannot be written"),
        ([{"a": "\ud800"}], "row 0 .* cannot be written"),
        ([], "a list of dicts, or paths, got list"),
        (7, "got int"),
    ],
)
def test_other_rows_are_refused(rows, message) -> None:
    with pytest.raises(ConfigError, match=message):
        store_rows(rows, "data.train_files")


# ---- Settings: what the command gets


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """Collect commands and the content of their configs instead of running them."""
    commands: list = []

    def record(arguments, quiet):
        commands.append((arguments, yaml.safe_load(Path(arguments[1]).read_text("utf-8"))))

    monkeypatch.setattr(api, "run_command", record)
    monkeypatch.setattr(api, "SavedRun", lambda path, quiet: path)
    return commands


@pytest.mark.parametrize("kind", [kind.name for kind in api.KINDS])
def test_each_kind_of_run_has_a_function(kind: str, started: list) -> None:
    start = getattr(toolkit, kind)
    assert start(model="m", data="o/n", output_dir="runs/x", train={"max_steps": 3}) == "runs/x"
    ((command, *_), content) = started[0]
    assert command == api.find_kind(kind).command
    assert content == {
        "train": {"max_steps": 3},
        "model": {"name_or_path": "m"},
        "data": {"dataset_name": "o/n"},
        "output_dir": "runs/x",
    }


def test_a_config_file_is_overridden_section_by_section(started: list, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {name_or_path: a, dtype: float32}\ntrain: {max_steps: 9}\nseed: 3\n")
    toolkit.finetune(
        config=file, model={"name_or_path": "b"}, output_dir=tmp_path, num_processes=2,
        data={"train_files": "x.jsonl", "sequence_length": 64}, accelerate_config="cpu",
    )  # fmt: skip
    arguments, content = started[0]
    assert arguments[2:] == ["--num_processes", "2", "--accelerate_config", "cpu"]
    assert content["model"] == {"name_or_path": "b", "dtype": "float32"}
    assert content["train"] == {"max_steps": 9}
    assert content["data"] == {"train_files": "x.jsonl", "sequence_length": 64}


def test_a_call_replaces_the_data_sources_of_a_config_file(started: list, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "data: {dataset_name: o/n, dataset_split: x, eval_sources: [{files: e}], num_workers: 1}\n"
    )
    toolkit.finetune(config=file, data=ROWS, output_dir="r")
    data = started[-1][1]["data"]
    assert data.pop("train_files").endswith(".jsonl")
    assert data == {"eval_sources": [{"files": "e"}], "num_workers": 1}
    toolkit.finetune(config=file, eval_data="e.jsonl", data={"num_workers": 2}, output_dir="r")
    assert started[-1][1]["data"] == {
        "dataset_name": "o/n", "dataset_split": "x", "num_workers": 2, "eval_files": "e.jsonl",
    }  # fmt: skip


def test_none_removes_a_section_of_a_config_file(started: list, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lora: {r: 4}\nseed: 3\ntrain: {max_steps: 9}\ndata: {train_files: a}\n")
    toolkit.finetune(config=file, lora=None, seed=None, optim={}, output_dir="r")
    data = {"train_files": "a"}
    content = {"train": {"max_steps": 9}, "data": data, "optim": {}, "output_dir": "r"}
    assert started[-1][1] == content
    toolkit.finetune(config=file, data={"train_files": None, "dataset_name": "o/n"}, output_dir="r")
    assert started[-1][1]["data"] == {"dataset_name": "o/n"}


@pytest.mark.parametrize("data", [None, {}, {"sequence_length": 256}, {"train_files": None}])
def test_a_call_without_data_is_refused(data, started: list) -> None:
    with pytest.raises(ConfigError, match="expected data: "):
        toolkit.finetune(model="m", data=data, output_dir="r")
    assert not started


def test_values_of_python_become_values_of_yaml(started: list, tmp_path: Path) -> None:
    shared = [Path("a.jsonl"), "b.jsonl"]
    toolkit.finetune(
        model={"name_or_path": tmp_path, "dtype": torch.bfloat16},
        data={
            "sources": ({"files": ROWS, "weight": np.float32(0.5)}, {"files": shared}),
            "eval_sources": [{"files": shared}, {"files": datasets.Dataset.from_list(ROWS)}],
            "sequence_length": np.int64(64),
        },
        optim={"lr_scheduler_type": SchedulerType.COSINE, "learning_rate": torch.tensor(0.25)},
        output_dir=tmp_path,
    )
    content = started[0][1]
    rows, listed = content["data"]["sources"]
    assert Path(rows["files"]).suffix == ".jsonl"
    assert rows["weight"] == 0.5
    assert listed["files"] == ["a.jsonl", "b.jsonl"]
    assert Path(content["data"]["eval_sources"][1]["files"]).suffix == ".parquet"
    assert content["data"]["sequence_length"] == 64
    assert content["model"] == {"name_or_path": str(tmp_path), "dtype": "bfloat16"}
    assert content["optim"] == {"lr_scheduler_type": "cosine", "learning_rate": 0.25}


def test_texts_of_a_template_stay_texts(tmp_path: Path, monkeypatch) -> None:
    configs: list = []

    def load(arguments, quiet):
        configs.append(toolkit_config.load(toolkit_config.FinetuneConfig, arguments[1]))

    monkeypatch.setattr(api, "run_command", load)
    monkeypatch.setattr(api, "SavedRun", lambda path, quiet: path)
    kwargs = {"version": "1.10", "x": "true", "d": "01", "number": 1.5}
    data = {"train_files": "a.jsonl", "chat_template_kwargs": kwargs}
    toolkit.finetune(model="m", data=data, output_dir="r")
    assert configs[0].data.chat_template_kwargs == kwargs


def test_a_shared_value_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, texts = {"q_proj": 1}, []
    monkeypatch.setattr(api, "run_command", lambda args, _: texts.append(Path(args[1]).read_text()))
    monkeypatch.setattr(api, "SavedRun", lambda path, quiet: path)
    toolkit.finetune(data="o/n", output_dir="r", lora={"a": shared, "b": shared}, train={"c": []})
    assert "&" not in texts[0]
    assert "*" not in texts[0]


def test_a_value_that_yaml_does_not_have_is_named(started: list) -> None:
    with pytest.raises(ConfigError, match=r"^train\.hooks\[1\]: expected text, .* got object"):
        toolkit.finetune(data="o/n", output_dir="r", train={"hooks": [1, object()]})
    with pytest.raises(ConfigError, match="got an IterableDatasetDict"):
        toolkit.finetune(data=datasets.IterableDatasetDict(), output_dir="r")


@pytest.mark.parametrize(("has_gpu", "name"), [(True, "one_node"), (False, "cpu")])
def test_several_processes_have_a_launch_config(has_gpu, name, started, monkeypatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    toolkit.finetune(model="m", data="o/n", output_dir="r", num_processes=2)
    toolkit.finetune(model="m", data="o/n", output_dir="r", num_processes=1)
    assert started[0][0][2:] == ["--num_processes", "2", "--accelerate_config", name]
    assert started[1][0][2:] == ["--num_processes", "1"]


def test_data_that_is_no_hub_id_is_a_file(started: list, tmp_path: Path) -> None:
    for text, setting in (
        ("data/rows.jsonl", "train_files"),
        ("org/rows-v1.1", "dataset_name"),
        ("org/*", "train_files"),
        (str(tmp_path), "train_files"),
    ):
        toolkit.finetune(model="m", data=text, output_dir="r")
        assert started[-1][1]["data"] == {setting: text}


def test_wrong_arguments_are_refused_before_a_process() -> None:
    with pytest.raises(ConfigError, match="expected output_dir"):
        toolkit.finetune(model="m", data="o/n")
    with pytest.raises(ConfigError, match="model: expected text, a path or a dict"):
        toolkit.finetune(model=object(), output_dir="r")
    with pytest.raises(ConfigError, match="no kind of run 'distil'"):
        toolkit.run("distil", output_dir="r")
    with pytest.raises(ConfigError, match="expected the output_dir of a run"):
        toolkit.SavedRun("nowhere")
    with pytest.raises(AttributeError, match="no attribute 'finetun'"):
        toolkit.finetun  # noqa: B018 - reading the name is the test


# ---- Real processes


def test_an_error_is_the_line_of_the_command(capfd) -> None:
    with pytest.raises(ConfigError, match=r"^config file nowhere.yaml does not exist"):
        api.run_command(["finetune", "nowhere.yaml"])
    assert "toolkit: error: config file nowhere.yaml" in capfd.readouterr().out
    with pytest.raises(ToolkitError):
        api.run_command(["verify", "nowhere"], quiet=True)
    assert not capfd.readouterr().out


@pytest.mark.slow
def test_a_run_from_rows_to_an_export(chat_model: Path, tmp_path: Path, capsys) -> None:
    run = toolkit.finetune(
        model=chat_model,
        data={"train_files": datasets.Dataset.from_list(ROWS), "sequence_length": 64},
        eval_data=datasets.Dataset.from_list(ROWS[:4]),
        output_dir=tmp_path / "run",
        lora={"r": 4},
        sharding={"param_dtype": "float32"},
        train={"max_steps": 4, "logging_steps": 1},
        checkpoint={"save_steps": 2},
        num_processes=2,
    )
    printed = capsys.readouterr().out
    assert "2 process(es) on cpu" in printed
    assert "step 4/4" in printed
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert run.metrics[-1]["eval_loss"] > 0
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step-00000004"
    # The command line continues the run with its saved config.
    flags = ["--config", str(run.config_file), "--train.max_steps", "5"]
    result = run_recipe_ranks("finetune", 1, *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line["step"] for line in toolkit.SavedRun(run.path).metrics][-1] == 5
    merged = run.export(tmp_path / "merged", merge=True)
    run.verify(merged)
    AutoModelForCausalLM.from_pretrained(merged)
    damaged = next(merged.glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ToolkitError, match=damaged.name):
        run.verify(merged)
    assert run.report(tmp_path / "page").is_file()


@pytest.mark.faults
def test_the_stop_button_saves_a_checkpoint(chat_model: Path, tmp_path: Path, monkeypatch) -> None:
    printed: list[str] = []

    def press_stop(line: str, **_: object) -> None:
        printed.append(line)
        if line.startswith("step ") and not printed[-2].startswith("step "):
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "print", press_stop, raising=False)
    with pytest.raises(KeyboardInterrupt):
        toolkit.finetune(
            model=chat_model,
            data={"train_files": ROWS, "sequence_length": 64},
            output_dir=tmp_path / "run",
            train={"max_steps": 100_000},
            sharding={"param_dtype": "float32"},
        )
    assert toolkit.SavedRun(tmp_path / "run").checkpoint is not None, printed


# ---- Fake commands: shell scripts in place of `python -m toolkit`


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Yield a function that makes a shell script the command; its result lists what is printed."""

    def install(script: str) -> list[str]:
        command, printed = tmp_path / "command", []
        command.write_text(f"#!/bin/bash\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setattr(api.sys, "executable", str(command))
        monkeypatch.setattr(api, "print", lambda line, **_: printed.append(line), raising=False)
        return printed

    # A shell starts background jobs with SIGINT ignored, which their children inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield install
    signal.signal(signal.SIGINT, before)


def test_a_run_stopped_by_a_signal_is_an_error(fake) -> None:
    fake("exit 75")
    with pytest.raises(LaunchError, match="the same call resumes it"):
        api.run_command(["finetune"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_program_reaches_the_command(number: int, fake, monkeypatch) -> None:
    fake(f"trap 'exit 75' {int(number)}; echo ready; while :; do sleep 0.05; done")
    monkeypatch.setattr(api, "print", lambda *_, **__: os.kill(os.getpid(), number), raising=False)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(LaunchError):
            api.run_command(["finetune"])
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_handler_of_the_program_stays(fake) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    try:
        fake("trap '' USR1; kill -USR1 $PPID")
        api.run_command(["finetune"])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signals == [signal.SIGUSR1]


def test_a_call_from_a_thread_needs_no_handlers(fake) -> None:
    printed = fake("echo ran")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(api.run_command, ["finetune"]).result()
    assert printed == ["ran\n"]


def test_an_error_of_print_ends_the_command(fake, tmp_path: Path, monkeypatch) -> None:
    fake(
        f"trap 'seq 100000; echo saved > {tmp_path}/saved; exit 75' TERM\n"
        "echo ready; while :; do sleep 0.05; done"
    )

    def fail(*_: object, **__: object) -> None:
        raise OSError("the notebook is gone")

    monkeypatch.setattr(api, "print", fail, raising=False)
    with pytest.raises(OSError, match="the notebook is gone"):
        api.run_command(["finetune"])
    assert (tmp_path / "saved").is_file()


@pytest.mark.parametrize(
    ("code", "error"),
    [(0, KeyboardInterrupt), (75, KeyboardInterrupt), (130, KeyboardInterrupt), (1, ToolkitError)],
)
def test_an_interrupt_does_not_hide_a_failed_save(code, error, fake, monkeypatch) -> None:
    fake(f"trap 'echo error: no space; exit {code}' INT; echo ready; while :; do sleep 0.05; done")

    def press_stop(line: str, **_: object) -> None:
        if line == "ready\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(api, "print", press_stop, raising=False)
    with pytest.raises(error, match="no space" if code == 1 else None):
        api.run_command(["finetune"])


def test_a_descendant_that_keeps_the_output_open_does_not_block(fake, monkeypatch) -> None:
    monkeypatch.setattr(api, "_DRAIN_SECONDS", 0.3)
    printed = fake("sleep 8 & echo last")
    start = time.monotonic()
    api.run_command(["finetune"])
    assert time.monotonic() - start < 7
    assert printed == ["last\n"]


def test_a_command_gets_neither_a_launcher_environment_nor_input(fake, monkeypatch) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_TOKEN", "stays")
    printed = fake("env; wc -c")
    api.run_command(["finetune"])
    variables = dict(line.rstrip().split("=", 1) for line in printed if "=" in line)
    assert variables["HF_TOKEN"] == "stays"
    assert not variables.keys() & set(names)
    assert printed[-1].strip() == "0"


@pytest.mark.parametrize("mark", ["error: ", "toolkit: error: ", "[rank 13] error: "])
def test_the_error_of_any_rank_is_found(mark: str) -> None:
    assert api._find_error(["error: first", f"{mark}bad row", "W torch"], 1) == "bad row"


# ---- Runs on the disk


def write_run(folder: Path, config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    return folder


def test_a_run_stays_valid_in_another_folder(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    run = toolkit.SavedRun("run")
    monkeypatch.chdir("/")
    assert run.config_file.is_file()
    assert run.checkpoint is None


def test_metrics_after_a_kill_lack_the_last_line(tmp_path: Path) -> None:
    run = toolkit.SavedRun(write_run(tmp_path / "run"))
    assert run.metrics == []
    (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert run.metrics == [{"step": 1, "loss": 2.5}]


def test_a_checkpoint_is_found_at_its_root(tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "other"
    config = yaml.safe_dump({"output_dir": "run", "checkpoint": {"root": str(other)}})
    run = toolkit.SavedRun(write_run(tmp_path / "run", config))
    url = RemotePath("s3://bucket/checkpoints/step-00000002", "bucket", None)
    found = {2: url, 1: other / "a"}
    roots: list = []
    monkeypatch.setattr(commit, "committed_steps", lambda root: roots.append(root) or found)
    assert run.checkpoint == "s3://bucket/checkpoints/step-00000002"
    del found[2]
    assert run.checkpoint == other / "a"
    assert roots == [other, other]


def test_help_describes_the_function_of_a_kind() -> None:
    text = pydoc.plain(pydoc.render_doc(toolkit.prefer))
    assert "\nprefer(*, model:" in text
    assert "Train, as `toolkit COMMAND` does" in text
    assert "kind:" not in text.splitlines()[2]
