"""Agreement between the processes of a run: what one decides all learn, where one fails all raise.

A rank that raises alone leaves the others waiting in a collective until a timeout. Everything that
can fail on one rank only (reading files, checking data) goes through the functions here.

Without an initialised process group every function is the plain call.

[Note: exchanges] Ranks agree through rank 0: it gathers numbers and broadcasts the verdict (W small
messages to one rank, then log2 W hops), where a ring would take 2 W hops, and an all-gather of
objects moves W * W of them. Where nothing is wrong an exchange takes some bytes a rank and no
object; what failed is told only when something did.
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

_Told = tuple[type[Exception], str] | None  # what other ranks learn of one's failure
_PATIENCE = datetime.timedelta(days=1)
_TO_CONNECT = datetime.timedelta(minutes=10)  # ranks that are all there
# What gloo says where the other side of a connection ended; its errors have no class of their own.
_LOST = re.compile(r"gloo.*([Cc]onnection|closed by peer|Broken pipe|reset by peer)", re.DOTALL)
_LOST_NCCL = re.compile(r"ncclRemoteError|remote process|aborted|closed|reset|[Tt]im(ed |e)?out")
_groups: dict[Any, dict[str, dist.ProcessGroup]] = {}
_nodes: dict[Any, list[int]] = {}
_channel = threading.local()


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def world_group() -> dist.ProcessGroup | None:
    """Return the group of all processes, which has collectives on the run's devices; None without a
    process group.
    """
    return dist.group.WORLD if dist.is_initialized() else None


def host_id() -> str:
    """Return what tells this machine from others: its name, and the start of its kernel, since
    copies of one machine may have one name.
    """
    with suppress(OSError):  # not Linux
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"
    return socket.gethostname()


def available_cores() -> set[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def node_indices() -> list[int]:
    """Return the number of each rank's machine, from 0, in rank order. Collective at its first use,
    which therefore no thread beside the main one may be: `launch.start` makes it.
    """
    if world_size() == 1 or _is_fake():
        return [0] * world_size()
    world = dist.group.WORLD
    if world not in _nodes:
        names = gather_to_main(host_id())
        numbers: dict[str, int] = {}
        found = broadcast([numbers.setdefault(name, len(numbers)) for name in names])
        _nodes.clear()  # of a process group that is gone
        _nodes[world] = found
    return _nodes[world]


def local_world_size() -> int:
    """Return how many processes of the run are on this machine. Collective as `node_indices` is."""
    machines = node_indices()
    return machines.count(machines[rank()])


def log_once(*lines: str | None) -> None:
    """Print lines once, from rank 0, above a progress bar; empty ones are left out."""
    for line in filter(None, lines if rank() == 0 else ()):
        print_line(line)


def fits_terminal(line: str) -> bool:
    """Return whether a line is no longer than the terminal; elsewhere every one fits."""
    return not sys.stdout.isatty() or len(line) <= shutil.get_terminal_size().columns


def print_line(line: str, file: TextIO | None = None) -> None:
    """Print a line of this process above its progress bars, where there are any; in a terminal that
    is narrower it is broken between words, as is each line of a text but for rows of a table.
    """
    stream = file or sys.stdout
    if stream.isatty() and "\n" in line:
        line = "\n".join(map(_broken, line.split("\n")))
    elif stream.isatty():
        labelled = re.fullmatch(r"\w+ +", line[:11])
        if len(re.findall(" {2,}", line)) > 2:  # names and their values stay together
            line = re.sub(r"(?<! ) (?! )", "\N{NO-BREAK SPACE}", line)
        line = textwrap.fill(
            line,
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * (11 if labelled else 4),
            break_long_words=False,  # paths stay whole
            break_on_hyphens=False,
        ).replace("\N{NO-BREAK SPACE}", " ")
    tqdm.write(line, file=file)
    stream.flush()


def _broken(line: str) -> str:
    """Return a line of a text broken between words where it is longer than the terminal."""
    columns, inner = shutil.get_terminal_size().columns, line.strip()
    if len(line) <= columns or "  " in inner:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        inner,
        columns,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def mark_collective(error: ToolkitError) -> ToolkitError:
    """Return an error that every rank raises, so marked that rank 0 alone prints it."""
    error.already_reported = rank() != 0  # type: ignore[attr-defined]
    return error


def is_first_to_report(text: str) -> bool:
    """Return whether this rank is the first that is about to print `text`. Not collective: a rank
    that fails alone says it itself, and so does one whose store has left with another rank: what
    all raise for sure is marked by
    `mark_collective`.
    """
    key = f"said/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    own = str(rank())
    return _of_store(lambda store: store.compare_set(key, "", own)) in (None, own.encode())


def post_notice(name: str) -> None:
    """Leave `name` for ranks that lose this one, which is about to leave. Not collective."""
    _of_store(lambda store: store.set(f"posted/{name}", ""))


def has_notice(name: str) -> bool:
    """Return whether any rank posted this notice. Not collective."""
    return bool(_of_store(lambda store: store.check([f"posted/{name}"])))


def broadcast(value: T) -> T:
    """Return rank 0's `value` on every rank. Collective; pickles a small object."""
    if world_size() == 1 or _is_fake():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_current_group())
    return box[0]


