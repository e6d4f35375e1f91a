"""What the stages of `make results` share: their setup, programs and records."""

import configparser
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "results_peers.py"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
NO_PEERS = "RESULTS_NO_PEERS"
"""Variable that `--no_peers` sets."""


def pinned_trl() -> str:
    """Return the release of TRL that the extra `bench` of setup.cfg pins."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    return setup["options.extras_require"]["bench"].strip().removeprefix("trl==")


TRL = pinned_trl()
"""The release of TRL that the stages compare with."""


class ResultsError(Exception):
    """A stage cannot run; the message is one line for the user."""


@dataclass(frozen=True)
class Setup:
    """The inputs, folders and size that all stages of a call share.

    Args:
        folder: holds the records of the stages, their runs and the rows.
        tiny: run a random model for a few steps, to test the program.
        inputs: input -> its local file or folder; see `results_inputs.find_inputs`.
        digests: input -> sha256 of its bytes.
    """

    folder: Path
    tiny: bool
    inputs: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """Folder of the rows that all sides read."""
        return self.folder / "data"

    def need(self, name: str) -> Path:
        """Return the path of an input, or raise ResultsError if it is missing."""
        if name not in self.inputs:
            raise ResultsError(f"the input {name} is missing")
        return self.inputs[name]


@dataclass(frozen=True)
class Stage:
    """One step of `make results`.

    Args:
        name: name of its record and its folder.
        title: what it measures, in a few words.
        run: does the work; returns the figures.
        settings: returns the settings that define the figures. A record with other settings is
            measured again.
        inputs: names of the inputs that it needs.
        optional: names of inputs without which a peer is not measured. Their version is a setting.
        after: stages whose runs it reads.
        minutes: estimated duration on two cores.
        peer_reason: returns why the peer cannot be measured, or None if it can. None: the stage has
            no peer.
    """

    name: str
    title: str
    run: Callable[[Setup], dict[str, Any]]
    settings: Callable[[bool], dict[str, Any]]
    inputs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    minutes: float = 0.0
    peer_reason: Callable[[Setup], str | None] | None = None


# ---- Records -------------------------------------------------------------------------------------


def stage_key(stage: Stage, setup: Setup, keys: Mapping[str, str]) -> str:
    """Return the digest of everything that defines the figures of a stage, except the code.

    A record with the peer's figures stays valid if the peer cannot be measured now. A record
    without them is measured again if it can.

    Args:
        stage: the stage.
        setup: the inputs and the size.
        keys: keys of the stages whose runs it reads.
    """
    if stage.peer_reason is None:
        return _content_key(stage, setup, keys, with_peer=None)
    key = _content_key(stage, setup, keys, with_peer=True)
    if stage.peer_reason(setup) is None:
        return key
    record = read_record(setup, stage.name)
    if record is not None and record["key"] == key:
        return key
    return _content_key(stage, setup, keys, with_peer=False)


def _content_key(
    stage: Stage, setup: Setup, keys: Mapping[str, str], *, with_peer: bool | None
) -> str:
    """Return the digest of `stage_key` for figures with or without a peer."""
    content = {
        "stage": stage.name,
        "tiny": setup.tiny,
        "settings": stage.settings(setup.tiny),
        "inputs": {name: setup.digests.get(name) for name in stage.inputs},
        "with_peer": with_peer,
        "after": {name: keys.get(name) for name in stage.after},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_record(setup: Setup, name: str) -> dict[str, Any] | None:
    """Return the record of a stage, or None if there is none."""
    file = setup.folder / f"{name}.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def write_record(setup: Setup, stage: Stage, key: str, figures: dict, seconds: float) -> None:
    """Write what a stage measured, with machine, versions and commit."""
    record = {
        "stage": stage.name,
        "key": key,
        "tiny": setup.tiny,
        "commit": current_commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "settings": stage.settings(setup.tiny),
        "inputs": {n: setup.digests.get(n) for n in (*stage.inputs, *stage.optional)},
        "machine": describe("results.py", *PACKAGES, *(["trl"] if has_trl() else [])),
        "figures": figures,
    }
    file = setup.folder / f"{stage.name}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    part.replace(file)


def current_commit() -> str:
    """Return the short commit of this checkout, with a `+` if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        # The page and its plots are written by this program.
        paths = ["toolkit", "recipes", "benchmarks"]
        status = [*git, "status", "--porcelain", "--", *paths]
        changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changes.strip() else "")


