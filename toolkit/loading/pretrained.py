"""A checkpoint into shards: each rank reads its slices, and what does not fit is refused."""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit import formats, ranks
from toolkit.adapters.base import base_digest, record_base
from toolkit.config.settings import ModelConfig
from toolkit.errors import LoadingError
from toolkit.loading import convert
from toolkit.loading.materialisation import (
    fill_missing,
    finish_placement,
    init_adapters,
    init_weights,
    materialise,
    set_tensor,
)
from toolkit.loading.proof import check_finite, compute_base_sums, prove_load
from toolkit.models.classes import model_class_name, original_class
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import base_of, has_adapters, unwrapped_base
from toolkit.models.tiny_copy import find_text_fault
from toolkit.sharding.fsdp import Sharded
from toolkit.tables import size_text


@dataclass(frozen=True)
class LoadReport:
    """Counts of what one rank read."""

    tensors: int  # tensors in the checkpoint
    file_bytes: int  # bytes of those tensors
    bytes_requested: int  # bytes of the slices that this rank asked for
    seconds: float
    proof: str = ""  # a line on what was compared with the files, if that was asked for


def load_or_init(
    sharded: Sharded,
    cfg: ModelConfig,
    device: torch.device | str,
    seed: int,
    *,
    empty: bool = False,
    say: Callable[[str], object] = ranks.log_once,
) -> None:
    """Materialise a sharded model on `device` as a run begins. Collective.

    Args:
        seed: of random weights, and of the first values of adapters.
        empty: a checkpoint of the run is restored next, which holds all values but those of a base
            under adapters.
        say: prints a line, on one rank.
    """
    model, home, target = sharded.model, sharded.home, torch.device(device)
    what = "base       " if has_adapters(model) else "weights    "
    if empty and not has_adapters(model):
        materialise(base_of(model), target, home)
        say(f"{what}those of the run's checkpoint")
    elif cfg.init == "random":
        init_weights(model, target, seed, home)
        say(f"{what}random, drawn from seed {seed}")
    else:
        folder = ranks.collective(formats.local_folder)(cfg.name_or_path, cfg.revision)
        # A resumed base is compared with the sums of its first start.
        report = load_pretrained(model, folder, target, seed=seed, home=home, prove=not empty)
        say(
            f"{what}{cfg.name_or_path}: {report.tensors} tensors, {size_text(report.file_bytes)}; "
            f"this rank read {size_text(report.bytes_requested)} in {report.seconds:.1f} s"
        )
        if report.proof:
            say(report.proof)


def load_pretrained(
    model: nn.Module,
    path: str | Path,
    device: torch.device | str,
    *,
    seed: int = 0,
    home: torch.device | None = None,
    prove: bool = True,
) -> LoadReport:
    """Materialise `model` on `device` with the weights of a Hugging Face checkpoint. Collective.

    Every rank reads only its slices of each tensor, cast to the parameter's storage dtype; memory
    beyond the shards stays below the largest tensor. Under adapters they are those of the base.

    Args:
        model: from `build_on_meta` or `add_adapters`, sharded or not.
        path: folder or Hub id of the checkpoint (safetensors).
        seed: of what the checkpoint lacks: the head of a new reward model, and the adapters' first
            values; the same for any number of ranks.
        home: where parameters live, if not on `device` (`Sharded.home`).
        prove: compare memory with the files, which are read a second time; see [Note: proof of a
            load].

    Raises:
        LoadingError: on every rank, with the tensors named: missing or unexpected keys, other
            shapes, a damaged file, a parameter left on meta, values that are not those of the
            file, NaN or infinity in what is trained.
    """
    begun, target = time.perf_counter(), torch.device(device)
    folder = ranks.collective(formats.local_folder)(str(path))
    # Two exchanges: tying compares weights over all ranks, so none may come to it alone.
    with unwrapped_base(model) as base:
        frozen = {n for n, p in _parameters(base).items() if not p.requires_grad}
        # The sharded class would count as custom code, whose modules without tensors of their own
        # are left uninitialised (falcon_h1's buffers, for one).
        with mock.patch.object(base, "is_custom_code", original_class(base).is_custom_code):
            info, counts = _stream(base, folder, str(path), target, home or target)
            _settle(base, target, home or target, folder, info, frozen, seed)
        seconds, proof = time.perf_counter() - begun, ""
        if prove:
            entries = ranks.on_all(lambda: _entries(base, formats.weight_files(folder, str(path))))
            proof = prove_load(base, entries)
        sums = compute_base_sums(base) if has_adapters(model) else None
    if has_adapters(model):
        digest = ranks.on_main(lambda: base_digest(folder, str(path)))
        record_base(model, str(path), folder, digest)
        formats.assets_of(model).base_sums = sums
    init_adapters(model, target, home, seed)
    check_finite(model, str(path))
    return LoadReport(*counts, seconds, proof)


