"""No rank waits in vain: where one is gone or none gets on, all end, and the cause is told.

Each rank has a process beside it (`watcher`). The rank counts in shared memory that it gets on,
which costs a microsecond, and answers in a thread of its own: with its stacks when nobody gets on,
and by leaving when the run is over.
"""

import datetime
import faulthandler
import json
import linecache
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from toolkit import ranks
from toolkit.errors import LaunchError, one_line
from toolkit.training.guards import watcher

_PATIENT = 12  # times train.hang_seconds: outside of steady steps
_SLOWEST = 10  # times the slowest step of late, where that is longer
_FORGET = 0.9  # of the slowest step's seconds that are left after the next: one stall is no rule
_COLLECTIVE = datetime.timedelta(minutes=10)  # of a step, at least; NCCL then aborts
_DEBUGGER = datetime.timedelta(days=1)
_LET_FINISH = 300.0  # seconds for a checkpoint in flight
_LOST = 15.0  # seconds for one that may want a rank that is gone
_VERDICT = 5.0  # seconds until a rank that lost another one speaks for itself
_STARTED = 60.0  # seconds for a watcher to start and reach rank 0's
_FRAMES = 60


class _Watch:
    """This rank's side of its watcher."""

    def __init__(self, patience: float, folder: Path, busy: Callable[[], bool]) -> None:
        self.patience, self.busy, self.world = patience, busy, ranks.world_size()
        self.count, self.step, self.doing, self.patient = 0, 0, "start", True
        self.began = time.monotonic()  # of this step
        self.slowest = 0.0  # seconds of the slowest step of late
        self.timeout = datetime.timedelta()  # of collectives; 0: as it was before the first step
        self.code: int | None = None  # that this rank ends with
        self.judged = threading.Event()
        self.verdict: int | None = None
        self.samples: Callable[[int], Sequence[str]] | None = None
        self.answers = list[dict[str, Any]]()  # of the watcher while it starts
        with tempfile.TemporaryFile() as beat:
            beat.truncate(watcher.BEAT.size)
            self.shared = mmap(beat.fileno(), watcher.BEAT.size)
            self.stacks = tempfile.TemporaryFile()  # noqa: SIM115 (held to the end)
            mine, theirs = socket.socketpair()
            self.link = watcher.Lines(mine)
            self.progress()
            self._start(folder, beat.fileno(), theirs)
        if watcher.DUMP_SIGNAL:
            faulthandler.register(watcher.DUMP_SIGNAL, self.stacks, all_threads=True)
        threading.Thread(target=self._listen, name="watchdog", daemon=True).start()

    def _start(self, folder: Path, beat: int, theirs: socket.socket) -> None:
        """Start the watcher: rank 0's first, whose port the others learn. Collective."""
        rank, world, one_host = ranks.rank(), self.world, len({*ranks.nodes()}) == 1
        settings = {
            "rank": rank,
            "world": world,
            "host": platform.node(),
            "one_host": one_host,
            "pid": os.getpid(),
            "link": theirs.fileno(),
            "beat": beat,
            "stacks": self.stacks.fileno(),
            "pace": min(5.0, self.patience / 4),
            "patience": self.patience,
            "folder": str(folder),
        }

        def begin(address: tuple[str, int] | None, secret: str) -> int:
            given = json.dumps({**settings, "address": address})
            subprocess.Popen(
                [sys.executable, "-I", "-S", watcher.__file__, given],
                env={**os.environ, watcher.SECRET: secret},  # others of a host read command lines
                pass_fds=(theirs.fileno(), beat, self.stacks.fileno()),
                start_new_session=True,  # Ctrl-C is not for it
            )
            theirs.close()
            return 0 if address else int(self._answer("port"))

        secret = ranks.broadcast(secrets.token_hex(16))
        port = ranks.on_main(lambda: begin(None, secret))
        host = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
        ranks.on_all(lambda: begin((host, port), secret) if rank else None)
        ranks.on_all(lambda: self._answer("ready"))

    def _answer(self, expected: str) -> Any:
        """Return what the watcher says of itself; LaunchError where it does not work."""
        self.link.link.settimeout(_STARTED + 5.0)
        while not self.answers and (more := self.link.receive()) is not None:
            self.answers += more
        self.link.link.settimeout(None)
        message = self.answers.pop(0) if self.answers else {}
        if expected in message:
            return message[expected]
        what = message.get("refused", "it ended, or said nothing")
        raise LaunchError(
            f"the watchdog of rank {ranks.rank()} did not start: {what}; ranks must reach any port "
            "of rank 0's host; train.hang_seconds 0 goes without"
        )

    def steady(self) -> float:
        """Return the seconds that may pass without progress in steady steps."""
        return max(self.patience, _SLOWEST * self.slowest)

    def progress(self) -> None:
        self.count += 1
        steady = self.steady()
        patience = max(steady, _PATIENT * self.patience) if self.patient else steady
        watcher.BEAT.pack_into(self.shared, 0, self.count, patience, self.doing.encode()[:112])

    def _listen(self) -> None:
        while (messages := self.link.receive()) is not None:
            for message in messages:
                if "report" in message:
                    self.link.send(stacks=self._stacks())
                elif "leave" in message:
                    self._leave(**message)

    def _leave(self, leave: int, grace: float, lost: bool) -> None:
        """End this process, unless it does so within the grace; a checkpoint gets more."""
        self.verdict = leave
        self.judged.set()
        begun = time.monotonic()
        until, longest = begun + grace, begun + (_LOST if lost else _LET_FINISH)
        while (now := time.monotonic()) < until or (self.busy() and now < longest):
            if self.busy():
                self.link.send(more=2 * _VERDICT)
            time.sleep(0.1)
        sys.stdout.flush()
        os._exit(leave if self.code is None else self.code)

    def _stacks(self) -> dict[str, Any]:
        """Return the stacks of all threads, where the main one is and what it waits for."""
        frames, parts, where, waits = sys._current_frames(), list[str](), "", ""
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if frame is None or thread is threading.current_thread():
                continue
            units = list(_units(frame))
            parts += ["-- " + " in unit ".join([thread.name, *units[:1]])]
            parts += [line.rstrip("\n") for line in traceback.format_stack(frame, _FRAMES)]
            if thread is threading.main_thread():
                where, waits = _place(frame, units)
        text = "\n".join([*parts, *_flights()])
        return {"where": where, "waits": waits, "samples": self._samples(), "text": text}

    def _samples(self) -> list[str]:
        """Return the samples of the step at hand, in words."""
        try:
            return [str(s) for s in self.samples(self.step)] if self.samples and self.step else []
        except Exception as error:  # a report without samples is worth more than none
            return [one_line(error)]


