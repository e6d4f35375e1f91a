"""What a start says: changed settings, where it goes on, on which device."""

import re
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import ROOT, accelerate, free_port, run_recipe
from distributed import run_recipe_ranks
from test_stored_run import BASE, stored

from toolkit.errors import LaunchError
from toolkit.training import launch

__all__ = ["stored"]


def start(folder: Path, *flags: str, world: int = 1) -> str:
    """Go on with the stored run; return what it printed."""
    done = run_recipe_ranks("pretrain", world, *BASE, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_resume_says_what_changed_and_what_has_no_effect(stored: Path) -> None:
    said = start(stored, "--optim.learning_rate", "0.02", "--train.max_steps", "5")
    assert "resuming   run after step 4" in said
    assert "changed    optim.learning_rate: 0.01 -> 0.02, from step 5 on" in said
    assert "changed    train.max_steps: 6 -> 5, from step 5 on" in said
    assert "note: train.gradient_accumulation_steps 1 has no effect, it is 2" in said
    assert "random weights" not in said
    kept = yaml.safe_load((stored / "run/config.yaml").read_text())
    assert kept["train"]["gradient_accumulation_steps"] == 2
    assert kept["optim"]["learning_rate"] == 0.02


def test_a_global_batch_that_stays_is_recorded_as_it_is(stored: Path) -> None:
    said = start(stored, "--train.global_batch_size", "8")
    before = re.search(r"note: train.global_batch_size 8 has no effect, it is (\d+)\n", said)
    assert before is not None, said
    assert "changed    train.global_batch_size: None -> " in said
    assert "-> 8" not in said
    assert "gradient_accumulation_steps" not in said
    kept = yaml.safe_load((stored / "run/config.yaml").read_text())
    assert kept["train"]["global_batch_size"] == int(before[1]) != 8


def test_the_same_settings_say_nothing(stored: Path) -> None:
    said = start(stored, world=2)
    assert "resuming   run after step 4" in said
    assert "no effect" not in said
    assert "changed    " not in said


def test_a_start_with_nothing_to_do_leaves_the_settings(stored: Path) -> None:
    before = (stored / "run/config.yaml").read_bytes()
    said = start(stored, "--train.max_steps", "4", "--optim.learning_rate", "0.5")
    assert "nothing to do: 4 steps are done" in said
    assert (stored / "run/config.yaml").read_bytes() == before
    assert "random weights" not in said


@pytest.mark.slow
def test_exports_of_steps_that_are_trained_anew_are_set_aside(stored: Path) -> None:
    """As after a damaged last checkpoint: what the first attempt exported are other weights."""
    exports = stored / "run/exports"
    for step in (4, 6):
        (exports / f"step-{step:08d}").mkdir(parents=True)
        (exports / f"step-{step:08d}/config.json").write_text("{}")
    said = start(stored, "--checkpoint.export_at_end", "true", "--optim.learning_rate", "0.02")
    assert "NOTE: run/exports/step-00000006 was there already; it is now run/exports/step" in said
    assert "exported run/exports/step-00000006" in said
    assert (exports / "step-00000006/model.safetensors").is_file()
    assert [p.name for p in (exports / "step-00000004").iterdir()] == ["config.json"]
    said = start(stored, "--checkpoint.export_at_end", "true", "--optim.learning_rate", "0.02")
    assert "exported" not in said  # nothing to do
    assert "NOTE" not in said


def test_the_settings_are_printed_once_by_any_number_of_processes(tmp_path: Path) -> None:
    flags = ("--model.name_or_path", "here", "--print_config")
    done = run_recipe_ranks("pretrain", 2, *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["model"]["name_or_path"] == "here"  # no key stands twice
    assert done.stdout.count("name_or_path: here") == 1


# ---- The device ----------------------------------------------------------------------------------


class Launcher:
    """The parent process of a rank, as psutil shows it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder, self._arguments = folder, list(arguments)

    def cmdline(self) -> list[str]:
        return ["python", "accelerate", "launch", *self._arguments, "recipes/pretrain.py"]

    def cwd(self) -> str:
        return str(self._folder)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("text", "arguments", "cpu"),
    [
        ("distributed_type: MULTI_GPU\nuse_cpu: true\n", [], True),
        ("distributed_type: MULTI_GPU\nuse_cpu: false\n", [], False),
        ("distributed_type: FSDP\n", [], False),
        ("distributed_type: MULTI_GPU\nuse_cpu: false\n", ["--cpu"], True),
    ],
)
def test_gpus_that_are_not_there(tmp_path, monkeypatch, text, arguments, cpu) -> None:
    (tmp_path / "launch.yaml").write_text(text)
    parent = Launcher(tmp_path, "--config_file", "launch.yaml", *arguments)
    monkeypatch.setattr(psutil, "Process", lambda pid: parent)
    if cpu:
        assert launch._uses_cpu(0, 2)
        return
    with pytest.raises(LaunchError, match=r"2 processes on GPUs, and torch sees no GPU \(torch 2"):
        launch._uses_cpu(0, 2)


def test_one_process_without_a_gpu_says_so(no_gpu, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(psutil, "Process", lambda pid: Launcher(tmp_path))
    monkeypatch.setattr(launch, "default_config_file", str(tmp_path / "none.yaml"))
    assert launch._uses_cpu(0, 1)
    assert f"torch {torch.__version__}, built for CUDA" in capsys.readouterr().out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_a_launch_on_gpus_of_a_machine_without(tmp_path, tiny_llama, text_file) -> None:
    launcher = [
        str(ROOT / "accelerate_configs" / "one_node.yaml") if "cpu.yaml" in part else part
        for part in accelerate(2, free_port())
    ]
    flags = ["--model.name_or_path", str(tiny_llama), "--data.train_files", str(text_file)]
    done = run_recipe(launcher, *flags, "--output_dir", str(tmp_path / "run"), timeout=300)
    assert done.returncode != 0
    ours, _, of_launcher = done.stderr.partition("Traceback")
    assert ours.count("torch sees no GPU") == 1
    assert "torch sees no GPU" in of_launcher.rpartition("traceback : ")[2]  # not a hint at one
    assert not (tmp_path / "run").exists()
