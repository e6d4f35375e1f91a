"""Context parallelism: ranks that share rows train to the numbers of one process with the rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from sharded import KeepGradients, apply_fsdp, relative_difference, sharded_of
from tiny_models import tiny_class, tiny_config, tiny_model

from toolkit.config.settings import (
    FinetuneConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    ModelConfig,
    PretrainConfig,
    ShardingConfig,
    TrainConfig,
)
from toolkit.data.samples import batch as batches
from toolkit.data.samples.batch import IGNORED, Batch
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import Packing, SampleShape
from toolkit.errors import ConfigError, DataError, ModelError, ShardingError
from toolkit.formats.metrics_file import read_metrics
from toolkit.mesh import View, data_ranks, init_mesh, mesh_shape
from toolkit.models.attention import BORDERS, ONE_DOCUMENT_A_ROW, attend_within_documents
from toolkit.models.context_probe import find_context_obstacle
from toolkit.objectives import build
from toolkit.planning.devices import device_of
from toolkit.planning.search import make_plan
from toolkit.rehearsal.rehearse import rehearse
from toolkit.training.loss import causal_lm_loss
from toolkit.training.step import Update

LENGTH = 32
KINDS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 20},
    "gpt2": {},
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v3": {},
    "olmo2": {},
    "mistral": {"sliding_window": 9},
    "gpt_neox": {},
    "opt": {},
    "phi3": {},
}
FP32 = ShardingConfig(param_dtype="float32")


def rows_of(packing: Packing, lengths: list[list[int]], part: tuple[int, int] = (0, 1)) -> Batch:
    """Return a micro-batch of rows of documents, whose first third is not supervised."""
    shape = SampleShape(packing, LENGTH, 3, borders=True, context=part)
    drawn = np.random.default_rng(sum(map(sum, lengths)))
    samples = []
    for row in lengths:
        pieces = []
        for n in row:
            ids = drawn.integers(8, 100, n)
            labels = ids.copy()
            if packing != "wrapped":
                labels[: n // 3] = IGNORED
            pieces.append(Piece(ids, labels))
        samples.append(shape.sample(pieces))
    return shape.batch(samples)


# Rows of each data rank: documents across the borders of parts; complete rows; padded rows; rows of
# which the second part has no target.
ROWS: dict[str, tuple[Packing, list[list[list[int]]]]] = {
    "packed": ("bfd", [[[10, 15, 7], [3, 29]], [[32], [1, 13, 9, 9]]]),
    "wrapped": ("wrapped", [[[32], [32]], [[32], [32]]]),
    "padded": ("none", [[[29], [12]], [[5], [21]]]),
    "uneven": ("bfd", [[[9], [14]], [[2, 3], [16]]]),
}


def step_gradients(
    model: Any, sharded: Any, micro_batches: list[Batch]
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Return loss, tokens and gradients of a step, which changes nothing."""
    update = Update(sharded, micro_batches)
    for batch in update:
        update.mean(causal_lm_loss(model, batch)).backward()
    optimizer = KeepGradients(model)
    stats = update.step(optimizer, max_grad_norm=0.0)
    return float(stats.loss), int(stats.tokens), optimizer.gradients


def context_steps(
    rank: int, world: int, kinds: dict[str, dict], rows: list[str], settings: dict[str, Any]
) -> dict:
    """Return what `step_gradients` has of each kind and sort of rows, on ranks that share rows."""
    cfg = replace(FP32, **settings)
    results = {}
    for kind, changes in kinds.items():
        model = tiny_model(kind, **changes).train()
        mesh = init_mesh("cpu", world, cfg)
        attend_within_documents(model, mesh.context)
        apply_fsdp(model, mesh, cfg)
        for name in rows:
            packing, by_rank = ROWS[name]
            mine = by_rank[mesh.data.rank :: mesh.data.size]
            parts = mesh.context.rank, mesh.context.size
            micro_batches = [rows_of(packing, lengths, parts) for lengths in mine]
            results[kind, name] = step_gradients(model, sharded_of(model), micro_batches)
    return results


