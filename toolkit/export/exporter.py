"""The exports of a run, at the steps that its config names, and the command that runs on each."""

import time
from pathlib import Path

from torch import nn

from toolkit import ranks
from toolkit.checkpoint.names import EXPORTS, step_name
from toolkit.config import CheckpointConfig
from toolkit.export.after_export import ExportCommands
from toolkit.export.live import export_step, has_export
from toolkit.training.guards import watchdog

_POLL_SECONDS = 1.0


class Exporter:
    """Export a model during and after a run, and start `checkpoint.after_export` on each export.

    Args:
        model: built by `build_on_meta`, with weights; sharded or not.
        run_dir: the run directory.
        cfg: the section `checkpoint`.
    """

    def __init__(self, model: nn.Module, run_dir: str | Path, cfg: CheckpointConfig) -> None:
        self._model = model
        self._run_dir = Path(run_dir)
        self._cfg = cfg
        self._commands: ExportCommands | None = None
        if cfg.after_export is not None and ranks.rank() == 0:
            self._commands = ExportCommands(cfg.after_export, run_dir)

    def export(self, step: int, *, may_fail: bool = False) -> list[str]:
        """Export the model of `step` to `exports/step-N`; return the log lines. Collective.

        Rank 0 then starts or queues the user's command. The lines also report commands that have
        ended.

        Args:
            step: the current step.
            may_fail: if the disk is full or broken, print a warning instead of raising; no command
                is started.

        Raises:
            ExportError: see `export_live`.
        """
        line = export_step(self._model, self._run_dir, step, may_fail=may_fail)
        lines = [line] if line else []
        if self._commands is not None:
            lines += self._commands.poll()
            if line:
                lines.append(self._commands.start(self._run_dir / EXPORTS / step_name(step), step))
        return lines

    def finish(self, step: int) -> list[str]:
        """Export the last step if `export_at_end` is set; return the log lines. Collective.

        If the run has an export of `step` already, nothing is done.
        """
        if self._cfg.export_at_end and not has_export(self._run_dir, step):
            return self.export(step)
        return []

    def wait(self) -> list[str]:
        """Wait until the commands on all exports have ended; return their log lines. Collective.

        No export may follow.
        """
        return ranks.on_main(self._wait)

    def _wait(self) -> list[str]:
        """Close the queue and wait for the commands; return their log lines. Only on rank 0.

        The watchdog does not time out meanwhile.
        """
        if self._commands is None:
            return []
        self._commands.close()
        with watchdog.extend_timeout("checkpoint.after_export"):
            while not self._commands.has_ended():
                watchdog.report_progress()  # the command is the user's: it may take any time
                time.sleep(_POLL_SECONDS)
        return self._commands.poll()
