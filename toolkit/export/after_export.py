"""Run a user's command on each export of a run, such as an evaluation, while training continues.

This file is also the program of the process that runs the commands (`python after_export.py
RESULTS`), one after the other. The process reads one JSON object per line from its standard input
and ends when the input says so. If the input closes before, the run has died or was stopped; the
process then ends the command, so that no command outlives its run. It imports the standard library
only.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"
"""File in the folder `after_export` of a run: one line per command that ended."""
_TERM_SECONDS = 10.0  # between SIGTERM and SIGKILL
_CLOSING = "close"
_LAUNCHER_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "ROLE_")
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


class ExportCommands:
    """Run a user's command on each export of a run, one at a time, in the order of the exports.

    Each command runs in a shell, in the folder in which the run was started. Its output goes to
    `after_export/step-N.log` of the run, and its exit code to `after_export/results.jsonl`. The
    variables of the launcher (RANK and the like) are removed from its environment, because a
    program that sees them would wait for other ranks.

    Args:
        command: the command; `{export}` is replaced by the export's folder, `{step}` by its step.
        run_dir: the run directory.
    """

    def __init__(self, command: str, run_dir: str | Path) -> None:
        self._command = command
        self._folder = Path(run_dir) / "after_export"
        self._process: subprocess.Popen[str] | None = None
        self._logged = 0  # bytes of the results that are reported
        self._unreported: dict[int, Path] = {}  # step -> log file of commands without a result

    def start(self, export: Path, step: int) -> str:
        """Queue the command on an export, and return the log line.

        It starts at once if no other command runs. The first call starts the process that runs the
        commands.
        """
        command = self._command.replace("{export}", str(export)).replace("{step}", str(step))
        log = self._folder / f"{export.name}.log"
        if self._process is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            results = self._folder / RESULTS
            self._logged = results.stat().st_size if results.exists() else 0
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(results)],
                stdin=subprocess.PIPE,
                text=True,
                env=_environment_of_a_user(),
                start_new_session=True,  # a signal to the run's process group is not for it
            )
        self._unreported[step] = log
        self._send({"step": step, "command": command, "log": str(log)})
        return f"after_export started on {export}; its output goes to {log}"

    def poll(self) -> list[str]:
        """Return a log line for each command that ended since the last call.

        If the process that runs the commands has ended, each command without a result gets a
        warning.
        """
        if self._process is None:
            return []
        exit_code = self._process.poll()  # before the results are read
        outcomes = self._read_new_results()
        for outcome in outcomes:
            self._unreported.pop(outcome["step"], None)
        lines = [_format_outcome(outcome) for outcome in outcomes]
        if exit_code is not None:
            lines += [
                f"WARNING: after_export of step {step} has no result: the process that runs the "
                f"commands ended with exit code {exit_code}. The output, if any, is in {log}"
                for step, log in self._unreported.items()
            ]
            self._unreported.clear()
        return lines

    def _read_new_results(self) -> list[dict[str, Any]]:
        """Read the complete lines that were added to the results file since the last call."""
        file = self._folder / RESULTS
        if not file.exists():
            return []
        with file.open("rb") as results:
            results.seek(self._logged)
            content = results.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._logged += len(complete)
        return [json.loads(line) for line in complete.splitlines()]

    def has_ended(self) -> bool:
        """Return True if the process that runs the commands has ended or was never started.

        It ends after `close`, when all queued commands are done.
        """
        return self._process is None or self._process.poll() is not None

    def close(self) -> None:
        """Let the process end after the queued commands. Returns at once; no command may follow."""
        if self._process is not None and self._process.poll() is None:
            self._send({_CLOSING: True})

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to the process that runs the commands; do nothing if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `poll` reports that this command has no result
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


def _environment_of_a_user() -> dict[str, str]:
    """Copy this process's environment without the launcher's variables, such as RANK."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def _format_outcome(result: dict[str, Any]) -> str:
    """Format the result of one `after_export` command as a log line.

    The line is a warning if the command failed, or if it was ended because the run ended.
    """
    text = f"after_export of step {result['step']}"
    log = result["log"]
    if result["exit_code"] is None:
        return f"WARNING: {text} was ended with the run; its output is in {log}"
    if result["exit_code"] != 0:
        return (
            f"WARNING: {text} failed with exit code {result['exit_code']} after "
            f"{result['seconds']:.1f} s; its output is in {log}"
        )
    return f"{text} done in {result['seconds']:.1f} s; its output is in {log}"


# ---- The process that runs the commands


def _run_commands(results: Path) -> None:
    """Run the commands that arrive on stdin one by one, and append their results to a file.

    Returns after a closing message, when the queued commands are done. If stdin ends without such a
    message, the run has died: the running command is ended and the others are not started.
    """
    commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
    running: list[subprocess.Popen[bytes]] = []
    is_orphan = threading.Event()

    def read() -> None:
        """Queue the commands from stdin until it closes; without a closing message, end them."""
        for line in sys.stdin:
            message = json.loads(line)
            if _CLOSING in message:
                commands.put(None)
                return
            commands.put(message)
        is_orphan.set()
        commands.put(None)
        for process in running:
            _end(process)

    threading.Thread(target=read, daemon=True).start()
    while (message := commands.get()) is not None and not is_orphan.is_set():
        start = time.monotonic()
        with open(message["log"], "wb") as log:
            process = subprocess.Popen(
                message["command"],
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running[:] = [process]
            if is_orphan.is_set():
                _end(process)
            code = process.wait()
        result = message | {
            "exit_code": None if is_orphan.is_set() else code,
            "seconds": round(time.monotonic() - start, 3),
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate a command and the processes that it started; kill them if they run 10 s later."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_SECONDS)
            return


if __name__ == "__main__":
    _run_commands(Path(sys.argv[1]))
