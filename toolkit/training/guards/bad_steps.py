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

SPIKES = "spikes"  # where `TrainState.extra` keeps the window
_NORMAL = 1.4826  # standard deviations of normal values in a median absolute deviation
_WINDOW = 128  # steps, about as many as a level takes to become the normal one
_LEAST = ((0.01,), (0.1,))  # of the median of losses, and of norms: the least deviation taken
_NAMED = 12  # samples of a step


@dataclass
class BadSteps:
    """The skipped steps of a start."""

    most: int = 0  # of them may follow each other; the next one ends the run
    samples: Callable[[int], Sequence[str]] | None = None
    """Step -> the samples that this rank reads in it, in words."""
    state: TrainState | None = None  # whose values are looked at before they are saved

    def __post_init__(self) -> None:
        self._unread = list[tuple[int, torch.Tensor]]()
        self._streak = self._count = 0

    def take(self, step: int, stats: Any) -> None:
        """Take the `StepStats` of `step`, without waiting for them."""
        spike = torch.zeros_like(stats.skipped) if stats.spike is None else stats.spike
        values = (stats.skipped, stats.bad_here, spike, stats.loss, stats.grad_norm)
        self._unread.append((step, torch.stack([value.float() for value in values])))

    def count(self) -> int:
        """Return how many steps were skipped since the last call; see `read`."""
        self.read()
        found, self._count = self._count, 0
        return found

    def read(self) -> None:
        """Tell of the steps since the last call that were skipped. Collective, and waits for the
        device. TrainingError: too many followed each other.
        """
        if not self._unread:
            return
        steps, values = zip(*self._unread, strict=True)
        self._unread = []
        for step, told in zip(steps, torch.stack(values).tolist(), strict=True):
            skipped, here, spike, loss, grad_norm = told
            self._streak = self._streak + 1 if skipped else 0
            if not skipped:
                continue
            self._count += 1
            far = f"loss {loss:.4g} or gradient norm {grad_norm:.4g} is far above those before"
            said = self._describe(step, bool(here), far if spike else "")
            if self._streak > self.most:
                self._stop(step, said)
            ranks.log_once(f"WARNING: step {step} is skipped, its {said}")

    def check_values(self, step: int) -> None:
        """Raise a `TrainingError` where a trained weight or the optimizer's state is not finite
        after `step`, so that it is not saved. Collective; reads this rank's bytes of them once.
        """
        bad = [] if self.state is None else _not_finite(self.state)
        if not any(ranks.any_over_ranks([bool(bad)])):
            return
        said = ranks.gather(bad[:3])
        named = "; ".join(f"rank {r}: {', '.join(b)}" for r, b in enumerate(said) if b)
        raise ranks.mark_collective(
            TrainingError(
                f"after step {step} values are NaN or infinite ({named}); they are not saved. The "
                "newest checkpoint is from before; lower optim.learning_rate before going on from "
                "it"
            )
        )

    def _describe(self, step: int, here: bool, spike: str) -> str:
        """Return what was wrong, where, with which samples. Collective."""
        told = ranks.gather((here, list(self.samples(step)) if self.samples else []))
        losses = [rank for rank, (bad, _) in enumerate(told) if bad]
        what = f"loss on rank {', '.join(map(str, losses))}" if losses else "gradient"
        names = [name for rank in losses or range(len(told)) for name in told[rank][1]]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        samples = f"; samples: {', '.join(names[:_NAMED])}{more}" if names else ""
        return (spike or f"{what} is NaN or infinite") + samples

    def _stop(self, step: int, said: str) -> None:
        row = f"{self._streak} step(s) in a row, up to {step}," if self.most else f"step {step}"
        raise ranks.mark_collective(
            TrainingError(
                f"{row} had no finite loss and gradient, or a spike (train.max_bad_steps: "
                f"{self.most}); the last: {said}. Nothing was changed by them, and nothing was "
                "saved since. Lower optim.learning_rate, raise optim.warmup_steps, or look at "
                "these samples"
            )
        )


@torch.no_grad()
def _not_finite(state: TrainState) -> list[str]:
    """Return the names of this rank's tensors with a value that is NaN or infinite."""
    trained = state.trained()
    found: dict[str, torch.Tensor] = dict(trained)
    for name, parameter in trained.items():
        values = state.required_optimizer.state.get(parameter, {})
        found |= {f"{key} of {name}": v for key, v in values.items() if torch.is_tensor(v)}
    local = {name: local_tensor(t) for name, t in found.items() if t.is_floating_point()}
    local = {name: t for name, t in local.items() if t.numel()}
    # The largest of the absolute values is NaN where one is.
    largest = [torch.linalg.vector_norm(t, torch.inf).float() for t in local.values()]
    if not largest:
        return []
    together = torch.stack([t.to(largest[0].device) for t in largest])  # one wait
    return [n for n, fine in zip(local, together.isfinite().tolist(), strict=True) if not fine]


class Spikes:
    """The loss and gradient norm of the last `window` finite steps, and what is far above them.

    Args:
        deviations: above the median that are a spike.
        device: on which losses and norms are.
        kept: the window of a checkpoint, as `state_dict` returned it; empty: none.
    """

    def __init__(
        self,
        deviations: float,
        device: torch.device,
        kept: dict[str, Any],
        *,
        window: int = _WINDOW,
    ) -> None:
        self._deviations = deviations
        rows = [kept.get(name, [])[-window:] for name in ("loss", "grad_norm")]
        values = [[float("nan")] * (window - len(row)) + row for row in rows]
        self._values = torch.tensor(values, dtype=torch.float32).to(device)  # oldest first
        self._least = torch.tensor(_LEAST, device=device)

    @torch.no_grad()
    def found(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step of this loss and norm is a spike, 0-d bool; take both into the
        window, where they are finite. Does not wait.
        """
        now = torch.stack([loss, grad_norm]).float()[:, None]
        middle = self._middle(self._values)
        deviation = _NORMAL * self._middle((self._values - middle).abs())
        limit = middle + self._deviations * deviation.maximum(self._least * middle.abs())
        # Above NaN is nothing: the window is not full then.
        above = (now > limit).any() & self._values.isfinite().all()
        finite = now.isfinite().all()
        self._values = torch.where(finite, torch.cat([self._values[:, 1:], now], 1), self._values)
        return above & finite

    @staticmethod
    def _middle(values: torch.Tensor) -> torch.Tensor:
        # By sorting: torch's median on CUDA is refused under train.deterministic.
        return values.sort(dim=1).values[:, values.shape[1] // 2, None]

    def state_dict(self) -> dict[str, Any]:
        """Return the window as JSON values, which hold a float32 exactly. Waits for the device."""
        rows = [row[row.isfinite()].tolist() for row in self._values.cpu()]
        return {"loss": rows[0], "grad_norm": rows[1]}
