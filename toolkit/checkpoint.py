"""The state of a run, saved so that it can be trusted and resumed so that nothing is lost.

Owns what a state consists of, the digests of live tensors and their way into a torch DCP checkpoint
and back. The folder protocol is `toolkit.commit`'s. Does not know the model's class; the assets for
an export are copied, not understood.

[Note: digests] While saving, each rank hashes the rows (dim 0) of the model tensors that it holds:
sha256 over name, row index and row bytes. A tensor's digest is the lane-wise wrapping sum of its
rows' hashes, so it is the same for any number of shards, and needs one all-reduce of 32 bytes a
tensor. Tensors of one dimension or none are hashed whole. It guards against accidents; the files'
sha256 guards the bytes.
"""

import functools
import hashlib
import json
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from toolkit import commit, ranks
from toolkit.config import CheckpointConfig
from toolkit.dcp_format import TrustedLoadPlanner, TrustedReader
from toolkit.errors import CheckpointError
from toolkit.layout import local_slices

_DCP, _HF, _RNG, _STATE = "dcp", "hf", "rng", "state.json"
# Keys of config.json that say nothing about what the model computes in training.
_NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation_autoset"),
}


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
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else that is JSON; `resume` updates it."""


def save(state: TrainState, run_dir: str | Path, cfg: CheckpointConfig) -> str:
    """Write and commit a checkpoint of `state`, prune old ones; return its path. Collective.

    Each rank writes its shards. Committed when the call returns; a failure or a kill at any moment
    leaves the checkpoints that were committed before as they are.

    Raises:
        CheckpointError: on every rank, when any rank could not write.
    """
    folder = Path(ranks.on_main(lambda: str(commit.begin(run_dir, state.step))))
    try:
        tensors = {**_model_tensors(state.model), **_optimizer_tensors(state)}
        _write_dcp(tensors, folder / _DCP)
        digests = tensor_digests(state.model)
        ranks.together(lambda: _write_rng(folder / _RNG))
        ranks.on_main(lambda: _write_rest(state, folder))
        files = _hash_split(folder)
        manifest = {"version": 1, "step": state.step, "files": files, "tensors": digests}
        path = ranks.on_main(lambda: str(commit.commit(folder, state.step, manifest)))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint of step {state.step} could not be written: {error}"
        ) from error
    finally:
        if ranks.rank() == 0 and folder.exists():  # still under its temporary name: it failed
            shutil.rmtree(folder, ignore_errors=True)
    ranks.on_main(lambda: [str(p) for p in commit.prune(run_dir, cfg.save_total_limit)])
    return path


def wait() -> None:
    """Return when every `save` has been committed. Saving is synchronous, so that is at once."""


def newest(run_dir: str | Path) -> Path | None:
    """Return the newest checkpoint of a run that verifies, None where there is none. Collective.

    One that fails is named loudly and renamed to `step-N.bad-*`; nothing is deleted. Reads and
    hashes every file, split over the ranks.
    """
    while True:
        path = ranks.on_main(
            lambda: max(commit.committed_steps(run_dir).items(), default=(0, None))[1]
        )
        if path is None:
            return None
        names = ranks.on_main(lambda p=path: sorted(commit.read_manifest(p)["files"]))  # type: ignore[misc]
        mine = names[ranks.rank() :: ranks.world_size()]
        found = ranks.together(functools.partial(commit.damaged_files, path, mine))
        damage = [one for part in ranks.gather(found) for one in part]
        if not damage:
            return path
        aside = ranks.on_main(functools.partial(commit.set_aside, path))
        if ranks.rank() == 0:
            listed = "; ".join(f"{n} {what}" for n, what in damage[:5])
            print(
                f"WARNING: checkpoint {path.name} is damaged and not used ({listed}); moved to "
                f"{aside}",
                flush=True,
            )


def resume(state: TrainState, run_dir: str | Path, cfg: CheckpointConfig) -> int | None:
    """Restore `state` from the newest checkpoint that verifies; return its step. Collective.

    The model must be materialised. Works on any number of ranks, also unsharded in one process.
    Learning rate and decay stay those of `state`'s optimizer: the schedule is moved to the step,
    not replaced.

    Returns:
        The step, or None when the run has no checkpoint.

    Raises:
        CheckpointError: `state` asks for what the checkpoint lacks (names it), or its tensors have
            other shapes: the architecture changed.
    """
    path = newest(run_dir)
    return None if path is None else restore(state, path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors: step, tokens, world size, data position."""
    return json.loads((checkpoint / _STATE).read_text("utf-8"))


