"""Small files that ask for much are one error line, at once; links that leave a folder are none."""

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from transformers import AutoTokenizer

from toolkit import formats
from toolkit.checkpoint.shards import read_tensors
from toolkit.config import ModelConfig
from toolkit.data.tokens.tokenizer import load_tokenizer
from toolkit.errors import CheckpointError, ExportError, LoadingError, ModelError, ToolkitError
from toolkit.formats import export_manifest
from toolkit.models import build_on_meta, causal_lm

pytestmark = pytest.mark.faults

TINY = str(Path(__file__).parent.parent / "recipes/configs/tiny_llama")

# Run in a process of its own: time and memory are what is tested.
_MEASURE = """
import pkgutil, sys, time
from pathlib import Path
from toolkit.errors import ToolkitError
from toolkit.formats.container_memory import peak_host_memory

read, file = pkgutil.resolve_name(f"toolkit.formats.{sys.argv[1]}"), Path(sys.argv[2])
peak = lambda: peak_host_memory() // 2**20
before, begun = peak(), time.process_time()
try:
    read(file)
    what = "read"
except ToolkitError as error:
    assert len(str(error)) < 600 and chr(10) not in str(error)
    what = "refused"
room = max(200, file.stat().st_size // 10**5)
print(what, time.process_time() - begun < 5, peak() - before < room)
"""


