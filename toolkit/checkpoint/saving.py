"""Saving: the state of a run into a committed checkpoint, at once or behind the loop.

[Note: saving behind the loop] With `async_save` (by default on accelerators where the copies fit
host memory) the loop waits only until the tensors are copied to
host memory and everything small is snapshot. Writing, hashing, commit and pruning follow in a
thread, with a process group of their own: threads that share one with the loop hang. One save at a
time: the next one waits for it, and raises what it failed with, as `wait` and the end of the run
do.

[Note: a save that fails by the disk] A disk that is full or read-only for an hour need not end a
run of weeks: such a save may be a warning, so many times in a row. Every rank counts alike, since
every rank learns the same error (`StorageError`). Anything else that fails is a fault of the state
or of the code, and ends the run.

[Note: proof of a save] Before anything is copied each rank sums the bits of what it will write, on
the device, model and optimizer (`formats.bit_sums`). The bytes that go to a file are summed on
their way and compared; the manifest keeps the sums, and a resume compares them with the tensors
that it has filled, on the device again. So a copy that came late, or a bit that a device, memory or
a disk changed on the way, is an error that names the tensor. Costs two passes over the bytes, one
of them on the device.
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor

from toolkit import formats, ranks
from toolkit.checkpoint import commit, lock
from toolkit.checkpoint.commit import (
    CHECKPOINTS,
    ROW_SUMS,
    STATE,
    Files,
    latest_attempts,
    list_attempts,
)
from toolkit.checkpoint.local_folder import raise_disk_errors
from toolkit.checkpoint.reference_file import FILE, PARTS, delete_parts
from toolkit.checkpoint.shards import HashingWriter, names_to_write, write_shards
from toolkit.checkpoint.state import (
    TrainState,
    format_state,
    optimizer_tensors,
    snapshot_rng,
    write_rng,
)
from toolkit.checkpoint.store import Folder, parse_location, read_json_object, storage_of
from toolkit.config.published import get_mapping
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError, StorageError
from toolkit.formats import Tensors, local_tensor
from toolkit.formats.bit_sums import part_sums
from toolkit.formats.container_memory import container_memory
from toolkit.formats.layout import cut_by_rows
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.tables import size_text
from toolkit.training import background

MANIFEST_VERSION = 3
DCP, HF, RNG = "dcp", "hf", "rng"
CHANNEL = "checkpoint"
# Share of the free memory of a machine or container that `async_save: auto` takes for copies.
_SHARE = 0.5
_PINNED = 2  # times their bytes, at most: torch takes page-locked memory in powers of two


def save(
    state: TrainState, run_dir: str | Folder, cfg: CheckpointConfig, *, may_fail: bool = False
) -> str:
    """Write and commit a checkpoint of `state`, prune old ones; return its path. Collective.

    `run_dir` may be a URL of an object store. Each rank writes its shards. A failure or a kill at
    any moment leaves the checkpoints that were committed before as they are. Committed when the
    call returns; with `cfg.async_save` it returns as soon as the state is copied to host memory,
    which is kept for the next save. See [Note: saving behind the loop].

    Where it `may_fail`, since training goes on and saves again, a disk that is full or broken makes
    a warning, `cfg.max_failed_saves` times in a row; the path is "" then (behind the loop nobody
    knows yet: `state.saves.failed`). See [Note: a save that fails by the disk].

    Raises:
        StorageError: on every rank, when a disk or a store refused; with `cfg.async_save` by the
            next `save`, `wait` or the end of the run.
        CheckpointError: so, when any rank could not write for another reason.
    """
    background.wait()
    begun = time.perf_counter()
    ranks.object_group(CHANNEL)  # every rank is here now, and not when it is needed
    ranks.node_indices()
    run = ranks.on_all(lambda: parse_location(run_dir))
    model, optimizer = model_tensors(state.model), optimizer_tensors(state)
    needed = sum(t.numel() * t.itemsize for t in (*model.values(), *optimizer.values()))
    needed += sum(len(file.content) for file in state.files.values())
    failed = state.saves.failed
    with _tolerate_disk_failure(needed, run, cfg, may_fail, failed):
        behind = _resolve_async_save(state, model | optimizer, cfg)
        snapshot = _Snapshot(state, model, optimizer, run, cfg, behind)
        if not behind:
            return snapshot.write()
        blocked = time.perf_counter() - begun
        path = str(storage_of(snapshot.target).committed_as(state.step))

        def write_behind() -> None:
            with (
                ranks.use_channel(CHANNEL),
                _tolerate_disk_failure(needed, run, cfg, may_fail, failed, path),
            ):
                snapshot.write()
                ranks.log_once(
                    f"committed {path} after {time.perf_counter() - begun:.3f} s, of which the "
                    f"loop waited {blocked:.3f} s"
                )

        background.start(f"the checkpoint of step {state.step}", write_behind)
        return path
    return ""


def saved_line(path: str) -> str:
    """Return the line that says where `save`, which returned `path`, has saved or is saving."""
    return path and f"{'saving' if background.is_pending() else 'saved'} {path}"


def _resolve_async_save(state: TrainState, tensors: Tensors, cfg: CheckpointConfig) -> bool:
    """Return whether the loop goes on while this is written. `auto` is decided at a run's first
    save, where rank 0 says so; collective then.
    """
    if cfg.async_save != "auto":
        return cfg.async_save
    saves = state.saves
    if saves.behind is None:
        parts = [local_tensor(t) for t in tensors.values()]
        own = sum(part.nbytes for part in parts) * _PINNED
        free = min(psutil.virtual_memory().available, container_memory().free)
        room = _SHARE * free / ranks.local_world_size()
        on_device = any(part.device.type != "cpu" for part in parts)
        asked = on_device and not has_adapters(state.model)
        saves.behind = asked and ranks.min_over_ranks(room - own) >= 0
        if asked:
            ranks.log_once(
                f"auto       async_save {str(saves.behind).lower()} (copies of up to "
                f"{size_text(own)} a process, {size_text(int(room))} of host memory are for them)"
            )
    return saves.behind


@contextlib.contextmanager
def _tolerate_disk_failure(
    needed: int,
    run: Folder,
    cfg: CheckpointConfig,
    may_fail: bool,
    failed: list[str],
    path: str = "",
) -> Iterator[None]:
    """Make a warning of a disk that refuses, while it may; else say what it lacks. Collective.
    `failed` is given the `path`.
    """
    try:
        yield
    except StorageError as error:
        failed.append(path)
        text = str(error) + ranks.on_main(lambda: _describe_missing_space(needed, run))
        left = cfg.max_failed_saves - len(failed)
        setting = f"checkpoint.max_failed_saves {cfg.max_failed_saves}"
        if may_fail and left >= 0:
            ranks.log_once(
                f"WARNING: {text}. Training goes on; {left} more in a row may fail ({setting})"
            )
            return
        if may_fail:
            text += f". It is save {len(failed)} in a row that failed ({setting})"
        named = StorageError(text)
        named.already_reported = getattr(error, "already_reported", False)  # type: ignore[attr-defined]
        named.agreed = True  # type: ignore[attr-defined]
        raise named from error


def _describe_missing_space(needed: int, run: Folder) -> str:
    """Return what a checkpoint of `needed` bytes lacks, when a save has failed and is removed."""
    try:
        free = storage_of(run).free_bytes()
    except OSError:
        return ""  # a disk that does not even tell this; what it refused was said
    if free is None:
        return ""
    missing = f", {size_text(needed - free)} are missing" if needed > free else ""
    return f". It takes {size_text(needed)}, {size_text(free)} are free on {run}{missing}"


class _Snapshot:
    """Everything of one save, which does not change any more."""

    def __init__(
        self,
        state: TrainState,
        model: Tensors,
        optimizer: Tensors,
        run: Folder,
        cfg: CheckpointConfig,
        behind: bool,
    ) -> None:
        """Make the folder, and take what the loop may change: of the tensors copies, where it does
        not wait. Collective.
        """
        self.run, self.cfg, self.step, self.saves = run, cfg, state.step, state.saves
        self.failed = f"checkpoint of step {state.step} could not be written"
        self.assets = getattr(state.model, "hf_assets", None)
        self.files = dict(state.files) if ranks.rank() == 0 else {}
        self.content, self.adapter = "", None  # of state.json; on rank 0

        position = None if state.data is None else state.data.state_dict()

        def begin() -> str:
            lock.check_held()
            self.content = format_state(state, position)
            self.adapter = json.loads(self.content).get("adapter")
            return str(commit.begin_attempt(run, state.step))

        self.target = parse_location(ranks.on_main(begin))
        # On a store a folder of this rank's own, for small files.
        self.folder = ranks.on_all(self._scratch)
        try:
            self.tensors = model | optimizer
            self.sums = ranks.on_all(lambda: _sum_local_parts(self.tensors))
            if behind:
                self.tensors = ranks.on_all(lambda: _copy_to_host(self.tensors, self.saves.room))
            self.rng = snapshot_rng()
        except BaseException:
            self.remove()
            raise

    def _scratch(self) -> Path:
        with raise_disk_errors(self.failed):
            return storage_of(self.target).scratch()

    def write(self) -> str:
        """Write everything, commit, prune. Collective."""
        expected = {n: (nbytes, of_bytes) for n, (nbytes, of_bytes, _) in self.sums.items()}
        writer = HashingWriter(
            self.folder / DCP,
            self.target / DCP,
            ranks_here=ranks.local_world_size(),
            expected=expected,
            in_host_memory=all(local_tensor(t).is_cpu for t in self.tensors.values()),
        )
        try:
            write_shards(self.tensors, writer, self.failed, self.saves)
            parts = ranks.gather_results_to_main(
                lambda: (self._write_rest(writer.files), self._row_sums())
            )
            path = ranks.on_main(lambda: str(self._commit(parts)))
        finally:
            self.remove()  # still under its temporary name: it failed
        self.saves.failed.clear()
        ranks.on_main(self._prune)
        return path

    def _prune(self) -> None:
        prune_checkpoints(self.run, self.cfg)
        if FILE in self.files:  # its parts are in the checkpoint now
            delete_reference_parts(self.run)

    def _write_rest(self, shards: Files) -> Files:
        """Write what is not tensors; return size and sha256 of every file of this rank."""
        folder = self.folder
        with raise_disk_errors(self.failed):
            names = [f"{RNG}/{write_rng(folder / RNG, ranks.rank(), self.rng)}"]
            if ranks.rank() == 0:
                (folder / commit.STATE).write_text(self.content, "utf-8")
                names += [commit.STATE, f"{DCP}/{formats.METADATA_FILE}"]
                if self.assets is not None:
                    (folder / HF).mkdir()
                    self.assets.save(folder / HF)
                    if self.adapter is not None:
                        text = json.dumps(self.adapter["config"], indent=2) + "\n"
                        (folder / HF / "adapter_config.json").write_text(text, "utf-8")
                    names += [f"{HF}/{n}" for n in storage_of(folder / HF).files()]
            names += [self._write_file(name) for name in self.files]
            small = commit.store_files(folder, names, self.target)
        for name, file in self.files.items():
            if small[name]["sha256"] != file.sha256:
                raise CheckpointError(
                    f"{self.failed}: {name} is not what it was at the start of the run; the memory "
                    "of this machine or its disk is at fault: start again on another machine"
                )
        return {f"{DCP}/{name}": entry for name, entry in shards.items()} | small

    def _write_file(self, name: str) -> str:
        """Write one of the state's files; return its name."""
        content = self.files[name].content
        with raise_disk_errors(f"{self.failed}: {name} of {len(content):,} bytes"):
            (self.folder / name).write_bytes(content)
        return name

    def _row_sums(self) -> torch.Tensor:
        """Return this rank's share of the sums of rows, int64 [tensors], in the order of names."""
        return torch.tensor([self.sums.get(n, (0, 0, 0))[2] for n in self._summed()])

    def _summed(self) -> list[str]:
        return sorted(name for name, tensor in self.tensors.items() if cut_by_rows(tensor))

    def _commit(self, parts: list[tuple[Files, torch.Tensor]]) -> Folder:
        sums = torch.stack([share for _, share in parts]).sum(0)  # int64 wraps
        manifest = {
            "version": MANIFEST_VERSION,
            "step": self.step,
            "files": {name: entry for files, _ in parts for name, entry in files.items()},
            ROW_SUMS: dict(zip(self._summed(), sums.tolist(), strict=True)),
            **({} if self.adapter is None else {"adapter": self.adapter}),
        }
        with raise_disk_errors(self.failed):
            return commit.commit(self.target, self.step, manifest)

    def remove(self) -> None:
        """Remove what a save leaves on this machine's disk; on a store the next save does."""
        if self.folder != self.target or ranks.rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _sum_local_parts(tensors: Tensors) -> dict[str, tuple[int, int, int]]:
    """Return of each tensor that this rank writes the bytes of its part, their sum and that of its
    rows, as the device has them.
    """
    parts = {name: tensors[name] for name in names_to_write(tensors)}
    return {n: (local_tensor(t).nbytes, *part_sums(t).tolist()) for n, t in parts.items()}


