"""Log-probabilities of answers by the reference: one pass before the first step, kept in a file.

[Note: reference] Before the first step the model is the reference, under full tuning and with new
adapters, which change nothing yet. So no second model is held: every pair to train on and to
evaluate on goes through the sharded model once, without a gradient, about a third of the cost of an
epoch. Beside the checkpoints 8 bytes a row are kept with digests of rows and base; a resume reads
them.
Rows of a stream are not known before: there each batch asks the model with its adapters off.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import xxhash
from safetensors import SafetensorError

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.order.position import eval_batches
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.sequences import FILLER, EncodedRows, Samples
from toolkit.errors import TrainingError
from toolkit.formats import assets_of, reshard
from toolkit.formats.synced_files import replacing
from toolkit.sharding.fsdp import Sharded
from toolkit.training.guards import watchdog
from toolkit.training.preference import sequence_logps

FILE = "reference.safetensors"
_PACE = 30.0  # seconds between two lines on how far it is


def use_reference(sharded: Sharded, data: TrainingData, folder: Any, step: int) -> str:
    """Give every pair of `data` the log-probabilities of its answers by the reference; return the
    line for the log. Collective. See [Note: reference].

    Args:
        sharded: before its first step; after a resume the file is read instead.
        folder: that of the run's checkpoints (`RunFolder.root`), in which `FILE` lies.
        step: that are done.

    Raises:
        TrainingError: a resumed run whose file is missing, damaged, or of other rows or another
            base (named).
    """
    if not isinstance(data.feed, PreparedFeed):
        return "reference  the base, with adapters off: asked for each batch, one more forward"
    parts = dict(_parts(data.feed))
    rows, file = {name: part[0].pieces.rows for name, part in parts.items()}, folder / FILE
    found = ranks.on_main(lambda: {"rows": _digest(rows), "base": _base(sharded)})
    values = ranks.on_main(lambda: _kept(file, found, step))  # hosts may have no disk in common
    kept = values is not None
    if values is None:
        values = {name: _asked(sharded, data, samples) for name, samples in parts.items()}
        ranks.on_main(lambda: _write(file, values, found))
    for name, own in parts.items():
        for samples in own:
            samples.pieces.rows.reference = values[name]
    count = sum(map(len, rows.values()))
    how = "read from" if kept else "asked of the model before the first step, kept in"
    return f"reference  {count:,} pairs, {how} {file}"


def _parts(feed: PreparedFeed) -> Iterator[tuple[str, list[Samples]]]:
    """Yield name -> the samples that are made of the same rows."""
    for source, samples in zip(feed.sources, feed.train, strict=True):
        held = feed.eval_sets.get(source.name)
        yield f"train.{source.name}", [samples, *([held] if held is not None else [])]
    trained = {source.name for source in feed.sources}
    for name, samples in feed.eval_sets.items():
        if name not in trained:
            yield f"eval.{name}", [samples]


def _digest(rows: dict[str, EncodedRows]) -> str:
    """Return a digest of the tokens of all rows, and of where sides begin."""
    whole = xxhash.xxh3_128()
    for name, own in rows.items():
        whole.update(name.encode())
        for column in ("input_ids", "spans", "second"):
            for chunk in own.tokens.data.column(column).chunks:
                flat = chunk.flatten() if column != "second" else chunk
                whole.update(np.ascontiguousarray(flat.to_numpy()).tobytes())
    return whole.hexdigest()


def _base(sharded: Sharded) -> str:
    """Return a digest of the weights that training began with; of random ones none is needed."""
    assets = assets_of(sharded.model)
    if assets.folder is None:
        return "random"
    digest = base_digest(assets.folder, assets.name_or_path, assets.revision)
    # A run that continues an adapter begins with base and adapter.
    continued = (assets.continued or {}).get("sha256")
    return digest if continued is None else f"{digest}+{continued}"


def _kept(file: Any, found: dict[str, str], step: int) -> dict[str, np.ndarray] | None:
    """Return what the file holds where it is of these rows and this base, else None; TrainingError
    where a run needs it.
    """
    try:
        content = file.read_bytes()
        values = safetensors.numpy.load(content)
        told = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    except (OSError, SafetensorError, KeyError) as error:
        if step:
            raise TrainingError(
                f"{file} cannot be read ({error}), and a run that goes on after step {step} needs "
                "it: the model is not the reference any more. Put the file back, or start anew in "
                "another output_dir"
            ) from error
        return None
    others = [name for name in found if told.get(name) != found[name]]
    if others and step:
        what = " and ".join({"rows": "other rows", "base": "another base"}[name] for name in others)
        raise TrainingError(
            f"{file} is of {what} than this run has, which goes on after step {step}: give those "
            "that it began with, or start anew in another output_dir"
        )
    return None if others else values


def _write(file: Any, values: dict[str, np.ndarray], found: dict[str, str]) -> None:
    content = safetensors.numpy.save(values, metadata=found)
    if not isinstance(file, Path):  # of a store, which has the whole of it or nothing
        file.write_bytes(content)
        return
    with replacing(file) as scratch:
        scratch.write_bytes(content)


@torch.no_grad()
def _asked(sharded: Sharded, data: TrainingData, parts: list[Samples]) -> np.ndarray:
    """Return the log-probabilities of both answers of the rows in `parts`, float32 [rows, 2]; NaN
    of rows in none of them. Collective.
    """
    model, run, told = sharded.model, data.run, time.monotonic()
    size = data.cfg.train.per_device_eval_batch_size or data.cfg.train.micro_batch
    values = torch.zeros(len(parts[0].pieces.rows), 2, dtype=torch.float64, device=run.device)
    seen = torch.zeros(len(values), 1, dtype=torch.float64, device=run.device)
    training = model.training
    model.eval()
    try:
        for samples in parts:
            order = eval_batches(range(len(samples)), size, run.rank, run.world_size)
            batches = run.loader(samples, order, collate_fn=samples.shape.batch)
            for at, (indices, batch) in enumerate(zip(order, batches, strict=True)):
                watchdog.progress()
                if time.monotonic() - told > _PACE:
                    ranks.say(f"reference  batch {at:,} of {len(order):,}")
                    told = time.monotonic()
                sums = sequence_logps(model, batch)[0][:-1]
                rows = [row for i in indices if i != FILLER for row in samples.row_numbers(i)]
                values[rows], seen[rows] = sums.double().view(-1, 2), 1.0
    finally:
        model.train(training)
        reshard(model)
    values, seen = sharded.mesh.data.sum(torch.cat([values, seen], 1)).split([2, 1], 1)
    return (values / seen).float().cpu().numpy()
