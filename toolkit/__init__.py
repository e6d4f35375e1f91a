"""Pretrain and fine-tune Hugging Face causal language models that do not fit on one GPU."""

__version__ = "0.1.0"
