"""The tests on the oldest and the newest releases that setup.cfg allows, and on those of CI.

    python tests/versions.py [--write docs/evidence/versions.md] [--only NAME ...]
                             [--environments DIR]
                             [--results FILE]

Each environment is made anew in a folder of its own and removed after its run; one that is in DIR
is used as it is and kept. FILE holds what earlier calls printed: of that only the tests that failed
are run again, by a later commit. A torch whose wheel brings CUDA takes about 7 GB on the disk and 3
of downloads, so that CI leaves this out. Exit code 1 where a test failed.
"""

import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from machine import describe  # noqa: E402

SHOWN = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "huggingface_hub",
)
FAST = ["-m", "not slow and not faults and not plans"]
# Of the other tiers the numbers of sharding, the step, saving, resuming, exporting and planning.
NUMBERS = [
    *("-m", "slow or plans"),
    *("tests/test_sharded.py", "tests/test_training_numbers.py", "tests/test_finetune_numbers.py"),
    *("tests/test_save_proof.py", "tests/test_checkpoint_saving.py", "tests/test_shard_plan.py"),
    *("tests/test_checkpoint_resume.py", "tests/test_consolidate.py", "tests/test_live_export.py"),
    *("tests/test_every_rank.py", "tests/test_planning.py"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="+", choices=[*wanted()], default=[*wanted()])
    parser.add_argument("--environments", type=Path, help="where environments are kept")
    parser.add_argument("--results", type=Path, help="what earlier calls printed, to go on from")
    args = parser.parse_args()
    folder = args.environments or Path(tempfile.mkdtemp(prefix="versions-"))
    found: dict[str, Any] = {}
    for line in args.results.read_text().splitlines() if args.results else ():
        found |= json.loads(line) if line.startswith("{") else {}
    for name in args.only:
        of, place = found.get(name, {}), folder / name
        if {"fast", "numbers"} <= of.keys():
            for tier in ("fast", "numbers"):
                of[tier] = again(place, of[tier]) if of[tier]["failed"] else of[tier]
            print(json.dumps({name: of}), flush=True)
            continue
        made = not place.exists()
        if made:
            install(place, wanted()[name])
        found[name] = {"versions": versions(place)}
        for tier, arguments in (("fast", FAST), ("numbers", NUMBERS)):
            found[name][tier] = run(place, arguments)
            print(json.dumps({name: found[name]}), flush=True)
        if made and args.environments is None:
            shutil.rmtree(place)
    text = report(found)
    print(text)
    if args.write:
        args.write.write_text(text)
    tiers = [of[tier] for of in found.values() for tier in ("fast", "numbers") if tier in of]
    return int(any(tier["failed"] for tier in tiers))


def wanted() -> dict[str, list[str]]:
    """Return the requirements of each environment, by its name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = [
        re.sub(r"\[.*?\]", "", line.partition("#")[0].strip())
        for line in setup["options"]["install_requires"].splitlines()
        if line.partition("#")[0].strip()
    ]
    lowest = [re.sub(r">=([\w.]+).*", r"==\1", line) for line in needed if ">=" in line]
    pinned = [n for n in (ROOT / "constraints.txt").read_text().split("\n") if "==" in n]
    return {"oldest": lowest, "of CI": pinned, "newest": needed}


def install(place: Path, requirements: list[str]) -> None:
    """Make a virtual environment with the toolkit, its tools and these releases."""
    print(f"installing {place}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(requirements))
        constraints.flush()
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade"]
        command += ["--constraint", constraints.name, "--editable", f"{ROOT}[dev]"]
        subprocess.run(command, check=True)


def versions(place: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys\n"
    code += "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    command = [str(place / "bin" / "python"), "-c", code, *SHOWN]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def run(place: Path, arguments: list[str]) -> dict[str, Any]:
    """Run tests; return how many of each outcome, which failed, and the minutes."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [str(place / "bin" / "python"), "-m", "pytest", "-q", "-n", "2"]
        command += ["--dist", "loadfile", "-p", "no:cacheprovider", f"--junitxml={results}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(place / "tests.log", "w") as log:
            subprocess.run(
                [*command, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
        cases = [*ElementTree.parse(results).iter("testcase")]
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": sorted(f"{c.get('classname')}::{c.get('name')}" for c in bad),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "commit": commit(),
    }


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def again(place: Path, tier: dict[str, Any]) -> dict[str, Any]:
    """Run the tests that failed once more, of this commit; return the tier with those that pass."""
    tests = [test.replace(".", "/", 1).replace("::", ".py::", 1) for test in tier["failed"]]
    later = run(place, tests)
    passed = [test for test in tier["failed"] if test not in later["failed"]]
    mended = tier.get("mended", {}) | dict.fromkeys(passed, later["commit"])
    return tier | {
        "failed": later["failed"],
        "mended": mended,
        "passed": tier["passed"] + len(passed),
    }


def report(found: dict[str, Any]) -> str:
    head = ["environment", *SHOWN, "fast tier", "numbers"]

    def told(of: dict[str, Any] | None) -> str:
        if of is None:
            return "not run"
        failed = f", **{len(of['failed'])} failed**" if of["failed"] else ""
        return f"{of['passed']:,} passed{failed}, {of['skipped']} skipped ({of['commit']})"

    rows = [
        [name, *of["versions"].values(), told(of.get("fast")), told(of.get("numbers"))]
        for name, of in found.items()
    ]
    lines = [
        "# Releases",
        "",
        "The tests on the oldest and the newest releases that `setup.cfg` allows and on those that "
        "CI uses, each tier with its commit. The fast tier is `make test`; numbers are the longer "
        "tests of sharding, the step, saving, resuming, exporting and planning.",
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)),
        "",
    ]
    for name, of in found.items():
        failed = [test for t in ("fast", "numbers") for test in of.get(t, {}).get("failed", ())]
        mended = [
            f"* `{test}`, which passes since {commit}"
            for t in ("fast", "numbers")
            for test, commit in of.get(t, {}).get("mended", {}).items()
        ]
        lines += [f"Failed on {name} at first:", "", *mended, ""] if mended else []
        lines += (
            [f"Failed on {name}:", "", *(f"* `{test}`" for test in failed), ""] if failed else []
        )
    return "\n".join([*lines, describe("tests/versions.py"), ""])


if __name__ == "__main__":
    sys.exit(main())
