"""What a run shows of itself: a progress bar or lines, `metrics.jsonl`, the final summary.

Owns tokens/s, MFU, memory and their files. Knows neither the loop nor trackers.

[Note: MFU] Model FLOPs utilisation after PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H T
operations a token for N parameters without the embedding lookup, L layers of width H and sequences
of T tokens, divided by the device's dense bf16 peak. Recomputation does not count as work.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from toolkit.errors import TrainingError

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
"""Answers to `train.eval_prompts`, a line each."""

# Dense bf16 tensor-core peaks of the vendors' data sheets, FLOP/s; longest name first.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}


@dataclass(frozen=True)
class Clock:
    """What one step processes, for rates."""

    tokens_per_step: int
    """Non-padding tokens of the global batch."""
    flops_per_token: float
    """Operations of forward and backward; see [Note: MFU]."""
    world_size: int


def flops_per_token(
    parameters: int,
    embedding: int,
    layers: int,
    width: int,
    sequence_length: int,
    *,
    frozen: int = 0,
) -> float:
    """Return the training FLOPs of one token; `embedding` are parameters that are only looked up.

    A `frozen` parameter costs two a token less: it gets no gradient of its own.
    """
    trained = 6.0 * (parameters - embedding) - 2.0 * max(0, frozen - embedding)
    return trained + 12.0 * layers * width * sequence_length


class Metrics:
    """Collects one run's steps and writes them on the main process; a no-op on the others.

    The tensors of a step are read only when a line is due, so that the device never waits in
    between.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        clock: Clock,
        is_main: bool,
        device: torch.device,
        first_step: int,
        max_steps: int,
        tokens: int,
        logging_steps: int,
        disable_tqdm: bool,
    ):
        self._file = run_dir / METRICS
        self._clock, self._main, self._device = clock, is_main, device
        self._first, self._last, self._every = first_step, max_steps, logging_steps
        self._tokens, self._pending = tokens, []  # type: int, list[torch.Tensor]
        self._bad: torch.Tensor | None = None
        self._paused = 0.0
        self._since, self._steps = time.perf_counter(), 0
        self._began, self._first_loss, self._last_line = time.perf_counter(), None, {}  # type: ignore[var-annotated]
        self._bar = None
        if is_main:
            keep_until(self._file, first_step)
            if not disable_tqdm and sys.stderr.isatty():
                self._bar = tqdm(
                    total=max_steps, initial=first_step, unit="step", dynamic_ncols=True
                )

    def due(self, step: int) -> bool:
        """Whether `step` (from 1) gets a line: every `logging_steps`, the first and the last."""
        return step % self._every == 0 or step in (self._first + 1, self._last)

    def step(self, step: int, stats: Any, learning_rate: float, **more: float) -> None:
        """Take the `StepStats` of `step`; write its line when it is due or `more` is given.

        Raises:
            TrainingError: a loss or gradient norm of any step so far is not finite.
        """
        self._pending.append(stats.tokens)
        bad = ~(torch.isfinite(stats.loss) & torch.isfinite(stats.grad_norm))
        self._bad = bad if self._bad is None else self._bad | bad
        self._steps += 1
        if self._bar is not None:
            self._bar.update(1)
        if not (self.due(step) or more):
            return
        self.check_finite(step)
        line = self._line(step, stats, learning_rate) | more
        self._first_loss = line["loss"] if self._first_loss is None else self._first_loss
        self._last_line |= line
        if self._main:
            with open(self._file, "a", encoding="utf-8") as f:
                f.write(json.dumps(line) + "\n")
            self._show(line)

    def check_finite(self, step: int) -> None:
        """Raise `TrainingError` when a step up to here was not finite: such weights are not
        saved.
        """
        if self._bad is not None and bool(self._bad):
            raise TrainingError(
                f"the loss or the gradient norm became NaN or infinite by step {step}; nothing was "
                "saved since. "
                "Lower optim.learning_rate, raise optim.warmup_steps, or look at the data of these "
                "steps; "
                "the last checkpoint is good"
            )

    @property
    def tokens(self) -> int:
        """Supervised tokens so far. Waits for the device."""
        if self._pending:
            self._tokens += int(torch.stack(self._pending).sum())
            self._pending.clear()
        return self._tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside (evaluation, saving) out of the rates."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # steps under way are not part of the pause
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begun

    def close(self) -> dict[str, Any]:
        """End the progress bar; return first_loss, the last line's values and seconds."""
        if self._bar is not None:
            self._bar.close()
        seconds = time.perf_counter() - self._began
        return {"first_loss": self._first_loss, "seconds": seconds, **self._last_line}

    def _line(self, step: int, stats: Any, learning_rate: float) -> dict[str, Any]:
        loss, norm, tokens = (
            float(stats.loss),
            float(stats.grad_norm),
            self.tokens,
        )  # waits for the device
        now = time.perf_counter()
        step_time = max(1e-9, now - self._since - self._paused) / self._steps
        self._since, self._paused, self._steps = now, 0.0, 0
        rate = self._clock.tokens_per_step / step_time
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "tokens": tokens,
            "tokens_per_second": rate,
            "step_time": step_time,
            "memory_peak_bytes": memory_peak(self._device),
        }
        peak = device_peak_flops(self._device)
        if peak is not None:
            line["mfu"] = rate * self._clock.flops_per_token / (peak * self._clock.world_size)
        return line

    def _show(self, line: dict[str, Any]) -> None:
        text = f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tok/s"
        if "eval_loss" in line:
            text += (
                f"  eval_loss {line['eval_loss']:.4f} (perplexity {line['eval_perplexity']:,.1f})"
            )
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            return
        left = (self._last - line["step"]) * line["step_time"]
        mfu = f"  mfu {line['mfu']:.1%}" if "mfu" in line else ""
        print(
            f"step {line['step']:>{len(str(self._last))}}/{self._last}  {text}  "
            f"grad_norm {line['grad_norm']:.3f}  lr {line['learning_rate']:.2e}{mfu}  eta "
            f"{_duration(left)}",
            flush=True,
        )


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def evaluation_metrics(evaluation: Any) -> dict[str, float]:
    """Return an `Evaluation` as a metrics line holds it: `eval_loss`, `eval_perplexity`, and where
    there are several sources `eval_NAME_loss` and `eval_NAME_perplexity` of each. Waits for the
    device.
    """
    named = {"eval": evaluation.total}
    if len(evaluation.sources) > 1:
        named |= {f"eval_{name}": one for name, one in evaluation.sources.items()}
    losses = {name: float(one.loss) for name, one in named.items()}
    return {f"{name}_loss": loss for name, loss in losses.items()} | {
        f"{name}_perplexity": perplexity(loss) for name, loss in losses.items()
    }


def memory_peak(device: torch.device) -> int:
    """Return the peak of this process in bytes: allocated on the accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def device_peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a known GPU in FLOP/s, None for others and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((_PEAKS[k] for k in sorted(_PEAKS, key=len, reverse=True) if k in name), None)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`; a last line cut off by a kill is left out."""
    return _read_lines(Path(run_dir) / METRICS)


def keep_until(file: Path, step: int) -> None:
    """Drop the lines after `step` of a file of JSON lines: the resumed run writes them again."""
    if not file.is_file():
        return
    kept = [line for line in _read_lines(file) if line["step"] <= step]
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
    os.replace(temporary, file)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for text in file.read_text("utf-8").splitlines() if file.is_file() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
