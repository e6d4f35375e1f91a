"""The numbers of a step: gradients, their norm and their clipping on every mesh, accumulation with
and without reduction between, replicated parameters.
"""

import dataclasses
from typing import Any

import pytest
import torch
from conftest import save_tiny_model, slow
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, loss_sum, sharded_of, train_step
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training import step
from toolkit.training.optim import build_optimizer

FP32 = ShardingConfig(param_dtype="float32")
MAX_NORM = 0.25


KINDS = {"llama": "llama", "experts": "qwen3_moe", "tied": "gemma2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(save_tiny_model(root / name, kind)) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> dict[str, str]:
    """The same with two layers, for what is done on every mesh."""
    root = tmp_path_factory.mktemp("shallow")
    return {
        name: str(save_tiny_model(root / name, kind, num_hidden_layers=2))
        for name, kind in KINDS.items()
    }


def build(folder: str, world: int, cfg: ShardingConfig, dtype: str = "float32") -> Any:
    model = build_on_meta(ModelConfig(folder, dtype=dtype))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    return model.train()


def rows(count: int, seed: int = 1, length: int = 17) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (count, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(count):
        labels[row, : 1 + row] = -100  # rows of unequal weight
    return {"input_ids": ids, "labels": labels}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Keep(torch.optim.SGD):
    """Plain SGD that remembers the gradients that it was given."""

    def step(self, closure: Any = None) -> None:
        self.given = [
            None if g is None else whole(g).clone()
            for group in self.param_groups
            for g in (p.grad for p in group["params"])
        ]
        super().step(closure)


def meshes(world: int) -> dict[str, ShardingConfig]:
    found = {"sharded": FP32, "replicas": dataclasses.replace(FP32, dp_shard=1)}
    if world == 4:
        found["2 x 2"] = dataclasses.replace(FP32, dp_replicate=2)
    found["replicated parameters"] = dataclasses.replace(
        FP32, ignored_parameters=["*layernorm.weight"]
    )
    offloaded = {
        f"{k}, offloaded": dataclasses.replace(v, cpu_offload=True) for k, v in found.items()
    }
    return found | offloaded


def clip(rank: int, world: int, folder: str) -> dict:
    found = {}
    batch = rows(8)
    for name, cfg in meshes(world).items():
        model = build(folder, world, cfg)
        optimizer = Keep(model.parameters(), lr=0.0)  # the same weights for each of the ways
        for limit, pieces, each in ((MAX_NORM, 1, False), (0.0, 2, False), (MAX_NORM, 2, True)):
            mine = {k: v[rank::world].chunk(pieces) for k, v in batch.items()}
            micro = [{k: v[i] for k, v in mine.items()} for i in range(pieces)]
            sharded_of(model).accumulation.reduce_each = each
            stats = train_step(model, optimizer, micro, max_grad_norm=limit)
            found[name, limit, pieces, each] = (float(stats.grad_norm), optimizer.given)
    return found


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (2, "tied"),
        *(slow(world, kind) for world in (2, 4) for kind in KINDS if (world, kind) != (2, "tied")),
    ],
)
def test_norm_and_clipped_gradients_are_those_of_one_process(world, kind, shallow):
    found = run_ranks(clip, world, shallow[kind])
    model = AutoModelForCausalLM.from_pretrained(
        shallow[kind], dtype=torch.float32, use_cache=False
    )
    model.train()(**rows(8)).loss.backward()
    expected = {0.0: [p.grad.clone() for p in model.parameters()]}
    expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    expected[MAX_NORM] = [p.grad for p in model.parameters()]
    assert expected_norm > 2 * MAX_NORM  # else nothing would be clipped
    for rank in found:
        assert len(rank) == len(meshes(world)) * 3
        for what, (norm, gradients) in rank.items():
            assert norm == pytest.approx(expected_norm, rel=1e-5), what
            for mine, theirs in zip(gradients, expected[what[1]], strict=True):
                error = (mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)
                assert error < 1e-5, (what, float(error))


