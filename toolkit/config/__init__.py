"""What a run is: its settings, their defaults and how they are read. Imports no torch."""

from toolkit.config.settings import (
    CheckpointConfig,
    DataConfig,
    FinetuneConfig,
    HubConfig,
    LoraConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    PretrainConfig,
    ShardingConfig,
    TrainConfig,
    parse,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FinetuneConfig",
    "HubConfig",
    "LoraConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimConfig",
    "PretrainConfig",
    "ShardingConfig",
    "TrainConfig",
    "parse",
]
