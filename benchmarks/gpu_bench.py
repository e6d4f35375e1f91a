"""How fast it is on one GPU: cases of `gpu.py`.

The recipe's loop beside a bare FSDP2 loop and transformers' Trainer with the same model, samples,
precision and recomputation, each in a process of its own, one after the other on one card.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.nn.functional as F
from gpu_common import (
    LORA,
    TIMED,
    WARMUP,
    Clock,
    NotHere,
    Place,
    ToolkitLoop,
    folder,
    measure,
    model_config,
    need_liger,
    need_torchao,
    peaks,
    profiled,
    rates,
    reset_peak,
    settings,
    windows,
)
from gpu_ledger import Case, read_results
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

from toolkit import adapters, checkpoint, loading, models, training
from toolkit.config import FinetuneConfig, model_settings
from toolkit.config.settings import CheckpointConfig
from toolkit.data.prepare import prepare_data
from toolkit.data.samples.batch import Batch
from toolkit.formats.container_memory import peak_host_memory
from toolkit.mesh import init_mesh
from toolkit.models import float8_base
from toolkit.planning.devices import device_of, find_device_name
from toolkit.planning.search import make_plan
from toolkit.training import launch

STEPS = WARMUP + TIMED
# Bytes a device needs to train 8 G parameters with adapters without recomputing activations.
_LARGE = 100e9


def bench(
    place: Place, shape: str, *, memory: float | None = None, **changes: Any
) -> FinetuneConfig:
    """Return the config of a benchmark: 4 micro-batches a step, whole layers recomputed where the
    device is small, nothing compiled; the same for the bare loop and Trainer. `memory`: of another
    device, in bytes.
    """
    if memory is None and place.cuda:
        memory = torch.cuda.get_device_properties(0).total_memory
    small = memory is not None and memory < _LARGE
    recompute = "full" if (small or place.tiny) and shape == "8b" else "none"
    sharding = {"activation_checkpointing": recompute, "torch_compile": "none"}
    if place.tiny:
        sharding["torch_compile_backend"] = "aot_eager"  # no compiler in the dry run
    changes["sharding"] = sharding | changes.get("sharding", {})
    rows = 1 if small and shape == "3b" else 2
    if "lora" not in changes:
        changes["optim"] = {"learning_rate": 2e-5, "lr_scheduler_type": "constant"}
    return settings(place, shape, rows=rows, each=4, steps=STEPS + 4, **changes)


# ---- Toolkit, bare loop, Trainer -----------------------------------------------------------------


def toolkit(place: Place, shape: str, **changes: Any) -> None:
    """The recipe's loop, its loader and metrics included; then one step under the profiler."""
    cfg = bench(place, shape, **changes)
    if cfg.model.kernels == "liger":
        need_liger(place)
    if cfg.torchao_recipe != "none":
        need_torchao(place)
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        steps = loop.steps()
        found = measure(place, (s.loss for s in steps), loop.data.tokens_per_step)
        found |= {
            "load_seconds": loop.load_seconds,
            "flops_per_token": loop.flops_per_token,
            "recomputed": cfg.sharding.activation_checkpointing,
        }
        place.record("speed", **found)  # before the profiler, which may fail
        config = model_config(place, shape)
        # Random weights: logits of variance 0.02^2 x width raise the loss by half of that.
        start = math.log(config.vocab_size) + 0.02**2 * config.hidden_size / 2
        off = abs(found["losses"][0] - start)
        place.record("first loss is that of random weights", off < 0.3, expected=start, off=off)
        host = psutil.Process().memory_info().rss
        place.record("host memory", gb=host / 1e9, peak_gb=peak_host_memory() / 1e9)
        place.record("profile", **profiled(place, lambda: next(steps)))


def toolkit_float8(place: Place, shape: str, **changes: Any) -> None:
    """`toolkit` on a frozen base in float8."""
    # All layers of the dry run are narrow.
    least = 16 if place.tiny else float8_base.MIN_WIDTH
    with mock.patch.object(float8_base, "MIN_WIDTH", least):
        toolkit(place, shape, model={"float8": "rowwise"}, **changes)


def bare(place: Place, shape: str, **changes: Any) -> None:
    """A loop as PyTorch's FSDP2 tutorial writes it, with the toolkit's loss: what is left of the
    difference is the rest of the toolkit.
    """
    cfg = bench(place, shape, **changes)
    with launch.start() as run:
        mesh = init_mesh(run.device.type, 1, cfg.sharding).fsdp
        base = models.prepare(model_settings(cfg))
        layers = list(models.decoder_layers(base).values())
        model = adapters.prepare_adapters(base, cfg.adapters, "bfloat16")
        if cfg.sharding.activation_checkpointing == "full":
            base.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loading.load_pretrained(model, cfg.model.name_or_path, run.device, seed=cfg.seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, cfg.optim.learning_rate, weight_decay=0.0, fused=True
        )
        samples = windows(cfg, STEPS)
        samples = samples.pin_memory() if place.cuda else samples
        model.train()

        def steps() -> Iterator[torch.Tensor]:
            for micro_batches in samples:
                total = torch.zeros((), device=run.device)
                supervised = micro_batches[..., 1:].numel()
                for ids in micro_batches.to(run.device, non_blocking=True):
                    batch = Batch.of(ids, input_ids=ids)
                    loss = training.causal_lm_loss(model, batch).total / supervised
                    loss.backward()
                    total += loss.detach()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield total

        place.record("speed", **measure(place, steps(), samples[0].numel()))


