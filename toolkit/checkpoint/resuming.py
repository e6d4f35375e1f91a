"""Find the newest checkpoint of a run that verifies, and restore the state of the run from it."""

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from toolkit import ranks
from toolkit.adapters.base import refuse_other_adapters
from toolkit.checkpoint import commit
from toolkit.checkpoint.names import DCP, HF, RNG, ROW_SUMS, SHARD
from toolkit.checkpoint.saving import CHANNEL
from toolkit.checkpoint.shards import read_tensors, split_by_size
from toolkit.checkpoint.state import (
    TrainState,
    allocate_optimizer_state,
    check_model_tensors,
    get_required_entry,
    load_optimizer_state,
    optimizer_tensors,
    raise_bad_state,
    read_state,
    restore_rng,
    restore_schedule,
    rng_device,
)
from toolkit.checkpoint.store import Folder, parse_location, read_json_object, storage_of
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError, one_line
from toolkit.formats import (
    METADATA_FILE,
    Tensors,
    assets_of,
    local_tensor,
    read_metadata,
    table_from_metadata,
)
from toolkit.formats.bit_sums import part_sums, wrap_to_int64
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.formats.whole_sums import count_holders
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.tables import size_text
from toolkit.training import background, seed_everything

# Keys of config.json that do not change what the model computes in training.
NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation_autoset"),
}


def resume(state: TrainState, run_dir: str | Folder, cfg: CheckpointConfig) -> int | None:
    """Restore `state` from the newest checkpoint that verifies; return its step. Collective.

    The model must be materialised, and the number of ranks may differ from that of the save.
    Learning rate and weight decay stay those of this run; the schedule moves to the saved step.
    Damaged checkpoints are quarantined; see `find_newest`.

    Returns:
        The step; None if no checkpoint verifies. `state` is then unchanged.

    Raises:
        CheckpointError: the checkpoint lacks a part of `state` (the error names it), or its tensors
            have other shapes because the architecture changed.
    """
    return restore(state, find_newest(run_dir, cfg.verify_on_resume))


def find_resumable(
    run_dir: str | Folder,
    model: nn.Module,
    position: Any = None,
    cfg: CheckpointConfig | None = None,
) -> Folder | None:
    """Find the checkpoint to resume from, and check that it is of this model. Collective.

    Damaged checkpoints are quarantined; see `find_newest`.

    Args:
        run_dir: the run directory, or the location that holds its checkpoints.
        model: the model of the run; weights are not needed.
        position: the data position, which is set to the one in the checkpoint. The number of steps
            and the global batch depend on it, so they are known before `restore`. None: not set.
        cfg: says how to verify checkpoints.

    Returns:
        The newest checkpoint that verifies, for `restore`; None if the run has none.

    Raises:
        CheckpointError: all checkpoints are damaged, the newest intact one is of another model, or
            it holds no data position.
    """
    saved = find_newest(run_dir, (cfg or CheckpointConfig()).verify_on_resume)

    def check_and_move() -> None:
        """Check the checkpoint against the model, and set the data position to the saved one."""
        if saved is None:
            check_fresh_start(run_dir)
            return
        check_same_model(model, saved)
        if position is not None:
            content = get_required_entry(read_state(saved), "data", saved)
            with raise_bad_state(saved):
                position.load_state_dict(content)

    ranks.on_all(check_and_move)
    return saved


def find_newest(run_dir: str | Folder, verify: str = "bytes") -> Folder | None:
    """Find the newest checkpoint of a run that verifies. Collective.

    Damaged checkpoints are renamed on the way and reported in a warning; nothing is deleted. Waits
    for a save in the background.

    Args:
        run_dir: the run directory, or the location that holds its checkpoints.
        verify: `bytes`: hash every file, divided among the ranks by size. `sizes`: compare only the
            sizes of shards, and hash all other files.

    Returns:
        The folder of the checkpoint; None if there is none.

    Raises:
        CheckpointError: a folder has the name of another step, or cannot be read at the moment.
            That does not prove damage, so it is not renamed.
    """
    background.wait()
    run = ranks.on_all(lambda: parse_location(run_dir))

    broken = ranks.on_main(
        lambda: [(str(p), fault) for p, fault in commit.find_broken_checkpoints(run).values()]
    )
    for name, fault in broken:
        quarantine(name, fault)
    while saved := ranks.on_main(lambda: [str(p) for p in commit.committed_steps(run).values()]):
        path = parse_location(saved[-1])
        damage = _find_damage(path, verify)
        if not damage:
            return path
        quarantine(path, "; ".join(f"{name} {fault}" for name, fault in damage[:5]))
    return None


def check_fresh_start(run_dir: str | Folder) -> None:
    """Raise a CheckpointError if a run has quarantined checkpoints and no committed one.

    It prevents a run from silently starting from scratch. Call it if no checkpoint was found.
    """
    attempts = commit.list_attempts(run_dir)
    quarantined = [a.folder.name for a in attempts if a.kind == "bad"]
    if quarantined and not commit.latest_attempts(attempts):
        raise CheckpointError(
            f"no checkpoint of {run_dir} verifies; the damaged ones are kept: "
            f"{', '.join(quarantined[:4])}. To resume from one, rename it back to step-N and start "
            "again. To start from scratch, give another output_dir or move them away"
        )


