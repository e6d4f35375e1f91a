"""Connect the processes of a run: locations, network interfaces, timeouts and clear errors."""

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

# An address that no machine has (RFC 5737). The interface towards it leads out of this machine.
_OUTSIDE = "192.0.2.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
SHARED_MEMORY = "/dev/shm"
_MAX_SLEEP = 0.5
# For ranks that are connected to the store to write and read a value.
_EXCHANGE_TIMEOUT = datetime.timedelta(minutes=1)
_ERROR_TIMEOUT = datetime.timedelta(seconds=5)
# Seconds to connect all processes, and one more for each 32 of them. A connection that takes longer
# will not succeed.
_CONNECT_SECONDS = 45.0
_MAX_LISTED = 12  # interfaces in an error


@dataclass(frozen=True)
class Location:
    """The position of a process among the processes and hosts of a run."""

    local_rank: int = 0
    local_world_size: int = 1
    hosts: int = 1
    """Number of hosts."""
    sharers: int = 1
    """Number of processes that use the same processors, including this one."""
    master: str | None = None
    """The address of rank 0's host, as other hosts know it; None if it is unknown."""


SINGLE = Location()


def exchange_and_decide(
    store: dist.Store,
    topic: str,
    local_value: Any,
    decide: Callable[[list[Any]], list[Any]],
    rank: int,
    world: int,
) -> Any:
    """Collect a value from each rank on rank 0, call `decide` there, and distribute its results.

    Collective. It uses only the store, so it works before the process group exists.

    Args:
        store: a store that all ranks have connected to.
        topic: name of the exchange; each name can be used once.
        local_value: this rank's value, of JSON types.
        decide: maps the list of all ranks' values to a list with a result for each rank.
        rank: this rank.
        world: number of ranks.

    Returns:
        The result for this rank.

    Raises:
        LaunchError: a rank did not take part within a minute, or `decide` raised a LaunchError on
            rank 0. In the latter case every rank raises it.
    """
    keys = [f"{topic}/{other}" for other in range(world)]
    result_key = f"{topic}/for-{rank}"
    error, results = "", list[Any]()
    store.set(keys[rank], json.dumps(local_value))
    try:
        if rank == 0:
            _poll_until(lambda: store.check(keys), _EXCHANGE_TIMEOUT)
            try:
                results = decide([json.loads(text) for text in store.multi_get(keys)])
            except LaunchError as decide_error:
                error, results = str(decide_error), [None] * world
            for other, result in enumerate(results):
                store.set(f"{topic}/for-{other}", json.dumps([error, result]))
        _poll_until(lambda: store.check([result_key]), _EXCHANGE_TIMEOUT)
    except RuntimeError as timeout_error:
        raise LaunchError(
            f"one of {world} processes ended or stopped before it sent its {topic} to the others; "
            f"its own message shows the cause ({timeout_error})"
        ) from timeout_error
    error, result = json.loads(store.get(result_key))
    if error:
        store.add(f"{topic}/heard", 1)
        # Rank 0 may own the store, so it stays until all ranks have read the error. Some ranks may
        # be gone already.
        with contextlib.suppress(RuntimeError):
            if rank == 0:
                _poll_until(lambda: store.add(f"{topic}/heard", 0) == world, _ERROR_TIMEOUT)
        raise LaunchError(error)
    return result


def exchange_locations(store: dist.Store, rank: int, world: int, *, nccl: bool) -> Location:
    """Exchange host names and local ranks with the other processes. Collective.

    Args:
        store: a store that all ranks have connected to.
        rank: this rank.
        world: number of ranks.
        nccl: also check the interface that the user has set for NCCL.

    Returns:
        The location of this process.

    Raises:
        LaunchError: a process did not take part, or its interface settings do not match its host.
    """
    local_rank, is_reliable = launchers.read_local_rank()
    master = os.environ.get("MASTER_ADDR")
    report = {
        "name": socket.gethostname(),
        "host": ranks.host_id(),
        "local_rank": local_rank,
        "is_reliable": is_reliable,
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        "cores": f"{sum(1 << core for core in ranks.available_cores()):x}",
        "master": master and _resolve_address(master),
        "loopback": _is_loopback(os.environ.get(GLOO_INTERFACE, "")),
        "error": explain_interface_error(os.environ, nccl=nccl),
    }
    location = exchange_and_decide(store, "location", report, assign_locations, rank, world)
    return Location(**location)


