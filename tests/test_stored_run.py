"""A run, its export and an adapter that an earlier commit wrote still resume, verify and export.

`stored/run.tar.xz`, which `store_run.py` wrote: a pretraining run of 2 ranks with a checkpoint at
step 4 of 6, its export, a LoRA run on that export with a checkpoint at step 2 of 4, its adapter,
and the metrics that each of them had when it went on undisturbed.
"""

import json
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT, slow
from distributed import run_recipe_ranks
from safetensors.torch import load_file

from toolkit.export import consolidate
from toolkit.formats import read_metadata
from toolkit.verify import verify_checkpoint, verify_export

BASE = ("--config", "base.yaml")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ROOT / "tests" / "stored" / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(file: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize("world", [slow(1), 2, slow(4)])
def test_the_run_goes_on_as_it_would_have(stored: Path, world: int) -> None:
    size = ("--train.per_device_train_batch_size", str(max(1, 2 // world)))
    done = run_recipe_ranks("pretrain", world, *BASE, *size, cwd=stored)
    assert done.returncode == 0, done.stderr
    now, then = lines(stored / "run/metrics.jsonl"), lines(stored / "run_metrics.jsonl")
    assert sorted(now) == [1, 2, 3, 4, 5, 6]
    for step in (5, 6):
        assert now[step]["loss"] == pytest.approx(then[step]["loss"], abs=1e-5)
        assert now[step]["grad_norm"] == pytest.approx(then[step]["grad_norm"], rel=1e-4)
        assert now[step]["tokens"] == then[step]["tokens"]
    assert verify_checkpoint("run").ok


@pytest.mark.parametrize("world", [1, slow(2)])
def test_the_adapter_run_goes_on_as_it_would_have(stored: Path, world: int) -> None:
    batch = ("--train.per_device_train_batch_size", str(2 // world))
    done = run_recipe_ranks("finetune", world, "--config", "tune.yaml", *batch, cwd=stored)
    assert done.returncode == 0, done.stderr
    now, then = lines(stored / "tuned/metrics.jsonl"), lines(stored / "tuned_metrics.jsonl")
    for step in (3, 4):
        assert now[step]["loss"] == pytest.approx(then[step]["loss"], abs=1e-5)
        assert now[step]["grad_norm"] == pytest.approx(then[step]["grad_norm"], rel=1e-4)
        assert now[step]["tokens"] == then[step]["tokens"]


def test_what_was_written_then_verifies_and_exports_alike(stored: Path) -> None:
    for checkpoint, export in (("run", "run-hf"), ("tuned", "tuned-hf")):
        assert verify_checkpoint(checkpoint).ok
        report = verify_export(checkpoint, export, logits=True, hf_assets="run-hf")
        assert report.ok, report.findings
        consolidate(checkpoint, f"{export}-again", hf_assets="run-hf")
        (file,) = Path(export).glob("*.safetensors")
        then, now = load_file(file), load_file(Path(f"{export}-again", file.name))
        assert then.keys() == now.keys()
        for name, tensor in then.items():
            assert now[name].dtype == tensor.dtype
            assert now[name].equal(tensor), name
    consolidate("tuned", "merged", hf_assets="run-hf", merge=True)
    assert verify_export("tuned", "merged", logits=True, hf_assets="run-hf").ok


def test_a_damaged_stored_checkpoint_is_found(stored: Path) -> None:
    dcp = stored / "run/checkpoints/step-00000004/dcp"
    index, blob = max(read_metadata(dcp).storage_data.items(), key=lambda item: item[1].length)
    content = bytearray((dcp / blob.relative_path).read_bytes())
    content[blob.offset + blob.length // 2] ^= 1
    (dcp / blob.relative_path).write_bytes(content)
    (found,) = verify_checkpoint("run").findings
    assert found[0].endswith(f"dcp/{blob.relative_path}")
    assert found[1] == index.fqn
    assert found[2] == "does not hold what was in memory at saving"
