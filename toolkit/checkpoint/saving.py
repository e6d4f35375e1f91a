"""The state of a run, saved so that it can be trusted and resumed so that nothing is lost.

Owns what a state consists of and its way into a torch DCP checkpoint and back. The folder protocol
is `toolkit.commit`'s, the bytes are `toolkit.dcp_writer`'s and `toolkit.dcp_reader`'s. Does not
know the model's class; the assets for an export are copied, not understood.

[Note: saving behind the loop] With `async_save` the loop waits only until the tensors are copied to
host memory and everything small is snapshot. Writing, hashing, commit and pruning
follow in a thread, with a process group of their own: threads that share one with the loop hang.
One save at a time: the next one waits for it, and raises what it failed with, as `wait` and the
end of the run do.
"""

import contextlib
import functools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from toolkit import ranks
from toolkit.adapters.base import adapter_entry, check_same_adapters
from toolkit.checkpoint import commit, rng_state, store_commit
from toolkit.checkpoint.dcp_reader import read_tensors
from toolkit.checkpoint.dcp_writer import HashingWriter
from toolkit.checkpoint.staging import HostStager
from toolkit.checkpoint.store import Place, is_url, where
from toolkit.config.retention import retention
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError
from toolkit.formats.dcp import METADATA_FILE, read_metadata
from toolkit.formats.digests import described, part_digests, rows_digest, whole_rows
from toolkit.formats.hf_folder import read_config
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.training import background as in_flight

T = TypeVar("T")

__all__ = [
    "TrainState",
    "find",
    "newest",
    "restore",
    "resume",
    "rows_digest",
    "save",
    "tensor_digests",
]

MANIFEST_VERSION = 2
_DCP, _HF, _RNG, _STATE = "dcp", "hf", "rng", commit.STATE
_CHANNEL, _GATHERED = "checkpoint", "gathered"
# Keys of config.json that say nothing about what the model computes in training.
_NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation_autoset"),
}


@dataclass(frozen=True)
class Restored:
    """What one rank read of a checkpoint."""

    own_bytes: int
    """Bytes of this rank's parts of parameters and optimizer state."""
    bytes_requested: int
    """Bytes asked for to fill them; verification, which reads everything, is not in it."""
    seconds: float


@dataclass
class TrainState:
    """Everything a run needs to go on as if nothing had happened."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None
    data: Any = None
    """Position in the data: anything with `state_dict()` and `load_state_dict()` of JSON values."""
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Supervised tokens seen."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the evaluation at this step, by which `keep_best` compares; empty where there was none."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that is JSON; `resume` updates it."""
    restored: Restored | None = None
    """What `resume` read; None before."""


def save(state: TrainState, run_dir: str | Path | Place, cfg: CheckpointConfig) -> str:
    """Write and commit a checkpoint of `state`, prune old ones; return its path. Collective.

    `run_dir` may be a URL of an object store, `s3://bucket/run`: the protocol there is that of
    `toolkit.store_commit`.

    Each rank writes its shards, at the disk's speed. A failure or a kill at any moment leaves the
    checkpoints that were committed before as they are. Committed when the call returns; with
    `cfg.async_save` it returns as soon as the state is copied (a copy of this rank's parameters and
    optimizer state in host memory, kept for the next save), and the path is that of the checkpoint
    to be. See [Note: saving behind the loop].

    Raises:
        CheckpointError: on every rank, when any rank could not write; with `cfg.async_save` by the
            next `save`, `wait` or the end of the run.
    """
    wait()
    begun = time.perf_counter()
    group = ranks.object_group(_CHANNEL)  # every rank is here now, and not when it is needed
    run = _where(run_dir)
    # Of rank 0 alone; made here, where a failure of it is everyone's without another exchange.
    content: list[str] = []

    def begin() -> str:
        content.append(_content(state))
        return str(_protocol(run).begin(run, state.step))

    folder = where(ranks.on_main(begin))
    place = folder if isinstance(folder, Place) else None
    if isinstance(folder, Place):  # where small files are put when they are complete
        folder = ranks.on_all(lambda: Path(tempfile.mkdtemp(prefix="checkpoint-")))
    try:
        model = model_tensors(state.model)
        gathered = whole_rows(model)
        tensors = {**model, **_optimizer_tensors(state)}
        if cfg.async_save:
            # A gathered tensor may be the live one: where one rank holds all of it.
            live: dict[Any, torch.Tensor] = dict(tensors)
            live |= {(_GATHERED, n): t for n, t in gathered.items()}
            copies = ranks.on_all(lambda: _stager().copy(live))
            tensors = {n: copies[n] for n in tensors}
            gathered = {n: copies[_GATHERED, n] for n in gathered}
        job = _Job(
            folder,
            place,
            run,
            cfg,
            state.step,
            {n: tensors[n] for n in model},
            gathered,
            rng_state.snapshot(),
            "".join(content),
            getattr(state.model, "hf_assets", None),
        )
        writer = HashingWriter(
            folder / _DCP, place / _DCP if place else None, ranks_here=ranks.ranks_here()
        )
        if cfg.async_save:
            upload = dcp.async_save(
                tensors, storage_writer=writer, process_group=group, async_stager=_stager()
            )
            work = functools.partial(
                _finish_behind,
                job,
                writer,
                upload.result,  # type: ignore[union-attr]
                begun,
                time.perf_counter() - begun,
            )
            in_flight.start(f"the checkpoint of step {state.step}", work)
            return str(place or folder.parent / commit.step_name(state.step))
    except BaseException:
        _remove(folder, place)
        raise
    return _finish(
        job, writer, lambda: dcp.save(tensors, storage_writer=writer, process_group=group)
    )


