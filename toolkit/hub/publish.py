"""The end of a run that publishes itself: newest checkpoint -> export -> the Hub.

Owns where the export of a run lies and when an existing one is taken. Knows neither weights nor the
Hub's protocol.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from toolkit.checkpoint import fetch
from toolkit.checkpoint.commit import EXPORTS, MANIFEST, find_checkpoint
from toolkit.checkpoint.run_dir import export_path
from toolkit.config.settings import HubConfig
from toolkit.errors import ExportError, HubError
from toolkit.export.consolidation import consolidate
from toolkit.formats import manifest as export_manifest
from toolkit.hub import upload as hub
from toolkit.verify.reports import verify_export

Say = Callable[[str], object]


def check(cfg: HubConfig, say: Say = print, *, adapted: str | None = None) -> None:
    """Refuse before training what publishing would be refused for at its end.

    Creates the repository when there is none: nothing else proves that it may be created. A few
    requests, from one process.

    Args:
        adapted: base of the adapters that the run trains; None where it trains none.

    Raises:
        HubError: no token, no such name, no permission, or the Hub cannot be reached.
    """
    if cfg.push_to_hub:
        if adapted is not None:
            hub.check_base(adapted)
        hub.check_access(str(cfg.hub_model_id), private=cfg.hub_private_repo, say=say)


def publish(run_dir: Path, cfg: HubConfig, say: Say = print) -> str | None:
    """Export the run's newest checkpoint and push it; return the commit's URL, None when not asked.

    The export is the one that the run wrote at this step, where it has, and holds the checkpoint's
    weights; else `RUN-hf`, or `RUN-hf-step-N` where another one is in the way. One of this very
    checkpoint is taken as it is. What fails leaves the run and the export.

    Raises:
        HubError: the push failed; says the command that does it again.
        ExportError: the checkpoint cannot be exported, or the export does not verify.
    """
    if not cfg.push_to_hub:
        return None
    with fetch.at_hand(run_dir) as source:  # checkpoint.root may be elsewhere
        checkpoint = find_checkpoint(source)
        output = export_of(checkpoint, run_dir)
        if not output.exists():
            say(f"exporting {checkpoint} to {output}")
            consolidate(checkpoint, output)
    private, revision = cfg.hub_private_repo, cfg.hub_revision
    try:
        url = hub.push(output, str(cfg.hub_model_id), revision=revision, private=private, say=say)
    except HubError as error:
        branch = f" --revision {revision}" if revision else ""
        public = "" if private else " --public"
        raise HubError(
            f"{error}. The run and its export are whole; publish it with: toolkit push {output} "
            f"--repo_id {cfg.hub_model_id}{branch}{public}"
        ) from error
    say(f"published  {url}")
    return url


def export_of(checkpoint: Path, run_dir: Path) -> Path:
    """Return the folder of a checkpoint's export: one that holds it already, or a free name."""
    live = Path(run_dir) / EXPORTS / checkpoint.name
    if live.exists() and verify_export(checkpoint, live).ok:
        return live
    own = export_path(Path(run_dir))
    if not own.exists() or _is_of(checkpoint, own):
        return own
    return own.with_name(f"{own.name}-{checkpoint.name}")


def _is_of(checkpoint: Path, export: Path) -> bool:
    """Whether an export says that it was made of this checkpoint; `push` verifies what it says."""
    try:
        origin = export_manifest.read(export)["origin"]
    except ExportError:
        return False
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    return origin.get("checkpoint") == digest
