"""Threads that touch tensors of a device: all of them are made here.

A new thread computes on device 0, whichever device the process has chosen: on any other rank of a
machine it would copy on a stream that nobody waits for, and write bytes that are not there yet.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def device_pool(
    threads: int, name: str, begin: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Return a pool whose threads compute on the device that the calling thread computes on; each
    calls `begin` first.
    """
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def start() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        if begin is not None:
            begin()

    return ThreadPoolExecutor(threads, name, start)
