"""Steps that are skipped on all ranks: loss or gradient is NaN or infinite, or a spike.

`train_step` decides on the device and waits for nothing. `BadSteps` reads the decisions when
metrics are logged and before a save, and names the samples of skipped steps.

[Note: spikes] With `train.skip_spikes`, steps whose loss or gradient norm is far above those before
are skipped. PaLM skipped the batches around a spike (Chowdhery et al. 2022, section 5.1),
OLMo-core's `SkipStepOptimizer` skips the step. Here the distance is measured from the median, in
median absolute deviations x 1.4826. So a spike does not raise the limit for the next one
(docs/journal.md), and a level that stays high becomes the normal one after half a window. The
deviation is at least 1 % of the median loss and 10 % of the median norm. Nothing is skipped before
the window is full.

The decision is made on the device, from a loss and a norm that are bitwise identical on all ranks,
so nobody waits. The window is part of a checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit import ranks
from toolkit.errors import TrainingError
from toolkit.formats import local_tensor
from toolkit.training.train_state import TrainState

SPIKES = "spikes"  # key of the window in `TrainState.extra`
# The standard deviation of normally distributed values, in median absolute deviations.
_MAD_TO_SIGMA = 1.4826
_WINDOW = 128  # steps; a new level becomes the normal one within about as many
# The smallest deviation, as a share of the median loss and of the median gradient norm.
_MIN_DEVIATIONS = ((0.01,), (0.1,))
_MAX_LISTED_SAMPLES = 12


@dataclass
class BadSteps:
    """Counts and reports skipped steps, and ends the run if too many of them follow each other.

    Counts begin at zero when the program starts; they are not part of a checkpoint.
    """

    max_consecutive: int = 0
    """Number of skipped steps that may follow each other. The next one ends the run."""
    describe_samples: Callable[[int], Sequence[str]] | None = None
    """Maps a step to descriptions of the samples that this rank reads in it."""
    state: TrainState | None = None
    """Its values are checked before they are saved."""

    def __post_init__(self) -> None:
        self._unread = list[tuple[int, torch.Tensor]]()
        self._consecutive = 0
        self._skipped = 0

    def record(self, step: int, stats: Any) -> None:
        """Store the statistics of `step` for `report_skipped`. Does not wait for the device.

        Args:
            step: number of the step.
            stats: the `StepStats` of the step.
        """
        spike = torch.zeros_like(stats.skipped) if stats.spike is None else stats.spike
        values = (stats.skipped, stats.bad_here, spike, stats.loss, stats.grad_norm)
        self._unread.append((step, torch.stack([value.float() for value in values])))

    def take_skipped_count(self) -> int:
        """Report the skipped steps, and return their number since the last call. Collective.

        Waits for the device. The errors are those of `report_skipped`.
        """
        self.report_skipped()
        count, self._skipped = self._skipped, 0
        return count

    def report_skipped(self) -> None:
        """Log a warning for each recorded step that was skipped, with the cause and its samples.

        Collective; waits for the device. The records are removed.

        Raises:
            TrainingError: more than `max_consecutive` skipped steps followed each other.
        """
        if not self._unread:
            return
        steps, values = zip(*self._unread, strict=True)
        self._unread = []
        for step, row in zip(steps, torch.stack(values).tolist(), strict=True):
            skipped, bad_here, spike, loss, grad_norm = row
            self._consecutive = self._consecutive + 1 if skipped else 0
            if not skipped:
                continue
            self._skipped += 1
            spike_text = (
                f"loss {loss:.4g} or gradient norm {grad_norm:.4g} is far above previous steps"
            )
            cause = self._describe_cause(step, bool(bad_here), spike_text if spike else "")
            if self._consecutive > self.max_consecutive:
                self._raise_too_many_skipped(step, cause)
            ranks.log_once(f"WARNING: step {step} is skipped: {cause}")

    def check_values(self, step: int) -> None:
        """Raise a `TrainingError` if weights or optimizer state hold NaN or infinity after `step`.

        Call it before a save, so that bad values are not saved. Collective; reads all bytes of this
        rank's shards once. A rank whose `state` is None has no values to check.
        """
        bad_names = [] if self.state is None else _find_not_finite(self.state)
        if not any(ranks.any_over_ranks([bool(bad_names)])):
            return
        by_rank = ranks.gather(bad_names[:3])
        tensors = "; ".join(f"rank {r}: {', '.join(b)}" for r, b in enumerate(by_rank) if b)
        raise ranks.mark_collective(
            TrainingError(
                f"after step {step} values are NaN or infinite ({tensors}); they are not saved. "
                "The newest checkpoint is from before; lower optim.learning_rate before you resume "
                "from it"
            )
        )

    def _describe_cause(self, step: int, bad_here: bool, spike_text: str) -> str:
        """Describe why a step was skipped, on which ranks and with which samples. Collective.

        Args:
            step: number of the step.
            bad_here: True if this rank's part of the loss is NaN or infinite.
            spike_text: the cause if the step was a spike; otherwise empty.
        """
        samples = list(self.describe_samples(step)) if self.describe_samples else []
        by_rank = ranks.gather((bad_here, samples))
        bad_ranks = [rank for rank, (is_bad, _) in enumerate(by_rank) if is_bad]
        source = f"loss on rank {', '.join(map(str, bad_ranks))}" if bad_ranks else "gradient"
        names = [name for rank in bad_ranks or range(len(by_rank)) for name in by_rank[rank][1]]
        hidden = len(names) - _MAX_LISTED_SAMPLES
        more = f" and {hidden} more" if hidden > 0 else ""
        listing = f"; samples: {', '.join(names[:_MAX_LISTED_SAMPLES])}{more}" if names else ""
        return (spike_text or f"{source} is NaN or infinite") + listing

    def _raise_too_many_skipped(self, step: int, cause: str) -> None:
        """Raise the `TrainingError` for too many skipped steps in a row.

        Args:
            step: number of the last skipped step.
            cause: the reason why it was skipped.
        """
        steps = f"step {step}"
        if self.max_consecutive:
            steps = f"{self._consecutive} step(s) in a row, up to {step},"
        raise ranks.mark_collective(
            TrainingError(
                f"{steps} had no finite loss and gradient, or a spike (train.max_bad_steps: "
                f"{self.max_consecutive}); the last: {cause}. These steps changed nothing, and "
                "nothing was saved since. Lower optim.learning_rate, raise optim.warmup_steps, or "
                "look at these samples"
            )
        )


@torch.no_grad()
def _find_not_finite(state: TrainState) -> list[str]:
    """List the names of this rank's trained weights and optimizer tensors with NaN or infinity."""
    trained = state.trained_parameters()
    tensors: dict[str, torch.Tensor] = dict(trained)
    for name, parameter in trained.items():
        values = state.required_optimizer.state.get(parameter, {})
        tensors |= {f"{key} of {name}": v for key, v in values.items() if torch.is_tensor(v)}
    local = {name: local_tensor(t) for name, t in tensors.items() if t.is_floating_point()}
    local = {name: t for name, t in local.items() if t.numel()}
    # The largest absolute value is NaN if any value is.
    largest = [torch.linalg.vector_norm(t, torch.inf).float() for t in local.values()]
    if not largest:
        return []
    # Stacked on one device, so that the host waits once.
    stacked = torch.stack([t.to(largest[0].device) for t in largest])
    return [n for n, finite in zip(local, stacked.isfinite().tolist(), strict=True) if not finite]


