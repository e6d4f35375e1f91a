"""The numbers of fine-tuning: packed, padded and one by one, on any number of ranks with any
accumulation, label smoothing, NEFTune, evaluation by source, frozen parts and new embedding rows.
"""

import contextlib
import copy
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import save_byte_tokenizer, save_tiny_model, slow
from distributed import run_ranks
from safetensors.torch import load_file, save_file
from sharded import apply_fsdp, evaluate, init_mesh, loss_sum, supervised_tokens, train_step
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from toolkit import checkpoint
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneTrainConfig,
    ModelConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.errors import ModelError, TrainingError
from toolkit.loading.pretrained import check_weights_fit, load_pretrained, materialise
from toolkit.models.causal_lm import build_on_meta
from toolkit.training import head_loss, loss
from toolkit.training.early_stopping import KEY, EarlyStopping, build_early_stopping
from toolkit.training.neftune import add_embedding_noise, sample_lengths
from toolkit.training.optim import build_optimizer

FP32 = ShardingConfig(param_dtype="float32")
CLOSE = 1e-5
QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
# A rotary model, one of learned positions, and a mixture.
KINDS = {"llama": {}, "gpt2": QUIET, "qwen3_moe": {}}
WAYS = ("packed", "padded", "one by one")
EPSILON = 0.1
FROZEN = ["*.embed_tokens.*", "mlp.up_proj.weight"]
SAVING = CheckpointConfig()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    found = {k: str(save_tiny_model(root / k, k, **changes)) for k, changes in KINDS.items()}
    found["granite"] = str(save_tiny_model(root / "granite", "granite", logits_scaling=4.0))
    found["wider"] = str(shutil.copytree(found["llama"], root / "wider"))
    found["wider tied"] = str(save_tiny_model(root / "wider tied", "gemma2"))
    for name in ("wider", "wider tied"):
        save_byte_tokenizer(Path(found[name]), extra=80)  # 337 ids for 300 rows
    return found


# --------------------------------------------------------------------------------------------------
# Samples, and their micro-batches
# --------------------------------------------------------------------------------------------------

Sample = tuple[torch.Tensor, torch.Tensor]

SMOOTHED = functools.partial(loss_sum, label_smoothing=EPSILON)


def samples(seed: int = 1) -> list[Sample]:
    """Return 16 samples of 1 to 14 tokens: (ids, labels), some with hardly a supervised token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, length in enumerate([5, 9, 1, 14, 7, 3, 11, 2, 8, 6, 13, 4, 10, 5, 12, 7]):
        ids = torch.randint(1, 300, (length,), generator=generator)
        labels = ids.clone()
        labels[: 1 + (i * 5) % 8] = -100  # prompts of other lengths; some are nothing else
        found.append((ids, labels))
    return found


def padded(part: list[Sample]) -> dict[str, torch.Tensor]:
    width = -(-max(len(ids) for ids, _ in part) // 8) * 8
    return {
        "input_ids": torch.stack([F.pad(ids, (0, width - len(ids))) for ids, _ in part]),
        "labels": torch.stack([F.pad(x, (0, width - len(x)), value=-100) for _, x in part]),
        "attention_mask": torch.stack(
            [F.pad(torch.ones_like(ids), (0, width - len(ids))) for ids, _ in part]
        ),
    }


def packed(part: list[Sample], width: int = 24) -> dict[str, torch.Tensor]:
    """Return rows of whole samples; what is left of a row is a sample of its own."""
    rows: list[list[Sample]] = []
    for sample in part:
        if not rows or sum(len(ids) for ids, _ in rows[-1]) + len(sample[0]) > width:
            rows.append([])
        rows[-1].append(sample)
    for row in rows:
        rest = width - sum(len(ids) for ids, _ in row)
        if rest:
            row.append((torch.zeros(rest, dtype=torch.long), torch.full((rest,), -100)))
    first = torch.tensor([-100])
    return {
        "input_ids": torch.stack([torch.cat([ids for ids, _ in row]) for row in rows]),
        "labels": torch.stack(
            [torch.cat([torch.cat([first, x[1:]]) for _, x in row]) for row in rows]
        ),
        "position_ids": torch.stack(
            [torch.cat([torch.arange(len(ids)) for ids, _ in row]) for row in rows]
        ),
    }


def micro_batches(part: list[Sample], way: str, pieces: int) -> list[dict[str, torch.Tensor]]:
    if way == "one by one":
        return [{"input_ids": ids[None], "labels": labels[None]} for ids, labels in part]
    make = packed if way == "packed" else padded
    return [make(part[i::pieces]) for i in range(pieces)]


def nothing(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch without a supervised token."""
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