def check_same_model(model: nn.Module, checkpoint: Path) -> None:
    """Refuse to go on with another architecture than was saved, before a tensor is read.

    Compares config.json of `model.hf_assets` with the checkpoint's copy: two models may agree in
    every shape and still compute something else (number of heads, rotary base, activation).

    Raises:
        CheckpointError: names the settings that changed.
    """
    file = checkpoint / _HF / "config.json"
    assets = getattr(model, "hf_assets", None)
    if assets is None or not file.is_file():
        return
    before, now = json.loads(file.read_text("utf-8")), assets.config
    names = [n for n in {**before, **now} if n not in _NOT_ARCHITECTURE]
    changed = [n for n in names if before.get(n) != now.get(n)]
    if changed:
        listed = "; ".join(f"{n} was {before.get(n)!r}, is {now.get(n)!r}" for n in changed[:4])
        raise CheckpointError(
            f"{checkpoint} is of another architecture: in config.json {listed}. Give the model it "
            f"was trained with ({file} is its config), or another output_dir"
        )


def restore(state: TrainState, checkpoint: Path) -> int:
    """Restore `state` in place from one checkpoint that was verified before; see `resume`."""
    ranks.together(lambda: check_same_model(state.model, checkpoint))
    saved = ranks.together(lambda: read_state(checkpoint))
    reader = TrustedReader(checkpoint / _DCP)
    metadata = ranks.together(reader.read_metadata)
    known = {
        k: v
        for k, v in metadata.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }
    tensors = _model_tensors(state.model)
    ranks.together(lambda: _check_model(tensors, known, checkpoint))
    moments = ranks.together(lambda: _empty_moments(state, known, checkpoint))
    flat = {f"optimizer.{n}.{k}": t for n, values in moments.items() for k, t in values.items()}
    try:
        dcp.load({**tensors, **flat}, storage_reader=reader, planner=TrustedLoadPlanner())
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{checkpoint} could not be read: {error}") from error
    if state.optimizer is not None:
        _fill_optimizer(state, moments, saved)
    if state.scheduler is not None:
        _move_schedule(state.scheduler, _piece(saved, "scheduler", checkpoint))
    if state.data is not None:
        state.data.load_state_dict(_piece(saved, "data", checkpoint))
    state.step, state.tokens = saved["step"], saved["tokens"]
    state.extra.update(saved["extra"])
    ranks.together(lambda: _restore_rng(checkpoint, saved["world_size"], state.step))
    return state.step


