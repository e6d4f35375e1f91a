"""The user's path: real launches of the recipe, compared with a plain PyTorch loop and with each
other.

The launches are the slow part (10 s each), so each serves several checks; what is compared with
them runs in forks.
"""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import (
    BIN,
    ROOT,
    accelerate,
    free_port,
    plain,
    run_recipe,
    save_byte_tokenizer,
    save_tiny_model,
)
from distributed import run_recipe_ranks

from toolkit import checkpoint
from toolkit.checkpoint import commit
from toolkit.checkpoint.commit import find_checkpoint
from toolkit.data.order.mixture import SampleOrder
from toolkit.export import consolidate
from toolkit.formats import export_manifest
from toolkit.formats.metrics_file import read_metrics
from toolkit.hub import publishing

pytestmark = pytest.mark.slow

STEPS, GLOBAL_BATCH, LENGTH = 20, 8, 32


def flags(model: Path, text: Path, output: Path, *more: str, dtype: str = "float32") -> list[str]:
    return [
        "--model.name_or_path", str(model),
        "--sharding.param_dtype", dtype,
        "--data.train_files", str(text),
        "--data.sequence_length", str(LENGTH),
        "--optim.learning_rate", "1e-3",
        "--optim.lr_scheduler_type", "cosine",
        "--optim.warmup_steps", "3",
        "--optim.weight_decay", "0.1",
        "--optim.adam_beta2", "0.999",
        "--train.max_steps", str(STEPS),
        "--train.logging_steps", "1",
        "--output_dir", str(output),
        *more,
    ]  # fmt: skip


