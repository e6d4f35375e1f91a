"""Settings of a run, their defaults and their reader. Imports no torch."""

from toolkit.config.data import DataConfig
from toolkit.config.distill import DistillConfig
from toolkit.config.kinds import KINDS, Kind, find_shipped_kind, kind_of, saved_kind_name
from toolkit.config.lora import LoraConfig
from toolkit.config.outputs import MAX_SHARD_SIZE, CheckpointConfig, HubConfig, MetricsConfig
from toolkit.config.parse import dump, find_differences, flatten_settings, load, parse
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import (
    FinetuneConfig,
    ModelConfig,
    OptimConfig,
    PretrainConfig,
    ShardingConfig,
    TrainConfig,
    model_settings,
)