# --------------------------------------------------------------------------------------------------
# One process, by hand
# --------------------------------------------------------------------------------------------------


def plain(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)


def reference(folder: str, smoothing: float = 0.0) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of all samples, each by itself, with transformers alone."""
    model = plain(folder).train()
    total, tokens = torch.zeros(()), 0
    for ids, labels in samples():
        logits = model(input_ids=ids[None]).logits[:, :-1]
        count = int((labels[1:] != -100).sum())
        if count:
            smoother = LabelSmoother(epsilon=smoothing)
            total = total + smoother({"logits": logits}, labels[None, 1:]) * count
        tokens += count
    (total / tokens).backward()
    return float(total.detach() / tokens), {n: p.grad for n, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Keep(torch.optim.SGD):
    """Plain SGD that remembers the gradients that it was given."""

    given: dict[str, torch.Tensor]

    def __init__(self, model: Any, lr: float = 0.0):
        super().__init__(model.parameters(), lr=lr)
        self._names = {id(p): n for n, p in model.named_parameters()}

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.given = {self._names[id(p)]: whole(p.grad) for p in parameters if p.grad is not None}
        super().step(closure)


def off(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two gradients, relative to the tensor's own largest."""
    assert mine.keys() == theirs.keys()
    worst = 0.0
    for name, tensor in theirs.items():
        scale = tensor.abs().max().clamp(min=1e-12)
        worst = max(worst, float((mine[name] - tensor).abs().max() / scale))
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_packed_padded_and_one_by_one_give_the_same_gradient(kind, folders):
    mean, gradients = reference(folders[kind])
    model = plain(folders[kind]).train()
    for way in WAYS:
        for pieces in (1, 3):
            optimizer = Keep(model)
            micro = micro_batches(samples(), way, pieces)
            stats = train_step(model, optimizer, micro, max_grad_norm=0)
            assert float(stats.loss) == pytest.approx(mean, rel=CLOSE), way
            assert off(optimizer.given, gradients) < CLOSE, (way, pieces)
            # What has no supervised token changes nothing, bit for bit.
            before = copy.deepcopy(optimizer.given)
            train_step(model, optimizer, [*micro, nothing(micro[0])], max_grad_norm=0)
            assert all(torch.equal(before[n], g) for n, g in optimizer.given.items()), way


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_ones_and_positions_that_go_on_are_seen(kind, folders):
    """The controls: packing that is turned off without a word is far from the same gradient."""
    _, gradients = reference(folders[kind])
    model = plain(folders[kind]).train()
    batch = packed(samples())
    ones = batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
    going_on = {k: v for k, v in batch.items() if k != "position_ids"}
    for wrong in (ones, going_on):
        optimizer = Keep(model)
        train_step(model, optimizer, [wrong], max_grad_norm=0)
        assert off(optimizer.given, gradients) > 1e-2


@pytest.mark.parametrize("kind", ["llama", "granite"])
@pytest.mark.parametrize("elements", [2**26, 300 * 7], ids=["one chunk", "many chunks"])
def test_label_smoothing_is_that_of_transformers(kind, elements, folders, monkeypatch):
    """In the head, chunk by chunk; granite scales its logits."""
    monkeypatch.setitem(head_loss._CHUNK_ELEMENTS, "cpu", elements)
    mean, gradients = reference(folders[kind], EPSILON)
    model = plain(folders[kind]).train()
    for way in WAYS:
        optimizer = Keep(model)
        micro = micro_batches(samples(), way, 2)
        stats = train_step(model, optimizer, micro, max_grad_norm=0, loss=SMOOTHED)
        assert float(stats.loss) == pytest.approx(mean, rel=CLOSE)
        assert off(optimizer.given, gradients) < CLOSE, way
    assert loss._logit_maps[model] is not None
    assert float(evaluate(model, {"": [padded(samples())]})[0].loss) == pytest.approx(
        reference(folders[kind])[0], rel=CLOSE
    )
    assert off(optimizer.given, reference(folders[kind])[1]) > 1e-2  # the control


# --------------------------------------------------------------------------------------------------
# Ranks
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank():
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def build(folder: str, world: int, **settings: Any) -> Any:
    model = build_on_meta(ModelConfig(folder, **settings))
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    load_pretrained(model, folder, "cpu")
    return model.train()


