"""Proof, after a save, that the adapter comes back: through its file, through PEFT, into the model.

    checkpoint on the disk -> PEFT folder -> PeftModel.from_pretrained -> this rank's rows
                                                                              |
    three short forwards:   trained        base alone        reloaded  <------+

Owns the order and the verdict. Exporting and PEFT's names are those of the offline commands, so
that what is proven is what a user will do. Restores everything; knows nothing of the loop.

[Note: from_pretrained at any size] A reader calls `PeftModel.from_pretrained(base, folder)`, and
the base may not fit into one process. PEFT needs the base's shapes to find its layers, and none of
its bytes: rank 0 makes that very call on a base without bytes (`peft_folder.without_storage`), at
the cost of the adapter alone. What it loaded goes to the ranks tensor by tensor, each keeps its
rows, compares them with its own to the bit, and the sharded model, which has the base, computes
with them.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.adapters.peft_folder import read_as_peft, without_storage
from toolkit.adapters.switch import amplified, has_moved, without_adapters
from toolkit.checkpoint import saving as checkpoints
from toolkit.checkpoint.adapter import find_adapter
from toolkit.checkpoint.fetch import at_hand
from toolkit.config.settings import ModelConfig
from toolkit.errors import CheckpointError
from toolkit.export.consolidation import consolidate
from toolkit.formats.layout import local_slices, reshard
from toolkit.formats.tensor_stream import same_values
from toolkit.models.causal_lm import build_on_meta, vocabulary_size
from toolkit.models.peft_model import base_of, has_adapters, trained_tensors

_LENGTH = 16  # tokens of a sample that is made up
_ADVICE = "do not go on from it, or publish it: a reader would get another model"


@dataclass(frozen=True)
class AdapterProof:
    """What was proven of one save."""

    tensors: int
    """Trained tensors that came back, to the bit, on every rank."""
    effect: float
    """Largest difference between the logits with and without the adapter, on any rank."""
    moved: bool
    """Whether the adapter is no longer at its start, where it adds nothing."""
    seconds: float

    def line(self) -> str:
        """Return a line for the log."""
        effect = f"logits differ from the base's by up to {self.effect:.3g}"
        if not self.moved:
            effect = "it is still at its start, where it adds nothing"
        elif self.effect == 0.0:
            effect = "its effect on the logits is still below rounding"
        return (
            f"adapter proven: {self.tensors} tensors reloaded through PeftModel.from_pretrained, "
            f"logits equal; {effect} ({self.seconds:.1f} s)"
        )


def prove(
    model: nn.Module,
    checkpoint: str | Path,
    batch: dict[str, torch.Tensor] | None = None,
) -> AdapterProof:
    """Prove that the adapter of a checkpoint that was just saved is the one in `model`. Collective.

    The checkpoint's adapter is exported into a temporary folder and loaded by PEFT (see the note
    above). It must equal the live one to the bit on every rank, give the same logits, and other
    logits than the base. Waits for a save that is in flight. Everything is as before afterwards:
    values, modes, gradients, random state.

    Costs three forwards of `batch`, a fourth where the effect is below rounding; rank 0 reads and
    writes the adapter once and holds it twice, every rank holds two more copies of its rows: what
    was loaded, and what is put back.

    Args:
        model: adapted, sharded or not, with the values that were saved.
        checkpoint: what `checkpoint.save` returned: a path or a URL.
        batch: inputs of one forward on the device, any on each rank; None: 2 x 16 fixed tokens.

    Raises:
        CheckpointError: on every rank: the adapter does not come back (names rank and tensor), the
            logits differ, or the adapter has no effect although it was trained.
        ExportError: on every rank: it cannot be exported or loaded by PEFT.
    """
    begun = time.perf_counter()
    if not has_adapters(model):
        raise CheckpointError("there is no adapter to prove: the model has none")
    checkpoints.wait()
    reshard(model)
    live = trained_tensors(model)
    loaded = ranks.on_all(lambda: _load(checkpoint, live) if ranks.rank() == 0 else {})
    parts = _spread(loaded, live)
    del loaded
    different = ranks.gather([n for n, part in parts.items() if not _same(part, _rows(live[n]))])
    for rank, names in enumerate(different):
        if names:
            raise CheckpointError(
                f"{checkpoint} does not give back what was trained: on rank {rank} "
                f"{len(names)} of {len(live)} tensors are others, such as {names[0]}; {_ADVICE}"
            )
    moved = any(ranks.gather(has_moved(model)))
    inputs = _inputs(model, batch)
    with _computing(model):
        effect = _compute(model, inputs, live, parts, moved, checkpoint)
    return AdapterProof(len(live), effect, moved, round(time.perf_counter() - begun, 3))


def _load(checkpoint: str | Path, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter as PEFT loads it: name -> whole tensor, as `live` names and types them."""
    with (
        at_hand(checkpoint) as folder,
        tempfile.TemporaryDirectory(prefix="toolkit-") as scratch,
    ):
        source = find_adapter(folder)
        if source is None:
            raise CheckpointError(f"{checkpoint} is not a checkpoint of adapters")
        exported = Path(consolidate(source.checkpoint or folder, Path(scratch, "adapter")))
        base = build_on_meta(ModelConfig(name_or_path=str(source.hf), init="random"))
        model, said = read_as_peft(without_storage(base), exported, empty=True)
    if said:
        raise CheckpointError(f"{checkpoint}: {said[0]}")
    found = model.state_dict()
    lacking = [n for n in live if n not in found or found[n].is_meta]
    if lacking:
        raise CheckpointError(
            f"PEFT does not load {lacking[0]} (and {len(lacking) - 1} more) from the export of "
            f"{checkpoint}; {_ADVICE}"
        )
    return {n: found[n].detach().to(t.dtype) for n, t in live.items()}


