"""What the state of a run consists of: tensors for DCP, everything else for state.json.

Owns `TrainState`, its form in a checkpoint, and the way from there back into the optimizer and the
schedule. Knows neither folders nor ranks' shares.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from toolkit import ranks
from toolkit.adapters.base import adapter_entry
from toolkit.checkpoint import rng_state
from toolkit.checkpoint.commit import STATE, read_plain
from toolkit.checkpoint.store import Folder
from toolkit.errors import CheckpointError
from toolkit.models.peft_model import has_adapters
from toolkit.parsing import parse_json

Known = dict[str, TensorStorageMetadata]
"""Name -> what a checkpoint says of its tensor."""


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


# --------------------------------------------------------------------------------------------------
# To a checkpoint
# --------------------------------------------------------------------------------------------------


def optimizer_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return `optimizer.<parameter>.<name>` -> tensor; numbers go to state.json."""
    return {
        f"optimizer.{name}.{key}": value
        for name, values in _optimizer_state(state)
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def state_text(state: TrainState) -> str:
    """Return the text of state.json."""
    content = {
        "step": state.step,
        "tokens": state.tokens,
        "metrics": {k: float(v) for k, v in state.metrics.items() if math.isfinite(v)},
        "world_size": ranks.world_size(),
        "device": rng_state.device_type(),
        "optimizer": None if state.optimizer is None else _optimizer_content(state),
        # What JSON can hold: a closed-form schedule needs no more.
        "scheduler": None
        if state.scheduler is None
        else {k: v for k, v in state.scheduler.state_dict().items() if k != "lr_lambdas"},
        "data": None if state.data is None else state.data.state_dict(),
        "extra": state.extra,
        **({"adapter": adapter_entry(state.model)} if has_adapters(state.model) else {}),
        "versions": {"torch": torch.__version__},
    }
    return json.dumps(content, indent=1) + "\n"


def _optimizer_state(state: TrainState) -> Iterator[tuple[str, dict[str, Any]]]:
    if state.optimizer is None:
        return
    for name, parameter in state.model.named_parameters():
        if parameter in state.optimizer.state:
            yield name, state.optimizer.state[parameter]


def _optimizer_content(state: TrainState) -> dict[str, Any]:
    assert state.optimizer is not None
    trained = _trained(state)
    tensors: dict[str, set[str]] = {}  # by the number of dimensions, a text in JSON
    scalars: dict[str, dict[str, float]] = {}
    with_state = dict(_optimizer_state(state))
    for name, parameter in state.model.named_parameters():
        for key, value in with_state.get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                tensors.setdefault(str(parameter.ndim), set()).add(key)
            else:
                scalars.setdefault(key, {})[name] = float(value)
    return {
        "class": type(state.optimizer).__name__,
        "tensors": {dimensions: sorted(parts) for dimensions, parts in tensors.items()},
        "scalars": scalars,
        "without": [n for n in trained if not with_state.get(n)],
    }


def _trained(state: TrainState) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer has, by name."""
    assert state.optimizer is not None
    trained = {id(p) for g in state.optimizer.param_groups for p in g["params"]}
    return {n: p for n, p in state.model.named_parameters() if id(p) in trained}


# --------------------------------------------------------------------------------------------------
# From a checkpoint
# --------------------------------------------------------------------------------------------------


def read_state(checkpoint: Folder) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors: step, tokens, world size, data position.

    Raises:
        CheckpointError: the file is missing, no JSON, or lacks a piece; named.
    """
    file = checkpoint / STATE
    try:
        content = read_plain(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: step, tokens, schedule, position") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    saved = parse_json(content, file, CheckpointError)
    expected = dict.fromkeys(("step", "tokens", "world_size"), int)
    expected |= dict.fromkeys(("optimizer", "scheduler", "data", "extra"), dict)  # type: ignore[arg-type]
    lacking = [n for n in expected if not isinstance(saved, dict) or n not in saved]
    if lacking:
        raise CheckpointError(f"{file} lacks {', '.join(lacking)}")
    odd = [n for n, k in expected.items() if saved[n] is not None and type(saved[n]) is not k]
    if odd:
        raise CheckpointError(f"{file} does not hold the state of a run: {', '.join(odd)}")
    return saved


@contextlib.contextmanager
def state_faults(checkpoint: Folder) -> Iterator[None]:
    """Raise what a state.json of another form leads to as one error that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE} does not hold the state of a run: {error!r}"
        ) from error


def piece(saved: dict[str, Any], name: str, checkpoint: Folder) -> dict[str, Any]:
    """Return a part of state.json that this run needs.

    Raises:
        CheckpointError: it is not there.
    """
    if saved.get(name) is None:
        raise CheckpointError(f"{checkpoint} holds no {name} state, which this run needs to go on")
    return saved[name]


def check_model(tensors: dict[str, torch.Tensor], known: Known, checkpoint: Folder) -> None:
    """Refuse a checkpoint whose model tensors have other names, shapes or dtypes.

    Raises:
        CheckpointError: names them.
    """
    common = {n: (known[n], t) for n, t in tensors.items() if n in known}
    lacking = sorted(tensors.keys() - known.keys())
    extra = sorted(n for n in known if n.startswith("model.") and n not in tensors)
    shapes = [
        f"{n} {list(k.size)}, the model's {list(t.shape)}"
        for n, (k, t) in common.items()
        if tuple(k.size) != tuple(t.shape)
    ]
    dtypes = [
        f"{n} {k.properties.dtype}, the model's {t.dtype}"
        for n, (k, t) in common.items()
        if k.properties.dtype != t.dtype
    ]
    faults = []
    if lacking:
        faults.append(f"it lacks {len(lacking)} tensor(s) of the model: {', '.join(lacking[:3])}")
    if extra:
        faults.append(f"it has {len(extra)} that the model has not: {', '.join(extra[:3])}")
    if shapes:
        faults.append(f"{len(shapes)} have other shapes: {'; '.join(shapes[:3])}")
    elif dtypes:
        faults.append(f"{len(dtypes)} have another storage dtype: {'; '.join(dtypes[:2])}")
    if faults:
        raise CheckpointError(
            f"{checkpoint} is of another model: {'; '.join(faults)}. Use the model it was trained "
            "with, or another output_dir"
        )


def empty_moments(
    state: TrainState, known: Known, saved: dict[str, Any], checkpoint: Folder
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, per trained parameter, tensors to load its optimizer state into, laid out like it.

    Raises:
        CheckpointError: the checkpoint is of another optimizer, or lacks a part of its state.
    """
    if state.optimizer is None:
        return {}
    before = piece(saved, "optimizer", checkpoint)
    kind = type(state.optimizer).__name__
    if before["class"] != kind:
        raise CheckpointError(
            f"{checkpoint} holds the optimizer state of {before['class']}, which {kind} cannot go "
            "on with; use the optimizer it was trained with, or another output_dir"
        )
    parameters = _trained(state)
    moments: dict[str, dict[str, torch.Tensor]] = {n: {} for n in parameters}
    for key, info in known.items():
        name, _, part = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and name in parameters:
            like, dtype = parameters[name].detach(), info.properties.dtype
            alike = tuple(info.size) == tuple(like.shape)
            moments[name][part] = (
                torch.zeros_like(like, dtype=dtype)
                if alike
                else torch.zeros(info.size, dtype=dtype)
            )
    lacking = []
    for name, parameter in parameters.items():
        if name in before["without"]:  # it never had a gradient
            continue
        # All of as many dimensions have the same parts: Adafactor's differ for vectors.
        parts = before["tensors"].get(str(parameter.ndim), ())
        lacking += [f"{part} of {name}" for part in parts if part not in moments[name]]
        lacking += [
            f"{key} of {name}" for key, held in before["scalars"].items() if name not in held
        ]
        if not before["tensors"] and not before["scalars"]:
            lacking.append(f"all state of {name}")
    if lacking:
        raise CheckpointError(
            f"{checkpoint} holds no optimizer state for {len(lacking)} of what this run needs: "
            f"{', '.join(lacking[:3])}"
        )
    return moments


def fill_optimizer(
    state: TrainState, moments: dict[str, dict[str, torch.Tensor]], saved: dict[str, Any]
) -> None:
    """Put loaded `moments` and the numbers of state.json into the optimizer."""
    optimizer = state.optimizer
    if optimizer is None:
        return
    scalars = saved["optimizer"]["scalars"]
    names = {id(p): n for n, p in state.model.named_parameters()}
    groups = optimizer.state_dict()["param_groups"]
    entries: dict[int, dict[str, Any]] = {}
    for group, packed in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            numbers = {
                key: torch.tensor(per_name[name], dtype=torch.float32)
                for key, per_name in scalars.items()
                if name in per_name
            }
            if values := {**moments.get(name, {}), **numbers}:
                entries[index] = values
    # The optimizer's own function knows where each state belongs; the groups stay this run's.
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def move_schedule(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    """Move a schedule to where it was saved."""
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
