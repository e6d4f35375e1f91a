"""Shared pieces of the tests: tiny models and tokenizers made on the spot, and the way to run
things.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import pytest
import torch
import warm

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

torch.set_num_threads(1)
warm.give_forks_a_thread_pool()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported, which each later collection would walk through


def tiny_config(kind: str = "llama", **changes):
    """Return the config of a model of `kind` with some ten thousand parameters."""
    from transformers import AutoConfig

    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    own = {
        "llama": common,
        "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 64},
        "qwen3_moe": common
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        "gemma2": common | {"head_dim": 8, "tie_word_embeddings": True},
        "granite": common | {"logits_scaling": 4.0},
    }[kind]
    return AutoConfig.for_model(kind, **(own | changes))


def save_tiny_model(
    folder: Path, kind: str = "llama", shard: str = "5GB", seed: int = 0, **changes
) -> Path:
    """Write a tiny pretrained checkpoint of `kind` into `folder`, with values everywhere; return
    it.
    """
    from transformers import AutoModelForCausalLM

    dtype = changes.pop("dtype", torch.float32)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip what torch itself cannot compute with other processor instructions than the machine has.

    With ATEN_CPU_CAPABILITY=default or avx2 on a processor with AVX-512 and bf16, torch 2.13
    chooses an attention kernel for bf16 that then refuses to run.
    """
    report = yield
    fault = "pack_vnni2 is only supported when avx512"
    if "ATEN_CPU_CAPABILITY" in os.environ and report.failed and fault in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), None, f"torch: {fault} is supported")
    return report


def save_byte_tokenizer(folder: Path, extra: int = 0) -> Path:
    """Write a tokenizer: id 0 ends a text, then the 256 bytes, then `extra` added tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.add_tokens([f"<extra-{i}>" for i in range(extra)])
    wrapped.save_pretrained(folder)
    return folder


def run_recipe(launcher: list[str], *flags: str, recipe: str = "pretrain", timeout: int = 300):
    """Run a recipe in a subprocess; return the finished process with its text output."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "MASTER_"))
    }
    command = [*launcher, str(ROOT / "recipes" / f"{recipe}.py"), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env, check=False
    )


def plain() -> list[str]:
    return [sys.executable]


def accelerate(processes: int, port: int) -> list[str]:
    return [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / "cpu.yaml"),
        "--num_processes",
        str(processes),
        "--main_process_port",
        str(port),
    ]


def torchrun(processes: int, port: int) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc_per_node", str(processes), "--master_port", str(port)]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A tiny untied Llama checkpoint with a byte tokenizer beside it (vocabulary 300)."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    save_byte_tokenizer(folder)
    return save_tiny_model(folder)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 60 KB of real text: a module of the standard library."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    import argparse

    file.write_text(Path(argparse.__file__).read_text("utf-8")[:60_000], "utf-8")
    return file


def slow(*values) -> Any:
    """A case of a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
