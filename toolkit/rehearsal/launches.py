"""Processes of a rehearsal: started as users start them, watched, killed; the cause in a log."""

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

_POLL = 0.01  # seconds
_LONGEST = 600.0  # seconds of one launch
_FOREIGN = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "ACCELERATE_", "FSDP_", "TORCHELASTIC")

# What a recipe calls -> the stage that a failure in it belongs to.
_CALLS = {
    r"\bhub\.check|hub\.publish": "hub",
    r"RunFolder\(": "output",
    r"assembly\.build|check_quantisation|check_usable|tokenizer|prepare_adapters": "model",
    r"prepare_data|check_prompts": "data",
    r"init_mesh|apply_fsdp": "sharding",
    r"check_before_loading|check_disk": "disk",
    r"check_fits|loading\.": "load",
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
    """A command that runs in the background, its output in `log`; as a context it ends with it.

    `blame`: the stage that a failure belongs to; None: what its log shows that the recipe called.
    """

    def __init__(self, command: list[str], log: Path, cache: Path, blame: str | None = None):
        self.log, self.blame, self._begun = log, blame, time.monotonic()
        env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
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

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Return when `happened`; StageError where the processes ended before, or take too long."""
        while not happened():
            if (code := self._process.poll()) is not None:
                if code == 0 and happened():
                    return
                raise self._failure(code)
            if time.monotonic() - self._begun > _LONGEST:
                self.kill()
                raise StageError(f"nothing came of it in {_LONGEST:.0f} s", log=self.log)
            time.sleep(_POLL)

    def finish(self) -> None:
        """Wait for a good end."""
        self.wait_for(lambda: self._process.poll() == 0)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End all processes at once, by SIGKILL."""
        if self.running:
            parent = psutil.Process(self._process.pid)
            # Children first: their launcher would end them politely.
            for process in [*parent.children(recursive=True), parent]:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        self._process.wait()

    def _failure(self, code: int) -> StageError:
        text = self.log.read_text("utf-8", "replace")
        if code == 0:
            return StageError("it ended well, but without doing what was waited for", log=self.log)
        stage, cause = cause_in(text)
        if cause is None:
            killed = " (perhaps for its memory)" if code in (-9, 137) else ""
            cause = f"the processes ended with exit code {code}{killed} and no message"
        return StageError(cause, self.blame or stage, self.log)


def cause_in(log: str) -> tuple[str | None, str | None]:
    """Return the stage that a launch failed in, where its log shows that, and the clear line."""
    said, raised = _ERROR.search(log), _RAISED.search(log)
    cause = said[1] if said else raised[1].partition("errors.")[2] or raised[1] if raised else None
    files = {"assembly.py", *(f"{name}.py" for name in recipes.NAMES)}
    statements = [text for file, text in _STATEMENT.findall(log) if file in files]
    for statement in reversed(statements):  # the innermost first
        for pattern, stage in _CALLS.items():
            if re.search(pattern, statement):
                return stage, cause
    return None, cause


def recipe_command(recipe: str, config: Path, world: int) -> list[str]:
    """Return the command that starts a recipe on `world` CPU processes, as users start it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    options = ["--config_file", str(recipes.root() / "accelerate_configs" / "cpu.yaml")]
    options += ["--num_processes", str(world), "--main_process_port", str(port)]
    return [*launcher, *options, str(recipes.script_of(recipe)), "--config", str(config)]
