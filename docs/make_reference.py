"""Write docs/reference/: every setting, from the dataclasses, and every command, from its --help.

    python docs/make_reference.py

Also the ready configs, and the names of the Python API, whose docstrings mkdocstrings puts in when
the site is built. A test holds the files to what this would write.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

from toolkit import cli
from toolkit.config.data import SourceConfig
from toolkit.config.fields import setting_name
from toolkit.config.kinds import KINDS
from toolkit.config.parse import describe_type, flatten_settings

HERE = Path(__file__).parent / "reference"
SETTINGS = """# Settings

Every setting of `toolkit train` (pretrain), `finetune`, `prefer` and `distill`, written by
`docs/make_reference.py` from the dataclasses in `toolkit/config/`. A setting is given in the YAML
file of `--config`, by section, or as a flag `--section.setting VALUE`, which wins. `--print_config`
shows all values of a run. "Empty" is `null` in YAML. If the kinds of runs have different defaults,
`/` separates them in the order pretraining, fine-tuning, preference tuning, distillation. The last
default also applies to the kinds after it.
"""
COMMANDS = """# Commands

What `toolkit COMMAND --help` prints, collected by `docs/make_reference.py`. Exit codes: 0 done, 1
failed with one line on stderr, 2 wrong usage or a wrong setting. `toolkit train`, `finetune`,
`prefer` and `distill` take all [settings](settings.md) as flags; with
`TOOLKIT_TRACEBACK=1` in the environment they print the traceback of an error.
"""
CONFIGS = """# Ready configs

The configs in `recipes/configs/`, by model, written by `docs/make_reference.py` from what each file
opens with. `toolkit recipes` lists them, `toolkit recipes --copy finetune` copies them into the
current folder. Memory is what `toolkit plan` says that each device needs; pick a device with more.
Each file says where its hyper-parameters come from and what to change, first of all the data.
"""
PYTHON = """# Python API