@torch.no_grad()
def _copy_to_host(tensors: Tensors, rooms: dict[Any, torch.Tensor]) -> Tensors:
    """Return copies of this rank's parts in host memory, laid out like `tensors`, in `rooms`, so
    that they last until the next call. Pinned where they come from a device.
    """
    kept = dict(rooms)
    rooms.clear()
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        local = formats.local_tensor(tensor)
        room = kept.pop(name, None)
        if room is None or room.shape != local.shape or room.dtype != local.dtype:
            pinned = local.device.type != "cpu"
            room = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
        rooms[name] = room.copy_(local, non_blocking=True)
        devices.add(local.device)
        copies[name] = formats.like_dtensor(tensor, room) if isinstance(tensor, DTensor) else room
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return copies


def steps_to_delete(verified: Mapping[int, Mapping[str, float]], cfg: CheckpointConfig) -> set[int]:
    """Return the steps that may be deleted of those that are sound, given with their metrics; the
    others are no candidates, and do not count as kept either.
    """
    if cfg.save_total_limit is None:
        return set()
    kept = set(sorted(verified)[-max(2, cfg.save_total_limit) :])
    metric, greater = cfg.best_metric()
    sign = -1 if greater else 1
    measured = {
        step: values[metric]
        for step, values in verified.items()
        if math.isfinite(values.get(metric, math.nan))
    }
    ranked = sorted(measured, key=lambda step: (sign * measured[step], -step))
    return set(verified) - kept - set(ranked[: int(cfg.keep_best)])


