"""Simulate a step of a run without its bytes: the real `train_step` as one rank, on fake tensors.

Model, FSDP2, loss and optimizer are the run's own; the process group does not exist.

[Note: fake step] FSDP2 issues, waits for and frees everything in the same order on a CPU mesh as on
GPUs, and fake tensors have shapes, dtypes and storages. So what is gathered, kept, recomputed and
reduced at a time is not modelled here: it happens. Missing are the memory inside of kernels and the
fragments of the allocator.

[Note: compiled layers] If the run compiles its layers, so does the plan: Dynamo, AOTAutograd and
the partitioner are those of inductor, but the operations of the graphs run one by one. So a layer
keeps for its backward what it keeps in the run, and values that inductor would fuse away count for
a moment.
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

from toolkit.checkpoint.disk_space import estimate_checkpoint_bytes, estimate_export_bytes
from toolkit.config.settings import RunConfig, ShardingConfig
from toolkit.data.samples.batch import Batch
from toolkit.errors import ToolkitError, one_line
from toolkit.formats import local_tensor, transformers_private
from toolkit.loading.materialisation import place_parameter, set_tensor
from toolkit.mesh import DP_REPLICATE, DP_SHARD
from toolkit.models.classes import model_class_name, original_class
from toolkit.models.expert_parallel import even_dispatch
from toolkit.models.layers import decoder_layers, tied_families
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of
from toolkit.models.reward import reward_head
from toolkit.models.tiny_copy import build_meta_model, describe_layer_kinds, shrunk_configs
from toolkit.objectives import Objective, build
from toolkit.planning.fake_ranks import TRACED, attend_as_run, sharded
from toolkit.planning.meter import BUFFERS, GRADIENTS, PARAMETERS, STATE, Meter, Peak, Work
from toolkit.sharding.fsdp import Sharded
from toolkit.tables import size_text
from toolkit.training.flops import flops_per_token
from toolkit.training.loss import LossSum, probe_loss_on_copy
from toolkit.training.optim import build_optimizer
from toolkit.training.router import build_router
from toolkit.training.step import train_step

Device = str | torch.device
_ALLOCATION_BYTES = 512  # CUDA's allocator rounds up to multiples of it
# A longer accumulation repeats the first of them.
_MAX_MICRO_BATCHES = 2


class PlanningError(ToolkitError):
    """A run cannot be planned."""


class _CompilationError(PlanningError):
    """A run cannot be planned with compiled layers. It may be planned without compilation."""


@dataclass(frozen=True)
class State:
    """Bytes of parameters, gradients and optimizer state that one rank holds in a step."""

    parameters: int
    """Bytes after the step, including those of frozen models."""
    gradients: int
    """Bytes after the backward, because the end of the step deletes gradients."""
    optimizer: int
    """Bytes after the step."""

    @property
    def total(self) -> int:
        """The sum of the three, in bytes."""
        return self.parameters + self.gradients + self.optimizer


REFERENCE_PASS = "reference pass"
"""Phase before the first step, in which another reference is next to the model."""


@dataclass(frozen=True)
class Simulation:
    """Memory, operations and traffic of one simulated step of one rank."""

    model: str
    """Class of the model."""
    values: int
    """Number of the model's parameters."""
    trained: int
    """Number of the parameters that are trained."""
    mesh: tuple[int, int]
    """(dp_replicate, dp_shard)."""
    state: State
    """Exact bytes of this rank's shards."""
    offloaded: int
    """Bytes in host memory: offloaded state and, at their peak, offloaded activations."""
    peaks: dict[str, Peak]
    """Phase of the step -> its peak."""
    work: dict[str, Work]
    """Part of the step -> its operations and traffic. The parts are the last micro-batch, the other
    micro-batches together, and the optimizer's step."""
    model_flops_per_token: float
    largest_tensor: int
    """Bytes of the largest parameter, unsharded, in its storage dtype."""
    checkpoint: int
    """Bytes of a checkpoint, of all ranks."""
    export: int
    """Bytes of an export."""
    notes: tuple[str, ...] = ()
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """The sharding settings of the simulation, with `auto` decided."""

    @property
    def peak(self) -> Peak:
        """The largest of the peaks of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.nbytes)

    @property
    def phase(self) -> str:
        """Name of the phase with the largest peak."""
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
    """Simulate a step of one rank, without weights and without a device.

    If compiled layers cannot be simulated, they are simulated without compilation, and a note says
    so. Takes about 0.1 s per decoder layer, or 2 s per kind of layer if layers are compiled.
    Creates a fake process group.

    Args:
        cfg: the settings of the run.
        world_size: the number of ranks.
        rank: the rank to simulate.
        device_type: type of the run's devices; decides settings that are `auto`.
        device_memory: bytes of each device; decides settings that are `auto`. None: unlimited.
        gloo: on CPUs, count the copies that gloo makes of tensors that it reduces.

    Raises:
        PlanningError: the model's forward needs the values of tensors.
    """
    try:
        return _simulate(cfg, world_size, rank, device_type, device_memory, gloo, compiled=True)
    except _CompilationError as error:
        sim = _simulate(cfg, world_size, rank, device_type, device_memory, gloo, compiled=False)
        note = (
            "layers could not be compiled without values, so they are planned as eager ones: "
            f"{one_line(error, 200)}"
        )
        return replace(sim, notes=(*sim.notes, note))


def _simulate(
    cfg: RunConfig,
    world_size: int,
    rank: int,
    device_type: str,
    device_memory: int | None,
    gloo: bool,
    compiled: bool,
) -> Simulation:
    """Simulate a step once; see `simulate`.

    If `compiled` is True, the layers that the run compiles are compiled. If it is False, none are.

    Raises:
        PlanningError: the step cannot run without values.
        _CompilationError: the step cannot run without values, and its layers are compiled.
    """
    backend = TRACED if compiled and cfg.sharding.torch_compile_backend == "inductor" else None
    on_host = device_type == "cpu"
    with sharded(cfg, world_size, rank, device_type, device_memory, compile_by=backend) as (
        sharded_model,
        sharding,
    ):
        model = sharded_model.model
        base: Any = base_of(model)
        notes = _probe_loss(base, model)
        # Computed while the model is on meta, because the step replaces its tensors.
        facts = _describe_model(model, base, cfg, world_size)
        is_compiled = sharding.torch_compile == "layer"
        notes += _list_unplanned_settings(cfg, eager=compiled and not is_compiled)
        # On a CPU, device and host share one memory.
        is_offloaded = sharding.cpu_offload and not on_host
        absent = [PARAMETERS, GRADIENTS, STATE] if is_offloaded else []
        objective = build(cfg, sharded_model.mesh, device_type)
        objective.shard_models()
        for frozen in objective.frozen.values():
            notes += _probe_loss(frozen.model, frozen.model)
        temporary_models = objective.shard_temporary_models()
        choice = attend_as_run(cfg, sharded_model, planned_on=device_type)
        batch = objective.largest_batch(choice)
        granularity = 1 if on_host else _ALLOCATION_BYTES
        meter = Meter(absent, granularity, gloo=gloo and on_host and world_size > 1)
        has_mask = "attention_mask" in batch.inputs
        with FakeTensorMode(allow_non_fake_inputs=True):
            try:
                with (
                    meter.running(compiled=is_compiled),
                    _suppress_logs(),
                    _use_run_masks(has_mask),
                ):
                    state = allocate_and_run_step(sharded_model, objective, meter, "cpu", batch)
            except ToolkitError:
                raise
            except Exception as error:  # the model's code may do anything
                error_class = _CompilationError if is_compiled else PlanningError
                raise error_class(
                    f"a step of {model_class_name(base)} cannot be run without values: "
                    f"{one_line(error, 300)}"
                ) from error
        peaks = dict(meter.peaks)
        if temporary := sum(local_bytes(m.model.parameters()) for m in temporary_models):
            if not is_offloaded:
                peaks[REFERENCE_PASS] = _reference_pass_peak(peaks["forward"], temporary)
            notes.append(
                f"before the first step, a reference of {size_text(temporary)} on this rank is "
                "next to the model"
            )
        host_activations = max(peak.kinds.get("host", 0) for peak in meter.peaks.values())
        return Simulation(
            **facts,
            mesh=(sharded_model.mesh.axes[DP_REPLICATE], sharded_model.mesh.axes[DP_SHARD]),
            state=state,
            offloaded=host_activations + (state.total if is_offloaded else 0),
            peaks=peaks,
            work=meter.work,
            notes=tuple(notes),
            sharding=sharding,
        )


def _list_unplanned_settings(cfg: RunConfig, *, eager: bool) -> list[str]:
    """List notes for settings whose effect is not planned.

    Args:
        cfg: settings of the run.
        eager: whether layers that may be compiled are simulated without compilation.
    """
    notes = []
    if eager and cfg.sharding.torch_compile not in (False, "none", "auto"):
        notes.append("what torch_compile saves is not planned: activations are eager ones")
    if cfg.torchao_recipe != "none":
        notes.append("model.float8 is not planned: time and gathered weights are of bfloat16")
    elif cfg.model.float8 != "none":
        notes.append("products in float8 are planned with the time of products in bfloat16")
    if cfg.sharding.expert_parallel > 1:
        notes.append(
            "sharding.expert_parallel is planned with even loads: a rank whose experts get more "
            "tokens than the mean needs more memory and time"
        )
    return notes


def _describe_model(model: nn.Module, base: Any, cfg: RunConfig, world_size: int) -> dict[str, Any]:
    """Compute the fields of a `Simulation` that depend on the model alone; it is on meta.

    Args:
        model: the sharded model, with adapters if the run has them.
        base: the model without adapters.
        cfg: settings of the run.
        world_size: number of ranks.
    """
    return {
        "model": model_class_name(base),
        "values": count_values(model),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "model_flops_per_token": flops_per_token(model, cfg.data.sequence_length),
        "largest_tensor": max(p.numel() * p.element_size() for p in model.parameters()),
        "checkpoint": estimate_checkpoint_bytes(model, world_size, cfg.optim),
        "export": estimate_export_bytes(model),
    }


def _reference_pass_peak(forward: Peak, temporary: int) -> Peak:
    """Estimate the peak of a pass with a second model before the first step, from a forward.

    The optimizer has no state yet. The pass stores no activations, so the forward of a training
    step is an upper limit of its working memory if both models have layers of one size.

    Args:
        forward: the peak of the forward of a step.
        temporary: bytes of the second model's shards on this rank.
    """
    bytes_by_kind = {kind: n for kind, n in forward.kinds.items() if kind not in (STATE, GRADIENTS)}
    bytes_by_kind[PARAMETERS] = bytes_by_kind.get(PARAMETERS, 0) + temporary
    absent = sum(forward.kinds.get(kind, 0) for kind in (STATE, GRADIENTS))
    return Peak(forward.nbytes - absent + temporary, forward.working, bytes_by_kind, forward.layer)


def _probe_loss(base: Any, model: nn.Module) -> list[str]:
    """Run a tiny copy of a model to find out how the model computes its logits.

    The result is stored on `model`, and the loss reads it there. Nothing is done for a reward
    model, which has no logits of tokens.

    Args:
        base: the base model, without adapters.
        model: the model of the run, on meta.

    Returns:
        Notes for the user; often empty.

    Raises:
        PlanningError: no tiny copy can compute its loss.
    """
    if reward_head(model) is not None:
        return []
    kinds = describe_layer_kinds(base)
    reason = "it has no decoder layers"
    for config in shrunk_configs(base.config, kinds, None) if kinds else ():
        output = io.StringIO()
        try:
            tiny = build_meta_model(original_class(base), config).to_empty(device="cpu").eval()
            for parameter in tiny.parameters():
                nn.init.normal_(parameter, std=0.02)
            for buffer in tiny.buffers():
                buffer.zero_()
            with contextlib.redirect_stdout(output):
                probe_loss_on_copy(tiny, model)
        except Exception as error:  # the next config is closer to the real one
            reason = one_line(error)
            continue
        return output.getvalue().split("\n")[:-1]
    raise PlanningError(
        f"{model_class_name(base)}: its loss cannot be tried on a tiny copy: {reason}"
    )


def state_of(cfg: RunConfig, world_size: int, rank: int) -> State:
    """Count the bytes that a rank on GPUs holds between two steps, without running a step.

    Gradients count, although a step deletes them at its end.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with sharded(cfg, world_size, rank, "cuda") as (sharded_model, _):
        model = sharded_model.model
        objective = build(cfg, sharded_model.mesh)
        objective.shard_models()
        models = (model, *(frozen.model for frozen in objective.frozen.values()))
        with fake, Meter().running():
            _, state = materialise_run(model, cfg, "cpu")
            trained = [p for p in model.parameters() if p.requires_grad]
            parameter_bytes = sum(local_bytes(m.parameters()) for m in models)
            return State(parameter_bytes, local_bytes(trained), local_bytes(state))


