"""First values of adapters: the same for any number of ranks, each rank its own rows.

The distributions are PEFT's. PEFT's own `reset_lora_parameters` would draw the same rows on every
rank, and would compute DoRA's magnitudes from weights that are not loaded yet.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import LoadingError
from toolkit.formats import like_dtensor, local_tensor, slice_like
from toolkit.models.peft_model import ADAPTER, base_of, layer_parameters, trained_copies


def adapter_first_values(
    model: nn.Module, seed: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, first value) of every trained parameter; the value is this rank's shard.

    LoRA's A is drawn as `nn.Linear` draws its weight (Kaiming, a = sqrt 5), and B is zero. For
    embeddings A is zero, and B is drawn from a normal distribution. DoRA's magnitudes are the row
    norms of the base weight. A module trained in full starts as a copy of the base's module; the
    yielded tensor may share its memory.

    Values depend only on `seed` and the parameter's name, not on the number of ranks. One matrix at
    a time is drawn, on the CPU. Collective if a row norm needs the shards of several ranks.

    Args:
        model: a model with adapters; the weights of its base are loaded.
        seed: seed of the run.
        device: the device on which ranks exchange tensors.

    Raises:
        LoadingError: a first value has another shape than its parameter.
    """
    originals = {id(copy): original for original, copy in trained_copies(model)}
    prefix = next(n for n, m in model.named_modules() if m is base_of(model))
    adapters = {
        id(parameter): (kind, module, f"{seed}/{name.removeprefix(prefix + '.')}.{kind}")
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
        for kind, parameter in layer_parameters(module).items()
    }
    # The caller replaces parameters while it iterates.
    for name, parameter in list(model.named_parameters()):
        if not parameter.requires_grad:
            continue
        if id(parameter) in originals:  # a copy is sharded as its original is
            part = local_tensor(originals[id(parameter)].detach())
        else:
            part = _compute_shard(parameter, *adapters[id(parameter)], device)
        if part.shape != (shape := local_tensor(parameter).shape):
            raise LoadingError(
                f"{name} holds {list(shape)} on this rank, its first value {list(part.shape)}; "
                "leave its module out of lora.target_modules"
            )
        yield name, part


def _compute_shard(
    parameter: torch.Tensor, kind: str, layer: Any, key: str, device: torch.device
) -> torch.Tensor:
    """Compute this rank's shard of the first value of one adapter parameter.

    Args:
        parameter: the parameter; only its shape and sharding are used.
        kind: PEFT's name for it, such as `lora_A`, which selects the distribution.
        layer: the PEFT layer that holds it.
        key: text that seeds the random numbers.
        device: the device on which ranks exchange tensors.
    """
    draw: Callable[..., torch.Tensor]
    match kind:
        case "lora_magnitude_vector":
            return _row_norms(layer, device, parameter)
        case "lora_A":
            draw = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        case "lora_embedding_B":
            draw = nn.init.normal_
        case _:
            return torch.zeros_like(local_tensor(parameter), device="cpu")
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    whole = draw(torch.empty(parameter.shape, dtype=torch.float32), generator=generator)
    return slice_like(whole, parameter)


def _row_norms(layer: Any, device: torch.device, parameter: torch.Tensor) -> torch.Tensor:
    """Compute this rank's shard of DoRA's first magnitudes: row norms of the base weight, in fp32.

    Collective if a norm needs the shards of several ranks.
    """
    weight: Any = layer.get_base_layer().weight.detach()
    dora = layer.lora_magnitude_vector[ADAPTER]
    local_weight = local_tensor(weight)
    by_row = type(layer.get_base_layer()) is nn.Linear and not dora.fan_in_fan_out
    alike = isinstance(weight, DTensor) == isinstance(parameter, DTensor)
    if by_row and alike and local_weight.shape[:1] == local_tensor(parameter).shape:
        return torch.linalg.norm(local_weight.float(), dim=1)
    if isinstance(weight, DTensor):
        weight = like_dtensor(weight, local_weight.to(device)).full_tensor()
    # B starts at zero, so the adapter adds nothing to the weight.
    norms = dora.get_weight_norm(weight.float(), weight.new_zeros((), dtype=torch.float32), 1.0)
    return slice_like(norms, parameter)
