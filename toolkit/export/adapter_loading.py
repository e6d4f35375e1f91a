"""Load the adapter that a run continues (`lora.from`), and prove that a saved one can be reloaded.

[Note: two readers] PEFT itself reads the adapter, on rank 0, into a base model without values, so
that the run starts from what a reader of the folder would compute with. Each tensor is sent to the
ranks, which keep their rows. Then the sums of bits in memory are compared with sums over the file,
read without PEFT, or with the sums that the checkpoint recorded when it was saved.

[Note: from_pretrained at any size] The base model may not fit into one process. PEFT needs the
shapes of the base to find its layers, but none of its values. So rank 0 makes the same call as a
reader on a base without values (`peft_folder.fill_without_memory`), and sends the loaded tensors to
the ranks one by one. Each rank compares its rows. `toolkit verify --logits` proves what the model
computes with the adapter.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from toolkit import ranks
from toolkit.adapters.peft_folder import (
    describe_other_scaling,
    fill_without_memory,
    load_with_peft,
    map_file_keys,
    sum_tensor_bits,
)
from toolkit.adapters.values import copy_from_main
from toolkit.checkpoint import TrainState, local_copy, wait
from toolkit.checkpoint.adapter_source import (
    AdapterSource,
    check_same_base,
    format_chain,
    format_settings,
    open_adapter,
)
from toolkit.checkpoint.resuming import find_wrong_sums, quarantine
from toolkit.config.settings import FinetuneConfig
from toolkit.errors import CheckpointError, ConfigError, ExportError
from toolkit.export.consolidation import consolidate
from toolkit.export.readers import SavedTensors
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    Tensors,
    assets_of,
    local_tensor,
    read_header,
    read_tensor,
    reshard,
    same_values,
    slice_like,
)
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.models import model_on_meta
from toolkit.models.peft_model import has_adapters, trained_tensors

_MODEL = "model."  # before names of parameters in a checkpoint


def check_adapter(adapted: nn.Module, cfg: FinetuneConfig) -> str:
    """Raise a ConfigError unless a model can continue the adapter of `lora.from`.

    Base model, tensor names and shapes are compared. Not collective: one process calls it, before
    the weights of the base are loaded. Reads headers, and 16 kB per tensor of a base on this
    machine.

    Args:
        adapted: the model with new adapters, possibly on meta.
        cfg: the settings of the run.

    Returns:
        A log line that describes the adapter.

    Raises:
        ConfigError: the adapter does not fit (the error says why).
    """
    with open_adapter(cfg.lora) as source:
        line = check_same_base(cfg, source)
        _check_tensors(source, adapted)
        chain = format_chain(source.stage)
        return f"adapter    continues {chain}: {format_settings(cfg.lora)}; {line}"


def _check_tensors(source: AdapterSource, adapted: nn.Module) -> None:
    """Raise a ConfigError if `adapted` does not have an adapter's tensor names and shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in trained_tensors(adapted).items()}
    if source.checkpoint is not None:
        saved = SavedTensors(source.checkpoint).shapes()
        stored_shapes = {name: shape for name, (_, shape) in saved.items()}
    else:
        frozen, entries = map_frozen_keys(adapted), source.tensors()
        names = map_file_keys(adapted) | frozen
        stored_shapes = {names.get(key, key): entry.shape for key, entry in entries.items()}
        parameters = dict(adapted.named_parameters(remove_duplicate=False))
        saved_along = [name for key, name in frozen.items() if key in entries]
        shapes |= {name: tuple(parameters[name].shape) for name in saved_along}
    _check_names_and_shapes(source, shapes, stored_shapes)


