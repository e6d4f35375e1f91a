"""The demo: train a small model on this machine, export it, reload it with transformers, let it
write.

    make demo            trains, or resumes, or only exports when the training is done
    make demo FRESH=1    starts anew

Runs the same commands that a user types; each is printed before it runs.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from toolkit import commit
from toolkit.metrics import read_metrics

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "recipes/configs/pretrain_tiny.yaml"
CPU = ROOT / "accelerate_configs/cpu.yaml"
PROMPT = "    def __init__(self"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run directory")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first")
    args = parser.parse_args()
    begun = time.time()
    if (args.run / "config.yaml").is_file() and "tiny_llama" not in (
        args.run / "config.yaml"
    ).read_text("utf-8"):
        print(f"{args.run} holds a run that is not the demo's; give another RUN", file=sys.stderr)
        return 1
    export = args.run.with_name(args.run.name + "-hf")
    if args.fresh:
        print(f"FRESH=1: starting anew, deleting {args.run} and {export}")
        shutil.rmtree(args.run, ignore_errors=True)
    elif steps := commit.committed_steps(args.run):
        print(f"{args.run} holds step {max(steps)}: resuming (make demo FRESH=1 starts anew)")
    shutil.rmtree(export, ignore_errors=True)  # made from the run, and about to be made again

    bin_ = Path(sys.executable).parent
    recipe = ["recipes/pretrain.py", "--config", str(CONFIG.relative_to(ROOT))]
    ran = call(
        [str(bin_ / "accelerate"), "launch", *processes(), *recipe, "--output_dir", str(args.run)]
    )
    ran = ran or call(
        [str(bin_ / "toolkit"), "consolidate", str(args.run), "--output", str(export)]
    )
    if ran:
        return ran
    show(export)
    lines = [line for line in read_metrics(args.run) if "loss" in line]
    print(
        f"\nloss     {lines[0]['loss']:.4f} (step {lines[0]['step']}) -> {lines[-1]['loss']:.4f} "
        f"(step {lines[-1]['step']})"
    )
    print(f"export   {export.resolve()}")
    print(f"time     {time.time() - begun:.0f} s")
    return 0


def processes() -> list[str]:
    """Return the launcher's flags: all GPUs where there are any, else two CPU processes."""
    import torch

    if not torch.cuda.is_available():
        return ["--config_file", str(CPU.relative_to(ROOT))]
    count = torch.cuda.device_count()
    config = "one_gpu" if count == 1 else "one_node"
    return ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", str(count)]


def call(command: list[str]) -> int:
    """Print and run a command from the repository's root; return its exit code."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def show(export: Path) -> None:
    """Load the export with plain transformers and print a sample."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"\n$ AutoModelForCausalLM.from_pretrained({str(export)!r})", flush=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    model, info = loaded
    tokenizer = AutoTokenizer.from_pretrained(export)
    print(
        f"missing keys: {sorted(info['missing_keys'])}, unexpected keys: "
        f"{sorted(info['unexpected_keys'])}"
    )
    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.9)
    print("-" * 72)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    print("-" * 72)


if __name__ == "__main__":
    sys.exit(main())
