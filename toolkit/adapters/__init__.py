"""Adapters (LoRA and its kin) on a model: targets, first values, PEFT's folder, coverage."""

from toolkit.adapters.lora import add_adapters

__all__ = ["add_adapters"]
