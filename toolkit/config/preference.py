"""Settings of preference tuning."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from toolkit.config.fields import Fraction, NonNegative, Positive
from toolkit.config.settings import FinetuneConfig, FinetuneModelConfig, OptimConfig
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class RewardModelConfig(FinetuneModelConfig):
    """The model of a run that trains a reward model: its head returns one number per sequence.

    The class has no additional settings. See `toolkit.models.reward`.
    """


_WITH_REFERENCE = ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero")  # and kto
_USERS: dict[str, tuple[str, ...]] = {
    "beta": (*_WITH_REFERENCE, "simpo", "orpo", "kto"),
    "label_smoothing": ("sigmoid", "sigmoid_norm", "robust", "simpo"),
    "rpo_alpha": (*_WITH_REFERENCE, "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
}
"""Setting -> the objectives that use it. All objectives use the settings that are not listed."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Settings of the preference objective, such as DPO or KTO."""

    loss_type: Literal[
        "sigmoid",
        "sigmoid_norm",
        "robust",
        "hinge",
        "ipo",
        "apo_zero",
        "simpo",
        "orpo",
        "kto",
        "reward",
    ] = "sigmoid"
    """Objective. `sigmoid` is DPO, and `sigmoid_norm` is DPO on mean log-probabilities per token.
    `robust`, `hinge`, `ipo` and `apo_zero` are variants of DPO. `simpo` and `orpo` need no
    reference. `kto` trains on single answers with a label. `reward` trains a reward model.
    Formulas: docs/preference.md."""
    beta: Positive = 0.1
    """Strength of the reference: a smaller value lets the model move farther away from it. For
    simpo the scale of the margin, for orpo the weight of the odds ratio. Not used by reward."""
    label_smoothing: Fraction = 0.0
    """Assumed share of pairs whose sides are swapped, below 0.5. Used by sigmoid, sigmoid_norm,
    robust and simpo."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the cross entropy of chosen answers (mean over their tokens), which is added to the
    loss. Not used by orpo, kto and reward."""
    simpo_gamma: NonNegative = 0.5
    """simpo: target margin between the two sides."""
    desirable_weight: Positive = 1.0
    """kto: weight of answers whose label is true."""
    undesirable_weight: Positive = 1.0
    """kto: weight of answers whose label is false."""
    center_rewards_coefficient: NonNegative = 0.0
    """reward: weight of the squared sum of both rewards, which keeps their mean near 0."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with a frozen copy of its start (the reference)."""
        return self.loss_type not in ("simpo", "orpo", "reward")

    @property
    def paired(self) -> bool:
        """True if a row has a chosen and a rejected answer; False if it has one labelled answer."""
        return self.loss_type != "kto"

    @property
    def learns_prompts(self) -> bool:
        """True if the cross-entropy term of the loss also covers prompt tokens, as in ORPO."""
        return self.loss_type == "orpo"

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            users = _USERS.get(setting.name, (self.loss_type,))
            value = getattr(self, setting.name)
            if self.loss_type not in users and value != setting.default:
                raise ConfigError(
                    f"preference.{setting.name} has no effect with loss_type {self.loss_type}, got "
                    f"{value}; remove it, or set loss_type to one of {', '.join(users)}"
                )
        if self.label_smoothing >= 0.5:
            raise ConfigError(
                "preference.label_smoothing is the share of pairs whose sides are swapped; it "
                f"must be below 0.5, got {self.label_smoothing}"
            )


@dataclass(frozen=True)
class PreferConfig(FinetuneConfig):
    """Settings of a preference tuning run of all parameters or adapters (lora.r or lora.from)."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    output_dir: str = "runs/prefer"

    @property
    def rows(self) -> str:
        """Name of the row format: `pairs`, or `answers` (single answers with a label)."""
        return "pairs" if self.preference.paired else "answers"

    @property
    def learns_prompts(self) -> bool:
        """True if the loss also covers the prompt tokens of chosen answers, as in ORPO."""
        return self.preference.learns_prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preference.loss_type == "reward":
            self._set_up_reward_model()
        for setting, value, cause in (
            ("train.neftune_noise_alpha", self.train.neftune_noise_alpha, "noise"),
            ("lora.lora_dropout", self.lora.lora_dropout, "dropout"),
        ):
            if value:
                raise ConfigError(
                    f"{setting}: the model and its reference must be the same function, and "
                    f"{cause} changes the model at each step; remove it"
                )
        if self.train.label_smoothing_factor:
            raise ConfigError(
                "train.label_smoothing_factor smooths the targets of a cross entropy, which "
                "preference tuning does not have; preference.label_smoothing is for sides of pairs"
            )
        if self.train.z_loss:
            raise ConfigError(
                "train.z_loss belongs to a cross entropy, but a preference loss uses sums of "
                "log-probabilities; remove it"
            )
        if self.data.packing == "wrapped":
            raise ConfigError(
                "data.packing wrapped cuts samples anywhere, but a pair must stay complete; set "
                "auto, bfd or none"
            )
        if self.data.supervise != "auto":
            raise ConfigError(
                "data.supervise has no effect in preference tuning, where the loss covers the "
                "answers of pairs; remove it"
            )
        if self.data.streaming:
            self._check_streaming()

    def _check_streaming(self) -> None:
        """Raise ConfigError if the loss needs the rows of a stream before the first step.

        That is the case for KTO, and if the reference must be computed for every row in advance.
        """
        loss_type = self.preference.loss_type
        if not self.preference.paired:
            raise ConfigError(
                "data.streaming with preference.loss_type kto: an answer is compared with that of "
                "another row, and the rows of a stream are not known in advance; remove streaming"
            )
        if not self.preference.needs_reference:
            return
        if self.adapters is None:
            raise ConfigError(
                f"data.streaming with preference.loss_type {loss_type}: the reference is computed "
                "for every row before the first step, when the rows of a stream are not known yet; "
                "remove streaming, set lora.r (the reference is then the base model with adapters "
                "turned off), or set loss_type to simpo or orpo"
            )
        if self.lora.from_ is not None:
            raise ConfigError(
                f"data.streaming with lora.from and preference.loss_type {loss_type}: the "
                "reference is the base model with the adapter that the run continues, and is "
                "computed for every row before the first step; remove streaming, or export the "
                "adapter merged (toolkit consolidate --merge) and start new adapters on that model"
            )

    def _set_up_reward_model(self) -> None:
        """Replace `model` by a `RewardModelConfig`.

        Raises:
            ConfigError: `data.streaming` or `train.eval_prompts` is set.
        """
        object.__setattr__(self, "model", RewardModelConfig(**vars(self.model)))
        if self.data.streaming:
            raise ConfigError(
                "data.streaming: reward models cannot be trained on streams yet; remove it"
            )
        if self.train.eval_prompts:
            raise ConfigError(
                "train.eval_prompts needs a model that generates text, which a reward model cannot "
                "do; remove it"
            )
