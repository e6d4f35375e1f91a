"""A checkpoint or a live model becomes a Hugging Face or a PEFT folder."""

from toolkit.export.consolidation import consolidate

__all__ = ["consolidate"]
