"""What the loss of a language model's head costs: time, memory, and how exact its gradient is.

    python benchmarks/loss_head.py [--tokens 8192] [--hidden 256] [--threads 2] [--output FILE]

Hidden states and a head of 32k and 128k rows, in fp32 and bf16, forward and backward of the summed
cross entropy, scaled as a step scales it, by

    default   all logits, cast to fp32, and `F.cross_entropy`, as transformers does
    chunked   chunks of 64 M logits, each computed again in the backward (`checkpoint`)
    toolkit   `HeadLoss`: gradients made in the forward
    torch     `F.linear_cross_entropy` of torch 2.13, 256 tokens a chunk

Each in a process of its own, once. The memory is the highest anonymous memory above that before
the forward: gradients are in it. Errors are of the loss and of the gradients against fp64, as a
share of their norm, with 2,000 tokens of width 64, so that each way works in several chunks.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import describe
from memory import Peak, anonymous
from torch.utils.checkpoint import checkpoint

from toolkit.training.head_loss import HeadLoss

VOCABULARIES = (32_000, 128_000)
DTYPES = ("float32", "bfloat16")
Loss = Callable[[torch.nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/evidence/benchmarks/loss_head.md")
    )
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.case is not None:
        kind, dtype, vocabulary = args.case
        print(json.dumps(measure(LOSSES[kind], dtype, int(vocabulary), args)))
        return
    rows = []
    for vocabulary in VOCABULARIES:
        for dtype in DTYPES:
            for kind in LOSSES:
                case = [kind, dtype, str(vocabulary)]
                command = [sys.executable, __file__, *sys.argv[1:], "--case", *case]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                rows.append((vocabulary, dtype, kind, json.loads(done.stdout)))
                print(*rows[-1], flush=True)
    text = report(rows, args)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


# --------------------------------------------------------------------------------------------------
# The losses: (head, hidden states [N, H], targets [N]) -> the sum, 0-d
# --------------------------------------------------------------------------------------------------


def default(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def chunked(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = 2**26 // head.out_features
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + checkpoint(partial(default, head), part, wanted, use_reentrant=False)
    return total


def toolkit(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    labels = F.pad(targets, (1, 0))[None]  # unshifted: the first is not predicted
    states = F.pad(hidden, (0, 0, 0, 1))[None]
    return HeadLoss(head, head.forward, head.out_features)(states, labels)[0]


def of_torch(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from torch.nn import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    return F.linear_cross_entropy(hidden, head.weight, targets, reduction="sum", options=options)


LOSSES: dict[str, Loss] = {
    "default": default,
    "chunked": chunked,
    "toolkit": toolkit,
    "torch": of_torch,
}


# --------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------


def measure(loss: Loss, dtype: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """Return seconds, bytes at the peak, and errors of one way to compute the loss."""
    run(loss, *inputs(256, 2048, args.hidden, dtype))  # whatever is set up once
    found = errors(loss, *inputs(2000, vocabulary, 64, dtype))
    case = inputs(args.tokens, vocabulary, args.hidden, dtype)
    before = anonymous()
    with Peak() as peak:
        begin = time.perf_counter()
        run(loss, *case)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "bytes": peak.highest - before, **found}


def inputs(
    tokens: int, vocabulary: int, hidden: int, dtype: str
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=getattr(torch, dtype))
    torch.nn.init.normal_(head.weight, std=2 * hidden**-0.5)
    states = torch.randn(tokens, hidden, dtype=head.weight.dtype, requires_grad=True)
    ranks = vocabulary ** torch.rand(tokens)  # few tokens are most of a text (Zipf)
    return head, states, ranks.long().clamp(max=vocabulary - 1)


def run(
    loss: Loss, head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    total = loss(head, hidden, targets) / len(targets)
    total.backward()
    return total.detach()


def errors(
    loss: Loss, head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor
) -> dict[str, float]:
    """Return how far loss and gradients are from those of fp64, by norms."""
    value = run(loss, head, hidden, targets)
    # By hand and in parts: autograd would hold four copies of the logits in fp64.
    weight, states = head.weight.detach().double(), hidden.detach().double()
    expected, of_hidden = 0.0, torch.empty_like(states)
    of_weight = torch.zeros_like(weight)
    for rows in torch.arange(len(targets)).split(128):
        log_p = torch.log_softmax(states[rows] @ weight.t(), -1)
        wanted = targets[rows, None]
        expected -= float(log_p.gather(1, wanted).sum()) / len(targets)
        grad = log_p.exp_().scatter_add_(1, wanted, -torch.ones(len(rows), 1).double())
        grad /= len(targets)
        of_hidden[rows] = grad @ weight
        of_weight.addmm_(grad.t(), states[rows])

    def off(found: torch.Tensor | None, exact: torch.Tensor) -> float:
        assert found is not None
        return float((found - exact).norm() / exact.norm())

    return {
        "loss": abs(float(value) - expected) / expected,
        "of_hidden": off(hidden.grad, of_hidden),
        "of_weight": off(head.weight.grad, of_weight),
    }


def report(rows: list[tuple[int, str, str, dict[str, float]]], args: argparse.Namespace) -> str:
    lines = [
        "# The loss of the head",
        "",
        f"Forward and backward of {args.tokens:,} tokens of width {args.hidden}, "
        f"{args.threads} threads: all logits at once (default), chunks computed again in the "
        "backward (chunked), `toolkit.training.head_loss`, `F.linear_cross_entropy` of torch. The "
        "errors are shares of the norm, against fp64.",
        "",
        "| vocabulary | dtype | way | seconds | peak MB | loss off | hidden gradient off "
        "| head gradient off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for vocabulary, dtype, kind, found in rows:
        errors = (f"{found[name]:.1e}" for name in ("loss", "of_hidden", "of_weight"))
        cells = [f"{vocabulary:,}", dtype, kind, f"{found['seconds']:.1f}"]
        cells += [f"{found['bytes'] / 2**20:,.0f}", *errors]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", describe("loss_head.py", "torch"), ""])


if __name__ == "__main__":
    main()
