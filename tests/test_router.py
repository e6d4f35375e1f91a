"""Balance of experts: the routers' loss, the bias and the z-loss, against plain computations."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from conftest import save_byte_tokenizer, slow
from distributed import run_ranks, run_recipe_ranks
from safetensors.torch import load_file
from sharded import apply_fsdp, init_mesh, sharded_of
from test_loss_head import MAPS, in_one, small_chunks  # noqa: F401
from test_token_logps import assert_close, gradients
from tiny_models import rows, save, tiny_model
from torch.distributed.tensor import DTensor

from toolkit.config.lora import LoraConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import (
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ShardingConfig,
    TrainConfig,
)
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import ConfigError, ModelError, TrainingError
from toolkit.formats.metrics_file import read_metrics
from toolkit.models.attention import attend_within_documents
from toolkit.training import Update, head_loss, train_step
from toolkit.training.loss import _logit_maps, causal_lm_loss
from toolkit.training.metrics import Metrics
from toolkit.training.router import Router, plan_router

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "olmoe", "gpt_oss")
COEFFICIENT = 0.5
LENGTHS = (16, 5, 11, 16, 8, 13, 6)  # tokens of each row before its padding
SPLITS = {1: [[0, 1, 2, 3, 4, 5, 6]], 2: [[0, 1, 2, 3, 4], [5, 6]], 3: [[0], [1, 2, 3, 5], [4, 6]]}
"""Ranks -> rows of each."""


def settings(adapters: Any = None, **train: Any) -> Any:
    return SimpleNamespace(train=TrainConfig(**train), adapters=adapters)


def router_of(model: Any, rate: float = 0.0, loss: Any = "auto") -> Router:
    cfg = settings(router_aux_loss=loss, router_bias_update_rate=rate)
    plan = plan_router(model, cfg)
    assert plan is not None
    return Router(sharded_of(model), plan, rate)


def mixture(kind: str, **changes: Any) -> Any:
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return tiny_model(kind, **{**asked, **changes}).train()


def padded(numbers: list[int]) -> dict[str, torch.Tensor]:
    """Return rows as transformers has them, each of its length; supervised but for its start."""
    every = rows(len(LENGTHS))
    mask = torch.zeros_like(every["labels"])
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    labels = every["input_ids"].masked_fill(mask == 0, IGNORED)
    labels[:, :2] = IGNORED
    found = {"input_ids": every["input_ids"], "attention_mask": mask, "labels": labels}
    return {name: x[numbers] for name, x in found.items()}


def batch_of(numbers: list[int]) -> Batch:
    """Return rows as a run reads them; without any, one that is all padding."""
    batch = padded(numbers or [0])
    if not numbers:
        batch["labels"][:], batch["attention_mask"][:] = IGNORED, 0
    return Batch.of(**batch)


def plain_loss(model: Any, micro_batches: list[list[int]], loss: str) -> torch.Tensor:
    """Return the loss of a step by transformers' own functions, in one process: its cross entropy
    of all rows, its auxiliary loss of all rows of each micro-batch, or of each layer of it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = importlib.import_module(type(base).__module__).load_balancing_loss_func
    tokens = sum(int(padded(m)["attention_mask"].sum()) for m in micro_batches)
    targets = sum(int(batch_of(m).count) for m in micro_batches)
    total: Any = 0.0
    for numbers in micro_batches:
        batch = padded(numbers)
        out, mask = model(**batch), batch["attention_mask"]
        size = (base.num_experts, base.num_experts_per_tok, mask)
        pooled = [out.router_logits]
        layers = pooled if loss == "pooled" else [(x,) for x in out.router_logits]
        aux = torch.stack([own(x, *size) for x in layers]).mean()
        if loss == "pooled":
            assert float(aux) == pytest.approx(float(out.aux_loss), rel=1e-6)
        shifted = batch["labels"][:, 1:].flatten()
        entropy = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), shifted, reduction="sum")
        total = total + entropy / targets + COEFFICIENT * aux * mask.sum() / tokens
    return total


def adapted(model: Any, router: bool) -> Any:
    torch.manual_seed(5)
    named = ["mlp.gate.weight"] if router else []
    cfg = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=named)
    made = peft.get_peft_model(model, cfg)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return made


