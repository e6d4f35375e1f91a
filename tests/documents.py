"""The commands and settings that README and docs show: found, and checked without being run.

A command is checked by what reads it in earnest: settings by the recipes' parser, options by those
of `toolkit`, `accelerate launch` and `torchrun`, targets by make, the syntax of a block by bash.
What belongs to other tools stands in OTHERS, with the reason.
"""

import configparser
import contextlib
import dataclasses
import io
import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import yaml
from conftest import ROOT
from markdown_it import MarkdownIt

from toolkit import cli, recipes
from toolkit.config import flatten_settings, parse
from toolkit.config.distill import DistillConfig
from toolkit.config.other_tools import TOOL_TITLES
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import FinetuneConfig, FinetuneModelConfig
from toolkit.convert import convert_config
from toolkit.errors import ConfigError

PLACEHOLDERS = {"N": "1", "ADDRESS": "10.0.0.1", "SECONDS": "5", "SIZE": "80GB", "COMMAND": "plan"}
CONFIGS = {name: f"recipes/configs/{name}_tiny.yaml" for name in recipes.NAMES}
OTHERS = {
    "transformers": "a command of transformers; the chat needs a person",
    "vllm": "another tool, for GPUs",
    "docker": "another tool; its file is linted",
    "nvidia-smi": "of the driver",
    "ollama": "another tool",
    "echo": "the shell's",
    "conda": "another tool",
    "lm_eval": "another tool; its tasks are downloaded",
    "sbatch": "needs a Slurm cluster; the file is linted",
    "kubectl": "needs a Kubernetes cluster; the file is validated against its schemas",
    "hf": "a command of huggingface_hub that asks for a token",
    "wandb": "a command of wandb that asks for a token",
    "tensorboard": "another tool, which serves until it is stopped",
    "git": "the reader's own clone",
    "cd": "the shell's",
    ".": "the shell's",
    "export": "the shell's",
}
OTHER_PACKAGES = {"timm", "tensorboard", "vllm", "lm-eval", "wandb", "trackio", "mlflow", "s3fs"}
OTHER_PACKAGES |= {"torch", "bitsandbytes", "liger-kernel", "matplotlib", "plotly"}

FOREIGN = tuple(f"{tool}_" for tool in TOOL_TITLES)
"""How the titles of other tools' configs begin."""


