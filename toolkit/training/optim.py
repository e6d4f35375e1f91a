"""The optimizer and the learning-rate schedule of `optim`.

Owns which optimizer steps which parameter, at which rate and decay. Knows nothing of the loop.
Build the optimizer after sharding, so that its state is born sharded.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.settings import OptimConfig
from toolkit.errors import ConfigError, ShardingError
from toolkit.formats import reshard
from toolkit.models.packed_linear import import_bitsandbytes
from toolkit.models.peft_model import base_of, trained_module
from toolkit.models.reward import reward_head
from toolkit.training.sharded_optimizers import BLOCK, Adafactor, AdamW8bit, Muon, orthogonalise

_SMALL = 4096  # values: below it 8 bits save nothing, as bitsandbytes has it
_DECAY_STEPS = 0.1  # of all, of warmup_stable_decay where nothing else is said
_LEAST = 0.1  # of the peak, where cosine_with_min_lr and its kin are told no end
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_optimizer(cfg: OptimConfig, max_steps: int = -1) -> None:
    """Refuse what cannot run, before anything is loaded; ConfigError. `max_steps` -1: not known."""
    if cfg.optim == "adamw_8bit":
        import_bitsandbytes("optim.optim: adamw_8bit")
    if cfg.optim == "muon":
        try:
            orthogonalise(torch.eye(2))
        except ShardingError as error:
            raise ConfigError(f"optim.optim: muon: {error}") from error
    steps = max_steps if max_steps > 0 else 10**9
    _schedule(torch.optim.SGD([torch.zeros(1)], lr=0.0), cfg, steps)


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer of `cfg` over the trainable parameters of `model`.

    Matrices decay; vectors and scalars (norms, biases, also those of experts in one tensor) do not.
    AdamW is exact on DTensors, and fused 4 to 6 times faster than the plain loop on
    CPU; its state is two tensors of the parameters' size and dtype. The others: see
    `sharded_optimizers`.
    """
    reshard(model)
    groups: dict[tuple, list[nn.Parameter]] = {}
    for parameter, decays, own in _kinds(model, cfg):
        # One call does not take sharded and replicated parameters together.
        key = (own, not isinstance(parameter, DTensor), not decays)
        groups.setdefault(key, []).append(parameter)
    listed: list[dict[str, Any]] = [
        {
            "params": parameters,
            "lr": cfg.learning_rate,
            "weight_decay": 0.0 if plain else cfg.weight_decay,
            "own": own,
        }
        for (own, _, plain), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]
    if cfg.optim == "adafactor":
        return Adafactor(listed, lr=cfg.learning_rate)
    adam: dict[str, Any] = {
        "lr": cfg.learning_rate,
        "betas": (cfg.adam_beta1, cfg.adam_beta2),
        "eps": cfg.adam_epsilon,
    }
    if cfg.optim == "adamw_torch_fused":
        return torch.optim.AdamW(listed, fused=True, **adam)
    return {"adamw_8bit": AdamW8bit, "muon": Muon}[cfg.optim](listed, **adam)


