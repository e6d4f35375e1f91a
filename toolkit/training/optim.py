"""The optimizer and the learning-rate schedule of the section `optim`.

Decides which parameters decay, and which use AdamW or the special update of another optimizer.
Build the optimizer after sharding, so that its state is created sharded.
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
from toolkit.mesh import count_gathered_values
from toolkit.models.packed_linear import import_bitsandbytes
from toolkit.models.peft_model import base_of, trained_module
from toolkit.models.reward import reward_head
from toolkit.training.sharded_optimizers import BLOCK, Adafactor, AdamW8bit, Muon, orthogonalise

# Parameters with fewer values have states of 32 bits, as in bitsandbytes: 8 bits save nothing.
_MIN_8BIT_VALUES = 4096
_DECAY_SHARE = 0.1  # of all steps: the default of warmup_stable_decay
_MIN_RATE_SHARE = 0.1  # of the peak: the default of cosine_with_min_lr and its variants
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_optimizer(cfg: OptimConfig, max_steps: int = -1) -> None:
    """Raise a ConfigError if the optimizer or the schedule of the settings cannot be built.

    Needs no model, so it can run before the model is loaded.

    Args:
        cfg: the section `optim` of the config.
        max_steps: number of steps of the run; -1: unknown.

    Raises:
        ConfigError: a package or function is missing, or the schedule's settings are not valid.
    """
    if cfg.optim == "adamw_8bit":
        import_bitsandbytes("optim.optim: adamw_8bit")
    if cfg.optim == "muon":
        try:
            orthogonalise(torch.eye(2))
        except ShardingError as error:
            raise ConfigError(f"optim.optim: muon: {error}") from error
    steps = max_steps if max_steps > 0 else 10**9
    _create_schedule(torch.optim.SGD([torch.zeros(1)], lr=cfg.learning_rate), cfg, steps)


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer for the trainable parameters of a sharded model, in parameter groups.

    Matrices get weight decay. Vectors and scalars (norms, biases, also the stacked biases of
    experts) get none. The model is resharded first.

    The class is that of `optim.optim`: fused AdamW, `AdamW8bit`, `Muon` or `Adafactor`. AdamW is
    exact on DTensors. Its fused version is 4 to 6 times faster on CPU than a loop over parameters.
    Its state is two tensors of the parameters' size and dtype. For the other optimizers, see
    `sharded_optimizers`.
    """
    reshard(model)
    parameters_by_key: dict[tuple, list[nn.Parameter]] = {}
    for parameter, decays, is_special in _classify_parameters(model, cfg):
        # A fused call cannot combine sharded and replicated parameters, nor those of two meshes.
        is_replicated = not isinstance(parameter, DTensor)
        is_divided = count_gathered_values(parameter) < parameter.numel()
        key = (is_special, is_replicated, not decays, is_divided)
        parameters_by_key.setdefault(key, []).append(parameter)
    groups: list[dict[str, Any]] = []
    for key in sorted(parameters_by_key):
        is_special, _, is_undecayed, _ = key
        groups.append(
            {
                "params": parameters_by_key[key],
                "lr": cfg.learning_rate,
                "weight_decay": 0.0 if is_undecayed else cfg.weight_decay,
                "special": is_special,
            }
        )
    if cfg.optim == "adafactor":
        return Adafactor(groups, lr=cfg.learning_rate)
    adam: dict[str, Any] = {
        "lr": cfg.learning_rate,
        "betas": (cfg.adam_beta1, cfg.adam_beta2),
        "eps": cfg.adam_epsilon,
    }
    if cfg.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **adam)
    return {"adamw_8bit": AdamW8bit, "muon": Muon}[cfg.optim](groups, **adam)


