"""Trackers: what they hold afterwards is what `metrics.jsonl` holds, over an end and a resume."""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from distributed import run_recipe_ranks

from toolkit.config import MetricsConfig
from toolkit.errors import ConfigError
from toolkit.formats.metrics_file import read_metrics
from toolkit.training import trackers

ENDED_AT, SAVED_AT, STEPS = 6, 4, 8
KILL = "import os; os.kill(os.getpid(), 9)"
# What a step that is done again repeats to the bit; the others are times and memory.
REPEATED = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens", "train/epoch")


def train(folder: Path, model: Path, text: Path, report_to: str, end: str, code: int) -> Path:
    """End a run after step 6, resume it from step 4 to step 8; return its folder."""
    recipe = (ROOT / "recipes/pretrain.py").read_text("utf-8")
    after = "        metrics.step(step, stats, learning_rate, **eval_metrics)\n"
    assert after in recipe
    ending = f"{after}        if step == {ENDED_AT}: {end}\n"
    (folder / "ended.py").write_text(recipe.replace(after, ending), "utf-8")
    flags = [
        "--model.name_or_path", str(model),
        "--data.train_files", str(text),
        "--data.sequence_length", "32",
        "--data.max_eval_samples", "4",
        "--sharding.param_dtype", "float32",
        "--train.max_steps", str(STEPS),
        "--train.logging_steps", "1",
        "--train.eval_steps", "4",
        "--checkpoint.save_steps", str(SAVED_AT),
        "--metrics.report_to", report_to,
        "--metrics.project", "tests",
        "--output_dir", str(folder / "run"),
    ]  # fmt: skip
    first = run_recipe_ranks(folder / "ended.py", 2, *flags, cwd=folder)
    assert first.returncode == code, first.stderr
    assert [line["step"] for line in read_metrics(folder / "run")] == [*range(1, ENDED_AT + 1)]
    second = run_recipe_ranks("pretrain", 2, *flags, cwd=folder)
    assert second.returncode == 0, second.stderr
    assert [line["step"] for line in read_metrics(folder / "run")] == [*range(1, STEPS + 1)]
    return folder / "run"


def expected(run: Path) -> dict[int, dict[str, float]]:
    """Return step -> the values that trackers are sent, by `metrics.jsonl`."""
    steps = {}
    for line in read_metrics(run):
        renamed = {
            key.replace("eval_", "eval/") if key.startswith("eval_") else f"train/{key}": value
            for key, value in line.items()
            if key not in ("step", "time")
        }
        steps[line["step"]] = renamed
    return steps


def check_kept(run: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    """Of trackers that keep what they first got of a step that is done again."""
    assert [step for step, _ in rows] == [*range(1, STEPS + 1)]
    for step, wanted in expected(run).items():
        got = dict(rows)[step]
        assert got.keys() == wanted.keys()
        again = SAVED_AT < step <= ENDED_AT
        for name in REPEATED if again else wanted:
            assert got[name] == wanted[name], (step, name)


@pytest.mark.slow
def test_tensorboard_holds_the_metrics(tmp_path, tiny_llama, text_file) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tmp_path, tiny_llama, text_file, "tensorboard", KILL, signal.SIGKILL)
    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    got: dict[int, dict[str, float]] = {step: {} for step in range(1, STEPS + 1)}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            assert name not in got[scalar.step], f"{name} has step {scalar.step} twice"
            got[scalar.step][name] = scalar.value
    for step, wanted in expected(run).items():
        assert got[step] == pytest.approx(wanted, rel=1e-6)  # of float32
    # One start's hyper-parameters, and what no flag has said.
    (hparams,) = run.glob("tensorboard/*/hparams.yml")
    sent = hparams.read_text("utf-8")
    assert "optim.learning_rate: 0.0003" in sent
    assert "world_size: 2" in sent
    assert "dtypes: storage float32, compute float32" in sent


