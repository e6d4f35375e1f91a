"""What makes a model another function in training is found on a tiny copy, and switched off."""

import pytest
import tiny_models
import torch
from tiny_models import TOKENS, own_section, tiny_class, tiny_config
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from toolkit.errors import ModelError
from toolkit.models import dropout
from toolkit.models.dropout import disable_dropout

SEEDS = range(8)
# Kinds whose noise has different names and places: modules, attributes of modules, the config.
KINDS = ["llama", "gpt2", "falcon", "persimmon", "opt", "biogpt", "xglm", "mixtral", "minimax"]


def noisy_model(kind: str, share: float = 0.3) -> nn.Module:
    """Return a model of `kind` with all its dropout settings at `share`."""
    config = own_section(tiny_config(kind), tiny_class(kind))
    for section in tiny_models._sections(config):
        for name, value in list(vars(section).items()):
            if name.endswith(tiny_models._OFF) and isinstance(value, float):
                setattr(section, name, share)
    torch.manual_seed(0)
    model = tiny_class(kind)._from_config(config, dtype=torch.float32)
    tiny_models.perturb(model)
    return model


@torch.no_grad()
def answers(model: nn.Module) -> list[torch.Tensor]:
    """Return the logits in eval mode, and in training by several seeds."""
    drawn = torch.Generator().manual_seed(5)
    ids = torch.randint(*TOKENS, (3, 16), generator=drawn)
    found = [model.eval()(input_ids=ids).logits]
    for seed in SEEDS:
        torch.manual_seed(seed)
        found.append(model.train()(input_ids=ids).logits)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_training_is_its_reference(kind: str) -> None:
    model = noisy_model(kind)
    expected, *drawn = answers(model)
    assert any(not torch.allclose(expected, one, atol=1e-3) for one in drawn)  # there is noise
    disable_dropout(model)
    after, *drawn = answers(model)
    torch.testing.assert_close(after, expected)
    for one in drawn:
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)


def test_rare_noise_is_found_without_luck() -> None:
    model = noisy_model("opt", 1e-4)  # a layer that is skipped once in ten thousand forwards
    disable_dropout(model)
    assert model.model.decoder.layerdrop == 0.0


class Drifting(modeling_llama.LlamaMLP):
    """A layer that adds noise to its output in training, by no setting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + 0.1 * torch.randn_like(out) if self.training else out


class Halving(modeling_llama.LlamaMLP):
    """A layer that is another function in training, the same in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (0.5 if self.training else 1.0)


class Shared(modeling_llama.LlamaMLP):
    """A layer whose noise comes from a setting that has no telling name."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.spread, self.shift = 0.25, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) + self.shift
        return out + self.spread * torch.randn_like(out) if self.training else out


@pytest.mark.parametrize("layer", [Drifting, Halving])
def test_noise_that_no_setting_switches_off_is_refused_by_its_module(monkeypatch, layer) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", layer)
    model = LlamaForCausalLM(tiny_config("llama"))
    with pytest.raises(ModelError, match=rf"model\.layers\.0\.mlp \({layer.__name__}\)"):
        disable_dropout(model)


def test_a_setting_without_a_telling_name_is_found(monkeypatch, capsys) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", Shared)
    model = LlamaForCausalLM(tiny_config("llama"))
    disable_dropout(model)
    (layer, *_) = (m for m in model.modules() if isinstance(m, Shared))
    assert (layer.spread, layer.shift) == (0.0, 0.5)  # the other one means something
    assert "dropout    off, as is Shared.spread" in capsys.readouterr().out


def test_routers_that_sample_in_training_are_refused() -> None:
    with pytest.raises(ModelError, match=r"mlp\.router \(PhimoeTopKRouter\)"):
        disable_dropout(noisy_model("phimoe"))


def test_a_model_that_cannot_be_tried_is_reported(monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no copy today")

    monkeypatch.setattr(dropout, "build_noisy_copy", fails)
    disable_dropout(noisy_model("llama"))
    line = capsys.readouterr().out
    assert "could not be tried on a tiny copy: RuntimeError: no copy today" in line


def test_the_random_state_of_a_run_stays() -> None:
    model = noisy_model("opt")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    disable_dropout(model)
    assert torch.equal(torch.rand(2), expected)
