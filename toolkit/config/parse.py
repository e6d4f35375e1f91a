"""Read the settings of a run from YAML files and flags, and write them as YAML.

Files are read with limits on size and nesting, because a config may come from outside.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    set_dumper,
    set_loader,
    set_parsing_settings,
)

from toolkit.config.fields import (
    RANGE_WORDS,
    field_path,
    setting_name,
    setting_path,
    setting_types,
    to_fields,
    to_settings,
)
from toolkit.config.free_mappings import restore_mappings
from toolkit.config.kinds import check_kind, kind_of
from toolkit.config.other_tools import (
    REMOVED,
    nearest_settings,
    refuse_foreign_config,
    suggest_setting,
    suggest_value,
)
from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError, is_secret_name, looks_secret
from toolkit.parsing import parse_yaml, read_yaml

_ERROR_CHARACTERS = 280  # of an error that lists unknown settings


def parse(
    cls: type,
    args: Sequence[str] | None = None,
    default_file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Read a config from `--config FILE` and `--section.field VALUE` flags; later ones win.

    Args:
        cls: class of the settings, such as `PretrainConfig`.
        args: arguments of the command line; None: `sys.argv[1:]`.
        default_file: config file to use if `args` have no `--config`.
        defaults: dotted setting -> value from the launch configuration. Files and flags override
            them.

    Returns:
        An instance of `cls`.

    Raises:
        ConfigError: there are unknown keys (the error lists all of them with the nearest names), a
            value has a wrong type, a file cannot be read, or settings contradict each other.
        SystemExit: after `--help` and `--print_config`.
    """
    args = list(sys.argv[1:] if args is None else args)
    defaults = dict(defaults or {})
    for name in defaults:
        _find_setting_type(cls, name, "launch configuration")
    # A parser keeps its defaults, so the shared one must not get any.
    parser = config_parser.__wrapped__(cls) if defaults else config_parser(cls)
    if defaults:
        parser.set_defaults(defaults)
    parser.prog = os.path.basename(sys.argv[0])
    if default_file is not None and not any(a.split("=")[0] == "--config" for a in args):
        args = ["--config", str(default_file), *args]
    unknown = _UnknownSettings(cls)
    for file in _find_config_files(args):
        content = _read_settings_file(file)
        if issubclass(cls, RunConfig):
            check_kind(cls, content, str(file))
            refuse_foreign_config(content, file)
        _check_keys(cls, content, str(file), unknown)
    _check_flags(cls, args, unknown)
    unknown.refuse()
    try:
        parsed = parser.parse_args(_rename_flags(args))
        sections = parser.instantiate(parsed)
        values = {f.name: _convert_numbers(sections[f.name]) for f in dataclasses.fields(cls)}
        cfg = cls(**restore_mappings(cls, values, args))
    except ArgumentError as error:
        raise ConfigError(_reword_error(cls, " ".join(str(error).split()))) from None
    except ConfigError as error:
        # A dataclass found settings that contradict each other.
        launch_settings = [n for n, v in defaults.items() if parsed.get(n) == v]
        mentioned = ", ".join(n for n in launch_settings if re.search(rf"{n}\b", str(error)))
        if not mentioned:
            raise
        raise ConfigError(f"{error} ({mentioned} came from the launch configuration)") from None
    if (lora := getattr(cfg, "lora", None)) is not None:
        names = {
            n.partition(".")[2] for n in _find_set_settings(cls, args) if n.startswith("lora.")
        }
        object.__setattr__(lora, "explicit", frozenset(names))
    for name, value in flatten_settings(cfg).items():
        kind = _find_setting_type(cls, name, "")
        # jsonargparse accepts null for every type.
        if value is None and type(None) not in typing.get_args(kind):
            raise ConfigError(f"{name} must be {describe_type(kind)}, got nothing (null)")
        _refuse_secret(str(value), name)
    return cfg


def load(cls: type, file: str | Path, flags: Sequence[str] = ()) -> Any:
    """Read a config from a YAML file; `flags` override it. Raises the errors of `parse`."""
    return parse(cls, ["--config", str(file), *flags])


