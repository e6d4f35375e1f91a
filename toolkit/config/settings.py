"""What a run is: frozen dataclasses, one per concern, and how they are read from YAML and flags.

Owns every default (in its field, with its sentence below it), the parsing, and the checks that need
no file and no model. Knows neither torch nor the files a run will read.
"""

import dataclasses
import difflib
import itertools
import math
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from toolkit.errors import ConfigError
from toolkit.redact import is_secret_name, looks_secret

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its parameters are stored."""

    name_or_path: str
    """Folder of a Hugging Face causal LM checkpoint, or its id on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights of the checkpoint; `random` draws new ones and needs only its
    config.json."""
    dtype: Dtype | Literal["auto"] | None = "float32"
    """Storage dtype of the parameters (the master weights that the optimizer updates); `auto` is
    the checkpoint's own; empty: float32."""
    tokenizer_name_or_path: str | None = None
    """Folder or Hub id of the tokenizer, where it is not the model's."""
    train_tokenizer: bool = False
    """Where no tokenizer is found, train a byte-level BPE of the model's vocabulary size on the
    training text before the run."""
    resize_embeddings: bool = False
    """Grow or shrink the embedding and the head to the tokenizer's length; new rows are the mean of
    the old ones."""
    pad_to_multiple_of: int | None = None
    """With resize_embeddings: round the number of rows up to a multiple of this, such as 64, which
    matrix products of some devices are faster with."""
    frozen_parameters: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not trained, such as `model.embed_tokens.*`; `*` matches
    anything."""
    attn_implementation: str | None = None
    """Attention kernel as transformers names it (`sdpa`, `eager`, `flash_attention_2`, ...); empty:
    transformers' choice."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


@dataclass(frozen=True)
class FinetuneModelConfig(ModelConfig):
    """Which model, and how its parameters are stored."""

    dtype: Dtype | Literal["auto"] | None = None
    """Storage dtype of the parameters; `auto` is the checkpoint's own. Empty: float32, the master
    weights that the optimizer updates; with adapters, whose base is not updated, `auto`."""


@dataclass(frozen=True)
class ShardingConfig:
    """How parameters are laid out over the devices, in which dtype they compute, and what is
    computed twice.

    A *pattern* names modules: a class (`LlamaMLP`), a whole name (`model.layers.*.mlp`), or the end
    of one (`mlp.gate`); `*` matches anything, dots included. A pattern that matches nothing is an
    error.
    """

    # ---- Mesh
    dp_replicate: int = -1
    """Number of replicas of the sharded model (HSDP); the processes are dp_replicate x dp_shard.
    -1: as many as dp_shard leaves."""
    dp_shard: int = -1
    """Number of ranks that share one copy of the model; -1: all that dp_replicate leaves. 1 is
    plain data parallelism, for models that fit on one device."""

    # ---- Units: what is gathered, and freed, together
    layer_classes: list[str] = field(default_factory=list)
    """Patterns of the modules that become units; empty: the decoder layers of the model."""
    layers_per_unit: int = 1
    """Put every so many consecutive layers into one unit: fewer, larger all-gathers."""
    sublayer_units: bool = False
    """Make units of the attention and the MLP of each layer too: less memory, more all-gathers."""
    embedding_units: bool = False
    """Make units of the embedding (freed after use) and of the head (kept until the backward); tied
    ones share a unit. Else both stay in the root, gathered throughout."""
    base_model_unit: bool = False
    """Make a unit of the base model inside the one with the head."""
    ignored_parameters: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not sharded: a full copy on every rank, in the storage
    dtype, with its gradient averaged over the ranks."""

    # ---- Precision
    param_dtype: Dtype = "bfloat16"
    """Dtype of the gathered parameters and of the computation."""
    reduce_dtype: Dtype = "float32"
    """Dtype of the gradient reduction between ranks."""
    output_dtype: Dtype | None = None
    """Dtype that the model's outputs are cast to; empty: as they are computed. With another than
    float32 the loss leaves the head as part of the outputs: all logits exist at once."""
    cast_forward_inputs: bool = True
    """Cast floating inputs of each unit to its param_dtype."""
    param_dtype_overrides: dict[str, Dtype] = field(default_factory=dict)
    """Pattern -> param_dtype of modules that compute in another dtype, such as `{"mlp.gate":
    float32, lm_head: float32}`. Their results are cast back, except those of the head."""

    # ---- Memory against traffic
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    """Free a unit's gathered parameters after its forward (`true`: least memory; `false`: one
    all-gather less; an integer: reshard to that many ranks). `auto` frees every unit but the
    root."""
    reshard_after_forward_overrides: dict[str, bool | int] = field(default_factory=dict)
    """Pattern -> reshard_after_forward of the units that it names."""
    forward_prefetch: int = 0
    """Gather so many units ahead in the forward, in the order in which they ran in the first one;
    0: PyTorch's own overlap."""
    backward_prefetch: int = 0
    """Gather so many units ahead in the backward; 0: PyTorch's own (one)."""
    prefetch_order: list[str] = field(default_factory=list)
    """Names of the units in the order in which they run, to prefetch from the first step on; a
    wrong order is an error that shows the right one. Empty: recorded in the first forward."""
    unshard_early: bool = False
    """Start gathering the root before a step's inputs are prepared."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""
    pin_memory: bool = True
    """Page-lock what cpu_offload and activation_offload keep in host memory: faster copies, memory
    that cannot be swapped. Without effect on CPUs."""

    # ---- Recomputation and compilation
    activation_checkpointing: bool | int | Literal["none", "full", "selective"] = "none"
    """Recompute activations in the backward: of each decoder layer (`full` or true), of every k-th
    (an integer), or all but matrix products and attention (`selective`)."""
    activation_checkpointing_modules: list[str] = field(default_factory=list)
    """Patterns of the modules that activation_checkpointing covers; empty: the decoder layers."""
    activation_offload: bool = False
    """Move what activation_checkpointing keeps to host memory until the backward."""
    torch_compile: bool | Literal["none", "layer", "model"] = "none"
    """Compile each decoder layer (`layer` or true; one graph for identical layers), or the whole
    sharded `model`. Best with samples of one length: each new shape compiles anew."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile, such as max-autotune-no-cudagraphs."""


