"""`toolkit plan`: what it says is exact against real ranks, its peak against measured allocations.

Measured by torch's own profiler of the CPU's allocator (`profile_memory`): the largest "Total
Allocated" within the second step of a run, from before the model has bytes on. That counts memory
inside of kernels too, which the plan does not see.
"""

import gc
import json
import re
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import tiny_models
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, sharded_of, train_step
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, PreTrainedConfig

from toolkit.adapters import prepare_adapters
from toolkit.cli import main
from toolkit.config import FinetuneConfig, PreferConfig, PretrainConfig, model_settings, parse
from toolkit.config.settings import RunConfig
from toolkit.errors import ShardingError
from toolkit.loading import init_weights, load_or_init
from toolkit.mesh import data_ranks
from toolkit.models import build_on_meta
from toolkit.models.packed_linear import import_bitsandbytes
from toolkit.planning import automatic, changes, search
from toolkit.planning.changes import find_remedies
from toolkit.planning.devices import DEVICES, device_of, find_device_name, this_host
from toolkit.planning.estimates import (
    calibrate,
    calibration_file,
    load_calibration,
    reserved_bytes,
)
from toolkit.planning.measuring import calibrate_here, measure
from toolkit.planning.report import PlanReport, plan_run
from toolkit.planning.search import Plan, make_plan
from toolkit.planning.simulation import (
    PlanningError,
    State,
    local_bytes,
    simulate,
    state_of,
)
from toolkit.tables import count_text
from toolkit.training import build_optimizer
from toolkit.training.flops import flops_per_token

VOCABULARY, LENGTH, ROWS = 2000, 128, 4
# Ten architectures: dense, tied, capped, experts, states. No number of ranks divides their rows.
EXACT = (
    *("llama", "qwen2", "gemma2", "gpt2", "mixtral", "qwen3_moe"),
    *("phi3", "olmo2", "gpt_oss", "falcon_h1"),
)
MESHES = {"1": (1, []), "2": (2, []), "4": (4, []), "2x2": (4, ["--sharding.dp_replicate", "2"])}


def _save(config: PreTrainedConfig, folder: Path) -> Path:
    config.architectures = [tiny_models.tiny_class(config.model_type).__name__]
    config.save_pretrained(folder)
    return folder


def _config(folder: Path, *flags: str, length: int = 16, rows: int = 2) -> RunConfig:
    cls = FinetuneConfig if any(f.startswith("--lora") for f in flags) else PretrainConfig
    fixed = {
        "model.name_or_path": folder,
        "model.init": "random",
        "data.sequence_length": length,
        "train.per_device_train_batch_size": rows,
    }
    if "--sharding.param_dtype" not in flags:
        fixed["sharding.param_dtype"] = "float32"
    return parse(cls, [*(f"--{name}={value}" for name, value in fixed.items()), *flags])


def _steps(rank: int, world: int, cfg: RunConfig, steps: int) -> tuple[State, int]:
    """Run real steps; return what this rank holds then, and the peak of one.

    What gloo's threads free the profiler does not see, so that its count grows from step to step:
    a step's peak is taken from where it begins, and the least one is that of all but the first.
    """
    model: Any = build_on_meta(model_settings(cfg))
    vocabulary = model.config.get_text_config().vocab_size
    if isinstance(cfg, FinetuneConfig):
        model = prepare_adapters(model, cfg.adapters, cfg.sharding.param_dtype)
    apply_fsdp(model, init_mesh("cpu", world, cfg.sharding), cfg.sharding)
    gradients, profiler = [0], nullcontext()
    if steps > 1:
        gc.collect()
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        if cfg.model.init == "random":
            init_weights(model, "cpu", 0)
        else:
            load_or_init(sharded_of(model), cfg.model, "cpu", 0, say=lambda _: None)
        optimizer = build_optimizer(model, cfg.optim)

        def look(*_: Any) -> None:
            found = [p.grad for p in model.parameters() if p.grad is not None]
            gradients[0] = local_bytes(found)

        optimizer.register_step_pre_hook(look)
        model.train()
        shape = cfg.train.per_device_train_batch_size, cfg.data.sequence_length
        for step in range(steps):
            count = cfg.train.gradient_accumulation_steps
            ids = [torch.randint(8, vocabulary - 8, shape) for _ in range(count)]
            with record_function(f"measured {step}"):
                train_step(model, optimizer, [{"input_ids": i, "labels": i} for i in ids])
    states = [t for s in optimizer.state.values() for t in s.values()]
    held = State(local_bytes(model.parameters()), gradients[0], local_bytes(states))
    if steps == 1:
        return held, 0
    (begin, _), *later = _windows(profiler, [f"measured {n}" for n in range(steps)])
    return held, begin + held.optimizer + min(peak - before for before, peak in later)