def _classify_parameters(
    model: nn.Module, cfg: OptimConfig
) -> Iterator[tuple[nn.Parameter, bool, bool]]:
    """Decide for each trained parameter whether it gets weight decay, and which update it gets.

    Parameters with two or more dimensions get weight decay, embeddings included. Those whose name
    ends with `_bias` or `.A_log`, or that are marked `_no_weight_decay`, do not.
    These parameters get the special update:

    - for Muon, decayed parameters with up to 3 dimensions, without embeddings and head;
    - for 8-bit AdamW, large matrices that divide into blocks, without embeddings, with the head.

    Yields:
        The parameter; True if it gets weight decay; True if it gets the special update of the
        optimizer (8-bit states, Muon) instead of plain AdamW.
    """
    lookup_ids, end_ids = _find_embedding_and_head_ids(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Stacked biases of experts have two dimensions, and Mamba marks its decay rates.
        is_unmarked = not getattr(parameter, "_no_weight_decay", False)
        is_matrix = parameter.ndim >= 2 and not name.endswith(("_bias", ".A_log")) and is_unmarked
        is_special = False
        if cfg.optim == "muon":
            is_inner = id(parameter) not in lookup_ids | end_ids
            is_special = is_matrix and parameter.ndim <= 3 and is_inner
        elif cfg.optim == "adamw_8bit":
            # Embeddings keep 32 bits, as in transformers' Trainer.
            has_blocks = parameter.ndim >= 2 and parameter.shape[1:].numel() % BLOCK == 0
            is_large = parameter.numel() >= _MIN_8BIT_VALUES
            is_special = has_blocks and is_large and id(parameter) not in lookup_ids
        yield parameter, is_matrix, is_special


def compute_state_bytes(model: nn.Module, cfg: OptimConfig) -> int:
    """Compute the bytes of the optimizer's state, summed over all ranks, without building it.

    Args:
        model: the model, which may be on meta.
        cfg: the section `optim` of the config.
    """

    def nbytes(parameter: nn.Parameter, is_special: bool) -> int:
        values, shape = parameter.numel(), parameter.shape
        if cfg.optim == "adafactor":
            # A matrix has one value per row and per column.
            return 4 * (values // shape[-1] + values // shape[-2] if len(shape) > 1 else values)
        if not is_special:
            return 2 * values * parameter.itemsize
        if cfg.optim == "adamw_8bit":
            return 2 * values + 8 * values // BLOCK
        return values * parameter.itemsize

    kinds = _classify_parameters(model, cfg)
    return sum(nbytes(parameter, is_special) for parameter, _, is_special in kinds)


def describe_state_dtypes(optimizer: torch.optim.Optimizer) -> str:
    """Format the dtypes of an optimizer's state, the most frequent first: `8 bits/float32`.

    Args:
        optimizer: result of `build_optimizer`; its state need not exist yet.
    """
    values_by_dtype: Counter[str] = Counter()
    for group in optimizer.param_groups:
        is_8bit = group["special"] and isinstance(optimizer, AdamW8bit)
        for p in group["params"]:
            dtype = "8 bits" if is_8bit else str(p.dtype).removeprefix("torch.")
            values_by_dtype[dtype] += p.numel()
    return "/".join(dtype for dtype, _ in values_by_dtype.most_common())


def _find_embedding_and_head_ids(model: nn.Module) -> tuple[set[int], set[int]]:
    """Find the parameters that 8-bit AdamW and Muon must leave to plain AdamW.

    Returns:
        Two sets of `id()`. The first has the parameters of embeddings and convolutions, for both
        optimizers. The second has those of the input embedding, the output head and the reward
        head, for Muon.
    """
    kinds = (nn.Embedding, *_CONVOLUTIONS)
    lookup_ids = {id(p) for m in model.modules() if isinstance(m, kinds) for p in m.parameters()}
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        return lookup_ids, set()
    ends = (base.get_input_embeddings(), base.get_output_embeddings(), reward_head(base))
    modules = [m for m in map(trained_module, ends) if m is not None]
    return lookup_ids, {id(p) for module in modules for p in module.parameters()}


def build_scheduler(
    optimizer: torch.optim.Optimizer, cfg: OptimConfig, max_steps: int
) -> LRScheduler:
    """Build the learning-rate schedule of transformers for `max_steps` steps.

    If the run ends within its warm-up, a warning is logged.

    Raises:
        ConfigError: `lr_scheduler_kwargs` do not fit the schedule, or its phases exceed
            `max_steps`.
    """
    warmup = _count_warmup_steps(cfg, max_steps)
    if 0 < max_steps <= warmup:
        ranks.log_once(
            f"WARNING: the run has {max_steps} steps, and optim.warmup_steps is {warmup}: the run "
            f"ends before its learning rate has reached {cfg.learning_rate:g}"
        )
    return _create_schedule(optimizer, cfg, max_steps)


def _count_warmup_steps(cfg: OptimConfig, max_steps: int) -> int:
    """Return the number of warm-up steps.

    If `cfg.warmup_steps` is below 1, it is a share of `max_steps`, which is rounded up but leaves
    at least one step. Otherwise it is the number itself.
    """
    if cfg.warmup_steps >= 1:
        return int(cfg.warmup_steps)
    # A share of the steps, rounded up, but at least one step must follow.
    return min(math.ceil(cfg.warmup_steps * max_steps), max(max_steps - 1, 0))


def _create_schedule(
    optimizer: torch.optim.Optimizer, cfg: OptimConfig, max_steps: int
) -> LRScheduler:
    """Create the schedule, with the toolkit's defaults for arguments that are not set.

    Raises:
        ConfigError: `lr_scheduler_kwargs` do not fit the schedule, or its phases exceed
            `max_steps`.
    """
    kind = cfg.lr_scheduler_type
    warmup = _count_warmup_steps(cfg, max_steps)
    if kind == "constant" and warmup > 0:
        # transformers' `constant` would ignore the warm-up.
        kind = "constant_with_warmup"
    kwargs: dict[str, Any] = dict(cfg.lr_scheduler_kwargs)
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and "min_lr" not in kwargs:
        kwargs.setdefault("min_lr_rate", _MIN_RATE_SHARE)
    if kind == "warmup_stable_decay":
        decay = kwargs.setdefault("num_decay_steps", math.ceil(_DECAY_SHARE * max_steps))
        if warmup + decay > max_steps:
            raise ConfigError(
                f"optim.warmup_steps {warmup} and num_decay_steps {decay} exceed the {max_steps} "
                "steps of the run; lower one of them"
            )
    try:
        if kwargs and kind in ("constant", "constant_with_warmup"):
            raise TypeError(f"{kind} takes none")
        from transformers import get_scheduler  # its file imports PEFT; see adapters.lora

        return get_scheduler(kind, optimizer, warmup, max_steps, scheduler_specific_kwargs=kwargs)
    except ZeroDivisionError as error:  # min_lr is divided by the rate
        raise ConfigError(
            f"optim.learning_rate 0 has no schedule {kind} down to min_lr; set a rate above 0"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim.lr_scheduler_kwargs {cfg.lr_scheduler_kwargs} are not those of {kind}: {error}"
        ) from error
