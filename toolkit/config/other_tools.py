"""Settings and configs of other training tools.

Recognises the tool that a config was written for, and suggests the setting of this toolkit for a
name that users of Trainer, TRL, axolotl, torchtune or Lightning are used to. Imports no torch.
"""

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Mapping
from typing import Any

from toolkit.config.fields import setting_types
from toolkit.config.kinds import KINDS, section_names
from toolkit.config.settings import FinetuneConfig, RunConfig
from toolkit.errors import ConfigError

TOOLKIT = "toolkit"
"""Name of this toolkit's own configs in `recognise_tool`."""
TOOL_TITLES = {
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "ms-swift": "ms-swift",
    "open-instruct": "open-instruct",
    "openrlhf": "OpenRLHF",
    "torchtune": "torchtune",
    "trainer": "transformers' Trainer",
    "trl": "TRL",
    "unsloth": "Unsloth",
}
"""Tool -> its name in messages. `toolkit convert-config` converts configs of these tools."""
TOOL_CHOICES = (
    *("axolotl", "llama-factory", "ms-swift", "open-instruct", "open-instruct-dpo"),
    *("openrlhf-sft", "openrlhf-dpo", "openrlhf-rm", "openrlhf-kto", "torchtune", "trainer"),
    *("trl", "trl-dpo", "trl-orpo", "trl-kto", "trl-cpo", "trl-reward", "unsloth"),
)
"""Values of `--from`: a tool, with its command if the keys do not determine the objective."""
_TOOLKIT_KEYS = frozenset[str]().union(*(section_names(kind.config) for kind in KINDS))
_FOREIGN_KEYS = 3  # a config with so many keys of another tool is not just misspelled
# Keys that only one tool has. The first tool with one of its keys wins.
_KEYS: tuple[tuple[str, set[str]], ...] = (
    (
        "llama-factory",
        {"finetuning_type", "stage", "cutoff_len", "pref_loss", "pref_beta", "pref_ftx"}
        | {"freeze_trainable_layers", "neat_packing", "lora_target", "quantization_bit"},
    ),
    (
        "ms-swift",
        {"tuner_type", "train_type", "sft_type", "rlhf_type", "split_dataset_ratio", "quant_bits"},
    ),
    (
        "open-instruct",
        {"use_lora", "use_qlora", "with_tracking", "checkpointing_steps", "dataset_mixer_list"}
        | {"use_slow_tokenizer", "gamma_beta_ratio", "hf_metadata_dataset", "dataset_mix_dir"},
    ),
    (
        "openrlhf",
        {"train.micro_batch_size", "ds.zero_stage", "adam.lr", "data.max_len", "model.beta"}
        | {"model.model_name_or_path", "pretrain", "zero_stage", "packing_samples"}
        | {"micro_train_batch_size", "ckpt.output_dir"},
    ),
    ("axolotl", {"base_model", "micro_batch_size", "sequence_len"}),
    (
        "trl",
        {"use_peft", "dataset_mixture", "max_length", "assistant_only_loss", "packing"}
        | {"model_name_or_path"},
    ),
    (
        "trainer",
        {"per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate"}
        | {"gradient_accumulation_steps", "lr_scheduler_type", "max_steps", "bf16", "fp16"},
    ),
)


def recognise_tool(settings: Mapping[str, Any]) -> str | None:
    """Recognise the tool that a config was written for, by its keys.

    Args:
        settings: content of a YAML or JSON file, or the flags of a command.

    Returns:
        `TOOLKIT`, a key of `TOOL_TITLES`, the name of a tool whose configs cannot be converted (see
        `is_convertible`), or None if no tool is recognised.
    """
    keys = {*map(str, settings)}
    if "_component_" in keys or any(
        isinstance(value, Mapping) and "_component_" in value for value in settings.values()
    ):
        return "torchtune"
    model = settings.get("model")
    if (keys and keys <= _TOOLKIT_KEYS) or (isinstance(model, Mapping) and "name_or_path" in model):
        return TOOLKIT
    if tool := _recognise_unconvertible(settings, keys):
        return tool
    return next((tool for tool, marks in _KEYS if marks & keys), None)


