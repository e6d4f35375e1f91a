"""Profiles of some steps, and of GPU memory until they end: `train.profile_steps`.

[Note: parts of a step] `time_parts` computes from the Chrome trace of torch.profiler where the time
of the profiled steps went. Each instant has exactly one part, so that the parts add up to the time
of the steps. In order of precedence: computing on the device, counted for the phase in which the
host launched the work; communication; the host's waits for data and its pauses; and `idle`. On a
CPU the operations (`aten::...`) of the training thread take the place of kernels, so idle is
Python's time between operations.
"""

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, profile

from toolkit import ranks
from toolkit.data.feed.feed import READING as DATA
from toolkit.errors import TrainingError
from toolkit.tables import format_table

FORWARD, BACKWARD, OPTIMIZER, PAUSE = "forward", "backward", "optimizer", "pause"
COMMUNICATION, OTHER, IDLE, HIDDEN = "communication", "other", "idle", "communication_hidden"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, PAUSE)  # names of ranges in the training thread
PARTS = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, PAUSE, OTHER, IDLE)
_STEP = "ProfilerStep#"  # prefix of the range in which the profiler wraps each step
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# Namespaces of host operations that only call other operations, which are in the trace too.
_WRAPPERS = ("autograd", "c10d", "_c10d_functional", "profiler")
_COLLECTIVES = ("c10d", "_c10d_functional")
FOLDER = "profile"
_MAX_ENTRIES = 100_000  # allocations and frees in a memory snapshot
# Private functions of torch.cuda.memory that PyTorch documents.
_PRIVATE = ("_record_memory_history", "_dump_snapshot")

Event = dict[str, Any]
Span = tuple[float, float]


