"""Small sources whose every token is unlike all others; ranks without processes to read them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from sharded import columns
from torch.utils.data import DataLoader

from toolkit.data.feed.feed import Feed, build_samples
from toolkit.data.feed.stream import StreamSource
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import Samples, SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.data.tokens.encoded import EncodedExample, EncodedSource

PAD = 0
APART = 1_000_000
FEATURES = datasets.Features(
    input_ids=datasets.List(datasets.Value("int32")), spans=datasets.List(datasets.Value("int32"))
)


@dataclass(frozen=True)
class Rank:
    """One rank of several, as a feed sees it."""

    rank: int = 0
    world_size: int = 1
    device = torch.device("cpu")

    def loader(self, dataset, batches=None, workers=0, collate_fn=None):
        """Return a loader whose batches are dicts, as transformers has them."""
        if batches is None:
            return AsColumns(DataLoader(dataset, batch_size=None, num_workers=workers))
        return AsColumns(
            DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=collate_fn)
        )


class AsColumns:
    """A loader that gives each `Batch` of another as a dict."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for read in self._loader:
            if isinstance(read, dict):  # of a stream
                yield {k: columns(v) if isinstance(v, Batch) else v for k, v in read.items()}
            else:
                yield columns(read)


def encode_row(raw: dict[str, Any], number: int) -> EncodedExample | BadRow:
    """Take a row as it is; leave out one that begins with a multiple of 7."""
    ids = np.array(raw["input_ids"], np.int32)
    if len(ids) and ids[0] % 7 == 0:
        return BadRow(f"row {number}: a multiple", "multiple of 7")
    return EncodedExample(ids, list(zip(raw["spans"][::2], raw["spans"][1::2], strict=True)))


def rows(lengths: list[int], number: int = 0) -> datasets.Dataset:
    """Return rows of `lengths` whose tokens count upwards from 1,000,000 x (number + 1)."""
    ends = np.cumsum(lengths)
    ids = [
        list(range(APART * (number + 1) + end - length, APART * (number + 1) + end))
        for end, length in zip(ends.tolist(), lengths, strict=True)
    ]
    spans = [[0, length] if length else [] for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "spans": spans}, features=FEATURES)


def source(lengths: list[int], number: int = 0, **mixing) -> EncodedSource:
    return EncodedSource(f"source {number}", rows(lengths, number), **mixing)


def samples(tokens: datasets.Dataset, packing: str, length: int, chosen=None, pad=0) -> Samples:
    """Return rows of tokens as samples of up to `length`."""
    return build_samples(EncodedSource("one", tokens), SampleShape(packing, length, pad), chosen)


def stream(lengths: list[int], number: int = 0, shards: int = 1, **mixing) -> StreamSource:
    read = rows(lengths, number).to_iterable_dataset(num_shards=shards)
    return StreamSource(f"source {number}", read, encode_row, **mixing)


def tokens_of(batch: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each sample of a micro-batch, without padding."""
    return [[token for token in row if token != PAD] for row in batch["input_ids"].tolist()]


def lockstep(
    make: Callable[[], Feed],
    state: dict | None,
    world: int,
    per_device: int,
    count: int,
) -> Iterator[tuple[list[list[int]], str]]:
    """Run all ranks of a world side by side; give the global batch of each step in its order, and
    the state after it. Fail where ranks differ in what is the same on all of them.
    """
    feeds = [make() for _ in range(world)]
    for feed in feeds:
        if state is not None:
            feed.position.load_state_dict(json.loads(json.dumps(state)))
    readers = [
        feed.steps(Rank(rank, world), count, per_device_batch_size=per_device)
        for rank, feed in enumerate(feeds)
    ]
    for step in zip(*readers, strict=True):
        mine = [[s for batch in micro_batches for s in tokens_of(batch)] for micro_batches in step]
        assert len({len(samples) for samples in mine}) == 1
        assert all(len(b["labels"]) == per_device for micro in step for b in micro)
        for feed in feeds:
            feed.position.advance()
        own = [feed.position.local_places for feed in feeds]
        for feed in feeds:
            feed.position.merge_places(own)  # as a save does
        states = {json.dumps(feed.position.state_dict()) for feed in feeds}
        assert len(states) == 1
        yield [sample for turn in zip(*mine, strict=True) for sample in turn], states.pop()