def dump(cfg: Any) -> str:
    """Write a config as YAML text, which `load` reads back to an equal config."""
    content = to_settings(type(cfg), dataclasses.asdict(cfg))
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def find_differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Compare two configs; return dotted setting -> (old value, new value) of those that differ.

    A text equals a list that contains only that text.
    """
    before = flatten_settings(old)
    after = flatten_settings(new)
    changes = {}
    for name in {**before, **after}:
        values = before.get(name), after.get(name)
        # A text equals the list that contains only it: `train_files: a.txt` is `[a.txt]`.
        old_list, new_list = ([v] if isinstance(v, str) else v for v in values)
        if old_list != new_list:
            changes[name] = values
    return changes


@functools.cache
def config_parser(cls: type) -> ArgumentParser:
    """Build the jsonargparse parser for the settings class `cls`; cached for each class."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    # jsonargparse keeps a text that is no YAML, such as `*.txt`, as it is.
    def load_value(text: str) -> Any:
        return to_fields(cls, parse_yaml(text, source="a value", error=ConfigError))

    def dump_values(content: dict) -> str:
        return yaml.safe_dump(to_settings(cls, content), sort_keys=False, allow_unicode=True)

    mode = f"bounded_yaml_of_{cls.__name__}"
    set_loader(mode, load_value, (ConfigError,))
    set_dumper(mode, dump_values)
    parser = ArgumentParser(
        description=cls.__doc__,
        exit_on_error=False,
        allow_abbrev=False,
        # A fixed width makes the help look the same under every launcher.
        formatter_class=functools.partial(_HelpFormatter, cls, width=110, max_help_position=44),  # type: ignore[arg-type]
        usage="%(prog)s [--config FILE] [--section.field VALUE ...] [--print_config]",
        parser_mode=mode,
    )
    parser.add_argument("--config", action="config", help="YAML file with settings as below")
    parser.add_class_arguments(cls)
    return parser


class _HelpFormatter(DefaultHelpFormatter):
    """Format the help of all settings, without the sections themselves.

    jsonargparse would otherwise list each section as a flag that takes a separate file.
    """

    def __init__(self, cls: type, **options: Any) -> None:
        super().__init__(**options)
        hints = typing.get_type_hints(cls)
        self._sections = {name for name, kind in hints.items() if dataclasses.is_dataclass(kind)}

    def add_argument(self, action: argparse.Action) -> None:
        """Add a setting under its user-facing name; skip sections."""
        if action.dest not in self._sections:
            if (setting := setting_path(action.dest)) != action.dest:
                action = copy.copy(action)
                action.option_strings = [f"--{setting}"]
                action.metavar = setting.rpartition(".")[2].upper()
            super().add_argument(action)


def _rename_flags(args: Sequence[str]) -> list[str]:
    """Rename command-line flags from user-facing names to dataclass fields, for jsonargparse."""
    pairs = [arg.partition("=") if arg.startswith("--") else (arg, "", "") for arg in args]
    return [
        f"--{field_path(flag[2:])}{equals}{value}" if flag.startswith("--") else flag
        for flag, equals, value in pairs
    ]


def _find_set_settings(cls: type, args: Sequence[str]) -> set[str]:
    """Find the dotted settings that the flags and the config files in `args` set."""

    def names(kind: type, content: dict, prefix: str = "") -> Iterator[str]:
        for key, value in content.items():
            inner = setting_types(kind).get(key)
            if dataclasses.is_dataclass(inner) and isinstance(value, dict):
                yield from names(inner, value, f"{prefix}{key}.")  # type: ignore[arg-type]
            else:
                yield f"{prefix}{key}"

    flags = {a.partition("=")[0][2:].removesuffix("+") for a in args if a.startswith("--")}
    return flags.union(
        *(names(cls, _read_settings_file(file)) for file in _find_config_files(args))
    )


