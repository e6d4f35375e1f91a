"""`toolkit report`: the page holds what the run logged, and nothing in a run's texts harms it."""

import functools
import json
import math
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, slow
from distributed import run_recipe_ranks

from toolkit import cli
from toolkit.errors import CheckpointError, ReportError
from toolkit.formats.metrics_file import METRICS, SAMPLES, STARTS, read_lines, read_metrics
from toolkit.report import writing
from toolkit.report.curves import moving_average
from toolkit.report.page import render_page
from toolkit.report.runs import read_runs

HARM = '</script><script>throw new Error("harm")</script>'
PANELS = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_peak_bytes")
PANELS += ("eval_accuracy",)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A run that ended after step 4, went on from there, and ended after step 7."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400, "utf-8")
    flags = [
        "--model.name_or_path", str(tiny_llama),
        "--data.train_files", str(folder / "text.txt"),
        "--data.sequence_length", "32",
        "--data.max_eval_samples", "4",
        "--sharding.param_dtype", "float32",
        "--train.logging_steps", "1",
        "--train.eval_steps", "2",
        "--checkpoint.save_steps", "4",
        "--output_dir", str(folder / "run"),
    ]  # fmt: skip
    for steps in ("4", "7"):
        ran = run_recipe_ranks("pretrain", 2, *flags, "--train.max_steps", steps, cwd=folder)
        assert ran.returncode == 0, ran.stderr
    return folder / "run"


