"""The reference of preference tuning: read from a checkpoint, or computed before the first step.

[Note: life of the reference] A pass before the first step evaluates the answers that the run reads
(`toolkit.objectives.reference_pass`). It writes its values in parts, fsynced, next to the
checkpoints, so that a preemption loses at most one part. A restart, on any number of ranks,
continues with the parts that belong to the same model and rows. From then on every checkpoint holds
all values in one file, which is listed in its manifest. So a save commits it, `verify` and each
resume hash it, retention, copies and moves include it, and damage to it is damage to the
checkpoint. After the first commit the parts are deleted.

[Note: origin of the reference] The values depend on the parameters and buffers that training starts
from, the config of the model, the compute dtype, the packing, and the tokens of the rows. Digests
of all of them are stored with the values. The digest of the model consists of sums of the bits of
its tensors, which are the same for any number of ranks. It differs for another seed, other adapters
or a resized embedding. A start before the first checkpoint uses the values with its own origin and
evaluates the rest. A resumed run has a trained model. If it reads more rows than before, the model
of the first step is built again and proven by its digest. It evaluates these rows, and then gets
the values of the checkpoint.

[Note: another reference] With `preference.reference`, a second model evaluates the answers
(`toolkit.objectives.reference_model`). Its digests take the place of those of the model that
training starts from. A start without a checkpoint loads it, and a resumed run only if values are
missing. It is deleted after the pass.
"""

import gc
import json
from typing import Any

import numpy as np
import xxhash
from torch import nn

