"""Adapters (LoRA, rsLoRA, DoRA, modules trained in full) are put on a model on meta.

[Note: order] Adapters go on while the model is on meta and before `apply_fsdp`, so that each layer
and its adapters are gathered, reduced and freed together. Put on afterwards they are plain
parameters whose gradients nobody reduces: every rank then trains adapters of its own.
"""

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.adapters.reload_trial import find_lost_adapters
from toolkit.adapters.targets import (
    Targets,
    check_adapted,
    explain_refusal,
    select_targets,
    shortest_suffixes,
    unfit_modules,
)
from toolkit.config.lora import LoraConfig
from toolkit.errors import ConfigError, ModelError, one_line
from toolkit.formats import assets_of
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import model_class_name
from toolkit.models.peft_model import ADAPTER, has_adapters, trained_copies, unwrapped_base
from toolkit.models.quantise import quantise_on_meta
from toolkit.models.reward import HEAD

# PEFT is imported where adapters are made: it imports bitsandbytes, which starts CUDA on the first
# device, whichever is this rank's.
if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel


def add_adapters(model: PreTrainedModel, cfg: LoraConfig) -> "PeftModel":
    """Return `model` inside PEFT, with adapters as `cfg` asks for; only they are trained.

    On meta and before `apply_fsdp`; see [Note: order]. What is trained is float32, the
    base keeps its storage dtype. `model.hf_assets` is reachable as before. Milliseconds a layer, no
    memory. Sources: LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732,
    DoRA https://arxiv.org/abs/2402.09353. ConfigError: settings that cannot hold together.
    ModelError: a name that matches nothing, or a module that cannot be adapted; names it.
    """
    _refuse(model, cfg)
    adapted, targets = _adapt(model, select_targets(model, cfg))
    with unwrapped_base(adapted) as base:
        kept = set(map(id, find_fp32_tensors(base).values()))
    # Trained parameters get their storage dtype; copies of what the model keeps in fp32 stay so.
    kept = {id(trained) for original, trained in trained_copies(adapted) if id(original) in kept}
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)
    settled: Any = adapted.peft_config[ADAPTER]
    settled.modules_to_save = sorted(targets.saved) or None  # PEFT adds to those of classifiers
    assets = assets_of(adapted)
    settled.base_model_name_or_path, settled.revision = assets.name_or_path, assets.revision
    return adapted


def _adapt(model: PreTrainedModel, targets: Targets) -> "tuple[PeftModel, Targets]":
    """Return `model` inside PEFT and the targets that it adapts. `all-linear` leaves out what PEFT
    cannot adapt and what it would not load; what is named is refused then (ModelError).
    """
    # PEFT changes the model that it refuses half-way. On meta a copy costs milliseconds.
    spare = copy.deepcopy(model) if targets.all_linear else None
    try:
        adapted = _wrap(model, targets)
    except Exception as error:  # PEFT refuses by any class of error
        unfit = unfit_modules(error, targets)
        if spare is None or not unfit:
            raise explain_refusal(model, targets, error) from error
        return _adapt(spare, targets.without(unfit, one_line(error, 120)))
    check_adapted(adapted, targets)
    lost = find_lost_adapters(adapted)
    modules = {name.rpartition(".")[0] for name in lost}
    if not lost:
        return adapted, targets
    reason = next(iter(lost.values()))
    if spare is None or not modules <= targets.modules:
        raise ModelError(
            f"{model_class_name(model)}: the adapter of {min(lost)} (and {len(lost) - 1} more) could not "
            f"be loaded again ({reason}); leave it out of lora.target_modules, "
            "lora.target_parameters and lora.modules_to_save"
        )
    return _adapt(spare, targets.without(shortest_suffixes(modules, targets.names), reason))


def _wrap(model: PreTrainedModel, targets: Targets) -> "PeftModel":
    from peft import get_peft_model

    config = _peft_config(targets)
    with warnings.catch_warnings():
        # PEFT settles the orientation of each module itself, and says so for each.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        # Of fused experts' ranks, which PEFT compares with the names of modules only.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did")
        # PEFT asks transformers by the old name.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        with torch.device("meta"):
            return get_peft_model(model, config, ADAPTER, autocast_adapter_dtype=False)


def _refuse(model: nn.Module, cfg: LoraConfig) -> None:
    if cfg.r < 1:
        hint = "; read the settings of lora.from first (apply_adapter_settings)" if cfg.from_ else ""
        raise ConfigError(f"lora.r must be 1 or more for adapters, got {cfg.r}{hint}")
    for name in ("lora_dropout", "use_dora"):
        if cfg.target_parameters and getattr(cfg, name):
            raise ConfigError(
                f"lora.target_parameters {cfg.target_parameters} cannot have lora.{name}, as the "
                "weight itself is changed; leave out one of them"
            )
    if has_adapters(model):
        raise ModelError("the model has adapters already; build it anew to adapt it otherwise")
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if sharded or not all(p.is_meta for p in model.parameters()):
        raise ModelError(
            f"{model_class_name(model)} {'is sharded' if sharded else 'has bytes'} already; put adapters "
            "on what build_on_meta returns, before apply_fsdp"
        )


def _peft_config(targets: Targets) -> "PeftConfig":
    from peft import LoraConfig as PeftConfig

    cfg = targets.cfg
    alpha, named = cfg.lora_alpha, cfg.target_modules
    return PeftConfig(
        task_type="SEQ_CLS" if HEAD in targets.saved else "CAUSAL_LM",
        r=cfg.r,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=cfg.lora_dropout,
        target_modules=named if isinstance(named, str) else list(named),
        target_parameters=sorted(cfg.target_parameters) or None,
        exclude_modules=_excluded(targets) or None,
        # Whole names: of an end such as `norm` PEFT would take `input_layernorm` too.
        modules_to_save=sorted(targets.saved) or None,
        use_rslora=cfg.use_rslora,
        use_dora=cfg.use_dora,
        rank_pattern=dict(cfg.rank_pattern),
        alpha_pattern=dict(cfg.alpha_pattern),
        ensure_weight_tying=targets.ties,
        bias="none",
    )


def _excluded(targets: Targets) -> str | list[str]:
    """Return what PEFT must leave out: ends of names, or one pattern of whole names."""
    asked = targets.cfg.exclude_modules
    ends = sorted({*([] if isinstance(asked, str) else asked), *targets.unfit})
    if not targets.towers and not isinstance(asked, str):
        return ends
    patterns = [asked] if isinstance(asked, str) else []
    known = re.compile(patterns[0]) if patterns else None
    lacking = [t for t in sorted(targets.towers) if known is None or not known.fullmatch(t)]
    if lacking:
        patterns.insert(0, rf"(?:{'|'.join(map(re.escape, lacking))})(?:\..*)?")
    if ends:
        patterns.append(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, ends))})")
    return "|".join(patterns)


@ranks.collective
def prepare_adapters(
    model: PreTrainedModel, cfg: LoraConfig | None, param_dtype: str
) -> "PreTrainedModel | PeftModel":
    """Put on `model` what `cfg` asks for: 4-bit weights and adapters, or nothing. Collective."""
    if cfg is None or not (cfg.r or cfg.from_):
        return model
    if cfg.load_in_4bit:
        quantise_on_meta(model, cfg, param_dtype)
    return add_adapters(model, cfg)
