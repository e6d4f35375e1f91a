"""Liger's kernels: refused where they cannot run; on a model they change no name and no class.

Where liger-kernel is not installed, a stand-in that replaces what Liger replaces is put on.
"""

import functools
import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from conftest import save_tiny_model
from transformers.models.llama import modeling_llama

from toolkit.config.settings import ModelConfig, PretrainConfig, ShardingConfig
from toolkit.errors import ConfigError, ModelError
from toolkit.models import kernels
from toolkit.models.causal_lm import build_on_meta, check_usable, prepare

REAL = importlib.util.find_spec("liger_kernel") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


def double_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return 2 * type(module).forward(module, hidden)


def no_positions(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any) -> Any:
    return q, k


def stand_in(model: Any, asked: dict[str, bool]) -> None:
    """Replace as Liger 0.8 does: the module's classes and functions, and forwards of instances."""
    assert asked == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    modeling_llama.apply_rotary_pos_emb = no_positions
    modeling_llama.LlamaRMSNorm = torch.nn.RMSNorm
    for layer in model.model.layers:
        norm = layer.input_layernorm
        norm.forward = types.MethodType(double_norm, norm)


@pytest.fixture
def liger(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_load_liger_functions", lambda: {"llama": None})
    monkeypatch.setattr(kernels, "transformers_private", lambda *_: stand_in)


def test_refused_where_triton_has_no_device(folder):
    cfg = ModelConfig(folder, kernels="liger")
    with pytest.raises(ConfigError, match=r"kernels: liger needs a device .* computes on cpu"):
        check_usable(cfg, 16, "cpu")
    check_usable(ModelConfig(folder), 16, "cpu")  # the control


def test_refused_where_it_is_not_installed(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(
        ConfigError, match=r"liger-kernel 0.8 and Triton.*install fsdp2-toolkit.liger"
    ):
        check_usable(ModelConfig(folder, kernels="liger"), 16, "cuda")


def test_a_type_that_liger_does_not_know_is_named(tmp_path, liger):
    path = save_tiny_model(tmp_path, "gpt2")
    with pytest.raises(ModelError, match=r"no kernels for model_type 'gpt2'.*it knows llama"):
        prepare(ModelConfig(str(path), kernels="liger"))


def test_a_liger_that_fails_leaves_the_classes_as_they_were(folder, liger, monkeypatch):
    def fails(model: Any, asked: Any) -> None:
        stand_in(model, asked)
        raise AttributeError("no attribute mlp")

    monkeypatch.setattr(kernels, "transformers_private", lambda *_: fails)
    own = modeling_llama.LlamaRMSNorm
    with pytest.raises(
        ModelError, match=r"cannot be applied to LlamaForCausalLM: .*no attribute mlp"
    ):
        prepare(ModelConfig(folder, kernels="liger"))
    assert modeling_llama.LlamaRMSNorm is own
    monkeypatch.setattr(kernels, "transformers_private", lambda *_: lambda *_: None)
    with pytest.raises(ModelError, match="Liger changed nothing"):
        prepare(ModelConfig(folder, kernels="liger"))


def test_only_this_model_computes_with_them(folder, liger, capsys):
    before = dict(vars(modeling_llama))
    plain = build_on_meta(ModelConfig(folder))
    model = prepare(ModelConfig(folder, kernels="liger"))
    assert "Liger's in 3 LlamaAttention, 3 LlamaRMSNorm" in capsys.readouterr().out
    assert vars(modeling_llama) == before
    assert list(model.state_dict()) == list(plain.state_dict())
    ids = torch.arange(16).view(2, 8)
    found = {}
    for name, made in (("plain", plain), ("model", model)):
        made.to_empty(device="cpu")
        made.load_state_dict(from_folder(folder))
        made.model.rotary_emb = type(made.model.rotary_emb)(config=made.config)
        found[name] = made(input_ids=ids).logits
    later = from_folder(folder, whole=True)(input_ids=ids).logits
    torch.testing.assert_close(found["plain"], later)
    assert not torch.allclose(found["model"], later, atol=1e-3)
    # Its attention knows no positions, as the stand-in has it: the same by hand.
    for layer in plain.model.layers:
        layer.input_layernorm.weight.data *= 2
    rope = functools.partial(setattr, modeling_llama, "apply_rotary_pos_emb")
    rope(no_positions)
    try:
        assert torch.allclose(plain(input_ids=ids).logits, found["model"], atol=1e-6)
    finally:
        rope(before["apply_rotary_pos_emb"])


def from_folder(folder: str, whole: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model if whole else model.state_dict()


@pytest.mark.skipif(not REAL, reason="liger-kernel is not installed")
@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_liger_itself_goes_on(kind, tmp_path, capsys):
    path = str(save_tiny_model(tmp_path, kind))
    module = sys.modules[type(build_on_meta(ModelConfig(path))).__module__]
    before = dict(vars(module))
    model = prepare(ModelConfig(path, kernels="liger"))
    assert vars(module) == before
    assert "Attention" in (said := capsys.readouterr().out)
    assert "RMSNorm" in said
    assert {"MLP", "Experts"} & {n for n in ("MLP", "Experts") if n in said}
    assert list(model.state_dict()) == list(build_on_meta(ModelConfig(path)).state_dict())
    with pytest.raises(RuntimeError, match="driver"):  # without a GPU Triton can only refuse
        model.to_empty(device="cpu")(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_selective_checkpointing_is_refused(folder):
    """Measured: the rotary kernel overwrites the queries and keys that it keeps."""
    cfg = ShardingConfig(activation_checkpointing="selective")
    with pytest.raises(ConfigError, match=r"keeps queries and keys.*Set it to full"):
        PretrainConfig(ModelConfig(folder, kernels="liger"), sharding=cfg)
    PretrainConfig(ModelConfig(folder), sharding=cfg)  # the control
