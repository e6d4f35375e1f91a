"""Whether a model type keeps packed samples apart, found out by trying it on a tiny copy.

There is no list of types: of those that transformers knows, more than a third let samples see each
other without a word (state spaces, linear attention, position biases, masks built elsewhere).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import one_line
from toolkit.models.causal_lm import mapped_class
from toolkit.models.modes import forked_rng
from toolkit.models.tiny_copy import SPECIAL, VOCABULARY, Layers, cuts, on_meta

# Samples of the rows that are tried: other lengths a row, single tokens, and longer than a window.
_PACKED: tuple[tuple[int, ...], ...] = ((7, 1, 11, 5), (3, 9, 2, 2, 8), (24,), (12, 12))
_MOST_PARAMETERS = 2**28
# Largest difference of logits that is rounding, as a share of their spread.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2}
_SURE = 0.3  # no rounding makes as much of a difference


@dataclass(frozen=True)
class Verdict:
    """Whether packed samples stay apart."""

    ok: bool
    why: str
    """What was found, or what went wrong, in words for a user."""
    by: float = 0.0
    """By how much of their spread the logits are off."""


def keeps_apart(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel] | None = None,
    *,
    sequence_length: int | None = None,
    rows: int = 2,
    device: torch.device | str = "cpu",
) -> Verdict:
    """Try on a tiny copy of the model whether packed samples stay apart. Not collective.

    Takes a second; half a minute for the few types whose layers cannot be left out. Runs packed
    rows as training does (restarting `position_ids`, no attention mask), without dropout: later
    samples must not move when the first one changes, and each must come out as it does by itself.
    Whatever fails on the way is a no with its reason.

    Args:
        model_class: before sharding; None: what transformers maps the config to.
        sequence_length: of a packed row; windows and chunks that are as long are not cut.
        rows: of a micro-batch: flash attention keeps apart the samples of one row only.
        device: of the run, for an attention implementation that the CPU has not.
    """
    try:
        model_class = model_class or mapped_class(config)
        full = on_meta(model_class, config)
        layers = Layers.of(full)
        kinds = layers.kinds(full)
    except Exception as error:  # an architecture may do anything on its way
        return Verdict(False, f"its layers cannot be looked at: {one_line(error, 400)}")
    why = f"{type(full).__name__} has no decoder layers to look at"
    for small in cuts(config, kinds, sequence_length) if kinds else ():
        try:
            bare = on_meta(model_class, small)
            size = sum(p.numel() for p in bare.parameters())
            if missing := set(kinds) - set(layers.kinds(bare)):
                why = f"{len(missing)} kind(s) of its layers are not in a tiny copy"
            elif size > _MOST_PARAMETERS:
                why = f"its tiny copy would have {size / 1e6:.0f} M parameters, too many to try"
            else:
                return _try(model_class, small, rows, torch.device(device))
        except Exception as error:  # an architecture may refuse in any way
            why = f"a tiny copy does not run packed: {one_line(error, 400)}"
    return Verdict(False, why)


def _try(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, rows: int, device: torch.device
) -> Verdict:
    """Return what a copy of `config` shows."""
    # Flash attention runs in half precision only.
    is_flash = "flash" in str(config._attn_implementation)
    dtype = torch.bfloat16 if is_flash else torch.float32
    # Flex attention is not worth a compilation.
    with forked_rng(device), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        model = model_class._from_config(copy.deepcopy(config), dtype=dtype).eval()
        with torch.no_grad():  # noise on all it has: zeros and ones of a start would hide a leak
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn(parameter.shape) * 0.05)
        verdict = _compare(model.to(device), rows)
        if is_flash or not 0 < verdict.by < _SURE:
            return verdict
        try:  # again in fp64, where rounding is gone
            model.set_experts_implementation("eager")  # the grouped product has no fp64
            return _compare(model.double(), rows)
        except (RuntimeError, TypeError, ValueError):  # casts of its own, or a kernel without fp64
            return verdict


@torch.no_grad()
def _compare(model: PreTrainedModel, rows: int) -> Verdict:
    """Return what packed rows show."""
    parameter = next(model.parameters())
    device, tolerance = parameter.device, _ROUNDING[parameter.dtype]
    torch.manual_seed(1)
    for packed in _batches(rows):
        ids = torch.randint(SPECIAL, VOCABULARY, (rows, sum(packed[0])), device=device)
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in packed])
        positions = positions.to(device)
        logits = _logits(model, ids, position_ids=positions)
        spread = float(logits.std()) or 1.0
        other = ids.clone()
        later = torch.zeros_like(ids, dtype=torch.bool)
        for row, lengths in enumerate(packed):
            first = ids[row, : lengths[0]]
            other[row, : lengths[0]] = SPECIAL + (first - SPECIAL + 17) % (VOCABULARY - SPECIAL)
            later[row, lengths[0] :] = True
        moved = (_logits(model, other, position_ids=positions) - logits).abs().amax(-1) / spread
        if not moved.isfinite().all():
            return Verdict(False, "a tiny copy answers with values that are not finite", inf)
        if float(moved.max()) <= tolerance:
            return Verdict(False, "a tiny copy does not answer to its input at all", inf)
        if (leak := float((moved * later).max())) > tolerance:
            why = "packed samples see each other: changing the first moves the logits of later ones"
            return Verdict(False, f"{why} by {leak:.1e} of their spread", leak)
        off = 0.0
        for row, lengths in enumerate(packed):
            parts = zip(ids[row].split(lengths), logits[row].split(lengths), strict=True)
            for sample, among in parts:
                off = max(off, float((_logits(model, sample[None])[0] - among).abs().max()))
        if (off := off / spread) > tolerance:
            why = "a packed sample does not come out as it does by itself: its logits differ"
            return Verdict(False, f"{why} by {off:.1e} of their spread", off)
    return Verdict(True, "packed samples stay apart, as tried on a tiny copy of the model")


def _batches(rows: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield packings of `rows` rows, other ones a row."""
    for first in range(len(_PACKED) if rows == 1 else 2):
        packed = [_PACKED[(first + i) % len(_PACKED)] for i in range(rows)]
        if any(len(lengths) > 1 for lengths in packed):
            yield packed


def _logits(model: PreTrainedModel, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, **inputs).logits
