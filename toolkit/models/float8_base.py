"""A frozen linear layer stored in float8, and its products (`model.float8: rowwise` with adapters).

[Note: float8 base] The matrix is cast to float8 (e4m3) once, when it is loaded, with one scale per
output row. Each token of the input has a separate scale, from its largest value. So a result does
not depend on the other tokens of the batch, and adapters and reference see the same function.

    forward:   y[t, o] = s_x[t] * s_w[o] * sum over i of x8[t, i] * w8[o, i]
    backward:  h[t, o] = g[t, o] * s_w[o], cast to float8 per token: h8, s_h
               dx[t, i] = s_h[t] * sum over o of h8[t, o] * w8[o, i]

The backward folds the scales of the rows into the gradient, because they belong to the summed side
there, which a product with scales per row cannot scale. The kernel reads the second factor by
columns, so the backward makes a transposed copy of the matrix, and frees it. The weight is frozen,
so the forward keeps no input for the backward.

Without a kernel (on CPUs), products are emulated: the same values in float8 are multiplied in the
compute dtype, whose products of two such values are exact, and scaled afterwards.
"""

from typing import Any

import torch
from torch import nn

from toolkit.errors import ConfigError, one_line
from toolkit.models.packed_linear import PackedLinear, lay_out_parts, packed_weights

FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16  # the kernel needs widths that are multiples of it
MIN_WIDTH = 256
"""Narrower layers keep their dtype: casts of their inputs cost more than the product saves."""
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK = 1024  # rows that are cast at once while a matrix is packed
_CAPABILITY = (8, 9)  # of the first GPUs with products in float8