from toolkit import ranks
from toolkit.adapters.base import base_digest
from toolkit.checkpoint.reference_file import (
    BYTES_PER_ROW,
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
from toolkit.checkpoint.resuming import NOT_ARCHITECTURE
from toolkit.checkpoint.shards import names_to_write
from toolkit.checkpoint.store import Folder
from toolkit.config.preference import PreferConfig
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.data.prepare import TrainingData
from toolkit.errors import CheckpointError
from toolkit.formats import assets_of
from toolkit.formats.bit_sums import part_sums, wrap_to_int64
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.models.peft_model import base_of
from toolkit.models.quantise import quantisation_settings
from toolkit.objectives.reference_model import load_reference, reference_digest
from toolkit.objectives.reference_pass import (
    Logps,
    Part,
    RowTable,
    evaluate_answers,
    row_tables,
    use_reference,
)
from toolkit.sharding.fsdp import Sharded
from toolkit.training.train_state import StateFile


class Reference:
    """The reference log-probabilities of a preference run: those of the model that it starts from.

    See [Note: life of the reference]. If the loss needs no reference, this class does nothing. If
    the rows are streamed, no values are stored; each batch is evaluated with the adapters off.
    """

    def __init__(
        self,
        cfg: PreferConfig,
        model: nn.Module,
        data: TrainingData,
        root: Folder,
        saved: Folder | None,
    ) -> None:
        """Read the values of the checkpoint that the run resumes from. Collective.

        Call it before weights are read, so that a refusal costs no time.

        Args:
            cfg: settings of the run.
            model: on meta or not; its assets name the base model.
            data: its position is that of the checkpoint.
            root: the folder that holds the run's checkpoints (`RunFolder.root`).
            saved: the checkpoint to resume from (`find_resumable`); None if there is none.

        Raises:
            CheckpointError: the checkpoint holds no reference, or one for other rows, another base
                model, or other settings that change the values.
        """
        self.cfg, self.data, self.root, self.saved = cfg, data, root, saved
        self.files: dict[str, StateFile] = {}
        """For `TrainState.files`, once the values are complete; on rank 0."""
        self.tables: list[RowTable] = []
        self._origin: Origin = {}
        self._logps: Logps = {}
        self._next_part = 1
        self._is_needed = cfg.preference.needs_reference
        if not self._is_needed or not isinstance(data.feed, PreparedFeed):
            return
        self.tables = ranks.on_all(lambda: row_tables(data))
        self._origin = ranks.on_main(lambda: _describe_origin(cfg, model, self.tables, data))
        self._logps = {
            table.name: np.full((len(table.rows), 2), np.nan, np.float32) for table in self.tables
        }
        if saved is not None:
            # Only rank 0 reads the file, because hosts may not share a disk.
            origin, values = ranks.on_main(lambda: self._read_checkpoint(saved))
            self._origin["model"] = origin.get("model")
            _insert_values(self._logps, values)

    @property
    def is_complete(self) -> bool:
        """Whether all rows that the run still reads have reference values.

        If not, `complete` computes them and needs the model that training starts from.
        """
        return not any(mask.any() for mask in self._missing_answers().values())

    def complete(self, sharded: Sharded) -> str:
        """Compute the missing reference values, and attach all values to the rows. Collective.

        Call it before a checkpoint is restored: if `is_complete` is False and the run has no
        `preference.reference`, `sharded` must be the model that training starts from. See
        [Note: origin of the reference]. Values are written to
        parts next to the checkpoints while they are computed. At the end, rank 0 sets `files`.

        Returns:
            A line for the log; empty if the loss needs no reference.

        Raises:
            CheckpointError: a resumed run lacks values and started from another model; or a part
                cannot be written.
            TrainingError: a value is not finite.
        """
        if not self._is_needed:
            return ""
        if not self.tables:
            return "reference  the base, with adapters off: one more forward of each batch"
        lines = [f"read from {self.saved / FILE}"] if self.saved is not None else []
        if self.saved is None or not self.is_complete:
            lines += self._compute(sharded)
        if not self.files and ranks.rank() == 0:
            values = {name: _finite_values(logps) for name, logps in self._logps.items()}
            self.files = {FILE: StateFile.of(encode(self._origin, values))}
        use_reference(self.tables, self._logps)
        read = sum(int(table.rows_read.sum()) for table in self.tables)
        total = sum(len(table.rows) for table in self.tables)
        title = self.data.row_format.title
        return f"reference  {read:,} of {total:,} {title}: {'; '.join(lines) or 'none is read'}"

    def _compute(self, sharded: Sharded) -> list[str]:
        """Load the parts of an interrupted pass, compute what is missing; return log lines.

        Collective.
        """
        name = self.cfg.preference.reference
        if name is not None:
            has_borders = self.data.choice.mask is None
            sharded = load_reference(self.cfg, sharded.mesh, has_borders=has_borders)
        lines = self._load_parts(sharded)
        if not self.is_complete:
            lines.append(self._evaluate_missing(sharded))
        if name is not None:
            lines.append(f"by {name}")
            del sharded
            gc.collect()  # modules and hooks refer to each other
        return lines

    def _read_checkpoint(self, saved: Folder) -> tuple[Origin, Values]:
        """Read the origin and the values of the reference in a checkpoint, and set `files`.

        The origin is a JSON object that names everything on which the values depend.

        Raises:
            CheckpointError: the file is missing or damaged, or has the values of another run.
        """
        origin, values, stored_file = read_saved_values(saved)
        file = saved / FILE
        self._refuse_other_origin(file, origin)
        shapes = {table.name: len(table.rows) for table in self.tables}
        values = {name: pair for name, pair in values.items() if name in shapes}
        for name, (answers, _) in values.items():
            if (answers >= 2 * shapes[name]).any():
                raise CheckpointError(f"{file} has values of rows that {name} has not")
        self.files = {FILE: stored_file}
        return origin, values

    def _refuse_other_origin(self, file: Folder, origin: Origin) -> None:
        """Raise a `CheckpointError` if values have another origin than those of this run.

        Args:
            file: the file of the values, for the message.
            origin: the origin in the file: rows, base model, dtype and packing.
        """
        now, advice = self._origin, "or start in another output_dir"
        rows = origin.get("rows")
        before = rows if isinstance(rows, dict) else {}
        changed = [n for n, digest in now["rows"].items() if before.get(n, digest) != digest]
        if changed:
            raise CheckpointError(
                f"{file} is of other rows than this run has ({', '.join(changed)}): give the data "
                f"that it began with, {advice}"
            )
        if origin.get("base") != now["base"]:
            setting = (
                "preference.reference" if self.cfg.preference.reference else "model.name_or_path"
            )
            raise CheckpointError(
                f"{file} is of another {'reference' if self.cfg.preference.reference else 'base'} "
                f"than this run has: give the {setting} that it began with, {advice}"
            )
        names = {"dtype": "sharding.param_dtype", "packing": "data.packing"}
        for key, setting in names.items():
            if origin.get(key) != now[key]:
                raise CheckpointError(
                    f"{file} was computed with {setting} {origin.get(key)}, this run has "
                    f"{now[key]}: set it as it was, {advice}"
                )

    def _missing_answers(self) -> dict[str, np.ndarray]:
        """Find the answers that the run reads and that have no value yet.

        Returns:
            Name of each table -> mask, bool [rows, 2].
        """
        return {
            table.name: np.isnan(self._logps[table.name]) & table.rows_read[:, None]
            for table in self.tables
        }

    def _load_parts(self, sharded: Sharded) -> list[str]:
        """Load the values that an interrupted pass wrote, if they belong to this model. Collective.

        Returns:
            Log lines.

        Raises:
            CheckpointError: this is a resumed run that started from another model.
        """
        digest = model_digest(sharded.model)
        if self.saved is not None and digest != self._origin["model"]:
            raise ranks.mark_collective(CheckpointError(self._changed_start_message(self.saved)))
        self._origin["model"] = digest
        usable, warnings = ranks.on_main(self._select_parts)
        ranks.log_once(*warnings)
        for values in usable:
            _insert_values(self._logps, values)
            self.files = {}  # with more values than a checkpoint's
        count = sum(len(answers) for values in usable for answers, _ in values.values())
        return [f"{count:,} answers read from {self.root / PARTS}"] if usable else []

    def _changed_start_message(self, saved: Folder) -> str:
        """Format the error for a run that reads new rows but no longer has its first model."""
        counts = {"train": 0, "eval": 0}
        for table in self.tables:
            lacking = np.asarray(self._missing_answers()[table.name]).max(1)
            for number, (samples, read) in enumerate(zip(table.samples, table.reads, strict=True)):
                kind = "train" if number == 0 and table.name.startswith("train.") else "eval"
                counts[kind] += int(lacking[samples.first_rows(read)].sum())
        settings = {"train": "train.max_steps", "eval": "data.max_eval_samples"}
        rows = [
            f"{n:,} rows to {'train' if kind == 'train' else 'evaluate'} on ({settings[kind]})"
            for kind, n in counts.items()
            if n
        ]
        if self.cfg.preference.reference is not None:
            return (
                f"{saved / FILE} has no values of {' and '.join(rows)}, and preference.reference "
                f"{self.cfg.preference.reference} is another model than before: its tensors have "
                "other bits. Give the one that the run began with, or these settings as they were, "
                "or start in another output_dir"
            )
        return (
            f"{saved / FILE} has no values of {' and '.join(rows)}, and this start does not build "
            "the model that the run started from: its tensors have other bits. Give the model, "
            "adapter and seed that it began with, or these settings as they were, or start in "
            "another output_dir"
        )

    def _select_parts(self) -> tuple[list[Values], list[str]]:
        """Read the parts on disk; keep those of this model and these rows, and delete the others.

        Returns:
            The values of each kept part, and warnings about the deleted parts.
        """
        parts, folder = read_parts(self.root), self.root / PARTS
        self._next_part = parts.highest + 1
        usable, unusable = [], []
        for name, (origin, values) in parts.intact.items():
            rows = origin.get("rows", {})
            same_rows = {n: v for n, v in values.items() if rows.get(n) == self._row_digest(n)}
            same_model = {**origin, "rows": None} == {**self._origin, "rows": None}
            if same_model and same_rows:
                usable.append(same_rows)
            else:
                unusable.append(name)
        warnings = [
            f"WARNING: {folder / name} is damaged; its rows are evaluated again"
            for name in parts.damaged
        ]
        if unusable:
            warnings.append(
                f"NOTE: {len(unusable)} part(s) of the reference in {folder} are of another model, "
                "other rows or another dtype; they are deleted and not used"
            )
        for name in (*parts.damaged, *unusable):
            delete_part(self.root, name)
        return usable, warnings

    def _row_digest(self, name: str) -> str:
        """Return the digest of the rows of table `name`; "" if there is no such table."""
        return self._origin["rows"].get(name, "")

    def _evaluate_missing(self, sharded: Sharded) -> str:
        """Compute the missing values, writing each part to disk; return a log line. Collective."""

        def keep(part: Part) -> None:
            def write() -> None:
                write_part(self.root, self._next_part, self._origin, part)
                self._next_part += 1

            ranks.on_main(write)
            _insert_values(self._logps, part)

        evaluation = evaluate_answers(
            sharded, self.data, self.tables, self._missing_answers(), keep
        )
        self.files = {}
        is_start = self.cfg.preference.reference is None
        where = "before the first step" if self.saved is None else "for rows that are new"
        where = "by the model of the first step" if self.saved is not None and is_start else where
        return f"{evaluation}, {where}; each checkpoint holds them"


def reference_bytes(cfg: Any, data: TrainingData) -> int:
    """Estimate an upper limit of the bytes of a checkpoint's reference file; 0 without one."""
    needs = isinstance(cfg, PreferConfig) and cfg.preference.needs_reference
    if not needs or not isinstance(data.feed, PreparedFeed):
        return 0
    feed = data.feed
    sources = [*feed.sources, *feed.eval_sources]
    return BYTES_PER_ROW * sum(len(source.tokens) for source in sources) + 4096


def model_digest(model: nn.Module) -> str:
    """Compute a digest of a model's parameters, buffers and config. Collective.

    The digest is the same for any number of ranks. Costs one pass over the bytes on the device, and
    an exchange of 8 bytes per tensor.
    """
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = sorted(tensors)
    here = names_to_write(tensors)

    def sums() -> list[int]:
        return [
            int(part_sums(tensors[n])[1]) if n in here and is_sharded_by_rows(tensors[n]) else 0
            for n in names
        ]

    totals = ranks.sum_over_ranks(ranks.on_all(sums)) or [0] * len(names)
    content = xxhash.xxh3_128()
    for name, total in zip(names, totals, strict=True):
        tensor = tensors[name]
        content.update(
            f"{name} {tensor.dtype} {list(tensor.shape)} {wrap_to_int64(total)}\n".encode()
        )
    config = base_of(model).config.to_dict()
    computed = {key: value for key, value in config.items() if key not in NOT_ARCHITECTURE}
    content.update(json.dumps(computed, sort_keys=True, default=str).encode())
    content.update(json.dumps(quantisation_settings(model), sort_keys=True, default=str).encode())
    return ranks.broadcast(content.hexdigest())


def _describe_origin(
    cfg: PreferConfig, model: nn.Module, tables: list[RowTable], data: TrainingData
) -> Origin:
    """List everything on which the reference values depend, except the digest of the model.

    Computes digests of the rows and of the base model.

    Returns:
        A JSON object with rows, base, dtype, packing and sequence_length.
    """
    assets, shape = assets_of(model), data.feed.shape
    base = "random"
    if cfg.model.init != "random" and assets.folder is not None:
        base = base_digest(assets.folder, assets.name_or_path, assets.revision)
    if cfg.preference.reference is not None:
        base = reference_digest(cfg, base)
    return {
        "rows": {table.name: table.digest() for table in tables},
        "base": base,
        "dtype": cfg.sharding.param_dtype,
        "packing": shape.packing,
        "sequence_length": shape.sequence_length,
    }


def _finite_values(logps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Select the finite log-probabilities from an array [rows, 2].

    Returns:
        The indices 2 * row + side of the answers, int64, and their values.
    """
    flat = logps.reshape(-1)
    answers = np.flatnonzero(np.isfinite(flat))
    return answers.astype(np.int64), flat[answers]


def _insert_values(logps: Logps, values: Values) -> None:
    """Write values into `logps` in place, only for answers that have no value yet (NaN).

    Tables that `logps` does not have are ignored.
    """
    for name, (answers, new) in values.items():
        if name in logps:
            flat = logps[name].reshape(-1)
            flat[answers] = np.where(np.isnan(flat[answers]), new, flat[answers])
