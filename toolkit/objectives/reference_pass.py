"""Evaluate the reference: log-probabilities of answers by the model that training starts from.

[Note: reference] Before the first step the model is the reference, in full tuning and with
adapters. So no second model is needed: the answers that a run reads go through the sharded model
once, without a gradient, at about a third of the cost of an epoch. The result is a number for each
answer. `toolkit.objectives.reference` stores these numbers with the checkpoints.

Only rows that the run reads are evaluated, because the order of samples is known before the first
step. Padded data is evaluated answer by answer. Answers of similar length share a batch, so that
there is little padding and all ranks have about as much work in each round. Packed data is
evaluated in the packs that training reads. The values of a part of the pass, about a minute, stay
on the device, and nothing waits for the device before the end of the part.

The rows of a stream are not known in advance. There each batch is evaluated with the adapters off.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from toolkit import ranks
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.order.position import eval_batches
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.pieces import EncodedRows
from toolkit.data.samples.sample_shape import FILLER, MULTIPLE, Sample, Samples
from toolkit.errors import TrainingError
from toolkit.formats import reshard
from toolkit.sharding.fsdp import Sharded
from toolkit.training.guards import watchdog
from toolkit.training.preference import sequence_logps

_LOG_SECONDS = 30.0  # between two lines about the progress
PART_SECONDS = 60.0  # target length of a part, which a preemption loses at most
FIRST_ROUNDS = 8  # batches of a rank in the first part, whose time sizes the next one
_MAX_GROWTH = 8  # of a part, relative to the one before

Part = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name of a table -> answers, int64 [n]: 2 * row + side; and their log-probabilities, float32."""
Logps = dict[str, np.ndarray]
"""Name of a table -> log-probability of both answers of every row, float32 [rows, 2]; NaN: it was
not evaluated."""


@dataclass(frozen=True)
class RowTable:
    """The encoded rows of one source, and the samples of them that the run still reads."""

    name: str  # `train.SOURCE` or `eval.SOURCE`
    samples: tuple[Samples, ...]  # to train on, and held out to evaluate on
    reads: tuple[np.ndarray, ...]  # of each: numbers of the samples that this start reads

    @property
    def rows(self) -> EncodedRows:
        """The encoded rows, which all `samples` of the table share."""
        return self.samples[0].pieces.rows

    @cached_property
    def rows_read(self) -> np.ndarray:
        """Mask of the rows that the run reads from its position on; bool [rows]."""
        read = np.zeros(len(self.rows), bool)
        for samples, numbers in zip(self.samples, self.reads, strict=True):
            read[samples.first_rows(numbers)] = True
        return read

    def digest(self) -> str:
        """Compute a digest of the token ids, supervised spans and answer borders of all rows."""
        content, tokens = xxhash.xxh3_128(), self.rows.tokens
        content.update(self.rows.lengths().tobytes())
        for column in ("input_ids", "spans", "second"):
            if column not in tokens.column_names:
                continue
            content.update(column.encode())
            for chunk in tokens.data.column(column).chunks:
                if column == "spans":
                    counts = np.diff(chunk.offsets.to_numpy())
                    content.update(np.ascontiguousarray(counts).tobytes())
                flat = chunk if column == "second" else chunk.flatten()
                content.update(np.ascontiguousarray(flat.to_numpy()).tobytes())
        return content.hexdigest()


def row_tables(data: TrainingData) -> list[RowTable]:
    """Return a table of each training source, then of each source to evaluate on.

    A table holds the rows of the source, and which samples the run still reads from its current
    position on. If no step is left, the run reads none.
    """
    feed = data.feed
    assert isinstance(feed, PreparedFeed)
    has_steps = feed.position.samples_seen // feed.position.global_batch < data.max_steps
    held_out = {} if feed.eval_sources else feed.eval_sets
    tables = []
    trained = zip(feed.sources, feed.train, feed.samples_until(data.max_steps), strict=True)
    for source, samples, read in trained:
        parts, reads = [samples], [read]
        if source.name in held_out:
            parts.append(held_out[source.name])
            reads.append(_all_samples(held_out[source.name], has_steps))
        tables.append(RowTable(f"train.{source.name}", tuple(parts), tuple(reads)))
    for name, samples in feed.eval_sets.items() if feed.eval_sources else ():
        # It may have the name of a training source, but it has other rows.
        tables.append(RowTable(f"eval.{name}", (samples,), (_all_samples(samples, has_steps),)))
    return tables


def _all_samples(samples: Samples, are_read: bool) -> np.ndarray:
    """Return the numbers of all samples; empty if `are_read` is False."""
    return np.arange(len(samples) if are_read else 0)


