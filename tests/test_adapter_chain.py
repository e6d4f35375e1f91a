"""Stages that continue an adapter: SFT, DPO, SFT on several ranks are what PEFT alone computes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import save_byte_tokenizer, save_tiny_model
from distributed import run_ranks, run_recipe_ranks
from safetensors.torch import load_file, save_file
from sharded import apply_fsdp, init_mesh
from torch.distributed.tensor import DTensor

from toolkit.adapters import values as adapter_values
from toolkit.adapters.lora import add_adapters
from toolkit.checkpoint.adapter_source import apply_adapter_settings
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import FinetuneConfig, FinetuneModelConfig, ShardingConfig
from toolkit.errors import ConfigError
from toolkit.export import check_adapter, consolidate, load_adapter
from toolkit.formats import export_manifest
from toolkit.formats.metrics_file import read_metrics
from toolkit.hub import card as model_card
from toolkit.loading.pretrained import load_pretrained
from toolkit.models.causal_lm import build_on_meta
from toolkit.models.peft_model import trained_tensors
from toolkit.verify import verify_export

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS = "adapter_model.safetensors"
# Name -> kind of model, its settings, adapter as PEFT makes it, dtype of its file.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.dtype]] = {
    "patterns": (
        "llama",
        {},
        {
            "r": 3,
            "lora_alpha": 7,
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 5},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 11},
            "use_rslora": True,
        },
        torch.float32,
    ),
    "layers": (
        "llama",
        {},
        {"r": 2, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        torch.bfloat16,
    ),
    "dora": (
        "llama",
        {},
        {"r": 4, "target_modules": "all-linear", "use_dora": True},
        torch.float32,
    ),
    "tied": (
        "llama",
        {"tie_word_embeddings": True},
        {
            "r": 4,
            "target_modules": ["v_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
            "ensure_weight_tying": True,
        },
        torch.float32,
    ),
    "embedding": (  # PEFT writes the frozen matrix, too
        "llama",
        {},
        {"r": 4, "target_modules": ["embed_tokens", "k_proj"], "modules_to_save": ["lm_head"]},
        torch.float32,
    ),
    "experts": (
        "qwen3_moe",
        {},
        {"r": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
        torch.float32,
    ),
}


def save_peft(base: Path, folder: Path, settings: dict[str, Any], dtype: torch.dtype) -> Path:
    """Write an adapter as PEFT does, with values everywhere; return its folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    chooser = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=chooser) * 0.05)
    adapted.save_pretrained(folder)
    if dtype != torch.float32:
        tensors = {key: value.to(dtype) for key, value in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder NAME/{base, adapter} of every case."""
    root = tmp_path_factory.mktemp("adapters")
    for name, (kind, changes, settings, dtype) in CASES.items():
        base = save_tiny_model(root / name / "base", kind, **changes)
        save_byte_tokenizer(base)
        save_peft(base, root / name / "adapter", settings, dtype)
    return root


def config_of(folder: Path, adapter: Path | None = None, **lora: Any) -> Any:
    own = LoraConfig(from_=str(adapter or folder / "adapter"), **lora)
    model = FinetuneModelConfig(str(folder / "base"), dtype="auto")
    return FinetuneConfig(model=model, lora=own, output_dir=str(folder / "run"))


def continued(cfg: Any, world: int) -> Any:
    """Return the sharded model that continues the adapter of `cfg`."""
    cfg = apply_adapter_settings(cfg)
    model = add_adapters(build_on_meta(cfg.model), cfg.lora)
    assert "continues adapter" in check_adapter(model, cfg)
    sharding = ShardingConfig(param_dtype="float32")
    apply_fsdp(model, init_mesh("cpu", world, sharding), sharding)
    load_pretrained(model, cfg.model.name_or_path, torch.device("cpu"))
    load_adapter(model, cfg)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def load_all(rank: int, world: int, root: str) -> dict[str, Any]:
    """Return the values and the logits of every case, and what a faulty load is refused with."""
    ids, results = torch.arange(24).view(2, 12), {}
    for name in CASES:
        model = continued(config_of(Path(root, name)), world).eval()
        values = {n: full(t) for n, t in trained_tensors(model).items()}
        logits = model(input_ids=ids, use_cache=False).logits.detach()
        results[name] = {"values": values, "logits": logits}
    real = adapter_values.slice_like

    def first_rows(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return whole[: len(real(whole, like))]  # every rank takes rank 0's rows

    adapter_values.slice_like = first_rows
    try:
        continued(config_of(Path(root, "patterns")), world)
    except ConfigError as error:
        results["refused"] = str(error)
    finally:
        adapter_values.slice_like = real
    return results


@pytest.fixture(scope="module")
def loaded(adapters: Path) -> list[dict[str, Any]]:
    return run_ranks(load_all, 3, str(adapters))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient_checkpointing`")
def test_three_ranks_hold_what_peft_loads(loaded, adapters: Path, name: str) -> None:
    folder, found = adapters / name, loaded[0][name]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    model = peft.PeftModel.from_pretrained(base, folder / "adapter", torch_device="cpu").eval()
    state = model.state_dict()
    assert found["values"]
    for key, value in found["values"].items():
        assert torch.equal(state[key].float(), value), key
    with torch.no_grad():
        expected = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
        with model.disable_adapter():
            plain = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
    torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-5)
    assert float((expected - plain).abs().max()) > 1e-3  # the control


@pytest.mark.slow
def test_values_that_do_not_arrive_are_refused(loaded) -> None:
    for said in loaded:
        assert "do not hold in memory what its file holds, such as base_model" in said["refused"]


# ---- The chain, by the recipes and by PEFT alone

STEPS, RATE, BETA = 4, 0.01, 0.1


def stage_rows(folder: Path) -> None:
    """Write rows for SFT (tokens) and pairs (text); a step reads all of them, in any order."""
    chooser = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(6):
        ids = torch.randint(1, 250, (12,), generator=chooser).tolist()
        lines.append({"input_ids": ids, "labels": [-100] * 4 + ids[4:]})
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    pairs = [
        {"prompt": f"After {i}? ", "chosen": f"it is {i + 1}", "rejected": f"no {7 * i % 5} " * 2}
        for i in range(6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))


def plain_sft(model: Any, folder: Path) -> Callable[[], torch.Tensor]:
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return lambda: model(**batch, use_cache=False).loss  # rows have as many supervised tokens


def plain_dpo(model: Any, folder: Path) -> Callable[[], torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]

    def logps() -> torch.Tensor:
        sums = []
        for pair in pairs:
            for side in ("chosen", "rejected"):
                prompt, answer = (tokenizer(pair[name]).input_ids for name in ("prompt", side))
                ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                each = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
                sums.append(each.sum())
        return torch.stack(sums).view(-1, 2)

    with torch.no_grad():
        reference = logps()  # of the model at the start of the stage: base and adapter

    def loss() -> torch.Tensor:
        chosen, rejected = (logps() - reference).unbind(1)
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()

    return loss


def plain_chain(folder: Path, stages: list[str]) -> tuple[list[list[float]], dict[str, Any]]:
    """Return the losses of each stage and the last adapter, by PEFT in one process."""
    adapter, losses = folder / "adapter", []
    for i, stage in enumerate(stages):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
        model = peft.PeftModel.from_pretrained(
            base, adapter, is_trainable=True, torch_device="cpu"
        ).eval()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
        loss_of = {"finetune": plain_sft, "prefer": plain_dpo}[stage](model, folder)
        curve = []
        for _ in range(STEPS):
            loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        losses.append(curve)
        adapter = folder / f"plain-{i}"
        model.save_pretrained(adapter)
    return losses, load_file(adapter / WEIGHTS)


def run_stage(
    folder: Path, recipe: str, world: int, output: str, source: str, *flags: object, **how: Any
) -> Any:
    settings = {
        "model.name_or_path": "base",
        "output_dir": output,
        "lora.from": source,
        "data.train_files": {"finetune": "sft.jsonl", "prefer": "pairs.jsonl"}[recipe],
        "data.sequence_length": 64,
        "data.packing": "none",
        "data.eval_split": 0,
        "sharding.param_dtype": "float32",
        "optim.learning_rate": RATE,
        "optim.weight_decay": 0.0,
        "optim.adam_beta2": 0.99,
        "optim.warmup_steps": 0,
        "optim.lr_scheduler_type": "constant",
        "train.max_steps": STEPS,
        "train.logging_steps": 1,
        "train.per_device_train_batch_size": 1,
        "train.global_batch_size": 6,
        "checkpoint.save_steps": 1,
    }
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return run_recipe_ranks(recipe, world, *given, *map(str, flags), cwd=folder, **how)


@pytest.mark.slow
def test_sft_dpo_sft_on_two_and_three_ranks_is_peft_alone(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "llama", vocab_size=260, max_position_embeddings=512)
    save_byte_tokenizer(base)
    stage_rows(tmp_path)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    save_peft(base, tmp_path / "adapter", settings, torch.float32)
    expected, last = plain_chain(tmp_path, ["finetune", "prefer", "finetune"])

    # A PEFT folder; killed somewhere, and resumed on other ranks without the folder.
    run_stage(tmp_path, "finetune", 2, "first", "adapter", kill_after=12.0)
    if any((tmp_path / "first").glob("checkpoints/*/COMMIT")):
        shutil.move(tmp_path / "adapter", tmp_path / "elsewhere")
    done = run_stage(tmp_path, "finetune", 3, "first", "adapter")
    assert done.returncode == 0, done.stderr
    # A run; stopped after two steps.
    stopped = run_stage(tmp_path, "prefer", 3, "second", "first", "--train.max_steps", 2)
    assert stopped.returncode == 0, stopped.stderr
    assert "adapter    continues first (step 4), which continued adapter: rank 3" in stopped.stdout
    other = run_stage(tmp_path, "prefer", 2, "second", "adapter")
    assert other.returncode != 0
    assert "holds another run: lora.from was 'first', is 'adapter'. Give" in other.stderr
    shutil.move(tmp_path / "first", tmp_path / "gone")  # a resume needs it no more
    done = run_stage(tmp_path, "prefer", 2, "second", "first")
    assert done.returncode == 0, done.stderr
    # An export of that.
    consolidate(tmp_path / "second", tmp_path / "second-hf")
    done = run_stage(
        tmp_path, "finetune", 2, "third", "second-hf", "--checkpoint.export_at_end", True
    )
    assert done.returncode == 0, done.stderr
    assert "which continued first (step 4), which continued adapter" in done.stdout

    for output, curve in zip(("gone", "second", "third"), expected, strict=True):
        lines = {line["step"]: line["loss"] for line in read_metrics(tmp_path / output)}
        assert [lines[step] for step in range(1, STEPS + 1)] == pytest.approx(curve, abs=1e-5)
    first_of_dpo = read_metrics(tmp_path / "second")[0]["loss"]
    assert first_of_dpo == pytest.approx(0.693147, abs=1e-5)  # the model is its own reference

    export = tmp_path / "third/exports/step-00000004"
    ours = load_file(export / WEIGHTS)
    assert ours.keys() == last.keys()
    for key, value in ours.items():
        # AdamW divides by the root of the second moment, so it amplifies the rounding of small
        # gradients. PEFT's own chain in float32 is up to 2.6e-5 from its chain in float64.
        torch.testing.assert_close(value, last[key], rtol=1e-4, atol=5e-5)
    report = verify_export(tmp_path / "third", export)
    assert report.ok, report.lines()
    consolidate(tmp_path / "third", tmp_path / "merged", merge=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    whole = peft.PeftModel.from_pretrained(model, export, torch_device="cpu").merge_and_unload()
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(merged[n], t) for n, t in whole.state_dict().items() if n in merged)

    manifest = export_manifest.read(export)
    names, entry = [], manifest["origin"]["adapter"]["continued"]
    while entry:
        names.append((entry["name"], entry.get("step")))
        entry = entry.get("continued")
    assert names == [("second-hf", 4), ("first", 4), ("adapter", None)]
    card = model_card.render_card(manifest, "org/name", "0" * 64)
    assert "It continues the adapter `second-hf`, step 4 (sha256 `" in card
    assert "That one continued `first`, step 4" in card
    assert str(tmp_path) not in card
