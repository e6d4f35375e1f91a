"""A reference that is not the start (`preference.reference`): models and adapters, on ranks."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import save_byte_tokenizer, save_tiny_model, slow
from safetensors.torch import load_file, save_file
from test_prefer_recipe import pair, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import cli
from toolkit.checkpoint.reference_file import FILE, decode
from toolkit.config import parse
from toolkit.config.preference import PreferConfig, PreferenceConfig
from toolkit.config.published import select_publishable_settings
from toolkit.data.prepare import PackingChoice
from toolkit.errors import ConfigError, ModelError
from toolkit.formats import ADAPTER_WEIGHTS
from toolkit.formats.metrics_file import read_metrics
from toolkit.mesh import View
from toolkit.models import build_on_meta
from toolkit.objectives import frozen_models, reference_model
from toolkit.objectives import reference as objectives_reference
from toolkit.objectives.reference import Reference
from toolkit.objectives.reference_model import check_reference, load_reference
from toolkit.planning.simulation import REFERENCE_PASS, simulate
from toolkit.rehearsal.settings import settings_for_cpu
from toolkit.start_checks import RunStart, check_adapter

CONFIG = {"vocab_size": 260, "max_position_embeddings": 512}


def save_adapter(folder: Path, base: Path, seed: int = 3, **settings: Any) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **settings
    )
    tuned = peft.get_peft_model(model, lora)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    tuned.save_pretrained(folder)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model to train, three others, an adapter, and rows."""
    folder = tmp_path_factory.mktemp("references")
    for seed, name in enumerate(("model", "other", "third")):
        save_tiny_model(folder / name, seed=seed, **CONFIG)
        save_byte_tokenizer(folder / name)
    save_tiny_model(folder / "small", seed=5, **CONFIG | {"vocab_size": 200})
    shutil.copytree(folder / "other", folder / "foreign")
    file = folder / "foreign/tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    save_adapter(folder / "adapter", folder / "model")
    save_adapter(folder / "adapter_of_other", folder / "other")
    rows = [json.dumps(pair(i)) + "\n" for i in range(24)]
    (folder / "pairs.jsonl").write_text("".join(rows))
    return folder


def reference_values(run_folder: Path, step: int) -> dict[str, dict[int, float]]:
    """Return the table's name -> answer -> log-probability, as a checkpoint has them."""
    file = run_folder / "checkpoints" / f"step-{step:08d}" / FILE
    tables = decode(file.read_bytes(), file)[1]
    return {
        name: dict(zip(answers.tolist(), logps.tolist(), strict=True))
        for name, (answers, logps) in tables.items()
    }


def expected_logps(here: Path, name: str) -> list[float]:
    """Return what transformers (and PEFT) compute for both answers of all rows."""
    if name == "adapter":
        base = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float32)
        model: Any = peft.PeftModel.from_pretrained(base, here / "adapter")
    else:
        model = AutoModelForCausalLM.from_pretrained(here / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    template = (Path(__file__).parents[1] / "recipes/configs/chat_template.jinja").read_text()
    values = []
    for row in map(json.loads, (here / "pairs.jsonl").read_text().splitlines()):
        for side in ("chosen", "rejected"):
            options = {"chat_template": template, "tokenize": False}
            turns = row["prompt"] + row[side]
            full = tokenizer.apply_chat_template(turns, **options)
            prompt = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, **options
            )
            ids, n = (tokenizer(t, add_special_tokens=False).input_ids for t in (full, prompt))
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            picked = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            values.append([picked[len(n) - 1 :], ids, len(n)])
    return [picked for picked, *_ in values]


@pytest.mark.parametrize(
    ("name", "world", "flags"),
    [
        ("other", 2, ()),
        slow("other", 1, ("--data.packing", "bfd", "--lora.r", 2)),
        slow("adapter", 2, ("--lora.r", 2)),
        slow("adapter", 1, ("--preference.loss_type", "[sigmoid,aot]")),
    ],
)
def test_values_are_those_of_the_reference(
    here: Path, name: str, world: int, flags: tuple[object, ...]
) -> None:
    output = f"{name}-{world}-{len(flags)}"
    given = ("--preference.reference", name, *flags)
    done = run(here, world, output, *given, steps=3)
    assert done.returncode == 0, done.stderr
    assert f"before the first step; each checkpoint holds them; by {name}" in done.stdout
    assert read_metrics(here / output)[0]["loss"] != pytest.approx(0.693147, abs=1e-3)
    picked = expected_logps(here, name)
    ((_, values),) = reference_values(here / output, 3).items()
    assert len(values) == 48
    for answer, value in values.items():
        # The template may end an answer with a newline, which is not supervised.
        sums = [float(picked[answer][:end].sum()) for end in (None, -1)]
        assert any(value == pytest.approx(total, rel=1e-4) for total in sums), (answer, sums)