def min_over_ranks(number: N) -> N:
    """Return the smallest of the ranks' numbers (exact up to 2**53). Collective, 8 bytes a rank."""
    return type(number)(_least([number])[0])


def any_over_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return for each of the flags whether it is set on any rank; all have as many. Collective, 8
    bytes a rank and flag.
    """
    return [not number for number in _least([not flag for flag in flags])]


def all_equal(value: object) -> bool:
    """Return whether all ranks have the same `value`, by its JSON. Collective, 16 bytes a rank."""
    text = json.dumps(value, sort_keys=True, default=repr)
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
    lowest, highest = _least([number, -number])
    return lowest == -highest


def gather(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on every rank. Collective; rank 0 sends W
    pickled objects to each of W ranks: take `gather_to_main`, `min_over_ranks` or `any_over_ranks` where they do.
    """
    return broadcast(gather_to_main(value))


def gather_to_main(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on rank 0; nothing elsewhere. Collective;
    pickles, and rank 0 has room for W times the largest.
    """
    if world_size() == 1 or _is_fake():
        return [value] * world_size()
    content = pickle.dumps(value)
    return _to_main(content, -int(_least([-len(content)])[0]))


def gather_integers(values: list[int]) -> list[list[int]]:
    """Return the `values` of every rank, in rank order; each brings as many, of 64 bits.
    Collective; one exchange of 8 bytes a value, which nothing goes through rank 0 for.
    """
    if world_size() == 1 or _is_fake():
        return [list(values)] * world_size()
    mine = torch.tensor(values, dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(every, mine, group=_current_group())
    return [one.tolist() for one in every]


def sum_over_ranks(values: list[int]) -> list[int] | None:
    """Return the sums over all ranks of `values`, which wrap around at 64 bits; each rank brings as
    many. Collective, 8 bytes a value. None where the other ranks do not exist (`fake_world`).
    """
    if world_size() == 1:
        return list(values)
    if _is_fake():
        return None
    mine = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(mine, group=_current_group())
    return mine.tolist()


def on_all(fn: Callable[[], T]) -> T:
    """Run `fn` on every rank; when it fails on any of them, raise on all of them.

    The rank that failed raises its own exception. The others raise a `ToolkitError` of the same
    class where it was one, with the first failing rank's message. Collective, 8 bytes a rank.
    """
    result, failure = _outcome(fn)
    _agree(failure)
    return result  # type: ignore[return-value]


def min_result(fn: Callable[[], int]) -> int:
    """Run `fn` on every rank; return the smallest result, or raise as `on_all` does.

    Results are exact up to 2**53. Collective, one exchange of 16 bytes a rank.
    """
    result, failure = _outcome(fn)
    return _agree(failure, 0 if result is None else result)


def collective(fn: Callable[P, T]) -> Callable[P, T]:
    """Make a function that every rank calls fail on all of them when it fails on any (`on_all`)."""

    @functools.wraps(fn)
    def on_every_rank(*args: P.args, **kwargs: P.kwargs) -> T:
        return on_all(lambda: fn(*args, **kwargs))

    return on_every_rank


def gather_results(fn: Callable[[], T]) -> list[T]:
    """Run `fn` on every rank; return all results, in rank order, or raise as `on_all` does.
    Collective; see `gather`.
    """
    return broadcast(gather_results_to_main(fn))


def gather_results_to_main(fn: Callable[[], T]) -> list[T]:
    """Run `fn` on every rank; return all results, in rank order, on rank 0 and nothing elsewhere,
    or raise as `on_all` does. Collective; see `gather_to_main`.
    """
    result, failure = _outcome(fn)
    if world_size() == 1 or _is_fake():
        _agree(failure)
        return [result] * world_size()  # type: ignore[list-item]
    content, unfit = _outcome(lambda: pickle.dumps(result))
    failure = failure or unfit
    most = _agree(failure, -len(content or b""))
    return _to_main(content, -most)  # type: ignore[arg-type]


def on_main(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 alone and return its result on every rank; its failure is everyone's.
    Collective, one broadcast.
    """
    # One whose others do not exist speaks for rank 0, too.
    speaks = rank() == 0 or _is_fake()
    result, failure = _outcome(fn) if speaks else (None, None)
    told, result = broadcast((_told(failure), result))
    if told is not None:
        _raise_on_all(0, told, failure)
    return result  # type: ignore[return-value]


def main_first(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0, then on the first rank of every other machine, then on the others: each
    fills a cache that those after it read, on storage that all share or on the machine's own.
    """
    machines, result = node_indices(), None
    turns = [
        0 if r == 0 else 1 if machines.index(machines[r]) == r else 2 for r in range(world_size())
    ]
    for turn in sorted(set(turns)):
        mine = turns[rank()] == turn
        result = on_all(fn if mine else lambda result=result: result)  # type: ignore[misc]
    return result  # type: ignore[return-value]


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone, which is the cause to look for."""
    if isinstance(error, dist.DistBackendError):  # of NCCL, which has faults of its own, too
        return _LOST_NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def object_group(channel: str = "main") -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks that waits a day: one rank may tokenise for hours. None
    without a process group, and where the other ranks do not exist. Created at its first use, which
    every rank takes part in.
    """
    if not dist.is_initialized() or _is_fake():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()  # of a process group that is gone
        _groups[world] = {}
    if channel not in _groups[world]:
        if channel != "main":
            _least([0], object_group())  # where they wait a day for each other
        set_timeout, _ = _timeouts()
        group = dist.new_group(backend="gloo", timeout=_TO_CONNECT if set_timeout else _PATIENCE)
        _groups[world][channel] = group
        _least([0], group)  # connects those who exchange, as long as the launcher lives
        if set_timeout:
            set_timeout(_PATIENCE, group)
    return _groups[world][channel]


def set_timeouts(timeout: datetime.timedelta) -> None:
    """Let the collectives of all groups but those of this file fail after `timeout`, the groups of
    a mesh too; say where that is not possible.
    """
    own = {id(group) for channels in _groups.values() for group in channels.values()}
    set_timeout, groups = _timeouts()
    if set_timeout is None:
        log_once(
            f"NOTE: collectives keep their timeout: torch {torch.__version__} lets none be set"
        )
    for group in groups:
        if id(group) not in own:
            set_timeout(timeout, group)


def _timeouts() -> tuple[Any, list[dist.ProcessGroup]]:
    """Return what sets the timeout of a group, None where this torch has it not, and all groups."""
    # Private in torch 2.11 to 2.15, and the only way to change it.
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    return (None, []) if set_timeout is None or groups is None else (set_timeout, [*groups])


@contextmanager
def use_channel(channel: str) -> Iterator[None]:
    """Let this thread's exchanges use a group of their own, made by `object_group(channel)`: two
    threads that exchange over one group take each other's messages.
    """
    _channel.name = channel
    try:
        yield
    finally:
        _channel.name = "main"


def _current_group() -> dist.ProcessGroup | None:
    return object_group(getattr(_channel, "name", "main"))


def _of_store(act: Callable[[dist.Store], T]) -> T | None:
    """Return what `act` makes of the process group's store, None without other ranks or a store."""
    # Private in torch 2.x; without it each rank speaks for itself.
    store_of = getattr(dist.distributed_c10d, "_get_default_store", None)
    if world_size() > 1 and store_of is not None:
        with suppress(RuntimeError):  # it is gone, with whoever held it
            return act(store_of())
    return None


def _is_fake() -> bool:
    """Whether the other ranks do not exist (sharding's `fake_world`): each is taken to agree."""
    return dist.get_backend() == "fake"


def _outcome(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return fn(), None
    except Exception as error:
        return None, error


def _told(failure: BaseException | None) -> _Told:
    """Return what the other ranks learn of a failure."""
    if isinstance(failure, ToolkitError):
        return type(failure), str(failure)
    return None if failure is None else (ToolkitError, f"{type(failure).__name__}: {failure}")


def _agree(failure: BaseException | None, number: float = 0) -> int:
    """Raise on all ranks where any failed, `failure` on this one; return the least `number`."""
    world = world_size()
    first, lowest = _least([world if failure is None else rank(), number])
    if first < world:
        every = gather_to_main(_told(failure))
        told = broadcast(every[int(first)] if every else None)
        _raise_on_all(int(first), told, failure)  # type: ignore[arg-type]
    return int(lowest)


def _raise_on_all(first: int, told: tuple[type[Exception], str], failure: Any) -> None:
    """Raise what befell the rank `first`; `failure` is this rank's own, None where it has none."""
    error = failure
    if error is None:
        kind, text = told
        error = kind(f"{text} (on rank {first})")
    # The first that failed prints it, whichever exchange outside of this one sees it fail again.
    if rank() != first and not getattr(error, "agreed", False):
        error.already_reported = True
    error.agreed = True
    raise error


def _least(numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the least of the ranks' numbers, each by itself. See [Note: exchanges]."""
    if world_size() == 1 or _is_fake():
        return list(numbers)
    group, own = group or _current_group(), torch.tensor(numbers, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(own, every, dst=0, group=group)
    if every is not None:
        own = torch.stack(every).amin(0)
    dist.broadcast(own, src=0, group=group)
    return own.tolist()


def _to_main(content: bytes, most: int) -> list[Any]:
    """Return on rank 0 what every rank's pickled `content` of at most `most` bytes is of."""
    own = torch.zeros(most, dtype=torch.uint8)
    own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(own, every, dst=0, group=_current_group())
    return [pickle.loads(one.numpy().data) for one in every or ()]