def has_trl() -> bool:
    """Return True if the TRL that the stages compare with is installed."""
    return trl_reason() is None


def trl_reason() -> str | None:
    """Return why TRL's side is not measured, or None if it is."""
    if NO_PEERS in os.environ:
        return "--no_peers was given"
    if importlib.util.find_spec("trl") is None:
        return f"TRL is not installed (pip install trl=={TRL})"
    version = importlib.metadata.version("trl")
    return None if version == TRL else f"TRL {TRL} is needed, {version} is installed"


# ---- Programs ------------------------------------------------------------------------------------


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a measured program: the CPU, without the network."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: value for name, value in os.environ.items() if name not in names}
    return variables | {
        "OMP_NUM_THREADS": str(threads),
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def launcher(world: int) -> list[str]:
    """Return the command that starts a script on `world` processes."""
    if world == 1:
        return [sys.executable]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc_per_node", str(world)]


def run_program(
    command: Sequence[str], log: Path, threads: int, cwd: Path = ROOT
) -> tuple[str, float]:
    """Run a program to its end; return its output and its seconds.

    Raises:
        ResultsError: the program failed. The message has its last error line and its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with open(log, "w") as file:
        program = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=environment(threads)
        )
    output = log.read_text("utf-8", "replace")
    if program.returncode != 0:
        raise ResultsError(f"exit code {program.returncode}: {last_error(output)} ({log})")
    return output, time.monotonic() - begun


def run_peer(
    program: str, settings: dict[str, Any], file: Path, world: int = 1, cwd: Path = ROOT
) -> Any:
    """Run a program of results_peers.py; return what it measured."""
    file.parent.mkdir(parents=True, exist_ok=True)
    inputs, output = run_file(file, "settings.json"), run_file(file, "json")
    inputs.write_text(json.dumps(settings, indent=1), "utf-8")
    command = [*launcher(world), str(PEERS), program, "--settings", str(inputs)]
    log = run_file(file, "log")
    run_program([*command, "--output", str(output)], log, threads=2 // world, cwd=cwd)
    return json.loads(output.read_text("utf-8"))


def toolkit_command(config: dict[str, Any], world: int, file: Path) -> list[str]:
    """Write the config of a run and return the command that starts it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    return [*launcher(world), f"recipes/{config['kind']}.py", "--config", str(file)]


def last_error(output: str) -> str:
    """Return the line of a program's output that most likely says why it failed.

    Only lines that name an error are returned, because other lines may show training rows.
    """
    lines = (line.strip() for line in output.splitlines())
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?(error: |[\w.]*Error: )", line)]
    return errors[-1][:300] if errors else "no line of its log names an error"


def kill_after_checkpoint(
    command: Sequence[str], log: Path, threads: int, run: Path, seconds: float
) -> int:
    """Start a run and kill it with SIGKILL after its first checkpoint.

    Returns:
        The number of checkpoints that the killed run has.

    Raises:
        ResultsError: the run ended before, or `seconds` passed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    commits = "checkpoints/step-*/COMMIT"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(threads),
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        try:
            while not any(run.glob(commits)):
                if process.poll() is not None:
                    raise ResultsError(f"the run ended before it could be killed ({log})")
                if time.monotonic() > deadline:
                    raise ResultsError(f"no checkpoint within {seconds:.0f} s ({log})")
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != -signal.SIGKILL:
        raise ResultsError(f"the run ended before it could be killed ({log})")
    return len([*run.glob(commits)])


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run; the last one of each step, in the order of steps."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    by_step = {line["step"]: line for line in map(json.loads, lines)}
    return [by_step[step] for step in sorted(by_step)]


# ---- Folders -------------------------------------------------------------------------------------


def fresh(path: Path) -> Path:
    """Remove a folder that an earlier call left; return its path."""
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def run_file(run: Path, suffix: str) -> Path:
    """Return the path of a file next to the folder of a run."""
    return run.with_name(f"{run.name}.{suffix}")
