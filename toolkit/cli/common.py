"""Helpers of several commands: help texts, notes, and settings of transformers."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from toolkit import recipes

SETTINGS_HELP = "; settings may follow, as --section.field VALUE"
TRUST_HELP = "run Python code that comes with the model, with your rights: read it first"
AddArgument = Callable[..., Any]
"""`add_argument` of the parser of one command."""
AddCommand = Callable[[Callable[[argparse.Namespace], int], str, str], AddArgument]
"""Adds a command: the function that runs it, its line in the list of commands, its description."""


def load_planned(file: str, settings: Sequence[str]) -> tuple[Any, str | None]:
    """Read a config for planning, and copy rank and targets of the adapter in `lora.from` to it.

    If the toolkit knows the shape of a gated model, a note about that is printed.

    Args:
        file: a YAML file.
        settings: `--section.field VALUE` arguments, which override the file.

    Returns:
        (config, note). The note says how the config's kind was chosen, for `print_note`.
    """
    from toolkit.planning import with_known_shape

    _, cfg, note = recipes.load_config(file, settings)
    # A gated model may have no config.json here, but a shape that ships with the toolkit.
    cfg, shape_note = with_known_shape(cfg)
    print_note(shape_note)
    if getattr(getattr(cfg, "lora", None), "from_", None) is None:
        return cfg, note
    from toolkit.checkpoint import apply_adapter_settings

    return apply_adapter_settings(cfg), note


def print_note(note: str | None) -> None:
    """Print a note to stderr; do nothing if it is None.

    Call it after the result is printed: a command that fails prints only one line on stderr.
    """
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)


def allow_remote_code(args: argparse.Namespace) -> None:
    """Allow Python code that comes with a model, if `--trust_remote_code` was given.

    It is allowed for the entire process.
    """
    if args.trust_remote_code:
        from toolkit.models import allow_remote_code

        allow_remote_code()


def silence_transformers(progress: bool = True) -> None:
    """Silence warnings of transformers, and also its progress bars if `progress` is False."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()


def fail(message: str, code: int = 1) -> int:
    """Print an error on one line of stderr, and return the exit code `code`."""
    print(f"toolkit: error: {' '.join(message.split())}", file=sys.stderr)
    return code
