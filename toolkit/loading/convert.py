"""Transformers' own loader on sharded models: key renames, fused experts, dtypes.

[Note: slicing before conversion] A rank reads its rows of a tensor only. That is wrong, without a
word, where a conversion does not commute with taking rows (`Chunk` or `Concatenate` along dim 0,
and everything unknown), or where a rank has no row (two experts on three ranks). Those tensors are
read whole, converted on an unsharded copy one group at a time, and sliced afterwards.
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
    loaded_as,
    nested_items,
    part_of,
    split_mapping,
    transformers_private,
    whole,
)
from toolkit.loading.materialisation import place_parameter, set_tensor
from toolkit.models.causal_lm import model_on_meta
from toolkit.models.classes import build, original_class
from toolkit.models.packed_linear import packed_weights

_WRAP = "_dtensor_from_local_like"  # by which the loader makes DTensors
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # its only switch


@dataclass(frozen=True)
class LoadGroup:
    """Tensors of a checkpoint that are loaded together."""

    keys: tuple[str, ...]
    parameter: str  # of several the first; one that the model does not have is unexpected
    operations: tuple[Any, ...] | None
    """Transformers' conversions that make the parameters; None: the one tensor is the parameter."""

    @property
    def converted(self) -> bool:
        """Return whether the parameters are not the tensors themselves."""
        return self.operations is not None


