"""Run transformers' own loader on sharded models: key renames, fused experts, dtypes.

[Note: slicing before conversion] A rank reads only its rows of a tensor. That gives wrong values,
without an error, if a conversion does not commute with taking rows (`Chunk` or `Concatenate` along
dim 0, and everything unknown), or if a rank has no row (two experts on three ranks). Those tensors
are read in full, converted on an unsharded copy one group at a time, and sliced afterwards.
"""

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist
from transformers.utils import logging

from toolkit.errors import LoadingError
from toolkit.formats import (
    NEXT_TOKEN_LAYERS,
    FileTensor,
    OpenFiles,
    StoredTensor,
    assets_of,
    conversion_mapping,
    like_dtensor,
    map_source_keys,
    nested_items,
    read_tensor,
    slice_like,
    split_mapping,
    transformers_private,
    wrap_like,
)
from toolkit.loading.materialisation import place_parameter, set_tensor
from toolkit.models.causal_lm import model_on_meta
from toolkit.models.classes import build_from_config, original_class
from toolkit.models.packed_linear import packed_weights

_WRAP = "_dtensor_from_local_like"  # the loader creates DTensors with it
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # turns off the loader's threads


@dataclass(frozen=True)
class LoadGroup:
    """Checkpoint tensors that must be loaded together, and the parameters built from them."""

    keys: tuple[str, ...]
    parameter: str  # the first of several; unexpected if the model does not have it
    operations: tuple[Any, ...] | None
    """Conversions that build the parameters; None: the one tensor is the parameter."""

    @property
    def converted(self) -> bool:
        """True if conversions build the parameters; False if the one stored tensor is copied."""
        return self.operations is not None


