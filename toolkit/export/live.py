"""A model that is still training becomes a Hugging Face folder: rank 0 writes, all ranks help.

[Note: who waits where] Rank 0 writes, and says before each gather which tensors come next. The
others wait for that on the gloo group that waits a day, and enter the device's all-gather only when
rank 0 enters it too: however slow the disk is, no accelerator collective is left open.
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
from toolkit.adapters.base import adapter_entry
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
    describe_adapter_origin,
    make_adapter_plan,
    make_plan,
    model_of_assets,
    parse_options,
)
from toolkit.export.writer import resolve_output, write_export
from toolkit.formats import ADAPTER_FILE, ExportGroup, Tensors, assets_of, local_tensor
from toolkit.formats.bit_sums import part_sums
from toolkit.formats.layout import cut_by_rows
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
    """Write the weights of a sharded model as a Hugging Face folder; return its path. Collective.

    The folder is that of `consolidate` on a checkpoint of the same weights (of a model with
    adapters the PEFT folder), to the byte, but for what its manifest says of its origin. The files
    are proven to hold what the ranks' memory held; see [Note: proof of an export]. Costs one pass
    over each rank's parts, one all-gather of the model, in which a rank holds one tensor or
    converted group at a time, and rank 0's write and read of the files; the other ranks wait.

    Args:
        model: of `build_on_meta`, with its weights; sharded or not.
        output: as for `consolidate`, as are `dtype` and `max_shard_size`; on a disk that rank 0
            sees.
        origin: for the export's manifest: `checkpoint` (sha256 of its manifest), `step`, `run`.
        may_fail: a disk that is full or broken makes a warning, and the path is "".

    ExportError: on every rank: the output is in the way, there is no space, a write failed, or the
        files hold other bytes than memory (it names the tensors; nothing is left).
    """
    tensors = {n.removeprefix(_PREFIX): t for n, t in model_tensors(model).items()}
    if ranks.rank() != 0:
        _serve_gathers(tensors)

    def write() -> str:
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
        path, failure = "", None
        try:
            path = write()
        except Exception as error:
            failure = error
        # No `finally`: where a signal comes in the middle of a gather, this rank leaves at once.
        ranks.broadcast(None)  # the end of what the others serve
        if isinstance(failure, ExportError) and may_fail and is_disk_failure(failure.__cause__):
            ranks.print_line(f"WARNING: there is no export: {failure}. Training continues")
        elif failure is not None:
            raise failure
        return path

    return ranks.on_main(served)


def export_step(model: nn.Module, run_dir: str | Path, step: int, *, may_fail: bool = False) -> str:
    """Write the model after `step` to `exports/step-N` of the run; return the line that says so.
    Collective.

    One that is there, of a run that comes by again, may hold other weights: it is renamed to
    `step-N.old-*`, which rank 0 says. Where it `may_fail`, since training goes on, the line is ""
    after a disk that is full or broken, which was a warning. Raises as `export_live`.
    """
    target = Path(run_dir) / EXPORTS / step_name(step)

    def prepare() -> dict[str, Any] | None:
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
    """Return whether the run has an export of `step`: a start sets those of later steps than its
    first aside. The same on every rank. Collective.
    """
    return ranks.on_main((Path(run_dir) / EXPORTS / step_name(step)).exists)


def _plan_live(
    model: nn.Module, tensors: Tensors, override: torch.dtype | None, limit: int
) -> tuple[ExportPlan, dict[str, Any]]:
    """Return the plan, and what the manifest says of an adapter."""
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    where = "the running model"
    with tempfile.TemporaryDirectory() as folder:
        hf = Path(folder)  # as in a checkpoint: what follows is the same for both
        assets_of(model).save(hf)
        if not has_adapters(model):
            exported_model = model_of_assets(hf)
            carried = Carried.find(exported_model, assets_of(exported_model))
            plan = make_plan(exported_model, shapes, override, limit, where=where, carried=carried)
            carried.log()
            return plan, carried.manifest_entry()
        entry = adapter_entry(model)
        (hf / ADAPTER_FILE).write_text(json.dumps(entry["config"]), "utf-8")
        plan = make_adapter_plan(hf, shapes, override, where=where, base=entry)
        return plan, {"adapter": describe_adapter_origin(hf, entry, plan)}


def _gather_group(plan: ExportPlan, tensors: Tensors, group: ExportGroup) -> Tensors:
    """Return a group's outputs in host memory, with the other ranks' help."""
    stored = [plan.stored[name] for name in group.sources]
    ranks.broadcast(stored)
    gathered = [_full_tensor(tensors[name]).cpu() for name in stored]
    return plan.convert(group, dict(zip(group.sources, gathered, strict=True)))


def _serve_gathers(tensors: Tensors) -> None:
    """Take part in the sums and gathers that rank 0 requests, until it is done or has failed."""
    request: _SumRequest | list[str] | None
    while (request := ranks.broadcast(None)) is not None:
        if isinstance(request, dict):
            # A failure is rank 0's too: it ends this loop, and `on_main` raises it here.
            with contextlib.suppress(Exception):
                _sum_tensors(tensors, request)
            continue
        for name in request:
            _full_tensor(tensors[name])


def _dtypes_by_tensor(plan: ExportPlan) -> _SumRequest:
    """Return stored name -> the dtypes in which the plan exports it."""
    dtypes: _SumRequest = {}
    for group in plan.groups:
        dtypes_of_group = {plan.tensors[plan.names[name]].dtype for name in group.outputs}
        for name in group.sources:
            wanted = dtypes.setdefault(plan.stored[name], [])
            wanted += sorted(dtypes_of_group - {*wanted}, key=str)
    return dtypes


@torch.no_grad()
def _sum_tensors(tensors: Tensors, request: _SumRequest) -> dict[tuple[str, torch.dtype], int]:
    """Return the sums of whole tensors, cast to the dtypes of `request`, from the memory of all
    ranks; see [Note: proof of an export]. Collective; each rank reads its parts once a dtype.

    A tensor that is not cut by rows has none, and rank 0 says so.
    """
    pairs = [(name, dtype) for name, dtypes in request.items() for dtype in dtypes]
    pairs = [(name, dtype) for name, dtype in pairs if cut_by_rows(tensors[name])]
    chosen = names_to_write({name: tensors[name] for name, _ in pairs})  # of replicas one

    def sums() -> list[int]:
        shares = [
            part_sums(_cast(tensors[name], dtype))[1] if name in chosen else torch.tensor(0)
            for name, dtype in pairs
        ]
        return [int(share) for share in shares]

    totals = ranks.sum_over_ranks(ranks.on_all(sums))
    if totals is None:
        return {}  # of ranks that do not exist
    if ranks.rank() == 0 and (without := len(request.keys() - {name for name, _ in pairs})):
        ranks.print_line(
            f"NOTE: {without} tensors are not cut by rows: of them only the write is proven"
        )
    return dict(zip(pairs, totals, strict=True))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in `dtype`, with the one NaN that a cast on the CPU gives."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.detach().to(dtype)
    if dtype.is_floating_point and cast.device.type != "cpu":
        local_tensor(cast).nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    return cast


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
