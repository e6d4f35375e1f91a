"""Record the base model of a checkpoint of adapters, and refuse to continue on another one.

The record is the `adapter` entry of state.json and of the manifest.

[Note: digest of a base] It covers name, dtype, shape and four blocks of bytes of every tensor. A
base that was trained further, merged or quantised differs in all of them. Reading every byte would
cost a second pass over the full base before each load. Once the base is loaded, its checksums in
memory, which cover every byte, are compared with those of the first start.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.errors import CheckpointError, LoadingError
from toolkit.formats import DTYPE_NAMES, assets_of, read_weights, weight_files
from toolkit.models.causal_lm import vocabulary_size
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import (
    ADAPTER,
    adapter_config,
    base_of,
    has_adapters,
    unwrapped_base,
)
from toolkit.models.quantise import quantisation_settings

# bytes of a block, and how many of a tensor
_BLOCK = 4096
_BLOCKS = 4
_PATH_SETTINGS = {"base_model_name_or_path", "revision"}  # the digest says which base it is


def base_digest(folder: Path, name_or_path: str | None = None, revision: str | None = None) -> str:
    """Compute the digest that identifies the weights of a checkpoint folder.

    The digest does not depend on how the tensors are distributed over files. Reads 16 kB per
    tensor. See [Note: digest of a base].

    Args:
        folder: the checkpoint folder.
        name_or_path: Hub id from which missing weight files are downloaded. If it is None, nothing
            is downloaded.
        revision: revision of the Hub id.

    Returns:
        64 hexadecimal digits.

    Raises:
        LoadingError: weights are missing or damaged.
    """
    whole = hashlib.sha256()
    for name, entry in sorted(read_weights(weight_files(folder, name_or_path, revision)).items()):
        about = f"{name} {DTYPE_NAMES[entry.dtype]} {list(entry.shape)}\n"
        whole.update(about.encode())
        last = max(0, entry.nbytes - _BLOCK)
        try:
            # Read evenly spread blocks, from the first byte to the last.
            with open(entry.file, "rb") as file:
                for begin in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                    file.seek(entry.begin + begin)
                    whole.update(file.read(min(_BLOCK, entry.nbytes - begin)))
        except OSError as error:
            raise LoadingError(f"{entry.file} cannot be read: {error.strerror}") from error
    return whole.hexdigest()


def record_base(model: nn.Module, path: str, folder: Path, digest: str) -> None:
    """Record in `model.hf_assets` which base the adapters belong to, and its digest.

    If `folder` is not the folder that the model was built from, the assets and PEFT's config get
    the new base name, and their revision is cleared.

    Args:
        model: a model with adapters; its assets and PEFT config are changed.
        path: folder or Hub id of the base, as the user gave it.
        folder: the local folder from which the weights were read.
        digest: the result of `base_digest` for `folder`.
    """
    assets = assets_of(model)
    assets.digest = digest
    if assets.folder is None or folder.resolve() != assets.folder.resolve():
        name_or_path = os.path.abspath(folder) if os.path.isdir(os.path.expanduser(path)) else path
        assets.name_or_path = name_or_path
        assets.revision = None
        assets.folder = folder
        settled: Any = model.peft_config[ADAPTER]  # type: ignore[index, union-attr]
        settled.base_model_name_or_path = name_or_path
        settled.revision = None


def build_adapter_entry(model: nn.Module) -> dict[str, Any]:
    """Describe the base and the adapters of a model as JSON values. Reads no file.

    Returns:
        A dict with these keys. `name_or_path` and `revision`: the base. `digest`: the result of
        `base_digest`, or the text `random, seed N` for random weights. `dtype`: dtypes of the
        frozen parameters, joined by "/"; None if the base is quantised. `quantised`: settings
        of the 4-bit or float8 base, or None. `config`: PEFT's settings. `rows`: the number of rows
        of a resized embedding, or None. `continued`: the adapter that `lora.from` named; the key is
        absent without it. `sums`: checksum of each tensor of the base in memory; None if no file
        was loaded. `sums_on`: type of the device on which the checksums were computed.

    Raises:
        CheckpointError: nothing was loaded into the base yet.
    """
    entry = _build_entry(model)
    if entry["digest"] is None:
        raise CheckpointError(
            f"which base the adapters of {entry['name_or_path']} belong to is not known: nothing "
            "was loaded into it; fill it before a save"
        )
    return entry


def _build_entry(model: nn.Module) -> dict[str, Any]:
    """Build the dict of `build_adapter_entry`. Its digest is None if no base was loaded yet."""
    assets = assets_of(model)
    quantised = quantisation_settings(model)
    digest = assets.digest
    if digest is None and assets.drawn_from is not None:
        digest = f"random, seed {assets.drawn_from}"
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad}
    return {
        "name_or_path": assets.name_or_path,
        "revision": assets.revision,
        "digest": digest,
        "dtype": "/".join(sorted(kinds)) if quantised is None else None,
        "config": adapter_config(model),
        "quantised": quantised,
        "rows": vocabulary_size(base_of(model)) if assets.resized else None,
        **({} if assets.continued is None else {"continued": assets.continued}),
        "sums": assets.base_sums,
        "sums_on": next(model.parameters()).device.type,
    }


def refuse_other_adapters(model: nn.Module, saved: dict[str, Any], checkpoint: object) -> None:
    """Raise a CheckpointError unless a checkpoint has the same base and adapters as `model`.

    A full model and a model with adapters never match. If the base is not loaded yet, 16 kB per
    tensor of its files are read.

    Args:
        model: the model of this run.
        saved: content of the checkpoint's state.json; its key `adapter` is compared.
        checkpoint: name of the checkpoint, for errors.
    """
    before = saved.get("adapter")
    config = before.get("config") if isinstance(before, dict) else None
    if not (isinstance(before, dict | None) and isinstance(config, dict | None)):
        raise CheckpointError(f"{checkpoint}: the entry `adapter` of its state.json is no object")
    if has_adapters(model) and before is not None:
        _refuse_difference(model, before, checkpoint)
    elif has_adapters(model):
        raise CheckpointError(
            f"{checkpoint} holds a full model, not adapters. Remove lora.r, or set another "
            "output_dir"
        )
    elif before is not None:
        raise CheckpointError(
            f"{checkpoint} holds adapters of {before.get('name_or_path')}, not a full model. Set "
            "lora.r and the other settings of that run, or set another output_dir"
        )


def _refuse_difference(model: nn.Module, before: dict[str, Any], checkpoint: object) -> None:
    """Raise a CheckpointError if a checkpoint's base or adapters differ from those of `model`.

    Compares the digest, the quantisation, the dtype and the checksums of the base, and PEFT's
    config without paths and PEFT's version.

    Args:
        model: a model with adapters.
        before: the result of `build_adapter_entry` that the checkpoint stores.
        checkpoint: name of the checkpoint, for errors.
    """
    now = _build_entry(model)
    assets = assets_of(model)
    if now["digest"] is None and assets.source is not None and assets.folder is not None:
        now["digest"] = base_digest(assets.folder, assets.name_or_path, assets.revision)
    if now["digest"] is not None and before.get("digest") != now["digest"]:
        raise CheckpointError(
            f"{checkpoint} belongs to another base: its adapters were trained on "
            f"{_format_base(before)}, this run has {_format_base(now)}. Set model.name_or_path to "
            "that model, or set another output_dir"
        )
    packing = (
        "Set lora.load_in_4bit, lora.bnb_4bit_*, model.float8 and the settings that exclude layers "
        "as they were"
    )
    for key, remedy in (("quantised", packing), ("dtype", "Set model.dtype as it was")):
        if before.get(key) != now[key]:
            raise CheckpointError(
                f"{checkpoint} has adapters that were trained on a base "
                f"{_format_stored_as(key, before.get(key))}, this run's base is "
                f"{_format_stored_as(key, now[key])}. {remedy}, or set another output_dir"
            )
    _refuse_other_values(model, before, now, checkpoint)
    then = before.get("config") or {}
    config = now["config"]
    names = [n for n in {**then, **config} if n not in _PATH_SETTINGS | {"peft_version"}]
    # A setting that another version of PEFT does not have is off there.
    changed = [n for n in names if (then.get(n) or None) != (config.get(n) or None)]
    pairs = "; ".join(f"{n} was {then.get(n)!r}, is {config.get(n)!r}" for n in changed[:4])
    if pairs:
        raise CheckpointError(
            f"{checkpoint} has other adapters: {pairs}. Use the lora settings it was trained "
            "with, or set another output_dir"
        )


def _refuse_other_values(
    model: nn.Module, before: dict[str, Any], now: dict[str, Any], checkpoint: object
) -> None:
    """Raise a CheckpointError if the loaded base's checksums differ from those of the first start.

    Does nothing if one of the two has no checksums. Quantised tensors are skipped if the type of
    device has changed.

    Args:
        model: a model with adapters.
        before: the result of `build_adapter_entry` that the checkpoint stores.
        now: the result of `_build_entry` for `model`.
        checkpoint: name of the checkpoint, for errors.
    """
    then = before.get("sums")
    sums = now["sums"]
    if not isinstance(then, dict) or sums is None:
        return
    # Another type of device may round differently when it quantises.
    skipped = set[str]()
    if before.get("sums_on") != now["sums_on"]:
        with unwrapped_base(model) as base:
            skipped = {*packed_weights(base)}
    wrong = sorted(n for n in then.keys() & sums.keys() - skipped if then[n] != sums[n])
    if wrong:
        listed = ", ".join(wrong[:3]) + ", ..." * (len(wrong) > 3)
        raise CheckpointError(
            f"{checkpoint}: the base {now['name_or_path']} in memory is not the base that the run "
            f"started from: {len(wrong)} tensor(s) differ: {listed}. If its files changed, restore "
            "them. Else a device, the disk or the memory of a machine is at fault: start again, "
            "without that machine if it happens again"
        )


def _format_base(entry: dict[str, Any]) -> str:
    """Format a base for an error: `NAME at REVISION (digest ABC...)`, without an unset revision."""
    revision = entry.get("revision")
    digest = str(entry.get("digest"))[:20]
    return f"{entry.get('name_or_path')}{f' at {revision}' if revision else ''} (digest {digest})"


def _format_stored_as(key: str, value: Any) -> str:
    """Format how a base is stored, as a part of an error's sentence.

    Args:
        key: `quantised` or `dtype`.
        value: the value of that key in a result of `build_adapter_entry`.

    Returns:
        "stored in DTYPE", the names and values of settings, or "that is not quantised".
    """
    if key == "quantised" and isinstance(value, dict):
        return ", ".join(f"{name} {setting}" for name, setting in value.items())
    return "that is not quantised" if key == "quantised" else f"stored in {value}"
