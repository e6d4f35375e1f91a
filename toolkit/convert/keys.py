"""The keys of another tool's config, and their translation to the names of Trainer and TRL."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import ConfigError, is_secret_name, looks_secret


class Keys:
    """Hold the keys that nothing has taken yet, and what has become of the others."""

    def __init__(self, left: dict[str, Any], notes: Iterable[str] = ()) -> None:
        self.left, self.notes = left, list(notes)
        self.settings: dict[str, Any] = {}

    def note(self, key: str, why: str, value: Any = None) -> None:
        """Name a key that is not carried, or means something else here."""
        secret = is_secret_name(key) or looks_secret(str(value))
        shown = "" if value is None or secret else f" {str(value)[:60]}"
        self.notes.append(f"{key}{shown}: {why}")

    def take(self, *names: str) -> tuple[str, Any]:
        """Return the first of the keys that is there, with its value, which counts as carried; an
        empty key and None where none is.
        """
        name = next((name for name in names if name in self.left), "")
        return name, self.left.pop(name, None)

    def popped(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of the keys that are there, which count as carried."""
        return {name: self.left.pop(name) for name in names if name in self.left}

    def note_settings(self, reasons: Mapping[str, str], harmless: Sequence[Any] = ()) -> None:
        """Take settings that cannot be carried over, and note those that are in effect.

        Args:
            reasons: names of a setting, separated by spaces -> why it is not carried over.
            harmless: values without an effect, in addition to None and False.
        """
        for names, reason in reasons.items():
            key, value = self.take(*names.split())
            is_harmless = value in harmless and value is not True  # True == 1
            if value not in (None, False) and not is_harmless:
                self.note(key, reason, value)

    def note_all(self, section: str, settings: Mapping[str, Any], reason: str) -> None:
        """Note every setting of a section that is not carried over."""
        for name, value in settings.items():
            self.note(f"{section}.{name}" if section else name, reason, value)

    def finish(
        self, settings: dict[str, Any], objective: str, without_effect: Set[str]
    ) -> "Translation":
        """Build the translation from translated settings and the keys that are left.

        Keys in `without_effect` are dropped with one note.
        """
        if unused := sorted(without_effect & {*self.left}):
            self.popped(unused)
            self.note(", ".join(unused), "no effect here")
        return Translation(settings | self.left, objective, self.notes)


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
            raise refusal(tool, f"{key} {value}", reason)


def refusal(tool: str, setting: str, reason: str) -> ConfigError:
    """Build the error for a setting of a tool that cannot be carried over."""
    return ConfigError(f"{tool}'s {setting} cannot be converted: {reason}")
