"""Try, before a run, whether PEFT loads every adapter that the run will train.

PEFT applies the renamings of the base's checkpoint to the keys of an adapter. Some of them change a
key that is right already (`mlp.shared_experts` of mistral_large4 becomes `mlp.mlp.shared_experts`),
and PEFT drops a key that it cannot place. Without this trial a run would fail at its first save.
"""

import copy
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from toolkit.adapters.peft_folder import fill_without_memory, map_file_keys
from toolkit.errors import one_line
from toolkit.models.packed_linear import PackedLinear
from toolkit.models.patterns import replace_numbers
from toolkit.models.peft_model import (
    ADAPTER,
    adapted_parameters,
    adapter_config,
    base_of,
    copied_modules,
    layer_parameters,
)

_TRIAL_RESULTS: dict[str, dict[str, str]] = {}  # digest of a model and its adapters -> result


def find_lost_adapters(adapted: nn.Module) -> dict[str, str]:
    """Find the adapters that PEFT would not load again from an export of this model.

    Loads an export through PEFT into a copy of the model. Each tensor of the copy is one expanded
    element, so the trial takes milliseconds and hardly any memory. The result is cached for each
    model and adapter config.

    Args:
        adapted: a model with adapters, on meta; it is not changed.

    Returns:
        Name of a base parameter whose adapter would be lost -> the reason. Empty if none would be.
    """
    keys = map_file_keys(adapted)
    described = str((cast(Any, base_of(adapted)).config.to_json_string(), adapter_config(adapted)))
    shapes = str([(key, *adapted.get_parameter(name).shape) for key, name in keys.items()])
    place = hashlib.sha256((described + shapes).encode()).hexdigest()
    # Planning builds the same model many times.
    if place not in _TRIAL_RESULTS:
        _TRIAL_RESULTS[place] = _load_with_peft(adapted, keys)
    return dict(_TRIAL_RESULTS[place])


def _load_with_peft(adapted: nn.Module, keys: dict[str, str]) -> dict[str, str]:
    """Let PEFT load an export of all adapters into a copy, and find those that it does not load.

    If PEFT raises an error, each kind of adapter is loaded alone to find the cause.

    Args:
        adapted: a model with adapters, on meta.
        keys: key of the adapter file -> parameter of `adapted`.

    Returns:
        Name of a base parameter whose adapter is lost -> the reason.
    """
    layers = adapted_parameters(adapted)
    names = {id(p): name for name, p in adapted.named_parameters(remove_duplicate=False)}
    parts = {
        parameter: {names[id(p)] for p in layer_parameters(layer).values()}
        for parameter, layer in layers.items()
    }
    for module, (_, trained) in copied_modules(adapted).items():
        for leaf, parameter in trained.named_parameters():
            parts[f"{module}.{leaf}"] = {names[id(parameter)]}
    try:
        lost = _names_not_loaded(adapted, keys)
        reason = "PEFT renames its keys and does not load them"
        return {p: reason for p, members in parts.items() if members & lost}
    except Exception as error:
        # PEFT may raise any error. Find the adapters that cause it.
        return _find_failing_kinds(adapted, keys, parts) or dict.fromkeys(parts, one_line(error))


def _find_failing_kinds(
    adapted: nn.Module, keys: dict[str, str], parts: dict[str, set[str]]
) -> dict[str, str]:
    """Let PEFT load one kind of adapter at a time, and find those that it does not load.

    Adapters whose names differ only in the layer number are one kind.

    Args:
        adapted: a model with adapters, on meta.
        keys: key of the adapter file -> parameter of `adapted`.
        parts: name of a base parameter -> names of its adapter's parameters in `adapted`.

    Returns:
        Name of a base parameter whose adapter is lost -> the reason.
    """
    kinds: dict[str, list[str]] = {}
    for parameter in parts:
        kinds.setdefault(replace_numbers(parameter), []).append(parameter)
    lost: dict[str, str] = {}
    for parameters in kinds.values():
        members = set[str]().union(*(parts[p] for p in parameters))
        try:
            failed = _names_not_loaded(adapted, {k: n for k, n in keys.items() if n in members})
            reason = "PEFT renames its keys and does not load them"
        except Exception as error:
            failed = members
            reason = f"PEFT cannot load it: {one_line(error)}"
        lost |= {p: reason for p in parameters if parts[p] & failed}
    return lost


def _names_not_loaded(adapted: nn.Module, keys: dict[str, str]) -> set[str]:
    """Let PEFT load a distinct value for each key into a copy of the model, and compare.

    Args:
        adapted: a model with adapters, on meta; it is not changed.
        keys: key of the adapter file -> parameter of `adapted`.

    Returns:
        The parameters that did not get their value.
    """
    from peft import set_peft_model_state_dict

    # PEFT moves adapters to the device and the dtype of their layer's weight, or to the dtype that
    # a packed layer computes in.
    model: Any = fill_without_memory(copy.deepcopy(adapted).double())  # type: ignore[arg-type]
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            layer.compute_dtype = torch.float64
    shapes = {name: t.shape for name, t in model.state_dict().items()}
    values = {key: _distinct_tensor(i, shapes[name]) for i, (key, name) in enumerate(keys.items())}
    with warnings.catch_warnings(action="ignore"):
        set_peft_model_state_dict(model, dict(values), ADAPTER, low_cpu_mem_usage=True)
    loaded = model.state_dict()
    return {name for key, name in keys.items() if not _has_values(loaded[name], values[key])}


def _distinct_tensor(number: int, shape: Sequence[int]) -> torch.Tensor:
    """Create a float64 tensor whose rows differ from each other and from those of other numbers.

    Args:
        number: identifies the tensor among those of one trial.
        shape: shape of the tensor.
    """
    rows, *inner_shape = shape or (1,)
    column = torch.arange(rows, dtype=torch.float64) + (number + 1) * 2.0**24
    return column.view(rows, *(1 for _ in inner_shape)).expand(*shape) if shape else column[0]


def _has_values(loaded: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if `loaded` is not on meta, and equals `value` in shape and values."""
    return not loaded.is_meta and loaded.shape == value.shape and torch.equal(loaded, value)