@pytest.mark.slow
def test_a_resume_evaluates_new_rows_with_the_reference(here: Path) -> None:
    """It does not build the initial weights again, and refuses another reference."""
    folder = here / "resumed-reference"
    shutil.copytree(here / "other", folder)
    given = ("--preference.reference", folder, "--data.max_eval_samples", 1)
    assert run(here, 2, "r", *given, steps=1, batch=4).returncode == 0
    before = reference_values(here / "r", 1)
    more = run(here, 1, "r", *given, steps=4, batch=4)
    assert more.returncode == 0, more.stderr
    assert f"for rows that are new; each checkpoint holds them; by {folder}" in more.stdout
    ((name, after),) = reference_values(here / "r", 4).items()
    assert len(after) > len(before[name]) > 0
    assert {answer: after[answer] for answer in before[name]} == before[name]
    whole = run(here, 1, "w", *given, steps=4, batch=4)
    assert whole.returncode == 0, whole.stderr
    for one, other in zip(read_metrics(here / "r"), read_metrics(here / "w"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
    shutil.rmtree(folder)
    shutil.copytree(here / "third", folder)
    refused = run(here, 1, "r", *given, steps=5, batch=4)
    assert refused.returncode != 0
    assert "is of another reference than this run has: give the preference.reference" in (
        refused.stdout + refused.stderr
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", "expected the folder of a model or adapter, or a Hub id; there is no"),
        ("pairs.jsonl", "this is a file"),
        ("small", "expected a vocabulary of at least .* tokens, .*embedding has 200 rows"),
        ("foreign", "2 of .* tokens have another id or none there"),
        ("adapter_of_other", "is an adapter of another base"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(
    here: Path, name: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(here)
    flags = ["--data.train_files", "pairs.jsonl", "--data.sequence_length", "256"]
    flags += ["--train.max_steps", "1", "--output_dir", "refused"]
    flags += [
        "--data.chat_template",
        str(Path(__file__).parents[1] / "recipes/configs/chat_template.jinja"),
    ]
    given = ["prefer", "--model.name_or_path", "model", *flags, "--preference.reference", name]
    assert cli.main(given) != 0
    shown = capsys.readouterr().err
    pattern = rf"toolkit: error: preference.reference {name}: .*{message}.*\n"
    assert re.fullmatch(pattern, shown), shown


def prefer_config(model: Path, reference: Path, *flags: object) -> PreferConfig:
    paths = ["--model.name_or_path", model, "--preference.reference", reference, *flags]
    return parse(PreferConfig, [*map(str, paths), "--data.sequence_length", "64"])


def check(cfg: PreferConfig) -> str:
    return check_reference(cfg, build_on_meta(cfg.model), cfg.model)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied model, and its adapter with both matrices saved in full."""
    folder = tmp_path_factory.mktemp("tied")
    save_tiny_model(folder / "model", tie_word_embeddings=True, **CONFIG)
    save_adapter(folder / "adapter", folder / "model", modules_to_save=["embed_tokens", "lm_head"])
    return folder


def test_two_copies_of_a_tied_matrix_must_be_equal(tied: Path, tmp_path: Path) -> None:
    assert "its base is this one" in check(prefer_config(tied / "model", tied / "adapter"))
    shutil.copytree(tied / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(file)
    (head,) = (key for key in tensors if "lm_head" in key)
    tensors[head][3, 1] += 1.0
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"preference\.reference .*: .*is one matrix with another"
    ):
        check(prefer_config(tied / "model", tmp_path / "adapter"))


def test_an_adapter_that_peft_scales_otherwise_is_refused(here: Path, monkeypatch: Any) -> None:
    cfg = prefer_config(here / "model", here / "adapter")
    assert "its base is this one" in check(cfg)
    read = reference_model.parse_adapter_settings
    monkeypatch.setattr(
        reference_model,
        "parse_adapter_settings",
        lambda *given: read(*given) | {"alpha_pattern": {"q_proj": 3.0}},
    )
    with pytest.raises(ConfigError, match=r"PEFT scales the adapter of .*q_proj.* by .*2\.0"):
        check(cfg)


def test_kernels_of_the_trained_model_are_no_kernels_of_the_reference(
    here: Path, monkeypatch: Any
) -> None:
    cfg = prefer_config(here / "model", here / "other", "--model.kernels", "liger")
    model = build_on_meta(replace(cfg.model, kernels="none"))
    devices = []
    check_usable = frozen_models.check_usable
    monkeypatch.setattr(
        frozen_models,
        "check_usable",
        lambda settings, length, device: (
            devices.append(str(device)),
            check_usable(settings, length, device),
        ),
    )
    for device in ("cpu", "cuda"):
        assert "260 rows" in check_reference(cfg, model, cfg.model, device)
    assert devices == ["cpu", "cuda"]
    flex = prefer_config(
        here / "model", here / "other", "--model.attn_implementation", "flex_attention"
    )
    assert "260 rows" in check_reference(flex, model, cfg.model, "cuda")
    with pytest.raises(ConfigError, match="flex_attention has no backward on CPUs"):
        check_reference(flex, model, cfg.model, "cpu")
    # The reference is dense.
    flags = "--model.experts_implementation", "eager"
    experts = prefer_config(here / "model", here / "other", *flags)
    assert "260 rows" in check_reference(experts, model, cfg.model, "cpu")


def test_a_rehearsal_checks_the_reference_without_attention_for_gpus(here: Path) -> None:
    cfg = prefer_config(
        here / "model", here / "other", "--model.attn_implementation", "flash_attention_2"
    )
    cpu_cfg, lines = settings_for_cpu(cfg), list[str]()
    start = RunStart(cfg, 1, "cpu", cpu_cfg, log=lines.append, model_cfg=cpu_cfg.model)
    start.model = build_on_meta(cpu_cfg.model)
    check_adapter(start)
    assert "260 rows" in lines[-1]
    start.build_cfg = cfg
    with pytest.raises(ConfigError, match="flash_attention_2"):
        check_adapter(start)


@pytest.mark.parametrize("files_only", [False, True])
def test_rules_of_trained_adapters_do_not_apply_to_a_reference(
    here: Path, files_only: bool
) -> None:
    flags = (
        "--model.frozen_parameters",
        "[embed_tokens.weight]",
        "--checkpoint.async_save",
        "true",
    )
    cfg = prefer_config(here / "model", here / "adapter", *flags)
    model = build_on_meta(cfg.model)
    line = check_reference(cfg, model, cfg.model, files_only=files_only)
    assert "its base is this one" in line


def test_a_reference_is_prepared_for_the_packing_that_was_decided(
    here: Path, monkeypatch: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise ModelError("its attention is eager")

    monkeypatch.setattr(reference_model, "attend_within_documents", refuse)
    cfg = prefer_config(here / "model", here / "other", "--data.packing", "auto")
    mesh: Any = SimpleNamespace(device_type="cpu", context=View())
    monkeypatch.setattr(reference_model, "apply_fsdp", lambda model, *_: SimpleNamespace())
    monkeypatch.setattr(reference_model, "load_or_init", lambda *_: None)
    load_reference(cfg, mesh, has_borders=False)
    message = r"preference\.reference .*: rows are packed, and its attention is eager, which cannot"
    with pytest.raises(ConfigError, match=message):
        load_reference(cfg, mesh, has_borders=True)
    # A run gives the decision.
    seen = []
    reference: Any = SimpleNamespace(cfg=cfg, is_complete=True, _load_parts=lambda _: [])
    reference.data = SimpleNamespace(choice=PackingChoice("none", "asked"))
    monkeypatch.setattr(objectives_reference, "load_reference", lambda *_, **kw: seen.append(kw))
    Reference._compute(reference, SimpleNamespace(mesh=mesh))  # type: ignore[arg-type]
    assert seen == [{"has_borders": False}]


@pytest.mark.parametrize("files_only", [False, True])
def test_dora_on_4_bits_is_refused(here: Path, tmp_path: Path, files_only: bool) -> None:
    save_adapter(tmp_path / "dora", here / "model", use_dora=True)
    flags = ("--lora.r", 2, "--lora.load_in_4bit")
    for name, four, is_refused in (("dora", "true", True), ("dora", "false", False)):
        cfg = prefer_config(here / "model", tmp_path / name, *flags, four)
        model = build_on_meta(cfg.model)
        if not is_refused:
            assert "its base is this one" in check_reference(cfg, model, cfg.model)
            continue
        with pytest.raises(ConfigError, match="is a DoRA adapter, which needs the rows"):
            check_reference(cfg, model, cfg.model, files_only=files_only)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--preference.loss_type=simpo"],
            "preference.reference has no effect with loss_type simpo",
        ),
        (["--preference.loss_type=reward"], "has no effect with loss_type reward"),
        (
            ["--data.streaming=true", "--lora.r=2", "--train.max_steps=3"],
            "data.streaming with preference.reference",
        ),
    ],
)
def test_a_reference_without_effect_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(PreferConfig, ["--model.name_or_path", "m", "--preference.reference", "r", *flags])
    with pytest.raises(ConfigError, match="is an empty text"):
        PreferenceConfig(reference="")


def test_a_plan_has_both_models_before_the_first_step(here: Path) -> None:
    flags = ["--model.name_or_path", str(here / "model"), "--data.sequence_length", "64"]

    def planned(*more: str) -> Any:
        return simulate(parse(PreferConfig, [*flags, "--lora.r=2", *more]), 2, device_type="cpu")

    plain = planned()
    for name, larger in (("other", 0.4), ("adapter", 0.4)):
        both = planned("--preference.reference", str(here / name))
        assert REFERENCE_PASS not in plain.peaks
        assert any("a reference of" in note for note in both.notes)
        added = both.peaks[REFERENCE_PASS].kinds["parameters"] - plain.state.parameters
        assert added > larger * plain.state.parameters
        assert both.state == plain.state  # it is gone when training starts


def test_a_model_card_names_the_reference_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    for name, shown in ((str(tmp_path / "sft"), "sft"), ("org/model", "org/model")):
        config = {"model": {"name_or_path": "m"}, "preference": {"reference": name}}
        settings = select_publishable_settings(config, tmp_path)["hyperparameters"]
        assert settings["preference.reference"] == shown
