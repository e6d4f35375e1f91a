"""Distillation: its loss and gradients, the vocabulary of the teacher, and runs of the recipe."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks, run_toolkit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import cli
from toolkit.config import DistillConfig, load, parse
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.errors import CheckpointError, ConfigError, ModelError
from toolkit.formats.metrics_file import read_metrics
from toolkit.objectives import Distillation, build
from toolkit.objectives.distillation import compare_vocabularies
from toolkit.recipes import load_config
from toolkit.training.distillation import distillation_loss, run_teacher
from toolkit.training.head_divergence import (
    Divergence,
    HeadDivergence,
    TeacherHead,
    TopLogps,
    divergence_and_grad,
)
from toolkit.training.head_loss import LogitMap

VOCABULARY = 40


def plain_loss(
    logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, d: Divergence
) -> torch.Tensor:
    """The loss as its definition reads, from all logits; differentiable by autograd."""
    logps, logits_p = (x.double() / d.temperature for x in (logits, teacher))
    log_q, log_p = logps.log_softmax(-1), logits_p.log_softmax(-1)
    if d.top_k is not None:
        ids = log_p.topk(d.top_k, -1).indices
        mask = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, ids, True)

        def events(x: torch.Tensor) -> torch.Tensor:
            others = x.masked_fill(mask, -torch.inf).logsumexp(-1, keepdim=True)
            known = x.gather(-1, ids)
            return known if d.top_k == x.shape[-1] else torch.cat([known, others], -1)

        log_q, log_p = events(log_q), events(log_p)
    first, second = (log_q, log_p) if d.is_reverse else (log_p, log_q)
    kl = (first.exp() * (first - second)).sum(-1)
    cross_entropy = F.cross_entropy(
        logits.double().flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    kl = torch.where(targets.flatten() == IGNORED, 0.0, kl.flatten())
    return ((1 - d.kl_weight) * cross_entropy + d.kl_weight * d.temperature**2 * kl).sum()


CASES = [
    Divergence(temperature, kl_weight, is_reverse, top_k)
    for temperature, kl_weight in ((1.0, 1.0), (2.0, 0.3))
    for is_reverse in (False, True)
    for top_k in (None, 1, 5, VOCABULARY)
]


@pytest.mark.parametrize("d", CASES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_gradient_is_that_of_autograd(d: Divergence, spread: float) -> None:
    torch.manual_seed(0)
    logits = (spread * torch.randn(7, VOCABULARY, dtype=torch.float64)).requires_grad_()
    teacher = spread * torch.randn(7, VOCABULARY, dtype=torch.float64)
    alone = dataclasses.replace(d, kl_weight=1.0)
    expected = plain_loss(logits, teacher, torch.zeros(7, dtype=torch.int64), alone)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    log_q, log_p = ((x.detach() / d.temperature).log_softmax(-1) for x in (logits, teacher))
    known = log_p if d.top_k is None else TopLogps.of(log_p, d.top_k)
    kl, grad = divergence_and_grad(log_q, known, d.is_reverse, True)
    scale = d.temperature**2
    torch.testing.assert_close(kl.sum() * scale, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad * scale / d.temperature, expected_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("d", [case for case in CASES if case.kl_weight < 1], ids=str)
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(1.5, 3.0)], ids=str)
def test_the_gradient_of_the_mix_is_that_of_autograd(d: Divergence, logit_map: LogitMap) -> None:
    torch.manual_seed(0)
    z = torch.randn(7, VOCABULARY, dtype=torch.float64).requires_grad_()
    # The teacher's head has more rows; they are not compared.
    teacher = 3 * torch.randn(7, VOCABULARY + 8, dtype=torch.float64)
    targets = torch.tensor([3, IGNORED, 0, 39, IGNORED, 7, 7])
    mapped = z * 1.0 if logit_map.cap is None else 3.0 * torch.tanh(z * 1.5 / 3.0)
    expected = plain_loss(mapped, teacher[:, :VOCABULARY], targets, d)
    (expected_grad,) = torch.autograd.grad(expected, z)
    source = TeacherHead(teacher, lambda x: x, VOCABULARY + 8, LogitMap(), d)
    task = HeadDivergence(
        nn.Identity(), lambda x: x, VOCABULARY, logit_map, teacher=source, divergence=d
    )
    loss, grad = task.loss_and_logit_grad(z.detach(), targets, slice(0, 7), True)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-9)


def test_top_k_of_the_vocabulary_is_the_full_divergence() -> None:
    log_q, log_p = torch.randn(2, 9, VOCABULARY).log_softmax(-1)
    for is_reverse in (False, True):
        full = divergence_and_grad(log_q, log_p, is_reverse, True)
        known = TopLogps.of(log_p, VOCABULARY)
        cut = divergence_and_grad(log_q, known, is_reverse, True)
        for a, b in zip(full, cut, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and teachers of the same vocabulary."""
    root = tmp_path_factory.mktemp("distill")
    for name, kind, options in (
        ("model", "llama", {}),
        ("teacher", "llama", {"seed": 1, "num_hidden_layers": 4}),
        ("tied", "gemma2", {"seed": 2, "final_logit_softcapping": 2.0}),
    ):
        save_byte_tokenizer(root / name)
        save_tiny_model(root / name, kind, **options)
        # Random weights make nearly equal logits, from which a model has nothing to learn.
        model = AutoModelForCausalLM.from_pretrained(root / name)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
        model.save_pretrained(root / name)
    return root


