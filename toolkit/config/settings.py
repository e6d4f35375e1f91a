"""Settings of a run: frozen dataclasses, one per concern.

Owns every default (in its field, with its sentence below it), the range of every number (in its
type) and the settings that contradict each other (`__post_init__`). Knows neither torch nor the
files that a run will read.
"""

import dataclasses
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.config.data import DataConfig, FinetuneDataConfig
from toolkit.config.fields import AllOrCount, AtLeast1, Fraction, NonNegative, NotNegative, Positive
from toolkit.config.lora import LoraConfig
from toolkit.config.outputs import CheckpointConfig, HubConfig, MetricsConfig
from toolkit.errors import ConfigError, ModelError
from toolkit.parsing import parse_size

Dtype = Literal["float32", "bfloat16"]
Learned = Literal["documents", "examples", "pairs", "answers"]
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
    """The model, and the storage dtype of its parameters."""

    name_or_path: str
    """Folder of a Hugging Face causal LM checkpoint, or its id on the Hub."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the checkpoint's weights; `random` draws new ones by its config.json."""
    dtype: Dtype | Literal["auto"] | None = "float32"
    """Storage dtype of the parameters (the master weights that the optimizer updates); `auto` is
    the checkpoint's own; empty: float32."""
    tokenizer_name_or_path: str | None = None
    """Folder or Hub id of the tokenizer, where it is not the model's."""
    train_tokenizer: bool = False
    """Train a byte-level BPE of the model's vocabulary size on the training text before the run,
    where no tokenizer is found."""
    resize_embeddings: bool | AtLeast1 = False
    """Grow or shrink the embedding and the head to the tokenizer's length (`true`), rounded up to a
    multiple of an integer, such as 64, which matrix products of some devices are faster with; new
    rows are the mean of the old ones."""
    frozen_parameters: list[str] = field(default_factory=list)
    """Patterns of parameters that are not trained: `model.embed_tokens.*`; `*` is anything."""
    attn_implementation: str | None = None
    """Attention kernel, such as `sdpa` or `flash_attention_2`; empty: transformers' choice."""
    kernels: Literal["none", "liger"] = "none"
    """`liger`: Liger's Triton kernels for norms, rotary positions and gated MLPs, for who does not
    compile (needs liger-kernel and a GPU); the loss stays the toolkit's."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


@dataclass(frozen=True)
class FinetuneModelConfig(ModelConfig):
    """The model, and the storage dtype of its parameters."""

    dtype: Dtype | Literal["auto"] | None = None
    """Storage dtype of the parameters; `auto` is the checkpoint's own. Empty: float32, the master
    weights that the optimizer updates; with adapters, whose base is not updated, `auto`."""


@dataclass(frozen=True)
class ShardingConfig:
    """Layout of parameters on the devices, the dtype they compute in, and recomputation.

    A *pattern* names modules: a class (`LlamaMLP`), a whole name (`model.layers.*.mlp`), or the end
    of one (`mlp.gate`); `*` matches anything, dots included. A pattern that matches nothing is an
    error.
    """

    # ---- Mesh
    dp_replicate: AllOrCount = -1
    """Number of replicas of the sharded model (HSDP); the processes are dp_replicate x dp_shard.
    -1: as many as dp_shard leaves."""
    dp_shard: AllOrCount = -1
    """Number of ranks that share one copy of the model; -1: all that dp_replicate leaves. 1 is
    plain data parallelism, for models that fit on one device. Where both are -1 and the run is on
    GPUs of several machines, each machine has a copy if what a rank then holds (parameters,
    gradients, optimizer state) takes at most 40 % of its memory."""

    # ---- Units: what is gathered, and freed, together
    layer_classes: list[str] = field(default_factory=list)
    """Patterns of the modules that become units; empty: the decoder layers of the model."""
    embedding_units: bool | Literal["auto"] = "auto"
    """Make units of the embedding (freed after use) and of the head (kept until the backward); tied
    ones share a unit. Else both stay in the root, gathered throughout. `auto`: on a GPU, where they
    are not tied."""
    ignored_parameters: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not sharded: a full copy on every rank, in the storage
    dtype, with its gradient averaged over the ranks."""
    frozen: Literal["auto", "sharded", "replicated"] = "auto"
    """Parameters that are not trained, such as the base under adapters: `sharded` are gathered in
    each forward and backward like the rest; `replicated` lie whole on every rank, never gathered.
    `auto`: replicated on an accelerator where the rest of the copy takes at most 0.4 of the free
    memory, and is stored in the dtype that it computes in; else sharded."""

    # ---- Precision
    param_dtype: Dtype = "bfloat16"
    """Dtype of the gathered parameters and of the computation."""
    reduce_dtype: Dtype = "float32"
    """Dtype of the gradient reduction between ranks."""
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
    accumulation: Literal["auto", "keep_gathered", "reduce_once", "reduce_each"] = "auto"
    """Between the micro-batches of a step: `keep_gathered` gathers the parameters once a step and
    reduces the gradients once (fastest; holds the whole model in param_dtype and a whole gradient);
    `reduce_once` gathers in each micro-batch; `reduce_each` reduces in each too (least memory).
    `auto`: the fastest that leaves a tenth of the device free, by the peak of the first two steps;
    gradients of more than a quarter of the device are reduced in each, and so they are where each
    rank has a copy of its own."""
    forward_prefetch: NotNegative = 0
    """Gather so many units ahead in the forward, in the order of the first; 0: PyTorch's own."""
    backward_prefetch: NotNegative = 0
    """Gather so many units ahead in the backward; 0: PyTorch's own (one)."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""

    # ---- Recomputation and compilation
    activation_checkpointing: bool | AtLeast1 | Literal["auto", "none", "full", "selective"] = (
        "none"
    )
    """Recompute activations in the backward: of each decoder layer (`full` or true), of every k-th
    (an integer), or all but matrix products and attention (`selective`). `auto`: the first of
    none, selective and full that fits by the plan and by a step tried on the device."""
    activation_offload: bool = False
    """Move what activation_checkpointing keeps, but for the last layer, to host memory until the
    backward."""
    torch_compile: TorchCompile = "auto"
    """Compile each decoder layer (`layer` or true; one graph for identical layers), or the whole
    sharded `model`. `auto`: each layer, on a GPU, with samples of one length (packed or wrapped:
    each new shape compiles anew) and no unit or offload inside of a layer; else `none`."""
    torch_compile_backend: str = "inductor"
    """Backend of torch.compile."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile: `default` or max-autotune-no-cudagraphs. Modes that record CUDA graphs
    (reduce-overhead, max-autotune) are refused: FSDP2 moves the parameters at each step."""

    # ---- Planning
    device_memory: str | None = None
    """Memory of each device that the run may plan with, such as 80GB; empty: what is free at its
    start (on CPUs the free host memory, shared among the processes of a machine)."""

    def __post_init__(self) -> None:
        if self.device_memory is not None and parse_size(self.device_memory) is None:
            raise ConfigError(
                f"sharding.device_memory {self.device_memory!r} is not a size; write 80GB, or 500MB"
            )
        freed = self.reshard_after_forward not in ("auto", False)
        if self.accumulation == "keep_gathered" and freed:
            raise ConfigError(
                "sharding.accumulation: keep_gathered keeps what reshard_after_forward frees; set "
                "one of them to auto"
            )
        if self.frozen == "replicated" and self.cpu_offload:
            raise ConfigError(
                "sharding.frozen: replicated keeps on the device what cpu_offload moves to the "
                "host; leave out one of them"
            )
        records = self.torch_compile_mode in ("reduce-overhead", "max-autotune")
        compiles = self.torch_compile not in (False, "none")
        if records and compiles and self.torch_compile_backend == "inductor":
            raise ConfigError(
                f"sharding.torch_compile_mode {self.torch_compile_mode} records CUDA graphs, which "
                "need parameters at fixed addresses, and FSDP2 gathers them into other memory at "
                "each step; set max-autotune-no-cudagraphs or default"
            )
        if self.activation_offload and self.torch_compile not in (False, "none", "auto"):
            raise ConfigError(
                "sharding.activation_offload runs uncompiled code in each layer: torch_compile "
                "would compile none of it; leave out one of them"
            )
        if self.activation_offload and self.activation_checkpointing in (False, "none", "auto"):
            raise ConfigError(
                "sharding.activation_offload does nothing without activation_checkpointing: full, "
                "selective or a number; set that"
            )


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    optim: Literal["adamw_torch_fused", "adamw_8bit", "adafactor", "muon"] = "adamw_torch_fused"
    """AdamW (8 bytes of state a value in fp32); AdamW with moments of 8 bits (2 bytes; needs
    bitsandbytes); Adafactor (next to none), whose learning rate is relative to a parameter's size
    (1e-2 is usual); Muon for hidden matrices (4 bytes) and AdamW for the rest, with AdamW's
    learning rate and decay."""
    learning_rate: NonNegative = 5e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""
    adam_epsilon: NonNegative = 1e-8
    """Added to the denominator."""
    lr_scheduler_type: Schedule = "linear"
    """Schedule after the warm-up, as transformers names it."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further settings of the schedule, as transformers has them, such as `{"num_decay_steps":
    1000}` of warmup_stable_decay (empty: a tenth of all steps), or `{"min_lr_rate": 0.05}` of
    cosine_with_min_lr (empty: 0.1 of the peak)."""
    warmup_steps: NotNegative | Fraction = 0
    """Steps in which the learning rate rises from 0; below 1: their share of all steps."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are clipped to this global norm; 0: not clipped (the norm is still logged)."""


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run, and its batches."""

    max_steps: AllOrCount = -1
    """Optimizer steps; -1: as many as num_train_epochs needs."""
    num_train_epochs: Positive = 1.0
    """Passes over the training samples where max_steps is -1."""
    per_device_train_batch_size: AtLeast1 | Literal["auto"] = 8
    """Samples of one micro-batch on one process. `auto`: as many as fit, by the plan and by a step
    tried on the device, of those that divide global_batch_size."""
    global_batch_size: AtLeast1 | None = None
    """Samples of one optimizer step on all processes together; gradient_accumulation_steps follows
    from it. Empty: what the batch of a process, the accumulation and the processes make up."""
    per_device_eval_batch_size: AtLeast1 | None = None
    """Samples of one evaluation forward on one process; empty: as in training."""
    gradient_accumulation_steps: AtLeast1 = 1
    """Micro-batches of one optimizer step on one process."""
    deterministic: bool = False
    """Use only operations that give the same bits each time, so that on CUDA too a resumed run has
    the losses of an undisturbed one, to the bit, on as many devices of the same kind. Slower; one
    that has no such form ends the run by its name."""
    max_bad_steps: NotNegative = 3
    """Steps in a row whose loss or gradient may be NaN or infinite on any rank. Each is skipped on
    all of them (weights and optimizer stay as they are) and told with its samples; one more ends
    the run before anything is saved. 0: the first one ends it."""
    hang_seconds: NonNegative = 300.0
    """End the run when no rank makes progress for this many seconds in a step (a micro-batch is
    progress), with exit code 70 and a report of who waits for whom; at the start, in evaluations,
    saves and exports 12 times as long. It ends, too, when a rank is gone. 0 (for a debugger):
    nobody watches."""
    connect_seconds: Positive | None = None
    """Time for the processes to connect to each other once all of them have started; longer ends
    the run with the reason. Empty: 45 s, and 1 s more for each 32 processes."""
    router_aux_loss: Literal["auto", "pooled", "layer", "none"] = "auto"
    """Auxiliary loss that evens the loads of experts, over the global batch: `pooled` over layers,
    as transformers has it, or of each `layer`. `auto`: pooled where config.json asks for it
    (output_router_logits). Its coefficient is config.json's."""
    router_bias_update_rate: NonNegative = 0.0
    """Move DeepSeek's bias of experts so far after each step, towards even loads; 1e-3 is usual."""
    z_loss: NonNegative = 0.0
    """Add so much of the mean square of log Z of the logits to the loss; 1e-4 is usual. Not in
    preference tuning."""
    skip_spikes: Positive | None = None
    """Skip, and count as bad, a step whose loss or gradient norm lies more than so many deviations
    above the median of the 128 steps before; 6 is usual; empty: none."""
    check_steps: NotNegative | None = None
    """Compare the bits of trained weights and optimizer state after every so many steps with those
    before the next step, and end the run where one has changed; 0: never (as for a recipe that
    writes weights itself), nor the ranks with each other at each line of metrics and before a save.
    Empty: as logging_steps."""
    logging_steps: AtLeast1 = 10
    """A metrics line every so many steps (and at the first and the last)."""
    eval_steps: AtLeast1 | None = None
    """Evaluate every so many steps and at the end; empty: at the end, where there is eval data."""
    profile_steps: list[AtLeast1] = field(default_factory=list)
    """First and last step to profile, such as `[10, 12]`: a trace of each rank, on CUDA its
    allocations too (for pytorch.org/memory_viz), and a table of where the time went, in the folder
    `profile` of the run; empty: none. Few, since a trace has megabytes a step; their times count
    for no rate."""

    def __post_init__(self) -> None:
        steps = self.profile_steps
        if steps and (len(steps) != 2 or steps[0] > steps[1]):
            raise ConfigError(
                "train.profile_steps: expected the first and the last step, such as [10, 12], got "
                f"{steps}"
            )
        if self.per_device_train_batch_size == "auto" and self.global_batch_size is None:
            raise ConfigError(
                "train.per_device_train_batch_size: auto needs train.global_batch_size: the "
                "samples of a step, which it keeps"
            )

    @property
    def micro_batch(self) -> int:
        """`per_device_train_batch_size`; ConfigError where `auto` is not decided yet."""
        if not isinstance(self.per_device_train_batch_size, int):
            raise ConfigError(
                "train.per_device_train_batch_size: auto is decided when a run starts; give a "
                "number here"
            )
        return self.per_device_train_batch_size


@dataclass(frozen=True)
class FinetuneTrainConfig(TrainConfig):
    """Length of the run, its batches, and prompts that an evaluation answers."""

    neftune_noise_alpha: Positive | None = None
    """Noise on the embeddings while training, uniform in +-alpha / sqrt(tokens x width) (NEFTune);
    5 is usual; empty: none. Not in preference tuning, whose model must be the same function as its
    reference."""
    label_smoothing_factor: Fraction = 0.0
    """Share of the target that is spread over the whole vocabulary; training only. Not in
    preference tuning, which has preference.label_smoothing."""
    early_stopping_patience: AtLeast1 | None = None
    """Stop after so many evaluations without a better metric_for_best_model; empty: never."""
    eval_prompts: list[str] = field(default_factory=list)
    """Prompts answered at each evaluation, in 64 tokens at most, as a user's message where there is
    a chat template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ConfigError(
                "train.early_stopping_patience needs train.eval_steps: it counts evaluations"
            )


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run of any kind."""

    model: ModelConfig
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    output_dir: str = "runs"
    """Run directory: config, metrics and checkpoints. Starting the same command on it resumes."""
    seed: int = 42
    """Seeds the random weights and adapters, the sample order and dropout."""
    kind: str = ""
    """Kind of the run: `pretrain`, `finetune`, `prefer`, or the name of your own recipe. Empty: the
    kind of the recipe that is started. A recipe refuses a config of another kind."""

    @classmethod
    def kind_name(cls) -> str:
        """Return the name of the kind of run that this class configures: `DistillConfig` is
        `distill`.
        """
        return cls.__name__.removesuffix("Config").lower()

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained; None: the model itself is."""
        return None

    @property
    def learned(self) -> Learned:
        """Return what is learned: all of documents, in samples that are cut out of them, some
        tokens of examples, pairs of answers, or single answers with a label.
        """
        return "documents"

    @property
    def frozen_models(self) -> dict[str, ModelConfig]:
        """Frozen models next to the trained one: role -> settings, such as "teacher".

        The role is the name of the section; every section but `model` that holds a `ModelConfig`
        is a frozen model.
        """
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: section
            for name, section in sections.items()
            if name != "model" and isinstance(section, ModelConfig)
        }

    @property
    def learns_prompts(self) -> bool:
        """Return whether prompts of chosen answers are targets too, of pairs."""
        return False

    def __post_init__(self) -> None:
        name = self.kind_name()
        if self.kind not in ("", name):
            raise ConfigError(f"kind must be {name} or empty for this recipe, got {self.kind}")
        object.__setattr__(self, "kind", name)
        paths = ("model.name_or_path", "output_dir", "checkpoint.root")
        for name in (*paths, "data.train_files", "data.eval_files"):
            value = operator.attrgetter(name)(self)
            if value == "" or (isinstance(value, list) and "" in value):  # an unset shell variable
                raise ConfigError(f"{name} is an empty text; give a path, or leave the setting out")
        if self.model.kernels == "liger" and self.sharding.activation_checkpointing == "selective":
            raise ConfigError(
                "model.kernels: liger: sharding.activation_checkpointing: selective keeps queries "
                "and keys, which Liger's rotary kernel overwrites, unseen by torch: gradients "
                "would be wrong. Set it to full, or leave kernels out"
            )
        if self.data.streaming and self.train.max_steps == -1:
            raise ConfigError(
                "data.streaming needs train.max_steps: the length of a pass is not known before it"
            )
        if self.train.deterministic and "autotune" in (self.sharding.torch_compile_mode or ""):
            raise ConfigError(
                "train.deterministic: sharding.torch_compile_mode chooses kernels by the time "
                "that they take; leave one of them out"
            )
        every, evals = self.checkpoint.save_steps, self.train.eval_steps
        if self.checkpoint.keep_best and (evals is None or every % evals):
            raise ConfigError(
                f"checkpoint.keep_best needs an evaluation at each save: save_steps {every} must "
                f"be a multiple of train.eval_steps, got {evals}"
            )


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """A pretraining run."""

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
    """A fine-tuning run: of all parameters, or of adapters (lora.r or lora.from)."""

    model: FinetuneModelConfig
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    output_dir: str = "runs/finetune"

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained; None: the model itself is."""
        return self.lora if self.lora.is_used else None

    @property
    def learned(self) -> Learned:
        """Return what is learned: some tokens of examples."""
        return "examples"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.train_tokenizer:
            raise ConfigError(
                "model.train_tokenizer is for pretraining; set model.tokenizer_name_or_path, or "
                "leave it out"
            )
        if self.adapters is None:
            return
        if self.model.frozen_parameters:
            raise ConfigError(
                "model.frozen_parameters with lora.r does nothing: adapters freeze the whole "
                "base; leave it out"
            )
        if self.model.trust_remote_code:
            raise ConfigError(
                "lora.r with model.trust_remote_code: adapters are proven on a base built without "
                "code from outside; leave one of them out"
            )
        if self.checkpoint.async_save is True:
            raise ConfigError(
                "checkpoint.async_save with lora.r gains nothing: a save of an adapter is proven "
                "at once; leave it out"
            )


def model_settings(cfg: RunConfig) -> ModelConfig:
    """Return the model's settings with the dtype filled in: the checkpoint's own under adapters."""
    dtype = cfg.model.dtype or ("auto" if cfg.adapters else "float32")
    return dataclasses.replace(cfg.model, dtype=dtype)


def check_folder(name_or_path: str) -> None:
    """Refuse a model's path where no folder is (ModelError); what may be a Hub id passes."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return
    if path.exists():
        raise ModelError(f"model.name_or_path {path} is a file; give the folder that holds it")
    if path.is_absolute() or name_or_path.startswith("."):  # no Hub id
        raise ModelError(f"there is no folder {name_or_path} (current folder: {Path.cwd()})")