def on_ranks(rank: int, world: int, folders: dict[str, str], run: str) -> dict[str, Any]:
    """Run every check of this file that needs ranks; one start of the processes for all."""
    found: dict[str, Any] = {"steps": steps(rank, world, folders)}
    found["no averages"] = averages(rank, world, folders["llama"])
    if world < 4:
        found["smoothed"] = smoothed(rank, world, folders["llama"])
        found["sources"] = by_source(rank, world, folders["llama"])
        found["noise"] = noise(rank, world, folders["llama"])
        found["frozen"] = frozen(rank, world, folders["llama"], f"{run}/{world}")
        found["resized"] = resized(rank, world, folders)
    return found


@pytest.fixture(scope="module")
def on(folders, tmp_path_factory) -> Callable[[int], list[dict[str, Any]]]:
    """Give what `on_ranks` found on so many ranks; each number of them is started once."""
    run = str(tmp_path_factory.mktemp("runs"))

    @functools.cache
    def on(world: int) -> list[dict[str, Any]]:
        if world > 1:
            return run_ranks(on_ranks, world, folders, run)
        with one_rank():
            return [on_ranks(0, 1, folders, run)]

    return on


@pytest.fixture(
    params=[slow(1), 2, slow(4)],
    ids=["1 rank", "2 ranks", "4 ranks"],
)
def any_ranks(request, on) -> list[dict[str, Any]]:
    return on(request.param)


@pytest.fixture(params=[slow(1), 2], ids=["1 rank", "2 ranks"])
def found(request, on) -> list[dict[str, Any]]:
    return on(request.param)


def dealt(rank: int, world: int) -> list[Sample]:
    """Return the rank's samples: blocks, so that token counts differ."""
    part = len(samples()) // world
    return samples()[rank * part : (rank + 1) * part]


def steps(rank: int, world: int, folders: dict[str, str]) -> dict[Any, Any]:
    results = {}
    for kind in KINDS:
        model = build(folders[kind], world)
        tried = {}
        for accumulation in (1, 2, 4):
            for way in ("packed", "padded") if kind == "llama" else ("packed",):
                micro = micro_batches(dealt(rank, world), way, accumulation)
                if accumulation == 4 and rank == 0:
                    micro = [*micro, nothing(micro[0])]
                elif accumulation == 4:  # as many on every rank
                    micro = [nothing(micro[1]), *micro]
                tried[kind, accumulation, way] = micro
        everything = packed(samples())
        tried[kind, "one rank has it all"] = [everything if rank == 0 else nothing(everything)]
        for key, micro in tried.items():
            optimizer = Keep(model)
            stats = train_step(model, optimizer, micro, max_grad_norm=0)
            counts = sum(int(supervised_tokens(b["labels"])) for b in micro)
            results[key] = (float(stats.loss), optimizer.given, counts)
    return results


@pytest.mark.slow
def test_any_ranks_and_any_accumulation_give_the_gradient_of_one_process(any_ranks, folders):
    found = any_ranks
    expected = {kind: reference(folders[kind]) for kind in KINDS}
    for rank in found:
        assert len(rank["steps"]) == 15
        for (kind, *what), (mean, gradients, _) in rank["steps"].items():
            assert mean == pytest.approx(expected[kind][0], rel=CLOSE), (kind, what)
            assert off(gradients, expected[kind][1]) < CLOSE, (kind, what)
    counts = [[s[2] for s in rank["steps"].values()] for rank in found]
    assert len(found) == 1 or counts[0] != counts[1], "ranks must differ in tokens"


