"""A signal, to any rank and in any phase, ends a run with a checkpoint; the command goes on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import BIN, ROOT, accelerate, free_port
from distributed import run_recipe_ranks
from test_run_kills import checkpoints, flags

from toolkit import recipes
from toolkit.checkpoint.commit import committed_steps, find_damaged_files
from toolkit.errors import ConfigError
from toolkit.training.guards import preemption
from toolkit.training.guards.preemption import EXIT_CODE

STEPS = 6

PLANT = """
import os, pkgutil, runpy, signal, sys, time

def plant(place, nth, names, rank, sleep, seconds_between=0.0):
    module, name = place.rsplit(".", 1)
    module = pkgutil.resolve_name(module)
    plain, calls = getattr(module, name), [0]
    def planted(*args, **more):
        calls[0] += 1
        if calls[0] == nth and os.environ["RANK"] in rank:
            for name in names:
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(seconds_between)
        if calls[0] >= nth:
            time.sleep(sleep)
        return plain(*args, **more)
    setattr(module, name, planted)

plant(**{arguments!r})
runpy.run_path({recipe!r}, run_name="__main__")
"""


def planted(tmp_path: Path, recipe: str = "pretrain", **arguments) -> Path:
    """Write a recipe of which a rank gets a signal at the `nth` call of `place`."""
    given = {"nth": 1, "names": ["SIGTERM"], "rank": "01", "sleep": 0.0} | arguments
    file = tmp_path / f"planted_{recipe}.py"
    text = PLANT.replace("{arguments!r}", repr(given))
    file.write_text(text.replace("{recipe!r}", repr(str(ROOT / "recipes" / f"{recipe}.py"))))
    return file


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_llama, text_file) -> dict[str, object]:
    """The last checkpoint of a run that got no signal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    whole = run_recipe_ranks(
        "pretrain", 2, *given(tiny_llama, text_file, folder / "run"), cwd=folder
    )
    assert whole.returncode == 0, whole.stderr
    return checkpoints(folder / "run")[f"step-{STEPS:08d}"]


def given(model: Path, data: Path, run: Path, *more: str) -> list[str]:
    return flags("pretrain", model, data, run, *more, "--checkpoint.save_steps", "5",
                 "--checkpoint.save_total_limit", "null")  # fmt: skip


# The phase: where the signal comes, the last step that is then saved, the evaluation cut short.
STEP = "toolkit.training.Update.step"
PHASES = {
    "a step, one rank": ({"place": STEP, "nth": 2, "rank": "1"}, 3, {3}),
    "the first step": ({"place": STEP, "names": ["SIGUSR1"]}, 2, set()),
    "Ctrl-C, told twice": ({"place": STEP, "nth": 3, "names": ["SIGINT", "SIGINT"]}, 4, {3}),
    "an evaluation": (
        {"place": "toolkit.objectives.CausalLM.evaluation_loss", "rank": "0"},
        4,
        {3},
    ),
    "a save": ({"place": "toolkit.checkpoint.save", "rank": "1"}, 6, {6}),
    "loading": ({"place": "toolkit.loading.load_or_init"}, None, set()),
    "reading data": ({"place": "toolkit.data.prepare.prepare_data"}, None, set()),
}


