"""The learned end of a turn is an end: of generation while training, and of the export."""

import json
from pathlib import Path

import pytest
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from transformers import AutoTokenizer, GenerationConfig

from toolkit.export import consolidate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model that ends with <|endoftext|> and has ChatML's tokens."""
    folder = tmp_path / "base"
    save_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    save_tiny_model(folder, "llama")
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def _run(base: Path, tmp_path: Path, row: dict, name: str) -> tuple[str, Path]:
    rows = tmp_path / f"{name}.jsonl"
    rows.write_text("\n".join(json.dumps(row) for _ in range(8)))
    flags = ["--model.name_or_path", str(base), "--data.train_files", f"[{rows}]"]
    flags += ["--data.sequence_length", "64", "--train.max_steps", "1", "--data.eval_split", "0"]
    flags += ["--output_dir", str(tmp_path / name), "--data.on_bad_row", "error"]
    done = run_recipe_ranks("finetune", 1, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, Path(consolidate(tmp_path / name, tmp_path / f"{name}-hf"))


def test_a_stop_token_that_was_learned_is_added(base: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Two."}]
    said, export = _run(base, tmp_path, {"messages": turns}, "chat")
    tokenizer = AutoTokenizer.from_pretrained(export)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert f"ends       <|im_end|> ({end}) ends the answers" in said
    ends = GenerationConfig.from_pretrained(export).eos_token_id
    assert ends == [tokenizer.eos_token_id, end]


def test_an_end_that_is_known_changes_nothing(base: Path, tmp_path: Path) -> None:
    """The control: a completion ends with the tokenizer's own end."""
    said, export = _run(base, tmp_path, {"prompt": "1+1?", "completion": "Two."}, "pairs")
    assert "ends       " not in said
    name = "generation_config.json"
    assert (export / name).read_bytes() == (base / name).read_bytes()
