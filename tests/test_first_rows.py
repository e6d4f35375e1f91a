"""Mistakes in the data are found before a process is started, by some of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, save_byte_tokenizer, save_tiny_model

from toolkit import cli
from toolkit.config.outputs import CheckpointConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import FinetuneConfig, FinetuneDataConfig, FinetuneModelConfig
from toolkit.data.first_rows import LOOK_ROWS
from toolkit.errors import ConfigError, DataError
from toolkit.start_checks import CHECKS, RunStart, check_metric, check_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    save_byte_tokenizer(folder)
    return folder


def checked(folder: Path, output: Path, rows: list[Any], kind: type = FinetuneConfig) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file = output / "rows.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    data = FinetuneDataConfig(train_files=str(file), sequence_length=60)
    model = FinetuneModelConfig(str(folder))
    cfg = kind(model=model, data=data, output_dir=str(output / "run"))
    return check_start(cfg, 1, "cpu")


def good(count: int, size: int = 1) -> list[Any]:
    return [{"prompt": f"q{i}: ", "completion": "a" * size} for i in range(count)]


def pairs(count: int, rejected: str) -> list[Any]:
    return [{"prompt": "q", "chosen": "a", "rejected": rejected} for _ in range(count)]


BAD = {
    "a broken line": ([*good(57), "{broken", *good(9)], FinetuneConfig, "line 58: expected JSON"),
    "null content": (
        [*good(30), {"prompt": "q", "completion": None}],
        FinetuneConfig,
        "line 31: expected text in 'completion', got null",
    ),
    "too short a length": (
        [{"prompt": "q" * 100, "completion": "a"}] * 40,
        FinetuneConfig,
        "got none: 40 rows gave 0 examples, .*40 rows were skipped .no supervised token",
    ),
    "equal pairs": (pairs(40, "a"), PreferConfig, "40 rows were skipped .equal sides"),
    "the end of a cut file": (
        [*good(4000, 30), '{"prompt": "q", "compl'],
        FinetuneConfig,
        "line 4001: expected JSON",
    ),
    "far within a large file": (
        [*good(LOOK_ROWS + 9, 3000), *["{broken" + "x" * 1000] * 3000, *good(900, 3000)],
        FinetuneConfig,
        "of those after byte .*expected JSON",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_found_before_the_start(folder: Path, tmp_path: Path, case: str) -> None:
    rows, kind, said = BAD[case]
    with pytest.raises(DataError, match=said):
        checked(folder, tmp_path, rows, kind)


def test_the_line_says_what_was_looked_at(folder: Path, tmp_path: Path) -> None:
    assert checked(folder, tmp_path, good(70)) == "checked    70 rows, which are all rows"
    line = checked(folder, tmp_path, good(LOOK_ROWS + 500))
    assert f"checked    {LOOK_ROWS + 5:,} rows: up to {LOOK_ROWS:,} at the beginning" in line
    assert "toolkit inspect --data" in line
    assert checked(folder, tmp_path, pairs(9, "b"), PreferConfig).startswith("checked    9 rows")


def test_an_unknown_best_metric_is_refused_before_the_launch(folder, tmp_path) -> None:
    """Unless the recipe was changed, and may have other metrics."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b", "completion": "c"}))

    def start(kind: str, config: type, metric: str, script: Path | None) -> None:
        data = {"train_files": str(rows), "eval_files": [str(rows), str(rows)]}
        cfg = config(
            FinetuneModelConfig(str(folder)),
            data=FinetuneDataConfig(**data),
            checkpoint=CheckpointConfig(metric_for_best_model=metric),
            output_dir=str(tmp_path / kind),
        )
        check_metric(RunStart(cfg, 1, script=script))

    for kind, config, good_names, wrong in (
        ("finetune", FinetuneConfig, ("loss", "accuracy", "eval_rows_perplexity"), "bleu"),
        ("prefer", PreferConfig, ("loss", "margin", "rows-2_logps_chosen"), "perplexity"),
    ):
        recipe = ROOT / f"recipes/{kind}.py"
        for name in good_names:
            start(kind, config, name, recipe)
        with pytest.raises(
            ConfigError, match=rf"_model eval_{wrong}: expected a metric .* eval_rows"
        ):
            start(kind, config, wrong, recipe)
        start(kind, config, wrong, None)
        text = recipe.read_text()
        for i, changed in enumerate(
            (
                text.replace("mesh, objective.metrics)", "mesh, [*objective.metrics, BLEU])"),
                text.replace("objectives.build(cfg, mesh)", "Mine(cfg, mesh)"),
                "import my_losses\n" + text,
                text + "\n\nclass Mine(objectives.Objective): ...\n",
            )
        ):
            assert changed != text
            copy = tmp_path / f"{kind}{i}.py"
            copy.write_text(changed)
            start(kind, config, wrong, copy)
    assert [check.name for check in CHECKS if check.run is check_metric] == ["data"]


def test_the_command_refuses_an_unknown_best_metric_before_the_launch(folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "completion": "c"}))
    flags = ["--model.name_or_path", str(folder), "--data.train_files", str(rows)]
    flags += ["--checkpoint.metric_for_best_model", "bleu", "--output_dir", str(tmp_path / "run")]
    assert cli.main(["finetune", *flags]) == 2
    out = capsys.readouterr()
    assert "checkpoint.metric_for_best_model eval_bleu: expected a metric" in out.err
    assert "accelerate" not in out.out