@pytest.mark.slow
def test_wandb_and_trackio_hold_the_metrics(tmp_path, tiny_llama, text_file, monkeypatch) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = train(tmp_path, tiny_llama, text_file, "[wandb, trackio]", "raise KeyboardInterrupt", 130)
    ids = json.loads((run / "trackers.json").read_text("utf-8"))

    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # a start each, of rank 0 alone
    assert {file.stem for file in files} == {f"run-{ids['wandb']}"}
    records = [record for file in files for record in wandb_records(file)]
    begun = [record.run for record in records if record.HasField("run")]
    assert {(r.run_id, r.project) for r in begun} == {(ids["wandb"], "tests")}
    check_kept(run, [wandb_row(r.history) for r in records if r.HasField("history")])
    configured = [item.key for r in records if r.HasField("config") for item in r.config.update]
    assert configured.count("optim.learning_rate") == 1

    script = "import json, sys, trackio.sqlite_storage as s\n"
    script += "print(json.dumps(s.SQLiteStorage.get_logs('tests', sys.argv[1])))"
    name = f"run-{ids['trackio'][:6]}"
    rows = json.loads(last_line([sys.executable, "-c", script, name]))
    own = ("timestamp", "step")
    check_kept(run, [(r["step"], {k: v for k, v in r.items() if k not in own}) for r in rows])


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: LevelDB's log format, behind seven bytes of W&B's."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 2**15 - at % 2**15  # of this block, which no header crosses
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts, at = parts + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_row(history: Any) -> tuple[int, dict[str, float]]:
    values = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item
    }
    step = values.pop("_step")
    return step, {k: v for k, v in values.items() if not k.startswith("_")}


def last_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_a_missing_package_is_one_line_before_the_work(tmp_path, tiny_llama, text_file) -> None:
    missing = [n for n in ("aim", "clearml", "comet_ml") if importlib.util.find_spec(n) is None]
    if not missing:
        pytest.skip("all trackers are installed")
    with pytest.raises(ConfigError, match=rf"{missing[0]} cannot be imported.*pip install"):
        MetricsConfig(report_to=["tensorboard", missing[0]]).trackers()
    done = run_recipe_ranks(
        *("pretrain", 1),
        *("--model.name_or_path", str(tiny_llama), "--data.train_files", str(text_file)),
        *("--metrics.report_to", missing[0], "--output_dir", str(tmp_path / "run")),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install {missing[0]}" in done.stderr
    assert not done.stdout
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path, capsys) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    cfg = MetricsConfig(report_to="tensorboard")
    with trackers.Trackers(cfg, tmp_path, {}, first_step=0, last_logged=0) as tracking:
        tracking.log({"step": 1, "loss": 1.0})
        assert capsys.readouterr().out == ""
        tracking.log({"step": 2, "loss": 10**400})  # no number of TensorBoard's
        tracking.log({"step": 3, "loss": 1.0})
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "tensorboard failed and gets no more: OverflowError" in said


def test_a_tracker_that_does_not_start_says_which(tmp_path) -> None:
    from toolkit.errors import TrainingError

    (tmp_path / "tensorboard").write_text("a file where its folder goes")
    cfg = MetricsConfig(report_to=["none", "tensorboard"])
    with pytest.raises(TrainingError, match="tensorboard does not start"):
        trackers.Trackers(cfg, tmp_path, {}, first_step=0, last_logged=0)


@pytest.mark.parametrize("content", ["", "[]", '{"tensorboard": 3}'])
def test_a_damaged_record_of_trackers_begins_new_runs(tmp_path, capsys, content) -> None:
    (tmp_path / "trackers.json").write_text(content)
    cfg = MetricsConfig(report_to="tensorboard")
    with trackers.Trackers(cfg, tmp_path, {}, first_step=3, last_logged=3) as started:
        started.log({"step": 4, "loss": 1.0})
    warned = "WARNING: " in capsys.readouterr().out
    assert warned == (not content.startswith("{"))
    assert isinstance(json.loads((tmp_path / "trackers.json").read_text())["tensorboard"], str)
    assert list(tmp_path.rglob("events.*"))
