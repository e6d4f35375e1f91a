"""Plan an exported folder from shapes alone: names, dtypes, files up to a size.

A checkpoint on the disk and a model that is still training give the same plan, so the same folder.
"""

import copy
import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from toolkit.adapters.peft_folder import build_peft_layout, read_adapter_config
from toolkit.checkpoint.carried import Carried, CarriedTensor
from toolkit.checkpoint.sources import is_adapter_asset
from toolkit.config.published import describe_base_model
from toolkit.errors import ExportError
from toolkit.formats import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    NEXT_TOKEN_LAYERS,
    SINGLE_FILE,
    ExportGroup,
    HFAssets,
    StoredTensor,
    Tensors,
    assets_of,
    contiguous_tensor,
    convert_back,
    export_groups,
    group_source_keys,
    map_source_keys,
    use_source_names,
)
from toolkit.formats import read_config as read_base_config
from toolkit.models import model_on_meta, tied_families, tied_names
from toolkit.parsing import parse_size

DTYPE_CHOICES = ("auto", "float32", "bfloat16", "float16")
CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_WRAPPER = "FSDP"  # what fully_shard puts before a class's name, and config.json must not have
# Entries of adapter_config.json that a reader of the export may want to know.
_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "exclude_modules", "modules_to_save"),
)

TensorShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Parameter or buffer name -> dtype and shape of what is stored."""


@dataclass(frozen=True)
class ExportPlan:
    """Names, dtypes, files and headers of an exported folder: everything except its weights.

    Tensors are exported in groups. A group is one parameter, several that are converted together,
    or a tensor of the source model that belongs to no parameter.
    """

    model: PreTrainedModel  # on meta
    stored: dict[str, str]  # parameter -> stored name: another one of its family where tied
    groups: list[ExportGroup]
    names: dict[str, str]  # name in a group's outputs -> exported name
    tensors: dict[str, StoredTensor]
    """Exported name -> place, in the order of the files; the file is a name in the folder."""
    carried: dict[str, CarriedTensor]
    """Exported name -> tensor of the source that no parameter takes, which is copied."""
    headers: dict[str, bytes]  # file -> its first bytes: length and JSON of the header
    assets: dict[str, bytes]  # every other file of the folder: name -> content

    def stored_twice(self) -> list[str]:
        """List the second and further names of tied weights that the source stores repeatedly.

        The export stores them in the same way. The list is sorted.
        """
        alike = [[*g.outputs] for g in self.groups if g.sources and not g.converted]
        return sorted(self.names[name] for names in alike for name in names[1:])

    def read_carried(self, group: ExportGroup) -> dict[str, Iterator[torch.Tensor]]:
        """Map each output of a carried group to an iterator over blocks of the tensor's rows.

        A carried tensor belongs to no parameter of the trained model. It is copied from the source.
        """
        return {name: self.carried[name].rows() for name in group.outputs}

    def convert(self, group: ExportGroup, parameters: Tensors) -> Tensors:
        """Convert the parameters of `group` to its outputs, which may be strided views.

        Args:
            group: a group with parameters.
            parameters: parameter name -> full tensor, for each parameter of the group.

        Returns:
            Output name -> tensor.

        Raises:
            ExportError: the conversion gives other names or shapes than planned.
        """
        if not group.converted:
            (value,) = parameters.values()
            return dict.fromkeys(group.outputs, value)
        with torch.no_grad(), CopiesAreViews():
            converted = convert_back(self.model, parameters)
        shapes = {name: tuple(tensor.shape) for name, tensor in converted.items()}
        if shapes != group.outputs:
            raise ExportError(f"{group.sources} became {shapes}, expected {group.outputs}")
        return {name: converted[name] for name in group.outputs}


class CopiesAreViews(TorchDispatchMode):
    """Mode in which `clone` and `contiguous` return views, and in-place operations raise an error.

    transformers' conversions mostly slice and transpose a tensor, and then copy the slices. With
    views instead of copies, fused experts are in memory once instead of twice.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func in _RESHAPES and not args[0].is_contiguous():  # these need a real copy
            copied = args[0].clone(memory_format=torch.contiguous_format)
            return func(copied, *args[1:])
        if func._schema.is_mutable:
            raise ExportError(f"transformers' conversion writes in place ({func}): not supported")
        return func(*args, **(kwargs or {}))