def is_convertible(tool: str | None) -> bool:
    """Return True if `toolkit convert-config` converts configs of the tool."""
    return tool in TOOL_TITLES


def refuse_foreign_config(settings: Mapping[str, Any], file: object) -> None:
    """Refuse a config of another tool.

    Args:
        settings: content of the file.
        file: its path, for the message.

    Raises:
        ConfigError: names the tool, and the command that converts the file.
    """
    tool = recognise_tool(settings)
    foreign = [str(key) for key in settings if key not in _TOOLKIT_KEYS]
    if tool in (None, TOOLKIT) or len(foreign) < _FOREIGN_KEYS:
        return
    keys = ", ".join(foreign[:_FOREIGN_KEYS]) + (", ..." if len(foreign) > _FOREIGN_KEYS else "")
    if is_convertible(tool):
        title = TOOL_TITLES[str(tool)]
        raise ConfigError(
            f"{file} is a config of {title} ({keys}), not of this toolkit; convert it with "
            f"`toolkit convert-config {file} --output mine.yaml`"
        )
    raise ConfigError(
        f"{file} is a config of {tool} ({keys}), which cannot be converted; `toolkit recipes "
        "--copy finetune` puts configs of this toolkit into the current folder"
    )


def _recognise_unconvertible(settings: Mapping[str, Any], keys: set[str]) -> str | None:
    """Recognise a tool whose configs cannot be converted; return its name or None."""
    sections = {key for key in keys if isinstance(settings.get(key), Mapping)}
    if "actor_rollout_ref" in keys or {"trainer", "data", "model"} <= sections:
        return "verl"
    if "exp_manager" in keys or {"policy", "cluster"} <= sections:
        return "NeMo"
    data = settings.get("data")
    if isinstance(data, Mapping) and "class_path" in data:
        return "LitGPT"
    peft = settings.get("peft_config")
    if {"model_class", "dist_config"} & keys or (isinstance(peft, Mapping) and "name" in peft):
        return "LLaMA-Factory v1"
    return None


ADAPTER_HINT = re.compile(r"lora|peft|adapter|dora\b|pissa|4bit|quant_?bits|quantization_bit")
"""Matches names of settings that request adapters or a quantised base model."""
OBJECTIVE_HINT = re.compile(
    r"(^|_)(dpo|kto|orpo|simpo|cpo|ipo|ppo|grpo|rloo|rlhf|pref|reward|rl|kd|distill|teacher)(_|$)"
)
"""Matches names of settings that request another objective than supervised training."""

