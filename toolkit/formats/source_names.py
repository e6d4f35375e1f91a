"""The way from transformers' parameter names back to the key names of the source checkpoint."""

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import ExportError
from toolkit.formats.hf_assets import HFAssets, assets_of
from toolkit.formats.layout import Tensors
from toolkit.formats.private import transformers_private

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExportGroup:
    """Parameters that leave together: one that keeps its bytes, or several that are converted."""

    sources: tuple[str, ...]  # parameter names; none: copied from the source checkpoint
    outputs: dict[str, tuple[int, ...]]  # exported name -> shape
    converted: bool  # by `convert_back`; else each output has the bytes of the one source


def conversion_mapping(model: "PreTrainedModel", **options: Any) -> list[Any]:
    """Return transformers' mapping from source keys to parameters of `model`, not yet sharded."""
    name = "get_model_conversion_mapping"  # a sharded class counts as custom code, and has none
    return transformers_private("conversion_mapping", name)(model, **options)


def split_mapping(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return (renamings, converters) of a mapping, each in its order."""
    renaming = transformers_private("core_model_loading", "WeightRenaming")
    converter = transformers_private("core_model_loading", "WeightConverter")
    renamings = [c for c in conversions if isinstance(c, renaming)]
    return renamings, [c for c in conversions if isinstance(c, converter)]


@dataclass(frozen=True)
class SourceKeys:
    """The tensors of a source checkpoint by what loading makes of them."""

    plain: dict[str, list[str]]  # parameter or buffer -> the keys of which it is a copy
    converted: list[str]  # keys of which parameters are made
    carried: list[str]  # keys that no parameter takes


def loaded_as(
    model: "PreTrainedModel", keys: Iterable[str], conversions: list[Any] | None = None
) -> Iterator[tuple[str, str, str | None]]:
    """Yield of each of a checkpoint's `keys` (key, the parameter that transformers makes of it, the
    pattern of the converter that does). Of several parameters the first; a key that is none's is
    its own name there. Names only; a few hundred microseconds a key.
    """
    rename = transformers_private("core_model_loading", "rename_source_key")
    known = assets_of(model).conversions if conversions is None else conversions
    renamings, converters = split_mapping(copy.deepcopy(known))
    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    for key in keys:
        target, pattern = rename(key, renamings, converters, prefix, state)
        if target not in state and key in state:  # as the loader does
            target, pattern = rename(key, [], [], prefix, state)
        yield key, target, pattern


def source_keys(model: "PreTrainedModel", keys: Iterable[str]) -> SourceKeys:
    """Return how transformers loads a checkpoint's `keys` into `model`. Names only."""
    state, found = model.state_dict(keep_vars=True), SourceKeys({}, [], [])
    for key, target, pattern in loaded_as(model, keys):
        if target not in state:
            found.carried.append(key)
        elif pattern is not None:
            found.converted.append(key)
        else:
            found.plain.setdefault(target, []).append(key)
    return found


def summarise_names(names: Collection[str], keys: Iterable[str]) -> str:
    """Return how many tensors there are, and what they are of: the outermost module of each that
    holds none but such, of all tensors `keys`.
    """
    others = set(keys) - set(names)
    around = {key[: i + 1] for key in others for i, letter in enumerate(key) if letter == "."}
    counts: dict[str, int] = {}
    for name in names:
        ends = [i + 1 for i, letter in enumerate(name) if letter == "."]
        own = next((name[:end] + "*" for end in ends if name[:end] not in around), name)
        counts[own] = counts.get(own, 0) + 1
    shown = [f"{own} ({count})" if count > 1 else own for own, count in counts.items()]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"{sum(counts.values())} tensors: {', '.join(shown[:3])}{more}"


def use_source_names(model: "PreTrainedModel", assets: HFAssets) -> None:
    """Make `model` export under the key names of its source; without one, under transformers'.

    A mapping covers every spelling a checkpoint of this architecture may have; only the parts that
    this source used may be turned back. They are found by replaying the source's keys.
    """
    if assets.source is None:
        # For `revert_weight_conversion`, which would walk through the model for each tensor.
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


def export_groups(model: "PreTrainedModel", names: Iterable[str]) -> list[ExportGroup]:
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


def convert_back(model: "PreTrainedModel", tensors: Tensors) -> Tensors:
    """Return the tensors of one `ExportGroup` under the names and in the shapes of the source."""
    return transformers_private("core_model_loading", "revert_weight_conversion")(model, tensors)
