"""The optimizer and the learning-rate schedule.

Owns which parameters decay and which implementation runs. Knows nothing of the loop. Build the
optimizer after sharding, so that its state is born sharded.
"""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from toolkit.config.settings import OptimConfig
from toolkit.formats import reshard


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return a fused AdamW over the trainable parameters of `model`.

    Matrices decay; vectors and scalars (norms, biases) do not. Fused is exact on DTensors and 4 to
    6 times faster than the plain loop on CPU. State: two tensors of the parameters' size and dtype.
    """
    reshard(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        # One call does not take sharded and replicated parameters together.
        {
            "params": [p for p in trainable if decays(p) and isinstance(p, DTensor) == sharded],
            "weight_decay": decay,
        }
        for sharded in (True, False)
        for decays, decay in (
            (lambda p: p.ndim >= 2, cfg.weight_decay),
            (lambda p: p.ndim < 2, 0.0),
        )
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=cfg.learning_rate,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        eps=cfg.adam_epsilon,
        fused=True,
    )


def build_scheduler(
    optimizer: torch.optim.Optimizer, cfg: OptimConfig, max_steps: int
) -> LRScheduler:
    """Return transformers' schedule of `cfg.lr_scheduler_type` over `max_steps` optimizer steps."""
    kind, warmup = cfg.lr_scheduler_type, int(cfg.warmup_steps)
    if cfg.warmup_steps < 1:
        warmup = math.ceil(cfg.warmup_steps * max_steps)
    if kind == "constant" and warmup > 0:
        kind = "constant_with_warmup"  # transformers' `constant` would ignore the warm-up
    extra = {"min_lr_rate": cfg.min_lr_rate} if kind == "cosine_with_min_lr" else None
    return get_scheduler(kind, optimizer, warmup, max_steps, scheduler_specific_kwargs=extra)
