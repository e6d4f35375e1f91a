"""End a run after a signal, with a checkpoint: preemption, time limits, Ctrl-C.

A scheduler sends SIGTERM (or another signal, such as SIGUSR1) some time before it kills the run. In
the loop the signal is only recorded: ranks agree on the step after which to stop, since a rank that
leaves alone would let the others wait. Elsewhere (start, load, the last export) the process leaves
at once: all results are on the disk, so continuing would gain nothing.

Torch's agent restarts ranks that ended (`--max_restarts`), even if they were asked to end. So the
first rank that leaves because of a signal also ends the agent.

The agreement costs one all-reduce of one number per step. It runs on the accelerator if that has
collectives (over TCP, a ring of a thousand hosts takes a tenth of a second), during the next step.
Its result is read one step later, so nobody waits for it. A signal ends the run after the step that
follows the one in which it arrived.
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
MARK = "preempted"  # notice of a rank that leaves because of a signal; see `ranks.post_notice`
# A repeated signal within so many seconds is the same one, sent by both terminal and launcher.
_REPEAT_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1  # prctl(2): send a signal when the parent ends
_LAUNCHER = os.getppid()


class Preempted(BaseException):
    """Ends the run after a signal. The run can be resumed.

    It is not an `Exception`, so that no `except Exception` on the way catches it.
    """


class _SignalState:
    """The signals that this process has received, and its progress in ending the run.

    `listen_for_signals` creates a new object when its block begins and ends.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.grace = grace
        self.process = os.getpid()
        # The first signal, and when it arrived.
        self.signal: int | None = None
        self.signal_time = 0.0
        self.in_loop = False
        self.is_agreed = False
        self.is_leaving = False
        # True if the signal handler has raised `Preempted`.
        self.has_raised = False
        # The all-reduce of the last step: a function that waits for it, and its result.
        self.pending: tuple[Callable[[], object], torch.Tensor] | None = None
        # Ends the process when the grace period is over.
        self.timer: threading.Timer | None = None

    def stop_timer(self) -> None:
        """Cancel the timer that would end the process after the grace period."""
        if self.timer is not None:
            self.timer.cancel()


_state = _SignalState()


@contextmanager
def listen_for_signals(signals: Sequence[str], grace: float) -> Iterator[None]:
    """Within the block, handle `signals` so that they end the run by raising `Preempted`.

    Outside of the training loop the first signal raises `Preempted` at once. In the loop the run
    saves a checkpoint first, and the process is ended if that takes more than `grace` seconds. A
    second signal, at least 2 s later, ends the process at once with exit code 128 + its number. If
    the launcher dies, this process receives SIGTERM.

    In a process that a launcher started, the signals are ignored after the block. Otherwise a
    signal that the launcher sends to all processes could replace the exit code. In another thread
    than the main thread, nothing is handled.

    Args:
        signals: names of signals, such as SIGTERM.
        grace: seconds for the checkpoint.
    """
    global _state
    _state = _SignalState(grace)
    # A program without a launcher, such as a notebook, may continue after the block.
    is_launched = "RANK" in os.environ
    # Python handles signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {name: signal.signal(getattr(signal, name), _handle_signal) for name in signals}
    if "SIGTERM" in signals:
        _request_signal_at_launcher_exit()
    try:
        yield
    except BaseException as error:
        # C code that calls Python may turn the exception of a signal into another one.
        if not (isinstance(error, Preempted) or _state.has_raised):
            raise
        # For ranks that received no signal, and will lose this rank.
        ranks.post_notice(MARK)
        raise Preempted from error
    finally:
        # Signals that arrive from now on come from the launcher.
        is_leaving = _state.signal is not None or _state.is_agreed
        for name, handler in handlers.items():
            is_ignored = is_launched or is_leaving
            signal.signal(getattr(signal, name), signal.SIG_IGN if is_ignored else handler)
        _state.stop_timer()
        _state = _SignalState()


