"""The part of Ray that examples/ray_launch.py uses: each task is a forked process of this machine.

Options of a task are checked, and do not place it. An actor is a shared flag.
"""

import multiprocessing
import multiprocessing.connection
import signal
from types import SimpleNamespace

from ray import util

__all__ = ["exceptions", "get", "init", "remote", "util", "wait"]

MAX_NODES = 16  # of the cluster
_FORK = multiprocessing.get_context("fork")


class RayError(Exception):
    """A task ended without a result."""


class GetTimeoutError(RayError):
    """A result did not come in time."""


exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)


def init(address=None):
    print(f"fake ray: {address}", flush=True)


def remote(target):
    if isinstance(target, type):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=_start_flag))

    def options(**settings):
        assert settings["max_retries"] == 0
        assert settings["scheduling_strategy"].bundle in range(len(util.bundles))
        return SimpleNamespace(remote=lambda *args: _start(target, args))

    return SimpleNamespace(options=options)


def _start_flag():
    event = _FORK.Event()
    return SimpleNamespace(
        set=SimpleNamespace(remote=event.set),
        is_set=SimpleNamespace(remote=lambda: _Ready(event.is_set())),
    )


class _Ready:
    def __init__(self, value):
        self.value = value


def _start(function, args):
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(function, args, sender))
    process.start()
    sender.close()
    return SimpleNamespace(process=process, receiver=receiver)


def _run(function, args, sender):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sender.send(function(*args))


def wait(tasks, num_returns, timeout):
    assert num_returns == len(tasks)
    ready = multiprocessing.connection.wait([task.receiver for task in tasks], timeout)
    done = [task for task in tasks if task.receiver in ready]
    if len(done) < len(tasks):
        return [], tasks
    return done, []


def get(task, timeout=None):
    if task is None:  # a placement group is ready
        if len(util.bundles) > MAX_NODES:
            raise GetTimeoutError(f"not ready in {timeout} s")
        return None
    if isinstance(task, _Ready):
        return task.value
    try:
        result = task.receiver.recv()
    except EOFError as error:
        raise RayError("the process of the task died") from error
    task.process.join()
    return result