def _check_names_and_shapes(
    source: AdapterSource,
    expected: dict[str, tuple[int, ...]],
    stored_shapes: dict[str, tuple[int, ...]],
) -> None:
    """Raise a ConfigError if an adapter lacks tensors, has others, or has other shapes.

    Args:
        source: the adapter, for the error.
        expected: name -> shape of the tensors that the run trains.
        stored_shapes: name -> shape of the tensors in the adapter.
    """
    place = f"lora.from {source.name}"
    missing, unknown = (
        sorted(expected.keys() - stored_shapes.keys()),
        sorted(stored_shapes.keys() - expected.keys()),
    )
    if missing:
        raise ConfigError(
            f"{place} has no {missing[0]} ({len(missing)} of {len(expected)} tensors are missing), "
            "which this run trains: its file and its adapter_config.json do not belong together, "
            "or it was trained on another model"
        )
    if unknown:
        raise ConfigError(
            f"{place} holds {unknown[0]} (and {len(unknown) - 1} more), which this model with its "
            "adapters does not have; give the adapter's own base as model.name_or_path"
        )
    for name, shape in expected.items():
        if stored_shapes[name] != shape:
            raise ConfigError(
                f"{place} has {name} of shape {list(stored_shapes[name])}, this run "
                f"{list(shape)}; give the adapter's own base as model.name_or_path, and "
                "model.resize_embeddings if it was trained with new tokens"
            )


def map_frozen_keys(adapted: nn.Module) -> dict[str, str]:
    """Map keys that an adapter file may have, but that are not trained, to parameter names.

    These are frozen embedding matrices: PEFT saves one if it is adapted or was resized.
    """
    trained = map_file_keys(adapted)
    every = map_file_keys(adapted, embeddings=True)
    return {key: name for key, name in every.items() if key not in trained}


def load_adapter(model: nn.Module, cfg: FinetuneConfig) -> list[str]:
    """Load the adapter of `lora.from` into a sharded model and prove its values. Collective.

    See [Note: two readers]. The base and the initial values of the adapters must be loaded already.
    Rank 0 holds the adapter twice in memory. The model's assets get the entry that describes the
    adapter (`continued`), which later checkpoints and exports record.

    Returns:
        Log lines.

    Raises:
        ConfigError: on every rank: the adapter cannot be read, or the values in memory differ from
            the file (the error names a tensor).
    """
    with contextlib.ExitStack() as stack:

        def read() -> tuple[Tensors, dict[str, int], Tensors, dict[str, Any]]:
            """Open the adapter for as long as `stack` is open, and read it by `_read_adapter`."""
            source = stack.enter_context(open_adapter(cfg.lora))
            return _read_adapter(model, source, stack)

        values, sums, frozen, stage = ranks.on_all(
            lambda: read() if ranks.rank() == 0 else ({}, {}, {}, {})
        )
        live = trained_tensors(model)
        for name, tensor in live.items():
            copy_from_main(tensor, values.get(name))
        stage, names = ranks.broadcast((stage, [*frozen]))
        _check_frozen_matrices(model, cfg, frozen, names)
        expected = ranks.broadcast(sums)
        proven = {n: t for n, t in live.items() if is_sharded_by_rows(t)}
        if wrong := find_wrong_sums(proven, expected):
            raise ranks.mark_collective(
                ConfigError(
                    f"lora.from {cfg.lora.from_}: {len(wrong)} of {len(live)} tensors do not hold "
                    f"in memory what its file holds, such as {wrong[0]}: PEFT reads them otherwise "
                    "(was it saved by another version?), or a device or memory is at fault"
                )
            )
    assets_of(model).continued = stage
    return [f"adapter    {len(live)} tensors loaded by PEFT, bit sums equal to the file's"]


