"""Stored values of a teacher: its most likely tokens at each supervised position.

They share the life of the reference of preference tuning ([Note: life of the reference] in
`objectives/reference.py`): a pass before the first step writes parts, fsynced, next to the
checkpoints, and a restart on any number of ranks continues it. Then every checkpoint holds all
values in one file that its manifest lists, so that `verify` and each resume check it. The parts are
deleted after the first commit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.checkpoint.reference_file import (
    FILE,
    PARTS,
    Origin,
    Values,
    delete_part,
    encode,
    read_parts,
    read_saved_values,
    write_part,
)
from toolkit.checkpoint.store import Folder
from toolkit.config.distill import DistillConfig
from toolkit.data.order.position import eval_batches
from toolkit.data.prepare import TrainingData
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.sample_shape import FILLER, Samples
from toolkit.errors import CheckpointError, TrainingError
from toolkit.formats import assets_of
from toolkit.models import build_on_meta
from toolkit.objectives.reference_pass import (
    FIRST_ROUNDS,
    PART_SECONDS,
    RowTable,
    row_tables,
)
from toolkit.sharding import Sharded
from toolkit.training.distillation import evaluate_teacher
from toolkit.training.guards import watchdog
from toolkit.training.head_divergence import Divergence
from toolkit.training.train_state import StateFile

BYTES_PER_VALUE = 4
_PART_BYTES = 2**28  # of a part on the device
_LOG_SECONDS = 30.0  # between two lines about the progress


class TeacherValues:
    """The stored log-probabilities of the teacher for the rows that a run reads.

    Args:
        cfg: settings of the run, with `distill.stored`.
        width: number of tokens of the vocabulary that the distributions cover.
        data: its position is that of the checkpoint.
        root: the folder that holds the run's checkpoints.
        saved: the checkpoint to resume from; None if there is none.

    Raises:
        CheckpointError: the checkpoint has no values, or values of other rows, of another teacher
            or of other settings.
    """

    def __init__(
        self,
        cfg: DistillConfig,
        width: int,
        data: TrainingData,
        root: Folder,
        saved: Folder | None,
    ) -> None:
        assert cfg.distill.top_k is not None
        self.files: dict[str, StateFile] = {}
        """For `TrainState.files`, once the values are complete; on rank 0."""
        self._k, self._root, self._data, self._next_part = cfg.distill.top_k, root, data, 1
        self._width = width
        self._tables = ranks.on_all(lambda: row_tables(data))
        self._origin = ranks.on_main(lambda: _describe_origin(cfg, width, self._tables, data))
        masks = ranks.on_all(lambda: {t.name: _find_positions(t) for t in self._tables})
        self._predicting = {name: predicting for name, (predicting, _) in masks.items()}
        self._needed = {name: needed for name, (_, needed) in masks.items()}
        # A row of a table: top-k ids, then k + 1 log-probabilities. Pages that are never written
        # take no memory.
        self._known = {name: np.zeros(len(mask), bool) for name, mask in self._needed.items()}
        width = 2 * self._k + 1
        self._values = {n: np.zeros((len(m), width), np.float32) for n, m in self._needed.items()}
        if saved is not None:
            origin, values, file = ranks.on_main(lambda: read_saved_values(saved))
            self._refuse_other_origin(saved / FILE, origin)
            self._insert(values)
            self.files = {FILE: file} if ranks.rank() == 0 else {}

    @property
    def is_complete(self) -> bool:
        """Whether the teacher need not be evaluated."""
        return not any(mask.any() for mask in self._missing().values())

    def load_parts(self) -> str:
        """Read the parts of an interrupted pass, and delete those of other runs. Collective.

        Returns:
            A line for the log; empty if there are no parts of this run.
        """
        usable, warnings = ranks.on_main(self._select_parts)
        ranks.log_once(*warnings)
        for values in usable:
            self._insert(values)
            self.files = {}
        count = sum(len(positions) for values in usable for positions, _ in values.values())
        return f"{count:,} positions read from {self._root / PARTS}" if usable else ""

    def complete(self, teacher: Sharded, divergence: Divergence) -> str:
        """Evaluate the teacher on the samples that lack values. Collective.

        Args:
            teacher: the sharded teacher with its weights.
            divergence: the loss of a token.

        Returns:
            A line for the log.

        Raises:
            CheckpointError: a part cannot be written.
            TrainingError: a value is not finite.
        """
        begun, count = time.monotonic(), 0

        def keep(values: Values) -> None:
            nonlocal count

            def write() -> None:
                write_part(self._root, self._next_part, self._origin, values)
                self._next_part += 1

            ranks.on_main(write)
            self._insert(values)
            count += sum(len(positions) for positions, _ in values.values())

        missing = self._missing()
        for table in self._tables:
            for samples, read in zip(table.samples, table.reads, strict=True):
                tokens, mask = _TokenMap(samples), missing[table.name]
                lacking = [n for n in np.unique(read).tolist() if tokens.has_any(n, mask)]
                teacher_pass = _TeacherPass(teacher, self._data, divergence, self._width)
                teacher_pass.run(table.name, samples, np.array(lacking, np.int64), keep)
        self.files = {}
        return f"{count:,} positions evaluated in {time.monotonic() - begun:.1f} s"

    def attach(self) -> None:
        """Attach the values to the rows, so that micro-batches contain them; set `files`."""
        if not self.files and ranks.rank() == 0:
            self.files = {FILE: StateFile.of(encode(self._origin, self._all_values()))}
        for table in self._tables:
            name, k = table.name, self._k
            values, has_value = self._values[name], self._known[name]
            # A micro-batch that reads a missing value must fail.
            values[self._predicting[name] & ~has_value, -1] = np.nan
            ids = np.zeros((len(has_value), k), np.int32)
            ids[has_value] = values[has_value, :k]
            for samples in table.samples:
                rows = samples.pieces.rows
                rows.fill_column("teacher_ids", ids)
                rows.fill_column("teacher_logps", values[:, k:])

    def _missing(self) -> dict[str, np.ndarray]:
        """Find the positions without a value that the run needs; bool [tokens] of each table."""
        return {name: mask & ~self._known[name] for name, mask in self._needed.items()}

    def _insert(self, values: Values) -> None:
        """Store values of positions, of the tables that this run has."""
        for name, (positions, rows) in values.items():
            if name in self._values:
                self._values[name][positions] = rows
                self._known[name][positions] = True

    def _all_values(self) -> Values:
        """Return the known values of every table."""
        positions = {name: np.flatnonzero(mask) for name, mask in self._known.items()}
        return {name: (where, self._values[name][where]) for name, where in positions.items()}

    def _select_parts(self) -> tuple[list[Values], list[str]]:
        """Read the parts on disk, and delete those that are damaged or of another origin."""
        parts, folder = read_parts(self._root), self._root / PARTS
        self._next_part = parts.highest + 1
        usable = [values for origin, values in parts.intact.values() if origin == self._origin]
        unusable = [name for name, (origin, _) in parts.intact.items() if origin != self._origin]
        warnings = [
            f"WARNING: {folder / name} is damaged; its positions are evaluated again"
            for name in parts.damaged
        ]
        if unusable:
            warnings.append(
                f"NOTE: {len(unusable)} part(s) of the teacher's values in {folder} are of another "
                "teacher, other rows or other settings; they are deleted and not used"
            )
        for name in (*parts.damaged, *unusable):
            delete_part(self._root, name)
        return usable, warnings

    def _refuse_other_origin(self, file: Folder, origin: Origin) -> None:
        """Raise a `CheckpointError` if stored values depend on something else than this run's."""
        changed = [key for key, value in self._origin.items() if origin.get(key) != value]
        if changed:
            raise ranks.mark_collective(
                CheckpointError(
                    f"{file} has values of a teacher with other {', '.join(changed)} than this "
                    "run: expected those that the run began with; restore them, or start in "
                    "another output_dir"
                )
            )


