"""Attention within documents by their borders, without a mask.

From positions that restart, transformers builds a dense mask [B, 1, T, T] in every forward. The
host waits for the device to build it, and flash attention cannot use it. A micro-batch with
`document_borders` needs no mask: transformers builds none for an attention function that has no
mask function of its name, and passes the borders on, as its flash attention knows them.

This file owns that function and decides when it is active. `packing_probe` tries which model types
work with it.

With context parallelism each rank holds a part of every row. A second function exchanges tokens for
heads (`head_exchange`) around the first one, which then attends in complete rows. It has a separate
name, because transformers' registry belongs to the process. A forward without borders, as in
generation, needs no other rank.

[Note: one graph] A compiled layer is compiled again if a number that its code compares changes. So
it never compares what differs between micro-batches: the number of documents, and the length of the
longest. Layers get the length of a row (`data.sequence_length`) in place of the longest document.
That decides whether a sliding window cuts anything. Whether each row is one document is decided by
the packing: rows without `position_ids` are. The number of documents is marked as dynamic before
the first compilation.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from toolkit.errors import ModelError, one_line
from toolkit.mesh import View
from toolkit.models.head_exchange import exchange, repeat_key_heads

ONE_DOCUMENT_A_ROW = "one_document_a_row"
"""Argument that forwards pass down to attention: True if each row is one document."""
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that describe a batch's documents; the names of `FlashAttentionKwargs`."""
_Heads = Sequence[torch.Tensor]  # query, key and value: [tokens, heads, width]
_PREFIX = "documents_"
_BLOCK = 512  # queries per mask when SDPA needs an explicit mask
_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on
# Arguments that reach every attention function and do not change its result here.
# fmt: off
_IDLE = frozenset(
    (
        "position_ids", "cache_position", "past_key_values", "use_cache", "output_attentions",
        "output_hidden_states", "output_router_logits", "return_dict", "position_embeddings",
        "num_items_in_batch", "layer_idx", "logits_to_keep",
    )
)
# fmt: on


