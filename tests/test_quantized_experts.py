"""`lora.quantize_moe_experts`: experts in 4 bits compute what dequantised weights compute, to the
bit; they are sharded by whole experts, resumed, planned and exported; what cannot be is refused.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from bitsandbytes import functional
from conftest import slow
from distributed import run_ranks
from safetensors.torch import load_file
from sharded import apply_fsdp, init_mesh, train_step
from test_planning import _config, _every
from test_qlora import base_name, trained, whole, world_of_one
from torch import nn

from toolkit import checkpoint
from toolkit.adapters.coverage import coverage_lines
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import resuming
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig, OptimConfig, ShardingConfig
from toolkit.errors import CheckpointError, ConfigError, ModelError
from toolkit.export import consolidate
from toolkit.loading import check_weights_fit, load_pretrained
from toolkit.models import quantise
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.packed_experts import packed_expert_weights
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of, unwrapped_base
from toolkit.models.quantise import quantise_on_meta
from toolkit.planning.simulation import simulate, state_of
from toolkit.training.optim import build_optimizer

KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe")
FP32 = ShardingConfig(param_dtype="float32")
LORA = LoraConfig(r=4, load_in_4bit=True, quantize_moe_experts=True)
DOUBLE = dataclasses.replace(LORA, bnb_4bit_use_double_quant=True)
OPTIM = OptimConfig(learning_rate=2e-2, adam_epsilon=1e-4)
SAVING = CheckpointConfig()
STEPS = 3
WAYS = {
    "none": FP32,
    "recomputed": dataclasses.replace(FP32, activation_checkpointing="full"),
    "offloaded": dataclasses.replace(FP32, cpu_offload=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {kind: tiny_models.tiny_model(kind, hidden_size=64) for kind in KINDS}
    return {kind: str(tiny_models.save(m, root / kind, kind)) for kind, m in made.items()}


def build(folder: str, lora: LoraConfig = LORA, cfg: Any = FP32, world: int | None = None) -> Any:
    model: Any = build_on_meta(ModelConfig(folder))
    quantise_on_meta(model, lora, cfg.param_dtype)
    check_weights_fit(model, ModelConfig(folder))
    model = add_adapters(model, lora)
    if world is not None:
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu", seed=1)
    return model.train()


def stacks(model: Any) -> dict[str, Any]:
    with unwrapped_base(model) as base:
        return packed_expert_weights(base)


def rows_of(model: Any) -> dict[str, torch.Tensor]:
    return {n: whole(s.weight).view(torch.uint8) for n, s in stacks(model).items()}


def dequantised(weights: torch.Tensor, double: bool) -> torch.Tensor:
    """Return what bitsandbytes makes of each expert by itself, in rows of whole blocks.

    Rows of other lengths get the scales of other blocks on some CPUs.
    """
    rounded = []
    for weight in weights:
        blocks = weight.reshape(-1, 64)
        values, state = functional.quantize_4bit(
            blocks, blocksize=64, compress_statistics=double, quant_type="nf4"
        )
        found = functional.dequantize_4bit(values, state)
        # Half of the widest step of nf4 is 0.15.
        assert bool(((found - blocks).abs() < 0.17 * blocks.abs().amax(1, keepdim=True)).all())
        rounded.append(found.reshape(weight.shape))
    return torch.stack(rounded)


def step(model: Any, kernel: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    base_of(model).set_experts_implementation(kernel)
    model.zero_grad()
    ids = tiny_models.rows(2)["input_ids"]
    embedded = base_of(model).get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    logits.square().mean().backward()
    return logits.detach(), [
        embedded.grad,
        *(p.grad for p in model.parameters() if p.requires_grad),
    ]


# ---- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", [KINDS[0], *(slow(kind) for kind in KINDS[1:])])
def test_outputs_and_gradients_are_those_of_dequantised_weights(kind, double, folders):
    lora = DOUBLE if double else LORA
    model = build(folders[kind], lora)
    # The same model with its experts in full, which get the dequantised values.
    plain_lora = dataclasses.replace(lora, quantize_moe_experts=False)
    names = sorted({name.rpartition(".")[2] for name in modules_adapted(model)})
    plain: Any = build(folders[kind], dataclasses.replace(plain_lora, target_modules=names))
    packed = stacks(model)
    assert packed
    with torch.no_grad(), unwrapped_base(plain) as base:
        for name, stack in packed.items():
            parameter = base.get_parameter(name)
            expected = dequantised(parameter, double)
            assert not torch.equal(expected, parameter)
            assert torch.equal(stack.dequantise(stack.weight), expected), name
            parameter.copy_(expected)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.05
            model.get_parameter(name).copy_(noise)
            plain.get_parameter(name).copy_(noise)
    for kernel in ("eager", "grouped_mm", "batched_mm"):
        logits, gradients = step(model, kernel)
        expected_logits, expected_gradients = step(plain, kernel)
        assert torch.equal(logits, expected_logits), kernel
        assert len(gradients) == len(expected_gradients) > 1
        assert all(map(torch.equal, gradients, expected_gradients)), kernel
    for module in base_of(model).modules():  # dequantised weights are freed
        assert not set(getattr(module, "packed_stacks", ())) & vars(module).keys()


def modules_adapted(model: Any) -> list[str]:
    return [base_name(n).split(".lora_")[0] for n in trained(model)]


def test_description_counts_experts(folders):
    model = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    values = count_values(model)
    quantise_on_meta(model, DOUBLE, "bfloat16")
    assert count_values(model) == values
    text = str(quantise.describe_quantisation(model, 2))
    assert "linear layers and 6 tensors of fused experts" in text
    assert "experts" not in text.split("; not: ")[1]
    adapted = add_adapters(model, DOUBLE)
    lines = "\n".join(coverage_lines(adapted))
    assert re.search(r"experts\.gate_up_proj +3 +4 x 32 x 64 +-", lines)
    assert "lora.quantize_moe_experts keeps them frozen in 4 bits" in lines


def test_all_linear_adapts_no_expert(folders):
    model = build(folders["glm4_moe"])
    names = modules_adapted(model)
    assert any("q_proj" in n for n in names)
    assert not any("experts" in n or n.endswith("mlp.gate") for n in names)


# ---- Ranks ---------------------------------------------------------------------------------------


def losses(model: Any, optimizer: Any, rank: int, world: int, first: int = 0) -> list[float]:
    found = []
    for i in range(first, first + STEPS):
        mine = {k: v[rank::world] for k, v in tiny_models.rows(4, seed=i).items()}
        found.append(float(train_step(model, optimizer, [mine]).loss))
    return found


def run(rank: int, world: int, folders: dict[str, str], run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("qwen3_moe", "gpt_oss"):
        for way, cfg in WAYS.items():
            model = build(folders[kind], DOUBLE, cfg, world)
            seen = {"rows": rows_of(model), "start": trained(model)}
            seen["losses"] = losses(model, build_optimizer(model, OPTIM), rank, world)
            seen["kept"] = all(torch.equal(r, seen["rows"][n]) for n, r in rows_of(model).items())
            found[kind, way] = seen
    found["compiled"] = compiled(rank, world, folders["qwen3_moe"])
    found["saved"] = save(rank, world, folders["qwen3_moe"], run_dir)
    return found


def save(rank: int, world: int, folder: str, run_dir: str) -> dict[str, Any]:
    model = build(folder, DOUBLE, FP32, world)
    optimizer = build_optimizer(model, OPTIM)
    losses(model, optimizer, rank, world)
    path = checkpoint.save(checkpoint.TrainState(model, optimizer, step=STEPS), run_dir, SAVING)
    return {"path": path, "on": losses(model, optimizer, rank, world, STEPS)}


def compiled(rank: int, world: int, folder: str) -> list[float]:
    cfg = dataclasses.replace(
        WAYS["recomputed"], torch_compile="layer", torch_compile_backend="aot_eager"
    )
    torch._dynamo.reset()
    model = build(folder, DOUBLE, cfg, world)
    return losses(model, build_optimizer(model, OPTIM), rank, world)


@pytest.fixture(scope="module")
def found(folders, tmp_path_factory) -> dict[str, Any]:
    run_dir = str(tmp_path_factory.mktemp("run"))
    return {"dir": run_dir, "ranks": run_ranks(run, 2, folders, run_dir)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_two_ranks_train_as_one(kind, folders, found):
    with world_of_one():
        model = build(folders[kind], DOUBLE, FP32, 1)
        expected_rows = rows_of(model)
        expected = losses(model, build_optimizer(model, OPTIM), 0, 1)
    assert expected[-1] != expected[0]
    for rank in found["ranks"]:
        for way in WAYS:
            seen = rank[kind, way]
            assert seen["losses"] == pytest.approx(expected, rel=1e-5), way
            assert seen["kept"]
            assert seen["rows"].keys() == expected_rows.keys()
            assert all(torch.equal(seen["rows"][n], r) for n, r in expected_rows.items()), way


@pytest.mark.slow
def test_compiled_layers_train_as_the_plain_ones(found):
    for rank in found["ranks"]:
        assert rank["compiled"] == pytest.approx(rank["qwen3_moe", "none"]["losses"], rel=1e-5)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(folders, found):
    with world_of_one():
        model = build(folders["qwen3_moe"], DOUBLE, FP32, 1)
        optimizer = build_optimizer(model, OPTIM)
        resumed = checkpoint.TrainState(model, optimizer)
        assert checkpoint.resume(resumed, found["dir"], SAVING) == STEPS
        again = losses(model, optimizer, 0, 1, STEPS)
    assert again == pytest.approx(found["ranks"][0]["saved"]["on"], rel=1e-5)


@pytest.mark.slow
def test_a_resume_with_experts_in_full_is_refused(folders, found):
    lora = dataclasses.replace(DOUBLE, quantize_moe_experts=False, target_modules=["q_proj"])
    model: Any = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    quantise_on_meta(model, lora, "float32")
    with pytest.raises(CheckpointError, match="experts"):
        resuming.check_same_model(
            add_adapters(model, lora), Path(found["ranks"][0]["saved"]["path"])
        )


@pytest.mark.slow
def test_a_merge_is_into_the_original_experts(folders, found, tmp_path):
    consolidate(found["dir"], tmp_path / "merged", merge=True)
    merged = load_file(tmp_path / "merged/model.safetensors")
    source = load_file(f"{folders['qwen3_moe']}/model.safetensors")
    assert merged.keys() == source.keys()
    changed = {name for name in source if not torch.equal(source[name], merged[name])}
    assert any("q_proj" in name for name in changed)
    assert not any("experts" in name for name in changed)


@pytest.mark.plans
@pytest.mark.parametrize("double", ["false", "true"])
def test_a_plan_is_exact(double, folders):
    flags = (
        *("--lora.r=4", "--lora.load_in_4bit=true", "--lora.quantize_moe_experts=true"),
        *(f"--lora.bnb_4bit_use_double_quant={double}", "--lora.target_modules=all-linear"),
        *("--model.init=pretrained", "--sharding.param_dtype=bfloat16"),
    )
    cfg = _config(Path(folders["qwen3_moe"]), *flags)
    states = [found[0][0] for found in run_ranks(_every, 2, [cfg], 1)]
    assert [state_of(cfg, 2, rank) for rank in range(2)] == states
    assert simulate(cfg, 2, device_type="cpu").state == states[0]
    in_full = _config(Path(folders["qwen3_moe"]), *flags[:2], *flags[3:])
    assert state_of(in_full, 2, 0).parameters > states[0].parameters


# ---- Compiled ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_compiled_experts_compute_the_same(double, folders):
    """As `torch_compile: layer` has them: one graph for each layer."""
    model = build(folders["qwen3_moe"], DOUBLE if double else LORA)
    expected, expected_gradients = step(model, "grouped_mm")
    torch._dynamo.reset()
    for layer in base_of(model).model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    logits, gradients = step(model, "grouped_mm")
    assert torch.allclose(logits, expected, atol=1e-6)
    assert all(map(torch.allclose, gradients, expected_gradients))


# ---- Refused -------------------------------------------------------------------------------------


def test_experts_alone_are_refused():
    with pytest.raises(ConfigError, match=r"quantize_moe_experts .* without lora\.load_in_4bit"):
        LoraConfig(r=4, quantize_moe_experts=True)


def test_a_dense_model_is_refused(tmp_path):
    model = tiny_models.tiny_model("llama", hidden_size=64)
    folder = tiny_models.save(model, tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no fused experts.*Remove"):
        quantise_on_meta(build_on_meta(ModelConfig(str(folder))), LORA, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            r"experts\.gate_up_proj \[4, 32, 64\] .*: lora\.target_parameters names it",
        ),
        ({"modules_to_save": ["mlp.experts"]}, r"lora\.modules_to_save trains it in full"),
    ],
)
def test_trained_experts_are_refused(changes, message, folders):
    model = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    with pytest.raises(ModelError, match=message):
        quantise_on_meta(model, dataclasses.replace(LORA, **changes), "float32")


def test_names_that_peft_takes_for_experts_are_refused(folders):
    lora = dataclasses.replace(LORA, target_modules=["q_proj", "gate_proj", "up_proj"])
    model: Any = build_on_meta(ModelConfig(folders["glm4_moe"]))
    quantise_on_meta(model, lora, "float32")
    with pytest.raises(ModelError, match=r"PEFT would adapt .*experts.*keeps in 4 bits"):
        add_adapters(model, lora)


def test_experts_without_whole_blocks_are_refused(tmp_path):
    sizes = {"hidden_size": 40, "moe_intermediate_size": 12}
    model = tiny_models.tiny_model("qwen3_moe", **sizes)
    folder = tiny_models.save(model, tmp_path / "m", "qwen3_moe")
    with pytest.raises(ModelError, match=r"experts\.down_proj .*480 values, no multiple of 64"):
        quantise_on_meta(build_on_meta(ModelConfig(str(folder))), LORA, "float32")


def test_experts_of_a_models_own_code_are_refused(folders):
    model = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            del module._is_expert_parallel
    with pytest.raises(ModelError, match="does not dispatch the kernel of Qwen3MoeExperts"):
        quantise_on_meta(model, LORA, "float32")


def test_parameters_are_shards_of_whole_experts(folders):
    model = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    quantise_on_meta(model, LORA, "bfloat16")
    for name, stack in packed_expert_weights(model).items():
        parameter = model.get_parameter(name)
        assert isinstance(parameter, nn.Parameter)
        assert not parameter.requires_grad
        assert parameter.shape[0] == stack.shape[0] == 4
        assert parameter.numel() * parameter.itemsize == stack.nbytes