def plan_load_groups(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return how transformers makes parameters of `model` from the tensors `keys`. Names only."""
    converters = split_mapping(assets_of(model).conversions)[1]
    by_pattern = {p: tuple(c.operations) for c in converters for p in c.source_patterns}
    groups: dict[tuple[str, str | None], LoadGroup] = {}
    for key, target, pattern in loaded_as(model, keys):
        # Two plain tensors of one name are not loaded together: the second replaces the first.
        member = (target, key if pattern is None else None)
        before = groups[member].keys if member in groups else ()
        operations = None if pattern is None else by_pattern[pattern]
        groups[member] = LoadGroup((*before, key), target, operations)
    return list(groups.values())


def load_group(
    model: PreTrainedModel, group: LoadGroup, entries: dict[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Return the parameters that transformers makes of one group's tensors: on the CPU, not cast.

    `model` is on meta, not sharded, and so again afterwards. LoadingError where they cannot be
    converted.
    """
    if group.operations is None:
        return {group.parameter: whole(entries[group.keys[0]])}
    members = {key: entries[key] for key in group.keys}
    dtype = torch.float32  # of what is stored in parts: rounded once, by who asks for it
    if not {key for keys in assets_of(model).stored.values() for key in keys} & members.keys():
        dtype = functools.reduce(torch.promote_types, {e.dtype for e in members.values()})
    for parameter in model.parameters():  # the loader casts to what it finds
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    with OpenFiles() as reader:
        sources = {key: FileTensor(reader, key, entry) for key, entry in members.items()}
        info = run_loader(model, sources, torch.device("cpu"))
    made = _emptied(model)
    info.missing_keys = set()  # all others
    if found := key_problems(info):
        raise LoadingError(f"{', '.join(group.keys[:3])}: {format_problems(found)}")
    return made


def build_base_reader(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Return a model on meta for `load_group` of the weights in `folder`: `like` anew, which reads
    them also where they are stored in fewer bits.
    """
    reader, stored = copy.deepcopy(like), model_on_meta(folder, init="pretrained")
    ours, theirs = assets_of(reader), assets_of(stored)
    ours.conversions, ours.stored, ours.reader = theirs.conversions, theirs.stored, theirs.reader
    return reader


def run_loader(
    model: PreTrainedModel, sources: dict[str, Any], home: torch.device, *, bar: bool = False
) -> Any:
    """Call transformers' loader on `sources`; return its account of keys."""
    load = transformers_private("core_model_loading", "convert_and_load_state_dict_in_model")
    transformers_private("core_model_loading", _WRAP)
    mapping = copy.deepcopy(assets_of(model).conversions)
    for converter in split_mapping(mapping)[1] if home.type == "meta" else ():
        converter.force_cpu = False  # set for very large tensors, which on meta have no bytes
    config = transformers_private("modeling_utils", "LoadStateDictConfig")(
        device_map={"": home},
        dtype=next(model.parameters()).dtype,
        weight_mapping=mapping,
    )

    def wrap(part: torch.Tensor, reference: DTensor) -> DTensor:
        return like_dtensor(reference, part)  # which leaves the part where it is

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(core_model_loading, _WRAP, wrap))
        if not bar and logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        # The loader's threads pay where bytes go on to a device. On CPUs the ranks are the
        # parallelism, and the threads fight with them over cores and interpreter.
        if home.type == "cpu" and _NO_THREADS not in os.environ:
            os.environ[_NO_THREADS] = "1"
            stack.callback(os.environ.pop, _NO_THREADS)
        info, _ = load(model=model, state_dict=sources, load_config=config, disk_offload_index=None)
    return info


def resolve_keys(model: PreTrainedModel, info: Any) -> None:
    """Let transformers tie `model`, and settle which keys may be missing or left over."""
    adjust = "PreTrainedModel._adjust_missing_and_unexpected_keys"
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    transformers_private("modeling_utils", adjust)(model, info)
    info.unexpected_keys = set(info.unexpected_keys) - find_carried_keys(
        model, info.unexpected_keys
    )
    info.missing_keys -= {*assets_of(model).tied, *assets_of(model).drawn}


def find_carried_keys(model: PreTrainedModel, unexpected: Iterable[str]) -> set[str]:
    """Return which of the tensors that no parameter takes a checkpoint of this config holds all the
    same, beside those that transformers itself passes over: other parts of a checkpoint whose text
    part `model` is, and the layers behind the last that predict more tokens.
    """
    assets, names = assets_of(model), list(unexpected)
    if not names:
        return set()
    found = {name for name in names if _is_next_layer(model, name)}
    if assets.whole is not None:
        model_class, config = assets.whole
        with torch.device("meta"):
            whole_model = build(model_class, config, torch.float32)
        state, mapping = whole_model.state_dict(), conversion_mapping(whole_model)
        whole_model.hf_assets = assets
        targets = loaded_as(whole_model, names, mapping)
        found |= {key for key, target, _ in targets if target in state}
    return found


def _is_next_layer(model: PreTrainedModel, name: str) -> bool:
    """Return whether a tensor is of a layer behind the last, of as many as the config says predict
    more tokens (DeepSeek-V3, GLM-4.5).
    """
    settings = dict(nested_items(assets_of(model).config))
    more = next((settings[k] for k in NEXT_TOKEN_LAYERS if isinstance(settings.get(k), int)), 0)
    last = model.config.get_text_config().num_hidden_layers
    numbers = re.findall(r"\blayers\.(\d+)\.", name)
    return any(last <= int(number) < last + more for number in numbers)


def key_problems(info: Any) -> dict[str, list[str]]:
    """Return what an account of keys complains of: kind -> tensors."""
    shapes = ((n, tuple(a), tuple(b)) for n, a, b in info.mismatched_keys)
    found = {
        "missing in the checkpoint": sorted(info.missing_keys),
        "not known to the model": sorted(info.unexpected_keys),
        "of another shape": sorted(f"{n} ({a}, expected {b})" for n, a, b in shapes),
        "not convertible": sorted(info.conversion_errors),
    }
    return {kind: names for kind, names in found.items() if names}


def format_problems(found: dict[str, list[str]]) -> str:
    """Return `problems` as a text."""
    return "; ".join(f"{len(v)} tensor(s) {k}: {', '.join(v[:5])}" for k, v in found.items())


def groups_to_convert_first(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return what cannot be sliced before it is converted (see [Note: slicing before conversion]),
    or is quantised as a whole.
    """
    state, packed = model.state_dict(keep_vars=True), packed_weights(model)
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    converters = split_mapping(assets_of(model).conversions)[1]
    if not packed and not (is_sharded and converters):
        return []
    reader = assets_of(model).reader
    several = any(len(c.target_patterns) > 1 for c in converters)  # any of them may be packed

    def is_read_whole(group: LoadGroup) -> bool:
        if group.parameter in packed or (packed and several and group.converted):
            return True
        if not is_sharded or group.operations is None or group.parameter not in state:
            return False
        if len(group.keys) == 1 and reader is not None and type(group.operations[0]) is not Chunk:
            return False  # stored as it is, among others that are not: only cast
        commutes = all(
            (isinstance(op, MergeModulelist) and op.dim == 0)
            or (isinstance(op, Chunk | Concatenate) and op.dim >= 1)
            for op in group.operations
        )
        return not commutes or _some_rank_is_empty(state[group.parameter])

    return [group for group in plan_load_groups(model, keys) if is_read_whole(group)]


def _some_rank_is_empty(tensor: torch.Tensor) -> bool:
    """Return whether dim 0 leaves the last rank without a row (3 ranks cut 4 rows into 2, 2, 0)."""
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
    """Convert whole groups of tensors on an unsharded copy, one at a time, then keep this rank's
    slices on `home`. 4-bit weights are quantised on `device`; what happens to the keys is added to
    `info`.
    """
    live = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    packed = packed_weights(model)
    with torch.device("meta"):
        unsharded = build(original_class(model), model.config, next(model.parameters()).dtype)
    unsharded.hf_assets = assets_of(model)
    for name, parameter in unsharded.named_parameters():  # some stay fp32 where others are halved
        dtype = packed[name].source_dtype if name in packed else live[name].dtype
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    _emptied(unsharded)  # what is drawn in spite of meta is not to be taken for loaded
    for group in groups:
        found = run_loader(unsharded, {k: sources[k] for k in group.keys}, torch.device("cpu"))
        info.conversion_errors.update(found.conversion_errors)
        info.unexpected_keys |= found.unexpected_keys
        info.mismatched_keys |= found.mismatched_keys
        for name, whole_tensor in _emptied(unsharded).items():
            if name in packed:
                whole_tensor = packed[name].pack(whole_tensor.to(device))
            place_parameter(
                model, [name], part_of(whole_tensor, live[name]).to(home, copy=True), live[name]
            )
            info.missing_keys.discard(name)


def _emptied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of `model` that have bytes, and put empty ones on meta in their place."""
    made = {n: t for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}
    for name, tensor in made.items():
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        set_tensor(
            model, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        )
    return {name: tensor.detach() for name, tensor in made.items()}
