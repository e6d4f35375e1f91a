"""The run's folder: save, find and restore the state of a run; which checkpoints stay.

store        the protocol of storage             commit     the crash-safe protocol of attempts
local_folder storage on a disk                   object_store storage on an object store
attempts     names of the protocol               retention  what is pruned
saving       save, at once or behind the loop    resuming   find, restore, resume
state        what a run's state consists of      rng_state  random numbers of one rank
shards       torch's DCP files, hashed           shard_plan which rank writes what
reference    of preference tuning, evaluated or read; reference_file: its file and its parts
run_folder   the output_dir of a run             disk       whether what is written will fit
sources      weights in anybody's checkpoint     facts      what export and card tell of a run
carried      tensors that no parameter takes     summary    `toolkit inspect`
lock         one process at a time           adapter_source  the adapter that a run continues
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.checkpoint.adapter_source import adopt_adapter
    from toolkit.checkpoint.resuming import find_resumable, newest, restore, resume
    from toolkit.checkpoint.run_folder import RunFolder, local_copy
    from toolkit.checkpoint.saving import save, saved_line
    from toolkit.checkpoint.state import TrainState
    from toolkit.training.background import wait

import_when_used(__name__)
