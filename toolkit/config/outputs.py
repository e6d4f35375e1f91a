"""Settings of what a run writes: checkpoints, metrics, exports and the Hub repository."""

import importlib.util
from dataclasses import dataclass, field
from typing import Final, Literal

from toolkit.config.fields import AtLeast1, AtLeast2, NotNegative, Positive
from toolkit.config.measures import is_greater_better
from toolkit.errors import ConfigError

MAX_SHARD_SIZE = "5GB"
"""Largest size of one weight file of an export."""
_PREEMPTION: Final = ("SIGTERM", "SIGINT", "SIGUSR1")
Signal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"]
Tracker = Literal[
    "tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab", "aim", "clearml", "dvclive"
]


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints: when they are written and which ones are kept."""

    save_steps: AtLeast1 = 500
    """Write a checkpoint every so many steps, and at the end."""
    save_total_limit: AtLeast2 | None = 2
    """Number of newest checkpoints to keep. At least 2, so that a complete one exists while another
    is written. Empty: all."""
    keep_best: bool | NotNegative = False
    """Number of best checkpoints by metric_for_best_model to keep in addition to the newest.
    `true`: one."""
    metric_for_best_model: str = "eval_loss"
    """Evaluation metric that `keep_best` and early stopping compare, such as `eval_accuracy`, or
    `eval_FILE_accuracy` for one of several evaluation files. `eval_` may be omitted. Lower is
    better for a loss, a perplexity, `kl`, `reward_rejected` and `logps_rejected`, higher for all
    others."""
    async_save: bool | Literal["auto"] = "auto"
    """Continue training while a checkpoint is written. The loop waits only for a copy in host
    memory, which takes the size of the parameters and optimizer state of each process. `false`: the
    loop waits until the checkpoint is on the disk. `auto`: true on an accelerator if the copies
    take at most half of the free memory of the host or container; never with adapters."""
    max_failed_saves: NotNegative = 2
    """Number of consecutive saves that may fail because the disk is full, read-only or broken, or
    because of the object store. Each is a warning and training continues. One more ends the run, as
    does a failure of the last save or of the save after a signal. 0: the first one ends it."""
    verify_on_resume: Literal["bytes", "sizes"] = "bytes"
    """Check of a checkpoint before a run resumes from it. `bytes`: every byte. `sizes`: only the
    file sizes of the shards, which are nearly all of it, so that a flipped bit is not found."""
    root: str | None = None
    """Folder or URL of an object store, such as s3://bucket/run, for the checkpoints of this run.
    Empty: output_dir, which always holds everything else. A store needs its fsspec driver (s3fs,
    gcsfs, adlfs), which also finds the credentials."""
    export_steps: AtLeast1 | None = None
    """Export the model every so many steps as a Hugging Face folder exports/step-N in the run
    directory. All exports are kept. Empty: none."""
    export_at_end: bool = False
    """Export the model after the last step. `false`: `toolkit consolidate` can do so at any time,
    in one process."""
    after_export: str | None = None
    """Shell command to run on rank 0 for each export, such as
    `lm_eval --model hf --model_args pretrained={export} --tasks hellaswag`. `{export}` is the
    folder, `{step}` the step. Training continues meanwhile, and the run waits for it at its end.
    `after_export/` in the run directory gets its output and exit code, which does not end the run.
    Empty: none."""
    preemption_signals: list[Signal] = field(default_factory=lambda: [*_PREEMPTION])
    """Signals to the launcher or to any rank that end the run after a checkpoint."""
    grace_seconds: Positive = 300.0
    """Seconds for the checkpoint after a signal, after which the process ends. Set no more than the
    scheduler allows. When `accelerate launch` or torchrun receives SIGTERM itself, it kills the
    ranks after 30 s, or after TORCH_ELASTIC_SHUTDOWN_TIMEOUT of its environment; `toolkit train`
    waits."""

    def __post_init__(self) -> None:
        if self.save_total_limit is None and self.keep_best:
            raise ConfigError(
                "checkpoint.keep_best has no effect if save_total_limit is empty, because all "
                "checkpoints are kept; remove one of them"
            )
        if self.after_export is not None and self.export_steps is None and not self.export_at_end:
            raise ConfigError(
                "checkpoint.after_export has no effect without exports; set "
                "checkpoint.export_steps or checkpoint.export_at_end"
            )

    def best_metric(self) -> tuple[str, bool]:
        """Resolve `metric_for_best_model`.

        Returns:
            The key of the metric in metrics.jsonl, and True if a larger value is better.
        """
        name = f"eval_{self.metric_for_best_model.removeprefix('eval_')}"
        return name, is_greater_better(name)


@dataclass(frozen=True)
class MetricsConfig:
    """Settings of experiment trackers. The file metrics.jsonl is always written."""

    report_to: Literal["none"] | Tracker | list[Tracker] = "none"
    """Experiment tracker, or a list of them. Each needs its package. A tracker has its own settings
    for server and account, such as `wandb login`, WANDB_MODE or MLFLOW_TRACKING_URI."""
    project: str = "fsdp2-toolkit"
    """Project of the run in trackers (MLflow's experiment)."""
    run_name: str | None = None
    """Name of the run in trackers. Empty: the name of output_dir."""

    def trackers(self) -> list[str]:
        """List the trackers that `report_to` selects, without duplicates.

        Raises:
            ConfigError: the package of a tracker is not installed.
        """
        trackers = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        names: list[str] = [name for name in dict.fromkeys(trackers) if name != "none"]
        if missing := [name for name in names if importlib.util.find_spec(name) is None]:
            packages = " ".join(missing)
            raise ConfigError(
                f"metrics.report_to: {', '.join(missing)} cannot be imported; run `pip install "
                f"{packages}`, or remove the tracker"
            )
        return names


@dataclass(frozen=True)
class HubConfig:
    """Settings for pushing the run to the Hub. The token comes from `hf auth login` or HF_TOKEN."""

    push_to_hub: bool = False
    """Export the last checkpoint and push it when the run is done. Permission is checked before
    training, and a missing repository is created then."""
    hub_model_id: str | None = None
    """Repository, as ORG/NAME."""
    hub_private_repo: bool = True
    """Create a private repository. A public repository is refused unless this is false."""

    def __post_init__(self) -> None:
        if self.push_to_hub and not self.hub_model_id:
            raise ConfigError("hub.push_to_hub needs hub.hub_model_id; set it to ORG/NAME")
