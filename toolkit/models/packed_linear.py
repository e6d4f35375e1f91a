"""Linear layers whose frozen matrix is one parameter of packed bytes, which FSDP2 can shard.

`PackedLinear` is what all formats share. `Nf4Linear` stores 4-bit values; `float8_base.py` has the
layer for float8. Only this file imports bitsandbytes, which quantises and multiplies in 4 bits.

[Note: packed weights] bitsandbytes keeps a 4-bit matrix as a parameter of nibbles, and the scales
of its blocks as an attribute of that parameter. Sharding does not see attributes, so every rank
would hold all scales, an eighth of the nibbles. Here one parameter holds both, as a column of
bytes: values first, then scales. Its dtype is the compute dtype of its unit, since FSDP2 casts a
parameter of any other dtype. So it is sharded, gathered, offloaded and freed as any weight is, and
nothing writes into it. (bitsandbytes' own layer repacks its weight in place in an evaluation on
some CPUs.) A forward splits the gathered column into views, without a copy.
"""

import copy
import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from toolkit.config.lora import LoraConfig
from toolkit.errors import ConfigError, one_line

if TYPE_CHECKING:
    from toolkit.models.packed_experts import PackedExpertStack

PackedWeight: TypeAlias = "PackedLinear | PackedExpertStack"
Parts: TypeAlias = tuple[tuple[slice, torch.dtype], ...]
"""(byte slice, dtype) of each part of a column."""

BLOCK = 64  # values that share a scale
QUANT_TYPE = "nf4"
SCALES = 256  # scales that share a scale, with double quantisation
_ALIGNED = 16  # bytes to which every part of a column is aligned


def packed_weights(model: nn.Module) -> dict[str, "PackedWeight"]:
    """Return weight name -> layer or experts for each packed weight; tied ones have all names."""
    packed: dict[str, PackedWeight] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedLinear):
            packed[f"{name}.weight"] = module
        stacks: dict[str, PackedExpertStack] = getattr(module, "packed_stacks", {})
        packed |= {f"{name}.{leaf}": stack for leaf, stack in stacks.items()}
    return packed


def count_values(model: nn.Module) -> int:
    """Count the values that a model's parameters represent; tied ones count once.

    A packed weight counts the values of its matrix, not its packed elements.
    """
    packed = packed_weights(model)
    parameters = model.named_parameters()
    return sum(packed[n].elements if n in packed else p.numel() for n, p in parameters)


