"""Special tokens of the data whose rows were never trained are named before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny_model
from distributed import run_ranks
from peft import LoraConfig, get_peft_model
from tokenizer_kinds import tokenizer_of
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from toolkit.config.data import FinetuneDataConfig
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.rows import load_sources
from toolkit.data.tokens.encode import Encoder, encode_source
from toolkit.training.token_rows import describe_untrained_tokens

SPECIALS = ("<|open|>", "<|end|>", "<|unused|>")
TEMPLATE = (
    "{% for m in messages %}<|open|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant: {% endif %}"
)


def feed_of(folder: Path, tokenizer: Any) -> PreparedFeed:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    cfg = FinetuneDataConfig(train_files=str(file), sequence_length=100)
    (source,) = load_sources(cfg)
    encoded = encode_source(source, Encoder(tokenizer, cfg, 300))
    return PreparedFeed([encoded], SampleShape("none", 100), seed=1, global_batch=1)


def model_of(folder: Path, fill: dict[str, Any], tokenizer: Any, **changes: Any) -> Any:
    """Return a tiny model in which `fill` are the values of rows of special tokens."""
    if not (folder / "model").is_dir():
        save_tiny_model(folder / "model", **changes)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for token, value in fill.items():
            for end in (model.get_input_embeddings(), model.get_output_embeddings()):
                end.weight[tokenizer.convert_tokens_to_ids(token)] = value
    return model


def lines(folder: Path, fill: dict[str, Any], lora: LoraConfig | None, **changes: Any) -> list[str]:
    tokenizer = tokenizer_of("bytes", TEMPLATE, SPECIALS)
    model = model_of(folder, fill, tokenizer, **changes)
    if lora is not None:
        model = get_peft_model(model, lora)
    return describe_untrained_tokens(model, feed_of(folder, tokenizer), tokenizer)


LORA = LoraConfig(r=2, target_modules=["q_proj"])
ROW = torch.linspace(-0.02, 0.02, 32)
FILLS = {
    "zero": {"<|end|>": 0.0},
    "constant": {"<|end|>": 0.01},
    "tiny": {"<|end|>": ROW * 1e-4},
    "equal to another's": {"<|end|>": ROW, "<|unused|>": ROW},
}


@pytest.mark.parametrize("fill", FILLS)
def test_untrained_rows_are_named(tmp_path: Path, fill: str) -> None:
    (line,) = lines(tmp_path, FILLS[fill], LORA)
    assert line.startswith("WARNING    <|end|> (")
    assert "<|unused|>" not in line  # it is in no row of the data
    assert "Set lora.modules_to_save: [embed_tokens, lm_head]" in line


def test_tied_rows_are_named_once(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, {"<|open|>": 0.0}, LORA, tie_word_embeddings=True)
    assert "<|open|>" in line
    assert "lora.modules_to_save: [embed_tokens]" in line


def test_rows_that_are_trained_or_look_so_are_no_matter(tmp_path: Path) -> None:
    assert lines(tmp_path, {"<|end|>": ROW}, LORA) == []
    assert lines(tmp_path, {"<|unused|>": 0.0}, LORA) == []
    assert lines(tmp_path, {"<|end|>": 0.0}, None) == []  # all parameters are trained
    saved = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    assert lines(tmp_path, {"<|end|>": 0.0}, saved) == []


def sharded_lines(rank: int, world: int, folder: Path) -> list[str]:
    tokenizer = tokenizer_of("bytes", TEMPLATE, SPECIALS)
    model = model_of(folder / str(rank), {"<|end|>": 0.0}, tokenizer)
    model.requires_grad_(False)
    fully_shard(model)
    return describe_untrained_tokens(model, feed_of(folder / str(rank), tokenizer), tokenizer)


def test_rows_of_all_ranks_are_looked_at(tmp_path: Path) -> None:
    for rank in (0, 1):  # transformers writes on rank 0 only
        save_tiny_model(tmp_path / str(rank) / "model")
    first, second = run_ranks(sharded_lines, 2, tmp_path)
    assert first == second
    assert "<|end|>" in first[0]
    assert "<|open|>" not in first[0]
    assert "Take embed_tokens, lm_head out of model.frozen_parameters" in first[0]
