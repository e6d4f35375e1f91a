"""Expert parallelism: ranks that divide the experts train to the numbers of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_byte_tokenizer
from distributed import run_ranks, tensor_sums
from sharded import KeepGradients, apply_fsdp, init_mesh, sharded_of
from tiny_models import tiny_config, tiny_model
from torch.distributed.tensor import DTensor

from toolkit.adapters import prepare_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.outputs import CheckpointConfig
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    ModelConfig,
    OptimConfig,
    PretrainConfig,
    ShardingConfig,
    TrainConfig,
)
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.errors import ConfigError, ModelError, ShardingError
from toolkit.formats import local_slices
from toolkit.mesh import count_gathered_values, mesh_shape
from toolkit.models.causal_lm import prepare
from toolkit.models.expert_parallel import check_expert_parallel
from toolkit.planning.devices import device_of
from toolkit.planning.estimates import LINKS, estimate
from toolkit.planning.fake_ranks import fake_world
from toolkit.planning.report import format_units, summarise_units
from toolkit.planning.search import make_plan
from toolkit.sharding import fsdp
from toolkit.training.loss import causal_lm_loss
from toolkit.training.step import Update

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "granitemoe": {},
}
FP32 = ShardingConfig(param_dtype="float32")
NORM = 0.05  # below the norm of every case, so that gradients are clipped


def batch_of(number: int, length: int = 16) -> Batch:
    """Return micro-batch `number`: two rows, of which a part that depends on it is supervised."""
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(8, 120, (2, length), generator=drawn)
    labels = ids.clone()
    labels[:, : 1 + number % 5] = IGNORED
    return Batch.of(labels, input_ids=ids)


def step_gradients(model: Any, micro_batches: list[Batch]) -> dict[str, Any]:
    """Return loss, norm and clipped gradients of a step, which changes nothing."""
    update = Update(sharded_of(model), micro_batches)
    for batch in update:
        update.mean(causal_lm_loss(model, batch)).backward()
    optimizer = KeepGradients(model)
    stats = update.step(optimizer, max_grad_norm=NORM)
    return {
        "loss": float(stats.loss),
        "norm": float(stats.grad_norm),
        "gradients": optimizer.gradients,
    }


def build(kind: str, changes: dict[str, Any]) -> Any:
    """Return a tiny model; `unused` names experts that its routers never choose."""
    changes = dict(changes)
    unused = changes.pop("unused", ())
    frozen = changes.pop("frozen", "")
    model: Any = tiny_model(kind, **changes).train()
    for name, parameter in model.named_parameters():
        if unused and name.endswith("router.bias"):
            with torch.no_grad():
                parameter[list(unused)] = -1e4
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    return model


def steps_of_ranks(
    rank: int, world: int, kinds: dict[str, dict], settings: dict[str, Any], count: int
) -> dict[str, Any]:
    """Return what `step_gradients` has of each kind, with `count` other micro-batches per rank."""
    cfg = replace(FP32, **settings)
    results = {}
    for kind, changes in kinds.items():
        model = build(kind, changes)
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        micro_batches = [batch_of(rank * count + i) for i in range(count)]
        # The second step uses the prefetches that the first one recorded.
        for _ in range(2 if cfg.forward_prefetch else 1):
            results[kind] = step_gradients(model, micro_batches)
    return results


def compare(results: dict[str, Any], kinds: dict[str, dict], world: int, count: int = 1) -> None:
    """Compare steps of ranks with a step of one process on all their micro-batches."""
    for kind, step in results.items():
        expected = step_gradients(
            build(kind, kinds[kind]), [batch_of(i) for i in range(world * count)]
        )
        assert step["loss"] == pytest.approx(expected["loss"], rel=2e-6), kind
        assert step["norm"] == pytest.approx(expected["norm"], rel=1e-5), kind
        assert expected["norm"] > 2 * NORM, kind
        assert step["gradients"].keys() == expected["gradients"].keys()
        largest = max(float(g.abs().max()) for g in expected["gradients"].values())
        for name, gradient in expected["gradients"].items():
            # A gradient that is zero but for rounding has no scale of its own.
            scale = max(float(gradient.abs().max()), 1e-4 * largest)
            off = float((step["gradients"][name] - gradient).abs().max()) / scale
            assert off < 1e-5, (kind, name, off)


@pytest.mark.slow
def test_two_ranks_that_divide_experts_have_the_gradients_of_one_process():
    results = run_ranks(steps_of_ranks, 2, KINDS, {"expert_parallel": 2}, 1)
    compare(results[0], KINDS, 2)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 4": {"expert_parallel": 4},
    "ep 2 x efsdp 2": {"expert_parallel": 2},
    "ep 2 with replicas": {"expert_parallel": 2, "dp_replicate": 2, "dp_shard": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_have_the_gradients_of_one_process(layout):
    kinds = {name: KINDS[name] for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")}
    results = run_ranks(steps_of_ranks, 4, kinds, LAYOUTS[layout], 1)
    compare(results[0], kinds, 4)


@pytest.mark.slow
def test_eight_ranks_with_replicas_shards_and_divided_experts():
    kinds = {"qwen3_moe": {}}
    settings = {"expert_parallel": 2, "dp_replicate": 2, "dp_shard": 4}
    results = run_ranks(steps_of_ranks, 8, kinds, settings, 1)
    compare(results[0], kinds, 8)


@pytest.mark.slow
def test_a_rank_whose_experts_get_no_token():
    """The router never chooses the experts of rank 1, whose gradients are zero."""
    kinds = {"gpt_oss": {"unused": (2, 3)}}
    results = run_ranks(steps_of_ranks, 2, kinds, {"expert_parallel": 2}, 1)
    compare(results[0], kinds, 2)
    experts = results[0]["gpt_oss"]["gradients"]["model.layers.0.mlp.experts.down_proj"]
    assert experts[:2].abs().max() > 0
    assert experts[2:].abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["eager", "grouped_mm", "batched_mm"])
def test_every_kernel_of_experts_has_the_gradients_of_one_process(kernel):
    kinds = {"mixtral": {"experts_implementation": kernel}}
    results = run_ranks(steps_of_ranks, 2, kinds, {"expert_parallel": 2}, 1)
    compare(results[0], kinds, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": 2, "activation_offload": False},
        {"activation_checkpointing": "full", "activation_offload": True},
        {"accumulation": "reduce_each", "reshard_after_forward": True},
        {"accumulation": "reduce_once", "reshard_after_forward": False},
        {"accumulation": "keep_gathered"},
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"embedding_units": True},
        {"layer_classes": ["self_attn", "Qwen3MoeDecoderLayer"]},
        {"param_dtype_overrides": {"mlp.gate": "float32", "experts": "float32"}},
    ],
    ids=str,
)
def test_other_settings_change_nothing(settings):
    """Two ranks with two micro-batches each."""
    kinds = {"qwen3_moe": {}}
    results = run_ranks(steps_of_ranks, 2, kinds, {"expert_parallel": 2, **settings}, 2)
    compare(results[0], kinds, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["experts", "experts.down_proj", "self_attn"])
def test_frozen_parameters(frozen):
    kinds = {"qwen3_moe": {"frozen": frozen}}
    results = run_ranks(steps_of_ranks, 2, kinds, {"expert_parallel": 2}, 2)
    compare(results[0], kinds, 2, 2)


def average_experts(rank: int, world: int) -> Any:
    """Return a step with FSDP2's own divide factor for the experts: the ranks of their mesh."""
    shard = fsdp._sum_gradients

    def only_others(unit: Any) -> None:
        if not hasattr(unit, "num_experts"):
            shard(unit)

    fsdp._sum_gradients = only_others
    try:
        return steps_of_ranks(rank, world, {"qwen3_moe": {}}, {"expert_parallel": 2}, 1)
    finally:
        fsdp._sum_gradients = shard


