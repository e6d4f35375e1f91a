"""Random first values by transformers' `_init_weights`, and buffers as constructors compute them.

One module at a time in host memory.

[Note: drawn by module] A parameter's first value may come from the `_init_weights` of its own
module or of any module around it (Mamba's mixer writes the bias of its `dt_proj`). So for each
module with parameters of its own those alone get memory, all others stay on meta, and
`_init_weights` runs for the module and for everything around it, from inside to outside, as
transformers walks. The seed is made of the run's and the module's name: the values depend on
neither the number of ranks nor the other modules. What no `_init_weights` writes is as the
constructors leave it (openai-gpt's Conv1D): the model is built once more with memory for those.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import LoadingError, one_line
from toolkit.formats import Tensors, transformers_private
from toolkit.models.classes import build, plain_class
from toolkit.models.modes import forked_rng

_DRAWN = "_is_hf_initialized"  # by which transformers leaves a parameter alone


def with_buffers(
    model: PreTrainedModel, seed: int = 0, kept: Iterable[tuple[type, str]] = ()
) -> PreTrainedModel:
    """Return `model` built anew, unsharded, in fp32: buffers in host memory, parameters on meta.

    Except those in `kept`, as (class of a module, name in it), which get values. `from_pretrained`
    computes buffers in fp32, too, and rounds once.
    """
    # Parameters on meta count as drawn: their constructors, too, then draw nothing.
    guard = transformers_private("initialization", "guard_torch_init_functions")
    with forked_rng(), _parameters_on_meta(set(kept)), guard():
        torch.default_generator.manual_seed(seed)
        try:
            built = build(plain_class(model), model.config, torch.float32)
        except Exception as error:  # an architecture may do anything on its way
            name = plain_class(model).__name__
            raise LoadingError(f"{name} cannot be built anew ({one_line(error)})") from error
    for parameter in built.parameters():
        vars(parameter).pop(_DRAWN, None)
    return built


def drawn(
    model: PreTrainedModel, built: PreTrainedModel, names: Iterable[str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, first value) of the parameters `names`: whole, in fp32, on the CPU.

    Needs the memory of one module's own parameters. `built`: of `model` by `with_buffers`. A
    LoadingError names a parameter that gets no value, or cannot be drawn alone.
    """
    modules: dict[str, dict[str, str]] = {}  # module -> leaf -> the name that was asked for
    for name in names:
        source = name
        while source in built.all_tied_weights_keys:  # the first value is the tie's source's
            source = built.all_tied_weights_keys[source]
        path, _, leaf = source.rpartition(".")
        modules.setdefault(path, {})[leaf] = name
    unwritten = []
    for path, leaves in modules.items():
        for leaf, value in _drawn_in(built, path, leaves, seed).items():
            # Integers, which hold no NaN, are tables of the constructor: nobody draws them.
            if not value.is_floating_point() or value.sum().isnan():
                unwritten.append((path, leaf))
            else:
                yield leaves[leaf], value
    if unwritten:
        kept = [(type(built.get_submodule(path)), leaf) for path, leaf in unwritten]
        constructed = with_buffers(model, seed, kept)
        for path, leaf in unwritten:
            value = constructed.get_submodule(path).get_parameter(leaf).detach()
            name = modules[path][leaf]
            if value.is_meta or value.sum().isnan():
                raise _not_drawn(built, name, "no code of the architecture writes all of it")
            yield name, value


def _drawn_in(built: PreTrainedModel, path: str, leaves: Iterable[str], seed: int) -> Tensors:
    """Return the first values of parameters of the module `path`; NaN where nothing was written."""
    from transformers.initialization import guard_torch_init_functions

    around = [(built, built.get_submodule(""))]
    for part in path.split(".") if path else ():
        owner, module = around[-1][0], around[-1][1].get_submodule(part)
        around.append((module if isinstance(module, PreTrainedModel) else owner, module))
    own: dict[str, Any] = around[-1][1]._parameters
    before = dict(own)
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    try:
        with torch.no_grad(), forked_rng(), guard_torch_init_functions():
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            own.update({leaf: _unwritten(before[leaf]) for leaf in leaves})
            for owner, module in reversed(around):
                owner._init_weights(module)
        return {leaf: own[leaf].detach() for leaf in leaves}
    except Exception as error:  # an architecture may do anything on its way
        raise _not_drawn(built, path, one_line(error)) from error
    finally:
        own.update(before)


def _unwritten(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in host memory that holds NaN, with the same marks."""
    fill = float("nan") if parameter.is_floating_point() else 0
    made = nn.Parameter(torch.full_like(parameter, fill, device="cpu"), parameter.requires_grad)
    vars(made).update(vars(parameter))  # by which `_init_weights` leaves some alone
    return made


def _not_drawn(model: nn.Module, name: str, why: str) -> LoadingError:
    return LoadingError(
        f"the first values of {name} of {type(model).__name__} cannot be drawn ({why}); save a "
        "random start with transformers and load that"
    )


@contextlib.contextmanager
def _parameters_on_meta(kept: set[tuple[type, str]]) -> Iterator[None]:
    """Have modules that are built keep their parameters on meta, except `kept`."""
    register, in_memory = nn.Module.register_parameter, set()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and (type(module), name) in kept:
            in_memory.add(parameter)
        if parameter is not None and not parameter.is_meta and parameter not in in_memory:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(parameter, _DRAWN, True)  # drawing on meta takes 0.5 ms and gives nothing
        register(module, name, parameter)

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if kept:  # fresh memory then holds NaN
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(nn.Module, "register_parameter", on_meta):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
