"""Adapters through PEFT under FSDP2: the curves of PEFT alone, values that do not depend on the
number of ranks, checkpoints that resume exactly, and names that match nothing refused.
"""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from conftest import slow
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, sharded_of, train_step
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from toolkit import checkpoint
from toolkit.adapters import targets
from toolkit.adapters.base import base_digest, build_adapter_entry, refuse_other_adapters
from toolkit.adapters.coverage import (
    coverage_lines,
    coverage_rows,
    covered_share,
    find_idle_adapters,
)
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import disk_space, resuming
from toolkit.checkpoint.summary import format_summary, summarize
from toolkit.config import (
    CheckpointConfig,
    FinetuneConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
    parse,
)
from toolkit.errors import CheckpointError, ConfigError, LoadingError, ModelError
from toolkit.formats import HFAssets, read_metadata, tensor_chunks
from toolkit.loading.pretrained import check_weights_fit, init_weights, load_pretrained, materialise
from toolkit.models import build_on_meta, decoder_layers
from toolkit.models.peft_model import (
    adapted_modules,
    base_of,
    copied_modules,
    trained_copies,
    trained_tensors,
    unwrapped_base,
)
from toolkit.sharding import units
from toolkit.training.loss import _logit_maps
from toolkit.training.optim import build_optimizer
from toolkit.verify import verify_checkpoint

