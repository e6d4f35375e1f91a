"""Tied parameters: which names of a model are one parameter."""

from torch import nn


def tied_families(model: nn.Module) -> dict[str, list[str]]:
    """Return every parameter's first name -> all its names."""
    first: dict[int, str] = {}
    families: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        families.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return families


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> the first name of the same parameter, for every tied parameter."""
    return {alias: names[0] for names in tied_families(model).values() for alias in names[1:]}
