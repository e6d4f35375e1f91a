"""Read checkpoints whose weights are stored in fewer bits (fp8, mxfp4) as bf16 or fp32.

transformers has the arithmetic: an operation of its quantiser builds a matrix from its stored
parts, before all other conversions. That quantiser also decides which checkpoints can be read. The
result is an ordinary model, and an export holds it as such.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import AutoHfQuantizer

from toolkit.errors import ModelError
from toolkit.formats import StoredTensor, read_tensor

QUANTISED = "quantization_config"
# The quantiser's own list lacks these names of scales, because it renames them while it loads.
_SCALES = (".scale", ".qscale_weight", "_scale_inv")


def refuse_float16(model: nn.Module, name: str) -> None:
    """Raise ModelError if a model that will be trained is stored in float16.

    Frozen models may be stored in it.

    Args:
        model: on meta.
        name: its name in the settings.
    """
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise ModelError(
            f"{name} is stored in float16, in which AdamW's second moment underflows to 0; set "
            "model.dtype: float32"
        )


def make_dequantiser(config: PreTrainedConfig) -> Any:
    """Create transformers' quantiser that reads quantised weights in full precision.

    Returns:
        The quantiser; None if the weights are not quantised, or it cannot dequantise them.
    """
    settings = getattr(config, QUANTISED, None)
    if not settings:
        return None
    try:
        reader: Any = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    except (ValueError, ImportError, TypeError):  # a method, or settings, that it does not know
        return None
    operation = reader.get_load_operations().get("dequantize")
    if operation is None or not hasattr(reader.quantization_config, "dequantize"):
        return None
    reader.quantization_config.dequantize = True
    if hasattr(operation, "_dequantize_one"):
        operation = _with_padded_blocks(operation)
    reader.get_load_operations = lambda: {"dequantize": operation}
    return reader


def _with_padded_blocks(operation: type) -> type:
    """Return a subclass of a dequantising operation that accepts incomplete blocks.

    The class itself refuses a matrix whose size is not a multiple of the block size, such as
    DeepSeek-V3's `kv_a_proj_with_mqa` with 576 rows.
    """

    class WholeBlocks(operation):  # type: ignore[misc, valid-type]
        def _dequantize_one(
            self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: Any = None
        ) -> torch.Tensor:
            make = super()._dequantize_one
            rows, columns = quantized.shape[-2:]
            size = getattr(self.hf_quantizer.quantization_config, "weight_block_size", None)
            if scales.ndim < 2 or not size or size[0] is None:
                return make(quantized, scales, output_dtype)
            grid = scales.shape[-2] * size[0], scales.shape[-1] * size[1]
            if not (0 <= grid[0] - rows < size[0] and 0 <= grid[1] - columns < size[1]):
                return make(quantized, scales, output_dtype)
            more = (0, grid[1] - columns, 0, grid[0] - rows)
            # Padding in fp32 is exact, and fp8 has no padding.
            padded = F.pad(quantized.float(), more)
            return make(padded, scales, output_dtype)[..., :rows, :columns].contiguous()

    WholeBlocks.__name__ = operation.__name__
    return WholeBlocks


def group_stored_parts(keys: Iterable[str], reader: Any) -> dict[str, tuple[str, ...]]:
    """Return matrix name -> keys of its parts, for matrices that are stored in several parts.

    The parts are quantised values and scales. Their keys are in alphabetical order.

    Args:
        keys: keys of the checkpoint.
        reader: quantiser from `make_dequantiser`.
    """
    stored_keys = set(keys)
    parts = dict[str, list[str]]()
    for parameter, names in reader.serialized_names.items():
        ends = [name for name in names if name != parameter]
        for key in stored_keys:
            if (end := next((e for e in ends if key.endswith(f".{e}")), None)) is not None:
                parts.setdefault(key.removesuffix(end) + parameter, []).append(key)
    for key in stored_keys:
        for end in _SCALES:
            whole_name = key.removesuffix(end) + ("" if end == "_scale_inv" else ".weight")
            if (
                key.endswith(end)
                and whole_name in stored_keys
                and key not in parts.get(whole_name, ())
            ):
                parts.setdefault(whole_name, []).append(key)
    return {
        name: tuple(sorted({*part_keys, *({name} & stored_keys)}))
        for name, part_keys in parts.items()
        if len(part_keys) + (name in stored_keys) > 1
    }


def dtypes_after_dequantising(
    source: dict[str, str], parts: dict[str, tuple[str, ...]], dtype: torch.dtype
) -> dict[str, str]:
    """Return key -> safetensors dtype of a checkpoint whose quantised matrices are dequantised.

    The keys of parts are replaced by the name of their matrix.

    Args:
        source: key -> dtype as stored.
        parts: result of `group_stored_parts`.
        dtype: dtype of the dequantised matrices.
    """
    kind = {torch.float32: "F32", torch.float16: "F16"}.get(dtype, "BF16")
    inner = {key for keys in parts.values() for key in keys}
    unchanged = {key: stored for key, stored in source.items() if key not in inner}
    return unchanged | dict.fromkeys(parts, kind)


def dequantise_parts(
    reader: Any, keys: tuple[str, ...], entries: dict[str, StoredTensor], dtype: torch.dtype
) -> torch.Tensor:
    """Read the stored parts of one matrix from `entries`, and dequantise them on the CPU."""
    return _dequantise(reader, [read_tensor(entries[key]) for key in keys], dtype)


def dequantised_shape(
    reader: Any, keys: tuple[str, ...], entries: dict[str, StoredTensor], dtype: torch.dtype
) -> tuple[int, ...]:
    """Compute the shape that `dequantise_parts` would return, without reading values."""
    parts_entries = (entries[key] for key in keys)
    parts = [torch.empty(e.shape, dtype=e.dtype, device="meta") for e in parts_entries]
    return tuple(_dequantise(reader, parts, dtype).shape)


def _dequantise(reader: Any, parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Run the quantiser's operation on the parts of one matrix. The largest part has the values."""
    operation: Any = reader.get_load_operations()["dequantize"](reader)
    values, scales, *_ = sorted(parts, key=lambda t: -t.numel())
    return operation._dequantize_one(values, scales, dtype)
