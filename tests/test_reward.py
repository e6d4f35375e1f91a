"""Reward models: against figures of TRL, on ranks against one process, and as a user trains one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import yaml
from conftest import save_byte_tokenizer, save_tiny_model, slow
from distributed import run_ranks
from layouts import save_layout
from sharded import apply_fsdp, assert_same_steps, init_mesh, sums_of_gradients
from test_prefer_recipe import TEMPLATE, assert_alike, lines, pair, run
from test_preference import FIGURES, LENGTH, SPLITS
from tiny_models import tiny_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)
from trl_figures import MARGINS, REWARD_SHOWN, REWARDS, pairs, reward_model

from toolkit import cli
from toolkit.config import PreferConfig, parse
from toolkit.config.preference import PreferenceConfig, RewardModelConfig
from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
from toolkit.data.examples.pairs import parse_pair
from toolkit.data.row_formats import PAIRS
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import ConfigError, ModelError
from toolkit.formats import assets_of, export_manifest
from toolkit.hub import card
from toolkit.loading import check_weights_fit, load_pretrained
from toolkit.mesh import View
from toolkit.models import build_on_meta, model_on_meta
from toolkit.models.attention import attend_within_documents
from toolkit.models.reward import set_pad_token_id
from toolkit.planning.simulation import simulate
from toolkit.rehearsal import rehearse
from toolkit.training.loss import sequence_rewards
from toolkit.training.optim import build_optimizer
from toolkit.training.preference import PreferenceLoss
from toolkit.training.step import Update

# ---- The loss -----------------------------------------------------------------------------------


def settings(name: str) -> PreferenceConfig:
    own = {key: value for key, value in REWARDS[name].items() if key != "margin"}
    return PreferenceConfig(loss_type="reward", **own)


def piece_of(chosen: list[int], rejected: list[int]) -> Piece:
    labels = [label for ids in (chosen, rejected) for label in (IGNORED, *ids[1:])]
    return Piece(np.array(chosen + rejected), np.array(labels), len(chosen))


def batch_of(name: str, packing: Any, numbers: list[int], pad: int = 0) -> Batch:
    """Return the pairs of these numbers as a micro-batch; packed, two to a sample."""
    shape = SampleShape(packing, 2 * LENGTH, pad, borders=packing == "bfd", row_format=PAIRS)
    each = 2 if packing == "bfd" else 1
    samples = []
    for at in range(0, max(1, len(numbers)), each):
        own = numbers[at : at + each]
        sides = [
            [pairs()[n]["prompt"] + pairs()[n][s] for s in ("chosen", "rejected")] for n in own
        ]
        sample = shape.sample([piece_of(*both) for both in sides])
        if REWARDS[name].get("margin"):
            sample["margin"] = torch.tensor([MARGINS[n] for n in own])
        samples.append(sample)
    return shape.batch(samples)


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_model_learns_as_trls(name: str, packing: str) -> None:
    model = reward_model()
    attend_within_documents(model)
    batch = batch_of(name, packing, [*range(len(pairs()))])
    loss = PreferenceLoss(settings(name), View(0, 1))(model, batch)
    total = (loss.total / loss.count).sum()
    total.backward()
    wanted = FIGURES[name]
    assert float(total) == pytest.approx(wanted["loss"], rel=1e-5)
    parts = {part: float(value / loss.count[0]) for part, value in loss.parts.items()}
    assert parts["margin"] == pytest.approx(wanted["margin"], rel=1e-5)
    assert parts["accuracy"] == pytest.approx(wanted["accuracy"], rel=1e-5)
    both = (parts["reward_chosen"] + parts["reward_rejected"]) / 2
    assert both == pytest.approx(wanted["mean_reward"], rel=1e-5)
    for parameter in REWARD_SHOWN:
        grad, (of_sum, of_squares) = (
            model.get_parameter(parameter).grad.double(),
            wanted["gradients"][parameter],
        )
        assert float(grad.sum()) == pytest.approx(of_sum, rel=1e-4, abs=1e-5)
        assert float(grad.square().sum()) == pytest.approx(of_squares, rel=2e-5)


def of_ranks(rank: int, world: int, packing: str, lora: bool) -> dict[str, Any]:
    """Return objective -> loss and summed gradients of a global batch, over two micro-batches."""
    found: dict[str, Any] = {}
    for name in REWARDS:
        tuned: Any = reward_model()
        attend_within_documents(tuned)
        if lora:
            torch.manual_seed(5)
            named = ["q_proj", "down_proj"]
            own = peft.LoraConfig("SEQ_CLS", r=2, target_modules=named, modules_to_save=["score"])
            tuned = peft.get_peft_model(tuned, own)
            for n, p in tuned.named_parameters():
                if "lora_B" in n:
                    torch.nn.init.normal_(p, std=0.1)
        mesh = init_mesh("cpu", world, ShardingConfig(param_dtype="float32"))
        sharded = apply_fsdp(tuned, mesh, ShardingConfig(param_dtype="float32"))
        mine = SPLITS[world][rank]
        halves = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]  # some have no pair
        batches = [batch_of(name, packing, half) for half in halves]
        objective = PreferenceLoss(settings(name), mesh.loss)
        update = Update(sharded, batches, [objective.counts(batch) for batch in batches])
        for batch in update:
            update.mean(objective(tuned, batch)).backward()
        sums = sums_of_gradients(tuned)
        stats = update.step(torch.optim.SGD(tuned.parameters(), lr=0.0), max_grad_norm=0.0)
        found[name] = float(stats.loss), sums
    return found


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], dict[str, Any]]:
    ways = [(packing, lora) for packing in ("none", "bfd") for lora in (False, True)]
    return {way: run_ranks(of_ranks, 1, *way)[0] for way in ways}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [slow("none"), "bfd"])
@pytest.mark.parametrize("world", [2, slow(3)])
def test_unequal_ranks_are_one_process(alone, world: int, packing: str, lora: bool) -> None:
    for found in run_ranks(of_ranks, world, packing, lora):
        assert_same_steps(found, alone[packing, lora])


def test_one_process_on_ranks_is_trls_and_its_adapters_train_the_head(alone) -> None:
    for (_, lora), found in alone.items():
        for name, (loss, sums) in found.items():
            if not lora:
                assert loss == pytest.approx(FIGURES[name]["loss"], rel=1e-5)
            (head,) = [square for n, (_, square) in sums.items() if "score" in n]
            assert head > 0.1


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_rewards_are_what_transformers_reads(packing: str) -> None:
    """At the last token that is not the padding token, which may end the texts themselves."""
    model = reward_model().eval()
    attend_within_documents(model)
    rows = [[7, 8, 9, 4, 4], [7, 8, 9, 4], [5, 6], [4, 4, 9, 3]]
    for pad in (0, 4):
        model.config.pad_token_id = pad
        shape = SampleShape(packing, 32, pad, borders=packing == "bfd", row_format=PAIRS)
        halves = (rows[:2], rows[2:])
        batch = shape.batch([shape.sample([piece_of(*half)]) for half in halves])
        with torch.no_grad():
            found = sequence_rewards(model, batch)
            expected = [model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in rows]
        assert found.tolist() == pytest.approx([float(x) for x in expected], abs=1e-6)
        assert (abs(float(found[0] - found[1])) < 1e-6) == (pad == 4)


# ---- The model ----------------------------------------------------------------------------------


def test_a_causal_lm_becomes_a_reward_model(tmp_path: Path, capsys: Any) -> None:
    folder, cfg = save_tiny_model(tmp_path / "model"), RewardModelConfig(str(tmp_path / "model"))
    found = []
    for seed in (1, 1, 2):
        model = build_on_meta(cfg)
        assert type(model) is LlamaForSequenceClassification
        check_weights_fit(model, cfg)
        load_pretrained(model, folder, "cpu", seed=seed)
        found.append(model)
    said = "head       score.weight of LlamaForSequenceClassification is new, drawn from the"
    assert f"{said} run's seed; lm_head.weight of {folder} is skipped\n" in capsys.readouterr().out
    heads = [model.score.weight for model in found]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    own = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in found[0].state_dict().items():
        assert name == "score.weight" or torch.equal(value, own[name]), name
    config = assets_of(found[0]).config
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}


def test_a_reward_model_is_loaded_with_its_head(tmp_path: Path, capsys: Any) -> None:
    saved, cfg = reward_model(), RewardModelConfig(str(tmp_path))
    saved.save_pretrained(tmp_path)
    model = build_on_meta(cfg)
    check_weights_fit(model, cfg)
    load_pretrained(model, tmp_path, "cpu", seed=1)
    assert torch.equal(model.score.weight, saved.score.weight)
    assert "head " not in capsys.readouterr().out
    assert type(model_on_meta(tmp_path)) is LlamaForSequenceClassification
    with pytest.raises(ModelError, match="LlamaForSequenceClassification, not a causal language"):
        build_on_meta(ModelConfig(str(tmp_path)))


def test_a_head_that_is_missing_is_an_error_of_a_reward_model(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "config.json"
    named = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "A"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    cfg = RewardModelConfig(str(tmp_path))
    with pytest.raises(Exception, match=r"missing in the checkpoint: score\.weight"):
        check_weights_fit(build_on_meta(cfg), cfg)


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_a_checkpoint_for_more_than_text_becomes_one(tmp_path: Path, kind: str) -> None:
    save_layout(kind, tmp_path)
    cfg = RewardModelConfig(str(tmp_path))
    model = build_on_meta(cfg)
    check_weights_fit(model, cfg)
    load_pretrained(model, tmp_path, "cpu", seed=1)
    frozen = {n.split(".")[1] for n, p in model.named_parameters() if not p.requires_grad}
    assert {"visual", "vision_tower"} & frozen
    assert "language_model" not in frozen
    assert model.score.weight.requires_grad
    set_pad_token_id(model, assets_of(model), 3)
    assert assets_of(model).config["text_config"]["pad_token_id"] == 3
    rows = [[9, 10, 11, 12, 13], [9, 20, 21]]
    shape = SampleShape("none", 16, 3, row_format=PAIRS)
    batch = shape.batch([shape.sample([piece_of(*rows)])])
    with torch.no_grad():
        found = sequence_rewards(model.eval(), batch)
        expected = [float(model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in rows]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def changed(folder: Path, kind: str = "llama", **changes: Any) -> str:
    config = tiny_config(kind).to_dict() | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


UNFIT = {
    "is of model_type olmoe, for which transformers": {"kind": "olmoe"},
    "LlamaForTokenClassification, neither a causal": {
        "architectures": ["LlamaForTokenClassification"]
    },
    "LlamaForSequenceClassification of 3 labels, a classifier": {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {str(i): str(i) for i in range(3)},
    },
    "CTRLForSequenceClassification has no linear head `score`": {"kind": "ctrl"},
}


@pytest.mark.parametrize("said", UNFIT)
def test_what_cannot_be_a_reward_model_is_named(tmp_path: Path, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        build_on_meta(RewardModelConfig(changed(tmp_path, **UNFIT[said]), init="random"))


def test_its_head_is_no_matrix_of_muons() -> None:
    model = reward_model()
    optimizer = build_optimizer(model, OptimConfig(optim="muon"))
    own = [p for group in optimizer.param_groups if group["special"] for p in group["params"]]
    assert any(p is model.get_parameter(REWARD_SHOWN[1]) for p in own)
    assert not any(p is model.score.weight for p in own)


@pytest.mark.parametrize("lora", [[], ["--lora.r", "2"]], ids=["full", "lora"])
def test_a_reward_model_is_planned(tmp_path: Path, lora: list[str]) -> None:
    save_tiny_model(tmp_path)
    known = ["--model.name_or_path", str(tmp_path), "--preference.loss_type", "reward"]
    cfg = parse(PreferConfig, [*known, "--data.sequence_length", "64", *lora])
    planned = simulate(cfg, 2, device_type="cpu")
    assert planned.model == "LlamaForSequenceClassification"
    assert 0 < planned.state.gradients < planned.state.total < planned.peak.nbytes


# ---- Settings and rows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preference.rpo_alpha", "1"], "preference.rpo_alpha has no effect"),
        (["--preference.label_smoothing", "0.1"], "preference.label_smoothing has no effect"),
        (["--data.streaming", "true", "--train.max_steps", "2"], "cannot be trained on streams"),
        (["--train.eval_prompts", "[a]"], "train.eval_prompts needs a model that generates"),
        (
            ["--preference.loss_type", "ipo", "--preference.center_rewards_coefficient", "0.1"],
            "preference.center_rewards_coefficient has no effect with loss_type ipo",
        ),
    ],
)
def test_settings_without_effect_are_refused(flags: list[str], said: str) -> None:
    known = ["--model.name_or_path", "x", "--preference.loss_type", "reward"]
    with pytest.raises(ConfigError, match=said):
        parse(PreferConfig, [*known, *flags])


def test_a_margin_is_a_number() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert parse_pair(row).margin is None
    assert parse_pair(row | {"margin": 1}).margin == 1.0
    for wrong in ("much", True, float("nan")):
        with pytest.raises(BadRow, match="margin"):
            parse_pair(row | {"margin": wrong})


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    save_tiny_model(folder / "model", vocab_size=260, max_position_embeddings=512)
    save_byte_tokenizer(folder / "model")
    rows = [json.dumps(pair(i) | {"margin": 0.1 * (i % 3)}) + "\n" for i in range(50)]
    (folder / "pairs.jsonl").write_text("".join(rows))
    return folder


def train(here: Path, world: int, output: str, *flags: object, steps: int = 6) -> str:
    kind = ("--preference.loss_type", "reward")
    done = run(here, world, output, *kind, *flags, steps=steps)
    assert done.returncode == 0, done.stderr
    return done.stdout


def consolidated(run_dir: Path, output: Path, *flags: str) -> Path:
    assert cli.main(["consolidate", str(run_dir), "--output", str(output), *flags]) == 0
    assert cli.main(["verify", str(run_dir), str(output), "--logits"]) == 0
    return output


def rewards_of(model: Any, folder: Path) -> list[list[float]]:
    """Return the rewards of both sides of some pairs as a reader of an export computes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    found = []
    for i in range(4):
        row = pair(i)
        sides = [row["prompt"] + row[side] for side in ("chosen", "rejected")]
        ids = tokenizer.apply_chat_template(
            sides, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.no_grad():
            found.append(model(**ids).logits.flatten().tolist())
    return found


@pytest.fixture(scope="module")
def undisturbed(here: Path) -> list[dict[str, Any]]:
    said = train(here, 1, "undisturbed")
    assert "head       score.weight of LlamaForSequenceClassification is new" in said
    assert "50 pairs with a margin" in said
    assert "reward     read at the last token that is not <|endoftext|>" in said
    assert "\nreference  " not in said
    return lines(here, "undisturbed")


def test_a_run_is_exported_and_read_by_transformers(
    here: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], capsys: Any
) -> None:
    evaluated = undisturbed[-1]
    assert {f"eval_{part}" for part in ("reward_chosen", "margin", "accuracy")} < set(evaluated)
    assert "eval_logps_chosen" not in evaluated
    folder = consolidated(here / "undisturbed", tmp_path / "hf")
    assert "AutoModelForSequenceClassification.from_pretrained" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] == 0
    assert not (folder / "generation_config.json").exists()
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] | info["unexpected_keys"]
    # A reader's padded batch gives what one sequence by itself does, and what training computed.
    shape = SampleShape("none", 256, 0, row_format=PAIRS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i, expected in enumerate(rewards_of(model, folder)):
        row = pair(i)
        own = [
            tokenizer.apply_chat_template(row["prompt"] + row[side])["input_ids"]
            for side in ("chosen", "rejected")
        ]
        batch = shape.batch([shape.sample([piece_of(*own)])])
        with torch.no_grad():
            found = sequence_rewards(model, batch)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)
    text = card.render_card(export_manifest.read(folder), "me/reward", "ab" * 32, config)
    assert yaml.safe_load(text.split("---")[1])["pipeline_tag"] == "text-classification"
    assert "A reward model, 0.0 M parameters" in text
    # The other way round: what a causal LM's reader is told.
    damaged = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(damaged | {"pad_token_id": 5}))
    assert cli.main(["verify", str(here / "undisturbed"), str(folder)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_a_run_on_other_ranks_goes_on_as_if_undisturbed(
    here: Path, undisturbed: list[dict[str, Any]], packing: str
) -> None:
    flags = () if packing == "none" else ("--data.packing", "bfd", "--data.sequence_length", 96)
    train(here, 3, packing, *flags, steps=3)
    train(here, 2, packing, *flags)
    expected = undisturbed
    if flags:
        train(here, 1, f"{packing}-alone", *flags)
        expected = lines(here, f"{packing}-alone")
    assert_alike(lines(here, packing), expected)


@pytest.mark.slow
def test_an_adapter_and_its_head_are_exported(here: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ["--lora.r", 4, "--checkpoint.export_at_end", True, "--optim.learning_rate", 1e-2]
    assert train(here, 2, "lora", *flags).count("adapter proven") == 2
    found = lines(here, "lora")
    assert found[-1]["loss"] < found[0]["loss"]
    adapter = consolidated(here / "lora", tmp_path / "adapter")
    said = capsys.readouterr().out
    assert f"from_pretrained('{here / 'model'}', num_labels=1)\n" in said
    assert "    base.config.get_text_config().pad_token_id = 0\n" in said
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained(here / "model", num_labels=1)
    base.config.get_text_config().pad_token_id = 0
    adapted = peft.PeftModel.from_pretrained(base, adapter)
    merged = consolidated(here / "lora", tmp_path / "merged", "--merge")
    whole = AutoModelForSequenceClassification.from_pretrained(merged)
    for one, other in zip(rewards_of(adapted, adapter), rewards_of(whole, merged), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    text = card.render_card(export_manifest.read(adapter), "me/adapter", "ab" * 32)
    assert 'dtype="auto", num_labels=1)' in text
    assert "\nbase.config.get_text_config().pad_token_id = 0\n" in text


@pytest.mark.slow
def test_a_trained_reward_model_is_trained_further(here: Path, tmp_path: Path) -> None:
    """As itself and under adapters, from an export; and at random from its config."""
    train(here, 1, "first", "--checkpoint.export_at_end", True)
    first = lines(here, "first")[-1]
    again = ["--model.name_or_path", here / "first/exports/step-00000006", "--train.eval_steps", 1]
    for output, more in (("again", []), ("adapted", ["--lora.r", 2])):
        said = train(here, 2, output, *again, *more, "--optim.learning_rate", 1e-9, steps=1)
        assert "\nhead  " not in said
        found = lines(here, output)[-1]
        assert found["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-4)
    train(here, 1, "random", "--model.init", "random", steps=1)
    model = AutoModelForSequenceClassification.from_config(
        LlamaConfig.from_pretrained(consolidated(here / "random", tmp_path / "random"))
    )
    assert type(model) is LlamaForSequenceClassification


@pytest.mark.plans
def test_a_reward_model_is_rehearsed(here: Path, tmp_path: Path) -> None:
    settings = {
        "model": {"name_or_path": str(here / "model")},
        "data": {"train_files": str(here / "pairs.jsonl"), "sequence_length": 256},
        "preference": {"loss_type": "reward"},
        "lora": {"r": 2},
        "train": {"max_steps": 4},
        "output_dir": str(tmp_path / "run"),
    }
    settings["data"]["chat_template"] = str(TEMPLATE)
    file = tmp_path / "reward.yaml"
    file.write_text(yaml.safe_dump(settings))
    said = list[str]()
    result = rehearse(file, show=said.append)
    assert result.ok, said
    assert any("a reward of" in line for line in said)
