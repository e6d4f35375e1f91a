"""Proof, after a save, that the adapter comes back: through its file, through PEFT, to the bit.

What the model computes with the adapter is proven by `toolkit verify --logits`.

[Note: from_pretrained at any size] The base may not fit into one process. PEFT needs the base's
shapes to find its layers, and none of its bytes: rank 0 makes a reader's very call on a base
without bytes (`peft_folder.fill_without_memory`). What it loaded goes to the ranks tensor by
tensor, each compares its rows.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from toolkit import ranks
from toolkit.adapters.peft_folder import fill_without_memory, load_with_peft
from toolkit.checkpoint import TrainState, local_copy, wait
from toolkit.checkpoint.resuming import quarantine
from toolkit.errors import CheckpointError
from toolkit.export.consolidation import consolidate
from toolkit.formats import local_tensor, part_of, reshard, same_values
from toolkit.models import model_on_meta
from toolkit.models.peft_model import has_adapters, trained_tensors

_ADVICE = "do not go on from it, or publish it: a reader would get another model"


def prove_adapter(state: TrainState, checkpoint: str) -> str:
    """Prove the adapter of a checkpoint that was just saved of `state`; return the line for the
    log, empty for a model without adapters. One that does not come back is set aside. Collective.

    Waits for a save in the background. Rank 0 reads and writes the adapter once and holds it twice.
    CheckpointError: on every rank: the adapter does not come back (names rank and tensor).
    ExportError: on every rank: it cannot be exported or loaded by PEFT.
    """
    if not has_adapters(state.model):
        return ""
    wait()
    if checkpoint in state.saves.failed:  # by the disk, as was said: there is nothing to prove
        return ""
    try:
        return prove(state.model, checkpoint)
    except CheckpointError as error:
        quarantine(checkpoint, str(error))
        raise


def prove(model: nn.Module, checkpoint: str | Path) -> str:
    """Compare the adapter in `model` with what PEFT loads; see `prove_adapter`."""
    begun = time.perf_counter()
    wait()
    reshard(model)
    trained = trained_tensors(model)
    loaded = ranks.on_all(lambda: _load(checkpoint, trained) if ranks.rank() == 0 else {})
    different = [name for name in trained if not _same(name, trained[name], loaded)]
    failed = any(ranks.any_over_ranks([bool(different)]))
    for rank, names in enumerate(ranks.gather(different) if failed else ()):
        if names:
            raise CheckpointError(
                f"{checkpoint} does not give back what was trained: on rank {rank} "
                f"{len(names)} of {len(trained)} tensors differ, such as {names[0]}; {_ADVICE}"
            )
    how = "through PeftModel.from_pretrained, equal to the bit"
    seconds = time.perf_counter() - begun
    return f"adapter proven: {len(trained)} tensors reloaded {how} ({seconds:.1f} s)"


def _load(checkpoint: str | Path, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter as PEFT loads it: name -> whole tensor, in the dtypes of `trained`."""
    with local_copy(checkpoint) as folder, tempfile.TemporaryDirectory() as scratch:
        exported = Path(consolidate(folder, Path(scratch, "adapter")))
        base = fill_without_memory(model_on_meta(Path(folder, "hf")))
        model, problems = load_with_peft(base, exported, empty=True)
    if problems:
        raise CheckpointError(f"{checkpoint}: {problems[0]}")
    found = model.state_dict()
    missing = [n for n in trained if n not in found or found[n].is_meta]
    if missing:
        raise CheckpointError(
            f"PEFT does not load {missing[0]} (and {len(missing) - 1} more) of the export of "
            f"{checkpoint}; {_ADVICE}"
        )
    return {n: found[n].detach().to(t.dtype) for n, t in trained.items()}


def _same(name: str, tensor: torch.Tensor, loaded: dict[str, torch.Tensor]) -> bool:
    """Return whether this rank's part of a tensor is what rank 0 loaded. Collective."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    if ranks.rank() == 0:
        whole = loaded[name].contiguous()
    if (group := ranks.object_group()) is not None:
        dist.broadcast(whole, src=0, group=group)
    expected, part = part_of(whole, tensor), local_tensor(tensor.detach()).cpu()
    return part.shape == expected.shape and bool(same_values(expected, part).all())
