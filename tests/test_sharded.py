"""Sharded equals plain: loading, random starts, gradients, saving and export, on 1 to 4 gloo ranks.

One group of processes serves many checks; the plain side runs in the test itself.
"""

import contextlib
import functools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import save_byte_tokenizer, save_tiny_model, tiny_config
from distributed import run_ranks, tensor_sums
from sharded import apply_fsdp, evaluate, init_mesh, loss_sum, sharded_of, train_step
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from toolkit import checkpoint, loading, models, ranks
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint import commit
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import (
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.errors import ToolkitError
from toolkit.export import consolidate
from toolkit.formats import like_dtensor
from toolkit.loading import init_weights, load_pretrained
from toolkit.models import build_on_meta
from toolkit.models.peft_model import base_of, model_tensors
from toolkit.training.launch import seed_everything
from toolkit.training.optim import build_optimizer

FP32 = ShardingConfig(param_dtype="float32")
SAVING = CheckpointConfig()
# name -> (kind, changes, shard size of the saved files)
MODELS = {
    "untied": ("llama", {}, "5GB"),
    "untied_in_files": ("llama", {}, "20KB"),
    "tied": ("llama", {"tie_word_embeddings": True}, "5GB"),
    "tied_in_files": ("llama", {"tie_word_embeddings": True}, "20KB"),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "5GB"),
    "experts": ("qwen3_moe", {}, "20KB"),
    "softcap": ("gemma2", {}, "5GB"),
    "scaled": ("granite", {}, "5GB"),
    "half": ("llama", {"dtype": torch.bfloat16}, "5GB"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(save_tiny_model(root / name, kind, shard, **changes))
        for name, (kind, changes, shard) in MODELS.items()
    }


def batch(rows: int, seed: int = 1, supervised: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (rows, 17), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 2 + 3 * row] = -100  # rows of unequal weight
    return {"input_ids": ids, "labels": labels if supervised else torch.full_like(labels, -100)}


def shard(folder: str, world: int, cfg: ShardingConfig = FP32, dtype: str = "float32"):
    model = build_on_meta(ModelConfig(folder, dtype=dtype))
    apply_fsdp(model, init_mesh("cpu", world, cfg), cfg)
    return model


def plain(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)


def full(model) -> dict[str, torch.Tensor]:
    values = {n: p.detach() for n, p in model.named_parameters()}
    return {
        n: v.full_tensor().clone() if isinstance(v, DTensor) else v.clone()
        for n, v in values.items()
    }


# ---- On every rank -------------------------------------------------------------------------------


def load_all(rank: int, world: int, folders: dict[str, str]) -> dict:
    found = {}
    for name, folder in folders.items():
        model = shard(folder, world)
        report = load_pretrained(model, folder, "cpu")
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=batch(2)["input_ids"]).logits
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        found[name] = (full(model), buffers, logits, report)
    return found


def overwrite(rank: int, world: int, folder: str) -> bool:
    model = shard(folder, world)
    load_pretrained(model, folder, "cpu")
    before = full(model)
    torch.distributed.barrier()
    if rank == 0:
        file = Path(folder) / "model.safetensors"
        with open(file, "r+b") as f:
            f.seek(-4096, 2)
            f.write(b"\x3f" * 4096)
    torch.distributed.barrier()
    after = full(model)
    return all(torch.equal(before[n], after[n]) for n in before)


def draw(rank: int, world: int, folders: dict[str, str], seed: int) -> dict:
    found = {}
    for name in ("untied", "tied", "gpt2", "experts"):
        model = shard(folders[name], world)
        init_weights(model, "cpu", seed)
        found[name] = full(model)
    return found


def fill_each_way(rank: int, world: int, folder: str) -> list:
    """Fill a model as each kind of run begins; return what was said and whether it has values."""
    found = []
    for init, adapted, empty in (
        ("pretrained", False, False),
        ("random", False, False),
        ("pretrained", False, True),
        ("pretrained", True, True),
    ):
        cfg = ModelConfig(folder, dtype="float32", init=init)
        model = models.prepare(cfg)
        if adapted:
            model = add_adapters(model, LoraConfig(r=2))
        apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
        said: list[str] = []
        loading.load_or_init(sharded_of(model), cfg, "cpu", 3, empty=empty, say=said.append)
        weight = base_of(model).model.embed_tokens.weight.full_tensor()
        expected = plain(folder).model.embed_tokens.weight
        found.append((said, torch.equal(weight, expected)))
    return found


