"""`lora.from` is a keyword of Python, and reads as any other setting; cards say what they know."""

from pathlib import Path

import pytest

from toolkit import config
from toolkit.config import FinetuneConfig
from toolkit.config.fields import to_fields, to_settings
from toolkit.errors import ConfigError
from toolkit.hub.card import render_card

FLAGS = ["--model.name_or_path", "here"]


def test_it_is_shown_and_read_under_its_name(tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {name_or_path: here}\nlora: {from: a/b}\ndata: {columns: {from: role}}\n"
    )
    cfg = config.load(FinetuneConfig, file)
    assert (cfg.lora.from_, cfg.data.columns, cfg.lora.explicit) == (
        "a/b",
        {"from": "role"},
        {"from"},
    )
    assert config.load(FinetuneConfig, file, ["--lora.from=c"]).lora.from_ == "c"
    text = config.dump(cfg)
    assert "  from: a/b\n" in text
    assert "from_" not in text
    file.write_text(text)
    again = config.load(FinetuneConfig, file)
    assert again == cfg
    other = config.load(FinetuneConfig, file, ["--lora.from", "c"])
    assert config.find_differences(cfg, other) == {"lora.from": ("a/b", "c")}
    for flag in ("--help", "--print_config"):
        with pytest.raises(SystemExit):
            config.parse(FinetuneConfig, [*FLAGS, flag])
        shown = capsys.readouterr().out
        assert ("--lora.from FROM" if flag == "--help" else "  from: null\n") in shown
        assert "from_" not in shown
    content = {"lora": {"from": 1, "r": 2}, "data": {"columns": {"from": "x"}}}
    fields = to_fields(FinetuneConfig, content)
    assert fields == {"lora": {"from_": 1, "r": 2}, "data": {"columns": {"from": "x"}}}
    assert to_settings(FinetuneConfig, fields) == content


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--lora.from_", "x"],
            "unknown setting 'lora.from_' (command line), did you mean lora.from?",
        ),
        (["--lora.from"], "--lora.from must be followed by its value"),
        (["--lora.from", ""], "lora.from is an empty text"),
        (["--lora.revision", "v1"], "lora.revision has no effect without lora.from"),
        (["--lora.lora_alpha", "8"], "lora.lora_alpha has no effect without lora.r"),
        (
            ["--lora.from", "x", "--model.frozen_parameters", "[a]"],
            "model.frozen_parameters has no effect with lora.r",
        ),
    ],
)
def test_what_is_wrong_with_it_names_it(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(FinetuneConfig, [*FLAGS, *flags])
    assert said in str(caught.value)


def manifest(base: dict, merged: bool) -> dict:
    adapter = {"base": base, "base_config": {}, "settings": {"r": 4}}
    return {
        "origin": {"adapter": adapter, "merged": merged},
        "tensors": {"w": {"shape": [2, 3], "dtype": "BF16"}},
        "toolkit": "0",
    }


@pytest.mark.parametrize("merged", [False, True])
def test_the_card_says_what_is_not_known_of_a_local_base(merged: bool) -> None:
    local = {"name": "my-base", "hub_id": None, "init": "pretrained", "license": None}
    card = render_card(manifest(local, merged), "org/name", "0" * 64)
    assert "was given as a local folder (`my-base`): base_model and license are not known" in card
    assert ("- lora\n" in card) is not merged  # a merged model has no adapter
    licensed = render_card(manifest(local | {"license": "mit"}, merged), "org/name", "0" * 64)
    assert "base_model is not known" in licensed
    hub = {"name": "org/base", "hub_id": "org/base", "init": "pretrained"}
    assert "not known" not in render_card(manifest(hub, merged), "org/name", "0" * 64)
