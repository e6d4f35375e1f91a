"""What a run shows of itself: first lines, loss, speed and memory, a progress bar, the summary.

Where and with what it was started is kept in `starts.jsonl`, a line for each start.
"""

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
from toolkit.formats.metrics_file import METRICS, append, keep_until
from toolkit.sharding.fsdp import Sharded
from toolkit.tables import size_text
from toolkit.training.flops import find_peak_flops
from toolkit.training.guards import preemption, watchdog
from toolkit.training.guards.run_guards import Guards
from toolkit.training.loss import EvaluatedLoss
from toolkit.training.profiler import PAUSE, StepProfiler, write_snapshot
from toolkit.training.router import Router
from toolkit.training.step import EvalSets, Loss, evaluate
from toolkit.training.trackers import Trackers


@dataclasses.dataclass
class Metrics:
    """Collects one run's steps and writes them on the main process. The tensors of a step are read
    only when a line is due, so that the device never waits in between.
    """

    run_dir: Path
    _: dataclasses.KW_ONLY
    device: torch.device
    first_step: int  # steps that an earlier start has done; what it logged after them is dropped
    max_steps: int
    tokens_before: int  # supervised tokens of those steps
    tokens_per_step: int  # non-padding tokens of the global batch, for rates
    flops_per_token: float  # of forward and backward; see `training_flops`
    logging_steps: int
    epochs_per_step: float | None = None  # share of the data that a step reads, where it is known
    trackers: Trackers | None = None  # are sent each line
    profiler: StepProfiler | None = None  # of some of the steps, whose times count for no rate
    snapshot: Path | None = None  # file of GPU memory that is written when that has
    guards: Guards = dataclasses.field(default_factory=Guards)
    """What watches the numbers; without, the first skipped step ends the run."""
    router: Router | None = None  # of a mixture of experts: each `Update` is given it

    def __post_init__(self) -> None:
        self._file, self._main = self.run_dir / METRICS, ranks.rank() == 0
        # Of steps whose tensors are not read yet; of those that are, since the last line.
        self._pending = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        self._tokens, self._loss, self._loss_terms = self.tokens_before, 0.0, 0.0
        # Metric -> sums and counts of the steps since the last line, on the device.
        self._parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._began = self._since = time.perf_counter()
        # Since the last step; seconds and number of steps since the last line.
        self._paused, self._seconds, self._steps = 0.0, 0.0, 0
        self._paced: tuple[int, float] | None = None  # the first logged step, and when it ended
        self._first_loss: float | None = None
        self._last_line: dict[str, Any] = {}
        self._unwritten: list[dict[str, Any]] = []  # lines that the disk refused
        if self._main:
            keep_until(self._file, self.first_step)
        self._bar = tqdm(
            total=self.max_steps,
            initial=self.first_step,
            dynamic_ncols=True,
            # None: shown in a terminal only.
            disable=not self._main or os.environ.get("TQDM_DISABLE", "") not in ("", "0") or None,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
        )

    def step(self, step: int, stats: Any, learning_rate: float, **more: float) -> None:
        """Take the `StepStats` of `step`; write a line where one is due, or there is `more`."""
        terms = stats.tokens if stats.terms is None else stats.terms
        counted = torch.where(stats.skipped, 0, terms)
        self._pending.append((stats.loss.masked_fill(stats.skipped, 0), counted, stats.tokens))
        for name, pair in stats.part_sums.items():
            sums, counts = (x.double().masked_fill(stats.skipped, 0) for x in pair)
            if name in self._parts:
                sums, counts = sums + self._parts[name][0], counts + self._parts[name][1]
            self._parts[name] = sums, counts
        if stats.balance is None and self.router is not None and self.router.acts:
            raise TrainingError(
                "the experts of this step were not balanced as the settings ask: this recipe must "
                "give metrics.router to training.Update(..., router=metrics.router)"
            )
        self.guards.take(step, stats)
        watchdog.set_activity(f"step {step + 1}")
        slowed = self.profiler is not None and self.profiler.slows(step)
        is_due = more or self._logs(step)
        if self.router is not None:
            self.router.logged = self._logs(step + 1)
        if is_due and (skipped := self.guards.bad_steps.count()):  # waits for the device
            more["skipped"] = skipped
        now = time.perf_counter()
        if not slowed:  # a step which rates are made of
            self._seconds += now - self._since - self._paused
            self._steps += 1
        self._since, self._paused = now, 0.0
        if is_due:
            self._write(step, stats, learning_rate, more)
        self._bar.update(1)
        if self.profiler is not None and self.profiler.end_step(step):
            with watchdog.extend_timeout("writing what was profiled"):
                ranks.log_once(*self.profiler.write())
                if self.snapshot is not None:
                    write_snapshot(self.snapshot)
            self._since = time.perf_counter()

    def _logs(self, step: int) -> bool:
        """Return whether `step` has a line of metrics, whatever is evaluated after it."""
        return step % self.logging_steps == 0 or step in (self.first_step + 1, self.max_steps)

    def _write(self, step: int, stats: Any, learning_rate: float, more: dict[str, float]) -> None:
        line = self._line(step, stats, learning_rate) | more
        self._first_loss = line["loss"] if self._first_loss is None else self._first_loss
        self._last_line |= line
        if self._main:
            self._unwritten.append(line)
            self._append()
            self._show(line)
            if self.trackers is not None:
                self.trackers.log(line)

    def _append(self) -> None:
        """Write the lines that are due; those that the disk refuses wait for the next one."""
        count = len(self._unwritten)
        try:
            append(self._file, self._unwritten)
        except OSError as error:
            if count == 1:
                ranks.print_line(
                    f"WARNING: {self._file} cannot be written: {error.strerror}; its lines wait in "
                    "memory"
                )
            return
        self._unwritten.clear()
        if count > 1:
            ranks.print_line(f"note: {self._file} is written again: {count} lines, which waited")

    def check_finite(self, step: int) -> None:
        """Raise a `TrainingError` where too many steps up to here were skipped, or what would be
        saved is not finite or not what it was left as. Collective; see `Guards.before_save`.
        """
        self.guards.before_save(step)

    @property
    def tokens(self) -> int:
        """Supervised tokens so far. Waits for the device."""
        if self._pending:
            loss, counted, tokens = (
                torch.stack(values).double() for values in zip(*self._pending, strict=True)
            )
            self._loss += float(loss @ counted)
            self._loss_terms += float(counted.sum())
            self._tokens += int(tokens.sum())
            self._pending.clear()
        return self._tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside (evaluation, saving) out of the rates."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # steps under way are not part of the pause
        begun = time.perf_counter()
        try:
            with record_function(PAUSE), watchdog.extend_timeout("evaluation, save or export"):
                yield
        finally:
            self._paused += time.perf_counter() - begun

    def close_bar(self) -> None:
        """End the progress bar and the profiler, where they have not ended yet."""
        self._bar.close()
        if self.profiler is not None:
            self.profiler.close()

    def close(self) -> str:
        """End the progress bar; return the line that sums up the steps, empty without a step."""
        if self.profiler is not None and self.profiler.open:
            ranks.log_once(
                "WARNING: the run ended before train.profile_steps did: there is no profile"
            )
        self.close_bar()
        if self._unwritten:
            self._append()
        if self._unwritten:
            lost = f"the last {len(self._unwritten)} line(s) of {self._file} were never written"
            ranks.print_line(f"WARNING: {lost}")
        last, seconds = self._last_line, time.perf_counter() - self._began
        if not last:
            return ""
        more = f", {_evaluated(last)}" if "eval_loss" in last else ""
        if "eval_perplexity" in last:
            more = f", eval perplexity {last['eval_perplexity']:.1f}"
        return (
            f"\ndone: step {self.first_step + 1} to {last['step']} in {seconds:.0f} s, "
            f"loss {self._first_loss:.4f} -> {last['loss']:.4f}{more}"
        )

    def _line(self, step: int, stats: Any, learning_rate: float) -> dict[str, Any]:
        line: dict[str, Any] = {  # waits for the device
            "step": step,
            "loss": float(stats.loss),
            "grad_norm": float(stats.grad_norm),
            **self._part_means(),
            "learning_rate": learning_rate,
            "tokens": self.tokens,
            "time": time.time(),
        }
        # Of the steps since the last line that were not skipped; the tokens above brought it here.
        if self._loss_terms:
            line["mean_loss"] = self._loss / self._loss_terms
        self._loss = self._loss_terms = 0.0
        if self.epochs_per_step is not None:
            line["epoch"] = step * self.epochs_per_step
        on_gpu = self.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_host_memory()
        if self._steps:
            step_time = max(1e-9, self._seconds) / self._steps
            rate = self.tokens_per_step / step_time
            line |= {"tokens_per_second": rate, "step_time": step_time}
            if on_gpu and (peak := find_peak_flops(torch.cuda.get_device_name(self.device))):
                line["mfu"] = rate * self.flops_per_token / (peak * ranks.world_size())
        if stats.balance is not None:
            line |= stats.balance.line()
        line |= self.guards.line(step, max(1, self._steps))
        self._seconds, self._steps = 0.0, 0
        return line | {"memory_peak_bytes": most}

    def _part_means(self) -> dict[str, float]:
        """Return the mean of each metric of the loss over the steps since the last line, without
        skipped steps; metrics without a term are omitted. Waits for the device.
        """
        pairs, self._parts = self._parts, {}
        if not pairs:
            return {}
        means = [
            torch.stack([(sums / counts).sum(), counts.min()]) for sums, counts in pairs.values()
        ]
        values = torch.stack(means).tolist()
        return {n: mean for n, (mean, count) in zip(pairs, values, strict=True) if count}

    def _show(self, line: dict[str, Any]) -> None:
        """Print a line above the progress bar, which shows what the line begins with."""
        step, loss, now = line["step"], f"loss {line['loss']:.4f}", time.perf_counter()
        shown = loss
        if self.logging_steps > 1 and "mean_loss" in line:
            shown += f" (mean {line['mean_loss']:.4f})"
        rate = line.get("tokens_per_second")
        speed = "profiled" if rate is None else f"{rate:,.0f} tok/s"
        speed += f"  mfu {line['mfu']:.1%}" if "mfu" in line else ""
        memory = size_text(line["memory_peak_bytes"])
        head = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}"
        text = "".join(f"  {said}" for said in _measures(line, ""))
        if "eval_loss" in line:
            text += f"  {_evaluated(line)}"
        text += f"  grad_norm {line['grad_norm']:.3f}  lr {line['learning_rate']:.2e}"
        whole = f"{head}  {shown}  {speed}{text}  {memory}"
        # A narrow terminal shows as much as fits on one line; metrics.jsonl has everything.
        evaluated = f"  eval_loss {line['eval_loss']:.4f}" if "eval_loss" in line else ""
        shorter = (
            f"{head}  {loss}  {speed}{text}",
            f"{head}  {loss}{text}",
            f"{head}  {loss}  {speed}{evaluated}",
            f"{head}  {loss}{evaluated}",
        )
        room = len("  eta 00:00:00") * (self._paced is not None and self._bar.disable is True)
        fitting = (some for some in (whole, *shorter) if ranks.fits_terminal(some + " " * room))
        text = next(fitting, shorter[-1])
        if self._paced is None:  # the first step compiles, and says nothing of those to come
            self._paced = step, now
        elif self._bar.disable:
            left = (self.max_steps - step) * (now - self._paced[1]) / (step - self._paced[0])
            text += f"  eta {tqdm.format_interval(left)}"
        ranks.print_line(text)
        self._bar.set_postfix_str(f"{loss}  {speed}  {memory}")