def train_all(rank: int, world: int, folders: dict[str, str], run_dir: str) -> dict:
    """Two AdamW steps on 8 rows, split over ranks and micro-batches; save; return what happened."""
    found = {}
    rows = batch(8)
    mine = {k: v[rank::world] for k, v in rows.items()}
    for name, cfg, pieces in (
        ("untied", FP32, 1),
        ("untied", FP32, 2),
        ("tied", FP32, 2),
        ("gpt2", FP32, 1),
        ("softcap", FP32, 1),
        ("scaled", FP32, 1),
        ("untied", ShardingConfig(param_dtype="float32", activation_checkpointing=True), 1),
        ("untied", ShardingConfig(param_dtype="float32", cpu_offload=True), 1),
        ("untied", ShardingConfig(param_dtype="float32", dp_replicate=2), 1),
        ("untied", ShardingConfig(param_dtype="float32", reshard_after_forward=False), 1),
    ):
        model = shard(folders[name], world, cfg)
        load_pretrained(model, folders[name], "cpu")
        model.train()
        optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
        size = len(mine["labels"]) // pieces
        micro = [{k: v[i * size : (i + 1) * size] for k, v in mine.items()} for i in range(pieces)]
        stats = [train_step(model, optimizer, micro) for _ in range(2)]
        key = (
            name,
            cfg.cpu_offload,
            cfg.dp_replicate,
            cfg.activation_checkpointing,
            cfg.reshard_after_forward,
            pieces,
        )
        found[key] = (
            [(float(s.loss), float(s.grad_norm), int(s.tokens)) for s in stats],
            full(model),
            float(evaluate(model, {"": micro})[0].loss),
        )
    # A rank (here all but the first) without supervised tokens changes nothing.
    model = shard(folders["untied"], world)
    load_pretrained(model, folders["untied"], "cpu")
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    some = [batch(2, supervised=rank == 0), batch(2, 5, supervised=False)]
    stats = train_step(model, optimizer, some)
    found["silent"] = (float(stats.loss), float(stats.grad_norm), full(model))
    state = checkpoint.TrainState(model, optimizer, step=2)
    path = checkpoint.save(state, run_dir, SAVING)
    again = shard(folders["untied"], world)
    loading.materialise(again, "cpu")
    fresh = checkpoint.TrainState(again, build_optimizer(again, OptimConfig(learning_rate=1e-3)))
    step = checkpoint.resume(fresh, run_dir, SAVING)
    one = float(train_step(model, optimizer, some).loss)
    two = float(train_step(again, fresh.optimizer, some).loss)
    found["resumed"] = (
        path,
        step,
        one,
        two,
        [
            torch.equal(a, b)
            for a, b in zip(full(model).values(), full(again).values(), strict=True)
        ],
    )
    return found


# ---- Tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_loaded_shards_are_the_checkpoint(world, folders):
    ranks = run_ranks(load_all, world, folders)
    for name, folder in folders.items():
        expected = plain(folder).eval()
        parameters, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
        with torch.no_grad():
            logits = expected(input_ids=batch(2)["input_ids"]).logits
        for found, found_buffers, found_logits, _ in (r[name] for r in ranks):
            assert found.keys() == parameters.keys()
            assert all(torch.equal(found[n], parameters[n]) for n in found), name
            assert all(torch.equal(b, buffers[n]) for n, b in found_buffers.items()), name
            torch.testing.assert_close(found_logits, logits, rtol=1e-5, atol=1e-6, msg=name)
        reports = [r[name][3] for r in ranks]
        asked = sum(r.bytes_requested for r in reports)
        # Conversions of experts that a rank has none of are read whole (3 ranks, 4 experts).
        allowed = 1.05 if not (name == "experts" and world == 3) else 3.0
        assert asked <= allowed * reports[0].file_bytes, name