FP32 = ShardingConfig(param_dtype="float32")
KINDS = ("llama", "gemma3_text", "qwen3_moe", "gpt2")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS = 5
SEED = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its adapters and how they are trained."""

    kind: str
    lora: LoraConfig
    optimizer: str = "adamw"


Q = ["q_proj"]
CASES = {
    "lora, sgd": Case("llama", LoraConfig(r=4), "sgd"),
    "lora": Case("llama", LoraConfig(r=4)),
    "rslora": Case("llama", LoraConfig(r=4, use_rslora=True)),
    "dora": Case("llama", LoraConfig(r=4, use_dora=True)),
    "pattern": Case("llama", LoraConfig(r=4, target_modules=r".*layers\.[02]\..*\.(q|v)_proj")),
    "in full": Case(
        "llama", LoraConfig(r=4, target_modules=Q, modules_to_save=["embed_tokens", "lm_head"])
    ),
    "embedding, head": Case(
        "llama", LoraConfig(r=4, target_modules=["q_proj", "embed_tokens", "lm_head"])
    ),
    "tied, in full": Case(
        "gemma3_text", LoraConfig(r=4, target_modules=Q, modules_to_save=["embed_tokens"])
    ),
    "experts": Case(
        "qwen3_moe", LoraConfig(r=4, target_modules=Q, target_parameters=EXPERTS), "sgd"
    ),
    "transposed, dora": Case("gpt2", LoraConfig(r=4, use_dora=True)),
}
FAST = ("lora, sgd", "dora", "in full", "tied, in full", "experts")
SAVED = ("dora", "in full", "embedding, head", "tied, in full", "experts")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bases")
    return {kind: str(tiny.save(tiny.tiny_model(kind), root / kind, kind)) for kind in KINDS}


def adapt(folder: str, lora: LoraConfig, dtype: str = "auto") -> Any:
    return add_adapters(build_on_meta(ModelConfig(folder, dtype=dtype)), lora)


def build(folder: str, world: int, lora: LoraConfig, cfg: ShardingConfig = FP32) -> Any:
    model = adapt(folder, lora)
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu", seed=SEED)
    return model.train()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(t) for name, t in trained_tensors(model).items()}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.5)
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.1)


def curve(model: Any, optimizer: Any, rank: int, world: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        mine = {k: v[rank::world] for k, v in tiny.rows(4, seed=step).items()}
        losses.append(float(train_step(model, optimizer, [mine]).loss))
    return losses


# --------------------------------------------------------------------------------------------------
# One process group for all that needs two ranks
# --------------------------------------------------------------------------------------------------


def serve(rank: int, world: int, folders: dict[str, str], runs: str) -> dict[str, Any]:
    return {
        "curves": {name: sharded_curve(rank, world, folders, CASES[name]) for name in FAST},
        "unreduced": unreduced(rank, world, folders["llama"]),
        "by peft": drawn_by_peft(world, folders["llama"]),
        "bf16": half_precision(rank, world, folders["qwen3_moe"]),
        "random": random_start(world, folders["llama"]),
        "resumed": resumed(rank, world, folders["gemma3_text"], runs),
        "shards": rank_specific(rank, world, folders, runs, SAVED[:2]),
    }


def serve_more(rank: int, world: int, folders: dict[str, str], runs: str) -> dict[str, Any]:
    more = [name for name in CASES if name not in FAST]
    return {
        "curves": {name: sharded_curve(rank, world, folders, CASES[name]) for name in more},
        "shards": rank_specific(rank, world, folders, runs, SAVED[2:]),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def served(folders, runs) -> list[dict[str, Any]]:
    return run_ranks(serve, 2, folders, str(runs))


@pytest.fixture(scope="module")
def served_more(folders, runs) -> list[dict[str, Any]]:
    return run_ranks(serve_more, 2, folders, str(runs))


@pytest.fixture(params=[n if n in FAST else slow(n) for n in CASES])
def name(request) -> str:
    return request.param


@pytest.fixture
def curves(request, name) -> list[dict[str, Any]]:
    """Give what each of two ranks found of the case `name`."""
    ranks = request.getfixturevalue("served" if name in FAST else "served_more")
    return [rank["curves"][name] for rank in ranks]


def sharded_curve(rank: int, world: int, folders: dict[str, str], case: Case) -> Any:
    model = build(folders[case.kind], world, case.lora)
    start = trained(model)
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    units = [unit.modules for unit in sharded_of(model).plan.units]
    losses = curve(model, optimizer_of(case.optimizer, model), rank, world)
    inside = _logit_maps[model] is not None
    return {"start": start, "sharded": sharded, "losses": losses, "units": units, "inside": inside}


def reference(folder: str, case: Case, start: dict[str, torch.Tensor]) -> list[float]:
    """Return the losses of PEFT and plain PyTorch in one process, from the values `start`."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = case.lora
    model = peft.get_peft_model(
        base,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=int(lora.lora_alpha),
            target_modules=lora.target_modules,
            target_parameters=lora.target_parameters or None,
            modules_to_save=lora.modules_to_save or None,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            ensure_weight_tying=case.kind == "gemma3_text",
        ),
    )
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            if "magnitude" in name:  # PEFT's own, of weights that are whole here
                torch.testing.assert_close(parameter.detach(), start[name], rtol=1e-6, atol=0)
            if "modules_to_save" in name:
                assert torch.equal(parameter, start[name]), name
            parameter.copy_(start[name])
    optimizer, losses = optimizer_of(case.optimizer, model.train()), []
    for step in range(STEPS):
        batch = tiny.rows(4, seed=step)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(own.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")
def test_two_ranks_train_as_peft_alone_does(curves, folders, name):
    case = CASES[name]
    losses = reference(folders[case.kind], case, curves[0]["start"])
    assert max(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-3
    for rank in curves:
        assert rank["sharded"]
        error = max(abs(a - b) for a, b in zip(rank["losses"], losses, strict=True))
        assert error < 1e-5, (name, error)


def test_the_loss_is_computed_inside_the_head_that_is_trained(curves):
    # A head with an adapter among them, whose answer is more than its weight says.
    assert curves[0]["inside"] is True


def test_a_layer_and_its_adapters_are_one_unit(curves, name):
    layers = 4 if CASES[name].kind == "gemma3_text" else 3
    assert len(curves[0]["units"]) == layers + 1
    assert all("lora" not in m for unit in curves[0]["units"] for m in unit)


def unreduced(rank: int, world: int, folder: str) -> Any:
    """Adapters that are plain parameters on each rank: summed, and as the control not."""
    from toolkit.training import step as training

    model = build_on_meta(ModelConfig(folder, dtype="auto"))
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    with pytest.raises(ModelError, match=r"sharded already.*before apply_fsdp"):
        add_adapters(model, LoraConfig(r=4))
    found: dict[str, Any] = {}
    add_up = training._sum_replicated
    for way, do in (("summed", add_up), ("not", lambda model, world: None)):
        training._sum_replicated = do
        outside = dataclasses.replace(FP32, ignored_parameters=["*.lora_*"])
        plain = build(folder, world, LoraConfig(r=4, target_modules=Q), outside)
        found["start"] = trained(plain)
        found[way] = curve(plain, optimizer_of("adamw", plain), rank, world)
        found[f"{way}, sharded"] = any(
            isinstance(p, DTensor) for p in plain.parameters() if p.requires_grad
        )
    training._sum_replicated = add_up
    return found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_whose_gradients_nobody_reduces_are_seen(served, folders):
    found = served[0]["unreduced"]
    case = Case("llama", LoraConfig(r=4, target_modules=Q))
    losses = reference(folders["llama"], case, found["start"])
    assert not found["summed, sharded"]
    assert max(abs(a - b) for a, b in zip(found["summed"], losses, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(found["not"], losses, strict=True)) > 1e-4


# --------------------------------------------------------------------------------------------------
# First values
# --------------------------------------------------------------------------------------------------


def test_first_values_do_not_depend_on_the_number_of_ranks(curves, folders, name):
    case = CASES[name]
    model = adapt(folders[case.kind], case.lora)
    load_pretrained(model, folders[case.kind], "cpu", seed=SEED)
    alone, sharded = trained(model), curves[0]["start"]
    assert alone.keys() == sharded.keys()
    for key, value in alone.items():
        if "magnitude" in key:  # norms, whose terms may be added in another order
            torch.testing.assert_close(value, sharded[key], rtol=1e-6, atol=0)
        else:
            assert torch.equal(value, sharded[key]), key
    drawn = {k: v for k, v in sharded.items() if "lora_A" in k or "embedding_B" in k}
    for key, value in drawn.items():
        assert len(value.unique()) > 0.99 * value.numel(), key  # the same rows on each rank: half
        assert value.abs().max() <= (1 / math.sqrt(value.shape[1]) if "lora_A" in key else 6), key
    assert len({v.sum().item() for v in drawn.values()}) == len(drawn)
    assert not any(v.any() for k, v in sharded.items() if "lora_B" in k or "embedding_A" in k)


def drawn_by_peft(world: int, folder: str) -> torch.Tensor:
    """The control: what PEFT draws into shards."""
    model = build(folder, world, LoraConfig(r=4, target_modules=Q))
    torch.manual_seed(0)
    layer: Any = next(iter(adapted_modules(model).values()))
    layer.reset_lora_parameters("default", True)
    return whole(layer.lora_A["default"].weight)


def test_rows_that_are_the_same_on_each_rank_are_seen(served):
    rows = served[0]["by peft"]
    assert torch.equal(rows[:2], rows[2:])
    assert len(rows.unique()) <= rows.numel() / 2


def test_the_seed_decides_the_first_values(folders):
    found = []
    for seed in (0, 0, 1):
        model = adapt(folders["llama"], LoraConfig(r=4, target_modules=Q))
        load_pretrained(model, folders["llama"], "cpu", seed=seed)
        found.append(next(v for k, v in trained(model).items() if "lora_A" in k))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def random_start(world: int, folder: str) -> Any:
    model = adapt(folder, LoraConfig(r=4, target_modules=Q, modules_to_save=["lm_head"]))
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    init_weights(model, "cpu", seed=11)
    with unwrapped_base(model) as base:
        values = {n: whole(p) for n, p in base.named_parameters()}
    return values, trained(model)


def test_a_random_base_begins_as_without_adapters(served, folders):
    values, own = served[0]["random"]
    plain = build_on_meta(ModelConfig(folders["llama"], dtype="auto"))
    init_weights(plain, "cpu", seed=11)
    for name, parameter in plain.named_parameters():
        assert torch.equal(values.pop(name), parameter), name
    assert not values
    head = own["base_model.model.lm_head.modules_to_save.default.weight"]
    assert torch.equal(head, plain.lm_head.weight)


def half_precision(rank: int, world: int, folder: str) -> Any:
    """Train fp32 adapters on a bf16 base, computed in bf16."""
    cfg = ShardingConfig()
    model = add_adapters(
        build_on_meta(ModelConfig(folder, dtype="bfloat16")),
        LoraConfig(r=4, target_parameters=EXPERTS, modules_to_save=["lm_head"]),
    )
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    with unwrapped_base(model) as base:
        before = {n: whole(p) for n, p in base.named_parameters()}
    optimizer = build_optimizer(model.train(), OptimConfig(learning_rate=2e-2))
    losses = []
    for _ in range(8):  # the same rows, so that it must learn
        mine = {k: v[rank::world] for k, v in tiny.rows(4).items()}
        losses.append(float(train_step(model, optimizer, [mine]).loss))
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    with unwrapped_base(model) as base:
        same = all(torch.equal(before[n], whole(p)) for n, p in base.named_parameters())
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    return {"dtypes": dtypes, "losses": losses, "same": same, "plain": plain, "held": held}


def test_a_bf16_base_carries_fp32_adapters(served):
    found = served[0]["bf16"]
    mine = [n for n in found["dtypes"] if "lora_" in n or "modules_to_save" in n]
    assert len(mine) == found["held"] > 40
    assert {found["dtypes"].pop(n) for n in mine} == {torch.float32}
    assert set(found["dtypes"].values()) == {torch.bfloat16}
    assert found["same"]
    assert not found["plain"]
    assert found["losses"][-1] < found["losses"][0] - 0.5


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------

DROPPING = LoraConfig(
    r=4, lora_dropout=0.2, target_modules=Q, use_dora=True, modules_to_save=["embed_tokens"]
)
SAVING = CheckpointConfig()


def resumed(rank: int, world: int, folder: str, runs: str) -> Any:
    """Train, save and go on; then begin anew from the checkpoint."""
    run = Path(runs, "dropping")
    model = build(folder, world, DROPPING)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=5e-3))
    state = checkpoint.TrainState(model, optimizer)
    torch.manual_seed(100 + rank)
    before = curve(model, optimizer, rank, world)
    state.step = STEPS
    checkpoint.save(state, run, SAVING)
    saved = trained(model)
    undisturbed = curve(model, optimizer, rank, world, first=STEPS), trained(model)

    again = build(folder, world, DROPPING)
    other = build_optimizer(again, OptimConfig(learning_rate=5e-3))
    torch.manual_seed(7)
    assert checkpoint.resume(checkpoint.TrainState(again, other), run, SAVING) == STEPS
    restored = trained(again)
    return {
        "before": before,
        "saved": saved,
        "undisturbed": undisturbed,
        "restored": restored,
        "resumed": (curve(again, other, rank, world, first=STEPS), trained(again)),
    }


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(served):
    for rank in served:
        found = rank["resumed"]
        assert equal(found["saved"], found["restored"])
        assert found["undisturbed"][0] == found["resumed"][0]
        assert equal(found["undisturbed"][1], found["resumed"][1])
        # The controls: training moved every tensor, and dropout made a difference.
        assert not any(torch.equal(v, found["saved"][k]) for k, v in found["resumed"][1].items())


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(v, right[k]) for k, v in left.items())


