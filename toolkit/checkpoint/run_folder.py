"""The output_dir of the run that is starting: claimed, held, its settings recorded.

Owns the order of these steps; each of them is `run_dir`'s and `disk`'s. Every method is collective.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from toolkit import ranks
from toolkit.checkpoint import disk, run_dir
from toolkit.checkpoint.state import TrainState
from toolkit.checkpoint.store import Folder
from toolkit.config import FinetuneConfig, PretrainConfig, differences
from toolkit.data.training_data import TrainingData
from toolkit.formats.metrics_file import SAMPLES, keep_until

_ACCUMULATION = "train.gradient_accumulation_steps"
_SILENT = ("output_dir", "metrics.", "hub.", "train.logging_steps")


class RunFolder:
    """Where a run keeps what it writes; `root` holds its checkpoints, here or on a store.

    Raises:
        ConfigError: the folder cannot be written, or holds another run or files of others.
        CheckpointError: `checkpoint.root` is on a store that cannot be used.
    """

    path: Path
    root: Folder

    def __init__(self, cfg: PretrainConfig | FinetuneConfig, say: Callable[..., None]) -> None:
        self._cfg, self._say = cfg, say
        ranks.on_all(lambda: run_dir.reach(cfg))
        self.path = ranks.on_all(lambda: run_dir.claim(cfg))
        self.root = ranks.on_all(lambda: run_dir.root_of(cfg))
        self._before = ranks.on_main(lambda: run_dir.recorded(cfg))

    @property
    def tokenizer(self) -> Path:
        """Where a tokenizer that the run trains is kept."""
        return self.path / run_dir.TOKENIZER

    @property
    def samples(self) -> Path:
        """The file of answers to `train.eval_prompts`."""
        return self.path / SAMPLES

    @property
    def holds_work(self) -> bool:
        """Whether an earlier start has left metrics or checkpoints."""
        return run_dir.holds_work(self.path)

    def hold(self, model: nn.Module, max_steps: int) -> None:
        """Refuse a disk that is too small for the run, then keep every other run out.

        Raises:
            CheckpointError: see `disk.refuse_overflow`.
            ConfigError: another process runs here.
        """
        disk.preflight(model, self.path, self._cfg.checkpoint, max_steps, self._say)
        ranks.on_main(lambda: run_dir.hold(self.path))

    def record(self, state: TrainState, data: TrainingData, *, done: bool = False) -> None:
        """Write the settings that hold from here on, and say which of them an earlier start did not
        have. Where the run is `done`, or has no step left, the settings of what was done stay.
        """
        if state.step:
            self._say(f"resuming   {self.path} after step {state.step}")
        if done or state.step >= data.max_steps:
            return
        cfg, before = self._cfg, self._before
        for name, (old, new) in (differences(before, cfg) if before and state.step else {}).items():
            if not name.startswith((*_SILENT, _ACCUMULATION)):
                self._say(f"changed    {name}: {old!r} -> {new!r}, from step {state.step + 1} on")
        asked, used = cfg.train.gradient_accumulation_steps, data.accumulation
        if asked != used:
            self._say(
                f"note: {_ACCUMULATION} {asked} has no effect, it is {used}: the global batch of a "
                f"run stays, here {data.position.global_batch} samples"
            )
            train: Any = dataclasses.replace(cfg.train, gradient_accumulation_steps=used)
            cfg = dataclasses.replace(cfg, train=train)
        ranks.on_main(lambda: run_dir.record(self.path, cfg))
        ranks.on_main(lambda: keep_until(self.samples, state.step))

    def next_lines(self, step: int, *, adapted: bool = False) -> list[str]:
        """Return what a run prints at its end: where things are, and the command that exports."""
        export = f"toolkit consolidate {self.path} --output {run_dir.export_path(self.path)}"
        return [
            f"run        {self.path}",
            f"checkpoint {self.root / 'checkpoints'}  (newest: step {step})",
            f"next       {export}" + ("   (--merge: with the base)" if adapted else ""),
        ]
