"""What a person sees of a run: lines above a bar in a terminal, lines alone elsewhere."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from toolkit import ranks, tables
from toolkit.formats.metrics_file import read_metrics
from toolkit.training.guards.bad_steps import BadSteps
from toolkit.training.guards.run_guards import Guards
from toolkit.training.metrics import Metrics
from toolkit.training.step import StepStats

STEP = re.compile(r"step +(\d)/3  loss 2\.5000  [\d,]+ tok/s  grad_norm 1\.000  lr 1\.00e-03  \d+")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[list[str]]:
    """Let this process print to a terminal; the list holds its lines afterwards."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown: list[str] = []
    content = bytearray()

    def read() -> None:
        with suppress(OSError):  # its other end was closed
            while True:
                content.extend(os.read(ours, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as screen, monkeypatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        patch.setattr(sys, "__stdout__", screen)  # of which shutil asks the width
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        yield shown
    reader.join()
    os.close(ours)
    written = content.decode()
    for line in written.replace("\r\n", "\n").split("\n"):
        cells = ""
        for part in line.split("\r"):  # each overwrites what stands there
            cells = part + cells[len(part) :]
        shown.append(cells.rstrip())


def train(folder: Path) -> None:
    """Take three steps, and save after each."""
    metrics = Metrics(
        folder,
        device=torch.device("cpu"),
        first_step=0,
        max_steps=3,
        tokens_before=0,
        tokens_per_step=100,
        flops_per_token=1.0,
        logging_steps=1,
        epochs_per_step=0.25,
    )
    one = torch.tensor(1.0)
    stats = StepStats(2.5 * one, one, torch.tensor(90), *torch.tensor([False, False]))
    for step in (1, 2, 3):
        metrics.step(step, stats, 1e-3)
        ranks.log_once(f"saved step-{step}")
    metrics.close()


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_in_a_terminal_lines_stand_above_one_bar(tmp_path, monkeypatch, columns) -> None:
    with terminal(monkeypatch, columns) as shown:
        train(tmp_path)
    assert all(len(line) <= columns for line in shown)
    lines = "\n".join(filter(None, shown)).replace("\n    ", "  ").split("\n")
    assert len(lines) == 7
    assert len(list(filter(None, shown))) == 7  # a step is one line in any terminal
    for step in (1, 2, 3):
        logged, saved = lines[2 * step - 2 : 2 * step]
        assert STEP.match(logged) or columns == 50
        assert "eta" not in logged  # the bar has it
        assert saved == f"saved step-{step}"
    bar = lines[-1]
    assert len(bar) <= columns
    assert bar.startswith("3/3 |")
    if columns >= 80:
        assert re.search(r"\| 00:0\d<00:00, loss 2\.5000  [\d,]+ tok/s  [\d.]+ [MG]B$", bar)


def test_plain_prints_would_break_the_bar(tmp_path, monkeypatch) -> None:
    """The control: what was printed before through `print`."""
    monkeypatch.setattr(ranks, "print_line", lambda line, file=None: print(line, flush=True))
    with terminal(monkeypatch, 80) as shown:
        train(tmp_path)
    assert not all(STEP.match(line) or line.startswith("saved") for line in shown[:6])


def test_elsewhere_there_is_one_line_a_logged_step(tmp_path, capsys) -> None:
    train(tmp_path)
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert [bool(STEP.match(line)) for line in lines] == [True, False] * 3
    assert [line.rpartition("  ")[2] for line in lines[2::2]] == ["eta 00:00"] * 2
    kept = read_metrics(tmp_path)
    assert [line["epoch"] for line in kept] == [0.25, 0.5, 0.75]
    assert kept[0]["time"] <= kept[1]["time"] <= kept[2]["time"]


def test_no_bar_in_a_terminal_where_none_is_wanted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with terminal(monkeypatch, 80) as shown:
        train(tmp_path)
    assert sum("eta" in line for line in shown) == 2
    assert not any("|" in line for line in shown)


def test_tables_are_as_wide_as_the_terminal(monkeypatch, capsys) -> None:
    rows = [["unit", "parameters", "computed", "freed"], ["layers", "1", "bfloat16", "yes"]]
    whole = tables.format_table(rows, right={1})
    assert whole == ["unit    parameters  computed  freed", "layers           1  bfloat16  yes"]
    with terminal(monkeypatch, 28):
        narrow = tables.format_table(rows, right={1})
    assert narrow == [
        *("unit    parameters  computed", "layers           1  bfloat16"),
        *("unit    freed", "layers  yes"),
    ]
    with terminal(monkeypatch, 36):
        assert tables.format_table(rows, right={1}) == whole
        assert tables.format_table(rows, right={1}, margin=10) != whole
    assert tables.format_table([], right=set()) == []
    rows = [["matrix", "count", "trained"], ["model.layers.{0..2}.mlp.up_proj.weight", "3", "92"]]
    with terminal(monkeypatch, 40):
        assert tables.format_table(rows, right={1, 2}) == [
            "matrix                count  trained",
            "….mlp.up_proj.weight      3       92",
        ]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_step_is_one_line_of_a_terminal(tmp_path, monkeypatch, columns) -> None:
    """Of a real length: the mean and the memory give way where there is no room."""
    long = {"step": 300, "loss": 4.5310, "mean_loss": 4.4551, "tokens_per_second": 3292.0}
    long |= {"grad_norm": 0.668, "learning_rate": 9.44e-8, "memory_peak_bytes": 818_400_000}
    with terminal(monkeypatch, columns) as shown:
        metrics = Metrics(
            tmp_path,
            device=torch.device("cpu"),
            first_step=0,
            max_steps=300,
            tokens_before=0,
            tokens_per_step=100,
            flops_per_token=1.0,
            logging_steps=10,
            epochs_per_step=0.25,
        )
        metrics._print(long)
        evaluated = {"eval_loss": 4.84, "eval_perplexity": 126.5, "eval_accuracy": 0.155}
        metrics._print(long | {"margin": 0.5, "accuracy": 0.75} | evaluated)
        metrics.close()
    line, of_evaluation = [line for line in shown if line.startswith("step")]
    assert len(line) <= columns
    assert len(of_evaluation) <= columns
    assert "eval_loss 4.8400" in of_evaluation
    assert ("margin 0.500" in of_evaluation) is (columns == 200)
    start = "step 300/300  loss 4.5310"
    end = "3,292 tok/s  grad_norm 0.668  lr 9.44e-08"
    whole = f"{start} (mean 4.4551)  {end}  818.4 MB"
    assert line == (whole if columns == 200 else f"{start}  {end}")


def test_lines_of_a_report_are_broken_between_words_but_not_its_tables(monkeypatch) -> None:
    text = "Report\n  one source is left out since its rows are too long\n  a  b  " + "c" * 40
    with terminal(monkeypatch, 30) as shown:
        ranks.print_line(text)
    assert shown[:4] == [
        *("Report", "  one source is left out since", "    its rows are too long"),
        "  a  b  " + "c" * 40,
    ]


def test_lines_are_broken_between_words(monkeypatch, capsys) -> None:
    line = "batch      8 samples = 4 a device x 1 accumulated x 2 processes on cpu"
    path = "saved /a/path/that/is/longer/than/this-terminal/has/columns/step-00000001"
    with terminal(monkeypatch, 40) as shown:
        for text in (line, path, "two\nlines that are not touched even where they are long"):
            ranks.print_line(text)
    assert shown[:5] == [
        "batch      8 samples = 4 a device x 1",
        "           accumulated x 2 processes on",
        "           cpu",
        "saved",
        f"    {path.split()[1]}",
    ]
    ranks.print_line(line)
    assert capsys.readouterr().out == f"{line}\n"  # as it is, elsewhere


def test_the_mean_loss_is_that_of_all_tokens_since_the_last_line(tmp_path, capsys) -> None:
    metrics = Metrics(
        tmp_path,
        device=torch.device("cpu"),
        first_step=0,
        max_steps=6,
        tokens_before=0,
        tokens_per_step=100,
        flops_per_token=1.0,
        logging_steps=3,
        guards=Guards(BadSteps(max_consecutive=3)),
    )
    for step, (loss, tokens) in enumerate([(6, 10), (5, 10), (4, 30), (3, 10), (2, 0), (1, 10)], 1):
        fine = torch.tensor(False)
        values = StepStats(
            torch.tensor(float(loss)), torch.ones(()), torch.tensor(tokens), fine, fine
        )
        metrics.step(step, values, 1e-3)
        assert metrics.tokens > 0  # as a save reads them between lines
    lines = read_metrics(tmp_path)
    assert [line["loss"] for line in lines] == [6.0, 4.0, 1.0]
    assert [line["mean_loss"] for line in lines] == [6.0, (50 + 120) / 40, (30 + 10) / 20]
    assert [line["tokens"] for line in lines] == [10, 50, 70]
    assert "loss 4.0000 (mean 4.2500)  " in capsys.readouterr().out
    for step in (7, 8, 9):  # all of them skipped: no loss to make a mean of
        skipped = torch.tensor(True)
        nan = torch.tensor(float("nan"))
        metrics.step(step, StepStats(nan, nan, torch.tensor(10), skipped, skipped), 1e-3)
    assert "mean_loss" not in read_metrics(tmp_path)[-1]
    assert "(mean" not in capsys.readouterr().out
