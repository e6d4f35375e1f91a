"""The keys of another tool's config, and their translation to the names of Trainer and TRL."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import ConfigError, is_secret_name, looks_secret


class Keys:
    """The keys of another tool's config that are not converted yet.

    `settings` and `notes` collect the results of the conversion.

    Args:
        unconverted: key -> value. Each key is removed when it is converted.
        notes: notes to begin with.
    """

    def __init__(self, unconverted: dict[str, Any], notes: Iterable[str] = ()) -> None:
        self.unconverted = unconverted
        self.notes = list(notes)
        self.settings: dict[str, Any] = {}

    def note(self, key: str, reason: str, value: Any = None) -> None:
        """Add a note on a key that is not converted or changes its meaning.

        Args:
            key: name of the key.
            reason: the reason, and what to do.
            value: value to show after the key, at most 60 characters; omitted if it is None or a
                secret.
        """
        is_secret = is_secret_name(key) or looks_secret(str(value))
        text = "" if value is None or is_secret else f" {str(value)[:60]}"
        self.notes.append(f"{key}{text}: {reason}")

    def take(self, *names: str) -> tuple[str, Any]:
        """Remove the first of `names` that is present, which marks it as converted.

        Returns:
            (key, value); ("", None) if none of them is present.
        """
        name = next((name for name in names if name in self.unconverted), "")
        return name, self.unconverted.pop(name, None)

    def take_all(self, names: Iterable[str]) -> dict[str, Any]:
        """Remove all of `names` that are present, so that they count as converted; return them."""
        return {name: self.unconverted.pop(name) for name in names if name in self.unconverted}

    def note_settings(self, reasons: Mapping[str, str], harmless: Sequence[Any] = ()) -> None:
        """Remove settings that cannot be converted, and add a note for each that has an effect.

        Args:
            reasons: names of a setting, separated by spaces -> why it is not converted. Only the
                first name that is present is removed.
            harmless: values without an effect, in addition to None and False.
        """
        for names, reason in reasons.items():
            key, value = self.take(*names.split())
            is_harmless = value in harmless and value is not True  # True == 1
            if value not in (None, False) and not is_harmless:
                self.note(key, reason, value)

    def note_all(self, section: str, settings: Mapping[str, Any], reason: str) -> None:
        """Add a note for each of `settings`, all with the same reason.

        Args:
            section: text before their names, followed by a dot; "" if there is none.
            settings: name -> value.
            reason: why they are not converted.
        """
        for name, value in settings.items():
            self.note(f"{section}.{name}" if section else name, reason, value)

    def finish(
        self, settings: dict[str, Any], objective: str, without_effect: Set[str]
    ) -> "Translation":
        """Return the `Translation`: the translated keys, all remaining keys, and the notes.

        Args:
            settings: the translated keys. A remaining key of the same name replaces the value.
            objective: the training objective, as in `Translation`.
            without_effect: keys to drop. One note lists those that are present.
        """
        if unused := sorted(without_effect & {*self.unconverted}):
            self.take_all(unused)
            self.note(", ".join(unused), "no effect here")
        return Translation(settings | self.unconverted, objective, self.notes)


@dataclass
class Translation:
    """The settings of another tool, translated to the names of Trainer, TRL and PEFT."""

    settings: dict[str, Any]
    """Key of transformers' TrainingArguments, TRL or PEFT -> value. Includes the tool's defaults
    that differ from those of the toolkit."""
    objective: str = ""
    """dpo, orpo, kto, cpo or reward (see `preferences`); empty for supervised training."""
    notes: list[str] = field(default_factory=list)


def rename_keys(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """Remove settings from `keys`, and return those that are present as new name -> value.

    Settings that are None are removed but not returned.

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
    """Split a text such as `a,b` into a list; return any other value unchanged."""
    if isinstance(value, str) and "," in value:
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def refuse_settings(keys: Keys, tool: str, reasons: Mapping[str, str]) -> None:
    """Remove settings that cannot be converted; raise ConfigError if one of them is on.

    Args:
        keys: the keys of the config.
        tool: name of the tool.
        reasons: setting -> why it cannot be converted. False, 0, "none" and empty values are off.
    """
    for name, reason in reasons.items():
        key, value = keys.take(name)
        if key and value not in (None, False, 0, "", "none", [], {}):
            raise refusal(tool, f"{key} {value}", reason)


def refusal(tool: str, setting: str, reason: str) -> ConfigError:
    """Create the error for a setting of a tool that cannot be converted."""
    return ConfigError(f"{tool}'s {setting} cannot be converted: {reason}")
