"""The Python API for notebooks and scripts: start a run with a call, and use its results.

    import toolkit

    run = toolkit.finetune(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        data=dataset,
        output_dir="runs/tuned",
        lora={"r": 16},
        train={"max_steps": 100},
    )
    run.export("runs/tuned-merged", merge=True)

A call starts the same command as the command line, in separate processes, and prints their log.
So a failure cannot end the notebook's kernel, several GPUs work, and the kernel keeps its own GPU
memory. Stopping the cell commits a checkpoint; the same call resumes the run.
"""

import inspect
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Any

import yaml

from toolkit.config import KINDS
from toolkit.data.cached_rows import store_rows
from toolkit.errors import EXIT_CODE_PREEMPTED, ConfigError, LaunchError, ToolkitError
from toolkit.recipes import find_kind

_LAST_LINES = 20  # of a failed command, for its error
_SOURCES = ("train_files", "dataset_name", "sources")  # settings of `data` that name training data
_SOURCE_DETAILS = ("dataset_config_name", "dataset_split")
_EVAL_SOURCES = ("eval_files", "eval_sources")
_ERROR_LINE = re.compile(r"(?:toolkit: |\[rank \d+\] )?error: (.*)")
_INTERRUPTED_CODES = (0, EXIT_CODE_PREEMPTED, 130, -signal.SIGINT)  # that follow from an interrupt
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # on which a run commits a checkpoint
_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 5.0  # for the output that is left when a command has ended
_RANK_VARIABLES = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("MASTER_ADDR", "MASTER_PORT"),
    )
)


