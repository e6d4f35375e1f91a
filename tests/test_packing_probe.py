"""The probe that decides whether packed samples stay apart: over a dozen types, against the model
in full, and that it sees what it must.
"""

import copy

import pytest
import torch
from conftest import slow, tiny_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from toolkit.models import packing_probe, tiny_copy
from toolkit.models.packing_probe import probe_packing

QUICK = ("llama", "gpt_neo", "mixtral", "deepseek_v3", "gemma2", "opt")
SAFE = {
    "llama": {},
    "qwen3": {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64},
    "gpt2": {},
    "gpt_neo": {},  # learned positions, every other layer in a window
    "mixtral": {"sliding_window": 4096},
    "qwen3_moe": {"mlp_only_layers": [0, 3]},
    "deepseek_v3": {},  # dense layers first, then experts in groups
    "gemma2": {},
    "gemma3_text": {},
    "cohere2": {},
    "opt": {},  # by the borders of documents only
}
LONGROPE = {
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
    },
}
LEAKING = ["mamba", "bloom", "mpt", "gpt_oss", "recurrent_gemma", "xglm"]


@pytest.mark.parametrize("kind", [*QUICK, *(slow(kind) for kind in SAFE if kind not in QUICK)])
def test_types_that_keep_packed_samples_apart(kind):
    verdict = probe_packing(CONFIG_MAPPING[kind](**SAFE[kind]))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize(("length", "ok"), [(4096, True), (8192, False)])
def test_longrope_depends_on_the_longest_sample(length, ok):
    """Above the length that the model was first trained at its factors are others, for all samples
    of a micro-batch.
    """
    verdict = probe_packing(CONFIG_MAPPING["phi3"](**LONGROPE), sequence_length=length)
    assert verdict.ok == ok
    assert ok or "does not come out as it does by itself" in verdict.why


@pytest.mark.parametrize("size", [65, 127, 128])
def test_small_vocabularies(size):
    verdict = probe_packing(CONFIG_MAPPING["llama"](vocab_size=size))
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("kind", LEAKING)
def test_types_whose_packed_samples_see_each_other(kind):
    verdict = probe_packing(CONFIG_MAPPING[kind]())
    assert not verdict.ok
    assert "see each other" in verdict.why


def test_bloom_leaks():
    assert "see each other" in probe_packing(CONFIG_MAPPING["bloom"]()).why


def test_what_does_not_run_is_a_no_with_its_reason():
    config = CONFIG_MAPPING["llama"](attn_implementation="flash_attention_2")
    verdict = probe_packing(config)
    assert not verdict.ok
    assert "flash" in verdict.why.lower(), verdict.why
    blind = CONFIG_MAPPING["llama"](hidden_act="no_such_act")
    assert "no_such_act" in probe_packing(blind).why


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("kernel", "tried"),
    [("sdpa", "documents_sdpa"), ("eager", "eager"), ("flex_attention", "flex_attention")],
)
def test_the_attention_of_the_run_is_tried(kernel, tried, monkeypatch):
    seen = set()
    compare = packing_probe._compare_logits

    def watched(model, *batches):
        seen.add(model.config._attn_implementation)
        return compare(model, *batches)

    monkeypatch.setattr(packing_probe, "_compare_logits", watched)
    config = CONFIG_MAPPING["llama"](attn_implementation=kernel)
    assert probe_packing(config).ok
    assert seen == {tried}


class Remembering(LlamaForCausalLM):
    """A llama whose last layers let a little of each row's first token through."""

    def forward(self, input_ids, **inputs):
        out = super().forward(input_ids=input_ids, **inputs)
        first = input_ids[:, :1, None].float()
        out.logits = out.logits + 1e-3 * first * (torch.arange(input_ids.shape[1]) > 15)[:, None]
        return out


class Counting(LlamaForCausalLM):
    """A llama that numbers its positions itself, through the row: nothing leaks, all differ."""

    def forward(self, input_ids, position_ids=None, **inputs):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **inputs)
        out.logits = out.logits + 0.01 * torch.arange(input_ids.shape[1])[:, None]
        return out


class Masked(LlamaForCausalLM):
    """A llama that is given an all-ones mask, which turns the packing by masks off."""

    def forward(self, input_ids, **inputs):
        return super().forward(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **inputs
        )


def test_small_leaks_and_shifted_positions_are_seen():
    """The controls: each differs from a llama, which passes, in one thing."""
    config = CONFIG_MAPPING["llama"]()
    assert "see each other" in probe_packing(config, Remembering).why
    assert "by itself" in probe_packing(config, Counting).why
    masking = CONFIG_MAPPING["llama"](attn_implementation="eager")
    assert probe_packing(masking).ok
    assert "see each other" in probe_packing(masking, Masked).why


@pytest.mark.slow
def test_a_single_layer_of_another_kind_decides():
    """Only the last kind of layer leaks: it is in the copy though it comes late."""
    jamba = CONFIG_MAPPING["jamba"](num_hidden_layers=16, attn_layer_period=2, attn_layer_offset=0)
    assert not probe_packing(jamba).ok
    kinds = ["full_attention"] * 3 + ["linear_attention"]
    late = CONFIG_MAPPING["qwen3_next"](num_hidden_layers=4, layer_types=kinds)
    assert "see each other" in probe_packing(late).why
    only = copy.deepcopy(late)
    only.layer_types = ["full_attention"] * 4
    assert probe_packing(only).ok


def test_a_tiny_copy_has_every_kind_of_layer_and_little_else():
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=62, num_attention_heads=16)
    full = tiny_copy.build_meta_model(AutoModelForCausalLM._model_mapping[type(config)], config)
    kinds = tiny_copy.describe_layer_kinds(full)
    assert len(kinds) == 62
    assert len(set(kinds)) == 2
    small = next(tiny_copy.shrunk_configs(config, kinds, None))
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert small.head_dim == config.head_dim
    assert small.sliding_window == 4
    assert small.hidden_size == config.hidden_size // 4
    assert config.num_hidden_layers == 62  # untouched


@pytest.mark.parametrize(("length", "window"), [(1024, 1024), (1025, 4), (None, 4)])
def test_windows_as_long_as_a_row_are_not_cut(length, window, monkeypatch):
    seen = []
    compare = packing_probe._compare_logits

    def watched(model, *batches):
        seen.append(model.config.sliding_window)
        return compare(model, *batches)

    monkeypatch.setattr(packing_probe, "_compare_logits", watched)
    assert probe_packing(CONFIG_MAPPING["mistral"](sliding_window=1024), sequence_length=length).ok
    assert seen == [window]


def test_the_random_state_is_untouched():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert probe_packing(tiny_config("llama")).ok
    assert torch.equal(torch.get_rng_state(), before)
