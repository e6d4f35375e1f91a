"""What the cases of `gpu.py` share: sizes, folders of random weights, data, the recipe's loop, a
clock on the device, programs that are started. Nothing comes from a network.
"""

import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gpu_ledger import append
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit import adapters, loading, models, training
from toolkit.checkpoint import TrainState
from toolkit.config import FinetuneConfig, model_settings
from toolkit.config.data import FinetuneDataConfig
from toolkit.config.lora import LoraConfig
from toolkit.config.settings import (
    CheckpointConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    MetricsConfig,
    OptimConfig,
    ShardingConfig,
)
from toolkit.data.order.mixture import SampleOrder
from toolkit.data.prepare import prepare_data
from toolkit.mesh import init_mesh
from toolkit.sharding import apply_fsdp
from toolkit.training.flops import flops_per_token

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
WARMUP, TIMED = 2, 5
SEED = 7
# hidden, layers, intermediate, heads, key heads, vocabulary, tied; Llama 3's where it has one.
_SHAPES = {
    "small": (1024, 4, 2816, 16, 4, 32000, False),
    "1b": (2048, 16, 8192, 32, 8, 128256, True),
    "3b": (3072, 28, 8192, 24, 8, 128256, True),
    "8b": (4096, 32, 14336, 32, 8, 128256, False),
    "layer": (4096, 1, 14336, 32, 8, 32000, False),  # one of 8b
    "300m": (2048, 4, 8192, 32, 8, 32000, False),
    "moe8b": (2048, 12, 6144, 32, 4, 151936, False),  # a quarter of the layers of Qwen3-30B-A3B
}
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
}
_TINY = (64, 2, 128, 4, 2, 320)
_TINY_EXPERTS = _EXPERTS | {"num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16}


# What the kernels of attention have in their names: cuDNN's, flash attention's, torch's others.
_ATTENTION = re.compile("sdpa|flash|fmha|attention|cudnn", re.IGNORECASE)


class NotHere(Exception):
    """A case that this machine cannot run; says what is missing."""


def need_liger(place: "Place") -> None:
    if not place.cuda:
        raise NotHere("no GPU, which Liger's kernels need")
    if importlib.util.find_spec("liger_kernel") is None:
        raise NotHere("liger-kernel is not installed")


def need_torchao(place: "Place") -> None:
    """Raise NotHere unless float8 products can run."""
    if importlib.util.find_spec("torchao") is None:
        raise NotHere("torchao is not installed")
    if place.cuda and torch.cuda.get_device_capability() < (8, 9):  # emulated on a CPU
        raise NotHere("no GPU with float8 products (compute capability 8.9)")


@dataclass(frozen=True)
class Place:
    """Where a case runs, and where its results go."""

    name: str  # of the case
    device: str
    tiny: bool
    out: Path
    work: Path
    results: Path  # the file that records are appended to
    stamp: dict[str, Any]  # what each record bears: commit, day, card, versions

    @property
    def length(self) -> int:
        """Tokens of a sample in benchmarks."""
        return 64 if self.tiny else 4096

    @property
    def logs(self) -> Path:
        """Where what cases and programs print goes, and their metrics."""
        return self.out / "logs"

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def record(self, check: str, ok: bool | None = None, **values: Any) -> None:
        """Append one line to the results at once; `ok` is None for what is only measured."""
        line = {"case": self.name, "check": check, "ok": ok} | values | self.stamp
        append(self.results, line)

    def equal(self, check: str, found: list[float], expected: list[float], within: float) -> None:
        """Record whether `found` is `expected`, to a relative difference."""
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        ok = bool(worst <= within)  # a NaN is not
        self.record(check, ok, differs=worst, within=within, found=found, expected=expected)


# ---- Models and data -----------------------------------------------------------------------------


def model_config(place: Place, shape: str, kind: str = "llama", **changes: Any) -> Any:
    hidden, layers, intermediate, heads, kv_heads, vocabulary, tied = _SHAPES[shape]
    if place.tiny:
        hidden, layers, intermediate, heads, kv_heads, vocabulary = _TINY
    settings = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return AutoConfig.for_model(kind, **(settings | changes))


def mixture_folder(place: Place) -> Path:
    """Return a checkpoint of `moe8b` without weights: they are drawn by `model.init: random`."""
    path = place.work / "model-moe8b"
    experts = _TINY_EXPERTS if place.tiny else _EXPERTS
    config = model_config(place, "moe8b", "qwen3_moe", **experts)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(path)
    return path


def folder(place: Place, shape: str) -> Path:
    """Return a checkpoint of `shape` with random bf16 weights, drawn on the device; made once."""
    path = place.work / f"model-{shape}"
    if path.is_dir():
        return path
    config = model_config(place, shape)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = {n: p.shape for n, p in model.named_parameters()}  # a tied head is not among them
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.mkdir(parents=True)
    generator = torch.Generator(place.device).manual_seed(SEED)
    files, writers = {}, []
    for i, group in enumerate(_groups(names, 2**31)):
        tensors = {}
        for name in group:
            value = torch.ones(names[name], dtype=torch.bfloat16)
            if len(names[name]) > 1:
                value = torch.empty(names[name], dtype=torch.bfloat16, device=place.device)
                value = value.normal_(0.0, 0.02, generator=generator).cpu()
            tensors[name] = value
        files |= dict.fromkeys(group, file := f"model-{i:05}.safetensors")
        metadata = {"format": "pt"}
        writers.append(threading.Thread(target=save_file, args=(tensors, part / file, metadata)))
        writers[-1].start()
    for writer in writers:
        writer.join()
    config.save_pretrained(part)
    index = {"metadata": {}, "weight_map": files}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    part.rename(path)
    return path


def _groups(names: dict[str, torch.Size], most: int) -> Iterator[list[str]]:
    """Split names into groups of at most so many bytes in bf16."""
    group, size = list[str](), 0
    for name, shape in names.items():
        if group and size + 2 * shape.numel() > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += 2 * shape.numel()
    yield group


def tokens(place: Place, shape: str, count: int) -> Path:
    """Return a parquet file of documents of token ids, at least `count` tokens; made once.

    Lengths are log-normal (mean 500, at most a sample). Small ids are more frequent, so that there
    is something to learn and losses that differ would be seen.
    """
    path = place.work / f"tokens-{shape}-{count}.parquet"
    if path.is_file():
        return path
    rng = numpy.random.default_rng(SEED)
    vocabulary = model_config(place, shape).vocab_size
    mean = 500 * place.length / 4096
    lengths = numpy.exp(rng.normal(math.log(mean) - 0.5, 1.0, 2 * int(count / mean) + 64))
    lengths = lengths.clip(8, place.length).astype(numpy.int64)
    lengths = lengths[: numpy.searchsorted(lengths.cumsum(), count) + 1]
    ids = numpy.exp(rng.random(lengths.sum()) * math.log(vocabulary - 1)).astype(numpy.int32)
    offsets = numpy.concatenate([[0], lengths.cumsum()]).astype(numpy.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    part = path.with_suffix(f".{os.getpid()}")  # two cases may make the same
    pq.write_table(table, part)
    part.replace(path)
    return path


def windows(cfg: FinetuneConfig, steps: int) -> torch.Tensor:
    """Return [steps, micro-batches, rows, T]: the samples that the recipe reads of wrapped data, by
    the order alone.
    """
    (file,) = cfg.data.train_files
    ids = pq.read_table(file)["input_ids"].combine_chunks().flatten().to_numpy()
    length, train = cfg.data.sequence_length, cfg.train
    rows = torch.from_numpy(ids[: len(ids) // length * length].astype(numpy.int64))
    rows = rows.view(-1, length)
    each, size = train.gradient_accumulation_steps, train.per_device_train_batch_size
    order = SampleOrder(len(rows), cfg.seed).indices(0, steps * each * size)
    return rows[torch.as_tensor(numpy.asarray(order))].view(steps, each, size, length)


# ---- The recipe's loop ---------------------------------------------------------------------------


def settings(
    place: Place, shape: str, *, rows: int = 2, each: int = 4, steps: int = 12, **changes: Any
) -> FinetuneConfig:
    """Return the config of a run of `steps` steps; `changes`: section -> its fields."""
    length = changes.get("data", {}).get("sequence_length", place.length)
    given = "name_or_path" in changes.get("model", {})
    base: dict[str, tuple[Any, dict[str, Any]]] = {
        "model": (
            FinetuneModelConfig,
            {} if given else {"name_or_path": str(folder(place, shape))},
        ),
        "sharding": (ShardingConfig, {"param_dtype": "bfloat16"}),
        "data": (
            FinetuneDataConfig,
            {
                "train_files": [str(tokens(place, shape, (steps + 2) * rows * each * length))],
                "sequence_length": length,
                "packing": "wrapped",
                "append_eos": False,
                "eval_split": 0.0,
            },
        ),
        "optim": (OptimConfig, {"learning_rate": 1e-4, "lr_scheduler_type": "constant"}),
        "train": (
            FinetuneTrainConfig,
            {
                "max_steps": steps,
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": each,
                "logging_steps": 1000,
            },
        ),
        "checkpoint": (CheckpointConfig, {}),
        "lora": (LoraConfig, {}),
        "metrics": (MetricsConfig, {}),
    }
    made = {name: cls(**(own | changes.get(name, {}))) for name, (cls, own) in base.items()}
    return FinetuneConfig(**made, output_dir=str(place.out), seed=SEED)


LORA = {"r": 16, "lora_alpha": 32.0}


class ToolkitLoop:
    """The recipe's loop by its parts and in its order, without checkpoints and evaluations."""

    def __init__(self, place: Place, cfg: FinetuneConfig, run: training.Run) -> None:
        self.cfg = cfg
        free(place)
        mesh = init_mesh(run.device.type, run.world_size, cfg.sharding)
        models.check_quantisation(cfg.adapters, cfg.sharding, cfg.model, run.device)
        model_cfg = model_settings(cfg)
        base = models.prepare(model_cfg, run.device, adapted=bool(cfg.adapters))
        self.data = prepare_data(cfg, base, model_cfg, run, mesh)
        self.model = adapters.prepare_adapters(base, cfg.adapters, cfg.sharding.param_dtype)
        fixed = self.data.fixed_length
        self.sharded = apply_fsdp(self.model, mesh, cfg.sharding, fixed_length=fixed)
        begun = time.perf_counter()
        loading.load_or_init(self.sharded, cfg.model, run.device, cfg.seed)
        synchronize(place)
        self.load_seconds = time.perf_counter() - begun
        training.seed_everything(cfg.seed, run.rank)
        self.optimizer = training.build_optimizer(self.model, cfg.optim)
        self.scheduler = training.build_scheduler(self.optimizer, cfg.optim, cfg.train.max_steps)
        self.state = TrainState(self.model, self.optimizer, self.scheduler, self.data.position)
        logs = place.logs / f"{place.name}-run"
        logs.mkdir(parents=True, exist_ok=True)
        self.metrics = training.start_metrics(cfg, run, logs, self.sharded, self.data, self.state)
        training.add_embedding_noise(self.model, cfg.train.neftune_noise_alpha)
        self.flops_per_token = flops_per_token(self.model, cfg.data.sequence_length)

    def steps(self, after: int = 0) -> Iterator[training.StepStats]:
        self.model.train()
        smoothing = self.cfg.train.label_smoothing_factor
        for step, micro_batches in self.data.steps(after=after):
            stats = training.train_step(
                self.sharded,
                self.optimizer,
                micro_batches,
                max_grad_norm=self.cfg.optim.max_grad_norm,
                loss=functools.partial(training.causal_lm_loss, label_smoothing=smoothing),
                spikes=self.metrics.guards.spikes,
            )
            learning_rate = float(self.scheduler.get_last_lr()[0])
            self.scheduler.step()
            self.data.position.advance()
            training.collect_garbage(step)
            training.stop_requested()
            self.metrics.step(step, stats, learning_rate)
            yield stats

    def losses(self, count: int) -> list[float]:
        return [float(stats.loss) for stats in islice(self.steps(), count)]


def changed(cfg: FinetuneConfig, section: str, **values: Any) -> FinetuneConfig:
    return replace(cfg, **{section: replace(getattr(cfg, section), **values)})


# ---- Time and memory -----------------------------------------------------------------------------


def synchronize(place: Place) -> None:
    if place.cuda:
        torch.cuda.synchronize()


class Clock:
    """Marks on the device's time line (CUDA events); on a CPU the wall clock."""

    def __init__(self, place: Place) -> None:
        self._place, self._marks = place, list[Any]()

    def mark(self) -> None:
        if self._place.cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time between the marks. Waits for the device."""
        synchronize(self._place)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._place.cuda:
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def timed(place: Place, fn: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median seconds of `fn`, after two calls that warm up."""
    for _ in range(2):
        fn()
    clock = Clock(place)
    for _ in range(repeats):
        clock.mark()
        fn()
    clock.mark()
    return statistics.median(clock.seconds())


def free(place: Place) -> None:
    """Give back the memory of an earlier model of this process; a recipe trains one."""
    gc.unfreeze()
    gc.enable()
    if place.cuda:
        gc.collect()  # half a second
        torch.cuda.empty_cache()


def reset_peak(place: Place) -> None:
    synchronize(place)
    if place.cuda:
        torch.cuda.reset_peak_memory_stats()


def peaks(place: Place) -> dict[str, int]:
    if not place.cuda:
        return {"peak_allocated": 0, "peak_reserved": 0}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_allocated": allocated, "peak_reserved": reserved}


def measure(place: Place, losses: Iterator[torch.Tensor], tokens: float) -> dict[str, Any]:
    """Run the warm-up and the timed steps of a loop that yields each step's mean loss on the
    device; return rate, spread, peak memory and losses.
    """
    clock, seen = Clock(place), list[torch.Tensor]()
    for i, loss in enumerate(islice(losses, WARMUP + TIMED), start=1):
        if i == WARMUP:
            reset_peak(place)
        if i >= WARMUP:
            clock.mark()
        seen.append(loss)
    return rates(clock.seconds(), tokens) | peaks(place) | {"losses": [float(x) for x in seen]}


def rates(seconds: list[float], tokens: float) -> dict[str, Any]:
    middle = statistics.median(seconds)
    return {
        "step_seconds": middle,
        "spread": (max(seconds) - min(seconds)) / middle,
        "tokens_per_second": tokens / middle,
    }


def profiled(place: Place, step: Callable[[], Any]) -> dict[str, Any]:
    """Return what the device did in one call of `step`: its busy share, the longest kernels, the
    longest gap, milliseconds of copies by kind.
    """
    synchronize(place)
    kind = ProfilerActivity.CUDA if place.cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as recorded:
        step()
        synchronize(place)
    found = [
        (e.time_range.start, e.time_range.end, e.name)
        for e in recorded.events() or []
        if not place.cuda
        or (e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation)
    ]
    if not found:
        return {"busy": None}
    found.sort()
    busy, gap, end = 0.0, 0.0, found[0][0]
    total: dict[str, float] = {}
    for begin, last, name in found:
        gap = max(gap, begin - end)
        busy += max(0.0, last - max(begin, end))
        end = max(end, last)
        total[name] = total.get(name, 0.0) + (last - begin) / 1e3
    longest = sorted(total.items(), key=lambda item: -item[1])
    # Triton's kernels are named after all that is fused into them.
    attend = [
        (name, ms)
        for name, ms in longest
        if _ATTENTION.search(name) and not name.startswith("triton")
    ]
    return {
        "attention_ms": sum(ms for _, ms in attend),
        "attention": [name[:80] for name, _ in attend[:3]],
        "busy": busy / (end - found[0][0]),
        "longest_gap_ms": gap / 1e3,
        "kernels_ms": [[name[:80], round(ms, 3)] for name, ms in longest[:15]],
        "copies_ms": {n: round(ms, 3) for n, ms in longest if n.startswith("Memcpy")},
    }


# ---- Programs ------------------------------------------------------------------------------------


def apart(fn: Callable[..., T], *args: Any) -> T:
    """Return what `fn` gives in a fork, so that this process does not use CUDA."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(fn, *args).result()


class Program:
    """A program that a case starts: `python ARGUMENTS` from the repository's root.

    A fork that has imported all, unless `fresh`, or where the case has used CUDA itself.
    """

    def __init__(self, place: Place, arguments: list[str], log: str, fresh: bool = False) -> None:
        self.log = place.logs / f"{place.name}-{log}.log"
        self._forked = not fresh and not torch.cuda.is_initialized()
        if self._forked:
            context = multiprocessing.get_context("fork")
            self._process: Any = context.Process(target=_run, args=(arguments, self.log))
            self._process.start()
        else:
            command = [sys.executable, *arguments]
            with open(self.log, "wb") as f:
                self._process = subprocess.Popen(command, cwd=ROOT, stdout=f, stderr=f)

    def ended(self) -> bool:
        return (self._process.exitcode if self._forked else self._process.poll()) is not None

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.code()

    def code(self) -> int:
        """Wait for the end; return the exit code. A case that hangs here ends by its deadline."""
        if not self._forked:
            return self._process.wait()
        self._process.join()
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def end_well(self) -> str:
        """Wait for the end; return the output. Raises where the exit code is not 0."""
        if code := self.code():
            raise RuntimeError(f"{self.log.name}: exit code {code}: {self.output()[-1500:]}")
        return self.output()


def _run(arguments: list[str], log: Path) -> None:
    redirect(log)
    # Makes the fork's thread pool, before a second thread may need it.
    torch.set_num_threads(torch.get_num_threads())
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def redirect(log: Path) -> None:
    """Send what this process prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(log, "ab") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
