"""`toolkit convert-config`: convert a config, script or command line of another tool.

Imports no torch. Scripts are parsed and never run (`scripts`, `command_lines`). `mapping` converts
configs of axolotl, TRL and Trainer. Configs of other tools are first translated to the names of
Trainer and TRL (`llama_factory`, `openrlhf`, `open_instruct`, `ms_swift`, `torchtune`).
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.kinds import KINDS
from toolkit.config.other_tools import TOOL_TITLES, TOOLKIT, is_convertible, recognise_tool
from toolkit.config.parse import parse
from toolkit.convert.command_lines import read_command_line
from toolkit.convert.keys import Translation
from toolkit.convert.llama_factory import translate_llama_factory
from toolkit.convert.mapping import Converter
from toolkit.convert.ms_swift import translate_ms_swift
from toolkit.convert.open_instruct import translate_open_instruct
from toolkit.convert.openrlhf import translate_openrlhf
from toolkit.convert.preferences import find_script_objective
from toolkit.convert.scripts import read_script
from toolkit.convert.torchtune import translate_torchtune
from toolkit.errors import ConfigError, one_line
from toolkit.parsing import read_json, read_yaml

_SETTINGS = {kind.name: kind.config for kind in KINDS}
_TRANSLATORS: dict[str, Callable[[Mapping[str, Any], str], Translation]] = {
    "llama-factory": translate_llama_factory,
    "ms-swift": translate_ms_swift,
    "open-instruct": translate_open_instruct,
    "openrlhf": translate_openrlhf,
    "torchtune": translate_torchtune,
}


@dataclass
class Conversion:
    """A config of another tool, converted to settings and YAML of this toolkit, with notes."""

    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted setting -> value."""
    notes: list[str] = field(default_factory=list)
    """A line for each key that is not converted, or has another meaning here."""
    recipe: str = "finetune"
    """The recipe that the config is for: pretrain, finetune or prefer."""
    text: str = ""
    """The config as YAML."""


def convert_config(file: Path, tool: str | None = None) -> Conversion:
    """Convert a config file of another tool to a config of this toolkit.

    Args:
        file: YAML or JSON, a Python script, or a shell script with one training command. Scripts
            are not run.
        tool: the tool that the file is for, a key of `TOOL_TITLES`; None: recognise it by the keys.
            The objective may follow after a dash, such as trl-dpo or openrlhf-rm, if the keys do
            not show it.

    Returns:
        The settings, notes and YAML. The text of a config of this toolkit is returned unchanged.

    Raises:
        ConfigError: the file cannot be read, its tool is unknown, it needs something that has no
            equivalent, or its settings contradict each other.
    """
    computed: dict[str, str] | None = None
    unsloth = False
    content: Any
    if file.suffix == ".py":
        content, computed, trainers, unsloth = read_script(file)
        objective, text = find_script_objective(trainers), file.read_text("utf-8")
        configs = (f"{name}Config" for name in ("SFT", *trainers))
        trl = any(name in text for name in configs)
        tool = tool or ("trl" if trl else "trainer")
        tool = f"{tool}-{objective}" if objective and "-" not in tool else tool
    elif file.suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        program, command, content, computed = read_command_line(file)
        tool = tool or (f"{program}-{command}" if command else program)
    else:
        content = (read_json if file.suffix == ".json" else read_yaml)(file, ConfigError)
    if not isinstance(content, dict) or not (content or computed):
        raise ConfigError(f"{file} holds no settings; expected a mapping, or a script that trains")
    content = {str(key): value for key, value in content.items()}
    if tool is None:
        tool = _recognise(file, content)
    if tool == TOOLKIT:
        return _keep_toolkit_config(file, content)
    try:
        out = convert_settings(content, tool, computed)
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be converted: a setting has a value of another type than {tool} "
            f"expects ({one_line(error)}); correct or remove the setting"
        ) from error
    out.tool = "unsloth" if unsloth else out.tool
    out.text = _render(file, out)
    _check_parsing(file, out)
    return out


def convert_settings(
    settings: dict[str, Any], tool: str | None = None, computed: Mapping[str, str] | None = None
) -> Conversion:
    """Convert the settings of another tool, without rendering YAML and checking it.

    Args:
        settings: key of the other tool -> value.
        tool: as in `convert_config`.
        computed: for a script, key whose value only the running script knows -> note about it; None
            if the settings do not come from a script.
    """
    tool = tool or recognise_tool(settings) or "trainer"
    tool = tool.replace("unsloth", "trl")
    translator = next((name for name in _TRANSLATORS if f"{tool}-".startswith(f"{name}-")), None)
    if translator is None:
        name = tool.partition("-")[0]
        mapping = Converter(settings, tool, computed)
    else:
        name, command = translator, tool.removeprefix(translator).lstrip("-")
        translation = _TRANSLATORS[name](settings, command)
        mapping = Converter(translation.settings, name, computed, translation)
    recipe, converted, notes = mapping.run()
    return Conversion(name, converted, notes, recipe)


def _recognise(file: Path, content: dict[str, Any]) -> str:
    """Return the name of the tool that a config was written for, recognised by its keys.

    Raises:
        ConfigError: the tool is unknown, or its configs cannot be converted.
    """
    tool = recognise_tool(content)
    titles = ", ".join(TOOL_TITLES.values())
    if tool is None:
        raise ConfigError(
            f"{file} is not a config of a known tool; expected one of {titles}. If it is a config "
            "of one of them, name the tool: --from TOOL"
        )
    if tool != TOOLKIT and not is_convertible(tool):
        raise ConfigError(
            f"{file} is a config of {tool}, which cannot be converted; expected one of {titles}. "
            "`toolkit recipes --copy finetune` puts configs of this toolkit into the folder"
        )
    return tool


def _keep_toolkit_config(file: Path, content: dict[str, Any]) -> Conversion:
    """Return the text of a config that is already one of this toolkit, with a note.

    Raises:
        ConfigError: no recipe can parse it.
    """
    kind = content.get("kind")
    if isinstance(kind, str) and kind in _SETTINGS:
        recipes = [kind]
    else:
        # `parse` refuses a kind of a user's recipe, and names its script.
        recipes = ["prefer"] if "preference" in content else ["finetune", "pretrain"]
    errors = []
    for name in recipes:
        try:
            parse(_SETTINGS[name], ["--config", str(file)])
        except ConfigError as error:
            errors.append(error)
            continue
        note = f"{file} is already a config of this toolkit; it is returned unchanged"
        return Conversion(TOOLKIT, {}, [note], name, file.read_text("utf-8"))
    raise errors[0]


def _render(file: Path, out: Conversion) -> str:
    """Render the converted settings as YAML, sections in the order of the recipe's config.

    A comment in the first line names the file, the tool and the recipe.
    """
    nested: dict[str, Any] = {}
    for name, value in out.settings.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    order = [f.name for f in dataclasses.fields(_SETTINGS[out.recipe]) if f.name in nested]  # type: ignore[arg-type]
    body = yaml.safe_dump({n: nested[n] for n in order}, sort_keys=False, allow_unicode=True)
    return f"# From {file.name} ({out.tool}), for recipes/{out.recipe}.py.\n{body}"


def _check_parsing(file: Path, out: Conversion) -> None:
    """Raise ConfigError if the recipe cannot parse the converted YAML.

    Writes the YAML to a temporary file.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "converted.yaml")
        written.write_text(out.text, encoding="utf-8")
        try:
            parse(_SETTINGS[out.recipe], ["--config", str(written)])
        except ConfigError as error:
            raise ConfigError(f"{file} cannot be converted: {error}") from error