def wait() -> None:
    """Return when what `save` began is committed; raise what it failed with. At once, if nothing is
    in flight.

    Raises:
        CheckpointError: on every rank, when any rank could not write.
    """
    in_flight.wait()


def newest(run_dir: str | Path | Place) -> Path | Place | None:
    """Return the newest checkpoint of a run that verifies, None where there is none. Collective.

    One that fails is named loudly and renamed to `step-N.bad-*`; nothing is deleted. Reads and
    hashes every file, split over the ranks by size; rank 0 says how long that took.
    """
    wait()
    run = _where(run_dir)
    protocol = _protocol(run)
    broken = ranks.on_main(
        lambda: [(str(path), what) for path, what in protocol.broken_steps(run).values()]
    )
    for name, what in broken:
        give_up(where(name), what)
    while True:
        found = ranks.on_main(
            lambda: str(max(protocol.committed_steps(run).items(), default=(0, ""))[1])
        )
        if not found:
            return None
        path = where(found)
        damage = _verify(path)
        if not damage:
            return path
        give_up(path, "; ".join(f"{n} {what}" for n, what in damage[:5]))


def find(
    run_dir: str | Path | Place, model: nn.Module, position: Any = None
) -> Path | Place | None:
    """Return the checkpoint that a start goes on from, None where the run has none. Collective.

    The newest that verifies, of this very model; `position` (in the data) is moved to where it was
    saved, since the number of steps and the batch depend on it. `restore` takes the result.

    Raises:
        CheckpointError: none verifies and some were set aside; it is of another model; or it holds
            no position.
    """
    saved = newest(run_dir)
    if saved is None:
        ranks.on_all(lambda: refuse_lost(run_dir))
        return None
    ranks.on_all(lambda: check_same_model(model, saved))
    if position is not None:
        content = ranks.on_all(lambda: _piece(read_state(saved), "data", saved))
        ranks.on_all(lambda: position.load_state_dict(content))
    return saved


def refuse_lost(run_dir: str | Path | Place) -> None:
    """Refuse to begin anew where checkpoints of the run were set aside and none is left.

    Raises:
        CheckpointError: names them. A run that starts over by itself would cost what it had done.
    """
    run = where(run_dir)
    aside = _protocol(run).set_aside_steps(run)
    if aside and not _protocol(run).committed_steps(run):
        raise CheckpointError(
            f"no checkpoint of {run} verifies; what failed is kept: {', '.join(aside[:4])}. To "
            "begin anew give another output_dir, or move those away"
        )


def _where(run_dir: str | Path | Place) -> Path | Place:
    return ranks.on_all(lambda: where(run_dir)) if is_url(run_dir) else where(run_dir)


def _protocol(place: Path | Place) -> Any:
    """Return the module that keeps the commit protocol there: both have the same functions."""
    return store_commit if isinstance(place, Place) else commit


