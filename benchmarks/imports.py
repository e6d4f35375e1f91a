"""CPU seconds that each command takes until it begins its work, and the libraries it has imported.

    python benchmarks/imports.py [--repeats 3] [--output FILE]

Each command runs in a process of its own, up to the call of the library function that does its
work: interpreter, imports, and the parsing of arguments. CPU seconds of one thread, so that other
processes on the machine change them little; the median of the repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "plotly", "matplotlib")
CONFIG = str(ROOT / "recipes/configs/pretrain_tiny.yaml")
COMMANDS = {
    # Title: arguments, with {run} for an empty folder, and the function at which the clock stops.
    "--help": (["--help"], None),
    "train CONFIG": (["train", CONFIG, "--output_dir", "{run}/new"], "toolkit.recipes:_launch"),
    "verify RUN": (["verify", "{run}"], "toolkit.verify.verification:verify_checkpoint"),
    "report RUN": (["report", "{run}"], "toolkit.report.writing:read_runs"),
    "inspect RUN": (["inspect", "{run}"], "toolkit.checkpoint.summary:summarise"),
    "verify RUN EXPORT": (
        ["verify", "{run}", "{run}"],
        "toolkit.verify.export:run_checks",
    ),
    "consolidate RUN": (
        ["consolidate", "{run}", "--output", "{run}/out"],
        "toolkit.export.consolidation:consolidate",
    ),
    "push FOLDER": (["push", "{run}", "--repo_id", "org/name"], "toolkit.hub.upload:push"),
    "inspect --plan CONFIG": (
        ["inspect", "--plan", CONFIG],
        "toolkit.planning.report:summarise_units",
    ),
    "plan CONFIG": (["plan", CONFIG], "toolkit.planning.report:plan_run"),
}
PROGRAM = """
import importlib.util, json, os, sys, time
libraries, stop, *arguments = sys.argv[1:]

def report_and_exit(*_, **__):
    loaded = [name for name in libraries.split(",") if name in sys.modules]
    print(json.dumps({"seconds": time.process_time(), "loaded": loaded}), file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)

if stop:
    # Replace the function in its module as soon as that module is loaded, not before.
    name, _, function = stop.partition(":")
    class Loader:
        def find_spec(self, fullname, path=None, target=None):
            if fullname != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            execute = spec.loader.exec_module
            def exec_module(module):
                execute(module)
                setattr(module, function, report_and_exit)
            spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Loader())
from toolkit import cli
cli.main(arguments)
report_and_exit()
"""


def main() -> None:
    """Measure every command, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    default = ROOT / "docs/evidence/benchmarks/imports.md"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        (run / "checkpoints").mkdir(parents=True)
        for title, (arguments, stop) in COMMANDS.items():
            arguments = [argument.format(run=run) for argument in arguments]
            lines.append(measure(title, arguments, stop, args.repeats))
    text = report(lines)
    args.output.write_text(text, "utf-8")
    print(text)


def measure(title: str, arguments: list[str], stop: str | None, repeats: int) -> str:
    """Return the table row of one command."""
    command = [sys.executable, "-c", PROGRAM, ",".join(LIBRARIES), stop or "", *arguments]
    measured = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        measured.append(json.loads(done.stderr.splitlines()[-1]))
    seconds = statistics.median(one["seconds"] for one in measured)
    loaded = ", ".join(measured[0]["loaded"]) or "none of these"
    return f"| `toolkit {title}` | {seconds:.2f} | {loaded} |"


def report(lines: list[str]) -> str:
    """Return the page: the table, and what measured it."""
    return "\n".join(
        [
            "# What a command imports before it begins",
            "",
            "CPU seconds of a fresh process from its start to the first call of the function that "
            "does the command's work, and which of "
            f"{', '.join(LIBRARIES)} it has imported by then. `accelerate` is imported by "
            "transformers.",
            "",
            "| command | CPU s | imported |",
            "|---|---|---|",
            *lines,
            "",
            describe("imports.py", "torch", "transformers", "peft"),
            "",
        ]
    )


if __name__ == "__main__":
    main()
