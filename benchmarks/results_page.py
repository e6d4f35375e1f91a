"""The page of `make results`: docs/results.md with its plots, and the figures of README."""

from pathlib import Path
from typing import Any


def write_page(
    records: dict[str, dict[str, Any] | None], commit: str, page: Path, readme: Path
) -> list[str]:
    """Write the page; return a line per file that was written."""
    return []
