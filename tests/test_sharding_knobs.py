"""Every knob of the sharding config changes what it claims, and leaves the loss where it was.

Placements and shapes with a fake group of 8 and of 2 x 4; values, collectives, dtypes and memory
with gloo on 2 and 4 ranks, against one plain process.
"""

import collections
import copy
import dataclasses
import gc
import json
import subprocess
import sys
import types
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import (
    CLOSE,
    apply_fsdp,
    evaluate,
    init_mesh,
    loss_sum,
    relative_difference,
    sharded_of,
    train_step,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.errors import ModelError, ShardingError
from toolkit.formats import reshard
from toolkit.loading import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.planning.fake_ranks import fake_world
from toolkit.sharding import accumulation, fsdp, host_memory, recompute
from toolkit.sharding.accumulation import Accumulation
from toolkit.sharding.compiled import compile_forward
from toolkit.sharding.fsdp import build_offload_policy
from toolkit.sharding.host_memory import HostMemory
from toolkit.sharding.unit_table import (
    dtype_ledger,
    format_dtype_ledger,
    format_unit_table,
    unit_rows,
)
from toolkit.training.optim import build_optimizer

FP32 = ShardingConfig(param_dtype="float32")
LAYERS = 4
LAYER = "model.layers.0"
PARTS = ["LlamaDecoderLayer", "self_attn", "mlp"]  # each layer is a unit, and two parts of it


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "llama": ("llama", {"num_hidden_layers": LAYERS}),
        "tied": ("llama", {"num_hidden_layers": LAYERS, "tie_word_embeddings": True}),
        "experts": ("qwen3_moe", {"num_hidden_layers": LAYERS}),
    }
    return {n: str(save_tiny_model(root / n, kind, **ch)) for n, (kind, ch) in made.items()}


def knobs(**changes: Any) -> ShardingConfig:
    return dataclasses.replace(FP32, **changes)


def build(folder: str, world: int, cfg: ShardingConfig, **model: Any):
    made = build_on_meta(ModelConfig(folder, **model))
    apply_fsdp(made, init_mesh("cpu", world, cfg), cfg)
    return made


def batch(rows: int, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (rows, 16), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + row] = -100
    return {"input_ids": ids, "labels": labels}


# --------------------------------------------------------------------------------------------------
# Placements and shapes: a fake group
# --------------------------------------------------------------------------------------------------


def names_of(folder: str, cfg: ShardingConfig, world: int = 8) -> list[tuple[str, ...]]:
    with fake_world(world):
        return [u.modules for u in sharded_of(build(folder, world, cfg)).plan.units]


def layers(*parts: str) -> list[tuple[str, ...]]:
    return [(f"model.layers.{i}{p}",) for p in parts for i in range(LAYERS)]


def test_units_are_the_layers_and_the_root(folders):
    assert names_of(folders["llama"], FP32) == [*layers(""), ("",)]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        (
            "llama",
            {"layer_classes": PARTS},
            {*layers("", ".self_attn", ".mlp"), ("",)},
        ),
        (
            "llama",
            {"embedding_units": True},
            {*layers(""), ("model.embed_tokens",), ("lm_head",), ("",)},
        ),
        (
            "tied",
            {"embedding_units": True},
            {*layers(""), ("model.embed_tokens", "lm_head"), ("",)},
        ),
        ("llama", {"layer_classes": ["LlamaMLP"]}, {*layers(".mlp"), ("",)}),
        (
            "llama",
            {"layer_classes": ["model.layers.[01].self_attn", "mlp"]},
            {*layers(".mlp"), ("model.layers.0.self_attn",), ("model.layers.1.self_attn",), ("",)},
        ),
        (
            "llama",
            {"param_dtype": "bfloat16", "param_dtype_overrides": {"*norm": "float32"}},
            {
                *layers(""),
                *(
                    (
                        f"model.layers.{i}.input_layernorm",
                        f"model.layers.{i}.post_attention_layernorm",
                    )
                    for i in range(LAYERS)
                ),
                ("model.norm",),
                ("",),
            },
        ),
    ],
)
def test_units_as_asked(kind, changes, expected, folders):
    assert set(names_of(folders[kind], knobs(**changes))) == expected


def test_inner_units_come_before_outer_ones(folders):
    found = names_of(folders["llama"], knobs(layer_classes=PARTS, embedding_units=True))
    for i, unit in enumerate(found):
        for later in found[i + 1 :]:
            assert not any(b.startswith(a + ".") for a in unit for b in later if a)
    assert found[-1] == ("",)


