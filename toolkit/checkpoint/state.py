"""Split the state of a run into tensors for DCP and other values for state.json, and restore it."""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from toolkit import ranks
from toolkit.adapters.base import build_adapter_entry
from toolkit.checkpoint.names import STATE
from toolkit.checkpoint.store import Folder, read_json_object, storage_of
from toolkit.errors import CheckpointError, one_line
from toolkit.formats import Tensors, TensorsMetadata
from toolkit.models.peft_model import has_adapters
from toolkit.training.train_state import TrainState

_KINDS: dict[str, type] = {
    **dict.fromkeys(("step", "tokens", "world_size"), int),
    **dict.fromkeys(("optimizer", "scheduler", "data", "extra"), dict),
}


def optimizer_tensors(state: TrainState) -> Tensors:
    """Map `optimizer.<parameter>.<name>` to the optimizer's state tensors, without scalars."""
    return {
        f"optimizer.{name}.{key}": value
        for name, values in _state_by_name(state).items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }


def format_state(state: TrainState, position: dict[str, Any] | None) -> str:
    """Format the content of state.json: everything except tensors and random state.

    `position` is the state dict of `state.data`.
    """
    content = {
        "step": state.step,
        "tokens": state.tokens,
        "metrics": {k: float(v) for k, v in state.metrics.items() if math.isfinite(v)},
        "world_size": ranks.world_size(),
        "device": rng_device(),
        "optimizer": _describe_optimizer(state),
        # Only values that JSON can hold: a closed-form schedule needs no more.
        "scheduler": None
        if state.scheduler is None
        else {k: v for k, v in state.scheduler.state_dict().items() if k != "lr_lambdas"},
        "data": position,
        "extra": state.extra,
        **({"adapter": build_adapter_entry(state.model)} if has_adapters(state.model) else {}),
        "versions": {"torch": torch.__version__},
    }
    return json.dumps(content, indent=1) + "\n"


def _state_by_name(state: TrainState) -> dict[str, dict[str, Any]]:
    """Map parameter names to the optimizer's state of each, if there is one."""
    optimizer_state = {} if state.optimizer is None else state.optimizer.state
    return {
        name: optimizer_state[p]
        for name, p in state.model.named_parameters()
        if p in optimizer_state
    }


def _describe_optimizer(state: TrainState) -> dict[str, Any] | None:
    """Build the optimizer's entry of state.json.

    Returns:
        None without an optimizer, otherwise a dict. `class`: name of the optimizer's class.
        `tensors`: number of dimensions of a parameter (as text) -> sorted names of its state
        tensors, such as `exp_avg`. `scalars`: name of a scalar -> parameter -> value. `without`:
        trained parameters that have no state.
    """
    if state.optimizer is None:
        return None
    tensors: dict[str, set[str]] = {}  # by the number of dimensions, a text in JSON
    scalars: dict[str, dict[str, float]] = {}
    with_state, parameters = _state_by_name(state), dict(state.model.named_parameters())
    for name, values in with_state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                tensors.setdefault(str(parameters[name].ndim), set()).add(key)
            else:
                scalars.setdefault(key, {})[name] = float(value)
    return {
        "class": type(state.optimizer).__name__,
        "tensors": {dimensions: sorted(parts) for dimensions, parts in tensors.items()},
        "scalars": scalars,
        "without": [n for n in state.trained_parameters() if not with_state.get(n)],
    }


def read_state(checkpoint: Folder) -> dict[str, Any]:
    """Read state.json of a checkpoint as a dict (step, tokens, world size, data position, ...).

    Raises:
        CheckpointError: the file is missing or unreadable, or a required entry is absent or has a
            wrong type. An entry may be null.
    """
    file = checkpoint / STATE
    saved = read_json_object(file)
    if saved is None:
        raise CheckpointError(f"{file} is missing: step, tokens, schedule, position")
    if odd := [n for n, k in _KINDS.items() if not isinstance(saved.get(n, ...), k | None)]:
        raise CheckpointError(f"{file} lacks {', '.join(odd)}, or has it in another form")
    return saved


