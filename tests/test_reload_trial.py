"""An adapter that a run trains can be loaded by PEFT: tried before the run, for any model type."""

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Qwen3OmniMoeThinkerForConditionalGeneration

from toolkit import checkpoint
from toolkit.adapters import reload_trial
from toolkit.adapters.lora import add_adapters, prepare_adapters
from toolkit.adapters.reload_trial import find_lost_adapters
from toolkit.adapters.targets import shortest_suffixes
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, ModelConfig
from toolkit.errors import ModelError
from toolkit.export import adapter_loading, consolidate
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import adapted_modules, trained_tensors

SHARED = "shared_experts"


def save_laguna(folder: Path) -> Path:
    """Write a model whose renamings change keys of adapters that are right already."""
    tiny_models.tiny_model("laguna").save_pretrained(folder)
    return folder


def test_all_linear_leaves_out_what_peft_would_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_laguna(tmp_path / "source")
    model: Any = add_adapters(build_on_meta(ModelConfig(str(source))), LoraConfig(r=2))
    said = capsys.readouterr().out
    assert "all-linear skips shared_experts.down_proj, shared_experts.gate_proj" in said
    assert "PEFT renames its keys and does not load them" in said
    names = [*adapted_modules(model)]
    assert names
    assert not [name for name in names if SHARED in name]
    assert any(name.endswith("mlp.gate_proj") for name in names)  # of a dense layer
    # The life that failed at the first save: saved, proven, exported, loaded by PEFT.
    load_pretrained(model, source, "cpu")
    for tensor in trained_tensors(model).values():
        tensor.add_(torch.randn(tensor.shape) * 0.05)
    path = checkpoint.save(
        checkpoint.TrainState(model, step=1), tmp_path / "run", CheckpointConfig()
    )
    assert "adapter proven" in adapter_loading.compare_with_reloaded(model, path)
    adapter = consolidate(tmp_path / "run", tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(source)
    state = PeftModel.from_pretrained(base, adapter, torch_device="cpu").state_dict()
    assert all(torch.equal(state[n], t) for n, t in trained_tensors(model).items())


def test_what_is_named_and_would_be_lost_is_refused(tmp_path: Path) -> None:
    model = build_on_meta(ModelConfig(str(save_laguna(tmp_path / "source"))))
    lora = LoraConfig(r=2, target_modules=["q_proj", f"{SHARED}.up_proj"])
    with pytest.raises(ModelError, match=r"shared_experts.up_proj.weight .* could not be loaded"):
        add_adapters(model, lora)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2", "deepseek_v3"])
def test_nothing_is_left_out_where_peft_loads_all(kind: str, tmp_path: Path, capsys) -> None:
    tiny_models.tiny_config(kind).save_pretrained(tmp_path)
    model = build_on_meta(ModelConfig(str(tmp_path), init="random"))
    adapted = add_adapters(model, LoraConfig(r=2))
    assert find_lost_adapters(adapted) == {}
    assert "would" not in capsys.readouterr().out


def test_values_that_arrive_in_another_place_count_as_lost(tmp_path: Path, monkeypatch) -> None:
    tiny_models.tiny_config("llama").save_pretrained(tmp_path)
    adapted = add_adapters(
        build_on_meta(ModelConfig(str(tmp_path), init="random")), LoraConfig(r=2)
    )
    import peft

    real = peft.set_peft_model_state_dict

    def swapped(model: Any, state: dict[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        one, two = [key for key in state if "k_proj.lora_A" in key][:2]
        return real(model, {**state, one: state[two], two: state[one]}, *args, **options)

    def failing(model: Any, state: dict[str, torch.Tensor], *args: Any, **options: Any) -> Any:
        if any("up_proj" in key for key in state):
            raise ValueError("no such layer")
        return real(model, state, *args, **options)

    for function, expected, reason in (
        (swapped, {"k_proj"}, "PEFT renames"),
        (failing, {"up_proj"}, "PEFT cannot load it: ValueError: no such layer"),
    ):
        monkeypatch.setattr(reload_trial, "_TRIAL_RESULTS", {})
        monkeypatch.setattr(peft, "set_peft_model_state_dict", function)
        lost = find_lost_adapters(adapted)
        assert {name.split(".")[-2] for name in lost} == expected
        assert all(value.startswith(reason) for value in lost.values())


def test_the_shortest_ends_name_nothing_else() -> None:
    names = ["a.0.mlp.up", "a.1.mlp.shared.up", "a.2.mlp.shared.up", "a.2.out"]
    assert shortest_suffixes({"a.1.mlp.shared.up", "a.2.mlp.shared.up"}, names) == {"shared.up"}
    assert shortest_suffixes({"a.1.mlp.shared.up"}, names) == {"1.mlp.shared.up"}


def test_a_target_that_is_not_there_suggests_linear_layers(tmp_path: Path) -> None:
    for kind, pattern, meant in (
        ("llama", "c_attn", "did you mean q_proj, k_proj, v_proj? Its other linear layers: o_proj"),
        ("llama", "query_key_value", "did you mean q_proj, k_proj, v_proj?"),
        ("llama", "c_fc", "did you mean gate_proj, up_proj?"),
        ("gpt2", "q_proj", "did you mean c_attn?"),
        ("llama", "qproj", "did you mean q_proj"),
        ("llama", "zzz", "; its linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj"),
    ):
        tiny_models.tiny_config(kind).save_pretrained(tmp_path)
        model = build_on_meta(ModelConfig(str(tmp_path), init="random"))
        with pytest.raises(ModelError) as caught:
            add_adapters(model, LoraConfig(r=2, target_modules=[pattern]))
        assert meant in str(caught.value)
        assert "self_attn" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_lost_on_a_base_in_4_bits(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT casts adapters to the dtype in which packed weights are computed with."""
    monkeypatch.setattr(
        reload_trial, "_TRIAL_RESULTS", {}
    )  # the base without 4 bits has the same names
    model = tiny_models.tiny_model("llama", hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path)
    base = build_on_meta(ModelConfig(str(tmp_path)))
    cfg = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], load_in_4bit=True)
    adapted = prepare_adapters(base, cfg, dtype)
    assert packed_weights(adapted)
    assert len(adapted_modules(adapted)) == 2 * model.config.num_hidden_layers
    assert find_lost_adapters(adapted) == {}


def test_all_linear_next_to_numbered_layers_outside_the_text(tmp_path: Path) -> None:
    """PEFT would take `0` of `visual.merger.mlp.0` for a name of decoder layers."""
    model_class = Qwen3OmniMoeThinkerForConditionalGeneration
    sizes = tiny_models._shrunk(model_class.config_class().to_dict())
    config = model_class.config_class(**sizes)
    model_class._from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    base = build_on_meta(ModelConfig(str(tmp_path)))
    linear = [n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)]
    assert any(name.rpartition(".")[2].isdigit() for name in linear)
    adapted = adapted_modules(prepare_adapters(base, LoraConfig(r=2), "float32"))
    assert adapted
    assert not any("visual" in name or "audio" in name for name in adapted)
    assert {name for name in linear if ".self_attn." in name and "model.layers" in name} <= {
        name.removeprefix("base_model.model.") for name in adapted
    }
