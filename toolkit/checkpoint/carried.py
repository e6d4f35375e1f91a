"""Find the tensors of a source model that no parameter of the trained model holds.

Examples: layers that predict several tokens, vision towers next to a text model, keys and values
that layers share. Training does not change these carried tensors, and checkpoints of a run do not
hold them. Each export copies them bit-exactly from the source model, which must not have changed.
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
    group_source_keys,
    local_folder,
    read_blocks,
    read_tensor,
    read_weights,
    summarise_names,
    weight_files,
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
    """A tensor of the source model that belongs to no parameter of the trained model."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: StoredTensor | None
    """None if the source stores it in parts, which `read` joins."""
    read: Callable[[], torch.Tensor]

    def rows(self) -> Iterator[torch.Tensor]:
        """Iterate over the values in blocks of rows, in order.

        A tensor that must be dequantised is one block.
        """
        if self.stored is None:
            return iter([self.read()])
        return (rows for _, rows in read_blocks(self.stored))


def find_carried_tensors(
    model: PreTrainedModel, assets: HFAssets, folder: Path | None = None
) -> dict[str, CarriedTensor]:
    """Find the tensors of the source model that belong to no parameter of `model`.

    Reads headers only. If it finds tensors and `folder` is None, it also reads 16 kB per tensor of
    the source, to check that the source has not changed.

    Args:
        model: the exported model, on meta.
        assets: the assets of the checkpoint; they name the source model and its keys.
        folder: the folder of the source model, if it is known already. It is not checked.

    Returns:
        Key in the source -> tensor; its values are read later.

    Raises:
        ExportError: tensors were found, but the source is missing or has changed.
    """
    names = group_source_keys(model, assets.source or ()).carried
    if not names:
        return {}
    try:
        folder = _find_source_folder(assets) if folder is None else folder
        entries = read_weights(weight_files(folder))
    except (LoadingError, ModelError, ExportError) as error:
        raise ExportError(
            "the source model has tensors that no parameter holds "
            f"({summarise_names(names, assets.source or ())}), and {error}. Give the folder or Hub "
            "id that the run started from with --hf_assets, or omit these tensors: "
            "--without_carried"
        ) from error
    reader = make_dequantiser(
        AutoConfig.from_pretrained(folder, trust_remote_code=allows_remote_code())
    )
    parts = {} if reader is None else group_stored_parts(entries, reader)
    tensors = {}
    for name in names:
        if name in parts:
            dtype = DTYPES[(assets.source or {})[name]]
            arguments = (reader, parts[name], entries, dtype)
            read = partial(dequantise_parts, *arguments)
            tensors[name] = CarriedTensor(dtype, dequantised_shape(*arguments), None, read)
        else:
            stored = entries[name]
            read = partial(read_tensor, stored)
            tensors[name] = CarriedTensor(stored.dtype, stored.shape, stored, read)
    return tensors


@dataclass(frozen=True)
class Carried:
    """The carried tensors of one export: either the tensors to copy, or the keys to omit.

    A carried tensor belongs to the source model and to no parameter of the trained model.
    """

    tensors: dict[str, CarriedTensor]
    omitted: list[str]
    assets: HFAssets

    @classmethod
    def find(
        cls,
        model: PreTrainedModel,
        assets: HFAssets,
        folder: Path | None = None,
        *,
        omit: bool = False,
    ) -> "Carried":
        """Find the carried tensors of `model` with `find_carried_tensors`.

        If `omit` is True, only list their keys, for an export without these tensors. The source
        model is then not needed.
        """
        if omit:
            return cls({}, group_source_keys(model, assets.source or ()).carried, assets)
        return cls(find_carried_tensors(model, assets, folder), [], assets)

    def log(self) -> None:
        """Print one line about the omitted tensors and one about the tensors to copy.

        If there are no such tensors, the line is omitted. Every rank that calls this prints.
        """
        keys = self.assets.source or ()
        if self.omitted:
            ranks.print_line(f"omitted    {summarise_names(self.omitted, keys)}, of the source")
        if self.tensors:
            origin = self.assets.origin
            source = f", from {origin['name_or_path']}" if origin else ""
            ranks.print_line(f"carried    {summarise_names(self.tensors, keys)}{source}")

    def manifest_entry(self) -> dict[str, Any]:
        """Build the export manifest's entries on carried and omitted tensors.

        Returns:
            `carried`: name, revision and digest of the source model, and the number of carried
            tensors. `left_out`: keys of the omitted tensors. An entry is absent if it has no
            tensors.
        """
        entry: dict[str, Any] = {}
        origin = self.assets.origin
        if self.omitted:
            entry["left_out"] = self.omitted
        if self.tensors and origin:
            name = str(origin["name_or_path"])
            entry["carried"] = {
                # A path of this machine is not published.
                "name": Path(name).name if is_path(name) else name,
                "revision": origin["revision"],
                "digest": origin["digest"],
                "tensors": len(self.tensors),
            }
        return entry


def _find_source_folder(assets: HFAssets) -> Path:
    """Find the folder of the source model; for a Hub id, its snapshot in the cache.

    A checkpoint of another tool does not record its source. The folder of its config is then
    returned unchecked.

    Raises:
        ModelError: the source model cannot be found.
        ExportError: its weights have another digest than those that the run started from.
    """
    # A checkpoint of another tool has no origin, only the folder given with its config.
    if assets.origin is None:
        return Path(str(assets.folder))
    name, revision = str(assets.origin.get("name_or_path")), assets.origin.get("revision")
    folder = local_folder(name, revision)
    if base_digest(folder, name, revision) != assets.origin.get("digest"):
        raise ExportError(f"{folder} holds other weights than the run started from")
    return folder
