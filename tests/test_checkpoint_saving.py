"""Saving: what is written and hashed, what goes on behind the loop, and how failures come out."""

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, save_tiny_model
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from toolkit import checkpoint
from toolkit.checkpoint import commit, disk_space, resuming, saving, shards
from toolkit.checkpoint.summary import summarize
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError, StorageError
from toolkit.formats import read_metadata, table_from_metadata
from toolkit.tables import size_text

SYNC, ASYNC = CheckpointConfig(), CheckpointConfig(async_save=True)


class Counter:
    """A position in the data."""

    def __init__(self) -> None:
        self.seen = 5

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def small_state(seed: int = 0, step: int = 3) -> checkpoint.TrainState:
    """A plain model of two layers after an AdamW step, with everything a state can have."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    scheduler.step()
    return checkpoint.TrainState(model, optimizer, scheduler, Counter(), step, 40)


# ---- Behind the loop, where that fits ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "free", "here", "expected", "said"),
    [
        ("cuda", 81_000, 1, True, "async_save true (copies of up to 40.0 kB a process, 40.5 kB"),
        ("cuda", 79_000, 1, False, "async_save false"),
        ("cuda", 81_000, 2, False, "async_save false"),
        ("cpu", 81_000, 1, False, ""),
    ],
)
def test_auto_saves_behind_the_loop_where_copies_fit_host_memory(
    monkeypatch, capsys, kind, free, here, expected, said
):
    from types import SimpleNamespace

    state = checkpoint.TrainState(nn.Linear(1, 1))
    part = SimpleNamespace(device=torch.device(kind), nbytes=10_000)
    monkeypatch.setattr(saving, "local_tensor", lambda tensor: part)
    monkeypatch.setattr(saving.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(saving.ranks, "local_world_size", lambda: here)
    auto, tensors = CheckpointConfig(), {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert auto.async_save == "auto"
    assert [saving._resolve_async_save(state, tensors, auto) for _ in range(2)] == [expected] * 2
    out = capsys.readouterr().out
    assert out.count("async_save") == bool(said)  # once, at the first save
    assert said in out
    for asked in (True, False):
        cfg = CheckpointConfig(async_save=asked)
        assert saving._resolve_async_save(state, tensors, cfg) is asked


def test_adapters_are_saved_at_once(monkeypatch):
    monkeypatch.setattr(saving, "has_adapters", lambda model: True)
    monkeypatch.setattr(saving, "local_tensor", lambda tensor: torch.empty(1, device="meta"))
    state = checkpoint.TrainState(nn.Linear(1, 1))
    assert not saving._resolve_async_save(state, {"a": torch.zeros(1)}, CheckpointConfig())


# ---- Files and hashes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("worth", "files"), [(1, 3), (10_000_000, 1)])
def test_a_rank_with_cores_to_spare_writes_several_files(tmp_path, monkeypatch, worth, files):
    monkeypatch.setattr(shards, "_WORTH_A_FILE", worth)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    rows = (500, 1, 0, 700, 30, 60_000, 600, 50_000, 40_000)
    tensors = {f"model.{i}": torch.randn(n, 3) for i, n in enumerate(rows)}
    tensors |= {f"model.s{i}": torch.tensor(i) for i in range(20)}
    writer = shards.HashingWriter(tmp_path, ranks_here=2)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    names = ["__0_0.distcp", *(f"__0_{i}_0.distcp" for i in range(1, files))]
    assert sorted(writer.files) == sorted(names)
    for index, place in read_metadata(tmp_path).storage_data.items():
        blob = (tmp_path / place.relative_path).read_bytes()[place.offset :][: place.length]
        assert torch.load(io.BytesIO(blob)).equal(tensors[index.fqn])
    for name, said in writer.files.items():
        content = (tmp_path / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        assert said == {"size": len(content), "sha256": sha256}
        assert len(content) > 400_000  # about as much in each
    found = {name: torch.zeros_like(t) for name, t in tensors.items()}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("asked", [True, False])
def test_other_threads_save_with_the_checksums_they_asked_for(tmp_path, monkeypatch, asked):
    write, others, own = shards.HashingStream.write, [], []

    def beside(self, content):
        own.append(torch.serialization.get_crc32_options())
        if len(own) == 1:
            thread = threading.Thread(target=lambda: torch.save(torch.ones(9), tmp_path / "other"))
            thread.start()
            thread.join()
            with zipfile.ZipFile(tmp_path / "other") as archive:
                others.append(archive.testzip())
        return write(self, content)

    monkeypatch.setattr(shards.HashingStream, "write", beside)
    torch.serialization.set_crc32_options(asked)
    try:
        writer = shards.HashingWriter(tmp_path / "saved")
        dcp.save({"a": torch.ones(5)}, storage_writer=writer, no_dist=True)
        assert torch.serialization.get_crc32_options() is asked
    finally:
        torch.serialization.set_crc32_options(True)
    assert others == [None] or not (asked or shards._OF_THREAD)
    assert set(own) == {False if shards._OF_THREAD else asked}


def test_torchs_own_tools_read_what_was_saved(tmp_path):
    state = small_state()
    path = Path(checkpoint.save(state, tmp_path, SYNC))
    target = {f"model.{n}": torch.zeros_like(p) for n, p in state.model.named_parameters()}
    dcp.load(target, checkpoint_id=path / "dcp")
    for name, parameter in state.model.named_parameters():
        assert torch.equal(target[f"model.{name}"], parameter)
    assert not commit.find_damaged_files(path)


# ---- Reading only what is wanted -----------------------------------------------------------------


def write_columns(rank: int, world: int, folder: str) -> dict[str, int]:
    """Save a matrix sharded by columns and one by rows; read both by rows and count."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    values = {"columns": torch.arange(35.0).view(5, 7), "rows": torch.arange(2e5).view(500, 400)}
    dims = {"columns": 1, "rows": 0}
    saved = {n: distribute_tensor(v, mesh, [Shard(dims[n])]) for n, v in values.items()}
    dcp.save(saved, checkpoint_id=folder)
    metadata = read_metadata(folder)
    wanted = {
        n: distribute_tensor(torch.zeros_like(v), mesh, [Shard(0)]) for n, v in values.items()
    }
    found = shards.read_tensors(Path(folder), table_from_metadata(metadata), wanted)
    for name, value in values.items():
        assert torch.equal(wanted[name].full_tensor(), value), name
    own = sum(t.to_local().nbytes for t in wanted.values())
    return {"read": found, "own": own}


