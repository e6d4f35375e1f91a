"""Context parallelism of distillation: a live teacher, and stored values of complete rows."""

from pathlib import Path

import pytest
from test_distillation import distill, folder, models, write_config
from test_teacher_values import STORED

from toolkit.checkpoint.reference_file import FILE, decode
from toolkit.config import DistillConfig, load
from toolkit.planning.devices import device_of
from toolkit.planning.search import make_plan

__all__ = ["folder", "models"]  # fixtures

SHARED = ("--sharding.context_parallel", "2")
EXACT = ("step", "tokens", "epoch", "learning_rate")
COMPARED = ("loss", "mean_loss", "kl", "cross_entropy", "agreement", "grad_norm", "perplexity")


def assert_same_metrics(lines: list[dict], expected_lines: list[dict]) -> None:
    """Compare the metrics of two runs line by line, except for times and memory."""
    assert len(lines) == len(expected_lines)
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            if name in EXACT:
                assert line[name] == value, name
            elif name.removeprefix("eval_") in COMPARED:
                close = pytest.approx(value, rel=5e-5, abs=1e-6)
                assert line[name] == close, (name, line["step"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sort", "packing"),
    [
        ("live", "bfd"),
        ("stored", "none"),
        *(
            pytest.param(sort, packing, marks=pytest.mark.long)
            for sort, packing in (("live", "none"), ("live top 8", "bfd"), ("stored", "bfd"))
        ),
    ],
)
def test_a_run_logs_the_same_metrics(folder: Path, sort: str, packing: str) -> None:
    """61 tokens are not divisible, so rows are padded, and so are the values of the teacher."""
    changes = {"live": {}, "live top 8": {"top_k": 8}, "stored": STORED}[sort]
    write_config(distill=changes, data={"packing": packing, "sequence_length": 61})
    alone = distill(1, "alone")
    assert_same_metrics(distill(2, "shared", *SHARED), alone)
    if sort == "stored":
        contents = [Path(name, "checkpoints/step-00000006", FILE) for name in ("alone", "shared")]
        expected, values = (decode(file.read_bytes(), file)[1] for file in contents)
        assert values.keys() == expected.keys()
        for name, (positions, rows) in expected.items():
            assert positions.tolist() == values[name][0].tolist()
            k = STORED["top_k"]
            assert (values[name][1][:, :k] == rows[:, :k]).mean() > 0.999  # two may be as likely
            assert values[name][1][:, k:] == pytest.approx(rows[:, k:], rel=1e-4, abs=1e-5)
        if packing == "bfd":
            # A run resumes with the values on complete rows.
            alone = distill(1, "alone", "--train.max_steps", "8")
            assert_same_metrics(distill(1, "shared", "--train.max_steps", "8"), alone)


@pytest.mark.slow
def test_two_groups_log_the_same_metrics(folder: Path) -> None:
    write_config(distill=STORED)
    assert_same_metrics(distill(4, "shared", *SHARED), distill(1, "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["live", "stored"])
def test_a_plan_has_the_activations_of_a_part(folder: Path, sort: str) -> None:
    write_config(distill=STORED if sort == "stored" else {}, data={"sequence_length": 64})
    device = device_of("h100")
    peaks = []
    for parts in ("1", "4"):
        flags = ["--sharding.context_parallel", parts, "--train.per_device_train_batch_size", "4"]
        cfg = load(DistillConfig, "run.yaml", [*flags, "--train.global_batch_size", "16"])
        plan = make_plan(cfg, 4, device, int(device.memory))
        peaks.append(plan.sim.peaks["forward"].kinds["activations"])
    assert 0.1 < peaks[1] / peaks[0] < 0.6, peaks
