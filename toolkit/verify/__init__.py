"""Proof that a checkpoint is intact and an export holds it, with no code of the exporter."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.verify.findings import Finding, Report
    from toolkit.verify.verification import is_export, verify_checkpoint, verify_export

import_when_used(__name__)

__all__ = ["Finding", "Report", "is_export", "verify_checkpoint", "verify_export"]