def go_on_behind(rank: int, world: int, folder: str, root: str) -> dict:
    """Everything about asynchronous saving that needs ranks."""
    from test_checkpoint_resume import Trainer

    run = Trainer(folder, world, "adamw", 20)
    run.steps(1)
    found: dict = {"columns": write_columns(rank, world, f"{root}/columns")}

    # The loop trains on while the copy is written, slowly.
    slow = shards.HashingStream.write

    def wait_and_write(self, content) -> None:
        time.sleep(0.005)
        slow(self, content)

    checkpoint.save(run.state, f"{root}/sync", SYNC)
    with mock.patch.object(shards.HashingStream, "write", wait_and_write):
        begun = time.perf_counter()
        path = checkpoint.save(run.state, f"{root}/async", ASYNC)
        found["blocked"] = time.perf_counter() - begun
        found["early"] = commit.is_committed(Path(path))
        run.steps(1)
        checkpoint.wait()
        found["whole"] = time.perf_counter() - begun
    found["late"] = commit.is_committed(Path(path))

    # One rank fails behind the loop: all learn of it, at `wait` and at the next save.
    def fail(self, content) -> None:
        if rank == world - 1:
            raise OSError(28, "No space left on device", "shard")
        slow(self, content)

    for how in ("wait", "save"):
        with mock.patch.object(shards.HashingStream, "write", fail):
            checkpoint.save(run.state, f"{root}/full-{how}", ASYNC)
            for thread in threading.enumerate():
                if thread.name.startswith("the checkpoint"):
                    thread.join()
        try:
            checkpoint.wait() if how == "wait" else checkpoint.save(
                run.state, f"{root}/full-{how}", SYNC
            )
            found[how] = "no error"
        except CheckpointError as error:
            found[how] = str(error)
        torch.distributed.barrier()
        found[f"left {how}"] = sorted(p.name for p in Path(f"{root}/full-{how}").rglob("step*"))

    # One rank fails where its small files are written: the others say so in the same class, once.
    def full(*args) -> str:
        if rank == world - 1:
            raise OSError(28, "No space left on device", "small")
        return small(*args)

    small = saving.write_rng
    with mock.patch.object(saving, "write_rng", full):
        try:
            checkpoint.save(run.state, f"{root}/full-small", SYNC)
        except Exception as error:
            found["small"] = (type(error), str(error), getattr(error, "already_reported", False))
    checkpoint.save(run.state, f"{root}/full-save", SYNC)
    found["recovered"] = sorted(commit.committed_steps(f"{root}/full-save"))
    return found


