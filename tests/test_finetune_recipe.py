"""Fine-tuning as a user does it: launches of the recipe, resumed, exported, merged, verified."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, accelerate, free_port, plain, run_recipe, torchrun
from distributed import run_recipe_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import cli
from toolkit.checkpoint.commit import find_checkpoint
from toolkit.formats.metrics_file import read_metrics

pytestmark = pytest.mark.slow

TEMPLATE = ROOT / "recipes/configs/chat_template.jinja"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def conversation(i: int) -> dict:
    word = WORDS[i % len(WORDS)]
    return {
        "messages": [
            {"role": "user", "content": f"After {word}?"},
            {"role": "assistant", "content": WORDS[(i + 1) % len(WORDS)] * (1 + i % 2)},
        ]
    }


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> list[Path]:
    """Two files of conversations; the first has a bad row."""
    folder = tmp_path_factory.mktemp("chats")
    for name, rows in (("a", range(60)), ("b", range(60, 100))):
        lines = [json.dumps(conversation(i)) for i in rows]
        if name == "a":
            lines.insert(7, json.dumps({"messages": [{"role": "user", "content": "alone"}]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [folder / "a.jsonl", folder / "b.jsonl"]


@pytest.fixture(scope="module")
def base(tiny_llama) -> Path:
    return tiny_llama


def settings(base: Path, output: Path, *flags: object) -> list[str]:
    return [
        *("--model.name_or_path", str(base), "--output_dir", str(output)),
        *("--data.chat_template", str(TEMPLATE), "--data.sequence_length", "64"),
        *("--sharding.param_dtype", "float32", "--optim.learning_rate", "1e-2"),
        *("--train.per_device_train_batch_size", "2", "--train.logging_steps", "1"),
        *map(str, flags),
    ]


def launched(launcher: list[str], *more: object):
    return run_recipe(launcher, *settings(*more), recipe="finetune")


def forked(world: int, *more: object):
    return run_recipe_ranks("finetune", world, *settings(*more), cwd=ROOT)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, base, chats) -> tuple[Path, str]:
    """LoRA on two mixed sources: two processes, four steps; then one process, to the sixth."""
    run = tmp_path_factory.mktemp("run") / "lora"
    sources = [{"files": str(file), "weight": w} for file, w in zip(chats, (3, 1), strict=True)]
    flags = [
        *("--data.sources", json.dumps(sources), "--data.on_bad_row", "skip"),
        *("--lora.r", 4, "--lora.lora_dropout", 0.1, "--train.eval_steps", 2),
        *("--train.eval_prompts", '["After two?"]'),
        *("--train.neftune_noise_alpha", 5, "--train.label_smoothing_factor", 0.1),
        *("--checkpoint.save_steps", 2, "--data.eval_split", 0.2),
    ]
    first = launched(accelerate(2, free_port()), base, run, *flags, "--train.max_steps", 4)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    flags += ["--checkpoint.export_at_end", "true", "--train.gradient_accumulation_steps", 2]
    second = forked(1, base, run, *flags, "--train.max_steps", 6)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    return run, first.stdout + second.stdout


def test_the_run_says_what_it_learns_and_proves_each_adapter(adapted):
    run, said = adapted
    assert said.count("adapter proven") == 3  # steps 2, 4 and 6
    assert "a.jsonl line 8" in said  # the row that was left out
    assert "packing    bfd" in said
    assert "[[" in said  # what is learned of the first example
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 6]
    assert {"eval_a_loss", "eval_b_perplexity", "eval_b_accuracy"} <= set(evaluated[0])
    answers = [json.loads(x) for x in (run / "samples.jsonl").read_text().splitlines()]
    assert [a["step"] for a in answers] == [2, 4, 6]
    saved = find_checkpoint(run)
    names = json.loads((saved / "manifest.json").read_text())["row_sums"]
    assert names
    assert all("lora_" in name for name in names)


def test_adapter_and_merged_model_are_those_that_were_trained(adapted, base, tmp_path, capsys):
    from peft import PeftModel

    run, _ = adapted
    assert cli.main(["consolidate", str(run), "--output", str(tmp_path / "adapter")]) == 0
    assert cli.main(["consolidate", str(run), "--output", str(tmp_path / "merged"), "--merge"]) == 0
    assert cli.main(["verify", str(run), str(tmp_path / "adapter"), "--logits"]) == 0
    assert cli.main(["verify", str(run), str(tmp_path / "merged")]) == 0
    live = run / "exports/step-00000006"
    written = [p / "adapter_model.safetensors" for p in (live, tmp_path / "adapter")]
    assert written[0].read_bytes() == written[1].read_bytes()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    plain_base = AutoModelForCausalLM.from_pretrained(base)
    before = plain_base(ids).logits
    adapted_model = PeftModel.from_pretrained(plain_base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert (adapted_model(ids).logits - before).abs().max() > 1e-4
        torch.testing.assert_close(merged(ids).logits, adapted_model(ids).logits)
    assert tokenizer.chat_template == TEMPLATE.read_text()
    capsys.readouterr()


def test_all_parameters_streamed_with_early_stop(base, chats, tmp_path):
    """Two processes; nothing is learned, so it stops at the second evaluation;
    the same command then has nothing to do.
    """
    flags = [
        *("--data.train_files", chats[1], "--data.streaming", "true", "--train.max_steps", 8),
        *("--data.eval_files", chats[1], "--train.eval_steps", 1, "--data.packing", "none"),
        *("--train.early_stopping_patience", 1, "--optim.learning_rate", 0),
        *("--checkpoint.save_steps", 100, "--model.frozen_parameters", '["model.embed_tokens.*"]'),
    ]
    run = tmp_path / "run"
    done = launched(torchrun(2, free_port()), base, run, *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "stopped early at step 2: eval_loss was" in done.stdout
    assert find_checkpoint(run).name == "step-00000002"
    again = forked(1, base, run, *flags, "--train.gradient_accumulation_steps", 2)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "stopped early at step 2: eval_loss was" in again.stdout


def test_inspect_data_is_what_the_run_says(base, chats, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    data = {
        "train_files": [str(c) for c in chats],
        "chat_template": str(TEMPLATE),
        "sequence_length": 64,
    }
    file.write_text(json.dumps({"model": {"name_or_path": str(base)}, "data": data}))
    assert cli.main(["inspect", "--data", str(file)]) == 1
    assert "a.jsonl line 8" in capsys.readouterr().err
    file.write_text(
        json.dumps({"model": {"name_or_path": str(base)}, "data": data | {"on_bad_row": "skip"}})
    )
    assert cli.main(["inspect", "--data", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (source,) = report["sources"]
    assert (source["rows"], source["examples"]) == (101, 100)
    assert report["packing"] == "bfd"
    learned = [
        "".join(part["text"] for part in one["parts"] if part["supervised"])
        for one in source["first"]
    ]
    answers = [conversation(one["row"])["messages"][1]["content"] for one in source["first"]]
    assert [text.split("<")[0] for text in learned] == answers


def test_nothing_to_learn_is_refused(base, tmp_path):
    rows = [{"prompt": "x" * 200, "completion": "y"}] * 8  # all cut off before the completion
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = launched(plain(), base, tmp_path / "run", "--data.train_files", tmp_path / "rows.jsonl")
    assert done.returncode == 1
    assert "expected supervised tokens in the source 'rows', got none" in done.stderr
    assert not (tmp_path / "run").exists()
