"""Launch a run with Accelerate: processes, devices, random state, data loaders and exit codes.

Accelerate never sees the model: only `toolkit.sharding` shards it.
"""

import argparse
import atexit
import datetime
import hashlib
import io
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy
import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.config import default_config_file
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset

from toolkit import parsing, ranks
from toolkit.config import accelerate_yaml, parse
from toolkit.errors import NOT_FSDP, ConfigError, LaunchError, ToolkitError, one_line
from toolkit.training import background, device, launchers, network
from toolkit.training.guards import preemption, watchdog

# Nodes of one job may start minutes apart.
_RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
# For the collectives of training. It must allow for the first step, which each rank compiles at its
# own pace; `watchdog.set_activity` then sets another timeout. Collectives that wait for the work of
# one rank have a day (`ranks`).
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)
# A failing process waits so long for the one that prints for its machine.
_SPEAKER_TIMEOUT = datetime.timedelta(seconds=10)
# A run that failed waits so long for a checkpoint that is being written in the background.
_SAVE_TIMEOUT = datetime.timedelta(minutes=5)
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # in which schedulers name a job


@dataclass(frozen=True)
class Run:
    """The processes of a run, as one of them sees them: its rank, device and location."""

    accelerator: Accelerator
    device: torch.device
    rank: int
    world_size: int
    at_end: ExitStack = field(default_factory=ExitStack)
    """Contexts that are closed when the run ends, also after an error."""
    job: str = ""
    """The scheduler's name of the job; empty without a scheduler."""
    location: network.Location = network.SINGLE
    """The position of this process among hosts and processes."""

    log = staticmethod(ranks.log_once)

    def loader(
        self,
        dataset: Dataset,
        batches: Iterable[list[int]] | None = None,
        workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
    ) -> Any:
        """Build a data loader with Accelerate that puts batches on this rank's device.

        Args:
            dataset: the samples, or an iterable data set.
            batches: indices of this rank's samples for each batch. None: `dataset` yields complete
                batches. In this case at most one worker is used, since each would read all data.
            workers: number of worker processes.
            collate_fn: combines a list of samples to a batch.
        """
        yields_batches = batches is None
        loader = DataLoader(
            dataset,
            batch_size=None if yields_batches else 1,
            batch_sampler=batches,
            num_workers=min(workers, 1) if yields_batches else workers,
            # An iterator draws a seed, which must not advance the generator of dropout.
            generator=torch.Generator(),
            collate_fn=collate_fn,
            pin_memory=self.device.type != "cpu",
        )
        return prepare_data_loader(
            loader,
            self.device,
            # The batches are already those of this rank, so Accelerate must not divide them.
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            non_blocking=True,
        )


def read_accelerate_settings() -> dict[str, Any]:
    """Read the settings of an Accelerate FSDP YAML from the environment of `accelerate launch`.

    Call it once, before `start`, because it removes the YAML's variables from the environment. Rank
    0 prints a note to stderr for each key that has no effect.

    Returns:
        Dotted setting -> value, to be passed to `config.parse` as `defaults`. Empty without a YAML.

    Raises:
        LaunchError: the YAML is for another engine or for float16, or a value is not valid.
    """
    launchers.adopt_launcher_variables()
    settings, notes = accelerate_yaml.translate_environment(os.environ)
    _unset_accelerate_variables(notes)
    return settings


