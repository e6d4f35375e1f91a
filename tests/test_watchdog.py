"""A rank that dies, stops or hangs: all end in time and the cause is told; the judge's words."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_faults
import torch.distributed as dist
from conftest import BIN, ROOT
from distributed import run_ranks

from toolkit import ranks
from toolkit.training.guards import watchdog, watcher


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scene")
    rank_faults.prepare(folder)
    return folder


CASES = [("stop", "step", False), ("loop", "step", False), ("kill", "save", True),
         ("exception", "evaluate", False), ("memory", "load", False),
         ("kill", "start", False), ("stop", "exit", False)]  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "phase", "behind"), CASES)
def test_all_ranks_end_and_the_cause_is_told(scene, fault, phase, behind) -> None:
    more = ["--checkpoint.async_save", "true"] if behind else []
    seen = rank_faults.run(scene, fault, phase, CASES.index((fault, phase, behind)), *more)
    assert not seen["wrong"], seen["stderr"]
    assert seen["code"] == {"kill": 9, "stop": 70, "loop": 70}.get(fault, 1) or phase == "exit"


@pytest.mark.faults
def test_without_it_the_others_wait(scene, tmp_path) -> None:
    """The control: nobody watches."""
    script, _ = rank_faults.planted(tmp_path, "stop", "step")
    settings = [*rank_faults.flags(scene, tmp_path / "run"), "--train.hang_seconds", "0"]
    begun = time.monotonic()
    ended = rank_faults.run_recipe_ranks(script, 2, *settings, cwd=tmp_path, kill_after=40.0)
    assert time.monotonic() - begun > 39.0
    assert ended.returncode == signal.SIGKILL
    assert "watchdog" not in ended.stderr


@pytest.mark.faults
def test_a_launched_run_with_a_stopped_rank_ends_with_one_line(scene, tmp_path) -> None:
    script, _ = rank_faults.planted(tmp_path, "stop", "step")
    ended = subprocess.run(
        [BIN / "torchrun", "--nproc_per_node", "2", script,
         *rank_faults.flags(scene, tmp_path / "run")],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 1
    told = [line for line in ended.stderr.splitlines() if line.startswith("watchdog: ")]
    assert len(told) == 1
    assert "missing: rank 1 (stopped)" in told[0]
    assert not rank_faults.orphans(str(tmp_path))
    report = next((tmp_path / "run").glob("hang-*.txt")).read_text()
    assert "step.py" in report  # where rank 0 waits
    assert "no stacks; state of the process: T" in report


def _stuck(rank: int, world: int, folder: str) -> None:
    """Wait in a unit's all-gather for a rank that never comes."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    watchdog.begin(1.5, Path(folder), lambda: False)
    watchdog.name_samples(lambda step: [f"row {step} of rank {rank}"])
    watchdog.in_step(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    fully_shard(model)
    if rank == 1:
        time.sleep(60)
    model(torch.ones(1, 8))


def test_the_report_names_the_unit_the_missing_rank_and_its_samples(tmp_path, capfd) -> None:
    with pytest.raises(Exception, match="exited with 70"):
        run_ranks(_stuck, 2, str(tmp_path))
    line = next(x for x in capfd.readouterr().err.splitlines() if x.startswith("watchdog: "))
    assert re.search(r"no rank got on for \d+ s, at: step 7", line)
    assert re.search(r"waiting in \w+ of unit \S+: rank 0", line)
    assert re.search(r"missing: rank 1 \(test_watchdog.py:\d+ in _stuck\)", line)
    assert "samples of rank 1: row 7 of rank 1" in line
    (report,) = tmp_path.glob("hang-*.txt")
    assert "foreach_all_gather" in report.read_text() or "all_gather" in report.read_text()


def _patient(rank: int, world: int, folder: str) -> float:
    watchdog.begin(1.0, Path(folder), lambda: False)
    watchdog.in_step(1)
    with watchdog.patient("a save"):
        time.sleep(4.0)
        dist.barrier()  # where the others are through already, less time is left
    watchdog.end(0)
    return 4.0


@pytest.mark.faults
def test_what_may_take_long_may(tmp_path) -> None:
    assert run_ranks(_patient, 2, str(tmp_path)) == [4.0, 4.0]
    assert not list(tmp_path.iterdir())


def _goes_on(rank: int, world: int, folder: str) -> int:
    watchdog.begin(1.0, Path(folder), lambda: False)
    watchdog.end(1, "a failure that a notebook survives")
    time.sleep(8.0)  # longer than the judge and its grace take
    return rank


@pytest.mark.faults
def test_one_process_alone_may_go_on_after_a_failure(tmp_path, capfd) -> None:
    assert run_ranks(_goes_on, 1, str(tmp_path)) == [0]
    assert "watchdog" not in capfd.readouterr().err


def test_a_stranger_is_not_heard(tmp_path) -> None:
    """Neither one that says nothing nor one without the secret."""
    listener = watcher._listen(one_host=True)
    given = {"secret": "right", "world": 1, "patience": 1.0, "folder": str(tmp_path)}
    judge = watcher.Judge(listener, given, _rank(tmp_path))
    for said in (b"GET / HTTP/1.0\r\n\r\n", b'{"hello": 0, "secret": "wrong"}\n', b""):
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            judge._accept()
    assert not judge._seen


def _rank(folder: Path) -> watcher.Rank:
    """Return what watches the process above this one."""
    beat = os.open(folder / "beat", os.O_RDWR | os.O_CREAT)
    os.write(beat, watcher.BEAT.pack(1, 300.0, b"a save"))
    return watcher.Rank(os.getppid(), beat, beat)


class _Ended:
    """A rank that has ended."""

    ends = None

    def alive(self) -> bool:
        return False

    def beat(self) -> dict[str, str]:
        return {"doing": "the end"}

    def was_killed_for_memory(self) -> bool:
        return False


@pytest.mark.parametrize(("share", "works"), [(0.0, False), (0.02, False), (0.5, True)])
def test_idle_children_are_no_progress(tmp_path, monkeypatch, share, works) -> None:
    """The workers of a loader wake up every 5 s while their rank hangs in a save."""
    clock, rank = [0.0], _rank(tmp_path)
    monkeypatch.setattr(watcher.time, "monotonic", lambda: clock[0])
    ticks = share * os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(watcher, "_work", lambda pid: (int(ticks * clock[0]), 0))
    found = []
    for _ in range(20):
        clock[0] += 5.0
        found.append(rank.beat()["got_on"])
    assert any(found[1:]) is all(found[1:]) is works


def test_what_a_rank_says_last_is_heard() -> None:
    """It ended well between two looks: it is not gone."""
    for said, expected in (({"end": 0}, {"end": 0}), (None, {"gone": "the end", "memory": False})):
        (mine, rank), (there, judge) = socket.socketpair(), socket.socketpair()
        if said:
            watcher.Lines(rank).send(**said)
        watch = watcher.Watcher(_Ended(), watcher.Lines(mine), watcher.Lines(there), 1.0)  # type: ignore[arg-type]
        watch._hear_last()
        if not watch._ended:
            watch.run()
        assert watcher.Lines(judge).receive() == [expected]


def test_the_judge_ends_where_others_never_came(tmp_path) -> None:
    listener = watcher._listen(one_host=True)
    given = {"secret": "right", "world": 2, "patience": 1.0, "folder": str(tmp_path)}
    watcher.Judge(listener, given, _Ended()).run()  # type: ignore[arg-type]
    waiting = watcher.Judge(listener, given, _rank(tmp_path))
    assert not waiting._all_left()  # the control: they may come


def test_one_stall_does_not_make_it_patient_for_good(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    watch = object.__new__(watchdog._Watch)
    watch.patience, watch.count, watch.slowest, watch.began = 300.0, 0, 0.0, 0.0
    watch.patient, watch.doing, watch.shared = False, "", bytearray(watcher.BEAT.size)
    monkeypatch.setattr(watchdog, "_watch", watch)
    longest = list[float]()
    for step, seconds in enumerate([200.0, *[50.0] * 30], 1):
        clock[0] += seconds
        watchdog.in_step(step)
        longest.append(watch.steady())
    assert longest[0] == 2000.0
    assert longest[-1] == 500.0  # ten times what steps take


def test_whose_fault_an_error_of_nccl_is() -> None:
    others = "NCCL error: remote process exited or there was a network error, ncclRemoteError"
    own = "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO), ncclUnhandledCudaError"
    assert ranks.lost_another(dist.DistBackendError(others))
    assert not ranks.lost_another(dist.DistBackendError(own))


def test_spans() -> None:
    assert watcher._spans([5, 0, 1, 2]) == "0-2, 5"


def test_it_is_of_the_standard_library_alone() -> None:
    """It must start in no time, and not import what a rank does."""
    probe = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", probe, watcher.__file__],
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert found.stdout == "False\n"


LOADING = """
import os, runpy, signal, sys, time
import toolkit.loading as loading

plain = loading.load_or_init

def load_or_init(*args, **more):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1.0)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30.0)  # no collective, whose end would tell: torch's agent sends SIGTERM
    return plain(*args, **more)

loading.load_or_init = load_or_init
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.faults
def test_a_rank_killed_before_the_loop_is_started_again(scene, tmp_path) -> None:
    """The agent's SIGTERM to the others is no preemption, after which nothing would be started."""
    script = tmp_path / "loading.py"
    script.write_text(LOADING)
    recipe = str(ROOT / "recipes" / "pretrain.py")
    ended = subprocess.run(
        [BIN / "torchrun", "--nproc_per_node", "2", "--max_restarts", "1", script, recipe,
         *rank_faults.flags(scene, tmp_path / "run"), "--train.hang_seconds", "60"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "restart    1 of 1 by the launcher" in ended.stdout
    assert re.search(rank_faults.DEATHS["kill"], ended.stderr)
    assert "no restart" not in ended.stderr