def _kinds(model: nn.Module, cfg: OptimConfig) -> Iterator[tuple[nn.Parameter, bool, bool]]:
    """Yield each trained parameter, whether it decays, and whether the optimizer has its own way
    with it, not AdamW's.
    """
    embeddings, ends = _embeddings(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Biases of experts are stacked, and Mamba marks its decay rates.
        unmarked = not getattr(parameter, "_no_weight_decay", False)
        matrix = parameter.ndim >= 2 and not name.endswith(("_bias", ".A_log")) and unmarked
        own = False
        if cfg.optim == "muon":
            own = matrix and parameter.ndim <= 3 and id(parameter) not in embeddings | ends
        elif cfg.optim == "adamw_8bit":  # embeddings keep 32 bits, as transformers' Trainer has it
            blocks = parameter.ndim >= 2 and parameter.shape[1:].numel() % BLOCK == 0
            own = blocks and parameter.numel() >= _SMALL and id(parameter) not in embeddings
        yield parameter, matrix, own


def compute_state_bytes(model: nn.Module, cfg: OptimConfig) -> int:
    """Return the bytes of the state of `build_optimizer`'s optimizer, of all ranks together, for a
    model on meta or not.
    """

    def nbytes(parameter: nn.Parameter, own: bool) -> int:
        values, shape = parameter.numel(), parameter.shape
        if cfg.optim == "adafactor":  # of a matrix sums of rows and columns
            return 4 * (values // shape[-1] + values // shape[-2] if len(shape) > 1 else values)
        if not own:
            return 2 * values * parameter.itemsize
        if cfg.optim == "adamw_8bit":
            return 2 * values + 8 * values // BLOCK
        return values * parameter.itemsize

    return sum(nbytes(parameter, own) for parameter, _, own in _kinds(model, cfg))


def describe_state_dtypes(optimizer: torch.optim.Optimizer) -> str:
    """Return what an optimizer of `build_optimizer` holds its state in, the largest part first."""
    held: Counter[str] = Counter()
    for group in optimizer.param_groups:
        eight = group["own"] and isinstance(optimizer, AdamW8bit)
        for p in group["params"]:
            held["8 bits" if eight else str(p.dtype).removeprefix("torch.")] += p.numel()
    return "/".join(kind for kind, _ in held.most_common())


def _embeddings(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return ids: of what looks values up or convolves, and of the model's embedding and head."""
    kinds = (nn.Embedding, *_CONVOLUTIONS)
    inner = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        return inner, set()
    ends = (base.get_input_embeddings(), base.get_output_embeddings(), reward_head(base))
    modules = [m for m in map(trained_module, ends) if m is not None]
    return inner, {id(p) for module in modules for p in module.parameters()}


def build_scheduler(
    optimizer: torch.optim.Optimizer, cfg: OptimConfig, max_steps: int
) -> LRScheduler:
    """Return transformers' schedule over `max_steps`; ConfigError: `lr_scheduler_kwargs`. Says
    where the run ends within its warm-up.
    """
    warmup = _warmup(cfg, max_steps)
    if 0 < max_steps <= warmup:
        ranks.log_once(
            f"WARNING: the run has {max_steps} steps, and optim.warmup_steps are {warmup}: it ends "
            f"before its learning rate has risen to {cfg.learning_rate:g}"
        )
    return _schedule(optimizer, cfg, max_steps)


def _warmup(cfg: OptimConfig, max_steps: int) -> int:
    if cfg.warmup_steps >= 1:
        return int(cfg.warmup_steps)
    return min(math.ceil(cfg.warmup_steps * max_steps), max(max_steps - 1, 0))  # a share of 1 step


def _schedule(optimizer: torch.optim.Optimizer, cfg: OptimConfig, max_steps: int) -> LRScheduler:
    kind, warmup = cfg.lr_scheduler_type, _warmup(cfg, max_steps)
    if kind == "constant" and warmup > 0:
        kind = "constant_with_warmup"  # transformers' `constant` would ignore the warm-up
    extra: dict[str, Any] = dict(cfg.lr_scheduler_kwargs)
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and "min_lr" not in extra:
        extra.setdefault("min_lr_rate", _LEAST)
    if kind == "warmup_stable_decay":
        decay = extra.setdefault("num_decay_steps", math.ceil(_DECAY_STEPS * max_steps))
        if warmup + decay > max_steps:
            raise ConfigError(
                f"optim.warmup_steps {warmup} and num_decay_steps {decay} are more than the "
                f"{max_steps} steps of the run; lower one of them"
            )
    try:
        if extra and kind in ("constant", "constant_with_warmup"):
            raise TypeError(f"{kind} takes none")
        from transformers import get_scheduler  # its file imports PEFT; see adapters.lora

        return get_scheduler(kind, optimizer, warmup, max_steps, scheduler_specific_kwargs=extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim.lr_scheduler_kwargs {cfg.lr_scheduler_kwargs} are not those of {kind}: {error}"
        ) from error
