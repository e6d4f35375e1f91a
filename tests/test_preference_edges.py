"""Preference objectives at the edges: sure and hopeless answers, waits, costs, metrics."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import test_reward
import torch
import torch.nn.functional as F
from conftest import save_tiny_model, slow
from sharded import alone, sharded_of
from test_preference import OBJECTIVES, answers_of, batch_of, piece_of, reference_of, settings
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from trl_figures import models, pairs, reward_model

from toolkit.checkpoint.saving import steps_to_delete
from toolkit.config import CheckpointConfig, parse
from toolkit.config.measures import TOKEN_METRICS, is_greater_better, preference_metrics
from toolkit.config.preference import PreferConfig, PreferenceConfig
from toolkit.config.settings import FinetuneDataConfig, FinetuneModelConfig, FinetuneTrainConfig
from toolkit.data.prepare import _check_evaluations
from toolkit.data.row_formats import ANSWERS
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import ConfigError, TrainingError
from toolkit.formats.metrics_file import read_metrics
from toolkit.mesh import View
from toolkit.models.attention import attend_within_documents
from toolkit.objectives import preference as objectives
from toolkit.planning.simulation import simulate
from toolkit.training import loss_kernel, preference
from toolkit.training.early_stopping import build_early_stopping
from toolkit.training.metrics import Metrics, evaluate_metrics
from toolkit.training.pair_losses import _sorted_loss, log_odds
from toolkit.training.preference import PreferenceLoss, sequence_logps
from toolkit.training.step import StepStats, Update

# ---- Values and gradients ------------------------------------------------------------------------

# Mean log-probabilities of an answer's tokens: from hopeless to sure.
GRID = [-1e4, -300.0, -20.0, -3.0, -0.7, -0.1, -1e-3, -6e-8, -3e-8, -1e-12, -1e-30, -1e-38]
REFERENCES = [-1e4, -1.0, -1e-3]  # mean log-probabilities by the reference
TOKENS = 7  # of an answer
CASES = {name: settings(name) for name in OBJECTIVES} | {
    "sigmoid_smoothed": PreferenceConfig(loss_type="sigmoid", label_smoothing=0.2),
    "orpo_strong": PreferenceConfig(loss_type="orpo", beta=10.0),
}


def exact_losses(
    cfg: PreferenceConfig, sums: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """Return the losses of pairs (or of KTO's answers, the first half wanted) in float64, written
    down from the formulas alone; `sums`, `reference` [pairs, 2].
    """

    def lose(x: torch.Tensor) -> torch.Tensor:  # -log sigmoid
        return torch.logaddexp(torch.zeros_like(x), -x)

    beta, e = cfg.beta, cfg.label_smoothing
    r = sums - reference
    d, means = r[:, 0] - r[:, 1], sums / TOKENS
    per_token = (r[:, 0] - r[:, 1]) / TOKENS
    if isinstance(cfg.loss_type, list):
        parts = [kind for kind in cfg.loss_type if kind != "sft"]
        one_by_one = [
            exact_losses(
                replace(cfg, loss_type=kind, loss_weights=None, **unused(kind)), sums, reference
            )
            for kind in parts
        ]
        weights = dict(
            zip(cfg.loss_type, cfg.loss_weights or [1.0] * len(cfg.loss_type), strict=True)
        )
        total = sum(weights[kind] * x for kind, x in zip(parts, one_by_one, strict=True))
        return total - weights.get("sft", 0.0) * sums[:, 0] / TOKENS
    kind = cfg.loss_type
    if kind == "apo_down":
        return torch.sigmoid(beta * r[:, 0]) + torch.sigmoid(-beta * d)
    if kind == "bco_pair":
        return lose(beta * r[:, 0]) + lose(-beta * r[:, 1])
    if kind == "nca_pair":
        x = beta * r
        return lose(x[:, 0]) + lose(-x[:, 0]) / 2 + lose(-x[:, 1]) / 2
    if kind == "exo_pair":
        x = beta * d
        chosen = torch.sigmoid(x) * (-lose(x) - math.log(1 - e))
        return chosen + torch.sigmoid(-x) * (-lose(-x) - math.log(e))
    if kind == "sppo_hard":
        return (r[:, 0] - 0.5 / beta) ** 2 + (r[:, 1] + 0.5 / beta) ** 2
    if kind == "discopop":
        x = beta * d
        blend = torch.sigmoid(-x / cfg.discopop_tau) * lose(x)
        # exp(-x) s(x / tau) = 1 / (exp(x) + exp(x - x / tau)), whose parts do not overflow together
        return blend + torch.exp(-torch.logaddexp(x, x - x / cfg.discopop_tau))
    if kind in ("aot", "aot_unpaired"):
        first, second = r[:, 0], r[:, 1]
        if kind == "aot":
            first, second = sums[:, 0] - sums[:, 1], reference[:, 0] - reference[:, 1]
        x = beta * (first.sort().values - second.sort().values)
        return (1 - e) * lose(x) + e * lose(-x)
    if kind in ("sigmoid", "sigmoid_norm"):
        x = beta * (d if kind == "sigmoid" else per_token)
        return (1 - e) * lose(x) + e * lose(-x) - cfg.rpo_alpha * sums[:, 0] / TOKENS
    if kind == "robust":
        return ((1 - e) * lose(beta * d) - e * lose(-beta * d)) / (1 - 2 * e)
    if kind == "hinge":
        return (1 - beta * d).clamp(min=0)
    if kind == "ipo":
        return (per_token - 1 / (2 * beta)) ** 2
    if kind == "apo_zero":
        return torch.sigmoid(-beta * r[:, 0]) + torch.sigmoid(beta * r[:, 1])
    if kind == "simpo":
        x = beta * (means[:, 0] - means[:, 1]) - cfg.simpo_gamma
        return (1 - e) * lose(x) + e * lose(-x)
    if kind == "orpo":
        # log(p / (1 - p)) = -log(expm1(-log p)); of large -log p itself.
        near = means.clamp(min=-500.0)
        odds = torch.where(means < -500.0, means, -torch.log(torch.expm1(-near)))
        return beta * lose(odds[:, 0] - odds[:, 1]) - sums[:, 0] / TOKENS
    raise AssertionError(kind)


def unused(kind: str) -> dict[str, float]:
    """Return the settings of lists of these tests that an objective alone would refuse."""
    smooths = kind in ("sigmoid", "aot_unpaired", "exo_pair")
    return {} if smooths else {"label_smoothing": 0.0}


@pytest.fixture
def given_logps(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], None]:
    """Let sequences have the log-probabilities that a test sets."""

    def use(sums: torch.Tensor) -> None:
        counts = torch.full((len(sums) + 1,), TOKENS)

        def logps(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return F.pad(sums, (0, 1)), counts

        monkeypatch.setattr(preference, "sequence_logps", logps)

    return use


def bare_batch(count: int, **columns: torch.Tensor) -> Batch:
    """Return a batch of `count` pairs of `TOKENS` tokens a side, as far as a loss reads it."""
    sequences = torch.arange(2 * count).repeat_interleave(TOKENS)[None]
    targets = torch.ones_like(sequences)
    return Batch({}, targets, sequences=sequences, n_sequences=2 * count, columns=columns)


@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("kto")])
def test_values_and_gradients_are_exact_and_finite(name: str, given_logps: Any) -> None:
    cfg = CASES[name]
    means = torch.tensor([(c, w) for c in GRID for w in GRID])
    for of_reference in REFERENCES if cfg.needs_reference else REFERENCES[:1]:
        sums = (means * TOKENS).flatten().requires_grad_()
        reference = torch.full_like(sums, of_reference * TOKENS)
        given_logps(sums)
        loss = PreferenceLoss(cfg, View(0, 1))(
            nn.Identity(), bare_batch(len(means), reference=reference)
        )
        total = (loss.total / loss.count).sum()
        (grad,) = torch.autograd.grad(total, sums)
        wide = sums.detach().double().requires_grad_()
        losses = exact_losses(cfg, wide.view(-1, 2), reference.double().view(-1, 2))
        (expected,) = torch.autograd.grad(losses.mean(), wide)
        assert float(total) == pytest.approx(float(losses.mean()), rel=2e-6)
        assert torch.isfinite(grad).all()
        # Both parts of apo_down cancel for a rejected answer that is as likely as before.
        atol = 1e-18 if name == "apo_down" else 1e-30
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
    ("cfg", "flags", "setting"),
    [
        (PreferenceConfig(reference="other"), {}, "preference.reference"),
        (PreferenceConfig(loss_type="kto", reference="other"), {}, "preference.reference"),
        (PreferenceConfig(), {"continues_adapter": True}, "lora.from"),
        (PreferenceConfig(), {}, ""),
    ],
)
def test_the_base_does_not_replace_another_reference(
    cfg: PreferenceConfig,
    flags: dict[str, bool],
    setting: str,
    given_logps: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_logps(torch.full((4,), -1.0).requires_grad_())
    monkeypatch.setattr(preference, "base_model_logps", lambda *_, **__: torch.zeros(4))
    loss = PreferenceLoss(cfg, View(0, 1), **flags)
    if not setting:
        assert loss(nn.Identity(), bare_batch(4)).total.isfinite().all()
        return
    with pytest.raises(TrainingError, match=f"with {setting}, the base model is not the reference"):
        loss(nn.Identity(), bare_batch(4))


@pytest.mark.parametrize(
    ("packing", "world", "max_pairs", "warns"),
    [("none", 1, 1, True), ("none", 2, 1, False), ("bfd", 1, 16, False)],
)
def test_sorted_losses_read_the_packing_that_was_decided(
    packing: str, world: int, max_pairs: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = PreferConfig(
        model=FinetuneModelConfig(name_or_path="model"),
        data=FinetuneDataConfig(packing="auto", sequence_length=64),
        train=FinetuneTrainConfig(per_device_train_batch_size=1),
        preference=PreferenceConfig(loss_type="aot"),
    )
    data: Any = SimpleNamespace(feed=SimpleNamespace(shape=SimpleNamespace(packing=packing)))
    reference = SimpleNamespace(data=data, complete=lambda _: "reference", files={})
    monkeypatch.setattr(objectives, "Reference", lambda *_: reference)
    lines: list[str] = []
    monkeypatch.setattr(objectives.ranks, "log_once", lambda *given: lines.extend(given))
    objective = objectives.PreferenceTuning(cfg, alone(View(0, world)))
    objective.restore(nn.Identity(), data, None, None)
    assert objective.prepare(sharded_of(nn.Identity())) == "reference"
    assert objective.loss.max_pairs == max_pairs
    assert any("which has one pair here" in line for line in lines) == warns


@dataclass(frozen=True)
class OneOfTwo:
    """A view of one of two ranks whose all-reduce adds the numbers of the other one."""

    rank: int
    others: torch.Tensor  # both numbers of each pair, [2, pairs]
    size: int = 2

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        places = tensor[:, 1 - self.rank, : self.others.shape[1]]
        places += F.pad(self.others, (0, 0, 0, 1), value=1.0)
        return tensor


def sorted_share(
    rank: int, numbers: list[torch.Tensor], cfg: PreferenceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of one of two ranks of a loss that sorts, and its gradient."""
    local = numbers[rank].clone().requires_grad_()
    among: Any = OneOfTwo(rank, numbers[1 - rank])
    pairs: Any = SimpleNamespace(among=among, max_pairs=4)
    share = _sorted_loss(cfg, local[0], local[1], pairs)
    return share, torch.autograd.grad(share, local)[0]


def test_a_pair_that_is_not_finite_is_the_fault_of_its_rank() -> None:
    cfg = PreferenceConfig(loss_type="aot_unpaired", beta=1.0)
    numbers = [
        torch.tensor([[1.0, -2.0, 0.5], [0.3, 2.0, -1.0]], dtype=torch.float64),
        torch.tensor([[4.0, -3.0], [1.0, 0.0]], dtype=torch.float64),
    ]
    together = torch.cat(numbers, 1).requires_grad_()
    expected = exact_losses(cfg, together.T, torch.zeros_like(together.T)).sum()
    shares, gradients = zip(*(sorted_share(rank, numbers, cfg) for rank in (0, 1)), strict=True)
    assert float(sum(shares)) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(
        torch.cat(gradients, 1), torch.autograd.grad(expected, together)[0], rtol=1e-12, atol=0
    )
    for row, value in ((0, math.nan), (1, math.nan), (0, -math.inf), (0, math.inf)):
        broken = [numbers[0], numbers[1].clone()]
        broken[1][row, 0] = value
        assert sorted_share(0, broken, cfg)[0].isfinite()
        assert not sorted_share(1, broken, cfg)[0].isfinite()


class SortCalls(TorchFunctionMode):
    """Record whether each sort is stable."""

    def __init__(self) -> None:
        super().__init__()
        self.stable: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sort:
            self.stable.append((kwargs or {}).get("stable", False))
        return func(*args, **(kwargs or {}))


def test_equal_numbers_keep_the_order_of_pairs() -> None:
    """On CPUs every sort does."""
    cfg = PreferenceConfig(loss_type="aot_unpaired")
    numbers = [torch.zeros(2, 3, dtype=torch.float64)] * 2
    with SortCalls() as calls:
        sorted_share(0, numbers, cfg)
        alone_pairs: Any = SimpleNamespace(among=View(0, 1))
        _sorted_loss(cfg, *numbers[0], alone_pairs)
    assert calls.stable == [True] * 4


def test_orpo_of_answers_that_are_certain_is_finite(given_logps: Any) -> None:
    means = torch.tensor([(c, w) for c in (0.0, -1e-45, -1.0) for w in (0.0, -1e-45, -1.0)])
    for beta in (0.1, 1e3):
        sums = (means * TOKENS).flatten().requires_grad_()
        given_logps(sums)
        cfg = PreferenceConfig(loss_type="orpo", beta=beta)
        loss = PreferenceLoss(cfg, View(0, 1))(nn.Identity(), bare_batch(len(means)))
        (grad,) = torch.autograd.grad((loss.total / loss.count).sum(), sums)
        assert torch.isfinite(loss.total).all()
        assert torch.isfinite(grad).all()
        assert all(torch.isfinite(value).all() for value in loss.parts.values())


def test_log_odds_are_exact_over_all_magnitudes() -> None:
    logps = -torch.logspace(-38, 4, 200, dtype=torch.float64).float()
    wide = logps.double()
    # log(p / (1 - p)) = -log(1/p - 1) = -log(expm1(-log p)), and of large -log p itself.
    expected = torch.where(wide < -700, wide, -torch.log(torch.expm1(-wide.clamp(min=-700))))
    torch.testing.assert_close(log_odds(logps), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["kto", "kto_turned"])
def test_kto_is_exact_and_finite(name: str, given_logps: Any) -> None:
    cfg = CASES[name]
    for of_reference in REFERENCES:
        means = torch.tensor([(own, other) for own in GRID for other in GRID])
        sums = (means * TOKENS).flatten().requires_grad_()
        labels = torch.arange(len(means)) % 3 > 0
        reference = torch.full_like(sums, of_reference * TOKENS)
        given_logps(sums)
        batch = bare_batch(len(means), reference=reference, desirable=labels)
        loss = PreferenceLoss(cfg, View(0, 1))(nn.Identity(), batch)
        (grad,) = torch.autograd.grad((loss.total / loss.count).sum(), sums)
        wide = sums.detach().double().requires_grad_()
        own, other = (wide - reference.double()).view(-1, 2).unbind(1)
        point = other.detach().mean().clamp(min=0)
        x = cfg.beta * torch.where(labels, own - point, point - own)
        weights = torch.where(labels, cfg.desirable_weight, cfg.undesirable_weight)
        losses = weights * torch.sigmoid(-x)
        (expected,) = torch.autograd.grad(losses.mean(), wide)
        total = (loss.total / loss.count).sum()
        assert float(total) == pytest.approx(float(losses.mean()), rel=2e-6)
        assert torch.isfinite(grad).all()
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("coefficient", [0.0, 0.05])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4, 1e15])
def test_rewards_of_any_size_are_finite(
    monkeypatch: pytest.MonkeyPatch, size: float, coefficient: float
) -> None:
    scores = (torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.0, 0.0]) * size).requires_grad_()
    monkeypatch.setattr(preference, "sequence_rewards", lambda *_: scores)
    cfg = PreferenceConfig(loss_type="reward", center_rewards_coefficient=coefficient)
    loss = PreferenceLoss(cfg, View(0, 1))(nn.Identity(), bare_batch(4))
    (grad,) = torch.autograd.grad(loss.total.sum(), scores)
    chosen, rejected = scores.detach().double().view(-1, 2).unbind(1)
    expected = F.softplus(rejected - chosen) + coefficient * (chosen + rejected) ** 2
    assert float(loss.total.sum()) == pytest.approx(float(expected.sum()), rel=1e-5)
    assert torch.isfinite(grad).all()