def test_another_number_of_ranks_resumes_the_same_values(served, folders, runs):
    model = adapt(folders["gemma3_text"], DROPPING)
    load_pretrained(model, folders["gemma3_text"], "cpu")
    optimizer = build_optimizer(model.train(), OptimConfig())
    state = checkpoint.TrainState(model, optimizer)
    assert not equal(trained(model), served[0]["resumed"]["saved"])
    assert checkpoint.resume(state, runs / "dropping", SAVING) == STEPS
    assert equal(trained(model), served[0]["resumed"]["saved"])
    assert len(optimizer.state) == len(trained(model))
    # The base's own embedding stays; the head computes with the trained copy, still one matrix.
    base = base_of(model)
    copy = base.get_input_embeddings().modules_to_save["default"].weight
    assert copy is base.get_output_embeddings().modules_to_save["default"].weight
    assert not torch.equal(copy, base.get_input_embeddings().original_module.weight)


def mark(model: nn.Module, rank: int, sign: float) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            local = parameter.to_local()
            values = torch.arange(local.numel(), dtype=torch.float32).view_as(local)
            local.copy_(sign * (values + 1000 * rank + 10_000 * i + 1))


def rank_specific(
    rank: int, world: int, folders: dict[str, str], runs: str, names: tuple[str, ...]
) -> Any:
    found = {}
    for name in names:
        case, run = CASES[name], Path(runs, name)
        model = build(folders[case.kind], world, case.lora)
        mark(model, rank, 1.0)
        behind = CheckpointConfig(async_save=name != "dora")
        checkpoint.save(checkpoint.TrainState(model, step=1), run, behind)
        again = build(folders[case.kind], world, case.lora)
        mark(again, rank, -1.0)
        checkpoint.resume(checkpoint.TrainState(again), run, SAVING)
        before, after = trained_tensors(model), trained_tensors(again)
        found[name] = (
            all(
                torch.equal(before[k].to_local(), after[k].to_local())  # type: ignore[attr-defined]
                for k in before
            ),
            sum(t.to_local().numel() for t in after.values()),
        )  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("which", ["served", slow("served_more")])
