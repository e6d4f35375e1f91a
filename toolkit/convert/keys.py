"""The keys of another tool's config, and their translation to the names of Trainer and TRL."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import ConfigError, is_secret_name, looks_secret


class Keys:
    """Keys of another tool's config that are not converted yet, with settings and notes so far.

    Args:
        unconverted: key -> value. Each key is removed when it is converted.
        notes: notes to begin with.
    """

    def __init__(self, unconverted: dict[str, Any], notes: Iterable[str] = ()) -> None:
        self.unconverted = unconverted
        self.notes = list(notes)
        self.settings: dict[str, Any] = {}

    def note(self, key: str, reason: str, value: Any = None) -> None:
        """Add a note on a key that is not converted or changes its meaning; hide secret values."""
        is_secret = is_secret_name(key) or looks_secret(str(value))
        text = "" if value is None or is_secret else f" {str(value)[:60]}"
        self.notes.append(f"{key}{text}: {reason}")

    def take(self, *names: str) -> tuple[str, Any]:
        """Remove the first of `names` that is present, so that it counts as converted.

        Returns:
            The key and its value; "" and None if none is present.
        """
        name = next((name for name in names if name in self.unconverted), "")
        return name, self.unconverted.pop(name, None)

    def take_all(self, names: Iterable[str]) -> dict[str, Any]:
        """Remove all of `names` that are present, so that they count as converted; return them."""
        return {name: self.unconverted.pop(name) for name in names if name in self.unconverted}

    def note_settings(self, reasons: Mapping[str, str], harmless: Sequence[Any] = ()) -> None:
        """Remove settings that cannot be converted, and add a note for those that have an effect.

        Args:
            reasons: names of a setting, separated by spaces -> why it is not converted.
            harmless: values without an effect, in addition to None and False.
        """
        for names, reason in reasons.items():
            key, value = self.take(*names.split())
            is_harmless = value in harmless and value is not True  # True == 1
            if value not in (None, False) and not is_harmless:
                self.note(key, reason, value)

    def note_all(self, section: str, settings: Mapping[str, Any], reason: str) -> None:
        """Add a note for each of `settings` that says why it is not converted.

        `section` is put before their names; "" if there is none.
        """
        for name, value in settings.items():
            self.note(f"{section}.{name}" if section else name, reason, value)

    def finish(
        self, settings: dict[str, Any], objective: str, without_effect: Set[str]
    ) -> "Translation":
        """Build the `Translation` from the translated keys, the remaining ones and the notes.

        Args:
            settings: the translated keys. A remaining key of the same name overrides one.
            objective: what is trained, as in `Translation`.
            without_effect: keys to drop; one note lists those that are present.
        """
        if unused := sorted(without_effect & {*self.unconverted}):
            self.take_all(unused)
            self.note(", ".join(unused), "no effect here")
        return Translation(settings | self.unconverted, objective, self.notes)


@dataclass
class Translation:
    """A config of another tool, translated to the names of Trainer, TRL and PEFT."""

    settings: dict[str, Any]
    """Key of transformers' TrainingArguments, TRL or PEFT -> value. Includes the tool's defaults
    that differ from those of the toolkit."""
    objective: str = ""
    """dpo, orpo, kto, cpo or reward (see `preferences`); empty for supervised training."""
    notes: list[str] = field(default_factory=list)


def rename_keys(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """Remove settings from `keys`, and return those that are present under new names.

    Args:
        keys: the keys of the config.
        names: new name -> the tool's names for it, separated by spaces. The first present one wins.
    """
    renamed = {}
    for new, old in names.items():
        key, value = keys.take(*old.split())
        if key and value is not None:
            renamed[new] = value
    return renamed


def split_names(value: Any) -> Any:
    """Split a text such as `a,b` into a list; return a single name or a list unchanged."""
    if isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def refuse_settings(keys: Keys, tool: str, reasons: Mapping[str, str]) -> None:
    """Raise ConfigError if a setting is on that has no equivalent and affects the training.

    Args:
        keys: the keys of the config, from which the settings are removed.
        tool: name of the tool.
        reasons: setting -> why it cannot be converted. False, 0 and empty values are harmless.
    """
    for name, reason in reasons.items():
        key, value = keys.take(name)
        if key and value not in (None, False, 0, "", "none", [], {}):
            raise refusal(tool, f"{key} {value}", reason)


def refusal(tool: str, setting: str, reason: str) -> ConfigError:
    """Build the error for a setting of a tool that cannot be converted."""
    return ConfigError(f"{tool}'s {setting} cannot be converted: {reason}")
