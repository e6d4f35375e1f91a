"""The causal-LM loss: a sum over supervised tokens that never holds all logits at once.

Where the head is a linear layer whose output reaches the caller untouched, the loss is computed
inside the head, chunk by chunk; where a model changes its logits afterwards (soft caps, scales), it
is computed from those.
"""

import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.models.modes import forked_rng, replaced_forward
from toolkit.models.peft_model import base_of, trained_module

IGNORE_INDEX = -100
# Logits of one chunk, in elements: 256 MB in fp32.
_CHUNK_ELEMENTS = 2**26

# model -> whether its head's output reaches the caller untouched.
_known: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def supervised_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of predicted positions, 0-d int64 on the labels' device.

    Labels are unshifted, as Hugging Face has them: the first of each row predicts nothing.
    """
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def loss_sum(
    model: nn.Module, batch: dict[str, torch.Tensor], *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the sum of the cross entropies of the supervised tokens of one micro-batch, 0-d fp32.

    The logits of one chunk of tokens exist at a time (256 MB at most in fp32). Where there are
    several chunks, each is computed again in the backward: 2 x hidden x vocabulary FLOPs a token
    more. A batch without supervised tokens gives an exact 0 with a gradient of zeros.

    Args:
        model: a causal LM, sharded or not.
        batch: `input_ids` and `labels` [B, T] and whatever else its forward takes.
        label_smoothing: share of each target that is spread evenly over the vocabulary, as
            transformers' `LabelSmoother` does (Szegedy et al. 2016, arXiv:1512.00567).
    """
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    labels = batch["labels"]
    head = _linear_head(model)
    if head is None or not _reaches_caller(model, head, batch):
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return cross_entropy_sum(logits, labels[:, 1:].flatten(), label_smoothing)
    with replaced_forward(head, _LossInHead(head, labels, label_smoothing).forward):
        return model(**inputs).logits


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the summed cross entropy of flat `logits` [N, V] and shifted `labels` [N], in fp32."""
    return F.cross_entropy(
        logits.float(),
        labels,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def _reaches_caller(model: nn.Module, head: nn.Linear, batch: dict[str, torch.Tensor]) -> bool:
    """Whether what the head answers is what the model answers. Found out once a model, by trying
    one sample, which leaves the random state as it was. Every rank finds the same.
    """
    if model not in _known:
        one = {k: v[:1] for k, v in batch.items()}
        with (
            torch.no_grad(),
            forked_rng(batch["labels"].device),
            torch.compiler.set_stance("force_eager"),  # not worth a compilation
        ):
            inside = _LossInHead(head, one.pop("labels"))
            try:
                with replaced_forward(head, inside.forward):
                    _known[model] = model(**one).logits is inside.result
            except torch.OutOfMemoryError:
                raise
            except (_OtherUse, IndexError, TypeError, ValueError, RuntimeError):
                # The model does something with its logits that a number does not bear. Any other
                # fault shows itself again on the way that computes the loss from logits.
                _known[model] = False
                # A forward that ended half-way leaves a sharded model in the middle of one.
                if callable(recover := getattr(model, "reset_iter_state", None)):
                    recover()
    return _known[model]


def _linear_head(model: nn.Module) -> nn.Linear | None:
    base = base_of(model)
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    head = trained_module(head)
    return head if isinstance(head, nn.Linear) else None


class _OtherUse(Exception):
    """The head is used for something else than one row of logits a token."""


class _LossInHead:
    """A forward of `head` that answers hidden states [B, T, H] with the loss sum.

    The weight is used inside the head's own forward, where FSDP has gathered it: anywhere else it
    may be a shard.
    """

    def __init__(self, head: nn.Linear, labels: torch.Tensor, label_smoothing: float = 0.0):
        self._head, self._labels, self._smoothing = head, labels, label_smoothing
        self.result: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.result is not None or hidden.shape[:-1] != self._labels.shape:
            raise _OtherUse
        flat = hidden[:, :-1].flatten(0, 1)
        labels = self._labels[:, 1:].flatten()
        weight, bias = self._head.weight, self._head.bias
        rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        if rows >= flat.shape[0]:  # one chunk: nothing to save by recomputing it
            self.result = _chunk(flat, weight, bias, labels, self._smoothing)
            return self.result
        total = flat.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(flat.split(rows), labels.split(rows), strict=True):
            arguments = (part, weight, bias, wanted, self._smoothing)
            total = total + checkpoint(_chunk, *arguments, use_reentrant=False)
        self.result = total
        return total


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
) -> torch.Tensor:
    return cross_entropy_sum(F.linear(hidden, weight, bias), labels, label_smoothing)
