"""`report.html` and `report.png` written into a folder, once or while runs go on."""

import importlib.util
import time
from pathlib import Path

from toolkit.errors import ReportError
from toolkit.formats.synced_files import replace_synced, replacing
from toolkit.report import page, picture, tables
from toolkit.report.runs import RunRecord, read_runs

HTML, PNG = "report.html", "report.png"
_PACKAGES = ("plotly", "matplotlib")


def write_report(folders: list[str], output: str | None = None) -> tuple[Path, Path, list[str]]:
    """Write the report of one or several runs' folders; return the page, the picture and the notes
    on what is missing or odd in the folders.

    It goes to `output`, a folder, made where there is none, or to the first run's. Costs
    the reading of the runs' text files and a second or two of drawing; the page has 5 MB, most of
    it plotly's JavaScript.
    ReportError: a package is missing, or a folder is no run's. CheckpointError: a damaged file.
    """
    _check_packages()
    runs = read_runs(folders)
    return *_write(runs, output), tables.notes(runs)


def follow(folders: list[str], output: str | None, seconds: float) -> tuple[Path, Path, list[str]]:
    """Write the report every `seconds`, in a page that reloads itself as often, until all runs have
    done their steps or Ctrl-C; then once more, in a page that does not. Returns as `write_report`.
    """
    _check_packages()
    try:
        runs = read_runs(folders)
        while not all(run.done for run in runs):
            _write(runs, output, seconds)
            time.sleep(seconds)
            runs = read_runs(folders)
    except KeyboardInterrupt:
        pass  # the usual end; what follows is the report as of now
    return write_report(folders, output)


def _write(
    runs: list[RunRecord], output: str | None, reload_seconds: float | None = None
) -> tuple[Path, Path]:
    folder = runs[0].path if output is None else Path(output).expanduser()
    replace_synced(folder / HTML, page.render(runs, reload_seconds))
    with replacing(folder / PNG) as scratch:
        picture.draw(runs, scratch)
    return folder / HTML, folder / PNG


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(
            f"a report needs {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(_PACKAGES)}"
        )
