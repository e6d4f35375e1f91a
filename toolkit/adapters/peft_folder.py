"""Read and write adapters as PEFT keeps them: config, key names, and the adapted parameters.

PEFT computes the key names; no name is spelled by hand here.
"""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import ExportError, one_line
from toolkit.formats import ADAPTER_FILE, StoredTensor, Tensors, read_tensor
from toolkit.formats.bit_sums import part_sums
from toolkit.models.modes import forked_rng
from toolkit.models.peft_model import ADAPTER, adapted_parameters, layer_parameters
from toolkit.parsing import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENTRY = "adapter"  # key of the adapted base in a checkpoint's manifest
_ROLE = re.compile(r"lora_(?:embedding_)?(A|B|magnitude)")  # in PEFT's names


@dataclass(frozen=True)
class AdapterLayer:
    """One LoRA layer, or one tensor trained in full, with the base parameter that it changes."""

    parameter: str  # of the base
    kind: str  # linear, embedding, experts, or saved (trained in full)
    module: str  # PEFT's layer, in the adapted model
    tensors: dict[str, str]  # A, B, magnitude or saved -> parameter of the adapted model
    rank: int = 0


@dataclass
class PeftLayout:
    """An adapted model on meta, with its parameters' names in the adapter file and in the base."""

    model: Any  # the PeftModel around `base`
    base: "PreTrainedModel"
    keys: dict[str, str]  # key in the file -> parameter of the adapted model; tied ones: the first
    parts: dict[str, list[AdapterLayer]] = field(default_factory=dict)
    """Parameter of the base (first name if tied) -> the layers that adapt it."""


