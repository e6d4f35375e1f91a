"""The export as it is to be published: verified, without links, tokens or paths of this machine."""

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from toolkit.checkpoint.commit import CHECKPOINTS, COMMIT
from toolkit.config.published import is_path
from toolkit.errors import ExportError, holds_token, one_line
from toolkit.formats import ADAPTER_FILE, BLOCK, export_manifest, plain_file
from toolkit.formats import read_config as read_model_config
from toolkit.hub import card as model_card
from toolkit.parsing import read_json
from toolkit.verify import verify_export

CARD = export_manifest.CARD
# Bytes up to which a file is read once and kept; the Hub keeps no larger one in git itself.
_IN_MEMORY = 10_000_000
_THREADS = 4  # that hash


@dataclass(frozen=True)
class LocalExport:
    """The files of an export by their names in the repository; the card is one of them."""

    entries: dict[str, dict[str, Any]]  # name -> {"size", "sha256", "xxh3"}
    contents: dict[str, Path | bytes]
    own_card: bool  # whether the card is the folder's own README.md


def read_export(folder: Path, repo_id: str, token: str | None) -> LocalExport:
    """Verify an export and return its files; ExportError for what is none, has a finding, holds a
    token or a link, or names its base by a path. Costs two reads of it.
    """
    folder = folder.expanduser()
    if any((folder / name).exists() for name in (CHECKPOINTS, COMMIT, "dcp")):
        raise ExportError(
            f"{folder} is a run or a checkpoint, not an export; make one first: toolkit "
            f"consolidate {folder} --output {folder}-hf"
        )
    for file in folder.glob("*"):  # what links lead to may not be meant for it
        if file.is_symlink():
            raise ExportError(f"{file} is a link, which is not published; copy the file here")
    report = verify_export(None, folder)
    if not report.ok:
        more = f" (and {len(report.findings) - 1} more)" if len(report.findings) > 1 else ""
        raise ExportError(
            f"{folder} is not published, it does not verify: {report.lines()[0]}{more}; see "
            f"`toolkit verify {folder}`, or consolidate again"
        )
    config, whole = folder / ADAPTER_FILE, not (folder / ADAPTER_FILE).is_file()
    base = None if whole else read_json(config, ExportError)["base_model_name_or_path"]
    if base is not None and is_path(base, folder):
        raise ExportError(
            f"{folder} is not published: {ADAPTER_FILE} names its base by a path, {base!r}. Export "
            "again with --hf_assets ORG/NAME, the base's id on the Hub, or with --merge"
        )
    manifest = export_manifest.read(folder)
    # A small file is read now, so that what is sent is what was verified.
    contents: dict[str, Path | bytes] = {
        name: folder / name if entry["size"] > _IN_MEMORY else (folder / name).read_bytes()
        for name, entry in manifest["files"].items()
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = dict(zip(contents, pool.map(_entry, contents.values()), strict=True))
    for name, entry in manifest["files"].items():
        if any(entries[name][k] != entry[k] for k in ("size", "xxh3")):
            raise ExportError(f"{folder / name} changed after it was verified; consolidate again")
    shape = read_model_config(folder) if whole else None
    raw = (folder / export_manifest.FILE).read_bytes()
    own_card = (folder / CARD).is_file()
    if own_card:
        try:
            card = plain_file(folder, CARD, ExportError).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ExportError(f"{folder / CARD} is not UTF-8 ({error}); save it as that") from None
    else:
        try:
            card = model_card.render(manifest, repo_id, hashlib.sha256(raw).hexdigest(), shape)
        except Exception as error:  # facts of a run from outside: they may be of any shape
            raise ExportError(
                f"{folder} is not published: the facts of its run in {export_manifest.FILE} make "
                f"no model card ({one_line(error)}); consolidate again, or put a {CARD} of your "
                "own there"
            ) from error
    terms = export_manifest.terms(folder)
    own = [(name, plain_file(folder, name, ExportError).read_bytes()) for name in terms]
    for name, text in ((export_manifest.FILE, raw), (CARD, card.encode()), *own):
        contents[name], entries[name] = text, _entry(text)
    for name, content in contents.items():
        if isinstance(content, Path):
            continue
        if (token and token.encode() in content) or (name == CARD and holds_token(card)):
            raise ExportError(f"{folder / name} holds what looks like a token; remove it")
    return LocalExport(entries, contents, own_card)


def _entry(content: Path | bytes) -> dict[str, Any]:
    """Return the size of a file or its content, its sha256, and the XXH3 of the manifest."""
    hashers: dict[str, Any] = {"sha256": hashlib.sha256(), "xxh3": xxhash.xxh3_128()}
    size = 0
    with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        while block := file.read(BLOCK):
            size += len(block)
            for hashed in hashers.values():
                hashed.update(block)
    return {"size": size, **{kind: hashed.hexdigest() for kind, hashed in hashers.items()}}
