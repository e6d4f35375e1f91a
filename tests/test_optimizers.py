"""8-bit AdamW, Adafactor and Muon on several ranks, saved and resumed; groups and schedules."""

import typing
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, train_step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit import checkpoint
from toolkit.config.settings import (
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    Schedule,
    ShardingConfig,
)
from toolkit.errors import CheckpointError, ConfigError
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training import sharded_optimizers
from toolkit.training.optim import (
    build_optimizer,
    build_scheduler,
    check_optimizer,
    describe_state_dtypes,
)
from toolkit.training.sharded_optimizers import Adafactor, AdamW8bit, Muon

OPTIMIZERS = ("adamw_torch_fused", "adamw_8bit", "adafactor", "muon")
RATES = dict.fromkeys(OPTIMIZERS, 1e-3) | {"adafactor": 1e-2}
# Rows that no number of ranks divides, fewer rows than ranks, both orientations, a stack, a vector.
SHAPES = [(7, 512), (40, 256), (600, 256), (2, 256), (5, 16, 256), (257,)]
STEPS = 4


def config(name: str, **changes: Any) -> OptimConfig:
    settings = {"learning_rate": RATES[name], "weight_decay": 0.1, **changes}
    return OptimConfig(optim=name, **settings)  # type: ignore[arg-type]


def draws(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES]


def own_step(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the optimizer of `name` over parameters of any layout, all of them its own but the
    vector.
    """
    rest = {"weight_decay": 0.1, "lr": RATES[name]}
    groups = [{"params": [p], "special": p.ndim > 1, **rest} for p in parameters]
    if name == "adafactor":
        return Adafactor(groups, lr=RATES[name])
    return {"adamw_8bit": AdamW8bit, "muon": Muon}[name](groups, lr=RATES[name])


def stepped(rank: int, world: int, replicas: int = 1) -> dict[str, list[torch.Tensor]]:
    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    mesh, layout = init_device_mesh("cpu", shape), [*[Replicate()] * (len(shape) - 1), Shard(0)]
    found = {}
    for name in OPTIMIZERS[1:]:
        sharded = [torch.nn.Parameter(distribute_tensor(value, mesh, layout)) for value in draws(0)]
        optimizer = own_step(name, sharded)
        for step in range(STEPS):
            for parameter, grad in zip(sharded, draws(step + 1), strict=True):
                parameter.grad = distribute_tensor(grad, mesh, layout)
            optimizer.step()
        found[name] = [p.full_tensor().detach() for p in sharded]
    return found


def theirs(name: str) -> list[torch.Tensor]:
    """Return the same of the libraries' own optimizers on whole tensors; a stack by its slices."""
    values, rest = draws(0), {"lr": RATES[name], "weight_decay": 0.1}
    slices = [list(v) if v.ndim == 3 and name == "muon" else [v] for v in values]
    parameters = [[torch.nn.Parameter(part) for part in parts] for parts in slices]
    flat = [p for parts in parameters for p in parts]
    if name == "adamw_8bit":
        own: Any = bitsandbytes.optim.AdamW8bit([p for p in flat if p.ndim > 1], **rest)
        for p in flat:
            if p.ndim > 1 and p.numel() < 4096:  # bitsandbytes would keep 32 bits
                own.mng.override_config(p, "optim_bits", 8)
        own.args.min_8bit_size = 0
    elif name == "muon":
        matrices = [p for p in flat if p.ndim == 2]
        own = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **rest)
    else:
        own = torch.optim.Adafactor(flat, **rest)
    rest_of = [p for p in flat if p.ndim == 1 and name != "adafactor"]
    others = [torch.optim.AdamW(rest_of, fused=True, **rest)] if rest_of else []
    for step in range(STEPS):
        for parts, grad in zip(parameters, draws(step + 1), strict=True):
            for part, own_grad in zip(parts, list(grad) if len(parts) > 1 else [grad], strict=True):
                part.grad = own_grad.clone()
        for optimizer in (own, *others):
            optimizer.step()
    return [torch.stack(p) if len(p) > 1 else p[0].detach() for p in parameters]


