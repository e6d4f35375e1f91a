"""The end of a run that publishes itself: newest checkpoint -> export -> the Hub."""

import hashlib
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint import local_copy
from toolkit.checkpoint.commit import EXPORTS, MANIFEST, find_checkpoint
from toolkit.checkpoint.run_folder import default_export_path
from toolkit.config import HubConfig
from toolkit.config.published import is_path
from toolkit.errors import ExportError, HubError
from toolkit.export import consolidate
from toolkit.formats import export_manifest
from toolkit.hub.upload import Say, check_access, check_name, push
from toolkit.verify import verify_export


def check(
    cfg: HubConfig, say: Say = print, *, adapted: str | None = None, create: bool = True
) -> None:
    """Refuse before training what publishing would be refused for at its end. Collective.

    Creates the repository when there is none: nothing else proves that it may be created. With
    `create` off it asks only, and a name is looked at also where nothing is pushed.
    `adapted` is the base of the adapters that the run trains, None where it trains none. HubError
    as of `push`, or where that base is a path.
    """
    if cfg.hub_model_id and not create:
        check_name(cfg.hub_model_id)
    if not cfg.push_to_hub:
        return
    if adapted is not None and is_path(adapted):
        raise HubError(
            f"the base {adapted!r} is a path of this machine, which a published adapter would "
            "name. Give the base's Hub id as model.name_or_path, or leave hub.push_to_hub out and "
            "export with `toolkit consolidate RUN --output FOLDER --hf_assets ORG/NAME` (or "
            "--merge) before `toolkit push`"
        )
    private = cfg.hub_private_repo
    asked: dict[str, Any] = {"private": private, "say": say, "create": create}
    ranks.on_main(lambda: check_access(str(cfg.hub_model_id), **asked))


def publish(run_dir: Path, cfg: HubConfig, say: Say = print) -> str | None:
    """Export the run's newest checkpoint and push it; return the commit's URL. Collective.

    None where `cfg` does not ask for it. The export is the run's own of this step, where it holds
    the checkpoint's weights; else `RUN-hf`, or `RUN-hf-step-N` where another one is in the way.
    HubError: the push failed; names the command that does it again. ExportError: the checkpoint
    cannot be exported, or the export does not verify.
    """
    return ranks.on_main(lambda: _publish(Path(run_dir), cfg, say)) if cfg.push_to_hub else None


def _publish(run_dir: Path, cfg: HubConfig, say: Say) -> str:
    with local_copy(run_dir) as source:  # checkpoint.root may be elsewhere
        checkpoint = find_checkpoint(source)
        output = export_of(checkpoint, run_dir)
        if not output.exists():
            say(f"exporting {checkpoint} to {output}")
            consolidate(checkpoint, output)
    private = cfg.hub_private_repo
    try:
        url = push(output, str(cfg.hub_model_id), private=private, say=say)
    except HubError as error:
        raise HubError(
            f"{error}. The run and its export are whole; publish it with: toolkit push {output} "
            f"--repo_id {cfg.hub_model_id}{'' if private else ' --public'}"
        ) from error
    say(f"published  {url}")
    return url


def export_of(checkpoint: Path, run_dir: Path) -> Path:
    """Return the folder of a checkpoint's export: one that holds it already, or a free name."""
    live, own = run_dir / EXPORTS / checkpoint.name, default_export_path(run_dir)
    if live.exists() and verify_export(checkpoint, live).ok:
        return live
    try:
        of = export_manifest.read(own)["origin"].get("checkpoint")
    except ExportError:
        of = None
    # `push` verifies it.
    if not own.exists() or of == hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest():
        return own
    return own.with_name(f"{own.name}-{checkpoint.name}")
