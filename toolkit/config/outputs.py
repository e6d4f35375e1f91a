"""Settings of what a run writes: checkpoints, metrics, exports and the Hub repository."""

import importlib.util
from dataclasses import dataclass, field
from typing import Final, Literal

from toolkit.config.fields import AtLeast1, AtLeast2, NotNegative, Positive
from toolkit.config.measures import is_greater_better
from toolkit.errors import ConfigError

MAX_SHARD_SIZE = "5GB"
"""Of one weight file of an export."""
_PREEMPTION: Final = ("SIGTERM", "SIGINT", "SIGUSR1")
Signal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"]
Tracker = Literal[
    "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "aim", "clearml", "dvclive"
]


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    save_steps: AtLeast1 = 500
    """A checkpoint every so many steps, and at the end."""
    save_total_limit: AtLeast2 | None = 2
    """Keep the newest so many (at least 2: one is whole while another is written); empty: all."""
    keep_best: bool | NotNegative = False
    """Keep so many of the best by metric_for_best_model beside the newest; true: one."""
    metric_for_best_model: str = "eval_loss"
    """Metric of an evaluation that `keep_best` and early stopping compare, such as `eval_accuracy`,
    or `eval_FILE_accuracy` of one of several evaluation files; `eval_` may be omitted. Less is
    better of a loss, a perplexity, `kl`, `reward_rejected` and `logps_rejected`, more of others."""
    async_save: bool | Literal["auto"] = "auto"
    """Go on training while a checkpoint is written: the loop waits only for a copy in host memory,
    which costs each process its parameters and optimizer state once more there. False: when the
    loop goes on, the checkpoint is on the disk. `auto`: on an accelerator, where the copies take at
    most half of the free memory of the host or of the container; never with adapters."""
    max_failed_saves: NotNegative = 2
    """Saves in a row that a full, read-only or broken disk, or the store, may refuse. Each is a
    warning, and training goes on; one more ends the run, as does a failure of the last save or of
    the one after a signal. 0: the first one ends it."""
    verify_on_resume: Literal["bytes", "sizes"] = "bytes"
    """Check of a checkpoint before a start goes on from it: reads every byte, or of the shards
    (nearly all of it) the sizes only, which finds no flipped bit."""
    root: str | None = None
    """Folder or URL of an object store, such as s3://bucket/run, that holds this run's checkpoints;
    empty: output_dir, which keeps everything else in any case. A store needs its fsspec driver
    (s3fs, gcsfs, adlfs) and finds its credentials where that driver looks for them."""
    export_steps: AtLeast1 | None = None
    """Write the model as a Hugging Face folder every so many steps, to exports/step-N of the run;
    all of them stay; empty: none."""
    export_at_end: bool = False
    """Write it after the last step. Off: `toolkit consolidate` can at any time, in one process."""
    preemption_signals: list[Signal] = field(default_factory=lambda: [*_PREEMPTION])
    """Signals, to the launcher or any rank, that end the run after a checkpoint."""
    grace_seconds: Positive = 300.0
    """Time for that checkpoint; the process then ends. Not more than what the scheduler gives. When
    `accelerate launch` or torchrun itself gets SIGTERM, it kills after 30 s, or after
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT of its environment; `toolkit train` waits."""

    def __post_init__(self) -> None:
        if self.save_total_limit is None and self.keep_best:
            raise ConfigError(
                "checkpoint.keep_best does nothing where save_total_limit is empty: all "
                "checkpoints are kept"
            )

    def best_metric(self) -> tuple[str, bool]:
        """Return the name of the metric in a line of metrics.jsonl, and whether more is better."""
        name = f"eval_{self.metric_for_best_model.removeprefix('eval_')}"
        return name, is_greater_better(name)


@dataclass(frozen=True)
class MetricsConfig:
    """Metrics shown while training, and trackers that get them; metrics.jsonl is always written."""

    report_to: Literal["none"] | Tracker | list[Tracker] = "none"
    """Tracker of experiments, or a list of them, each with its package. Where a tracker sends to,
    and as whom, is its own affair: `wandb login`, WANDB_MODE, MLFLOW_TRACKING_URI and the like."""
    project: str = "fsdp2-toolkit"
    """Project (MLflow's experiment) that trackers file the run under."""
    run_name: str | None = None
    """Name of the run in trackers; empty: the name of output_dir."""

    def trackers(self) -> list[str]:
        """Return the trackers of `report_to`; ConfigError where a package is not there."""
        asked = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        names: list[str] = [name for name in dict.fromkeys(asked) if name != "none"]
        if missing := [name for name in names if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"metrics.report_to: {', '.join(missing)} cannot be imported here; pip install "
                f"{' '.join(missing)}, or leave the tracker out"
            )
        return names


@dataclass(frozen=True)
class HubConfig:
    """Publishing of the run at its end. The token comes from `hf auth login` or HF_TOKEN."""

    push_to_hub: bool = False
    """Export the last checkpoint and push it when the run is done. Whether that is allowed is
    asked before training, and a missing repository is created then."""
    hub_model_id: str | None = None
    """Repository, ORG/NAME."""
    hub_private_repo: bool = True
    """Create the repository as a private one; a public one is refused unless this is false."""

    def __post_init__(self) -> None:
        if self.push_to_hub and not self.hub_model_id:
            raise ConfigError("hub.push_to_hub needs hub.hub_model_id: give ORG/NAME")