def on_rows(**changes: Any) -> list[str]:
    """Return flags that fine-tune the folder `model` on `rows.jsonl`, padded, into `run`; a change
    of `train.max_steps` is called `train__max_steps`.
    """
    given = {
        "model.name_or_path": "model",
        "data.train_files": "rows.jsonl",
        "data.sequence_length": 64,
        "data.packing": "none",
        "data.eval_split": 0.0,
        "sharding.param_dtype": "float32",
        "output_dir": "run",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def read(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read(run)]


def batch(per_device: int, accumulation: int) -> list[str]:
    return [
        "--train.per_device_train_batch_size", str(per_device),
        "--train.gradient_accumulation_steps", str(accumulation),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama, text_file) -> dict[int, Path]:
    """The same training on 1 (python), 2 (accelerate launch) and 4 processes (as of torchrun)."""
    root = tmp_path_factory.mktemp("runs")
    done = {}
    for world, launcher, size in (
        (1, plain(), batch(4, 2)),
        (2, accelerate(2, free_port()), batch(4, 1)),
        (4, None, batch(1, 2)),
    ):
        output = root / str(world)
        more = ["--checkpoint.save_steps", "10"] if world == 2 else []
        more += ["--checkpoint.export_steps", "20", "--checkpoint.export_at_end", "true"] * bool(
            more
        )
        given = flags(tiny_llama, text_file, output, *size, *more)
        result = (
            run_recipe(launcher, *given)
            if launcher
            else run_recipe_ranks("pretrain", world, *given, cwd=ROOT)
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        done[world] = output
    return done


def plain_loop(
    model_folder: Path, text: Path, eval_split: float = 0.01
) -> tuple[list[float], torch.nn.Module]:
    """Train as PyTorch's tutorial would, without the toolkit but for the order of the samples."""
    from transformers import AutoModelForCausalLM, get_scheduler

    ids = torch.tensor([0] * 0 + _byte_ids(text))
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    held = max(1, round(len(windows) * eval_split))
    windows = windows[: len(windows) - held]
    order = (
        SampleOrder(len(windows), 42).indices(0, STEPS * GLOBAL_BATCH).reshape(STEPS, GLOBAL_BATCH)
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, 3, STEPS)
    seen = []
    for step in range(STEPS):
        inputs = windows[order[step]]
        loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        seen.append(loss.item())
    return seen, model


def _byte_ids(text: Path) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    table = {c: i + 1 for i, c in enumerate(alphabet)}
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [table[c] for c in letters.pre_tokenize_str(text.read_text("utf-8"))[0][0]] + [0]


def test_the_run_itself_exports(runs, tmp_path):
    """Written by the run, gathered tensor by tensor: the offline export's bytes."""
    live = runs[2] / "exports" / "step-00000020"
    offline = Path(consolidate(runs[2], tmp_path / "offline"))
    left, right = export_manifest.read(live), export_manifest.read(offline)
    assert (left["files"], left["tensors"]) == (right["files"], right["tensors"])
    assert left["origin"]["step"] == right["origin"]["step"] == STEPS
    assert left["origin"]["run"] == right["origin"]["run"]
    assert [p.name for p in live.parent.iterdir()] == ["step-00000020"]
    assert not (runs[1] / "exports").exists()
    assert (
        publishing.choose_export_folder(find_checkpoint(runs[2]), runs[2]) == live
    )  # no second export
    assert publishing.choose_export_folder(find_checkpoint(runs[1]), runs[1]) == Path(
        f"{runs[1]}-hf"
    )


def test_any_number_of_processes_trains_as_a_plain_loop(runs, tiny_llama, text_file):
    expected, _ = plain_loop(tiny_llama, text_file)
    assert expected[-1] < expected[0] - 0.1, (
        "the plain loop does not learn: the comparison says nothing"
    )
    for world, run in runs.items():
        found = losses(run)
        worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        assert worst < 1e-5, f"{world} process(es): {worst}"


def test_metrics_have_every_field(runs):
    lines = read(runs[2])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    wanted = {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "tokens_per_second",
        "step_time",
    }
    assert wanted | {"memory_peak_bytes", "epoch", "time"} <= set(lines[0])
    assert [line["tokens"] for line in lines] == [
        GLOBAL_BATCH * (LENGTH - 1) * (i + 1) for i in range(STEPS)
    ]
    assert lines[0]["learning_rate"] == 0.0
    assert lines[3]["learning_rate"] == pytest.approx(1e-3)
    assert {"eval_loss", "eval_perplexity", "eval_accuracy"} <= set(lines[-1])


def test_export_equals_the_plain_loops_weights(runs, tiny_llama, text_file, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = consolidate(runs[2], tmp_path / "hf")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder)("a").input_ids
    _, expected = plain_loop(tiny_llama, text_file)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), atol=2e-4, rtol=1e-3)
    assert json.loads((Path(folder) / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


def test_kill_and_same_command_is_bit_equal(tmp_path, text_file):
    """Dropout on, so that the random state matters; killed between two checkpoints."""
    model = save_byte_tokenizer(tmp_path / "gpt2")
    save_tiny_model(model, "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    every = ["--checkpoint.save_steps", "4", "--checkpoint.save_total_limit", "9", *batch(2, 2)]

    def flags_of(output: Path) -> list[str]:
        return flags(model, text_file, output, *every)

    def command(output: Path) -> list[str]:
        recipe = str(ROOT / "recipes/pretrain.py")
        return [*accelerate(2, free_port()), recipe, *flags_of(output)]

    calm = tmp_path / "calm"
    assert run_recipe_ranks("pretrain", 2, *flags_of(calm), cwd=ROOT).returncode == 0

    stormy = tmp_path / "stormy"
    process = subprocess.Popen(
        command(stormy), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.time() + 300
    while not (commit.committed_steps(stormy) and len(read_metrics(stormy)) >= 5):
        assert time.time() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family)
    process.wait()
    first = max(commit.committed_steps(stormy))
    assert first < STEPS
    again = subprocess.run(command(stormy), cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"after step {first}" in again.stdout
    assert losses(stormy) == losses(calm)
    assert _digests(stormy) == _digests(calm)
    # Control: the same resume without the random state is another run.
    assert losses(calm) != losses_without_rng(stormy, flags_of(stormy), first)


def losses_without_rng(run: Path, same: list[str], step: int) -> list[float]:
    """Resume from the checkpoint of `step` with another random state; return the losses."""
    import shutil

    for other, path in commit.committed_steps(run).items():
        if other > step:
            shutil.rmtree(path)
    path = commit.committed_steps(run)[step]
    from safetensors.torch import load_file, save_file

    for file in (path / "rng").iterdir():
        saved = load_file(file)
        saved["torch"] = torch.Generator().manual_seed(123).get_state()
        save_file(saved, file)
    manifest = commit.read_manifest(path)
    names = [n for n in manifest["files"] if n.startswith("rng/")]
    manifest["files"] |= commit.store_files(path, names)
    commit.commit(path.rename(path.with_name(path.name + ".tmp-test")), step, manifest)
    result = run_recipe_ranks("pretrain", 2, *same, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    return losses(run)


def _digests(run: Path) -> dict:
    return commit.read_manifest(checkpoint.find_newest(run))["row_sums"]


def test_asynchronous_saving_changes_no_bit_and_holds_the_loop_shorter(
    runs, tiny_llama, text_file, tmp_path
):
    run = tmp_path / "run"
    more = ["--checkpoint.save_steps", "10", "--checkpoint.async_save", "true", *batch(4, 1)]
    result = run_recipe_ranks("pretrain", 2, *flags(tiny_llama, text_file, run, *more), cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    assert losses(run) == losses(runs[2])
    saved, expected = commit.committed_steps(run), commit.committed_steps(runs[2])
    assert list(saved) == list(expected) == [10, STEPS]
    for step, path in saved.items():
        ours, theirs = (commit.read_manifest(p) for p in (path, expected[step]))
        assert ours["row_sums"] == theirs["row_sums"]
        same = [n for n in ours["files"] if n.endswith(".distcp") or n == "state.json"]
        assert [ours["files"][n] for n in same] == [theirs["files"][n] for n in same]
    said = re.findall(r"after ([0-9.]+) s, of which the loop waited ([0-9.]+) s", result.stdout)
    assert len(said) == 2
    assert all(float(waited) < float(whole) for whole, waited in said)


def test_no_arguments_run_the_demo_and_say_so(tmp_path):
    """`accelerate launch recipes/pretrain.py`, here with two settings that keep it short."""
    launcher = [str(BIN / "accelerate"), "launch"]
    few = ["--train.max_steps", "2", "--data.sequence_length", "32", "--output_dir", str(tmp_path)]
    result = run_recipe(launcher, *few)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "running the demo's config" in result.stdout
    assert "LlamaForCausalLM" in result.stdout
    assert f"toolkit consolidate {tmp_path}" in result.stdout
    assert len(read(tmp_path)) == 2


def test_another_number_of_processes_resumes(runs, tiny_llama, text_file, tmp_path):
    """2 processes saved at step 10; 1 process goes on with the same global batches."""
    import shutil

    run = tmp_path / "run"
    shutil.copytree(runs[2], run)
    shutil.rmtree(commit.committed_steps(run)[STEPS])
    same = flags(tiny_llama, text_file, run, *batch(2, 1))
    result = run_recipe_ranks("pretrain", 1, *same, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 a device x 4 accumulated x 1 process(es)" in result.stdout
    assert losses(run)[:10] == losses(runs[2])[:10]
    assert losses(run)[10:] == pytest.approx(losses(runs[2])[10:], rel=5e-6)
