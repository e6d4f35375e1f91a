"""Read a run's settings from YAML files and flags, in bounds, and write them as YAML."""

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
from toolkit.config.kinds import check_kind, kind_of
from toolkit.config.other_tools import GONE, meant, nearest, nearest_value, refuse_foreign_config
from toolkit.config.settings import RunConfig
from toolkit.errors import ConfigError, is_secret_name, looks_secret
from toolkit.parsing import parse_yaml, read_yaml

_LONGEST = 280  # characters of an error


def parse(
    cls: type,
    args: Sequence[str] | None = None,
    default_file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """Read a `cls` from `--config FILE` and `--section.field value` flags, later ones winning.

    Args:
        args: `sys.argv[1:]` where None.
        default_file: the config used when `args` name no `--config`.
        defaults: dotted setting -> value of the launch configuration, which files and flags win
            over.

    Raises:
        ConfigError: unknown keys (all of them, with the nearest names), a wrong type, a file that
            cannot be read, or settings that contradict each other.
        SystemExit: after `--help` and `--print_config`.
    """
    args = list(sys.argv[1:] if args is None else args)
    defaults = dict(defaults or {})
    for name in defaults:
        _check_path(cls, name, "launch configuration")
    # With defaults one of its own, since they stay in it.
    parser = _parser.__wrapped__(cls) if defaults else _parser(cls)
    if defaults:
        parser.set_defaults(defaults)
    parser.prog = os.path.basename(sys.argv[0])
    if default_file is not None and not any(a.split("=")[0] == "--config" for a in args):
        args = ["--config", str(default_file), *args]
    unknown = _Unknown(cls)
    for file in _config_files(args):
        content = _read(file)
        if issubclass(cls, RunConfig):
            check_kind(cls, content, str(file))
            refuse_foreign_config(content, file)
        _check_keys(cls, content, str(file), unknown)
    _check_flags(cls, args, unknown)
    unknown.refuse()
    try:
        parsed = parser.parse_args(_as_fields(args))
        sections = parser.instantiate(parsed)
        cfg = cls(**{f.name: _plain(sections[f.name]) for f in dataclasses.fields(cls)})
    except ArgumentError as error:
        raise ConfigError(_in_plain_words(cls, " ".join(str(error).split()))) from None
    except ConfigError as error:  # of a dataclass, whose settings contradict each other
        of_launch = [n for n, v in defaults.items() if parsed.get(n) == v]
        blamed = ", ".join(n for n in of_launch if re.search(rf"{n}\b", str(error)))
        if not blamed:
            raise
        raise ConfigError(f"{error} ({blamed} came from the launch configuration)") from None
    if (lora := getattr(cfg, "lora", None)) is not None:
        names = {n.partition(".")[2] for n in _explicit(cls, args) if n.startswith("lora.")}
        object.__setattr__(lora, "explicit", frozenset(names))
    for name, value in flat(cfg).items():
        kind = _check_path(cls, name, "")
        if value is None and type(None) not in typing.get_args(kind):  # jsonargparse lets null pass
            raise ConfigError(f"{name} must be {in_words(kind)}, got nothing (null)")
        _refuse_secret(str(value), name)
    return cfg


def load(cls: type, file: str | Path, flags: Sequence[str] = ()) -> Any:
    """Read a `cls` from a YAML file; `flags` win over it. Raises as `parse` does."""
    return parse(cls, ["--config", str(file), *flags])


def dump(cfg: Any) -> str:
    """Return the resolved config as YAML; `load` reads it back to an equal value."""
    content = to_settings(type(cfg), dataclasses.asdict(cfg))
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configs differ: dotted name -> (old value, new value)."""
    before, after = flat(old), flat(new)
    pairs = {name: (before.get(name), after.get(name)) for name in {**before, **after}}
    # A text is the list of one that it stands for: `train_files: a.txt` is `[a.txt]`.
    lists = {n: [[v] if isinstance(v, str) else v for v in pair] for n, pair in pairs.items()}
    return {name: pair for name, pair in pairs.items() if lists[name][0] != lists[name][1]}


@functools.cache
def _parser(cls: type) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)

    # A text that is no YAML, such as `*.txt`, is the text itself.
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
        # On a fixed width, so that it reads the same under every launcher.
        formatter_class=functools.partial(_Help, cls, width=110, max_help_position=44),  # type: ignore[arg-type]
        usage="%(prog)s [--config FILE] [--section.field VALUE ...] [--print_config]",
        parser_mode=mode,
    )
    parser.add_argument("--config", action="config", help="YAML file with settings as below")
    parser.add_class_arguments(cls)
    return parser


class _Help(DefaultHelpFormatter):
    """Lists settings, not their sections, which jsonargparse would read from files of their own."""

    def __init__(self, cls: type, **options: Any) -> None:
        super().__init__(**options)
        hints = typing.get_type_hints(cls)
        self._sections = {name for name, kind in hints.items() if dataclasses.is_dataclass(kind)}

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in self._sections:
            if (setting := setting_path(action.dest)) != action.dest:
                action = copy.copy(action)
                action.option_strings = [f"--{setting}"]
                action.metavar = setting.rpartition(".")[2].upper()
            super().add_argument(action)


def _as_fields(args: Sequence[str]) -> list[str]:
    """Return the command line with the flags that jsonargparse has, which are named by fields."""
    pairs = [arg.partition("=") if arg.startswith("--") else (arg, "", "") for arg in args]
    return [
        f"--{field_path(flag[2:])}{equals}{value}" if flag.startswith("--") else flag
        for flag, equals, value in pairs
    ]


def _explicit(cls: type, args: Sequence[str]) -> set[str]:
    """Return the dotted settings that files and flags name."""

    def names(kind: type, content: dict, prefix: str = "") -> Iterator[str]:
        for key, value in content.items():
            inner = setting_types(kind).get(key)
            if dataclasses.is_dataclass(inner) and isinstance(value, dict):
                yield from names(inner, value, f"{prefix}{key}.")  # type: ignore[arg-type]
            else:
                yield f"{prefix}{key}"

    flags = {a.partition("=")[0][2:].removesuffix("+") for a in args if a.startswith("--")}
    return flags.union(*(names(cls, _read(file)) for file in _config_files(args)))


def _plain(value: Any) -> Any:
    """Return `value` with numbers of jsonargparse's restricted types as plain numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    number = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if number is None else number(value)


class _Dumper(yaml.SafeDumper):
    """YAML in which texts stay texts: PyYAML reads `1e3` as one, jsonargparse as a number."""


def _text_node(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "'" if re.fullmatch(r"[-+]?[\d._]+(e[-+]?\d+)?", value, re.IGNORECASE) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text_node)


# ---- What is checked before jsonargparse sees it


class UnknownSettingError(ConfigError):
    """A name is no setting; `said` is what may have been meant, and `place` where it stands."""

    def __init__(self, path: str, place: str, said: str) -> None:
        super().__init__(f"unknown setting {path!r} ({place}){said}")
        self.path, self.place, self.said = path, place, said


class _Unknown:
    """The unknown settings of files and flags, refused together on one line."""

    def __init__(self, cls: type) -> None:
        self._cls, self._found = cls, list[UnknownSettingError]()

    def add(self, error: UnknownSettingError) -> None:
        self._found.append(error)

    def refuse(self) -> None:
        """Raise a ConfigError where there is one."""
        if not self._found:
            return
        names = [repr(error.path) for error in self._found]
        whole = [name + error.said for name, error in zip(names, self._found, strict=True)]
        places = ", ".join(dict.fromkeys(error.place for error in self._found))
        count = f"{len(names)} unknown settings" if len(names) > 1 else "unknown setting"
        page = ""
        if issubclass(self._cls, RunConfig):
            kind = kind_of(self._cls)
            shown = f"toolkit {kind.command}" if kind.command else f"python recipes/{kind.name}.py"
            page = f"; all settings: docs/reference/settings.md, or `{shown} --help`"
        if len(names) == 1:
            raise ConfigError(f"{self._found[0]}{page}")
        room = _LONGEST - len(f"{count} ({places}): {page}")
        # As many as fit with what may have been meant, the others by name, as many as fit.
        lists = [[*whole[:n], *names[n:]] for n in range(len(names), -1, -1)]
        lists += [[*names[:n], f"and {len(names) - n} more"] for n in range(len(names) - 1, 0, -1)]
        texts = ["; ".join(some) for some in lists]
        said = next((text for text in texts if len(text) <= room), texts[-1])
        raise ConfigError(f"{count} ({places}): {said}{page}")


def _config_files(args: Sequence[str]) -> list[Path]:
    files = [a.split("=", 1)[1] for a in args if a.startswith("--config=")]
    files += [b for a, b in itertools.pairwise(args) if a == "--config"]
    for file in files:
        if Path(file).exists() and not Path(file).is_file():
            raise ConfigError(f"config file {file} is not a file (current folder: {Path.cwd()})")
        if not Path(file).exists():
            ours = "recipes/configs" in Path(file).as_posix()  # of which a wheel has copies
            raise ConfigError(
                f"config file {file} does not exist (current folder: {Path.cwd()})"
                + "; `toolkit recipes --copy finetune` puts the ready configs there" * ours
            )
    return [Path(f) for f in files]


def _read(file: Path) -> dict:
    content = read_yaml(file, ConfigError)
    if content is None:
        raise ConfigError(f"{file} is empty; a YAML file with settings is expected (see --help)")
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping of settings, got {type(content).__name__}")
    return content


def _check_flags(cls: type, args: Sequence[str], unknown: _Unknown) -> None:
    kind, setting = None, ""
    for arg, following in zip(args, [*args, "--"][1:], strict=True):
        flag, equals, value = arg.partition("=")
        _refuse_secret(arg, flag if equals else "the command line")
        if not flag.startswith("--"):
            _check_text(setting, kind, arg)
        elif flag not in ("--config", "--help", "--print_config"):
            setting, kind = flag.removeprefix("--").removesuffix("+"), None
            try:
                kind = _check_path(cls, setting, "command line")
            except UnknownSettingError as error:
                unknown.add(error)
                continue
            if dataclasses.is_dataclass(kind):
                raise ConfigError(
                    f"{flag} is a section of settings; give them one by one: "
                    f"--{setting}.{next(iter(setting_types(typing.cast(type, kind))))} VALUE"
                )
            if equals:
                _check_text(setting, kind, value)
            elif following.startswith("--"):
                is_bool = bool in (kind, *typing.get_args(kind))
                raise ConfigError(
                    f"{flag} must be followed by its value, {in_words(kind)}"
                    + f": {flag} true" * is_bool
                )


def _refuse_secret(text: str, where: str) -> None:
    if looks_secret(text):
        raise ConfigError(
            f"{where} holds what looks like a token or a password, and config.yaml would keep it; "
            "leave it to HF_TOKEN, or to `hf auth login`"
        )


def _check_text(setting: str, kind: Any, text: str) -> None:
    """Refuse a text that is no value of `kind`, before PyYAML reads it without bounds."""
    if kind is None or str in (kind, *typing.get_args(kind)):
        return
    try:
        value = parse_yaml(text, setting, ConfigError)
    except ConfigError:
        raise ConfigError(f"{setting} must be {in_words(kind)}, got {text[:200]}") from None
    _check_items(value, kind, setting)


def _check_items(value: Any, kind: Any, where: str) -> None:
    """Refuse an unknown key, or a wrong value, of a list's item that is a section, such as one of
    `data.sources`.
    """
    (item,) = typing.get_args(kind) if typing.get_origin(kind) is list else (None,)
    if dataclasses.is_dataclass(item) and isinstance(value, list):
        for i, entry in enumerate(value):
            if isinstance(entry, dict):
                unknown = _Unknown(item)  # type: ignore[arg-type]
                _check_keys(item, entry, f"{where}[{i}]", unknown)  # type: ignore[arg-type]
                unknown.refuse()
                try:
                    _parser(item).parse_object(entry)  # type: ignore[arg-type]
                except ArgumentError as error:
                    said = _in_plain_words(item, " ".join(str(error).split()))  # type: ignore[arg-type]
                    raise ConfigError(f"{where}[{i}].{said}") from None


def _check_keys(cls: type, content: dict, where: str, unknown: _Unknown, prefix: str = "") -> None:
    """Add the keys of a YAML mapping that `cls` does not know to those that are `unknown`."""
    for key, value in content.items():
        try:
            known = _check_path(cls, f"{prefix}{key}", where)
        except UnknownSettingError as error:
            unknown.add(error)
            continue
        if dataclasses.is_dataclass(known) and not isinstance(value, dict):
            raise ConfigError(f"{prefix}{key} ({where}) is a section of settings, got {value!r}")
        if dataclasses.is_dataclass(known):
            _check_keys(cls, value, where, unknown, f"{prefix}{key}.")
        if isinstance(value, str):
            _check_text(f"{prefix}{key}", known, value)
        _check_items(value, known, f"{where}, {prefix}{key}")


def _check_path(cls: type, path: str, where: str) -> Any:
    """Return the type of a dotted setting; refuse one that does not exist."""
    here, walked = cls, ""
    for part in path.split("."):
        hints = setting_types(here) if dataclasses.is_dataclass(here) else {}
        if part not in hints:
            if is_secret_name(part):
                raise ConfigError(
                    f"{path!r} ({where}) is no setting: a config is written to files, where no "
                    "token belongs. Use `hf auth login`, or set HF_TOKEN"
                )
            said = f"; {walked.removesuffix('.')} takes a value"
            if instead := GONE.get(path):
                said = f", which is gone: {instead}"
            elif hints and (guess := meant(cls, here, walked, path)):
                said = f", did you mean {guess}?"
            elif hints:
                said = f"; nearest: {', '.join(nearest(cls, here, walked, part))}"
            raise UnknownSettingError(path, where, said)
        here, walked = hints[part], f"{walked}{part}."
    return here


# Words before the value in jsonargparse's messages.
_VALUE = re.compile(r"(?:Got|Given) value: |base 10: |to float: |Not of type \w+: ")


def _in_plain_words(cls: type, said: str) -> str:
    """Return what jsonargparse says of a value that does not parse, in a user's words."""
    if match := re.fullmatch(r'Parser key "([\w.]+)": (.*)', said):
        setting = setting_path(match[1])
        value = _VALUE.split(match[2])[-1]
        value = re.sub(r" (does not conform to|not an? (integer|number)$).*", "", value).strip("'")
        why = " (it needs loss scaling, which this toolkit does not implement)" * (
            value == "float16"
        )
        expected = in_words(_check_path(cls, setting, ""))
        if expected == "a list" and not value.startswith(("{", "[")):
            why = f"; write [{value[:200]}]"
        elif re.search(r"[\[,] *\*", value):  # YAML reads an alias
            why = "; an entry that begins with * goes in quotes: \"['*']\""
        elif guess := nearest_value(setting, _check_path(cls, setting, ""), value):
            why += f"; did you mean {guess}?"
        return f"{setting} must be {expected}, got {value[:200]}{why}"
    if match := re.fullmatch(r"the following arguments are required: (.*)", said):
        flag = f"--{match[1].split(',')[0]} VALUE"
        return f"{match[1]} is required; set it in the file of --config, or with {flag}"
    if match := re.fullmatch(r"unrecognized arguments: (.*)", said):
        return (
            f"unexpected on the command line: {match[1]}. A setting is given as --section.field "
            "VALUE, a list as --data.train_files '[a.txt, b.txt]' or a quoted glob, a file of "
            "settings as --config FILE"
        )
    return said


def in_words(kind: Any) -> str:
    """Return a type as a user would name it: `int | None` is "an integer or empty"."""
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
        return f"a mapping from text to {in_words(inner[1])}"
    if kind in names:
        return names[kind]
    return f"{', '.join(map(in_words, inner[:-1]))} or {in_words(inner[-1])}"


def flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of every field below a config; a dict is one value."""
    out: dict[str, Any] = {}
    for part in dataclasses.fields(cfg):
        value = getattr(cfg, part.name)
        if dataclasses.is_dataclass(value):
            out |= flat(value, f"{prefix}{setting_name(part.name)}.")
        else:
            out[prefix + setting_name(part.name)] = value
    return out
