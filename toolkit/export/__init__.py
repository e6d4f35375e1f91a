"""A checkpoint or a live model becomes a Hugging Face or a PEFT folder: one writer, three sources.

consolidation  the door for checkpoints      sources  a checkpoint's tensors, and a merge's
live           the door for a running model  writer   the folder on the disk
plan           what the folder consists of   weight_file  one file: its bytes, and their hashes
continuation   the adapter that a run continues
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.export.adapter_proof import prove_adapter
    from toolkit.export.consolidation import consolidate
    from toolkit.export.continuation import check_adapter, load_adapter
    from toolkit.export.live import export_live, export_step, exported

import_when_used(__name__)

__all__ = [
    "check_adapter",
    "consolidate",
    "export_live",
    "export_step",
    "exported",
    "load_adapter",
    "prove_adapter",
]
