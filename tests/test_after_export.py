"""The command that runs on each export: its output, exit codes, environment, order and end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks

from toolkit.config.settings import CheckpointConfig
from toolkit.errors import ConfigError
from toolkit.export.after_export import RESULTS, ExportCommands


def results_of(run: Path) -> list[dict[str, Any]]:
    file = run / "after_export" / RESULTS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def exports(run: Path, count: int) -> list[Path]:
    folders = [run / "exports" / f"step-{step:08}" for step in range(1, count + 1)]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_commands_run_one_at_a_time_in_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    command = f"echo +{{step}} >> {order}; sleep 0.2; echo -{{step}} >> {order}; ls -d {{export}}"
    commands = ExportCommands(command, tmp_path)
    for step, export in enumerate(exports(tmp_path, 3), 1):
        commands.start(export, step)
    commands.close()
    wait_until(commands.has_ended)
    assert order.read_text().split() == ["+1", "-1", "+2", "-2", "+3", "-3"]
    assert [(r["step"], r["exit_code"]) for r in results_of(tmp_path)] == [(1, 0), (2, 0), (3, 0)]
    assert [line.split(" done in")[0] for line in commands.poll()] == [
        f"after_export of step {step}" for step in (1, 2, 3)
    ]
    assert commands.poll() == []
    log = (tmp_path / "after_export" / "step-00000002.log").read_text()
    assert log == f"{tmp_path}/exports/step-00000002\n"


def test_a_failure_is_a_warning_with_its_output(tmp_path: Path) -> None:
    commands = ExportCommands("echo wrong >&2; exit 3", tmp_path)
    commands.start(exports(tmp_path, 1)[0], 1)
    commands.close()
    wait_until(commands.has_ended)
    (line,) = commands.poll()
    assert line.startswith("WARNING: after_export of step 1 failed with exit code 3 after")
    assert (tmp_path / "after_export" / "step-00000001.log").read_text() == "wrong\n"


def test_the_command_does_not_see_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "launched")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    commands = ExportCommands("env", tmp_path)
    commands.start(exports(tmp_path, 1)[0], 1)
    commands.close()
    wait_until(commands.has_ended)
    environment = (tmp_path / "after_export" / "step-00000001.log").read_text()
    assert "launched" not in environment
    assert "CUDA_VISIBLE_DEVICES=7" in environment
    assert f"PATH={os.environ['PATH']}" in environment


def test_commands_without_a_result_are_reported(tmp_path: Path) -> None:
    commands = ExportCommands("sleep 1000", tmp_path)
    first, second = exports(tmp_path, 2)
    commands.start(first, 1)
    assert commands._process is not None
    commands._process.kill()
    commands._process.wait()
    commands.start(second, 2)  # nobody takes it
    lines = commands.poll()
    assert [line.split(":")[1].strip() for line in lines] == [
        f"after_export of step {step} has no result" for step in (1, 2)
    ]
    assert commands.poll() == []


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from toolkit.export.after_export import ExportCommands

run = Path(sys.argv[1])
commands = ExportCommands(f"sleep 1000 & echo $! > {run}/child; wait", run)
commands.start(run / "exports/step-00000001", 1)
commands.start(run / "exports/step-00000002", 2)  # waits, and must not be started
while not (run / "child").exists() or not (run / "child").read_text().strip():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    exports(tmp_path, 2)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, timeout=120)
    assert done.returncode < 0
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: results_of(tmp_path) != [])
    wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))
    assert [(r["step"], r["exit_code"]) for r in results_of(tmp_path)] == [(1, None)]


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_command_without_exports_is_refused() -> None:
    with pytest.raises(ConfigError, match="after_export has no effect without exports"):
        CheckpointConfig(after_export="ls {export}")
    CheckpointConfig(after_export="ls {export}", export_at_end=True)


@pytest.mark.slow
def test_a_run_on_two_ranks_runs_it_on_each_export_and_waits(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=320)
    save_byte_tokenizer(model)
    (tmp_path / "text.txt").write_text("All the world is a stage. " * 400)
    settings = {
        "model.name_or_path": model,
        "sharding.param_dtype": "float32",
        "data.train_files": tmp_path / "text.txt",
        "data.sequence_length": 32,
        "train.max_steps": 5,
        "train.per_device_train_batch_size": 1,
        "checkpoint.export_steps": 2,
        "checkpoint.export_at_end": "true",
        "checkpoint.after_export": "ls {export} && sleep 1 && [ {step} != 4 ]",
        "output_dir": "run",
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    done = run_recipe_ranks("pretrain", 2, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ended = [(r["step"], r["exit_code"]) for r in results_of(tmp_path / "run")]
    assert ended == [(2, 0), (4, 1), (5, 0)]
    assert done.stdout.count("after_export of step") == 3
    assert "WARNING: after_export of step 4 failed with exit code 1" in done.stdout
    log = tmp_path / "run" / "after_export" / "step-00000005.log"
    assert "model.safetensors" in log.read_text().split()
