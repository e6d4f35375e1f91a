"""Context parallelism of losses of complete sequences: preference tuning and reward models."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import KeepGradients, alone, apply_fsdp, sharded_of
from test_prefer_recipe import TEMPLATE, answer, pair, reference_of
from tiny_models import tiny_config, tiny_model
from transformers import LlamaForSequenceClassification

from toolkit.config import FinetuneConfig, PreferConfig, parse
from toolkit.config.preference import PreferenceConfig
from toolkit.config.settings import FinetuneModelConfig, ModelConfig, ShardingConfig
from toolkit.data.row_formats import ANSWERS, PAIRS
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import FILLER, Packing, SampleShape
from toolkit.errors import ConfigError, ModelError
from toolkit.formats.metrics_file import read_metrics
from toolkit.mesh import Mesh, init_mesh
from toolkit.models.attention import BORDERS, attend_within_documents
from toolkit.models.classes import classifier_class
from toolkit.models.context_probe import find_context_obstacle
from toolkit.objectives import CausalLM, build, objective_class, register
from toolkit.objectives.frozen_models import check_loadable
from toolkit.planning.automatic import list_candidates
from toolkit.planning.devices import device_of
from toolkit.planning.search import find_longest, make_plan
from toolkit.rehearsal.rehearse import rehearse
from toolkit.training import preference, row_parts
from toolkit.training.preference import PreferenceLoss
from toolkit.training.step import Update, evaluate

LENGTH = 32
FP32 = ShardingConfig(param_dtype="float32")
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.3},
    "ipo": {"beta": 0.1},
    "simpo": {"beta": 2.0},
    "rpo": {"loss_type": "sigmoid", "rpo_alpha": 0.7},
    "orpo": {"beta": 0.2},
    "aot": {"loss_type": "aot_unpaired", "beta": 0.1},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "reward": {"center_rewards_coefficient": 0.05},
}
# Samples of two micro-batches of each of two data ranks, as tokens of prompt and of both answers.
# With two parts, a packed row is cut after 16 tokens: within completions, within prompts, and after
# everything that is not padding. Padded rows are cut in the middle of the longest of the
# micro-batch; there, all completions of the last micro-batch are in the second part.
Lengths = tuple[int, int, int]
ROWS: list[list[list[list[Lengths]]]] = [
    [[[(3, 9, 8)], [(2, 2, 3), (1, 6, 9)]], [[(2, 2, 3)], [(1, 3, 1)]]],
    [[[(5, 11, 2), (2, 1, 4)], [(7, 7, 7)]], [[(10, 2, 3)], [(11, 3, 1)]]],
]
PARTS_WITHOUT_COMPLETIONS = {"bfd": (0, 1, 1), "none": (1, 1, 0)}
"""Packing -> data rank and micro-batch, and the part that has no completion token."""


def settings(name: str) -> PreferenceConfig:
    return PreferenceConfig(**{"loss_type": name} | LOSSES[name])


def batch_of(
    cfg: PreferenceConfig,
    packing: Packing,
    rows: list[list[Lengths]],
    part: tuple[int, int] = (0, 1),
) -> Batch:
    """Return a micro-batch; a padded one has a sample for each pair."""
    row_format = PAIRS if cfg.paired else ANSWERS
    options: dict[str, Any] = {"row_format": row_format, "prompts": cfg.learns_prompts}
    length = LENGTH if cfg.paired else 2 * LENGTH
    shape = SampleShape(packing, length, 3, borders=True, context=part, **options)
    drawn = np.random.default_rng(sum(sum(lengths) for row in rows for lengths in row))
    samples = []
    if packing == "none":
        rows = [[lengths] for row in rows for lengths in row]
    for row in rows:
        pieces, reference = [], []
        for prompt, *answers in row:
            shared = drawn.integers(8, 100, prompt)
            ids = np.concatenate([x for n in answers for x in (shared, drawn.integers(8, 100, n))])
            labels = ids.copy()
            for begin in (0, prompt + answers[0]):
                labels[begin : begin + prompt] = IGNORED
            pieces.append(Piece(ids, labels, prompt + answers[0]))
            reference += [-4.9 * n + drawn.normal() for n in answers]
        sample = shape.sample(pieces, []) | {"reference": torch.tensor(reference).float()}
        if cfg.paired:
            sample["margin"] = torch.tensor(drawn.random(len(row))).float()
        else:
            sample["desirable"] = torch.tensor(drawn.random(len(row)) < 0.5)
        samples.append(sample)
    return shape.batch(samples)


Step = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Numbers of a step and of an evaluation of the same rows, and the gradients of the step."""