def step_of(rank: int, world: int, make: Any, loss: str, recompute: str, split: int) -> Any:
    """Return loss, auxiliary loss and the worst gap of a gradient between a step of sharded ranks
    and one plain process.
    """
    model, plain = make(), make()
    mine = SPLITS[world][rank]
    micro = [mine[:split], mine[split:]] if split else [mine]
    all_rows = [(rows[:split], rows[split:]) if split else (rows,) for rows in SPLITS[world]]
    everyone = [[n for part in parts for n in part] for parts in zip(*all_rows, strict=True)]
    expected = plain_loss(plain, everyone, loss)
    expected.backward()
    cfg = ShardingConfig(param_dtype="float32", activation_checkpointing=recompute)
    sharded = apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    router = router_of(model, loss=loss)
    update = Update(sharded, [batch_of(m) for m in micro], router=router)
    for batch in update:
        update.mean(causal_lm_loss(model, batch)).backward()
    gaps = {}
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if q.grad is not None and float(q.grad.abs().max()) > 0:
            assert p.grad is not None, name
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            gaps[name] = float((grad - q.grad).abs().max() / q.grad.abs().max())
    stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
    aux = float(stats.balance.aux)
    return float(expected), float(stats.loss) + COEFFICIENT * aux, aux, gaps


def cases(rank: int, world: int, kinds: tuple[str, ...]) -> list[tuple[Any, ...]]:
    found = []
    for kind in kinds:
        ways = [("pooled", "full", 0), ("layer", "selective", 1)]
        for loss, recompute, split in [*ways, ("pooled", "none", 1)][
            : 3 if kind == KINDS[0] else 2
        ]:
            made = step_of(rank, world, lambda kind=kind: mixture(kind), loss, recompute, split)
            found.append(((kind, loss, recompute, split), *made))
    return found


@pytest.mark.parametrize("world", [2, slow(3)])
def test_loss_and_gradients_are_transformers_on_the_whole_batch(world: int) -> None:
    for found in run_ranks(cases, world, KINDS):
        for case, expected, value, aux, gaps in found:
            assert value == pytest.approx(expected, rel=2e-6), case
            assert aux > 1.9, case  # 2 experts a token
            assert any("gate" in n or "router" in n for n in gaps), case
            assert max(gaps.values()) < 1e-5, (case, max(gaps, key=gaps.__getitem__))


def lora_case(rank: int, world: int) -> list[Any]:
    """The router is frozen, or adapted; the loss reaches adapters below it either way."""
    return [
        step_of(rank, world, lambda r=r: adapted(mixture("qwen3_moe"), r), "pooled", "full", 1)
        for r in (False, True)
    ]


def test_adapters_below_a_frozen_router_and_of_a_router() -> None:
    for rank in run_ranks(lora_case, 2):
        for adapts, (expected, value, _, gaps) in zip((False, True), rank, strict=True):
            assert value == pytest.approx(expected, rel=2e-6)
            assert any("gate" in name for name in gaps) == adapts
            assert max(gaps.values()) < 1e-5


def test_what_fills_rows_up_counts_nowhere() -> None:
    """The same rows padded and packed; filler documents are routed too."""
    cfg, length = ("bfd", 40), 40
    shape = SampleShape(*cfg, pad_id=9, borders=True)
    pieces = []
    for row in range(len(LENGTHS)):
        one = padded([row])
        ids, labels = (one[n][0, : LENGTHS[row]].numpy() for n in ("input_ids", "labels"))
        pieces.append(Piece(ids, labels.copy()))
    packed = shape.batch([shape.sample(pieces[:2]), shape.sample(pieces[2:4])])
    assert packed.real.sum(1).tolist() == [21, 27]
    assert packed.real.shape == (2, length)
    found = {}
    for name, batch in (("padded", batch_of([0, 1, 2, 3])), ("packed", packed)):
        model = mixture("qwen3_moe")
        attend_within_documents(model)
        router = router_of(model, loss="pooled")
        update = Update(sharded_of(model), [batch], router=router)
        for one in update:
            update.mean(causal_lm_loss(model, one)).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
        found[name] = float(stats.balance.aux), stats.balance.loads, grads
    assert found["packed"][0] == pytest.approx(found["padded"][0], rel=1e-6)
    assert torch.allclose(found["packed"][1], found["padded"][1])
    assert_close(found["packed"][2], found["padded"][2])
    wrong = replace(packed, used=None)  # the control: with filler it is another number
    model = mixture("qwen3_moe")
    attend_within_documents(model)
    stats = train_step(
        sharded_of(model),
        torch.optim.SGD(model.parameters(), lr=0.0),
        [wrong],
        router=router_of(model, loss="pooled"),
    )
    assert abs(float(stats.balance.aux) - found["padded"][0]) > 1e-4