@contextmanager
def start(*, deterministic: bool = False, connect_seconds: float | None = None) -> Iterator[Run]:
    """Connect the processes, and yield the `Run`; destroy the process group after a normal end.

    Works under `accelerate launch`, `torchrun`, srun, mpirun and plain `python` (one process).
    Collective. At the end, also after an error, it waits for a checkpoint that is written in the
    background.

    Args:
        deterministic: allow only operations that produce the same bits each time.
        connect_seconds: seconds for connecting (`train.connect_seconds`); None: 45, and more for
            many processes.

    Raises:
        LaunchError: there are more processes than devices, the processes cannot connect, or the
            launcher's settings are for another engine.
    """
    launchers.adopt_launcher_variables()
    unread = (
        "this program does not read the fsdp_config of the Accelerate YAML "
        "(launch.read_accelerate_settings())"
    )
    _unset_accelerate_variables([unread] if accelerate_yaml.is_fsdp(os.environ) else [])
    rank, world = launchers.read_rank_and_world_size()
    device.prepare_environment(deterministic=deterministic)
    # Turns on the flight recorder, for the report of a hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    cpu = _uses_cpu(rank, world)
    if not cpu and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        device.choose_device_index(
            int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        )
    location = _connect_processes(rank, world, cpu, connect_seconds)
    if rank or not sys.stderr.isatty():
        # Only one process shows progress bars, and none writes them to a log file.
        datasets.disable_progress_bars()
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="no")
        if accelerator.num_processes != world or accelerator.process_index != rank:
            raise LaunchError(
                f"the launcher started process {rank} of {world}, Accelerate sees "
                f"{accelerator.process_index} of {accelerator.num_processes}; use a file of "
                "accelerate_configs/"
            )
        job = next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), "")
        run = Run(accelerator, accelerator.device, rank, world, job=job, location=location)
        device.limit_compile_workers(location.sharers)
        attention = device.prefer_cudnn_attention(run.device, deterministic=deterministic)
        with attention, device.restore_garbage_collection(), run.at_end:
            yield run
        background.wait()
    except BaseException:
        # A checkpoint that is being written gets time to be completed. A second Ctrl-C ends this.
        try:
            background.wait(_SAVE_TIMEOUT.total_seconds())
        except Exception as error:
            if not ranks.is_peer_loss(error):
                _print_error(error)
        # Destroying NCCL's group waits for the other ranks, which may wait for this rank in a
        # collective. So a rank that fails just leaves, and the launcher ends the others.
        if world == 1 and not background.is_running():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _print_error(error: object) -> None:
    """Print an error to stderr, on ranks other than 0 with the rank as prefix."""
    rank = launchers.read_rank_text()
    where = f"[rank {rank}] " if rank != "0" else ""
    print(f"{where}error: {error}", file=sys.stderr, flush=True)


def main(recipe: Callable[[Any, Run], None], settings_class: type, *, demo: Path) -> None:
    """Run a recipe as a program: parse the command line, start the processes, and call `recipe`.

    If the run fails, the process ends with an exit code; see `run_program`.

    Args:
        recipe: function that every process calls with the config and the `Run`.
        settings_class: class of the config, such as `PretrainConfig`.
        demo: config file to use if the command line has neither --config nor --model.
    """

    def run_recipe() -> None:
        launchers.adopt_launcher_variables()
        has_config = any(a.startswith(("--config", "--model")) for a in sys.argv[1:])
        # Every process handles --help and --print_config, but only one prints.
        with redirect_stdout(sys.stdout if os.environ.get("RANK", "0") == "0" else io.StringIO()):
            cfg = parse(
                settings_class,
                default_file=None if has_config else demo,
                defaults=read_accelerate_settings(),
            )
        # Raises an error if a tracker is not installed.
        cfg.metrics.trackers()
        signals, grace = cfg.checkpoint.preemption_signals, cfg.checkpoint.grace_seconds
        with (
            preemption.listen_for_signals(signals, grace),
            start(
                deterministic=cfg.train.deterministic, connect_seconds=cfg.train.connect_seconds
            ) as run,
        ):
            slow = (
                device.check_dtype_speed(run.device, cfg.sharding.param_dtype)
                if run.rank == 0
                else ""
            )
            run.log(
                network.format_restart(), network.format_hosts(run.location, run.world_size), slow
            )
            shared = device.check_loader_shared_memory(
                run.location.local_world_size, cfg.data.num_workers
            )
            if shared and run.location.local_rank == 0:
                ranks.print_line(shared)
            if cfg.sharding.cpu_offload:
                run.log(device.set_host_threads(run.location.sharers))
            watchdog.start(cfg.train.hang_seconds, Path(cfg.output_dir), background.is_running)
            if not has_config:
                run.log(f"no --config and no model given: running the demo's config, {demo}")
                if not Path(cfg.model.name_or_path).is_dir():
                    raise LaunchError(
                        f"the demo's model {cfg.model.name_or_path} does not exist in "
                        f"{Path.cwd()}: start in the toolkit's clone (fine-tuning after `make "
                        "demo`), or pass "
                        "--model.name_or_path or --config"
                    )
            recipe(cfg, run)

    run_program(run_recipe)


def run_program(main: Callable[[], None]) -> None:
    """Run `main` as a program: turn an error into a message on stderr and an exit code.

    A `ToolkitError` is printed on one line. The exit code is 2 for a `ConfigError`, 75 after a
    signal, and usually 1 otherwise. If all ranks fail with the same message, one of them prints it.
    If a launcher started this process, the process ends here in any case. Otherwise the function
    returns if `main` succeeds.
    """
    code = 0
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        code, reason = _report_error(error)
        # Before the objects in the frames are closed, which may take long.
        watchdog.report_exit(code, reason)
    _exit_process(code)
    if code:
        sys.exit(code)


