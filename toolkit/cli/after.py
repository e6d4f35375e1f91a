"""Commands during and after a run: consolidate, verify, inspect, report, push."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toolkit import parsing, recipes
from toolkit.cli.common import (
    SETTINGS_HELP,
    TRUST_HELP,
    AddCommand,
    allow_remote_code,
    fail,
    load_planned,
    print_note,
    silence_transformers,
)
from toolkit.config import MAX_SHARD_SIZE
from toolkit.errors import ExportError

_MAX_LINES = 50  # to print of a long list, at its beginning and at its end


def add_commands(command: AddCommand) -> None:
    """Add the commands `consolidate`, `verify`, `inspect`, `report` and `push` to the parser."""
    _add_export_commands(command)
    _add_inspect(command)
    _add_report(command)
    _add_push(command)


def _add_push(command: AddCommand) -> None:
    """Add the subcommand `push` to the parser."""
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
    add("--trust_remote_code", action="store_true", help=TRUST_HELP)


def _add_export_commands(command: AddCommand) -> None:
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
    add("--trust_remote_code", action="store_true", help=TRUST_HELP)

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
    add("--trust_remote_code", action="store_true", help=TRUST_HELP)
    add("--hf_assets", metavar="FOLDER_OR_ID", help=assets)
    add("--json", action="store_true", help="print one JSON object")


def _add_inspect(command: AddCommand) -> None:
    """Add the subcommand `inspect` to the parser."""
    add = command(
        _run_inspect,
        "show what a run or a checkpoint holds, its sharding, or what its data supervises",
        "Show what a run or a checkpoint holds (steps, bytes, dtypes, sharding). For a run that "
        "has not started: its FSDP2 units and dtypes (--plan), or the tokens that fine-tuning or "
        "preference tuning would supervise (--data). One process, no weights, no GPU.",
    )
    add("path", metavar="RUN_OR_CHECKPOINT", nargs="?")
    add("--plan", metavar="CONFIG", help=f"config of a recipe (YAML): its units{SETTINGS_HELP}")
    add(
        "--data",
        metavar="CONFIG",
        help="config of recipes/finetune.py or recipes/prefer.py (YAML): samples and tokens of "
        "each source, what is supervised, which rows are skipped and why, and the first samples "
        "with the supervised text marked"
        f"{SETTINGS_HELP}",
    )
    add(
        "--world_size",
        type=int,
        metavar="N",
        help="with --plan: number of processes (default: dp_replicate x dp_shard of the config)",
    )
    add("--json", action="store_true", help="print one JSON object")


def _add_report(command: AddCommand) -> None:
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


def _run_consolidate(args: argparse.Namespace) -> int:
    """Run `toolkit consolidate`; print the export's files and the code that loads it."""
    from toolkit.checkpoint import local_copy
    from toolkit.export import consolidate

    silence_transformers()
    allow_remote_code(args)
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
    """Yield the lines of Python code that load the export in `folder`, to show to the user."""
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
    """Run `toolkit verify`: print the report as lines or JSON.

    Returns 0 without findings, 1 with findings, 2 for wrong usage.
    """
    from toolkit.checkpoint import local_copy
    from toolkit.verify import is_export, verify_checkpoint, verify_export

    allow_remote_code(args)
    with local_copy(args.path) as path:
        if args.export is not None or is_export(path):
            silence_transformers(progress=False)
        if args.export is not None:
            report = verify_export(path, args.export, logits=args.logits, hf_assets=args.hf_assets)
        elif is_export(path):
            report = verify_export(None, path, logits=args.logits, hf_assets=args.hf_assets)
        elif args.hf_assets is not None:
            return fail("--hf_assets needs an EXPORT", code=2)
        elif args.logits:
            return fail("--logits needs an EXPORT", code=2)
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
    """Run `toolkit inspect`: print facts of a checkpoint, a planned run or its data.

    Returns 2 if the arguments do not fit together, otherwise 0.
    """
    if [args.path, args.plan, args.data].count(None) != 2:
        return fail("give one of RUN_OR_CHECKPOINT, --plan CONFIG and --data CONFIG", code=2)
    if args.settings and args.path is not None:
        return fail(f"{args.settings[0]} needs --plan CONFIG or --data CONFIG", code=2)
    if args.world_size is not None and args.plan is None:
        return fail("--world_size needs --plan CONFIG", code=2)
    from toolkit import config

    render: Callable[[dict], str]
    note = None
    if args.plan is not None:
        from toolkit.planning.report import format_units, summarise_units

        cfg, note = load_planned(args.plan, args.settings)
        facts = summarise_units(cfg, args.world_size)
        render = format_units
    elif args.data is not None:
        from toolkit.data.prepare import inspect_data
        from toolkit.data.report import render_report as render

        silence_transformers()
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
    print_note(note)
    return 0


def _run_report(args: argparse.Namespace) -> int:
    """Run `toolkit report`, once or with `--follow`; print notes and the paths of both files."""
    from toolkit.report import follow, write_report

    if args.follow:
        print("following the runs; Ctrl-C stops", flush=True)
        page, picture, notes = follow(args.runs, args.output, args.every)
    else:
        page, picture, notes = write_report(args.runs, args.output)
    print(*(f"note: {note}" for note in notes), page, picture, sep="\n")
    return 0


def _run_push(args: argparse.Namespace) -> int:
    """Run `toolkit push`: print the commit's URL, or with `--dry_run` the changes and the card."""
    from toolkit.hub import preview, push

    silence_transformers()
    allow_remote_code(args)
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
