"""QLoRA: the base in 4 bits under FSDP2 is what bitsandbytes makes of it in one process, and trains
as PEFT with bitsandbytes does there; what cannot work is refused before any work.

One group of two ranks serves all checks of a sharded model.
"""

import contextlib
import copy
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import tiny_models
import torch
import torch.distributed as dist
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import (
    apply_fsdp,
    evaluate,
    init_mesh,
    relative_difference,
    sharded_of,
    train_step,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from toolkit import checkpoint
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import resuming
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import (
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.errors import CheckpointError, ConfigError, LoadingError, ModelError, ShardingError
from toolkit.export import export_live
from toolkit.formats import local_tensor, read_weights, weight_files
from toolkit.loading import check_weights_fit, load_pretrained
from toolkit.models import quantise
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.packed_linear import (
    BLOCK,
    PackedLinear,
    count_values,
    packed_linear_class,
    packed_weights,
)
from toolkit.models.quantise import quantise_on_meta
from toolkit.sharding.unit_table import dtype_ledger, unit_rows
from toolkit.training.optim import build_optimizer

FP32, BF16 = ShardingConfig(param_dtype="float32"), ShardingConfig()
LORA = LoraConfig(r=4, load_in_4bit=True)
DOUBLE = dataclasses.replace(LORA, bnb_4bit_use_double_quant=True)
SAVING = CheckpointConfig()
STEPS = 4
# Adam's first steps follow the signs of gradients however small; so large an epsilon does not, and
# the order in which ranks are summed does not decide.
OPTIM = OptimConfig(learning_rate=2e-2, adam_epsilon=1e-4)
# How far logits may differ that one kernel computes of weights at other addresses: the last bits of
# fp32, a few roundings to bf16.
LOGITS = {"nf4": 1e-6, "double": 1e-6, "bf16": 0.02}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
# name -> (adapters, sharding, storage dtype of the base)
WAYS = {
    "nf4": (LORA, FP32, "float32"),
    "double": (DOUBLE, FP32, "float32"),
    "bf16": (DOUBLE, BF16, "bfloat16"),
    "bf16, fp32 base": (LORA, BF16, "float32"),
    "recomputed": (LORA, dataclasses.replace(FP32, activation_checkpointing=True), "float32"),
    "offloaded": (LORA, dataclasses.replace(FP32, cpu_offload=True), "float32"),
    "whole": (LORA, dataclasses.replace(FP32, frozen="replicated"), "float32"),
    "kept": (LORA, dataclasses.replace(FP32, reshard_after_forward=False), "float32"),
    "replicas": (LORA, dataclasses.replace(FP32, dp_shard=1), "float32"),
    "a layer in full": (
        dataclasses.replace(LORA, modules_to_save=["layers.1.mlp.up_proj"]),
        FP32,
        "float32",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", **SIZES))


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (8, 17), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(8):
        labels[row, : 1 + row] = -100  # rows of unequal weight
    return {"input_ids": ids, "labels": labels}


def mine(rows: dict[str, torch.Tensor], rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    return [{k: v[rank::world] for k, v in rows.items()}]


def build(folder: str, way: str, world: int | None = None) -> Any:
    lora, cfg, dtype = WAYS[way]
    model: Any = build_on_meta(ModelConfig(folder, dtype=dtype))
    quantise_on_meta(model, lora, cfg.param_dtype)
    model = add_adapters(model, lora)
    if world is not None:
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: whole(p) for n, p in model.named_parameters() if p.requires_grad}


def columns(model: Any) -> dict[str, torch.Tensor]:
    """Return the base's name of each 4-bit weight -> its whole column of bytes."""
    return {
        base_name(n): whole(model.get_parameter(n)).view(torch.uint8) for n in packed_weights(model)
    }


def base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def train(model: Any, rank: int, world: int, first: int = 0, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or build_optimizer(model, OPTIM)
    return [
        float(train_step(model, optimizer, mine(batch(i % 2), rank, world), max_grad_norm=0.0).loss)
        for i in range(first, first + STEPS)
    ]


# ---- On every rank -------------------------------------------------------------------------------


def every_way(rank: int, world: int, folder: str, run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        model = build(folder, way, world).train()
        ids = batch(9)["input_ids"]
        seen: dict[str, Any] = {"start": trained(model), "columns": columns(model)}
        with torch.no_grad():
            seen["training logits"] = model(input_ids=ids).logits
            model.eval()
            seen["evaluation logits"] = model(input_ids=ids).logits
            model.train()
            seen["training again"] = model(input_ids=ids).logits
        seen["losses"] = train(model, rank, world)
        seen["eval loss"] = float(evaluate(model, {"": mine(batch(9), rank, world)})[0].loss)
        seen["same bits"] = all(
            torch.equal(columns(model)[n], c) for n, c in seen["columns"].items()
        )
        seen["frozen"] = [n for n, p in model.named_parameters() if not p.requires_grad]
        seen["moved"] = [
            n for n, p in trained(model).items() if not torch.equal(p, seen["start"][n])
        ]
        held = [model.get_parameter(n) for n in packed_weights(model)]
        seen["held"] = sum(local_tensor(p).numel() * p.itemsize for p in held)
        layers = list(packed_weights(model).values())
        seen["sizes"] = len(layers), sum(x.elements for x in layers), sum(x.nbytes for x in layers)
        seen["rows"] = unit_rows(sharded_of(model), WAYS[way][1])
        seen["ledger"] = dtype_ledger(sharded_of(model), WAYS[way][1])
        found[way] = seen
    found["resumed"] = save_and_resume(rank, world, folder, run_dir)
    return found


def save_and_resume(rank: int, world: int, folder: str, run_dir: str) -> dict[str, Any]:
    model = build(folder, "double", world).train()
    optimizer = build_optimizer(model, OPTIM)
    train(model, rank, world, optimizer=optimizer)
    path = checkpoint.save(checkpoint.TrainState(model, optimizer, step=STEPS), run_dir, SAVING)
    on = train(model, rank, world, STEPS, optimizer)
    adapter = export_live(model, f"{run_dir}/adapter")
    with torch.no_grad():
        logits = model.eval()(input_ids=batch(9)["input_ids"]).logits
    losses, bits, step = resumed(folder, run_dir, rank, world)
    stored = list(json.loads(Path(path, "manifest.json").read_text())["row_sums"])
    stored = [name for name in stored if name.startswith("model.")]
    same = all(torch.equal(bits[n], c) for n, c in columns(model).items())
    seen = {"path": path, "on": on, "again": losses, "step": step, "same": same, "stored": stored}
    return seen | {"adapter": adapter, "logits": logits}


def resumed(folder: str, run_dir: str, rank: int, world: int) -> tuple[list[float], dict, Any]:
    model = build(folder, "double", world).train()
    optimizer = build_optimizer(model, OPTIM)
    step = checkpoint.resume(checkpoint.TrainState(model, optimizer), run_dir, SAVING)
    return train(model, rank, world, STEPS, optimizer), columns(model), step


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def found(folder, run_dir) -> list[dict[str, Any]]:
    return run_ranks(every_way, 2, folder, run_dir)


# ---- The plain side: transformers, PEFT and bitsandbytes in one process --------------------------


def plain(folder: str, way: str) -> Any:
    lora, cfg, dtype = WAYS[way]
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=lora.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, cfg.param_dtype),
        llm_int8_skip_modules=["lm_head", *lora.modules_to_save],
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=settings,
        dtype=getattr(torch, dtype),
        device_map="cpu",
        use_cache=False,
    )
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model


def plain_losses(folder: str, way: str, start: dict[str, torch.Tensor]) -> list[float]:
    lora = WAYS[way][0]
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.lora_alpha),
        target_modules="all-linear",
        modules_to_save=lora.modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(plain(folder, way), config)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    optimizer = torch.optim.AdamW(
        parameters.values(), OPTIM.learning_rate, eps=OPTIM.adam_epsilon, weight_decay=0.0
    )
    losses = []
    for i in range(STEPS):
        loss = model.train()(**batch(i % 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# ---- Sharded equals plain ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nf4", "double", "a layer in full"])
def test_losses_are_those_of_peft_and_bitsandbytes_in_one_process(way, folder, found):
    expected = plain_losses(folder, way, found[0][way]["start"])
    assert expected[2] < expected[0] - 0.02, "it must have learnt"
    for rank in found:
        assert rank[way]["losses"] == pytest.approx(expected, rel=1e-5), way


@pytest.mark.slow
def test_other_ways_train_as_the_plain_one(found):
    for rank in found:
        for way in ("recomputed", "offloaded", "whole", "kept", "replicas"):
            assert rank[way]["losses"] == pytest.approx(rank["nf4"]["losses"], rel=1e-6), way
        for way in ("bf16", "bf16, fp32 base"):
            assert rank[way]["losses"] == pytest.approx(rank["nf4"]["losses"], rel=2e-2), way
        # The control: a layer that is not in 4 bits differs by more than the tolerance.
        assert rank["a layer in full"]["losses"] != pytest.approx(rank["nf4"]["losses"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nf4", "double", "bf16"])
def test_logits_are_those_of_transformers_load_in_4bit(way, folder, found):
    with torch.no_grad():
        expected = plain(folder, way).eval()(input_ids=batch(9)["input_ids"]).logits
    for rank in found:
        assert relative_difference([rank[way]["evaluation logits"]], [expected]) < LOGITS[way]
    wrong = found[0]["a layer in full"]["evaluation logits"]  # the control
    assert relative_difference([wrong], [expected]) > LOGITS[way]


@pytest.mark.slow
def test_shards_are_what_bitsandbytes_makes_of_the_checkpoint(folder, found):
    entries = read_weights(weight_files(Path(folder)))
    for way in ("nf4", "double", "bf16"):
        lora, cfg, dtype = WAYS[way]
        model = build_on_meta(ModelConfig(folder, dtype=dtype))
        quantise_on_meta(model, lora, cfg.param_dtype)
        layers = packed_weights(model)
        assert layers.keys() == found[0][way]["columns"].keys()
        for name, layer in layers.items():
            source = whole_tensor(entries[name], name).to(getattr(torch, dtype))
            nibbles, state = bitsandbytes.functional.quantize_4bit(
                source,
                blocksize=BLOCK,
                compress_statistics=lora.bnb_4bit_use_double_quant,
                quant_type="nf4",
            )
            for rank in found:
                mine, its = layer.unpack(rank[way]["columns"][name])
                assert torch.equal(mine, nibbles), (way, name)
                assert its == state, (way, name)


def whole_tensor(entry: Any, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(entry.file, framework="pt") as file:
        return file.get_tensor(name)


@pytest.mark.slow
def test_an_evaluation_changes_no_bit_and_no_later_forward(found):
    for rank in found:
        for way in WAYS:
            seen = rank[way]
            assert seen["same bits"], way
            assert torch.equal(seen["training again"], seen["training logits"]), way
            assert torch.equal(seen["evaluation logits"], seen["training logits"]), way


def test_bitsandbytes_own_layer_repacks_in_an_evaluation():
    """The control of the test above: where its own layer changes its bytes, ours does not."""
    own = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4").to("cpu").eval()
    if not own.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16, for which bitsandbytes repacks")
    before = own.weight.detach().clone()
    with torch.no_grad():
        own(torch.ones(1, 64))
    assert own.weight.shape != before.shape or not torch.equal(own.weight, before)
    ours = layer(64, 64)
    column = ours.weight.detach().clone()
    with torch.no_grad():
        ours.eval()(torch.ones(1, 64))
    assert torch.equal(ours.weight.view(torch.uint8), column.view(torch.uint8))


@pytest.mark.slow
def test_only_adapters_are_trained(found):
    for rank in found:
        for way in WAYS:
            seen = rank[way]
            assert any("q_proj.base_layer.weight" in n for n in seen["frozen"])
            assert not any(".lora_" in n for n in seen["frozen"])
            assert seen["moved"] == list(seen["start"]), way


@pytest.mark.slow
def test_one_process_without_shards_gives_the_same_logits(folder, found):
    for way in ("double", "bf16, fp32 base"):
        model = build(folder, way).eval()
        with torch.no_grad():
            logits = model(input_ids=batch(9)["input_ids"]).logits
        if way == "double":  # without FSDP2 nothing casts what is stored in fp32
            mine = found[0][way]["evaluation logits"]
            assert relative_difference([mine], [logits]) < LOGITS[way]
        assert all(torch.equal(found[0][way]["columns"][n], c) for n, c in columns(model).items())


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_rank_holds_its_share_of_values_and_scales(found):
    for way in ("nf4", "double", "bf16"):
        (first, second) = (rank[way] for rank in found)
        layers, elements, total = first["sizes"]
        exact = elements // 64 * (1 if way != "nf4" else 4)
        assert exact <= total - elements // 2 <= exact * 1.3 + 32 * layers
        assert first["held"] + second["held"] == total
        assert abs(first["held"] - total / 2) < 16 * layers
        rows = [row for row in first["rows"] if "layers" in row.name]
        assert all(row.stored.startswith(("bfloat16/float32/nf4", "float32/nf4")) for row in rows)
        plain = sum(row.parameters for row in rows) - elements
        assert 0 < plain < elements  # counted as values, not as bytes
        assert "nf4" in first["ledger"]["storage"]
        assert first["ledger"]["optimizer"] == "float32"
    replicas = found[0]["replicas"]
    assert replicas["held"] == replicas["sizes"][-1]


def test_description_says_what_is_in_4_bits(folder):
    model = build_on_meta(ModelConfig(folder))
    assert quantise.describe_quantisation(model, 2) is None
    quantise_on_meta(model, dataclasses.replace(DOUBLE, modules_to_save=["k_proj"]), "float32")
    text = quantise.describe_quantisation(model, 2)
    assert text is not None
    assert "nf4, scales quantised too: 18 linear layers" in text
    assert "model.layers.*.self_attn.k_proj (lora.modules_to_save)" in text
    layers = packed_weights(model).values()
    assert count_values(model) == count_values(build_on_meta(ModelConfig(folder)))
    assert count_values(model) > sum(p.numel() for p in model.parameters())
    total, plain = sum(x.nbytes for x in layers), sum(4 * x.elements for x in layers)
    assert f"{total / 2 / 1e6:,.2f} MB a rank, not {plain / 2 / 1e6:,.2f}" in text


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumes_exactly_and_on_one_rank(folder, run_dir, found):
    for rank in found:
        seen = rank["resumed"]
        assert seen["step"] == STEPS
        assert seen["again"] == seen["on"]
        assert seen["same"]
        assert seen["stored"]
        assert all(".lora_" in name for name in seen["stored"])  # the base is in no checkpoint
    with world_of_one():
        losses, bits, _ = resumed(folder, run_dir, 0, 1)
    assert losses == pytest.approx(found[0]["resumed"]["on"], rel=1e-5)
    assert all(torch.equal(bits[n], c) for n, c in found[0]["double"]["columns"].items())


@pytest.mark.slow
def test_the_adapter_on_the_base_in_4_bits_gives_the_trained_logits(folder, found):
    seen = found[0]["resumed"]
    base = plain(folder, "double").eval()
    ids = batch(9)["input_ids"]
    with torch.no_grad():
        before = base(input_ids=ids).logits
        logits = peft.PeftModel.from_pretrained(base, seen["adapter"]).eval()(input_ids=ids).logits
    assert (logits - seen["logits"]).abs().max() < 1e-5
    assert (logits - before).abs().max() > 1e-2


@pytest.mark.slow
def test_another_quantisation_does_not_go_on(folder, run_dir, found):
    path = found[0]["resumed"]["path"]
    for lora, said in (
        (LORA, "double_quant True"),
        (dataclasses.replace(LORA, load_in_4bit=False), "not quantised"),
    ):
        model: Any = build_on_meta(ModelConfig(folder))
        if lora.load_in_4bit:
            quantise_on_meta(model, lora, "float32")
        model = add_adapters(model, lora)
        with pytest.raises(CheckpointError, match=said):
            resuming.check_same_model(model, Path(path))


@contextlib.contextmanager
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- One layer -----------------------------------------------------------------------------------


def layer(out: int, into: int, cfg: LoraConfig = LORA, dtype: str = "float32") -> PackedLinear:
    storage = getattr(torch, dtype)
    made = packed_linear_class()(nn.Linear(into, out), cfg, storage)
    weight = torch.randn(out, into, generator=torch.Generator().manual_seed(0))
    made.weight = nn.Parameter(made.pack(weight), requires_grad=False)
    return made


@pytest.mark.slow
def test_compiled_layers_with_adapters_learn_the_same(folder):
    """As `torch_compile: auto` has it on a GPU, with recomputation; in 4 bits and not."""
    for found in run_ranks(compiled, 2, folder):
        for bits in (4, 16):
            assert found[bits, "layer"] == pytest.approx(found[bits, "none"], rel=1e-5), bits
            assert found[bits, "layer"][-1] < found[bits, "layer"][0]
        assert found["graphs"] > 0
        assert not found["breaks"]


def compiled(rank: int, world: int, folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for bits in (4, 16):
        for how in ("none", "layer"):
            cfg = dataclasses.replace(
                FP32,
                torch_compile=how,
                torch_compile_backend="aot_eager",
                activation_checkpointing="selective",
                accumulation="keep_gathered",
            )
            torch._dynamo.reset()
            model: Any = build_on_meta(ModelConfig(folder))
            lora = LORA if bits == 4 else dataclasses.replace(LORA, load_in_4bit=False)
            if bits == 4:
                quantise_on_meta(model, lora, cfg.param_dtype)
            model = add_adapters(model, lora)
            apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
            load_pretrained(model, folder, "cpu")
            optimizer = build_optimizer(model.train(), OPTIM)
            micro = [mine(batch(seed), rank, world)[0] for seed in (0, 1)]
            found[bits, how] = [float(train_step(model, optimizer, micro).loss) for _ in range(4)]
    counters = torch._dynamo.utils.counters
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = dict(counters["graph_break"])
    return found


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_with_the_same_values():
    import torch._dynamo

    for cfg in (LORA, DOUBLE):
        plain = layer(32, 64, cfg, "bfloat16")
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager", fullgraph=True)
        x, y = (torch.randn(3, 64, requires_grad=True) for _ in range(2))
        y.data.copy_(x.data)
        one, two = plain(x), compiled(y)
        assert torch.equal(one, two)
        one.sum().backward()
        two.sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_layers_whose_rows_a_block_would_span_stay_as_they_are(tmp_path):
    folder = save_tiny_model(tmp_path / "m", "llama", hidden_size=64, intermediate_size=96)
    model = build_on_meta(ModelConfig(str(folder)))
    quantise_on_meta(model, LORA, "float32")
    text = str(quantise.describe_quantisation(model, 1))
    assert "; not: model.layers.*.mlp.down_proj (in_features is no multiple of 64)\n" in text
    load_pretrained(model, folder, "cpu")  # both kinds
    assert model.model.layers[0].mlp.down_proj.weight.shape == (64, 96)


def test_experts_and_routers_stay_as_they_are(tmp_path):
    kind = "qwen2_moe"
    sizes = {"hidden_size": 64, "shared_expert_intermediate_size": 64}
    folder = tiny_models.save(tiny_models.tiny_model(kind, **sizes), tmp_path / kind, kind)
    model: Any = build_on_meta(ModelConfig(str(folder)))
    quantise_on_meta(model, LORA, "float32")
    _, left = str(quantise.describe_quantisation(model, 1)).split("; not: ")
    assert "mlp.experts.gate_up_proj" in left
    assert re.search(r"mlp.shared_expert_gate[^()]* \(router\)", left)
    assert any(n.endswith("shared_expert.gate_proj.weight") for n in packed_weights(model))
    check_weights_fit(model, ModelConfig(str(folder)))
    load_pretrained(model, folder, "cpu")
    rows = tiny_models.rows(2)
    with torch.no_grad():
        assert torch.isfinite(model(**rows).loss)


def test_linear_layers_of_a_models_own_count_where_they_answer_as_linear(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    folder = tiny_models.save(tiny_models.tiny_model("falcon", **sizes), tmp_path / "f", "falcon")
    model: Any = build_on_meta(ModelConfig(str(folder)))
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is not nn.Linear
    quantise_on_meta(model, LORA, "float32")
    assert len(packed_weights(model)) == 4 * len(model.transformer.h)

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert not quantise._is_plain_linear_class(Scaled)


def test_weights_that_are_used_without_their_forward_stay_as_they_are(tmp_path):
    """Mamba's fused kernel, which a CPU does not have, is given out_proj's weight."""
    folder = tiny_models.save(tiny_models.tiny_model("mamba2"), tmp_path / "m", "mamba2")
    model = build_on_meta(ModelConfig(str(folder)))
    with pytest.raises(ModelError, match=r"out_proj \(its weight is used without its forward\)"):
        quantise_on_meta(model, LORA, "float32")


def test_a_weight_of_another_shape_is_refused_before_it_is_read(folder, tmp_path):
    other = save_tiny_model(tmp_path / "m", "llama", **SIZES | {"intermediate_size": 192})
    model = build_on_meta(ModelConfig(folder))
    quantise_on_meta(model, LORA, "float32")
    check_weights_fit(model, ModelConfig(str(folder)))
    with pytest.raises(LoadingError, match=r"expects \[64, 128\]"):
        check_weights_fit(model, ModelConfig(str(other)))


# ---- Refused before any work ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "model", "said"),
    [
        ({}, {"init": "random"}, "nothing to quantise but noise"),
        ({"use_dora": True}, {}, "lora.use_dora"),
    ],
)
def test_settings_that_cannot_work(lora, model, said):
    cfg, named = dataclasses.replace(LORA, **lora), ModelConfig("x", **model)
    with pytest.raises(ConfigError, match=said):
        quantise.check_quantisation(cfg, FP32, named, "cpu")
    quantise.check_quantisation(dataclasses.replace(cfg, load_in_4bit=False), FP32, named, "cpu")


def test_weights_in_4_bits_are_not_trained_in_full():
    with pytest.raises(ConfigError, match=r"load_in_4bit.* has no effect without lora\.r"):
        dataclasses.replace(LORA, r=0)


def test_settings_that_work(folder):
    for lora, sharding, _ in WAYS.values():
        quantise.check_quantisation(lora, sharding, ModelConfig(folder), "cpu")


def test_bitsandbytes_is_not_installed(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    packed_linear_class.cache_clear()
    for act in (
        lambda: quantise.check_quantisation(LORA, FP32, ModelConfig(folder), "cpu"),
        lambda: quantise_on_meta(build_on_meta(ModelConfig(folder)), LORA, "float32"),
    ):
        with pytest.raises(ConfigError, match=r"fsdp2-toolkit\[qlora\]"):
            act()


def test_a_device_that_does_not_compute_in_4_bits_is_found_by_trial():
    with pytest.raises(ConfigError, match="does not compute in nf4 on meta"):
        quantise.check_quantisation(LORA, FP32, ModelConfig("x"), "meta")


def test_wrong_values_are_found_by_trial(monkeypatch):
    real = bitsandbytes.matmul_4bit

    def shifted(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return real(a, b.roll(1), **kwargs)

    packed_linear_class.cache_clear()
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", shifted)
    with pytest.raises(ConfigError, match="wrong values"):
        quantise.check_quantisation(LORA, FP32, ModelConfig("x"), "cpu")
    packed_linear_class.cache_clear()


def test_a_unit_of_another_dtype_would_cast_the_bytes(folder):
    half = dataclasses.replace(FP32, param_dtype_overrides={"self_attn": "bfloat16"})
    for cfg in (BF16, half):
        model = build_on_meta(ModelConfig(folder))
        quantise_on_meta(model, LORA, "float32")
        with world_of_one(), pytest.raises(ShardingError, match="would cast to"):
            apply_fsdp(model, init_mesh("cpu", 1, cfg), cfg)


def test_models_without_linear_layers(tmp_path):
    folder = save_tiny_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match=r"no linear layer to quantise.*Conv1D"):
        quantise_on_meta(build_on_meta(ModelConfig(str(folder))), LORA, "float32")


def test_a_packed_weight_is_no_target_parameter(folder):
    lora = dataclasses.replace(LORA, target_parameters=["mlp.up_proj.weight"])
    with pytest.raises(ModelError, match=r"4 bits; use lora\.target_modules"):
        quantise_on_meta(build_on_meta(ModelConfig(folder)), lora, "float32")


@pytest.mark.parametrize("kind", ["bitsandbytes", "gptq", "awq"])
def test_a_checkpoint_that_is_quantised_already(kind, folder, tmp_path):
    config = json.loads(Path(folder, "config.json").read_text())
    config["quantization_config"] = {"quant_method": kind, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=kind):
        build_on_meta(ModelConfig(str(tmp_path)))


def test_base_is_reached_through_the_adapters(folder):
    base = quantised(folder)
    before = quantise.quantisation_settings(base), quantise.describe_quantisation(base, 1)
    model = add_adapters(base, LORA)
    assert None not in before
    assert (
        quantise.quantisation_settings(model),
        quantise.describe_quantisation(model, 1),
    ) == before
    kinds = {type(m).__module__ for m in model.modules() if "lora_A" in m._modules}
    assert kinds == {"peft.tuners.lora.bnb"}  # PEFT's own layer for 4 bits


def quantised(folder: str) -> Any:
    model = build_on_meta(ModelConfig(folder))
    quantise_on_meta(model, LORA, "float32")
    return model
