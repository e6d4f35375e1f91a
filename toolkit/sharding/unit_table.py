"""Format units and dtypes for the start of a run and for `toolkit inspect --plan`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from toolkit.config.settings import ShardingConfig
from toolkit.formats import DTYPES, assets_of, local_tensor
from toolkit.mesh import count_gathered_values
from toolkit.models.packed_linear import PackedWeight, packed_weights
from toolkit.sharding.fsdp import Sharded
from toolkit.tables import format_table, group_numbered_names


@dataclass(frozen=True)
class UnitRow:
    """One FSDP2 unit of a sharded model, as a row of the table."""

    name: str
    modules: int  # gathered together
    parameters: int  # values, on all ranks together
    bytes_sharded: int  # that this rank keeps, in the storage dtype
    bytes_unsharded: int  # gathered, in the compute dtype
    stored: str
    computed: str
    reduced: str
    reshard: str  # freed after the forward ("yes", "no"), or the number of ranks that keep a copy


def unit_rows(sharded: Sharded, cfg: ShardingConfig) -> list[UnitRow]:
    """List a table row for each FSDP2 unit in the order of the model's modules, the root first.

    If parameters are replicated, a last row counts them together.
    """
    plan = sharded.plan
    model = sharded.model
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    parameters = dict(model.named_parameters())
    packed = packed_weights(model)
    rows = []
    for unit in sorted(plan.units, key=lambda u: order[u.modules[0]]):
        parameters_of_unit = {name: parameters[name] for name in unit.parameters}
        freed = unit.reshard_after_forward
        values = sum(
            packed[n].elements if n in packed else p.numel() for n, p in parameters_of_unit.items()
        )
        nbytes = sum(
            local_tensor(p).numel() * p.element_size() for p in parameters_of_unit.values()
        )
        gathered = (
            sum(map(count_gathered_values, parameters_of_unit.values())) * unit.param_dtype.itemsize
        )
        dtypes = (
            _format_storage(parameters_of_unit, packed),
            _dtype_name(unit.param_dtype),
            str(cfg.reduce_dtype),
        )
        reshard_text = (
            "no" if freed in (None, False) else "yes" if freed is True else f"to {freed} ranks"
        )
        rows.append(
            UnitRow(unit.name, len(unit.modules), values, nbytes, gathered, *dtypes, reshard_text)
        )
    if plan.replicated:
        parameters_of_unit = {name: parameters[name] for name in plan.replicated}
        values = sum(p.numel() for p in parameters_of_unit.values())
        nbytes = sum(p.numel() * p.element_size() for p in parameters_of_unit.values())
        dtypes = (_format_storage(parameters_of_unit, {}),) * 3
        rows.append(
            UnitRow("(replicated)", len(parameters_of_unit), values, nbytes, nbytes, *dtypes, "no")
        )
    return rows


def format_unit_table(sharded: Sharded, cfg: ShardingConfig) -> str:
    """Format the FSDP2 units as a text table; equal neighbours, such as layers, share a line.

    If only the root is a unit, a line after the table says why.
    """
    head = "unit,units,modules,parameters,MB a rank,MB gathered,stored,computed,reduced,freed"
    ahead = f"{cfg.forward_prefetch or 'auto'} / {cfg.backward_prefetch or 'auto'}"
    rows = unit_rows(sharded, cfg)
    # Without these settings, PyTorch's own prefetching is used.
    has_prefetch = cfg.forward_prefetch or cfg.backward_prefetch
    lines = [[*head.split(","), *["prefetches"] * bool(has_prefetch)]]
    for name, indices in group_numbered_names(
        [row.name for row in rows], [replace(r, name="") for r in rows]
    ):
        alike = rows[indices[0]]
        counts = [str(len(indices)), str(alike.modules), f"{alike.parameters:,}"]
        megabytes = [f"{n / 1e6:,.2f}" for n in (alike.bytes_sharded, alike.bytes_unsharded)]
        dtypes = [alike.stored, alike.computed, alike.reduced]
        prefetches = "- / -" if name == "(replicated)" else ahead
        more = [prefetches] * bool(has_prefetch)
        lines.append([name, *counts, *megabytes, *dtypes, alike.reshard, *more])
    text = "\n".join(format_table(lines, right={1, 2, 3, 4, 5}))
    reason = sharded.plan.root_only
    return text if reason is None else f"{text}\nonly the root is a unit: {reason}"


def dtype_ledger(sharded: Sharded, cfg: ShardingConfig) -> dict[str, str]:
    """Describe the dtypes of storage, compute, reduction, optimizer and export.

    Returns:
        Purpose (`storage`, `compute`, `reduction`, `optimizer`, `export`) -> its dtypes as text.
    """
    plan = sharded.plan
    model = sharded.model
    reduced = getattr(torch, cfg.reduce_dtype)
    parameters = dict(model.named_parameters())
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    replicated = [(parameters[name].dtype, name in trained) for name in plan.replicated]
    return {
        "storage": _format_storage(parameters, packed_weights(model)),
        "compute": _format_counts([u.param_dtype for u in plan.units], [d for d, _ in replicated]),
        "reduction": _format_counts(
            [reduced for _ in plan.units], [d for d, learns in replicated if learns]
        ),
        "optimizer": _format_storage(trained, {}),
        "export": _format_export_dtypes(model),
    }


def format_dtype_ledger(sharded: Sharded, cfg: ShardingConfig, optimizer: str | None = None) -> str:
    """Format the result of `dtype_ledger` as one line.

    A warning line follows if trained parameters are stored in bfloat16.

    Args:
        sharded: the model.
        cfg: the sharding settings of the run.
        optimizer: dtype of the optimizer's state; None: that of the trained parameters.
    """
    ledger = dtype_ledger(sharded, cfg)
    entries = ledger | ({} if optimizer is None else {"optimizer": optimizer})
    line = ", ".join(f"{purpose} {dtype}" for purpose, dtype in entries.items())
    if "bfloat16" in ledger["optimizer"]:
        line += (
            "\nWARNING    parameters and optimizer state are stored in bfloat16: an update below "
            "1/256 of a weight is lost to rounding. model.dtype: float32 keeps them"
        )
    return line


def _format_counts(units: list[torch.dtype], replicated: list[torch.dtype]) -> str:
    """Format the root's dtype, and how many units or replicated parameters have other dtypes.

    Args:
        units: dtype of each unit, the root's last.
        replicated: dtype of each replicated parameter.
    """
    parts = [_dtype_name(units[-1])]
    for kinds, of in ((units, f"of {len(units)} units"), (replicated, "replicated parameters")):
        other_dtypes = sorted({*kinds} - {units[-1]}, key=str)
        parts += [f"{_dtype_name(kind)} in {kinds.count(kind)} {of}" for kind in other_dtypes]
    return " + ".join(parts)


def _format_export_dtypes(model: nn.Module) -> str:
    """Format the dtypes that `consolidate --dtype auto` will write, joined by "/"."""
    assets = assets_of(model)
    if assets.source is not None:
        kinds = {DTYPES[k] for k in assets.source.values() if DTYPES[k].is_floating_point}
        return "/".join(sorted(map(_dtype_name, kinds)))
    stored = assets.config.get("dtype", assets.config.get("torch_dtype"))
    return str(stored or "bfloat16").removeprefix("torch.")


def _format_storage(parameters: dict[str, Any], packed: dict[str, PackedWeight]) -> str:
    """Format the storage dtypes of parameters, joined by "/"; "-" if there are none.

    Args:
        parameters: name -> parameter.
        packed: name of a packed weight -> its layer. For these, the format (such as nf4) is the
            dtype.
    """
    dtypes = {n: _dtype_name(p.dtype) for n, p in parameters.items()}
    kinds = {packed[name].quant_type if name in packed else dtype for name, dtype in dtypes.items()}
    return "/".join(sorted(kinds)) or "-"


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")
