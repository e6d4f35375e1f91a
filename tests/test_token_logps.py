"""Log-probabilities inside the head: values and gradients of plain logits, any weight a token."""

from typing import Any

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, as_batch, init_mesh, sharded_of
from test_loss_head import MAPS, chunk, small_chunks  # noqa: F401
from tiny_models import rows, tiny_model

from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.errors import TrainingError
from toolkit.loading import load_pretrained
from toolkit.models import build_on_meta
from toolkit.training import head_loss, loss_kernel
from toolkit.training import step as step_module
from toolkit.training.head_logps import HeadLogps
from toolkit.training.head_loss import HeadLoss
from toolkit.training.loss import _logit_maps, causal_lm_loss, token_logps

CLOSE = 2e-5


def of_logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return [B, T - 1] by all logits, 0 where a label is left out."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    found = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return found.masked_fill(labels == -100, 0.0)


def weighted(logps: torch.Tensor, seed: int = 3) -> torch.Tensor:
    """Return a sum in which each sequence, and each token, has a weight of its own."""
    draw = torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed))
    return (logps * draw).sum() + logps.sum(-1).square().sum() / 10


def gradients(model: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        off = (found[name] - theirs).abs().max() / theirs.abs().max()
        assert off < CLOSE, (name, float(off))


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("kind", [*MAPS, "from logits"])
def test_values_and_gradients_are_those_of_all_logits(kind, head, small_chunks, monkeypatch):  # noqa: F811
    changes, _ = MAPS.get(kind, ({}, None))
    name = "llama" if kind == "from logits" else kind
    model, batch = tiny_model(name, **changes).train(), rows(3)
    batch["labels"][1, 2:6] = -100
    if kind == "from logits":
        _logit_maps[model] = None
    model.get_output_embeddings().requires_grad_(head == "trained")
    plain = of_logits(model, batch)
    expected = gradients(model, weighted(plain))
    control = gradients(model, plain.detach().sum() * 0 + of_logits(model, batch).sum())
    for counted in (("cpu",), ()):  # the rows with a target alone, and all of them
        monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", counted)
        found = token_logps(model, as_batch(batch))
        assert found.shape == batch["labels"].shape
        assert torch.equal(found[:, -1], torch.zeros(3))
        torch.testing.assert_close(found[:, :-1], plain, rtol=CLOSE, atol=CLOSE)
        assert_close(gradients(model, weighted(found[:, :-1])), expected)
    with pytest.raises(AssertionError):  # without the weights it is another gradient
        assert_close(control, expected)
    with torch.no_grad():
        torch.testing.assert_close(token_logps(model, as_batch(batch)), found.detach())


@pytest.fixture
def kernels(monkeypatch) -> set[str]:
    """Compute as on devices that have kernels, of plain operations; returns those that were run."""
    ran: set[str] = set()
    functions = {
        name: getattr(loss_kernel, name) for name in ("compute_target_logps", "logps_and_gradient")
    }
    for name, function in functions.items():

        def note(*tensors, name=name, function=function, **options):
            ran.add(name)
            return function(*tensors, **options)

        monkeypatch.setattr(loss_kernel, name, note)
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_KERNEL", ("cpu",))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return ran


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("kind", MAPS)
def test_in_one_kernel_values_and_gradients_are_the_same(kind, head, small_chunks, kernels):  # noqa: F811
    model, batch = tiny_model(kind, **MAPS[kind][0]).train(), rows(3)
    model.get_output_embeddings().requires_grad_(head == "trained")
    plain = of_logits(model, batch)
    expected = gradients(model, weighted(plain))
    found = token_logps(model, as_batch(batch))
    torch.testing.assert_close(found[:, :-1], plain, rtol=CLOSE, atol=CLOSE)
    assert_close(gradients(model, weighted(found[:, :-1])), expected)
    assert kernels == {"logps_and_gradient"}
    with torch.no_grad():
        torch.testing.assert_close(token_logps(model, as_batch(batch)), found.detach())
    assert kernels == {"logps_and_gradient", "compute_target_logps"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [(1.0, None), (0.5, 3.0)])
def test_a_compiled_kernel_gives_what_plain_operations_give(rule, dtype, capsys):
    logits, targets = chunk(dtype)
    weights = torch.linspace(-2.0, 2.0, len(logits))[:, None]
    loss_kernel._compiled_kernel.cache_clear()
    logps, grad = loss_kernel.weighted_logps(logits, targets, weights, *rule)
    alone = loss_kernel.target_logps(logits, targets, *rule)
    assert "plain operations" not in capsys.readouterr().out  # the kernels were taken
    leaf = logits.double().requires_grad_()
    mapped = leaf * rule[0] if rule[1] is None else rule[1] * (leaf * rule[0] / rule[1]).tanh()
    expected = mapped.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    expected = expected.masked_fill(targets == -100, 0.0)
    expected.backward(weights.squeeze(1).double())
    close = 1e-5 if dtype == torch.float32 else 1e-2
    for values in (logps, alone):
        torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert leaf.grad is not None
    off = (grad.double() - leaf.grad).norm() / leaf.grad.norm()
    assert off < close


def test_too_small_a_number_of_targets_is_no_value(small_chunks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(head_loss, "_DEVICES_WITH_HOST_COUNTS", ())
    model, batch = tiny_model("llama"), rows(2)
    count = int(as_batch(batch).count)
    right = token_logps(model, as_batch(batch | {"num_items_in_batch": count}))
    torch.testing.assert_close(right, token_logps(model, as_batch(batch)))
    assert token_logps(model, as_batch(batch | {"num_items_in_batch": count - 1})).isnan().all()


def sharded_gradients(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict:
    cfg = ShardingConfig(param_dtype="float32", **changes)
    model = build_on_meta(ModelConfig(folder, dtype="float32"))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    batch = {k: v[rank::world] for k, v in rows(2 * world).items()}
    value = token_logps(model.train(), as_batch(batch))[:, :-1].square().sum()
    value.backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"embedding_units": True, "reshard_after_forward": True}])
