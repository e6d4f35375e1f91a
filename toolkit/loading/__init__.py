"""Bytes into shards: a checkpoint streamed in, or random weights drawn."""

from toolkit.loading.pretrained import init_weights, load_pretrained

__all__ = ["init_weights", "load_pretrained"]
