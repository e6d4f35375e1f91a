"""The interface of an objective, and which objective the settings of a run ask for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from toolkit.config import measures
from toolkit.config.measures import LOSS, Metric
from toolkit.config.settings import ModelConfig, RunConfig, ShardingConfig
from toolkit.data.prepare import TrainingData
from toolkit.data.row_formats import RowFormat, find_row_format
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import Packing
from toolkit.errors import ConfigError
from toolkit.loading import load_or_init
from toolkit.mesh import Mesh
from toolkit.models import build_on_meta
from toolkit.models.attention import attend_within_documents
from toolkit.models.dropout import disable_dropout
from toolkit.objectives.largest_batch import largest_batch
from toolkit.sharding import Sharded, apply_fsdp
from toolkit.training.loss import LossSum
from toolkit.training.train_state import StateFile


class Objective:
    """The loss of a run, and everything that depends on it.

    A subclass implements `__call__` and overrides what differs from these defaults: the only metric
    is the loss, nothing has to be prepared, and a micro-batch counts by its supervised tokens. Add
    it to the objectives with `register`.

    The calls of a recipe, in this order:

    * `prepare_model` before the model is sharded;
    * `restore` once the checkpoint to resume from is known;
    * `prepare` once the model has its weights, before they are replaced by those of a checkpoint;
    * `counts` and the objective itself for each micro-batch; `evaluation_loss` in evaluations.

    Args:
        cfg: settings of the run.
        mesh: the processes of the run; None to look at what does not depend on them, such as
            `metrics`.
        device_type: the type of device whose loss head is used, such as "cuda"; None: that of the
            batch. Plans set it.
    """

    metrics: tuple[Metric, ...] = (LOSS,)
    """Metrics of an evaluation: the loss, and the parts of `evaluation_loss`. The perplexity is
    added for objectives that list it."""
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

    @property
    def rows(self) -> RowFormat:
        """How rows become training targets (`RunConfig.rows`)."""
        return find_row_format(self.cfg.rows)

    # ---- Before the first step

    @property
    def models(self) -> Mapping[str, ModelConfig]:
        """Frozen models next to the trained one, by role, such as "teacher"."""
        return self.cfg.frozen_models

    @property
    def needs_start(self) -> bool:
        """True if `prepare` needs the weights that training starts from, even in a resumed run."""
        return False

    def prepare_model(self, model: nn.Module) -> None:
        """Change the model on meta, before it is sharded. Collective."""
        if not self.has_dropout:
            disable_dropout(model)

    def restore(self, model: nn.Module, data: TrainingData, root: Any, saved: Any) -> None:
        """Read what a checkpoint holds for the objective. Collective.

        Args:
            model: the model before its weights are read.
            data: its position is that of the checkpoint.
            root: the folder that holds the run's checkpoints (`RunFolder.root`).
            saved: the checkpoint that the run resumes from (`find_resumable`); None if there is
                none.
        """

    def prepare(self, sharded: Sharded) -> str:
        """Compute or load what must exist before the first step, such as frozen models. Collective.

        Args:
            sharded: the model with the weights that training starts from, or of a resumed run
                without values if `needs_start` is False.

        Returns:
            A line for the log; empty if there is nothing to say.
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
        """Build the frozen models on meta and shard them over the ranks of the run.

        Raises:
            ModelError: rows are packed, and the attention of a frozen model cannot keep the
                documents of a row apart.
        """
        sharding = frozen_sharding(self.cfg.sharding)
        assert self.mesh is not None
        for role, cfg in self.models.items():
            model = build_on_meta(replace(cfg, dtype=cfg.dtype or "auto"))
            model.requires_grad_(False).eval()
            if self.cfg.data.packing != "none":
                # Batches of packed rows tell documents apart by their borders, without a mask.
                attend_within_documents(model)
            self.frozen[role] = apply_fsdp(model, self.mesh, sharding)

    def file_bytes(self, data: TrainingData) -> int:
        """Estimate how many bytes `files` take in each checkpoint, at most."""
        return 0

    # ---- In the loop

    def counts(self, batch: Batch) -> torch.Tensor:
        """Count the terms of the mean in a micro-batch: int64, of the shape of `LossSum.count`."""
        return batch.trained.count

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of a micro-batch, summed over its terms."""
        raise NotImplementedError

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Compute the loss of an evaluation, with a part for each of `metrics`."""
        return self(model, batch)

    # ---- For plans

    def largest_batch(self, packing: Packing) -> Batch:
        """Build the micro-batch that takes the most memory, on the host.

        Args:
            packing: `data.packing`, with `auto` decided.
        """
        return largest_batch(self.cfg, packing)


def frozen_sharding(sharding: ShardingConfig) -> ShardingConfig:
    """Choose how a frozen model is sharded: like the trained one, without what only training uses.

    Patterns that name modules of the trained model are dropped. Every unit is freed after its
    forward, because a frozen model has no backward that would need it again.
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
    """Give runs with the settings `config` an objective; a class decorator.

        @objectives.register(DistillConfig)
        class Distillation(objectives.Objective): ...

    A class of settings without an objective has that of the class it extends.
    """

    def add(objective: _ObjectiveClass) -> _ObjectiveClass:
        _CLASSES[config] = objective
        return objective

    return add


def objective_class(config: type[RunConfig]) -> type[Objective]:
    """Find the class of the objective that runs with these settings have.

    Raises:
        ConfigError: neither the class of settings nor one that it extends has an objective.
    """
    for cls in config.__mro__:
        if cls in _CLASSES:
            return _CLASSES[cls]
    raise ConfigError(
        f"{config.__name__} has no objective: extend the settings of a kind that has one, or add "
        f"one with @objectives.register({config.__name__})"
    )


def build(cfg: RunConfig, mesh: Mesh | None = None, device_type: str | None = None) -> Objective:
    """Build the objective of a run from its settings; for the arguments see `Objective`."""
    objective = objective_class(type(cfg))(cfg, mesh, device_type)
    measures.register_metrics(objective.metrics)
    return objective
