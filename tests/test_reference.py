"""The generated reference (docs/reference/) is fresh and lists every setting and every command."""

import re
import runpy

import pytest
from conftest import ROOT

from toolkit.config import flat
from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    ModelConfig,
    PretrainConfig,
    SourceConfig,
)

FOLDER = ROOT / "docs" / "reference"
PAGES = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["pages"]


def unlisted(page: str) -> set[str]:
    """Return the settings that have no row of their own, with a meaning, in `page`."""
    rows = set(
        re.findall(r"^\| `([\w.\[\]]+)` (?:\| [^|]+ ){3}\| [\w`][^|]* \|$", page, re.MULTILINE)
    )
    both = PretrainConfig(ModelConfig("x")), FinetuneConfig(FinetuneModelConfig("x"))
    settings = {name for cfg in both for name in flat(cfg)}
    return (settings | {f"data.sources[].{name}" for name in flat(SourceConfig())}) - rows


@pytest.mark.parametrize("name", ["settings.md", "commands.md", "configs.md"])
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
        r"^\| [\w./-]+ \| [\w ,-]+ \| \d+ \| [\d.]+ GB of \d+ GB \| `([\w.]+)` \|$", page, re.M
    )
    files = {file.name for file in (ROOT / "recipes/configs").glob("*.yaml")}
    assert set(named) == files - {"pretrain_tiny.yaml", "finetune_tiny.yaml"}
