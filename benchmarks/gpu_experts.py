"""Mixtures of experts on one GPU: cases of `gpu.py`. The kernels of fused experts compared,
and experts in 4 bits.
"""

from typing import Any

import torch
from experts import KERNELS, build_experts, draw_inputs, run_step
from gpu_cases import STEPS, small
from gpu_common import LORA, NotHere, Place, ToolkitLoop, model_config, peaks, reset_peak, timed
from gpu_ledger import Case
from transformers import AutoModelForCausalLM

from toolkit.config.lora import LoraConfig
from toolkit.models.packed_experts import PackedExpertStack
from toolkit.models.packed_linear import import_bitsandbytes
from toolkit.training import launch

# A layer of Qwen3-30B-A3B, and one of Mixtral 8x7B.
_LAYERS = {
    "128 experts of 768": {
        "hidden_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "8 experts of 14336": {
        "hidden_size": 4096,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14336,
    },
}


def experts_kernels(place: Place) -> None:
    """Forward and backward of one layer's experts on 8,192 tokens in bf16, by each kernel."""
    for name, sizes in _LAYERS.items():
        if place.tiny:
            sizes = {"hidden_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
            sizes |= {"moe_intermediate_size": 32}
        experts = build_experts(sizes, "bfloat16", place.device)
        inputs = draw_inputs(experts, 64 if place.tiny else 8192)
        expected = run_step(experts, inputs, "eager").float()
        for kernel in KERNELS:
            _time_kernel(place, f"{name}, {kernel}", experts, inputs, kernel, expected)
        del experts, inputs, expected


def _time_kernel(
    place: Place, name: str, experts: Any, inputs: Any, kernel: str, expected: torch.Tensor
) -> None:
    """Record time, memory and difference of a kernel; one that refuses does not end the others."""
    reset_peak(place)
    before = torch.cuda.memory_allocated() if place.cuda else 0
    try:
        output = run_step(experts, inputs, kernel).float()
        seconds = timed(place, lambda: run_step(experts, inputs, kernel))
    except RuntimeError as error:  # batched_mm copies the weights of each token's experts
        place.record(name, error=str(error).splitlines()[0])
        return
    peak = peaks(place)["peak_allocated"] - before
    off = float((output - expected).norm() / expected.norm())
    place.record(name, off <= 2e-2, differs=off, ms=1e3 * seconds, peak=peak)


def experts_in_4_bits(place: Place) -> None:
    """Time to dequantise a layer's experts, and steps of a mixture under adapters: the losses are
    those of the mixture in bf16, within what 4 bits change.
    """
    try:
        import_bitsandbytes()
    except Exception as error:
        raise NotHere(f"bitsandbytes: {error}") from error
    sizes = _LAYERS["128 experts of 768"]
    if place.tiny:
        sizes = {**sizes, "hidden_size": 64, "num_experts": 8, "moe_intermediate_size": 64}
    experts = build_experts(sizes, "bfloat16", place.device)
    lora = LoraConfig(r=16, load_in_4bit=True, quantize_moe_experts=True)
    for leaf, weight in list(experts.named_parameters(recurse=False)):
        stack = PackedExpertStack(experts, leaf, lora, torch.bfloat16)
        packed = stack.pack(weight.detach())
        off = float((stack.dequantise(packed) - weight).norm() / weight.norm())
        seconds = timed(place, lambda s=stack, p=packed: s.dequantise(p))  # type: ignore[misc]
        gb = (weight.nbytes + packed.nbytes) / 1e9
        place.record(f"dequantise {leaf}", off < 0.15, differs=off, ms=1e3 * seconds, gb_moved=gb)
    path = place.work / "model-experts"
    torch.manual_seed(0)
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    more |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = model_config(place, "small", "qwen3_moe", hidden_size=64, head_dim=16, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    base = {"name_or_path": str(path), "dtype": "bfloat16"}
    quantised = {**LORA, "load_in_4bit": True}
    with launch.start() as run:
        whole = ToolkitLoop(place, small(place, model=base, lora=quantised), run).losses(STEPS)
        reset_peak(place)
        four = {**quantised, "quantize_moe_experts": True}
        losses = ToolkitLoop(place, small(place, model=base, lora=four), run).losses(STEPS)
        place.equal("losses against experts in bf16", losses, whole, 2e-2)
        place.record("it trains", losses[-1] < losses[0], losses=losses, **peaks(place))


CASES = (
    Case("experts_kernels", experts_kernels, 30, timed=True),
    Case("experts_in_4_bits", experts_in_4_bits, 30),
)