def enter_loop() -> None:
    """Enter the training loop: until `leave_loop`, signals only take effect in `stop_requested`.

    Raises:
        Preempted: a signal has already arrived.
    """
    _state.in_loop = True
    if _state.signal is not None:
        raise Preempted


def stop_requested() -> bool:
    """Return True if a signal asks the run to stop; all ranks return it after the same step.

    Collective; every rank must call it once per step. With several ranks, the result is True from
    the second call after the signal on, because the ranks exchange the request during a step. The
    call also reports progress to the watchdog.
    """
    watchdog.report_progress()
    if ranks.world_size() > 1:
        _finish_agreement()
        _state.pending = _start_agreement(_state.signal is not None)
    else:
        _state.is_agreed = _state.signal is not None
    return _state.is_agreed


def is_stopping() -> bool:
    """Return the last result of `stop_requested`, without communication."""
    return _state.is_agreed


def is_due(step: int, every: int | None) -> bool:
    """Return True if `step` is a multiple of `every` and the run is not about to stop.

    Returns False if `every` is None.
    """
    return every is not None and step % every == 0 and not is_stopping()


def until_stop(values: Iterable[T]) -> Iterator[T]:
    """Yield `values`, and end early if a signal asks the run to stop. The first is always yielded.

    Collective: calls `stop_requested` after each value.
    """
    for value in values:
        yield value
        if stop_requested():
            return


def leave_loop(step: int) -> None:
    """Leave the training loop after the last checkpoint, or end the run after a signal. Collective.

    Args:
        step: number of the last step, which the checkpoint contains.

    Raises:
        Preempted: a signal arrived.
    """
    _finish_agreement()
    watchdog.set_activity("after the last step")
    _state.in_loop = False
    # The checkpoint is complete, so the grace period no longer matters.
    _state.stop_timer()
    if _state.is_agreed:
        ranks.log_once(
            f"stopped    by a signal after step {step}; the same command resumes from there"
        )
    if _state.is_agreed or _state.signal is not None:
        _state.is_leaving = True
        raise Preempted


def choose_exit_code() -> int:
    """Report this rank's exit to the watchdog, and return the exit code after a signal.

    Returns:
        Usually 75. It is 1 if torch's agent sent the signal because another rank is gone; then the
        agent restarts all ranks.
    """
    watchdog.report_exit(EXIT_CODE)
    if _may_restart() and watchdog.wait_for_verdict() == 1:
        return 1
    return EXIT_CODE


def stop_launcher() -> None:
    """End torch's agent, the launcher, with SIGTERM if it would restart this rank.

    Only the first rank of a machine that calls this sends the signal.
    """
    if not _may_restart():
        return
    start_folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.parent
    try:
        (start_folder / "told_to_end").touch(exist_ok=False)
    except FileExistsError:
        return
    _write_to_stderr("no restart: ending the launcher")
    os.kill(_LAUNCHER, signal.SIGTERM)


