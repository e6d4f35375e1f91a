"""Fused experts whose weights are in 4 bits (`lora.quantize_moe_experts`).

[Note: packed experts] Transformers keeps the weights of all experts of a layer in one tensor
[experts, ...]. Here each expert becomes one row of bytes (4-bit values, then scales), in the layout
of [Note: packed weights]. The parameter keeps its name and is the matrix of these rows, so FSDP2
shards whole experts. A forward dequantises the weights of its layer, runs the kernel of
transformers on them unchanged, and frees them. Without recomputation, autograd keeps them until the
backward; with `activation_checkpointing: full`, one layer at a time is dequantised.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.lora import LoraConfig
from toolkit.errors import ModelError
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import model_class_name
from toolkit.models.experts import expert_modules
from toolkit.models.layers import decoder_layers, expert_counts, tied_families
from toolkit.models.packed_linear import (
    BLOCK,
    QUANT_TYPE,
    SCALES,
    column_layout,
    get_code_tables,
    import_bitsandbytes,
    nf4_settings,
    nf4_text,
    packed_weights,
    quantise_matrix,
)

_SETTING = "lora.quantize_moe_experts"


class PackedExpertStack:
    """The 4-bit weights of all experts of a layer: one parameter of a `PackedExperts` module."""

    quant_type = QUANT_TYPE
    value_bits = 4

    def __init__(self, owner: nn.Module, leaf: str, lora: LoraConfig, storage: torch.dtype) -> None:
        weight = owner.get_parameter(leaf)
        self.owner = owner
        self.leaf = leaf
        self.shape = tuple(weight.shape)
        """Shape of the dequantised weights: (experts, ...)."""
        self.double_quant = lora.bnb_4bit_use_double_quant
        self.source_dtype = weight.dtype
        self.compute_dtype = storage
        self.elements = weight.numel()
        self.parts, self.row_bytes = column_layout(
            self.elements // self.shape[0], self.double_quant
        )
        self.nbytes = self.shape[0] * self.row_bytes
        # bitsandbytes' functions, because a compiled layer must not import.
        functional = import_bitsandbytes().functional
        self._dequantise, self._state = functional.dequantize_4bit, functional.QuantState
        self._tables: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedExpertStack":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # A module is copied before its stacks, so its copy is known.
        vars(copied).update(vars(self), owner=memo.get(id(self.owner), self.owner), _tables=None)
        return copied

    @property
    def weight(self) -> nn.Parameter:
        """The parameter of packed rows [experts, n], or this rank's shard of it."""
        return self.owner._parameters[self.leaf]  # type: ignore[return-value]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of bitsandbytes, and the block size."""
        return nf4_settings(self.double_quant)

    @property
    def format_text(self) -> str:
        """The format in words, for the log."""
        return nf4_text(self.double_quant)

    def pack(self, weights: torch.Tensor) -> torch.Tensor:
        """Quantise the weights of all experts on their device, each expert by itself.

        They are quantised in rows of whole blocks, so [Note: blocks] does not restrict their shape.

        Args:
            weights: tensor of shape `shape`.

        Returns:
            Rows [experts, n] in the storage dtype: the bytes of 4-bit values and scales.
        """
        rows = torch.zeros(self.shape[0], self.row_bytes, dtype=torch.uint8, device=weights.device)
        for row, weight in zip(rows, weights.to(self.source_dtype), strict=True):
            blocks = weight.contiguous().reshape(-1, BLOCK)
            nibbles, state = quantise_matrix(blocks, self.quant_type, self.double_quant)
            values = [nibbles, state.absmax]
            if self.double_quant:
                values += [state.state2.absmax, state.offset]
            for (place, dtype), value in zip(self.parts, values, strict=True):
                row[place] = value.to(dtype).contiguous().reshape(-1).view(torch.uint8)
        return rows.view(self.compute_dtype)

    def dequantise(self, rows: torch.Tensor) -> torch.Tensor:
        """Dequantise complete (not sharded) rows; return weights in the compute dtype."""
        flat = rows.detach().view(torch.uint8)
        values = [flat[:, place].contiguous().view(dtype) for place, dtype in self.parts]
        if self._tables is None or self._tables.code.device != rows.device:
            self._tables = get_code_tables(self.quant_type, self.double_quant, rows.device)
        scales = values[1]
        if self.double_quant:
            code = self._tables.state2.code
            of_scales = values[2].repeat_interleave(SCALES, dim=1)[:, : scales.shape[1]]
            scales = code[scales.long()] * of_scales + values[3]
        state = self._state(
            absmax=scales.reshape(-1),
            shape=torch.Size((self.elements // BLOCK, BLOCK)),
            code=self._tables.code,
            blocksize=BLOCK,
            quant_type=self.quant_type,
            dtype=self.compute_dtype,
        )
        return self._dequantise(values[0].reshape(-1, 1), state).reshape(self.shape)


class PackedExperts(nn.Module):
    """Fused experts with frozen 4-bit weights; see [Note: packed experts].

    The class of a module is changed to a subclass of this class and of its former class.
    """

    packed_stacks: dict[str, PackedExpertStack]
    """Name of a parameter -> its packed weights."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the experts' own forward on dequantised weights."""
        with self._dequantised():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _dequantised(self) -> Iterator[None]:
        """Within the context, attributes with the names of packed parameters are dequantised."""
        attributes = vars(self)  # Python reads them before nn.Module looks for parameters
        for leaf, stack in self.packed_stacks.items():
            attributes[leaf] = stack.dequantise(stack.weight)
        try:
            yield
        finally:
            for leaf in self.packed_stacks:
                attributes.pop(leaf, None)


@functools.cache
def _packed_class(kind: Any) -> type[nn.Module]:
    """Create the subclass of `kind` for packed experts. It has the same name. Cached."""
    return type(kind.__name__, (PackedExperts, kind), {"__module__": kind.__module__})


def pack_experts_on_meta(model: PreTrainedModel, cfg: LoraConfig, storage: torch.dtype) -> set[str]:
    """Replace the weights of fused experts in the decoder layers by packed ones, in place.

    Args:
        model: on meta, without adapters.
        cfg: the settings of adapters.
        storage: dtype in which FSDP2 computes.

    Returns:
        Names of the packed parameters.

    Raises:
        ModelError: the model has no fused experts, or the weights of some cannot be packed.
    """
    modules = _find_expert_weights(model)
    names = {f"{name}.{leaf}" for name, leaves in modules.items() for leaf in leaves}
    if not names:
        raise ModelError(
            f"{_SETTING}: {model_class_name(model)} has no fused experts (a tensor with the "
            "weights of all experts of a layer). Remove the setting"
        )
    _refuse_unpackable(model, names, cfg)
    for name, leaves in modules.items():
        module: Any = model.get_submodule(name)
        stacks = {leaf: PackedExpertStack(module, leaf, cfg, storage) for leaf in leaves}
        for leaf, stack in stacks.items():
            shape = (stack.shape[0], stack.row_bytes // storage.itemsize)
            empty = torch.empty(shape, dtype=storage, device=module.get_parameter(leaf).device)
            module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
        module.packed_stacks = stacks
        kind: Any = type(module)
        module.__class__ = _packed_class(kind)
    return names


def packed_expert_weights(model: nn.Module) -> dict[str, PackedExpertStack]:
    """Return parameter name -> stack, for the weights of fused experts that are in 4 bits."""
    packed = packed_weights(model).items()
    return {name: stack for name, stack in packed if isinstance(stack, PackedExpertStack)}


def _find_expert_weights(model: PreTrainedModel) -> dict[str, list[str]]:
    """Map each module in a decoder layer that holds experts to the names of their 3-d weights."""
    counts = expert_counts(model)
    weights: dict[str, list[str]] = {}
    for outer, decoder in decoder_layers(model).items():
        for inner, module in decoder.named_modules():
            leaves = [
                leaf
                for leaf, p in module.named_parameters(recurse=False)
                if p.ndim == 3 and p.shape[0] in counts
            ]
            if leaves:
                weights[f"{outer}.{inner}" if inner else outer] = leaves
    return weights


def _refuse_unpackable(model: PreTrainedModel, names: set[str], cfg: LoraConfig) -> None:
    """Raise a ModelError if one of the parameters `names` cannot be in 4 bits."""
    modules = expert_modules(model)
    fp32 = set(find_fp32_tensors(model))
    tied = {alias for family in tied_families(model).values() if family[1:] for alias in family}
    for name in sorted(names):
        owner = name.rpartition(".")[0]
        kind = type(model.get_submodule(owner)).__name__
        parameter = model.get_parameter(name)
        elements = parameter[0].numel()
        faults = {
            f"an expert has {elements} values, no multiple of {BLOCK}": elements % BLOCK > 0,
            f"transformers does not dispatch the kernel of {kind}": owner not in modules,
            "the model keeps it in float32": name in fp32,
            "it is tied to another parameter": name in tied,
            "lora.modules_to_save trains it in full": any(
                f".{name}.".find(f".{pattern}.") >= 0 for pattern in cfg.modules_to_save
            ),
            "lora.target_parameters names it, and PEFT adds an adapter of experts to the stored "
            "weights": any(f".{name}".endswith(f".{target}") for target in cfg.target_parameters),
        }
        for fault, holds in faults.items():
            if holds:
                raise ModelError(
                    f"{_SETTING}: {name} {list(parameter.shape)} cannot be in 4 bits: {fault}. "
                    "Remove one of the settings"
                )