def test_values_of_each_rank_survive_save_and_resume(request, which):
    for rank in request.getfixturevalue(which):
        for name, (same, held) in rank["shards"].items():
            assert same, name
            assert held > 0


def test_a_checkpoint_holds_the_adapters_and_not_the_base(served, folders, runs):
    folder = runs / "dropping" / "checkpoints" / f"step-{STEPS:08d}"
    report = verify_checkpoint(folder)
    assert report.ok, report.findings
    manifest = json.loads((folder / "manifest.json").read_text())
    own = {f"model.{n}" for n in served[0]["resumed"]["saved"]}
    assert {n for n in manifest["row_sums"] if n.startswith("model.")} == own
    assert all("lora_" in n or ".modules_to_save." in n for n in own)
    base = sum(f.stat().st_size for f in Path(folders["gemma3_text"]).glob("*.safetensors"))
    assert sum(v.numel() for v in served[0]["resumed"]["saved"].values()) * 4 < base / 2
    entry = manifest["adapter"]
    assert entry == json.loads((folder / "state.json").read_text())["adapter"]
    assert entry["name_or_path"] == folders["gemma3_text"]
    assert entry["digest"] == base_digest(Path(folders["gemma3_text"]))

    from peft import PeftConfig

    config = PeftConfig.from_pretrained(folder / "hf")
    assert config.inference_mode
    assert config.base_model_name_or_path == folders["gemma3_text"]
    assert (config.r, config.use_dora, config.lora_dropout) == (4, True, 0.2)
    assert config.ensure_weight_tying

    found = summarize(runs / "dropping")
    assert found["adapter"]["name_or_path"] == folders["gemma3_text"]
    assert "DoRA of rank 4" in format_summary(found)


