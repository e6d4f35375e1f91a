"""Processes of a rehearsal: how they are started and killed, and the causes in their logs."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from toolkit import recipes
from toolkit.rehearsal.stages import StageError

_POLL_SECONDS = 0.01
_TIMEOUT_SECONDS = 600.0  # of one launch
# Variables of the surrounding launcher, which the new processes must not inherit.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "ACCELERATE_",
    "FSDP_",
    "TORCHELASTIC",
)

# Pattern of a call in a recipe -> the stage that a failure in that call belongs to.
_STAGE_OF_CALL = {
    r"\bhub\.check|hub\.publish": "hub",
    r"RunFolder\(": "output",
    r"assembly\.build|check_quantisation|check_usable|tokenizer|prepare_adapters": "model",
    r"prepare_data|check_prompts": "data",
    r"init_mesh|apply_fsdp": "sharding",
    r"check_before_loading": "disk",
    r"check_weights_fit|loading\.": "load",
    r"checkpoint\.(find|restore)": "resume",
    r"evaluate|answer_prompts": "evaluate",
    r"update|data\.steps|build_(optimizer|scheduler)|start_metrics": "train",
    r"checkpoint\.(save|wait)|prove_adapter": "save",
    r"export\.": "consolidate",
}
_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: (.+)$", re.MULTILINE)
_RANK = r"(?:\[rank\d+\]:\s*)?"
_RAISED = re.compile(rf"^{_RANK}([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_STATEMENT = re.compile(rf'File "[^"]*?([\w-]+\.py)", line \d+, in \w+\n\s*{_RANK}\s*(.+)')


class Launch:
    """A command that starts at once, runs in the background and writes to a log file.

    As a context manager, it kills the command's processes when the block ends. The command sees no
    GPU.

    Args:
        command: the program and its arguments.
        log: file to which the command and its output are appended.
        cache: folder for the cache of `datasets`.
        blame: name of the stage that fails if the command fails; None: find it in the log.
    """

    def __init__(self, command: list[str], log: Path, cache: Path, blame: str | None = None):
        self.log = log
        self.blame = blame
        self._start_time = time.monotonic()
        env = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
        threads = max(1, (os.cpu_count() or 1) // 2)
        env |= {
            "HF_DATASETS_CACHE": str(cache),
            "TOOLKIT_TRACEBACK": "1",
            "TMPDIR": str(log.parent),
            "CUDA_VISIBLE_DEVICES": "",
        }
        env.setdefault("OMP_NUM_THREADS", str(threads))
        with open(log, "a", encoding="utf-8") as out:
            out.write(f"$ {shlex.join(command)}\n")
            out.flush()
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=env)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` returns True; it is called several times per second.

        Raises:
            StageError: the command ended before that, or it was started more than ten minutes ago.
        """
        while not condition():
            if (code := self._process.poll()) is not None:
                if code == 0 and condition():
                    return
                raise self._failure(code)
            if time.monotonic() - self._start_time > _TIMEOUT_SECONDS:
                self.kill()
                raise StageError(f"no result within {_TIMEOUT_SECONDS:.0f} s", log=self.log)
            time.sleep(_POLL_SECONDS)

    def wait(self) -> None:
        """Wait until the command has ended without an error.

        Raises:
            StageError: the command failed, or was started more than ten minutes ago.
        """
        self.wait_for(lambda: self._process.poll() == 0)

    @property
    def running(self) -> bool:
        """True while the command runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the command and its child processes with SIGKILL, and wait until it has ended."""
        if self.running:
            parent = psutil.Process(self._process.pid)
            # Children first, because their launcher would shut them down in an orderly way.
            for process in [*parent.children(recursive=True), parent]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        self._process.wait()

    def _failure(self, code: int) -> StageError:
        """Build the error for a command that ended too early, from its exit code and log."""
        text = self.log.read_text("utf-8", "replace")
        if code == 0:
            message = "the processes ended without an error before the expected event"
            return StageError(message, log=self.log)
        stage, cause = find_cause(text)
        if cause is None:
            hint = " (perhaps out of memory)" if code in (-9, 137) else ""
            cause = f"the processes ended with exit code {code}{hint} and no message"
        return StageError(cause, self.blame or stage, self.log)


def find_cause(log: str) -> tuple[str | None, str | None]:
    """Find in a log the stage in which a launch failed, and its error message.

    Returns:
        Name of the stage, and the message. Each is None if the log does not show it.
    """
    cause = None
    if reported := _ERROR.search(log):
        cause = reported[1]
    elif raised := _RAISED.search(log):
        cause = raised[1].partition("errors.")[2] or raised[1]
    files = {"assembly.py", "start_checks.py", *(f"{name}.py" for name in recipes.NAMES)}
    statements = [text for file, text in _STATEMENT.findall(log) if file in files]
    for statement in reversed(statements):  # the innermost first
        for pattern, stage in _STAGE_OF_CALL.items():
            if re.search(pattern, statement):
                return stage, cause
    return None, cause


def recipe_command(recipe: str, config: Path, world_size: int) -> list[str]:
    """Build the `accelerate launch` command that starts a recipe on CPUs, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    options = ["--config_file", str(recipes.recipes_root() / "accelerate_configs" / "cpu.yaml")]
    options += ["--num_processes", str(world_size), "--main_process_port", str(port)]
    return [*launcher, *options, str(recipes.find_script(recipe)), "--config", str(config)]
