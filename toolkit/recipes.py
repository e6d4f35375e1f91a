"""The recipes as files: where they lie, started through `accelerate launch`, copied to be edited.

In a clone they are its folders `recipes` and `accelerate_configs`; a wheel has the same folders
inside of the package (setup.py).
"""

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from toolkit import config
from toolkit.config import (
    KINDS,
    CheckpointConfig,
    Kind,
    find_shipped_kind,
    kind_of,
    load,
    parse,
    saved_kind_name,
)
from toolkit.config.settings import RunConfig, check_folder
from toolkit.data.sources.files import common_file_kind as kind_of_files
from toolkit.data.sources.files import find_files, list_sources
from toolkit.errors import (
    EXIT_CODE_PREEMPTED,
    NOT_FSDP,
    ConfigError,
    LaunchError,
    ToolkitError,
    one_line,
)
from toolkit.parsing import read_yaml

NAMES = tuple(kind.name for kind in KINDS)
"""The recipes that come with the toolkit."""
_LAUNCHERS = "accelerate_configs"
_PORT = 29500  # where Accelerate lets processes meet unless told otherwise
_ALWAYS = 16  # processes that any machine may run
_REFUSED = 2  # exit code of ranks that find a setting wrong
_OF_THE_LAUNCHER = {
    "--num_processes": int,
    "--num_machines": int,
    "--machine_rank": int,
    "--main_process_ip": str,
    "--main_process_port": int,
    "--gpu_ids": str,
}


def root() -> Path:
    """Return the folder that holds `recipes` and `accelerate_configs`."""
    package = Path(__file__).parent
    for folder in (package / "shipped", package.parent):
        if all((folder / "recipes" / f"{name}.py").is_file() for name in NAMES):
            return folder
    raise ToolkitError(f"{package} was installed without its recipes; install the wheel, or clone")


def start(recipe: str, arguments: Sequence[str]) -> int:
    """Run `accelerate launch` on a recipe; return the exit code: of the first that failed.

    Settings are parsed before, as the recipe will, without torch; then what this machine's files
    show to be wrong is refused (`start_checks`). A copy of the recipe in the current folder
    (`recipes/NAME.py`) is started instead of the toolkit's own.

    Args:
        arguments: CONFIG, settings as `--section.field value`, and options of the launcher.

    Raises:
        ConfigError: a setting is wrong, or there is neither a config nor a model.
        LaunchError: the launch configuration cannot be used here.
        ToolkitError: what else the run would be refused for.
    """
    parser = _parser(recipe)
    options, given = parser.parse_known_args(arguments)
    if {"-h", "--help"} & {*given}:
        print(parser.format_help())
        sys.argv[0] = parser.prog  # by which its usage begins
        parse(find_kind(recipe).config, ["--help"])
    config = [] if given[:1] and given[0].startswith("-") else given[:1]
    flags = given[len(config) :]
    if not config and not any(a.startswith(("--config", "--model")) for a in flags):
        raise ConfigError(
            f"expected `{parser.prog} CONFIG`, a YAML file with settings, or --model.name_or_path; "
            f"`toolkit recipes --copy {recipe}` puts one into this folder"
        )
    settings = [*(["--config", *config] if config else []), *flags]
    cfg = parse(find_kind(recipe).config, settings)
    cfg.metrics.trackers()  # which are installed
    if options.max_restarts < 0:
        raise ConfigError(f"--max_restarts {options.max_restarts}: expected 0 or more")
    told = {name: getattr(options, name[2:]) for name in _OF_THE_LAUNCHER}
    for name in ("--num_processes", "--num_machines"):
        if told[name] is not None and told[name] < 1:
            raise ConfigError(f"{name} {told[name]}: expected 1 or more")
    told["--max_restarts"] = options.max_restarts or None
    launcher = ["launch"]
    if options.accelerate_config is not None:
        launcher += ["--config_file", str(_launch_file(options.accelerate_config))]
    _check_paths(cfg)
    yaml = _launch_settings(launcher)
    _refuse_early(cfg, yaml | {n[2:]: v for n, v in told.items() if v is not None})
    if _needs_port(yaml, told):
        told["--main_process_port"] = _free_port()
    for name, value in told.items():
        launcher += [] if value is None else [name, str(value)]
    launcher += [str(script_of(recipe)), *settings]
    print(f"$ accelerate {shlex.join(launcher)}", flush=True)
    return _launch(launcher, cfg.checkpoint, options.max_restarts, yaml.get("use_cpu") is True)


