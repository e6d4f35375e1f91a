"""Proof that a checkpoint is intact and an export holds it, with no code of the exporter."""

from toolkit.verify.findings import Finding, Report
from toolkit.verify.reports import is_export, verify_checkpoint, verify_export

__all__ = ["Finding", "Report", "is_export", "verify_checkpoint", "verify_export"]
