"""The largest micro-batch that a run's settings allow, as the run's own samples would make it.

[Note: largest batch] A packed row holds `data.sequence_length` tokens, whatever the rows are.
Padded rows (`packing: none`) become as wide as the longest of them, and each side of a pair is a
row: a pair whose one side takes nearly all tokens makes its micro-batch twice as large as a packed
one. A padded micro-batch also carries an attention mask. Plans are of that batch, so that no row of
the data runs out of the memory that was planned.
"""

from dataclasses import replace

import torch

from toolkit.config.settings import RunConfig
from toolkit.data.row_formats import find_row_format
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import Packing, SampleShape
from toolkit.models.attention import ONE_DOCUMENT_A_ROW, document_borders

_PAD = 1  # another id than that of the tokens
_SHORT = 2  # tokens of the shorter side of a pair: one of its prompt and one answer


def largest_batch(cfg: RunConfig, packing: Packing, *, borders: bool = False) -> Batch:
    """Build the micro-batch that takes the most memory, on the host. See [Note: largest batch].

    Every token is 0, and all tokens are supervised.

    Args:
        cfg: settings of the run.
        packing: `data.packing`, with `auto` decided.
        borders: whether the batch has the borders of documents, as with `context_parallel` always.
    """
    rows, length = cfg.train.micro_batch, cfg.data.sequence_length
    parts = cfg.sharding.context_parallel
    row_format = find_row_format(cfg.rows)
    shape = SampleShape(
        packing,
        length,
        _PAD,
        borders=borders or parts > 1,
        row_format=row_format,
        prompts=cfg.learns_prompts,
        context=(0, parts),
    )
    if row_format.sequences_per_row == 2:
        return _build_pairs(cfg, shape, rows)
    is_padded = packing == "none" and parts == 1
    if is_padded or row_format.columns or row_format.sequences_per_row:
        # If rows are padded, one of them is, so that the batch needs a mask.
        last = max(1, length - 1) if packing == "none" else length
        lengths = [length] * (rows - 1) + [last]
        late = not cfg.data.streaming
        samples = [shape.dummy_sample(tokens, late=late) for tokens in lengths]
        return _drop_positions(shape.batch(samples))
    ids = torch.zeros(rows, -(-length // parts) * parts, dtype=torch.int64)
    if not shape.borders:
        return Batch({"input_ids": ids}, ids.clone())
    inputs = {"input_ids": ids, ONE_DOCUMENT_A_ROW: True} | document_borders({"input_ids": ids})
    if parts == 1:
        return Batch(inputs, ids.clone())
    # As in the run's samples, padding repeats the last position.
    positions = torch.arange(ids.shape[1]).clamp(max=length - 1).expand_as(ids)
    return Batch(inputs | {"position_ids": positions}, ids.clone()).cut(0, parts)


def _build_pairs(cfg: RunConfig, shape: SampleShape, rows: int) -> Batch:
    """Build a micro-batch of `rows` pairs whose lengths take the most memory.

    Packed pairs have two sides of equal length. Padded pairs have one side of nearly full length.
    If the format compares rows, only the row's own answer is trained, so that side is the long one.
    Of several rows, the last one has a long second side instead, since all second sides form a
    separate batch that is as wide as its longest row.
    """
    length, compares_rows = shape.sequence_length, shape.row_format.compares_rows
    is_equal = shape.packing != "none" and not compares_rows
    second = -(-length // 2) if is_equal else max(1, length - _SHORT)
    seconds = [second] * rows
    if compares_rows and rows > 1:
        seconds[-1] = _SHORT
    # With a stream, the reference is a forward of each micro-batch instead of stored values.
    late = not cfg.data.streaming
    samples = [shape.dummy_sample(length, second, late=late) for second in seconds]
    return _drop_positions(shape.batch(samples))


def _drop_positions(batch: Batch) -> Batch:
    """Return the batch without positions that separate its documents, as a plan needs it.

    A part of rows (context parallelism) keeps its positions, and each row counts as one document:
    the borders of documents need values, and the shape of the batch is the same.
    """
    if ONE_DOCUMENT_A_ROW in batch.inputs:
        inputs = batch.inputs | {ONE_DOCUMENT_A_ROW: True}
    else:
        inputs = {name: x for name, x in batch.inputs.items() if name != "position_ids"}
    halves = None
    if batch.halves is not None:
        first, second = batch.halves
        halves = _drop_positions(first), _drop_positions(second)
    return replace(batch, inputs=inputs, halves=halves)
