"""`model.experts_implementation`: the kernels of fused experts compute the same, and the start says
which one runs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_byte_tokenizer
from distributed import run_recipe_ranks
from sharded import relative_difference
from tiny_models import rows, save, tiny_model

from toolkit.config import ModelConfig, PretrainConfig, parse
from toolkit.errors import ConfigError, ModelError
from toolkit.loading import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.experts import describe_experts, expert_modules

KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds = (*KINDS, "llama")
    return {kind: str(save(tiny_model(kind), root / kind, kind)) for kind in kinds}


def logits_and_gradients(folder: str, kernel: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model: Any = build_on_meta(ModelConfig(folder, experts_implementation=kernel))
    load_pretrained(model, folder, "cpu")
    output = model(input_ids=rows(2)["input_ids"]).logits
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.square().mean(), trained, allow_unused=True)
    return output.detach(), [g for g in gradients if g is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_all_kernels_compute_the_same(kind, folders):
    expected, expected_gradients = logits_and_gradients(folders[kind], "eager")
    for kernel in ("auto", "grouped_mm", "batched_mm"):
        logits, gradients = logits_and_gradients(folders[kind], kernel)
        assert relative_difference([logits], [expected]) < 1e-5, kernel
        assert len(gradients) == len(expected_gradients)
        assert relative_difference(gradients, expected_gradients) < 1e-5, kernel


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_one_that_is_named(kind, folders):
    for kernel in ("eager", "grouped_mm", "batched_mm"):
        model = build_on_meta(ModelConfig(folders[kind], experts_implementation=kernel))
        modules = expert_modules(model)
        assert modules
        assert {m.config._experts_implementation for m in modules.values()} == {kernel}
        line = describe_experts(model, kernel)
        assert line.startswith(
            f"experts    {len(modules)} layers of fused experts, kernel {kernel}"
        )
    model = build_on_meta(ModelConfig(folders[kind]))
    assert describe_experts(model, "auto").endswith("kernel grouped_mm (as transformers chooses)")


def test_a_kernel_is_refused_without_experts(folders):
    for kernel in ("eager", "grouped_mm"):
        with pytest.raises(ModelError, match=f"{kernel} has no effect: LlamaForCausalLM has no"):
            build_on_meta(ModelConfig(folders["llama"], experts_implementation=kernel))
    model = build_on_meta(ModelConfig(folders["llama"]))
    assert describe_experts(model, "auto") == ""


def test_a_kernel_that_the_model_cannot_use_is_refused(folders, monkeypatch):
    from transformers import MixtralForCausalLM

    def cannot_dispatch(self: Any) -> bool:
        raise ImportError("no grouped product here")

    monkeypatch.setattr(MixtralForCausalLM, "_grouped_mm_can_dispatch", cannot_dispatch)
    with pytest.raises(ModelError, match="ImportError: no grouped product here"):
        build_on_meta(ModelConfig(folders["mixtral"], experts_implementation="grouped_mm"))
    model = build_on_meta(ModelConfig(folders["mixtral"]))
    assert "kernel eager (as transformers chooses)" in describe_experts(model, "auto")
    monkeypatch.setattr(MixtralForCausalLM, "_can_set_experts_implementation", lambda _: False)
    with pytest.raises(ModelError, match="its experts still use eager"):
        build_on_meta(ModelConfig(folders["mixtral"], experts_implementation="batched_mm"))


def test_unknown_kernels_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"model\.experts_implementation"):
        parse(PretrainConfig, ["--model.experts_implementation", "fused"])


def test_the_start_says_which_kernel_runs(tmp_path: Path) -> None:
    save(tiny_model("qwen3_moe", vocab_size=300), tmp_path / "model", "qwen3_moe")
    save_byte_tokenizer(tmp_path / "model")
    (tmp_path / "data.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    flags = {
        "model.name_or_path": "model",
        "model.experts_implementation": "eager",
        "data.train_files": "data.txt",
        "data.sequence_length": 32,
        "train.max_steps": 1,
        "output_dir": "run",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = run_recipe_ranks("pretrain", 1, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kernel eager (model.experts_implementation)" in done.stdout
