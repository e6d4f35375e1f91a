"""The command line `toolkit`: arguments in, one call of the library, exit code out.

Exit 0 on success, 1 on a failure with one line on stderr, 2 on wrong usage. Imports no torch before
a subcommand needs it.
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
_CONFIGURED = ("plan", "rehearse", "inspect")  # commands that read a config, and take settings
_SETTINGS = "; settings may follow, as --section.field VALUE"
_TOP = ("--output_dir", "--seed")  # settings outside of a section
_CODE = "run Python code that comes with the model: with your rights, so read it first"
_SHOWN = 50  # lines of a long list, at its beginning and at its end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own by default); return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    try:
        if not given:
            parser.print_help(sys.stderr)
            return 2
        # What follows a recipe is settings, which argparse does not know.
        if given[0] in _RECIPES:
            args = parser.parse_args(given[:1])
            args.arguments = given[1:]
            return args.run(args)
        own, settings = split_settings(given) if given[0] in _CONFIGURED else (list(given), [])
        args = parser.parse_args(own)
        args.settings = settings
        return args.run(args)
    except SystemExit as stop:  # argparse has printed the help, the version or what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    except ToolkitError as error:
        return _fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader of our output has seen enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except KeyboardInterrupt:
        print("toolkit: interrupted", file=sys.stderr)
        return 130


def split_settings(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what a command's own parser takes, and the settings of a run: `--section.field VALUE`
    or `--section.field=VALUE`, wherever they stand.
    """
    own, settings = list[str](), list[str]()
    taken = False  # whether a value follows
    for argument in given:
        name, equals, _ = argument.partition("=")
        is_setting = name.startswith("--") and ("." in name or name in _TOP)
        (settings if is_setting or (taken and not argument.startswith("--")) else own).append(
            argument
        )
        taken = is_setting and not equals
    return own, settings


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolkit",
        description="Train; look into sharded checkpoints; turn them into Hugging Face folders.",
        epilog="toolkit train CONFIG is: accelerate launch recipes/pretrain.py --config CONFIG",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"toolkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable, help: str, description: str) -> Callable:
        name = run.__name__.lstrip("_").replace("_", "-")
        sub = commands.add_parser(name, allow_abbrev=False, help=help, description=description)
        sub.set_defaults(run=run)
        return sub.add_argument

    for kind in KINDS:
        help_text = f"{kind.title}: check a config, then launch recipes/{kind.name}.py on it"
        sub = commands.add_parser(kind.command, allow_abbrev=False, help=help_text)
        sub.set_defaults(run=partial(_start, kind.name))
    add = command(
        _recipes,
        "list the recipes, or copy one into this folder to edit it",
        "List the recipes and the Accelerate YAMLs, or copy a recipe, the configs and the YAMLs "
        "into the current folder, to be edited.",
    )
    add("--copy", metavar="NAME", help=" or ".join(recipes.NAMES))
    add = command(
        _convert_config,
        "turn a config of another tool into one of this toolkit",
        "Turn a config of axolotl, LLaMA-Factory, ms-swift, open-instruct, OpenRLHF, torchtune, "
        "TRL or Trainer into a YAML of `toolkit finetune` or `toolkit prefer`. Python scripts "
        "(also of Unsloth) and shell scripts are read and not run. Each key that is not carried "
        "over, or means something else here, is named on stderr. A config that would become "
        "another training is refused.",
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
        _push,
        "publish an export on the Hugging Face Hub",
        "Publish an export on the Hugging Face Hub as one commit: verified first, private unless "
        "--public. Interrupted, the same command goes on where it stopped. The token comes from "
        "`hf auth login` or HF_TOKEN.",
    )
    add("folder", metavar="FOLDER", help="as `toolkit consolidate` wrote it")
    add("--repo_id", required=True, metavar="ORG/NAME", help="created when there is none")
    add("--revision", metavar="R", help="branch, created when missing (default: main)")
    add("--public", action="store_true", help="create, or push to, a public repository")
    add("--dry_run", action="store_true", help="send nothing; show the files and the model card")
    add("--trust_remote_code", action="store_true", help=_CODE)
    return parser


