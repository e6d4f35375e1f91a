"""Commands before a run: recipes, schema, convert-config, plan, rehearse."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from toolkit import recipes
from toolkit.cli.common import (
    SETTINGS_HELP,
    AddCommand,
    fail,
    load_planned,
    print_note,
    silence_transformers,
)
from toolkit.config.other_tools import TOOL_CHOICES, TOOLKIT


def add_commands(command: AddCommand) -> None:
    """Add `recipes`, `convert-config`, `schema`, `plan` and `rehearse` to the parser."""
    add = command(
        _run_recipes,
        "list the recipes, or copy one into this folder to edit it",
        "List the recipes and the Accelerate YAMLs, or copy a recipe, the configs and the YAMLs "
        "into the current folder, where you can edit them.",
    )
    add("--copy", metavar="NAME", help=" or ".join(recipes.NAMES))
    add = command(
        _run_convert_config,
        "turn a config of another tool into one of this toolkit",
        "Turn a config of axolotl, LLaMA-Factory, ms-swift, open-instruct, OpenRLHF, torchtune, "
        "TRL or Trainer into a YAML of `toolkit finetune` or `toolkit prefer`. Python scripts "
        "(also of Unsloth) and shell scripts are read, but not run. Each key that is dropped, or "
        "has another meaning here, is reported on stderr. A config that would train differently "
        "is refused.",
    )
    add("file", metavar="FILE", help="YAML, JSON, Python or shell script")
    tools = f"one of {', '.join(TOOL_CHOICES)} (default: recognised by the keys)"
    add("--from", dest="tool", choices=TOOL_CHOICES, metavar="TOOL", help=tools)
    add("--output", metavar="OUT.yaml", help="file to create (default: stdout)")
    add = command(
        _run_schema,
        "print the JSON schema of a kind's config, for editors",
        "Print the JSON schema of the settings of a kind of run. An editor with a YAML language "
        "server completes and checks a config whose first line is "
        "`# yaml-language-server: $schema=FILE`.",
    )
    add("kind", metavar="KIND", help=f"{', '.join(recipes.NAMES)}, or one of your own")
    _add_plan(command)
    _add_rehearse(command)


def _run_recipes(args: argparse.Namespace) -> int:
    """Run `toolkit recipes`: list the recipes, or copy one and print the new files."""
    lines = recipes.describe_recipes()
    if args.copy is not None:
        files = recipes.copy_recipe(args.copy, Path.cwd())
        lines = [str(file.relative_to(Path.cwd())) for file in files]
    print("\n".join(lines))
    return 0


def _run_convert_config(args: argparse.Namespace) -> int:
    """Run `toolkit convert-config`: write the config to `--output` (a new file) or stdout.

    Notes on the conversion go to stderr.
    """
    from toolkit.convert import convert_config

    converted = convert_config(Path(args.file), args.tool)
    for note in converted.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.output is None:
        print(converted.text, end="", flush=True)
        return 0
    with open(args.output, "x", encoding="utf-8") as file:
        file.write(converted.text)
    print(args.output)
    if converted.tool == TOOLKIT:
        return 0
    start = f"toolkit {converted.recipe} {args.output} --accelerate_config one_node"
    inspection = f"toolkit inspect --data {args.output}"
    print(f"next: {inspection}   (which tokens of the data are supervised)", file=sys.stderr)
    print(f"then: {start}", file=sys.stderr)
    return 0


def _run_schema(args: argparse.Namespace) -> int:
    """Run `toolkit schema`: print the JSON schema of a kind's config."""
    from toolkit.config.schema import json_schema

    print(json.dumps(json_schema(recipes.find_kind(args.kind).config), indent=2))
    return 0


