"""Profiled steps: the parts of a step's time add up to it, and are what the trace shows."""

import gzip
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_recipe_ranks
from sharded import apply_fsdp, init_mesh, train_step
from test_recipe import flags
from tiny_models import tiny_model

from toolkit.config import ShardingConfig, TrainConfig
from toolkit.errors import ConfigError, TrainingError
from toolkit.formats.metrics_file import read_metrics
from toolkit.training.profiler import (
    HIDDEN,
    PARTS,
    StepProfiler,
    format_part_table,
    measure_parts,
    record_memory_history,
    write_snapshot,
)


def event(name: str, cat: str, begin: float, end: float, tid: int = 1, **args: Any) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "tid": tid} | (
        {"args": args} if args else {}
    )


def launched(name: str, cat: str, at: float, begin: float, end: float, number: int) -> list[dict]:
    """Return a call of the host and what it makes the device do on stream 7."""
    call = event("cudaLaunchKernel", "cuda_runtime", at, at + 1, tid=2, correlation=number)
    return [call, event(name, cat, begin, end, tid=7, correlation=number)]


# Two steps of 100 microseconds; the device runs behind its host.
GPU = [
    {"ph": "M", "name": "process_name"},
    event("ProfilerStep#3", "user_annotation", 1000, 1100),
    event("ProfilerStep#4", "user_annotation", 1100, 1200),
    event("data", "user_annotation", 1000, 1020),  # 10 of them beside a copy of its own
    event("forward", "user_annotation", 1020, 1040),
    event("backward", "user_annotation", 1040, 1060),
    event("optimizer", "user_annotation", 1150, 1170),
    event("data", "user_annotation", 1100, 1110, tid=9),  # another thread's
    *launched("Memcpy HtoD", "gpu_memcpy", 1005, 1005, 1015, 1),
    *launched("gemm", "kernel", 1025, 1030, 1060, 2),
    *launched("gemm", "kernel", 1045, 1060, 1120, 3),  # into the second step
    *launched("ncclDevKernel_AllGather", "kernel", 1026, 1050, 1070, 4),  # hidden
    *launched("ncclDevKernel_ReduceScatter", "kernel", 1050, 1110, 1140, 5),  # 10 hidden
    *launched("multi_tensor_adam", "kernel", 1155, 1160, 1180, 6),
    *launched("elementwise", "kernel", 1185, 1185, 1190, 7),  # in no phase
]


def test_time_of_a_device_by_what_launched_its_kernels() -> None:
    found = {name: round(s * 1e6, 6) for name, s in measure_parts(GPU).items()}
    assert found == {
        "data": 20.0,  # the copy, and the wait beside it
        "forward": 30.0,
        "backward": 60.0,
        "optimizer": 20.0,
        "communication": 20.0,
        "communication_hidden": 30.0,
        "pause": 0.0,
        "other": 5.0,
        "idle": 45.0,  # 1020 to 1030, 1140 to 1160, 1180 to 1185, 1190 to 1200
    }
    assert sum(found[name] for name in PARTS) == 200.0
    by_time = [e for e in GPU if e.get("cat") != "cuda_runtime"]  # the control: no launches
    assert measure_parts(by_time)["backward"] == 0.0


def profiled(rank: int, world: int, folder: Path) -> tuple[float, dict]:
    """Profile steps 3 and 4; return their time and their parts."""
    model = tiny_model("llama")
    sharding = ShardingConfig(param_dtype="float32")
    apply_fsdp(model, init_mesh("cpu", world, sharding), sharding)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(rank))
    profiler = StepProfiler(folder, torch.device("cpu"), 3, 4, done_steps=1)
    begun = ended = 0.0
    for step in (2, 3, 4, 5):
        train_step(model, optimizer, [{"input_ids": ids, "labels": ids}] * 2)
        if step == 4:
            ended = time.perf_counter()
        if profiler.end_step(step):
            profiler.write()
        if step == 2:
            begun = time.perf_counter()
    with gzip.open(folder / f"rank-{rank}.json.gz", "rt") as f:
        events = json.load(f)["traceEvents"]
    return (ended - begun) / 2, measure_parts(events)


