"""Work that goes on behind the loop: one piece at a time, and its failure is not lost."""

import atexit
import concurrent.futures.thread  # noqa: F401 - ends its pools after `_at_exit`, if it is first
import os
import sys
import threading
from collections.abc import Callable

from toolkit import ranks


class _Work(threading.Thread):
    def __init__(self, name: str, work: Callable[[], object]) -> None:
        # Not a daemon: an interpreter that ends waits for it.
        super().__init__(name=name)
        self.work = work
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # also DCP's, which is no Exception
            self.failure = error


_current: _Work | None = None


def start(name: str, work: Callable[[], object]) -> None:
    """Run `work` behind the loop. What was started before is waited for first, and may raise."""
    global _current
    wait()
    ranks.at_end(wait)
    _current = _Work(name, work)
    _current.start()


def busy() -> bool:
    """Whether something is in flight."""
    return _current is not None and _current.is_alive()


def wait(seconds: float | None = None) -> None:
    """Return when nothing is in flight any more, or after so many `seconds`, in which case it goes
    on; raise what it failed with, once.
    """
    global _current
    if _current is None:
        return
    if seconds is not None and _current.is_alive():
        print(f"waiting at most {seconds:.0f} s for {_current.name}", file=sys.stderr, flush=True)
    _current.join(seconds)
    if _current.is_alive():
        return
    failure, _current = _current.failure, None
    if failure is not None:
        raise failure


def _at_exit() -> None:
    """Let a program that ends without `wait` fail where the work did."""
    try:
        wait()
    except BaseException as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)


# Python lets no thread begin anything once it has waited for its threads, and does that before
# `atexit`: a save that is not waited for until then could not finish. Private to Python and the
# only way in; without it such a save fails, and says so.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