def test_damage_in_an_adapter_checkpoint_is_found(served, runs, tmp_path):
    import shutil

    folder = tmp_path / f"step-{STEPS:08d}"
    shutil.copytree(runs / "dropping" / "checkpoints" / folder.name, folder)
    metadata = read_metadata(folder / "dcp")
    name = next(name for name in metadata.state_dict_metadata if "lora_" in name)
    chunk = tensor_chunks(folder / "dcp", metadata, name)[0]
    assert chunk.raw is not None
    raw = bytearray(chunk.file.read_bytes())
    raw[chunk.raw] ^= 1
    chunk.file.write_bytes(raw)
    report = verify_checkpoint(folder)
    assert not report.ok
    assert [finding[1] for finding in report.findings] == [name]


def test_another_base_or_other_adapters_are_refused(served, folders, runs, tmp_path):
    kind = "gemma3_text"
    other = str(tiny.save(tiny.tiny_model(kind, seed=5), tmp_path / "other", kind))
    moved = str(tiny.save(tiny.tiny_model(kind), tmp_path / "moved", kind))
    path = checkpoint.find_newest(runs / "dropping")
    assert path is not None

    def check(folder: str, lora: LoraConfig) -> None:
        resuming.check_same_model(adapt(folder, lora), path)

    check(folders[kind], DROPPING)
    check(moved, DROPPING)  # the same base elsewhere
    with pytest.raises(CheckpointError, match=r"another base.*Set model.name_or_path"):
        check(other, DROPPING)
    with pytest.raises(CheckpointError, match="other adapters: lora_alpha was 32, is 16"):
        check(folders[kind], dataclasses.replace(DROPPING, lora_alpha=16))
    with pytest.raises(
        CheckpointError, match="stored in float32, this run's base is stored in bfloat16"
    ):
        resuming.check_same_model(adapt(folders[kind], DROPPING, "bfloat16"), path)
    with pytest.raises(CheckpointError, match="r was 4, is 8"):
        check(folders[kind], dataclasses.replace(DROPPING, r=8))
    plain = build_on_meta(ModelConfig(folders[kind]))
    with pytest.raises(CheckpointError, match="holds adapters of"):
        resuming.check_same_model(plain, path)
    init_weights(plain, "cpu", 0)
    checkpoint.save(checkpoint.TrainState(plain, step=1), tmp_path / "whole", SAVING)
    whole_model = checkpoint.find_newest(tmp_path / "whole")
    assert whole_model is not None
    with pytest.raises(CheckpointError, match="holds a full model, not adapters"):
        resuming.check_same_model(adapt(folders[kind], DROPPING), whole_model)


@pytest.mark.parametrize("entry", [[1], "x", {"config": [1]}])
def test_a_strange_entry_of_the_adapter_is_refused(folders, entry):
    model = build_on_meta(ModelConfig(folders["llama"]))
    with pytest.raises(CheckpointError, match="is no object"):
        refuse_other_adapters(model, {"adapter": entry}, "step-1")


def test_the_base_of_a_checkpoint_is_the_one_that_was_loaded(folders, tmp_path):
    here, lora = folders["llama"], LoraConfig(r=4, target_modules=Q)
    other = str(tiny.save(tiny.tiny_model("llama", seed=5), tmp_path / "other", "llama"))
    digest, state = base_digest(Path(other)), checkpoint.TrainState(adapt(here, lora), step=1)
    with pytest.raises(CheckpointError, match="is not known: nothing was loaded into it"):
        build_adapter_entry(state.model)
    load_pretrained(state.model, other, "cpu")
    shutil.rmtree(other)  # a save does not need it any more
    checkpoint.save(state, tmp_path / "run", SAVING)
    path = checkpoint.find_newest(tmp_path / "run")
    assert path is not None
    entry = json.loads((Path(path) / "state.json").read_text())["adapter"]
    assert (entry["digest"], entry["name_or_path"]) == (digest, other)
    assert entry["config"]["base_model_name_or_path"] == other
    assert digest != base_digest(Path(here))
    # A folder whose weights come after the model was built.
    late = Path(shutil.copytree(here, tmp_path / "late"))
    (late / "model.safetensors").rename(tmp_path / "later")
    model = adapt(str(late), lora)
    (tmp_path / "later").rename(late / "model.safetensors")
    load_pretrained(model, late, "cpu")
    entry = build_adapter_entry(model)
    assert (entry["digest"], entry["name_or_path"]) == (base_digest(Path(here)), str(late))


