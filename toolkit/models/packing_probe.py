"""Whether a model type keeps packed samples apart, found out by trying it on a tiny copy.

There is no list of types: of those that transformers knows, more than a third let samples see each
other without a word (state spaces, linear attention, position biases, masks built elsewhere).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import one_line
from toolkit.models.attention import attend_within_documents, check_varlen_kernel, document_borders
from toolkit.models.classes import causal_lm_class
from toolkit.models.modes import forked_rng
from toolkit.models.reward import reward_head
from toolkit.models.tiny_copy import (
    SPECIAL,
    VOCABULARY,
    build_meta_model,
    layer_kinds,
    random_copy,
    shrunk_configs,
)

Batch = list[tuple[int, ...]]  # of each row the lengths of its samples
Batches = list[Batch]
# Samples of the rows that are tried: other lengths a row, single tokens, and longer than a window.
_WHOLE: tuple[int, ...] = (24,)
_PACKED: tuple[tuple[int, ...], ...] = ((7, 1, 11, 5), (3, 9, 2, 2, 8), _WHOLE, (12, 12))
_MOST_PARAMETERS = 2**28
# Largest difference of logits that is rounding, as a share of their spread.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
_SURE = 0.3  # no rounding makes as much of a difference


@dataclass(frozen=True)
class PackingVerdict:
    """Whether packed samples stay apart, and whether that takes a mask."""

    ok: bool
    why: str  # what was found, or what went wrong, in words for a user
    mask: str | None = None  # why one is needed; None: `attend_within_documents` does it
    by: float = 0.0  # by how much of their spread the logits are off


def probe_packing(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel] | None = None,
    *,
    sequence_length: int | None = None,
    rows: int = 2,
    device: torch.device | str = "cpu",
    packed: bool = True,
) -> PackingVerdict:
    """Try on a tiny copy of the model whether packed samples stay apart. Not collective.

    Takes a second; half a minute for the few types whose layers cannot be left out. Runs packed
    rows as training does, without dropout: later samples must not move when the first one changes,
    and each must come out as it does by itself. Where `document_borders` do not do, tries the mask
    that transformers makes of `position_ids`. Whatever fails on the way is a no with its reason.

    Args:
        model_class: before sharding; None: what transformers maps the config to.
        sequence_length: of a packed row; windows and chunks that are as long are not cut.
        rows: of a micro-batch: flash attention keeps apart the samples of one row only.
        device: of the run, for an attention implementation that the CPU has not.
        packed: False: each row is one document; says whether that takes a mask.
    """
    try:
        model_class = model_class or causal_lm_class(config)
        full = build_meta_model(model_class, config)
        kinds = layer_kinds(full)
    except Exception as error:  # an architecture may do anything on its way
        why = f"its layers cannot be looked at: {one_line(error, 400)}"
        return PackingVerdict(not packed, why, mask=why)
    why = f"{type(full).__name__} has no decoder layers to look at"
    for small in shrunk_configs(config, kinds, sequence_length) if kinds else ():
        try:
            bare = build_meta_model(model_class, small)
            size = sum(p.numel() for p in bare.parameters())
            if missing := set(kinds) - set(layer_kinds(bare, full)):
                why = f"{len(missing)} kind(s) of its layers are not in a tiny copy"
            elif size > _MOST_PARAMETERS:
                why = f"its tiny copy would have {size / 1e6:.0f} M parameters, too many to try"
            else:
                batches = list(_batches(rows)) if packed else [[_WHOLE] * rows]
                make = partial(random_copy, model_class, small, torch.device(device))
                return _try(make, batches, torch.device(device))
        except Exception as error:  # an architecture may refuse in any way
            why = f"a tiny copy does not run packed: {one_line(error, 400)}"
    return PackingVerdict(not packed, why, mask=why)


def _try(
    make: Callable[[], PreTrainedModel], batches: Batches, device: torch.device
) -> PackingVerdict:
    """Return what tiny copies show: by the borders of documents, else by a mask."""
    model = make()
    try:
        check_varlen_kernel(device)
        attend_within_documents(model)
        verdict = _judged(model, batches, borders=True)
    except Exception as error:  # an architecture may refuse in any way
        verdict = PackingVerdict(False, one_line(error, 400))
    if verdict.ok:
        return verdict
    if all(len(lengths) == 1 for batch in batches for lengths in batch):
        return PackingVerdict(True, "each row is one document", verdict.why)
    return replace(_judged(make(), batches, borders=False), mask=verdict.why)


def _judged(model: PreTrainedModel, batches: Batches, *, borders: bool) -> PackingVerdict:
    """Return what `model` shows, in fp64 where it is not sure."""
    is_half = next(model.parameters()).dtype == torch.bfloat16
    # Flex attention is not worth a compilation.
    with forked_rng(model.device), torch.compiler.set_stance("force_eager"):
        verdict = _compare(model, batches, borders)
        if is_half or not 0 < verdict.by < _SURE:
            return verdict
        try:  # again in fp64, where rounding is gone
            model.set_experts_implementation("eager")  # the grouped product has no fp64
            return _compare(model.double(), batches, borders)
        except (RuntimeError, TypeError, ValueError):  # casts of its own, or a kernel without fp64
            return verdict


@torch.no_grad()
def _compare(model: PreTrainedModel, batches: Batches, borders: bool) -> PackingVerdict:
    """Return what packed rows show; `borders` go along with them."""
    parameter = next(model.parameters())
    device, tolerance = parameter.device, _ROUNDING[parameter.dtype]
    torch.manual_seed(1)
    for packed in batches:
        ids = torch.randint(SPECIAL, VOCABULARY, (len(packed), sum(packed[0])))
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in packed])
        whole = all(len(row) == 1 for row in packed)  # windows come without positions
        inputs: dict[str, Any] = {} if whole else {"position_ids": positions}
        inputs |= document_borders({"input_ids": ids} | inputs) if borders else {}
        ids = ids.to(device)
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
        logits = _logits(model, ids, **inputs)
        spread = float(logits.std()) or 1.0
        other = ids.clone()
        later = torch.zeros_like(ids, dtype=torch.bool)
        for row, lengths in enumerate(packed):
            first = ids[row, : lengths[0]]
            other[row, : lengths[0]] = SPECIAL + (first - SPECIAL + 17) % (VOCABULARY - SPECIAL)
            later[row, lengths[0] :] = True
        moved = (_logits(model, other, **inputs) - logits).abs().amax(-1) / spread
        if not moved.isfinite().all():
            return PackingVerdict(
                False, "a tiny copy answers with values that are not finite", by=inf
            )
        if float(moved.max()) <= tolerance:
            return PackingVerdict(False, "a tiny copy does not answer to its input at all", by=inf)
        if (leak := float((moved * later).max())) > tolerance:
            why = "packed samples see each other: changing the first moves the logits of later ones"
            return PackingVerdict(False, f"{why} by {leak:.1e} of their spread", by=leak)
        off = 0.0
        for row, lengths in enumerate(packed):
            parts = zip(ids[row].split(lengths), logits[row].split(lengths), strict=True)
            for sample, among in parts:
                off = max(off, float((_logits(model, sample[None])[0] - among).abs().max()))
        if (off := off / spread) > tolerance:
            why = "a packed sample does not come out as it does by itself: its logits differ"
            return PackingVerdict(False, f"{why} by {off:.1e} of their spread", by=off)
    return PackingVerdict(True, "packed samples stay apart, as tried on a tiny copy of the model")


def _batches(rows: int) -> Iterator[Batch]:
    """Yield packings of `rows` rows, other ones a row."""
    for first in range(len(_PACKED) if rows == 1 else 2):
        packed = [_PACKED[(first + i) % len(_PACKED)] for i in range(rows)]
        if any(len(lengths) > 1 for lengths in packed):
            yield packed


def _logits(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits of each token; of a reward model what its head says of each."""
    if (head := reward_head(model)) is None:
        return model(input_ids=ids, **inputs).logits
    said = list[torch.Tensor]()
    hook = head.register_forward_hook(lambda _, __, output: said.append(output))
    model(input_ids=ids, **inputs)
    hook.remove()
    return said[0]
