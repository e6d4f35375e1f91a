"""One process at a time has a run's folder: refused, taken over, lost, given back."""

import contextlib
import ctypes
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from distributed import run_ranks

from toolkit import checkpoint
from toolkit.checkpoint import lock, run_folder
from toolkit.checkpoint.commit import committed_steps
from toolkit.config import CheckpointConfig, PretrainConfig, dump
from toolkit.config.settings import ModelConfig
from toolkit.errors import CheckpointError, ConfigError, LaunchError
from toolkit.training import Run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "_BEAT", 0.1)
    monkeypatch.setattr(lock, "_WATCH", 0.8)
    yield
    for folder in list(lock._held_locks):
        lock.release(folder)


def fork_and_kill(rank: int, world: int, root: str) -> dict[str, object]:
    """Let a process with a worker take the folder; ask before and after it is killed."""
    folder, found = Path(root), {}
    ready = folder.with_name("ready")
    owner = os.fork()
    if owner == 0:
        lock.acquire(folder, "77")
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        ready.write_text(str(worker))
        time.sleep(60)
        os._exit(0)
    while not (ready.exists() and ready.read_text()):
        time.sleep(0.01)
    worker = int(ready.read_text())
    try:
        lock.acquire(folder)
    except ConfigError as error:
        found["refused"] = str(error)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    begun = time.monotonic()
    found["line"] = lock.acquire(folder)
    found["seconds"] = time.monotonic() - begun
    found["worker lives"] = os.path.exists(f"/proc/{worker}")
    os.kill(worker, signal.SIGKILL)
    found["owner"], found["again"] = owner, lock.acquire(folder)
    lock.release(folder)
    found["given back"] = lock.acquire(folder)
    return found


def test_a_living_owner_is_named_and_a_killed_one_is_followed_at_once(tmp_path):
    (found,) = run_ranks(fork_and_kill, 1, str(tmp_path / "run"), group=False)
    who = f"is in use by process {found['owner']} on {os.uname().nodename} since 20"
    assert who in found["refused"]
    assert ", job 77; wait for it, end it, or give another output_dir" in found["refused"]
    assert f"process {found['owner']}" in found["line"]
    assert found["line"].endswith("which is gone")
    assert found["worker lives"]  # it has not kept the lock
    assert found["seconds"] < 2
    assert found["again"] == found["given back"] == ""


def write_note(folder: Path, kernel: str) -> Path:
    owner = {"host": "node-7", "pid": 12, "job": "", "kernel": kernel, "since": "then"}
    (folder / lock.LOCK).write_text(json.dumps(owner | {"token": "theirs"}))
    return folder / lock.LOCK


@pytest.mark.parametrize("hour", [-3600, pytest.param(3600, marks=pytest.mark.slow)])
def test_an_owner_on_another_host_lives_while_it_touches_the_file(tmp_path, hour):
    file, stop = write_note(tmp_path, "another"), threading.Event()

    def touch() -> None:  # by the clock of a server that is an hour off
        while not stop.wait(0.1):
            os.utime(file, (time.time() + hour,) * 2)

    toucher = threading.Thread(target=touch)
    toucher.start()
    with pytest.raises(ConfigError, match="in use by process 12 on node-7 since then"):
        lock.acquire(tmp_path)
    stop.set()
    toucher.join()
    assert "process 12 on node-7 since then, which is gone" in lock.acquire(tmp_path)


def test_an_owner_on_another_host_that_leaves_meanwhile_is_no_hindrance(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WATCH", 60.0)
    file = write_note(tmp_path, "another")
    timer = threading.Timer(0.3, lambda: file.write_text(""))
    timer.start()
    begun = time.monotonic()
    lock.acquire(tmp_path)
    assert time.monotonic() - begun < 50


def test_a_file_system_without_locks_is_watched_for_this_host_too(tmp_path, monkeypatch):
    def refuse(*args) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    write_note(tmp_path, lock._kernel_id())
    begun = time.monotonic()
    lock.acquire(tmp_path)
    assert time.monotonic() - begun > 0.7
    theirs = dict(lock._held_locks)
    lock._held_locks.clear()  # as another process: the first one's thread goes on touching
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        lock.acquire(tmp_path)
    lock._held_locks.update(theirs)


def test_a_run_that_lost_its_folder_saves_nothing_more(tmp_path):
    state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=1)
    lock.acquire(tmp_path)
    checkpoint.save(state, tmp_path, CheckpointConfig())
    file = write_note(tmp_path, "another")
    time.sleep(0.3)
    touched = file.stat().st_mtime_ns
    time.sleep(0.3)
    assert file.stat().st_mtime_ns == touched  # it does not keep another's note fresh
    state.step = 2
    for may_fail in (True, False):
        with pytest.raises(CheckpointError, match=r"process 12 on node-7 .* lost its"):
            checkpoint.save(state, tmp_path, CheckpointConfig(), may_fail=may_fail)
    file.unlink()
    with pytest.raises(CheckpointError, match="was removed or emptied"):
        checkpoint.save(state, tmp_path, CheckpointConfig())
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def start(cfg: PretrainConfig) -> tuple[run_folder.RunFolder, contextlib.ExitStack]:
    run = Run(None, torch.device("cpu"), 0, 1, job="77")
    return run_folder.RunFolder(cfg, run), run.at_end


