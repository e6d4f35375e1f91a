"""The way from transformers' parameter names back to the key names of the source checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.errors import ExportError
from toolkit.formats.hf_folder import HFAssets
from toolkit.formats.layout import Tensors
from toolkit.formats.private import transformers_private


@dataclass(frozen=True)
class ExportGroup:
    """Parameters that leave together: one that keeps its bytes, or several that are converted."""

    sources: tuple[str, ...]  # parameter names
    outputs: dict[str, tuple[int, ...]]  # exported name -> shape
    converted: bool  # by `convert_back`; else the one source's bytes are the output's


def conversion_mapping(model: PreTrainedModel, **options: bool) -> list[Any]:
    """Return transformers' mapping from source keys to parameters of `model`, not yet sharded."""
    name = "get_model_conversion_mapping"  # a sharded class counts as custom code, and has none
    return transformers_private("conversion_mapping", name)(model, **options)


def split_mapping(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (renamings, converters) of a mapping, each in its order."""
    renaming = transformers_private("core_model_loading", "WeightRenaming")
    converter = transformers_private("core_model_loading", "WeightConverter")
    renamings = [c for c in conversions if isinstance(c, renaming)]
    return renamings, [c for c in conversions if isinstance(c, converter)]


def use_source_names(model: PreTrainedModel, assets: HFAssets) -> None:
    """Make `model` export under the key names of its source; without one, under transformers'.

    A mapping covers every spelling a checkpoint of this architecture may have; only the parts that
    this source used may be turned back. They are found by replaying the source's keys.
    """
    if assets.source is None:
        # What `revert_weight_conversion` takes, which would walk through the model for each tensor.
        prefix_change = transformers_private("core_model_loading", "PrefixChange")
        mapping = conversion_mapping(model, add_legacy=False)
        used = [c for c in mapping if not isinstance(c, prefix_change)]
    else:
        rename = transformers_private("core_model_loading", "rename_source_key")
        mapping = conversion_mapping(model)
        renamings, converters = split_mapping(mapping)
        parameters = model.state_dict()
        for key in assets.source:
            rename(key, renamings, converters, model.base_model_prefix, parameters)
        used = [c for c in mapping if c.was_used()]
    vars(model)["_weight_conversions"] = used


def export_groups(model: PreTrainedModel, names: Iterable[str]) -> list[ExportGroup]:
    """Return how the parameters `names` of `model` become exported tensors. Shapes only, on meta.

    After `use_source_names`; `names` of parameters and buffers, without tied aliases. ExportError
    where two would leave under one name.
    """
    state, mapping = model.state_dict(), vars(model)["_weight_conversions"]
    converters = split_mapping([c.reverse_transform() for c in reversed(mapping)])[1]
    members: dict[tuple[str, bool], list[str]] = {}  # what they become, whether by a converter
    for name in names:
        target, pattern = name, None
        for converter in converters:
            target, pattern = converter.rename_source_key(target)
            if pattern is not None:  # at most one converter takes a parameter
                break
        key = (name, False) if pattern is None else (target, True)
        members.setdefault(key, []).append(name)
    groups = []
    seen: dict[str, list[str]] = {}
    for (_, converted), sources in sorted(members.items(), key=lambda item: item[0][1]):
        meta = {n: torch.empty_like(state[n], device="meta") for n in sources}
        outputs = {k: tuple(v.shape) for k, v in convert_back(model, meta).items()}
        groups.append(ExportGroup(tuple(sources), outputs, converted))
        for output in outputs:
            if seen.setdefault(output, sources) is not sources:
                raise ExportError(f"{seen[output]} and {sources} would both become {output}")
    return groups


def convert_back(model: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Return the tensors of one `ExportGroup` under the names and in the shapes of the source."""
    return transformers_private("core_model_loading", "revert_weight_conversion")(model, tensors)
