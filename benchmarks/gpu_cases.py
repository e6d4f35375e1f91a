"""What must be right on one GPU: cases of `gpu.py`, on small random models.

Each raises, or records a check that is false, where it does not. What needs several GPUs is not
here: NCCL between ranks, HSDP, timeouts, the network interface of gloo.
"""

import importlib.util
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_common import (
    LORA,
    NotHere,
    Place,
    Program,
    ToolkitLoop,
    changed,
    folder,
    model_config,
    need_liger,
    need_torchao,
    peaks,
    reset_peak,
    settings,
    synchronize,
    windows,
)
from gpu_ledger import Case
from gpu_runs import committed, recipe
from transformers import AutoModelForCausalLM

from toolkit import ranks, training
from toolkit.config import FinetuneConfig
from toolkit.config.preference import PreferenceConfig, RewardModelConfig
from toolkit.data.row_formats import ANSWERS, PAIRS
from toolkit.data.samples.batch import IGNORED
from toolkit.data.samples.pieces import Piece
from toolkit.data.samples.sample_shape import SampleShape
from toolkit.errors import TrainingError
from toolkit.training import head_loss, launch, loss_kernel
from toolkit.training.head_logps import HeadLogps
from toolkit.training.head_loss import HeadLoss
from toolkit.training.preference import PreferenceLoss

FP32 = {"param_dtype": "float32"}
STEPS = 3


def small(place: Place, **changes: Any) -> FinetuneConfig:
    """Return the config of a short run of the small model: 2 micro-batches of 2 samples a step."""
    changes["data"] = {"sequence_length": 64 if place.tiny else 512} | changes.get("data", {})
    rate = {"learning_rate": 1e-2 if place.tiny else 3e-4, "lr_scheduler_type": "constant"}
    changes["optim"] = rate | changes.get("optim", {})
    # `auto` compiles on a GPU, which takes longer than all else here; see `compiling`.
    changes["sharding"] = {"torch_compile": "none"} | changes.get("sharding", {})
    return settings(place, changes.pop("shape", "small"), each=2, steps=9, **changes)


def losses(place: Place, cfg: FinetuneConfig) -> list[float]:
    with launch.start() as run:
        return ToolkitLoop(place, cfg, run).losses(STEPS)


# ---- Start ---------------------------------------------------------------------------------------


def start(place: Place) -> None:
    """Plain python: the process group, a mesh, both backends, an end without a hang."""
    with launch.start() as run:
        total = torch.ones(4, device=run.device)
        dist.all_reduce(total)
        on_host = torch.ones(4)
        dist.all_reduce(on_host)  # gloo, beside NCCL in one group
        said = ranks.gather({"rank": run.rank})
        ok = total.sum() == on_host.sum() == 4 * run.world_size and len(said) == run.world_size
        place.record("collectives", bool(ok), device=str(run.device), world=run.world_size)


