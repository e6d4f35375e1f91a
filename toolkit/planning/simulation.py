"""A step of a run without its bytes: the real `train_step` as one rank, on fake tensors.

Model, FSDP2, loss and optimizer are the run's own; the process group does not exist.

[Note: fake step] FSDP2 issues, waits for and frees everything in the same order on a CPU mesh as on
GPUs, and fake tensors carry shapes, dtypes and storages. So what is gathered, kept, recomputed and
reduced at a time is not modelled here, it happens. What is left out: memory inside of kernels,
fragments of the allocator.

[Note: compiled layers] Where the run compiles its layers, so does the plan: Dynamo, AOTAutograd and
the partitioner are inductor's; what they make runs operation by operation. So a layer keeps for its
backward what the run's keeps, and what inductor would fuse away counts for a moment.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from toolkit.checkpoint.disk import checkpoint_bytes, export_bytes
from toolkit.config.settings import RunConfig, ShardingConfig
from toolkit.data.samples.batch import Batch
from toolkit.errors import ToolkitError, one_line
from toolkit.formats import local_tensor, transformers_private
from toolkit.loading.materialisation import place_parameter
from toolkit.loading.materialisation import set_tensor as put
from toolkit.mesh import DP_REPLICATE, DP_SHARD
from toolkit.models.classes import model_class_name, original_class
from toolkit.models.layers import decoder_layers, tied_families
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of
from toolkit.models.reward import reward_head
from toolkit.models.tiny_copy import build_meta_model, layer_kinds, shrunk_configs
from toolkit.objectives import Objective, build
from toolkit.planning.fake_ranks import TRACED, planned_packing, sharded
from toolkit.planning.meter import BUFFERS, GRADIENTS, PARAMETERS, STATE, Meter, Peak, Work
from toolkit.sharding.fsdp import Sharded
from toolkit.training.flops import flops_per_token
from toolkit.training.loss import LossSum, take_loss_from
from toolkit.training.optim import build_optimizer
from toolkit.training.router import build_router
from toolkit.training.step import train_step

Device = str | torch.device
_SECTOR = 512  # bytes that CUDA's allocator rounds up to


class PlanningError(ToolkitError):
    """A run that cannot be planned."""


class _CompilationError(PlanningError):
    """A run that may be planned where its layers are not compiled."""


@dataclass(frozen=True)
class State:
    """Bytes of one rank between two steps."""

    parameters: int
    gradients: int
    """At the end of the backward."""
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Simulation:
    """What a step of one rank takes."""

    model: str
    values: int
    """Parameters of the model."""
    trained: int
    mesh: tuple[int, int]
    """dp_replicate x dp_shard."""
    state: State
    """Exact: the values of this rank's shards."""
    offloaded: int
    """Bytes of them, and of activations at most, in host memory."""
    peaks: dict[str, Peak]
    """Phase of the step -> its largest moment."""
    work: dict[str, Work]
    """Part of the step -> its operations and traffic; one micro-batch, and those of a step."""
    model_flops_per_token: float
    largest_tensor: int
    """Bytes of the largest parameter, whole, in its storage dtype."""
    checkpoint: int
    """Bytes of a checkpoint, of all ranks."""
    export: int
    notes: tuple[str, ...] = ()
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """As simulated, `auto` decided."""

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.nbytes)

    @property
    def phase(self) -> str:
        return max(self.peaks, key=lambda phase: self.peaks[phase].nbytes)


def simulate(
    cfg: RunConfig,
    world_size: int,
    *,
    rank: int = 0,
    device_type: str = "cuda",
    device_memory: int | None = None,
    gloo: bool = True,
) -> Simulation:
    """Return what `rank` of `world_size` takes for a step of `cfg`, without weights or a device.

    About 0.1 s a decoder layer, and 2 s a kind of layer where layers are compiled. `device_type`
    decides what settings on `auto` become, with `device_memory` where that says it; on CPUs `gloo`
    moves what is sent, through copies. PlanningError: the model's forward asks for values.
    """
    where = cfg, world_size, rank, device_type, device_memory, gloo
    try:
        return _simulated(*where, compiled=True)
    except _CompilationError as error:
        sim = _simulated(*where, compiled=False)
        note = (
            "layers could not be compiled without values, so they are planned as eager ones: "
            f"{one_line(error, 200)}"
        )
        return replace(sim, notes=(*sim.notes, note))


