"""The files for Kubeflow Trainer, SkyPilot and Ray: linted, and their commands run here."""

import copy
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from conftest import ROOT, free_port, save_byte_tokenizer, save_tiny_model
from documents import check

from toolkit.config import CheckpointConfig
from toolkit.errors import EXIT_CODE_PREEMPTED

TRAINJOB = ROOT / "examples" / "trainjob.yaml"
SKYPILOT = ROOT / "examples" / "skypilot.yaml"


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects refuse fields that they do not list."""
    schema = {key: value for key, value in schema.items() if not key.startswith("x-")}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = closed(schema[key])
    if "properties" in schema:
        schema["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        schema["additionalProperties"] = False
    return schema


def trainjob_schema() -> dict[str, Any]:
    text = (ROOT / "tests" / "data" / "trainjob_schema.yaml").read_text("utf-8")
    schema = yaml.safe_load(text)
    metadata = schema["properties"].pop("metadata")
    return closed(schema) | {
        "properties": closed(schema)["properties"] | {"metadata": metadata},
    }


def trainjob() -> dict[str, Any]:
    return yaml.safe_load(TRAINJOB.read_text("utf-8"))


def test_the_trainjob_is_one_of_kubeflow_trainer() -> None:
    job = trainjob()
    jsonschema.validate(job, trainjob_schema())
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (patch,) = job["spec"]["runtimePatches"]
    # The runtime torch-distributed has one replicated job and one container, both called node.
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["name"] == container["name"] == "node"
    assert pod["terminationGracePeriodSeconds"] > CheckpointConfig().grace_seconds
    assert {v["name"] for v in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize(
    "path", ["spec", "spec.trainer", "spec.runtimeRef", "spec.runtimePatches.0", "."]
)
def test_an_unknown_field_of_a_trainjob_is_refused(path: str) -> None:
    job = copy.deepcopy(trainjob())
    part: Any = job
    for key in path.split(".") if path != "." else []:
        part = part[int(key) if key.isdigit() else key]
    part["numNode"] = 2
    with pytest.raises(jsonschema.ValidationError, match="numNode"):
        jsonschema.validate(job, trainjob_schema())


def commented_lines(file: Path) -> dict[str, Any]:
    """Read a Kubernetes file with its commented entries of `env`."""
    text = file.read_text("utf-8")
    uncommented = re.sub(r"^( *)# (- \{name: .*)$", r"\1\2", text, flags=re.MULTILINE)
    assert uncommented != text
    return list(yaml.safe_load_all(uncommented))[-1]


@pytest.mark.parametrize("name", ["trainjob.yaml", "kubernetes.yaml"])
def test_the_user_of_the_image_writes_to_mounted_folders(name: str) -> None:
    job = commented_lines(ROOT / "examples" / name)
    if job["kind"] == "TrainJob":
        jsonschema.validate(job, trainjob_schema())
        (patch,) = job["spec"]["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        # Kubeflow Trainer takes variables of the container `node` from the trainer only.
        variables = job["spec"]["trainer"]["env"]
    else:
        pod = job["spec"]["template"]["spec"]
        variables = pod["containers"][0]["env"]
    home, token = variables
    assert (home["name"], token["name"]) == ("HF_HOME", "HF_TOKEN")
    mounts = [Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]]
    assert any(mount in Path(home["value"]).parents for mount in mounts)
    # useradd gives the first user of the image the number 1000.
    assert "useradd --create-home trainer" in (ROOT / "Dockerfile").read_text("utf-8")
    assert pod["securityContext"]["fsGroup"] == 1000


def replace_variables(line: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        line = line.replace(f'"{name}"', value)
    return line


def test_the_commands_are_those_of_the_toolkit() -> None:
    (line,) = trainjob()["spec"]["trainer"]["args"]
    start, _, command = line.partition(" && exec ")
    assert start == "cd /training"
    values = {
        "$PET_NNODES": "2",
        "$((PET_NNODES * PET_NPROC_PER_NODE))": "16",
        "$PET_NODE_RANK": "1",
        "$PET_MASTER_ADDR": "10.0.0.1",
        "$PET_MASTER_PORT": "29500",
    }
    check(replace_variables(command, values).replace("llama-70b.yaml", "CONFIG"))
    task = yaml.safe_load(SKYPILOT.read_text("utf-8"))
    line = task["run"].replace("\\\n", " ").removeprefix("exec ")
    values = {
        "$SKYPILOT_NUM_NODES": "2",
        "$((SKYPILOT_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))": "16",
        "$SKYPILOT_NODE_RANK": "1",
        '$(head -n 1 <<< "$SKYPILOT_NODE_IPS")': "10.0.0.1",
    }
    line = replace_variables(line, values)
    assert "$" not in line
    check(line.replace("llama-70b.yaml", "CONFIG"))
    for script in (task["setup"], task["run"], trainjob()["spec"]["trainer"]["args"][0]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_skypilot_task_writes_to_its_shared_volume() -> None:
    task = yaml.safe_load(SKYPILOT.read_text("utf-8"))
    (mount,) = task["volumes"]
    assert "file_mounts" not in task  # a mounted bucket has no locks and no renames
    folder = re.search(r"--output_dir (\S+)", task["run"])
    assert folder is not None
    assert Path(mount) in Path(folder[1]).parents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tiny model, a text and the config `run.yaml` of a long run."""
    save_byte_tokenizer(tmp_path / "model")
    save_tiny_model(tmp_path / "model")
    (tmp_path / "mine.txt").write_text("The quick brown fox jumps over the lazy dog. " * 1000)
    settings = {
        "model": {"name_or_path": "model"},
        "data": {"train_files": "mine.txt", "sequence_length": 32},
        "sharding": {"param_dtype": "float32"},
        "train": {"max_steps": 100_000, "per_device_train_batch_size": 1},
        "checkpoint": {"save_steps": 100_000},
        "output_dir": "run",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests" / "fake_ray"), os.environ.get("PYTHONPATH", "")]
    )
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | more


