"""Export a model that is still training as a Hugging Face folder: rank 0 writes, all ranks gather.

[Note: who waits where] Rank 0 writes the files. Before each gather, it sends the names of the next
tensors. The other ranks wait for these names on the gloo group, whose timeout is a day, and enter
the device's all-gather only when rank 0 enters it too. So however slow the disk is, no collective
of the accelerator is left open.
"""

import contextlib
import functools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.adapters.base import build_adapter_entry
from toolkit.checkpoint.carried import Carried
from toolkit.checkpoint.local_folder import is_disk_failure
from toolkit.checkpoint.names import EXPORTS, step_name
from toolkit.checkpoint.run_folder import rename_old_export
from toolkit.checkpoint.shards import names_to_write
from toolkit.checkpoint.summary import collect_run_facts
from toolkit.config import MAX_SHARD_SIZE
from toolkit.errors import ExportError
from toolkit.export.plan import (
    ExportPlan,
    build_model_from_assets,
    describe_adapter_origin,
    make_adapter_plan,
    make_model_plan,
    parse_options,
)
from toolkit.export.writer import resolve_output, write_export
from toolkit.formats import ADAPTER_FILE, ExportGroup, Tensors, assets_of, local_tensor
from toolkit.formats.bit_sums import part_sums
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.models.peft_model import has_adapters, model_tensors

_SumRequest = dict[str, list[torch.dtype]]  # stored name -> dtypes of its exported copies
_PREFIX = "model."  # what `model_tensors` puts before a parameter's name


def export_live(
    model: nn.Module,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str | int = MAX_SHARD_SIZE,
    origin: dict[str, Any] | None = None,
    may_fail: bool = False,
) -> str:
    """Export the weights of a sharded model as a Hugging Face folder; return its path. Collective.

    The folder equals that of `consolidate` on a checkpoint of the same weights, byte for byte,
    except for the origin in its manifest. A model with adapters is exported as a PEFT folder. The
    files are proven to hold the values in the ranks' memory; see [Note: proof of an export].

    Costs one pass over each rank's parts and one all-gather of the model, in which a rank holds one
    tensor or converted group at a time. Rank 0 writes and reads the files while other ranks wait.

    Args:
        model: built by `build_on_meta`, with weights; sharded or not.
        output: a folder that does not exist or is empty, on a disk of rank 0.
        dtype: as for `consolidate`.
        max_shard_size: as for `consolidate`.
        origin: entries for the export's manifest: `checkpoint` (sha256 of its manifest), `step`,
            `run`.
        may_fail: if the disk is full or broken, print a warning and return "" instead of raising.

    Raises:
        ExportError: on every rank: `output` is in use, the disk is full, a write failed, or the
            files differ from memory (the error names the tensors). No folder is left.
    """
    tensors = {n.removeprefix(_PREFIX): t for n, t in model_tensors(model).items()}
    if ranks.rank() != 0:
        _serve_gathers(tensors)

    def write() -> str:
        """Plan, gather and write the export on rank 0; return its path."""
        override, limit = parse_options(dtype, max_shard_size)
        target = resolve_output(output)
        plan, facts = _plan_live(model, tensors, override, limit)
        sums = _sum_tensors(tensors, ranks.broadcast(_dtypes_by_tensor(plan)))
        write_export(
            plan,
            target,
            read_group=functools.partial(_gather_group, plan, tensors),
            origin={**(origin or {}), **facts, "dtype": dtype},
            source_sum=lambda *tensor: sums.get(tensor),
        )
        return str(Path(output).expanduser())

    def served() -> str:
        """Call `write`, then end the loops of the other ranks; return the path or raise."""
        path, failure = "", None
        try:
            path = write()
        except Exception as error:
            failure = error
        # Not in a `finally`: if a signal interrupts a gather, this rank must exit at once.
        # None ends the loop of the other ranks.
        ranks.broadcast(None)
        if isinstance(failure, ExportError) and may_fail and is_disk_failure(failure.__cause__):
            ranks.print_line(f"WARNING: there is no export: {failure}. Training continues")
        elif failure is not None:
            raise failure
        return path

    return ranks.on_main(served)


def export_step(model: nn.Module, run_dir: str | Path, step: int, *, may_fail: bool = False) -> str:
    """Export the model of `step` to `exports/step-N` of the run; return the log line. Collective.

    An existing export of this step is renamed to `step-N.old-*`, and rank 0 prints that. A resumed
    run trains steps again, so their weights may differ.

    Args:
        model: as for `export_live`.
        run_dir: the run directory.
        step: the current step.
        may_fail: if the disk is full or broken, print a warning and return "" instead of raising.

    Raises:
        ExportError: see `export_live`.
    """
    target = Path(run_dir) / EXPORTS / step_name(step)

    def prepare() -> dict[str, Any] | None:
        """Rename an existing export of the step; return the facts of the run, or None."""
        if os.path.lexists(target):
            try:
                ranks.print_line(rename_old_export(target))
            except OSError as error:
                raise ExportError(f"{target} cannot be renamed: {error.strerror}") from error
        return collect_run_facts(run_dir, step) or None

    origin = {"step": step, "run": ranks.on_main(prepare)}
    path = export_live(model, target, origin=origin, may_fail=may_fail)
    return path and f"exported {path}"


