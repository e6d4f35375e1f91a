"""The run's folder: save, find and restore the state of a run; which checkpoints stay.

store      a disk or an object store            commit     the crash-safe folder protocol
retention  what is pruned                       state      what a run's state consists of
saving     save, at once or behind the loop     resuming   find, restore, resume
shards     torch's DCP files, hashed            rng_state  random numbers of one rank
run_folder the output_dir of a run              disk       whether what is written will fit
sources    weights in anybody's checkpoint facts      what export and card tell of a run
lock       one process at a time            summary    `toolkit inspect`
"""

from toolkit.checkpoint.resuming import find_resumable, newest, restore, resume
from toolkit.checkpoint.run_folder import RunFolder, local_copy
from toolkit.checkpoint.saving import save, saved_line
from toolkit.checkpoint.state import TrainState
from toolkit.training.background import wait
