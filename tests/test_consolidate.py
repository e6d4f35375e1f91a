"""Sharded checkpoints become Hugging Face folders with the same bits, names and companions.

One spawn of three gloo ranks writes a checkpoint of each tiny model; one process writes the same
weights again. Every test then works on those files without a process group.
"""

import errno
import filecmp
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, conversion_mapping

from toolkit import checkpoint
from toolkit.checkpoint import commit
from toolkit.checkpoint.sources import find_source
from toolkit.config.settings import CheckpointConfig, ModelConfig
from toolkit.errors import CheckpointError, ExportError, ToolkitError
from toolkit.export import consolidate, writer
from toolkit.export import plan as export_plan
from toolkit.export.plan import parse_options
from toolkit.export.writer import ExportProof
from toolkit.formats import ExportGroup, HFAssets, export_manifest, plain_files, stored_tensors
from toolkit.loading.pretrained import materialise
from toolkit.models import build_on_meta, decoder_layers, model_on_meta, tied_names
from toolkit.verify import verify_export

RANKS = 3
SMALL = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 2}  # 2 rows for 3 ranks
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", SMALL | HEADS | {"tie_word_embeddings": False}, "bfloat16"),
    "tied": ("LlamaConfig", SMALL | HEADS | {"tie_word_embeddings": True}, "float32"),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2}, "float32"),
    "mixtral": ("MixtralConfig", SMALL | HEADS | {"num_local_experts": 4}, "bfloat16"),
    # 0-d persistent buffers
    "apertus": ("ApertusConfig", SMALL | HEADS, "bfloat16"),
}


def write_source(folder: Path, name: str) -> None:
    kind, fields, dtype = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')


def trained(source: Path) -> torch.nn.Module:
    """Return fp32 weights that are not the source's: the same in every process."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.arange(parameter.numel()).add(i).sin().view(parameter.shape)
            parameter.add_(noise, alpha=0.01)
    return model


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    aliases = tied_names(model)
    state = {f"model.{k}": v for k, v in model.state_dict().items() if k not in aliases}
    for name, parameter in model.named_parameters():
        state[f"optimizer.{name}.exp_avg"] = torch.zeros_like(parameter)
    return state


def _write_sharded(rank: int, world: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in MODELS:
        model = trained(Path(root) / name / "source")
        for layer in decoder_layers(model).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        dcp.save(stored(model), checkpoint_id=Path(root) / name / "dcp-sharded")
    columns = {
        key: distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)]) if tensor.dim() else tensor
        for key, tensor in stored(trained(Path(root) / "llama" / "source")).items()
    }
    dcp.save(columns, checkpoint_id=Path(root) / "columns")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder NAME/{source, dcp-sharded, dcp-single, sharded (run), single (run)}."""
    root = tmp_path_factory.mktemp("consolidate")
    for name in MODELS:
        write_source(root / name / "source", name)
    run_ranks(_write_sharded, RANKS, str(root))
    for name in MODELS:
        dcp.save(stored(trained(root / name / "source")), checkpoint_id=root / name / "dcp-single")
        for kind in ("sharded", "single"):
            write_run(root / name / kind, root / name / f"dcp-{kind}", root / name / "source")
    return root