def test_a_gradient_that_is_not_summed_is_seen(folders, monkeypatch):
    """The control: without summing replicated gradients the comparison above must fail."""
    found = run_ranks(not_summed, 2, folders["llama"])
    assert any(not torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


def not_summed(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    from toolkit.training import step as training

    training._sum_replicated = lambda model, world: None
    model = build(
        folder, world, dataclasses.replace(FP32, ignored_parameters=["*layernorm.weight"])
    )
    optimizer = Keep(model.parameters(), lr=1e-3)
    train_step(model, optimizer, [{k: v[rank::world] for k, v in rows(8).items()}])
    return [
        given
        for given, (name, _) in zip(optimizer.given, model.named_parameters(), strict=True)
        if "layernorm" in name
    ]


def skip_mlp(model: Any) -> None:
    """Let one layer pass its MLP by, as experts in a list are when no token goes to them."""
    model.model.layers[1].mlp.forward = torch.zeros_like


def unused_on_one_rank(rank: int, world: int, folder: str, fill: bool) -> Any:
    model = build(folder, world, FP32)
    if not fill:
        model.set_reduce_scatter_unused_params(False)
    if rank == 1:
        skip_mlp(model)
    model.model.norm.forward = torch.clone  # on no rank
    optimizer = Keep(model.parameters(), lr=1e-3)
    mine = {k: v[rank::world] for k, v in rows(8).items()}
    train_step(model, optimizer, [mine], max_grad_norm=0.0)
    return optimizer.given


def reduced_sizes(rank: int, world: int, folder: str, fill: bool) -> list[int]:
    """Return the numbers of elements that a rank would reduce in one step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    sizes: list[int] = []

    def note(self: Any, *args: Any, input_tensor: torch.Tensor, **kwargs: Any) -> None:
        sizes.append(input_tensor.numel())

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_collectives.DefaultReduceScatter, "__call__", note)
        patch.setattr(step, "clip_gradients", stop)
        with pytest.raises(KeyboardInterrupt):
            unused_on_one_rank(rank, world, folder, fill)
    return sizes


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13"
)
def test_parameters_that_one_rank_does_not_use_get_the_others_gradient(folders):
    full = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32).train()
    part = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32).train()
    skip_mlp(part)
    batch, tokens = rows(8), (rows(8)["labels"][:, 1:] != -100).sum()
    for rank, model in enumerate((full, part)):
        model.model.norm.forward = torch.clone
        loss_sum(model, {k: v[rank::2] for k, v in batch.items()}).div(tokens).backward()
    (found, _) = run_ranks(unused_on_one_rank, 2, folders["llama"], True)
    for mine, (name, first), second in zip(
        found, full.named_parameters(), part.parameters(), strict=True
    ):
        if name == "model.norm.weight":  # no gradient, or decay would shrink what nobody uses
            assert mine is first.grad is None
            continue
        theirs = first.grad if second.grad is None else first.grad + second.grad
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    # The control: without the zeros the ranks would reduce buffers of different sizes, on which
    # gloo aborts or never returns. So the sizes are noted, and nothing is exchanged.
    first, second = run_ranks(reduced_sizes, 2, folders["llama"], False)
    assert first != second
    first, second = run_ranks(reduced_sizes, 2, folders["llama"], True)
    assert first == second


FROZEN = ["model.embed_tokens.*", "mlp.up_proj.weight", "post_attention_layernorm.weight"]
WAYS = {
    "sharded": FP32,
    "offloaded": dataclasses.replace(FP32, cpu_offload=True),
    # Replicated ones lose their flag in transformers' loader, trained and frozen alike.
    "replicated": dataclasses.replace(FP32, ignored_parameters=["*norm.weight"]),
    "replicated, offloaded": dataclasses.replace(
        FP32, ignored_parameters=["*norm.weight"], cpu_offload=True
    ),
    "plain": None,
}


def test_frozen_parameters_are_not_trained(folders):
    before = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    for rank in run_ranks(frozen, 2, folders["llama"]):
        assert rank.keys() == WAYS.keys()
        for way, after in rank.items():
            for name, value in before.named_parameters():
                still = name.endswith(
                    ("embed_tokens.weight", "up_proj.weight", "post_attention_layernorm.weight")
                )
                assert torch.equal(after[name], value) == still, (way, name)


def frozen(rank: int, world: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for way, cfg in WAYS.items():
        model = build_on_meta(ModelConfig(folder, frozen_parameters=FROZEN))
        if cfg is not None:
            apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
        load_pretrained(model, folder, "cpu")
        model.train()
        optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-2, weight_decay=0.1))
        for seed in range(2):
            train_step(model, optimizer, [{k: v[rank::world] for k, v in rows(8, seed).items()}])
        found[way] = {n: whole(p) for n, p in model.named_parameters()}
    return found


# ---- Parameters of several meshes ----------------------------------------------------------------


def clip_over_meshes(rank: int, world: int) -> dict[str, Any]:
    """Clip gradients that are sharded over two meshes, one that two axes cut, and a whole one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from toolkit.training.step import clip_gradients

    drawn = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 3, generator=drawn) for _ in range(4)]
    flat = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("efsdp", "ep"))
    layouts = [(flat, [Shard(0)]), (square, [Shard(0), Replicate()]), (square, [Shard(0)] * 2)]
    model = torch.nn.ParameterList()
    for value, (mesh, placements) in zip(values, layouts, strict=False):
        model.append(torch.nn.Parameter(distribute_tensor(value, mesh, placements)))
        model[-1].grad = distribute_tensor(value, mesh, placements)
    model.append(torch.nn.Parameter(values[3]))
    model[-1].grad = values[3].clone()
    norm = clip_gradients(model, 1.0, torch.device("cpu"), init_mesh("cpu", world, FP32).loss)
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model]
    return {"norm": norm, "grads": grads, "values": values}


def test_gradients_of_several_meshes_have_one_norm():
    for found in run_ranks(clip_over_meshes, 4):
        expected = torch.cat([v.flatten() for v in found["values"]]).norm()
        torch.testing.assert_close(found["norm"], expected, rtol=1e-6, atol=0)
        for grad, value in zip(found["grads"], found["values"], strict=True):
            torch.testing.assert_close(grad, value / (expected + 1e-6), rtol=1e-5, atol=1e-7)
