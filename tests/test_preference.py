"""Preference objectives: against figures of TRL, and on several ranks against one process."""

import json
import sys
from functools import cache
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from conftest import ROOT, slow
from distributed import run_ranks
from sharded import apply_fsdp, assert_same_steps, init_mesh, sums_of_gradients
from torch.distributed.tensor import DTensor

from toolkit.config.preference import PreferenceConfig
from toolkit.config.settings import ShardingConfig
from toolkit.data.row_formats import ANSWERS, PAIRS
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import Sample, SampleShape
from toolkit.errors import TrainingError
from toolkit.mesh import View
from toolkit.models.attention import attend_within_documents
from toolkit.training.pair_losses import SORTED_LOSSES, PairLogps, RankPairs, pair_losses
from toolkit.training.preference import PreferenceLoss, sequence_logps
from toolkit.training.step import Update, evaluate

sys.path.append(str(ROOT / "benchmarks"))  # last: its files have plain names
from trl_figures import METRICS, OBJECTIVES, SHOWN, models, pairs

FIGURES = json.loads((ROOT / "tests/data/trl_figures.json").read_text())["figures"]


def settings(name: str) -> PreferenceConfig:
    return PreferenceConfig(**{"loss_type": name} | OBJECTIVES[name])


PAIRED = [name for name in OBJECTIVES if not name.startswith("kto")]
# They compare the pairs of a micro-batch of all ranks, so a second micro-batch changes them.
SORTED = [name for name in PAIRED if SORTED_LOSSES & {*settings(name).loss_types}]
LENGTH = 80


def piece_of(prompt: list[int], *answers: list[int]) -> Piece:
    ids = [token for answer in answers for token in (*prompt, *answer)]
    labels = [token for answer in answers for token in (*[IGNORED] * len(prompt), *answer)]
    return Piece(np.array(ids), np.array(labels), len(prompt) + len(answers[0]))


def samples(shape: SampleShape, numbers: list[int], reference: torch.Tensor | None) -> list[Sample]:
    """Return the pairs of these numbers as samples; packed, as many as fit into one."""
    found, pieces, rows = list[Sample](), list[Any](), list[int]()

    def end() -> None:
        sample = shape.sample(pieces)
        if reference is not None:
            sample["reference"] = reference[rows].reshape(-1)
        found.append(sample)
        pieces.clear()
        rows.clear()

    for number in numbers:
        pair = pairs()[number]
        piece = piece_of(pair["prompt"], pair["chosen"], pair["rejected"])
        taken = sum(len(p.ids) for p in (*pieces, piece))
        if pieces and (shape.packing == "none" or taken > shape.sequence_length):
            end()
        pieces.append(piece)
        rows.append(number)
    end()
    return found


def batch_of(cfg: PreferenceConfig, packing: Any, numbers: list[int], reference: Any) -> Batch:
    options = {
        "borders": packing == "bfd",
        "row_format": PAIRS if cfg.paired else ANSWERS,
        "prompts": cfg.learns_prompts,
    }
    shape = SampleShape(packing, LENGTH, **options)
    return shape.batch(samples(shape, numbers, reference))


def reference_of(cfg: PreferenceConfig, reference: torch.nn.Module) -> torch.Tensor | None:
    if not cfg.needs_reference:
        return None
    with torch.no_grad():
        batch = batch_of(cfg, "none", [*range(len(pairs()))], None)
        return sequence_logps(reference, batch)[0][:-1].view(-1, 2)


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("name", PAIRED)
def test_an_objective_is_trls(name: str, packing: str) -> None:
    cfg, (model, reference) = settings(name), models()
    attend_within_documents(model)
    batch = batch_of(cfg, packing, [*range(len(pairs()))], reference_of(cfg, reference))
    loss = PreferenceLoss(cfg, View(0, 1))(model, batch)
    total = (loss.total / loss.count).sum()
    total.backward()
    wanted = FIGURES[name]
    assert float(total) == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-5)
    for metric in METRICS:
        found = float(loss.parts[metric] / loss.count[0])
        assert found == pytest.approx(wanted[metric], rel=1e-5, abs=1e-5), metric
    assert_gradients(model, wanted)


