"""How fast it is on one GPU: the cases of `gpu.py --part 2`.

The recipe's loop beside a bare FSDP2 loop and transformers' Trainer with the same model, samples,
precision and recomputation, each in a process of its own, one after the other on one card.
"""

import importlib.util
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

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
    peaks,
    profiled,
    rates,
    reset_peak,
    settings,
    timed,
    windows,
)
from gpu_report import read_results
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

from toolkit import adapters, checkpoint, loading, models, training
from toolkit.config import FinetuneConfig, model_settings
from toolkit.config.settings import CheckpointConfig
from toolkit.data.prepare import prepare_data
from toolkit.planning.changes import make_plan
from toolkit.planning.devices import device_of, named_as
from toolkit.sharding import init_mesh
from toolkit.training import launch
from toolkit.training.head_loss import HeadLoss

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
        usage = resource.getrusage(resource.RUSAGE_SELF)
        host = psutil.Process().memory_info().rss
        place.record("host memory", gb=host / 1e9, peak_gb=usage.ru_maxrss * 1024 / 1e9)
        place.record("profile", **profiled(place, lambda: next(steps)))


def bare(place: Place, shape: str, **changes: Any) -> None:
    """A loop as PyTorch's FSDP2 tutorial writes it, with the toolkit's loss: what is left of the
    difference is the rest of the toolkit.
    """
    cfg = bench(place, shape, **changes)
    with launch.start() as run:
        mesh = init_mesh(run.device.type, 1, cfg.sharding)
        base = models.prepare(model_settings(cfg))
        layers = list(models.decoder_layers(base).values())
        model = adapters.prepare_adapters(base, cfg.lora, "bfloat16")
        if cfg.sharding.activation_checkpointing == "full":
            base.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loading.fill(model, cfg.model, run.device, cfg.seed, empty=False, say=run.say)
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
                    loss = training.loss_sum(model, {"input_ids": ids, "labels": ids}) / supervised
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
        data = prepare_data(cfg, models.prepare(model_cfg), model_cfg, run)
        rows = []
        for _, micro_batches in islice(data.steps(), STEPS):
            for batch in micro_batches:
                columns = {n: batch[n].cpu() for n in ("input_ids", "labels", "position_ids")}
                count = len(columns["labels"])
                rows += [{n: column[i] for n, column in columns.items()} for i in range(count)]
        return rows, data.tokens_per_step


# ---- Ceilings, the loss head ---------------------------------------------------------------------


