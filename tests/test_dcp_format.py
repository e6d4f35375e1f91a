"""DCP folders are read as they are written, and never trusted."""

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from toolkit.checkpoint.shards import read_tensors
from toolkit.errors import CheckpointError
from toolkit.formats import (
    find_coverage_fault,
    read_metadata,
    table_from_metadata,
    tensor_chunks,
)
from toolkit.formats.dcp_tensors import BlobView, find_payload, read_chunk

TENSORS = {
    "scalar": torch.tensor(3.25),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "half": torch.randn(5, 3).half(),
    "brain": torch.randn(2, 3, 4).bfloat16(),
    "bytes": torch.arange(9, dtype=torch.uint8),
}
UNUSUAL = {
    "view": torch.randn(6, 8)[:, :4],
    "tail": torch.randn(10)[5:],
    "transposed": torch.randn(3, 5).t(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    optimizer = {"lr": 0.1, "betas": (0.9, 0.95), "name": "adamw", "seen": [1, 2]}
    dcp.save({"model": TENSORS | UNUSUAL, "optim": optimizer}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def rewrite(folder: Path, edit: Any) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_is_what_torch_reads(folder: Path) -> None:
    ours, theirs = read_metadata(folder), dcp.FileSystemReader(folder).read_metadata()
    assert isinstance(ours, Metadata)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version


def test_raw_bytes_are_the_tensor(folder: Path) -> None:
    metadata = read_metadata(folder)
    for name, tensor in TENSORS.items():
        chunks = tensor_chunks(folder, metadata, f"model.{name}")
        assert find_coverage_fault(metadata, f"model.{name}") is None
        if tensor.numel() == 0:
            assert chunks == []
            continue
        (chunk,) = chunks
        assert chunk.raw is not None
        assert (chunk.sizes, chunk.dtype) == (tensor.shape, tensor.dtype)
        content = chunk.file.read_bytes()[chunk.raw : chunk.raw + tensor.nbytes]
        assert content == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert torch.equal(read_chunk(chunk), tensor)


def test_unusual_blobs_are_left_to_torch(folder: Path) -> None:
    metadata = read_metadata(folder)
    for name, tensor in UNUSUAL.items():
        (chunk,) = tensor_chunks(folder, metadata, f"model.{name}")
        whole = chunk.raw is not None
        # torch copies views of a larger storage before it saves them; then the bytes are there.
        content = chunk.file.read_bytes()[chunk.raw : chunk.raw + tensor.nbytes] if whole else b""
        if whole:
            assert content == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert torch.equal(read_chunk(chunk).float(), tensor.float())
    assert tensor_chunks(folder, metadata, "model.transposed")[0].raw is None


def test_a_resume_reads_the_tensors(folder: Path) -> None:
    found = {f"model.{k}": torch.zeros_like(v) for k, v in TENSORS.items()}
    assert read_tensors(folder, table_from_metadata(read_metadata(folder)), found) > 0
    assert all(torch.equal(found[f"model.{k}"], v) for k, v in TENSORS.items())


class Canary:
    """Creates a file when it is unpickled the usual way."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def test_code_in_metadata_never_runs(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "ran"

    def place(metadata: Metadata) -> None:
        metadata.planner_data = Canary(canary)

    rewrite(folder, place)
    with pytest.raises(CheckpointError, match=r"names (posix|os)\.system"):
        read_metadata(folder)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # the canary sings where it can
    assert canary.exists()


def test_code_in_a_byte_entry_never_runs(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    dcp.save({"extra": Canary(canary)}, checkpoint_id=tmp_path / "dcp")
    metadata = read_metadata(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="extra is no tensor"):
        read_tensors(tmp_path / "dcp", table_from_metadata(metadata), {"extra": torch.zeros(1)})
    assert not canary.exists()


def test_torch_classes_cannot_be_altered(folder: Path) -> None:
    """A pickle may set attributes of what it names: it meets stand-ins, never torch's classes."""
    payload = (
        b"\x80\x04c"
        + b"torch.distributed.checkpoint.metadata\nMetadata\n"
        + b"N}\x8c\x03foo\x8c\x03barsb."
    )
    payload = payload.replace(b"N}\x8c\x03foo\x8c\x03barsb.", b"N}\x8c\x03foo\x8c\x03bars\x86b.")
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError):
        read_metadata(folder)
    assert not hasattr(Metadata, "foo")
    pickle.loads(payload)  # the usual unpickler does it
    assert Metadata.foo == "bar"
    del Metadata.foo


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "sub/x.distcp", "..", "", "a\0b"])
def test_names_outside_the_folder_are_refused(folder: Path, name: str) -> None:
    (folder.parent / "x.distcp").write_bytes(b"0" * 10_000_000)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    rewrite(folder, point)
    with pytest.raises(CheckpointError, match="no file of its folder"):
        read_metadata(folder)


