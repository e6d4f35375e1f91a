"""Accelerate: which processes a run has, their device, their random state, their batches.

The only file that imports `accelerate`, which never sees the model: sharding is
`toolkit.sharding`'s alone.
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
# Of training's own collectives; what waits for one rank's work has a day (`ranks`).
# The first step compiles, each rank at its own pace; `collect_garbage` then sets another.
_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=15)
# A process that has nothing to add waits so long for the one that speaks for its machine.
_LET_SPEAK = datetime.timedelta(seconds=10)
# A run that failed waits so long for the checkpoint that was being written behind it.
_LET_FINISH = datetime.timedelta(minutes=5)
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")  # where schedulers name a job


@dataclass(frozen=True)
class Run:
    """The processes of this run, as one of them sees them."""

    accelerator: Accelerator
    device: torch.device
    rank: int
    world_size: int
    at_end: ExitStack = field(default_factory=ExitStack)
    """What is closed when the run ends, well or not."""
    job: str = ""
    """The scheduler's name of it, where there is one."""
    place: network.Location = network.ALONE
    """Where this process is among the others."""

    log = staticmethod(ranks.log_once)

    def loader(
        self,
        dataset: Dataset,
        batches: Iterable[list[int]] | None = None,
        workers: int = 0,
        collate_fn: Callable[[list], Any] | None = None,
    ) -> Any:
        """Return Accelerate's loader, whose batches are on this rank's device.

        `batches` are this rank's samples. Without them the data set yields its batches itself;
        reading ahead takes one worker, more would each read everything.
        """
        by_itself = batches is None
        loader = DataLoader(
            dataset,
            batch_size=None if by_itself else 1,
            batch_sampler=batches,
            num_workers=min(workers, 1) if by_itself else workers,
            generator=torch.Generator(),  # an iterator draws a seed, not from dropout's generator
            collate_fn=collate_fn,
            pin_memory=self.device.type != "cpu",
        )
        return prepare_data_loader(
            loader,
            self.device,
            num_processes=1,  # what is given is this rank's already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            non_blocking=True,
        )


def read_accelerate_settings() -> dict[str, Any]:
    """Return an Accelerate FSDP YAML as dotted settings, defaults for `config.parse`; what it asks
    for in vain is a note on stderr. Call it before `start`, and once: it takes the YAML out of the
    environment. LaunchError: another engine, float16, or a value that is none.
    """
    launchers.adopt_launcher_variables()
    found, notes = accelerate_yaml.translate(os.environ)
    _take_yaml(notes)
    return found


@contextmanager
def start(*, deterministic: bool = False, connect_seconds: float | None = None) -> Iterator[Run]:
    """Bring up the processes of the run, and take the process group down after a good end.

    Works under `accelerate launch`, `torchrun` and plain `python` (one process, in a group too).
    `deterministic`: only operations that give the same bits each time. `connect_seconds`: as
    `train.connect_seconds`. LaunchError: processes that are too few, too many for the devices, or
    do not meet; a YAML for another engine.
    """
    launchers.adopt_launcher_variables()
    unread = "fsdp_config of the Accelerate YAML is not read by this program (launch.read_accelerate_settings())"
    _take_yaml([unread] if accelerate_yaml.is_fsdp(os.environ) else [])
    rank, world = launchers.read_rank_and_world_size()
    device.prepare_environment(deterministic=deterministic)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder, for a report
    cpu = _uses_cpu(rank, world)
    if not cpu and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        device.choose_device_index(
            int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        )
    place = _connect(rank, world, cpu, connect_seconds)
    if rank or not sys.stderr.isatty():
        datasets.disable_progress_bars()  # one set of bars, and none in a log
    try:
        accelerator = Accelerator(cpu=cpu, mixed_precision="no")
        if accelerator.num_processes != world or accelerator.process_index != rank:
            raise LaunchError(
                f"the launcher started process {rank} of {world}, Accelerate sees "
                f"{accelerator.process_index} of {accelerator.num_processes}; use a file of "
                "accelerate_configs/"
            )
        job = next((os.environ[name] for name in _JOBS if name in os.environ), "")
        run = Run(accelerator, accelerator.device, rank, world, job=job, place=place)
        device.limit_compile_workers(place.sharers)
        attention = device.prefer_cudnn_attention(run.device, deterministic=deterministic)
        with attention, device.restore_garbage_collection(), run.at_end:
            yield run
        background.wait()
    except BaseException:
        # A checkpoint in flight gets the time to become whole; a second Ctrl-C ends the wait.
        try:
            background.wait(_LET_FINISH.total_seconds())
        except Exception as error:
            if not ranks.is_peer_loss(error):
                _print_error(error)
        # Taking NCCL down waits for the other ranks, which may wait for this one in a collective:
        # a rank that fails just leaves, so that the launcher ends the others.
        if world == 1 and not background.is_running():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _print_error(error: object) -> None:
    rank = launchers.read_rank_text()
    where = f"[rank {rank}] " if rank != "0" else ""
    print(f"{where}error: {error}", file=sys.stderr, flush=True)