def plan_load_groups(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Group checkpoint tensors by the parameters that transformers builds from them.

    A tensor without a conversion is a group by itself. Reads no tensors.

    Args:
        model: a model with assets.
        keys: names of the checkpoint's tensors.
    """
    converters = split_mapping(assets_of(model).conversions)[1]
    by_pattern = {p: tuple(c.operations) for c in converters for p in c.source_patterns}
    groups: dict[tuple[str, str | None], LoadGroup] = {}
    for key, target, pattern in map_source_keys(model, keys):
        # Two plain tensors of one name are not loaded together: the second replaces the first.
        member = (target, key if pattern is None else None)
        earlier_keys = groups[member].keys if member in groups else ()
        operations = None if pattern is None else by_pattern[pattern]
        groups[member] = LoadGroup((*earlier_keys, key), target, operations)
    return list(groups.values())


def load_group(
    model: PreTrainedModel, group: LoadGroup, entries: dict[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Read one group of tensors and build its parameters on the CPU, in the stored dtype.

    If the stored dtypes differ, the result has their promoted dtype. Tensors that are stored
    quantised become float32.

    Args:
        model: an unsharded model on meta. Its parameters may change dtype, but stay on meta.
        group: the tensors to load.
        entries: tensor name -> location in the files.

    Returns:
        Parameter name -> value.

    Raises:
        LoadingError: the tensors cannot be converted.
    """
    if group.operations is None:
        return {group.parameter: read_tensor(entries[group.keys[0]])}
    members = {key: entries[key] for key in group.keys}
    dtype = torch.float32  # for tensors stored in parts, which the caller rounds once
    if not {key for keys in assets_of(model).stored.values() for key in keys} & members.keys():
        dtype = functools.reduce(torch.promote_types, {e.dtype for e in members.values()})
    for parameter in model.parameters():  # the loader casts to the parameter's dtype
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    with OpenFiles() as reader:
        sources = {key: FileTensor(reader, key, entry) for key, entry in members.items()}
        info = run_loader(model, sources, torch.device("cpu"))
    parameters = _take_loaded_tensors(model)
    # Parameters of other groups are missing here.
    info.missing_keys = set()
    if problems := key_problems(info):
        raise LoadingError(f"{', '.join(group.keys[:3])}: {format_problems(problems)}")
    return parameters


def build_base_reader(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Build a model on meta that `load_group` can use to read the weights in `folder`.

    It is a copy of `like` that converts keys and dequantises as the checkpoint in `folder`
    requires.

    Args:
        folder: the checkpoint folder.
        like: the model to copy, on meta.
    """
    reader = copy.deepcopy(like)
    stored = model_on_meta(folder, init="pretrained")
    ours = assets_of(reader)
    theirs = assets_of(stored)
    ours.conversions = theirs.conversions
    ours.stored = theirs.stored
    ours.reader = theirs.reader
    return reader


def run_loader(
    model: PreTrainedModel, sources: dict[str, Any], home: torch.device, *, bar: bool = False
) -> Any:
    """Load tensors into `model` with transformers' loader, which creates new parameters.

    On a sharded model, each rank reads only its slices.

    Args:
        model: the model, sharded or not.
        sources: tensor name -> tensor, or an object that reads slices of it.
        home: device of the new parameters.
        bar: show a progress bar.

    Returns:
        transformers' loading report. It lists missing, unexpected and mismatched keys, and
        conversion errors; nothing is raised for them.
    """
    load = transformers_private("core_model_loading", "convert_and_load_state_dict_in_model")
    transformers_private("core_model_loading", _WRAP)
    mapping = copy.deepcopy(assets_of(model).conversions)
    for converter in split_mapping(mapping)[1] if home.type == "meta" else ():
        # The option is set for very large tensors, which have no bytes on meta.
        converter.force_cpu = False
    config = transformers_private("modeling_utils", "LoadStateDictConfig")(
        device_map={"": home},
        dtype=next(model.parameters()).dtype,
        weight_mapping=mapping,
    )

    def wrap(part: torch.Tensor, reference: DTensor) -> DTensor:
        # Does not move the part.
        return like_dtensor(reference, wrap_like(reference.to_local(), part))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(core_model_loading, _WRAP, wrap))
        if not bar and logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        # The loader's threads help when bytes are copied to a device. On CPUs the ranks already run
        # in parallel, and the threads would compete with them for cores and the interpreter.
        if home.type == "cpu" and _NO_THREADS not in os.environ:
            os.environ[_NO_THREADS] = "1"
            stack.callback(os.environ.pop, _NO_THREADS)
        info, _ = load(model=model, state_dict=sources, load_config=config, disk_offload_index=None)
    return info


def tie_and_filter_keys(model: PreTrainedModel, info: Any) -> None:
    """Tie the weights of `model`, and remove acceptable keys from a loading report, in place.

    A missing key is acceptable if its parameter is tied or initialised at random. An unexpected key
    is acceptable if `find_carried_keys` returns it. Keys that transformers ignores are removed,
    too.

    Args:
        model: the model.
        info: transformers' loading report.
    """
    adjust = "PreTrainedModel._adjust_missing_and_unexpected_keys"
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    transformers_private("modeling_utils", adjust)(model, info)
    info.unexpected_keys = set(info.unexpected_keys) - find_carried_keys(
        model, info.unexpected_keys
    )
    info.missing_keys -= {*assets_of(model).tied, *assets_of(model).drawn}


def find_carried_keys(model: PreTrainedModel, unexpected: Iterable[str]) -> set[str]:
    """Return those unexpected tensors that exports copy from the source checkpoint.

    They are layers for multi-token prediction, and modules for images or sound if `model` is the
    text part of a checkpoint. Both are valid parts of a checkpoint that the model does not have.
    """
    assets = assets_of(model)
    names = list(unexpected)
    if not names:
        return set()
    carried = {name for name in names if _is_of_multi_token_layer(model, name)}
    if assets.whole is not None:
        model_class, config = assets.whole
        with torch.device("meta"):
            whole_model = build_from_config(model_class, config, torch.float32)
        state = whole_model.state_dict()
        mapping = conversion_mapping(whole_model)
        whole_model.hf_assets = assets
        targets = map_source_keys(whole_model, names, mapping)
        carried |= {key for key, target, _ in targets if target in state}
    return carried


def _is_of_multi_token_layer(model: PreTrainedModel, name: str) -> bool:
    """Return True if tensor `name` is in a layer for multi-token prediction.

    Such layers follow the decoder layers; the config has their number (DeepSeek-V3, GLM-4.5).
    """
    settings = dict(nested_items(assets_of(model).config))
    more = next((settings[k] for k in NEXT_TOKEN_LAYERS if isinstance(settings.get(k), int)), 0)
    last = model.config.get_text_config().num_hidden_layers
    numbers = re.findall(r"\blayers\.(\d+)\.", name)
    return any(last <= int(number) < last + more for number in numbers)


def key_problems(info: Any) -> dict[str, list[str]]:
    """Return the problems in transformers' loading report.

    Returns:
        Description of the problem -> names of its tensors; {} if there are none. The problems are
        missing, unexpected, wrongly shaped and inconvertible tensors.
    """
    shapes = ((n, tuple(a), tuple(b)) for n, a, b in info.mismatched_keys)
    problems = {
        "missing in the checkpoint": sorted(info.missing_keys),
        "not known to the model": sorted(info.unexpected_keys),
        "of another shape": sorted(f"{n} ({a}, expected {b})" for n, a, b in shapes),
        "not convertible": sorted(info.conversion_errors),
    }
    return {kind: names for kind, names in problems.items() if names}


def format_problems(problems: dict[str, list[str]]) -> str:
    """Format the result of `key_problems` as text, with up to five names for each problem."""
    return "; ".join(f"{len(v)} tensor(s) {k}: {', '.join(v[:5])}" for k, v in problems.items())


def groups_to_convert_first(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return the groups that each rank must read completely and convert before it slices.

    Their conversion does not commute with slicing, or they are packed (in 4 bits or float8). See
    [Note: slicing before conversion]. The list is empty if the model is neither sharded nor packed.
    """
    state = model.state_dict(keep_vars=True)
    packed = packed_weights(model)
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    converters = split_mapping(assets_of(model).conversions)[1]
    if not packed and not (is_sharded and converters):
        return []
    reader = assets_of(model).reader
    # A conversion with several targets may produce a packed one.
    several = any(len(c.target_patterns) > 1 for c in converters)

    def is_read_whole(group: LoadGroup) -> bool:
        if group.parameter in packed or (packed and several and group.converted):
            return True
        if not is_sharded or group.operations is None or group.parameter not in state:
            return False
        if len(group.keys) == 1 and reader is not None and type(group.operations[0]) is not Chunk:
            # Only cast: this tensor is stored unquantised among quantised ones.
            return False
        commutes = all(
            (isinstance(op, MergeModulelist) and op.dim == 0)
            or (isinstance(op, Chunk | Concatenate) and op.dim >= 1)
            for op in group.operations
        )
        return not commutes or _leaves_rank_without_rows(state[group.parameter])

    return [group for group in plan_load_groups(model, keys) if is_read_whole(group)]


def _leaves_rank_without_rows(tensor: torch.Tensor) -> bool:
    """Return True if the last rank holds no row of a sharded tensor.

    For example, 3 ranks split 4 rows into 2, 2 and 0.
    """
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = math.prod(n for n, placement in sizes if not placement.is_replicate())
    rows = -(-tensor.shape[0] // shards)
    return rows * (shards - 1) >= tensor.shape[0]


def convert_then_slice(
    model: PreTrainedModel,
    groups: list[LoadGroup],
    sources: dict[str, Any],
    device: torch.device,
    home: torch.device,
    info: Any,
) -> None:
    """Convert groups of tensors on an unsharded copy, and store this rank's slices in `model`.

    One group is in memory at a time.

    Args:
        model: the sharded model.
        groups: the groups to convert.
        sources: tensor name -> tensor, or an object that reads it.
        device: device on which packed weights are quantised.
        home: device of the slices.
        info: transformers' loading report. Problems are added to it, and loaded parameters are no
            longer listed as missing.
    """
    live = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    packed = packed_weights(model)
    with torch.device("meta"):
        unsharded = build_from_config(
            original_class(model), model.config, next(model.parameters()).dtype
        )
    unsharded.hf_assets = assets_of(model)
    # Some parameters stay fp32 among others in half precision.
    for name, parameter in unsharded.named_parameters():
        dtype = packed[name].source_dtype if name in packed else live[name].dtype
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    _take_loaded_tensors(
        unsharded
    )  # constructors may draw values on meta, which are not loaded ones
    for group in groups:
        group_info = run_loader(unsharded, {k: sources[k] for k in group.keys}, torch.device("cpu"))
        info.conversion_errors.update(group_info.conversion_errors)
        info.unexpected_keys |= group_info.unexpected_keys
        info.mismatched_keys |= group_info.mismatched_keys
        for name, whole_tensor in _take_loaded_tensors(unsharded).items():
            if name in packed:
                whole_tensor = packed[name].pack(whole_tensor.to(device))
            place_parameter(
                model, [name], slice_like(whole_tensor, live[name]).to(home, copy=True), live[name]
            )
            info.missing_keys.discard(name)


def _take_loaded_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return name -> tensor for all tensors of `model` that are not on meta.

    They are replaced by empty tensors on meta in the model.
    """
    tensors = {n: t for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}
    for name, tensor in tensors.items():
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        set_tensor(
            model, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        )
    return {name: tensor.detach() for name, tensor in tensors.items()}
