"""How processes meet: who is on which host, open files, the interfaces, a limit for connecting."""

import contextlib
import datetime
import ipaddress
import json
import math
import os
import resource
import shutil
import socket
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from toolkit import ranks
from toolkit.errors import LaunchError, one_line
from toolkit.formats.device_threads import device_thread
from toolkit.training import launchers

# An address that no machine has (RFC 5737): what leads to it leads outside.
_OUTSIDE = "192.0.2.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
SHARED_MEMORY = "/dev/shm"
_LONGEST_SLEEP = 0.5
_TO_TELL = datetime.timedelta(minutes=1)  # ranks that have come to the store
_TO_HEAR = datetime.timedelta(seconds=5)
# Seconds for all to connect once all are there, and of each 32 of them one more: what takes longer
# leads nowhere.
_TO_CONNECT = 45.0
_SHOWN = 12  # interfaces that an error lists


@dataclass(frozen=True)
class Location:
    """Where a process is among the others."""

    local: int = 0
    """Its number on its host."""
    here: int = 1
    """Processes of the run on its host."""
    hosts: int = 1
    sharers: int = 1
    """Processes that use the same processors as it, itself among them."""
    master: str | None = None
    """The address by which other hosts know that of rank 0; None where nobody says it."""


ALONE = Location()


def exchange_and_decide(
    store: dist.Store,
    topic: str,
    mine: Any,
    decide: Callable[[list[Any]], list[Any]],
    rank: int,
    world: int,
) -> Any:
    """Return what `decide` makes for this rank, on rank 0, of what every rank brings. Collective,
    over the store alone, before there is a group. What it raises every rank raises, a LaunchError.
    """
    keys = [f"{topic}/{other}" for other in range(world)]
    key, error, told = f"{topic}/for-{rank}", "", list[Any]()
    store.set(keys[rank], json.dumps(mine))
    try:
        if rank == 0:
            _poll(lambda: store.check(keys), _TO_TELL)
            try:
                told = decide([json.loads(text) for text in store.multi_get(keys)])
            except LaunchError as refused:
                error, told = str(refused), [None] * world
            for other, value in enumerate(told):
                store.set(f"{topic}/for-{other}", json.dumps([error, value]))
        _poll(lambda: store.check([key]), _TO_TELL)
    except RuntimeError as missing:
        raise LaunchError(
            f"one of {world} processes ended or stopped before it told the others its {topic}; "
            f"what it says itself is the cause ({missing})"
        ) from missing
    error, value = json.loads(store.get(key))
    if error:
        store.add(f"{topic}/heard", 1)
        with contextlib.suppress(RuntimeError):  # not all: some are gone already
            if rank == 0:  # with which the store may leave
                _poll(lambda: store.add(f"{topic}/heard", 0) == world, _TO_HEAR)
        raise LaunchError(error)
    return value


def exchange_locations(store: dist.Store, rank: int, world: int, *, nccl: bool) -> Location:
    """Tell the others where this process is; return what follows for it. See `exchange`."""
    local, sure = launchers.read_local_rank()
    master = os.environ.get("MASTER_ADDR")
    mine = {
        "name": socket.gethostname(),
        "host": ranks.host_id(),
        "local": local,
        "sure": sure,
        "here": int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        "cores": f"{sum(1 << core for core in ranks.available_cores()):x}",
        "master": master and _resolved(master),
        "loopback": _is_loopback(os.environ.get(GLOO_INTERFACE, "")),
        "error": interface_error(os.environ, nccl=nccl),
    }
    return Location(**exchange_and_decide(store, "place", mine, assign_locations, rank, world))


