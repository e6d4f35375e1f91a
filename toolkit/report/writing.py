"""Write `report.html` and `report.png` into a folder, once or while the runs continue."""

import importlib.util
import time
from pathlib import Path

from toolkit.errors import ReportError
from toolkit.formats.synced_files import replace_on_exit, replace_synced
from toolkit.report import page, picture, tables
from toolkit.report.runs import RunRecord, read_runs

HTML, PNG = "report.html", "report.png"
_PACKAGES = ("plotly", "matplotlib")


def write_report(folders: list[str], output: str | None = None) -> tuple[Path, Path, list[str]]:
    """Write report.html and report.png for one or several runs.

    Reads the runs' text files, and draws for one or two seconds. The page has 5 MB, most of which
    is plotly's JavaScript.

    Args:
        folders: folders of the runs.
        output: folder for the report, created if it is missing; None: the folder of the first run.

    Returns:
        (path of the page, path of the picture, notes on missing or unexpected files).

    Raises:
        ReportError: a package is missing, or a folder is not that of a run.
        CheckpointError: a file is damaged.
    """
    _check_packages()
    runs = read_runs(folders)
    return *_write(runs, output), tables.list_notes(runs)


def follow(folders: list[str], output: str | None, seconds: float) -> tuple[Path, Path, list[str]]:
    """Write the report every `seconds` until all runs have finished or the user presses Ctrl-C.

    The page reloads itself at the same interval. At the end, the report is written once more, as a
    page that does not reload. For arguments, result and errors see `write_report`.
    """
    _check_packages()
    try:
        runs = read_runs(folders)
        while not all(run.is_finished for run in runs):
            _write(runs, output, seconds)
            time.sleep(seconds)
            runs = read_runs(folders)
    except KeyboardInterrupt:
        pass  # the usual end; the last report follows
    return write_report(folders, output)


def _write(
    runs: list[RunRecord], output: str | None, reload_seconds: float | None = None
) -> tuple[Path, Path]:
    """Write the page and the picture of the runs; return (path of the page, path of the picture).

    Args:
        runs: the runs.
        output: folder for the report; None: the folder of the first run.
        reload_seconds: interval at which the page reloads itself; None: never.
    """
    folder = runs[0].path if output is None else Path(output).expanduser()
    replace_synced(folder / HTML, page.render_page(runs, reload_seconds))
    with replace_on_exit(folder / PNG) as scratch:
        picture.draw_picture(runs, scratch)
    return folder / HTML, folder / PNG


def _check_packages() -> None:
    """Raise ReportError if plotly or matplotlib is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(
            f"a report needs {' and '.join(missing)}, not installed here: pip install "
            f"{' '.join(_PACKAGES)}"
        )
