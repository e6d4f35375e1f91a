"""Settings under the names that users of Trainer, TRL, axolotl, torchtune or Lightning bring."""

import dataclasses
import difflib
import functools
import typing
from typing import Any

from toolkit.config.settings import FinetuneConfig, RunConfig

# The setting here, with its value where it is another -> its names elsewhere.
ELSEWHERE = {
    "model.name_or_path": """base_model model_name model_id model_name_or_path model_path
        pretrained_model_name_or_path""",
    "model.tokenizer_name_or_path": "tokenizer tokenizer_name tokenizer_path tokenizer_config",
    "model.revision": "model_revision revision_of_model",
    "model.dtype": "torch_dtype model_dtype",
    "model.attn_implementation": "flash_attention use_flash_attention_2 flash_attn attention",
    "model.kernels: liger": "use_liger_kernel use_liger liger_kernel",
    "sharding.param_dtype: bfloat16": "bf16 fp16 bfloat16 float16 mixed_precision precision",
    "sharding.activation_checkpointing: full": """gradient_checkpointing
        use_gradient_checkpointing gradient_checkpointing_kwargs enable_activation_checkpointing""",
    "sharding.cpu_offload: true": "offload_params fsdp_offload_params fsdp_cpu_offload",
    "sharding.activation_offload: true": "activation_offloading enable_activation_offloading",
    "sharding.torch_compile": "compile torch_compile_model",
    "sharding.layer_classes": """fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap
        fsdp_transformer_cls_to_wrap""",
    "data.sequence_length": """max_length max_seq_length max_seq_len sequence_len seq_len seq_length
        block_size cutoff_len model_max_length""",
    "data.train_files": "train_file data_path dataset_path data_files train_data path",
    "data.eval_files": "validation_file validation_files eval_file test_datasets",
    "data.eval_split": "val_set_size validation_split validation_split_percentage test_size",
    "data.dataset_name": "dataset dataset_id",
    "data.sources": "datasets dataset_mixture dataset_mixer",
    "data.text_column": "dataset_text_field text_field text_key",
    "data.packing": "sample_packing packed pack_sequences multipack",
    "data.num_workers": "dataloader_num_workers",
    "data.supervise: all": "train_on_inputs train_on_input train_on_prompt",
    "data.supervise: assistant": "assistant_only_loss train_on_responses_only roles_to_train",
    "data.supervise: completion": "completion_only_loss",
    "data.supervise: last_assistant": "mask_history",
    "optim.optim": "optimizer optimizer_type",
    "optim.learning_rate": "lr max_lr peak_lr base_lr",
    "optim.lr_scheduler_type": "lr_scheduler scheduler lr_schedule decay_type",
    "optim.warmup_steps": "warmup_ratio lr_warmup_steps num_warmup_steps warmup_iters warmup",
    "optim.min_lr_rate": "min_lr min_lr_ratio cosine_min_lr_ratio",
    "optim.max_grad_norm": "gradient_clip_val grad_clip gradient_clipping clip_grad_norm",
    "optim.adam_epsilon": "adam_eps eps",
    "train.per_device_train_batch_size": """batch_size micro_batch_size train_batch_size
        local_batch_size train_micro_batch_size_per_gpu""",
    "train.per_device_eval_batch_size": "eval_batch_size val_batch_size",
    "train.gradient_accumulation_steps": """gradient_accumulation grad_accum_steps grad_accum
        accumulate_grad_batches""",
    "train.num_train_epochs": "num_epochs epochs max_epochs",
    "train.max_steps": "max_train_steps steps total_steps max_iters",
    "train.eval_steps": "eval_strategy evaluation_strategy val_check_interval eval_interval",
    "train.logging_steps": "logging_strategy log_interval log_every_n_steps log_freq",
    "train.deterministic": "full_determinism",
    "train.neftune_noise_alpha": "noisy_embedding_alpha neftune_alpha",
    "checkpoint.save_steps": """save_strategy save_interval checkpoint_interval saves_per_epoch
        save_every_n_steps""",
    "checkpoint.keep_best: true": "load_best_model_at_end save_best",
    "lora.r": "rank lora_r lora_rank use_peft use_lora",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "lora_target_modules lora_target lora_target_linear lora_attn_modules",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.load_in_4bit: true": "qlora quantization quantization_bit quantize_base",
    "lora.use_dora": "peft_use_dora lora_use_dora",
    "metrics.report_to": "use_wandb logger log_with tracker",
    "metrics.project": "wandb_project project_name trackio_project",
    "metrics.run_name": "wandb_run_name wandb_name run_id experiment_name",
    "hub.hub_model_id": "repo_id hub_repo_id",
    "output_dir (the same command on it resumes)": """resume_from_checkpoint overwrite_output_dir
        auto_resume_from_checkpoints""",
    "the Accelerate YAML, or --num_processes": "num_processes num_gpus n_gpus devices use_cpu",
    "the section sharding": "fsdp fsdp_config deepspeed fsdp_version",
}
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
    "data are prepared once and cached by `datasets`": """dataset_prepared_path
        dataset_processes shuffle_merged_datasets dataset_keep_in_memory skip_prepare_dataset
        dataset_kwargs dataset_exact_deduplication""",
    "a batch is padded to its longest row; packing fills samples": """pad_to_sequence_len
        group_by_length length_column_name padding_free""",
    "evaluation rows are packed as training rows are": "eval_sample_packing eval_packing",
    "rows are recognised by their columns (docs/finetuning.md)": """
        remove_unused_columns label_names field_messages message_property_mappings
        field_thinking template_thinking_key message_field_role message_field_content
        field_instruction field_output field_input dataset_batch_size roles default_system_message
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
    "a learning rate there; optim.min_lr_rate is a share of the peak": """min_lr
        lr_div_factor cosine_constant_lr_ratio""",
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
# What a tool does where a key is missing, read in its sources: axolotl's schema and
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
_HERE = {old: here for here, names in ELSEWHERE.items() for old in names.split()}


def meant(cls: type, section: type, walked: str, path: str) -> str | None:
    """Return what a user may have meant by the unknown setting `path`; None where nothing is near.

    A name is looked for in all sections of `cls`, then under the names of other tools, then near
    those of `section`, whose dotted name is `walked`, then near all.
    """
    leaf, local = path.split(".")[-1], [f.name for f in dataclasses.fields(section)]
    near_here = [walked + n for n in difflib.get_close_matches(path[len(walked) :], local, n=1)]
    if not issubclass(cls, RunConfig):
        return next(iter(near_here), None)
    known = _settings(cls)  # type: ignore[arg-type]
    if found := leaves_of(cls, leaf):
        return " or ".join(found)
    finetuning = _settings(FinetuneConfig)
    of_finetuning = [name for name in finetuning if name == path or name.endswith(f".{leaf}")]
    if path in {field.name for field in dataclasses.fields(FinetuneConfig)}:
        of_finetuning = [path]  # a section that only fine-tuning has
    if leaf in _HERE and not of_finetuning:
        setting = _HERE[leaf].partition(":")[0]
        if setting in known or setting not in finetuning:
            return _HERE[leaf]
        of_finetuning = [_HERE[leaf]]
    if of_finetuning:
        return f"{of_finetuning[0]} of fine-tuning (toolkit finetune, recipes/finetune.py)"
    leaves = {name.split(".")[-1]: name for name in reversed(known)}
    near = [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return next(iter([*near_here, *near]), None)


def nearest(cls: type, section: type, walked: str, name: str) -> list[str]:
    """Return three settings whose names are the nearest to `name`: of its section, or of all."""
    names = [walked + f.name for f in dataclasses.fields(section)]
    if not walked and issubclass(cls, RunConfig):
        names = _settings(cls)  # type: ignore[arg-type]
    by_leaf = {n.split(".")[-1]: n for n in reversed(names)}
    return [by_leaf[n] for n in difflib.get_close_matches(name, by_leaf, n=3, cutoff=0.0)]


def setting_of(name: str) -> str:
    """Return the setting that has the values of another tool's `name`; the name: there is none."""
    known = _settings(FinetuneConfig)
    if _HERE.get(name) in known:
        return _HERE[name]
    found = leaves_of(FinetuneConfig, name)
    return found[0] if len(found) == 1 else name


def why_left(name: str) -> str | None:
    """Return why another tool's `name` is not carried over; None: it may be."""
    return _REASONS.get(name)


def leaves_of(cls: type, leaf: str) -> list[str]:
    """Return the settings of a config whose last part is `leaf`."""
    return [name for name in _settings(cls) if name.split(".")[-1] == leaf]


@functools.cache
def _settings(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted name of every setting of a config."""
    found = list[str]()
    for name, kind in typing.get_type_hints(cls).items():
        section = dataclasses.is_dataclass(kind)
        found += _settings(kind, f"{prefix}{name}.") if section else [prefix + name]  # type: ignore[arg-type]
    return found