@dataclass
class StepProfiler:
    """Traces the steps `first` to `last` of a run with torch.profiler, after one warm-up step.

    On CUDA, it also records allocations from the warm-up step on.
    """

    folder: Path
    """Folder of the traces, one per rank such as `rank-0.json.gz`, and of `summary.json`."""
    device: torch.device
    first: int
    last: int
    done_steps: int
    """Number of steps that are done. If `first` is among them, the next step is the first."""

    def __post_init__(self) -> None:
        self.first = max(self.first, self.done_steps + 1)
        self.is_open = True
        self._profile = profile(schedule=self._choose_action, acc_events=True)
        self._profile.start()
        # Lets the profiler number the steps as the run does.
        self._profile.step_num = self.done_steps
        self._profile.step()
        self._record_memory(self.done_steps)

    def _record_memory(self, done_steps: int) -> None:
        """Start to record allocations on CUDA if the next step is the warm-up step.

        If there is no warm-up step, this happens before the first step. It does not happen earlier,
        because each record includes the Python stack.

        Args:
            done_steps: number of steps that are done.
        """
        if self.device.type == "cuda" and done_steps == max(self.first - 2, self.done_steps):
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)

    def _choose_action(self, step: int) -> ProfilerAction:
        """Return torch.profiler's action in `step`: none, warm up, record, or record and save."""
        if self.first <= step <= self.last:
            is_last = step == self.last
            return ProfilerAction.RECORD_AND_SAVE if is_last else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.first - 1 else ProfilerAction.NONE

    def is_active(self, step: int) -> bool:
        """Return True if the profiler warms up or traces in `step`, which makes the step slower.

        Call it at the end of `step`. If the profiler starts to warm up, starts to trace or stops
        after this step, the call waits for the device. So work is recorded in the step it belongs
        to.
        """
        if step in (self.first - 2, self.first - 1, self.last) and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.first - 1 <= step <= self.last

    def end_step(self, step: int) -> bool:
        """Tell the profiler that `step` has ended; return True if it was the last one to trace."""
        if self.is_open:
            self._profile.step()
            self._record_memory(step)
        self.is_open = step < self.last
        return step == self.last

    def write(self) -> list[str]:
        """Write the traces and `summary.json` after the last traced step. Collective.

        Takes some seconds to write and read each trace.

        Returns:
            Log lines: a table of the parts of a step, and the folder.
        """
        parts, has_device = zip(*ranks.gather_results(self._write_trace), strict=True)
        mean = {name: sum(seconds[name] for seconds in parts) / len(parts) for name in parts[0]}
        summary = {"steps": [self.first, self.last], "seconds_per_step": mean, "ranks": parts}
        text = json.dumps(summary, indent=1)
        ranks.on_main(lambda: (self.folder / "summary.json").write_text(text, "utf-8"))
        lines = [
            f"profile    steps {self.first} to {self.last}, milliseconds of a step",
            *format_part_table(parts),
            f"traces     {self.folder} (open them in ui.perfetto.dev or chrome://tracing)",
        ]
        if self.device.type != "cpu" and not all(has_device):
            lines.append(
                "WARNING: a trace has no kernels, so the times are those of the host: the driver "
                "does not let this process profile the device"
            )
        return lines

    def _write_trace(self) -> tuple[dict[str, float], bool]:
        """Write this rank's trace to `rank-N.json.gz`, and measure the parts of a step.

        Returns:
            A dict of name of a part -> seconds per step; and True if the trace has device kernels.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"rank-{ranks.rank()}.json.gz"
        self._profile.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as f:
            events = json.load(f)["traceEvents"]
        steps = self.last - self.first + 1
        return {k: s / steps for k, s in measure_parts(events).items()}, has_kernels(events)

    def close(self) -> None:
        """Stop the profiler if the run ends before the last step to trace was done."""
        if self.is_open:
            self._profile.stop()
        self.is_open = False


def format_part_table(parts: Sequence[dict[str, float]]) -> list[str]:
    """Format the time of each part of a step in ms: mean, share, minimum and maximum over ranks.

    Parts that took no time on any rank are omitted.

    Args:
        parts: one dict per rank: name of a part -> seconds per step.
    """
    step_seconds = sum(seconds[name] for seconds in parts for name in PARTS) / len(parts)
    rows = [["part", "mean", "share", "least", "rank", "most", "rank"]]
    for name in (*PARTS, HIDDEN):
        values = [seconds[name] for seconds in parts]
        mean = sum(values) / len(values)
        if max(values) == 0.0:
            continue
        title = {HIDDEN: "communication, hidden"}.get(name, name)
        share = "" if name == HIDDEN else f"{mean / step_seconds:.1%}"
        row = [title, f"{mean * 1e3:,.1f}", share]
        for value in (min(values), max(values)):
            row += [f"{value * 1e3:,.1f}", str(values.index(value))]
        rows.append(row)
    # Hidden communication, if there is any, comes after the sum, because it is not part of it.
    has_hidden = rows[-1][2] == ""
    total = ["step", f"{step_seconds * 1e3:,.1f}", *[""] * 5]
    rows.insert(-1 if has_hidden else len(rows), total)
    return format_table(rows, right={1, 2, 3, 4, 5, 6})


@contextmanager
def record_memory_history(file: Path) -> Iterator[None]:
    """If CUDA runs out of memory within the block, write the recorded allocations to `file`.

    `StepProfiler` starts the recording; it ends with the block.

    Raises:
        TrainingError: this torch lacks the private functions for it.
    """
    missing = [name for name in _PRIVATE if not hasattr(torch.cuda.memory, name)]
    if missing:
        raise TrainingError(
            f"train.profile_steps: torch {torch.__version__} has no "
            f"torch.cuda.memory.{missing[0]}; remove the setting"
        )
    try:
        yield
    except torch.OutOfMemoryError:
        write_snapshot(file)
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(file: Path) -> None:
    """Write the recorded allocations to `file` for pytorch.org/memory_viz, and stop recording.

    Also prints a line with the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
    ranks.print_line(f"memory     {file} (pytorch.org/memory_viz)")