def compute_step(
    model: Any, sharded: Any, objective: PreferenceLoss, micro_batches: list[Batch]
) -> Step:
    """Return loss, metrics and gradients of a step, which changes nothing."""
    total, _ = evaluate(sharded, {"rows": micro_batches}, objective)
    numbers = {f"eval_{name}": float(value) for name, value in total.parts.items()}
    numbers["eval_loss"] = float(total.loss)
    counts = [objective.counts(batch) for batch in micro_batches]
    update = Update(sharded, micro_batches, counts)
    for batch in update:
        update.mean(objective(model, batch)).backward()
    optimizer = KeepGradients(model)
    stats = update.step(optimizer, max_grad_norm=0.0)
    numbers |= {name: float(value) for name, value in stats.parts.items()}
    numbers |= {"loss": float(stats.loss), "tokens": int(stats.tokens), "terms": int(stats.terms)}
    return numbers, optimizer.gradients


def build_model(name: str) -> Any:
    if name != "reward":
        return tiny_model("llama").train()
    torch.manual_seed(4)
    config = tiny_config("llama", num_labels=1, pad_token_id=3)
    return LlamaForSequenceClassification(config).train()


def compute_steps(
    rank: int, world: int, names: list[str], packings: list[Packing], layout: dict[str, Any]
) -> dict[tuple[str, str], Step]:
    """Return a step of every loss and packing on the ranks of a mesh."""
    cfg = replace(FP32, **layout)
    mesh = init_mesh("cpu", world, cfg)
    steps = {}
    for name in names:
        model = build_model(name)
        attend_within_documents(model, mesh.context)
        apply_fsdp(model, mesh, cfg)
        for packing in packings:
            batches = micro_batches(name, packing, mesh)
            objective = objective_of(name, mesh)
            steps[name, packing] = compute_step(model, sharded_of(model), objective, batches)
    return steps


def objective_of(name: str, mesh: Mesh) -> PreferenceLoss:
    return PreferenceLoss(settings(name), mesh.data, max_pairs=8, context=mesh.context)


def micro_batches(name: str, packing: Packing, mesh: Mesh) -> list[Batch]:
    """Return those of this data rank; a single data rank reads those of both."""
    part = mesh.context.rank, mesh.context.size
    of_rank = ROWS[mesh.data.rank :: mesh.data.size]
    return [batch_of(settings(name), packing, rows, part) for ranks in of_rank for rows in ranks]


def compute_plain_steps(names: list[str], packings: list[Packing]) -> dict[tuple[str, str], Step]:
    """Return the same on complete rows in one process."""
    steps = {}
    for name in names:
        for packing in packings:
            model = build_model(name)
            attend_within_documents(model)
            objective = objective_of(name, alone())
            batches = micro_batches(name, packing, alone())
            steps[name, packing] = compute_step(model, sharded_of(model), objective, batches)
    return steps


