"""A run that is asked to end by a signal saves a checkpoint first: preemption, time limits, Ctrl-C.

A scheduler sends SIGTERM (or what it is told to, such as SIGUSR1) some time before it kills. In the
loop the signal is only noted: ranks agree on the step to stop after, since one rank that leaves
alone leaves the others waiting. Elsewhere (start, load, the last export) nothing would be gained by
going on: what the run has is on the disk, and the process leaves at once.

Torch's agent starts ranks that ended again (`--max_restarts`), and asks nobody whether they were
asked to end: the first rank to leave by a signal tells it to end, too.

Agreement costs one all-reduce of one number a step, on the device where that has collectives of
its own (a ring of a thousand hosts over TCP takes a tenth of a second), behind the next step: its
result is read a step later, so that nobody waits for it. A signal ends the run after the step that
follows the one it came in.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist

from toolkit import ranks
from toolkit.errors import EXIT_CODE_PREEMPTED
from toolkit.training.guards import watchdog

T = TypeVar("T")

EXIT_CODE = EXIT_CODE_PREEMPTED
MARK = "preempted"  # `ranks.post_notice` by a rank that leaves by a signal
_SAME = 2.0  # seconds in which a signal that comes again, as from terminal and launcher, is one
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal when the parent ends
_LAUNCHER = os.getppid()


class Preempted(BaseException):
    """The run ends by a signal, and can go on. No Exception: nothing below may handle it."""


class _SignalState:
    """What this process knows of signals; `listening` makes it anew."""

    def __init__(self, grace: float = 0.0) -> None:
        self.grace, self.process = grace, os.getpid()
        self.signal: int | None = None  # the first that came
        self.since = 0.0
        self.in_loop = self.agreed = self.leaving = False
        self.raised = False  # `Preempted`, where the signal came
        # Of the last step's all-reduce: what waits for it, and its result on the host.
        self.pending: tuple[Callable[[], object], torch.Tensor] | None = None
        self.timer: threading.Timer | None = None  # ends the process when the grace is over

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


_state = _SignalState()


@contextmanager
def listen_for_signals(signals: Sequence[str], grace: float) -> Iterator[None]:
    """Take `signals` for this process until the end of the block.

    The first ends the run with `Preempted`: at once outside of the loop, in it after a checkpoint,
    for which there are `grace` seconds. A second one, at least 2 s later, ends the process with the
    exit code 128 + its number. A process whose launcher dies takes that for SIGTERM. In a launched
    process the `signals` are ignored after the block, however it ended: so does the process, with
    an exit code that a signal, which the launcher sends to all, must not replace.
    """
    global _state
    _state = _SignalState(grace)
    launched = "RANK" in os.environ  # else a notebook, say, which goes on
    if threading.current_thread() is not threading.main_thread():  # only there can Python listen
        yield
        return
    before = {name: signal.signal(getattr(signal, name), _receive) for name in signals}
    if "SIGTERM" in signals:
        _follow_launcher()
    try:
        yield
    except BaseException as error:
        # Code in C that was calling Python may make an error of its own of what a signal raised.
        if not (isinstance(error, Preempted) or _state.raised):
            raise
        ranks.post_notice(MARK)  # for those that got no signal, and lose this rank
        raise Preempted from error
    finally:
        leaving = _state.signal is not None or _state.agreed  # what now comes is the launcher's
        for name, handler in before.items():
            ignored = launched or leaving
            signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else handler)
        _state.stop_timer()
        _state = _SignalState()


def enter_loop() -> None:
    """From here to `leave_loop` a signal waits for `stop_requested`."""
    _state.in_loop = True
    if _state.signal is not None:
        raise Preempted


def stop_requested() -> bool:
    """Return whether the run is to end now, the same on every rank. Collective; every rank calls it
    as often as the others. Once true it stays so.
    """
    watchdog.report_progress()
    if ranks.world_size() > 1:
        _settle()
        _state.pending = _tell(_state.signal is not None)
    else:
        _state.agreed = _state.signal is not None
    return _state.agreed


def is_stopping() -> bool:
    """Return what the last `stop_requested` did. Not collective."""
    return _state.agreed


def is_due(step: int, every: int | None) -> bool:
    """Return True if an action that happens every `every` steps is due after `step`.

    Never due if `every` is None or if the run is about to stop.
    """
    return every is not None and step % every == 0 and not is_stopping()


def until_stop(values: Iterable[T]) -> Iterator[T]:
    """Yield `values`, at least the first, until the run is to end. Collective at each."""
    for value in values:
        yield value
        if stop_requested():
            return


def leave_loop(step: int) -> None:
    """End the run here, with `Preempted`, where it was asked to; all up to `step` is saved.
    Collective.
    """
    _settle()
    watchdog.set_activity("after the last step")
    _state.in_loop = False
    _state.stop_timer()  # the checkpoint is whole
    if _state.agreed:
        ranks.log_once(
            f"stopped    by a signal after step {step}; the same command goes on from there"
        )
    if _state.agreed or _state.signal is not None:
        _state.leaving = True
        raise Preempted


def choose_exit_code() -> int:
    """Return what this rank, which leaves by a signal, ends with: 75; or 1 where that signal came
    from torch's agent, since another rank is gone, so that all are to be started again.
    """
    watchdog.report_exit(EXIT_CODE)
    if _may_restart() and watchdog.wait_for_verdict() == 1:
        return 1
    return EXIT_CODE


def stop_launcher() -> None:
    """Tell torch's agent to end where it would start this rank again, once a machine and start."""
    if not _may_restart():
        return
    of_this_start = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent
    try:
        (of_this_start / "told_to_end").touch(exist_ok=False)
    except FileExistsError:
        return
    _write("no restart: telling the launcher to end")
    os.kill(_LAUNCHER, signal.SIGTERM)