@pytest.mark.slow
def test_parts_add_up_to_the_time_of_the_steps(tmp_path) -> None:
    every = run_ranks(profiled, 2, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == [3, 4]
    for (wall, parts), written in zip(every, summary["ranks"], strict=True):
        assert {name: 2 * s for name, s in written.items()} == pytest.approx(parts)
        total = sum(written[name] for name in PARTS)
        assert total == pytest.approx(wall, rel=0.02, abs=5e-4)
        for name in ("forward", "backward", "optimizer", "communication", "idle"):
            assert written[name] > 0.01 * total
        # The control: a part left out.
        assert total - written["idle"] < 0.98 * wall - 5e-4
    for name, mean in summary["seconds_per_step"].items():
        assert mean == pytest.approx(sum(one[name] for one in summary["ranks"]) / 2)


@pytest.mark.slow
def test_a_run_profiles_steps_whose_times_count_for_no_rate(
    tmp_path, tiny_llama, text_file
) -> None:
    folder = tmp_path / "run"
    own = ["--train.max_steps", "6", "--train.profile_steps", "[3, 4]", "--train.eval_steps", "3"]
    own += ["--train.logging_steps", "1"]
    done = run_recipe_ranks(
        "pretrain", 2, *flags(tiny_llama, text_file, folder, *own), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("profile    steps 3 to 4, milliseconds of a step") == 1
    written = sorted(file.name for file in (folder / "profile").iterdir())
    assert written == ["rank-0.json.gz", "rank-1.json.gz", "summary.json"]
    with gzip.open(folder / "profile" / "rank-1.json.gz", "rt") as f:
        names = {e["name"] for e in json.load(f)["traceEvents"]}
    assert {"ProfilerStep#3", "ProfilerStep#4", "data", "forward", "backward", "pause"} <= names
    assert "ProfilerStep#5" not in names
    summary = json.loads((folder / "profile" / "summary.json").read_text())
    assert summary["seconds_per_step"]["pause"] > 0  # the evaluation after step 3
    lines = read_metrics(folder)
    without = [line["step"] for line in lines if "tokens_per_second" not in line]
    assert without == [2, 3, 4]  # 2 warms the profiler up
    between = lines[4]["time"] - lines[3]["time"]
    assert between - lines[4]["step_time"] > 0.01  # the writing of the traces

    late = [*own[2:], "--train.max_steps", "7"]  # resumes, after the steps to be profiled
    done = run_recipe_ranks(
        "pretrain", 2, *flags(tiny_llama, text_file, folder, *late), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "train.profile_steps [3, 4]: not within steps 7 to 7" in done.stdout


def test_a_profile_may_begin_with_the_first_step(tmp_path) -> None:
    profiler = StepProfiler(tmp_path, torch.device("cpu"), 1, 1, done_steps=0)
    assert profiler.is_active(1)
    torch.ones(3).exp()
    assert profiler.end_step(1)
    assert "steps 1 to 1" in profiler.write()[0]
    assert not profiler.is_active(2)
    assert not profiler.end_step(2)
    cut = StepProfiler(tmp_path, torch.device("cpu"), 2, 9, done_steps=0)
    cut.end_step(1)
    cut.close()
    cut.close()


@pytest.mark.parametrize(("after", "first", "begun"), [(0, 1, 0), (0, 9, 7), (5, 6, 5), (5, 9, 7)])
def test_memory_is_recorded_from_the_warm_up_on(
    tmp_path, monkeypatch, after: int, first: int, begun: int
) -> None:
    """And not from the start: each allocation costs its Python stack."""
    told, done = list[int](), [after]
    record = lambda **_: told.append(done[0])  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    profiler = StepProfiler(tmp_path, torch.device("cuda"), first, first + 1, done_steps=after)
    for step in range(after + 1, first):
        done[0] = step
        profiler.end_step(step)
    profiler.close()
    assert told == [begun]


def test_the_table_shows_the_ranks_that_differ() -> None:
    zero = dict.fromkeys((*PARTS, HIDDEN), 0.0)
    lines = format_part_table([zero | {"forward": 0.03, "idle": 0.01}, zero | {"forward": 0.04}])
    assert [line.split() for line in lines[1:]] == [
        ["forward", "35.0", "87.5%", "30.0", "0", "40.0", "1"],
        ["idle", "5.0", "12.5%", "0.0", "1", "10.0", "0"],
        ["step", "40.0"],
    ]


@pytest.mark.parametrize("steps", [[3], [5, 2], [1, 2, 3]])
def test_other_than_first_and_last_is_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"profile_steps: expected the first and the last"):
        TrainConfig(profile_steps=steps)


def test_a_torch_without_memory_snapshots_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_dump_snapshot")
    expected = r"train\.profile_steps: torch .* has no torch\.cuda\.memory\._dump_snapshot"
    with pytest.raises(TrainingError, match=expected), record_memory_history(tmp_path / "x"):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_is_written_where_it_runs_out(tmp_path) -> None:
    file = tmp_path / "profile" / "memory.pickle"
    with pytest.raises(torch.OutOfMemoryError), record_memory_history(file):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert "oom" in {
        e["action"] for t in pickle.loads(file.read_bytes())["device_traces"] for e in t
    }
    file.unlink()
    with record_memory_history(file):
        held = torch.ones(2**20, device="cuda")
        write_snapshot(file)
    assert held.numel() * 4 in {
        e["size"] for t in pickle.loads(file.read_bytes())["device_traces"] for e in t
    }
