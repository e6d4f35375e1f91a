"""Communicate and agree between the ranks of a run, so that all of them continue or all raise.

A rank that raises alone leaves the others waiting in a collective until it times out. Everything
that can fail on one rank only (reading files, checking rows) therefore goes through `on_all`,
`on_main` or `collective`, which raise on every rank if one of them failed.

All functions here exchange Python objects or a few numbers over gloo, on the CPU. Without an
initialised process group, each of them is the plain call.

[Note: exchanges] Ranks agree through rank 0: it gathers the numbers of all ranks and broadcasts the
outcome (W small messages to one rank, then log2 W hops). A ring would take 2 W hops, and an
all-gather of objects moves W * W of them. If nothing failed, an exchange sends a few bytes per rank
and pickles no object. The message of a failure is sent only if there was a failure.
"""

import datetime
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from toolkit.errors import ToolkitError

T = TypeVar("T")
P = ParamSpec("P")
N = TypeVar("N", int, float)

_Failure = tuple[type[Exception], str]  # class and message, as sent to the other ranks
_OBJECT_TIMEOUT = datetime.timedelta(days=1)
_CONNECT_TIMEOUT = datetime.timedelta(minutes=10)  # every rank is already there
# gloo raises plain RuntimeErrors when a peer is gone, so that only their text tells them apart.
_GLOO_PEER_LOSS = re.compile(
    r"gloo.*([Cc]onnection|closed by peer|Broken pipe|reset by peer)", re.DOTALL
)
_NCCL_PEER_LOSS = re.compile(
    r"ncclRemoteError|remote process|aborted|closed|reset|[Tt]im(ed |e)?out"
)
# Keyed by the world group, so that a new process group gets new entries.
_groups: dict[Any, dict[str, dist.ProcessGroup]] = {}
_node_indices: dict[Any, list[int]] = {}
_channel = threading.local()


# ---- Ranks and machines


def rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, or 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def world_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks, whose collectives run on the run's devices.

    Returns None without a process group.
    """
    return dist.group.WORLD if dist.is_initialized() else None


def host_id() -> str:
    """Return a string that identifies this machine: its name and the id of its last boot.

    Copies of one virtual machine may share a host name, but not a boot id.
    """
    # Only Linux has a boot id.
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    return socket.gethostname()


def available_cores() -> set[int]:
    """Return the numbers of the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def node_indices() -> list[int]:
    """Return, for each rank in order, the index of the machine that it runs on.

    Machines are numbered from 0 in the order of their first rank. The first call is collective and
    must come from the main thread; `launch.start` makes it. Later calls are local.
    """
    if world_size() == 1 or _is_fake_world():
        return [0] * world_size()
    world = dist.group.WORLD
    if world not in _node_indices:
        hosts = gather_to_main(host_id())
        numbers: dict[str, int] = {}
        indices = broadcast([numbers.setdefault(host, len(numbers)) for host in hosts])
        # Entries of an earlier process group are stale.
        _node_indices.clear()
        _node_indices[world] = indices
    return _node_indices[world]


def local_world_size() -> int:
    """Return the number of ranks on this machine.

    The first call is collective if `node_indices` was not called before.
    """
    nodes = node_indices()
    return nodes.count(nodes[rank()])


# ---- Output


def log_once(*lines: str | None) -> None:
    """Print log lines on rank 0 only, above any progress bar; skip lines that are None or ""."""
    for line in filter(None, lines if rank() == 0 else ()):
        print_line(line)


def fits_terminal(line: str) -> bool:
    """Return True if stdout is no terminal, or `line` is no wider than the terminal."""
    return not sys.stdout.isatty() or len(line) <= shutil.get_terminal_size().columns


def print_line(line: str, file: TextIO | None = None) -> None:
    """Print a line on this rank, above its progress bars.

    In a terminal, lines that are too wide are wrapped between words. In a text of several lines,
    table rows are not wrapped.

    Args:
        line: one line, or several separated by newlines.
        file: stream to print to; None: stdout.
    """
    stream = file or sys.stdout
    if stream.isatty() and "\n" in line:
        line = "\n".join(map(_wrap_line, line.split("\n")))
    elif stream.isatty():
        labelled = re.fullmatch(r"\w+ +", line[:11])
        # A row of names and values: keep each name on one line with its value.
        if len(re.findall(" {2,}", line)) > 2:
            line = re.sub(r"(?<! ) (?! )", "\N{NO-BREAK SPACE}", line)
        line = textwrap.fill(
            line,
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * (11 if labelled else 4),
            # Users copy paths from these lines.
            break_long_words=False,
            break_on_hyphens=False,
        ).replace("\N{NO-BREAK SPACE}", " ")
    tqdm.write(line, file=file)
    stream.flush()


