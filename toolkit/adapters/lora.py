"""Add adapters (LoRA, rsLoRA, DoRA, modules trained in full) to a model on meta.

[Note: order] Adapters are added while the model is on meta and before `apply_fsdp`, so that each
layer and its adapters are gathered, reduced and freed together. Added afterwards they would be
plain parameters whose gradients nobody reduces: every rank would train its own adapters.
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
    modules_peft_refuses,
    select_targets,
    shortest_suffixes,
)
from toolkit.config.lora import LoraConfig
from toolkit.errors import ConfigError, ModelError, one_line
from toolkit.formats import assets_of
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import model_class_name
from toolkit.models.expert_parallel import check_experts_unchanged
from toolkit.models.packed_experts import packed_expert_weights
from toolkit.models.peft_model import (
    ADAPTER,
    adapted_modules,
    adapted_parameters,
    has_adapters,
    trained_copies,
    unwrapped_base,
)
from toolkit.models.quantise import quantise_on_meta, store_in_float8
from toolkit.models.reward import HEAD

# PEFT is imported where adapters are made: it imports bitsandbytes, which starts CUDA on the first
# device, whichever is this rank's.
if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel


def add_adapters(model: PreTrainedModel, cfg: LoraConfig) -> "PeftModel":
    """Wrap `model` in PEFT with the adapters that `cfg` describes; only these stay trainable.

    Call it while the model is on meta and before `apply_fsdp`; see [Note: order]. Trained
    parameters are float32, and the base keeps its storage dtype. `model.hf_assets` stays reachable.
    Takes milliseconds per layer, and no memory. Sources: LoRA https://arxiv.org/abs/2106.09685,
    rsLoRA https://arxiv.org/abs/2312.03732, DoRA https://arxiv.org/abs/2402.09353.

    Raises:
        ConfigError: the rank is less than 1, or settings contradict each other.
        ModelError: a name in `cfg` matches nothing, a module cannot be adapted, or the model has
            adapters already, is sharded or is not on meta.
    """
    _refuse_unusable(model, cfg)
    adapted, targets = _adapt(model, select_targets(model, cfg))
    with unwrapped_base(adapted) as base:
        fp32_ids = set(map(id, find_fp32_tensors(base).values()))
    # Trained parameters are stored in fp32. Copies of fp32 parameters have that dtype already.
    fp32_ids = {
        id(trained) for original, trained in trained_copies(adapted) if id(original) in fp32_ids
    }
    for parameter in adapted.parameters():
        if (
            parameter.requires_grad
            and parameter.is_floating_point()
            and id(parameter) not in fp32_ids
        ):
            parameter.data = torch.empty_like(parameter, dtype=torch.float32)
    settled: Any = adapted.peft_config[ADAPTER]
    # PEFT adds names to the list of a classifier.
    settled.modules_to_save = sorted(targets.saved) or None
    assets = assets_of(adapted)
    settled.base_model_name_or_path = assets.name_or_path
    settled.revision = assets.revision
    return adapted


def _adapt(model: PreTrainedModel, targets: Targets) -> "tuple[PeftModel, Targets]":
    """Wrap `model` in PEFT.

    With `target_modules: all-linear`, modules that PEFT cannot adapt, or whose adapter it would not
    load again, are excluded. Then a copy of the model is wrapped in place of `model`.

    Returns:
        The wrapped model, and the targets without excluded modules.

    Raises:
        ModelError: the settings name such a module, or PEFT refuses the model for another reason.
    """
    # PEFT may refuse a model after it has changed parts of it. On meta a copy costs milliseconds.
    spare = copy.deepcopy(model) if targets.all_linear else None
    try:
        adapted = _wrap_in_peft(model, targets)
    except Exception as error:
        # PEFT may raise any type of error.
        unfit = modules_peft_refuses(error, targets)
        if spare is None or not unfit:
            raise explain_refusal(model, targets, error) from error
        return _adapt(spare, targets.without(unfit, one_line(error, 120)))
    if experts := _adapted_packed_experts(adapted):
        # PEFT renames targets such as `gate_proj` to those of the fused experts of some types.
        renamed = targets.modules - adapted_modules(adapted).keys()
        if spare is None or not renamed:
            raise ModelError(
                f"lora.target_modules: PEFT would adapt {min(experts)}, which "
                "lora.quantize_moe_experts keeps in 4 bits; leave the names of its parts (such as "
                "gate_proj) out of lora.target_modules, or remove lora.quantize_moe_experts"
            )
        reason = "PEFT takes these names for experts, which are in 4 bits"
        return _adapt(spare, targets.without(shortest_suffixes(renamed, targets.names), reason))
    check_adapted(adapted, targets)
    lost = find_lost_adapters(adapted)
    modules = {name.rpartition(".")[0] for name in lost}
    if not lost:
        return adapted, targets
    reason = next(iter(lost.values()))
    if spare is None or not modules <= targets.modules:
        raise ModelError(
            f"{model_class_name(model)}: the adapter of {min(lost)} (and {len(lost) - 1} more) "
            f"could not be loaded again ({reason}); remove it from lora.target_modules, "
            "lora.target_parameters and lora.modules_to_save"
        )
    return _adapt(spare, targets.without(shortest_suffixes(modules, targets.names), reason))


def _adapted_packed_experts(adapted: nn.Module) -> set[str]:
    """Return the names of 4-bit weights of fused experts that PEFT has wrapped in an adapter."""
    with unwrapped_base(adapted) as base:
        packed = packed_expert_weights(base)
    return packed.keys() & adapted_parameters(adapted).keys()


def _wrap_in_peft(model: PreTrainedModel, targets: Targets) -> "PeftModel":
    """Wrap a model on meta with `get_peft_model`, and suppress PEFT's irrelevant warnings."""
    from peft import get_peft_model

    config = _build_peft_config(targets)
    # PEFT shortens the excluded `visual.mlp.0` to `0`, which names decoder layers, too.
    is_numbered = any(
        name.rpartition(".")[2].isdigit() for name in {*targets.linear} - targets.modules
    )
    if targets.all_linear and (is_numbered or packed_expert_weights(model)):
        # PEFT's `all-linear` includes the fused experts of some types.
        config.target_modules = sorted(shortest_suffixes(targets.modules, targets.names))
    with warnings.catch_warnings():
        # PEFT decides the orientation of each module itself, and warns for each.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        # PEFT compares the ranks of fused experts with the names of modules only.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did")
        # PEFT uses a deprecated name of transformers.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        with torch.device("meta"):
            return get_peft_model(model, config, ADAPTER, autocast_adapter_dtype=False)


