"""Where a task of the fake cluster would run."""

from types import SimpleNamespace


def PlacementGroupSchedulingStrategy(group, placement_group_bundle_index):
    return SimpleNamespace(group=group, bundle=placement_group_bundle_index)