@pytest.mark.slow
def test_gradients_of_experts_that_are_averaged_are_found():
    """The negative control: each expert is on two of four ranks."""
    with pytest.raises(AssertionError):
        compare(run_ranks(average_experts, 4)[0], {"qwen3_moe": {}}, 4)


def bf16_losses(rank: int, world: int, parts: int) -> list[float]:
    """Return the losses of some steps of AdamW in bfloat16 compute."""
    from toolkit.training.optim import build_optimizer
    from toolkit.training.step import train_step

    cfg = ShardingConfig(expert_parallel=parts)
    model = build("mixtral", {})
    sharded_model = apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2))
    return [float(train_step(sharded_model, optimizer, [batch_of(rank)]).loss) for _ in range(12)]


@pytest.mark.slow
def test_in_bfloat16_it_learns_as_without():
    divided, plain = (run_ranks(bf16_losses, 2, parts)[0] for parts in (2, 1))
    assert plain[-1] < 0.8 * plain[0], "the control learned nothing"
    assert divided == pytest.approx(plain, rel=0.02)


# ---- Saving, resuming, exporting -----------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by kind, as transformers saves them, with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("mixtral", "gpt_oss", "deepseek_v3"):
        tiny_model(kind, vocab_size=300).save_pretrained(root / kind)
        save_byte_tokenizer(root / kind)
    return {folder.name: folder for folder in root.iterdir()}


