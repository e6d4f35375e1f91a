"""Which base a checkpoint of adapters belongs to (the `adapter` entry of state.json and of the
manifest), and whether a run goes on with the same.

[Note: digest of a base] Two models that differ only in their values have the same headers, so the
digest looks at values too: of every tensor name, dtype and shape, and four blocks of its bytes. A
base that was trained on, merged or quantised otherwise differs in all of them. Every byte would
cost a second read of the whole base on each start; that the files are undamaged is not asked here.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from torch import nn

from toolkit.errors import CheckpointError, LoadingError
from toolkit.formats import DTYPE_NAMES, TensorEntry, assets_of, read_weights, weight_files
from toolkit.models.causal_lm import vocabulary_size
from toolkit.models.peft_model import ADAPTER, adapter_config, base_of, has_adapters
from toolkit.models.quantise import quantisation_settings

_BLOCK, _BLOCKS = 4096, 4  # bytes of a block, and how many of a tensor
_TOLD_BY_PATH = {"base_model_name_or_path", "revision"}  # the digest says which base it is


def base_digest(folder: Path, name_or_path: str | None = None, revision: str | None = None) -> str:
    """Return what identifies the weights of a checkpoint folder: 64 hexadecimal digits.

    The same wherever the folder lies and however its tensors are spread over files. Reads 16 kB a
    tensor. See [Note: digest of a base].

    Args:
        folder: what `local_folder` returned.
        name_or_path: the Hub id, of which missing weights may be downloaded; `revision`: of it.

    Raises:
        LoadingError: the folder holds no weights, or damaged ones.
    """
    whole = hashlib.sha256()
    entries = read_weights(weight_files(folder, name_or_path, revision))
    for name in sorted(entries):
        entry = entries[name]
        about = f"{name} {DTYPE_NAMES[entry.dtype]} {list(entry.shape)}\n"
        whole.update(about.encode() + _sample(entry))
    return whole.hexdigest()


def _sample(entry: TensorEntry) -> bytes:
    """Return blocks of a tensor, evenly spread from its first byte to its last."""
    last = max(0, entry.nbytes - _BLOCK)
    found = b""
    try:
        with open(entry.file, "rb") as file:
            for begin in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
                file.seek(entry.begin + begin)
                found += file.read(min(_BLOCK, entry.nbytes - begin))
    except OSError as error:
        raise LoadingError(f"{entry.file} cannot be read: {error.strerror}") from error
    return found


def record_base(model: nn.Module, path: str, folder: Path, digest: str) -> None:
    """Note in the assets of adapted `model` which base was loaded into it: asked for as `path`,
    read from `folder`, with that `base_digest`.
    """
    assets = assets_of(model)
    assets.digest = digest
    if assets.folder is None or not _is_same_folder(folder, assets.folder):
        named = os.path.abspath(folder) if os.path.isdir(os.path.expanduser(path)) else path
        assets.name_or_path, assets.revision, assets.folder = named, None, folder
        settled: Any = model.peft_config[ADAPTER]  # type: ignore[index, union-attr]
        settled.base_model_name_or_path, settled.revision = named, None


def _is_same_folder(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is gone
        return False


def adapter_entry(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint of adapted `model` says of its base and of its adapters.

    Keys: `name_or_path`, `revision`, `digest` (of a random start `random, seed N`), `dtype`, in
    which the base is stored, `config`, the content of adapter_config.json, `quantised`, how the
    base is held in 4 bits (None: it is not), and `rows`, those of the embedding where it was
    resized, else None. Reads no file.

    Raises:
        CheckpointError: neither `load_pretrained` nor `init_weights` filled the base, so that
            nobody knows which one it is.
    """
    assets, quantised = assets_of(model), quantisation_settings(model)
    digest = _known_digest(model)
    if digest is None:
        raise CheckpointError(
            f"which base the adapters of {assets.name_or_path} belong to is not known: nothing "
            "was loaded into it. Fill it with load_pretrained or init_weights before a save"
        )
    return {
        "name_or_path": assets.name_or_path,
        "revision": assets.revision,
        "digest": digest,
        "dtype": _stored(model) if quantised is None else None,
        "config": adapter_config(model),
        "quantised": quantised,
        "rows": vocabulary_size(base_of(model)) if assets.resized else None,
    }


