"""Placement groups of the fake cluster."""

from types import SimpleNamespace

from ray import util


def placement_group(bundles, strategy):
    assert strategy == "STRICT_SPREAD"
    util.bundles[:] = bundles
    return SimpleNamespace(ready=lambda: None)
