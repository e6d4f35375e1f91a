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


DPO_FAMILY = (
    *("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "apo_zero", "apo_down", "bco_pair"),
    *("nca_pair", "exo_pair", "sppo_hard", "aot", "aot_unpaired", "discopop"),
)
"""Objectives on pairs that compare with a reference. They can be combined in a list."""
CROSS_ENTROPY = "sft"  # the cross entropy of chosen answers, as a part of a list
SMOOTHED_LOSSES = (
    *("sigmoid", "sigmoid_norm", "robust", "simpo", "exo_pair", "aot", "aot_unpaired"),
)
"""Objectives that use `label_smoothing`."""
_USERS: dict[str, tuple[str, ...]] = {
    "beta": (*DPO_FAMILY, "simpo", "orpo", "kto"),
    "label_smoothing": SMOOTHED_LOSSES,
    "rpo_alpha": (*DPO_FAMILY, "simpo"),
    "simpo_gamma": ("simpo",),
    "discopop_tau": ("discopop",),
    "reference": (*DPO_FAMILY, "kto"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
}
"""Setting -> the objectives that use it. All objectives use the settings that are not listed."""

LossType = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "hinge",
    "ipo",
    "apo_zero",
    "apo_down",
    "bco_pair",
    "nca_pair",
    "exo_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "discopop",
    "sft",
    "simpo",
    "orpo",
    "kto",
    "reward",
]
"""Names of the objectives, as in TRL."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Settings of the preference objective, such as DPO or KTO."""

    loss_type: LossType | list[LossType] = "sigmoid"
    """Objective. `sigmoid` is DPO, and `sigmoid_norm` is DPO on mean log-probabilities per token.
    `robust` to `discopop` are variants of DPO. A list of them is a weighted sum (MPO), which may
    include `sft`, the cross entropy of chosen answers. `simpo` and `orpo` need no reference. `kto`
    trains on single answers with a label. `reward` trains a reward model. Formulas:
    docs/preference.md."""
    loss_weights: list[Positive] | None = None
    """Weight of each objective in a list `loss_type`; null: 1 for each of them."""
    beta: Positive = 0.1
    """Strength of the reference: a smaller value lets the model move farther away from it. For
    simpo the scale of the margin, for orpo the weight of the odds ratio. Not used by reward."""
    label_smoothing: Fraction = 0.0
    """Assumed share of pairs whose sides are swapped, below 0.5. Used by sigmoid, sigmoid_norm,
    robust, exo_pair (which needs it, such as 1e-3), aot, aot_unpaired and simpo."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the cross entropy of chosen answers (mean over their tokens), which is added to the
    loss. Not used by orpo, kto and reward."""
    simpo_gamma: NonNegative = 0.5
    """simpo: target margin between the two sides."""
    discopop_tau: Positive = 0.05
    """discopop: width of the transition between its two losses, at most 1."""
    desirable_weight: Positive = 1.0
    """kto: weight of answers whose label is true."""
    undesirable_weight: Positive = 1.0
    """kto: weight of answers whose label is false."""
    center_rewards_coefficient: NonNegative = 0.0
    """reward: weight of the squared sum of both rewards, which keeps their mean near 0."""
    reference: str | None = None
    """Folder or Hub id of the reference: a model with the tokenizer of the run, or a PEFT adapter
    of its base model. Empty: the model that training starts from. Not used by simpo, orpo and
    reward."""

    @property
    def loss_types(self) -> tuple[str, ...]:
        """Names of the objectives: one, or those of a weighted sum."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def weighted_losses(self) -> dict[str, float]:
        """Weight of each objective on pairs or answers; the cross entropy is not included."""
        names = self.loss_types
        weights = dict(zip(names, self.loss_weights or [1.0] * len(names), strict=True))
        return {name: weight for name, weight in weights.items() if name != CROSS_ENTROPY}

    @property
    def cross_entropy_weight(self) -> float:
        """Weight of the cross entropy of chosen answers (for ORPO also of prompts); 0: none."""
        if self.loss_type == "orpo":
            return 1.0
        names = self.loss_types
        if CROSS_ENTROPY not in names:
            return self.rpo_alpha
        return self.loss_weights[names.index(CROSS_ENTROPY)] if self.loss_weights else 1.0

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with a frozen reference model."""
        return self.loss_type not in ("simpo", "orpo", "reward")

    @property
    def paired(self) -> bool:
        """True if a row has a chosen and a rejected answer; False if it has one labelled answer."""
        return self.loss_type != "kto"

    @property
    def compares_micro_batch(self) -> bool:
        """Whether the loss of an answer depends on the other answers of its micro-batch."""
        return not {"kto", "aot", "aot_unpaired"}.isdisjoint(self.loss_types)

    @property
    def learns_prompts(self) -> bool:
        """True if the cross-entropy term of the loss also covers prompt tokens, as in ORPO."""
        return self.loss_type == "orpo"

    def __post_init__(self) -> None:
        self._check_list()
        names = self.loss_types
        for setting in dataclasses.fields(self):
            users = _USERS.get(setting.name, names)
            value = getattr(self, setting.name)
            if not {*names} & {*users} and value != setting.default:
                raise ConfigError(
                    f"preference.{setting.name} has no effect with loss_type {', '.join(names)}, "
                    f"got {value}; remove it, or set loss_type to one of {', '.join(users)}"
                )
        if self.label_smoothing >= 0.5:
            raise ConfigError(
                "preference.label_smoothing is the share of pairs whose sides are swapped; it "
                f"must be below 0.5, got {self.label_smoothing}"
            )
        if self.reference == "":
            raise ConfigError(
                "preference.reference is an empty text; name a model or an adapter, or remove it"
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise ConfigError(
                "preference.loss_type exo_pair compares with the logarithm of "
                "preference.label_smoothing, which must be above 0, got 0; its authors use 1e-3"
            )
        if self.discopop_tau > 1:
            raise ConfigError(
                "preference.discopop_tau must be at most 1, because the loss of a wrong pair would "
                f"grow exponentially, got {self.discopop_tau}; its authors use 0.05"
            )

    def _check_list(self) -> None:
        """Check `loss_type` as a list, and its weights; store a list of one name as the name.

        Raises:
            ConfigError: objectives that cannot be added up, a repeated one, or wrong weights.
        """
        names = self.loss_types
        if not isinstance(self.loss_type, str) and len(names) == 1:
            object.__setattr__(self, "loss_type", names[0])
            if self.loss_weights == [1.0]:
                object.__setattr__(self, "loss_weights", None)
        weights = self.loss_weights
        if names == (CROSS_ENTROPY,):
            raise ConfigError(
                "preference.loss_type sft alone does not compare answers; list it after another "
                "objective, such as [sigmoid, sft], or fine-tune with `toolkit finetune`"
            )
        if isinstance(self.loss_type, str) and weights is not None:
            raise ConfigError(
                "preference.loss_weights needs a list of several objectives in "
                f"preference.loss_type, got {self.loss_type}, whose weight would only scale the "
                "gradients; remove it"
            )
        unsupported = [name for name in names if name not in (*DPO_FAMILY, CROSS_ENTROPY)]
        if not names or (len(names) > 1 and unsupported):
            raise ConfigError(
                f"preference.loss_type as a list: expected several of {', '.join(DPO_FAMILY)} and "
                f"sft, got {', '.join(unsupported) or 'an empty list'}"
            )
        if len({*names}) < len(names):
            raise ConfigError(
                f"preference.loss_type lists an objective twice: {', '.join(names)}; list it once, "
                "with the sum of its weights"
            )
        if weights is not None and len(weights) != len(names):
            raise ConfigError(
                f"preference.loss_weights: expected {len(names)} weights, one for each objective "
                f"of preference.loss_type ({', '.join(names)}), got {len(weights)}"
            )
        if CROSS_ENTROPY in names and self.rpo_alpha:
            raise ConfigError(
                "preference.rpo_alpha and sft in preference.loss_type are the same cross entropy; "
                "remove one of them"
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
        if self.torchao_recipe != "none":
            raise ConfigError(
                "model.float8: the model and its reference must be the same function, and scaling "
                "by the other rows of a batch changes the model at each step. Remove it, or train "
                "adapters (lora.r) on a base in float8 (model.float8: rowwise)"
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
        if self.preference.reference is not None:
            raise ConfigError(
                "data.streaming with preference.reference: the reference is computed for every row "
                "before the first step, when the rows of a stream are not known yet; remove one of "
                "them"
            )
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