def test_a_sharded_head_is_gathered_for_its_backward(changes, tmp_path, small_chunks):  # noqa: F811
    folder = save_tiny_model(tmp_path / "model", "llama")
    found = run_ranks(sharded_gradients, 2, str(folder), changes)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    expected = gradients(model, of_logits(model, rows(4)).square().sum())
    for own in found:
        assert_close(own, expected)


class Dropping(torch.nn.Module):
    """A head that draws, as one with an adapter and its dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(160, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(hidden, 0.5) @ self.weight.t()


def test_a_head_that_draws_draws_the_same_for_its_backward(small_chunks) -> None:  # noqa: F811
    torch.manual_seed(1)
    head = Dropping()
    hidden = torch.randn(3, 9, 8, requires_grad=True)
    batch = as_batch({"input_ids": torch.zeros(3, 9), "labels": torch.randint(0, 160, (3, 9))})
    task = HeadLoss(head, head.forward, 160)
    taught = batch.targets.flatten() != -100
    flat, targets = hidden.flatten(0, 1)[taught], batch.targets.flatten()[taught]

    def gradients_of(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(value, [hidden, head.weight])

    torch.manual_seed(2)
    parts = [head(flat[part][None])[0] for part in head_loss.chunk_slices(task, flat)]
    assert len(parts) > 2
    plain = torch.cat(parts).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    weights = torch.randn(len(plain))
    expected = gradients_of((plain * weights).sum())
    torch.manual_seed(2)
    found, _ = HeadLogps(task)(hidden, batch.targets)
    drawn = torch.rand(())
    mine = gradients_of((found.flatten()[taught] * weights).sum())
    torch.manual_seed(2)
    HeadLogps(task)(hidden, batch.targets)
    torch.rand(())
    after = torch.rand(())
    torch.manual_seed(2)
    again, _ = HeadLogps(task)(hidden, batch.targets)
    assert torch.rand(()) == drawn
    gradients_of(again.sum())
    assert torch.rand(()) == after  # the backward moves no draw of the run
    torch.manual_seed(3)
    other = gradients_of(
        (HeadLogps(task)(hidden, batch.targets)[0].flatten()[taught] * weights).sum()
    )
    for a, b, control in zip(mine, expected, other, strict=True):
        torch.testing.assert_close(a, b, rtol=CLOSE, atol=CLOSE)
        assert (control - b).abs().max() > 0.1


def test_an_update_is_told_by_how_much_each_micro_batch_counts() -> None:
    model = tiny_model("llama").train()
    batches = [as_batch(rows(2)), as_batch(rows(3))]
    whole = [int(batch.count) for batch in batches]

    def step(counts: list[torch.Tensor] | None) -> step_module.StepStats:
        update = step_module.Update(sharded_of(model), batches, counts)
        for batch in update:
            update.mean(causal_lm_loss(model, batch)).backward()
        return update.step(torch.optim.SGD(model.parameters(), lr=0.0))

    plain = step(None)
    double = step([torch.tensor(2 * n) for n in whole])
    assert float(double.loss) == pytest.approx(float(plain.loss) / 2)
    assert int(double.tokens) == int(plain.tokens) == sum(whole)
    with pytest.raises(TrainingError, match=r"a count for each of the 2 micro-batches .* got 1"):
        step_module.Update(sharded_of(model), batches, [torch.tensor(3)])