@pytest.mark.faults
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in(tmp_path, tiny_llama, text_file, undisturbed, phase) -> None:
    arguments, saved, cut_short = PHASES[phase]
    run = tmp_path / "run"
    settings = [*given(tiny_llama, text_file, run), "--data.max_eval_samples", "64"]
    script = planted(tmp_path, **arguments)
    ended = run_recipe_ranks(script, 2, *settings, cwd=tmp_path)
    assert ended.returncode == EXIT_CODE, ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
    if saved is None:
        assert not (run / "checkpoints").exists()
    else:
        assert max(committed_steps(run)) == saved
        assert f"stopped    by a signal after step {saved}" in ended.stdout
    # The same command, without the signal.
    again = run_recipe_ranks("pretrain", 2, *settings, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert checkpoints(run)[f"step-{STEPS:08d}"] == undisturbed
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    evaluated = [line["step"] for line in lines if "eval_loss" in line]
    assert evaluated == sorted({3, 6} - cut_short)


@pytest.mark.faults
def test_without_listening_a_signal_kills(tmp_path, tiny_llama, text_file) -> None:
    """The control: the same signal, not among those that are taken."""
    script = planted(tmp_path, place="toolkit.training.Update.step", nth=2, rank="01")
    only = ["--checkpoint.preemption_signals", "[SIGUSR1]"]
    settings = given(tiny_llama, text_file, tmp_path / "run", *only)
    ended = run_recipe_ranks(script, 2, *settings, cwd=tmp_path)
    assert ended.returncode == signal.SIGTERM
    assert not committed_steps(tmp_path / "run")


@pytest.mark.faults
def test_a_signal_in_the_middle_of_an_export(tmp_path, tiny_llama, text_file) -> None:
    """To the rank that writes: the other one is in a gather, and must not take a last word of it
    for its part.
    """
    run = tmp_path / "run"
    script = planted(tmp_path, place="toolkit.export.live._full_tensor", nth=3, rank="0")
    settings = given(tiny_llama, text_file, run, "--checkpoint.export_at_end", "true")
    ended = run_recipe_ranks(script, 2, *settings, cwd=tmp_path)
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert "Traceback" not in ended.stderr
    assert max(committed_steps(run)) == STEPS
    again = run_recipe_ranks("pretrain", 2, *settings, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"exported {run}" in again.stdout


@pytest.mark.faults
def test_a_signal_after_the_end_changes_nothing(tmp_path, tiny_llama, text_file) -> None:
    text = f"""
import atexit, os, runpy, signal
for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    atexit.register(os.kill, os.getpid(), name)
runpy.run_path({str(ROOT / "recipes" / "pretrain.py")!r}, run_name="__main__")
"""
    script, run = tmp_path / "late.py", tmp_path / "run"
    script.write_text(text)
    ended = run_recipe_ranks(script, 2, *given(tiny_llama, text_file, run), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert max(committed_steps(run)) == STEPS


def test_the_grace_is_over_with_the_checkpoint(monkeypatch) -> None:
    """What follows, such as a tracker's upload, may take longer; the code stays."""
    ended = list[int]()
    monkeypatch.setattr(preemption, "_exit_at_once", ended.append)
    monkeypatch.setattr(preemption.ranks, "post_notice", lambda key: None)

    def run(saved: bool) -> None:
        with preemption.listen_for_signals(["SIGUSR1"], 0.2):
            preemption.enter_loop()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.stop_requested()
            time.sleep(0.0 if saved else 0.5)
            preemption.leave_loop(1)

    for saved in (True, False):  # the control: without a checkpoint it ends
        with pytest.raises(preemption.Preempted):
            run(saved)
        time.sleep(0.5)
        assert ended == ([] if saved else [signal.SIGUSR1])


@pytest.mark.parametrize("signalled", [True, False])
def test_what_code_in_c_makes_of_a_signal_is_the_signal(signalled: bool) -> None:
    """As safetensors does with what is raised while it asks Python for a storage."""

    def fails() -> None:
        with contextlib.suppress(preemption.Preempted):
            if signalled:
                signal.raise_signal(signal.SIGUSR1)
        raise ValueError("could not determine the shape of object type")

    before = signal.getsignal(signal.SIGUSR1)
    expected = preemption.Preempted if signalled else ValueError
    try:
        with pytest.raises(expected), preemption.listen_for_signals(["SIGUSR1"], 1.0):
            fails()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("launched", [True, False])
def test_a_launched_process_that_fails_keeps_its_code(monkeypatch, launched) -> None:
    """The launcher is told to end, and sends its signal to all."""
    monkeypatch.delenv("RANK", raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(ConfigError), preemption.listen_for_signals(["SIGUSR1"], 1.0):
            raise ConfigError("no")
        assert signal.getsignal(signal.SIGUSR1) == (signal.SIG_IGN if launched else before)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_process_that_goes_on_after_a_run_hears_signals(monkeypatch) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for rank, after in ((None, before), ("0", signal.SIG_IGN)):
            monkeypatch.delenv("RANK", raising=False)
            if rank is not None:
                monkeypatch.setenv("RANK", rank)
            with preemption.listen_for_signals(["SIGUSR1"], 1.0):
                assert signal.getsignal(signal.SIGUSR1) not in (before, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGUSR1) == after
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ({"names": ["SIGTERM", "SIGINT"], "seconds_between": 2.1}, 130, "SIGINT again"),
        ({"sleep": 3600.0}, 143, "no checkpoint 1 s (checkpoint.grace_seconds) after SIGTERM"),
    ],
    ids=["a second signal", "no time left"],
)
def test_a_save_that_is_cut_off_harms_nothing(
    tmp_path, tiny_llama, text_file, arguments, code, said
) -> None:
    run = tmp_path / "run"
    every = ["--checkpoint.grace_seconds", "1"] if "sleep" in arguments else []
    settings = [*given(tiny_llama, text_file, run), "--checkpoint.save_steps", "1", *every]
    script = planted(tmp_path, place="toolkit.checkpoint.save", nth=3, **arguments)
    ended = run_recipe_ranks(script, 2, *settings, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    kept = committed_steps(run)
    assert max(kept) == 2
    assert not any(find_damaged_files(folder) for folder in kept.values())
    assert run_recipe_ranks("pretrain", 2, *settings, cwd=tmp_path).returncode == 0
    assert max(committed_steps(run)) == STEPS


# ---- Launchers, for real -------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a launcher; what of it is left is killed at the end."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    processes: list[psutil.Process] = []

    def start(command: list[str]) -> subprocess.Popen:
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        processes.append(psutil.Process(process.pid))
        return process

    yield start
    for process in processes:
        for one in [*process.children(), process] if process.is_running() else []:
            one.kill()


def wait_for(log: Path, pattern: str, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


FRONT_DOOR = [str(BIN / "toolkit"), "train"]


@pytest.mark.faults
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("launcher", ["toolkit train", "accelerate launch"])
def test_a_signal_to_the_launcher(
    tmp_path, started, tiny_llama, text_file, launcher, processes, sent
):
    """All ranks save and are gone, also where the launcher cannot tell them."""
    run = tmp_path / "run"
    settings = given(tiny_llama, text_file, run, "--train.max_steps", "100000")
    port = free_port()
    if launcher == "toolkit train":
        command = [*FRONT_DOOR, *settings, "--accelerate_config", "cpu"]
        command += ["--num_processes", str(processes), "--main_process_port", str(port)]
    else:
        script = str(ROOT / "recipes" / "pretrain.py")
        command = [*accelerate(processes, port), script, *settings]
    process = started(command)
    wait_for(tmp_path / "log", r"step +2/")
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == processes
    process.send_signal(getattr(signal, sent))
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    code = process.wait(30)
    log = (tmp_path / "log").read_text()
    assert f"stopped    by a signal after step {max(committed_steps(run))}" in log, log
    if launcher == "toolkit train" and sent == "SIGTERM":
        assert code == EXIT_CODE
        assert "Traceback" not in log


def test_a_wrong_setting_is_above_the_signal_that_follows_it() -> None:
    """Ranks tell the launcher to end, which signals all: 75 would be started again for good."""
    assert recipes._choose_exit_code({1: EXIT_CODE, 0: 2}) == 2
    assert recipes._choose_exit_code({1: 1, 0: EXIT_CODE}) == EXIT_CODE  # failed for its absence
    assert recipes._choose_exit_code({1: 0, 0: 0}) == 0


@pytest.mark.faults
def test_a_wrong_setting_that_the_ranks_find_ends_with_2(
    tmp_path, started, tiny_llama, text_file
) -> None:
    settings = given(tiny_llama, text_file, tmp_path / "run", "--train.max_steps", "4")
    wrong = ["--optim.lr_scheduler_kwargs", "{bogus: 1}"]
    launcher = ["--accelerate_config", "cpu", "--num_processes", "2", "--max_restarts", "1"]
    port = ["--main_process_port", str(free_port())]
    process = started([*FRONT_DOOR, *settings, *wrong, *launcher, *port])
    assert process.wait(120) == 2, (tmp_path / "log").read_text()
    assert "error: " in (tmp_path / "log").read_text()


@pytest.mark.faults
def test_toolkit_train_ends_with_the_code_of_the_rank(
    tmp_path, started, tiny_llama, text_file
) -> None:
    """No traceback of the launcher stands below the line that says what is wrong."""
    (tmp_path / "recipes").mkdir()
    failing = (
        (ROOT / "recipes" / "pretrain.py")
        .read_text()
        .replace("    model.train()\n", "    __import__('os').kill(__import__('os').getpid(), 9)\n")
    )
    (tmp_path / "recipes" / "pretrain.py").write_text(failing)
    settings = given(tiny_llama, text_file, tmp_path / "run")
    command = [*FRONT_DOOR, *settings, "--accelerate_config", "cpu"]
    command += ["--main_process_port", str(free_port())]
    process = started(command)
    assert process.wait(120) == 128 + 9
    log = (tmp_path / "log").read_text()
    # Beside it, in any order, what the watchers of the ranks say; and no traceback.
    assert any("was ended by SIGKILL" in line for line in log.splitlines()[-3:]), log
    assert "Traceback" not in log
    bad = started([*command, "--data.train_files", "/nowhere"])
    assert bad.wait(120) == 1
    log = (tmp_path / "log").read_text()
    assert "error: " in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("backends", "expected"),
    [("cpu:gloo,cuda:nccl", "cuda:2"), ("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo", "cpu")],
)
def test_ranks_tell_each_other_on_the_device_where_it_has_collectives(
    monkeypatch, backends, expected
):
    monkeypatch.setattr(preemption.dist, "get_backend_config", lambda _: backends)
    accelerator = preemption.torch.accelerator
    kind = preemption.torch.device("cuda")
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: kind)
    monkeypatch.setattr(accelerator, "current_device_index", lambda: 2)
    assert str(preemption._agreement_device()) == expected
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: None)
    assert str(preemption._agreement_device()) == "cpu"
