"""Keys of axolotl, TRL and transformers' Trainer that are not converted, and their defaults."""

from typing import Any

from toolkit.config.preference import DPO_FAMILY

# Reason why keys of other tools have no setting here with the same meaning -> these keys.
NOT_CONVERTED = {
    "the class is that of config.json": "model_type tokenizer_type is_falcon_derived_model type",
    "each process has one device; the Accelerate YAML decides": """device_map local_rank ddp
        ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb
        experimental_skip_move_to_device parallelism_config accelerator_config""",
    "tokens are those of the tokenizer: prepare it, and set model.tokenizer_name_or_path": """
        special_tokens eos_token pad_token bos_token tokens eot_tokens added_tokens_overrides
        resize_token_embeddings_to_32x tokenizer_use_fast tokenizer_legacy""",
    "give the bfloat16 checkpoint that it was quantised from; lora.load_in_4bit quantises": """
        model_quantization_config model_quantization_config_kwargs quantization_config gptq
        load_in_8bit bnb_config_kwargs llm_int8_threshold llm_int8_skip_modules""",
    "the base stays stored in what it computes in": "bnb_4bit_quant_storage",
    "the cache of keys and values is off while training": "use_cache",
    "each core of the process encodes": "dataset_num_proc preprocessing_num_workers",
    "data are prepared once and cached by `datasets`": """dataset_prepared_path
        dataset_processes shuffle_merged_datasets dataset_keep_in_memory skip_prepare_dataset
        dataset_kwargs dataset_exact_deduplication""",
    "a batch is padded to its longest row; packing fills samples": """pad_to_sequence_len
        group_by_length length_column_name padding_free
        dpo_padding_free""",
    "evaluation rows are packed as training rows are": "eval_sample_packing eval_packing",
    "rows are recognised by their columns (docs/finetuning.md)": """
        remove_unused_columns label_names message_property_mappings
        field_thinking template_thinking_key dataset_batch_size roles default_system_message
        message_field_training train_on_eos train_on_eot conversation shards""",
    "set data.dataset_split, the split to train on": "dataset_splits",
    "data.eval_files, or data.eval_split of the training data": """dataset_test_split test_split
        do_eval eval_on_start eval_dataset""",
    "there is one seed; it orders the samples too": "data_seed shuffle_seed",
    "a share of the data set that is used there; data.sources[].weight is a share of samples": """
        weight""",
    "set train.eval_steps and checkpoint.save_steps: the steps of an epoch / this number": """
        evals_per_epoch saves_per_epoch""",
    "train.eval_steps and checkpoint.save_steps count steps": "eval_delay",
    "checkpoints are complete, so that runs resume exactly": """save_only_model save_safetensors
        save_on_each_node save_first_step""",
    "the same command on the same output_dir resumes": """resume_from_checkpoint
        overwrite_output_dir auto_resume_from_checkpoints""",
    "every layer is adapted; name modules in lora.target_modules": "peft_layers_to_transform",
    "published once, at the end (section hub)": "hub_strategy hub_always_push",
    "the tracker's own environment variables (WANDB_ENTITY, WANDB_WATCH, ...)": """wandb_entity
        wandb_watch wandb_log_model wandb_mode wandb_run_id logging_dir trackio_space_id
        eval_table_size""",
    "the command is that of the recipe, which trains": "do_train do_predict strict debug",
    "train.skip_spikes skips a step whose loss jumps": """loss_watchdog_threshold
        loss_watchdog_patience""",
    "an answer to train.eval_prompts has 64 tokens at most": "eval_max_new_tokens",
    "one line a logged step": """log_level log_level_replica logging_first_step
        logging_nan_inf_filter include_tokens_per_second include_num_input_tokens_seen""",
    "fp32 products keep PyTorch's default; with bfloat16 hardly any remain": "tf32",
    "tokens of all devices and micro-batches count alike in any case": """
        average_tokens_across_devices num_items_in_batch""",
    "the loss never holds all logits at once": """liger_fused_linear_cross_entropy
        cut_cross_entropy liger_cross_entropy loss_type chunked_cross_entropy""",
    "kernels of plugins are not loaded; model.kernels: liger, sharding.torch_compile": """plugins
        use_kernels lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_lora_mlp
        xformers_attention s2_attention flash_attn_cross_entropy flash_attn_rms_norm
        flash_attn_fuse_mlp""",
    "a learning rate there; optim.lr_scheduler_kwargs has min_lr_rate, a share of the peak": """
        min_lr lr_div_factor cosine_constant_lr_ratio""",
    "choose train.gradient_accumulation_steps: global batch = processes x per device x that": """
        batch_size auto_find_batch_size""",
    "PEFT's own default": """lora_fan_in_fan_out fan_in_fan_out inference_mode init_lora_weights
        peft_init_lora_weights layers_to_transform layers_pattern
        loraplus_lr_ratio loraplus_lr_embedding""",
    "settings of the optimizer have names of their own (adam_beta1, adam_epsilon, ...)": """
        optim_args optim_target_modules""",
    "the reference is computed once, before the first step, and stored in the run's folder": """
        precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size
        use_logits_to_keep dpo_use_logits_to_keep""",
    "the reference is the model that training begins with": """ref_model_init_kwargs
        rl_adapter_ref_model force_use_ref_model ref_model_mixup_alpha ref_model_sync_steps""",
    "a pair that is too long keeps its prompt, and both answers lose their end": """
        max_prompt_length max_prompt_len max_completion_length max_target_length
        truncation_mode""",
    "dropout is always off in preference tuning": "disable_dropout",
    "train.eval_prompts are answered at evaluations": """generate_during_eval
        dpo_generate_during_eval""",
    "decided by the tokenizer and the model": """label_pad_token_id padding_value
        is_encoder_decoder pad_to_multiple_of""",
    "belongs to losses that are not supported": "f_alpha_divergence_coef",
    "belongs to the preference loss discopop": "discopop_tau",
    "samples are shuffled again each epoch": "train_sampling_strategy",
    "use `toolkit train` for pretraining": "pretraining_dataset pretrain_multipack_attn",
    "not needed": "env report_url",
}
# Classes of TRL without `Config` and `Trainer` -> the objectives that they train.
TRAINERS = {"SFT": "", "DPO": "dpo", "ORPO": "orpo", "KTO": "kto", "CPO": "cpo", "Reward": "reward"}
UNSUPPORTED_TRAINERS = {
    "GRPO",
    "RLOO",
    "PPO",
    "PPOv2",
    "OnlineDPO",
    "XPO",
    "NashMD",
    "GKD",
    "BCO",
    "PRM",
    "TPO",
}
# axolotl's `rl` -> the objective.
AXOLOTL_OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "kto": "kto", "simpo": "cpo"}
AXOLOTL_OBJECTIVES["reward"] = "reward"  # its `reward_model`
# Objective -> keys and losses that only its configs of TRL have. The first match counts.
OBJECTIVE_MARKS: dict[str, set[str]] = {
    "cpo": {"cpo_alpha", "simpo_gamma", "simpo", "alphapo"},
    "kto": {"desirable_weight", "undesirable_weight", "kto", "apo_zero_unpaired"},
    "reward": {"center_rewards_coefficient", "SEQ_CLS"},
    "dpo": {"beta", "precompute_ref_log_probs", "max_prompt_length", "rpo_alpha", "loss_weights"}
    | {"sync_ref_model", "ld_alpha", "f_divergence_type", "reference_free", "use_weighting"}
    | {*DPO_FAMILY, "discopop_tau", "aot_pair", "kto_pair"},
}
ONLINE = {"num_generations", "reward_funcs", "reward_model_path", "use_vllm", "vllm_mode"}
# Objective -> supported losses, the default first.
LOSSES = {"dpo": DPO_FAMILY} | {
    "orpo": ("orpo",),
    "kto": ("kto",),
    "cpo": ("simpo",),
    "reward": ("reward",),
}
# Losses of DPOTrainer that TRL 1.16 does not smooth and the toolkit does.
SMOOTHED_ONLY_HERE = ("sigmoid", "sigmoid_norm")
# Key that changes the objective -> its harmless values, and why other values are refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "sync_ref_model": ((False,), "the reference does not follow the model here"),
    "ref_model": (
        (),
        "the reference is the model that training begins with, or preference.reference",
    ),
    "ref_adapter_name": ((), "the reference is the model that training begins with"),
    "reference_free": ((False,), "preference.loss_type simpo and orpo need no reference"),
    "f_divergence_type": (("reverse_kl",), "only reverse_kl is supported"),
    "ld_alpha": ((1.0,), "all tokens of an answer weigh alike here"),
    "use_weighting": ((False,), "pairs weigh alike here"),
    "dpo_use_weighting": ((False,), "pairs weigh alike here"),
    "dpo_norm_loss": ((False,), "preference.loss_type sigmoid_norm takes means of tokens"),
}
# Defaults of the tools for missing keys, from their sources: axolotl's schema and
# `core/builders/base.py`, TRL's `SFTConfig` and `ModelConfig`, transformers' `TrainingArguments`.
TOOL_DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {"sample_packing": False, "lr_scheduler": "cosine", "val_set_size": 0.0}
    | {"micro_batch_size": 1, "train_on_inputs": False, "bf16": "auto", "sequence_len": 512}
    | {"excess_length_strategy": "drop", "save_total_limit": 4},
    "trl": {"num_train_epochs": 3.0, "learning_rate": 2e-5, "max_length": 1024, "packing": False}
    | {"gradient_checkpointing": True, "bf16": True, "eval_strategy": "no"}
    | {"save_total_limit": None},
    "trainer": {"num_train_epochs": 3.0, "bf16": False, "packing": False, "eval_strategy": "no"}
    | {"save_total_limit": None},
}
# Tool -> objective -> default learning rate.
DEFAULT_RATES = {"trl": {"reward": 1e-4} | dict.fromkeys(("dpo", "orpo", "kto", "cpo"), 1e-6)} | {
    "trainer": dict.fromkeys(LOSSES, 5e-5),
    "axolotl": {},
}
# Defaults of adapters; `trainer` has those of PEFT and bitsandbytes, which scripts call.
LORA_DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {"bnb_4bit_use_double_quant": True},
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "trainer": {"lora_r": 8, "lora_alpha": 8, "bnb_4bit_quant_type": "fp4"},
}
_REASONS = {key: reason for reason, keys in NOT_CONVERTED.items() for key in keys.split()}


def reason_not_converted(key: str) -> str | None:
    """Look up why a key of another tool is not converted; None if the key is in no such list."""
    return _REASONS.get(key)
