"""A dozen architectures, sharded against plain, and the checks themselves, broken on purpose.

All types are checked by `python tests/architectures.py` (`make architectures`); here are those
that stand for a kind: fused projections, experts, conversions that cannot be sliced, shared layers,
ties, state spaces, nested configs, a reversible backward.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from architectures import CHECKS, Sabotage, check_type, verdict
from conftest import ROOT
from distributed import run_ranks
from tiny_models import TYPES, UNEVEN, tiny_class, tiny_config, tiny_model

from toolkit import models
from toolkit.config.settings import ModelConfig
from toolkit.errors import LoadingError, ModelError
from toolkit.formats.hf_assets import HFAssets
from toolkit.loading.materialisation import build_with_buffers, draw_values
from toolkit.models.causal_lm import build_on_meta

pytestmark = pytest.mark.slow

SOME = (
    *("gpt2", "bert", "opt", "qwen3_5", "gemma3_text", "mixtral", "deepseek_v3", "kimi_linear"),
    *("hrm_text", "zamba2", "falcon_h1", "rwkv", "reformer", "apertus", "openai-gpt"),
)
ODD = ("gpt2", "mixtral", "hrm_text")
# The check that must fail -> what is broken.
BROKEN = {
    "load": Sabotage(weight="model.layers.1.mlp.up_proj.weight"),
    "gradients": Sabotage(gradient_scale=1.01),
    "export": Sabotage(exported="model.layers.2.self_attn.o_proj.weight"),
    "keys": Sabotage(key="model.layers.0.mlp.gate_proj.weight"),
    "bfloat16": Sabotage(weight="model.layers.1.mlp.up_proj.weight"),
    "random": Sabotage(seed_of_rank=True),
}


def check_some(rank: int, world: int, folder: str, kinds: list[str], uneven: bool) -> dict:
    import transformers

    transformers.logging.set_verbosity_error()
    return {k: check_type(k, Path(folder) / k, uneven=uneven) for k in kinds}


def check_and_break(rank: int, world: int, folder: str) -> tuple[dict, dict]:
    found = check_some(rank, world, folder, list(SOME), False)
    broken = {}
    for name, sabotage in BROKEN.items():
        before = tuple(CHECKS)[: tuple(CHECKS).index(name)]
        only = (name,) if name in ("bfloat16", "random") else (*before, name)
        broken[name] = check_type(
            "llama", Path(folder) / f"broken-{name}", sabotage=sabotage, only=only
        )
    return found, broken


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[tuple[dict, dict]]:
    return run_ranks(check_and_break, 2, str(tmp_path_factory.mktemp("architectures")))


@pytest.mark.parametrize("kind", SOME)
def test_sharded_equals_plain(kind, two_ranks):
    for found, _ in two_ranks:
        assert verdict(found[kind]) == "passed", found[kind]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_seen(name, two_ranks):
    said = [broken[name].get(name) for _, broken in two_ranks]
    assert any(isinstance(s, str) for s in said), said


def test_uneven_sizes(tmp_path):
    for found in run_ranks(check_some, 3, str(tmp_path), list(ODD), True):
        for kind in ODD:
            assert verdict(found[kind]) == "passed", found[kind]


def test_every_type_has_a_tiny_config():
    for kind in TYPES:
        if tiny_class(kind).__name__ in ("Gemma3nForConditionalGeneration",):
            continue  # its vision tower is built by a library that is not installed
        tiny_config(kind)
    assert set(UNEVEN) <= set(TYPES)


def test_a_drafter_is_refused_by_name(tmp_path):
    config = tiny_config("gemma4_unified_assistant")
    config.architectures = ["Gemma4UnifiedAssistantForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Gemma4UnifiedAssistantForCausalLM, a drafter"):
        build_on_meta(ModelConfig(str(tmp_path), dtype="float32", init="random"))


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 10**6}, {"layer_types": ["full_attention"] * 10**6}],
    ids=["a million layers", "a million layer types"],
)
def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path, changes):
    content = tiny_config("llama").to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    begun = time.perf_counter()
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        models.prepare(ModelConfig(str(tmp_path), init="random"))
    assert time.perf_counter() - begun < 5
    assert "\n" not in str(caught.value)


def test_a_type_that_dies_costs_only_itself(tmp_path):
    """A rank that is killed on the way is recorded; the types behind it are checked."""
    env = os.environ | {"ARCHITECTURES_KILL": "gpt2"}
    command = [sys.executable, str(ROOT / "tests" / "architectures.py"), "--work", str(tmp_path)]
    done = subprocess.run(
        [*command, "--types", "gpt2,llama", "--world", "1"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    lines = (tmp_path / "even" / "results.jsonl").read_text().splitlines()
    found = {r["type"]: r for r in map(json.loads, lines)}
    assert done.returncode == 1
    assert verdict(found["llama"]) == "passed"
    assert "signal 9" in found["gpt2"]["died"]


# ---- The random start ----------------------------------------------------------------------------


def on_meta(kind: str):
    with torch.device("meta"):
        model = tiny_class(kind)._from_config(tiny_config(kind), dtype=torch.float32)
    model.hf_assets = HFAssets(config={}, model_class=type(model))
    return model


def first_values(model, seed: int) -> dict[str, torch.Tensor]:
    names = [n for n, _ in model.named_parameters()]
    return dict(draw_values(model, build_with_buffers(model), names, seed))


@pytest.mark.parametrize("kind", ["openai-gpt", "apertus", "mamba", "reformer", "zamba2"])
def test_each_parameter_is_drawn_alone(kind):
    """Of constructors alone (openai-gpt), of modules around it (mamba), in lists (reformer)."""
    model = on_meta(kind)
    values = first_values(model, 3)
    assert values.keys() == dict(model.named_parameters()).keys()
    assert all(v.isfinite().all() and not v.is_meta for v in values.values())
    again, other = first_values(model, 3), first_values(model, 4)
    assert all(torch.equal(values[n], again[n]) for n in values)
    assert any(not torch.equal(values[n], other[n]) for n in values)
    one = next(n for n in values if values[n].ndim > 1)
    assert torch.equal(
        dict(draw_values(model, build_with_buffers(model), [one], 3))[one], values[one]
    )


def test_drawing_needs_one_module_at_a_time():
    model = on_meta("llama")
    built = build_with_buffers(model)
    for name, _ in draw_values(model, built, [n for n, _ in model.named_parameters()], 0):
        assert all(p.is_meta for p in built.parameters()), name


def test_memory_that_nobody_fills_is_an_error():
    cls = tiny_class("llama")

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(8))

    class Odd(cls):
        def __init__(self, config):
            super().__init__(config)
            self.extra = Norm()

    with torch.device("meta"):
        model = Odd._from_config(tiny_config("llama"), dtype=torch.float32)
    model.hf_assets = HFAssets(config={}, model_class=Odd)
    with pytest.raises(LoadingError, match=r"first values of extra\.scale of Odd cannot be drawn"):
        first_values(model, 0)


def test_the_random_state_of_the_run_is_left_alone():
    before = torch.get_rng_state()
    first_values(on_meta("openai-gpt"), 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_tiny_models_hide_nothing():
    model = tiny_model("llama")
    assert all(p.abs().max() > 0 and p.unique().numel() > 1 for p in model.parameters())