def _windows(profiler: Any, names: list[str]) -> list[tuple[int, int]]:
    """Return the bytes at the beginning and at the peak of what is labelled so."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = [e for e in events if "ts" in e]
    # What an earlier model of this process left is not counted down while no profiler runs.
    first = min((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])["args"]
    before = first["Total Allocated"] - first["Bytes"]
    found = []
    for name in names:
        window = next(e for e in events if e.get("name") == name and "dur" in e)
        begin, end = window["ts"], window["ts"] + window["dur"]
        memory = [e for e in events if e.get("name") == "[memory]" and begin <= e["ts"] <= end]
        memory = sorted(memory, key=lambda e: e["ts"])
        at_first = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
        peak = max(e["args"]["Total Allocated"] for e in memory)
        found.append((at_first - before, peak - before))
    return found


def _every(rank: int, world: int, cfgs: list[RunConfig], steps: int) -> list[tuple[State, int]]:
    return [_steps(rank, world, cfg, steps) for cfg in cfgs]


# ---- What is exact -------------------------------------------------------------------------------


@pytest.mark.plans
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_what_the_plan_says_to_the_byte(mesh: str, tmp_path: Path) -> None:
    world, flags = MESHES[mesh]
    configs = [tiny_models.tiny_config(kind, vocab_size=163) for kind in EXACT]
    cfgs = [_config(_save(c, tmp_path / c.model_type), *flags) for c in configs]
    cfgs.append(_config(tmp_path / "llama", *flags, "--lora.r", "3"))
    ranks = run_ranks(_every, world, cfgs, 1)
    for i, cfg in enumerate(cfgs):
        last = world - 1
        assert state_of(cfg, world, last) == ranks[last][i][0], cfg.model.name_or_path
        assert simulate(cfg, world, device_type="cpu").state == ranks[0][i][0]
        largest = max(rank[i][0].total for rank in ranks)
        assert largest == ranks[0][i][0].total  # as the report says


@pytest.mark.plans
@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "muon"])
def test_the_state_of_every_optimizer_is_exact(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **_sizes(3), hidden_size=256, intermediate_size=260)
    cfg = _config(_save(config, tmp_path), "--optim.optim", name)
    ranks = run_ranks(_every, 3, [cfg], 1)
    for rank in range(3):
        assert state_of(cfg, 3, rank) == ranks[rank][0][0]
    adamw = replace(cfg, optim=replace(cfg.optim, optim="adamw_torch_fused"))
    assert state_of(adamw, 3, 0).optimizer > ranks[0][0][0].optimizer


@pytest.mark.plans
@pytest.mark.parametrize("double", ["false", "true"])
def test_a_base_of_4_bits_is_exact(double: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, hidden_size=64, intermediate_size=128)
    flags = ("--lora.load_in_4bit=true", f"--lora.bnb_4bit_use_double_quant={double}")
    more = ("--model.init=pretrained", "--sharding.param_dtype=bfloat16")
    cfg = _config(tmp_path, "--lora.r=4", *flags, *more)
    ranks = run_ranks(_every, 2, [cfg], 1)
    assert [state_of(cfg, 2, rank) for rank in range(2)] == [rank[0][0] for rank in ranks]
    functional = import_bitsandbytes().functional
    with patch.object(functional, "name2qmap", {}):  # as in a process that only planned before
        assert simulate(cfg, 2, device_type="cpu").state == ranks[0][0][0]
        _, state = functional.quantize_4bit(torch.ones(64), blocksize=64, compress_statistics=True)
    assert type(state.state2.code) is torch.Tensor  # the library's table is none of the plan's


# ---- The peak of a step --------------------------------------------------------------------------


def _sizes(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
    }


def _wide(kind: str, layers: int = 4) -> PreTrainedConfig:
    common = _sizes(layers) | {"hidden_size": 256, "intermediate_size": 704}
    own = {
        "llama": common | {"tie_word_embeddings": False},
        "qwen2": common | {"tie_word_embeddings": True},
        "gemma2": common | {"head_dim": 64},
        "gpt2": {
            "n_embd": 256,
            "n_layer": 4,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        "qwen3_moe": common
        | {
            "moe_intermediate_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 64,
        },
    }
    return AutoConfig.for_model(kind, **own[kind])


FULL = "--sharding.activation_checkpointing=full"
# Name -> (architecture, ranks, flags).
PEAKS: dict[str, tuple[str, int, list[str]]] = {
    "llama": ("llama", 2, []),
    "llama recomputed": ("llama", 2, [FULL]),
    "qwen2 accumulated": (
        "qwen2",
        2,
        ["--train.gradient_accumulation_steps=2", "--sharding.accumulation=reduce_once"],
    ),
    "qwen3_moe": ("qwen3_moe", 2, []),
    "gemma2 on one rank": ("gemma2", 1, []),
    "gpt2 with AdamW of 8 bits": ("gpt2", 2, ["--optim.optim", "adamw_8bit"]),
    "llama with adapters": ("llama", 2, ["--lora.r", "8"]),
    "llama recomputed in bf16": ("llama", 1, [FULL, "--sharding.param_dtype=bfloat16"]),
}


@cache
def _measured(name: str) -> tuple[RunConfig, int, State, int]:
    """Return of one of PEAKS its config, ranks, and what rank 0 held and had at its peak."""
    kind, world, flags = PEAKS[name]
    folder = _save(_wide(kind), Path(tempfile.mkdtemp()))
    cfg = _config(folder, *flags, length=LENGTH, rows=ROWS)
    held, peak = run_ranks(_steps, world, cfg, 8)[0]
    return cfg, world, held, peak


@pytest.mark.plans
@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_within_a_tenth_of_what_was_allocated(name: str) -> None:
    cfg, world, held, peak = _measured(name)
    planned = simulate(cfg, world, device_type="cpu")
    print(f"{name}: planned {planned.peak.nbytes:,}, measured {peak:,}")
    assert planned.state == held
    assert 0.9 <= planned.peak.nbytes / peak <= 1.1


@pytest.mark.plans
def test_a_plan_of_other_settings_misses() -> None:
    cfg, world, _, peak = _measured("llama")
    wrong = {
        "recomputed": replace(cfg.sharding, activation_checkpointing="full"),
        "bf16": replace(cfg.sharding, param_dtype="bfloat16"),
    }
    for name, sharding in wrong.items():
        planned = simulate(replace(cfg, sharding=sharding), world, device_type="cpu").peak.nbytes
        assert not 0.9 <= planned / peak <= 1.1, name
    planned = simulate(cfg, 1, device_type="cpu").peak.nbytes
    assert planned / peak > 1.1


@pytest.mark.plans
@pytest.mark.parametrize("name", PEAKS)
def test_after_calibration_the_peak_is_within_a_twentieth(name: str, tmp_path: Path) -> None:
    """Calibrated by half as many rows as are judged, both measured without gloo's copies."""
    kind, world, flags = PEAKS[name]
    folder = _save(_wide(kind), tmp_path)
    half, cfg = (_config(folder, *flags, length=LENGTH, rows=n) for n in (ROWS // 2, ROWS))
    peak = measure(cfg, world, torch.device("cpu"))[0]
    device = calibrate_here(half, world)
    planned = simulate(cfg, world, device_type="cpu", gloo=False)
    found = load_calibration(device, planned.model, cfg.sharding.param_dtype)
    assert found is not None
    print(
        f"{name}: planned {found.peak_bytes(planned):,} (before {planned.peak.nbytes:,}), {peak:,}"
    )
    assert 0.9 <= planned.peak.nbytes / peak <= 1.1
    assert 0.95 <= found.peak_bytes(planned) / peak <= 1.05
    # And one that measures something else is refused.
    with pytest.raises(PlanningError, match="not the step"):
        calibrate(planned, 20 * peak, 1.0, 1.0, "another")


# ---- Work and traffic ----------------------------------------------------------------------------


@pytest.mark.plans
def test_operations_and_traffic_of_a_step_are_those_of_the_model(tmp_path: Path) -> None:
    cfg = _config(_save(_wide("llama"), tmp_path), length=LENGTH, rows=ROWS)
    plain, tokens = simulate(cfg, 4), ROWS * LENGTH
    work = plain.work["last micro-batch"]
    # A causal half of the attention is computed, which the formula of MFU counts whole.
    attention = 6 * 4 * 256 * LENGTH * tokens
    expected = flops_per_token(build_on_meta(cfg.model), LENGTH) * tokens - attention
    flops = lambda work: sum(n * c for (n, *_), c in work.operations.items())  # noqa: E731
    assert flops(work) == pytest.approx(expected, rel=0.05)
    recomputed = replace(cfg, sharding=replace(cfg.sharding, activation_checkpointing="full"))
    more = flops(simulate(recomputed, 4).work["last micro-batch"]) / flops(work)
    assert 1.2 < more < 1.34  # the layers' forward once more, the head's not
    gathered = sum(n * c for (kind, n, _), c in work.traffic.items() if kind == "all_gather")
    reduced = sum(n * c for (kind, n, _), c in work.traffic.items() if kind == "reduce_scatter")
    assert reduced == 4 * plain.values  # every gradient once, in fp32
    once = 4 * (plain.values - 2 * VOCABULARY * 256)  # layers are gathered twice, as the embedding
    assert 2 * once <= gathered <= 2 * 4 * plain.values


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a config whose layers are not compiled: what a process compiled before can change the
    memory of a plan of compiled layers.
    """
    _save(_wide("llama", layers=2), tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{name_or_path: {tmp_path}/model, init: random}}\n"
        f"data: {{sequence_length: {LENGTH}}}\n"
        "sharding: {torch_compile: none}\n"
        "train: {max_steps: 100, per_device_train_batch_size: 32}\n"
    )
    return file


def _plan(capsys: Any, *argv: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["plan", *map(str, argv)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("count", "said"),
    [(92_160, "92,160"), (2_737_920, "2.738 M"), (8_030_261_248, "8.030 B"), (10**6, "1.000 M")],
)
def test_small_models_have_no_0_000_billions(count: int, said: str) -> None:
    assert count_text(count) == said


@pytest.mark.plans
def test_it_says_what_fits_and_what_makes_it_fit(file: Path, capsys: Any) -> None:
    code, out, _ = _plan(capsys, file, "--world_size", 2, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"]
    assert found["run"]["tokens"] == 100 * 2 * 32 * LENGTH
    assert found["peak"]["bytes"] + found["reserve"] == found["memory"]
    short = found["memory"] - 20_000_000  # what activations can give
    argv = ["--config", file, "--world_size", 2, "--device_memory", short]
    code, out, _ = _plan(capsys, *argv)
    assert code == 1
    assert re.search(r"100 steps, .* tokens, 1 minute$", out, re.MULTILINE)
    assert "In " in out
    assert "DOES NOT FIT: 20.0 MB are missing" in out
    assert f"{count_text(found['parameters'])} parameters" in out
    assert f"100 steps, {count_text(found['run']['tokens'])} tokens" in out
    assert "activation_checkpointing full" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.plans
def test_layouts_are_compared(file: Path, capsys: Any) -> None:
    code, out, _ = _plan(capsys, file, "--world_size", 2, "--device_memory", "80GB", "--sweep")
    assert code == 0
    assert "2 x 1, recompute full" in out


@pytest.mark.plans
@pytest.mark.parametrize(
    "flags",
    [
        ["--checkpoint.async_save=true"],  # which adapters refuse
        ["--sharding.accumulation=keep_gathered", "--sharding.reshard_after_forward=false"],
    ],
)
def test_a_change_that_the_other_settings_refuse_is_left_out(file: Path, flags) -> None:
    cfg = parse(FinetuneConfig, ["--config", str(file), *flags])
    device = device_of("h100")
    plan = make_plan(cfg, 2, device, None)
    found, _ = find_remedies(plan, device, plan.estimate.memory - 20_000_000, lambda _: None)
    assert any(p.change.startswith("activation_checkpointing full") for p in found)
    assert not any("lora" in p.change for p in found if cfg.checkpoint.async_save is True)
    assert not any(p.change == "reshard_after_forward true" for p in found if not flags[1:])


@pytest.mark.plans
def test_out_of_patience_a_change_that_fits_is_still_looked_for_where_one_is_needed(file) -> None:
    cfg, device = parse(FinetuneConfig, ["--config", str(file)]), device_of("h100")
    plan = make_plan(cfg, 2, device, None)
    memory = plan.estimate.memory - 20_000_000

    def after(patience: float, **more: bool) -> list[Plan]:
        return find_remedies(plan, device, memory, lambda _: None, patience=patience, **more)[0]

    assert not after(-1)
    assert [p.same_training and p.fits(memory) for p in after(-1, at_least_one=True)].count(
        True
    ) == 1


@pytest.mark.plans
def test_changes_are_put_on_each_other_without_what_cannot_be_run(file: Path, monkeypatch) -> None:
    def refuse(cfg: RunConfig, *args: Any, **more: Any) -> Any:
        if cfg.sharding.activation_checkpointing == "selective":
            raise PlanningError("selective cannot be run")
        return simulate(cfg, *args, **more)

    monkeypatch.setattr(search, "simulate", refuse)
    cfg, device, said = parse(FinetuneConfig, ["--config", str(file)]), device_of("h100"), []
    plan = make_plan(cfg, 2, device, None)
    every, kinds = changes.list_changes, ("activation_checkpointing", "cpu_offload")
    few = lambda cfg, world: [c for c in every(cfg, world) if c.setting in kinds]  # noqa: E731
    monkeypatch.setattr(changes, "list_changes", few)
    alone, failed = find_remedies(plan, device, plan.estimate.memory - 20_000_000, said.append)
    assert list(failed) == ["activation_checkpointing selective"]
    memory = min(p.estimate.memory for p in alone if p.same_training) - 1
    together = find_remedies(plan, device, memory, said.append)[0]
    assert "activation_checkpointing selective: selective cannot be run" in said
    assert together[0].change == "activation_checkpointing full + cpu_offload true"
    assert together[0].fits(memory)


@pytest.mark.plans
def test_what_cannot_help_is_not_planned(file: Path, tmp_path: Path, monkeypatch) -> None:
    """Recomputation, where parameters, gradients and optimizer leave no room; on a host, moving
    them there; a plan that is known."""
    cfg, device = parse(FinetuneConfig, ["--config", str(file)]), device_of("h100")
    plan = make_plan(cfg, 2, device, None)
    for memory, recomputes in ((plan.sim.state.total, False), (plan.estimate.memory - 1, True)):
        said: list[str] = []
        found, failed = find_remedies(plan, device, memory, said.append)
        alone = [name for name in said if " + " not in name]
        assert ("activation_checkpointing full" in alone) is recomputes
        assert not failed
        assert {p.change.split()[0] for p in found} >= {"devices", "cpu_offload"}
    planned, make = list[tuple[RunConfig, int]](), search.make_plan

    def noted(cfg: RunConfig, world_size: int, *args: Any, **more: Any) -> Plan:
        planned.append((cfg, world_size))
        return make(cfg, world_size, *args, **more)

    monkeypatch.setattr(search, "make_plan", noted)
    cfg = _config(_save(_wide("llama", layers=4), tmp_path / "m"), FULL, length=16, rows=1)
    host, said = this_host(), []
    plan = make(cfg, 2, host, None)
    memory = make(cfg, 8, host, None).estimate.memory + 1
    assert plan.sim.state.total > memory - reserved_bytes(host, plan.sim.mesh)
    (found,) = find_remedies(plan, host, memory, said.append)[0]
    assert "devices 8" in found.change
    assert found.fits(memory)
    kinds = [name.split(" + ")[-1].split()[0] for name in said]
    assert kinds == ["optim", "devices", "devices"]
    assert all(planned.count(one) == 1 for one in planned)


@pytest.mark.plans
def test_a_sweep_leaves_out_what_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model whose layers write to their own input, which cannot be recomputed in part."""

    def refused(cfg: Any, world: int, device: Any, memory: Any, name: str, *more: Any) -> Plan:
        if "selective" in name:
            raise ShardingError("its layers write to their own input")
        return make_plan(cfg, world, device, memory, name)

    monkeypatch.setattr(search, "make_plan", refused)
    cfg, device, said = parse(FinetuneConfig, ["--config", str(file)]), device_of("h100"), []
    found = changes.compare_layouts(make_plan(cfg, 1, device, None), device, None, said.append)
    assert {p.change for p in found} == {"1 x 1, recompute none", "1 x 1, recompute full"}
    assert "1 x 1, recompute selective: its layers write to their own input" in said


@pytest.mark.plans
def test_the_last_rank_is_planned_for_the_same_device(tmp_path: Path) -> None:
    """`frozen: auto` replicates a base where there is room, as on an infinite GPU."""
    folder = _save(_wide("llama"), tmp_path / "m")
    cfg = _config(folder, "--lora.r=8", "--model.dtype=float32")
    for device, replicated in (("cpu", False), ("h100", True)):
        report = plan_run(cfg, 4, device_of(device), None)
        assert (report.plan.sim.sharding.frozen == "replicated") is replicated
        first, last = report.plan.sim.state, report.last
        assert abs(first.parameters - last.parameters) < 0.05 * first.parameters


@pytest.mark.plans
def test_every_change_keeps_the_global_batch_and_is_planned_anew(file: Path) -> None:
    cfg = parse(FinetuneConfig, ["--config", str(file)])
    device = device_of("h100")
    plan = make_plan(cfg, 2, device, None)
    short = plan.estimate.memory - 20_000_000
    found, failed = find_remedies(plan, device, short, lambda _: None)
    assert not failed
    assert len({p.change for p in found}) == len(found) > 3
    assert all(p.estimate.tokens_per_step == plan.estimate.tokens_per_step for p in found)
    again = simulate(found[0].cfg, found[0].world_size)
    assert again.peak.nbytes == found[0].sim.peak.nbytes
    summary = PlanReport(plan, plan.sim.state, device, short, found).summary()
    assert summary["margin"] == -20_000_000
    kept = [r for r in summary["remedies"] if r["same_training"]]
    assert all(r["fits"] and r["memory"] <= short for r in kept)
    assert [r["cost"] for r in kept] == sorted(r["cost"] for r in kept)


@pytest.mark.plans
def test_where_no_change_is_enough_one_comes_on_another(file: Path) -> None:
    cfg, device = parse(FinetuneConfig, ["--config", str(file)]), device_of("h100")
    plan = make_plan(cfg, 2, device, None)
    alone = find_remedies(plan, device, plan.estimate.memory - 20_000_000, lambda _: None)[0]
    memory = min(p.estimate.memory for p in alone if p.same_training) - 1
    together = [
        p for p in find_remedies(plan, device, memory, lambda _: None)[0] if p.same_training
    ]
    assert together[0].fits(memory)
    assert together[0].change not in {p.change for p in alone}


@pytest.mark.plans
def test_a_measured_step_is_remembered_and_corrects_later_plans(
    file: Path, tmp_path: Path, capsys: Any
) -> None:
    dtype = "param_dtype: float32, torch_compile"  # fast on every CPU
    file.write_text(file.read_text().replace("torch_compile", dtype))
    argv = [file, "--world_size", 1, "--json"]
    flags = ["--device", "cpu"]
    before = json.loads(_plan(capsys, *argv, *flags)[1])
    assert before["calibration"] is None
    now = json.loads(_plan(capsys, *argv, "--calibrate")[1])
    later = json.loads(_plan(capsys, *argv, *flags)[1])
    assert now["calibration"] == later["calibration"] is not None
    assert later["calibration"]["time"] != 1.0
    assert later["estimate"]["compute"] == pytest.approx(
        before["estimate"]["compute"] * later["calibration"]["time"]
    )
    # Of a run on a GPU, by its metrics.
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(file.read_text())
    world, sim = 2, simulate(parse(PretrainConfig, ["--config", str(file)]), 2)
    line = {"memory_peak_bytes": sim.peak.nbytes + sim.peak.working // 10, "step_time": 0.5}
    lines = [{"step": i} | line for i in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    for said, words in (("NVIDIA H100 80GB HBM3", ""), ("cpu", "was on CPUs")):
        start = {"step": 0, "device": said, "world_size": world}
        (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
        code, out, err = _plan(capsys, file, "--world_size", 2, "--json", "--calibrate", run)
        assert words in err
        assert code == (2 if words else 0)
        if not words:
            found = json.loads(out)
            assert found["device"]["name"] == DEVICES["h100"].name
            assert found["calibration"]["memory"] == pytest.approx(1.1, abs=0.01)
    calibration_file().write_text("- nothing")
    assert "damaged" in _plan(capsys, *argv)[2]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_device_is_known_by_what_torch_calls_it(said: str, name: str | None) -> None:
    assert find_device_name(said) == name


@pytest.mark.plans
def test_settings_follow_as_flags(file: Path, capsys: Any) -> None:
    flags = ["--data.sequence_length", 64, "--train.max_steps=7", "--world_size", 2, "--json"]
    found = json.loads(_plan(capsys, *flags[:3], file, *flags[3:])[1])
    assert found["run"]["tokens"] == 7 * 2 * 32 * 64
    code, _, err = _plan(capsys, file, "--train.max_step", 7, "--world_size", 2)
    assert code == 2
    assert "did you mean train.max_steps?" in err


@pytest.mark.parametrize("memory", [0, 5, 999, 1000, 5000, 10**6])
@pytest.mark.parametrize("known", [1, 7, 40, 200, 6.5])
def test_the_largest_size_is_found_by_few_plans(memory: int, known: float) -> None:
    """Needs grow almost evenly, and in one place by a jump; what is found is exact."""

    def needs(n: float) -> int:
        tried.append(n)
        return int(100 + 30 * n + 0.01 * n * n + 500 * (n > 60))

    tried: list[float] = []
    expected = max((n for n in range(1, 101) if needs(n) <= memory), default=0)
    start = {known: needs(known)}
    tried.clear()
    assert search.search(range(1, 101), needs, memory, start) == expected
    assert len(tried) <= 9


@pytest.mark.plans
def test_the_longest_sequence_and_the_largest_batch(tmp_path: Path, capsys: Any) -> None:
    """What is found fits, and one step more does not."""
    config = _wide("llama", layers=2)
    config.max_position_embeddings = 4096
    _save(config, tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name_or_path: {tmp_path}/model, init: random}}\n")
    flags = ["--world_size", 2, "--data.sequence_length", 512]
    flags += ["--train.per_device_train_batch_size", 1, "--json"]
    between = ["--data.sequence_length", 1200]
    memory = json.loads(_plan(capsys, file, *flags, *between)[1])["memory"]
    argv = [file, *flags, "--device_memory", memory]
    found = json.loads(_plan(capsys, *argv, "--longest")[1])["longest"]
    length, batch = found["sequence_length"], found["per_device_train_batch_size"]
    assert length == 1024
    for setting, size, step in (
        ("--data.sequence_length", length, 512),
        ("--train.per_device_train_batch_size", batch, 1),
    ):
        assert size >= step
        fits = [_plan(capsys, *argv, setting, n)[0] == 0 for n in (size, size + step)]
        assert fits == [True, False], (setting, size)
    argv.remove("--json")
    said = _plan(capsys, *argv, "--longest")[1]
    assert "longest  1,024 tokens with 1 a device, in steps of 512" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.plans
def test_adapters_are_a_remedy_of_what_pretraining_reads_too(file: Path, tmp_path: Path) -> None:
    cfg = parse(PretrainConfig, ["--config", str(file), "--model.init", "pretrained"])
    names = [c.name for c in changes.list_changes(cfg, 2)]
    assert "lora.r 16" in names
    assert "lora.r 16, lora.load_in_4bit" in names
    random = parse(PretrainConfig, ["--config", str(file)])
    assert not [c.name for c in changes.list_changes(random, 2) if "lora" in c.name]


def test_changes_for_long_rows_keep_the_global_batch(file: Path) -> None:
    flags = ["--data.sequence_length=16384", "--train.per_device_train_batch_size=1"]
    cfg = parse(PretrainConfig, ["--config", str(file), *flags])
    named = {c.name: c.cfg for c in changes.list_changes(cfg, 8)}
    steps = cfg.train.gradient_accumulation_steps
    expected = {f"context_parallel {n}, accumulation {n * steps}" for n in (2, 8)}
    assert {name for name in named if name.startswith("context_parallel")} == expected
    for name in expected:
        changed = named[name]
        samples = data_ranks(8, changed.sharding) * changed.train.gradient_accumulation_steps
        assert samples == data_ranks(8, cfg.sharding) * steps
    chunks = named["mlp_chunk_tokens 8192 with activation_checkpointing full"].sharding
    assert (chunks.mlp_chunk_tokens, chunks.activation_checkpointing) == (8192, "full")
    two = parse(PretrainConfig, ["--config", str(file), *flags, "--sharding.context_parallel=2"])
    names = [c.name for c in changes.list_changes(two, 8)]
    # 8,192 tokens a rank are no long row.
    assert not [n for n in names if n.startswith(("context_", "mlp_chunk_tokens"))]


def test_wrong_use_is_refused_before_any_work(file: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("{name: mine, memory: 8e9, bf16: 1e13, fp32: 5e12, bandwidth: 3e11, link: -1}")
    for argv, words in (
        ([], "give one config"),
        ([file, "--config", file], "give one config"),
        ([file], "--world_size"),
        ([file, "--world_size", 0], "at least 1"),
        ([file, "--world_size", 2, "--device_memory", "much"], "write 80GB"),
        ([file, "--world_size", 2, "--device", "h300"], "rtx4090"),
        ([file, "--world_size", 2, "--device", own], "link must be from 1 to 1e+24"),
    ):
        code, out, err = _plan(capsys, *argv)
        assert (code, out) == (2, ""), argv
        assert words in err
        assert err.count("\n") == 1


def test_a_device_comes_from_the_table_or_a_file(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("{name: mine, memory: 8e9, bf16: 1e13, fp32: 5e12, bandwidth: 3e11, link: 1e10}")
    device = device_of(str(own))
    assert (device.memory, device.link, device.per_node) == (8e9, 1e10, 8)
    assert DEVICES["h100"].bf16 == 989e12


def test_what_a_model_cannot_be_run_with_is_left_out(monkeypatch) -> None:
    """Of `auto` and of a sweep; where nothing else is left, the reason is told."""

    def plan(cfg, *_) -> SimpleNamespace:
        mode = cfg["activation_checkpointing"]
        if mode in refused:
            raise PlanningError(f"{mode} cannot be run")
        memory = 1 if mode == "full" else 2
        estimate = SimpleNamespace(memory=memory)
        return SimpleNamespace(fits=lambda most: memory <= most, name=mode, estimate=estimate)

    modes = ("none", "selective", "full")
    made = [[{"activation_checkpointing": mode}] for mode in modes]
    monkeypatch.setattr(automatic, "list_candidates", lambda cfg, world: made)
    monkeypatch.setattr(changes, "with_settings", lambda cfg, section, **settings: settings)
    monkeypatch.setattr(changes, "_device_seconds", lambda plan: 0)
    for module in (automatic, search):
        monkeypatch.setattr(module, "make_plan", plan)
    refused = {"selective"}
    assert automatic.choose(None, 1, None, 1)[0] == 2
    whole = SimpleNamespace(
        world_size=1, cfg=SimpleNamespace(sharding=SimpleNamespace(activation_offload=False))
    )
    said = list[str]()
    found = changes.compare_layouts(whole, SimpleNamespace(per_node=None), 1, said.append)
    assert [one.name for one in found] == ["full", "none"]
    assert any("selective: " in line and "selective cannot be run" in line for line in said), said
    refused = {"selective", "full"}
    with pytest.raises(PlanningError, match="full cannot be run"):
        automatic.choose(None, 1, None, 1)


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto", "aot"])
def test_changes_of_a_micro_batch_that_is_compared_are_another_training(
    loss_type: str,
) -> None:
    flags = ["--data.sequence_length=16384", f"--preference.loss_type={loss_type}"]
    model = ["--model.name_or_path=model", "--data.train_files=rows.jsonl"]
    for size, name in ((4, "per_device_train_batch_size 2, accum"), (1, "context_parallel 2")):
        batch = f"--train.per_device_train_batch_size={size}"
        cfg = parse(PreferConfig, [*model, *flags, batch])
        changed = next(c for c in changes.list_changes(cfg, 8) if c.name.startswith(name))
        assert changed.same_training == (loss_type == "sigmoid")
