"""Recomputed layers give the gradients of layers that keep everything, or are refused by name.

Of a kept result that is written to later the recomputation must not be given what was written; the
control is PyTorch's own selective checkpointing, which gives it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from sharded import CLOSE, apply_fsdp, init_mesh, loss_sum, relative_difference
from test_planning import _config
from tiny_models import rows, save, tiny_model
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import DynamicCache

from toolkit import ranks
from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.errors import ShardingError
from toolkit.loading import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.planning.meter import ACTIVATIONS
from toolkit.planning.simulation import simulate
from toolkit.sharding import recompute
from toolkit.sharding.fsdp import plan_units
from toolkit.sharding.host_memory import HostMemory

WIDTH = 32
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.fixture
def keeps_thin(monkeypatch):
    """All products of these small models are thin: they are kept as if they were not."""
    monkeypatch.setattr(recompute, "_THIN", 0)


# --------------------------------------------------------------------------------------------------
# Writing in place to the result of a product
# --------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Two linear layers; what they are made to do is `body`."""

    def __init__(self, body: Callable[["Parts", Tensor], Tensor]):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.scale, self.body = nn.Parameter(torch.rand(WIDTH) + 0.5), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def on_product(write: Callable[[Parts, Tensor, Tensor], Any]) -> Callable[[Parts, Tensor], Tensor]:
    """Return a layer that writes to the result of its first product."""

    def body(self: Parts, x: Tensor) -> Tensor:
        y = self.a(x)
        write(self, x, y)
        return x + self.b(y.tanh())

    return body


def two_dimensional(self: Parts, x: Tensor) -> Tensor:
    y = self.a(x.flatten(0, 1))
    y += self.scale
    return x + self.b(y.tanh()).view_as(x)


def plain_product(self: Parts, x: Tensor) -> Tensor:
    y = x @ self.a.weight
    y += self.scale
    return x + self.b(y.tanh())


def copied_over(self: Parts, x: Tensor) -> Tensor:
    y = self.a(x)
    z = y.tanh()
    y.copy_(x)
    return x + self.b(z) + y.sin()


def several_at_once(self: Parts, x: Tensor) -> Tensor:
    y, z = self.a(x), self.b(x)
    torch._foreach_mul_([y, z], 2.0)
    return x + y.tanh() * z


def given_out(self: Parts, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        torch.add(y.detach(), 1.0, out=y.detach())


def past_torch(self: Parts, x: Tensor, y: Tensor) -> None:
    """Write as a Triton kernel does: no operation is called."""
    y.detach().numpy()[...] *= np.float32(2)


def left_by_the_layer(self: Parts, x: Tensor) -> Tensor:
    """What gets this writes to it (`gradients`)."""
    return self.b(self.a(x).tanh())


WRITES: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "add": on_product(lambda self, x, y: y.add_(x)),
    "multiply": on_product(lambda self, x, y: y.mul_(self.scale)),
    "view": on_product(lambda self, x, y: y.view(-1, 8).add_(1.0)),
    "slice": on_product(lambda self, x, y: y[..., :4].mul_(2.0)),
    "rows put": on_product(lambda self, x, y: y.index_add_(1, torch.tensor([1]), x[:, :1])),
    "mask": on_product(lambda self, x, y: y.masked_fill_(y > 0, 0.0)),
    "data": on_product(lambda self, x, y: y.data.add_(1.0)),
    "out": on_product(given_out),
    "2-D": two_dimensional,
    "matmul": plain_product,
    "copy": copied_over,
    "foreach": several_at_once,
    "numpy": on_product(past_torch),
    "left": left_by_the_layer,
}
PLAIN = on_product(lambda self, x, y: None)


