"""The recipes as files: find them, start them through `accelerate launch`, copy them to be edited.

A clone has them in its folders `recipes` and `accelerate_configs`. A wheel has the same folders
inside the package (setup.py).
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
_DEFAULT_PORT = 29500  # of Accelerate
_MIN_PROCESS_LIMIT = 16  # processes that any machine may run
_REFUSED = 2  # exit code of ranks that refuse a setting
_LAUNCHER_OPTIONS = {
    "--num_processes": int,
    "--num_machines": int,
    "--machine_rank": int,
    "--main_process_ip": str,
    "--main_process_port": int,
    "--gpu_ids": str,
}


def recipes_root() -> Path:
    """Find the folder that holds `recipes` and `accelerate_configs`: in the package or above it."""
    package = Path(__file__).parent
    for folder in (package / "shipped", package.parent):
        if all((folder / "recipes" / f"{name}.py").is_file() for name in NAMES):
            return folder
    raise ToolkitError(f"{package} was installed without its recipes; install the wheel, or clone")


def start_recipe(recipe: str, arguments: Sequence[str]) -> int:
    """Check a run, then start `accelerate launch` on its recipe and wait for it.

    The settings are parsed as in the recipe. Then `start_checks` raises if the files on this
    machine show that the run would fail. If the current folder has a copy of the recipe
    (`recipes/NAME.py`), that copy is started instead of the toolkit's.

    Args:
        recipe: name of a kind of run.
        arguments: CONFIG, settings as `--section.field value`, and options of the launcher.

    Returns:
        The exit code of the run; 0 if all ranks succeeded. See `_choose_exit_code`.

    Raises:
        ConfigError: a setting is wrong, or there is neither a config nor a model.
        LaunchError: the launch configuration cannot be used here.
        ToolkitError: another check failed.
    """
    parser = _build_parser(recipe)
    options, words = parser.parse_known_args(arguments)
    if {"-h", "--help"} & {*words}:
        print(parser.format_help())
        # jsonargparse begins its usage with this name.
        sys.argv[0] = parser.prog
        parse(find_kind(recipe).config, ["--help"])
    config = [] if words[:1] and words[0].startswith("-") else words[:1]
    flags = words[len(config) :]
    if not config and not any(a.startswith(("--config", "--model")) for a in flags):
        raise ConfigError(
            f"expected `{parser.prog} CONFIG`, a YAML file with settings, or --model.name_or_path; "
            f"`toolkit recipes --copy {recipe}` puts one into this folder"
        )
    settings = [*(["--config", *config] if config else []), *flags]
    cfg = parse(find_kind(recipe).config, settings)
    cfg.metrics.trackers()  # refuses those that are not installed
    if options.max_restarts < 0:
        raise ConfigError(f"--max_restarts {options.max_restarts}: expected 0 or more")
    launcher_flags = {name: getattr(options, name[2:]) for name in _LAUNCHER_OPTIONS}
    for name in ("--num_processes", "--num_machines"):
        if launcher_flags[name] is not None and launcher_flags[name] < 1:
            raise ConfigError(f"{name} {launcher_flags[name]}: expected 1 or more")
    launcher_flags["--max_restarts"] = options.max_restarts or None
    launcher = ["launch"]
    if options.accelerate_config is not None:
        launcher += ["--config_file", str(_find_launch_file(options.accelerate_config))]
    _check_paths(cfg)
    yaml = _read_launch_yaml(launcher)
    launched = yaml | {n[2:]: v for n, v in launcher_flags.items() if v is not None}
    _check_before_launch(cfg, launched, find_script(recipe))
    if _needs_port(yaml, launcher_flags):
        launcher_flags["--main_process_port"] = _find_free_port()
    for name, value in launcher_flags.items():
        launcher += [] if value is None else [name, str(value)]
    launcher += [str(find_script(recipe)), *settings]
    print(f"$ accelerate {shlex.join(launcher)}", flush=True)
    return _launch(launcher, cfg.checkpoint, options.max_restarts, yaml.get("use_cpu") is True)


def _read_launch_yaml(arguments: Sequence[str]) -> dict[str, Any]:
    """Read the Accelerate YAML that `accelerate launch` will use.

    Args:
        arguments: `launch`, optionally followed by `--config_file` and its path. A path elsewhere
            in the arguments is not found. Without a path, the user's default file is read.

    Returns:
        Content of the file; {} if it does not exist.

    Raises:
        LaunchError: the YAML is for DeepSpeed, Megatron-LM or XLA.
    """
    from accelerate.commands.config import default_config_file

    chosen = Path(arguments[2] if arguments[1:2] == ["--config_file"] else default_config_file)
    settings = read_yaml(chosen, LaunchError) if chosen.is_file() else {}
    content = settings if isinstance(settings, dict) else {}
    engine = str(content.get("distributed_type") or "")
    if engine.upper() in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise LaunchError(f"{chosen} is for {engine}; {NOT_FSDP}")
    return content


def _check_paths(cfg: Any) -> None:
    """Raise an error if the model or a data file of a run does not exist. Does not import torch.

    Raises:
        ToolkitError: the model folder does not exist, a file pattern of the data matches nothing,
            or HF_HUB_OFFLINE is set and the Hub model is not in the cache.
    """
    check_folder(cfg.model.name_or_path)
    for purpose in ("train", "eval"):
        for setting, source in list_sources(cfg.data, purpose):  # type: ignore[arg-type]
            if not source.dataset_name:
                kind_of_files(find_files(source.files, setting), setting)
    _check_cache(cfg.model.name_or_path, cfg.model.revision)


def _check_cache(name: str, revision: str | None) -> None:
    """Raise ToolkitError if HF_HUB_OFFLINE is set and the Hub model is not in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).is_dir() or name.count("/") > 1 or not constants.is_offline_mode():
        return
    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        raise ToolkitError(
            f"{name} is neither a folder here (current folder: {Path.cwd()}) nor in the cache of "
            f"the Hub ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; run `hf download "
            f"{name}` where there is a network, or unset HF_HUB_OFFLINE"
        )