# Setting of this toolkit, with a value if the value differs -> its names in other tools.
OTHER_NAMES = {
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
    "sharding.mlp_chunk_tokens": "tiled_mlp tiled_mlp_num_shards use_tiled_mlp",
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
    "data.columns: {text: NAME}": "dataset_text_field text_field text_key text_column",
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
    "optim.lr_scheduler_kwargs: {min_lr_rate: SHARE}": """min_lr min_lr_ratio min_lr_rate
        cosine_min_lr_ratio""",
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
    "lora.from": """adapter_name_or_path lora_model_dir adapter_path lora_weights peft_model_id
        resume_from_adapter""",
    "lora.lora_alpha": "alpha",
    "lora.lora_dropout": "dropout",
    "lora.target_modules": "lora_target_modules lora_target lora_target_linear lora_attn_modules",
    "lora.modules_to_save": "lora_modules_to_save additional_target",
    "lora.load_in_4bit: true": "qlora quantization quantization_bit quantize_base",
    "lora.use_dora": "peft_use_dora lora_use_dora",
    "preference.loss_type": "rl pref_loss dpo_loss_type",
    "preference.beta": "rl_beta dpo_beta pref_beta orpo_alpha orpo_beta",
    "preference.label_smoothing": "dpo_label_smoothing",
    "preference.rpo_alpha": "cpo_alpha pref_ftx",
    "preference.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "preference.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "metrics.report_to": "use_wandb logger log_with tracker",
    "metrics.project": "wandb_project project_name trackio_project",
    "metrics.run_name": "wandb_run_name wandb_name run_id experiment_name",
    "hub.hub_model_id": "repo_id hub_repo_id",
    "output_dir (the same command on it resumes)": """resume_from_checkpoint overwrite_output_dir
        auto_resume_from_checkpoints""",
    "the Accelerate YAML, or --num_processes": "num_processes num_gpus n_gpus devices use_cpu",
    "the section sharding": "fsdp fsdp_config deepspeed fsdp_version",
}
# Settings that were removed before 0.1.0 -> what to use instead.
REMOVED = {
    "sharding.layers_per_unit": "a unit is a decoder layer, or a module of sharding.layer_classes",
    "sharding.sublayer_units": "name the parts in sharding.layer_classes",
    "sharding.base_model_unit": "it had no benefit; see sharding.embedding_units",
    "sharding.output_dtype": "outputs have the dtype that they are computed in",
    "sharding.cast_forward_inputs": "inputs are always cast, as in FSDP2",
    "sharding.prefetch_order": "the order is recorded in the first forward",
    "sharding.unshard_early": "it had no measurable benefit",
    "sharding.pin_memory": "host memory is page-locked if a device copies it",
    "sharding.activation_checkpointing_modules": "decoder layers are recomputed, or every k-th",
    "train.spike_window": "train.skip_spikes compares with the preceding 128 steps",
    "train.memory_snapshot": "train.profile_steps writes one on CUDA",
    "train.early_stopping_threshold": "any better value counts",
    "train.eval_max_new_tokens": "an answer to train.eval_prompts has at most 64 tokens",
    "data.text_column": "data.columns: {text: NAME}",
    "data.dataset_num_proc": "every core of the process encodes; taskset limits them",
    "model.pad_to_multiple_of": "set model.resize_embeddings to the multiple, such as 64",
    "optim.min_lr_rate": "optim.lr_scheduler_kwargs: {min_lr_rate: 0.1}",
    "optim.decay_norms_and_biases": "vectors do not decay",
    "optim.embedding_learning_rate": "all parameters have optim.learning_rate",
    "checkpoint.save_permanent_steps": "checkpoint.export_steps writes exports that are kept",
    "checkpoint.greater_is_better": "the name of the metric decides; lower is better for a loss",
    "lora.adapter_dtype": "adapters are float32",
    "lora.bnb_4bit_quant_type": "the type is always nf4",
    "lora.bnb_4bit_skip_modules": "lora.modules_to_save names modules to train unquantised",
    "metrics.tags": "set them in the tracker (WANDB_TAGS)",
    "metrics.disable_tqdm": "TQDM_DISABLE=1 in the environment",
    "hub.hub_revision": "toolkit push RUN --repo_id ORG/NAME --revision BRANCH",
}
_SETTINGS_BY_OTHER_NAME = {
    name: setting for setting, names in OTHER_NAMES.items() for name in names.split()
}


