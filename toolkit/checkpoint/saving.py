"""Saving: the state of a run into a committed checkpoint, at once or behind the loop.

Owns the order of a save and what of it every rank does. Does not know the model's class; the assets
for an export are copied, not understood.

[Note: saving behind the loop] With `async_save` the loop waits only until the tensors are copied to
host memory and everything small is snapshot. Writing, hashing, commit and pruning follow in a
thread, with a process group of their own: threads that share one with the loop hang. One save at a
time: the next one waits for it, and raises what it failed with, as `wait` and the end of the run
do.
"""

import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.checkpoint import commit, retention, rng_state
from toolkit.checkpoint.durable import disk_error, disk_errors
from toolkit.checkpoint.shards import HashingWriter
from toolkit.checkpoint.state import TrainState, optimizer_tensors, state_text
from toolkit.checkpoint.store import Folder, Place, files_below, where
from toolkit.config.retention import retention as policy_of
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError
from toolkit.formats import described, laid_out_as, part_digests, whole_rows
from toolkit.models.peft_model import model_tensors
from toolkit.training import background

MANIFEST_VERSION = 2
DCP, HF, RNG = "dcp", "hf", "rng"
_CHANNEL, _GATHERED = "checkpoint", "gathered"


@dataclass(frozen=True)
class _Snapshot:
    """Everything of one save, which does not change any more."""

    run: Folder
    cfg: CheckpointConfig
    step: int
    target: Folder
    """What `commit.begin` gave."""
    folder: Path
    """`target`; on a store a folder of this rank's own for small files."""
    tensors: dict[str, torch.Tensor]
    model: dict[str, torch.Tensor]
    gathered: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]
    content: str
    """Of state.json; empty on all ranks but the first."""
    assets: Any

    @property
    def failed(self) -> str:
        return f"checkpoint of step {self.step} could not be written"

    @property
    def store(self) -> Place | None:
        return self.target if isinstance(self.target, Place) else None


def save(state: TrainState, run_dir: str | Folder, cfg: CheckpointConfig) -> str:
    """Write and commit a checkpoint of `state`, prune old ones; return its path. Collective.

    `run_dir` may be a URL of an object store, `s3://bucket/run`.

    Each rank writes its shards. A failure or a kill at any moment leaves the checkpoints that were
    committed before as they are. Committed when the call returns; with `cfg.async_save` it returns
    as soon as the state is copied (a copy of this rank's parameters and optimizer state in host
    memory, kept for the next save), and the path is that of the checkpoint to be. See
    [Note: saving behind the loop].

    Raises:
        CheckpointError: on every rank, when any rank could not write; with `cfg.async_save` by the
            next `save`, `wait` or the end of the run.
    """
    wait()
    begun = time.perf_counter()
    ranks.object_group(_CHANNEL)  # every rank is here now, and not when it is needed
    run = ranks.on_all(lambda: where(run_dir))
    snapshot = _snapshot(state, run, cfg)
    if not cfg.async_save:
        return _write(snapshot)
    blocked = time.perf_counter() - begun

    def write_behind() -> None:
        with ranks.exchanges_over(_CHANNEL):
            path = _write(snapshot)
        if ranks.rank() == 0:
            print(
                f"committed {path} after {time.perf_counter() - begun:.3f} s, of which the loop "
                f"waited {blocked:.3f} s",
                flush=True,
            )

    background.start(f"the checkpoint of step {state.step}", write_behind)
    return str(snapshot.store or snapshot.folder.parent / commit.step_name(state.step))


def wait() -> None:
    """Return when what `save` began is committed; at once, if nothing is under way.

    Raises:
        CheckpointError: on every rank, when any rank could not write.
    """
    background.wait()


