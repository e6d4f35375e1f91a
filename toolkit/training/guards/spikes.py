"""Steps whose loss or gradient is far above those before: skipped by `train.skip_spikes`.

PaLM left out the batches around a spike (Chowdhery et al. 2022, section 5.1), OLMo-core's
`SkipStepOptimizer` leaves out the step. Here it is measured from the median, in median absolute
deviations x 1.4826: a spike does not lift the limit for the next one (docs/journal.md), and a
level that stays up becomes the normal one after half a window. A deviation is taken to be 1 % of
the median loss at least, and 10 % of the median norm. Before the window is full nothing is skipped.

Everything is decided on the device, from a loss and a norm that are the same on all ranks to the
bit; nobody waits. The window is part of a checkpoint.
"""

from typing import Any

import torch

SPIKES = "spikes"  # where `TrainState.extra` keeps the window
_NORMAL = 1.4826  # standard deviations of normal values in a median absolute deviation
_WINDOW = 128  # steps, about as many as a level takes to become the normal one
_LEAST = ((0.01,), (0.1,))  # of the median of losses, and of norms: the least deviation taken


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