def assign_locations(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the place of each process, from what `meet` has all of them say, in rank order.
    LaunchError: one of them cannot use its interfaces.
    """
    hosts, cores = defaultdict[str, list[int]](list), defaultdict[tuple[str, str], int](int)
    for rank, said in enumerate(every):
        hosts[said["host"]].append(rank)
        cores[said["host"], said["cores"]] += 1
    for said in every:
        error = said["error"]
        if said["loopback"] and not error and len(hosts) > 1:
            error = f"{GLOO_INTERFACE} is a loopback interface, which leads to no other host"
        if error:
            raise LaunchError(f"{error} (on {said['name']}, of {len(hosts)} host(s))")
    master = next((said["master"] for said in every if said["master"]), None)
    told = []
    for rank, said in enumerate(every):
        beside = hosts[said["host"]]
        locals_ = [every[other]["local"] for other in beside]
        sure = all(every[other]["sure"] for other in beside)
        usable = None not in locals_ and len({*locals_}) == len(beside)
        told.append(
            {
                "local": said["local"] if sure or usable else beside.index(rank),
                "here": said["here"] or len(beside),
                "hosts": len(hosts),
                "sharers": cores[said["host"], said["cores"]],
                "master": master,
            }
        )
    return told


def connect(
    store: dist.Store,
    rank: int,
    world: int,
    place: Location,
    device: torch.device | None,
    timeout: datetime.timedelta,
    seconds: float | None = None,
) -> None:
    """Create the default process group and connect all that step 1 needs: gloo, and the backend of
    the devices.

    Args:
        timeout: of later collectives.
        seconds: time for connecting (`train.connect_seconds`); None: 45, and one more for each 32
            processes.

    Raises:
        LaunchError: connecting fails, or takes longer.
    """
    backend, bound, own, over = "gloo", None, "gloo", ["gloo"]
    if device is not None:
        own = dist.get_default_backend_for_device(device.type)
        # Gloo carries objects, offloaded gradients and all that must not wait inside NCCL.
        backend = f"cpu:gloo,{device.type}:{own}"
        bound = device if device.type == "cuda" else None  # the others' groups are not split
    # A mesh's groups are split off with NCCL's options; gloo says that it takes its own.
    warnings.filterwarnings("ignore", message="Tried to pass options to ProcessGroupGloo::split")

    def work() -> None:
        given: Any = {"store": store, "rank": rank, "world_size": world, "device_id": bound}
        dist.init_process_group(backend, timeout=timeout, **given)
        if place.here < world:  # gloo connects at its first use
            dist.all_reduce(torch.zeros(1), group=ranks.world_group())
        ranks.node_indices()
        if device is not None and world > 1:
            over[0] = own
            total = torch.ones(1, device=device)
            dist.all_reduce(total, group=ranks.world_group())
            if (found := total.item()) != world:
                raise RuntimeError(f"a sum over {world} processes came out as {found:g}")

    limit = _TO_CONNECT + world / 32 if seconds is None else seconds
    try:
        stuck = run_with_timeout(limit, work)
        cause = stuck and (
            f"it is not done after {limit:.0f} s, at {stuck} (train.connect_seconds sets the time)"
        )
        failed = None
    except (RuntimeError, ValueError) as error:
        cause, failed = one_line(error, 600), error
    if cause:
        nccl = over[0] != "gloo" or "NCCL" in cause or "eager_connect" in cause
        advice = _of_nccl(own) if nccl else _of_gloo(place.here < world)
        raise LaunchError(
            f"process {rank} of {world} met the others, but did not connect to them over "
            f"{own if nccl else 'gloo'}: {cause}; {advice}"
        ) from failed


def _of_gloo(several: bool) -> str:
    uses = os.environ.get(GLOO_INTERFACE, "not set: that of the hostname")
    between = f"between machines gloo uses the interface {GLOO_INTERFACE} ({uses})"
    return f"{between * several or 'gloo uses that of the hostname'}; this host has {format_interfaces()}"


def _of_nccl(backend: str) -> str:
    told = ", ".join(
        f"{n} ({os.environ.get(n, 'not set')})" for n in (NCCL_INTERFACE, "NCCL_IB_HCA")
    )
    free = f"{free_shared_memory_bytes() / 1e6:.0f} MB of {SHARED_MEMORY} (--shm-size)"
    return (
        f"{backend} connects hosts over {told} and devices of one host through {free}; "
        f"NCCL_DEBUG=INFO says more; this host has {format_interfaces()}"
    )


def free_shared_memory_bytes() -> float:
    """Return the bytes that are free in shared memory, without end where there is no such place."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return math.inf


def format_hosts(place: Location, world: int) -> str | None:
    """Return the line that says on how many hosts the processes are, None for one."""
    if place.hosts == 1:
        return None
    over = os.environ.get(GLOO_INTERFACE, "that of the hostname")
    return f"hosts      {place.hosts}, {place.here} of {world} ranks on this one; gloo over {over}"


def run_with_timeout(seconds: float, work: Callable[[], None]) -> str:
    """Run `work` in a thread; return where it is after so many seconds, in which case it goes on
    and this process is to end; empty where it is done. Raises what it raises. What waits within
    gloo or NCCL hears no timeout and no signal.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = device_thread(run, "connecting")
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not thread.is_alive():
        return ""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    return (stack[-1].line or stack[-1].name) if stack else "its end"


def prepare_sockets(world: int, here: int, master: str | None, known_as: str | None = None) -> None:
    """Raise the limit of open files, a socket being one; where the `world` processes are more than
    those `here`, let gloo use the interface that leads to `master`, which other hosts know as the
    address `known_as`. What the user has set stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where the hard limit is none (macOS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if here >= world or master is None:
        return
    # Else each process opens a socket to each other one, for each of three groups.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    found = None if GLOO_INTERFACE in os.environ else interface_towards(master, known_as)
    if found is not None:
        os.environ[GLOO_INTERFACE] = found


def interface_towards(master: str, known_as: str | None = None) -> str | None:
    """Return the name of the interface whose address packets to `master` have, None where nothing
    leads there; on the master's own host that of the address that others know it as. Gloo would
    take what the hostname resolves to: 127.0.1.1 on Debian, or the network that manages the
    machines.
    """
    own = _address_towards(master)
    if own is None or not ipaddress.ip_address(own).is_loopback:
        return _interface_with(own)
    return _interface_with(known_as) or _interface_with(_address_towards(_OUTSIDE))


def _interface_with(address: str | None) -> str | None:
    for name, addresses in list_interfaces().items() if address else ():
        if address in addresses:
            return name
    return None


def list_interfaces() -> dict[str, list[str]]:
    """Return the addresses of this host's interfaces by name, of those that have any."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [one.address.partition("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def format_interfaces() -> str:
    """Return this host's interfaces in words: `lo 127.0.0.1, eth0 10.0.0.7`."""
    found = list_interfaces()
    shown = ", ".join(f"{name} {addresses[0]}" for name, addresses in [*found.items()][:_SHOWN])
    return shown + f" and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)


def interface_error(env: Mapping[str, str], *, nccl: bool) -> str:
    """Return what is wrong with the interfaces that the user chose, NCCL's only where that is used;
    empty where nothing is.
    """
    known = list_interfaces()
    chosen = [name for name in env.get(GLOO_INTERFACE, "").split(",") if name]
    wrong = "" if {*chosen} <= known.keys() else GLOO_INTERFACE
    # `^` leaves out, `=` asks for whole names, else names begin so; `:port` may follow.
    text = env.get(NCCL_INTERFACE, "") if nccl else ""
    without, text = text.startswith("^"), text.removeprefix("^")
    whole, text = text.startswith("="), text.removeprefix("=")
    parts = [part.partition(":")[0] for part in text.split(",") if part]
    fits = [n for n in known if any(n == p if whole else n.startswith(p) for p in parts)]
    if parts and not ({*known} - {*fits} if without else fits):
        wrong = wrong or NCCL_INTERFACE
    if not wrong:
        return ""
    return f"{wrong} is {env[wrong]}, which names no interface with an address here: {format_interfaces()}"


def _is_loopback(name: str) -> bool:
    addresses = list_interfaces().get(name.partition(",")[0], [])
    return bool(addresses) and all(ipaddress.ip_address(at).is_loopback for at in addresses)


def _resolved(host: str) -> str | None:
    """Return the address that this machine takes for `host`, None for one of its own loopback."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                found = str(probe.getpeername()[0]).partition("%")[0]
                return None if ipaddress.ip_address(found).is_loopback else found
    return None


def _address_towards(host: str) -> str | None:
    """Return the address that this machine has for `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                return probe.getsockname()[0].partition("%")[0]
    return None


def scope_store_to_start(
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


def format_restart() -> str | None:
    """Return the line that says that the launcher started this run again, None at its first."""
    count, most = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return None if count == "0" else f"restart    {count} of {most} by the launcher"