def _may_restart() -> bool:
    """Return True if torch's agent still runs, and has restarts left for this rank."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    restarts, max_restarts = (int(os.environ.get(name, "0")) for name in names)
    return restarts < max_restarts and os.getppid() == _LAUNCHER


def _start_agreement(wants_stop: bool) -> tuple[Callable[[], object], torch.Tensor]:
    """Start an asynchronous all-reduce that tells all ranks if any rank wants to stop. Collective.

    Returns:
        A function that waits for the result; and a host tensor [1] that then holds 1 to stop, or 0.
    """
    device = _agreement_device()
    flag = torch.full((1,), int(wants_stop), dtype=torch.int32, device=device)
    work: Any = dist.all_reduce(flag, dist.ReduceOp.MAX, group=ranks.world_group(), async_op=True)
    if device.type == "cpu":
        return work.wait, flag
    # Here the device's stream waits, not the host.
    work.wait()
    answer = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(flag, non_blocking=True)
    arrived = torch.Event(device=device)
    arrived.record()
    return arrived.synchronize, answer


def _agreement_device() -> torch.device:
    """Return the device for the all-reduce of `_start_agreement`.

    It is the accelerator if its collectives do not run over gloo, otherwise the CPU.
    """
    kind = torch.accelerator.current_accelerator()
    backends = dist.get_backend_config(ranks.world_group()).split(",")
    usable = [] if kind is None else [b for b in backends if b.startswith(f"{kind.type}:")]
    if kind is None or not usable or usable == [f"{kind.type}:gloo"]:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _finish_agreement() -> None:
    """Wait for the last all-reduce of `_start_agreement`, and store its result in `_state`.

    Does nothing if none is pending. If the ranks now agree to stop, the grace period starts.
    """
    if _state.pending is not None:
        wait, flag = _state.pending
        # The name `wait` lets the watchdog see that this rank waits.
        wait()
        _state.pending = None
        if flag.item() and not _state.is_agreed:
            _state.is_agreed = True
            _start_grace_timer("a signal to another rank")


def _handle_signal(number: int, frame: object) -> None:
    """Handle a signal as `listen_for_signals` describes; this is its signal handler.

    A worker process of a data loader inherits the handler. During the training loop, it ignores the
    first signal. Otherwise the signal has its default effect there.
    """
    if os.getpid() != _state.process:
        # A loader's worker, which inherited the handler. Its rank ends it, or the next signal.
        signal.signal(number, signal.SIG_DFL)
        if not _state.in_loop:
            os.kill(os.getpid(), number)
        return
    name = signal.Signals(number).name
    if _state.signal is not None:
        # After one rank has left, torch's agent sends SIGTERM to the others, which are leaving.
        is_from_agent = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
        is_repeated = time.monotonic() - _state.signal_time >= _REPEAT_SECONDS
        if is_repeated and not (_state.is_leaving and is_from_agent):
            _write_to_stderr(f"{name} again: ending at once")
            _exit_at_once(number)
        return
    _state.signal, _state.signal_time = number, time.monotonic()
    if not _state.in_loop:
        _state.has_raised = True
        raise Preempted
    _write_to_stderr(
        f"{name}: saving a checkpoint within {_state.grace:.0f} s; once more ends at once"
    )
    _start_grace_timer(name)


def _start_grace_timer(cause: str) -> None:
    """Start a timer that ends this process with an error when the grace period is over.

    Args:
        cause: the signal, for the message.
    """

    def end() -> None:
        _write_to_stderr(
            f"no checkpoint {_state.grace:.0f} s (checkpoint.grace_seconds) after {cause}"
        )
        _exit_at_once(_state.signal or signal.SIGTERM)

    _state.stop_timer()
    _state.timer = threading.Timer(_state.grace, end)
    _state.timer.daemon = True
    _state.timer.start()


def _exit_at_once(number: int) -> NoReturn:
    """End this process with exit code 128 + `number`, without cleaning up.

    Before that, a launcher that would restart the rank is ended, and the exit is reported to the
    watchdog.
    """
    stop_launcher()
    watchdog.report_exit(128 + number)
    os._exit(128 + number)


def _write_to_stderr(line: str) -> None:
    """Write a line to stderr with the rank as prefix; safe in a signal handler."""
    # Not through sys.stderr, whose lock the interrupted code may hold.
    rank = os.environ.get("RANK", "0")
    os.write(2, f"[rank {rank}] {line}\n".encode())


def _request_signal_at_launcher_exit() -> None:
    """Ask the kernel to send SIGTERM to this process when its launcher dies.

    A launcher that is killed cannot send the signal itself. Nothing is done on other systems than
    Linux, or if neither torchrun nor accelerate started the process.

    Raises:
        Preempted: the launcher is already gone.
    """
    # A shell is not a launcher: a run in its background may outlive it.
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if sys.platform != "linux" or not is_launched:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = psutil.Process().parent()
    # If the launcher has ended already, the parent is process 1. In a container the launcher itself
    # may be process 1.
    if parent is not None and parent.pid == 1 and "python" not in "".join(parent.cmdline()[:1]):
        raise Preempted