def assert_same_steps(steps: dict, expected: dict) -> None:
    assert steps.keys() == expected.keys()
    for key, (numbers, gradients) in steps.items():
        expected_numbers, expected_gradients = expected[key]
        assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=1e-5), key
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            off = float((gradients[name] - gradient).abs().max() / gradient.abs().max())
            assert off < 1e-5, (key, name, off)


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_rows_cross_the_border_and_one_part_has_no_completion(packing):
    """The rows of this file are what they are meant to be."""
    cfg = settings("sigmoid")
    data_rank, number, empty = PARTS_WITHOUT_COMPLETIONS[packing]
    rows = ROWS[data_rank][number]
    parts = [batch_of(cfg, packing, rows, (at, 2)) for at in range(2)]
    assert int(parts[empty].count) == 0 < int(parts[1 - empty].count)
    both = [batch_of(cfg, packing, ROWS[0][0], (at, 2)) for at in range(2)]
    crossing = {*both[0].sequences.unique().tolist()} & {*both[1].sequences.unique().tolist()}
    assert crossing - {FILLER}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_two_ranks_that_share_rows_have_the_step_of_one_process(packing):
    names = list(LOSSES)
    steps = run_ranks(compute_steps, 2, names, [packing], {"context_parallel": 2})
    expected = compute_plain_steps(names, [packing])
    assert_same_steps(steps[0], expected)
    assert_same_steps(steps[1], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, {"dp_replicate": 2, "dp_shard": 2}, {"accumulation": "reduce_each"}],
    ids=["sharded", "replicas", "reduce_each"],
)
def test_two_groups_have_the_step_of_two_ranks(layout):
    """KTO and the sorted losses depend on how many micro-batches are computed at the same time."""
    names = ["sigmoid", "kto", "simpo", "rpo", "aot", "reward"]
    layout = {"context_parallel": 2, **layout}
    steps = run_ranks(compute_steps, 4, names, ["bfd"], layout)
    expected = run_ranks(compute_steps, 2, names, ["bfd"], {})
    for of_rank in steps:
        assert_same_steps(of_rank, expected[0])
    of_one_process = ["sigmoid", "simpo", "rpo", "reward"]
    plain = compute_plain_steps(of_one_process, ["bfd"])
    assert_same_steps({key: steps[0][key] for key in plain}, plain)


def forget_other_parts(rank: int, world: int, name: str) -> Any:
    """Return a step in which each rank knows its own part of a sequence only."""
    return with_mutation(rank, world, name, preference, "add_parts", lambda values, _: values)


def add_gradients(rank: int, world: int, name: str) -> Any:
    """Return a step in which the backward adds the gradients of the ranks, as that of a sum."""
    backward = staticmethod(lambda ctx, gradient: (2 * gradient, None))
    return with_mutation(rank, world, name, row_parts._AddParts, "backward", backward)


def count_twice(rank: int, world: int, name: str) -> Any:
    """Return a step in which each rank of a group counts the loss."""
    return with_mutation(rank, world, name, preference, "count_once", lambda loss, _: loss)


def with_mutation(rank: int, world: int, name: str, owner: Any, attribute: str, other: Any) -> Any:
    original = vars(owner)[attribute]
    setattr(owner, attribute, other)
    try:
        return compute_steps(rank, world, [name], ["bfd"], {"context_parallel": 2})
    finally:
        setattr(owner, attribute, original)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "kto", "simpo", "reward"])
@pytest.mark.parametrize("mutation", [forget_other_parts, add_gradients, count_twice])
def test_mistakes_are_found(name: str, mutation: Callable[..., Any]):
    """The negative control."""
    steps = run_ranks(mutation, 2, name)
    with pytest.raises(AssertionError):
        assert_same_steps(steps[0], compute_plain_steps([name], ["bfd"]))


# ---- Batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["bfd", "none"])
@pytest.mark.parametrize("name", ["sigmoid", "orpo", "kto"])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_batch_are_its_rows(name, packing, size):
    cfg = settings(name)
    whole = batch_of(cfg, packing, ROWS[0][0])
    parts = [batch_of(cfg, packing, ROWS[0][0], (at, size)) for at in range(size)]
    assert_parts(whole, parts)
    assert (whole.halves is None) == cfg.paired
    for half, *of_parts in zip(whole.halves or (), *(p.halves or () for p in parts), strict=True):
        assert_parts(half, of_parts)


