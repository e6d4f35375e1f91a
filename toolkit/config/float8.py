"""Settings with which `model.float8` would not work, would not gain, or was not tried."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.config.settings import RunConfig


def find_float8_conflict(cfg: "RunConfig") -> str:
    """Return why a run with `model.float8` is refused, and what to do; empty if it is not."""
    lora = cfg.adapters
    sharding = cfg.sharding
    remove = "Remove one of them"
    of_adapters = {
        "the frozen base of adapters is stored with one scale per row. Set model.float8: rowwise, "
        "or remove it": cfg.model.float8 != "rowwise",
        f"lora.load_in_4bit stores the base in 4 bits. {remove}": lora and lora.load_in_4bit,
        "lora.use_dora: DoRA needs the rows of the weights, which are packed with their scales. "
        f"{remove}": lora and lora.use_dora,
        f"sharding.cpu_offload was not tried with a base in float8. {remove}": sharding.cpu_offload,
    }
    of_trained_layers = {
        f"sharding.cpu_offload moves more than float8 saves. {remove}": sharding.cpu_offload,
    }
    of_both = {
        f"sharding.param_dtype must be bfloat16. {remove}": sharding.param_dtype != "bfloat16",
        "sharding.torch_compile: model was not tried with it; set layer. "
        f"{remove}": sharding.torch_compile == "model",
        f"sharding.context_parallel was not tried with it. {remove}": sharding.context_parallel > 1,
    }
    reasons = (of_adapters if lora else of_trained_layers) | of_both
    return next((reason for reason, holds in reasons.items() if holds), "")
