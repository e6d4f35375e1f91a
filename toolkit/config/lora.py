"""Settings of adapters (LoRA, rsLoRA, DoRA, QLoRA)."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toolkit.config.fields import AtLeast1, Fraction, NotNegative, Positive, setting_name
from toolkit.errors import ConfigError

# Settings that an adapter which a run continues (`lora.from`) brings with it.
STRUCTURE = (
    *("r", "lora_alpha", "target_modules", "target_parameters", "exclude_modules"),
    *("modules_to_save", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
)
ALL_LINEAR = "all-linear"
_OF_FROM = ("from_", "revision")


def comparable(value: Any) -> Any:
    """Return a value of a setting that equals another in any order."""
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    return sorted(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class LoraConfig:
    """Adapters (LoRA and its kin, through PEFT) instead of full-parameter fine-tuning."""

    from_: str | None = None
    """Continue training this adapter: a PEFT folder, a Hub id, a run's output_dir, one of its
    checkpoints, or an export. Rank, alpha, targets and the like come from it. Empty: new ones."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository that lora.from names; empty: its main branch."""
    r: NotNegative = 0
    """Rank of the adapters; 0: none, all parameters are trained, or what lora.from has."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / r (rsLoRA: / sqrt(r))."""
    lora_dropout: Fraction = 0.0
    """Dropout before the adapters. Not in preference tuning, whose model must be the same function
    as its reference."""
    target_modules: str | list[str] = ALL_LINEAR
    """Modules that are adapted: `all-linear` (every linear layer but the head), names or their ends
    (`[q_proj, v_proj]`), or one regular expression of whole names."""
    target_parameters: list[str] = field(default_factory=list)
    """Parameters that are adapted though they are no module's weight, such as fused experts
    (`mlp.experts.gate_up_proj`)."""
    exclude_modules: str | list[str] = field(default_factory=list)
    """Modules that target_modules names and that are left alone: names or their ends, or one
    regular expression of whole names."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter, such as `[embed_tokens, lm_head]`."""
    rank_pattern: dict[str, AtLeast1] = field(default_factory=dict)
    """Ranks of some modules, by the end of their names or a regular expression, such as
    `{mlp.down_proj: 32}`; r is that of all others."""
    alpha_pattern: dict[str, Positive] = field(default_factory=dict)
    """lora_alpha of some modules, named as in rank_pattern."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r)."""
    use_dora: bool = False
    """Learn the norm of each row of the weights apart (DoRA)."""
    load_in_4bit: bool = False
    """QLoRA: store the linear layers of the base in 4 bits (needs bitsandbytes)."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales too."""

    explicit: ClassVar[frozenset[str]] = frozenset()
    """Settings that a file or a flag names, whether or not at their default; set by `parse`."""

    def __post_init__(self) -> None:
        if self.from_ == "":
            raise ConfigError("lora.from is an empty text; give an adapter, or leave it out")
        if self.revision is not None and self.from_ is None:
            raise ConfigError("lora.revision is that of lora.from, which is not set; leave it out")
        if changed := [n for n in self.changed() if n not in _OF_FROM and not self.is_used]:
            names = ", ".join(f"lora.{setting_name(name)}" for name in changed)
            raise ConfigError(f"{names} without lora.r does nothing; set it, as to 16")

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained, new ones or those of lora.from."""
        return self.r > 0 or self.from_ is not None

    def changed(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults, with their values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {n: v for n, v in values.items() if v != defaults[n] and v not in ([], {})}

    def requested(self) -> dict[str, Any]:
        """Return the settings of `STRUCTURE` that the user names, with their values."""
        explicit = self.explicit - {"r"} if self.r == 0 else self.explicit  # 0: not given
        names = [n for n in STRUCTURE if n in explicit or n in self.changed()]
        return {name: getattr(self, name) for name in names}

    def with_structure(self, structure: dict[str, Any]) -> "LoraConfig":
        """Return these settings with those of an adapter. `explicit` then says whether the user
        names `all-linear`: which modules those are, the model says.
        """
        wants_all = comparable(self.requested().get("target_modules")) == ALL_LINEAR
        wants_all |= ALL_LINEAR in self.explicit  # an earlier call found it
        adopted = dataclasses.replace(self, **structure)
        object.__setattr__(adopted, "explicit", frozenset({ALL_LINEAR} if wants_all else ()))
        return adopted
