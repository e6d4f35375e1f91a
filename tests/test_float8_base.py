"""`model.float8: rowwise` with adapters: the frozen base is stored and multiplied in float8.

The products are emulated here, since a CPU has no kernel for them. What the kernel would get is
checked through a stand-in for it.
"""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from safetensors.torch import load_file
from sharded import apply_fsdp, init_mesh, sharded_of, train_step
from test_planning import _config, _every
from test_qlora import base_name, columns, mine, trained, world_of_one
from torch import nn
from transformers import AutoModelForCausalLM

from toolkit import checkpoint, cli
from toolkit.adapters import prepare_adapters
from toolkit.checkpoint import resuming
from toolkit.config.distill import DistillConfig, TeacherConfig
from toolkit.config.lora import LoraConfig
from toolkit.config.preference import PreferConfig, RewardModelConfig
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneConfig,
    FinetuneModelConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.errors import CheckpointError, ConfigError, ModelError
from toolkit.formats.metrics_file import read_metrics
from toolkit.loading import load_pretrained
from toolkit.models import float8_base, quantise
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.float8_base import Float8BaseLinear
from toolkit.models.packed_linear import count_values, packed_weights
from toolkit.models.peft_model import disabled_adapters
from toolkit.planning.simulation import simulate, state_of
from toolkit.sharding.unit_table import dtype_ledger
from toolkit.training.optim import build_optimizer