def start_torchrun(place: Place) -> None:
    """The same under torchrun, as a program."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone"]
    program = [*launcher, "benchmarks/gpu.py", "--inner", "start", *inner_flags(place)]
    Program(place, program, "torchrun", fresh=True).end_well()


def inner_flags(place: Place) -> list[str]:
    flags = ["--device", place.device, "--out", str(place.out), "--work", str(place.work)]
    flags += ["--results", str(place.results), "--case", place.name]
    flags += ["--stamp", json.dumps(place.stamp)]
    return [*flags, *(["--tiny"] if place.tiny else [])]


# ---- Numbers -------------------------------------------------------------------------------------


def reference(
    cfg: FinetuneConfig, count: int, label_smoothing: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of plain transformers in fp32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(cfg.model.name_or_path, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), cfg.optim.learning_rate, weight_decay=0.0)
    found, norms = [], []
    for micro_batches in windows(cfg, count):
        supervised = micro_batches[..., 1:].numel()
        total = 0.0
        for ids in micro_batches:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            options: dict[str, Any] = {"reduction": "sum", "label_smoothing": label_smoothing}
            loss = F.cross_entropy(logits, ids[:, 1:].flatten(), **options) / supervised
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, norms


def numbers(place: Place) -> None:
    """fp32 against plain transformers on the CPU; bf16 against fp32."""
    cfg = small(place, sharding=FP32, data={"sequence_length": 64 if place.tiny else 128})
    expected, norms = reference(cfg, STEPS)
    with launch.start() as run:
        stats = list(islice(ToolkitLoop(place, cfg, run).steps(), STEPS))
        found = [float(s.loss) for s in stats]
        place.equal("fp32 losses against the CPU", found, expected, 1e-4)
        # Losses that do not move would be equal whatever the steps did.
        place.record("it learns", found[0] - min(found) > 0.05, losses=found)
        found_norms = [float(s.grad_norm) for s in stats]
        place.equal("fp32 gradient norms against the CPU", found_norms, norms, 1e-3)
        bf16 = ToolkitLoop(place, changed(cfg, "sharding", param_dtype="bfloat16"), run)
        place.equal("bf16 losses against fp32", bf16.losses(STEPS), found, 2e-2)


def smoothing_and_noise(place: Place) -> None:
    """Label smoothing against transformers; NEFTune trains, and is not without effect."""
    cfg = small(place, sharding=FP32, data={"sequence_length": 64 if place.tiny else 128})
    expected, _ = reference(cfg, STEPS, label_smoothing=0.1)
    smooth = changed(cfg, "train", label_smoothing_factor=0.1)
    noisy = changed(cfg, "train", neftune_noise_alpha=5.0)
    with launch.start() as run:
        found = ToolkitLoop(place, smooth, run).losses(STEPS)
        place.equal("label smoothing", found, expected, 1e-4)
        plain, noise = (ToolkitLoop(place, c, run).losses(STEPS) for c in (cfg, noisy))
        near = all(abs(a - b) / b < 0.1 for a, b in zip(noise, plain, strict=True))
        place.record("NEFTune", near and noise != plain, found=noise, expected=plain)


def experts(place: Place) -> None:
    """A mixture of experts in fp32 against plain transformers on the CPU; bf16 trains."""
    path = place.work / "model-moe"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32 if place.tiny else 256, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64 if place.tiny else 512, "num_attention_heads": 4}
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = model_config(place, "small", "mixtral", **sizes, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    cfg = small(place, sharding=FP32, model={"name_or_path": str(path)})
    expected, _ = reference(cfg, STEPS)
    with launch.start() as run:
        found = ToolkitLoop(place, cfg, run).losses(STEPS)
        place.equal("fp32 losses against the CPU", found, expected, 1e-3)
        bf16 = ToolkitLoop(place, changed(cfg, "sharding", param_dtype="bfloat16"), run)
        place.equal("bf16 losses against fp32", bf16.losses(STEPS), found, 2e-2)


def float8(place: Place) -> None:
    """Runs with float8 products learn as bf16 does; each recipe saves what a resume reads."""
    need_torchao(place)
    cfg = small(place)
    with launch.start() as run:
        expected = ToolkitLoop(place, cfg, run).losses(STEPS)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            other = changed(cfg, "model", float8=recipe)
            found = ToolkitLoop(place, other, run).losses(STEPS)
            place.equal(f"{recipe} against bf16", found, expected, 5e-2)
            place.record(f"{recipe} is not bf16", found != expected, losses=found)


# ---- Settings that must not change the numbers ---------------------------------------------------


def compare(place: Place, cfg: FinetuneConfig, variants: dict[str, dict[str, Any]]) -> None:
    """Record for each of `variants` (section -> fields) whether it trains as `cfg` does.

    One that fails does not end the others.
    """
    with launch.start() as run:
        expected = ToolkitLoop(place, cfg, run).losses(STEPS)
        for name, sections in variants.items():
            other = cfg
            try:
                for section, values in sections.items():
                    other = changed(other, section, **values)
                reset_peak(place)
                found = ToolkitLoop(place, other, run).losses(STEPS)
                place.equal(name, found, expected, 1e-2)
            except Exception as error:
                place.record(name, False, error=f"{type(error).__name__}: {error}")


def memory_settings(place: Place) -> None:
    kinds: dict[str, Any] = {"full": "full", "selective": "selective", "every 2nd layer": 2}
    variants = {
        f"activation_checkpointing {name}": {"sharding": {"activation_checkpointing": kind}}
        for name, kind in kinds.items()
    }
    offload = {"activation_checkpointing": "full", "activation_offload": True}
    variants["activation_offload"] = {"sharding": offload}
    offload = offload | {"activation_checkpointing": "selective"}
    variants["activation_offload, selective"] = {"sharding": offload}
    chunks = {"mlp_chunk_tokens": 24 if place.tiny else 200}
    variants["mlp_chunk_tokens"] = {"sharding": chunks}
    variants["mlp_chunk_tokens, recomputed"] = {
        "sharding": {**chunks, "activation_checkpointing": "full"}
    }
    variants["cpu_offload, pinned"] = {"sharding": {"cpu_offload": True}}
    compare(place, small(place), variants)


def unit_settings(place: Place) -> None:
    settings_of: dict[str, dict[str, Any]] = {
        "embedding_units": {"embedding_units": True},
        "reshard_after_forward false": {"reshard_after_forward": False},
        "accumulation keep_gathered": {"accumulation": "keep_gathered"},
        "accumulation reduce_each": {"accumulation": "reduce_each"},
        "head in float32": {"param_dtype_overrides": {"lm_head": "float32"}},
        "prefetch 2": {"forward_prefetch": 2, "backward_prefetch": 2},
    }
    compare(place, small(place), {n: {"sharding": s} for n, s in settings_of.items()})
    base = {
        f"frozen base {how}": {"sharding": {"frozen": how}} for how in ("sharded", "replicated")
    }
    compare(place, small(place, lora=LORA), base)


def compiling(place: Place) -> None:
    """Compiled layers: full parameters, recomputed, with adapters, on packed rows."""
    backend = {"torch_compile_backend": "aot_eager"} if place.tiny else {}
    layers = {"sharding": {"torch_compile": "layer"} | backend}
    recomputed = {"sharding": {"activation_checkpointing": "selective", **layers["sharding"]}}
    compare(place, small(place), {"full parameters": layers, "recomputed (selective)": recomputed})
    compare(place, small(place, lora=LORA), {"adapters": layers})
    compare(place, small(place, data={"packing": "bfd"}), {"packed rows": layers})


def liger(place: Place) -> None:
    """Liger's kernels against none: full parameters, recomputed, adapters on packed rows."""
    need_liger(place)
    kernels = {"model": {"kernels": "liger"}}
    recomputed = {"sharding": {"activation_checkpointing": "full"}, **kernels}
    compare(place, small(place), {"full parameters": kernels, "recomputed (full)": recomputed})
    packed = small(place, lora=LORA, data={"packing": "bfd"})
    compare(place, packed, {"adapters, packed": kernels})


