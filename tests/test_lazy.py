"""Packages import their modules when a name is used, and commands import only what they need."""

import hashlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import toolkit

PACKAGES = [
    info.name
    for info in pkgutil.iter_modules(toolkit.__path__, "toolkit.")
    if info.ispkg and hasattr(__import__(info.name, fromlist=["_"]), "__getattr__")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists_and_no_module_has_it(package):
    module = __import__(package, fromlist=["_"])
    modules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    exported = {name for name in module.__dir__() if name not in vars(module)}
    for name in exported:
        value = getattr(module, name)
        # An imported module takes its own name in the package, also from another name's import.
        assert name not in modules or hasattr(value, "__path__") or hasattr(value, "__file__")


@pytest.mark.parametrize("name", ["nothing"])
def test_an_unknown_name_is_an_attribute_error(name):
    from toolkit import export

    with pytest.raises(AttributeError, match=r"'toolkit\.export' has no attribute 'nothing'"):
        getattr(export, name)


TRAP = """
import sys
from importlib.abc import MetaPathFinder
from toolkit.cli import main

class Trap(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "peft", "datasets", "accelerate"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Trap())
sys.exit(main(sys.argv[1:]))
"""


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which the import of a heavy library is an error."""
    program = [sys.executable, "-c", TRAP, *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one committed checkpoint, a config and two logged steps."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint = folder / "checkpoints/step-00000002"
    dcp.save({"model.weight": torch.ones(4, 2)}, checkpoint_id=checkpoint / "dcp")
    (checkpoint / "state.json").write_text('{"step": 2}')
    contents = {p: p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}
    files = {
        str(p.relative_to(checkpoint)): {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()}
        for p, c in contents.items()
    }
    manifest = {"version": 1, "step": 2, "files": files, "tensors": {}}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (checkpoint / "manifest.json").write_text(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    (folder / "config.yaml").write_text(f"output_dir: {folder}\n")
    lines = ({"step": step, "loss": 2.0, "time": 1.0 + step} for step in (1, 2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_verify_reads_a_checkpoint_without_transformers(run: Path) -> None:
    done = command("verify", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run verified" in done.stdout


def test_inspect_reads_a_run_without_transformers(run: Path) -> None:
    done = command("inspect", run)
    assert done.returncode == 0, done.stderr


def test_report_draws_a_run_without_transformers(run: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    done = command("report", run)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").is_file()


def test_the_trap_catches_an_import(run: Path) -> None:
    done = command("consolidate", run, "--output", run / "export")
    assert "is imported" in done.stderr