# PEFT settings that the export supports, and settings without an effect of their own. Any other
# setting that is switched on is refused, because its effect on the layers or its imports are
# unknown.
# fmt: off
_SUPPORTED_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode",
    "base_model_name_or_path", "revision", "runtime_config", "megatron_core",
    "r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "use_dora",
    "target_modules", "target_parameters", "exclude_modules", "modules_to_save",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "qalora_group_size", "ensure_weight_tying",
}
# fmt: on
_SCOPE = "known are LoRA, DoRA, rsLoRA of linear layers, embeddings, experts, and modules_to_save"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of a folder, and validate it, since its author may not be trusted.

    Raises:
        ExportError: the file is missing or damaged, or its settings are not supported.
    """
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ExportError(f"{folder} has no {ADAPTER_FILE}; it is no folder of an adapter")
    content = read_json(file, ExportError)
    if not isinstance(content, dict):
        raise ExportError(f"{file} must hold a JSON object, got {type(content).__name__}")
    kind = content.get("peft_type")
    rank = content.get("r")
    if kind != "LORA" or type(rank) is not int or rank < 1:
        raise ExportError(f"{file} is of peft_type {kind!r} and r {rank!r}, LORA is expected")
    for name in ("base_model_name_or_path", "revision"):
        if not isinstance(content.get(name), str | None):
            raise ExportError(f"{file}: {name} is {content[name]!r}, a text or null is expected")
    odd = {name: value for name, value in content.items() if value and name not in _SUPPORTED_KEYS}
    if content.get("bias") not in (None, "none"):
        odd["bias"] = content["bias"]
    start = content.get("init_lora_weights")
    if not (isinstance(start, bool | None) or start in ("gaussian", "orthogonal")):
        odd["init_lora_weights"] = start  # this start subtracts its values from the base
    if odd:
        listed = "; ".join(f"{name} is {str(value)[:60]!r}" for name, value in odd.items())
        raise ExportError(f"{file} has settings that are not supported here ({listed}): {_SCOPE}")
    return content


def attach_adapters(base: "PreTrainedModel", config: dict[str, Any]) -> Any:
    """Wrap `base` in PEFT with the adapters of a config; they are on meta if `base` is.

    Args:
        base: the base model; it is changed in place.
        config: content of adapter_config.json.

    Returns:
        The PeftModel around `base`.

    Raises:
        ExportError: PEFT refuses the config.
    """
    from peft import LoraConfig, get_peft_model

    meta = all(p.is_meta for p in base.parameters())
    where = torch.device("meta") if meta else contextlib.nullcontext()
    try:
        # PEFT draws first values for every adapter.
        with warnings.catch_warnings(action="ignore"), forked_rng(), where:
            # PEFT appends to the lists of the config.
            own_config = copy.deepcopy(config)
            peft_config = LoraConfig.from_peft_type(**LoraConfig.check_kwargs(**own_config))
            return get_peft_model(base, peft_config, ADAPTER)
    except Exception as error:
        # PEFT may raise any error, as anybody may have written the config.
        raise ExportError(
            f"PEFT cannot put the adapter of {ADAPTER_FILE} into {type(base).__name__}: "
            f"{one_line(error)}"
        ) from error


def build_peft_layout(base: "PreTrainedModel", config: dict[str, Any]) -> PeftLayout:
    """Add the adapters of a PEFT config to `base`, a model on meta, and build its `PeftLayout`.

    Raises:
        ExportError: PEFT refuses the config, or the export does not support a trained parameter.
    """
    names = _first_names(base)
    model = attach_adapters(base, config)
    layout = PeftLayout(model, base, map_file_keys(model))
    for part in _iterate_layers(model, names):
        layout.parts.setdefault(part.parameter, []).append(part)
    named_parameters = {
        n for parts in layout.parts.values() for p in parts for n in p.tensors.values()
    }
    odd = sorted(set(layout.keys.values()) - named_parameters)
    if odd:
        raise ExportError(f"{odd[0]} is trained and not known to the export: {_SCOPE}")
    return layout


def map_file_keys(model: Any, *, embeddings: bool = False) -> dict[str, str]:
    """Map each key that PEFT writes to an adapter file to the name of its parameter in `model`.

    Args:
        model: a model with adapters.
        embeddings: include the frozen matrices of embedding and head, which PEFT saves by default
            if an embedding is adapted.
    """
    from peft import get_peft_model_state_dict

    first = _first_names(model)
    # PEFT returns the values unchanged. Here the values are the names of parameters.
    state = {name: first[id(tensor)] for name, tensor in _list_tensors(model)}
    # By default PEFT adds the frozen matrix of an embedding that is adapted.
    options: dict[str, Any] = {"adapter_name": ADAPTER, "save_embedding_layers": embeddings}
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model_state_dict(model, state, **options)


def sum_tensor_bits(
    keys: Mapping[str, str], entries: Mapping[str, StoredTensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, int]:
    """Sum the bits of the tensors in an adapter file, in the dtypes of their parameters.

    A file may hold two copies of a matrix that is one parameter here, such as a tied embedding.

    Args:
        keys: key in the file -> name of its parameter.
        entries: key -> tensor in the file.
        dtypes: name -> dtype of the parameter.

    Returns:
        Name -> sum.

    Raises:
        ExportError: two tensors of one parameter have other values.
    """
    sums: dict[str, int] = {}
    for key, name in keys.items():
        total = int(part_sums(read_tensor(entries[key]).to(dtypes[name]))[1])
        if sums.setdefault(name, total) != total:
            raise ExportError(
                f"{key} is one matrix with another of its tensors in this model, and holds other "
                "values; merge the adapter into its base instead"
            )
    return sums


def describe_other_scaling(theirs: Any, ours: Any) -> str:
    """Name a LoRA layer that two models with adapters scale differently; "" if there is none.

    Args:
        theirs: the model as PEFT builds it from the adapter's config.
        ours: the model of the run.
    """
    layers = adapted_parameters(theirs)
    for name, layer in adapted_parameters(ours).items():
        read, scale = (getattr(m, "scaling", None) for m in (layers.get(name), layer))
        if read != scale:
            return (
                f"PEFT scales the adapter of {name} by {read}, this run by {scale}: a setting of "
                f"its {ADAPTER_FILE} is not carried over"
            )
    return ""


def _iterate_layers(model: Any, names: dict[int, str]) -> Iterator[AdapterLayer]:
    """Yield an `AdapterLayer` for each PEFT layer, and for each tensor that is trained in full.

    Args:
        model: a model with adapters.
        names: `id()` of each parameter and buffer of the base -> its name.

    Raises:
        ExportError: a module that is trained in full has adapters inside.
    """
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    first = _first_names(model)
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            trained = dict(_list_tensors(module.modules_to_save[ADAPTER]))
            for leaf, tensor in _list_tensors(module.original_module):
                if id(tensor) not in names:
                    raise ExportError(f"{path} is saved in full and also adapted inside: {_SCOPE}")
                tensors = {"saved": first[id(trained[leaf])]}
                yield AdapterLayer(names[id(tensor)], "saved", path, tensors)
        elif isinstance(module, ParamWrapper | Embedding | Linear):
            kinds = {ParamWrapper: "experts", Embedding: "embedding"}
            kind = next((k for c, k in kinds.items() if isinstance(module, c)), "linear")
            parameter = getattr(module.get_base_layer(), _parameter_name(module))
            parameters = layer_parameters(module).items()
            tensors_by_role = {_ROLE.match(n)[1]: first[id(p)] for n, p in parameters}  # type: ignore[index]
            yield AdapterLayer(names[id(parameter)], kind, path, tensors_by_role, module.r[ADAPTER])


def _list_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """List (name, tensor) of all parameters and persistent buffers; tied ones with each name."""
    return [*module.state_dict(keep_vars=True).items()]


def _first_names(module: nn.Module) -> dict[int, str]:
    """Map the `id()` of each parameter and persistent buffer to its first name."""
    return {id(tensor): name for name, tensor in reversed(_list_tensors(module))}


def fill_without_memory(base: "PreTrainedModel") -> "PreTrainedModel":
    """Replace each meta tensor by zeros on the CPU that take the memory of one element (stride 0).

    PEFT's own `from_pretrained` then runs unchanged, and needs memory for the adapter only.

    Returns:
        `base`, which is changed in place.
    """
    filled: dict[int, torch.Tensor] = {}
    for module in base.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                new = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
                setattr(module, name, filled.setdefault(id(tensor), new))
    return base


def load_with_peft(
    base: "PreTrainedModel", folder: Path, *, empty: bool = False
) -> tuple[Any, list[str]]:
    """Load an adapter folder with `PeftModel.from_pretrained`, as its users do.

    Args:
        base: the base model.
        folder: the adapter folder.
        empty: set it if `base` comes from `fill_without_memory`. Adapters are then created on meta,
            so a tensor that the folder lacks stays on meta. With `modules_to_save` they are created
            on the CPU.

    Returns:
        The adapted model, and PEFT's warnings about missing keys.

    Raises:
        ExportError: PEFT cannot load the folder, or with `empty`, its config is not supported.
    """
    from peft import PeftModel

    # Copies of complete modules would lose their ties on meta.
    lean = empty and not read_adapter_config(folder).get("modules_to_save")
    try:
        with warnings.catch_warnings(record=True, action="always") as caught, forked_rng():
            model = PeftModel.from_pretrained(
                base, str(folder), ADAPTER, torch_device="cpu", low_cpu_mem_usage=lean
            )
    except Exception as error:
        # PEFT may raise any error, as anybody may have written the folder.
        raise ExportError(
            f"{folder} is not loaded by PeftModel.from_pretrained: {one_line(error)}"
        ) from error
    messages = [" ".join(str(w.message).split()) for w in caught]
    return model, [text for text in messages if "missing adapter keys" in text]


def merge_layer(
    layout: PeftLayout, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
) -> torch.Tensor:
    """Merge one adapter layer into its base weight, with the code of PEFT's layer.

    The result is bitwise identical to that of `merge_and_unload`. Takes three more tensors of the
    weight's size in fp32 (DoRA: five).

    Args:
        layout: layout of the adapted model.
        layer: the layer to merge.
        weight: the base weight; it is changed in place.
        factors: tensors in float32 under the keys `A`, `B` and, for DoRA, `magnitude`.

    Returns:
        The merged weight.
    """
    with _fill_layer(layout, layer, weight, factors) as module:
        module.merge(safe_merge=False, adapter_names=[ADAPTER])
        return getattr(module.get_base_layer(), _parameter_name(module)).data


def compute_weight_delta(layout: PeftLayout, layer: AdapterLayer, factors: Tensors) -> torch.Tensor:
    """Compute the float32 tensor that a merge would add to the base weight, with PEFT's code.

    Args:
        layout: layout of the adapted model.
        layer: the adapter layer.
        factors: tensors in float32 under the keys `A` and `B`.
    """
    module = layout.model.get_submodule(layer.module)
    shape = getattr(module.get_base_layer(), _parameter_name(module)).shape
    with _fill_layer(layout, layer, torch.zeros(()).expand(shape), factors) as module:
        return module.get_delta_weight(ADAPTER)


def _parameter_name(module: Any) -> str:
    """Return the name of the parameter that a PEFT layer adapts, such as `weight`.

    Only layers of fused experts name another parameter.
    """
    return getattr(module, "parameter_name", "weight")


@contextlib.contextmanager
def _fill_layer(
    layout: PeftLayout, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
) -> Iterator[Any]:
    """Put tensors into a PEFT layer on meta, and yield the layer; afterwards it is on meta again.

    Args:
        layout: layout of the adapted model.
        layer: the adapter layer.
        weight: becomes the base weight.
        factors: tensors under the keys `A`, `B` and `magnitude`, which become the adapter's
            parameters.
    """
    module = layout.model.get_submodule(layer.module)
    entries = [(module.get_base_layer(), _parameter_name(module), weight)]
    for role, factor in factors.items():
        path, _, leaf = layer.tensors[role].rpartition(".")
        entries.append((layout.model.get_submodule(path), leaf, factor))
    before = [(owner, leaf, owner._parameters[leaf]) for owner, leaf, _ in entries]
    for owner, leaf, value in entries:
        owner._parameters[leaf] = nn.Parameter(value, False)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            yield module
    finally:
        for owner, leaf, value in before:
            owner._parameters[leaf] = value
        module.merged_adapters.clear()
        getattr(module, "_caches", {}).clear()