def gradients(
    body: Callable, prepare: Callable[[nn.Module], Any], compiled: bool = False
) -> list[Tensor]:
    """Return the gradients of three layers after the second of two steps."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Parts(body) for _ in range(3))
    x = torch.randn(2, 6, WIDTH)
    for layer in layers:
        prepare(layer)
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        layers.zero_grad()
        hidden = x * layers[0].scale + 1
        for layer in layers:
            hidden = layer(hidden)
            hidden += 1.0
        hidden.square().sum().backward()
    return [p.grad for p in layers.parameters() if p.grad is not None]


def as_torch_keeps(layer: Any) -> None:
    forward, operations = layer.forward, list(recompute._kept_operations())
    contexts = partial(create_selective_checkpoint_contexts, operations)
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False, context_fn=contexts)


SELECTIVE = partial(recompute.recompute_in_backward, selective=True)


@pytest.mark.parametrize("kind", WRITES)
def test_what_is_written_to_is_computed_again(kind, keeps_thin):
    plain = gradients(WRITES[kind], lambda layer: None)
    for host in (None, HostMemory(pin=False)):
        found = gradients(WRITES[kind], partial(SELECTIVE, host=host))
        assert relative_difference(found, plain) < CLOSE
    if kind == "left":  # PyTorch computes the last product of a layer for nobody
        return
    # The control: without a word, but where a version counter is shared.
    if kind == "2-D":
        with pytest.raises(RuntimeError, match="has been mutated"):
            gradients(WRITES[kind], as_torch_keeps)
        return
    wrong = gradients(WRITES[kind], as_torch_keeps)
    assert max((a - b).abs().max() for a, b in zip(wrong, plain, strict=True)) > 0.01


@pytest.mark.parametrize("kind", WRITES)
def test_compiled_layers_write_as_they_did(kind, keeps_thin):
    torch._dynamo.reset()
    plain = gradients(WRITES[kind], lambda layer: None)
    found = gradients(WRITES[kind], SELECTIVE, compiled=True)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Count(TorchDispatchMode):
    """Counts matrix products, each by its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.seen.append(tuple(tuple(a.shape) for a in args if isinstance(a, Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("body", "again"), [("plain", 0), ("add", 1), ("numpy", 1)])
def test_only_what_is_written_to_is_computed_again(body, again, keeps_thin):
    """By a write that is seen one of two products; past PyTorch those of that kind, all but the
    last, which nobody needs.
    """

    def products(prepare: Callable[[nn.Module], Any]) -> int:
        layer = Parts(WRITES.get(body, PLAIN))
        prepare(layer)
        x = torch.randn(2, 6, WIDTH, requires_grad=True)
        for _ in range(2):
            with Count() as count:
                layer(x).sum().backward()
        return len(count.seen)

    assert products(SELECTIVE) - products(lambda layer: None) == again


def test_what_is_not_kept_is_said_once_for_each_kind_of_layer(capsys, keeps_thin):
    recompute._log_once.cache_clear()
    gradients(WRITES["add"], SELECTIVE)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "recompute  Parts writes in place to results of mm: those run again in the backward "
        "instead of being kept"
    )
    gradients(PLAIN, SELECTIVE)  # the control
    assert not capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Forwards that cannot be repeated
# --------------------------------------------------------------------------------------------------


def writes_to_input(self: Parts, x: Tensor) -> Tensor:
    x.view(-1)[3:].add_(0.5)
    return x + self.b(self.a(x).tanh())


def grows(self: Parts, x: Tensor) -> Tensor:
    seen = vars(self).setdefault("seen", [])
    seen.append(x)
    return x + self.b(torch.cat(seen, dim=1)).tanh().sum(1, keepdim=True)


def grows_and_fails(self: Parts, x: Tensor) -> Tensor:
    seen = vars(self).setdefault("seen", [])
    seen.append(x)
    return x + self.b(x + torch.cat(seen, dim=1)).tanh()


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (writes_to_input, r"it writes to its own input in place \(aten.add_.Tensor\)"),
        (grows, r"the second time it runs aten.mm.default on .*24, 32.*12, 32"),
        (grows_and_fails, r"the second time it ends with The size of tensor a \(6\)"),
    ],
)
def test_a_forward_that_cannot_be_repeated_is_refused_by_name(body, why, selective):
    prepare = partial(recompute.recompute_in_backward, name="layers.7", selective=selective)
    for layer in (Parts(body), Parts(PLAIN)):
        prepare(layer)
        x = torch.ones(2, 6, WIDTH, requires_grad=True) * 1
        if layer.body is PLAIN:  # the control
            layer(x).sum().backward()
            continue
        with pytest.raises(ShardingError, match=rf"layers\.7 \(Parts\) cannot .*{why}.*; set shar"):
            layer(x).sum().backward()