class Samples(IterableDataset):
    """Samples in the order in which they are given; Trainer shuffles what has a length."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


def trainer(place: Place, shape: str, *, liger: bool = False, **changes: Any) -> None:
    """transformers' Trainer, with PEFT where there are adapters, with or without Liger kernels."""
    import peft  # it starts CUDA, by bitsandbytes
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    if liger:
        need_liger(place)
    cfg = bench(place, shape, **changes)
    if cfg.data.packing == "bfd":
        rows, tokens = packed_rows(place, cfg)
    else:
        ids = windows(cfg, STEPS).flatten(0, 2)
        rows, tokens = [{"input_ids": row, "labels": row} for row in ids], ids.numel() / STEPS
    set_seed(cfg.seed)
    dtype = torch.bfloat16 if cfg.lora.r else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(cfg.model.name_or_path, dtype=dtype)
    model.to(place.device)
    recompute = cfg.sharding.activation_checkpointing == "full"
    if cfg.lora.r:
        wanted = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=cfg.lora.r,
            lora_alpha=int(cfg.lora.lora_alpha),
            target_modules="all-linear",
        )
        model = peft.get_peft_model(model, wanted)
    arguments = TrainingArguments(
        output_dir=str(place.work / place.name),
        max_steps=STEPS,
        per_device_train_batch_size=cfg.train.per_device_train_batch_size,
        gradient_accumulation_steps=cfg.train.gradient_accumulation_steps,
        learning_rate=cfg.optim.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        bf16=True,
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recompute else None,
        use_liger_kernel=liger,
        use_cpu=not place.cuda,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=place.cuda,
    )

    class Marks(TrainerCallback):
        """Marks the end of each step on the device."""

        def __init__(self) -> None:
            self.clock, self.done = Clock(place), 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.done += 1
            if self.done == WARMUP:
                reset_peak(place)
            if self.done >= WARMUP:
                self.clock.mark()

    marks = Marks()
    found = Trainer(model, arguments, train_dataset=Samples(rows), callbacks=[marks]).train()
    speed = rates(marks.clock.seconds(), tokens)
    place.record("speed", **speed, **peaks(place), mean_loss=found.training_loss)


