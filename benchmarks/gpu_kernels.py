"""Single kernels on one GPU: cases of `gpu.py`. What the card does at best, the loss head beside
Liger's, the attention of compiled layers beside flash attention.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import (
    NotHere,
    Place,
    ToolkitLoop,
    peaks,
    profiled,
    reset_peak,
    settings,
    timed,
)
from gpu_ledger import Case
from torch.nn.attention import SDPBackend, sdpa_kernel

from toolkit import training
from toolkit.formats import local_tensor
from toolkit.training import launch
from toolkit.training.head_logps import HeadLogps
from toolkit.training.head_loss import HeadLoss


def ceilings(place: Place) -> None:
    """What the card does at best: matrix products, copies, attention."""
    tiny, device = place.tiny, place.device
    side = 64 if tiny else 8192

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

    for m, k, n in ((side, side, side), (side, side // 2, side * 7 // 4), (side, side // 4, side)):
        a, b = random(m, k), random(k, n)
        seconds = timed(place, lambda a=a, b=b: a @ b, 10)  # type: ignore[misc]
        place.record(f"matmul {m} x {k} x {n}", tflops=2 * m * k * n / seconds / 1e12)
    count = 2**16 if tiny else 2**30
    device_bytes = torch.empty(count, dtype=torch.uint8, device=device)
    other = torch.empty_like(device_bytes)
    seconds = timed(place, lambda: other.copy_(device_bytes))
    place.record("copy on the device, read and written", gb_per_second=2 * count / seconds / 1e9)
    for pinned in (True, False):
        host = torch.empty(count // 4, dtype=torch.uint8, pin_memory=pinned and place.cuda)
        part = device_bytes[: count // 4]
        kind = "pinned" if pinned else "pageable"
        for name, to, source in (("to device", part, host), ("to host", host, part)):
            copy = partial(to.copy_, source, non_blocking=True)
            place.record(f"{name}, {kind}", gb_per_second=count / 4 / timed(place, copy) / 1e9)
    for width in (128, 64):
        attention_kernels(place, width, random)


def attention_kernels(place: Place, width: int, random: Callable[..., torch.Tensor]) -> None:
    """Forward and backward of 2 x 4096 tokens: causal, with a dense mask, and by documents."""
    heads, length = (2, 64) if place.tiny else (4096 // width, 4096)
    shape = (2, heads, length, width)
    q, k, v = (random(*shape, grad=True) for _ in range(3))
    grad = random(*shape)
    documents = torch.arange(length, device=place.device) // max(length // 8, 1)
    mask = (documents[:, None] == documents) & torch.ones_like(
        documents[:, None] == documents
    ).tril()
    causal = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    masked = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask[None, None])
    kinds: list[tuple[str, Any, list[SDPBackend]]] = [("masked", masked, [])]
    if place.cuda:
        backends = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        kinds += [(f"causal {b.name.lower()}", causal, [b]) for b in backends]
    else:
        kinds.append(("causal", causal, []))
    for name, call, only in kinds:

        def both(call: Any = call, only: list[SDPBackend] = only) -> None:
            if only:
                with sdpa_kernel(only):
                    call().backward(grad)
            else:
                call().backward(grad)

        milliseconds(place, f"attention {name}, width {width}", both)
    if not place.cuda:
        return
    from torch.nn.attention.varlen import varlen_attn

    rows = 2 * length
    flat = [random(rows, heads, width, grad=True) for _ in range(3)]
    ends = torch.arange(0, rows + 1, length // 8, device=place.device, dtype=torch.int32)
    out_grad = random(rows, heads, width)

    causally: Any = {"window_size": (-1, 0)}

    def by_documents() -> None:
        varlen_attn(*flat, ends, ends, length // 8, length // 8, **causally).backward(out_grad)

    milliseconds(place, f"attention varlen, 8 documents a row, width {width}", by_documents)


def milliseconds(place: Place, name: str, call: Callable[[], Any]) -> None:
    """Record the milliseconds of `call`; a kernel that refuses does not end the others."""
    try:
        place.record(name, ms=1e3 * timed(place, call))
    except (RuntimeError, TypeError) as error:
        place.record(name, error=str(error).splitlines()[0])


def loss_head(place: Place) -> None:
    """Forward and backward of head and loss on 8192 tokens, beside Liger's, and beside its products
    alone.
    """
    for hidden, vocabulary, trained in (
        (4096, 128256, False),
        (4096, 128256, True),
        (2048, 128256, True),
        (2048, 32000, True),
    ):
        head_of(place, hidden, vocabulary, trained)


def head_of(place: Place, hidden: int, vocabulary: int, trained: bool) -> None:
    rows, length = (2, 64) if place.tiny else (2, 4096)
    if place.tiny:
        hidden, vocabulary = hidden // 64, vocabulary // 64
    head = torch.nn.Linear(
        hidden, vocabulary, bias=False, device=place.device, dtype=torch.bfloat16
    )
    states = torch.randn(
        rows, length, hidden, device=place.device, dtype=torch.bfloat16, requires_grad=True
    )
    head.weight.requires_grad_(trained)
    labels = torch.randint(vocabulary, (rows, length), device=place.device)

    def toolkit_loss() -> None:
        loss, answer = HeadLoss(head, head.forward, vocabulary)(states, labels)
        (loss / labels.numel() + answer.sum(dtype=torch.float32)).backward()

    def toolkit_logps() -> None:
        logps, answer = HeadLogps(HeadLoss(head, head.forward, vocabulary))(states, labels)
        (logps.sum() / labels.numel() + answer.sum(dtype=torch.float32)).backward()

    def plain_loss() -> None:
        logits = head(states)[:, :-1].flatten(0, 1).float()
        F.cross_entropy(logits, labels[:, 1:].flatten()).backward()

    flat = states.detach().flatten(0, 1)
    logits = torch.randn(len(flat), vocabulary, device=place.device, dtype=torch.bfloat16)

    def products() -> None:
        flat @ head.weight.detach().T
        logits @ head.weight.detach()
        if trained:
            logits.T @ flat

    calls: dict[str, Callable[[], None]] = {
        "products": products,
        "toolkit": toolkit_loss,
        "plain": plain_loss,
        "log-probabilities of tokens": toolkit_logps,
    }
    if place.cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()

        def liger_loss() -> None:
            inputs = states[:, :-1].flatten(0, 1)
            fused(head.weight, inputs, labels[:, 1:].flatten()).backward()

        calls["liger"] = liger_loss
    kind = "trained" if trained else "frozen"
    for name, call in calls.items():
        head.zero_grad()
        reset_peak(place)
        before = torch.cuda.memory_allocated() if place.cuda else 0
        seconds = timed(place, call)
        peak = peaks(place)["peak_allocated"] - before
        shape = f"{hidden} x {vocabulary} {kind}"
        place.record(f"{shape}: {name}", ms=1e3 * seconds, peak=peak)


# ---- Attention of compiled layers ----------------------------------------------------------------


def compiled_attention(place: Place) -> None:
    """One layer of 8b, compiled, beside flash attention, not compiled: the hidden states and the
    gradients of what makes query, key and value; which kernels ran, and for how long.
    """
    backend = {"torch_compile_backend": "aot_eager"} if place.tiny else {}
    found: dict[str, dict[str, torch.Tensor]] = {}
    with launch.start() as run:
        for way in ("flash", "compiled"):
            compiled = {"torch_compile": "layer" if way == "compiled" else "none", **backend}
            cfg = settings(place, "layer", each=1, sharding=compiled)
            loop = ToolkitLoop(place, cfg, run)
            loop.model.train()
            _, (batch,) = next(iter(loop.data.steps()))
            layer = loop.model.model.layers[0]

            def both(loop: ToolkitLoop = loop, batch: Any = batch, way: str = way) -> None:
                loop.optimizer.zero_grad()
                if way == "flash" and place.cuda:
                    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                        training.causal_lm_loss(loop.model, batch).total.backward()
                else:
                    training.causal_lm_loss(loop.model, batch).total.backward()

            found[way] = {}
            # At what follows the layer: a hook on the layer itself would be compiled too.
            hook = loop.model.model.norm.register_forward_pre_hook(partial(_keep, found[way]))
            both()
            hook.remove()
            for name in ("q_proj", "k_proj", "v_proj"):
                grad = getattr(layer.self_attn, name).weight.grad
                found[way][f"gradient of {name}"] = local_tensor(grad).detach().float().clone()
            both()
            seen = profiled(place, both)
            kernels = seen.get("attention", [])
            place.record(f"kernels, {way}", ms=seen.get("attention_ms"), kernels=kernels)
            del loop, batch, layer, both
    for what, flash in found["flash"].items():
        off = float((found["compiled"][what] - flash).norm() / flash.norm())
        place.record(f"{what}, against flash", off <= 2e-2, differs=off)


def _both_directions(call: Any, leaves: list[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    for leaf in leaves:
        leaf.grad = None
    out = call(*leaves)
    out.backward(grad)
    return out


def _keep(kept: dict[str, torch.Tensor], module: Any, inputs: Any) -> None:
    kept["hidden states"] = inputs[0].detach().float().clone()


def cudnn_candidate(place: Place) -> None:
    """cuDNN's attention as an operation of compiled code (`cudnn_attention.py`) beside flash
    attention, both compiled: outputs and gradients, and the time of both directions.
    """
    from cudnn_attention import cudnn_attention

    if not place.cuda:
        raise NotHere("no GPU, which cuDNN needs")
    for heads, width in ((32, 128), (32, 64)):
        scale, shape = width**-0.5, (2, 4096, heads, width)
        leaves = [
            torch.randn(shape, device=place.device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        grad = torch.randn(shape, device=place.device, dtype=torch.bfloat16)

        # Heads are in the second dimension, as a layer's projections leave them.
        def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: float = scale) -> Any:
            return cudnn_attention(*(t.transpose(1, 2) for t in (q, k, v)), s)[0].transpose(1, 2)

        def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: float = scale) -> Any:
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=s)
            return out.transpose(1, 2)

        found, times = {}, {}
        for name, attend in (("flash", flash), ("cudnn", own)):
            compiled = torch.compile(attend)

            both = partial(_both_directions, compiled, leaves, grad)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                out = both()
                found[name] = [t.detach().float() for t in (out, *(x.grad for x in leaves))]
                times[name] = 1e3 * timed(place, both)
            place.record(f"{name}, width {width}", ms=times[name])
        names = ("output", "gradient of query", "gradient of key", "gradient of value")
        for what, a, b in zip(names, found["cudnn"], found["flash"], strict=True):
            off = float((a - b).norm() / b.norm())
            place.record(f"{what}, width {width}", off <= 2e-2, differs=off)


CASES = (
    Case("cudnn_candidate", cudnn_candidate, 40, timed=True),
    Case("compiled_attention", compiled_attention, 40, needs=("layer",), timed=True),
    Case("loss_head", loss_head, 25, timed=True),
    Case("ceilings", ceilings, 25, timed=True),
)