What recipes and scripts call, by room: every name that a package offers. Written by
`docs/make_reference.py` from their docstrings; the site adds signatures and full texts.
*Collective* functions are called by every rank. [Changing a recipe](../recipes.md) shows them at
work. What is not on this page may change with any release.
"""
# Room -> the names of a module that recipes call; None: all that a package's `__init__.py` offers.
API: dict[str, tuple[str, ...] | None] = {
    "toolkit.api": ("SavedRun", "run"),
    "toolkit.config": None,
    "toolkit.mesh": ("Mesh", "View", "init_mesh"),
    "toolkit.models": None,
    "toolkit.adapters": None,
    "toolkit.sharding": None,
    "toolkit.loading": None,
    "toolkit.data.samples.batch": ("Batch",),
    "toolkit.data.prepare": ("inspect_data", "prepare_data", "TrainingData"),
    "toolkit.training": None,
    "toolkit.objectives": None,
    "toolkit.checkpoint": None,
    "toolkit.export": None,
    "toolkit.planning": None,
    "toolkit.hub": None,
    "toolkit.assembly": ("build", "check_before_loading", "load_weights"),
    "toolkit.ranks": (
        *("all_equal", "any_over_ranks", "broadcast", "collective", "gather", "log_once"),
        *("main_first", "min_over_ranks", "on_all", "on_main", "rank", "sum_over_ranks"),
        "world_size",
    ),
}
OBJECTIVES = {"kto": "KTO", "reward": "reward model", "orpo": "ORPO", "simpo": "SimPO"}
HELPERS = ("toolkit.lazy", "typing")
"""Modules whose names packages import for themselves and do not offer."""
NO_MEMBERS = "    options: {members: false, show_signature: false}"
REQUIRED = "required"


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text, "utf-8")


def pages() -> dict[str, str]:
    """Return file name -> text of the generated pages."""
    return {
        "settings.md": settings_page(),
        "commands.md": commands_page(),
        "configs.md": configs_page(),
        "python.md": python_page(),
    }


def python_page() -> str:
    """Return the names of the API, each with its first sentence and a mark for its docstring."""
    lines = [PYTHON]
    for room in API:
        module = importlib.import_module(room)
        names = public_names(room)
        lines += [f"## {room}\n", f"{first_sentence(module)}\n"]
        if room == "toolkit.config":
            lines.append("The fields of a section are its [settings](settings.md).\n")
        lines += ["| name | what it does |", "|---|---|"]
        lines += [f"| `{name}` | {first_sentence(getattr(module, name))} |" for name in names]
        lines.append("")
        for name in names:
            lines.append(f"::: {home(getattr(module, name))}")
            if room == "toolkit.config" and name[0].isupper():
                lines.append(NO_MEMBERS)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def home(described: Any) -> str:
    """Return where a class or function is written: some packages have a module of that name."""
    return f"{described.__module__}.{described.__qualname__}"


def public_names(room: str) -> list[str]:
    """Return the functions and classes of a room of the API; see there."""
    module, named = importlib.import_module(room), API[room]
    if named is None:
        # Packages import most of their names when they are used, and list them for type checkers.
        tree = ast.walk(ast.parse(inspect.getsource(module)))
        imports = [n for n in tree if isinstance(n, ast.ImportFrom) and n.module not in HELPERS]
        named = tuple(a.asname or a.name for n in imports for a in n.names)
    called = [name for name in named if callable(getattr(module, name))]
    return sorted(called, key=lambda name: (name[0].isupper(), name))


def first_sentence(described: Any) -> str:
    """Return how the docstring of a module, a class or a function begins."""
    paragraph = in_markdown((inspect.getdoc(described) or "").split("\n\n")[0])
    sentence = re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].rstrip(".:")
    return sentence.replace("|", r"\|") + "."


def configs_page() -> str:
    """Return the table of ready configs, from the comments at their tops."""
    folder = Path(__file__).parent.parent / "recipes" / "configs"
    lines = [CONFIGS, "| model | what | GPUs | memory of each | config |", "|---|---|---|---|---|"]
    for file in sorted(folder.glob("*.yaml")):
        text = file.read_text("utf-8")
        planned = re.search(
            r"# Planned: ([\d.]+) GB of each device's (\d+)GB .*--world_size (\d+)", text
        )
        if planned is None:  # the demos'
            continue
        needed, size, count = planned.groups()
        model = yaml.safe_load(text)["model"]["name_or_path"]
        what = what_is_trained(yaml.safe_load(text))
        what += ", next-token loss" * (what == "all parameters" and "toolkit train" in text)
        memory = f"{needed} GB of {size} GB"
        lines.append(f"| {model} | {what} | {count} | {memory} | `{file.name}` |")
    start = "toolkit finetune recipes/configs/llama3_8b_lora_1gpu.yaml --accelerate_config one_gpu"
    lines += [
        "",
        "```bash",
        start,
        "```",
        "",
        "Those for pretraining start with `toolkit train`, those for preferences with "
        "`toolkit prefer`.",
    ]
    return "\n".join([*lines, *published_lines(folder)]) + "\n"


def published_lines(folder: Path) -> list[str]:
    """Return the table of the configs with a figure that others published."""
    lines = ["", "## Published figures", ""]
    lines.append("These configs are the set-ups of others, with the figure that they published.")
    lines.append("Each file starts with the commands that fetch its data.")
    lines += ["", "| config | published figure |", "|---|---|"]
    for file in sorted(folder.glob("*.yaml")):
        published = re.search(r"^# Published figure: (.+)$", file.read_text("utf-8"), re.MULTILINE)
        if published is not None:
            lines.append(f"| `{file.name}` | {published[1]} |")
    return lines


def what_is_trained(config: dict[str, Any]) -> str:
    lora = config.get("lora") or {}
    loss_type = (config.get("preference") or {}).get("loss_type")
    if loss_type:
        objective = OBJECTIVES.get(loss_type, "DPO")
        return f"{objective}, {'LoRA' if lora.get('r') else 'all parameters'}"
    if lora.get("r"):
        return "QLoRA" if lora.get("load_in_4bit") else "LoRA"
    if "teacher" in config:
        return f"all parameters, distilled from {config['teacher']['name_or_path']}"
    if config["model"].get("init") == "random":
        return "pretraining, from random weights"
    return "all parameters"


def settings_page() -> str:
    defaults = {
        kind.name: flatten_settings(
            kind.config(typing.get_type_hints(kind.config)["model"](REQUIRED))
        )
        for kind in KINDS
    }
    for settings in defaults.values():
        settings["kind"] = ""  # each fills in its own
    hints: dict[str, Any] = {}
    for kind in KINDS:
        hints |= typing.get_type_hints(kind.config)
    lines = [SETTINGS]
    for name, cls in hints.items():
        if dataclasses.is_dataclass(cls):
            lines += [f"## {name}\n", f"{in_markdown(cls.__doc__ or '')}\n"]
            lines += [*table(cls, f"{name}.", defaults), ""]
        if name == "data":
            item = flatten_settings(SourceConfig(), "data.sources[].")
            lines.append("`data.sources` is a list; each of its entries has these settings:\n")
            lines += [*table(SourceConfig, "data.sources[].", dict.fromkeys(defaults, item)), ""]
    lines += ["## Top level\n", *table(KINDS[-1].config, "", defaults)]
    return "\n".join(lines) + "\n"


def table(cls: type, prefix: str, defaults: dict[str, dict]) -> Iterator[str]:
    """Yield the rows of one section; `defaults` holds those of each recipe."""
    yield from ("| setting | recipe | value | default | meaning |", "|---|---|---|---|---|")
    meanings = docs(cls)
    for name, kind in typing.get_type_hints(cls).items():
        full = prefix + setting_name(name)
        shown = {recipe: own[full] for recipe, own in defaults.items() if full in own}
        for refusing in KINDS:
            if full in refusing.refused:
                shown.pop(refusing.name, None)
        if shown:
            recipe = "all" if len(shown) == len(defaults) else ", ".join(shown)
            cells = [f"`{full}`", recipe, describe_type(kind)]
            values = [in_yaml(value) for value in shown.values()]
            while values[-2:-1] == values[-1:]:
                values.pop()
            cells += [" / ".join(values), in_markdown(meanings[name])]
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def docs(cls: type) -> dict[str, str]:
    """Return the sentence below each field, of the class or of the nearest one that it extends."""
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found = docstring_parser.parse_from_object(base).params
        out |= {p.arg_name: p.description for p in found if p.description}
    return out


def in_markdown(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def in_yaml(value: Any) -> str:
    if value is REQUIRED or value is None:
        return "empty" if value is None else REQUIRED
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n")
    return f"`{text.strip()}`"


def commands_page() -> str:
    overview = said("--help")
    names = re.findall(r"^    ([\w-]+)(?: |$)", overview, re.MULTILINE)
    lines = [COMMANDS, "```text", overview, "```"]
    for name in names:
        # What follows a recipe's own help is its settings, which have a page of their own.
        text = said(name, "--help").partition("\n\nusage: ")[0]
        lines += ["", f"## toolkit {name}\n", "```text", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def said(*arguments: str) -> str:
    """Return what the command line prints, in lines of 100 characters."""
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(arguments)
    return out.getvalue().rstrip()


if __name__ == "__main__":
    main()