@dataclass(frozen=True)
class SourceConfig:
    """One of several sources of training data that are mixed."""

    files: str | list[str] = field(default_factory=list)
    """Files or globs, as data.train_files."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to train on."""
    name: str | None = None
    """What reports and metrics call it; empty: the name of its first file or data set."""
    weight: float | None = None
    """Its share of the samples, relative to the other weights; empty (for all sources or none): in
    proportion to its size, which is one pass over everything."""
    max_repeats: float | None = None
    """Passes over it at most; what it would give beyond comes from the others. Empty: no limit."""


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes samples."""

    train_files: str | list[str] = field(default_factory=list)
    """Files or globs (.txt .md .py and other text, .jsonl .json .csv .parquet .arrow); empty, and
    no dataset_name and no sources: built-in data made of Python's own standard library."""
    eval_files: str | list[str] = field(default_factory=list)
    """Files or globs to evaluate on; empty: the eval_split of the training data."""
    dataset_name: str | None = None
    """A data set on the Hub (or a local data set folder) instead of train_files."""
    dataset_config_name: str | None = None
    """Configuration of dataset_name."""
    dataset_split: str = "train"
    """Split of dataset_name to train on."""
    sources: list[SourceConfig] = field(default_factory=list)
    """Several sources, mixed by weight, instead of train_files and dataset_name."""
    streaming: bool = False
    """Read the data while training instead of preparing all of it before; needs train.max_steps."""
    text_column: str = "text"
    """Column that holds the text; a column `input_ids` is taken as already tokenised instead."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row that cannot be used does: end the run with its file and line, or be left out and
    counted."""
    sequence_length: int = 1024
    """Tokens per sample."""
    append_eos: bool = True
    """Put the tokenizer's end-of-sequence token after each document."""
    packing: Literal["auto", "wrapped", "bfd", "none"] = "wrapped"
    """How documents become samples: `wrapped` joins all and cuts them at sequence_length; `bfd`
    (best fit decreasing) puts whole documents together that do not see each other; `none` pads each
    to the longest of its batch. `auto` is `bfd` where the model keeps packed documents apart, which
    is tried at start, else `none`."""
    eval_split: float = 0.01
    """Share of the samples held out for evaluation where there are no eval_files; 0: none."""
    max_eval_samples: int | None = None
    """Evaluate on at most this many samples."""
    num_workers: int = 0
    """Worker processes of each rank's DataLoader."""