def use_reference(tables: list[RowTable], logps: Logps) -> None:
    """Attach the log-probabilities to the rows of `tables` as the late column `reference`.

    Micro-batches then contain them.
    """
    for table in tables:
        for samples in table.samples:
            samples.pieces.rows.fill_column("reference", logps[table.name])


@dataclass(frozen=True)
class PassStats:
    """Counts and duration of a reference pass."""

    answers: int
    seconds: float
    positions: int  # of all batches, padding counted
    tokens: int  # of the samples

    def __str__(self) -> str:
        padding = self.positions / max(1, self.tokens)
        return (
            f"{self.answers:,} answers evaluated in {self.seconds:.1f} s, "
            f"{padding:.2f} positions a token"
        )


class _AnswersToEvaluate(Dataset):
    """A data set of the answers to evaluate; an item is an answer, or a pack of packed data."""

    def __init__(self, tables: list[RowTable], missing: dict[str, np.ndarray]) -> None:
        """Find what to evaluate; `missing`: bool [rows, 2], the answers without a value."""
        self.samples = [samples for table in tables for samples in table.samples]
        self.names = [table.name for table in tables for _ in table.samples]
        self.shape = self.samples[0].shape
        self.by_answer = self.shape.packing == "none"
        if self.by_answer:
            self.shape = self.shape.for_sides()
        items, lengths, answers = [np.zeros((0, 3), np.int64)], [np.zeros(0)], [np.zeros(0)]
        self.tokens = 0
        reads = [(table, *pair) for table in tables for pair in zip(table.samples, table.reads)]  # noqa: B905
        for number, (table, samples, read) in enumerate(reads):
            lacking = missing[table.name]
            if self.by_answer:
                rows = samples.first_rows(read)
                at, sides = np.nonzero(lacking[rows])
                chosen, length = read[at], table.rows.side_lengths(rows)[at, sides]
                answers.append(2 * rows[at] + sides)
                self.tokens += int(length.sum())
            else:
                packs = [n for n in read if lacking[samples.first_rows(np.array([n]))].any()]
                chosen, sides = np.array(packs, np.int64), np.full(len(packs), FILLER)
                length = np.full(len(packs), self.shape.sequence_length)
                self.tokens += sum(samples.tokens(n) for n in packs)
            items.append(np.stack([np.full(len(chosen), number), chosen, sides], 1))
            lengths.append(length)
        self.items = np.concatenate(items)
        self.lengths, self._answers = (
            np.concatenate(column).astype(np.int64) for column in (lengths, answers)
        )

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, item: int) -> Sample:
        if item == FILLER:
            return self.shape.sample([])
        number, index, side = self.items[item].tolist()
        samples = self.samples[number]
        if side == FILLER:
            return samples[index]
        return self.shape.sample([samples.pieces[index].sides()[side]])

    def locate_answers(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the answers in the given items; a pack holds both answers of several rows.

        Returns:
            For each answer the index of its samples in `self.samples`, and 2 * row + side.
        """
        owners = self.items[items, 0]
        if self.by_answer:
            return owners, self._answers[items]
        rows = [self.samples[n].first_rows(np.array([i])) for n, i, _ in self.items[items].tolist()]
        counts = [2 * len(of_pack) for of_pack in rows]
        every = np.concatenate([np.zeros(0, np.int64), *rows])
        return np.repeat(owners, counts), (2 * every[:, None] + np.arange(2)).reshape(-1)

    def plan_rounds(self, size: int, world_size: int) -> np.ndarray:
        """Divide the items into batches, one batch per rank in each round.

        The longest items come first, so that a lack of memory shows at once.

        Args:
            size: number of samples in a micro-batch.
            world_size: number of ranks that read different samples.

        Returns:
            Indices of items, int64 [rounds, ranks, items of a batch]; `FILLER` completes the last.
        """
        if self.by_answer:
            size *= 2  # a micro-batch of pairs has both sides as rows
        order = np.argsort(-self.lengths, kind="stable")
        batches = eval_batches(order, size * world_size, 0, 1)
        return np.array(batches, np.int64).reshape(-1, world_size, size)

    def count_positions(self, rounds: np.ndarray) -> int:
        """Count the token positions of all batches of `plan_rounds`, padding included."""
        of_filler = 1 if self.by_answer else self.shape.sequence_length
        longest = np.append(self.lengths, of_filler)[rounds].max(-1)
        if self.by_answer:
            rounded = np.minimum(-(-longest // MULTIPLE) * MULTIPLE, self.shape.sequence_length)
            longest = np.maximum(longest, rounded)
        return int(longest.sum()) * rounds.shape[-1]


@torch.no_grad()
def evaluate_answers(
    sharded: Sharded,
    data: TrainingData,
    tables: list[RowTable],
    missing: dict[str, np.ndarray],
    keep: Callable[[Part], None],
) -> PassStats:
    """Compute the reference log-probabilities of missing answers, one forward each. Collective.

    The host waits for the device once per part of about a minute. Logs its progress.

    Args:
        sharded: the model that training starts from.
        data: the data of the run.
        tables: the rows of every source.
        missing: name of a table -> bool [rows, 2], the answers to evaluate.
        keep: called with the values of each part, the same on every rank.

    Returns:
        Counts and duration of the pass.

    Raises:
        TrainingError: a log-probability is not finite. It is raised on every rank and names the
            row.
    """
    begun, run, model = time.monotonic(), data.run, sharded.model
    work = _AnswersToEvaluate(tables, missing)
    size = data.cfg.train.per_device_eval_batch_size or data.cfg.train.micro_batch
    rounds = work.plan_rounds(size, run.world_size)
    batches = iter(run.loader(work, rounds[:, run.rank].tolist(), collate_fn=work.shape.batch))
    evaluated, position, count, logged = 0, 0, FIRST_ROUNDS, begun
    training = model.training
    model.eval()
    try:
        while position < len(rounds):
            part_begun, sums = time.monotonic(), []
            of_part = rounds[position : position + count]
            for batch in islice(batches, len(of_part)):
                watchdog.report_progress()
                sums.append(sequence_logps(model, batch)[0][:-1])
                position += 1
                if time.monotonic() - logged > _LOG_SECONDS:
                    ranks.log_once(f"reference  batch {position:,} of {len(rounds):,}")
                    logged = time.monotonic()
            part = _gather_part(sharded, data, work, of_part, torch.cat(sums))
            evaluated += sum(len(answers) for answers, _ in part.values())
            keep(part)
            seconds = max(1e-3, ranks.broadcast(time.monotonic() - part_begun))
            count = max(1, min(_MAX_GROWTH * count, math.floor(count * PART_SECONDS / seconds)))
    finally:
        model.train(training)
        reshard(model)
    seconds = time.monotonic() - begun
    return PassStats(evaluated, seconds, work.count_positions(rounds), work.tokens)


def _gather_part(
    sharded: Sharded,
    data: TrainingData,
    work: _AnswersToEvaluate,
    rounds: np.ndarray,
    local: torch.Tensor,
) -> Part:
    """Gather the log-probabilities of some rounds from all ranks. Collective.

    Costs one all-reduce and one wait for the device. The values of ranks that share rows, which
    have a part of each sum, are added.

    Args:
        sharded: the model, with the mesh of its ranks.
        data: the data of the run.
        work: the answers to evaluate.
        rounds: the rounds of this part (`plan_rounds`).
        local: the log-probabilities of this rank's answers, or of its part of their tokens.

    Raises:
        TrainingError: a value is not finite, or the number of values is wrong.
    """
    by_rank = rounds.transpose(1, 0, 2).reshape(rounds.shape[1], -1)
    layouts = [work.locate_answers(items[items != FILLER]) for items in by_rank]
    counts = [len(answers) for _, answers in layouts]
    first, rank = sum(counts[: data.run.rank]), data.run.rank
    if len(local) != counts[rank]:
        raise TrainingError(
            f"expected the log-probabilities of {counts[rank]} answers in a part of the "
            f"reference, got {len(local)}"
        )
    every = torch.zeros(sum(counts), dtype=torch.float32, device=data.run.device)
    every[first : first + len(local)] = local
    values = sharded.mesh.loss.sum(every).cpu().numpy()
    owners, answers = (np.concatenate(column) for column in zip(*layouts, strict=True))
    part = {}
    for name in dict.fromkeys(work.names):
        here = np.isin(owners, [n for n, owner in enumerate(work.names) if owner == name])
        if here.any():
            part[name] = answers[here], values[here]
            _check_finite(name, *part[name])
    return part


def _check_finite(name: str, answers: np.ndarray, logps: np.ndarray) -> None:
    """Raise a `TrainingError` on every rank if a value is not finite.

    Args:
        name: name of the table, for the message.
        answers: 2 * row + side of each answer.
        logps: the log-probabilities, the same on every rank.
    """
    wrong = answers[~np.isfinite(logps)]
    if len(wrong):
        row, side = divmod(int(wrong[0]), 2)
        raise ranks.mark_collective(
            TrainingError(
                f"the reference of {len(wrong)} answer(s) is not finite (first: row {row} of "
                f"{name}, {('first', 'second')[side]} answer): expected numbers from the model "
                "that training starts from. Check its weights, or compute in another "
                "sharding.param_dtype"
            )
        )