def _add_export_commands(command: Callable) -> None:
    assets = (
        "config and tokenizer, where the checkpoint of another tool has none; of adapters: where "
        "their base is"
    )
    add = command(
        _consolidate,
        "write a checkpoint as a Hugging Face folder",
        "Write a sharded checkpoint as a Hugging Face folder. One process, no GPU; the memory "
        "needed does not grow with the model.",
    )
    add("checkpoint", metavar="RUN_OR_CHECKPOINT", help="a run: its newest checkpoint")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto: as in the checkpoint that training started from (default), for "
        "a random start the config's",
    )
    size_help = "of one file, e.g. 500MB (default: %(default)s)"
    add("--max_shard_size", default=MAX_SHARD_SIZE, metavar="SIZE", help=size_help)
    add("--hf_assets", metavar="FOLDER_OR_ID", help=assets)
    add("--merge", action="store_true", help="merge an adapter checkpoint into its base")
    carried = "leave out what the source model holds and no training changes (MTP layers, towers)"
    add("--without_carried", action="store_true", help=carried)
    add("--trust_remote_code", action="store_true", help=_CODE)

    add = command(
        _verify,
        "prove that a checkpoint is intact, and that an export holds its weights",
        "Prove that a checkpoint (of a run: every one) or an export is intact, and, given both, "
        "that the export holds exactly the weights of the checkpoint. Reads everything and changes "
        "nothing. Exit 1 where something is wrong: a line each, with the file and the tensor.",
    )
    add("path", metavar="RUN_OR_CHECKPOINT_OR_EXPORT")
    add("export", metavar="EXPORT", nargs="?", help="of that checkpoint")
    logits_help = "also load the export with transformers and compute with it; needs its memory"
    add("--logits", action="store_true", help=logits_help)
    add("--trust_remote_code", action="store_true", help=_CODE)
    add("--hf_assets", metavar="FOLDER_OR_ID", help=assets)
    add("--json", action="store_true", help="print one JSON object")


def _add_inspect(command: Callable) -> None:
    add = command(
        _inspect,
        "show what a run or a checkpoint holds, how a run would be sharded, what it learns",
        "Show what a run or a checkpoint holds (steps, bytes, dtypes, sharding); or, of a run that "
        "has not begun, its FSDP2 units and dtypes (--plan), or what fine-tuning or preference "
        "tuning would supervise in its data (--data). One process, no weights, no GPU.",
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
    add = command(
        _report,
        "draw what runs logged: one page for a browser and one picture",
        "Write report.html, one file that needs no network, and report.png of one or several runs: "
        "loss, learning rate, gradient norm, throughput, memory; settings, versions, answers.",
    )
    add("runs", metavar="RUN", nargs="+", help="output_dir of a run; several are overlaid")
    add("--output", metavar="DIR", help="folder to write into (default: the first RUN)")
    add("--follow", action="store_true", help="write again and again until the runs are done")
    seconds = "with --follow: SECONDS between two writings (default: %(default)s)"
    add("--every", type=_seconds, default=15.0, metavar="SECONDS", help=seconds)


def _seconds(text: str) -> float:
    if not 0.1 <= (value := float(text)) <= 86400:
        raise ValueError(text)
    return value


def _start(recipe: str, args: argparse.Namespace) -> int:
    return recipes.start(recipe, args.arguments)


def _recipes(args: argparse.Namespace) -> int:
    lines = recipes.describe()
    if args.copy is not None:
        files = recipes.copy(args.copy, Path.cwd())
        lines = [str(file.relative_to(Path.cwd())) for file in files]
    print("\n".join(lines))
    return 0


def _convert_config(args: argparse.Namespace) -> int:
    from toolkit.convert import convert_config

    out = convert_config(Path(args.file), args.tool)
    for note in out.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.output is None:
        print(out.text, end="", flush=True)
        return 0
    with open(args.output, "x", encoding="utf-8") as file:
        file.write(out.text)
    print(args.output)
    if out.tool == TOOLKIT:
        return 0
    data = f"next: toolkit inspect --data {args.output}   (what is learned of the data)"
    print(data, file=sys.stderr)
    print(f"then: toolkit {out.recipe} {args.output} --accelerate_config one_node", file=sys.stderr)
    return 0


def _add_plan(command: Callable) -> None:
    add = command(
        _plan,
        "say what a run will take, and whether it fits, before it is begun",
        "Say what a run of this config will take: memory of each device, traffic, time, disk. "
        "Needs config.json only. With --device_memory: whether it fits (exit 0 or 1) and, "
        "where it does not, the cheapest changes that make it fit, each planned anew.",
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
        help="whose figures the time is estimated by: a100-40gb, a100-80gb, h100, h100-pcie, h200, "
        "b200, l40s, rtx4090, mi300x, cpu, or a YAML file (default: h100, for the time alone)",
    )
    add(
        "--calibrate",
        metavar="RUN",
        nargs="?",
        const="",
        help="correct this and later plans of such a model by what RUN measured, or, without RUN, "
        "by a step of CONFIG on this machine's device; kept in XDG_CACHE_HOME/toolkit",
    )
    add("--sweep", action="store_true", help="compare meshes and recomputation")
    longest = "find the longest sequence and the largest batch that fit: some seconds for each plan"
    add("--longest", action="store_true", help=longest)
    add("--json", action="store_true", help="print one JSON object")


def _plan(args: argparse.Namespace) -> int:
    if (args.config is None) == (args.file is None):
        return _fail("give one config: CONFIG or --config FILE", code=2)
    from toolkit.parsing import parse_size

    memory = None if args.device_memory is None else parse_size(args.device_memory)
    if args.device_memory is not None and memory is None:
        return _fail(f"--device_memory {args.device_memory} is not a size; write 80GB", code=2)
    cfg, note = _load_planned(args.config or args.file, args.settings)
    from toolkit.planning import calibrate_by_run, calibrate_here, device_of, plan_run
    from toolkit.planning.fake_ranks import planned_ranks

    _quiet()
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
    add = command(
        _rehearse,
        "live the whole life of a run in small on this machine's CPU, before the run",
        "Run the recipe of a config on CPU processes, with a small model of the same kind, the "
        "real tokenizer and the first rows of the real data: load, train, save, kill, resume, "
        "export, verify, reload, generate; and ask whether the real run has its packages, its "
        "output folder, its disk and its repository. Exit 1 where a stage fails.",
    )
    add("config", metavar="CONFIG", nargs="?", help=f"config of a recipe (YAML){_SETTINGS}")
    add("--config", dest="file", metavar="FILE", help="the same")
    add("--world_size", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add(
        "--recipe",
        metavar="NAME",
        help=f"{', '.join(recipes.NAMES)}, or one of your own (default: as the config shows)",
    )
    skip_help = "leave out packages, output, hub or disk, where this machine is not the run's"
    add("--skip", action="append", default=[], metavar="STAGE", help=skip_help)
    share = "of the rows may be longer than data.sequence_length (default: %(default)s)"
    add("--most_too_long", type=float, default=0.5, metavar="SHARE", help=f"SHARE {share}")
    add("--keep", action="store_true", help="keep the working folder also where all went well")
    add("--json", action="store_true", help="print one JSON object")


def _rehearse(args: argparse.Namespace) -> int:
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
    """Read the config that is to be planned, with the rank and targets of `lora.from`.

    Returns:
        The config, and a note on how its kind was chosen, for `_print_note`.
    """
    _, cfg, note = recipes.load_config(file, settings)
    cfg = _known_shape(cfg)
    if getattr(getattr(cfg, "lora", None), "from_", None) is None:
        return cfg, note
    from toolkit.checkpoint import apply_adapter_settings

    return apply_adapter_settings(cfg), note


def _print_note(note: str | None) -> None:
    """Print a note after the result: a failure is one line on stderr."""
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)


def _known_shape(cfg: Any) -> Any:
    """Return `cfg` with the shape that came with the toolkit, where the Hub gives none."""
    from toolkit.planning import with_known_shape

    found, note = with_known_shape(cfg)
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)
    return found


