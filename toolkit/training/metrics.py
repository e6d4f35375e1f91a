"""Metrics of a run: `metrics.jsonl`, log lines, the progress bar and evaluation metrics."""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function
from tqdm import tqdm

from toolkit import ranks
from toolkit.config.measures import PERPLEXITY, TOKEN_METRICS, shown_metrics
from toolkit.errors import TrainingError
from toolkit.formats.container_memory import peak_host_memory
from toolkit.formats.metrics_file import METRICS, append_lines, drop_lines_after
from toolkit.sharding.fsdp import Sharded
from toolkit.tables import size_text
from toolkit.training.flops import find_peak_flops
from toolkit.training.guards import preemption, watchdog
from toolkit.training.guards.run_guards import Guards
from toolkit.training.loss import EvaluatedLoss
from toolkit.training.profiler import PAUSE, StepProfiler, write_snapshot
from toolkit.training.router import Router
from toolkit.training.step import EvalSets, Loss, StepStats, evaluate
from toolkit.training.trackers import Trackers


@dataclasses.dataclass
class Metrics:
    """Collects the statistics of each step, and logs them every `logging_steps` steps.

    Every rank calls it; rank 0 writes to `metrics.jsonl`, the terminal and the trackers. The
    tensors of a step are read only when a line is logged, so the host does not wait for the device
    in between.
    """

    run_dir: Path
    _: dataclasses.KW_ONLY
    device: torch.device
    first_step: int
    """Steps that earlier starts of this run have done. Lines of later steps are dropped."""
    max_steps: int
    tokens_before: int
    """Supervised tokens of the first `first_step` steps."""
    tokens_per_step: int
    """Non-padding tokens of the global batch, for rates."""
    flops_per_token: float
    """FLOPs of forward and backward per token; see `flops.flops_per_token`."""
    logging_steps: int
    epochs_per_step: float | None = None
    """Share of an epoch that one step reads; None if the size of the data is unknown."""
    trackers: Trackers | None = None
    """Receive every log line."""
    profiler: StepProfiler | None = None
    """Profiles some of the steps. The times of these steps are excluded from rates."""
    snapshot: Path | None = None
    """File for the history of GPU memory, written when the profiler has finished."""
    guards: Guards = dataclasses.field(default_factory=Guards)
    """Checks of the numbers. The default ends the run at the first skipped step."""
    router: Router | None = None
    """Balances the experts of a mixture; pass it to each `Update`."""

    def __post_init__(self) -> None:
        self._file = self.run_dir / METRICS
        self._is_main = ranks.rank() == 0
        # (loss, terms, tokens) of steps whose tensors have not been read yet.
        self._pending = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        self._tokens = self.tokens_before
        # Sum of the losses and number of their terms since the last log line.
        self._loss_sum = 0.0
        self._loss_terms = 0.0
        # Metric -> (sums, counts) on the device since the last log line.
        self._parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._start_time = time.perf_counter()
        self._last_step_time = self._start_time
        # Seconds of pauses since the last step.
        self._paused_seconds = 0.0
        # Seconds and number of unprofiled steps since the last log line.
        self._seconds = 0.0
        self._steps = 0
        # The first logged step and the time at which it ended.
        self._first_logged: tuple[int, float] | None = None
        self._first_loss: float | None = None
        self._last_line: dict[str, Any] = {}
        # Lines that the disk refused.
        self._unwritten: list[dict[str, Any]] = []
        if self._is_main:
            drop_lines_after(self._file, self.first_step)
        self._bar = tqdm(
            total=self.max_steps,
            initial=self.first_step,
            dynamic_ncols=True,
            # With None, tqdm shows the bar only in a terminal.
            disable=not self._is_main
            or os.environ.get("TQDM_DISABLE", "") not in ("", "0")
            or None,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
        )

    def step(
        self, step: int, stats: StepStats, learning_rate: float, **extra_metrics: float
    ) -> None:
        """Record the statistics of one step, and log a line if this step is a logging step.

        Also tells the watchdog that the next step begins, and advances the profiler. Waits for the
        device only if a line is logged. Collective.

        Args:
            step: number of the step, counting from 1.
            stats: result of `Update.step`.
            learning_rate: the learning rate that this step used.
            extra_metrics: further values of the line, such as those of an evaluation. If there are
                any, the step is logged.

        Raises:
            TrainingError: the loop did not pass `router` to `Update` although experts are balanced.
                Or a guard failed: too many steps were skipped, or a rank's state changed between
                steps.
        """
        terms = stats.tokens if stats.terms is None else stats.terms
        terms = torch.where(stats.skipped, 0, terms)
        self._pending.append((stats.loss.masked_fill(stats.skipped, 0), terms, stats.tokens))
        for name, pair in stats.part_sums.items():
            sums, counts = (x.double().masked_fill(stats.skipped, 0) for x in pair)
            if name in self._parts:
                sums, counts = sums + self._parts[name][0], counts + self._parts[name][1]
            self._parts[name] = sums, counts
        if stats.balance is None and self.router is not None and self.router.changes_training:
            raise TrainingError(
                "the experts of this step were not balanced as the settings ask: this recipe must "
                "pass metrics.router to training.Update(..., router=metrics.router)"
            )
        self.guards.record(step, stats)
        watchdog.set_activity(f"step {step + 1}")
        is_profiled = self.profiler is not None and self.profiler.is_active(step)
        is_logged = bool(extra_metrics) or self._is_logging_step(step)
        if self.router is not None:
            self.router.is_next_step_logged = self._is_logging_step(step + 1)
        if is_logged and (skipped := self.guards.bad_steps.take_skipped_count()):
            extra_metrics["skipped"] = skipped
        now = time.perf_counter()
        if not is_profiled:
            self._seconds += now - self._last_step_time - self._paused_seconds
            self._steps += 1
        self._last_step_time = now
        self._paused_seconds = 0.0
        if is_logged:
            self._log(step, stats, learning_rate, extra_metrics)
        self._bar.update(1)
        if self.profiler is not None and self.profiler.end_step(step):
            with watchdog.extend_timeout("writing the profile"):
                ranks.log_once(*self.profiler.write())
                if self.snapshot is not None:
                    write_snapshot(self.snapshot)
            self._last_step_time = time.perf_counter()

    def _is_logging_step(self, step: int) -> bool:
        """Return True if `step` is to be logged.

        That is the case for multiples of `logging_steps`, the first step of this start, and the
        last step of the run.
        """
        return step % self.logging_steps == 0 or step in (self.first_step + 1, self.max_steps)

    def _log(
        self, step: int, stats: StepStats, learning_rate: float, extra_metrics: dict[str, float]
    ) -> None:
        """Compute the log line of a step. Rank 0 writes, prints and tracks it. Collective."""
        line = self._compose_line(step, stats, learning_rate) | extra_metrics
        self._first_loss = line["loss"] if self._first_loss is None else self._first_loss
        self._last_line |= line
        if self._is_main:
            self._unwritten.append(line)
            self._append_unwritten()
            self._print(line)
            if self.trackers is not None:
                self.trackers.log(line)

    def _append_unwritten(self) -> None:
        """Append the waiting lines to `metrics.jsonl`; if the disk fails, warn and keep them.

        Only the first failure is reported.
        """
        count = len(self._unwritten)
        try:
            append_lines(self._file, self._unwritten)
        except OSError as error:
            if count == 1:
                ranks.print_line(
                    f"WARNING: {self._file} cannot be written: {error.strerror}; its lines wait in "
                    "memory"
                )
            return
        self._unwritten.clear()
        if count > 1:
            ranks.print_line(
                f"note: {self._file} can be written again; {count} waiting lines were appended"
            )

    def check_finite(self, step: int) -> None:
        """Raise a `TrainingError` if the state after `step` must not be saved.

        That is the case if too many steps were skipped, if a value is NaN or infinite, or if the
        state changed outside of the optimizer's step. Collective; see `Guards.check_before_save`.
        """
        self.guards.check_before_save(step)

    @property
    def tokens(self) -> int:
        """Number of supervised tokens of the run so far, including earlier starts.

        Reading it waits for the device.
        """
        if self._pending:
            loss, terms, tokens = (
                torch.stack(values).double() for values in zip(*self._pending, strict=True)
            )
            self._loss_sum += float(loss @ terms)
            self._loss_terms += float(terms.sum())
            self._tokens += int(tokens.sum())
            self._pending.clear()
        return self._tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block (evaluation, saving) from the rates.

        Waits for the device before the block. The watchdog's timeout is longer within it.
        """
        if self.device.type != "cpu":
            # Steps that the device still computes are not part of the pause.
            torch.accelerator.synchronize(self.device)
        start = time.perf_counter()
        try:
            with record_function(PAUSE), watchdog.extend_timeout("evaluation, save or export"):
                yield
        finally:
            self._paused_seconds += time.perf_counter() - start

    def close_bar(self) -> None:
        """Close the progress bar and the profiler, if they are still open."""
        self._bar.close()
        if self.profiler is not None:
            self.profiler.close()

    def close(self) -> str:
        """Close bar and profiler, write the waiting lines, and return a summary of the steps.

        Returns:
            A log line with steps, seconds and losses; empty if no step was logged.
        """
        if self.profiler is not None and self.profiler.is_open:
            ranks.log_once("WARNING: the run ended before train.profile_steps: there is no profile")
        self.close_bar()
        if self._unwritten:
            self._append_unwritten()
        if self._unwritten:
            count = len(self._unwritten)
            ranks.print_line(
                f"WARNING: the last {count} line(s) of {self._file} were never written"
            )
        last, seconds = self._last_line, time.perf_counter() - self._start_time
        if not last:
            return ""
        evaluation = f", {_format_evaluation(last)}" if "eval_loss" in last else ""
        if "eval_perplexity" in last:
            evaluation = f", eval perplexity {last['eval_perplexity']:.1f}"
        return (
            f"\ndone: step {self.first_step + 1} to {last['step']} in {seconds:.0f} s, "
            f"loss {self._first_loss:.4f} -> {last['loss']:.4f}{evaluation}"
        )

    def _compose_line(self, step: int, stats: StepStats, learning_rate: float) -> dict[str, Any]:
        """Compute the values of a log line, and reset the sums since the last line.

        Waits for the device. Collective; raises the errors of `Guards.compute_metrics`.
        """
        line: dict[str, Any] = {
            "step": step,
            "loss": float(stats.loss),
            "grad_norm": float(stats.grad_norm),
            **self._take_part_means(),
            "learning_rate": learning_rate,
            "tokens": self.tokens,
            "time": time.time(),
        }
        # The mean over the unskipped steps since the last line. Reading `tokens` has added them up.
        if self._loss_terms:
            line["mean_loss"] = self._loss_sum / self._loss_terms
        self._loss_sum = self._loss_terms = 0.0
        if self.epochs_per_step is not None:
            line["epoch"] = step * self.epochs_per_step
        on_gpu = self.device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_host_memory()
        if self._steps:
            step_time = max(1e-9, self._seconds) / self._steps
            rate = self.tokens_per_step / step_time
            line |= {"tokens_per_second": rate, "step_time": step_time}
            if on_gpu and (peak := find_peak_flops(torch.cuda.get_device_name(self.device))):
                line["mfu"] = rate * self.flops_per_token / (peak * ranks.world_size())
        if stats.balance is not None:
            line |= stats.balance.metrics()
        line |= self.guards.compute_metrics(step, max(1, self._steps))
        self._seconds, self._steps = 0.0, 0
        return line | {"memory_peak_bytes": peak_bytes}

    def _take_part_means(self) -> dict[str, float]:
        """Return the mean of each metric of the loss since the last line, and reset the sums.

        Skipped steps do not count, and metrics without a term are omitted. Waits for the device.
        """
        pairs, self._parts = self._parts, {}
        if not pairs:
            return {}
        means = [
            torch.stack([(sums / counts).sum(), counts.min()]) for sums, counts in pairs.values()
        ]
        values = torch.stack(means).tolist()
        return {n: mean for n, (mean, count) in zip(pairs, values, strict=True) if count}

    def _print(self, line: dict[str, Any]) -> None:
        """Print a log line above the progress bar, and show its main values in the bar.

        On a narrow terminal, less important values are omitted.
        """
        step, now = line["step"], time.perf_counter()
        loss = f"loss {line['loss']:.4f}"
        loss_and_mean = loss
        if self.logging_steps > 1 and "mean_loss" in line:
            loss_and_mean += f" (mean {line['mean_loss']:.4f})"
        rate = line.get("tokens_per_second")
        speed = "profiled" if rate is None else f"{rate:,.0f} tok/s"
        speed += f"  mfu {line['mfu']:.1%}" if "mfu" in line else ""
        memory = size_text(line["memory_peak_bytes"])
        head = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        values = "".join(f"  {text}" for text in _format_metrics(line, ""))
        if "eval_loss" in line:
            values += f"  {_format_evaluation(line)}"
        values += f"  grad_norm {line['grad_norm']:.3f}  lr {line['learning_rate']:.2e}"
        # A narrow terminal shows as much as fits on one line; metrics.jsonl has everything.
        evaluation = f"  eval_loss {line['eval_loss']:.4f}" if "eval_loss" in line else ""
        candidates = (
            f"{head}  {loss_and_mean}  {speed}{values}  {memory}",
            f"{head}  {loss}  {speed}{values}",
            f"{head}  {loss}{values}",
            f"{head}  {loss}  {speed}{evaluation}",
            f"{head}  {loss}{evaluation}",
        )
        shows_eta = self._first_logged is not None and self._bar.disable is True
        eta_width = len("  eta 00:00:00") * shows_eta
        fitting = (text for text in candidates if ranks.fits_terminal(text + " " * eta_width))
        text = next(fitting, candidates[-1])
        if self._first_logged is None:
            # The first step compiles, so its time does not predict that of the others.
            self._first_logged = step, now
        elif self._bar.disable:
            first_step, first_time = self._first_logged
            seconds = (self.max_steps - step) * (now - first_time) / (step - first_step)
            text += f"  eta {tqdm.format_interval(seconds)}"
        ranks.print_line(text)
        self._bar.set_postfix_str(f"{loss}  {speed}  {memory}")


def _format_evaluation(line: dict[str, Any]) -> str:
    """Format the evaluation loss of a log line, with the other evaluation metrics in brackets."""
    metrics = _format_metrics(line, "eval_")
    return f"eval_loss {line['eval_loss']:.4f}" + (f" ({', '.join(metrics)})" if metrics else "")


def _format_metrics(line: dict[str, Any], prefix: str) -> list[str]:
    """Format the metrics that the log line has under `prefix` + name, as "NAME VALUE".

    The loss is not included.
    """
    return [
        f"{metric.name} {line[prefix + metric.name]:{metric.format_spec}}"
        for metric in shown_metrics()
        if prefix + metric.name in line
    ]


def evaluate_metrics(
    sharded: Sharded,
    sources: EvalSets,
    objective: EvaluatedLoss | Loss | None = None,
) -> dict[str, float]:
    """Evaluate the model, and return the metrics under their names in `metrics.jsonl`.

    Collective; waits for the device.

    Args:
        sharded: the sharded model.
        sources: name of an evaluation set -> its batches.
        objective: the objective of the run, or a loss function, for which no perplexity is
            computed. None: the cross entropy of tokens.

    Returns:
        `eval_loss`, `eval_perplexity` if the objective has it, and `eval_NAME` for each metric of
        the loss, such as `eval_accuracy`. With several evaluation sets, also `eval_SET_loss` and so
        on for each set. Empty if a signal interrupted the evaluation.
    """
    loss: Loss | None
    if isinstance(objective, EvaluatedLoss):
        loss, metrics = objective.evaluation_loss, tuple(objective.metrics)
    else:
        loss, metrics = objective, () if objective is not None else TOKEN_METRICS
    if preemption.is_stopping():
        return {}
    until_stop = {name: preemption.until_stop(batches) for name, batches in sources.items()}
    total, by_source = evaluate(sharded, until_stop, loss)
    if preemption.is_stopping():
        return {}
    stats = {"eval": total}
    if len(by_source) > 1:
        stats |= {f"eval_{name}": source_stats for name, source_stats in by_source.items()}
    values = {f"{prefix}_loss": float(s.loss) for prefix, s in stats.items()}
    if PERPLEXITY in metrics:
        # In double, since exp of a loss above 88 is infinite in float32 (in double: above 709).
        values |= {
            f"{prefix}_perplexity": float(s.loss.double().exp()) for prefix, s in stats.items()
        }
    # A metric without a term has no mean, such as the reward of a label that no row has.
    return values | {
        f"{prefix}_{part}": float(mean)
        for prefix, s in stats.items()
        for part, mean in s.parts.items()
        if int(s.part_counts[part])
    }
