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
from toolkit.tables import table

FORWARD, BACKWARD, OPTIMIZER, PAUSE = "forward", "backward", "optimizer", "pause"
COMMUNICATION, OTHER, IDLE, HIDDEN = "communication", "other", "idle", "communication_hidden"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, PAUSE)  # ranges of the training thread
PARTS = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, PAUSE, OTHER, IDLE)
_STEP = "ProfilerStep#"  # the profiler's own range
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Operations of a host that compute nothing themselves: their parts that do are operations too.
_WRAPPERS = ("autograd", "c10d", "_c10d_functional", "profiler")
_COLLECTIVES = ("c10d", "_c10d_functional")
FOLDER = "profile"
_ENTRIES = 100_000  # allocations and frees that a snapshot goes back
_PRIVATE = ("_record_memory_history", "_dump_snapshot")  # documented by PyTorch nevertheless

Event = dict[str, Any]
Span = tuple[float, float]


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
            *format_part_table(parts),
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
        return {k: s / steps for k, s in measure_parts(events).items()}, has_kernels(events)

    def close(self) -> None:
        """End a profile that the run has not reached the end of."""
        if self.open:
            self._profile.stop()
        self.open = False


def format_part_table(parts: Sequence[dict[str, float]]) -> list[str]:
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
def record_memory_history(file: Path) -> Iterator[None]:
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


def measure_parts(events: list[Event]) -> dict[str, float]:
    """Return the seconds of each of `PARTS` over all profiled steps, and `HIDDEN`: communication
    beside which the device computes, which costs no time of its own.

    `events` are the `traceEvents` of one process. On a GPU they must begin and end with a device
    that has nothing left to do.
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
    for event, launched in _work(events, thread):
        span = event["ts"], event["ts"] + event["dur"]
        work[COMMUNICATION if _communicates(event) else _phase(ranges, launched)].append(span)
    for begin, end, name in ranges:
        if name in (DATA, PAUSE):
            work[f"{name} of the host"].append((begin, end))
    computing = [*PHASES, OTHER]
    order = [*computing, COMMUNICATION, f"{DATA} of the host", f"{PAUSE} of the host"]
    found, covered, before = dict.fromkeys(PARTS, 0.0), list[Span](), 0.0
    for name in order:  # what comes later gets what is left
        covered = _merged([*covered, *_within(work[name], window)])
        found[name.removesuffix(" of the host")] += _length(covered) - before
        before = _length(covered)
    found[IDLE] = window[1] - window[0] - before
    communicating = _length(_merged(_within(work[COMMUNICATION], window)))
    found[HIDDEN] = communicating - found[COMMUNICATION]
    return {name: microseconds / 1e6 for name, microseconds in found.items()}


def has_kernels(events: list[Event]) -> bool:
    """Whether the profiler saw a device."""
    return any(event.get("cat") in _DEVICE for event in events)


def _work(events: list[Event], thread: Any) -> Iterable[tuple[Event, float]]:
    """Give what computes or communicates, and when the host launched it."""
    if not has_kernels(events):
        for event in events:
            room, colons, _ = event["name"].partition("::")
            own = event["cat"] == "cpu_op" and event["tid"] == thread and colons
            if (own and room not in _WRAPPERS) or _communicates(event):
                yield event, event["ts"]
        return
    launches: dict[Any, float] = {}
    for event in events:
        if event["cat"] not in _DEVICE and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
    for event in events:
        if event["cat"] in _DEVICE:
            number = event["args"].get("correlation")
            yield event, launches[number] if number in launches else event["ts"]


def _communicates(event: Event) -> bool:
    """Whether it is a kernel of NCCL, or on a host a collective of gloo."""
    name = event["name"]
    if event["cat"] in _DEVICE:
        return "nccl" in name.lower()
    if event["cat"] == "cpu_op":
        return name.partition("::")[0] in _COLLECTIVES
    return event["cat"] == "user_annotation" and name.startswith("gloo:")


def _phase(ranges: list[tuple[float, float, str]], time: float) -> str:
    """Return the name of the range that holds `time`; they do not overlap."""
    i = bisect.bisect(ranges, time, key=lambda one: one[0]) - 1
    return ranges[i][2] if i >= 0 and time < ranges[i][1] else OTHER


def _within(spans: list[Span], window: Span) -> list[Span]:
    cut = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [(begin, end) for begin, end in cut if begin < end]


def _merged(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)
