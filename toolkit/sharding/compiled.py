"""Compile forwards, and decide whether layers are compiled."""

import functools
from typing import Any

import torch
from torch import nn

from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.formats import torch_private
from toolkit.models.attention import mark_document_count_dynamic
from toolkit.sharding.units import UnitPlan, is_inside


def compile_forward(module: nn.Module, **options: Any) -> None:
    """Compile `module` in place by `Module.compile`, without cuDNN's attention in compiled calls.

    Compiled code fails with that kernel, because cuDNN's softmax statistics have another layout
    than its fake kernel says (seen on an H100 with torch 2.11). Calls that run eagerly, as in
    evaluation and generation, may still use it.

    Args:
        module: usually a decoder layer.
        options: arguments of `torch.compile`; see `compile_options`.
    """
    module.compile(**options)
    # `Module.compile` stores the compiled call there, in torch 2.11 to 2.15.
    compiled: Any = module._compiled_call_impl
    dynamo = torch_private("_dynamo", "eval_frame")

    @functools.wraps(compiled)
    def without_cudnn(*args: Any, **kwargs: Any) -> Any:
        mark_document_count_dynamic(kwargs)
        before = torch.backends.cuda.cudnn_sdp_enabled()
        if not before or dynamo._stance.stance == "force_eager":
            return compiled(*args, **kwargs)
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return compiled(*args, **kwargs)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    module._compiled_call_impl = without_cudnn


def should_compile_layers(
    plan: UnitPlan, cfg: ShardingConfig, device_type: str, fixed_length: bool, own_kernels: bool
) -> tuple[bool, str]:
    """Decide whether each decoder layer is compiled as one graph.

    `torch_compile: auto` compiles only on `cuda`, with samples of one length, and without custom
    kernels, activation offloading and units inside a layer.

    Args:
        plan: the FSDP2 units of the model.
        cfg: the sharding settings.
        device_type: type of the run's devices.
        fixed_length: True if all samples have one length.
        own_kernels: True if `model.kernels` replaces parts of the model.

    Returns:
        The decision, and its reason. The reason is empty unless the setting is `auto`.

    Raises:
        ShardingError: `torch_compile: layer` is set, and an FSDP2 unit lies inside a layer. The
            compiled graph would skip the unit's hooks.
    """
    units = (name for unit in plan.units for name in unit.modules)
    inside = next((name for name in units if is_inside(name, plan.layers)), None)
    if cfg.torch_compile == "auto":
        obstacles = {
            device_type: device_type != "cuda",
            "samples of many lengths": not fixed_length,
            "model.kernels": own_kernels,
            "expert_parallel": cfg.expert_parallel > 1,
            f"the unit {inside} inside a layer": inside is not None,
            "activation_offload": cfg.activation_offload,
            "mlp_chunk_tokens": cfg.mlp_chunk_tokens > 0,
            "only the root is a unit": plan.root_only is not None,
        }
        why = next((reason for reason, holds in obstacles.items() if holds), None)
        return why is None, why or "samples of one length"
    if cfg.torch_compile not in (True, "layer"):
        return False, ""
    if inside is not None:
        raise ShardingError(
            f"torch_compile: layer compiles each layer as one graph, with the unit {inside} inside "
            "one; set sharding.torch_compile: model, or remove param_dtype_overrides"
        )
    return True, ""


def compile_options(cfg: ShardingConfig) -> dict[str, Any]:
    """Build the arguments of `torch.compile`, `backend` and `mode`, from the settings.

    Raises:
        ShardingError: torch has no backend of that name.
    """
    backends = torch.compiler.list_backends(exclude_tags=())
    if cfg.torch_compile_backend not in backends:
        raise ShardingError(
            f"sharding.torch_compile_backend {cfg.torch_compile_backend!r} is none of torch "
            f"{torch.__version__}: {', '.join(backends)}"
        )
    return {"backend": cfg.torch_compile_backend, "mode": cfg.torch_compile_mode}