def _known_digest(model: nn.Module) -> str | None:
    assets = assets_of(model)
    if assets.digest is None and assets.drawn_from is not None:
        return f"random, seed {assets.drawn_from}"
    return assets.digest


def check_same_adapters(model: nn.Module, saved: dict[str, Any], checkpoint: object) -> None:
    """Refuse to go on with another base or other adapters than a checkpoint's.

    Before the base is loaded its files are read, 16 kB a tensor: those that are about to be.

    Args:
        saved: content of the checkpoint's state.json.
        checkpoint: its path, for the message.

    Raises:
        CheckpointError: names what changed.
        LoadingError: the base is not loaded, and its files are damaged.
    """
    before = saved.get("adapter")
    if not isinstance(before, dict | None) or (
        before and not isinstance(before.get("config"), dict | None)
    ):
        raise CheckpointError(f"{checkpoint}: what its state.json says of the adapter is no object")
    what = remedy = ""
    if has_adapters(model) and before is not None:
        what, remedy = _difference(model, before)
    elif has_adapters(model):
        what, remedy = "holds a whole model, not adapters", "Leave out lora.r"
    elif before is not None:
        what = f"holds adapters of {before.get('name_or_path')}, not a whole model"
        remedy = "Set lora.r and the other settings of that run"
    if what:
        raise CheckpointError(f"{checkpoint} {what}. {remedy}, or another output_dir")


def _difference(model: nn.Module, before: dict[str, Any]) -> tuple[str, str]:
    """Return in what the entry `before` is of another base or other adapters, and what to do."""
    digest, assets = _known_digest(model), assets_of(model)
    if digest is None and assets.source is not None and assets.folder is not None:
        digest = base_digest(assets.folder, assets.name_or_path, assets.revision)
    if digest is not None and before.get("digest") != digest:
        now = _base(assets.name_or_path, assets.revision, digest)
        earlier = _base(*map(before.get, ("name_or_path", "revision", "digest")))
        return (
            f"belongs to another base: its adapters were trained on {earlier}, this is {now}",
            "Give that model as model.name_or_path",
        )
    quantised = quantisation_settings(model)
    if before.get("quantised") != quantised:
        return (
            f"has adapters that were trained on {_bits(before.get('quantised'))}, this run has "
            f"{_bits(quantised)}",
            "Give lora.load_in_4bit, lora.bnb_4bit_* and what leaves layers out as they were",
        )
    stored = _stored(model) if quantised is None else None
    if before.get("dtype") != stored:
        return (
            f"has adapters that were trained on a base stored in {before.get('dtype')}, this is "
            f"stored in {stored}",
            "Set model.dtype as it was",
        )
    then, config = before.get("config") or {}, adapter_config(model)
    names = [n for n in {**then, **config} if n not in _TOLD_BY_PATH | {"peft_version"}]
    # A setting that another version of PEFT does not know is off there.
    changed = [n for n in names if (then.get(n) or None) != (config.get(n) or None)]
    pairs = "; ".join(f"{n} was {then.get(n)!r}, is {config.get(n)!r}" for n in changed[:4])
    return pairs and f"has other adapters: {pairs}", "Give the lora settings it was trained with"


def _stored(model: nn.Module) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad}
    return "/".join(sorted(kinds))


def _base(name: Any, revision: Any, digest: Any) -> str:
    return f"{name}{f' at {revision}' if revision else ''} (digest {str(digest)[:20]})"


def _bits(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "a base that is not quantised"
    return ", ".join(f"{key} {value}" for key, value in settings.items())
