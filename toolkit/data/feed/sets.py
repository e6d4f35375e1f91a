"""One source as samples to train on and samples to evaluate on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from toolkit.data.order.position import EvalBatches, permute
from toolkit.data.samples.sequences import (
    EncodedRows,
    Packed,
    PadCollate,
    Padded,
    Pieces,
    Windows,
)
from toolkit.data.tokens.encode import EncodedSource
from toolkit.errors import DataError

Packing = Literal["wrapped", "bfd", "none"]
MicroBatch = dict[str, torch.Tensor]
SampleSet = Windows | Packed | Padded


class Processes(Protocol):
    """The processes of the run, as `training.launch.Run` has them."""

    @property
    def device(self) -> torch.device:
        """Where this one computes."""

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def loader(
        self,
        dataset: Dataset,
        batches: Sampler,
        workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
    ) -> Any:
        """Return this rank's batches on its device."""

    def stream(self, batches: IterableDataset, workers: int = 0) -> Any:
        """Return `batches`, which are this rank's, on its device."""


@dataclass(frozen=True)
class SampleShape:
    """How rows become samples."""

    packing: Packing
    """See `DataConfig.packing`, `auto` decided."""
    sequence_length: int
    """Tokens of a sample at most."""
    pad_id: int = 0
    """Token that fills up."""

    def collate(self) -> Callable[[list], Any] | None:
        """Return what makes a micro-batch of samples; None where they are just stacked."""
        return PadCollate(self.pad_id, self.sequence_length) if self.packing == "none" else None


def samples_of(
    source: EncodedSource, shape: SampleShape, chosen: np.ndarray | None = None
) -> SampleSet:
    """Return the rows of `source`, or the `chosen` ones, as samples.

    Raises:
        DataError: there is none.
    """
    rows = EncodedRows(source.tokens)
    if shape.packing == "wrapped":
        return Windows(rows, shape.sequence_length)
    pieces = Pieces(rows, shape.sequence_length, chosen)
    if not len(pieces):
        raise DataError(
            f"expected at least one row with a token in the source {source.name}, got none of "
            f"{len(rows)}; give more data, or leave the source out"
        )
    return Packed(pieces, shape.pad_id) if shape.packing == "bfd" else Padded(pieces)


def held_out(
    source: EncodedSource, shape: SampleShape, share: float, most: int | None
) -> tuple[SampleSet, SampleSet | None]:
    """Return the samples of `source` to train on, and those that are held out of it, if any.

    Of windows the last `share` is held out. Else `share` of the rows is, drawn alike for every
    seed, so that runs with unlike seeds compare. At least one is held out where `share` is above 0,
    and at least one is left for training.

    Args:
        source: the rows.
        shape: how they become samples.
        share: from 0 to below 1.
        most: evaluate on so many windows or rows at most; training does not get the others either.
    """
    windows = samples_of(source, shape) if shape.packing == "wrapped" else None
    n = len(source.tokens) if windows is None else len(windows)
    held = min(max(1, round(n * share)), n - 1) if share > 0 else 0
    if isinstance(windows, Windows):
        used = held if most is None else min(held, most)
        rest = windows.view(n - held, n - held + used) if held else None
        return windows.view(0, n - held), rest
    if held < 1:
        return samples_of(source, shape), None
    drawn = permute(np.arange(held), n, 0, 0)
    keep = np.ones(n, bool)
    keep[drawn] = False
    return (
        samples_of(source, shape, np.flatnonzero(keep)),
        samples_of(source, shape, np.sort(drawn[:most])),
    )


def to_evaluate(
    sources: Sequence[EncodedSource], shape: SampleShape, most: int | None
) -> dict[str, SampleSet]:
    """Return the samples of sources to evaluate on: of each the first `most` windows or rows."""
    if sources:
        check_names(sources)
    found: dict[str, SampleSet] = {}
    for source in sources:
        if shape.packing == "wrapped":
            whole: Any = samples_of(source, shape)
            found[source.name] = whole.view(0, min(len(whole), most or len(whole)))
        else:
            n = len(source.tokens)
            found[source.name] = samples_of(source, shape, np.arange(min(n, most or n)))
    return found


def eval_batches(
    run: Processes, sets: Mapping[str, SampleSet], shape: SampleShape, per_device_batch_size: int
) -> dict[str, Iterable[MicroBatch]]:
    """Return source name -> this rank's micro-batches, each sample once over all ranks.

    Every rank gets as many; what is missing is filled with samples without labels.
    """
    found: dict[str, Iterable[MicroBatch]] = {}
    for name, samples in sets.items():
        read = samples.by_length() if isinstance(samples, Padded) else samples
        batches = EvalBatches(len(samples), per_device_batch_size, run.world_size)
        found[name] = run.loader(read, batches, collate_fn=shape.collate())
    return found


def check_names(sources: Sequence[Any]) -> None:
    """Refuse no sources, and two of one name: reports and metrics would mix them up.

    Raises:
        DataError: names the sources.
    """
    names = [source.name for source in sources]
    if not names:
        raise DataError("expected at least one source of data, got none")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"expected sources with names of their own, got {', '.join(names)}; set data.sources"
            f"[...].name where it is {twice[0]}"
        )