def _wrap_line(line: str) -> str:
    """Wrap a line between words if it is wider than the terminal.

    A line with two spaces between words is a table row, and is returned unchanged.
    """
    columns = shutil.get_terminal_size().columns
    text = line.strip()
    if len(line) <= columns or "  " in text:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- Which rank reports an error


def mark_collective(error: ToolkitError) -> ToolkitError:
    """Mark an error that every rank raises, so that only rank 0 prints it; return the error.

    Call it on every rank.
    """
    error.already_reported = rank() != 0  # type: ignore[attr-defined]
    return error


def is_first_to_report(text: str) -> bool:
    """Claim `text` for this rank; return False if another rank has claimed it. Not collective.

    Use it for errors that may be raised on one rank or on several. Without a store, for example
    after its process has ended, it returns True. If all ranks are sure to raise an error, use
    `mark_collective` instead.
    """
    key = f"said/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    this_rank = str(rank())
    claimed_by = _call_store(lambda store: store.compare_set(key, "", this_rank))
    return claimed_by in (None, this_rank.encode())


def post_notice(name: str) -> None:
    """Set a flag `name` that `has_notice` sees on every rank; no rank waits. Not collective."""
    _call_store(lambda store: store.set(f"posted/{name}", ""))


def has_notice(name: str) -> bool:
    """Return True if any rank has called `post_notice(name)`. Not collective.

    False if the store is gone.
    """
    return bool(_call_store(lambda store: store.check([f"posted/{name}"])))


# ---- Exchanges of values


def broadcast(value: T) -> T:
    """Return rank 0's `value` on every rank. Collective. The value is pickled; keep it small."""
    if world_size() == 1 or _is_fake_world():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_current_group())
    return box[0]


def min_over_ranks(number: N) -> N:
    """Return the smallest `number` of all ranks, exact up to 2**53. Collective, 8 bytes a rank."""
    return type(number)(_min_of_each([number])[0])


def any_over_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return, for each flag, True if any rank has set it. Collective, 8 bytes per rank and flag.

    Every rank must pass the same number of flags.
    """
    return [not number for number in _min_of_each([not flag for flag in flags])]


def all_equal(value: object) -> bool:
    """Return True if all ranks pass an equal `value`. Collective, 16 bytes a rank.

    Compares a 48-bit hash of the value's JSON, or of its repr if JSON cannot hold it.
    """
    text = json.dumps(value, sort_keys=True, default=repr)
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
    lowest, highest = _min_of_each([number, -number])
    return lowest == -highest


def gather(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on every rank. Collective.

    Values are pickled. Rank 0 receives all of them and sends the list to each rank, so the cost
    grows with the square of the world size. `gather_to_main`, `min_over_ranks` and `any_over_ranks`
    are much cheaper; use them if they suffice.
    """
    return broadcast(gather_to_main(value))


def gather_to_main(value: T) -> list[T]:
    """Gather the `value` of every rank to rank 0. Collective.

    Values are pickled. Rank 0 needs memory for the largest value times the world size.

    Returns:
        The list in rank order on rank 0, an empty list on the other ranks.
    """
    if world_size() == 1 or _is_fake_world():
        return [value] * world_size()
    content = pickle.dumps(value)
    return _gather_pickled(content, -int(_min_of_each([-len(content)])[0]))


def gather_integers(values: list[int]) -> list[list[int]]:
    """Return the `values` of every rank, in rank order, on every rank. Collective.

    Every rank must pass the same number of 64-bit integers. Costs one all-gather of 8 bytes a
    value, which does not go through rank 0.
    """
    if world_size() == 1 or _is_fake_world():
        return [list(values)] * world_size()
    local = torch.tensor(values, dtype=torch.int64)
    gathered = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(gathered, local, group=_current_group())
    return [row.tolist() for row in gathered]


def sum_over_ranks(values: list[int]) -> list[int] | None:
    """Sum each of `values` over all ranks; sums wrap around at 64 bits. Collective.

    Every rank must pass the same number of values; costs 8 bytes a value.

    Returns:
        The sums, on every rank; None in a `fake_world`, where the other ranks do not exist.
    """
    if world_size() == 1:
        return list(values)
    if _is_fake_world():
        return None
    sums = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(sums, group=_current_group())
    return sums.tolist()


# ---- Functions that may fail on one rank


def on_all(fn: Callable[[], T]) -> T:
    """Run `fn` on every rank and return its result; if it fails on any rank, all ranks raise.

    A rank that failed raises its own exception. The other ranks raise an error with the message of
    the first rank that failed, of the same class if that is a `ToolkitError`, otherwise a
    `ToolkitError`. Collective, 8 bytes a rank.
    """
    result, failure = _call_catching(fn)
    _raise_if_any_failed(failure)
    return result  # type: ignore[return-value]


