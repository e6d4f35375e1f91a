"""The time of a step beside transformers' Trainer and TRL's SFTTrainer, both with FSDP2.

    python benchmarks/trainer.py [--rounds 3] [--steps 6] [--output FILE]

Two gloo ranks, one thread each, fp32, a Llama of about 50 M parameters, windows of random tokens.
All sides start from one checkpoint, see the same global batches in the same order, clip to 1.0, run
fused AdamW and log every step; what else they do is their default. A round runs each side in
processes of its own; a side's time is that of a step after the first two. Losses are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from machine import describe
from transformers import LlamaConfig, LlamaForCausalLM

WORLD, SIZE, ACCUMULATION, LENGTH = 2, 2, 2, 128
RATE = 1e-4
WARM = 2
SIDES = {"toolkit": "toolkit", "trainer": "transformers' Trainer", "sft": "TRL's SFTTrainer"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed ones, of each round")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/benchmarks/trainer.md"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    with tempfile.TemporaryDirectory() as scratch:
        args.folder = Path(scratch)
        parameters = write_inputs(args)
        found: dict[str, list[dict[str, list[float]]]] = {side: [] for side in SIDES}
        for i in range(args.rounds):
            names = list(SIDES)
            for side in names[i % len(names) :] + names[: i % len(names)]:
                found[side].append(measured(args, side))
                print(side, found[side][-1], file=sys.stderr, flush=True)
    text = report(args, parameters, found)
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)


def write_inputs(args: argparse.Namespace) -> int:
    """Write the checkpoint and the windows; return the number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(args.folder / "model")
    count = (WARM + args.steps) * SIZE * ACCUMULATION * WORLD
    torch.save(torch.randint(0, config.vocab_size, (count, LENGTH)), args.folder / "windows.pt")
    return model.num_parameters()


