"""The run while it trains: launch, the step, loss, optimizer, metrics, generation."""

from toolkit.training.step import train_step

__all__ = ["train_step"]