_watch: _Watch | None = None


def begin(patience: float, folder: Path, busy: Callable[[], bool]) -> None:
    """Watch this rank from here to `end`; with a `patience` of 0 not at all. Collective.

    Costs a process of some 10 MB a rank. LaunchError: ranks cannot reach rank 0's watcher.

    Args:
        patience: seconds in which all ranks may stand still in steady steps, or ten times the
            slowest of late; beside them 12 times as long, and children at work or bytes that flow
            count as progress there.
        folder: the report of a hang is written there.
        busy: whether a checkpoint is written behind the loop, which gets the time to become whole.
    """
    global _watch
    if patience > 0:
        _watch = _Watch(patience, folder, busy)
    else:
        ranks.set_timeouts(_DEBUGGER)


def fit_timeouts() -> None:
    """Let collectives of steady steps on accelerators wait for twice as long as the watchdog, which
    tells more than NCCL, which aborts.
    """
    if _watch is None or not (torch.accelerator.is_available() and dist.is_initialized()):
        return
    needed = max(_COLLECTIVE, datetime.timedelta(seconds=2 * _watch.steady()))
    if needed > _watch.timeout:
        ranks.set_timeouts(needed)
        _watch.timeout = needed


def progress() -> None:
    """Say that this rank gets on. About a microsecond."""
    if _watch is not None:
        _watch.progress()


