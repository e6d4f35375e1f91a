"""Watchdog: when a rank dies or none makes progress, end all ranks and report the cause.

Each rank has a process beside it (`watcher`), which works when the rank does not. The rank shares
its progress with that in memory, which takes microseconds, and does in a thread what it is told.
"""

import datetime
import faulthandler
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path

import torch

from toolkit import ranks
from toolkit.errors import LaunchError, one_line
from toolkit.training.guards import watcher

_PATIENT = 12  # times train.hang_seconds: outside of steady steps
_COLLECTIVE = 600.0  # seconds until NCCL aborts one of a step, at least
_DEBUGGER = datetime.timedelta(days=1)
_VERDICT = 5.0  # seconds until a rank that lost another one speaks for itself
_CONNECTED = 60.0  # seconds to reach rank 0's host


class _Watch:
    """This rank's side of its watcher."""

    def __init__(self, patience: float, folder: Path, busy: Callable[[], bool]) -> None:
        self.patience, self.busy, self.alone = patience, busy, ranks.world_size() == 1
        self.count, self.doing = 0, "start"
        self.code, self.why = watcher.RUNS, ""  # that this rank ends with
        self.verdict: int | None = None
        self.judged = threading.Event()
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (held to the end)
        self.file.truncate(watcher.BEAT.size)  # what is shared; the stacks are appended
        self.file.seek(watcher.BEAT.size)
        self.shared = mmap(self.file.fileno(), watcher.BEAT.size)
        self.progress()
        faulthandler.register(watcher.DUMP_SIGNAL, self.file, all_threads=True)
        self._start(folder)
        threading.Thread(target=self._obey, name="watchdog", daemon=True).start()

    def _start(self, folder: Path) -> None:
        """Start the watcher with a connection to the judge. Collective."""
        rank, one_host = ranks.rank(), len({*ranks.node_indices()}) == 1
        self.judges = rank == 0  # its watcher lives as long as any other
        sockets = list[socket.socket]()  # the watcher's

        def listen() -> tuple[int, str]:
            both = not one_host and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            at = ("127.0.0.1" if one_host else "", 0)
            sockets.append(
                socket.create_server(at, family=family, backlog=4096, dualstack_ipv6=both)
            )
            return sockets[0].getsockname()[1], secrets.token_hex(16)

        def start() -> None:
            host = "127.0.0.1" if one_host or rank == 0 else os.environ["MASTER_ADDR"]
            try:
                sockets.append(socket.create_connection((host, port), _CONNECTED))
                sockets[-1].sendall(f"{secret}\n".encode())
            except OSError as error:
                raise LaunchError(
                    f"the watchdog of rank {rank} does not reach rank 0's: {error}; ranks must "
                    "reach any port of rank 0's host; train.hang_seconds 0 goes without"
                ) from error
            descriptors = [one.fileno() for one in reversed(sockets)]
            about = json.dumps([os.getpid(), rank, str(folder), *descriptors])
            self.watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, about],
                env={**os.environ, watcher.SECRET: secret},  # others of a host read command lines
                stdin=self.file,
                stdout=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is not for it
            )
            for one in sockets:
                one.close()

        port, secret = ranks.on_main(listen)
        ranks.on_all(start)

    def progress(self) -> None:
        self.count += 1
        steady = self.doing.startswith(watcher.IN_STEP)
        patience = self.patience * (1 if steady else _PATIENT)
        texts = self.doing.encode(), self.why.encode()  # what is too long is cut off
        watcher.BEAT.pack_into(self.shared, 0, self.count, patience, self.code, *texts)

    def _obey(self) -> None:
        """Do what the watcher says, until it is gone."""
        for line in self.watcher.stdout or ():
            order = json.loads(line)
            if "leave" in order:
                self._leave(**order)
            os.write(self.file.fileno(), _collectives().encode())
        if self.code == watcher.RUNS:  # it was killed, for which the judge ends the others
            self._leave(1, 0.0, watcher.LOST)

    def _leave(self, leave: int, grace: float, finish: float) -> None:
        """End this process, unless it does so within the grace; a checkpoint may finish."""
        self.verdict = leave
        self.judged.set()
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < grace or (self.busy() and waited < finish):
            self.progress()  # the watcher kills a rank that cannot leave
            time.sleep(0.1)
        sys.stdout.flush()
        os._exit(leave if self.code == watcher.RUNS else self.code)


_watch: _Watch | None = None


def start(patience: float, folder: Path, busy: Callable[[], bool]) -> None:
    """Watch this rank from here to `end`; with a `patience` of 0 not at all. Collective.

    Costs a process of some 10 MB a rank. LaunchError: a rank cannot reach rank 0's host.

    Args:
        patience: seconds in which all ranks may stand still in steady steps; elsewhere 12 times as
            long, and bytes that flow are progress, too.
        folder: the report of a hang is written there.
        busy: whether a checkpoint is written behind the loop, which gets the time to become whole.
    """
    global _watch
    report_exit(0)  # an earlier run in this process
    _watch = None
    if patience > 0:
        _watch = _Watch(patience, folder, busy)
    else:
        ranks.set_timeouts(_DEBUGGER)


def report_progress() -> None:
    """Say that this rank makes progress. Takes some two microseconds."""
    if _watch is not None:
        _watch.progress()


def set_activity(what: str) -> None:
    """Say what this rank does from here on; in `step N` less time may pass without progress. From
    the first one on, collectives on accelerators wait for twice as long as the watchdog, which
    tells more than NCCL, which aborts.
    """
    if _watch is None:
        return
    first = _watch.doing == "start" and what.startswith(watcher.IN_STEP)
    if first and torch.accelerator.is_available():
        seconds = max(_COLLECTIVE, 2 * _watch.patience)
        ranks.set_timeouts(datetime.timedelta(seconds=seconds))
    _watch.doing = what
    _watch.progress()


@contextmanager
def extend_timeout(what: str) -> Iterator[None]:
    """Let the block take 12 times as long."""
    before = "" if _watch is None else _watch.doing
    set_activity(what)
    try:
        yield
    finally:
        set_activity(before)


def report_exit(code: int, why: str = "") -> None:
    """Tell the others that this rank ends with an exit code; `why`, where it has not said so. One
    process alone may go on in something else (a notebook): nobody watches it any more.
    """
    global _watch
    if (watch := _watch) is None or watch.code != watcher.RUNS:
        return
    watch.code, watch.why = (0 if watch.alone else code), why
    watch.progress()
    _watch = None if watch.alone else watch
    if code == 0 and watch.judges and not watch.alone:
        watch.watcher.wait()  # for the last rank: one that dies while others end is told, too


def wait_for_verdict() -> int | None:
    """Return the exit code that the watchdog gives this rank, which is about to end, once it has
    said why the run ends; None where it does not within some seconds.
    """
    if _watch is not None:
        _watch.judged.wait(_VERDICT)
        return _watch.verdict
    return None


def _collectives() -> str:
    """Return NCCL's collectives that are not done, as torch's flight recorder has them."""
    # Private in torch 2.x, and the only way to ask; without it torch's own dump is left.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_initialized():
        return ""
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    except Exception as error:  # the stacks count more
        entries = [one_line(error)]
    return "\n".join(["-- collectives that are not done:", *map(json.dumps, entries[:20]), ""])
