"""What a source checkpoint holds that no parameter takes: found again for each export.

Layers that predict more tokens, towers beside a text part, keys and values that layers share: no
training changes them, and a checkpoint of a run does not hold them. An export copies them from the
source, to the bit, which must still be the one that was loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from toolkit.adapters.base import base_digest
from toolkit.config.published import is_path
from toolkit.errors import ExportError, LoadingError, ModelError
from toolkit.formats import (
    DTYPES,
    HFAssets,
    StoredTensor,
    blocks,
    in_file,
    local_folder,
    read_weights,
    source_keys,
    told,
    weight_files,
    whole,
)
from toolkit.models.causal_lm import trusts_code
from toolkit.models.stored import read_parts, reader_of, stored_parts


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor of the source that no parameter takes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: StoredTensor | None  # None: it is stored in parts, of which `make` makes it
    make: Callable[[], torch.Tensor]

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield its rows in order, some at a time."""
        if self.stored is None:
            return iter([self.make()])
        return (rows for _, rows in blocks(self.stored))


def carried_tensors(
    model: PreTrainedModel, assets: HFAssets, folder: Path | None = None
) -> dict[str, CarriedTensor]:
    """Return the tensors of the source that no parameter of `model` takes.

    `assets`: those of the checkpoint; `folder`: of the source, where the caller has found it. Reads
    16 kB a tensor of the source. ExportError: there are such tensors, and the source is gone or is
    another one.
    """
    names = source_keys(model, assets.source or ()).carried
    if not names:
        return {}
    try:
        folder = _source(assets) if folder is None else folder
        entries = read_weights(weight_files(folder))
    except (LoadingError, ModelError, ExportError) as error:
        raise ExportError(
            f"the source holds what no parameter takes ({told(names, assets.source or ())}), and "
            f"{error}. Give the folder or Hub id that the run started from with --hf_assets, or "
            "leave it out: --without_carried"
        ) from error
    reader = reader_of(AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code()))
    parts = {} if reader is None else stored_parts(entries, reader)
    found = {}
    for name in names:
        if name in parts:
            kind = DTYPES[(assets.source or {})[name]]
            make = partial(read_parts, reader, parts[name], entries, kind)
            found[name] = CarriedTensor(kind, tuple(make().shape), None, make)
        else:
            stored = in_file(entries[name])
            found[name] = CarriedTensor(stored.dtype, stored.shape, stored, partial(whole, stored))
    return found


def carried_origin(
    assets: HFAssets, carried: Mapping[str, CarriedTensor], left_out: list[str] | None = None
) -> dict[str, Any]:
    """Return what an export's manifest says of these tensors, and of those that are `left_out`."""
    said: dict[str, Any] = {"left_out": left_out} if left_out else {}
    if carried and (origin := assets.origin):
        named = {"name": str(origin["name_or_path"]), "revision": origin["revision"]}
        if is_path(named["name"]):
            named["name"] = Path(named["name"]).name
        said["carried"] = {**named, "digest": origin["digest"], "tensors": len(carried)}
    return said


def _source(assets: HFAssets) -> Path:
    if assets.origin is None:  # of another tool: the folder that was given with its config
        return Path(str(assets.folder))
    named, revision = str(assets.origin.get("name_or_path")), assets.origin.get("revision")
    folder = local_folder(named, revision)
    if base_digest(folder, named, revision) != assets.origin.get("digest"):
        raise ExportError(f"{folder} holds other weights than the run started from")
    return folder
