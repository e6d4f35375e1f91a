"""What `verify` proves, on checkpoints saved by two ranks and their exports: nothing is said of
what is whole, and everything that is not is named.
"""

import contextlib
import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks
from safetensors.torch import load_file, save_file

from toolkit import cli, formats
from toolkit.checkpoint import commit
from toolkit.errors import CheckpointError, ExportError, ToolkitError
from toolkit.export import consolidate
from toolkit.formats import export_manifest, read_metadata, tensor_chunks
from toolkit.verify import findings as verify_findings
from toolkit.verify import verify_checkpoint, verify_export

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "dtype": torch.bfloat16}),
    "moe": ("qwen3_moe", {"dtype": torch.bfloat16}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder NAME/{source, run (steps 10 and 20), export, float32, bfloat16}, and of the llama
    export-10 and export-20 in several files.
    """
    root = tmp_path_factory.mktemp("verify")
    for name, (kind, changes) in MODELS.items():
        save_byte_tokenizer(root / name / "source")
        save_tiny_model(root / name / "source", kind, **dict(changes))
    run_ranks(damage.save_steps, 2, str(root))
    for name in MODELS:
        consolidate(root / name / "run", root / name / "export")
        for dtype in ("float32", "bfloat16"):
            consolidate(root / name / "run", root / name / dtype, dtype=dtype)
    for step, folder in commit.committed_steps(root / "llama" / "run").items():
        consolidate(folder, root / "llama" / f"export-{step}", max_shard_size=60_000)
    return root


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a part of `root`, to be changed."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(root / name, tmp_path / Path(name).name))

    return make


def rewrite(export: Path) -> None:
    """Let the export's own manifest agree with what is in the folder now."""
    origin = {"checkpoint": None, "step": 20, "dtype": "auto", "run": None}
    if (export / export_manifest.FILE).is_file():
        origin = json.loads((export / export_manifest.FILE).read_text())["manifest"]["origin"]
    export_manifest.write(export, export_manifest.describe_folder(export), origin)


def change_tensors(export: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of an export of one file, and let its manifest agree."""
    file = export / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    rewrite(export)


def change_config(export: Path, **values: Any) -> None:
    file = export / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    rewrite(export)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_whole_is_verified(root: Path, name: str) -> None:
    report = verify_checkpoint(root / name / "run")
    assert (report.ok, report.notes, report.kind) == (True, [], "run")
    files = [p for p in (root / name / "run").rglob("*") if p.is_file()]
    assert (report.files, report.bytes) == (len(files), sum(p.stat().st_size for p in files))
    assert report.tensors > 100
    step = verify_checkpoint(root / name / "run" / "checkpoints" / "step-00000020")
    assert step.ok
    assert step.files * 2 == report.files
    for kind in ("export", "float32", "bfloat16"):
        alone = verify_export(None, root / name / kind)
        proven = verify_export(root / name / "run", root / name / kind)
        assert alone.ok, alone.findings
        assert proven.ok, proven.findings
        assert alone.tensors == len(load_file(root / name / kind / "model.safetensors"))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_checkpoint(root: Path, name: str) -> None:
    report = verify_export(root / name / "run", root / name / "export", logits=True)
    assert report.ok, report.findings
    assert report.logits_difference == 0.0
    assert "finite logits" in verify_export(None, root / name / "export", logits=True).notes[0]


def test_logits_of_other_weights_differ(root: Path, copy: Callable[[str], Path]) -> None:
    export = copy("llama/export")
    change_tensors(export, lambda t: t["lm_head.weight"].mul_(1.1))
    report = verify_export(root / "llama" / "run", export, logits=True)
    assert any("logits differ" in what for _, _, what in report.findings)
    change_tensors(export, lambda t: t["lm_head.weight"].fill_(float("nan")))
    report = verify_export(None, export, logits=True)
    assert [f[2] for f in report.findings] == ["computes logits that are not finite"]


def one_bit(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        kinds = {2: torch.int16, 4: torch.int32}
        flat = tensors[name].view(kinds[tensors[name].dtype.itemsize]).view(-1)
        flat[len(flat) // 2] ^= 1

    return change


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("export", "tensor"),
    [
        ("llama/export", LAYER + "mlp.up_proj.weight"),
        ("llama/export", "model.norm.weight"),
        ("llama/bfloat16", LAYER + "self_attn.q_proj.weight"),  # against the cast
        ("tied/export", "model.embed_tokens.weight"),
        ("tied/float32", LAYER + "input_layernorm.weight"),
        ("moe/export", LAYER + "mlp.gate.weight"),
        ("moe/export", LAYER + "mlp.experts.0.gate_proj.weight"),  # converted
        ("moe/float32", LAYER + "mlp.experts.0.down_proj.weight"),
    ],
)
def test_one_bit_of_the_export_is_not_the_checkpoint(
    root: Path, copy: Callable[[str], Path], export: str, tensor: str
) -> None:
    folder = copy(export)
    change_tensors(folder, one_bit(tensor))
    assert verify_export(None, folder).ok  # by itself it is sound
    report = verify_export(root / export.partition("/")[0] / "run", folder)
    assert [f[:2] for f in report.findings] == [("model.safetensors", tensor)]


def test_a_checkpoint_of_another_tool_has_no_sums(root: Path) -> None:
    """A plain DCP folder: every value is compared with the shards themselves."""
    dcp, source = root / "llama/run/checkpoints/step-00000020/dcp", root / "llama/source"
    for kind in ("export", "bfloat16"):
        report = verify_export(dcp, root / "llama" / kind, hf_assets=source, logits=True)
        assert report.ok, report.findings
        assert report.logits_difference == 0.0
    report = verify_export(dcp, root / "llama" / "export-10", hf_assets=source)
    assert len(report.findings) == report.tensors


def test_a_tensor_that_the_checkpoint_lacks_is_not_proven(root: Path, tmp_path: Path) -> None:
    tensors = load_file(root / "llama/export/model.safetensors")
    del tensors["model.norm.weight"]
    dcp.save({f"model.{n}": t for n, t in tensors.items()}, checkpoint_id=tmp_path, no_dist=True)
    report = verify_export(tmp_path, root / "llama/export", hf_assets=root / "llama/source")
    (finding,) = report.findings
    assert finding[1] == "model.norm.weight"
    assert "not in the checkpoint" in finding[2]


def test_an_export_of_another_step_is_not_the_checkpoint(root: Path) -> None:
    report = verify_export(root / "llama" / "run", root / "llama" / "export-10")
    first, *others = report.findings
    assert first[:2] == ("", None)
    assert first[2].startswith("was made of step 10, and is compared with ")
    tensors = load_file(root / "llama/export/model.safetensors")
    assert {f[1] for f in others} == set(tensors)


def test_a_cast_that_does_not_round_is_found(root: Path, copy: Callable[[str], Path]) -> None:
    full = load_file(root / "llama" / "float32" / "model.safetensors")
    name = LAYER + "mlp.down_proj.weight"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        bits = full[name].view(torch.int32) & -0x10000
        tensors[name] = bits.view(torch.float32).to(torch.bfloat16)

    export = copy("llama/bfloat16")
    change_tensors(export, cut)
    report = verify_export(root / "llama" / "run", export)
    assert [f[1] for f in report.findings] == [name]
    assert "values differ" in report.findings[0][2]


def test_experts_in_another_order_are_found(root: Path, copy: Callable[[str], Path]) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        one, two = (LAYER + f"mlp.experts.{i}.up_proj.weight" for i in (1, 2))
        tensors[one], tensors[two] = tensors[two], tensors[one]

    export = copy("moe/export")
    change_tensors(export, swap)
    assert verify_export(None, export).ok
    report = verify_export(root / "moe" / "run", export)
    assert len(report.findings) == 1
    assert "gate_up_proj" in report.findings[0][2]


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "tensor", "what"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight", "missing"),
        (rename("model.norm.weight", "model.norm.wait"), "model.norm.wait", "not known"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()}),
            "lm_head.weight",
            r"has shape \[299, 32\], config.json describes \[300, 32\]",
        ),
    ],
)
def test_what_the_config_describes_must_be_there(
    copy: Callable[[str], Path], change: Any, tensor: str, what: str
) -> None:
    export = copy("llama/export")
    change_tensors(export, change)
    report = verify_export(None, export)
    assert any(t == tensor and re.search(what, w) for _, t, w in report.findings)


def test_a_tied_weight_is_stored_once(root: Path, copy: Callable[[str], Path]) -> None:
    export = copy("tied/export")
    both = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})  # noqa: E731
    change_tensors(export, both)
    for checkpoint in (None, root / "tied" / "run"):
        said = verify_export(checkpoint, export).findings
        assert any("stored twice" in what for _, _, what in said)
    change_tensors(export, lambda t: t["lm_head.weight"].add_(1))
    assert any("the two differ" in what for _, _, what in verify_export(None, export).findings)


def test_a_parameter_under_two_spellings_is_stored_twice(copy: Callable[[str], Path]) -> None:
    export = copy("llama/export")
    change_tensors(export, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    found = verify_export(None, export).findings
    assert any("is model.norm.weight, which is stored twice" in what for _, _, what in found)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"architectures": ["FSDPLlamaForCausalLM"]}, "a wrapper of training"),
        ({"architectures": None}, "without LlamaForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "evil.py, which is missing"),
        ({"num_hidden_layers": 2}, "not known to the model"),
        ({"num_hidden_layers": 4}, "missing in the checkpoint"),
        ({"model_type": "no_such_type"}, "does not know"),
    ],
)
def test_a_config_that_is_not_pristine(
    copy: Callable[[str], Path], values: dict[str, Any], what: str
) -> None:
    export = copy("llama/export")
    change_config(export, **values)
    assert any(what in said for _, _, said in verify_export(None, export).findings)


def test_a_config_that_is_not_that_of_the_checkpoint(
    root: Path, copy: Callable[[str], Path]
) -> None:
    export = copy("llama/export")
    change_config(export, rope_theta=1.0, auto_map={})
    (export / "tokenizer.json").write_text("{}")
    (export / "code.py").write_text("")
    rewrite(export)
    assert verify_export(None, export).ok
    said = {(f, w.split(" ")[0]) for f, _, w in verify_export(root / "llama/run", export).findings}
    assert {("config.json", "rope_theta"), ("config.json", "auto_map")} <= said
    assert {f for f, _ in said} == {"config.json", "tokenizer.json", "code.py"}


def test_the_dtype_that_was_asked_for(root: Path, copy: Callable[[str], Path]) -> None:
    export = copy("llama/bfloat16")
    change_config(export, dtype="float32")
    (finding,) = verify_export(None, export).findings
    assert finding == (
        "config.json",
        None,
        "dtype is float32, the export was requested in bfloat16",
    )
    auto = copy("llama/export")
    change_config(auto, dtype="float16")  # to which a reader casts
    (finding,) = verify_export(root / "llama/run", auto).findings
    assert finding[:2] == ("config.json", None)
    assert finding[2].startswith("dtype was ")
    assert finding[2].endswith("is 'float16': readers cast to it")


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "extra.safetensors",
        "other.safetensors.index.json",
        ".hidden.pt",
        "sub/",
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_what_does_not_belong_into_an_export(
    copy: Callable[[str], Path], name: str, known: bool
) -> None:
    export = copy("llama/export")
    if name.endswith("/"):
        (export / name).mkdir()
    elif name.endswith(".safetensors"):
        save_file({"a": torch.zeros(1)}, export / name)
    else:
        (export / name).write_text("{}")
    if not known:
        (export / export_manifest.FILE).unlink()
    assert name.rstrip("/") in {f for f, _, _ in verify_export(None, export).findings}


def test_the_model_card_is_the_users_own(copy: Callable[[str], Path]) -> None:
    export = copy("llama/export")
    (export / "README.md").write_text("# mine")
    (export / ".gitattributes").write_text("of the Hub")
    (export / "LICENSE").write_text("terms of the base")
    (export / "USE_POLICY.md").write_text("more of them")
    assert verify_export(None, export).ok


def test_a_link_is_named_but_for_the_hubs_cache(root: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub/snapshots/abc", tmp_path / "hub/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((root / "llama" / "export").iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    assert verify_export(None, snapshot).ok
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(root / "llama/export/config.json")
    findings = verify_export(None, snapshot).findings
    assert {f for f, _, _ in findings} == {"config.json"}


def test_an_index_must_agree_with_its_files(copy: Callable[[str], Path]) -> None:
    export = copy("llama/export-20")
    file = export / formats.INDEX_FILE
    index = json.loads(file.read_text())

    def said(**values: Any) -> list[str]:
        file.write_text(json.dumps(index | values))
        rewrite(export)
        return [w for f, _, w in verify_export(None, export).findings if f == file.name]

    places = dict(index["weight_map"])
    assert "total_size" in said(metadata={"total_size": 7})[0]
    assert "not in the index" in said(weight_map={k: places[k] for k in list(places)[1:]})[0]
    wrong = places | {"model.norm.weight": min(places.values())}
    assert "does not hold it" in said(weight_map=wrong)[0]
    assert "not a file of its folder" in said(weight_map=places | {"x": "../x.safetensors"})[0]
    file.write_text('{"weight_map": {"a": "b", "a": "c"}}')
    rewrite(export)
    assert "occurs twice" in verify_export(None, export).findings[0][2]


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Let manifest and COMMIT agree with the files that are there now."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    for name in manifest["files"]:
        raw = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (checkpoint / "manifest.json").write_text(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")


def test_sums_see_what_hashes_of_files_do_not(root: Path, copy: Callable[[str], Path]) -> None:
    """Bytes that were wrong before they were hashed: the files are as they were written."""
    folder = copy("llama/run/checkpoints/step-00000020")
    key = "model.model.layers.0.mlp.up_proj.weight"
    chunk = tensor_chunks(folder / "dcp", read_metadata(folder / "dcp"), key)[0]
    assert chunk.raw is not None
    content = bytearray(chunk.file.read_bytes())
    content[chunk.raw + 5] ^= 4
    chunk.file.write_bytes(content)
    reseal(folder)
    assert commit.find_damaged_files(folder) == []
    findings = verify_checkpoint(folder).findings
    assert [f[:2] for f in findings] == [(f"dcp/{chunk.file.name}", key)]
    # The exports were made before that; of what they hold it can no longer be said.
    for kind in ("export", "bfloat16"):
        (finding,) = verify_export(folder, root / "llama" / kind).findings
        assert finding[1] == key.removeprefix("model.")
        assert "differs from its sum in the manifest" in finding[2]


def test_a_manifest_must_say_what_the_metadata_says(copy: Callable[[str], Path]) -> None:
    folder = copy("llama/run/checkpoints/step-00000020")
    sums = json.loads((folder / "manifest.json").read_text())["row_sums"]
    sums["model.more"] = sums.pop("model.model.norm.weight")
    sums["model.lm_head.weight"] ^= 1
    reseal(folder, row_sums=sums)
    report = verify_checkpoint(folder)
    assert {(f.split("/")[-1][:3], t) for f, t, _ in report.findings} == {
        (".me", "model.more"),
        ("__0", "model.lm_head.weight"),
    }
    assert "no sum of model.model.norm.weight" in report.notes[0]


def test_every_folder_of_a_run_is_judged(copy: Callable[[str], Path]) -> None:
    run = copy("llama/run")
    steps = run / "checkpoints"
    for name in ("step-00000030.tmp-0123abcd", "step-00000005.bad-0123abcd", "notes"):
        (steps / name).mkdir()
    report = verify_checkpoint(run)
    assert report.ok
    assert [n.split(" ")[0] for n in report.notes] == [
        "checkpoints/notes",
        "checkpoints/step-00000005.bad-0123abcd",
        "checkpoints/step-00000030.tmp-0123abcd",
    ]
    (steps / "step-00000010" / "COMMIT").unlink()
    (steps / "step-00000020" / "rng" / "extra").write_text("")
    (steps / "step-00000020" / "hf" / "link").symlink_to("config.json")
    (steps / "step-00000040").mkdir()
    assert {f for f, _, _ in verify_checkpoint(run).findings} == {
        "checkpoints/step-00000010/COMMIT",
        "checkpoints/step-00000020/rng/extra",
        "checkpoints/step-00000020/hf/link",
        "checkpoints/step-00000040/COMMIT",
        "checkpoints/step-00000040/manifest.json",
    }


def test_white_space_around_commit_is_damage(copy: Callable[[str], Path]) -> None:
    folder = copy("llama/run/checkpoints/step-00000020")
    seal = (folder / "COMMIT").read_bytes()
    for changed in (seal[:-1], seal + b"\n", seal[:-1] + b"\v", seal[:-1] + b" ", seal.upper()):
        (folder / "COMMIT").write_bytes(changed)
        assert [f[0] for f in verify_checkpoint(folder).findings] == ["COMMIT", "manifest.json"]


# --------------------------------------------------------------------------------------------------
# Random damage; `python tests/damage.py` does more of it
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def targets(root: Path) -> dict[str, damage.Target]:
    llama = root / "llama"
    return damage.targets(llama / "run", (llama / "export-10", llama / "export-20"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flips"), [("checkpoint", 50), ("export", 100)])
def test_random_damage_is_reported(
    targets: dict[str, damage.Target], name: str, flips: int
) -> None:
    outcome = damage.strike(targets[name], flips, 10, seed=flips, resume_every=5)
    assert outcome.missed == []
    assert sum(outcome.done.values()) == flips + 40


def test_comparing_sizes_alone_would_miss_flips(
    targets: dict[str, damage.Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    def size_only(file: Path, expected: dict[str, Any], *_: Any, **__: Any) -> str | None:
        return None if file.stat().st_size == expected["size"] else "has another size"

    monkeypatch.setattr(verify_findings, "describe_file_damage", size_only)
    for target in targets.values():
        missed, chance = damage.Outcome(), random.Random(0)
        for _ in range(15):
            damage.try_once(target, "flip", chance, missed, resume=False)
        assert len(missed.missed) > 5


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def test_the_command(
    root: Path, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    llama = root / "llama"
    assert cli.main(["verify", str(llama / "run")]) == 0
    assert "run verified (2" in capsys.readouterr().out
    assert cli.main(["verify", str(llama / "run"), str(llama / "export"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["findings"], report["kind"]) == (True, [], "export")
    assert cli.main(["verify", str(llama / "export"), "--logits"]) == 0
    assert "finite logits" in capsys.readouterr().out
    export = copy("llama/export")
    content = bytearray((export / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (export / "model.safetensors").write_bytes(content)
    name = max(formats.read_header(export / "model.safetensors").items(), key=lambda e: e[1].begin)[
        0
    ]
    assert cli.main(["verify", str(export)]) == 1
    assert f"model.safetensors: {name}: has other bytes" in capsys.readouterr().out
    assert cli.main(["verify", str(export), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["tensor"] == name
    assert cli.main(["verify", str(llama / "run"), "--logits"]) == 2
    assert cli.main(["verify"]) == 2


def test_a_wrong_path_is_answered_with_the_right_one(root: Path) -> None:
    llama = root / "llama"
    for wrong in (llama, llama / "run" / "checkpoints"):
        with pytest.raises(CheckpointError, match=str(llama / "run")):
            verify_checkpoint(wrong)
    with pytest.raises(CheckpointError, match=r"did you mean .*step-00000020"):
        verify_checkpoint(llama / "run" / "checkpoints" / "step-00000020" / "dcp")
    with pytest.raises(CheckpointError, match="does not exist"):
        verify_checkpoint(llama / "nothing")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        verify_checkpoint(llama / "export")
    with pytest.raises(ExportError, match="is a checkpoint, not an export"):
        verify_export(llama / "export", llama / "run")
    with pytest.raises(ExportError, match="give its folder"):
        verify_export(None, llama / "export" / "config.json")
    with pytest.raises(ExportError, match=r"did you mean .*export"):
        verify_export(None, llama)


# --------------------------------------------------------------------------------------------------
# Files of others: one finding or one line, never a traceback
# --------------------------------------------------------------------------------------------------

NESTED = "[" * 100_000 + "]" * 100_000
STRANGE = {
    "nested": NESTED,
    "nested object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "list": "[1]",
}


@pytest.mark.parametrize("content", STRANGE)
@pytest.mark.parametrize(
    "name",
    ["config.json", formats.INDEX_FILE, export_manifest.FILE, "tokenizer_config.json"],
)
def test_strange_json_in_an_export_is_a_finding(
    root: Path, copy: Callable[[str], Path], name: str, content: str
) -> None:
    export = copy("llama/export-20")
    (export / name).write_text(STRANGE[content])
    assert name in {f for f, _, _ in verify_export(None, export).findings}
    if name != export_manifest.FILE:  # as if it had been written so
        rewrite(export)
    said = verify_export(root / "llama/run", export, logits=True).findings
    assert name in {f for f, _, _ in said}
    (export / export_manifest.FILE).unlink()
    assert not verify_export(None, export).ok


@pytest.mark.parametrize("content", STRANGE)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "hf/config.json"])
def test_strange_json_in_a_checkpoint_is_a_finding(
    root: Path, copy: Callable[[str], Path], name: str, content: str
) -> None:
    folder = copy("llama/run/checkpoints/step-00000020")
    (folder / name).write_text(STRANGE[content])
    assert name in {f for f, _, _ in verify_checkpoint(folder).findings}
    if name == "manifest.json":
        text = (folder / name).read_bytes()
        (folder / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")
    else:
        reseal(folder)
    findings = verify_checkpoint(folder).findings
    assert (name in {f for f, _, _ in findings}) == (name != "hf/config.json")
    if name != "state.json":  # of which an export has no need
        with contextlib.suppress(ToolkitError):  # one line
            assert not verify_export(folder, root / "llama/export").ok


@pytest.mark.parametrize("name", ["README.md", export_manifest.FILE, ".hidden"])
def test_a_link_out_of_an_export_is_a_finding(copy: Callable[[str], Path], name: str) -> None:
    export = copy("llama/export")
    elsewhere = export.parent / "elsewhere"
    if (export / name).exists():
        (export / name).rename(elsewhere)
    else:
        elsewhere.write_text("of somebody else")
    (export / name).symlink_to(elsewhere)
    assert name in {f for f, _, _ in verify_export(None, export).findings}
