"""Where the time of profiled steps went, computed from the Chrome trace of torch.profiler.

Each instant of the steps has one part, so that the parts add up to the time of the steps: what the
device computes, in the phase in which the host launched it; else communication; else the host's
wait for data or its pauses; else nothing of that, which is `idle`. On a CPU the operations
(`aten::...`) of the training thread stand for kernels: idle is Python's time between them.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from toolkit.data.feed.feed import READING as DATA

FORWARD, BACKWARD, OPTIMIZER, PAUSE = "forward", "backward", "optimizer", "pause"
COMMUNICATION, OTHER, IDLE, HIDDEN = "communication", "other", "idle", "communication_hidden"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, PAUSE)  # ranges of the training thread
PARTS = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, PAUSE, OTHER, IDLE)
_STEP = "ProfilerStep#"  # the profiler's own range
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Operations of a host that compute nothing themselves: their parts that do are operations too.
_WRAPPERS = ("autograd", "c10d", "_c10d_functional", "profiler")
_COLLECTIVES = ("c10d", "_c10d_functional")

Event = dict[str, Any]
Span = tuple[float, float]


def time_parts(events: list[Event]) -> dict[str, float]:
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
