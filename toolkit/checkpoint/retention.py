"""Which checkpoints of a run stay, and the deletion of the others.

Owns pruning after a save, and the sweep of what killed deletions left. The policy comes from
`toolkit.config`; how a checkpoint is deleted safely is `commit`'s.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint import commit
from toolkit.checkpoint.commit import CHECKPOINTS, STATE, attempts_of, counting
from toolkit.checkpoint.durable import disk_errors
from toolkit.checkpoint.store import Folder, Place, where
from toolkit.config.retention import Retention
from toolkit.errors import CheckpointError
from toolkit.parsing import parse_json

# What `prune` reads again at most, over all checkpoints: a fraction of a second.
_AFFORDABLE = 128 * 2**20
_AFFORDABLE_ON_STORE = 16 * 2**20


def expendable(verified: Mapping[int, Mapping[str, float]], policy: Retention) -> set[int]:
    """Return the steps that may be deleted.

    Args:
        verified: step -> metrics of every committed checkpoint that verifies. Others are no
            candidates, and do not count as kept either.
    """
    if policy.last is None:
        return set()
    kept = set(sorted(verified)[-max(2, policy.last) :])
    if policy.every is not None:
        kept |= {step for step in verified if step % policy.every == 0}
    sign = -1 if policy.greater_is_better else 1
    measured = {
        step: values[policy.metric]
        for step, values in verified.items()
        if math.isfinite(values.get(policy.metric, math.nan))
    }
    ranked = sorted(measured, key=lambda step: (sign * measured[step], -step))
    return set(verified) - kept - set(ranked[: policy.best])


def prune(run: str | Folder, keep: int | Retention | None) -> list[Any]:
    """Delete the checkpoints that the policy does not keep, and leftovers; return what went.

    A number stands for `Retention(last=number)`, None keeps all. A checkpoint counts as kept only
    when it verifies: its files have the sizes of the manifest, and the hashes too as far as 128 MB
    go (16 on a store), newest checkpoint and smallest files first (shards of hundreds of GB are not
    read again after every save; `resume` hashes everything and falls back). One that does not
    verify is not deleted. Neither are links: somebody else put them there. Leftovers are
    unfinished, half-deleted and superseded folders. Call it only after the newest checkpoint is
    committed.

    Raises:
        CheckpointError: something cannot be deleted.
    """
    policy = keep if isinstance(keep, Retention) else Retention(last=keep)
    with disk_errors(f"old checkpoints in {where(run) / CHECKPOINTS} could not be deleted"):
        attempts = attempts_of(run)
        newest = counting(attempts)
        budget = _AFFORDABLE_ON_STORE if isinstance(where(run), Place) else _AFFORDABLE
        verified: dict[int, dict[str, float]] = {}
        for step in sorted(newest, reverse=True):
            folder = newest[step].folder
            if not (isinstance(folder, Path) and folder.is_symlink()):
                sound, read = commit.verifies(folder, budget)
                budget -= read
                if sound:
                    verified[step] = _metrics(folder)
        gone = [a.folder for a in attempts if a.kind in ("tmp", "trash")]
        for a in attempts:
            superseded = a.step in verified and a.order < newest[a.step].order
            committed = a.kind == "saved" and commit.is_committed(a.folder)
            if superseded and (a.kind == "old" or committed):
                gone.append(a.folder)
        gone += [newest[step].folder for step in sorted(expendable(verified, policy))]
        commit.delete(gone)
    return gone


def sweep(run: str | Folder) -> None:
    """Delete what a killed deletion left of checkpoints that are older than the newest.

    A start that has nothing to do saves nothing, and so neither `begin` nor `prune` would. Leaves
    alone what another process may be writing.

    Raises:
        CheckpointError: something cannot be deleted.
    """
    with disk_errors(f"leftovers in {where(run) / CHECKPOINTS} could not be deleted"):
        attempts = attempts_of(run)
        newest = max(counting(attempts), default=0)
        commit.delete(
            a.folder for a in attempts if a.kind == "trash" or (a.kind == "tmp" and a.step < newest)
        )


def _metrics(checkpoint: Folder) -> dict[str, float]:
    """Return the metrics that a checkpoint was saved with, {} where there are none."""
    file = checkpoint / STATE
    try:
        state = parse_json(commit.read_plain(file), file, CheckpointError)
    except FileNotFoundError:
        return {}
    values = state.get("metrics") if isinstance(state, dict) else None
    values = values if isinstance(values, dict) else {}
    return {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