def min_result(fn: Callable[[], int]) -> int:
    """Run `fn` on every rank and return the smallest result; raises as `on_all` does.

    Results are exact up to 2**53. Collective, one exchange of 16 bytes a rank.
    """
    result, failure = _call_catching(fn)
    return _raise_if_any_failed(failure, 0 if result is None else result)


def collective(fn: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that a failure on one rank is raised on all ranks; see `on_all`.

    All ranks must call the decorated function.
    """

    @functools.wraps(fn)
    def on_every_rank(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the decorated function through `on_all`."""
        return on_all(lambda: fn(*args, **kwargs))

    return on_every_rank


def gather_results(fn: Callable[[], T]) -> list[T]:
    """Run `fn` on every rank and return all results, in rank order, on every rank.

    Raises as `on_all` does. Collective; for the cost see `gather`.
    """
    return broadcast(gather_results_to_main(fn))


def gather_results_to_main(fn: Callable[[], T]) -> list[T]:
    """Run `fn` on every rank and gather the results to rank 0.

    Raises as `on_all` does. Collective; for the cost see `gather_to_main`.

    Returns:
        The list in rank order on rank 0, an empty list on the other ranks.
    """
    result, failure = _call_catching(fn)
    if world_size() == 1 or _is_fake_world():
        _raise_if_any_failed(failure)
        return [result] * world_size()  # type: ignore[list-item]
    content, pickle_failure = _call_catching(lambda: pickle.dumps(result))
    failure = failure or pickle_failure
    # One exchange tells if a rank failed, and the length of the longest result.
    negative_length = _raise_if_any_failed(failure, -len(content or b""))
    return _gather_pickled(content, -negative_length)  # type: ignore[arg-type]


def on_main(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 only and return its result on every rank; if it fails, all ranks raise.

    The result is pickled. Collective, one broadcast.
    """
    # In a fake world there is no other rank 0 that could run it.
    runs_here = rank() == 0 or _is_fake_world()
    result, failure = _call_catching(fn) if runs_here else (None, None)
    failure_of_main, result = broadcast((_describe_failure(failure), result))
    if failure_of_main is not None:
        _raise_on_all(0, failure_of_main, failure)
    return result  # type: ignore[return-value]


def main_first(fn: Callable[[], T]) -> T:
    """Run `fn` on every rank in turns, and return its result; raises as `on_all` does. Collective.

    Rank 0 is first, then the first rank of each other machine, then all other ranks. Use it to fill
    a cache that later ranks read, on storage that all machines share or that each machine has.
    """
    nodes = node_indices()
    turns = [0 if r == 0 else 1 if nodes.index(nodes[r]) == r else 2 for r in range(world_size())]
    result = None
    for turn in sorted(set(turns)):
        is_my_turn = turns[rank()] == turn
        result = on_all(fn if is_my_turn else lambda result=result: result)  # type: ignore[misc]
    return result  # type: ignore[return-value]


def is_peer_loss(error: BaseException) -> bool:
    """Return True if an error of a collective means that the connection to another rank was lost.

    The cause is then on that rank.
    """
    # NCCL uses this class for its own faults as well.
    if isinstance(error, dist.DistBackendError):
        return _NCCL_PEER_LOSS.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _GLOO_PEER_LOSS.search(str(error)) is not None


# ---- Groups and timeouts


def object_group(channel: str = "main") -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks for Python objects, with a timeout of one day.

    The timeout is that long because one rank may tokenize for hours while the others wait.
    `channel` is any name; each has a separate group. The first use of a channel creates it, which
    is collective.

    Returns:
        The group; None without a process group, and in a `fake_world`, where other ranks do not
        exist.
    """
    if not dist.is_initialized() or _is_fake_world():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        # Groups of an earlier process group are gone.
        _groups.clear()
        _groups[world] = {}
    if channel not in _groups[world]:
        if channel != "main":
            # Wait for slow ranks here: the timeout to connect, below, is short.
            _min_of_each([0], object_group())
        set_timeout, _ = _timeout_access()
        timeout = _CONNECT_TIMEOUT if set_timeout else _OBJECT_TIMEOUT
        group = dist.new_group(backend="gloo", timeout=timeout)
        _groups[world][channel] = group
        # gloo connects at the first exchange, by the launcher's store, which may die before ours.
        _min_of_each([0], group)
        if set_timeout:
            set_timeout(_OBJECT_TIMEOUT, group)
    return _groups[world][channel]


def set_timeouts(timeout: datetime.timedelta) -> None:
    """Set the timeout of collectives for all process groups, including those of a mesh.

    The groups of `object_group` keep theirs. If this torch cannot set timeouts, rank 0 logs a note.
    """
    object_groups = {id(group) for channels in _groups.values() for group in channels.values()}
    set_timeout, groups = _timeout_access()
    if set_timeout is None:
        log_once(
            "NOTE: the timeout of collectives stays as it is: "
            f"torch {torch.__version__} has no way to change it"
        )
    for group in groups:
        if id(group) not in object_groups:
            set_timeout(timeout, group)


def _timeout_access() -> tuple[Any, list[dist.ProcessGroup]]:
    """Return (torch's private function that sets a group's timeout, all process groups).

    (None, []) if this torch has no such function.
    """
    # Private in torch 2.11 to 2.15, and the only way to change it.
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    return (None, []) if set_timeout is None or groups is None else (set_timeout, [*groups])


@contextmanager
def use_channel(channel: str) -> Iterator[None]:
    """Make this thread's object collectives use the group of `channel` inside the context.

    Give each thread a different channel (see `object_group`): two threads that share one would
    receive each other's messages.
    """
    _channel.name = channel
    try:
        yield
    finally:
        _channel.name = "main"


def _current_group() -> dist.ProcessGroup | None:
    """Return the object group that `use_channel` chose for this thread."""
    return object_group(getattr(_channel, "name", "main"))


def _call_store(call: Callable[[dist.Store], T]) -> T | None:
    """Call a function with the process group's store; None if there is no store or it is gone."""
    # Private in torch 2.x. Without it, each rank reports for itself.
    get_store = getattr(dist.distributed_c10d, "_get_default_store", None)
    if world_size() > 1 and get_store is not None:
        # The store ends with the process that hosts it.
        with suppress(RuntimeError):
            return call(get_store())
    return None


def _is_fake_world() -> bool:
    """Return True if the process group is fake (`fake_world`) and there are no other ranks."""
    return dist.get_backend() == "fake"


def _call_catching(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call `fn`; return (its result, None), or (None, the exception that it raised)."""
    try:
        return fn(), None
    except Exception as error:
        return None, error


def _describe_failure(failure: BaseException | None) -> _Failure | None:
    """Convert an exception to (class, message) for the other ranks; None stays None.

    The class is `ToolkitError` for any exception that is not a `ToolkitError`.
    """
    if isinstance(failure, ToolkitError):
        return type(failure), str(failure)
    return None if failure is None else (ToolkitError, f"{type(failure).__name__}: {failure}")


def _raise_if_any_failed(failure: BaseException | None, number: float = 0) -> int:
    """Raise on every rank if any rank passes a `failure` that is not None. Collective.

    Returns:
        The smallest `number` of all ranks.
    """
    world = world_size()
    first_failed, lowest = _min_of_each([world if failure is None else rank(), number])
    if first_failed < world:
        failures = gather_to_main(_describe_failure(failure))
        first_failure = broadcast(failures[int(first_failed)] if failures else None)
        _raise_on_all(int(first_failed), first_failure, failure)  # type: ignore[arg-type]
    return int(lowest)


def _raise_on_all(first_failed: int, first_failure: _Failure, failure: Any) -> None:
    """Raise this rank's own `failure` or, if that is None, the one of rank `first_failed`.

    Marks the error so that only that rank prints it.
    """
    error = failure
    if error is None:
        error_class, message = first_failure
        error = error_class(f"{message} (on rank {first_failed})")
    # The first rank that failed prints the error, even if an outer exchange sees it fail again.
    if rank() != first_failed and not getattr(error, "agreed", False):
        error.already_reported = True
    error.agreed = True
    raise error


def _min_of_each(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Compute the minimum over ranks of each of `numbers`. Collective; see [Note: exchanges]."""
    if world_size() == 1 or _is_fake_world():
        return list(numbers)
    group = group or _current_group()
    minimum = torch.tensor(numbers, dtype=torch.float64)
    gathered = [torch.empty_like(minimum) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(minimum, gathered, dst=0, group=group)
    if gathered is not None:
        minimum = torch.stack(gathered).amin(0)
    dist.broadcast(minimum, src=0, group=group)
    return minimum.tolist()


def _gather_pickled(content: bytes, max_length: int) -> list[Any]:
    """Gather every rank's pickled `content` to rank 0 and unpickle it there. Collective.

    `max_length` is the length of the longest content in bytes; shorter ones are padded to it. The
    list is in rank order on rank 0 and empty on the other ranks.
    """
    padded = torch.zeros(max_length, dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(padded, gathered, dst=0, group=_current_group())
    return [pickle.loads(buffer.numpy().data) for buffer in gathered or ()]
