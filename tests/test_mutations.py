"""Mutated files: of some hundred none makes a reader do worse than refuse; a bad reader shows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mutate
import pytest
from conftest import ROOT
from mutation_kinds import Kind
from mutations import Case, Scene, watch

pytestmark = pytest.mark.faults

FILE = Path("part/some.json")


def unguarded() -> int:
    content = json.loads(FILE.read_bytes())
    return sum(content["numbers"]) + len(content["name"])


def endless() -> None:
    if FILE.read_bytes() != CONTENT:
        while True:
            time.monotonic()


def asleep() -> None:
    if FILE.read_bytes() != CONTENT:
        time.sleep(1000)


def greedy() -> None:
    if FILE.read_bytes() != CONTENT:
        bytearray(os.urandom(2**20) * 300)


def insatiable() -> None:
    kept = []
    while FILE.read_bytes() != CONTENT:
        kept.append(os.urandom(2**20) * 20)


def crashing() -> None:
    if FILE.read_bytes() != CONTENT:
        os.kill(os.getpid(), signal.SIGKILL)


def mistaken() -> str:
    return FILE.read_text("utf-8", "replace")


CONTENT = json.dumps({"numbers": [1, 2, 3], "name": "a"}).encode()


def cases_of(reader, folder: Path, count: int, guarded: bool = False) -> list[Case]:
    (folder / "scene/part").mkdir(parents=True)
    (folder / "scene" / FILE).write_bytes(CONTENT)
    kind = Kind(str(FILE), (mutate.in_json,), (reader,), 1, guarded=guarded)
    scene = Scene(folder / "scene", 0, {"some": kind})
    here = Path.cwd()
    try:
        return watch(scene, {"some": [*range(count)]}, folder, 1)["some"]
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("reader", "count", "said"),
    [
        (unguarded, 30, "Error"),
        (endless, 1, "hangs"),
        (greedy, 2, "MB of memory"),
        (insatiable, 2, "takes memory"),
        (crashing, 3, "ended with -9"),
    ],
)
def test_a_reader_without_guard_is_noticed(tmp_path, reader, count, said) -> None:
    cases = cases_of(reader, tmp_path, count)
    faults = [case for case in cases if case.fault]
    assert len(cases) == count
    assert faults
    assert sorted(case.number for case in cases) == [*range(count)]
    assert all(said in case.said for case in faults), faults[0].said


def test_a_reader_that_only_waits_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mutations.PATIENCE", 3.0)
    (case,) = cases_of(asleep, tmp_path, 1)
    assert case.fault
    assert "hangs" in case.said
    assert "asleep" in case.said  # where it waited


def test_another_result_of_a_guarded_file_is_noticed(tmp_path) -> None:
    cases = cases_of(mistaken, tmp_path, 5, guarded=True)
    assert all("another result" in case.said for case in cases)


@pytest.mark.long
def test_some_hundred_mutations() -> None:
    """Of every kind of file, by another seed than that of docs/evidence/mutations.md."""
    command = [sys.executable, "-W", "ignore", "tests/mutations.py"]
    done = subprocess.run(
        [*command, "--cases", "300", "--seed", "1414"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