# ---- The bias ------------------------------------------------------------------------------------

BIASED = {
    "deepseek_v3": "mlp.gate.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
    "ernie4_5_moe": "mlp.gate.moe_statics.e_score_correction_bias",  # a parameter
}


def biases_of(model: Any, kind: str) -> torch.Tensor:
    found = [*model.named_buffers(), *model.named_parameters()]
    own = [x.full_tensor() if isinstance(x, DTensor) else x for n, x in found if BIASED[kind] in n]
    return torch.stack([x.detach().float().flatten().clone() for x in own])


def moved(rank: int, world: int, kinds: Any) -> dict[str, Any]:
    """Return what three steps make of the biases, the second of which is skipped."""
    found = {}
    for kind in kinds:
        model = tiny_model(kind).train()
        begun = biases_of(model, kind)
        cfg = ShardingConfig(param_dtype="float32", activation_checkpointing="full")
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        router = router_of(model, rate=0.01)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        mine, after = SPLITS[world][rank], [begun]
        for step in range(3):
            micro = [batch_of(mine[:1]), batch_of(mine[1:])]

            def loss(model: Any, batch: Batch, bad: bool = step == 1) -> Any:
                out = causal_lm_loss(model, batch)
                return replace(out, total=out.total * (float("nan") if bad else 1.0))

            train_step(sharded_of(model), optimizer, micro, loss=loss, router=router)
            after.append(biases_of(model, kind))
        found[kind] = after
    return found


@pytest.mark.slow
def test_the_bias_moves_by_the_loads_of_all_ranks_and_micro_batches() -> None:
    alone = run_ranks(moved, 1, tuple(BIASED))[0]
    for kind, (begun, first, skipped, last) in alone.items():
        assert torch.equal(first, skipped), kind
        for before, after in ((begun, first), (skipped, last)):
            steps = (after - before) / 0.01
            assert torch.allclose(steps, steps.round(), atol=1e-3)
            assert set(steps.round().unique().tolist()) <= {-1.0, 0.0, 1.0}
            assert steps.abs().sum() > 0
    for world in (2, 3):
        for found in run_ranks(moved, world, tuple(BIASED)):
            for kind, after in alone.items():
                assert all(map(torch.equal, found[kind], after)), (world, kind)


def test_the_bias_moves_by_the_sign_of_what_a_load_lacks() -> None:
    model = tiny_model("deepseek_v3").train()
    counts = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda *a: counts.append(a[2][2]))
    batch = batch_of([0, 1, 2, 3])
    with torch.no_grad():
        model(**batch.inputs)
    before = biases_of(model, "deepseek_v3")
    router = router_of(model, rate=0.01)
    stats = train_step(
        sharded_of(model), torch.optim.SGD(model.parameters(), lr=0.0), [batch], router=router
    )
    real = batch.real.flatten()
    for layer, chosen in enumerate(counts[: len(before)]):
        load = torch.bincount(chosen[real].flatten(), minlength=before.shape[1]).float()
        expected = before[layer] + 0.01 * (load.mean() - load).sign()
        assert torch.allclose(biases_of(model, "deepseek_v3")[layer], expected)
        assert float(stats.balance.loads[layer]) == pytest.approx(float(load.max() / load.mean()))


def last_loads(rate: float) -> float:
    """Return the largest load over the mean after some steps from one-sided routers."""
    model = tiny_model("deepseek_v3").train()
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.3, 0.3, 0.0, 0.0]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    router = router_of(model, rate=rate)
    loads = []
    for _ in range(40):
        stats = train_step(sharded_of(model), optimizer, [batch_of([0, 1, 2, 3])], router=router)
        loads.append(float(stats.balance.loads.max()))
    return sum(loads[-5:]) / 5


def test_the_bias_evens_loads() -> None:
    even, control = last_loads(0.01), last_loads(0.0)
    assert even < 1.25
    assert control > 1.6


# ---- Compiled layers and recipes -----------------------------------------------------------------


