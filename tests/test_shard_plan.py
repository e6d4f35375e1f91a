"""A checkpoint is planned by each rank for itself: DCP reads it, and rank 0 hears what is new."""

import itertools
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from toolkit import ranks
from toolkit.checkpoint import shards
from toolkit.checkpoint.local_folder import LocalFolder
from toolkit.checkpoint.shards import HashingWriter, read_tensors
from toolkit.errors import CheckpointError
from toolkit.formats import find_coverage_fault, read_metadata, table_from_metadata
from toolkit.training.train_state import Saves

WORLD = 4
LAYOUTS = {
    "even": (torch.arange(64.0).view(16, 4), [Replicate(), Shard(0)]),
    "uneven": (torch.arange(33.0).view(11, 3), [Replicate(), Shard(0)]),
    "few_rows": (torch.arange(3.0).view(1, 3), [Replicate(), Shard(0)]),
    "vector": (torch.arange(5).bfloat16(), [Replicate(), Shard(0)]),
    "columns": (torch.arange(35.0).view(5, 7), [Shard(0), Shard(1)]),
    "on_all": (torch.arange(12.0).view(3, 4), [Replicate(), Replicate()]),
    "scalar": (torch.tensor(7), [Replicate(), Replicate()]),
    "empty": (torch.empty(0, 4), [Replicate(), Shard(0)]),
}


def values(mesh: Any, more: float = 0) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {
        name: distribute_tensor(tensor + int(more), mesh, layout)
        for name, (tensor, layout) in LAYOUTS.items()
    }
    return made | {f"plain.{i}": torch.full((50, 2), i + more) for i in range(8)}


def saved(folder: Path, tensors: dict[str, torch.Tensor], saves: Saves) -> list[int]:
    """Save; return the size of what each rank sent to rank 0."""
    sent: list[int] = []
    gather = ranks.gather_results_to_main

    def heard(fn: Any) -> list[Any]:
        told = gather(fn)
        sent.extend(map(len, told))
        return told

    ranks.gather_results_to_main = heard
    try:
        shards.write_shards(tensors, HashingWriter(folder), "could not save", saves)
    finally:
        ranks.gather_results_to_main = gather
    return sent


def loaded(folder: Path, like: dict[str, torch.Tensor], own: bool) -> bool:
    """Whether the folder gives back `like`: through the toolkit, or through torch."""
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    if own:
        read_tensors(folder, table_from_metadata(read_metadata(folder)), found)
    else:
        dcp.load(found, checkpoint_id=folder)
    whole = [getattr(t, "full_tensor", lambda t=t: t)() for t in found.values()]
    expected = [getattr(t, "full_tensor", lambda t=t: t)() for t in like.values()]
    return all(map(torch.equal, whole, expected))


