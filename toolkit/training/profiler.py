"""Profiles of some steps, and of GPU memory until they end: `train.profile_steps`."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile

from toolkit import ranks
from toolkit.errors import TrainingError
from toolkit.tables import table
from toolkit.training.trace import HIDDEN, IDLE, PARTS, has_kernels, time_parts

FOLDER = "profile"
_ENTRIES = 100_000  # allocations and frees that a snapshot goes back


@dataclass
class StepProfiler:
    """Traces the steps `first` to `last` of a run, with one before them to warm the profiler up."""

    folder: Path  # for `rank-0.json.gz` and so on, one for each rank, and `summary.json`
    device: torch.device
    first: int
    last: int
    after: int  # steps that are done; a first step among them is too late, and the next is first

    def __post_init__(self) -> None:
        self.first = max(self.first, self.after + 1)
        self.open = True
        self._profile = profile(schedule=self._action, acc_events=True)
        self._profile.start()
        self._profile.step_num = self.after  # its numbers are the run's
        self._profile.step()
        self._record_memory(self.after)

    def _record_memory(self, done: int) -> None:
        """Record allocations of a CUDA device from the warm-up on: each costs its Python stack."""
        if self.device.type == "cuda" and done == max(self.first - 2, self.after):
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)

    def _action(self, step: int) -> ProfilerAction:
        if self.first <= step <= self.last:
            saved = step == self.last
            return ProfilerAction.RECORD_AND_SAVE if saved else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.first - 1 else ProfilerAction.NONE

    def slows(self, step: int) -> bool:
        """Whether the profiler runs in `step`. Waits for the device where that changes after it,
        and before the first traced step, so that a step's work lies in the step.
        """
        if step in (self.first - 2, self.first - 1, self.last) and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.first - 1 <= step <= self.last

    def end_step(self, step: int) -> bool:
        """End a step; return whether it was the last one to be profiled."""
        if self.open:
            self._profile.step()
            self._record_memory(step)
        self.open = step < self.last
        return step == self.last

    def write(self) -> list[str]:
        """Write traces and summary, after the last step; return the summary as lines. Collective.
        Costs the reading and writing of the traces, some seconds each.
        """
        parts, seen = zip(*ranks.gather_results(self._write_trace), strict=True)
        mean = {name: sum(one[name] for one in parts) / len(parts) for name in parts[0]}
        summary = {"steps": [self.first, self.last], "seconds_per_step": mean, "ranks": parts}
        text = json.dumps(summary, indent=1)
        ranks.on_main(lambda: (self.folder / "summary.json").write_text(text, "utf-8"))
        lines = [
            f"profile    steps {self.first} to {self.last}, milliseconds of a step",
            *part_table(parts),
            f"traces     {self.folder} (open them in ui.perfetto.dev or chrome://tracing)",
        ]
        if self.device.type != "cpu" and not all(seen):
            what = "a trace has no kernels, so that the times are the host's"
            lines.append(f"WARNING: {what}: the driver lets this process profile no device")
        return lines

    def _write_trace(self) -> tuple[dict[str, float], bool]:
        """Return the seconds that a step spent in each part, and whether a device was seen."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"rank-{ranks.rank()}.json.gz"
        self._profile.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as f:
            events = json.load(f)["traceEvents"]
        steps = self.last - self.first + 1
        return {k: s / steps for k, s in time_parts(events).items()}, has_kernels(events)

    def close(self) -> None:
        """End a profile that the run has not reached the end of."""
        if self.open:
            self._profile.stop()
        self.open = False


def part_table(parts: Sequence[dict[str, float]]) -> list[str]:
    """Return a table of the seconds that each rank spent in each part: mean, share, extremes."""
    whole = sum(one[name] for one in parts for name in PARTS) / len(parts)
    rows = [["part", "mean", "share", "least", "rank", "most", "rank"]]
    for name in (*PARTS, HIDDEN):
        values = [one[name] for one in parts]
        mean, least, most = sum(values) / len(values), min(values), max(values)
        if most == 0.0:
            continue
        shown = {HIDDEN: "communication, hidden", IDLE: "idle"}.get(name, name)
        row = [shown, f"{mean * 1e3:,.1f}", "" if name == HIDDEN else f"{mean / whole:.1%}"]
        for value in (least, most):
            row += [f"{value * 1e3:,.1f}", str(values.index(value))]
        rows.append(row)
    rows.insert(-1 if rows[-1][2] == "" else len(rows), ["step", f"{whole * 1e3:,.1f}", *[""] * 5])
    return table(rows, right={1, 2, 3, 4, 5, 6})


@contextmanager
def memory_history(file: Path) -> Iterator[None]:
    """Write the allocations that were recorded to `file` where the CUDA device runs out of memory;
    record none afterwards. TrainingError: this torch has no such functions.
    """
    missing = [name for name in _PRIVATE if not hasattr(torch.cuda.memory, name)]
    if missing:
        raise TrainingError(
            f"train.profile_steps: torch {torch.__version__} has no "
            f"torch.cuda.memory.{missing[0]}; leave the setting out"
        )
    try:
        yield
    except torch.OutOfMemoryError:
        write_snapshot(file)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(file: Path) -> None:
    """Write the allocations that were recorded, for pytorch.org/memory_viz; end it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
    ranks.print_line(f"memory     {file} (pytorch.org/memory_viz)")


_PRIVATE = ("_record_memory_history", "_dump_snapshot")  # documented by PyTorch nevertheless