def small_batch(vocabulary: int) -> Batch:
    torch.manual_seed(3)
    ids = torch.randint(0, vocabulary, (2, 12))
    labels = ids.clone()
    labels[0, :5] = IGNORED
    labels[1, 9:] = IGNORED
    return Batch.of(labels, count=True, input_ids=ids)


@pytest.mark.parametrize("names", [("model", "teacher"), ("tied", "model"), ("model", "tied")])
@pytest.mark.parametrize(
    "d",
    [Divergence(), Divergence(2.0, 0.7, True), Divergence(1.5, 1.0, False, 4)],
    ids=str,
)
def test_the_loss_in_the_head_is_that_of_all_logits(
    models: Path, names: tuple[str, str], d: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.training.head_loss._CHUNK_ELEMENTS", {"cpu": 2**13})
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).train()
        for name in names
    )
    teacher.eval().requires_grad_(False)
    batch = small_batch(model.config.vocab_size)
    loss = distillation_loss(model, run_teacher(teacher, batch, d), batch, d, accuracy=True)
    loss.total.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logits, teacher_logits = (m(**batch.inputs).logits for m in (model, teacher))
    expected = plain_loss(logits, teacher_logits, batch.targets, d)
    expected.backward()
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-5)
    valid = batch.targets != IGNORED
    agree = (logits.argmax(-1) == teacher_logits.argmax(-1)) & valid
    assert int(loss.parts["agreement"]) == int(agree.sum())
    assert int(loss.parts["accuracy"]) == int((logits.argmax(-1) == batch.targets).sum())


def test_a_model_that_changes_its_logits_is_distilled_from_all_of_them(
    models: Path, capsys: pytest.CaptureFixture
) -> None:
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(models / "model", dtype=torch.float32)
        for _ in range(2)
    )
    for changed in (model, teacher):
        changed.lm_head.register_forward_hook(lambda _, args, out: out + out.flip(-1))
    batch, d = small_batch(model.config.vocab_size), Divergence(kl_weight=1.0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01 * torch.randn_like(model.lm_head.weight))
    loss = distillation_loss(model, run_teacher(teacher, batch, d), batch, d)
    expected = plain_loss(*(m(**batch.inputs).logits for m in (model, teacher)), batch.targets, d)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-3)


# ---- The vocabulary


def test_a_teacher_with_another_token_is_refused(models: Path) -> None:
    tokenizer, teacher = (AutoTokenizer.from_pretrained(models / n) for n in ("model", "teacher"))
    sizes, names = (len(tokenizer), len(tokenizer)), ("model", "teacher")
    assert compare_vocabularies(tokenizer, teacher, sizes, names) == ""
    padded = compare_vocabularies(tokenizer, teacher, (sizes[0], sizes[0] + 128), names)
    assert f"the divergence covers the first {sizes[0]:,}" in padded
    teacher.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    first = len(tokenizer)
    with pytest.raises(ModelError, match=rf"token id {first} is no token of model and '<\|other"):
        compare_vocabularies(tokenizer, teacher, sizes, names)
    with pytest.raises(ModelError, match=f"token id {first - 1}, but the embeddings"):
        compare_vocabularies(tokenizer, tokenizer, (first - 1, first), names)
    with pytest.raises(ModelError, match="no two tokenizers to compare"):
        compare_vocabularies(None, teacher, (first, first + 1), names)


