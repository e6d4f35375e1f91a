"""What a run and `toolkit inspect --plan` print about sharding: units, and dtypes by purpose."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from toolkit.config.settings import ShardingConfig
from toolkit.formats import DTYPES, assets_of, local_tensor
from toolkit.models.packed_linear import PackedLinear, packed_weights
from toolkit.sharding.fsdp import Sharded
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


def format_unit_table(sharded: Sharded, cfg: ShardingConfig) -> str:
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


def format_dtype_ledger(sharded: Sharded, cfg: ShardingConfig, optimizer: str | None = None) -> str:
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