@pytest.fixture(scope="module")
def behind(tmp_path_factory) -> tuple[list[dict], Path]:
    root = tmp_path_factory.mktemp("behind")
    folder = save_tiny_model(root / "model", num_hidden_layers=2)
    return run_ranks(go_on_behind, 2, str(folder), str(root)), root


@pytest.mark.slow
def test_on_the_same_ranks_nobody_reads_what_is_not_its_own(behind):
    found = [rank["columns"] for rank in behind[0]]
    assert sum(f["own"] for f in found) == (35 + 200_000) * 4
    assert all(f["own"] < f["read"] < 1.05 * f["own"] for f in found)


@pytest.mark.slow
def test_the_loop_goes_on_and_the_checkpoint_is_that_of_the_call(behind):
    found, root = behind
    for rank in found:
        assert rank["blocked"] < 0.5 * rank["whole"]
        assert (rank["early"], rank["late"]) == (False, True)
    sync, behind_loop = (
        commit.read_manifest(commit.find_checkpoint(root / kind)) for kind in ("sync", "async")
    )
    assert sync["row_sums"] == behind_loop["row_sums"]
    assert sync["files"].keys() == behind_loop["files"].keys()
    for name, entry in sync["files"].items():
        if name != "dcp/.metadata":  # names its folder and holds an id
            assert entry == behind_loop["files"][name], name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "save"])
def test_a_failure_behind_the_loop_is_raised_on_every_rank(behind, how):
    for rank in behind[0]:
        assert "No space left on device" in rank[how]
        assert "free some space" in rank[how]
        assert rank[f"left {how}"] == []
        assert rank["recovered"] == [2]


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_told_once(behind):
    kinds, texts, silent = zip(*(rank["small"] for rank in behind[0]), strict=True)
    assert set(kinds) == {StorageError}
    assert all("checkpoint of step" in t and "No space left on device (small)" in t for t in texts)
    assert silent == (True, False)


# ---- The end of a run ----------------------------------------------------------------------------

PROGRAM = """
import sys, time
import torch
from toolkit import checkpoint
from toolkit.checkpoint import shards
from toolkit.config import CheckpointConfig

how, root = sys.argv[1:]
write = shards.HashingStream.write

def slow(self, content):
    time.sleep(0.02)
    if how == "full":
        raise OSError(28, "No space left on device", "shard")
    write(self, content)

def save():
    shards.HashingStream.write = slow
    state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=3)
    checkpoint.save(state, root, CheckpointConfig(async_save=True))

def crash():
    with launch.start():
        save()
        raise KeyboardInterrupt if how == "interrupt" else ValueError("the loop crashed")

if how in ("crash", "interrupt"):
    from toolkit.training import launch
    launch.run_program(crash)
save()
"""


