"""Ask once if the Hub can be reached: its client would retry each file for 30 seconds."""

import functools
import os
import socket
import sys
import urllib.request
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants

_PATIENCE = 3.0  # seconds


@functools.cache
def why_unreachable() -> str:
    """Return why the Hub cannot be asked; empty where it can, or where HF_HUB_OFFLINE forbids it.
    Where it does not answer, this process uses what the cache holds from now on.
    """
    if huggingface_hub.is_offline_mode() or urllib.request.getproxies().keys() & {"https", "all"}:
        return ""  # a proxy answers for others
    url = urlsplit(constants.ENDPOINT)
    address = url.hostname or "", url.port or {"http": 80}.get(url.scheme, 443)
    try:
        with socket.create_connection(address, timeout=_PATIENCE):
            return ""
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{address[0]} cannot be reached ({error.strerror or error})"


@functools.cache
def say_unreachable() -> None:
    """Say once, where it is so, that only what the cache holds is used."""
    if (why := why_unreachable()) and os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {why}: only what the cache holds is used", file=sys.stderr, flush=True)