@pytest.mark.parametrize(
    "worlds",
    [[(1, 1), (2, 1), (3, 1)], pytest.param([(2, 2), (4, 2)], marks=pytest.mark.slow)],
)
def test_a_step_is_that_of_whole_tensors_on_any_number_of_ranks(worlds):
    expected = {name: theirs(name) for name in OPTIMIZERS[1:]}
    for world, replicas in worlds:
        for rank in run_ranks(stepped, world, replicas):
            for name, values in rank.items():
                for value, right, before in zip(values, expected[name], draws(0), strict=True):
                    assert (right - before).abs().max() > 1e-3  # it has moved
                    if name == "adafactor":  # sums in another order
                        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-6)
                    else:
                        assert torch.equal(value, right), (name, world, tuple(value.shape))


@pytest.mark.slow
def test_shards_taken_for_matrices_are_seen():
    """The control: Muon of a rank's rows, and Adafactor's means of them, are others."""
    found = run_ranks(stepped_by_rows, 2)[0]
    for name in ("adafactor", "muon"):
        far = [
            (value - right).abs().max()
            for value, right in zip(found[name], theirs(name), strict=True)
        ]
        assert far[1] > 1e-4, name


def stepped_by_rows(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    sharded_optimizers._PooledSums.reduce = lambda self: None  # type: ignore[method-assign]

    def alone(parameters: list[Any], updates: dict) -> None:
        for p in parameters:
            if updates[p].numel():
                updates[p].copy_(sharded_optimizers.orthogonalise(updates[p].clone()))

    sharded_optimizers._orthogonalise_sharded = alone
    return stepped(rank, world)


# ---- Saved and resumed ---------------------------------------------------------------------------

BEFORE, AFTER = 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny mixture whose rows hold blocks of 8-bit state, but for the embedding and the head."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    root = tmp_path_factory.mktemp("experts")
    return str(save_tiny_model(root, "qwen3_moe", num_hidden_layers=1, **sizes))


class Trainer:
    """A run in small."""

    def __init__(self, folder: str, world: int, name: str) -> None:
        cfg = ShardingConfig(param_dtype="float32")
        model = build_on_meta(ModelConfig(folder))
        apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        load_pretrained(model, folder, "cpu")
        optim = config(name)
        optimizer = build_optimizer(model.train(), optim)
        scheduler = build_scheduler(optimizer, optim, BEFORE + AFTER)
        self.state = checkpoint.TrainState(model, optimizer, scheduler)

    def steps(self, count: int, rank: int, world: int) -> list[float]:
        losses = []
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.state.step)
            ids = torch.randint(0, 300, (4, 24), generator=generator)[rank::world]
            stats = train_step(
                self.state.model, self.state.optimizer, [{"input_ids": ids, "labels": ids}]
            )
            self.state.scheduler.step()
            self.state.step += 1
            losses.append(float(stats.loss))
        return losses

    def held(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the optimizer's state, whole."""
        return {
            f"{name}.{key}": whole(value).clone()
            for name, p in self.state.model.named_parameters()
            for key, value in self.state.optimizer.state[p].items()
        }

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: whole(p.detach()).clone() for n, p in self.state.model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_all(rank: int, world: int, folder: str, root: str, names: tuple[str, ...]) -> dict:
    found = {}
    for name in names:
        run = Trainer(folder, world, name)
        run.steps(BEFORE, rank, world)
        checkpoint.save(run.state, f"{root}/{name}-{world}", CheckpointConfig())
        found[name] = (run.held(), run.steps(AFTER, rank, world), run.weights())
    return found


def resume_all(rank: int, world: int, folder: str, root: str, names: tuple[str, ...]) -> dict:
    found: dict[Any, Any] = {}
    for name in names:
        for source in (1, 2):
            run = Trainer(folder, world, name)
            checkpoint.resume(run.state, f"{root}/{name}-{source}", CheckpointConfig())
            found[name, source] = (run.held(), run.steps(AFTER, rank, world), run.weights())
    run = Trainer(folder, world, "adafactor")
    with pytest.raises(CheckpointError, match=r"state of \w+, which Adafactor cannot go on with"):
        checkpoint.resume(run.state, f"{root}/{names[0]}-1", CheckpointConfig())
    run = Trainer(folder, world, names[0])
    optimizer, run.state.optimizer = run.state.optimizer, None
    checkpoint.resume(run.state, f"{root}/{names[0]}-1", CheckpointConfig())
    run.state.optimizer = optimizer
    run.steps(AFTER, rank, world)
    found["forgetful"] = run.weights()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [OPTIMIZERS[3:], OPTIMIZERS[:3]])