def measured(args: argparse.Namespace, side: str) -> dict[str, list[float]]:
    """Run one side in processes of its own; return its {"seconds", "losses"} of every step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(WORLD)]
    command += ["--standalone", __file__, "--side", side, "--folder", str(args.folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "--steps", str(args.steps)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads((args.folder / f"{side}.json").read_text())


def run_side(args: argparse.Namespace) -> None:
    from toolkit.training import launch

    torch.set_num_threads(1)
    windows = torch.load(args.folder / "windows.pt")
    if args.side == "toolkit":
        with launch.start() as run:
            times, losses = with_toolkit(run, args, windows)
    else:
        times, losses = with_trainer(args, windows)
    if int(os.environ["RANK"]) == 0:
        seconds = [b - a for a, b in pairwise(times)]
        result = {"seconds": seconds[WARM - 1 :], "losses": losses}
        (args.folder / f"{args.side}.json").write_text(json.dumps(result))


def with_toolkit(
    run: Any, args: argparse.Namespace, windows: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Return when each step ended, and its loss, by the parts of the recipe."""
    from torch.utils.data import default_collate

    from toolkit.config import ModelConfig, ShardingConfig
    from toolkit.config.settings import OptimConfig
    from toolkit.data.order.position import train_batches
    from toolkit.data.samples.batch import Batch
    from toolkit.loading import load_pretrained
    from toolkit.mesh import init_mesh
    from toolkit.models import build_on_meta
    from toolkit.sharding import apply_fsdp
    from toolkit.training import build_optimizer, build_scheduler, train_step
    from toolkit.training.metrics import Metrics

    class InOrder:
        def indices(self, first: int, count: int) -> Any:
            return numpy.arange(first, first + count)

    cfg = ShardingConfig(param_dtype="float32")
    folder = str(args.folder / "model")
    model = build_on_meta(ModelConfig(folder))
    sharded = apply_fsdp(model, init_mesh("cpu", WORLD, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    optim = OptimConfig(learning_rate=RATE, weight_decay=0.0, lr_scheduler_type="constant")
    optimizer, steps = build_optimizer(model, optim), WARM + args.steps
    scheduler = build_scheduler(optimizer, optim, steps)
    samples = [{"input_ids": w, "labels": w} for w in windows]
    batches = train_batches(InOrder(), 0, steps, SIZE, ACCUMULATION, run.rank, WORLD)
    collate = lambda rows: Batch.of(**default_collate(rows))  # noqa: E731
    stream = iter(run.loader(samples, batches, collate_fn=collate))
    metrics = Metrics(
        args.folder,
        device=run.device,
        first_step=0,
        max_steps=steps,
        tokens_before=0,
        tokens_per_step=windows.numel() // steps,
        flops_per_token=1.0,
        logging_steps=1,
    )
    model.train()
    times, losses = [], []
    for step in range(1, steps + 1):
        stats = train_step(sharded, optimizer, list(islice(stream, ACCUMULATION)))
        rate = float(scheduler.get_last_lr()[0])
        scheduler.step()
        metrics.step(step, stats, rate)
        times.append(time.perf_counter())
        losses.append(float(stats.loss))
    return times, losses


def with_trainer(
    args: argparse.Namespace, windows: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Return when each step ended, and its loss, by Trainer or SFTTrainer."""
    import datasets
    from torch.distributed.tensor import DTensor
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    common: dict[str, Any] = {
        "output_dir": str(args.folder / "out"),
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": WARM + args.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
    }
    # Accelerate's plugin is not used on a CPU: transformers' own FSDP2 is.
    native = DistributedConfig(fsdp_size=WORLD)
    model = LlamaForCausalLM.from_pretrained(
        args.folder / "model", dtype=torch.float32, distributed_config=native
    )
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        raise SystemExit("transformers did not shard the model")
    rows = {"input_ids": windows.tolist(), "labels": windows.tolist()}
    data = datasets.Dataset.from_dict(rows)
    if args.side == "trainer":
        trainer: Any = Trainer(
            model, TrainingArguments(**common), train_dataset=data, callbacks=[Clock()]
        )
    else:
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(
            model, settings, train_dataset=data, callbacks=[Clock()], processing_class=tokenizer()
        )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return times[: len(losses)], losses


def tokenizer() -> Any:
    """Return a tokenizer of nothing: SFTTrainer asks for one also where the data is tokenised."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1}
    own = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="</s>")


def report(
    args: argparse.Namespace, parameters: int, found: dict[str, list[dict[str, list[float]]]]
) -> str:
    ours = [statistics.median(one["seconds"]) for one in found["toolkit"]]
    rows = []
    for side, title in SIDES.items():
        theirs = [statistics.median(one["seconds"]) for one in found[side]]
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        pairs = zip(found["toolkit"][0]["losses"], found[side][0]["losses"], strict=True)
        worst = max(abs(a - b) / b for a, b in pairs)
        if worst > 1e-3:
            raise SystemExit(f"{side} does other work: its losses differ by {worst}")
        tokens = WORLD * SIZE * ACCUMULATION * LENGTH / statistics.median(theirs)
        rows.append(
            f"| {title} | {statistics.median(theirs):.2f} | {min(theirs):.2f} to "
            f"{max(theirs):.2f} | {tokens:,.0f} | {ratio:.2f} | {worst:.0e} |"
        )
    return "\n".join(
        [
            "# A step beside Trainer's and SFTTrainer's",
            "",
            f"A Llama of {parameters / 1e6:.0f} M parameters in fp32, {WORLD} gloo ranks with FSDP2"
            f" and 1 thread each; {SIZE} windows of {LENGTH} tokens a rank, accumulation "
            f"{ACCUMULATION}, every step logged. {args.rounds} rounds in which the sides take "
            f"turns, {args.steps} timed steps each; medians, ratios taken per round. The losses of "
            "all steps are compared.",
            "",
            "| | s a step | from, to | tokens/s | toolkit's time against it | losses differ by |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            describe("trainer.py", "torch", "transformers", "accelerate", "trl"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