def main(recipe: Callable[[Any, Run], None], settings_class: type, *, demo: Path) -> None:
    """Parse the command line, bring up the processes, run `recipe` on each; the end of a program.
    `demo`: the config where neither --config nor a model is given.
    """

    def run_recipe() -> None:
        launchers.adopt_launcher_variables()
        own = any(a.startswith(("--config", "--model")) for a in sys.argv[1:])
        # What --help and --print_config ask every process for is shown once.
        with redirect_stdout(sys.stdout if os.environ.get("RANK", "0") == "0" else io.StringIO()):
            cfg = parse(
                settings_class,
                default_file=None if own else demo,
                defaults=read_accelerate_settings(),
            )
        cfg.metrics.trackers()  # all are installed
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
            run.log(network.format_restart(), network.format_hosts(run.place, run.world_size), slow)
            shared = device.check_loader_shared_memory(run.place.here, cfg.data.num_workers)
            if shared and run.place.local == 0:
                ranks.print_line(shared)
            if cfg.sharding.cpu_offload:
                run.log(device.set_host_threads(run.place.sharers))
            watchdog.start(cfg.train.hang_seconds, Path(cfg.output_dir), background.is_running)
            if not own:
                run.log(f"no --config and no model given: running the demo's config, {demo}")
                if not Path(cfg.model.name_or_path).is_dir():
                    raise LaunchError(
                        f"the demo's model {cfg.model.name_or_path} is not here ({Path.cwd()}): "
                        "start in the toolkit's clone, fine-tuning after `make demo`; or give "
                        "--model.name_or_path or --config"
                    )
            recipe(cfg, run)

    run_program(run_recipe)


def run_program(main: Callable[[], None]) -> None:
    """Run `main` as a program: a `ToolkitError` ends it with one line on stderr, exit code 1; 2 for
    a configuration that cannot be read. Where all ranks fail alike, one of them says so.
    """
    code = 0
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        code, why = _explain(error)
        watchdog.report_exit(
            code, why
        )  # before what the frames hold is closed, which may take long
    _leave(code)
    if code:
        sys.exit(code)


