"""Choose the kernel that transformers runs for fused experts (`model.experts_implementation`)."""

from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import ModelError, one_line
from toolkit.models.peft_model import base_of

_MARK = "_is_expert_parallel"  # every instance of a class with transformers' dispatch has it


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for each group of fused experts whose kernel transformers dispatches.

    The weights of such a module have three dimensions, and the first is the expert.
    """
    return {n: m for n, m in model.named_modules() if hasattr(m, _MARK) and hasattr(m, "config")}


def set_experts_kernel(model: PreTrainedModel, kernel: str) -> None:
    """Let the fused experts of `model` be computed by `kernel`; `auto` changes nothing.

    Args:
        model: a model without adapters.
        kernel: value of `model.experts_implementation`.

    Raises:
        ModelError: the model has no experts with more than one kernel, or cannot use this one.
    """
    if kernel == "auto":
        return
    setting = f"model.experts_implementation {kernel}"
    if not expert_modules(model):
        raise ModelError(
            f"{setting} has no effect: {type(model).__name__} has no fused experts whose kernel "
            "transformers can choose. Remove the setting"
        )
    fault = ""
    try:
        model.set_experts_implementation(kernel)
    except (ValueError, ImportError) as error:
        fault = one_line(error, 300)
    kernels = _kernels_in_use(model)
    if fault or kernels != {kernel}:
        fault = fault or f"its experts still use {', '.join(sorted(kernels))}"
        raise ModelError(
            f"{setting} cannot be used with {type(model).__name__}: {fault}. Remove the setting, "
            "and transformers chooses a kernel"
        )


def describe_experts(model: nn.Module, requested: str, parts: int = 1) -> str:
    """Format the log line about the kernel of fused experts; "" if the model has none.

    Args:
        model: sharded or not, with or without adapters.
        requested: value of `model.experts_implementation`.
        parts: value of `sharding.expert_parallel`.
    """
    modules = expert_modules(base_of(model))
    if not modules:
        return ""
    kernels = ", ".join(sorted(_kernels_in_use(model)))
    chooser = "as transformers chooses" if requested == "auto" else "model.experts_implementation"
    line = f"experts    {len(modules)} layers of fused experts, kernel {kernels} ({chooser})"
    if parts > 1:
        line += (
            f"; divided among {parts} ranks, to which tokens are sent (sharding.expert_parallel)"
        )
    return line


def _kernels_in_use(model: nn.Module) -> set[str]:
    """Return the names of the kernels that the fused experts of `model` use."""
    modules = expert_modules(base_of(model)).values()
    return {str(getattr(module.config, "_experts_implementation", None)) for module in modules}