def ceilings(place: Place) -> None:
    """What the card does at best: matrix products, copies, attention."""
    tiny, device = place.tiny, place.device
    side = 64 if tiny else 8192

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=grad)

    for m, k, n in ((side, side, side), (side, side // 2, side * 7 // 4), (side, side // 4, side)):
        a, b = random(m, k), random(k, n)
        seconds = timed(place, lambda a=a, b=b: a @ b, 10)  # type: ignore[misc]
        place.record(f"matmul {m} x {k} x {n}", tflops=2 * m * k * n / seconds / 1e12)
    count = 2**16 if tiny else 2**30
    device_bytes = torch.empty(count, dtype=torch.uint8, device=device)
    other = torch.empty_like(device_bytes)
    seconds = timed(place, lambda: other.copy_(device_bytes))
    place.record("copy on the device, read and written", gb_per_second=2 * count / seconds / 1e9)
    for pinned in (True, False):
        host = torch.empty(count // 4, dtype=torch.uint8, pin_memory=pinned and place.cuda)
        part = device_bytes[: count // 4]
        kind = "pinned" if pinned else "pageable"
        for name, to, source in (("to device", part, host), ("to host", host, part)):
            copy = partial(to.copy_, source, non_blocking=True)
            place.record(f"{name}, {kind}", gb_per_second=count / 4 / timed(place, copy) / 1e9)
    for width in (128, 64):
        attention_kernels(place, width, random)


def attention_kernels(place: Place, width: int, random: Callable[..., torch.Tensor]) -> None:
    """Forward and backward of 2 x 4096 tokens: causal, with a dense mask, and by documents."""
    heads, length = (2, 64) if place.tiny else (4096 // width, 4096)
    shape = (2, heads, length, width)
    q, k, v = (random(*shape, grad=True) for _ in range(3))
    grad = random(*shape)
    documents = torch.arange(length, device=place.device) // max(length // 8, 1)
    mask = (documents[:, None] == documents) & torch.ones_like(
        documents[:, None] == documents
    ).tril()
    causal = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    masked = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask[None, None])
    kinds: list[tuple[str, Any, list[SDPBackend]]] = [("masked", masked, [])]
    if place.cuda:
        backends = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
        kinds += [(f"causal {b.name.lower()}", causal, [b]) for b in backends]
    else:
        kinds.append(("causal", causal, []))
    for name, call, only in kinds:

        def both(call: Any = call, only: list[SDPBackend] = only) -> None:
            if only:
                with sdpa_kernel(only):
                    call().backward(grad)
            else:
                call().backward(grad)

        milliseconds(place, f"attention {name}, width {width}", both)
    if not place.cuda:
        return
    from torch.nn.attention.varlen import varlen_attn

    rows = 2 * length
    flat = [random(rows, heads, width, grad=True) for _ in range(3)]
    ends = torch.arange(0, rows + 1, length // 8, device=place.device, dtype=torch.int32)
    out_grad = random(rows, heads, width)

    causally: Any = {"window_size": (-1, 0)}

    def by_documents() -> None:
        varlen_attn(*flat, ends, ends, length // 8, length // 8, **causally).backward(out_grad)

    milliseconds(place, f"attention varlen, 8 documents a row, width {width}", by_documents)


def milliseconds(place: Place, name: str, call: Callable[[], Any]) -> None:
    """Record the milliseconds of `call`; a kernel that refuses does not end the others."""
    try:
        place.record(name, ms=1e3 * timed(place, call))
    except (RuntimeError, TypeError) as error:
        place.record(name, error=str(error).splitlines()[0])


def loss_head(place: Place) -> None:
    """Forward and backward of head and loss on 8192 tokens, beside its products alone."""
    for hidden, vocabulary, trained in (
        (4096, 128256, False),
        (4096, 128256, True),
        (2048, 128256, True),
        (2048, 32000, True),
    ):
        head_of(place, hidden, vocabulary, trained)


def head_of(place: Place, hidden: int, vocabulary: int, trained: bool) -> None:
    rows, length = (2, 64) if place.tiny else (2, 4096)
    if place.tiny:
        hidden, vocabulary = hidden // 64, vocabulary // 64
    head = torch.nn.Linear(
        hidden, vocabulary, bias=False, device=place.device, dtype=torch.bfloat16
    )
    states = torch.randn(
        rows, length, hidden, device=place.device, dtype=torch.bfloat16, requires_grad=True
    )
    head.weight.requires_grad_(trained)
    labels = torch.randint(vocabulary, (rows, length), device=place.device)

    def toolkit_loss() -> None:
        loss, answer = HeadLoss(head, head.forward, vocabulary)(states, labels)
        (loss / labels.numel() + answer.sum(dtype=torch.float32)).backward()

    def plain_loss() -> None:
        logits = head(states)[:, :-1].flatten(0, 1).float()
        F.cross_entropy(logits, labels[:, 1:].flatten()).backward()

    flat = states.detach().flatten(0, 1)
    logits = torch.randn(len(flat), vocabulary, device=place.device, dtype=torch.bfloat16)

    def products() -> None:
        flat @ head.weight.detach().T
        logits @ head.weight.detach()
        if trained:
            logits.T @ flat

    calls: dict[str, Callable[[], None]] = {
        "products": products,
        "toolkit": toolkit_loss,
        "plain": plain_loss,
    }
    if place.cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()

        def liger_loss() -> None:
            inputs = states[:, :-1].flatten(0, 1)
            fused(head.weight, inputs, labels[:, 1:].flatten()).backward()

        calls["liger"] = liger_loss
    kind = "trained" if trained else "frozen"
    for name, call in calls.items():
        head.zero_grad()
        reset_peak(place)
        before = torch.cuda.memory_allocated() if place.cuda else 0
        seconds = timed(place, call)
        peak = peaks(place)["peak_allocated"] - before
        shape = f"{hidden} x {vocabulary} {kind}"
        place.record(f"{shape}: {name}", ms=1e3 * seconds, peak=peak)


# ---- Loading, saving, offload --------------------------------------------------------------------


def weights(place: Place) -> None:
    """Write the folders of random weights that the other cases load."""
    for shape in ("8b", "1b", "3b"):
        begun = time.perf_counter()
        size = sum(f.stat().st_size for f in folder(place, shape).iterdir())
        place.record(f"{shape} written", gb=size / 1e9, seconds=time.perf_counter() - begun)


def saving(place: Place) -> None:
    """1 G parameters in full: how long the loop waits for a save, at once and behind it."""
    cfg = bench(place, "1b")
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        loop.losses(2)
        for step, behind in ((1, False), (2, True), (3, True)):
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
    """What `toolkit plan` says of the runs that were measured; on the CPU."""
    results = read_results(place.out)
    machine = next((r for r in results if r.get("check") == "machine" and "memory_gb" in r), None)
    device = machine and named_as(machine["card"])
    if machine is None or device is None:
        raise NotHere("no run on a GPU whose figures are known")
    memory = machine["memory_gb"] * 1e9
    asked = ((name, getattr(fn, "keywords", {}).get("sharding", {})) for name, fn, _ in CASES)
    compiled = {name for name, sharding in asked if "torch_compile" in sharding}
    for name, fn, _ in CASES:
        speed = next((r for r in results if r["case"] == name and r.get("check") == "speed"), None)
        if getattr(fn, "func", None) is not toolkit or speed is None or name in compiled:
            continue
        changes = dict(fn.keywords)
        shape = changes.pop("shape")
        path = place.work / f"plan-{shape}"
        config = model_config(place, shape)
        config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
        config.save_pretrained(path)
        changes["model"] = changes.get("model", {}) | {"name_or_path": str(path)}
        cfg = bench(place, shape, memory=memory, **changes)
        plan = make_plan(cfg, 1, device_of(device), int(memory))
        place.record(
            f"plan of {name}",
            peak_gb=plan.sim.peak.nbytes / 1e9,
            measured_gb=speed["peak_allocated"] / 1e9,
            memory=plan.sim.peak.nbytes / speed["peak_allocated"],
            step_seconds=plan.estimate.step,
            time=plan.estimate.step / speed["step_seconds"],
        )


# Case, its function, and the seconds that it is expected to take on a GPU.
_PACKED = {"data": {"packing": "bfd"}}
_COMPILED = {"sharding": {"torch_compile": "layer"}}
# Planned at 69 GB of an H100's 80.
_SELECTIVE = {"sharding": {"torch_compile": "layer", "activation_checkpointing": "selective"}}
_LIGER = {"model": {"kernels": "liger"}}
_LORA_8B: dict[str, Any] = {"shape": "8b", "lora": LORA}
CASES = (
    ("weights", weights, 45),
    ("ceilings", ceilings, 25),
    ("lora8b_toolkit", partial(toolkit, **_LORA_8B), 35),
    ("lora8b_bare", partial(bare, **_LORA_8B), 35),
    ("lora8b_toolkit_packed", partial(toolkit, **_LORA_8B, **_PACKED), 35),
    ("lora8b_trainer", partial(trainer, **_LORA_8B), 40),
    ("lora8b_trainer_packed", partial(trainer, **_LORA_8B, **_PACKED), 45),
    ("full1b_toolkit", partial(toolkit, shape="1b"), 22),
    ("full1b_bare", partial(bare, shape="1b"), 22),
    ("full1b_trainer", partial(trainer, shape="1b"), 22),
    ("loss_head", loss_head, 25),
    ("full3b_toolkit", partial(toolkit, shape="3b"), 28),
    ("full3b_bare", partial(bare, shape="3b"), 28),
    ("full3b_trainer", partial(trainer, shape="3b"), 28),
    ("lora8b_toolkit_packed_compiled", partial(toolkit, **_LORA_8B, **_PACKED, **_COMPILED), 65),
    ("lora8b_toolkit_packed_selective", partial(toolkit, **_LORA_8B, **_PACKED, **_SELECTIVE), 65),
    ("full1b_toolkit_compiled", partial(toolkit, shape="1b", **_COMPILED), 45),
    ("saving", saving, 40),
    (
        "full1b_toolkit_offloaded",
        partial(toolkit, shape="1b", sharding={"cpu_offload": True}),
        30,
    ),
    ("lora8b_toolkit_liger", partial(toolkit, **_LORA_8B, **_LIGER), 40),
    ("full1b_toolkit_liger", partial(toolkit, shape="1b", **_LIGER), 22),
    ("lora8b_trainer_liger", partial(trainer, **_LORA_8B, liger=True), 40),
    ("full1b_trainer_liger", partial(trainer, shape="1b", liger=True), 22),
    ("plans", plans, 40),
)
