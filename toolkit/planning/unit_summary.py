"""Report how a run would be sharded: `toolkit inspect --plan`."""

from dataclasses import asdict, replace
from typing import Any

from toolkit.config.settings import RunConfig
from toolkit.mesh import DP_REPLICATE, DP_SHARD
from toolkit.models.classes import model_class_name
from toolkit.models.peft_model import base_of
from toolkit.planning.fake_ranks import planned_ranks, sharded
from toolkit.sharding.unit_table import (
    dtype_ledger,
    format_dtype_ledger,
    format_unit_table,
    unit_rows,
)


def plan_summary(cfg: RunConfig, world_size: int | None = None) -> dict[str, Any]:
    """Return how a run of `cfg` on GPUs would be sharded, ready for JSON, in one process without
    weights. Without `world_size` `cfg` must have dp_replicate and dp_shard (ConfigError).
    """
    world_size = planned_ranks(cfg.sharding, world_size)
    # What is recomputed changes no unit.
    cfg = replace(cfg, sharding=replace(cfg.sharding, activation_checkpointing="none"))
    with sharded(cfg, world_size) as (made, sharding):
        rows = unit_rows(made, sharding)
        return {
            "model": model_class_name(base_of(made.model)),
            "parameters": sum(row.parameters for row in rows),
            "world_size": world_size,
            "mesh": {name: made.mesh.axes[name] for name in (DP_REPLICATE, DP_SHARD)},
            "bytes_sharded": sum(row.bytes_sharded for row in rows),
            "units": [asdict(row) for row in rows],
            "dtypes": dtype_ledger(made, sharding),
            "layers": list(made.plan.layers),
            "table": format_unit_table(made, sharding),
            "ledger": format_dtype_ledger(made, sharding),
        }


def render_plan(plan: dict[str, Any]) -> str:
    """Return a `plan_summary` as text."""
    mesh = plan["mesh"]
    return (
        f"model   {plan['model']}, {plan['parameters']:,} parameters\n"
        f"mesh    {plan['world_size']} ranks: dp_replicate {mesh['dp_replicate']} x dp_shard "
        f"{mesh['dp_shard']}; {plan['bytes_sharded'] / 1e6:,.1f} MB of parameters a rank\n"
        f"dtypes  {plan['ledger']}\n\n{plan['table']}"
    )