def assign_locations(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute the location of each process from the reports of all processes.

    The local ranks of a host are those that the launcher set, if they are usable. Otherwise the
    host's processes are numbered in the order of their ranks.

    Args:
        reports: the report that `exchange_locations` builds on each rank, in rank order.

    Returns:
        The fields of `Location` for each rank.

    Raises:
        LaunchError: the interface settings of a process do not match its host.
    """
    ranks_by_host = defaultdict[str, list[int]](list)
    processes_by_cores = defaultdict[tuple[str, str], int](int)
    for rank, report in enumerate(reports):
        ranks_by_host[report["host"]].append(rank)
        processes_by_cores[report["host"], report["cores"]] += 1
    hosts = len(ranks_by_host)
    for report in reports:
        error = report["error"]
        if report["loopback"] and not error and hosts > 1:
            error = f"{GLOO_INTERFACE} is a loopback interface, which leads to no other host"
        if error:
            raise LaunchError(f"{error} (on {report['name']}, of {hosts} host(s))")
    master = next((report["master"] for report in reports if report["master"]), None)
    locations = []
    for rank, report in enumerate(reports):
        host_ranks = ranks_by_host[report["host"]]
        local_ranks = [reports[other]["local_rank"] for other in host_ranks]
        is_reliable = all(reports[other]["is_reliable"] for other in host_ranks)
        is_usable = None not in local_ranks and len({*local_ranks}) == len(host_ranks)
        use_reported = is_reliable or is_usable
        locations.append(
            {
                "local_rank": report["local_rank"] if use_reported else host_ranks.index(rank),
                "local_world_size": report["local_world_size"] or len(host_ranks),
                "hosts": hosts,
                "sharers": processes_by_cores[report["host"], report["cores"]],
                "master": master,
            }
        )
    return locations


def create_process_group(
    store: dist.Store,
    rank: int,
    world: int,
    location: Location,
    device: torch.device | None,
    timeout: datetime.timedelta,
    seconds: float | None = None,
) -> None:
    """Create the default process group, and open all connections that step 1 needs. Collective.

    A sum over the ranks checks the connections.

    Args:
        store: a store that all ranks have connected to.
        rank: this rank.
        world: number of ranks.
        location: result of `exchange_locations`.
        device: the accelerator of this process; None: CPU.
        timeout: timeout of later collectives.
        seconds: seconds for connecting (`train.connect_seconds`); None: 45, and one more for each
            32 processes.

    Raises:
        LaunchError: connecting fails, or takes longer.
    """
    backends = "gloo"
    device_backend = "gloo"
    device_id = None
    # The backend that is being connected, for the error.
    current_backend = ["gloo"]
    if device is not None:
        device_backend = dist.get_default_backend_for_device(device.type)
        # Gloo carries objects, offloaded gradients and everything that must not wait inside NCCL.
        backends = f"cpu:gloo,{device.type}:{device_backend}"
        # Only NCCL splits groups, for which it needs the device.
        device_id = device if device.type == "cuda" else None
    # A mesh's groups are split off with NCCL's options; gloo warns that it uses its own.
    warnings.filterwarnings("ignore", message="Tried to pass options to ProcessGroupGloo::split")

    def work() -> None:
        ids: Any = {"store": store, "rank": rank, "world_size": world, "device_id": device_id}
        dist.init_process_group(backends, timeout=timeout, **ids)
        # Gloo connects at its first use.
        if location.local_world_size < world:
            dist.all_reduce(torch.zeros(1), group=ranks.world_group())
        ranks.node_indices()
        if device is not None and world > 1:
            current_backend[0] = device_backend
            total = torch.ones(1, device=device)
            dist.all_reduce(total, group=ranks.world_group())
            if (value := total.item()) != world:
                raise RuntimeError(f"the sum of ones over {world} processes is {value:g}")

    limit = _CONNECT_SECONDS + world / 32 if seconds is None else seconds
    try:
        position = run_with_timeout(limit, work)
        cause = position and (
            f"not connected after {limit:.0f} s, at {position} (train.connect_seconds sets the "
            "time)"
        )
        original_error = None
    except (RuntimeError, ValueError) as error:
        cause, original_error = one_line(error, 600), error
    if cause:
        is_nccl = current_backend[0] != "gloo" or "NCCL" in cause or "eager_connect" in cause
        has_other_hosts = location.local_world_size < world
        advice = _advise_nccl(device_backend) if is_nccl else _advise_gloo(has_other_hosts)
        raise LaunchError(
            f"process {rank} of {world} found the others, but did not connect to them over "
            f"{device_backend if is_nccl else 'gloo'}: {cause}; {advice}"
        ) from original_error


def _advise_gloo(has_other_hosts: bool) -> str:
    """Describe the interface that gloo uses, as advice in an error about its connections."""
    advice = "gloo uses the interface of the hostname"
    if has_other_hosts:
        setting = os.environ.get(GLOO_INTERFACE, "not set: that of the hostname")
        advice = f"between machines gloo uses the interface {GLOO_INTERFACE} ({setting})"
    return f"{advice}; this host has {format_interfaces()}"


def _advise_nccl(backend: str) -> str:
    """Describe NCCL's interface and shared memory, as advice in an error about its connections."""
    names = (NCCL_INTERFACE, "NCCL_IB_HCA")
    settings = ", ".join(f"{name} ({os.environ.get(name, 'not set')})" for name in names)
    free = f"{free_shared_memory_bytes() / 1e6:.0f} MB of {SHARED_MEMORY} (--shm-size)"
    return (
        f"{backend} connects hosts over {settings} and devices of one host through {free}; "
        f"NCCL_DEBUG=INFO shows details; this host has {format_interfaces()}"
    )


def free_shared_memory_bytes() -> float:
    """Return the free bytes of /dev/shm; infinity if this system has no /dev/shm."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return math.inf


def format_hosts(location: Location, world: int) -> str | None:
    """Format a log line with the number of hosts and gloo's interface; None for one host."""
    if location.hosts == 1:
        return None
    interface = os.environ.get(GLOO_INTERFACE, "that of the hostname")
    return (
        f"hosts      {location.hosts}, {location.local_world_size} of {world} ranks on this one; "
        f"gloo over {interface}"
    )


def run_with_timeout(seconds: float, work: Callable[[], None]) -> str:
    """Run `work` in a thread, wait for at most `seconds`, and raise its error if it failed.

    A thread is needed because calls that wait inside gloo or NCCL ignore timeouts and signals.

    Returns:
        An empty string if `work` has returned. Otherwise the source line that `work` executes. In
        this case the thread continues, and the process should end.
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


def prepare_sockets(
    world: int, local_world_size: int, master: str | None, master_address: str | None = None
) -> None:
    """Raise the limit of open files, which includes sockets, and choose gloo's interface.

    With several hosts, sets the variables TORCH_GLOO_LAZY_INIT and GLOO_SOCKET_IFNAME, unless the
    user has set them.

    Args:
        world: number of processes.
        local_world_size: number of processes on this host.
        master: host name or address of rank 0 (MASTER_ADDR).
        master_address: address of rank 0's host, as other hosts know it.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS has no hard limit, and refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    if local_world_size >= world or master is None:
        return
    # By default each process opens a socket to each other process, for each of three groups.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if GLOO_INTERFACE not in os.environ:
        interface = find_interface_towards(master, master_address)
        if interface is not None:
            os.environ[GLOO_INTERFACE] = interface


def find_interface_towards(master: str, master_address: str | None = None) -> str | None:
    """Find the network interface through which this host sends packets to `master`.

    By default gloo would use the address of the hostname: 127.0.1.1 on Debian, or an address in the
    management network.

    Args:
        master: host name or address of rank 0.
        master_address: address of rank 0's host as other hosts know it. It is used on that host
            itself, whose packets to `master` would take the loopback.

    Returns:
        Name of the interface; None if none is found.
    """
    address = _find_source_address(master)
    if address is None or not ipaddress.ip_address(address).is_loopback:
        return _find_interface_with(address)
    return _find_interface_with(master_address) or _find_interface_with(
        _find_source_address(_OUTSIDE)
    )


def _find_interface_with(address: str | None) -> str | None:
    """Return the name of the interface that has an IP address; None if no interface has it."""
    for name, addresses in list_interfaces().items() if address else ():
        if address in addresses:
            return name
    return None


def list_interfaces() -> dict[str, list[str]]:
    """Map the name of each network interface of this host to its IP addresses.

    Interfaces without an IP address are omitted.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: texts for name, texts in addresses.items() if texts}


def format_interfaces() -> str:
    """Format up to 12 interfaces with their first address: `lo 127.0.0.1, eth0 10.0.0.7`."""
    addresses = list_interfaces()
    texts = [f"{name} {values[0]}" for name, values in addresses.items()]
    hidden = len(texts) - _MAX_LISTED
    return ", ".join(texts[:_MAX_LISTED]) + (f" and {hidden} more" if hidden > 0 else "")


def explain_interface_error(env: Mapping[str, str], *, nccl: bool) -> str:
    """Explain which interface setting of the user matches no interface of this host.

    Args:
        env: environment variables.
        nccl: check NCCL_SOCKET_IFNAME in addition to GLOO_SOCKET_IFNAME.

    Returns:
        The explanation; empty if the settings match or are not set.
    """
    available = list_interfaces()
    gloo_names = [name for name in env.get(GLOO_INTERFACE, "").split(",") if name]
    wrong_setting = "" if {*gloo_names} <= available.keys() else GLOO_INTERFACE
    # NCCL's syntax: `^` excludes interfaces, `=` requires exact names, otherwise the parts are
    # prefixes; `:port` may follow.
    text = env.get(NCCL_INTERFACE, "") if nccl else ""
    is_exclusion, text = text.startswith("^"), text.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    parts = [part.partition(":")[0] for part in text.split(",") if part]
    matches = [n for n in available if any(n == p if is_exact else n.startswith(p) for p in parts)]
    if parts and not ({*available} - {*matches} if is_exclusion else matches):
        wrong_setting = wrong_setting or NCCL_INTERFACE
    if not wrong_setting:
        return ""
    return (
        f"{wrong_setting} is {env[wrong_setting]}, which names no interface with an address on "
        f"this host: {format_interfaces()}"
    )


def _is_loopback(name: str) -> bool:
    """Return True if the first of the interfaces in `name` has only loopback addresses.

    Args:
        name: names of interfaces, separated by commas.
    """
    addresses = list_interfaces().get(name.partition(",")[0], [])
    return bool(addresses) and all(ipaddress.ip_address(at).is_loopback for at in addresses)


def _resolve_address(host: str) -> str | None:
    """Return the IP address of `host`; None if it is unknown or a loopback.

    Sends no packets to the host.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                address = str(probe.getpeername()[0]).partition("%")[0]
                return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _find_source_address(host: str) -> str | None:
    """Return the address from which this host would send packets to `host`; None if unknown.

    Sends no packets to it.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                return probe.getsockname()[0].partition("%")[0]
    return None


def scope_store_to_start(
    store: dist.Store, rank: int, world: int, timeout: datetime.timedelta
) -> dist.PrefixStore:
    """Wrap `store` with a prefix that only the processes of this start share. Collective.

    A launcher that restarts its ranks keeps its store. In the bare store the new ranks would find
    the addresses of processes that are gone, and wait for them (torch 2.13, its issue 135712). The
    launcher's restart count cannot separate the starts, because the agent of each machine has its
    own count.

    So rank 0 gives its start a number, and every other rank registers in the newest start. A rank
    that is already registered there was registered by an earlier process, so it waits for the next
    start. Costs a few round trips per rank.

    Raises:
        RuntimeError: not all ranks registered within `timeout`.
    """
    # Numbers of starts: the newest one, and the one in which this rank is registered.
    newest_start = joined_start = 0

    def is_complete() -> bool:
        return store.check([f"start-{joined_start}/rank-{other}" for other in range(1, world)])

    def join() -> bool:
        nonlocal newest_start, joined_start
        newest = store.add("starts", 0)
        if newest > newest_start:
            newest_start = newest
            is_first = store.add(f"start-{newest}/rank-{rank}", 1) == 1
            joined_start = newest if is_first else 0
        return joined_start > 0 and store.check([f"start-{joined_start}/complete"])

    if rank == 0:
        joined_start = store.add("starts", 1)
        if world > 1:
            _poll_until(is_complete, timeout)
        store.set(f"start-{joined_start}/complete", "")
    else:
        _poll_until(join, timeout)
    return dist.PrefixStore(f"start-{joined_start}", store)


def _poll_until(is_done: Callable[[], bool], timeout: datetime.timedelta) -> None:
    """Call `is_done` until it returns True, with growing pauses of up to 0.5 s.

    It is used because the store's own wait ignores signals.

    Raises:
        RuntimeError: `timeout` is over.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    sleep_seconds = 0.01
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks arrived within {timeout}")
        time.sleep(sleep_seconds)
        sleep_seconds = min(2 * sleep_seconds, _MAX_SLEEP)


def format_restart() -> str | None:
    """Format a log line with the number of restarts by torch's agent; None at the first start."""
    count, limit = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return None if count == "0" else f"restart    {count} of {limit} by the launcher"