def test_overwriting_the_file_changes_no_weight(folders, tmp_path):
    import shutil

    folder = shutil.copytree(folders["untied"], tmp_path / "copy")
    before = plain(str(folder)).state_dict()
    before = {n: t.clone() for n, t in before.items()}
    assert run_ranks(overwrite, 2, str(folder)) == [True, True]
    after = plain(str(folder)).state_dict()
    assert any(not torch.equal(before[n], after[n]) for n in before), "the file was not overwritten"


@pytest.mark.slow
def test_random_start_is_the_same_for_any_world_and_as_transformers_draws(folders):
    worlds = {w: run_ranks(draw, w, folders, 7)[0] for w in (1, 3)}
    other = run_ranks(draw, 2, folders, 8)[0]
    for name, found in worlds[1].items():
        for parameter, value in found.items():
            assert torch.equal(value, worlds[3][name][parameter]), (name, parameter)
        kind, changes, _ = MODELS[name]
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
        for parameter, value in reference.named_parameters():
            mine, theirs = found[parameter], value.detach()
            assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.2, abs=1e-8), (
                parameter
            )
            assert abs(mine.mean() - theirs.mean()) < 0.01, parameter
            drawn = theirs.std() > 0
            if drawn and mine.ndim == 2:
                half = mine.shape[0] // 2
                assert not torch.equal(mine[:half], mine[half : 2 * half]), (
                    f"{parameter} repeats itself"
                )
            assert torch.equal(mine, other[name][parameter]) != bool(drawn), (
                f"{parameter}: seed ignored"
            )


def test_fill_begins_as_the_run_asks(folders):
    for found in run_ranks(fill_each_way, 2, folders["untied"]):
        loaded, drawn, empty, adapted = found
        assert "weights    " + folders["untied"] in loaded[0][0]
        assert loaded[1]
        assert drawn[0] == ["weights    random, drawn from seed 3"]
        assert not drawn[1]
        assert empty[0] == ["weights    those of the run's checkpoint"]
        assert "base       " + folders["untied"] in adapted[0][0]
        assert adapted[1], "a checkpoint of adapters does not hold the base"


def refused_on_one_rank(rank: int, world: int, folder: str) -> tuple[str, bool]:
    cfg = ModelConfig(folder if rank == 0 else folder + "-gone", dtype="float32")
    try:
        ranks.on_all(lambda: models.prepare(cfg))  # one exchange inside of another
    except ToolkitError as error:
        return str(error), getattr(error, "already_reported", False)
    return "nothing", False


def test_what_one_rank_refuses_all_refuse_and_it_alone_reports(folders):
    said = run_ranks(refused_on_one_rank, 3, folders["untied"])
    assert all(re.search(r"there is no folder \S+-gone ", text) for text, _ in said), said
    assert [reported for _, reported in said] == [True, False, True]


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory) -> Callable[[int], tuple[list, Path]]:
    """Give what so many ranks found, and their run; each number of them is started once."""

    @functools.cache
    def on(world: int) -> tuple[list, Path]:
        run = tmp_path_factory.mktemp(f"trained{world}")
        return run_ranks(train_all, world, folders, str(run)), run

    return on