FP32, BF16 = ShardingConfig(param_dtype="float32"), ShardingConfig()
LORA = LoraConfig(r=4)
OPTIM = OptimConfig(learning_rate=5e-3, adam_epsilon=1e-3)
SAVING = CheckpointConfig()
STEPS = 4
# Keys and values are 128 wide, which is too narrow.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}
COMPILED = {"torch_compile": "layer", "torch_compile_backend": "aot_eager"}
WAYS = {
    "plain": FP32,
    "recomputed": dataclasses.replace(FP32, activation_checkpointing="full"),
    "selective": dataclasses.replace(FP32, activation_checkpointing="selective"),
    "offloaded activations": dataclasses.replace(
        FP32, activation_checkpointing="full", activation_offload=True
    ),
    "replicated": dataclasses.replace(FP32, frozen="replicated"),
    "replicas": dataclasses.replace(FP32, dp_shard=1),
    "compiled": dataclasses.replace(FP32, activation_checkpointing="selective", **COMPILED),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", **SIZES)
    return str(save_byte_tokenizer(path))


def layer(
    dtype: torch.dtype = torch.float32, out: int = 48, width: int = 64, orders: float = 5
) -> tuple[Any, Any]:
    """Return a linear layer whose rows span some orders of magnitude, and the same in float8."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(width, out)
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
        linear.weight.mul_(torch.logspace(2 - orders, 2, out)[:, None])
        linear.weight[3] = 0
        linear.bias.normal_(generator=generator)
    packed = Float8BaseLinear(copy.deepcopy(linear), dtype)
    packed.weight = nn.Parameter(packed.pack(linear.weight.detach()), requires_grad=False)
    return linear, packed


def inputs(dtype: torch.dtype = torch.float32, width: int = 64) -> torch.Tensor:
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-3, 3, 5)[:, None]).to(dtype).requires_grad_()


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as float8 with a scale per row has them, in float64."""
    wide = rows.detach().double()
    scale = (wide.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-38)
    return (rows.detach().float() / scale).to(torch.float8_e4m3fn).double() * scale.double()


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm, row by row; the largest one."""
    wide, gap = expected.detach().double(), actual.detach().double() - expected.detach().double()
    norms, gaps = (tensor.flatten(0, -2).norm(dim=1) for tensor in (wide, gap))
    return float((gaps / norms).max())


# ---- One layer -----------------------------------------------------------------------------------


def test_output_and_gradient_are_those_of_the_casts() -> None:
    linear, packed = layer()
    x, weight = inputs(), rounded(linear.weight)
    assert torch.equal(packed.dequantise(packed.weight), weight.float())
    assert not torch.equal(weight.float(), linear.weight)
    y = packed(x)
    assert y.shape == (2, 5, 48)
    expected = rounded(x) @ weight.t() + linear.bias.double()
    assert difference(y, expected) < 1e-6
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(grad)
    row_scales = packed.unpack(packed.weight)[1]
    folded = rounded((grad * row_scales).flatten(0, 1)).reshape(grad.shape)
    expected_grad = folded @ (weight / row_scales.double()[:, None])
    assert difference(x.grad, expected_grad) < 1e-6
    # The control: without the casts of the inputs, both are further away.
    assert difference(y, x.detach().double() @ weight.t() + linear.bias.double()) > 1e-3
    assert difference(x.grad, grad.double() @ weight) > 1e-3
    assert packed.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_are_close_to_those_without_float8(dtype: torch.dtype) -> None:
    linear, packed = layer(dtype, out=256, width=256, orders=0.5)
    x = inputs(dtype, width=256)
    y = packed(x)
    assert y.dtype == dtype
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad)
    assert x.grad.dtype == dtype
    same = x.detach().clone().requires_grad_()
    plain = nn.functional.linear(same, linear.weight.to(dtype), linear.bias.to(dtype))
    plain.backward(grad)
    assert 1e-3 < difference(y, plain) < 0.05
    assert 1e-3 < difference(x.grad, same.grad) < 0.05


def test_a_token_does_not_change_the_others() -> None:
    """So model and reference are one function, whatever else is in the batch."""
    _, packed = layer()
    x = inputs().detach()
    other = x.clone()
    other[0, 0] *= 1000
    other[1, 4] = math.nan
    y, changed = packed(x), packed(other)
    assert torch.equal(y[0, 1:], changed[0, 1:])
    assert torch.equal(y[1, :4], changed[1, :4])
    assert changed[1, 4].isnan().all()
    other[1, 4] = 0
    other[1, 3, 0] = math.inf
    assert torch.equal(packed(other)[1, 4], packed.bias)  # zeros are exact
    assert packed(other)[1, 3].isnan().all()


def test_a_matrix_in_parts_is_the_same_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, packed = layer()
    monkeypatch.setattr(float8_base, "_CHUNK", 7)
    assert torch.equal(
        packed.pack(linear.weight).view(torch.uint8), packed.weight.view(torch.uint8)
    )
    assert packed.nbytes == 48 * 64 + 48 * 4 == packed.weight.numel() * packed.weight.itemsize


def test_the_kernel_gets_the_layouts_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in checks what the kernel's documentation asks for, and multiplies in float32."""
    calls = []

    def scaled_mm(
        a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any, **options: Any
    ) -> Any:
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert scale_a.shape == (a.shape[0], 1)
        assert scale_b.shape == (1, b.shape[1])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert a.shape[1] % 16 == 0
        assert b.shape[1] % 16 == 0
        calls.append((out_dtype, options))
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    _, packed = layer(torch.bfloat16)
    results = []
    for emulated in (True, False):
        packed.is_emulated = emulated
        x = inputs(torch.bfloat16)
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        y = packed(x)
        y.backward(torch.ones_like(y))
        results.append((y, x.grad))
    assert calls == [
        (torch.bfloat16, {"use_fast_accum": True}),
        (torch.bfloat16, {"use_fast_accum": False}),
    ]
    for emulated, by_kernel in zip(*results, strict=True):
        assert difference(by_kernel, emulated) < 2**-7  # two roundings to bfloat16


# ---- Layers that are converted, and the start line -----------------------------------------------


def build(folder: str, cfg: ShardingConfig = FP32, world: int | None = None, **options: Any) -> Any:
    float8 = options.get("float8", "rowwise")
    base = build_on_meta(ModelConfig(folder, float8=float8, dtype=options.get("dtype", "float32")))
    model: Any = prepare_adapters(base, options.get("lora", LORA), cfg.param_dtype)
    if world is not None:
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu", seed=1)
    return model.train()


def test_which_layers_are_in_float8_is_logged(folder) -> None:
    plain = build_on_meta(ModelConfig(folder))
    model = build(folder)
    names = {base_name(n).split(".", 3)[3] for n in packed_weights(model)}
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    assert names == {f"{n}.weight" for n in (*kinds, "mlp.down_proj")}
    text = str(quantise.describe_quantisation(model, 2))
    head, sizes = text.splitlines()
    assert head.startswith(
        "float8     rowwise (e4m3, one scale per row), emulated on the CPU: slower, the same "
        "rounding: 10 linear layers"
    )
    assert "model.layers.*.self_attn.k_proj" in head
    assert "(narrower than 256)" in head
    layers = list(packed_weights(model).values())
    total, before = sum(x.nbytes for x in layers), sum(4 * x.elements for x in layers)
    assert f"{total / 2 / 1e6:,.2f} MB a rank, not {before / 2 / 1e6:,.2f}" in sizes
    assert "MB of 8-bit values" in sizes
    frozen = [p for p in model.parameters() if not p.requires_grad]
    in_lora = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_values(model) - in_lora == sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in frozen) < sum(p.numel() for p in plain.parameters())