def _check_before_launch(cfg: Any, launched: dict[str, Any], script: Path) -> None:
    """Raise an error if the run would fail on this machine; print which rows were checked.

    Args:
        cfg: settings of the run.
        launched: launch configuration: content of the Accelerate YAML, updated by the flags.
        script: the recipe's file.

    Raises:
        ToolkitError: the run would fail, for example because there is no GPU.
    """
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
    if line := check_start(cfg, world, kind, script):
        print(line, flush=True)


def _check_cores(processes: int) -> None:
    """Raise ConfigError if `processes` exceeds both 16 and twice the number of CPU cores."""
    cores = os.cpu_count() or 1
    limit = max(_MIN_PROCESS_LIMIT, 2 * cores)
    if processes > limit:
        raise ConfigError(
            f"{processes} processes on the CPU of this machine, which has {cores} cores: expected "
            f"at most {limit}; set --num_processes, or num_processes in the Accelerate YAML"
        )


def _needs_port(yaml: dict[str, Any], launcher_flags: dict[str, Any]) -> bool:
    """Return True if a run on one machine needs another port than Accelerate's default.

    This is the case if the default port is in use and the user set no port.
    """
    port = launcher_flags["--main_process_port"] or yaml.get("main_process_port")
    machines = launcher_flags["--num_machines"] or yaml.get("num_machines") or 1
    if port is not None or machines != 1:
        return False
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT)) == 0


def _find_free_port() -> int:
    """Return a TCP port that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _launch(arguments: list[str], cfg: CheckpointConfig, restarts: int, cpu: bool) -> int:
    """Run `accelerate` in this process; return the exit code of the run (`_choose_exit_code`).

    The ranks print their own errors. Signals are forwarded to the ranks, which save and end.
    Without that, torch's agent would kill them after 30 s, and restart ranks that ended by a
    signal.
    """
    from accelerate.commands import accelerate_cli
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in cfg.preemption_signals:
        signal.signal(getattr(signal, name), _SignalForwarder(cfg.grace_seconds))
    signals = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    for_agent = [name for name in signals if name not in cfg.preemption_signals]
    os.environ["PET_SIGNALS_TO_HANDLE"] = ",".join(for_agent)
    # Accelerate 1.15 sets this variable only if it starts a single process.
    if cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    for remaining in reversed(range(restarts + 1)):
        sys.argv = ["accelerate", *arguments]
        try:
            accelerate_cli.main()
            return 0
        except ChildFailedError as error:
            # One of several processes failed; torch's agent has restarted them already.
            failed = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            return _choose_exit_code({rank: failure.exitcode for rank, failure in failed})
        except subprocess.CalledProcessError as error:
            # A single process failed. It has no agent, so it is restarted here.
            code = _choose_exit_code({0: error.returncode})
            if code in (_REFUSED, EXIT_CODE_PREEMPTED) or not remaining:
                return code
            print(f"restart    {restarts - remaining + 1} of {restarts}", flush=True)
        except SignalException as error:
            # The ranks do not handle this signal.
            return 128 + int(error.sigval)
        except Exception as error:
            # Accelerate may raise anything if it cannot use a YAML.
            by = f" by {arguments[2]}" if arguments[1:2] == ["--config_file"] else ""
            raise LaunchError(
                f"accelerate launch cannot start{by} ({one_line(error)}); correct the file, or "
                "give another"
            ) from error
    raise AssertionError


class _SignalForwarder:
    """Signal handler that forwards a signal to the ranks, waits for them, and exits."""

    def __init__(self, grace: float) -> None:
        self._patience, self._waiting = grace + 30, False

    def __call__(self, number: int, frame: object) -> None:
        """Forward the signal to the ranks, wait, kill late ranks, and exit with the run's code."""
        ranks = psutil.Process().children()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if self._waiting:
            # This is a second signal; the handler of the first one still waits.
            return
        if not ranks:
            sys.exit(128 + number)
        self._waiting = True
        ended: list[Any] = []  # processes in the order of their end, with a `returncode`
        _, alive = psutil.wait_procs(ranks, self._patience, ended.append)
        for rank in alive:
            rank.kill()
        codes = {ranks.index(rank): rank.returncode for rank in ended}
        # A rank without a handler yet had done nothing that could be lost.
        early = {rank: EXIT_CODE_PREEMPTED for rank, code in codes.items() if code == -number}
        sys.exit(_choose_exit_code(codes | early) if not alive else 128 + signal.SIGKILL)


