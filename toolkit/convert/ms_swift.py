"""Command lines and YAML of ms-swift (`swift sft`, `swift pt`, `swift rlhf`).

Names and defaults are those of `swift/arguments` and `swift/trainers/arguments.py` (version 4).
"""

from collections.abc import Mapping
from typing import Any

from toolkit.convert.keys import Keys, Translation, refusal, refuse_settings, rename_keys

_TOOL = "ms-swift"
_OBJECTIVES = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "cpo": "cpo"} | {
    "rm": "reward",
}
_BETA = {"simpo": 2.0}
_RENAMED = {
    "context_parallel_size": "sequence_parallel_size",
    "model_name_or_path": "model",
    "model_revision": "model_revision",
    "attn_implementation": "attn_impl",
    "use_liger_kernel": "use_liger_kernel",
    "eval_files": "val_dataset",
    "val_set_size": "split_dataset_ratio",
    "chat_template": "template",
}
_REFUSED = {
    "freeze_parameters_ratio": "only some layers are trained; set model.frozen_parameters",
    "ref_model": "set preference.reference to it, if it is a model or a PEFT adapter",
    "ref_adapters": "set preference.reference to it, if it is a model or a PEFT adapter",
    "ld_alpha": "all tokens of an answer weigh alike here",
    "use_galore": "optim.optim has no such optimizer",
    "target_regex": "give the expression as lora.target_modules",
}
_NOTED = {
    "system": "put the system message into the rows",
    "loss_scale": "every supervised token has the same weight",
    "freeze_llm": "list untrained parameters in model.frozen_parameters",
    "freeze_parameters": "list untrained parameters in model.frozen_parameters",
    "init_weights": "adapters start from PEFT's default values",
    "lora_dtype": "adapters are float32",
    "lorap_lr_ratio": "all parameters have optim.learning_rate",
    "custom_register_path": "code of the user is not run",
    "external_plugins": "code of the user is not run",
    "padding_free": "a batch counts samples there, so data.packing is none",
}
_WITHOUT_EFFECT = {
    *("dataset_num_proc", "load_from_cache_file", "model_author", "model_name", "use_hf"),
    *("add_version", "create_checkpoint_symlink", "freeze_vit", "freeze_aligner", "ddp_backend"),
    *("check_model", "lazy_tokenize", "use_swift_lora", "task_type", "bnb_4bit_compute_dtype"),
    *("dataset_shuffle", "model_type", "strict", "use_logits_to_keep", "save_only_model"),
}


def translate_ms_swift(settings: Mapping[str, Any], command: str = "") -> Translation:
    """Translate the options of ms-swift to the setting names of Trainer and TRL.

    The result includes ms-swift's defaults.

    Args:
        settings: option -> value.
        command: subcommand sft, pt or rlhf; "" if it is unknown.

    Raises:
        ConfigError: the objective or the method of fine-tuning has no equivalent.
    """
    keys = Keys(dict(settings))
    kind = keys.take("rlhf_type")[1] or ("dpo" if command == "rlhf" else "")
    if kind and kind not in _OBJECTIVES:
        raise refusal(
            _TOOL,
            f"rlhf_type {kind}",
            f"expected one of {', '.join(_OBJECTIVES)}; online reinforcement learning is "
            "not supported",
        )
    method = keys.take("tuner_type", "train_type", "sft_type")[1] or "lora"
    if method not in ("lora", "full"):
        raise refusal(_TOOL, f"tuner_type {method}", "expected lora or full")
    refuse_settings(keys, _TOOL, _REFUSED)
    out: dict[str, Any] = {
        "bf16": True,
        "learning_rate": 1e-4 if method == "lora" else 1e-5,
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "gradient_checkpointing": True,
        "save_total_limit": None,
        "packing": False,
        "val_set_size": 0.0,
        "eval_strategy": "steps" if "eval_steps" in keys.unconverted else "no",
    }
    if "max_length" not in keys.unconverted:
        keys.note("max_length", "that of the model there; 1,024 tokens here unless you set it")
    if "gradient_accumulation_steps" not in keys.unconverted:
        out["global_batch_size"] = 16
        keys.note("gradient_accumulation_steps", "not set, for which 16 samples are a step there")
    out |= (
        _translate_loss(keys, kind)
        | _translate_adapters(keys, method)
        | rename_keys(keys, _RENAMED)
    )
    if command == "pt" or keys.unconverted.get("use_chat_template") is False:
        keys.take("use_chat_template")
        keys.note("pt", "every token of the texts is trained on", None)
    if out.get("torch_dtype") == "float16" or keys.unconverted.get("torch_dtype") == "float16":
        out["fp16"] = True
        del out["bf16"]
    keys.take("torch_dtype")  # weights that are trained are float32 there, too
    _translate_data(keys, out)
    strategy = keys.take("truncation_strategy")[1]
    out["excess_length_strategy"] = "truncate" if strategy == "right" else "drop"
    if strategy not in (None, "right", "delete"):
        keys.note("truncation_strategy", "data.too_long is drop", strategy)
    keys.note_settings(_NOTED, harmless=([], 1))
    return keys.finish(out, _OBJECTIVES.get(kind, ""), _WITHOUT_EFFECT)