class SavedRun:
    """A run on the disk: its metrics, its checkpoints and what can be made of them.

    `toolkit.SavedRun(output_dir)` opens a run of an earlier session or of the command line.
    """

    def __init__(self, output_dir: str | os.PathLike[str], quiet: bool = False) -> None:
        """Open the run in `output_dir`.

        Args:
            output_dir: folder of the run.
            quiet: do not print the output of commands.

        Raises:
            ConfigError: the folder holds no run.
        """
        # Absolute, so that the object stays valid if the program changes its folder.
        self.path = Path(output_dir).absolute()
        self.quiet = quiet
        if not self.config_file.is_file():
            raise ConfigError(f"expected the output_dir of a run, with config.yaml: {self.path}")

    def __repr__(self) -> str:
        return f"SavedRun({str(self.path)!r})"

    @property
    def config_file(self) -> Path:
        """The saved settings. `toolkit COMMAND CONFIG_FILE` continues the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The logged lines, one dict per logged step, in their order; empty before the first."""
        from toolkit.formats.metrics_file import read_metrics

        return read_metrics(self.path)

    @property
    def checkpoint(self) -> Path | str | None:
        """The newest committed checkpoint: a path or, on an object store, a URL.

        None if there is none. `verify` checks its bytes.
        """
        from toolkit.checkpoint.commit import committed_steps
        from toolkit.checkpoint.run_folder import find_checkpoint_root

        steps = committed_steps(find_checkpoint_root(self.path))
        if not steps:
            return None
        folder = steps[max(steps)]
        return folder if isinstance(folder, Path) else str(folder)

    def export(
        self, output: str | os.PathLike[str], *, merge: bool = False, dtype: str = "auto"
    ) -> Path:
        """Export the newest checkpoint as a Hugging Face folder, or its adapter as a PEFT folder.

        Args:
            output: folder to create.
            merge: merge the adapter into its base model.
            dtype: of the weights; auto: that of the checkpoint that training started from.

        Returns:
            The folder.

        Raises:
            ToolkitError: the export failed, or the folder exists already.
        """
        flags = ["--output", str(output), "--dtype", dtype, *(["--merge"] if merge else [])]
        self._run_command("consolidate", str(self.path), *flags)
        return Path(output)

    def verify(self, export: str | os.PathLike[str] | None = None, *, logits: bool = False) -> None:
        """Prove that the checkpoints are intact or, given an export, that it holds their weights.

        Args:
            export: a folder that `export` wrote; None: verify all checkpoints of the run.
            logits: also load the export with transformers, and compare logits.

        Raises:
            ToolkitError: there is a finding; the error names the file and the tensor.
        """
        exports = [] if export is None else [str(export)]
        self._run_command("verify", str(self.path), *exports, *(["--logits"] if logits else []))

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write report.html and report.png, and return the path of the page.

        Args:
            output: folder to write into; None: that of the run.
        """
        folder = self.path if output is None else Path(output)
        self._run_command("report", str(self.path), "--output", str(folder))
        return folder / "report.html"

    def push(
        self,
        export: str | os.PathLike[str],
        repo_id: str,
        *,
        public: bool = False,
        dry_run: bool = False,
    ) -> None:
        """Verify an export and publish it on the Hugging Face Hub as one commit.

        Args:
            export: a folder that `export` wrote.
            repo_id: ORG/NAME; the repository is created, privately unless `public`.
            public: create, or push to, a public repository.
            dry_run: send nothing; print the files and the model card.

        Raises:
            ToolkitError: the export is not intact, or the Hub refuses it.
        """
        flags = ["--public"] * public + ["--dry_run"] * dry_run
        self._run_command("push", str(export), "--repo_id", repo_id, *flags)

    def _run_command(self, *arguments: str) -> None:
        """Run `toolkit ARGUMENTS`; raise ToolkitError if it fails."""
        run_command(arguments, self.quiet)


def run(
    kind: str,
    *,
    model: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    data: Any = None,
    eval_data: Any = None,
    output_dir: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    accelerate_config: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> SavedRun:
    """Train, as `toolkit COMMAND` does, and return the run. The same call resumes a stopped run.

    Args:
        kind: kind of run: pretrain, finetune, prefer, distill. `toolkit.finetune(...)` and so on
            are the same as `toolkit.run("finetune", ...)`.
        model: Hub id or folder, or the section `model` as a dict.
        data: rows to train on: a `datasets.Dataset`, a list of dicts, files or a glob, the Hub id
            of a data set, or the section `data` as a dict, whose `train_files` and `files` of a
            source may be rows too.
        eval_data: rows to evaluate on: a `datasets.Dataset`, a list of dicts, or files.
        output_dir: folder of the run.
        config: a YAML file of settings that the other arguments override. Training data of the
            call replaces the file's data sources, and `eval_data` its sources for evaluation.
        num_processes: number of processes; None: as Accelerate is configured.
        accelerate_config: an Accelerate YAML, or the name of one that the toolkit ships. None: with
            more than one process, one_node if there is a GPU, else cpu.
        quiet: do not print the log.
        **settings: other sections as dicts, such as `lora={"r": 16}`, and `seed`. None removes
            a section of `config`: `lora=None` trains all parameters.

    Returns:
        The finished run.

    Raises:
        ConfigError: a setting or the type of an argument is wrong, or there is no data.
        LaunchError: the run was stopped by a signal, after it saved a checkpoint.
        ToolkitError: the run failed; the error is the line that it printed.
    """
    kind_of_run = find_kind(kind)
    if not kind_of_run.command:
        raise ConfigError(
            f"start {kind_of_run.start_command} with `accelerate launch`: it has no command"
        )
    sections = dict(settings)
    if model is not None:
        sections["model"] = _as_section(model, "name_or_path", "model")
    if output_dir is not None:
        sections["output_dir"] = output_dir
    section = _data_section(data, eval_data)
    base = _drop_other_sources(_read_config(config), section)
    content = _to_plain(_merge(base, sections | ({"data": section} if section else {})))
    # None gives a section or `seed` its default, also if the config file sets it.
    content = {k: v for k, v in content.items() if v is not None}
    if "output_dir" not in content:
        raise ConfigError("expected output_dir, the folder of the run")
    _check_data(content)
    arguments = [] if num_processes is None else ["--num_processes", str(num_processes)]
    if accelerate_config is None and (num_processes or 1) > 1:
        accelerate_config = _choose_accelerate_config()
    if accelerate_config is not None:
        arguments += ["--accelerate_config", os.fspath(accelerate_config)]
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
        run_command([kind_of_run.command, str(file), *arguments], quiet)
    return SavedRun(content["output_dir"], quiet)


def starter(kind: str) -> Callable[..., SavedRun]:
    """Return the function that starts runs of a kind: `starter("finetune")` is `finetune`.

    Raises:
        AttributeError: the toolkit has no such kind.
    """
    if kind not in {shipped.name for shipped in KINDS}:
        raise AttributeError(f"module 'toolkit' has no attribute {kind!r}")

    @wraps(run)
    def start(**arguments: Any) -> SavedRun:
        return run(kind, **arguments)

    # For `help` and editors: the name of the function, and its arguments without `kind`.
    start.__name__ = start.__qualname__ = kind
    signature = inspect.signature(run)
    parameters = [p for name, p in signature.parameters.items() if name != "kind"]
    start.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return start


def run_command(arguments: Sequence[str], quiet: bool = False) -> None:
    """Run `toolkit ARGUMENTS` in a process and print its output as it comes.

    KeyboardInterrupt, such as the stop button of a notebook, is forwarded as SIGINT. A run then
    commits a checkpoint, and the interrupt is raised again when it has ended. SIGTERM and SIGUSR1
    are forwarded if this is the main thread and the program has no handler for them.

    Raises:
        KeyboardInterrupt: the interrupt ended the run, or it had finished. A run that failed while
            it stopped raises its error instead.
        LaunchError: the run was stopped by a signal, after it saved a checkpoint.
        ToolkitError: the command failed; the error is the line that it printed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_command_environment(),
    )
    # The thread empties the pipe also while this function ends by an exception.
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_output, args=(process, lines), daemon=True).start()
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    is_interrupted = False
    with _forward_signals(process):
        try:
            while True:
                try:
                    for line in _iterate_output(process, lines):
                        last_lines.append(line.rstrip())
                        if not quiet:
                            print(line, end="", flush=True)
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    # A run ignores a second signal that follows at once, if it got the first too.
                    is_interrupted = True
                    process.send_signal(signal.SIGINT)
        except BaseException:  # print failed, or one more interrupt in the lines above
            process.terminate()
            process.wait()
            raise
    if is_interrupted and code in _INTERRUPTED_CODES:
        raise KeyboardInterrupt
    if code == EXIT_CODE_PREEMPTED:
        raise LaunchError("the run was stopped by a signal and saved; the same call resumes it")
    if code:
        raise (ConfigError if code == 2 else ToolkitError)(_find_error(last_lines, code))