def parse_options(dtype: str, max_shard_size: str | int) -> tuple[torch.dtype | None, int]:
    """Parse the dtype of an export and the size limit of its weight files.

    Args:
        dtype: one of `DTYPE_CHOICES`.
        max_shard_size: such as "5GB" (10^9 bytes each), "5GiB" (2^30), "800000" or 800000.

    Returns:
        (dtype of all floating tensors or None for `auto`, limit in bytes).

    Raises:
        ExportError: an option has no valid value.
    """
    if dtype not in DTYPE_CHOICES:
        raise ExportError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_CHOICES)}")
    limit = parse_size(str(max_shard_size))
    if limit is None:
        raise ExportError(
            f'max_shard_size {max_shard_size!r} is not a size; write "5GB", "500MB" or a '
            "number of bytes"
        )
    return (None if dtype == "auto" else getattr(torch, dtype)), limit


def build_model_from_assets(hf: Path) -> PreTrainedModel:
    """Build a model on meta from a folder of assets, for export under its source's key names.

    The key names and dtypes of the source model are read from the assets.
    """
    model = model_on_meta(hf)
    assets, saved = assets_of(model), HFAssets.load(hf)
    assets.source, assets.origin = saved.source, saved.origin
    use_source_names(model, assets)
    return model


def make_model_plan(
    model: PreTrainedModel,
    stored: TensorShapes,
    override: torch.dtype | None,
    limit: int,
    *,
    where: str,
    prefix: str = "",
    carried: Carried | None = None,
) -> ExportPlan:
    """Decide names, dtypes and files of an exported model.

    Args:
        model: the model on meta, from `build_model_from_assets`.
        stored: parameter name -> dtype and shape of the stored weights.
        override: dtype of all floating tensors; None keeps the dtypes of the source.
        limit: largest size of a weight file in bytes.
        where: location of the weights, for error messages.
        prefix: prefix of the stored names in that location, for error messages.
        carried: tensors of the source that are not parameters of `model`. `carried.tensors` are
            exported. If `carried.omitted` is not empty, config.json does not declare the layers of
            the omitted tensors. None: the source has no such tensors.

    Raises:
        ExportError: `stored` and the model do not fit together (the error names the tensor), or a
            dtype cannot be exported.
    """
    assets, origin = assets_of(model), _match_parameters(model, stored, where, prefix)
    order = {name: i for i, name in enumerate(origin)}
    groups = sorted(export_groups(model, origin), key=lambda g: min(order[n] for n in g.sources))
    groups = _rename_to_source_keys(model, groups)
    default = _choose_default_dtype(assets)
    names = {name: _spell_like_source(name, model) for group in groups for name in group.outputs}
    names |= _match_converted_outputs(model, groups, names)
    extra_tensors = {} if carried is None else carried.tensors
    extra_tensors = {
        name: tensor for name, tensor in extra_tensors.items() if name not in names.values()
    }
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for group in groups:
        dtypes = {stored[origin[n]][0] for n in group.sources}
        if len(dtypes) > 1:
            raise ExportError(f"{group.sources} are exported together but stored as {dtypes}")
        (dtype,) = dtypes
        for name, shape in group.outputs.items():
            source_dtype = (assets.source or {}).get(names[name])
            export_dtype: torch.dtype | None = dtype
            if dtype.is_floating_point:
                export_dtype = override or (
                    default if source_dtype is None else DTYPES.get(source_dtype)
                )
            if export_dtype is None or (dtype.is_floating_point and export_dtype not in CASTABLE):
                raise ExportError(
                    f"{names[name]} is {source_dtype} in the source checkpoint (quantized), to "
                    "which nothing is cast; pass --dtype bfloat16"
                )
            shapes[names[name]] = export_dtype, shape
    for name, entry in extra_tensors.items():
        groups.append(ExportGroup((), {name: entry.shape}, False))
        shapes[name] = (
            (override if override and entry.dtype in CASTABLE else entry.dtype),
            entry.shape,
        )
    names |= {name: name for name in extra_tensors}
    tensors, headers = _lay_out_files(shapes, limit)
    config_dtype = override or (default if assets.source is None else None)
    has_omitted = carried is not None and bool(carried.omitted)
    files = {**assets.files, "config.json": _format_config(model, config_dtype, has_omitted)}
    if len(headers) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        placed = {name: tensors[name].file.name for name in sorted(tensors)}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        files[INDEX_FILE] = (json.dumps(index, indent=2) + "\n").encode()
    return ExportPlan(model, origin, groups, names, tensors, extra_tensors, headers, files)