def expected_training(folder: str) -> tuple[list, dict, float]:
    """The same two steps in one plain process, with transformers' own loss over the whole batch."""
    model = plain(folder).train()
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    rows = batch(8)
    lines = []
    for _ in range(2):
        loss = model(**rows).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lines.append((loss.item(), norm.item(), int((rows["labels"][:, 1:] != -100).sum())))
    model.eval()
    with torch.no_grad():
        return lines, full(model), model(**rows).loss.item()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_equals_one_process(world, trained, folders):
    ranks, _ = trained(world)
    for key in ranks[0]:
        if isinstance(key, str):
            continue
        lines, weights, evaluation = expected_training(folders[key[0]])
        for rank in ranks:
            found_lines, found_weights, found_evaluation = rank[key]
            for (loss, norm, tokens), (loss0, norm0, tokens0) in zip(
                found_lines, lines, strict=True
            ):
                assert loss == pytest.approx(loss0, rel=1e-5), key
                assert norm == pytest.approx(norm0, rel=1e-4), key
                assert tokens == tokens0
            assert found_evaluation == pytest.approx(evaluation, rel=1e-5), key
            for name, value in weights.items():
                assert (found_weights[name] - value).abs().max() < 2e-4, (key, name)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_without_supervised_tokens_change_nothing(world, trained, folders):
    model = plain(folders["untied"]).train()
    loss = model(**batch(2)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for rank in trained(world)[0]:
        found_loss, found_norm, _ = rank["silent"]
        assert found_loss == pytest.approx(loss.item(), rel=1e-5)
        assert found_norm == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_save_resume_export(world, trained, folders, tmp_path):
    ranks, run = trained(world)
    for path, step, undisturbed, resumed, equal in (r["resumed"] for r in ranks):
        assert step == 2
        assert undisturbed == resumed
        assert all(equal)
        assert commit.is_committed(Path(path))
        assert not commit.find_damaged_files(Path(path))
    weights = ranks[0]["silent"][2]
    model = AutoModelForCausalLM.from_pretrained(
        consolidate(run, tmp_path / "fp32", dtype="float32")
    )
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_digests_do_not_depend_on_the_number_of_ranks(folders, tmp_path):
    found = {}
    for world in (1, 2, 3):
        found[world] = run_ranks(digests, world, folders["experts"])[0]
    assert found[1] == found[2] == found[3]
    changed = run_ranks(digests, 2, folders["experts"], True)[0]
    differing = [n for n in changed if changed[n] != found[1][n]]
    assert len(differing) == 1, "one changed element must change one digest"


def digests(rank: int, world: int, folder: str, change: bool = False) -> dict:
    model = shard(folder, world)
    load_pretrained(model, folder, "cpu")
    if change and rank == 1:
        with torch.no_grad():
            local = next(p for p in model.parameters() if p.ndim == 2).detach().to_local()
            local[0, 0] += 1e-3
    return tensor_sums(model)


def test_what_is_saved_is_sharded_after_a_forward_of_the_caller(folders):
    """Without a backward FSDP2 leaves the root gathered, and the names mean what is freed later."""
    for gathered, kinds in run_ranks(forward_then_name, 2, folders["untied"]):
        assert gathered
        assert kinds == {"DTensor"}


def forward_then_name(rank: int, world: int, folder: str) -> tuple[bool, set[str]]:
    model = shard(folder, world)
    load_pretrained(model, folder, "cpu")
    with torch.no_grad():
        model(input_ids=batch(2)["input_ids"])
    gathered = any(not isinstance(p, DTensor) for p in model.parameters())
    return gathered, {type(tensor).__name__ for tensor in model_tensors(model).values()}


def test_auto_export_is_the_cast_of_the_trained_weights(folders, tmp_path):
    """A bf16 source trained with fp32 masters leaves as bf16, each value rounded once."""
    weights, run = run_ranks(train_half, 2, folders["half"], str(tmp_path / "run"))[0]
    model = AutoModelForCausalLM.from_pretrained(consolidate(run, tmp_path / "hf"))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(p, weights[n].bfloat16()) for n, p in model.named_parameters())
    assert any(not torch.equal(weights[n].bfloat16().float(), weights[n]) for n in weights)


def train_half(rank: int, world: int, folder: str, run: str):
    model = shard(folder, world)
    load_pretrained(model, folder, "cpu")
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-3))
    train_step(model, optimizer, [batch(2, seed=rank)])
    checkpoint.save(checkpoint.TrainState(model, optimizer, step=1), run, SAVING)
    return full(model), run


def test_resized_embeddings_keep_old_rows_and_start_new_ones_at_their_mean(folders, tmp_path):
    import shutil

    folder = Path(shutil.copytree(folders["untied"], tmp_path / "model"))
    save_byte_tokenizer(folder, extra=80)  # 337 ids for 300 rows
    for rank in run_ranks(load_resized, 2, str(folder)):
        source = plain(folders["untied"]).state_dict()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert rank[name].shape == (337, 32)
            assert torch.equal(rank[name][:300], source[name])
            mean = source[name].double().mean(0).float()
            torch.testing.assert_close(rank[name][300:], mean.expand(37, -1))


