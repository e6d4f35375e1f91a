"""Answers of a sharded model: greedy, with a cache, the same on any number of ranks, with adapters
too; and the model is as it was.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks
from sharded import apply_fsdp, init_mesh, train_step
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.adapters.lora import add_adapters
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import ModelConfig, ShardingConfig
from toolkit.errors import TrainingError
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.training.generation import encode_prompts, generate

FP32 = ShardingConfig(param_dtype="float32")
PROMPTS = ["def f(x):", "a", "What is the capital of nowhere?", "import os", "zz top 12"]
NEW = 8
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def naive(model: Any, ids: list[int], ends: set[int]) -> list[int]:
    """Return the greedy continuation, each token from a forward of everything, without a cache."""
    begun = len(ids)
    while len(ids) < begun + NEW and not (len(ids) > begun and ids[-1] in ends):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[begun:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Checkpoints whose config asks for sampling, and whose answers end at unequal lengths."""
    found = {}
    for kind in ("llama", "gpt2", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(kind)
        save_byte_tokenizer(folder)
        save_tiny_model(folder, kind, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.manual_seed(3)
        for parameter in model.parameters():  # so much that answers are no repetitions
            parameter.data.add_(torch.randn_like(parameter) * 0.3 * (parameter.ndim > 1))
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        answers = [naive(model, tokenizer(p)["input_ids"], set()) for p in PROMPTS]
        assert sum(len(set(a)) > 4 for a in answers) > 2, answers
        end = next(t for t in answers[0][2:] if t not in answers[0][:2])  # in mid-answer
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [0, end]}))
        sampling = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 3.0}
        (folder / "generation_config.json").write_text(json.dumps(sampling))
        found[kind] = str(folder)
    return found


def expected(folder: str, prompts: list[str]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {0, *json.loads(Path(folder, "config.json").read_text())["eos_token_id"]}
    return [naive(model, tokenizer(p)["input_ids"], ends) for p in prompts]


@contextlib.contextmanager
def one_rank():
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_prompts_are_judged_before_training(folders):
    """On meta: nothing is loaded for it."""
    model = build_on_meta(ModelConfig(folders["llama"]))
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    ids = encode_prompts(model, tokenizer, PROMPTS, NEW)
    assert ids == [tokenizer(p)["input_ids"] for p in PROMPTS]
    for prompts, new, said in (
        (["a" * 60], NEW, "64 positions"),
        ([""], NEW, "no tokens"),
    ):
        with pytest.raises(TrainingError, match=said):
            encode_prompts(model, tokenizer, prompts, new)
    tokenizer.chat_template = "{{ raise_exception('a system turn comes first') }}"
    with pytest.raises(TrainingError, match=r"template refuses .*a system turn comes first"):
        encode_prompts(model, tokenizer, PROMPTS, NEW)


def on_ranks(rank: int, world: int, folders: dict[str, str]) -> dict[str, Any]:
    kinds = folders if world == 1 else ("llama", "qwen3_moe")
    found = {kind: answers(rank, world, folders[kind], LoraConfig()) for kind in kinds}
    adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    found["adapters"] = answers(rank, world, folders["llama"], adapters)
    return found


def answers(rank: int, world: int, folder: str, adapters: LoraConfig) -> dict[str, Any]:
    model: Any = build_on_meta(ModelConfig(folder))
    if adapters.r:
        model = add_adapters(model, adapters)
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    load_pretrained(model, folder, "cpu")
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # they begin as nothing, and differently a run
            parameter.detach().to_local().fill_(0.2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.train()
    still = next(m for n, m in model.named_modules() if n.endswith(("norm", "ln_f")))
    still.eval()  # a part that somebody keeps so stays so
    modes = [m.training for m in model.modules()]
    torch.manual_seed(rank)
    before, settings = torch.get_rng_state(), model.generation_config
    forwards: list[int] = []
    counter = model.register_forward_hook(lambda *_: forwards.append(1))
    found = {
        "plain": generate(model, tokenizer, PROMPTS, NEW),
        "forwards": len(forwards),
    }
    tokenizer.chat_template = TEMPLATE
    found["chat"] = generate(model, tokenizer, PROMPTS[:1], NEW)
    counter.remove()
    assert generate(model, tokenizer, [], NEW) == []
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert model.generation_config is settings
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any("forward" in vars(m) for m in model.modules() if hasattr(m, "generate"))
    if world == 1:
        ends = {0, *json.loads(Path(folder, "config.json").read_text())["eos_token_id"]}
        model.eval()
        by_hand = [naive(model, tokenizer(p)["input_ids"], ends) for p in PROMPTS]
        found["by hand"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in by_hand]
    with pytest.raises(TrainingError, match="positions"):
        generate(model, tokenizer, ["a" * 60], NEW)
    model.train()
    batch = {"input_ids": torch.full((1, 8), 5), "labels": torch.full((1, 8), 5)}
    train_step(model, torch.optim.SGD(model.parameters()), [batch])  # training goes on
    return found


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, Any]:
    with one_rank():
        return on_ranks(0, 1, folders)


def test_answers_are_greedy_and_those_of_one_process(alone, folders):
    for kind, folder in folders.items():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = expected(folder, PROMPTS)
        assert len({len(x) for x in ids}) > 1  # answers end at unequal lengths
        texts = [tokenizer.decode(x, skip_special_tokens=True) for x in ids]
        assert alone[kind]["plain"] == texts == alone[kind]["by hand"]
        turn = expected(folder, [f"<user>{PROMPTS[0]}<assistant>"])
        assert alone[kind]["chat"] == [tokenizer.decode(turn[0], skip_special_tokens=True)]
        assert alone[kind]["forwards"] == sum(map(len, ids))  # one a token: the cache is used
    assert alone["adapters"]["plain"] == alone["adapters"]["by hand"]
    assert alone["adapters"]["plain"] != alone["llama"]["plain"]


@pytest.mark.slow
def test_answers_do_not_depend_on_the_number_of_ranks(alone, folders):
    found = run_ranks(on_ranks, 2, folders)
    for kind in found[0]:
        one = alone[kind]
        first, second = (rank[kind] for rank in found)
        assert first == second, "every rank has all answers, after as many forwards"
        for what in ("plain", "chat"):
            assert first[what] == one[what], (kind, what)
        assert first["forwards"] < one["forwards"]
