"""A short version of `make soak`: kills, power losses and full disks in every way, some of each."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def chapters():
    """Run the soak's chapters, of which each is a part, in one warm process."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "soak.py"), "--short"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["chapter"]: line for line in map(json.loads, lines)}
    assert found, done.stdout + done.stderr
    return {**found, "said": done.stdout + done.stderr}


@pytest.mark.parametrize(
    "chapter", ["kills", "ranks", "operations", "power", "full", "failing", "dead", "small"]
)
def test_nothing_that_was_committed_is_lost(chapters, chapter):
    assert chapters[chapter]["lost"] == 0, chapters["said"]


def test_every_kind_of_operation_was_met(chapters):
    assert chapters["operations"]["during"].keys() >= {"save", "export"}
    assert chapters["full"]["refused"] > 4
    for error in ("ENOSPC", "EIO", "EROFS"):
        assert chapters["failing"][f"{error} refused"] > 4
        assert chapters["dead"]["tried"] == 0 or chapters["dead"][f"{error} refused"] > 4
    assert chapters["power"]["different"] > 50


def test_broken_protocols_are_caught(chapters):
    assert chapters["controls"]["lost"] == 0, chapters["said"]
    assert len(chapters["controls"]["noticed"]) == chapters["controls"]["broken protocols"] == 9
