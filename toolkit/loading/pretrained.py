"""Load a checkpoint into shards: each rank reads its slices, and a mismatch is an error."""

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
    fill_tensors,
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
    """Statistics of loading a checkpoint on one rank."""

    tensors: int  # tensors in the checkpoint
    file_bytes: int  # bytes of those tensors
    bytes_requested: int  # bytes of the slices that this rank asked for
    seconds: float
    proof: str = ""  # log line of the proof; empty without one


def load_or_init(
    sharded: Sharded,
    cfg: ModelConfig,
    device: torch.device | str,
    seed: int,
    *,
    empty: bool = False,
    say: Callable[[str], object] = ranks.log_once,
) -> None:
    """Load or draw the first values of a sharded model on meta. Collective.

    Logs the source of the weights.

    Args:
        sharded: the model.
        cfg: name and revision of the weights, and whether they are drawn at random.
        device: device of the run.
        seed: seed of random weights and of new adapters.
        empty: True if a checkpoint of the run is restored next. Then weights are only allocated. A
            base under adapters is loaded even then, because checkpoints do not hold it.
        say: function that logs a line on one rank.
    """
    model = sharded.model
    home = sharded.home
    target = torch.device(device)
    label = "base       " if has_adapters(model) else "weights    "
    if empty and not has_adapters(model):
        materialise(base_of(model), target, home)
        say(f"{label}those of the run's checkpoint")
    elif cfg.init == "random":
        init_weights(model, target, seed, home)
        say(f"{label}random, drawn from seed {seed}")
    else:
        folder = ranks.collective(formats.local_folder)(cfg.name_or_path, cfg.revision)
        # A resumed base is compared with the sums of its first start.
        report = load_pretrained(model, folder, target, seed=seed, home=home, prove=not empty)
        say(
            f"{label}{cfg.name_or_path}: {report.tensors} tensors, {size_text(report.file_bytes)}; "
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
    """Load a Hugging Face checkpoint into `model`, and initialise its adapters. Collective.

    If the model has adapters, the checkpoint is loaded into the base. Every rank reads only its
    slices of each tensor, cast to the parameter's storage dtype. In addition to the shards, memory
    holds at most the largest tensor.

    Args:
        model: from `build_on_meta` or `add_adapters`, sharded or not.
        path: folder or Hub id of the checkpoint (safetensors).
        device: device of the run.
        seed: seed of parameters that the checkpoint lacks: the head of a new reward model, and
            adapters. They are the same for any number of ranks.
        home: device of the parameters (`Sharded.home`); None: `device`.
        prove: read the files a second time and compare them with memory; see [Note: proof of a
            load].

    Returns:
        Statistics of this rank.

    Raises:
        LoadingError: keys are missing or unexpected, shapes differ, or a file is damaged. It is
            also raised if values differ from those in the files, or if trained parameters hold NaN
            or infinity. All ranks raise it, and the message names the tensors.
    """
    begun = time.perf_counter()
    target = torch.device(device)
    folder = ranks.collective(formats.local_folder)(str(path))
    # Two separate exchanges: tying compares weights over all ranks, so every rank must reach it.
    with unwrapped_base(model) as base:
        frozen = {n for n, p in _named_parameters(base).items() if not p.requires_grad}
        # transformers would take the sharded class for custom code, and would not initialise its
        # modules without own tensors (falcon_h1's buffers, for example).
        with mock.patch.object(base, "is_custom_code", original_class(base).is_custom_code):
            info, counts = _read_slices(base, folder, str(path), target, home or target)
            _finish_load(base, target, home or target, folder, info, frozen, seed)
        seconds = time.perf_counter() - begun
        proof = ""
        if prove:
            entries = ranks.on_all(
                lambda: _read_entries(base, formats.weight_files(folder, str(path)))
            )
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
def check_weights_fit(model: nn.Module, cfg: ModelConfig) -> None:
    """Raise LoadingError unless the checkpoint of `cfg` fits `model`. Collective.

    Reads only the headers of the files, and simulates the load on a copy of `model`, which must be
    on meta and not sharded. Also logs which parts of the checkpoint are not loaded. Does nothing
    for random weights.

    Raises:
        LoadingError: tensors are missing, unexpected or of another shape, or a file is damaged.
    """
    if cfg.init == "random":
        return
    folder = formats.local_folder(cfg.name_or_path, cfg.revision)
    files = formats.weight_files(folder, cfg.name_or_path, cfg.revision)
    with unwrapped_base(model) as base:
        entries = _read_entries(base, files)
        _check_shapes(base, entries)
        _raise_problems(base, folder, find_load_problems(base, entries))
        _log_unloaded_parts(base, folder, cfg, entries)


def _read_entries(model: PreTrainedModel, files: list[Path]) -> dict[str, formats.StoredTensor]:
    """Read the headers of the weight files; return tensor name -> location.

    The head of a causal LM is omitted if `model` is a reward model that does not load it.
    """
    assets = formats.assets_of(model)
    skipped = {part for key in assets.head_left_out for part in assets.stored.get(key, (key,))}
    return {key: e for key, e in formats.read_weights(files).items() if key not in skipped}


def _log_unloaded_parts(
    model: PreTrainedModel,
    folder: Path,
    cfg: ModelConfig,
    entries: dict[str, formats.StoredTensor],
) -> None:
    """Log which parts of the checkpoint are skipped, converted, or only copied to exports.

    If exports copy tensors, sets `origin` in the assets of rank 0 to their source.
    """
    assets = formats.assets_of(model)
    if assets.drawn:
        names = ", ".join(assets.head_left_out)
        skipped = f"; {names} of {cfg.name_or_path} is skipped" if names else ""
        ranks.log_once(
            f"head       {', '.join(assets.drawn)} of {model_class_name(model)} is new, drawn from "
            f"the run's seed{skipped}"
        )
    if assets.whole is not None:
        full_class = assets.whole[0].__name__
        ranks.log_once(
            f"text part  {model_class_name(model)} is trained: {full_class} has no forward for "
            f"text alone ({find_text_fault(*assets.whole)})"
        )
    if assets.stored:
        share = f"{len(assets.stored)} of {len(assets.source or ())} tensors of {cfg.name_or_path}"
        method = assets.reader.quantization_config.quant_method
        ranks.log_once(
            f"stored     {share} are in {getattr(method, 'value', method)}, read in full "
            "precision; exports hold them in full precision, without a quantization_config"
        )
    carried = formats.group_source_keys(model, assets.source or ()).carried
    if not carried or ranks.rank() != 0:
        return
    digest = base_digest(folder, cfg.name_or_path, cfg.revision)
    origin = {"name_or_path": assets.name_or_path, "revision": assets.revision}
    assets.origin = {**origin, "digest": digest}
    size = sum(entries[k].nbytes for n in carried for k in assets.stored.get(n, (n,)))
    tensors = formats.summarise_names(carried, assets.source or ())
    ranks.log_once(
        f"carried    {model_class_name(model)} does not load {tensors}; {size_text(size)}, which "
        f"exports copy from {cfg.name_or_path}: keep that"
    )


def find_load_problems(
    model: PreTrainedModel, entries: dict[str, formats.StoredTensor]
) -> dict[str, list[str]]:
    """Simulate a load on meta, and return the reasons why it would fail.

    Args:
        model: on meta and not sharded; it is not changed.
        entries: tensor name -> location, of the checkpoint.

    Returns:
        Description of the problem -> names of its tensors. {} if there are none, or if a conversion
        needs values and can only be checked by the load itself.
    """
    meta = torch.device("meta")
    sources = {}
    for name, entry in entries.items():
        rows = _resized_rows(model, name, entry)
        shape = entry.shape if rows is None else (rows, *entry.shape[1:])
        sources[name] = torch.empty(shape, dtype=entry.dtype, device=meta)
    without_bytes = copy.deepcopy(model)
    # The load reads the full matrix, not the packed column.
    for name, layer in packed_weights(without_bytes).items():
        whole = torch.empty(layer.shape, dtype=layer.source_dtype, device=meta)
        set_tensor(without_bytes, name, nn.Parameter(whole, requires_grad=False))
    info = convert.run_loader(without_bytes, sources, meta)
    if info.conversion_errors:  # a conversion that needs values: only the load itself can check it
        return {}
    convert.tie_and_filter_keys(without_bytes, info)
    return convert.key_problems(info)


@ranks.collective
def _read_slices(
    model: PreTrainedModel, folder: Path, path: str, device: torch.device, home: torch.device
) -> tuple[Any, tuple[int, int, int]]:
    """Read this rank's slices of all tensors into `model`. Collective.

    Returns:
        (transformers' loading report, (number of tensors in the checkpoint, their bytes, bytes that
        this rank requested)).

    Raises:
        LoadingError: a shape in the file headers differs from that of the model.
    """
    entries = _read_entries(model, formats.weight_files(folder, path))
    _check_shapes(model, entries)
    packed = packed_weights(model)
    # With one storage dtype in host memory, tensors are cast while they are read. Else the loader
    # casts them one by one.
    dtypes = {t.dtype for n, t in model.state_dict(keep_vars=True).items() if n not in packed}
    dtypes = {d for d in dtypes if d.is_floating_point} | {p.source_dtype for p in packed.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    copy = home.type == "cpu"
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
def _finish_load(
    model: PreTrainedModel,
    device: torch.device,
    home: torch.device,
    folder: Path,
    info: Any,
    frozen: set[str],
    seed: int,
) -> None:
    """Tie weights, fill missing tensors, and move all to their devices. Collective.

    Also restores `requires_grad`, since the loader creates new parameters.

    Args:
        model: the model, after `_read_slices`.
        device: device of the run.
        home: device of the parameters.
        folder: the checkpoint, for the message.
        info: transformers' loading report.
        frozen: names of parameters that do not require a gradient.
        seed: seed of parameters that the checkpoint lacks.

    Raises:
        LoadingError: keys are missing or unexpected, or shapes differ.
    """
    convert.tie_and_filter_keys(model, info)
    for name, parameter in _named_parameters(model).items():
        # The loader creates new parameters, which all require a gradient.
        parameter.requires_grad_(name not in frozen)
    _raise_problems(model, folder, convert.key_problems(info))
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = [n for n, b in model.named_buffers() if b.is_meta or n not in persistent]
    parameters = [n for n, p in model.named_parameters() if formats.local_tensor(p).is_meta]
    fill_tensors(model, home, parameters, buffers, seed)
    finish_placement(model, device)


def _raise_problems(
    model: PreTrainedModel, folder: Path, problems_by_kind: dict[str, list[str]]
) -> None:
    """Raise a LoadingError that lists the problems, as `key_problems` returns them, if any."""
    if problems_by_kind:
        raise LoadingError(
            f"{folder} does not fit {model_class_name(model)} as its config.json describes it: "
            f"{convert.format_problems(problems_by_kind)}. Give a folder whose config.json and "
            "weights belong together"
        )


def _check_shapes(model: PreTrainedModel, entries: dict[str, formats.StoredTensor]) -> None:
    """Raise LoadingError if a tensor's shape in the file headers differs from the model's.

    Two kinds of differences are accepted: a number of rows that `resize_embeddings` has changed,
    and tensors that are stored in several parts, whose shapes are not compared.
    """
    state = model.state_dict(keep_vars=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    shapes |= {name: layer.shape for name, layer in packed_weights(model).items()}
    in_parts = {key for keys in formats.assets_of(model).stored.values() for key in keys}
    for name in [name for name in entries if name in shapes and name not in in_parts]:
        entry = entries[name]
        expected = shapes[name]
        if entry.shape != expected and _resized_rows(model, name, entry) is None:
            raise LoadingError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, the model expects "
                f"{list(expected)}; give the weights of this config.json"
            )


def _resized_rows(model: PreTrainedModel, name: str, entry: formats.StoredTensor) -> int | None:
    """Return the number of rows to which `resize_embeddings` has changed a stored tensor.

    Returns None if the tensor is not resized.
    """
    before = formats.assets_of(model).resized
    if not entry.shape or entry.shape[0] not in before.values():
        return None
    ((_, target, _),) = formats.map_source_keys(model, [name])
    if before.get(target) != entry.shape[0]:
        return None
    shape = tuple(_named_parameters(model)[target].shape)
    return shape[0] if shape[1:] == entry.shape[1:] else None


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter, with every name of a tied parameter."""
    return dict(model.named_parameters(remove_duplicate=False))
