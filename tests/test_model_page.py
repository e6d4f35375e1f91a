"""How-tos from the data to the Hub: their commands are run, and print what the pages show.

Models have random weights, that for text and images the published layout of Qwen3.5; what varies
from machine to machine (times, sizes, losses) is not compared, whole numbers are.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
from chat_templates import CHATML
from conftest import ROOT, save_byte_tokenizer
from distributed import run_toolkit
from documents import blocks
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

PAGE = ROOT / "docs" / "howto" / "qwen3_5_from_plan_to_hub.md"
ROWS = [
    (
        "When did Virgin Australia start operating?",
        "It began on 31 August 2000.",
        "31 August 2000.",
    ),
    ("Which is a species of fish? Tope or Rope", "", "Tope"),
    ("Name three colours.", "", "Red, green and blue."),
    ("How many days has a leap year?", "", "366 days."),
]
# Decimals, amounts, the step of the rehearsal's kill, and what else follows from the machine.
_VARIES = re.compile(
    r"\d[\d,]*\.\d+(e[+-]?\d+)?|[\d,.]+ ([kMGT]?B|bytes|tok/s|s)\b|\d\d:\d\d|step \d+;"
)


def save_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Qwen3.5's layout with a tokenizer of bytes, whose turns are those of ChatML."""
    larger = {"text_config": {"vocab_size": 320, "max_position_embeddings": 256}}
    layout = dataclasses.replace(layouts.LAYOUTS["qwen3_5"], settings=larger)
    monkeypatch.setitem(layouts.LAYOUTS, "qwen3_5", layout)
    layouts.save_layout("qwen3_5", folder)
    save_chat_tokenizer(folder)


def save_chat_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(folder))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = CHATML.replace("«", "").replace("»", "")
    tokenizer.save_pretrained(folder)


def run(line: str, folder: Path) -> str:
    words = shlex.split(line)[1:]
    if words[0] not in ("finetune", "prefer", "rehearse"):
        done = run_toolkit(*words, cwd=folder)
    else:
        env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "toolkit", *words]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=500
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout.replace(f"{ROOT}/", "").replace(f"{folder}/", "")


def stable(text: str) -> list[str]:
    """Return the lines of an output with what varies, and the widths of columns, taken out."""
    return [" ".join(_VARIES.sub("#", line).split()) for line in text.splitlines()]


def missing(shown: str, said: str) -> list[str]:
    """Return the lines of `shown` that are not in `said`, in this order; `...` stands for some."""
    left, gone = iter(stable(said)), []
    for line in stable(shown):
        if line and line != "..." and line not in left:
            gone.append(line)
            left = iter(stable(said))
    return gone


def test_a_wrong_line_of_the_page_is_found() -> None:
    said = "carried    15 tensors: mtp.* (15), of 2.5 kB\nstep 3/6  loss 5.1"
    assert not missing("carried    15 tensors: mtp.* (15), of 2.7 kB\n...\nstep 3/6 loss 6.2", said)
    assert missing("carried    14 tensors: mtp.* (15), of 2.5 kB", said)
    assert missing("step 3/6  loss 5.1\ncarried    15 tensors: mtp.* (15), of 2.5 kB", said)


@pytest.mark.slow
@pytest.mark.long
def test_the_page_on_qwen3_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "Qwen3.5-tiny", monkeypatch)
    names = ("instruction", "context", "response", "category")
    rows = [dict(zip(names, (*row, "closed_qa"), strict=True)) for row in ROWS * 3]
    (tmp_path / "dolly.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert check_page(PAGE, tmp_path) == 8


def check_page(page: Path, folder: Path) -> int:
    """Run the commands of a page in a folder and compare what it shows; return how many ran."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    shown, ran, wrong = list(blocks(page)), 0, []
    for block, following in zip(shown, [*shown[1:], None], strict=True):
        if block.title:
            (folder / block.title).write_text(block.text, "utf-8")
        said = ""
        for line in block.lines():
            # A ready config takes minutes to plan; test_published.py holds its figure.
            if line.startswith("toolkit") and "recipes/configs" not in line:
                said += run(line, folder)
                ran += 1
        if said and following is not None and following.language == "text":
            wrong += [f"{block.line}: {line}" for line in missing(following.text, said)]
    assert not wrong, "\n".join(wrong)
    return ran


ANSWERS = {
    "Name a colour.": "Blue.",
    "What is 2 + 3?": "5.",
    "When did Virgin Australia start operating?": "31 August 2000.",
    "How many days has a leap year?": "366 days.",
    "Which is a species of fish, tope or rope?": "Tope.",
    "Name a fruit.": "An apple.",
    "What is the capital of Peru?": "Lima.",
    "Is ice lighter than water?": "Yes.",
}
HELD_OUT = {
    "Name an animal.": "A horse.",
    "What is 4 + 4?": "8.",
    "When did the French Revolution begin?": "In 1789.",
    "Is the sun a planet?": "No.",
}


def pair_of(question: str, answer: str) -> dict[str, Any]:
    empty = f"That is a good question, and {len(question)} people ask it."
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": answer}],
        "rejected": [{"role": "assistant", "content": empty}],
    }


@pytest.mark.slow
@pytest.mark.long
def test_the_page_on_preferences(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=320, **shape, **heads))
    base.save_pretrained(tmp_path / "tiny-chat")
    save_chat_tokenizer(tmp_path / "tiny-chat")
    rows = [pair_of(*both) for both in ANSWERS.items()] * 3
    rows.append(rows[0] | {"rejected": rows[0]["chosen"]})
    held_out = [pair_of(*both) for both in HELD_OUT.items()]
    for name, found in (("pairs", rows), ("held_out", held_out)):
        text = "".join(f"{json.dumps(row)}\n" for row in found)
        (tmp_path / f"{name}.jsonl").write_text(text, "utf-8")
    page = ROOT / "docs" / "howto" / "preferences_from_data_to_hub.md"
    assert json.dumps(rows[0]) in page.read_text("utf-8")
    assert check_page(page, tmp_path) == 8
    logged = (tmp_path / "runs/preferred/metrics.jsonl").read_text("utf-8").splitlines()
    first, *_, last = map(json.loads, logged)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert last["eval_accuracy"] == 1
    assert last["eval_loss"] < 0.3