def measure_parts(events: list[Event]) -> dict[str, float]:
    """Measure how long each part of the profiled steps took; see [Note: parts of a step].

    Args:
        events: the `traceEvents` of one process. On a GPU, the device must be idle when they begin
            and end.

    Returns:
        Name of a part -> seconds over all profiled steps. The parts are `PARTS`, which add up to
        the time of the steps, and `HIDDEN`: communication while the device computes.
    """
    events = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith(_STEP) and e["cat"] == "user_annotation"]
    thread = steps[0]["tid"]
    window = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in events
        if e["cat"] == "user_annotation" and e["name"] in PHASES and e["tid"] == thread
    )
    work: dict[str, list[Span]] = defaultdict(list)
    for event, launch_time in _iterate_work(events, thread):
        span = event["ts"], event["ts"] + event["dur"]
        part = COMMUNICATION if _is_communication(event) else _find_phase(ranges, launch_time)
        work[part].append(span)
    for begin, end, name in ranges:
        if name in (DATA, PAUSE):
            work[f"{name} of the host"].append((begin, end))
    computing = [*PHASES, OTHER]
    order = [*computing, COMMUNICATION, f"{DATA} of the host", f"{PAUSE} of the host"]
    durations = dict.fromkeys(PARTS, 0.0)
    covered = list[Span]()
    covered_length = 0.0
    # In order of precedence: each part gets only the time that earlier parts do not cover.
    for name in order:
        covered = _merge_spans([*covered, *_clip_spans(work[name], window)])
        durations[name.removesuffix(" of the host")] += _sum_span_lengths(covered) - covered_length
        covered_length = _sum_span_lengths(covered)
    durations[IDLE] = window[1] - window[0] - covered_length
    communication = _sum_span_lengths(_merge_spans(_clip_spans(work[COMMUNICATION], window)))
    durations[HIDDEN] = communication - durations[COMMUNICATION]
    return {name: microseconds / 1e6 for name, microseconds in durations.items()}


def has_kernels(events: list[Event]) -> bool:
    """Return True if the trace contains kernels, copies or memsets of a device."""
    return any(event.get("cat") in _DEVICE_CATEGORIES for event in events)


def _iterate_work(events: list[Event], thread: Any) -> Iterable[tuple[Event, float]]:
    """Yield each event that computes or communicates, with the time when the host launched it.

    If the trace has no device kernels, the events are the host's operations and collectives, and
    the time is the begin of the event. Times are in µs.

    Args:
        events: the events of a trace.
        thread: id of the training thread.
    """
    if not has_kernels(events):
        for event in events:
            namespace, colons, _ = event["name"].partition("::")
            is_operation = event["cat"] == "cpu_op" and event["tid"] == thread and colons
            if (is_operation and namespace not in _WRAPPERS) or _is_communication(event):
                yield event, event["ts"]
        return
    launches: dict[Any, float] = {}
    for event in events:
        if event["cat"] not in _DEVICE_CATEGORIES and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
    for event in events:
        if event["cat"] in _DEVICE_CATEGORIES:
            number = event["args"].get("correlation")
            yield event, launches[number] if number in launches else event["ts"]


def _is_communication(event: Event) -> bool:
    """Return True if an event is a kernel of NCCL or, on the host, a collective."""
    name = event["name"]
    if event["cat"] in _DEVICE_CATEGORIES:
        return "nccl" in name.lower()
    if event["cat"] == "cpu_op":
        return name.partition("::")[0] in _COLLECTIVES
    return event["cat"] == "user_annotation" and name.startswith("gloo:")


def _find_phase(ranges: list[tuple[float, float, str]], time: float) -> str:
    """Return the name of the range [begin, end) that contains `time`, or `OTHER`.

    Args:
        ranges: (begin, end, name) in µs, sorted and without overlap.
        time: the time in µs.
    """
    i = bisect.bisect(ranges, time, key=lambda bounds: bounds[0]) - 1
    return ranges[i][2] if i >= 0 and time < ranges[i][1] else OTHER


def _clip_spans(spans: list[Span], window: Span) -> list[Span]:
    """Cut (begin, end) spans to the span `window`, and drop those that become empty."""
    clipped = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [(begin, end) for begin, end in clipped if begin < end]


def _merge_spans(spans: list[Span]) -> list[Span]:
    """Merge (begin, end) spans that overlap or touch, and return them sorted."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _sum_span_lengths(spans: list[Span]) -> float:
    """Sum the lengths of (begin, end) spans."""
    return sum(end - begin for begin, end in spans)
