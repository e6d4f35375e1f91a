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
    """Find the modules whose name or class matches any pattern, in the order of definition.

    A pattern is a class name, a full module name, or its last parts, such as `mlp.up_proj`. `*`
    matches any text, dots included.

    Args:
        model: sharded or not.
        patterns: patterns from the config.
        setting: name of the setting, for the message.
        called: skip containers (`ModuleList`, `ModuleDict`), which are never called.

    Returns:
        Name -> module.

    Raises:
        ModelError: a pattern matches no module, or only containers if `called` is set. The error
            lists similar names.
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
    """Return the names of parameters that match any pattern, in the order of definition.

    For patterns see `matching_modules`. Every name of a tied parameter is matched separately.
    Raises ModelError if a pattern matches none.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    matches = [_match_names(p, dict.fromkeys(names), setting, "parameter") for p in patterns]
    return [name for name in names if any(name in matched for matched in matches)]


def _match_names(
    pattern: str, classes: Mapping[str, str | None], setting: str, kind_of_name: str
) -> set[str]:
    """Return the names that match a pattern, or whose class name equals it.

    Args:
        pattern: the pattern.
        classes: name -> class name, or None for a parameter.
        setting: name of the setting, for the message.
        kind_of_name: "module" or "parameter", for the message.

    Raises:
        ModelError: no name matches.
    """
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
    """Return the class name of an object, without the prefix "FSDP" that `fully_shard` adds."""
    name = type(module).__name__
    before = type(module).__mro__[2:3]
    return before[0].__name__ if before and name == f"FSDP{before[0].__name__}" else name


def replace_numbers(name: str) -> str:
    """Replace the numbers in a module name by `*`, as in `layers.*.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def format_no_match(setting: str, pattern: str, kind_of_name: str, candidates: set[str]) -> str:
    """Format the message for a pattern that matches nothing, with the most similar candidates."""
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