def quarantine(checkpoint: str | Folder, fault: str) -> None:
    """Rename a damaged checkpoint so that it is never read, and log a warning. Collective.

    On a store, it is marked by an object instead. `fault` describes the damage for the warning.
    """
    checkpoint = parse_location(checkpoint)
    new_name = ranks.on_main(lambda: str(storage_of(checkpoint).quarantine()))
    name = checkpoint.name
    ranks.log_once(
        f"WARNING: checkpoint {name} is damaged and not used ({fault}); it is kept: {new_name}"
    )


def _find_damage(checkpoint: Folder, verify: str) -> list[tuple[str, str]]:
    """List the damaged files of a checkpoint; every rank gets the full list. Collective.

    The ranks divide the files to hash by size. Rank 0 logs bytes and seconds.

    Args:
        checkpoint: the checkpoint.
        verify: `bytes` or `sizes`; see `find_newest`.

    Returns:
        (file name, fault) pairs; empty if the checkpoint is intact.
    """
    start_time = time.perf_counter()

    def list_files() -> tuple[commit.Files, list[tuple[str, str]]]:
        """Return (files of the manifest, (file, fault) pairs of missing or resized files)."""
        files = commit.read_manifest(checkpoint)["files"]
        entries = {n: {key: e[key] for key in ("size", "sha256")} for n, e in files.items()}
        # Files that the manifest does not list (a note, .DS_Store) are ignored.
        return entries, commit.find_damaged_files(checkpoint, files, hashed=(), files=files)

    # Only rank 0 reads the manifest and lists the folder.
    files, damage = ranks.on_main(list_files)
    # All files other than shards will be parsed, so that hashing them costs little.
    shards = {name for name in files if name.endswith(SHARD)} if verify == "sizes" else set()
    sizes = {name: entry["size"] for name, entry in files.items() if name not in shards}
    own_files = split_by_size(sorted(sizes), sizes.__getitem__, ranks.world_size())[ranks.rank()]
    damage_by_rank = ranks.gather_results(
        lambda: commit.find_damaged_files(checkpoint, own_files, files=files)
    )
    seconds = time.perf_counter() - start_time
    damage = list(dict.fromkeys(itertools.chain(damage, *damage_by_rank)))
    ranks.log_once(
        f"{'read' if damage else 'verified'} {checkpoint.name}: {size_text(sum(sizes.values()))} "
        f"hashed by {len(damage_by_rank)} rank(s) in {seconds:.1f} s"
        + f"; of {len(shards)} shards the sizes (checkpoint.verify_on_resume)"
        * bool(shards)
    )
    return damage


def check_same_model(model: nn.Module, checkpoint: Folder) -> None:
    """Raise a CheckpointError if a checkpoint is of another architecture; reads no tensor.

    Compares config.json, because two models may agree in every shape and still compute different
    values (heads, rotary base, activation). Settings and base of adapters are compared too. Without
    assets of the model or a saved config, only the adapters are compared.

    Raises:
        CheckpointError: a setting or the base differs (the error names it).
    """
    refuse_other_adapters(model, read_state(checkpoint), checkpoint)
    assets, file = getattr(model, "hf_assets", None), checkpoint / HF / "config.json"
    if assets is None or (before := read_json_object(file)) is None:
        return
    now = assets.config
    names = [n for n in {**before, **now} if n not in NOT_ARCHITECTURE]
    changed = [n for n in names if before.get(n) != now.get(n)]
    if changed:
        listed = "; ".join(f"{n} was {before.get(n)!r}, is {now.get(n)!r}" for n in changed[:4])
        raise CheckpointError(
            f"{checkpoint} is of another architecture: {one_line(listed, 600)}. Give the model it "
            f"was trained with ({file}), or another output_dir"
        )


