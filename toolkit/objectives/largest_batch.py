"""The largest micro-batch that a run's settings allow, as the run's own samples would make it.

[Note: largest batch] A packed row holds `data.sequence_length` tokens, whatever the rows are.
Padded rows (`packing: none`) become as wide as the longest of them, and each side of a pair is a
row: a pair whose one side takes nearly all tokens makes its micro-batch twice as large as a packed
one. A padded micro-batch also carries an attention mask. Plans are of that batch, so that no row of
the data runs out of the memory that was planned.
"""

from dataclasses import replace

import numpy as np
import torch

from toolkit.config.preference import PreferConfig
from toolkit.config.settings import RunConfig
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sequences import Packing, Piece, SampleShape

_PAD = 1  # another id than that of the tokens
_SHORT = 2  # tokens of the shorter side of a pair: one of its prompt and one answer


def largest_batch(cfg: RunConfig, packing: Packing) -> Batch:
    """Return the micro-batch of `cfg` that takes most memory, on the host; every token is 0.

    All tokens are supervised. See [Note: largest batch].

    Args:
        packing: `data.packing`, with `auto` decided.
    """
    rows, length = cfg.train.micro_batch, cfg.data.sequence_length
    if isinstance(cfg, PreferConfig):
        return _pairs(cfg, packing, rows, length)
    if packing == "none":
        shape = SampleShape("none", length, pad_id=_PAD)
        # One row is filled up, so that the batch needs a mask.
        lengths = [length] * (rows - 1) + [max(1, length - 1)]
        return shape.batch([shape.sample([_piece(tokens)]) for tokens in lengths])
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return Batch({"input_ids": ids}, ids.clone())


def _pairs(cfg: PreferConfig, packing: Packing, rows: int, length: int) -> Batch:
    """Return a pair a row: equal sides if pairs are packed, otherwise one side as long as can be.

    Of answers with a label only the row's own answer is trained, so it is the long side; the answer
    that it is compared with is long in the last of several rows, since each has a batch of its own.
    """
    shape = SampleShape(packing, length, _PAD, pairs=True, prompts=cfg.learns_prompts)
    is_equal = packing != "none" and cfg.preference.paired
    second = -(-length // 2) if is_equal else max(1, length - _SHORT)
    seconds = [second] * rows
    if not cfg.preference.paired and rows > 1:
        seconds[-1] = _SHORT
    samples = []
    for second in seconds:
        sample = shape.sample([_piece(length, second)])
        if not cfg.data.streaming:  # whose reference is a forward of each micro-batch
            sample["reference"] = torch.zeros(2)
        sample["margin"] = torch.zeros(1)
        sample["desirable"] = torch.zeros(0 if cfg.preference.paired else 1, dtype=torch.bool)
        samples.append(sample)
    return _without_positions(shape.batch(samples))


def _without_positions(batch: Batch) -> Batch:
    """Return a batch whose documents are told apart by their borders, which take no memory."""
    inputs = {name: x for name, x in batch.inputs.items() if name != "position_ids"}
    halves = None
    if batch.halves is not None:
        first, second = batch.halves
        halves = _without_positions(first), _without_positions(second)
    return replace(batch, inputs=inputs, halves=halves)


def _piece(tokens: int, second: int = 0) -> Piece:
    return Piece(np.zeros(tokens, np.int64), np.zeros(tokens, np.int64), second)
