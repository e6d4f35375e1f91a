"""Configs of torchtune (`tune run RECIPE --config FILE`).

Names are those of `recipes/configs`, defaults those of the components that a config names.
"""

import re
from collections.abc import Mapping
from typing import Any

from toolkit.convert.keys import Keys, Translation, refusal

_TOOL = "torchtune"
# Builder of a data set -> data set on the Hub, and whether the prompt is supervised, too.
_DATASETS = {
    "alpaca_dataset": ("tatsu-lab/alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", False),
    "samsum_dataset": ("Samsung/samsum", False),
    "grammar_dataset": ("liweili/c4_200m", False),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", False),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", False),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", False),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", False),
}
# Builder of a data set -> setting in data.columns -> column of the data set on the Hub.
_COLUMNS = {
    "samsum_dataset": {"instruction": "dialogue", "output": "summary"},
    "stack_exchange_paired_dataset": {
        "instruction": "question",
        "chosen": "response_j",
        "rejected": "response_k",
    },
}
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {"AdamW": "adamw_torch_fused", "PagedAdamW": "adamw_torch_fused"} | {
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW8bit": "adamw_8bit",
}
_CROSS_ENTROPIES = {
    *("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss", ""),
}
_REFUSED = {
    "teacher_model": "a student that learns from a teacher",
    "kd_ratio": "a student that learns from a teacher",
    "quantizer": "training of a model whose quantisation is simulated",
    "ref_checkpointer": "set preference.reference to its model, if it is another one",
}
_WITHOUT_EFFECT = {
    *("device", "shuffle", "log_level", "log_peak_memory_stats", "profiler", "low_cpu_ram"),
    *("save_adapter_weights_only", "custom_sharded_layers", "resume_from_checkpoint"),
    *("dataset_val", "batch_size_val", "save_last_epoch_only", "keep_last_n_checkpoints"),
}


def translate_torchtune(settings: Mapping[str, Any], command: str = "") -> Translation:
    """Translate a config of torchtune to the setting names of Trainer and TRL.

    The result includes torchtune's defaults. `command` is not used, because the components of the
    config show the objective.

    Raises:
        ConfigError: the model, the loss or the recipe has no equivalent.
    """
    keys = Keys(dict(settings))
    for name, reason in _REFUSED.items():
        if keys.take(name)[1] is not None:
            raise refusal(_TOOL, f"{name}", f"{reason}")
    out: dict[str, Any] = {
        "num_train_epochs": keys.take("epochs")[1] or 1,
        "per_device_train_batch_size": keys.take("batch_size")[1] or 1,
        "logging_steps": keys.take("log_every_n_steps")[1] or 1,
        "save_total_limit": None,
        "val_set_size": 0.0,
        "eval_strategy": "no",
        "router_aux_loss_coef": 0,
    }
    objective = _translate_objective(keys, out)
    adapters = _translate_model(keys, out)
    _translate_precision(keys, out, adapters)
    _translate_optimizer(keys, out)
    _translate_data(keys, out)
    _translate_memory(keys, out)
    _translate_run(keys, out)
    return keys.finish(out, objective, _WITHOUT_EFFECT)


def _split_component(section: Any) -> tuple[str, dict[str, Any]]:
    """Split a section into (last name of its `_component_`, its other settings).

    The result is ("", {}) if the section is not a mapping.
    """
    if not isinstance(section, Mapping):
        return "", {}
    more = {str(key): value for key, value in section.items() if key != "_component_"}
    return str(section.get("_component_", "")).rpartition(".")[2], more


def _translate_objective(keys: Keys, out: dict[str, Any]) -> str:
    """Move the settings of the loss from `keys` to `out`, and return the objective.

    Returns:
        `dpo`, or "" for a cross entropy.

    Raises:
        ConfigError: the loss has no equivalent.
    """
    name, more = _split_component(keys.take("loss")[1])
    keys.take_all(("loss_fn",))
    if name == "DPOLoss":
        out |= {"loss_type": "sigmoid", "beta": more.pop("beta", 0.1)}
        if smoothing := more.pop("label_smoothing", 0):
            out["label_smoothing"] = smoothing
        keys.note_all("loss", more, "no equivalent")
        return "dpo"
    if name not in _CROSS_ENTROPIES:
        raise refusal(_TOOL, f"loss {name}", "expected a cross entropy, or DPOLoss")
    return ""


