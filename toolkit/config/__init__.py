"""What a run is: its settings, their defaults and how they are read. Imports no torch."""

from toolkit.config.parse import differences, dump, load, parse
from toolkit.config.settings import (
    MAX_SHARD_SIZE,
    CheckpointConfig,
    DataConfig,
    FinetuneConfig,
    HubConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PretrainConfig,
    ShardingConfig,
    TrainConfig,
    model_settings,
)
