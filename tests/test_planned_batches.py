"""The batch that plans are of: as large as the largest that a run reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_planning import _save, _sizes, _wide
from transformers import AutoConfig

from toolkit.config import DistillConfig, FinetuneConfig, parse
from toolkit.config.lora import LoraConfig
from toolkit.config.preference import PreferConfig
from toolkit.config.settings import RunConfig
from toolkit.data.row_formats import find_row_format
from toolkit.data.samples.batch import Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import ModelError
from toolkit.models import build_on_meta
from toolkit.objectives.largest_batch import largest_batch
from toolkit.objectives.objective import Objective
from toolkit.planning import fake_ranks
from toolkit.planning.measuring import measure
from toolkit.planning.simulation import simulate

LENGTH, ROWS = 256, 3
CPU = torch.device("cpu")
OBJECTIVES = ("sigmoid", "kto", "reward", "orpo")


def config(folder: Path, objective: str, packing: str = "none") -> RunConfig:
    cls = PreferConfig if objective else FinetuneConfig
    flags = {
        "model.name_or_path": folder,
        "model.init": "random",
        "data.sequence_length": LENGTH,
        "data.packing": packing,
        "train.per_device_train_batch_size": ROWS,
        "sharding.param_dtype": "float32",
    }
    more = ["--preference.loss_type", objective] if objective else []
    return parse(cls, [*(f"--{name}={value}" for name, value in flags.items()), *more])


def batch_of(cfg: RunConfig, rows: list[tuple[int, int]]) -> Batch:
    """Return the micro-batch of padded rows whose sides have so many tokens."""
    pairs = isinstance(cfg, PreferConfig)
    shape = SampleShape(
        "none",
        LENGTH,
        pad_id=1,
        row_format=find_row_format(cfg.rows),
        prompts=cfg.learns_prompts,
    )
    samples = []
    for first, second in rows:
        ids = np.random.default_rng(first).integers(8, 100, first + second)
        sample = shape.sample([Piece(ids, ids.copy(), first * pairs)])
        if isinstance(cfg, PreferConfig):
            sample["reference"] = torch.zeros(2)
            sample["margin"] = torch.zeros(1)
            sample["desirable"] = torch.ones(0 if cfg.preference.paired else 1, dtype=torch.bool)
        samples.append(sample)
    return shape.batch(samples)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save(_wide("llama", layers=2), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("objective", ["", *OBJECTIVES])
def test_the_planned_batch_has_the_tensors_of_the_largest_real_one(model: Path, objective) -> None:
    cfg = config(model, objective)
    longest = (LENGTH - 5, 5) if objective else (LENGTH - 1, 0)
    others = [(40, 9)] * (ROWS - 1)
    if objective == "kto":  # the answers that are compared with are a batch of their own
        others[-1] = longest[::-1]
    planned, real = largest_batch(cfg, "none"), batch_of(cfg, [longest, *others])
    assert planned.inputs["input_ids"].shape == (ROWS * (2 if objective else 1), LENGTH)

    def shapes(batch: Batch) -> list[Any]:
        return [(tensor.shape, tensor.dtype) for tensor in batch.tensors()]

    assert shapes(planned) == shapes(real)
    assert planned.inputs["attention_mask"].sum() < planned.targets.numel()
    # A pair whose sides are as long needs half of it: the packed one, too.
    if objective:
        even = batch_of(cfg, [(LENGTH // 2, LENGTH // 2)] * ROWS)
        packed = largest_batch(cfg, "bfd")
        assert even.targets.numel() == packed.targets.numel() == planned.targets.numel() / 2


@pytest.mark.plans
@pytest.mark.parametrize("objective", ["", *OBJECTIVES])
def test_a_plan_of_padded_rows_is_what_the_largest_batch_takes(
    model: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(model, objective)
    longest = (LENGTH - 5, 5) if objective else (LENGTH - 1, 0)
    real = batch_of(cfg, [longest, *[(LENGTH // 2, 9)] * (ROWS - 1)])
    with monkeypatch.context() as patch:  # the plan below makes its own batch
        patch.setattr(Objective, "largest_batch", lambda *_: real)
        measured = measure(cfg, 1, CPU)[0]
    planned = simulate(cfg, 1, device_type="cpu").peak.nbytes
    print(f"{objective or 'tokens'}: planned {planned:,}, measured {measured:,}")
    assert 0.95 <= planned / measured <= 1.1
    if objective and cfg.preference.paired:  # of packed labelled answers one may take the row, too
        packed = simulate(config(model, objective, "bfd"), 1, device_type="cpu").peak.nbytes
        assert packed / measured < 0.9


@pytest.mark.slow
def test_auto_plans_the_padded_batch_of_a_model_that_cannot_be_packed(tmp_path: Path) -> None:
    from tiny_models import tiny_config

    folder = _save(tiny_config("bloom", vocab_size=163), tmp_path)
    peaks = {
        packing: simulate(config(folder, "sigmoid", packing), 1, device_type="cpu").peak.nbytes
        for packing in ("auto", "none", "bfd")
    }
    assert peaks["auto"] == peaks["none"] > peaks["bfd"]


@pytest.mark.parametrize(("objective", "expected"), [("sigmoid", "layer"), ("kto", "none")])
def test_a_plan_compiles_what_the_run_compiles(model: Path, objective: str, expected: str) -> None:
    cfg = config(model, objective, "bfd")
    assert find_row_format(cfg.rows).has_fixed_width("bfd") == (expected == "layer")
    with fake_ranks.sharded(cfg, 1, 0, "cuda", compile_by=fake_ranks.TRACED) as (_, sharding):
        assert sharding.torch_compile == expected


@pytest.mark.slow
def test_a_plan_of_pairs_keeps_no_masks_of_dropout(tmp_path: Path) -> None:
    rates = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

    def planned(objective: str, rate: float) -> int:
        folder = tmp_path / str(rate)
        sizes = _wide("gpt2")
        for name in rates:
            setattr(sizes, name, rate)
        cfg = config(_save(sizes, folder), objective, "bfd" if objective else "none")
        return simulate(cfg, 1, device_type="cpu").peak.nbytes

    assert planned("sigmoid", 0.1) == planned("sigmoid", 0.0)
    assert planned("", 0.1) > planned("", 0.0)  # fine-tuning drops


@pytest.mark.slow
def test_a_plan_of_a_stream_counts_the_forward_of_its_reference(model: Path) -> None:
    def planned(streaming: bool) -> tuple[float, int]:
        cfg = config(model, "sigmoid", "bfd")
        data = replace(cfg.data, streaming=streaming)
        train, lora = replace(cfg.train, max_steps=2), LoraConfig(r=4)
        cfg = replace(cfg, data=data, train=train, lora=lora)
        plan = simulate(cfg, 1, device_type="cpu")
        operations = plan.work["last micro-batch"].operations
        return sum(n * c for (n, *_), c in operations.items()), plan.peak.nbytes

    (known, peak), (streamed, peak_of_stream) = planned(False), planned(True)
    assert 1.4 < streamed / known < 1.6  # with a frozen base 6 instead of 4 products
    assert peak_of_stream == pytest.approx(peak, rel=0.02)


@pytest.mark.plans
@pytest.mark.parametrize("world", [1, 2])
def test_a_live_teacher_takes_what_the_plan_says(model: Path, tmp_path: Path, world: int) -> None:
    """The peak and what is held are those of real tensors; a plan without the teacher misses."""
    settings = {
        "model.name_or_path": model,
        "model.init": "random",
        "teacher.name_or_path": _save(_wide("llama", layers=8), tmp_path),
        "teacher.dtype": "float32",
        "data.sequence_length": LENGTH,
        "data.packing": "bfd",
        "train.per_device_train_batch_size": ROWS,
        "sharding.param_dtype": "float32",
    }
    cfg = parse(DistillConfig, [f"--{name}={value}" for name, value in settings.items()])
    planned, (measured, _) = (
        simulate(cfg, world, device_type="cpu", gloo=False),
        measure(cfg, world, CPU),
    )
    print(f"{world} ranks: planned {planned.peak.nbytes:,}, measured {measured:,}")
    assert 0.95 <= planned.peak.nbytes / measured <= 1.05
    alone = parse(FinetuneConfig, [f"--{n}={v}" for n, v in settings.items() if "teacher" not in n])
    without = simulate(alone, world, device_type="cpu", gloo=False)
    assert without.peak.nbytes / measured < 0.9
    teacher = build_on_meta(cfg.teacher)
    held = planned.state.parameters - without.state.parameters
    assert held * world == pytest.approx(sum(4 * p.numel() for p in teacher.parameters()), rel=0.01)


@pytest.mark.plans
def test_packed_rows_with_sliding_windows_are_planned_without_masks(tmp_path: Path) -> None:
    """The run attends by the borders of documents; only padded rows have masks [T, T]."""
    long = 2048

    def plan_of(packing: str, window: int | None) -> Any:
        sizes = {"sliding_window": window, "max_position_embeddings": long}
        model = AutoConfig.for_model(
            "mistral", **_sizes(2) | sizes, hidden_size=64, intermediate_size=128, head_dim=16
        )
        folder = _save(model, tmp_path / f"{packing}-{window}")
        cfg = config(folder, "", packing)
        cfg = replace(cfg, data=replace(cfg.data, sequence_length=long))
        return cfg, simulate(cfg, 1, device_type="cuda")

    cfg, packed = plan_of("bfd", 100)
    _, without = plan_of("bfd", None)
    _, padded = plan_of("none", 100)
    assert packed.peak.nbytes == pytest.approx(without.peak.nbytes, rel=0.01)
    assert padded.peak.nbytes - packed.peak.nbytes > 0.9 * ROWS * long**2
    flops = [
        sum(
            count * operation[0]
            for work in plan.work.values()
            for operation, count in work.operations.items()
        )
        for plan in (packed, without)
    ]
    assert flops[0] < 0.97 * flops[1]
    measured = measure(cfg, 1, CPU)[0]
    planned = simulate(cfg, 1, device_type="cpu").peak.nbytes
    print(f"planned {planned:,}, measured {measured:,}")
    assert 0.95 <= planned / measured <= 1.1


def test_a_step_on_a_device_without_the_kernel_has_masks(model: Path, monkeypatch: Any) -> None:
    """As the run, which finds it when it tries packing."""

    def refuse(device: torch.device) -> None:
        raise ModelError(f"varlen flash attention does not run on {device}")

    cfg = config(model, "", "bfd")
    masks: dict[tuple[bool, str | None], str | None] = {}
    for check, planned_on in (
        (fake_ranks.check_varlen_kernel, None),
        (refuse, None),
        (refuse, "cuda"),
    ):
        monkeypatch.setattr(fake_ranks, "check_varlen_kernel", check)
        with fake_ranks.sharded(cfg, 1, device_type="cpu") as (sharded_model, _):
            choice = fake_ranks.attend_as_run(cfg, sharded_model, planned_on)
        masks[check is refuse, planned_on] = choice.mask
    assert masks == {
        (False, None): None,
        (True, None): "varlen flash attention does not run on cpu",
        (True, "cuda"): None,
    }