def _translate_loss(keys: Keys, kind: str) -> dict[str, Any]:
    """Remove the settings of the preference loss from `keys`, and return those of TRL.

    Args:
        keys: the keys of the config.
        kind: `rlhf_type`, such as dpo; "" if there is none.

    Returns:
        Setting -> value with ms-swift's defaults; {} without `kind`.
    """
    if not kind:
        return {}
    beta, loss = keys.take("beta")[1], keys.take("loss_type")[1]
    weights = keys.take("loss_weights")[1]
    alpha, gamma = keys.take("cpo_alpha")[1], keys.take("simpo_gamma")[1]
    if weights and (not loss or kind in ("rm", "simpo", "cpo")):
        keys.note("loss_weights", "not converted, because it weighs a list in loss_type", weights)
    if kind == "rm":
        return {"reward_model": True}
    out: dict[str, Any] = {"beta": _BETA.get(kind, 0.1) if beta is None else beta}
    if kind == "simpo":
        out["simpo_gamma"] = 1.0 if gamma is None else gamma
    if kind in ("simpo", "cpo"):
        out |= {"cpo_alpha": 1.0 if alpha is None else alpha}
        out["loss_type"] = "simpo" if kind == "simpo" else loss or "sigmoid"
    elif loss:
        out["loss_type"] = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        out |= {"loss_weights": weights} if weights else {}
    return out


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
    names = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")
    options = keys.take_all([*names, "use_rslora", "use_dora", "lora_bias"])
    bits, method_name = keys.take("quant_bits")[1], keys.take("quant_method")[1]
    double = keys.take("bnb_4bit_use_double_quant")[1]
    quant_type = keys.take("bnb_4bit_quant_type")[1]
    adapters = keys.take("adapters")[1]
    if method == "full":
        if bits or adapters:
            raise refusal(
                _TOOL,
                f"{'quant_bits' if bits else 'adapters'} with tuner_type full",
                "a base in 4 bits needs adapters, and an adapter is merged before",
            )
        keys.note_all("", options, "tuner_type full trains no adapters")
        return {}
    targets = options.get("target_modules") or "all-linear"
    out = {
        "use_peft": True,
        "lora_r": options.get("lora_rank") or 8,
        "lora_alpha": options.get("lora_alpha") or 32,
        "lora_dropout": 0.05 if options.get("lora_dropout") is None else options["lora_dropout"],
        "lora_target_modules": [targets]
        if targets not in ("all-linear",) and isinstance(targets, str)
        else targets,
    }
    out |= {n: options[n] for n in ("modules_to_save", "use_rslora", "use_dora") if options.get(n)}
    if bits == 4:
        out |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": double is not False}
        if method_name not in (None, "bnb") or quant_type not in (None, "nf4"):
            keys.note("quant_method", "bitsandbytes' nf4 is used", method_name or quant_type)
    elif bits == 8:
        out["load_in_8bit"] = True
    elif bits:
        keys.note("quant_bits", "lora.load_in_4bit: true is the nearest", bits)
    if isinstance(adapters, list) and len(adapters) > 1:
        raise refusal(
            _TOOL,
            f"adapters {', '.join(map(str, adapters))}",
            "one adapter can be continued; merge the others",
        )
    if adapters:
        out["lora_model_dir"] = adapters[0] if isinstance(adapters, list) else adapters
    return out


def _translate_data(keys: Keys, out: dict[str, Any]) -> None:
    """Move the data sets, written as `ID:SUBSET#ROWS`, and `packing` from `keys` to `out`.

    Subsets and numbers of rows are dropped; a note lists them.
    """
    names = keys.take("dataset")[1]
    names = [names] if isinstance(names, str) else names or []
    if cut := [name for name in names if "#" in str(name)]:
        reason = "all rows are used; cut the file, or set a split such as train[:500]"
        keys.note("dataset", reason, ", ".join(map(str, cut)))
    names = [str(name).split("#")[0] for name in names]
    if subsets := [name for name in names if ":" in name]:
        reason = "the default subset is read; set dataset_config_name of the source"
        keys.note("dataset", reason, ", ".join(subsets))
    names = [name.split(":")[0] for name in names]
    if names:
        out["datasets"] = names
        reason = "ids may be those of ModelScope; here they are those of the Hugging Face Hub"
        keys.note("dataset", reason, ", ".join(names))
    if keys.take("packing")[1]:
        out["packing"] = True
