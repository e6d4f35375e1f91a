"""Forwards on the side leave no trace; the random state of any accelerator is put back."""

import torch

from toolkit.models import modes


def test_a_forward_on_the_side_leaves_no_trace():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()
    model[0].eval()
    before = torch.get_rng_state()
    with modes.isolated_forward(model, "cpu"):
        assert not model.training
        assert not model[1].training
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == [True, False, True]


def test_any_accelerator_is_forked(monkeypatch):
    """Not CUDA alone: the device's type and index reach torch."""
    asked = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **given: asked.append(given))
    for device in ("cpu", "xpu", "cuda:0"):
        modes.forked_rng(device)
    assert asked == [
        {"devices": []},
        {"devices": [1], "device_type": "xpu"},
        {"devices": [0], "device_type": "cuda"},
    ]


def test_a_build_for_cuda_without_a_device_has_the_cpus_random_state_only(monkeypatch):
    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    assert [torch.equal(s, torch.get_rng_state()) for s in modes.get_random_state()] == [True]