def test_a_random_base_is_known_by_its_seed(folders, tmp_path):
    def drawn(seed: int) -> Any:
        model = adapt(folders["llama"], LoraConfig(r=4, target_modules=Q))
        base_of(model).hf_assets.source = None
        init_weights(model, "cpu", seed)
        return checkpoint.TrainState(model, step=1)

    checkpoint.save(drawn(1), tmp_path, SAVING)
    assert checkpoint.resume(drawn(1), tmp_path, SAVING) == 1
    with pytest.raises(CheckpointError, match="another base"):
        checkpoint.resume(drawn(2), tmp_path, SAVING)


def test_the_disk_is_asked_for_adapters_only(folders):
    lora = LoraConfig(r=4, target_modules=Q)
    model = adapt(folders["llama"], lora)
    own = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    assets = sum(map(len, base_of(model).hf_assets.files.values()))
    plain = build_on_meta(ModelConfig(folders["llama"]))
    tensors = 3 * len(trained_tensors(model))
    assert (
        disk_space.estimate_checkpoint_bytes(model, 1)
        == 3 * own + tensors * 2048 + 32 * 1024 + assets
    )
    assert disk_space.estimate_export_bytes(model) == own < disk_space.estimate_export_bytes(plain)


def test_a_checkpoint_of_adapters_needs_its_base(folders):
    with pytest.raises(LoadingError, match="does not hold the base"):
        materialise(adapt(folders["llama"], LoraConfig(r=4)), "cpu")


