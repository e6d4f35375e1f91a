"""Adapters as PEFT keeps them: their config, their key names, and what each of them adapts.

Key names are asked of PEFT; nothing here spells one by hand.
"""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import ExportError, one_line
from toolkit.formats import ADAPTER_FILE, Tensors
from toolkit.models.modes import forked_rng
from toolkit.models.peft_model import ADAPTER, layer_parameters
from toolkit.parsing import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENTRY = "adapter"  # of a checkpoint's manifest: which base was adapted
_ROLE = re.compile(r"lora_(?:embedding_)?(A|B|magnitude)")  # in PEFT's names


@dataclass(frozen=True)
class AdapterLayer:
    """One layer of the adapter: which parameter of the base it adapts, and with what."""

    parameter: str  # of the base
    kind: str  # linear, embedding, experts, or saved: trained as a whole
    module: str  # PEFT's layer, in the adapted model
    tensors: dict[str, str]  # A, B, magnitude or saved -> parameter of the adapted model
    rank: int = 0


@dataclass
class PeftLayout:
    """An adapted model on meta, and how its parameters are called elsewhere."""

    model: Any  # the PeftModel around `base`
    base: "PreTrainedModel"
    keys: dict[str, str]  # key in the file -> parameter of the adapted model; tied ones: the first
    parts: dict[str, list[AdapterLayer]] = field(default_factory=dict)
    """Parameter of the base -> what adapts it; of tied parameters under the first name."""


# Settings of PEFT's that the export follows, and those that say nothing alone. Any other one that
# is switched on is refused: what it does to the layers, or imports, is not known here.
_KNOWN = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
    *("base_model_name_or_path", "revision", "runtime_config", "megatron_core"),
    *("r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "exclude_modules", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "qalora_group_size", "ensure_weight_tying"),
}
_SCOPE = "known are LoRA, DoRA, rsLoRA of linear layers, embeddings, experts, and modules_to_save"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json, which anybody may have written; ExportError: not supported."""
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ExportError(f"{folder} has no {ADAPTER_FILE}; it is no folder of an adapter")
    content = read_json(file, ExportError)
    if not isinstance(content, dict):
        raise ExportError(f"{file} must hold a JSON object, got {type(content).__name__}")
    kind, rank = content.get("peft_type"), content.get("r")
    if kind != "LORA" or type(rank) is not int or rank < 1:
        raise ExportError(f"{file} is of peft_type {kind!r} and r {rank!r}, LORA is expected")
    for name in ("base_model_name_or_path", "revision"):
        if not isinstance(content.get(name), str | None):
            raise ExportError(f"{file}: {name} is {content[name]!r}, a text or null is expected")
    odd = {name: value for name, value in content.items() if value and name not in _KNOWN}
    if content.get("bias") not in (None, "none"):
        odd["bias"] = content["bias"]
    start = content.get("init_lora_weights")
    if not (isinstance(start, bool | None) or start in ("gaussian", "orthogonal")):
        odd["init_lora_weights"] = start  # it subtracts what it begins with from the base
    if odd:
        shown = "; ".join(f"{name} is {str(value)[:60]!r}" for name, value in odd.items())
        raise ExportError(f"{file} has settings that are not supported here ({shown}): {_SCOPE}")
    return content


def attach_adapters(base: "PreTrainedModel", config: dict[str, Any]) -> Any:
    """Return `base` with the adapters of `config` in it, as a PeftModel; on meta it stays there."""
    from peft import LoraConfig, get_peft_model

    meta = all(p.is_meta for p in base.parameters())
    where = torch.device("meta") if meta else contextlib.nullcontext()
    try:
        # PEFT draws first values for every adapter.
        with warnings.catch_warnings(action="ignore"), forked_rng(), where:
            own = copy.deepcopy(config)  # whose lists PEFT adds to
            peft_config = LoraConfig.from_peft_type(**LoraConfig.check_kwargs(**own))
            return get_peft_model(base, peft_config, ADAPTER)
    except Exception as error:  # a config from outside: PEFT may raise anything
        raise ExportError(
            f"PEFT cannot put the adapter of {ADAPTER_FILE} into {type(base).__name__}: "
            f"{one_line(error)}"
        ) from error


def peft_layout(base: "PreTrainedModel", config: dict[str, Any]) -> PeftLayout:
    """Return the adapted model of `base`, on meta, and PEFT's names; ExportError: unsupported."""
    names = _first_names(base)
    model = attach_adapters(base, config)
    layout = PeftLayout(model, base, adapter_file_keys(model))
    for part in _parts(model, names):
        layout.parts.setdefault(part.parameter, []).append(part)
    held = {n for parts in layout.parts.values() for p in parts for n in p.tensors.values()}
    odd = sorted(set(layout.keys.values()) - held)
    if odd:
        raise ExportError(f"{odd[0]} is trained and not known to the export: {_SCOPE}")
    return layout


def adapter_file_keys(model: Any, *, embeddings: bool = False) -> dict[str, str]:
    """Return key in the file -> parameter, as PEFT's own saving names them; with `embeddings` also
    the frozen matrices of embedding and head that PEFT may save along.
    """
    from peft import get_peft_model_state_dict

    first = _first_names(model)
    # PEFT passes the values on untouched: here they say which parameter they stand for.
    state = {name: first[id(tensor)] for name, tensor in _tensors(model)}
    # By default PEFT adds the frozen matrix of an embedding that is adapted.
    options: dict[str, Any] = {"adapter_name": ADAPTER, "save_embedding_layers": embeddings}
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model_state_dict(model, state, **options)