def _explain(error: BaseException) -> tuple[int, str]:
    """Say why a run ends; return its exit code, and what the watchdog is to say of it."""
    if isinstance(error, preemption.Preempted):
        return preemption.choose_exit_code(), ""
    if isinstance(error, KeyboardInterrupt):
        return 130, ""
    if isinstance(error, torch.OutOfMemoryError):
        _print_error(
            f"{str(error).strip().splitlines()[0]} Lower train.per_device_train_batch_size (with "
            "more gradient_accumulation_steps the global batch stays), or set "
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
    _tell_launcher(error)
    before_ranks_met = isinstance(error, ConfigError | LaunchError)
    # Before the ranks know each other each machine speaks for itself.
    quiet = before_ranks_met and not launchers.is_host_speaker()
    if quiet:
        # The launcher ends all processes at the first exit, also one that has not spoken yet. At
        # the speaker's own exit it ends this one, asleep or not. Where it does not, and does not
        # tell itself what this one has to say either, this one speaks.
        time.sleep(_LET_SPEAK.total_seconds())
        quiet = "TORCHELASTIC_RUN_ID" in os.environ
    mine = not quiet and not getattr(error, "already_reported", False)
    if mine and ranks.is_first_to_report(str(error)):  # all ranks may raise the same
        _print_error(error)
        if os.environ.get("TOOLKIT_TRACEBACK"):
            traceback.print_exc()
    return 2 if isinstance(error, ConfigError) else 1, ""


def _tell_launcher(error: ToolkitError) -> None:
    """Give the elastic agent the message, with which its own traceback then ends."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": str(error), "timestamp": int(time.time())}
        Path(file).write_text(json.dumps(content), "utf-8")


def _leave(code: int) -> None:
    """End a launched process here, a good one after its exit handlers, without tearing it down."""
    # Gloo's threads outlive `destroy_process_group` as long as anything holds a mesh. One that lets
    # go of a tensor while the interpreter ends wants the GIL and aborts the process (3 of some 20
    # loaded runs with torch 2.13): a finished run would be reported as failed.
    if code in (2, preemption.EXIT_CODE):  # would come again; was asked for
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
    """Seed python, numpy and torch, each rank differently: they must not drop the same units."""
    key = hashlib.sha256("/".join(map(str, (seed, rank, *more))).encode()).digest()
    random.seed(int.from_bytes(key[:8], "little"))
    numpy.random.seed(int.from_bytes(key[8:12], "little"))
    torch.manual_seed(int.from_bytes(key[16:24], "little") >> 1)


def _uses_cpu(rank: int, world: int) -> bool:
    """Return whether the run computes on the CPU: it was asked for, or there is nothing else."""
    if _flag("ACCELERATE_USE_CPU"):
        return True
    if torch.accelerator.is_available():
        kind: Any = torch.accelerator.current_accelerator()
        alone = dist.Backend.default_device_backend_map.get(kind.type, "gloo") == "gloo"
        if alone and rank == 0:  # such as Apple's
            print(f"WARNING: torch has no collectives for {kind}: training on the CPU", flush=True)
        return alone
    by_accelerate = launchers.is_started_by_accelerate()
    if by_accelerate and _accelerate_was_told_cpu():
        return True
    if by_accelerate and world > 1:
        raise build_no_gpu_error(world)
    if rank == 0:
        print(f"WARNING: torch sees no GPU ({_built()}): training on the CPU", flush=True)
    return True


def build_no_gpu_error(world: int) -> LaunchError:
    """Return the error of a launch on GPUs on a machine where torch finds none."""
    return LaunchError(
        f"accelerate launch was asked for {world} process{'es' * (world > 1)} on GPUs, and torch "
        f"sees no GPU ({_built()}); mend the driver or torch, or use accelerate_configs/cpu.yaml "
        "(--accelerate_config cpu)"
    )


def _built() -> str:
    return f"torch {torch.__version__}, built for CUDA {torch.version.cuda or '(none)'}"


def _accelerate_was_told_cpu() -> bool:
    """Whether `accelerate launch`, the parent process, was given --cpu or `use_cpu: true`."""
    # It tells its processes only where it starts one (Accelerate 1.15).
    parent = psutil.Process(os.getppid())
    arguments = parent.cmdline()
    if {"--cpu", "--use_cpu"} & {*arguments}:
        return True
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config_file", default=default_config_file)
    file = Path(parent.cwd(), parser.parse_known_args(arguments)[0].config_file)
    settings = parsing.read_yaml(file, LaunchError) if file.is_file() else None
    return isinstance(settings, dict) and settings.get("use_cpu") is True


def _connect(rank: int, world: int, cpu: bool, seconds: float | None) -> network.Location:
    """Create the default process group, where there is none, and let everything connect that step 1
    needs; return this process's place. LaunchError: they do not meet, or what they meet over does
    not connect them in time.
    """
    if dist.is_initialized():  # by the program itself
        machines, local = ranks.node_indices(), launchers.read_local_rank()[0]
        before = machines[:rank].count(machines[rank])
        place = network.Location(before if local is None else local, ranks.local_world_size())
        if not cpu:
            _bind(place)
        return place
    master = os.environ.get("MASTER_ADDR")
    try:
        if world == 1 and master is None:
            store: dist.Store = dist.HashStore()
        else:
            store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=_RENDEZVOUS_TIMEOUT))
            store.set_timeout(_RENDEZVOUS_TIMEOUT)
            store = network.scope_store_to_start(store, rank, world, _RENDEZVOUS_TIMEOUT)
        place = network.exchange_locations(store, rank, world, nccl=not cpu)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"process {rank} of {world} did not meet the others at {master}:"
            f"{os.environ.get('MASTER_PORT')}: {str(error).strip().splitlines()[0]}; every node "
            "must reach main_process_ip and main_process_port, and start with its own machine_rank"
        ) from error
    if "RANK" in os.environ:  # as torchrun says it, for others that look there
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(place.local), str(place.here)
    network.prepare_sockets(world, place.here, master, place.master)
    bound = None
    if not cpu:
        bound = _bind(place)
        mine = device.identify_device(bound, rank)
        network.exchange_and_decide(
            store, "device", mine, device.refuse_shared_devices, rank, world
        )
    network.connect(store, rank, world, place, bound, _COLLECTIVE_TIMEOUT, seconds)
    return place


def _bind(place: network.Location) -> torch.device:
    """Make this process's accelerator the current one; return it."""
    index = device.choose_device_index(place.local, place.here)
    torch.accelerator.set_device_index(index)
    if place.local == 0 and (warning := device.check_nccl_shared_memory(place.here)):
        print(warning, flush=True)
    return torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]


def _take_yaml(notes: list[str]) -> None:
    """Refuse another engine's YAML; print notes, once; unset the variables that are translated."""
    for engine in ("DeepSpeed", "Megatron_LM"):
        if _flag(f"ACCELERATE_USE_{engine.upper()}"):
            raise LaunchError(f"the launch configuration is for {engine}; {NOT_FSDP}")
    for note in notes if os.environ.get("RANK", "0") == "0" else []:
        print(f"note: {note}", file=sys.stderr, flush=True)
    for name in [n for n in os.environ if accelerate_yaml.is_translated(n)]:
        del os.environ[name]


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")
