"""`toolkit train`, `finetune` and `recipes`: from a clone, and from a wheel outside of it."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from toolkit import recipes
from toolkit.errors import ConfigError, ToolkitError

CONFIG = str(ROOT / "recipes/configs/pretrain_tiny.yaml")
FINETUNE = str(ROOT / "recipes/configs/finetune_tiny.yaml")
TYPO = "unknown setting 'train.max_step' (command line), did you mean train.max_steps?"


def toolkit(*arguments: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line of the package in the folder `path`, without its clone."""
    env = os.environ | {"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "toolkit", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", CONFIG, "--train.max_step", "1"], TYPO),
        (["finetune", FINETUNE, "--bf16", "true"], "did you mean sharding.param_dtype: bfloat16?"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["train", "recipes/configs/x.yaml"], "`toolkit recipes --copy finetune` puts the ready"),
        (["train"], "expected `toolkit train CONFIG`"),
        (
            ["train", CONFIG, "--accelerate_config", "tpu"],
            "none of cpu, fsdp2, multi_node, one_gpu",
        ),
        (["recipes", "--copy", "nothing"], "there are pretrain, finetune"),
        (["train", CONFIG, "--data.train_files", "x*.txt"], "'x*.txt' matches no file"),
        (["train", CONFIG, "--model.name_or_path", "./x"], "there is no folder ./x"),
    ],
)
def test_what_is_wrong_is_one_line_before_torch(arguments, said, tmp_path) -> None:
    code = (
        "import sys; from toolkit import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    code = 1 if arguments[2:3] in (["--data.train_files"], ["--model.name_or_path"]) else 2
    assert done.stdout == f"{code} False\n"
    assert done.stderr.startswith("toolkit: error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_hub_id_offline_fails_before_torch(tmp_path) -> None:
    code = (
        "import sys; from toolkit import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    settings = ["train", CONFIG, "--model.name_or_path", "someone/some-model"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *settings],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1 False\n"
    assert "nor in the cache of the Hub" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cached_hub_id_offline_goes_on(tmp_path, monkeypatch) -> None:
    """The control of the test above."""
    refs = tmp_path / "models--someone--some-model/refs"
    snapshot = tmp_path / "models--someone--some-model/snapshots/abc"
    for folder in (refs, snapshot):
        folder.mkdir(parents=True)
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ToolkitError, match="nor in the cache"):
        recipes._check_cache("someone/some-model", None)
    (snapshot / "config.json").write_text("{}")
    recipes._check_cache("someone/some-model", None)
    recipes._check_cache(str(tmp_path), None)


def test_the_launcher_takes_its_own_options(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        recipes.start_recipe("pretrain", [CONFIG, "--num_processes", "two"])
    assert end.value.code == 2
    assert "--num_processes: invalid int value" in capfd.readouterr().err
    with pytest.raises(SystemExit) as end:  # the settings, once, whatever number of processes
        recipes.start_recipe("pretrain", [CONFIG, "--num_processes", "2", "--print_config"])
    assert end.value.code == 0
    assert capfd.readouterr().out.count("per_device_train_batch_size: 8") == 1


def test_make_help_is_in_columns() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 10
    assert len({len(re.match(r"\S+ +", line)[0]) for line in lines}) == 1, done.stdout


def test_recipes_are_listed_and_copied_once(tmp_path, monkeypatch) -> None:
    listed = recipes.describe_recipes()
    assert any(line.startswith("pretrain    Pretrain a causal") for line in listed)
    assert any("accelerate_configs/one_node.yaml: One node of 8 GPUs" in line for line in listed)
    assert any(
        line.strip().startswith("llama3_8b_lora_1gpu ") and "on one GPU" in line for line in listed
    )
    titles = [line[29:] for line in listed if line.startswith("  ")]
    assert len(titles) == len(list((ROOT / "recipes/configs").glob("*.yaml")))
    for title in titles:  # a whole phrase, which the end of a line does not cut
        assert not re.search(r"[,;:]$|on each node$|on instruction$", title), title
    files = recipes.copy_recipe("pretrain", tmp_path)
    assert {str(file.relative_to(tmp_path)) for file in files} >= {
        "recipes/pretrain.py",
        "recipes/configs/pretrain_tiny.yaml",
        "recipes/configs/tiny_llama/config.json",
        "accelerate_configs/cpu.yaml",
    }
    recipes.copy_recipe("finetune", tmp_path)  # what both have is there already, and the same
    assert (tmp_path / "recipes/finetune.py").read_bytes() == (
        ROOT / "recipes/finetune.py"
    ).read_bytes()
    with open(tmp_path / "recipes/pretrain.py", "a") as recipe:
        recipe.write("# edited\n")
    (tmp_path / "recipes/configs/finetune_tiny.yaml").unlink()
    with pytest.raises(ToolkitError, match=r"recipes/pretrain.py is there already and differs"):
        recipes.copy_recipe("pretrain", tmp_path)
    assert not (tmp_path / "recipes/configs/finetune_tiny.yaml").exists()  # nothing was written
    with pytest.raises(ConfigError):
        recipes.copy_recipe("demo", tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the wheel is installed, built from the files that git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith(("tests/", "benchmarks/", "docs/")):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *alone, "--no-build-isolation", "-w", "built", "./source"]
    subprocess.run(build, cwd=folder, check=True)
    (wheel,) = (folder / "built").glob("fsdp2_toolkit-*.whl")
    subprocess.run(
        [*pip, "install", *alone, "--target", "site", str(wheel)], cwd=folder, check=True
    )
    return folder / "site"


@pytest.mark.slow
def test_a_wheel_outside_of_the_clone_trains(installed, tmp_path, text_file) -> None:
    shipped = installed / "toolkit/shipped"
    for folder in ("recipes", "accelerate_configs"):
        expected, found = (
            {p.relative_to(top) for p in (top / folder).rglob("*.*") if p.suffix != ".pyc"}
            for top in (ROOT, shipped)
        )
        assert found == expected - {Path("recipes/demo.py")}
    assert not list(installed.glob("recipes*"))  # nothing of this name among the packages

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return toolkit(*arguments, cwd=tmp_path, path=installed)

    typo = run("train", "--model.name_or_path", "here", "--train.max_step", "1")
    assert (typo.returncode, typo.stdout) == (2, "")
    assert TYPO in typo.stderr
    copied = run("recipes", "--copy", "pretrain")
    assert copied.returncode == 0, copied.stderr
    recipe = tmp_path / "recipes/pretrain.py"
    assert str(recipe.relative_to(tmp_path)) in copied.stdout.splitlines()
    flags = ["--accelerate_config", "cpu", "--data.train_files", str(text_file)]
    flags += ["--train.max_steps", "2", "--data.sequence_length", "32", "--output_dir", "run"]
    done = run("train", "recipes/configs/pretrain_tiny.yaml", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 process(es) on cpu" in done.stdout
    lines = (tmp_path / "run/metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]

    # A copy is what runs, where there is one; its exit code is handed on.
    recipe.write_text("import sys\n\nprint('edited', sys.argv[1:])\nsys.exit(3)\n", "utf-8")
    edited = run("train", "recipes/configs/pretrain_tiny.yaml", "--seed", "1")
    assert edited.returncode != 0
    assert (
        "edited ['--config', 'recipes/configs/pretrain_tiny.yaml', '--seed', '1']" in edited.stdout
    )


def test_installing_says_its_phases_and_a_demo_what_comes_next() -> None:
    make = ["make", "-n", "install", "VENV=nowhere"]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phases = [line for line in said.splitlines() if line.startswith("echo 'install ")]
    assert [phase.split()[2] for phase in phases] == ["1", "2", "done:"]
    demo = runpy.run_path(str(ROOT / "recipes/demo.py"))["next_command"]
    assert demo(Path("runs/demo"), False) == "make demo-finetune"
    assert demo(Path("runs/other"), False) == "make demo-finetune RUN=runs/other"
    assert demo(Path("runs/demo"), True).startswith("toolkit push runs/demo-finetune-merged ")