@contextlib.contextmanager
def raise_bad_state(checkpoint: Folder) -> Iterator[None]:
    """Convert lookup, type and value errors in the context to a CheckpointError about state.json.

    Use it around code that reads the content of the file.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE} is no state of a run: {one_line(error)}"
        ) from error


def get_required_entry(saved: dict[str, Any], name: str, checkpoint: Folder) -> dict[str, Any]:
    """Return the entry `name` of state.json, which this run needs to resume.

    Args:
        saved: the content of state.json.
        name: such as `optimizer`, `scheduler` or `data`.
        checkpoint: the checkpoint, for the error.

    Raises:
        CheckpointError: the entry is absent or null.
    """
    if saved.get(name) is None:
        raise CheckpointError(f"{checkpoint} holds no {name} state, which this run needs to resume")
    return saved[name]


def check_model_tensors(
    tensors: Tensors, saved_tensors: TensorsMetadata, checkpoint: Folder
) -> None:
    """Raise a CheckpointError if the checkpoint's model tensors differ from the model's.

    Names, shapes and dtypes are compared; the error lists some differences.

    Args:
        tensors: the tensors of the run's model, with the prefix `model.`.
        saved_tensors: metadata of all tensors in the checkpoint.
        checkpoint: the checkpoint, for the error.
    """
    faults = []
    if lacking := sorted(tensors.keys() - saved_tensors.keys()):
        faults.append(f"it lacks {len(lacking)} tensor(s) of the model: {', '.join(lacking[:3])}")
    if extra := sorted(n for n in saved_tensors if n.startswith("model.") and n not in tensors):
        faults.append(f"it has {len(extra)} that the model has not: {', '.join(extra[:3])}")
    saved = {n: f"{list(k.size)} {k.properties.dtype}" for n, k in saved_tensors.items()}
    now = {n: f"{list(t.shape)} {t.dtype}" for n, t in tensors.items() if n in saved_tensors}
    if different := [f"{n} {saved[n]}, the model's {now[n]}" for n in now if saved[n] != now[n]]:
        faults.append(f"{len(different)} have other shapes or dtypes: {'; '.join(different[:3])}")
    if faults:
        raise CheckpointError(
            f"{checkpoint} is of another model: {'; '.join(faults)}. Use the model it was trained "
            "with, or another output_dir"
        )


def allocate_optimizer_state(
    state: TrainState, saved_tensors: TensorsMetadata, saved: dict[str, Any], checkpoint: Folder
) -> dict[str, Tensors]:
    """Allocate tensors into which a saved optimizer state can be loaded.

    They have the dtypes of the checkpoint, and are sharded like the parameters.

    Args:
        state: the state of the run; its optimizer is not changed.
        saved_tensors: metadata of all tensors in the checkpoint.
        saved: the content of state.json.
        checkpoint: the checkpoint, for errors.

    Returns:
        Parameter name -> name of the state (such as `exp_avg`) -> tensor; {} without an optimizer.

    Raises:
        CheckpointError: the checkpoint is of another optimizer, or lacks a part of its state.
    """
    if state.optimizer is None:
        return {}
    before = get_required_entry(saved, "optimizer", checkpoint)
    kind = type(state.optimizer).__name__
    if before["class"] != kind:
        raise CheckpointError(
            f"{checkpoint} holds the optimizer state of {before['class']}, which {kind} cannot go "
            "on with; use that one, or another output_dir"
        )
    parameters = state.trained_parameters()
    init_state: Any = getattr(state.optimizer, "init_state", None)
    first = {name: init_state(p) if init_state else {} for name, p in parameters.items()}
    moments: dict[str, Tensors] = {n: {} for n in parameters}
    for key, info in saved_tensors.items():
        name, _, part = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and name in parameters:
            like, dtype = parameters[name].detach(), info.properties.dtype
            moments[name][part] = (
                first[name][part]
                if part in first[name]
                else torch.zeros_like(like, dtype=dtype)
                if info.size == like.shape
                else torch.zeros(info.size, dtype=dtype, device=like.device)
            )
    lacking = []
    for name, parameter in parameters.items():
        if name in before["without"]:  # it never had a gradient
            continue
        # Parameters with as many dimensions have the same parts, unless the optimizer names them.
        parts = before["tensors"].get(str(parameter.ndim), ())
        scalars = before["scalars"]
        if init_state:
            parts = [part for part, value in first[name].items() if value.ndim > 0]
            scalars = {k: scalars.get(k, {}) for k, v in first[name].items() if v.ndim == 0}
        lacking += [f"{part} of {name}" for part in parts if part not in moments[name]]
        lacking += [
            f"{key} of {name}"
            for key, value_by_name in scalars.items()
            if name not in value_by_name
        ]
        if not before["tensors"] and not before["scalars"]:
            lacking.append(f"all state of {name}")
    if lacking:
        raise CheckpointError(
            f"{checkpoint} holds no optimizer state for {len(lacking)} of what this run needs: "
            f"{', '.join(lacking[:3])}"
        )
    return moments


def load_optimizer_state(
    state: TrainState, moments: dict[str, Tensors], saved: dict[str, Any]
) -> None:
    """Set the state of the optimizer to loaded tensors and the scalars of state.json.

    Settings of the parameter groups, such as the learning rate, stay as they are. Without an
    optimizer, nothing is done.

    Args:
        state: the state of the run.
        moments: parameter name -> name of the state -> loaded tensor.
        saved: the content of state.json.
    """
    optimizer = state.optimizer
    if optimizer is None:
        return
    numbers: dict[str, Tensors] = {name: {} for name in moments}
    for key, value_by_name in saved["optimizer"]["scalars"].items():
        for name in value_by_name.keys() & numbers.keys():
            numbers[name][key] = torch.tensor(value_by_name[name], dtype=torch.float32)
    names = {id(p): n for n, p in state.model.named_parameters()}
    groups = optimizer.state_dict()["param_groups"]
    entries: dict[int, dict[str, Any]] = {}
    for group, packed in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            if scalars := numbers[names[id(parameter)]]:
                entries[index] = scalars
    # `load_state_dict` knows where the scalars belong; the groups stay those of this run.
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    # Tensors already have the layout and dtype that was saved; it would cast 8-bit states to float.
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parts := moments[names[id(parameter)]]:
            optimizer.state[parameter].update(parts)


def restore_schedule(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    """Move a learning rate schedule to its saved step, and set the optimizer's learning rates.

    For a `LambdaLR`, the rates are computed from this run's settings. For other schedules, the
    saved state and rates are restored.

    Args:
        scheduler: the schedule.
        saved: its saved state dict.
    """
    if not isinstance(scheduler, LambdaLR):
        scheduler.load_state_dict(saved)
        rates = saved["_last_lr"]
    else:
        # The rate is a closed form of the step, with the peak and length of this run's config.
        scheduler.last_epoch = saved["last_epoch"]
        scheduler._step_count = saved.get("_step_count", saved["last_epoch"] + 1)
        rates = [
            base * rate(scheduler.last_epoch)
            for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# ---- Random state: python's, numpy's, torch's and the device's

# Names in every rank's file; a device that draws random numbers adds its own.
_RNG_PIECES = ("python", "python_gauss", "numpy", "numpy_position", "numpy_gauss", "torch")


def rng_device() -> str:
    """Return the type of the accelerator that this process has used, such as `cuda`, or else `cpu`.

    Only an accelerator that is in use has a random state. Starts no device.
    """
    # A device that the process has not used has no state, and looking would start it.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    used = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device.type if used() else "cpu"


def snapshot_rng() -> dict[str, torch.Tensor]:
    """Copy the random state of Python, numpy, torch and the current device into named tensors.

    Returns:
        Name -> tensor. Names begin with `python` or `numpy`, or are `torch` or the device type.
    """
    _version, words, gauss = random.getstate()
    # The legacy form is a tuple; numpy's stubs allow the other one too.
    _, keys, position, has_gauss, cached = cast(tuple, numpy.random.get_state(legacy=True))
    gauss = float("nan") if gauss is None else gauss
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if rng_device() != "cpu":
        tensors[rng_device()] = torch.get_device_module(rng_device()).get_rng_state()
    return tensors


def write_rng(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> str:
    """Write random state to the file of `rank` in `folder`; return the file's name.

    `tensors` is the result of `snapshot_rng`. The folder is created if it is missing.
    """
    folder.mkdir(exist_ok=True)
    # `save_file` would hide the cause of a failed write, and only the owner could read its file.
    (folder / _rng_file_name(rank)).write_bytes(save(tensors))
    return _rng_file_name(rank)


def restore_rng(folder: Folder, rank: int) -> None:
    """Set the random state of this process to the one that `rank` saved in `folder`.

    Raises:
        CheckpointError: the file is missing, damaged, or lacks a part of the state.
    """
    file = folder / _rng_file_name(rank)
    try:
        saved = load(storage_of(file).read_small_file())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the random state of rank {rank}") from error
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): the random state of rank {rank}"
        ) from error
    expected = (*_RNG_PIECES, *([] if rng_device() == "cpu" else [rng_device()]))
    if lacking := [name for name in expected if name not in saved]:
        raise CheckpointError(f"{file} lacks the random state of {', '.join(lacking)}")
    try:
        gauss = saved["python_gauss"].item()
        random.setstate((3, tuple(saved["python"].tolist()), None if gauss != gauss else gauss))
        position, has_gauss = saved["numpy_position"].tolist()
        keys = saved["numpy"].numpy().astype(numpy.uint32)
        numpy.random.set_state(("MT19937", keys, position, has_gauss, saved["numpy_gauss"].item()))
        torch.set_rng_state(saved["torch"])
        if rng_device() != "cpu":
            torch.get_device_module(rng_device()).set_rng_state(saved[rng_device()])
    except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{file} holds no random state: {error}") from error


def _rng_file_name(rank: int) -> str:
    """Return the name of the file with a rank's random state."""
    return f"rank-{rank:05d}.safetensors"
