"""A rank that dies, stops or hangs: all end in time and the cause is told; the judge's words."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rank_faults
import torch.distributed as dist
from conftest import BIN, ROOT, slow
from distributed import run_ranks

from toolkit import ranks
from toolkit.errors import LaunchError
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
    assert "missing (no answer, T (stopped)): rank 1" in told[0]
    assert not rank_faults.orphans(str(tmp_path))
    report = next((tmp_path / "run").glob("hang-*.txt")).read_text()
    assert "step.py" in report  # where rank 0 waits
    assert re.search(r"==== rank 1 \(pid \d+ on \S+\)\n", report)


def _stuck(rank: int, world: int, folder: str, fault: str) -> None:
    """Wait in a unit's all-gather for a rank that never comes."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    watchdog.start(1.5, Path(folder), lambda: False)
    watchdog.set_activity("step 7")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    fully_shard(model)
    if rank == 1 and fault == "sleeps":
        time.sleep(60)
    if rank == 1 and fault == "holds the lock":
        re.match("(a+)+$", 60 * "a" + "b")  # for years
    model(torch.ones(1, 8))


@pytest.mark.parametrize("fault", ["sleeps", slow("holds the lock")])
def test_the_report_says_who_waits_in_what_and_who_is_missing(tmp_path, capfd, fault) -> None:
    with pytest.raises(Exception, match="exited with 70"):
        run_ranks(_stuck, 2, str(tmp_path), fault)
    line = next(x for x in capfd.readouterr().err.splitlines() if x.startswith("watchdog: "))
    assert re.search(r"no rank made progress for \d+ s, at: step 7", line)
    assert re.search(r"waiting in all_gather\w* \(test_watchdog.py:\d+ in _stuck\): rank 0", line)
    assert re.search(r"missing \(test_watchdog.py:\d+ in _stuck\): rank 1", line)
    (report,) = tmp_path.glob("hang-*.txt")
    assert re.findall("==== rank (\\d)", report.read_text()) == ["0", "1"]
    assert "fully_shard" in report.read_text()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("loss.item()", "waiting in loss.item() (script.py:1 in main)"),
        ("torch.cuda.synchronize()", "waiting in torch.cuda.synchronize() (script.py:1 in main)"),
        ("work.wait()", "waiting in work.wait() (script.py:1 in main)"),
        ("time.sleep(1)", "missing (script.py:1 in main)"),
    ],
)
def test_where_a_rank_is(tmp_path, code, expected) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{code}\n")
    other = 'Thread 0x (most recent call first):\n  File "/lib/python3/q.py", line 3 in get\n'
    main = f'Current thread 0x (most recent call first):\n  File "{script}", line 1 in main\n'
    assert watcher.describe_position(other + main) == expected
    assert watcher.describe_position("") == ""


def _patient(rank: int, world: int, folder: str) -> float:
    watchdog.start(1.0, Path(folder), lambda: False)
    watchdog.set_activity("step 1")
    with watchdog.extend_timeout("a save"):
        time.sleep(4.0)
        dist.barrier()  # where the others are through already, less time is left
    watchdog.report_exit(0)
    return 4.0


@pytest.mark.faults
def test_what_may_take_long_may(tmp_path) -> None:
    assert run_ranks(_patient, 2, str(tmp_path)) == [4.0, 4.0]
    assert not list(tmp_path.iterdir())


def _goes_on(rank: int, world: int, folder: str) -> int:
    watchdog.start(1.0, Path(folder), lambda: False)
    watchdog.report_exit(1, "a failure that a notebook survives")
    time.sleep(8.0)  # longer than the judge and its grace take
    return rank


@pytest.mark.faults
def test_one_process_alone_may_go_on_after_a_failure(tmp_path, capfd) -> None:
    assert run_ranks(_goes_on, 1, str(tmp_path)) == [0]
    assert "watchdog" not in capfd.readouterr().err


def _killed_watcher(rank: int, world: int, folder: str) -> None:
    watchdog.start(60.0, Path(folder), lambda: False)
    time.sleep(1.0)
    if rank == 1:
        os.kill(watchdog._watch.watcher.pid, signal.SIGKILL)
    time.sleep(30.0)


