"""Threads that touch tensors of a device: all of them are made here.

A new thread computes on device 0, whichever device the process has chosen: on any other rank of a
machine it would copy on a stream that nobody waits for, and write bytes that are not there yet.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def device_pool(
    threads: int, name: str, begin: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Return a pool whose threads compute on the device that the calling thread computes on; each
    calls `begin` first.
    """
    choose = _same_device()

    def start() -> None:
        choose()
        if begin is not None:
            begin()

    return ThreadPoolExecutor(threads, name, start)


def device_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread for `work` on the device that the calling thread computes on; return it. The
    process does not wait for it at its end.
    """
    choose = _same_device()

    def run() -> None:
        choose()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _same_device() -> Callable[[], None]:
    """Return what lets another thread compute where this one does."""
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def choose() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)

    return choose