@pytest.mark.slow
def test_the_end_of_a_run_waits_and_fails_where_the_save_did(tmp_path):
    """Without `wait`: at a good end, on a full disk, after a crash of the loop, and Ctrl-C."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = {
        how: subprocess.Popen(
            [sys.executable, str(program), how, str(tmp_path / how)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for how in ("good", "full", "crash", "interrupt")
    }
    said = {how: process.communicate(timeout=300)[0] for how, process in started.items()}
    codes = {how: process.returncode for how, process in started.items()}
    assert codes == {"good": 0, "full": 1, "crash": 1, "interrupt": 130}, said
    committed = {how: sorted(commit.committed_steps(tmp_path / how)) for how in started}
    assert committed == {"good": [3], "full": [], "crash": [3], "interrupt": [3]}
    assert "the loop crashed" in said["crash"]
    assert "No space left on device" in said["full"]


# ---- Everything is restored, or named ------------------------------------------------------------


def drop_rng(path: Path) -> None:
    shutil.rmtree(path / "rng")


def garble_rng(path: Path) -> None:
    (path / "rng/rank-00000.safetensors").write_bytes(b"\x08" + b"\0" * 40)


def rng_without_numpy(path: Path) -> None:
    file = path / "rng/rank-00000.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "numpy"}, file)


def rng_of_other_sizes(path: Path) -> None:
    file = path / "rng/rank-00000.safetensors"
    save_file({n: t[:1] for n, t in load_file(file).items()}, file)


def edit_state(path: Path, old: str, new: str) -> None:
    file = path / "state.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def saved_without(name: str):
    def change(state: checkpoint.TrainState) -> None:
        setattr(state, name, None)

    return change


def without_a_moment(state: checkpoint.TrainState) -> None:
    del state.optimizer.state[state.model[1].weight]["exp_avg_sq"]


def without_a_count(state: checkpoint.TrainState) -> None:
    del state.optimizer.state[state.model[1].weight]["step"]


def with_momentum(state: checkpoint.TrainState) -> None:
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (None, drop_rng, "rank-00000.safetensors is missing: the random state of rank 0"),
        (None, garble_rng, "rank-00000.safetensors cannot be read ("),
        (None, rng_without_numpy, "lacks the random state of numpy"),
        (None, rng_of_other_sizes, "holds no random state"),
        (saved_without("optimizer"), None, "holds no optimizer state, which this run needs"),
        (saved_without("scheduler"), None, "holds no scheduler state, which this run needs"),
        (saved_without("data"), None, "holds no data state, which this run needs"),
        (without_a_moment, None, "exp_avg_sq of 1.weight"),
        (without_a_count, None, "step of 1.weight"),
        (with_momentum, None, "optimizer state of SGD, which AdamW cannot go on with"),
        (None, lambda p: (p / "state.json").unlink(), "state.json is missing: step, tokens"),
        (None, lambda p: edit_state(p, "{", ""), "state.json is not readable JSON"),
        (None, lambda p: edit_state(p, '"tokens"', '"toke"'), "state.json lacks tokens"),
        (None, lambda p: (p / "dcp/.metadata").unlink(), "has no .metadata"),
        (None, lambda p: (p / "dcp/__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_a_missing_piece_is_named(tmp_path, before, after, said):
    saved = small_state()
    if before is not None:
        before(saved)
    path = Path(checkpoint.save(saved, tmp_path, SYNC))
    if after is not None:
        after(path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(small_state(1), path)
    assert said in str(error.value)


NESTED = "[" * 10**5 + "]" * 10**5
STRANGE = [NESTED, "[1]", "{}", "1", "null", '"text"', "9" * 10**5]


@pytest.mark.parametrize("text", STRANGE, ids=lambda text: text[:4])
@pytest.mark.parametrize("name", ["state.json", "manifest.json", "metrics"])
def test_strange_json_is_one_error_that_names_the_file(tmp_path, name, text):
    path = Path(checkpoint.save(small_state(), tmp_path, SYNC))
    if name == "metrics":  # a part of a state that is JSON as it should be
        state = json.loads((path / "state.json").read_text())
        try:
            part = json.loads(text)
        except (RecursionError, ValueError):
            part = 3
        state |= dict.fromkeys(("scheduler", "optimizer", "metrics"), part or {"a": [1]})
        (path / "state.json").write_text(json.dumps(state))
    else:
        (path / name).write_text(text)
    (path / "COMMIT").write_text(
        commit.compute_commit_content((path / "manifest.json").read_bytes())
    )

    def inspect() -> None:
        commit.read_manifest(path)
        summarize(path)
        checkpoint.restore(small_state(1), path)

    with pytest.raises(CheckpointError, match=r"state\.json|manifest|state of a run|optimizer"):
        inspect()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = Path(checkpoint.save(small_state(), tmp_path, SYNC))
    for change, said in (
        (
            lambda m: m.double(),
            r"other shapes or dtypes: model\.0\.weight \[4, 6\] torch\.float32, ",
        ),
        (
            lambda m: m.__setitem__(1, nn.Linear(4, 2, bias=False)),
            r"1 have .* the model's \[2, 4\]",
        ),
        (
            lambda m: m.append(nn.Linear(3, 3)),
            r"it lacks 2 tensor\(s\) of the model: model\.2\.bias",
        ),
        (lambda m: m.pop(1), r"it has 1 that the model has not: model\.1\.weight"),
    ):
        model = small_state(1).model
        change(model)
        with pytest.raises(CheckpointError, match=f"of another model: .*{said}"):
            checkpoint.restore(checkpoint.TrainState(model), path)


def test_everything_is_restored_in_one_plain_process(tmp_path):
    saved = small_state()
    saved.metrics, saved.extra = {"eval_loss": 2.5, "odd": float("nan")}, {"note": [1, 2]}
    saved.data.seen = 77
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    random.gauss(0, 1), numpy.random.normal()  # both keep a second value for later
    checkpoint.save(saved, tmp_path, SYNC)
    expected = [random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()]
    fresh = small_state(1, 0)
    assert checkpoint.resume(fresh, tmp_path, SYNC) == 3
    assert [random.gauss(0, 1), numpy.random.normal(), torch.rand(3).tolist()] == expected
    assert (fresh.tokens, fresh.data.seen, fresh.extra) == (40, 77, {"note": [1, 2]})
    assert fresh.metrics == {"eval_loss": 2.5}
    assert fresh.scheduler.state_dict() == saved.scheduler.state_dict()
    for a, b in zip(saved.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in saved.optimizer.state[a].items():
            assert torch.equal(value, fresh.optimizer.state[b][key]), key
    # A run that asks for less than there is goes on.
    assert checkpoint.resume(checkpoint.TrainState(fresh.model), tmp_path, SYNC) == 3


def test_a_parameter_that_never_had_a_gradient_does_not_stop_a_resume(tmp_path):
    saved = small_state()
    saved.model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    saved.optimizer.add_param_group({"params": [saved.model.unused]})
    saved.scheduler = None
    checkpoint.save(saved, tmp_path, SYNC)
    fresh = small_state(1)
    fresh.model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    fresh.optimizer.add_param_group({"params": [fresh.model.unused]})
    fresh.scheduler = None
    assert checkpoint.resume(fresh, tmp_path, SYNC) == 3
    assert fresh.model.unused not in fresh.optimizer.state


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    for step in (3, 4):
        path = Path(checkpoint.save(small_state(0, step), tmp_path, SYNC))
    file = path / "dcp/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert checkpoint.resume(small_state(1), tmp_path, SYNC) == 3
    said = capsys.readouterr().out
    assert "WARNING: checkpoint step-00000004 is damaged and not used" in said
    assert "verified step-00000003" in said
    assert len(list((tmp_path / "checkpoints").glob("step-00000004.bad-*/dcp/*.distcp"))) == 1


@pytest.mark.parametrize(
    ("file", "cut", "steps"),
    [
        ("dcp/__0_0.distcp", False, {"bytes": 3, "sizes": 4}),
        ("dcp/__0_0.distcp", True, {"bytes": 3, "sizes": 3}),
        ("dcp/.metadata", False, {"bytes": 3, "sizes": 3}),
        ("state.json", False, {"bytes": 3, "sizes": 3}),
    ],
)
def test_a_start_may_look_at_the_sizes_of_shards_only(tmp_path, capsys, file, cut, steps):
    state = small_state()
    for verify, step in steps.items():
        run = tmp_path / verify
        for state.step in (3, 4):
            path = Path(checkpoint.save(state, run, SYNC))
        content = bytearray((path / file).read_bytes())
        content[-1] ^= not cut
        (path / file).write_bytes(content[:-1] if cut else content)
        capsys.readouterr()
        cfg = CheckpointConfig(verify_on_resume=verify)
        found = checkpoint.find_resumable(run, state.model, cfg=cfg)
        assert found.name == f"step-{step:08d}"
        said = capsys.readouterr().out
        looked = "of 1 shards the sizes (checkpoint.verify_on_resume)"
        assert (looked in said) == (verify == "sizes"), said


def test_a_run_whose_checkpoints_all_failed_does_not_begin_anew_by_itself(tmp_path):
    resuming.check_fresh_start(tmp_path)  # nothing was ever saved
    path = Path(checkpoint.save(small_state(), tmp_path, SYNC))
    (path / "state.json").write_text("{}")
    assert checkpoint.find_newest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"the damaged ones are kept: step-00000003\.bad-"):
        resuming.check_fresh_start(tmp_path)
    checkpoint.save(small_state(0, 4), tmp_path, SYNC)
    resuming.check_fresh_start(tmp_path)


def test_a_start_finds_its_checkpoint_and_its_place_in_the_data(tmp_path):
    fresh = small_state(1, 0)
    assert checkpoint.find_resumable(tmp_path, fresh.model, fresh.data) is None
    assert checkpoint.restore(fresh, None) is None
    saved = small_state()
    saved.data.seen = 77
    checkpoint.save(saved, tmp_path, SYNC)
    found = checkpoint.find_resumable(tmp_path, fresh.model, fresh.data)
    assert fresh.data.seen == 77  # before a weight is there
    assert checkpoint.restore(fresh, found) == fresh.step == 3
    saved.data = None
    path = Path(checkpoint.save(saved, tmp_path, SYNC))
    with pytest.raises(CheckpointError, match="no data state"):
        checkpoint.find_resumable(tmp_path, fresh.model, fresh.data)
    (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="the damaged ones are kept"):
        checkpoint.find_resumable(tmp_path, fresh.model, fresh.data)


def test_an_optimizer_whose_state_differs_by_parameter_goes_on(tmp_path):
    def made(seed: int) -> checkpoint.TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)  # Adafactor: rows and columns of the matrix, plain for the vector
        return checkpoint.TrainState(model, torch.optim.Adafactor(model.parameters()), step=3)

    def stepped(state: checkpoint.TrainState) -> None:
        state.model(torch.ones(2, 4)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()

    saved, fresh = made(0), made(1)
    stepped(saved)
    checkpoint.save(saved, tmp_path, SYNC)
    assert checkpoint.resume(fresh, tmp_path, SYNC) == 3
    for state in (saved, fresh):
        stepped(state)
    assert torch.equal(saved.model.weight, fresh.model.weight)


# ---- The disk ------------------------------------------------------------------------------------


def test_the_disk_is_asked_before_the_run(tmp_path):
    from toolkit.config.settings import ModelConfig, OptimConfig
    from toolkit.loading.pretrained import load_pretrained
    from toolkit.models.causal_lm import build_on_meta
    from toolkit.training.optim import build_optimizer

    folder = save_tiny_model(tmp_path / "model", hidden_size=128, num_hidden_layers=2)
    model = build_on_meta(ModelConfig(str(folder)))
    predicted = disk_space.estimate_checkpoint_bytes(model, 1)  # on meta: nothing is loaded
    load_pretrained(model, str(folder), "cpu")
    optimizer = build_optimizer(model, OptimConfig())
    model(input_ids=torch.arange(9)[None]).logits.sum().backward()
    optimizer.step()
    path = Path(checkpoint.save(checkpoint.TrainState(model, optimizer, step=1), tmp_path, SYNC))
    written = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert 0.9 * predicted < written <= predicted

    for step, name in enumerate(("muon", "adamw_8bit", "adafactor"), start=2):
        optim = OptimConfig(optim=name)
        optimizer = build_optimizer(model, optim)
        optimizer.step()
        state = checkpoint.TrainState(model, optimizer, step=step)
        with tempfile.TemporaryDirectory() as other:
            other_path = Path(checkpoint.save(state, other, SYNC))
            size = sum(f.stat().st_size for f in other_path.rglob("*") if f.is_file())
        assert 0.9 * disk_space.estimate_checkpoint_bytes(model, 1, optim) < size, name
        assert size <= disk_space.estimate_checkpoint_bytes(model, 1, optim), name

    cfg = CheckpointConfig(save_steps=10, save_total_limit=3)
    for changes, max_steps, expected in (
        ({}, 100, 4),
        ({}, 20, 2),
        ({}, None, 4),
        ({"keep_best": True}, 100, 5),
        ({"save_total_limit": None}, 95, 10),
    ):
        changed = CheckpointConfig(**{"save_steps": 10, "save_total_limit": 3, **changes})
        assert disk_space.count_checkpoints_on_disk(changed, max_steps) == expected, changes
    # Those that were there and are gone, to an archive, are not needed again.
    every = CheckpointConfig(save_steps=100, save_total_limit=None)
    for steps, expected in (
        ((), 100),
        ((9900,), 2),
        (range(100, 10_000, 100), 100),
        ((10_000,), 1),
    ):
        assert disk_space.count_checkpoints_on_disk(every, 10_000, steps) == expected, steps
    limited = CheckpointConfig(save_steps=100, save_total_limit=2)
    assert disk_space.count_checkpoints_on_disk(limited, 10_000, (9800, 9900)) == 3

    def need(free: int) -> disk_space.DiskEstimate:
        with mock.patch("shutil.disk_usage") as usage:
            usage.return_value.free = free
            return disk_space.estimate_disk_use(model, tmp_path / "not" / "yet", cfg, 100, 1)

    total = 4 * predicted + disk_space.estimate_export_bytes(model)
    disk_space.check_disk_space(need(total), cfg)
    with pytest.raises(CheckpointError) as error:
        disk_space.check_disk_space(need(total - 10**6), cfg)
    for part in (size_text(total), "free", "Free 1.0 MB", "save_total_limit is 3"):
        assert part in str(error.value)
    # What is there already needs no room.
    there = disk_space.estimate_disk_use(model, tmp_path, cfg, 100, 1)
    assert there.there == written
    # So with exports; but what was set aside stays, and makes no room.
    for name, counts in (("exports/step-1", True), ("exports/step-1.old-a", False)):
        before = disk_space.estimate_disk_use(model, tmp_path, cfg, 100, 1).there
        shutil.copytree(path, tmp_path / name)
        assert (
            disk_space.estimate_disk_use(model, tmp_path, cfg, 100, 1).there
            == before + written * counts
        )
    before = disk_space.estimate_disk_use(model, tmp_path, cfg, 100, 1).there
    shutil.copytree(path, path.with_name("step-00000009.bad-a"))
    assert disk_space.estimate_disk_use(model, tmp_path, cfg, 100, 1).there == before