@pytest.fixture
def run(tmp_path: Path, trained: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def made(folder: Path, steps: int, **more: Any) -> Path:
    """Write a run's folder that holds nothing but lines."""
    draw = random.Random(folder.name).random
    folder.mkdir()
    lines = [{"step": s, "loss": draw(), "grad_norm": draw(), **more} for s in range(1, steps + 1)]
    (folder / METRICS).write_text("".join(json.dumps(x) + "\n" for x in lines), "utf-8")
    return folder


def figures(page: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a page by name."""
    found = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return {figure["id"]: figure for figure in json.loads(found[0])}


def trace(figure: dict[str, Any], name: str) -> tuple[list, list]:
    (found,) = [t for t in figure["data"] if t["name"] == name]
    return found["x"], found["y"]


def page_of(*runs: Path) -> str:
    """Return the page alone: drawing the picture takes a second."""
    return render_page(read_runs([str(run) for run in runs]))


def test_curves_are_the_metrics_to_the_bit(run: Path) -> None:
    drawn, lines = figures(page_of(run)), read_metrics(run)
    assert [line["step"] for line in lines] == [*range(1, 8)]
    assert set(PANELS) == set(drawn)
    for key in PANELS:
        steps, values = trace(drawn[key], key)
        logged = [(x["step"], x[key]) for x in lines if key in x]
        assert list(zip(steps, values, strict=True)) == logged
    evaluated = [(x["step"], x["eval_loss"]) for x in lines if "eval_loss" in x]
    assert len(evaluated) == 4
    assert list(zip(*trace(drawn["loss"], "eval_loss"), strict=True)) == evaluated


@pytest.mark.slow
def test_restarts_and_checkpoints_are_marked_in_every_panel(run: Path) -> None:
    for figure in figures(page_of(run)).values():
        assert trace(figure, "checkpoint")[0] == [4, 7]
        assert trace(figure, "restart")[0] == [4, 4, None]
    (run / "checkpoints/step-00000004/COMMIT").unlink()  # no checkpoint any more
    assert trace(figures(page_of(run))["loss"], "checkpoint")[0] == [7]


def test_tables_hold_settings_starts_ledger_and_units(run: Path) -> None:
    page = page_of(run)
    for setting, value in (("train.max_steps", "7"), ("data.sequence_length", "32")):
        assert re.search(rf"<div>{setting}</div>.*?<div>{value}</div>", page)
    assert "data.seed" not in page  # the default
    starts = read_lines(run / STARTS)
    assert [(start["step"], start["max_steps"], start["world_size"]) for start in starts] == [
        (0, 4, 2),
        (4, 7, 2),
    ]
    assert starts[0]["versions"]["torch"] in page
    opening = "\n".join(starts[-1]["opening"])
    assert re.search(r"^dtypes +storage float32", opening, re.MULTILINE)
    assert re.search(r"^model\.layers\.", opening, re.MULTILINE)  # units
    assert f"<pre>{escape(opening, quote=False)}</pre>" in page


def test_the_picture_is_a_png(run: Path) -> None:
    content = writing.write_report([str(run)])[1].read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", content[16:20]) == (1400,)
    assert content[-8:-4] == b"IEND"
    assert not list(run.glob("*.tmp"))


def test_several_runs_are_overlaid(run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", 3, mfu=0.25)
    shutil.copy(run / "config.yaml", other)
    config = (run / "config.yaml").read_text("utf-8")
    (other / "config.yaml").write_text(config.replace("seed: 42", "seed: 7"), "utf-8")
    out = tmp_path / "out"
    assert cli.main(["report", str(run), str(other), "--output", str(out)]) == 0
    page = (out / "report.html").read_text("utf-8")
    assert trace(figures(page)["mfu"], "other: mfu") == ([1, 2, 3], [0.25] * 3)
    drawn = figures(page)["loss"]
    assert trace(drawn, "run: loss")[0] == [*range(1, 8)]
    assert trace(drawn, "other: loss")[1] == [line["loss"] for line in read_metrics(other)]
    marked = re.findall(r'<tr class="marked"><td[^>]*><div>([\w.]+)<', page)
    assert marked == ["seed"]
    assert not (run / "report.html").exists()


def test_texts_are_escaped(run: Path, tmp_path: Path) -> None:
    harmful = made(tmp_path / "<b>bold", 3)
    answer = {"step": 2, "prompt": HARM, "answer": f"& {HARM}"}
    (harmful / SAMPLES).write_text(json.dumps(answer) + "\n", "utf-8")
    (harmful / "config.yaml").write_text(json.dumps({"output_dir": HARM, HARM: 1}), "utf-8")
    shutil.copy(run / STARTS, harmful)
    page = page_of(harmful, run)
    assert HARM not in page
    assert page.count(str(escape(HARM, quote=False)).replace('"', "&#34;")) >= 4
    assert "<b>bold" not in page
    assert figures(page)["loss"]["data"][0]["name"] == "<b>bold: loss"


def test_answers_stand_by_prompt_and_step(run: Path) -> None:
    lines = [{"step": s, "prompt": p, "answer": f"{p} at {s}"} for s in (2, 4) for p in ("a", "b")]
    (run / SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    cells = re.findall(r"<div>([ab] at \d)</div>", page_of(run))
    assert cells == ["a at 2", "a at 4", "b at 2", "b at 4"]


def test_evaluations_stand_by_source_and_measure(tmp_path: Path) -> None:
    many = made(tmp_path / "many", 3)
    evaluated = [
        {"eval_loss": 3.0, "eval_code_loss": 2.5, "eval_code_2_loss": 4.0, "eval_expected": 0.5},
        {"eval_loss": 3.5, "eval_code_loss": 2.0, "eval_code_2_loss": 4.5, "eval_expected": 0.25},
    ]
    for one, shares in zip(evaluated, ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]), strict=True):
        names = ("eval_accuracy", "eval_code_accuracy", "eval_code_2_accuracy")
        one |= dict(zip(names, shares, strict=True))
    lines = [line | more for line, more in zip(read_metrics(many)[1:], evaluated, strict=True)]
    (many / METRICS).write_text("".join(json.dumps(x) + "\n" for x in lines), "utf-8")
    page = page_of(many)
    drawn = figures(page)
    assert trace(drawn["eval_expected"], "eval_expected") == ([2, 3], [0.5, 0.25])
    names = [t["name"] for t in drawn["eval_accuracy"]["data"]]
    assert names == ["eval_accuracy", "eval_code_accuracy", "eval_code_2_accuracy"]
    assert trace(drawn["loss"], "eval_code_loss") == ([2, 3], [2.5, 2.0])
    table = page.partition("Evaluations: last values by source")[2].partition("</table>")[0]
    rows = [re.findall(r"<div>(.*?)</div>", row) for row in table.split("<tr>")[2:]]
    assert rows == [
        ["many", "all", "3", "3.5", "0.25", "0.4", "3.0000", "2"],
        ["many", "code", "3", "2", "-", "0.5", "2.0000", "3"],
        ["many", "code_2", "3", "4.5", "-", "0.6", "4.0000", "2"],
    ]


def preferring(folder: Path, **settings: Any) -> Path:
    """Write the folder of a run of preference tuning: lines of steps, of which one is evaluated."""
    made(folder, 4, custom=0.25, accuracy=1.0, reward_chosen=0.5, reward_rejected=-0.5, margin=1.0)
    lines = read_metrics(folder)
    lines[-1] |= {"eval_loss": 0.6, "eval_accuracy": 1.0, "eval_reward_chosen": 0.4}
    (folder / METRICS).write_text("".join(json.dumps(x) + "\n" for x in lines), "utf-8")
    config = {"model": {"name_or_path": "m"}, "lora": {}, "preference": settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    return folder


def test_metrics_of_the_objective_have_panels_with_their_evaluations(tmp_path: Path) -> None:
    page = page_of(preferring(tmp_path / "dpo"))
    drawn = figures(page)
    assert [*drawn][:5] == ["loss", "custom", "accuracy", "reward", "margin"]
    names = [t["name"] for t in drawn["reward"]["data"]]
    assert names == ["reward_chosen", "eval_reward_chosen", "reward_rejected"]
    assert trace(drawn["reward"], "reward_chosen") == ([1, 2, 3, 4], [0.5] * 4)
    assert trace(drawn["accuracy"], "eval_accuracy") == ([4], [1.0])
    assert trace(drawn["custom"], "custom")[1] == [0.25] * 4
    assert "eval_accuracy" not in drawn
    # A constant share of 1 does not stretch its axis to 200 %.
    lowest, highest = drawn["accuracy"]["layout"]["yaxis"]["range"]
    assert 0 <= lowest < 1 == highest
    assert "range" not in drawn["margin"]["layout"]["yaxis"]
    for figure in drawn.values():  # a legend below the curves covers the title of the axis
        assert figure["layout"]["legend"]["y"] > 1
    both = figures(page_of(tmp_path / "dpo", preferring(tmp_path / "other")))
    names = {t["name"] for t in both["margin"]["data"]}
    assert names == {"dpo: margin", "other: margin"}
    assert len({t["line"]["color"] for t in both["margin"]["data"]}) == 2


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({}, "sigmoid, beta 0.1"),
        ({"loss_type": "ipo", "beta": 0.3, "rpo_alpha": 0.5}, "ipo, beta 0.3, rpo_alpha 0.5"),
        (
            {"loss_type": "kto", "desirable_weight": 2.0},
            "kto, beta 0.1, desirable_weight 2.0, undesirable_weight 1.0",
        ),
        ({"loss_type": "simpo"}, "simpo, beta 0.1, simpo_gamma 0.5"),
        ({"loss_type": "reward"}, "reward"),
        ({"loss_type": "discopop"}, "discopop, beta 0.1, discopop_tau 0.05"),
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            "0.8 sigmoid + 0.2 bco_pair + 1.0 sft, beta 0.1",
        ),
        ({"loss_type": ["ipo", "aot"], "beta": 1.0}, "1 ipo + 1 aot, beta 1.0"),
    ],
)
def test_the_head_names_the_objective(settings, objective, tmp_path: Path) -> None:
    page = page_of(preferring(tmp_path / "dpo", **settings))
    head = page.partition('<div class="charts">')[0]
    assert "<th>objective</th>" in head
    assert f'<td data-head="objective"><div>{objective}</div>' in head
    assert "<th>objective</th>" not in page_of(made(tmp_path / "plain", 2))  # the control


def test_an_answer_without_a_letter_is_described(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 2)
    answers = ["\n\n\n", "", " words "]
    lines = [{"step": i, "prompt": "p", "answer": text} for i, text in enumerate(answers)]
    (folder / SAMPLES).write_text("".join(json.dumps(x) + "\n" for x in lines), "utf-8")
    page = page_of(folder)
    for shown in ("(3 line breaks and no text)", "(no text)", " words "):
        assert f"<div>{shown}</div>" in page


def test_the_smoothed_curve_is_of_the_mean_over_all_steps(tmp_path: Path) -> None:
    means = figures(page_of(made(tmp_path / "means", 4, mean_loss=2.0)))["loss"]
    assert trace(means, "loss, smoothed")[1] == pytest.approx([2.0] * 4)
    assert trace(means, "loss")[1] != [2.0] * 4


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("no metrics", "no step is logged yet in metrics.jsonl"),
        ("one line", None),
        ("cut", "the last line of metrics.jsonl is cut off and was skipped"),
        ("not finite", "grad_norm: 2 values are not a finite number, first at step 3: gaps there"),
        slow("no config", "config.yaml is missing or not readable: its settings are not shown"),
        slow("earlier", "settings that this version does not know: train.sync_each_batch"),
        ("no starts", "starts.jsonl is missing: restarts"),
        slow("store", "checkpoints are not shown: nowhere://bucket/run cannot be opened"),
    ],
)
def test_odd_runs_get_one_statement(
    run: Path, change: str, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, config = run / METRICS, run / "config.yaml"
    texts = metrics.read_text("utf-8").splitlines(keepends=True)
    if change == "no metrics":
        metrics.unlink()
    elif change == "one line":
        metrics.write_text(texts[0], "utf-8")
    elif change == "cut":
        metrics.write_text("".join(texts)[:-20], "utf-8")
    elif change == "not finite":
        for i, value in ((2, math.nan), (4, math.inf)):
            texts[i] = json.dumps(json.loads(texts[i]) | {"grad_norm": value}) + "\n"
        metrics.write_text("".join(texts), "utf-8")
    elif change == "no config":
        config.write_text("a: [", "utf-8")
    elif change == "earlier":
        old = config.read_text("utf-8").replace("\ntrain:", "\ntrain:\n  sync_each_batch: true")
        config.write_text(old, "utf-8")
    elif change == "store":
        text = config.read_text("utf-8")
        assert "  root: null\n" in text
        config.write_text(text.replace("  root: null\n", "  root: nowhere://bucket/run\n"), "utf-8")
    else:
        (run / STARTS).unlink()
    assert cli.main(["report", str(run)]) == 0
    noted = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(noted) == (expected is not None)
    page = (run / "report.html").read_text("utf-8")
    if expected is not None:
        assert expected in noted[0]
        assert page.count('<div class="note">') == 1
        assert expected in page
    if change == "not finite":
        assert [y is None for y in trace(figures(page)["grad_norm"], "grad_norm")[1]] == [
            i in (2, 4) for i in range(7)
        ]


def test_what_is_no_run_is_one_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReportError, match=r"expected a run's folder, with config.yaml or metrics"):
        page_of(tmp_path)
    assert cli.main(["report", str(tmp_path / "missing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    lines = (run / METRICS).read_text("utf-8").splitlines()
    (run / METRICS).write_text("\n".join(["{", *lines]), "utf-8")
    with pytest.raises(CheckpointError, match=r"metrics.jsonl line 1"):
        page_of(run)
    assert cli.main(["report", str(run), "--follow", "--every", "0"]) == 2


def test_a_missing_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = writing.importlib.util.find_spec
    missing = lambda name: None if name == "plotly" else found(name)  # noqa: E731
    monkeypatch.setattr(writing.importlib.util, "find_spec", missing)
    with pytest.raises(ReportError, match=r"needs plotly.*pip install plotly matplotlib"):
        writing.write_report([str(run)])


@pytest.mark.slow
def test_follow_ends_when_the_run_is_done(run: Path) -> None:
    lines = (run / METRICS).read_text("utf-8").splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:5]), "utf-8")
    follower = threading.Thread(target=writing.follow, args=([str(run)], None, 0.1))
    follower.start()
    page = run / "report.html"
    wait_for(lambda: page.is_file() and trace(figures(page.read_text())["loss"], "loss"))
    assert "location.reload" in page.read_text("utf-8")
    (run / METRICS).write_text("".join(lines), "utf-8")
    follower.join(60)
    assert not follower.is_alive()
    text = page.read_text("utf-8")
    assert "location.reload" not in text
    assert trace(figures(text)["loss"], "loss")[0] == [*range(1, 8)]


def test_smoothing_does_not_lag_and_skips_gaps() -> None:
    assert moving_average([2.0] * 9) == pytest.approx([2.0] * 9)
    assert moving_average([1.0, None, 1.0]) == pytest.approx([1.0, None, 1.0])
    falling = [4.0 - 0.01 * step for step in range(300)]
    assert moving_average(falling) == pytest.approx(
        falling
    )  # an average of the past would be above
    noisy = [value + (-1) ** i for i, value in enumerate(falling)]
    inner = slice(20, -20)
    assert moving_average(noisy)[inner] == pytest.approx(falling[inner], abs=0.2)


def test_the_page_says_what_its_axes_are_and_how_long_a_run_took(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 4, step_time=90.5)
    page = page_of(folder)
    drawn = figures(page)
    assert drawn
    assert {f["layout"]["xaxis"]["title"]["text"] for f in drawn.values()} == {"step"}
    assert "<th>trained for</th>" in page
    assert "<div>0:06:02</div>" in page  # four steps


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def console_of(page: Path) -> tuple[str, list[str]]:
    """Return the document as Chromium made it of a page, and what it wrote on the console."""
    with_folder = f"--user-data-dir={page.parent / 'chromium'}"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    command = [
        CHROMIUM,
        *quiet,
        with_folder,
        "--enable-logging=stderr",
        "--dump-dom",
        page.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]


def page_drawn_without_errors(page: Path) -> None:
    document, console = console_of(page)
    assert not console
    drawn = len(figures(page.read_text("utf-8")))
    assert f'data-drawn="{drawn}"' in document
    assert document.count('class="main-svg"') >= drawn


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
def test_chromium_draws_the_page_without_errors_or_requests(run: Path) -> None:
    writing.write_report([str(run)])
    page = run / "report.html"
    page_drawn_without_errors(page)
    answer = {"step": 2, "prompt": HARM, "answer": HARM}
    (run / SAMPLES).write_text(json.dumps(answer) + "\n", "utf-8")
    writing.write_report([str(run)])
    page_drawn_without_errors(page)
    # The page's own policy refuses requests, on the console; errors of scripts stand there too.
    text = page.read_text("utf-8")
    for harm in ('<img src="http://127.0.0.1:9/a.png">', "<script>throw new Error('x')</script>"):
        page.write_text(text.replace("</body>", f"{harm}</body>"), "utf-8")
        assert console_of(page)[1]


@pytest.mark.slow
def test_ctrl_c_ends_following_with_a_last_page(run: Path) -> None:
    (run / STARTS).unlink()  # how many steps there will be is not known
    command = [sys.executable, "-m", "toolkit", "report", str(run), "--follow", "--every", "1"]
    # A shell's background job, and what it starts, ignores a Ctrl-C.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": heard}
    process = subprocess.Popen(command, cwd=ROOT, **options)
    page = run / "report.html"
    wait_for(lambda: (run / "report.png").is_file())
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert str(page) in out
    assert "location.reload" not in page.read_text("utf-8")
