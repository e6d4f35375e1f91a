"""The run's folder: save, restore, commit, retention, disk."""

from toolkit.checkpoint.saving import TrainState, find, restore, resume, save, wait

__all__ = ["TrainState", "find", "restore", "resume", "save", "wait"]
