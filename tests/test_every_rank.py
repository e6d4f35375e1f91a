"""Every rank of many: the same collectives in the same order, and none that fails, from the load to
the save and the resume; also where ranks are more than rows or experts. See `benchmarks/one_rank`.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import alone, sharded_of
from tiny_models import save as save_model
from tiny_models import tiny_model

from toolkit.mesh import View

sys.path.append(str(ROOT / "benchmarks"))  # last: its files have plain names
import one_rank

LENGTH = 16
# Model, ranks, settings of sharding (with the optimizer and the preference objective), LoRA's rank,
# what is planted on one rank.
CASES: dict[str, tuple[str, int, dict[str, Any], int, str]] = {
    "in full": ("llama", 8, {}, 0, ""),
    "tied": ("tied", 8, {}, 0, ""),
    "reduced each time": ("llama", 8, {"accumulation": "reduce_each"}, 0, ""),
    "kept gathered": ("llama", 8, {"accumulation": "keep_gathered"}, 0, ""),
    "recomputed": ("llama", 8, {"activation_checkpointing": "full"}, 0, ""),
    "offload": ("llama", 8, {"cpu_offload": True}, 0, ""),
    "replicas": ("llama", 8, {"dp_replicate": 2, "dp_shard": 4}, 0, ""),
    "adapters": ("llama", 8, {"frozen": "sharded"}, 4, ""),
    "adapters, whole base": ("llama", 8, {"frozen": "replicated"}, 4, ""),
    "adapters, replicas": ("llama", 8, {"dp_replicate": 2, "dp_shard": 4}, 4, ""),
    "idle experts": ("qwen3_moe", 8, {}, 0, ""),
    "8 experts on 16": ("mixtral", 16, {}, 0, ""),
    "8 experts on 16, Adafactor": ("mixtral", 16, {"optim": "adafactor"}, 0, ""),
    "8 experts on 16, 8 bits": ("mixtral", 16, {"optim": "adamw_8bit"}, 0, ""),
    "divided over 4": ("mixtral", 8, {"expert_parallel": 4}, 0, ""),
    "divided over 8": ("mixtral", 8, {"expert_parallel": 8}, 0, ""),
    "divided, replicas": (
        *("mixtral", 8, {"expert_parallel": 2, "dp_replicate": 2, "dp_shard": 4}, 0, ""),
    ),
    "divided, recomputed": (
        *("mixtral", 8, {"expert_parallel": 4, "activation_checkpointing": "full"}, 0, ""),
    ),
    "divided on 64": (
        *("mixtral", 64, {"expert_parallel": 4, "dp_replicate": 8, "dp_shard": 8}, 0, ""),
    ),
    "parts of rows": ("llama", 8, {"context_parallel": 2}, 0, ""),
    "parts of rows, replicas, recomputed": (
        "llama",
        8,
        {
            "context_parallel": 4,
            "dp_replicate": 2,
            "dp_shard": 4,
            "activation_checkpointing": "full",
        },
        4,
        "",
    ),
    "parts of rows, DPO": ("llama", 8, {"context_parallel": 2, "objective": "sigmoid"}, 0, ""),
    "parts of rows, KTO": ("llama", 8, {"context_parallel": 4, "objective": "kto"}, 0, ""),
    "parts of rows on 64": ("llama", 64, {"context_parallel": 4}, 4, ""),
    "adapters of rank 4 on 16": ("llama", 16, {}, 4, ""),
    "DPO": ("llama", 8, {"objective": "sigmoid"}, 0, ""),
    "KTO": ("llama", 8, {"objective": "kto"}, 0, ""),
    "a reward model": ("llama", 8, {"objective": "reward"}, 0, ""),
    "ORPO": ("llama", 8, {"objective": "orpo"}, 0, ""),
    "DPO of a stream with adapters": ("llama", 8, {"objective": "sigmoid"}, 4, ""),
    "DPO, replicas": (
        *("llama", 8, {"objective": "sigmoid", "dp_replicate": 2, "dp_shard": 4}, 0, ""),
    ),
    "DPO, idle experts": ("qwen3_moe", 8, {"objective": "sigmoid"}, 0, ""),
    "KTO on 64": ("llama", 64, {"objective": "kto"}, 4, ""),
    "wrong order": ("llama", 8, {}, 0, "order"),
    "an empty shard that cannot be summed": ("mixtral", 16, {}, 0, "empty"),
}

SOME = {
    "KTO on 64": (0, 1, 2, 3, 4, 31, 32, 33, 62, 63),
    "divided on 64": (0, 1, 3, 4, 5, 8, 31, 32, 59, 63),
    "parts of rows on 64": (0, 1, 2, 3, 4, 31, 32, 60, 63),
}
"""Ranks that run, of cases with more than can all run in a minute: the first and the last, those
at the middle, with shards and without, with each number of pairs, and several ranks of a group.
`make test-long` runs all ranks."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints by model."""
    root = tmp_path_factory.mktemp("models")
    mixtral = tiny_model("mixtral", num_local_experts=8, vocab_size=300)
    found = {
        "llama": save_tiny_model(root / "llama"),
        "tied": save_tiny_model(root / "tied", tie_word_embeddings=True),
        "qwen3_moe": save_tiny_model(root / "qwen3_moe", "qwen3_moe"),
        "mixtral": save_model(mixtral, root / "mixtral", "mixtral"),
    }
    return {name: str(folder) for name, folder in found.items()}


