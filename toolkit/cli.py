"""The command line `toolkit`: parse arguments, call one function of the library, print its result.

Exit code 0 is success, 1 a failure with one line on stderr, 2 wrong usage. Each command imports the
libraries that it needs when it runs, so `toolkit --help` imports no torch.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import __version__, parsing, recipes
from toolkit.config import KINDS, MAX_SHARD_SIZE
from toolkit.config.other_tools import TOOL_CHOICES, TOOLKIT
from toolkit.errors import ConfigError, ExportError, ToolkitError

_RECIPES = tuple(kind.command for kind in KINDS)
_CONFIG_COMMANDS = ("plan", "rehearse", "inspect")  # commands that read a config, and take settings
_SETTINGS = "; settings may follow, as --section.field VALUE"
_TOP_LEVEL = ("--output_dir", "--seed")  # settings outside of a section
_TRUST_HELP = "run Python code that comes with the model, with your rights: read it first"
_MAX_LINES = 50  # to print of a long list, at its beginning and at its end


def main(argv: Sequence[str] | None = None) -> int:
    """Run a `toolkit` command and return its exit code.

    Args:
        argv: the arguments; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    try:
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        # The settings that follow a recipe are parsed by the recipe's own parser.
        if arguments[0] in _RECIPES:
            args = parser.parse_args(arguments[:1])
            args.arguments = arguments[1:]
            return args.run(args)
        settings: list[str] = []
        if arguments[0] in _CONFIG_COMMANDS:
            arguments, settings = split_settings(arguments)
        args = parser.parse_args(arguments)
        args.settings = settings
        return args.run(args)
    except SystemExit as stop:  # argparse has printed the help, the version or the error
        return stop.code if isinstance(stop.code, int) else 2
    except ToolkitError as error:
        return _fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader of the output has ended (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except KeyboardInterrupt:
        print("toolkit: interrupted", file=sys.stderr)
        return 130


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those of the command and settings of the run, in any order.

    A setting is `--section.field VALUE` or `--section.field=VALUE`.

    Returns:
        Arguments of the command, and settings.
    """
    command_arguments: list[str] = []
    settings: list[str] = []
    expects_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_setting = name.startswith("--") and ("." in name or name in _TOP_LEVEL)
        is_value = expects_value and not argument.startswith("--")
        (settings if is_setting or is_value else command_arguments).append(argument)
        expects_value = is_setting and not equals
    return command_arguments, settings


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands. Each sets `run`, called with the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="toolkit",
        description="Train models; inspect sharded checkpoints; export Hugging Face folders.",
        epilog="toolkit train CONFIG runs: accelerate launch recipes/pretrain.py --config CONFIG",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"toolkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable, help: str, description: str) -> Callable:
        name = run.__name__.removeprefix("_run_").replace("_", "-")
        sub = commands.add_parser(name, allow_abbrev=False, help=help, description=description)
        sub.set_defaults(run=run)
        return sub.add_argument

    for kind in KINDS:
        help_text = f"{kind.title}: check a config, then launch recipes/{kind.name}.py on it"
        sub = commands.add_parser(kind.command, allow_abbrev=False, help=help_text)
        sub.set_defaults(run=partial(_start_recipe, kind.name))
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
    _add_plan(command)
    _add_rehearse(command)
    _add_export_commands(command)
    _add_inspect(command)
    _add_report(command)
    add = command(
        _run_push,
        "publish an export on the Hugging Face Hub",
        "Verify an export and publish it on the Hugging Face Hub as one commit, in a private "
        "repository unless --public. The same command continues an interrupted push. The token "
        "comes from `hf auth login` or HF_TOKEN.",
    )
    add("folder", metavar="FOLDER", help="as `toolkit consolidate` wrote it")
    add("--repo_id", required=True, metavar="ORG/NAME", help="created if it is missing")
    add("--revision", metavar="R", help="branch, created if it is missing (default: main)")
    add("--public", action="store_true", help="create, or push to, a public repository")
    add("--dry_run", action="store_true", help="send nothing; print the files and the model card")
    add("--trust_remote_code", action="store_true", help=_TRUST_HELP)
    return parser


def _add_export_commands(command: Callable) -> None:
    """Add the subcommands `consolidate` and `verify` to the parser."""
    assets = (
        "config and tokenizer, if the checkpoint of another tool has none; for adapters: their "
        "base model"
    )
    add = command(
        _run_consolidate,
        "write a checkpoint as a Hugging Face folder",
        "Write a sharded checkpoint as a Hugging Face folder. One process, no GPU; the memory "
        "needed does not grow with the model.",
    )
    add("checkpoint", metavar="RUN_OR_CHECKPOINT", help="for a run: its newest checkpoint")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto (default): as in the checkpoint that training started from; "
        "after a random start, the config's",
    )
    size_help = "of one file, e.g. 500MB (default: %(default)s)"
    add("--max_shard_size", default=MAX_SHARD_SIZE, metavar="SIZE", help=size_help)
    add("--hf_assets", metavar="FOLDER_OR_ID", help=assets)
    add("--merge", action="store_true", help="merge an adapter checkpoint into its base")
    carried = "omit tensors of the source model that training does not use (MTP layers, towers)"
    add("--without_carried", action="store_true", help=carried)
    add("--trust_remote_code", action="store_true", help=_TRUST_HELP)

    add = command(
        _run_verify,
        "prove that a checkpoint is intact, and that an export holds its weights",
        "Prove that a checkpoint, every checkpoint of a run, or an export is intact. Given both, "
        "prove that the export holds exactly the weights of the checkpoint. Reads everything and "
        "changes nothing. Exit 1 if there is a finding; each is a line with file and tensor.",
    )
    add("path", metavar="RUN_OR_CHECKPOINT_OR_EXPORT")
    add("export", metavar="EXPORT", nargs="?", help="of that checkpoint")
    logits_help = (
        "also load the export with transformers and compare logits; needs the memory of the model"
    )
    add("--logits", action="store_true", help=logits_help)
    add("--trust_remote_code", action="store_true", help=_TRUST_HELP)
    add("--hf_assets", metavar="FOLDER_OR_ID", help=assets)
    add("--json", action="store_true", help="print one JSON object")


def _add_inspect(command: Callable) -> None:
    """Add the subcommand `inspect` to the parser."""
    add = command(
        _run_inspect,
        "show what a run or a checkpoint holds, its sharding, or what its data supervises",
        "Show what a run or a checkpoint holds (steps, bytes, dtypes, sharding). For a run that "
        "has not started: its FSDP2 units and dtypes (--plan), or the tokens that fine-tuning or "
        "preference tuning would supervise (--data). One process, no weights, no GPU.",
    )
    add("path", metavar="RUN_OR_CHECKPOINT", nargs="?")
    add("--plan", metavar="CONFIG", help=f"config of a recipe (YAML): its units{_SETTINGS}")
    add(
        "--data",
        metavar="CONFIG",
        help="config of recipes/finetune.py or recipes/prefer.py (YAML): samples and tokens of "
        "each source, what is supervised, which rows are skipped and why, and the first samples "
        "with the supervised text marked"
        f"{_SETTINGS}",
    )
    add(
        "--world_size",
        type=int,
        metavar="N",
        help="with --plan: number of processes (default: dp_replicate x dp_shard of the config)",
    )
    add("--json", action="store_true", help="print one JSON object")


def _add_report(command: Callable) -> None:
    """Add the subcommand `report` to the parser."""
    add = command(
        _run_report,
        "draw the logs of runs: one page for a browser and one picture",
        "Write report.html, one file that needs no network, and report.png for one or several "
        "runs: loss, learning rate, gradient norm, throughput, memory, settings, answers.",
    )
    add("runs", metavar="RUN", nargs="+", help="output_dir of a run; several are overlaid")
    add("--output", metavar="DIR", help="folder to write into (default: the first RUN)")
    add("--follow", action="store_true", help="write repeatedly until the runs have ended")
    seconds = "with --follow: SECONDS between two reports (default: %(default)s)"
    add("--every", type=_parse_seconds, default=15.0, metavar="SECONDS", help=seconds)


def _parse_seconds(text: str) -> float:
    """Parse a number of seconds; raise ValueError if it is not between 0.1 and a day."""
    if not 0.1 <= (value := float(text)) <= 86400:
        raise ValueError(text)
    return value


def _start_recipe(recipe: str, args: argparse.Namespace) -> int:
    """Run a command that starts a recipe, such as `toolkit train`; return its exit code."""
    return recipes.start_recipe(recipe, args.arguments)


def _run_recipes(args: argparse.Namespace) -> int:
    """Run `toolkit recipes`."""
    lines = recipes.describe_recipes()
    if args.copy is not None:
        files = recipes.copy_recipe(args.copy, Path.cwd())
        lines = [str(file.relative_to(Path.cwd())) for file in files]
    print("\n".join(lines))
    return 0


def _run_convert_config(args: argparse.Namespace) -> int:
    """Run `toolkit convert-config`."""
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


def _add_plan(command: Callable) -> None:
    """Add the subcommand `plan` to the parser."""
    add = command(
        _run_plan,
        "estimate what a run will need, and whether it fits, before it starts",
        "Estimate what a run of this config needs: memory of each device, traffic, time, disk. "
        "Needs config.json only. With --device_memory: check that it fits (exit 0 or 1) and, if "
        "it does not, list the cheapest changes that make it fit, each with its plan.",
    )
    add("config", metavar="CONFIG", nargs="?", help=f"config of a recipe (YAML){_SETTINGS}")
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
    longest = "find the longest sequence and the largest batch that fit; a few seconds per plan"
    add("--longest", action="store_true", help=longest)
    add("--json", action="store_true", help="print one JSON object")


def _run_plan(args: argparse.Namespace) -> int:
    """Run `toolkit plan`."""
    if (args.config is None) == (args.file is None):
        return _fail("give one config: CONFIG or --config FILE", code=2)
    from toolkit.parsing import parse_size

    memory = None if args.device_memory is None else parse_size(args.device_memory)
    if args.device_memory is not None and memory is None:
        return _fail(f"--device_memory {args.device_memory} is not a size; write 80GB", code=2)
    cfg, note = _load_planned(args.config or args.file, args.settings)
    from toolkit.planning import calibrate_by_run, calibrate_here, device_of, plan_run
    from toolkit.planning.fake_ranks import planned_ranks

    _silence_transformers()
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
    _print_note(note)
    return 0 if report.fits else 1


def _add_rehearse(command: Callable) -> None:
    """Add the subcommand `rehearse` to the parser."""
    add = command(
        _run_rehearse,
        "run every stage of a run on this machine's CPU with a small model, before the real run",
        "Run the recipe of a config on CPU processes, with a small model of the same kind, the "
        "real tokenizer and the first rows of the real data: load, train, save, kill, resume, "
        "export, verify, reload, generate. Also check that the real run has its packages, its "
        "output folder, its disk and its repository. Exit 1 if a stage fails.",
    )
    add("config", metavar="CONFIG", nargs="?", help=f"config of a recipe (YAML){_SETTINGS}")
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
    """Run `toolkit rehearse`."""
    if (args.config is None) == (args.file is None):
        return _fail("give one config: CONFIG or --config FILE", code=2)
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
        return _fail(f"{result.failed.stage} failed: {result.failed.said}")
    return 0


def _load_planned(file: str, settings: Sequence[str]) -> tuple[Any, str | None]:
    """Read a config for planning, with rank and targets of the adapter in `lora.from`.

    Returns:
        The config, and a note on how its kind was chosen, for `_print_note`.
    """
    from toolkit.planning import with_known_shape

    _, cfg, note = recipes.load_config(file, settings)
    # A gated model may have no config.json here, but a shape that ships with the toolkit.
    cfg, shape_note = with_known_shape(cfg)
    _print_note(shape_note)
    if getattr(getattr(cfg, "lora", None), "from_", None) is None:
        return cfg, note
    from toolkit.checkpoint import apply_adapter_settings

    return apply_adapter_settings(cfg), note


def _print_note(note: str | None) -> None:
    """Print a note to stderr. Call it after the result, because a failure is one line on stderr."""
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)


def _run_consolidate(args: argparse.Namespace) -> int:
    """Run `toolkit consolidate`."""
    from toolkit.checkpoint import local_copy
    from toolkit.export import consolidate

    _silence_transformers()
    _allow_remote_code(args)
    names = ("dtype", "max_shard_size", "hf_assets", "merge", "without_carried")
    with local_copy(args.checkpoint) as source:
        folder = consolidate(source, args.output, **{name: getattr(args, name) for name in names})
    sizes = {file.name: file.stat().st_size for file in Path(folder).iterdir()}
    weights = sum(name.endswith(".safetensors") for name in sizes)
    print(f"{folder}: {len(sizes)} files ({weights} with weights), {sum(sizes.values()):,} bytes")
    print("load it with:")
    for line in _loading_code(Path(folder)):
        print(f"    {line}")
    return 0


def _loading_code(folder: Path) -> Iterator[str]:
    """Yield the lines of Python code that load an export, to show to the user."""
    from toolkit.formats import export_manifest, read_config
    from toolkit.models.classes import auto_class_name, reward_loading_code

    unmerged = (folder / "adapter_config.json").is_file()
    adapter = export_manifest.read(folder)["origin"]["adapter"] if unmerged else {}
    config = adapter["base_config"] if unmerged else read_config(folder)
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    class_name = adapter["base_class"] if unmerged else (config.get("architectures") or [""])[0]
    auto = auto_class_name(class_name)
    options, next_line = reward_loading_code(auto, config) if unmerged else ("", "")
    code += options
    load = f"transformers.{auto}.from_pretrained({{!r}}{code})"
    if not unmerged:
        yield load.format(str(folder))
        return
    settings = parsing.read_json(folder / "adapter_config.json", ExportError)
    yield f"base = {load.format(settings['base_model_name_or_path'])}"
    if rows := adapter["base"].get("rows"):
        yield f"base.resize_token_embeddings({rows})"
    if next_line:
        yield next_line
    yield f"peft.PeftModel.from_pretrained(base, {str(folder)!r})"


def _run_verify(args: argparse.Namespace) -> int:
    """Run `toolkit verify`."""
    from toolkit.checkpoint import local_copy
    from toolkit.verify import is_export, verify_checkpoint, verify_export

    _allow_remote_code(args)
    with local_copy(args.path) as path:
        if args.export is not None or is_export(path):
            _silence_transformers(progress=False)
        if args.export is not None:
            report = verify_export(path, args.export, logits=args.logits, hf_assets=args.hf_assets)
        elif is_export(path):
            report = verify_export(None, path, logits=args.logits, hf_assets=args.hf_assets)
        elif args.hf_assets is not None:
            return _fail("--hf_assets needs an EXPORT", code=2)
        elif args.logits:
            return _fail("--logits needs an EXPORT", code=2)
        else:
            report = verify_checkpoint(path)
    lines = [json.dumps(report.summary())] if args.json else report.lines()
    if len(lines) > 2 * _MAX_LINES:
        lines[_MAX_LINES:-_MAX_LINES] = [
            f"... {len(lines) - 2 * _MAX_LINES} more; --json lists all"
        ]
    print("\n".join(lines), flush=True)
    return 0 if report.ok else 1


def _run_inspect(args: argparse.Namespace) -> int:
    """Run `toolkit inspect`."""
    if [args.path, args.plan, args.data].count(None) != 2:
        return _fail("give one of RUN_OR_CHECKPOINT, --plan CONFIG and --data CONFIG", code=2)
    if args.settings and args.path is not None:
        return _fail(f"{args.settings[0]} needs --plan CONFIG or --data CONFIG", code=2)
    if args.world_size is not None and args.plan is None:
        return _fail("--world_size needs --plan CONFIG", code=2)
    from toolkit import config

    render: Callable[[dict], str]
    note = None
    if args.plan is not None:
        from toolkit.planning.report import format_units, summarise_units

        cfg, note = _load_planned(args.plan, args.settings)
        facts = summarise_units(cfg, args.world_size)
        render = format_units
    elif args.data is not None:
        from toolkit.data.prepare import inspect_data
        from toolkit.data.report import render_report as render

        _silence_transformers()
        kind, cfg, _ = recipes.load_config(args.data, args.settings, remote=True)
        if not issubclass(kind.config, config.FinetuneConfig):  # read rows as fine-tuning would
            kind = recipes.find_kind("finetune")
            cfg = config.load(kind.config, args.data, args.settings)
        facts = inspect_data(cfg)
    else:
        from toolkit.checkpoint import local_copy
        from toolkit.checkpoint.summary import format_summary, summarize

        with local_copy(args.path) as path:
            facts = summarize(path)
        render = format_summary
    if args.json:
        print(json.dumps(facts), flush=True)
    else:
        from toolkit import ranks

        ranks.print_line(render(facts))
    if args.data is not None and not args.json:
        title = f"read as a config of {kind.title}"
        print(f"\npacking {facts['packing']}: {facts['why']} ({title})")
    _print_note(note)
    return 0


def _run_report(args: argparse.Namespace) -> int:
    """Run `toolkit report`."""
    from toolkit.report import follow, write_report

    if args.follow:
        print("following the runs; Ctrl-C stops", flush=True)
        page, picture, notes = follow(args.runs, args.output, args.every)
    else:
        page, picture, notes = write_report(args.runs, args.output)
    print(*(f"note: {note}" for note in notes), page, picture, sep="\n")
    return 0


def _run_push(args: argparse.Namespace) -> int:
    """Run `toolkit push`."""
    from toolkit.hub import preview, push

    _silence_transformers()
    _allow_remote_code(args)
    options: dict[str, Any] = {"revision": args.revision, "private": not args.public}
    if not args.dry_run:
        print(push(args.folder, args.repo_id, **options))
        return 0
    changes = preview(args.folder, args.repo_id, **options)
    for title, files in (("send", changes.send), ("there already", changes.same)):
        print(f"{title}: {len(files)} files, {sum(files.values()):,} bytes")
        for name, size in sorted(files.items()):
            print(f"    {size:>15,}  {name}")
    print(f"delete: {len(changes.delete)} files", *changes.delete, sep="\n    ")
    for note in changes.notes:
        print(f"note: {note}")
    print(f"README.md:\n\n{changes.card}", end="")
    return 0


def _allow_remote_code(args: argparse.Namespace) -> None:
    """Allow Python code that comes with a model if `--trust_remote_code` was given."""
    if args.trust_remote_code:
        from toolkit.models import allow_remote_code

        allow_remote_code()


def _silence_transformers(progress: bool = True) -> None:
    """Silence warnings of transformers, and its progress bars too if `progress` is False."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()


def _fail(message: str, code: int = 1) -> int:
    """Print an error on one line of stderr, and return the exit code `code`."""
    print(f"toolkit: error: {' '.join(message.split())}", file=sys.stderr)
    return code
