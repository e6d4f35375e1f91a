"""Keys of axolotl, TRL and transformers' Trainer: what is left out and why, and their defaults."""

from typing import Any

# Why a key of another tool has no setting here, or not one of the same meaning -> the keys.
LEFT = {
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
        group_by_length length_column_name padding_free""",
    "evaluation rows are packed as training rows are": "eval_sample_packing eval_packing",
    "rows are recognised by their columns (docs/finetuning.md)": """
        remove_unused_columns label_names message_property_mappings
        field_thinking template_thinking_key dataset_batch_size roles default_system_message
        message_field_training train_on_eos train_on_eot conversation shards""",
    "data.eval_files, or data.eval_split of the training data": """dataset_test_split test_split
        do_eval eval_on_start eval_dataset""",
    "there is one seed; it orders the samples too": "data_seed shuffle_seed",
    "a share of the data set that is used there; data.sources[].weight is a share of samples": """
        weight""",
    "set train.eval_steps and checkpoint.save_steps: the steps of an epoch / this number": """
        evals_per_epoch saves_per_epoch""",
    "train.eval_steps and checkpoint.save_steps count steps": "eval_delay",
    "checkpoints are whole, so that runs resume exactly": """save_only_model save_safetensors
        save_on_each_node save_first_step""",
    "the same command on the same output_dir resumes": """resume_from_checkpoint
        overwrite_output_dir auto_resume_from_checkpoints""",
    "an adapter begins anew; merge the old one first": "lora_model_dir peft_layers_to_transform",
    "published once, at the end (section hub)": "hub_strategy hub_always_push",
    "the tracker's own environment variables (WANDB_ENTITY, WANDB_WATCH, ...)": """wandb_entity
        wandb_watch wandb_log_model wandb_mode wandb_run_id logging_dir trackio_space_id
        eval_table_size""",
    "the command is `toolkit finetune`, which trains": "do_train do_predict strict debug",
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
        peft_init_lora_weights rank_pattern alpha_pattern layers_to_transform layers_pattern
        loraplus_lr_ratio loraplus_lr_embedding""",
    "settings of the optimizer have names of their own (adam_beta1, adam_epsilon, ...)": """
        optim_args optim_target_modules""",
    "this trains on a next-token loss: supervised or plain text": """rl dpo_beta beta
        reward_model process_reward_model""",
    "use `toolkit train` for pretraining": "pretraining_dataset pretrain_multipack_attn",
    "not needed": "env report_url",
}
# The default of a tool where a key is missing, read in its sources: axolotl's schema and
# `core/builders/base.py`, TRL's `SFTConfig` and `ModelConfig`, transformers' `TrainingArguments`.
UNSAID: dict[str, dict[str, Any]] = {
    "axolotl": {"sample_packing": False, "lr_scheduler": "cosine", "val_set_size": 0.0}
    | {"micro_batch_size": 1, "train_on_inputs": False, "bf16": "auto", "sequence_len": 512}
    | {"excess_length_strategy": "drop", "save_total_limit": 4},
    "trl": {"num_train_epochs": 3.0, "learning_rate": 2e-5, "max_length": 1024, "packing": False}
    | {"gradient_checkpointing": True, "bf16": True, "eval_strategy": "no"}
    | {"save_total_limit": None},
    "trainer": {"num_train_epochs": 3.0, "bf16": False, "packing": False, "eval_strategy": "no"}
    | {"save_total_limit": None},
}
# Of adapters; `trainer` has what PEFT and bitsandbytes do when a script calls them.
UNSAID_OF_LORA: dict[str, dict[str, Any]] = {
    "axolotl": {"bnb_4bit_use_double_quant": True},
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
    "trainer": {"lora_r": 8, "lora_alpha": 8, "bnb_4bit_quant_type": "fp4"},
}
_REASONS = {old: why for why, names in LEFT.items() for old in names.split()}


def why_left(name: str) -> str | None:
    """Return why another tool's `name` is not carried over; None: it may be."""
    return _REASONS.get(name)
