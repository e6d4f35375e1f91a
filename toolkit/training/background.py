"""Work that goes on behind the loop: one piece at a time, and its failure is not lost."""

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


def start(name: str, work: Callable[[], object]) -> None:
    """Run `work` behind the loop. What was started before is waited for first, and may raise."""
    global _current
    wait()
    pool = device_pool(1, name)
    _current = name, pool.submit(work)
    pool.shutdown(wait=False)  # its thread ends with this piece


def is_pending() -> bool:
    """Whether something was started that nobody has waited for yet."""
    return _current is not None


def is_running() -> bool:
    """Whether something is in flight."""
    return _current is not None and not _current[1].done()


def wait(seconds: float | None = None) -> None:
    """Return when nothing is in flight any more, or after so many `seconds`, in which case it goes
    on; raise what it failed with, once.
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


def _at_exit() -> None:
    """Let a program that ends without `wait` fail where the work did."""
    try:
        wait()
    except BaseException as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


# Python lets no thread begin anything once it has waited for its threads, and does that before
# `atexit`: a save that is not waited for until then could not finish. What is registered later, as
# this is after the pools' own, runs first. Private to Python and the only way in; without it such a
# save fails, and says so.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
