"""The run's folder: save, find and restore the state of a run; which checkpoints stay.

state      what a run's state consists of, and its form in a checkpoint
saving     save, at once or behind the loop       resuming   find, restore, resume
shards     torch's DCP files, hashed              rng_state  random numbers of one rank
commit     the crash-safe folder protocol         durable    fsync
retention  what is pruned                         store      a disk or an object store
run_folder the output_dir of a start      run_dir    which run a folder holds
disk       whether what is written will fit
fetch      a copy from a store                    sources    weights in anybody's checkpoint
adapter    the adapter of a checkpoint            facts      what export and card tell of a run
summary    `toolkit inspect`
"""

from toolkit.checkpoint.resuming import find, newest, restore, resume
from toolkit.checkpoint.run_folder import RunFolder
from toolkit.checkpoint.saving import save, wait
from toolkit.checkpoint.state import TrainState

__all__ = ["RunFolder", "TrainState", "find", "newest", "restore", "resume", "save", "wait"]