class PackedLinear(nn.Module):
    """A linear layer with a frozen weight of packed bytes; see [Note: packed weights].

    Subclasses choose the format. Only the input gets a gradient.

    Args:
        linear: the layer to replace. Its bias is kept, and frozen.
        storage: dtype of the parameter of bytes: the compute dtype of its unit.
        layout: result of `lay_out_parts`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    quant_type: str
    """Name of the format, such as nf4."""
    value_bits: int
    """Bits of a stored value."""

    def __init__(self, linear: nn.Linear, storage: torch.dtype, layout: tuple[Parts, int]) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.source_dtype = linear.weight.dtype
        """Dtype of the values that are quantised, and to which 4-bit products dequantise."""
        self.compute_dtype = storage
        self.parts, self.nbytes = layout
        shape = (self.nbytes // storage.itemsize, 1)
        empty = torch.empty(shape, dtype=storage, device=linear.weight.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.train(linear.training)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the stored matrix: (out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def elements(self) -> int:
        """Number of values in the stored matrix."""
        return self.in_features * self.out_features

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that determine the stored values, as JSON values."""

    @property
    @abstractmethod
    def format_text(self) -> str:
        """The format in words, for the log."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantise a full matrix [out_features, in_features] on its device.

        The layer's weight does not change.

        Returns:
            The column [n, 1] in the storage dtype: the bytes of values and scales.
        """

    def _join_parts(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of all parts to a column [n, 1] in the storage dtype."""
        column = torch.zeros(self.nbytes, dtype=torch.uint8, device=values[0].device)
        for (place, dtype), value in zip(self.parts, values, strict=True):
            column[place] = value.to(dtype).contiguous().reshape(-1).view(torch.uint8)
        return column.view(self.compute_dtype).reshape(-1, 1)


class Nf4Linear(PackedLinear):
    """A packed linear layer of 4-bit values.

    PEFT treats the layer as bitsandbytes' `Linear4bit`.
    """

    quant_type = QUANT_TYPE
    value_bits = 4
    # bitsandbytes' functions are class attributes, because a compiled layer must not import.
    _product: Any
    _state: Any

    def __init__(self, linear: nn.Linear, cfg: LoraConfig, storage: torch.dtype) -> None:
        elements = linear.in_features * linear.out_features
        layout = column_layout(elements, cfg.bnb_4bit_use_double_quant)
        super().__init__(linear, storage, layout)
        self.double_quant = cfg.bnb_4bit_use_double_quant
        self._set_weight_attributes()
        self._tables: Any = None

    def _set_weight_attributes(self) -> None:
        """Set the attributes of the weight that PEFT reads from bitsandbytes' parameters."""
        self.weight.quant_type = self.quant_type  # type: ignore[attr-defined]
        self.weight.compress_statistics = self.double_quant  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Nf4Linear":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._set_weight_attributes()  # a copy of a parameter has no attributes
        return copied

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of bitsandbytes, and the block size."""
        return nf4_settings(self.double_quant)

    @property
    def format_text(self) -> str:
        """The format in words, for the log."""
        return nf4_text(self.double_quant)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantise a full matrix with bitsandbytes; see the base class."""
        state: Any
        source = weight.to(self.source_dtype).contiguous()
        nibbles, state = quantise_matrix(source, self.quant_type, self.double_quant)
        values = [nibbles, state.absmax]
        if self.double_quant:
            values += [state.state2.absmax, state.offset]
        self._tables = get_code_tables(self.quant_type, self.double_quant, weight.device)
        return self._join_parts(values)

    def unpack(self, column: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Split a complete (not sharded) column into 4-bit values and scales, without a copy.

        Returns:
            (4-bit values as uint8 [n, 1], bitsandbytes' quantisation state).
        """
        flat = column.detach().reshape(-1).view(torch.uint8)
        values = [flat[place].view(dtype) for place, dtype in self.parts]
        if self._tables is None or self._tables.code.device != column.device:
            self._tables = get_code_tables(self.quant_type, self.double_quant, column.device)
        nested: dict[str, Any] = {}
        if self.double_quant:
            second = self._tables.state2
            nested["offset"] = values[3].reshape(())
            nested["state2"] = self._state(
                absmax=values[2], code=second.code, blocksize=second.blocksize, dtype=second.dtype
            )
        state = self._state(
            absmax=values[1],
            shape=torch.Size(self.shape),
            code=self._tables.code,
            blocksize=BLOCK,
            quant_type=self.quant_type,
            dtype=self.source_dtype,
            **nested,
        )
        return values[0].reshape(-1, 1), state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` by the dequantised matrix and add the bias; keep the dtype of `x`."""
        nibbles, state = self.unpack(self.weight)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        product = self._product(x.to(self.compute_dtype), nibbles, quant_state=state, bias=bias)
        return product.to(x.dtype)

    # bitsandbytes would save a quantisation state as well, which is part of the column here.
    _save_to_state_dict = nn.Module._save_to_state_dict


def nf4_settings(double_quant: bool) -> dict[str, Any]:
    """Describe the 4-bit format as JSON values, to compare on resume."""
    return {
        "bnb_4bit_quant_type": QUANT_TYPE,
        "bnb_4bit_use_double_quant": double_quant,
        "blocksize": BLOCK,
    }


def nf4_text(double_quant: bool) -> str:
    """Describe the 4-bit format for the log."""
    return f"{QUANT_TYPE}{', scales quantised too' if double_quant else ''}"


def column_layout(elements: int, double_quant: bool) -> tuple[Parts, int]:
    """Compute at which bytes of a column its 4-bit values and scales are.

    Args:
        elements: number of values in the matrix.
        double_quant: quantise the scales, too.

    Returns:
        ((byte slice, dtype) of each part, total bytes). The parts are the 4-bit values and the
        scales; with double quantisation also the scales of the scales and their offset.
    """
    blocks = elements // BLOCK
    kinds = [(elements // 2, torch.uint8), (blocks, torch.float32)]
    if double_quant:
        second = -(-blocks // SCALES)
        kinds[1:] = [(blocks, torch.uint8), (second, torch.float32), (1, torch.float32)]
    return lay_out_parts(kinds)


def lay_out_parts(kinds: list[tuple[int, torch.dtype]]) -> tuple[Parts, int]:
    """Place parts of a column one after the other, each on an aligned byte.

    Args:
        kinds: (number of elements, dtype) of each part.

    Returns:
        ((byte slice, dtype) of each part, total bytes).
    """
    parts = []
    begin = 0
    for count, dtype in kinds:
        end = begin + count * dtype.itemsize
        parts.append((slice(begin, end), dtype))
        begin = -(-end // _ALIGNED) * _ALIGNED
    return tuple(parts), begin


@functools.cache
def packed_linear_class() -> type[Nf4Linear]:
    """Create the class of 4-bit layers, which also inherits bitsandbytes' `Linear4bit` for PEFT.

    Raises:
        ConfigError: bitsandbytes cannot be imported.
    """
    base = import_bitsandbytes().nn.Linear4bit
    attributes = {
        "_product": staticmethod(import_bitsandbytes().matmul_4bit),
        "_state": import_bitsandbytes().functional.QuantState,
        # Prevent bitsandbytes' own forward from repacking the weight for evaluation.
        "support_avx512bf16_for_cpu": False,
    }
    return type("Linear4bit", (Nf4Linear, base), attributes)


def get_code_tables(quant_type: str, double_quant: bool, device: torch.device) -> Any:
    """Return a cached bitsandbytes state that has the tables from 4-bit codes to values."""
    # The tensors of a plan are fake and have no values, so a run must not use their tables.
    return _create_code_tables(type(torch.empty(0)), quant_type, double_quant, device)


@functools.cache
def _create_code_tables(
    kind: type, quant_type: str, double_quant: bool, device: torch.device
) -> Any:
    """Quantise one block of ones, and return bitsandbytes' state with its code tables. Cached.

    Args:
        kind: class of new tensors, which separates the cached tables of fake tensors from real
            ones.
        quant_type: name of the 4-bit format.
        double_quant: quantise the scales, too.
        device: device of the tables.
    """
    _, state = quantise_matrix(torch.ones(BLOCK, device=device), quant_type, double_quant)
    return state


def quantise_matrix(weight: torch.Tensor, quant_type: str, double_quant: bool) -> tuple[Any, Any]:
    """Quantise `weight` with bitsandbytes; return (4-bit values, quantisation state)."""
    functional = import_bitsandbytes().functional
    shared_tables = functional.name2qmap
    # The library builds its tables once, for all calls. The fake tensors of a plan have no values,
    # so a plan must not leave its tables there.
    if type(torch.empty(0)) is not torch.Tensor:
        functional.name2qmap = {}
    try:
        return functional.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=double_quant, quant_type=quant_type
        )
    finally:
        functional.name2qmap = shared_tables


def check_4bit_device(device: torch.device, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Raise ConfigError unless bitsandbytes multiplies a small 4-bit matrix correctly.

    It is also raised if bitsandbytes is missing.

    Args:
        device: device of the run.
        lora: the settings of quantisation.
        dtype: dtype of the products.
    """
    library = f"lora.load_in_4bit: bitsandbytes {import_bitsandbytes().__version__}"
    try:
        off = _largest_product_error(device, lora, dtype)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{library} does not compute in {QUANT_TYPE} on {device} ({one_line(error)}); train on "
            "another device"
        ) from error
    # Half of the widest step of nf4 is 0.15.
    if not off < 0.25:
        raise ConfigError(
            f"{library} gives wrong values on {device} (off by {off:.2f} of a block's largest, 4 "
            "bits explain 0.15); install another bitsandbytes"
        )


def _largest_product_error(device: torch.device, lora: LoraConfig, dtype: torch.dtype) -> float:
    """Return the largest error of 4-bit products, as a fraction of the block's largest weight.

    Covers the forward, the backward and single rows, which use different kernels.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 3 * BLOCK, generator=generator).to(dtype).to(device)
    like = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
    layer = packed_linear_class()(like, lora, dtype)
    layer.source_dtype = dtype
    layer.weight = nn.Parameter(layer.pack(weight), requires_grad=False)
    eye = torch.eye(weight.shape[1], dtype=dtype, device=device, requires_grad=True)
    # Training, its backward, and one row at a time: each has its own kernels.
    trained = layer.train()(eye)
    into = torch.eye(weight.shape[1], weight.shape[0], dtype=dtype, device=device)
    (gradient,) = torch.autograd.grad(trained, eye, into)
    by_rows = torch.cat([layer.eval()(row) for row in eye.detach().split(1)])
    products = torch.stack([trained.detach().T, gradient[: weight.shape[0]], by_rows.T])
    scale = weight.float().reshape(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    return ((products - weight).float().flatten(1).abs() / scale).max().item()


def import_bitsandbytes(setting: str = "lora.load_in_4bit") -> Any:
    """Import and return bitsandbytes.

    Args:
        setting: name of the setting that needs it, for the message.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        import bitsandbytes as library
    except ImportError as error:
        raise ConfigError(
            f"{setting} needs bitsandbytes, which cannot be imported ({error}): install "
            "fsdp2-toolkit[qlora], or remove the setting"
        ) from error
    return library
