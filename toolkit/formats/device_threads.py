"""Start threads that compute on the device of their process.

A new thread computes on device 0, whichever device the process has chosen. On any other rank of a
machine it would copy on a stream that nobody waits for, and write bytes before they arrive. So
every thread that touches tensors is started here.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def device_pool(
    threads: int, name: str, begin: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Start a thread pool whose threads use the same accelerator device as the calling thread.

    Args:
        threads: maximum number of threads.
        name: prefix of the threads' names.
        begin: function that each thread calls once when it starts; None calls nothing.
    """
    choose = _make_device_selector()

    def start() -> None:
        """Select the device in a new thread, then call `begin`."""
        choose()
        if begin is not None:
            begin()

    return ThreadPoolExecutor(threads, name, start)


def device_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that runs `work` on the same accelerator device as the calling thread.

    Returns:
        The thread, which is already running.
    """
    choose = _make_device_selector()

    def run() -> None:
        """Select the device in the new thread, then call `work`."""
        choose()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _make_device_selector() -> Callable[[], None]:
    """Create a function that selects the caller's current accelerator device in another thread.

    Call the returned function in that thread. Without an accelerator it does nothing.
    """
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def choose() -> None:
        """Select the device in the calling thread."""
        if device is not None:
            torch.accelerator.set_device_index(device)

    return choose