def wait_for_training(log: Path, process: subprocess.Popen, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while "\nstep " not in log.read_text("utf-8").replace("\r", ""):
        assert process.poll() is None, log.read_text("utf-8")
        assert time.monotonic() < deadline, log.read_text("utf-8")
        time.sleep(0.2)


@pytest.fixture
def ray_launch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import examples/ray_launch.py with the stand-in for Ray."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "fake_ray"))
    spec = importlib.util.spec_from_file_location("ray_launch", ROOT / "examples/ray_launch.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    return module


class Flag:
    """A stop flag as `run_launcher` reads it; `read` returns its value or raises an error."""

    def __init__(self, ray: ModuleType, read: Callable[[], bool]) -> None:
        self.is_set = SimpleNamespace(remote=lambda: ray._Ready(read()))


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_a_ray_task_whose_flag_is_lost_stops_its_launcher(
    ray_launch, ignores_sigterm: bool, tmp_path: Path
) -> None:
    def read() -> bool:
        if not (tmp_path / "pid").exists():
            return False
        raise ray_launch.ray.exceptions.RayError("the actor died")

    trap = "trap '' TERM" if ignores_sigterm else f"trap 'echo > {tmp_path}/saved; exit 75' TERM"
    script = f"{trap}; echo $$ > new; mv new pid; while :; do sleep 0.05; done"
    with pytest.raises(ray_launch.ray.exceptions.RayError, match="the actor died"):
        ray_launch.run_launcher(
            ["bash", "-c", script],
            str(tmp_path),
            0.3 if ignores_sigterm else 20,
            Flag(ray_launch.ray, read),
        )
    assert (tmp_path / "saved").exists() is not ignores_sigterm
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_launcher_in_a_ray_task_chooses_its_threads(ray_launch, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flag = Flag(ray_launch.ray, lambda: False)
    command = ["bash", "-c", "exit $(( ${OMP_NUM_THREADS:-0} + 3 ))"]
    assert ray_launch.run_launcher(command, str(tmp_path), 1, flag) == 3


def test_ray_nodes_that_are_not_free_are_an_error(ray_launch, monkeypatch, capsys) -> None:
    nodes = str(ray_launch.ray.MAX_NODES + 1)
    arguments = ["--nodes", nodes, "--gpus_per_node", "8", "--wait", "3", "train", "run.yaml"]
    monkeypatch.setattr(sys, "argv", ["ray_launch.py", *arguments])
    assert ray_launch.main() == 1
    assert f"the cluster had no {nodes} nodes with" in capsys.readouterr().err


@pytest.mark.faults
def test_sigterm_to_ray_reaches_the_ranks(folder: Path) -> None:
    log = folder / "log"
    command = [sys.executable, str(ROOT / "examples" / "ray_launch.py"), "--nodes", "2"]
    command += ["--gpus_per_node", "0", "train", "run.yaml"]
    with log.open("w") as out:
        driver = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_for_training(log, driver)
        driver.send_signal(signal.SIGTERM)
        code = driver.wait(120)
    finally:
        driver.kill()
    output = log.read_text("utf-8")
    assert code == EXIT_CODE_PREEMPTED, output
    # A launcher whose rank has ended already, with the others, is ended by SIGTERM itself.
    assert re.search(r"exit codes of the nodes: \[(75|143), (75|143)\]", output)
    assert "2 process(es) on cpu" in output
    assert list((folder / "run" / "checkpoints").glob("step-*/*")), output


@pytest.mark.faults
def test_sigterm_to_the_pods_of_a_trainjob_reaches_the_ranks(folder: Path) -> None:
    (line,) = trainjob()["spec"]["trainer"]["args"]
    line = line.replace("cd /training", f"cd {folder}").replace("llama-70b.yaml", "run.yaml")
    # The machine of the test has no GPU, and its folder no installed command.
    line = line.replace("multi_node", "cpu").replace(
        "exec toolkit", f"exec {sys.executable} -m toolkit"
    )
    port, pods, logs = str(free_port()), [], []
    for rank in range(2):
        logs.append(folder / f"log{rank}")
        variables = environment(
            PET_NNODES="2", PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(rank),
            PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=port,
        )  # fmt: skip
        with logs[-1].open("w") as out:
            pods.append(
                subprocess.Popen(
                    ["bash", "-c", line], env=variables, stdout=out, stderr=subprocess.STDOUT
                )
            )
    try:
        wait_for_training(logs[0], pods[0])
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        codes = {pod.wait(120) for pod in pods}
    finally:
        for pod in pods:
            pod.kill()
    assert codes in ({EXIT_CODE_PREEMPTED}, {EXIT_CODE_PREEMPTED, 128 + signal.SIGTERM})
    assert list((folder / "run" / "checkpoints").glob("step-*/*"))
