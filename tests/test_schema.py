"""JSON schemas of configs accept what the toolkit accepts, and refuse typos and wrong types."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from distributed import run_toolkit

from toolkit import recipes
from toolkit.config import KINDS, dump, load
from toolkit.config.parse import flatten_settings
from toolkit.config.schema import json_schema

CONFIGS = sorted((Path(__file__).parent.parent / "recipes" / "configs").glob("*.yaml"))


def errors(schema: dict[str, Any], content: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{'.'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(content)]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_ready_configs_are_valid_also_with_all_settings_written(file: Path) -> None:
    content = yaml.safe_load(file.read_text("utf-8"))
    kind = recipes.find_kind(content["kind"])
    schema = json_schema(kind.config)
    assert errors(schema, content) == []
    assert errors(schema, yaml.safe_load(dump(load(kind.config, file)))) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_setting_is_described(kind: Any, tmp_path: Path) -> None:
    schema = json_schema(kind.config)
    (tmp_path / "a.yaml").write_text("model: {name_or_path: a}\n")
    for setting in flatten_settings(load(kind.config, tmp_path / "a.yaml")):
        node = schema
        for part in setting.split("."):
            node = node["properties"][part]
        assert node["description"], setting
        assert "\n" not in node["description"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"learning_rat": 1e-3}}, "'learning_rat' was unexpected"),
        ({"optim": {"learning_rate": -1.0}}, "-1.0 is less than the minimum of 0"),
        ({"optim": {"learning_rate": "fast"}}, "'fast' is not of type 'number'"),
        ({"optim": {"lr_scheduler_type": "cosin"}}, "'cosin' is not one of"),
        ({"lora": {"from_": "a"}}, "'from_' was unexpected"),
        ({"lora": 8}, "8 is not of type 'object'"),
        ({"kind": "pretrain"}, "'pretrain' is not one of ['finetune', None]"),
        ({"data": {"sources": [{"file": "a"}]}}, "'file' was unexpected"),
        ({"model": {}}, "'name_or_path' is a required property"),
    ],
)
def test_mistakes_are_refused(change: dict[str, Any], message: str) -> None:
    content = {"model": {"name_or_path": "a"}, "lora": {"from": "b"}, "kind": "finetune"}
    schema = json_schema(recipes.find_kind("finetune").config)
    assert errors(schema, content) == []
    assert [e for e in errors(schema, copy.deepcopy(content) | change) if message in e]


def test_the_command_prints_the_schema_of_a_kind_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "focal.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from toolkit import training\n"
        "from toolkit.config import FinetuneConfig\n"
        "@dataclass(frozen=True)\n"
        "class Focal:\n"
        '    """The loss."""\n'
        "    gamma: float = 2.0\n"
        '    """Exponent."""\n'
        "@dataclass(frozen=True)\n"
        "class FocalConfig(FinetuneConfig):\n"
        '    """A run with the focal loss."""\n'
        "    focal: Focal = field(default_factory=Focal)\n"
        '    """The loss."""\n'
        "def focal(cfg, run): ...\n"
        'if __name__ == "__main__":\n'
        '    training.main(focal, FocalConfig, demo="")\n'
    )
    done = run_toolkit("schema", "focal", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    schema = json.loads(done.stdout)
    assert schema["properties"]["focal"]["properties"]["gamma"]["description"] == "Exponent."
    assert errors(schema, {"model": {"name_or_path": "a"}, "focal": {"gamma": "2"}})
    wrong = run_toolkit("schema", "focl", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "there is no kind of run 'focl'" in wrong.stderr
