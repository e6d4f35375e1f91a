"""Chat templates run apart: in processes that a runaway template can only end, not hang or fill.

Owns those processes and their number. Refuses to know tokenizers, examples, and what a process does
(`template_worker.py`).

[Note: limits on templates]
A chat template comes with a checkpoint and is a program. Jinja's sandbox, which transformers uses,
keeps it from files and attributes, but not from looping for ever or filling the memory; and a
signal handler or a thread cannot stop one call that computes for an hour (`9 ** 9 ** 9`). So
templates run in processes of their own, which the kernel limits: CPU time for each conversation
(`RLIMIT_CPU`: on a busy machine a template gets no less of it), memory (`RLIMIT_AS`, where the
system has it), no file may grow. When one dies, the conversation that it worked at is told apart,
and the next one gets a new process. This works from any thread and any kind of worker process.

A conversation always renders the same: `strftime_now`, with which templates print today's date,
tells a fixed day, and `random` is seeded. Else the tokens of a run would depend on the day on which
it was started, or resumed.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from toolkit.data.chat import template_worker
from toolkit.data.chat.template_worker import out_of_bounds
from toolkit.data.sources.row_values import BadRow
from toolkit.errors import DataError

SECONDS = 10
"""CPU time that the renderings of one conversation may take."""

MEMORY = 1 << 30
"""Bytes that a process may need beyond what it starts with."""

_PATIENCE = 30
"""Times SECONDS on the clock, after which a process that uses no CPU time either is given up."""

_BATCH = 16
"""Conversations that a process gets at a time."""


@dataclass(frozen=True)
class Template:
    """A chat template and what every rendering with it gets.

    Attributes:
        text: the Jinja text.
        variables: the tokenizer's special tokens by name.
        specials: special tokens, as text.
    """

    text: str
    variables: dict[str, Any]
    specials: list[str]

    @cached_property
    def key(self) -> str:
        """A name for it, made of its content."""
        content = json.dumps([self.text, self.variables, self.specials])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


class Renderers:
    """Processes that render conversations and find the assistant's turns.

    `run(template, jobs)` gives a result or a BadRow for each job, in order; the results are the
    same for any number of processes. A copy in a forked process starts its own. Starting one takes
    about a second; it ends with this object, or with the process that made it.

    Args:
        processes: how many.
        seconds: CPU time for a conversation.
        memory: bytes beyond those at the start.
    """

    def __init__(self, processes: int = 1, *, seconds: int = SECONDS, memory: int = MEMORY) -> None:
        self._limits = {"seconds": seconds, "memory": memory}
        self._count = processes
        self._processes: list[_Process] = []
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": [], "_owner": 0}

    def run(
        self, template: Template, jobs: Sequence[dict[str, Any]]
    ) -> list["dict[str, Any] | BadRow"]:
        """Render conversations; see `template_worker.Work.one` for what a job and a result hold.

        Raises:
            DataError: a process cannot be started, or the template is no template.
        """
        if os.getpid() != self._owner:
            self._processes, self._owner = [], os.getpid()
        batches = [jobs[at : at + _BATCH] for at in range(0, len(jobs), _BATCH)]
        while len(self._processes) < min(self._count, len(batches)):
            self._processes.append(_Process(self._limits))
        if len(batches) <= 1 or self._count == 1:
            return [r for batch in batches for r in self._processes[0].run(template, batch)]
        free = list(self._processes)

        def run(batch: Sequence[dict[str, Any]]) -> list[dict[str, Any] | BadRow]:
            process = free.pop()
            try:
                return process.run(template, batch)
            finally:
                free.append(process)

        with ThreadPoolExecutor(len(free)) as pool:
            return [r for results in pool.map(run, batches) for r in results]

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        if os.getpid() == self._owner:
            for process in self._processes:
                process.end()
        self._processes = []


class _Process:
    """One process, started anew after it died."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._child: _Child | None = None

    def run(
        self, template: Template, jobs: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any] | BadRow]:
        results: list[dict[str, Any] | BadRow] = []
        while len(results) < len(jobs):
            self._child = self._child or _Child(self._limits)
            try:
                results += self._child.run(template, jobs[len(results) :])
            except _Died as died:
                self.end()
                results += [*died.results, out_of_bounds(str(died))]
            except BaseException:
                self.end()  # answers to this batch may still be on their way
                raise
        return results

    def end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


class _Died(Exception):
    """The process ended before the batch did; the conversation after `results` was its last."""

    def __init__(self, why: str, results: list[dict[str, Any] | BadRow]) -> None:
        super().__init__(why)
        self.results = results


class _Child:
    """The operating system's side of a process: its pipe, its death."""

    def __init__(self, limits: dict[str, int]) -> None:
        self._limits = limits
        self._known: set[str] = set()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, `_bury` closes it
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", template_worker.__name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        self._end = weakref.finalize(self, _bury, self._process, self._pipe, self._log, os.getpid())
        self._send(limits)
        answer = self._receive(None)
        if answer is None or "error" in answer:
            said = answer["error"] if answer else f"it {self._cause_of_death()}"
            self.end()
            raise DataError(f"the process for chat templates does not start: {said}")

    def run(
        self, template: Template, jobs: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any] | BadRow]:
        new = template.key not in self._known
        self._known.add(template.key)
        self._send({"key": template.key, "new": asdict(template) if new else None, "jobs": jobs})
        results: list[dict[str, Any] | BadRow] = []
        while len(results) < len(jobs):
            answer = self._receive(self._limits["seconds"] * _PATIENCE)
            if answer is None:
                raise _Died(self._cause_of_death(), results)
            if "error" in answer:
                raise DataError(f"the chat template cannot be used: {answer['error']}")
            bad = "reason" in answer
            results.append(BadRow(answer["said"], answer["reason"]) if bad else answer)
        return results

    def _send(self, value: Any) -> None:
        data = json.dumps(value, default=_placeholder).encode()
        try:
            self._pipe.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # it died; `_receive` meets the end of the pipe

    def _receive(self, seconds: float | None) -> dict[str, Any] | None:
        try:
            if not self._pipe.poll(seconds):
                self._process.kill()
                return None
            return json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def _cause_of_death(self) -> str:
        """Say why it ended, as the predicate of a sentence on the template."""
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return f"took more than {self._limits['seconds']} s of computing"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"ended its process ({lines[-1][:300] if lines else f'exit status {status}'})"

    def end(self) -> None:
        self._end()


def _bury(process: subprocess.Popen, pipe: Connection, log: Any, owner: int) -> None:
    pipe.close()
    log.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """Return what the process needs to find Python's packages; no token, no setting comes along."""
    root = str(Path(__file__).resolve().parents[3])
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    paths = dict.fromkeys([root, *filter(None, sys.path)])
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _placeholder(value: Any) -> str:
    """Return what transformers shows templates of a value that is not plain."""
    return f"<{type(value).__name__}>"
