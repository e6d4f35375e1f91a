"""Published figures and real models next to their peers: `make results`.

    python benchmarks/results.py [--data FOLDER] [--model FOLDER] [--only STAGE ...] [--list]

Each stage writes its figures to a JSON file in runs/results; a stage whose file has the same
settings and inputs is skipped, so a second call continues where the first one ended. The last stage
writes docs/results.md with its plots, and the figures of README.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from results_common import (
    NO_PEERS,
    ResultsError,
    Setup,
    Stage,
    current_commit,
    read_record,
    stage_key,
    write_record,
)
from results_inputs import INPUTS, file_digest, find_inputs, write_tiny_inputs
from results_page import write_page
from results_stages import STAGES, prepare, tuning_sizes

NAMES = ("inputs", *(stage.name for stage in STAGES), "page")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with inputs, read before the cache")
    parser.add_argument("--model", help="folder of the model, instead of that of the Hub")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="STAGE", default=NAMES)
    parser.add_argument("--list", action="store_true", help="list stages, their state and minutes")
    parser.add_argument("--tiny", action="store_true", help="a random model, a few steps")
    parser.add_argument("--no_peers", action="store_true", help="measure the toolkit alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/results"), help="of the figures")
    parser.add_argument("--write", type=Path, default=Path("docs/results.md"))
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    args = parser.parse_args()
    if args.no_peers:
        os.environ[NO_PEERS] = "1"
    # A dry run has other rows, and must not replace the records of a measurement.
    folder = args.folder.absolute() / ("tiny" if args.tiny else "")
    folder.mkdir(parents=True, exist_ok=True)
    setup, missing = set_up(folder, args.data, args.model, args.tiny)
    if args.list:
        print(list_stages(setup))
        return 0
    wanted = [stage for stage in STAGES if stage.name in args.only]
    needed = {name for stage in wanted for name in stage.inputs}
    optional = {name for stage in wanted for name in stage.optional}
    for line in missing:
        name = line.partition(":")[0]
        if name in needed | optional or "inputs" in args.only:
            print(f"missing    {line}", file=sys.stderr)
    if needed - setup.inputs.keys():
        return 1
    try:
        run_stages(wanted, setup)
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 1
    if "page" in args.only:
        names = ("inputs", *(stage.name for stage in STAGES))
        records = {name: read_record(setup, name) for name in names}
        keys = all_keys(setup)
        for line in write_page(records, keys, current_commit(), args.write, args.readme):
            print(line)
    return 0


def set_up(
    folder: Path, data: Path | None, model: str | None, tiny: bool
) -> tuple[Setup, list[str]]:
    """Find the inputs and write the rows; return the setup and a line per missing input."""
    names = tuple(name for name in INPUTS if name != "nanogpt" or NO_PEERS not in os.environ)
    if tiny:
        # The tokenizer of the config knows 65 characters.
        letters = "".join(chr(code) for code in (*range(65, 91), *range(97, 123)))
        inputs = write_tiny_inputs(folder / "inputs", letters)
        files = {name: path for name, path in inputs.items() if path.is_file()}
        digests = {name: file_digest(path) for name, path in files.items() if name != "pairs"}
        # A test fetches nothing.
        peers = ("nanogpt",) if data and "nanogpt" in names else ()
        found, more, missing = find_inputs(data, None, peers)
        setup = Setup(folder, True, inputs | found, digests | more)
    else:
        inputs, digests, missing = find_inputs(data, model, names)
        setup = Setup(folder, False, inputs, digests)
    # Not measured, so without a key: the rows are written again by each call.
    figures = prepare(setup)
    write_record(setup, Stage("inputs", "the rows", prepare, tuning_sizes), "", figures, 0.0)
    return setup, missing


def run_stages(stages: list[Stage], setup: Setup) -> None:
    """Run the stages whose record is missing or of other settings or inputs.

    Raises:
        ResultsError: a stage failed; the message names it.
    """
    keys = all_keys(setup)
    for stage in stages:
        record = read_record(setup, stage.name)
        if record is not None and record["key"] == keys[stage.name]:
            print(f"{stage.name:<13}done at commit {record['commit']}, {record['date']}")
            reason = stage.peer_reason and stage.peer_reason(setup)
            if reason and not record["figures"].get("not_measured"):
                print(f"{stage.name:<13}the peer's figures are kept, because {reason}")
            continue
        stale = [
            name
            for name in stage.after
            if (read_record(setup, name) or {}).get("key") != keys[name]
        ]
        if stale:
            raise ResultsError(f"{stage.name}: run {', '.join(stale)} before (--only)")
        print(f"{stage.name:<13}{stage.title}", flush=True)
        begun = time.monotonic()
        try:
            figures = stage.run(setup)
        except ResultsError as error:
            raise ResultsError(f"{stage.name}: {error}") from error
        seconds = time.monotonic() - begun
        write_record(setup, stage, keys[stage.name], figures, seconds)
        if reason := figures.get("not_measured"):
            print(f"{stage.name:<13}the peer was not measured: {reason}")
        print(f"{stage.name:<13}{seconds / 60:.1f} minutes", flush=True)


def all_keys(setup: Setup) -> dict[str, str]:
    """Return the key of each stage; see `stage_key`."""
    keys: dict[str, str] = {}
    for stage in STAGES:
        keys[stage.name] = stage_key(stage, setup, keys)
    return keys


def list_stages(setup: Setup) -> str:
    """Format a line per stage: its name, its state, its minutes."""
    lines, keys = [], all_keys(setup)
    for stage in STAGES:
        record = read_record(setup, stage.name)
        lacking = [name for name in stage.inputs if name not in setup.inputs]
        minutes = f"about {stage.minutes:.0f} min"
        if record is not None and record["key"] == keys[stage.name]:
            state, minutes = f"done at {record['commit']}", f"{record['seconds'] / 60:.1f} min"
        elif lacking:
            state = f"missing input: {', '.join(lacking)}"
        else:
            state = "to run" if record is None else "to run again: other settings or inputs"
        lines.append(f"{stage.name:<12} {state:<28} {minutes:<14} {stage.title}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