# --------------------------------------------------------------------------------------------------
# Model and optimizer as flat tensors
# --------------------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `model.<name>` -> tensor for parameters (tied ones once) and persistent buffers."""
    persistent = model.state_dict().keys()
    tensors: dict[str, torch.Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    tensors |= {n: b for n, b in model.named_buffers() if n in persistent}
    return {f"model.{n}": t for n, t in tensors.items()}


def _optimizer_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return `optimizer.<parameter>.<name>` -> tensor; numbers go to state.json."""
    return {
        f"optimizer.{name}.{key}": value
        for name, values in _optimizer_state(state)
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def _optimizer_scalars(state: TrainState) -> dict[str, dict[str, float]]:
    """Return {state name: {value: ...}} of the optimizer's numbers, one default and its
    exceptions.
    """
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
    tensors: dict[str, torch.Tensor], known: dict[str, TensorStorageMetadata], checkpoint: Path
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
    state: TrainState, known: dict[str, TensorStorageMetadata], checkpoint: Path
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, per trained parameter, tensors to load its optimizer state into, laid out like it."""
    if state.optimizer is None:
        return {}
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
    if read_state(checkpoint).get("optimizer") is None:
        raise CheckpointError(
            f"{checkpoint} holds no optimizer state, which this run needs to go on"
        )
    lacking = [n for n, values in moments.items() if not values]
    if lacking and len(lacking) < len(
        moments
    ):  # an optimizer without tensors (plain SGD) lacks all
        raise CheckpointError(f"{checkpoint} holds no optimizer state of {', '.join(lacking[:3])}")
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


def _piece(saved: dict[str, Any], name: str, checkpoint: Path) -> dict[str, Any]:
    if saved.get(name) is None:
        raise CheckpointError(f"{checkpoint} holds no {name} state, which this run needs to go on")
    return saved[name]


# --------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------


def _write_dcp(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        dcp.save(
            tensors,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=False),
        )
    except CheckpointException as error:
        causes = "; ".join(
            f"rank {r}: {e[0] if isinstance(e, tuple) else e}" for r, e in error.failures.items()
        )
        raise CheckpointError(f"{folder} could not be written: {causes}") from error


def _write_rest(state: TrainState, folder: Path) -> None:
    assets = getattr(state.model, "hf_assets", None)
    if assets is not None:
        (folder / _HF).mkdir()
        assets.save(folder / _HF)
    content = {
        "step": state.step,
        "tokens": state.tokens,
        "world_size": ranks.world_size(),
        "optimizer": None
        if state.optimizer is None
        else {"class": type(state.optimizer).__name__, "scalars": _optimizer_scalars(state)},
        "scheduler": None if state.scheduler is None else _json_only(state.scheduler.state_dict()),
        "data": None if state.data is None else state.data.state_dict(),
        "extra": state.extra,
        "versions": {"torch": torch.__version__},
    }
    (folder / _STATE).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _json_only(values: dict[str, Any]) -> dict[str, Any]:
    """Return what JSON can hold of a schedule's state: a closed-form schedule needs no more."""
    return {k: v for k, v in values.items() if k != "lr_lambdas"}


def _hash_split(folder: Path) -> dict[str, dict[str, Any]]:
    """Fsync and hash all files below `folder`, split over the ranks; return the union on every
    rank.
    """
    names = ranks.on_main(lambda: sorted(commit.files_below(folder)))
    mine = names[ranks.rank() :: ranks.world_size()]
    found = ranks.together(lambda: commit.hash_files(folder, mine))
    return {n: v for part in ranks.gather(found) for n, v in part.items()}


def tensor_digests(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return name -> {"shape", "dtype", "digest"} of every model tensor. Collective; see [Note:
    digests].
    """
    tensors = _model_tensors(model)
    lanes = torch.zeros(len(tensors), 4, dtype=torch.int64)
    for i, (name, tensor) in enumerate(tensors.items()):
        lanes[i] = _local_digest(name, tensor)
    if ranks.world_size() > 1:
        dist.all_reduce(lanes)
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "digest": lanes[i].numpy().tobytes().hex(),
        }
        for i, (name, tensor) in enumerate(tensors.items())
    }


def _local_digest(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the digest: the sum over its rows, 4 lanes of 64 bits."""
    nothing = torch.zeros(4, dtype=torch.int64)
    if tensor.ndim < 2:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return rows_digest(name, whole.reshape(1, -1), 0) if ranks.rank() == 0 else nothing
    if not isinstance(tensor, DTensor):
        return rows_digest(name, tensor, 0) if ranks.rank() == 0 else nothing
    coordinates = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    if any(c > 0 for c, placement in coordinates if not placement.is_shard()):
        return nothing  # of replicas only the first counts
    local = tensor.to_local()
    first = local_slices(tensor)[0].start
    return rows_digest(name, local, first) if local.numel() else nothing


def rows_digest(name: str, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return the wrapping sum of the hashes of `rows` [n, ...], whose first has global index
    `first`.
    """
    flat = rows.detach().cpu().contiguous().reshape(rows.shape[0], -1).view(torch.uint8).numpy()
    prefix = hashlib.sha256(name.encode() + b"\0")
    total = numpy.zeros(4, dtype=numpy.uint64)
    for index in range(flat.shape[0]):
        hasher = prefix.copy()
        hasher.update(struct.pack("<Q", first + index))
        hasher.update(flat[index])
        total += numpy.frombuffer(hasher.digest(), dtype=numpy.uint64)
    return torch.from_numpy(total.view(numpy.int64))


# --------------------------------------------------------------------------------------------------
# Random state
# --------------------------------------------------------------------------------------------------


def _write_rng(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    _version, words, gauss = random.getstate()
    # The legacy form is a tuple; numpy's stubs allow the other one too.
    _, keys, position, has_gauss, cached = cast(tuple, numpy.random.get_state(legacy=True))
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [gauss if gauss is not None else float("nan")], dtype=torch.float64
        ),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / f"rank-{ranks.rank():05d}.safetensors")


def _restore_rng(checkpoint: Path, saved_world: int, step: int) -> None:
    """Restore this rank's random state; on another number of ranks derive one, and say so."""
    if saved_world != ranks.world_size():
        if ranks.rank() == 0:
            print(
                f"resuming on {ranks.world_size()} rank(s) what {saved_world} saved: weights, "
                "optimizer and "
                "data continue exactly, random state (dropout) is derived anew",
                flush=True,
            )
        key = hashlib.sha256(f"{torch.initial_seed()}/{ranks.rank()}/{step}".encode()).digest()
        random.seed(int.from_bytes(key[:8], "little"))
        numpy.random.seed(int.from_bytes(key[8:12], "little"))
        torch.manual_seed(int.from_bytes(key[16:24], "little") >> 1)
        return
    file = checkpoint / _RNG / f"rank-{ranks.rank():05d}.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the random state of rank {ranks.rank()}")
    saved = load_file(file)
    gauss = saved["python_gauss"].item()
    random.setstate((3, tuple(saved["python"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss = saved["numpy_position"].tolist()
    keys = saved["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, position, has_gauss, saved["numpy_gauss"].item()))
    torch.set_rng_state(saved["torch"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
