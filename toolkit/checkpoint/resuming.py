"""Resuming: the newest checkpoint that verifies, and the state of a run out of it."""

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from toolkit import ranks
from toolkit.adapters.base import check_same_adapters
from toolkit.checkpoint import commit
from toolkit.checkpoint.names import SHARD
from toolkit.checkpoint.saving import CHANNEL, DCP, HF, RNG
from toolkit.checkpoint.shards import read_tensors, split_by_size
from toolkit.checkpoint.state import (
    TrainState,
    allocate_optimizer_state,
    check_model_tensors,
    load_optimizer_state,
    optimizer_tensors,
    raise_bad_state,
    read_state,
    required_part,
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
    chunk_table,
    local_tensor,
    read_metadata,
)
from toolkit.formats.bit_sums import part_sums, wrapped
from toolkit.formats.layout import cut_by_rows
from toolkit.formats.whole_sums import holders
from toolkit.models.peft_model import has_adapters, model_tensors
from toolkit.tables import size_text
from toolkit.training import background, seed_everything

# Keys of config.json that say nothing about what the model computes in training.
NOT_ARCHITECTURE = {
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation_autoset"),
}


def resume(state: TrainState, run_dir: str | Folder, cfg: CheckpointConfig) -> int | None:
    """Restore `state` from the newest checkpoint that verifies; return its step. Collective.

    None where the run has no checkpoint. The model must be materialised, on any number of ranks.
    Learning rate and decay stay those of `state`'s optimizer: the schedule is moved to the step.

    Raises:
        CheckpointError: `state` asks for what the checkpoint lacks (names it), or its tensors have
            other shapes: the architecture changed.
    """
    return restore(state, find_newest(run_dir, cfg.verify_on_resume))


def find_resumable(
    run_dir: str | Folder,
    model: nn.Module,
    position: Any = None,
    cfg: CheckpointConfig | None = None,
) -> Folder | None:
    """Return the checkpoint that a start goes on from, None where the run has none. Collective.

    The newest that verifies, as `cfg.verify_on_resume` says, of this very model; `position` (in the
    data) is moved to where it was saved, since the number of steps and the batch depend on it.
    `restore` takes the result. CheckpointError: none verifies and some were set aside; it is of
    another model; or it holds no position.
    """
    saved = find_newest(run_dir, (cfg or CheckpointConfig()).verify_on_resume)

    def check_and_move() -> None:
        if saved is None:
            check_fresh_start(run_dir)
            return
        check_same_model(model, saved)
        if position is not None:
            content = required_part(read_state(saved), "data", saved)
            with raise_bad_state(saved):
                position.load_state_dict(content)

    ranks.on_all(check_and_move)
    return saved


def find_newest(run_dir: str | Folder, verify: str = "bytes") -> Folder | None:
    """Return the newest checkpoint of a run that verifies, None where there is none. Collective.

    One that fails is named loudly and set aside; nothing is deleted. Reads and hashes every file,
    split over the ranks by size; where it is to `verify` "sizes", of the shards their sizes only.
    Rank 0 says how long that took.

    CheckpointError: one bears another step's name, or cannot be read just now. Neither says that
    it is damaged, and nothing is set aside.
    """
    background.wait()
    run = ranks.on_all(lambda: parse_location(run_dir))

    broken = ranks.on_main(
        lambda: [(str(p), what) for p, what in commit.broken_steps(run).values()]
    )
    for name, what in broken:
        quarantine(name, what)
    while saved := ranks.on_main(lambda: [str(p) for p in commit.committed_steps(run).values()]):
        path = parse_location(saved[-1])
        damage = _find_damage(path, verify)
        if not damage:
            return path
        quarantine(path, "; ".join(f"{n} {what}" for n, what in damage[:5]))
    return None


def check_fresh_start(run_dir: str | Folder) -> None:
    """Refuse to begin anew where checkpoints of the run were set aside and none is left."""
    attempts = commit.list_attempts(run_dir)
    aside = [a.folder.name for a in attempts if a.kind == "bad"]
    if aside and not commit.latest_attempts(attempts):
        raise CheckpointError(
            f"no checkpoint of {run_dir} verifies; what failed is kept: {', '.join(aside[:4])}. To "
            "go on from one, give it back its name (step-N) and start again; to begin anew give "
            "another output_dir, or move those away"
        )


def quarantine(checkpoint: str | Folder, what: str) -> None:
    """Set a checkpoint aside, loudly: no resume takes it, and nothing is deleted. Collective."""
    checkpoint = parse_location(checkpoint)
    aside = ranks.on_main(lambda: str(storage_of(checkpoint).set_aside()))
    name = checkpoint.name
    ranks.log_once(
        f"WARNING: checkpoint {name} is damaged and not used ({what}); it is kept: {aside}"
    )


