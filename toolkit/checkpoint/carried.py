"""Find tensors of a source checkpoint that no parameter takes, anew for each export.

Layers that predict more tokens, towers beside a text part, keys and values that layers share: no
training changes them, and a checkpoint of a run does not hold them. An export copies them from the
source, to the bit, which must still be the one that was loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.config.published import is_path
from toolkit.errors import ExportError, LoadingError, ModelError
from toolkit.formats import (
    DTYPES,
    HFAssets,
    StoredTensor,
    blocks,
    local_folder,
    read_weights,
    source_keys,
    summarise_names,
    weight_files,
    whole,
)
from toolkit.models.causal_lm import allows_remote_code
from toolkit.models.stored import (
    dequantise_parts,
    dequantised_shape,
    group_stored_parts,
    make_dequantiser,
)


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


def find_carried_tensors(
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
        folder = _find_source_folder(assets) if folder is None else folder
        entries = read_weights(weight_files(folder))
    except (LoadingError, ModelError, ExportError) as error:
        raise ExportError(
            f"the source holds what no parameter takes ({summarise_names(names, assets.source or ())}), and "
            f"{error}. Give the folder or Hub id that the run started from with --hf_assets, or "
            "leave it out: --without_carried"
        ) from error
    reader = make_dequantiser(
        AutoConfig.from_pretrained(folder, trust_remote_code=allows_remote_code())
    )
    parts = {} if reader is None else group_stored_parts(entries, reader)
    found = {}
    for name in names:
        if name in parts:
            kind = DTYPES[(assets.source or {})[name]]
            of_parts = (reader, parts[name], entries, kind)
            make = partial(dequantise_parts, *of_parts)
            found[name] = CarriedTensor(kind, dequantised_shape(*of_parts), None, make)
        else:
            stored = entries[name]
            found[name] = CarriedTensor(stored.dtype, stored.shape, stored, partial(whole, stored))
    return found


@dataclass(frozen=True)
class Carried:
    """Tensors of the source, beside its parameters, that an export has or leaves out."""

    tensors: dict[str, CarriedTensor]
    left_out: list[str]
    assets: HFAssets

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        assets: HFAssets,
        folder: Path | None = None,
        *,
        leave_out: bool = False,
    ) -> "Carried":
        """Return what `carried_tensors` finds, or its names where it is left out."""
        if leave_out:
            return cls({}, source_keys(model, assets.source or ()).carried, assets)
        return cls(find_carried_tensors(model, assets, folder), [], assets)

    def told(self) -> dict[str, Any]:
        """Return what an export's manifest says of it; says it in a line, too."""
        said: dict[str, Any] = {}
        keys, origin = self.assets.source or (), self.assets.origin
        if self.left_out:
            ranks.print_line(f"left out   {summarise_names(self.left_out, keys)}, of the source")
            said["left_out"] = self.left_out
        if self.tensors:
            whose = f", from {origin['name_or_path']}" if origin else ""
            ranks.print_line(f"carried    {summarise_names(self.tensors, keys)}{whose}")
        if self.tensors and origin:
            name = str(origin["name_or_path"])
            named = {"name": Path(name).name if is_path(name) else name}
            named |= {"revision": origin["revision"], "digest": origin["digest"]}
            said["carried"] = {**named, "tensors": len(self.tensors)}
        return said


def _find_source_folder(assets: HFAssets) -> Path:
    if assets.origin is None:  # of another tool: the folder that was given with its config
        return Path(str(assets.folder))
    named, revision = str(assets.origin.get("name_or_path")), assets.origin.get("revision")
    folder = local_folder(named, revision)
    if base_digest(folder, named, revision) != assets.origin.get("digest"):
        raise ExportError(f"{folder} holds other weights than the run started from")
    return folder
