"""Map parameter names of transformers to the keys of the source checkpoint and back."""

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
    """Tensors that are exported together: one parameter to copy, or several to convert.

    Without parameters, it is a tensor that is copied from the source model.
    """

    sources: tuple[str, ...]  # parameter names; none: copied from the source checkpoint
    outputs: dict[str, tuple[int, ...]]  # exported name -> shape
    converted: bool  # by `convert_back`; if False, each output has the bytes of the one source


def conversion_mapping(model: "PreTrainedModel", **options: Any) -> list[Any]:
    """Return transformers' conversions from checkpoint keys to the parameters of `model`.

    The model must not be sharded. The entries are `WeightRenaming` and `WeightConverter` objects.
    `options` are passed to transformers.
    """
    name = "get_model_conversion_mapping"  # a sharded class counts as custom code, and has none
    return transformers_private("conversion_mapping", name)(model, **options)


def split_mapping(conversions: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split a conversion mapping into (renamings, converters), each in the original order."""
    renaming = transformers_private("core_model_loading", "WeightRenaming")
    converter = transformers_private("core_model_loading", "WeightConverter")
    renamings = [c for c in conversions if isinstance(c, renaming)]
    return renamings, [c for c in conversions if isinstance(c, converter)]


@dataclass(frozen=True)
class SourceKeys:
    """The keys of a source checkpoint, grouped by how transformers loads them."""

    plain: dict[str, list[str]]  # parameter or buffer -> keys that are copied into it
    converted: list[str]  # keys that are converted into parameters
    carried: list[str]  # keys that no parameter takes


def map_source_keys(
    model: "PreTrainedModel", keys: Iterable[str], conversions: list[Any] | None = None
) -> Iterator[tuple[str, str, str | None]]:
    """Map a checkpoint's keys to parameters of `model` by transformers' rules. Reads no tensors.

    Takes a few hundred microseconds per key.

    Args:
        model: a model with assets.
        keys: keys of the checkpoint.
        conversions: the conversion mapping; None: the one in the model's assets.

    Yields:
        (key, parameter name, source pattern of the converter). The pattern is None if no converter
        applies. If a key becomes several parameters, the name is that of the first. If it becomes
        none, it is a name that the model may not have.
    """
    rename = transformers_private("core_model_loading", "rename_source_key")
    mapping = assets_of(model).conversions if conversions is None else conversions
    renamings, converters = split_mapping(copy.deepcopy(mapping))
    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    for key in keys:
        target, pattern = rename(key, renamings, converters, prefix, state)
        if target not in state and key in state:  # as the loader does
            target, pattern = rename(key, [], [], prefix, state)
        yield key, target, pattern


def group_source_keys(model: "PreTrainedModel", keys: Iterable[str]) -> SourceKeys:
    """Group a checkpoint's keys by how transformers loads them into `model`. Reads no tensors."""
    state = model.state_dict(keep_vars=True)
    groups = SourceKeys({}, [], [])
    for key, target, pattern in map_source_keys(model, keys):
        if target not in state:
            groups.carried.append(key)
        elif pattern is not None:
            groups.converted.append(key)
        else:
            groups.plain.setdefault(target, []).append(key)
    return groups


def summarise_names(names: Collection[str], keys: Iterable[str]) -> str:
    """Format a short summary of tensor names, such as "29 tensors: model.mtp.* (29)".

    The names are grouped by module, and at most three groups are listed. The module of a name is
    the outermost one that contains no tensor outside of `names`.

    Args:
        names: names to summarise.
        keys: names of all tensors.
    """
    other_names = set(keys) - set(names)
    mixed_modules = {
        key[: i + 1] for key in other_names for i, letter in enumerate(key) if letter == "."
    }
    counts: dict[str, int] = {}
    for name in names:
        ends = [i + 1 for i, letter in enumerate(name) if letter == "."]
        module = next((name[:end] + "*" for end in ends if name[:end] not in mixed_modules), name)
        counts[module] = counts.get(module, 0) + 1
    parts = [f"{module} ({count})" if count > 1 else module for module, count in counts.items()]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"{sum(counts.values())} tensors: {', '.join(parts[:3])}{more}"


def use_source_names(model: "PreTrainedModel", assets: HFAssets) -> None:
    """Set the conversions with which `model` is exported under the key names of its source.

    Sets `model._weight_conversions`. An architecture's mapping accepts several spellings of a key.
    Only the conversions that apply to the source's keys are kept, so the export has the source's
    spelling. Without a source, transformers' current names are used.
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
    """Decide which parameters are converted together, and into which exported names and shapes.

    Reads no values.

    Args:
        model: the model, after `use_source_names`.
        names: parameters and buffers to export, without tied aliases.

    Returns:
        The groups; those without a conversion come first.

    Raises:
        ExportError: two groups would be exported under the same name.
    """
    state, mapping = model.state_dict(), vars(model)["_weight_conversions"]
    converters = split_mapping([c.reverse_transform() for c in reversed(mapping)])[1]
    members: dict[tuple[str, bool], list[str]] = {}  # (exported name, by a converter) -> parameters
    for name in names:
        target, pattern = name, None
        for converter in converters:
            target, pattern = converter.rename_source_key(target)
            if pattern is not None:  # at most one converter takes a parameter
                break
        key = (name, False) if pattern is None else (target, True)
        members.setdefault(key, []).append(name)
    groups = []
    sources_of: dict[str, list[str]] = {}
    for (_, converted), sources in sorted(members.items(), key=lambda item: item[0][1]):
        meta = {n: torch.empty_like(state[n], device="meta") for n in sources}
        outputs = {k: tuple(v.shape) for k, v in convert_back(model, meta).items()}
        groups.append(ExportGroup(tuple(sources), outputs, converted))
        for output in outputs:
            if sources_of.setdefault(output, sources) is not sources:
                raise ExportError(f"{sources_of[output]} and {sources} would both become {output}")
    return groups


def convert_back(model: "PreTrainedModel", tensors: Tensors) -> Tensors:
    """Convert the parameters of one `ExportGroup` to the names and shapes of the source checkpoint.

    Args:
        model: the model, after `use_source_names`.
        tensors: parameter name -> tensor. Meta tensors give meta tensors, for their shapes.

    Returns:
        Exported name -> tensor.
    """
    return transformers_private("core_model_loading", "revert_weight_conversion")(model, tensors)
