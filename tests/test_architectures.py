"""A dozen architectures, sharded against plain, and the checks themselves, broken on purpose.

All types are checked by `python tests/architectures.py` (`make architectures`); here are those
that stand for a kind: fused projections, experts, conversions that cannot be sliced, shared layers,
ties, state spaces, nested configs, a reversible backward.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import CHECKS, Sabotage, check_type, verdict
from conftest import ROOT
from distributed import run_ranks
from tiny_models import TYPES, UNEVEN, tiny_class, tiny_config, tiny_model

from toolkit.config.settings import ModelConfig
from toolkit.errors import LoadingError, ModelError
from toolkit.loading.recorded_init import Recorder
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


# ---- The recorded start --------------------------------------------------------------------------


def recorded(build):
    with (recorder := Recorder()):
        made = build()
    recorder.name(made)
    return made, recorder


def whole(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in tensor.shape)


def test_a_recorded_start_is_the_same_in_pieces(monkeypatch):
    monkeypatch.setattr("toolkit.loading.recorded_init._BLOCK_ELEMENTS", 8 * 5)

    def build() -> dict[str, torch.Tensor]:
        embedding = torch.nn.Embedding(50, 5, padding_idx=3)
        torch.nn.init.trunc_normal_(embedding.weight, std=0.02)
        with torch.no_grad():
            embedding.weight[3].zero_()
            embedding.weight[40:44].fill_(7.0)
        return {"w": embedding.weight}

    made, recorder = recorded(build)
    everything = recorder.replay(made["w"], whole(made["w"]), torch.float32, 1)
    parts = [
        recorder.replay(made["w"], (slice(a, b), slice(0, 5)), torch.float32, 1)
        for a, b in ((0, 7), (7, 42), (42, 50))
    ]
    assert torch.equal(torch.cat(parts), everything)
    assert everything[3].abs().max() == 0
    assert (everything[40:44] == 7).all()
    drawn = torch.cat([everything[:3], everything[4:40], everything[44:]])
    assert 0.015 < drawn.std() < 0.02
    assert drawn.abs().max() < 2 * 0.02 * 100
    other = recorder.replay(made["w"], whole(made["w"]), torch.float32, 2)
    assert not torch.equal(other, everything)


def test_a_recorded_start_computes_what_is_computed():
    def build() -> dict[str, torch.Tensor]:
        a = torch.nn.Parameter(torch.empty(6, 4))
        b = torch.nn.Parameter(torch.empty(4, 6))
        constant = torch.nn.Parameter(torch.log(torch.tensor([2.0, 3.0])))
        with torch.no_grad():
            a.normal_()
            b.copy_(a.t() * 2)
            torch.nn.init.orthogonal_(a.new_empty(3, 3))
        return {"a": a, "b": b, "constant": constant}

    made, recorder = recorded(build)
    values = {n: recorder.replay(t, whole(t), torch.float32, 5) for n, t in made.items()}
    assert torch.equal(values["b"], values["a"].t() * 2)
    assert torch.equal(values["constant"], torch.tensor([2.0, 3.0]).log())
    assert not recorder.guessed


def test_memory_that_nobody_fills_is_an_error():
    def build() -> dict[str, torch.Tensor]:
        tensor = torch.empty(4, 2)
        tensor[:2] = 1.0
        return {"x": tensor}

    made, recorder = recorded(build)
    with pytest.raises(LoadingError, match="never given a value"):
        recorder.replay(made["x"], whole(made["x"]), torch.float32, 0)


def test_a_decision_on_drawn_values_is_known():
    def build() -> dict[str, torch.Tensor]:
        x = torch.randn(3)
        return {"x": x if x.sum() > 0 else -x}

    assert recorded(build)[1].guessed


def test_tiny_models_hide_nothing():
    model = tiny_model("llama")
    assert all(p.abs().max() > 0 and p.unique().numel() > 1 for p in model.parameters())