@dataclass(frozen=True)
class FinetuneDataConfig(DataConfig):
    """Where the examples come from, what of them is learned, and how they become samples."""

    packing: Literal["auto", "wrapped", "bfd", "none"] = "auto"
    """How examples become samples: `bfd` (best fit decreasing) puts whole ones together that do not
    see each other; `none` pads each to the longest of its batch; `wrapped` joins all and cuts them
    at sequence_length. `auto` is `bfd` where the model keeps packed examples apart, which is tried
    at start, else `none`."""
    supervise: Literal["auto", "completion", "assistant", "last_assistant", "all"] = "auto"
    """What the loss covers: the completions, the turns of the assistant, the last of them, or
    everything. `auto`: everything of texts, completions of prompts, turns of the assistant."""
    chat_template: str | None = None
    """Jinja template of conversations, or a file that holds one; empty: the tokenizer's own."""
    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to an example of more than sequence_length tokens: its end is cut off, it is
    left out, or the run ends. Both are counted. Plain text is cut into samples instead, and none of
    it is lost."""
    dataset_num_proc: int | None = None
    """Processes that encode conversations before the run; empty: as many as there are cores. (For
    other rows the tokenizer has threads of its own.)"""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    learning_rate: float = 5e-5
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are not decayed."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the denominator."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"
    ] = "linear"
    """Schedule after the warm-up, as transformers names it."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0."""
    min_lr_rate: float = 0.1
    """Last learning rate of `cosine_with_min_lr`, as a share of the peak."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0: not clipped (the norm is still logged)."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, and with which batches."""

    max_steps: int = -1
    """Optimizer steps; -1: as many as num_train_epochs needs."""
    num_train_epochs: float = 1.0
    """Passes over the training samples where max_steps is -1."""
    per_device_train_batch_size: int = 8
    """Samples of one micro-batch on one process."""
    per_device_eval_batch_size: int | None = None
    """Samples of one evaluation forward on one process; empty: as in training."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of one optimizer step on one process."""
    sync_each_batch: bool = False
    """Reduce gradients after every micro-batch: no unsharded gradient is kept between them, and
    gradient_accumulation_steps times the traffic."""
    logging_steps: int = 10
    """A metrics line every so many steps (and at the first and the last)."""
    eval_steps: int | None = None
    """Evaluate every so many steps and at the end; empty: at the end only, where there is eval
    data.
    """


@dataclass(frozen=True)
class FinetuneTrainConfig(TrainConfig):
    """How long, with which batches, and what is tried at an evaluation."""

    neftune_noise_alpha: float | None = None
    """Noise on the embeddings while training, uniform in +-alpha / sqrt(tokens x width) (NEFTune);
    5 is usual; empty: none."""
    label_smoothing_factor: float = 0.0
    """Share of the target that is spread over the whole vocabulary; training only."""
    early_stopping_patience: int | None = None
    """Stop after so many evaluations in a row without a better checkpoint.metric_for_best_model;
    empty: never."""
    early_stopping_threshold: float = 0.0
    """By how much the metric must be better to count."""
    eval_prompts: list[str] = field(default_factory=list)
    """Prompts that the model answers at each evaluation, as a user's message where there is a chat
    template."""
    eval_max_new_tokens: int = 64
    """Tokens of an answer to eval_prompts at most."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters (LoRA and its kin, through PEFT) instead of full-parameter fine-tuning."""

    r: int = 0
    """Rank of the adapters; 0: none, all parameters are trained."""
    lora_alpha: float = 32
    """Adapters are scaled by lora_alpha / r (rsLoRA: / sqrt(r))."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    target_modules: str | list[str] = "all-linear"
    """Modules that are adapted: `all-linear` (every linear layer but the head), names or their ends
    (`[q_proj, v_proj]`), or one regular expression of whole names."""
    target_parameters: list[str] = field(default_factory=list)
    """Parameters that are adapted though they are no module's weight, such as fused experts
    (`mlp.experts.gate_up_proj`)."""
    exclude_modules: list[str] = field(default_factory=list)
    """Modules that target_modules names and that are left alone."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter, such as `[embed_tokens, lm_head]`."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r)."""
    use_dora: bool = False
    """Learn the norm of each row of the weights apart (DoRA)."""
    adapter_dtype: Dtype = "float32"
    """Storage dtype of what is trained; the base keeps the checkpoint's."""
    load_in_4bit: bool = False
    """QLoRA: store the linear layers of the base in 4 bits (needs bitsandbytes)."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit format."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales too."""
    bnb_4bit_skip_modules: list[str] = field(default_factory=list)
    """Modules that keep the base's dtype, by name or the end of one. Embedding, head, routers,
    modules_to_save, fused experts and what is no linear layer always do."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    save_steps: int = 500
    """A checkpoint every so many steps, and at the end."""
    save_total_limit: int | None = 2
    """Keep the newest so many (at least 2, so that one is whole while another is written); empty:
    all.
    """
    save_permanent_steps: int | None = None
    """Keep the checkpoints of these steps for good: a multiple of save_steps; empty: none."""
    keep_best: bool | int = False
    """Keep so many of the best by metric_for_best_model beside the newest; true: one."""
    metric_for_best_model: str = "eval_loss"
    """Metric of an evaluation that `keep_best` compares; `eval_` may be left out."""
    greater_is_better: bool | None = None
    """Whether more is better; empty: it is, unless the name ends in `loss` or `perplexity`."""
    async_save: bool = False
    """Go on training while a checkpoint is written: the loop waits only for a copy in host memory,
    which costs each process its parameters and optimizer state once more there. Off: when the loop
    goes on, the checkpoint is on the disk.
    """
    root: str | None = None
    """Folder or URL of an object store, such as s3://bucket/run, that holds this run's checkpoints;
    empty: output_dir, which keeps everything else in any case. A store needs its fsspec driver
    (s3fs, gcsfs, adlfs) and finds its credentials where that driver looks for them.
    """
    export_steps: int | None = None
    """Write the model as a Hugging Face folder every so many steps, to exports/step-N of the run;
    all of them stay; empty: none.
    """
    export_at_end: bool = False
    """Write it after the last step. Off: `toolkit consolidate` can at any time, in one process."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is shown while training."""

    disable_tqdm: bool = False
    """Print a line per logged step instead of a progress bar, also in a terminal."""