def _spread(
    loaded: dict[str, torch.Tensor], live: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's part of each tensor that rank 0 loaded. Collective, one at a time."""
    group, parts = ranks.object_group(), {}
    for name, tensor in live.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        whole = loaded[name].contiguous() if loaded else empty
        if group is not None:
            dist.broadcast(whole, src=0, group=group)
        cut = local_slices(tensor) if isinstance(tensor, DTensor) else ()
        parts[name] = whole[cut].to(_rows(tensor).device, copy=True)
    return parts


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool(same_values(left, right).all())


def _inputs(model: nn.Module, batch: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    if batch is not None:
        return {name: value for name, value in batch.items() if name != "labels"}
    first = next(model.parameters())
    device = first.device
    if isinstance(first, DTensor):  # under offload parameters are not where the model computes
        device = torch.device(first.device_mesh.device_type)
    base = base_of(model)
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    length = min(_LENGTH, limit) if isinstance(limit, int) and limit > 0 else _LENGTH
    chooser = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary_size(base), (2, length), generator=chooser)
    return {"input_ids": tokens.to(device)}


def _compute(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    live: dict[str, torch.Tensor],
    parts: dict[str, torch.Tensor],
    moved: bool,
    checkpoint: str | Path,
) -> float:
    """Compare the logits trained, reloaded and of the base; return the adapter's effect."""
    trained = _logits(model, inputs)
    with without_adapters(model):
        base = _logits(model, inputs)
    with _holding(live, parts):
        reloaded = _logits(model, inputs)
    gap = max(ranks.gather(_gap(trained, reloaded)))
    if gap != 0.0:
        # Some kernels of some devices add in any order: then the same weights differ, too.
        noise = max(ranks.gather(_gap(trained, _logits(model, inputs))))
        if not gap <= 2 * noise:
            raise CheckpointError(
                f"the adapter of {checkpoint} gives other logits when it is loaded again, by up to "
                f"{gap:.3g}; {_ADVICE}"
            )
    effect = max(ranks.gather(_gap(trained, base)))
    if effect == 0.0 and moved:
        with amplified(model):
            stronger = _logits(model, inputs)
        if max(ranks.gather(_gap(stronger, base))) == 0.0:
            raise CheckpointError(
                f"the adapter of {checkpoint} was trained and has no effect: the logits are those "
                "of the base. It takes no part in the forward; look at lora.target_modules"
            )
    return effect


def _logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return this rank's logits, and leave the model sharded: the next values must be seen."""
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    reshard(model)
    return logits


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, infinity where only one of two is finite."""
    if bool(same_values(left, right).all()):
        return 0.0
    gap = (left.float() - right.float()).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(gap.max())


@contextlib.contextmanager
def _holding(live: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> Iterator[None]:
    """Put `parts` into the shards of `live`; afterwards what was there."""
    before = {name: _rows(tensor).clone() for name, tensor in live.items()}
    try:
        for name, tensor in live.items():
            _rows(tensor).copy_(parts[name])
        yield
    finally:
        for name, tensor in live.items():
            _rows(tensor).copy_(before[name])


@contextlib.contextmanager
def _computing(model: nn.Module) -> Iterator[None]:
    """Let the model compute as it does for a reader; put modes and random state back."""
    modes = {module: module.training for module in model.modules()}
    devices = [torch.accelerator.current_device_index()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with (
            torch.random.fork_rng(devices),
            torch.compiler.set_stance("force_eager"),  # another shape would be compiled anew
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)
