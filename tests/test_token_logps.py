"""Log-probabilities inside the head: values and gradients of plain logits, any weight a token."""

from typing import Any

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, as_batch, init_mesh
from test_loss_head import MAPS, small_chunks  # noqa: F401
from tiny_models import rows, tiny_model

from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.loading import load_pretrained
from toolkit.models import build_on_meta
from toolkit.training import head_loss
from toolkit.training.loss import _known, token_logps

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
        _known[model] = None
    model.get_output_embeddings().requires_grad_(head == "trained")
    plain = of_logits(model, batch)
    expected = gradients(model, weighted(plain))
    control = gradients(model, plain.detach().sum() * 0 + of_logits(model, batch).sum())
    for counted in (("cpu",), ()):  # the rows with a target alone, and all of them
        monkeypatch.setattr(head_loss, "_COUNTED", counted)
        found = token_logps(model, as_batch(batch))
        assert found.shape == batch["labels"].shape
        assert torch.equal(found[:, -1], torch.zeros(3))
        torch.testing.assert_close(found[:, :-1], plain, rtol=CLOSE, atol=CLOSE)
        assert_close(gradients(model, weighted(found[:, :-1])), expected)
    with pytest.raises(AssertionError):  # without the weights it is another gradient
        assert_close(control, expected)
    with torch.no_grad():
        torch.testing.assert_close(token_logps(model, as_batch(batch)), found.detach())


def test_too_small_a_number_of_targets_is_no_value(small_chunks, monkeypatch):  # noqa: F811
    monkeypatch.setattr(head_loss, "_COUNTED", ())
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
    (value * world).backward()  # FSDP averages
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