def _may_restart() -> bool:
    """Whether torch's agent would start this rank again."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    restarts, most = (int(os.environ.get(name, "0")) for name in names)
    return restarts < most and os.getppid() == _LAUNCHER


def _tell(stop: bool) -> tuple[Callable[[], object], torch.Tensor]:
    """Begin to tell all ranks; return what waits until they have, and where the answer then is."""
    device = _device()
    flag = torch.full((1,), int(stop), dtype=torch.int32, device=device)
    work: Any = dist.all_reduce(flag, dist.ReduceOp.MAX, group=ranks.world_group(), async_op=True)
    if device.type == "cpu":
        return work.wait, flag
    work.wait()  # the stream does, not the host
    answer = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(flag, non_blocking=True)
    arrived = torch.Event(device=device)
    arrived.record()
    return arrived.synchronize, answer


def _device() -> torch.device:
    """Return the accelerator where the process group has collectives on it, else the CPU."""
    kind = torch.accelerator.current_accelerator()
    backends = dist.get_backend_config(ranks.world_group()).split(",")
    own = [] if kind is None else [b for b in backends if b.startswith(f"{kind.type}:")]
    if kind is None or not own or own == [f"{kind.type}:gloo"]:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _settle() -> None:
    """Learn what the last `stop_requested` asked of all ranks."""
    if _state.pending is not None:
        wait, flag = _state.pending
        wait()  # so named, the watchdog sees that this rank waits
        _state.pending = None
        if flag.item() and not _state.agreed:
            _state.agreed = True
            _limit("a signal to another rank")


def _receive(number: int, frame: object) -> None:
    if os.getpid() != _state.process:  # a loader's worker: its rank ends it, or the next signal
        signal.signal(number, signal.SIG_DFL)
        if not _state.in_loop:
            os.kill(os.getpid(), number)
        return
    name = signal.Signals(number).name
    if _state.signal is not None:
        # Once one rank has left, torch's agent sends SIGTERM to the others, which are leaving.
        of_agent = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
        if time.monotonic() - _state.since >= _SAME and not (_state.leaving and of_agent):
            _write(f"{name} again: ending at once")
            _end(number)
        return
    _state.signal, _state.since = number, time.monotonic()
    if not _state.in_loop:
        _state.raised = True
        raise Preempted
    _write(f"{name}: saving a checkpoint within {_state.grace:.0f} s; once more ends at once")
    _limit(name)


def _limit(cause: str) -> None:
    """End this process when its time is up."""

    def end() -> None:
        _write(f"no checkpoint {_state.grace:.0f} s (checkpoint.grace_seconds) after {cause}")
        _end(_state.signal or signal.SIGTERM)

    _state.stop_timer()
    _state.timer = threading.Timer(_state.grace, end)
    _state.timer.daemon = True
    _state.timer.start()


def _end(number: int) -> NoReturn:
    stop_launcher()
    watchdog.report_exit(128 + number)
    os._exit(128 + number)


def _write(line: str) -> None:
    # Not through sys.stderr, in whose lock the signal may have come.
    rank = os.environ.get("RANK", "0")
    os.write(2, f"[rank {rank}] {line}\n".encode())


def _follow_launcher() -> None:
    """Let the kernel send SIGTERM when the launcher ends: it may be killed, and cannot say so."""
    # A shell is no launcher: a run in its background outlives it.
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if sys.platform != "linux" or not launched:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = psutil.Process().parent()
    if parent is not None and parent.pid == 1 and "python" not in "".join(parent.cmdline()[:1]):
        raise Preempted  # it ended before; in a container it may itself be process 1