def has_export(run_dir: str | Path, step: int) -> bool:
    """Return True if the run has an export of `step`. Collective: rank 0 looks, all get the result.

    Exports that were renamed to `step-N.old-*` do not count.
    """
    return ranks.on_main((Path(run_dir) / EXPORTS / step_name(step)).exists)


def _plan_live(
    model: nn.Module, tensors: Tensors, override: torch.dtype | None, limit: int
) -> tuple[ExportPlan, dict[str, Any]]:
    """Plan the export of a live model, or of its adapter if it has one. Only on rank 0.

    Prints the names of carried tensors.

    Args:
        model: the live model.
        tensors: parameter name -> sharded tensor.
        override: dtype of all floating tensors; None keeps that of the source.
        limit: largest size of a weight file in bytes.

    Returns:
        (plan, entries for the export's manifest). The entries describe carried tensors, or the
        adapter.
    """
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    where = "the running model"
    with tempfile.TemporaryDirectory() as folder:
        # Save the assets as a checkpoint does, so that both kinds of export share the planning.
        hf = Path(folder)
        assets_of(model).save(hf)
        if not has_adapters(model):
            exported_model = build_model_from_assets(hf)
            carried = Carried.find(exported_model, assets_of(exported_model))
            plan = make_model_plan(
                exported_model, shapes, override, limit, where=where, carried=carried
            )
            carried.log()
            return plan, carried.manifest_entry()
        entry = build_adapter_entry(model)
        (hf / ADAPTER_FILE).write_text(json.dumps(entry["config"]), "utf-8")
        plan = make_adapter_plan(hf, shapes, override, where=where, base=entry)
        return plan, {"adapter": describe_adapter_origin(hf, entry, plan)}


def _gather_group(plan: ExportPlan, tensors: Tensors, group: ExportGroup) -> Tensors:
    """Gather the tensors of a group from all ranks, and convert them. Only on rank 0.

    The other ranks must be in `_serve_gathers`.

    Returns:
        Output name -> full tensor in host memory.
    """
    stored = [plan.stored[name] for name in group.sources]
    ranks.broadcast(stored)
    gathered = [_full_tensor(tensors[name]).cpu() for name in stored]
    return plan.convert(group, dict(zip(group.sources, gathered, strict=True)))


def _serve_gathers(tensors: Tensors) -> None:
    """Take part in the collectives that rank 0 requests; return when rank 0 sends None.

    All ranks but rank 0 call this.
    """
    request: _SumRequest | list[str] | None
    while (request := ranks.broadcast(None)) is not None:
        if isinstance(request, dict):
            # Rank 0 sees the same failure and ends this loop. `on_main` then raises it here.
            with contextlib.suppress(Exception):
                _sum_tensors(tensors, request)
            continue
        for name in request:
            _full_tensor(tensors[name])


def _dtypes_by_tensor(plan: ExportPlan) -> _SumRequest:
    """Map the stored name of each tensor to the dtypes in which the plan exports it."""
    dtypes: _SumRequest = {}
    for group in plan.groups:
        dtypes_of_group = {plan.tensors[plan.names[name]].dtype for name in group.outputs}
        for name in group.sources:
            stored_dtypes = dtypes.setdefault(plan.stored[name], [])
            stored_dtypes += sorted(dtypes_of_group - {*stored_dtypes}, key=str)
    return dtypes


@torch.no_grad()
def _sum_tensors(tensors: Tensors, request: _SumRequest) -> dict[tuple[str, torch.dtype], int]:
    """Compute checksums of full tensors, cast to the requested dtypes. Collective.

    See [Note: proof of an export]. Each rank reads its parts once per dtype. Tensors that are not
    sharded by rows are skipped; rank 0 prints how many there are.

    Args:
        tensors: name -> tensor, with the same names on every rank.
        request: name -> dtypes of the checksums.

    Returns:
        (name, dtype) -> checksum, on every rank; {} in a `fake_world`.
    """
    pairs = [(name, dtype) for name, dtypes in request.items() for dtype in dtypes]
    pairs = [(name, dtype) for name, dtype in pairs if is_sharded_by_rows(tensors[name])]
    chosen = names_to_write({name: tensors[name] for name, _ in pairs})  # of replicas one

    def sums() -> list[int]:
        """Compute this rank's share of each checksum; 0 for tensors that another rank sums."""
        shares = [
            part_sums(_cast_as_on_cpu(tensors[name], dtype))[1]
            if name in chosen
            else torch.tensor(0)
            for name, dtype in pairs
        ]
        return [int(share) for share in shares]

    totals = ranks.sum_over_ranks(ranks.on_all(sums))
    if totals is None:
        # The other ranks do not exist (`fake_world`).
        return {}
    if ranks.rank() == 0 and (without := len(request.keys() - {name for name, _ in pairs})):
        ranks.print_line(
            f"NOTE: {without} tensors are not cut by rows: of them only the write is proven"
        )
    return dict(zip(pairs, totals, strict=True))


def _cast_as_on_cpu(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `tensor` to `dtype`, with the NaN bits that a cast on the CPU would give."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.detach().to(dtype)
    if dtype.is_floating_point and cast.device.type != "cpu":
        local_tensor(cast).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    return cast


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor on all ranks (collective); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
