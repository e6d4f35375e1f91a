"""Work in the background of the loop: one task at a time, whose failure is not lost."""

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from toolkit.formats.device_threads import device_pool
from toolkit.training.guards import watchdog

_current: tuple[str, Future[object]] | None = None


def start_task(name: str, work: Callable[[], object]) -> None:
    """Run `work` in a background thread, after the previous task has ended.

    Only one task runs at a time: the call waits for the previous task, and raises its error if it
    failed.

    Args:
        name: description of the task, for messages and as the name of the thread.
        work: the function to run. If it fails, `wait` or the next `start_task` raises its error.
    """
    global _current
    wait()
    pool = device_pool(1, name)
    _current = name, pool.submit(work)
    # The thread ends with this task.
    pool.shutdown(wait=False)


def is_pending() -> bool:
    """Return True from the start of a task until `wait` has collected its result or error."""
    return _current is not None


def is_running() -> bool:
    """Return True while a background task is running."""
    return _current is not None and not _current[1].done()


def wait(seconds: float | None = None) -> None:
    """Wait until the background task is done, and raise its error if it failed.

    The error is raised once. Without a task, the call returns at once.

    Args:
        seconds: longest time to wait. If the task still runs after that, the function returns, and
            the task stays pending. None: no limit.
    """
    global _current
    if _current is None:
        return
    name, future = _current
    if seconds is not None and not future.done():
        print(f"waiting at most {seconds:.0f} s for {name}", file=sys.stderr, flush=True)
    with watchdog.extend_timeout(f"waiting for {name}"):
        concurrent.futures.wait([future], seconds)
    if future.done():
        _current = None
        future.result()


def _wait_at_exit() -> None:
    """Wait for the background task when Python exits. If it failed, end with exit code 1."""
    try:
        wait()
    except BaseException as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


# At its end Python waits for its threads before it runs `atexit` functions, and then lets no thread
# start anything. So a save that is still running in `atexit` could not finish. A function
# registered here runs before that wait; the latest registered one, which this is after those of the
# thread pools, runs first. The function is private, and there is no other way. Without it such a
# save fails with an error.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)
