"""Save, find and restore the state of a run, and manage its output_dir.

saving          save a checkpoint, during or behind training; delete old checkpoints
resuming        find the newest intact checkpoint and restore it
state           tensors and other values of the state; random state
shards          the tensors in torch's DCP format: which rank writes what, hashes, reading
commit          commit, verify and list checkpoints, safe against crashes
names           names of files and folders in a run directory
store           the protocol of a storage   (local_folder: on a disk, object_store: by fsspec)
run_folder      the output_dir of a run     (lock: one process at a time)
disk_space      estimate the disk space that a run needs
reference_file  the stored reference values of preference tuning
sources         find the weights in a checkpoint of this or another tool
carried         tensors of the source model that no parameter holds
adapter_source  find the adapter that a run continues
summary         describe a run for `toolkit inspect`, exports and model cards
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.checkpoint.adapter_source import apply_adapter_settings
    from toolkit.checkpoint.resuming import find_newest, find_resumable, restore, resume
    from toolkit.checkpoint.run_folder import RunFolder, local_copy
    from toolkit.checkpoint.saving import save, saved_line
    from toolkit.checkpoint.state import TrainState
    from toolkit.training.background import wait

import_when_used(__name__)
