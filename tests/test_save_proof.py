"""What is saved is what memory held, and what is resumed is what was saved: proven each time."""

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import save_tiny_model, slow
from distributed import run_ranks
from test_checkpoint_saving import ASYNC, SYNC, small_state
from torch import nn
from torch.distributed.checkpoint import filesystem

from toolkit import checkpoint
from toolkit.checkpoint import commit, resuming, saving, shards
from toolkit.errors import CheckpointError
from toolkit.formats import device_threads
from toolkit.formats.bit_sums import bytes_sum, part_sums, wrap_to_int64
from toolkit.training.train_state import Saves

TOOLKIT = Path(checkpoint.__file__).parent.parent
# Threads of these touch files, sockets or other processes, and no tensor of a device.
WITHOUT_TENSORS = {
    "api.py",
    "checkpoint/commit.py",
    "checkpoint/lock.py",
    "checkpoint/object_store.py",
    "export/after_export.py",
    "hub/local.py",
    "training/guards/preemption.py",
    "training/guards/watchdog.py",
    "training/guards/watcher.py",
    "verify/findings.py",
}
MAKERS = {"Thread", "ThreadPoolExecutor", "Timer", "ThreadPool", "start_new_thread"}


# ---- Sums ----------------------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (0, 3), (16, 8), (33, 2, 5), (4, 0)])
def test_sums_of_memory_are_those_of_the_bytes_and_of_any_parts(dtype, shape) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    of_bytes, of_rows = part_sums(tensor).tolist()
    assert of_bytes == bytes_sum(memoryview(raw(tensor)))
    content, parts = memoryview(raw(tensor)), 0
    for at in range(0, len(content), 8):
        parts += bytes_sum(content[at : at + 8])
    assert wrap_to_int64(parts) == of_bytes
    # As the ranks of any number hold them, empty ones too.
    for world in (2, 3, 16) if shape else ():
        total = 0
        for begin in range(0, len(tensor), max(1, -(-len(tensor) // world))):
            rows = tensor[begin : begin + -(-len(tensor) // world)]
            slices = (slice(begin, begin + len(rows)),)
            with (
                mock.patch("toolkit.formats.bit_sums.local_slices", lambda _, s=slices: s),
                mock.patch("toolkit.formats.bit_sums.DTensor", torch.Tensor),
                mock.patch("toolkit.formats.bit_sums.local_tensor", lambda t: t),
            ):
                total += int(part_sums(rows)[1])
        assert wrap_to_int64(total) == of_rows


def test_any_bit_and_any_rows_that_change_places_change_the_sums() -> None:
    tensor = torch.randn(6, 4)
    before = part_sums(tensor).tolist()
    for byte in range(tensor.nbytes):
        for bit in range(8):
            content = raw(tensor)
            content[byte] ^= 1 << bit
            changed = torch.frombuffer(content, dtype=torch.float32).view(6, 4)
            assert all(a != b for a, b in zip(part_sums(changed).tolist(), before, strict=True))
    swapped = tensor[[1, 0, 2, 3, 4, 5]]
    assert part_sums(swapped)[0] == before[0]  # the plain sum does not see it
    assert part_sums(swapped)[1] != before[1]


# ---- Threads and the device ----------------------------------------------------------------------


class LateDevices:
    """Devices whose copies to the host are done when their stream is waited for, not before; as on
    CUDA a thread computes on device 0 until it is told otherwise.
    """

    def __init__(self, device: int) -> None:
        self.here, self.pending = threading.local(), dict[int, list[Callable[[], Any]]]()
        self.home = device  # of all tensors
        self.waits = 0
        self.set_device_index(device)

    def set_device_index(self, device: int) -> None:
        self.here.device = device

    def current_device_index(self) -> int:
        return getattr(self.here, "device", 0)

    def current_stream(self) -> "LateStream":
        return LateStream(self, self.current_device_index())

    @contextmanager
    def stream(self, _: "LateStream") -> Iterator[None]:
        yield

    def copy(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not options.get("non_blocking"):
            return TO(tensor, *args, **options)
        late = torch.full_like(tensor, 7)
        self.pending.setdefault(self.home, []).append(lambda: late.copy_(tensor))
        return late


class LateStream:
    def __init__(self, devices: LateDevices, device: int) -> None:
        self.devices, self.device = devices, device

    def synchronize(self) -> None:
        self.devices.waits += 1
        for copy in self.devices.pending.pop(self.device, []):
            copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LateStream) and other.device == self.device

    __hash__ = None  # type: ignore[assignment]


TO = torch.Tensor.to


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevices:
    """Device 3 of some, to torch's writer of checkpoints and to the toolkit's threads."""
    devices = LateDevices(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cpu")
    monkeypatch.setattr(filesystem, "_get_device_module", lambda _: devices)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **o: devices.copy(t, *a, **o))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for name in ("set_device_index", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, getattr(devices, name))
    return devices


def plain_pool(threads: int, name: str, begin: Callable[[], object] = lambda: None) -> Any:
    return device_threads.ThreadPoolExecutor(threads, name, begin)


def expected_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {n: (t.nbytes, int(part_sums(t)[0])) for n, t in tensors.items()}


def test_copies_that_come_late_are_waited_for_and_a_thread_of_another_device_is_found_out(
    tmp_path: Path, late: LateDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"model.{i}": torch.randn(50, 40) for i in range(4)}
    expected = expected_of(tensors)
    writer = shards.HashingWriter(tmp_path / "right", expected=expected)
    shards.write_shards(tensors, writer, "could not save", Saves())
    monkeypatch.setattr(shards, "device_pool", plain_pool)  # as it was: on device 0
    writer = shards.HashingWriter(tmp_path / "proven", expected=expected)
    with pytest.raises(CheckpointError, match=r"^could not save: other bytes were written of 4 te"):
        shards.write_shards(tensors, writer, "could not save", Saves())
    # Without the proof nothing says so.
    silent = shards.HashingWriter(tmp_path / "silent")
    shards.write_shards(tensors, silent, "could not save", Saves())
    monkeypatch.undo()
    for name, same in (("right", True), ("silent", False)):
        found = {n: torch.zeros_like(t) for n, t in tensors.items()}
        table = resuming.table_from_metadata(resuming.read_metadata(tmp_path / name))
        shards.read_tensors(tmp_path / name, table, found)
        assert [torch.equal(found[n], t) for n, t in tensors.items()] == [same] * 4


@pytest.mark.parametrize("cfg", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_save_of_tensors_in_host_memory_never_waits_for_the_stream_that_trains(
    tmp_path: Path, late: LateDevices, monkeypatch: pytest.MonkeyPatch, cfg: Any
) -> None:
    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cuda")
    model = nn.Sequential(*(nn.Linear(2000, 1500, bias=False) for _ in range(4)))  # 12 MB each
    state = checkpoint.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=3)
    save_and_wait(state, tmp_path / "right", cfg)
    assert late.waits == 0
    write, target = shards.HashingStream.write, raw(model[2].weight)

    def flip(self: Any, content: Any) -> int:
        if len(content) == len(target) and bytes(content) == target:
            content = bytearray(content)
            content[5] ^= 16
        return write(self, content)

    monkeypatch.setattr(shards.HashingStream, "write", flip)
    with pytest.raises(CheckpointError, match=r"1 tensor.s. than memory held: model\.2\.weight; a"):
        save_and_wait(state, tmp_path / "proven", cfg)
    monkeypatch.undo()
    found = {f"model.{n}": torch.zeros_like(p) for n, p in model.named_parameters()}
    folder = commit.committed_steps(tmp_path / "right")[3] / "dcp"
    shards.read_tensors(folder, resuming.table_from_metadata(resuming.read_metadata(folder)), found)
    assert all(torch.equal(found[f"model.{n}"], p) for n, p in model.named_parameters())


def test_a_writer_that_copies_from_a_device_does_wait(tmp_path: Path, late: LateDevices) -> None:
    tensors = {f"model.{i}": torch.randn(2000, 1500) for i in range(4)}
    for in_host_memory, waits in ((False, 4), (True, 0)):
        late.waits = 0
        writer = shards.HashingWriter(
            tmp_path / str(waits), expected=expected_of(tensors), in_host_memory=in_host_memory
        )
        shards.write_shards(tensors, writer, "could not save", Saves())
        assert late.waits == waits


def test_threads_of_a_pool_compute_on_the_device_of_who_made_it(late: LateDevices) -> None:
    with device_threads.device_pool(2, "own") as pool:
        assert pool.submit(late.current_device_index).result() == 3
    found: list[int] = []
    device_threads.device_thread(lambda: found.append(late.current_device_index()), "own").join()
    assert found == [3]
    with device_threads.ThreadPoolExecutor(2) as plain:
        assert plain.submit(late.current_device_index).result() == 0


def makers_of_threads(text: str) -> set[str]:
    names = (n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call))
    return {getattr(n, "attr", getattr(n, "id", "")) for n in names} & MAKERS


def test_threads_that_may_touch_a_device_are_made_in_one_place() -> None:
    found = {
        str(file.relative_to(TOOLKIT))
        for file in TOOLKIT.rglob("*.py")
        if makers_of_threads(file.read_text())
    }
    assert found == WITHOUT_TENSORS | {"formats/device_threads.py"}
    assert makers_of_threads("import threading\nthreading.Thread(target=f).start()") == {"Thread"}


# ---- A save --------------------------------------------------------------------------------------


def save_and_wait(state: Any, root: Path, cfg: Any) -> None:
    checkpoint.save(state, root, cfg)
    checkpoint.wait()


@pytest.mark.parametrize("cfg", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["model.0.weight", "optimizer.1.weight.exp_avg_sq"])
def test_a_bit_that_changes_on_the_way_to_a_file_is_found_and_named(
    tmp_path: Path, cfg: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_state()
    tensors = saving.model_tensors(state.model) | saving.optimizer_tensors(state)
    target, write, hits = raw(tensors[name]), shards.HashingStream.write, []

    def flip(self: Any, content: Any) -> int:
        if bytes(content) == bytes(target):
            changed = bytearray(content)
            changed[5] ^= 16
            hits.append(1)
            return write(self, changed)
        return write(self, content)

    monkeypatch.setattr(shards.HashingStream, "write", flip)
    with pytest.raises(CheckpointError, match=f"1 tensor.s. than memory held: {name}; a device"):
        save_and_wait(state, tmp_path, cfg)
    assert len(hits) == 1
    assert not commit.committed_steps(tmp_path)
    monkeypatch.undo()  # control
    save_and_wait(state, tmp_path, cfg)
    assert list(commit.committed_steps(tmp_path)) == [3]


def test_a_copy_for_the_background_that_is_not_done_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = saving._copy_to_host

    def late(*given: Any) -> Any:
        copies = copied(*given)
        copies["optimizer.0.weight.exp_avg"].fill_(0.5)
        return copies

    monkeypatch.setattr(saving, "_copy_to_host", late)
    with pytest.raises(CheckpointError, match=r"memory held: optimizer\.0\.weight\.exp_avg; "):
        save_and_wait(small_state(), tmp_path, ASYNC)


# ---- A resume ------------------------------------------------------------------------------------


def resume_with_a_flip(rank: int, world: int, folder: str, root: str, where: str) -> list[str]:
    """Resume, a bit being changed on the last rank behind the reading; return what was said."""
    from test_checkpoint_resume import Trainer

    run, read, said = Trainer(folder, world, "adamw"), resuming.read_tensors, []

    def flip(path: Any, table: Any, tensors: Any) -> int:
        requested = read(path, table, tensors)
        part = tensors[where].to_local() if where and rank == world - 1 else None
        if part is not None and part.numel():
            part.view(torch.int32).flatten()[-1] ^= 1 << 11
        return requested

    with mock.patch.object(resuming, "read_tensors", flip):
        try:
            checkpoint.resume(run.state, root, SYNC)
        except CheckpointError as error:
            said.append(str(error))
    return said


def save_of(rank: int, world: int, folder: str, root: str) -> None:
    from test_checkpoint_resume import Trainer

    run = Trainer(folder, world, "adamw")
    run.steps(1)
    checkpoint.save(run.state, root, SYNC)


@pytest.mark.parametrize(
    "name",
    [
        "model.model.layers.0.mlp.up_proj.weight",
        slow("optimizer.model.layers.1.self_attn.k_proj.weight.exp_avg"),
        slow("optimizer.model.norm.weight.exp_avg_sq"),
    ],
)
def test_a_bit_that_changes_between_file_and_memory_is_found_and_named(
    tmp_path: Path, name: str
) -> None:
    folder, root = str(save_tiny_model(tmp_path / "model")), str(tmp_path / "run")
    run_ranks(save_of, 2, folder, root)
    for world in (2, 3):
        said = run_ranks(resume_with_a_flip, world, folder, root, name)
        for lines in said:
            assert len(lines) == 1
            assert "1 tensor(s) are not in memory what was saved, though their" in lines[0]
            assert f"files are whole: {name}; " in lines[0]
    assert run_ranks(resume_with_a_flip, 3, folder, root, "") == [[]] * 3  # control
