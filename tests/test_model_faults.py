"""Faults of a model's own files and settings, each refused in one line before any long work."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from conftest import save_byte_tokenizer, save_tiny_model
from safetensors.torch import load_file, save_file

from toolkit.adapters.lora import add_adapters
from toolkit.config import LoraConfig, ModelConfig
from toolkit.errors import LoadingError, ModelError
from toolkit.loading import check_weights_fit, load_pretrained, pretrained
from toolkit.models import build_on_meta
from toolkit.models.causal_lm import check_config_values, check_usable

FILE = "model.safetensors"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention_dropout", 2.0, "attention_dropout is 2.0, expected a probability from 0 to 1"),
        ("attention_dropout", -0.1, "attention_dropout is -0.1, expected a probability"),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06, expected 0 or more"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1, expected no negative number"),
        ("attention_dropout", 0.5, ""),
        ("rms_norm_eps", 1e-12, ""),
        ("rms_norm_eps", 0.0, ""),
    ],
)
def test_numbers_that_no_forward_can_use(
    name: str, value: float, expected: str, tmp_path: Path
) -> None:
    file = save_tiny_model(tmp_path / "model") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    cfg = ModelConfig(str(tmp_path / "model"))
    if not expected:
        check_usable(cfg, 16, "cpu")
        return
    with pytest.raises(ModelError) as caught:
        check_usable(cfg, 16, "cpu")
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def _experts(config: dict[str, Any]) -> list[int]:
    return [config[name] for name in ("num_experts", "num_local_experts") if name in config]


def test_more_experts_are_chosen_than_there_are(tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path, "qwen3_moe") / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_experts_per_tok": 1 + max(_experts(config))}))
    with pytest.raises(ModelError, match=r"experts are chosen for a token, of"):
        build_on_meta(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("kind", tiny.TYPES)
def test_the_configs_of_all_types_pass(kind: str) -> None:
    check_config_values(tiny.tiny_config(kind).to_dict(), Path("config.json"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_the_checkpoints(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / FILE)
    tensors["model.embed_tokens.weight"][3] = value
    save_file(tensors, folder / FILE, {"format": "pt"})
    said = "already has non-finite values (NaN or infinity) in model.embed_tokens.weight. "
    with pytest.raises(LoadingError) as caught:
        load_pretrained(build_on_meta(ModelConfig(str(folder))), folder, "cpu")
    assert said in str(caught.value)
    assert "learning_rate" not in str(caught.value)
    # A frozen row may be of a token that no text has.
    model = add_adapters(build_on_meta(ModelConfig(str(folder))), LoraConfig(r=2))
    load_pretrained(model, folder, "cpu")
    assert "embed_tokens.weight, which is frozen" in capsys.readouterr().out


def test_nan_of_other_bits_after_a_cast_is_no_fault_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which NaN a cast gives depends on where in memory the value is."""
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / FILE)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / FILE, {"format": "pt"})
    load = pretrained.convert.run_loader

    def load_with(change: int) -> None:
        def changed(model: Any, *arguments: Any, **options: Any) -> Any:
            info = load(model, *arguments, **options)
            model.get_parameter("model.norm.weight").data.view(torch.int16)[3] ^= change
            return info

        monkeypatch.setattr(pretrained.convert, "run_loader", changed)
        load_pretrained(build_on_meta(ModelConfig(str(folder), dtype="bfloat16")), folder, "cpu")

    with pytest.raises(LoadingError, match=r"already has non-finite values .* model.norm.weight"):
        load_with(1)
    with pytest.raises(
        LoadingError, match="memory does not hold the weights of"
    ):  # no NaN any more
        load_with(0x4000)


def resized(kind: str, folder: Path) -> Any:
    tiny.save(tiny.tiny_model(kind), folder, kind)
    save_byte_tokenizer(folder)
    cfg = ModelConfig(str(folder), resize_embeddings=True)
    model = build_on_meta(cfg)
    check_weights_fit(model, cfg)
    load_pretrained(model, folder, "cpu")
    return model


INKLINGS = ["inkling_text", "inkling2_text", "inkling2_loop_text"]


@pytest.mark.parametrize("kind", ["qwen4_exp_text", "reformer", "llama", *INKLINGS])
def test_embeddings_are_resized(kind: str, tmp_path: Path) -> None:
    model = resized(kind, tmp_path)
    source = tiny.tiny_model(kind)
    for name, before in model.hf_assets.resized.items():
        value = model.get_parameter(name)
        assert len(value) == 257
        assert torch.equal(value[:before], source.get_parameter(name)), name
    ids = torch.arange(200, 216)[None]
    assert model(input_ids=ids).logits.shape == (1, 16, 257)
    # The exported config.json describes the resized model.
    config = type(model.config).from_dict(model.hf_assets.config)
    assert {n: p.shape for n, p in type(model)(config).named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", INKLINGS)
def test_a_head_with_fewer_rows_than_the_embedding_is_not_resized(kind, tmp_path: Path) -> None:
    # The stored head is padded, so the mean of its rows would include the padding.
    config = tiny.tiny_config(kind, unpadded_vocab_size=150)
    tiny.save(tiny.tiny_class(kind)(config), tmp_path, kind)
    save_byte_tokenizer(tmp_path)
    with pytest.raises(
        ModelError, match=r"^model.resize.* is 150, expected vocab_size 160. Remove"
    ):
        build_on_meta(ModelConfig(str(tmp_path), resize_embeddings=True))


def test_a_model_that_cannot_be_resized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ProphetNetForCausalLM .* still has 160 rows, expected"):
        resized("prophetnet", tmp_path)
    # Its embedding has eight rows more than its head, which no config of another size describes.
    with pytest.raises(ModelError, match=r"embed_tokens.weight has shape \(257, 32\), but its res"):
        resized("mllama", tmp_path / "mllama")
