"""Start a run on the nodes of a Ray cluster: one Ray task per node, which runs `toolkit`.

    python examples/ray_launch.py --nodes 2 --gpus_per_node 8 train llama-70b.yaml

Each task runs torchrun's launcher through `toolkit`, which starts one process per GPU of its node.
Ray only places the tasks and reports how they end. Ray Train is not used, because it would bring up
torch.distributed itself.

The nodes need the same environment and storage that all of them see, with the config, the data and
output_dir. Paths are relative to the current folder, which must exist on each node (--folder).

After SIGTERM or SIGINT to this command, the launchers get SIGTERM and forward it to the ranks. They
commit a checkpoint and end with exit code 75. The same command resumes the run.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

POLL_SECONDS = 1.0


def main() -> int:
    """Start the launchers on all nodes and wait; return the exit code of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes", type=int, required=True, help="number of nodes, one task on each"
    )
    parser.add_argument(
        "--gpus_per_node", type=int, required=True, help="0: one process on the CPU"
    )
    parser.add_argument("--cpus_per_node", type=int, default=1, help="CPUs that Ray reserves")
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster; local: a new one here"
    )
    parser.add_argument("--placement", default="STRICT_SPREAD", help="strategy of Ray")
    parser.add_argument("--folder", default=os.getcwd(), help="folder to run in, on every node")
    parser.add_argument("--grace", type=float, default=360, help="seconds after SIGTERM")
    parser.add_argument("--wait", type=float, default=600, help="seconds for free nodes")
    parser.add_argument("command", help="train, finetune, prefer or distill")
    args, settings = parser.parse_known_args()

    ray.init(address=None if args.address == "local" else args.address)
    bundle = {"CPU": args.cpus_per_node} | (
        {"GPU": args.gpus_per_node} if args.gpus_per_node else {}
    )
    group = placement_group([bundle] * args.nodes, strategy=args.placement)
    try:
        ray.get(group.ready(), timeout=args.wait)
    except ray.exceptions.GetTimeoutError:
        print(
            f"ray        the cluster had no {args.nodes} nodes with {bundle} free within "
            f"{args.wait:.0f} s; lower --nodes, --gpus_per_node or --cpus_per_node, or wait longer "
            "(--wait)",
            file=sys.stderr,
        )
        return 1

    def place(node: int) -> dict[str, object]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        # A single task that Ray starts again would not find the others, so max_retries is 0. The
        # launchers restart failed ranks themselves (--max_restarts).
        return {
            "scheduling_strategy": strategy,
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_retries": 0,
        }

    host, port = ray.get(ray.remote(find_address).options(**place(0)).remote())
    accelerate_config = "multi_node" if args.gpus_per_node else "cpu"
    command = [sys.executable, "-m", "toolkit", args.command, *settings]
    command += ["--accelerate_config", accelerate_config, "--num_machines", str(args.nodes)]
    command += ["--num_processes", str(args.nodes * max(1, args.gpus_per_node))]
    command += ["--main_process_ip", host, "--main_process_port", str(port)]
    # An actor, because the KeyboardInterrupt of ray.cancel does not reach a worker whose parent
    # ignores SIGINT, as a shell lets its background jobs do.
    stop = ray.remote(StopFlag).options(num_cpus=0).remote()
    tasks = [
        ray.remote(run_launcher)
        .options(**place(node))
        .remote([*command, "--machine_rank", str(node)], args.folder, args.grace, stop)
        for node in range(args.nodes)
    ]
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    pending = tasks
    while pending:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        if signals:
            signals.clear()
            stop.set.remote()
    codes = read_exit_codes(tasks)
    print(f"ray        exit codes of the nodes: {codes}", flush=True)
    # 75 is a stop by a signal, after a checkpoint. Other nodes may have failed as a consequence.
    return 75 if 75 in codes else next((code for code in codes if code), 0)


def find_address() -> tuple[str, int]:
    """Return the address of this node and a free port, for the rendezvous of the run."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


class StopFlag:
    """A flag that the driver sets and that the tasks read, as a Ray actor."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Ask all tasks to stop their launchers."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return True if the tasks shall stop."""
        return self._is_set


def run_launcher(command: Sequence[str], folder: str, grace: float, stop: Any) -> int:
    """Run the toolkit's launcher in `folder` on this node, and return its exit code.

    If the flag `stop` is set, the launcher gets SIGTERM and has `grace` seconds to end. The same
    happens if the flag cannot be read, because its actor or the driver is gone.
    """
    # Ray sets OMP_NUM_THREADS to the CPUs of the task, which only runs the launcher.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    # In a separate session, the launcher gets no signal that Ray sends to its worker.
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    deadline = math.inf
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if deadline == math.inf and ray.get(stop.is_set.remote()):
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + grace
            elif time.monotonic() > deadline:
                process.kill()
    finally:
        if process.poll() is None:
            stop_process(process, grace)
    code = process.returncode
    return code if code >= 0 else 128 - code


def stop_process(process: subprocess.Popen, grace: float) -> None:
    """Send SIGTERM to a process, and kill it after `grace` seconds."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_exit_codes(tasks: list) -> list[int]:
    """Return the exit codes of the tasks, in their order; 1 for a task whose node was lost."""
    codes = []
    for task in tasks:
        try:
            codes.append(ray.get(task))
        except ray.exceptions.RayError as error:
            print(f"ray        a task ended without an exit code: {error}", flush=True)
            codes.append(1)
    return codes


if __name__ == "__main__":
    sys.exit(main())
