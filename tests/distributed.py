"""Run a function on several gloo ranks and hand back what each returned."""

import atexit
import faulthandler
import importlib
import os
import pickle
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from warm import Warm

_warm: list[Warm] = []
_NATIVE = [-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS]  # exit codes
_GRACE = 5.0  # seconds that the others have to end by themselves after a lost connection
_LOST = re.compile(r"[Cc]onnection (closed|reset)|closed by peer|Broken pipe|failed to recv")


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, group: bool = True) -> list[Any]:
    """Call `fn(rank, world, *args)` in `world` fresh processes; return their results in rank order.

    `fn` must be a function of a module. What it returns is pickled, so plain values and CPU
    tensors. The processes are forks of ones that have the libraries imported; they have this one's
    environment, folder and output. Without `group` there is no process group yet. Where a fault in
    native code ends one (`_NATIVE`), all are started once more, which a warning tells with the
    stacks; see docs/journal.md.

    Raises:
        ProcessRaisedException: it raised on a rank, whose traceback is in the message.
        ProcessExitedException: a rank ended in another way, of a fault in native code twice.
    """
    try:
        try:
            return _results(fn, world, args, group)
        except ProcessExitedException as error:
            if error.exit_code not in _NATIVE:
                raise
            warnings.warn(f"started once more: {error}", stacklevel=2)
            return _results(fn, world, args, group)
    except (ProcessRaisedException, ProcessExitedException):
        raise
    except BaseException:
        _end()  # some of them may be running a rank that nobody waits for
        raise


def _results(fn: Callable[..., Any], world: int, args: tuple, group: bool) -> list[Any]:
    warm_processes(world)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            _warm[rank].start(_entry, rank, *_name(fn), world, folder, group, args)
        _wait(world, folder)
        return [pickle.loads(Path(folder, f"{r}.pkl").read_bytes()) for r in range(world)]


def warm_processes(world: int) -> list[Warm]:
    """Return the warm processes of ranks 0 to `world` - 1, which live until this one ends."""
    while (known := len(_warm)) < world:
        _warm.append(Warm(_warm[known % 2] if known > 1 else None))
    return _warm[:world]


def tensor_sums(model: torch.nn.Module) -> dict[str, int]:
    """Return what a manifest says of every tensor of the model as it is now. Collective."""
    from torch.distributed.tensor import DTensor

    from toolkit.formats.bit_sums import byte_and_row_sums
    from toolkit.models.peft_model import model_tensors

    found = {}
    for name, tensor in model_tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        rows = whole.detach() if whole.ndim > 1 else whole.detach().reshape(-1, 1)
        found[name] = int(byte_and_row_sums(rows, 0)[1])
    return found


def run_recipe_ranks(
    recipe: str | Path,
    world: int,
    *flags: str,
    cwd: Path,
    kill_after: float | None = None,
    grace: float = _GRACE,
) -> subprocess.CompletedProcess[str]:
    """Run a recipe on `world` gloo ranks, in forks of warm processes, as torchrun would.

    A second instead of the ten of a real launch. Where a rank fails, the others are ended after
    `grace` seconds; all are killed after `kill_after` seconds, where that is given. Returns the
    highest exit code, and the outputs of all ranks in rank order.
    """
    warm_processes(world)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    known = Path(__file__).parent.parent / "recipes" / f"{recipe}.py"
    script = str(known if isinstance(recipe, str) else recipe)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            _warm[rank].start(_recipe_entry, rank, world, port, script, flags, str(cwd), folder)
        codes, running, failed = [0] * world, set(range(world)), False
        deadline = None if kill_after is None else time.monotonic() + kill_after
        while running:
            patience = grace if failed else None
            if deadline is not None:
                patience = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([_warm[r] for r in running], [], [], patience)
            for rank in [r for r in running if _warm[r] in ready]:
                running.remove(rank)
                codes[rank] = abs(_warm[rank].ended())
            if patience is not None and not ready:
                for other in running:
                    _warm[other].send(signal.SIGKILL)
                deadline = None
            failed = any(codes)
        out, err = (
            "".join(Path(folder, f"{r}.{kind}").read_text() for r in range(world))
            for kind in ("out", "err")
        )
    return subprocess.CompletedProcess([script, *flags], max(codes), out, err)