def test_a_cache_is_not_given_to_what_is_recomputed():
    class Caching(nn.Module):
        def forward(self, x: Tensor, past_key_values: DynamicCache | None = None) -> Tensor:
            assert past_key_values is None
            return x.tanh()

    layer = Caching()
    recompute.recompute_in_backward(layer)
    x = torch.ones(1, 2, 3, 4, requires_grad=True)
    layer(x, past_key_values=DynamicCache()).sum().backward()
    layer(x, DynamicCache()).sum().backward()


# --------------------------------------------------------------------------------------------------
# Thin products
# --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Two linear layers, an adapter on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = nn.Linear(300, 384), nn.Linear(384, 300)
        self.a, self.b = nn.Linear(300, 16, bias=False), nn.Linear(16, 384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last((self.base(x) + self.b(self.a(x))).tanh())


def test_thin_products_are_not_kept():
    """LoRA's B, whose result is as large as the layer's, and sums over the rank."""

    def products(prepare: Callable[[nn.Module], Any]) -> list[tuple[tuple[int, ...], ...]]:
        layer = Adapted()
        prepare(layer)
        x = torch.randn(8, 300, requires_grad=True)
        layer(x).sum().backward()
        with Count() as count:
            layer(x).sum().backward()
        return count.seen

    plain, found, b = products(lambda layer: None), products(SELECTIVE), ((8, 16), (16, 384))
    assert sorted(found) == sorted([*plain, b])


def test_compiled_thin_products_are_not_kept():
    def in_the_backward(selective: bool) -> list[tuple[int, ...]]:
        """Return the shapes of the results of products."""
        torch._dynamo.reset()
        found = []

        def backward(graph: Any, inputs: Any) -> Any:
            made = [n.meta["val"].shape for n in graph.graph.nodes if n.target in PRODUCTS]
            found.extend(map(tuple, made))
            return make_boxed_func(graph.forward)

        layer, x = Adapted(), torch.randn(8, 300, requires_grad=True)
        recompute.recompute_in_backward(layer, selective=selective)
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )
        layer.compile(backend=backend, fullgraph=True)
        layer(x).sum().backward()
        return found

    selective, full = in_the_backward(True), in_the_backward(False)
    assert selective.count((8, 384)) == full.count((8, 384)) - 1  # the control: of the base, too
    assert selective.count((8, 16)) == full.count((8, 16)) - 1


def test_attention_scores_and_depthwise_convolutions_are_thin():
    ops, rand = torch.ops.aten, torch.rand
    scores, values = (rand(2, 300, 64), rand(2, 64, 300)), (rand(2, 300, 300), rand(2, 300, 64))
    assert not recompute._is_worth_keeping(ops.bmm.default, scores)
    assert recompute._is_worth_keeping(ops.bmm.default, values)
    assert recompute._is_worth_keeping(ops.addmm.default, (rand(9), rand(4, 300), rand(300, 9)))
    assert not recompute._is_worth_keeping(ops.addmm.default, (rand(900), rand(4, 9), rand(9, 900)))
    for channels, kept in ((1, False), (300, True)):
        convolution = (rand(1, 300, 9), rand(300, channels, 4))
        assert recompute._is_worth_keeping(ops.convolution.default, convolution) is kept