def test_links_that_leave_and_truncated_files_are_refused(folder: Path, tmp_path: Path) -> None:
    (shard,) = folder.glob("*.distcp")
    outside = shutil.move(shard, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is missing"):
        read_metadata(folder)
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match="link that leaves its folder"):
        read_metadata(folder)
    shard.unlink()
    shutil.copy(outside, shard)
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated or of another checkpoint"):
        read_metadata(folder)


def test_metadata_of_the_wrong_kind(folder: Path) -> None:
    file = folder / ".metadata"
    content = file.read_bytes()
    for wrong in (b"", b"nonsense", content[: len(content) // 2], pickle.dumps({"a": 1})):
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"\.metadata is"):
            read_metadata(folder)
    file.write_bytes(content)

    def negative(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).offset = -1

    def outside(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.half"].chunks[0].offsets = torch.Size([4, 0])

    def no_size(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.half"].size = (5, 3)

    for edit in (negative, outside, no_size):
        file.write_bytes(content)
        rewrite(folder, edit)
        with pytest.raises(CheckpointError):
            read_metadata(folder)
    with pytest.raises(CheckpointError, match="not a torch DCP checkpoint folder"):
        read_metadata(folder.parent)


def test_a_blob_that_is_another_tensor(folder: Path) -> None:
    def swap(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.half"].size = torch.Size([3, 5])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 5]))
        metadata.state_dict_metadata["model.half"].chunks = [chunk]

    rewrite(folder, swap)
    with pytest.raises(CheckpointError, match=r"should be torch.float16 \(3, 5\) in 30 bytes, is"):
        tensor_chunks(folder, read_metadata(folder), "model.half")


@pytest.mark.parametrize("where", [22 + 20 - 8, 98 - 48])
def test_a_directory_that_torch_finds_elsewhere_is_refused(tmp_path: Path, where: int) -> None:
    """By the offset of the zip64 record, or of the directory in it; zipfile asks neither."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(4096, dtype=torch.uint8), buffer)
    raw = bytearray(buffer.getvalue())
    _payload_of(raw, tmp_path)
    at = len(raw) - where
    raw[at : at + 8] = (int.from_bytes(raw[at : at + 8], "little") - 200).to_bytes(8, "little")
    with pytest.raises(CheckpointError, match="names another directory"):
        _payload_of(raw, tmp_path)


def _payload_of(raw: bytearray, folder: Path) -> tuple[int, int]:
    (folder / "blob").write_bytes(raw)
    with open(folder / "blob", "rb") as file:
        return find_payload(BlobView(file.fileno(), 0, len(raw)))


def test_coverage_finds_gaps_and_overlaps(folder: Path) -> None:
    metadata = read_metadata(folder)
    entry = metadata.state_dict_metadata["model.half"]

    def fault(*chunks: tuple[tuple[int, int], tuple[int, int]]) -> str | None:
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks]
        return find_coverage_fault(metadata, "model.half")

    assert fault(((0, 0), (5, 3))) is None
    assert fault(((0, 0), (2, 3)), ((2, 0), (3, 3)), ((5, 0), (0, 3)), ((5, 0), (0, 3))) is None
    assert fault(((0, 1), (5, 2)), ((0, 0), (5, 1))) is None
    assert fault(((0, 0), (2, 2)), ((2, 0), (3, 2)), ((0, 2), (2, 1)), ((2, 2), (3, 1))) is None
    assert "hold 12 of 15" in str(fault(((0, 0), (4, 3))))
    assert "overlap" in str(fault(((0, 0), (3, 3)), ((2, 0), (3, 3))))
    # The right number of elements, but one twice and one never.
    assert "overlap" in str(fault(((0, 0), (2, 3)), ((1, 0), (3, 3))))
    assert "overlap" in str(fault(((0, 0), (5, 2)), ((0, 1), (5, 1))))
    assert "hold 0 of 15" in str(fault())
