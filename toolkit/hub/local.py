"""Read an export for publishing: verified, without links, tokens or paths of this machine."""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint.names import CHECKPOINTS, COMMIT
from toolkit.config.published import is_path
from toolkit.errors import ExportError, holds_token, one_line
from toolkit.formats import ADAPTER_FILE, BLOCK, export_manifest, resolve_plain_file
from toolkit.formats import read_config as read_model_config
from toolkit.hub import card as model_card
from toolkit.parsing import read_json
from toolkit.verify import verify_export

CARD = export_manifest.CARD
# Up to so many bytes a file is read once and kept in memory. The Hub keeps no larger file in git.
_MAX_BYTES_IN_MEMORY = 10_000_000
_HASH_THREADS = 4


@dataclass(frozen=True)
class LocalExport:
    """The files of an export that a push publishes, with their sizes and hashes.

    Names are those in the repository. The model card is one of the files.
    """

    entries: dict[str, dict[str, Any]]  # name -> {"size", "sha256", "xxh3"}
    contents: dict[str, Path | bytes]
    has_own_card: bool  # the card is a README.md of the folder, not one that was made here


def read_export(folder: Path, repo_id: str, token: str | None) -> LocalExport:
    """Verify an export, hash its files, and make a model card if the folder has none.

    Reads the folder twice and changes nothing in it.

    Args:
        folder: folder of the export.
        repo_id: ORG/NAME, for the card.
        token: token of the Hub, which no small file may contain; None if there is none.

    Raises:
        ExportError: the folder is no export, does not verify, holds a token or a link, or names the
            base model of an adapter by a path.
    """
    folder = folder.expanduser()
    if any((folder / name).exists() for name in (CHECKPOINTS, COMMIT, "dcp")):
        raise ExportError(
            f"{folder} is a run or a checkpoint, not an export; make one first: toolkit "
            f"consolidate {folder} --output {folder}-hf"
        )
    # The target of a link may not be meant for publication.
    for file in folder.glob("*"):
        if file.is_symlink():
            raise ExportError(f"{file} is a link, which is not published; copy the file here")
    report = verify_export(None, folder)
    if not report.ok:
        more = f" (and {len(report.findings) - 1} more)" if len(report.findings) > 1 else ""
        raise ExportError(
            f"{folder} is not published, it does not verify: {report.lines()[0]}{more}; see "
            f"`toolkit verify {folder}`, or consolidate again"
        )
    adapter_config = folder / ADAPTER_FILE
    is_adapter = adapter_config.is_file()
    base = read_json(adapter_config, ExportError)["base_model_name_or_path"] if is_adapter else None
    if base is not None and is_path(base, folder):
        raise ExportError(
            f"{folder} is not published: {ADAPTER_FILE} names its base by a path, {base!r}. Export "
            "again with --hf_assets ORG/NAME, the base's id on the Hub, or with --merge"
        )
    manifest = export_manifest.read(folder)
    # A small file is read now, so that what is sent is what was verified.
    contents: dict[str, Path | bytes] = {
        name: folder / name
        if entry["size"] > _MAX_BYTES_IN_MEMORY
        else (folder / name).read_bytes()
        for name, entry in manifest["files"].items()
    }
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        entries = dict(zip(contents, pool.map(_hash_content, contents.values()), strict=True))
    for name, entry in manifest["files"].items():
        if any(entries[name][k] != entry[k] for k in ("size", "xxh3")):
            raise ExportError(f"{folder / name} changed after it was verified; consolidate again")
    raw = (folder / export_manifest.FILE).read_bytes()
    has_own_card = (folder / CARD).is_file()
    card = _read_card(folder) if has_own_card else _make_card(folder, manifest, repo_id, is_adapter)
    extra_files = {export_manifest.FILE: raw, CARD: card.encode()}
    for name in export_manifest.terms_files(folder):
        extra_files[name] = resolve_plain_file(folder, name, ExportError).read_bytes()
    for name, text in extra_files.items():
        contents[name] = text
        entries[name] = _hash_content(text)
    for name, content in contents.items():
        if isinstance(content, Path):
            continue
        if (token and token.encode() in content) or (name == CARD and holds_token(card)):
            raise ExportError(f"{folder / name} holds what looks like a token; remove it")
    return LocalExport(entries, contents, has_own_card)


def _read_card(folder: Path) -> str:
    """Read the folder's own README.md; raise ExportError if it is not UTF-8."""
    try:
        return resolve_plain_file(folder, CARD, ExportError).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(f"{folder / CARD} is not UTF-8 ({error}); save it as that") from None


def _make_card(folder: Path, manifest: dict[str, Any], repo_id: str, is_adapter: bool) -> str:
    """Render a model card from the facts of the run in the manifest; return its text.

    Raises:
        ExportError: the facts are malformed.
    """
    config = None if is_adapter else read_model_config(folder)
    digest = hashlib.sha256((folder / export_manifest.FILE).read_bytes()).hexdigest()
    try:
        return model_card.render_card(manifest, repo_id, digest, config)
    except Exception as error:  # the facts of a run may be malformed
        raise ExportError(
            f"{folder} is not published: the facts of its run in {export_manifest.FILE} make no "
            f"model card ({one_line(error)}); consolidate again, or put a {CARD} of your own there"
        ) from error


def _hash_content(content: Path | bytes) -> dict[str, Any]:
    """Return the `size` in bytes, `sha256` and `xxh3` (XXH3-128) of a file or of bytes."""
    hashers: dict[str, Any] = {"sha256": hashlib.sha256(), "xxh3": xxhash.xxh3_128()}
    size = 0
    with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        while block := file.read(BLOCK):
            size += len(block)
            for hasher in hashers.values():
                hasher.update(block)
    return {"size": size, **{kind: hasher.hexdigest() for kind, hasher in hashers.items()}}
