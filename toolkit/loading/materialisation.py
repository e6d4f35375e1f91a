"""Give memory and values to a model on meta: random weights, empty shards, buffers, adapters.

Random values come from transformers' `_init_weights`, one module at a time in host memory.

[Note: drawn by module] A parameter's first value may come from the `_init_weights` of its
module or of any module around it (Mamba's mixer writes the bias of its `dt_proj`). So for each
module with parameters only those get memory, all others stay on meta, and `_init_weights` runs for
the module and for everything around it, from inside to outside, as transformers walks. The seed is
derived from the run's seed and the module's name, so the values depend on neither the number of
ranks nor the other modules. A parameter that no `_init_weights` writes has the value of its
constructor (openai-gpt's Conv1D): the model is built once more with memory for those.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.adapters.first_values import adapter_first_values
from toolkit.errors import LoadingError, one_line
from toolkit.formats import (
    Tensors,
    assets_of,
    like_dtensor,
    local_tensor,
    slice_like,
    transformers_private,
    wrap_like,
)
from toolkit.models.classes import build_from_config, original_class
from toolkit.models.layers import tied_families
from toolkit.models.modes import forked_rng
from toolkit.models.peft_model import copied_modules, has_adapters, unwrapped_base


def init_weights(
    model: nn.Module,
    device: torch.device | str,
    seed: int,
    home: torch.device | None = None,
) -> None:
    """Allocate `model` on `device` with the random weights of its architecture. Collective.

    The values depend only on `seed` and the names of modules, not on the number of ranks. Every
    rank draws the values of every module on the host, one module at a time, and keeps its rows.
    (DTensor's own random operators repeat values on a CPU mesh.) Adapters get the same first values
    as in `load_pretrained`.

    Args:
        model: on meta, sharded or not.
        device: device of the run.
        seed: seed of the values.
        home: device of the parameters (`Sharded.home`); None: `device`.

    Raises:
        LoadingError: the values of a module cannot be drawn without those of others.
    """
    target = torch.device(device)
    with unwrapped_base(model) as base:
        _fill_model(base, target, home, seed)
    assets_of(model).drawn_from = seed
    init_adapters(model, target, home, seed)


def materialise(
    model: PreTrainedModel, device: torch.device | str, home: torch.device | None = None
) -> None:
    """Allocate the parameters of `model` uninitialised, and compute its buffers. Collective.

    Call it before a checkpoint is restored into the model.

    Raises:
        LoadingError: the model has adapters, whose checkpoints do not hold the base.
    """
    if has_adapters(model):
        raise LoadingError(
            "a checkpoint of adapters does not hold the base: load it with load_pretrained or "
            "init_weights, then resume"
        )
    _fill_model(model, torch.device(device), home, None)


@ranks.collective
def _fill_model(
    model: PreTrainedModel, device: torch.device, home: torch.device | None, seed: int | None
) -> None:
    """Compute all buffers and allocate all parameters. Collective.

    If `seed` is None, the parameters are uninitialised; else their initial values are drawn.
    """
    fill_tensors(model, home or device, tied_families(model), dict(model.named_buffers()), seed)
    model.tie_weights()
    finish_placement(model, device)


def fill_tensors(
    model: PreTrainedModel,
    home: torch.device,
    parameters: Iterable[str],
    buffers: Iterable[str],
    seed: int | None,
) -> None:
    """Compute some buffers of `model`, and allocate some of its parameters on `home`, in place.

    Args:
        model: sharded or not.
        home: device of the parameters.
        parameters: names of parameters to allocate.
        buffers: names of buffers to compute, which stay on the CPU.
        seed: seed of the parameters' values; None leaves them uninitialised.
    """
    built = build_with_buffers(model)
    for name in buffers:
        value = built.get_buffer(name).detach()
        set_tensor(model, name, value.to(model.get_buffer(name).dtype, copy=True))
    families = tied_families(model)
    values: Iterable[tuple[str, torch.Tensor | None]] = dict.fromkeys(parameters).items()
    for name, whole in values if seed is None else draw_values(model, built, parameters, seed):
        reference = model.get_parameter(name)
        if whole is None:
            part = torch.empty_like(local_tensor(reference), device=home)
        else:
            part = slice_like(whole, reference).to(home, reference.dtype, copy=True)
        place_parameter(model, families[name], part, reference)


def init_adapters(
    model: nn.Module, device: torch.device, home: torch.device | None, seed: int
) -> None:
    """Set the first values of the adapters of `model`, and move all tensors to their devices.

    Trained copies (`modules_to_save`) start as their originals. Does nothing without adapters.
    Collective.

    Args:
        model: the model; its base is loaded.
        device: device of the run.
        home: device of the parameters; None: `device`.
        seed: seed of the values.
    """
    if not has_adapters(model):
        return
    families = tied_families(model)
    # Not under `on_all`: the values may need weights of all ranks, and all ranks fail alike.
    for name, part in adapter_first_values(model, seed, device):
        place_parameter(
            model, families[name], part.to(home or device, copy=True), model.get_parameter(name)
        )
    for original, copy in copied_modules(model).values():
        for leaf, value in original.named_buffers():
            set_tensor(copy, leaf, value.clone())
    ranks.on_all(lambda: finish_placement(model, device))


def finish_placement(model: nn.Module, device: torch.device) -> None:
    """Check that all tensors have values, and move all except sharded parameters to `device`.

    Sharded parameters stay on their device, which may be the CPU (offloading).

    Raises:
        LoadingError: a tensor is still on meta, or two tied parameters are no longer the same.
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
            set_tensor(model, name, buffer.to(device))
    for names in tied_families(model).values():
        parameter = by_name[names[0]]
        if not isinstance(parameter, DTensor) and parameter.device != device:
            place_parameter(model, names, parameter.detach().to(device), parameter)


def place_parameter(
    model: nn.Module, names: list[str], part: torch.Tensor, reference: torch.Tensor
) -> None:
    """Store this rank's part of a parameter in `model`, under all its tied names.

    Args:
        model: the model.
        names: all names of the parameter.
        part: this rank's part; it is cast to the dtype of `reference`.
        reference: the parameter or buffer to replace, which gives sharding, dtype and
            `requires_grad`.
    """
    value: torch.Tensor = part.to(reference.dtype)
    if isinstance(reference, DTensor):
        value = like_dtensor(reference, wrap_like(reference.to_local(), value))
    if isinstance(reference, nn.Parameter):
        value = nn.Parameter(value, requires_grad=reference.requires_grad)
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    for name in names:
        set_tensor(model, name, value)


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace the parameter or buffer `name` of `model` by `value`."""
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


_DRAWN = "_is_hf_initialized"  # transformers does not initialise parameters with this mark


def build_with_buffers(
    model: PreTrainedModel, seed: int = 0, in_memory: Iterable[tuple[type, str]] = ()
) -> PreTrainedModel:
    """Build the architecture of `model` again in fp32, with values only in its buffers.

    The result is unsharded, with buffers on the CPU and parameters on meta. `from_pretrained` also
    computes buffers in fp32 and rounds them once.

    Args:
        model: sharded or not.
        seed: seed of values that constructors draw.
        in_memory: (module class, parameter name) of parameters that also get values.

    Raises:
        LoadingError: the architecture cannot be built again.
    """
    # Parameters on meta are marked as drawn, so that their constructors draw nothing.
    guard = transformers_private("initialization", "guard_torch_init_functions")
    with forked_rng(), _construct_parameters_on_meta(set(in_memory)), guard():
        torch.default_generator.manual_seed(seed)
        try:
            built = build_from_config(original_class(model), model.config, torch.float32)
        except Exception as error:  # an architecture may do anything on its way
            name = original_class(model).__name__
            raise LoadingError(f"{name} cannot be built again ({one_line(error)})") from error
    for parameter in built.parameters():
        vars(parameter).pop(_DRAWN, None)
    return built


def draw_values(
    model: PreTrainedModel, built: PreTrainedModel, names: Iterable[str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw the initial values of parameters; yield (name, full fp32 tensor on the CPU).

    Holds the parameters of one module in memory at a time.

    Args:
        model: sharded or not.
        built: result of `build_with_buffers` for `model`.
        names: parameters to draw.
        seed: seed of the run.

    Raises:
        LoadingError: the architecture does not set a parameter, or needs other modules for that.
    """
    modules: dict[str, dict[str, str]] = {}  # module -> leaf -> requested name
    for name in names:
        source = name
        # A tied parameter has the first value of its source.
        while source in built.all_tied_weights_keys:
            source = built.all_tied_weights_keys[source]
        path, _, leaf = source.rpartition(".")
        modules.setdefault(path, {})[leaf] = name
    unwritten = []
    for path, leaves in modules.items():
        for leaf, value in _draw_module_parameters(built, path, leaves, seed).items():
            # Integers cannot hold NaN. They are tables that the constructor computes.
            if not value.is_floating_point() or value.sum().isnan():
                unwritten.append((path, leaf))
            else:
                yield leaves[leaf], value
    if unwritten:
        constructed_names = [(type(built.get_submodule(path)), leaf) for path, leaf in unwritten]
        constructed = build_with_buffers(model, seed, constructed_names)
        for path, leaf in unwritten:
            value = constructed.get_submodule(path).get_parameter(leaf).detach()
            name = modules[path][leaf]
            if value.is_meta or value.sum().isnan():
                raise _no_value_error(built, name, "no code of the architecture writes all of it")
            yield name, value


def _draw_module_parameters(
    built: PreTrainedModel, path: str, leaves: Iterable[str], seed: int
) -> Tensors:
    """Draw initial values of some parameters of one module with transformers' `_init_weights`.

    Args:
        built: result of `build_with_buffers`; it is unchanged afterwards.
        path: name of the module.
        leaves: names of the parameters within the module.
        seed: seed of the run.

    Returns:
        Name within the module -> value. Elements that no code sets are NaN, or 0 for integers.

    Raises:
        LoadingError: `_init_weights` fails.
    """
    from transformers.initialization import guard_torch_init_functions

    around = [(built, built.get_submodule(""))]
    for part in path.split(".") if path else ():
        owner = around[-1][0]
        module = around[-1][1].get_submodule(part)
        around.append((module if isinstance(module, PreTrainedModel) else owner, module))
    parameters: dict[str, Any] = around[-1][1]._parameters
    before = dict(parameters)
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    try:
        with torch.no_grad(), forked_rng(), guard_torch_init_functions():
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            parameters.update({leaf: _nan_parameter(before[leaf]) for leaf in leaves})
            for owner, module in reversed(around):
                owner._init_weights(module)
        return {leaf: parameters[leaf].detach() for leaf in leaves}
    except Exception as error:  # an architecture may do anything on its way
        raise _no_value_error(built, path, one_line(error)) from error
    finally:
        parameters.update(before)


def _nan_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Create a parameter like `parameter` on the CPU, filled with NaN, or 0 for integers.

    Its Python attributes are copied.
    """
    fill = float("nan") if parameter.is_floating_point() else 0
    unwritten_parameter = nn.Parameter(
        torch.full_like(parameter, fill, device="cpu"), parameter.requires_grad
    )
    # The marks tell `_init_weights` which parameters to skip.
    vars(unwritten_parameter).update(vars(parameter))
    return unwritten_parameter


def _no_value_error(model: nn.Module, name: str, why: str) -> LoadingError:
    """Create the error for a parameter or module whose initial values cannot be drawn."""
    return LoadingError(
        f"the first values of {name} of {type(model).__name__} cannot be drawn ({why}); save a "
        "random start with transformers and load that"
    )


@contextlib.contextmanager
def _construct_parameters_on_meta(exceptions: set[tuple[type, str]]) -> Iterator[None]:
    """Within the context, replace the parameters of new modules by empty ones on meta.

    Args:
        exceptions: (module class, parameter name) of parameters that keep their values.
    """
    register = nn.Module.register_parameter
    in_memory = set[nn.Parameter]()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and (type(module), name) in exceptions:
            in_memory.add(parameter)
        if parameter is not None and not parameter.is_meta and parameter not in in_memory:
            empty = torch.empty_like(parameter, device="meta")
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            # Drawing on meta would take 0.5 ms and give no value.
            setattr(parameter, _DRAWN, True)
        register(module, name, parameter)

    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Fill fresh memory with NaN.
    if exceptions:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(nn.Module, "register_parameter", on_meta):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