# ---- Settings


def test_settings_without_effect_are_refused() -> None:
    flags = ["--model.name_or_path", "m", "--teacher.name_or_path", "t"]
    assert parse(DistillConfig, flags).frozen_models["teacher"].name_or_path == "t"
    with pytest.raises(ConfigError, match=r"set teacher\.name_or_path"):
        _ = parse(DistillConfig, flags[:2]).frozen_models
    for name, value in (
        ("distill.kl_weight", "0"),
        ("distill.kl_weight", "1.5"),
        ("distill.temperature", "0"),
        ("distill.top_k", "0"),
        ("distill.stored", "true"),
        ("train.z_loss", "0.1"),
        ("train.label_smoothing_factor", "0.1"),
        ("teacher.kernels", "liger"),
        ("teacher.resize_embeddings", "64"),
        ("teacher.init", "random"),
    ):
        with pytest.raises(ConfigError, match=re.escape(name)):
            parse(DistillConfig, [*flags, f"--{name}", value])


# ---- Runs


@pytest.fixture
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the models, rows and a config."""
    monkeypatch.chdir(tmp_path)
    for source in models.iterdir():
        Path(source.name).symlink_to(source)
    rows = [{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}, I think."} for i in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_config()
    return tmp_path


def write_config(**sections: dict) -> None:
    content: dict = {
        "model": {"name_or_path": "model"},
        "teacher": {"name_or_path": "teacher"},
        "distill": {"kl_weight": 0.8, "temperature": 2.0},
        "sharding": {"param_dtype": "float32"},
        "data": {"train_files": "rows.jsonl", "sequence_length": 64, "eval_split": 0.1},
        "optim": {"learning_rate": 1e-3},
        "train": {
            "max_steps": 6,
            "global_batch_size": 4,
            "per_device_train_batch_size": 1,
            "logging_steps": 1,
            "eval_steps": 3,
        },
        "checkpoint": {"save_steps": 3},
        "output_dir": "run",
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    Path("run.yaml").write_text(json.dumps(content))  # which is YAML


def distill(world_size: int, output: str, *flags: str) -> list[dict]:
    flags = ("--config", "run.yaml", "--output_dir", output, *flags)
    done = run_recipe_ranks("distill", world_size, *flags, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(Path(output))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_two_and_three_ranks_are_one(folder: Path, packing: str) -> None:
    write_config(train={"global_batch_size": 6}, data={"packing": packing})
    one = distill(1, "one")
    for world in (2, 3) if packing == "bfd" else (3,):
        for a, b in zip(one, distill(world, f"ranks-{world}"), strict=True):
            for name in ("loss", "kl", "cross_entropy", "agreement", "grad_norm"):
                assert b[name] == pytest.approx(a[name], rel=1e-4), (world, name)
            for name in ("eval_loss", "eval_perplexity", "eval_kl", "eval_agreement"):
                assert (name in a) == (name in b) == (a["step"] % 3 == 0)
                assert b.get(name, 0) == pytest.approx(a.get(name, 0), rel=1e-4), (world, name)
    first, last = one[0], one[-1]
    assert last["kl"] < first["kl"]
    assert first["loss"] == pytest.approx(
        0.2 * first["cross_entropy"] + 0.8 * 4 * first["kl"], rel=1e-4
    )


@pytest.mark.slow
def test_packed_rows_are_padded_ones(folder: Path) -> None:
    """Both evaluate the same tokens of a model that does not change."""
    write_config(optim={"learning_rate": 1e-12}, train={"max_steps": 1, "eval_steps": 1})
    packed, padded = (distill(2, p, "--data.packing", p)[-1] for p in ("bfd", "none"))
    for metric in ("eval_loss", "eval_kl", "eval_agreement"):
        assert packed[metric] == pytest.approx(padded[metric], rel=1e-5), metric
    assert packed["eval_kl"] > 0.01


@pytest.mark.slow
def test_a_model_that_imitates_itself_has_nothing_to_learn(folder: Path) -> None:
    write_config(distill={"kl_weight": 1.0, "top_k": 8, "divergence": "reverse_kl"})
    lora = ("--lora.r", "4", "--data.packing", "none", "--teacher.name_or_path", "model")
    (first, *_) = distill(2, "same", *lora)
    assert first["loss"] == pytest.approx(0, abs=1e-4)
    assert first["agreement"] == 1


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_before_any_process_starts(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    save_tiny_model(Path("other"))
    save_byte_tokenizer(Path("other"))
    file = Path("other/tokenizer.json")
    content = json.loads(file.read_text())
    tokens = content["model"]["vocab"]
    ids = {index: token for token, index in tokens.items()}
    tokens[ids[30]], tokens[ids[31]] = 31, 30
    file.write_text(json.dumps(content))
    done = run_toolkit("distill", "run.yaml", "--teacher.name_or_path", "other", cwd=Path.cwd())
    assert done.returncode != 0
    (line,) = [x for x in done.stderr.splitlines() if "error" in x]
    assert f"token id 30 is {ids[30]!r} of model and {ids[31]!r} of the teacher other" in line
    assert "of the same family" in line
    assert not Path("run").exists()


@pytest.mark.slow
def test_plan_rehearsal_report_and_export_know_the_teacher(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    parameters = {}
    for name in ("model", "teacher"):
        flags = ["--world_size", "2", "--json", "--teacher.name_or_path", name]
        assert cli.main(["plan", "run.yaml", *flags]) == 0
        parameters[name] = json.loads(capsys.readouterr().out)["exact"]["last_rank"]["parameters"]
    values = {
        name: sum(x.numel() for x in load_file(f"{name}/model.safetensors").values())
        for name in parameters
    }
    # Each rank holds a half of the float32 values of both models.
    difference = parameters["teacher"] - parameters["model"]
    assert difference == pytest.approx(2 * (values["teacher"] - values["model"]), rel=0.02)
    assert parameters["model"] == pytest.approx(2 * 2 * values["model"], rel=0.02)

    result = run_toolkit("rehearse", "run.yaml", "--json", cwd=Path.cwd())
    assert result.returncode == 0, result.stdout + result.stderr
    rehearsed = json.loads(result.stdout)
    assert {"kill", "resume", "verify"} <= {s["stage"] for s in rehearsed["stages"] if s["ok"]}
    assert "teacher.name_or_path" in rehearsed["changed"]

    # The rehearsal has killed and resumed a run. A resume with another teacher is refused.
    best = ("--checkpoint.keep_best", "1", "--checkpoint.metric_for_best_model", "eval_kl")
    distill(1, "run", *best)
    flags = ("--config", "run.yaml", "--teacher.name_or_path", "tied")
    refused = run_recipe_ranks("distill", 1, *flags, cwd=Path.cwd())
    assert "teacher.name_or_path was 'teacher', is 'tied'" in refused.stderr

    for words in (("consolidate", "run", "--output", "export"), ("verify", "run", "export")):
        assert cli.main([*words]) == 0, capsys.readouterr()
    assert not [k for k in load_file("export/model.safetensors") if "teacher" in k]
    assert cli.main(["report", "run"]) == 0
    page = Path("run/report.html").read_text("utf-8")
    assert "distill, teacher teacher, divergence forward_kl, temperature 2.0, kl_weight 0.8" in page
    assert "Agreement with the teacher" in page
    assert "settings that this version does not know" not in page


def test_a_live_teacher_with_other_weights_is_refused_on_resume(
    folder: Path, tmp_path: Path
) -> None:
    cfg = load(DistillConfig, "run.yaml")
    begun, nothing = build(cfg), cast(Any, None)
    begun.restore(nothing, nothing, nothing, None)
    for name, file in begun.files.items():
        (tmp_path / name).write_bytes(file.content)
    resumed = build(cfg)
    resumed.restore(nothing, nothing, nothing, tmp_path)
    assert resumed.files == begun.files
    # Another folder with the same name, in which one value differs.
    teacher = Path("teacher").resolve()
    Path("teacher").unlink()
    shutil.copytree(teacher, "teacher")
    tensors = load_file("teacher/model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, "teacher/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="expected the teacher that the run began with"):
        build(cfg).restore(nothing, nothing, nothing, tmp_path)


def test_a_file_without_a_teacher_is_fine_tuning(folder: Path) -> None:
    assert load_config("run.yaml")[0].name == "distill"
    content = json.loads(Path("run.yaml").read_text())
    plain = {name: content[name] for name in ("model", "data", "sharding")}
    Path("plain.yaml").write_text(json.dumps(plain))
    assert load_config("plain.yaml")[0].name == "finetune"
    assert isinstance(build(load(DistillConfig, "run.yaml")), Distillation)