def materialise_run(
    model: Any, cfg: RunConfig, device: Device
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Allocate a sharded meta model with small random values, and build its optimizer with state.

    Returns:
        The optimizer, and the tensors of its state.
    """
    _materialise_model(model, device)
    optimizer = build_optimizer(model, cfg.optim)
    create_optimizer_state(optimizer)
    return optimizer, [t for state in optimizer.state.values() for t in state.values()]


def _materialise_model(model: Any, device: Device) -> None:
    """Allocate a sharded meta model: small random values for parameters, zeros for buffers."""
    for names in tied_families(model).values():
        reference = model.get_parameter(names[0])
        shard = torch.zeros_like(local_tensor(reference), device=device)
        if shard.is_floating_point():
            shard.normal_(std=0.02)
        place_parameter(model, names, shard, reference)
    for name, buffer in list(model.named_buffers()):
        set_tensor(model, name, torch.zeros_like(buffer, device=device))


def allocate_and_run_step(
    sharded: Sharded,
    objective: Objective,
    meter: Meter,
    device: Device,
    batch: Batch,
    *,
    around: Callable[[Callable[[], object]], object] = lambda step: step(),
) -> State:
    """Allocate a sharded meta model and its optimizer, and run a training step on them.

    `simulate` calls it with fake tensors (see [Note: fake step]), `measure` with real ones. It runs
    at most two micro-batches. The work of the remaining ones is added to `meter`.

    Args:
        sharded: the model.
        objective: computes the loss; its frozen models are allocated, too.
        meter: learns the phases of the step, and which tensors are parameters, gradients and so on.
        device: the device on which memory is allocated.
        batch: a batch on the host; every micro-batch of the step is a copy of it.
        around: called with a function that runs the step; it may call that function several times.

    Returns:
        Bytes of parameters and optimizer state after the step, and of gradients before the
        optimizer's step.
    """
    model = sharded.model
    cfg = objective.cfg
    optimizer, state = materialise_run(model, cfg, device)
    frozen_models = [frozen.model for frozen in objective.frozen.values()]
    for frozen_model in frozen_models:
        _materialise_model(frozen_model, device)
    gradient_bytes = 0

    # Runs twice if the optimizer's step calls that of its base class.
    def before_optimizer_step(*_: Any) -> None:
        nonlocal gradient_bytes
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        gradient_bytes = local_bytes(gradients)
        meter.claim(gradients, GRADIENTS)
        meter.begin("optimizer step", "step")

    optimizer.register_step_pre_hook(before_optimizer_step)
    model.train()
    accumulation = cfg.train.gradient_accumulation_steps
    simulated = min(_MAX_MICRO_BATCHES, accumulation)
    forward_count = 0

    def compute_loss(module: nn.Module, batch: Batch) -> LossSum:
        nonlocal forward_count
        forward_count += 1
        is_last = forward_count == simulated
        meter.begin("forward", "last micro-batch" if is_last else "other micro-batches")
        loss = objective(module, batch)
        meter.begin("backward")
        return loss

    with _follow_layers(model, meter):
        for allocated in (model, *frozen_models):
            meter.claim(allocated.parameters(), PARAMETERS)
            meter.claim(allocated.buffers(), BUFFERS)
        meter.claim(state, STATE)
        batches = [batch.to(device, copy=True) for _ in range(simulated)]
        meter.claim((tensor for copy in batches for tensor in copy.tensors()), BUFFERS)
        step = partial(
            train_step,
            max_grad_norm=cfg.optim.max_grad_norm,
            loss=compute_loss,
            router=build_router(sharded, cfg),
        )
        # Ranks that do not exist send no tokens to experts.
        divides_experts = cfg.sharding.expert_parallel > 1
        with even_dispatch() if divides_experts else contextlib.nullcontext():
            around(lambda: step(sharded, optimizer, batches))
    if accumulation > 1:
        meter.work["other micro-batches"] *= accumulation - 1
    parameter_bytes = sum(local_bytes(m.parameters()) for m in (model, *frozen_models))
    return State(parameter_bytes, gradient_bytes, local_bytes(state))


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state by a step on zero gradients, then remove the gradients.

    The step may change the parameters, for example by weight decay.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of this rank's shards of the tensors."""
    shards = [local_tensor(t.detach()) for t in tensors]
    return sum(t.numel() * t.element_size() for t in shards)


@contextlib.contextmanager
def _use_run_masks(has_mask: bool) -> Iterator[None]:
    """Within the context, make transformers build the attention masks that the real run builds.

    With fake tensors transformers always builds a mask. That is right for padded rows (`has_mask`).
    For full rows the real run reads from the tensors that they are not packed, and builds no mask,
    so transformers is patched to do the same.
    """
    if has_mask:
        yield
        return
    transformers_private("masking_utils", "is_tracing")
    with mock.patch.object(masking_utils, "is_tracing", return_value=False):
        yield


@contextlib.contextmanager
def _suppress_logs() -> Iterator[None]:
    """Within the context, suppress warnings and torch's logs up to the level ERROR.

    Nothing is lost: an operation that needs values raises an error, and the run logs its
    compilation itself.
    """
    disabled_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled_level)


@contextlib.contextmanager
def _follow_layers(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Within the context, keep `meter.layer` at the decoder layer that ran last."""
    with contextlib.ExitStack() as hooks:
        for name, layer in decoder_layers(base_of(model)).items():
            # Not compiled, because each layer's name would make a separate graph.
            @torch.compiler.disable
            def set_layer(*_: Any, name: str = name) -> None:
                meter.layer = name

            @torch.compiler.disable
            def follow_backward(
                _: nn.Module, __: Any, out: Any, set_layer: Callable = set_layer
            ) -> None:
                hidden = out[0] if isinstance(out, tuple) else out
                if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                    hidden.register_hook(lambda _: set_layer())

            hooks.enter_context(layer.register_forward_pre_hook(set_layer))
            hooks.enter_context(layer.register_forward_hook(follow_backward))
        yield
