"""Read the flags that a shell script gives to a training command. The script is never run."""

import re
import shlex
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError
from toolkit.parsing import read_bounded

_MAX_BYTES = 1_000_000  # of a script
# Pattern of a training command, whose group 1 is the tool's subcommand, and the tool.
_COMMANDS: tuple[tuple[str, str], ...] = (
    (r"openrlhf\.cli\.train_(\w+)", "openrlhf"),
    (r"swift (sft|pt|rlhf)(?![\w-])", "ms-swift"),
    (r"swift/cli/(sft|pt|rlhf)\.py", "ms-swift"),
    (r"(?:llamafactory-cli|lmf) (train)(?![\w-])", "llama-factory"),
    (r"open_instruct/(finetune|dpo\w*)\.py", "open-instruct"),
    (r"trl (sft|dpo|kto|orpo|cpo|reward|grpo|rloo)(?![\w-])", "trl"),
    (r"(?:trl/scripts|examples/scripts|scripts)/(sft|dpo|kto|orpo|cpo|reward\w*|grpo)\.py", "trl"),
    (r"axolotl (?:train|preprocess)(?! *-h)()", "axolotl"),
    (r"tune run .*?(\w+)(?= --config)", "torchtune"),
)
_FILE = re.compile(r"[\w./~-]+\.(ya?ml|json)")
_COMMAND_END = re.compile(r"[;&|<>]+|\d?>.*|EOF")
_COMPUTED = "\0"  # placeholder for a text that only the shell knows


def read_command_line(file: Path) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Read the flags of the first known training command in a shell script, which is not run.

    Returns:
        (tool, subcommand, flags, notes). The subcommand is, for example, `dpo` of
        `openrlhf.cli.train_dpo`; "" if the command has none. `flags` maps names without dashes to
        values. `notes` maps each flag whose value only the shell can compute to a text for the
        user.

    Raises:
        ConfigError: there is no known command, or the command reads its settings from a file.
    """
    content = read_bounded(file, _MAX_BYTES, ConfigError)
    text = content.decode("utf-8", errors="replace").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in lines:
        for pattern, tool in _COMMANDS:
            if match := re.search(pattern, line):
                flags, computed = _parse_flags(line[match.end() :], _find_variables(lines), file)
                return tool, match[1], flags, computed
    raise ConfigError(
        f"{file} holds no known training command; expected `openrlhf.cli.train_...`, `swift ...`, "
        "`llamafactory-cli train`, `trl ...` or a script of open-instruct"
    )


def _find_variables(lines: list[str]) -> dict[str, str]:
    """Return name -> value for the shell variables that are set exactly once, to a literal."""
    values: dict[str, list[str]] = {}
    for line in lines:
        if match := re.fullmatch(
            r"\s*(?:export |readonly )?(\w+)=(\S*|'[^']*'|\"[^\"]*\")\s*", line
        ):
            values.setdefault(match[1], []).append(match[2].strip("'\""))
    return {name: texts[0] for name, texts in values.items() if len(texts) == 1}


def _parse_flags(
    line: str, variables: dict[str, str], file: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the flags of a command line, after replacing shell variables by their values.

    Parsing stops at a pipe, a redirection or the like.

    Args:
        line: the part of the line after the command.
        variables: name -> value of shell variables.
        file: the script, for messages.

    Returns:
        (flags, notes). `flags` maps names without dashes to values. `notes` maps each flag whose
        value only the shell can compute to a text for the user.

    Raises:
        ConfigError: the line cannot be split, or it names a file of settings.
    """
    line = re.sub(r"\$\([^()]*(\([^()]*\))?[^()]*\)|`[^`]*`", _COMPUTED, line)
    line = re.sub(
        r"\$\{?(\w+)\}?",
        lambda match: v if "$" not in (v := variables.get(match[1], "$")) else _COMPUTED,
        line,
    )
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as a command line: {error}") from error
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if _COMMAND_END.fullmatch(word):
            break
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name:
            flags[name].append(word)
        elif _FILE.fullmatch(word):
            flags["config"] = [word]
    if settings := flags.get("config"):
        raise ConfigError(
            f"the command in {file} reads its settings from {' '.join(settings)}; convert that "
            "file, and set the flags of the command in the result"
        )
    computed = {
        name: f"{name}: computed by the shell; set it yourself"
        for name, values in flags.items()
        if any(_COMPUTED in value for value in values)
    }
    return {n: _parse_values(v) for n, v in flags.items() if n not in computed}, computed


def _parse_values(words: list[str]) -> Any:
    """Parse the words after a flag.

    No word gives True, one word gives its value, and several give a list of values.
    """
    if not words:
        return True
    values = [_parse_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values


def _parse_scalar(word: str) -> Any:
    """Parse a word as an integer, float, boolean or None; return any other word as text."""
    if re.fullmatch(r"[-+]?\d+", word):
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word):
        return float(word)
    return {"true": True, "false": False, "none": None, "null": None}.get(word.lower(), word)
