"""A Hugging Face causal LM without bytes: its shapes, layers, ties and head, on meta."""

from toolkit.models.causal_lm import build_on_meta, decoder_layers

__all__ = ["build_on_meta", "decoder_layers"]
