"""Pretrain and fine-tune Hugging Face causal language models that do not fit on one GPU."""

import logging

__version__ = "0.1.0"

# transformers imports peft, and peft bitsandbytes where it is installed; on a CPU without one more
# package that says, in every program, that a faster 4-bit product is not there.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