def _rename_to_source_keys(model: PreTrainedModel, groups: list[ExportGroup]) -> list[ExportGroup]:
    """Return the groups with the key names of the source model, for groups without a conversion.

    If the source stores a tied parameter under several keys, its group gets all of them. Groups
    with a conversion, and all groups if there is no source, are unchanged.
    """
    assets = assets_of(model)
    if assets.source is None:
        return groups
    plain, first = group_source_keys(model, assets.source).plain, tied_names(model)
    keys: dict[str, list[str]] = {}
    for name, source_names in plain.items():
        keys.setdefault(first.get(name, name), []).extend(source_names)

    def rename_group(group: ExportGroup) -> ExportGroup:
        """Return the group with the source's key names; unchanged if it is converted."""
        parameter = group.sources[0]
        source_names = keys.get(first.get(parameter, parameter)) if not group.converted else None
        if not source_names:
            return group
        (shape,) = group.outputs.values()
        return ExportGroup(group.sources, dict.fromkeys(source_names, shape), False)

    return [rename_group(group) for group in groups]


def _match_converted_outputs(
    model: PreTrainedModel, groups: list[ExportGroup], names: Mapping[str, str]
) -> dict[str, str]:
    """Map outputs of converted groups (fused experts) to the keys that the source uses for them.

    transformers may load several spellings of a key (`layers` and `blocks` in kimi_k25), but writes
    only one. Outputs and source keys that belong to the same parameter and conversion pattern are
    paired in natural order, in which the loader merges them.

    Args:
        model: the model.
        groups: the groups of the export.
        names: output -> its name so far, for all groups.

    Returns:
        Output -> key in the source, only for groups with a name that the source does not have.
    """
    source = assets_of(model).source
    if source is None:
        return {}
    converted = (group for group in groups if group.converted)
    unknown = [group for group in converted if any(names[n] not in source for n in group.outputs)]
    if not unknown:
        return {}
    outputs = [name for group in unknown for name in group.outputs]
    output_slots, source_slots = (
        _group_keys_by_converter(model, outputs),
        _group_keys_by_converter(model, source),
    )
    pairs: dict[str, str] = {}
    for slot, members in output_slots.items():
        if len(members) == len(source_slots.get(slot, ())):
            pairs |= zip(members, source_slots[slot], strict=True)
    return pairs


def _group_keys_by_converter(
    model: PreTrainedModel, keys: Iterable[str]
) -> dict[tuple[str, str], list[str]]:
    """Group keys by the (parameter, conversion pattern) through which transformers loads them.

    Keys that need no conversion are skipped. Each list is in natural order (2 before 10).
    """
    slots: dict[tuple[str, str], list[str]] = {}
    for key, target, pattern in map_source_keys(model, keys):
        if pattern is not None:
            slots.setdefault((target, pattern), []).append(key)
    return {slot: sorted(members, key=_natural_sort_key) for slot, members in slots.items()}


def _natural_sort_key(key: str) -> list[tuple[str, int]]:
    """Build a sort key that orders numbers by value: `experts.2` comes before `experts.10`."""
    parts = [re.fullmatch(r"(.*?)(\d*)", part) for part in key.split(".")]
    return [(part[1], int(part[2] or -1)) for part in parts if part]