def settings(tmp_path: Path, root: str | None = None, name: str = "run") -> PretrainConfig:
    saving = CheckpointConfig(root=root)
    return PretrainConfig(ModelConfig("m"), checkpoint=saving, output_dir=str(tmp_path / name))


def as_another_process() -> None:
    """Forget what this one holds; the kernel goes on locking it."""
    lock._held_locks.clear()


def test_a_start_has_the_folder_before_it_writes_anything(tmp_path):
    """Also before it trains a tokenizer there, which a second start would replace."""
    folder, ended = start(settings(tmp_path))
    mine = dict(lock._held_locks)
    as_another_process()
    with pytest.raises(ConfigError, match=r"output_dir .* is in use by process .*, job 77"):
        start(settings(tmp_path))
    lock._held_locks.update(mine)
    ended.close()
    assert not folder.path.exists()  # one that was refused leaves nothing
    _, ended = start(settings(tmp_path))
    (folder.path / "config.yaml").touch()
    ended.close()
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.yaml", "run.lock"]


def test_one_root_of_checkpoints_has_one_run(tmp_path):
    root = str(tmp_path / "root")
    _, ended = start(settings(tmp_path, root, "a"))
    mine = dict(lock._held_locks)
    as_another_process()
    with pytest.raises(ConfigError, match=rf"checkpoint.root {root} is in use by process"):
        start(settings(tmp_path, root, "b"))
    lock._held_locks.update(mine)
    ended.close()


def test_of_two_runs_on_one_store_the_earlier_saves_no_more(tmp_path, capsys):
    url = f"memory://bucket/{tmp_path.name}"
    state = checkpoint.TrainState(torch.nn.Linear(4, 4), step=1)
    first, ended = start(settings(tmp_path, url, "a"))
    checkpoint.save(state, first.root, CheckpointConfig())
    mine = dict(lock._held_locks)
    as_another_process()
    capsys.readouterr()
    (first.root / "config.yaml").write_bytes(dump(settings(tmp_path, url, "b")).encode())
    second, _ = start(settings(tmp_path, url, "b"))
    said = capsys.readouterr().out
    assert f"{url} was in use by process {os.getpid()}" in said
    assert "if that still runs, its next save is refused" in said
    theirs = dict(lock._held_locks)
    as_another_process()
    lock._held_locks.update(mine)
    state.step = 2
    with pytest.raises(CheckpointError, match=r"this run has lost its folder"):
        checkpoint.save(state, first.root, CheckpointConfig())
    ended.close()
    lock._held_locks.update(theirs)
    checkpoint.save(state, second.root, CheckpointConfig())  # the first one took no note away
    assert sorted(committed_steps(second.root)) == [1, 2]


def look(rank: int, world: int, root: str, alone: bool) -> str:
    """Check a folder, over which rank 1 has a file system of its own where it is `alone`."""
    run_folder._PATIENCE = 0.5
    if alone and rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        if (
            libc.unshare(0x20000)
            or libc.mount(None, b"/", None, 0x44000, None)
            or libc.mount(b"tmpfs", os.fsencode(root), b"tmpfs", 0, None)
        ):
            return "no right to mount"
    try:
        run_folder.check_shared_folder(Path(root, "run"))
    except LaunchError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_hosts_that_do_not_see_the_folder_are_named(tmp_path, alone):
    if alone and os.geteuid():
        pytest.skip("no right to mount")
    found = run_ranks(look, 2, str(tmp_path), alone)
    host = os.uname().nodename
    said = f"what rank 0 on {host} writes there is not seen on {host} (rank 1). Mount one"
    for text in found:
        assert (said in text) == alone, text
        assert bool(text) == alone
    assert list(tmp_path.iterdir()) == []
