"""Complete runs with divided experts log the metrics of runs without, and resume without."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, accelerate, free_port, run_recipe, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from test_context_parallel import assert_same_metrics
from tiny_models import tiny_model

from toolkit.formats.metrics_file import read_metrics
from toolkit.rehearsal.rehearse import rehearse


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by kind, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("mixtral", "qwen3_moe", "deepseek_v3"):
        tiny_model(kind, vocab_size=300).save_pretrained(root / kind)
        save_byte_tokenizer(root / kind)
    return {folder.name: folder for folder in root.iterdir()}


def settings(model: Path, data: Path, output: Path, *more: object) -> list[str]:
    return [
        *("--model.name_or_path", str(model), "--output_dir", str(output)),
        *("--data.train_files", str(data), "--data.sequence_length", "48"),
        *("--sharding.param_dtype", "float32", "--optim.learning_rate", "1e-2"),
        *("--optim.warmup_steps", "0", "--train.global_batch_size", "4"),
        *("--train.per_device_train_batch_size", "1", "--train.logging_steps", "1"),
        *("--train.eval_steps", "2", "--data.eval_split", "0.1", "--train.max_steps", "4"),
        *map(str, more),
    ]


DIVIDED = ("--sharding.expert_parallel", 2)


def run(recipe: str, world: int, flags: list[str]) -> str:
    result = run_recipe_ranks(recipe, world, *flags, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3_moe", ("--train.router_aux_loss", "layer")),
        pytest.param(
            "qwen3_moe",
            ("--train.router_aux_loss", "pooled", "--optim.optim", "adafactor"),
            marks=pytest.mark.long,
        ),
        ("deepseek_v3", ("--train.router_bias_update_rate", 0.01)),
        pytest.param(
            "mixtral", ("--sharding.activation_checkpointing", "full"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_pretraining_logs_the_same_metrics(tmp_path, folders, text_file, kind, more):
    """With balancing of experts by a loss and by a bias, whose final values are equal, too."""
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    run("pretrain", 2, settings(folders[kind], text_file, alone, *more))
    log = run("pretrain", 2, settings(folders[kind], text_file, divided, *more, *DIVIDED))
    assert "divided among 2 ranks, to which tokens are sent (sharding.expert_parallel)" in log
    assert_same_metrics(divided, alone)
    lines, expected_lines = read_metrics(divided), read_metrics(alone)
    loads = [
        {n: line[n] for n in line if n.startswith(("router_load", "router_aux"))}
        for line in (*lines, *expected_lines)
    ]
    assert loads[0]
    for load, expected in zip(loads, loads[len(lines) :], strict=False):
        assert load == pytest.approx(expected, rel=5e-5)


@pytest.mark.slow
def test_accelerate_launch_logs_the_same_metrics(tmp_path, folders, text_file):
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    run_recipe(accelerate(2, free_port()), *settings(folders["mixtral"], text_file, alone))
    flags = settings(folders["mixtral"], text_file, divided, *DIVIDED)
    run_recipe(accelerate(2, free_port()), *flags)
    assert_same_metrics(divided, alone)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Path]:
    """Prompts and completions, and pairs of answers, of unequal lengths."""
    folder = tmp_path_factory.mktemp("rows")
    files: dict[str, Path] = {}
    for name in ("examples", "pairs"):
        lines = []
        for i in range(1, 100):
            answers = (" ".join(map(str, range(1 + (i * k) % 7))) for k in (1, 3))
            row = dict(zip(("completion", "rejected"), answers, strict=True))
            row["chosen"] = row["completion"]
            names = ("completion",) if name == "examples" else ("chosen", "rejected")
            lines.append(json.dumps({"prompt": f"To {i}: ", **{n: row[n] for n in names}}))
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("\n".join(lines) + "\n")
    return files


LONG_RUNS = ("in full, packed", "DPO", "a dense teacher")
ATTENTION = ("--lora.r", 4, "--lora.target_modules", "[q_proj, v_proj]")
RUNS: dict[str, tuple[str, str, tuple]] = {
    "LoRA": ("finetune", "examples", (*ATTENTION, "--train.eval_prompts", '["To 3"]')),
    "in full, packed": ("finetune", "examples", ("--data.packing", "bfd")),
    "DPO": ("prefer", "pairs", ("--optim.learning_rate", 1e-3)),
    "DPO with adapters": ("prefer", "pairs", ATTENTION),
    "a dense teacher": ("distill", "examples", ("--teacher.name_or_path", "TEACHER")),
    "a teacher with experts": ("distill", "examples", ("--teacher.name_or_path", "OTHER")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG_RUNS else []) for n in RUNS]
)
def test_other_kinds_of_runs_log_the_same_metrics(tmp_path, folders, tiny_llama, rows, name):
    recipe, data, more = RUNS[name]
    teachers = {"TEACHER": str(tiny_llama), "OTHER": str(folders["mixtral"])}
    more = tuple(teachers.get(str(word), word) for word in more)
    model = folders["qwen3_moe"]
    if recipe == "distill":
        model = save_byte_tokenizer(
            save_tiny_model(tmp_path / "student", "qwen3_moe", vocab_size=vocabulary(tiny_llama))
        )
    alone, divided = tmp_path / "alone", tmp_path / "divided"
    run(recipe, 2, settings(model, rows[data], alone, *more))
    run(recipe, 2, settings(model, rows[data], divided, *more, *DIVIDED))
    assert_same_metrics(divided, alone)
    if name == "LoRA":
        answers = [(folder / "samples.jsonl").read_text() for folder in (alone, divided)]
        assert answers[0] == answers[1]


def vocabulary(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]


@pytest.mark.slow
def test_a_run_is_killed_and_goes_on_with_experts_on_other_ranks(tmp_path, folders, text_file):
    def train(name: str, world: int, parts: int, steps: int) -> list[float]:
        more = ("--optim.lr_scheduler_type", "constant", "--checkpoint.save_steps", 2)
        more = (*more, "--sharding.expert_parallel", parts, "--train.max_steps", steps)
        run("pretrain", world, settings(folders["mixtral"], text_file, tmp_path / name, *more))
        return [line["loss"] for line in read_metrics(tmp_path / name)]

    expected = train("uninterrupted", 1, 1, 4)
    for first, second in ((2, 1), (1, 2)):
        train(f"from {first}", 2, first, 2)
        assert train(f"from {first}", 2, second, 4) == pytest.approx(expected, rel=5e-5)


@pytest.mark.slow
def test_a_run_refuses_adapters_on_experts(tmp_path, folders, rows):
    """PEFT's `all-linear` includes the experts of this type."""
    flags = settings(folders["qwen3_moe"], rows["examples"], tmp_path / "run", *DIVIDED)
    result = run_recipe_ranks("finetune", 2, *flags, "--lora.r", "4", cwd=ROOT)
    assert result.returncode != 0
    assert (
        "has adapters, is trained in full together with adapters, or is in 4 bits" in result.stderr
    )


@pytest.mark.slow
def test_a_run_refuses_a_dense_model(tmp_path, tiny_llama, text_file):
    flags = settings(tiny_llama, text_file, tmp_path / "run", *DIVIDED)
    result = run_recipe_ranks("pretrain", 2, *flags, cwd=ROOT)
    assert result.returncode != 0
    assert "sharding.expert_parallel 2 is not possible for LlamaForCausalLM" in result.stderr


@pytest.mark.plans
def test_a_rehearsal_divides_experts_and_resumes_without(tmp_path, folders, text_file):
    config = tmp_path / "config.yaml"
    content = {
        "model": {"name_or_path": str(folders["mixtral"])},
        "data": {"train_files": str(text_file), "sequence_length": 64},
        "sharding": {"expert_parallel": 4, "dp_replicate": 1, "dp_shard": 4},
        "train": {"max_steps": 4, "per_device_train_batch_size": 2},
        "output_dir": str(tmp_path / "run"),
    }
    config.write_text(yaml.safe_dump(content))
    result = rehearse(config)
    assert result.ok, result
    assert result.changed["sharding.expert_parallel"] == (4, 2)