def compiled_case(rank: int, world: int, recompute: str) -> dict[str, Any]:
    """Return what two steps give with plain and with compiled layers, and why graphs broke."""
    counters, found = importlib.import_module("torch._dynamo.utils").counters, {}
    for compiled in ("none", "layer"):
        # As a run builds it.
        model = mixture("qwen3_moe", output_router_logits=False, num_hidden_layers=5)
        cfg = ShardingConfig(
            param_dtype="float32",
            activation_checkpointing=recompute,
            torch_compile=compiled,
            torch_compile_backend="aot_eager",
        )
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        router = router_of(model, loss="layer")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [batch_of([0, 1]), batch_of([2, 3])]
        steps = [train_step(sharded_of(model), optimizer, batches, router=router) for _ in "ab"]
        found[compiled] = [x for s in steps for x in (float(s.loss), float(s.balance.aux))]
    return found | {"breaks": dict(counters["graph_break"]), "graphs": dict(counters["stats"])}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_compiled_layers_stay_whole(recompute: str) -> None:
    found = run_ranks(compiled_case, 1, recompute)[0]
    assert found["graphs"]["unique_graphs"] == 1  # of five layers
    assert found["breaks"] == {}
    assert found["layer"] == pytest.approx(found["none"], rel=1e-5)


