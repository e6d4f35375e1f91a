"""Agreement between the processes of a run: what one decides all learn, where one fails all raise.

A rank that raises alone leaves the others waiting in a collective until a timeout. Everything that
can fail on one rank only (reading files, checking data) goes through the functions here.

Without an initialised process group every function is the plain call.
"""

import datetime
import functools
import hashlib
import re
import shutil
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TextIO, TypeVar

import torch.distributed as dist
from tqdm import tqdm

from toolkit.errors import ToolkitError

T = TypeVar("T")
P = ParamSpec("P")

_Told = tuple[type[Exception], str] | None  # what other ranks learn of one's failure
_PATIENCE = datetime.timedelta(days=1)
_groups: dict[Any, dict[str, dist.ProcessGroup]] = {}
_channel = threading.local()


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_here() -> int:
    """Return how many processes of the run are on this machine. Collective."""
    names = gather(socket.gethostname())
    return names.count(names[rank()])


def say(*lines: str | None) -> None:
    """Print lines once, from rank 0, above a progress bar; empty ones are left out."""
    for line in filter(None, lines if rank() == 0 else ()):
        show(line)


def show(line: str, file: TextIO | None = None) -> None:
    """Print a line of this process above its progress bars, where there are any; in a terminal that
    is narrower it is broken between words. Texts of several lines stay as they are.
    """
    stream = file or sys.stdout
    if stream.isatty() and "\n" not in line:
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


def first_to_report(text: str) -> bool:
    """Return whether this rank is the first that is about to print `text`. Not collective: a rank
    that fails alone, or cannot ask any more, says it itself.
    """
    store = _store()
    key = f"said/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    try:
        own = str(rank())
        return store is None or store.compare_set(key, "", own) == own.encode()
    except RuntimeError:
        return True


def post(name: str) -> None:
    """Leave `name` for ranks that lose this one, which is about to leave. Not collective."""
    with suppress(RuntimeError):  # the store is gone, with whoever held it
        if (store := _store()) is not None:
            store.set(f"posted/{name}", "")


def posted(name: str) -> bool:
    """Return whether any rank did `post` this. Not collective."""
    try:
        return (store := _store()) is not None and store.check([f"posted/{name}"])
    except RuntimeError:
        return False


def broadcast(value: T) -> T:
    """Return rank 0's `value` on every rank. Collective; pickles a small object."""
    if world_size() == 1 or _is_fake():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_current_group())
    return box[0]


def gather(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on every rank. Collective."""
    if world_size() == 1 or _is_fake():
        return [value] * world_size()
    values: list = [None] * world_size()
    dist.all_gather_object(values, value, group=_current_group())
    return values


def on_all(fn: Callable[[], T]) -> T:
    """Run `fn` on every rank; when it fails on any of them, raise on all of them.

    The rank that failed raises its own exception. The others raise a `ToolkitError` of the same
    class where it was one, with the first failing rank's message. Collective, one small exchange.
    """
    result, failure = _outcome(fn)
    _raise_on_all(gather(_told(failure)), failure)
    return result  # type: ignore[return-value]


def collective(fn: Callable[P, T]) -> Callable[P, T]:
    """Make a function that every rank calls fail on all of them when it fails on any (`on_all`)."""

    @functools.wraps(fn)
    def on_every_rank(*args: P.args, **kwargs: P.kwargs) -> T:
        return on_all(lambda: fn(*args, **kwargs))

    return on_every_rank


def gather_results(fn: Callable[[], T]) -> list[T]:
    """Run `fn` on every rank; return all results, in rank order, or raise as `on_all` does.
    Collective, one exchange, which pickles the results.
    """
    result, failure = _outcome(fn)
    outcomes = gather((_told(failure), result))
    _raise_on_all([told for told, _ in outcomes], failure)
    return [one for _, one in outcomes]  # type: ignore[misc]


def on_main(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0 alone and return its result on every rank; its failure is everyone's.
    Collective, one broadcast.
    """
    result, failure = _outcome(fn) if rank() == 0 else (None, None)
    told, result = broadcast((_told(failure), result))
    _raise_on_all([told], failure)
    return result  # type: ignore[return-value]


def main_first(fn: Callable[[], T]) -> T:
    """Run `fn` on rank 0, then on the others: rank 0 fills a cache that the others read."""
    result = on_all(fn if rank() == 0 else lambda: None)
    if world_size() == 1:
        return result  # type: ignore[return-value]
    return on_all((lambda: result) if rank() == 0 else fn)  # type: ignore[return-value]


def object_group(channel: str = "main") -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks that waits a day: one rank may tokenise for hours. None
    without a process group. Created at its first use, which every rank takes part in.
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()  # of a process group that is gone
        _groups[world] = {}
    if channel not in _groups[world]:
        _groups[world][channel] = dist.new_group(backend="gloo", timeout=_PATIENCE)
    return _groups[world][channel]


@contextmanager
def exchanges_over(channel: str) -> Iterator[None]:
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


def _store() -> dist.Store | None:
    """Return the store of the process group, None without other ranks."""
    # Private in torch 2.x; without it each rank speaks for itself.
    store_of = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if world_size() == 1 or store_of is None else store_of()


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


def _raise_on_all(told: list[_Told], failure: BaseException | None) -> None:
    """Raise where any of the ranks that `told` is of failed; `failure` is this rank's own."""
    failed = [i for i, what in enumerate(told) if what is not None]
    if not failed:
        return
    error = failure
    if error is None:
        kind, text = told[failed[0]]  # type: ignore[misc]
        error = kind(f"{text} (on rank {failed[0]})")
    # The first that failed prints it, whichever exchange outside of this one sees it fail again.
    if rank() != failed[0] and not getattr(error, "agreed", False):
        error.already_reported = True  # type: ignore[union-attr]
    error.agreed = True  # type: ignore[union-attr]
    raise error
