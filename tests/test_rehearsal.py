"""`toolkit rehearse`: a run that would go well passes, and each of ten planted faults is found in
its stage. Faults lie in the config, the model's folder, the data, or a copy of the recipe.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
from conftest import ROOT, save_byte_tokenizer, save_tiny_model

from toolkit import cli
from toolkit.config import (
    DataConfig,
    MetricsConfig,
    PretrainConfig,
    ShardingConfig,
    find_differences,
)
from toolkit.config.settings import FinetuneConfig, ModelConfig, OptimConfig, TrainConfig
from toolkit.recipes import load_config
from toolkit.rehearsal import Result, launches, rehearse
from toolkit.rehearsal.preflight import count_processes
from toolkit.rehearsal.settings import (
    build_notes,
    list_not_rehearsed,
    plan_other_ranks,
    rehearsal_config,
)
from toolkit.rehearsal.shrunk import Shrunk, shrink
from toolkit.rehearsal.stages import STAGES
from toolkit.training import check_optimizer

CHAT = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
BASE = {
    "sharding": {"param_dtype": "float32"},
    "data": {"sequence_length": 64, "eval_split": 0.1},
    "train": {"max_steps": 40, "per_device_train_batch_size": 2},
    "checkpoint": {"save_steps": 10},
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A current folder with a tiny model, rows and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed rehearsal leaves
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model", attention_dropout=0.1)
    rows = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("text.txt").write_text("".join(f"Line {i} of a text.\n" for i in range(400)))
    return tmp_path


def config(**sections: object) -> Path:
    """Write a config of text.txt on the tiny model, with changes by section; return the file."""
    content = {section: dict(values) for section, values in BASE.items()}
    content["model"] = {"name_or_path": "model"}
    content["data"]["train_files"] = "text.txt"
    content["output_dir"] = "run"
    for section, values in sections.items():
        if isinstance(values, dict):
            content[section] = content.get(section, {}) | values
        else:
            content[section] = values
    file = Path("config.yaml")
    file.write_text(json.dumps(content))  # which is YAML
    return file


def refused(file: Path, stage: str, cause: str, **options: object) -> Result:
    """Rehearse; expect that `stage` fails and nothing before it, for `cause`."""
    lines: list[str] = []
    result = rehearse(file, show=lines.append, **options)
    assert result.failed is not None, lines
    assert result.failed.stage == stage, lines
    assert cause in result.failed.said
    assert result.failed.log is not None
    assert Path(result.failed.log).is_file()
    assert result.failed.advice == STAGES[stage]
    assert stage in result.text()
    assert result.folder in result.text()
    assert [s.stage for s in result.stages if s.ok is False] == [stage]
    return result


# ---- Faults that are found before any process is started


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ messages[0]['content'] }}", "assistant"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
    ids=["leaves the answers out", "raises"],
)
def test_1_a_template_without_supervision(folder, template, cause) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    refused(config(data={"train_files": "chat.jsonl", "chat_template": template}), "data", cause)


def test_2_a_type_that_cannot_shard(folder) -> None:
    """XLNet makes most of its parameters in float32, whatever dtype is asked for."""
    tiny_models.tiny_config("xlnet", vocab_size=300, n_layer=12).save_pretrained("model")
    file = config(
        model={"name_or_path": "model", "init": "random", "dtype": "bfloat16"},
        data={"packing": "none"},
    )
    refused(file, "sharding", "several storage dtypes")


def test_2_a_mesh_that_does_not_hold_together(folder) -> None:
    mesh = {"dp_replicate": 4, "dp_shard": 8, "reshard_after_forward": 3}
    refused(config(sharding=mesh), "sharding", "must divide the 8 rank(s)")


def test_3_a_read_only_output(folder) -> None:
    refused(config(output_dir="/proc/run"), "output", "/proc cannot be written to")


def test_3_an_output_of_another_run(folder) -> None:
    Path("run").mkdir()
    Path("run", "thesis.tex").write_text("")
    refused(config(output_dir="run"), "output", "files that are not a run's")
    assert os.listdir("run") == ["thesis.tex"]


def test_4_too_little_disk(folder) -> None:
    """A model whose checkpoints no disk holds; only its config is there."""
    content = json.loads(Path("model/config.json").read_text())
    content |= {"hidden_size": 2**17, "intermediate_size": 2**21, "num_hidden_layers": 40}
    Path("model/config.json").write_text(json.dumps(content | {"head_dim": 2**15}))
    refused(config(model={"name_or_path": "model", "init": "random"}), "disk", "does not fit")


@pytest.mark.parametrize(
    ("section", "setting", "value", "package"),
    [
        ("metrics", "report_to", "dvclive", "dvclive"),
        ("model", "attn_implementation", "flash_attention_3", "flash_attn_interface"),
        ("checkpoint", "root", "abfs://bucket/run", "adlfs"),
    ],
)
def test_5_a_missing_package(folder, section, setting, value, package) -> None:
    refused(config(**{section: {setting: value}} | _model(section)), "packages", package)


def _model(section: str) -> dict:
    flash = {"name_or_path": "model", "attn_implementation": "flash_attention_3"}
    return {"model": flash} if section == "model" else {}


def test_5_a_package_that_an_edited_recipe_imports(folder) -> None:
    edited("pretrain", "from pathlib import Path", "from pathlib import Path\nimport nowhere_x")
    refused(config(), "packages", "imports nowhere_x")


def test_6_a_tokenizer_larger_than_the_embedding(folder) -> None:
    save_byte_tokenizer(folder / "large", extra=100)
    model = {"name_or_path": "model", "tokenizer_name_or_path": "large"}
    refused(config(model=model), "model", "embedding has 300 rows")


@pytest.mark.parametrize("too_long", ["error", "drop", "truncate"])
def test_9_rows_too_long(folder, too_long) -> None:
    rows = [{"prompt": "a" * 40, "completion": "b" * (10 + 40 * (i > 5))} for i in range(20)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = config(data={"train_files": "long.jsonl", "too_long": too_long})
    cause = "long.jsonl line 7" if too_long == "error" else "14 of the first 20 rows"
    refused(file, "data", cause)


@pytest.mark.parametrize(
    ("hub", "cause"),
    [
        ({"push_to_hub": True, "hub_model_id": "me/a model"}, "is not one"),
        ({"push_to_hub": True, "hub_model_id": "alone"}, "is not ORG/NAME"),
        ({"hub_model_id": "--/x"}, "is not one"),
        ({"push_to_hub": True, "hub_model_id": "me/model"}, "no Hugging Face token"),
    ],
)
def test_10_a_hub_id_that_is_not_allowed(folder, hub, cause, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", "nowhere")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    refused(config(hub=hub), "hub", cause)


def test_what_belongs_to_this_machine_can_be_left_out(folder) -> None:
    """--skip: the next fault is found; those that do not depend on each other come together."""
    hub = {"push_to_hub": True, "hub_model_id": "alone"}
    file = config(hub=hub, metrics={"report_to": "dvclive"}, model={"name_or_path": "./x"})
    result = rehearse(file, skip=["packages", "hub"], show=lambda line: None)
    assert [s.stage for s in result.stages if s.ok is False] == ["model"]
    both = rehearse(file, show=lambda line: None)
    assert [s.stage for s in both.stages if s.ok is False] == ["packages", "hub"]


def test_json_and_exit_codes(folder, capsys) -> None:
    file = str(config(train={"max_steps": 40, "learning_rate": 1.0}))
    assert cli.main(["rehearse", "--config", file, "--json"]) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert (summary["ok"], summary["failed"]) == (False, "settings")
    assert err.startswith("toolkit: error: settings failed: unknown setting 'train.learning_rate'")
    for wrong in (["nowhere.yaml"], [file, "--skip", "train"], [file, "--world_size", "0"], []):
        assert cli.main(["rehearse", *wrong]) == 2
    assert cli.main(["rehearse", file, "--jsn"]) == 2


# ---- What is rehearsed


@pytest.mark.plans
def test_the_model_is_cut_to_few_narrow_layers_of_every_kind(tmp_path) -> None:
    """Gemma 3 as published: five windowed layers to one without; the vocabulary stays, in both."""
    from transformers import AutoConfig

    real = AutoConfig.for_model("gemma3_text", final_logit_softcapping=30.0)
    real.architectures = ["Gemma3ForCausalLM"]
    real.save_pretrained(tmp_path / "real")
    cfg = ModelConfig(str(tmp_path / "real"), init="random")
    shrunk = shrink(cfg, "bfloat16", tmp_path / "small")
    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert shrunk.layers == (6, real.num_hidden_layers)
    assert small.layer_types == real.layer_types[:6]
    same = ("vocab_size", "sliding_window", "final_logit_softcapping", "tie_word_embeddings")
    for name in (*same, "eos_token_id", "max_position_embeddings"):
        assert getattr(small, name) == getattr(real, name)
    assert small.hidden_size == 64


def test_settings_for_gpus_are_mapped_and_named() -> None:
    cfg = PretrainConfig(
        model=ModelConfig("real", attn_implementation="flash_attention_2", kernels="liger"),
        sharding=ShardingConfig(
            dp_replicate=4, dp_shard=8, cpu_offload=True, reshard_after_forward=4
        ),
        data=DataConfig(sequence_length=8192),
        metrics=MetricsConfig(report_to="dvclive"),  # not here: `--skip packages`
    )
    shrunk = Shrunk(Path("small"), 10**8, (2, 32), 1, "float32")
    files = ([Path("a.jsonl")], [])
    own = rehearsal_config(cfg, shrunk, SimpleNamespace(), 2, 64, files, Path("run"))
    ranks = count_processes(cfg.sharding, 2)
    assert ranks == 32
    lacking = list_not_rehearsed(cfg.sharding, ranks, 2)
    text = Result(changed=find_differences(cfg, own), not_rehearsed=lacking).text()
    for name, there, here in (
        ("model.attn_implementation", "flash_attention_2", "null"),
        ("model.kernels", "liger", "none"),
        ("sharding.dp_replicate", "4", "1"),
        ("sharding.dp_shard", "8", "-1"),
        ("sharding.reshard_after_forward", "4", "true"),
        ("sharding.param_dtype", "bfloat16", "float32"),
        ("sharding.torch_compile", "auto", "none"),
        ("data.sequence_length", "8192", "64"),
        ("metrics.report_to", "dvclive", "none"),
        ("data.train_files", "[]", '["a.jsonl"]'),
    ):
        assert [name, there, here] in [line.split() for line in text.splitlines()]
    for what in ("32 processes: 2 here", "NCCL", "between device and host"):
        assert what in text
    assert "seed" not in text, "it is the run's"
    assert len(list_not_rehearsed(ShardingConfig(), 2, 2)) == 2


@pytest.mark.parametrize(
    ("micro_batch", "repeats", "world", "other"),
    [
        *((2, 2, 2, (1, 2)), (1, 1, 4, (2, 1)), (2, 1, 3, (1, 2))),
        *((2, 1, 1, (2, 1)), (1, 2, 1, (2, 1)), (2, 2, 1, (2, 2)), (1, 1, 1, None)),
        *((2, 1, 5, (2, 1)), (1, 1, 5, (1, 1)), (1, 1, 9, (3, 1))),
    ],
)
def test_a_step_divides_over_other_ranks(micro_batch, repeats, world, other) -> None:
    train = TrainConfig(
        max_steps=1, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=repeats
    )
    assert plan_other_ranks(train, world) == other
    if other is not None:
        ranks, again = other
        assert micro_batch * repeats * world % (ranks * again) == 0


@pytest.mark.plans
@pytest.mark.parametrize("batch", [2, 1])
def test_a_step_of_one_micro_batch_on_one_rank(folder, batch) -> None:
    """On two ranks its micro-batch is half; of one sample there is no half, which is said."""
    file = config(train={"per_device_train_batch_size": batch})
    result = rehearse(file, world_size=1, show=print)
    assert result.ok, result.text()
    (stage,) = (s for s in result.stages if s.stage == "other ranks")
    said = {2: "steps 9 to 12 on 2 rank(s)", 1: "a step of one sample cannot be divided over two"}
    assert stage.ok is (True if batch == 2 else None)
    assert said[batch] in stage.said


def test_what_may_not_be_meant_is_noted() -> None:
    cfg = PretrainConfig(model=ModelConfig("model"), train=TrainConfig(max_steps=10, eval_steps=20))
    notes = build_notes(replace(cfg, optim=OptimConfig(warmup_steps=10)))
    assert [note.split()[0] for note in notes] == [
        *("checkpoint.save_steps", "train.eval_steps", "optim.warmup_steps")
    ]
    assert "notes:\n    checkpoint.save_steps 500" in Result(notes=notes).text()
    few = replace(cfg.checkpoint, save_steps=5)
    assert not build_notes(replace(cfg, checkpoint=few, train=replace(cfg.train, eval_steps=5)))


def test_a_schedule_is_cut_to_the_steps_of_a_rehearsal() -> None:
    optim = OptimConfig(
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=500,
        lr_scheduler_kwargs={"num_decay_steps": 1000, "min_lr_ratio": 0.1},
    )
    cfg = PretrainConfig(ModelConfig("real"), optim=optim)
    shrunk = Shrunk(Path("small"), 10**8, (2, 32), 1, "float32")
    files = ([Path("a.jsonl")], [])
    own = rehearsal_config(cfg, shrunk, SimpleNamespace(), 2, 64, files, Path("run"))
    check_optimizer(own.optim, own.train.max_steps)
    assert own.optim.warmup_steps == 2
    assert own.optim.lr_scheduler_kwargs == {"num_decay_steps": 2, "min_lr_ratio": 0.1}
    share = replace(cfg, optim=OptimConfig(warmup_steps=0.1))
    own = rehearsal_config(share, shrunk, SimpleNamespace(), 2, 64, files, Path("run"))
    assert own.optim == share.optim


def test_the_cause_and_its_stage_are_found_in_a_log() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/x/recipes/pretrain.py", line 51, in pretrain\n'
        "    loading.load_or_init(model, cfg.model)\n"
        '  File "/x/toolkit/loading/pretrained.py", line 1, in load_or_init\n    raise\n'
        "toolkit.errors.LoadingError: no such tensor\n"
    )
    assert launches.find_cause(log) == ("load", "LoadingError: no such tensor")
    assert launches.find_cause(f"error: give another\n{log}") == ("load", "give another")
    assert launches.find_cause("fine\n") == (None, None)
    assert {*launches._STAGE_OF_CALL.values()} <= {*STAGES}


# ---- Whole rehearsals


def edited(recipe: str, *changes: str) -> None:
    """Put a copy of a recipe, changed (old, new, ...), into the current folder, where it wins."""
    text = (ROOT / "recipes" / f"{recipe}.py").read_text()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    Path("recipes").mkdir()
    Path("recipes", f"{recipe}.py").write_text(text)


@pytest.mark.plans
def test_a_shipped_config_passes(tmp_path) -> None:
    """The command, on the config as it is shipped; nothing of it stays."""
    command = [sys.executable, "-m", "toolkit", "rehearse", "recipes/configs/pretrain_tiny.yaml"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    more = ["--json", "--output_dir", str(tmp_path / "run"), "--model.dtype", "float32"]
    done = subprocess.run(
        [*command, *more], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    ran = [stage["stage"] for stage in summary["stages"]]
    assert ran == list(STAGES)
    left_out = {stage["stage"] for stage in summary["stages"] if stage["ok"] is None}
    assert left_out == {"hub", "adapter"}
    assert not list(tmp_path.iterdir())


@pytest.mark.plans
def test_adapters_pass(folder) -> None:
    result = rehearse(config(data={"train_files": "rows.jsonl"}, lora={"r": 4}), show=print)
    assert result.ok, result.text()
    assert result.recipe == "finetune"
    adapter = next(s for s in result.stages if s.stage == "adapter")
    assert adapter.ok
    assert result.folder is None


@pytest.mark.plans
def test_7_a_resume_that_is_not_exact(folder) -> None:
    """A generator that the run neither seeds by its step nor saves."""
    edited(
        "pretrain",
        "DEMO = Path",
        "NOISE = __import__('random').Random(1)\nDEMO = Path",
        "update.mean(loss).backward()",
        "(update.mean(loss) * NOISE.uniform(0.9, 1.1)).backward()",
    )
    refused(config(), "resume", "differs from the run before the kill")


@pytest.mark.plans
def test_8_an_export_that_transformers_cannot_load(folder) -> None:
    """Training never looks at the generation config, which goes into the export as it is."""
    Path("model/generation_config.json").write_text('{"max_new_tokens": -5}')
    refused(config(), "reload", "max_new_tokens")


def test_finetune_is_recognised_by_its_rows(folder) -> None:
    """A config that both recipes would take; documents are for pretraining."""
    kind, cfg, note = load_config(config(data={"train_files": "rows.jsonl"}))
    assert (kind.name, type(cfg)) == ("finetune", FinetuneConfig)
    assert "fine-tuning, since its rows" in note
    kind, _, note = load_config(config(), ["--seed", "3"])
    assert kind.name == "pretrain"
    assert "add `kind: pretrain` to" in note
