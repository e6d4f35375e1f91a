"""What a process says to its accelerator, on a machine that has none: the calls are recorded."""

import contextlib
import gc
import json
import os
import types
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, run_recipe_ranks
from torch.nn.attention import SDPBackend

import toolkit
from toolkit.config import PretrainConfig
from toolkit.config.settings import ModelConfig, ShardingConfig, TrainConfig
from toolkit.errors import ConfigError, LaunchError
from toolkit.training import device, launch, network

CUDA = torch.device("cuda", 0)
OF_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
UNSET = (*device._ALLOCATOR, "CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
UNSET += tuple(OF_NCCL)


# ---- Before the device starts --------------------------------------------------------------------


def started(rank: int, world: int, deterministic: bool, environment: dict[str, str]) -> dict:
    """Return what holds inside of a run, and when it was set."""
    for name in UNSET:
        os.environ.pop(name, None)
    os.environ.update(environment)
    early: dict[str, str] = {}

    def first_use(*_: Any) -> bool:  # the first question that is put to the accelerator
        early.update({n: os.environ[n] for n in UNSET if n in os.environ})
        return False

    with (
        mock.patch.object(torch.accelerator, "is_available", first_use),
        launch.start(deterministic=deterministic),
    ):
        return {
            "early": early,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "only a warning": torch.is_deterministic_algorithms_warn_only_enabled(),
        }


def test_what_must_be_set_before_the_device_starts():
    (plain,) = run_ranks(started, 1, False, {}, group=False)
    assert plain["early"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert not plain["deterministic"]
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    own |= {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL128"}
    (exact,) = run_ranks(started, 1, True, own, group=False)
    assert exact["early"] == own  # what the user has set stays
    (exact,) = run_ranks(started, 1, True, {}, group=False)
    assert exact["early"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert OF_NCCL.items() <= exact["early"].items()
    assert (exact["deterministic"], exact["only a warning"]) == (True, False)


def test_kernels_chosen_by_time_are_not_deterministic():
    sharding = ShardingConfig(torch_compile_mode="max-autotune-no-cudagraphs")
    model = ModelConfig("x")
    PretrainConfig(model, sharding=sharding)
    with pytest.raises(ConfigError, match=r"train.deterministic: sharding.torch_compile_mode"):
        PretrainConfig(model, sharding=sharding, train=TrainConfig(deterministic=True))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_record_cuda_graphs_are_refused(mode):
    with pytest.raises(
        ConfigError, match=rf"torch_compile_mode {mode} records CUDA graphs.*default"
    ):
        ShardingConfig(torch_compile_mode=mode)
    for fine in ("default", "max-autotune-no-cudagraphs", None):
        assert ShardingConfig(torch_compile_mode=fine).torch_compile_mode == fine
    # Neither is compiled by inductor.
    ShardingConfig(torch_compile="none", torch_compile_mode=mode)
    ShardingConfig(torch_compile_backend="aot_eager", torch_compile_mode=mode)


# ---- Which device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "local", "here", "chosen"),
    [(8, 3, 8, 3), (1, 0, 1, 0), (1, 3, 4, 0), (4, 1, 2, 1)],  # one visible to each of four
)
def test_each_process_takes_its_device(monkeypatch, count, local, here, chosen):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    assert device.choose_device_index(local, here) == chosen


def shared(rank: int, world: int, path: str, same: bool) -> str:
    properties = types.SimpleNamespace(uuid="one" if same else f"number {rank}")
    module = types.SimpleNamespace(get_device_properties=lambda _: properties)
    store = torch.distributed.FileStore(path, world)
    with mock.patch.object(torch, "get_device_module", return_value=module):
        mine = device.identify_device(CUDA, rank)
    try:
        network.exchange_and_decide(
            store, "device", mine, device.refuse_shared_devices, rank, world
        )
    except LaunchError as error:
        return str(error)
    return ""


def test_two_processes_on_one_device_are_refused(tmp_path):
    assert run_ranks(shared, 2, str(tmp_path / "two"), False, group=False) == ["", ""]
    for said in run_ranks(shared, 2, str(tmp_path / "one"), True, group=False):
        assert "processes 0 and 1 use the same device" in said


def test_an_accelerator_without_collectives_is_no_accelerator(monkeypatch, capsys):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    kind = mock.patch.object(torch.accelerator, "current_accelerator")
    with kind as current:
        for name, cpu in (("cuda", False), ("mps", True), ("xpu", False)):
            current.return_value = torch.device(name)
            assert launch._uses_cpu(0, 1) is cpu, name
    assert capsys.readouterr().out.strip() == (
        "WARNING: torch has no collectives for mps: training on the CPU"
    )


@pytest.mark.parametrize(
    ("times", "words"), [(54.2, "take 54 times as long in bfloat16"), (2.0, "")]
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told(monkeypatch, times: float, words: str) -> None:
    cpu, before = torch.device("cpu"), torch.get_rng_state()
    device.check_dtype_speed(cpu, "bfloat16")  # as this machine is
    assert torch.equal(torch.get_rng_state(), before)
    seconds = {torch.float32: 1e-3, torch.bfloat16: times * 1e-3}
    monkeypatch.setattr(device, "_measure_layer_seconds", seconds.__getitem__)
    assert words in device.check_dtype_speed(cpu, "bfloat16")
    assert bool(words) == bool(device.check_dtype_speed(cpu, "bfloat16"))
    assert (
        device.check_dtype_speed(cpu, "float32") == device.check_dtype_speed(CUDA, "bfloat16") == ""
    )


# ---- For the whole run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "deterministic", "first"),
    [((9, 0), False, True), ((9, 0), True, False), ((8, 0), False, False), ((10, 0), False, False)],
)
def test_the_order_of_attention_kernels(monkeypatch, capability, deterministic, first):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "")
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    before = torch._C._get_sdp_priority_order()
    with device.prefer_cudnn_attention(CUDA, deterministic=deterministic):
        order = torch._C._get_sdp_priority_order()
        assert (order[0] == SDPBackend.CUDNN_ATTENTION.value) is first
        assert (os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1") is first
        out = torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))
        assert out.shape == (1, 2, 4, 8)
    assert torch._C._get_sdp_priority_order() == before
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", raising=False)


def test_garbage_is_collected_at_the_same_steps(monkeypatch):
    collected: list[Any] = []
    monkeypatch.setattr(gc, "freeze", lambda: collected.append("freeze"))
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    gc.enable()  # a run of an earlier test in this process ends without
    try:
        for number in range(11, 151):
            device.collect_garbage(number)
            assert not gc.isenabled()
    finally:
        gc.enable()
    assert collected == [2, "freeze", 1, 1, 1]  # at the first step of a start, at 50, 100 and 150


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_after_a_run_as_before_it(fails):
    (found,) = run_ranks(run_of_steps, 1, fails, group=False)
    assert found["before"] == (True, 0, toolkit.GC_RAISED)
    assert found["after"] == (True, 0, toolkit.GC_BEFORE)
    assert found["within"][0] is False
    assert found["within"][1] > 0


def run_of_steps(rank: int, world: int, fails: bool) -> dict[str, Any]:
    def state() -> tuple[Any, ...]:
        return gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()

    gc.unfreeze()  # of the process that this one was forked from
    gc.set_threshold(*toolkit.GC_RAISED)
    found = {"before": state()}
    with contextlib.suppress(ZeroDivisionError), launch.start():
        device.collect_garbage(1)
        found["within"] = state()
        assert 1 // (not fails)
    return found | {"after": state()}


def test_garbage_that_others_froze_stays_frozen(monkeypatch):
    thawed = mock.Mock()
    monkeypatch.setattr(gc, "unfreeze", thawed)
    for frozen, calls in ((5, 0), (0, 1)):
        monkeypatch.setattr(gc, "get_freeze_count", lambda frozen=frozen: frozen)
        with device.restore_garbage_collection():
            pass
        assert thawed.call_count == calls


# ---- Batches and gradients -----------------------------------------------------------------------


def test_batches_are_pinned_where_a_device_reads_them(monkeypatch):
    prepared = mock.Mock(side_effect=lambda loader, *_, **options: (loader, options))
    monkeypatch.setattr(launch, "prepare_data_loader", prepared)
    data = torch.utils.data.TensorDataset(torch.arange(4))

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    for where, pinned in ((CUDA, True), (torch.device("cpu"), False)):
        run = launch.Run(mock.Mock(), where, 0, 1)
        for loader, options in (run.loader(data, [[0, 1]]), run.loader(Rows())):  # type: ignore[arg-type]
            assert loader.pin_memory is pinned
            assert options["non_blocking"]


# ---- A whole run ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deterministic_run_goes_on_to_the_bit(tiny_llama, text_file, tmp_path):
    """With Muon, accumulation and a schedule of transformers; the losses of both ranks' run."""

    def run(folder: str, steps: int, *more: str) -> list[float]:
        flags = [
            *("--model.name_or_path", str(tiny_llama), "--data.train_files", str(text_file)),
            *("--data.sequence_length", "32", "--data.eval_split", "0", "--optim.optim", "muon"),
            *("--train.per_device_train_batch_size", "1", "--train.gradient_accumulation_steps"),
            *("2", "--train.max_steps", str(steps), "--train.logging_steps", "1"),
            *("--optim.lr_scheduler_type", "inverse_sqrt", "--optim.warmup_steps", "2"),
            *("--output_dir", str(tmp_path / folder), *more),
        ]
        done = run_recipe_ranks("pretrain", 2, *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    exact = ("--train.deterministic", "true")
    undisturbed = run("one", 5, *exact)
    assert len(set(undisturbed)) == 5
    run("two", 3, *exact)
    assert run("two", 5, *exact) == undisturbed