# --------------------------------------------------------------------------------------------------
# What is adapted
# --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "target": ("llama", {"target_modules": ["q_proj", "k_porj"]}, r"k_porj.*did you mean k_proj"),
    "pattern": ("llama", {"target_modules": r".*\.q_porj"}, "regular expression for full names"),
    "excluded": ("llama", {"exclude_modules": ["down_porj"]}, "exclude_modules: 'down_porj'"),
    "in full": ("llama", {"modules_to_save": ["lm_haed"]}, "modules_to_save: 'lm_haed'.*lm_head"),
    "half a name": ("llama", {"modules_to_save": ["head"]}, "'head' matches no module"),
    "parameter": (
        "qwen3_moe",
        {"target_modules": Q, "target_parameters": [EXPERTS[0], "mlp.experts.up_gate_proj"]},
        "target_parameters: 'mlp.experts.up_gate_proj' matches no parameter",
    ),
    "all excluded": (
        "llama",
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
        "'up_proj' names only modules of lora.exclude_modules",
    ),
    "a stack": ("llama", {"modules_to_save": ["layers"]}, "holds modules"),
    "a tie": ("gemma3_text", {"target_modules": ["q_proj", "embed_tokens"]}, "one matrix with"),
    "a tie by other names": ("gpt2", {"modules_to_save": ["wte"]}, "the tie would break"),
    "the experts' router": ("qwen3_moe", {"exclude_modules": ["gate"]}, "although.*exclude_modul"),
    "dropout of experts": ("qwen3_moe", {"lora_dropout": 0.1}, "without lora.lora_dropout"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_name_that_adapts_nothing_or_too_much_is_refused(folders, what):
    kind, changes, said = WRONG[what]
    with pytest.raises(ModelError, match=said):
        adapt(folders[kind], LoraConfig(r=4, **changes))


REFUSED = {
    "falcon_h1": "exclude_modules: [out_proj]",
    "nemotron_h": "exclude_modules: [out_proj]",
    "mamba": "exclude_modules: [dt_proj, out_proj, x_proj]",
    "jamba": "exclude_modules: [dt_proj]",
    "bamba": "exclude_modules: [out_proj]",
    "phimoe": "exclude_modules: [router]",
    "llama4_text": "exclude_modules: [router]",
    "deepseek_v3": "exclude_modules: [down_proj, gate_proj, up_proj]",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_peft_cannot_adapt_is_refused_with_the_remedy(kind, capsys):
    """Where it is named; `all-linear` goes on without it, and says so."""
    names = REFUSED[kind].partition("[")[2].rstrip("]").split(", ")
    model = on_meta(kind)
    linear = [
        n.rpartition(".")[2] for n, m in model.named_modules() if "Linear" in type(m).__name__
    ]
    named = sorted({*linear, *names} - {"lm_head"})
    with pytest.raises(ModelError) as error:
        add_adapters(model, LoraConfig(r=4, target_modules=named))
    assert REFUSED[kind] in str(error.value)
    left = add_adapters(on_meta(kind), LoraConfig(r=4, exclude_modules=names))
    assert covered_share(coverage_rows(left)) > 0.1
    capsys.readouterr()
    every = add_adapters(on_meta(kind), LoraConfig(r=4))
    assert covered_share(coverage_rows(every)) > 0.1
    said = capsys.readouterr().out
    assert "adapters   all-linear skips " in said
    assert all(name in said for name in names)


def test_what_no_export_could_hold_is_refused():
    lora = LoraConfig(r=4, target_modules=["in_proj", "conv1d"])
    with pytest.raises(ModelError, match=r"conv1d is Conv1d, whose.*exclude_modules: \[conv1d\]"):
        add_adapters(on_meta("mamba"), lora)


def test_settings_that_cannot_hold_together_are_refused(folders):
    for changes in ({"lora_dropout": 0.1}, {"use_dora": True}):
        with pytest.raises(ConfigError, match=r"target_parameters.*cannot have"):
            adapt(folders["qwen3_moe"], LoraConfig(r=4, target_parameters=EXPERTS, **changes))
    with pytest.raises(ConfigError, match="no regular expression"):
        adapt(folders["llama"], LoraConfig(r=4, target_modules="*.q_proj"))
    with pytest.raises(ModelError, match="has adapters already"):
        add_adapters(adapt(folders["llama"], LoraConfig(r=4)), LoraConfig(r=4))
    loaded = build_on_meta(ModelConfig(folders["llama"]))
    load_pretrained(loaded, folders["llama"], "cpu")
    with pytest.raises(ModelError, match="has bytes already"):
        add_adapters(loaded, LoraConfig(r=4))


def test_layers_and_fit_are_those_of_the_base(folders):
    for kind in KINDS:
        plain = build_on_meta(ModelConfig(folders[kind], dtype="auto"))
        layers = list(decoder_layers(plain))
        model = add_adapters(plain, LoraConfig(r=4))
        assert list(decoder_layers(model)) == [f"base_model.model.{n}" for n in layers]
        check_weights_fit(model, ModelConfig(str(folders[kind])))
        assert model.hf_assets.config["model_type"] == kind
    with pytest.raises(LoadingError, match=r"does not fit|has shape"):
        check_weights_fit(model, ModelConfig(str(folders["llama"])))


def test_a_name_is_whole_or_ends_at_a_dot(folders):
    lora = LoraConfig(r=4, target_modules=Q, modules_to_save=["norm"])
    copied = copied_modules(adapt(folders["llama"], lora))
    assert set(copied) == {"model.norm"}  # and no input_layernorm, which PEFT would take too


def test_adapters_are_float32_whatever_the_base_is(folders):
    lora = LoraConfig(r=4, modules_to_save=["lm_head"])
    for dtype in ("float32", "bfloat16"):
        model = adapt(folders["llama"], lora, dtype)
        kinds = {p.requires_grad: p.dtype for p in model.parameters()}
        assert kinds == {True: torch.float32, False: getattr(torch, dtype)}


def test_coverage_is_counted_and_surprises_are_said(folders):
    model = adapt(folders["qwen3_moe"], LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    rows = {row.name: row for row in coverage_rows(model)}
    base = build_on_meta(ModelConfig(folders["qwen3_moe"]))
    assert rows.keys() == {n for n, p in base.named_parameters() if p.ndim > 1}
    first = rows["model.layers.0.self_attn.q_proj.weight"]
    assert (first.method, first.trained) == ("LoRA", 4 * sum(first.shape))
    assert sum(row.trained for row in rows.values()) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    inside = [r for r in rows.values() if r.part != "embedding"]
    share = sum(r.elements for r in inside if r.method != "-") / sum(r.elements for r in inside)
    assert covered_share(rows.values()) == pytest.approx(share)
    assert 0 < share < 0.5
    text = "\n".join(coverage_lines(model))
    assert f"{share:.1%} of the matrices between embedding and head" in text
    assert "WARNING    the routed experts are not adapted: mlp.experts.down_proj" in text
    assert "the router is adapted" not in text
    text = "\n".join(coverage_lines(adapt(folders["qwen3_moe"], LoraConfig(r=4))))
    assert "routed experts" not in text
    assert "WARNING    the router is adapted too" in text
    assert "WARNING" not in "\n".join(coverage_lines(adapt(folders["llama"], LoraConfig(r=4))))


def test_the_digest_of_a_base_is_of_its_values(folders, tmp_path):
    here = Path(folders["llama"])
    assert base_digest(here) == base_digest(here)
    model = AutoModelForCausalLM.from_pretrained(here, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert base_digest(tmp_path / "sharded") == base_digest(here)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    model.save_pretrained(tmp_path / "trained")
    assert base_digest(tmp_path / "trained") != base_digest(here)


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        model = tiny.tiny_model(kind, perturbed=False)
    model.hf_assets = HFAssets(config=model.config.to_dict())
    return model


def test_experts_in_one_flat_matrix_are_refused_by_name():
    with pytest.raises(ModelError, match=r"experts\.mlp\.v1, whose.*rows of one matrix"):
        add_adapters(on_meta("dbrx"), LoraConfig(r=4, target_parameters=["experts.mlp.v1"]))
    text = "\n".join(coverage_lines(add_adapters(on_meta("dbrx"), LoraConfig(r=4))))
    assert "PEFT has no adapter for them" in text


def test_rows_of_new_tokens_must_be_trained(folders):
    def resized(kind: str, names: list[str]) -> None:
        base = build_on_meta(ModelConfig(folders[kind]))
        base.hf_assets.resized = True
        add_adapters(base, LoraConfig(r=4, target_modules=Q, modules_to_save=names))

    with pytest.raises(ModelError, match=r"modules_to_save: \[embed_tokens, lm_head\]"):
        resized("llama", [])
    with pytest.raises(ModelError, match=r"modules_to_save: \[lm_head\]"):
        resized("llama", ["embed_tokens"])
    resized("llama", ["embed_tokens", "lm_head"])
    resized("gemma3_text", ["embed_tokens"])  # one matrix


def test_adapters_that_nothing_reaches_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "children_bypassed", lambda kind: ())
    folder = str(tiny.save(tiny.tiny_model("mamba"), tmp_path / "mamba", "mamba"))
    model = adapt(folder, LoraConfig(r=4, exclude_modules=["out_proj"]))
    load_pretrained(model, folder, "cpu")
    assert find_idle_adapters(model) == []  # before the first step none adds anything
    optimizer = build_optimizer(model.train(), OptimConfig(learning_rate=1e-2))
    train_step(model, optimizer, [tiny.rows(2)])
    layers = range(model.config.num_hidden_layers)
    assert find_idle_adapters(model) == [f"backbone.layers.{i}.mixer.dt_proj" for i in layers]


BYPASSED = {
    "jamba": {"dt_proj"},
    "mamba": {"dt_proj", "out_proj", "x_proj"},
    "zamba2": {"out_proj"},
    "granitemoehybrid": {"out_proj"},
    "longcat_flash": {"classifier"},
    "bloom": set(),
    "llama": set(),
}


@pytest.mark.parametrize("kind", BYPASSED)
def test_all_linear_skips_modules_whose_weight_is_read_without_their_forward(kind, capsys):
    model = on_meta(kind)
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    adapted = add_adapters(model, LoraConfig(r=4))
    # PEFT adapts the experts of longcat_flash in place of its `mlps`.
    skipped = {n for n in linear - adapted_modules(adapted).keys() if "mlps" not in n}
    assert {n.rpartition(".")[2] for n in skipped} == BYPASSED[kind]
    assert ("without its forward" in capsys.readouterr().out) == bool(BYPASSED[kind])


def test_every_adapter_of_jamba_gets_a_gradient(tmp_path):
    folder = str(tiny.save(tiny.tiny_model("jamba"), tmp_path / "jamba", "jamba"))
    model = adapt(folder, LoraConfig(r=4))
    load_pretrained(model, folder, "cpu")
    optimizer = build_optimizer(model.train(), OptimConfig(learning_rate=1e-2))
    train_step(model, optimizer, [tiny.rows(2)])
    assert find_idle_adapters(model) == []


def test_experts_without_tokens_are_not_idle(folders):
    lora = LoraConfig(r=4, target_modules=Q, target_parameters=EXPERTS)
    model = adapt(folders["qwen3_moe"], lora)
    load_pretrained(model, folders["qwen3_moe"], "cpu")
    trained = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.fill_(0.0 if "experts" in name else 1.0)
        assert find_idle_adapters(model) == []
        next(p for n, p in trained.items() if "layers.1" in n and "q_proj" in n).zero_()
    assert find_idle_adapters(model) == ["model.layers.1.self_attn.q_proj"]


def test_copies_lie_as_their_originals_do(folders):
    """In fp32, too: what is replicated on purpose stays so where a copy of it is trained."""
    model = adapt(folders["llama"], LoraConfig(r=4, target_modules=Q, modules_to_save=["norm"]))
    ((original, copy),) = trained_copies(model)
    (name,) = [n for n, p in model.named_parameters() if p is original]
    cfg = dataclasses.replace(FP32, ignored_parameters=[name])
    assert {id(original), id(copy)} <= units._replicated_ids(model, cfg)
    assert units._replicated_ids(model, FP32).isdisjoint({id(original), id(copy)})


def test_frozen_parameters_beside_adapters_are_refused(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: {name_or_path: x, frozen_parameters: [a]}\nlora: {r: 4}\n")
    with pytest.raises(ConfigError, match="adapters freeze the complete base"):
        parse(FinetuneConfig, ["--config", str(file)])