class Wrong(AssertionError):
    """A document shows what is not so."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code, fenced or indented."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def title(self) -> str | None:
        """The file that the block is: ```yaml title="mine.yaml"."""
        found = re.search(r'title="([^"]+)"', self.info)
        return found[1] if found else None

    def lines(self) -> list[str]:
        """Return the command lines of a block of commands, continued ones as one; else nothing."""
        text = re.sub(r"\\\n\s*", "", self.text)
        prompted = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        first = (text.split() or [""])[0]
        if not prompted and (self.language == "bash" or (not self.info and first in CHECKS)):
            return [line for line in text.splitlines() if line.split("#")[0].strip()]
        return [line for line in prompted if not re.match(r"[A-Z]\w+\.\w+\(", line)]  # Python


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line; not `whole` where a sentence only mentions it."""

    where: str
    text: str
    whole: bool


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def _tokens(page: Path) -> list:
    return MarkdownIt().enable("table").parse(page.read_text("utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            yield Block(page, token.map[0] + 1, token.info, token.content)


def mentions(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of the code within sentences and tables."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield f"{page.parent.name}/{page.name}:{token.map[0] + 1}", child.content


def commands(page: Path) -> Iterator[Command]:
    for block in blocks(page):
        for line in block.lines():
            yield Command(f"{page.parent.name}/{page.name}:{block.line}", line, whole=True)
    for where, text in mentions(page):
        words = text.split()
        if len(words) > 1 and _program(words[0]) in CHECKS and words[0] != ".":
            yield Command(where, text, whole=bool(re.search(r"recipes/\w+\.py", text)))


def check(text: str, whole: bool = True, folder: Path = ROOT) -> None:
    """Check a command as far as can be without running it; Wrong says what is wrong.

    Args:
        folder: where files that it names are looked for, and then in the repository.
    """
    # A synopsis shows what may be left out in brackets.
    plain = text if "'" in text else re.sub(r"[\[\]]|\.\.\.", " ", text)
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(plain, comments=True)]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program = _program(words[0])
    if program not in CHECKS:
        raise Wrong(f"{text!r}: {program} is no command that the documents may show unchecked")
    try:
        with (
            contextlib.redirect_stderr(io.StringIO()) as said,
            contextlib.redirect_stdout(said),
            contextlib.chdir(folder),
        ):
            if whole:
                CHECKS[program](words)
            else:
                _check_mention(words)
    except ConfigError as error:
        raise Wrong(f"{text!r}: {error}") from error
    except SystemExit as stop:
        if stop.code:
            raise Wrong(f"{text!r}: {said.getvalue()[-500:]}") from stop


def _program(word: str) -> str:
    return word.removeprefix(".venv/bin/").removeprefix("/path/to/venv/bin/")


def _toolkit(words: list[str]) -> None:
    if words[1] in ("train", "finetune", "prefer", "distill"):
        recipe = {"train": "pretrain"}.get(words[1], words[1])
        with (
            mock.patch("toolkit.recipes._launch", side_effect=lambda argv, *_: _launch(argv)),
            mock.patch("toolkit.recipes._check_paths"),  # which look for the files
            mock.patch("toolkit.recipes._check_before_launch"),
        ):
            recipes.start_recipe(
                recipe, [CONFIGS[recipe] if w == "CONFIG" else w for w in words[2:]]
            )
    else:
        own, more = cli.split_settings(words[1:])
        cli.make_parser().parse_args(own)
        flags = {word.removeprefix("--") for word in more if word.startswith("--")}
        if unknown := flags - settings().keys():
            raise Wrong(f"{' '.join(words)!r}: there is no setting {min(unknown)}")
        for word, following in itertools.pairwise(words):
            if word in ("--plan", "--data", "plan") and not following.startswith("-"):
                _either(following)


def _launch(argv: list[str]) -> None:
    _accelerate(["accelerate", *argv[argv.index("launch") :]])
    raise SystemExit(0)


def _accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser
    from accelerate.commands.to_fsdp2 import to_fsdp2_command_parser

    if words[1] == "to-fsdp2":
        to_fsdp2_command_parser().parse_args(words[2:])
        return
    args = launch_command_parser().parse_args(words[2:])
    file = args.config_file
    if file is not None and not Path(file).is_file() and not (ROOT / file).is_file():
        raise Wrong(f"{file} is no file")
    _recipe(args.training_script, args.training_script_args)


def _torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words[1:])
    _recipe(args.training_script, args.training_script_args)


def _srun(words: list[str]) -> None:
    """Check Slurm's options by their names, from its manual, and the program that it starts."""
    begin = words.index("python")
    known = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--kill-on-bad-exit"}
    for option in words[1:begin]:
        if option.startswith("--") and option.partition("=")[0] not in known:
            raise Wrong(f"{option} is no known option of srun")
    _python(words[begin:])


def _python(words: list[str]) -> None:
    if Path(words[1]).parent.name == "recipes" and Path(words[1]).stem in recipes.NAMES:
        _recipe(words[1], words[2:])
    else:
        _script(words[1:])


def _script(words: list[str]) -> None:
    """Check that a script is there and has the options; of `-c CODE`, the syntax."""
    if words[:2] == ["-m", "venv"] or words[0] == "convert_hf_to_gguf.py":  # of llama.cpp
        return
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    file = Path(words[0]) if Path(words[0]).is_file() else ROOT / words[0]
    source = file.read_text("utf-8") if file.is_file() else ""
    if not source:
        raise Wrong(f"{words[0]} is not there")
    if missing := [w for w in words[1:] if w.startswith("--") and f'"{w}"' not in source]:
        raise Wrong(f"{words[0]} has no option {missing[0]}")


def _recipe(script: str, arguments: list[str]) -> None:
    _settings(Path(script).stem, arguments)


def _settings(recipe: str, arguments: list[str]) -> None:
    given = arguments or ["--config", "CONFIG"]  # a recipe alone takes its demo's
    named = [CONFIGS[recipe] if word == "CONFIG" else word for word in given]
    there = [w if not (ROOT / w).is_file() else str(ROOT / w) for w in named]
    parse(recipes.find_kind(recipe).config, there)


def _either(file: str) -> None:
    """Check a config that may be of any recipe."""
    name = CONFIGS["pretrain"] if file == "CONFIG" else file
    recipes.load_config(ROOT / name if (ROOT / name).is_file() else name)


def _make(words: list[str]) -> None:
    done = subprocess.run(
        ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Wrong(done.stderr)


def _pip(words: list[str]) -> None:
    if words[1] == "wheel":
        words = [word for word in words if word != "dist"]  # where it goes
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])

    def known(named: str | None) -> bool:
        return set((named or "").split(",")) - {""} <= extras

    for word in words[2:]:
        own = re.fullmatch(
            r"(?:fsdp2-toolkit|\.)(?:\[([\w,]+)\])?(?: @ (?:git\+https|file):.*)?", word
        )
        if own and (word[0] == "." or " @ " in word) and known(own[1]):
            continue
        if own and own[0].startswith("fsdp2-toolkit") and " @ " not in word:
            raise Wrong(f"pip install {word}: no index has it; name a clone, a wheel or a git URL")
        if not word.startswith(("-", "https://")) and word not in OTHER_PACKAGES:
            raise Wrong(f"pip install {word}: no such extra, and no package that is known here")


def _other(words: list[str]) -> None:
    """Another tool's command: the files of this repository that it names must be there."""
    for word in words[1:]:
        if word.startswith(("examples/", "recipes/")) and not (ROOT / word).exists():
            raise Wrong(f"{word} is not there")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    **dict.fromkeys(OTHERS, _other),
    "toolkit": _toolkit,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "srun": _srun,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
}


def _check_mention(words: list[str]) -> None:
    """Check that a command in a sentence exists, and has the options that are named."""
    if words[0] == "make":
        _make(words)
    elif words[0] == "pip":
        _pip(words)
    elif words[0] == "python":
        _script(words[1:])
    elif _program(words[0]) == "toolkit":
        for option in [w for w in words if w.startswith("--")]:
            setting = re.fullmatch(r"--([\w]+\.[\w.]+)", option)
            known = setting and setting[1] in settings()
            if not known and option not in re.findall(r"--\w+", help_of(words[1])):
                raise Wrong(f"{' '.join(words)!r}: there is no {option}")
        if words[1] not in ("--help", "--version"):
            help_of(words[1])


@cache
def help_of(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if cli.main([command, "--help"]):
            raise Wrong(f"there is no toolkit {command}")
    return out.getvalue()


@cache
def settings() -> dict[str, object]:
    """Return name -> default of every setting."""
    model = FinetuneModelConfig("x")
    return flatten_settings(PreferConfig(model)) | flatten_settings(DistillConfig(model))


def check_yaml(block: Block, folder: Path) -> str:
    """Check a YAML block by what reads such a file; return what it is."""
    content = yaml.safe_load(block.text)
    if (block.title or "").startswith(FOREIGN):
        foreign = folder / str(block.title)
        foreign.write_text(block.text, "utf-8")
        return convert_config(foreign).tool
    if "compute_environment" in content or "distributed_type" in content:
        from accelerate.commands.config.config_args import load_config_from_file

        file = folder / "accelerate.yaml"
        file.write_text(block.text, "utf-8")
        load_config_from_file(str(file))
        return "accelerate"
    whole = block.title is not None
    file = folder / (block.title or "part.yaml")
    file.write_text(block.text, "utf-8")
    try:
        kind = PreferConfig if "preference" in content else FinetuneConfig
        kind = DistillConfig if {"teacher", "distill"} & content.keys() else kind
        parse(kind, ["--config", str(file), *model(whole)])
    except ConfigError as error:
        raise Wrong(f"{block.page.name}:{block.line}: {error}") from error
    return "settings"


def model(whole: bool) -> list[str]:
    """Return the flag that part of a config lacks."""
    return [] if whole else ["--model.name_or_path", "x"]