def suggest_setting(cls: type, section: type, prefix: str, path: str) -> str | None:
    """Suggest the setting that a user may have meant by an unknown one.

    The last part of the name is looked up in all sections of `cls`, then in the other kinds of
    runs, then among the setting names of other tools. If that fails, the most similar name is
    searched, first in `section` and then in all sections.

    Args:
        cls: settings class of the run, or of an entry of a list of sections.
        section: class of the section that contains the name.
        prefix: dotted name of that section, ending in a dot.
        path: the unknown dotted setting.

    Returns:
        The suggestion as text for a message, or None if no name is similar. It may list several
        settings joined by "or", or name another kind of run.
    """
    leaf = path.split(".")[-1]
    local_names = [*setting_types(section)]
    similar_here = [
        prefix + name for name in difflib.get_close_matches(path[len(prefix) :], local_names, n=1)
    ]
    if not issubclass(cls, RunConfig):
        return next(iter(similar_here), None)
    if same_leaf := settings_named(cls, leaf):
        return " or ".join(same_leaf)
    settings_here = _list_settings(cls)  # type: ignore[arg-type]
    translated = _SETTINGS_BY_OTHER_NAME.get(leaf, path)
    translated_name = translated.partition(":")[0]
    # Search the kinds that extend `cls` or differ from it. Each offers what earlier ones lack.
    earlier = {*settings_here, *section_names(cls)}
    for kind in KINDS:
        settings = _list_settings(kind.config)  # type: ignore[arg-type]
        sections = section_names(kind.config)
        names = [name for name in settings if name not in earlier and name.endswith(f".{leaf}")]
        if path in sections - earlier:
            names = [path]
        elif translated_name in {*settings} - earlier:
            names = [translated]
        if names:
            return f"{names[0]} of {kind.title} (toolkit {kind.command}, recipes/{kind.name}.py)"
        earlier |= {*settings, *sections}
    if leaf in _SETTINGS_BY_OTHER_NAME:
        return translated
    leaves = {name.split(".")[-1]: name for name in reversed(settings_here)}
    similar = [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return next(iter([*similar_here, *similar]), None)


# Setting -> values of other tools -> the value of this toolkit.
_VALUES = {
    "preference.loss_type": {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "cdpo": "sigmoid"}
    | {"bradley_terry": "reward", "rm": "reward", "reward_model": "reward", "cpo": "simpo"},
    "optim.optim": {"adamw": "adamw_torch_fused", "adamw_torch": "adamw_torch_fused"}
    | {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"},
    "sharding.param_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "sharding.reduce_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32"},
}


def suggest_value(setting: str, kind: Any, value: str) -> str | None:
    """Suggest the value that a user may have meant by a wrong one, or None.

    Args:
        setting: dotted name of the setting.
        kind: type of the setting. Similar values are searched only among `Literal` choices.
        value: the wrong value.
    """
    inner = [kind, *typing.get_args(kind)]
    literals = [part for part in inner if typing.get_origin(part) is typing.Literal]
    choices = [c for part in literals for c in typing.get_args(part) if isinstance(c, str)]
    translated = _VALUES.get(setting, {}).get(value)
    similar = difflib.get_close_matches(value, choices, n=1, cutoff=0.7)
    return translated or next(iter(similar), None)


def nearest_settings(cls: type, section: type, prefix: str, name: str) -> list[str]:
    """List up to three settings with the most similar names, the most similar one first.

    Args:
        cls: settings class of the run.
        section: class of the section that contains the name.
        prefix: dotted name of that section, ending in a dot. If it is empty, all sections of a
            run are searched.
        name: the unknown name within the section.
    """
    names = [prefix + name for name in setting_types(section)]
    if not prefix and issubclass(cls, RunConfig):
        names = _list_settings(cls)  # type: ignore[arg-type]
    by_leaf = {n.split(".")[-1]: n for n in reversed(names)}
    return [by_leaf[n] for n in difflib.get_close_matches(name, by_leaf, n=3, cutoff=0.0)]


def find_setting(name: str) -> str:
    """Translate another tool's setting name to the dotted setting that takes the same values.

    Returns:
        The dotted setting, or `name` itself if there is no unique one.
    """
    setting = _SETTINGS_BY_OTHER_NAME.get(name)
    if setting in _list_settings(FinetuneConfig):
        return setting
    same_leaf = settings_named(FinetuneConfig, name)
    return same_leaf[0] if len(same_leaf) == 1 else name


def settings_named(cls: type, leaf: str) -> list[str]:
    """List the dotted settings of the config class `cls` whose last part is `leaf`."""
    return [name for name in _list_settings(cls) if name.split(".")[-1] == leaf]


@functools.cache
def _list_settings(cls: type, prefix: str = "") -> list[str]:
    """List the dotted names of all settings of a config class, each preceded by `prefix`."""
    settings: list[str] = []
    for name, kind in setting_types(cls).items():
        if dataclasses.is_dataclass(kind):
            settings += _list_settings(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            settings.append(prefix + name)
    return settings