def test_experts_and_routers_keep_their_dtype(tmp_path) -> None:
    kind = "qwen2_moe"
    sizes = {"hidden_size": 256, "shared_expert_intermediate_size": 256}
    path = tiny_models.save(tiny_models.tiny_model(kind, **sizes), tmp_path / kind, kind)
    model = build(str(path))
    _, unpacked = str(quantise.describe_quantisation(model, 1)).split("; not: ")
    assert "mlp.experts.gate_up_proj" in unpacked
    assert "(router)" in unpacked
    assert any("shared_expert.gate_proj" in name for name in packed_weights(model))
    with torch.no_grad():
        assert torch.isfinite(model(**tiny_models.rows(2)).loss)


def test_models_without_such_layers_are_refused(tmp_path) -> None:
    narrow = save_tiny_model(tmp_path / "narrow", "llama")
    with pytest.raises(ModelError, match=r"model.float8: rowwise: .*\(narrower than 256"):
        build(str(narrow))
    target = dataclasses.replace(LORA, target_parameters=["mlp.up_proj.weight"])
    wide = save_tiny_model(tmp_path / "wide", "llama", **SIZES)
    with pytest.raises(ModelError, match=r"is in float8; use lora.target_modules"):
        build(str(wide), lora=target)


def test_modules_to_save_keep_their_dtype(folder) -> None:
    model = build(folder, lora=dataclasses.replace(LORA, modules_to_save=["layers.1.mlp.up_proj"]))
    assert not any("layers.1.mlp.up_proj" in name for name in packed_weights(model))


def test_a_reward_model_has_its_base_in_float8(folder) -> None:
    lora = dataclasses.replace(LORA, modules_to_save=["score"])
    base = build_on_meta(RewardModelConfig(folder, float8="rowwise"))
    model: Any = prepare_adapters(base, lora, "float32")
    load_pretrained(model, folder, "cpu", seed=1)
    assert len(packed_weights(model)) == 10
    rewards = model(input_ids=batch(0)["input_ids"]).logits
    assert rewards.shape == (8, 1)
    rewards.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


# ---- Refused before any work ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"float8": "tensorwise"}}, r"tensorwise: .*Set model.float8: rowwise"),
        ({"model": {"float8": "rowwise_with_gw_hp"}}, r"with_gw_hp: .*Set model.float8: rowwise"),
        ({"lora": {"load_in_4bit": True}}, "load_in_4bit stores the base in 4 bits"),
        ({"lora": {"use_dora": True}}, "DoRA needs the rows of the weights"),
        ({"sharding": {"cpu_offload": True}}, "cpu_offload was not tried"),
        ({"sharding": {"param_dtype": "float32"}}, "param_dtype must be bfloat16"),
        ({"sharding": {"torch_compile": "model"}}, "set layer"),
        ({"sharding": {"context_parallel": 2}}, "context_parallel was not tried"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, reason) -> None:
    cfg = FinetuneConfig(FinetuneModelConfig("folder", float8="rowwise"), lora=LORA)
    sections = {k: dataclasses.replace(getattr(cfg, k), **v) for k, v in changes.items()}
    with pytest.raises(ConfigError, match=rf"model.float8: .*{reason}"):
        dataclasses.replace(cfg, **sections)


def test_other_kinds_of_runs_allow_it_with_adapters_only() -> None:
    model = FinetuneModelConfig("folder", float8="rowwise")
    PreferConfig(model, lora=LORA)
    DistillConfig(model, lora=LORA, teacher=TeacherConfig("teacher"))
    with pytest.raises(ConfigError, match=r"or train adapters \(lora.r\) on a base in float8"):
        PreferConfig(model)


