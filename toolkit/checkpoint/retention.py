"""Choose the checkpoints of a run that stay, and delete the others."""

import contextlib
import math
from collections.abc import Iterator, Mapping

from toolkit import ranks
from toolkit.checkpoint import commit
from toolkit.checkpoint.commit import CHECKPOINTS, STATE, attempts_of, counting
from toolkit.checkpoint.local_folder import disk_errors
from toolkit.checkpoint.reference_file import PARTS, delete_parts
from toolkit.checkpoint.store import Folder, read_object, where
from toolkit.config.published import get_mapping
from toolkit.config.settings import CheckpointConfig
from toolkit.errors import CheckpointError


def expendable(verified: Mapping[int, Mapping[str, float]], cfg: CheckpointConfig) -> set[int]:
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


def prune(run: str | Folder, cfg: CheckpointConfig) -> None:
    """Delete the checkpoints that `cfg` does not keep, and leftovers: unfinished, half-deleted
    and superseded folders. Call it after the newest one is committed.

    A checkpoint counts as kept only when it `is_sound`; `resume` hashes the shards, too. Others are
    not deleted, nor are links: somebody else put them there. What resists makes a warning.
    """
    run = where(run)
    with _warns(f"old checkpoints in {run / CHECKPOINTS} could not be deleted"):
        attempts = attempts_of(run)
        newest = counting(attempts)
        verified: dict[int, dict[str, float]] = {}
        for step, attempt in newest.items():
            folder = attempt.folder
            if not folder.is_symlink() and commit.is_sound(folder):
                with contextlib.suppress(CheckpointError):  # its state is damaged: not sound
                    metrics = get_mapping(read_object(folder / STATE) or {}, "metrics").items()
                    verified[step] = {k: v for k, v in metrics if isinstance(v, int | float)}
        gone = [a.folder for a in attempts if a.kind in commit.LEFT_OVER]
        for a in attempts:
            superseded = a.step in verified and a.order < newest[a.step].order
            saved = a.kind == "saved" and commit.is_committed(a.folder)
            if superseded and (saved or a.kind == "old"):
                gone.append(a.folder)
        gone += [newest[step].folder for step in sorted(expendable(verified, cfg))]
        commit.delete(gone)


def delete_reference_parts(run: Folder) -> None:
    """Delete the parts of the reference pass, which a committed checkpoint holds. What resists
    makes a warning.
    """
    with _warns(f"{run / PARTS} could not be deleted"):
        delete_parts(run)


@contextlib.contextmanager
def _warns(what: str) -> Iterator[None]:
    """Say what went wrong, and go on: a run that has saved does not end over an old checkpoint."""
    try:
        with disk_errors(what):
            yield
    except CheckpointError as error:
        ranks.print_line(f"WARNING: {error}. The next save tries again")
