"""Bytes into shards: a checkpoint streamed in, each rank its slices, or random weights drawn.

Owns materialisation: after it nothing is on meta, buffers hold what the architecture computes, tied
parameters are one tensor. Drives transformers' own loader, which owns key renames, fused-expert
conversion and buffers; the loader's private names are called here only. Knows nothing of the
training loop.
"""

import contextlib
import copy
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.adapters.base import base_digest, record_base
from toolkit.adapters.first_values import copied_buffers, first_values
from toolkit.config.settings import ModelConfig
from toolkit.errors import LoadingError
from toolkit.formats import (
    FileTensor,
    OpenFiles,
    TensorEntry,
    assets_of,
    laid_out_as,
    local_folder,
    local_slices,
    read_weights,
    split_mapping,
    weight_files,
)
from toolkit.loading.recorded_init import Recorder
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import base_of, has_adapters, unwrapped_base


@dataclass(frozen=True)
class LoadReport:
    """What one rank read."""

    tensors: int
    """Tensors in the checkpoint."""
    file_bytes: int
    """Bytes of those tensors."""
    bytes_requested: int
    """Bytes of the slices that this rank asked for."""
    seconds: float


def load_pretrained(
    model: nn.Module, path: str | Path, device: torch.device | str, *, seed: int = 0
) -> LoadReport:
    """Materialise `model` on `device` with the weights of a Hugging Face checkpoint. Collective.

    Every rank reads only its slices of each tensor, cast to the parameter's storage dtype; memory
    beyond the shards stays below the largest tensor. Nothing keeps pointing into the files.

    The checkpoint is that of the base where `model` has adapters, which begin as
    `adapters.first_values` says; which base it was is noted for the checkpoints to come.

    Args:
        model: from `build_on_meta` or `add_adapters`, sharded or not.
        path: folder or Hub id of the checkpoint (safetensors).
        seed: of the adapters; the same values for any number of ranks.

    Raises:
        LoadingError: on every rank, with the tensors named: missing or unexpected keys, other
            shapes, a damaged file, a parameter left on meta.
    """
    begun = time.perf_counter()
    # Two exchanges: tying compares weights over all ranks, so none may come to it alone.
    with unwrapped_base(model) as base:
        stream = ranks.on_all(lambda: _stream(base, path, torch.device(device)))
        ranks.on_all(lambda: _settle(base, torch.device(device), stream))
    if has_adapters(model):
        digest = ranks.on_main(lambda: base_digest(stream.folder, str(path)))
        record_base(model, str(path), stream.folder, digest)
    _begin_adapters(model, torch.device(device), seed)
    return LoadReport(
        stream.tensors, stream.file_bytes, stream.requested, time.perf_counter() - begun
    )


def fill(
    model: nn.Module,
    cfg: ModelConfig,
    device: torch.device | str,
    seed: int,
    *,
    empty: bool,
    say: Callable[[str], object],
) -> None:
    """Materialise `model` on `device` as a run begins. Collective.

    Args:
        seed: of random weights, and of the first values of adapters.
        empty: a checkpoint of the run is restored next, so that the weights need no values. The
            base under adapters is loaded all the same: such a checkpoint does not hold it.
        say: prints a line, on one rank.

    Raises:
        LoadingError: as `load_pretrained`, `init_weights` and `materialise`.
    """
    target = torch.device(device)
    what = "base       " if has_adapters(model) else "weights    "
    if empty and not has_adapters(model):
        materialise(base_of(model), target)
        say(f"{what}those of the run's checkpoint")
    elif cfg.init == "random":
        init_weights(model, target, seed)
        say(f"{what}random, drawn from seed {seed}")
    else:
        folder = local_folder(cfg.name_or_path, cfg.revision)
        report = load_pretrained(model, folder, target, seed=seed)
        say(
            f"{what}{cfg.name_or_path}: {report.tensors} tensors, {report.file_bytes / 1e9:.2f} "
            f"GB; this rank read {report.bytes_requested / 1e9:.2f} GB in {report.seconds:.1f} s"
        )


def check_source(model: nn.Module, cfg: ModelConfig) -> None:
    """Refuse the checkpoint that `fill` will load where it is not one of `model` (`check_fits`).
    Collective.
    """
    if cfg.init == "pretrained":
        check_fits(model, local_folder(cfg.name_or_path, cfg.revision))


