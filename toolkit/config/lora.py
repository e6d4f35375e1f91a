"""Settings of adapters (LoRA, rsLoRA, DoRA, QLoRA)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toolkit.config.fields import AtLeast1, Fraction, NotNegative, Positive, setting_name
from toolkit.errors import ConfigError

# Settings that a run takes from the adapter that it continues (`lora.from`).
STRUCTURE = (
    *("r", "lora_alpha", "target_modules", "target_parameters", "exclude_modules"),
    *("modules_to_save", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
)
ALL_LINEAR = "all-linear"
_SOURCE_FIELDS = ("from_", "revision")  # the adapter to continue


def normalise_value(value: Any) -> Any:
    """Normalise the value of a setting for comparison: sort lists, lower-case `all-linear`."""
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    return sorted(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class LoraConfig:
    """Settings of LoRA adapters and their variants (PEFT), trained instead of all parameters."""

    from_: str | None = None
    """Continue training this adapter: a PEFT folder, a Hub id, the output_dir of a run, one of its
    checkpoints, or an export. Its rank, alpha, targets and similar settings are kept. Empty: start
    new adapters."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository in lora.from. Empty: its main branch."""
    r: NotNegative = 0
    """Rank of the adapters. 0: the rank of lora.from, or without it no adapters, so that all
    parameters are trained."""
    lora_alpha: Positive = 32.0
    """Scale of the adapters: lora_alpha / r (rsLoRA: lora_alpha / sqrt(r))."""
    lora_dropout: Fraction = 0.0
    """Dropout before the adapters. Not available in preference tuning, because the model and its
    reference must be the same function."""
    target_modules: str | list[str] = ALL_LINEAR
    """Modules to adapt: `all-linear` (every linear layer except the head), a list of names or ends
    of names (`[q_proj, v_proj]`), or one regular expression that matches full names."""
    target_parameters: list[str] = field(default_factory=list)
    """Parameters to adapt that are not the weight of a module, such as fused experts
    (`mlp.experts.gate_up_proj`)."""
    exclude_modules: str | list[str] = field(default_factory=list)
    """Modules to exclude from target_modules: names or ends of names, or one regular expression
    that matches full names."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules to train in full and save with the adapter, such as `[embed_tokens, lm_head]`."""
    rank_pattern: dict[str, AtLeast1] = field(default_factory=dict)
    """Ranks of some modules, by the end of their name or by a regular expression, such as
    `{mlp.down_proj: 32}`. All other modules have rank r."""
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)
    """lora_alpha of some modules, named as in rank_pattern."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r)."""
    use_dora: bool = False
    """Train the norm of each weight row separately (DoRA)."""
    load_in_4bit: bool = False
    """QLoRA: store the linear layers of the base model in 4 bits (needs bitsandbytes)."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales of the 4-bit weights too."""
    quantize_moe_experts: bool = False
    """Store the weights of fused experts in 4 bits as well. Each forward dequantises those of one
    layer. Needs load_in_4bit, and excludes adapters on experts."""

    explicit: ClassVar[frozenset[str]] = frozenset()
    """Settings that a file or a flag names, even with their default value; `parse` sets them."""

    def __post_init__(self) -> None:
        if self.from_ == "":
            raise ConfigError("lora.from is an empty text; name an adapter, or remove the setting")
        if self.revision is not None and self.from_ is None:
            raise ConfigError("lora.revision has no effect without lora.from; remove it")
        changed = [
            n for n in self.non_default_fields() if n not in _SOURCE_FIELDS and not self.is_used
        ]
        if changed:
            names = ", ".join(f"lora.{setting_name(name)}" for name in changed)
            raise ConfigError(f"{names} has no effect without lora.r; set that, such as to 16")
        if self.quantize_moe_experts and not self.load_in_4bit:
            raise ConfigError(
                "lora.quantize_moe_experts has no effect without lora.load_in_4bit; set that to "
                "true, or remove the setting"
            )

    @property
    def is_used(self) -> bool:
        """True if adapters are trained, either new ones or those of lora.from."""
        return self.r > 0 or self.from_ is not None

    def non_default_fields(self) -> dict[str, Any]:
        """Map each field that differs from its default to its value; skip empty containers."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if v != defaults[n] and v not in ([], {})}

    def requested_structure(self) -> dict[str, Any]:
        """Map each setting in `STRUCTURE` (rank, targets, ...) that the user set to its value."""
        # A rank of 0 means that the user set none.
        explicit = self.explicit - {"r"} if self.r == 0 else self.explicit
        names = [n for n in STRUCTURE if n in explicit or n in self.non_default_fields()]
        return {name: getattr(self, name) for name in names}

    def with_structure(self, structure: dict[str, Any]) -> "LoraConfig":
        """Return a copy with the rank, targets and similar settings of an existing adapter.

        Args:
            structure: setting of `STRUCTURE` -> its value in that adapter.

        Returns:
            The copy. Its `explicit` contains `all-linear` if the user requested it, because a later
            check needs the model to compare that with the adapter's modules.
        """
        wants_all = normalise_value(self.requested_structure().get("target_modules")) == ALL_LINEAR
        wants_all |= ALL_LINEAR in self.explicit  # set by an earlier call
        adopted = dataclasses.replace(self, **structure)
        object.__setattr__(adopted, "explicit", frozenset({ALL_LINEAR} if wants_all else ()))
        return adopted