def _translate_model(keys: Keys, out: dict[str, Any]) -> bool:
    """Move the settings of model, tokenizer and adapters from `keys` to `out`.

    Returns:
        True if adapters are trained.

    Raises:
        ConfigError: the adapters have no equivalent.
    """
    name, more = _split_component(keys.take("model")[1])
    reader, checkpointer = _split_component(keys.take("checkpointer")[1])
    builder, tokenizer = _split_component(keys.take("tokenizer")[1])
    reason = "model and tokenizer are those of the folder's config.json and tokenizer.json"
    keys.note(f"_component_ {name}, {builder}, {reader}", reason)
    folder = checkpointer.get("checkpoint_dir")
    if folder:
        out["model_name_or_path"] = str(folder).rstrip("/")
    if checkpointer.get("adapter_checkpoint"):
        raise refusal(
            _TOOL,
            "checkpointer.adapter_checkpoint",
            "its adapters have another layout; merge them, and train on the merged model",
        )
    if length := tokenizer.get("max_seq_len"):
        out["max_length"] = length
    else:
        reason = "no limit there; 1,024 tokens here unless you set it (data.sequence_length)"
        keys.note("tokenizer.max_seq_len", reason)
    if template := tokenizer.get("prompt_template"):
        keys.note("tokenizer.prompt_template", "the tokenizer's chat template is used", template)
    lora = bool(re.search(r"(^|_)q?(lora|dora)_", name)) or "lora_rank" in more
    if not lora:
        keys.note_all("model", more, "set it in the model's config.json")
        return False
    targets = list(more.pop("lora_attn_modules", ["q_proj", "v_proj"]))
    if unknown := [target for target in targets if target not in _ATTENTION]:
        raise refusal(
            _TOOL, f"lora_attn_modules {unknown}", f"expected names in {', '.join(_ATTENTION)}"
        )
    targets = [_ATTENTION[target] for target in targets]
    if more.pop("apply_lora_to_mlp", False):
        targets += _MLP
    if more.pop("apply_lora_to_output", False):
        keys.note("model.apply_lora_to_output", "the head is not adapted", True)
    if "phi3" in name:
        reason = "Phi-3 has qkv_proj and gate_up_proj as one matrix each: all linear layers"
        keys.note("model.lora_attn_modules", reason, targets)
        targets = ["all-linear"]
    out |= {
        "use_peft": True,
        "lora_r": more.pop("lora_rank", 8),
        "lora_alpha": more.pop("lora_alpha", 16),
        "lora_dropout": more.pop("lora_dropout", 0.0),
        "lora_target_modules": targets,
    }
    if more.pop("use_dora", False) or "dora_" in name:
        out["use_dora"] = True
    if more.pop("quantize_base", False) or re.search(r"(^|_)q(lora|dora)_", name):
        out |= {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    keys.note_all("model", more, "no equivalent")
    return True


def _translate_precision(keys: Keys, out: dict[str, Any], adapters: bool) -> None:
    """Move the dtype from `keys` to `bf16` in `out`; without adapters, also to `torch_dtype`."""
    dtype = str(keys.take("dtype")[1] or "bf16")
    if dtype == "fp32":
        out["bf16"] = False
    else:
        out["bf16"] = True
        if not adapters:
            out["torch_dtype"] = "bfloat16"
    if dtype not in ("fp32", "bf16"):
        keys.note("dtype", "bfloat16 or float32; bfloat16 is set", dtype)


def _translate_optimizer(keys: Keys, out: dict[str, Any]) -> None:
    """Move the settings of optimizer, schedule and gradient clipping from `keys` to `out`."""
    name, more = _split_component(keys.take("optimizer")[1])
    if more.pop("fused", True) is False:
        keys.note("optimizer.fused", "the fused AdamW is used", False)
    out["optim"] = _OPTIMIZERS.get(name, name)
    for key, new in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if key in more:
            out[new] = more.pop(key)
    out.setdefault("weight_decay", 0.01)  # that of torch.optim.AdamW
    keys.note_all("optimizer", more, "set it in the section optim")
    schedule, details = _split_component(keys.take("lr_scheduler")[1])
    if schedule and schedule != "get_cosine_schedule_with_warmup":
        keys.note("lr_scheduler", "set optim.lr_scheduler_type; cosine is set", schedule)
    out["lr_scheduler_type"] = "cosine" if schedule else "constant"
    if steps := details.pop("num_warmup_steps", 0):
        out["warmup_steps"] = steps
    keys.note_all("lr_scheduler", details, "set optim.lr_scheduler_kwargs")
    key, clip = keys.take("clip_grad_norm")
    out["max_grad_norm"] = clip or 0.0


def _translate_data(keys: Keys, out: dict[str, Any]) -> None:
    """Move the data set and its options from `keys` to `out`.

    Raises:
        ConfigError: there is a list of data sets.
    """
    section = keys.take("dataset")[1]
    if isinstance(section, list):
        raise refusal(_TOOL, "list of datasets", "give one of them")
    name, more = _split_component(section)
    hub_id, prompts = _DATASETS.get(name, (None, False))
    if hub_id is None:
        keys.note("dataset", "rows are recognised by their columns (docs/finetuning.md)", name)
    source = more.pop("source", None) or hub_id
    files = more.pop("data_files", None)
    if files or source in ("json", "csv", "parquet", "text"):
        out["train_files"] = files
    elif source:
        out["dataset_name"] = source
    if more.pop("train_on_input", prompts):
        out["train_on_inputs"] = True
    packed = more.pop("packed", False) or keys.unconverted.get("packed")
    out["packing"] = bool(packed)
    if column := more.pop("column", None):
        out["dataset_text_field"] = column
    columns = dict(more.pop("column_map", None) or {})
    if name in _COLUMNS:
        # These builders make a turn of the prompt, as `instruction` does; `prompt` stays text.
        turns = {"prompt": "instruction", "input": "instruction"}
        columns = {turns.get(k, k): v for k, v in columns.items()} or _COLUMNS[name]
    if name == "stack_exchange_paired_dataset" and source == hub_id:
        keys.note("dataset", "only its folder data/rl is read there; set data.train_files", name)
    if column := more.pop("conversation_column", None):
        columns["messages"] = column
    if columns:
        out["columns"] = columns
    for key, new in (("split", "dataset_split"), ("subset", "dataset_config_name")):
        if key in more:
            out[new] = more.pop(key)
    more.pop("conversation_style", None)
    more.pop("add_eos", None)
    keys.note_all("dataset", more, "no equivalent")
    if "alpaca" in name:
        keys.note("dataset", "rendered by the chat template, not in Alpaca's own words", name)


def _translate_memory(keys: Keys, out: dict[str, Any]) -> None:
    """Move the settings of recomputation, offloading, compilation and mesh from `keys` to `out`."""
    out["gradient_checkpointing"] = bool(keys.take("enable_activation_checkpointing")[1])
    if keys.take("enable_activation_offloading")[1]:
        out["activation_offloading"] = True
    if keys.take("fsdp_cpu_offload")[1]:
        out["cpu_offload"] = True
    if keys.take("optimizer_in_bwd")[1]:
        keys.note("optimizer_in_bwd", "the optimizer runs after the backward", True)
    if keys.take("compile")[1]:
        out["torch_compile"] = "layer"
    if (size := keys.take(name := "tensor_parallel_dim")[1]) not in (None, 1):
        keys.note(name, "tensor parallelism is not converted; the ranks share the batch", size)
    for name, new in (
        ("context_parallel_dim", "context_parallel_size"),
        ("data_parallel_shard_dim", "dp_shard_size"),
        ("data_parallel_replicate_dim", "dp_replicate_size"),
    ):
        if (size := keys.take(name)[1]) is not None:
            out[new] = size


def _translate_run(keys: Keys, out: dict[str, Any]) -> None:
    """Move the length of the run and the logger from `keys` to `out`.

    Keys that refer to other settings with `${...}` are removed with a note.
    """
    key, most = keys.take("max_steps_per_epoch")
    if most and out["num_train_epochs"] == 1:
        out["max_steps"] = most
    elif most:
        keys.note(key, "set train.max_steps: the steps of all epochs", most)
    keys.take_all([key for key in ("seed",) if keys.unconverted.get(key) is None])
    keys.take("run_val_every_n_steps")
    logger = _split_component(keys.take("metric_logger")[1])[0]
    if logger == "WandBLogger":
        out["report_to"] = "wandb"
    elif logger == "TensorBoardLogger":
        out["report_to"] = "tensorboard"
    for key in [k for k in keys.unconverted if "${" in str(keys.unconverted[k])]:
        keys.note(
            key, "refers to another setting of the file; set it yourself", keys.unconverted.pop(key)
        )
