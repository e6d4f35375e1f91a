"""A checkpoint or a live model becomes a Hugging Face or a PEFT folder: one writer, three sources.

consolidation  the door for checkpoints      sources  a checkpoint's tensors, and a merge's
live           the door for a running model  writer   the folder on the disk
plan           what the folder consists of   weight_file  one file: its bytes, and their hashes
"""

from toolkit.export.adapter_proof import prove_adapter
from toolkit.export.consolidation import consolidate
from toolkit.export.live import export_live, export_step, exported

__all__ = ["consolidate", "export_live", "export_step", "exported", "prove_adapter"]