def packed_rows(place: Place, cfg: FinetuneConfig) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return the packed samples that the recipe reads, and the tokens of a step without padding."""
    with launch.start() as run:
        model_cfg = model_settings(cfg)
        mesh = init_mesh(run.device.type, run.world_size, cfg.sharding)
        data = prepare_data(cfg, models.prepare(model_cfg), model_cfg, run, mesh)
        rows = []
        for _, micro_batches in islice(data.steps(), STEPS):
            for batch in micro_batches:
                labels = F.pad(batch.targets, (1, 0), value=-100)[:, :-1]
                columns = {n: batch.inputs[n].cpu() for n in ("input_ids", "position_ids")}
                columns["labels"], count = labels.cpu(), len(labels)
                rows += [{n: column[i] for n, column in columns.items()} for i in range(count)]
        return rows, data.tokens_per_step


# ---- Weights, saving, plans ----------------------------------------------------------------------

# Shape -> the seconds that its weights take to be written, about.
_WEIGHTS = {"small": 2, "layer": 3, "300m": 3, "1b": 5, "3b": 8, "8b": 18}


def weight_seconds(shape: str) -> float:
    return _WEIGHTS[shape]


def weights_of(shape: str) -> Case:
    """Return what writes the folder of random weights of `shape`, beside other cases."""
    return Case(f"weights_{shape}", partial(weights, shape=shape), _WEIGHTS[shape], host=True)


def weights(place: Place, shape: str) -> None:
    begun = time.perf_counter()
    size = sum(f.stat().st_size for f in folder(place, shape).iterdir())
    place.record("written", gb=size / 1e9, seconds=time.perf_counter() - begun)


def saving(place: Place) -> None:
    """1 G parameters in full: how long the loop waits for a save, at once and behind it; the first
    of each kind makes what the second one finds.
    """
    cfg = bench(place, "1b")
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        loop.losses(2)
        for step, behind in ((1, False), (2, False), (3, True), (4, True)):
            loop.state.step = step
            output = Path(tempfile.mkdtemp(prefix="toolkit-gpu-save-"))  # a disk, not memory
            begun = time.perf_counter()
            path = checkpoint.save(loop.state, output, CheckpointConfig(async_save=behind))
            waited = time.perf_counter() - begun
            checkpoint.wait()
            kind = "behind the loop" if behind else "at once"
            place.record(
                f"save {step}, {kind}",
                loop_waited=waited,
                seconds=time.perf_counter() - begun,
                gb=sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file()) / 1e9,
            )
            shutil.rmtree(output)


def plans(place: Place) -> None:
    """What `toolkit plan` says of the runs that are measured; on the CPU. The page compares."""
    results = read_results(place.results)
    card = place.stamp["card"]
    known = [r for r in results if r.get("card") == card and r.get("check") == "machine"]
    memory = known[-1].get("memory_gb", 80) * 1e9 if known else 80e9
    device = find_device_name(card) if place.cuda else "h100"
    if device is None:
        raise NotHere(f"the figures of {card} are not known")
    asked = [case for case in (*CASES, *LATER) if getattr(case.fn, "func", None) is toolkit]
    for case in asked[:2] if place.tiny else asked:
        changes = dict(case.fn.keywords)  # type: ignore[attr-defined]
        shape = changes.pop("shape")
        path = place.work / f"plan-{shape}"
        config = model_config(place, shape)
        config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
        config.save_pretrained(path)
        changes["model"] = changes.get("model", {}) | {"name_or_path": str(path)}
        cfg = bench(place, shape, memory=memory, **changes)
        begun = time.perf_counter()
        plan = make_plan(cfg, 1, device_of(device), int(memory))
        place.record(
            f"plan of {case.name}",
            peak_gb=plan.sim.peak.nbytes / 1e9,
            step_seconds=plan.estimate.step,
            planned_in=time.perf_counter() - begun,
        )


_PACKED = {"data": {"packing": "bfd"}}
_COMPILED = {"sharding": {"torch_compile": "layer"}}
# Whole: an H100's memory holds the activations of 2 x 4096 tokens.
_WHOLE = {"sharding": {"torch_compile": "layer", "activation_checkpointing": "none"}}
_FLOAT8 = {"model": {"float8": "tensorwise"}}
_ROWWISE = {"model": {"float8": "rowwise"}}
_LIGER = {"model": {"kernels": "liger"}}
_OFFLOADED = {"sharding": {"cpu_offload": True}}
_LORA_8B: dict[str, Any] = {"shape": "8b", "lora": LORA}


def _speed(name: str, seconds: float, fn: Callable[..., None], **changes: Any) -> Case:
    shape = changes["shape"]
    return Case(name, partial(fn, **changes), seconds, needs=(shape,), timed=True)


CASES = (
    _speed("lora8b_compiled_wrapped", 60, toolkit, **_LORA_8B, **_WHOLE),
    _speed("lora8b_compiled_packed", 60, toolkit, **_LORA_8B, **_WHOLE, **_PACKED),
    _speed("full3b_toolkit", 28, toolkit, shape="3b"),
    _speed("full3b_bare", 28, bare, shape="3b"),
    _speed("full3b_toolkit_compiled", 45, toolkit, shape="3b", **_COMPILED),
    _speed("full3b_float8_compiled", 50, toolkit, shape="3b", **_COMPILED, **_FLOAT8),
    _speed("full3b_float8_rowwise_compiled", 50, toolkit, shape="3b", **_COMPILED, **_ROWWISE),
    _speed("full3b_trainer", 28, trainer, shape="3b"),
    Case("saving", saving, 75, needs=("1b",), timed=True),
    Case("plans", plans, 60, host=True),
)
# Owed after all others: they were measured before, or are peers of what was.
LATER = (
    _speed("lora8b_float8_wrapped", 60, toolkit_float8, **_LORA_8B, **_WHOLE),
    _speed("lora8b_float8_packed", 60, toolkit_float8, **_LORA_8B, **_WHOLE, **_PACKED),
    _speed("full1b_toolkit_offloaded", 30, toolkit, shape="1b", **_OFFLOADED),
    _speed("lora8b_toolkit", 35, toolkit, **_LORA_8B),
    _speed("lora8b_bare", 35, bare, **_LORA_8B),
    _speed("lora8b_toolkit_packed", 35, toolkit, **_LORA_8B, **_PACKED),
    _speed("full1b_toolkit", 22, toolkit, shape="1b"),
    _speed("full1b_bare", 22, bare, shape="1b"),
    _speed("full1b_toolkit_compiled", 45, toolkit, shape="1b", **_COMPILED),
    _speed("full1b_trainer", 22, trainer, shape="1b"),
    _speed("lora8b_trainer", 40, trainer, **_LORA_8B),
    _speed("lora8b_trainer_packed", 45, trainer, **_LORA_8B, **_PACKED),
    _speed("lora8b_toolkit_liger", 40, toolkit, **_LORA_8B, **_LIGER),
    _speed("full1b_toolkit_liger", 22, toolkit, shape="1b", **_LIGER),
    _speed("lora8b_trainer_liger", 40, trainer, **_LORA_8B, liger=True),
    _speed("full1b_trainer_liger", 22, trainer, shape="1b", liger=True),
)
