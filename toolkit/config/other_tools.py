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

OWN = "toolkit"
"""Name of this toolkit's own configs in `recognise_tool`."""
TITLES = {
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
NAMES = (
    *("axolotl", "llama-factory", "ms-swift", "open-instruct", "open-instruct-dpo"),
    *("openrlhf-sft", "openrlhf-dpo", "openrlhf-rm", "openrlhf-kto", "torchtune", "trainer"),
    *("trl", "trl-dpo", "trl-orpo", "trl-kto", "trl-cpo", "trl-reward", "unsloth"),
)
"""Values of `--from`: a tool, and its command where the keys do not tell the objective."""
_SECTIONS = {"model", "sharding", "data", "optim", "train", "checkpoint", "metrics", "hub"} | {
    "lora",
    "preference",
}
_TOP = {"output_dir", "seed"}
_FEW = 3  # so many keys of another tool are no slip of the pen
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
    """Return the tool whose keys a config has.

    Args:
        settings: content of a YAML or JSON file, or the flags of a command.

    Returns:
        `OWN`, a key of `TITLES`, the name of a tool whose configs cannot be converted (see
        `is_convertible`), or None if no tool is recognised.
    """
    keys = {*map(str, settings)}
    if "_component_" in keys or any(
        isinstance(value, Mapping) and "_component_" in value for value in settings.values()
    ):
        return "torchtune"
    model = settings.get("model")
    if (keys and keys <= _SECTIONS | {"output_dir", "seed"}) or (
        isinstance(model, Mapping) and "name_or_path" in model
    ):
        return OWN
    if tool := _unconvertible(settings, keys):
        return tool
    return next((tool for tool, marks in _KEYS if marks & keys), None)


def is_convertible(tool: str | None) -> bool:
    """Return whether `toolkit convert-config` converts configs of the tool."""
    return tool in TITLES


def refuse_foreign_config(settings: Mapping[str, Any], file: object) -> None:
    """Raise ConfigError if a config of another tool is given to a recipe.

    Args:
        settings: content of the file.
        file: its path, for the message.
    """
    tool = recognise_tool(settings)
    foreign = [str(key) for key in settings if key not in _SECTIONS | _TOP]
    if tool in (None, OWN) or len(foreign) < _FEW:
        return
    shown = ", ".join(foreign[:_FEW]) + (", ..." if len(foreign) > _FEW else "")
    if is_convertible(tool):
        raise ConfigError(
            f"{file} is a config of {TITLES[str(tool)]} ({shown}), not of this toolkit; convert "
            f"it: toolkit convert-config {file} --output mine.yaml"
        )
    raise ConfigError(
        f"{file} is a config of {tool} ({shown}), which cannot be converted; `toolkit recipes "
        "--copy finetune` puts configs of this toolkit into the current folder"
    )


def _unconvertible(settings: Mapping[str, Any], keys: set[str]) -> str | None:
    """Return the recognised tool if its configs have a layout that is not converted."""
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
"""Matches names of settings that ask for adapters or for a quantised base."""
OBJECTIVE_HINT = re.compile(
    r"(^|_)(dpo|kto|orpo|simpo|cpo|ipo|ppo|grpo|rloo|rlhf|pref|reward|rl|kd|distill|teacher)(_|$)"
)
"""Matches names of settings that ask for another objective than supervised training."""

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
# Settings that were there before 0.1.0 -> what to do instead.
GONE = {
    "sharding.layers_per_unit": "a unit is a decoder layer, or what sharding.layer_classes names",
    "sharding.sublayer_units": "name the parts in sharding.layer_classes",
    "sharding.base_model_unit": "it gained nothing; sharding.embedding_units makes the ends units",
    "sharding.output_dtype": "outputs have the dtype that they are computed in",
    "sharding.cast_forward_inputs": "inputs are always cast, as FSDP2 does",
    "sharding.prefetch_order": "the order is recorded in the first forward",
    "sharding.unshard_early": "it gained nothing that was measured",
    "sharding.pin_memory": "host memory is page-locked wherever a device copies it",
    "sharding.activation_checkpointing_modules": "decoder layers are recomputed, or every k-th",
    "train.spike_window": "train.skip_spikes compares with the 128 steps before",
    "train.memory_snapshot": "train.profile_steps writes one on CUDA",
    "train.early_stopping_threshold": "any better value counts",
    "train.eval_max_new_tokens": "an answer to train.eval_prompts has 64 tokens at most",
    "data.text_column": "data.columns: {text: NAME}",
    "data.dataset_num_proc": "each core of the process encodes; taskset gives it fewer",
    "model.pad_to_multiple_of": "model.resize_embeddings takes the multiple, such as 64",
    "optim.min_lr_rate": "optim.lr_scheduler_kwargs: {min_lr_rate: 0.1}",
    "optim.decay_norms_and_biases": "vectors do not decay",
    "optim.embedding_learning_rate": "all have optim.learning_rate",
    "checkpoint.save_permanent_steps": "checkpoint.export_steps keeps weights for good",
    "checkpoint.greater_is_better": "told by the metric's name: less is better of a loss",
    "lora.adapter_dtype": "adapters are float32",
    "lora.bnb_4bit_quant_type": "nf4 is what there is",
    "lora.bnb_4bit_skip_modules": "lora.modules_to_save names what stays whole and is trained",
    "metrics.tags": "set them in the tracker (WANDB_TAGS)",
    "metrics.disable_tqdm": "TQDM_DISABLE=1 in the environment",
    "hub.hub_revision": "toolkit push RUN --repo_id ORG/NAME --revision BRANCH",
}
_HERE = {old: here for here, names in ELSEWHERE.items() for old in names.split()}


def meant(cls: type, section: type, walked: str, path: str) -> str | None:
    """Return what a user may have meant by the unknown setting `path`; None where nothing is near.

    A name is looked for in all sections of `cls`, then under the names of other tools, then near
    those of `section`, whose dotted name is `walked`, then near all.
    """
    leaf, local = path.split(".")[-1], [*setting_types(section)]
    near_here = [walked + n for n in difflib.get_close_matches(path[len(walked) :], local, n=1)]
    if not issubclass(cls, RunConfig):
        return next(iter(near_here), None)
    known = _settings(cls)  # type: ignore[arg-type]
    if found := leaves_of(cls, leaf):
        return " or ".join(found)
    preferred = _HERE.get(leaf, path)
    # Kinds that extend `cls` or stand next to it, each with what the kinds before it lack.
    here, earlier = preferred.partition(":")[0], {*known, *section_names(cls)}
    for kind in KINDS:
        settings, sections = _settings(kind.config), section_names(kind.config)
        names = [name for name in settings if name not in earlier and name.endswith(f".{leaf}")]
        if path in sections - earlier:  # a section that only this kind has
            names = [path]
        elif here in {*settings} - earlier:
            names = [preferred]
        if names:
            return f"{names[0]} of {kind.title} (toolkit {kind.command}, recipes/{kind.name}.py)"
        earlier |= {*settings, *sections}
    if leaf in _HERE:
        return _HERE[leaf]
    leaves = {name.split(".")[-1]: name for name in reversed(known)}
    near = [leaves[n] for n in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)]
    return next(iter([*near_here, *near]), None)


