"""Kinds of runs: pretraining, fine-tuning, preference tuning, distillation, and users' own.

The class of its settings identifies a kind. A user's recipe defines a kind by subclassing one of
these classes: `class FocalConfig(FinetuneConfig)` is the kind `focal` of `recipes/focal.py`.
This module answers everything that differs by kind and does not depend on torch.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.config.distill import DistillConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import FinetuneConfig, PretrainConfig, RunConfig
from toolkit.errors import ConfigError


@dataclass(frozen=True)
class Kind:
    """A kind of run, such as preference tuning: its names, its command and its settings class."""

    name: str
    """Name of the recipe's file, and `kind` in the saved config.yaml."""
    command: str
    """Command of `toolkit` that starts it; empty for a user's recipe."""
    title: str
    """Its name in messages, model cards and reports."""
    config: type[RunConfig]
    refused: frozenset[str] = frozenset()
    """Dotted settings that its config class has and refuses, because they would have no effect."""

    @property
    def start_command(self) -> str:
        """The command that starts a run of this kind, as text for messages."""
        script = f"recipes/{self.name}.py"
        return f"`toolkit {self.command}` or {script}" if self.command else script


KINDS = (
    Kind("pretrain", "train", "pretraining", PretrainConfig),
    Kind("finetune", "finetune", "fine-tuning", FinetuneConfig),
    Kind(
        "prefer",
        "prefer",
        "preference tuning",
        PreferConfig,
        frozenset(
            {
                "data.supervise",
                "lora.lora_dropout",
                "train.label_smoothing_factor",
                "train.neftune_noise_alpha",
                "train.z_loss",
            }
        ),
    ),
    Kind(
        "distill",
        "distill",
        "distillation",
        DistillConfig,
        frozenset({"train.label_smoothing_factor", "train.z_loss"}),
    ),
)
"""The toolkit's own kinds, each after those whose settings it extends."""
# Sections that may change between two starts of a run. All others define the run, also those that
# a user's recipe adds.
_CHANGEABLE = frozenset(
    {"sharding", "optim", "train", "checkpoint", "metrics", "hub", "output_dir", "kind"}
)
_CHANGEABLE_SETTINGS = frozenset({"data.num_workers", "data.max_eval_samples"})
# Sections that say where a run writes its output. They are not published.
_PRIVATE = frozenset({"checkpoint", "metrics", "hub", "output_dir", "kind"})


def kind_of(config: type[RunConfig]) -> Kind:
    """Find the kind of run that the settings class `config` belongs to.

    A class that no shipped kind uses gets a new `Kind` without a command.
    """
    name = config.kind_name()
    shipped = find_shipped_kind(name)
    if shipped is None:
        return Kind(name, "", name, config)
    # A copy of a recipe may extend the settings of its kind under the same name.
    return Kind(name, shipped.command, shipped.title, config)


def find_shipped_kind(name: str) -> Kind | None:
    """Find the kind called `name` among those that come with the toolkit, or None."""
    return next((kind for kind in KINDS if kind.name == name), None)


def saved_kind_name(content: Mapping[str, Any]) -> str:
    """Determine the kind of run that a saved config.yaml belongs to.

    Args:
        content: the parsed file.

    Returns:
        The file's `kind`. If it has none, the kind is inferred from the sections of the file.
    """
    name = content.get("kind")
    if isinstance(name, str) and name:
        return name
    # A section that only a later kind has identifies a file without `kind`.
    for base, kind in reversed([*itertools.pairwise(KINDS)]):
        if (section_names(kind.config) - section_names(base.config)) & content.keys():
            return kind.name
    return KINDS[0].name


def check_kind(config: type[RunConfig], content: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a config file belongs to another kind of run than `config`.

    A file without `kind` is accepted. The message names both kinds, and the command that starts
    a run of the file's kind.

    Args:
        config: settings class of the recipe that was started.
        content: the parsed file.
        source: path of the file, for the message.
    """
    name = content.get("kind")
    expected = kind_of(config)
    if name in (None, "", expected.name):
        return
    if not isinstance(name, str):
        raise ConfigError(f"kind ({source}) must be text, got {name!r}")
    kind = find_shipped_kind(name) or Kind(name, "", name, RunConfig)
    raise ConfigError(
        f"expected a config of {expected.title}, got one of {kind.title} (kind: {name}, {source}); "
        f"start it with {kind.start_command}"
    )


# ---- Sections of settings


def section_names(config: type[RunConfig]) -> set[str]:
    """Return the names of the sections and top-level settings of a class of settings."""
    return {field.name for field in dataclasses.fields(config)}


def is_extra_section(section: str) -> bool:
    """Return True if neither pretraining nor fine-tuning has a section with this name.

    Examples are `preference`, and a section that a user's recipe adds.
    """
    return section not in section_names(PretrainConfig) | section_names(FinetuneConfig)


def is_fixed_on_resume(setting: str) -> bool:
    """Return True if a dotted setting must not change when a run is resumed.

    Most settings of the model and the data are fixed. Those of sharding, optimizer, logging and
    similar sections may change.
    """
    section = setting.partition(".")[0]
    return section not in _CHANGEABLE and setting not in _CHANGEABLE_SETTINGS


def is_published(section: str) -> bool:
    """Return True if a model card lists the settings of this section."""
    return section not in _PRIVATE
