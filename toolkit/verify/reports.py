"""`verify_checkpoint` and `verify_export`: the checks that fit what lies at a path."""

import os
import re
from pathlib import Path

from toolkit.checkpoint import commit
from toolkit.checkpoint.commit import CHECKPOINTS, COMMIT, MANIFEST
from toolkit.errors import CheckpointError, ExportError
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    INDEX_FILE,
    SINGLE_FILE,
    export_manifest,
    is_adapter_folder,
)
from toolkit.verify.checkpoint import CheckpointCheck
from toolkit.verify.findings import Findings, Report


def verify_checkpoint(checkpoint: str | Path) -> Report:
    """Return what is wrong with a checkpoint, or with every checkpoint of a run.

    Every byte of every file is compared with the manifest, and the stored bytes of every model
    tensor with the sum of live memory; of a damaged file the tensors are named. Reads files once
    and the model's tensors once more, on four threads; holds 1 MB (or one row) a thread.

    Raises:
        CheckpointError: there is no checkpoint at the path; says which path would do.
    """
    path = Path(checkpoint).expanduser()
    folders, notes = _checkpoints(path)
    with Findings(path, "checkpoint" if folders == [path] else "run") as findings:
        findings.report.notes += notes
        for folder in folders:
            inside = "" if folder == path else f"{folder.relative_to(path)}/"
            CheckpointCheck(folder, inside, findings).check()
    return findings.report


def verify_export(
    checkpoint: str | Path | None,
    export: str | Path,
    *,
    logits: bool = False,
    hf_assets: str | Path | None = None,
) -> Report:
    """Return what is wrong with an exported Hugging Face folder.

    By itself: every byte against the export's own manifest; headers, index, config and the model
    that the config describes must agree, each parameter is there once. With a checkpoint: every
    value is that of the checkpoint, cast to the export's dtype, config and tokenizer are those of
    the checkpoint; a PEFT folder is proven in the same way, and a merged model to be its base plus
    the adapter. Reads the export twice and the checkpoint's weights once. Holds two blocks of 1 MB
    (or one row) a thread, and two converted groups.

    Args:
        checkpoint: run, checkpoint, or one of another tool; None: the export by itself.
        logits: compute the export's logits, and compare them with those of the checkpoint's
            weights. Needs the memory of the model, twice with a checkpoint.
        hf_assets: folder or Hub id with the config, where the checkpoint of another tool has none;
            of adapters the base's, where it is not where the run had it.

    Raises:
        CheckpointError, ExportError: there is none at the path; says which path would do.
    """
    # They import transformers and PEFT, which a checkpoint alone does not need.
    from toolkit.checkpoint.sources import find_source
    from toolkit.verify.adapter import AdapterCheck
    from toolkit.verify.export import ExportCheck, MergedCheck

    folder = _export_folder(Path(export).expanduser())
    is_adapter = is_adapter_folder(folder)
    source = None if checkpoint is None else find_source(checkpoint, hf_assets)
    adapted = source is not None and source.is_adapter
    if source is not None and is_adapter and not adapted:
        raise ExportError(f"{folder} holds an adapter, {checkpoint} holds whole weights")
    with Findings(folder, "export") as findings:
        kind: type[ExportCheck] = MergedCheck if adapted else ExportCheck
        check = AdapterCheck if is_adapter else kind
        check(folder, findings, source, hf_assets).run(logits)
    return findings.report


def is_export(path: str | Path) -> bool:
    """Return whether a folder is a Hugging Face folder with weights, or was one."""
    path = Path(path).expanduser()
    weights = (export_manifest.FILE, SINGLE_FILE, INDEX_FILE, ADAPTER_WEIGHTS)
    configs = ("config.json", ADAPTER_FILE)
    return not (path / CHECKPOINTS).is_dir() and (
        any(os.path.lexists(path / name) for name in weights)
        or (any((path / n).is_file() for n in configs) and not commit.is_committed(path.parent))
    )


def _checkpoints(path: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoint folders that `path` means, and notes on what is beside them."""
    root = path / CHECKPOINTS
    if not root.is_dir():
        was_saved = any(os.path.lexists(path / name) for name in (COMMIT, MANIFEST))
        if was_saved or (path.is_dir() and re.fullmatch(r"step-[0-9]{8,}", path.name)):
            return [path], []
        if is_export(path):
            raise CheckpointError(f"{path} is a Hugging Face folder, not a checkpoint")
        return [commit.find_checkpoint(path, is_export)], []
    checked = [*commit.committed_steps(path).values()]
    checked += [folder for folder, _ in commit.broken_steps(path).values()]
    others = sorted(p.name for p in root.iterdir() if p not in checked)
    if not checked:
        beside = f"; beside it: {', '.join(others[:3])}" if others else ""
        raise CheckpointError(f"{root} holds no committed checkpoint (step-*/{COMMIT}){beside}")
    notes = [f"{CHECKPOINTS}/{name} is not a checkpoint and was not looked at" for name in others]
    return sorted(checked), notes


def _export_folder(folder: Path) -> Path:
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
