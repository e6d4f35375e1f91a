"""A checkpoint or a live model becomes a Hugging Face or a PEFT folder: one writer, three sources.

consolidation  the door for checkpoints      saved      a checkpoint's tensors, by their digests
live           the door for a running model  merge      a base with an adapter merged in
plan, adapter  what the folder consists of   writer     the bytes, and the folder on the disk
"""

from toolkit.export.adapter_proof import prove_adapter
from toolkit.export.consolidation import consolidate
from toolkit.export.live import export_live, export_step, exported

__all__ = ["consolidate", "export_live", "export_step", "exported", "prove_adapter"]