def assert_parts(whole: Batch, parts: list[Batch]) -> None:
    rows, width = whole.targets.shape
    for name, fill in (("targets", IGNORED), ("sequences", FILLER)):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined[:, :width], getattr(whole, name))
        assert (joined[:, width:] == fill).all()
    part_width = parts[0].targets.shape[1]
    assert part_width * len(parts) == -(-width // len(parts)) * len(parts)
    assert [part.n_targets for part in parts] == [int(part.count) for part in parts]
    assert all("attention_mask" not in part.inputs for part in parts)
    assert all(int(part.inputs[BORDERS[0]][-1]) == rows * part_width * len(parts) for part in parts)
    owners = []
    for at, part in enumerate(parts):
        assert part.n_sequences == whole.n_sequences
        assert part.columns.keys() == whole.columns.keys()
        assert all(torch.equal(part.columns[name], whole.columns[name]) for name in whole.columns)
        assert part.ends is not None
        assert whole.ends is not None
        assert torch.equal(part.ends + torch.tensor([0, at * part_width]), whole.ends)
        owners.append((part.ends[:, 1] >= 0) & (part.ends[:, 1] < part_width))
    assert (torch.stack(owners).sum(0) == 1).all()


# ---- What is refused -----------------------------------------------------------------------------


def test_reward_models_are_tried_by_the_outputs_of_their_head():
    for kind, expected in (("llama", ""), ("jamba", "convolutions, recurrences")):
        config = tiny_config(kind, num_labels=1, pad_token_id=3)
        model_class = classifier_class(config)
        with torch.device("meta"):
            config = model_class(config).config
        obstacle = find_context_obstacle(config, model_class, 2, 64)
        assert expected in obstacle
        assert bool(obstacle) == bool(expected)


def test_a_loss_that_does_not_say_that_it_works_on_parts_is_refused():
    class OwnConfig(FinetuneConfig):
        pass

    shared = OwnConfig(FinetuneModelConfig("model"), ShardingConfig(context_parallel=2))

    @register(OwnConfig)
    class OtherLoss(CausalLM):
        def __call__(self, model: Any, batch: Batch) -> Any:
            return super().__call__(model, batch)

    assert objective_class(OwnConfig) is OtherLoss
    with pytest.raises(ConfigError, match=r"OtherLoss of .* runs does not say"):
        build(shared)
    OtherLoss.supports_context_parallel = True
    build(shared)


def test_a_frozen_model_whose_rows_cannot_be_shared_is_refused(tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    cfg = PreferConfig(FinetuneModelConfig("model"), ShardingConfig(context_parallel=2))
    cfg = replace(cfg, data=replace(cfg.data, sequence_length=64))
    frozen = ModelConfig(str(tmp_path), init="random")
    with pytest.raises(ModelError, match="context_parallel 2 is not possible for JambaForCausalLM"):
        check_loadable(frozen, cfg, "cpu")


# ---- Complete runs -------------------------------------------------------------------------------

METRICS = ("margin", "reward_", "logps_", "kl", "accuracy", "loss", "mean_loss", "grad_norm")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and the rows."""
    folder = tmp_path_factory.mktemp("context")
    for seed, name in enumerate(("model", "other")):
        save_tiny_model(folder / name, seed=seed, vocab_size=260, max_position_embeddings=512)
        save_byte_tokenizer(folder / name)
    for name, make in (("pairs", pair), ("answers", answer)):
        rows = [json.dumps(make(i)) + "\n" for i in range(50)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def run(here: Path, world: int, output: str, *flags: object, steps: int = 4) -> str:
    """Run the recipe; `flags` win over those of this function."""
    given = {
        "model.name_or_path": "model",
        "output_dir": output,
        "data.train_files": "pairs.jsonl",
        "data.chat_template": TEMPLATE,
        "data.sequence_length": 132,
        "data.packing": "none",
        "data.eval_split": 0.1,
        "sharding.param_dtype": "float32",
        "optim.learning_rate": 1e-3,
        "optim.warmup_steps": 0,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": steps,
        "train.eval_steps": 2,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 2,
        "train.global_batch_size": 8,
        "checkpoint.save_steps": 2,
    }
    known = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    done = run_recipe_ranks("prefer", world, *known, *map(str, flags), cwd=here)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def assert_same_metrics(lines: list[dict[str, Any]], expected_lines: list[dict[str, Any]]) -> None:
    """Compare the metrics of two runs line by line, except for times and memory."""
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    compared = set()
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            if name in ("step", "tokens", "epoch", "learning_rate", "skipped_steps"):
                assert line[name] == value, name
            plain = name.removeprefix("eval_")
            if not plain.startswith(METRICS):
                continue
            # The first margins are rounding errors, of any sign.
            margin = expected.get("margin" if plain == name else "eval_margin", 1.0)
            if plain == "accuracy" and abs(margin) < 1e-5:
                continue
            compared.add(name)
            close = pytest.approx(value, rel=5e-5, abs=5e-5)
            assert line[name] == close, (name, line["step"])
    assert {"loss", "eval_loss", "grad_norm", "margin"} <= compared


LORA = ("--lora.r", 4)
ANSWER_FILE = ("--data.train_files", "answers.jsonl", "--data.sequence_length", 256)
RECIPES: dict[str, tuple[object, ...]] = {
    "padded": (),
    "packed ipo with LoRA": (
        *LORA,
        *("--preference.loss_type", "ipo", "--preference.rpo_alpha", 0.5, "--data.packing", "bfd"),
    ),
    "kto": ("--preference.loss_type", "kto", *ANSWER_FILE, "--data.packing", "bfd"),
    "another reference": ("--preference.reference", "other", "--data.packing", "bfd"),
    "recomputed simpo": (
        *("--preference.loss_type", "simpo", "--preference.beta", 2.0),
        *("--sharding.activation_checkpointing", "full"),
    ),
    "reward": ("--preference.loss_type", "reward", "--data.packing", "bfd"),
}
STREAMED = (
    *("--data.streaming", "true", "--data.eval_files", "pairs.jsonl", "--data.eval_split", 0),
    *("--data.max_eval_samples", 8),
)
RECIPES["streamed with LoRA"] = (*LORA, *STREAMED)
LONG_RECIPES = ("another reference", "recomputed simpo", "reward", "padded")
SHARED = ("--sharding.context_parallel", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n in LONG_RECIPES else []) for n in RECIPES],
)
def test_a_run_logs_the_same_metrics(here: Path, name: str) -> None:
    flags = RECIPES[name]
    folders = [f"{name}-alone", f"{name}-shared"]
    run(here, 1, folders[0], *flags)
    log = run(here, 2, folders[1], *flags, *SHARED)
    assert "1 group(s) of 2 processes" in log
    assert_same_metrics(read_metrics(here / folders[1]), read_metrics(here / folders[0]))
    if name in ("reward", "recomputed simpo", "streamed with LoRA"):
        return
    # The values that are stored with the checkpoints.
    expected, values = (reference_of(here / folder, 4) for folder in folders)
    assert len(values) >= 37
    assert values.keys() == expected.keys()
    for row, logps in expected.items():
        assert values[row] == pytest.approx(logps, rel=2e-6)


@pytest.mark.slow
def test_two_groups_log_the_same_metrics(here: Path) -> None:
    run(here, 1, "groups-alone")
    assert "2 group(s) of 2 processes" in run(here, 4, "groups", *SHARED)
    assert_same_metrics(read_metrics(here / "groups"), read_metrics(here / "groups-alone"))


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_ranks_a_row(here: Path) -> None:
    """The second start reads more rows, and evaluates the reference of the new ones."""
    run(here, 1, "undisturbed", steps=6)
    expected = read_metrics(here / "undisturbed")
    for first, second in ((2, 1), (1, 2)):
        output = f"from {first}"
        run(here, first, output, "--sharding.context_parallel", first, steps=2)
        before = reference_of(here / output, 2)
        log = run(here, second, output, "--sharding.context_parallel", second, steps=6)
        assert "by the model of the first step" in log
        after = reference_of(here / output, 6)
        assert len(before) < len(after)
        assert all(after[row] == values for row, values in before.items())
        lines = read_metrics(here / output)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        for line, undisturbed in zip(lines, expected, strict=True):
            for name in ("loss", "margin", "logps_chosen"):
                close = pytest.approx(undisturbed[name], rel=5e-5, abs=5e-5)
                assert line[name] == close, (name, line["step"])


# ---- Plans and rehearsals ------------------------------------------------------------------------


def plan_of(model: Path, parts: int, *flags: str) -> Any:
    words = [
        *("--model.name_or_path", str(model), "--model.init", "random"),
        *("--sharding.context_parallel", str(parts), "--sharding.param_dtype", "float32"),
        *("--data.train_files", "rows.jsonl", "--data.sequence_length", "512"),
        *("--train.per_device_train_batch_size", "2", "--train.max_steps", "3", *flags),
    ]
    device = device_of("h100")
    return make_plan(parse(PreferConfig, words), 4, device, int(device.memory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "packing"),
    [
        ("sigmoid", "auto"),
        ("kto", "none"),
        *(
            pytest.param(name, packing, marks=pytest.mark.long)
            for name, packing in (("sigmoid", "none"), ("kto", "auto"), ("reward", "auto"))
        ),
    ],
)
def test_a_plan_has_the_activations_of_a_part(tmp_path, name, packing):
    """Four ranks that share each row have a quarter of the activations, and an exchange."""
    tiny_config("llama", max_position_embeddings=512).save_pretrained(tmp_path)
    flags = ("--preference.loss_type", name, "--data.packing", packing)
    whole, shared = plan_of(tmp_path, 1, *flags), plan_of(tmp_path, 4, *flags)
    activations = [p.sim.peaks["forward"].kinds["activations"] for p in (whole, shared)]
    assert 0.1 < activations[1] / activations[0] < 0.5, activations
    assert shared.estimate.tokens_per_step * 4 == whole.estimate.tokens_per_step
    kinds = {key[0] for work in shared.sim.work.values() for key in work.traffic}
    assert "all_to_all" in kinds
    if name == "sigmoid" and packing == "auto":
        device, memory = device_of("h100"), int(shared.estimate.memory)
        longest = [find_longest(p, device, memory, lambda _: None) for p in (whole, shared)]
        assert longest[0].batch < longest[1].batch


def test_automatic_batches_are_those_of_groups():
    """Two groups of four ranks read a global batch of 8, so that a group has at most 4 pairs."""
    words = ("--sharding.context_parallel", "4", "--train.global_batch_size", "8")
    words += ("--train.per_device_train_batch_size", "auto", "--data.train_files", "rows.jsonl")
    cfg = parse(PreferConfig, [*words, "--model.name_or_path", "model"])
    sizes = [
        (c.train.micro_batch, c.train.gradient_accumulation_steps)
        for c in list_candidates(cfg, 8)[0]
    ]
    assert sizes == [(4, 1), (2, 2), (1, 4)]


@pytest.mark.plans
@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_a_rehearsal_shares_rows_and_resumes_without(here: Path, tmp_path, loss_type: str):
    config = tmp_path / "config.yaml"
    file = "pairs.jsonl" if loss_type == "sigmoid" else "answers.jsonl"
    content = {
        "model": {"name_or_path": str(here / "model")},
        "data": {
            "train_files": str(here / file),
            "sequence_length": 256,
            "chat_template": str(TEMPLATE),
        },
        "preference": {"loss_type": loss_type},
        "sharding": {"context_parallel": 2, "dp_replicate": 1, "dp_shard": 4},
        "train": {"max_steps": 4, "per_device_train_batch_size": 2},
        "output_dir": str(tmp_path / "run"),
    }
    config.write_text(yaml.safe_dump(content))
    result = rehearse(config)
    assert result.ok, result
