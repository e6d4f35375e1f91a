"""Plans of runs that compile their layers: what a layer keeps, and what it computes."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from sharded import loss_sum
from test_planning import LENGTH, ROWS, _config, _save, _wide
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from toolkit.cli import main
from toolkit.config.settings import RunConfig
from toolkit.formats import local_tensor
from toolkit.planning import simulation
from toolkit.planning.devices import DEVICES, this_host
from toolkit.planning.estimates import NCCL, RESERVE, reserved_bytes
from toolkit.planning.fake_ranks import fake_world, sharded
from toolkit.planning.measuring import measure
from toolkit.planning.meter import Meter, fused_operations
from toolkit.planning.simulation import simulate

CPU = torch.device("cpu")
TRACED = "--sharding.torch_compile_backend=aot_eager_decomp_partition"
LORA = ("--lora.r", "8")
# With this variable, Inductor of torch 2.13 writes vector code without the header of its vectors.
NEEDS_INDUCTOR = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="Inductor's C++ code does not compile with ATEN_CPU_CAPABILITY=default",
)


def _llama(layers: int, compiled: str, *flags: str) -> RunConfig:
    folder = _save(_wide("llama", layers), Path(tempfile.mkdtemp()))
    return _config(folder, f"--sharding.torch_compile={compiled}", *flags, length=LENGTH, rows=ROWS)


def _planned(cfg: RunConfig) -> int:
    return simulate(cfg, 1, device_type="cpu").peaks["forward"].kinds["activations"]


def _kept(cfg: RunConfig) -> list[int]:
    """Return the bytes of each storage that a real forward keeps for its backward, sorted."""
    kept = dict[int, torch.UntypedStorage]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    backend = cfg.sharding.torch_compile_backend
    with sharded(cfg, 1, 0, "cpu", compile_by=backend) as (made, _):
        model = made.model
        simulation.materialise_run(model, cfg, CPU)
        ids = torch.randint(8, 1000, (ROWS, LENGTH))
        batch = {"input_ids": ids, "labels": ids}
        loss_sum(model.train(), batch)  # compiles
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = loss_sum(model, batch)
        own = {local_tensor(p).untyped_storage()._cdata for p in model.parameters()}
        assert out.requires_grad
        return sorted(s.nbytes() for name, s in kept.items() if name not in own)


def planned_and_kept(
    rank: int, world: int, compiled: str, flags: tuple[str, ...]
) -> list[tuple[int, list[int]]]:
    """Plan and run models of 3 and of 4 layers."""
    plain = [flag for flag in flags if flag != TRACED]
    return [
        (_planned(_llama(layers, compiled, *plain)), _kept(_llama(layers, compiled, *flags)))
        for layers in (3, 4)
    ]


@pytest.mark.plans
@pytest.mark.parametrize(
    ("compiled", "flags"),
    [
        ("none", LORA),
        ("layer", (*LORA, TRACED)),
        pytest.param("layer", LORA, marks=NEEDS_INDUCTOR),
        ("layer", (TRACED,)),
    ],
)
def test_a_layer_keeps_what_the_plan_says_to_the_byte(compiled: str, flags: Any) -> None:
    """Of each layer more, so that what embedding and head keep does not count.

    In a fresh process: plans can depend on what their process compiled before (docs/journal.md).
    """
    ((three, kept_of_three), (four, kept_of_four)) = run_ranks(
        planned_and_kept, 1, compiled, flags, group=False
    )[0]
    print(f"{compiled} {flags}: a layer keeps {four - three:,} bytes")
    sizes = f"3 layers keep {Counter(kept_of_three)}, 4 layers {Counter(kept_of_four)}"
    assert four - three == sum(kept_of_four) - sum(kept_of_three) > 0, sizes


@pytest.mark.plans
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_compiled_step_peaks_below_the_eager_one_and_where_it_is_measured(mode: str) -> None:
    flags = (*LORA, f"--sharding.activation_checkpointing={mode}")
    eager, compiled = (
        simulate(_llama(4, kind, *flags), 1, device_type="cpu") for kind in ("none", "layer")
    )
    assert eager.sharding.torch_compile == "none"
    assert compiled.sharding.torch_compile == "layer"
    assert compiled.state == eager.state
    measured = measure(_llama(4, "layer", *flags, TRACED), 1, CPU)[0]
    print(f"{mode}: {compiled.peak.nbytes:,}, eager {eager.peak.nbytes:,}, measured {measured:,}")
    assert compiled.peak.nbytes == pytest.approx(measured, rel=0.05)
    if mode != "full":  # there inductor's kernels keep what the graph has for a moment
        assert compiled.peak.nbytes < eager.peak.nbytes
    # The same products, in fewer kernels that move fewer bytes.
    parts = [sim.work["last micro-batch"].operations for sim in (eager, compiled)]
    products = [sum(n * count for (n, *_), count in part.items()) for part in parts]
    # Where a layer is recomputed, all but its last product, which the backward does not need.
    assert products[1] == pytest.approx(products[0], rel=0.1 if mode == "full" else 0.01)
    moved = [sum(n * count for (_, n, _), count in part.items()) for part in parts]
    assert moved[1] < 0.8 * moved[0]
    assert sum(parts[1].values()) < 0.7 * sum(parts[0].values())


@pytest.mark.plans
def test_identical_layers_share_a_graph() -> None:
    def graphs(layers: int) -> int:
        counters.clear()
        simulate(_llama(layers, "layer", *LORA), 1, device_type="cpu")
        return counters["stats"]["unique_graphs"]

    assert graphs(10) == graphs(3) == 2  # the first layer's input needs no gradient


@pytest.mark.plans
def test_layers_that_cannot_be_compiled_are_planned_as_eager_ones(monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such graph")

    compiler = "torch._dynamo.backends.debugging.min_cut_rematerialization_partition"
    monkeypatch.setattr(compiler, refuse)
    sim = simulate(_llama(1, "layer"), 1, device_type="cpu")
    assert sim.sharding.torch_compile == "none"
    (note,) = sim.notes
    assert "planned as eager ones" in note
    assert "no such graph" in note
    other = simulate(_llama(1, "model"), 1, device_type="cpu")
    assert other.notes == ("what torch_compile saves is not planned: activations are eager ones",)


@pytest.mark.plans
def test_a_plan_says_whether_it_is_of_compiled_layers(tmp_path: Path, capsys: Any) -> None:
    _save(_wide("llama", layers=2), tmp_path / "model")
    file, needs = tmp_path / "run.yaml", {}
    for name, more, device in (
        ("compiled", "", "h100"),
        ("off", "sharding: {torch_compile: none}\n", "h100"),
        ("lengths", "packing", "h100"),
        ("host", "", "cpu"),
    ):
        packing = "none" if more == "packing" else "wrapped"
        file.write_text(
            f"model: {{name_or_path: {tmp_path}/model, init: random}}\n"
            f"data: {{sequence_length: {LENGTH}, packing: {packing}}}\n"
            "train: {max_steps: 100, per_device_train_batch_size: 32}\n"
            + (more if packing == "wrapped" else "")
        )
        argv = ["plan", str(file), "--world_size", "8", "--device", device]
        assert main(argv) == 0
        said = capsys.readouterr().out
        assert ("as torch_compile makes them" in said) is (name == "compiled")
        assert ("MFU, not compiled" in said) is (name != "compiled")
        assert ("NCCL, 1 communicator *" in said) is (device != "cpu")
        assert max(map(len, said.splitlines())) <= 80
        assert main([*argv, "--json"]) == 0
        needs[name] = json.loads(capsys.readouterr().out)["memory"]
    assert needs["compiled"] < needs["off"]
    # Padded rows have a mask, with which transformers repeats the keys and values that heads share
    # (`use_gqa_in_sdpa`): here about 8 MB in two layers, in the run as in the plan.
    assert needs["off"] + 6e6 < needs["lengths"] < needs["off"] + 10e6


def test_nccl_has_its_room_where_there_are_ranks() -> None:
    h100 = DEVICES["h100"]
    assert reserved_bytes(h100, (1, 1)) == RESERVE
    assert reserved_bytes(h100, (1, 8)) == RESERVE + NCCL
    assert reserved_bytes(h100, (2, 8)) == RESERVE + 3 * NCCL
    assert reserved_bytes(this_host(), (2, 8)) == reserved_bytes(this_host(), (1, 1))


def test_what_a_chain_makes_in_between_is_neither_read_nor_written() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm((x.sin() * 2 + 1).relu(), w).t().cos().exp()

    with FakeTensorMode():
        graph = make_fx(chain)(torch.empty(8, 4), torch.empty(4, 2)).graph
    flops = lambda func, *_: 128.0 if "mm" in str(func) else 0.0  # noqa: E731
    assert fused_operations(graph, flops) == {
        (0.0, 4 * (32 + 32), False): 1,  # up to the product
        (128.0, 4 * (32 + 8 + 16), False): 1,
        (0.0, 4 * (16 + 16), False): 1,
    }


def test_layers_of_other_sizes_are_counted_in_full() -> None:
    """As those of Gemma 4, whose heads are of two sizes: torch makes symbols of sizes that change,
    and their arithmetic is no operation of a graph's.
    """
    torch.compiler.reset()
    layer = torch.compile(
        lambda x, w: (x @ w).view(4, w.shape[1] // 2, 2).relu(),
        backend="aot_eager_decomp_partition",
    )
    meter, sizes = Meter(), (32, 64, 16)
    with FakeTensorMode(), meter.running(compiled=True):
        meter.begin("forward", "step")
        for size in sizes:
            layer(torch.empty(4, 8), torch.empty(8, size))
    found = meter.work["step"].operations
    assert sum(flops * times for (flops, *_), times in found.items()) == 2 * 4 * 8 * sum(sizes)


def test_what_a_dtensor_tries_on_whole_tensors_is_not_counted() -> None:
    """On torch 2.11 a plan had four times the whole model in the optimizer's step by that."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (8,))
        meter = Meter()
        with FakeTensorMode(), meter.running():
            meter.begin("forward", "step")
            whole = DTensor.from_local(torch.empty(1000), mesh, [Shard(0)])
            before = meter.peaks["forward"].nbytes
            whole.acosh()  # which nothing has asked of a DTensor before
            assert meter.peaks["forward"].nbytes - before == 4000


def test_the_plan_of_a_step_holds_what_the_optimizer_takes() -> None:
    cfg = _llama(1, "none")
    sim = simulate(cfg, 8, device_type="cpu", gloo=False)
    step = sim.peaks["optimizer step"]
    assert step.working < sim.state.total / 10
