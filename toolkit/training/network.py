"""What a process needs of its machine to reach many others: open files, and gloo's interface."""

import contextlib
import ipaddress
import os
import resource
import socket

import psutil

# An address that no machine has (RFC 5737): what leads to it leads outside.
_OUTSIDE = "192.0.2.1"
INTERFACE = "GLOO_SOCKET_IFNAME"


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
