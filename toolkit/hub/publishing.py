"""Publish a run at its end: export the newest checkpoint and push it to the Hub."""

import hashlib
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint import local_copy
from toolkit.checkpoint.commit import find_checkpoint
from toolkit.checkpoint.names import EXPORTS, MANIFEST
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
    """Raise a HubError before training if the run could not be published at its end. Collective.

    If `push_to_hub` is not set, at most the repository's name is checked (if `create` is False).

    Args:
        cfg: settings of the Hub.
        say: called with each line to print.
        adapted: base model of the adapters that the run trains; None without adapters.
        create: create the repository if it is missing, because nothing else proves that the token
            may create it. If False, the Hub is only queried.

    Raises:
        HubError: as `push` raises it, or the base model of the adapters is a local path.
    """
    if cfg.hub_model_id and not create:
        check_name(cfg.hub_model_id)
    if not cfg.push_to_hub:
        return
    if adapted is not None and is_path(adapted):
        raise HubError(
            f"the base {adapted!r} is a path of this machine, which a published adapter would "
            "name. Give the base's Hub id as model.name_or_path, or remove hub.push_to_hub and "
            "export with `toolkit consolidate RUN --output FOLDER --hf_assets ORG/NAME` (or "
            "--merge) before `toolkit push`"
        )
    options: dict[str, Any] = {"private": cfg.hub_private_repo, "say": say, "create": create}
    ranks.on_main(lambda: check_access(str(cfg.hub_model_id), **options))


def publish(run_dir: Path, cfg: HubConfig, say: Say = print) -> str | None:
    """Export the run's newest checkpoint on rank 0 and push it to the Hub. Collective.

    An export that the run wrote at this step is used if it holds the checkpoint's weights.
    Otherwise the checkpoint is exported to `RUN-hf`, or to `RUN-hf-step-N` if `RUN-hf` holds
    something else.

    Args:
        run_dir: the run directory.
        cfg: settings of the Hub.
        say: called with each line to print.

    Returns:
        The commit's URL; None if `cfg` does not request a push.

    Raises:
        HubError: the push failed; the message has the command that repeats it.
        ExportError: the checkpoint cannot be exported, or the export does not verify.
    """
    return ranks.on_main(lambda: _publish(Path(run_dir), cfg, say)) if cfg.push_to_hub else None


def _publish(run_dir: Path, cfg: HubConfig, say: Say) -> str:
    """Do the work of `publish` on this rank: export, push, and return the commit's URL."""
    with local_copy(run_dir) as source:  # checkpoint.root may be elsewhere
        checkpoint = find_checkpoint(source)
        output = choose_export_folder(checkpoint, run_dir)
        if not output.exists():
            say(f"exporting {checkpoint} to {output}")
            consolidate(checkpoint, output)
    private = cfg.hub_private_repo
    try:
        url = push(output, str(cfg.hub_model_id), private=private, say=say)
    except HubError as error:
        raise HubError(
            f"{error}. The run and its export are complete; publish it with: toolkit push {output} "
            f"--repo_id {cfg.hub_model_id}{'' if private else ' --public'}"
        ) from error
    say(f"published  {url}")
    return url


def choose_export_folder(checkpoint: Path, run_dir: Path) -> Path:
    """Choose the folder for a checkpoint's export: an existing export of it, or a new path.

    An export that the run wrote during training is verified first, and used if it is intact. Else
    the path is `RUN-hf` if that is free or holds this checkpoint, otherwise `RUN-hf-step-N`.
    """
    live = run_dir / EXPORTS / checkpoint.name
    output = default_export_path(run_dir)
    if live.exists() and verify_export(checkpoint, live).ok:
        return live
    try:
        exported = export_manifest.read(output)["origin"].get("checkpoint")
    except ExportError:
        exported = None
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    if not output.exists() or exported == digest:
        return output  # `push` verifies it
    return output.with_name(f"{output.name}-{checkpoint.name}")