@dataclass(frozen=True)
class HubConfig:
    """Where the run is published at its end. The token is never a setting: it comes from `hf auth
    login` or HF_TOKEN."""

    push_to_hub: bool = False
    """Export the last checkpoint and push it when the run is done. Whether that is allowed is
    asked before training, and a missing repository is created then."""
    hub_model_id: str | None = None
    """Repository, ORG/NAME."""
    hub_private_repo: bool = True
    """Create the repository as a private one; one that is public already is refused unless this is
    false."""
    hub_revision: str | None = None
    """Branch to push to, created when missing; empty: main."""


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    model: ModelConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    output_dir: str = "runs/pretrain"
    """Run directory: config, metrics and checkpoints. Starting the same command on it resumes."""
    seed: int = 42
    """Seeds the random weights, the sample order and dropout."""


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run: of all parameters, or of adapters where lora.r is set."""

    model: FinetuneModelConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    output_dir: str = "runs/finetune"
    """Run directory: config, metrics and checkpoints. Starting the same command on it resumes."""
    seed: int = 42
    """Seeds the adapters, the sample order and dropout."""


# --------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------


def parse(
    cls: type,
    args: Sequence[str] | None = None,
    default_file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Read a `cls` from `--config FILE` and `--section.field value` flags, later ones winning.

    Args:
        cls: a config dataclass such as `PretrainConfig`.
        args: the command line without the program's name; `sys.argv[1:]` where None.
        default_file: the config used when `args` name no `--config`.
        defaults: dotted setting -> value that stands where neither a file nor a flag says
            otherwise, such as what the launch configuration asks for.

    Raises:
        ConfigError: an unknown key (the known ones are listed), a wrong type, or settings that
            contradict each other.
        SystemExit: after `--help` and `--print_config`.
    """
    args = list(sys.argv[1:] if args is None else args)
    defaults = dict(defaults or {})
    parser = _parser(cls)
    for name in defaults:
        _check_path(cls, name, "launch configuration")
    parser.set_defaults(defaults)
    if default_file is not None and not any(a.split("=")[0] == "--config" for a in args):
        args = ["--config", str(default_file), *args]
    for file in _config_files(args):
        _check_keys(cls, _read_yaml(file), str(file))
    for arg in args:
        flag = arg.split("=")[0]
        if flag.startswith("--") and flag not in ("--config", "--help", "--print_config"):
            path = flag.removeprefix("--").removesuffix("+")
            section = _check_path(cls, path, "command line")
            if dataclasses.is_dataclass(section):
                first = f"--{path}.{dataclasses.fields(section)[0].name}"
                raise ConfigError(
                    f"{flag} is a section of settings; give them one by one, such as {first} VALUE"
                )
        if looks_secret(arg):
            raise ConfigError(
                f"{flag if '=' in arg else 'the command line'} holds what looks like a token or a "
                "password; leave it to the environment, such as HF_TOKEN, or to a login"
            )
    try:
        sections = parser.instantiate(parser.parse_args(args))
    except ArgumentError as error:
        raise ConfigError(_in_plain_words(cls, " ".join(str(error).split()))) from error
    cfg = cls(**{f.name: sections[f.name] for f in dataclasses.fields(cls)})
    for name, value in _flat(cfg).items():
        kind = _check_path(cls, name, "")
        if value is None and type(None) not in typing.get_args(kind):  # jsonargparse lets null pass
            raise ConfigError(f"{name} must be {_in_words(kind)}, got nothing (null)")
    try:
        check(cfg)
    except ConfigError as error:
        flat, said = _flat(cfg), str(error)
        blamed = [n for n, v in defaults.items() if re.search(rf"{n}\b", said) and flat[n] == v]
        if not blamed:
            raise
        raise ConfigError(
            f"{error} ({', '.join(blamed)} came from the launch configuration)"
        ) from error
    return cfg


