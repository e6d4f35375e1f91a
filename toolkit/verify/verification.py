"""`verify_checkpoint` and `verify_export`: choose the checks that fit a path, and run them."""

import os
import re
from pathlib import Path

from toolkit.checkpoint import commit
from toolkit.checkpoint.names import CHECKPOINTS, COMMIT, MANIFEST
from toolkit.errors import CheckpointError, ExportError
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    INDEX_FILE,
    SINGLE_FILE,
    export_manifest,
    is_adapter_folder,
)
from toolkit.verify.checkpoint import check_checkpoint
from toolkit.verify.findings import Findings, Report


def verify_checkpoint(checkpoint: str | Path) -> Report:
    """Verify that a checkpoint, or every committed checkpoint of a run, is intact.

    Every byte of every file is compared with the manifest. The stored bytes of every model tensor
    are compared with the checksum of its memory at the save. The findings name the tensors of a
    damaged file. Reads all files once and the model's tensors once more, on four threads; each
    holds 1 MB, or one row.

    Args:
        checkpoint: folder of a checkpoint or of a run.

    Returns:
        The report; damage is in its findings and raises nothing.

    Raises:
        CheckpointError: there is no checkpoint at the path; the message may suggest one.
    """
    path = Path(checkpoint).expanduser()
    folders, notes = _find_checkpoints(path)
    with Findings(path, "checkpoint" if folders == [path] else "run") as findings:
        findings.report.notes += notes
        for folder in folders:
            prefix = "" if folder == path else f"{folder.relative_to(path)}/"
            check_checkpoint(folder, prefix, findings)
    return findings.report


def verify_export(
    checkpoint: str | Path | None,
    export: str | Path,
    *,
    logits: bool = False,
    hf_assets: str | Path | None = None,
) -> Report:
    """Verify an exported Hugging Face folder, by itself or against its checkpoint.

    Without a checkpoint, every byte is compared with the export's own manifest. Headers, index,
    config and the model that the config describes must agree, and each parameter is stored once.

    With a checkpoint, every value must also be the checkpoint's, cast to the export's dtype, and
    config and tokenizer must be equal. A PEFT folder is compared in the same way. A merged model
    must equal its base plus the adapter.

    Reads the export twice and the checkpoint's weights once. Each thread holds two blocks of 1 MB
    (or one row); two converted groups are in memory.

    Args:
        checkpoint: a run, a checkpoint, or a checkpoint of another tool; None: verify the export
            alone.
        export: folder of the export.
        logits: also compute the export's logits, and compare them with those of the checkpoint's
            weights. Needs the memory of the model, twice with a checkpoint.
        hf_assets: folder or Hub id with the config, if the checkpoint is another tool's and has
            none. For adapters: the base model, if it is not where the run had it.

    Returns:
        The report; damage is in its findings and raises nothing.

    Raises:
        CheckpointError, ExportError: there is no checkpoint or export at the path; the message may
            suggest one.
    """
    # They import transformers and PEFT, which the verification of a checkpoint does not need.
    from toolkit.checkpoint.sources import find_base, find_source
    from toolkit.verify.export import Checks, Export, run_checks
    from toolkit.verify.full_model import FULL_MODEL, make_merge_checks

    folder = _find_export(Path(export).expanduser())
    source = None if checkpoint is None else find_source(checkpoint, hf_assets)
    has_adapter_source = source is not None and source.is_adapter
    if is_adapter_folder(folder) and source is not None and not has_adapter_source:
        raise ExportError(
            f"{folder} holds an adapter, {checkpoint} holds the weights of a full model"
        )
    with Findings(folder, "export") as findings:
        subject: Export
        checks: Checks
        if is_adapter_folder(folder):
            from toolkit.verify.adapter import ADAPTER_CHECKS, AdapterExport

            subject = AdapterExport(folder, findings, source, hf_assets)
            checks = ADAPTER_CHECKS
        elif source is not None and source.is_adapter:
            base = find_base(source, hf_assets)
            subject = Export(folder, findings, source, base)
            checks = make_merge_checks(base)
        else:
            subject = Export(folder, findings, source)
            checks = FULL_MODEL
        run_checks(subject, checks, logits=logits)
    return findings.report


def is_export(path: str | Path) -> bool:
    """Return True if `path` is a Hugging Face or PEFT folder, even if some files are missing.

    False for a run, and for the `hf` folder in a checkpoint.
    """
    path = Path(path).expanduser()
    if (path / CHECKPOINTS).is_dir():
        return False
    weights = (export_manifest.FILE, SINGLE_FILE, INDEX_FILE, ADAPTER_WEIGHTS)
    if any(os.path.lexists(path / name) for name in weights):
        return True
    configs = ("config.json", ADAPTER_FILE)
    # The hf/ folder of a checkpoint has a config too.
    has_config = any((path / name).is_file() for name in configs)
    return has_config and not commit.is_committed(path.parent)


def _find_checkpoints(path: Path) -> tuple[list[Path], list[str]]:
    """Find the checkpoints of a run, or the one at `path`. Broken checkpoints are included.

    Returns:
        (folders of the checkpoints, notes on other entries next to them).

    Raises:
        CheckpointError: there is no checkpoint; the message may suggest one.
    """
    root = path / CHECKPOINTS
    if not root.is_dir():
        is_marked = any(os.path.lexists(path / name) for name in (COMMIT, MANIFEST))
        if is_marked or (path.is_dir() and re.fullmatch(r"step-[0-9]{8,}", path.name)):
            return [path], []
        if is_export(path):
            raise CheckpointError(f"{path} is a Hugging Face folder, not a checkpoint")
        return [commit.find_checkpoint(path, is_export)], []
    folders = [*commit.committed_steps(path).values()]
    folders += [folder for folder, _ in commit.find_broken_checkpoints(path).values()]
    other_names = sorted(p.name for p in root.iterdir() if p not in folders)
    if not folders:
        hint = f"; it holds {', '.join(other_names[:3])}" if other_names else ""
        raise CheckpointError(f"{root} holds no committed checkpoint (step-*/{COMMIT}){hint}")
    notes = [f"{CHECKPOINTS}/{name} is not a checkpoint and was skipped" for name in other_names]
    return sorted(folders), notes


def _find_export(folder: Path) -> Path:
    """Return `folder` if it is an export; otherwise raise an ExportError that says what it is."""
    if not folder.exists():
        raise ExportError(f"{folder} does not exist (current folder: {Path.cwd()})")
    if folder.is_file():
        raise ExportError(f"{folder} is a file; give its folder: {folder.parent}")
    if is_export(folder):
        return folder
    if commit.committed_steps(folder) or commit.is_committed(folder):
        raise ExportError(f"{folder} is a checkpoint, not an export; give the checkpoint first")
    raise ExportError(
        f"{folder} is no Hugging Face folder: it has no weights and no config"
        f"{commit.suggest_paths(folder, is_export)}"
    )