def _convert_numbers(value: Any) -> Any:
    """Convert jsonargparse's restricted numbers to plain bool, int and float, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: _convert_numbers(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, list):
        return [_convert_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _convert_numbers(item) for key, item in value.items()}
    number = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if number is None else number(value)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes texts such as `1e3`, which jsonargparse would read as numbers."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Represent a text as a YAML scalar, in quotes if it looks like a number."""
    style = "'" if re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value, re.IGNORECASE) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


# ---- Checks before jsonargparse reads the values


class UnknownSettingError(ConfigError):
    """An error for a setting name that does not exist.

    Args:
        path: the unknown dotted name.
        place: where it was given: a file, or `command line`.
        suggestion: rest of the message, such as ", did you mean train.max_steps?".
    """

    def __init__(self, path: str, place: str, suggestion: str) -> None:
        super().__init__(f"unknown setting {path!r} ({place}){suggestion}")
        self.path = path
        self.place = place
        self.suggestion = suggestion


class _UnknownSettings:
    """Collector of unknown settings in files and flags, so that one error lists all of them."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._errors: list[UnknownSettingError] = []

    def add(self, error: UnknownSettingError) -> None:
        """Remember an unknown setting for `refuse`."""
        self._errors.append(error)

    def refuse(self) -> None:
        """Raise one ConfigError that lists the collected settings; do nothing if there are none."""
        if not self._errors:
            return
        names = [repr(error.path) for error in self._errors]
        entries = [f"{error.path!r}{error.suggestion}" for error in self._errors]
        places = ", ".join(dict.fromkeys(error.place for error in self._errors))
        count = f"{len(names)} unknown settings" if len(names) > 1 else "unknown setting"
        page = ""
        if issubclass(self._cls, RunConfig):
            kind = kind_of(self._cls)
            start = f"toolkit {kind.command}" if kind.command else f"python recipes/{kind.name}.py"
            page = f"; all settings: docs/reference/settings.md, or `{start} --help`"
        if len(names) == 1:
            raise ConfigError(f"{self._errors[0]}{page}")
        room = _ERROR_CHARACTERS - len(f"{count} ({places}): {page}")
        # The first list that fits: with as many suggestions as possible, then with as many names.
        lists = [[*entries[:n], *names[n:]] for n in range(len(names), -1, -1)]
        lists += [[*names[:n], f"and {len(names) - n} more"] for n in range(len(names) - 1, 0, -1)]
        texts = ["; ".join(entry_list) for entry_list in lists]
        listing = next((text for text in texts if len(text) <= room), texts[-1])
        raise ConfigError(f"{count} ({places}): {listing}{page}")


def _find_config_files(args: Sequence[str]) -> list[Path]:
    """List the paths that follow `--config` in the arguments.

    Raises:
        ConfigError: a file does not exist, or is not a regular file.
    """
    files = [a.split("=", 1)[1] for a in args if a.startswith("--config=")]
    files += [b for a, b in itertools.pairwise(args) if a == "--config"]
    for file in files:
        if Path(file).exists() and not Path(file).is_file():
            raise ConfigError(f"config file {file} is not a file (current folder: {Path.cwd()})")
        if not Path(file).exists():
            # An installed wheel includes copies of the configs in recipes/configs.
            hint = ""
            if "recipes/configs" in Path(file).as_posix():
                hint = "; `toolkit recipes --copy finetune` puts the ready configs there"
            raise ConfigError(
                f"config file {file} does not exist (current folder: {Path.cwd()}){hint}"
            )
    return [Path(f) for f in files]


def _read_settings_file(file: Path) -> dict:
    """Read a YAML file that must contain a mapping of settings.

    Raises:
        ConfigError: the file cannot be read, is empty, or contains something else.
    """
    content = read_yaml(file, ConfigError)
    if content is None:
        raise ConfigError(f"{file} is empty; expected a YAML file with settings (see --help)")
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping of settings, got {type(content).__name__}")
    return content


def _check_flags(cls: type, args: Sequence[str], unknown: _UnknownSettings) -> None:
    """Check the names and values of command-line flags before jsonargparse reads them.

    Args:
        cls: settings class of the run.
        args: arguments of the command line.
        unknown: receives the flags whose setting does not exist.

    Raises:
        ConfigError: a flag names a section, lacks its value, or has a value that looks like a
            secret or does not parse.
    """
    kind = None
    setting = ""
    for arg, following in zip(args, [*args, "--"][1:], strict=True):
        flag, equals, value = arg.partition("=")
        _refuse_secret(arg, flag if equals else "the command line")
        if not flag.startswith("--"):
            _check_text_value(setting, kind, arg)
        elif flag not in ("--config", "--help", "--print_config"):
            setting = flag.removeprefix("--").removesuffix("+")
            kind = None
            try:
                kind = _find_setting_type(cls, setting, "command line")
            except UnknownSettingError as error:
                unknown.add(error)
                continue
            if dataclasses.is_dataclass(kind):
                raise ConfigError(
                    f"{flag} is a section of settings; give them one by one: "
                    f"--{setting}.{next(iter(setting_types(typing.cast(type, kind))))} VALUE"
                )
            if equals:
                _check_text_value(setting, kind, value)
            elif following.startswith("--"):
                example = f": {flag} true" if bool in (kind, *typing.get_args(kind)) else ""
                raise ConfigError(
                    f"{flag} must be followed by its value, {describe_type(kind)}{example}"
                )


def _refuse_secret(text: str, where: str) -> None:
    """Raise ConfigError if `text` looks like a token or password; `where` begins the message."""
    if looks_secret(text):
        raise ConfigError(
            f"{where} contains what looks like a token or a password, and config.yaml would store "
            "it; use HF_TOKEN or `hf auth login` instead"
        )


def _check_text_value(setting: str, kind: Any, text: str) -> None:
    """Check that a text parses as YAML within the toolkit's limits, unless `kind` accepts text.

    Raises:
        ConfigError: the text does not parse, or is a list of sections with a wrong entry.
    """
    if kind is None or str in (kind, *typing.get_args(kind)):
        return
    try:
        value = parse_yaml(text, setting, ConfigError)
    except ConfigError:
        raise ConfigError(f"{setting} must be {describe_type(kind)}, got {text[:200]}") from None
    _check_section_list(value, kind, setting)


def _check_section_list(value: Any, kind: Any, where: str) -> None:
    """Check each entry of a list of sections, such as `data.sources`; accept any other value.

    Raises:
        ConfigError: an entry has an unknown key or a wrong value.
    """
    (item,) = typing.get_args(kind) if typing.get_origin(kind) is list else (None,)
    if dataclasses.is_dataclass(item) and isinstance(value, list):
        for i, entry in enumerate(value):
            if isinstance(entry, dict):
                unknown = _UnknownSettings(item)  # type: ignore[arg-type]
                _check_keys(item, entry, f"{where}[{i}]", unknown)  # type: ignore[arg-type]
                unknown.refuse()
                try:
                    config_parser(item).parse_object(entry)  # type: ignore[arg-type]
                except ArgumentError as error:
                    message = _reword_error(item, " ".join(str(error).split()))  # type: ignore[arg-type]
                    raise ConfigError(f"{where}[{i}].{message}") from None


def _check_keys(
    cls: type, content: dict, where: str, unknown: _UnknownSettings, prefix: str = ""
) -> None:
    """Check the keys and text values of a YAML mapping, recursively.

    Args:
        cls: settings class of the run.
        content: the mapping.
        where: name of the file, for messages.
        unknown: receives the keys that `cls` does not have.
        prefix: dotted name of the section that `content` is, ending in a dot; "" for the top.

    Raises:
        ConfigError: a section is not a mapping, a value does not parse, or a key names a secret.
    """
    for key, value in content.items():
        try:
            kind = _find_setting_type(cls, f"{prefix}{key}", where)
        except UnknownSettingError as error:
            unknown.add(error)
            continue
        if dataclasses.is_dataclass(kind) and not isinstance(value, dict):
            raise ConfigError(f"{prefix}{key} ({where}) is a section of settings, got {value!r}")
        if dataclasses.is_dataclass(kind):
            _check_keys(cls, value, where, unknown, f"{prefix}{key}.")
        if isinstance(value, str):
            _check_text_value(f"{prefix}{key}", kind, value)
        _check_section_list(value, kind, f"{where}, {prefix}{key}")


def _find_setting_type(cls: type, path: str, where: str) -> Any:
    """Find the type of the dotted setting `path`; for a section, its dataclass.

    Raises:
        UnknownSettingError: the setting does not exist.
        ConfigError: its name is that of a secret, which no config may contain.
    """
    section = cls
    prefix = ""
    for part in path.split("."):
        types = setting_types(section) if dataclasses.is_dataclass(section) else {}
        if part not in types:
            if is_secret_name(part):
                raise ConfigError(
                    f"{path!r} ({where}) is not a setting, because a config is written to files "
                    "and must not contain a token. Use `hf auth login`, or set HF_TOKEN"
                )
            suggestion = f"; {prefix.removesuffix('.')} takes a value"
            if instead := REMOVED.get(path):
                suggestion = f", which was removed: {instead}"
            elif types and (guess := suggest_setting(cls, section, prefix, path)):
                suggestion = f", did you mean {guess}?"
            elif types:
                suggestion = f"; nearest: {', '.join(nearest_settings(cls, section, prefix, part))}"
            raise UnknownSettingError(path, where, suggestion)
        section = types[part]
        prefix = f"{prefix}{part}."
    return section


# Words before the value in jsonargparse's messages.
_VALUE = re.compile(r"(?:Got|Given) value: |base 10: |to float: |Not of type \w+: ")


def _reword_error(cls: type, message: str) -> str:
    """Reword an error message of jsonargparse for users; return it unchanged if it is unknown."""
    if match := re.fullmatch(r'Parser key "([\w.]+)": (.*)', message):
        setting = setting_path(match[1])
        value = _VALUE.split(match[2])[-1]
        value = re.sub(r" (does not conform to|not an? (integer|number)$).*", "", value).strip("'")
        hint = ""
        if value == "float16":
            hint = " (it needs loss scaling, which this toolkit does not implement)"
        expected = describe_type(_find_setting_type(cls, setting, ""))
        if expected == "a list" and not value.startswith(("{", "[")):
            hint = f"; write [{value[:200]}]"
        elif re.search(r"[\[,] *\*", value):
            # YAML reads a leading * as an alias.
            hint = "; put an entry that begins with * in quotes: \"['*']\""
        elif guess := suggest_value(setting, _find_setting_type(cls, setting, ""), value):
            hint += f"; did you mean {guess}?"
        return f"{setting} must be {expected}, got {value[:200]}{hint}"
    if match := re.fullmatch(r"the following arguments are required: (.*)", message):
        flag = f"--{match[1].split(',')[0]} VALUE"
        return f"{match[1]} is required; set it in the file of --config, or with {flag}"
    if match := re.fullmatch(r"unrecognized arguments: (.*)", message):
        return (
            f"unexpected on the command line: {match[1]}. Write a setting as --section.field "
            "VALUE, a list as --data.train_files '[a.txt, b.txt]' or a quoted glob, and a file of "
            "settings as --config FILE"
        )
    return message


def describe_type(kind: Any) -> str:
    """Describe a type in the words of a user: "an integer or empty" for `int | None`."""
    names = RANGE_WORDS | {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "empty",
        Any: "anything",
    }
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(inner)
    if typing.get_origin(kind) is list:
        return "a list"
    if typing.get_origin(kind) is dict:
        return f"a mapping from text to {describe_type(inner[1])}"
    if kind in names:
        return names[kind]
    return f"{', '.join(map(describe_type, inner[:-1]))} or {describe_type(inner[-1])}"


def flatten_settings(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a config to dotted setting -> value; a dict that is a setting's value is kept."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(cfg):
        name = prefix + setting_name(field.name)
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            settings |= flatten_settings(value, f"{name}.")
        else:
            settings[name] = value
    return settings
