"""`sharding.mlp_chunk_tokens`: the same gradients with the activations of one chunk at a time."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from sharded import CLOSE, apply_fsdp, init_mesh, loss_sum, relative_difference, sharded_of
from test_planning import _config, _save, _wide
from tiny_models import rows, save, tiny_model
from torch import nn

from toolkit.config import ModelConfig
from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.loading import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.mlp_probe import _is_tokenwise, find_mlps
from toolkit.planning.automatic import list_candidates
from toolkit.planning.fake_ranks import fake_world
from toolkit.planning.simulation import simulate
from toolkit.sharding import mlp_chunks

FP32 = ShardingConfig(param_dtype="float32", mlp_chunk_tokens=5)  # of rows of 16 tokens
KINDS = ("llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "deepseek_v3")
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "every second": {"activation_checkpointing": 2},
    "on the host": {"activation_checkpointing": "full", "activation_offload": True},
    "a unit": {"layer_classes": ["LlamaDecoderLayer", "mlp"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds = (*KINDS, "opt", "bloom", "qwen3_moe")
    return {kind: str(save(tiny_model(kind), root / kind, kind)) for kind in kinds}


def gradients(folder: str, cfg: ShardingConfig, world: int = 1) -> dict[str, torch.Tensor]:
    """Return the full gradients of a step on two rows."""
    model = build_on_meta(ModelConfig(folder))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    load_pretrained(model, folder, "cpu")
    loss_sum(model.train(), rows(2)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() for n, g in grads.items()}  # type: ignore[attr-defined]


def gaps(rank: int, world: int, folders: dict[str, str], modes: list[str]) -> dict[Any, float]:
    """Return how far the gradients of each type and mode are from those of whole MLPs."""
    found = {}
    for kind in KINDS:
        whole = gradients(folders[kind], dataclasses.replace(FP32, mlp_chunk_tokens=0), world)
        for mode in modes:
            if mode == "a unit" and kind != "llama":
                continue
            chunked = gradients(folders[kind], dataclasses.replace(FP32, **MODES[mode]), world)
            assert chunked.keys() == whole.keys()
            found[kind, mode] = relative_difference(chunked.values(), whole.values())
    return found


def test_gradients_are_those_of_whole_mlps(folders):
    (found,) = run_ranks(gaps, 1, folders, ["none", "full"])
    assert len(found) == 2 * len(KINDS)
    assert max(found.values()) < CLOSE, found


@pytest.mark.slow
def test_gradients_of_two_ranks_are_those_of_whole_mlps(folders):
    for found in run_ranks(gaps, 2, folders, list(MODES)):
        assert max(found.values()) < CLOSE, found


def test_a_chunk_without_its_gradient_is_seen(monkeypatch):
    """The control: a backward that loses a chunk differs from that of the whole module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    row = torch.randn(1, 7, 4, requires_grad=True)

    def run() -> list[torch.Tensor]:
        total = module(row).square().sum()
        return [*torch.autograd.grad(total, [row, *module.parameters()], allow_unused=True)]

    expected = run()
    mlp_chunks._run_in_chunks(module, 3)
    assert relative_difference(run(), expected) < CLOSE
    monkeypatch.setattr(mlp_chunks, "checkpoint", lambda forward, part, **_: forward(part.detach()))
    assert run()[0] is None


def test_dropped_values_are_the_same_in_the_backward():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    row = torch.randn(2, 6, 4, requires_grad=True)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [*torch.autograd.grad(module(row).square().sum(), [row, *module.parameters()])]

    torch.manual_seed(1)
    parts = [module(part[None]) for part in row.flatten(0, 1).split(5)]
    total = torch.cat(parts, 1).square().sum()
    expected = torch.autograd.grad(total, [row, *module.parameters()])
    mlp_chunks._run_in_chunks(module, 5)
    for _ in range(2):  # the first forward finds out whether random numbers are drawn
        assert relative_difference(run(), expected) < CLOSE


