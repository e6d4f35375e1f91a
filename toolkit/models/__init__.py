"""A Hugging Face causal LM without bytes: its shapes, layers, ties and head, on meta."""

from toolkit.models.causal_lm import build_on_meta, check_usable, decoder_layers, prepare
from toolkit.models.quantise import check_quantisation

__all__ = ["build_on_meta", "check_quantisation", "check_usable", "decoder_layers", "prepare"]
