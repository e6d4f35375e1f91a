"""`auto` on an accelerator whose device comes without an index, as that of a run of one process.

There is none here: torch's own functions of CUDA run, and what they ask of the driver is answered.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_memory import AUTO_BATCH, AUTO_RECOMPUTED, _auto
from test_planning import _save, _wide

from toolkit.planning import devices, measuring, preflight
from toolkit.planning.devices import DEVICES, device_here, with_index
from toolkit.planning.measuring import try_step
from toolkit.planning.preflight import choose_candidate

INDEX, TOTAL = 3, 80 * 10**9
NO_INDEX = "Expected a torch.device with a specified index"


class Driver:
    """What is asked of the driver, and on which device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Any]] = []

        def answer(owner: Any, name: str, value: Any = None) -> None:
            def asked(*args: Any) -> Any:
                self.asked.append((name, args[-1] if args else None))
                return value

            monkeypatch.setattr(owner, name, asked, raising=False)

        answer(torch.cuda, "_lazy_init")
        answer(torch.cuda, "is_available", True)
        answer(torch.cuda, "is_initialized", True)
        answer(torch.cuda, "current_device", INDEX)
        answer(torch.cuda, "get_device_name", "NVIDIA H100 80GB HBM3")
        answer(torch.cuda, "_exchange_device", INDEX)
        answer(torch.cuda, "_maybe_exchange_device", INDEX)
        answer(torch._C, "_cuda_synchronize")
        answer(torch._C, "_cuda_setMemoryFraction")
        answer(torch._C, "_cuda_resetPeakMemoryStats")
        answer(torch._C, "_accelerator_setDeviceIndex")
        answer(torch.accelerator, "is_available", True)
        answer(torch.accelerator, "current_device_index", INDEX)
        answer(torch.accelerator, "current_accelerator", torch.device("cuda"))
        info = SimpleNamespace(cudaMemGetInfo=lambda index: (TOTAL if index == INDEX else 0, TOTAL))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: info)
        monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with CUDA, whose steps take no kernel and are planned already: all else of a try
    runs.
    """

    @contextlib.contextmanager
    def sharded(*_: Any, **__: Any) -> Iterator[tuple[SimpleNamespace, None]]:
        yield SimpleNamespace(model=None, mesh=None), None

    monkeypatch.setattr(measuring, "sharded", sharded)
    objective = SimpleNamespace(shard_models=lambda: None, largest_batch=lambda choice: None)
    monkeypatch.setattr(measuring, "build", lambda *_: objective)
    monkeypatch.setattr(measuring, "attend_as_run", lambda *_, **__: None)
    step = lambda *_, around, **__: around(lambda: None)  # noqa: E731
    monkeypatch.setattr(measuring, "allocate_and_run_step", step)
    planned = lambda fn, *args: (0, 10**9) if fn is preflight._choose_by_plan else fn(*args)  # noqa: E731
    monkeypatch.setattr(preflight, "in_subprocess", planned)
    return Driver(monkeypatch)


def test_auto_ends_well_on_a_device_without_an_index(driver: Driver, tmp_path: Path) -> None:
    cfg = _auto(_save(_wide("llama", layers=1), tmp_path), AUTO_RECOMPUTED, *AUTO_BATCH)
    said: list[str] = []
    run: Any = SimpleNamespace(world_size=1, rank=0, device=torch.device("cuda"), log=said.append)
    memory = preflight.free_memory(cfg.sharding, run.device)
    found = choose_candidate(cfg, run, DEVICES["h100"], memory)
    assert found.sharding.activation_checkpointing == "none"
    assert found.train.per_device_train_batch_size == 16
    assert "as tried on the device" in said[0]
    for name in ("_cuda_setMemoryFraction", "_accelerator_setDeviceIndex"):
        assert (name, INDEX) in driver.asked
    assert ("_cuda_resetPeakMemoryStats", INDEX) in driver.asked


def test_torch_asks_for_an_index_where_the_step_is_tried(driver: Driver, tmp_path: Path) -> None:
    """The control: what `choose_candidate` would hand on if it did not look."""
    cfg = _auto(_save(_wide("llama", layers=1), tmp_path))
    with pytest.raises(ValueError, match=NO_INDEX):
        try_step(cfg, 1, 0, torch.device("cuda"), TOTAL, 0)
    assert try_step(cfg, 1, 0, torch.device("cuda", INDEX), TOTAL, 0) is not None


def test_the_device_of_this_process_has_an_index(driver: Driver) -> None:
    figures, here = device_here()
    assert (figures.name, here) == (DEVICES["h100"].name, torch.device("cuda", INDEX))
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert devices.figures_of(torch.device("cuda")) == figures


def test_cpu_figures_are_measured_on_the_cpu(driver: Driver, tmp_path: Path) -> None:
    assert device_here("cpu") == (devices.this_host(), torch.device("cpu"))
    assert device_here("h200") == (DEVICES["h200"], torch.device("cuda", INDEX))
    file = tmp_path / "host.yaml"
    file.write_text(
        "{name: host, kind: cpu, memory: 64e9, bf16: 1e12, fp32: 1e12, bandwidth: 2e10, link: 5e9}"
    )
    assert device_here(str(file))[1] == torch.device("cpu")
