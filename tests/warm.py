"""A process that has everything imported and forks one rank of a test at a time, as it is asked to.

Importing torch, transformers and the toolkit takes five seconds of a processor, a fork a few
milliseconds. Ranks that are forked from one process hash alike: they walk through a set in the same
order, which real ranks do not. So ranks 0 and 1 have a process each that has imported for itself,
and the others have forks of these two.

Run as a program, with the number of a socket. Owns that protocol; knows nothing of what is run.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy

WARM = (
    *(
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    ),
    *("pytest", "transformers", "datasets", "accelerate", "peft", "torch._dynamo"),
    *(
        "toolkit.checkpoint",
        "toolkit.export",
        "toolkit.hub",
        "toolkit.loading.pretrained",
        "toolkit.planning",
        "toolkit.training.step",
    ),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto"),
)
"""Imported before a fork: whatever most of the tests need in their ranks. None starts a thread that
does not live through a fork."""


class Warm:
    """The parent's side: one process, and the rank that it runs at the moment."""

    pid: int  # of the rank

    def __init__(self, source: "Warm | None" = None) -> None:
        """Start a process that imports for itself, or a fork of `source`, which runs nothing now
        and is to be closed after it.
        """
        self._socket, theirs = socket.socketpair()
        if source is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        else:
            self._process = None
            socket.send_fds(source._socket, [struct.pack("<Q", 0)], [theirs.fileno()])
            self._fork = int(source._received(8))
        theirs.close()

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call `fn(*args)` in a fork, whose output goes where this process's goes now."""
        place = (dict(os.environ), sys.path, sys.argv, os.getcwd())
        request = pickle.dumps((place, fn.__module__, fn.__qualname__, pickle.dumps(args)))
        sys.stdout.flush()
        sys.stderr.flush()
        socket.send_fds(self._socket, [struct.pack("<Q", len(request))], [1, 2])
        self._socket.sendall(request)
        self.pid = int(self._received(8))

    def send(self, number: int) -> None:
        """Send the rank a signal, unless it has ended and the process has seen that already."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def fileno(self) -> int:
        """Return what becomes readable when the rank has ended."""
        return self._socket.fileno()

    def ended(self) -> int:
        """Wait until the rank has ended; return its exit code, a signal's negative."""
        return int(self._received(8))

    def close(self) -> None:
        """End the process, and what it runs."""
        self._socket.close()
        if self._process is None:
            os.kill(self._fork, signal.SIGKILL)
        else:
            self._process.kill()
            self._process.wait()

    def _received(self, count: int) -> bytes:
        return _received(self._socket, count)


def _received(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise EOFError("the other side is gone")
        content += part
    return content


def _serve(connection: socket.socket) -> None:
    _end_with_the_parent()
    for name in WARM:
        importlib.import_module(name)
    _make_what_is_made_once()
    give_forks_a_thread_pool()
    gc.collect()
    gc.freeze()  # half a million objects, which a collection in a fork would take 0.4 s for
    while True:
        head, outputs, _, _ = socket.recv_fds(connection, 8, 2)
        if not head:
            return
        request = _received(connection, struct.unpack("<Q", head)[0])
        child = os.fork()
        if child == 0:
            connection.close()
            if request:
                _run(request, outputs)
            _end_with_the_parent()
            connection = socket.socket(fileno=outputs[0])
            continue
        for descriptor in outputs:
            os.close(descriptor)
        connection.sendall(b"%8d" % child)
        if not request:  # which goes on by itself
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(b"%8d" % code)


def _make_what_is_made_once() -> None:
    """Make what the first use makes, in every fork anew: 0.3 s for 900 regular expressions of
    transformers, 0.2 s for a recipe's parser.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from toolkit.config import FinetuneConfig, PretrainConfig
    from toolkit.config.parse import config_parser

    get_checkpoint_conversion_mapping("llama")
    for settings in (PretrainConfig, FinetuneConfig):
        config_parser(settings)


def _run(request: bytes, outputs: list[int]) -> None:
    """Do what a request says, in the fork, which ends here."""
    code = 1
    try:
        _end_with_the_parent()
        for to, descriptor in zip((1, 2), outputs, strict=True):
            os.dup2(descriptor, to)
            os.close(descriptor)
        (environment, sys.path, sys.argv, folder), module, name, args = pickle.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        numpy.random.seed()  # as a fresh process; `random` does so by itself
        getattr(importlib.import_module(module), name)(*pickle.loads(args))
        code = 0
    except SystemExit as stop:  # as of a program that has printed its help
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def give_forks_a_thread_pool() -> None:
    """Let every fork of this process make torch's thread pool before it starts a thread.

    A fork throws the parent's pool away at the first parallel operation. Where a second thread has
    one at that moment it finds none: "INTERNAL ASSERT FAILED at ParallelOpenMP.cpp: Invalid thread
    pool!", in torch 2.13, seen in 4 of 5 forks in which eight threads begin at once.
    """
    import torch

    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def _end_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