def prune_checkpoints(run: str | Folder, cfg: CheckpointConfig) -> None:
    """Delete the checkpoints that `cfg` does not keep, and leftovers: unfinished, half-deleted
    and superseded folders. Call it after the newest one is committed.

    A checkpoint counts as kept only when it `is_intact`; `resume` hashes the shards, too. Others are
    not deleted, nor are links: somebody else put them there. What resists makes a warning.
    """
    run = parse_location(run)
    with _warn_on_disk_error(f"old checkpoints in {run / CHECKPOINTS} could not be deleted"):
        attempts = list_attempts(run)
        newest = latest_attempts(attempts)
        verified: dict[int, dict[str, float]] = {}
        for step, attempt in newest.items():
            folder = attempt.folder
            if not folder.is_symlink() and commit.is_intact(folder):
                with contextlib.suppress(CheckpointError):  # its state is damaged: not sound
                    metrics = get_mapping(read_json_object(folder / STATE) or {}, "metrics").items()
                    verified[step] = {k: v for k, v in metrics if isinstance(v, int | float)}
        gone = [a.folder for a in attempts if a.kind in commit.LEFTOVER_KINDS]
        for a in attempts:
            superseded = a.step in verified and a.order < newest[a.step].order
            saved = a.kind == "saved" and commit.is_committed(a.folder)
            if superseded and (saved or a.kind == "old"):
                gone.append(a.folder)
        gone += [newest[step].folder for step in sorted(steps_to_delete(verified, cfg))]
        commit.delete_attempts(gone)


def delete_reference_parts(run: Folder) -> None:
    """Delete the parts of the reference pass, which a committed checkpoint holds. What resists
    makes a warning.
    """
    with _warn_on_disk_error(f"{run / PARTS} could not be deleted"):
        delete_parts(run)


@contextlib.contextmanager
def _warn_on_disk_error(what: str) -> Iterator[None]:
    """Say what went wrong, and go on: a run that has saved does not end over an old checkpoint."""
    try:
        with raise_disk_errors(what):
            yield
    except CheckpointError as error:
        ranks.print_line(f"WARNING: {error}. The next save tries again")