@pytest.mark.faults
def test_a_rank_whose_watcher_is_killed_ends_with_the_others(tmp_path, capfd) -> None:
    begun = time.monotonic()
    with pytest.raises(Exception, match="exited with 1"):
        run_ranks(_killed_watcher, 2, str(tmp_path))
    assert time.monotonic() - begun < 25.0
    time.sleep(4.0)  # the judge hears all before it speaks
    said = capfd.readouterr().err
    assert re.search(r"watchdog: rank 1 \(.*\) is gone: its host is lost", said), said


def _sleeps(rank: int, world: int, folder: str) -> str:
    watchdog.start(1.0, Path(folder), lambda: False)
    watchdog.set_activity("step 1")
    both = f"{os.getpid()} {watchdog._watch.watcher.pid}"
    subprocess.Popen(["sh", "-c", f"kill -STOP {both}; sleep 6; kill -CONT {both}"])
    begun = time.monotonic()
    while time.monotonic() - begun < 9.0:
        watchdog.report_progress()
        time.sleep(0.1)
    watchdog.report_exit(0)
    return "awake"


@pytest.mark.faults
def test_a_machine_may_sleep(tmp_path) -> None:
    assert run_ranks(_sleeps, 1, str(tmp_path)) == ["awake"]


def _saves(rank: int, world: int, folder: str) -> None:
    saved = threading.Timer(12.0 + rank, Path(folder, str(rank)).touch)
    watchdog.start(60.0, Path(folder), lambda: not saved.finished.is_set())
    saved.start()
    if rank == 1:
        watchdog.report_exit(1, "planted")
    time.sleep(60.0)


@pytest.mark.faults
def test_a_checkpoint_in_flight_becomes_whole(tmp_path, capfd) -> None:
    """It takes longer than a rank has to leave that has none."""
    with pytest.raises(Exception, match="exited with 1"):
        run_ranks(_saves, 2, str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} >= {"0"}
    assert re.search(r"watchdog: rank 1 \(.*\) ended: planted\n", capfd.readouterr().err)


def _two_runs(rank: int, world: int, folder: str) -> list[bool]:
    found = list[bool]()
    watchdog.start(5.0, Path(folder), lambda: True)
    first = watchdog._watch
    watchdog.set_activity("step 7")
    watchdog.start(3.0, Path(folder), lambda: False)  # the first was interrupted, and has no end
    second = watchdog._watch
    found += [second is not first, second.activity == "start", second.timeout == 3.0]
    found += [first.watcher.wait(10.0) == 0, second.watcher.poll() is None]
    watchdog.start(0.0, Path(folder), lambda: False)
    found += [watchdog._watch is None, second.watcher.wait(10.0) == 0]
    return found


@pytest.mark.slow
def test_a_second_run_in_a_process_has_none_of_the_first(tmp_path) -> None:
    assert all(run_ranks(_two_runs, 1, str(tmp_path))[0])


def _unreachable(rank: int, world: int, folder: str) -> str:
    def refuse(*args: Any, **more: Any) -> Any:
        raise ConnectionRefusedError(111, "Connection refused")

    socket.create_connection = refuse
    try:
        watchdog.start(5.0, Path(folder), lambda: False)
    except LaunchError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_reach_rank_0_say_so(tmp_path) -> None:
    (said,) = run_ranks(_unreachable, 1, str(tmp_path))
    assert "Connection refused; ranks must reach any port of rank 0's host" in said


def _judge(folder: Path) -> tuple[watcher.Judge, Any]:
    """Return a judge, and a function that says lines to it as one that connects does."""
    listener = socket.create_server(("127.0.0.1", 0))
    judge = watcher.Judge(listener, "right", folder)

    def say(*lines: bytes) -> None:
        with socket.create_connection(listener.getsockname()) as link:
            link.sendall(b"\n".join(lines))
            link.shutdown(socket.SHUT_WR)
            judge.serve(listener.accept()[0])

    return judge, say


def state(number: int, code: int = watcher.RUNNING, **more: Any) -> dict[str, Any]:
    known = {"number": number, "name": f"rank {number}", "code": code, "why": "", "gone": ""}
    return known | {"doing": "start", "idle": 0.0, "patience": 1.0, "stacks": None} | more