class _TeacherPass:
    """Evaluates the teacher on samples, part by part of about a minute."""

    def __init__(
        self, teacher: Sharded, data: TrainingData, divergence: Divergence, width: int
    ) -> None:
        self._teacher, self._data = teacher, data
        self._divergence, self._width = divergence, width

    def run(
        self, name: str, samples: Samples, numbers: np.ndarray, keep: Callable[[Values], None]
    ) -> None:
        """Evaluate some samples of a table, and call `keep` with each part. Collective.

        Args:
            name: name of the table.
            samples: the samples of the table.
            numbers: the samples to evaluate.
            keep: called with the values of each part, the same on every rank.
        """
        run, cfg = self._data.run, self._data.cfg
        size = cfg.train.per_device_eval_batch_size or cfg.train.micro_batch
        batches = eval_batches(numbers, size * run.world_size, 0, 1)
        rounds = np.array(batches, np.int64).reshape(-1, run.world_size, size)
        of_rank = rounds[:, run.rank].tolist()
        tokens = _TokenMap(samples)
        loader = iter(run.loader(samples, of_rank, collate_fn=samples.shape.batch))
        positions = size * run.world_size * cfg.data.sequence_length
        most = count_rounds_in_memory(self._width_of_values, positions)
        position, count, logged = 0, min(FIRST_ROUNDS, most), time.monotonic()
        while position < len(rounds):
            begun = time.monotonic()
            rows = [np.zeros((0, 2 * self._width_of_values + 2))]
            for indices in of_rank[position : position + count]:
                watchdog.report_progress()
                rows.append(self._evaluate(tokens, indices, next(loader)))
            position += count
            values = self._gather(np.concatenate(rows))
            if not np.isfinite(values).all():
                wrong = int(values[~np.isfinite(values).all(1), 0][0])
                raise ranks.mark_collective(
                    TrainingError(
                        f"the teacher's probabilities of token {wrong:,} of {name} are not finite: "
                        "expected numbers. Check the teacher's weights, or compute in another "
                        "sharding.param_dtype"
                    )
                )
            keep({name: (values[:, 0].astype(np.int64), values[:, 1:].astype(np.float32))})
            if time.monotonic() - logged > _LOG_SECONDS:
                ranks.log_once(
                    f"teacher    batch {min(position, len(rounds)):,} of {len(rounds):,}"
                )
                logged = time.monotonic()
            seconds = max(1e-3, ranks.broadcast(time.monotonic() - begun))
            in_time = max(1, math.floor(count * PART_SECONDS / seconds))
            count = min(most, FIRST_ROUNDS * count, in_time)

    @property
    def _width_of_values(self) -> int:
        """The number of stored tokens of a position."""
        assert self._divergence.top_k is not None
        return self._divergence.top_k

    def _evaluate(self, tokens: "_TokenMap", indices: list[int], batch: Any) -> np.ndarray:
        """Evaluate a micro-batch.

        Returns:
            float64 [positions, 1 + k + k + 1]: position in the table, ids, log-probabilities.
        """
        top = evaluate_teacher(self._teacher.model, batch, self._divergence, self._width)
        rows, width = batch.targets.shape
        context = self._teacher.mesh.context
        places = np.full((rows, width * context.size), FILLER, np.int64)
        for row, index in enumerate(indices):
            if index != FILLER:
                positions = tokens.positions(index)
                places[row, : len(positions)] = positions
        # With `context_parallel`, the batch has one part of every row.
        places = places[:, context.rank * width :][:, :width]
        supervised = (batch.targets != IGNORED).cpu().numpy()
        columns = [places[supervised][:, None], top.ids.cpu().numpy(), top.logps.cpu().numpy()]
        return np.concatenate(columns, 1)

    def _gather(self, local: np.ndarray) -> np.ndarray:
        """Concatenate the rows of all ranks, in rank order. Collective."""
        device, view = self._data.run.device, self._teacher.mesh.loss
        counts = torch.zeros(view.size, dtype=torch.float64, device=device)
        counts[view.rank] = len(local)
        numbers = view.sum(counts).long().tolist()
        first = sum(numbers[: view.rank])
        every = torch.zeros(sum(numbers), local.shape[1], dtype=torch.float64, device=device)
        every[first : first + len(local)] = torch.from_numpy(local).to(device)
        return view.sum(every).cpu().numpy()