class Float8BaseLinear(PackedLinear, nn.Linear):  # type: ignore[misc]
    """A linear layer whose frozen matrix is stored in float8; see [Note: float8 base].

    Only the input gets a gradient. It is an `nn.Linear` for PEFT.

    Args:
        linear: the layer to replace.
        storage: dtype of the parameter of bytes, and of the results: the compute dtype of its unit.
    """

    quant_type = "float8_e4m3"
    value_bits = 8

    def __init__(self, linear: nn.Linear, storage: torch.dtype) -> None:
        out, width = linear.weight.shape
        layout = lay_out_parts([(out * width, FLOAT8), (out, torch.float32)])
        super().__init__(linear, storage, layout)
        self.is_emulated: bool | None = None
        """Whether products are emulated. None: on every device except `cuda`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The value of `model.float8`."""
        return {"model.float8": "rowwise"}

    @property
    def format_text(self) -> str:
        """The format in words, for the log."""
        text = "float8     rowwise (e4m3, one scale per row)"
        is_on_cpu = self.weight.device.type == "cpu"
        return text + ", emulated on the CPU: slower, the same rounding" * is_on_cpu

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Cast a full matrix to float8, row by row; see the base class."""
        pieces = [cast_rows(rows) for rows in weight.to(self.source_dtype).split(_CHUNK)]
        values, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return self._join_parts([values, scales])

    def unpack(self, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a complete (not sharded) column without a copy.

        Returns:
            (float8 values [out_features, in_features], float32 scales [out_features]).
        """
        flat = column.detach().reshape(-1).view(torch.uint8)
        values, scales = (flat[place].view(dtype) for place, dtype in self.parts)
        return values.view(self.shape), scales

    def dequantise(self, column: torch.Tensor) -> torch.Tensor:
        """Return the matrix that a complete column stores, in float32."""
        values, scales = self.unpack(column)
        return values.float() * scales[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` by the matrix in float8 and add the bias; keep the dtype of `x`."""
        is_emulated = x.device.type != "cuda" if self.is_emulated is None else self.is_emulated
        rows = x.to(self.compute_dtype).reshape(-1, self.in_features)
        values, scales = self.unpack(self.weight)
        product: torch.Tensor = _FrozenProduct.apply(rows, values, scales, is_emulated)
        if self.bias is not None:
            product = product + self.bias.to(product.dtype)
        return product.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


class _FrozenProduct(torch.autograd.Function):
    """The product of rows and a frozen matrix in float8; see [Note: float8 base]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, is_emulated: bool
    ) -> torch.Tensor:
        """Multiply rows [n, in_features] by the matrix; return [n, out_features]."""
        # Views of the gathered weight. FSDP2 frees its memory and fills it again for the backward.
        ctx.save_for_backward(values, scales)
        ctx.is_emulated = is_emulated
        x8, x_scales = cast_rows(x)
        return _multiply(x8, values.t(), (x_scales, scales[None]), x.dtype, is_emulated, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Compute the gradient of the rows."""
        values, scales = ctx.saved_tensors
        grad8, grad_scales = cast_rows(grad.float() * scales)
        by_columns = values.t().contiguous().t()
        ones = torch.ones(1, values.shape[1], dtype=torch.float32, device=grad.device)
        is_emulated = ctx.is_emulated
        grad_x = _multiply(
            grad8, by_columns, (grad_scales, ones), grad.dtype, is_emulated, fast=False
        )
        return grad_x, None, None, None


def cast_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a matrix to float8 with one scale per row.

    The products of a row with NaN or an infinity are NaN.

    Returns:
        (float8 values [n, k], float32 scales [n, 1]).
    """
    largest = rows.abs().amax(dim=1, keepdim=True).float()
    scales = (largest / _LARGEST).clamp(min=_SMALLEST_SCALE)
    # The division may exceed the largest value by a rounding.
    return (rows.float() / scales).clamp(-_LARGEST, _LARGEST).to(FLOAT8), scales


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    is_emulated: bool,
    *,
    fast: bool,
) -> torch.Tensor:
    """Multiply float8 matrices and scale the result by rows and columns.

    Args:
        a: values [n, k], stored by rows.
        b: values [k, m], stored by columns.
        scales: float32 scales of the rows of `a` [n, 1] and of the columns of `b` [1, m].
        dtype: dtype of the result.
        is_emulated: multiply in `dtype` instead of calling the kernel.
        fast: let the kernel add with fewer bits, as is usual in a forward.
    """
    of_rows, of_columns = scales
    if is_emulated:
        return ((a.to(dtype) @ b.to(dtype)).float() * of_rows * of_columns).to(dtype)
    return torch._scaled_mm(
        a, b, scale_a=of_rows, scale_b=of_columns, out_dtype=dtype, use_fast_accum=fast
    )


def set_planned_device(model: nn.Module, device_type: str) -> None:
    """Let the layers of a model without bytes run the operations of a device type.

    A plan runs them on tensors of a CPU, but its memory and work are those of the run's devices.
    """
    for layer in packed_weights(model).values():
        if isinstance(layer, Float8BaseLinear):
            layer.is_emulated = device_type != "cuda"


def check_float8_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless `device` multiplies in float8, by a small trial on GPUs.

    A CPU emulates the products.
    """
    setting = "model.float8: rowwise with adapters"
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(
            f"{setting} needs an NVIDIA GPU of compute capability 8.9 or newer; this run computes "
            f"on {device.type}. Remove model.float8"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"{setting}: {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, and products in float8 need 8.9 or newer. Remove "
            "model.float8, or use lora.load_in_4bit to save memory"
        )
    try:
        off = _largest_kernel_error(device, dtype)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"{setting}: torch {torch.__version__} does not multiply in float8 with scales per row "
            f"on {torch.cuda.get_device_name(device)} ({one_line(error)}). Remove model.float8"
        ) from error
    if not off < 0.02:  # a few roundings to bfloat16, and the sums with fewer bits
        raise ConfigError(
            f"{setting}: products in float8 on {torch.cuda.get_device_name(device)} are off by "
            f"{off:.1%} of the largest value. Remove model.float8, or install another torch"
        )


def _largest_kernel_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference of kernel and emulation, relative to the largest value.

    Covers the forward and the gradient of the input.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x, grad = (torch.randn(48, n, generator=generator) for n in (64, 64, 48))
    layer = Float8BaseLinear(nn.Linear(64, 48, bias=False, device="meta"), dtype)
    layer.weight = nn.Parameter(layer.pack(weight.to(device)), requires_grad=False)
    results = []
    for emulated in (True, False):
        layer.is_emulated = emulated
        leaf = x.to(device, dtype).requires_grad_()
        output = layer(leaf)
        (gradient,) = torch.autograd.grad(output, leaf, grad.to(device, dtype))
        results.append((output.detach().float(), gradient.float()))
    pairs = list(zip(*results, strict=True))
    return max(((b - a).abs().max() / a.abs().max()).item() for a, b in pairs)