def restore(state: TrainState, saved: Folder | None) -> int | None:
    """Restore `state` in place from a checkpoint and return its step. Collective.

    Sets weights, optimizer state, schedule, data position, counters and random state. Then
    checksums of the loaded tensors are compared with those in the manifest. Errors are those of
    `resume`.

    Args:
        state: the state of the run, with a materialised model.
        saved: the checkpoint that `find_resumable` returned. If it is None, `state` is unchanged
            and None is returned.
    """
    # Creating this group needs the launcher's store. If the launcher died during training, the
    # last save could not create it.
    ranks.object_group(CHANNEL)
    if saved is None:
        return None
    checkpoint = saved
    start_time = time.perf_counter()
    tensors = model_tensors(state.model)

    # Parsing the metadata takes longest here: rank 0 does it, and sends arrays to the others.
    ranks.on_all(lambda: check_same_model(state.model, checkpoint))
    table = ranks.on_main(lambda: table_from_metadata(_read_dcp_metadata(checkpoint)))

    def check() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Check that the checkpoint has all parts of `state`; allocate the optimizer state.

        Returns:
            The content of state.json, and the result of `allocate_optimizer_state`.

        Raises:
            CheckpointError: a part is missing or does not match.
        """
        content = read_state(checkpoint)
        check_model_tensors(tensors, table.tensors, checkpoint)
        with raise_bad_state(checkpoint):
            moments = allocate_optimizer_state(state, table.tensors, content, checkpoint)
        for name in ("scheduler", "data"):
            if getattr(state, name) is not None:
                get_required_entry(content, name, checkpoint)
        return content, moments

    content, moments = ranks.on_all(check)
    tensors |= {f"optimizer.{n}.{k}": t for n, parts in moments.items() for k, t in parts.items()}
    read_tensors(checkpoint / DCP, table, tensors)

    def apply_content() -> None:
        """Set everything of `state` except the model's tensors, which are loaded already."""
        if has_adapters(state.model):
            assets_of(state.model).continued = (content.get("adapter") or {}).get("continued")
        with raise_bad_state(checkpoint):
            load_optimizer_state(state, moments, content)
            if state.scheduler is not None:
                restore_schedule(state.scheduler, content["scheduler"])
            state.step, state.tokens = content["step"], content["tokens"]
            state.metrics = dict(content.get("metrics") or {})
            state.extra.update(content["extra"])
            if state.data is not None:
                state.data.load_state_dict(content["data"])
        _restore_rng(checkpoint, content)

    ranks.on_all(apply_content)
    _check_bit_sums(checkpoint, model_tensors(state.model) | optimizer_tensors(state))
    local_size = size_text(sum(local_tensor(t).nbytes for t in tensors.values()))
    seconds = time.perf_counter() - start_time
    ranks.log_once(f"read {checkpoint.name}: {local_size} of this rank in {seconds:.1f} s")
    return state.step


def _check_bit_sums(checkpoint: Folder, tensors: Tensors) -> None:
    """Compare checksums of loaded tensors with those that were saved with them. Collective.

    See [Note: proof of a save]. Exchanges 8 bytes per tensor. Tensors without a saved checksum, and
    tensors that are not sharded by rows, are skipped; rank 0 logs how many.

    Raises:
        CheckpointError: on every rank: tensors differ (the error names some).
    """
    saved = ranks.on_main(lambda: commit.read_manifest(checkpoint).get(ROW_SUMS, {}))
    names = sorted(n for n, tensor in tensors.items() if n in saved and is_sharded_by_rows(tensor))
    if len(names) < len(tensors):
        ranks.log_once(
            f"NOTE: {len(tensors) - len(names)} of {len(tensors)} tensors, not cut by rows or "
            "without a sum in the manifest, were loaded without a proof"
        )
    wrong = find_wrong_sums({name: tensors[name] for name in names}, saved)
    if wrong:
        listed = ", ".join(wrong[:3]) + ", ..." * (len(wrong) > 3)
        raise ranks.mark_collective(
            CheckpointError(
                f"{checkpoint}: {len(wrong)} tensor(s) are not in memory what was saved, though "
                f"their files are whole: {listed}; a device, its driver or the memory of a machine "
                "is at fault: start again, without that machine where it comes back"
            )
        )


def find_wrong_sums(tensors: Tensors, expected: dict[str, int]) -> list[str]:
    """List the names of tensors whose checksum in memory differs from `expected`. Collective.

    See [Note: bit sums]. Exchanges 8 bytes per tensor. In a `fake_world`, the list is empty.

    Args:
        tensors: name -> tensor, sharded by rows or not at all; the same names on every rank.
        expected: name -> checksum of the full tensor.
    """
    shares = ranks.on_all(lambda: [int(part_sums(tensor)[1]) for tensor in tensors.values()])
    sums = ranks.sum_over_ranks(shares)
    if sums is None:
        # The other ranks do not exist (`fake_world`), so that there is no sum to compare.
        return []
    return [
        name
        for (name, tensor), total in zip(tensors.items(), sums, strict=True)
        if total != wrap_to_int64(expected[name] * count_holders(tensor))
    ]


def _read_dcp_metadata(checkpoint: Folder) -> Metadata:
    """Read and parse the `.metadata` file of a checkpoint's shards.

    On a disk, it also checks that the shard files exist and are large enough.
    """
    file = storage_of(checkpoint / DCP / METADATA_FILE)
    with file.local_file() as local:
        # The shards on a store are not next to the local copy; their sizes were compared before.
        return read_metadata(local.parent, blobs=file.is_disk)


def _restore_rng(checkpoint: Folder, content: dict[str, Any]) -> None:
    """Restore this rank's random state from a checkpoint.

    If the number of ranks or the device type has changed, a new state is derived from seed and
    step, and rank 0 logs that. `content` is the content of state.json.
    """
    before = (content["world_size"], content.get("device", "cpu"))
    now = (ranks.world_size(), rng_device())
    if before == now:
        restore_rng(checkpoint / RNG, ranks.rank())
        return
    ranks.log_once(
        f"resuming on {now[0]} rank(s) of {now[1]} what {before[0]} of {before[1]} saved: weights, "
        "optimizer and data continue exactly, random state (dropout) is derived again"
    )
    seed_everything(torch.initial_seed(), ranks.rank(), content["step"])
