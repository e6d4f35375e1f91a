"""Where the processes of one start meet, apart from those of the starts before it."""

import datetime
import os
import time
from collections.abc import Callable

import torch.distributed as dist

_LONGEST_SLEEP = 0.5


def apart(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta
) -> dist.PrefixStore:
    """Return `store` under a prefix that the processes of this start alone share. Collective, a few
    round trips of each rank; RuntimeError: not all came within `timeout`.

    A launcher that restarts its ranks keeps its store, in which they would find the addresses of
    processes that are gone, and wait for them (torch 2.13, its issue 135712). Its own count of
    restarts does not tell the starts apart, since each machine's agent has another one. So rank 0
    numbers its start, and every other rank takes its place in the newest; a place that is taken was
    an earlier process's.
    """
    started = place = 0  # numbers of starts: the newest, and the one that this rank has a place in

    def met() -> bool:
        return store.check([f"start-{place}/rank-{other}" for other in range(1, world)])

    def joined() -> bool:
        nonlocal started, place
        newest = store.add("starts", 0)
        if newest > started:
            started = newest
            place = newest if store.add(f"start-{newest}/rank-{rank}", 1) == 1 else 0
        return place > 0 and store.check([f"start-{place}/complete"])

    if rank == 0:
        place = store.add("starts", 1)
        if world > 1:
            _poll(met, timeout)
        store.set(f"start-{place}/complete", "")
    else:
        _poll(joined, timeout)
    return dist.PrefixStore(f"start-{place}", store)


def _poll(done: Callable[[], bool], timeout: datetime.timedelta) -> None:
    """Return when it is `done`. A wait of the store itself would hear no signal."""
    until, sleep = time.monotonic() + timeout.total_seconds(), 0.01
    while not done():
        if time.monotonic() > until:
            raise RuntimeError(f"not all ranks came within {timeout}")
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)


def restart_line() -> str | None:
    """Return the line that says that the launcher started this run again, None at its first."""
    count, most = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return None if count == "0" else f"restart    {count} of {most} by the launcher"