def _report_error(error: BaseException) -> tuple[int, str]:
    """Print why the run ends, unless another rank or the watchdog prints it.

    Returns:
        The exit code; and the reason that the watchdog should print, or an empty string.
    """
    if isinstance(error, preemption.Preempted):
        return preemption.choose_exit_code(), ""
    if isinstance(error, KeyboardInterrupt):
        return 130, ""
    if isinstance(error, torch.OutOfMemoryError):
        _print_error(
            f"{str(error).strip().splitlines()[0]} Lower train.per_device_train_batch_size (more "
            "gradient_accumulation_steps keep the global batch), or set "
            "sharding.activation_checkpointing: full"
        )
        return 1, ""
    if not isinstance(error, ToolkitError) and ranks.has_notice(preemption.MARK):
        return preemption.EXIT_CODE, ""
    if ranks.is_peer_loss(error):
        code = watchdog.wait_for_verdict()
        if code is None:
            _print_error(f"lost another rank: {one_line(error)}")
        return code or 1, ""
    if not isinstance(error, ToolkitError):
        traceback.print_exc()
        return 1, one_line(error)
    _write_launcher_error(error)
    is_before_connecting = isinstance(error, ConfigError | LaunchError)
    # Before the ranks are connected, one process prints for each machine.
    is_quiet = is_before_connecting and not launchers.should_print_for_host()
    if is_quiet:
        # The launcher ends all processes at the first exit, even a process that has not printed its
        # message yet. So this process waits for the speaker, at whose exit the launcher ends it. If
        # the launcher does not, and does not print this error itself either, this process prints.
        time.sleep(_SPEAKER_TIMEOUT.total_seconds())
        is_quiet = "TORCHELASTIC_RUN_ID" in os.environ
    should_print = not is_quiet and not getattr(error, "already_reported", False)
    # All ranks may raise the same error.
    if should_print and ranks.is_first_to_report(str(error)):
        _print_error(error)
        if os.environ.get("TOOLKIT_TRACEBACK"):
            traceback.print_exc()
    return 2 if isinstance(error, ConfigError) else 1, ""


def _write_launcher_error(error: ToolkitError) -> None:
    """Write an error to the file from which torch's elastic agent prints it at the end.

    Does nothing without such an agent.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": str(error), "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(content), "utf-8")


def _exit_process(code: int) -> None:
    """If a launcher started this process, end it without the interpreter's shutdown.

    Exit handlers run only if `code` is 0. With exit code 2 and after a signal, a launcher that
    would restart the rank is ended. The exit is reported to the watchdog in any case.
    """
    # Gloo's threads outlive `destroy_process_group` as long as a mesh is referenced. A thread that
    # frees a tensor during the interpreter's shutdown needs the GIL and aborts the process (3 of
    # about 20 runs under load with torch 2.13): a finished run would be reported as failed.
    if code in (2, preemption.EXIT_CODE):
        # A restart would fail in the same way, or is not wanted.
        preemption.stop_launcher()
    if "RANK" in os.environ:
        if code == 0:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        watchdog.report_exit(code)
        os._exit(code)
    watchdog.report_exit(code)


def seed_everything(seed: int, rank: int, *more: int) -> None:
    """Seed Python, NumPy and torch, differently on each rank, so that ranks draw different dropout.

    Args:
        seed: seed of the run.
        rank: this rank.
        more: further numbers on which the seed depends, such as the step.
    """
    key = hashlib.sha256("/".join(map(str, (seed, rank, *more))).encode()).digest()
    random.seed(int.from_bytes(key[:8], "little"))
    numpy.random.seed(int.from_bytes(key[8:12], "little"))
    torch.manual_seed(int.from_bytes(key[16:24], "little") >> 1)


def _uses_cpu(rank: int, world: int) -> bool:
    """Return True if the run uses the CPU, because it is configured or no accelerator is usable.

    In the latter case, rank 0 prints a warning.

    Raises:
        LaunchError: `accelerate launch` started several processes for GPUs, and there is no GPU.
    """
    if _is_flag_set("ACCELERATE_USE_CPU"):
        return True
    if torch.accelerator.is_available():
        kind: Any = torch.accelerator.current_accelerator()
        # True for an accelerator without collectives, such as Apple's.
        lacks_collectives = dist.Backend.default_device_backend_map.get(kind.type, "gloo") == "gloo"
        if lacks_collectives and rank == 0:
            print(f"WARNING: torch has no collectives for {kind}: training on the CPU", flush=True)
        return lacks_collectives
    by_accelerate = launchers.is_started_by_accelerate()
    if by_accelerate and _is_accelerate_set_to_cpu():
        return True
    if by_accelerate and world > 1:
        raise build_no_gpu_error(world)
    if rank == 0:
        print(
            f"WARNING: torch sees no GPU ({_describe_torch_build()}): training on the CPU",
            flush=True,
        )
    return True


def build_no_gpu_error(world: int) -> LaunchError:
    """Build the error for a launch of `world` processes on GPUs when torch sees no GPU."""
    return LaunchError(
        f"accelerate launch should start {world} process{'es' * (world > 1)} on GPUs, and torch "
        f"sees no GPU ({_describe_torch_build()}); repair the driver or torch, or use "
        "accelerate_configs/cpu.yaml (--accelerate_config cpu)"
    )


def _describe_torch_build() -> str:
    """Format torch's version and the CUDA version for which it was built."""
    return f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"