def build(folder: str, world: int, sharding: dict[str, Any], r: int) -> Any:
    from sharded import apply_fsdp, init_mesh

    from toolkit import checkpoint, loading
    from toolkit.adapters import prepare_adapters
    from toolkit.config.lora import LoraConfig
    from toolkit.config.preference import RewardModelConfig
    from toolkit.config.settings import ModelConfig, OptimConfig, ShardingConfig
    from toolkit.models.attention import attend_within_documents
    from toolkit.models.causal_lm import prepare
    from toolkit.training.optim import build_optimizer

    own = {k: v for k, v in sharding.items() if k not in ("optim", "objective")}
    cfg = ShardingConfig(param_dtype="float32", **own)
    objective = sharding.get("objective")
    model_cfg = RewardModelConfig(folder) if objective == "reward" else ModelConfig(folder)
    model = prepare(model_cfg)
    mesh = init_mesh("cpu", world, cfg)
    if objective is not None or cfg.context_parallel > 1:
        attend_within_documents(model, mesh.context)
    if r:
        model = prepare_adapters(model, LoraConfig(r=r), cfg.param_dtype)
    apply_fsdp(model, mesh, cfg)
    if world > 1:
        one_rank.local_collectives(model)
    loading.load_or_init(sharded_of(model), model_cfg, "cpu", 0, say=lambda _: None)
    kind = sharding.get("optim", "adamw_torch_fused")
    optimizer = build_optimizer(model, OptimConfig(optim=kind, learning_rate=1e-3))
    return checkpoint.TrainState(model.train(), optimizer)


def batches(mesh: Any, count: int = 2) -> list[Any]:
    """Complete rows of this data rank, or this rank's part of them."""
    from toolkit.data.samples.pieces import Piece
    from toolkit.data.samples.sample_shape import SampleShape

    drawn = torch.Generator().manual_seed(mesh.data.rank)
    ids = torch.randint(0, 300, (count, 2, LENGTH), generator=drawn)
    if mesh.context.size == 1:
        return [{"input_ids": one, "labels": one.clone()} for one in ids]
    parts = mesh.context.rank, mesh.context.size
    shape = SampleShape("wrapped", LENGTH, borders=True, context=parts)
    rows = ids.numpy()
    return [shape.batch([shape.sample([Piece(x, x.copy())]) for x in one]) for one in rows]