@pytest.mark.slow
def test_adapters_keep_little_beside_what_they_adapt(tmp_path, monkeypatch):
    """Bytes of activations at the peak of a simulated step."""

    def kept(*flags: str) -> int:
        flags = (*flags, "--sharding.activation_checkpointing=selective")
        sim = simulate(_config(tmp_path, *flags, length=256), 1)
        return sim.peaks["forward"].kinds[ACTIVATIONS]

    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    tiny_model("llama", **wide).save_pretrained(tmp_path)
    plain, adapted = kept(), kept("--lora.r=8")
    assert adapted < 1.1 * plain
    monkeypatch.setattr(recompute, "_THIN", 0)  # the control
    assert kept("--lora.r=8") > 1.3 * plain


# --------------------------------------------------------------------------------------------------
# Types of transformers
# --------------------------------------------------------------------------------------------------

FP32 = ShardingConfig(param_dtype="float32", dp_replicate=1)


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3n_text", "gpt_oss", "falcon", "llama4_text", "qwen3_moe", "xlm"]
)
def test_types_give_the_gradients_of_no_recomputation(kind, keeps_thin):
    def gradients_of(mode: str, scale: float = 1.0) -> dict[str, Tensor]:
        """Return the gradients; before the backward, parameters are multiplied by `scale`."""
        model = tiny_model(kind).train()
        for name in plan_units(model, FP32).layers if mode != "none" else ():
            layer = model.get_submodule(name)
            recompute.recompute_in_backward(layer, name=name, selective=mode == "selective")
        loss = loss_sum(model, rows(2))
        for parameter in model.parameters():
            parameter.data *= scale
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plain = gradients_of("none")
    for mode in ("full", "selective"):
        grads = gradients_of(mode)
        assert grads.keys() == plain.keys()
        assert relative_difference([grads[n] for n in plain], plain.values()) < CLOSE, mode
    wrong = gradients_of("full", 1.00002)  # the control
    assert relative_difference([wrong[n] for n in plain], plain.values()) > 3 * CLOSE


def sharded_gradients(rank: int, world: int, folder: str) -> dict[Any, Any]:
    """Return how far gradients differ from those of no recomputation, for types with units inside
    of their layers.
    """
    recompute._THIN = 0
    found: dict[Any, Any] = {}
    for kind in ("gemma3", "zamba2"):
        path = Path(folder) / kind
        ranks.on_main(lambda kind=kind, path=path: str(save(tiny_model(kind), path, kind)))
        plain: dict[bool, Any] = {}
        parts = {
            "gemma3": ["Gemma3DecoderLayer", "self_attn", "mlp"],
            "zamba2": ["Zamba2MambaDecoderLayer", "Zamba2HybridLayer", "mamba"],
        }[kind]
        for sublayers, mode in ((s, m) for s in (False, True) for m in ("none", "selective")):
            sharding = {"layer_classes": parts if sublayers else []}
            sharding |= {"activation_checkpointing": mode}
            cfg = dataclasses.replace(FP32, **sharding)
            model = build_on_meta(ModelConfig(str(path)))
            apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
            load_pretrained(model, path, "cpu")
            loss_sum(model.train(), rows(2)).backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads = {n: g.full_tensor() for n, g in grads.items()}
            want = plain.setdefault(sublayers, grads)
            assert want.keys() == grads.keys()
            difference = relative_difference(grads.values(), [want[n] for n in grads])
            found[kind, sublayers, mode] = difference
    return found


@pytest.mark.slow
def test_units_inside_of_layers_may_gather_otherwise_the_second_time(tmp_path):
    """The profiler's marks of a gather are among what runs, and nothing is to be kept of them."""
    for found in run_ranks(sharded_gradients, 2, str(tmp_path)):
        assert len(found) == 8
        assert max(found.values()) < CLOSE, found