def _consolidate(args: argparse.Namespace) -> int:
    from toolkit.checkpoint import local_copy
    from toolkit.export import consolidate

    _quiet()
    _trust(args)
    names = ("dtype", "max_shard_size", "hf_assets", "merge", "without_carried")
    with local_copy(args.checkpoint) as source:
        folder = consolidate(source, args.output, **{name: getattr(args, name) for name in names})
    sizes = {file.name: file.stat().st_size for file in Path(folder).iterdir()}
    weights = sum(name.endswith(".safetensors") for name in sizes)
    print(f"{folder}: {len(sizes)} files ({weights} with weights), {sum(sizes.values()):,} bytes")
    print("load it with:")
    for line in _how_to_load(Path(folder)):
        print(f"    {line}")
    return 0


def _how_to_load(folder: Path) -> Iterator[str]:
    """Yield the Python lines that load an export."""
    from toolkit.formats import export_manifest, read_config
    from toolkit.models.classes import auto_class_name, reward_loading_code

    unmerged = (folder / "adapter_config.json").is_file()
    adapter = export_manifest.read(folder)["origin"]["adapter"] if unmerged else {}
    config = adapter["base_config"] if unmerged else read_config(folder)
    code = ", trust_remote_code=True" if "auto_map" in config else ""
    named = adapter["base_class"] if unmerged else (config.get("architectures") or [""])[0]
    auto = auto_class_name(named)
    more, after = reward_loading_code(auto, config) if unmerged else ("", "")
    code += more
    load = f"transformers.{auto}.from_pretrained({{!r}}{code})"
    if not unmerged:
        yield load.format(str(folder))
        return
    settings = parsing.read_json(folder / "adapter_config.json", ExportError)
    yield f"base = {load.format(settings['base_model_name_or_path'])}"
    if rows := adapter["base"].get("rows"):
        yield f"base.resize_token_embeddings({rows})"
    if after:
        yield after
    yield f"peft.PeftModel.from_pretrained(base, {str(folder)!r})"