def test_short_rows_and_evaluation_run_the_forward_itself():
    calls: list[tuple[int, bool]] = []

    class Counted(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append((hidden.shape[1], torch.is_grad_enabled()))
            return super().forward(hidden)

    module = Counted(4, 4)
    mlp_chunks._run_in_chunks(module, 5)
    module(torch.randn(1, 5, 4))
    assert calls == [(5, True)]
    calls.clear()
    with torch.no_grad():
        module(torch.randn(2, 6, 4))
    assert calls == [(5, False), (5, False), (2, False)]


@pytest.mark.parametrize(
    ("kind", "count", "total"), [("llama", 3, 3), ("gpt2", 3, 3), ("deepseek_v3", 1, 3)]
)
def test_the_start_says_which_layers_run_in_chunks(kind, count, total, folders):
    with fake_world(2):
        model = build_on_meta(ModelConfig(folders[kind]))
        apply_fsdp(model, init_mesh("cpu", 2, FP32), FP32)
        line = sharded_of(model).mlp_line
    assert line == f"mlp        {count} of {total} layers compute it in chunks of 5 tokens"


@pytest.mark.parametrize("kind", ["opt", "bloom", "qwen3_moe"])
def test_types_without_such_an_mlp_are_refused_by_name(kind, folders):
    with fake_world(2):
        model = build_on_meta(ModelConfig(folders[kind]))
        with pytest.raises(ShardingError, match=f"no decoder layer of {type(model).__name__}"):
            apply_fsdp(model, init_mesh("cpu", 2, FP32), FP32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_checkpointing": "selective"}, "selective keeps"),
        ({"torch_compile": "layer"}, "torch_compile: none"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, message, folders):
    cfg = dataclasses.replace(FP32, **changes)
    with fake_world(2):
        model = build_on_meta(ModelConfig(folders["llama"]))
        with pytest.raises(ShardingError, match=message):
            apply_fsdp(model, init_mesh("cpu", 2, cfg), cfg)


def test_a_module_that_mixes_tokens_is_no_mlp():
    row = torch.randn(1, 8, 4)
    pointwise, mixing = nn.Linear(4, 4), lambda hidden: hidden.cumsum(1)
    with torch.no_grad():
        assert _is_tokenwise(pointwise, [(row, pointwise(row))])
        assert not _is_tokenwise(mixing, [(row, mixing(row))])
        assert not _is_tokenwise(pointwise, [None])
        assert not _is_tokenwise(pointwise, [(row, pointwise(row))] * 2)


def test_attention_is_no_mlp(folders):
    for kind in ("llama", "gpt2", "gpt_neox"):
        model = build_on_meta(ModelConfig(folders[kind]))
        layers = [
            n for n, m in model.named_modules() if type(m).__name__.endswith(("Layer", "Block"))
        ]
        names, _ = find_mlps(model, model, layers)
        assert {name.rpartition(".")[2] for name in names} == {"mlp"}


def test_a_plan_counts_what_it_saves(tmp_path):
    folder = _save(_wide("llama", 2), Path(tmp_path))
    flags = ["--sharding.activation_checkpointing=full"]
    whole, chunked = (
        simulate(_config(folder, *flags, *more, length=512, rows=1), 1, device_type="cpu")
        for more in ([], ["--sharding.mlp_chunk_tokens=64"])
    )
    assert chunked.peak.nbytes < whole.peak.nbytes
    auto = _config(folder, "--sharding.activation_checkpointing=auto", length=512, rows=1)
    with_chunks = dataclasses.replace(
        auto, sharding=dataclasses.replace(auto.sharding, mlp_chunk_tokens=64)
    )
    modes = [
        [group[0].sharding.activation_checkpointing for group in list_candidates(cfg, 1)]
        for cfg in (auto, with_chunks)
    ]
    assert modes == [["none", "selective", "full"], ["none", "full"]]