def _find_damage(checkpoint: Folder, verify: str) -> list[tuple[str, str]]:
    """Return what is wrong with the files of a checkpoint, on every rank. Collective."""
    begun = time.perf_counter()

    def look() -> tuple[commit.Files, list[tuple[str, str]]]:
        files = commit.read_manifest(checkpoint)["files"]
        told = {n: {key: entry[key] for key in ("size", "sha256")} for n, entry in files.items()}
        # Other files there (a note, .DS_Store) are no fault of the checkpoint.
        return told, commit.find_damaged_files(checkpoint, files, hashed=(), files=files)

    # The others neither read the manifest nor list the folder.
    files, damage = ranks.on_main(look)
    # Files that are parsed are read in any case.
    shards = {name for name in files if name.endswith(SHARD)} if verify == "sizes" else set()
    sizes = {name: entry["size"] for name, entry in files.items() if name not in shards}
    mine = split_by_size(sorted(sizes), sizes.__getitem__, ranks.world_size())[ranks.rank()]
    found = ranks.gather_results(lambda: commit.find_damaged_files(checkpoint, mine, files=files))
    damage = list(dict.fromkeys(itertools.chain(damage, *found)))
    ranks.log_once(
        f"{'read' if damage else 'verified'} {checkpoint.name}: {size_text(sum(sizes.values()))} "
        f"hashed by {len(found)} rank(s) in {time.perf_counter() - begun:.1f} s"
        + f"; of {len(shards)} shards the sizes (checkpoint.verify_on_resume)"
        * bool(shards)
    )
    return damage


def check_same_model(model: nn.Module, checkpoint: Folder) -> None:
    """Refuse to go on with another architecture than was saved, before a tensor is read.

    Compares config.json: two models may agree in every shape and still compute something else
    (heads, rotary base, activation); of adapters also their settings and the base. CheckpointError:
    names the settings that changed, or the base.
    """
    check_same_adapters(model, read_state(checkpoint), checkpoint)
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
    """Restore `state` in place from what `find` returned and return its step, None where that found
    none; see `resume`. Collective.
    """
    # Meets through the launcher's store: after the launcher's death a save could not make it.
    ranks.object_group(CHANNEL)
    if saved is None:
        return None
    checkpoint, begun = saved, time.perf_counter()
    tensors = model_tensors(state.model)

    # Reading takes the longest of all here: one rank does, and the arrays go to the others.
    ranks.on_all(lambda: check_same_model(state.model, checkpoint))
    table = ranks.on_main(lambda: chunk_table(_read_dcp_metadata(checkpoint)))

    def check() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Check that the checkpoint has all that `state` asks for; make room for the moments."""
        content = read_state(checkpoint)
        check_model_tensors(tensors, table.tensors, checkpoint)
        with raise_bad_state(checkpoint):
            moments = allocate_optimizer_state(state, table.tensors, content, checkpoint)
        for name in ("scheduler", "data"):
            if getattr(state, name) is not None:
                required_part(content, name, checkpoint)
        return content, moments

    content, moments = ranks.on_all(check)
    tensors |= {f"optimizer.{n}.{k}": t for n, held in moments.items() for k, t in held.items()}
    read_tensors(checkpoint / DCP, table, tensors)

    def settle() -> None:
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

    ranks.on_all(settle)
    _check_bit_sums(checkpoint, model_tensors(state.model) | optimizer_tensors(state))
    own = size_text(sum(local_tensor(t).nbytes for t in tensors.values()))
    ranks.log_once(
        f"read {checkpoint.name}: {own} of this rank in {time.perf_counter() - begun:.1f} s"
    )
    return state.step


def _check_bit_sums(checkpoint: Folder, tensors: Tensors) -> None:
    """Compare `tensors`, as they are in memory now, with what was summed when they were saved; see
    [Note: proof of a save]. Collective, 8 bytes a tensor. CheckpointError names those that differ.
    """
    saved = ranks.on_main(lambda: commit.read_manifest(checkpoint).get(commit.ROW_SUMS, {}))
    names = sorted(n for n, tensor in tensors.items() if n in saved and cut_by_rows(tensor))
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
    """Return the names of sharded `tensors` whose bits in live memory do not have the `expected`
    sum of rows; see [Note: bit sums]. Collective, 8 bytes a tensor.
    """
    shares = ranks.on_all(lambda: [int(part_sums(tensor)[1]) for tensor in tensors.values()])
    sums = ranks.sum_over_ranks(shares)
    if sums is None:
        return []  # of ranks that do not exist
    return [
        name
        for (name, tensor), total in zip(tensors.items(), sums, strict=True)
        if total != wrapped(expected[name] * holders(tensor))
    ]


def _read_dcp_metadata(checkpoint: Folder) -> Metadata:
    file = storage_of(checkpoint / DCP / METADATA_FILE)
    with file.local() as local:
        # Of shards that are elsewhere the sizes were compared with the manifest's.
        return read_metadata(local.parent, blobs=file.is_disk)


def _restore_rng(checkpoint: Folder, content: dict[str, Any]) -> None:
    """Restore this rank's random state; on other ranks or another device derive one, and say so."""
    before = (content["world_size"], content.get("device", "cpu"))
    now = (ranks.world_size(), rng_device())
    if before == now:
        restore_rng(checkpoint / RNG, ranks.rank())
        return
    ranks.log_once(
        f"resuming on {now[0]} rank(s) of {now[1]} what {before[0]} of {before[1]} saved: weights, "
        "optimizer and data continue exactly, random state (dropout) is derived anew"
    )
    seed_everything(torch.initial_seed(), ranks.rank(), content["step"])
