"""How processes meet: open files, gloo's interface, and a place apart from earlier starts."""

import contextlib
import datetime
import ipaddress
import os
import resource
import socket
import time
from collections.abc import Callable

import psutil
import torch.distributed as dist

# An address that no machine has (RFC 5737): what leads to it leads outside.
_OUTSIDE = "192.0.2.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
_LONGEST_SLEEP = 0.5


def prepare(world: int, here: int, master: str | None) -> None:
    """Raise the limit of open files, a socket being one; where the `world` processes are more than
    those `here`, let gloo use the interface that leads to `master`. What the user has set stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where the hard limit is none (macOS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if here >= world or master is None:
        return
    # Else each process opens a socket to each other one, for each of three groups.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    found = None if INTERFACE in os.environ else interface_towards(master)
    if found is not None:
        os.environ[INTERFACE] = found


def interface_towards(master: str) -> str | None:
    """Return the name of the interface whose address packets to `master` have, None where nothing
    leads there. Gloo would take what the hostname resolves to: 127.0.1.1 on Debian, or the
    network that manages the machines.
    """
    own = _address_towards(master)
    if own is not None and ipaddress.ip_address(own).is_loopback:
        own = _address_towards(_OUTSIDE)  # this machine is the master, and knows itself as that
    for name, addresses in psutil.net_if_addrs().items() if own else ():
        if own in {one.address.partition("%")[0] for one in addresses}:
            return name
    return None


def _address_towards(host: str) -> str | None:
    """Return the address that this machine has for `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return probe.getsockname()[0].partition("%")[0]
    return None


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
