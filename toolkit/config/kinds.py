"""Kinds of runs: pretraining, fine-tuning, preference tuning, and those of a user's own recipes.

A kind is known by the class of its settings. A user's recipe adds a kind by subclassing one of the
classes: `class DistillConfig(FinetuneConfig)` is the kind `distill` of `recipes/distill.py`.
Everything that differs by kind without depending on torch is answered here.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.preference import PreferConfig
from toolkit.config.settings import FinetuneConfig, PretrainConfig, RunConfig
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of run, such as preference tuning."""

    name: str
    """Name of the recipe's file, and `kind` in the saved config.yaml."""
    command: str
    """Command of `toolkit` that starts it; empty for a user's own recipe."""
    title: str
    """Its name in messages, cards and reports."""
    config: type[RunConfig]

    @property
    def start(self) -> str:
        """How to start a run of this kind, for messages."""
        script = f"recipes/{self.name}.py"
        return f"`toolkit {self.command}` or {script}" if self.command else script


KINDS = (
    Kind("pretrain", "train", "pretraining", PretrainConfig),
    Kind("finetune", "finetune", "fine-tuning", FinetuneConfig),
    Kind("prefer", "prefer", "preference tuning", PreferConfig),
)
"""The kinds that come with the toolkit. A kind follows those whose settings it extends."""
# Sections that may change between two starts of a run. All others define the run, also those that
# a user's recipe adds.
_CHANGEABLE = frozenset(
    {"sharding", "optim", "train", "checkpoint", "metrics", "hub", "output_dir", "kind"}
)
_CHANGEABLE_SETTINGS = frozenset({"data.num_workers", "data.max_eval_samples"})
# Sections that say where a run writes to, which nobody else needs to know.
_PRIVATE = frozenset({"checkpoint", "metrics", "hub", "output_dir", "kind"})


def kind_of(config: type[RunConfig]) -> Kind:
    """Return the kind of the runs that have these settings."""
    name = config.kind_name()
    shipped = kind_named(name)
    if shipped is None:
        return Kind(name, "", name, config)
    # A copy of a recipe may extend the settings of its kind under the same name.
    return Kind(name, shipped.command, shipped.title, config)


def kind_named(name: str) -> Kind | None:
    """Return the kind of this name that comes with the toolkit; None if there is none."""
    return next((kind for kind in KINDS if kind.name == name), None)


def saved_kind_name(content: Mapping[str, Any]) -> str:
    """Return the name of the kind of run that wrote a config.yaml with this content."""
    name = content.get("kind")
    if isinstance(name, str) and name:
        return name
    # A file without `kind` is known by a section that only a later kind has.
    for before, kind in reversed([*itertools.pairwise(KINDS)]):
        if (section_names(kind.config) - section_names(before.config)) & content.keys():
            return kind.name
    return KINDS[0].name


def check_kind(config: type[RunConfig], content: Mapping[str, Any], source: str) -> None:
    """Refuse the content of a config file if its `kind` is not that of `config`.

    Raises:
        ConfigError: names both kinds, and how to start a run of the file's kind.
    """
    name, expected = content.get("kind"), kind_of(config)
    if name in (None, "", expected.name):
        return
    if not isinstance(name, str):
        raise ConfigError(f"kind ({source}) must be text, got {name!r}")
    kind = kind_named(name) or Kind(name, "", name, RunConfig)
    raise ConfigError(
        f"expected a config of {expected.title}, got one of {kind.title} (kind: {name}, {source}); "
        f"start it with {kind.start}"
    )


# ---- Sections of settings


def section_names(config: type[RunConfig]) -> set[str]:
    """Return the names of the sections and top-level settings of a class of settings."""
    return {field.name for field in dataclasses.fields(config)}


def is_special(section: str) -> bool:
    """Return True if neither pretraining nor fine-tuning has this section.

    It is then what is special about the kind, such as `preference`, or a section that a user's
    recipe adds.
    """
    return section not in section_names(PretrainConfig) | section_names(FinetuneConfig)


def defines_run(setting: str) -> bool:
    """Return True if another value of a dotted setting makes another run.

    Such a setting must not change between two starts on the same output_dir.
    """
    section = setting.partition(".")[0]
    return section not in _CHANGEABLE and setting not in _CHANGEABLE_SETTINGS


def is_published(section: str) -> bool:
    """Return True if a model card lists the settings of this section."""
    return section not in _PRIVATE