def load_resized(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    model = build_on_meta(ModelConfig(folder, resize_embeddings=True))
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    load_pretrained(model, folder, "cpu")
    assert model.hf_assets.config["vocab_size"] == 337
    return full(model)


def test_full_activation_checkpointing_computes_each_layer_twice(folders):
    calls = {}
    for setting in ("none", "full"):
        cfg = ShardingConfig(param_dtype="float32", activation_checkpointing=setting)
        with _world_of_one():
            model = shard(folders["untied"], 1, cfg)
            load_pretrained(model, folders["untied"], "cpu")
            model.train()
            seen: list[int] = []
            model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_, s=seen: s.append(1))
            loss_sum(model, batch(2))  # finds out once how the head is used
            seen.clear()
            loss_sum(model, batch(2)).backward()
            calls[setting] = len(seen)
    assert calls == {"none": 1, "full": 2}


def test_ranks_draw_different_dropout_and_runs_repeat_it():
    drawn = []
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_everything(seed, rank)
        drawn.append((torch.rand(3).tolist(), random.random()))
    assert drawn[0] == drawn[3]
    assert len({str(d) for d in drawn}) == 3


def test_chunks_of_the_loss_equal_the_whole(folders, monkeypatch):
    """Many chunks, one chunk and transformers' own loss: the same value and gradients."""
    from toolkit.training import head_loss

    model = plain(folders["tied"]).train()
    rows = batch(4)
    expected = model(**rows).loss
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    tokens = (rows["labels"][:, 1:] != -100).sum()
    for elements in (300, 300 * 7, 2**26):
        monkeypatch.setitem(head_loss._CHUNK_ELEMENTS, "cpu", elements)
        model.zero_grad()
        found = loss_sum(model, rows) / tokens
        found.backward()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert (parameter.grad - gradients[name]).abs().max() < 1e-6, name


def test_under_offload_parts_stay_in_host_memory(folders):
    """`DTensor.from_local` would move them to the mesh's device; a fake mesh of GPUs shows it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        reference = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
        reference._spec.mesh._device_type = "cuda"
        part = torch.ones(3, 4)
        placed = like_dtensor(reference, part)
        assert placed.to_local().device.type == "cpu"
        assert placed.shape == (6, 4)
        with pytest.raises((RuntimeError, AssertionError)):  # the control: it tries the GPU
            DTensor.from_local(part, reference.device_mesh, [Shard(0)], run_check=False)
    finally:
        dist.destroy_process_group()


def test_refused_shardings(folders):
    from toolkit.errors import ShardingError

    for cfg, message in (
        (ShardingConfig(dp_replicate=3), "does not make 1 processes"),
        (ShardingConfig(param_dtype="float16"), "loss scaling"),
    ):
        with pytest.raises(ShardingError, match=message), _world_of_one():
            shard(folders["untied"], 1, cfg)


@contextlib.contextmanager
def _world_of_one():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- Gradients of what is not sharded ------------------------------------------------------------


def summed(rank: int, world: int) -> list[list[float] | None]:
    """Sum gradients of three parameters: of every rank, of the last rank, of none."""
    from unittest import mock

    from toolkit.training import step

    model = torch.nn.ParameterDict({name: torch.zeros(2) for name in ("all", "last", "none")})
    model["all"].grad = torch.full((2,), float(rank + 1))
    if rank == world - 1:
        model["last"].grad = torch.tensor([3.0, 0.0])
    among = init_mesh("cpu", world, FP32).loss
    with mock.patch.object(
        ranks, "_min_of_each", side_effect=AssertionError("the hosts were asked")
    ):
        step._sum_replicated(model, among)
    return [None if p.grad is None else p.grad.tolist() for p in model.values()]


def test_gradients_of_what_is_not_sharded_are_summed_without_asking_the_hosts() -> None:
    for found in run_ranks(summed, 3):
        assert found == [[6.0, 6.0], [3.0, 0.0], None]
