"""Compiled layers: one graph for all micro-batches of a run, whatever their documents are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import slow
from tiny_models import tiny_class, tiny_config
from torch._dynamo.utils import counters

from toolkit.data.row_formats import EXAMPLES, PAIRS
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.models import attention
from toolkit.models.attention import attend_within_documents
from toolkit.sharding.compiled import compile_forward
from toolkit.training.loss import causal_lm_loss, token_logps

LENGTH, WINDOW = 64, 16
# Of each row the lengths of its documents: many, one, shorter and longer than the window.
PACKED = [
    [[20, 30, 14], [5, 5, 54]],
    [[64], [64]],
    [[8] * 8, [4] * 16],
    [[64], [32, 32]],
    [[16] * 4, [15, 17, 32]],
    [[2, 62], [64]],
]


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, borders: torch.Tensor, window: int
) -> torch.Tensor:
    """Return the attention of each document, [heads, tokens, tokens]."""
    tokens = torch.arange(len(query))
    document = torch.searchsorted(borders[1:], tokens, right=True, out_int32=True)
    back = tokens[:, None] - tokens
    visible = (back >= 0) & (document[:, None] == document)
    if window > 0:
        visible &= back < window
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


@torch.library.custom_op("toolkit_tests::varlen", mutates_args=())
def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, window: int
) -> torch.Tensor:
    """Stand in for a GPU's kernel: a compiler does not look into it."""
    shares = _probabilities(query, key, borders, window)
    return torch.einsum("hqk,khd->qhd", shares, value).contiguous()


@varlen.register_fake
def _(query: Any, key: Any, value: Any, borders: Any, window: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("toolkit_tests::varlen_backward", mutates_args=())
def varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shares = _probabilities(query, key, borders, window)
    of_shares = torch.einsum("qhd,khd->hqk", gradient, value)
    of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True))
    of_scores *= query.shape[-1] ** -0.5
    return (
        torch.einsum("hqk,khd->qhd", of_scores, key).contiguous(),
        torch.einsum("hqk,qhd->khd", of_scores, query).contiguous(),
        torch.einsum("hqk,qhd->khd", shares, gradient).contiguous(),
    )


@varlen_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, borders: Any, window: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: torch.Tensor) -> Any:
    return *varlen_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.window), None, None


torch.library.register_autograd("toolkit_tests::varlen", _gradients, setup_context=_keep)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attend by one operation, as on a GPU."""

    def attend(qkv: Any, borders: Any, longest: int, scaling: float, window: int | None) -> Any:
        query, *others = qkv
        key, value = (attention._repeat_heads(x, query) for x in others)
        return varlen(query, key, value, borders, window or 0)

    monkeypatch.setattr(attention, "_can_use_varlen_kernel", lambda query, dropout: True)
    monkeypatch.setattr(attention, "_attend_varlen", attend)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_of(rows: list[list[int]], *, pairs: bool = False) -> Batch:
    shape = SampleShape("bfd", LENGTH, borders=True, row_format=PAIRS if pairs else EXAMPLES)
    drawn = np.random.default_rng(len(rows[0]))
    samples = []
    for row in rows:
        ids = [drawn.integers(1, 60, n) for n in row]
        pieces = [Piece(i, i.copy(), len(i) // 2 if pairs else 0) for i in ids]
        samples.append(shape.sample(pieces))
    return shape.batch(samples)


def whole_rows(count: int) -> Batch:
    shape = SampleShape("wrapped", LENGTH, borders=True)
    ids = np.arange(LENGTH) % 50 + count
    return shape.batch([shape.sample([Piece(ids, ids.copy())]) for _ in range(2)])


def model_of(kind: str, where: str) -> torch.nn.Module:
    torch.manual_seed(0)
    more = {"sliding_window": WINDOW} if kind == "mistral" else {}
    config = tiny_config(kind, max_position_embeddings=LENGTH, **more)
    model = tiny_class(kind)._from_config(config, dtype=torch.float32).train()
    attend_within_documents(model)
    for module in model.model.layers if where == "layer" else [model] * (where == "model"):
        compile_forward(module, backend="aot_eager")
    return model


def losses(model: Any, batches: list[Batch], pairs: bool) -> tuple[list[float], list[int]]:
    """Return the loss of each batch, backward included, and the graphs after each."""
    values, graphs = [], []
    for batch in batches:
        loss = token_logps(model, batch).sum() if pairs else causal_lm_loss(model, batch).total
        loss.backward()
        values.append(float(loss.detach()))
        graphs.append(counters["stats"]["unique_graphs"])
    return values, graphs


@pytest.mark.parametrize("data", ["documents", "pairs", "whole rows"])
@pytest.mark.parametrize("kind", [slow("llama"), "mistral"])
def test_a_layer_has_one_graph_for_batches_of_any_documents(kind: str, data: str) -> None:
    pairs = data == "pairs"
    batches = [batch_of(rows, pairs=pairs) for rows in PACKED]
    if data == "whole rows":
        batches = [whole_rows(count) for count in range(3)]
    compiled, graphs = losses(model_of(kind, "layer"), batches, pairs)
    assert graphs == [1] * len(batches)
    eager, _ = losses(model_of(kind, ""), batches, pairs)
    assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.slow
def test_a_model_that_is_compiled_as_one_is_compiled_once() -> None:
    batches = [batch_of(rows) for rows in PACKED]
    _, graphs = losses(model_of("mistral", "model"), batches, False)
    assert graphs == graphs[:1] * len(batches)


@pytest.mark.slow
def test_lengths_that_layers_compare_make_more_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(attention, "fix_length_arguments", lambda inputs, parts: inputs)
    _, graphs = losses(model_of("mistral", "layer"), [batch_of(rows) for rows in PACKED], False)
    assert graphs[-1] > graphs[0]
