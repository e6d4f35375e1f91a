"""Pretrain and fine-tune Hugging Face causal language models that do not fit on one GPU."""

import gc
import logging

__version__ = "0.1.0"

# torch and transformers make half a million objects that stay: Python would search all of them for
# reference cycles six times while they are imported, 0.4 of 4 s. A run puts this back at its end.
GC_BEFORE = gc.get_threshold()
GC_RAISED = (*GC_BEFORE[:2], 100)
gc.set_threshold(*GC_RAISED)

# transformers imports peft, and peft bitsandbytes where it is installed; on a CPU without one more
# package that says, in every program, that a faster 4-bit product is not there.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
