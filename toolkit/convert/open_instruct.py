"""Configs of open-instruct (`finetune.py`, `dpo_tune_cache.py`).

Names and defaults are those of `open_instruct/finetune.py` and `open_instruct/dpo_utils.py`.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.convert.keys import Keys, Translation, refusal, rename_keys

_TOOL = "open-instruct"
_LOSSES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "simpo": "simpo"}
_RENAMED = {
    "context_parallel_size": "sequence_parallel_size context_parallel_degree",
    "max_length": "max_seq_length",
    "num_train_epochs": "num_train_epochs num_epochs",
    "max_steps": "max_train_steps",
    "hub_model_id": "hf_repo_id save_to_hub",
    "wandb_project": "wandb_project_name",
    "use_liger_kernel": "use_liger_kernel",
}
_WITHOUT_EFFECT = {
    *("use_slow_tokenizer", "preprocessing_num_workers", "overwrite_cache", "verbose", "timeout"),
    *("low_cpu_mem_usage", "dataset_mix_dir", "dataset_cache_mode", "dataset_local_cache_dir"),
    *("dataset_skip_cache", "hf_metadata_dataset", "try_launch_beaker_eval_jobs", "exp_name"),
    *("try_auto_save_to_beaker", "gs_bucket_path", "oe_eval_tasks", "oe_eval_max_length"),
    *("clean_checkpoints_at_end", "do_not_randomize_output_dir", "sync_each_batch", "hf_entity"),
    *("concatenated_forward", "cache_dataset_only", "fused_optimizer", "dpo_use_paged_optimizer"),
    *("use_flash_attn", "hf_repo_revision", "hf_repo_url", "eval_workspace", "eval_priority"),
}
_NOTED = {
    "max_train_samples": "all rows are used; cut the file, or set a split such as train[:1000]",
    "add_bos": "the chat template and the tokenizer decide about the first token",
    "chat_template_name": "the tokenizer's own template is used, or data.chat_template",
    "dataset_transform_fn": "rows are recognised by their columns",
    "transform_fn": "rows are recognised by their columns",
    "reduce_loss": "the loss is the mean over all supervised tokens of a step",
    "tensor_parallel_degree": "tensor parallelism is not supported; the ranks share the batch",
    "final_lr_ratio": "set optim.lr_scheduler_kwargs",
    "optimizer_type": "set optim.optim",
    "zero_stage": "FSDP2 shards as ZeRO-3 does (section sharding)",
    "load_balancing_weight": "it is config.json's; train.router_aux_loss says whether it is added",
}


def translate_open_instruct(settings: Mapping[str, Any], command: str = "") -> Translation:
    """Translate a config of open-instruct to the setting names of Trainer and TRL.

    The result includes open-instruct's defaults. The objective is a preference loss if `command` is
    dpo or a key is one of DPO.

    Args:
        settings: key -> value.
        command: dpo if the script is known to train on pairs.

    Raises:
        ConfigError: the loss has no equivalent.
    """
    keys = Keys(dict(settings))
    of_pairs = (
        "loss_type",
        "beta",
        "gamma_beta_ratio",
        "dpo_loss_type",
        "dpo_beta",
        "transform_fn",
    )
    preferred = command == "dpo" or any(
        key in keys.unconverted
        for key in (*of_pairs, "dpo_use_paged_optimizer", "concatenated_forward")
    )
    out: dict[str, Any] = {
        "bf16": True,
        "learning_rate": 2e-5,
        "num_train_epochs": 2.0,
        "warmup_ratio": 0.03,
        "lr_scheduler_type": "linear",
        "packing": False,
        "gradient_checkpointing": False,
        "router_aux_loss_coef": 0,
        "val_set_size": 0.0,
        "eval_strategy": "no",
        "save_total_limit": 3,
    }
    clip = keys.take("clip_grad_norm", "max_grad_norm")[1]
    out["max_grad_norm"] = clip if clip and clip > 0 else 0.0  # by default not clipped
    objective = ""
    if preferred:
        loss, objective = _translate_loss(keys)
        out |= loss
    else:
        reason = "no setting of DPO, so taken as supervised; else `--from open-instruct-dpo`"
        keys.note("loss_type", reason)
    out |= _translate_adapters(keys) | rename_keys(keys, _RENAMED)
    _translate_checkpoints(keys, out)
    _translate_data(keys, out)
    if keys.take("with_tracking")[1]:
        out.setdefault("report_to", keys.take("report_to")[1] or "wandb")
    keys.take("report_to")
    if keys.take("load_balancing_loss")[1]:
        out.pop("router_aux_loss_coef")
    if keys.take("use_8bit_optimizer")[1]:
        out["optim"] = "adamw_8bit"
    if keys.take("packing")[1]:
        reason = "a batch counts samples there, so data.packing is none; bfd packs several into one"
        keys.note("packing", reason, True)
    keys.note_settings(_NOTED, harmless=(1,))
    return keys.finish(out, objective, _WITHOUT_EFFECT)


def _translate_loss(keys: Keys) -> tuple[dict[str, Any], str]:
    """Remove the settings of the preference loss from `keys`, and return those of TRL.

    Returns:
        (setting -> value, objective). The objective is `dpo`, or `cpo` for SimPO.

    Raises:
        ConfigError: the loss has no equivalent.
    """
    kind = str(keys.take("loss_type", "dpo_loss_type")[1] or "dpo_norm")
    if kind not in _LOSSES:
        raise refusal(_TOOL, f"loss_type {kind}", f"expected one of {', '.join(_LOSSES)}")
    beta = keys.take("beta", "dpo_beta")[1]
    ratio = keys.take("gamma_beta_ratio", "dpo_gamma_beta_ratio")[1]
    smoothing = keys.take("label_smoothing", "dpo_label_smoothing")[1]
    if beta is None:
        beta = 5.0
        keys.note("beta", f"not set, for which {_TOOL} takes 5", None)
    out = {"loss_type": _LOSSES[kind], "beta": beta}
    if smoothing:
        out["label_smoothing"] = smoothing
    if kind != "simpo":
        return out, "dpo"
    ratio = 0.3 if ratio is None else ratio
    keys.note("gamma_beta_ratio", "preference.simpo_gamma is this ratio times beta", ratio)
    # Neither has a cross entropy of chosen answers next to the loss.
    return out | {"simpo_gamma": ratio * float(beta), "rpo_alpha": 0.0}, "cpo"


def _translate_adapters(keys: Keys) -> dict[str, Any]:
    """Remove the settings of adapters from `keys`, and return PEFT's; {} without adapters.

    Raises:
        ConfigError: the base is quantised and no adapters are trained.
    """
    lora, four = keys.take("use_lora")[1], keys.take("use_qlora")[1]
    rank = keys.take("lora_rank")[1]
    alpha, dropout = keys.take("lora_alpha")[1], keys.take("lora_dropout")[1]
    if four and not lora:
        raise refusal(_TOOL, "use_qlora without use_lora", "a base in 4 bits needs adapters")
    if not lora:
        for key, value in (("lora_rank", rank), ("lora_alpha", alpha), ("lora_dropout", dropout)):
            if value is not None:
                keys.note(key, "use_lora is not set, so no adapters are trained", value)
        return {}
    return {
        "use_peft": True,
        "lora_r": 64 if rank is None else rank,
        "lora_alpha": 16 if alpha is None else alpha,
        "lora_dropout": 0.1 if dropout is None else dropout,
        # As its scripts pass them to PEFT.
        "lora_target_modules": [
            *("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
        ],
    } | ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True} if four else {})


def _translate_checkpoints(keys: Keys, out: dict[str, Any]) -> None:
    """Move the settings of checkpoints (how often saved, how many kept) from `keys` to `out`."""
    key, every = keys.take("checkpointing_steps")
    if str(every).isdecimal():
        out["save_steps"] = int(every)
    elif key:
        keys.note(key, "checkpoint.save_steps counts steps", every)
    key, keep = keys.take("keep_last_n_checkpoints")
    if key:
        out["save_total_limit"] = None if keep in (None, -1) else keep


def _translate_data(keys: Keys, out: dict[str, Any]) -> None:
    """Move the data sets `[NAME, SHARE, ...]` from `keys` to `dataset_mixer` in `out`.

    There they are a mapping from name to share.
    """
    mixed = keys.take("dataset_mixer_list")[1]
    if isinstance(mixed, str):
        mixed = mixed.split()
    if isinstance(mixed, list):
        out["dataset_mixer"] = dict(zip(mixed[::2], mixed[1::2], strict=False))
    splits = keys.take("dataset_mixer_list_splits")[1]
    if splits not in (None, ["train"], "train"):
        keys.note("dataset_mixer_list_splits", "set data.sources[].dataset_split", splits)
