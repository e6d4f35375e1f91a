"""Encode pairs: both sides as one row, truncated to fit into a sample together."""

from collections.abc import Sequence

import numpy as np

from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.data.examples.pairs import Pair
from toolkit.data.sources.row_values import SkippedRow
from toolkit.data.tokens.encoded import (
    LABELS,
    OTHER_PROMPT,
    SAME_PROMPT,
    WITH_MARGIN,
    EncodedExample,
    EncodedRow,
    FatalRow,
)
from toolkit.data.tokens.text_ids import Span


def encode_pair(pair: Pair, sides: Sequence[EncodedExample], cfg: DataConfig) -> EncodedRow:
    """Join the encoded sides of a pair into one row. See [Note: pairs] in `examples/pairs.py`.

    If both sides together are longer than `data.sequence_length`, `data.too_long` decides. The row
    is dropped, ends the run, or both answers are truncated to the same length.

    Args:
        pair: the pair. If it has a label, its second answer belongs to another row.
        sides: the chosen and the rejected side as token ids, each with the span of its answer.
        cfg: settings of the data.

    Returns:
        The row. If the pair cannot be used, a SkippedRow or FatalRow is returned (not raised).
    """
    chosen, rejected = sides
    answer_begins = [side.spans[0][0] for side in sides]
    notes = chosen.notes | rejected.notes
    prompts = [side.input_ids[:begin] for side, begin in zip(sides, answer_begins, strict=True)]
    if not np.array_equal(prompts[0], prompts[1]):
        notes = notes | {OTHER_PROMPT: 1}
    notes = notes | _notes_on_pair(pair)

    limit = cfg.sequence_length
    total = len(chosen.input_ids) + len(rejected.input_ids)
    answer_lengths = [
        len(side.input_ids) - begin for side, begin in zip(sides, answer_begins, strict=True)
    ]
    length = _longest_answer_that_fits(limit - sum(answer_begins), answer_lengths)
    cut_off = 0
    fault = f"expected at most {limit} tokens of both sides (data.sequence_length), got {total}"
    if length < max(answer_lengths):
        too_long = cfg.too_long if isinstance(cfg, FinetuneDataConfig) else "truncate"
        if too_long == "error":
            return FatalRow(f"{fault}; set data.too_long to truncate or drop", "too long")
        if too_long == "drop":
            return SkippedRow(fault, "too long")
        if length < 1:
            return SkippedRow(f"{fault}: the prompt leaves no room for answers", "prompt too long")
        cut_off = sum(max(0, answer - length) for answer in answer_lengths)

    ids, spans = list[np.ndarray](), list[Span]()
    for side, begin in zip(sides, answer_begins, strict=True):
        end = begin + length
        offset = sum(len(earlier) for earlier in ids)
        ids.append(side.input_ids[:end])
        # Nothing predicts the first token of a side, so no span covers it.
        inside = [(max(b, 1), min(e, end)) for b, e in side.spans if b < end]
        spans += [(b + offset, e + offset) for b, e in inside if e > b]
    if pair.desirable is None and np.array_equal(ids[0], ids[1]):
        if cut_off:
            return SkippedRow(
                f"{fault}: truncated to {length} tokens, the answers are equal", "equal once cut"
            )
        return SkippedRow("both answers give the same tokens", "equal sides")
    second = len(ids[0])
    if not (spans and spans[0][0] < second and spans[-1][0] >= second):
        return SkippedRow("an answer has no token to learn", "empty answer")
    return EncodedExample(
        np.concatenate(ids),
        spans,
        cut_off,
        notes,
        second=second,
        columns={"desirable": pair.desirable, "margin": pair.margin},
        trains_second=pair.desirable is None,
    )


def _notes_on_pair(pair: Pair) -> dict[str, int]:
    """Return the notes on a pair for the data report, each with count 1: note -> 1.

    They say that it has a margin, which label it has, or that both answers have one prompt.
    """
    notes = [WITH_MARGIN] if pair.margin is not None else []
    notes += [] if pair.desirable is None else [LABELS[pair.desirable]]
    notes += [SAME_PROMPT] if pair.same_prompt else []
    return dict.fromkeys(notes, 1)


def _longest_answer_that_fits(room: int, lengths: Sequence[int]) -> int:
    """Return the length to which two answers are truncated so that both fit into `room` tokens.

    It is the longer length if they fit already, and 0 if there is no room.
    """
    shorter, longer = sorted(lengths)
    if shorter + longer <= room:
        return longer
    return max(room // 2, room - shorter) if room > 0 else 0
