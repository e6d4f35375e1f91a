"""Save the state of a run into a committed checkpoint, during or behind training.

[Note: saving behind the loop] With `async_save` (the default on accelerators if the copies fit into
host memory), training waits only until the tensors are copied to host memory and everything small
is captured. A thread then writes, hashes, commits and deletes old checkpoints. It uses a separate
process group, because two threads that share one hang. There is one save at a time: the next save
waits for it and raises its error, and so do `wait` and the end of the run.

[Note: a save that fails by the disk] A disk that is full or read-only for an hour need not end a
run of weeks. Such a save may be a warning, a limited number of times in a row. All ranks count
alike, because all of them get the same error (`StorageError`). Any other failure is a bug in the
state or the code, and ends the run.

[Note: proof of a save] Before anything is copied, each rank sums the bits of what it will write, of
model and optimizer, on the device (`formats.bit_sums`). The bytes that go to a file are summed
while they are written and compared. The manifest keeps the sums, and a resume compares them with
the tensors that it has loaded, again on the device. So a copy that came too late, or a bit that a
device, memory or a disk flipped, is an error that names the tensor. Costs two passes over the
bytes, one of them on the device.
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
from toolkit.checkpoint.commit import Files, latest_attempts, list_attempts
from toolkit.checkpoint.local_folder import raise_disk_errors
from toolkit.checkpoint.names import CHECKPOINTS, DCP, HF, RNG, ROW_SUMS, STATE
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
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.tables import size_text
from toolkit.training import background

MANIFEST_VERSION = 3
CHANNEL = "checkpoint"
# Share of the free memory of a machine or container that `async_save: auto` takes for copies.
_SHARE = 0.5
_PINNED = 2  # times their bytes, at most: torch takes page-locked memory in powers of two


def save(
    state: TrainState, run_dir: str | Folder, cfg: CheckpointConfig, *, may_fail: bool = False
) -> str:
    """Save and commit a checkpoint of `state`, and delete old ones; return its path. Collective.

    First waits for an earlier save in the background. Each rank writes its shards. A failure or a
    kill at any moment leaves earlier checkpoints unchanged. With `cfg.async_save`, the call returns
    as soon as the state is copied to host memory, and a thread writes and commits the copies.
    Without it, the checkpoint is committed when the call returns. See [Note: saving behind the
    loop].

    Args:
        state: the state to save.
        run_dir: the run directory, or the URL of a folder on an object store.
        cfg: which checkpoints to keep, and how to save.
        may_fail: if a disk is full or broken, log a warning instead of raising, up to
            `cfg.max_failed_saves` times in a row. See [Note: a save that fails by the disk].

    Returns:
        The path or URL of the checkpoint; "" if the save failed and `may_fail` is set. If a save in
        the background fails later, its path is added to `state.saves.failed`.

    Raises:
        StorageError: on every rank, if a disk or a store failed. With `cfg.async_save`, the next
            `save`, `wait` or the end of the run raises it.
        CheckpointError: likewise, if any rank could not write for another reason.
    """
    background.wait()
    start_time = time.perf_counter()
    # Creating the group and counting the machines is collective. Do both while every rank is here.
    ranks.object_group(CHANNEL)
    ranks.node_indices()
    run = ranks.on_all(lambda: parse_location(run_dir))
    model, optimizer = model_tensors(state.model), optimizer_tensors(state)
    needed_bytes = sum(t.numel() * t.itemsize for t in (*model.values(), *optimizer.values()))
    needed_bytes += sum(len(file.content) for file in state.files.values())
    failed = state.saves.failed
    with _tolerate_disk_failure(needed_bytes, run, cfg, may_fail, failed):
        behind = _resolve_async_save(state, model | optimizer, cfg)
        snapshot = _Snapshot(state, model, optimizer, run, cfg, behind)
        if not behind:
            return snapshot.write()
        blocked = time.perf_counter() - start_time
        path = str(storage_of(snapshot.target).committed_path(state.step))

        def write_behind() -> None:
            """Write and commit the copies, and log the times; runs in the background thread."""
            with (
                ranks.use_channel(CHANNEL),
                _tolerate_disk_failure(needed_bytes, run, cfg, may_fail, failed, path),
            ):
                snapshot.write()
                seconds = time.perf_counter() - start_time
                ranks.log_once(
                    f"committed {path} after {seconds:.3f} s, of which the loop waited "
                    f"{blocked:.3f} s"
                )

        background.start_task(f"the checkpoint of step {state.step}", write_behind)
        return path
    return ""


def saved_line(path: str) -> str:
    """Format the log line "saved PATH", or "saving PATH" while a background save is in progress.

    `path` is the result of `save`. If it is "" because the save failed, the line is "", too.
    """
    return path and f"{'saving' if background.is_pending() else 'saved'} {path}"


def _resolve_async_save(state: TrainState, tensors: Tensors, cfg: CheckpointConfig) -> bool:
    """Decide if this save runs in the background; rank 0 logs how `auto` was resolved.

    `auto` is resolved at the first save of a run; that call is collective. The result is stored in
    `state.saves` and used for all later saves. It is True if all of this holds: the model is on an
    accelerator, it has no adapters, and the copies fit into half of the free host memory on every
    rank.
    """
    if cfg.async_save != "auto":
        return cfg.async_save
    saves = state.saves
    if saves.behind is None:
        parts = [local_tensor(t) for t in tensors.values()]
        copy_bytes = sum(part.nbytes for part in parts) * _PINNED
        free = min(psutil.virtual_memory().available, container_memory().free)
        budget = _SHARE * free / ranks.local_world_size()
        on_device = any(part.device.type != "cpu" for part in parts)
        # Tensors on the CPU, and adapters, are written too fast for a copy to pay.
        is_useful = on_device and not has_adapters(state.model)
        saves.behind = is_useful and ranks.min_over_ranks(budget - copy_bytes) >= 0
        if is_useful:
            ranks.log_once(
                f"auto       async_save {str(saves.behind).lower()} (copies of up to "
                f"{size_text(copy_bytes)} a process, {size_text(int(budget))} of host memory "
                "may be used)"
            )
    return saves.behind


@contextlib.contextmanager
def _tolerate_disk_failure(
    needed_bytes: int,
    run: Folder,
    cfg: CheckpointConfig,
    may_fail: bool,
    failed: list[str],
    path: str = "",
) -> Iterator[None]:
    """Turn a StorageError in the context into a warning, if this save may fail. Collective.

    Every rank must leave the context with the same error. The message gets the space that is
    missing. If `may_fail` is False or too many saves in a row have failed, a StorageError is
    raised.

    Args:
        needed_bytes: size of the checkpoint.
        run: the run directory.
        cfg: says how many saves in a row may fail.
        may_fail: True if this save may fail.
        failed: paths of the saves that failed in a row; a failure appends `path`.
        path: path of the checkpoint, or "" if it is not known.
    """
    try:
        yield
    except StorageError as error:
        failed.append(path)
        text = str(error) + ranks.on_main(lambda: _describe_missing_space(needed_bytes, run))
        remaining = cfg.max_failed_saves - len(failed)
        setting = f"checkpoint.max_failed_saves {cfg.max_failed_saves}"
        if may_fail and remaining >= 0:
            ranks.log_once(
                f"WARNING: {text}. Training continues; {remaining} more in a row may fail "
                f"({setting})"
            )
            return
        if may_fail:
            text += f". {len(failed)} saves in a row have failed ({setting})"
        final_error = StorageError(text)
        final_error.already_reported = getattr(error, "already_reported", False)  # type: ignore[attr-defined]
        final_error.agreed = True  # type: ignore[attr-defined]
        raise final_error from error


def _describe_missing_space(needed_bytes: int, run: Folder) -> str:
    """Format the needed, free and missing space for the message on a failed save; "" if unknown."""
    try:
        free = storage_of(run).free_bytes()
    except OSError:
        # The disk does not even answer this. The error already says what it refused.
        return ""
    if free is None:
        return ""
    missing_bytes = needed_bytes - free
    missing = f", {size_text(missing_bytes)} are missing" if missing_bytes > 0 else ""
    return f". It takes {size_text(needed_bytes)}, {size_text(free)} are free on {run}{missing}"


class _Snapshot:
    """The captured state of one save, and the methods that write and commit it.

    The constructor captures or copies everything that changes, so training may continue after it.
    """

    def __init__(
        self,
        state: TrainState,
        model: Tensors,
        optimizer: Tensors,
        run: Folder,
        cfg: CheckpointConfig,
        behind: bool,
    ) -> None:
        """Create the folder and capture everything that training may change. Collective.

        If the save continues `behind` training, the tensors are copied to host memory.
        """
        self.run = run
        self.cfg = cfg
        self.step = state.step
        self.saves = state.saves
        self.failed = f"checkpoint of step {state.step} could not be written"
        self.assets = getattr(state.model, "hf_assets", None)
        self.files = dict(state.files) if ranks.rank() == 0 else {}
        self.content = ""  # text of state.json; on rank 0
        self.adapter = None  # entry of state.json; on rank 0

        position = None if state.data is None else state.data.state_dict()

        def begin() -> str:
            """Check the lock, capture state.json, and begin the checkpoint; return its location."""
            lock.check_held()
            self.content = format_state(state, position)
            self.adapter = json.loads(self.content).get("adapter")
            return str(commit.begin_attempt(run, state.step))

        self.target = parse_location(ranks.on_main(begin))
        # On a store, this is a temporary folder of this rank for small files.
        self.folder = ranks.on_all(self._make_scratch)
        try:
            self.tensors = model | optimizer
            self.sums = ranks.on_all(lambda: _sum_local_parts(self.tensors))
            if behind:
                self.tensors = ranks.on_all(lambda: _copy_to_host(self.tensors, self.saves.room))
            self.rng = snapshot_rng()
        except BaseException:
            self.remove_local_files()
            raise

    def _make_scratch(self) -> Path:
        """Return the local folder in which this rank first writes files; on a store, create it."""
        with raise_disk_errors(self.failed):
            return storage_of(self.target).scratch_folder()

    def write(self) -> str:
        """Write and commit the checkpoint, and delete old ones; return its path. Collective.

        If it fails, the local files are deleted.
        """
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
                lambda: (self._write_small_files(writer.files), self._local_row_sums())
            )
            path = ranks.on_main(lambda: str(self._commit_on_main(parts)))
        finally:
            # After a commit, the folder has another name. If it still exists, the save failed.
            self.remove_local_files()
        self.saves.failed.clear()
        ranks.on_main(self._prune)
        return path

    def _prune(self) -> None:
        """Delete old checkpoints, and `reference.parts` if this one holds all reference values.

        Only rank 0 calls this.
        """
        prune_checkpoints(self.run, self.cfg)
        # The committed checkpoint holds them.
        if FILE in self.files:
            delete_reference_parts(self.run)

    def _write_small_files(self, shards: Files) -> Files:
        """Write all files of this rank except the shards.

        Every rank writes its random state. Rank 0 also writes state.json, the assets, the settings
        of the adapter and `state.files`. On a store, the files are uploaded.

        Args:
            shards: name -> size and sha256 of the shards that this rank has written.

        Returns:
            Name -> size in bytes and sha256 of every file of this rank, including its shards.

        Raises:
            CheckpointError: a disk failed, or the content of one of `state.files` has changed since
                the start of the run.
        """
        folder = self.folder
        with raise_disk_errors(self.failed):
            names = [f"{RNG}/{write_rng(folder / RNG, ranks.rank(), self.rng)}"]
            if ranks.rank() == 0:
                (folder / STATE).write_text(self.content, "utf-8")
                names += [STATE, f"{DCP}/{formats.METADATA_FILE}"]
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
                    "or the disk of this machine is faulty: start again on another machine"
                )
        return {f"{DCP}/{name}": entry for name, entry in shards.items()} | small

    def _write_file(self, name: str) -> str:
        """Write one of `state.files` to the local folder; return its name."""
        content = self.files[name].content
        with raise_disk_errors(f"{self.failed}: {name} of {len(content):,} bytes"):
            (self.folder / name).write_bytes(content)
        return name

    def _local_row_sums(self) -> torch.Tensor:
        """Return this rank's share of each checksum: int64 [tensors], in the order of the names.

        The share is 0 for a tensor that another rank writes.
        """
        return torch.tensor([self.sums.get(n, (0, 0, 0))[2] for n in self._names_with_row_sums()])

    def _names_with_row_sums(self) -> list[str]:
        """List the sorted names of tensors with a checksum: sharded by rows, or not at all."""
        return sorted(name for name, tensor in self.tensors.items() if is_sharded_by_rows(tensor))

    def _commit_on_main(self, parts: list[tuple[Files, torch.Tensor]]) -> Folder:
        """Write the manifest and commit the checkpoint; return its final location. Only on rank 0.

        Args:
            parts: (manifest entries, result of `_local_row_sums`) of each rank.
        """
        sums = torch.stack([share for _, share in parts]).sum(0)  # int64 wraps
        manifest = {
            "version": MANIFEST_VERSION,
            "step": self.step,
            "files": {name: entry for files, _ in parts for name, entry in files.items()},
            ROW_SUMS: dict(zip(self._names_with_row_sums(), sums.tolist(), strict=True)),
            **({} if self.adapter is None else {"adapter": self.adapter}),
        }
        with raise_disk_errors(self.failed):
            return commit.commit(self.target, self.step, manifest)

    def remove_local_files(self) -> None:
        """Delete the local files of this save; errors are ignored.

        After a commit on a disk, their folder has another name, so nothing is deleted. Files that
        were already uploaded to a store stay until the next save deletes them.
        """
        if self.folder != self.target or ranks.rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def _sum_local_parts(tensors: Tensors) -> dict[str, tuple[int, int, int]]:
    """Compute checksums of the tensor parts that this rank writes, on the tensors' device.

    Returns:
        Name -> (bytes of the part, checksum of these bytes, share of the full tensor's checksum).
        The shares of all ranks add up to the `row_sums` of the manifest.
    """
    parts = {name: tensors[name] for name in names_to_write(tensors)}
    return {n: (local_tensor(t).nbytes, *part_sums(t).tolist()) for n, t in parts.items()}


@torch.no_grad()
def _copy_to_host(tensors: Tensors, buffers: dict[Any, torch.Tensor]) -> Tensors:
    """Copy this rank's parts of `tensors` to host memory, and wait until the copies are complete.

    Args:
        tensors: name -> tensor to copy.
        buffers: name -> host buffer of the last save. A buffer of the same shape and dtype is
            reused. The dict is changed to the buffers of this save; they are pinned for tensors on
            an accelerator.

    Returns:
        Name -> copy; the copy of a DTensor is a DTensor.
    """
    old_buffers = dict(buffers)
    buffers.clear()
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        local = formats.local_tensor(tensor)
        buffer = old_buffers.pop(name, None)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pinned = local.device.type != "cpu"
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
        buffers[name] = buffer.copy_(local, non_blocking=True)
        devices.add(local.device)
        copies[name] = (
            formats.like_dtensor(tensor, buffer) if isinstance(tensor, DTensor) else buffer
        )
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return copies


def steps_to_delete(verified: Mapping[int, Mapping[str, float]], cfg: CheckpointConfig) -> set[int]:
    """Choose the steps whose checkpoints exceed `save_total_limit`.

    The newest ones stay and, with `keep_best`, the one with the best metric.

    Args:
        verified: step -> metrics, for each intact checkpoint. Other checkpoints are neither deleted
            nor counted.
        cfg: the limit (None deletes nothing; at least two stay), and the metric of the best.
    """
    if cfg.save_total_limit is None:
        return set()
    newest = set(sorted(verified)[-max(2, cfg.save_total_limit) :])
    metric, greater = cfg.best_metric()
    sign = -1 if greater else 1
    measured = {
        step: values[metric]
        for step, values in verified.items()
        if math.isfinite(values.get(metric, math.nan))
    }
    ranked = sorted(measured, key=lambda step: (sign * measured[step], -step))
    return set(verified) - newest - set(ranked[: int(cfg.keep_best)])


def prune_checkpoints(run: str | Folder, cfg: CheckpointConfig) -> None:
    """Delete the checkpoints that `cfg` does not keep, and leftovers of killed or repeated saves.

    Call it after the newest checkpoint is committed. Only intact checkpoints (`is_intact`) count
    towards the limit. Damaged ones and links are not deleted. If a deletion fails, a warning is
    printed and nothing is raised.
    """
    run = parse_location(run)
    with _warn_on_disk_error(f"old checkpoints in {run / CHECKPOINTS} could not be deleted"):
        attempts = list_attempts(run)
        newest = latest_attempts(attempts)
        verified: dict[int, dict[str, float]] = {}
        for step, attempt in newest.items():
            folder = attempt.folder
            if not folder.is_symlink() and commit.is_intact(folder):
                # A checkpoint whose state.json cannot be read is not intact.
                with contextlib.suppress(CheckpointError):
                    metrics = get_mapping(read_json_object(folder / STATE) or {}, "metrics").items()
                    verified[step] = {k: v for k, v in metrics if isinstance(v, int | float)}
        to_delete = [a.folder for a in attempts if a.kind in commit.LEFTOVER_KINDS]
        for a in attempts:
            is_superseded = a.step in verified and a.order < newest[a.step].order
            is_saved = a.kind == "saved" and commit.is_committed(a.folder)
            if is_superseded and (is_saved or a.kind == "old"):
                to_delete.append(a.folder)
        to_delete += [newest[step].folder for step in sorted(steps_to_delete(verified, cfg))]
        commit.delete_attempts(to_delete)


def delete_reference_parts(run: Folder) -> None:
    """Delete `reference.parts` of a run; if that fails, print a warning.

    Call it after a committed checkpoint holds all reference values.
    """
    with _warn_on_disk_error(f"{run / PARTS} could not be deleted"):
        delete_parts(run)


@contextlib.contextmanager
def _warn_on_disk_error(failed: str) -> Iterator[None]:
    """Print a disk or store error in the context as a warning that begins with `failed`.

    The context then ends without an error, because a run must not end if an old file cannot be
    deleted.
    """
    try:
        with raise_disk_errors(failed):
            yield
    except CheckpointError as error:
        ranks.print_line(f"WARNING: {error}. The next save tries again")
