"""Every objective and every kind of run in the dtypes that users run: bf16 compute, fp32 reduction.

The first forward of a streamed run is that of the base, with the adapters off. FSDP2 decides in a
model's first forward in which dtypes gradients are reduced and handed over.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import test_reward
import torch
from conftest import slow
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh
from test_preference import PAIRED, SPLITS, adapted, answers_of, batch_of, settings
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from trl_figures import models, reward_model

from toolkit.config.preference import PreferenceConfig
from toolkit.config.settings import ShardingConfig
from toolkit.data.samples.batch import Batch
from toolkit.models.attention import attend_within_documents
from toolkit.models.layers import decoder_layers
from toolkit.models.peft_model import base_of, disabled_adapters
from toolkit.sharding.compiled import compile_forward
from toolkit.training import preference
from toolkit.training.preference import PreferenceLoss, base_model_logps, sequence_logps
from toolkit.training.step import Update

DTYPES = ShardingConfig(param_dtype="bfloat16", reduce_dtype="float32")
KINDS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
}
NAMES = [*PAIRED, "kto"]


class Reductions(TorchDispatchMode):
    """Notes the dtypes in which gradients are reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if "reduce_scatter" in str(function):
            self.dtypes |= {t.dtype for t in args if isinstance(t, torch.Tensor)}
        return function(*args, **(kwargs or {}))


def sharded_model(kind: str, world: int, adapter_dtype: torch.dtype, reward: bool) -> Any:
    model: Any = reward_model() if reward else models()[0]
    attend_within_documents(model)
    options = KINDS[kind]
    if options is not None:
        saved = {"modules_to_save": ["score"], "task_type": "SEQ_CLS"} if reward else {}
        model = adapted(model, **options, **saved)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter_dtype)
    return apply_fsdp(model, init_mesh("cpu", world, DTYPES), DTYPES)


def rank_batch(name: str, numbers: list[int], reference: torch.Tensor | None) -> Batch:
    if name.startswith("reward"):
        return test_reward.batch_of(name, "bfd", numbers)
    cfg = settings(name)
    if cfg.paired:
        batch = batch_of(cfg, "bfd", numbers, None)
    else:
        batch = answers_of(cfg, "bfd", None, [2 * number for number in numbers])
    columns = {} if reference is None else {"reference": reference}
    return replace(batch, columns={**batch.columns, **columns})


def step_of(
    rank: int, world: int, names: list[str], kind: str, adapter_dtype: torch.dtype, streamed: bool
) -> dict[str, Any]:
    """Return objective -> loss, gradients, and dtypes of the reduction, of a first step."""
    found: dict[str, Any] = {}
    for name in names:
        reward = name.startswith("reward")
        cfg: PreferenceConfig = test_reward.settings(name) if reward else settings(name)
        numbers = SPLITS[world][rank]
        batch = rank_batch(name, numbers, None)
        if cfg.needs_reference and not streamed:
            other = sharded_model("lora", world, torch.float32, reward)
            values = {"reference": base_model_logps(other.model, batch)}
            batch = replace(batch, columns={**batch.columns, **values})
        sharded = sharded_model(kind, world, adapter_dtype, reward)
        model: Any = sharded.model
        objective = PreferenceLoss(cfg, sharded.mesh.loss, max_pairs=7)
        update = Update(sharded, [batch], [objective.counts(batch)])
        with Reductions() as reductions:
            for own in update:
                update.mean(objective(model, own)).backward()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        grads = {
            n: p.grad.full_tensor().clone() if isinstance(p.grad, DTensor) else p.grad
            for n, p in trained
        }
        stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
        found[name] = float(stats.loss), grads, reductions.dtypes
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_objective_trains_in_bf16(world: int, kind: str) -> None:
    names = [*NAMES, "reward_centred"]
    (found, *_) = run_ranks(step_of, world, names, kind, torch.float32, False)
    for name in names:
        loss, grads, reduced = found[name]
        assert torch.isfinite(torch.tensor(loss)), name
        assert reduced == ({torch.float32} if world > 1 else set()), name
        assert all(g.dtype == torch.float32 for g in grads.values()), name
        assert all(torch.isfinite(g).all() for g in grads.values()), name
        assert any(g.abs().max() > 0 for g in grads.values()), name


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (loss, grads, _) in expected.items():
        assert found[name][0] == pytest.approx(loss, rel=1e-4, abs=1e-5), name
        assert found[name][1].keys() == grads.keys()
        largest = max(float(g.abs().max()) for g in grads.values())
        for parameter, grad in grads.items():
            other = found[name][1][parameter].float()
            torch.testing.assert_close(
                other, grad.float(), rtol=2e-2, atol=2e-2 * largest, msg=f"{name} {parameter}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_first_forward_of_the_base_changes_nothing(world: int, dtype: torch.dtype) -> None:
    names = [name for name in NAMES if settings(name).needs_reference]
    (streamed, *_) = run_ranks(step_of, world, names, "lora", dtype, True)
    (known, *_) = run_ranks(step_of, world, names, "lora", dtype, False)
    assert_same(streamed, known)
    for _, grads, reduced in streamed.values():
        assert reduced == ({torch.float32} if world > 1 else set())
        assert {g.dtype for g in grads.values()} == {dtype}


@pytest.mark.parametrize("kind", [slow("dora"), "head", slow("tokens")])
def test_every_kind_of_adapter_is_switched_off(kind: str) -> None:
    (streamed, *_) = run_ranks(step_of, 2, ["sigmoid"], kind, torch.float32, True)
    (known, *_) = run_ranks(step_of, 2, ["sigmoid"], kind, torch.float32, False)
    assert_same(streamed, known)
    assert streamed["sigmoid"][2] == {torch.float32}


@contextlib.contextmanager
def peft_switch(model: Any) -> Iterator[None]:
    with model.disable_adapter():
        yield


def with_peft_switch(rank: int, world: int, dtype: torch.dtype) -> Any:
    preference.disabled_adapters = peft_switch  # type: ignore[assignment]
    try:
        return step_of(rank, world, ["sigmoid"], "lora", dtype, True)["sigmoid"][2]
    finally:
        preference.disabled_adapters = disabled_adapters


def test_a_switch_that_freezes_adapters_would_lose_the_reduction_in_fp32() -> None:
    """The control: these tests can fail."""
    assert run_ranks(with_peft_switch, 2, torch.bfloat16)[0] == {torch.bfloat16}
    with pytest.raises(Exception, match="attempting to assign a gradient"):
        run_ranks(with_peft_switch, 2, torch.float32)


@pytest.mark.parametrize("kind", ["lora", slow("dora"), slow("head")])
def test_compiled_layers_follow_the_switch_of_the_adapters(kind: str) -> None:
    """A graph that was made with the adapters off, or on, is not run with them on, or off."""
    cfg, (model, _) = settings("sigmoid"), models()
    attend_within_documents(model)
    batch = batch_of(cfg, "bfd", [0, 1, 2, 3], None)
    with torch.no_grad():
        base = sequence_logps(model, batch)[0][:-1]
        peft = adapted(model, **(KINDS[kind] or {}))
        policy = sequence_logps(peft, batch)[0][:-1]
        assert not torch.allclose(base, policy, atol=1e-2)
        torch._dynamo.reset()
        for layer in decoder_layers(base_of(peft)).values():
            compile_forward(layer, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(base_model_logps(peft, batch), base)
            torch.testing.assert_close(sequence_logps(peft, batch)[0][:-1], policy)
