"""A Hugging Face causal LM without bytes: its shapes, layers, ties and head, on meta."""

from toolkit.models.causal_lm import build_on_meta, check_usable, decoder_layers, prepare

__all__ = ["build_on_meta", "check_usable", "decoder_layers", "prepare"]
