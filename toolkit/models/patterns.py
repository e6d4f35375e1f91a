"""Match modules and parameters by the patterns that a config gives."""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from toolkit.errors import ModelError


def matching_modules(
    model: nn.Module, patterns: Iterable[str], setting: str, called: bool = False
) -> dict[str, nn.Module]:
    """Find the modules that match any of `patterns`, in the order of definition.

    A pattern is a class name, a module's full name, or the end of a full name after a dot. `*`
    matches any text, dots included.

    Args:
        model: sharded or not.
        patterns: from the config.
        setting: name of the setting, for the error.
        called: skip containers (`ModuleList`, `ModuleDict`), which have no forward.

    Raises:
        ModelError: a pattern matches no module; the error lists similar names.
    """
    modules = dict(model.named_modules())
    classes = {name: module_class_name(module) for name, module in modules.items() if name}
    matches: set[str] = set()
    for pattern in patterns:
        matched = _match_names(pattern, classes, setting, "module")
        if called:
            containers = {
                n for n in matched if isinstance(modules[n], nn.ModuleList | nn.ModuleDict)
            }
            if containers == matched:
                name = min(containers)
                raise ModelError(
                    f"{setting}: {pattern!r} matches only {name}, which holds modules and is never "
                    f"called; name those: {name}.*"
                )
            matched -= containers
        matches |= matched
    return {name: module for name, module in modules.items() if name in matches}


def matching_parameters(model: nn.Module, patterns: Iterable[str], setting: str) -> list[str]:
    """Find the parameters that match `patterns`; each name of a tied one counts.

    See `matching_modules`.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matches = [_match_names(p, dict.fromkeys(names), setting, "parameter") for p in patterns]
    return [name for name in names if any(name in matched for matched in matches)]


def _match_names(
    pattern: str, classes: Mapping[str, str | None], setting: str, kind_of_name: str
) -> set[str]:
    """Find the names that a pattern matches; `classes` maps names to class names."""
    matched = {
        name
        for name, class_name in classes.items()
        if pattern == class_name or fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
    }
    if not matched:
        candidates = {*map(replace_numbers, classes), *filter(None, classes.values())}
        raise ModelError(format_no_match(setting, pattern, kind_of_name, candidates))
    return matched


def module_class_name(module: object) -> str:
    """Return the name of an object's class as it was before sharding replaced it."""
    name = type(module).__name__
    before = type(module).__mro__[2:3]
    return before[0].__name__ if before and name == f"FSDP{before[0].__name__}" else name


def replace_numbers(name: str) -> str:
    """Replace the numbers in a name by `*`, so that the layers of a stack share a name."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def format_no_match(setting: str, pattern: str, kind_of_name: str, candidates: set[str]) -> str:
    """Format the error for a pattern that matches nothing, with the most similar names."""
    ends = {k.rpartition(".")[2]: k for k in sorted(candidates)} | {k: k for k in candidates}
    near = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=4, cutoff=0.5)
    near += [
        n for n in difflib.get_close_matches(pattern, candidates, n=4, cutoff=0.5) if n not in near
    ]
    suggestions = [ends[n] for n in near] or sorted(candidates)[:8]
    return (
        f"{setting}: {pattern!r} matches no {kind_of_name} of the model; it has such as "
        f"{', '.join(dict.fromkeys(suggestions))}"
    )
