"""What a run and `toolkit inspect --plan` print about sharding: units, and dtypes by purpose."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.adapters import prepare_adapters
from toolkit.config.settings import RunConfig, ShardingConfig, model_settings
from toolkit.errors import ConfigError, ShardingError
from toolkit.formats import DTYPES, assets_of, local_tensor, torch_private
from toolkit.mesh import DP_REPLICATE, DP_SHARD, init_mesh
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.classes import plain_name
from toolkit.models.packed_linear import PackedLinear, packed_weights
from toolkit.models.peft_model import base_of
from toolkit.sharding.fsdp import Sharded, apply_fsdp, splits_ends
from toolkit.tables import fold, table


@dataclass(frozen=True)
class UnitRow:
    """One unit of a sharded model."""

    name: str
    modules: int  # gathered together
    parameters: int  # values, on all ranks together
    bytes_sharded: int  # that this rank keeps, in the storage dtype
    bytes_unsharded: int  # gathered, in the compute dtype
    stored: str
    computed: str
    reduced: str
    reshard: str  # whether they are freed after the forward, or how many ranks keep them


def unit_rows(sharded: Sharded, cfg: ShardingConfig) -> list[UnitRow]:
    """Return a row for each unit of a sharded model, the root first; replicated parameters last."""
    plan, model = sharded.plan, sharded.model
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    parameters, packed = dict(model.named_parameters()), packed_weights(model)
    rows = []
    for unit in sorted(plan.units, key=lambda u: order[u.modules[0]]):
        own = {name: parameters[name] for name in unit.parameters}
        freed = unit.reshard_after_forward
        values = sum(packed[n].elements if n in packed else p.numel() for n, p in own.items())
        nbytes = sum(local_tensor(p).numel() * p.element_size() for p in own.values())
        gathered = sum(p.numel() for p in own.values()) * unit.param_dtype.itemsize
        dtypes = _stored(own, packed), _short(unit.param_dtype), str(cfg.reduce_dtype)
        kept = "no" if freed in (None, False) else "yes" if freed is True else f"to {freed} ranks"
        rows.append(UnitRow(unit.name, len(unit.modules), values, nbytes, gathered, *dtypes, kept))
    if plan.replicated:
        own = {name: parameters[name] for name in plan.replicated}
        values = sum(p.numel() for p in own.values())
        nbytes = sum(p.numel() * p.element_size() for p in own.values())
        dtypes = (_stored(own, {}),) * 3
        rows.append(UnitRow("(replicated)", len(own), values, nbytes, nbytes, *dtypes, "no"))
    return rows


def unit_table(sharded: Sharded, cfg: ShardingConfig) -> str:
    """Return the units as a table; neighbours that differ in their numbers only share a line."""
    head = "unit,units,modules,parameters,MB a rank,MB gathered,stored,computed,reduced,freed"
    ahead = f"{cfg.forward_prefetch or 'auto'} / {cfg.backward_prefetch or 'auto'}"
    rows = unit_rows(sharded, cfg)
    shown = cfg.forward_prefetch or cfg.backward_prefetch  # else PyTorch's own, of each unit
    lines = [[*head.split(","), *["prefetches"] * bool(shown)]]
    for name, indices in fold([row.name for row in rows], [replace(r, name="") for r in rows]):
        alike = rows[indices[0]]
        counts = [str(len(indices)), str(alike.modules), f"{alike.parameters:,}"]
        megabytes = [f"{n / 1e6:,.2f}" for n in (alike.bytes_sharded, alike.bytes_unsharded)]
        dtypes = [alike.stored, alike.computed, alike.reduced]
        prefetches = "- / -" if name == "(replicated)" else ahead
        more = [prefetches] * bool(shown)
        lines.append([name, *counts, *megabytes, *dtypes, alike.reshard, *more])
    text = "\n".join(table(lines, right={1, 2, 3, 4, 5}))
    reason = sharded.plan.root_only
    return text if reason is None else f"{text}\nonly the root is a unit: {reason}"


def dtype_ledger(sharded: Sharded, cfg: ShardingConfig) -> dict[str, str]:
    """Return the dtype of each purpose: storage, compute, reduction, optimizer, export."""
    plan, model, reduced = sharded.plan, sharded.model, getattr(torch, cfg.reduce_dtype)
    parameters = dict(model.named_parameters())
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    whole = [(parameters[name].dtype, name in trained) for name in plan.replicated]
    return {
        "storage": _stored(parameters, packed_weights(model)),
        "compute": _counted([u.param_dtype for u in plan.units], [d for d, _ in whole]),
        "reduction": _counted([reduced for _ in plan.units], [d for d, learns in whole if learns]),
        "optimizer": _stored(trained, {}),
        "export": _exported(model),
    }


def ledger_line(sharded: Sharded, cfg: ShardingConfig, optimizer: str | None = None) -> str:
    """Return the ledger as one line, with a warning under it where the storage is not fp32.

    `optimizer`: in what its state is held, where that is not the dtype of the parameters.
    """
    ledger = dtype_ledger(sharded, cfg)
    said = ledger | ({} if optimizer is None else {"optimizer": optimizer})
    line = ", ".join(f"{purpose} {dtype}" for purpose, dtype in said.items())
    if "bfloat16" in ledger["optimizer"]:
        line += (
            "\nWARNING    parameters and optimizer state are stored in bfloat16: an update below "
            "1/256 of a weight is lost to rounding. model.dtype: float32 keeps them"
        )
    return line


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be `rank` of `world_size` processes that do not exist; collectives move nothing."""
    if dist.is_initialized():
        raise ShardingError("a process group exists already; plan in a process of its own")
    store = torch_private("testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_summary(cfg: RunConfig, world_size: int | None = None) -> dict[str, Any]:
    """Return how a run of `cfg` on GPUs would be sharded, ready for JSON, in one process without
    weights. Without `world_size` `cfg` must have dp_replicate and dp_shard (ConfigError).
    """
    sharding, world_size = cfg.sharding, planned_ranks(cfg.sharding, world_size)
    with fake_world(world_size):
        model: Any = build_on_meta(model_settings(cfg))
        model = prepare_adapters(model, cfg.adapters, sharding.param_dtype)
        splits = splits_ends(model, sharding, "cuda")
        # What is recomputed changes no unit.
        sharding = replace(sharding, embedding_units=splits, activation_checkpointing="none")
        mesh = init_mesh("cpu", world_size, sharding)
        made = apply_fsdp(model, mesh, sharding)
        rows = unit_rows(made, sharding)
        return {
            "model": plain_name(base_of(model)),
            "parameters": sum(row.parameters for row in rows),
            "world_size": world_size,
            "mesh": {name: mesh.axes[name] for name in (DP_REPLICATE, DP_SHARD)},
            "bytes_sharded": sum(row.bytes_sharded for row in rows),
            "units": [asdict(row) for row in rows],
            "dtypes": dtype_ledger(made, sharding),
            "layers": list(made.plan.layers),
            "table": unit_table(made, sharding),
            "ledger": ledger_line(made, sharding),
        }


def planned_ranks(cfg: ShardingConfig, world_size: int | None) -> int:
    """Return the number of processes to plan for; a ConfigError where nobody said it."""
    if world_size is None and -1 in (cfg.dp_replicate, cfg.dp_shard):
        raise ConfigError(
            "the number of processes is not known: give --world_size N, or set both "
            "sharding.dp_replicate and sharding.dp_shard"
        )
    count = cfg.dp_replicate * cfg.dp_shard if world_size is None else world_size
    if count < 1:
        raise ConfigError(f"--world_size must be at least 1, got {count}")
    return count


def render_plan(plan: dict[str, Any]) -> str:
    """Return a `plan_summary` as text."""
    mesh = plan["mesh"]
    return (
        f"model   {plan['model']}, {plan['parameters']:,} parameters\n"
        f"mesh    {plan['world_size']} ranks: dp_replicate {mesh['dp_replicate']} x dp_shard "
        f"{mesh['dp_shard']}; {plan['bytes_sharded'] / 1e6:,.1f} MB of parameters a rank\n"
        f"dtypes  {plan['ledger']}\n\n{plan['table']}"
    )


def _counted(units: list[torch.dtype], replicated: list[torch.dtype]) -> str:
    """Return the root's dtype, then others with the number of units or parameters that have it."""
    parts = [_short(units[-1])]
    for kinds, of in ((units, f"of {len(units)} units"), (replicated, "replicated parameters")):
        others = sorted({*kinds} - {units[-1]}, key=str)
        parts += [f"{_short(kind)} in {kinds.count(kind)} {of}" for kind in others]
    return " + ".join(parts)


def _exported(model: nn.Module) -> str:
    """Return the dtypes that `consolidate --dtype auto` will write."""
    assets = assets_of(model)
    if assets.source is not None:
        kinds = {DTYPES[k] for k in assets.source.values() if DTYPES[k].is_floating_point}
        return "/".join(sorted(map(_short, kinds)))
    stored = assets.config.get("dtype", assets.config.get("torch_dtype"))
    return str(stored or "bfloat16").removeprefix("torch.")


def _stored(parameters: dict[str, Any], packed: dict[str, PackedLinear]) -> str:
    """Return the storage dtypes; of what is in 4 bits the format, not the dtype of its bytes."""
    held = {n: _short(p.dtype) for n, p in parameters.items()}
    kinds = {packed[name].quant_type if name in packed else dtype for name, dtype in held.items()}
    return "/".join(sorted(kinds)) or "-"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
