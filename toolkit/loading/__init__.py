"""Bytes into shards: a checkpoint streamed in, or random weights drawn."""

from toolkit.loading.pretrained import (
    check_fits,
    check_source,
    fill,
    init_weights,
    load_pretrained,
    materialise,
)

__all__ = ["check_fits", "check_source", "fill", "init_weights", "load_pretrained", "materialise"]