# Setting -> values under the names of other tools, with those here.
_VALUES = {
    "preference.loss_type": {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "cdpo": "sigmoid"}
    | {"bradley_terry": "reward", "rm": "reward", "reward_model": "reward", "cpo": "simpo"},
    "optim.optim": {"adamw": "adamw_torch_fused", "adamw_torch": "adamw_torch_fused"}
    | {"adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"},
    "sharding.param_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "sharding.reduce_dtype": {"bf16": "bfloat16", "fp32": "float32"},
    "model.dtype": {"bf16": "bfloat16", "fp32": "float32"},
}


def nearest_value(setting: str, kind: Any, value: str) -> str | None:
    """Return the value that a user may have meant by `value`; None if no choice is near.

    Args:
        kind: type of the setting; only choices (`Literal`) have near values.
    """
    inner = [kind, *typing.get_args(kind)]
    literals = [part for part in inner if typing.get_origin(part) is typing.Literal]
    choices = [c for part in literals for c in typing.get_args(part) if isinstance(c, str)]
    known = _VALUES.get(setting, {}).get(value)
    return known or next(iter(difflib.get_close_matches(value, choices, n=1, cutoff=0.7)), None)


def nearest(cls: type, section: type, walked: str, name: str) -> list[str]:
    """Return three settings whose names are the nearest to `name`: of its section, or of all."""
    names = [walked + name for name in setting_types(section)]
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


def leaves_of(cls: type, leaf: str) -> list[str]:
    """Return the settings of a config whose last part is `leaf`."""
    return [name for name in _settings(cls) if name.split(".")[-1] == leaf]


@functools.cache
def _settings(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted name of every setting of a config."""
    found = list[str]()
    for name, kind in setting_types(cls).items():
        section = dataclasses.is_dataclass(kind)
        found += _settings(kind, f"{prefix}{name}.") if section else [prefix + name]  # type: ignore[arg-type]
    return found