@ranks.collective
def check_fits(model: nn.Module, cfg: ModelConfig) -> None:
    """Refuse weights that are not those of `model`, before their bytes are read. Collective.

    Plays the load through on a copy of `model`, which is not yet sharded, from the headers. A
    LoadingError names the tensors that are missing, unknown or of another shape.
    """
    if cfg.init == "random":
        return
    folder = formats.local_folder(cfg.name_or_path, cfg.revision)
    files = formats.weight_files(folder, cfg.name_or_path, cfg.revision)
    with unwrapped_base(model) as base:
        entries = _entries(base, files)
        _check_shapes(base, entries)
        _refuse(base, folder, find_misfits(base, entries))
        _note_carried(base, folder, cfg, entries)


def _entries(model: PreTrainedModel, files: list[Path]) -> dict[str, formats.StoredTensor]:
    """Return the tensors in `files`, without the head of a causal LM that a reward model is made
    of.
    """
    assets = formats.assets_of(model)
    left = {part for key in assets.head_left_out for part in assets.stored.get(key, (key,))}
    return {key: e for key, e in formats.read_weights(files).items() if key not in left}


def _note_carried(
    model: PreTrainedModel,
    folder: Path,
    cfg: ModelConfig,
    entries: dict[str, formats.StoredTensor],
) -> None:
    """Say what of the checkpoint is not loaded, and note from where exports copy it."""
    assets = formats.assets_of(model)
    if assets.drawn:
        names = ", ".join(assets.head_left_out)
        left = f"; {names} of {cfg.name_or_path} is left out" if names else ""
        ranks.log_once(
            f"head       {', '.join(assets.drawn)} of {model_class_name(model)} is new, drawn from the "
            f"run's seed{left}"
        )
    if assets.whole is not None:
        whole = assets.whole[0].__name__
        ranks.log_once(
            f"text part  {model_class_name(model)} is trained: {whole} has no forward for text alone "
            f"({find_text_fault(*assets.whole)})"
        )
    if assets.stored:
        kept = f"{len(assets.stored)} of {len(assets.source or ())} tensors of {cfg.name_or_path}"
        method = assets.reader.quantization_config.quant_method
        ranks.log_once(
            f"stored     {kept} are in {getattr(method, 'value', method)}, read in full precision; "
            "exports hold them so, without a quantization_config"
        )
    carried = formats.source_keys(model, assets.source or ()).carried
    if not carried or ranks.rank() != 0:
        return
    digest = base_digest(folder, cfg.name_or_path, cfg.revision)
    named = {"name_or_path": assets.name_or_path, "revision": assets.revision}
    assets.origin = {**named, "digest": digest}
    size = sum(entries[k].nbytes for n in carried for k in assets.stored.get(n, (n,)))
    beside = formats.told(carried, assets.source or ())
    ranks.log_once(
        f"carried    {model_class_name(model)} does not load {beside}; {size_text(size)}, which exports "
        f"copy from {cfg.name_or_path}: keep that"
    )


def find_misfits(
    model: PreTrainedModel, entries: dict[str, formats.StoredTensor]
) -> dict[str, list[str]]:
    """Return what would keep transformers from loading `entries` into `model`, which is on meta and
    not sharded, and stays so: kind -> tensors.
    """
    meta = torch.device("meta")
    sources = {}
    for name, entry in entries.items():
        rows = _resized_rows(model, name, entry)
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        sources[name] = torch.empty(shape, dtype=entry.dtype, device=meta)
    without_bytes = copy.deepcopy(model)
    for name, layer in packed_weights(without_bytes).items():  # the load reads the matrix
        whole = torch.empty(layer.shape, dtype=layer.source_dtype, device=meta)
        set_tensor(without_bytes, name, nn.Parameter(whole, requires_grad=False))
    info = convert.run_loader(without_bytes, sources, meta)
    if info.conversion_errors:  # a conversion that looks at values: the load itself will tell
        return {}
    convert.resolve_keys(without_bytes, info)
    return convert.key_problems(info)