def life(
    rank: int, world: int, folder: str, run: str, parts: int, steps: int, optim: str = ""
) -> dict[str, Any]:
    """Load or resume, train to `steps`, check, save and export."""
    from transformers import AutoModelForCausalLM

    from toolkit import checkpoint, ranks
    from toolkit.export import consolidate
    from toolkit.loading import load_or_init
    from toolkit.models.causal_lm import prepare
    from toolkit.training.guards.integrity import Integrity
    from toolkit.training.optim import build_optimizer
    from toolkit.training.step import train_step

    cfg = replace(FP32, expert_parallel=parts)
    model_cfg = ModelConfig(folder)
    model: Any = prepare(model_cfg)
    sharded_model = apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    printed: list[str] = []
    load_or_init(sharded_model, model_cfg, torch.device("cpu"), 0, say=printed.append)
    optimizer = build_optimizer(
        model, OptimConfig(optim=optim or "adamw_torch_fused", learning_rate=1e-2)
    )
    state = checkpoint.TrainState(model.train(), optimizer)
    start = checkpoint.resume(state, run, CheckpointConfig()) or 0 if Path(run).is_dir() else 0
    loaded = tensor_sums(model)
    guard = Integrity(state, every=1)
    losses = []
    for step in range(start, steps):
        # Four micro-batches in all, whatever the number of ranks.
        batches = [batch_of(4 * step + i) for i in range(4)][rank::world]
        losses.append(float(train_step(sharded_model, optimizer, batches).loss))
        guard.record(step + 1)
        guard.compare_ranks(step + 1, ranks.gather(guard.compute_checksums()))
    state.step = steps
    checkpoint.save(state, run, CheckpointConfig())
    checkpoint.wait()
    results = {"losses": losses, "start": start, "loaded": loaded, "sums": tensor_sums(model)}
    results["printed"] = printed
    results["local"] = {
        n: p.to_local().numel() if isinstance(p, DTensor) else p.numel()
        for n, p in model.named_parameters()
    }
    ranks.gather(rank)  # all files are there
    if rank == 0:
        newest = sorted(Path(run).glob("checkpoints/step-*"))[-1]
        export = f"{run}-export-{start}-{steps}"
        consolidate(str(newest), export, dtype="float32")
        results["exported"] = tensor_sums(
            AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        )
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "parts"),
    [("mixtral", 2, 2), ("mixtral", 4, 2), ("gpt_oss", 2, 2), ("deepseek_v3", 4, 4)],
)
def test_what_is_loaded_saved_and_exported_is_equal(folders, tmp_path, kind, world, parts):
    """Loading on meta, where each rank reads its experts; saving; the export."""
    folder = str(folders[kind])
    alone = run_ranks(life, 1, folder, str(tmp_path / "alone"), 1, 2)[0]
    found = run_ranks(life, world, folder, str(tmp_path / "run"), parts, 2)
    assert found[0]["loaded"] == alone["loaded"]
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=2e-5)
    assert found[0]["exported"] == found[0]["sums"]
    assert found[0]["exported"] != found[0]["loaded"]
    assert any("are in memory as in their files" in line for line in found[0]["printed"])
    experts = [name for name in found[0]["local"] if ".experts." in name]
    assert experts
    for name in experts:
        assert {of["local"][name] * world for of in found} == {alone["local"][name]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim",
    [
        "adamw_torch_fused",
        pytest.param("adafactor", marks=pytest.mark.long),
        pytest.param("muon", marks=pytest.mark.long),
    ],
)
def test_a_run_resumes_with_experts_on_other_ranks(folders, tmp_path, optim):
    folder = str(folders["mixtral"])

    def train(name: str, world: int, parts: int, steps: int) -> dict[str, Any]:
        return run_ranks(life, world, folder, str(tmp_path / name), parts, steps, optim)[0]

    expected = train("uninterrupted", 1, 1, 4)
    for first, second in (((2, 2), (2, 1)), ((2, 1), (2, 2)), ((4, 2), (1, 1)), ((2, 2), (4, 4))):
        name = f"{first} {second}"
        begun = train(name, *first, 2)
        ended = train(name, *second, 4)
        assert ended["start"] == 2
        assert ended["loaded"] == begun["sums"]
        # Muon orthogonalises in bfloat16.
        within = 2e-3 if optim == "muon" else 5e-5
        assert begun["losses"] + ended["losses"] == pytest.approx(expected["losses"], rel=within)


