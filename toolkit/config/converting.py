"""`toolkit convert-config`: a config of axolotl, TRL or Trainer as one of `recipes/finetune.py`.

Scripts are read as syntax, never run (`scripts`); what keys mean is `meanings`'.
"""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.meanings import Conversion, convert
from toolkit.config.parse import parse
from toolkit.config.scripts import read_script
from toolkit.config.settings import FinetuneConfig
from toolkit.errors import ConfigError
from toolkit.parsing import read_json, read_yaml


def convert_config(file: Path, tool: str | None = None) -> Conversion:
    """Return the config in `file` in settings of the toolkit.

    Args:
        file: YAML or JSON, or a Python script, which is not run.
        tool: one of `TOOLS`; None: told by the keys.

    Raises:
        ConfigError: the file cannot be read, or the result is no config (its settings contradict
            each other).
    """
    computed: dict[str, str] = {}
    if file.suffix == ".py":
        content, computed = read_script(file)
    elif file.suffix == ".json":
        content = read_json(file, ConfigError)
    else:
        content = read_yaml(file, ConfigError)
    if not isinstance(content, dict) or not {**content, **computed}:
        raise ConfigError(f"{file} holds no settings; expected a mapping, or a script that trains")
    if tool is None and file.suffix == ".py":
        tool = "trl" if "SFTConfig" in file.read_text("utf-8") else "trainer"
    out = convert({str(key): value for key, value in content.items()}, tool, computed)
    out.text = _text(out.settings, file, out.tool)
    return out


def _text(settings: Mapping[str, Any], file: Path, tool: str) -> str:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, leaf = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    order = [f.name for f in dataclasses.fields(FinetuneConfig) if f.name in nested]
    body = yaml.safe_dump({n: nested[n] for n in order}, sort_keys=False, allow_unicode=True)
    text = f"# From {file.name} ({tool}), for recipes/finetune.py.\n{body}"
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "converted.yaml")
        written.write_text(text, encoding="utf-8")
        try:
            parse(FinetuneConfig, ["--config", str(written)])
        except ConfigError as error:
            raise ConfigError(f"{file} cannot be converted: {error}") from error
    return text