@ranks.collective
def check_fits(model: nn.Module, path: str | Path) -> None:
    """Refuse a checkpoint that is not one of `model`, before its bytes are read. Collective.

    Reads headers only. Plays the load through on a copy of `model` with tensors that have no
    bytes, so that renamed, converted and tied weights are judged as the load itself will judge
    them.

    Args:
        model: from `build_on_meta` or `add_adapters`, not yet sharded.
        path: as for `load_pretrained`.

    Raises:
        LoadingError: names the tensors that are missing, unknown or of another shape.
    """
    folder = local_folder(str(path))
    entries = read_weights(weight_files(folder, str(path)))
    with unwrapped_base(model) as base:
        _check_shapes(base, entries)
        _refuse(base, folder, misfits(base, entries))


def misfits(model: PreTrainedModel, entries: dict[str, TensorEntry]) -> dict[str, list[str]]:
    """Return what would keep transformers from loading `entries` into `model`: kind -> tensors.

    Headers only; `model` is on meta and not sharded, and stays as it is.
    """
    meta = torch.device("meta")
    sources = {}
    for name, entry in entries.items():
        rows = _resized_rows(model, name, entry)
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        sources[name] = torch.empty(shape, dtype=entry.dtype, device=meta)
    twin = copy.deepcopy(model)
    for name, layer in packed_weights(twin).items():  # the load reads the matrix
        whole = torch.empty(layer.shape, dtype=layer.source_dtype, device=meta)
        _replace(twin, name, nn.Parameter(whole, requires_grad=False))
    info = _drive_loader(twin, sources, meta)
    if info.conversion_errors:  # a conversion that looks at values: the load itself will tell
        return {}
    twin.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    twin._adjust_missing_and_unexpected_keys(info)
    info.missing_keys -= set(assets_of(model).tied)
    return _problems(info)


@dataclass(frozen=True)
class LoadGroup:
    """Tensors of a checkpoint that are loaded together."""

    keys: tuple[str, ...]
    parameter: str
    """The parameter, of several the first; a name that the model does not have is unexpected."""
    converted: bool
    """Whether `load_group` must make the parameters; else the one tensor is the parameter."""


