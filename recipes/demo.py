"""The demos: train, export, reload and use a small model on this machine; fine-tune it.

    make demo            trains or resumes; if the training is done, only exports
    make demo-finetune   fine-tunes the model of `make demo`, which runs first if necessary
    FRESH=1              starts from scratch

The demos run the commands that a user types, and print each command before it runs.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import Any

from toolkit.checkpoint import commit
from toolkit.config.kinds import find_shipped_kind
from toolkit.formats.metrics_file import read_metrics

ROOT = Path(__file__).parent.parent
RULE = "-" * 72
PROMPT = "    def __init__(self"
QUESTION = (
    "Write the body of this Python function.\n\n"
    "def is_empty(self):\n"
    '    """Return True if the queue is empty, False otherwise."""'
)


def main() -> int:
    """Run the demo that the command line selects; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="run directory")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first")
    parser.add_argument("--finetune", action="store_true", help="fine-tune the demo's model")
    args = parser.parse_args()
    begun = time.time()
    failed = finetune(args.run, args.fresh) if args.finetune else pretrain(args.run, args.fresh)
    if not failed:
        print(f"time     {time.time() - begun:.0f} s")
        print(f"next     {next_command(args.run, args.finetune)}")
    return failed


def next_command(run: Path, finetuned: bool) -> str:
    """Format the command that the demo suggests to run next."""
    if not finetuned:
        return "make demo-finetune" + (f" RUN={run}" if run != Path("runs/demo") else "")
    merged = run.with_name(run.name + "-finetune-merged")
    return (
        f"toolkit push {merged} --repo_id ORG/NAME --dry_run   # shows what publishing would send"
    )


# A shorter run than that of the config, for about a minute of two CPU cores.
SHORT = (
    *("--train.max_steps", "180", "--train.per_device_train_batch_size", "4"),
    *("--checkpoint.save_steps", "90"),
)


def pretrain(run: Path, fresh: bool) -> int:
    """Pretrain the demo's model, export it and generate a text; return the exit code.

    Args:
        run: the run directory.
        fresh: True: delete an earlier demo run first; False: resume it.
    """
    export = run.with_name(run.name + "-hf")
    if not delete_old_outputs(run, "tiny_llama", fresh, export):
        return 1
    ran = launch("pretrain", run, *SHORT) or run_script(
        "toolkit", "consolidate", run, "--output", export
    )
    if ran:
        return ran
    print(RULE, generate_text(load_export(export), export, PROMPT, 80), RULE, sep="\n")
    print_losses(run)
    print(f"export   {export.resolve()}")
    return 0


def finetune(base_run: Path, fresh: bool) -> int:
    """Fine-tune the demo's model with LoRA, export, merge, and query it; return the exit code.

    Pretrains the model first if it has no export.

    Args:
        base_run: the run directory of the pretraining demo.
        fresh: True: delete an earlier demo run first; False: resume it.
    """
    base = base_run.with_name(base_run.name + "-hf")
    run = base_run.with_name(base_run.name + "-finetune")
    adapter, merged = run.with_name(run.name + "-hf"), run.with_name(run.name + "-merged")
    if not base.is_dir() and (failed := pretrain(base_run, fresh=False)):
        return failed
    if not delete_old_outputs(run, str(base), fresh, adapter, merged):
        return 1
    failed = (
        launch("finetune", run, "--model.name_or_path", base)
        or run_script("toolkit", "consolidate", run, "--output", adapter)
        or run_script("toolkit", "consolidate", run, "--output", merged, "--merge")
        or run_script("toolkit", "verify", run, adapter, "--logits")
        or run_script("toolkit", "verify", run, merged)
    )
    if failed:
        return failed
    model, turns = load_export(merged), [{"role": "user", "content": QUESTION}]
    print(f"\nThe question:\n{indent(QUESTION, '    ')}")
    for title, answering in (("before", str(base)), ("after, merged", model)):
        print(f"\n{title}:", RULE, generate_text(answering, merged, turns, 60), RULE, sep="\n")
    print_losses(run)
    print(f"adapter  {adapter.resolve()}\nmerged   {merged.resolve()}")
    return 0


def delete_old_outputs(run: Path, mark: str, fresh: bool, *exports: Path) -> bool:
    """Delete the exports of an earlier demo and, if `fresh`, its run.

    Args:
        run: the run directory.
        mark: text by which `config.yaml` of a demo run is recognised.
        fresh: whether to delete the run, too.
        exports: folders to delete.

    Returns:
        False, without deleting anything, if the directory holds a run of another config.
    """
    config = run / "config.yaml"
    if config.is_file() and mark not in config.read_text("utf-8"):
        print(f"{run} holds a run that is not the demo's; give another RUN", file=sys.stderr)
        return False
    if fresh:
        print(f"FRESH=1: starting from scratch, deleting {', '.join(map(str, (run, *exports)))}")
        shutil.rmtree(run, ignore_errors=True)
    elif steps := commit.committed_steps(run):
        print(f"{run} holds step {max(steps)}: resuming (FRESH=1 starts from scratch)")
    for export in exports:
        # The demo writes them again.
        shutil.rmtree(export, ignore_errors=True)
    return True


def launch(recipe: str, run: Path, *more: object) -> int:
    """Run a training command with its tiny config and more flags; return the exit code."""
    kind = find_shipped_kind(recipe)
    assert kind is not None
    config = f"recipes/configs/{recipe}_tiny.yaml"
    return run_script(
        "toolkit", kind.command, config, *launcher_flags(), "--output_dir", run, *more
    )


def launcher_flags() -> list[str]:
    """Return flags of `toolkit` that launch on all GPUs, or on two CPU processes without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return ["--accelerate_config", "cpu"]
    count = torch.cuda.device_count()
    config = "one_gpu" if count == 1 else "one_node"
    return ["--accelerate_config", config, "--num_processes", str(count)]


def run_script(script: str, *arguments: object) -> int:
    """Print and run an installed script in the repository's root; return its exit code."""
    command = [str(part) for part in (Path(sys.executable).parent / script, *arguments)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def load_export(folder: Path) -> Any:
    """Load an exported model with plain transformers, and print missing and unexpected keys."""
    from transformers import AutoModelForCausalLM

    print(f"\n$ AutoModelForCausalLM.from_pretrained({str(folder)!r})", flush=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    print(f"missing keys: {missing}, unexpected keys: {unexpected}")
    return model


def generate_text(model: Any, tokenizer: Path, prompt: Any, tokens: int) -> str:
    """Generate a continuation of a text, or an answer to chat turns, with a fixed seed."""
    from transformers import pipeline, set_seed

    set_seed(0)
    writer = pipeline("text-generation", model=model, tokenizer=str(tokenizer))
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": tokens}
    written = writer(prompt, return_full_text=isinstance(prompt, str), **options)
    return written[0]["generated_text"]


def print_losses(run: Path) -> None:
    """Print the first and the last training loss of a run."""
    lines = [line for line in read_metrics(run) if "loss" in line]
    first, last = (f"{line['loss']:.4f} (step {line['step']})" for line in (lines[0], lines[-1]))
    print(f"\nloss     {first} -> {last}")


if __name__ == "__main__":
    sys.exit(main())