def _parts(model: Any, names: dict[int, str]) -> Iterator[AdapterLayer]:
    """Yield the layers of the adapter; `names`: id of a parameter of the base -> its name."""
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    first = _first_names(model)
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = dict(_tensors(module.modules_to_save[ADAPTER]))
            for leaf, tensor in _tensors(module.original_module):
                if id(tensor) not in names:
                    raise ExportError(f"{path} is saved whole and adapted within: {_SCOPE}")
                tensors = {"saved": first[id(saved[leaf])]}
                yield AdapterLayer(names[id(tensor)], "saved", path, tensors)
        elif isinstance(module, ParamWrapper | Embedding | Linear):
            kinds = {ParamWrapper: "experts", Embedding: "embedding"}
            kind = next((k for c, k in kinds.items() if isinstance(module, c)), "linear")
            parameter = getattr(module.get_base_layer(), _leaf(module))
            found = layer_parameters(module).items()
            own = {_ROLE.match(n)[1]: first[id(p)] for n, p in found}  # type: ignore[index]
            yield AdapterLayer(names[id(parameter)], kind, path, own, module.r[ADAPTER])


def _tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """Return every parameter, tied ones under each name, and every persistent buffer."""
    return [*module.state_dict(keep_vars=True).items()]


def _first_names(module: nn.Module) -> dict[int, str]:
    """Return id of a tensor -> its first name."""
    return {id(tensor): name for name, tensor in reversed(_tensors(module))}


def fill_without_memory(base: "PreTrainedModel") -> "PreTrainedModel":
    """Give a model on meta parameters of their shape and one element of memory each (stride 0):
    PEFT's own `from_pretrained` then runs unchanged, at the cost of the adapter alone.
    """
    made: dict[int, torch.Tensor] = {}
    for module in base.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_meta:
                empty = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                new = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
                setattr(module, name, made.setdefault(id(tensor), new))
    return base


def load_with_peft(
    base: "PreTrainedModel", folder: Path, *, empty: bool = False
) -> tuple[Any, list[str]]:
    """Load an adapter as its readers do, with `PeftModel.from_pretrained`; return the model and
    PEFT's warnings of keys that it did not find.

    With `empty`, of a base `without_storage`, PEFT begins with adapters on meta, where it can; what
    was not in the folder is still there. ExportError where PEFT or `read_config` refuses it.
    """
    from peft import PeftModel

    # Copies of whole modules would lose their ties on meta.
    lean = empty and not read_adapter_config(folder).get("modules_to_save")
    try:
        with warnings.catch_warnings(record=True, action="always") as caught, forked_rng():
            model = PeftModel.from_pretrained(
                base, str(folder), ADAPTER, torch_device="cpu", low_cpu_mem_usage=lean
            )
    except Exception as error:  # whatever is in the folder: PEFT may raise anything
        raise ExportError(
            f"{folder} is not loaded by PeftModel.from_pretrained: {one_line(error)}"
        ) from error
    warned = [" ".join(str(w.message).split()) for w in caught]
    return model, [text for text in warned if "missing adapter keys" in text]


def merge_layer(
    layout: PeftLayout, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
) -> torch.Tensor:
    """Return `weight` with one layer of the adapter merged in, by PEFT's own layer.

    So it is what `merge_and_unload` makes of that parameter, to the bit. `factors` (A, B and
    magnitude) are in float32, as PEFT loads them. `weight` is changed in place; three tensors of
    its size in fp32 are held beside it (DoRA: five).
    """
    with _holding(layout, layer, weight, factors) as module:
        module.merge(safe_merge=False, adapter_names=[ADAPTER])
        return getattr(module.get_base_layer(), _leaf(module)).data


def weight_delta(layout: PeftLayout, layer: AdapterLayer, factors: Tensors) -> torch.Tensor:
    """Return what PEFT's layer adds to its weight for these factors, in float32."""
    module = layout.model.get_submodule(layer.module)
    shape = getattr(module.get_base_layer(), _leaf(module)).shape
    with _holding(layout, layer, torch.zeros(()).expand(shape), factors) as module:
        return module.get_delta_weight(ADAPTER)


def _leaf(module: Any) -> str:
    """Return the name of the parameter that a layer of PEFT adapts, in its base layer."""
    return getattr(module, "parameter_name", "weight")


@contextlib.contextmanager
def _holding(
    layout: PeftLayout, layer: AdapterLayer, weight: torch.Tensor, factors: Tensors
) -> Iterator[Any]:
    """Yield PEFT's layer with these tensors; afterwards it is on meta again."""
    module = layout.model.get_submodule(layer.module)
    held = [(module.get_base_layer(), _leaf(module), weight)]
    for role, factor in factors.items():
        path, _, leaf = layer.tensors[role].rpartition(".")
        held.append((layout.model.get_submodule(path), leaf, factor))
    before = [(owner, leaf, owner._parameters[leaf]) for owner, leaf, _ in held]
    for owner, leaf, value in held:
        owner._parameters[leaf] = nn.Parameter(value, False)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            yield module
    finally:
        for owner, leaf, value in before:
            owner._parameters[leaf] = value
        module.merged_adapters.clear()
        getattr(module, "_caches", {}).clear()
