"""Names of modules and parameters by pattern, as the config gives them."""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from toolkit.errors import ModelError


def matching_modules(
    model: nn.Module, patterns: Iterable[str], setting: str, called: bool = False
) -> dict[str, nn.Module]:
    """Return the modules that any of `patterns` names, in the order of definition.

    A pattern is a class name, a module's whole name, or the end of one at a dot; `*` matches any
    text, dots included. With `called`, containers, which have no forward, are left out. ModelError
    for a pattern of `setting` that matches none; names the nearest.
    """
    named = dict(model.named_modules())
    classes = {name: module_class_name(module) for name, module in named.items() if name}
    found: set[str] = set()
    for pattern in patterns:
        matched = _matched(pattern, classes, setting, "module")
        if called:
            holding = {n for n in matched if isinstance(named[n], nn.ModuleList | nn.ModuleDict)}
            if holding == matched:
                name = min(holding)
                raise ModelError(
                    f"{setting}: {pattern!r} matches only {name}, which holds modules and is never "
                    f"called; name those: {name}.*"
                )
            matched -= holding
        found |= matched
    return {name: module for name, module in named.items() if name in found}


def matching_parameters(model: nn.Module, patterns: Iterable[str], setting: str) -> list[str]:
    """Return the parameters that `patterns` name, tied ones each; see `matching_modules`."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = [_matched(p, dict.fromkeys(names), setting, "parameter") for p in patterns]
    return [name for name in names if any(name in matched for matched in found)]


def _matched(pattern: str, classes: Mapping[str, str | None], setting: str, what: str) -> set[str]:
    """Return which of the names, each with its class, a pattern matches."""
    matched = {
        name
        for name, kind in classes.items()
        if pattern == kind or fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
    }
    if not matched:
        known = {*map(replace_numbers, classes), *filter(None, classes.values())}
        raise ModelError(no_match(setting, pattern, what, known))
    return matched


def module_class_name(module: object) -> str:
    """Return the name of an object's class as it was before sharding changed it."""
    name, before = type(module).__name__, type(module).__mro__[2:3]
    return before[0].__name__ if before and name == f"FSDP{before[0].__name__}" else name


def replace_numbers(name: str) -> str:
    """Return `name` with `*` for its numbers: the layers of a stack become one name."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def no_match(setting: str, pattern: str, what: str, known: set[str]) -> str:
    """Return what to say of a pattern that matches nothing: the nearest of the names `known`."""
    ends = {k.rpartition(".")[2]: k for k in sorted(known)} | {k: k for k in known}
    near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=4, cutoff=0.5)
    near += [n for n in difflib.get_close_matches(pattern, known, n=4, cutoff=0.5) if n not in near]
    shown = [ends[n] for n in near] or sorted(known)[:8]
    return (
        f"{setting}: {pattern!r} matches no {what} of the model; it has such as "
        f"{', '.join(dict.fromkeys(shown))}"
    )
