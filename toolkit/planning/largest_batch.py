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

_SHORT = 2  # tokens of the shorter side of a pair: one of its prompt and one answer


def largest_batch(cfg: RunConfig, packing: Packing) -> Batch:
    """Return the micro-batch of `cfg` that takes most memory, on the host; every token is 0.

    All tokens are supervised. See [Note: largest batch].

    Args:
        packing: `data.packing`, with `auto` decided.
    """
    rows, length = cfg.train.micro_batch, cfg.data.sequence_length
    if packing == "none":
        return _padded(cfg, rows, length)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    batch = Batch({"input_ids": ids}, ids.clone())
    return _one_pair_a_row(batch) if isinstance(cfg, PreferConfig) else batch


def _padded(cfg: RunConfig, rows: int, length: int) -> Batch:
    """Return padded rows, of which at least one is filled up, so that they need a mask."""
    pairs = isinstance(cfg, PreferConfig)
    shape = SampleShape("none", length, pad_id=1, pairs=pairs, prompts=cfg.learns_prompts)
    if not pairs:
        lengths = [length] * (rows - 1) + [max(1, length - 1)]
        return shape.batch([shape.sample([_piece(tokens)]) for tokens in lengths])
    sample = shape.sample([_piece(length, max(1, length - _SHORT))])
    sample["reference"] = torch.zeros(2)
    sample["margin"] = torch.zeros(1)
    sample["desirable"] = torch.zeros(0 if cfg.preference.paired else 1, dtype=torch.bool)
    return shape.batch([dict(sample) for _ in range(rows)])


def _piece(tokens: int, second: int = 0) -> Piece:
    return Piece(np.zeros(tokens, np.int64), np.zeros(tokens, np.int64), second)


def _one_pair_a_row(batch: Batch) -> Batch:
    """Return full rows [B, T] as pairs, one a row, with sides of equal length."""
    count, length = batch.targets.shape
    middle = -(-length // 2)
    side = torch.arange(2).repeat_interleave(middle)[:length]
    rows = torch.arange(count)[:, None]
    side_ends = torch.tensor([middle, length]) - 1
    return replace(
        batch,
        sequences=2 * rows + side,
        n_sequences=2 * count,
        reference=torch.zeros(2 * count),
        desirable=torch.zeros(count, dtype=torch.bool),
        ends=torch.stack([rows.expand(-1, 2), side_ends.expand(count, 2)], -1).view(-1, 2),
    )
