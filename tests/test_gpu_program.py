"""The program of `make gpu`: its dry run runs every case; a case that fails, hangs or has no time
left is told from one that passed.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = ROOT / "benchmarks" / "gpu.py"
sys.path.append(str(ROOT / "benchmarks"))  # last: its files have plain names


@pytest.mark.plans
def test_dry_run_of_all_parts(tmp_path):
    import gpu
    import gpu_report

    written = tmp_path / "gpu.md"
    command = [sys.executable, str(PROGRAM), "--tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--write", str(written), "--deadline", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    results = gpu_report.read_results(tmp_path / "out")
    assert not gpu_report.failures(results), gpu_report.failures(results)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = {r["case"]: r["status"] for r in results if "seconds" in r and "status" in r}
    expected = [name for part in (1, 2, 3) for name, _, _ in gpu.cases_of(part)]
    assert ended == dict.fromkeys(expected, "ended")
    text = written.read_text()
    measured = text.split("## Bars")[1].split("## Speed")[0].splitlines()
    # Memory is not counted on a CPU, which has no Triton; every other bar has its figure.
    assert {line.split(" | ")[0] for line in measured if line.endswith("|  | not measured |")} <= {
        *(f"| {group}_toolkit peak memory / bare" for group in ("lora8b", "full1b", "full3b")),
        *(f"| {group}_toolkit_liger / Trainer" for group in ("lora8b", "full1b")),
    }
    assert "| liger | skipped | no GPU, which Liger's kernels need |" in text


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(PROGRAM), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--bundle DIR" in done.stderr
    assert "--tiny --device cpu" in done.stderr


def passes(place) -> None:
    place.record("check", True)


def fails(place) -> None:
    place.record("check", False, differs=0.5)


def breaks(place) -> None:
    raise ValueError("the reason of it")


def hangs(place) -> None:
    place.record("check", True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place.out / "child").write_text(str(child.pid))
    time.sleep(600)


def alive(pid: int) -> bool:
    import psutil

    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return True


def test_every_end_of_a_case_is_told(tmp_path):
    import gpu
    import gpu_report

    cases = [(fn.__name__, fn, 0.0) for fn in (passes, fails, breaks)]
    gpu.run_part([*cases, ("hangs", hangs, -14.0)], tmp_path, tmp_path, "cpu", True, 60.0)
    gpu.run_part([("late", passes, 1e6)], tmp_path, tmp_path, "cpu", False, 60.0)
    results = gpu_report.read_results(tmp_path)
    ended = {r["case"]: r["status"] for r in results if "status" in r}
    assert ended == {
        "passes": "ended",
        "fails": "ended",
        "breaks": "failed",
        "hangs": "timeout",
        "late": "skipped",
    }
    assert [(r["case"], r.get("check")) for r in gpu_report.failures(results)] == [
        ("fails", "check"),
        ("breaks", None),
        ("hangs", None),
    ]
    assert "the reason of it" in next(r["log"] for r in results if r["case"] == "breaks")
    assert not alive(int((tmp_path / "child").read_text()))
    text = gpu_report.report(results)
    assert "| fails | check | FAILED | differs by 5.0e-01 |" in text
    # A second call of a part replaces what the first one recorded.
    gpu.run_part([("late", passes, 0.0)], tmp_path, tmp_path, "cpu", True, 60.0)
    assert [r.get("status") for r in gpu_report.read_results(tmp_path) if r["case"] == "late"] == [
        None,
        "ended",
    ]


def test_bars_of_known_figures():
    import gpu_report

    def speed(case: str, rate: float, **more: float) -> dict:
        figures = {"step_seconds": 1.0, "spread": 0.0, "peak_allocated": 100, "mean_loss": 2.0}
        return {"case": case, "check": "speed", "tokens_per_second": rate, **figures, **more}

    results = [
        {"case": "machine_2", "check": "machine", "card": "NVIDIA H100", "peak_tflops": 1000.0},
        {"case": "ceilings", "check": "matmul", "tflops": 800.0},
        speed("full1b_toolkit", 60_000, flops_per_token=8e9),
        speed("full1b_bare", 62_000, peak_allocated=90),
        speed("full1b_trainer", 70_000, mean_loss=2.1),
        speed("lora8b_toolkit_packed", 12_500),
    ]
    found = {what: (value, verdict) for what, _, value, verdict in gpu_report.bars(results)}
    assert found["full1b_toolkit / bare"] == ("0.9677", "NOT MET")
    assert found["full1b_toolkit / Trainer"] == ("0.8571", "NOT MET")
    assert found["full1b_toolkit peak memory / bare"] == ("1.111", "NOT MET")
    assert found["mean loss of full1b_toolkit / full1b_bare"] == ("1", "met")
    assert found["mean loss of full1b_toolkit / full1b_trainer"] == ("0.9524", "NOT MET")
    assert found["full1b_toolkit of measured product"] == ("0.6", "met")  # 480 of 800 TFLOP/s
    assert found["8b lora tokens/s"] == ("12,500", "met")
    assert found["full3b_toolkit / bare"] == ("", "not measured")


def test_a_wheel_of_bitsandbytes_keeps_the_libraries_of_few_versions(tmp_path):
    import zipfile

    import gpu

    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ["bitsandbytes/__init__.py", "bitsandbytes/libbitsandbytes_cpu.so"]
    names += [f"bitsandbytes/libbitsandbytes_cuda{n}.so" for n in (118, 130)]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as z:
        for name in names:
            z.writestr(name, "x")
        z.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names))
    gpu.trim(wheel)
    with zipfile.ZipFile(wheel) as z:
        kept = [n for n in names if "118" not in n]
        assert z.namelist() == [*kept, record]
        assert z.read(record).decode() == "".join(f"{name},sha256=x,1\n" for name in kept)
    assert [p.name for p in Path(tmp_path).iterdir()] == [wheel.name]
