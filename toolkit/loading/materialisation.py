"""Memory for a model on meta: random weights, empty shards for a checkpoint, buffers, adapters."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.adapters.first_values import first_values
from toolkit.errors import LoadingError
from toolkit.formats import assets_of, like_dtensor, local_tensor, part_of
from toolkit.loading.initialise import drawn, with_buffers
from toolkit.models.layers import tied_families
from toolkit.models.peft_model import copied_modules, has_adapters, unwrapped_base


def init_weights(
    model: nn.Module,
    device: torch.device | str,
    seed: int,
    home: torch.device | None = None,
) -> None:
    """Materialise `model` on `device` with random weights, as its architecture draws. Collective.

    The values depend on `seed` and the names of modules alone. Every rank draws every module, one
    at a time on the host, and keeps its rows: DTensor's own random operators repeat themselves on a
    CPU mesh. Adapters begin as in `load_pretrained`. `home`: where parameters live, if not on
    `device` (`Sharded.home`).

    Raises:
        LoadingError: a parameter cannot be drawn alone.
    """
    target = torch.device(device)
    with unwrapped_base(model) as base:
        _fill(base, target, home, seed)
    assets_of(model).drawn_from = seed
    begin_adapters(model, target, home, seed)


def materialise(
    model: PreTrainedModel, device: torch.device | str, home: torch.device | None = None
) -> None:
    """Allocate `model`'s shards on `device` without values; buffers are computed. Collective."""
    if has_adapters(model):
        raise LoadingError(
            "a checkpoint of adapters does not hold the base: load it with load_pretrained or "
            "init_weights, then resume"
        )
    _fill(model, torch.device(device), home, None)


@ranks.collective
def _fill(
    model: PreTrainedModel, device: torch.device, home: torch.device | None, seed: int | None
) -> None:
    """Compute buffers, and draw parameters from `seed`; without one their memory is as it comes."""
    fill_missing(model, home or device, tied_families(model), dict(model.named_buffers()), seed)
    model.tie_weights()
    settle(model, device)


def fill_missing(
    model: PreTrainedModel,
    home: torch.device,
    parameters: Iterable[str],
    buffers: Iterable[str],
    seed: int | None,
) -> None:
    """Compute the `buffers`, and draw the `parameters` on `home`; without a seed these get memory
    only.
    """
    built = with_buffers(model)
    for name in buffers:
        value = built.get_buffer(name).detach()
        replace(model, name, value.to(model.get_buffer(name).dtype, copy=True))
    families = tied_families(model)
    values: Iterable[tuple[str, torch.Tensor | None]] = dict.fromkeys(parameters).items()
    for name, whole in values if seed is None else drawn(model, built, parameters, seed):
        reference = model.get_parameter(name)
        if whole is None:
            part = torch.empty_like(local_tensor(reference), device=home)
        else:
            part = part_of(whole, reference).to(home, reference.dtype, copy=True)
        place(model, families[name], part, reference)


def begin_adapters(
    model: nn.Module, device: torch.device, home: torch.device | None, seed: int
) -> None:
    """Give the adapters of `model`, if it has any, their first values. Collective."""
    if not has_adapters(model):
        return
    families = tied_families(model)
    # Not `on_all`: it gathers weights on the way, and what it raises every rank sees alike.
    for name, part in first_values(model, seed, device):
        place(model, families[name], part.to(home or device, copy=True), model.get_parameter(name))
    for original, copy in copied_modules(model).values():
        for leaf, value in original.named_buffers():
            replace(copy, leaf, value.clone())
    ranks.on_all(lambda: settle(model, device))


def settle(model: nn.Module, device: torch.device) -> None:
    """Move to `device` what offload does not keep in host memory: buffers, unsharded parameters. A
    LoadingError names what is still on meta, or a tie that came apart.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    tensors = [*by_name.items(), *model.named_buffers()]
    if meta := [n for n, t in tensors if local_tensor(t).is_meta]:
        raise LoadingError(f"{len(meta)} tensor(s) are still on meta: {', '.join(meta[:5])}")
    assets = getattr(model, "hf_assets", None)
    for alias, owner in (assets.tied if assets else {}).items():
        if by_name.get(alias) is not by_name.get(owner):
            raise LoadingError(
                f"{alias} is no longer tied to {owner}: the weights hold another value for each "
                "(set tie_word_embeddings: false in config.json), or the model's own code ties "
                "them and names them in no _tied_weights_keys"
            )
    for name, buffer in list(model.named_buffers()):
        if buffer.device != device:
            replace(model, name, buffer.to(device))
    for names in tied_families(model).values():
        parameter = by_name[names[0]]
        if not isinstance(parameter, DTensor) and parameter.device != device:
            place(model, names, parameter.detach().to(device), parameter)


def place(model: nn.Module, names: list[str], part: torch.Tensor, reference: torch.Tensor) -> None:
    """Put this rank's `part` under all of `names`, laid out as `reference` is."""
    value: torch.Tensor = part.to(reference.dtype)
    if isinstance(reference, DTensor):
        value = like_dtensor(reference, value)
    if isinstance(reference, nn.Parameter):
        value = nn.Parameter(value, requires_grad=reference.requires_grad)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    for name in names:
        replace(model, name, value)


def replace(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put `value` in the place of a parameter or a buffer."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)