def count_rounds_in_memory(top_k: int, positions: int) -> int:
    """Count the batches of all ranks that a part may have, so that its values take about 256 MB.

    Args:
        top_k: number of stored tokens of a position.
        positions: positions in the batches of all ranks together.

    Returns:
        The number; at least 1, even if that takes more.
    """
    return max(1, _PART_BYTES // (8 * (2 * top_k + 2) * positions))


def teacher_values_bytes(cfg: DistillConfig, data: TrainingData) -> int:
    """Estimate an upper limit of the bytes of stored values in each checkpoint."""
    assert cfg.distill.top_k is not None
    feed: Any = data.feed
    counts = [source.counts for source in (*feed.sources, *feed.eval_sources)]
    positions = sum(count.supervised for count in counts)
    if feed.shape.packing == "wrapped":
        # The last token of a row predicts the first one of the next row, which is not counted.
        positions += sum(count.kept for count in counts)
    return 4096 + positions * (8 + BYTES_PER_VALUE * (2 * cfg.distill.top_k + 1))


class _TokenMap:
    """Finds the tokens of samples among all tokens of a table's rows."""

    def __init__(self, samples: Samples) -> None:
        self._plan = samples.plan
        self._begins = np.asarray(samples.pieces.begins, np.int64)
        self.ends = self._begins + np.asarray(samples.pieces.lengths, np.int64)
        """Position after the last token of each piece."""

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """Return (begin, end) of each piece of a sample; the end is excluded."""
        numbers = np.array([index]) if self._plan is None else self._plan.bin(index)
        return [*zip(self._begins[numbers].tolist(), self.ends[numbers].tolist(), strict=True)]

    def positions(self, index: int) -> np.ndarray:
        """Return the position of each token of a sample; int64."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.pieces(index)])

    def has_any(self, index: int, mask: np.ndarray) -> bool:
        """Return True if `mask` [tokens of all rows] is True at a token of a sample."""
        return any(mask[begin:end].any() for begin, end in self.pieces(index))


def _find_positions(table: RowTable) -> tuple[np.ndarray, np.ndarray]:
    """Find the positions that predict a supervised token.

    Returns:
        Masks [tokens of all rows]: these positions in all samples, and in those that the run reads.
    """
    rows = table.rows
    labels = [rows.labels(row) for row in range(len(rows))]
    is_supervised = np.concatenate([np.zeros(0, np.int64), *labels]) != IGNORED
    predicting = np.append(is_supervised[1:], False)
    is_read = np.zeros(rows.total, bool)
    for samples, read in zip(table.samples, table.reads, strict=True):
        tokens = _TokenMap(samples)
        # Nothing predicts the first token of a piece.
        predicting[tokens.ends - 1] = False
        for index in np.unique(read).tolist():
            for begin, end in tokens.pieces(index):
                is_read[begin:end] = True
    return predicting, predicting & is_read


def _describe_origin(
    cfg: DistillConfig, width: int, tables: list[RowTable], data: TrainingData
) -> Origin:
    """List everything on which the values depend, as JSON."""
    teacher = cfg.frozen_models["teacher"]
    model = build_on_meta(replace(teacher, dtype=teacher.dtype or "auto"))
    assets, shape = assets_of(model), data.feed.shape
    assert assets.folder is not None
    return {
        "rows": {table.name: table.digest() for table in tables},
        "teacher": base_digest(assets.folder, assets.name_or_path, assets.revision),
        "storage dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(model.config._attn_implementation),
        "number of tokens": width,
        "temperature": cfg.distill.temperature,
        "top_k": cfg.distill.top_k,
        "dtype": cfg.sharding.param_dtype,
        "packing": shape.packing,
        "sequence_length": shape.sequence_length,
    }
