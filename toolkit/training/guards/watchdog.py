"""Watchdog: if a rank dies or no rank makes progress, end all ranks and report the cause.

Each rank has a second process (`watcher`) that still works when the rank does not. The rank shares
its progress with the watcher in memory, which takes microseconds, and carries out the watcher's
orders in a thread.
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

_SLOW_FACTOR = 12  # outside of steady steps the timeout is this many times train.hang_seconds
_MIN_COLLECTIVE_SECONDS = 600.0  # NCCL aborts no collective of a step before this time
_DEBUGGER_TIMEOUT = datetime.timedelta(days=1)
_VERDICT_SECONDS = 5.0  # a rank that lost another one waits this long for the watchdog's report
_CONNECT_SECONDS = 60.0  # to reach rank 0's host


class _Watch:
    """Connects this rank to its watcher process, and carries out the watcher's orders in a thread.

    Creating it starts the watcher, and is collective.

    Args:
        timeout: seconds without progress on all ranks, during steps, after which the run hangs.
        folder: folder for the report of a hang.
        is_busy: returns True while a checkpoint is written in the background.
    """

    def __init__(self, timeout: float, folder: Path, is_busy: Callable[[], bool]) -> None:
        self.timeout = timeout
        self.is_busy = is_busy
        self.is_single = ranks.world_size() == 1
        self.progress_count = 0
        self.activity = "start"
        # The exit code of this rank and its reason, once it ends.
        self.exit_code = watcher.RUNNING
        self.exit_reason = ""
        self.verdict: int | None = None
        self.has_verdict = threading.Event()
        # The first bytes of the file are shared memory; stacks are appended behind them.
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open until the end)
        self.file.truncate(watcher.BEAT.size)
        self.file.seek(watcher.BEAT.size)
        self.shared = mmap(self.file.fileno(), watcher.BEAT.size)
        self.report_progress()
        faulthandler.register(watcher.DUMP_SIGNAL, self.file, all_threads=True)
        self._start_watcher(folder)
        threading.Thread(target=self._follow_orders, name="watchdog", daemon=True).start()

    def _start_watcher(self, folder: Path) -> None:
        """Start the watcher process, connected to the judge in rank 0's watcher. Collective.

        Args:
            folder: folder for the report of a hang.

        Raises:
            LaunchError: a rank cannot connect to rank 0's host.
        """
        rank, one_host = ranks.rank(), len({*ranks.node_indices()}) == 1
        # The watcher of rank 0 contains the judge, and lives as long as any other watcher.
        self.has_judge = rank == 0
        # Sockets that the watcher inherits.
        sockets = list[socket.socket]()

        def listen() -> tuple[int, str]:
            dual_stack = not one_host and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual_stack else socket.AF_INET
            address = ("127.0.0.1" if one_host else "", 0)
            sockets.append(
                socket.create_server(
                    address, family=family, backlog=4096, dualstack_ipv6=dual_stack
                )
            )
            return sockets[0].getsockname()[1], secrets.token_hex(16)

        def start() -> None:
            host = "127.0.0.1" if one_host or rank == 0 else os.environ["MASTER_ADDR"]
            try:
                sockets.append(socket.create_connection((host, port), _CONNECT_SECONDS))
                sockets[-1].sendall(f"{secret}\n".encode())
            except OSError as error:
                raise LaunchError(
                    f"the watchdog of rank {rank} cannot reach the watchdog of rank 0: {error}; "
                    "ranks must reach any port of rank 0's host; train.hang_seconds: 0 turns the "
                    "watchdog off"
                ) from error
            descriptors = [s.fileno() for s in reversed(sockets)]
            arguments = json.dumps([os.getpid(), rank, str(folder), *descriptors])
            self.watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, arguments],
                # Not as an argument: other users of the host can read command lines.
                env={**os.environ, watcher.SECRET: secret},
                stdin=self.file,
                stdout=subprocess.PIPE,
                pass_fds=descriptors,
                # In a separate session, so that Ctrl-C does not reach the watcher.
                start_new_session=True,
            )
            for s in sockets:
                s.close()

        port, secret = ranks.on_main(listen)
        ranks.on_all(start)

    def report_progress(self) -> None:
        """Increase the progress count, and share this rank's state with the watcher.

        The state is the count, the current timeout, the activity, the exit code and its reason.
        """
        self.progress_count += 1
        is_steady = self.activity.startswith(watcher.IN_STEP)
        timeout = self.timeout * (1 if is_steady else _SLOW_FACTOR)
        # Texts that are too long are cut off.
        texts = self.activity.encode(), self.exit_reason.encode()
        watcher.BEAT.pack_into(self.shared, 0, self.progress_count, timeout, self.exit_code, *texts)

    def _follow_orders(self) -> None:
        """Carry out the watcher's orders until the watcher ends; then end this process, too.

        There are two orders: write the unfinished collectives, or end the process.
        """
        for line in self.watcher.stdout or ():
            order = json.loads(line)
            if "leave" in order:
                self._end_process(**order)
            os.write(self.file.fileno(), _describe_collectives().encode())
        # Without its watcher this rank is not watched, so the judge ends the other ranks.
        if self.exit_code == watcher.RUNNING:
            self._end_process(1, 0.0, watcher.LOST_SECONDS)

    def _end_process(self, leave: int, grace: float, finish: float) -> None:
        """End this process with the exit code `leave`, unless it has set an exit code already.

        Then that code is used. First wait `grace` seconds, in which the process may end by itself.
        While a checkpoint is written in the background, wait up to `finish` seconds.
        """
        self.verdict = leave
        self.has_verdict.set()
        start = time.monotonic()
        while (waited := time.monotonic() - start) < grace or (self.is_busy() and waited < finish):
            # Without progress, the watcher would kill this rank.
            self.report_progress()
            time.sleep(0.1)
        sys.stdout.flush()
        os._exit(leave if self.exit_code == watcher.RUNNING else self.exit_code)


_watch: _Watch | None = None


def start(timeout: float, folder: Path, is_busy: Callable[[], bool]) -> None:
    """Start to watch this rank until `report_exit`. Collective.

    Costs one process of about 10 MB per rank. If this process is watched already, that watch ends.

    Args:
        timeout: seconds after which the run counts as hanging if no rank makes progress during
            steps. Outside of steps the limit is 12 times as long, and file traffic counts as
            progress. 0: do not watch, and set the timeout of collectives to one day.
        folder: folder for the report of a hang.
        is_busy: returns True while a checkpoint is written in the background. Before a rank is
            ended, the checkpoint gets up to five minutes, or 15 s if a rank is gone.

    Raises:
        LaunchError: a rank cannot reach rank 0's host.
    """
    global _watch
    # An earlier run in this process may still be watched.
    report_exit(0)
    _watch = None
    if timeout > 0:
        _watch = _Watch(timeout, folder, is_busy)
    else:
        ranks.set_timeouts(_DEBUGGER_TIMEOUT)


def report_progress() -> None:
    """Tell the watchdog that this rank makes progress. Takes about two microseconds.

    Does nothing if the rank is not watched.
    """
    if _watch is not None:
        _watch.report_progress()


def set_activity(activity: str) -> None:
    """Tell the watchdog what this rank does from now on. This counts as progress.

    During the activity `step N` the limit without progress is `timeout` seconds, otherwise 12 times
    as long. At the first step, collectives on accelerators get a timeout of twice the watchdog's,
    at least 10 minutes. So the watchdog, which reports more than NCCL, acts before NCCL aborts.
    """
    if _watch is None:
        return
    is_first_step = _watch.activity == "start" and activity.startswith(watcher.IN_STEP)
    if is_first_step and torch.accelerator.is_available():
        seconds = max(_MIN_COLLECTIVE_SECONDS, 2 * _watch.timeout)
        ranks.set_timeouts(datetime.timedelta(seconds=seconds))
    _watch.activity = activity
    _watch.report_progress()


@contextmanager
def extend_timeout(activity: str) -> Iterator[None]:
    """Within the block, report another activity, for which the timeout is 12 times as long.

    Afterwards the previous activity is restored.
    """
    outer_activity = "" if _watch is None else _watch.activity
    set_activity(activity)
    try:
        yield
    finally:
        set_activity(outer_activity)


def report_exit(code: int, reason: str = "") -> None:
    """Tell the watchdog that this rank ends with an exit code. Only the first call has an effect.

    In a run with one process, watching ends, because the program (a notebook) may continue. In
    other runs, if `code` is 0, rank 0's process waits here until the last rank has ended.

    Args:
        code: the exit code.
        reason: the cause, which the watchdog prints; empty if the rank has printed it.
    """
    global _watch
    if (watch := _watch) is None or watch.exit_code != watcher.RUNNING:
        return
    watch.exit_code = 0 if watch.is_single else code
    watch.exit_reason = reason
    watch.report_progress()
    _watch = None if watch.is_single else watch
    if code == 0 and watch.has_judge and not watch.is_single:
        # The judge stays until the last rank has ended, to report a rank that dies meanwhile.
        watch.watcher.wait()


def wait_for_verdict() -> int | None:
    """Wait up to 5 s for the watchdog's decision to end the run, after another rank was lost.

    Returns:
        The exit code that this rank should use. None if there is no decision within that time, or
        if the rank is not watched.
    """
    if _watch is not None:
        _watch.has_verdict.wait(_VERDICT_SECONDS)
        return _watch.verdict
    return None


def _describe_collectives() -> str:
    """List up to 20 unfinished NCCL collectives from torch's flight recorder, as text.

    The text is empty without CUDA.
    """
    # Private in torch 2.x, and the only way to read it. Without it, torch's own dump remains.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None or not torch.cuda.is_initialized():
        return ""
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    except Exception as error:  # the stacks are more important than the collectives
        entries = [one_line(error)]
    return "\n".join(["-- collectives that are not done:", *map(json.dumps, entries[:20]), ""])