def test_a_run_goes_on_on_other_ranks_as_if_undisturbed(names, folder, tmp_path: Path):
    root = str(tmp_path)
    saved = {world: run_ranks(save_all, world, folder, root, names)[0] for world in (1, 2)}
    for world in (1, 2):
        found = run_ranks(resume_all, world, folder, root, names)[0]
        for name in names:
            for source in (1, 2):
                held, losses, weights = found[name, source]
                held0, losses0, weights0 = saved[source][name]
                assert held.keys() == held0.keys()
                for key, value in held.items():  # to the bit, whatever the ranks
                    assert value.dtype == held0[key].dtype, key
                    assert torch.equal(value, held0[key]), (name, source, world, key)
                same = source == world
                assert losses == (losses0 if same else pytest.approx(losses0, abs=2e-4)), name
                for key, value in weights.items():
                    far = (value - weights0[key]).abs()
                    # A matrix of Muon is rounded to bfloat16, a moment of 8 bits to its neighbour.
                    assert far.mean() <= (0 if same else 2e-5), (name, source, world, key)
        key = "model.layers.0.mlp.experts.gate_up_proj"  # the control: without the state
        undisturbed = saved[1][names[0]][2][key]
        assert (found["forgetful"][key] - undisturbed).abs().mean() > 5e-5


def test_what_has_8_bits_and_what_is_orthogonalised(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = {id(p): n for n, p in model.named_parameters()}

    def own(name: str) -> set[str]:
        groups = build_optimizer(model, config(name)).param_groups
        held = [p for g in groups for p in g["params"]]
        assert len(held) == len(names)  # each once
        return {names[id(p)] for g in groups if g["special"] for p in g["params"]}

    layer = "model.layers.0."
    eight = own("adamw_8bit")
    assert {f"{layer}mlp.experts.gate_up_proj", f"{layer}self_attn.q_proj.weight"} <= eight
    assert "lm_head.weight" in eight
    assert not [n for n in eight if "norm" in n or "embed" in n or "mlp.gate.weight" in n]
    # o_proj has rows of 32 values, no block of 256.
    assert f"{layer}self_attn.o_proj.weight" not in eight
    assert describe_state_dtypes(build_optimizer(model, config("adamw_8bit"))) == "8 bits/float32"
    assert describe_state_dtypes(build_optimizer(model, config("muon"))) == "float32"
    turned = own("muon")
    assert {f"{layer}self_attn.o_proj.weight", f"{layer}mlp.experts.down_proj"} <= turned
    assert not [n for n in turned if "norm" in n or "embed" in n or "lm_head" in n]


def test_biases_of_experts_and_rates_of_mamba_are_no_matrices():
    small = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    for kind, more in (("gpt_oss", experts | heads), ("mamba", {"state_size": 4})):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **more))
        names = {id(p): n for n, p in model.named_parameters()}
        groups = build_optimizer(model, config("muon")).param_groups
        plain = {names[id(p)] for g in groups if not g["weight_decay"] for p in g["params"]}
        turned = {names[id(p)] for g in groups if g["special"] for p in g["params"]}
        odd = {n for n in names.values() if n.endswith(("_bias", "A_log"))}
        assert odd, names.values()
        assert odd <= plain
        assert not odd & turned
        assert any(n.endswith(("experts.down_proj", "in_proj.weight")) for n in turned)


def test_groups_have_their_rates_and_decays(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cfg = config("adamw_torch_fused")
    optimizer = build_optimizer(model, cfg)
    scheduler = build_scheduler(optimizer, cfg, 10)
    assert scheduler.get_last_lr()[0] == 1e-3  # what a run logs
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(5e-4)
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)


