"""What `gpu.py` has found so far and what it owes: the cases, the file of results. Without torch.

The file has one JSON line a record, oldest first, and is kept in the repository: each line names
the case, the check, the figures, and the commit, day, card and versions of the call that found it.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
NEVER, FAILED, OLDER, CURRENT = range(4)
"""What a case is owed for, the first first."""


@dataclass(frozen=True)
class Case:
    """A case: what it does, how long that takes, and what it lets run beside it."""

    name: str
    fn: Callable[[Any], None]
    seconds: float  # that it is expected to take on a GPU
    needs: tuple[str, ...] = ()  # models whose weights it loads
    timed: bool = False  # nothing runs beside it
    host: bool = False  # uses no device: runs beside one that does and is not timed


def read_results(file: Path) -> list[Line]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def append(file: Path, line: Line) -> None:
    """Append a record at once, as one write: cases of two processes append to one file."""
    content = json.dumps(line, default=str) + "\n"
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, content.encode())
    finally:
        os.close(handle)


def settle(file: Path) -> None:
    """Drop what newer records replace: of each case its last run stays, and where that did not end
    well the last one that did.
    """
    results = read_results(file)
    kept = set()
    for case in {line["case"] for line in results}:
        found = runs(results, case)
        good = [run for run in found if not faults(run)]
        kept |= {id(line) for run in (found[-1], *good[-1:]) for line in run}
    lines = [line for line in results if id(line) in kept]
    used = {where(line) for line in lines if not line["case"].startswith("machine ")}
    used.add(where(results[-1]))
    lines = [line for line in lines if where(line) in used]
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    part.replace(file)


def where(line: Line) -> tuple[Any, Any]:
    return line.get("card"), line.get("commit")


def runs(results: Iterable[Line], case: str) -> list[list[Line]]:
    """Return the records of each run of a case, the last run last."""
    found: dict[str, list[Line]] = {}
    for line in results:
        if line["case"] == case:
            found.setdefault(str(line.get("date")), []).append(line)
    return list(found.values())


def faults(run: Sequence[Line]) -> list[Line]:
    """Return the records of a run that say it is not good; one that has no end was cut off."""
    bad = [r for r in run if r.get("ok") is False or r.get("status") not in (None, "ended")]
    ended = any("status" in r for r in run)
    return bad if bad or ended else [{**run[-1], "check": None, "status": "cut off"}]


def newest(results: Iterable[Line]) -> list[Line]:
    """Return the last record of each check, in the order in which the cases were first run."""
    found: dict[tuple[str, str], Line] = {}
    for line in results:
        if line.get("check") is not None:
            found[line["case"], line["check"]] = line
    return list(found.values())


def why_owed(results: Sequence[Line], case: str, commit: str) -> tuple[int, str, str]:
    """Return why a case is owed: NEVER, FAILED, OLDER or CURRENT, the day of the commit of its last
    run, and the reason in words.
    """
    found = runs(results, case)
    if not found:
        return NEVER, "", "never run"
    last = found[-1][-1]
    if bad := faults(found[-1]):
        return FAILED, str(last.get("committed", "")), reason(bad[0])
    kind = CURRENT if last.get("commit") == commit else OLDER
    return kind, str(last.get("committed", "")), f"last run: {last.get('commit')}"


def reason(line: Line) -> str:
    """Return why a record is not good."""
    if line.get("check"):
        return f"{line['check']}: failed"
    why = line.get("why") or (line.get("log") or "").rstrip().rpartition("\n")[2]
    return f"{line['status']}{': ' if why else ''}{why}"


def by_debt(cases: Sequence[Case], results: Sequence[Line], commit: str) -> list[Case]:
    """Return the cases that are owed, in their order: never run, failed, of the oldest commit. What
    has run well at this very commit is not among them.
    """
    why = {case.name: why_owed(results, case.name, commit)[:2] for case in cases}
    same_tree = not commit.endswith("+")  # which marks changes that are not committed
    owed = [case for case in cases if why[case.name][0] != CURRENT or not same_tree]
    return sorted(owed, key=lambda case: why[case.name])


def expected_seconds(case: Case, results: Sequence[Line], card: str) -> float:
    """Return how long a case took the last time on this card, else what it is expected to."""
    took = [
        line["seconds"]
        for line in results
        if line["case"] == case.name
        and line.get("status") == "ended"
        and line.get("card") == card
        and "seconds" in line
    ]
    return took[-1] if took else case.seconds