def _choose_exit_code(ended: dict[int, int]) -> int:
    """Choose the exit code of a run from those of its ranks; 0 if all ranks succeeded.

    If a rank refused a setting (code 2), that code wins, because it would refuse again at each
    start. The code for preemption (75) comes next, because other ranks may have failed as a
    consequence. Otherwise the first failed rank decides; a signal N becomes 128 + N and is printed.

    Args:
        ended: rank -> its exit code, in the order in which the ranks ended.
    """
    for code in (_REFUSED, EXIT_CODE_PREEMPTED):
        if code in ended.values():
            return code
    rank, code = next(((rank, code) for rank, code in ended.items() if code), (0, 0))
    if code < 0:
        print(f"toolkit: error: rank {rank} was ended by {signal.Signals(-code).name}", flush=True)
    return code if code >= 0 else 128 - code


def find_kind(name: str) -> Kind:
    """Find the kind of run called `name`.

    If the current folder has a recipe `recipes/NAME.py` that differs from the toolkit's, the kind
    is that of its settings class. The recipe may be imported to find the class.

    Raises:
        ConfigError: there is no such kind, or the recipe does not name its settings class.
    """
    script, shipped = Path("recipes", f"{name}.py"), find_shipped_kind(name)
    if not script.is_file():
        if shipped is None:
            raise ConfigError(
                f"there is no kind of run {name!r}: expected one of {', '.join(NAMES)}, or your "
                f"own recipe in {script}"
            )
        return shipped
    if shipped is not None and script.read_bytes() == (recipes_root() / script).read_bytes():
        return shipped
    settings = _find_settings_class(script)
    if settings is None and shipped is not None:
        return shipped
    if settings is None:
        raise ConfigError(
            f"expected {script} to end with `training.main(RECIPE, SETTINGS, demo=FILE)`, SETTINGS "
            "being a class of toolkit.config or one that extends it"
        )
    return kind_of(settings)


def _find_settings_class(script: Path) -> type[RunConfig] | None:
    """Find the settings class that a recipe passes to `training.main`; None if there is none.

    If that is a class of `toolkit.config`, the script is only parsed. Otherwise it is imported.
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
    """Import a recipe file as a module, which also registers its objective.

    Raises ConfigError if one of its imports fails.
    """
    spec = importlib.util.spec_from_file_location(f"recipe_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # jsonargparse looks up the types of the settings in this module.
    sys.modules[spec.name] = module
    # The recipe may import files next to it, as when it is started.
    sys.path.insert(0, str(script.parent.absolute()))
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
    """Read the config of a run whose kind may not be known.

    The kind is `name`, or else the `kind` in the file, or else the only kind that accepts the
    file's settings. If several kinds accept them, the format of the training rows decides. If no
    rows can be read, it is the first of those kinds.

    Args:
        file: a YAML file.
        settings: `--section.field VALUE` arguments, which override the file.
        name: name of the kind; None: find it.
        remote: also read rows from the Hub to find the kind.

    Returns:
        (kind, config, note). The note says how the kind was chosen; it is None if the kind was
        given or only one kind accepts the settings.

    Raises:
        ConfigError: no kind accepts the file's settings, or the kind is unknown.
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
    # Of the kinds with the same rows, a file without a section of the later one means the first:
    # distillation without a teacher is fine-tuning.
    first_by_rows = {cfg.rows: name for name, cfg in reversed(configs.items())}
    configs = {name: cfg for name, cfg in configs.items() if first_by_rows[cfg.rows] == name}
    if len(configs) == 1:
        return kinds[name := next(iter(configs))], configs[name], None
    name = _find_kind_of_rows(configs, remote)
    reason = ", since its rows are of that kind" if name in configs else ""
    name = name if name in configs else next(iter(configs))
    title = kinds[name].title
    note = f"read as a config of {title}{reason}; add `kind: {name}` to {file} to choose it"
    return kinds[name], configs[name], note


