"""What the how-tos say that `toolkit plan` prints of their configs, it prints."""

import re
import shlex
from decimal import Decimal
from pathlib import Path

import pytest
from conftest import ROOT
from documents import blocks
from published import PUBLISHED, folder_of

from toolkit import cli

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))


def _published(config: str) -> list[str]:
    """Return the well-known model of a config; others have no shape here."""
    return [name for name in PUBLISHED if f"{name}\n" in config]


def planned() -> list:
    """Return (page, config, command, what it shows) of each plan that a page shows."""
    found = []
    for page in PAGES:
        shown = list(blocks(page))
        configs = {block.title: block.text for block in shown if block.title}
        for place, block in enumerate(shown):
            for line in block.lines():
                words = shlex.split(line, comments=True)
                content = configs.get(words[2], "") if words[:2] == ["toolkit", "plan"] else ""
                if _published(content) and "from: runs/" not in content:
                    output = next(b for b in shown[place:] if b.language == "text")
                    case = configs[words[2]], words[1:], output.text
                    found.append(pytest.param(*case, id=words[2]))
    return found


@pytest.mark.plans
@pytest.mark.parametrize(("content", "command", "shown"), planned())
def test_a_plan_is_what_the_page_says(content, command, shown, tmp_path, monkeypatch, capsys):
    (name,) = _published(content)
    monkeypatch.chdir(tmp_path)
    local = content.replace(name, str(folder_of(name, tmp_path)))
    Path(command[1]).write_text(local, "utf-8")
    assert cli.main(command) == 0
    said = capsys.readouterr().out.splitlines()
    missing = [line for line in shown.splitlines() if not any(agrees(line, s) for s in said)]
    assert not missing, "\n".join(said)


def agrees(line: str, other: str) -> bool:
    """Return True if two lines have the same words, and numbers that differ in the last digit."""
    if _NUMBER.sub("#", line) != _NUMBER.sub("#", other):
        return False
    pairs = zip(read_numbers(line), read_numbers(other), strict=True)
    return all(abs(a - b) <= Decimal((0, (1,), a.as_tuple().exponent)) for a, b in pairs)


def read_numbers(line: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in _NUMBER.findall(line)]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ("In 24.0 GB it fits: 4.0 GB are left.", True),
        ("In 24.0 GB it fits: 4.2 GB are left.", True),
        ("In 24.0 GB it fits: 4.3 GB are left.", False),
        ("In 80.0 GB it fits: 4.1 GB are left.", False),
        ("In 24.0 GB it does not fit: 4.1 GB are missing.", False),
    ],
)
def test_a_figure_may_differ_in_its_last_digit(other: str, equal: bool) -> None:
    assert agrees("In 24.0 GB it fits: 4.1 GB are left.", other) == equal


def test_the_pages_show_plans() -> None:
    assert len(planned()) >= 5