def _read_adapter(
    model: nn.Module, source: AdapterSource, stack: contextlib.ExitStack
) -> tuple[Tensors, dict[str, int], Tensors, dict[str, Any]]:
    """Read an adapter into memory with PEFT, and compute its checksums without PEFT.

    Only on rank 0.

    Args:
        model: the model that continues the adapter.
        source: the adapter.
        stack: deletes temporary folders when it is closed.

    Returns:
        Four dicts: name -> value of each trained tensor; name -> its expected checksum; name ->
        value of each frozen matrix that the file also holds; the adapter's manifest entry.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    # A resume may read the adapter without `check_adapter`.
    _check_tensors(source, model)
    live = trained_tensors(model)
    folder = source.folder
    if source.checkpoint is not None:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(consolidate(source.folder, Path(scratch, "adapter")))
    keys, extra = map_file_keys(model), map_frozen_keys(model)
    entries = read_header(folder / ADAPTER_WEIGHTS)
    frozen = {extra[key]: read_tensor(entries[key]) for key in extra.keys() & entries.keys()}
    with _drop_frozen(folder, {k: e for k, e in entries.items() if k in keys}, frozen) as readable:
        loaded, names = _load_by_peft(model, readable)
    values = {name: loaded[name].detach().to(live[name].dtype) for name in names}
    try:
        sums = sum_tensor_bits(keys, entries, {name: t.dtype for name, t in live.items()})
    except ExportError as error:
        raise ConfigError(f"lora.from {source.name}: {error}") from error
    if source.checkpoint is not None:  # of live memory, when it was saved
        saved = source.checkpoint.row_sums
        sums |= {n: saved[_MODEL + n] for n in sums if _MODEL + n in saved}
    return values, sums, frozen, source.stage


@contextlib.contextmanager
def _drop_frozen(folder: Path, entries: dict[str, Any], frozen: Tensors) -> Iterator[Path]:
    """Yield a PEFT folder without frozen matrices; use it as a context manager.

    PEFT could not load these matrices into a base on meta. The yielded folder is a temporary copy,
    or `folder` itself if there are no frozen matrices.

    Args:
        folder: the PEFT folder.
        entries: key -> file, offset, dtype and shape of the tensors to copy.
        frozen: name -> value of the frozen matrices.
    """
    if not frozen:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        content = (folder / ADAPTER_FILE).read_bytes()
        Path(scratch, ADAPTER_FILE).write_bytes(content)
        tensors = {key: read_tensor(entry) for key, entry in entries.items()}
        save_file(tensors, Path(scratch, ADAPTER_WEIGHTS), {"format": "pt"})
        yield Path(scratch)


def _load_by_peft(model: nn.Module, folder: Path) -> tuple[Tensors, list[str]]:
    """Load an adapter with `PeftModel.from_pretrained` into a base without values.

    Args:
        model: the run's model, from which the base is built.
        folder: the PEFT folder.

    Returns:
        (state dict of the PEFT model, names of the trained tensors of `model`).

    Raises:
        ConfigError: PEFT skips a tensor, or scales a layer differently than `model` does.
    """
    with tempfile.TemporaryDirectory() as scratch:
        assets_of(model).save(Path(scratch))
        base = fill_without_memory(model_on_meta(Path(scratch)))
    try:
        peft, problems = load_with_peft(base, folder, empty=True)
    except ExportError as error:
        raise ConfigError(f"lora.from: {error}") from error
    state = peft.state_dict()
    names = [*trained_tensors(model)]
    lost = [name for name in names if name not in state or state[name].is_meta]
    if problems or lost:
        detail = problems[0] if problems else f"it leaves {lost[0]} out"
        raise ConfigError(f"lora.from: PEFT does not load all of the adapter: {detail}")
    if problem := describe_other_scaling(peft, model):
        raise ConfigError(f"lora.from: {problem}")
    return state, names


def _check_frozen_matrices(
    model: nn.Module, cfg: FinetuneConfig, frozen: Tensors, names: list[str]
) -> None:
    """Raise a ConfigError if frozen matrices in an adapter file differ from the base. Collective.

    Args:
        model: the sharded model, with its base loaded.
        cfg: the settings of the run, for the error.
        frozen: name -> value of the matrices in the file, on rank 0.
        names: names of the matrices, on every rank.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    differs = []
    for name in names:
        tensor = parameters[name].detach()
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        if ranks.rank() == 0:
            full = frozen[name].to(tensor.dtype).contiguous()
        if (group := ranks.object_group()) is not None:
            dist.broadcast(full, src=0, group=group)
        part = local_tensor(tensor).cpu()
        differs.append(not bool(same_values(slice_like(full, tensor), part).all()))
    if any(flags := ranks.any_over_ranks(differs)):
        name = names[flags.index(True)]
        raise ranks.mark_collective(
            ConfigError(
                f"lora.from {cfg.lora.from_}: its file holds {name} too, which this run does not "
                "train, with other values than the base: it was trained on another base"
            )
        )


_ADVICE = "do not go on from it, or publish it: a reader would get another model"