@ranks.collective
def _stream(
    model: PreTrainedModel, folder: Path, path: str, device: torch.device, home: torch.device
) -> tuple[Any, tuple[int, int, int]]:
    """Read this rank's slices; return the account of keys and (tensors, bytes, bytes requested)."""
    entries = _entries(model, formats.weight_files(folder, path))
    _check_shapes(model, entries)
    packed = packed_weights(model)
    # One storage dtype in host memory: cast while reading. Else the loader casts, piece by piece.
    dtypes = {t.dtype for n, t in model.state_dict(keep_vars=True).items() if n not in packed}
    dtypes = {d for d in dtypes if d.is_floating_point} | {p.source_dtype for p in packed.values()}
    dtype, copy = (dtypes.pop() if len(dtypes) == 1 else None), home.type == "cpu"
    in_parts = {key for keys in formats.assets_of(model).stored.values() for key in keys}
    with formats.OpenFiles() as reader:
        sources: dict[str, Any] = {}
        for name, entry in entries.items():
            rows = _resized_rows(model, name, entry)
            cast = None if name in in_parts else dtype  # scales keep their precision
            sources[name] = formats.FileTensor(reader, name, entry, cast, rows, copy)
        groups = convert.groups_to_convert_first(model, sources)
        whole = {key: sources.pop(key) for group in groups for key in group.keys}
        bar = ranks.rank() == 0 and sys.stderr.isatty()
        info = convert.run_loader(model, sources, home, bar=bar)
        if groups:
            convert.convert_then_slice(model, groups, whole, device, home, info)
    return info, (len(entries), sum(e.nbytes for e in entries.values()), reader.requested)


@ranks.collective
def _settle(
    model: PreTrainedModel,
    device: torch.device,
    home: torch.device,
    folder: Path,
    info: Any,
    frozen: set[str],
    seed: int,
) -> None:
    """Tie, compute what no checkpoint holds, and refuse what does not fit or stayed on meta."""
    convert.resolve_keys(model, info)
    for name, parameter in _parameters(model).items():
        parameter.requires_grad_(name not in frozen)  # the loader makes new ones that have one
    _refuse(model, folder, convert.key_problems(info))
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = [n for n, b in model.named_buffers() if b.is_meta or n not in persistent]
    parameters = [n for n, p in model.named_parameters() if formats.local_tensor(p).is_meta]
    fill_missing(model, home, parameters, buffers, seed)
    finish_placement(model, device)


def _refuse(model: PreTrainedModel, folder: Path, found: dict[str, list[str]]) -> None:
    if found:
        raise LoadingError(
            f"{folder} does not fit {model_class_name(model)} as its config.json describes it: "
            f"{convert.format_problems(found)}. Give a folder whose config.json and weights belong together"
        )


def _check_shapes(model: PreTrainedModel, entries: dict[str, formats.StoredTensor]) -> None:
    """Refuse other shapes from the headers, before a byte is read."""
    held = model.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    shapes |= {name: layer.shape for name, layer in packed_weights(model).items()}
    in_parts = {key for keys in formats.assets_of(model).stored.values() for key in keys}
    for name in [name for name in entries if name in shapes and name not in in_parts]:
        entry, expected = entries[name], shapes[name]
        if entry.shape != expected and _resized_rows(model, name, entry) is None:
            raise LoadingError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, the model expects "
                f"{list(expected)}; give the weights of this config.json"
            )


def _resized_rows(model: PreTrainedModel, name: str, entry: formats.StoredTensor) -> int | None:
    """Return the new number of rows of what `resize_embeddings` changed; None of all else."""
    before = formats.assets_of(model).resized
    if not entry.shape or entry.shape[0] not in before.values():
        return None
    ((_, target, _),) = formats.loaded_as(model, [name])
    if before.get(target) != entry.shape[0]:
        return None
    shape = tuple(_parameters(model)[target].shape)
    return shape[0] if shape[1:] == entry.shape[1:] else None


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every name of every parameter."""
    return dict(model.named_parameters(remove_duplicate=False))
