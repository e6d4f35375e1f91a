"""Architectures of well-known models, without weights, as the toolkit brings them along."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.planning import published


@dataclass(frozen=True)
class Published:
    """One model as it is on the Hub."""

    config: dict[str, Any]
    """Of its config.json what a model without weights needs."""
    parameters: int
    """Tied ones once; the Hub shows as many, where the checkpoint stores tied ones once."""


PUBLISHED = {name: Published(**found) for name, found in published.published().items()}


def folder_of(name: str, folder: Path) -> Path:
    """Write config.json of the published model `name` below `folder`; return where it lies."""
    return published.write_shape(name, folder)