def prove_adapter(state: TrainState, checkpoint: str) -> str:
    """Prove that the adapter of a new checkpoint can be reloaded unchanged. Collective.

    The adapter is exported, loaded by PEFT and compared with the model of `state`, which must not
    have changed since the save. If it differs, the checkpoint is quarantined. Waits for a save in
    the background. Rank 0 reads and writes the adapter once, and holds it twice in memory.

    Args:
        state: the state that was saved.
        checkpoint: path or URL of its checkpoint.

    Returns:
        The log line; "" for a model without adapters, or if the save failed.

    Raises:
        CheckpointError: on every rank: the adapter differs (the error names rank and tensor).
        ExportError: on every rank: the adapter cannot be exported, or PEFT cannot load it.
    """
    if not has_adapters(state.model):
        return ""
    wait()
    # A warning has reported that save; there is nothing to prove.
    if checkpoint in state.saves.failed:
        return ""
    try:
        return compare_with_reloaded(state.model, checkpoint)
    except CheckpointError as error:
        quarantine(checkpoint, str(error))
        raise


def compare_with_reloaded(model: nn.Module, checkpoint: str | Path) -> str:
    """Compare the adapter in `model` with the one that PEFT loads from a checkpoint. Collective.

    Returns:
        The log line, if they are bitwise identical.

    Raises:
        CheckpointError: on every rank: a tensor differs on some rank, or PEFT does not load it.
    """
    start_time = time.perf_counter()
    wait()
    reshard(model)
    trained = trained_tensors(model)
    loaded = ranks.on_all(lambda: _reload_by_peft(checkpoint, trained) if ranks.rank() == 0 else {})
    different = [name for name in trained if not _is_equal(name, trained[name], loaded)]
    failed = any(ranks.any_over_ranks([bool(different)]))
    for rank, names in enumerate(ranks.gather(different) if failed else ()):
        if names:
            raise CheckpointError(
                f"{checkpoint} does not give back what was trained: on rank {rank} "
                f"{len(names)} of {len(trained)} tensors differ, such as {names[0]}; {_ADVICE}"
            )
    loader = "through PeftModel.from_pretrained, bitwise identical"
    seconds = time.perf_counter() - start_time
    return f"adapter proven: {len(trained)} tensors reloaded {loader} ({seconds:.1f} s)"


def _reload_by_peft(
    checkpoint: str | Path, trained: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Export the adapter of a checkpoint to a temporary folder, and load it with PEFT.

    Args:
        checkpoint: path or URL of the checkpoint.
        trained: name -> trained tensor of the model in memory.

    Returns:
        Name -> full tensor, for the names and in the dtypes of `trained`.

    Raises:
        CheckpointError: PEFT does not load all of the adapter.
    """
    with local_copy(checkpoint) as folder, tempfile.TemporaryDirectory() as scratch:
        exported = Path(consolidate(folder, Path(scratch, "adapter")))
        base = fill_without_memory(model_on_meta(Path(folder, "hf")))
        model, problems = load_with_peft(base, exported, empty=True)
    if problems:
        raise CheckpointError(f"{checkpoint}: {problems[0]}")
    state = model.state_dict()
    missing = [n for n in trained if n not in state or state[n].is_meta]
    if missing:
        raise CheckpointError(
            f"PEFT does not load {missing[0]} (and {len(missing) - 1} more) of the export of "
            f"{checkpoint}; {_ADVICE}"
        )
    return {n: state[n].detach().to(t.dtype) for n, t in trained.items()}


def _is_equal(name: str, tensor: torch.Tensor, loaded: dict[str, torch.Tensor]) -> bool:
    """Return True if this rank's part of `tensor` equals rank 0's `loaded[name]`. Collective.

    NaN equals NaN. `loaded` is only needed on rank 0.
    """
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    if ranks.rank() == 0:
        whole = loaded[name].contiguous()
    if (group := ranks.object_group()) is not None:
        dist.broadcast(whole, src=0, group=group)
    expected, part = slice_like(whole, tensor), local_tensor(tensor.detach()).cpu()
    return part.shape == expected.shape and bool(same_values(expected, part).all())