def _command_environment() -> dict[str, str]:
    """Return the environment of a command, without the variables of a launcher.

    The kernel may have been started inside of a launcher or of another run.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(("PET_", "TORCHELASTIC_"))
    }
    return variables | {"PYTHONUNBUFFERED": "1"}


def _read_output(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Put the lines that a process prints into a queue, and None at their end."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _iterate_output(
    process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]
) -> Iterator[str]:
    """Yield the lines of a process until its output ends.

    A descendant of the process may keep the output open. So this also ends `_DRAIN_SECONDS` after
    the process, with the lines that were read by then.
    """
    deadline = math.inf
    while (remaining := deadline - time.monotonic()) > 0:
        if deadline == math.inf and process.poll() is not None:
            deadline = time.monotonic() + _DRAIN_SECONDS
        try:
            line = lines.get(timeout=min(_POLL_SECONDS, remaining))
        except queue.Empty:
            continue
        if line is None:
            return
        yield line
    for _ in range(lines.qsize()):
        if (line := lines.get()) is not None:
            yield line


@contextmanager
def _forward_signals(process: subprocess.Popen[str]) -> Iterator[None]:
    """Forward SIGTERM and SIGUSR1 to a process, unless the program handles them itself.

    A scheduler sends them to the script that called the API. Python allows handlers in the main
    thread only.
    """
    numbers: list[int] = []
    if threading.current_thread() is threading.main_thread():
        numbers = [n for n in _STOP_SIGNALS if signal.getsignal(n) == signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, lambda number, _: process.send_signal(number))
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _find_error(lines: Sequence[str], code: int) -> str:
    """Return the last error that a command printed, or else its last lines."""
    for line in reversed(lines):
        if match := _ERROR_LINE.match(line):
            return match[1]
    return f"the command ended with exit code {code}; its last lines:\n" + "\n".join(lines)


# ---- Settings


def _choose_accelerate_config() -> str:
    """Return the name of the Accelerate YAML for several processes on this machine."""
    import torch

    return "one_node" if torch.accelerator.is_available() else "cpu"


def _as_section(value: Any, setting: str, section: str) -> dict[str, Any]:
    """Return a section that is a dict, or a path or name as its only setting."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str | os.PathLike):
        return {setting: os.fspath(value)}
    raise ConfigError(
        f"{section}: expected text, a path or a dict of settings, got {type(value).__name__}"
    )


