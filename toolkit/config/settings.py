"""Settings of a run: frozen dataclasses, one per concern.

Each field has its default and, below it, the sentence that `--help` and the reference pages show.
The type of a number is its range. `__post_init__` refuses settings that contradict each other.
This module imports no torch and reads none of the files that a run will read.
"""

import dataclasses
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.config.expert_parallel import check_expert_parallel
from toolkit.config.fields import AllOrCount, AtLeast1, Fraction, NonNegative, NotNegative, Positive
from toolkit.config.float8 import find_float8_conflict
from toolkit.config.lora import LoraConfig
from toolkit.config.outputs import CheckpointConfig, HubConfig, MetricsConfig
from toolkit.errors import ConfigError, ModelError
from toolkit.parsing import parse_size

Dtype = Literal["float32", "bfloat16"]
TorchCompile = bool | Literal["auto", "none", "layer", "model"]
Schedule = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "polynomial",
    "cosine_with_restarts",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "warmup_stable_decay",
]


@dataclass(frozen=True)
class ModelConfig:
    """Settings of the model: where it comes from, and the dtype of its stored parameters."""

    name_or_path: str
    """Folder of a Hugging Face causal LM checkpoint, or its id on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the weights of the checkpoint. `random` draws new weights as its
    config.json describes them."""
    dtype: Dtype | Literal["auto"] | None = "float32"
    """Storage dtype of the parameters, the master weights that the optimizer updates. `auto` uses
    the dtype of the checkpoint. Empty: float32."""
    tokenizer_name_or_path: str | None = None
    """Folder or Hub id of the tokenizer, if it is not that of the model."""
    train_tokenizer: bool = False
    """If no tokenizer is found, train a byte-level BPE on the training text before the run. It
    gets the vocabulary size of the model."""
    resize_embeddings: bool | AtLeast1 = False
    """`true` resizes the embedding and the head to the length of the tokenizer. An integer, such as
    64, rounds that length up to a multiple of it, which speeds up matrix products on some devices.
    New rows are the mean of the old ones."""
    frozen_parameters: list[str] = field(default_factory=list)
    """Patterns of parameters that are not trained, such as `model.embed_tokens.*`. `*` matches
    anything."""
    attn_implementation: str | None = None
    """Attention kernel, such as `sdpa` or `flash_attention_2`. Empty: transformers chooses."""
    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = "auto"
    """Kernel of fused experts in a mixture of experts: `eager` (a loop over the experts),
    `grouped_mm` (one grouped product), or `batched_mm` (copies an expert's weights for each of its
    tokens). `auto`: transformers chooses. Other values are an error if the model has no fused
    experts."""
    kernels: Literal["none", "liger"] = "none"
    """`liger`: use Liger's Triton kernels for norms, rotary embeddings and gated MLPs. Useful
    without torch.compile. Needs liger-kernel and a GPU. The loss remains the toolkit's."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Compute the linear layers of the decoder layers in float8, by this recipe of torchao. Weights
    keep their storage dtype. `tensorwise`, one scale per tensor, is fastest and also gathers the
    weights in float8. `rowwise`, one scale per row, rounds less. `rowwise_with_gw_hp` also computes
    the gradients of weights in bfloat16. Needs torchao and an NVIDIA GPU from compute capability
    8.9 (rowwise: 9.0), and gains with torch_compile only. Emulated on a CPU. With adapters,
    `rowwise` stores the frozen base in float8 (1 byte per value) and needs no torchao."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    trust_remote_code: bool = False
    """Run the Python code that the checkpoint includes."""


@dataclass(frozen=True)
class FinetuneModelConfig(ModelConfig):
    """Settings of the model of a fine-tuning run."""

    dtype: Dtype | Literal["auto"] | None = None
    """Storage dtype of the parameters. `auto` uses the dtype of the checkpoint. Empty: float32 for
    master weights that the optimizer updates; `auto` with adapters, because their base model is not
    updated."""


@dataclass(frozen=True)
class ShardingConfig:
    """Layout of parameters on the devices, compute dtype, and recomputation.

    A *pattern* names modules: a class (`LlamaMLP`), a full name (`model.layers.*.mlp`), or the end
    of a name (`mlp.gate`). `*` matches anything, including dots. A pattern that matches nothing is
    an error.
    """

    # ---- Mesh
    dp_replicate: AllOrCount = -1
    """Number of replicas of the sharded model (HSDP). The number of processes is dp_replicate x
    dp_shard. -1: the number of processes divided by dp_shard."""
    dp_shard: AllOrCount = -1
    """Number of ranks that share one copy of the model. -1: the number of processes divided by
    dp_replicate. 1 is plain data parallelism, for models that fit on one device. If both are -1 and
    the GPUs are in several machines, each machine holds a copy if the parameters, gradients and
    optimizer state of a rank then take at most 40 % of its memory."""
    context_parallel: AtLeast1 = 1
    """Number of consecutive ranks that share each row of tokens, for rows that are too long for one
    device. Each rank holds an equal part of a row; in attention, each has all tokens of a part of
    the heads (Ulysses). It divides the number of processes and the attention heads. The product
    dp_replicate x dp_shard includes these ranks."""
    expert_parallel: AtLeast1 = 1
    """Number of consecutive ranks that divide the experts of a mixture of experts. Each rank holds
    complete experts, and tokens are sent to their experts, instead of gathering the weights of all
    experts on every rank. It divides dp_shard, which divides the number of experts."""

    # ---- Units: modules whose parameters are gathered and freed together
    layer_classes: list[str] = field(default_factory=list)
    """Patterns of the modules that become units. Empty: the decoder layers of the model."""
    embedding_units: bool | Literal["auto"] = "auto"
    """Make the embedding and the head separate units. The embedding is freed after use, the head is
    kept until the backward; a tied pair is one unit. `false`: both belong to the root unit, which
    stays gathered. `auto`: true on a GPU if they are not tied."""
    ignored_parameters: list[str] = field(default_factory=list)
    """Patterns of parameters that are not sharded. Every rank has a full copy in the storage dtype,
    and the gradient is summed over the ranks."""
    frozen: Literal["auto", "sharded", "replicated"] = "auto"
    """Layout of parameters that are not trained, such as the base model of adapters. `sharded`:
    they are gathered in each forward and backward like the others. `replicated`: every rank has a
    full copy and nothing is gathered. `auto`: `replicated` on an accelerator if the rest of the
    copy takes at most 0.4 of the free memory and is stored in its compute dtype; else `sharded`."""

    # ---- Precision
    param_dtype: Dtype = "bfloat16"
    """Dtype of the gathered parameters and of the computation."""
    reduce_dtype: Dtype = "float32"
    """Dtype of the gradient reduction between ranks."""
    param_dtype_overrides: dict[str, Dtype] = field(default_factory=dict)
    """Pattern -> param_dtype, for modules that compute in another dtype, such as `{"mlp.gate":
    float32, lm_head: float32}`. Their outputs are cast back, except those of the head."""

    # ---- Memory against traffic
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    """Free the gathered parameters of a unit after its forward. `true` needs the least memory,
    `false` saves one all-gather, and an integer reshards to that many ranks. `auto` frees every
    unit except the root."""
    reshard_after_forward_overrides: dict[str, bool | int] = field(default_factory=dict)
    """Pattern -> reshard_after_forward of the units that it names."""
    accumulation: Literal["auto", "keep_gathered", "reduce_once", "reduce_each"] = "auto"
    """Traffic of the micro-batches of a step. `keep_gathered` gathers the parameters and reduces
    the gradients once a step: fastest, but it holds the full model in param_dtype and a full
    gradient. `reduce_once` gathers the parameters in each micro-batch. `reduce_each` also reduces
    the gradients in each, with the least memory. `auto`: the fastest one that leaves a tenth of the
    device free, measured by the peak of the first two steps. It is `reduce_each` if the gradients
    take more than a quarter of the device, or if every rank has a full copy of the model."""
    forward_prefetch: NotNegative = 0
    """Number of units to gather ahead in the forward, in the order of the first forward. 0:
    PyTorch's own prefetching."""
    backward_prefetch: NotNegative = 0
    """Number of units to gather ahead in the backward. 0: PyTorch's own prefetching of one unit."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""

    # ---- Recomputation and compilation
    activation_checkpointing: bool | AtLeast1 | Literal["auto", "none", "full", "selective"] = (
        "none"
    )
    """Recompute activations in the backward: of each decoder layer (`full` or true), of every k-th
    layer (an integer k), or all except matrix products and attention (`selective`). `auto`: the
    first of none, selective and full that fits according to the plan and to a trial step on the
    device."""
    activation_offload: bool = False
    """Move the activations that activation_checkpointing keeps to host memory until the backward,
    except those of the last layer."""
    mlp_chunk_tokens: NotNegative = 0
    """Compute the MLP of each decoder layer for this many tokens at a time, and each chunk again in
    the backward, for rows so long that its activations do not fit. Such as 8192. 0: all tokens at
    once. Mixtures of experts are not divided. Excludes `selective` and compiled layers."""
    torch_compile: TorchCompile = "auto"
    """Compile each decoder layer (`layer` or true; identical layers share a graph), or the complete
    sharded `model`. `auto`: each layer, on a GPU, if all samples have one length (packed or
    wrapped: each new shape is compiled again) and no layer contains a unit or offloading; else
    `none`."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile: `default` or max-autotune-no-cudagraphs. Modes that record CUDA graphs
    (reduce-overhead, max-autotune) are refused, because FSDP2 moves the parameters at each step."""

    # ---- Planning
    device_memory: str | None = None
    """Memory of each device that the run may use, such as 80GB. Empty: the memory that is free at
    the start; on CPUs, the free host memory divided among the processes of a machine."""

    def __post_init__(self) -> None:
        if self.device_memory is not None and parse_size(self.device_memory) is None:
            raise ConfigError(
                f"sharding.device_memory {self.device_memory!r} is not a size; write 80GB, or 500MB"
            )
        is_freed = self.reshard_after_forward not in ("auto", False)
        if self.accumulation == "keep_gathered" and is_freed:
            raise ConfigError(
                "sharding.accumulation: keep_gathered keeps the parameters that "
                "reshard_after_forward frees; set one of them to auto"
            )
        if self.frozen == "replicated" and self.cpu_offload:
            raise ConfigError(
                "sharding.frozen: replicated keeps parameters on the device that cpu_offload moves "
                "to the host; remove one of them"
            )
        records_graphs = self.torch_compile_mode in ("reduce-overhead", "max-autotune")
        compiles = self.torch_compile not in (False, "none")
        if records_graphs and compiles and self.torch_compile_backend == "inductor":
            raise ConfigError(
                f"sharding.torch_compile_mode {self.torch_compile_mode} records CUDA graphs, which "
                "need parameters at fixed addresses, but FSDP2 gathers them into other memory at "
                "each step; set max-autotune-no-cudagraphs or default"
            )
        if self.activation_offload and self.torch_compile not in (False, "none", "auto"):
            raise ConfigError(
                "sharding.activation_offload runs uncompiled code in each layer, so torch_compile "
                "would compile nothing; remove one of them"
            )
        if self.activation_offload and self.activation_checkpointing in (False, "none", "auto"):
            raise ConfigError(
                "sharding.activation_offload has no effect without activation_checkpointing; set "
                "that to full, selective or a number"
            )


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer and the learning-rate schedule."""

    optim: Literal["adamw_torch_fused", "adamw_8bit", "adafactor", "muon"] = "adamw_torch_fused"
    """`adamw_torch_fused`: AdamW, with 8 bytes of fp32 state per value. `adamw_8bit`: AdamW with
    moments of 8 bits (2 bytes per value; needs bitsandbytes). `adafactor`: Adafactor, which has
    hardly any state and whose learning rate is relative to the size of a parameter (1e-2 is usual).
    `muon`: Muon for hidden matrices (4 bytes per value) and AdamW for the other parameters, both
    with AdamW's learning rate and decay."""
    learning_rate: NonNegative = 5e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""
    adam_epsilon: NonNegative = 1e-8
    """Value added to the denominator."""
    lr_scheduler_type: Schedule = "linear"
    """Schedule after the warm-up, named as in transformers."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further settings of the schedule, named as in transformers: `{"num_decay_steps": 1000}` of
    warmup_stable_decay (empty: a tenth of all steps), `{"min_lr_rate": 0.05}` of
    cosine_with_min_lr (empty: 0.1 of the peak), and the like."""
    warmup_steps: NotNegative | Fraction = 0
    """Number of steps in which the learning rate rises from 0. A value below 1 is a share of all
    steps."""
    max_grad_norm: NonNegative = 1.0
    """Clip gradients to this global norm. 0: no clipping; the norm is still logged."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the training loop: its length, batches, evaluations and logging."""

    max_steps: AllOrCount = -1
    """Number of optimizer steps. -1: the number that num_train_epochs needs."""
    num_train_epochs: Positive = 1.0
    """Passes over the training samples if max_steps is -1."""
    per_device_train_batch_size: AtLeast1 | Literal["auto"] = 8
    """Samples of one micro-batch on one process. `auto`: the largest divisor of global_batch_size
    that fits according to the plan and to a trial step on the device."""
    global_batch_size: AtLeast1 | None = None
    """Samples of one optimizer step on all processes together, from which
    gradient_accumulation_steps follows. Empty: per_device_train_batch_size x
    gradient_accumulation_steps x number of processes."""
    per_device_eval_batch_size: AtLeast1 | None = None
    """Samples of one evaluation forward on one process. Empty: as in training."""
    gradient_accumulation_steps: AtLeast1 = 1
    """Micro-batches of one optimizer step on one process."""
    deterministic: bool = False
    """Use only deterministic operations, so that on CUDA too a resumed run has bitwise the losses
    of an uninterrupted one on the same number of devices of the same kind. Slower. An operation
    without a deterministic form ends the run with an error that names it."""
    max_bad_steps: NotNegative = 3
    """Number of consecutive steps whose loss or gradient may be NaN or infinite on any rank. Every
    rank skips such a step, which leaves weights and optimizer unchanged, and the log names its
    samples. One more ends the run before anything is saved. 0: the first one ends it."""
    hang_seconds: NonNegative = 300.0
    """End the run if no rank finishes a micro-batch of a step for this many seconds, with exit code
    70 and a report that shows which rank waits for which. At the start, in evaluations, saves and
    exports the limit is 12 times as long. The run also ends if a rank has died. 0: no watch, for
    use in a debugger."""
    connect_seconds: Positive | None = None
    """Seconds in which the processes must connect to each other once all of them have started;
    after that, the run ends with the reason. Empty: 45 s, plus 1 s for every 32 processes."""
    router_aux_loss: Literal["auto", "pooled", "layer", "none"] = "auto"
    """Auxiliary loss that balances the load of experts over the global batch: `pooled` over the
    layers as in transformers, or for each `layer`. `auto`: `pooled` if config.json requests it
    (output_router_logits). The coefficient is that of config.json."""
    router_bias_update_rate: NonNegative = 0.0
    """Step by which DeepSeek's expert bias moves towards a balanced load after each update; 1e-3 is
    usual."""
    z_loss: NonNegative = 0.0
    """Weight of the mean square of log Z of the logits, which is added to the loss; 1e-4 is usual.
    Not available in preference tuning and distillation."""
    skip_spikes: Positive | None = None
    """Skip a step, and count it as bad, if its loss or gradient norm is more than this many
    deviations above the median of the preceding 128 steps. 6 is usual. Empty: no such check."""
    check_steps: NotNegative | None = None
    """Every so many steps, compare the bits of trained weights and optimizer state after the step
    with those before the next step, and end the run if any changed. 0: never, for a recipe that
    writes weights itself; the ranks are then not compared with each other at each metrics line and
    before each save either. Empty: as logging_steps."""
    logging_steps: AtLeast1 = 10
    """Write a metrics line every so many steps, and at the first and the last step."""
    eval_steps: AtLeast1 | None = None
    """Evaluate every so many steps and at the end. Empty: only at the end, if there is evaluation
    data."""
    profile_steps: list[AtLeast1] = field(default_factory=list)
    """First and last step to profile, such as `[10, 12]`. The folder `profile` of the run gets a
    trace of each rank, on CUDA also its allocations (for pytorch.org/memory_viz), and a table of
    the time spent. Empty: none. A trace takes megabytes per step. Profiled steps do not count in
    tokens per second."""

    def __post_init__(self) -> None:
        steps = self.profile_steps
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            raise ConfigError(
                "train.profile_steps: expected the first and the last step, such as [10, 12], got "
                f"{steps}"
            )
        if self.per_device_train_batch_size == "auto" and self.global_batch_size is None:
            raise ConfigError(
                "train.per_device_train_batch_size: auto needs train.global_batch_size, the number "
                "of samples of a step, which stays the same"
            )

    @property
    def micro_batch(self) -> int:
        """Number of samples in one micro-batch of one process.

        Raises:
            ConfigError: `per_device_train_batch_size` is still `auto`.
        """
        if not isinstance(self.per_device_train_batch_size, int):
            raise ConfigError(
                "train.per_device_train_batch_size: auto is decided when a run starts; set a "
                "number here"
            )
        return self.per_device_train_batch_size


