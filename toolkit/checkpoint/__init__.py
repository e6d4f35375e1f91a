"""The run's folder: save, restore, commit, retention, disk."""

from toolkit.checkpoint.saving import TrainState, resume, save

__all__ = ["TrainState", "resume", "save"]