def _refuse_unusable(model: nn.Module, cfg: LoraConfig) -> None:
    """Raise an error if the settings or the model do not allow adapters.

    Raises:
        ConfigError: the rank is less than 1, or settings contradict each other.
        ModelError: the model has adapters, is sharded, or is not on meta.
    """
    if cfg.r < 1:
        hint = (
            "; read the settings of lora.from first (apply_adapter_settings)" if cfg.from_ else ""
        )
        raise ConfigError(f"lora.r must be 1 or more for adapters, got {cfg.r}{hint}")
    for name in ("lora_dropout", "use_dora"):
        if cfg.target_parameters and getattr(cfg, name):
            raise ConfigError(
                f"lora.target_parameters {cfg.target_parameters} cannot have lora.{name}, as the "
                "weight itself is changed; remove one of them"
            )
    if has_adapters(model):
        raise ModelError("the model has adapters already; build it again to adapt it differently")
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if sharded or not all(p.is_meta for p in model.parameters()):
        raise ModelError(
            f"{model_class_name(model)} {'is sharded' if sharded else 'has bytes'} already; add "
            "adapters to the model that build_on_meta returns, before apply_fsdp"
        )


def _build_peft_config(targets: Targets) -> "PeftConfig":
    """Build PEFT's LoraConfig from `targets.cfg` and the modules that were selected.

    The task type is SEQ_CLS if the head of a reward model is trained in full, else CAUSAL_LM.
    """
    from peft import LoraConfig as PeftConfig

    cfg = targets.cfg
    alpha = cfg.lora_alpha
    target_modules = cfg.target_modules
    return PeftConfig(
        task_type="SEQ_CLS" if HEAD in targets.saved else "CAUSAL_LM",
        r=cfg.r,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=cfg.lora_dropout,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        target_parameters=sorted(cfg.target_parameters) or None,
        exclude_modules=_build_exclude_modules(targets) or None,
        # Full names: PEFT would match `input_layernorm` with the ending `norm`.
        modules_to_save=sorted(targets.saved) or None,
        use_rslora=cfg.use_rslora,
        use_dora=cfg.use_dora,
        rank_pattern=dict(cfg.rank_pattern),
        alpha_pattern=dict(cfg.alpha_pattern),
        ensure_weight_tying=targets.needs_weight_tying,
        bias="none",
    )