class Spikes:
    """Detects steps whose loss or gradient norm is far above those of the last steps.

    See [Note: spikes].

    Args:
        deviations: a value is a spike if it exceeds the median by more than this many deviations.
        device: the device of losses and norms.
        saved_window: result of `state_dict` from a checkpoint; empty to start without values.
        window: number of remembered steps. Before so many are remembered, nothing is a spike.
    """

    def __init__(
        self,
        deviations: float,
        device: torch.device,
        saved_window: dict[str, Any],
        *,
        window: int = _WINDOW,
    ) -> None:
        self._deviations = deviations
        rows = [saved_window.get(name, [])[-window:] for name in ("loss", "grad_norm")]
        values = [[float("nan")] * (window - len(row)) + row for row in rows]
        self._values = torch.tensor(values, dtype=torch.float32).to(device)  # oldest first
        self._min_deviations = torch.tensor(_MIN_DEVIATIONS, device=device)

    @torch.no_grad()
    def is_spike(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Decide if a step with this loss and gradient norm is a spike; remember both values.

        If one of them is NaN or infinite, the step is no spike, and neither is remembered. Does not
        wait for the device.

        Returns:
            A 0-d bool tensor on the device. It is equal on all ranks, since loss and norm are.
        """
        now = torch.stack([loss, grad_norm]).float()[:, None]
        median = self._median(self._values)
        deviation = _MAD_TO_SIGMA * self._median((self._values - median).abs())
        deviation = deviation.maximum(self._min_deviations * median.abs())
        limit = median + self._deviations * deviation
        # While the window is not full it holds NaN, and no value is above NaN.
        above = (now > limit).any() & self._values.isfinite().all()
        finite = now.isfinite().all()
        self._values = torch.where(finite, torch.cat([self._values[:, 1:], now], 1), self._values)
        return above & finite

    @staticmethod
    def _median(values: torch.Tensor) -> torch.Tensor:
        """Return the median of each of the two rows, as [2, 1].

        If there are two middle values, the larger one is used.
        """
        # By sorting, since torch refuses its median on CUDA under train.deterministic.
        return values.sort(dim=1).values[:, values.shape[1] // 2, None]

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered losses and norms as exact JSON values. Waits for the device."""
        rows = [row[row.isfinite()].tolist() for row in self._values.cpu()]
        return {"loss": rows[0], "grad_norm": rows[1]}
