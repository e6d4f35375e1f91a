"""Command lines of OpenRLHF (`openrlhf.cli.train_sft`, `train_dpo`, `train_rm`, `train_kto`).

Names and defaults are those of `openrlhf/cli/train_*.py` (version 0.10: `--train.batch_size`;
before: `--train_batch_size`), losses those of `openrlhf/models/loss.py`.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.convert.keys import (
    Keys,
    Translation,
    refusal,
    refuse_settings,
    rename_keys,
    split_names,
)

_TOOL = "OpenRLHF"
_OBJECTIVES = {"sft": "", "dpo": "dpo", "rm": "reward", "kto": "kto"}
_RATES = {"sft": 5e-6, "dpo": 1e-5, "rm": 9e-6, "kto": 5e-7}
# Name of Trainer, TRL or the toolkit -> the option's names, the newest first.
_RENAMED = {
    "model_name_or_path": "model.model_name_or_path pretrain",
    "output_dir": "ckpt.output_dir save_path",
    "max_length": "data.max_len max_len",
    "per_device_train_batch_size": "train.micro_batch_size micro_train_batch_size",
    "global_batch_size": "train.batch_size train_batch_size",
    "num_train_epochs": "train.max_epochs max_epochs",
    "learning_rate": "adam.lr learning_rate",
    "adam_epsilon": "adam.eps",
    "weight_decay": "adam.weight_decay l2",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_ratio": "lr_warmup_ratio",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "max_grad_norm": "max_norm",
    "logging_steps": "logger.logging_steps logging_steps",
    "seed": "train.seed seed",
    "deterministic": "train.full_determinism_enable full_determinism",
    "attn_implementation": "ds.attn_implementation attn_implementation",
    "use_liger_kernel": "ds.use_liger_kernel use_liger_kernel",
    "router_aux_loss_coef": "model.aux_loss_coef aux_loss_coef",
    "save_total_limit": "ckpt.max_num max_ckpt_num",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "dataset_split": "data.dataset_split dataset_split train_split",
    "chat_template_jinja": "data.tokenizer_chat_template tokenizer_chat_template",
    "wandb_project": "logger.wandb.project wandb_project",
    "wandb_name": "logger.wandb.run_name wandb_run_name",
}
_REFUSED = {
    "model.ipo_enable": "its IPO takes sums over tokens, preference.loss_type ipo takes means",
    "ipo": "its IPO takes sums over tokens, preference.loss_type ipo takes means",
    "ref.model_name_or_path": "set preference.reference to it, if it is a model or a PEFT adapter",
    "ref_pretrain": "set preference.reference to it, if it is a model or a PEFT adapter",
    "model.margin_loss_enable": "the margin of its rows is another column; rename it to `margin`",
    "margin_loss": "the margin of its rows is another column; rename it to `margin`",
}
_NOTED = {
    "data.input_template input_template": "the template is not put around the prompts",
    "data.max_samples max_samples": "all rows are used; cut the file, or set train[:1000] as split",
    "eval.dataset eval_dataset": "set data.eval_files",
    "eval.split eval_split": "set data.eval_files",
    "ds.grad_accum_dtype grad_accum_dtype": "gradients are reduced in sharding.reduce_dtype",
    "data.multiturn multiturn": "each assistant turn of a conversation is supervised",
    "model.compute_fp32_loss_enable compute_fp32_loss": "the loss is computed in float32",
    "muon.lr": "muon has one learning rate, optim.learning_rate",
    "muon.momentum": "muon's momentum is fixed",
}
_WITHOUT_EFFECT = {
    *("ckpt.save_hf", "ckpt.disable_ds", "ckpt.path", "ckpt.max_mem", "ckpt.load_enable"),
    *("ckpt_path", "max_ckpt_mem", "load_checkpoint", "save_hf_ckpt", "disable_ds_ckpt"),
    *("ds.use_universal_ckpt", "ds.deepcompile", "ds.zpg", "ds.overlap_comm", "zpg"),
    *("overlap_comm", "local_rank", "data.disable_fast_tokenizer", "disable_fast_tokenizer"),
    *("ref.offload", "ref_offload", "model.gradient_checkpointing_reentrant", "use_wandb"),
    *("gradient_checkpointing_use_reentrant", "ds.value_head_prefix", "value_head_prefix"),
    *("logger.wandb.org", "logger.wandb.group", "wandb_org", "wandb_group", "use_ms"),
    *("logger.tensorboard_dir", "use_tensorboard", "ds.experts_implementation", "flash_attn"),
    *("ds.ring_attn_head_stride", "ring_head_stride", "muon.ns_steps", "muon.nesterov"),
}
_COLUMNS = {
    "prompt": "data.prompt_key prompt_key data.input_key input_key",
    "completion": "data.output_key output_key",
    "chosen": "data.chosen_key chosen_key",
    "rejected": "data.rejected_key rejected_key",
    "label": "data.label_key label_key",
}


def translate_openrlhf(settings: Mapping[str, Any], command: str = "") -> Translation:
    """Translate the options of an OpenRLHF command to the setting names of Trainer and TRL.

    The result includes OpenRLHF's defaults.

    Args:
        settings: option without its dashes -> value.
        command: end of the module's name after `train_`: sft, dpo, rm or kto.

    Raises:
        ConfigError: the command or an option has no equivalent.
    """
    if command not in _OBJECTIVES:
        raise refusal(
            _TOOL,
            f"train_{command or '?'}",
            "expected train_sft, train_dpo, train_rm or train_kto; online reinforcement "
            "learning is not supported",
        )
    keys = Keys(dict(settings))
    refuse_settings(keys, _TOOL, _REFUSED)
    out: dict[str, Any] = {
        "bf16": True,
        "learning_rate": _RATES[command],
        "num_train_epochs": 2.0 if command == "sft" else 1.0,
        "per_device_train_batch_size": 1 if command == "rm" else 8,
        "global_batch_size": 128,
        "max_length": 2048 if command == "sft" else 512,
        "lr_scheduler_type": "cosine_with_min_lr",
        "warmup_ratio": 0.03,
        "cosine_min_lr_ratio": 0.1,
        "adam_beta2": 0.95,
        "router_aux_loss_coef": 0,
        "save_total_limit": 3,
        "logging_steps": 1,
        "packing": False,
        "val_set_size": 0.0,
        "eval_strategy": "no",
    }
    out |= _translate_loss(keys, command) | rename_keys(keys, _RENAMED)
    if out["lr_scheduler_type"] != "cosine_with_min_lr":
        del out["cosine_min_lr_ratio"]
    _translate_optimizer(keys, out)
    out |= _translate_adapters(keys)
    key = keys.take("model.gradient_checkpointing_enable", "gradient_checkpointing")[1]
    out["gradient_checkpointing"] = bool(key)
    _translate_intervals(keys, out)
    _translate_deepspeed(keys, out)
    _translate_data(keys, out, command)
    keys.note_settings(_NOTED)
    return keys.finish(out, _OBJECTIVES[command], _WITHOUT_EFFECT)


def _translate_loss(keys: Keys, command: str) -> dict[str, Any]:
    """Remove the loss settings from `keys`, and return those of TRL for the given command.

    Raises:
        ConfigError: the loss of a reward model has no equivalent.
    """
    beta = keys.take("model.beta", "beta")[1]
    smoothing = keys.take("model.label_smoothing", "label_smoothing")[1]
    nll = keys.take("model.nll_loss_coef", "nll_loss_coef")[1]
    kind = keys.take("model.loss_type", "loss")[1]
    desirable = keys.take("desirable_loss_weight")[1]
    undesirable = keys.take("undesirable_loss_weight")[1]
    pretrain = keys.take("model.pretrain_mode_enable", "pretrain_mode")[1]
    if command == "sft":
        return {"train_on_inputs": True} if pretrain else {}
    if command == "rm":
        if kind not in (None, "sigmoid", "logexp"):
            raise refusal(_TOOL, f"loss {kind} of rewards", "expected sigmoid or logexp")
        return {"reward_model": True}
    out: dict[str, Any] = {"beta": 0.1 if beta is None else beta}
    if command == "kto":
        out |= {"loss_type": "kto", "desirable_weight": desirable or 1.0}
        return out | {"undesirable_weight": undesirable or 1.0}
    out |= {"loss_type": "sigmoid", "rpo_alpha": nll or 0.0}
    return out | ({"label_smoothing": smoothing} if smoothing else {})


def _translate_optimizer(keys: Keys, out: dict[str, Any]) -> None:
    """Move the settings of the optimizer, its betas and its offloading from `keys` to `out`."""
    kind = keys.take("optim")[1] or "adam"
    out["optim"] = "adamw_torch_fused" if kind == "adam" else kind
    betas = keys.take("adam.betas", "adam_betas")[1]
    if isinstance(betas, list) and len(betas) == 2:
        out |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    if keys.take("ds.adam_offload", "adam_offload")[1]:
        out["cpu_offload"] = True
        keys.note("adam_offload", "sharding.cpu_offload keeps parameters on the host, too")


def _translate_adapters(keys: Keys) -> dict[str, Any]:
    """Remove the settings of adapters from `keys`, and return PEFT's; {} without adapters.

    Raises:
        ConfigError: the base is quantised and no adapters are trained.
    """
    rank = keys.take("ds.lora.rank", "lora_rank")[1]
    alpha = keys.take("ds.lora.alpha", "lora_alpha")[1]
    dropout = keys.take("ds.lora.dropout", "lora_dropout")[1]
    targets = keys.take("ds.lora.target_modules", "target_modules")[1]
    four = keys.take("ds.load_in_4bit", "load_in_4bit")[1]
    if not rank:
        if four:
            raise refusal(
                _TOOL, "load_in_4bit without a rank of LoRA", "a base in 4 bits needs adapters"
            )
        return {}
    targets = [targets] if isinstance(targets, str) and targets != "all-linear" else targets
    return {
        "use_peft": True,
        "lora_r": rank,
        "lora_alpha": 16 if alpha is None else alpha,
        "lora_dropout": dropout or 0.0,
        "lora_target_modules": targets or "all-linear",
    } | ({"load_in_4bit": True} if four else {})


def _translate_intervals(keys: Keys, out: dict[str, Any]) -> None:
    """Move the intervals of saving and evaluating, in steps, from `keys` to `out`.

    OpenRLHF's -1 means only at the end of the run; then nothing is set.
    """
    save = keys.take("ckpt.save_steps", "save_steps")[1]
    if isinstance(save, int) and save > 0:
        out["save_steps"] = save
    else:
        keys.note("save_steps", "saved at the end only there; also every 500 steps here", save)
    evaluate = keys.take("eval.steps", "eval_steps")[1]
    if isinstance(evaluate, int) and evaluate > 0:
        out |= {"eval_strategy": "steps", "eval_steps": evaluate}


def _translate_deepspeed(keys: Keys, out: dict[str, Any]) -> None:
    """Remove the settings of DeepSpeed from `keys`; set the dtype in `out`.

    ZeRO stage, parallelism and packing only get notes.
    """
    dtype = keys.take("ds.param_dtype", "param_dtype")[1]
    if dtype == "fp16":
        out["fp16"] = True
        del out["bf16"]
    keys.take("bf16")
    stage = keys.take("ds.zero_stage", "zero_stage")[1]
    if stage not in (None, 3):
        keys.note("zero_stage", "FSDP2 shards as ZeRO-3 does (section sharding)", stage)
    for names, kind in (
        ("ds.tensor_parallel_size tensor_parallel_size ds_tensor_parallel_size", "tensor"),
        ("ds.ring_attn_size ring_attn_size", "context"),
    ):
        key, size = keys.take(*names.split())
        if size not in (None, 1):
            keys.note(key, f"{kind} parallelism is not supported; the ranks share the batch", size)
    if keys.take("ds.packing_samples", "packing_samples")[1]:
        reason = "a batch counts samples there, so data.packing is none; bfd packs several into one"
        keys.note("packing_samples", reason)


def _translate_data(keys: Keys, out: dict[str, Any], command: str) -> None:
    """Move the data sets and the names of their columns from `keys` to `out`."""
    names = split_names(keys.take("data.dataset", "dataset")[1])
    shares = split_names(keys.take("data.dataset_probs", "dataset_probs")[1])
    if isinstance(names, list):
        out["datasets"] = names
        if shares:
            keys.note("dataset_probs", "set data.sources[].weight", shares)
    elif names:
        out["dataset"] = names
    applied = keys.take("data.apply_chat_template", "apply_chat_template")[1]
    columns = rename_keys(keys, _COLUMNS)
    if applied and command == "sft" and "completion" not in columns and "prompt" in columns:
        columns["messages"] = columns.pop("prompt")
    elif not applied and command != "kto":
        reason = "not set: prompts are texts there; here rows are rendered as data_formats.md says"
        keys.note("apply_chat_template", reason)
    different = {new: old for new, old in columns.items() if new != old}
    if different:
        out["columns"] = different