def _build_exclude_modules(targets: Targets) -> str | list[str]:
    """Build PEFT's `exclude_modules` from the setting and the modules that must be excluded.

    Modules outside the text path, and those that PEFT cannot adapt, must be excluded.

    Returns:
        A regular expression for full names if the setting is a regular expression, or if the model
        has modules outside the text path. Otherwise a list of name endings, which may be empty.
    """
    setting = targets.cfg.exclude_modules
    ends = sorted({*([] if isinstance(setting, str) else setting), *targets.unfit})
    if not targets.towers and not isinstance(setting, str):
        return ends
    patterns = [setting] if isinstance(setting, str) else []
    excluded_pattern = re.compile(patterns[0]) if patterns else None
    lacking = [
        t
        for t in sorted(targets.towers)
        if excluded_pattern is None or not excluded_pattern.fullmatch(t)
    ]
    if lacking:
        patterns.insert(0, rf"(?:{'|'.join(map(re.escape, lacking))})(?:\..*)?")
    if ends:
        patterns.append(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, ends))})")
    return "|".join(patterns)


def refuse_adapted_experts(model: PreTrainedModel, cfg: LoraConfig | None, parts: int) -> None:
    """Raise ModelError if the LoRA settings change experts that `expert_parallel` divides.

    Adds the adapters to a copy of the model. Not collective.

    Args:
        model: on meta, without adapters.
        cfg: the settings; None: no adapters.
        parts: `sharding.expert_parallel`; nothing is checked if it is 1.
    """
    if cfg is not None and parts > 1:
        check_experts_unchanged(add_adapters(copy.deepcopy(model), cfg), parts)


@ranks.collective
def prepare_adapters(
    model: PreTrainedModel, cfg: LoraConfig | None, param_dtype: str
) -> "PreTrainedModel | PeftModel":
    """Apply the LoRA settings to `model`: pack its base if requested, and add adapters. Collective.

    The base is stored in 4 bits (`lora.load_in_4bit`), or in float8 if the model was built with
    `model.float8`.

    Args:
        model: a model on meta; it is changed in place.
        cfg: the settings. If it is None, or has neither `r` nor `from`, nothing is done.
        param_dtype: compute dtype of packed layers.

    Returns:
        The PeftModel around `model`, or `model` itself if nothing is done. Errors are those of
        `add_adapters`.
    """
    if cfg is None or not (cfg.r or cfg.from_):
        return model
    if cfg.load_in_4bit:
        quantise_on_meta(model, cfg, param_dtype)
    elif assets_of(model).float8_setting != "none":
        store_in_float8(model, cfg, param_dtype)
    return add_adapters(model, cfg)
