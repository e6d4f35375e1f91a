"""Apply FSDP2 to a Hugging Face causal LM by the plan of its units.

Only this file imports `torch.distributed.fsdp`.

[Note: casts] FSDP2 casts the inputs and outputs of a unit in hooks. Up to torch 2.12 it misses two
cases. In a unit of several modules only the first to run gets its inputs cast, and only the last
its output. A module that a recomputation calls from outside is not cast at all. Either way fp32
meets bf16 in the next product. Our own hooks cast in these cases; if FSDP2 has cast already, they
change nothing.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.config.settings import ShardingConfig
from toolkit.errors import ShardingError
from toolkit.formats import torch_private
from toolkit.mesh import Mesh
from toolkit.models.causal_lm import find_fp32_tensors
from toolkit.models.classes import build_from_config, original_class
from toolkit.models.expert_parallel import divide_experts
from toolkit.models.modes import forked_rng
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import base_of
from toolkit.sharding.accumulation import Accumulation, can_replicate_frozen
from toolkit.sharding.compiled import compile_forward, compile_options, should_compile_layers
from toolkit.sharding.host_memory import HostMemory
from toolkit.sharding.mlp_chunks import chunk_mlps, describe_mlp_chunks
from toolkit.sharding.recompute import recompute_in_backward
from toolkit.sharding.units import Unit, UnitPlan, frozen_parameters, is_inside, plan_units

_REDUCE_UNUSED = "set_reduce_scatter_unused_params"
_IDLE_EXPERTS = {"longcat_flash"}  # types whose tokens may skip all experts


class Prefetch:
    """Sets FSDP2's explicit prefetching, by the order in which units ran in the first forward.

    A unit is a module that `fully_shard` was applied to. The order in which modules are defined may
    be wrong: layers may run several times, be skipped, or belong to two interleaved stacks. A wrong
    order raises no error, but costs all-gathers and memory. A unit that runs more than once in a
    forward is not prefetched, because it has no unique successor.

    Args:
        root: the sharded model, on which hooks are registered.
        units: unit name -> its modules, for all units except the root.
        cfg: `forward_prefetch` and `backward_prefetch`, the numbers of units to gather ahead.
    """

    def __init__(self, root: nn.Module, units: dict[str, list[nn.Module]], cfg: ShardingConfig):
        self._root = root
        self._units = units
        self._depths = cfg.forward_prefetch, cfg.backward_prefetch
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.wired: dict[str, tuple[list[str], list[str]]] = {}
        """Unit -> units that it gathers ahead in the forward, and in the backward."""
        self._handles = [
            root.register_forward_pre_hook(self._begin),
            root.register_forward_hook(self._finish),
        ]
        for name, modules in units.items():
            begin = modules[0].register_forward_pre_hook(lambda *_, n=name: self.begun.append(n))
            end = modules[-1].register_forward_hook(lambda *_, n=name: self.ended.append(n))
            self._handles += [begin, end]

    def _begin(self, *_: Any) -> None:
        """Hook before a forward: clear the recorded order, as the last one may have ended early."""
        self.begun.clear()  # an earlier forward may have ended in an error
        self.ended.clear()

    def _finish(self, *_: Any) -> None:
        """Hook after the first complete forward: remove all hooks, and set the prefetches."""
        for handle in self._handles:
            handle.remove()
        self._set_prefetches(_drop_repeated(self.begun), _drop_repeated(self.ended))

    def _set_prefetches(self, begun: list[str], ended: list[str]) -> None:
        """Tell FSDP2 which units to gather while a unit runs, in the forward and in the backward.

        Also stores them in `wired`. The root counts as the first unit in both directions.

        Args:
            begun: names of units in the order in which their forward began.
            ended: names of units in the order in which their forward ended.
        """
        forward, backward = self._depths
        begun = ["", *begun]
        back = ["", *reversed(ended)]
        ahead = {name: begun[i + 1 : i + 1 + forward] for i, name in enumerate(begun)}
        behind = {name: back[i + 1 : i + 1 + backward] for i, name in enumerate(back)}
        for name in ahead:
            unit: Any = self._units[name][0] if name else self._root
            if forward:
                unit.set_modules_to_forward_prefetch([self._units[n][0] for n in ahead[name]])
            if backward:
                unit.set_modules_to_backward_prefetch([self._units[n][0] for n in behind[name]])
            self.wired[name] = ahead[name], behind.get(name, [])


def _drop_repeated(order: list[str]) -> list[str]:
    """Return the names that appear exactly once in `order`, in their order."""
    return [name for name in order if order.count(name) == 1]


@dataclass(frozen=True, eq=False)
class Sharded:
    """Result of `apply_fsdp`: the model, sharded in place, and objects that control its units."""

    model: nn.Module
    mesh: Mesh
    plan: UnitPlan
    """The units that were sharded."""
    accumulation: Accumulation
    """Sets the units for each micro-batch of a step."""
    prefetch: Prefetch | None = None
    """Gathers units ahead, if the settings turn it on."""
    home: torch.device | None = None
    """The CPU if `cpu_offload` keeps parameters there; None: the device that computes."""
    auto_line: str = ""
    """The values chosen for settings on `auto`, and the reasons."""
    mlp_line: str = ""
    """Which MLPs run in chunks of tokens; empty if none do."""


@ranks.collective
def apply_fsdp(
    model: nn.Module, mesh: Mesh, cfg: ShardingConfig, *, fixed_length: bool = False
) -> Sharded:
    """Shard `model` in place with FSDP2: inner modules first, then the root with the remainder.

    Every parameter becomes a DTensor sharded over dim 0, in its storage dtype, except replicated
    ones (see `units`). On a meta model nothing is allocated. Recomputation is applied first, then
    compilation, then sharding. Gradients are summed over ranks, not averaged. Build the optimizer
    afterwards. Collective. See PyTorch's `torch.distributed.fsdp.fully_shard`.

    Args:
        model: on meta or with values, with or without adapters, and not sharded yet.
        mesh: the device mesh of all ranks.
        cfg: the sharding settings of the run.
        fixed_length: True if all samples have one length. `torch_compile: auto` compiles only then,
            and only if `model.kernels` is `none`.

    Raises:
        ShardingError: the model is sharded, nothing can be sharded, or settings contradict each
            other.
        ModelError: a pattern in the settings matches no module or parameter.
    """
    if isinstance(model, FSDPModule):
        raise ShardingError("the model is sharded already; build it again to shard it differently")
    _refuse_idle_experts(model, mesh.size)
    requested = cfg
    device_type = mesh.device_type
    shards = mesh.shards
    cfg = dataclasses.replace(cfg, embedding_units=should_split_embeddings(model, cfg, device_type))
    replicated, frozen_why = should_replicate_frozen(model, cfg, shards, device_type)
    cfg = dataclasses.replace(cfg, frozen="replicated" if replicated else "sharded")
    if cfg.expert_parallel > 1:
        assert mesh.expert_mesh is not None
        divide_experts(model, mesh.expert_mesh)
    plan = plan_units(model, cfg)
    _refuse_unsupported_dtypes(model, plan, cfg)
    _cast_buffers(base_of(model), getattr(torch, cfg.param_dtype))
    chunked = chunk_mlps(model, plan.layers, cfg)
    recomputed = _apply_recomputation(model, plan, cfg)
    assets = getattr(base_of(model), "hf_assets", None)
    own_kernels = assets is not None and assets.kernels != "none"
    compiled, compile_why = should_compile_layers(plan, cfg, device_type, fixed_length, own_kernels)
    if compiled:
        for name in plan.layers:
            compile_forward(model.get_submodule(name), **compile_options(cfg))
    for unit in plan.units:
        unit_mesh = mesh.expert_fsdp if unit.has_experts else mesh.fsdp
        modules = _shard_unit(model, unit, unit_mesh, cfg, _reshard_argument(unit, shards))
        is_recomputed = any(is_inside(name, recomputed) for name in unit.modules)
        if _casts_inputs(unit) and (len(modules) > 1 or is_recomputed):
            _add_cast_hooks(modules, unit)
        _reduce_unused_parameters(modules[0], unit, plan)
    if cfg.torch_compile == "model":
        compile_forward(model, **compile_options(cfg))
    unsharded = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    if forgotten := sorted(set(unsharded) - set(plan.replicated)):
        listed = ", ".join(forgotten[:5])
        raise ShardingError(f"{len(forgotten)} parameter(s) were not sharded: {listed}")
    chosen = (
        ("embedding_units", str(cfg.embedding_units).lower(), device_type),
        ("torch_compile", "layer" if compiled else "none", compile_why),
        ("frozen", cfg.frozen, frozen_why),
    )
    autos = [c for c in chosen if getattr(requested, c[0]) == "auto" and c[2]]
    prefetch = None
    if cfg.forward_prefetch or cfg.backward_prefetch:
        units = {u.name: [model.get_submodule(m) for m in u.modules] for u in plan.units[:-1]}
        prefetch = Prefetch(model, units, cfg)
    return Sharded(
        model,
        mesh,
        plan,
        Accumulation(model, cfg),
        prefetch,
        torch.device("cpu") if cfg.cpu_offload else None,
        ", ".join(f"{name} {kind} ({why})" for name, kind, why in autos),
        describe_mlp_chunks(chunked, len(plan.layers), cfg.mlp_chunk_tokens),
    )


def _shard_unit(
    model: nn.Module,
    unit: Unit,
    mesh: DeviceMesh,
    cfg: ShardingConfig,
    reshard_after_forward: bool | int | None,
) -> list[nn.Module]:
    """Apply `fully_shard` to the modules of one unit, and return these modules.

    Args:
        model: the model.
        unit: the unit to shard.
        mesh: the mesh over which parameters are sharded.
        cfg: the sharding settings.
        reshard_after_forward: as `fully_shard` takes it.
    """
    modules = [model.get_submodule(name) for name in unit.modules]
    unit_parameters = {model.get_parameter(name) for name in unit.parameters}
    inside = {p for module in modules for p in module.parameters()}
    ignored = {p for p in inside if p not in unit_parameters and not isinstance(p, DTensor)}
    fully_shard(
        modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=unit.param_dtype,
            reduce_dtype=getattr(torch, cfg.reduce_dtype),
            output_dtype=unit.output_dtype,
            cast_forward_inputs=_casts_inputs(unit),
        ),
        offload_policy=build_offload_policy(cfg, mesh.device_type),
        ignored_params=ignored or None,
    )
    if mesh.size() > 1:  # on one rank the factor would only cost a copy of the gradient
        _sum_gradients(modules[0])
    return modules


def _reduce_unused_parameters(module: nn.Module, unit: Unit, plan: UnitPlan) -> None:
    """Make a unit in the decoder layers reduce zeros for parameters that a rank did not use.

    A rank whose tokens reached no expert must reduce zeros, not a smaller buffer. Outside the
    layers, a parameter that no rank uses (a tower's embedding) must get no gradient, or AdamW would
    decay it. Does nothing before torch 2.13.
    """
    outer = tuple(name + "." if name else "" for name in unit.modules)
    around_layers = any(layer.startswith(outer) for layer in plan.layers)
    if not around_layers and hasattr(FSDPModule, _REDUCE_UNUSED):
        cast(Any, module).set_reduce_scatter_unused_params(True, recurse=False)


def _casts_inputs(unit: Unit) -> bool:
    """Decide whether the inputs of a unit are cast to its compute dtype.

    Divided experts get hidden states in that dtype from their layer, unless they have a dtype of
    their own. Their routing weights stay in the router's dtype, as in an undivided layer.
    """
    return not unit.has_experts or unit.output_dtype is not None


def _sum_gradients(unit: Any) -> None:
    """Make FSDP2 sum the gradients of a unit over the ranks instead of averaging them.

    The loss of a step is a sum over ranks. FSDP2 divides by the number of ranks in the unit's mesh,
    which would be wrong if two units had meshes of different sizes.
    """
    unit.set_gradient_divide_factor(1.0)
    # By default a custom factor is multiplied inside the collective, which gloo cannot do. A sum
    # without a factor works on every backend.
    unit.set_force_sum_reduction_for_comms(True)


def build_offload_policy(cfg: ShardingConfig, device_type: str) -> OffloadPolicy:
    """Build FSDP2's offload policy from `cpu_offload`; pin memory unless the device is a CPU."""
    if not cfg.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def _cast_buffers(model: Any, dtype: torch.dtype) -> None:
    """Cast non-persistent floating-point buffers in place, as if the model was built in `dtype`.

    FSDP2 casts parameters and inputs, but not buffers, and a layer that multiplies a float32 buffer
    with a bfloat16 tensor fails. Buffers that transformers keeps in float32 are not changed.
    """
    if not hasattr(model, "hf_assets") or dtype == model.dtype:
        return
    with torch.device("meta"), forked_rng():
        like = build_from_config(original_class(model), model.config, dtype)
    expected = dict(like.named_buffers())
    fp32_buffers = find_fp32_tensors(like, buffers=True)
    saved = model.state_dict().keys() | fp32_buffers.keys()
    for name, buffer in list(model.named_buffers()):
        other = expected.get(name)
        if name not in saved and other is not None and other.dtype == dtype != buffer.dtype:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = buffer.to(dtype)


def _refuse_idle_experts(model: nn.Module, ranks: int) -> None:
    """Refuse models whose tokens may skip all experts, if this torch does not support it.

    Only from torch 2.13 on does FSDP2 reduce gradients of parameters that a rank did not use.

    Raises:
        ShardingError: the model's type is in `_IDLE_EXPERTS`, there are several ranks, and torch is
            older.
    """
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind in _IDLE_EXPERTS and ranks > 1 and not hasattr(FSDPModule, _REDUCE_UNUSED):
        raise ShardingError(
            f"{kind} sends tokens past its experts: a rank may use none, which needs torch 2.13; "
            f"this is {torch.__version__}"
        )


def _refuse_unsupported_dtypes(model: nn.Module, plan: UnitPlan, cfg: ShardingConfig) -> None:
    """Raise a ShardingError for float16, and for units with trained parameters of several dtypes.

    It is also raised for packed weights that their unit would cast to another dtype.
    """
    if {"float16"} & {cfg.param_dtype, cfg.reduce_dtype, *cfg.param_dtype_overrides.values()}:
        raise ShardingError(
            "float16 needs loss scaling, which this toolkit does not implement; use bfloat16"
        )
    parameters = dict(model.named_parameters())
    packed = packed_weights(model)
    for unit in plan.units:
        stored: dict[torch.dtype, str] = {}
        for name in unit.parameters:
            if name in packed and parameters[name].dtype != unit.param_dtype:
                raise ShardingError(
                    f"{name} is stored in {packed[name].quant_type} for {parameters[name].dtype}, "
                    f"which the unit {unit.name} would cast to {unit.param_dtype}: pass that dtype "
                    "to prepare_adapters, and remove such layers from "
                    "sharding.param_dtype_overrides"
                )
            # Frozen parameters are not reduced, so they may have another dtype.
            if parameters[name].requires_grad:
                stored.setdefault(parameters[name].dtype, name)
        # FSDP2 would raise at the first forward, after the model is loaded.
        if len(stored) > 1:
            listed = ", ".join(f"{dtype} ({name})" for dtype, name in stored.items())
            raise ShardingError(
                f"parameters of several storage dtypes cannot share the unit {unit.name}: "
                f"{listed}; set model.dtype: float32"
            )


def _apply_recomputation(model: nn.Module, plan: UnitPlan, cfg: ShardingConfig) -> list[str]:
    """Apply activation checkpointing to the layers in place, as the settings require.

    If the setting is a number n, every n-th layer is recomputed.

    Returns:
        Names of the layers that are recomputed in the backward.

    Raises:
        ShardingError: `activation_checkpointing` is still `auto`.
    """
    mode: Any = cfg.activation_checkpointing
    if mode is False or mode == "none":
        return []
    if mode == "auto":
        raise ShardingError(
            "sharding.activation_checkpointing: auto is decided by planning.resolve_auto, as the "
            "recipes do; call it before, or set none, selective or full"
        )
    # Of nested layers (sharding.layer_classes) the outer one recomputes the inner one too.
    every = mode if isinstance(mode, int) and not isinstance(mode, bool) else 1
    names = [n for n in plan.layers if not is_inside(n, plan.layers)][::every]
    host = HostMemory(pin=torch.accelerator.is_available()) if cfg.activation_offload else None
    for name in names:
        # The backward begins with the last layer, so its tensors would be copied back at once.
        layer_host = host if name != names[-1] or len(names) == 1 else None
        module = model.get_submodule(name)
        recompute_in_backward(module, name=name, selective=mode == "selective", host=layer_host)
    return names


def should_split_embeddings(model: nn.Module, cfg: ShardingConfig, device_type: str) -> bool:
    """Decide whether the embedding and the head become separate FSDP2 units.

    Otherwise they belong to the root, so both are gathered before anything runs and reduced after
    everything. `auto` splits them on accelerators, unless they are tied, because a tied pair is one
    matrix.
    """
    if cfg.embedding_units != "auto":
        return cfg.embedding_units
    base = base_of(model)
    if device_type == "cpu" or not isinstance(base, PreTrainedModel):
        return False
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    weights = [getattr(end, "weight", None) for end in ends]
    return weights[0] is not weights[1]


def should_replicate_frozen(
    model: nn.Module,
    cfg: ShardingConfig,
    shards: int,
    device_type: str,
    free: float | None = None,
) -> tuple[bool, str]:
    """Decide whether every rank holds a complete copy of the frozen parameters.

    `frozen: auto` allows it on accelerators without `cpu_offload` if the parameters are stored in
    their compute dtype and the copies fit into the memory.

    Args:
        model: the model, not yet sharded.
        cfg: the sharding settings.
        shards: number of ranks over which each parameter is split.
        device_type: type of the run's devices.
        free: free bytes of each device. None: measure them, which is collective.

    Returns:
        The decision, and its reason. The reason is empty if the settings fix the decision, or if
        nothing is frozen.

    Raises:
        ShardingError: `frozen: replicated` is set, but a frozen parameter is stored in another
            dtype than it computes in.
    """
    frozen = frozen_parameters(model)
    if cfg.frozen == "sharded" or not frozen:
        return False, ""
    if cfg.frozen == "auto" and cfg.expert_parallel > 1:
        return False, "expert_parallel"
    if cfg.frozen == "auto" and (cfg.cpu_offload or device_type == "cpu"):
        return False, "cpu_offload" if cfg.cpu_offload else device_type
    # FSDP2 casts gathered parameters only. A replicated one must be stored in its compute dtype.
    parameters = dict(model.named_parameters())
    units = plan_units(model, dataclasses.replace(cfg, frozen="sharded")).units
    frozen_ids = set(map(id, frozen))
    stored = ((n, parameters[n], u.param_dtype) for u in units for n in u.parameters)
    for name, parameter, dtype in stored:
        if id(parameter) in frozen_ids and parameter.dtype != dtype:
            why = f"{name} is stored in {parameter.dtype} and computes in {dtype}"
            if cfg.frozen == "replicated":
                raise ShardingError(
                    f"sharding.frozen: replicated: {why}, a cast that only gathering makes; set "
                    "model.dtype to sharding.param_dtype, or sharding.frozen: sharded"
                )
            return False, why
    if cfg.frozen == "replicated":
        return True, ""
    return can_replicate_frozen(frozen, shards, device_type, free)


def _reshard_argument(unit: Unit, shards: int) -> bool | int | None:
    """Convert a unit's `reshard_after_forward` to the argument that `fully_shard` expects.

    1 becomes False, and a number equal to `shards` becomes True. Other values are not changed.
    """
    value = unit.reshard_after_forward
    if isinstance(value, bool) or value not in (1, shards):
        return value
    # PyTorch treats 1 as False, with a warning.
    return value != 1


def _add_cast_hooks(modules: list[nn.Module], unit: Unit) -> None:
    """Register hooks that cast the inputs and the output of each module of a unit to its dtypes.

    See [Note: casts].
    """
    to_tensors = torch_private("distributed.utils", "_apply_to_tensors")  # FSDP2 casts with it

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        return to_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    # FSDP2's own hooks are not compiled either, and a compiled layer stays one graph.
    @torch.compiler.disable
    def inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args, unit.param_dtype), cast(kwargs, unit.param_dtype)

    @torch.compiler.disable
    def output(_: nn.Module, args: Any, out: Any) -> Any:
        return cast(out, unit.output_dtype)

    for module in modules:
        module.register_forward_pre_hook(inputs, with_kwargs=True)
        if unit.output_dtype is not None:
            module.register_forward_hook(output)
