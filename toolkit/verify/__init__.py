"""Proof that a checkpoint is intact and an export holds it, with no code of the exporter."""

from toolkit.verify.reports import verify_checkpoint, verify_export

__all__ = ["verify_checkpoint", "verify_export"]