def test_rewards_whose_square_overflows_have_a_loss_without_centring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = torch.tensor([1e30, 1e30], requires_grad=True)
    monkeypatch.setattr(preference, "sequence_rewards", lambda *_: scores)
    loss = PreferenceLoss(PreferenceConfig(loss_type="reward"), View(0, 1))(
        nn.Identity(), bare_batch(1)
    )
    assert float(loss.total) == pytest.approx(math.log(2))


# ---- Waits for the device ------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts operations for which a host waits on a GPU: values that it reads, results whose size
    depends on values, and tensors that are made of Python numbers, which a device copies from
    memory that is not page-locked.
    """

    KINDS = (
        "_local_scalar_dense",
        "nonzero.",  # of a known size (`nonzero_static`) it does not wait
        "lift_fresh",
        "masked_select",
        "unique",
        "is_nonzero",
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = str(function)
        indices = args[1] if name.startswith("aten.index.") else ()
        by_mask = any(i is not None and i.dtype == torch.bool for i in indices)
        if by_mask or any(kind in name for kind in self.KINDS):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def micro_batch(name: str, packing: Any) -> tuple[Any, PreferenceLoss, Batch]:
    """Return a model, its objective, and a micro-batch with reference values."""
    if name == "reward":
        model, cfg = reward_model(), test_reward.settings("reward_centred")
        attend_within_documents(model)
        return (
            model,
            PreferenceLoss(cfg, View(0, 1)),
            test_reward.batch_of("reward", packing, [*range(6)]),
        )
    cfg, (model, reference) = settings(name), models()
    for one in (model, reference):
        attend_within_documents(one)
    if not cfg.paired:
        with torch.no_grad():
            values = sequence_logps(reference, answers_of(cfg, packing, None))[0][:-1].view(-1, 2)
        return model, PreferenceLoss(cfg, View(0, 1)), answers_of(cfg, packing, values)
    values = reference_of(cfg, reference)
    return model, PreferenceLoss(cfg, View(0, 1)), batch_of(cfg, packing, [*range(6)], values)


@pytest.mark.parametrize(
    "name",
    [
        *("sigmoid", "sigmoid_norm", "ipo", "simpo", "orpo", "kto", "reward"),
        *("exo_pair", "discopop", "aot", "mpo"),
    ],
)
def test_no_host_waits_inside_a_micro_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # not worth its time
    loss_kernel._compiled_kernel.cache_clear()
    model, objective, batch = micro_batch(name, "bfd")
    model.config.use_cache = False  # as of every model of a run
    objective = replace(objective, device_type="cuda")  # the head's way on a GPU
    objective(model, batch)  # the first call tries the model
    with Waits() as waits:
        objective.counts(batch)
        loss = objective(model, batch)
        (loss.total / loss.count).sum().backward()
        loss.all_part_counts()
    assert waits.calls == []


def test_the_counter_of_waits_sees_them() -> None:
    values = torch.ones(3)
    for call in (
        lambda: values.new_tensor(3),
        lambda: torch.tensor(3),
        lambda: values.sum().item(),
        lambda: values[values > 0],
        lambda: values.nonzero(),
        lambda: bool((values > 0).all()),
    ):
        with Waits() as waits:
            call()
        assert len(waits.calls) == 1


# ---- What KTO costs ------------------------------------------------------------------------------


def flops(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_answers_that_kto_compares_with_cost_a_forward(packing: str) -> None:
    cfg, (model, _) = settings("kto"), models()
    attend_within_documents(model)
    shape = SampleShape(packing, 256, borders=packing == "bfd", row_format=ANSWERS)
    drawn = torch.Generator().manual_seed(0)
    # Answers of one length, as many as fit into a row, so that padding is no part of the ratio.
    rows = torch.randint(1, 60, (8, 5 + 27), generator=drawn).tolist()
    pieces = [piece_of(row[:5], row[5:], other[5:]) for row, other in pairwise([*rows, rows[0]])]
    each = 4 if packing == "bfd" else 1
    samples = [
        shape.sample(pieces[at : at + each])
        | {"desirable": torch.ones(each, dtype=torch.bool), "reference": torch.zeros(2 * each)}
        for at in range(0, len(pieces), each)
    ]
    batch, objective = shape.batch(samples), PreferenceLoss(cfg, View(0, 1))

    def step(of: Batch) -> None:
        objective(model, of).total.sum().backward()

    step(batch)  # the first call tries the model
    forward = flops(lambda: sequence_logps(model, batch))
    both = flops(lambda: sequence_logps(model, batch)[0].sum().backward())
    found = flops(lambda: step(batch))
    assert found / both == pytest.approx(4 / 6, rel=0.03)
    # The control: answers that are not apart get a gradient all the same.
    assert flops(lambda: step(replace(batch, halves=None))) == pytest.approx(
        both + forward, rel=0.03
    )


def test_answers_that_were_not_split_have_the_same_loss() -> None:
    for packing in ("none", "bfd"):
        model, objective, batch = micro_batch("kto", packing)
        split, whole = objective(model, batch), objective(model, replace(batch, halves=None))
        torch.testing.assert_close(split.total, whole.total)
        assert split.parts.keys() == whole.parts.keys()
        for name, value in split.parts.items():
            torch.testing.assert_close(value, whole.parts[name])


def test_a_step_of_kto_counts_the_answers_that_are_trained() -> None:
    sums = {}
    for kind in ("kto", "sigmoid"):
        model, objective, batch = micro_batch(kind, "bfd")
        sharded = sharded_of(model.train())
        shapes: list[torch.Size] = []
        with mock.patch.object(
            sharded.accumulation, "begin", lambda targets, *_, to=shapes: to.append(targets.shape)
        ):
            update = Update(sharded, [batch, batch], [objective.counts(batch)] * 2)
            for one in update:
                update.mean(objective(model, one)).backward()
        stats = update.step(torch.optim.SGD(model.parameters(), 0.1))
        trained = batch.trained
        assert shapes == [trained.targets.shape] * 2
        assert int(stats.tokens) == 2 * int(trained.count)
        assert stats.terms is not None
        assert int(stats.terms) == batch.n_sequences  # two micro-batches of half as many
        sums[kind] = int(batch.count) - int(trained.count)
    assert sums["kto"] > 0 == sums["sigmoid"]  # compared answers are no part of what is trained


def test_pairs_are_no_answers() -> None:
    cfg, (model, _) = settings("kto"), models()
    batch = batch_of(settings("sigmoid"), "none", [0, 1], torch.zeros(6, 2))
    with pytest.raises(TrainingError, match="needs answers with a label, not pairs"):
        PreferenceLoss(cfg, View(0, 1))(model, batch)


@pytest.mark.parametrize("device_type", ["cpu", slow("cuda")])
def test_a_plan_of_kto_has_compared_answers_apart(tmp_path: Path, device_type: str) -> None:
    save_tiny_model(tmp_path)
    flags = ["--model.name_or_path", str(tmp_path), "--data.sequence_length", "512"]

    def planned(kind: str) -> int:
        cfg = parse(PreferConfig, [*flags, "--data.packing=none", f"--preference.loss_type={kind}"])
        return simulate(cfg, 2, device_type=device_type).peak.nbytes

    # Both have two rows for each of the data, of which one alone has activations.
    assert 0 < planned("kto") < 0.8 * planned("sigmoid")


# ---- Settings and metrics ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("sigmoid", "simpo_gamma", 1.0),
        ("sigmoid", "desirable_weight", 2.0),
        ("simpo", "undesirable_weight", 2.0),
        ("reward", "beta", 0.5),
        ("reward", "simpo_gamma", 0.0),
        ("ipo", "label_smoothing", 0.1),
        ("kto", "rpo_alpha", 1.0),
        ("kto", "center_rewards_coefficient", 0.1),
        ("nca_pair", "label_smoothing", 0.1),
        ("sppo_hard", "discopop_tau", 0.1),
    ],
)
def test_a_setting_without_effect_is_refused(kind: Any, setting: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=f"preference.{setting} has no effect with loss_type {kind}, got {value}"
    ):
        PreferenceConfig(loss_type=kind, **{setting: value})
    default = PreferenceConfig()
    PreferenceConfig(loss_type=kind, **{setting: getattr(default, setting)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "exo_pair"}, "must be above 0, got 0"),
        ({"loss_type": "discopop", "discopop_tau": 1.5}, "must be at most 1"),
        ({"loss_type": "sft"}, "sft alone does not compare answers"),
        ({"loss_type": ["sft"]}, "sft alone does not compare answers"),
        ({"loss_type": []}, "got an empty list"),
        ({"loss_type": ["sigmoid", "kto"]}, "expected several of .*, got kto"),
        ({"loss_type": ["sigmoid", "orpo", "simpo"]}, "got orpo, simpo"),
        ({"loss_type": ["ipo", "ipo"]}, "lists an objective twice: ipo, ipo"),
        ({"loss_type": "ipo", "loss_weights": [2.0]}, "loss_weights needs a list"),
        ({"loss_type": ["ipo"], "loss_weights": [2.0]}, "loss_weights needs a list"),
        ({"loss_type": ["ipo", "aot"], "loss_weights": [1.0]}, "expected 2 weights"),
        ({"loss_type": ["ipo", "sft"], "rpo_alpha": 1.0}, "are the same cross entropy"),
        ({"loss_type": ["ipo", "hinge"], "label_smoothing": 0.1}, "no effect with .* ipo, hinge"),
    ],
)
def test_losses_that_cannot_be_added_up_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreferenceConfig(**given)


def test_a_list_of_one_loss_is_that_loss() -> None:
    alone = PreferenceConfig(loss_type="ipo")
    assert PreferenceConfig(loss_type=["ipo"]) == alone
    assert PreferenceConfig(loss_type=["ipo"], loss_weights=[1.0]) == alone


def test_kto_reports_rewards_by_label() -> None:
    model, objective, batch = micro_batch("kto", "none")
    loss = objective(model, batch)
    counts = loss.all_part_counts()
    means = {n: float((x / counts[n]).sum()) for n, x in loss.parts.items()}
    with torch.no_grad():
        sums = sequence_logps(model, batch)[0][:-1].view(-1, 2)
    rewards = objective.cfg.beta * (sums - batch.columns["reference"].view(-1, 2))[:, 0]
    for side, members in (
        ("chosen", batch.columns["desirable"]),
        ("rejected", ~batch.columns["desirable"]),
    ):
        assert means[f"reward_{side}"] == pytest.approx(float(rewards[members].mean()), rel=1e-5)
        assert means[f"logps_{side}"] == pytest.approx(float(sums[members, 0].mean()), rel=1e-5)
    assert means["margin"] == pytest.approx(means["reward_chosen"] - means["reward_rejected"])
    assert len(pairs()) == int(counts["reward_chosen"])


def kinds() -> Iterator[str]:
    yield from ("sigmoid", "ipo", "sigmoid_norm", "simpo", "orpo", "kto", "reward", "mpo", "aot")


@pytest.mark.parametrize("name", kinds())
def test_an_objective_gives_the_metrics_that_it_declares(name: str) -> None:
    model, objective, batch = micro_batch(name, "none")
    declared = {metric.name for metric in preference_metrics(objective.cfg.loss_type)}
    assert {"loss", *objective(model, batch).parts} == declared


def test_directions_are_declared_with_the_metrics() -> None:
    lower = {"loss", "reward_rejected", "logps_rejected", "kl"}
    for kind in ("sigmoid", "kto", "reward"):
        for metric in preference_metrics(kind):
            assert (metric.direction == "min") == (metric.name in lower)
            for name in (f"eval_{metric.name}", f"eval_e1_{metric.name}"):
                assert is_greater_better(name) == (metric.direction == "max")
                saving = CheckpointConfig(metric_for_best_model=name)
                assert saving.best_metric() == (name, metric.direction == "max")
    assert not is_greater_better("eval_some_loss")  # of a recipe of the user's own
    assert is_greater_better("eval_bleu")


@pytest.mark.parametrize(
    ("kind", "metric", "fits"),
    [
        ("sigmoid", "eval_perplexity", False),
        ("sigmoid", "eval_kl", False),
        ("sigmoid", "eval_margin", True),
        ("sigmoid", "eval_e1_margin", True),
        ("sigmoid", "e2_logps_chosen", True),
        ("sigmoid", "eval_e3_margin", False),
        ("reward", "eval_logps_chosen", False),
        ("reward", "eval_e2_reward_rejected", True),
        ("kto", "eval_kl", True),
        ("kto", "eval_logps", False),
    ],
)
@pytest.mark.parametrize("saving", [{}, {"keep_best": True}])
def test_a_metric_that_no_evaluation_gives_is_refused(
    kind: Any, metric: str, fits: bool, saving: dict[str, Any]
) -> None:
    cfg = PreferConfig(
        model=FinetuneModelConfig(name_or_path="model"),
        checkpoint=CheckpointConfig(metric_for_best_model=metric, **saving),
        preference=PreferenceConfig(loss_type=kind),
        train=FinetuneTrainConfig(eval_steps=500),
    )
    if fits:
        _check_evaluations(cfg, ["e1", "e2"], preference_metrics(kind))
        return
    with pytest.raises(
        ConfigError, match="expected a metric that an evaluation of this run has"
    ) as e:
        _check_evaluations(cfg, ["e1", "e2"], preference_metrics(kind))
    assert "eval_margin" in str(e.value)
    assert "eval_perplexity," not in str(e.value)


def test_the_best_of_a_metric_that_should_fall_is_the_smallest() -> None:
    cfg = CheckpointConfig(metric_for_best_model="eval_e1_reward_rejected", keep_best=1)
    verified = {step: {"eval_e1_reward_rejected": float(step)} for step in range(1, 6)}
    assert steps_to_delete(verified, cfg) == {2, 3}
    stopping = build_early_stopping(
        FinetuneTrainConfig(early_stopping_patience=2, eval_steps=500), cfg, {}
    )
    assert not stopping.greater_is_better


def test_the_loss_of_a_recipe_has_no_perplexity() -> None:
    """Unless the recipe says that it is a cross entropy of tokens."""
    model, objective, batch = micro_batch("simpo", "none")
    sharded, sources = sharded_of(model), {"": [batch]}
    assert "eval_perplexity" not in evaluate_metrics(sharded, sources, objective)
    declared = SimpleNamespace(metrics=TOKEN_METRICS, evaluation_loss=objective)
    assert "eval_perplexity" in evaluate_metrics(sharded, sources, declared)


def test_an_evaluation_without_a_label_has_no_mean_of_it() -> None:
    model, objective, batch = micro_batch("kto", "none")
    labels = torch.ones_like(batch.columns["desirable"])
    sharded = sharded_of(model)
    relabelled = replace(batch, columns={**batch.columns, "desirable": labels})
    found = evaluate_metrics(sharded, {"": [relabelled]}, objective)
    assert {"eval_loss", "eval_reward_chosen", "eval_kl", "eval_accuracy"} <= found.keys()
    assert not {"eval_reward_rejected", "eval_margin", "eval_logps_rejected"} & found.keys()
    both = evaluate_metrics(sharded, {"": [batch]}, objective)
    assert {"eval_reward_rejected", "eval_margin", "eval_logps_rejected"} <= both.keys()


def test_a_line_has_means_over_its_logging_window(tmp_path: Path) -> None:
    metrics = Metrics(
        tmp_path,
        device=torch.device("cpu"),
        first_step=0,
        max_steps=9,
        tokens_before=0,
        tokens_per_step=1,
        flops_per_token=1.0,
        logging_steps=4,
    )
    metrics.guards.bad_steps.max_consecutive = 5
    one, no = torch.tensor(1.0), torch.tensor(False)
    # Sums and numbers of pairs of each step; the third one is skipped.
    steps = [(2.0, 2.0), (9.0, 3.0), (1e9, 1.0), (4.0, 5.0), (6.0, 4.0)]
    tokens = [7, 100, 5, 10, 3]
    for step, (total, count) in enumerate(steps, 1):
        sums = {
            "margin": (torch.tensor([total]), torch.tensor([count])),
            "reward_rejected": (torch.zeros(1), torch.zeros(1)),  # no row has the label
        }
        skipped = torch.tensor(step == 3)
        stats = StepStats(
            *(step * one, one, torch.tensor(tokens[step - 1]), skipped, no),
            part_sums=sums,
            terms=torch.tensor(count),
        )
        metrics.step(step, stats, 1e-3)
    metrics.close()
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert lines[1]["margin"] == pytest.approx(2.0 / 2)
    assert lines[4]["margin"] == pytest.approx((9.0 + 4.0) / (3 + 5))
    # The mean loss is one over pairs too; tokens are counted by themselves.
    assert lines[4]["mean_loss"] == pytest.approx((2 * 3 + 4 * 5) / (3 + 5))
    assert lines[4]["tokens"] == 7 + 100 + 5 + 10
    assert not any("reward_rejected" in line for line in lines.values())
