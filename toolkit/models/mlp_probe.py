"""Find the MLPs of decoder layers: modules that compute each token by itself.

There is no list of names. A tiny copy of the model runs, and a child of a layer is an MLP if it is
called once with one tensor, returns a tensor of that shape, has at least two matrices, and returns
the same for a row and for its parts.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.formats import assets_of
from toolkit.models.classes import causal_lm_class, model_class_name
from toolkit.models.layers import decoder_layers
from toolkit.models.modes import forked_rng
from toolkit.models.patterns import module_class_name
from toolkit.models.tiny_copy import SPECIAL, VOCABULARY, build_noisy_copy, try_tiny_copies

_LENGTH = 8
_ROUNDING = 1e-5  # share of the spread of the outputs
_mlp_kinds: dict[tuple[str, str], tuple[set[tuple[str, str]], str]] = {}


def find_mlps(
    base: PreTrainedModel, model: nn.Module, layers: Iterable[str]
) -> tuple[list[str], str]:
    """Find the modules of decoder layers that can process their tokens in any chunks.

    Mixtures of experts are no MLPs here, because their routers count the tokens of each call.
    Takes about a second, and nothing the second time. Not collective.

    Args:
        base: the model without adapters, on meta or not.
        model: the model of which modules are named, with or without adapters.
        layers: names of its decoder layers.

    Returns:
        (names of the modules, "") or ([], the reason why there are none).
    """
    config = base.config
    key = (model_class_name(base), config.to_json_string(use_diff=False))
    if key not in _mlp_kinds:
        model_class = assets_of(base).model_class or causal_lm_class(config)

        def probe(small: Any) -> set[tuple[str, str]]:
            return _probe_copy(build_noisy_copy(model_class, small, torch.device("cpu")))

        kinds, failure = try_tiny_copies(config, model_class, _LENGTH, probe)
        _mlp_kinds[key] = (kinds or set(), failure)
    kinds, failure = _mlp_kinds[key]
    names = [
        f"{layer}.{child_name}"
        for layer in layers
        for child_name, child in model.get_submodule(layer).named_children()
        if (child_name, module_class_name(child)) in kinds
    ]
    if names:
        return names, ""
    return [], failure or (
        f"no decoder layer of {model_class_name(base)} has a module that computes each token by "
        "itself (mixtures of experts and layers without a module for the MLP have none)"
    )


@torch.no_grad()
def _probe_copy(model: PreTrainedModel) -> set[tuple[str, str]]:
    """Return (name in its layer, class name) of each kind of MLP in a tiny copy."""
    calls: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after a forward: keep (input, output), or None if they are not one tensor each."""
        values = [*args, *kwargs.values()]
        is_plain = len(values) == 1 and all(isinstance(v, torch.Tensor) for v in (*values, output))
        calls.setdefault(module, []).append((values[0], output) if is_plain else None)

    children = {
        child: name
        for layer in decoder_layers(model).values()
        for name, child in layer.named_children()
        if _has_two_matrices(child)
    }
    with forked_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(1)
        hooks = [c.register_forward_hook(record, with_kwargs=True) for c in children]
        model(input_ids=torch.randint(SPECIAL, VOCABULARY, (1, _LENGTH)), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {
            (name, module_class_name(child))
            for child, name in children.items()
            if _is_tokenwise(child, calls.get(child, []))
        }


def _has_two_matrices(module: nn.Module) -> bool:
    """Return whether a module has at least two matrices, and neither fused experts nor a list."""
    dims = [parameter.dim() for parameter in module.parameters()]
    has_list = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    return dims.count(2) >= 2 and max(dims) == 2 and not has_list


def _is_tokenwise(
    module: Callable[[torch.Tensor], Any],
    calls: list[tuple[torch.Tensor, torch.Tensor] | None],
) -> bool:
    """Return whether a module returned for its only call what it returns for the parts.

    Args:
        module: a module in eval mode.
        calls: (input, output) of each call; None for a call with other arguments.
    """
    if len(calls) != 1 or calls[0] is None:
        return False
    row, output = calls[0]
    if row.dim() != 3 or output.shape != row.shape:
        return False
    parts = torch.cat([module(part) for part in row.split(_LENGTH // 2, dim=1)], dim=1)
    spread = float(output.std()) or 1.0
    return bool(output.isfinite().all()) and float((parts - output).abs().max()) <= (
        _ROUNDING * spread
    )
