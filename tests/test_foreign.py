"""What other tools wrote, each by the real library on two ranks, becomes the same weights."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import save_tiny_model
from distributed import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from toolkit.errors import CheckpointError, ExportError, ToolkitError
from toolkit.export import consolidate
from toolkit.models import decoder_layers

KINDS = {"llama": {}, "tied": {"tie_word_embeddings": True}, "moe": {}}


def _write(rank: int, world: int, root: str) -> None:
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from transformers.distributed import DistributedConfig

    folder = Path(root)
    PartialState(cpu=True)  # accelerate's logger asks for it
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    for kind in KINDS:
        out = folder / kind
        model = AutoModelForCausalLM.from_pretrained(out / "source", dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world,))
        for layer in decoder_layers(model).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(
            input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)
        ).loss.backward()
        optimizer.step()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True
        )
        accelerator: Any = SimpleNamespace(num_processes=world, process_index=rank)
        save_fsdp_model(plugin, accelerator, model, str(out / "accelerate"))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out / "accelerate"))
        weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=out / "torchtitan")
        dcp.save(
            {"app": {"model": weights, "optim": moments, "step": 3}}, checkpoint_id=out / "app"
        )
        dcp.save(dict(weights), checkpoint_id=out / "none")
        compiled = {k.replace("layers.0.", "layers.0._orig_mod."): v for k, v in weights.items()}
        dcp.save({"model": compiled}, checkpoint_id=out / "compiled")
        untied = {k: v for k, v in weights.items() if kind != "tied" or k != "lm_head.weight"}
        writer = HuggingFaceStorageWriter(str(out / "writer"), save_distributed=True)
        dcp.save(untied, storage_writer=writer)
        theirs = AutoModelForCausalLM.from_pretrained(
            out / "source",
            dtype=torch.float32,
            distributed_config=DistributedConfig(fsdp_size=world),
        )
        assert type(theirs).__name__.startswith("FSDP")
        with torch.no_grad():  # the trained values, into their layout
            mine = model.state_dict()
            for name, parameter in theirs.state_dict().items():
                parameter.to_local().copy_(mine[name].to_local())
        theirs.save_pretrained(out / "transformers", distributed_checkpoint=True)
        full = {n: p.full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            save_file({k: v.contiguous() for k, v in full.items()}, out / "expected.safetensors")
        dist.barrier()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    save_tiny_model(root / "llama/source")
    save_tiny_model(root / "tied/source", tie_word_embeddings=True)
    save_tiny_model(root / "moe/source", "qwen3_moe")
    run_ranks(_write, 2, str(root))
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", ["accelerate", "torchtitan", "app", "none", "compiled", "writer", "transformers"]
)
def test_bit_equal_weights(root: Path, tmp_path: Path, kind: str, layout: str) -> None:
    source, trained = root / kind / "source", load_file(root / kind / "expected.safetensors")
    out = consolidate(root / kind / layout, tmp_path / "out", dtype="float32", hf_assets=source)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = dict(loaded.named_parameters())
    assert found.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(found[name], tensor), name
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert not all(torch.equal(t, before[n]) for n, t in trained.items())  # it was trained
    with (
        safe_open(source / "model.safetensors", "pt") as f,
        safe_open(f"{out}/model.safetensors", "pt") as g,
    ):
        assert set(f.keys()) == set(g.keys())
    assert json.loads(Path(out, "config.json").read_text())["architectures"] == [
        type(loaded).__name__
    ]


def test_the_config_beside_the_weights_is_used_and_plain(root: Path, tmp_path: Path) -> None:
    """transformers saves its config beside the shards; nothing of its sharding stays in it."""
    out = consolidate(root / "moe/transformers", tmp_path / "out", dtype="float32")
    given = consolidate(
        root / "moe/transformers",
        tmp_path / "given",
        dtype="float32",
        hf_assets=root / "moe/source",
    )
    left, right = load_file(f"{out}/model.safetensors"), load_file(f"{given}/model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k], right[k]) for k in left)
    config = json.loads(Path(out, "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert "FSDP" not in json.dumps(config)


def test_a_wrong_path_is_answered_with_the_right_one(root: Path, tmp_path: Path) -> None:
    llama, source = root / "llama", root / "llama/source"
    weights = llama / "accelerate/pytorch_model_fsdp_0"
    cases: list[tuple[Path, str]] = [
        (weights / ".metadata", f"is a file; give the folder that holds it: {weights}"),
        (llama / "accelerate/optimizer_0", f"the weights are in {weights}"),
        (llama, f"did you mean .*{llama / 'accelerate'}"),
        (llama / "acelerate", f"does not exist.*did you mean {llama / 'accelerate'}"),
        (source, "is a Hugging Face folder already"),
        (tmp_path, "holds no committed checkpoint"),
    ]
    for path, message in cases:
        with pytest.raises(CheckpointError, match=message):
            consolidate(path, tmp_path / "out", hf_assets=source)
    (tmp_path / "below").mkdir()
    shutil.copytree(llama / "none", tmp_path / "below/none")
    (tmp_path / "below/none/inner").mkdir()
    with pytest.raises(CheckpointError, match=f"did you mean {tmp_path / 'below/none'}"):
        consolidate(tmp_path / "below/none/inner", tmp_path / "out", hf_assets=source)
    shutil.copytree(weights, tmp_path / "two/pytorch_model_fsdp_0")
    shutil.copytree(weights, tmp_path / "two/pytorch_model_fsdp_1")
    with pytest.raises(CheckpointError, match="holds several models; give one"):
        consolidate(tmp_path / "two", tmp_path / "out", hf_assets=source)
    with pytest.raises(ExportError, match=f"is a file; give its folder: {source}"):
        consolidate(weights, tmp_path / "out", hf_assets=source / "config.json")
    (source / "empty").mkdir(exist_ok=True)
    with pytest.raises(ExportError, match=r"has no config\.json; did you mean"):
        consolidate(weights, tmp_path / "out", hf_assets=source / "empty")
    for layout in ("accelerate", "torchtitan", "writer"):
        with pytest.raises(ExportError, match=r"has no config of the model.*--hf_assets FOLDER"):
            consolidate(llama / layout, tmp_path / "out")
    with pytest.raises(ExportError, match="is it the config of this checkpoint"):
        consolidate(weights, tmp_path / "out", hf_assets=root / "moe/source")
    assert not (tmp_path / "out").exists()


def test_two_names_of_one_weight_must_agree(root: Path, tmp_path: Path) -> None:
    source = root / "tied/source"
    state = dict(AutoModelForCausalLM.from_pretrained(source).state_dict())
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    dcp.save(state, checkpoint_id=tmp_path / "same")
    consolidate(tmp_path / "same", tmp_path / "fine", hf_assets=source)
    state["lm_head.weight"][-1, -1] += 1
    dcp.save(state, checkpoint_id=tmp_path / "other")
    # Each cut in another way: the first by rows, the second by columns.
    wide = {"lm_head.weight": state["lm_head.weight"].t().contiguous().t()}
    dcp.save(state | wide, checkpoint_id=tmp_path / "turned")
    for name in ("other", "turned"):
        with pytest.raises(ExportError, match="one parameter of the model, and differ"):
            consolidate(tmp_path / name, tmp_path / "out", hf_assets=source)
    state["lm_head.weight"][-1, -1] = state["model.embed_tokens.weight"][-1, -1]
    wide = {"lm_head.weight": state["lm_head.weight"].t().contiguous().t()}
    dcp.save(state | wide, checkpoint_id=tmp_path / "turned-same")
    consolidate(tmp_path / "turned-same", tmp_path / "turned-fine", hf_assets=source)


def test_twice_in_one_checkpoint_is_no_guess(root: Path, tmp_path: Path) -> None:
    source = root / "llama/source"
    state = AutoModelForCausalLM.from_pretrained(source).state_dict()
    dcp.save({"model": state, "ema": dict(state)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ExportError, match=r"the model 2 times, under 'ema.', 'model.'"):
        consolidate(tmp_path / "dcp", tmp_path / "out", hf_assets=source)


def test_damaged_sharded_safetensors(root: Path, tmp_path: Path) -> None:
    """A missing or truncated shard, one without places, absurd places, a link to elsewhere."""

    def damage(name: str, message: str, edit: Any) -> None:
        folder = tmp_path / name
        shutil.copytree(root / "llama/writer", folder)
        first, second = sorted(folder.glob("shard-*"))
        edit(first, second)
        with pytest.raises(ToolkitError, match=message):
            consolidate(folder, tmp_path / "out", hf_assets=root / "llama/source")
        assert not (tmp_path / "out").exists()

    def replaced(file: Path, old: str, new: str) -> None:
        content = file.read_bytes()
        assert old.encode() in content
        assert len(old) == len(new)
        file.write_bytes(content.replace(old.encode(), new.encode(), 1))

    def elsewhere(file: Path) -> None:
        shutil.move(file, tmp_path / "elsewhere.safetensors")
        file.symlink_to(tmp_path / "elsewhere.safetensors")

    damage("no first", "is not complete|in LlamaForCausalLM of", lambda a, b: a.unlink())
    damage("no second", "is not complete|in LlamaForCausalLM of", lambda a, b: b.unlink())
    damage("short", "should be .* bytes long", lambda a, b: os.truncate(b, b.stat().st_size - 1))
    places = "does not say which part of each tensor"
    damage("no places", places, lambda a, b: replaced(b, "DCP_SHARDING_INFO", "DCP_SHARDING_INF0"))
    raw = next((root / "llama/writer").glob("shard-00002*")).read_bytes()[:20_000].decode("latin1")
    place = raw[raw.index("saved_offsets", raw.index("lm_head.weight")) :]
    old = place[: place.index(",") + 1]
    assert "150" in old  # the second half of 300 rows
    wrong, early = old.replace("150", " -1"), old.replace("150", "149")
    damage("negative", "damaged DCP_SHARDING_INFO", lambda a, b: replaced(b, old, wrong))
    damage("overlap", "in LlamaForCausalLM of", lambda a, b: replaced(b, old, early))
    damage("link", "leaves its folder", lambda a, b: elsewhere(b))
    damage("pickle", "no place|never needs", lambda a, b: evil(b.parent, a, b))
    assert not (tmp_path / "pickle/ran").exists()


def evil(folder: Path, *shards: Path) -> None:
    """Replace safetensors by a DCP folder whose metadata would run code."""
    import pickle

    for shard in shards:
        shard.unlink()

    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "ran"),)

    (folder / ".metadata").write_bytes(pickle.dumps(Payload()))