def assert_gradients(model: Any, wanted: dict[str, Any]) -> None:
    for parameter in SHOWN:
        grad = model.get_parameter(parameter).grad.double()
        total, squares = wanted["gradients"][parameter]
        # The sum over the rows of a head is zero but for rounding, which grows with the gradient.
        noise = max(1e-5, 2e-6 * squares**0.5)
        assert float(grad.sum()) == pytest.approx(total, rel=1e-4, abs=noise)
        assert float(grad.square().sum()) == pytest.approx(squares, rel=2e-5)


def answers_of(
    cfg: PreferenceConfig, packing: Any, values: torch.Tensor | None, numbers: Any = None
) -> Batch:
    """Return answers (all) as single ones, each beside that of the next or last row."""
    rows = [(p["prompt"], p[side]) for p in pairs() for side in ("chosen", "rejected")]
    shape = SampleShape(packing, 2 * LENGTH, borders=packing == "bfd", row_format=ANSWERS)
    samples = []
    for at in range(len(rows)) if numbers is None else numbers:
        prompt, answer = rows[at]
        sample = shape.sample([piece_of(prompt, answer, rows[at ^ 1][1])]) | {
            "desirable": torch.tensor([at % 2 == 0])
        }
        if values is not None:
            sample["reference"] = values[at]
        samples.append(sample)
    return shape.batch(samples)


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("name", ["kto", "kto_turned"])
def test_kto_is_trls(name: str, packing: str) -> None:
    cfg, (model, reference) = settings(name), models(turned=name == "kto_turned")
    for one in (model, reference):
        attend_within_documents(one)
    with torch.no_grad():
        values = sequence_logps(reference, answers_of(cfg, packing, None))[0][:-1].view(-1, 2)
    loss = PreferenceLoss(cfg, View(0, 1))(model, answers_of(cfg, packing, values))
    total = (loss.total / loss.count).sum()
    total.backward()
    wanted = FIGURES[name]
    assert float(total) == pytest.approx(wanted["loss"], rel=1e-5)
    counts = loss.all_part_counts()
    for metric in (*METRICS, "kl"):
        if metric != "accuracy":  # TRL has none of KTO
            found = float((loss.parts[metric] / counts[metric]).sum())
            assert found == pytest.approx(wanted[metric], rel=1e-5, abs=1e-5), metric
    assert_gradients(model, wanted)


# ---- Several ranks -------------------------------------------------------------------------------

SPLITS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2, 3, 4], [5]], 3: [[0, 4], [1, 2, 3], [5]]}
"""Ranks -> pairs of each."""