def _match_parameters(
    model: PreTrainedModel, stored: TensorShapes, where: str, prefix: str
) -> dict[str, str]:
    """Map each exported parameter name to the name under which it is stored.

    The order is that of the model. A tied parameter is exported once, under the name that
    transformers keeps, and may be stored under any of its names. `where` and `prefix` are for error
    messages.

    Raises:
        ExportError: a name is missing or unknown, or a shape differs.
    """
    state, families, aliases = model.state_dict(), tied_families(model), tied_names(model)
    described = f"{type(model).__name__} of {assets_of(model).folder}/config.json"
    doubt = "is it the config of this checkpoint?"
    if unknown := sorted(stored.keys() - state.keys()):
        raise ExportError(
            f"{where} holds {prefix}{unknown[0]}{_and_n_more(unknown)}, which {described} does "
            f"not have; {doubt}"
        )
    owned = {name: families.get(name, [name]) for name in state if name not in aliases}
    if missing := [name for name, family in owned.items() if not stored.keys() & set(family)]:
        raise ExportError(
            f"{where} lacks {prefix}{missing[0]}{_and_n_more(missing)}, which "
            f"{type(model).__name__} needs: the checkpoint is incomplete or of another model"
        )
    origin, dropped = {}, model.all_tied_weights_keys or {}
    for name, family in owned.items():
        stored_name = next(member for member in family if member in stored)
        shape, expected = stored[stored_name][1], tuple(state[name].shape)
        if shape != expected:
            raise ExportError(
                f"{prefix}{stored_name} is {shape} in {where}, {expected} in {described}; {doubt}"
            )
        origin[min(family, key=lambda name: name in dropped)] = stored_name
    return origin


def _spell_like_source(name: str, model: PreTrainedModel) -> str:
    """Return `name` in the spelling of the source: with or without the base model's prefix.

    For example, transformers loads both `transformer.wte` and `wte`, and always writes the prefix.
    If the source has neither spelling, `name` is returned unchanged.
    """
    prefix, source = f"{model.base_model_prefix}.", assets_of(model).source or {}
    spellings = (name, name.removeprefix(prefix), prefix + name)
    return next((spelling for spelling in spellings if spelling in source), name)


def _choose_default_dtype(assets: HFAssets) -> torch.dtype:
    """Choose the dtype for floating tensors that the source model does not have.

    It is the config's dtype if that is usable, or else the most common one of the source's tensors.
    If neither is known, it is bfloat16.
    """
    name = assets.config.get("dtype", assets.config.get("torch_dtype"))
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if dtype in CASTABLE:
        return dtype
    kinds = [DTYPES.get(kind) for kind in (assets.source or {}).values()]
    return max(CASTABLE, key=kinds.count) if set(kinds) & set(CASTABLE) else torch.bfloat16


def make_adapter_plan(
    hf: Path,
    stored: TensorShapes,
    override: torch.dtype | None,
    *,
    where: str,
    base: dict[str, Any],
) -> ExportPlan:
    """Decide names, dtypes and content of an exported PEFT adapter, which has one weight file.

    Args:
        hf: the folder with the assets of the base and adapter_config.json.
        stored: parameter name -> dtype and shape of the stored adapter tensors.
        override: dtype of all floating tensors; None keeps the stored dtypes.
        where: location of the tensors, for error messages.
        base: `name_or_path` and `revision` of the base, for adapter_config.json.

    Raises:
        ExportError: names or shapes of the tensors are not those that adapter_config.json implies
            (the error names a tensor).
    """
    config = read_adapter_config(hf)
    layout = build_peft_layout(build_model_from_assets(hf), config)
    shapes = {name: tuple(t.shape) for name, t in layout.model.state_dict().items()}
    expected = set(layout.keys.values())
    for kind, names in (
        ("lacks", expected - stored.keys()),
        ("also holds", stored.keys() - expected),
    ):
        if names:
            raise ExportError(
                f"{where} {kind} {min(names)}{_and_n_more(names)}: the adapter is not the "
                f"one of its {ADAPTER_FILE}"
            )
    placed = {}
    for key, name in layout.keys.items():
        dtype, shape = stored[name]
        if shape != shapes[name]:
            raise ExportError(f"{name} is {shape} in {where}, {ADAPTER_FILE} says {shapes[name]}")
        placed[key] = override if override and dtype.is_floating_point else dtype, shape
    tensors, headers = _lay_out_files(placed, math.inf, ADAPTER_WEIGHTS)
    files = {
        n: content for n, content in assets_of(layout.base).files.items() if is_adapter_asset(n)
    }
    # The exported adapter is for inference, and names its base.
    base_entry = {"base_model_name_or_path": base["name_or_path"], "revision": base.get("revision")}
    content = {**config, "inference_mode": True, **base_entry}
    files[ADAPTER_FILE] = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return ExportPlan(
        model=layout.base,
        stored={name: name for name in layout.keys.values()},
        groups=[ExportGroup((n,), {k: shapes[n]}, False) for k, n in layout.keys.items()],
        names={key: key for key in layout.keys},
        tensors=tensors,
        carried={},
        headers=headers,
        assets=files,
    )