def _simulated(
    cfg: RunConfig,
    world_size: int,
    rank: int,
    device_type: str,
    device_memory: int | None,
    gloo: bool,
    compiled: bool,
) -> Simulation:
    """Return what `simulate` does; `compiled`: layers are, where the run's are."""
    backend = TRACED if compiled and cfg.sharding.torch_compile_backend == "inductor" else None
    where = cfg, world_size, rank, device_type, device_memory
    with sharded(*where, compile_by=backend) as (made, sharding):
        model = made.model
        base: Any = base_of(model)
        notes = _find_loss(base, model)
        facts: dict[str, Any] = {
            "model": model_class_name(base),
            "values": count_values(model),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "model_flops_per_token": flops_per_token(model, cfg.data.sequence_length),
            "largest_tensor": max(p.numel() * p.element_size() for p in model.parameters()),
            "checkpoint": checkpoint_bytes(model, world_size, cfg.optim),
            "export": export_bytes(model),
        }
        compiles = sharding.torch_compile == "layer"
        if compiled and cfg.sharding.torch_compile not in (False, "none", "auto") and not compiles:
            notes.append("what torch_compile saves is not planned: activations are eager ones")
        apart = sharding.cpu_offload and device_type != "cpu"  # there it is one memory
        absent = [PARAMETERS, GRADIENTS, STATE] if apart else []
        host = device_type == "cpu"
        objective = build(cfg, made.mesh, device_type)
        objective.shard_models()
        batch = objective.largest_batch(planned_packing(cfg, base))
        meter = Meter(absent, 1 if host else _SECTOR, gloo=gloo and host and world_size > 1)
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                padded = "attention_mask" in batch.inputs
                with meter.running(compiled=compiles), _silent(), _values_told(padded):
                    state = run_step(made, objective, meter, "cpu", batch)
            except ToolkitError:
                raise
            except Exception as error:  # an architecture may do anything on its way
                failed = _CompilationError if compiles else PlanningError
                raise failed(
                    f"a step of {model_class_name(base)} cannot be run without values: "
                    f"{one_line(error, 300)}"
                ) from error
        offloaded = state.total if apart else 0
        offloaded += max(peak.kinds.get("host", 0) for peak in meter.peaks.values())
        return Simulation(
            mesh=(made.mesh.axes[DP_REPLICATE], made.mesh.axes[DP_SHARD]),
            state=state,
            offloaded=offloaded,
            peaks=meter.peaks,
            work=meter.work,
            notes=tuple(notes),
            sharding=sharding,
            **facts,
        )


def _find_loss(base: Any, model: nn.Module) -> list[str]:
    """Find by a tiny copy what `model` makes of its logits; return what is to be said of it.
    A reward model makes none.
    """
    if reward_head(model) is not None:
        return []
    kinds = layer_kinds(base)
    why = "it has no decoder layers to look at"
    for small in shrunk_configs(base.config, kinds, None) if kinds else ():
        said = io.StringIO()
        try:
            tiny = build_meta_model(original_class(base), small).to_empty(device="cpu").eval()
            for parameter in tiny.parameters():
                nn.init.normal_(parameter, std=0.02)
            for buffer in tiny.buffers():
                buffer.zero_()
            with contextlib.redirect_stdout(said):
                take_loss_from(tiny, model)
        except Exception as error:  # the next, milder cut is to be tried
            why = one_line(error)
            continue
        return said.getvalue().split("\n")[:-1]
    raise PlanningError(f"{model_class_name(base)}: its loss cannot be tried on a tiny copy: {why}")


def state_of(cfg: RunConfig, world_size: int, rank: int) -> State:
    """Return the bytes that `rank` holds between two steps, without a step."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with sharded(cfg, world_size, rank, "cuda") as (made, _):
        model, objective = made.model, build(cfg, made.mesh)
        objective.shard_models()
        with fake, Meter().running():
            states = _filled(model, cfg, "cpu")[1]
            trained = [p for p in model.parameters() if p.requires_grad]
            parameters = _parameter_bytes(model, objective)
            return State(parameters, local_bytes(trained), local_bytes(states))


def _parameter_bytes(model: nn.Module, objective: Objective) -> int:
    """Return the bytes of this rank's shards, those of frozen models included."""
    models = (model, *(frozen.model for frozen in objective.frozen.values()))
    return sum(local_bytes(held.parameters()) for held in models)


