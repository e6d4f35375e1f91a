"""The generated reference (docs/reference/) is fresh: all settings, commands and the API."""

import ast
import importlib
import re
import runpy

import pytest
from conftest import ROOT

from toolkit import recipes
from toolkit.config import flatten_settings
from toolkit.config.data import SourceConfig
from toolkit.config.distill import DistillConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import (
    FinetuneModelConfig,
    ModelConfig,
    PretrainConfig,
)

FOLDER = ROOT / "docs" / "reference"
MAKER = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
PAGES = MAKER["pages"]


def unlisted(page: str) -> set[str]:
    """Return the settings that have no row of their own, with a meaning, in `page`."""
    rows = set(
        re.findall(r"^\| `([\w.\[\]]+)` (?:\| [^|]+ ){3}\| [\w`][^|]* \|$", page, re.MULTILINE)
    )
    tuned = [kind(FinetuneModelConfig("x")) for kind in (PreferConfig, DistillConfig)]
    every = PretrainConfig(ModelConfig("x")), *tuned
    settings = {name for cfg in every for name in flatten_settings(cfg)}
    return (
        settings | {f"data.sources[].{name}" for name in flatten_settings(SourceConfig())}
    ) - rows


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "configs.md", "python.md"])
def test_the_reference_is_fresh(name: str) -> None:
    fresh = PAGES()[name]
    assert (FOLDER / name).read_text("utf-8") == fresh, "run python docs/make_reference.py"


def test_every_setting_has_a_row() -> None:
    page = (FOLDER / "settings.md").read_text("utf-8")
    assert not unlisted(page)
    (row,) = re.findall(r"^\| `optim.max_grad_norm` .*\n", page, re.MULTILINE)
    assert unlisted(page.replace(row, "")) == {"optim.max_grad_norm"}
    assert unlisted(page.replace(row, row.rsplit(" | ", 1)[0] + " |  |\n")) == {
        "optim.max_grad_norm"
    }


def test_every_command_is_there() -> None:
    page = (FOLDER / "commands.md").read_text("utf-8")
    headed = re.findall(r"^## toolkit (\w+)$", page, re.MULTILINE)
    assert set(headed) >= {"train", "finetune", "plan", "consolidate", "verify", "push"}
    for name in headed:
        assert f"usage: toolkit {name} " in page


def test_every_ready_config_is_in_the_table() -> None:
    page = (FOLDER / "configs.md").read_text("utf-8")
    named = re.findall(
        r"^\| [\w./-]+ \| [\w ,./-]+ \| \d+ \| [\d.]+ GB of \d+ GB \| `([\w.]+)` \|$", page, re.M
    )
    published = re.findall(r"^\| `([\w.]+)` \| [^|]*\d[^|]* \|$", page, re.M)
    assert len(published) >= 2
    files = {file.name for file in (ROOT / "recipes/configs").glob("*.yaml")}
    tiny = {f"{recipe}_tiny.yaml" for recipe in recipes.NAMES}
    assert set(named) | set(published) == files - tiny


def undescribed(page: str) -> set[str]:
    """Return the public names of packages, and what recipes import or call, that `page` lacks."""
    wanted = set()
    for room, named in MAKER["API"].items():
        module = importlib.import_module(room)
        public = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
        helpers = MAKER["HELPERS"]
        own = [
            name
            for name in public
            if callable(value := getattr(module, name)) and value.__module__ not in helpers
        ]
        own = own if named is None else list(named)
        wanted |= {f"{room}.{name}" for name in own}
    for recipe in ("pretrain", "finetune"):
        tree = ast.parse((ROOT / "recipes" / f"{recipe}.py").read_text("utf-8"))
        rooms = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "toolkit":
                rooms |= {alias.name: f"toolkit.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toolkit."):
                wanted |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in rooms:
                wanted.add(f"{rooms[ast.unparse(node.value)]}.{node.attr}")
    described = set()
    for section in page.split("\n## ")[1:]:
        room, marks = section.split("\n")[0], re.findall(r"^::: ([\w.]+)$", section, re.MULTILINE)
        rows = re.findall(r"^\| `(\w+)` \| [A-Z].*\. \|$", section, re.MULTILINE)
        written = {mark.rpartition(".")[2] for mark in marks}
        described |= {f"{room}.{name}" for name in rows if name in written}
    return wanted - described


def test_every_public_name_is_in_the_python_api() -> None:
    page = (FOLDER / "python.md").read_text("utf-8")
    assert not undescribed(page)
    for name in ("step.train_step", "optim.build_optimizer"):
        mark = f"::: toolkit.training.{name}\n"
        assert mark in page
        assert undescribed(page.replace(mark, "")) == {f"toolkit.training.{name.split('.')[1]}"}
    assert undescribed(page.replace("| `wait` |", "| `weight` |")) == {"toolkit.checkpoint.wait"}
