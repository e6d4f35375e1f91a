"""Settings of adapters (LoRA, rsLoRA, DoRA, QLoRA)."""

import dataclasses
from dataclasses import dataclass, field

from toolkit.config.ranges import Fraction, NotNegative, Positive
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class LoraConfig:
    """Adapters (LoRA and its kin, through PEFT) instead of full-parameter fine-tuning."""

    r: NotNegative = 0
    """Rank of the adapters; 0: none, all parameters are trained."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / r (rsLoRA: / sqrt(r))."""
    lora_dropout: Fraction = 0.0
    """Dropout before the adapters. Not in preference tuning, whose model must be the same function
    as its reference."""
    target_modules: str | list[str] = "all-linear"
    """Modules that are adapted: `all-linear` (every linear layer but the head), names or their ends
    (`[q_proj, v_proj]`), or one regular expression of whole names."""
    target_parameters: list[str] = field(default_factory=list)
    """Parameters that are adapted though they are no module's weight, such as fused experts
    (`mlp.experts.gate_up_proj`)."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules that target_modules names and that are left alone."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter, such as `[embed_tokens, lm_head]`."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r)."""
    use_dora: bool = False
    """Learn the norm of each row of the weights apart (DoRA)."""
    load_in_4bit: bool = False
    """QLoRA: store the linear layers of the base in 4 bits (needs bitsandbytes)."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales too."""

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)
        changed = [f"lora.{f.name}" for f in fields if getattr(self, f.name) not in (f.default, [])]
        if changed and not self.r:
            raise ConfigError(f"{', '.join(changed)} without lora.r does nothing; set it, as to 16")