def test_a_device_without_such_products_is_refused(monkeypatch) -> None:
    def check(device: str, lora: LoraConfig | None = LORA, **model: Any) -> None:
        cfg = ModelConfig("x", float8="rowwise", **model)
        quantise.check_quantisation(lora, BF16, cfg, device)

    check("cpu")  # emulated
    with pytest.raises(ConfigError, match="nothing to quantise but noise"):
        check("cpu", init="random")
    with pytest.raises(ConfigError, match=r"needs an NVIDIA GPU of compute capability 8.9"):
        check("mps")
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=r"A100 has compute capability 8.0, and products .* 8.9"):
        check("cuda")
    capability[0] = (9, 0)
    errors: list[Any] = [0.5, RuntimeError("no such kernel"), 0.001]

    def largest_error(*_: Any) -> float:
        error = errors.pop(0)
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(float8_base, "_largest_kernel_error", largest_error)
    with pytest.raises(ConfigError, match=r"off by 50.0% of the largest value"):
        check("cuda")
    with pytest.raises(ConfigError, match=r"does not multiply in float8 .*no such kernel"):
        check("cuda")
    check("cuda")
    check("cuda", lora=None)  # torchao's; not checked here
    assert not errors


def test_the_trial_finds_wrong_products(monkeypatch) -> None:
    def scaled_mm(a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any, **_: Any) -> Any:
        return ((a.float() @ b.float()) * scale_a * scale_b * factor).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    factor = 1.0
    assert float8_base._largest_kernel_error(torch.device("cpu"), torch.bfloat16) < 0.01
    factor = 1.1
    assert float8_base._largest_kernel_error(torch.device("cpu"), torch.bfloat16) > 0.05


# ---- Ranks ---------------------------------------------------------------------------------------


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (8, 17), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(8):
        labels[row, : 1 + row] = -100  # rows of unequal weight
    return {"input_ids": ids, "labels": labels}


