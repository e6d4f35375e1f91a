"""The memory of a container, by control groups of both versions."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit import checkpoint
from toolkit.checkpoint import saving
from toolkit.config.settings import CheckpointConfig
from toolkit.formats import container_memory as groups
from toolkit.formats.container_memory import ContainerMemory, container_memory

GB = 2**30
MEMORY = "sys/fs/cgroup/memory"
V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{8 * GB}\n",
    "sys/fs/cgroup/memory.current": f"{5 * GB}\n",
    "sys/fs/cgroup/memory.stat": f"anon {2 * GB}\nfile {3 * GB}\ninactive_file {2 * GB}\n",
}
V1 = {
    "proc/self/cgroup": "9:pids:/\n4:memory,hugetlb:/docker/abc\n0::/\n",
    f"{MEMORY}/memory.limit_in_bytes": f"{8 * GB}\n",
    f"{MEMORY}/memory.usage_in_bytes": f"{5 * GB}\n",
    f"{MEMORY}/memory.stat": f"cache 1\ntotal_inactive_file {2 * GB}\n",
}
JOB = {  # a job's step, whose job is limited
    "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max\n",
    "sys/fs/cgroup/slurm/job_7/memory.max": f"{8 * GB}\n",
    "sys/fs/cgroup/slurm/job_7/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/slurm/job_7/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/slurm/memory.max": f"{64 * GB}\n",
    "sys/fs/cgroup/slurm/memory.current": f"{60 * GB}\n",
    "sys/fs/cgroup/slurm/memory.stat": "inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "limit", "free"),
    [
        (V2, 8 * GB, 5 * GB),
        (V1, 8 * GB, 5 * GB),
        (JOB, 8 * GB, 4 * GB),  # the limit of one, and what another one has left
        (V2 | {"sys/fs/cgroup/memory.max": "max\n"}, math.inf, math.inf),
        (V1 | {f"{MEMORY}/memory.limit_in_bytes": "9223372036854771712\n"}, math.inf, math.inf),
        (V2 | {"sys/fs/cgroup/memory.current": f"{11 * GB}\n"}, 8 * GB, 0),
        ({}, math.inf, math.inf),
    ],
    ids=["version 2", "version 1", "job", "no limit 2", "no limit 1", "full", "none"],
)
def test_limits_of_a_container_are_read(tmp_path: Path, files: Any, limit: float, free: float):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert container_memory(tmp_path) == ContainerMemory(limit, free)


@pytest.mark.parametrize(("free", "expected"), [(79_000, False), (81_000, True)])
def test_auto_saves_behind_the_loop_where_copies_fit_the_container(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, free: int, expected: bool
) -> None:
    part = SimpleNamespace(device=torch.device("cuda"), nbytes=10_000)
    host = SimpleNamespace(available=10**12)
    monkeypatch.setattr(saving, "local_tensor", lambda tensor: part)
    monkeypatch.setattr(saving.psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(saving.ranks, "local_world_size", lambda: 1)
    monkeypatch.setattr(saving, "container_memory", lambda: ContainerMemory(10**6, free))
    state = checkpoint.TrainState(nn.Linear(1, 1))
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert saving._resolve_async_save(state, tensors, CheckpointConfig()) is expected
    assert f"async_save {str(expected).lower()}" in capsys.readouterr().out


def test_this_machine_has_a_limit_or_none() -> None:
    here = groups.container_memory()
    assert 0 <= here.free <= here.limit
    assert here.limit > 2**20
