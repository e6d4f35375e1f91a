"""The manifest of an export: what it says, and that no byte of it can change unseen."""

import hashlib
import json

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from toolkit.errors import ExportError
from toolkit.formats import export_manifest, read_header
from toolkit.hub import local
from toolkit.verify.findings import Findings


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    one = {"a": torch.randn(300, 700), "norm": torch.randn(3), "step": torch.tensor(7)}
    save_file(one, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"b": torch.randn(5, 7).bfloat16()}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / ".gitattributes").write_text("of the Hub")
    return tmp_path


def test_says_what_the_files_and_tensors_are(folder):
    described = export_manifest.describe_folder(folder)
    assert set(described["files"]) == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for name, entry in described["files"].items():
        raw = (folder / name).read_bytes()
        assert entry == {"size": len(raw), "xxh3": xxhash.xxh3_128_hexdigest(raw)}
    assert set(described["tensors"]) == {"a", "b", "norm", "step"}
    for name, entry in described["tensors"].items():
        stored = read_header(folder / entry["file"])[name]
        raw = (folder / entry["file"]).read_bytes()[stored.begin : stored.begin + stored.nbytes]
        assert entry["xxh3"] == xxhash.xxh3_128_hexdigest(raw)
    assert described["tensors"]["b"]["dtype"] == "BF16"
    assert described["tensors"]["b"]["shape"] == [5, 7]
    assert described["tensors"]["step"]["shape"] == []


def test_what_was_written_is_read_back_and_no_flipped_bit_is(folder):
    described = export_manifest.describe_folder(folder)
    origin = {
        "step": 3,
        "dtype": "auto",
        "run": {"loss": float("nan"), "ü": [1e-5, 0.1]},
        "n": {2: 1},
    }
    export_manifest.write(folder, described, origin)
    read = export_manifest.read(folder)
    assert read["files"] == described["files"]
    assert read["tensors"] == described["tensors"]
    assert read["origin"]["run"] == {"loss": None, "ü": [1e-5, 0.1]}
    file = folder / export_manifest.FILE
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 11):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(ExportError, match=export_manifest.FILE):
            export_manifest.read(folder)
    for changed in (whole[:-1], whole + b"\n", whole[: len(whole) // 2], b""):
        file.write_bytes(changed)
        with pytest.raises(ExportError, match="damaged"):
            export_manifest.read(folder)
    file.unlink()
    with pytest.raises(ExportError, match="has no"):
        export_manifest.read(folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "sub/x", "", ".", "..", "a\0b", "a\\b", export_manifest.FILE]
)
def test_a_name_that_is_no_file_of_the_folder_is_refused(folder, name):
    described = export_manifest.describe_folder(folder)
    described["files"][name] = described["files"]["config.json"]
    export_manifest.write(folder, described, {})  # its own hash is right
    with pytest.raises(ExportError, match="no file of its folder"):
        export_manifest.read(folder)


def test_links_folders_and_doubled_tensors_are_refused(folder):
    (folder / "sub").mkdir()
    with pytest.raises(ExportError, match="not a plain file"):
        export_manifest.describe_folder(folder)
    (folder / "sub").rmdir()
    (folder / "link.json").symlink_to("config.json")
    with pytest.raises(ExportError, match="not a plain file"):
        export_manifest.describe_folder(folder)
    (folder / "link.json").unlink()
    save_file({"a": torch.zeros(2)}, folder / "other.safetensors")
    with pytest.raises(ExportError, match="tensor a is in both"):
        export_manifest.describe_folder(folder)


def test_another_version_says_so(folder):
    export_manifest.write(folder, export_manifest.describe_folder(folder), {})
    file = folder / export_manifest.FILE
    manifest = json.loads(file.read_text())["manifest"] | {"version": export_manifest.VERSION + 1}
    file.write_bytes(export_manifest._encode(manifest))
    with pytest.raises(ExportError, match=r"has version 2; this toolkit \(.*\) reads version 1"):
        export_manifest.read(folder)


def test_files_are_compared_by_xxh3_and_pushed_by_sha256(folder, monkeypatch):
    described = export_manifest.describe_folder(folder)
    raws = {name: (folder / name).read_bytes() for name in described["files"]}
    sha256 = {name: hashlib.sha256(raw).hexdigest() for name, raw in raws.items()}
    export_manifest.write(folder, described, {})
    files = export_manifest.read(folder)["files"]
    with Findings(folder, "export") as findings:
        assert findings.find_damaged_files(folder, files) == {}
        for kept in (10**7, 0):  # in memory, and by their path
            monkeypatch.setattr(local, "_MAX_BYTES_IN_MEMORY", kept)
            monkeypatch.setattr(local, "verify_export", lambda *_: findings.report)
            export = local.read_export(folder, "org/name", None)
            assert {n: e["sha256"] for n, e in export.entries.items() if n in raws} == sha256
        name = "model-00001-of-00002.safetensors"
        changed = bytearray(raws[name])
        changed[-1] ^= 1
        (folder / name).write_bytes(changed)
        assert findings.find_damaged_files(folder, files) == {
            name: "has other bytes than were saved"
        }
        with pytest.raises(ExportError, match="changed after it was verified"):
            local.read_export(folder, "org/name", None)