def averages(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    """Return the gradient of a mean per rank, averaged: what is not done."""
    model = build(folder, world)
    batch = packed(dealt(rank, world))
    (loss_sum(model, batch) / supervised_tokens(batch["labels"]) / world).backward()
    return {n: whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.slow
def test_a_mean_per_rank_is_seen(any_ranks, folders):
    """The control: ranks with unequal counts weighted alike are far from the same gradient."""
    found = any_ranks
    error = off(found[0]["no averages"], reference(folders["llama"])[1])
    assert error < CLOSE if len(found) == 1 else error > 1e-2


def smoothed(rank: int, world: int, folder: str) -> Any:
    model = build(folder, world)
    optimizer = Keep(model)
    micro = micro_batches(dealt(rank, world), "packed", 2)
    stats = train_step(model, optimizer, micro, max_grad_norm=0, loss=SMOOTHED)
    return float(stats.loss), optimizer.given


def test_label_smoothing_weighs_tokens_over_the_global_batch(found, folders):
    mean, gradients = reference(folders["llama"], EPSILON)
    for rank in found:
        assert rank["smoothed"][0] == pytest.approx(mean, rel=CLOSE)
        assert off(rank["smoothed"][1], gradients) < CLOSE


# --------------------------------------------------------------------------------------------------
# Evaluation
# --------------------------------------------------------------------------------------------------


def by_source(rank: int, world: int, folder: str) -> dict[str, Any]:
    model = build(folder, world)
    part = dealt(rank, world)
    batch = padded(part)
    sources = {
        "first": [padded(part[:2]), packed(part[2:])],
        "empty": [nothing(batch)],
        "all": [batch],
        "few": [padded(part[:2])],
    }
    total, found = evaluate(model, sources)
    plain, _ = evaluate(model, {"": [b for batches in sources.values() for b in batches]})
    assert model.training
    assert all(isinstance(p, DTensor) for p in model.parameters())
    every = [*found.items(), ("", total), ("plain", plain)]
    known = half_known(folder, part)
    _, shares = evaluate(model, {"padded": [padded(known)], "packed": [packed(known)]})
    return {n: float(stats.loss) for n, stats in every} | {
        f"accuracy, {n}": float(stats.parts["accuracy"]) for n, stats in shares.items()
    }


def half_known(folder: str, part: list) -> list:
    """Return samples in which every other label is what the model ranks first."""
    model, found = plain(folder).eval(), []
    for ids, labels in part:
        best, labels = model(input_ids=ids[None]).logits[0].argmax(-1), labels.clone()
        chosen = (labels[1:] != -100) & (torch.arange(len(ids) - 1) % 2 == 0)
        labels[1:][chosen] = best[:-1][chosen]
        found.append((ids, labels))
    return found


def test_evaluation_gives_the_loss_by_source(found, folders):
    mean, _ = reference(folders["llama"])
    for rank in found:
        said = rank["sources"]
        assert list(said)[:6] == ["first", "empty", "all", "few", "", "plain"]
        assert math.isnan(said["empty"])
        assert said["first"] == pytest.approx(mean, rel=CLOSE) == said["all"]
        assert said["plain"] == said[""]
        assert said[""] != pytest.approx((2 * mean + said["few"]) / 3, rel=10 * CLOSE)  # of tokens


def test_accuracy_is_the_share_that_transformers_ranks_first(found, folders):
    model, right, tokens = plain(folders["llama"]).eval(), 0, 0
    for ids, labels in half_known(folders["llama"], samples()):
        best = model(input_ids=ids[None]).logits[0, :-1].argmax(-1)
        right += int((best == labels[1:]).sum())
        tokens += int((labels[1:] != -100).sum())
    assert 0.4 < right / tokens < 0.8
    for rank in found:
        for way in ("padded", "packed"):
            assert rank["sources"][f"accuracy, {way}"] == pytest.approx(right / tokens)


def test_a_source_without_batches_is_named(folders):
    model = plain(folders["llama"])
    with pytest.raises(TrainingError, match="of source code"):
        evaluate(model, {"text": [padded(samples())], "code": []})
    with pytest.raises(TrainingError, match="no batches"):
        evaluate(model, {})
    assert not model.training


# --------------------------------------------------------------------------------------------------
# NEFTune
# --------------------------------------------------------------------------------------------------

ALPHA = 5.0


def noise(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return what is added to the embeddings of a packed and a padded batch, and what remains."""
    torch.manual_seed(100 + rank)
    model = build(folder, world)
    names = list(model.state_dict())
    seen: list[torch.Tensor] = []
    clean = train_step(model, Keep(model), [packed(samples())], max_grad_norm=0)
    add_embedding_noise(model, ALPHA)
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.append(out.detach().clone())
    )
    batches = {"packed": packed(samples()), "padded": padded(samples())}
    batches["rows"] = {k: v for k, v in batches["packed"].items() if k != "position_ids"}
    results: dict[str, Any] = {}
    for name, batch in batches.items():
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        for mode in (True, False):
            model.train(mode)
            with torch.no_grad():
                model(**inputs)
        results[name] = seen[-2] - seen[-1]
    assert list(model.state_dict()) == names
    model.train()
    torch.manual_seed(0)
    noisy = train_step(model, Keep(model), [batches["packed"]], max_grad_norm=0)
    torch.manual_seed(0)
    again = train_step(model, Keep(model), [batches["packed"]], max_grad_norm=0)
    results["losses"] = [float(s.loss) for s in (noisy, again, clean)]
    return results


def test_noise_has_the_length_of_each_sample(found, folders):
    width = 32
    lengths = {
        "packed": sample_lengths(None, packed(samples())["position_ids"]),
        "padded": padded(samples())["attention_mask"],
        "rows": torch.full_like(packed(samples())["input_ids"], 24),
    }
    lengths["padded"] = lengths["padded"] * lengths["padded"].sum(-1, keepdim=True)
    assert lengths["packed"][0].tolist() == [5] * 5 + [9] * 9 + [1] + [9] * 9
    for rank in found:
        for name, length in lengths.items():
            bound = torch.where(length > 0, ALPHA / (length.clamp(min=1) * width).sqrt(), 0.0)
            size = rank["noise"][name].abs().amax(-1)
            assert (size <= bound + 1e-5).all(), name
            assert (size >= 0.7 * bound)[length > 0].all(), name  # the largest of 32 draws
        noisy, again, clean = rank["noise"]["losses"]
        assert noisy == again  # drawn from the generator that checkpoints keep
        assert noisy != clean
        assert clean == pytest.approx(reference(folders["llama"])[0], rel=CLOSE)
    if len(found) == 2:
        assert not torch.equal(found[0]["noise"]["packed"], found[1]["noise"]["packed"])


def test_noise_refuses_what_it_cannot_measure(folders):
    with pytest.raises(TrainingError, match="attention_mask"):
        sample_lengths(torch.ones(1, 1, 4, 4), None)


# --------------------------------------------------------------------------------------------------
# Frozen parts
# --------------------------------------------------------------------------------------------------


def frozen(rank: int, world: int, folder: str, run: str) -> dict[str, Any]:
    """Train three steps, and two, a checkpoint and one; return both, and what was there before."""
    micro = micro_batches(dealt(rank, world), "packed", 1)
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    model = build(folder, world, frozen_parameters=FROZEN)
    before = {n: whole(p) for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, config)
    stopping = stopper()
    for step in range(3):
        train_step(model, optimizer, micro)
        if step == 1:
            stopping.update({"eval_loss": 3.0})
            stopping.update({"eval_loss": 3.5})
            extra = {KEY: stopping.state_dict()}
            state = checkpoint.TrainState(model, optimizer, step=2, extra=extra)
            checkpoint.save(state, run, SAVING)
    through = {n: whole(p) for n, p in model.named_parameters()}
    model = build_on_meta(ModelConfig(folder, frozen_parameters=FROZEN))
    apply_fsdp(model, init_mesh("cpu", world, FP32), FP32)
    materialise(model, "cpu")
    optimizer = build_optimizer(model.train(), config)
    state = checkpoint.TrainState(model, optimizer)
    assert checkpoint.resume(state, run, SAVING) == 2
    resumed = stopper(kept=state.extra)
    train_step(model, optimizer, micro)
    after = {n: whole(p) for n, p in model.named_parameters()}
    still = [n for n, p in model.named_parameters() if not p.requires_grad]
    states = sum(len(s) > 0 for s in optimizer.state.values())
    return {
        "before": before,
        "through": through,
        "after": after,
        "still": still,
        "states": states,
        "stopping": (
            stopping == resumed,
            resumed.evaluations_since_best,
            resumed.update({"eval_loss": 3.0}),
        ),
    }


def test_frozen_parts_stay_through_training_checkpoint_and_resume(found):
    for rank in found:
        run = rank["frozen"]
        assert len(run["still"]) == 4  # the embedding, and one matrix a layer
        assert run["states"] == len(run["before"]) - 4
        for name, value in run["before"].items():
            assert torch.equal(value, run["after"][name]) == (name in run["still"]), name
            assert torch.equal(run["through"][name], run["after"][name]), name
        assert run["stopping"] == (True, 1, True)


def test_freezing_everything_is_refused(folders):
    with pytest.raises(ModelError, match="nothing would be trained"):
        build_on_meta(ModelConfig(folders["llama"], frozen_parameters=["*"]))


# --------------------------------------------------------------------------------------------------
# New embedding rows
# --------------------------------------------------------------------------------------------------


def resized(rank: int, world: int, folders: dict[str, str]) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for name, multiple in (("wider", True), ("wider", 64), ("wider tied", True)):
        settings = {"resize_embeddings": multiple}
        check_weights_fit(
            build_on_meta(ModelConfig(folders[name], **settings)), ModelConfig(str(folders[name]))
        )
        model = build(folders[name], world, **settings)
        assert model.config.get_text_config().vocab_size == model.hf_assets.config["vocab_size"]
        step = train_step(model, Keep(model), micro_batches(dealt(rank, world), "packed", 1))
        assert torch.isfinite(step.loss)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        results[f"{name} {multiple}"] = {
            n: whole(p)
            for n, p in model.named_parameters()
            if n.startswith(("model.embed_tokens", "lm_head"))
        } | {"tied": tied}
    return results


def test_new_rows_are_the_mean_of_the_old_ones(found, folders):
    for rank in found:
        for what, tensors in rank["resized"].items():
            name, _, multiple = what.rpartition(" ")
            tied = name == "wider tied"
            assert tensors.pop("tied") == tied
            assert len(tensors) == (1 if tied else 2), "a tied head is there once"
            source = load_file(f"{folders[name]}/model.safetensors")
            for key, value in tensors.items():
                assert value.shape == (384 if multiple == "64" else 337, 32)
                assert torch.equal(value[:300], source[key])
                mean = source[key].double().mean(0).float()
                torch.testing.assert_close(value[300:], mean.expand(len(value) - 300, -1))
                assert float(mean.abs().max()) > 0  # the control


def test_new_rows_of_a_head_with_a_bias_and_of_a_smaller_vocabulary(tmp_path):
    """A bias of the head gets new values too; rows beyond the tokenizer's are cut off."""
    from transformers import AutoConfig

    folder = tmp_path / "phi"
    save_byte_tokenizer(folder, extra=80)
    config = AutoConfig.for_model(
        "phi",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=300,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"] = torch.arange(300.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = build_on_meta(ModelConfig(str(folder), resize_embeddings=True))
    load_pretrained(model, folder, "cpu")
    assert model.lm_head.bias[300:].tolist() == [149.5] * 37
    save_byte_tokenizer(folder)
    model = build_on_meta(ModelConfig(str(folder), resize_embeddings=True))
    load_pretrained(model, folder, "cpu")
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"][:257])
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 300  # the source's own
    assert model.hf_assets.config["vocab_size"] == 257


# --------------------------------------------------------------------------------------------------
# Early stopping
# --------------------------------------------------------------------------------------------------


def stopper(patience: int = 2, kept: Any = None, **saving: Any) -> EarlyStopping:
    train = FinetuneTrainConfig(early_stopping_patience=patience, eval_steps=1)
    return build_early_stopping(train, CheckpointConfig(**saving), kept or {})


def test_a_run_stops_after_so_many_evaluations_without_a_better_one():
    one = stopper()
    losses = [3.0, 2.0, 2.5, 1.9, 1.9, math.nan]  # an equal one is not better, nor is none at all
    assert [one.update({"eval_loss": x}) for x in losses] == [False] * 5 + [True]
    assert one.best == 1.9
    none = build_early_stopping(FinetuneTrainConfig(), CheckpointConfig(), {KEY: one.state_dict()})
    assert not any(none.update({}) or none.should_stop for _ in range(9))
    assert none.state_dict() == {}
    assert none.summarize(9) == ""
    assert "step 9: eval_loss was not better than 1.9 in 2" in one.summarize(9)


def test_the_metric_is_that_of_keep_best():
    more = stopper(metric_for_best_model="accuracy")
    assert (more.metric, more.greater_is_better) == ("eval_accuracy", True)
    assert not more.update({"eval_accuracy": 0.1})
    assert not more.update({"eval_accuracy": 0.2})
    assert more.evaluations_since_best == 0
    with pytest.raises(TrainingError, match="eval_loss"):
        more.update({"eval_loss": 1.0})


def test_a_checkpoint_keeps_it_and_another_metric_is_refused():
    one = stopper()
    one.update({"eval_loss": 2.0})
    one.update({"eval_loss": 2.5})
    kept = {KEY: json.loads(json.dumps(one.state_dict()))}
    other = stopper(patience=5, kept=kept)
    assert (other.best, other.evaluations_since_best, other.patience, other.should_stop) == (
        2.0,
        1,
        5,
        False,
    )
    with pytest.raises(TrainingError, match="eval_loss so far"):
        stopper(metric_for_best_model="accuracy", kept=kept)
