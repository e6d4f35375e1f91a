"""What `lora.from` may name, what comes from it, and what is refused on one line before a run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import save_tiny_model
from safetensors.torch import load_file, save_file

from toolkit import checkpoint, config
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint.adapter_source import apply_adapter_settings, parse_adapter_settings
from toolkit.checkpoint.run_folder import save_config
from toolkit.config import FinetuneConfig, PreferConfig
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import CheckpointConfig, FinetuneModelConfig, ModelConfig
from toolkit.errors import ConfigError, ModelError, ToolkitError
from toolkit.export import consolidate, load_adapter
from toolkit.formats import read_config
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.peft_model import adapted_modules, trained_tensors
from toolkit.start_checks import check_continued_adapter

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two bases, an adapter of PEFT, a run of adapters, its export, and a merge."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("base", "other")):
        save_tiny_model(root / name, seed=seed, num_hidden_layers=2)
    save_tiny_model(root / "wide", hidden_size=64, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "base")
    settings = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    adapted.save_pretrained(root / "adapter")
    live: Any = add_adapters(build_on_meta(ModelConfig(str(root / "base"))), LoraConfig(r=2))
    load_pretrained(live, root / "base", "cpu")
    checkpoint.save(checkpoint.TrainState(live, step=7), root / "run", CheckpointConfig())
    consolidate(root / "run", root / "export")
    consolidate(root / "run", root / "merged", merge=True)
    plain = build_on_meta(ModelConfig(str(root / "base")))
    load_pretrained(plain, root / "base", "cpu")
    checkpoint.save(checkpoint.TrainState(plain, step=1), root / "full", CheckpointConfig())
    return root


def config_of(made: Path, source: object, base: str = "base", **lora: Any) -> FinetuneConfig:
    own = LoraConfig(from_=str(source), **lora)
    model = FinetuneModelConfig(str(made / base), dtype="float32")
    return FinetuneConfig(model=model, lora=own, output_dir=str(made / "new"))


def refusal(fn: Callable[[], object]) -> str:
    with pytest.raises(ToolkitError) as caught:
        fn()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def start(cfg: FinetuneConfig) -> str:
    """Do what a run does before its data is prepared; return its line."""
    cfg = apply_adapter_settings(cfg)
    return check_continued_adapter(cfg, build_on_meta(cfg.model), resumes=False)


@pytest.mark.parametrize(
    ("source", "rank", "chain"),
    [
        ("adapter", 3, "adapter"),
        ("run", 2, "run (step 7)"),
        ("run/checkpoints/step-00000007", 2, "run (step 7)"),
        ("export", 2, "export (step 7)"),
    ],
)
def test_rank_and_targets_come_from_each_kind_of_source(
    made: Path, source: str, rank: int, chain: str
) -> None:
    cfg = config_of(made, made / source)
    assert cfg.adapters is cfg.lora
    adopted = apply_adapter_settings(cfg)
    assert (adopted.lora.r, adopted.lora.from_) == (rank, str(made / source))
    assert apply_adapter_settings(adopted) == adopted
    assert start(cfg).startswith(f"adapter    continues {chain}: rank {rank}, alpha ")
    model = add_adapters(build_on_meta(cfg.model), adopted.lora)
    load_pretrained(model, made / "base", "cpu")
    assert "bit sums equal" in load_adapter(model, adopted)[0]
    file = made / ("adapter" if source == "adapter" else "export") / WEIGHTS
    values = {key.replace(".lora_A.", ".lora_A.default."): v for key, v in load_file(file).items()}
    values = {key.replace(".lora_B.", ".lora_B.default."): v for key, v in values.items()}
    tensors = trained_tensors(model)
    assert all(torch.equal(values[name], tensor) for name, tensor in tensors.items())
    chain_entry = model.hf_assets.continued
    assert chain_entry["name"] == chain.split()[0]


def test_settings_that_contradict_are_refused_and_equal_ones_are_not(
    made: Path, tmp_path: Path
) -> None:
    source = made / "adapter"
    same = config_of(made, source, r=3, lora_alpha=7, target_modules=["v_proj", "q_proj"])
    assert apply_adapter_settings(same).lora.r == 3
    for setting, value in (
        ("r", 16),
        ("lora_alpha", 8.0),
        ("target_modules", ["q_proj"]),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
    ):
        said = refusal(
            lambda s=setting, v=value: apply_adapter_settings(config_of(made, source, **{s: v}))
        )
        assert said.startswith(f"lora.{setting} is ")
        assert said.endswith(f"leave lora.{setting} out")
    file = tmp_path / "config.yaml"
    text = f"model: {{name_or_path: {made / 'base'}}}\nlora: {{from: {source}"
    # A value that is the default, and is written down.
    for given, refused in (
        ("r: 0", ""),
        ("lora_alpha: 32", "lora.lora_alpha is 32.0, and the adapter"),
        ("target_modules: all-linear", "lora.target_modules is all-linear, and the adapter"),
        ("lora_dropout: 0.1", ""),
    ):
        file.write_text(f"{text}, {given}}}\noutput_dir: {tmp_path / 'run'}\n")
        cfg = config.load(FinetuneConfig, file)
        if refused:
            assert refusal(lambda cfg=cfg: start(cfg)).startswith(refused)
        else:
            assert "continues" in start(cfg)
    file.write_text(text.replace(str(source), str(made / "run")) + ", target_modules: all-linear}")
    assert "continues" in start(config.load(FinetuneConfig, file))


def test_layers_and_patterns_of_other_tools_come_over(made: Path) -> None:
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "up_proj"]}
    for layers, pattern in (([1], None), ([0, 1], "layers"), (1, ["layers"])):
        own = {**settings, "layers_to_transform": layers, "layers_pattern": pattern}
        theirs = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(made / "base"),
            peft.LoraConfig(task_type="CAUSAL_LM", **own),
        )
        lora = replace(LoraConfig(from_="x"), **parse_adapter_settings(own, "x"))
        ours = add_adapters(build_on_meta(ModelConfig(str(made / "base"))), lora)
        assert adapted_modules(ours).keys() == adapted_modules(theirs).keys()
        assert adapted_modules(ours)


def folder_with(made: Path, tmp_path: Path, **settings: Any) -> Path:
    """Return a copy of the adapter with other settings in its adapter_config.json."""
    folder = Path(shutil.copytree(made / "adapter", tmp_path / "copy", dirs_exist_ok=True))
    content = json.loads((folder / SETTINGS).read_text()) | settings
    (folder / SETTINGS).write_text(json.dumps(content))
    return folder


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-8])


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[min(tensors)]
    save_file(tensors, folder / WEIGHTS)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Path], object] | None, str]] = {
    "IA3": ({"peft_type": "IA3"}, None, "is of peft_type 'IA3' and r 3, LORA is expected"),
    "prompts": ({"peft_type": "PROMPT_TUNING"}, None, "LORA is expected"),
    "bias": ({"bias": "all"}, None, "bias is 'all'"),
    "pissa": ({"init_lora_weights": "pissa"}, None, "settings that are not supported here"),
    "reward": ({"task_type": "SEQ_CLS"}, None, "is an adapter of a reward model (task_type SEQ_"),
    "odd": ({"target_modules": [1]}, None, "target_modules '[1]', which PEFT does not write"),
    "pickle": ({}, pickled, "in adapter_model.bin, a pickle, which can run code and is not read"),
    "cut": ({}, cut, "copy or download the file again"),
    "missing": ({}, without_a_tensor, "(1 of 8 tensors are missing), which this run trains"),
    "rank": ({"r": 4}, None, "of shape [3, 32], this run [4, 32]"),
    "targets": ({"target_modules": ["q_proj", "no_proj"]}, None, "holds base_model.model.m"),
    "fewer": ({"target_modules": ["q_proj"]}, None, "holds base_model.model.model.layers.0.self"),
    "name": (
        {"base_model_name_or_path": "org/base"},
        None,
        "",  # not known here: a line says so
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_that_cannot_be_continued_is_refused(
    made: Path, tmp_path: Path, what: str
) -> None:
    settings, change, expected = REFUSED[what]
    folder = folder_with(made, tmp_path, **settings)
    if change is not None:
        change(folder)
    cfg = config_of(made, folder)
    if expected:
        assert expected in refusal(lambda: start(cfg))
    else:
        assert "whether its base, org/base, is " in start(cfg)


def test_another_base_is_refused(made: Path, tmp_path: Path, monkeypatch) -> None:
    for source in ("adapter", "run", "export"):
        said = refusal(lambda s=source: start(config_of(made, made / s, "other")))
        assert "is an adapter of another base" in said
        assert f"set model.name_or_path: {made / 'base'}" in said
    unknown = folder_with(made, tmp_path, base_model_name_or_path="org/base")
    assert "give the adapter's own base" in refusal(lambda: start(config_of(made, unknown, "wide")))
    cfg = config_of(made, unknown)
    named = replace(cfg, model=replace(cfg.model, name_or_path="org/another", init="pretrained"))
    from toolkit.checkpoint.adapter_source import check_same_base, open_adapter

    with open_adapter(cfg.lora) as source:
        assert "is an adapter of org/base" in refusal(lambda: check_same_base(named, source))


def test_a_changed_byte_of_an_export_is_found(made: Path, tmp_path: Path) -> None:
    export = Path(shutil.copytree(made / "export", tmp_path / "export"))
    content = bytearray((export / WEIGHTS).read_bytes())
    content[-3] ^= 1
    (export / WEIGHTS).write_bytes(content)
    assert "is damaged" in refusal(lambda: apply_adapter_settings(config_of(made, export)))


def test_what_is_no_adapter_gets_a_line(made: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source, said in {
        made / "merged": "is a model, not an adapter (a merged one is a model, too); set model.nam",
        made / "base": f"set model.name_or_path: {made / 'base'} and lora.r",
        made / "full": "is a run of the whole model, without adapters; export it",
        made: "did you mean ",
        made / "adapter" / SETTINGS: "is a file; give the folder that holds it",
        made / "nowhere": "there is no such folder",
        "./nowhere": "there is no such folder",
        "org/nothing": "nor an adapter that the Hub gives",
        made / "run/checkpoints/step-00000007/hf": "give the checkpoint: ",
    }.items():
        assert said in refusal(lambda s=source: apply_adapter_settings(config_of(made, s))), source


def test_a_peft_folder_as_the_model_says_what_to_set(made: Path) -> None:
    said = refusal(lambda: read_config(made / "adapter"))
    assert f"is an adapter of {made / 'base'}, not a model; set model.name_or_path: " in said
    assert said.endswith(f"{made / 'base'} and lora.from: {made / 'adapter'}")
    with pytest.raises(ModelError, match=r"lora\.from: "):
        build_on_meta(ModelConfig(str(made / "adapter")))


def test_a_resumed_run_needs_no_adapter(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "adapter", tmp_path / "adapter"))
    cfg = replace(config_of(made, folder), output_dir=str(tmp_path / "run"))
    adopted = apply_adapter_settings(cfg)
    shutil.copytree(made / "run", tmp_path / "run")  # that it has checkpoints is what counts
    save_config(adopted)
    shutil.rmtree(folder)
    assert apply_adapter_settings(cfg) == adopted
    with pytest.raises(ConfigError, match="there is no such folder"):
        apply_adapter_settings(replace(cfg, output_dir=str(tmp_path / "new")))


def test_streams_cannot_have_a_reference_with_an_adapter() -> None:
    flags = ["--model.name_or_path", "x", "--lora.from", "y", "--train.max_steps", "3"]
    with pytest.raises(
        ConfigError, match=r"data\.streaming.*lora\.from|lora\.from.*data\.streaming"
    ):
        config.parse(PreferConfig, [*flags, "--data.streaming", "true"])
    config.parse(
        PreferConfig, [*flags, "--data.streaming", "true", "--preference.loss_type", "simpo"]
    )
    assert config.parse(PreferConfig, flags).adapters is not None
