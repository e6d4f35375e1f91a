"""A config of another tool under the names that `converter` reads: those of Trainer and TRL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.convert.keys import Keys
from toolkit.errors import ConfigError


@dataclass
class Translation:
    """Settings of another tool, renamed; values that mean something else are changed."""

    settings: dict[str, Any]
    """Keys of transformers' TrainingArguments, TRL and PEFT -> values. Defaults of the tool that
    differ from the toolkit's are filled in."""
    objective: str = ""
    """As in `preferences`: dpo, orpo, kto, cpo, reward, or empty for supervised training."""
    notes: list[str] = field(default_factory=list)


def rename_keys(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """Take settings out of `keys` and return them under other names.

    Args:
        names: new name -> the tool's names for it, separated by spaces; the first that is set wins.
    """
    renamed = {}
    for new, old in names.items():
        key, value = keys.take(*old.split())
        if key and value is not None:
            renamed[new] = value
    return renamed


def split_names(value: Any) -> Any:
    """Return `a,b` as `[a, b]`, and a single name or a list as it is."""
    if isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def refuse_settings(keys: Keys, tool: str, reasons: Mapping[str, str]) -> None:
    """Raise ConfigError if a setting is on that has no equivalent and would change the training.

    Args:
        reasons: setting -> why it cannot be carried over. False, 0 and empty values are harmless.
    """
    for name, reason in reasons.items():
        key, value = keys.take(name)
        if key and value not in (None, False, 0, "", "none", [], {}):
            raise ConfigError(f"{tool}'s {key} {value} cannot be converted: {reason}")