def of_ranks(rank: int, world: int, packing: str, lora: bool) -> dict[str, Any]:
    """Return objective -> loss and summed gradients of a global batch, over two micro-batches."""
    found: dict[str, Any] = {}
    for name in [name for name in PAIRED if name not in SORTED]:
        cfg, (model, reference) = settings(name), models()
        attend_within_documents(model)
        values = reference_of(cfg, reference)
        tuned = adapted(model) if lora else model
        mesh = init_mesh("cpu", world, ShardingConfig(param_dtype="float32"))
        sharded = apply_fsdp(tuned, mesh, ShardingConfig(param_dtype="float32"))
        mine = SPLITS[world][rank]
        halves = [mine[: len(mine) // 2], mine[len(mine) // 2 :]]
        batches = [
            batch_of(cfg, packing, half, values) if half else empty(cfg, packing, values)
            for half in halves
        ]
        objective = PreferenceLoss(cfg, mesh.loss)
        update = Update(sharded, batches, [objective.counts(batch) for batch in batches])
        for batch in update:
            update.mean(objective(tuned, batch)).backward()
        sums = sums_of_gradients(tuned)
        stats = update.step(torch.optim.SGD(tuned.parameters(), lr=0.0), max_grad_norm=0.0)
        found[name] = float(stats.loss), sums
    return found


def adapted(model: Any, **settings: Any) -> Any:
    """Put adapters on a model that change what it answers."""
    torch.manual_seed(5)
    own = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **settings)
    tuned = peft.get_peft_model(model, own)
    for n, p in tuned.named_parameters():
        if p.requires_grad and "lora_A" not in n:
            torch.nn.init.normal_(p, std=0.1)
    return tuned


def empty(cfg: PreferenceConfig, packing: Any, values: Any) -> Batch:
    """Return a micro-batch without a pair, as a rank has where others have more."""
    options = {
        "borders": packing == "bfd",
        "row_format": PAIRS if cfg.paired else ANSWERS,
        "prompts": cfg.learns_prompts,
    }
    shape = SampleShape(packing, LENGTH, **options)
    sample = shape.sample([])
    if values is not None:
        sample["reference"] = values[:0].reshape(-1)
    return shape.batch([sample])


@cache
def run_alone(packing: str, lora: bool) -> dict[str, Any]:
    """Train in one process; return what `of_ranks` found."""
    return run_ranks(of_ranks, 1, packing, lora)[0]


@pytest.mark.parametrize("lora", [slow(False), True], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [slow("none"), "bfd"])
@pytest.mark.parametrize("world", [2, slow(3)])
def test_unequal_ranks_are_one_process(world: int, packing: str, lora: bool) -> None:
    for found in run_ranks(of_ranks, world, packing, lora):
        assert_same_steps(found, run_alone(packing, lora))


def test_one_process_on_ranks_is_trls() -> None:
    for name in [name for name in PAIRED if name not in SORTED]:
        assert run_alone("none", False)[name][0] == pytest.approx(FIGURES[name]["loss"], rel=1e-5)
        assert run_alone("bfd", False)[name][0] == pytest.approx(FIGURES[name]["loss"], rel=1e-5)


def kto_of_ranks(rank: int, world: int, packing: str) -> tuple[float, dict[str, Any]]:
    """Return loss and means of an update whose answers the ranks share unequally."""
    cfg, (model, reference) = settings("kto"), models()
    attend_within_documents(model)
    with torch.no_grad():
        whole = answers_of(cfg, packing, None)
        values = sequence_logps(reference, whole)[0][:-1].view(-1, 2)
    mesh = init_mesh("cpu", world, ShardingConfig(param_dtype="float32"))
    sharded = apply_fsdp(model, mesh, ShardingConfig(param_dtype="float32"))
    mine = {1: [range(12)], 2: [range(9), range(9, 12)], 3: [range(1), range(1, 4), range(4, 12)]}
    batch = answers_of(cfg, packing, values, mine[world][rank])
    objective = PreferenceLoss(cfg, mesh.loss)
    update = Update(sharded, [batch], [objective.counts(batch)])
    for own in update:
        update.mean(objective(model, own)).backward()
    stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
    means = evaluate(sharded, {"": [batch]}, objective)[0].parts
    shown = {name: float(value) for name, value in means.items()}
    return float(stats.loss), shown | {"grad_norm": float(stats.grad_norm)}


@pytest.mark.parametrize("packing", [slow("none"), "bfd"])
@pytest.mark.parametrize("world", [1, 2, slow(3)])
def test_kto_compares_with_the_answers_of_all_ranks(world: int, packing: str) -> None:
    wanted = FIGURES["kto"]
    for loss, means in run_ranks(kto_of_ranks, world, packing):
        assert loss == pytest.approx(wanted["loss"], rel=1e-5)
        assert means["kl"] == pytest.approx(wanted["kl"], rel=1e-5)
        for name, value in run_ranks(kto_of_ranks, 1, packing)[0][1].items():
            assert means[name] == pytest.approx(value, rel=2e-5), name


def sorted_of_ranks(rank: int, world: int, packing: str) -> dict[str, Any]:
    """Return objective -> loss and summed gradients of one micro-batch, shared by the ranks."""
    found: dict[str, Any] = {}
    for name in SORTED:
        cfg, (model, reference) = settings(name), models()
        attend_within_documents(model)
        values = reference_of(cfg, reference)
        mesh = init_mesh("cpu", world, ShardingConfig(param_dtype="float32"))
        sharded = apply_fsdp(model, mesh, ShardingConfig(param_dtype="float32"))
        shares = SPLITS | {4: [[4], [], [0, 3, 1, 5], [2]]}
        mine = shares[world][rank]
        batch = batch_of(cfg, packing, mine, values) if mine else empty(cfg, packing, values)
        objective = PreferenceLoss(cfg, mesh.loss, max_pairs=7)
        update = Update(sharded, [batch], [objective.counts(batch)])
        for own in update:
            update.mean(objective(model, own)).backward()
        sums = sums_of_gradients(model)
        stats = update.step(torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=0.0)
        found[name] = float(stats.loss), sums
    return found


@pytest.mark.parametrize("world", [2, slow(4)])
@pytest.mark.parametrize("packing", [slow("none"), "bfd"])
def test_pairs_are_sorted_over_all_ranks(world: int, packing: str) -> None:
    one = run_ranks(sorted_of_ranks, 1, packing)[0]
    assert one.keys() == {"aot", "aot_unpaired", "mpo_sorted"}
    for name, (loss, _) in one.items():
        assert loss == pytest.approx(FIGURES[name]["loss"], rel=1e-5)
    for found in run_ranks(sorted_of_ranks, world, packing):
        assert_same_steps(found, one)


def test_more_pairs_than_places_are_refused() -> None:
    values = torch.zeros(3, dtype=torch.float64)
    sides = PairLogps(values, values, values, values)
    pairs = RankPairs(sides, sides, View(0, 2), max_pairs=2)
    with pytest.raises(TrainingError, match="at most 2 pairs in a micro-batch, got 3"):
        pair_losses(settings("aot"), pairs)


def with_adapters_off(rank: int, world: int, copied: list[str]) -> list[tuple[float, Any]]:
    """Return loss and gradients by reference values that were asked before, and by the base."""
    cfg, found = settings("sigmoid"), []
    for known in (True, False):
        model, _ = models()
        attend_within_documents(model)
        values = reference_of(cfg, model)
        tuned = adapted(model, modules_to_save=copied)
        mesh = init_mesh("cpu", world, ShardingConfig(param_dtype="float32"))
        sharded = apply_fsdp(tuned, mesh, ShardingConfig(param_dtype="float32"))
        numbers = SPLITS[world][rank]
        batches = [batch_of(cfg, "bfd", numbers, values if known else None) for _ in range(2)]
        objective = PreferenceLoss(cfg, mesh.loss)
        update = Update(sharded, batches, [objective.counts(batch) for batch in batches])
        for batch in update:
            update.mean(objective(tuned, batch)).backward()
        trained = [(n, p) for n, p in tuned.named_parameters() if p.requires_grad]
        grads = {n: cast(DTensor, p.grad).full_tensor().clone() for n, p in trained}
        stats = update.step(torch.optim.SGD(tuned.parameters(), lr=0.0), max_grad_norm=0.0)
        found.append((float(stats.loss), grads))
    return found


@pytest.mark.parametrize("copied", [[], ["lm_head"]], ids=["adapters", "head"])
def test_adapters_turned_off_are_the_reference(copied: list[str]) -> None:
    for (loss, grads), (other, others) in run_ranks(with_adapters_off, 2, copied):
        assert other == pytest.approx(loss, rel=1e-6)
        assert loss != pytest.approx(np.log(2), abs=1e-3)  # adapters change what is answered
        assert grads.keys() == others.keys()
        assert any("lm_head" in name for name in grads) == bool(copied)
        for name, grad in grads.items():
            torch.testing.assert_close(others[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_the_first_step_of_dpo_is_log_2_and_swapped_sides_lose() -> None:
    cfg, (model, _) = settings("sigmoid"), models()
    values = reference_of(cfg, model)
    found = PreferenceLoss(cfg, View(0, 1))(model, batch_of(cfg, "none", [0, 1, 2], values))
    assert float((found.total / found.count).sum()) == pytest.approx(np.log(2), abs=1e-6)
    assert float(found.parts["margin"]) == pytest.approx(0.0, abs=1e-5)
    assert values is not None
    higher = torch.cat([values[:, :1] - 1.0, values[:, 1:]], 1)  # chosen answers are likelier now
    for own, accuracy in ((higher, 1.0), (higher.flip(1), 0.0)):
        shown = own if accuracy else torch.cat([values[:, :1] + 1.0, values[:, 1:]], 1)
        found = PreferenceLoss(cfg, View(0, 1))(model, batch_of(cfg, "none", [0, 1, 2], shown))
        assert float(found.parts["accuracy"] / found.count[0]) == accuracy
