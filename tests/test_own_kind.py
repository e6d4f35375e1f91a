"""A kind of run of the user's own: one recipe file, and every command of the toolkit works with it.

No file of the toolkit knows this kind, which trains with a focal loss.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, accelerate, free_port, save_byte_tokenizer, save_tiny_model
from distributed import run_recipe_ranks
from safetensors.torch import load_file

from toolkit import cli
from toolkit.checkpoint.commit import committed_steps
from toolkit.formats.metrics_file import read_metrics

STEPS = 6
FOCAL = '''
@dataclass(frozen=True)
class FocalSection:
    """The focal loss (Lin et al. 2017, arXiv:1708.02002)."""

    gamma: float = 2.0
    """How much less a token counts that the model predicts well already."""

    def __post_init__(self) -> None:
        if self.gamma <= 0:
            raise ConfigError("focal.gamma must be above 0; 0 is the cross entropy of finetune.py")


@dataclass(frozen=True)
class FocalConfig(FinetuneConfig):
    """A run of fine-tuning with the focal loss."""

    focal: FocalSection = field(default_factory=FocalSection)


@objectives.register(FocalConfig)
class FocalLoss(objectives.CausalLM):
    """The cross entropy of each token, weighted by (1 - p) ^ gamma."""

    metrics = (*objectives.CausalLM.metrics, Metric("hard_tokens", "min", ".1%"))

    def __call__(self, model: nn.Module, batch: Batch) -> training.LossSum:
        logps = training.token_logps(model, batch, device_type=self.device_type)
        weights = (1 - logps.exp()) ** self.cfg.focal.gamma
        return training.LossSum(-(weights * logps).sum(), batch.count)

    def evaluation_loss(self, model: nn.Module, batch: Batch) -> training.LossSum:
        loss = super().evaluation_loss(model, batch)
        logps = training.token_logps(model, batch)
        loss.parts["hard_tokens"] = (logps < math.log(0.5)).sum()
        return loss
'''
IMPORTS = """import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.config.measures import Metric
from toolkit.config.settings import FinetuneModelConfig
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.errors import ConfigError
"""


def write_recipe(name: str, definitions: str, changes: dict[str, str]) -> Path:
    """Write recipes/NAME.py: the fine-tuning recipe with another class of settings."""
    cls = f"{name.capitalize()}Config"
    text = (ROOT / "recipes" / "finetune.py").read_text("utf-8")
    changes = {
        "from pathlib import Path\n": IMPORTS,
        "\n\ndef finetune(cfg: FinetuneConfig": f"\n{definitions}\n\ndef {name}(cfg: {cls}",
        "training.main(finetune, FinetuneConfig": f"training.main({name}, {cls}",
        **changes,
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = Path("recipes", f"{name}.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def write_config(name: str, **sections: object) -> str:
    content: dict = {
        "kind": name,
        "model": {"name_or_path": "model"},
        "sharding": {"param_dtype": "float32"},
        "data": {"train_files": "rows.jsonl", "sequence_length": 64, "eval_split": 0.1},
        "train": {
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "eval_steps": 3,
        },
        "checkpoint": {"save_steps": 3},
        "output_dir": "run",
    }
    for section, values in sections.items():
        content[section] = content.get(section, {}) | values
    Path(f"{name}.yaml").write_text(json.dumps(content))  # which is YAML
    return f"{name}.yaml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a tiny model and rows."""
    monkeypatch.chdir(tmp_path)
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def toolkit(*words: str) -> str:
    """Run a command in a process of its own; return what it printed."""
    command = [sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(recipe: Path, config: str, *flags: str, world_size: int = 2) -> None:
    done = run_recipe_ranks(recipe, world_size, "--config", config, *flags, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr


def losses(output: str) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(output))]


def run_and_kill(recipe: Path, config: str, *flags: str) -> None:
    """Start a run on two ranks and kill all its processes after its first checkpoint."""
    command = [*accelerate(2, free_port()), str(recipe), "--config", config, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not committed_steps(Path("killed")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family)
    process.wait()


@pytest.mark.slow
def test_a_recipe_with_its_own_loss_lives_a_whole_life(folder, capsys) -> None:
    recipe = write_recipe("focal", FOCAL, {})
    best = {"keep_best": 1, "metric_for_best_model": "hard_tokens"}
    config = write_config("focal", focal={"gamma": 1.5}, checkpoint=best)

    # Planned and rehearsed before it runs.
    assert cli.main(["plan", config, "--world_size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] > 0
    stages = json.loads(toolkit("rehearse", config, "--json"))["stages"]
    assert {"kill", "resume", "verify"} <= {s["stage"] for s in stages if s["ok"]}

    # Trained on two ranks; killed and resumed it is the undisturbed run.
    run(recipe, config)
    run_and_kill(recipe, config, "--output_dir", "killed", "--train.max_steps", str(STEPS))
    run(recipe, config, "--output_dir", "killed")
    assert losses("killed") == losses("run")
    last = read_metrics(Path("run"))[-1]
    assert {"eval_loss", "eval_perplexity", "eval_accuracy", "eval_hard_tokens"} <= last.keys()

    # The focal loss is below the cross entropy; it is the same for one rank.
    run(write_recipe("focal", FOCAL, {}), config, "--output_dir", "one", world_size=1)
    assert losses("one")[0] != losses("run")[0]

    # Settings that define the run must not change; the recipe's own checks hold.
    done = run_recipe_ranks(recipe, 2, "--config", config, "--focal.gamma", "3", cwd=folder)
    assert "run holds another run: focal.gamma was 1.5, is 3.0" in done.stderr
    assert cli.main(["plan", config, "--world_size", "2", "--focal.gamma", "0"]) == 2

    # Exported, proven and reported.
    toolkit("consolidate", "run", "--output", "export")
    toolkit("verify", "run", "export", "--logits")
    trained, before = load_file("export/model.safetensors"), load_file("model/model.safetensors")
    assert any((trained[name] != before[name]).any() for name in before)
    toolkit("report", "run", "killed")
    page = Path("run/report.html").read_text("utf-8")
    assert "focal, gamma 1.5" in page
    assert "hard_tokens" in page
    assert "settings that this version does not know" not in page