def document_borders(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compute the offsets at which the documents of a micro-batch begin, as forward arguments.

    Reads tensor values, so call it while the batch is on the CPU.

    Args:
        batch: `input_ids` [B, T], and for packed rows `position_ids` [B, T], which restart at 0
            with each document. Without `position_ids`, each row is one document.

    Returns:
        A dict with `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [documents + 1], offsets in the
        flattened batch; and `max_length_q` and `max_length_k`, int, tokens of the longest document.
    """
    rows, length = batch["input_ids"].shape
    positions = batch.get("position_ids")
    begins = torch.arange(0, rows * length, length)
    if positions is not None:
        begins = (positions.flatten() == 0).nonzero().flatten()
    ends = F.pad(begins, (0, 1), value=rows * length).to(torch.int32)
    longest = int(ends.diff().max())
    return dict(zip(BORDERS, (ends, ends, longest, longest), strict=True))


def attend_within_documents(
    model: PreTrainedModel, context: View | None = None, *, planned_on: str | None = None
) -> None:
    """Patch `model` in place so that document borders in a forward replace the attention mask.

    Attention then stays within each document. A forward without the arguments of `document_borders`
    (padded rows, generation) builds masks and attends as before. See [Note: one graph].

    Args:
        model: the model.
        context: ranks that share the tokens of each row. A forward with borders is then collective:
            it gets this rank's part of each row (`Batch.cut`), and the borders of complete rows.
        planned_on: type of device, such as "cuda", whose memory and operations the attention shall
            have, for plans. It does not read the borders: each row is one document. None: attend.

    Raises:
        ModelError: the model's attention is neither SDPA nor flash attention, or it is not SDPA and
            ranks share rows. A later forward raises it if it gets an `attention_mask`, too, or if
            the model needs other inputs of attention.
    """
    parts = 1 if context is None else context.size
    configs_by_id = {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None
    }
    configs = [c for c in configs_by_id.values() if isinstance(c, PreTrainedConfig)]
    kernels = {str(config._attn_implementation) for config in configs}
    kernel = kernels.pop()
    if kernels or not (kernel == "sdpa" or "flash" in kernel):
        raise ModelError(f"its attention is {' and '.join(sorted({kernel, *kernels}))}")
    # "flash" in a name makes transformers look for a kernel of that name.
    name = _PREFIX + kernel.replace("flash", "fa")
    attend_in_rows: Callable[..., tuple[torch.Tensor, None]] = _attention_forward
    if planned_on is not None:
        attend_in_rows = partial(_attend_planned, planned_on)
    attend = partial(attend_in_rows, kernel)
    if context is not None and parts > 1:
        if kernel != "sdpa" or context.group is None:
            raise ModelError(
                f"sharding.context_parallel needs model.attn_implementation sdpa, got {kernel}; on "
                "GPUs it runs flash attention, too"
            )
        name = f"{_PREFIX}context_{kernel}"
        attend = partial(_attend_across_ranks, context.group, attend_in_rows)
    AttentionInterface.register(name, attend)
    _set_attention_implementation(configs, name)
    forward = model.forward

    @functools.wraps(forward)
    def with_or_without_mask(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(BORDERS[0]) is not None:
            if kwargs.get("attention_mask") is not None:  # transformers would drop it
                raise ModelError("expected no attention_mask together with document borders")
            return forward(*args, **fix_length_arguments(kwargs, parts))
        _set_attention_implementation(configs, kernel)  # now masks are built
        try:
            return forward(*args, **kwargs)
        finally:
            # A recomputed layer must find the same attention as in its forward, with a mask or
            # borders.
            _set_attention_implementation(configs, name)

    cast(Any, model).forward = with_or_without_mask


def fix_length_arguments(inputs: dict[str, Any], parts: int = 1) -> dict[str, Any]:
    """Replace the longest document's length in a forward's arguments by the row length.

    The arguments are then equal for all micro-batches, so compiled layers are not recompiled. Also
    marks the number of documents as dynamic. See [Note: one graph].

    Args:
        inputs: keyword arguments of the forward, with document borders.
        parts: number of ranks that share each row; `inputs` have one part of it.

    Returns:
        A changed copy; `inputs` itself if it has neither `input_ids` nor `inputs_embeds`.
    """
    if not torch.compiler.is_compiling():
        mark_document_count_dynamic(inputs)
    rows = inputs.get("input_ids")
    rows = inputs.get("inputs_embeds") if rows is None else rows
    if rows is None:
        return inputs
    is_whole = inputs.get(ONE_DOCUMENT_A_ROW, inputs.get("position_ids") is None)
    lengths = dict.fromkeys(BORDERS[2:], rows.shape[1] * parts)
    return inputs | lengths | {ONE_DOCUMENT_A_ROW: is_whole}


def mark_document_count_dynamic(inputs: dict[str, Any]) -> None:
    """Mark the first dimension of the borders in `inputs` as dynamic for torch.compile.

    It is the number of documents plus 1. Does nothing if `torch._dynamo` has not been imported.
    """
    # Importing the compiler takes seconds, and only a compiled run needs it.
    compiler = sys.modules.get("torch._dynamo")
    for borders in map(inputs.get, BORDERS[:2]):
        if compiler is not None and isinstance(borders, torch.Tensor):
            compiler.maybe_mark_dynamic(borders, 0)


def _set_attention_implementation(configs: list[PreTrainedConfig], kernel: str) -> None:
    """Set the attention implementation of several configs to `kernel`."""
    for config in configs:
        config._attn_implementation = kernel


def _attention_forward(
    kernel: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one layer; within documents if document borders are passed.

    It has the interface of transformers' `AttentionInterface` functions.

    Args:
        kernel: name of the model's own implementation, such as "sdpa".
        module: the attention layer.
        query: [B, heads, T, width].
        key: [B, key heads, T, width].
        value: [B, key heads, T, value width].
        attention_mask: must be None if there are borders.
        dropout: probability with which attention weights are dropped.
        scaling: factor of the scores; None: width**-0.5.
        is_causal: whether tokens see earlier tokens only; None: as `module.is_causal` says.
        sliding_window: number of tokens that a token sees, including itself; None: no limit.
        unused: the borders, and arguments of other implementations.

    Returns:
        ([B, T, heads, value width], None).

    Raises:
        ModelError: there are borders, and the layer has a mask, is not causal, or has keys of
            another length than its queries; or gets unknown arguments, which only flash attention
            accepts.
    """
    borders = {name: unused.pop(name, None) for name in BORDERS}
    whole_rows = unused.pop(ONE_DOCUMENT_A_ROW, False)
    begins, _, longest, _ = borders.values()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": causal}
    attend = (
        partial(_attend_flash, kernel, sliding_window)
        if "flash" in kernel
        else sdpa_attention_forward
    )
    if begins is None or longest is None:
        return attend(module, query, key, value, attention_mask, **options, **unused)
    if attention_mask is not None or not causal or query.shape[2] != key.shape[2]:
        raise ModelError("it attends with its own mask, or to other tokens than its own")
    if "flash" in kernel:
        return attend(module, query, key, value, None, **options, **unused, **borders)
    unknown = sorted(n for n, v in unused.items() if v is not None and n not in _IDLE)
    if unknown:
        raise ModelError(f"its attention takes {', '.join(unknown)}, which needs its own kernel")
    window = None if sliding_window is None or sliding_window >= longest else sliding_window
    batch, _, length, width = query.shape
    if window is None and whole_rows:
        return attend(module, query, key, value, None, **options)
    scaling = width**-0.5 if scaling is None else scaling
    qkv = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    if _can_use_varlen_kernel(qkv[0], dropout):
        out = _attend_varlen(qkv, begins, longest, scaling, window)
    else:
        out = _attend_each_document(qkv, begins, scaling, window, dropout)
    return out.unflatten(0, (batch, length)).contiguous(), None


def _attend_planned(
    device_type: str,
    kernel: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the memory and about the operations of `_attention_forward`.

    On devices other than CPUs the values are wrong: a row with a sliding window is cut into
    documents of about two windows, in which a token sees as many others on average.

    `device_type` is the type of device that is planned for. The other arguments and the result are
    those of `_attention_forward`.
    """
    batch, _, length, width = query.shape
    if options.get(BORDERS[0]) is None or sliding_window is None or sliding_window >= length:
        options["sliding_window"] = sliding_window
        return _attention_forward(kernel, module, query, key, value, attention_mask, **options)
    if device_type == "cpu":
        scaling = options.get("scaling") or width**-0.5
        qkv = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
        rows: Any = SimpleNamespace(lengths=[length] * batch)
        dropout = options.get("dropout", 0.0)
        out = _attend_each_document(qkv, rows, scaling, sliding_window, dropout)
        return out.unflatten(0, (batch, length)).contiguous(), None
    fewest = max(1, length // (2 * sliding_window))
    parts = next(count for count in range(fewest, 0, -1) if length % count == 0)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        """Cut each row into parts; without a copy, since it is a view of [B, T, heads, width]."""
        rows = tensor.transpose(1, 2)
        return rows.reshape(batch * parts, length // parts, *rows.shape[2:]).transpose(1, 2)

    query, key, value = cut(query), cut(key), cut(value)
    out, _ = _attention_forward(kernel, module, query, key, value, attention_mask, **options)
    return out.reshape(batch, length, *out.shape[2:]), None


class _KeyGroups:
    """Stands for an attention layer whose key heads were repeated, as SDPA's function reads it."""

    def __init__(self, groups: int, is_causal: bool) -> None:
        self.num_key_value_groups = groups
        self.is_causal = is_causal


def _attend_across_ranks(
    group: dist.ProcessGroup,
    attend_in_rows: Callable[..., tuple[torch.Tensor, None]],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one layer whose rows are divided among ranks. Collective.

    Without document borders, it is attention within this rank's own tokens, and not collective.

    Args:
        group: the ranks, `size` in number.
        attend_in_rows: computes attention in complete rows; it has the interface of
            `_attention_forward`.
        module: the attention layer.
        query: [B, heads, T / size, width].
        key: [B, key heads, T / size, width].
        value: [B, key heads, T / size, value width].
        attention_mask: must be None if there are borders.
        options: see `_attention_forward`.

    Returns:
        ([B, T / size, heads, value width], None).

    Raises:
        ModelError: see `_attention_forward`; or `size` does not divide the heads.
    """
    if options.get(BORDERS[0]) is None:
        return _attention_forward("sdpa", module, query, key, value, attention_mask, **options)
    layer: Any = module
    has_key_heads = key.shape[1]
    key, value = repeat_key_heads(query, key, value, group.size())
    if key.shape[1] != has_key_heads:
        is_causal = getattr(module, "is_causal", True)
        layer = _KeyGroups(query.shape[1] // key.shape[1], is_causal)
    query, key, value = (exchange(t, group, 1, 2) for t in (query, key, value))
    out, _ = attend_in_rows("sdpa", layer, query, key, value, attention_mask, **options)
    return exchange(out, group, 1, 2), None


def check_varlen_kernel(device: torch.device) -> None:
    """Run torch's varlen attention on a CUDA device, and compare it with SDPA per document.

    Does nothing on other devices.

    Raises:
        ModelError: the kernel does not run, or its values are wrong.
    """
    if device.type != "cuda":
        return
    generator = torch.Generator().manual_seed(0)
    qkv = [*torch.randn(3, 64, 2, 64, generator=generator).to(device)]
    borders = torch.tensor([0, 24, 64], dtype=torch.int32, device=device)
    expected = _attend_each_document(qkv, borders, 0.125, 16, 0.0)
    try:
        values = _attend_varlen([t.bfloat16() for t in qkv], borders, 40, 0.125, 16)
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(f"varlen flash attention does not run: {one_line(error)}") from error
    if (off := float((values.float() - expected).abs().max())) > 0.05:
        raise ModelError(f"varlen flash attention is off by {off:.1e} on this device")


def _can_use_varlen_kernel(query: torch.Tensor, dropout: float) -> bool:
    """Return True if torch's varlen flash attention can be used.

    The query must be bf16 or fp16 on CUDA with a head width of at most 256, and `dropout` must be
    0.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and query.shape[-1] <= 256 and not dropout


def _attend_varlen(
    qkv: _Heads, borders: torch.Tensor, longest: int, scaling: float, window: int | None
) -> torch.Tensor:
    """Compute causal attention within documents by one call of torch's varlen flash attention.

    Args:
        qkv: query, key and value, each [tokens, heads, width]; key and value may have fewer heads.
        borders: int32 [documents + 1], offsets of the documents.
        longest: upper bound of a document's length in tokens.
        scaling: factor of the scores.
        window: number of tokens that a token sees, including itself; None: all earlier ones.

    Returns:
        [tokens, heads, value width].
    """
    # The kernel takes one width for all tensors, a multiple of 8. Padding with zeros changes no
    # score.
    out_width = qkv[2].shape[-1]
    width = -(-max(qkv[0].shape[-1], out_width) // 8) * 8
    query, key, value = (_pad_width(t, width) for t in qkv)
    options: dict[str, Any] = {"scale": scaling, "window_size": ((window or 0) - 1, 0)}
    if _GROUPED:
        options["enable_gqa"] = True
    else:
        key, value = (_repeat_heads(t, query) for t in (key, value))
    out = varlen_attn(query, key, value, borders, borders, longest, longest, **options)
    return cast(torch.Tensor, out)[..., :out_width]


def _pad_width(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last dimension of a tensor with zeros to `width`."""
    missing = width - tensor.shape[-1]
    # Padding by zero columns would still copy the tensor.
    return F.pad(tensor, (0, missing)) if missing else tensor


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat the key or value heads until there are as many as query heads.

    Args:
        tensor: [tokens, key heads, width].
        query: [tokens, heads, width].
    """
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


# A loop over documents would be compiled again for each batch.
@torch.compiler.disable
def _attend_each_document(
    qkv: _Heads, borders: torch.Tensor, scaling: float, window: int | None, dropout: float
) -> torch.Tensor:
    """Compute causal attention within documents by one call of SDPA per document.

    Arguments and result are those of `_attend_varlen`, plus the probability `dropout`. If a mask is
    needed, at most `_BLOCK` rows of scores exist at a time. On an accelerator, the host waits once
    per micro-batch to read `borders`.
    """
    # All layers get the same tensor, so its lengths are computed once.
    if not hasattr(borders, "lengths"):
        borders.lengths = borders.diff().tolist()  # type: ignore[attr-defined]
    out_width = qkv[2].shape[-1]
    width = max(qkv[0].shape[-1], out_width)  # with unequal widths SDPA would hold all scores
    query, *key_and_value = (_pad_width(t, width) for t in qkv)
    heads = [query, *(_repeat_heads(t, query) for t in key_and_value)]
    lengths: list[int] = borders.lengths  # type: ignore[attr-defined]
    parts = (t.transpose(0, 1)[None].split(lengths, dim=2) for t in heads)
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    out = []
    for tokens, q, k, v in zip(lengths, *parts, strict=True):  # [1, heads, tokens, width]
        if (window is None or window >= tokens) and not (dropout and tokens > _BLOCK):
            out.append(attend(q, k, v, is_causal=True))
            continue
        reach = tokens if window is None else window
        for begin in range(0, tokens, _BLOCK):
            end = min(begin + _BLOCK, tokens)
            first = max(0, begin - reach + 1)
            positions = torch.arange(first, end, device=q.device)
            back = positions[begin - first :, None] - positions
            visible = (back >= 0) & (back < reach)
            out.append(attend(q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], visible))
    return torch.cat(out, dim=2)[0].transpose(0, 1)[..., :out_width]


def _attend_flash(
    kernel: str,
    sliding_window: int | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by transformers' flash attention with the implementation `kernel`.

    transformers' own attention function is not used, because it would look for a kernel with the
    name under which this module is registered. The arguments are those of `_attention_forward`;
    `s_aux` are attention sinks.
    """
    out_width = value.shape[-1]
    length = query.shape[2]
    query, key, value = (
        t.transpose(1, 2) for t in (query, key, _pad_width(value, query.shape[-1]))
    )
    out = _flash_attention_forward(
        query,
        key,
        value,
        attention_mask,
        query_length=length,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        attn_implementation=kernel,
        s_aux=None if s_aux is None else s_aux.to(query.dtype),
        **options,
    )
    return out[..., :out_width], None
