"""A model that is still training becomes a Hugging Face folder: one writer, all ranks help.

Owns the way of one tensor after the other from the ranks' shards to rank 0. What the folder
consists of is decided by `export_plan`, as for a checkpoint on the disk: the same weights give the
same folder. Knows nothing of the loop.

[Note: who waits where] Rank 0 writes, and says before each gather which tensors come next. The
others wait for that on the gloo group that waits a day, and enter the device's all-gather only when
rank 0 enters it too: however slow the disk is, no accelerator collective is left open. A failure of
rank 0 is what it says next, so all ranks raise.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.adapters.base import adapter_entry
from toolkit.adapters.peft_folder import CONFIG_FILE
from toolkit.checkpoint.commit import EXPORTS, step_name
from toolkit.checkpoint.facts import run_facts
from toolkit.errors import ToolkitError
from toolkit.export.adapter import adapter_origin, make_adapter_plan
from toolkit.export.folder import Timing, check_output, check_space, finish, staged, write_weights
from toolkit.export.plan import Plan, make_plan, model_of_assets, parse_dtype, parse_size
from toolkit.export.streaming import Mover, Target
from toolkit.formats.hf_folder import ExportGroup, assets_of, convert_back
from toolkit.models.peft_model import has_adapters, model_tensors

_PREFIX = "model."  # what `model_tensors` puts before a parameter's name
_ORIGIN = {"checkpoint": None, "step": None, "run": None}


def export_live(
    model: nn.Module,
    output: str | Path,
    *,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    origin: dict[str, Any] | None = None,
) -> str:
    """Write the weights of a sharded model as a Hugging Face folder; return its path. Collective.
    Of a model with adapters it is the PEFT folder of those.

    The folder is that of `consolidate` on a checkpoint of the same weights, to the byte, but for
    what its manifest says of its origin. Tensors are gathered one after the other, those that are
    converted together (fused experts) a group at a time: each rank holds one of them at most.
    Costs one all-gather of the model and rank 0's write; the other ranks wait.

    Args:
        model: of `build_on_meta`, with its weights; sharded or not.
        output: a folder that does not exist or is empty, on a disk that rank 0 sees.
        dtype: as for `consolidate`.
        max_shard_size: as for `consolidate`.
        origin: what the export's manifest says of where the weights are from: `checkpoint` (sha256
            of its manifest), `step` and `run`.

    Raises:
        ExportError: on every rank: the output is in the way, there is no space, or rank 0 could not
            write.
    """
    tensors = {n.removeprefix(_PREFIX): t for n, t in model_tensors(model).items()}
    if ranks.rank() != 0:
        return _serve(tensors)
    try:
        path = _write(model, tensors, output, dtype, max_shard_size, origin or {})
    except BaseException as error:
        ours = isinstance(error, ToolkitError)
        kind = type(error) if ours else ToolkitError
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        ranks.broadcast(("failed", (kind, text)))
        raise
    ranks.broadcast(("done", path))
    return path


def export_step(model: nn.Module, run_dir: str | Path, step: int) -> str:
    """Write the model after `step` to `exports/step-N` of the run; return the path. Collective.

    One that is there, of a run that went on from an earlier step and comes by again, may hold other
    weights: it is renamed to `step-N.old-*`, which rank 0 says.

    Raises:
        ExportError: see `export_live`.
    """
    target = Path(run_dir) / EXPORTS / step_name(step)
    ranks.on_main(lambda: _step_aside(target))
    facts = ranks.on_main(lambda: run_facts(run_dir, step) or None)
    return export_live(model, target, origin={"step": step, "run": facts})


def exported(run_dir: str | Path, step: int) -> bool:
    """Whether the run has an export of `step`; the same on every rank. Collective."""
    return ranks.on_main((Path(run_dir) / EXPORTS / step_name(step)).exists)


def _step_aside(target: Path) -> None:
    if os.path.lexists(target):
        old = target.with_name(f"{target.name}.old-{os.urandom(4).hex()}")
        os.rename(target, old)
        print(f"NOTE: {target} was there already; it is now {old}", flush=True)


def _serve(tensors: dict[str, torch.Tensor]) -> str:
    """Take part in the gathers that rank 0 asks for, until it is done."""
    while True:
        said: Any = ranks.broadcast(None)
        what, content = said
        if what == "done":
            return content
        if what == "failed":
            kind, text = content
            error = kind(f"{text} (on rank 0)")
            error.already_reported = True
            raise error
        for name in content:
            _whole(tensors[name])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather(tensors: dict[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """Return the whole tensors `names` in host memory, with the other ranks' help."""
    ranks.broadcast(("gather", names))
    return {name: _whole(tensors[name]).cpu() for name in names}


def _write(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    output: str | Path,
    dtype: str,
    max_shard_size: str | int,
    origin: dict[str, Any],
) -> str:
    override, limit = parse_dtype(dtype), parse_size(max_shard_size)
    target = check_output(output)
    with tempfile.TemporaryDirectory() as folder:
        # As a checkpoint carries them: what follows is the same for both.
        hf = Path(folder)
        assets_of(model).save(hf)
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        where = "the running model"
        if has_adapters(model):
            entry = adapter_entry(model)
            (hf / CONFIG_FILE).write_text(json.dumps(entry["config"]), "utf-8")
            plan = make_adapter_plan(hf, shapes, override, where=where, base=entry)
            origin = origin | {"adapter": adapter_origin(hf, entry)}
        else:
            plain, loaded = model_of_assets(hf)
            plan = make_plan(hf, plain, loaded, shapes, override, limit, where=where)
    check_space(target, plan.total_bytes)
    # Weights that go on changing are never gone on with: each export has a name of its own.
    with staged(target, plan.digest(), os.urandom(16).hex()) as staging:

        def fill(name: str, file: Target, advance: Callable[[int], Any]) -> None:
            with Mover(advance) as mover:
                for group, members in _groups_of(plan, name):
                    _write_group(plan, group, members, tensors, mover, file)

        write_weights(plan, staging, fill, Timing())
        finish(plan, staging, {**_ORIGIN, **origin, "dtype": dtype})
    return str(Path(output).expanduser())


def _groups_of(plan: Plan, file: str) -> list[tuple[ExportGroup, list[str]]]:
    """Return the groups with outputs in a weight file, and which those are, in their order."""
    found = []
    for group in plan.groups:
        members = [n for n in group.outputs if plan.output(n).file == file]
        if members:
            found.append((group, members))
    return found


def _write_group(
    plan: Plan,
    group: ExportGroup,
    members: list[str],
    tensors: dict[str, torch.Tensor],
    mover: Mover,
    file: Target,
) -> None:
    stored = {name: plan.stored[name] for name in group.sources}
    whole = _gather(tensors, list(stored.values()))
    sources = {name: whole[held] for name, held in stored.items()}
    views = {n: plan.views[plan.names[n]] for n in members}
    computed = convert_back(plan.model, dict(sources)) if None in views.values() else {}
    for name, view in views.items():
        output = plan.output(name)
        if view is None:
            part = computed.pop(name)
        else:
            part = torch.as_strided(
                sources[view.source].contiguous(), view.size, view.stride, view.offset
            )
        mover.write(part, file, output.begin, output.dtype, plan.names[name])