def run_toolkit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `toolkit WORDS` in a fork of a warm process: a second instead of the six of imports."""
    (warm,) = warm_processes(1)
    with tempfile.TemporaryDirectory() as folder:
        warm.start(_toolkit_entry, words, str(cwd), folder)
        code = abs(warm.ended())
        out, err = (Path(folder, f"0.{kind}").read_text() for kind in ("out", "err"))
    return subprocess.CompletedProcess(["toolkit", *words], code, out, err)


def _toolkit_entry(words: tuple[str, ...], cwd: str, folder: str) -> None:
    from toolkit import cli

    _write_to(folder, 0)
    os.chdir(cwd)
    sys.exit(cli.main(list(words)))


def _write_to(folder: str, rank: int) -> None:
    """Let what this process prints go to files."""
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)


def _recipe_entry(
    rank: int, world: int, port: int, script: str, flags: tuple[str, ...], cwd: str, folder: str
) -> None:
    _write_to(folder, rank)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    os.chdir(cwd)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")  # ends the process, as after a launch


@atexit.register
def _end() -> None:
    while _warm:
        _warm.pop().close()


def _wait(world: int, folder: str) -> None:
    """Wait for all ranks; raise where one failed."""
    running = set(range(world))
    failed: list[tuple[int, int]] = []
    killed = False
    while running:
        # One that lost its connection lost it to another, which may still be writing why it ended.
        patience = _GRACE if failed and not killed else None
        ready, _, _ = select.select([_warm[rank] for rank in running], [], [], patience)
        for rank in [r for r in running if _warm[r] in ready]:
            running.remove(rank)
            code = _warm[rank].ended()
            if code and not killed:
                failed.append((rank, code))
        cause = any(not _lost_connection(folder, rank) for rank, _ in failed)
        if failed and not killed and (cause or not ready):
            killed = True
            for other in running:  # they wait for those that failed
                _warm[other].send(signal.SIGKILL)
    if failed:
        rank, code = min(failed, key=lambda one: _lost_connection(folder, one[0]))
        _raise(folder, rank, code, _warm[rank].pid)


def _lost_connection(folder: str, rank: int) -> bool:
    said = Path(folder, f"{rank}.error")
    return said.exists() and _LOST.search(said.read_text()) is not None


def _raise(folder: str, rank: int, code: int, pid: int) -> None:
    said = Path(folder, f"{rank}.error")
    if said.exists():
        raise ProcessRaisedException(said.read_text(), rank, pid)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    stacks = Path(folder, f"{rank}.stacks").read_text().split("Extension modules")[0]
    raise ProcessExitedException(f"rank {rank} {how}\n{stacks}".rstrip(), rank, pid, code)


def _name(fn: Callable[..., Any]) -> tuple[str, str]:
    """Return module and name of a function, under which another process finds it."""
    module = fn.__module__
    if module == "__main__":  # of a script, which stands in the first folder of sys.path
        module = Path(sys.argv[0]).stem
    return module, fn.__qualname__


def _entry(
    rank: int, module: str, name: str, world: int, folder: str, group: bool, args: tuple
) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    # All threads' native stacks go to stderr, Python's to the file.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    faulthandler.enable(os.open(f"{folder}/{rank}.stacks", os.O_CREAT | os.O_WRONLY))
    try:
        if group:
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        fn = getattr(importlib.import_module(module), name)
        result = fn(rank, world, *args)
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(result))
    if group:
        dist.barrier()
        dist.destroy_process_group()
    # Gloo's threads may abort an interpreter that is going down: see `launch._exit_process`.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
