"""Clocks of hosts that differ, and one that is set back between two starts, change nothing."""

import json

import pytest
from distributed import run_recipe_ranks
from test_preemption import ROOT, STEPS, given

from toolkit.checkpoint.commit import committed_steps

DAY = 86_400


def skewed(tmp_path, of_ranks: dict[int, int]):
    """Write a recipe whose ranks' clocks are off by so many seconds."""
    script = tmp_path / "skewed.py"
    script.write_text(f"""
import os, runpy, time
plain, off = time.time, {of_ranks!r}[int(os.environ["RANK"])]
time.time = lambda: plain() + off
runpy.run_path({str(ROOT / "recipes" / "pretrain.py")!r}, run_name="__main__")
""")
    return script


@pytest.mark.slow
def test_clocks_that_differ(tmp_path, tiny_llama, text_file) -> None:
    run = tmp_path / "run"
    more = ["--checkpoint.save_steps", "1", "--checkpoint.save_total_limit", "2"]
    more += ["--train.hang_seconds", "20"]
    for off, steps in (({0: DAY, 1: 0}, 3), ({0: -DAY, 1: DAY}, STEPS)):
        settings = given(tiny_llama, text_file, run, "--train.max_steps", str(steps))
        done = run_recipe_ranks(skewed(tmp_path, off), 2, *settings, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "watchdog" not in done.stderr
        assert "WARNING: rank" not in done.stdout
        assert sorted(committed_steps(run)) == [steps - 1, steps]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    assert logged[2]["time"] - logged[3]["time"] > DAY  # the control: the clock was set back