def at_once(function: str, path: Path) -> str:
    """Return whether `function` reads `path` or refuses it by one line, in 5 s of processor time
    and 200 MB, or ten times a file of more than 20 MB.
    """
    command = [sys.executable, "-c", _MEASURE, function, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    what, *bounds = done.stdout.split()
    assert bounds == ["True", "True"], done.stdout + done.stderr
    return what


def refused_at_once(function: str, path: Path) -> bool:
    return at_once(function, path) == "refused"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save({"a": torch.randn(8, 8)}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def shared(value: Any, levels: int, width: int) -> list[Any]:
    for _ in range(levels):
        value = [value] * width
    return value


def huge(metadata: Metadata) -> None:
    entry, size = metadata.state_dict_metadata["a"], torch.Size([2**40])
    entry.size = entry.chunks[0].sizes = size
    entry.chunks[0].offsets = torch.Size([0])
    (info,) = metadata.storage_data.values()
    metadata.storage_data = {MetadataIndex("a", torch.Size([0]), 0): info}


def chunks(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["a"]
    entry.chunks = entry.chunks * 100_000
    metadata.state_dict_metadata = {f"t{i}": entry for i in range(10_000)}


EDITS: dict[str, Callable[[Metadata], Any]] = {
    "lists in lists": lambda m: setattr(m, "planner_data", {"a": shared("x", 18, 10)}),
    "one list of chunks in many places": chunks,
    "more elements than its file": huge,
}


@pytest.mark.parametrize("name", EDITS)
def test_metadata_that_asks_for_much(checkpoint: Path, name: str) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    EDITS[name](metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refused_at_once("read_metadata", checkpoint)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04}r" + struct.pack("<I", 2**28) + b".",  # LONG_BINPUT: 4 GB in the C unpickler
        b"\x80\x04})"
        + b"\x94h\x00h\x00\x86"
        + b"".join(b"\x94" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(1, 60))
        + b"K\x01s.",  # a key of 2^60 tuples, to be hashed
    ],
    ids=["memo", "key"],
)
def test_pickles_that_ask_for_much(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    assert refused_at_once("read_metadata", checkpoint)


def test_compressed_blobs_are_refused(checkpoint: Path) -> None:
    """torch.load would make 64 MB of these 64 KB."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2**24), plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(packed.getvalue())
    (checkpoint / info.relative_path).write_bytes(packed.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ToolkitError, match="compressed"):
        formats.tensor_chunks(checkpoint, formats.read_metadata(checkpoint), "a")
    table = formats.table_from_metadata(formats.read_metadata(checkpoint))
    with pytest.raises(CheckpointError, match="compressed"):
        read_tensors(checkpoint, table, {"a": torch.zeros(8, 8)})


def entries(count: int) -> bytes:
    line = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(line % i for i in range(count)) + b"}"


@pytest.mark.parametrize(
    ("count", "what"),
    [(50_000, "read"), (1_100_000, "refused"), (1_750_000, "refused")],
)
def test_headers_of_many_entries(tmp_path: Path, count: int, what: str) -> None:
    raw = entries(count)
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert at_once("read_header", tmp_path / "m.safetensors") == what


@pytest.mark.parametrize(("count", "what"), [(480_000, "read"), (1_010_000, "refused")])
def test_an_index_of_many_names(tmp_path: Path, count: int, what: str) -> None:
    names = ",".join(
        f'"model.layers.{i}.mlp":"model-00001-of-00002.safetensors"' for i in range(count)
    )
    (tmp_path / "index.json").write_text(f'{{"weight_map":{{{names}}}}}')
    assert at_once("safetensors_files.read_index", tmp_path / "index.json") == what


def test_shapes_of_many_dimensions(tmp_path: Path) -> None:
    """Their product alone would take hours."""
    sizes = b",".join([b"4611686018427387904"] * 400_000)
    raw = b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,0]}}' % sizes
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert at_once("read_header", tmp_path / "m.safetensors") == "refused"


def test_empty_tensors_beyond_any_memory(tmp_path: Path) -> None:
    raw = b'{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(LoadingError, match="which no tensor can have"):
        formats.read_header(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        '{"num_hidden_layers": 1000000}',
        '{"text_config": {"n_layer": 1000000}}',
        json.dumps({"layer_types": ["full_attention"] * 10_000}),
        json.dumps({"layer_types": ["full_attention"] * 10**6}),
        '{"num_labels": 1000000000}',
        '{"a":' * 10**5,
        '{"a":' * 150 + "1" + "}" * 150,
    ],
    ids=["layers", "section", "types", "many types", "labels", "open", "deep"],
)
def test_configs_that_ask_for_much(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        formats.read_config(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError):
        formats.check_parsed_files(tmp_path)


def test_other_json_of_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 126}')
    formats.check_parsed_files(tmp_path)
    (tmp_path / "generation_config.json").write_text("[" * 10**5)
    with pytest.raises(ModelError, match=r"generation_config\.json is nested too deeply"):
        formats.check_parsed_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer_config.json", b"[" * 10**5, "nested too deeply"),
        ("added_tokens.json", b"[" + b"0," * 2_000_000 + b"0]", "values"),
        ("config.json", b'{"num_labels": 1000000000}', "num_labels"),
        ("tokenizer.json", None, "bytes"),
    ],
)
def test_a_tokenizer_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, match: str
) -> None:
    """It is bounded before transformers reads it, by the model and by the data."""
    (tmp_path / "tokenizer.json").write_text("{}")
    if content is None:  # sparse: takes no space
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**30)
    else:
        (tmp_path / name).write_bytes(content)
    cfg = ModelConfig(TINY, tokenizer_name_or_path=str(tmp_path), init="random")

    def parse(*args: Any, **options: Any) -> None:
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", parse)
    for read in (build_on_meta, load_tokenizer):
        with pytest.raises(ModelError, match=match):
            read(cfg)


@pytest.mark.parametrize(("tokenizer", "asked"), [("org/words", None), ("org/model", "abc")])
def test_the_revision_of_a_model_is_not_one_of_another_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tokenizer: str, asked: str | None
) -> None:
    revisions = []

    def fetch(name: str, file: str, *, revision: str | None) -> str:
        revisions.append((name, revision))
        return str(Path(TINY, file))

    monkeypatch.setattr(formats, "local_folder", lambda *_: Path(TINY))
    monkeypatch.setattr(causal_lm, "cached_file", fetch)
    cfg = ModelConfig("org/model", tokenizer_name_or_path=tokenizer, revision="abc", init="random")
    build_on_meta(cfg)
    assert revisions == [(tokenizer, asked)]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    export_manifest.write(folder, export_manifest.describe_folder(folder), {})
    return folder


def test_a_manifest_that_is_nested(export: Path) -> None:
    (export / export_manifest.FILE).write_text('{"manifest":' * 10**5)
    with pytest.raises(ExportError, match="nested too deeply"):
        export_manifest.read(export)


def test_links_that_leave_a_folder(export: Path, tmp_path: Path) -> None:
    file = export / export_manifest.FILE
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ExportError, match="link that leaves its folder"):
        export_manifest.read(export)
    (tmp_path / "secret").write_text("a secret")
    (export / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="link that leaves its folder"):
        formats.asset_files(export)


def test_links_of_the_hubs_cache_belong_to_it(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert formats.asset_files(snapshot) == {"tokenizer.json": b"{}"}


def test_weights_may_not_be_links_out_of_their_model(tmp_path: Path) -> None:
    """Those of the Hub's cache lead into the blobs of the same model, and no further."""
    entry, other = tmp_path / "models--org--one", tmp_path / "models--org--two"
    snapshot = entry / "snapshots" / "abc"
    for folder in (snapshot, entry / "blobs", other / "blobs"):
        folder.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, entry / "blobs" / "1")
    save_file({"a": torch.ones(3)}, other / "blobs" / "2")
    file = snapshot / "model.safetensors"
    file.symlink_to("../../blobs/1")
    assert formats.weight_files(snapshot) == [file]
    (tmp_path / "mine").symlink_to(snapshot)  # a link to the folder is no way out of it
    assert formats.weight_files(tmp_path / "mine") == [tmp_path / "mine" / file.name]
    file.unlink()
    file.symlink_to("../../../models--org--two/blobs/2")
    with pytest.raises(LoadingError, match=r"link that leaves its folder, to .*/2; copy the file"):
        formats.weight_files(snapshot)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    local = tmp_path / "local"
    local.mkdir()
    (local / "model.safetensors.index.json").write_text(json.dumps(index))
    (local / "model-1.safetensors").symlink_to(other / "blobs" / "2")
    with pytest.raises(LoadingError, match="link that leaves its folder"):
        formats.weight_files(local)
    (local / "model-1.safetensors").unlink()
    save_file({"a": torch.ones(3)}, local / "weights")
    (local / "model-1.safetensors").symlink_to("weights")
    assert formats.weight_files(local) == [local / "model-1.safetensors"]


@pytest.mark.parametrize("name", ["..\\x", "C:\\x", "c:x", "/x", "a/../x", "a//x", "./x", "", "\0"])
def test_names_that_lead_out_on_some_system(name: str) -> None:
    assert not formats.is_inner_path(name)
    assert formats.is_inner_path("dcp/.metadata")
