"""The units of a sharded model as a table, and the dtype of each purpose as a line.

Owns what a run and `toolkit inspect --plan` print about sharding, and the making of that plan for
a run that has not begun.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.adapters.lora import add_adapters
from toolkit.config.settings import FinetuneConfig, PretrainConfig, ShardingConfig, model_settings
from toolkit.errors import ConfigError
from toolkit.formats import DTYPES, assets_of
from toolkit.models.causal_lm import build_on_meta, plain_name
from toolkit.models.packed_linear import PackedLinear, packed_weights
from toolkit.models.peft_model import base_of
from toolkit.models.quantise import quantise_on_meta
from toolkit.sharding.fake_world import fake_world
from toolkit.sharding.fsdp import apply_fsdp, init_mesh, mesh_shape, plan_of
from toolkit.tables import fold, table, without_numbers


@dataclass(frozen=True)
class UnitRow:
    """What a line of the table says of one unit."""

    name: str
    modules: int
    """Modules that are gathered together."""
    parameters: int
    """Elements of its unsharded parameters, on all ranks together."""
    bytes_sharded: int
    """Bytes that this rank keeps, in the storage dtype."""
    bytes_unsharded: int
    """Bytes of the gathered parameters, in the compute dtype."""
    stored: str
    computed: str
    reduced: str
    reshard: str
    """Whether the gathered parameters are freed after the forward, or how many ranks keep them."""
    forward_prefetch: str
    """Units that it gathers ahead in the forward: a number, names where few, or `auto`."""
    backward_prefetch: str


def unit_rows(model: nn.Module, cfg: ShardingConfig) -> list[UnitRow]:
    """Return a row for each unit of a sharded model, the root first, then in order of definition.

    Replicated parameters come last, as the row `(replicated)`.
    """
    plan = plan_of(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    parameters, packed = dict(model.named_parameters()), packed_weights(model)
    rows = []
    for unit in sorted(plan.units, key=lambda u: order[u.modules[0]]):
        names = unit.parameters
        own = [parameters[name] for name in names]
        kept = unit.reshard_after_forward
        rows.append(
            UnitRow(
                unit.name,
                len(unit.modules),
                sum(packed[n].elements if n in packed else parameters[n].numel() for n in names),
                sum(_local(p).numel() * p.element_size() for p in own),
                sum(p.numel() for p in own) * unit.param_dtype.itemsize,
                _stored({n: parameters[n] for n in names}, packed),
                _short(unit.param_dtype),
                _short(unit.reduce_dtype),
                "no" if kept in (None, False) else "yes" if kept is True else f"to {kept} ranks",
                str(cfg.forward_prefetch or "auto"),
                str(cfg.backward_prefetch or "auto"),
            )
        )
    if plan.replicated:
        own = [parameters[name] for name in plan.replicated]
        nbytes = sum(p.numel() * p.element_size() for p in own)
        rows.append(
            UnitRow(
                "(replicated)",
                len(own),
                sum(p.numel() for p in own),
                nbytes,
                nbytes,
                _dtypes(own),
                _dtypes(own),
                _dtypes(own),
                "no",
                "-",
                "-",
            )
        )
    return rows


def unit_table(model: nn.Module, cfg: ShardingConfig) -> str:
    """Return the units as a table; neighbours that differ in their numbers only share a line."""
    head = [
        "unit",
        "units",
        "modules",
        "parameters",
        "MB a rank",
        "MB gathered",
        "stored",
        "computed",
        "reduced",
        "freed",
        "prefetches",
    ]
    groups: dict[tuple[Any, ...], list[UnitRow]] = {}
    for row in unit_rows(model, cfg):
        groups.setdefault(_alike(row), []).append(row)
    lines = [head]
    for rows in groups.values():
        for name, indices in fold([row.name for row in rows]):
            lines.append(_line(name, len(indices), rows[0]))
    text = "\n".join(table(lines, right={1, 2, 3, 4, 5}))
    reason = plan_of(model).root_only
    return text if reason is None else f"{text}\nonly the root is a unit: {reason}"


def dtype_ledger(model: nn.Module, cfg: ShardingConfig) -> dict[str, str]:
    """Return the dtype of each purpose: storage, compute, reduction, optimizer, export."""
    plan = plan_of(model)
    parameters = dict(model.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    replicated = [parameters[name] for name in plan.replicated]
    return {
        "storage": _stored(parameters, packed_weights(model)),
        "compute": _counted([u.param_dtype for u in plan.units], [p.dtype for p in replicated]),
        "reduction": _counted([u.reduce_dtype for u in plan.units], [p.dtype for p in replicated]),
        "optimizer": _dtypes(trained),
        "export": _exported(model),
    }


def ledger_line(model: nn.Module, cfg: ShardingConfig) -> str:
    """Return the ledger as one line, with a warning under it where the storage is not fp32."""
    ledger = dtype_ledger(model, cfg)
    line = ", ".join(f"{purpose} {dtype}" for purpose, dtype in ledger.items())
    if "bfloat16" in ledger["optimizer"]:
        line += (
            "\nWARNING    parameters and optimizer state are stored in bfloat16: an update below "
            "1/256 of a weight is lost to rounding. model.dtype: float32 keeps them"
        )
    return line


def plan_summary(
    cfg: PretrainConfig | FinetuneConfig, world_size: int | None = None
) -> dict[str, Any]:
    """Return how a run of `cfg` would be sharded, ready for JSON. One process, no weights, no GPU.

    Keys: `model`, `parameters`, `world_size`, `mesh` (dp_replicate, dp_shard), `bytes_sharded` (of
    parameters, on rank 0), `units` (a `UnitRow` each), `dtypes` (the ledger), `layers`, `table` and
    `ledger` (as text). Llama-70B on 64 ranks takes under a second.

    Args:
        world_size: of the run; None: dp_replicate x dp_shard where the config has both.

    Raises:
        ConfigError: the number of processes is not known.
        ModelError, ShardingError: as the run itself would.
    """
    sharding = cfg.sharding
    if world_size is None:
        world_size = sharding.dp_replicate * sharding.dp_shard
        if -1 in (sharding.dp_replicate, sharding.dp_shard):
            raise ConfigError(
                "the number of processes is not known: give --world_size N, or set both "
                "sharding.dp_replicate and sharding.dp_shard"
            )
    if world_size < 1:
        raise ConfigError(f"--world_size must be at least 1, got {world_size}")
    replicas, shards = mesh_shape(world_size, sharding)
    with fake_world(world_size):
        model: nn.Module = build_on_meta(model_settings(cfg))
        if isinstance(cfg, FinetuneConfig) and cfg.lora.load_in_4bit:
            quantise_on_meta(model, cfg.lora, sharding.param_dtype)  # type: ignore[arg-type]
        if isinstance(cfg, FinetuneConfig) and cfg.lora.r:
            model = add_adapters(model, cfg.lora)  # type: ignore[arg-type]
        apply_fsdp(model, init_mesh("cpu", world_size, sharding), sharding)
        rows = unit_rows(model, sharding)
        return {
            "model": plain_name(base_of(model)),
            "parameters": sum(row.parameters for row in rows),
            "world_size": world_size,
            "mesh": {"dp_replicate": replicas, "dp_shard": shards},
            "bytes_sharded": sum(row.bytes_sharded for row in rows),
            "units": [asdict(row) for row in rows],
            "dtypes": dtype_ledger(model, sharding),
            "layers": list(plan_of(model).layers),
            "table": unit_table(model, sharding),
            "ledger": ledger_line(model, sharding),
        }


def render_plan(plan: dict[str, Any]) -> str:
    """Return a `plan_summary` as text."""
    mesh = plan["mesh"]
    return "\n".join(
        [
            f"model   {plan['model']}, {plan['parameters']:,} parameters",
            f"mesh    {plan['world_size']} ranks: dp_replicate {mesh['dp_replicate']} x dp_shard "
            f"{mesh['dp_shard']}; {plan['bytes_sharded'] / 1e6:,.1f} MB of parameters a rank",
            f"dtypes  {plan['ledger']}",
            "",
            plan["table"],
        ]
    )


def _line(name: str, units: int, row: UnitRow) -> list[str]:
    ahead = f"{row.forward_prefetch} / {row.backward_prefetch}"
    return [
        name,
        str(units),
        str(row.modules),
        f"{row.parameters:,}",
        f"{row.bytes_sharded / 1e6:,.2f}",
        f"{row.bytes_unsharded / 1e6:,.2f}",
        row.stored,
        row.computed,
        row.reduced,
        row.reshard,
        ahead,
    ]


def _alike(row: UnitRow) -> tuple[Any, ...]:
    values = vars(row)
    return (without_numbers(row.name), *(v for k, v in values.items() if k != "name"))


def _counted(units: list[torch.dtype], replicated: list[torch.dtype]) -> str:
    """Return the root's dtype, then others with the number of units or parameters that have it."""
    main = units[-1]
    said = [_short(main)]
    for kind in sorted(set(units) - {main}, key=str):
        said.append(f"{_short(kind)} in {units.count(kind)} of {len(units)} units")
    for kind in sorted(set(replicated) - {main}, key=str):
        said.append(f"{_short(kind)} in {replicated.count(kind)} replicated parameters")
    return " + ".join(said)


def _exported(model: nn.Module) -> str:
    """Return the dtypes that `consolidate --dtype auto` will write."""
    assets = assets_of(model)
    if assets.source is not None:
        kinds = {DTYPES[k] for k in assets.source.values() if DTYPES[k].is_floating_point}
        return "/".join(sorted(map(_short, kinds)))
    said = assets.config.get("dtype", assets.config.get("torch_dtype"))
    return str(said or "bfloat16").removeprefix("torch.")


def _stored(parameters: dict[str, Any], packed: dict[str, PackedLinear]) -> str:
    """Return the storage dtypes; of what is in 4 bits the format, not the dtype of its bytes."""
    kinds = {
        packed[n].quant_type if n in packed else _short(p.dtype) for n, p in parameters.items()
    }
    return "/".join(sorted(kinds)) or "-"


def _dtypes(tensors: list[Any]) -> str:
    return "/".join(sorted({_short(t.dtype) for t in tensors})) or "-"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
