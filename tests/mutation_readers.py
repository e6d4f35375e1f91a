"""A scene with every kind of file that the toolkit reads, and what reads each, as users have it.

A scene is a folder to stand in: `model`, `run`, `export`, `lora` (a run), `adapter` and others are
below it. Readers are called there, where one file was mutated.
"""

import contextlib
import copy
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from sharded import sharded_of

from toolkit import adapters, cli, config, loading, models
from toolkit.adapters.peft_folder import load_with_peft
from toolkit.checkpoint import TrainState, find_resumable, restore
from toolkit.checkpoint.run_folder import validate_run_folders as claim_folder
from toolkit.config import FinetuneConfig, PretrainConfig, accelerate_yaml, model_settings
from toolkit.data.prepare import inspect_data, prepare_data
from toolkit.data.report import render_report
from toolkit.data.tokens.tokenizer import load_tokenizer, prepare_tokenizer, use_model_tokenizer
from toolkit.errors import ConfigError, ExportError
from toolkit.export import consolidate
from toolkit.formats.metrics_file import METRICS, SAMPLES, STARTS, drop_lines_after
from toolkit.hub.local import read_export
from toolkit.mesh import View
from toolkit.models.causal_lm import build_on_meta, model_on_meta
from toolkit.planning import calibrate_by_run, device_of, plan_run
from toolkit.planning.simulation import PlanningError
from toolkit.training import Run, build_optimizer, build_scheduler
from toolkit.training.generation import generate

Reader = Callable[[], Any]

ONE_PROCESS = Run(cast(Any, None), torch.device("cpu"), 0, 1)
ONE_RANK: Any = types.SimpleNamespace(data=View(), context=View())


# ---- The scene


def make(folder: Path) -> None:
    """Write the scene; trains both recipes for a few steps on two ranks."""
    model = save_byte_tokenizer(folder / "model", extra=4)
    (model / "chat_template.jinja").write_text(
        (ROOT / "recipes/configs/chat_template.jinja").read_text()
    )
    save_tiny_model(model, shard="30KB", num_hidden_layers=2)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 0.7}')
    _write_data(folder / "data")
    common = {
        "model": {"name_or_path": "model"},
        "sharding": {"param_dtype": "float32"},
        "optim": {"learning_rate": 1e-3},
        "train": {"max_steps": 3, "per_device_train_batch_size": 1, "logging_steps": 1},
        "checkpoint": {"save_steps": 3},
    }
    data = {"sequence_length": 32, "eval_split": 0.0}
    tuned = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    write_yaml(
        folder / "pretrain.yaml",
        common | {"data": data | {"train_files": ["data/text.txt"]}, "output_dir": "run"},
    )
    chat = data | {"train_files": ["data/chat.jsonl"], "sequence_length": 64, "packing": "none"}
    write_yaml(
        folder / "finetune.yaml", common | {"data": chat, "lora": tuned, "output_dir": "lora"}
    )
    for recipe in ("pretrain", "finetune"):
        done = run_recipe_ranks(recipe, 2, "--config", f"{recipe}.yaml", cwd=folder)
        if done.returncode:
            raise RuntimeError(done.stderr)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        consolidate("run", "export", max_shard_size=60_000)
        consolidate("lora", "adapter")
    shutil.copytree(folder / "run/checkpoints/step-00000003/dcp", folder / "plain")
    (folder / "other").mkdir()
    shutil.copy(ROOT / "accelerate_configs/fsdp2.yaml", folder / "other/accelerate.yaml")
    for name in ("axolotl_gpt_oss_20b_lora.yaml", "trainer_alpaca_lora.py"):
        shutil.copy(ROOT / "tests/foreign_configs" / name, folder / "other" / name)
    figures = {"memory": 8e10, "bf16": 1e15, "fp32": 6e13, "bandwidth": 3e12, "link": 4e11}
    write_yaml(folder / "other/device.yaml", {"name": "mine", **figures})
    (folder / "cache/toolkit").mkdir(parents=True)
    of = f"mine, LlamaForCausalLM, float32, torch {torch.__version__}"
    write_yaml(
        folder / "cache/toolkit/calibration.yaml",
        {of: {"memory": 1.1, "time": 0.9, "source": "a run"}},
    )
    for rank in (folder / "lora", folder / "run"):  # as on a GPU: `plan --calibrate RUN` reads them
        lines = [json.loads(line) for line in (rank / STARTS).read_text().splitlines()]
        text = "".join(
            json.dumps(line | {"device": "NVIDIA H100 80GB HBM3"}) + "\n" for line in lines
        )
        (rank / STARTS).write_text(text)


