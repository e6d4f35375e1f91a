"""Compare context parallelism with that of another project, and both with one process.

    pip install --no-deps axolotl-ringmaster==0.2.7
    python benchmarks/context_oracle.py [--output FILE]

`sharding.context_parallel: 2` and Ulysses of axolotl-ringmaster run the same tiny models on the
same packed rows, each on two gloo ranks in fp32. One process runs each document by itself with
plain transformers. The table has the loss of each, and the largest difference of a gradient,
relative to the largest gradient of the model. The toolkit's own tests compare with one process
only, by code of the toolkit. Here the rows, the shift of labels, and the sum over ranks of the
other side are those of the other project.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from machine import describe
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.config.settings import ShardingConfig
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.mesh import init_mesh
from toolkit.models.attention import attend_within_documents
from toolkit.sharding.fsdp import apply_fsdp
from toolkit.training.loss import causal_lm_loss
from toolkit.training.step import Update

RANKS, LENGTH, VOCABULARY = 2, 64, 320
DOCUMENTS = [[20, 30, 14], [5, 59]]  # of each row; some cross the border of the two parts
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9},
    "olmo2": {},
    "gpt_neox": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Answer:
    """Mean loss of the targets of all rows, and the gradient of each parameter."""

    loss: float
    gradients: dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/context_oracle.md"))
    args = parser.parse_args()
    import ringmaster

    sides = {"toolkit": toolkit_step, "ringmaster": ringmaster_step}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            expected = plain_step(kind)
            answers = {}
            for name, side in sides.items():
                file = Path(scratch, f"{kind}-{name}.pt")
                mp.spawn(run_rank, (side, kind, scratch, str(file)), nprocs=RANKS)
                answers[name] = torch.load(file, weights_only=False)
            gaps = [
                largest_gap(answers["toolkit"], expected),
                largest_gap(answers["ringmaster"], expected),
                largest_gap(answers["toolkit"], answers["ringmaster"]),
            ]
            losses = [expected.loss, answers["toolkit"].loss, answers["ringmaster"].loss]
            rows.append([kind, *(f"{x:.6f}" for x in losses), *(f"{gap:.1e}" for gap in gaps)])
            print(*rows[-1], flush=True)
    text = report(rows, ringmaster.__version__)
    args.output.write_text(text)
    print(text)


def build_model(kind: str) -> Any:
    """Build the model of a kind with random values in all parameters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.train()


def draw_documents() -> list[list[torch.Tensor]]:
    """Draw the documents of all rows: token ids [T] each."""
    drawn = torch.Generator().manual_seed(1)
    return [[torch.randint(1, VOCABULARY, (n,), generator=drawn) for n in row] for row in DOCUMENTS]


def plain_step(kind: str) -> Answer:
    """Run each document by itself in one process, with transformers alone."""
    model = build_model(kind)
    total, count = torch.zeros(()), 0
    for ids in (document for row in draw_documents() for document in row):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        total = total + F.cross_entropy(logits, ids[1:], reduction="sum")
        count += len(ids) - 1
    (total / count).backward()
    return Answer(float(total.detach()) / count, gradients_of(model))


def run_rank(rank: int, side: Any, kind: str, scratch: str, file: str) -> None:
    """Run one side as a rank of a group; rank 0 writes its answer."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{file}.store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    answer = side(kind)
    if rank == 0:
        torch.save(answer, file)
    dist.barrier()
    dist.destroy_process_group()


def toolkit_step(kind: str) -> Answer:
    """Run a step with `sharding.context_parallel`."""
    cfg = ShardingConfig(param_dtype="float32", context_parallel=RANKS)
    mesh = init_mesh("cpu", RANKS, cfg)
    model = build_model(kind)
    attend_within_documents(model, mesh.context)
    sharded = apply_fsdp(model, mesh, cfg)
    context = mesh.context.rank, mesh.context.size
    shape = SampleShape("bfd", LENGTH, borders=True, context=context)
    samples = []
    for row in draw_documents():
        pieces = [Piece(ids.numpy(), ids.numpy().copy()) for ids in row]
        samples.append(shape.sample(pieces))
    update = Update(sharded, [shape.batch(samples)])
    for batch in update:
        update.mean(causal_lm_loss(model, batch)).backward()
    gradients = gradients_of(model)
    stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
    return Answer(float(stats.loss), gradients)


def ringmaster_step(kind: str) -> Answer:
    """Run a step with axolotl-ringmaster's Ulysses, its cut of rows and its shift of labels."""
    import ringmaster
    from ringmaster.shard import shard_batch, varlen_meta

    config = ringmaster.RingmasterConfig(size=RANKS, backend=ringmaster.Backend.ULYSSES)
    runtime = ringmaster.setup(
        config,
        num_kv_heads=SIZES["num_key_value_heads"],
        device_type="cpu",
        inner_attn="sdpa",
    )
    model = build_model(kind)
    model.set_attn_implementation(runtime.attn_implementation)
    rows = draw_documents()
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows])
    labels = ids.masked_fill(positions == 0, -100)  # no document predicts the next one
    runtime.varlen = varlen_meta(positions, LENGTH)
    batch, _ = shard_batch(
        {"input_ids": ids, "position_ids": positions, "labels": labels},
        cp_rank=runtime.cp_rank,
        cp_size=RANKS,
    )
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    logits = model(**inputs, use_cache=False).logits.float()
    targets = batch["shift_labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    count = (targets != -100).sum()
    dist.all_reduce(count)
    (total / count).backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    loss = total.detach() / count
    dist.all_reduce(loss)
    return Answer(float(loss), gradients)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the full gradients of all parameters."""
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: getattr(g, "full_tensor", g.clone)() for n, g in named.items()}


def largest_gap(left: Answer, right: Answer) -> float:
    """Return the largest difference of a gradient, relative to the largest gradient."""
    assert left.gradients.keys() == right.gradients.keys()
    scale = max(float(g.abs().max()) for g in right.gradients.values())
    return max(float((left.gradients[n] - g).abs().max()) for n, g in right.gradients.items()) / (
        scale
    )


def report(rows: list[list[str]], version: str) -> str:
    """Format the page."""
    documents = "; ".join(" + ".join(map(str, row)) for row in DOCUMENTS)
    lines = [
        "# Context parallelism beside another implementation",
        "",
        f"Packed rows of {LENGTH} tokens ({documents} tokens a document) in fp32: each document by "
        "itself in one process, `sharding.context_parallel: 2`, and Ulysses of axolotl-ringmaster "
        f"{version} on two ranks. Differences are the largest of a gradient, relative to the "
        "largest gradient of the model.",
        "",
        "| type | loss, one process | toolkit | ringmaster | toolkit / one process | ringmaster / "
        "one process | toolkit / ringmaster |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        describe("context_oracle.py", "torch", "transformers"),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
