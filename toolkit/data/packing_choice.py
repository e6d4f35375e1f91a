"""How documents or examples become samples in this run: what `data.packing` asks for, tried on the
model.

Owns the decision that both recipes make alike. Does not pack.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.settings import DataConfig
from toolkit.data.feed.map_style import Feed
from toolkit.data.feed.sets import Packing
from toolkit.data.feed.stream_feed import StreamFeed
from toolkit.errors import DataError
from toolkit.formats.hf_folder import assets_of
from toolkit.models import causal_lm as models
from toolkit.models import packing_probe

AnyFeed = Feed | StreamFeed


@dataclass(frozen=True)
class Chosen:
    """How they become samples, and why."""

    packing: Packing
    why: str


def choose_packing(
    data: DataConfig, model: PreTrainedModel, rows: int, device: str = "cpu"
) -> Chosen:
    """Decide on `data.packing: auto`, and refuse `bfd` where the model mixes packed samples.

    Tries it on a tiny copy of the model: 0.1 to 2 seconds for most types. Not collective.

    Args:
        data: `packing` and `sequence_length` are read.
        model: from `build_on_meta`, before adapters and sharding.
        rows: samples of a micro-batch.
        device: where the run computes.

    Raises:
        DataError: `bfd` was asked for, and the model does not keep packed samples apart.
    """
    asked = data.packing
    if asked == "wrapped" or asked == "none":
        return Chosen(asked, "as data.packing asks")
    verdict = packing_probe.keeps_apart(
        model.config,
        assets_of(model).model_class,
        sequence_length=data.sequence_length,
        rows=rows,
        device=device,
    )
    if verdict.ok:
        return Chosen("bfd", verdict.why)
    if asked == "bfd":
        raise DataError(
            f"data.packing bfd: {models.plain_name(model)} does not keep packed samples apart "
            f"({verdict.why}); set data.packing: none"
        )
    return Chosen("none", verdict.why)


def pad_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the token that fills up; it is never learned, so any that has an embedding will do."""
    for name in ("pad_token_id", "eos_token_id"):
        if (found := getattr(tokenizer, name, None)) is not None:
            return int(found)
    return 0


def data_lines(feed: AnyFeed, packing: Chosen) -> list[str]:
    """Return what a run says of its data at the start, a line for each source."""
    length = feed.sequence_length
    how = {
        "wrapped": f"samples of {length} tokens",
        "bfd": f"samples of up to {length} tokens, packed",
        "none": f"samples of up to {length} tokens, padded",
    }[packing.packing]
    if isinstance(feed, StreamFeed):
        names = ", ".join(source.name for source in feed.sources)
        evals = sum(len(held) for held in feed.eval_sets.values())
        return [f"{names}: {how}, read while training; {evals:,} to evaluate"]
    several, lines = len(feed.parts) > 1, []
    for part in feed.parts:
        evals = len(feed.eval_sets.get(part.name, ()))
        line = f"{part.samples:,} {how}, to train on, {evals:,} to evaluate"
        if part.density is not None and packing.packing == "bfd":
            line += f"; {part.density:.1%} of them is tokens"
        dropped = [f"{n:,} {what}" for what, n in part.dropped.items() if n]
        line += f"; left over: {', '.join(dropped)}" if dropped else ""
        lines.append(f"{part.name}: {line}" if several else line)
    extra = sorted(set(feed.eval_sets) - {part.name for part in feed.parts})
    lines += [f"{name}: {len(feed.eval_sets[name]):,} to evaluate" for name in extra]
    return lines