def plain_step(kind: str, changes: dict, name: str) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Return what one process has of the complete rows."""
    model = tiny_model(kind, **changes).train()
    attend_within_documents(model)
    packing, by_rank = ROWS[name]
    return step_gradients(model, sharded_of(model), [rows_of(packing, r) for r in by_rank])


def compare(results: dict, kinds: dict[str, dict]) -> None:
    for (kind, name), (loss, tokens, gradients) in results.items():
        expected_loss, expected_tokens, expected = plain_step(kind, kinds[kind], name)
        assert tokens == expected_tokens, (kind, name)
        assert loss == pytest.approx(expected_loss, rel=2e-6), (kind, name)
        assert gradients.keys() == expected.keys()
        off = relative_difference(gradients.values(), expected.values())
        assert off < 1e-5, (kind, name, off)


@pytest.mark.slow
def test_two_ranks_that_share_rows_have_the_gradients_of_one_process():
    """All kinds, with documents across the border of the parts."""
    results = run_ranks(context_steps, 2, KINDS, ["packed"], {"context_parallel": 2})
    compare(results[0], KINDS)


@pytest.mark.slow
def test_every_packing_has_the_gradients_of_one_process():
    """In `uneven` one part has no target; in all of them rows have padding."""
    kinds = {"llama": {}, "mistral": {"sliding_window": 9}}
    results = run_ranks(context_steps, 2, kinds, list(ROWS), {"context_parallel": 2})
    compare(results[0], kinds)
    part = rows_of(*ROWS["uneven"][:1], ROWS["uneven"][1][0], (1, 2))
    assert int(part.count) == 0 < int(rows_of("bfd", ROWS["uneven"][1][0], (0, 2)).count)


LAYOUTS = {
    "4 with 2 key heads": {"context_parallel": 4},
    "data ranks": {"context_parallel": 2},
    "replicas": {"context_parallel": 2, "dp_replicate": 2, "dp_shard": 2},
    "only replicas": {"context_parallel": 2, "dp_replicate": 4, "dp_shard": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_have_the_gradients_of_one_process(layout):
    kinds = {name: KINDS[name] for name in ("llama", "gemma3_text", "gpt2", "qwen3_moe")}
    results = run_ranks(context_steps, 4, kinds, ["packed", "wrapped"], LAYOUTS[layout])
    compare(results[0], kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "activation_offload": True},
        {"accumulation": "reduce_each", "reshard_after_forward": True},
        {"torch_compile": "layer", "torch_compile_backend": "aot_eager"},
        {
            "torch_compile": "layer",
            "torch_compile_backend": "aot_eager",
            "activation_checkpointing": "selective",
        },
        {"torch_compile": "model", "torch_compile_backend": "aot_eager"},
    ],
    ids=str,
)
def test_recomputation_and_compilation_change_nothing(settings):
    kinds = {"llama": {}}
    settings = {"context_parallel": 2, **settings}
    results = run_ranks(context_steps, 2, kinds, ["packed", "wrapped"], settings)
    compare(results[0], kinds)


def cut_labels_first(rank: int, world: int) -> Any:
    """Return a step whose labels are shifted in each part instead of in the complete row."""
    cut = Batch.cut

    def wrong(self: Batch, at: int, of: int, **options: Any) -> Batch:
        part = cut(self, at, of, **options)
        targets = part.targets.clone()
        targets[:, -1] = IGNORED
        return replace(part, targets=targets)

    batches.Batch.cut = wrong  # type: ignore[method-assign]
    try:
        return context_steps(rank, world, {"llama": {}}, ["packed"], {"context_parallel": 2})
    finally:
        batches.Batch.cut = cut  # type: ignore[method-assign]


@pytest.mark.slow
def test_labels_that_are_cut_before_the_shift_are_found():
    """The negative control: one target a row and border is lost."""
    with pytest.raises(AssertionError):
        compare(run_ranks(cut_labels_first, 2)[0], {"llama": {}})


# ---- Batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_batch_are_its_rows(name, size):
    """3 does not divide the rows, so they are padded."""
    packing, (lengths, _) = ROWS[name]
    whole = rows_of(packing, lengths)
    parts = [rows_of(packing, lengths, (at, size)) for at in range(size)]
    width = whole.targets.shape[1]
    joined = {n: torch.cat([p.inputs[n] for p in parts], 1) for n in ("input_ids", "position_ids")}
    assert torch.equal(joined["input_ids"][:, :width], whole.inputs["input_ids"])
    assert joined["input_ids"].shape[1] == -(-width // size) * size
    targets = torch.cat([p.targets for p in parts], 1)
    assert torch.equal(targets[:, :width], whole.targets)
    assert (targets[:, width:] == IGNORED).all()
    real = torch.cat([p.real for p in parts], 1)
    assert torch.equal(real[:, :width], whole.real)
    assert not real[:, width:].any()
    if packing != "wrapped":
        assert [p.n_targets for p in parts] == [int(p.count) for p in parts]
    positions = joined["position_ids"]
    if packing == "bfd":
        assert torch.equal(positions[:, :width], whole.inputs["position_ids"])
    else:
        # Padding repeats the last position: a model may have no position after it.
        expected = torch.arange(positions.shape[1]).clamp(max=width - 1)
        assert torch.equal(positions, expected.expand_as(positions))
    borders = parts[0].inputs[BORDERS[0]]
    assert int(borders[-1]) == positions.numel()
    assert all(torch.equal(borders, p.inputs[BORDERS[0]]) for p in parts)
    assert parts[0].inputs[ONE_DOCUMENT_A_ROW] is (packing != "bfd")
    assert "attention_mask" not in parts[0].inputs


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(DataError, match="a multiple of 3 tokens"):
        Batch.of(torch.ones(1, 8, dtype=torch.int64)).cut(0, 3)


# ---- What is refused -----------------------------------------------------------------------------


def obstacle(kind: str, parts: int = 2, length: int = 64, **changes: Any) -> str:
    model = tiny_model(kind, **changes)
    return find_context_obstacle(model.config, tiny_class(kind), parts, length)


@pytest.mark.parametrize("kind", KINDS)
def test_types_whose_parts_equal_their_rows_are_accepted(kind):
    assert obstacle(kind) == ""


@pytest.mark.parametrize(
    "kind", ["jamba", "falcon_h1", "recurrent_gemma", "granitemoehybrid", "minimax"]
)
def test_types_that_mix_tokens_elsewhere_are_refused(kind):
    assert "convolutions, recurrences" in obstacle(kind)


def test_positions_that_depend_on_the_longest_one_are_refused():
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16,
    }
    of_phi: dict[str, Any] = {"max_position_embeddings": 64, "rope_parameters": longrope}
    of_phi["original_max_position_embeddings"] = 16
    assert "longrope" in obstacle("phi3", **of_phi)
    # Rows that are not longer than the original length use one set of factors.
    assert obstacle("phi3", length=16, **of_phi) == ""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "longrope" in obstacle("llama", rope_parameters=dynamic, max_position_embeddings=32)
    assert obstacle("llama", rope_parameters=dynamic, max_position_embeddings=64) == ""
    yarn = dynamic | {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert obstacle("llama", rope_parameters=yarn, max_position_embeddings=64) == ""


def test_heads_and_attention_are_checked():
    assert "3 ranks do not divide its attention heads (num_attention_heads 4)" in obstacle(
        "llama", 3
    )
    assert "its attention is eager" in obstacle("bloom")


def test_settings_that_do_not_work_with_it_are_refused():
    cfg = ShardingConfig(context_parallel=2)
    with pytest.raises(ShardingError, match="context_parallel 2 must divide the 3 processes"):
        mesh_shape(3, cfg)
    assert data_ranks(8, cfg) == 4
    model = FinetuneModelConfig("model")
    with pytest.raises(ConfigError, match="neftune_noise_alpha"):
        FinetuneConfig(model, cfg, train=FinetuneTrainConfig(neftune_noise_alpha=5.0))
    with pytest.raises(ConfigError, match=r"liger was not tried with sharding.context_parallel"):
        FinetuneConfig(replace(model, kernels="liger"), cfg)
    build(FinetuneConfig(model, cfg))
    flash = tiny_model("llama")
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ModelError, match="attn_implementation sdpa"):
        attend_within_documents(flash, View(0, 2, object()))  # type: ignore[arg-type]


# ---- Complete runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """Prompts and completions of unequal lengths."""
    file = tmp_path_factory.mktemp("examples") / "rows.jsonl"
    rows = [
        {"prompt": f"Count to {i}: ", "completion": " ".join(map(str, range(1 + i % 17)))}
        for i in range(1, 120)
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def settings(model: Path, data: Path, output: Path, *more: object) -> list[str]:
    return [
        *("--model.name_or_path", str(model), "--output_dir", str(output)),
        *("--data.train_files", str(data), "--data.sequence_length", "60"),
        *("--sharding.param_dtype", "float32", "--optim.learning_rate", "1e-2"),
        *("--optim.warmup_steps", "0", "--train.global_batch_size", "4"),
        *("--train.per_device_train_batch_size", "2", "--train.logging_steps", "1"),
        *("--train.eval_steps", "2", "--data.eval_split", "0.1", "--train.max_steps", "4"),
        *map(str, more),
    ]


SHARED = ("--sharding.context_parallel", 2)


def run(recipe: str, world: int, flags: list[str]) -> str:
    result = run_recipe_ranks(recipe, world, *flags, cwd=ROOT)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def assert_same_metrics(shared: Path, alone: Path) -> None:
    """Compare the metrics of two runs line by line, except for times and memory."""
    lines, expected_lines = read_metrics(shared), read_metrics(alone)
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    exact = {"step", "tokens", "epoch", "learning_rate", "skipped_steps"}
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            if name in exact:
                assert line[name] == value, name
            elif name.endswith(("loss", "grad_norm", "perplexity", "accuracy")):
                assert line[name] == pytest.approx(value, rel=5e-5), (name, line["step"])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_pretraining_logs_the_same_metrics(tmp_path, tiny_llama, text_file, world):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    run("pretrain", 1, settings(tiny_llama, text_file, alone))
    log = run("pretrain", world, settings(tiny_llama, text_file, shared, *SHARED))
    assert f"{world // 2} group(s) of 2 processes" in log
    assert_same_metrics(shared, alone)


@pytest.mark.slow
def test_the_auxiliary_loss_of_routers_is_that_of_complete_rows(tmp_path, text_file):
    model = save_tiny_model(save_byte_tokenizer(tmp_path / "model"), "qwen3_moe")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    flags = ("--train.router_aux_loss", "layer")
    run("pretrain", 1, settings(model, text_file, alone, *flags))
    run("pretrain", 2, settings(model, text_file, shared, *SHARED, *flags))
    assert_same_metrics(shared, alone)


FINETUNING = {
    "packed LoRA": ("--lora.r", 4, "--data.packing", "bfd", "--train.eval_prompts", '["Count"]'),
    "4 bits": ("--lora.r", 4, "--lora.load_in_4bit", "true", "--data.packing", "wrapped"),
    "padded": ("--data.packing", "none", "--sharding.activation_checkpointing", "full"),
    "streamed": ("--data.streaming", "true", "--train.eval_steps", "null", "--lora.r", 4),
    "smoothed and offloaded": (
        *("--train.label_smoothing_factor", 0.1, "--train.z_loss", 1e-3),
        *("--sharding.cpu_offload", "true"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_logs_the_same_metrics(tmp_path, tiny_llama, examples, name):
    model = tiny_llama
    if name == "4 bits":
        pytest.importorskip("bitsandbytes")
        # Blocks of 64 values are quantised together.
        folder = save_byte_tokenizer(tmp_path / "model")
        model = save_tiny_model(folder, hidden_size=64, intermediate_size=64)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    run("finetune", 1, settings(model, examples, alone, *FINETUNING[name]))
    run("finetune", 2, settings(model, examples, shared, *SHARED, *FINETUNING[name]))
    assert_same_metrics(shared, alone)
    if name == "packed LoRA":
        answers = [(folder / "samples.jsonl").read_text() for folder in (alone, shared)]
        assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_ranks_a_row(tmp_path, tiny_llama, text_file):
    """Two steps on two ranks that share rows, then two steps on one, and the other way round."""

    def train(name: str, parts: int, steps: int) -> list[float]:
        more = ("--optim.lr_scheduler_type", "constant", "--checkpoint.save_steps", 2)
        more = (*more, "--sharding.context_parallel", parts, "--train.max_steps", steps)
        run("pretrain", parts, settings(tiny_llama, text_file, tmp_path / name, *more))
        return [line["loss"] for line in read_metrics(tmp_path / name)]

    expected = train("uninterrupted", 1, 4)
    for first, second in ((2, 1), (1, 2)):
        train(f"from {first}", first, 2)
        losses = train(f"from {first}", second, 4)
        assert losses == pytest.approx(expected, rel=5e-5)


@pytest.mark.slow
def test_padded_rows_of_two_ranks_resume_on_three(tmp_path, examples):
    """Three ranks cut the rows elsewhere, and pad them to another width."""
    heads = {"num_attention_heads": 6, "hidden_size": 48, "head_dim": 8}
    model = save_tiny_model(save_byte_tokenizer(tmp_path / "model"), **heads)

    def train(name: str, parts: int, steps: int) -> list[float]:
        more = ("--optim.lr_scheduler_type", "constant", "--checkpoint.save_steps", 2)
        more = (*more, "--sharding.context_parallel", parts, "--train.max_steps", steps)
        flags = settings(model, examples, tmp_path / name, *more, "--data.packing", "none")
        run("finetune", parts, flags)
        return [line["loss"] for line in read_metrics(tmp_path / name)]

    expected = train("uninterrupted", 1, 4)
    train("shared", 2, 2)
    assert train("shared", 3, 4) == pytest.approx(expected, rel=5e-5)


@pytest.mark.slow
def test_a_run_refuses_what_cannot_be_divided(tmp_path, text_file):
    folder = tmp_path / "jamba"
    model = tiny_model("jamba")
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    flags = settings(folder, text_file, tmp_path / "run", *SHARED)
    result = run_recipe_ranks("pretrain", 2, *flags, cwd=ROOT)
    assert result.returncode != 0
    assert "sharding.context_parallel 2 is not possible for JambaForCausalLM" in result.stderr


# ---- Plans and rehearsals ------------------------------------------------------------------------


def plan_of(folder: Path, parts: int, **sharding: Any) -> Any:
    cfg = PretrainConfig(
        ModelConfig(str(folder), init="random"),
        ShardingConfig(context_parallel=parts, param_dtype="float32", **sharding),
        train=TrainConfig(per_device_train_batch_size=2, max_steps=3),
    )
    cfg = replace(cfg, data=replace(cfg.data, sequence_length=512))
    device = device_of("h100")
    return make_plan(cfg, 4, device, int(device.memory))


@pytest.mark.slow
def test_a_plan_has_the_activations_of_a_part(tmp_path):
    """Four ranks, of which four share each row: a quarter of the activations, and an exchange."""
    for kind, changes in (("llama", {}), ("mistral", {"sliding_window": 64})):
        config = tiny_config(kind, max_position_embeddings=512, **changes)
        folder = tmp_path / kind
        config.save_pretrained(folder)
        whole, shared = plan_of(folder, 1), plan_of(folder, 4)
        activations = [p.sim.peaks["forward"].kinds["activations"] for p in (whole, shared)]
        # With complete rows, a window is planned with a mask.
        assert 0.1 < activations[1] / activations[0] < 0.5, (kind, activations)
        assert shared.estimate.tokens_per_step * 4 == whole.estimate.tokens_per_step
        kinds = {key[0] for work in shared.sim.work.values() for key in work.traffic}
        assert "all_to_all" in kinds
        assert not any("compiled" in note for note in shared.sim.notes)


@pytest.mark.slow
def test_a_plan_of_a_type_that_cannot_be_divided_is_refused(tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="context_parallel 4 is not possible"):
        plan_of(tmp_path, 4)


@pytest.mark.plans
def test_a_rehearsal_shares_rows_and_resumes_without(tmp_path, tiny_llama, text_file):
    config = tmp_path / "config.yaml"
    content = {
        "model": {"name_or_path": str(tiny_llama)},
        "data": {"train_files": str(text_file), "sequence_length": 64},
        "sharding": {"context_parallel": 2, "dp_replicate": 1, "dp_shard": 4},
        "train": {"max_steps": 4, "per_device_train_batch_size": 2},
        "output_dir": str(tmp_path / "run"),
    }
    config.write_text(yaml.safe_dump(content))
    result = rehearse(config)
    assert result.ok, result
