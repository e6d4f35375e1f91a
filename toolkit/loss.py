"""The causal-LM loss: a sum over supervised tokens that never holds all logits at once.

Owns how hidden states and labels become one number. Does not know the class of the model: where the
head is a linear layer whose output reaches the caller untouched, the loss is computed inside the head,
chunk by chunk; where a model changes its logits afterwards (soft caps, scales), it is computed from
those.
"""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

IGNORE_INDEX = -100
# Logits of one chunk, in elements: 256 MB in fp32.
_CHUNK_ELEMENTS = 2**26

# model -> whether its head's output reaches the caller untouched; found out at its first forward.
_inside_head: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def supervised_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of predicted positions, 0-d int64 on the labels' device.

    Labels are unshifted, as Hugging Face has them: the first of each row predicts nothing.
    """
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the cross entropies of the supervised tokens of one micro-batch, 0-d fp32.

    The logits of a chunk of tokens exist at a time (256 MB at most), and again in the backward. A batch
    without supervised tokens gives an exact 0 with a gradient of zeros.

    Args:
        model: a causal LM, sharded or not.
        batch: `input_ids` and `labels` [B, T] and whatever else its forward takes.
    """
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    labels = batch["labels"]
    head = _linear_head(model)
    if head is None or not _inside_head.get(model, True):
        return _from_logits(model(**inputs).logits, labels)
    with _LossInHead(head, labels) as inside:
        logits = model(**inputs).logits
    if model not in _inside_head:
        # The same on every rank: it follows from the model's code. One forward is repeated, once.
        _inside_head[model] = inside.result is not None and logits is inside.result
    if not _inside_head[model]:
        return _from_logits(model(**inputs).logits, labels)
    return logits


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of flat `logits` [N, V] and shifted `labels` [N], in fp32."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy_sum(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _linear_head(model: nn.Module) -> nn.Linear | None:
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head if isinstance(head, nn.Linear) else None


class _LossInHead:
    """While entered, `head` answers hidden states [B, T, H] with the loss sum.

    The weight is used inside the head's own forward, where FSDP has gathered it: anywhere else it may
    be a shard.
    """

    def __init__(self, head: nn.Linear, labels: torch.Tensor):
        self._head, self._labels = head, labels
        self._own: Any = None
        self.result: torch.Tensor | None = None

    def __enter__(self) -> "_LossInHead":
        self._own = self._head.__dict__.get("forward")
        self._head.forward = self._forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is None:
            del self._head.forward
        else:
            self._head.forward = self._own  # type: ignore[method-assign]

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.result is not None or hidden.shape[:-1] != self._labels.shape:
            raise RuntimeError("the head is used for something else than one logit row a token")
        flat = hidden[:, :-1].flatten(0, 1)
        labels = self._labels[:, 1:].flatten()
        weight, bias = self._head.weight, self._head.bias
        rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        total = flat.new_zeros((), dtype=torch.float32)
        for begin in range(0, flat.shape[0], rows):
            part = slice(begin, begin + rows)
            total = total + checkpoint(_chunk, flat[part], weight, bias, labels[part], use_reentrant=False)
        self.result = total
        return total


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    return cross_entropy_sum(F.linear(hidden, weight, bias), labels)
