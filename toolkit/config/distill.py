"""Settings of distillation: a model that imitates a frozen teacher with the same vocabulary."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from toolkit.config.fields import AtLeast1, Positive, UnitInterval
from toolkit.config.measures import TOKEN_METRICS, Metric
from toolkit.config.settings import Dtype, FinetuneConfig, ModelConfig
from toolkit.errors import ConfigError

KL = Metric("kl", "min", ".4f")
AGREEMENT = Metric("agreement", "max", ".1%")
DISTILL_METRICS = (*TOKEN_METRICS, KL, AGREEMENT)
"""Metrics of an evaluation: those of fine-tuning, the divergence from the teacher, and the share of
tokens for which model and teacher have the same most likely token."""
# Settings of a model that have no effect on a frozen teacher.
_WITHOUT_EFFECT = (
    "train_tokenizer",
    "resize_embeddings",
    "frozen_parameters",
    "kernels",
    "float8",
)


@dataclass(frozen=True)
class TeacherConfig(ModelConfig):
    """The frozen teacher: a causal LM with the vocabulary of the trained model.

    It is sharded over the ranks like the trained model and computes in sharding.param_dtype.
    """

    name_or_path: str = ""
    """Folder of a Hugging Face causal LM checkpoint, or its id on the Hub. Required."""
    dtype: Dtype | Literal["auto"] | None = "auto"
    """Storage dtype of the teacher's parameters. `auto` or empty: that of the checkpoint."""

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(ModelConfig):
            value = getattr(self, setting.name)
            if setting.name in _WITHOUT_EFFECT and value not in ([], setting.default):
                raise ConfigError(
                    f"teacher.{setting.name} has no effect on a frozen teacher, got {value}; "
                    "remove it"
                )


@dataclass(frozen=True)
class DistillationConfig:
    """Settings of the loss `(1 - kl_weight) x cross entropy + kl_weight x temperature^2 x KL`."""

    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """`forward_kl`: the mean of log(teacher / model) under the teacher, which makes the model cover
    everything that the teacher considers likely. `reverse_kl`: the mean of log(model / teacher)
    under the model, which makes it avoid what the teacher considers unlikely."""
    temperature: Positive = 1.0
    """Divides the logits of model and teacher in the divergence. Above 1, unlikely tokens count
    more. The divergence is multiplied by its square, which keeps the size of the gradients."""
    kl_weight: UnitInterval = 0.5
    """Weight of the divergence. The cross entropy of the data's own tokens has the weight
    1 - kl_weight. 1: the divergence alone."""
    top_k: AtLeast1 | None = None
    """Compare the probabilities of this many tokens, the teacher's most likely ones at each
    position, and of all other tokens together. Empty: of every token."""
    stored: bool = False
    """Evaluate the teacher once, before the first step, and store its top_k tokens of each
    supervised position in every checkpoint, 12 + 8 x top_k bytes each. The teacher is not held
    during training."""

    def __post_init__(self) -> None:
        if self.kl_weight == 0:
            raise ConfigError(
                "distill.kl_weight 0 leaves only the cross entropy, for which no teacher is "
                "needed: set a weight above 0, or use `toolkit finetune`"
            )
        if self.stored and self.top_k is None:
            raise ConfigError(
                "distill.stored needs distill.top_k, the number of the teacher's tokens that are "
                "stored of each position; 16 to 64 are usual"
            )


@dataclass(frozen=True)
class DistillConfig(FinetuneConfig):
    """Settings of a distillation run of all parameters or of adapters (lora.r or lora.from)."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillationConfig = field(default_factory=DistillationConfig)
    output_dir: str = "runs/distill"

    @property
    def rows(self) -> str:
        """Name of the row format: examples, with stored values of the teacher if there are any."""
        return f"examples+top{self.distill.top_k}" if self.distill.stored else "examples"

    @property
    def frozen_models(self) -> dict[str, ModelConfig]:
        """The teacher, under its role.

        Raises:
            ConfigError: no teacher is set.
        """
        if not self.teacher.name_or_path:
            raise ConfigError(
                "expected the model to imitate, got none: set teacher.name_or_path to a folder or "
                "Hub id"
            )
        return super().frozen_models

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher.init == "random":
            raise ConfigError(
                "teacher.init random gives a teacher that knows nothing; remove it, and set "
                "teacher.name_or_path to a trained model"
            )
        if self.torchao_recipe != "none":
            raise ConfigError(
                "model.float8 of trained layers is supported in pretraining and fine-tuning, and "
                "was not tried in distillation; remove it"
            )
        if self.train.label_smoothing_factor:
            raise ConfigError(
                "train.label_smoothing_factor has no effect in distillation, where the teacher "
                "spreads the targets; remove it"
            )
        if self.train.z_loss:
            raise ConfigError(
                "train.z_loss is not supported in distillation, where the teacher determines the "
                "distribution; remove it"
            )
        if self.distill.stored and self.data.streaming:
            raise ConfigError(
                "distill.stored evaluates the teacher on all rows before the first step, but the "
                "rows of data.streaming are not known then; remove one of them"
            )