def save_and_load(rank: int, world: int, root: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    folders = {name: Path(root, name) for name in ("first", "second", "third", "fourth", "torch")}
    found: dict[str, Any] = {"mine": sorted(shards.names_to_write(values(mesh)))}
    saves = Saves()
    found["sent"] = [
        saved(folders["first"], values(mesh), saves),
        saved(folders["second"], values(mesh, 1), saves),
    ]
    other = values(mesh, 2) | {"plain.0": torch.zeros(60, 2)}
    found["sent"].append(saved(folders["third"], other, saves))
    cast = other | {"scalar": other["scalar"].to(torch.float64)}  # as many bytes
    found["sent"].append(saved(folders["fourth"], cast, saves))
    dcp.save(values(mesh), checkpoint_id=folders["torch"])
    flat = init_device_mesh("cpu", (4,))
    resharded = {
        n: distribute_tensor(t, flat, [Shard(0)]) for n, (t, _) in LAYOUTS.items() if t.ndim
    }
    cases = {
        "first": values(mesh),
        "second": values(mesh, 1),
        "third": other,
        "fourth": cast,
    }
    found["read"] = [loaded(folders[n], t, own) for n, t in cases.items() for own in (True, False)]
    found["resharded"] = loaded(folders["first"], resharded, own=True)
    found["control"] = loaded(folders["first"], values(mesh, 1), own=True)
    return found


@pytest.mark.slow
def test_every_part_is_written_once_and_rank_0_hears_only_what_is_new(tmp_path) -> None:
    found = run_ranks(save_and_load, WORLD, str(tmp_path))
    for of in found:
        assert of["read"] == [True] * 8
        assert of["resharded"]
        assert not of["control"]
    first, second, third, fourth = found[0]["sent"]
    assert all(0 < size < 700 for size in first)
    assert second == fourth == [0] * WORLD
    assert any(third)  # one tensor is larger
    assert [of["sent"] for of in found[1:]] == [[[]] * 4] * 3
    # Of replicas one, and each about as many bytes.
    plain = Counter(name for of in found for name in of["mine"] if name.startswith("plain"))
    assert set(plain.values()) == {1}
    assert [sum(n.startswith("plain") for n in of["mine"]) for of in found] == [2] * WORLD
    ours, theirs = (read_metadata(tmp_path / name) for name in ("first", "torch"))
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, entry in theirs.state_dict_metadata.items():
        own = ours.state_dict_metadata[name]
        assert (own.size, own.properties) == (entry.size, entry.properties), name
        parts = [{(c.offsets, c.sizes) for c in e.chunks if c.sizes.numel()} for e in (own, entry)]
        assert parts[0] == parts[1], name
    assert len(ours.storage_data) == sum(len(e.chunks) for e in ours.state_dict_metadata.values())
    raw = [(tmp_path / name / ".metadata").read_bytes() for name in ("first", "second", "fourth")]
    assert raw[0] == raw[1] != raw[2]
    assert b"step-" not in raw[0]
    assert read_metadata(tmp_path / "fourth").state_dict_metadata["scalar"].properties.dtype == (
        torch.float64
    )
    pickle.loads(raw[0])  # as torch reads it


def refused(rank: int, world: int, root: str) -> list[str]:
    said = []
    tensors = {"a": torch.ones(2, 3)}
    cases = {
        "names": tensors | {f"of {rank % 2}": torch.ones(1)},
        "hole": tensors,
        "disk": tensors,
    }
    here = shards.names_to_write
    for case, given in cases.items():
        if case == "hole":
            shards.names_to_write = lambda tensors: here(tensors) - {"a"}
        writer = HashingWriter(Path(root, case))
        if case == "disk" and rank == 1:
            writer.path = Path(root, "hole", ".metadata" * 99)  # no folder can be made of it
        try:
            shards.write_shards(given, writer, "could not save", Saves())
        except CheckpointError as error:
            said.append(str(error))
        shards.names_to_write = here
    saved(Path(root, "after"), tensors, Saves())  # nobody is left in another exchange
    return said


def test_what_is_no_checkpoint_is_refused_on_all_ranks(tmp_path) -> None:
    for names, hole, disk in run_ranks(refused, 2, str(tmp_path)):
        assert names == "could not save: the ranks hold tensors of other names"
        assert "could not save: a is not complete: its chunks hold 0 of 6 elements" in hole
        assert disk.startswith("could not save: File name too long")


def boxes(draw: random.Random, size: tuple[int, ...]) -> list[ChunkStorageMetadata]:
    """Cut a box into rows, or into any boxes; now and then lose, double or move one."""
    cuts = []
    for dim, n in enumerate(size):
        inner = range(1, n) if n and (dim == 0 or draw.random() < 0.3) else ()
        at = sorted({0, n, *(i for i in inner if draw.random() < 0.5)})
        cuts.append([(a, b - a) for a, b in itertools.pairwise(at)] or [(0, 0)])
    parts = [
        ChunkStorageMetadata(torch.Size(o), torch.Size(s))
        for o, s in (zip(*box, strict=True) for box in itertools.product(*cuts))
    ]
    draw.shuffle(parts)
    fault = draw.choice(["", "", "lose", "double", "grow"])
    if fault == "lose":
        parts.pop()
    elif fault == "double":
        parts.append(parts[0])
    elif fault == "grow" and parts[0].sizes[0] > 1:
        o, s = parts[0].offsets, parts[0].sizes
        parts[0] = ChunkStorageMetadata(o, torch.Size((s[0] - 1, *s[1:])))
    return parts


def test_arrays_say_of_chunks_what_objects_do(tmp_path) -> None:
    dcp.save({"a": torch.ones(6, 4), "s": torch.tensor(1)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = read_metadata(tmp_path)
    draw, faults = random.Random(5), Counter[bool]()
    (info,) = [v for k, v in metadata.storage_data.items() if k.fqn == "a"]
    for _ in range(300):
        size = draw.choice([(12, 3), (7,), (5, 4, 2), (1, 6)])
        parts = boxes(draw, size)
        entry = metadata.state_dict_metadata["a"]
        metadata.state_dict_metadata["a"] = TensorStorageMetadata(
            entry.properties, torch.Size(size), parts
        )
        metadata.storage_data = {MetadataIndex("a", part.offsets): info for part in parts}
        table = table_from_metadata(metadata)
        assert table.find_fault("a") == find_coverage_fault(metadata, "a")
        faults[table.find_fault("a") is None] += 1
        low = tuple(draw.randrange(n) for n in size)
        extent = tuple(draw.randrange(n - at + 1) for n, at in zip(size, low, strict=True))
        part = table.metadata_of_boxes({"a": (low, extent)})
        kept = [(c.offsets, c.sizes) for c in part.state_dict_metadata["a"].chunks]
        meets = [
            (c.offsets, c.sizes)
            for c in parts
            if all(
                o < at + n and at < o + s and n
                for o, s, at, n in zip(c.offsets, c.sizes, low, extent, strict=True)
            )
        ]
        assert kept == meets
    assert min(faults[True], faults[False]) > 50


def test_of_replicas_the_one_with_least_writes() -> None:
    tensors = {str(i): torch.ones(n) for i, n in enumerate((8, 1, 1, 5))}
    assert shards.names_to_write(tensors) == {"0", "1", "2", "3"}  # one process


@pytest.mark.parametrize("world", [3])
def test_a_resume_reads_metadata_on_one_rank_only(world, tmp_path) -> None:
    counts = run_ranks(resumed, world, str(tmp_path))
    assert counts == [1] + [0] * (world - 1)


def resumed(rank: int, world: int, root: str) -> int:
    from toolkit.checkpoint import resuming, save, state
    from toolkit.config.settings import CheckpointConfig

    read, calls = resuming.read_metadata, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return read(*args, **kwargs)

    resuming.read_metadata = counted
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    run = state.TrainState(model, step=1)
    saved = save(run, root, CheckpointConfig())
    weight = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert resuming.restore(run, Path(saved)) == 1
    assert torch.equal(model.weight, weight)
    return calls[0]


def test_some_files_are_looked_at_as_all_of_them_are(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "in/b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder").symlink_to(tmp_path / "in")
    names = ["a", "in/b", "link", "folder/b", "gone", "in/gone"]
    every = LocalFolder(tmp_path).files()
    assert every == {"a": 1, "in/b": 4, "link": -1, "folder": -1}
    assert LocalFolder(tmp_path).files(names) == {n: every[n] for n in names if n in every}
