"""Writes `tests/stored/run.tar.xz` anew: what `test_stored_run.py` goes on with.

    python tests/store_run.py

From the inputs that are in the archive (configs, text, rows, a tiny model's config) it pretrains on
2 ranks and fine-tunes adapters on the export. Of each it keeps the metrics of the undisturbed run,
then takes back what came after the first checkpoint. To be run where a format or what decides the
order of samples changes on purpose: from the first release on, never without a reason.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from distributed import run_recipe_ranks

from toolkit.export import consolidate

ARCHIVE = Path(__file__).parent / "stored" / "run.tar.xz"
INPUTS = ("base.yaml", "tune.yaml", "data", "tiny")
RUNS = (("pretrain", "base.yaml", "run", 4), ("finetune", "tune.yaml", "tuned", 2))


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with tarfile.open(ARCHIVE) as archive:
            inputs = [m for m in archive.getmembers() if m.name.split("/")[0] in INPUTS]
            archive.extractall(folder, members=inputs, filter="data")
        for recipe, config, name, kept in RUNS:
            write(folder, recipe, config, name, kept)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


def write(folder: Path, recipe: str, config: str, name: str, kept: int) -> None:
    """Write a run, what it is after step `kept`, and the export of that."""
    done = run_recipe_ranks(recipe, 2, "--config", config, cwd=folder)
    if done.returncode:
        raise SystemExit(done.stderr)
    run = folder / name
    metrics = run / "metrics.jsonl"
    shutil.copy(metrics, folder / f"{name}_metrics.jsonl")
    lines = metrics.read_text("utf-8").splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= kept), "utf-8")
    for later in (run / "checkpoints").iterdir():
        if later.name != f"step-{kept:08d}":
            shutil.rmtree(later)
    consolidate(run, folder / f"{name}-hf")


if __name__ == "__main__":
    main()