@dataclass(frozen=True)
class FinetuneTrainConfig(TrainConfig):
    """Settings of the training loop of a fine-tuning run, including prompts to answer."""

    neftune_noise_alpha: Positive | None = None
    """Add uniform noise in +-alpha / sqrt(tokens x width) to the embeddings while training
    (NEFTune). 5 is usual. Empty: none. Not available in preference tuning, because the model and
    its reference must be the same function."""
    label_smoothing_factor: Fraction = 0.0
    """Share of the target that is spread over the vocabulary while training. Not available in
    distillation, and in preference tuning, which has preference.label_smoothing."""
    early_stopping_patience: AtLeast1 | None = None
    """Stop after so many evaluations without a better metric_for_best_model. Empty: never."""
    eval_prompts: list[str] = field(default_factory=list)
    """Prompts that the model answers at each evaluation, in at most 64 tokens. With a chat template
    each is a user's message."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ConfigError(
                "train.early_stopping_patience counts evaluations; set train.eval_steps too"
            )


@dataclass(frozen=True)
class RunConfig:
    """Settings that every kind of run has; each kind extends this class."""

    model: ModelConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    output_dir: str = "runs"
    """Run directory with config, metrics and checkpoints. Starting the same command again resumes
    the run."""
    seed: int = 42
    """Seed of the random weights and adapters, the sample order and dropout."""
    kind: str = ""
    """Kind of the run: `pretrain`, `finetune`, `prefer`, `distill`, or the name of your own recipe.
    Empty: the kind of the recipe that is started. A recipe refuses a config of another kind."""

    @classmethod
    def kind_name(cls) -> str:
        """Derive the kind's name from the class name: `distill` for `DistillConfig`."""
        return cls.__name__.removesuffix("Config").lower()

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters that are trained, or None if the model itself is trained."""
        return None

    @property
    def rows(self) -> str:
        """Name of the format of the training rows; see `toolkit.data.row_formats`.

        It is `documents`, `examples`, `pairs`, `answers` (with a label), or a format that a user's
        recipe registered.
        """
        return "documents"

    @property
    def frozen_models(self) -> dict[str, ModelConfig]:
        """Settings of the frozen models next to the trained one, by role, such as "teacher".

        Every section except `model` that holds a `ModelConfig` is a frozen model, and the name of
        the section is its role.
        """
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: section
            for name, section in sections.items()
            if name != "model" and isinstance(section, ModelConfig)
        }

    @property
    def learns_prompts(self) -> bool:
        """True if the loss also covers the prompt tokens of chosen answers, as in ORPO."""
        return False

    def __post_init__(self) -> None:
        name = self.kind_name()
        if self.kind not in ("", name):
            raise ConfigError(f"kind must be {name} or empty for this recipe, got {self.kind}")
        object.__setattr__(self, "kind", name)
        paths = ("model.name_or_path", "output_dir", "checkpoint.root")
        for name in (*paths, "data.train_files", "data.eval_files"):
            value = operator.attrgetter(name)(self)
            # An unset shell variable becomes an empty text.
            if value == "" or (isinstance(value, list) and "" in value):
                raise ConfigError(f"{name} is an empty text; set a path, or remove the setting")
        if self.model.kernels == "liger" and self.sharding.activation_checkpointing == "selective":
            raise ConfigError(
                "model.kernels: liger: sharding.activation_checkpointing: selective keeps queries "
                "and keys, which Liger's rotary kernel overwrites without torch noticing, so "
                "gradients would be wrong. Set it to full, or remove model.kernels"
            )
        if self.model.kernels == "liger" and self.sharding.context_parallel > 1:
            raise ConfigError(
                "model.kernels: liger was not tried with sharding.context_parallel; remove one of "
                "them"
            )
        if self.model.float8 != "none" and (why := find_float8_conflict(self)):
            raise ConfigError(f"model.float8: {self.model.float8}: {why}")
        check_expert_parallel(self)
        if self.data.streaming and self.train.max_steps == -1:
            raise ConfigError(
                "data.streaming needs train.max_steps, because the length of a pass is unknown"
            )
        if self.train.deterministic and "autotune" in (self.sharding.torch_compile_mode or ""):
            raise ConfigError(
                "train.deterministic: sharding.torch_compile_mode autotune chooses kernels by "
                "their measured speed, which varies; remove one of them"
            )
        save_steps = self.checkpoint.save_steps
        eval_steps = self.train.eval_steps
        if self.checkpoint.keep_best and (eval_steps is None or save_steps % eval_steps):
            raise ConfigError(
                f"checkpoint.keep_best needs an evaluation at each save: save_steps {save_steps} "
                f"must be a multiple of train.eval_steps, got {eval_steps}"
            )

    @property
    def torchao_recipe(self) -> str:
        """`model.float8`; `none` with adapters, since a frozen base does not need torchao."""
        return "none" if self.adapters else self.model.float8


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """Settings of a pretraining run."""

    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            learning_rate=3e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            lr_scheduler_type="cosine_with_min_lr",
            warmup_steps=0.01,
        )
    )
    output_dir: str = "runs/pretrain"


@dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Settings of a fine-tuning run, of all parameters or of adapters (lora.r or lora.from)."""

    model: FinetuneModelConfig
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    output_dir: str = "runs/finetune"

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters that are trained, or None if the model itself is trained."""
        return self.lora if self.lora.is_used else None

    @property
    def rows(self) -> str:
        """Name of the format of the training rows, `examples`: some tokens are supervised."""
        return "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.train_tokenizer:
            raise ConfigError(
                "model.train_tokenizer is for pretraining; set model.tokenizer_name_or_path, or "
                "remove it"
            )
        noise = getattr(self.train, "neftune_noise_alpha", None)
        if noise is not None and self.sharding.context_parallel > 1:
            raise ConfigError(
                "train.neftune_noise_alpha needs the length of complete samples, but with "
                "sharding.context_parallel a rank has a part of each; remove one of them"
            )
        if self.adapters is None:
            return
        if self.model.frozen_parameters:
            raise ConfigError(
                "model.frozen_parameters has no effect with lora.r, because adapters freeze the "
                "complete base model; remove it"
            )
        if self.model.trust_remote_code:
            raise ConfigError(
                "lora.r with model.trust_remote_code is not supported: adapters are verified on a "
                "base model that is built without code from outside; remove one of them"
            )
        if self.checkpoint.async_save is True:
            raise ConfigError(
                "checkpoint.async_save with lora.r gains nothing, because a saved adapter is "
                "verified at once; remove it"
            )


def model_settings(cfg: RunConfig) -> ModelConfig:
    """Return the model's settings with an empty `dtype` replaced by its default.

    The default is float32, or `auto` (the checkpoint's dtype) if adapters are trained.
    """
    dtype = cfg.model.dtype or ("auto" if cfg.adapters else "float32")
    return dataclasses.replace(cfg.model, dtype=dtype)


def check_folder(name_or_path: str) -> None:
    """Check that a model's local path is a folder; accept any name that may be a Hub id.

    Raises:
        ModelError: the path is a file, or does not exist.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return
    if path.exists():
        raise ModelError(f"model.name_or_path {path} is a file; give the folder that holds it")
    if path.is_absolute() or name_or_path.startswith("."):  # no Hub id
        raise ModelError(f"there is no folder {name_or_path} (current folder: {Path.cwd()})")