def attention(place: Place) -> None:
    """Every implementation that is installed, on wrapped rows; packed rows against single ones."""
    kinds = ["eager", "sdpa"]
    if place.cuda:  # flex attention without a compiler is too slow on a CPU
        kinds.append("flex_attention")
        kinds += [
            name
            for name, module in (
                ("flash_attention_2", "flash_attn"),
                ("flash_attention_3", "flash_attn_interface"),
            )
            if importlib.util.find_spec(module)
        ]
    variants = {kind: {"model": {"attn_implementation": kind}} for kind in kinds}
    compare(place, small(place), variants)


def packed_logits(place: Place) -> None:
    """Logits of packed documents are those of each document by itself, in bf16."""
    cfg = small(place, data={"packing": "bfd"})
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        loop.model.eval()
        _, micro_batches = next(iter(loop.data.steps()))
        batch = micro_batches[0].inputs
        with torch.no_grad():
            packed = loop.model(**batch).logits.float()
            alone, first = torch.zeros_like(packed), torch.zeros_like(packed)
            count = 0
            for row, positions in enumerate(batch["position_ids"].tolist()):
                starts = [i for i, p in enumerate(positions) if p == 0]
                for begin, end in zip(starts, [*starts[1:], len(positions)], strict=True):
                    ids = batch["input_ids"][row : row + 1]
                    alone[row, begin:end] = loop.model(input_ids=ids[:, begin:end]).logits[0]
                    count += 1
                first[row] = loop.model(input_ids=ids).logits[0]  # one document: all see all
        scale = alone.abs().max()
        worst = float((packed - alone).abs().max() / scale)
        mixed = float((first - alone).abs().max() / scale)
        place.record(
            "packed against single documents",
            worst <= 2e-2 < mixed and count > len(batch["input_ids"]),
            differs=worst,
            differs_if_mixed=mixed,
            documents=count,
        )