def test_a_stranger_is_not_heard(tmp_path) -> None:
    """Neither one that says nothing nor one without the secret."""
    judge, say = _judge(tmp_path)
    line = json.dumps(state(0)).encode() + b"\n"
    for said in ((b"GET / HTTP/1.0", b"", b""), (b"wrong", line), (b"", line), (line,), (b"",)):
        say(*said)
    assert not judge._states
    say(b"right", line)  # the control
    assert [*judge._states] == [0]


def test_one_that_is_cut_off_in_the_middle_of_a_line_is_gone(tmp_path) -> None:
    judge, say = _judge(tmp_path)
    line = json.dumps(state(0)).encode() + b"\n"
    say(b"right", line + line[:20])
    assert "its host is lost" in judge._failed[0]["gone"]
    judge, say = _judge(tmp_path)
    say(b"right", b"")
    (found,) = judge._failed.values()
    assert found["name"] == "a rank"


@pytest.mark.parametrize(
    ("heard", "code", "told"),
    [
        ([state(0, 1, why="A"), state(1, 1, gone="killed")], 1, "rank 1 is gone: killed"),
        ([state(0, 75), state(1, 1, why="A")], 1, "rank 1 ended: A"),
        ([state(0, 1), state(1, 2, why="A"), state(2, 1, why="B")], 1, "rank 1 ended: A"),
        ([state(0, 75), state(1, 75)], 75, ""),
        ([state(0, 1)], 1, ""),
    ],
)
def test_the_first_of_the_deepest_causes_is_told_once(tmp_path, capfd, heard, code, told) -> None:
    judge, _ = _judge(tmp_path)
    judge._end_after_failure(heard)
    assert judge._order["leave"] == code
    assert judge._order["finish"] == (15.0 if "gone" in told else 300.0)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == bool(told)
    assert told in "".join(said)


def _rank(code: int, doing: bytes = b"a save") -> watcher.Rank:
    """Return a rank that shares this code, and no progress."""
    rank = object.__new__(watcher.Rank)
    rank._pid, rank._number, rank._name, rank.stacks = os.getppid(), 0, "rank 0", None
    rank._progress, rank._idle = (1, 0), 0.0
    rank._shared = watcher.BEAT.pack(1, 300.0, code, doing, b"")  # type: ignore[assignment]
    return rank


@pytest.mark.parametrize(
    ("doing", "kilobytes", "works"),
    [
        (b"a save", 0, False),
        (b"a save", 10, False),
        (b"a save", 999, True),
        (b"step 3", 999, False),
    ],
)
def test_bytes_that_flow_are_progress_beside_steps(monkeypatch, doing, kilobytes, works) -> None:
    """As of workers that tokenize for hours; what threads of a tracker move is none."""
    rank, seconds = _rank(watcher.RUNNING, doing), 0.0
    monkeypatch.setattr(watcher, "count_io_bytes", lambda pid: int(1e3 * kilobytes * seconds))
    for _ in range(20):
        seconds += 2.0
        found = rank.report_for_judge(2.0)
    assert found["idle"] == (0.0 if works else 40.0)


def test_bytes_of_this_process_are_counted(tmp_path) -> None:
    before = watcher.count_io_bytes(os.getpid())
    (tmp_path / "bytes").write_bytes(bytes(1 << 20))
    assert watcher.count_io_bytes(os.getpid()) - before >= 1 << 20


@pytest.mark.parametrize(
    ("said", "alive", "code", "gone"),
    [(0, False, 0, False), (watcher.RUNNING, False, 1, True), (watcher.RUNNING, True, -1, False)],
)
def test_what_a_rank_says_last_is_heard(monkeypatch, said, alive, code, gone) -> None:
    """It ended well between two looks: it is not gone."""
    rank = _rank(said)
    monkeypatch.setattr(watcher.Rank, "is_alive", lambda _: alive)
    found = rank.report_for_judge(1.0)
    assert (found["code"], bool(found["gone"])) == (code, gone)


def test_whose_fault_an_error_of_nccl_is() -> None:
    others = "NCCL error: remote process exited or there was a network error, ncclRemoteError"
    own = "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO), ncclUnhandledCudaError"
    assert ranks.is_peer_loss(dist.DistBackendError(others))
    assert not ranks.is_peer_loss(dist.DistBackendError(own))


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
