"""The command line `toolkit`: parse arguments, call one function of the library, print its result.

Exit code 0 is success, 1 a failure with one line on stderr, 2 wrong usage. Each command imports the
libraries that it needs when it runs, so `toolkit --help` imports no torch.

before  commands before a run
after   commands during and after a run
common  what they share
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from toolkit import __version__, recipes
from toolkit.cli import after, before
from toolkit.cli.common import AddArgument, fail
from toolkit.config import KINDS
from toolkit.errors import ConfigError, ToolkitError

_RECIPES = tuple(kind.command for kind in KINDS)
_CONFIG_COMMANDS = ("plan", "rehearse", "inspect")  # commands that read a config, and take settings
_TOP_LEVEL = ("--output_dir", "--seed")  # settings outside of a section


def main(argv: Sequence[str] | None = None) -> int:
    """Run a `toolkit` command and return its exit code.

    A `ToolkitError` or OSError is printed on one line of stderr. The code is then 1, or 2 for a
    `ConfigError`. Ctrl-C gives 130.

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
        return fail(str(error), code=2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:  # the reader of the output has ended (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return fail(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "))
    except KeyboardInterrupt:
        print("toolkit: interrupted", file=sys.stderr)
        return 130


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a command's own arguments from settings of the run; they may come in any order.

    A setting is `--section.field VALUE` or `--section.field=VALUE`, and also `--output_dir` or
    `--seed`.

    Returns:
        (arguments of the command, settings).
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
    """Build the parser of all commands.

    The parsed arguments have an attribute `run`: the function that runs the command. Call it with
    them.
    """
    parser = argparse.ArgumentParser(
        prog="toolkit",
        description="Train models; inspect sharded checkpoints; export Hugging Face folders.",
        epilog="toolkit train CONFIG runs: accelerate launch recipes/pretrain.py --config CONFIG",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"toolkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        run: Callable[[argparse.Namespace], int], help: str, description: str
    ) -> AddArgument:
        """Add a subcommand, named after its function; return its parser's `add_argument`."""
        name = run.__name__.removeprefix("_run_").replace("_", "-")
        sub = commands.add_parser(name, allow_abbrev=False, help=help, description=description)
        sub.set_defaults(run=run)
        return sub.add_argument

    for kind in KINDS:
        help_text = f"{kind.title}: check a config, then launch recipes/{kind.name}.py on it"
        sub = commands.add_parser(kind.command, allow_abbrev=False, help=help_text)
        sub.set_defaults(run=partial(_start_recipe, kind.name))
    before.add_commands(command)
    after.add_commands(command)
    return parser


def _start_recipe(recipe: str, args: argparse.Namespace) -> int:
    """Run a command that starts `recipe`, such as `toolkit train`; return its exit code."""
    return recipes.start_recipe(recipe, args.arguments)