def _add_plan(command: AddCommand) -> None:
    """Add the subcommand `plan` to the parser."""
    add = command(
        _run_plan,
        "estimate what a run will need, and whether it fits, before it starts",
        "Estimate what a run of this config needs: memory of each device, traffic, time, disk. "
        "Needs config.json only. With --device_memory: check that it fits (exit 0 or 1) and, if "
        "it does not, list the cheapest changes that make it fit, each with its plan.",
    )
    add("config", metavar="CONFIG", nargs="?", help=f"config of a recipe (YAML){SETTINGS_HELP}")
    add("--config", dest="file", metavar="FILE", help="the same")
    ranks_help = "number of processes (default: dp_replicate x dp_shard of the config)"
    add("--world_size", type=int, metavar="N", help=ranks_help)
    add(
        "--device_memory", metavar="SIZE", help="of one device, such as 80GB (default: of --device)"
    )
    add(
        "--device",
        metavar="NAME",
        help="device for the estimate of time: a100-40gb, a100-80gb, h100, h100-pcie, h200, "
        "b200, l40s, rtx4090, mi300x, cpu, or a YAML file (default: h100, for the time alone)",
    )
    add(
        "--calibrate",
        metavar="RUN",
        nargs="?",
        const="",
        help="correct this and later plans of such a model by the measurements of RUN or, without "
        "RUN, of a step of CONFIG on this machine's device; stored in XDG_CACHE_HOME/toolkit",
    )
    add("--sweep", action="store_true", help="compare meshes and recomputation")
    longest = "find the longest sequence and the largest batch that fit; makes 4 to 8 plans"
    add("--longest", action="store_true", help=longest)
    add("--json", action="store_true", help="print one JSON object")


def _run_plan(args: argparse.Namespace) -> int:
    """Run `toolkit plan`: print the plan; return 0 if the run fits, 1 if not, 2 for wrong usage."""
    if (args.config is None) == (args.file is None):
        return fail("give one config: CONFIG or --config FILE", code=2)
    from toolkit.parsing import parse_size

    memory = None if args.device_memory is None else parse_size(args.device_memory)
    if args.device_memory is not None and memory is None:
        return fail(f"--device_memory {args.device_memory} is not a size; write 80GB", code=2)
    cfg, note = load_planned(args.config or args.file, args.settings)
    from toolkit.planning import calibrate_by_run, calibrate_here, device_of, plan_run
    from toolkit.planning.fake_ranks import planned_ranks

    silence_transformers()
    if args.calibrate == "":
        world = planned_ranks(cfg.sharding, args.world_size)
        device = calibrate_here(cfg, world, args.device)
    elif args.calibrate is not None:
        run = Path(args.calibrate)
        _, recorded, _ = recipes.load_config(run / "config.yaml")
        device = calibrate_by_run(run, recorded, args.device)
    else:
        device = device_of(args.device or "h100")
    if memory is None and args.device is not None:
        memory = int(device.memory)
    report = plan_run(cfg, args.world_size, device, memory, sweep=args.sweep, sizes=args.longest)
    print(json.dumps(report.summary()) if args.json else report.text(), flush=True)
    print_note(note)
    return 0 if report.fits else 1


def _add_rehearse(command: AddCommand) -> None:
    """Add the subcommand `rehearse` to the parser."""
    add = command(
        _run_rehearse,
        "run every stage of a run on this machine's CPU with a small model, before the real run",
        "Run the recipe of a config on CPU processes, with a small model of the same kind, the "
        "real tokenizer and the first rows of the real data: load, train, save, kill, resume, "
        "export, verify, reload, generate. Also check that the real run has its packages, its "
        "output folder, its disk and its repository. Exit 1 if a stage fails.",
    )
    add("config", metavar="CONFIG", nargs="?", help=f"config of a recipe (YAML){SETTINGS_HELP}")
    add("--config", dest="file", metavar="FILE", help="the same")
    add("--world_size", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add(
        "--recipe",
        metavar="NAME",
        help=f"{', '.join(recipes.NAMES)}, or one of your own (default: as the config shows)",
    )
    skip_help = "skip packages, output, hub or disk, if the run is on another machine"
    add("--skip", action="append", default=[], metavar="STAGE", help=skip_help)
    share = "of the rows may be longer than data.sequence_length (default: %(default)s)"
    add("--most_too_long", type=float, default=0.5, metavar="SHARE", help=f"SHARE {share}")
    add("--keep", action="store_true", help="keep the working folder even if every stage succeeds")
    add("--json", action="store_true", help="print one JSON object")


def _run_rehearse(args: argparse.Namespace) -> int:
    """Run `toolkit rehearse`: print the result; return 1 if a stage failed, 2 for wrong usage."""
    if (args.config is None) == (args.file is None):
        return fail("give one config: CONFIG or --config FILE", code=2)
    from toolkit.rehearsal import rehearse

    result = rehearse(
        args.config or args.file,
        args.world_size,
        settings=args.settings,
        recipe=args.recipe,
        skip=args.skip,
        most_too_long=args.most_too_long,
        keep=args.keep,
        show=(lambda line: None) if args.json else partial(print, flush=True),
    )
    print(json.dumps(result.summary()) if args.json else result.text(), flush=True)
    if result.failed is not None:
        return fail(f"{result.failed.stage} failed: {result.failed.said}")
    return 0