def _is_accelerate_set_to_cpu() -> bool:
    """Return True if `accelerate launch`, the parent process, has --cpu or `use_cpu: true`."""
    # It sets the variable only if it starts a single process (Accelerate 1.15).
    parent = psutil.Process(os.getppid())
    arguments = parent.cmdline()
    if {"--cpu", "--use_cpu"} & {*arguments}:
        return True
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config_file", default=default_config_file)
    file = Path(parent.cwd(), parser.parse_known_args(arguments)[0].config_file)
    settings = parsing.read_yaml(file, LaunchError) if file.is_file() else None
    return isinstance(settings, dict) and settings.get("use_cpu") is True


def _connect_processes(rank: int, world: int, cpu: bool, seconds: float | None) -> network.Location:
    """Connect the processes: rendezvous, default process group, and the connections of step 1.

    Also sets this process's device and, under a launcher, LOCAL_RANK and LOCAL_WORLD_SIZE. If the
    program has created a process group, that group is used. Collective.

    Args:
        rank: this rank.
        world: number of ranks.
        cpu: True if the run uses the CPU.
        seconds: seconds for connecting; None: the default of `network.create_process_group`.

    Returns:
        The location of this process.

    Raises:
        LaunchError: the processes do not find each other, cannot connect in time, or two of them
            use one device.
    """
    if dist.is_initialized():
        machines, local = ranks.node_indices(), launchers.read_local_rank()[0]
        before = machines[:rank].count(machines[rank])
        location = network.Location(before if local is None else local, ranks.local_world_size())
        if not cpu:
            _set_device(location)
        return location
    master = os.environ.get("MASTER_ADDR")
    try:
        if world == 1 and master is None:
            store: dist.Store = dist.HashStore()
        else:
            store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=_RENDEZVOUS_TIMEOUT))
            store.set_timeout(_RENDEZVOUS_TIMEOUT)
            store = network.scope_store_to_start(store, rank, world, _RENDEZVOUS_TIMEOUT)
        location = network.exchange_locations(store, rank, world, nccl=not cpu)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"process {rank} of {world} did not find the others at {master}:"
            f"{os.environ.get('MASTER_PORT')}: {str(error).strip().splitlines()[0]}; every node "
            "must reach main_process_ip and main_process_port, and have a different machine_rank"
        ) from error
    if "RANK" in os.environ:  # as torchrun says it, for others that look there
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = (
            str(location.local_rank),
            str(location.local_world_size),
        )
    network.prepare_sockets(world, location.local_world_size, master, location.master)
    bound = None
    if not cpu:
        bound = _set_device(location)
        mine = device.identify_device(bound, rank)
        network.exchange_and_decide(
            store, "device", mine, device.refuse_shared_devices, rank, world
        )
    network.create_process_group(store, rank, world, location, bound, _COLLECTIVE_TIMEOUT, seconds)
    return location


def _set_device(location: network.Location) -> torch.device:
    """Make this process's accelerator the current device, and return it.

    The first process of a host warns if there is little shared memory for NCCL.
    """
    index = device.choose_device_index(location.local_rank, location.local_world_size)
    torch.accelerator.set_device_index(index)
    if location.local_rank == 0 and (
        warning := device.check_nccl_shared_memory(location.local_world_size)
    ):
        print(warning, flush=True)
    return torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]


def _unset_accelerate_variables(notes: list[str]) -> None:
    """Remove the variables of an Accelerate YAML from the environment, so Accelerate ignores them.

    Args:
        notes: lines about the YAML, which rank 0 prints to stderr.

    Raises:
        LaunchError: the YAML is for DeepSpeed or Megatron-LM.
    """
    for engine in ("DeepSpeed", "Megatron_LM"):
        if _is_flag_set(f"ACCELERATE_USE_{engine.upper()}"):
            raise LaunchError(f"the launch configuration is for {engine}; {NOT_FSDP}")
    for note in notes if os.environ.get("RANK", "0") == "0" else []:
        print(f"note: {note}", file=sys.stderr, flush=True)
    for name in [n for n in os.environ if accelerate_yaml.is_translated(n)]:
        del os.environ[name]


def _is_flag_set(name: str) -> bool:
    """Return True if the value of an environment variable is 1, true or yes."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")
