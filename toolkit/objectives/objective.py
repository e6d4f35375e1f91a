"""The interface of an objective, and which objective the settings of a run ask for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config import measures
from toolkit.config.measures import LOSS, Metric
from toolkit.config.settings import ModelConfig, RunConfig, ShardingConfig
from toolkit.data.prepare import PackingChoice, TrainingData
from toolkit.data.row_formats import RowFormat, find_row_format
from toolkit.data.samples.batch import Batch
from toolkit.errors import ConfigError
from toolkit.loading import load_or_init
from toolkit.mesh import Mesh
from toolkit.models import build_on_meta
from toolkit.models.attention import attend_within_documents
from toolkit.models.dropout import disable_dropout
from toolkit.objectives.frozen_models import check_packed_rows
from toolkit.objectives.largest_batch import largest_batch
from toolkit.sharding import Sharded, apply_fsdp
from toolkit.training.loss import LossSum
from toolkit.training.train_state import StateFile


class Objective:
    """The training objective of a run: its loss, metrics, frozen models and checkpoint files.

    A subclass implements `__call__` and overrides other members as needed. By default the only
    metric is the loss, nothing is prepared, and the loss is a mean over supervised tokens. Register
    the subclass with `register`.

    A recipe calls, in this order:

    * `prepare_model` before the model is sharded;
    * `restore` once the checkpoint to resume from is known;
    * `prepare` once the model has its initial weights, before those of a checkpoint are loaded;
    * `counts` and the objective itself for each micro-batch; `evaluation_loss` in evaluations.

    Args:
        cfg: settings of the run.
        mesh: the ranks of the run; None if only members are used that do not need it, such as
            `metrics`.
        device_type: type of device whose implementation of the loss is used, such as "cuda"; None:
            that of the batch. Plans set it.
    """

    metrics: tuple[Metric, ...] = (LOSS,)
    """Metrics of an evaluation: the loss, and the parts of `evaluation_loss`. The perplexity is
    added for objectives that list it."""
    supports_context_parallel = False
    """Whether the loss may be computed on parts of rows (`sharding.context_parallel`): it is a sum
    over targets, or it adds up sums of parts itself ([Note: sequences in parts] in
    `training/row_parts.py`). A class that defines another `__call__` must set it again."""
    has_dropout = True
    """False: the model must be the same function in every forward, so dropout is switched off."""

    def __init__(self, cfg: Any, mesh: Mesh | None = None, device_type: str | None = None) -> None:
        self.cfg = cfg
        self.mesh = mesh
        self.device_type = device_type
        self.frozen: dict[str, Sharded] = {}
        """Role -> the frozen model, sharded; filled by `prepare`."""
        self.files: dict[str, StateFile] = {}
        """Files of every checkpoint, for `TrainState.files`; on rank 0."""
        self._has_borders = cfg.data.packing != "none" or cfg.sharding.context_parallel > 1

    @property
    def rows(self) -> RowFormat:
        """The row format, which says how rows become training targets (`RunConfig.rows`)."""
        return find_row_format(self.cfg.rows)

    # ---- Before the first step

    def check_models(self, model: PreTrainedModel, model_cfg: ModelConfig) -> str:
        """Refuse frozen models that do not fit the trained one; by default, all fit. Collective.

        Called before processes start, in rehearsals, and by a run before its data is prepared.
        Reads config.json and tokenizers only.

        Args:
            model: the trained model on meta, without adapters.
            model_cfg: its settings, with the tokenizer of the run.

        Returns:
            A line for the log; may be empty.

        Raises:
            ToolkitError: a frozen model does not fit.
        """
        return ""

    def check_packing(self, data: TrainingData) -> None:
        """Refuse frozen models that let documents of packed rows see each other. Collective.

        `assembly.check_before_loading` calls it.

        Raises:
            DataError: a frozen model does not suit the packing of the run.
        """
        self._has_borders = data.choice.mask is None
        for role, settings in self.models.items():
            check_packed_rows(role, settings, data)

    @property
    def models(self) -> Mapping[str, ModelConfig]:
        """Role, such as "teacher" -> settings of that frozen model. Excludes the trained model."""
        return self.cfg.frozen_models

    @property
    def needs_start(self) -> bool:
        """Whether a resumed run must build the initial weights again for `prepare`."""
        return False

    def prepare_model(self, model: nn.Module) -> None:
        """Change the model on meta before it is sharded, such as to disable dropout. Collective."""
        if not self.has_dropout:
            disable_dropout(model)

    def restore(self, model: nn.Module, data: TrainingData, root: Any, saved: Any) -> None:
        """Read the objective's files from a checkpoint; by default there are none. Collective.

        Args:
            model: the model before its weights are read.
            data: the data of the run, at the position of the checkpoint.
            root: the folder that holds the run's checkpoints (`RunFolder.root`).
            saved: the checkpoint to resume from (`find_resumable`); None for a new run.
        """

    def prepare(self, sharded: Sharded) -> str:
        """Prepare the first step: by default, build and load the frozen models. Collective.

        Args:
            sharded: the model with the weights that training starts from. In a resumed run with
                `needs_start` False, its weights have no values yet.

        Returns:
            A line for the log; empty if nothing was prepared.
        """
        if not self.models:
            return ""
        self.shard_models()
        assert self.mesh is not None
        device = torch.device(self.mesh.device_type)
        for role, frozen in self.frozen.items():
            load_or_init(frozen, self.models[role], device, self.cfg.seed)
        names = [f"{role} {cfg.name_or_path}" for role, cfg in self.models.items()]
        return f"frozen     {', '.join(names)}"

    def shard_models(self) -> None:
        """Build the frozen models on meta, and shard them over the ranks of the run into `frozen`.

        Their weights are not loaded.

        Raises:
            ModelError: rows are packed, and the attention of a frozen model cannot separate the
                documents of a row.
        """
        sharding = frozen_sharding(self.cfg.sharding)
        assert self.mesh is not None
        for role, cfg in self.models.items():
            model = build_on_meta(replace(cfg, dtype=cfg.dtype or "auto"))
            model.requires_grad_(False).eval()
            if self._has_borders:
                # Batches of packed rows tell documents apart by their borders, without a mask.
                attend_within_documents(model, self.mesh.context, planned_on=self.device_type)
            self.frozen[role] = apply_fsdp(model, self.mesh, sharding)

    def shard_temporary_models(self) -> list[Sharded]:
        """Build and shard on meta the models that exist only before the first step, for plans."""
        return []

    def file_bytes(self, data: TrainingData) -> int:
        """Estimate an upper limit of the bytes that `files` add to each checkpoint."""
        return 0

    # ---- In the loop

    def counts(self, batch: Batch) -> torch.Tensor:
        """Count the terms over which the loss of a micro-batch is averaged.

        Returns:
            int64, of the shape of `LossSum.count`; by default the number of targets.
        """
        return batch.trained.count

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of a micro-batch as a sum over its terms, such as tokens."""
        raise NotImplementedError

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of an evaluation micro-batch, with a value for each of `metrics`."""
        return self(model, batch)

    # ---- For plans

    def largest_batch(self, choice: PackingChoice) -> Batch:
        """Build the micro-batch that takes the most memory, on the host.

        Args:
            choice: packing of the run, and whether its batches have the borders of documents.
        """
        return largest_batch(self.cfg, choice.packing, borders=choice.mask is None)


def frozen_sharding(sharding: ShardingConfig) -> ShardingConfig:
    """Return the sharding settings of a frozen model: those of the trained one, for forward only.

    Settings with patterns of module names are dropped. Parameters are resharded after each forward,
    because a frozen model has no backward that would need them.
    """
    return ShardingConfig(
        dp_replicate=sharding.dp_replicate,
        dp_shard=sharding.dp_shard,
        param_dtype=sharding.param_dtype,
        reduce_dtype=sharding.reduce_dtype,
        cpu_offload=sharding.cpu_offload,
        frozen="sharded",
        reshard_after_forward=True,
        torch_compile="none",
    )


_ObjectiveClass = TypeVar("_ObjectiveClass", bound=type[Objective])
_CLASSES: dict[type[RunConfig], type[Objective]] = {}


def register(config: type[RunConfig]) -> Callable[[_ObjectiveClass], _ObjectiveClass]:
    """Register an objective for runs whose settings are of class `config`; a class decorator.

        @objectives.register(DistillConfig)
        class Distillation(objectives.Objective): ...

    A settings class without an objective uses that of its base class.
    """

    def add(objective: _ObjectiveClass) -> _ObjectiveClass:
        _CLASSES[config] = objective
        return objective

    return add


def objective_class(config: type[RunConfig]) -> type[Objective]:
    """Return the objective class that is registered for a settings class or its nearest base.

    Raises:
        ConfigError: neither has an objective.
    """
    for cls in config.__mro__:
        if cls in _CLASSES:
            return _CLASSES[cls]
    raise ConfigError(
        f"{config.__name__} has no objective: extend the settings of a kind that has one, or add "
        f"one with @objectives.register({config.__name__})"
    )


def _supports_context_parallel(cls: type[Objective]) -> bool:
    """Return True if the class that defines the loss, or one derived from it, supports it."""
    for base in cls.__mro__:
        if "supports_context_parallel" in vars(base):
            return bool(vars(base)["supports_context_parallel"])
        if "__call__" in vars(base):
            return False
    return False


def build(cfg: RunConfig, mesh: Mesh | None = None, device_type: str | None = None) -> Objective:
    """Build the objective of a run from its settings, and declare its metrics for logs.

    For the arguments see `Objective`.

    Raises:
        ConfigError: the objective does not support `sharding.context_parallel`.
    """
    cls, parts = objective_class(type(cfg)), cfg.sharding.context_parallel
    if parts > 1 and not _supports_context_parallel(cls):
        raise ConfigError(
            f"sharding.context_parallel {parts} divides rows among ranks, and the objective "
            f"{cls.__name__} of {cfg.kind_name()} runs does not say that its loss can be computed "
            "on parts of rows (`supports_context_parallel`). Set it to 1"
        )
    objective = cls(cfg, mesh, device_type)
    measures.register_metrics(objective.metrics)
    return objective