def describe_adapter_origin(
    hf: Path,
    entry: dict[str, Any],
    plan: ExportPlan,
    run: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the export manifest's entry on the adapter: its settings, its base model and its class.

    The class is that of the model on which the adapter was trained, which may be only the text
    model of the base. If the base was a path, only its last part is recorded.

    Args:
        hf: the folder with adapter_config.json and the config of the base.
        entry: the adapter entry of state.json.
        plan: the plan of the export.
        run: facts of the run (`collect_run_facts`); their `base_model` is used if there is one.
    """
    config = read_adapter_config(hf)
    return {
        "base": {
            **((run or {}).get("base_model") or describe_base_model(entry)),
            "digest": entry.get("digest"),
            **({"rows": entry["rows"]} if entry.get("rows") else {}),  # resized to
        },
        "base_class": type(plan.model).__name__,
        "base_config": read_base_config(hf),
        "settings": {name: config[name] for name in _SETTINGS if config.get(name)},
        **({"continued": entry["continued"]} if entry.get("continued") else {}),
    }


def _lay_out_files(
    shapes: TensorShapes, limit: float, single: str = SINGLE_FILE
) -> tuple[dict[str, StoredTensor], dict[str, bytes]]:
    """Distribute tensors over weight files in the given order, and build the files' headers.

    Args:
        shapes: exported name -> dtype and shape.
        limit: largest size of a file in bytes; a larger tensor gets a separate file.
        single: name of the file if one file is enough.

    Returns:
        ({exported name: file, offset, dtype and shape}, {file name: header bytes}).

    Raises:
        ExportError: safetensors has no such dtype.
    """
    shards: list[list[str]] = [[]]
    sizes: dict[str, int] = {}
    filled = 0
    for name, (dtype, shape) in shapes.items():
        if dtype not in DTYPE_NAMES:
            raise ExportError(f"{name} is {dtype}, which safetensors cannot store")
        sizes[name] = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + sizes[name] > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    tensors, headers = {}, {}
    for i, members in enumerate(shards):
        file = single if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        # Widest dtype first, as safetensors' writer does: all tensors are aligned to their items.
        members.sort(key=lambda n: -shapes[n][0].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in members:
            dtype, shape = shapes[name]
            begin, end = end, end + sizes[name]
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)}
            header[name]["data_offsets"] = [begin, end]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        for name in members:
            begin = len(headers[file]) + header[name]["data_offsets"][0]
            tensors[name] = contiguous_tensor(Path(file), *shapes[name], begin)
    return tensors, headers


def _format_config(
    model: PreTrainedModel, config_dtype: torch.dtype | None, has_omitted: bool = False
) -> bytes:
    """Format the config.json of an export; without changes, return the source's bytes.

    Training wrappers in `architectures` are replaced by the model's class.

    Args:
        model: the exported model.
        config_dtype: the dtype to declare, because `from_pretrained` casts to it; None keeps it.
        has_omitted: True if tensors are omitted. The number of their layers is then set to 0.
    """
    assets = assets_of(model)
    config = copy.deepcopy(assets.config)
    if config_dtype is not None:
        name = str(config_dtype).removeprefix("torch.")
        for section in [config, *(v for v in config.values() if isinstance(v, dict))]:
            section_dtype = section.get("dtype", section.get("torch_dtype"))
            if section_dtype != name and (section_dtype is not None or section is config):
                section.pop("torch_dtype", None)
                section["dtype"] = name
    if has_omitted:
        for section in [config, *(v for v in config.values() if isinstance(v, dict))]:
            section.update(dict.fromkeys(section.keys() & {*NEXT_TOKEN_LAYERS}, 0))
        if assets.whole is not None:
            config["architectures"] = [type(model).__name__]
    class_name = type(model).__name__
    architectures = config.get("architectures") or []
    plain = [name.removeprefix(_WRAPPER) for name in architectures]
    if class_name in plain and plain != architectures:  # written by a sharded model
        config["architectures"] = plain
    elif class_name not in plain and (not architectures or architectures[0].endswith("Model")):
        config["architectures"] = [class_name]  # also if a base model gained its head
    if config == assets.config:
        return Path(str(assets.folder), "config.json").read_bytes()
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _and_n_more(names: Collection[str]) -> str:
    """Return " (and N more)", with N one less than the number of names; "" for a single name."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
