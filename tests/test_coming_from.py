"""The pages for users of TRL, axolotl and torchtune: their configs are converted and trained."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks, run_toolkit
from documents import Block, blocks, settings
from transformers import AutoTokenizer

from toolkit.config.other_tools import OTHER_NAMES

TOOLS = ("trl", "axolotl", "torchtune")
ASK, ANSWER, WORSE = "What is 2 + 3?", "2 + 3 is 5.", "I do not know."


def turns(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant"), texts, strict=False)
    ]


def shared_gpt(*texts: str) -> list[dict[str, str]]:
    return [
        {"from": role, "value": text} for role, text in zip(("human", "gpt"), texts, strict=True)
    ]


# A row in the format of the data set that the page's config names.
ROWS: dict[str, dict[str, Any]] = {
    "trl_sft.yaml": {"messages": turns(ASK, ANSWER)},
    "trl_dpo.py": {"chosen": turns(ASK, ANSWER), "rejected": turns(ASK, WORSE)},
    "axolotl_lora.yaml": {"conversations": shared_gpt(ASK, ANSWER)},
    "axolotl_dpo.yaml": {
        "conversation": turns(ASK),
        "chosen": {"role": "assistant", "content": ANSWER},
        "rejected": {"role": "assistant", "content": WORSE},
    },
    "torchtune_lora.yaml": {"instruction": ASK, "input": "", "output": ANSWER},
    "torchtune_dpo.yaml": {"question": ASK, "response_j": ANSWER, "response_k": WORSE},
}


def page_of(tool: str) -> Path:
    return ROOT / "docs" / "howto" / f"coming_from_{tool}.md"


def examples(tool: str) -> dict[str, list[Block]]:
    """Return, by the name of the other tool's file: its block, command, output and conversion."""
    code = list(blocks(page_of(tool)))
    starts = [i for i, block in enumerate(code) if (block.title or "").startswith(f"{tool}_")]
    return {str(code[i].title): code[i : i + 4] for i in starts}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_page_shows_what_the_command_writes(tool: str, tmp_path: Path) -> None:
    conversions = examples(tool)
    assert len(conversions) == 2
    for name, (theirs, command, output, ours) in conversions.items():
        (tmp_path / name).write_text(theirs.text, "utf-8")
        line = f"toolkit convert-config {name} --output {ours.title}"
        assert command.lines() == [line]
        result = run_toolkit(*line.split()[1:], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert (result.stderr + result.stdout).strip() == output.text.strip()
        assert (tmp_path / str(ours.title)).read_text("utf-8") == ours.text


@pytest.mark.parametrize("tool", TOOLS)
def test_the_table_of_names_is_that_of_the_parser(tool: str) -> None:
    table = page_of(tool).read_text("utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", table, re.MULTILINE)
    assert len(rows) > 15
    for theirs, ours in rows:
        name, setting = theirs.rpartition(".")[2], re.split(r"[: ]", ours)[0]
        assert setting in settings()
        same = name == setting.rpartition(".")[2]
        assert same or name in OTHER_NAMES[ours].split(), f"{theirs} is not {ours}"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model whose tokenizer has a chat template."""
    folder = save_tiny_model(
        tmp_path_factory.mktemp("model"), vocab_size=320, max_position_embeddings=256
    )
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(folder))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = CHATML.replace("«", "").replace("»", "")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "name"), [(tool, name) for tool in TOOLS for name in examples(tool)]
)
def test_a_converted_config_trains(tool: str, name: str, chat_model: Path, tmp_path: Path) -> None:
    *_, ours = examples(tool)[name]
    rows = [ROWS[name]] * 40
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    (tmp_path / str(ours.title)).write_text(ours.text, "utf-8")
    kind = "prefer" if "_dpo" in name else "finetune"
    result = run_recipe_ranks(
        kind, 1, "--config", str(ours.title),
        # What the test replaces: the model, the data, the place and the number of steps.
        "--model.name_or_path", str(chat_model), "--data.dataset_name", "null",
        "--data.dataset_split", "null", "--data.train_files", "rows.jsonl",
        "--data.sequence_length", "256", "--output_dir", "run", "--train.max_steps", "2",
        "--train.gradient_accumulation_steps", "1", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == 2
    merged = run_toolkit("consolidate", "run", "--output", "merged", "--merge", cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    verified = run_toolkit("verify", "run", "merged", cwd=tmp_path)
    assert verified.returncode == 0, verified.stderr
    shutil.rmtree(tmp_path / "run")