def _data_section(data: Any, eval_data: Any) -> dict[str, Any]:
    """Return the section `data`, with rows in memory stored as files."""
    section: dict[str, Any] = {}
    # A DatasetDict is a Mapping too.
    if isinstance(data, Mapping) and not type(data).__module__.startswith("datasets."):
        section |= data
    elif isinstance(data, str) and _is_dataset_id(data):
        section["dataset_name"] = data
    elif data is not None:
        section["train_files"] = data
    if eval_data is not None:
        section["eval_files"] = eval_data
    for name in ("train_files", "eval_files"):
        if section.get(name) is not None:
            section[name] = store_rows(section[name], f"data.{name}")
    for name in ("sources", "eval_sources"):
        if isinstance(section.get(name), list | tuple):
            section[name] = [
                dict(source) | {"files": store_rows(source["files"], f"data.{name}[{i}].files")}
                if isinstance(source, Mapping) and source.get("files") is not None
                else source
                for i, source in enumerate(section[name])
            ]
    return section


def _drop_other_sources(base: dict[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config file without data sources that the call replaces."""
    data = base.get("data")
    if not isinstance(data, Mapping):
        return base
    names: set[str] = set()
    if any(section.get(name) is not None for name in _SOURCES):
        names.update(_SOURCES, _SOURCE_DETAILS)
    if any(section.get(name) is not None for name in _EVAL_SOURCES):
        names.update(_EVAL_SOURCES)
    return base | {"data": {k: v for k, v in data.items() if k not in names}}


def _check_data(content: dict[str, Any]) -> None:
    """Refuse settings that name no data; drop sources that are None.

    The command line trains on built-in data in this case, which a call would not want.

    Raises:
        ConfigError: no data source is set.
    """
    data = content.get("data", {})
    if isinstance(data, Mapping):
        if not any(data.get(name) for name in _SOURCES):
            raise ConfigError(
                "expected data: a datasets.Dataset, a list of dicts, files, the Hub id of a data "
                f"set, or a dict with one of {', '.join(_SOURCES)}"
            )
        content["data"] = {
            name: value
            for name, value in data.items()
            if value is not None or name not in (*_SOURCES, *_EVAL_SOURCES)
        }


def _to_plain(value: Any, setting: str = "") -> Any:
    """Copy a setting as values of YAML: paths, dtypes, enums and numpy's numbers are converted.

    Raises:
        ConfigError: a value has a type that no config file can contain.
    """
    if isinstance(value, Enum):
        return _to_plain(value.value, setting)
    if isinstance(value, Mapping):
        prefix = f"{setting}." if setting else ""
        return {_to_plain(k, setting): _to_plain(v, f"{prefix}{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry, f"{setting}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of numpy or torch
        return _to_plain(value.item(), setting)
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise ConfigError(
        f"{setting}: expected text, a number, true or false, a path, or a list or dict of them, "
        f"got {type(value).__name__}"
    )


def _is_dataset_id(text: str) -> bool:
    """Return True if `text` is ORG/NAME of the Hub: no existing path, file name or pattern."""
    if Path(text).exists() or text.startswith((".", "/", "~")) or set("*?[") & {*text}:
        return False
    return text.count("/") == 1 and not Path(text).suffix[1:].isalpha()


def _read_config(config: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Read a YAML file of settings; {} without one."""
    if config is None:
        return {}
    from toolkit.parsing import read_yaml

    return dict(read_yaml(Path(config), ConfigError) or {})


def _merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both; those of `override` win, also inside of sections."""
    merged = dict(base)
    for name, value in override.items():
        section = merged.get(name)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            value = _merge(section, value)
        merged[name] = value
    return merged