def load_groups(model: PreTrainedModel, keys: Iterable[str]) -> list[LoadGroup]:
    """Return how transformers makes parameters of `model` from the tensors `keys`. Names only."""
    try:
        from transformers.core_model_loading import rename_source_key
    except ImportError as error:
        raise _gone(error) from error
    renamings, converters = split_mapping(copy.deepcopy(assets_of(model).conversions))
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[tuple[str, bool], list[str]] = {}
    for key in keys:
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:  # as the loader does
            target, pattern = rename_source_key(key, [], [], prefix, state)
        name = (target, pattern is not None)
        # Two plain tensors of one name are not loaded together: the second replaces the first.
        found.setdefault(name if name[1] else (target + "\0" + key, False), []).append(key)
    return [
        LoadGroup(tuple(members), target.partition("\0")[0], converted)
        for (target, converted), members in found.items()
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
    for _, parameter in _named(model):  # the loader casts to what it finds
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    with OpenFiles() as reader:
        sources = {key: FileTensor(reader, key, entry) for key, entry in members.items()}
        info = _drive_loader(model, sources, torch.device("cpu"))
    made = {n: t for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}
    for name, tensor in made.items():
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        _replace(model, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    info.missing_keys = set()  # all others
    if problems := _problems(info):
        raise LoadingError(f"{', '.join(group.keys[:3])}: {_listed(problems)}")
    return {name: tensor.detach() for name, tensor in made.items()}


def init_weights(model: nn.Module, device: torch.device | str, seed: int) -> None:
    """Materialise `model` on `device` with random weights. Every rank draws only its rows.
    Adapters begin as after `load_pretrained`.

    The distribution is the architecture's own (`_init_weights`); the values depend on `seed` and
    the parameter's name alone: not on the number of ranks, the device or the other parameters.
    DTensor's own random operators repeat themselves on a CPU mesh, so the initialisation is
    recorded on meta and replayed row block by row block. Costs one draw of this rank's shard on the
    CPU.

    Raises:
        LoadingError: the architecture computes a parameter in a way that cannot be replayed.
    """
    target = torch.device(device)
    with unwrapped_base(model) as base:
        ranks.on_all(lambda: _draw(base, target, seed))
        ranks.on_all(lambda: check_materialised(base))
    assets_of(model).drawn_from = seed
    _begin_adapters(model, target, seed)


def materialise(model: PreTrainedModel, device: torch.device | str) -> None:
    """Allocate `model`'s shards on `device` without values; buffers are computed. For a resume.

    Raises:
        LoadingError: a tensor stayed on meta.
    """
    if has_adapters(model):
        raise LoadingError(
            "a checkpoint of adapters does not hold the base: load it with load_pretrained or "
            "init_weights, then resume"
        )
    ranks.on_all(lambda: _draw(model, torch.device(device), seed=None))
    ranks.on_all(lambda: check_materialised(model))


def check_materialised(model: nn.Module) -> None:
    """Raise `LoadingError` naming what is still on meta, or a tie that came apart."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    meta = [n for n, t in tensors if _local(t).is_meta]
    if meta:
        raise LoadingError(f"{len(meta)} tensor(s) are still on meta: {', '.join(meta[:5])}")
    by_name = dict(model.named_parameters(remove_duplicate=False))
    assets = getattr(model, "hf_assets", None)
    for alias, owner in (assets.tied if assets else {}).items():
        if by_name.get(alias) is not by_name.get(owner):
            raise LoadingError(f"{alias} is no longer tied to {owner}")


# --------------------------------------------------------------------------------------------------
# Streaming a checkpoint
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Streamed:
    """What `_stream` read, and transformers' account of the keys."""

    folder: Path
    info: Any
    tensors: int
    file_bytes: int
    requested: int
    frozen: set[str]
    """Names of the parameters without a gradient: transformers' loader makes new ones that have."""


def _stream(model: PreTrainedModel, path: str | Path, device: torch.device) -> _Streamed:
    """Read this rank's slices into the parameters of `model`."""
    folder = local_folder(str(path))
    entries = read_weights(weight_files(folder, str(path)))
    _check_shapes(model, entries)
    frozen = {n for n, p in _named(model) if not p.requires_grad}
    home = _home(model, device)
    packed = packed_weights(model)
    # One storage dtype in host memory: cast while reading. Else the loader casts, piece by piece.
    state = {n: t for n, t in model.state_dict().items() if n not in packed}
    dtypes = {t.dtype for t in state.values() if t.dtype.is_floating_point}
    dtypes |= {layer.source_dtype for layer in packed.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    with OpenFiles() as reader, _as_library_code(model):
        sources = {
            name: FileTensor(
                reader,
                name,
                entry,
                dtype=dtype,
                rows=_resized_rows(model, name, entry),
                copy=home.type == "cpu",
            )
            for name, entry in entries.items()
        }
        whole = _unsliceable(model, sources) | _to_pack(model, sources)
        bar = ranks.rank() == 0 and sys.stderr.isatty()
        sliced = {k: s for k, s in sources.items() if k not in whole}
        info = _drive_loader(model, sliced, home, bar=bar)
        if whole:
            _convert_then_slice(model, {k: sources[k] for k in whole}, home, device, info)
    nbytes = sum(e.nbytes for e in entries.values())
    return _Streamed(folder, info, len(entries), nbytes, reader.requested, frozen)


def _settle(model: PreTrainedModel, device: torch.device, stream: _Streamed) -> None:
    """Tie, compute buffers, and refuse what does not fit or stayed on meta."""
    info = stream.info
    with _as_library_code(model):
        _tie_loaded(model, info)
    for name, parameter in _named(model):
        parameter.requires_grad_(name not in stream.frozen)
    _refuse_misfit(model, stream.folder, info)
    _fill_gaps(model, device)
    _settle_buffers(model, device)
    check_materialised(model)


def _tie_loaded(model: PreTrainedModel, info: Any) -> None:
    """Let transformers tie, and settle which keys may be missing or left over."""
    if not hasattr(model, "_adjust_missing_and_unexpected_keys"):
        raise _gone(AttributeError("PreTrainedModel._adjust_missing_and_unexpected_keys"))
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    info.missing_keys -= set(assets_of(model).tied)


def _fill_gaps(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what no checkpoint holds: buffers, and parameters that may be missing."""
    persistent = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if b.is_meta or n not in persistent}
    parameters = {n: p for n, p in model.named_parameters() if _local(p).is_meta}
    twin, recorder = _build_recorded(model, seed=0)
    _compute_buffers(model, twin, recorder, buffers)
    _compute_parameters(model, twin, recorder, parameters, _home(model, device), seed=0)


def _home(model: nn.Module, device: torch.device) -> torch.device:
    """Return where parameters live: host memory under offload, else the device."""
    return getattr(model, "parameter_device", None) or device


def _refuse_misfit(model: PreTrainedModel, folder: Path, info: Any) -> None:
    _refuse(model, folder, _problems(info))


def _refuse(model: PreTrainedModel, folder: Path, problems: dict[str, list[str]]) -> None:
    if problems:
        raise LoadingError(
            f"{folder} does not fit {_plain_name(model)} as its config.json describes it: "
            f"{_listed(problems)}. Give a folder whose config.json and weights belong together"
        )


def _problems(info: Any) -> dict[str, list[str]]:
    problems = {
        "missing in the checkpoint": sorted(info.missing_keys),
        "not known to the model": sorted(info.unexpected_keys),
        "of another shape": sorted(
            f"{n} ({tuple(a)}, expected {tuple(b)})" for n, a, b in info.mismatched_keys
        ),
        "not convertible": sorted(info.conversion_errors),
    }
    return {kind: names for kind, names in problems.items() if names}


def _listed(problems: dict[str, list[str]]) -> str:
    return "; ".join(f"{len(v)} tensor(s) {k}: {', '.join(v[:5])}" for k, v in problems.items())


def _check_shapes(model: PreTrainedModel, entries: dict[str, TensorEntry]) -> None:
    """Refuse other shapes from the headers, before a byte is read; all ranks see the same."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shapes |= {name: layer.shape for name, layer in packed_weights(model).items()}
    for name, entry in entries.items():
        expected = shapes.get(name)
        if expected is None or expected == entry.shape:
            continue
        if _resized_rows(model, name, entry) is None:
            raise LoadingError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, the model expects "
                f"{list(expected)}; config.json and weights do not belong together. Give a "
                "folder in which they do"
            )


def _resized_rows(model: PreTrainedModel, name: str, entry: TensorEntry) -> int | None:
    """Return the new number of rows of an embedding or head that `resize_embeddings` changed."""
    if not getattr(assets_of(model), "resized", False):
        return None
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for leaf, parameter in () if module is None else module.named_parameters():
            same = tuple(parameter.shape[1:]) == entry.shape[1:] and name.endswith("." + leaf)
            owner = any(
                p is parameter and n.split(".")[-2] == name.split(".")[-2] for n, p in _named(model)
            )
            if same and owner and entry.shape[0] != parameter.shape[0]:
                return parameter.shape[0]
    return None


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def _drive_loader(
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


def _unsliceable(model: PreTrainedModel, sources: dict[str, Any]) -> set[str]:
    """Return the source keys whose conversion does not commute with taking rows of the result.

    Stacking experts (`MergeModulelist(0)`) and joining or cutting along another dim than 0 do;
    every other conversion is done on the whole tensors. So is stacking where some rank would get no
    expert.
    """
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        MergeModulelist,
        rename_source_key,
    )

    renamings, converters = split_mapping(copy.deepcopy(assets_of(model).conversions))
    if not converters or not any(isinstance(p, DTensor) for p in model.parameters()):
        return set()
    state = model.state_dict()
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    whole = set()
    for key in sources:
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if pattern is None or target not in state:
            continue
        safe = all(
            (isinstance(op, MergeModulelist) and op.dim == 0)
            or (isinstance(op, Chunk | Concatenate) and op.dim >= 1)
            for op in by_pattern[pattern].operations
        )
        if not safe or _some_rank_is_empty(state[target]):
            whole.add(key)
    return whole


def _some_rank_is_empty(tensor: torch.Tensor) -> bool:
    """Whether sharding dim 0 leaves the last rank without a row (3 ranks cut 4 rows into 2, 2,
    0).
    """
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = math.prod(n for n, placement in sizes if placement.is_shard())
    rows = -(-tensor.shape[0] // shards)
    return rows * (shards - 1) >= tensor.shape[0]


def _to_pack(model: PreTrainedModel, sources: dict[str, Any]) -> set[str]:
    """Return the source keys of what is stored in 4 bits: quantised as whole tensors."""
    packed = packed_weights(model)
    if not packed:
        return set()
    groups = load_groups(model, sources)
    _, converters = split_mapping(assets_of(model).conversions)
    several = any(len(c.target_patterns) > 1 for c in converters)  # any of them may be packed
    return {
        key
        for group in groups
        if group.parameter in packed or (group.converted and several)
        for key in group.keys
    }


def _convert_then_slice(
    model: PreTrainedModel,
    sources: dict[str, Any],
    home: torch.device,
    device: torch.device,
    info: Any,
) -> None:
    """Convert whole groups of tensors on an unsharded twin, then keep this rank's slices.

    One group (the tensors that make one set of parameters) is in memory at a time. What is stored
    in 4 bits is quantised on `device`, whose kernels the forward will use.
    """
    from transformers.core_model_loading import rename_source_key

    with torch.device("meta"):
        twin = plain_class(model)._from_config(
            copy.deepcopy(model.config), dtype=next(model.parameters()).dtype
        )
    twin.hf_assets = assets_of(model)
    renamings, converters = split_mapping(copy.deepcopy(assets_of(model).conversions))
    state = model.state_dict()
    # The live tensors: those of a state_dict are detached, and would come back frozen.
    live = {**dict(model.named_buffers()), **dict(_named(model))}
    packed = packed_weights(model)
    for name, parameter in twin.named_parameters():  # some stay in fp32 where others are halved
        dtype = packed[name].source_dtype if name in packed else live[name].dtype
        parameter.data = torch.empty_like(parameter, dtype=dtype)
    for name, tensor in twin.state_dict(keep_vars=True).items():
        if not tensor.is_meta:  # drawn in spite of it, and not to be taken for loaded
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            _replace(twin, name, nn.Parameter(empty) if is_parameter else empty)
    groups: dict[str, dict[str, Any]] = {}
    for key, source in sources.items():
        target, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        groups.setdefault(target, {})[key] = source
    for members in groups.values():
        found = _drive_loader(twin, members, torch.device("cpu"))
        info.conversion_errors.update(found.conversion_errors)
        info.unexpected_keys |= found.unexpected_keys
        info.mismatched_keys |= found.mismatched_keys
        for name, tensor in list(twin.state_dict().items()):
            if tensor.is_meta:
                continue
            reference, whole = live[name], tensor
            if name in packed:
                whole = packed[name].pack(tensor.detach().to(device))
            part = whole[local_slices(reference)] if isinstance(reference, DTensor) else whole
            _place(model, [name], part.to(home, copy=True), reference)
            info.missing_keys.discard(name)
            _replace(twin, name, torch.empty_like(tensor, device="meta"))


# --------------------------------------------------------------------------------------------------
# Random weights
# --------------------------------------------------------------------------------------------------


def _draw(model: PreTrainedModel, device: torch.device, seed: int | None) -> None:
    """Compute buffers, and parameters from `seed`; without a seed their memory is left as it
    comes.
    """
    home = _home(model, device)
    twin, recorder = _build_recorded(model, seed or 0)
    if seed is not None and recorder.guessed:
        raise LoadingError(
            f"the random start of {_plain_name(model)} depends on values that are drawn on the way "
            f"({recorder.guessed[0]}); save a random start with transformers and load that"
        )
    _compute_buffers(model, twin, recorder, dict(model.named_buffers()))
    parameters = dict(model.named_parameters())
    if seed is None:
        aliases = _aliases(model)
        for name, reference in parameters.items():
            part = torch.empty_like(_local(reference), device=home)
            _place(model, aliases[name], part, reference)
    else:
        _compute_parameters(model, twin, recorder, parameters, home, seed)
    model.tie_weights()
    _settle_buffers(model, device)


def _build_recorded(model: PreTrainedModel, seed: int) -> tuple[PreTrainedModel, Recorder]:
    """Build the model once more, as transformers does, and record how its tensors begin.

    In fp32, rounded once at the end: `from_pretrained` computes buffers so, too.
    """
    recorder = Recorder()
    try:
        with torch.random.fork_rng(devices=[]), recorder:
            # For what an architecture draws outside its parameters: the same on every rank.
            torch.default_generator.manual_seed(seed)
            twin = plain_class(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)
    except Exception as error:  # an architecture may do anything on its way
        raise LoadingError(
            f"{_plain_name(model)} begins in a way that cannot be recorded "
            f"({type(error).__name__}: {error}); save a start with transformers and load that"
        ) from error
    recorder.name(dict(twin.named_parameters()))
    return twin, recorder


def _compute_buffers(
    model: PreTrainedModel, twin: PreTrainedModel, recorder: Recorder, wanted: dict[str, Any]
) -> None:
    computed = dict(twin.named_buffers())
    for name, buffer in wanted.items():
        whole = tuple(slice(0, n) for n in buffer.shape)
        with _named_fault(model, name):
            value = recorder.replay(computed[name], whole, buffer.dtype, seed=0)
        _replace(model, name, value)


def _compute_parameters(
    model: PreTrainedModel,
    twin: PreTrainedModel,
    recorder: Recorder,
    wanted: dict[str, Any],
    home: torch.device,
    seed: int,
) -> None:
    computed, aliases = dict(_named(twin)), _aliases(model)
    for name, reference in wanted.items():
        slices = (
            local_slices(reference)
            if isinstance(reference, DTensor)
            else tuple(slice(0, n) for n in reference.shape)
        )
        with _named_fault(model, name):
            part = recorder.replay(computed[name], slices, reference.dtype, seed)
        _place(model, aliases[name], part.to(home), reference)


@contextlib.contextmanager
def _named_fault(model: PreTrainedModel, name: str) -> Iterator[None]:
    try:
        yield
    except (LoadingError, KeyError) as error:
        raise LoadingError(
            f"the start of {name} of {_plain_name(model)} cannot be computed ({error}); save a "
            "random start with transformers and load that"
        ) from error


# --------------------------------------------------------------------------------------------------
# Adapters
# --------------------------------------------------------------------------------------------------


def _begin_adapters(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give the adapters of `model`, if it has any, their first values. Collective."""
    if not has_adapters(model):
        return
    aliases, home = _aliases(model), _home(model, device)
    # Not together: it gathers weights on the way, and what it raises every rank sees alike.
    for name, part in first_values(model, seed, device):
        _place(model, aliases[name], part.to(home), model.get_parameter(name))
    for name, value in copied_buffers(model):
        _replace(model, name, value)
    _settle_buffers(model, device)
    ranks.on_all(lambda: check_materialised(model))


# --------------------------------------------------------------------------------------------------
# Both ways
# --------------------------------------------------------------------------------------------------


def _place(model: nn.Module, names: list[str], part: torch.Tensor, reference: torch.Tensor) -> None:
    """Put this rank's `part` under all of `names`, laid out as `reference` is."""
    value: torch.Tensor = part.to(reference.dtype)
    if isinstance(reference, DTensor):
        value = laid_out_as(reference, value)
    if isinstance(reference, nn.Parameter):
        value = nn.Parameter(value, requires_grad=reference.requires_grad)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    for name in names:
        _replace(model, name, value)


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


def _replace(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    table: dict[str, Any] = (
        module._parameters if leaf in module._parameters else module._buffers  # type: ignore[assignment]
    )
    table[leaf] = value


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return every parameter's first name -> all its names."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in _named(model):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names


def _settle_buffers(model: nn.Module, device: torch.device) -> None:
    """Move to the compute device what offload does not keep in host memory: buffers, and parameters
    that are not sharded.
    """
    for name, buffer in list(model.named_buffers()):
        if not buffer.is_meta and buffer.device != device:
            _replace(model, name, buffer.to(device))
    for names in _aliases(model).values():
        parameter = model.get_parameter(names[0])
        if isinstance(parameter, DTensor) or parameter.is_meta or parameter.device == device:
            continue
        moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name in names:
            _replace(model, name, moved)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def _as_library_code(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers treat the sharded class as its own.

    `fully_shard` changes the class of the model, which then counts as custom code: modules without
    tensors of their own would be left uninitialised (falcon_h1's buffers, for one).
    """
    vars(model)["is_custom_code"] = plain_class(model).is_custom_code
    try:
        yield
    finally:
        del vars(model)["is_custom_code"]


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class as it was before sharding changed it."""
    return assets_of(model).model_class or type(model)


def _plain_name(model: PreTrainedModel) -> str:
    return plain_class(model).__name__


def _gone(error: Exception) -> LoadingError:
    import transformers

    return LoadingError(
        f"transformers {transformers.__version__} has no {error}; the loader needs 5.17 to 5.23"
    )
