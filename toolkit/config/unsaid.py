"""What axolotl, TRL and Trainer do where a key is missing, and this toolkit would not.

Read in their sources: axolotl's schema and `core/builders/base.py`, TRL's `SFTConfig` and
`ModelConfig`, transformers' `TrainingArguments`, PEFT's `LoraConfig`.
"""

from typing import Any

UNSAID: dict[str, dict[str, Any]] = {
    "axolotl": {"sample_packing": False, "lr_scheduler": "cosine", "val_set_size": 0.0}
    | {"micro_batch_size": 1, "train_on_inputs": False, "bf16": "auto", "sequence_len": 512}
    | {"excess_length_strategy": "drop", "save_total_limit": 4},
    "trl": {"num_train_epochs": 3.0, "learning_rate": 2e-5, "max_length": 1024, "packing": False}
    | {"gradient_checkpointing": True, "bf16": True, "eval_strategy": "no"}
    | {"save_total_limit": None},
    "trainer": {"num_train_epochs": 3.0, "bf16": False, "packing": False, "eval_strategy": "no"}
    | {"save_total_limit": None},
}
# Of adapters; `trainer` has what PEFT and bitsandbytes do when a script calls them.
LORA: dict[str, dict[str, Any]] = {
    "axolotl": {"bnb_4bit_use_double_quant": True},
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "trainer": {"lora_r": 8, "lora_alpha": 8, "bnb_4bit_quant_type": "fp4"},
}


def axolotl_warmup(max_steps: Any) -> tuple[int | float, str]:
    """Return axolotl's steps of warm-up where it is told none, and a note on it."""
    rule = "3 % of all steps, at most 100, where axolotl is told none"
    if isinstance(max_steps, int) and max_steps > 0:
        return min(int(0.03 * max_steps), 100), rule
    return 0.03, f"{rule}; 3 % are set, without that limit"
