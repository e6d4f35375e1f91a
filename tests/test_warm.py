"""Forks of a process that has used torch."""

import os
import select
import signal
import subprocess
import sys

import distributed
import pytest

_PROGRAM = """
import os, threading, time, torch, warm

torch.set_num_threads(2)
values = torch.ones(100_000)
values.sum()


def failed(most: int, enough: int) -> tuple[int, int]:
    codes = []
    while len(codes) < most and sum(code != 0 for code in codes) < enough:
        if (child := os.fork()) == 0:
            begun, errors = threading.Event(), []

            def add():
                while not begun.is_set():
                    time.sleep(0)
                try:
                    values.sum()
                except RuntimeError as error:
                    errors.append(error)

            threads = [threading.Thread(target=add) for _ in range(8)]
            for thread in threads:
                thread.start()
            begun.set()
            for thread in threads:
                thread.join()
            os._exit(len(errors) > 0)
        codes.append(os.waitpid(child, 0)[1])
    return sum(code != 0 for code in codes), len(codes)


without, forks = failed(400, 3)  # on busy processors few threads begin at once
warm.give_forks_a_thread_pool()
print(without, failed(forks + 30, 1)[0])
"""


@pytest.mark.slow
def test_threads_of_a_fork_find_a_thread_pool():
    command = [sys.executable, "-c", _PROGRAM]
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    without, with_pool = map(int, done.stdout.split())
    assert with_pool == 0
    assert without > 0  # torch mends it some day: then the helper can go


def test_a_signal_to_a_rank_that_has_just_ended_is_no_error():
    """Its process is gone before anybody has read that it ended."""
    (process,) = distributed.warm_processes(1)
    process.start(os.getcwd)
    select.select([process], [], [])
    with pytest.raises(ProcessLookupError):  # the control
        os.kill(process.pid, signal.SIGKILL)
    process.send(signal.SIGKILL)
    assert process.ended() == 0


def seen(rank: int, world: int) -> tuple[int, int]:
    return os.getppid(), hash("a word")


def test_neighbouring_ranks_are_of_different_processes_that_hash_differently():
    parents, hashes = zip(*distributed.run_ranks(seen, 5), strict=True)
    assert len(set(parents)) == 5  # each has what it is forked from
    assert hashes == (hashes[0], hashes[1], hashes[0], hashes[1], hashes[0])
    assert hashes[0] != hashes[1]