def _filled(
    model: Any, cfg: RunConfig, device: Device
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Give a sharded model on meta its memory; return its optimizer, begun, and the state."""
    _materialise(model, device)
    optimizer = build_optimizer(model, cfg.optim)
    begin_state(optimizer)
    return optimizer, [t for s in optimizer.state.values() for t in s.values()]


def _materialise(model: Any, device: Device) -> None:
    """Allocate the parameters and buffers of a sharded model on meta, with small values."""
    for names in tied_families(model).values():
        reference = model.get_parameter(names[0])
        part = torch.zeros_like(local_tensor(reference), device=device)
        if part.is_floating_point():
            part.normal_(std=0.02)
        place_parameter(model, names, part, reference)
    for name, buffer in list(model.named_buffers()):
        put(model, name, torch.zeros_like(buffer, device=device))


def run_step(
    sharded: Sharded,
    objective: Objective,
    meter: Meter,
    device: Device,
    batch: Batch,
    *,
    around: Callable[[Callable[[], object]], object] = lambda step: step(),
) -> State:
    """Run a step of a sharded model on meta, with memory on `device`; see [Note: fake step].

    Args:
        batch: on the host, the micro-batch that every micro-batch of the step copies.
        around: calls the step, which it is given.
    """
    model, cfg = sharded.model, objective.cfg
    optimizer, states = _filled(model, cfg, device)
    for frozen in objective.frozen.values():
        _materialise(frozen.model, device)
    gradients = 0

    def before_step(*_: Any) -> None:
        nonlocal gradients
        # Twice where the optimizer's step calls that of its class.
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = local_bytes(found)
        meter.claim(found, GRADIENTS)
        meter.begin("optimizer step", "step")

    optimizer.register_step_pre_hook(before_step)
    model.train()
    accumulated, count = cfg.train.gradient_accumulation_steps, 0

    def measured(module: nn.Module, batch: Batch) -> LossSum:
        nonlocal count
        count += 1
        last = count == min(2, accumulated)
        meter.begin("forward", "last micro-batch" if last else "other micro-batches")
        out = objective(module, batch)
        meter.begin("backward")
        return out

    with _layers_told(model, meter):
        for held in (model, *(frozen.model for frozen in objective.frozen.values())):
            meter.claim(held.parameters(), PARAMETERS)
            meter.claim(held.buffers(), BUFFERS)
        meter.claim(states, STATE)
        batches = [batch.to(device, copy=True) for _ in range(min(2, accumulated))]
        meter.claim((tensor for copy in batches for tensor in copy.tensors()), BUFFERS)
        norm, router = cfg.optim.max_grad_norm, build_router(sharded, cfg)
        step = partial(train_step, max_grad_norm=norm, loss=measured, router=router)
        around(lambda: step(sharded, optimizer, batches))
    if accumulated > 1:
        meter.work["other micro-batches"] *= accumulated - 1
    return State(_parameter_bytes(model, objective), gradients, local_bytes(states))


def begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step makes, by a step on gradients of zeros."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of `tensors`."""
    parts = [local_tensor(t.detach()) for t in tensors]
    return sum(p.numel() * p.element_size() for p in parts)


@contextlib.contextmanager
def _values_told(padded: bool) -> Iterator[None]:
    """Let transformers build the attention mask that a run of such rows has.

    Without values it always builds a mask, which is right for `padded` rows. Of full rows it reads
    that they are not packed (`Meter` answers so), and builds none.
    """
    if padded:
        yield
        return
    transformers_private("masking_utils", "is_tracing")
    with mock.patch.object(masking_utils, "is_tracing", return_value=False):
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep back what torch logs of operations without values, whose error itself is told, and of
    compiling, which the run says again.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _layers_told(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Tell `meter` which decoder layer runs, forward and backward."""

    with contextlib.ExitStack() as hooks:
        for name, layer in decoder_layers(base_of(model)).items():
            # Not compiled, or each layer's name would make a graph of its own.
            @torch.compiler.disable
            def tell(*_: Any, name: str = name) -> None:
                meter.layer = name

            @torch.compiler.disable
            def after(_: nn.Module, __: Any, out: Any, tell: Callable = tell) -> None:
                first = out[0] if isinstance(out, tuple) else out
                if isinstance(first, torch.Tensor) and first.requires_grad:
                    first.register_hook(lambda _: tell())

            hooks.enter_context(layer.register_forward_pre_hook(tell))
            hooks.enter_context(layer.register_forward_hook(after))
        yield
