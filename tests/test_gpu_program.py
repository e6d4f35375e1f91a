"""The program of `make gpu`: its dry run runs every case; a case that fails, hangs or has no time
left is told from one that passed; what is owed comes first, and stays known from call to call.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAM = ROOT / "benchmarks" / "gpu.py"
sys.path.append(str(ROOT / "benchmarks"))  # last: its files have plain names


@pytest.mark.plans
@pytest.mark.long
def test_dry_run_of_all_cases(tmp_path):
    import gpu
    import gpu_ledger
    import gpu_report

    written = tmp_path / "gpu.md"
    command = [sys.executable, str(PROGRAM), "--tiny", "--device", "cpu"]
    command += ["--out", str(tmp_path / "out"), "--write", str(written), "--deadline", "1700"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    results = gpu_ledger.read_results(tmp_path / "out" / "results.jsonl")
    assert not gpu_report.failures(results), gpu_report.failures(results)
    assert done.returncode == 0, done.stderr[-3000:]
    status = {r["case"]: r["status"] for r in results if "status" in r}
    names = [case.name for case in gpu.all_cases()]
    lacking = {name for name in names if status[name] == "not here"}
    assert {status[name] for name in names if name not in lacking} == {"ended"}
    # No Triton on a CPU, and no torchao beside the tests.
    peers = {n for n in names if n.endswith("_liger")}
    peers |= {n for n in names if "float8" in n and not n.startswith("lora8b")}
    assert lacking == {"liger", "cudnn_candidate", *peers}
    text = written.read_text()
    measured = text.split("## Bars")[1].split("## Speed")[0].splitlines()
    # Memory is not counted on a CPU; every other bar has its figure.
    unknown = {line.split(" | ")[0][2:] for line in measured if "not measured" in line}
    unknown -= {f"{group}_toolkit peak memory / bare" for group in ("lora8b", "full1b", "full3b")}
    assert all("iger" in what or what.startswith("peak memory, plan of") for what in unknown)
    owed = text.split("## Owed")[1]
    assert "- liger: not here: no GPU, which Liger's kernels need" in owed
    assert "Never run" not in owed
    assert "Of an older commit" not in owed


def test_cases_that_do_not_exist_are_refused(capsys):
    import gpu

    assert [case.name for case in gpu.chosen_cases(["numbers", "start"])] == ["start", "numbers"]
    with pytest.raises(SystemExit) as error:
        gpu.chosen_cases(["numbers", "start,numbers"])
    assert error.value.code == 2
    assert "--only start,numbers: no such case" in capsys.readouterr().err


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


@pytest.mark.slow
def test_the_page_keeps_figures_that_were_measured_elsewhere(tmp_path):
    """Under their own heading, so that a regeneration neither drops them nor calls them its own."""
    page, results = tmp_path / "gpu.md", ROOT / "docs/evidence/benchmarks/gpu_results.jsonl"
    command = [sys.executable, str(PROGRAM), "--page", "--out", str(tmp_path)]
    command += ["--results", str(results), "--write", str(page)]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    own, cited = page.read_text().split("## Measured outside of `make gpu`")
    assert "commit 9d2340e" in cited
    assert "torch 2.11.0+cu130" in cited
    assert "15,168" in cited.split("## Owed")[0]
    assert "15,168" not in own
    written = (ROOT / "docs/evidence/benchmarks/gpu.md").read_text()
    parts = [text.partition("## Owed")[0] for text in (written, page.read_text())]
    assert parts[0] == parts[1]  # what is owed depends on the commit


def test_what_preference_tuning_and_saves_owe_comes_first():
    import gpu

    names = [case.name for case in gpu.all_cases()]
    assert tuple(names[: len(gpu._FIRST)]) == gpu._FIRST
    assert len({*names}) == len(names)


# ---- How a case ends -----------------------------------------------------------------------------


def passes(place) -> None:
    place.record("check", True)


def fails(place) -> None:
    place.record("check", False, differs=0.5)


def breaks(place) -> None:
    raise ValueError("the reason of it")


def lacks(place) -> None:
    from gpu_common import NotHere

    raise NotHere("no such device")


def hangs(place) -> None:
    place.record("check", True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (place.out / "child").write_text(str(child.pid))
    time.sleep(600)


def sleeps(place) -> None:
    begun = time.monotonic()
    time.sleep(2)
    place.record("slept", None, begun=begun, ended=time.monotonic())


def meets(place) -> None:
    """Go on as soon as two such cases run at once; fail where the other does not come."""
    begun = time.monotonic()
    (place.out / f"{place.name} is here").touch()
    while len(list(place.out.glob("* is here"))) < 2:
        assert time.monotonic() < begun + 60, "nothing ran beside it"
        time.sleep(0.05)
    place.record("met", None, begun=begun, ended=time.monotonic())


def case(name, fn, seconds=0.0, **more):
    from gpu_ledger import Case

    return Case(name, fn, seconds, **more)


def call_of(folder: Path, *, tiny=True, seconds=60.0, commit="c1", date="d1", card="card A"):
    import gpu

    stamp = {"commit": commit, "committed": f"day of {commit}", "date": date, "card": card}
    stamp |= {"torch": "2.11.0", "transformers": "5.24.0"}
    ends = time.monotonic() + seconds
    return gpu.Call(folder, folder / "results.jsonl", folder, "cpu", tiny, ends, stamp)


def alive(pid: int) -> bool:
    import psutil

    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_every_end_of_a_case_is_told(tmp_path, capfd):
    import gpu
    import gpu_ledger
    import gpu_report

    cases = [case(fn.__name__, fn) for fn in (passes, fails, breaks, lacks)]
    cases.append(case("hangs", hangs, -14.5))
    late = case("late", passes, 1e6)
    gpu.run_cases([*cases], call_of(tmp_path))
    gpu.run_cases([late], call_of(tmp_path, tiny=False))
    assert '{"case": "late", "status": "left out", "why": "60 s left, 1000000 s needed"}' in (
        capfd.readouterr().out
    )
    results = gpu_ledger.read_results(tmp_path / "results.jsonl")
    assert {r["case"]: r["status"] for r in results if "status" in r} == {
        "passes": "ended",
        "fails": "ended",
        "breaks": "failed",
        "lacks": "not here",
        "hangs": "timeout",
    }
    # Two run at a time, and end in any order.
    assert {(r["case"], r.get("check")) for r in gpu_report.failures(results)} == {
        ("fails", "check"),
        ("breaks", None),
        ("hangs", None),
    }
    assert "the reason of it" in next(r["log"] for r in results if r["case"] == "breaks")
    assert not alive(int((tmp_path / "child").read_text()))
    text = gpu_report.report(results, [*cases, late], "c1")
    assert "| fails | check | FAILED | differs by 5.0e-01 | c1 |" in text
    owed = text.split("## Owed")[1]
    assert "Never run:\n\n- late\n" in owed
    assert "- breaks: failed: ValueError: the reason of it\n" in owed
    assert "- hangs: timeout\n" in owed
    assert "- lacks: not here: no such device\n" in owed
    assert "- fails: check: failed\n" in owed
    assert "- passes" not in owed


@pytest.mark.slow
def test_a_call_ends_within_its_deadline(tmp_path):
    import gpu
    import gpu_ledger

    cases = [case(f"sleeps {i}", sleeps, 2.5, timed=True) for i in range(9)]
    cases.append(case("hangs", hangs, 0.5, host=True))
    call = call_of(tmp_path, tiny=False, seconds=9.0)
    gpu.run_cases(cases, call)
    assert time.monotonic() - call.ends < 10  # and not the minutes of what hangs
    results = gpu_ledger.read_results(call.results)
    status = {r["case"]: r["status"] for r in results if "status" in r}
    assert 1 <= sum(value == "ended" for value in status.values()) <= 4
    assert set(status.values()) <= {"ended", "timeout"}


@pytest.mark.slow
def test_nothing_runs_beside_a_timed_case(tmp_path):
    import gpu
    import gpu_ledger

    cases = [
        case("weights_a", meets, 2, host=True),
        case("timed, of a", sleeps, 2, needs=("a",), timed=True),
        case("host", sleeps, 2, host=True),
        case("long", meets, 60),  # the device does not wait for the weights
        case("device", sleeps, 1),
    ]
    gpu.run_cases(cases, call_of(tmp_path, tiny=False, seconds=600.0))
    results = gpu_ledger.read_results(tmp_path / "results.jsonl")
    assert {r["status"] for r in results if "status" in r} == {"ended"}
    when = {r["case"]: (r["begun"], r["ended"]) for r in results if "begun" in r}
    begun, ended = when.pop("timed, of a")
    assert all(end <= begun or ended <= begin for begin, end in when.values())
    assert begun >= when["weights_a"][1]


def test_what_starts_beside_what_runs():
    import gpu

    timed = case("timed", passes, 2, needs=("a",), timed=True)
    host, device = case("host", passes, 2, host=True), case("device", passes, 1)
    needed = {"timed": 2.0, "host": 2.0, "device": 1.0}

    def chosen(pending, *running, ready=(), apart=True):
        found = gpu.next_case(pending, list(running), set(ready), needed, apart=apart)
        return found.name if found else None

    def runs(one, rest=0.0):
        return gpu.Running(one, None, time.monotonic(), rest, 0.0, Path())

    assert chosen([timed, host, device]) == "host"  # the weights are not there yet
    assert chosen([timed, host, device], ready="a") == "timed"
    assert chosen([timed, host, device], runs(device)) == "host"
    assert chosen([timed, host, device], runs(host)) == "device"
    assert chosen([host], runs(host)) is None
    assert chosen([host], runs(host), apart=False) == "host"
    assert chosen([host], runs(host), runs(device)) is None
    assert chosen([host, device], runs(timed)) is None
    # A timed case whose turn it is waits for what runs, and for nothing that would take longer.
    assert chosen([timed, host], runs(device, rest=60), ready="a") == "host"
    assert chosen([timed, host], runs(device, rest=1), ready="a") is None
    assert chosen([timed], runs(device), ready="a") is None


# ---- What is owed --------------------------------------------------------------------------------


def record(name: str, commit: str, *, date: str = "", card: str = "card A", **more) -> dict:
    stamp = {"commit": commit, "committed": f"day of {commit}", "date": date or commit}
    stamp |= {"card": card, "torch": "2.11.0", "transformers": "5.24.0"}
    return {"case": name, **({} if "status" in more else {"check": "check"}), **more, **stamp}


def ran(name: str, commit: str, *, ok: bool = True, status: str = "ended", **more) -> list[dict]:
    return [record(name, commit, ok=ok, **more), record(name, commit, status=status, **more)]


def test_cases_come_as_they_are_owed(tmp_path):
    from gpu_ledger import by_debt

    results = [
        *ran("of c3", "c3"),
        *ran("of c1", "c1"),
        *ran("of c2", "c2"),
        *ran("timed out", "c3", status="timeout"),
        *ran("false", "c2", ok=False),
        record("cut off", "c1", ok=True),  # no line says how it ended
        *ran("mended", "c1", ok=False),
        *ran("mended", "c3"),
    ]
    names = ["of c3", "of c2", "of c1", "new", "mended", "timed out", "false", "cut off", "newer"]
    found = [c.name for c in by_debt([case(n, passes) for n in names], results, "c3")]
    # Nothing is owed of what has run well at c3 itself.
    owed = [*("new", "newer"), *("cut off", "false", "timed out"), *("of c1", "of c2")]
    assert found == owed
    changed = [c.name for c in by_debt([case(n, passes) for n in names], results, "c3+")]
    assert changed == [*owed, "of c3", "mended"]


@pytest.mark.slow
def test_a_second_call_goes_on(tmp_path):
    import gpu
    import gpu_ledger

    cases = [case(name, sleeps, 2.2) for name in ("first", "second", "third", "fourth")]
    first = []
    for number in range(1, 10):
        call = call_of(tmp_path, tiny=False, seconds=6.0, date=f"d{number}")
        known = gpu_ledger.read_results(call.results)
        gpu.run_cases(gpu_ledger.by_debt(cases, known, "c1"), call)
        gpu_ledger.settle(call.results)
        done = {r["case"]: r["date"] for r in gpu_ledger.read_results(call.results)}
        first = first or [*done]
        assert [done[name] for name in first] == ["d1"] * len(first)  # and not run again
        if len(done) == len(cases):
            break
    assert 0 < len(first) < len(done) == len(cases)
    assert number > 1


def test_the_file_keeps_the_last_run_and_the_last_good_one(tmp_path):
    import gpu_ledger

    file = tmp_path / "results.jsonl"
    for commit, status in (("c1", "ended"), ("c2", "ended"), ("c3", "timeout"), ("c4", "timeout")):
        for line in ran("case", commit, status=status, figure=commit):
            gpu_ledger.append(file, line)
    gpu_ledger.settle(file)
    results = gpu_ledger.read_results(file)
    assert [(r["commit"], r.get("status")) for r in results] == [
        *(("c2", None), ("c2", "ended")),
        *(("c4", None), ("c4", "timeout")),
    ]
    assert [r["figure"] for r in gpu_ledger.newest(results)] == ["c4"]


def test_the_page_tells_commit_and_card_of_each_figure_and_what_is_owed():
    import gpu_report

    results = [
        record("m", "c1", check="machine", card="card B", driver="580", note="of a page"),
        *ran("kept", "c1", card="card B", ms=1.5),
        *ran("old", "c1", ms=2.5),
        *ran("failed", "c2", ok=False),
        *ran("new", "c2"),
    ]
    cases = [case(name, passes) for name in ("kept", "old", "failed", "new", "never")]
    text = gpu_report.report(results, cases, "c2")
    assert "| kept | check | passed |  | c1, card B |" in text
    assert "| old | check | passed |  | c1 |" in text
    assert "| new | check | passed |  | c2 |" in text
    assert "| c1, card B | c1 | card B, 580 driver | torch 2.11.0, transformers 5.24.0;" in text
    never, failed, older = text.split("## Owed")[1].split("\n\n")[3::2][:3]
    assert never == "- never"
    assert failed == "- failed: check: failed"
    assert older == "- kept: last run: c1\n- old: last run: c1"


def test_bars_of_known_figures():
    import gpu_report

    def speed(name: str, rate: float, *, card: str = "NVIDIA H100", **more: float) -> dict:
        figures = {"step_seconds": 1.0, "spread": 0.0, "peak_allocated": 100, "mean_loss": 2.0}
        figures["tokens_per_second"] = rate
        return record(name, "c1", card=card, **{"check": "speed", **figures, **more})

    machine = {"check": "machine", "peak_tflops": 1000.0, "card": "NVIDIA H100"}
    head = {"card": "NVIDIA H100", "peak": 0}
    results = [
        record("machine", "c1", **machine),
        record("ceilings", "c1", check="matmul", tflops=800.0, card="NVIDIA H100"),
        speed("full1b_toolkit", 60_000, flops_per_token=8e9),
        speed("full1b_bare", 62_000, peak_allocated=90),
        speed("full1b_trainer", 70_000, mean_loss=2.1),
        speed("full3b_toolkit", 14_000),
        speed("full3b_bare", 14_000, card="NVIDIA H200"),
        speed("lora8b_compiled_wrapped", 14_400),
        speed("lora8b_compiled_packed", 15_600),
        record("plans", "c2", check="plan of full1b_toolkit", peak_gb=1.2e-7, card="NVIDIA H100"),
        record("loss_head", "c1", check="2 x 3 frozen: toolkit", ms=10.4, **head),
        record("loss_head", "c1", check="2 x 3 frozen: liger", ms=10.0, **head),
    ]
    found = {what: (value, verdict, of) for what, _, value, verdict, of in gpu_report.bars(results)}
    assert found["full1b_toolkit / bare"] == ("0.9677", "NOT MET", "c1")
    assert found["full1b_toolkit / Trainer"] == ("0.8571", "NOT MET", "c1")
    assert found["full1b_toolkit peak memory / bare"] == ("1.111", "NOT MET", "c1")
    assert found["mean loss of full1b_toolkit / full1b_bare"] == ("1", "met", "c1")
    assert found["mean loss of full1b_toolkit / full1b_trainer"] == ("0.9524", "NOT MET", "c1")
    assert found["full1b_toolkit of measured product"] == ("0.6", "met", "c1")  # 480 of 800 TFLOP/s
    two_cards = ("", "not comparable: of two cards or versions", "c1, NVIDIA H200, c1")
    assert found["full3b_toolkit / bare"][:2] == two_cards[:2]
    assert found["8b lora compiled, wrapped, tokens/s on an H100"] == ("14,400", "NOT MET", "c1")
    assert found["8b lora compiled, packed, tokens/s on an H100"] == ("15,600", "met", "c1")
    assert found["peak memory, plan of full1b_toolkit / measured"] == ("1.2", "NOT MET", "c2, c1")
    assert found["loss head 2 x 3 frozen / Liger"] == ("1.04", "met", "c1")
    assert found["lora8b_toolkit / bare"] == ("", "not measured", "")


def test_the_kept_results_are_those_of_known_cases():
    import gpu
    import gpu_ledger
    import gpu_report

    folder = ROOT / "docs" / "evidence" / "benchmarks"
    results = gpu_ledger.read_results(folder / "gpu_results.jsonl")
    names = {c.name for c in gpu.all_cases()}
    gone = {"lora8b_toolkit_packed_compiled"}  # recomputed all layers; two others took its place
    found = {r["case"] for r in results if not r["case"].startswith(("machine ", "weights_"))}
    assert found <= names | gone
    stamp = {"commit", "committed", "date", "card", "torch", "transformers"}
    assert all(stamp <= set(r) for r in results)
    page = (folder / "gpu.md").read_text()
    commit = page.split("next call of commit ")[1].split()[0]
    assert page == gpu_report.report(results, gpu.all_cases(), commit)


def test_the_bundle_has_the_text_of_shakespeare_or_says_so(tmp_path, monkeypatch, capsys):
    import gpu_bundle
    import results_inputs

    digest = hashlib.sha256(b"a text").hexdigest()
    file = results_inputs.Download("a.txt", "https://example.org/a.txt", digest)
    monkeypatch.setitem(results_inputs.DOWNLOADS, "text", (file,))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("RESULTS_CACHE", str(tmp_path / "cache"))
    gpu_bundle.carry_text(tmp_path / "data")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("note: without its text the case shakespeare cannot run there: ")
    (tmp_path / "cache" / "a.txt").write_bytes(b"a text")
    gpu_bundle.carry_text(tmp_path / "data")
    assert not capsys.readouterr().out
    # Beside the GPU the folder is the cache.
    assert "RESULTS_CACHE=$PWD/data" in gpu_bundle._COMMANDS
    (tmp_path / "cache" / "a.txt").unlink()
    monkeypatch.setenv("RESULTS_CACHE", str(tmp_path / "data"))
    assert results_inputs.find_file(file, None).read_bytes() == b"a text"


def test_a_wheel_of_bitsandbytes_keeps_the_libraries_of_few_versions(tmp_path):
    import zipfile

    import gpu_bundle

    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = ["bitsandbytes/__init__.py", "bitsandbytes/libbitsandbytes_cpu.so"]
    names += [f"bitsandbytes/libbitsandbytes_cuda{n}.so" for n in (118, 130)]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as z:
        for name in names:
            z.writestr(name, "x")
        z.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names))
    gpu_bundle.trim(wheel)
    with zipfile.ZipFile(wheel) as z:
        kept = [n for n in names if "118" not in n]
        assert z.namelist() == [*kept, record]
        assert z.read(record).decode() == "".join(f"{name},sha256=x,1\n" for name in kept)
    assert [p.name for p in Path(tmp_path).iterdir()] == [wheel.name]
