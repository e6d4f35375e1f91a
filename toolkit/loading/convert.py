"""Transformers' own loader on sharded models: key renames, fused experts, dtypes.

Owns the calls of its private names, and what may be sliced before it is converted.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit.errors import LoadingError
from toolkit.formats import (
    FileTensor,
    OpenFiles,
    TensorEntry,
    assets_of,
    laid_out_as,
    part_of,
    split_mapping,
)
from toolkit.loading.initialise import plain_class
from toolkit.loading.materialisation import place, replace
from toolkit.models.packed_linear import packed_weights


@dataclass(frozen=True)
class LoadGroup:
    """Tensors of a checkpoint that are loaded together."""

    keys: tuple[str, ...]
    parameter: str
    """The parameter, of several the first; a name that the model does not have is unexpected."""
    operations: tuple[Any, ...] | None
    """Transformers' conversions that make the parameters; None: the one tensor is the parameter."""

    @property
    def converted(self) -> bool:
        """Whether `load_group` must make the parameters."""
        return self.operations is not None


def load_groups(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return how transformers makes parameters of `model` from the tensors `keys`. Names only."""
    try:
        from transformers.core_model_loading import rename_source_key
    except ImportError as error:
        raise _gone(error) from error
    renamings, converters = split_mapping(copy.deepcopy(assets_of(model).conversions))
    by_pattern = {p: tuple(c.operations) for c in converters for p in c.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    members: dict[tuple[str, str | None], list[str]] = {}
    operations: dict[tuple[str, str | None], tuple[Any, ...] | None] = {}
    for key in keys:
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:  # as the loader does
            target, pattern = rename_source_key(key, [], [], prefix, state)
        # Two plain tensors of one name are not loaded together: the second replaces the first.
        group = (target, key if pattern is None else None)
        members.setdefault(group, []).append(key)
        operations[group] = None if pattern is None else by_pattern[pattern]
    return [
        LoadGroup(tuple(names), target, operations[target, key])
        for (target, key), names in members.items()
    ]


def load_group(
    model: PreTrainedModel, group: LoadGroup, entries: dict[str, TensorEntry]
) -> dict[str, torch.Tensor]:
    """Return the parameters that transformers makes of one group's tensors: on the CPU, not cast.

    Needs the memory of the group, and what the conversion itself takes.

    Args:
        model: on meta, not sharded; its parameters are on meta again afterwards.

    Raises:
        LoadingError: transformers cannot convert them.
    """
    members = {key: entries[key] for key in group.keys}
    dtype = functools.reduce(torch.promote_types, {e.dtype for e in members.values()})
    for parameter in model.parameters():  # the loader casts to what it finds
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    with OpenFiles() as reader:
        sources = {key: FileTensor(reader, key, entry) for key, entry in members.items()}
        info = run_loader(model, sources, torch.device("cpu"))
    made = {n: t for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}
    for name, tensor in made.items():
        _empty(model, name, tensor)
    info.missing_keys = set()  # all others
    if found := problems(info):
        raise LoadingError(f"{', '.join(group.keys[:3])}: {listed(found)}")
    return {name: tensor.detach() for name, tensor in made.items()}


def run_loader(
    model: PreTrainedModel, sources: dict[str, Any], home: torch.device, *, bar: bool = False
) -> Any:
    """Call transformers' loader on `sources`; return its account of keys. `bar`: show one."""
    try:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
        from transformers.utils import logging
    except ImportError as error:
        raise _gone(error) from error
    config = LoadStateDictConfig(
        device_map={"": home},
        dtype=next(model.parameters()).dtype,
        weight_mapping=copy.deepcopy(assets_of(model).conversions),
    )
    shown = logging.is_progress_bar_enabled()
    if not bar:
        logging.disable_progress_bar()
    try:
        with _own_thread(home), _parts_stay_where_they_are():
            info, _ = convert_and_load_state_dict_in_model(
                model=model, state_dict=sources, load_config=config, disk_offload_index=None
            )
    finally:
        if shown:
            logging.enable_progress_bar()
    return info


def settle_keys(model: PreTrainedModel, info: Any) -> None:
    """Let transformers tie `model`, and settle which keys may be missing or left over."""
    if not hasattr(model, "_adjust_missing_and_unexpected_keys"):
        raise _gone(AttributeError("PreTrainedModel._adjust_missing_and_unexpected_keys"))
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    info.missing_keys -= set(assets_of(model).tied)


def problems(info: Any) -> dict[str, list[str]]:
    """Return what an account of keys complains of: kind -> tensors."""
    found = {
        "missing in the checkpoint": sorted(info.missing_keys),
        "not known to the model": sorted(info.unexpected_keys),
        "of another shape": sorted(
            f"{n} ({tuple(a)}, expected {tuple(b)})" for n, a, b in info.mismatched_keys
        ),
        "not convertible": sorted(info.conversion_errors),
    }
    return {kind: names for kind, names in found.items() if names}


def listed(found: dict[str, list[str]]) -> str:
    """Return `problems` as a text."""
    return "; ".join(f"{len(v)} tensor(s) {k}: {', '.join(v[:5])}" for k, v in found.items())


def groups_to_read_whole(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return what cannot be sliced before it is converted; see [Note: slicing before conversion].

    Nor can what is stored in 4 bits: it is quantised as a whole.
    """
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    state, packed = model.state_dict(), packed_weights(model)
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    converters = split_mapping(assets_of(model).conversions)[1]
    if not packed and not (is_sharded and converters):
        return []
    several = any(len(c.target_patterns) > 1 for c in converters)  # any of them may be packed
    whole = []
    for group in load_groups(model, keys):
        commutes = all(
            (isinstance(op, MergeModulelist) and op.dim == 0)
            or (isinstance(op, Chunk | Concatenate) and op.dim >= 1)
            for op in group.operations or ()
        )
        if (
            group.parameter in packed
            or (packed and several and group.converted)
            or (
                (is_sharded and group.converted and group.parameter in state)
                and (not commutes or _some_rank_is_empty(state[group.parameter]))
            )
        ):
            whole.append(group)
    return whole


def _some_rank_is_empty(tensor: torch.Tensor) -> bool:
    """Whether dim 0 leaves the last rank without a row (3 ranks cut 4 rows into 2, 2, 0)."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = math.prod(n for n, placement in sizes if placement.is_shard())
    rows = -(-tensor.shape[0] // shards)
    return rows * (shards - 1) >= tensor.shape[0]


def convert_then_slice(
    model: PreTrainedModel,
    groups: list[LoadGroup],
    sources: dict[str, Any],
    home: torch.device,
    device: torch.device,
    info: Any,
) -> None:
    """Convert whole groups of tensors on an unsharded copy, then keep this rank's slices.

    One group is in memory at a time. What is stored in 4 bits is quantised on `device`, whose
    kernels the forward will use. What happens to the keys is added to `info`.
    """
    live = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    packed = packed_weights(model)
    unsharded = _unsharded_copy(model, live)
    for group in groups:
        found = run_loader(unsharded, {k: sources[k] for k in group.keys}, torch.device("cpu"))
        info.conversion_errors.update(found.conversion_errors)
        info.unexpected_keys |= found.unexpected_keys
        info.mismatched_keys |= found.mismatched_keys
        for name, tensor in list(unsharded.state_dict().items()):
            if tensor.is_meta:
                continue
            whole = tensor
            if name in packed:
                whole = packed[name].pack(tensor.detach().to(device))
            place(model, [name], part_of(whole, live[name]).to(home, copy=True), live[name])
            info.missing_keys.discard(name)
            replace(unsharded, name, torch.empty_like(tensor, device="meta"))


def _unsharded_copy(model: PreTrainedModel, live: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return `model` unsharded on meta, its parameters in the dtypes that are loaded."""
    with torch.device("meta"):
        made = plain_class(model)._from_config(
            copy.deepcopy(model.config), dtype=next(model.parameters()).dtype
        )
    made.hf_assets = assets_of(model)
    packed = packed_weights(model)
    for name, parameter in made.named_parameters():  # some stay in fp32 where others are halved
        dtype = packed[name].source_dtype if name in packed else live[name].dtype
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    for name, tensor in made.state_dict(keep_vars=True).items():
        if not tensor.is_meta:  # drawn in spite of it, and not to be taken for loaded
            _empty(made, name, tensor)
    return made


def _empty(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor on meta in the place of `tensor`."""
    empty = torch.empty_like(tensor, device="meta")
    is_parameter = isinstance(tensor, nn.Parameter)
    replace(model, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)


@contextlib.contextmanager
def as_library_code(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers treat the sharded class as its own.

    `fully_shard` changes the class of the model, which then counts as custom code: modules without
    tensors of their own would be left uninitialised (falcon_h1's buffers, for one).
    """
    vars(model)["is_custom_code"] = plain_class(model).is_custom_code
    try:
        yield
    finally:
        del vars(model)["is_custom_code"]


@contextlib.contextmanager
def _own_thread(home: torch.device) -> Iterator[None]:
    """Let transformers' loader copy in this thread where the copies stay in host memory.

    Its pool pays where bytes go on to a device. On CPUs the ranks are the parallelism, and the
    pool's threads fight with them over cores and interpreter (docs/decisions.md has the figures).
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"  # the loader's only switch
    before = os.environ.get(name)
    if home.type == "cpu":
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _parts_stay_where_they_are() -> Iterator[None]:
    """Let transformers' loader wrap local parts without moving them; see `laid_out_as`."""
    import transformers.core_model_loading as loader

    name = "_dtensor_from_local_like"
    if not hasattr(loader, name):
        raise _gone(AttributeError(f"core_model_loading.{name}"))
    before = getattr(loader, name)
    setattr(loader, name, lambda part, reference: laid_out_as(reference, part))
    try:
        yield
    finally:
        setattr(loader, name, before)


def _gone(error: Exception) -> LoadingError:
    return LoadingError(
        f"transformers {transformers.__version__} has no {error}; the loader needs 5.17 to 5.23"
    )