def write_run(run: Path, dcp_folder: Path, source: Path, init: str = "pretrained") -> Path:
    folder = run / "checkpoints/step-00000007"
    shutil.copytree(dcp_folder, folder / "dcp")
    (folder / "hf").mkdir()
    build_on_meta(ModelConfig(name_or_path=str(source), init=init)).hf_assets.save(folder / "hf")
    (folder / "state.json").write_text(json.dumps({"step": 7, "world_size": RANKS}))
    files = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        files[str(file.relative_to(folder))] = {"size": len(content), "sha256": digest}
    manifest = json.dumps({"version": 1, "step": 7, "files": files}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMIT").write_text(hashlib.sha256(manifest).hexdigest() + "\n")
    return run


def with_sums(run: Path, to: Path) -> Path:
    """Return a copy of a run of `write_run` whose manifest has the sums of its tensors."""
    shutil.copytree(run, to)
    folder = next((to / "checkpoints").iterdir())
    source = find_source(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    sums = {key: stored_tensors.compute_row_sum(source.stored(key)) for key in source.tensors}
    manifest["row_sums"] = sums
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")
    return to


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        a.dtype == right[k].dtype and a.shape == right[k].shape and torch.equal(a, right[k])
        for k, a in left.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_float32_is_bit_equal_and_loads_without_a_word(
    root: Path, tmp_path: Path, name: str
) -> None:
    out = consolidate(root / name / "sharded", tmp_path / "out", dtype="float32")
    assert out == str(tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same_bits(loaded.state_dict(), trained(root / name / "source").state_dict())
    source = weights(root / name / "source")
    assert weights(out).keys() == source.keys()
    assert {k: v.shape for k, v in weights(out).items()} == {k: v.shape for k, v in source.items()}
    assert (Path(out) / "tokenizer.json").read_text() == '{"a": 1}'
    assert (Path(out) / "generation_config.json").is_file()
    assert not list(tmp_path.glob("out.*"))
    assert sorted(p.name for p in Path(out).iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize("name", MODELS)
def test_auto_is_the_cast_to_the_dtype_of_the_source(root: Path, tmp_path: Path, name: str) -> None:
    full = weights(consolidate(root / name / "sharded", tmp_path / "full", dtype="float32"))
    auto = weights(consolidate(root / name / "sharded", tmp_path / "auto"))
    source = weights(root / name / "source")
    assert same_bits(auto, {k: v.to(source[k].dtype) for k, v in full.items()})
    # Pristine: the bytes of the source's config.
    expected = HFAssets.load(root / name / "source").config
    assert json.loads((tmp_path / "auto/config.json").read_text()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_export_does_not_depend_on_the_number_of_shards(
    root: Path, tmp_path: Path, name: str
) -> None:
    one = Path(consolidate(root / name / "single", tmp_path / "one"))
    many = Path(consolidate(root / name / "sharded", tmp_path / "many"))
    left, right = export_manifest.read(one), export_manifest.read(many)
    assert left["origin"].pop("checkpoint") != right["origin"].pop("checkpoint")
    assert left == right
    names = sorted(left["files"])
    assert [export_manifest.FILE, *names] == sorted(p.name for p in many.iterdir())[-1:] + names
    assert filecmp.cmpfiles(one, many, names, shallow=False) == (names, [], [])


def test_experts_come_back_one_by_one(root: Path, tmp_path: Path) -> None:
    keys = weights(consolidate(root / "mixtral/sharded", tmp_path / "out")).keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in keys
    # Each is a part of the fused tensor, written as it lies there: no second copy is held.
    model = export_plan.build_model_from_assets(root / "mixtral/source")
    state = trained(root / "mixtral/source").state_dict()
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}
    plan = export_plan.make_model_plan(model, shapes, None, 10**9, where="a test")
    fused = [group for group in plan.groups if group.converted]
    assert fused
    for group in fused:
        parameters = {name: state[name] for name in group.sources}
        held = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
        outputs = plan.convert(group, dict(parameters))
        assert {tensor.untyped_storage().data_ptr() for tensor in outputs.values()} == held
    stored_keys = (
        dcp.FileSystemReader(root / "mixtral/dcp-sharded").read_metadata().state_dict_metadata
    )
    assert "model.model.layers.1.mlp.experts.gate_up_proj" in stored_keys


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_random_start_asks_for_its_names_once(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a tensor: transformers walks through the whole model each time."""
    shutil.copyfile(root / name / "source/config.json", tmp_path / "config.json")
    mapping, calls = conversion_mapping.get_model_conversion_mapping, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return mapping(*args, **options)

    monkeypatch.setattr(conversion_mapping, mapping.__name__, counted)
    model = export_plan.build_model_from_assets(tmp_path)  # no weights there: no source
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in model.state_dict().items()}
    plan = export_plan.make_model_plan(model, shapes, None, 10**9, where="a test")
    assert len(plan.groups) > 10
    assert len(calls) == 2  # to build the model, and to name what it exports
    assert any(group.converted for group in plan.groups) == (name == "mixtral")


def test_a_source_that_leaves_the_prefix_out(root: Path, tmp_path: Path) -> None:
    """GPT-2 on the Hub has `wte.weight`, in float32, and a config that says no dtype."""
    source = tmp_path / "source"
    shutil.copytree(root / "gpt2/source", source)
    bare = {k.removeprefix("transformer."): v for k, v in weights(source).items()}
    save_file(bare, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    run = write_run(tmp_path / "run", root / "gpt2/dcp-sharded", source)
    out = consolidate(run, tmp_path / "out")
    full = weights(consolidate(root / "gpt2/sharded", tmp_path / "full", dtype="float32"))
    assert same_bits(weights(out), {k.removeprefix("transformer."): v for k, v in full.items()})
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same_bits(loaded.state_dict(), trained(root / "gpt2/source").state_dict())


def test_columns_and_a_folder_of_another_tool(root: Path, tmp_path: Path) -> None:
    out = consolidate(
        root / "columns", tmp_path / "out", dtype="float32", hf_assets=root / "llama/source"
    )
    expected = trained(root / "llama/source").state_dict()
    assert same_bits(weights(out), {k: v.clone() for k, v in expected.items()})
    cast = weights(
        consolidate(root / "columns", tmp_path / "cast", hf_assets=root / "llama/source")
    )
    assert same_bits(cast, {k: v.bfloat16() for k, v in expected.items()})
    with pytest.raises(ExportError, match="--hf_assets FOLDER_OR_ID"):
        consolidate(root / "columns", tmp_path / "none")


def test_without_a_prefix_and_with_both_names_of_a_tie(root: Path, tmp_path: Path) -> None:
    state = trained(root / "tied/source").state_dict()
    assert "lm_head.weight" in state
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    out = consolidate(
        tmp_path / "dcp", tmp_path / "out", dtype="float32", hf_assets=root / "tied/source"
    )
    assert weights(out).keys() == weights(root / "tied/source").keys()
    assert "lm_head.weight" not in weights(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_config_says_what_was_exported(root: Path, tmp_path: Path, dtype: str) -> None:
    out = consolidate(root / "llama/sharded", tmp_path / "out", dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == getattr(torch, dtype)
    expected = trained(root / "llama/source").to(getattr(torch, dtype)).state_dict()
    assert same_bits(loaded.state_dict(), expected)


def test_random_start_takes_the_dtype_of_the_config(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "config_only"
    source.mkdir()
    config = json.loads((root / "llama/source/config.json").read_text())
    for dtype, key in ((None, None), ("float16", "torch_dtype"), ("float32", "dtype")):
        for old in ("dtype", "torch_dtype", "architectures"):
            config.pop(old, None)
        if key:
            config[key] = dtype
        (source / "config.json").write_text(json.dumps(config))
        write_run(tmp_path / f"run-{dtype}", root / "llama/dcp-sharded", source, init="random")
        out = consolidate(tmp_path / f"run-{dtype}", tmp_path / f"out-{dtype}")
        loaded = AutoModelForCausalLM.from_pretrained(out)
        want = getattr(torch, dtype or "bfloat16")
        assert {t.dtype for t in weights(out).values()} == {want}
        assert same_bits(loaded.state_dict(), trained(root / "llama/source").to(want).state_dict())
        written = json.loads((Path(out) / "config.json").read_text())
        assert written["architectures"] == ["LlamaForCausalLM"]
        if key == "torch_dtype":  # right as it is
            assert written == config | {"architectures": ["LlamaForCausalLM"]}


def test_integers_bools_scalars_and_empty_tensors(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {
        "count": torch.tensor(2**40 + 1),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scale": torch.tensor(3.25),
        "none": torch.empty(0, 4),
    }
    state = stored(trained(root / "llama/source")) | {f"model.{k}": v for k, v in extra.items()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")

    def with_buffers(folder: Path) -> transformers.PreTrainedModel:
        model = model_on_meta(folder)
        for name, value in extra.items():
            model.register_buffer(name, value.to("meta"))
        return model

    monkeypatch.setattr(export_plan, "model_on_meta", with_buffers)
    out = consolidate(
        tmp_path / "dcp", tmp_path / "out", dtype="bfloat16", hf_assets=root / "llama/source"
    )
    found = weights(out)
    wanted = {k: v.bfloat16() if v.is_floating_point() else v for k, v in extra.items()}
    assert same_bits({k: found[k] for k in extra}, wanted)


def test_max_shard_size_splits_and_indexes(root: Path, tmp_path: Path) -> None:
    for name in ("llama", "mixtral"):
        out = Path(consolidate(root / name / "sharded", tmp_path / name, max_shard_size="4KB"))
        files = sorted(out.glob("*.safetensors"))
        assert len(files) > 2
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        found = weights(out)
        assert index["metadata"]["total_size"] == sum(
            t.numel() * t.itemsize for t in found.values()
        )
        assert index["weight_map"].keys() == found.keys()
        whole = weights(consolidate(root / name / "sharded", tmp_path / f"{name}-whole"))
        assert same_bits(found, whole)
        for file in files:
            held = load_file(file)
            assert len(held) == 1 or sum(t.numel() * t.itemsize for t in held.values()) <= 4000
        info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1]
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]


def test_sizes() -> None:
    assert parse_options("auto", "5GB") == (None, 5 * 10**9)
    assert parse_options("float16", "1.5 gib") == (torch.float16, 3 * 2**29)
    assert parse_options("auto", "500MB")[1] == 5 * 10**8
    assert parse_options("auto", "800000") == parse_options("auto", 800000) == (None, 800000)
    for bad in ("0", "-5GB", "five", "5XB", "", "GB", 0):
        with pytest.raises(ExportError, match="is not a size"):
            parse_options("auto", bad)


def test_every_way_of_moving_bytes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks far smaller than a tensor; rows and columns."""
    monkeypatch.setattr(stored_tensors, "BLOCK", 300)
    monkeypatch.setattr(plain_files, "BLOCK", 64)
    expected = trained(root / "llama/source").state_dict()
    for folder in (root / "llama/dcp-sharded", root / "columns"):
        for dtype in ("float32", "bfloat16"):
            out = consolidate(
                folder,
                tmp_path / f"{folder.name}-{dtype}",
                dtype=dtype,
                hf_assets=root / "llama/source",
            )
            wanted = {k: v.to(getattr(torch, dtype)) for k, v in expected.items()}
            assert same_bits(weights(out), wanted), (folder, dtype)


def test_blobs_of_an_unusual_layout(root: Path, tmp_path: Path) -> None:
    """Views of a larger storage and transposed ones are read by torch itself."""
    state = stored(trained(root / "llama/source"))
    wide = torch.randn(97, 32)
    state["model.model.embed_tokens.weight"] = wide[:, :16]
    state["model.lm_head.weight"] = torch.randn(16, 97).t()
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    out = consolidate(
        tmp_path / "dcp", tmp_path / "out", dtype="float32", hf_assets=root / "llama/source"
    )
    found = weights(out)
    assert torch.equal(found["model.embed_tokens.weight"], wide[:, :16])
    assert torch.equal(found["lm_head.weight"], state["model.lm_head.weight"])


def edited(root: Path, tmp_path: Path, edit: Any) -> dict[str, Any]:
    """Return arguments for a copy of llama's shards whose metadata `edit` has changed."""
    shutil.copytree(root / "llama/dcp-sharded", tmp_path / "dcp")
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    edit(metadata)
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    return {
        "checkpoint": tmp_path / "dcp",
        "output": tmp_path / "out",
        "hf_assets": root / "llama/source",
    }


KEY = "model.model.layers.0.mlp.up_proj.weight"


def test_gap_overlap_missing_and_foreign_tensors_are_errors(root: Path, tmp_path: Path) -> None:
    def gap(metadata: Any) -> None:
        metadata.state_dict_metadata[KEY].chunks.pop()

    def overlap(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[KEY].chunks
        chunks[0].sizes = torch.Size([chunks[0].sizes[0] + 1, *chunks[0].sizes[1:]])

    def twice(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[KEY].chunks
        chunks.append(chunks[0])

    def missing(metadata: Any) -> None:
        del metadata.state_dict_metadata[KEY]

    def foreign(metadata: Any) -> None:
        metadata.state_dict_metadata["model.adapter"] = metadata.state_dict_metadata[KEY]

    def shape(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[KEY]
        entry.size = torch.Size([21, *entry.size[1:]])

    cases = [
        (gap, "not complete.*hold 2.. of 320 elements"),
        (overlap, "not complete.*overlap"),
        (twice, "not complete.*overlap"),
        (missing, f"lacks {KEY}, which LlamaForCausalLM needs"),
        (foreign, "holds model.adapter, which LlamaForCausalLM"),
        (shape, r"up_proj.weight is \(21, 16\).*\(20, 16\) in LlamaForCausalLM of"),
    ]
    for edit, message in cases:
        folder = tmp_path / edit.__name__
        folder.mkdir()
        with pytest.raises(ExportError, match=message):
            consolidate(**edited(root, folder, edit))
        assert not list(folder.glob("out*"))


def test_output_in_the_way_and_bad_arguments(root: Path, tmp_path: Path) -> None:
    run = root / "llama/sharded"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists and is not empty"):
        consolidate(run, tmp_path / "full")
    assert (tmp_path / "full/mine.txt").read_text() == "mine"
    with pytest.raises(ExportError, match="is a file"):
        consolidate(run, tmp_path / "full/mine.txt")
    with pytest.raises(ExportError, match="is no place for another export"):
        consolidate(run, run / "checkpoints/step-00000007/export")
    with pytest.raises(ExportError, match="dtype 'fp32' is not one of auto, float32"):
        consolidate(run, tmp_path / "out", dtype="fp32")
    with pytest.raises(ExportError, match="'5 gold' is not a size"):
        consolidate(run, tmp_path / "out", max_shard_size="5 gold")
    with pytest.raises(ExportError, match="not an adapter checkpoint"):
        consolidate(run, tmp_path / "out", merge=True)
    with pytest.raises(CheckpointError, match="does not exist"):
        consolidate(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"did you mean .*step-00000007"):
        consolidate(run / "checkpoints/step-00000007/dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    consolidate(run, tmp_path / "empty")


def test_a_damaged_checkpoint_is_refused(root: Path, tmp_path: Path) -> None:
    for name, message in (
        ("dcp/.metadata", "other bytes"),
        ("dcp/__1_0.distcp", "other bytes"),
        ("hf/config.json", "other bytes"),
    ):
        run = tmp_path / name.replace("/", "-")
        shutil.copytree(root / "llama/sharded", run)
        file = run / "checkpoints/step-00000007" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            consolidate(run, tmp_path / "out")
    shutil.copytree(root / "llama/sharded", tmp_path / "short")
    shard = tmp_path / "short/checkpoints/step-00000007/dcp/__1_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is \d+ bytes long, expected"):
        consolidate(tmp_path / "short", tmp_path / "out")


def test_failure_leaves_nothing_and_leftovers_are_replaced(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = root / "llama/sharded"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ExportError, match="No space left on device"):
            consolidate(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ExportError, match=r"needs .* MB, .* has 0.00 MB free"):
            consolidate(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

    def killed(*args: Any) -> None:
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        export_manifest.write = killed
        consolidate(run, tmp_path / "out")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert [p.name for p in tmp_path.iterdir()] == ["out.tmp-export"]
    (tmp_path / "out.tmp-export/odd").mkdir()
    consolidate(run, tmp_path / "out")
    assert not (tmp_path / "out/odd").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

    (tmp_path / "other.tmp-export").mkdir()
    (tmp_path / "other.tmp-export/thesis.tex").write_text("mine")
    with pytest.raises(ExportError, match="was not left by an export"):
        consolidate(run, tmp_path / "other")
    assert (tmp_path / "other.tmp-export/thesis.tex").read_text() == "mine"


def test_sums_guard_what_is_read(root: Path, tmp_path: Path) -> None:
    """A checkpoint that the toolkit saved: a flipped bit of a weight is found by its tensor."""
    model = build_on_meta(ModelConfig(name_or_path=str(root / "llama/source")))
    materialise(model, torch.device("cpu"))
    model.load_state_dict(trained(root / "llama/source").state_dict())
    state = checkpoint.TrainState(model, torch.optim.AdamW(model.parameters()), step=1)
    checkpoint.save(state, tmp_path / "run", CheckpointConfig())
    checkpoint.wait()
    out = consolidate(tmp_path / "run", tmp_path / "out", dtype="float32")
    assert same_bits(
        weights(out),
        weights(consolidate(root / "llama/sharded", tmp_path / "same", dtype="float32")),
    )
    origin = export_manifest.read(Path(out))["origin"]
    found = tmp_path / "run/checkpoints/step-00000001"
    manifest = (found / "manifest.json").read_bytes()
    assert origin["checkpoint"] == hashlib.sha256(manifest).hexdigest()
    assert (origin["step"], origin["dtype"]) == (1, "float32")
    shard = next((found / "dcp").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    value = trained(root / "llama/source").state_dict()["model.layers.1.mlp.up_proj.weight"]
    content[content.index(value.numpy().tobytes()) + 100] ^= 16
    shard.write_bytes(content)
    for limit in ("5GB", "4KB"):
        with pytest.raises(
            CheckpointError, match=r"model\.model\.layers\.1\.mlp\.up_proj\.weight has"
        ):
            consolidate(tmp_path / "run", tmp_path / "bad", max_shard_size=limit)
        assert not (tmp_path / "bad").exists()
        assert not (tmp_path / "bad.tmp-export").exists()


def test_values_beyond_float16_are_an_error(root: Path, tmp_path: Path) -> None:
    state = stored(trained(root / "llama/source"))
    state["model.model.norm.weight"] = torch.full((16,), 1e6)
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ExportError, match=r"model.norm.weight has values beyond float16"):
        consolidate(
            tmp_path / "dcp", tmp_path / "out", dtype="float16", hf_assets=root / "llama/source"
        )
    assert not (tmp_path / "out").exists()


def test_every_error_is_one_of_ours(root: Path, tmp_path: Path) -> None:
    """Cut `.metadata` anywhere: never another exception."""
    shutil.copytree(root / "llama/dcp-sharded", tmp_path / "dcp")
    content = (tmp_path / "dcp/.metadata").read_bytes()
    for length in range(0, len(content), max(1, len(content) // 40)):
        (tmp_path / "dcp/.metadata").write_bytes(content[:length])
        with pytest.raises(ToolkitError):
            consolidate(tmp_path / "dcp", tmp_path / "out", hf_assets=root / "llama/source")


def write_large(folder: Path, kind: str, **fields: Any) -> int:
    """Write a checkpoint of one layer in fp32; return the bytes of its largest tensor."""
    fields |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = getattr(transformers, kind)(hidden_size=512, tie_word_embeddings=False, **fields)
    config.save_pretrained(folder / "source")
    model = build_on_meta(ModelConfig(name_or_path=str(folder / "source"), init="random"))
    state = {f"model.{k}": torch.rand(v.shape) for k, v in model.state_dict().items()}
    dcp.save(state, checkpoint_id=folder / "dcp")
    return max(tensor.nbytes for tensor in state.values())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_stays_under_the_largest_group(root: Path, tmp_path: Path) -> None:
    """Of a plain tensor a few blocks are held; of a fused one its own memory, once."""
    largest = {
        "plain": write_large(tmp_path / "plain", "LlamaConfig", vocab_size=40_000),
        "fused": write_large(
            tmp_path / "fused",
            "Qwen3MoeConfig",
            vocab_size=97,
            moe_intermediate_size=512,
            num_experts=32,
        ),
    }
    script = textwrap.dedent("""
        import sys, threading, time
        from toolkit.export import consolidate

        def anonymous():
            with open("/proc/self/status") as f:
                return next(int(l.split()[1]) * 1024 for l in f if l.startswith("RssAnon"))

        def watch():
            while not done:
                peak[0] = max(peak[0], anonymous())
                time.sleep(0.002)

        warm, warm_hf, folder = sys.argv[1:]
        consolidate(warm, folder + "/warm", hf_assets=warm_hf)
        for kind in ("plain", "fused"):
            for dtype in ("float32", "bfloat16"):
                source = f"{folder}/{kind}"
                before = anonymous()
                peak, done = [before], False
                thread = threading.Thread(target=watch, daemon=True)
                thread.start()
                consolidate(
                    source + "/dcp", f"{source}/{dtype}", hf_assets=source + "/source", dtype=dtype
                )
                done = True
                thread.join()
                print(kind, dtype, peak[0] - before)
    """)
    arguments = map(str, (root / "llama/dcp-sharded", root / "llama/source", tmp_path))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        kind, dtype, grown = line.split()
        print(f"{kind} {dtype}: grew by {int(grown) / largest[kind]:.2f} of the largest group")
        assert int(grown) < largest[kind] * (0.5 if kind == "plain" else 1.2)
    found = load_file(tmp_path / "plain/bfloat16/model.safetensors")["lm_head.weight"]
    whole = {"model.lm_head.weight": torch.empty(found.shape)}
    dcp.load(whole, checkpoint_id=tmp_path / "plain/dcp")
    assert torch.equal(found, whole["model.lm_head.weight"].bfloat16())


def test_a_source_with_several_dtypes(root: Path, tmp_path: Path) -> None:
    """Within one group, too, and split over files: each key in the dtype that the source has."""
    source = tmp_path / "source"
    shutil.copytree(root / "mixtral/source", source)
    mixed = {
        k: t.float() if "experts.1.w1" in k or "norm" in k else t
        for k, t in weights(source).items()
    }
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    run = write_run(tmp_path / "run", root / "mixtral/dcp-sharded", source)
    full = weights(consolidate(root / "mixtral/sharded", tmp_path / "full", dtype="float32"))
    for limit in ("4KB", "5GB"):
        auto = weights(consolidate(run, tmp_path / limit, max_shard_size=limit))
        assert same_bits(auto, {k: t.to(mixed[k].dtype) for k, t in full.items()})


@pytest.mark.parametrize("kind", ["sharded", "single"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_proven_by_its_sum(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """Rows are cut by the blocks in which they are read; a flipped bit of the last is found."""
    run = with_sums(root / "llama" / kind, tmp_path / "run")
    monkeypatch.setattr(writer, "BLOCK", 24)
    monkeypatch.setattr(stored_tensors, "BLOCK", 24)
    out = consolidate(run, tmp_path / "hf", dtype=dtype, max_shard_size="8KB")
    full = trained(root / "llama/source").state_dict()
    assert same_bits(weights(out), {k: v.to(getattr(torch, dtype)) for k, v in full.items()})
    assert verify_export(run, out).ok
    shard = max((run / "checkpoints").glob("*/dcp/*.distcp"))
    raw = bytearray(shard.read_bytes())
    raw[raw.index(full["model.embed_tokens.weight"][-1].numpy().tobytes())] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight has other bytes in .*distcp"):
        consolidate(run, tmp_path / "read", dtype=dtype)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "hf"}


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_what_is_written_wrong_is_an_error_or_found_by_verify(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proven: bool, dtype: str
) -> None:
    """The manifest's hashes cover what the kernel received; the proof covers what it wrote."""
    write = os.pwrite

    def flipped(descriptor: int, content: memoryview, position: int) -> int:
        if position > 4000:
            content = bytes(content[:-1]) + bytes([content[-1] ^ 1])
        return write(descriptor, content, position)

    run = with_sums(root / "llama/sharded", tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", flipped)
        if proven:
            with pytest.raises(ExportError, match=r"other bytes were written of \d+ tensor"):
                consolidate(run, tmp_path / "out", dtype=dtype)
            assert {p.name for p in tmp_path.iterdir()} == {"run"}
            return
        patched.setattr(ExportProof, "compare", lambda *_: None)  # the control
        out = consolidate(root / "llama/sharded", tmp_path / "out", dtype=dtype)
    report = verify_export(root / "llama/sharded", out)
    assert {file for file, _, _ in report.findings} >= {"model.safetensors"}


def test_after_a_failed_fsync_nothing_is_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of it once: the page cache would pass the next start's hashes."""

    def fail(path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as broken:
        broken.setattr(writer, "fsync_path", fail)
        with pytest.raises(ExportError, match="Input/output error; nothing was left"):
            consolidate(root / "llama/sharded", tmp_path / "hf", max_shard_size="4KB")
    assert not list(tmp_path.iterdir())
    consolidate(root / "llama/sharded", tmp_path / "hf", max_shard_size="4KB")
    assert verify_export(root / "llama/sharded", tmp_path / "hf").ok


def test_files_of_many_tensors(tmp_path: Path) -> None:
    shapes = {f"tensor.{n}": (torch.float32, (2,)) for n in range(12_000)}
    tensors, headers = export_plan._lay_out_files(shapes, 24_000)
    assert len(headers) == 4
    groups = [ExportGroup((name,), {name: (2,)}, False) for name in shapes]
    names = {name: name for name in shapes}
    plan = export_plan.ExportPlan(None, names, groups, names, tensors, {}, headers, {})  # type: ignore[arg-type]

    def read(group: ExportGroup) -> dict[str, torch.Tensor]:
        (name,) = group.sources
        return {name: torch.full((2,), float(name.partition(".")[2]))}

    target = tmp_path / "out"
    writer.write_export(plan, target, read_group=read, origin={})
    found = weights(target)
    assert len(found) == len(shapes)
    assert all(float(t.sum()) == 2 * float(name.partition(".")[2]) for name, t in found.items())


def test_a_command_parses_the_manifest_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, parsed = commit.parse_manifest, []

    def count(content: bytes, source: object) -> dict[str, Any]:
        parsed.append(source)
        return parse(content, source)

    run = with_sums(root / "llama/sharded", tmp_path / "run")
    monkeypatch.setattr(commit, "parse_manifest", count)
    consolidate(run, tmp_path / "out")
    assert len(parsed) == 1