def _verify(args: argparse.Namespace) -> int:
    from toolkit.checkpoint import local_copy
    from toolkit.verify import is_export, verify_checkpoint, verify_export

    _trust(args)
    with local_copy(args.path) as path:
        if args.export is not None or is_export(path):
            _quiet(progress=False)
        if args.export is not None:
            report = verify_export(path, args.export, logits=args.logits, hf_assets=args.hf_assets)
        elif is_export(path):
            report = verify_export(None, path, logits=args.logits, hf_assets=args.hf_assets)
        elif args.hf_assets is not None:
            return _fail("--hf_assets goes with an EXPORT", code=2)
        elif args.logits:
            return _fail("--logits needs an EXPORT: a checkpoint alone computes nothing", code=2)
        else:
            report = verify_checkpoint(path)
    lines = [json.dumps(report.summary())] if args.json else report.lines()
    if len(lines) > 2 * _SHOWN:
        lines[_SHOWN:-_SHOWN] = [f"... {len(lines) - 2 * _SHOWN} more; --json lists all"]
    print("\n".join(lines), flush=True)
    return 0 if report.ok else 1


def _inspect(args: argparse.Namespace) -> int:
    if [args.path, args.plan, args.data].count(None) != 2:
        return _fail("give one of RUN_OR_CHECKPOINT, --plan CONFIG and --data CONFIG", code=2)
    if args.settings and args.path is not None:
        return _fail(f"{args.settings[0]} goes with --plan CONFIG or --data CONFIG", code=2)
    if args.world_size is not None and args.plan is None:
        return _fail("--world_size goes with --plan CONFIG", code=2)
    from toolkit import config

    render: Callable[[dict], str]
    note = None
    if args.plan is not None:
        from toolkit.planning.report import format_units, summarise_units

        cfg, note = _load_planned(args.plan, args.settings)
        found = summarise_units(cfg, args.world_size)
        render = format_units
    elif args.data is not None:
        from toolkit.data.prepare import inspect_data
        from toolkit.data.report import render_report as render

        _quiet()
        kind, cfg, _ = recipes.load_config(args.data, args.settings, remote=True)
        if not issubclass(kind.config, config.FinetuneConfig):  # read rows as fine-tuning would
            kind = recipes.find_kind("finetune")
            cfg = config.load(kind.config, args.data, args.settings)
        found = inspect_data(cfg)
    else:
        from toolkit.checkpoint import local_copy
        from toolkit.checkpoint.summary import format_summary, summarize

        with local_copy(args.path) as path:
            found = summarize(path)
        render = format_summary
    if args.json:
        print(json.dumps(found), flush=True)
    else:
        from toolkit import ranks

        ranks.print_line(render(found))
    if args.data is not None and not args.json:
        title = f"read as a config of {kind.title}"
        print(f"\npacking {found['packing']}: {found['why']} ({title})")
    _print_note(note)
    return 0


def _report(args: argparse.Namespace) -> int:
    from toolkit.report import follow, write_report

    if args.follow:
        print("following the runs; Ctrl-C ends it", flush=True)
        page, picture, notes = follow(args.runs, args.output, args.every)
    else:
        page, picture, notes = write_report(args.runs, args.output)
    print(*(f"note: {note}" for note in notes), page, picture, sep="\n")
    return 0


def _push(args: argparse.Namespace) -> int:
    from toolkit.hub import preview, push

    _quiet()
    _trust(args)
    where = {"revision": args.revision, "private": not args.public}
    if not args.dry_run:
        print(push(args.folder, args.repo_id, **where))
        return 0
    seen = preview(args.folder, args.repo_id, **where)
    for title, files in (("send", seen.send), ("there already", seen.same)):
        print(f"{title}: {len(files)} files, {sum(files.values()):,} bytes")
        for name, size in sorted(files.items()):
            print(f"    {size:>15,}  {name}")
    print(f"delete: {len(seen.delete)} files", *seen.delete, sep="\n    ")
    for note in seen.notes:
        print(f"note: {note}")
    print(f"README.md:\n\n{seen.card}", end="")
    return 0


def _trust(args: argparse.Namespace) -> None:
    if args.trust_remote_code:
        from toolkit.models import allow_remote_code

        allow_remote_code()


def _quiet(progress: bool = True) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()


def _fail(message: str, code: int = 1) -> int:
    print(f"toolkit: error: {' '.join(message.split())}", file=sys.stderr)
    return code
