"""Try on a tiny copy whether a model type keeps packed samples apart.

There is no list of types. Of those that transformers knows, more than a third let samples see each
other without a warning (state spaces, linear attention, position biases, masks built elsewhere).
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
    build_noisy_copy,
    describe_layer_kinds,
    shrunk_configs,
)

Batch = list[tuple[int, ...]]  # the lengths of each row's samples
Batches = list[Batch]
# Sample lengths of the rows: different in each row, some of one token, some above a window.
_WHOLE: tuple[int, ...] = (24,)
_PACKED: tuple[tuple[int, ...], ...] = ((7, 1, 11, 5), (3, 9, 2, 2, 8), _WHOLE, (12, 12))
_MOST_PARAMETERS = 2**28
# Differences of logits below this share of their spread count as rounding.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
_SURE = 0.3  # rounding never makes as large a difference


@dataclass(frozen=True)
class PackingVerdict:
    """The result of a trial: if packed samples are independent, and if that needs a mask."""

    ok: bool
    why: str  # the reason, in words for a user
    mask: str | None = None  # why a mask is needed; None: `attend_within_documents` suffices
    by: float = 0.0  # error of the logits as a share of their spread


def probe_packing(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel] | None = None,
    *,
    sequence_length: int | None = None,
    rows: int = 2,
    device: torch.device | str = "cpu",
    packed: bool = True,
) -> PackingVerdict:
    """Test on a tiny copy of the model if samples that share a row stay independent.

    They are independent if later samples do not change with the first one, and if each has the
    logits that it has alone. Document borders are tried first, then the mask that transformers
    builds from `position_ids`. Takes a second, or half a minute for a few model types. Not
    collective.

    Args:
        config: config of the model.
        model_class: class before sharding; None: transformers' class for the config.
        sequence_length: length of a packed row. The copy keeps attention windows that are at least
            this long; None: it reduces all windows.
        rows: rows of a micro-batch. Flash attention separates samples only if there is one row.
        device: device of the run, for attention implementations that do not run on a CPU.
        packed: if False, each row is one document, and the trial only tells if a mask is needed.

    Returns:
        The verdict. If no copy can be tried, `ok` is `not packed`, and `why` has the reason.
    """
    try:
        model_class = model_class or causal_lm_class(config)
        full = build_meta_model(model_class, config)
        kinds = describe_layer_kinds(full)
    except Exception as error:  # an architecture may do anything on its way
        why = f"its layers cannot be looked at: {one_line(error, 400)}"
        return PackingVerdict(not packed, why, mask=why)
    why = f"{type(full).__name__} has no decoder layers to look at"
    for small in shrunk_configs(config, kinds, sequence_length) if kinds else ():
        try:
            bare = build_meta_model(model_class, small)
            size = sum(p.numel() for p in bare.parameters())
            if missing := set(kinds) - set(describe_layer_kinds(bare, full)):
                why = f"{len(missing)} kind(s) of its layers are not in a tiny copy"
            elif size > _MOST_PARAMETERS:
                why = f"its tiny copy would have {size / 1e6:.0f} M parameters, too many to try"
            else:
                batches = list(_generate_packings(rows)) if packed else [[_WHOLE] * rows]
                make = partial(build_noisy_copy, model_class, small, torch.device(device))
                return _probe_tiny_copies(make, batches, torch.device(device))
        except Exception as error:  # an architecture may refuse in any way
            why = f"a tiny copy does not run packed: {one_line(error, 400)}"
    return PackingVerdict(not packed, why, mask=why)


def _probe_tiny_copies(
    make: Callable[[], PreTrainedModel], batches: Batches, device: torch.device
) -> PackingVerdict:
    """Test a copy with document borders; if that fails, test a new copy with a mask.

    No second test is needed if each row is one document.

    Args:
        make: function that builds a copy.
        batches: for each micro-batch, the sample lengths of each row.
        device: device of the copies.
    """
    model = make()
    try:
        check_varlen_kernel(device)
        attend_within_documents(model)
        verdict = _probe_copy(model, batches, borders=True)
    except Exception as error:  # an architecture may refuse in any way
        verdict = PackingVerdict(False, one_line(error, 400))
    if verdict.ok:
        return verdict
    if all(len(lengths) == 1 for batch in batches for lengths in batch):
        return PackingVerdict(True, "each row is one document", verdict.why)
    return replace(_probe_copy(make(), batches, borders=False), mask=verdict.why)


def _probe_copy(model: PreTrainedModel, batches: Batches, *, borders: bool) -> PackingVerdict:
    """Test in a copy if samples are independent; repeat in fp64 if a difference may be rounding.

    A bf16 copy is not tested again.

    Args:
        model: the copy.
        batches: for each micro-batch, the sample lengths of each row.
        borders: pass document borders to the forward.
    """
    is_half = next(model.parameters()).dtype == torch.bfloat16
    # Compiling flex attention would take longer than the trial.
    with forked_rng(model.device), torch.compiler.set_stance("force_eager"):
        verdict = _compare_logits(model, batches, borders)
        if is_half or not 0 < verdict.by < _SURE:
            return verdict
        # Compare again in fp64, which has no such rounding.
        try:
            model.set_experts_implementation("eager")  # the grouped product has no fp64
            return _compare_logits(model.double(), batches, borders)
        except (RuntimeError, TypeError, ValueError):  # its own casts, or a kernel without fp64
            return verdict


@torch.no_grad()
def _compare_logits(model: PreTrainedModel, batches: Batches, borders: bool) -> PackingVerdict:
    """Test if samples in packed rows are independent, by comparing logits.

    The first sample of each row is changed, which must not change the logits of later ones. Each
    sample also must have the logits that it has alone.

    Args:
        model: the copy.
        batches: for each micro-batch, the sample lengths of each row.
        borders: pass document borders to the forward.
    """
    parameter = next(model.parameters())
    device = parameter.device
    tolerance = _ROUNDING[parameter.dtype]
    torch.manual_seed(1)
    for packed in batches:
        ids = torch.randint(SPECIAL, VOCABULARY, (len(packed), sum(packed[0])))
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in packed])
        # Rows of one document come without positions, as windows of a stream do.
        whole = all(len(row) == 1 for row in packed)
        inputs: dict[str, Any] = {} if whole else {"position_ids": positions}
        inputs |= document_borders({"input_ids": ids} | inputs) if borders else {}
        ids = ids.to(device)
        inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
        logits = compute_token_logits(model, ids, **inputs)
        spread = float(logits.std()) or 1.0
        other = ids.clone()
        later = torch.zeros_like(ids, dtype=torch.bool)
        for row, lengths in enumerate(packed):
            first = ids[row, : lengths[0]]
            other[row, : lengths[0]] = SPECIAL + (first - SPECIAL + 17) % (VOCABULARY - SPECIAL)
            later[row, lengths[0] :] = True
        moved = (compute_token_logits(model, other, **inputs) - logits).abs().amax(-1) / spread
        if not moved.isfinite().all():
            return PackingVerdict(False, "the logits of a tiny copy are not finite", by=inf)
        if float(moved.max()) <= tolerance:
            return PackingVerdict(
                False, "the logits of a tiny copy do not depend on its input", by=inf
            )
        if (leak := float((moved * later).max())) > tolerance:
            why = "packed samples see each other: changing the first moves the logits of later ones"
            return PackingVerdict(False, f"{why} by {leak:.1e} of their spread", by=leak)
        off = 0.0
        for row, lengths in enumerate(packed):
            parts = zip(ids[row].split(lengths), logits[row].split(lengths), strict=True)
            for sample, among in parts:
                alone = compute_token_logits(model, sample[None])[0]
                off = max(off, float((alone - among).abs().max()))
        if (off := off / spread) > tolerance:
            why = "a packed sample does not come out as it does by itself: its logits differ"
            return PackingVerdict(False, f"{why} by {off:.1e} of their spread", by=off)
    return PackingVerdict(True, "packed samples stay apart, as tried on a tiny copy of the model")


def _generate_packings(rows: int) -> Iterator[Batch]:
    """Yield micro-batches of `rows` packed rows, each row as a tuple of sample lengths.

    The lengths differ from row to row. All rows have 24 tokens.
    """
    for first in range(len(_PACKED) if rows == 1 else 2):
        packed = [_PACKED[(first + i) % len(_PACKED)] for i in range(rows)]
        if any(len(lengths) > 1 for lengths in packed):
            yield packed


def compute_token_logits(model: PreTrainedModel, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits of each token; for a reward model, its head's output for each token."""
    if (head := reward_head(model)) is None:
        return model(input_ids=ids, **inputs).logits
    outputs = list[torch.Tensor]()
    hook = head.register_forward_hook(lambda _, __, output: outputs.append(output))
    model(input_ids=ids, **inputs)
    hook.remove()
    return outputs[0]