def _find_kind_of_rows(configs: Mapping[str, Any], remote: bool) -> str:
    """Find the kind of run whose row format fits the training rows; "" if none can be read.

    Args:
        configs: name of a kind -> the config, read as that kind.
        remote: also read rows from the Hub. If False and a source is on the Hub, the result is "".
    """
    from toolkit.data.row_formats import find_row_format
    from toolkit.data.sources.rows import load_sources

    formats = {name: find_row_format(cfg.rows) for name, cfg in configs.items()}
    # The order matters, because fine-tuning accepts pairs and documents as examples, too: documents
    # first, then later kinds before earlier ones.
    names = [*reversed(formats)]
    names.sort(key=lambda name: not formats[name].is_documents)
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


def find_script(recipe: str) -> Path:
    """Return the file of a recipe: in the current folder if it is there, or else in the toolkit."""
    script = Path("recipes", f"{recipe}.py")
    return script if script.is_file() else recipes_root() / script


def _build_parser(recipe: str) -> argparse.ArgumentParser:
    """Build the parser for the launcher's options in the command that starts `recipe`."""
    command = find_kind(recipe).command
    parser = argparse.ArgumentParser(
        prog=f"toolkit {command}",
        usage=f"toolkit {command} CONFIG [--accelerate_config FILE] [--section.field VALUE ...]",
        description=f"Check all settings, then start recipes/{recipe}.py with accelerate launch.",
        add_help=False,
        allow_abbrev=False,
    )
    files = ", ".join(list_launch_files())
    file_help = f"Accelerate YAML, or one of {files}; without it Accelerate's own default is used"
    parser.add_argument("--accelerate_config", metavar="FILE", help=file_help)
    for name, kind in _LAUNCHER_OPTIONS.items():
        parser.add_argument(name, type=kind, help="as `accelerate launch` takes it")
    again = "restart up to this many times if a rank fails or is killed, from the newest checkpoint"
    parser.add_argument("--max_restarts", type=int, default=0, help=again)
    return parser


def list_launch_files() -> dict[str, Path]:
    """Map the name of each Accelerate YAML that comes with the toolkit to its path."""
    return {file.stem: file for file in sorted((recipes_root() / _LAUNCHERS).glob("*.yaml"))}


def _find_launch_file(name: str) -> Path:
    """Find an Accelerate YAML by its path, or by its name in the toolkit.

    Raises:
        ConfigError: there is no such file or name.
    """
    file = Path(name) if Path(name).is_file() else list_launch_files().get(name)
    if file is None:
        near = difflib.get_close_matches(name, list_launch_files(), n=1)
        names = ", ".join(list_launch_files()) + (f"; did you mean {near[0]}?" if near else "")
        raise ConfigError(f"--accelerate_config {name} is no file, and none of {names}")
    return file


def describe_recipes() -> list[str]:
    """Format one line for each recipe, Accelerate YAML and ready config of the toolkit."""
    lines = []
    for name in NAMES:
        text = (recipes_root() / "recipes" / f"{name}.py").read_text("utf-8")
        doc = ast.get_docstring(ast.parse(text)) or ""
        lines.append(f"{name:<12}{doc.splitlines()[0]}")
    for name, file in list_launch_files().items():
        lines.append(f"{name:<12}{_LAUNCHERS}/{file.name}: {_read_title(file)}")
    lines += ["", "Ready configs, which --copy puts into recipes/configs:"]
    for file in sorted((recipes_root() / "recipes/configs").glob("*.yaml")):
        lines.append(f"  {file.stem:<27}{_read_title(file)}")
    return lines


def _read_title(file: Path) -> str:
    """Return the first sentence of the comment in the first line of a YAML file."""
    first = file.read_text("utf-8").splitlines()[0].lstrip("# ")
    return re.split(r"[.:]$|\. ", first)[0]


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe, all ready configs and the Accelerate YAMLs into the folder `target`.

    The copies keep their relative paths, which the commands in the documentation use.

    Returns:
        The paths of the copies.

    Raises:
        ConfigError: there is no such recipe.
        ToolkitError: a file exists already and differs. In this case nothing is copied.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no recipe {name!r}; there are {', '.join(NAMES)}")
    source = recipes_root()
    files = [source / "recipes" / f"{name}.py"]
    for folder in ("recipes/configs", _LAUNCHERS):
        files += sorted(file for file in (source / folder).rglob("*") if file.is_file())
    pairs = {file: target / file.relative_to(source) for file in files}
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
