"""The first values of adapters: the same for any number of ranks, each rank its own rows.

The distributions are PEFT's, whose own `reset_lora_parameters` draws a shard's rows on every rank
alike, and computes DoRA's magnitudes from weights that are not there yet.
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
from toolkit.formats import laid_out_as, local_tensor, part_of
from toolkit.models.peft_model import ADAPTER, base_of, copies, layer_parameters

_Value = Callable[[torch.Tensor], torch.Tensor]  # from the parameter to this rank's part of it


def first_values(
    model: nn.Module, seed: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, this rank's part) of everything that is trained, in the order of the modules;
    parts may share the base's memory.

    A is drawn as `nn.Linear` draws (Kaiming, a = sqrt 5), B is zero, an embedding's the other way
    round; values depend on `seed` and the parameter's name alone. DoRA's magnitudes are the row
    norms of the base weight, modules trained in full begin as the base's, which must be loaded.
    Collective where a norm runs over several ranks, which exchange tensors on `device`. Draws a
    whole adapter matrix at a time, on the CPU. LoadingError for a first value of another shape.
    """
    rules = _rules(model, seed, device)
    for name, parameter in list(model.named_parameters()):  # the caller replaces them on the way
        if not parameter.requires_grad:
            continue
        part, shape = rules[id(parameter)](parameter), local_tensor(parameter).shape
        if part.shape != shape:
            what = f"{list(shape)} on this rank, its first value {list(part.shape)}"
            raise LoadingError(f"{name} holds {what}; leave its module out of lora.target_modules")
        yield name, part


def _rules(model: nn.Module, seed: int, device: torch.device) -> dict[int, _Value]:
    """Return how each trained parameter begins, by its id."""
    kaiming = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
    rules: dict[int, _Value] = {}
    for original, copy in copies(model):
        rules[id(copy)] = partial(_of_original, original)
    prefix = next(n for n, m in model.named_modules() if m is base_of(model))
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        own = name.removeprefix(prefix + ".")
        values: dict[str, _Value] = {
            "lora_A": partial(_drawn, kaiming, f"{seed}/{own}.lora_A"),
            "lora_B": _zeros,
            "lora_embedding_A": _zeros,
            "lora_embedding_B": partial(_drawn, nn.init.normal_, f"{seed}/{own}.lora_embedding_B"),
            "lora_magnitude_vector": partial(_norms, module, device),
        }
        rules |= {id(p): values[part] for part, p in layer_parameters(module).items()}
    return rules


def _drawn(draw: Callable[..., torch.Tensor], key: str, parameter: torch.Tensor) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    whole = draw(torch.empty(parameter.shape, dtype=torch.float32), generator=generator)
    return part_of(whole, parameter)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(local_tensor(parameter), device="cpu")


def _of_original(original: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return local_tensor(original.detach())  # a copy is sharded as its original is


def _norms(layer: Any, device: torch.device, parameter: torch.Tensor) -> torch.Tensor:
    """Return DoRA's first magnitudes: the norms of the base weight's rows, in fp32."""
    weight: Any = layer.get_base_layer().weight.detach()
    dora = layer.lora_magnitude_vector[ADAPTER]
    own = local_tensor(weight)
    by_row = type(layer.get_base_layer()) is nn.Linear and not dora.fan_in_fan_out
    alike = isinstance(weight, DTensor) == isinstance(parameter, DTensor)
    if by_row and alike and own.shape[:1] == local_tensor(parameter).shape:
        return torch.linalg.norm(own.float(), dim=1)
    if isinstance(weight, DTensor):
        weight = laid_out_as(weight, own.to(device)).full_tensor()
    # With B at zero the adapter adds nothing.
    norms = dora.get_weight_norm(weight.float(), weight.new_zeros((), dtype=torch.float32), 1.0)
    return part_of(norms, parameter)
