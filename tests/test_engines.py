"""The files for Kubeflow Trainer, SkyPilot and Ray: linted, and their commands run here."""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
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