def log_probabilities(place: Place) -> None:
    """`token_logps` and its gradient, each token by a weight, are those of all logits, in bf16."""
    with launch.start() as run:
        loop = ToolkitLoop(place, small(place, data={"packing": "bfd"}), run)
        loop.model.train()
        _, micro_batches = next(iter(loop.data.steps()))
        batch = micro_batches[0]
        valid, at = batch.targets != -100, batch.targets.clamp(min=0)[..., None]
        weights = torch.linspace(-1.0, 1.0, at.numel(), device=at.device).view(valid.shape)

        def of_logits() -> torch.Tensor:
            log_p = loop.model(**batch.inputs).logits.float().log_softmax(-1)
            return log_p.gather(-1, at).squeeze(-1).masked_fill(~valid, 0.0)

        values, gradients = [], []
        for way in (of_logits, lambda: training.token_logps(loop.model, batch)):
            loop.model.zero_grad()
            values.append(way())
            (values[-1] * weights).sum().backward()
            grads = (p.grad.full_tensor().float().flatten() for p in loop.model.parameters())
            gradients.append(torch.cat([*grads]))
        off = float((values[0] - values[1]).abs().max())
        turned = float(torch.cosine_similarity(*gradients, dim=0))
        place.record("values", off < 0.05, off=off, tokens=int(valid.sum()))
        place.record("gradients", turned > 0.999, cosine=turned)
        refused = [str(device) for device in loss_kernel._refused]
        place.record("kernel", not refused if place.cuda else None, refused=refused)
        _logps_cost(place)


def _logps_cost(place: Place) -> None:
    """Record memory and time of log-probabilities of an 8B model's head, by a kernel of their own
    and by plain operations, frozen and trained.
    """
    rows, width, vocabulary = (256, 64, 512) if place.tiny else (16384, 4096, 128256)
    hidden = torch.randn(1, rows, width, dtype=torch.bfloat16, device=place.device)
    targets = torch.randint(0, vocabulary, (1, rows), device=place.device)
    layer = torch.nn.Linear(width, vocabulary, bias=False)
    layer = layer.to(place.device, torch.bfloat16)
    kinds: dict[str, Any] = {"kernel": head_loss._DEVICES_WITH_KERNEL, "plain operations": ()}
    try:
        for trained in (False, True):
            layer.weight.requires_grad_(trained)
            for name, compiled in kinds.items():
                head_loss._DEVICES_WITH_KERNEL = compiled
                task = HeadLogps(HeadLoss(layer, layer.forward, vocabulary))

                def step(task: HeadLogps = task) -> None:
                    leaf = hidden.clone().requires_grad_()
                    logps, _ = task(leaf, targets, rows)
                    logps.square().sum().backward()
                    layer.weight.grad = None

                step()
                synchronize(place)
                reset_peak(place)
                begun = time.perf_counter()
                for _ in range(3):
                    step()
                synchronize(place)
                seconds = (time.perf_counter() - begun) / 3
                head = "trained head" if trained else "frozen head"
                place.record(f"{name}, {head}", seconds=seconds, **peaks(place))
    finally:
        head_loss._DEVICES_WITH_KERNEL = kinds["kernel"]


# ---- What a steady step costs --------------------------------------------------------------------