def _write_data(folder: Path) -> None:
    folder.mkdir()
    turns = [("user", "How many? "), ("assistant", "Seven of them, I think.")]
    chats = [
        {"messages": [{"role": role, "content": f"{text} {i}"} for role, text in turns]}
        for i in range(12)
    ]
    pairs = [
        {"prompt": f"Say {i}.", "completion": f"It is {i}, and not {i + 1}."} for i in range(12)
    ]
    ids = [{"input_ids": [1 + i, 2, 3, 4], "labels": [-100, 2, 3, 4]} for i in range(12)]
    texts = [{"text": f"A text of number {i}, which ends here.\n"} for i in range(12)]
    for name, rows in (("chat", chats), ("pairs", pairs), ("ids", ids), ("texts", texts)):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress((folder / "pairs.jsonl").read_bytes()))
    (folder / "pairs.json").write_text(json.dumps(pairs))
    lines = [f'"{row["prompt"]}","{row["completion"]}"' for row in pairs]
    (folder / "pairs.csv").write_text("\n".join(["prompt,completion", *lines, ""]))
    table = pa.Table.from_pylist(pairs)
    with pa.ipc.new_file(str(folder / "pairs.arrow"), table.schema) as out:
        out.write_table(table)
    (folder / "text.txt").write_text("".join(row["text"] for row in texts) * 20)


def write_yaml(file: Path, content: Any) -> None:
    file.write_text(yaml.safe_dump(content, sort_keys=False))


# ---- Readers


class Refused(Exception):
    """A command ended with its error line, or with findings."""


class Fault(Exception):
    """A command ended in a way that none may."""


def command(*argv: str) -> str:
    """Run the command line; return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    if code == 0:
        return out.getvalue()
    said = [line for line in err.getvalue().splitlines() if line.startswith("toolkit: error: ")]
    found = argv[0] in ("verify", "plan") and out.getvalue().strip()  # findings are on stdout
    if "Traceback" in err.getvalue() or code not in (1, 2) or not (len(said) == 1 or found):
        raise Fault(f"toolkit {argv[0]} ended with {code} and said {err.getvalue()[-2000:]!r}")
    raise Refused(said[0] if said else out.getvalue())


def digest(tensors: dict[str, Any]) -> str:
    """Return what tells whether all values are the same."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        hashed.update(name.encode() + tensors[name].detach().double().numpy().tobytes())
    return hashed.hexdigest()


def parse() -> None:
    """Read a config as the recipe does."""
    config.parse(FinetuneConfig, ["--config", "finetune.yaml"])


@functools.cache
def settings(recipe: str) -> Any:
    """Return the settings of a recipe; they are read once."""
    kind = FinetuneConfig if recipe == "finetune" else PretrainConfig
    return config.parse(kind, ["--config", f"{recipe}.yaml"])


def reading(recipe: str, **data: Any) -> Any:
    """Return the settings of a recipe with others of its data."""
    cfg = settings(recipe)
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **data))


def plan() -> None:
    command("plan", "finetune.yaml", "--world_size", "2")


def units() -> None:
    command("inspect", "--plan", "finetune.yaml", "--world_size", "2")


def launch() -> None:
    """Read an Accelerate YAML as `toolkit train` and the processes that it starts do."""
    environments: list[dict[str, str]] = []

    def started(command: Any, env: dict[str, str], **_: Any) -> Any:
        environments.append(env)
        return types.SimpleNamespace(wait=lambda: None, returncode=0)

    def elastic(_: Any) -> None:
        environments.append(dict(os.environ))

    before = dict(os.environ)
    try:
        with (
            mock.patch("subprocess.Popen", started),
            mock.patch("torch.distributed.run.run", elastic),
            # It asks for GPUs, which are not looked for here.
            mock.patch("toolkit.recipes._check_before_launch"),
        ):
            command("train", "pretrain.yaml", "--accelerate_config", "other/accelerate.yaml")
    finally:
        os.environ.clear()
        os.environ.update(before)
    for env in environments:
        asked, _ = accelerate_yaml.translate_environment(env)
        config.parse(PretrainConfig, ["--config", "pretrain.yaml"], defaults=asked)


def estimate() -> None:
    """Read the figures of a device, and what was measured of it."""
    device = device_of("other/device.yaml")
    plan_run(settings("pretrain"), 1, device).text()


def convert_yaml() -> None:
    command("convert-config", "other/axolotl_gpt_oss_20b_lora.yaml")


def convert_script() -> None:
    command("convert-config", "other/trainer_alpaca_lora.py")


def load() -> str:
    """Load the model as a run does at its start."""
    return digest(_loaded()[0].state_dict())


def answer() -> None:
    """Answer a prompt with a loaded model, as `train.eval_prompts` asks for."""
    model, model_cfg = _loaded()
    generate(model, load_tokenizer(model_cfg), ["Say."], 2)


def _loaded() -> tuple[Any, Any]:
    cfg = settings("finetune")
    models.check_usable(cfg.model, cfg.data.sequence_length, "cpu")
    model_cfg = use_model_tokenizer(model_settings(cfg))
    model = models.prepare(model_cfg)
    loading.check_weights_fit(model, cfg.model)
    loading.load_pretrained(model, Path("model"), "cpu")
    return model, model_cfg