def in_step(step: int) -> None:
    """Say that this rank gets on, and is in a steady `step` from here on."""
    if (watch := _watch) is None:
        return
    began, watch.began = watch.began, time.monotonic()
    if not watch.patient:  # the first may compile, and follows the start
        watch.slowest = max(_FORGET * watch.slowest, watch.began - began)
    watch.step, watch.doing, watch.patient = step, f"{watcher.IN_STEP}{step}", False
    watch.progress()


def after_loop() -> None:
    """Say that no steps follow: what does, such as an export, may take long."""
    if _watch is not None:
        _watch.step, _watch.doing, _watch.patient = 0, "after the last step", True
        _watch.progress()


@contextmanager
def patient(doing: str) -> Iterator[None]:
    """Let the block take 12 times as long."""
    watch = _watch
    if watch is None:
        yield
        return
    before, begun = (watch.doing, watch.patient), time.monotonic()
    watch.doing, watch.patient = doing, True
    watch.progress()
    try:
        yield
    finally:
        watch.began += time.monotonic() - begun  # it is no part of the step
        watch.doing, watch.patient = before
        watch.progress()


def name_samples(samples: Callable[[int], Sequence[str]]) -> None:
    """Let a report of a hang hold the samples that this rank reads in the step at hand."""
    if _watch is not None:
        _watch.samples = samples


def end(code: int, why: str = "") -> None:
    """Tell the others that this rank ends with an exit code; `why`, where it has not said so. One
    process alone may go on in something else (a notebook): nobody watches it any more.
    """
    global _watch
    if _watch is not None and _watch.world == 1:
        _watch.link.send(bye=True)
        _watch = None
    elif _watch is not None and _watch.code is None:
        _watch.code = code
        _watch.link.send(end=code, why=why)


def verdict() -> int | None:
    """Return the exit code that the watchdog gives this rank, which is about to end, once it has
    said why the run ends; None where it does not within some seconds.
    """
    if _watch is not None:
        _watch.judged.wait(_VERDICT)
        return _watch.verdict
    return None


def _units(frame: FrameType) -> Iterator[str]:
    """Yield the names of the FSDP units that a stack gathers or reduces, the innermost first."""
    for one, _ in traceback.walk_stack(frame):
        owner = one.f_locals.get("self")
        if type(owner).__name__ == "FSDPParamGroup":
            yield str(getattr(owner, "_module_fqn", None) or "(root)")


def _place(frame: FrameType, units: list[str]) -> tuple[str, str]:
    """Return where a stack is; and what it waits for, empty where it does not."""
    code, line = frame.f_code, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    callers = (f for f, _ in traceback.walk_stack(frame))
    own = next((f for f in callers if "site-packages" not in f.f_code.co_filename), frame)
    where = f"{Path(own.f_code.co_filename).name}:{own.f_lineno} in {own.f_code.co_name}"
    if "torch/distributed" in code.co_filename or ".wait(" in line:
        name = code.co_name if "torch/distributed" in code.co_filename else line
        return where, f"{name} of unit {units[0]}" if units else f"{name} ({where})"
    if any(call in line for call in (".item()", ".tolist()", "synchronize(", ".cpu()")):
        return where, f"the device ({where})"
    return where, ""


def _flights() -> list[str]:
    """Return the collectives that are not done, as torch's flight recorder has them."""
    found = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        # Private in torch 2.x, and the only way to ask; without it torch's own dump is left.
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None or ("nccl" in name and not torch.cuda.is_initialized()):
            continue
        try:
            entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        except Exception as error:  # the stacks count more
            entries = [one_line(error)]
        entries = [e for e in entries if not (isinstance(e, dict) and e.get("retired"))]
        found += [f"-- {name}: not done", *map(json.dumps, entries[-20:])] if entries else []
    return found