@pytest.mark.parametrize("kind", ["llama", "tied", "experts"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_classes": ["self_attn", "mlp"], "embedding_units": True},
        {
            "param_dtype": "bfloat16",
            "param_dtype_overrides": {"*norm": "float32", "lm_head": "float32"},
        },
    ],
)
def test_every_parameter_belongs_to_one_unit_and_is_cut_in_eight(kind, changes, folders):
    with fake_world(8):
        model = build(folders[kind], 8, knobs(**changes))
        plan = sharded_of(model).plan
        owned = [name for unit in plan.units for name in unit.parameters]
        assert sorted(owned) == sorted(n for n, _ in model.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.placements == (Shard(0),), name
            rows = -(-parameter.shape[0] // 8)
            assert parameter.to_local().shape[0] == min(rows, parameter.shape[0]), name
            assert parameter.device_mesh.size() == 8
            assert parameter.is_meta


def test_replicas_of_a_sharded_model(folders):
    with fake_world(8):
        for cfg in (knobs(dp_replicate=2), knobs(dp_shard=4), knobs(dp_replicate=2, dp_shard=4)):
            for name, parameter in build(folders["llama"], 8, cfg).named_parameters():
                assert parameter.device_mesh.shape == (2, 4)
                assert parameter.placements == (Replicate(), Shard(0)), name
                assert parameter.to_local().shape[0] == -(-parameter.shape[0] // 4)
        plain = build(folders["llama"], 8, knobs(dp_shard=1))
        assert all(p.to_local().shape == p.shape for p in plain.parameters())
        with pytest.raises(ShardingError, match="does not make 8 processes"):
            init_mesh("cpu", 8, knobs(dp_replicate=3))


@pytest.mark.parametrize(
    ("changes", "single"),
    [
        ({"param_dtype_overrides": {"layers": "float32"}}, layers("")),
        (
            {"param_dtype_overrides": {"layers.0": "float32"}, "layer_classes": PARTS},
            [(f"{LAYER}{part}",) for part in ("", ".self_attn", ".mlp")],
        ),
        (
            {"param_dtype_overrides": {"layers.0": "float32", "layers.0.mlp": "bfloat16"}},
            [(LAYER,)],
        ),
    ],
)
def test_units_compute_as_the_module_around_them_was_told(changes, single, folders):
    with fake_world(8):
        cfg = dataclasses.replace(knobs(**changes), param_dtype="bfloat16")
        units = sharded_of(build(folders["llama"], 8, cfg)).plan.units
    assert {u.modules for u in units if u.param_dtype == torch.float32} == set(single)


def test_ignored_parameters_stay_whole(folders):
    with fake_world(8):
        model = build(folders["llama"], 8, knobs(ignored_parameters=["*layernorm.weight"]))
        whole = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert whole == {
            f"model.layers.{i}.{n}.weight"
            for i in range(LAYERS)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
        assert set(sharded_of(model).plan.replicated) == whole


def test_what_transformers_keeps_in_fp32_stays_so(tmp_path):
    """ernie4_5_moe keeps its routers in fp32: whatever the storage and compute dtypes are."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "ernie4_5_moe",
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        vocab_size=300,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with fake_world(8):
        for storage in ("float32", "bfloat16"):
            model = build(str(tmp_path), 8, ShardingConfig(), dtype=storage)
            kept = {n for n in sharded_of(model).plan.replicated if "gate.weight" in n}
            assert len(kept) == 2
            for name, parameter in model.named_parameters():
                other = torch.float32 if storage == "float32" else torch.bfloat16
                assert parameter.dtype == (
                    torch.float32 if name in sharded_of(model).plan.replicated else other
                )
            assert "replicated" in format_unit_table(sharded_of(model), ShardingConfig())
        assert not sharded_of(build(str(tmp_path), 8, FP32)).plan.replicated


def test_storage_dtype_is_its_own_choice_and_said_loudly(folders):
    with fake_world(8):
        for dtype in ("float32", "bfloat16"):
            model = build(folders["llama"], 8, ShardingConfig(), dtype=dtype)
            assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
            ledger = dtype_ledger(sharded_of(model), ShardingConfig())
            assert (ledger["storage"], ledger["optimizer"]) == (dtype, dtype)
            assert ledger["compute"] == "bfloat16"
            assert ("WARNING" in format_dtype_ledger(sharded_of(model), ShardingConfig())) == (
                dtype == "bfloat16"
            )
            eight = format_dtype_ledger(sharded_of(model), ShardingConfig(), "8 bits/float32")
            assert "optimizer 8 bits/float32, " in eight
            assert ("WARNING" in eight) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("kind", "device", "changes", "split", "compiled"),
    [
        ("llama", "cuda", {}, True, True),
        ("tied", "cuda", {}, False, True),
        ("experts", "cuda", {}, True, True),
        ("llama", "cpu", {}, False, False),
        ("llama", "cuda", {"embedding_units": False, "torch_compile": "none"}, False, False),
        ("llama", "cpu", {"embedding_units": True, "torch_compile": "layer"}, True, True),
        ("llama", "cuda", {"layer_classes": PARTS}, True, False),
        ("llama", "cuda", {"param_dtype_overrides": {"mlp": "bfloat16"}}, True, False),
        (
            "llama",
            "cuda",
            {"activation_checkpointing": "full", "activation_offload": True},
            True,
            False,
        ),
    ],
)
def test_what_auto_is_on_a_gpu(kind, device, changes, split, compiled, folders):
    cfg = knobs(**changes)
    model = build_on_meta(ModelConfig(folders[kind]))
    assert fsdp.should_split_embeddings(model, cfg, device) is split
    plan = fsdp.plan_units(model, cfg)
    assert fsdp.should_compile_layers(plan, cfg, device, True, False)[0] is compiled
    if cfg.torch_compile == "auto":  # each new length would compile anew
        assert not fsdp.should_compile_layers(plan, cfg, device, False, False)[0]
        assert not fsdp.should_compile_layers(plan, cfg, device, True, own_kernels=True)[0]


@pytest.mark.parametrize("how", ["none", "layer", "model"])
def test_compiled_code_and_nothing_else_does_without_cudnn(how, folders):
    cfg = knobs(torch_compile=how, torch_compile_backend="aot_eager")
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with fake_world(2):
            model = build_on_meta(ModelConfig(folders["llama"]))
            apply_fsdp(model, init_mesh("cpu", 2, cfg), cfg)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        layer = model.get_submodule("model.layers.0")
        compiled = {"none": [], "layer": [layer], "model": [model]}[how]
        for module in (layer, model):
            assert (module._compiled_call_impl is not None) is (module in compiled)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_kernels_of_a_compiled_forward():
    """cuDNN's is off while it is traced and run, and on again after it, well or not."""
    seen: list[bool] = []

    class Attention(torch.nn.Module):
        def forward(self, x):
            see()
            return x + 1 // (x.shape[0] - 1)

    @torch.compiler.disable
    def see():
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())

    module = Attention()
    compile_forward(module, backend="eager")
    torch.backends.cuda.enable_cudnn_sdp(True)
    module(torch.zeros(2))
    assert seen == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with torch.compiler.set_stance("force_eager"):  # as an answer of generation is
        module(torch.zeros(2))
    assert seen == [False, True]
    with pytest.raises(ZeroDivisionError):
        module(torch.zeros(1))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)  # by the user
        module(torch.zeros(2))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_what_is_kept_is_not_what_biases_of_experts_are_added_to(experts, monkeypatch):
    """transformers adds them in place: kept, they would be added twice where a copy is late."""
    monkeypatch.setattr(recompute, "_THIN", 0)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=2, hidden_size=32, intermediate_size=32, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 64, (2, 16))

    def gradients(mode: str, host: HostMemory | None) -> list[torch.Tensor]:
        one = copy.deepcopy(model).bfloat16()
        for layer in one.model.layers if mode == "selective" else ():
            recompute.recompute_in_backward(layer, selective=True, host=host)
        one(input_ids=ids, labels=ids).loss.backward()
        return [p.grad for p in one.parameters()]

    plain = gradients("none", None)
    for host in (None, HostMemory(pin=False)):
        # A rounding to bf16 may fall to the other side; biases added twice change far more.
        assert relative_difference(gradients("selective", host), plain) < 0.01


@pytest.mark.parametrize("selective", [False, True])
def test_what_waits_on_the_host_gives_the_same_gradients_and_is_let_go(selective, monkeypatch):
    """A layer's turn in the backward fetches that of the layer before, each tensor once."""
    monkeypatch.setattr(recompute, "_THIN", 0)

    def gradients(host: HostMemory | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
        for layer in layers:
            recompute.recompute_in_backward(layer, selective=selective, host=host)
        model = torch.nn.Sequential(*layers)
        for seed in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            model(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain, order, alive = gradients(None), [], weakref.WeakSet()

    class Watched(host_memory.OnHost):
        def __init__(self, tensor, group, pin):
            super().__init__(tensor, group, pin)
            alive.add(self)
            order.append(("kept", id(group)))

        def start(self):
            if self._back is None and not self._is_returned:
                order.append(("fetched", id(self._group)))
            super().start()

        def get(self):
            order.append(("used", id(self._group)))
            return super().get()

    gc.disable()  # as in training
    try:
        with mock.patch.object(host_memory, "OnHost", Watched):
            assert relative_difference(gradients(HostMemory(pin=False)), plain) < CLOSE
        assert not alive
    finally:
        gc.enable()
    kinds = [what for what, _ in order]
    assert kinds.count("kept") == kinds.count("fetched") == kinds.count("used") > 0
    first = order[: len(order) // 2]  # of two steps
    last, middle, _ = reversed(list(dict.fromkeys(g for what, g in first if what == "kept")))
    begins, fetched, used = (
        first.index(key) for key in (("used", last), ("fetched", middle), ("used", middle))
    )
    assert begins < fetched < used


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_state_is_kept_for_a_recomputation_that_needs_it(dropout, monkeypatch):
    def gradients(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout))
        if recomputed:
            recompute.recompute_in_backward(layer)
        for _ in range(3):
            layer(torch.ones(4, 8)).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    with mock.patch.object(recompute, "checkpoint", wraps=recompute.checkpoint) as used:
        found = gradients(True)
    kept = [call.kwargs["preserve_rng_state"] for call in used.call_args_list]
    assert kept == ([True] * 3 if dropout else [True, False, False])
    assert relative_difference(found, gradients(False)) < CLOSE
    # The control: dropout that is not seen drops others in the recomputation.
    monkeypatch.setattr(recompute, "get_random_state", lambda: [torch.zeros(1)])
    assert (relative_difference(gradients(True), gradients(False)) < CLOSE) is (not dropout)


def test_reshard_is_a_policy_of_each_unit(folders):
    def told(**changes: Any) -> dict[str, Any]:
        with fake_world(8):
            units = sharded_of(build(folders["llama"], 8, knobs(**changes))).plan.units
            return {u.name: u.reshard_after_forward for u in units}

    layer = {f"model.layers.{i}" for i in range(LAYERS)}
    assert told() == dict.fromkeys(layer, True) | {"(root)": None}
    assert told(reshard_after_forward=True) == dict.fromkeys({*layer, "(root)"}, True)
    assert told(reshard_after_forward=False) == dict.fromkeys({*layer, "(root)"}, False)
    assert told(reshard_after_forward=2) == dict.fromkeys(layer, 2) | {"(root)": None}
    some = told(reshard_after_forward_overrides={"layers.3": False, "layers.0": 4})
    assert (some["model.layers.3"], some["model.layers.0"], some["model.layers.1"]) == (
        False,
        4,
        True,
    )
    assert told(embedding_units=True)["lm_head"] is False
    with pytest.raises(ShardingError, match="must divide the 8"):
        told(reshard_after_forward_overrides={"layers.3": 3})
    with pytest.raises(ShardingError, match="names no unit; the units are"):
        told(reshard_after_forward_overrides={"mlp": True})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"layer_classes": ["LlamaDecoderLayr"]},
            ModelError,
            "LlamaDecoderLayr' matches no module.*LlamaDecoderLayer",
        ),
        (
            {"param_dtype_overrides": {"router": "float32"}},
            ModelError,
            "'router' matches no module",
        ),
        (
            {"ignored_parameters": ["*.norn.weight"]},
            ModelError,
            "matches no parameter.*norm.weight",
        ),
        ({"layer_classes": ["MLP"]}, ModelError, "LlamaMLP"),
        ({"layer_classes": ["LlamaRotaryEmbedding"]}, ShardingError, "no unit but the root"),
        (
            {"torch_compile": "layer", "layer_classes": PARTS},
            ShardingError,
            "with the unit model.layers.0.self_attn inside",
        ),
        # Containers have no forward: as layers they would do nothing.
        (
            {"layer_classes": ["layers"]},
            ModelError,
            r"'layers' matches only model.layers, .* never called; name those: model.layers.\*",
        ),
        ({"layer_classes": ["ModuleList"]}, ModelError, "which holds modules and is never called"),
        (
            {"torch_compile": "layer", "torch_compile_backend": "nope"},
            ShardingError,
            "torch_compile_backend 'nope' is none of torch .*inductor",
        ),
        (
            {"ignored_parameters": ["*"]},
            ShardingError,
            "or name fewer in sharding",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(changes, error, message, folders):
    with fake_world(8), pytest.raises(error, match=message):
        build(folders["llama"], 8, knobs(**changes))


def test_the_table_shows_the_plan(folders):
    cfg = ShardingConfig(
        dp_shard=4,
        param_dtype_overrides={"*norm": "float32"},
        embedding_units=True,
        reshard_after_forward_overrides={"layers.3": False},
        forward_prefetch=2,
    )
    with fake_world(8):
        model = build(folders["llama"], 8, cfg)
        rows = {row.name: row for row in unit_rows(sharded_of(model), cfg)}
        table = format_unit_table(sharded_of(model), cfg)
    total = sum(p.numel() for p in model.parameters())
    assert sum(row.parameters for row in rows.values()) == total
    row, inside = rows["model.layers.1"], rows["model.layers.1.input_layernorm"]
    size = row.parameters
    assert (row.stored, row.computed, row.reduced) == ("float32", "bfloat16", "float32")
    assert (row.bytes_sharded, row.bytes_unsharded) == (size, 2 * size)  # a quarter of 4 bytes; 2
    assert (inside.computed, inside.modules) == ("float32", 2)
    assert (rows["model.layers.3"].reshard, row.reshard, rows["lm_head"].reshard) == (
        "no",
        "yes",
        "no",
    )
    assert "model.layers.{0..2} " in table
    assert "2 / auto" in table


# --------------------------------------------------------------------------------------------------
# Values: gloo
# --------------------------------------------------------------------------------------------------

BF16 = ShardingConfig()
CONFIGS: dict[str, tuple[str, ShardingConfig]] = {
    "plain": ("llama", FP32),
    "reshard_true": ("llama", knobs(reshard_after_forward=True)),
    "reshard_false": ("llama", knobs(reshard_after_forward=False)),
    "reshard_one_layer_kept": ("llama", knobs(reshard_after_forward_overrides={"layers.1": False})),
    "sublayer_units": ("llama", knobs(layer_classes=PARTS)),
    "embedding_units": ("llama", knobs(embedding_units=True)),
    "embedding_units_tied": ("tied", knobs(embedding_units=True)),
    "tied": ("tied", FP32),
    "layer_classes": ("llama", knobs(layer_classes=["LlamaMLP", "LlamaAttention"])),
    "ignored": ("llama", knobs(ignored_parameters=["*norm.weight", "*layernorm.weight"])),
    "offload": ("llama", knobs(cpu_offload=True)),
    "prefetch": ("llama", knobs(forward_prefetch=2, backward_prefetch=2)),
    "prefetch_sublayers": (
        "llama",
        knobs(forward_prefetch=1, backward_prefetch=1, layer_classes=PARTS),
    ),
    "recompute_full": ("llama", knobs(activation_checkpointing="full")),
    "recompute_second": ("llama", knobs(activation_checkpointing=2)),
    "recompute_mlp": ("llama", knobs(activation_checkpointing=True, layer_classes=["mlp"])),
    "recompute_selective": ("llama", knobs(activation_checkpointing="selective")),
    "recompute_offload": ("llama", knobs(activation_checkpointing="full", activation_offload=True)),
    "recompute_selective_offload": (
        "llama",
        knobs(activation_checkpointing="selective", activation_offload=True),
    ),
    "recompute_sublayers": ("llama", knobs(activation_checkpointing="full", layer_classes=PARTS)),
    "compile_layer": ("llama", knobs(torch_compile="layer", torch_compile_backend="aot_eager")),
    "compile_layer_recompute": (
        "llama",
        knobs(
            torch_compile="layer",
            torch_compile_backend="aot_eager",
            activation_checkpointing="full",
        ),
    ),
    "compile_layer_experts": (
        "experts",
        knobs(torch_compile="layer", torch_compile_backend="aot_eager"),
    ),
    "gpu_defaults": (
        "llama",
        knobs(
            torch_compile="layer",
            torch_compile_backend="aot_eager",
            embedding_units=True,
            activation_checkpointing="selective",
            accumulation="keep_gathered",
        ),
    ),
    "compile_model": ("llama", knobs(torch_compile="model", torch_compile_backend="aot_eager")),
    "experts": ("experts", FP32),
    "bf16": ("llama", BF16),
    "bf16_reduce": ("llama", dataclasses.replace(BF16, reduce_dtype="bfloat16")),
    "bf16_norms_head": (
        "llama",
        dataclasses.replace(BF16, param_dtype_overrides={"*norm": "float32", "lm_head": "float32"}),
    ),
    "bf16_router": (
        "experts",
        dataclasses.replace(BF16, param_dtype_overrides={"mlp.gate": "float32"}),
    ),
    "bf16_norms_head_tied": (
        "tied",
        dataclasses.replace(BF16, param_dtype_overrides={"*norm": "float32", "lm_head": "float32"}),
    ),
    # Units inside what is recomputed: one of a module each, one of several a layer.
    **{
        f"bf16_{key}{suffix}": (
            kind,
            dataclasses.replace(
                BF16,
                param_dtype_overrides=dict.fromkeys(patterns, "float32"),
                activation_checkpointing=recompute,
            ),
        )
        for key, kind, patterns in (
            ("mlp", "llama", ["mlp"]),
            ("norms_mlp", "llama", ["*norm", "mlp"]),
            ("norms_gate", "experts", ["*norm", "mlp.gate"]),
        )
        for suffix, recompute in (("", "none"), ("_recompute", "full"))
    },
}


# torch's name of a collective (2.13, and before) -> ours
NAMES = {
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Collectives:
    """Counts FSDP's collectives, and the dtypes that they move, while entered."""

    def __enter__(self) -> "Collectives":
        self.calls: collections.Counter = collections.Counter()
        self.elements: collections.Counter = collections.Counter()  # of what they give
        self.dtypes: dict[str, set[torch.dtype]] = collections.defaultdict(set)
        self.groups: set[tuple[str, int]] = set()
        self._saved = {n: getattr(dist, n) for n in NAMES if hasattr(dist, n)}
        for name, real in self._saved.items():
            setattr(dist, name, self._counting(NAMES[name], real))
        return self

    def _counting(self, name: str, real: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            self.calls[name] += 1
            self.elements[name] += tensors[0].numel()
            self.groups.add((name, kwargs["group"].size()))
            self.dtypes[name].add(tensors[0].dtype)
            return real(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, real in self._saved.items():
            setattr(dist, name, real)


class Seen:
    """Notes the dtypes that modules get and give, and how often they run, while entered."""

    def __init__(self, model: Any):
        self._model = model

    def __enter__(self) -> "Seen":
        self.runs: collections.Counter = collections.Counter()
        self.inputs: dict[str, torch.dtype] = {}
        self.outputs: dict[str, torch.dtype] = {}
        self.weights: dict[str, torch.dtype] = {}
        self._handles = [
            module.register_forward_hook(self._note(name))
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear)
            or name.endswith(("norm", "mlp.gate", "layernorm"))
        ]
        return self

    def _note(self, name: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            self.runs[name] += 1
            self.inputs[name] = args[0].dtype
            self.weights[name] = module.weight.dtype
            out = out[0] if isinstance(out, tuple) else out
            self.outputs[name] = out.dtype

        return hook

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def run_knobs(rank: int, world: int, folders: dict[str, str], configs: dict) -> dict[str, dict]:
    found = {}
    recompute._THIN = 0  # as all products of these small models are
    rows = batch(4)
    mine = {k: v[rank::world] for k, v in rows.items()}
    for key, (kind, cfg) in configs.items():
        torch._dynamo.reset()
        model = build(folders[kind], world, cfg)
        load_pretrained(model, folders[kind], "cpu")
        model.train()
        optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
        loss_sum(model, mine).detach()  # finds out once how the head is used, records the order
        reshard(model)
        compiled = cfg.torch_compile not in ("none", "auto")
        seen = {} if compiled else observe(model, mine, world)  # hooks would be compiled too
        optimizer.zero_grad()
        steps = []
        for _ in range(2):
            stats = train_step(model, optimizer, [mine])
            steps.append((float(stats.loss), float(stats.grad_norm)))
        if compiled:
            seen["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            seen["breaks"] = dict(torch._dynamo.utils.counters["graph_break"])
        seen["grad_kept"] = [p.grad is not None for p in model.parameters()]
        seen["steps"] = steps
        seen["evaluated"] = float(evaluate(model, {"": [mine]})[0].loss)
        seen["names"] = [n for n, _ in model.named_parameters()]
        seen["sharded_after_evaluation"] = {
            n for n, p in model.named_parameters() if isinstance(p, DTensor)
        }
        seen["units"] = len(sharded_of(model).plan.units)
        if prefetch := sharded_of(model).prefetch:
            seen["wired"] = prefetch.wired
            seen["order"] = prefetch.begun
        seen["weights_after"] = {
            n: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
            for n, p in model.named_parameters()
        }
        found[key] = seen
        torch._dynamo.utils.counters.clear()
    return found


def observe(model: Any, rows: dict[str, torch.Tensor], world: int) -> dict[str, Any]:
    """Return what one forward and backward did, and how things lay between them."""
    with Seen(model) as modules, Collectives() as comms, SavedBytes() as saved:
        loss = loss_sum(model, rows)
        after = {n: _layout(p, world) for n, p in model.named_parameters()}
        loss.backward()
    devices = {p.grad.device.type for p in model.parameters()}
    logits = model(input_ids=rows["input_ids"]).logits.dtype
    reshard(model)
    return {
        "runs": dict(modules.runs),
        "inputs": modules.inputs,
        "outputs": modules.outputs,
        "weights": modules.weights,
        "calls": dict(comms.calls),
        "dtypes": dict(comms.dtypes),
        "after_forward": after,
        "saved": saved.total,
        "logits": logits,
        "grad_devices": devices,
    }


def _layout(parameter: Any, world: int) -> str:
    if not isinstance(parameter, DTensor):
        return "gathered"
    ranks = parameter.device_mesh.shape[-1]
    return "sharded" if ranks == world else f"on {ranks}"


class SavedBytes:
    """Sums the bytes that autograd keeps for the backward, while entered."""

    def __enter__(self) -> "SavedBytes":
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.total = sum(self._kept.values())


@pytest.fixture(scope="module")
def measured(folders) -> list[dict[str, dict]]:
    return run_ranks(run_knobs, 2, folders, CONFIGS)


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, dict]:
    return {kind: plain_steps(folder) for kind, folder in folders.items()}


def plain_steps(folder: str) -> dict[str, Any]:
    """Two steps in one plain process, transformers' own loss over the whole batch, torch's own
    clipping.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_cache=False
    ).train()
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    steps = []
    for _ in range(2):
        loss = model(**batch(4)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return {"steps": steps, "weights": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.slow
@pytest.mark.parametrize("key", CONFIGS)
def test_the_loss_stays_that_of_one_process(key, measured, expected):
    kind, cfg = CONFIGS[key]
    exact = cfg.param_dtype == "float32"
    plain = expected[kind]
    for rank in measured:
        for (loss, norm), (loss0, norm0) in zip(rank[key]["steps"], plain["steps"], strict=True):
            assert loss == pytest.approx(loss0, rel=1e-5 if exact else 0.01), key
            assert norm == pytest.approx(norm0, rel=1e-4 if exact else 0.1), key
        if exact:
            assert rank[key]["names"] == list(plain["weights"]), key
            for name, value in plain["weights"].items():
                assert (rank[key]["weights_after"][name] - value).abs().max() < 2e-4, (key, name)
        ignored = {n for n in rank[key]["names"] if cfg.ignored_parameters and "norm" in n}
        assert rank[key]["sharded_after_evaluation"] == set(rank[key]["names"]) - ignored


@pytest.mark.slow
def test_reshard_after_forward(measured):
    runs = measured[0]
    gathers = {k: runs[k]["calls"]["all_gather"] for k in runs if "calls" in runs[k]}
    # Forward: each unit once. Backward: again what was freed; the root is kept where it is auto.
    assert gathers["plain"] == (LAYERS + 1) + LAYERS
    assert gathers["reshard_true"] == 2 * (LAYERS + 1)
    assert gathers["reshard_false"] == LAYERS + 1
    assert gathers["reshard_one_layer_kept"] == gathers["plain"] - 1
    after = {k: runs[k]["after_forward"] for k in runs if "after_forward" in runs[k]}
    weight = "model.layers.{}.mlp.up_proj.weight"
    assert {after["plain"][weight.format(i)] for i in range(LAYERS)} == {"sharded"}
    assert after["plain"]["lm_head.weight"] == "gathered"
    assert set(after["reshard_true"].values()) == {"sharded"}
    assert set(after["reshard_false"].values()) == {"gathered"}
    assert after["reshard_one_layer_kept"][weight.format(1)] == "gathered"
    assert after["reshard_one_layer_kept"][weight.format(0)] == "sharded"


@pytest.mark.slow
def test_finer_and_coarser_units(measured):
    runs = measured[0]
    gathers = {k: runs[k]["calls"]["all_gather"] for k in runs if "calls" in runs[k]}
    scatters = {k: runs[k]["calls"]["reduce_scatter"] for k in runs if "calls" in runs[k]}
    assert scatters["plain"] == LAYERS + 1
    assert scatters["sublayer_units"] == 3 * LAYERS + 1
    assert scatters["embedding_units"] == LAYERS + 3
    assert scatters["layer_classes"] == 2 * LAYERS + 1
    # The embedding is gathered once, freed, and not needed in the backward; the head is kept.
    assert gathers["embedding_units"] <= gathers["plain"] + 3
    assert runs["embedding_units"]["after_forward"]["model.embed_tokens.weight"] == "sharded"
    assert runs["plain"]["after_forward"]["model.embed_tokens.weight"] == "gathered"
    assert runs["embedding_units"]["after_forward"]["lm_head.weight"] == "gathered"


@pytest.mark.slow
def test_precision_is_what_was_asked(measured):
    runs = measured[0]
    proj, norm, head = f"{LAYER}.self_attn.q_proj", f"{LAYER}.input_layernorm", "lm_head"
    half, single = torch.bfloat16, torch.float32
    plain, bf16 = runs["plain"], runs["bf16"]
    assert (plain["weights"][proj], plain["inputs"][proj]) == (single, single)
    assert (bf16["weights"][proj], bf16["inputs"][proj], bf16["outputs"][norm]) == (
        half,
        half,
        half,
    )
    assert bf16["dtypes"]["all_gather"] == {half}
    assert bf16["dtypes"]["reduce_scatter"] == {single}
    assert runs["bf16_reduce"]["dtypes"]["reduce_scatter"] == {half}
    assert bf16["logits"] == half
    fine = runs["bf16_norms_head"]
    assert (fine["weights"][norm], fine["inputs"][norm], fine["outputs"][norm]) == (
        single,
        single,
        half,
    )
    assert (fine["weights"][head], fine["weights"][proj]) == (single, half)
    assert fine["logits"] == single
    tied = runs["bf16_norms_head_tied"]
    assert (tied["weights"][head], tied["inputs"][head]) == (single, single)
    router = runs["bf16_router"]
    gate = f"{LAYER}.mlp.gate"
    assert (router["weights"][gate], router["inputs"][gate]) == (single, single)
    assert router["weights"][proj] == half


@pytest.mark.slow
def test_each_module_of_a_unit_is_cast(measured):
    """torch 2.11 and 2.12 cast the inputs of the first and the output of the last only."""
    half, single = torch.bfloat16, torch.float32
    norms = [f"{LAYER}.{n}" for n in ("input_layernorm", "post_attention_layernorm")]
    heads = [f"{LAYER}.self_attn.{n}_norm" for n in "qk"]
    for key, names in (
        ("bf16_norms_head", norms),
        ("bf16_norms_mlp", norms),
        ("bf16_norms_gate", norms + heads),
    ):
        seen = measured[0][key]
        for name in names:
            assert (seen["inputs"][name], seen["outputs"][name]) == (single, half), (key, name)


@pytest.mark.slow
def test_recomputed_units_of_another_dtype_give_the_same_gradients(measured):
    """torch 2.11 and 2.12 cast nothing where a recomputation begins inside a unit's backward."""
    for rank in measured:
        for key in ("bf16_mlp", "bf16_norms_mlp", "bf16_norms_gate"):
            again = rank[f"{key}_recompute"]
            for step, plain in zip(again["steps"], rank[key]["steps"], strict=True):
                assert step == pytest.approx(plain, rel=1e-3), key
            for name, value in rank[key]["weights_after"].items():
                # Adam's first steps follow signs, also those of gradients that are rounding errors.
                moved = (again["weights_after"][name] - value).abs() > 1e-5
                assert moved.float().mean() < 0.02, (key, name)


@pytest.mark.slow
def test_offloaded_parts_are_in_host_memory_and_no_gradient_outlives_its_step(measured):
    runs = measured[0]
    assert runs["offload"]["grad_devices"] == {"cpu"}
    assert not any(runs["offload"]["grad_kept"] + runs["plain"]["grad_kept"])


def test_memory_is_pinned_where_a_device_copies_it():
    cfg = knobs(cpu_offload=True)
    assert build_offload_policy(cfg, "cuda").pin_memory is True
    assert build_offload_policy(cfg, "cpu").pin_memory is False
    assert not isinstance(
        build_offload_policy(FP32, "cuda"), type(build_offload_policy(cfg, "cpu"))
    )


ACCUMULATION = ("auto", "keep_gathered", "reduce_once", "reduce_each")


@pytest.mark.slow
def test_accumulation_gathers_and_reduces_once_a_step_where_memory_allows(folders):
    for found in run_ranks(accumulate, 2, folders["llama"]):
        units, elements = LAYERS + 1, found["elements"]
        # Forward, and backward but for the root, which stays gathered.
        assert found["one"]["all_gather"] == 2 * units - 1
        assert found["reduce_once"]["all_gather"] == 4 * (2 * units - 1)  # what it was
        for way in ("auto", "keep_gathered"):
            assert found[way]["all_gather"] == units <= 1.1 * found["one"]["all_gather"], way
        for way in ACCUMULATION:
            each = way == "reduce_each"
            assert found[way]["reduce_scatter"] == units * (4 if each else 1), way
            # Without reduction between, whole gradients are kept; with it, this rank's parts.
            assert found[way]["kept"] == (elements // 2 if each else elements), way
            assert found[way]["losses"] == pytest.approx(found["auto"]["losses"], rel=1e-6), way
        for way in ("keep_gathered", "reduce_once"):  # to the bit, over steps that learn
            assert found[way]["losses"] == found["auto"]["losses"]
        assert found["auto"]["losses"][-1] < found["auto"]["losses"][0] - 0.01
        assert found["no room"] == found["reduce_once"]["all_gather"]
        assert found["large"]["reduce_scatter"] == 4 * units


def accumulate(rank: int, world: int, folder: str) -> dict:
    found: dict[Any, Any] = {}
    micro = [{k: v[rank::world] for k, v in batch(4, seed).items()} for seed in range(4)]

    def steps(way: str, micro: list) -> tuple[Any, dict[str, Any]]:
        model = build(folder, world, knobs(accumulation=way))
        load_pretrained(model, folder, "cpu")
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        losses = []
        for _ in range(4):  # `auto` has decided after two
            with Collectives() as comms:
                losses.append(float(train_step(model, optimizer, micro).loss))
        return model, dict(comms.calls) | {"losses": losses}

    found["one"] = steps("auto", micro[:1])[1]
    for way in ACCUMULATION:
        model, found[way] = steps(way, micro)
        sharded_of(model).accumulation.begin(micro[0]["labels"], 0, 2)
        loss_sum(model, micro[0]).backward()
        reshard(model)
        gradients = [g for g in gc.get_objects() if isinstance(g, torch.Tensor)]
        found[way]["kept"] = _gradient_elements(model, gradients)
        found["elements"] = sum(p.numel() for p in model.parameters())
        del model, gradients
        gc.collect()
    # On a device that is nearly full on one rank only, and on one that is small.
    with mock.patch.object(accumulation, "_measure_memory", return_value=(10**9 * rank, 10**9, 0)):
        found["no room"] = steps("auto", micro)[1]["all_gather"]
    with mock.patch.object(
        accumulation, "_measure_memory", return_value=(0, 4 * found["elements"], 0)
    ):
        found["large"] = steps("auto", micro)[1]
    return found


@pytest.mark.parametrize(
    ("held", "lengths", "room"),
    [
        (0, [7, 7], True),  # of 60 free at the peak the margin takes 10, the gathered model 30
        (19, [7, 7], True),
        (21, [7, 7], False),
        (0, [7, 8], False),  # longer samples may come: the activations' 31 once more
    ],
)
def test_room_for_the_gathered_model_on_a_device(monkeypatch, held, lengths, room):
    sizes = {"mem_get_info": (40 - held, 100), "memory_reserved": 60}  # 40 of them were in use
    sizes |= {"max_memory_allocated": 40, "memory_allocated": 9}
    calls = {name: (lambda _, value=value: value) for name, value in sizes.items()}
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(**calls))
    with fake_world(2):
        model = torch.nn.Linear(5, 3, bias=False, device="meta")
        fsdp.fully_shard(model, mesh=init_mesh("cpu", 2, FP32).fsdp)
        found = Accumulation(model, ShardingConfig())
        found._shapes = {torch.Size([2, n]) for n in lengths}
        assert (found._room(torch.device("cuda", 0)) > 0) is room


def test_kept_parameters_are_freed_before_the_optimizer_steps(folders):
    """The control: kept beyond the last micro-batch, the next step would use the old weights."""
    (found,) = run_ranks(forget_to_free, 1, folders["llama"])
    assert found[True] == pytest.approx(found[False], abs=1e-6)  # nothing seems to be learnt
    assert found["right"][-1] < found["right"][0] - 0.01


def forget_to_free(rank: int, world: int, folder: str) -> dict:
    found: dict[Any, Any] = {}
    for key in ("right", "wrong"):
        model = build(folder, world, knobs(accumulation="keep_gathered"))
        load_pretrained(model, folder, "cpu")
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        if key == "wrong":
            for unit in (m for m in model.modules() if hasattr(m, "unshard")):
                unit.set_reshard_after_backward = lambda *_, **__: None
                state = unit._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)  # one a unit before torch 2.13
                group = groups[0] if groups else state._fsdp_param_group
                group.reshard_after_backward = False
        micro = [batch(4), batch(4)]
        found[key] = [float(train_step(model, optimizer, micro).loss) for _ in range(3)]
    found[False], found[True] = found["wrong"][0], found["wrong"][-1]
    return found


def alone(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Three steps of three micro-batches, by each way."""
    found: dict[str, Any] = {}
    micro = [{k: v[rank::world] for k, v in batch(4, seed).items()} for seed in range(3)]
    for way in ("reduce_once", "reduce_each", "auto"):
        model = build(folder, world, knobs(accumulation=way))
        load_pretrained(model, folder, "cpu")
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
        with Collectives() as comms:
            stats = [train_step(model, optimizer, micro) for _ in range(3)]
        weights = [p.to_local() for p in model.parameters()]
        found[way] = {
            "bits": [float(x) for one in stats for x in (one.loss, one.grad_norm)],
            "weights": [w.clone() for w in weights],
            "reduced": comms.calls["reduce_scatter"],
            "each": sharded_of(model).accumulation.reduce_each,
        }
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_reduces_each_time_which_changes_no_bit_there(folders, world):
    """What is reduced among one rank moves nothing, and its gradient is held once."""
    for found in run_ranks(alone, world, folders["llama"]):
        once, each, auto = (found[way] for way in ("reduce_once", "reduce_each", "auto"))
        assert (once["each"], each["each"], auto["each"]) == (False, True, world == 1)
        same = all(map(torch.equal, once["weights"], each["weights"]))
        assert (once["bits"] == each["bits"] and same) == (world == 1)
        assert auto["bits"] == (each if world == 1 else once)["bits"]


@pytest.mark.slow
def test_replicas_meet_once_a_step(folders):
    """HSDP: with `reduce_each` gradients are reduced in the node each time, across nodes once."""
    for found in run_ranks(replicas, 4, folders["llama"]):
        units = LAYERS + 1
        assert found["reduce_once"] == (units, units)
        assert found["reduce_each"] == (3 * units, units)
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)


def replicas(rank: int, world: int, folder: str) -> dict:
    found: dict[Any, Any] = {"losses": []}
    micro = [{k: v[rank::world] for k, v in batch(4, seed).items()} for seed in range(3)]
    for way in ("reduce_once", "reduce_each"):
        model = build(folder, world, knobs(accumulation=way, dp_replicate=2))
        load_pretrained(model, folder, "cpu")
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
        train_step(model, optimizer, micro)
        with (
            Collectives() as comms,
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        ):
            found["losses"].append(float(train_step(model, optimizer, micro).loss))
        ours = (None, dist.group.WORLD)  # sums of the step, not of gradients
        calls = [c for c in reduced.call_args_list if c.kwargs.get("group") not in ours]
        found[way] = comms.calls["reduce_scatter"], len(calls)
    return found


def _gradient_elements(model: Any, tensors: list[torch.Tensor]) -> int:
    """Return the elements of gradients that are held: reduced ones, and whole ones not yet so."""
    reduced = sum(p.grad.to_local().numel() for p in model.parameters() if p.grad is not None)
    if reduced:
        return reduced
    whole = [t.grad for t in tensors if t.is_leaf and t.requires_grad and t.grad is not None]
    return sum(g.numel() for g in {id(g): g for g in whole}.values())


@pytest.mark.slow
def test_resharding_to_fewer_ranks(folders):
    for found in run_ranks(reshard_to_two, 4, folders["llama"]):
        assert found["layout"] == {"on 2", "gathered"}  # the layers, the root
        assert found["gathered_from"] == {4, 2}  # the forward's all-gathers, the backward's
        assert found["loss"] == pytest.approx(found["plain loss"], rel=1e-6)


def reshard_to_two(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine = {k: v[rank::world] for k, v in batch(4).items()}
    for key, cfg in (("plain ", FP32), ("", knobs(reshard_after_forward=2))):
        model = build(folder, world, cfg)
        load_pretrained(model, folder, "cpu")
        model.train()
        loss_sum(model, mine).detach()
        reshard(model)
        with Collectives() as comms:
            loss = loss_sum(model, mine)
            found["layout"] = {_layout(p, world) for p in model.parameters()}
            loss.backward()
        found["gathered_from"] = {size for name, size in comms.groups if name == "all_gather"}
        optimizer = build_optimizer(model, OptimConfig())
        optimizer.zero_grad()
        found[f"{key}loss"] = float(train_step(model, optimizer, [mine]).loss)
    return found


@pytest.mark.slow
def test_prefetch_follows_the_recorded_order(measured):
    names = [f"model.layers.{i}" for i in range(LAYERS)]
    one = measured[0]["prefetch"]
    assert one["order"] == names
    assert one["wired"][""] == (names[:2], names[:1:-1])
    assert one["wired"]["model.layers.0"] == (names[1:3], [])
    assert one["wired"]["model.layers.3"] == ([], names[2:0:-1])
    inner = measured[0]["prefetch_sublayers"]
    first = inner["order"].index
    assert (
        first(LAYER) < first(f"{LAYER}.self_attn") < first(f"{LAYER}.mlp") < first("model.layers.1")
    )
    # Gathering ahead costs no all-gather more.
    calls = {k: measured[0][k]["calls"]["all_gather"] for k in ("plain", "prefetch")}
    assert calls["prefetch"] == calls["plain"]


@pytest.mark.slow
def test_recomputation_runs_what_it_covers_twice(measured):
    runs = {k: v["runs"] for k, v in measured[0].items() if "runs" in v}
    up, query = "model.layers.{}.mlp.up_proj", "model.layers.{}.self_attn.q_proj"
    assert [runs["plain"][up.format(i)] for i in range(LAYERS)] == [1] * LAYERS
    for key in ("recompute_full", "recompute_selective", "recompute_offload"):
        assert [runs[key][up.format(i)] for i in range(LAYERS)] == [2] * LAYERS, key
    assert [runs["recompute_second"][up.format(i)] for i in range(LAYERS)] == [2, 1] * (LAYERS // 2)
    assert runs["recompute_mlp"][up.format(0)] == 2
    assert runs["recompute_mlp"][query.format(0)] == 1


@pytest.mark.slow
def test_recomputation_keeps_less(measured):
    kept = {k: v["saved"] for k, v in measured[0].items() if "saved" in v}
    assert kept["recompute_full"] < kept["recompute_second"] < kept["plain"]
    assert kept["recompute_full"] < kept["recompute_mlp"] < kept["plain"]
    # What is kept in host memory is not kept by autograd: the inputs of the layers.
    assert kept["recompute_offload"] < kept["recompute_full"]
    assert kept["recompute_selective_offload"] < kept["recompute_selective"]


@pytest.mark.slow
def test_selective_recomputation_runs_no_product_twice(folders):
    counts = run_ranks(product_counts, 2, folders["llama"])[0]
    assert counts["selective"] == counts["none"]
    assert counts["selective_offload"] == counts["none"]
    assert counts["full"] > counts["none"]


def product_counts(rank: int, world: int, folder: str) -> dict[str, int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    recompute._THIN = 0  # as those of this small model are
    found = {}
    for key, cfg in {
        "none": FP32,
        "full": knobs(activation_checkpointing="full"),
        "selective": knobs(activation_checkpointing="selective"),
        "selective_offload": knobs(activation_checkpointing="selective", activation_offload=True),
    }.items():
        model = build(folder, world, cfg)
        load_pretrained(model, folder, "cpu")
        model.train()
        loss_sum(model, batch(2)).backward()
        with Count() as count:
            loss_sum(model, batch(2)).backward()
        found[key] = count.products
    return found


@pytest.mark.slow
def test_identical_layers_share_one_graph_and_names_stay(measured):
    for key in ("compile_layer", "compile_layer_recompute"):
        assert measured[0][key]["graphs"] == 1, measured[0][key]
        assert not measured[0][key]["breaks"]
    assert measured[0]["compile_model"]["graphs"] > 1


# --------------------------------------------------------------------------------------------------
# Real sizes
# --------------------------------------------------------------------------------------------------


def test_configs_of_both_recipes_are_planned(folders, tmp_path, capsys):
    from toolkit.cli import main

    for own in ("train_tokenizer: true", "init: random}, lora: {r: 4"):
        config = tmp_path / "run.yaml"
        config.write_text(f"{{model: {{name_or_path: {folders['llama']}, {own}}}}}")
        assert main(["inspect", "--plan", str(config), "--world_size", "2"]) == 0
        # On GPUs embedding and head are units of their own.
        assert capsys.readouterr().out.count("lm_head  ") == 1


@pytest.mark.slow
def test_seventy_billion_parameters_for_64_ranks_are_planned_in_little_memory(tmp_path):
    """`toolkit inspect --plan` in a process of its own: Llama-70B's shapes, no weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ).save_pretrained(tmp_path)
    config = tmp_path / "run.yaml"
    config.write_text(f"model:\n  name_or_path: {tmp_path}\n  init: random\n")
    code = (
        "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); "
        "from toolkit.formats.container_memory import peak_host_memory; "
        "print(peak_host_memory()); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", "--plan", str(config), "--json"]
    done = subprocess.run(
        [*command, "--world_size", "64"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer, peak = done.stdout.strip().splitlines()
    plan = json.loads(answer)
    assert plan["parameters"] == 70_553_706_496
    assert plan["mesh"] == {"dp_replicate": 1, "dp_shard": 64}
    assert len(plan["units"]) == 83  # on GPUs embedding and head are units of their own
    assert plan["bytes_sharded"] == 4 * plan["parameters"] // 64
    assert 100e6 < int(peak) < 2e9


@pytest.mark.slow
def test_the_peak_of_host_memory_is_this_process_own():
    """Not what the one held that started it, which Linux counts in `ru_maxrss`."""
    code = (
        "import resource; from toolkit.formats.container_memory import peak_host_memory as peak; "
        "theirs = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024; before = peak(); "
        "held = b'x' * 2**28; print(theirs, before, peak())"
    )
    held = b"x" * 3 * 2**30
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs, before, after = map(int, done.stdout.split())
    assert before < 2**30 < len(held) < theirs  # the control: what `ru_maxrss` says
    assert 2**28 <= after - before < 2**29
