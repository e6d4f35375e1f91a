"""Short forms of chaos.py: ranks killed under torchrun, runs that get signals, and broken runs."""

import json

import chaos
import pytest

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("chapter", "key", "count"), [("kills", "kills", 2), ("signals", "sent", 7)]
)
def test_nothing_is_lost(capsys, chapter, key, count) -> None:
    code, said = chaos.main(["--short", "--only", chapter]), capsys.readouterr().out
    assert code == 0, said
    (row,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert row[key] == count


@pytest.mark.parametrize(
    ("broken", "arguments", "said"),
    [
        ("forget", ["--only", "kills", "--kills", "1"], "were done again that were saved"),
        ("deafen", ["--only", "signals", "--signals", "1"], "expected 75"),
    ],
)
def test_a_broken_run_is_noticed(capsys, broken, arguments, said) -> None:
    assert chaos.main(["--short", *arguments, "--break", broken]) == 1
    assert said in capsys.readouterr().out
