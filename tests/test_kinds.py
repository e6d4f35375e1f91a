"""Kinds of runs: chosen by name, by the config file, or by its rows; also a user's own recipe."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from conftest import save_tiny_model

from toolkit import cli, config
from toolkit.checkpoint.run_folder import save_config, validate_run_folders
from toolkit.config import FinetuneConfig, PreferConfig, PretrainConfig, kind_of
from toolkit.config.settings import FinetuneModelConfig, ModelConfig
from toolkit.errors import ConfigError
from toolkit.recipes import find_kind, load_config

OWN_RECIPE = '''
from dataclasses import dataclass, field
from pathlib import Path

from toolkit import training
from toolkit.config import FinetuneConfig


@dataclass(frozen=True)
class Teacher:
    """The model to learn from."""

    temperature: float = 1.0
    """Divides the logits of both."""


@dataclass(frozen=True)
class MimicConfig(FinetuneConfig):
    """A run that imitates a teacher."""

    teacher: Teacher = field(default_factory=Teacher)


def mimic(cfg, run):
    raise NotImplementedError


if __name__ == "__main__":
    training.main(mimic, MimicConfig, demo=Path("demo.yaml"))
'''


@dataclass(frozen=True)
class Teacher:
    """The model to learn from."""

    temperature: float = 1.0


@dataclass(frozen=True)
class MimicConfig(FinetuneConfig):
    """A run of a recipe of the user's own."""

    teacher: Teacher = field(default_factory=Teacher)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", "llama")
    return tmp_path


def write(path: str, **content: object) -> str:
    Path(path).write_text(yaml.safe_dump({"model": {"name_or_path": "model"}, **content}))
    return path


def test_each_class_of_settings_has_a_kind() -> None:
    classes = (PretrainConfig, FinetuneConfig, PreferConfig, MimicConfig)
    assert [kind_of(cls).name for cls in classes] == ["pretrain", "finetune", "prefer", "mimic"]
    assert [kind_of(cls).command for cls in classes] == ["train", "finetune", "prefer", ""]


@pytest.mark.parametrize("settings", [PretrainConfig, FinetuneConfig, PreferConfig, MimicConfig])
def test_a_saved_config_names_its_kind(tmp_path: Path, settings: type) -> None:
    model = ModelConfig if settings is PretrainConfig else FinetuneModelConfig
    cfg = settings(model("model"), output_dir=str(tmp_path))
    save_config(cfg)
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert content["kind"] == kind_of(settings).name
    assert config.load(settings, tmp_path / "config.yaml") == cfg


def test_a_run_of_a_recipe_of_ones_own_is_recognised_when_it_starts_again(tmp_path: Path) -> None:
    cfg = MimicConfig(FinetuneModelConfig("model"), output_dir=str(tmp_path))
    save_config(cfg)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert validate_run_folders(cfg) == cfg
    other = FinetuneConfig(FinetuneModelConfig("model"), output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="holds a run of mimic; this is fine-tuning"):
        validate_run_folders(other)


def test_a_config_of_another_kind_is_refused_by_its_kind(folder: Path) -> None:
    file = write("prefer.yaml", kind="prefer", preference={"beta": 0.2})
    with pytest.raises(ConfigError, match=r"preference tuning \(kind: prefer, .*toolkit prefer"):
        config.load(FinetuneConfig, file)
    with pytest.raises(ConfigError, match="expected a config of pretraining, got one of mimic"):
        config.load(PretrainConfig, write("own.yaml", kind="mimic"))
    assert config.load(PreferConfig, file).preference.beta == 0.2


def test_the_kind_in_a_file_wins_over_what_its_rows_are_for(folder: Path) -> None:
    Path("text.txt").write_text("Documents.\n")
    data = {"train_files": "text.txt"}
    for name in ("pretrain", "finetune", "prefer"):
        kind, cfg, note = load_config(write("run.yaml", kind=name, data=data))
        assert (kind.name, type(cfg), note) == (name, kind.config, None)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"text": "A document."}, "pretrain"),
        ({"prompt": "?", "completion": "!"}, "finetune"),
        ({"prompt": "?", "chosen": "!", "rejected": "."}, "prefer"),
    ],
)
def test_rows_decide_where_a_file_names_no_kind(
    folder: Path, capsys: pytest.CaptureFixture, row: dict, name: str
) -> None:
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    file = write("run.yaml", data={"train_files": "rows.jsonl"})
    kind, _, note = load_config(file)
    assert kind.name == name
    assert f"`kind: {name}` to run.yaml" in (note or "")
    assert cli.main(["inspect", "--plan", file, "--world_size", "2"]) == 0
    assert f"note: read as a config of {kind.title}, since its rows" in capsys.readouterr().err


def test_a_section_decides_without_a_word(folder: Path) -> None:
    kind, _, note = load_config(write("run.yaml", preference={"beta": 0.2}))
    assert (kind.name, note) == ("prefer", None)


def test_an_unknown_kind_lists_those_that_there_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'reword': expected one of pretrain, finetune, prefer"):
        load_config(write("run.yaml", kind="reword"))


def test_a_recipe_of_ones_own_is_planned(folder: Path, capsys: pytest.CaptureFixture) -> None:
    Path("recipes").mkdir()
    Path("recipes/mimic.py").write_text(OWN_RECIPE)
    file = write("run.yaml", kind="mimic", teacher={"temperature": 2.0}, lora={"r": 4})
    kind, cfg, _ = load_config(file)
    assert (kind.name, cfg.teacher.temperature, cfg.lora.r) == ("mimic", 2.0, 4)
    flags = ["--world_size", "2", "--teacher.temperature", "3"]
    assert cli.main(["inspect", "--plan", file, *flags]) == 0
    Path("recipes/mimic.py").write_text("def mimic(): ...\n")
    assert cli.main(["inspect", "--plan", file, "--world_size", "2"]) == 2
    assert "expected recipes/mimic.py to end with `training.main(" in capsys.readouterr().err


def test_an_edited_copy_of_a_recipe_has_its_own_settings(folder: Path) -> None:
    Path("recipes").mkdir()
    Path("recipes/finetune.py").write_text(OWN_RECIPE.replace("MimicConfig", "OwnConfig"))
    cfg = find_kind("finetune").config(FinetuneModelConfig("model"))
    assert cfg.teacher.temperature == 1.0
    assert replace(cfg, seed=3).kind == "own"
