"""Settings of preference tuning."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from toolkit.config.fields import Fraction, NonNegative, Positive
from toolkit.config.settings import FinetuneConfig, FinetuneModelConfig, Learned, OptimConfig
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class RewardModelConfig(FinetuneModelConfig):
    """A model whose head gives one number for a sequence, its reward, instead of logits of tokens;
    see `toolkit.models.reward`. It adds no settings.
    """


_REFERRING = ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero")  # to a reference
_USERS: dict[str, tuple[str, ...]] = {
    "beta": (*_REFERRING, "simpo", "orpo", "kto"),
    "label_smoothing": ("sigmoid", "sigmoid_norm", "robust", "simpo"),
    "rpo_alpha": (*_REFERRING, "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
}
"""Setting -> the objectives that it changes; settings that are not listed change all."""


@dataclass(frozen=True)
class PreferenceConfig:
    """The objective of preference tuning, and its settings."""

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
    """`sigmoid` is DPO, `sigmoid_norm` the same on means of tokens; `robust`, `hinge`, `ipo` and
    `apo_zero` are its variants. `simpo` and `orpo` need no reference. `kto` learns from single
    answers with a label. `reward` trains a reward model. Formulas: docs/preference.md."""
    beta: Positive = 0.1
    """Strength: a smaller value lets the model move farther from the reference. Of simpo the scale
    of the margin, of orpo the weight of the odds ratio; not of reward."""
    label_smoothing: Fraction = 0.0
    """Share of pairs whose sides are taken to be swapped, below 0.5: of sigmoid, sigmoid_norm,
    robust and simpo."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the cross entropy of chosen answers, a mean over their tokens, which is added to
    the loss; not of orpo, kto and reward."""
    simpo_gamma: NonNegative = 0.5
    """Of simpo: the margin between both sides that its loss asks for."""
    desirable_weight: Positive = 1.0
    """Of kto: weight of answers whose label is true."""
    undesirable_weight: Positive = 1.0
    """Of kto: weight of answers whose label is false."""
    center_rewards_coefficient: NonNegative = 0.0
    """Of reward: weight of the square of the sum of both rewards, which keeps their mean at 0."""

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss compares with the model that training began with."""
        return self.loss_type not in ("simpo", "orpo", "reward")

    @property
    def paired(self) -> bool:
        """Return whether rows are pairs of answers; else single answers with a label."""
        return self.loss_type != "kto"

    @property
    def learns_prompts(self) -> bool:
        """Return whether the cross entropy covers prompts too."""
        return self.loss_type == "orpo"

    def __post_init__(self) -> None:
        kind = self.loss_type
        for setting in dataclasses.fields(self):
            users, value = _USERS.get(setting.name, (kind,)), getattr(self, setting.name)
            if kind not in users and value != setting.default:
                raise ConfigError(
                    f"preference.{setting.name} does nothing with loss_type {kind}, got {value}; "
                    f"remove it, or set loss_type to one of {', '.join(users)}"
                )
        if self.label_smoothing >= 0.5:
            raise ConfigError(
                "preference.label_smoothing is the share of pairs whose sides are swapped, and "
                f"must be below 0.5, got {self.label_smoothing}"
            )


@dataclass(frozen=True)
class PreferConfig(FinetuneConfig):
    """A run of preference tuning: of all parameters, or of adapters (lora.r or lora.from)."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    output_dir: str = "runs/prefer"

    @property
    def learned(self) -> Learned:
        """Return what is learned: pairs of answers, or single answers with a label."""
        return "pairs" if self.preference.paired else "answers"

    @property
    def learns_prompts(self) -> bool:
        """Return whether prompts of chosen answers are targets too."""
        return self.preference.learns_prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preference.loss_type == "reward":
            self._be_a_reward_model()
        for name, value, why in (
            ("train.neftune_noise_alpha", self.train.neftune_noise_alpha, "noise"),
            ("lora.lora_dropout", self.lora.lora_dropout, "dropout"),
        ):
            if value:
                raise ConfigError(
                    f"{name}: the model and its reference must be the same function, and {why} "
                    "makes another of it at each step; leave it out"
                )
        if self.train.label_smoothing_factor:
            raise ConfigError(
                "train.label_smoothing_factor smooths targets of tokens, which preference tuning "
                "has none of; preference.label_smoothing is about sides of pairs"
            )
        if self.train.z_loss:
            raise ConfigError(
                "train.z_loss is of a cross entropy, and a preference loss is of sums of "
                "log-probabilities; leave it out"
            )
        if self.data.streaming and not self.preference.paired:
            raise ConfigError(
                "data.streaming with preference.loss_type kto: an answer is compared with another "
                "row's, and rows of a stream are not known before; leave streaming out"
            )
        if self.data.streaming and self.preference.needs_reference and self.adapters is None:
            raise ConfigError(
                f"data.streaming with preference.loss_type {self.preference.loss_type}: the "
                "reference is asked for every row before the first step, and rows of a stream are "
                "not known then; leave streaming out, set lora.r (adapters are turned off to ask "
                "the base), or take simpo or orpo"
            )
        continued = self.lora.from_ is not None
        if self.data.streaming and self.preference.needs_reference and continued:
            raise ConfigError(
                f"data.streaming with lora.from and preference.loss_type "
                f"{self.preference.loss_type}: the reference is the base with the adapter that the "
                "run continues, not the base alone, and is computed for every row before the first "
                "step; leave streaming out, or export the adapter merged (toolkit consolidate "
                "--merge) and start new adapters on that model"
            )
        if self.data.packing == "wrapped":
            raise ConfigError(
                "data.packing wrapped cuts samples anywhere, and a pair must stay whole; set auto, "
                "bfd or none"
            )
        if self.data.supervise != "auto":
            raise ConfigError(
                "data.supervise does nothing in preference tuning, which learns the answers of "
                "pairs; leave it out"
            )

    def _be_a_reward_model(self) -> None:
        """Make the settings of the model those of a reward model, and refuse what that cannot."""
        object.__setattr__(self, "model", RewardModelConfig(**vars(self.model)))
        if self.data.streaming:
            raise ConfigError(
                "data.streaming: reward models are not trained on streams yet; leave it out"
            )
        if self.train.eval_prompts:
            raise ConfigError(
                "train.eval_prompts asks for answers, which a reward model cannot give; leave it "
                "out"
            )
