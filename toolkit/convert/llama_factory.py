"""Configs of LLaMA-Factory (`llamafactory-cli train FILE`).

Names and defaults are those of `src/llamafactory/hparams` (version 0.9.5), objectives those of
`src/llamafactory/train/{dpo,kto,rm}/trainer.py`.
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

_TOOL = "LLaMA-Factory"
_STAGES = {"sft": "", "pt": "", "rm": "reward", "dpo": "dpo", "kto": "kto"}
_RENAMED = {
    "model_revision": "model_revision",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "max_length": "cutoff_len",
    "label_smoothing": "dpo_label_smoothing",
    "desirable_weight": "kto_chosen_weight",
    "undesirable_weight": "kto_rejected_weight",
    "val_set_size": "val_size",
    "early_stopping_patience": "early_stopping_steps",
    "use_liger_kernel": "enable_liger_kernel",
    "resize_embeddings": "resize_vocab",
    "router_aux_loss_coef": "moe_aux_loss_coef",
    "hub_model_id": "hub_model_id",
}
_REFUSED = {
    "use_llama_pro": "only new blocks of the model are trained",
    "use_dft_loss": "the loss is another one",
    "use_asft_loss": "the loss is another one",
    "use_eaft_loss": "the loss is another one",
    "pref_bco_weight": "a term of BCO is added to the loss",
    "ref_model": "set preference.reference to it, if it is a model or a PEFT adapter",
    "ref_model_adapters": "set preference.reference to it, if it is a model or a PEFT adapter",
    "mixture_of_depths": "the layers of the model are changed",
    "freeze_language_model": "the language model is the part that this toolkit trains",
}
_NOTED = {
    "pissa_init": "adapters start from PEFT's default values",
    "pissa_iter": "adapters start from PEFT's default values",
    "pissa_convert": "adapters start from PEFT's default values",
    "use_adam_mini": "optim.optim has no adam_mini; adamw_torch_fused is set",
    "rope_scaling": "set it in the model's config.json",
    "shift_attn": "attention stays that of the model",
    "max_samples": "all rows are used; cut the file, or set a split such as train[:1000]",
    "streaming": "set data.streaming with train.max_steps if the data does not fit on the disk",
    "mix_strategy": "sources are mixed by data.sources[].weight",
    "interleave_probs": "set data.sources[].weight",
    "default_system": "put the system message into the rows",
    "tool_format": "tools are rendered by the chat template",
    "enable_thinking": "reasoning is rendered by the chat template; set data.columns to drop it",
    "eval_dataset": "set data.eval_files",
    "upcast_layernorm": "set sharding.param_dtype_overrides",
    "add_tokens": "prepare the tokenizer, and set model.tokenizer_name_or_path",
    "add_special_tokens": "prepare the tokenizer, and set model.tokenizer_name_or_path",
}
_WITHOUT_EFFECT = {
    *("do_train", "overwrite_cache", "plot_loss", "dataset_dir", "preprocessing_num_workers"),
    *("ddp_timeout", "use_fast_tokenizer", "low_cpu_mem_usage", "cache_dir", "buffer_size"),
    *("preprocessing_batch_size", "tokenized_path", "data_shared_file_system", "use_unsloth"),
    *("use_unsloth_gc", "print_param_status", "overwrite_output_dir", "ignore_pad_token_for_loss"),
    *("include_effective_tokens_per_second", "freeze_vision_tower", "compute_accuracy"),
    *("freeze_multi_modal_projector", "image_max_pixels", "image_min_pixels", "media_dir"),
    *("video_max_pixels", "video_min_pixels"),
}


def translate_llama_factory(settings: Mapping[str, Any], command: str = "") -> Translation:
    """Translate a config of LLaMA-Factory to the setting names of Trainer and TRL.

    The result includes LLaMA-Factory's defaults. `command` is not used, because the config names
    the stage.

    Raises:
        ConfigError: the stage, the method of fine-tuning or the loss has no equivalent.
    """
    keys = Keys(dict(settings))
    stage = keys.take("stage")[1] or "sft"
    if stage not in _STAGES:
        raise refusal(
            _TOOL,
            f"stage {stage}",
            f"expected one of {', '.join(_STAGES)}; online reinforcement learning is not supported",
        )
    method = keys.take("finetuning_type")[1] or "lora"
    if method not in ("lora", "full"):
        hint = "; for full, list untrained parameters in model.frozen_parameters"
        raise refusal(
            _TOOL,
            f"finetuning_type {method}",
            "expected lora or full" + hint * (method == "freeze"),
        )
    refuse_settings(keys, _TOOL, _REFUSED)
    objective, loss = _STAGES[stage], _translate_loss(keys, stage)
    objective = "cpo" if loss.get("loss_type") == "simpo" else objective
    out: dict[str, Any] = {
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "max_length": 2048,
        "save_total_limit": None,
        "val_set_size": 0.0,
        "packing": False,
    }
    out |= loss | _translate_precision(keys) | _translate_adapters(keys, method)
    out["gradient_checkpointing"] = not keys.take("disable_gradient_checkpointing")[1]
    _translate_packing(keys, out, stage)
    _translate_supervision(keys, out)
    _translate_attention(keys, out)
    _translate_data(keys, out)
    out |= rename_keys(keys, _RENAMED)
    keys.note_settings(_NOTED, harmless=("concat",))
    if keys.take("use_muon")[1]:
        out["optim"] = "muon"
    for name in [
        k for k in keys.unconverted if k.startswith(("use_galore", "use_apollo", "use_badam"))
    ]:
        if keys.unconverted.pop(name):
            keys.note(name, "optim.optim has no such optimizer; adamw_torch_fused is set", True)
    if keys.take("train_from_scratch")[1]:
        out["init"] = "random"
    if not keys.unconverted.get("eval_steps") and not keys.unconverted.get("eval_strategy"):
        out["eval_strategy"] = "no" if not out["val_set_size"] else "steps"
    return keys.finish(out, objective, _WITHOUT_EFFECT)


def _translate_loss(keys: Keys, stage: str) -> dict[str, Any]:
    """Remove the settings of the preference loss from `keys`, and return those of TRL.

    The result is {} for a stage without a preference loss.

    Raises:
        ConfigError: the loss has no equivalent.
    """
    kind, beta = keys.take("pref_loss")[1] or "sigmoid", keys.take("pref_beta")[1]
    weight, gamma = keys.take("pref_ftx")[1] or 0.0, keys.take("simpo_gamma")[1]
    if stage == "dpo":
        if kind == "orpo":
            raise refusal(
                _TOOL,
                "pref_loss orpo",
                "its cross entropy covers answers only, that of preference.loss_type orpo "
                "covers prompts, too",
            )
        if kind not in ("sigmoid", "hinge", "ipo", "simpo"):
            raise refusal(_TOOL, f"pref_loss {kind}", "expected sigmoid, hinge, ipo or simpo")
        out = {"loss_type": kind, "beta": 0.1 if beta is None else beta, "rpo_alpha": weight}
        return out | ({"simpo_gamma": 0.5 if gamma is None else gamma} if kind == "simpo" else {})
    if stage == "kto" and weight:
        raise refusal(
            _TOOL, f"pref_ftx {weight} with stage kto", "preference.rpo_alpha does nothing with KTO"
        )
    if stage == "kto":
        return {"loss_type": "kto", "beta": 0.1 if beta is None else beta}
    if stage == "rm":
        return {"loss_type": "reward", "reward_model": True}
    return {}


def _translate_precision(keys: Keys) -> dict[str, Any]:
    """Remove the precision settings from `keys`; return `bf16` or `fp16`, and `torch_dtype`.

    `torch_dtype` is bfloat16 and only set for `pure_bf16`, which keeps parameters in bfloat16.
    """
    pure = keys.take("pure_bf16")[1]
    precisions = {key: keys.take(key)[1] for key in ("bf16", "fp16")}
    if not (pure or precisions["bf16"] or precisions["fp16"]):
        reason = "neither is set, so the model computes in its own dtype there; bfloat16 here"
        keys.note("bf16, fp16", f"{reason} (sharding.param_dtype)")
    out: dict[str, Any] = {"fp16": True} if precisions["fp16"] else {"bf16": True}
    return out | ({"torch_dtype": "bfloat16"} if pure else {})


def _translate_adapters(keys: Keys, method: str) -> dict[str, Any]:
    """Remove the settings of adapters and of a quantised base from `keys`, and return PEFT's.

    Args:
        keys: the keys of the config.
        method: `lora` or `full`.

    Returns:
        Setting -> value; {} if `method` is `full`.

    Raises:
        ConfigError: a combination of settings has no equivalent.
    """
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
    options = keys.take_all([*names, "use_rslora", "use_dora"])
    bits, kind = keys.take("quantization_bit")[1], keys.take("quantization_method")[1]
    double = keys.take("double_quantization")[1]
    quant_type = keys.take("quantization_type")[1]
    folder, create = keys.take("adapter_name_or_path")[1], keys.take("create_new_adapter")[1]
    if method == "full":
        if bits:
            raise refusal(
                _TOOL,
                f"quantization_bit {bits} with finetuning_type full",
                "a base in 4 bits needs adapters",
            )
        if folder:
            raise refusal(
                _TOOL,
                f"adapter_name_or_path {folder} with finetuning_type full",
                "merge the adapter, and train the merged model",
            )
        keys.note_all("", options, "finetuning_type full trains no adapters")
        return {}
    rank = options.get("lora_rank") or 8
    out = {
        "use_peft": True,
        "lora_r": rank,
        "lora_alpha": options.get("lora_alpha") or 2 * rank,
        "lora_dropout": options.get("lora_dropout") or 0.0,
    }
    target = split_names(options.get("lora_target") or "all")
    out["lora_target_modules"] = "all-linear" if target in ("all", ["all"]) else target
    if isinstance(out["lora_target_modules"], str) and target != "all":
        out["lora_target_modules"] = [target]
    if saved := split_names(options.get("additional_target")):
        out["modules_to_save"] = saved if isinstance(saved, list) else [saved]
    out |= {name: options[name] for name in ("use_rslora", "use_dora") if options.get(name)}
    if bits == 4:
        out |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": double is not False}
        if kind not in (None, "bnb", "bitsandbytes") or quant_type not in (None, "nf4"):
            keys.note("quantization_method", "bitsandbytes' nf4 is used", kind or quant_type)
    elif bits == 8:
        out["load_in_8bit"] = True
    elif bits:
        keys.note("quantization_bit", "lora.load_in_4bit: true is the nearest", bits)
    if folder and (create or "," in str(folder)):
        raise refusal(
            _TOOL,
            f"adapter_name_or_path {folder}",
            "adapters are merged there before a new one is trained; merge them, and train "
            "on the merged model",
        )
    return out | ({"lora_model_dir": folder} if folder else {})


def _translate_packing(keys: Keys, out: dict[str, Any], stage: str) -> None:
    """Remove the packing settings from `keys`; set `packing` and `packing_strategy` in `out`.

    Adds notes on differences between the tools. In stage `pt`, samples are packed by default.
    """
    packed, apart = keys.take("packing")[1], keys.take("neat_packing")[1]
    if stage == "pt":
        keys.note("stage", "every token of the texts is trained on, in samples that are full", "pt")
        out |= {"packing": True, "packing_strategy": "wrapped"}
        if packed is False:
            out |= {"packing": False}
    elif packed or apart:
        out["packing"] = True
        if not apart:
            keys.note(
                "packing",
                "LLaMA-Factory lets packed examples attend to each other; this toolkit does not",
                packed,
            )


def _translate_supervision(keys: Keys, out: dict[str, Any]) -> None:
    """Move the settings that select supervised tokens from `keys` to `out`, renamed."""
    if keys.take("train_on_prompt")[1]:
        out["train_on_inputs"] = True
    if keys.take("mask_history")[1]:
        out["mask_history"] = True


def _translate_attention(keys: Keys, out: dict[str, Any]) -> None:
    """Move `flash_attn` from `keys` to `attn_implementation` in `out`, unless it is `auto`."""
    names = {"fa2": "flash_attention_2", "fa3": "flash_attention_3"} | {
        "sdpa": "sdpa",
        "disabled": "eager",
    }
    if (kind := keys.take("flash_attn")[1]) not in (None, "auto"):
        out["attn_implementation"] = names.get(str(kind), kind)


def _translate_data(keys: Keys, out: dict[str, Any]) -> None:
    """Remove the data sets and the template from `keys`, with notes; `out` is not changed.

    Their names have a meaning only within LLaMA-Factory.
    """
    names = keys.take("dataset")[1]
    if names:
        reason = "names in LLaMA-Factory's dataset_info.json; set data.train_files or data.sources"
        keys.note("dataset", reason, names)
    template = keys.take("template")[1]
    if template not in (None, "empty"):
        reason = "a template of LLaMA-Factory; the tokenizer's own is used, or data.chat_template"
        keys.note("template", reason, template)