def verify_model() -> None:
    """Look at a model's folder as at an export that has no manifest, which is a finding."""
    with contextlib.suppress(Refused):
        command("verify", "model")


def learn(**data: Any) -> None:
    """Read and encode examples, and show them as `toolkit inspect --data` does."""
    render_report(inspect_data(reading("finetune", **data)))


def documents(**data: Any) -> Any:
    """Read, encode and pack text to pretrain on, up to the first step; return the data."""
    cfg = reading("pretrain", **data)
    model_cfg = prepare_tokenizer(cfg.model, cfg.data, Path("tokenizer"))
    found = prepare_data(cfg, models.prepare(model_cfg), model_cfg, ONE_PROCESS, ONE_RANK)
    next(found.steps())
    return found


def of_file(name: str) -> tuple[Reader, ...]:
    """Return the readers of a file of rows, whole and as a stream, by what is in it."""
    files = {"train_files": [f"data/{name}"]}
    stream = files | {"streaming": True, "on_bad_row": "skip"}
    is_text = name.startswith(("ids", "text"))
    readers = (learn, documents) if is_text else (learn,)
    return tuple(
        functools.partial(reader, **data) for data in (files, stream) for reader in readers
    )


@functools.cache
def data_of_the_run() -> Any:
    return documents()


def resume() -> str | None:
    """Go on with a run; return what tells its state, None where it has no checkpoint left."""
    model = build_on_meta(use_model_tokenizer(model_settings(settings("pretrain"))))
    data = copy.copy(data_of_the_run())
    data.feed = copy.copy(data.feed)
    data.feed.position = copy.deepcopy(data.feed.position)
    return _resumed(model, "run", data)


def resume_adapters() -> str | None:
    cfg = settings("finetune")
    model = build_on_meta(use_model_tokenizer(model_settings(cfg)))
    return _resumed(adapters.prepare_adapters(model, cfg.adapters, "float32"), "lora")


def _resumed(model: Any, run: str, data: Any = None) -> str | None:
    cfg = settings("pretrain")
    saved = find_resumable(run, model, data)
    loading.load_or_init(sharded_of(model), cfg.model, "cpu", cfg.seed, empty=saved is not None)
    optimizer = build_optimizer(model, cfg.optim)
    schedule = build_scheduler(optimizer, cfg.optim, 3)
    state = TrainState(model, optimizer, schedule, data.position if data else None)
    restore(state, saved)
    if saved is None:
        return None
    values = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for number, held in enumerate(optimizer.state.values()):
        values |= {f"{number}.{name}": value for name, value in held.items()}
    return f"{state.step} {schedule.get_last_lr()} {digest(values)}"


def inspect_run() -> None:
    command("inspect", "run", "--json")
    command("inspect", "run")


def verify_run() -> None:
    command("verify", "run")


def verify_both() -> None:
    command("verify", "run", "export")


def consolidate_run() -> list[str]:
    """Export a run; return the hashes of its weights."""
    return _exported("run")


def inspect_plain() -> None:
    command("inspect", "plain")


def consolidate_plain() -> list[str]:
    return _exported("plain", "--hf_assets", "model")


def _exported(source: str, *options: str) -> list[str]:
    shutil.rmtree("out", ignore_errors=True)
    command("consolidate", source, "--output", "out", *options)
    files = sorted(Path("out").glob("*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def inspect_adapters() -> None:
    command("inspect", "lora")


def consolidate_adapters() -> list[str]:
    return _exported("lora")


def merge() -> list[str]:
    return _exported("lora", "--merge")


def verify_export() -> None:
    command("verify", "export")


def publish_export() -> None:
    read_export(Path("export"), "me/it", None)


def verify_adapter() -> None:
    command("verify", "adapter")


def verify_adapters() -> None:
    command("verify", "lora", "adapter")


def publish_adapter() -> None:
    """Read what would be published: the base is named by a path, which is refused."""
    with contextlib.suppress(ExportError):
        read_export(Path("adapter"), "me/it", None)


def read_adapter() -> None:
    """Load an adapter as PEFT does, which its readers do."""
    load_with_peft(model_on_meta(Path("model")), Path("adapter"), empty=True)


def report() -> None:
    command("report", "run")


def calibrate() -> None:
    """Compare what a run has measured with its plan, which is far from a CPU's."""
    with contextlib.suppress(PlanningError, ConfigError):
        calibrate_by_run(Path("run"), settings("pretrain"))


def claim() -> None:
    """Start on a folder that holds a run."""
    claim_folder(settings("pretrain"))


def cut() -> None:
    """Drop what was logged after a step, as a resumed run does."""
    for name in (METRICS, STARTS, SAMPLES):
        drop_lines_after(Path("run", name), 2)