def train(model: Any, rank: int, world: int, first: int = 0, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or build_optimizer(model, OPTIM)
    return [
        float(train_step(model, optimizer, mine(batch(i % 2), rank, world), max_grad_norm=0.0).loss)
        for i in range(first, first + STEPS)
    ]


def every_way(rank: int, world: int, folder: str, run_dir: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for way, cfg in WAYS.items():
        torch._dynamo.reset()
        model = build(folder, cfg, world)
        of_way: dict[str, Any] = {"columns": columns(model), "losses": train(model, rank, world)}
        of_way["kept"] = all(
            torch.equal(c, of_way["columns"][n]) for n, c in columns(model).items()
        )
        of_way["trained"] = trained(model)
        of_way["ledger"] = dtype_ledger(sharded_of(model), cfg)["storage"]
        results[way] = of_way
    results["graph breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
    model = build(folder, FP32, world)
    optimizer = build_optimizer(model, OPTIM)
    train(model, rank, world, optimizer=optimizer)
    path = checkpoint.save(checkpoint.TrainState(model, optimizer, step=STEPS), run_dir, SAVING)
    results["path"] = path
    results["on"] = train(model, rank, world, STEPS, optimizer)
    results["resumed"] = resumed(folder, run_dir, rank, world)
    results["stored"] = list(json.loads(Path(path, "manifest.json").read_text())["row_sums"])
    return results


def resumed(folder: str, run_dir: str, rank: int, world: int) -> list[float]:
    model = build(folder, FP32, world)
    optimizer = build_optimizer(model, OPTIM)
    assert checkpoint.resume(checkpoint.TrainState(model, optimizer), run_dir, SAVING) == STEPS
    return train(model, rank, world, STEPS, optimizer)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def results(folder, run_dir) -> list[dict[str, Any]]:
    return run_ranks(every_way, 2, folder, run_dir)


@pytest.mark.slow
def test_two_ranks_train_as_one(folder, results) -> None:
    with world_of_one():
        model = build(folder, FP32, 1)
        bytes_of_one = columns(model)
        expected = train(model, 0, 1)
        adapters = trained(model)
        plain = train(build(folder, FP32, 1, float8="none"), 0, 1)
    assert expected[2] < expected[0] - 0.02, "it must have learnt"
    assert plain != pytest.approx(expected, rel=1e-5), "the control is not in float8"
    assert plain == pytest.approx(expected, rel=0.05)
    for rank in results:
        for way in WAYS:
            of_way = rank[way]
            # A difference of 1e-7 can move a value to the next of float8, which is 6 % away. So
            # only runs that add in the same order are equal.
            same_order = rank["plain"]["losses"], 1e-6
            losses, close = (expected, 1e-3) if way in ("plain", "compiled") else same_order
            assert of_way["losses"] == pytest.approx(losses, rel=close), way
            assert of_way["kept"], way
            assert all(torch.equal(of_way["columns"][n], c) for n, c in bytes_of_one.items()), way
            assert of_way["trained"].keys() == adapters.keys()
            for name, value in adapters.items():
                gap = (of_way["trained"][name] - value).norm() / value.norm()
                assert gap < 0.02, (way, name)
            assert "float8_e4m3" in of_way["ledger"]
        assert not rank["graph breaks"]


@pytest.mark.slow
def test_a_run_resumes_exactly_and_on_one_rank(folder, run_dir, results) -> None:
    for rank in results:
        assert rank["resumed"] == rank["on"]
        model_names = [name for name in rank["stored"] if name.startswith("model.")]
        assert model_names
        assert all(".lora_" in name for name in model_names)  # the base is in no checkpoint
    with world_of_one():
        again = resumed(folder, run_dir, 0, 1)
    assert again == pytest.approx(results[0]["on"], rel=1e-3)  # another order of sums


@pytest.mark.slow
def test_a_resume_on_another_base_is_refused(folder, results) -> None:
    for options, message in (
        (
            {"float8": "none"},
            r"trained on a base model.float8 rowwise.*not quantised.*model.float8",
        ),
        ({"float8": "none", "lora": dataclasses.replace(LORA, load_in_4bit=True)}, "nf4"),
    ):
        base = build_on_meta(ModelConfig(folder, float8=options["float8"]))
        model = prepare_adapters(base, options.get("lora", LORA), "float32")
        with pytest.raises(CheckpointError, match=message):
            resuming.check_same_model(model, Path(results[0]["path"]))


def learn(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    losses = {}
    for float8 in ("none", "rowwise"):
        model = build(folder, BF16, world, float8=float8, dtype="bfloat16")
        optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2))
        rows = mine(batch(0), rank, world)
        losses[float8] = [float(train_step(model, optimizer, rows).loss) for _ in range(20)]
    return losses


@pytest.mark.slow
def test_it_learns_as_bf16_does(folder) -> None:
    for losses in run_ranks(learn, 2, folder):
        first, last = losses["none"][0], losses["none"][-1]
        assert last < 0.75 * first, "the control learned nothing"
        assert abs(losses["rowwise"][-1] - last) < 0.05 * first
        assert losses["rowwise"] != losses["none"]


@pytest.mark.plans
def test_a_plan_is_exact(folder) -> None:
    flags = (
        *("--lora.r=4", "--model.float8=rowwise", "--model.init=pretrained"),
        *("--sharding.param_dtype=bfloat16", "--sharding.frozen=sharded", "--model.dtype=bfloat16"),
    )
    cfg = _config(Path(folder), *flags)
    states = [of_rank[0][0] for of_rank in run_ranks(_every, 2, [cfg], 1)]
    assert [state_of(cfg, 2, rank) for rank in range(2)] == states
    sim = simulate(cfg, 2, device_type="cpu")
    assert sim.state == states[0]
    on_gpu = simulate(cfg, 2, device_type="cuda")
    assert on_gpu.notes == ("products in float8 are planned with the time of products in bfloat16",)
    in_bf16 = _config(Path(folder), flags[0], *flags[2:])
    layers = packed_weights(build(folder, dtype="bfloat16")).values()
    saved = sum(2 * x.elements - x.nbytes for x in layers) // 2
    assert simulate(in_bf16, 2, device_type="cuda").state.parameters - saved == states[0].parameters


# ---- The path of a user --------------------------------------------------------------------------

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def launch(recipe: str, world: int, here: Path, output: str, *flags: object, steps: int) -> Any:
    settings = {
        "model.name_or_path": "model",
        "model.float8": "rowwise",
        "output_dir": output,
        "lora.r": 4,
        "data.chat_template": ROOT / "recipes/configs/chat_template.jinja",
        "data.sequence_length": 128,
        "optim.learning_rate": 1e-2,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": steps,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 2,
        "train.global_batch_size": 4,
        "checkpoint.save_steps": 2,
    }
    words = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    ended = run_recipe_ranks(recipe, world, *words, *map(str, flags), cwd=here)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with a model in bfloat16 and rows."""
    path = tmp_path_factory.mktemp("user")
    sizes = SIZES | {"max_position_embeddings": 256, "dtype": torch.bfloat16}
    save_byte_tokenizer(save_tiny_model(path / "model", "llama", **sizes))
    rows = []
    for i in range(40):
        prompt = [{"role": "user", "content": f"After {WORDS[i % 10]}?"}]
        answers = [[{"role": "assistant", "content": WORDS[(i + k) % 10]}] for k in (1, 4)]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    pairs = "".join(json.dumps(row) + "\n" for row in rows)
    chats = "".join(json.dumps({"messages": r["prompt"] + r["chosen"]}) + "\n" for r in rows)
    (path / "pairs.jsonl").write_text(pairs)
    (path / "chats.jsonl").write_text(chats)
    return path


@pytest.mark.slow
def test_the_command_trains_stops_resumes_exports_and_verifies(here, tmp_path, capsys) -> None:
    data = ("--data.train_files", "chats.jsonl")
    losses = {}
    for name, lengths in {"whole": (4,), "stopped": (2, 4)}.items():
        for steps in lengths:
            ended = launch("finetune", 2, here, name, *data, steps=steps)
            assert "float8     rowwise (e4m3, one scale per row), emulated" in ended.stdout
            assert "adapter proven" in ended.stdout
        losses[name] = [line["loss"] for line in read_metrics(here / name)]
    assert len(losses["whole"]) == 4
    assert losses["whole"] == losses["stopped"]
    for name, merge in (("adapter", []), ("merged", ["--merge"])):
        arguments = ["consolidate", str(here / "whole"), "--output", str(tmp_path / name), *merge]
        assert cli.main(arguments) == 0
        assert cli.main(["verify", str(here / "whole"), str(tmp_path / name)]) == 0
    capsys.readouterr()
    merged = load_file(tmp_path / "merged/model.safetensors")
    source = load_file(here / "model/model.safetensors")
    assert merged.keys() == source.keys()
    by_peft = merge_by_peft(here / "model", tmp_path / "adapter")
    changed = []
    for name, original in source.items():
        assert torch.equal(merged[name], by_peft[name]), name
        if not torch.equal(original, merged[name]):
            changed.append(name)
    assert any("q_proj" in name for name in changed)
    # The control: the base in float8 is another one.
    rows = source["model.layers.0.mlp.up_proj.weight"].float()
    assert not torch.equal(rounded(rows).to(torch.bfloat16), rows.to(torch.bfloat16))


def merge_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return {name: p.detach().to(torch.bfloat16) for name, p in merged.named_parameters()}


@pytest.mark.slow
def test_preference_tuning_starts_from_its_reference(here) -> None:
    """The reference is the base in float8, by adapters off or evaluated before the first step."""
    data = ("--data.train_files", "pairs.jsonl", "--data.packing", "none")
    ended = launch("prefer", 2, here, "dpo", *data, steps=4)
    assert re.search(r"reference  \d+ of \d+ pairs of answers", ended.stdout), ended.stdout
    logged = read_metrics(here / "dpo")
    assert logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert abs(logged[0]["margin"]) < 1e-2
    assert abs(logged[-1]["margin"]) > 0.02  # the control: adapters change it


@pytest.mark.slow
def test_a_model_that_imitates_its_base_is_near_it(here) -> None:
    flags = ("--data.train_files", "chats.jsonl", "--teacher.name_or_path", "model")
    launch("distill", 2, here, "distilled", *flags, "--distill.kl_weight", 1.0, steps=4)
    first = read_metrics(here / "distilled")[0]["loss"]
    assert 0 < first < 0.1  # the teacher is not in float8


@pytest.mark.slow
def test_adapters_off_compute_the_base_in_float8(folder) -> None:
    model = build(folder).eval()
    ids = batch(3)["input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(0.1)
        with disabled_adapters(model):
            off = model(input_ids=ids).logits
        assert torch.equal(off, before)
        assert not torch.equal(model(input_ids=ids).logits, before)
