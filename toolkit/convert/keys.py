"""Keys of another tool's config: carried one after the other, or named in a note."""

from collections.abc import Iterable
from typing import Any

from toolkit.errors import is_secret_name, looks_secret


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
