"""Refuse settings that `sharding.expert_parallel` does not work with, or was not tried with."""

from typing import Any

from toolkit.errors import ConfigError


def check_expert_parallel(cfg: Any) -> None:
    """Raise ConfigError if another setting of a run contradicts `sharding.expert_parallel`.

    Model and number of processes are checked elsewhere (`models.check_expert_parallel` and
    `mesh.mesh_shape`).

    Args:
        cfg: a RunConfig.
    """
    sharding, adapters = cfg.sharding, cfg.adapters
    if sharding.expert_parallel == 1:
        return
    reshard = (sharding.reshard_after_forward, *sharding.reshard_after_forward_overrides.values())
    reasons = {
        "sharding.context_parallel was not tried with it": sharding.context_parallel > 1,
        "sharding.cpu_offload was not tried with it": sharding.cpu_offload,
        "sharding.frozen: replicated would copy frozen experts to every rank": (
            sharding.frozen == "replicated"
        ),
        "sharding.torch_compile would compile sizes that depend on the tokens of each expert": (
            sharding.torch_compile not in (False, "none", "auto")
        ),
        "sharding.reshard_after_forward must be true, false or auto, because experts are gathered "
        "by fewer ranks than other parameters": any(type(value) is int for value in reshard),
        "model.float8 was not tried with it": cfg.model.float8 != "none",
        "lora.load_in_4bit was not tried with it": adapters and adapters.load_in_4bit,
        "lora.target_parameters adds adapters to experts, which are not divided": (
            adapters and adapters.target_parameters
        ),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"sharding.expert_parallel {sharding.expert_parallel}: {why[0]}. Remove one of them"
        )
