"""Where the mesh is left open, a copy of the model on each machine that has room for it."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit import ranks
from toolkit.config.settings import ModelConfig, PretrainConfig, ShardingConfig
from toolkit.planning import preflight

TWO_OF_FOUR = [0, 0, 0, 0, 1, 1, 1, 1]
HELD = 16 * 1000 * 1000 // 4 + 4 * 10**6 // 2  # of a rank: fp32, gradient, AdamW; one gathered


def chosen(
    monkeypatch: Any, machines: list[int], memory: int, device: str = "cuda", **knobs: Any
) -> tuple[tuple[int, int], str]:
    said: list[str] = []
    run: Any = SimpleNamespace(
        world_size=len(machines), rank=0, device=torch.device(device), log=said.append
    )
    monkeypatch.setattr(ranks, "node_indices", lambda: machines)
    cfg = PretrainConfig(ModelConfig("x"), sharding=ShardingConfig(**knobs))
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)
    found = preflight.shard_within_machines(cfg, model, run, memory).sharding
    return (found.dp_replicate, found.dp_shard), " ".join(said)


def test_each_machine_has_a_copy_where_it_fits(monkeypatch) -> None:
    roomy = HELD * 5 // 2 + 1
    mesh, said = chosen(monkeypatch, TWO_OF_FOUR, roomy)
    assert mesh == (2, 4)
    assert said.startswith(
        "mesh       2 copies, each over the 4 ranks of a machine, which hold 6.0 MB"
    )
    assert "(sharding.dp_shard: 8 makes one over all)" in said
    mesh, said = chosen(monkeypatch, TWO_OF_FOUR, roomy - 10)
    assert mesh == (-1, -1)
    assert "one copy over all 8 ranks: over the 4 of a machine each would hold 6.0 MB of" in said


@pytest.mark.parametrize(
    ("machines", "device", "knobs"),
    [
        ([0] * 8, "cuda", {}),
        (list(range(8)), "cuda", {}),  # one rank each
        ([0, 1] * 4, "cuda", {}),
        ([0, 0, 0, 1, 1, 1, 1, 1], "cuda", {}),
        (TWO_OF_FOUR, "cpu", {}),
        (TWO_OF_FOUR, "cuda", {"dp_shard": 8}),
        (TWO_OF_FOUR, "cuda", {"dp_replicate": 1}),
        (TWO_OF_FOUR, "cuda", {"reshard_after_forward": 8}),
        (TWO_OF_FOUR, "cuda", {"cpu_offload": True}),
    ],
)
def test_what_is_asked_for_or_unlike_stays(monkeypatch, machines, device, knobs) -> None:
    mesh, said = chosen(monkeypatch, machines, 10**12, device, **knobs)
    assert mesh == (knobs.get("dp_replicate", -1), knobs.get("dp_shard", -1))
    assert not said


def test_the_run_keeps_what_was_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(ranks, "node_indices", lambda: TWO_OF_FOUR)
    monkeypatch.setattr(preflight, "free_memory", lambda *_: 10**12)
    monkeypatch.setattr(preflight, "figures_of", lambda _: None)
    monkeypatch.setattr(preflight, "_format_prediction", lambda *_: "")
    monkeypatch.setattr(preflight, "_advise_if_out_of_memory", lambda *_: contextlib.nullcontext())
    kept: list[Any] = []
    folder: Any = SimpleNamespace(before=None, set_config=kept.append)
    run: Any = SimpleNamespace(
        world_size=8,
        rank=0,
        device=torch.device("cuda"),
        log=lambda *_: None,
        at_end=contextlib.ExitStack(),
    )
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    cfg = PretrainConfig(ModelConfig("x"))
    settled = preflight.resolve_auto(cfg, model, run, folder).sharding
    assert (settled.dp_replicate, settled.dp_shard) == (2, 4)
    (recorded,) = kept  # a start on other machines decides anew
    assert (recorded.sharding.dp_replicate, recorded.sharding.dp_shard) == (-1, -1)
