"""Compare the kernels of fused experts: time and memory of one layer's forward and backward.

    python benchmarks/experts.py [--tokens 128] [--rounds 7] [--threads 2] [--output FILE]

The values of `model.experts_implementation`, in fp32 and bf16, for many narrow experts (the
proportions of Qwen3-30B-A3B) and for few wide ones (those of Mixtral). The kernels take turns in
random order in one process with the same weights and tokens; each step is the forward and the
backward of all weights. Times are medians. The memory is the highest anonymous memory above that
before the step, so gradients are in it. The difference of each kernel's output to that of `eager`
is printed, too.

Then the same experts in 4 bits (`lora.quantize_moe_experts`): seconds to dequantise a layer, which
each forward and each recomputation does.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from memory import Peak, anonymous
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from toolkit.config.lora import LoraConfig
from toolkit.models.packed_experts import PackedExpertStack

KERNELS = ("eager", "grouped_mm", "batched_mm")
DTYPES = ("float32", "bfloat16")
SHAPES = {
    "many narrow": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192},
    "few wide": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1792},
}
HIDDEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/experts.md"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name, sizes in SHAPES.items():
        for dtype in DTYPES:
            experts = build_experts({"hidden_size": HIDDEN, **sizes}, dtype, "cpu")
            rows += [
                [name, dtype, *cells]
                for cells in compare_kernels(experts, args.tokens, args.rounds)
            ]
            print(*rows[-len(KERNELS) :], sep="\n", flush=True)
    packed = [
        [name, *time_packed({"hidden_size": HIDDEN, **sizes}, "cpu", args.rounds)]
        for name, sizes in SHAPES.items()
    ]
    text = report(rows, packed, args)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def build_experts(sizes: dict[str, int], dtype: str, device: str) -> Qwen3MoeExperts:
    """Build the fused experts of one layer of Qwen3's type with random weights.

    Args:
        sizes: fields of the config: `hidden_size`, `num_experts` and others.
        dtype: name of the dtype of its weights.
        device: where they are.
    """
    torch.manual_seed(0)
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return experts.to(device, getattr(torch, dtype))


def draw_inputs(
    experts: Qwen3MoeExperts, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw hidden states [N, H], and the experts and weights of each token [N, k].

    Popular experts get more tokens than others, as in training.
    """
    config, weight = experts.config, next(experts.parameters())
    torch.manual_seed(1)
    hidden = torch.randn(tokens, config.hidden_size)
    scores = torch.randn(tokens, config.num_experts) + torch.randn(config.num_experts)
    weights, chosen = scores.softmax(-1).topk(config.num_experts_per_tok)
    hidden = hidden.to(weight.device, weight.dtype).requires_grad_()
    return hidden, chosen.to(weight.device), weights.to(weight.device, weight.dtype)


def run_step(experts: Qwen3MoeExperts, inputs: Any, kernel: str) -> torch.Tensor:
    """Run forward and backward by one kernel; return the output."""
    experts.config._experts_implementation = kernel
    experts.zero_grad()
    output = experts(*inputs)
    output.float().square().mean().backward()
    return output.detach()


def compare_kernels(experts: Qwen3MoeExperts, tokens: int, rounds: int) -> list[list[str]]:
    """Time all kernels in turns; return [kernel, s, ratio to eager, MB, difference] of each."""
    inputs = draw_inputs(experts, tokens)
    expected = run_step(experts, inputs, "eager").float()
    gaps, seconds, peaks = {}, {k: [] for k in KERNELS}, dict.fromkeys(KERNELS, 0)
    for kernel in KERNELS:
        output = run_step(experts, inputs, kernel).float()
        gaps[kernel] = float((output - expected).abs().max() / expected.abs().max())
    for _ in range(rounds):
        for kernel in random.sample(KERNELS, len(KERNELS)):
            experts.zero_grad()
            before = anonymous()
            with Peak() as peak:
                begun = time.perf_counter()
                run_step(experts, inputs, kernel)
                seconds[kernel].append(time.perf_counter() - begun)
            peaks[kernel] = max(peaks[kernel], peak.highest - before)
    eager = statistics.median(seconds["eager"])
    return [
        [
            kernel,
            f"{(median := statistics.median(seconds[kernel])):.3f}",
            f"{median / eager:.2f}",
            f"{peaks[kernel] / 2**20:,.0f}",
            f"{gaps[kernel]:.1e}",
        ]
        for kernel in KERNELS
    ]


def time_packed(sizes: dict[str, int], device: str, rounds: int) -> list[str]:
    """Time the dequantisation of a layer's experts; return [MB in bf16, MB in 4 bits, s]."""
    experts = build_experts(sizes, "bfloat16", device)
    lora = LoraConfig(r=16, load_in_4bit=True, quantize_moe_experts=True)
    seconds = [0.0] * rounds
    nbytes, packed_bytes = 0, 0
    for leaf, weight in list(experts.named_parameters(recurse=False)):
        stack = PackedExpertStack(experts, leaf, lora, torch.bfloat16)
        packed = stack.pack(weight.detach())
        nbytes, packed_bytes = nbytes + weight.nbytes, packed_bytes + packed.nbytes
        stack.dequantise(packed)  # builds the tables
        for i in range(rounds):
            begun = time.perf_counter()
            stack.dequantise(packed)
            seconds[i] += time.perf_counter() - begun
    return [
        f"{nbytes / 2**20:,.0f}",
        f"{packed_bytes / 2**20:,.0f}",
        f"{statistics.median(seconds):.3f}",
    ]


def report(rows: list[list[str]], packed: list[list[str]], args: argparse.Namespace) -> str:
    """Format the page."""
    shapes = "; ".join(
        f"{name}: {s['num_experts']} experts of {s['moe_intermediate_size']}, "
        f"{s['num_experts_per_tok']} per token"
        for name, s in SHAPES.items()
    )
    lines = [
        "# Kernels of fused experts",
        "",
        f"Forward and backward of one layer's experts, {args.tokens:,} tokens of width {HIDDEN}, "
        f"{args.threads} threads ({shapes}). The kernels take turns in random order for "
        f"{args.rounds} rounds; seconds are medians. The difference is that of the outputs to "
        "those of `eager`, as a share of the largest.",
        "",
        "| experts | dtype | kernel | s | of eager | peak MB | difference |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "Dequantisation of the same layer from 4 bits to bf16:",
        "",
        "| experts | MB in bf16 | MB in 4 bits | s |",
        "|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in packed),
        "",
        describe("experts.py", "torch", "transformers"),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