def _evaluated(line: dict[str, Any]) -> str:
    """Return what is shown of an evaluation: its loss, then what there is of other measures."""
    more = _measures(line, "eval_")
    return f"eval_loss {line['eval_loss']:.4f}" + (f" ({', '.join(more)})" if more else "")


def _measures(line: dict[str, Any], prefix: str) -> list[str]:
    """Return what a line has beside a loss, as it is shown."""
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
    """Evaluate, and return the metrics by the names that they have in a metrics line.

    Args:
        objective: the objective of the run, or a loss alone, which has no perplexity; None: the
            cross entropy of tokens.

    Returns:
        `eval_loss`, `eval_perplexity` and `eval_` before each part of the loss, such as
        `eval_accuracy`; with several sources also `eval_NAME_loss` and so on of each. Empty if a
        signal ended the evaluation. Collective; waits for the device.
    """
    loss: Loss | None
    if isinstance(objective, EvaluatedLoss):
        loss, metrics = objective.evaluation_loss, tuple(objective.metrics)
    else:
        loss, metrics = objective, () if objective is not None else TOKEN_METRICS
    if preemption.is_stopping():
        return {}
    until_stop = {name: preemption.until_stop(batches) for name, batches in sources.items()}
    total, found = evaluate(sharded, until_stop, loss)
    if preemption.is_stopping():
        return {}
    named = {"eval": total}
    if len(found) > 1:
        named |= {f"eval_{name}": one for name, one in found.items()}
    losses = {f"{name}_loss": float(one.loss) for name, one in named.items()}
    # In double, since a loss above 88 is infinite in float32; above 709 it is there too.
    exp = {
        f"{name}_perplexity": float(one.loss.double().exp())
        for name, one in named.items()
        if PERPLEXITY in metrics
    }
    # A metric without a term has no mean, as the reward of a label that no row has.
    return (
        losses
        | exp
        | {
            f"{name}_{part}": float(mean)
            for name, one in named.items()
            for part, mean in one.parts.items()
            if int(one.part_counts[part])
        }
    )