def _launch_settings(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the content of the Accelerate YAML that `accelerate launch` will read. LaunchError: it
    is for another engine, which Accelerate would ask to be installed.
    """
    from accelerate.commands.config import default_config_file

    chosen = Path(arguments[2] if arguments[1:2] == ["--config_file"] else default_config_file)
    settings = read_yaml(chosen, LaunchError) if chosen.is_file() else {}
    found = settings if isinstance(settings, dict) else {}
    engine = str(found.get("distributed_type") or "")
    if engine.upper() in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise LaunchError(f"{chosen} is for {engine}; {NOT_FSDP}")
    return found


def _check_paths(cfg: Any) -> None:
    """Refuse a model's folder that is not there, and files that match nothing; imports no torch."""
    check_folder(cfg.model.name_or_path)
    for what in ("train", "eval"):
        for setting, source in list_sources(cfg.data, what):  # type: ignore[arg-type]
            if not source.dataset_name:
                kind_of_files(find_files(source.files, setting), setting)
    _check_cache(cfg.model.name_or_path, cfg.model.revision)


def _check_cache(name: str, revision: str | None) -> None:
    """Raise ToolkitError if a Hub model is not in the cache while HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).is_dir() or name.count("/") > 1 or not constants.is_offline_mode():
        return
    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        raise ToolkitError(
            f"{name} is neither a folder here (current folder: {Path.cwd()}) nor in the cache of "
            f"the Hub ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; run `hf download "
            f"{name}` where there is a network, or unset HF_HUB_OFFLINE"
        )


def _refuse_early(cfg: Any, launched: dict[str, Any]) -> None:
    """Refuse what is wrong with the run before a process starts. Raises any ToolkitError."""
    import torch

    from toolkit.start_checks import check_start
    from toolkit.training import device
    from toolkit.training.launch import build_no_gpu_error

    count, machines = launched.get("num_processes"), launched.get("num_machines")
    world = count if isinstance(count, int) and count > 0 else None
    kind, cpu = "cpu", launched.get("use_cpu") is True
    if not cpu and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
        here = (world or 1) // (machines if isinstance(machines, int) and machines > 0 else 1)
        if launched.get("gpu_ids") in (None, "all"):
            device.choose_device_index(0, here)
    elif not cpu and ((world or 1) > 1 or launched.get("gpu_ids") is not None):
        raise build_no_gpu_error(world or 1)
    if kind == "cpu":
        _check_cores((world or 1) // max(1, machines if isinstance(machines, int) else 1))
    if line := check_start(cfg, world, kind):
        print(line, flush=True)


def _check_cores(processes: int) -> None:
    """Raise ConfigError if a machine without accelerators is to run far more processes than it has
    cores: they would start, and make next to no progress.
    """
    cores = os.cpu_count() or 1
    most = max(_ALWAYS, 2 * cores)
    if processes > most:
        raise ConfigError(
            f"{processes} processes on the CPU of this machine, which has {cores} cores: expected "
            f"at most {most}; set --num_processes, or num_processes in the Accelerate YAML"
        )


def _needs_port(yaml: dict[str, Any], told: dict[str, Any]) -> bool:
    """Return whether the port that Accelerate would take is in use, and nobody asked for it."""
    named = told["--main_process_port"] or yaml.get("main_process_port")
    machines = told["--num_machines"] or yaml.get("num_machines") or 1
    if named is not None or machines != 1:
        return False
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", _PORT)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _launch(arguments: list[str], cfg: CheckpointConfig, restarts: int, cpu: bool) -> int:
    """Run `accelerate` in this process; return the exit code of the rank that failed first, or 0.

    What a rank has to say it has said. Signals go to the ranks, which save and end: torch's agent
    would kill them 30 s later, and start those again that one of them stopped.
    """
    from accelerate.commands import accelerate_cli
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in cfg.preemption_signals:
        signal.signal(getattr(signal, name), _Stop(cfg.grace_seconds))
    signals = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    others = [name for name in signals if name not in cfg.preemption_signals]
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(others)
    # Accelerate tells its processes only where it starts one (1.15), and they read its command.
    if cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    for left in reversed(range(restarts + 1)):
        sys.argv = ["accelerate", *arguments]
        try:
            accelerate_cli.main()
            return 0
        except ChildFailedError as error:  # of several processes, restarted by torch's agent
            failed = sorted(error.failures.items(), key=lambda one: one[1].timestamp)
            return _exit_code({rank: failure.exitcode for rank, failure in failed})
        except subprocess.CalledProcessError as error:  # of one, which has no agent
            code = _exit_code({0: error.returncode})
            if code in (_REFUSED, EXIT_CODE_PREEMPTED) or not left:
                return code
            print(f"restart    {restarts - left + 1} of {restarts}", flush=True)
        except SignalException as error:  # one that the ranks do not listen to
            return 128 + int(error.sigval)
        except Exception as error:  # of a YAML that it cannot use Accelerate may raise anything
            by = f" by {arguments[2]}" if arguments[1:2] == ["--config_file"] else ""
            raise LaunchError(
                f"accelerate launch cannot start{by} ({one_line(error)}); correct the file, or "
                "give another"
            ) from error
    raise AssertionError


class _Stop:
    """A handler that passes signals on to the ranks, waits for them, and ends this process."""

    def __init__(self, grace: float) -> None:
        self._patience, self._waiting = grace + 30, False

    def __call__(self, number: int, frame: object) -> None:
        ranks = psutil.Process().children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if self._waiting:  # a second signal, within the first
            return
        if not ranks:
            sys.exit(128 + number)
        self._waiting = True
        ended: list[Any] = []  # in this order; psutil gives them their `returncode`
        _, alive = psutil.wait_procs(ranks, self._patience, ended.append)
        for rank in alive:
            rank.kill()
        codes = {ranks.index(rank): rank.returncode for rank in ended}
        # One that was not far enough to listen had done nothing yet.
        early = {rank: EXIT_CODE_PREEMPTED for rank, code in codes.items() if code == -number}
        sys.exit(_exit_code(codes | early) if not alive else 128 + signal.SIGKILL)


def _exit_code(ended: dict[int, int]) -> int:
    """Return the exit code of ranks that ended in this order: of the first that failed, and where
    one was stopped by a signal its own, since others may have failed for its absence. A wrong
    setting, which comes again at each start, is above all.
    """
    for code in (_REFUSED, EXIT_CODE_PREEMPTED):
        if code in ended.values():
            return code
    rank, code = next(((rank, code) for rank, code in ended.items() if code), (0, 0))
    if code < 0:
        print(f"toolkit: error: rank {rank} was ended by {signal.Signals(-code).name}", flush=True)
    return code if code >= 0 else 128 - code


def find_kind(name: str) -> Kind:
    """Return the kind of run of this name.

    A recipe in the current folder (`recipes/NAME.py`), be it an edited copy or the user's own, is
    imported to find the class of its settings.

    Raises:
        ConfigError: there is no such kind, or the recipe's settings cannot be told.
    """
    script, shipped = Path("recipes", f"{name}.py"), find_shipped_kind(name)
    if not script.is_file():
        if shipped is None:
            raise ConfigError(
                f"there is no kind of run {name!r}: expected one of {', '.join(NAMES)}, or a "
                f"recipe of your own in {script}"
            )
        return shipped
    if shipped is not None and script.read_bytes() == (root() / script).read_bytes():
        return shipped
    settings = _settings_class(script)
    if settings is None and shipped is not None:
        return shipped
    if settings is None:
        raise ConfigError(
            f"expected {script} to end with `training.main(RECIPE, SETTINGS, demo=FILE)`, SETTINGS "
            "being a class of toolkit.config or one that extends it"
        )
    return kind_of(settings)


def _settings_class(script: Path) -> type[RunConfig] | None:
    """Return the class of settings that a recipe gives to `training.main`; None if it gives none.

    A script with a class of its own, or of another module, is imported; one with a class of
    `toolkit.config` is only parsed.
    """
    nodes = list(ast.walk(ast.parse(script.read_text("utf-8"), str(script))))
    calls = (node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1)
    main = next((call for call in calls if ast.unparse(call.func) == "training.main"), None)
    name = "" if main is None else ast.unparse(main.args[1])
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "toolkit.config"]
    if any(alias.name == name and not alias.asname for n in imports for alias in n.names):
        settings = getattr(config, name, None)
    else:
        settings = getattr(_import_script(script), name, None) if name else None
    is_config = isinstance(settings, type) and issubclass(settings, RunConfig)
    return settings if is_config else None


def _import_script(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the types of its settings are looked up
    sys.path.insert(0, str(script.parent.absolute()))  # as when the recipe is started
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{script} cannot be imported to read its settings: {error}; install the package, or "
            "correct the import"
        ) from error
    finally:
        sys.path.pop(0)
    return module


def load_config(
    file: str | Path, settings: Sequence[str] = (), name: str | None = None, *, remote: bool = False
) -> tuple[Kind, Any, str | None]:
    """Read the config of a run of any kind.

    The kind is the one named, else the one that the file names (`kind`), else the only one that has
    the file's settings. If several have them, the rows of the training data decide; without rows it
    is pretraining.

    Args:
        settings: `--section.field VALUE`, which win over the file.
        name: of the kind.
        remote: read rows from the Hub, too.

    Returns:
        The kind, its settings, and a line that says how the kind was chosen where neither the file
        nor `name` says it.

    Raises:
        ConfigError: no kind has the file's settings, or the kind is unknown.
    """
    content = read_yaml(Path(file), ConfigError) if Path(file).is_file() else None
    content = content if isinstance(content, dict) else {}
    if name is None and content.get("kind"):
        name = str(content["kind"])
    if name is not None:
        kind = find_kind(name)
        return kind, load(kind.config, file, settings), None
    configs, errors = dict[str, Any](), dict[str, ConfigError]()
    kinds = {kind.name: kind for kind in map(find_kind, NAMES)}
    for name, kind in kinds.items():
        try:
            configs[name] = load(kind.config, file, settings)
        except ConfigError as error:
            errors[name] = error
    if not configs:
        raise errors[saved_kind_name(content)]
    if len(configs) == 1:
        return kinds[name := next(iter(configs))], configs[name], None
    name = _kind_of_rows(configs, remote)
    reason = ", since its rows are of that kind" if name in configs else ""
    name = name if name in configs else next(iter(configs))
    title = kinds[name].title
    note = f"read as a config of {title}{reason}; add `kind: {name}` to {file} to choose it"
    return kinds[name], configs[name], note


def _kind_of_rows(configs: Mapping[str, Any], remote: bool) -> str:
    """Find the kind of run that the training rows are for; empty if there are no rows to look at.

    Args:
        configs: name of a kind -> its config.
        remote: read rows from the Hub, too.
    """
    from toolkit.data.row_formats import find_row_format
    from toolkit.data.sources.rows import load_sources

    formats = {name: find_row_format(cfg.rows) for name, cfg in configs.items()}
    # A later kind has the more special rows: those of fine-tuning recognise pairs as well, and
    # documents too.
    names = sorted(reversed(formats), key=lambda name: not formats[name].is_documents)
    with suppress(ToolkitError):  # files that are on another machine
        for name in names:
            data = configs[name].data
            sources = [source for _, source in list_sources(data, "train")]
            if not sources or (any(s.dataset_name for s in sources) and not remote):
                return ""
            with suppress(ToolkitError):  # rows of another kind
                streamed = dataclasses.replace(data, streaming=True)
                load_sources(streamed, row_format=formats[name])
                return name
    return ""


def script_of(recipe: str) -> Path:
    """Return the file of a recipe: the current folder's copy, or the toolkit's own."""
    script = Path("recipes", f"{recipe}.py")
    return script if script.is_file() else root() / script


def _parser(recipe: str) -> argparse.ArgumentParser:
    command = find_kind(recipe).command
    parser = argparse.ArgumentParser(
        prog=f"toolkit {command}",
        usage=f"toolkit {command} CONFIG [--accelerate_config FILE] [--section.field VALUE ...]",
        description=f"Check all settings, then start recipes/{recipe}.py with accelerate launch.",
        add_help=False,
        allow_abbrev=False,
    )
    what = f"Accelerate YAML, or one of {', '.join(launch_files())}; without it Accelerate's own"
    parser.add_argument("--accelerate_config", metavar="FILE", help=f"{what} default is used")
    for name, kind in _OF_THE_LAUNCHER.items():
        parser.add_argument(name, type=kind, help="as `accelerate launch` takes it")
    again = "restart up to this many times if a rank fails or is killed, from the newest checkpoint"
    parser.add_argument("--max_restarts", type=int, default=0, help=again)
    return parser


def launch_files() -> dict[str, Path]:
    """Return name -> file of the Accelerate YAMLs that come with the toolkit."""
    return {file.stem: file for file in sorted((root() / _LAUNCHERS).glob("*.yaml"))}


def _launch_file(given: str) -> Path:
    """Return the YAML that is meant: a file, or the name of one of the toolkit's."""
    file = Path(given) if Path(given).is_file() else launch_files().get(given)
    if file is None:
        near = difflib.get_close_matches(given, launch_files(), n=1)
        known = ", ".join(launch_files()) + (f"; did you mean {near[0]}?" if near else "")
        raise ConfigError(f"--accelerate_config {given} is no file, and none of {known}")
    return file


def describe() -> list[str]:
    """Return a line on each recipe, each Accelerate YAML and each ready config."""
    lines = []
    for name in NAMES:
        text = (root() / "recipes" / f"{name}.py").read_text("utf-8")
        doc = ast.get_docstring(ast.parse(text)) or ""
        lines.append(f"{name:<12}{doc.splitlines()[0]}")
    for name, file in launch_files().items():
        lines.append(f"{name:<12}{_LAUNCHERS}/{file.name}: {_title(file)}")
    lines += ["", "Ready configs, which --copy puts into recipes/configs:"]
    for file in sorted((root() / "recipes/configs").glob("*.yaml")):
        lines.append(f"  {file.stem:<27}{_title(file)}")
    return lines


def _title(file: Path) -> str:
    """Return the first sentence of the comment at a YAML's top, whose first line holds it."""
    first = file.read_text("utf-8").splitlines()[0].lstrip("# ")
    return re.split(r"[.:]$|\. ", first)[0]


def copy(name: str, target: Path) -> list[Path]:
    """Copy a recipe, the configs and the Accelerate YAMLs into `target`, under the paths that the
    documentation's commands have; return the files. One that is there already and differs is a
    ToolkitError, before anything is written.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no recipe {name!r}; there are {', '.join(NAMES)}")
    source = root()
    found = [source / "recipes" / f"{name}.py"]
    for folder in ("recipes/configs", _LAUNCHERS):
        found += sorted(file for file in (source / folder).rglob("*") if file.is_file())
    pairs = {file: target / file.relative_to(source) for file in found}
    changed = [
        str(new)
        for old, new in pairs.items()
        if new.exists() and (not new.is_file() or new.read_bytes() != old.read_bytes())
    ]
    if changed:
        raise ToolkitError(
            f"{', '.join(changed)} is there already and differs; move it away, or copy into "
            "another folder"
        )
    for old, new in pairs.items():
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old, new)
    return list(pairs.values())