def tensor_digests(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return name -> {"shape", "dtype", "digest"} of every model tensor. Collective; see
    `toolkit.formats.digests`.
    """
    tensors = model_tensors(model)
    lanes = part_digests(tensors, whole_rows(tensors))
    return described(tensors, _summed(ranks.gather(lanes)))


def _snapshot(state: TrainState, run: Folder, cfg: CheckpointConfig) -> _Snapshot:
    """Begin a save: make its folder, and take what the loop may change. Collective."""
    content: list[str] = []  # of rank 0 alone; made where its failure is everyone's

    def begin() -> str:
        content.append(state_text(state))
        return str(commit.begin(run, state.step))

    target = where(ranks.on_main(begin))
    folder = target if isinstance(target, Path) else ranks.on_all(_scratch)
    try:
        model = model_tensors(state.model)
        gathered = whole_rows(model)
        tensors = {**model, **optimizer_tensors(state)}
        if cfg.async_save:
            # A gathered tensor may be the live one: where one rank holds all of it.
            live: dict[Any, torch.Tensor] = dict(tensors)
            live |= {(_GATHERED, n): t for n, t in gathered.items()}
            copies = ranks.on_all(lambda: _copied(live))
            tensors = {n: copies[n] for n in tensors}
            gathered = {n: copies[_GATHERED, n] for n in gathered}
        return _Snapshot(
            run,
            cfg,
            state.step,
            target,
            folder,
            tensors,
            {n: tensors[n] for n in model},
            gathered,
            rng_state.snapshot(),
            "".join(content),
            getattr(state.model, "hf_assets", None),
        )
    except BaseException:
        _remove(folder, target)
        raise


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="checkpoint-"))


# Room for the copies of one save; filling fresh pages, let alone pinning them, takes longer than
# the copy, so that the next save uses it again.
_room: dict[Any, torch.Tensor] = {}


@torch.no_grad()
def _copied(tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Return copies of this rank's parts in host memory, laid out like `tensors`; they last until
    the next call. Pinned where they come from a device.
    """
    kept = dict(_room)
    _room.clear()
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        room = kept.pop(name, None)
        if room is None or room.shape != local.shape or room.dtype != local.dtype:
            pinned = local.device.type != "cpu"
            room = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
        _room[name] = room.copy_(local, non_blocking=True)
        devices.add(local.device)
        copies[name] = laid_out_as(tensor, room) if isinstance(tensor, DTensor) else room
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return copies


def _write(snapshot: _Snapshot) -> str:
    """Write everything, while the digests are made; commit; prune. Collective."""
    folder, group = snapshot.folder / DCP, ranks.object_group(_CHANNEL)
    writer = HashingWriter(
        folder,
        snapshot.store / DCP if snapshot.store else None,
        ranks_here=ranks.ranks_here(),
    )
    try:
        with ThreadPoolExecutor(1, "digests") as pool:
            digests = pool.submit(part_digests, snapshot.model, snapshot.gathered)
            with disk_errors(snapshot.failed):
                dcp.save(
                    snapshot.tensors,
                    storage_writer=writer,
                    process_group=group,
                    no_dist=group is None,
                )
            parts = ranks.gather_results(lambda: (_write_small(snapshot, writer), digests.result()))
        path = ranks.on_main(lambda: str(_commit(snapshot, parts)))
    except CheckpointException as error:
        rank, first = next(iter(error.failures.items()), (0, error))
        cause = first[0] if isinstance(first, tuple) else first
        if isinstance(cause, CheckpointError):
            named = CheckpointError(f"{snapshot.failed}: {cause}")
        else:
            named = disk_error(snapshot.failed, cause)
        # Every rank has it; the first that failed prints it.
        named.already_reported = ranks.rank() != rank  # type: ignore[attr-defined]
        raise named from error
    finally:
        _remove(snapshot.folder, snapshot.target)  # still under its temporary name: it failed
    policy = policy_of(snapshot.cfg)
    ranks.on_main(lambda: [str(gone) for gone in retention.prune(snapshot.run, policy)])
    return path


def _write_small(snapshot: _Snapshot, writer: HashingWriter) -> dict[str, dict[str, Any]]:
    """Write what is not tensors; return size and sha256 of every file of this rank."""
    folder = snapshot.folder
    files = {f"{DCP}/{name}": entry for name, entry in writer.files.items()}
    with disk_errors(snapshot.failed):
        names = [f"{RNG}/{rng_state.write(folder / RNG, ranks.rank(), snapshot.rng)}"]
        if ranks.rank() == 0:
            (folder / commit.STATE).write_text(snapshot.content, "utf-8")
            names += [commit.STATE, f"{DCP}/.metadata"]
            if snapshot.assets is not None:
                (folder / HF).mkdir()
                snapshot.assets.save(folder / HF)
                if (entry := _adapter(snapshot)) is not None:
                    text = json.dumps(entry["config"], indent=2) + "\n"
                    (folder / HF / "adapter_config.json").write_text(text, "utf-8")
                names += [f"{HF}/{n}" for n in files_below(folder / HF)]
        return files | commit.hash_files(folder, names, snapshot.store)


def _commit(
    snapshot: _Snapshot, parts: list[tuple[dict[str, dict[str, Any]], torch.Tensor]]
) -> Folder:
    manifest = {
        "version": MANIFEST_VERSION,
        "step": snapshot.step,
        "files": {name: entry for files, _ in parts for name, entry in files.items()},
        "tensors": described(snapshot.model, _summed([lanes for _, lanes in parts])),
    }
    if (entry := _adapter(snapshot)) is not None:
        manifest["adapter"] = entry
    with disk_errors(snapshot.failed):
        return commit.commit(snapshot.target, snapshot.step, manifest)


def _adapter(snapshot: _Snapshot) -> dict[str, Any] | None:
    """Return what state.json says of adapters; on the first rank."""
    return json.loads(snapshot.content).get("adapter")


def _remove(folder: Path, target: Folder) -> None:
    """Remove what a save leaves on this machine's disk; on a store the next save does."""
    if (isinstance(target, Place) or ranks.rank() == 0) and folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def _summed(lanes: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(lanes).sum(0)  # int64 wraps