def saved(kind: str, folder: Path, **changes: Any) -> Path:
    model = tiny_model(kind, vocab_size=260, **changes)
    return save_byte_tokenizer(save(model, folder, kind))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases, three layers of which two route."""
    return saved("deepseek_v3", tmp_path_factory.mktemp("router") / "model")


def pretrain(model: Path, text: Path, output: Path, world: int, *flags: object) -> str:
    given = {
        "model.name_or_path": model,
        "output_dir": output,
        "data.train_files": text,
        "data.sequence_length": 64,
        "data.eval_split": 0.0,
        "sharding.param_dtype": "float32",
        "optim.learning_rate": 1e-3,
        "optim.lr_scheduler_type": "constant",
        "optim.warmup_steps": 0,
        "train.max_steps": 4,
        "train.logging_steps": 1,
        "train.global_batch_size": 6,
        "train.per_device_train_batch_size": 1,
        "train.router_bias_update_rate": 0.01,
        "checkpoint.save_steps": 2,
        "checkpoint.export_at_end": True,
    }
    known = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    done = run_recipe_ranks("pretrain", world, *known, *map(str, flags), cwd=output.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported_biases(output: Path) -> dict[str, torch.Tensor]:
    file = output / "exports/step-00000004/model.safetensors"
    return {n: x for n, x in load_file(file).items() if n.endswith("e_score_correction_bias")}


@pytest.mark.slow
def test_a_run_keeps_the_bias_in_checkpoints_resumes_and_exports(
    deepseek: Path, text_file: Path, tmp_path: Path
) -> None:
    said = pretrain(deepseek, text_file, tmp_path / "calm", 3)
    assert "bias of experts changes by 0.01 after each step" in said
    half = ("--train.max_steps", 2, "--checkpoint.export_at_end", False)
    pretrain(deepseek, text_file, tmp_path / "resumed", 1, *half)
    pretrain(deepseek, text_file, tmp_path / "resumed", 2)
    calm, resumed = (exported_biases(tmp_path / name) for name in ("calm", "resumed"))
    assert len(calm) == 2
    before = load_file(deepseek / "model.safetensors")
    for name, bias in calm.items():
        steps = (bias - before[name]) / 0.01
        assert torch.allclose(steps, steps.round(), atol=1e-3), steps
        assert 0 < float(steps.abs().max()) < 4.1
        assert torch.equal(bias, resumed[name])
    line = read_metrics(tmp_path / "calm")[-1]
    assert line["router_load"] == max(line["router_load/0"], line["router_load/1"]) > 1
    assert not {"router_load/2", "router_aux"} & line.keys()


@pytest.mark.slow
def test_a_run_of_a_bias_that_is_a_parameter(text_file: Path, tmp_path: Path) -> None:
    """The check of bits at rest knows that it moves."""
    model = saved("ernie4_5_moe", tmp_path / "ernie")
    pretrain(model, text_file, tmp_path / "run", 2)
    before = load_file(model / "model.safetensors")
    for name, bias in exported_biases(tmp_path / "run").items():
        assert not torch.equal(bias, before[name])


@pytest.mark.slow
def test_recipes_train_the_loss_that_the_config_asks_for(text_file: Path, tmp_path: Path) -> None:
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = saved("mixtral", tmp_path / "mixtral", **asked)
    still = ("--train.router_bias_update_rate", 0, "--sharding.activation_checkpointing", "full")
    still += ("--train.per_device_train_batch_size", 3)  # with accumulation f is another
    said = pretrain(model, text_file, tmp_path / "on", 2, *still)
    assert "router_logits" not in said
    assert "auxiliary loss pooled over layers, coefficient 0.5 of config.json" in said
    off = ("--train.router_aux_loss", "none")
    assert "no auxiliary loss" in pretrain(model, text_file, tmp_path / "off", 2, *still, *off)
    alone = pretrain(model, text_file, tmp_path / "alone", 1, *still[:-1], 6)
    assert "auxiliary loss pooled" in alone
    on, one, none = (read_metrics(tmp_path / name) for name in ("on", "alone", "off"))
    assert on[0]["loss"] == pytest.approx(none[0]["loss"])
    assert on[-1]["router_aux"] < on[0]["router_aux"]
    assert "router_aux" not in none[0]
    assert none[0]["router_load"] > 1
    for line, other in zip(on, one, strict=True):
        assert line["router_aux"] == pytest.approx(other["router_aux"], rel=1e-4)
    config = json.loads((tmp_path / "on/exports/step-00000004/config.json").read_text())
    assert config["output_router_logits"] is True


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["finetune", "prefer"])
def test_the_other_recipes_balance_too(recipe: str, tmp_path: Path) -> None:
    model = saved("mixtral", tmp_path / "mixtral", router_aux_loss_coef=0.5)
    sides = {"chosen": "yes, that is so", "rejected": "no"}
    answer = {"completion": "yes, that is so"} if recipe == "finetune" else sides
    made = [{"prompt": f"Is it {i}? ", **answer} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    given = {
        "model.name_or_path": model,
        "output_dir": tmp_path / "run",
        "data.train_files": tmp_path / "rows.jsonl",
        "data.sequence_length": 64,
        "data.packing": "bfd",
        "data.eval_split": 0.0,
        "lora.r": 4,
        "train.max_steps": 3,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": 2,
        "train.router_aux_loss": "layer",
    }
    known = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    done = run_recipe_ranks(recipe, 2, *known, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auxiliary loss of each layer, coefficient 0.5" in done.stdout
    found = read_metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert all(line["router_aux"] > 1.9 for line in found)


# ---- What is said and refused --------------------------------------------------------------------


def test_the_line_of_a_start() -> None:
    def line(kind: str, model: dict[str, Any], **train: Any) -> str:
        plan = plan_router(tiny_model(kind, **model), settings(**train))
        return "" if plan is None else plan.line

    on = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    assert line("llama", {}) == ""
    assert line("mixtral", on) == (
        "router     auxiliary loss pooled over layers, coefficient 0.02 of config.json "
        "(train.router_aux_loss auto)"
    )
    assert "of each layer" in line("mixtral", {}, router_aux_loss="layer")
    off = line("mixtral", {"router_aux_loss_coef": 0.02})
    assert "config.json does not enable it; set pooled or layer" in off
    assert off.endswith("its coefficient is 0.02)")
    assert "no auxiliary loss" in line("mixtral", on, router_aux_loss="none")
    assert "no router_aux_loss_coef above 0" in line("mixtral", on | {"router_aux_loss_coef": 0.0})
    assert line("deepseek_v3", {}).endswith(
        "the bias of experts stays unchanged (train.router_bias_update_rate)"
    )
    assert line("deepseek_v3", {}, router_bias_update_rate=0.001).endswith(
        "the bias of experts changes by 0.001 after each step (train.router_bias_update_rate)"
    )
    jetmoe = {"output_router_logits": True, "aux_loss_coef": 0.03}
    assert "coefficient 0.03" in line("jetmoe", jetmoe)
    dbrx = {"output_router_logits": True, "ffn_config": {"moe_loss_weight": 0.04}}
    assert "coefficient 0.04" in line("dbrx", dbrx)


def test_what_cannot_be_balanced_is_refused_by_name() -> None:
    moving = {"router_bias_update_rate": 0.001}
    for kind, train, why in (
        ("llama", {"router_aux_loss": "pooled"}, "does not return the router logits of Llama"),
        ("deepseek_v3", {"router_aux_loss": "layer"}, "no router_aux_loss_coef above 0"),
        ("mixtral", moving, "MixtralForCausalLM has no bias of experts"),
        ("longcat_flash", moving, "does not only balance loads"),
    ):
        with pytest.raises(ModelError, match=why):
            plan_router(tiny_model(kind), settings(**train))
    low = tiny_model("minimax_m2").to(torch.bfloat16)
    with pytest.raises(ModelError, match="stored in bfloat16, in which small steps are lost"):
        plan_router(low, settings(**moving))
    with pytest.raises(ConfigError, match="do not change"):
        plan_router(tiny_model("deepseek_v3"), settings(LoraConfig(r=4), **moving))
    with pytest.raises(ConfigError, match=r"train\.z_loss belongs to a cross entropy"):
        PreferConfig(FinetuneModelConfig("x"), train=FinetuneTrainConfig(z_loss=0.1))


def test_gemma_hands_out_probabilities() -> None:
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    model = tiny_model("gemma4_text", enable_moe_block=True, **experts)
    with pytest.raises(ModelError, match="returns probabilities, not logits"):
        plan_router(model, settings(router_aux_loss="pooled"))


def test_a_recipe_that_balances_nothing_is_told(tmp_path: Path) -> None:
    model, batch = mixture("mixtral"), batch_of([0, 1])
    router = router_of(model)
    stats = train_step(
        sharded_of(model), torch.optim.SGD(model.parameters(), lr=0.0), [batch], router=None
    )
    counts: dict[str, Any] = {"first_step": 0, "max_steps": 3, "tokens_before": 0}
    rates: dict[str, Any] = {"tokens_per_step": 9, "flops_per_token": 1.0, "logging_steps": 1}
    metrics = Metrics(tmp_path, device=torch.device("cpu"), router=router, **counts, **rates)
    with pytest.raises(TrainingError, match=r"router=metrics\.router"):
        metrics.step(1, stats, 1e-3)


# ---- z-loss --------------------------------------------------------------------------------------


def with_z(model: Any, batch: dict[str, Any], weight: float, smoothing: float) -> torch.Tensor:
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    flat, wanted = logits.flatten(0, 1).float(), labels.flatten()
    entropy = F.cross_entropy(flat, wanted, reduction="sum", label_smoothing=smoothing)
    return entropy + weight * (flat.logsumexp(-1)[wanted != IGNORED] ** 2).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "in one kernel"])
@pytest.mark.parametrize("kind", [*MAPS, "from logits"])
def test_z_loss_is_that_of_all_logits(kind, kernel, smoothing, small_chunks, request):  # noqa: F811
    if kernel:
        request.getfixturevalue("in_one")
    changes, _ = MAPS.get(kind, ({}, None))
    model, batch = tiny_model(kind if kind in MAPS else "llama", **changes).train(), rows(3)
    if kind not in MAPS:
        _logit_maps[model] = None
    expected = with_z(model, batch, 0.1, smoothing)
    wanted = gradients(model, expected)
    given = Batch.of(batch["labels"], input_ids=batch["input_ids"])
    found = causal_lm_loss(model, given, z_loss=0.1, label_smoothing=smoothing).total
    assert found.item() == pytest.approx(expected.item(), rel=2e-6)
    assert_close(gradients(model, found), wanted)
    with torch.no_grad():
        alone = causal_lm_loss(model, given, label_smoothing=smoothing).total
    assert expected.item() - alone.item() > 1.0  # the control


@pytest.mark.slow
def test_the_compiled_kernel_has_the_z_loss(capsys) -> None:
    from test_loss_head import chunk

    from toolkit.training import loss_kernel
    from toolkit.training.head_loss import LogitMap

    logits, targets = chunk()
    loss_kernel._compiled_kernel.cache_clear()
    for scale, cap in ((1.0, None), (0.5, 3.0)):
        given = logits.clone(), targets
        made = LogitMap(scale, cap)
        rule = head_loss._cross_entropy(given[0].clone(), targets, made, 0.0, True, None, 0.1)
        found = loss_kernel.cross_entropy(*given, scale, cap, 0.0, 0.1)
        assert float(found[0]) == pytest.approx(float(rule[0]), rel=1e-6)
        assert torch.allclose(found[1], rule[1], rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().out == ""  # it was not refused
