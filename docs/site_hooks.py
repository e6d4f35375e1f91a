"""What mkdocs does to the pages: the changelog becomes one, code breaks where it can be read."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_WIDE = 5  # columns of a table that becomes a list of cards on a small screen
_CELL = re.compile(r"(<td[^>]*>.*?</td>)", re.DOTALL)
_CODE = re.compile(r"(?<!<pre>)(<code>)(.*?)(</code>)", re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])(--?\w)")


def on_files(files: Any, config: Any) -> Any:
    """Add CHANGELOG.md of the repository, whose links are relative to that."""
    text = Path(config.config_file_path).with_name("CHANGELOG.md").read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Let code in tables break after a dot, a slash or an underscore, and none after `--`."""

    def broken(code: re.Match[str]) -> str:
        return code[1] + re.sub(r"(?<=\w)([._/])(?=\w)", r"\1<wbr>", code[2]) + code[3]

    def held(code: re.Match[str]) -> str:
        return code[1] + _FLAG.sub(r'<span class="flag">\1</span>', code[2]) + code[3]

    html = _TABLE.sub(lambda table: _name_cells(table[0]), html)
    html = _CELL.sub(lambda cell: _CODE.sub(broken, cell[1]), html)
    return _CODE.sub(held, html)


def _name_cells(table: str) -> str:
    """Give the cells of a wide table the titles of their columns, which cards show (site.css)."""
    heads = [re.sub(r"<.*?>", "", head).strip() for head in _HEAD.findall(table)]
    if len(heads) < _WIDE:
        return table

    def named(row: re.Match[str]) -> str:
        titles = iter(heads)
        return re.sub(r"<td>", lambda _: f'<td data-title="{next(titles, "")}">', row[0])

    return _ROW.sub(named, table).replace("<table>", "<table data-cards>", 1)