def pairs(mesh: Any, objective: str, r: int, count: int = 2) -> list[Any]:
    """Packed pairs of this data rank, others on each; the last one has none in its last
    micro-batch. Under adapters they come without a reference, as those of a stream.
    """
    from toolkit.data.row_formats import ANSWERS, PAIRS
    from toolkit.data.samples.pieces import Piece
    from toolkit.data.samples.sample_shape import SampleShape

    rank, world = mesh.data.rank, mesh.data.size
    drawn, made = np.random.default_rng(rank), []
    options: dict[str, Any] = {
        "row_format": ANSWERS if objective == "kto" else PAIRS,
        "prompts": objective == "orpo",
        "context": (mesh.context.rank, mesh.context.size),
    }
    shape = SampleShape("bfd", 4 * LENGTH, borders=True, **options)
    for i in range(count):
        many = 0 if count > 1 and (rank, i) == (world - 1, count - 1) else 1 + (rank + i) % 3
        pieces = []
        for _ in range(many):
            ids = drawn.integers(1, 290, int(drawn.integers(6, LENGTH)))
            pieces.append(Piece(ids, ids.copy(), len(ids) // 2))
        sample = shape.sample(pieces)
        sample["margin"] = torch.zeros(many)
        if objective == "kto":
            sample["desirable"] = torch.arange(many) % 2 == 0
        if not r:
            sample["reference"] = torch.zeros(2 * many)
        made.append(shape.batch([sample]))
    return made


def train(state: Any, mesh: Any, sharding: dict[str, Any], r: int) -> Any:
    """Run a step of the case's objective."""
    from sharded import sharded_of, train_step

    from toolkit.training.step import Update

    if (loss := objective_of(state.model, sharding)) is None:
        return train_step(state.model, state.optimizer, batches(mesh))
    micro_batches = pairs(mesh, sharding["objective"], r)
    counts = [loss.counts(batch) for batch in micro_batches]
    update = Update(sharded_of(state.model), micro_batches, counts)
    for batch in update:
        update.mean(loss(state.model, batch)).backward()
    return update.step(state.optimizer)


def objective_of(model: Any, sharding: dict[str, Any]) -> Any:
    from sharded import sharded_of

    from toolkit.config.preference import PreferenceConfig
    from toolkit.training.preference import PreferenceLoss

    if (kind := sharding.get("objective")) is None:
        return None
    mesh, cfg = sharded_of(model).mesh, PreferenceConfig(loss_type=kind)
    return PreferenceLoss(cfg, mesh.data, max_pairs=8, context=mesh.context)


def evaluation(state: Any, mesh: Any, sharding: dict[str, Any], r: int) -> Any:
    """Return the evaluation of the case's objective."""
    from sharded import evaluate, sharded_of

    from toolkit.training import step

    if (loss := objective_of(state.model, sharding)) is None:
        return evaluate(state.model, {"": batches(mesh, 1)})[0]
    sources = {"": pairs(mesh, sharding["objective"], r, 1)}
    return step.evaluate(sharded_of(state.model), sources, loss)[0]


def begin(rank: int, world: int, folder: str, root: str, r: int, optim: dict[str, str]) -> None:
    """Save what the ranks of many resume from, as one process."""
    from toolkit import checkpoint
    from toolkit.config.settings import CheckpointConfig

    state = build(folder, world, optim, r)
    train(state, alone(View(0, 2)), optim, r)
    state.step = 1
    checkpoint.save(state, root, CheckpointConfig())


@contextlib.contextmanager
def planted(what: str, rank: int, model: Any) -> Iterator[None]:
    from toolkit.formats import bit_sums
    from toolkit.training.guards import integrity

    if what == "order" and rank == 5:
        model.model.layers[2].unshard()
    if what != "empty":
        yield
        return

    def without_guard(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.int64).sum(1) if not rows.numel() else bit_sums.bit_sums(rows)

    with mock.patch.object(integrity, "bit_sums", without_guard):
        yield


def live(rank: int, world: int, folder: str, root: str, name: str) -> dict[str, Any]:
    """Load, resume, train, evaluate, check and save, as `rank` of ranks that do not exist."""
    from toolkit import checkpoint
    from toolkit.config.settings import CheckpointConfig
    from toolkit.models.expert_parallel import even_dispatch
    from toolkit.training.guards.integrity import Integrity

    _, _, sharding, r, fault = CASES[name]
    own = Path(root, f"{name}-{rank}")
    with (
        one_rank.as_rank(rank, world) as noted,
        even_dispatch(),
        one_rank.local_all_to_all(),
    ):
        state = build(folder, world, sharding, r)
        mesh = sharded_of(state.model).mesh
        step = checkpoint.resume(state, root, CheckpointConfig())
        with planted(fault, rank, state.model):
            try:
                guard = Integrity(state, every=1)
                for done in (2, 3):
                    stats = train(state, mesh, sharding, r)
                    guard.record(done)
                evaluated = evaluation(state, mesh, sharding, r)
                guard.compare_ranks(3, [guard.compute_checksums()] * world)
                state.step = 3
                checkpoint.save(state, own, CheckpointConfig())
            except RuntimeError as error:
                return {"failed": str(error), "order": noted.order}
        sizes = [p.to_local().numel() for p in state.trained_parameters().values()]
        finite = bool(torch.isfinite(torch.stack([stats.loss, evaluated.loss])).all())
        if mesh.context.rank > 0 and "objective" in sharding:
            finite = True  # the first rank of a row counts its pairs; simulated sums add nothing
        return {
            "step": step,
            "order": noted.order,
            "finite": finite,
            "skipped": bool(stats.skipped),
            "empty": sizes.count(0),
            "holds": sum(sizes) > 0,
            "shards": len([*own.glob("checkpoints/step-00000003/dcp/*.distcp")]),
        }


def live_as(place: int, _: int, numbers: tuple[int, ...], world: int, *rest: Any) -> dict[str, Any]:
    """Be one of those ranks of `world` that run."""
    return live(numbers[place], world, *rest)


def all_ranks(
    folders: dict[str, str], root: Path, name: str, numbers: tuple[int, ...] = ()
) -> dict[int, dict[str, Any]]:
    """Return what each rank found, or each of `numbers`."""
    kind, world, sharding, r, _ = CASES[name]
    optim = {k: v for k, v in sharding.items() if k in ("optim", "objective")}
    run_ranks(begin, 1, folders[kind], str(root), r, optim)
    numbers = numbers or tuple(range(world))
    arguments = numbers, world, folders[kind], str(root), name
    return dict(zip(numbers, run_ranks(live_as, len(numbers), *arguments, group=False)))  # noqa: B905


RIGHT = [name for name, case in CASES.items() if not case[4]]
QUICK = ("in full",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in RIGHT]
)
def test_all_ranks_do_the_same_in_the_same_order(folders, tmp_path: Path, name: str) -> None:
    compare_orders(name, all_ranks(folders, tmp_path, name, SOME.get(name, ())))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_64_ranks_do_the_same_in_the_same_order(folders, tmp_path: Path, name: str) -> None:
    by_rank: dict[int, dict[str, Any]] = {}
    for first in range(0, 64, 8):  # as many processes at a time as other cases start
        by_rank |= all_ranks(folders, tmp_path / str(first), name, tuple(range(first, first + 8)))
    assert len(by_rank) == CASES[name][1] == 64
    compare_orders(name, by_rank)


def compare_orders(name: str, by_rank: dict[int, dict[str, Any]]) -> None:
    """Compare what ranks did in the life of a case, and how it ended."""
    found = [*by_rank.values()]
    assert [of.get("failed") for of in found] == [None] * len(found)
    assert one_rank.differing({rank: of["order"] for rank, of in by_rank.items()}) == ""
    kinds = {line.split()[0] for line in found[0]["order"]}
    assert kinds >= {"all_gather", "reduce_scatter", "exchange"}
    sends_tokens = "divided" in name or "parts of rows" in name
    assert ("all_to_all" in kinds) == sends_tokens
    for of in found:
        assert (of["step"], of["finite"], of["skipped"]) == (1, True, False)
        assert of["shards"] == of["holds"]  # a rank without a value writes no file
    _, world, sharding, r, _ = CASES[name]
    fewer_rows = r and r < sharding.get("dp_shard", world)
    fewer_rows = fewer_rows or sharding.get("objective") == "reward"  # a head of one row
    assert any(of["empty"] for of in found) == bool(fewer_rows or "experts" in name)


def counted(rank: int, world: int) -> dict[str, Any]:
    """Run collectives of every way as a rank; return those that are recorded, and the number that
    torch's profiler saw, which looks from below.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.profiler import ProfilerActivity, profile

    with one_rank.as_rank(rank, world) as noted:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        noted.order.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            rows = DTensor.from_local(torch.ones(2, 4), mesh, (Replicate(), Shard(0)))
            rows.full_tensor()
            torch.nn.utils.get_total_norm([rows])
            rows.sum().full_tensor()
            rows * rows.redistribute(placements=(Replicate(), Shard(1)))
            torch.equal(rows, rows)
            dist.all_reduce(torch.ones(2), group=mesh.get_group("replicas"))
            dist.broadcast(torch.ones(3), 0)
            dist.barrier()
    quiet = ("wait_tensor", "_wrap_tensor_autograd")

    def exchanges(event: Any) -> bool:
        of_ranks = event.name.split("::")[0] in one_rank.COLLECTIVES
        return of_ranks and not event.name.endswith(quiet)

    def around(event: Any) -> Iterator[Any]:
        while (event := event.cpu_parent) is not None:
            yield event

    # Each is seen once more inside itself, as the operation of its backend.
    events = filter(exchanges, profiler.events())
    below = [event for event in events if not any(map(exchanges, around(event)))]
    return {"order": noted.order, "below": len(below)}


def test_collectives_inside_of_operations_are_recorded_with_their_groups() -> None:
    found = run_ranks(counted, 8, group=False)
    orders = [of["order"] for of in found]
    assert {of["below"] for of in found} == {len(orders[0])}
    assert len(orders[0]) == 9
    assert one_rank.differing(orders) == ""
    groups = [[line.rpartition(" among ")[2] for line in order] for order in orders]
    assert groups[0][0] == groups[3][0] == "0,1,2,3"
    assert groups[4][0] == "4,5,6,7"
    assert groups[0][-3] == groups[4][-3] == "0,4"
    # The same names and shapes with another group are another order.
    swapped = [list(order) for order in orders]
    swapped[4][0] = swapped[4][0].replace("4,5,6,7", "0,1,2,3")
    assert one_rank.differing(swapped) != ""


def test_orders_that_wait_for_each_other_forever_are_found() -> None:
    def order(*groups: str) -> list[str]:
        return [f"allreduce_ [[1]] among {group}" for group in groups]

    crossed = [order("0,1", "0,2"), order("1,2", "0,1"), order("0,2", "1,2")]
    assert one_rank.differing(crossed) != ""
    agreed = [order("0,1", "0,2"), order("0,1", "1,2"), order("0,2", "1,2")]
    assert one_rank.differing(agreed) == ""
    assert one_rank.differing([order("0,1"), []]).startswith("rank 1, collective 0 of 0: nothing")
    # Of ranks that do not run nothing is known; those that run must agree.
    some = {0: order("0,1,2"), 2: order("0,1,2", "0,2")}
    assert "collective 1 of" in one_rank.differing(some)
    assert one_rank.differing(some | {0: order("0,1,2", "0,2")}) == ""


def test_a_wrong_order_is_found_and_told(folders, tmp_path: Path) -> None:
    orders = [of["order"] for of in all_ranks(folders, tmp_path, "wrong order").values()]
    said = one_rank.differing(orders)
    assert said.startswith("rank 5, collective ")
    assert "all_gather" in said


@pytest.mark.slow
def test_a_rank_that_cannot_take_its_empty_shard_is_found(folders, tmp_path: Path) -> None:
    found = all_ranks(folders, tmp_path, "an empty shard that cannot be summed")
    failed = [rank for rank, of in found.items() if "failed" in of]
    assert failed == list(range(8, 16))


@pytest.mark.slow
def test_8_experts_train_on_16_ranks_and_go_on_on_3(folders, tmp_path: Path) -> None:
    """With real ranks, by the recipe: what 16 have saved 3 go on with, as if nothing had been."""
    save_byte_tokenizer(Path(folders["mixtral"]))
    (tmp_path / "text.txt").write_text("Each rank has a shard, be it empty. " * 900)
    flags = {
        "--model.name_or_path": folders["mixtral"],
        "--data.train_files": str(tmp_path / "text.txt"),
        "--data.sequence_length": "32",
        "--data.eval_split": "0.05",
        "--data.max_eval_samples": "8",
        "--sharding.param_dtype": "float32",
        "--train.logging_steps": "1",
        "--train.eval_steps": "2",
        "--train.max_steps": "4",
        "--checkpoint.save_steps": "2",
    }
    common = [word for pair in flags.items() for word in pair]

    def run(world: int, output: str, *more: str) -> list[float]:
        batch = ["--train.per_device_train_batch_size", str(48 // world)]
        place = ["--output_dir", str(tmp_path / output)]
        done = run_recipe_ranks("pretrain", world, *common, *batch, *place, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    run(16, "run", "--train.max_steps", "2")
    assert run(3, "run") == pytest.approx(run(1, "undisturbed"), abs=1e-4)