def load(cls: type, file: str | Path) -> Any:
    """Read a `cls` from a YAML file such as a run's `config.yaml`."""
    return parse(cls, ["--config", str(file)])


def dump(cfg: Any) -> str:
    """Return the resolved config as YAML; `load` reads it back to an equal value."""
    return yaml.dump(dataclasses.asdict(cfg), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def check(cfg: Any) -> None:
    """Raise `ConfigError` where fields of `cfg` contradict each other or are out of range."""
    train, optim, data, saving = cfg.train, cfg.optim, cfg.data, cfg.checkpoint
    for name, value in {
        "model.name_or_path": cfg.model.name_or_path,
        "output_dir": cfg.output_dir,
        "data.train_files": data.train_files,
        "data.eval_files": data.eval_files,
        "checkpoint.root": saving.root or [saving.root],
    }.items():
        if "" in _listed(value):  # a variable of the shell that was not set
            raise ConfigError(f"{name} is an empty text; give a path, or leave the setting out")
    positive = {
        "train.per_device_train_batch_size": train.per_device_train_batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train.logging_steps": train.logging_steps,
        "checkpoint.save_steps": saving.save_steps,
        "checkpoint.save_permanent_steps": saving.save_permanent_steps,
        "checkpoint.export_steps": saving.export_steps,
        "sharding.layers_per_unit": cfg.sharding.layers_per_unit,
        "train.eval_steps": train.eval_steps,
        "train.per_device_eval_batch_size": train.per_device_eval_batch_size,
        "data.max_eval_samples": data.max_eval_samples,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if data.sequence_length < 2:
        raise ConfigError(
            f"data.sequence_length must be at least 2 (a token and the one it predicts), "
            f"got {data.sequence_length}"
        )
    if train.max_steps != -1 and train.max_steps < 1:
        raise ConfigError(
            f"train.max_steps must be at least 1, or -1 for whole epochs, got {train.max_steps}"
        )
    if train.max_steps == -1 and not 0 < train.num_train_epochs < math.inf:
        raise ConfigError(
            f"train.num_train_epochs must be a number above 0, got {train.num_train_epochs}"
        )
    if saving.save_total_limit is not None and saving.save_total_limit < 2:
        raise ConfigError(
            f"checkpoint.save_total_limit must be at least 2, got {saving.save_total_limit}: the "
            "last "
            "good checkpoint stays until the next one is whole"
        )
    _check_retention(train, saving)
    multiple = cfg.model.pad_to_multiple_of
    if multiple is not None and (multiple < 1 or not cfg.model.resize_embeddings):
        raise ConfigError(
            f"model.pad_to_multiple_of must be at least 1, and needs model.resize_embeddings; got "
            f"{multiple} and resize_embeddings {str(cfg.model.resize_embeddings).lower()}"
        )
    if cfg.model.dtype == "float16":
        raise ConfigError(
            "model.dtype float16 cannot hold master weights (AdamW's second moment underflows to "
            "0); use float32 or bfloat16"
        )
    if not 0 <= data.eval_split < 1:
        raise ConfigError(f"data.eval_split is a share from 0 to below 1, got {data.eval_split}")
    _check_data(data, train)
    if data.num_workers < 0:
        raise ConfigError(f"data.num_workers must not be negative, got {data.num_workers}")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon"):
        if not 0 <= getattr(optim, name) < math.inf:
            raise ConfigError(
                f"optim.{name} must be a number from 0 up, got {getattr(optim, name)}"
            )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(optim, name) < 1:
            raise ConfigError(f"optim.{name} must be from 0 to below 1, got {getattr(optim, name)}")
    if not 0 <= optim.min_lr_rate <= 1:
        raise ConfigError(f"optim.min_lr_rate is a share from 0 to 1, got {optim.min_lr_rate}")
    if cfg.hub.push_to_hub and not cfg.hub.hub_model_id:
        raise ConfigError("hub.push_to_hub needs hub.hub_model_id: give ORG/NAME")
    _check_sharding(cfg.sharding)
    if isinstance(cfg, FinetuneConfig):
        _check_finetune(cfg)
    for name, value in _flat(cfg).items():
        if looks_secret(str(value)):
            raise ConfigError(
                f"{name} holds what looks like a token or a password, and config.yaml would keep "
                "it; leave it to the environment, such as HF_TOKEN, or to a login"
            )


def _check_data(data: DataConfig, train: TrainConfig) -> None:
    given = [n for n in ("dataset_name", "train_files", "sources") if getattr(data, n)]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(f'data.{n}' for n in given)} are both set; give one of them"
        )
    for i, source in enumerate(data.sources):
        where = f"data.sources[{i}]"
        if bool(source.files) == bool(source.dataset_name):
            raise ConfigError(f"{where} must name files or a dataset_name, one of the two")
        for name in ("weight", "max_repeats"):
            value = getattr(source, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{where}.{name} must be a number above 0, got {value}")
    if len({s.weight is None for s in data.sources}) > 1:
        raise ConfigError("data.sources: give every source a weight, or none")
    if data.streaming and train.max_steps == -1:
        raise ConfigError(
            "data.streaming needs train.max_steps: how long a pass is, nobody knows before it ends"
        )


def _check_finetune(cfg: "FinetuneConfig") -> None:
    train, lora = cfg.train, cfg.lora
    if lora.r < 0:
        raise ConfigError(f"lora.r is a rank, 1 or more, or 0 for no adapters, got {lora.r}")
    if not lora.r:
        default = LoraConfig()
        given = [
            f.name
            for f in dataclasses.fields(lora)
            if getattr(lora, f.name) != getattr(default, f.name)
        ]
        if given:
            raise ConfigError(
                f"{', '.join(f'lora.{n}' for n in given)} without lora.r does nothing; set the "
                "rank of the adapters, such as lora.r: 16"
            )
    if lora.r and cfg.model.frozen_parameters:
        raise ConfigError(
            "model.frozen_parameters with lora.r does nothing: adapters freeze the whole base; "
            "leave it out, and say with lora.target_modules and lora.modules_to_save what learns"
        )
    if lora.r and cfg.model.trust_remote_code:
        raise ConfigError(
            "lora.r with model.trust_remote_code: adapters are proven and exported on a base that "
            "is built again, without code from outside. Train all parameters (lora.r: 0), or a "
            "model that transformers knows"
        )
    if lora.r and cfg.checkpoint.async_save:
        raise ConfigError(
            "checkpoint.async_save with lora.r gains nothing: each save of an adapter is proven by "
            "loading it back before the run goes on, and adapters are small. Leave async_save out"
        )
    if cfg.model.train_tokenizer:
        raise ConfigError(
            "model.train_tokenizer is for pretraining; fine-tuning needs the tokenizer of the "
            "model, or model.tokenizer_name_or_path"
        )
    if not 0 <= lora.lora_dropout < 1:
        raise ConfigError(f"lora.lora_dropout must be from 0 to below 1, got {lora.lora_dropout}")
    if not 0 < lora.lora_alpha < math.inf:
        raise ConfigError(f"lora.lora_alpha must be a number above 0, got {lora.lora_alpha}")
    if lora.adapter_dtype == "float16":
        raise ConfigError("lora.adapter_dtype float16 cannot be trained; use float32 or bfloat16")
    if not 0 <= train.label_smoothing_factor < 1:
        raise ConfigError(
            "train.label_smoothing_factor is a share from 0 to below 1, got "
            f"{train.label_smoothing_factor}"
        )
    noise, patience = train.neftune_noise_alpha, train.early_stopping_patience
    if noise is not None and not 0 < noise < math.inf:
        raise ConfigError(f"train.neftune_noise_alpha must be a number above 0, got {noise}")
    if patience is not None and (patience < 1 or train.eval_steps is None):
        raise ConfigError(
            "train.early_stopping_patience is a number of evaluations, 1 or more, and needs "
            f"train.eval_steps; got {patience} and eval_steps {train.eval_steps}"
        )
    if not 0 <= train.early_stopping_threshold < math.inf:
        raise ConfigError(
            "train.early_stopping_threshold must be a number from 0 up, got "
            f"{train.early_stopping_threshold}"
        )
    for name, value in (
        ("train.eval_max_new_tokens", train.eval_max_new_tokens),
        ("data.dataset_num_proc", cfg.data.dataset_num_proc),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def _check_sharding(cfg: ShardingConfig) -> None:
    for name in ("dp_replicate", "dp_shard"):
        value = getattr(cfg, name)
        if value != -1 and value < 1:
            raise ConfigError(
                f"sharding.{name} must be at least 1, or -1 for all ranks that the other leaves, "
                f"got {value}"
            )
    for name in ("forward_prefetch", "backward_prefetch"):
        if getattr(cfg, name) < 0:
            raise ConfigError(
                f"sharding.{name} is a number of units, 0 or more, got {getattr(cfg, name)}"
            )
    dtypes = {
        "param_dtype": cfg.param_dtype,
        "reduce_dtype": cfg.reduce_dtype,
        **{f"param_dtype_overrides[{k}]": v for k, v in cfg.param_dtype_overrides.items()},
    }
    for name, dtype in dtypes.items():
        if dtype == "float16":
            raise ConfigError(
                f"sharding.{name} float16 needs loss scaling, which this training has not; use "
                "bfloat16 or float32"
            )
    every = cfg.activation_checkpointing
    if isinstance(every, int) and not isinstance(every, bool) and every < 1:
        raise ConfigError(
            f"sharding.activation_checkpointing must be true, false, none, full, selective or a "
            f"number k >= 1 (every k-th layer), got {every}"
        )
    if cfg.layers_per_unit > 1 and cfg.sublayer_units:
        raise ConfigError(
            "sharding.layers_per_unit makes units coarser than a layer, sublayer_units finer; set "
            "one of them"
        )
    if cfg.prefetch_order and not (cfg.forward_prefetch or cfg.backward_prefetch):
        raise ConfigError(
            "sharding.prefetch_order without a depth does nothing; set forward_prefetch or "
            "backward_prefetch to 1 or more"
        )
    recomputes = every not in (False, "none")
    if cfg.activation_offload and cfg.torch_compile not in (False, "none"):
        raise ConfigError(
            "sharding.activation_offload runs uncompiled code in each layer, so that torch_compile "
            "would compile none of it; leave out one of them"
        )
    for name, asked in (
        ("activation_checkpointing_modules", cfg.activation_checkpointing_modules),
        ("activation_offload", cfg.activation_offload),
    ):
        if asked and not recomputes:
            raise ConfigError(
                f"sharding.{name} without activation_checkpointing does nothing; set "
                "sharding.activation_checkpointing: full"
            )


def _check_retention(train: TrainConfig, saving: CheckpointConfig) -> None:
    permanent, every = saving.save_permanent_steps, saving.save_steps
    if permanent is not None and permanent % every:
        raise ConfigError(
            f"checkpoint.save_permanent_steps {permanent} must be a multiple of save_steps "
            f"{every}: other steps are not saved"
        )
    if saving.save_total_limit is None and (permanent is not None or saving.keep_best):
        raise ConfigError(
            "checkpoint.save_permanent_steps and keep_best do nothing where save_total_limit is "
            "empty: all checkpoints are kept"
        )
    if saving.keep_best < 0:
        raise ConfigError(
            f"checkpoint.keep_best must be true, false or a number from 0, got {saving.keep_best}"
        )
    if saving.keep_best and (train.eval_steps is None or every % train.eval_steps):
        raise ConfigError(
            f"checkpoint.keep_best needs an evaluation at every checkpoint: save_steps {every} "
            f"must be a multiple of train.eval_steps, got {train.eval_steps}"
        )


def model_settings(cfg: Any) -> ModelConfig:
    """Return the model's settings with the storage dtype filled in that depends on the adapters:
    the checkpoint's own under them, else float32.
    """
    adapted = isinstance(cfg, FinetuneConfig) and cfg.lora.r > 0
    return dataclasses.replace(
        cfg.model, dtype=cfg.model.dtype or ("auto" if adapted else "float32")
    )


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configs differ: dotted name -> (old value, new value)."""
    before, after = _flat(old), _flat(new)
    names = [n for n in {**before, **after} if _listed(before.get(n)) != _listed(after.get(n))]
    return {n: (before.get(n), after.get(n)) for n in names}


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------


def _parser(cls: type) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        description=cls.__doc__, exit_on_error=False, allow_abbrev=False, formatter_class=_Help
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with any of the settings below"
    )
    parser.add_class_arguments(cls)
    return parser


class _Dumper(yaml.SafeDumper):
    """YAML in which texts stay texts: PyYAML reads `1e3` as one, jsonargparse as a number."""


def _text_node(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "'" if re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value, re.IGNORECASE) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text_node)


class _Help(DefaultHelpFormatter):
    """jsonargparse's help on a fixed width, so that it reads the same under every launcher."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=110, max_help_position=44)


def _config_files(args: Sequence[str]) -> list[Path]:
    files = [a.split("=", 1)[1] for a in args if a.startswith("--config=")]
    files += [b for a, b in itertools.pairwise(args) if a == "--config"]
    for file in files:
        if not Path(file).is_file():
            what = "is not a file" if Path(file).exists() else "does not exist"
            raise ConfigError(f"config file {file} {what} (current folder: {Path.cwd()})")
    return [Path(f) for f in files]


def _read_yaml(file: Path) -> dict:
    try:
        text = file.read_text(encoding="utf-8")
        _refuse_duplicates(yaml.compose(text, Loader=yaml.SafeLoader), file)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        raise ConfigError(
            f"{file} is empty; a YAML file with settings is expected (--help lists them)"
        )
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping of settings, got {type(content).__name__}")
    return content


def _refuse_duplicates(node: yaml.Node | None, file: Path) -> None:
    """Refuse a key that stands twice in one mapping: YAML would drop the first without a word."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, file)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(
                f"{file} has {key.value!r} twice, in lines {seen[key.value]} and {line}; join them "
                "into one"
            )
        seen[str(key.value)] = line
        _refuse_duplicates(value, file)


def _check_keys(cls: type, content: dict, where: str, prefix: str = "") -> None:
    """Refuse the first key of a YAML mapping that `cls` does not know, with the keys it knows."""
    for key, value in content.items():
        known = _check_path(cls, f"{prefix}{key}", where)
        if dataclasses.is_dataclass(known) and not isinstance(value, dict):
            raise ConfigError(f"{prefix}{key} ({where}) is a section of settings, got {value!r}")
        if dataclasses.is_dataclass(known):
            _check_keys(cls, value, where, f"{prefix}{key}.")
        if typing.get_origin(known) is list and isinstance(value, list):
            (item,) = typing.get_args(known)
            for i, entry in enumerate(value):
                if dataclasses.is_dataclass(item) and isinstance(entry, dict):
                    _check_keys(item, entry, f"{where}, {prefix}{key}[{i}]")  # type: ignore[arg-type]


def _check_path(cls: type, path: str, where: str) -> Any:
    """Return the type of a dotted setting; refuse one that does not exist."""
    here, walked = cls, ""
    for part in path.split("."):
        hints = typing.get_type_hints(here) if dataclasses.is_dataclass(here) else {}
        if part not in hints:
            guess = difflib.get_close_matches(part, hints, n=1)
            section = walked.removesuffix(".") or "the top level"
            if is_secret_name(part):
                raise ConfigError(
                    f"{path!r} ({where}) is no setting: a config is written to files, and a token "
                    "does not belong there. Run `hf auth login`, or set HF_TOKEN"
                )
            raise ConfigError(
                f"unknown setting {path!r} ({where})"
                + (f", did you mean {walked}{guess[0]}?" if guess else "")
                + (
                    f"; known in {section}: {', '.join(hints)}"
                    if hints
                    else f"; {section} takes a value"
                )
            )
        here, walked = hints[part], f"{walked}{part}."
    return here


def _in_plain_words(cls: type, said: str) -> str:
    """Return what jsonargparse says of a value that does not parse, in a user's words."""
    if match := re.fullmatch(r'Parser key "([\w.]+)": .*?(?:Got|Given) value: (.*)', said):
        name, value = match[1], match[2].rsplit("Given value: ", 1)[-1]
        return f"{name} must be {_in_words(_check_path(cls, name, ''))}, got {value}"
    if match := re.fullmatch(r"the following arguments are required: (.*)", said):
        return (
            f"{match[1]} is required; set it in the file of --config, or with "
            f"--{match[1].split(',')[0]} VALUE"
        )
    if match := re.fullmatch(r"unrecognized arguments: (.*)", said):
        return (
            f"unexpected on the command line: {match[1]}. A setting is given as --section.field "
            "VALUE, a list as --data.train_files '[a.txt, b.txt]' or a quoted glob, a file of "
            "settings as --config FILE"
        )
    return said


def _in_words(kind: Any) -> str:
    """Return a type as a user would name it: `int | None` is "an integer or empty"."""
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "empty",
    }
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    if typing.get_origin(kind) is list:
        return "a list"
    if typing.get_origin(kind) is dict:
        return f"a mapping from text to {_in_words(typing.get_args(kind)[1])}"
    if kind in names:
        return names[kind]
    return (
        ", ".join(map(_in_words, typing.get_args(kind)[:-1]))
        + f" or {_in_words(typing.get_args(kind)[-1])}"
    )


def _listed(value: Any) -> Any:
    """Return a text as the list of one that it stands for: `train_files: a.txt` is `[a.txt]`."""
    return [value] if isinstance(value, str) else value


def _flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of every field below a config; a dict is one value."""
    out: dict[str, Any] = {}
    for part in dataclasses.fields(cfg):
        value = getattr(cfg, part.name)
        if dataclasses.is_dataclass(value):
            out |= _flat(value, f"{prefix}{part.name}.")
        else:
            out[prefix + part.name] = value
    return out