# ---- Schedules and refusals ----------------------------------------------------------------------


def rates(steps: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = build_scheduler(optimizer, OptimConfig(learning_rate=1.0, **settings), steps)
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules():
    flat = rates(20, lr_scheduler_type="warmup_stable_decay", warmup_steps=4)
    assert flat[:5] == [0, 0.25, 0.5, 0.75, 1.0]
    assert flat[4:19] == [1.0] * 15  # a tenth of 20 steps decays
    assert flat[19] == pytest.approx(0.5)
    long = rates(
        20,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 10, "decay_type": "linear"},
    )
    assert long[:11] == [1.0] * 11
    assert long[11:] == pytest.approx([1 - i / 10 for i in range(1, 10)])
    cycles = rates(
        20, lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}
    )
    assert cycles[10] == pytest.approx(1.0)
    for kind in ("inverse_sqrt", "cosine_warmup_with_min_lr", "polynomial", "constant"):
        found = rates(20, lr_scheduler_type=kind, warmup_steps=5)
        assert max(found) == pytest.approx(1.0, rel=0.05), kind
        assert found[0] < 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"cycles": 2}},
            "of linear.*cycles",
        ),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 2}}, "constant takes none"),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"decay_type": "x"},
            },
            "Unknown decay type",
        ),
    ],
)
def test_settings_of_another_schedule_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_optimizer(OptimConfig(**settings))


def test_a_run_that_ends_within_its_warm_up_is_told(capsys):
    assert max(rates(10, warmup_steps=20)) < 0.5
    assert "WARNING: the run has 10 steps, and optim.warmup_steps is 20" in capsys.readouterr().out
    assert rates(1, warmup_steps=0.01) == [1.0]  # a share never takes all steps
    assert rates(2, warmup_steps=0.01) == [0.0, 1.0]
    assert rates(10, warmup_steps=9)[-1] == 1.0
    assert capsys.readouterr().out == ""


def test_a_least_rate_that_the_schedule_does_not_know_is_refused():
    given: dict[str, Any] = {"lr_scheduler_kwargs": {"min_lr_rate": 0.3}}
    check_optimizer(OptimConfig(lr_scheduler_type="cosine_with_min_lr", **given))
    with pytest.raises(ConfigError, match=r"min_lr_rate.* are not those of linear"):
        check_optimizer(OptimConfig(**given))


@pytest.mark.parametrize("kind", typing.get_args(Schedule))
def test_every_schedule_passes_the_check_before_a_run(kind: str) -> None:
    check_optimizer(OptimConfig(learning_rate=1e-3, lr_scheduler_type=kind), 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine_with_min_lr", "cosine_warmup_with_min_lr"])
def test_a_least_rate_is_an_absolute_one(kind: str) -> None:
    given: dict[str, Any] = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    check_optimizer(OptimConfig(learning_rate=1e-3, **given), 100)
    given["lr_scheduler_kwargs"] = {"min_lr": 0.25}
    assert rates(200, **given)[-1] == pytest.approx(0.25, abs=1e-3)
    given["lr_scheduler_kwargs"] = {"min_lr": 1e-4}
    with pytest.raises(ConfigError, match="learning_rate 0 has no schedule"):
        check_optimizer(OptimConfig(learning_rate=0.0, **given), 100)


def test_a_schedule_longer_than_the_run_is_refused():
    cfg = OptimConfig(
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": 95},
        warmup_steps=10,
    )
    check_optimizer(cfg)  # where the length is not known yet
    with pytest.raises(ConfigError, match="warmup_steps 10 and num_decay_steps 95 exceed"):
        check_optimizer(cfg, 100)


def test_what_is_not_installed_is_refused_before_anything_is_loaded(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"optim.optim: adamw_8bit needs bitsandbytes"):
        check_optimizer(config("adamw_8bit"))
    monkeypatch.setitem(sys.modules, "torch.optim._muon", None)
    with pytest.raises(ConfigError, match=r"optim.optim: muon: torch .* has no optim\._muon"):
        check_optimizer(config("muon"))
    check_optimizer(config("adamw_torch_fused"))