def _verify(checkpoint: Path | Place) -> list[tuple[str, str]]:
    """Return what is wrong with the files of a checkpoint, on every rank. Collective."""
    begun, protocol = time.perf_counter(), _protocol(checkpoint)
    sizes: dict[str, int] = ranks.on_main(
        lambda: {n: e["size"] for n, e in protocol.read_manifest(checkpoint)["files"].items()}
    )
    # The largest file first, each to the rank with the least to read so far.
    loads = [0] * ranks.world_size()
    mine = []
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == ranks.rank():
            mine.append(name)
    found = ranks.gather_results(lambda: protocol.damaged_files(checkpoint, mine))
    damage = [one for part in found for one in part]
    damage += ranks.on_main(lambda: _strangers(checkpoint, sizes))
    if ranks.rank() == 0:
        done = "read" if damage else "verified"
        print(
            f"{done} {checkpoint.name}: {sum(sizes.values()) / 1e9:.2f} GB hashed by "
            f"{ranks.world_size()} rank(s) in {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
    return damage


def _strangers(checkpoint: Path | Place, known: dict[str, int]) -> list[tuple[str, str]]:
    there = _protocol(checkpoint).files_below(checkpoint)
    there -= {*known, commit.MANIFEST, commit.COMMIT}
    return [(name, "is not in the manifest") for name in sorted(there)]


def give_up(checkpoint: str | Path | Place, what: str) -> None:
    """Set a checkpoint aside, loudly: no resume takes it, and nothing is deleted. Collective."""
    checkpoint = where(checkpoint)
    aside = ranks.on_main(lambda: str(_protocol(checkpoint).set_aside(checkpoint)))
    done = "moved to" if isinstance(checkpoint, Path) else "marked by"
    if ranks.rank() == 0:
        print(
            f"WARNING: checkpoint {checkpoint.name} is damaged and not used ({what}); {done} "
            f"{aside}",
            flush=True,
        )


def resume(state: TrainState, run_dir: str | Path | Place, cfg: CheckpointConfig) -> int | None:
    """Restore `state` from the newest checkpoint that verifies; return its step. Collective.

    The model must be materialised. Works on any number of ranks, also unsharded in one process
    without a process group. Each rank reads its own rows only. Learning rate and decay stay those
    of `state`'s optimizer: the schedule is moved to the step, not replaced.

    Returns:
        The step, or None when the run has no checkpoint.

    Raises:
        CheckpointError: `state` asks for what the checkpoint lacks (names it), or its tensors have
            other shapes: the architecture changed.
    """
    path = newest(run_dir)
    return None if path is None else restore(state, path)


def read_state(checkpoint: Path | Place) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors: step, tokens, world size, data position.

    Raises:
        CheckpointError: the file is missing, no JSON, or lacks a piece; named.
    """
    file = checkpoint / _STATE
    try:
        saved = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: step, tokens, schedule, position") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    wanted = ("step", "tokens", "world_size", "optimizer", "scheduler", "data", "extra")
    lacking = [n for n in wanted if not isinstance(saved, dict) or n not in saved]
    if lacking:
        raise CheckpointError(f"{file} lacks {', '.join(lacking)}")
    kinds = dict.fromkeys(wanted[:3], int) | dict.fromkeys(wanted[3:], dict)
    odd = [n for n, k in kinds.items() if saved[n] is not None and type(saved[n]) is not k]
    if odd:
        raise CheckpointError(f"{file} does not hold the state of a run: {', '.join(odd)}")
    return saved


def check_same_model(model: nn.Module, checkpoint: Path | Place) -> None:
    """Refuse to go on with another architecture than was saved, before a tensor is read.

    Compares config.json of `model.hf_assets` with the checkpoint's copy: two models may agree in
    every shape and still compute something else (number of heads, rotary base, activation). With
    adapters their settings are compared too, and which base they belong to.

    Raises:
        CheckpointError: names the settings that changed, or the base.
        ModelError: the checkpoint's copy cannot be read.
    """
    check_same_adapters(model, read_state(checkpoint), checkpoint)
    file = checkpoint / _HF / "config.json"
    assets = getattr(model, "hf_assets", None)
    if assets is None:
        return
    with _at_hand(checkpoint, f"{_HF}/config.json") as folder:
        if not (folder / _HF / "config.json").is_file():
            return
        before, now = read_config(folder / _HF), assets.config
    names = [n for n in {**before, **now} if n not in _NOT_ARCHITECTURE]
    changed = [n for n in names if before.get(n) != now.get(n)]
    if changed:
        listed = "; ".join(f"{n} was {before.get(n)!r}, is {now.get(n)!r}" for n in changed[:4])
        raise CheckpointError(
            f"{checkpoint} is of another architecture: in config.json {listed}. Give the model it "
            f"was trained with ({file} is its config), or another output_dir"
        )


@contextlib.contextmanager
def _at_hand(checkpoint: Path | Place, *names: str) -> Iterator[Path]:
    """Give the checkpoint's folder; of one on a store, a folder with the files `names` that it has,
    each as the manifest says.
    """
    if isinstance(checkpoint, Path):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        store_commit.fetch(checkpoint, Path(folder), lambda name: name in names)
        yield Path(folder)


def restore(state: TrainState, saved: Path | Place | None) -> int | None:
    """Restore `state` in place from what `find` returned and return its step; see `resume`.

    Nothing is done, and None returned, where it found none. Collective.
    """
    return None if saved is None else _restore(state, saved)


def _restore(state: TrainState, checkpoint: Path | Place) -> int:
    begun = time.perf_counter()
    ranks.on_all(lambda: check_same_model(state.model, checkpoint))
    saved = ranks.on_all(lambda: read_state(checkpoint))
    metadata = ranks.on_all(lambda: _metadata(checkpoint))
    known = {
        k: v
        for k, v in metadata.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }
    tensors = model_tensors(state.model)
    ranks.on_all(lambda: _check_model(tensors, known, checkpoint))
    moments = ranks.on_all(lambda: _empty_moments(state, known, saved, checkpoint))
    if state.scheduler is not None:
        ranks.on_all(lambda: _piece(saved, "scheduler", checkpoint))
    if state.data is not None:
        ranks.on_all(lambda: _piece(saved, "data", checkpoint))
    flat = {f"optimizer.{n}.{k}": t for n, values in moments.items() for k, t in values.items()}
    read = ranks.on_all(lambda: read_tensors(checkpoint / _DCP, metadata, {**tensors, **flat}))
    if state.optimizer is not None:
        _fill_optimizer(state, moments, saved)
    if state.scheduler is not None:
        _move_schedule(state.scheduler, saved["scheduler"])
    if state.data is not None:
        ranks.on_all(lambda: state.data.load_state_dict(saved["data"]))
    state.step, state.tokens = saved["step"], saved["tokens"]
    state.metrics = dict(saved.get("metrics") or {})
    state.extra.update(saved["extra"])
    ranks.on_all(lambda: _restore_rng(checkpoint, saved))
    state.restored = Restored(read.own, read.read, time.perf_counter() - begun)
    _say_restored(state.restored, checkpoint)
    return state.step


def _metadata(checkpoint: Path | Place) -> Metadata:
    with _at_hand(checkpoint, f"{_DCP}/{METADATA_FILE}") as folder:
        # A store's shards are not at hand; their sizes were compared with the manifest's.
        return read_metadata(folder / _DCP, blobs=isinstance(checkpoint, Path))


def _say_restored(mine: Restored, checkpoint: Path | Place) -> None:
    every = ranks.gather(mine)
    own, asked = (sum(getattr(r, n) for r in every) for n in ("own_bytes", "bytes_requested"))
    if ranks.rank() == 0:
        print(
            f"read {checkpoint.name}: {len(every)} rank(s) asked for {asked / 1e9:.2f} GB to fill "
            f"{own / 1e9:.2f} GB ({asked / max(own, 1):.2f} x) in "
            f"{max(r.seconds for r in every):.1f} s",
            flush=True,
        )


def _restore_rng(checkpoint: Path | Place, saved: dict[str, Any]) -> None:
    """Restore this rank's random state; on other ranks or another device derive one, and say so."""
    before = (saved["world_size"], saved.get("device", "cpu"))
    now = (ranks.world_size(), rng_state.device_type())
    if before == now:
        with _at_hand(checkpoint, f"{_RNG}/{rng_state.file_name(ranks.rank())}") as folder:
            rng_state.restore(folder / _RNG, ranks.rank())
        return
    if ranks.rank() == 0:
        print(
            f"resuming on {now[0]} rank(s) of {now[1]} what {before[0]} of {before[1]} saved: "
            "weights, optimizer and data continue exactly, random state (dropout) is derived anew",
            flush=True,
        )
    rng_state.derive(ranks.rank(), saved["step"])


# --------------------------------------------------------------------------------------------------
# Model and optimizer as flat tensors
# --------------------------------------------------------------------------------------------------


def _optimizer_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return `optimizer.<parameter>.<name>` -> tensor; numbers go to state.json."""
    return {
        f"optimizer.{name}.{key}": value
        for name, values in _optimizer_state(state)
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def _optimizer_scalars(state: TrainState) -> dict[str, dict[str, float]]:
    """Return {name of the number: {parameter: value}} of the optimizer's state."""
    found: dict[str, dict[str, float]] = {}
    for name, values in _optimizer_state(state):
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                found.setdefault(key, {})[name] = float(value)
    return found


def _optimizer_state(state: TrainState) -> Iterator[tuple[str, dict[str, Any]]]:
    if state.optimizer is None:
        return
    for name, parameter in state.model.named_parameters():
        if parameter in state.optimizer.state:
            yield name, state.optimizer.state[parameter]


def _check_model(
    tensors: dict[str, torch.Tensor],
    known: dict[str, TensorStorageMetadata],
    checkpoint: Path | Place,
) -> None:
    lacking = sorted(n for n in tensors if n not in known)
    extra = sorted(n for n in known if n.startswith("model.") and n not in tensors)
    other = [
        f"{n} {list(known[n].size)}, the model's {list(t.shape)}"
        for n, t in tensors.items()
        if n in known and tuple(known[n].size) != tuple(t.shape)
    ]
    dtypes = {
        f"{n} {known[n].properties.dtype}, the model's {t.dtype}"
        for n, t in tensors.items()
        if n in known and known[n].properties.dtype != t.dtype
    }
    said = []
    if lacking:
        said.append(f"it lacks {len(lacking)} tensor(s) of the model: {', '.join(lacking[:3])}")
    if extra:
        said.append(f"it has {len(extra)} that the model has not: {', '.join(extra[:3])}")
    if other:
        said.append(f"{len(other)} have other shapes: {'; '.join(other[:3])}")
    if dtypes and not other:
        said.append(f"{len(dtypes)} have another storage dtype: {'; '.join(sorted(dtypes)[:2])}")
    if said:
        raise CheckpointError(
            f"{checkpoint} is of another model: {'; '.join(said)}. Use the model it was trained "
            "with, or "
            "another output_dir"
        )


def _empty_moments(
    state: TrainState,
    known: dict[str, TensorStorageMetadata],
    saved: dict[str, Any],
    checkpoint: Path | Place,
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, per trained parameter, tensors to load its optimizer state into, laid out like it."""
    if state.optimizer is None:
        return {}
    before = _piece(saved, "optimizer", checkpoint)
    kind = type(state.optimizer).__name__
    if before["class"] != kind:
        raise CheckpointError(
            f"{checkpoint} holds the optimizer state of {before['class']}, which {kind} cannot go "
            "on with; use the optimizer it was trained with, or another output_dir"
        )
    trained = {id(p) for g in state.optimizer.param_groups for p in g["params"]}
    parameters = {n: p for n, p in state.model.named_parameters() if id(p) in trained}
    moments: dict[str, dict[str, torch.Tensor]] = {n: {} for n in parameters}
    for key, info in known.items():
        name, _, leaf = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or name not in parameters:
            continue
        like, dtype = parameters[name].detach(), info.properties.dtype
        same = tuple(info.size) == tuple(like.shape)
        moments[name][leaf] = (
            torch.zeros_like(like, dtype=dtype) if same else torch.zeros(info.size, dtype=dtype)
        )
    # A parameter that never had a gradient has no state, and is named: all others of as many
    # dimensions have the same parts (Adafactor's differ for vectors and matrices).
    lacking = [
        f"{key} of {name}"
        for name in parameters
        if name not in before["without"]
        for key, there in (
            *(
                (leaf, leaf in moments[name])
                for leaf in before["tensors"].get(str(parameters[name].ndim), ())
            ),
            *((number, name in values) for number, values in before["scalars"].items()),
            ("all state", bool(before["tensors"] or before["scalars"])),
        )
        if not there
    ]
    if lacking:
        raise CheckpointError(
            f"{checkpoint} holds no optimizer state for {len(lacking)} of what this run needs: "
            f"{', '.join(lacking[:3])}"
        )
    return moments


def _fill_optimizer(
    state: TrainState, moments: dict[str, dict[str, torch.Tensor]], saved: dict
) -> None:
    optimizer = state.optimizer
    assert optimizer is not None
    scalars = saved["optimizer"]["scalars"]
    names = {id(p): n for n, p in state.model.named_parameters()}
    groups = optimizer.state_dict()["param_groups"]
    entries: dict[int, dict[str, Any]] = {}
    for group, packed in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            values: dict[str, Any] = dict(moments.get(name, {}))
            for key, per_name in scalars.items():
                if name in per_name:
                    values[key] = torch.tensor(per_name[name], dtype=torch.float32)
            if values:
                entries[index] = values
    # The optimizer's own function knows where each state belongs; the groups stay those of this
    # run.
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _move_schedule(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    if not isinstance(scheduler, LambdaLR):
        scheduler.load_state_dict(saved)
        rates = saved["_last_lr"]
    else:
        # A closed form of the step: the peak and the length of this run's own config hold.
        scheduler.last_epoch = saved["last_epoch"]
        scheduler._step_count = saved.get("_step_count", saved["last_epoch"] + 1)
        rates = [
            base * rate(scheduler.last_epoch)
            for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _piece(saved: dict[str, Any], name: str, checkpoint: Path | Place) -> dict[str, Any]:
    if saved.get(name) is None:
        raise CheckpointError(f"{checkpoint} holds no {name} state, which this run needs to go on")
    return saved[name]


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """Everything of one save that must not change any more, beside the tensors that DCP writes."""

    folder: Path
    place: Place | None
    """On a store, where everything is put; `folder` then only holds this rank's small files."""
    run: Path | Place
    cfg: CheckpointConfig
    step: int
    model: dict[str, torch.Tensor]
    gathered: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]
    content: str
    """Of state.json; empty on all ranks but the first."""
    assets: Any


@functools.cache
def _stager() -> HostStager:
    """Return the process's stager: one save is in flight at a time."""
    return HostStager()


def _finish_behind(
    job: _Job, writer: HashingWriter, upload: Callable[[], object], begun: float, waited: float
) -> None:
    with ranks.exchanges_over(_CHANNEL):
        path = _finish(job, writer, upload)
    if ranks.rank() == 0:
        print(
            f"committed {path} after {time.perf_counter() - begun:.3f} s, of which the loop waited "
            f"{waited:.3f} s",
            flush=True,
        )


def _finish(job: _Job, writer: HashingWriter, upload: Callable[[], object]) -> str:
    """Write everything, while the digests are made; commit; prune. Collective."""
    failed = f"checkpoint of step {job.step} could not be written"
    try:
        with ThreadPoolExecutor(1, "digests") as pool:
            digests = pool.submit(part_digests, job.model, job.gathered)
            _named(failed, upload)
            parts = ranks.gather_results(
                lambda: _named(failed, lambda: (_write_small(job, writer), digests.result()))
            )
        path = ranks.on_main(lambda: _named(failed, lambda: str(_commit(job, parts))))
    except CheckpointException as error:
        rank, first = next(iter(error.failures.items()), (0, error))
        cause = first[0] if isinstance(first, tuple) else first
        if isinstance(cause, CheckpointError):
            named = CheckpointError(f"{failed}: {cause}")
        else:
            named = commit.disk_error(failed, cause)
        # Every rank has it; the first that failed prints it.
        named.already_reported = ranks.rank() != rank  # type: ignore[attr-defined]
        raise named from error
    finally:
        _remove(job.folder, job.place)  # still under its temporary name: it failed
    policy = retention(job.cfg)
    ranks.on_main(lambda: [str(p) for p in _protocol(job.run).prune(job.run, policy)])
    return path


def _named(failed: str, fn: Callable[[], T]) -> T:
    """Run `fn` with the disk's errors as ours: so that `ranks` tells them to the other ranks, which
    did not fail, in the same class and words.
    """
    try:
        return fn()
    except OSError as error:
        raise commit.disk_error(failed, error) from error


def _write_small(job: _Job, writer: HashingWriter) -> dict[str, dict[str, Any]]:
    """Write what is not tensors; return size and sha256 of every file of this rank."""
    files = {f"{_DCP}/{name}": entry for name, entry in writer.files.items()}
    names = [f"{_RNG}/{rng_state.write(job.folder / _RNG, ranks.rank(), job.rng)}"]
    if ranks.rank() == 0:
        (job.folder / _STATE).write_text(job.content, "utf-8")
        names += [_STATE, f"{_DCP}/.metadata"]
        if job.assets is not None:
            (job.folder / _HF).mkdir()
            job.assets.save(job.folder / _HF)
            if (entry := _adapter(job)) is not None:
                content = json.dumps(entry["config"], indent=2) + "\n"
                (job.folder / _HF / "adapter_config.json").write_text(content, "utf-8")
            names += [f"{_HF}/{n}" for n in commit.files_below(job.folder / _HF)]
    if job.place is not None:
        return files | store_commit.put_files(job.place, job.folder, names)
    return files | commit.hash_files(job.folder, names)


def _commit(job: _Job, parts: list[tuple[dict[str, dict[str, Any]], torch.Tensor]]) -> Path | Place:
    manifest = {
        "version": MANIFEST_VERSION,
        "step": job.step,
        "files": {name: entry for files, _ in parts for name, entry in files.items()},
        "tensors": described(job.model, _summed([lanes for _, lanes in parts])),
    }
    if (entry := _adapter(job)) is not None:
        manifest["adapter"] = entry
    if job.place is not None:
        return store_commit.commit(job.place, job.step, manifest)
    return commit.commit(job.folder, job.step, manifest)


def _adapter(job: _Job) -> dict[str, Any] | None:
    """Return what state.json says of adapters; on the first rank."""
    return json.loads(job.content).get("adapter")


def _remove(folder: Path, place: Place | None) -> None:
    """Remove what a save leaves on this machine's disk; on a store the next save does."""
    if (place is not None or ranks.rank() == 0) and folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def _content(state: TrainState) -> str:
    """Return the text of state.json."""
    content = {
        "step": state.step,
        "tokens": state.tokens,
        "metrics": {k: float(v) for k, v in state.metrics.items() if math.isfinite(v)},
        "world_size": ranks.world_size(),
        "device": rng_state.device_type(),
        "optimizer": None if state.optimizer is None else _optimizer_content(state),
        "scheduler": None if state.scheduler is None else _json_only(state.scheduler.state_dict()),
        "data": None if state.data is None else state.data.state_dict(),
        "extra": state.extra,
        **({"adapter": adapter_entry(state.model)} if has_adapters(state.model) else {}),
        "versions": {"torch": torch.__version__},
    }
    return json.dumps(content, indent=1) + "\n"


def _optimizer_content(state: TrainState) -> dict[str, Any]:
    assert state.optimizer is not None
    trained = {id(p) for g in state.optimizer.param_groups for p in g["params"]}
    with_state = dict(_optimizer_state(state))
    leaves: dict[str, set[str]] = {}  # by the number of dimensions, a text in JSON
    for name, parameter in state.model.named_parameters():
        for key, value in with_state.get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                leaves.setdefault(str(parameter.ndim), set()).add(key)
    return {
        "class": type(state.optimizer).__name__,
        "tensors": {dimensions: sorted(parts) for dimensions, parts in leaves.items()},
        "scalars": _optimizer_scalars(state),
        "without": [
            n
            for n, p in state.model.named_parameters()
            if id(p) in trained and not with_state.get(n)
        ],
    }


def _json_only(values: dict[str, Any]) -> dict[str, Any]:
    """Return what JSON can hold of a schedule's state: a closed-form schedule needs no more."""
    return {k: v for k, v in values.items() if k != "lr_lambdas"}


def tensor_digests(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return name -> {"shape", "dtype", "digest"} of every model tensor. Collective; see
    `toolkit.digests`.
    """
    tensors = model_tensors(model)
    lanes = part_digests(tensors, whole_rows(tensors))
    return described(tensors, _summed(ranks.gather(lanes)))


def _summed(lanes: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(lanes).sum(0)  # int64 wraps