@pytest.mark.slow
def test_8_bit_moments_of_divided_experts(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = tiny_model("mixtral", vocab_size=300, hidden_size=256, intermediate_size=256)
    model.save_pretrained(tmp_path / "model")
    arguments = str(tmp_path / "model"), str(tmp_path / "run")
    expected = run_ranks(life, 1, arguments[0], str(tmp_path / "alone"), 1, 3, "adamw_8bit")[0]
    found = run_ranks(life, 2, *arguments, 2, 3, "adamw_8bit")[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)


def experts_of(rank: int, world: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Return the first expert of a simulated rank, and the one after its last."""
    cfg = replace(FP32, expert_parallel=2, **settings)
    with fake_world(world, rank):
        model = tiny_model("mixtral", num_local_experts=12)
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        parameter: Any = model.get_parameter("model.layers.0.mlp.experts.down_proj")
        part = local_slices(parameter)[0]
        assert part.stop - part.start == len(parameter.to_local())
        assert count_gathered_values(parameter) * 2 == parameter.numel()
        return part.start, part.stop


@pytest.mark.slow
@pytest.mark.parametrize(("world", "settings"), [(4, {}), (8, {"dp_replicate": 2})])
def test_ranks_hold_different_experts(world, settings):
    """Neighbours hold different halves of the experts; ranks of one half hold parts of it."""
    by_rank = run_ranks(experts_of, world, settings, group=False)
    halves = [(0, 3), (6, 9), (3, 6), (9, 12)]
    assert by_rank == halves * settings.get("dp_replicate", 1)


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel": 2}, "context_parallel was not tried"),
        ({"cpu_offload": True}, "cpu_offload was not tried"),
        ({"frozen": "replicated"}, "frozen: replicated would copy"),
        ({"torch_compile": "layer"}, "sizes that depend on the tokens"),
        ({"torch_compile": "model"}, "sizes that depend on the tokens"),
        ({"reshard_after_forward": 2}, "must be true, false or auto"),
        ({"reshard_after_forward_overrides": {"mlp": 2}}, "must be true, false or auto"),
    ],
)
def test_settings_that_it_does_not_work_with_are_refused(changes, message):
    sharding = ShardingConfig(expert_parallel=2, **changes)
    with pytest.raises(ConfigError, match=rf"expert_parallel 2: sharding.*{message}"):
        PretrainConfig(ModelConfig("model"), sharding)
    PretrainConfig(ModelConfig("model"), replace(sharding, expert_parallel=1))


def test_adapters_on_experts_and_weights_of_few_bits_are_refused():
    model, sharding = FinetuneModelConfig("model"), ShardingConfig(expert_parallel=2)
    for lora, message in (
        (LoraConfig(r=4, target_parameters=["experts.down_proj"]), "target_parameters"),
        (LoraConfig(r=4, load_in_4bit=True), "load_in_4bit was not tried"),
    ):
        with pytest.raises(ConfigError, match=message):
            FinetuneConfig(model, sharding, lora=lora)
    with pytest.raises(ConfigError, match="float8 was not tried"):
        PretrainConfig(ModelConfig("model", float8="rowwise"), sharding)
    FinetuneConfig(model, sharding, lora=LoraConfig(r=4))


def test_models_and_numbers_of_ranks_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match=r"divides no experts of it .* base_model_ep_plan"):
        check_expert_parallel(tiny_model("llama"), ShardingConfig(expert_parallel=2))
    with pytest.raises(ModelError, match=r"has 4 experts; set sharding.expert_parallel to a"):
        check_expert_parallel(tiny_model("mixtral"), ShardingConfig(expert_parallel=3))
    twelve = tiny_model("mixtral", num_local_experts=12)
    for model, world, shards in ((tiny_model("mixtral"), 8, 4), (twelve, 16, 4), (twelve, 8, 4)):
        message = rf"which the {world} ranks that share a copy .* set sharding.dp_shard to {shards}"
        with pytest.raises(ModelError, match=message):
            check_expert_parallel(model, ShardingConfig(expert_parallel=2), world)
        # The remedy works.
        check_expert_parallel(model, ShardingConfig(expert_parallel=2, dp_shard=shards), world)
    check_expert_parallel(tiny_model("llama"), ShardingConfig(), 8)
    for kind in KINDS:
        check_expert_parallel(tiny_model(kind), ShardingConfig(expert_parallel=4), 4)
        check_expert_parallel(
            tiny_model(kind), ShardingConfig(expert_parallel=2, dp_replicate=2), 8
        )
    with pytest.raises(ShardingError, match=r"expert_parallel 4 must divide the 2 rank\(s\)"):
        mesh_shape(8, ShardingConfig(expert_parallel=4, dp_replicate=4))
    assert mesh_shape(8, ShardingConfig(expert_parallel=4, dp_replicate=2)) == (2, 4)


def test_experts_that_an_adapter_trains_in_full_are_refused(folders):
    with fake_world(2):
        cfg = replace(FP32, expert_parallel=2)
        lora = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["experts"])
        base = prepare(ModelConfig(str(folders["mixtral"])))
        model = prepare_adapters(base, lora, "float32")
        with pytest.raises(
            ModelError, match=r"trained in full together with adapters.* cannot be div"
        ):
            apply_fsdp(model, init_mesh("cpu", 2, cfg), cfg)


def test_experts_that_every_rank_would_hold_are_refused():
    with fake_world(2):
        cfg = replace(FP32, expert_parallel=2, ignored_parameters=["*down_proj"])
        with pytest.raises(
            ShardingError, match=r"every rank would hold all of .*experts.down_proj"
        ):
            apply_fsdp(tiny_model("mixtral"), init_mesh("cpu", 2, cfg), cfg)


# ---- Plans, tables and rehearsals ----------------------------------------------------------------


def config_of(folder: Path, world: int, **changes: Any) -> PretrainConfig:
    cfg = PretrainConfig(
        ModelConfig(str(folder), init="random"),
        ShardingConfig(**changes),
        train=TrainConfig(per_device_train_batch_size=2, max_steps=3),
    )
    return replace(cfg, data=replace(cfg.data, sequence_length=64))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A config whose experts are most of the model."""
    folder = tmp_path_factory.mktemp("wide")
    changes = {"num_local_experts": 16, "intermediate_size": 256, "hidden_size": 64}
    tiny_config("mixtral", **changes).save_pretrained(folder)
    return folder


def test_the_table_of_units_has_the_experts_of_a_rank(wide):
    rows = {}
    for parts in (1, 4):
        summary = summarise_units(config_of(wide, 8, expert_parallel=parts), 8)
        rows[parts] = {row["name"]: row for row in summary["units"]}
        assert f"(expert_parallel {parts})" in format_units(summary) or parts == 1
    name = "model.layers.0.mlp.experts"
    assert name not in rows[1]
    experts, layer, whole = rows[4][name], rows[4]["model.layers.0"], rows[1]["model.layers.0"]
    assert experts["parameters"] + layer["parameters"] == whole["parameters"]
    assert experts["bytes_sharded"] + layer["bytes_sharded"] == whole["bytes_sharded"]
    assert experts["bytes_unsharded"] * 4 + layer["bytes_unsharded"] == whole["bytes_unsharded"]


@pytest.mark.slow
def test_a_plan_gathers_no_experts_and_exchanges_tokens(wide):
    device = device_of("h100")
    plans = {}
    for parts in (1, 2, 4):
        plans[parts] = make_plan(
            config_of(wide, 4, expert_parallel=parts), 4, device, int(device.memory)
        )
    states = {p: plan.sim.state for p, plan in plans.items()}
    assert states[4] == states[2] == states[1]  # each value is on one rank
    gathered = {p: plan.estimate.gathered for p, plan in plans.items()}
    assert gathered[4] < gathered[2] < gathered[1]
    for parts, plan in plans.items():
        kinds = {key[0] for work in plan.sim.work.values() for key in work.traffic}
        assert ("all_to_all" in kinds) == (parts > 1)
        assert any("planned with even loads" in note for note in plan.sim.notes) == (parts > 1)


@pytest.mark.slow
def test_a_plan_knows_that_ranks_with_the_same_experts_are_on_several_nodes(wide):
    """Two nodes of two devices: ranks 0 and 2 shard the same experts."""
    device = replace(device_of("h100"), per_node=2)
    cfg = config_of(wide, 4, expert_parallel=2)
    sim = make_plan(cfg, 4, device, int(device.memory)).sim
    traffic = [item for work in sim.work.values() for item in work.traffic.items()]
    assert {key[2] for key, _ in traffic if key[0] == "all_gather"} == {2, 4}
    exchanged = sum(count * key[1] / 2 for key, count in traffic if key[0] == "all_to_all")
    # Without the time of the network, only the exchange of tokens within a node remains.
    plan = estimate(sim, cfg, 4, replace(device, network=1e30))
    assert plan.communication == pytest.approx(exchanged / (LINKS * device.link))