def host_syncs(place: Place) -> None:
    """Steady steps never wait for the device: counted by torch, with the line that waits."""
    variants: dict[str, dict[str, Any]] = {
        "wrapped": {},
        "packed": {"data": {"packing": "bfd"}},
        "adapters, packed": {"data": {"packing": "bfd"}, "lora": LORA},
        "compiled on a GPU": {"sharding": {"torch_compile": "auto"}},
    }
    with launch.start() as run:
        for name, changes in variants.items():
            loop = ToolkitLoop(place, small(place, **changes), run)
            _count_syncs(place, name, loop.steps())
        for kind in ("sigmoid", "orpo", "kto", "reward"):
            for name, changes in (("", {}), (", adapters", {"lora": LORA})):
                _count_syncs(place, kind + name, preference_steps(place, kind, changes, run))


def _count_syncs(place: Place, name: str, steps: Iterator[Any]) -> None:
    """Record how often three steady steps wait for the device, and the lines that do."""
    for _ in range(3):
        next(steps)
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if place.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(3):
            next(steps)
        if place.cuda:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "called a synchronizing" in str(warning.message):
            found[f"{warning.filename}:{warning.lineno}"] += 1
    place.record(name, not found, syncs=sum(found.values()), lines=dict(found))


def preference_steps(
    place: Place, kind: Any, changes: dict[str, Any], run: training.Run
) -> Iterator[training.StepStats]:
    """Yield the steps of a preference objective on packed pairs (of KTO answers), two micro-batches
    each, whose reference values are known.
    """
    cfg = small(place, data={"packing": "bfd"}, **changes)
    if kind == "reward":
        cfg = replace(cfg, model=RewardModelConfig(**vars(cfg.model)))
    loop = ToolkitLoop(place, cfg, run)
    objective = PreferenceLoss(PreferenceConfig(loss_type=kind), loop.sharded.mesh.loss)
    length, drawn = cfg.data.sequence_length, torch.Generator().manual_seed(3)
    rows = ANSWERS if kind == "kto" else PAIRS
    shape = SampleShape("bfd", length, borders=True, row_format=rows, prompts=kind == "orpo")
    batches = []
    for _ in range(2):
        samples = []
        for _ in range(cfg.train.micro_batch):
            pieces = [_pair(length // 4, drawn), _pair(length // 2, drawn)]
            sample = shape.sample(pieces)
            sample["reference"] = torch.full((4,), -100.0)
            if kind == "kto":
                sample["desirable"] = torch.tensor([True, False])
            samples.append(sample)
        batches.append(shape.batch(samples).to(run.device))
    loop.model.train()
    while True:
        counts = [objective.counts(batch) for batch in batches]
        update = training.Update(loop.sharded, batches, counts)
        for batch in update:
            update.mean(objective(loop.model, batch)).backward()
        yield update.step(loop.optimizer, 1.0, loop.metrics.guards.spikes)


def _pair(tokens: int, drawn: torch.Generator) -> Piece:
    """Return a pair of so many random tokens on both sides, the second half of each supervised."""
    ids = torch.randint(3, 300, (tokens,), generator=drawn).numpy()
    side, labels = tokens // 2, ids.copy()
    for begin in (0, side):
        labels[begin : begin + side // 2] = IGNORED
    return Piece(ids, labels, side)


# ---- Bases in 4 bits -----------------------------------------------------------------------------


def qlora(place: Place) -> None:
    """The base in 4 bits: the loss of a repeated batch falls; memory; save and resume."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NotHere("bitsandbytes is not installed")
    four_bits = LORA | {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    cfg = small(place, shape="1b", lora=four_bits, optim={"learning_rate": 1e-3})
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        synchronize(place)
        held = torch.cuda.memory_allocated() if place.cuda else 0
        reset_peak(place)
        _, batch = next(iter(loop.data.steps()))
        loop.data.steps = lambda after=0: ((i, batch) for i in range(1, 7))  # type: ignore[method-assign]
        found = loop.losses(5)
        place.record("loss falls on one batch", found[-1] < found[0], losses=found)
        # 1.24e9 parameters: 0.5 GB in 4 bits, and 0.5 GB of tied embedding in bf16.
        place.record("memory", held < 2.5e9 if place.cuda else None, held=held, **peaks(place))
    run_folder = place.work / "qlora"
    flags = {
        "model__name_or_path": str(folder(place, "1b")),
        "data__train_files": list(cfg.data.train_files),
        "data__sequence_length": cfg.data.sequence_length,
        "data__packing": "wrapped",
        "train__per_device_train_batch_size": 1,
        "lora__r": 8,
        "lora__load_in_4bit": True,
        "lora__bnb_4bit_use_double_quant": True,
        "checkpoint__save_steps": 2,
    }
    for steps in (2, 4):
        more = {"train__max_steps": steps}
        program = Program(place, recipe("finetune", run_folder, **flags, **more), f"to-{steps}")
        said = program.end_well()
    place.record("resumed", "after step 2" in said and len(committed(run_folder)) == 2)


def qlora_numbers(place: Place) -> None:
    """Losses and gradient norms on 4 bits are those of the dequantised weights in bf16, recomputed
    and gathered anew for the backward.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NotHere("bitsandbytes is not installed")
    from bitsandbytes import functional

    cfg = small(place, lora=LORA | {"load_in_4bit": True})
    path = place.work / "model-dequantised"
    model = AutoModelForCausalLM.from_pretrained(cfg.model.name_or_path, dtype=torch.bfloat16)
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            weight = layer.weight.data.to(place.device)
            back = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4"))
            layer.weight.data = back.cpu()
    model.save_pretrained(path)
    before = small(place, lora=LORA)
    plain = changed(before, "model", name_or_path=str(path))
    found = []
    with launch.start() as run:
        for config in (plain, cfg, before):
            again = changed(config, "sharding", frozen="sharded", activation_checkpointing="full")
            stats = list(islice(ToolkitLoop(place, again, run).steps(), STEPS))
            found.append([float(x) for s in stats for x in (s.loss, s.grad_norm)])
    place.equal("losses and gradient norms", found[1], found[0], 1e-2)
    apart = max(abs(a / b - 1) for a, b in zip(found[1], found[2], strict=True))
    place.record("control: before quantisation", apart > 1e-2, differs=apart)


# ---- Failures are readable -----------------------------------------------------------------------


def not_a_number(place: Place) -> None:
    """A step that is not finite changes nothing; a second one in a row ends the run."""
    train = {"logging_steps": 1, "max_bad_steps": 1, "check_steps": 0}  # weights are written here
    cfg = changed(small(place), "train", **train)
    with launch.start() as run:
        loop = ToolkitLoop(place, cfg, run)
        steps = loop.steps()
        next(steps)
        first, *others = (getattr(p, "to_local", lambda p=p: p)() for p in loop.model.parameters())
        before = [p.detach().clone() for p in others]
        with torch.no_grad():
            first.fill_(float("nan"))
        skipped = bool(next(steps).skipped)
        same = all(map(torch.equal, before, others))
        place.record("skipped", skipped and same, tensors=len(others))
        try:
            next(steps)
        except TrainingError as error:
            place.record("TrainingError", "in a row" in str(error), said=str(error))
        else:
            place.record("TrainingError", False, said="it trained on")


INNER = {"start": start}
_SMALL = ("small",)
CASES = (
    Case("start", start, 8),
    Case("start_torchrun", start_torchrun, 40),
    Case("numbers", numbers, 15, _SMALL),
    Case("host_syncs", host_syncs, 80, _SMALL),
    Case("packed_logits", packed_logits, 8, _SMALL),
    Case("log_probabilities", log_probabilities, 30, _SMALL),
    Case("memory_settings", memory_settings, 20, _SMALL),
    Case("unit_settings", unit_settings, 25, _SMALL),
    Case("attention", attention, 30, _SMALL),
    Case("liger", liger, 20, _SMALL),
    Case("experts", experts, 12, _SMALL),
    Case("float8", float8, 25, _SMALL),
    Case("smoothing_and_noise", smoothing_and_noise, 12, _SMALL),
    Case("not_a_number", not_a_number, 8, _SMALL),
    Case("qlora", qlora, 40, ("1b",)),
    Case("qlora_numbers", qlora_numbers, 15, _SMALL),
    Case("compiling", compiling, 70, _SMALL),
)
